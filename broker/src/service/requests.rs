//! What the control socket asks for.

use super::core::{Core, Outward};
use super::session::SessionIo;
use super::stop;
use super::worker::{Job, ListJob};
use crate::board::Status;
use crate::control::{ConnId, Peer};
use crate::crash::crash_point;
use crate::hub::{AdminReply, SessionSlot, Ticket};
use crate::ledger::{LedgerError, SessionState};
use ringmain::Error;
use ringmain::control::{
    Attached, DEAD_LETTERS_MAX, MESSAGE_BYTES_LIMIT, Opened, Purpose, Reply, Request, Rings, Stats,
};
use ringmain_ring::layout::{Geometry, LAYOUT_VERSION};
use ringmain_ring::payload::segment_bytes;
use ringmain_ring::segment::SegmentError;
use ringmain_ring::wait::broker;
use serde::Serialize;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{SystemTime, UNIX_EPOCH};
use tracing::info;

/// Session numbers that are reserved in the store at a time.
pub(super) const SESSION_LOT: u64 = 1024;

/// An answer, and descriptors that go with it; `None` if it comes later.
type Answer = Result<Option<(serde_json::Value, Vec<OwnedFd>)>, Error>;

fn value(value: impl Serialize) -> Answer {
    let value = serde_json::to_value(value).map_err(|e| Error::Corrupt(e.to_string()))?;
    Ok(Some((value, Vec::new())))
}

fn empty() -> Answer {
    value(serde_json::Map::new())
}

impl Core {
    /// Answers a request, now or when its change is committed.
    pub fn request(&mut self, conn: ConnId, peer: Peer, request: Request) {
        let answer = match request {
            request if self.stopping.refuses(&request) => Err(stop::refusal()),
            // The control thread answers it.
            Request::Hello { .. } => empty(),
            Request::Open { layout, rings } => self.open(conn, peer, layout, rings),
            Request::Ready => self.ready(conn),
            Request::Resume { session } => self.resume(conn, peer, session),
            Request::Outbound { bytes } => self.outbound(conn, bytes),
            Request::Attach {
                queue,
                purpose,
                window,
            } => self.attach(conn, &queue, purpose, window),
            Request::QueueCreate { name, settings } => {
                let ticket = self.ticket(conn);
                let reply = self.hub.create_queue(&name, settings, wall_ms(), ticket);
                self.at_once(ticket, reply)
            }
            Request::QueueDelete { name } => {
                let ticket = self.ticket(conn);
                let reply = self.hub.delete_queue(&name, ticket);
                self.at_once(ticket, reply)
            }
            Request::QueueList => value(self.hub.queue_list()),
            Request::QueueInfo { name } => self.hub.queue_info(&name).and_then(value),
            Request::Stats => value(self.stats()),
            Request::Stop { drain } => self.stop(conn, peer, drain).map(|()| None),
            Request::DeadLetters { queue, from, limit } => {
                self.dead_letters(conn, &queue, from, limit)
            }
            Request::Redrive { queue, to, limit } => {
                self.redrive(conn, &queue, to.as_deref(), limit)
            }
        };
        match answer {
            Ok(None) => {}
            Ok(Some((value, fds))) => {
                self.outward
                    .push(Outward::Reply(conn, Reply::Ok(value), fds))
            }
            Err(error) => {
                self.outward.push(Outward::Reply(
                    conn,
                    Reply::Error((&error).into()),
                    Vec::new(),
                ));
            }
        }
    }

    fn ticket(&mut self, conn: ConnId) -> Ticket {
        self.next_ticket += 1;
        self.tickets.insert(self.next_ticket, conn);
        self.next_ticket
    }

    fn at_once(&mut self, ticket: Ticket, reply: Option<AdminReply>) -> Answer {
        let Some(reply) = reply else { return Ok(None) };
        self.tickets.remove(&ticket);
        reply.and_then(|()| empty())
    }

    fn dead_letters(&mut self, conn: ConnId, queue: &str, from: u64, limit: u32) -> Answer {
        if !(1..=DEAD_LETTERS_MAX).contains(&limit) {
            return Err(Error::Invalid(format!(
                "a list of {limit} messages: it can be from 1 to {DEAD_LETTERS_MAX}"
            )));
        }
        let queue = self.hub.queue_number(queue)?;
        let ticket = self.ticket(conn);
        self.jobs.push(Job::List(ListJob {
            ticket,
            queue,
            from,
            limit: limit as usize,
        }));
        Ok(None)
    }

    fn redrive(
        &mut self,
        conn: ConnId,
        queue: &str,
        to: Option<&str>,
        limit: Option<u64>,
    ) -> Answer {
        let ticket = self.ticket(conn);
        let limit = limit.unwrap_or(u64::MAX);
        match self.hub.redrive(queue, to, limit, ticket) {
            None => Ok(None),
            Some(error) => {
                self.tickets.remove(&ticket);
                Err(error)
            }
        }
    }

    /// An administrative change is committed.
    pub(super) fn answer_change(&mut self, ticket: Ticket, reply: AdminReply) {
        if let Some((_, below)) = self.session_lot.take_if(|(lot, _)| *lot == ticket) {
            self.sessions_reserved = below;
        }
        self.answer_ticket(ticket, reply.map(|()| serde_json::Map::new()));
    }

    /// Answers a request that was not answered at once.
    pub(super) fn answer_ticket(&mut self, ticket: Ticket, reply: Result<impl Serialize, Error>) {
        let Some(conn) = self.tickets.remove(&ticket) else {
            return;
        };
        let value = reply.and_then(|value| {
            serde_json::to_value(value).map_err(|e| Error::Corrupt(e.to_string()))
        });
        let reply = match value {
            Ok(value) => Reply::Ok(value),
            Err(error) => Reply::Error((&error).into()),
        };
        self.outward.push(Outward::Reply(conn, reply, Vec::new()));
    }

    fn open(&mut self, conn: ConnId, peer: Peer, layout: u32, rings: Rings) -> Answer {
        let geometry = Geometry::from(rings);
        if layout != LAYOUT_VERSION {
            return Err(Error::VersionMismatch(format!(
                "the client has layout {layout} of shared memory, the broker {LAYOUT_VERSION}: \
                 use the same version of ringmain on both sides"
            )));
        }
        if !geometry.is_valid() {
            return Err(Error::Invalid(format!(
                "ring sizes {rings:?}: each must be a power of two from 4 KiB to 1 GiB"
            )));
        }
        if self.by_conn.contains_key(&conn) {
            return Err(Error::Invalid(
                "the connection has a session already".to_owned(),
            ));
        }
        let sessions = self.by_number.len() + self.leaving.len();
        if sessions >= self.setup.sessions_max {
            return Err(Error::Full(format!(
                "there are {sessions} sessions already"
            )));
        }
        let number = self.take_session_number()?;
        let dir = self.setup.shm_dir.clone();
        let made = SessionIo::create(&dir, self.setup.instance, number, geometry, conn, peer);
        let (session, file) = made.map_err(ledger_error)?;
        let doorbell = share(&session.doorbell)?;
        let slot = self.hub.open_session(number, geometry);
        self.insert_session(slot, session);
        self.outward.push(Outward::Register(slot));
        info!(
            session = number,
            pid = peer.pid,
            uid = peer.uid,
            "session opened"
        );
        let (opened, _) = value(Opened { session: number })?.unwrap_or_default();
        Ok(Some((opened, vec![file.into(), doorbell])))
    }

    /// The next session number. Numbers are reserved in lots, so that none is
    /// given twice though the number in use is nowhere stored.
    fn take_session_number(&mut self) -> Result<u64, Error> {
        if self.next_session + SESSION_LOT / 4 == self.sessions_reserved {
            let below = self.sessions_reserved + SESSION_LOT;
            self.next_ticket += 1;
            self.session_lot = Some((self.next_ticket, below));
            self.hub.reserve_sessions(below, self.next_ticket);
        }
        if self.next_session >= self.sessions_reserved {
            return Err(Error::StoreUnavailable(
                "session numbers are being reserved: try again".to_owned(),
            ));
        }
        self.next_session += 1;
        Ok(self.next_session - 1)
    }

    fn session_of(&self, conn: ConnId) -> Result<SessionSlot, Error> {
        let slot = self.by_conn.get(&conn).copied();
        slot.ok_or_else(|| {
            Error::Invalid("the connection has no session: open one first".to_owned())
        })
    }

    fn ready(&mut self, conn: ConnId) -> Answer {
        let slot = self.session_of(conn)?;
        if let Some(session) = self.io.session_mut(slot)
            && session.state == SessionState::Opening
        {
            session.state = SessionState::Open;
            session.ledger.set_state(SessionState::Open);
        }
        self.activate(slot);
        empty()
    }

    /// A client of an adopted session has found the new broker.
    fn resume(&mut self, conn: ConnId, peer: Peer, number: u64) -> Answer {
        let gone = || Error::Closed(format!("session {number} has ended"));
        let slot = *self.by_number.get(&number).ok_or_else(gone)?;
        let session = self.io.session_mut(slot).ok_or_else(gone)?;
        let owner = session.peer;
        if (owner.pid, owner.start_time, owner.uid) != (peer.pid, peer.start_time, peer.uid) {
            return Err(Error::NotPermitted(format!(
                "session {number} is another process's"
            )));
        }
        if session.conn.is_some() || session.state != SessionState::Open {
            return Err(gone());
        }
        session
            .renew_doorbell()
            .map_err(|e| ledger_error(e.into()))?;
        session.conn = Some(conn);
        crash_point("take up an orphan");
        session.map.broker_wait().take(broker::ORPHANED);
        let doorbell = share(&session.doorbell)?;
        self.by_conn.insert(conn, slot);
        self.outward.push(Outward::Unwatch(number));
        self.outward.push(Outward::Register(slot));
        let reads = self.hub.reads_in_place(slot);
        self.io.announce_again(slot, &reads);
        self.activate(slot);
        info!(session = number, pid = peer.pid, "session resumed");
        let (opened, _) = value(Opened { session: number })?.unwrap_or_default();
        Ok(Some((opened, vec![doorbell])))
    }

    fn attach(&mut self, conn: ConnId, queue: &str, purpose: Purpose, window: u32) -> Answer {
        let slot = self.session_of(conn)?;
        self.check_ready(slot)?;
        let (index, number, settings) = self.hub.attach(slot, queue, purpose, window)?;
        // Nothing uses the attachment before the next pass.
        if let Some(session) = self.io.session(slot) {
            session.ledger.attach(index, number, purpose, window);
        }
        value(Attached { index, settings })
    }

    fn check_ready(&self, slot: SessionSlot) -> Result<(), Error> {
        let session = self.io.session(slot);
        match session.is_some_and(|session| session.state == SessionState::Open) {
            true => Ok(()),
            false => Err(Error::Invalid("the session is not ready".to_owned())),
        }
    }

    fn outbound(&mut self, conn: ConnId, bytes: u64) -> Answer {
        let slot = self.session_of(conn)?;
        self.check_ready(slot)?;
        if bytes > u64::from(MESSAGE_BYTES_LIMIT) {
            return Err(Error::Invalid(format!(
                "a payload of {bytes} bytes: it can be at most {MESSAGE_BYTES_LIMIT}"
            )));
        }
        let (made, file) = self.io.add_outbound(slot, bytes)?;
        self.hub.add_outbound(slot, segment_bytes(made.units));
        let (made, _) = value(made)?.unwrap_or_default();
        Ok(Some((made, vec![file.into()])))
    }

    /// A connection has ended, and with it its session.
    pub fn conn_gone(&mut self, conn: ConnId) {
        self.tickets.retain(|_, waiting| *waiting != conn);
        if let Some(slot) = self.by_conn.remove(&conn) {
            self.end_session(slot);
            self.reader_gone(slot);
        }
    }

    /// The process of an adopted session has died.
    pub fn process_died(&mut self, number: u64) {
        if let Some(&slot) = self.by_number.get(&number) {
            self.end_session(slot);
            self.reader_gone(slot);
        }
    }

    /// What the status board shows, but for what its writer puts in.
    pub fn status(&mut self) -> Status {
        Status {
            posted_ns: self.now_ns,
            draining: self.stopping.is_draining(),
            stats: self.stats(),
            cached_bytes: self.hub.cached_bytes() as u64,
            payload_bytes: self.io.payload_bytes.iter().sum(),
            per_queue: self.hub.queue_status(wall_ms(), &mut self.io),
            ..Status::default()
        }
    }

    fn stats(&self) -> Stats {
        let (queues, messages, leased) = self.hub.totals();
        let counters = self.hub.counters();
        Stats {
            uptime_ms: (self.now_ns - self.started_ns) / 1_000_000,
            sessions: self.by_number.len() as u64,
            queues,
            messages,
            leased,
            sends: counters.sends,
            refused: counters.refused,
            deliveries: counters.deliveries,
            redeliveries: counters.redeliveries,
            acks: counters.acks,
            returned: counters.returned,
            leases_lost: counters.leases_lost,
            stored: counters.stored,
            dead: counters.dead,
            round: self.io.ledger.committed(),
            synced_round: self.synced_round,
            disk_full: self.disk_full,
        }
    }
}

/// Milliseconds since the Unix epoch.
pub(super) fn wall_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}

fn share(fd: &impl AsFd) -> Result<OwnedFd, Error> {
    fd.as_fd().try_clone_to_owned().map_err(|source| Error::Io {
        what: "cannot pass a descriptor".to_owned(),
        source,
    })
}

fn ledger_error(error: LedgerError) -> Error {
    match error {
        LedgerError::Segment(error @ SegmentError::NoSpace { .. }) => {
            Error::Full(error.to_string())
        }
        other => Error::Io {
            what: "cannot make a session".to_owned(),
            source: std::io::Error::other(other.to_string()),
        },
    }
}
