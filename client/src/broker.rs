//! A broker as a process: asking which it is, and ending it.

use crate::connection::{Connection, Done, value_of};
use crate::control::{Hello, Reply, Request};
use crate::error::{Error, Result};
use crate::wait::Deadline;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{getsockopt, sockopt};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

/// How long the broker has for its first answer.
const HELLO_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest single wait; then the time that is left is looked at.
const NAP: Duration = Duration::from_secs(1);
/// Between two looks at a process of which there is no descriptor.
const LOOK: Duration = Duration::from_millis(10);

/// A running broker, to be asked for its version, or to be stopped.
///
/// Unlike [`Client`](crate::Client) this also takes a broker with another layout
/// of shared memory, as long as it speaks the same control protocol: it is there
/// for upgrades.
///
/// ```no_run
/// use ringmain::{Broker, paths};
/// use std::time::Duration;
///
/// # fn main() -> ringmain::Result<()> {
/// let broker = Broker::at(paths::default_socket())?;
/// println!("stopping version {}", broker.hello().version);
/// broker.drain_timeout(Duration::from_secs(60))?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Broker {
    connection: Connection,
    hello: Hello,
}

impl Broker {
    /// Connects to the broker at this socket.
    ///
    /// Errors: [`NotRunning`](Error::NotRunning);
    /// [`NotPermitted`](Error::NotPermitted), which comes from
    /// [`Broker::stop_timeout`] at the latest; [`VersionMismatch`](Error::VersionMismatch)
    /// for another control protocol; [`TimedOut`](Error::TimedOut) if it does not
    /// answer within 30 seconds.
    pub fn at(socket: impl AsRef<Path>) -> Result<Broker> {
        Broker::at_timeout(socket, HELLO_TIMEOUT)
    }

    /// The same with another time to answer in.
    pub fn at_timeout(socket: impl AsRef<Path>, timeout: Duration) -> Result<Broker> {
        let deadline = Deadline::after(timeout);
        let mut connection = Connection::open(socket.as_ref())?;
        let reply = answer(&mut connection, &Connection::hello(), deadline)?;
        let hello = value_of(reply)?;
        Ok(Broker { connection, hello })
    }

    /// What it says of itself.
    pub fn hello(&self) -> &Hello {
        &self.hello
    }

    /// Stops it, as SIGTERM does: what it holds is committed and synced, and its
    /// clients wait for the next broker, and go on with that. Returns when its
    /// process has ended, so that another one can be started at once.
    ///
    /// Errors: [`NotPermitted`](Error::NotPermitted): only the broker's own user
    /// and root may stop it; [`TimedOut`](Error::TimedOut) when the time is over:
    /// it goes on stopping, unseen; [`Closed`](Error::Closed) if it ended, or
    /// failed, before it said that all was done.
    pub fn stop_timeout(self, timeout: Duration) -> Result<()> {
        self.end(false, Deadline::after(timeout))
    }

    /// Stops it and leaves nothing in shared memory, for an upgrade: it ends all
    /// sessions, and stores and syncs all that was accepted. Clients get
    /// [`Error::Closed`] for what was not taken in any more, and have to connect
    /// again. Returns when its process has ended.
    ///
    /// Errors are those of [`Broker::stop_timeout`], and
    /// [`StoreUnavailable`](Error::StoreUnavailable) if the disk has no room: then
    /// it goes on serving.
    pub fn drain_timeout(self, timeout: Duration) -> Result<()> {
        self.end(true, Deadline::after(timeout))
    }

    fn end(mut self, drain: bool, deadline: Deadline) -> Result<()> {
        // Before it is asked: later it may be gone, and its number another's.
        let process = Process::at_the_other_end(&self.connection, self.hello.pid);
        let reply = match answer(&mut self.connection, &Request::Stop { drain }, deadline) {
            Err(Error::TimedOut) => return Err(Error::TimedOut),
            reply => reply.map_err(ended_early)?,
        };
        let _: Done = value_of(reply)?;
        process.wait(deadline)
    }
}

/// Asks, and waits for the answer.
fn answer(connection: &mut Connection, request: &Request, deadline: Deadline) -> Result<Reply> {
    let sent = connection.send(request);
    loop {
        // A broker that turns a client away says why before it closes.
        match (connection.reply_within(deadline.left().min(NAP)), &sent) {
            (Ok(Some(reply)), _) => return Ok(reply),
            (Ok(None), Ok(())) if !deadline.is_over() => {}
            (Ok(None), Ok(())) => return Err(Error::TimedOut),
            (Err(error), Ok(())) => return Err(error),
            (_, Err(_)) => return sent.and(Err(Error::TimedOut)),
        }
    }
}

fn ended_early(error: Error) -> Error {
    Error::Closed(format!(
        "the broker did not say that it has stopped in order ({error}): see its log, and whether \
         it runs; what was accepted is kept"
    ))
}

/// The broker's process.
#[derive(Debug)]
enum Process {
    Descriptor(OwnedFd),
    /// Where the kernel gives no descriptor of a peer (before Linux 6.5): number,
    /// and start time.
    Number(u32, Option<String>),
}

impl Process {
    fn at_the_other_end(connection: &Connection, pid: u32) -> Process {
        match getsockopt(&connection.socket(), sockopt::PeerPidfd) {
            Ok(descriptor) => Process::Descriptor(descriptor),
            Err(_) => Process::Number(pid, start_time(pid)),
        }
    }

    fn wait(&self, deadline: Deadline) -> Result<()> {
        while !self.has_ended(deadline.left())? {
            if deadline.is_over() {
                return Err(Error::TimedOut);
            }
        }
        Ok(())
    }

    /// Whether it has ended; waits for that no longer than `time`.
    fn has_ended(&self, time: Duration) -> Result<bool> {
        match self {
            Process::Descriptor(descriptor) => {
                let millis = time.min(NAP).as_millis() as u16;
                let mut polled = [PollFd::new(descriptor.as_fd(), PollFlags::POLLIN)];
                match poll(&mut polled, PollTimeout::from(millis)) {
                    Ok(ready) => Ok(ready > 0),
                    Err(Errno::EINTR) => Ok(false),
                    Err(errno) => Err(Error::io("cannot wait for the broker's end", errno)),
                }
            }
            Process::Number(pid, started) => {
                let ended = started.is_none() || start_time(*pid) != *started;
                if !ended {
                    std::thread::sleep(LOOK.min(time));
                }
                Ok(ended)
            }
        }
    }
}

/// When the process started, in clock ticks since boot; `None` if there is none,
/// or one that has ended and was not fetched by its parent.
fn start_time(pid: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // After the name, in parentheses, comes field 3; the start time is field 22.
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    let state = fields.next()?;
    let started = fields.nth(22 - 4)?;
    (state != "Z" && state != "X").then(|| started.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    /// On kernels that give no descriptor of a peer.
    #[test]
    fn the_end_of_a_process_is_seen_by_its_number_too() {
        let mut child = Command::new("cat")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("cat");
        let process = Process::Number(child.id(), start_time(child.id()));
        assert!(!process.has_ended(Duration::ZERO).expect("looked"));
        drop(child.stdin.take());
        // It has not been fetched, as the child of somebody else.
        let deadline = Deadline::after(Duration::from_secs(30));
        process.wait(deadline).expect("it ends");
        child.wait().expect("fetched");
    }
}
