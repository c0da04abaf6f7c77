//! One connection to the control socket, as the client has it: non-blocking
//! underneath, so that a session can be resumed while its owner does other
//! things, with calls that wait on top.

use crate::control::{Hello, Notice, PROTOCOL, Reply, Request};
use crate::error::{Error, Result};
use crate::wait::Deadline;
use crate::wire::{self, LineBuffer};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, MsgFlags, Shutdown, SockFlag, SockType, UnixAddr, connect, recv, shutdown,
    socket,
};
use nix::unistd::geteuid;
use ringmain_ring::layout::LAYOUT_VERSION;
use serde::de::DeserializeOwned;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

/// How long a call waits for its answer. Administration is answered at its
/// commit, which a busy disk delays.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);
/// Between two tries to connect to a broker whose backlog is full.
const CONNECT_PAUSE: Duration = Duration::from_millis(10);

/// A connection to a broker.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: OwnedFd,
    lines: LineBuffer,
    /// Descriptors that came and were not taken yet, in the order of the lines
    /// that they belong to.
    descriptors: Vec<OwnedFd>,
    /// Requests whose caller gave up: their replies are skipped when they come,
    /// each with so many descriptors.
    given_up: VecDeque<usize>,
    /// What the broker told unasked, and nobody has looked at.
    notices: Vec<(Notice, Option<OwnedFd>)>,
}

impl Connection {
    /// Connects, and no more. [`Error::NotRunning`] if nobody listens there.
    pub(crate) fn open(path: &Path) -> Result<Connection> {
        let address = UnixAddr::new(path).map_err(|e| {
            let path = path.display();
            Error::Invalid(format!("{path} can't be the name of a socket: {e}"))
        })?;
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None)
            .map_err(|e| Error::io("cannot make a socket", e))?;
        connect(socket.as_raw_fd(), &address).map_err(|e| refused(path, e))?;
        Ok(Connection {
            socket,
            lines: LineBuffer::new(),
            descriptors: Vec::new(),
            given_up: VecDeque::new(),
            notices: Vec::new(),
        })
    }

    /// Connects and exchanges versions, waiting where it must.
    pub(crate) fn greeted(path: &Path) -> Result<(Connection, Hello)> {
        let deadline = Deadline::after(REPLY_TIMEOUT);
        let mut connection = loop {
            match Self::open(path) {
                Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::WouldBlock => {
                    if deadline.is_over() {
                        return Err(Error::TimedOut);
                    }
                    std::thread::sleep(CONNECT_PAUSE);
                }
                connection => break connection?,
            }
        };
        let hello = connection.call(&Self::hello())?;
        Ok((connection, check_hello(hello)?))
    }

    /// The socket, to ask the kernel who is at its other end.
    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The first request of a connection.
    pub(crate) fn hello() -> Request {
        Request::Hello { protocol: PROTOCOL }
    }

    /// Asks and waits for the answer.
    pub(crate) fn call<T: DeserializeOwned>(&mut self, request: &Request) -> Result<T> {
        let (value, []) = self.call_for::<T, 0>(request)?;
        Ok(value)
    }

    /// Asks and waits for the answer, with which `N` descriptors come.
    pub(crate) fn call_for<T: DeserializeOwned, const N: usize>(
        &mut self,
        request: &Request,
    ) -> Result<(T, [OwnedFd; N])> {
        if let Err(error) = self.send(request) {
            // A broker that turns a client away says why before it closes.
            return match self.reply_within(Duration::ZERO) {
                Ok(Some(Reply::Error(why))) => Err(why.into()),
                _ => Err(error),
            };
        }
        let deadline = Deadline::after(REPLY_TIMEOUT);
        loop {
            let left = deadline.left();
            if let Some(reply) = self.reply_within(left)? {
                return Ok((value_of(reply)?, self.take_descriptors()?));
            }
            if deadline.is_over() {
                self.given_up.push_back(N);
                return Err(Error::TimedOut);
            }
        }
    }

    /// Sends a request. Requests are short, so that only a broker that reads
    /// nothing for long makes this wait.
    pub(crate) fn send(&self, request: &Request) -> Result<()> {
        let line = wire::encode(request)?;
        let deadline = Deadline::after(REPLY_TIMEOUT);
        let mut rest = &line[..];
        while !rest.is_empty() {
            match wire::send(&self.socket, rest, &[]) {
                Ok(sent) => rest = &rest[sent..],
                Err(e) if e.kind() == io::ErrorKind::WouldBlock && !deadline.is_over() => {
                    self.wait_for(PollFlags::POLLOUT, deadline.left())?;
                }
                Err(e) => return Err(Error::io("cannot write to the broker", e)),
            }
        }
        Ok(())
    }

    /// The next reply, if it comes within this time. An error means that the
    /// connection is of no more use.
    pub(crate) fn reply_within(&mut self, time: Duration) -> Result<Option<Reply>> {
        if let Some(reply) = self.next_reply()? {
            return Ok(Some(reply));
        }
        if !time.is_zero() {
            self.wait_for(PollFlags::POLLIN, time)?;
        }
        match wire::receive(&self.socket, &mut self.lines, &mut self.descriptors) {
            Ok(0) => Err(Error::io(
                "the broker closed the connection",
                io::Error::from(io::ErrorKind::UnexpectedEof),
            )),
            Ok(_) => self.next_reply(),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(e) => Err(Error::io("cannot read from the broker", e)),
        }
    }

    fn next_reply(&mut self) -> Result<Option<Reply>> {
        while let Some(line) = self.lines.next_line()? {
            let reply = serde_json::from_slice(&line)
                .map_err(|e| Error::Corrupt(format!("the broker's answer: {e}")))?;
            match (reply, self.given_up.front()) {
                (Reply::Notice(notice), _) => self.note(notice)?,
                (reply, None) => return Ok(Some(reply)),
                (reply, Some(&descriptors)) => {
                    self.given_up.pop_front();
                    if matches!(reply, Reply::Ok(_)) {
                        self.check_descriptors(descriptors)?;
                        self.descriptors.drain(..descriptors);
                    }
                }
            }
        }
        Ok(None)
    }

    fn note(&mut self, notice: Notice) -> Result<()> {
        let descriptor = match notice {
            Notice::Inbound(_) | Notice::Outbound { .. } => {
                let [descriptor] = self.take_descriptors()?;
                Some(descriptor)
            }
            Notice::Gone { .. } => None,
        };
        self.notices.push((notice, descriptor));
        Ok(())
    }

    /// What the broker has told unasked, waiting so long for something if there is
    /// nothing.
    pub(crate) fn notices(&mut self, time: Duration) -> Result<Vec<(Notice, Option<OwnedFd>)>> {
        if self.notices.is_empty() && self.reply_within(time)?.is_some() {
            return Err(Error::Corrupt("an answer that nobody asked for".to_owned()));
        }
        Ok(std::mem::take(&mut self.notices))
    }

    fn wait_for(&self, what: PollFlags, time: Duration) -> Result<()> {
        // One up: a rest below a millisecond must not become a busy loop.
        let millis = time.as_millis().saturating_add(1);
        let timeout = PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(self.socket.as_fd(), what)], timeout) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(e) => Err(Error::io("cannot wait for the broker", e)),
        }
    }

    /// The descriptors that came with the last line that was looked at, of which
    /// there must be `N`.
    pub(crate) fn take_descriptors<const N: usize>(&mut self) -> Result<[OwnedFd; N]> {
        self.check_descriptors(N)?;
        let taken: Vec<OwnedFd> = self.descriptors.drain(..N).collect();
        taken
            .try_into()
            .map_err(|_| Error::Corrupt("descriptors that were there".to_owned()))
    }

    fn check_descriptors(&self, count: usize) -> Result<()> {
        let found = self.descriptors.len();
        if found < count {
            return Err(Error::Corrupt(format!(
                "{found} descriptors with an answer that has {count}"
            )));
        }
        Ok(())
    }

    /// Whether the broker's end is closed: it has died, or ended this session.
    pub(crate) fn is_at_end(&self) -> bool {
        let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        match recv(self.socket.as_raw_fd(), &mut [0], flags) {
            Ok(count) => count == 0,
            Err(Errno::EAGAIN | Errno::EINTR) => false,
            Err(_) => true,
        }
    }

    /// Ends the connection for the broker too, whoever else (a forked child)
    /// still has the descriptor.
    pub(crate) fn shut_down(&self) {
        // It fails if the broker is gone, which is as good.
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Both);
    }
}

fn refused(path: &Path, errno: Errno) -> Error {
    match errno {
        Errno::ENOENT | Errno::ECONNREFUSED | Errno::ENOTDIR => Error::NotRunning {
            socket: path.to_owned(),
        },
        Errno::EACCES | Errno::EPERM => Error::NotPermitted(format!(
            "user {} can't connect to {}: a broker serves the user that it runs as, and root; run \
             this as that user, or start a broker of your own",
            geteuid(),
            path.display()
        )),
        errno => Error::io(format!("cannot connect to {}", path.display()), errno),
    }
}

/// The value of a reply, or the error that it carries.
pub(crate) fn value_of<T: DeserializeOwned>(reply: Reply) -> Result<T> {
    match reply {
        Reply::Ok(value) => serde_json::from_value(value)
            .map_err(|e| Error::Corrupt(format!("the broker's answer: {e}"))),
        Reply::Error(error) => Err(error.into()),
        Reply::Notice(_) => Err(Error::Corrupt("a notice for an answer".to_owned())),
    }
}

/// Whether this client and the broker understand each other.
pub(crate) fn check_hello(hello: Hello) -> Result<Hello> {
    if hello.protocol == PROTOCOL && hello.layout == LAYOUT_VERSION {
        return Ok(hello);
    }
    Err(Error::VersionMismatch(format!(
        "the broker is version {} (protocol {}, layout {}), this client {} (protocol {PROTOCOL}, \
         layout {LAYOUT_VERSION}): use the same version of ringmain on both sides",
        hello.version,
        hello.protocol,
        hello.layout,
        env!("CARGO_PKG_VERSION"),
    )))
}

/// The instance's number in a [`Hello`].
pub(crate) fn instance_of(hello: &Hello) -> Result<u64> {
    u64::from_str_radix(&hello.instance, 16)
        .map_err(|_| Error::Corrupt("the broker's instance is no number".to_owned()))
}

/// An empty answer, `{}`.
#[derive(serde::Deserialize)]
pub(crate) struct Done {}
