//! Keys, and the encoding of small rows.

use super::super::block::PAYLOAD_MAX;
use super::super::parts::Identity;
use super::super::{QueueNumber, QueueRow};
use super::parts::InParts;
use super::view::Cursor;
use ringmain::QueueSettings;
use serde::{Deserialize, Serialize};

pub(super) const META_FORMAT: &[u8] = b"meta/format";
pub(super) const META_ROUND: &[u8] = b"meta/round";
pub(super) const META_SESSIONS: &[u8] = b"meta/sessions";
pub(super) const META_QUEUES: &[u8] = b"meta/queues";
pub(super) const QUEUE_ROWS: &[u8] = b"queue/";
const CURSOR_ROWS: &[u8] = b"cursor/";
pub(super) const BEGUN_ROWS: &[u8] = b"begun/";
const HOLDERS_ROWS: &[u8] = b"holders/";
const IN_PARTS_ROWS: &[u8] = b"in-parts/";

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

fn identity_key((session, position): Identity) -> [u8; 16] {
    let mut key = [0; 16];
    key[..8].copy_from_slice(&session.to_be_bytes());
    key[8..].copy_from_slice(&position.to_be_bytes());
    key
}

/// The key of a part.
pub(super) fn part_key(message: Identity, part: u32) -> [u8; 20] {
    let mut key = [0; 20];
    key[..16].copy_from_slice(&identity_key(message));
    key[16..].copy_from_slice(&part.to_be_bytes());
    key
}

/// A key behind all parts of a message, and before those of the next.
pub(super) fn parts_end(message: Identity) -> [u8; 21] {
    let mut key = [0; 21];
    key[..20].copy_from_slice(&part_key(message, u32::MAX));
    key
}

pub(super) fn begun_key(message: Identity) -> Vec<u8> {
    [BEGUN_ROWS, &identity_key(message)].concat()
}

/// The message in the key of its row.
pub(super) fn begun_of(key: &[u8]) -> Option<Identity> {
    let identity: &[u8; 16] = key.strip_prefix(BEGUN_ROWS)?.try_into().ok()?;
    let number = |half: Option<&[u8; 8]>| half.copied().map(u64::from_be_bytes);
    Some((
        number(identity.first_chunk())?,
        number(identity.last_chunk())?,
    ))
}

pub(super) fn holders_key(message: Identity) -> Vec<u8> {
    [HOLDERS_ROWS, &identity_key(message)].concat()
}

pub(super) fn in_parts_key(queue: QueueNumber, position: u64) -> Vec<u8> {
    [IN_PARTS_ROWS, &block_key(queue, position)].concat()
}

/// What the keys of a queue's messages in parts begin with.
pub(super) fn in_parts_of(queue: QueueNumber) -> Vec<u8> {
    [IN_PARTS_ROWS, &queue.to_be_bytes()].concat()
}

pub(super) fn encode_in_parts(InParts { message, len }: InParts) -> [u8; 24] {
    let mut bytes = [0; 24];
    bytes[..8].copy_from_slice(&message.0.to_le_bytes());
    bytes[8..16].copy_from_slice(&message.1.to_le_bytes());
    bytes[16..].copy_from_slice(&(len as u64).to_le_bytes());
    bytes
}

/// None if no payload can be as long as that.
pub(super) fn decode_in_parts(bytes: &[u8]) -> Option<InParts> {
    let bytes: &[u8; 24] = bytes.try_into().ok()?;
    let len = usize::try_from(decode_u64(&bytes[16..])?).ok()?;
    (len <= PAYLOAD_MAX).then_some(InParts {
        message: (decode_u64(&bytes[..8])?, decode_u64(&bytes[8..16])?),
        len,
    })
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
