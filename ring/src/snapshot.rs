//! Words that one process writes again and again, and any number read, each time
//! all of one writing: two copies, of which the older is overwritten, and a count
//! that says which is whole.
//!
//! A seqlock with two copies, so that a reader finds the last whole one whenever
//! the writer stands still or dies; the fences are those of Boehm, "Can seqlocks
//! get along with programming language memory models?" (MSPC 2012).

use crate::atomic::{AtomicU64, Ordering, fence};

/// Words before the copies: how many times there was a writing.
const HEADER: usize = 1;

/// Tries of a reader. A writer would have to write as often, twice each time,
/// while one copy is read.
const TRIES: u32 = 100;

/// Words that hold a snapshot of up to this many.
pub fn words_for(capacity: usize) -> usize {
    HEADER + 2 * (1 + capacity)
}

fn copy_of(words: &[AtomicU64], number: u64) -> &[AtomicU64] {
    let copies = &words[HEADER..];
    let half = copies.len() / 2;
    &copies[(number % 2) as usize * half..][..half]
}

/// Writes the next snapshot; only one thread in the world may. `false`, and
/// nothing is written, if it is longer than the capacity.
pub fn write(words: &[AtomicU64], content: &[u64]) -> bool {
    let number = words[0].load(Ordering::Relaxed) + 1;
    let copy = copy_of(words, number);
    if content.len() >= copy.len() {
        return false;
    }
    // Pairs with the fence of `read`: whoever sees a word of this writing sees
    // that the copy's former number is not the last one any more.
    fence(Ordering::Release);
    let length = std::iter::once(content.len() as u64);
    for (word, value) in copy.iter().zip(length.chain(content.iter().copied())) {
        word.store(value, Ordering::Relaxed);
    }
    // Pairs with the Acquire load of `read`.
    words[0].store(number, Ordering::Release);
    true
}

/// The last snapshot, whole; `None` if there is none yet, or none that makes
/// sense.
pub fn read(words: &[AtomicU64]) -> Option<Vec<u64>> {
    for _ in 0..TRIES {
        let number = words[0].load(Ordering::Acquire);
        if number == 0 {
            return None;
        }
        let (length, content) = copy_of(words, number).split_first()?;
        let length = length.load(Ordering::Relaxed) as usize;
        let content: Vec<u64> = content
            .iter()
            .take(length)
            .map(|word| word.load(Ordering::Relaxed))
            .collect();
        // Pairs with the fence of `write`.
        fence(Ordering::Acquire);
        if words[0].load(Ordering::Relaxed) == number {
            return (content.len() == length).then_some(content);
        }
    }
    None
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn words(capacity: usize) -> Vec<AtomicU64> {
        (0..words_for(capacity))
            .map(|_| AtomicU64::new(0))
            .collect()
    }

    #[test]
    fn the_last_writing_is_read() {
        let words = words(3);
        assert_eq!(read(&words), None);
        assert!(write(&words, &[1, 2, 3]));
        assert_eq!(read(&words), Some(vec![1, 2, 3]));
        assert!(write(&words, &[]));
        assert_eq!(read(&words), Some(vec![]));
        assert!(write(&words, &[9]));
        assert_eq!(read(&words), Some(vec![9]));
        assert!(!write(&words, &[1, 2, 3, 4]));
        assert_eq!(read(&words), Some(vec![9]), "as it was");
    }

    // A writer that dies in the middle leaves the last whole snapshot.
    #[test]
    fn half_a_writing_is_not_seen() {
        let words = words(2);
        write(&words, &[1, 1]);
        copy_of(&words, 2)[1].store(7, Ordering::Relaxed);
        assert_eq!(read(&words), Some(vec![1, 1]));
        write(&words, &[2, 2]);
        assert_eq!(read(&words), Some(vec![2, 2]));
    }

    // I8: who can write to it can't have it read out of bounds.
    #[test]
    fn an_impossible_length_is_nothing() {
        let words = words(2);
        write(&words, &[1, 1]);
        copy_of(&words, 1)[0].store(u64::MAX, Ordering::Relaxed);
        assert_eq!(read(&words), None);
    }
}
