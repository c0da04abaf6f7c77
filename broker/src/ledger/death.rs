//! Places to die. The broker may be killed between any two stores to shared
//! memory; tests kill it at each of them, by unwinding out of whatever it does.
//! Outside of tests nothing of this is there.

/// Stands between two stores that a successor could find one without the other.
#[inline(always)]
pub(crate) fn place_to_die() {
    #[cfg(test)]
    fuse::burn();
}

/// The tests' side.
#[cfg(test)]
pub(crate) mod fuse {
    use std::cell::Cell;
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

    thread_local! {
        /// Places left to pass before this thread's broker dies, if it is to.
        static LEFT: Cell<Option<u32>> = const { Cell::new(None) };
    }

    /// What the unwinding carries.
    struct Killed;

    pub(super) fn burn() {
        let left = LEFT.get();
        LEFT.set(left.and_then(|left| left.checked_sub(1)));
        if left == Some(0) {
            resume_unwind(Box::new(Killed));
        }
    }

    /// Runs `body`, which is killed at the place number `places`, counted from
    /// 0, if it gets there: then there is no result.
    pub(crate) fn kill_after<R>(places: Option<u32>, body: impl FnOnce() -> R) -> Option<R> {
        LEFT.set(places);
        let result = catch_unwind(AssertUnwindSafe(body));
        LEFT.set(None);
        match result {
            Ok(result) => Some(result),
            Err(panic) if panic.is::<Killed>() => None,
            Err(panic) => resume_unwind(panic),
        }
    }
}
