//! The mark: the number of the last synced round, in a file of its own. The log
//! alone cannot tell a torn tail, which a power cut leaves behind and which may
//! be dropped, from lost rounds that had been confirmed.
//!
//! ```text
//! "RMsynced" | u64 round | u32 CRC-32 of the 16 bytes before
//! ```
//!
//! The file itself is not synced: an older number after a power cut only makes
//! the check weaker.

use super::super::StoreError;
use super::folder::file_error;
use crate::crash::crash_point;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"RMsynced";
const MARK_BYTES: usize = 20;

pub(super) struct MarkFile {
    file: File,
    path: PathBuf,
    found: u64,
}

impl MarkFile {
    /// Opens the file, and creates it if need be.
    pub(super) fn open(path: &Path) -> Result<MarkFile, StoreError> {
        crash_point("make the mark");
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)
            .map_err(|error| file_error(path, &error))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)
            .map_err(|error| file_error(path, &error))?;
        let found = decode(&bytes).unwrap_or_else(|| {
            if !bytes.is_empty() {
                tracing::warn!(
                    path = %path.display(),
                    "the mark of the last sync is unreadable and is ignored: \
                     whether synced messages are missing cannot be checked this time"
                );
            }
            0
        });
        Ok(MarkFile {
            file,
            path: path.to_owned(),
            found,
        })
    }

    /// The round that was in the file when it was opened; 0 if there was none.
    pub(super) fn found(&self) -> u64 {
        self.found
    }

    /// Refuses a store that has lost synced rounds.
    pub(super) fn check(&self, committed: u64) -> Result<(), StoreError> {
        check(self.found, committed)
    }

    /// Notes that a round is synced. That this fails loses nothing but the
    /// check.
    pub(super) fn write(&self, round: u64) {
        crash_point("mark a sync");
        if let Err(error) = self.file.write_all_at(&encode(round), 0) {
            tracing::warn!(path = %self.path.display(), %error, "cannot note the last sync");
        }
    }
}

/// Refuses a store whose last committed round lies below the mark.
pub(super) fn check(mark: u64, committed: u64) -> Result<(), StoreError> {
    if committed >= mark {
        return Ok(());
    }
    Err(StoreError::Corrupt(format!(
        "round {mark} had been synced to the disk, but what can be read ends with round \
         {committed}: messages that were confirmed are missing. Nothing was changed. Look \
         after the disk, then restore the whole data folder from a backup, or move it away \
         to start empty"
    )))
}

fn encode(round: u64) -> [u8; MARK_BYTES] {
    let mut bytes = [0; MARK_BYTES];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..16].copy_from_slice(&round.to_le_bytes());
    let checksum = crc32fast::hash(&bytes[..16]);
    bytes[16..].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

fn decode(bytes: &[u8]) -> Option<u64> {
    let round = u64::from_le_bytes(bytes.get(8..16)?.try_into().ok()?);
    (bytes == encode(round)).then_some(round)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn mark_is_read_back_and_a_torn_one_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("synced");
        let mark = MarkFile::open(&path).unwrap();
        assert_eq!(mark.found(), 0);
        mark.write(3);
        mark.write(77);
        assert_eq!(MarkFile::open(&path).unwrap().found(), 77);

        let bytes = std::fs::read(&path).unwrap();
        for torn in [&bytes[..19], &[0; 20], &[&bytes[..], b"x"].concat()] {
            std::fs::write(&path, torn).unwrap();
            assert_eq!(MarkFile::open(&path).unwrap().found(), 0);
        }
    }

    // I5
    #[test]
    fn store_below_the_mark_is_refused() {
        assert!(check(5, 5).is_ok() && check(0, 0).is_ok() && check(5, 9).is_ok());
        let error = check(5, 4).unwrap_err();
        assert!(matches!(error, StoreError::Corrupt(_)));
        assert!(error.to_string().contains("backup"));
    }
}
