//! The thread: one epoll over the listener, the connections, their processes,
//! the watched processes, and the bell of the inbox.

use super::connection::{Connection, Step, error, line_of};
use super::listener::Bound;
use super::process::{self, Found};
use super::{Command, ConnId, Event, Inbox, Limits, Peer};
use crate::crash::crash_point;
use crate::wake::Wake;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::socket::{getsockopt, sockopt};
use nix::unistd::geteuid;
use ringmain::ErrorCode;
use ringmain::control::Hello;
use ringmain::wire;
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// Connections taken from the listener for one wake-up.
const ACCEPTS_A_TURN: usize = 64;
/// Events taken from epoll at a time.
const EVENTS_A_TURN: usize = 256;
/// How long the listener rests when a connection can't even be refused.
const LISTENER_REST: Duration = Duration::from_millis(100);
/// How long clients that are slow to read have for their last replies when the
/// thread is stopped.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How often is looked at what has no event.
const TICK: Duration = Duration::from_millis(250);

/// Where events go.
#[derive(Debug)]
pub(super) struct Outbox {
    pub(super) events: mpsc::Sender<Event>,
    pub(super) wake: Arc<Wake>,
}

impl Outbox {
    fn put(&self, event: Event) {
        // Without a receiver the service is about to drop us.
        if self.events.send(event).is_ok() {
            self.wake.ring();
        }
    }
}

/// What an epoll event is about: the kind in the low bits, a number above.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Listener,
    Bell,
    Socket(ConnId),
    Process(ConnId),
    Watch(u64),
}

impl Source {
    fn pack(self) -> u64 {
        match self {
            Source::Listener => 0,
            Source::Bell => 1,
            Source::Socket(ConnId(number)) => number << 3 | 2,
            Source::Process(ConnId(number)) => number << 3 | 3,
            Source::Watch(number) => number << 3 | 4,
        }
    }

    fn unpack(data: u64) -> Source {
        match data & 7 {
            0 => Source::Listener,
            1 => Source::Bell,
            2 => Source::Socket(ConnId(data >> 3)),
            3 => Source::Process(ConnId(data >> 3)),
            _ => Source::Watch(data >> 3),
        }
    }
}

#[derive(Debug)]
struct Watch {
    pid: i32,
    start_time: u64,
    token: u64,
    /// `None` while there is no descriptor to be had: then the tick tries.
    pidfd: Option<OwnedFd>,
}

pub(super) struct Reactor {
    bound: Bound,
    inbox: Arc<Inbox>,
    outbox: Outbox,
    hello: Hello,
    limits: Limits,
    epoll: Epoll,
    connections: HashMap<ConnId, Connection>,
    /// Connections with more to do, which epoll need not report.
    ready: VecDeque<ConnId>,
    watches: HashMap<u64, Watch>,
    watch_of_token: HashMap<u64, u64>,
    next_number: u64,
    /// Given up for a moment when there are no more descriptors, to take a
    /// connection and tell it so.
    spare: Option<File>,
    /// Until when the listener is left alone.
    resting: Option<Instant>,
}

impl Reactor {
    pub(super) fn new(
        bound: Bound,
        inbox: Arc<Inbox>,
        outbox: Outbox,
        hello: Hello,
        limits: Limits,
    ) -> Result<Reactor, Errno> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let readable = |source: Source| EpollEvent::new(EpollFlags::EPOLLIN, source.pack());
        epoll.add(bound.listener(), readable(Source::Listener))?;
        epoll.add(&inbox.bell, readable(Source::Bell))?;
        Ok(Reactor {
            bound,
            inbox,
            outbox,
            hello,
            limits,
            epoll,
            connections: HashMap::new(),
            ready: VecDeque::new(),
            watches: HashMap::new(),
            watch_of_token: HashMap::new(),
            next_number: 1,
            spare: File::open("/dev/null").ok(),
            resting: None,
        })
    }

    pub(super) fn run(mut self) {
        let mut events = [EpollEvent::empty(); EVENTS_A_TURN];
        loop {
            let count = match self.epoll.wait(&mut events, self.timeout()) {
                Ok(count) => count,
                Err(Errno::EINTR) => 0,
                Err(e) => {
                    tracing::error!(error = %e, "the control socket fails");
                    return;
                }
            };
            for event in &events[..count] {
                match Source::unpack(event.data()) {
                    Source::Listener => self.accept(),
                    Source::Bell => {
                        if self.obey().is_break() {
                            return self.last_words();
                        }
                    }
                    Source::Socket(conn) => self.socket_event(conn, event.events()),
                    Source::Process(conn) => self.end(conn),
                    Source::Watch(number) => self.died(number),
                }
            }
            for _ in 0..self.ready.len() {
                if let Some(conn) = self.ready.pop_front() {
                    self.advance(conn);
                }
            }
            self.tick();
        }
    }

    /// Lets out what was replied before the stop. Nearly always it has left
    /// already, as sockets have room for a line.
    fn last_words(&mut self) {
        let until = Instant::now() + LAST_WORDS;
        loop {
            let speaking = self.connections.iter().filter(|(_, c)| c.has_output());
            let (conns, mut polled): (Vec<ConnId>, Vec<PollFd<'_>>) = speaking
                .map(|(conn, c)| (*conn, PollFd::new(c.socket(), PollFlags::POLLOUT)))
                .unzip();
            let left = until.saturating_duration_since(Instant::now());
            if conns.is_empty() || left.is_zero() {
                return;
            }
            // One up, so that the last moment is no busy loop.
            let millis = left.as_millis() as u16 + 1;
            match poll(&mut polled, PollTimeout::from(millis)) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(_) => return,
            }
            for conn in conns {
                self.advance(conn);
            }
        }
    }

    fn timeout(&self) -> EpollTimeout {
        let needs_tick = self.resting.is_some()
            || self.watches.values().any(|w| w.pidfd.is_none())
            || self.connections.values().any(Connection::has_output);
        if !self.ready.is_empty() {
            EpollTimeout::ZERO
        } else if needs_tick {
            EpollTimeout::try_from(TICK).unwrap_or(EpollTimeout::ZERO)
        } else {
            EpollTimeout::NONE
        }
    }

    /// What has no event: the listener's rest, clients that do not read, and
    /// watches for which there was no descriptor.
    fn tick(&mut self) {
        let now = Instant::now();
        if self.resting.is_some_and(|until| until <= now) {
            self.resting = None;
            self.listen(EpollFlags::EPOLLIN);
        }
        let stalled: Vec<ConnId> = self
            .connections
            .iter()
            .filter(|(_, c)| c.is_stalled(now, &self.limits))
            .map(|(conn, _)| *conn)
            .collect();
        for conn in stalled {
            tracing::warn!(conn = conn.0, "a client does not read its replies: closed");
            self.end(conn);
        }
        let unopened: Vec<u64> = self
            .watches
            .iter()
            .filter(|(_, w)| w.pidfd.is_none())
            .map(|(number, _)| *number)
            .collect();
        for number in unopened {
            self.open_watch(number);
        }
    }

    fn number(&mut self) -> u64 {
        let number = self.next_number;
        self.next_number += 1;
        number
    }

    // --- the service's commands

    fn obey(&mut self) -> std::ops::ControlFlow<()> {
        for command in self.inbox.take() {
            match command {
                Command::Reply(conn, reply, descriptors) => {
                    if let Some(connection) = self.connections.get_mut(&conn) {
                        connection.reply(&reply, descriptors);
                        self.advance(conn);
                    }
                }
                Command::Tell(conn, notice, descriptor) => {
                    if let Some(connection) = self.connections.get_mut(&conn) {
                        connection.tell(notice, descriptor);
                        self.advance(conn);
                    }
                }
                Command::Close(conn) => self.end(conn),
                Command::Watch {
                    pid,
                    start_time,
                    token,
                } => self.watch(pid, start_time, token),
                Command::Unwatch(token) => self.unwatch(token),
                Command::Stop => return std::ops::ControlFlow::Break(()),
            }
        }
        std::ops::ControlFlow::Continue(())
    }

    // --- connections

    fn listen(&self, flags: EpollFlags) {
        let mut event = EpollEvent::new(flags, Source::Listener.pack());
        if let Err(e) = self.epoll.modify(self.bound.listener(), &mut event) {
            tracing::error!(error = %e, "cannot change the listener's state");
        }
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS_A_TURN {
            crash_point("accept a connection");
            let outcome = if self.connections.len() < self.limits.connections_max {
                match self.bound.accept() {
                    Ok(stream) => self.admit(stream),
                    Err(e) => Err(e),
                }
            } else {
                Err(Errno::EMFILE.into())
            };
            let Err(error) = outcome else { continue };
            match error.kind() {
                io::ErrorKind::WouldBlock => return,
                io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => {}
                _ if self.refuse_for_want() => {}
                _ => {
                    tracing::warn!(%error, "cannot take connections: trying again soon");
                    self.listen(EpollFlags::empty());
                    self.resting = Some(Instant::now() + LISTENER_REST);
                    return;
                }
            }
        }
    }

    /// Takes a connection only to tell it that there is no room. Whether one
    /// was waiting, and could be told.
    fn refuse_for_want(&mut self) -> bool {
        // Its number is free now, for the connection.
        let had_spare = self.spare.take().is_some();
        let refused = match self.bound.accept() {
            Ok(stream) => {
                let reason = format!(
                    "the broker has {} connections, and no room for another",
                    self.connections.len()
                );
                turn_away(&stream, ErrorCode::Full, reason);
                true
            }
            Err(e) => e.kind() == io::ErrorKind::WouldBlock && had_spare,
        };
        self.spare = File::open("/dev/null").ok();
        refused
    }

    fn admit(&mut self, stream: UnixStream) -> io::Result<()> {
        let credentials = getsockopt(&stream, sockopt::PeerCredentials)?;
        let mut peer = Peer {
            pid: credentials.pid(),
            start_time: 0,
            uid: credentials.uid(),
            gid: credentials.gid(),
        };
        let pidfd = match process::of_peer(&stream, peer.pid) {
            Ok((pidfd, start_time)) => {
                peer.start_time = start_time;
                pidfd
            }
            Err(e @ (Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM)) => return Err(e.into()),
            Err(e) => {
                // Dead already, or of a PID namespace that can't be seen here.
                tracing::warn!(pid = peer.pid, error = %e, "a client's process can't be seen: closed");
                let reason = format!("the broker can't see the client's process: {e}");
                turn_away(&stream, ErrorCode::NotPermitted, reason);
                return Ok(());
            }
        };
        let conn = ConnId(self.number());
        let mut connection = Connection::new(stream, pidfd, peer);
        let own = geteuid().as_raw();
        if peer.uid != own && peer.uid != 0 {
            tracing::warn!(
                pid = peer.pid,
                uid = peer.uid,
                "a client of another user is refused"
            );
            let reason = format!(
                "the broker serves user {own}, not user {}: run this as user {own} or root, or \
                 start a broker of your own",
                peer.uid
            );
            connection.refuse(ErrorCode::NotPermitted, reason);
        }
        let process = EpollEvent::new(EpollFlags::EPOLLIN, Source::Process(conn).pack());
        let socket = EpollEvent::new(connection.interest, Source::Socket(conn).pack());
        self.epoll.add(connection.socket(), socket)?;
        self.epoll.add(connection.pidfd(), process)?;
        tracing::debug!(conn = conn.0, pid = peer.pid, uid = peer.uid, "connected");
        self.connections.insert(conn, connection);
        self.advance(conn);
        Ok(())
    }

    fn socket_event(&mut self, conn: ConnId, flags: EpollFlags) {
        self.advance(conn);
        // Both directions are closed: whatever it asked, it won't hear.
        let over = EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR;
        let waits = self
            .connections
            .get(&conn)
            .is_some_and(Connection::only_waits);
        if waits && flags.intersects(over) {
            self.end(conn);
        }
    }

    fn advance(&mut self, conn: ConnId) {
        let Some(connection) = self.connections.get_mut(&conn) else {
            return;
        };
        match connection.advance(&self.hello) {
            Step::Wait(interest) => self.set_interest(conn, interest),
            Step::Again => self.ready.push_back(conn),
            Step::Request(request) => {
                connection.announced = true;
                let peer = connection.peer();
                self.outbox.put(Event::Request {
                    conn,
                    peer,
                    request,
                });
                self.set_interest(conn, EpollFlags::empty());
            }
            Step::End => self.end(conn),
        }
    }

    fn set_interest(&mut self, conn: ConnId, interest: EpollFlags) {
        let Some(connection) = self.connections.get_mut(&conn) else {
            return;
        };
        if connection.interest == interest {
            return;
        }
        connection.interest = interest;
        let mut event = EpollEvent::new(interest, Source::Socket(conn).pack());
        if let Err(e) = self.epoll.modify(connection.socket(), &mut event) {
            tracing::error!(conn = conn.0, error = %e, "cannot watch a connection: closed");
            self.end(conn);
        }
    }

    fn end(&mut self, conn: ConnId) {
        let Some(connection) = self.connections.remove(&conn) else {
            return;
        };
        // By hand: epoll would go on about descriptors that others hold too.
        let _ = self.epoll.delete(connection.socket());
        let _ = self.epoll.delete(connection.pidfd());
        tracing::debug!(
            conn = conn.0,
            pid = connection.peer().pid,
            "connection ended"
        );
        if connection.announced {
            self.outbox.put(Event::Gone { conn });
        }
    }

    // --- watched processes

    fn watch(&mut self, pid: i32, start_time: u64, token: u64) {
        self.unwatch(token);
        let number = self.number();
        let watch = Watch {
            pid,
            start_time,
            token,
            pidfd: None,
        };
        self.watches.insert(number, watch);
        self.watch_of_token.insert(token, number);
        self.open_watch(number);
    }

    fn open_watch(&mut self, number: u64) {
        let Some(watch) = self.watches.get_mut(&number) else {
            return;
        };
        match process::find(watch.pid, watch.start_time) {
            Found::Alive(pidfd) => {
                let event = EpollEvent::new(EpollFlags::EPOLLIN, Source::Watch(number).pack());
                // Else the tick tries again.
                if self.epoll.add(pidfd.as_fd(), event).is_ok() {
                    watch.pidfd = Some(pidfd);
                }
            }
            Found::Dead => self.died(number),
            Found::Unknown => {}
        }
    }

    fn died(&mut self, number: u64) {
        if let Some(watch) = self.drop_watch(number) {
            self.watch_of_token.remove(&watch.token);
            self.outbox.put(Event::Died { token: watch.token });
        }
    }

    fn unwatch(&mut self, token: u64) {
        if let Some(number) = self.watch_of_token.remove(&token) {
            self.drop_watch(number);
        }
    }

    fn drop_watch(&mut self, number: u64) -> Option<Watch> {
        let watch = self.watches.remove(&number)?;
        if let Some(pidfd) = &watch.pidfd {
            let _ = self.epoll.delete(pidfd.as_fd());
        }
        Some(watch)
    }
}

/// Tells the client why it is not taken. A new connection has room for a line;
/// if not, it sees the end alone.
fn turn_away(stream: &UnixStream, code: ErrorCode, reason: String) {
    crash_point("turn a client away");
    let _ = wire::send(stream, &line_of(&error(code, reason)), &[]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_survive_packing() {
        for source in [
            Source::Listener,
            Source::Bell,
            Source::Socket(ConnId(7)),
            Source::Process(ConnId(u64::MAX >> 3)),
            Source::Watch(1),
        ] {
            assert_eq!(Source::unpack(source.pack()), source);
        }
    }
}
