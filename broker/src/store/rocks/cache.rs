//! A bounded memory of the blocks that are being settled, so that settling reads
//! nothing back.

use super::super::QueueNumber;
use super::marks::Marks;
use super::parts::InParts;
use std::collections::BTreeMap;

/// Bytes that one of the two generations may take.
const GENERATION_BYTES: usize = 4 << 20;
/// A map's entry takes about this much beside its marks.
const ENTRY_BYTES: usize = 96;

/// What settling must know of a block.
#[derive(Debug)]
pub(super) struct Known {
    /// How many messages the block has.
    pub(super) count: u32,
    /// How long the block is.
    pub(super) bytes: usize,
    /// What happened to its messages.
    pub(super) marks: Marks,
    /// Whether its marks are stored, so that they must be deleted with it.
    pub(super) has_row: bool,
    /// Its one message, if that is in parts. Boxed: few blocks have any.
    pub(super) in_parts: Option<Box<InParts>>,
}

impl Known {
    /// Whether all of it is settled.
    pub(super) fn is_dead(&self) -> bool {
        self.marks.settled_count() == self.count
    }

    fn memory_bytes(&self) -> usize {
        let in_parts = self.in_parts.as_ref().map_or(0, |_| size_of::<InParts>());
        ENTRY_BYTES + self.marks.memory_bytes() + in_parts
    }
}

/// Blocks by queue and first position. What was not asked for while a whole
/// generation of others came in is forgotten.
#[derive(Debug, Default)]
pub(super) struct Cache {
    young: Generation,
    old: Generation,
}

#[derive(Debug, Default)]
struct Generation {
    blocks: BTreeMap<(QueueNumber, u64), Known>,
    bytes: usize,
}

impl Cache {
    /// Takes out the block that holds a position, with its first position.
    pub(super) fn take(&mut self, queue: QueueNumber, position: u64) -> Option<(u64, Known)> {
        let found = self.young.take(queue, position);
        found.or_else(|| self.old.take(queue, position))
    }

    /// Puts a block in, or back.
    pub(super) fn put(&mut self, queue: QueueNumber, first: u64, known: Known) {
        self.young.bytes += known.memory_bytes();
        self.young.blocks.insert((queue, first), known);
        if self.young.bytes >= GENERATION_BYTES {
            self.old = std::mem::take(&mut self.young);
        }
    }
}

impl Generation {
    fn take(&mut self, queue: QueueNumber, position: u64) -> Option<(u64, Known)> {
        let (&key, known) = self.blocks.range(..=(queue, position)).next_back()?;
        if key.0 != queue || position - key.1 >= u64::from(known.count) {
            return None;
        }
        let known = self.blocks.remove(&key)?;
        self.bytes -= known.memory_bytes();
        Some((key.1, known))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn known(count: u32) -> Known {
        Known {
            count,
            bytes: 1000,
            marks: Marks::default(),
            has_row: false,
            in_parts: None,
        }
    }

    #[test]
    fn block_is_found_by_any_position_in_it() {
        let mut cache = Cache::default();
        cache.put(1, 10, known(5));
        cache.put(2, 0, known(3));
        assert!(cache.take(1, 9).is_none());
        assert!(cache.take(1, 15).is_none());
        assert!(cache.take(3, 1).is_none());
        assert!(cache.take(2, 3).is_none());
        assert_eq!(cache.take(1, 14).unwrap().0, 10);
        assert!(cache.take(1, 14).is_none());
        assert_eq!(cache.take(2, 0).unwrap().0, 0);
    }

    // I7
    #[test]
    fn cache_is_bounded_and_keeps_what_is_used() {
        let mut cache = Cache::default();
        cache.put(1, 0, known(1));
        for first in 1..10 * (GENERATION_BYTES / ENTRY_BYTES) as u64 {
            let (_, used) = cache.take(1, 0).unwrap();
            cache.put(1, 0, used);
            cache.put(2, first, known(1));
            assert!(cache.young.bytes + cache.old.bytes <= 2 * GENERATION_BYTES);
        }
        assert!(cache.take(2, 1).is_none());
    }
}
