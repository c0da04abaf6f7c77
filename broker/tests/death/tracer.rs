//! A process under `ptrace`.

use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use std::time::{Duration, Instant};

/// A system call that takes longer than this waits for something.
const WAITS: Duration = Duration::from_millis(4);
const BREAKPOINT: u8 = 0xcc;
const SYSCALL: u16 = 0x050f;

/// What one step came to.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// An instruction is done.
    Plain,
    /// A system call is done.
    Call,
    /// It is in a system call, which waits.
    Waits,
    /// The next instruction is a breakpoint.
    Breakpoint,
}

/// The tracee. Killed when this is dropped.
pub struct Tracee {
    pid: Pid,
    dead: bool,
}

impl Tracee {
    /// The tracer's side of a fork whose other side calls [`ptrace::traceme`] and
    /// comes to a breakpoint.
    pub fn new(pid: Pid) -> Tracee {
        Tracee { pid, dead: false }
    }

    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Lets it run to its next breakpoint, and stand behind it.
    #[track_caller]
    pub fn run_to_breakpoint(&self) {
        ptrace::cont(self.pid, None).unwrap();
        self.expect_trap(waitpid(self.pid, None).unwrap());
    }

    #[track_caller]
    fn expect_trap(&self, status: WaitStatus) {
        let trap = WaitStatus::Stopped(self.pid, Signal::SIGTRAP);
        assert_eq!(status, trap, "the victim went astray");
    }

    /// One instruction.
    #[track_caller]
    pub fn step(&self) -> Step {
        let regs = ptrace::getregs(self.pid).unwrap();
        // At the very end of a mapping the word can't be read: no breakpoint of
        // ours is there, and no call.
        let word = ptrace::read(self.pid, regs.rip as ptrace::AddressType).unwrap_or(0);
        if word as u8 == BREAKPOINT {
            return Step::Breakpoint;
        }
        ptrace::step(self.pid, None).unwrap();
        if word as u16 != SYSCALL {
            self.expect_trap(waitpid(self.pid, None).unwrap());
            return Step::Plain;
        }
        let done = self.wait_for(WAITS);
        if done { Step::Call } else { Step::Waits }
    }

    /// Waits so long for the end of a step. Returns whether it has come.
    #[track_caller]
    pub fn wait_for(&self, time: Duration) -> bool {
        let started = Instant::now();
        loop {
            match waitpid(self.pid, Some(WaitPidFlag::WNOHANG)).unwrap() {
                WaitStatus::StillAlive if started.elapsed() > time => return false,
                WaitStatus::StillAlive => std::thread::sleep(Duration::from_micros(20)),
                status => {
                    self.expect_trap(status);
                    return true;
                }
            }
        }
    }

    /// SIGKILL. Returns when it is dead.
    pub fn kill(&mut self) {
        nix::sys::signal::kill(self.pid, Signal::SIGKILL).unwrap();
        loop {
            let status = waitpid(self.pid, None).unwrap();
            if matches!(status, WaitStatus::Signaled(_, Signal::SIGKILL, _)) {
                break;
            }
        }
        self.dead = true;
    }
}

impl Drop for Tracee {
    fn drop(&mut self) {
        if !self.dead {
            self.kill();
        }
    }
}
