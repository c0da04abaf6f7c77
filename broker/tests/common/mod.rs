//! What the tests over real processes share: a broker in folders of its own,
//! children that send and receive, their tallies, and the audit of these.
//!
//! Each test file uses a part of it.

#![allow(dead_code, unused_imports, reason = "each test file uses a part")]

mod audit;
mod broker;
mod child;
pub mod guide;
mod mixed;
mod mount;
mod role;
mod tally;
mod witness;

pub use audit::{Report, audit, finish, settled_after};
pub use broker::{Broker, PROGRAM, Starting, pause, serve_command, timed};
pub use child::Process;
pub use mount::{SmallFileSystem, skip};
pub use role::{Consume, Hold, Produce, Role, is_child, payload, run_child};
pub use tally::{Entry, Kind, Tally};
pub use witness::Witness;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// No wait lasts longer: a condition that has not come by then has failed.
pub const BOUND: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(2);

/// Waits until the condition holds. Fails the test if it does not come.
#[track_caller]
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < BOUND, "waited in vain: {what}");
        std::thread::sleep(LOOK);
    }
}

/// Waits until this is 0, as long as it gets less. Fails the test if it does not.
#[track_caller]
pub fn wait_used_up(what: &str, mut left: impl FnMut() -> u64) {
    let (mut least, mut since) = (u64::MAX, Instant::now());
    loop {
        let left = left();
        if left == 0 {
            return;
        }
        if left < least {
            (least, since) = (left, Instant::now());
        }
        assert!(since.elapsed() < BOUND, "{what}: {left} are left");
        std::thread::sleep(LOOK);
    }
}

/// The value that the look gives in the end. Fails the test if it gives none.
#[track_caller]
pub fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let mut found = None;
    wait_until(what, || {
        found = look();
        found.is_some()
    });
    found.unwrap()
}

/// Waits until this thread sleeps in the kernel. (`tid` may be a process: then
/// its main thread is meant.)
#[track_caller]
pub fn wait_asleep(pid: i32, tid: i32) {
    let path = format!("/proc/{pid}/task/{tid}/syscall");
    wait_until("a thread falls asleep in a futex", || {
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        // The number of the call that it is in, or "running".
        text.split(' ').next() == Some(&libc::SYS_futex.to_string())
    });
}

/// The number of the calling thread.
pub fn this_thread() -> i32 {
    nix::unistd::gettid().as_raw()
}

/// Sends a signal.
pub fn signal(pid: u32, signal: Signal) {
    kill(Pid::from_raw(pid as i32), signal).unwrap();
}

/// The names of the files in a folder.
pub fn files(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort_unstable();
    names
}

/// Random numbers, from a seed that the test prints.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        scramble(self.0)
    }

    /// One of the numbers below this.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// A number that looks random, from a seed that the test prints.
pub fn scramble(seed: u64) -> u64 {
    // splitmix64
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Has the process killed when the thread that starts it ends, so that an
/// aborted test leaves nothing behind.
pub fn dies_with_us(command: &mut Command) -> &mut Command {
    // SAFETY: `prctl` is a plain system call, allowed between fork and exec.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        })
    }
}

/// Shows a log, if the test is failing.
pub fn show_if_failing(name: &str, log: &PathBuf) {
    if std::thread::panicking() {
        let text = std::fs::read_to_string(log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        let last = &lines[lines.len().saturating_sub(60)..];
        eprintln!("---- {name} ----\n{}", last.join("\n"));
    }
}
