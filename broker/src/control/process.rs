//! Processes by pidfd: alive or dead, never mistaken for their successor.

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{getsockopt, sockopt};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// When the process started, in clock ticks since boot; `None` if there is none
/// with this pid.
pub(crate) fn start_time(pid: i32) -> Option<u64> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may hold anything; the last ')' ends it.
    // After it comes field 3; the start time is field 22.
    let after_name = stat.iter().rposition(|&b| b == b')')? + 1;
    let rest = std::str::from_utf8(stat.get(after_name..)?).ok()?;
    rest.split_ascii_whitespace().nth(22 - 3)?.parse().ok()
}

/// A descriptor of the process, which becomes readable when it is dead.
pub(super) fn open(pid: i32) -> Result<OwnedFd, Errno> {
    if pid <= 0 {
        return Err(Errno::ESRCH);
    }
    // SAFETY: the call takes two integers, and touches no memory.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let fd = Errno::result(fd)?;
    // SAFETY: the call succeeded, so `fd` is a new descriptor, ours alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Whether the process of this descriptor is dead.
pub(super) fn is_dead(pidfd: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
    poll(&mut polled, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

/// The process that connected: descriptor and start time. The kernel's own
/// descriptor is exact (Linux 6.5); before, the pid may have been recycled in
/// the moment since, which the start time can't rule out either.
pub(super) fn of_peer(stream: &UnixStream, pid: i32) -> Result<(OwnedFd, u64), Errno> {
    let pidfd = match getsockopt(stream, sockopt::PeerPidfd) {
        Ok(pidfd) => pidfd,
        Err(Errno::ENOPROTOOPT) => open(pid)?,
        Err(e) => return Err(e),
    };
    let start_time = start_time(pid).unwrap_or(0);
    // Alive after the reading, so that it was this process's start time.
    let start_time = if is_dead(&pidfd) { 0 } else { start_time };
    Ok((pidfd, start_time))
}

/// The process with this pid and start time.
#[derive(Debug)]
pub(super) enum Found {
    /// It lives.
    Alive(OwnedFd),
    /// It is dead, or the pid is another's.
    Dead,
    /// The kernel would not say: too many open files. Ask again later.
    Unknown,
}

/// Looks for the process with this pid and start time.
pub(super) fn find(pid: i32, started: u64) -> Found {
    match open(pid) {
        Ok(pidfd) if start_time(pid) == Some(started) && !is_dead(&pidfd) => Found::Alive(pidfd),
        Ok(_) => Found::Dead,
        // EINVAL, ENOENT: the number of a thread that leads no process.
        Err(Errno::ESRCH | Errno::EINVAL | Errno::ENOENT) => Found::Dead,
        Err(_) => Found::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_found_by_pid_and_start_time_alone() {
        let own = std::process::id() as i32;
        let started = start_time(own).unwrap_or(0);
        assert!(started > 0);
        assert!(matches!(find(own, started), Found::Alive(_)));
        assert!(matches!(find(own, started + 1), Found::Dead));
        assert!(matches!(find(0, started), Found::Dead));
        assert!(matches!(find(-1, started), Found::Dead));
        assert!(matches!(find(i32::MAX, started), Found::Dead));
    }
}
