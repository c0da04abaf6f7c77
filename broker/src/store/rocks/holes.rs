//! Holes: ranges of positions whose blocks are deleted, behind a queue's first
//! unsettled message.

use std::collections::BTreeMap;
use std::ops::Range;

/// How many holes of a queue are remembered. Beyond this, looking for a message
/// may walk over tombstones.
const HOLES_MAX: usize = 16 * 1024;

/// What is known of a queue's holes. This is a help and not the truth: after the
/// store was opened nothing is known, and holes are learned as they are met.
#[derive(Debug, Default)]
pub(super) struct Holes {
    /// Start and end; no two touch.
    ranges: BTreeMap<u64, u64>,
}

impl Holes {
    /// The end of the hole that a position lies in.
    pub(super) fn end_of(&self, position: u64) -> Option<u64> {
        let (_, &end) = self.ranges.range(..=position).next_back()?;
        (position < end).then_some(end)
    }

    /// Adds a hole, joined to those that it meets.
    pub(super) fn add(&mut self, hole: Range<u64>) {
        let Range { mut start, mut end } = hole;
        while let Some((&other, &other_end)) = self.ranges.range(..=end).next_back()
            && other_end >= start
        {
            self.ranges.remove(&other);
            start = start.min(other);
            end = end.max(other_end);
        }
        if self.ranges.len() < HOLES_MAX {
            self.ranges.insert(start, end);
        }
    }

    /// Forgets what lies below a position.
    pub(super) fn forget_below(&mut self, position: u64) {
        while let Some(entry) = self.ranges.first_entry()
            && *entry.get() <= position
        {
            entry.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_that_meet_become_one() {
        let mut holes = Holes::default();
        holes.add(10..20);
        holes.add(30..40);
        assert_eq!(holes.end_of(9), None);
        assert_eq!(holes.end_of(10), Some(20));
        assert_eq!(holes.end_of(20), None);
        holes.add(20..30);
        assert_eq!(holes.end_of(10), Some(40));
        assert_eq!(holes.ranges.len(), 1);
        holes.add(15..50);
        holes.add(5..12);
        assert_eq!(holes.ranges, BTreeMap::from([(5, 50)]));
    }

    #[test]
    fn holes_below_the_first_message_are_forgotten() {
        let mut holes = Holes::default();
        holes.add(0..10);
        holes.add(20..30);
        holes.forget_below(20);
        assert_eq!(holes.ranges, BTreeMap::from([(20, 30)]));
        holes.forget_below(30);
        assert!(holes.ranges.is_empty());
    }

    #[test]
    fn holes_are_bounded() {
        let mut holes = Holes::default();
        for hole in 0..2 * HOLES_MAX as u64 {
            holes.add(hole * 2..hole * 2 + 1);
        }
        assert_eq!(holes.ranges.len(), HOLES_MAX);
    }
}
