//! The data folder: made, locked and measured.

use super::super::StoreError;
use crate::crash::crash_point;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A data folder that no other broker uses as long as this lives.
pub(super) struct Folder {
    dir: PathBuf,
    _lock: Flock<File>,
}

impl Folder {
    /// Locks the folder, which is made if need be.
    pub(super) fn lock(dir: &Path) -> Result<Folder, StoreError> {
        make(dir)?;
        let path = dir.join("lock");
        crash_point("make the lock of the data folder");
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(|error| file_error(&path, &error))?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => Ok(Folder {
                dir: dir.to_owned(),
                _lock: lock,
            }),
            Err((_, Errno::EWOULDBLOCK)) => Err(StoreError::InUse(dir.display().to_string())),
            Err((_, errno)) => Err(file_error(&path, &errno.into())),
        }
    }

    /// Makes a folder in it, if it is not there.
    pub(super) fn make(&self, path: &Path) -> Result<(), StoreError> {
        make(path)
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Syncs the folder's entries: without it a power cut could take the whole
    /// database of a new folder.
    pub(super) fn sync(&self) -> Result<(), StoreError> {
        sync_entries(&self.dir)
    }

    /// Bytes that the broker's user may still write to the file system.
    pub(super) fn free_bytes(&self) -> Result<u64, StoreError> {
        let stat = nix::sys::statvfs::statvfs(&self.dir)
            .map_err(|errno| file_error(&self.dir, &errno.into()))?;
        Ok(stat.blocks_available() * stat.fragment_size())
    }
}

/// Makes the folder and what is missing above it, for this user alone, and syncs
/// the entries made.
fn make(dir: &Path) -> Result<(), StoreError> {
    let missing: Vec<&Path> = dir.ancestors().take_while(|path| !path.exists()).collect();
    crash_point("make a folder of the store");
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(|error| file_error(dir, &error))?;
    for path in missing {
        match path.parent() {
            Some(parent) if parent != Path::new("") => sync_entries(parent)?,
            _ => sync_entries(Path::new("."))?,
        }
    }
    Ok(())
}

fn sync_entries(dir: &Path) -> Result<(), StoreError> {
    crash_point("sync a folder of the store");
    File::open(dir)
        .and_then(|dir| dir.sync_all())
        .map_err(|error| file_error(dir, &error))
}

/// Says which file cannot be used and, where that is known, what to do.
pub(super) fn file_error(path: &Path, error: &io::Error) -> StoreError {
    let advice = match error.kind() {
        ErrorKind::AlreadyExists | ErrorKind::NotADirectory => {
            ": a file is in the place of a folder; move it away, or use another data folder"
        }
        ErrorKind::PermissionDenied => {
            ": give the data folder to the user that the broker runs as, or use another one"
        }
        ErrorKind::ReadOnlyFilesystem => {
            ": mount the file system for writing, or use another data folder"
        }
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            ": free some disk space, then start the broker again"
        }
        _ => "",
    };
    StoreError::Failed(format!("{}: {error}{advice}", path.display()))
}
