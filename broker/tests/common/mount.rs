//! File systems that are small, so that they can be filled.

use nix::sys::statvfs::statvfs;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A tmpfs of so many bytes, until it is dropped.
pub struct SmallFileSystem(PathBuf);

impl SmallFileSystem {
    /// `None`, and a line that nobody overlooks, if this user may not mount.
    pub fn at(folder: &Path, bytes: u64, what: &str) -> Option<SmallFileSystem> {
        let options = format!("size={bytes},mode=700");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &options, "tmpfs"]);
        let done = mount.arg(folder).output();
        if done.is_ok_and(|output| output.status.success()) {
            return Some(SmallFileSystem(folder.to_owned()));
        }
        skip(&format!(
            "no file system can be mounted: {what} is NOT tested"
        ));
        None
    }

    pub fn free(&self) -> u64 {
        let found = statvfs(&self.0).unwrap();
        found.blocks_available() as u64 * found.fragment_size() as u64
    }

    /// Takes all room but this much, with a file that is returned.
    pub fn fill(&self, but: u64) -> File {
        let hog = File::create(self.0.join("hog")).unwrap();
        while self.free() > but {
            let more = (64 << 10).min(self.free() - but) as usize;
            // Others may have taken it meanwhile.
            let _ = (&hog).write_all(&vec![1; more]);
        }
        hog
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// Says so where the test runner does not hide it.
pub fn skip(why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
}
