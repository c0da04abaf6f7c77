//! A client in a process of its own: this test program, run again with a role.

use super::broker::pause;
use super::role::{ROLE_VARIABLE, Role};
use super::tally::{Entry, Kind, Tally};
use super::{dies_with_us, show_if_failing, signal, wait_until};
use nix::sys::signal::Signal;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

/// The process, and what it has noted. Killed when this is dropped.
pub struct Process {
    name: String,
    child: Child,
    /// Closed, it tells the process to come to an end.
    stdin: Option<ChildStdin>,
    tally: PathBuf,
    log: PathBuf,
    killed: bool,
    reaped: bool,
    /// How many acks it may have given without having noted them.
    acks_in_doubt_max: usize,
}

impl Process {
    pub(super) fn start(folder: &Path, number: u32, socket: &Path, role: Role) -> Process {
        let name = format!("child {number}: {role:?}");
        let tally = folder.join(format!("child{number}.tally"));
        let log = folder.join(format!("child{number}.log"));
        let output = File::create(&log).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args([
                "--exact",
                "child_process",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(
                ROLE_VARIABLE,
                serde_json::to_string(&(socket, &tally, &role)).unwrap(),
            )
            .stdin(Stdio::piped())
            .stdout(output.try_clone().unwrap())
            .stderr(output);
        let mut child = dies_with_us(&mut command).spawn().unwrap();
        let stdin = child.stdin.take();
        let acks_in_doubt_max = match role {
            Role::Consume(consume) => consume.batch,
            _ => 0,
        };
        Process {
            name,
            child,
            stdin,
            tally,
            log,
            killed: false,
            reaped: false,
            acks_in_doubt_max,
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn entries(&self) -> Vec<Entry> {
        Tally::read(&self.tally)
    }

    /// How many entries the tally has.
    pub fn count(&self) -> u64 {
        Tally::count(&self.tally)
    }

    /// How many of this kind.
    pub fn count_of(&self, kind: Kind) -> u64 {
        self.entries()
            .iter()
            .filter(|entry| entry.kind == kind)
            .count() as u64
    }

    /// Waits until the tally has so many entries more than now.
    #[track_caller]
    pub fn wait_for_more(&self, entries: u64) {
        let goal = self.count() + entries;
        wait_until(&format!("progress of {}", self.name), || {
            self.count() >= goal
        });
    }

    /// Waits until it has noted this.
    #[track_caller]
    pub fn wait_noted(&self, kind: Kind, count: u64) {
        wait_until(&format!("{kind:?} of {}", self.name), || {
            self.count_of(kind) >= count
        });
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.kill_at_once();
        self.reap();
    }

    /// SIGKILL, without waiting for the end.
    pub fn kill_at_once(&mut self) {
        signal(self.pid(), Signal::SIGKILL);
        self.killed = true;
    }

    /// Waits for the end after a signal.
    pub fn reap(&mut self) {
        self.child.wait().unwrap();
        self.reaped = true;
    }

    pub fn acks_in_doubt_max(&self) -> usize {
        if self.killed {
            self.acks_in_doubt_max
        } else {
            0
        }
    }

    pub fn was_killed(&self) -> bool {
        self.killed
    }

    /// SIGSTOP.
    pub fn pause(&self) {
        pause(self.pid());
    }

    /// SIGCONT.
    pub fn resume(&self) {
        signal(self.pid(), Signal::SIGCONT);
    }

    /// Tells it to go on to its next step, or to come to its end.
    pub fn nudge(&mut self) {
        self.stdin = None;
    }

    /// Waits for its end in good order.
    #[track_caller]
    pub fn wait(&mut self) {
        let mut status = None;
        wait_until(&format!("the end of {}", self.name), || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        self.reaped = true;
        assert!(status.unwrap().success(), "{} failed", self.name);
        assert_eq!(
            self.count_of(Kind::Done),
            1,
            "{} has not done all",
            self.name
        );
    }

    /// Tells it to come to its end, and waits for that.
    #[track_caller]
    pub fn finish(&mut self) {
        self.nudge();
        self.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.reaped {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        show_if_failing(&self.name, &self.log);
    }
}
