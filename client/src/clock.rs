//! The clocks that calls for each message use: coarse ones, which the kernel
//! keeps in a page of every process, so that reading them is no system call. They
//! lag by a few milliseconds at most.

use nix::time::{ClockId, clock_gettime};

fn read(clock: ClockId) -> (u64, u64) {
    // These clocks are always there on Linux; zero would only make a message
    // look old.
    clock_gettime(clock).map_or((0, 0), |time| (time.tv_sec() as u64, time.tv_nsec() as u64))
}

/// Milliseconds since the Unix epoch.
#[inline]
pub(crate) fn wall_ms() -> u64 {
    let (seconds, nanoseconds) = read(ClockId::CLOCK_REALTIME_COARSE);
    seconds * 1000 + nanoseconds / 1_000_000
}

/// Nanoseconds of the machine's monotonic clock, in which leases end: the same
/// clock in every process.
#[inline]
pub(crate) fn monotonic_ns() -> u64 {
    let (seconds, nanoseconds) = read(ClockId::CLOCK_MONOTONIC_COARSE);
    seconds * 1_000_000_000 + nanoseconds
}

#[cfg(test)]
mod tests {
    use std::time::{SystemTime, UNIX_EPOCH};

    #[test]
    fn coarse_clocks_agree_with_fine_ones() {
        let fine = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .expect("after 1970")
            .as_millis() as u64;
        assert!(super::wall_ms().abs_diff(fine) < 1000);
        let first = super::monotonic_ns();
        std::thread::sleep(std::time::Duration::from_millis(20));
        let passed = super::monotonic_ns() - first;
        assert!((5_000_000..5_000_000_000).contains(&passed));
    }
}
