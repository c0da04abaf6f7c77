//! Crash points: places between two effects on shared memory, store, file system
//! and sockets, where the broker may be killed, and where tests kill it. Each has
//! a name, which says what comes next. Outside of tests nothing of this is there.

/// Stands before an effect that a successor could find undone, with everything
/// before it done.
#[inline(always)]
pub(crate) fn crash_point(name: &'static str) {
    #[cfg(test)]
    {
        fuse::burn();
        plan::pass(name);
    }
    // Not used in what users run.
    let _ = name;
}

#[cfg(test)]
pub(crate) mod fuse;
#[cfg(test)]
mod plan;
#[cfg(test)]
mod tests;
