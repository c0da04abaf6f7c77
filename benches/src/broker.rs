//! A private broker for one measurement.

use ringmain::Client;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// A broker with folders of its own; killed, and its folders removed, when it is
/// dropped.
pub struct Broker {
    process: Child,
    folder: tempfile::TempDir,
    _shm: tempfile::TempDir,
}

impl Broker {
    /// Starts it, and waits until it is in service.
    pub fn start() -> std::io::Result<Broker> {
        let folder = tempfile::tempdir()?;
        let shm = tempfile::tempdir_in("/dev/shm")?;
        let program = std::env::current_exe()?.with_file_name("ringmain");
        let mut process = Command::new(&program)
            .arg("serve")
            .arg("--data-dir")
            .arg(folder.path().join("data"))
            .arg("--shm-dir")
            .arg(shm.path().join("rings"))
            .arg("--socket")
            .arg(folder.path().join("socket"))
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
        Ok(Broker {
            process,
            folder,
            _shm: shm,
        })
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

impl Drop for Broker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
