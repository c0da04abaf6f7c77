//! SIGINT and SIGTERM as something to look at, instead of an end in mid-work.

use super::exit::Failure;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

/// How long the work may go on after a signal: it may be stuck in a write that
/// nobody reads.
const GRACE: Duration = Duration::from_secs(10);

/// From its making on, the first SIGINT or SIGTERM shows here. The second one
/// ends the process; so does time.
#[derive(Debug)]
pub(super) struct Interrupt {
    /// The signal's number, or 0.
    signal: Arc<AtomicU8>,
    /// Readable once a signal has come.
    bell: UnixStream,
}

impl Interrupt {
    pub(super) fn catch() -> Result<Interrupt, Failure> {
        Interrupt::set_up().map_err(|e| Failure::io("cannot catch signals", &e))
    }

    fn set_up() -> io::Result<Interrupt> {
        let signal = Arc::new(AtomicU8::new(0));
        let (bell, mut ringer) = UnixStream::pair()?;
        let mut signals = Signals::new([SIGINT, SIGTERM])?;
        let told = Arc::clone(&signal);
        std::thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || {
                for number in signals.forever() {
                    // Relaxed: it stands for itself.
                    if told.swap(number as u8, Ordering::Relaxed) != 0 {
                        std::process::exit(i32::from(exit_code(number as u8)));
                    }
                    // One byte, which the socket has room for.
                    let _ = ringer.write_all(&[1]);
                    std::thread::spawn(move || {
                        std::thread::sleep(GRACE);
                        std::process::exit(i32::from(exit_code(number as u8)));
                    });
                }
            })?;
        Ok(Interrupt { signal, bell })
    }

    /// Whether a signal has come.
    pub(super) fn came(&self) -> bool {
        self.signal.load(Ordering::Relaxed) != 0
    }

    /// An error with the signal's exit code, if one has come.
    pub(super) fn check(&self) -> Result<(), Failure> {
        match self.signal.load(Ordering::Relaxed) {
            0 => Ok(()),
            signal => Err(Failure::silent(exit_code(signal))),
        }
    }

    /// Waits so long. `true` if a signal came first.
    pub(super) fn wait(&self, time: Duration) -> bool {
        let mut polled = [PollFd::new(self.bell.as_fd(), PollFlags::POLLIN)];
        let millis = PollTimeout::try_from(time).unwrap_or(PollTimeout::MAX);
        // Interrupted or not: who waits looks again.
        let _ = poll(&mut polled, millis);
        self.came()
    }

    /// Waits until the descriptor can be read, or is at its end. `false` if a
    /// signal came first.
    pub(super) fn wait_readable(&self, descriptor: impl AsFd) -> io::Result<bool> {
        loop {
            let mut polled = [
                PollFd::new(self.bell.as_fd(), PollFlags::POLLIN),
                PollFd::new(descriptor.as_fd(), PollFlags::POLLIN),
            ];
            match poll(&mut polled, PollTimeout::NONE) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(e) => return Err(e.into()),
            }
            if self.came() {
                return Ok(false);
            }
            if polled[1].any().unwrap_or(true) {
                return Ok(true);
            }
        }
    }
}

/// What shells say of a process that a signal ended.
fn exit_code(signal: u8) -> u8 {
    128 + signal
}
