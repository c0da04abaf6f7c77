//! How a payload is cut into parts.

use super::StoreError;
use super::block::{PART_BYTES, PAYLOAD_MAX};
use std::ops::Range;

/// What identifies a message for ever: its session's number, and the position of
/// its record in that session's submission ring.
pub type Identity = (u64, u64);

/// How many parts a payload of this many bytes has.
pub fn part_count(payload_len: usize) -> u32 {
    let count = payload_len.div_ceil(PART_BYTES);
    u32::try_from(count).expect("no payload is as long as that")
}

/// Where part `part` (from 0) lies in a payload of this many bytes; empty if it
/// has no such part.
pub fn part_range(payload_len: usize, part: u32) -> Range<usize> {
    let at = |part: usize| part.saturating_mul(PART_BYTES).min(payload_len);
    at(part as usize)..at(part as usize + 1)
}

/// Refuses a part that no payload can have.
pub(super) fn check_part(message: Identity, part: u32, len: usize) -> Result<(), StoreError> {
    if part < part_count(PAYLOAD_MAX) && (1..=PART_BYTES).contains(&len) {
        return Ok(());
    }
    Err(StoreError::Failed(format!(
        "message {} cannot have a part {part} of {len} bytes",
        shown(message)
    )))
}

/// Refuses parts, given by number and length in ascending order, that do not make
/// up a payload of `payload_len` bytes.
pub(super) fn check_parts(
    message: Identity,
    payload_len: usize,
    parts: impl IntoIterator<Item = (u32, usize)>,
) -> Result<(), StoreError> {
    let due = (0..part_count(payload_len)).map(|part| (part, part_range(payload_len, part).len()));
    if due.eq(parts) {
        return Ok(());
    }
    Err(StoreError::Failed(format!(
        "a round appends message {} of {payload_len} bytes in parts, but the parts written \
         are not those of such a payload",
        shown(message)
    )))
}

/// What is said of a part that is not there.
pub(super) fn missing(message: Identity, part: u32) -> String {
    format!("part {part} of message {} is missing", shown(message))
}

pub(super) fn shown((session, position): Identity) -> String {
    format!("{session}-{position}")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn parts_lie_one_behind_the_other() {
        for len in [
            0,
            1,
            PART_BYTES - 1,
            PART_BYTES,
            PART_BYTES + 1,
            PAYLOAD_MAX,
        ] {
            let mut end = 0;
            for part in 0..part_count(len) {
                let range = part_range(len, part);
                assert_eq!(range.start, end);
                assert!((1..=PART_BYTES).contains(&range.len()));
                end = range.end;
            }
            assert_eq!(end, len);
            assert!(part_range(len, part_count(len)).is_empty());
            assert!(part_range(len, u32::MAX).is_empty());
        }
        assert_eq!(part_count(PAYLOAD_MAX), 1024);
    }

    #[test]
    fn only_the_parts_of_the_payload_make_it_up() {
        const LEN: usize = 2 * PART_BYTES + 5;
        let sound = [(0, PART_BYTES), (1, PART_BYTES), (2, 5)];
        check_parts((1, 2), LEN, sound).unwrap();
        check_parts((1, 2), 0, []).unwrap();
        for wrong in [&sound[..2], &sound[1..], &[sound[0], sound[2]], &[]] {
            check_parts((1, 2), LEN, wrong.iter().copied()).unwrap_err();
        }
        check_parts((1, 2), LEN + 1, sound).unwrap_err();
        check_parts((1, 2), 2 * PART_BYTES, sound).unwrap_err();
    }

    #[test]
    fn part_beyond_the_longest_payload_is_refused() {
        check_part((1, 2), 1023, PART_BYTES).unwrap();
        for (part, len) in [(1024, 1), (0, PART_BYTES + 1), (0, 0)] {
            check_part((1, 2), part, len).unwrap_err();
        }
    }
}
