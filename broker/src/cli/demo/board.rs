//! The boards: a few counters for each process, in files that are mapped by it
//! and by the supervisor. What was written is there though the writer is killed.

use crate::cli::exit::{FAILED, Failure};
use ringmain_ring::Ordering;
use ringmain_ring::segment::{self, Mapping, SegmentError};
use std::fs::OpenOptions;
use std::path::Path;

const BYTES: usize = 4096;

/// What a counter counts.
#[derive(Debug, Clone, Copy)]
pub(super) enum Counter {
    /// Producer: the messages below this number are sent, or about to be.
    Intended = 0,
    /// Producer: the messages below this number are accepted.
    Accepted = 1,
    /// Consumer: received messages, in its record file.
    Taken = 2,
    /// Consumer: of those, acked or about to be.
    Acking = 3,
    /// Consumer: of those, acked.
    Acked = 4,
    /// The most memory that it has had, in bytes, as it ended.
    PeakMemory = 5,
}

/// The counters of one process.
#[derive(Debug)]
pub(super) struct Board {
    map: Mapping,
}

impl Board {
    pub(super) fn create(path: &Path) -> Result<Board, Failure> {
        let file = segment::create(path, BYTES as u64).map_err(failure)?;
        Ok(Board {
            map: Mapping::new(&file, path, BYTES).map_err(failure)?,
        })
    }

    pub(super) fn open(path: &Path) -> Result<Board, Failure> {
        let file = OpenOptions::new().read(true).write(true).open(path);
        let file = file.map_err(|e| Failure::io(path.display(), &e))?;
        Ok(Board {
            map: Mapping::new(&file, path, BYTES).map_err(failure)?,
        })
    }

    pub(super) fn get(&self, counter: Counter) -> u64 {
        // Acquire: pairs with the Release in `set`.
        self.map.words()[counter as usize].load(Ordering::Acquire)
    }

    /// Release: whoever sees this count sees what was done before it, in memory
    /// as in files.
    pub(super) fn set(&self, counter: Counter, value: u64) {
        self.map.words()[counter as usize].store(value, Ordering::Release);
    }
}

fn failure(error: SegmentError) -> Failure {
    Failure::new(FAILED, error.to_string())
}
