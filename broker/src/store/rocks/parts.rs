//! Payloads in parts: which of them are kept, and for whom.
//!
//! A part is a value of its own, written ahead of the batch that appends its
//! message:
//!
//! ```text
//! u32 CRC-32 of the key and the bytes | the bytes
//! ```
//!
//! Three kinds of small rows say what is to become of the parts. They change in
//! the batch that appends or settles the message:
//!
//! - *begun*: the message has parts and no commit has appended it yet. Such rows
//!   are all that has to be looked at when the store is opened.
//! - *holders*: in how many places of queues it lies unsettled.
//! - *in parts*: which message lies at a place of a queue, for the queue's
//!   deletion.

use super::super::block::Block;
use super::super::parts::{Identity, check_parts, missing, part_count, shown};
use super::super::{QueueNumber, StoreError};
use super::engine::{Changes, Engine};
use super::keys;
use crate::crash::crash_point;
use bytes::Bytes;
use std::collections::BTreeMap;

/// The parts that were written and not appended yet: number and length.
#[derive(Debug, Default)]
pub(super) struct Begun {
    messages: BTreeMap<Identity, BTreeMap<u32, usize>>,
}

/// A message in parts, as its block names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct InParts {
    pub(super) message: Identity,
    /// Length of the payload.
    pub(super) len: usize,
}

impl InParts {
    /// The block's message, if it is in parts.
    pub(super) fn of(block: &Block) -> Option<InParts> {
        let head = block.message(0);
        block.is_in_parts(0).then(|| InParts {
            message: (head.session, head.position),
            len: block.payload_len(0),
        })
    }
}

/// Writes one part.
pub(super) fn put(
    engine: &Engine,
    begun: &mut Begun,
    message: Identity,
    part: u32,
    bytes: &[u8],
) -> Result<(), StoreError> {
    let mut changes = engine.changes(bytes.len());
    let parts = begun.messages.entry(message).or_default();
    if parts.is_empty() {
        changes.put_row(&keys::begun_key(message), b"");
    }
    parts.insert(part, bytes.len());
    let key = keys::part_key(message, part);
    changes.put_part(key, &encode(&key, bytes));
    crash_point("write a part");
    engine.write(changes)
}

/// Reads one part.
pub(super) fn read(engine: &Engine, message: Identity, part: u32) -> Result<Bytes, StoreError> {
    let key = keys::part_key(message, part);
    let Some(value) = engine.part(key)? else {
        return Err(engine.damaged(&missing(message, part)));
    };
    match decode(&key, &value) {
        Some(bytes) => Ok(Bytes::copy_from_slice(bytes)),
        None => Err(engine.damaged(&format!(
            "part {part} of message {}: its checksum does not match",
            shown(message)
        ))),
    }
}

/// Deletes the parts that no commit followed before the store was closed.
pub(super) fn delete_orphans(engine: &Engine) -> Result<(), StoreError> {
    let begun = engine.rows(keys::BEGUN_ROWS)?;
    if begun.is_empty() {
        return Ok(());
    }
    let mut changes = engine.changes(0);
    for (key, _) in &begun {
        let message =
            keys::begun_of(key).ok_or_else(|| engine.damaged("the key of a begun message"))?;
        // They are not orphans if it was a message in a queue whose parts were
        // being replaced.
        if holders(engine, message)? == 0 {
            changes.delete_all_parts(message);
        }
        changes.delete_row(key);
    }
    crash_point("delete parts that nobody needs");
    engine.write(changes)?;
    engine.flush_parts()
}

/// What one round does to messages in parts.
#[derive(Debug, Default)]
pub(super) struct Holding {
    messages: BTreeMap<Identity, Change>,
}

#[derive(Debug)]
struct Change {
    /// Length of the payload.
    len: usize,
    /// How many more, or less, places it lies in.
    more: i64,
}

impl Holding {
    /// Takes note of a message that is appended, and checks that its parts are
    /// there.
    pub(super) fn append(
        &mut self,
        engine: &Engine,
        begun: &Begun,
        appended: InParts,
    ) -> Result<(), StoreError> {
        let InParts { message, len } = appended;
        if holders(engine, message)? == 0 {
            let parts = begun.messages.get(&message).into_iter().flatten();
            check_parts(message, len, parts.map(|(&part, &len)| (part, len)))?;
        }
        self.change(appended, 0);
        Ok(())
    }

    /// The message comes to lie in the queue.
    pub(super) fn hold(
        &mut self,
        changes: &mut Changes<'_>,
        queue: QueueNumber,
        position: u64,
        held: InParts,
    ) {
        let row = keys::encode_in_parts(held);
        changes.put_row(&keys::in_parts_key(queue, position), &row);
        self.change(held, 1);
    }

    /// The message lies in the queue no more.
    pub(super) fn release(
        &mut self,
        changes: &mut Changes<'_>,
        queue: QueueNumber,
        position: u64,
        held: InParts,
    ) {
        changes.delete_row(&keys::in_parts_key(queue, position));
        self.change(held, -1);
    }

    /// No message lies in the queue any more.
    pub(super) fn release_all(
        &mut self,
        engine: &Engine,
        changes: &mut Changes<'_>,
        queue: QueueNumber,
    ) -> Result<(), StoreError> {
        for (key, row) in engine.rows(&keys::in_parts_of(queue))? {
            let held = keys::decode_in_parts(&row)
                .ok_or_else(|| engine.damaged(&format!("a message in parts of queue {queue}")))?;
            changes.delete_row(&key);
            self.change(held, -1);
        }
        Ok(())
    }

    /// Writes what it amounts to, and returns the bytes of the parts that are
    /// deleted.
    pub(super) fn encode(
        &self,
        engine: &Engine,
        begun: &Begun,
        changes: &mut Changes<'_>,
    ) -> Result<u64, StoreError> {
        let mut dead_bytes = 0;
        for (&message, change) in &self.messages {
            let before = holders(engine, message)?;
            let now = u32::try_from(i64::from(before) + change.more).map_err(|_| {
                engine.damaged(&format!(
                    "the number of places of message {}",
                    shown(message)
                ))
            })?;
            if begun.messages.contains_key(&message) {
                changes.delete_row(&keys::begun_key(message));
            }
            if now == 0 {
                begun.delete_parts(changes, message, change.len);
                dead_bytes += change.len as u64;
            }
            put_holders(changes, message, before, now);
        }
        Ok(dead_bytes)
    }

    /// Its messages are begun no more, once what it amounts to is written.
    pub(super) fn publish(&self, begun: &mut Begun) {
        for message in self.messages.keys() {
            begun.messages.remove(message);
        }
    }

    fn change(&mut self, InParts { message, len }: InParts, more: i64) {
        let change = self
            .messages
            .entry(message)
            .or_insert(Change { len, more: 0 });
        change.more += more;
    }
}

impl Begun {
    fn delete_parts(&self, changes: &mut Changes<'_>, message: Identity, len: usize) {
        let parts = self.messages.get(&message);
        let last = parts.and_then(|parts| parts.keys().next_back());
        let begun = last.map_or(0, |&last| last + 1);
        for part in 0..part_count(len).max(begun) {
            changes.delete_part(keys::part_key(message, part));
        }
    }
}

fn holders(engine: &Engine, message: Identity) -> Result<u32, StoreError> {
    let row = engine.number_row(&keys::holders_key(message), keys::decode_u32)?;
    Ok(row.unwrap_or(0))
}

fn put_holders(changes: &mut Changes<'_>, message: Identity, before: u32, now: u32) {
    let key = keys::holders_key(message);
    if now > 0 && now != before {
        changes.put_row(&key, &now.to_le_bytes());
    } else if now == 0 && before > 0 {
        changes.delete_row(&key);
    }
}

fn encode(key: &[u8], bytes: &[u8]) -> Vec<u8> {
    let mut value = Vec::with_capacity(4 + bytes.len());
    value.extend(checksum(key, bytes).to_le_bytes());
    value.extend(bytes);
    value
}

fn decode<'a>(key: &[u8], value: &'a [u8]) -> Option<&'a [u8]> {
    let (found, bytes) = value.split_first_chunk::<4>()?;
    (u32::from_le_bytes(*found) == checksum(key, bytes)).then_some(bytes)
}

/// Covers the key as well: a part in another's place is damage too.
fn checksum(key: &[u8], bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(key);
    hasher.update(bytes);
    hasher.finalize()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn any_flipped_bit_and_any_other_place_is_noticed() {
        let key = keys::part_key((3, 4), 5);
        let value = encode(&key, b"bytes");
        assert_eq!(decode(&key, &value), Some(&b"bytes"[..]));
        for bit in 0..value.len() * 8 {
            let mut value = value.clone();
            value[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(&key, &value), None, "bit {bit}");
        }
        for cut in 0..value.len() {
            assert_eq!(decode(&key, &value[..cut]), None);
        }
        assert_eq!(decode(&keys::part_key((3, 4), 6), &value), None);
    }
}
