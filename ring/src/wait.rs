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
//! Waking takes the announcement away, so that of many publishes before the
//! sleeper runs only the first calls the kernel. Sleeps are bounded all the same
//! ([`SLEEP_MAX`]): the other side may be dead.
//!
//! Several threads may sleep on one word, for the same bit and different
//! positions. So a set bit does not tell a sleeper that *its* announcement is
//! still there: a wake may have taken it between c and d, and another thread
//! have set the bit again. Therefore the word counts the wakes in its upper 24
//! bits, and who sleeps hands in the count that it announced with.
//!
//! ```text
//!   31                    8 7         0
//!   | announcements taken |   bits    |
//! ```

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
    /// No announcement, but what the client says of itself: it has left the session,
    /// and reads no payload any more. For a broker that is away and sees no socket
    /// close.
    pub const GONE: u32 = 32;
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

/// The bits of a wait word; above them is the count of wakes.
const BITS: u32 = 0xff;
/// One wake, in the count.
const TAKEN: u32 = 1 << 8;

/// What was announced, and when: [`WaitWord::sleep`] takes it.
#[derive(Debug, Clone, Copy)]
pub struct Announced {
    bits: u32,
    taken: u32,
}

/// A wait word. Any number of threads may announce, look and wake.
#[derive(Clone, Copy)]
pub struct WaitWord<'a>(pub &'a AtomicU32);

impl WaitWord<'_> {
    /// Before a sleep (a, b): says what is waited for. The caller now looks
    /// whether it is there already, and if not calls [`WaitWord::sleep`].
    #[inline]
    pub fn announce(&self, bits: u32) -> Announced {
        let before = self.0.fetch_or(bits, Ordering::Relaxed);
        // Pairs with the fence in `seen_after_publish`.
        fence(Ordering::SeqCst);
        Announced {
            bits,
            taken: before & !BITS,
        }
    }

    /// Takes an announcement back that needs no wake any more. It is right to
    /// leave it: the price is one wake too many. Where another thread may wait
    /// for the same bits it *must* be left: it is that thread's as well.
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
        self.0.load(Ordering::Relaxed) & BITS
    }

    /// The bits as they are, with no order to anything: for states that are
    /// looked at again and again.
    #[inline]
    pub fn peek(&self) -> u32 {
        self.0.load(Ordering::Relaxed) & BITS
    }

    /// Whether a state bit is set: then all that its setter did before is seen to be
    /// done.
    pub fn is_set(&self, bit: u32) -> bool {
        self.0.load(Ordering::Acquire) & bit != 0
    }

    /// Takes the announcement of `bits` (4). Returns those that this call took:
    /// if any, this caller is the one that wakes.
    #[inline]
    pub fn take(&self, bits: u32) -> u32 {
        // AcqRel for symmetry with `announce`; the cursors carry the data.
        let taken = self.0.fetch_and(!bits, Ordering::AcqRel) & bits;
        if taken != 0 {
            // Not one step with the line above, and need not be: whoever goes to
            // sleep between the two is woken by the wake that follows. Nor a
            // loop of compare-and-swap, which a hostile process could hold up.
            self.0.fetch_add(TAKEN, Ordering::Relaxed);
        }
        taken
    }

    /// Sets a state bit, so that either a publisher's next look sees it, or
    /// this caller's following load of the cursor sees the publish.
    pub fn set(&self, bits: u32) {
        // Release: pairs with the Acquire in `is_set`.
        self.0.fetch_or(bits, Ordering::Release);
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

    /// Sleeps on a futex (d) until any of the announced bits is taken, or the
    /// time is over. May return early. The bound is [`SLEEP_MAX`].
    pub fn sleep(&self, announced: Announced, timeout: Duration) {
        let value = self.0.load(Ordering::Relaxed);
        let ours = value & announced.bits == announced.bits && value & !BITS == announced.taken;
        if ours {
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
    use loom::sync::{Condvar, Mutex};

    // The kernel's queue of sleepers: comparing the word and going to sleep are
    // one step for wakers of the same word. Without time-out, so that a lost
    // wake-up is a deadlock, which loom reports.
    loom::lazy_static! {
        static ref WAKES: Mutex<Vec<(usize, u64)>> = Mutex::new(Vec::new());
        static ref WOKEN: Condvar = Condvar::new();
    }

    fn wakes_of<'a>(wakes: &'a mut Vec<(usize, u64)>, word: &AtomicU32) -> &'a mut u64 {
        let word = std::ptr::from_ref(word).addr();
        let index = match wakes.iter().position(|of| of.0 == word) {
            Some(index) => index,
            None => {
                wakes.push((word, 0));
                wakes.len() - 1
            }
        };
        &mut wakes[index].1
    }

    pub(super) fn wait(word: &AtomicU32, value: u32, _timeout: Duration) {
        let mut wakes = WAKES.lock().expect("no model panics in this lock");
        let before = *wakes_of(&mut wakes, word);
        if word.load(Ordering::Relaxed) != value {
            return;
        }
        while *wakes_of(&mut wakes, word) == before {
            wakes = WOKEN.wait(wakes).expect("no model panics in this lock");
        }
    }

    pub(super) fn wake_all(word: &AtomicU32) {
        let mut wakes = WAKES.lock().expect("no model panics in this lock");
        *wakes_of(&mut wakes, word) += 1;
        WOKEN.notify_all();
    }
}

// Under loom waiting is examined by `tests/loom_wait.rs`.
#[cfg(all(test, not(loom)))]
mod tests;
