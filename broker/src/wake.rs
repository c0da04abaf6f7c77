//! Wakes the service thread.

use nix::sys::eventfd::{EfdFlags, EventFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// How other threads tell the service thread that something waits for it in a
/// channel: a flag, which it looks at in every pass, and a descriptor, which ends
/// its sleep. (A look into an empty channel costs a fence; a look at the flag
/// costs nothing.)
#[derive(Debug)]
pub struct Wake {
    set: AtomicBool,
    fd: EventFd,
}

impl Wake {
    /// Makes one that is not set.
    pub fn new() -> std::io::Result<Wake> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let fd = EventFd::from_value_and_flags(0, flags)?;
        let set = AtomicBool::new(false);
        Ok(Wake { set, fd })
    }

    /// Call when the thing is in its channel.
    pub fn ring(&self) {
        // Release: pairs with the Acquire in `take`.
        self.set.store(true, Ordering::Release);
        // It can fail only when the count is at its end: then the thread is
        // about to look as it is.
        let _ = self.fd.write(1);
    }

    /// Whether somebody has rung since the last call. The caller now looks into
    /// the channels.
    #[inline]
    pub fn take(&self) -> bool {
        // A plain load first: the exchange would be a fence in every pass.
        self.set.load(Ordering::Relaxed) && self.set.swap(false, Ordering::Acquire)
    }

    /// Becomes readable when somebody rings. Never read, so only of use with an
    /// edge-triggered epoll.
    pub fn descriptor(&self) -> &EventFd {
        &self.fd
    }
}
