//! Death within a test's own process: by unwinding out of whatever the broker
//! does, at a crash point that is given by its number.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

thread_local! {
    /// Points left to pass before this thread's broker dies, if it is to.
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

/// Runs `body`, which is killed at the point number `points`, counted from 0, if it
/// gets there: then there is no result.
pub(crate) fn kill_after<R>(points: Option<u32>, body: impl FnOnce() -> R) -> Option<R> {
    LEFT.set(points);
    let result = catch_unwind(AssertUnwindSafe(body));
    LEFT.set(None);
    match result {
        Ok(result) => Some(result),
        Err(panic) if panic.is::<Killed>() => None,
        Err(panic) => resume_unwind(panic),
    }
}
