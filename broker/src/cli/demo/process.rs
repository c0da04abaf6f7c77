//! A process of the demo, as the supervisor holds it.

use crate::cli::exit::{FAILED, Failure};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::ffi::OsStr;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How much of a process's log an error quotes.
const QUOTE_BYTES: usize = 500;

/// A running process. Dropped, it is killed.
#[derive(Debug)]
pub(super) struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts this program with a role. What it says goes to a log in `folder`.
    pub(super) fn start<A: AsRef<OsStr>>(
        name: String,
        folder: &Path,
        arguments: &[A],
    ) -> Result<Process, Failure> {
        let failure = |e| Failure::io(format_args!("cannot start {name}"), &e);
        let log = folder.join(format!("{name}.log"));
        let log_file = OpenOptions::new().create(true).append(true).open(&log);
        let child = Command::new("/proc/self/exe")
            .arg0("ringmain")
            .arg("demo-role")
            .args(["--parent", &std::process::id().to_string()])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log_file.map_err(failure)?)
            // Ctrl-C is for the supervisor, which ends them in order.
            .process_group(0)
            .spawn()
            .map_err(failure)?;
        Ok(Process { name, child, log })
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// SIGKILL, and waits for the end.
    pub(super) fn kill(&mut self) -> Result<(), Failure> {
        self.child
            .kill()
            .and_then(|()| self.child.wait())
            .map_err(|e| Failure::io(format_args!("cannot kill {}", self.name), &e))?;
        Ok(())
    }

    /// SIGTERM, and waits for the end, which must be a good one.
    pub(super) fn stop(&mut self, patience: Duration) -> Result<(), Failure> {
        // A process that has ended is no longer ours to signal only once it is
        // waited for, which happens here alone.
        match kill(Pid::from_raw(self.pid() as i32), Signal::SIGTERM) {
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(e) => return Err(Failure::io("cannot stop a process", &e.into())),
        }
        let deadline = Instant::now() + patience;
        while !self.has_ended()? {
            if Instant::now() > deadline {
                return Err(self.failed("does not stop"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Whether it has ended, and well. Otherwise an error with its last words.
    pub(super) fn has_ended(&mut self) -> Result<bool, Failure> {
        match self.child.try_wait() {
            Ok(None) => Ok(false),
            Ok(Some(status)) if status.success() => Ok(true),
            Ok(Some(status)) => Err(self.failed(&describe(status))),
            Err(e) => Err(Failure::io(
                format_args!("cannot look at {}", self.name),
                &e,
            )),
        }
    }

    /// An error if it has ended, however.
    pub(super) fn must_run(&mut self) -> Result<(), Failure> {
        if self.has_ended()? {
            return Err(self.failed("ended before its time"));
        }
        Ok(())
    }

    /// Waits until it has printed a line.
    pub(super) fn wait_for_line(&mut self, patience: Duration) -> Result<(), Failure> {
        let deadline = Instant::now() + patience;
        loop {
            if self.child.stdout.as_mut().is_some_and(has_said_something) {
                return Ok(());
            }
            self.must_run()?;
            if Instant::now() > deadline {
                return Err(self.failed("does not get ready"));
            }
        }
    }

    /// The most memory that it has had, in bytes.
    pub(super) fn peak_memory(&self) -> u64 {
        peak_memory(&self.pid().to_string())
    }

    fn failed(&self, what: &str) -> Failure {
        let log = std::fs::read(&self.log).unwrap_or_default();
        let last = &log[log.len().saturating_sub(QUOTE_BYTES)..];
        let words = String::from_utf8_lossy(last);
        let message = format!("{} {what}: {}", self.name, words.trim());
        Failure::new(FAILED, message)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Errors say that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The most memory that a process has had, in bytes, by its name in `/proc`.
pub(super) fn peak_memory(process: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok());
    kib.unwrap_or(0) * 1024
}

/// Looks for output for a moment.
fn has_said_something(stdout: &mut ChildStdout) -> bool {
    let mut polled = [PollFd::new(stdout.as_fd(), PollFlags::POLLIN)];
    match poll(&mut polled, PollTimeout::from(10u8)) {
        Ok(ready) if ready > 0 => stdout.read(&mut [0; 512]).is_ok_and(|count| count > 0),
        _ => false,
    }
}

fn describe(status: ExitStatus) -> String {
    format!("failed ({status})")
}
