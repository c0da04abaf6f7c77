//! Waiting and waking: nobody calls the kernel to wake who is not asleep.
//!
//! Each side has one wait word in the segment. Who wants to sleep *announces*
//! what it waits for in its word, looks once more whether it is there already,
//! and only then sleeps. Who publishes looks at the other's word and wakes it if
//! its announcement is met.
//!
//! ```text
//!   publisher                      sleeper
//!   1  store cursor                a  set word
//!   2  fence SeqCst                b  fence SeqCst
//!   3  load word                   c  load cursor
//!   4  wake if set                 d  sleep if nothing there
//! ```
//!
//! The fences are the point: with Release and Acquire alone, 3 may read the word
//! as it was before a, and c the cursor as it was before 1, and the sleeper
//! sleeps through what was published. Two SeqCst fences put either 1 before c or
//! a before 3.
//!
//! Waking takes the announcement away, by one atomic exchange, so that of many
//! publishes before the sleeper runs only the first calls the kernel. Sleeps are
//! bounded all the same ([`SLEEP_MAX`]): the other side may be dead.

use crate::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

/// No sleep lasts longer; who sleeps looks around when it ends.
pub const SLEEP_MAX: Duration = Duration::from_secs(1);

/// Bits of the client's wait word: what the client waits for.
pub mod client {
    /// A message in the delivery ring.
    pub const MESSAGES: u32 = 1;
    /// An answer.
    pub const ANSWERS: u32 = 2;
    /// Room in the submission ring.
    pub const ROOM: u32 = 4;
    /// A later stored or synced position.
    pub const CONFIRMATION: u32 = 8;
    /// A change of an attachment word.
    pub const LIMIT: u32 = 16;
    /// Everything: whatever happens to the session as a whole wakes all.
    pub const ALL: u32 = 31;
}

/// Bits of the broker's wait word: what the broker waits for, and what it says
/// of the session. Clients read them after each publish.
pub mod broker {
    /// The broker sleeps: ring after a publish.
    pub const SUBMISSIONS: u32 = 1;
    /// The broker sleeps with deliveries that found no room: ring after taking.
    pub const ROOM: u32 = 2;
    /// The broker reads `tail` no more; see
    /// [`crate::layout::Confirmations::final_position`].
    pub const CLOSING: u32 = 4;
    /// The session was found by a new broker, and no client has resumed it.
    pub const ORPHANED: u32 = 8;
}

/// A wait word. Any number of threads may announce, look and wake.
#[derive(Clone, Copy)]
pub struct WaitWord<'a>(pub &'a AtomicU32);

impl WaitWord<'_> {
    /// Before a sleep (a, b): says what is waited for. The caller now looks
    /// whether it is there already, and if not calls [`WaitWord::sleep`].
    #[inline]
    pub fn announce(&self, bits: u32) {
        self.0.fetch_or(bits, Ordering::Relaxed);
        // Pairs with the fence in `seen_after_publish`.
        fence(Ordering::SeqCst);
    }

    /// Takes an announcement back that needs no wake any more. It is right to
    /// leave it: the price is one wake too many.
    #[inline]
    pub fn withdraw(&self, bits: u32) {
        // Relaxed: orders nothing; a wake may be under way, and is harmless.
        self.0.fetch_and(!bits, Ordering::Relaxed);
    }

    /// After a publish (2, 3): the bits that are set, after everything this
    /// thread has stored before.
    #[inline]
    pub fn seen_after_publish(&self) -> u32 {
        // Pairs with the fence in `announce`, and with that in `set`.
        fence(Ordering::SeqCst);
        // Relaxed: the fence has put this load in its place.
        self.0.load(Ordering::Relaxed)
    }

    /// The bits as they are, with no order to anything: for states that are
    /// looked at again and again.
    #[inline]
    pub fn peek(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    /// Takes the announcement of `bits` (4). Returns those that this call took:
    /// if any, this caller is the one that wakes.
    #[inline]
    pub fn take(&self, bits: u32) -> u32 {
        // AcqRel for symmetry with `announce`; the cursors carry the data.
        self.0.fetch_and(!bits, Ordering::AcqRel) & bits
    }

    /// Sets a state bit, so that either a publisher's next look sees it, or
    /// this caller's following load of the cursor sees the publish.
    pub fn set(&self, bits: u32) {
        self.0.fetch_or(bits, Ordering::Relaxed);
        // Pairs with the fence in `seen_after_publish`.
        fence(Ordering::SeqCst);
    }

    /// After a publish: wakes the sleeper if it waits for any of `bits`.
    #[inline]
    pub fn wake(&self, bits: u32) {
        if self.seen_after_publish() & bits != 0 {
            self.wake_announced(bits);
        }
    }

    /// The part of [`WaitWord::wake`] after the look, for who looks at many
    /// words behind one fence.
    #[cold]
    pub fn wake_announced(&self, bits: u32) {
        if self.take(bits) != 0 {
            futex::wake_all(self.0);
        }
    }

    /// Sleeps on a futex (d) until one of the announced `bits` is taken, or the
    /// time is over. May return early. The bound is [`SLEEP_MAX`].
    pub fn sleep(&self, bits: u32, timeout: Duration) {
        let value = self.0.load(Ordering::Relaxed);
        if value & bits == bits {
            futex::wait(self.0, value, timeout.min(SLEEP_MAX));
        }
    }
}

#[cfg(not(loom))]
mod futex {
    use super::*;

    /// Sleeps while the word has this value. Returns early on any wake, signal
    /// or change; every caller looks again.
    pub(super) fn wait(word: &AtomicU32, value: u32, timeout: Duration) {
        let timeout = libc::timespec {
            tv_sec: timeout.as_secs() as libc::time_t,
            tv_nsec: timeout.subsec_nanos() as libc::c_long,
        };
        // SAFETY: `word` is a live, aligned futex word and `timeout` outlives
        // the call. Not FUTEX_PRIVATE: the waker is another process.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                word.as_ptr(),
                libc::FUTEX_WAIT,
                value,
                &raw const timeout,
            );
        }
    }

    /// Wakes every sleeper of the word.
    pub(super) fn wake_all(word: &AtomicU32) {
        // SAFETY: `word` is a live, aligned futex word.
        unsafe {
            libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX);
        }
    }
}

#[cfg(loom)]
mod futex {
    use super::*;

    // Every wake changes the word first, so a sleep is modelled as waiting for
    // a change: a lost wake-up is then an endless loop, which loom reports.
    pub(super) fn wait(word: &AtomicU32, value: u32, _timeout: Duration) {
        while word.load(Ordering::Relaxed) == value {
            loom::thread::yield_now();
        }
    }

    pub(super) fn wake_all(_word: &AtomicU32) {}
}
