//! Notices that the process was forked.
//!
//! A child has its parent's handles but not its mappings (MADV_DONTFORK), and
//! two processes must not write one ring. So every handle carries the generation
//! of the process that made it, and each call compares.

use crate::error::{Error, Result};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// How many forks lie between the process in which this was 0 and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// The process that made a handle.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Maker(u32);

impl Maker {
    /// This process.
    pub(crate) fn this_process() -> Result<Maker> {
        watch()?;
        Ok(Maker(GENERATION.load(Ordering::Relaxed)))
    }

    /// Whether this process is a child of the maker.
    #[inline]
    pub(crate) fn is_forked(self) -> bool {
        // Relaxed: a child has a single thread when it changes this.
        GENERATION.load(Ordering::Relaxed) != self.0
    }

    /// [`Error::Forked`] in a child of the maker.
    #[inline]
    pub(crate) fn check(self) -> Result<()> {
        if self.is_forked() {
            return Err(Error::Forked);
        }
        Ok(())
    }
}

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

fn watch() -> Result<()> {
    static REGISTERED: OnceLock<i32> = OnceLock::new();
    let errno = *REGISTERED.get_or_init(|| {
        // SAFETY: `in_child` only changes an atomic, which is allowed in the
        // child of a process with threads, and lives as long as the program.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) }
    });
    match errno {
        0 => Ok(()),
        errno => Err(Error::io(
            "cannot watch for forks",
            std::io::Error::from_raw_os_error(errno),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::wait::{WaitStatus, waitpid};
    use nix::unistd::{ForkResult, fork};

    #[test]
    fn a_forked_child_knows_that_it_is_one() {
        let maker = Maker::this_process().expect("registers");
        assert!(!maker.is_forked());
        // SAFETY: the child calls nothing but atomics and _exit.
        match unsafe { fork() }.expect("fork") {
            ForkResult::Child => {
                let code = if maker.check().is_err() { 7 } else { 1 };
                // SAFETY: ends the child without running anything else.
                unsafe { libc::_exit(code) }
            }
            ForkResult::Parent { child } => {
                let status = waitpid(child, None).expect("waits");
                assert_eq!(status, WaitStatus::Exited(child, 7));
            }
        }
        assert!(!maker.is_forked(), "the parent stays what it was");
    }
}
