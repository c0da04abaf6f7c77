//! What happens when memory that a client shares is taken away under the broker:
//! a process that may write to a segment may also cut its file short, and whoever
//! touches a page that the file no longer has gets SIGBUS.
//!
//! A watched range survives that: the handler puts a page of zeroes in the
//! place of the lost one, marks the range as damaged and lets the program go on.
//! Whoever owns the range looks at the mark and stops using it. A SIGBUS anywhere
//! else does what it did before.

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::unistd::{SysconfVar, sysconf};
use std::ffi::{c_int, c_void};
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering::SeqCst};

// Everything here is SeqCst: it runs once for each mapping, or when something is
// badly wrong.

/// How SIGBUS was dealt with before, and the size of a page.
static BEFORE: OnceLock<(SigAction, usize)> = OnceLock::new();
/// The newest of the slots, which are never freed: the handler may come at any
/// instruction, and may not take a lock.
static SLOTS: AtomicPtr<Slot> = AtomicPtr::new(std::ptr::null_mut());
static COUNT: AtomicU64 = AtomicU64::new(0);

/// Room for one range. `end` is 0 while the slot has none, and is written last.
struct Slot {
    used: AtomicBool,
    start: AtomicUsize,
    end: AtomicUsize,
    damaged: AtomicBool,
    next: *mut Slot,
}

fn slots() -> impl Iterator<Item = &'static Slot> {
    let mut next = SLOTS.load(SeqCst);
    std::iter::from_fn(move || {
        // SAFETY: slots are leaked when they are made, and whole when they are
        // put on the list.
        let slot = unsafe { next.as_ref() }?;
        next = slot.next;
        Some(slot)
    })
}

/// A range of memory in which a SIGBUS is survived, until this is dropped: to be
/// done before the memory is unmapped.
#[derive(Debug)]
pub(crate) struct Watched {
    slot: &'static Slot,
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}..", self.start.load(SeqCst))
    }
}

impl Watched {
    pub(crate) fn new(start: usize, len: usize) -> Watched {
        let free = slots().find(|slot| {
            let taken = slot.used.compare_exchange(false, true, SeqCst, SeqCst);
            taken.is_ok()
        });
        let slot = free.unwrap_or_else(Slot::add);
        slot.damaged.store(false, SeqCst);
        slot.start.store(start, SeqCst);
        slot.end.store(start + len, SeqCst);
        Watched { slot }
    }

    /// Says that the range is of no use any more, for a reason seen elsewhere.
    pub(crate) fn set_damaged(&self) {
        self.slot.damaged.store(true, SeqCst);
        COUNT.fetch_add(1, SeqCst);
    }

    pub(crate) fn is_damaged(&self) -> bool {
        self.slot.damaged.load(SeqCst)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.slot.end.store(0, SeqCst);
        self.slot.used.store(false, SeqCst);
    }
}

impl Slot {
    /// Puts a new slot, already used, on the list.
    fn add() -> &'static Slot {
        let slot = Box::leak(Box::new(Slot {
            used: AtomicBool::new(true),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            damaged: AtomicBool::new(false),
            next: std::ptr::null_mut(),
        }));
        let mut first = SLOTS.load(SeqCst);
        loop {
            slot.next = first;
            match SLOTS.compare_exchange(first, slot, SeqCst, SeqCst) {
                Ok(_) => return slot,
                Err(found) => first = found,
            }
        }
    }

    /// Whether the address is in the range. Right for the thread that touches the
    /// range: it stays as it is meanwhile. Of a slot that another thread fills,
    /// the second look at `end` differs.
    fn holds(&self, address: usize) -> bool {
        let end = self.end.load(SeqCst);
        let start = self.start.load(SeqCst);
        (start..end).contains(&address) && self.end.load(SeqCst) == end
    }
}

/// How often a watched range was damaged since the process began: when this
/// number has changed, it is time to look which.
pub fn count() -> u64 {
    COUNT.load(SeqCst)
}

/// Has this process survive a SIGBUS in watched ranges. The first call counts.
pub fn install() -> io::Result<()> {
    // std's own handler, which tells stack overflows apart, is what `BEFORE`
    // holds: like it, this one runs on the alternate stack.
    let flags = SaFlags::SA_SIGINFO | SaFlags::SA_ONSTACK;
    let action = SigAction::new(SigHandler::SigAction(handle), flags, SigSet::empty());
    let page = sysconf(SysconfVar::PAGE_SIZE)?.unwrap_or(4096) as usize;
    if BEFORE.get().is_some() {
        return Ok(());
    }
    // SAFETY: `handle` does only what a handler may do.
    let before = unsafe { sigaction(Signal::SIGBUS, &action) }?;
    // If another thread was faster, `before` may be this handler itself, and is
    // not what to go back to.
    let _ = BEFORE.set((before, page));
    Ok(())
}

/// Async-signal-safe: atomics, and the system calls mmap and sigaction.
extern "C" fn handle(_signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes a valid record, whose address
    // is set for SIGBUS.
    let address = unsafe { (*info).si_addr() } as usize;
    let errno = nix::errno::Errno::last_raw();
    let found = slots().find(|slot| slot.holds(address));
    let page = BEFORE.get().map_or(4096, |(_, page)| *page);
    let replaced = found.is_some_and(|slot| {
        slot.damaged.store(true, SeqCst);
        COUNT.fetch_add(1, SeqCst);
        replace_page(address & !(page - 1), page)
    });
    if !replaced {
        go_back();
    }
    nix::errno::Errno::set_raw(errno);
}

/// Puts a page of zeroes there.
fn replace_page(start: usize, page: usize) -> bool {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: the page is within a watched range, which is mapped and used as
    // atomics and copied bytes alone: that the file's page goes and zeroes come is
    // no other than what its client could write.
    let mapped = unsafe { libc::mmap(start as *mut c_void, page, access, flags, -1, 0) };
    mapped != libc::MAP_FAILED
}

/// The fault is none of ours: the instruction that is repeated after this return
/// meets whoever dealt with SIGBUS before.
fn go_back() {
    let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
    let before = BEFORE.get().map_or(&default, |(before, _)| before);
    // SAFETY: the action was in place before, or is the default.
    let _ = unsafe { sigaction(Signal::SIGBUS, before) };
}
