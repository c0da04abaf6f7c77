//! Messages that are sent together.

use std::ops::Range;

/// Most messages of a batch.
const MESSAGES_MAX: usize = 256;
/// A batch of so many bytes is full.
const BYTES_FULL: usize = 64 * 1024;

/// Messages, one behind the other in one piece of memory that is used again.
#[derive(Debug, Default)]
pub(super) struct Batch {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Batch {
    pub(super) fn push(&mut self, message: &[u8]) {
        self.bytes.extend_from_slice(message);
        self.ends.push(self.bytes.len());
    }

    pub(super) fn clear(&mut self) {
        self.bytes.clear();
        self.ends.clear();
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    pub(super) fn is_full(&self) -> bool {
        self.len() >= MESSAGES_MAX || self.bytes.len() >= BYTES_FULL
    }

    /// The messages, in order.
    pub(super) fn messages(&self) -> impl Iterator<Item = &[u8]> {
        (0..self.len()).map(|index| &self.bytes[self.range(index)])
    }

    fn range(&self, index: usize) -> Range<usize> {
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        start..self.ends[index]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_out_as_they_went_in() {
        let mut batch = Batch::default();
        for message in [&b"one"[..], b"", b"three"] {
            batch.push(message);
        }
        let all: Vec<&[u8]> = batch.messages().collect();
        assert_eq!(all, [&b"one"[..], b"", b"three"]);
        batch.clear();
        assert!(batch.is_empty());
        batch.push(&[0; BYTES_FULL]);
        assert!(batch.is_full());
    }
}
