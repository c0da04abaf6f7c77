//! Segments: files in a folder on a tmpfs that processes map.
//!
//! A segment's memory is reserved when it is made, so that a full `/dev/shm` is
//! an error then, and no SIGBUS later.

use memmap2::{MmapOptions, MmapRaw};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::mman::{MmapAdvise, madvise};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use crate::atomic::AtomicU64;
use crate::fault::Watched;

/// Why a segment can't be had.
#[derive(Debug, thiserror::Error)]
pub enum SegmentError {
    /// The file system is full.
    #[error(
        "no shared memory left for {bytes} bytes in {path}: end sessions or enlarge the file system"
    )]
    NoSpace {
        /// The folder or file.
        path: PathBuf,
        /// What was asked for.
        bytes: u64,
    },
    /// A call of the system failed.
    #[error("{what} {path}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The segment was made by a version with another layout.
    #[error(
        "the segment has layout {found}, this version has layout {known}: use the same version of ringmain on both sides"
    )]
    Version {
        /// The version found.
        found: u32,
        /// The version of this library.
        known: u32,
    },
    /// The segment is not finished: its maker died, or is not done.
    #[error("the segment is not initialised")]
    Initialising,
    /// The file is no segment, or not of the size that it claims.
    #[error("not a segment: {0}")]
    Corrupt(&'static str),
}

impl SegmentError {
    pub(crate) fn io(
        what: &'static str,
        path: &Path,
        source: impl Into<io::Error>,
    ) -> SegmentError {
        SegmentError::Io {
            what,
            path: path.to_owned(),
            source: source.into(),
        }
    }
}

/// Makes the file `path`, which must not exist, with `bytes` of reserved zeroes,
/// readable and writable by its owner alone.
pub fn create(path: &Path, bytes: u64) -> Result<File, SegmentError> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(|e| SegmentError::io("cannot create", path, e))?;
    if let Err(error) = reserve(&file, path, 0, bytes) {
        // The file was made two steps ago by this call: nobody else has it.
        let _ = std::fs::remove_file(path);
        return Err(error);
    }
    Ok(file)
}

/// Makes sure that the bytes from `from` to `to` of the file have memory.
pub fn reserve(file: &File, path: &Path, from: u64, to: u64) -> Result<(), SegmentError> {
    loop {
        let length = (to - from) as i64;
        match fallocate(file.as_fd(), FallocateFlags::empty(), from as i64, length) {
            Ok(()) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(Errno::ENOSPC) => {
                return Err(SegmentError::NoSpace {
                    path: path.to_owned(),
                    bytes: to,
                });
            }
            Err(e) => return Err(SegmentError::io("cannot reserve memory for", path, e)),
        }
    }
}

/// A file mapped, shared with whoever else maps it. The memory goes back when this
/// is dropped; the file stays.
///
/// A forked child does not have the mapping, and core dumps leave it out.
pub struct Mapping {
    /// Before the map: it must go first.
    watched: Option<Watched>,
    map: MmapRaw,
}

// SAFETY: the mapping's address is stable, and its bytes are reached only as
// atomics and through `Area`, both of which any thread may use.
unsafe impl Send for Mapping {}
// SAFETY: as for Send.
unsafe impl Sync for Mapping {}

impl std::fmt::Debug for Mapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mapping").field("len", &self.len()).finish()
    }
}

impl Mapping {
    /// Maps the first `bytes` bytes of the file, of which it must have so many, to
    /// read and write.
    pub fn new(file: &File, path: &Path, bytes: usize) -> Result<Mapping, SegmentError> {
        Mapping::made(file, path, bytes, |options| options.map_raw(file))
    }

    /// The same, to read alone: a write is a fault.
    pub(crate) fn read_only(
        file: &File,
        path: &Path,
        bytes: usize,
    ) -> Result<Mapping, SegmentError> {
        Mapping::made(file, path, bytes, |options| options.map_raw_read_only(file))
    }

    fn made(
        file: &File,
        path: &Path,
        bytes: usize,
        map: impl FnOnce(&MmapOptions) -> io::Result<MmapRaw>,
    ) -> Result<Mapping, SegmentError> {
        let found = file
            .metadata()
            .map_err(|e| SegmentError::io("cannot look at", path, e))?
            .len();
        if found < bytes as u64 {
            return Err(SegmentError::Corrupt("the file is shorter than it claims"));
        }
        let map = map(MmapOptions::new().len(bytes))
            .map_err(|e| SegmentError::io("cannot map", path, e))?;
        for advice in [MmapAdvise::MADV_DONTFORK, MmapAdvise::MADV_DONTDUMP] {
            let start = NonNull::new(map.as_mut_ptr().cast())
                .ok_or(SegmentError::Corrupt("mapped at zero"))?;
            // SAFETY: the range is the mapping just made; neither advice
            // changes what this process sees there.
            unsafe { madvise(start, bytes, advice) }
                .map_err(|e| SegmentError::io("cannot set up the mapping of", path, e))?;
        }
        Ok(Mapping { watched: None, map })
    }

    /// Has a SIGBUS in it survived, once [`crate::fault::install`] was called: for
    /// a file that another process could cut short.
    pub fn watched(mut self) -> Mapping {
        self.watched = Some(Watched::new(self.start() as usize, self.len()));
        self
    }

    /// Whether a page of a watched mapping was lost; what it holds since is
    /// partly zeroes.
    pub fn is_damaged(&self) -> bool {
        self.watched.as_ref().is_some_and(Watched::is_damaged)
    }

    /// Says so of a watched mapping, if it was seen otherwise.
    pub fn set_damaged(&self) {
        if let Some(watched) = &self.watched {
            watched.set_damaged();
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Whether nothing is mapped.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    /// The mapping as words. The file may grow behind the mapping: touching a
    /// word whose memory was never reserved is SIGBUS.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: a mapping begins at a page, any bytes are valid words, and
        // atomics may be shared with other writers.
        unsafe { std::slice::from_raw_parts(self.start().cast(), self.len() / 8) }
    }
}
