//! A tally: what one process did, in a file that its death leaves complete.
//! Entries have a fixed size, and each is appended by one `write`.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;

/// A power of two bytes, so that no entry lies on two pages, and none is torn.
const WORDS: usize = 8;
const ENTRY_BYTES: u64 = WORDS as u64 * 8;

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum Kind {
    /// A producer is about to send the message.
    Intent = 1,
    /// The send returned.
    Accepted,
    /// Everything that was sent before is confirmed.
    Confirmed,
    /// A consumer received the message.
    Taken,
    /// The ack returned.
    Acked,
    /// Everything that was acked before is confirmed.
    AcksConfirmed,
    /// A flush told of lost leases: `number` of them.
    LeasesLost,
    /// A payload was not what was sent.
    Damaged,
    /// The process has done all that it was to do.
    Done,
    /// The send failed: the message must not be there.
    Withdrawn,
    /// A consumer is about to send the message back, in one of the ways.
    SentBack,
}

const KINDS: [Kind; 11] = [
    Kind::Intent,
    Kind::Accepted,
    Kind::Confirmed,
    Kind::Taken,
    Kind::Acked,
    Kind::AcksConfirmed,
    Kind::LeasesLost,
    Kind::Damaged,
    Kind::Done,
    Kind::Withdrawn,
    Kind::SentBack,
];

/// One entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    pub kind: Kind,
    /// By the machine's monotonic clock.
    pub at_ns: u64,
    /// Who sent the message.
    pub producer: u64,
    /// Which of that producer's messages it is.
    pub number: u64,
    /// Its identity.
    pub id: (u64, u64),
    pub redelivered: bool,
    pub attempts: u64,
    /// Of what was taken: when its lease ends, about.
    pub deadline_ns: u64,
}

impl Entry {
    pub fn new(kind: Kind) -> Entry {
        let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).unwrap();
        Entry {
            kind,
            at_ns: now.tv_sec() as u64 * 1_000_000_000 + now.tv_nsec() as u64,
            producer: 0,
            number: 0,
            id: (0, 0),
            redelivered: false,
            attempts: 0,
            deadline_ns: 0,
        }
    }

    /// Which message it is about.
    pub fn message(&self) -> (u64, u64) {
        (self.producer, self.number)
    }

    fn words(&self) -> [u64; WORDS] {
        [
            self.kind as u64,
            self.at_ns,
            self.producer,
            self.number,
            self.id.0,
            self.id.1,
            self.attempts << 1 | u64::from(self.redelivered),
            self.deadline_ns,
        ]
    }

    fn from_words(words: [u64; WORDS]) -> Entry {
        Entry {
            kind: KINDS[words[0] as usize - 1],
            at_ns: words[1],
            producer: words[2],
            number: words[3],
            id: (words[4], words[5]),
            redelivered: words[6] & 1 != 0,
            attempts: words[6] >> 1,
            deadline_ns: words[7],
        }
    }
}

/// A tally being written.
pub struct Tally {
    file: File,
}

impl Tally {
    pub fn append_to(path: &Path) -> Tally {
        let file = OpenOptions::new().append(true).create(true).open(path);
        Tally {
            file: file.unwrap(),
        }
    }

    pub fn note(&mut self, entry: Entry) {
        let mut bytes = [0; ENTRY_BYTES as usize];
        for (place, word) in bytes.chunks_exact_mut(8).zip(entry.words()) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        assert_eq!(self.file.write(&bytes).unwrap(), bytes.len());
    }

    /// How many entries the file has.
    pub fn count(path: &Path) -> u64 {
        std::fs::metadata(path).map_or(0, |metadata| metadata.len() / ENTRY_BYTES)
    }

    pub fn read(path: &Path) -> Vec<Entry> {
        let bytes = std::fs::read(path).unwrap_or_default();
        assert_eq!(bytes.len() as u64 % ENTRY_BYTES, 0, "a torn entry");
        let entry = |chunk: &[u8]| {
            let mut words = [0; WORDS];
            for (word, bytes) in words.iter_mut().zip(chunk.chunks_exact(8)) {
                *word = u64::from_ne_bytes(bytes.try_into().unwrap());
            }
            Entry::from_words(words)
        };
        bytes
            .chunks_exact(ENTRY_BYTES as usize)
            .map(entry)
            .collect()
    }
}
