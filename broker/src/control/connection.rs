//! One connection: what was read of it, what is to be written, and whose turn it
//! is.

use super::{Limits, Peer};
use crate::crash::crash_point;
use nix::sys::epoll::EpollFlags;
use ringmain::ErrorCode;
use ringmain::control::{Hello, Notice, PROTOCOL, Reply, Request, WireError};
use ringmain::wire::{self, LineBuffer};
use serde_json::Value;
use std::collections::VecDeque;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

/// Bytes read at a time.
const CHUNK_BYTES: usize = 16 * 1024;
/// Chunks read for one wake-up, so that one client does not hold up the others.
const CHUNKS_A_TURN: usize = 8;
/// Longest part of an error that quotes the client, in characters.
const QUOTE_CHARS_MAX: usize = 300;

/// Whose turn it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The client's first line must be a hello.
    Greeting,
    /// The client may ask.
    Idle,
    /// The service owes a reply.
    Asked,
}

/// What is to be done with a connection after a look at it.
#[derive(Debug)]
pub(super) enum Step {
    /// Nothing until one of these events.
    Wait(EpollFlags),
    /// There is more: look again, after the others.
    Again,
    /// The client asks this, and waits for the reply.
    Request(Request),
    /// It is over.
    End,
}

/// A line on its way out.
#[derive(Debug)]
struct Output {
    bytes: Vec<u8>,
    sent: usize,
    /// Go with the first byte.
    descriptors: Vec<OwnedFd>,
    /// When the client took something last, if it has asked for the line. (It may
    /// have good reasons not to look for what it has not asked for.)
    moved: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    pidfd: OwnedFd,
    peer: Peer,
    input: LineBuffer,
    output: VecDeque<Output>,
    phase: Phase,
    /// Nothing more comes from the client.
    input_ended: bool,
    /// Ends when the output has left.
    closing: bool,
    /// What epoll was told to look for.
    pub(super) interest: EpollFlags,
    /// Whether the service has heard of it.
    pub(super) announced: bool,
}

impl Connection {
    pub(super) fn new(stream: UnixStream, pidfd: OwnedFd, peer: Peer) -> Connection {
        Connection {
            stream,
            pidfd,
            peer,
            input: LineBuffer::default(),
            output: VecDeque::new(),
            phase: Phase::Greeting,
            input_ended: false,
            closing: false,
            interest: EpollFlags::EPOLLIN,
            announced: false,
        }
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    pub(super) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    pub(super) fn peer(&self) -> Peer {
        self.peer
    }

    /// Whether the client can still do something of its own, once it has closed
    /// its end: what it has asked before, it can't be told any more.
    pub(super) fn only_waits(&self) -> bool {
        self.phase == Phase::Asked || self.has_output()
    }

    /// Whether the client has left its reply unread for too long.
    pub(super) fn is_stalled(&self, now: Instant, limits: &Limits) -> bool {
        let asked = self.output.iter().find_map(|output| output.moved);
        asked.is_some_and(|moved| now.saturating_duration_since(moved) >= limits.stall_max)
    }

    pub(super) fn has_output(&self) -> bool {
        !self.output.is_empty()
    }

    /// Tells the client something unasked.
    pub(super) fn tell(&mut self, notice: Notice, descriptor: Option<OwnedFd>) {
        self.output.push_back(Output {
            bytes: line_of(&Reply::Notice(notice)),
            sent: 0,
            descriptors: descriptor.into_iter().collect(),
            moved: None,
        });
    }

    /// The service's reply. One that nobody asked for is dropped.
    pub(super) fn reply(&mut self, reply: &Reply, descriptors: Vec<OwnedFd>) {
        if self.phase != Phase::Asked {
            tracing::debug!(pid = self.peer.pid, "a reply without a request is dropped");
            return;
        }
        self.phase = Phase::Idle;
        self.put(reply, descriptors);
    }

    /// Refuses the client: it is told why, and that is all.
    pub(super) fn refuse(&mut self, code: ErrorCode, message: String) {
        self.put(&error(code, message), Vec::new());
        self.closing = true;
    }

    fn put(&mut self, reply: &Reply, descriptors: Vec<OwnedFd>) {
        self.output.push_back(Output {
            bytes: line_of(reply),
            sent: 0,
            descriptors,
            moved: Some(Instant::now()),
        });
    }

    /// Writes and reads as far as it goes without waiting.
    pub(super) fn advance(&mut self, hello: &Hello) -> Step {
        let mut chunks_left = CHUNKS_A_TURN;
        loop {
            match self.write() {
                Ok(()) if self.has_output() => return Step::Wait(EpollFlags::EPOLLOUT),
                Ok(()) if self.closing => return Step::End,
                Ok(()) => {}
                Err(_) => return Step::End,
            }
            if self.phase == Phase::Asked {
                // Epoll reports the other end's closing unasked.
                return Step::Wait(EpollFlags::empty());
            }
            match self.input.next_line() {
                Ok(Some(line)) => match self.understand(&line, hello) {
                    Some(request) => {
                        self.phase = Phase::Asked;
                        return Step::Request(request);
                    }
                    // An answer is on its way; the next line has its own turn.
                    None => return Step::Again,
                },
                Ok(None) if self.input_ended => return Step::End,
                Ok(None) if chunks_left == 0 => return Step::Again,
                Ok(None) => {
                    chunks_left -= 1;
                    match self.read() {
                        Ok(()) => {}
                        Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                            return Step::Wait(EpollFlags::EPOLLIN);
                        }
                        Err(_) => return Step::End,
                    }
                }
                Err(e) => self.refuse(ErrorCode::Invalid, e.to_string()),
            }
        }
    }

    /// Reads a chunk. Descriptors that a client may send along are closed by
    /// the kernel, as nothing here asks for them.
    fn read(&mut self) -> io::Result<()> {
        let mut chunk = [0; CHUNK_BYTES];
        match (&self.stream).read(&mut chunk) {
            Ok(0) => self.input_ended = true,
            Ok(count) => self.input.push(&chunk[..count]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
        Ok(())
    }

    /// Writes what the socket takes.
    fn write(&mut self) -> io::Result<()> {
        while let Some(output) = self.output.front_mut() {
            let descriptors: Vec<BorrowedFd<'_>> =
                output.descriptors.iter().map(AsFd::as_fd).collect();
            crash_point("send to a client");
            match wire::send(&self.stream, &output.bytes[output.sent..], &descriptors) {
                Ok(sent) => {
                    output.sent += sent;
                    output.descriptors.clear();
                    output.moved = output.moved.map(|_| Instant::now());
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(e) => return Err(e),
            }
            if output.sent == output.bytes.len() {
                self.output.pop_front();
            }
        }
        Ok(())
    }

    /// What the line asks of the service. What does not concern it is answered
    /// here.
    fn understand(&mut self, line: &[u8], hello: &Hello) -> Option<Request> {
        let value: Value = match serde_json::from_slice(line) {
            Ok(value) => value,
            Err(e) => {
                let message = format!("the line is not JSON: {}", quote(&e.to_string()));
                self.refuse(ErrorCode::Invalid, message);
                return None;
            }
        };
        if self.phase == Phase::Greeting {
            self.greet(&value, hello);
            return None;
        }
        match serde_json::from_value(value) {
            Ok(Request::Hello { .. }) => {
                let message = "hello was said already".to_owned();
                self.put(&error(ErrorCode::Invalid, message), Vec::new());
                None
            }
            Ok(request) => Some(request),
            Err(e) => {
                let message = format!("not a request: {}", quote(&e.to_string()));
                self.put(&error(ErrorCode::Invalid, message), Vec::new());
                None
            }
        }
    }

    /// The first line. It is read loosely: what a later protocol adds to it
    /// must not hide that the versions differ.
    fn greet(&mut self, value: &Value, hello: &Hello) {
        let said_hello = value.get("op").and_then(Value::as_str) == Some("hello");
        let protocol = value.get("protocol").and_then(Value::as_u64);
        match protocol.filter(|_| said_hello) {
            None => self.refuse(
                ErrorCode::Invalid,
                "the first line must be {\"op\":\"hello\",\"protocol\":…}".to_owned(),
            ),
            Some(theirs) if theirs != u64::from(PROTOCOL) => self.refuse(
                ErrorCode::VersionMismatch,
                format!(
                    "the client speaks version {theirs} of the control protocol, \
                     the broker ({}) version {PROTOCOL}: use the same version of ringmain on both sides",
                    hello.version
                ),
            ),
            Some(_) => {
                self.phase = Phase::Idle;
                let reply = match serde_json::to_value(hello) {
                    Ok(value) => Reply::Ok(value),
                    Err(e) => error(ErrorCode::Io, e.to_string()),
                };
                self.put(&reply, Vec::new());
            }
        }
    }
}

/// An error reply.
pub(super) fn error(code: ErrorCode, message: String) -> Reply {
    Reply::Error(WireError { code, message })
}

/// The reply as a line: an error instead, if it is longer than the client takes.
pub(super) fn line_of(reply: &Reply) -> Vec<u8> {
    wire::encode(reply)
        .or_else(|e| wire::encode(&error(ErrorCode::Full, format!("the answer: {e}"))))
        .unwrap_or_default()
}

/// An error's text, which quotes the client: cut, and without control
/// characters.
fn quote(text: &str) -> String {
    let mut shown: String = text.chars().take(QUOTE_CHARS_MAX).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    shown.replace(char::is_control, "?")
}
