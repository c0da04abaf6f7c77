//! What the victim tells: memory that it shares with the driver, so that telling
//! takes no system call and survives its death.

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Why the victim has stopped itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum Trap {
    /// The driver is to send it a message: number and length are in the page.
    Send = 1,
    /// The driver is to bring the broker into the state of the case.
    Broker,
    /// The operation begins.
    Begin,
    /// It is over.
    End,
}

const TRAPS: [Trap; 4] = [Trap::Send, Trap::Broker, Trap::Begin, Trap::End];

/// Numbers of messages, appended by the victim.
pub struct Numbers {
    count: AtomicUsize,
    numbers: [AtomicU64; 512],
}

impl Numbers {
    pub fn push(&self, number: u64) {
        let count = self.count.load(Ordering::Relaxed);
        self.numbers[count].store(number, Ordering::Relaxed);
        self.count.store(count + 1, Ordering::Relaxed);
    }

    pub fn get(&self) -> Vec<u64> {
        let numbers = &self.numbers[..self.count.load(Ordering::Relaxed)];
        numbers.iter().map(|n| n.load(Ordering::Relaxed)).collect()
    }

    pub fn remove(&self, number: u64) {
        let rest: Vec<u64> = self.get().into_iter().filter(|n| *n != number).collect();
        self.count.store(0, Ordering::Relaxed);
        rest.into_iter().for_each(|number| self.push(number));
    }
}

/// The page's content. All zeroes is a new one.
#[repr(C)]
pub struct Page {
    trap: AtomicU64,
    pub number: AtomicU64,
    pub len: AtomicUsize,
    /// Accepted, and not settled, before the operation.
    pub accepted: Numbers,
    /// What the operation sends.
    pub sends: Numbers,
    /// What it acks.
    pub acks: Numbers,
}

impl Page {
    /// Stops this process until the driver lets it go on.
    pub fn trap(&self, trap: Trap) {
        self.trap.store(trap as u64, Ordering::Relaxed);
        // SAFETY: a breakpoint, which the tracer of this process handles; the
        // asm has no other effect.
        unsafe { std::arch::asm!("int3") };
    }

    pub fn trapped(&self) -> Trap {
        let trap = self.trap.load(Ordering::Relaxed);
        TRAPS[(trap as usize)
            .checked_sub(1)
            .expect("a breakpoint of ours")]
    }
}

/// Owns the memory.
pub struct Shared {
    at: *mut Page,
}

impl Shared {
    pub fn new() -> Shared {
        // SAFETY: a new mapping, of nothing that anybody else has.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size_of::<Page>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(at, libc::MAP_FAILED);
        Shared { at: at.cast() }
    }

    /// Forgets what the last victim has told.
    pub fn clear(&self) {
        for numbers in [&self.accepted, &self.sends, &self.acks] {
            numbers.count.store(0, Ordering::Relaxed);
        }
        self.trap.store(0, Ordering::Relaxed);
    }
}

impl Deref for Shared {
    type Target = Page;

    fn deref(&self) -> &Page {
        // SAFETY: the mapping is as long as a page's content, zeroed at first,
        // which is a value of it, and there until this is dropped. Everything
        // in it is atomic.
        unsafe { &*self.at }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's own.
        unsafe { libc::munmap(self.at.cast(), size_of::<Page>()) };
    }
}
