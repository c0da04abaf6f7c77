//! Keys, and the encoding of small rows.

use super::super::{QueueNumber, QueueRow};
use super::view::Cursor;
use ringmain::QueueSettings;
use serde::{Deserialize, Serialize};

pub(super) const META_FORMAT: &[u8] = b"meta/format";
pub(super) const META_ROUND: &[u8] = b"meta/round";
pub(super) const META_SESSIONS: &[u8] = b"meta/sessions";
pub(super) const META_QUEUES: &[u8] = b"meta/queues";
pub(super) const QUEUE_ROWS: &[u8] = b"queue/";
const CURSOR_ROWS: &[u8] = b"cursor/";

/// The key of a block, and of its marks.
pub(super) fn block_key(queue: QueueNumber, first: u64) -> [u8; 12] {
    let mut key = [0; 12];
    key[..4].copy_from_slice(&queue.to_be_bytes());
    key[4..].copy_from_slice(&first.to_be_bytes());
    key
}

/// A key behind all blocks of a queue, and before those of the next.
pub(super) fn blocks_end(queue: QueueNumber) -> [u8; 13] {
    let mut key = [0; 13];
    key[..12].copy_from_slice(&block_key(queue, u64::MAX));
    key
}

/// The position in the key of a block.
pub(super) fn first_of(key: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(key.get(4..)?.try_into().ok()?))
}

pub(super) fn queue_key(queue: QueueNumber) -> Vec<u8> {
    [QUEUE_ROWS, &queue.to_be_bytes()].concat()
}

pub(super) fn cursor_key(queue: QueueNumber) -> Vec<u8> {
    [CURSOR_ROWS, &queue.to_be_bytes()].concat()
}

/// The queue in the key of its row.
pub(super) fn queue_of(key: &[u8]) -> Option<QueueNumber> {
    let number = key.strip_prefix(QUEUE_ROWS)?.try_into().ok()?;
    Some(QueueNumber::from_be_bytes(number))
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RowJson {
    name: String,
    created_ms: u64,
    settings: QueueSettings,
}

pub(super) fn encode_row(row: &QueueRow) -> Vec<u8> {
    let json = RowJson {
        name: row.name.clone(),
        created_ms: row.created_ms,
        settings: row.settings.clone(),
    };
    serde_json::to_vec(&json).expect("strings and numbers can be written as JSON")
}

pub(super) fn decode_row(bytes: &[u8]) -> Result<QueueRow, serde_json::Error> {
    let json: RowJson = serde_json::from_slice(bytes)?;
    Ok(QueueRow {
        name: json.name,
        settings: json.settings,
        created_ms: json.created_ms,
    })
}

pub(super) fn encode_cursor(cursor: Cursor) -> [u8; 24] {
    let mut bytes = [0; 24];
    bytes[..8].copy_from_slice(&cursor.first.to_le_bytes());
    bytes[8..16].copy_from_slice(&cursor.next.to_le_bytes());
    bytes[16..].copy_from_slice(&cursor.unsettled.to_le_bytes());
    bytes
}

/// None if the numbers contradict each other.
pub(super) fn decode_cursor(bytes: &[u8]) -> Option<Cursor> {
    let cursor = Cursor {
        first: decode_u64(bytes.get(..8)?)?,
        next: decode_u64(bytes.get(8..16)?)?,
        unsettled: decode_u64(bytes.get(16..)?)?,
    };
    let room = cursor.next.checked_sub(cursor.first)?;
    (cursor.unsettled <= room && (cursor.unsettled == 0) == (room == 0)).then_some(cursor)
}

pub(super) fn decode_u64(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}

pub(super) fn decode_u32(bytes: &[u8]) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}
