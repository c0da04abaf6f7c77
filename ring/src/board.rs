//! A board: named shared memory in which one process posts what others look at,
//! without a word between them.
//!
//! Unlike a segment it is found by its name, and outlives its writer's death, with
//! the last that was posted.

use crate::atomic::{AtomicU64, Ordering};
use crate::fault::Watched;
use crate::layout::LAYOUT_VERSION;
use crate::segment::{SegmentError, reserve};
use crate::snapshot;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::mman::{shm_open, shm_unlink};
use nix::sys::stat::Mode;
use shared_memory::{Shmem, ShmemConf, ShmemError};
use std::fs::File;
use std::path::Path;

/// The first word of a board.
const MAGIC: u64 = u64::from_le_bytes(*b"ringmbrd");
/// Words of the header: magic, layout version, capacity.
const HEADER_WORDS: usize = 3;

/// A mapped board. Whoever made it removes the name when it is dropped.
pub struct Board {
    /// Before the memory: it must go first.
    _watched: Watched,
    memory: Shmem,
}

impl std::fmt::Debug for Board {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Board({})", self.memory.get_os_id())
    }
}

impl Board {
    /// Makes the board of this name (which begins with a slash and has no other),
    /// for snapshots of up to so many bytes, with its memory reserved, readable
    /// and writable by this user alone. One that has the name already is a dead
    /// process's: it is removed.
    pub fn create(name: &str, capacity_bytes: usize) -> Result<Board, SegmentError> {
        remove(name)?;
        // The first word is the length in bytes.
        let capacity = 1 + capacity_bytes.div_ceil(8);
        let bytes = 8 * (HEADER_WORDS + snapshot::words_for(capacity));
        let made = ShmemConf::new().os_id(name).size(bytes).create();
        let memory = made.map_err(|e| error("cannot create the status board", name, e))?;
        let file =
            File::from(shm_open(name, OFlag::O_RDWR, Mode::empty()).map_err(|e| {
                SegmentError::io("cannot open the status board", Path::new(name), e)
            })?);
        // So that a full file system is an error here, and no SIGBUS later.
        reserve(&file, Path::new(name), 0, bytes as u64)?;
        let board = Board::of(memory);
        let words = board.words();
        words[1].store(u64::from(LAYOUT_VERSION), Ordering::Relaxed);
        words[2].store(capacity as u64, Ordering::Relaxed);
        // Pairs with `open`: who sees the magic sees the rest.
        words[0].store(MAGIC, Ordering::Release);
        Ok(board)
    }

    /// Maps the board of this name, to read it. (The mapping can be written too:
    /// only its user has it, who could harm the writer anyway.)
    pub fn open(name: &str) -> Result<Board, SegmentError> {
        let found = ShmemConf::new().os_id(name).open();
        let memory = found.map_err(|e| error("cannot open the status board", name, e))?;
        if memory.len() < 8 * HEADER_WORDS {
            return Err(SegmentError::Initialising);
        }
        let board = Board::of(memory);
        let words = board.words();
        match words[0].load(Ordering::Acquire) {
            MAGIC => {}
            0 => return Err(SegmentError::Initialising),
            _ => return Err(SegmentError::Corrupt("it does not begin as one does")),
        }
        let found = words[1].load(Ordering::Relaxed) as u32;
        if found != LAYOUT_VERSION {
            return Err(SegmentError::Version {
                found,
                known: LAYOUT_VERSION,
            });
        }
        let capacity = words[2].load(Ordering::Relaxed) as usize;
        let fits = |capacity| HEADER_WORDS + snapshot::words_for(capacity) == words.len();
        if capacity > words.len() || !fits(capacity) {
            return Err(SegmentError::Corrupt(
                "it is not of the size that it claims",
            ));
        }
        Ok(board)
    }

    fn of(memory: Shmem) -> Board {
        Board {
            _watched: Watched::new(memory.as_ptr() as usize, memory.len()),
            memory,
        }
    }

    fn words(&self) -> &[AtomicU64] {
        let start = self.memory.as_ptr() as *const AtomicU64;
        // SAFETY: the mapping begins at a page, is that long, lives as long as
        // `self`, and is used through atomics alone.
        unsafe { std::slice::from_raw_parts(start, self.memory.len() / 8) }
    }

    /// Posts a snapshot. `false`, and nothing is changed, if it is too long.
    pub fn post(&mut self, content: &[u8]) -> bool {
        let mut words = vec![content.len() as u64];
        words.extend(content.chunks(8).map(|bytes| {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            u64::from_ne_bytes(word)
        }));
        snapshot::write(&self.words()[HEADER_WORDS..], &words)
    }

    /// What was posted last, whole; `None` if nothing was yet.
    pub fn look(&self) -> Option<Vec<u8>> {
        let words = snapshot::read(&self.words()[HEADER_WORDS..])?;
        let (&length, content) = words.split_first()?;
        let mut bytes: Vec<u8> = content.iter().flat_map(|word| word.to_ne_bytes()).collect();
        if length > bytes.len() as u64 {
            return None;
        }
        bytes.truncate(length as usize);
        Some(bytes)
    }
}

/// Removes the board of this name, if there is one: a dead process's.
pub fn remove(name: &str) -> Result<(), SegmentError> {
    match shm_unlink(name) {
        Ok(()) | Err(Errno::ENOENT) => Ok(()),
        Err(e) => Err(SegmentError::io(
            "cannot remove the status board",
            Path::new(name),
            e,
        )),
    }
}

fn error(what: &'static str, name: &str, error: ShmemError) -> SegmentError {
    let source = match error {
        ShmemError::MapCreateFailed(errno)
        | ShmemError::MapOpenFailed(errno)
        | ShmemError::UnknownOsError(errno) => std::io::Error::from_raw_os_error(errno as i32),
        other => std::io::Error::other(other.to_string()),
    };
    SegmentError::io(what, Path::new(name), source)
}
