//! Which units of a payload segment are free: runs, lowest first.
//!
//! The lowest run that is large enough is used, so that what was used lately is
//! used again, and the upper end of a segment stays in one piece for what is
//! large.

use std::collections::BTreeMap;

/// The free units of one segment.
#[derive(Debug, Clone)]
pub struct Units {
    /// Length by first unit. No two runs touch.
    free: BTreeMap<u32, u32>,
}

impl Units {
    /// `count` units, all free.
    pub fn new(count: u32) -> Units {
        Units {
            free: BTreeMap::from([(0, count)]),
        }
    }

    /// Takes a run of `count` units; gives the first.
    pub fn allocate(&mut self, count: u32) -> Option<u32> {
        let (&first, &length) = self.free.iter().find(|&(_, &length)| length >= count)?;
        self.take_from(first, length, first, count);
        Some(first)
    }

    /// Takes this run, if all of it is free. For a successor, which finds it in
    /// use.
    pub fn reserve(&mut self, first: u32, count: u32) -> bool {
        let Some((&start, &length)) = self.free.range(..=first).next_back() else {
            return false;
        };
        let fits = u64::from(first) + u64::from(count) <= u64::from(start) + u64::from(length);
        if fits {
            self.take_from(start, length, first, count);
        }
        fits
    }

    /// Takes a part of the free run from `start` on.
    fn take_from(&mut self, start: u32, length: u32, first: u32, count: u32) {
        self.free.remove(&start);
        if first > start {
            self.free.insert(start, first - start);
        }
        let (end, taken_end) = (start + length, first + count);
        if end > taken_end {
            self.free.insert(taken_end, end - taken_end);
        }
    }

    /// Gives back a run that was taken.
    pub fn give_back(&mut self, first: u32, count: u32) {
        let (mut start, mut length) = (first, count);
        if let Some((&before, &its_length)) = self.free.range(..first).next_back()
            && before + its_length == first
        {
            (start, length) = (before, its_length + count);
        }
        if let Some(after) = self.free.remove(&(first + count)) {
            length += after;
        }
        self.free.insert(start, length);
    }

    /// How many units are free.
    pub fn free_count(&self) -> u32 {
        self.free.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_run_that_fits_is_used_and_neighbours_join() {
        let mut units = Units::new(10);
        assert_eq!([units.allocate(3), units.allocate(3)], [Some(0), Some(3)]);
        assert_eq!(units.allocate(5), None);
        units.give_back(0, 3);
        assert_eq!(units.allocate(4), Some(6));
        assert_eq!(units.allocate(2), Some(0));
        units.give_back(3, 3);
        assert_eq!(units.allocate(4), Some(2));
        for (first, count) in [(0, 2), (6, 4), (2, 4)] {
            units.give_back(first, count);
        }
        assert_eq!(units.allocate(10), Some(0));
    }

    #[test]
    fn a_run_in_use_is_not_reserved_again() {
        let mut units = Units::new(10);
        assert!(units.reserve(4, 2));
        for (first, count) in [(4, 1), (5, 1), (3, 2), (3, 5), (9, 2), (10, 1), (0, 5)] {
            assert!(!units.reserve(first, count), "{first} {count}");
        }
        assert!(units.reserve(0, 4) && units.reserve(6, 4));
        assert_eq!(units.free_count(), 0);
    }

    /// I9: no unit is in two runs, and none is lost, whatever is done.
    #[test]
    fn no_unit_is_lost_or_given_twice() {
        const COUNT: u32 = 64;
        let mut units = Units::new(COUNT);
        let mut taken: Vec<(u32, u32)> = Vec::new();
        let mut state = 1u32;
        let mut random = |below: u32| {
            // Numerical Recipes' generator: any sequence does.
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) % below
        };
        for _ in 0..20_000 {
            if random(2) == 0 {
                let count = 1 + random(9);
                if let Some(first) = units.allocate(count) {
                    let apart = |&(f, c): &(u32, u32)| f + c <= first || first + count <= f;
                    assert!(taken.iter().all(apart) && first + count <= COUNT);
                    taken.push((first, count));
                }
            } else if !taken.is_empty() {
                let (first, count) = taken.swap_remove(random(taken.len() as u32) as usize);
                units.give_back(first, count);
            }
            let in_use: u32 = taken.iter().map(|(_, count)| count).sum();
            assert_eq!(units.free_count(), COUNT - in_use);
        }
    }
}
