//! What the demo's messages carry.

use nix::time::{ClockId, clock_gettime};

/// Bytes before the text.
pub(super) const HEAD_BYTES: usize = 24;

/// The head of a message: `producer u32 | checksum u32 | sequence u64 |
/// sent at (ns) u64`, then the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    /// Number of the producer.
    pub(super) producer: u32,
    /// Number of the message among the producer's, from 0.
    pub(super) sequence: u64,
    /// When it was sent, by the machine's monotonic clock.
    pub(super) sent_ns: u64,
}

impl Head {
    /// Puts the message into `payload`, in place of what is there.
    pub(super) fn write(&self, text: &[u8], payload: &mut Vec<u8>) {
        payload.clear();
        payload.extend_from_slice(&self.producer.to_le_bytes());
        payload.extend_from_slice(&[0; 4]);
        payload.extend_from_slice(&self.sequence.to_le_bytes());
        payload.extend_from_slice(&self.sent_ns.to_le_bytes());
        payload.extend_from_slice(text);
        let checksum = crc32fast::hash(payload);
        payload[4..8].copy_from_slice(&checksum.to_le_bytes());
    }

    /// Reads a message; `None` if it is damaged.
    pub(super) fn read(payload: &[u8]) -> Option<Head> {
        let (head, text) = payload.split_first_chunk::<HEAD_BYTES>()?;
        let word = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&head[at..at + 8]);
            u64::from_le_bytes(bytes)
        };
        let first = word(0);
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&head[..4]);
        hasher.update(&[0; 4]);
        hasher.update(&head[8..]);
        hasher.update(text);
        (u64::from(hasher.finalize()) == first >> 32).then(|| Head {
            producer: first as u32,
            sequence: word(8),
            sent_ns: word(16),
        })
    }
}

/// The queue of the message with this number, of so many queues.
pub(super) fn queue_of(sequence: u64, queues: u32) -> u32 {
    (sequence % u64::from(queues)) as u32
}

/// Nanoseconds of the machine's monotonic clock, the same in every process.
pub(super) fn now_ns() -> u64 {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, |time| {
        time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_says_when_it_is_damaged() {
        let head = Head {
            producer: 7,
            sequence: 1 << 40,
            sent_ns: now_ns(),
        };
        let mut payload = Vec::new();
        head.write(b"/usr/bin/env", &mut payload);
        assert_eq!(Head::read(&payload), Some(head));
        for at in 0..payload.len() {
            let mut damaged = payload.clone();
            damaged[at] ^= 1;
            assert_eq!(Head::read(&damaged), None, "byte {at}");
        }
        assert_eq!(Head::read(&payload[..10]), None);
    }
}
