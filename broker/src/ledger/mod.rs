//! The ledger: files in shared memory that the broker alone maps. They outlive
//! it as the rings do, and hold what a successor must know and may not believe
//! from clients' memory.
//!
//! ```text
//!   ledger          numbers of rounds, and the intake log
//!   leases          the lease table
//!   s<N>.ledger     a session
//!   s<N>.ring       its segment, which the client maps as well
//!   s<N>.out<K>     an outbound payload segment of it
//!   s<N>.in<K>      an inbound one
//! ```
//!
//! One thread writes. It may be killed between any two stores, and what it had
//! stored by then is what a successor finds, in that order: so where order
//! matters a store is a Release, which keeps the compiler from moving it. (No
//! other thread reads meanwhile; Release pairs with the Acquire of the
//! successor's mapping the file.)

mod leases;
mod session;

pub use leases::LeaseTable;
pub use session::{Direction, SEGMENTS_MAX, SessionLedger, SessionState};

use crate::crash::crash_point;
use ringmain_ring::segment::{self, Mapping, SegmentError};
use ringmain_ring::{AtomicU64, Ordering};
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

/// Version of the ledger's files. Raise it with any change here, in
/// [`leases`] or in [`session`]; a broker refuses another one.
const VERSION: u64 = 2;
const MAGIC: u64 = u64::from_ne_bytes(*b"RMLEDGER");

/// Entries of the intake log.
const LOG_ENTRIES: u64 = 4096;
const LOG_START: usize = 512;
const BYTES: u64 = (LOG_START as u64 + LOG_ENTRIES * 2) * 8;

/// Words of the file.
mod word {
    pub const MAGIC: usize = 0;
    pub const VERSION: usize = 1;
    pub const INSTANCE: usize = 2;
    pub const BOOT: usize = 3;
    pub const WRITTEN: usize = 4;
    pub const COMMITTED: usize = 5;
    pub const FINISHED: usize = 6;
    pub const LOG_HEAD: usize = 8;
    pub const LOG_TAIL: usize = 9;
}

/// Why a ledger can't be used.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// Shared memory can't be had.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// It was written by another version.
    #[error(
        "{path} was written by another version of ringmain (its layout is {found}, this version's \
         {known}), and may hold accepted messages: start that version again, stop it with \
         `ringmain stop --drain`, then start this one"
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// The version found.
        found: u64,
        /// The version that this program writes.
        known: u64,
    },
    /// It makes no sense.
    #[error(
        "{path} is damaged ({what}), and may hold accepted messages: to give them up, remove the \
         folder it is in"
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: &'static str,
    },
}

/// A file of words, mapped.
#[derive(Debug)]
struct Words {
    mapping: Mapping,
    path: PathBuf,
}

impl Words {
    /// Makes the file with `reserved` bytes of memory and room for `bytes`.
    fn create(path: PathBuf, reserved: u64, bytes: u64) -> Result<Words, LedgerError> {
        crash_point("make a ledger's file");
        let file = segment::create(&path, reserved)?;
        if bytes > reserved {
            set_length(&file, &path, bytes)?;
        }
        let mapping = Mapping::new(&file, &path, bytes as usize)?;
        Ok(Words { mapping, path })
    }

    /// Maps the file as it is. Checks magic number and version.
    fn open(path: PathBuf, bytes: u64) -> Result<Words, LedgerError> {
        let file = match OpenOptions::new().read(true).write(true).open(&path) {
            Err(source) if source.kind() == std::io::ErrorKind::NotFound => {
                let what = "it is missing";
                return Err(LedgerError::Corrupt { path, what });
            }
            file => file.map_err(|source| SegmentError::Io {
                what: "cannot open",
                path: path.clone(),
                source,
            })?,
        };
        let mapping = match Mapping::new(&file, &path, bytes as usize) {
            Err(SegmentError::Corrupt(what)) => return Err(LedgerError::Corrupt { path, what }),
            other => other?,
        };
        let words = Words { mapping, path };
        match (words.get(word::MAGIC), words.get(word::VERSION)) {
            (MAGIC, VERSION) => Ok(words),
            (MAGIC, found) if found != 0 => Err(LedgerError::Version {
                path: words.path,
                found,
                known: VERSION,
            }),
            _ => Err(words.corrupt("no ledger")),
        }
    }

    /// Makes the file one that [`Words::open`] takes; the last step of making
    /// it.
    fn publish(&self) {
        self.set("begin a ledger's file", word::MAGIC, MAGIC);
        self.set("finish a ledger's file", word::VERSION, VERSION);
    }

    fn corrupt(&self, what: &'static str) -> LedgerError {
        LedgerError::Corrupt {
            path: self.path.clone(),
            what,
        }
    }

    #[inline]
    fn word(&self, index: usize) -> &AtomicU64 {
        &self.mapping.words()[index]
    }

    #[inline]
    fn get(&self, index: usize) -> u64 {
        self.word(index).load(Ordering::Acquire)
    }

    /// Stores a word that says nothing to a successor before another one is
    /// [set](Words::set).
    #[inline]
    fn put(&self, index: usize, value: u64) {
        self.word(index).store(value, Ordering::Relaxed);
    }

    /// Stores behind everything stored before. The name is that of the crash
    /// point.
    #[inline]
    fn set(&self, point: &'static str, index: usize, value: u64) {
        crash_point(point);
        self.word(index).store(value, Ordering::Release);
    }
}

fn set_length(file: &std::fs::File, path: &Path, bytes: u64) -> Result<(), LedgerError> {
    file.set_len(bytes).map_err(|source| {
        LedgerError::Segment(SegmentError::Io {
            what: "cannot set the length of",
            path: path.to_owned(),
            source,
        })
    })
}

/// Numbers of rounds, and the intake log.
#[derive(Debug)]
pub struct Ledger {
    words: Words,
}

impl Ledger {
    /// Where the ledger of a shared-memory folder lies.
    pub fn path(dir: &Path) -> PathBuf {
        dir.join("ledger")
    }

    /// Makes the ledger of an instance in this boot of the machine, with `round`
    /// as the last finished round.
    pub fn create(dir: &Path, instance: u64, boot: u64, round: u64) -> Result<Ledger, LedgerError> {
        let words = Words::create(Self::path(dir), BYTES, BYTES)?;
        words.put(word::INSTANCE, instance);
        words.put(word::BOOT, boot);
        words.put(word::COMMITTED, round);
        words.put(word::FINISHED, round);
        words.publish();
        Ok(Ledger { words })
    }

    /// Opens the ledger that a predecessor left.
    pub fn open(dir: &Path) -> Result<Ledger, LedgerError> {
        let words = Words::open(Self::path(dir), BYTES)?;
        let ledger = Ledger { words };
        let (head, tail) = ledger.log_range();
        if head > tail || tail - head > LOG_ENTRIES {
            return Err(ledger.words.corrupt("impossible intake log"));
        }
        Ok(ledger)
    }

    /// The broker's instance.
    pub fn instance(&self) -> u64 {
        self.words.get(word::INSTANCE)
    }

    /// The boot of the machine in which the ledger was made.
    pub fn boot(&self) -> u64 {
        self.words.get(word::BOOT)
    }

    /// The last round that was written to the store with a batch.
    pub fn written(&self) -> u64 {
        self.words.get(word::WRITTEN)
    }

    /// The last committed round, unless the store knows a later one.
    pub fn committed(&self) -> u64 {
        self.words.get(word::COMMITTED)
    }

    /// The last round all of whose steps are done.
    pub fn finished(&self) -> u64 {
        self.words.get(word::FINISHED)
    }

    /// The store has this round's batch.
    pub fn set_written(&self, round: u64) {
        self.words.set("note a written round", word::WRITTEN, round);
    }

    /// The round is committed: this store is what commits one that has nothing
    /// to write.
    pub fn set_committed(&self, round: u64) {
        self.words
            .set("note a committed round", word::COMMITTED, round);
    }

    /// All steps of the round are done.
    pub fn set_finished(&self, round: u64) {
        self.words
            .set("note a finished round", word::FINISHED, round);
    }

    fn log_range(&self) -> (u64, u64) {
        (
            self.words.get(word::LOG_HEAD),
            self.words.get(word::LOG_TAIL),
        )
    }

    fn log_word(index: u64) -> usize {
        LOG_START + (index % LOG_ENTRIES) as usize * 2
    }

    /// The intake log, oldest entry first: *(session, up to)*.
    pub fn log(&self) -> Vec<(u64, u64)> {
        let (head, tail) = self.log_range();
        (head..tail).map(|index| self.log_entry(index)).collect()
    }

    fn log_entry(&self, index: u64) -> (u64, u64) {
        let at = Self::log_word(index);
        (self.words.get(at), self.words.get(at + 1))
    }

    /// Notes, before they are applied, that the session's records before `up_to`
    /// are taken in next. `pinned` says of a session up to where it is
    /// committed, or `None` if it is gone.
    ///
    /// When the log is full its oldest entries go. One whose records are not
    /// all committed is copied forward, unless the session has a later entry,
    /// which covers it.
    #[inline]
    pub fn log_intake(&self, session: u64, up_to: u64, committed: impl Fn(u64) -> Option<u64>) {
        let (head, tail) = self.log_range();
        if tail > head && self.words.get(Self::log_word(tail - 1)) == session {
            self.words.set(
                "log an intake, further",
                Self::log_word(tail - 1) + 1,
                up_to,
            );
            return;
        }
        // Room for this entry and for one that is copied forward.
        while self.log_range().1 - self.log_range().0 > LOG_ENTRIES - 2 {
            self.drop_oldest(&committed);
        }
        self.append_log(session, up_to);
    }

    fn append_log(&self, session: u64, up_to: u64) {
        let tail = self.words.get(word::LOG_TAIL);
        let at = Self::log_word(tail);
        self.words.put(at, session);
        self.words.put(at + 1, up_to);
        self.words.set("log an intake", word::LOG_TAIL, tail + 1);
    }

    fn drop_oldest(&self, committed: &impl Fn(u64) -> Option<u64>) {
        let (head, tail) = self.log_range();
        let (session, up_to) = self.log_entry(head);
        let pinned = committed(session).is_some_and(|committed| committed < up_to);
        let covered = || (head + 1..tail).any(|index| self.log_entry(index).0 == session);
        if pinned && !covered() {
            self.append_log(session, up_to);
        }
        self.words
            .set("drop the oldest intake", word::LOG_HEAD, head + 1);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn ledger() -> (tempfile::TempDir, Ledger) {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::create(dir.path(), 7, 8, 3).unwrap();
        (dir, ledger)
    }

    #[test]
    fn a_successor_finds_what_was_stored() {
        let (dir, ledger) = ledger();
        ledger.set_written(4);
        ledger.set_committed(5);
        ledger.log_intake(1, 64, |_| Some(0));
        ledger.log_intake(2, 32, |_| Some(0));
        ledger.log_intake(2, 48, |_| Some(0));
        drop(ledger);
        let found = Ledger::open(dir.path()).unwrap();
        assert_eq!((found.instance(), found.boot()), (7, 8));
        assert_eq!(
            (found.written(), found.committed(), found.finished()),
            (4, 5, 3)
        );
        assert_eq!(found.log(), [(1, 64), (2, 48)]);
    }

    #[test]
    fn a_full_log_keeps_the_newest_entry_of_each_pinned_session() {
        let (_dir, ledger) = ledger();
        // Session 1 is pinned at its first entry; 2 and 3 are always committed.
        let committed = |session| {
            if session == 1 {
                Some(0)
            } else {
                Some(u64::MAX)
            }
        };
        ledger.log_intake(1, 8, committed);
        for round in 0..3 * LOG_ENTRIES {
            ledger.log_intake(2 + round % 2, 8 * round, committed);
        }
        let log = ledger.log();
        assert!(log.len() as u64 <= LOG_ENTRIES);
        assert_eq!(
            log.iter()
                .filter(|&&(session, _)| session == 1)
                .collect::<Vec<_>>(),
            [&(1, 8)]
        );
    }

    #[test]
    fn another_version_and_garbage_are_told_apart() {
        let (dir, ledger) = ledger();
        ledger.words.put(word::VERSION, 99);
        let error = Ledger::open(dir.path()).unwrap_err();
        assert!(
            matches!(
                error,
                LedgerError::Version {
                    found: 99,
                    known: VERSION,
                    ..
                }
            ),
            "{error}"
        );
        ledger.words.put(word::MAGIC, 1);
        let error = Ledger::open(dir.path()).unwrap_err();
        assert!(matches!(error, LedgerError::Corrupt { .. }), "{error}");
        std::fs::write(Ledger::path(dir.path()), b"short").unwrap();
        let error = Ledger::open(dir.path()).unwrap_err();
        assert!(matches!(error, LedgerError::Corrupt { .. }), "{error}");
    }
}
