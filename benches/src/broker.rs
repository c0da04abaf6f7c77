//! A private broker for one measurement.

use ringmain::Client;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A broker with folders of its own; killed, and its folders removed, when it is
/// dropped.
pub struct Broker {
    process: Child,
    folder: tempfile::TempDir,
    shm: tempfile::TempDir,
}

impl Broker {
    /// Starts it, and waits until it is in service.
    pub fn start() -> std::io::Result<Broker> {
        let folder = tempfile::tempdir()?;
        let shm = tempfile::tempdir_in("/dev/shm")?;
        let process = serve(folder.path(), shm.path())?;
        Ok(Broker {
            process,
            folder,
            shm,
        })
    }

    /// Kills it, and starts the next one over what it left. Gives the time from the
    /// start to service.
    pub fn kill_and_restart(&mut self) -> std::io::Result<Duration> {
        self.process.kill()?;
        self.process.wait()?;
        let start = Instant::now();
        self.process = serve(self.folder.path(), self.shm.path())?;
        Ok(start.elapsed())
    }

    /// Bytes of shared memory that its files have reserved.
    pub fn shm_bytes(&self) -> u64 {
        bytes_under(&self.shm.path().join("rings"))
    }

    /// Bytes of its data folder on the disk.
    pub fn disk_bytes(&self) -> u64 {
        bytes_under(&self.folder.path().join("data"))
    }

    /// Its socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// A client of it.
    pub fn client(&self) -> ringmain::Result<Client> {
        Client::connect_to(self.socket())
    }
}

fn serve(folder: &Path, shm: &Path) -> std::io::Result<Child> {
    let program = std::env::current_exe()?.with_file_name("ringmain");
    let mut process = Command::new(&program)
        .arg("serve")
        .arg("--data-dir")
        .arg(folder.join("data"))
        .arg("--shm-dir")
        .arg(shm.join("rings"))
        .arg("--socket")
        .arg(folder.join("socket"))
        .args(["--log-level", "error"])
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| {
            let hint = "build it first: cargo build --release --workspace";
            std::io::Error::other(format!(
                "cannot start {}: {error}; {hint}",
                program.display()
            ))
        })?;
    if let Some(out) = process.stdout.take() {
        // It prints its socket when it is in service.
        BufReader::new(out).read_line(&mut String::new())?;
    }
    Ok(process)
}

/// What the files under a folder take, of memory or disk.
fn bytes_under(folder: &Path) -> u64 {
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let bytes = files.filter_map(|file| {
        let found = file.metadata().ok()?;
        // The unit of this field is 512 bytes.
        Some(match found.is_dir() {
            true => bytes_under(&file.path()),
            false => found.blocks() * 512,
        })
    });
    bytes.sum()
}

impl Drop for Broker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
