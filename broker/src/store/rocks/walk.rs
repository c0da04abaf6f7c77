//! Finding blocks by position.

use super::super::block::Block;
use super::super::{LoadedBlock, QueueNumber, StoreError};
use super::cache::Known;
use super::engine::{Blocks, Engine, Snapshot};
use super::marks::Marks;
use super::parts::InParts;
use super::view::View;
use super::{keys, lock};
use bytes::Bytes;
use std::sync::Mutex;

/// Goes through the blocks of one queue, jumping over holes.
pub(super) struct Walk<'a> {
    engine: &'a Engine,
    snapshot: Option<&'a Snapshot<'a>>,
    view: &'a Mutex<View>,
    queue: QueueNumber,
    /// Positions from here on are not looked at.
    end: u64,
    blocks: Blocks<'a>,
    /// Where the block ends that `blocks` stands on.
    stands_before: Option<u64>,
}

/// A block that a [`Walk`] stands on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Found {
    /// Position of its first message.
    pub(super) first: u64,
    /// How many messages it has.
    pub(super) count: u32,
    /// The sum of their payload lengths.
    pub(super) payload: usize,
}

impl Found {
    pub(super) fn end(&self) -> u64 {
        self.first.saturating_add(u64::from(self.count))
    }
}

impl<'a> Walk<'a> {
    /// Over what was committed when the snapshot was taken, or else last.
    pub(super) fn new(
        engine: &'a Engine,
        snapshot: Option<&'a Snapshot<'a>>,
        view: &'a Mutex<View>,
        queue: QueueNumber,
        end: u64,
    ) -> Walk<'a> {
        Walk {
            engine,
            snapshot,
            view,
            queue,
            end,
            blocks: engine.blocks(snapshot, queue, end),
            stands_before: None,
        }
    }

    /// Goes to the block that holds the message at `position`, or else to the
    /// first one behind it.
    pub(super) fn seek(&mut self, position: u64) -> Result<Option<Found>, StoreError> {
        let known = lock(self.view).hole_end(self.queue, position);
        let position = known.unwrap_or(position);
        if position >= self.end {
            return Ok(None);
        }
        let mut hole_start = position;
        if self.stands_before == Some(position) {
            self.blocks.next();
        } else {
            self.blocks
                .seek_for_prev(keys::block_key(self.queue, position));
            if let Some(before) = self.found()? {
                if before.end() > position {
                    return Ok(Some(before));
                }
                hole_start = before.end();
            }
            self.blocks.seek(keys::block_key(self.queue, position));
        }
        let found = self.found()?;
        let hole_end = found.map_or(self.end, |found| found.first);
        if hole_end > hole_start {
            lock(self.view).learn_hole(self.queue, hole_start..hole_end);
        }
        Ok(found)
    }

    /// The block that it stands on, with its marks.
    pub(super) fn load(&self, found: Found) -> Result<LoadedBlock, StoreError> {
        let block = self.decode(found)?;
        let (settled, attempts) = self.marks(found)?.unwrap_or_default().into_parts();
        Ok(LoadedBlock {
            first: found.first,
            block,
            settled,
            attempts,
        })
    }

    /// What settling must know of the block that it stands on.
    pub(super) fn know(&self, found: Found) -> Result<Known, StoreError> {
        let marks = self.marks(found)?;
        // All others have either payload or company, and need not be decoded.
        let in_parts = match (found.count, found.payload) {
            (1, 0) => InParts::of(&self.decode(found)?),
            _ => None,
        };
        Ok(Known {
            in_parts: in_parts.map(Box::new),
            count: found.count,
            bytes: self.blocks.item().map_or(0, |(_, value)| value.len()),
            has_row: marks.is_some(),
            marks: marks.unwrap_or_default(),
        })
    }

    fn decode(&self, found: Found) -> Result<Block, StoreError> {
        let Some((_, value)) = self.blocks.item() else {
            return Err(self.damaged(found.first, "it is gone"));
        };
        Block::decode(Bytes::copy_from_slice(value))
            .map_err(|error| self.damaged(found.first, &error.to_string()))
    }

    /// The block that `blocks` stands on, if it does.
    fn found(&mut self) -> Result<Option<Found>, StoreError> {
        self.stands_before = None;
        let Some((key, value)) = self.blocks.item() else {
            self.engine.iterated(&self.blocks)?;
            return Ok(None);
        };
        let first = keys::first_of(key).ok_or_else(|| self.engine.damaged("the key of a block"))?;
        let (count, payload) =
            Block::peek(value).map_err(|error| self.damaged(first, &error.to_string()))?;
        let found = Found {
            first,
            count,
            payload,
        };
        self.stands_before = Some(found.end());
        Ok(Some(found))
    }

    fn marks(&self, found: Found) -> Result<Option<Marks>, StoreError> {
        let key = keys::block_key(self.queue, found.first);
        let Some(row) = self.engine.marks(self.snapshot, key)? else {
            return Ok(None);
        };
        match Marks::decode(&row, found.count) {
            Some(marks) => Ok(Some(marks)),
            None => Err(self.damaged(found.first, "its marks are those of another block")),
        }
    }

    fn damaged(&self, first: u64, how: &str) -> StoreError {
        let queue = self.queue;
        self.engine.damaged(&format!(
            "the block of queue {queue} at position {first}: {how}"
        ))
    }
}
