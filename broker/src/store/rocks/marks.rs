//! Marks: what happened to a block's messages after it was written. They are the
//! row beside the block.
//!
//! ```text
//! u32 words | u32 attempts | words x u64: settled | attempts x (u32 index, u16 number)
//! ```

/// The marks of one block.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Marks {
    /// One bit a message: settled. Empty as long as none is.
    settled: Vec<u64>,
    settled_count: u32,
    /// *(index, attempts)*, by index.
    attempts: Vec<(u32, u16)>,
}

impl Marks {
    /// Marks the message at `index` in a block of `count` as settled. False if
    /// it was already.
    pub(super) fn settle(&mut self, index: u32, count: u32) -> bool {
        if self.settled.is_empty() {
            self.settled = vec![0; words(count)];
        }
        let word = &mut self.settled[index as usize / 64];
        let bit = 1 << (index % 64);
        let fresh = *word & bit == 0;
        *word |= bit;
        self.settled_count += u32::from(fresh);
        fresh
    }

    pub(super) fn is_settled(&self, index: u32) -> bool {
        let word = self.settled.get(index as usize / 64).copied().unwrap_or(0);
        word >> (index % 64) & 1 == 1
    }

    pub(super) fn settled_count(&self) -> u32 {
        self.settled_count
    }

    /// The first unsettled message of a block of `count`, from `index` on.
    pub(super) fn first_unsettled(&self, index: u32, count: u32) -> Option<u32> {
        (index..count).find(|&index| !self.is_settled(index))
    }

    pub(super) fn note_attempts(&mut self, index: u32, attempts: u16) {
        match self
            .attempts
            .binary_search_by_key(&index, |&(index, _)| index)
        {
            Ok(found) => self.attempts[found].1 = attempts,
            Err(place) => self.attempts.insert(place, (index, attempts)),
        }
    }

    /// The bitmap and the attempts, as a read returns them.
    pub(super) fn into_parts(self) -> (Vec<u64>, Vec<(u32, u16)>) {
        (self.settled, self.attempts)
    }

    /// Bytes that it takes in memory beside itself.
    pub(super) fn memory_bytes(&self) -> usize {
        self.settled.capacity() * size_of::<u64>()
            + self.attempts.capacity() * size_of::<(u32, u16)>()
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(8 + self.settled.len() * 8 + self.attempts.len() * 6);
        bytes.extend((self.settled.len() as u32).to_le_bytes());
        bytes.extend((self.attempts.len() as u32).to_le_bytes());
        for word in &self.settled {
            bytes.extend(word.to_le_bytes());
        }
        for (index, attempts) in &self.attempts {
            bytes.extend(index.to_le_bytes());
            bytes.extend(attempts.to_le_bytes());
        }
        bytes
    }

    /// None if the bytes are not the marks of a block of `count`.
    pub(super) fn decode(bytes: &[u8], count: u32) -> Option<Marks> {
        let (lengths, rest) = bytes.split_first_chunk::<8>()?;
        let settled_len = u32::from_le_bytes(*lengths.first_chunk()?) as usize;
        let attempts_len = u32::from_le_bytes(*lengths.last_chunk()?) as usize;
        if settled_len != 0 && settled_len != words(count) {
            return None;
        }
        let (settled, attempts) = rest.split_at_checked(settled_len * 8)?;
        if attempts.len() as u64 != attempts_len as u64 * 6 {
            return None;
        }
        let mut marks = Marks {
            settled: settled
                .chunks_exact(8)
                .map(|word| u64::from_le_bytes(fixed(word)))
                .collect(),
            settled_count: 0,
            attempts: attempts
                .chunks_exact(6)
                .map(|entry| {
                    let (index, number) = entry.split_at(4);
                    (
                        u32::from_le_bytes(fixed(index)),
                        u16::from_le_bytes(fixed(number)),
                    )
                })
                .collect(),
        };
        marks.settled_count = marks.settled.iter().map(|word| word.count_ones()).sum();
        marks.fits(count).then_some(marks)
    }

    fn fits(&self, count: u32) -> bool {
        let spare = self.settled.len() as u32 * 64 - count.min(self.settled.len() as u32 * 64);
        let last = self.settled.last().copied().unwrap_or(0);
        let no_bit_beyond = last.leading_zeros() >= spare;
        let ascending = self.attempts.is_sorted_by(|(a, _), (b, _)| a < b);
        let inside = self.attempts.last().is_none_or(|&(index, _)| index < count);
        no_bit_beyond && ascending && inside
    }
}

fn words(count: u32) -> usize {
    count.div_ceil(64) as usize
}

fn fixed<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().expect("it was cut to this length")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn message_is_settled_once() {
        let mut marks = Marks::default();
        assert_eq!(marks.first_unsettled(0, 70), Some(0));
        assert!(marks.settle(0, 70));
        assert!(!marks.settle(0, 70));
        assert!(marks.settle(1, 70) && marks.settle(69, 70));
        assert_eq!(marks.settled_count(), 3);
        assert_eq!(marks.first_unsettled(0, 70), Some(2));
        assert_eq!(marks.first_unsettled(69, 70), None);
    }

    #[test]
    fn marks_of_another_block_are_refused() {
        let mut marks = Marks::default();
        marks.settle(60, 70);
        marks.note_attempts(5, 3);
        let bytes = marks.encode();
        assert_eq!(Marks::decode(&bytes, 70), Some(marks));
        assert_eq!(Marks::decode(&bytes, 64), None);
        assert_eq!(Marks::decode(&bytes, 129), None);
        let mut high = Marks::default();
        high.settle(69, 70);
        assert_eq!(Marks::decode(&high.encode(), 69), None);
        let mut attempts = Marks::default();
        attempts.note_attempts(5, 1);
        assert_eq!(Marks::decode(&attempts.encode(), 5), None);
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..64), count in 0u32..200,
        ) {
            let _ = Marks::decode(&bytes, count);
            let mut bytes = bytes;
            bytes.splice(0..0, [(count.div_ceil(64)) as u8, 0, 0, 0, 1, 0, 0, 0]);
            let _ = Marks::decode(&bytes, count);
        }

        #[test]
        fn marks_are_read_back(
            settled in prop::collection::vec(0u32..200, 0..50),
            attempts in prop::collection::vec((0u32..200, any::<u16>()), 0..50),
        ) {
            let mut marks = Marks::default();
            for index in settled {
                marks.settle(index, 200);
            }
            for (index, number) in attempts {
                marks.note_attempts(index, number);
            }
            prop_assert_eq!(Marks::decode(&marks.encode(), 200).unwrap(), marks);
        }
    }
}
