//! Medians, percentiles, and the clock that all processes share.

use std::time::Duration;

/// Nanoseconds of the machine's monotonic clock.
pub fn now_ns() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC);
    now.map_or(0, |now| {
        now.tv_sec() as u64 * 1_000_000_000 + now.tv_nsec() as u64
    })
}

/// Sleeps until then, by the clock of [`now_ns`].
pub fn sleep_until_ns(when: u64) {
    let left = when.saturating_sub(now_ns());
    if left > 0 {
        std::thread::sleep(Duration::from_nanos(left));
    }
}

/// The p-th percentile of sorted samples.
pub fn percentile(sorted: &[u64], p: f64) -> u64 {
    let last = sorted.len().saturating_sub(1);
    let at = (sorted.len() as f64 * p / 100.0) as usize;
    sorted.get(at.min(last)).copied().unwrap_or(0)
}

/// "median (min-max)" of some runs.
pub fn spread(mut runs: Vec<f64>, digits: usize) -> String {
    runs.sort_by(f64::total_cmp);
    let (Some(min), Some(max)) = (runs.first(), runs.last()) else {
        return "-".to_owned();
    };
    let median = runs[runs.len() / 2];
    format!("{median:.digits$} ({min:.digits$}-{max:.digits$})")
}

/// "p50 / p99 / p99.9" in microseconds.
pub fn tail_us(mut samples: Vec<u64>) -> String {
    samples.sort_unstable();
    let us = |p| percentile(&samples, p) as f64 / 1000.0;
    format!("{:.1} / {:.1} / {:.1}", us(50.0), us(99.0), us(99.9))
}

/// Processor time that a process has used so far, in seconds.
pub fn cpu_seconds(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    // User and system time are fields 14 and 15; after the name comes field 3.
    let fields = after_name.split_ascii_whitespace().skip(11).take(2);
    let ticks: u64 = fields.filter_map(|field| field.parse::<u64>().ok()).sum();
    // The unit of these fields is 1/100 s on every Linux that we know of.
    ticks as f64 / 100.0
}

/// Memory of a process in MiB, by the name of a line in its `status`: `VmRSS:` now,
/// `VmHWM:` at most so far.
pub fn memory_mib(pid: u32, line: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|found| found.strip_prefix(line));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) / 1024
}
