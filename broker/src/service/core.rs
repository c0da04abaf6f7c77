//! The service without its threads: sessions' rings and ledger on one side, the
//! hub in the middle, jobs for the store on the other. Tests drive it step by
//! step; [`super::serve`] drives it from a thread.

use super::io::Io;
use super::leaving::Leaving;
use super::payloads::{OutboundFile, PayloadLimits};
use super::session::{SessionIo, remove_files};
use super::stop::Stopping;
use super::worker::{CommitJob, Done, Job};
use crate::control::{ConnId, Peer};
use crate::hub::{Close, FrozenRound, Hub, Nack, SessionPart, SessionSlot, Source, Ticket};
use crate::ledger::SessionState;
use crate::store::block::Block;
use crate::store::{Store, StoreError};
use nix::sys::eventfd::EventFd;
use ringmain::control::{Notice, Redriven, Reply};
use ringmain::record::{self, Chunk, submission};
use ringmain_ring::fault;
use ringmain_ring::record_ring::Record;
use ringmain_ring::session::SessionMap;
use ringmain_ring::wait::client;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use tracing::{error, info, warn};

/// How long an unsettled send waits for its ack before it is written.
pub(super) const LINGER_NS: u64 = 2_000_000;
/// While the disk is full, how often it is looked at again.
const FULL_DISK_LOOK_NS: u64 = 50_000_000;
/// What nobody asked to be synced is synced after so long.
const SYNC_INTERVAL_NS: u64 = 1_000_000_000;
/// Bytes of one session that are taken in before another has its turn.
const PORTION_BYTES: u64 = 64 * 1024;
/// A session that has sent nothing in so many passes is looked at rarely.
const IDLE_PASSES: u32 = 4096;
/// Sessions that are looked at in a pass beside the active ones.
const ROTATION: usize = 4;

/// What the core wants its driver to do about connections.
#[derive(Debug)]
pub(super) enum Outward {
    /// Send this answer.
    Reply(ConnId, Reply, Vec<OwnedFd>),
    /// Tell this unasked.
    Tell(ConnId, Notice, Option<OwnedFd>),
    /// Close it.
    Close(ConnId),
    /// Watch the process of an adopted session.
    Watch(Peer, u64),
    /// Watch it no more.
    Unwatch(u64),
    /// This session has a doorbell to listen to.
    Register(SessionSlot),
    /// Nobody is to listen to this one any more. (Closing it is not enough: the
    /// client has it too.)
    Unregister(EventFd),
}

/// Set-up of a core.
#[derive(Debug, Clone)]
pub(super) struct Setup {
    pub shm_dir: PathBuf,
    pub instance: u64,
    pub sessions_max: usize,
    pub payload_limits: PayloadLimits,
}

/// See the module's text.
pub(super) struct Core {
    pub hub: Hub,
    pub io: Io,
    pub setup: Setup,
    pub store: Arc<dyn Store>,
    pub started_ns: u64,
    pub now_ns: u64,
    /// Sessions looked at in every pass.
    pub active: Vec<SessionSlot>,
    /// Where the slow look at the others goes on.
    rotation: usize,
    /// Sessions by connection and by number.
    pub by_conn: HashMap<ConnId, SessionSlot>,
    pub by_number: HashMap<u64, SessionSlot>,
    /// The faults of shared memory that were dealt with.
    faults: u64,
    /// Sessions whose delivery ring was full.
    blocked: Vec<SessionSlot>,
    /// Adopted sessions that no client has resumed.
    pub orphans: Vec<SessionSlot>,
    /// Jobs for the store, to be taken by the driver.
    pub jobs: Vec<Job>,
    /// What the control socket has to do.
    pub outward: Vec<Outward>,
    /// Who waits for which administrative change.
    pub tickets: HashMap<Ticket, ConnId>,
    pub next_ticket: Ticket,
    pub next_session: u64,
    pub sessions_reserved: u64,
    /// The reservation under way, and the numbers that it will reach to.
    pub session_lot: Option<(Ticket, u64)>,
    last_close_ns: u64,
    pub disk_full: bool,
    next_disk_look_ns: u64,
    /// The round that is being written has a batch.
    round_has_batch: bool,
    /// The last round with a batch, and the last synced one.
    last_batch: u64,
    pub synced_round: u64,
    sync_running: bool,
    /// *(session, committed end)* when the running sync began.
    sync_marks: Vec<(u64, u64)>,
    last_sync_ns: u64,
    /// Sessions that are gone but for their files, which stay until their client
    /// was told of a sync.
    pub leaving: Vec<Leaving>,
    /// How many of them were there when the running sync began.
    sync_leaving: usize,
    /// Who asked the broker to stop, and how far that is.
    pub stopping: Stopping,
}

type Maps = Vec<(SessionSlot, Arc<SessionMap>)>;
type Files = Vec<(SessionSlot, u32, Arc<OutboundFile>)>;

/// No correct client names a chunk that is not in its segments.
fn check_chunk(io: &Io, slot: SessionSlot, chunk: Chunk) -> Result<(), String> {
    let outbound = io.session(slot).map(|session| &session.payloads.outbound);
    let file = outbound.and_then(|outbound| outbound.get(chunk.segment as usize));
    match file {
        Some(file) if file.holds(chunk) => Ok(()),
        _ => Err("a send of a chunk that is not in its payload segments".to_owned()),
    }
}

impl Core {
    pub fn new(
        setup: Setup,
        store: Arc<dyn Store>,
        hub: Hub,
        io: Io,
        now_ns: u64,
        synced_round: u64,
    ) -> Core {
        let next_session = store.next_session();
        Core {
            hub,
            io,
            setup,
            store,
            started_ns: now_ns,
            now_ns,
            active: Vec::new(),
            rotation: 0,
            faults: fault::count(),
            by_conn: HashMap::new(),
            by_number: HashMap::new(),
            blocked: Vec::new(),
            orphans: Vec::new(),
            jobs: Vec::new(),
            outward: Vec::new(),
            tickets: HashMap::new(),
            next_ticket: 0,
            next_session,
            sessions_reserved: next_session,
            session_lot: None,
            last_close_ns: now_ns,
            disk_full: false,
            next_disk_look_ns: 0,
            round_has_batch: false,
            last_batch: synced_round,
            synced_round,
            sync_running: false,
            sync_marks: Vec::new(),
            last_sync_ns: now_ns,
            leaving: Vec::new(),
            sync_leaving: 0,
            stopping: Stopping::default(),
        }
    }

    /// One pass over everything that may have something to do. Returns whether
    /// there was anything.
    pub fn pass(&mut self, now_ns: u64) -> Result<bool, StoreError> {
        self.now_ns = now_ns;
        self.hub.set_now(now_ns);
        let mut busy = self.take_in();
        if self.hub.next_timer_ns().is_some_and(|due| due <= now_ns) {
            self.hub.run_timers(&mut self.io);
            busy = true;
        }
        self.retry_blocked();
        busy |= self.hub.dispatch(&mut self.io);
        self.note_blocked();
        self.io.publish();
        busy |= self.close_round()?;
        self.sync_by_interval();
        for (queue, from) in self.io.reads.drain(..) {
            self.jobs.push(Job::Read { queue, from });
        }
        self.jobs.extend(self.io.fills.drain(..).map(Job::Fill));
        for (ticket, outcome) in self.hub.take_redriven() {
            self.answer_ticket(ticket, outcome.map(|moved| Redriven { moved }));
        }
        self.break_damaged();
        self.end_sessions();
        let told = self.io.told.drain(..);
        self.outward
            .extend(told.map(|(conn, notice, fd)| Outward::Tell(conn, notice, fd)));
        Ok(busy)
    }

    /// A client that cuts a segment short harms itself alone: reads of what is
    /// missing gave zeroes, and its session ends here.
    fn break_damaged(&mut self) {
        let faults = fault::count();
        if faults == std::mem::replace(&mut self.faults, faults) {
            return;
        }
        for slot in 0..self.io.sessions.len() as SessionSlot {
            let damaged = self
                .io
                .session(slot)
                .is_some_and(|session| session.map.is_damaged() || session.payloads.is_damaged());
            if damaged {
                let reason = "a segment of it was cut short".to_owned();
                self.io.break_session(slot, reason);
            }
        }
    }

    fn take_in(&mut self) -> bool {
        let mut busy = false;
        let mut at = 0;
        while at < self.active.len() {
            let slot = self.active[at];
            let did = self.take_in_session(slot);
            busy |= did;
            let Some(session) = self.io.session_mut(slot) else {
                self.active.swap_remove(at);
                continue;
            };
            session.idle_passes = if did { 0 } else { session.idle_passes + 1 };
            if session.idle_passes > IDLE_PASSES {
                session.active = false;
                self.active.swap_remove(at);
                continue;
            }
            at += 1;
        }
        busy | self.look_at_idle()
    }

    /// The others have a doorbell, but while the broker is awake nobody listens
    /// to it: so a few of them are looked at in each pass.
    fn look_at_idle(&mut self) -> bool {
        let sessions = self.io.sessions.len();
        let mut busy = false;
        for _ in 0..ROTATION.min(sessions) {
            self.rotation = (self.rotation + 1) % sessions;
            let slot = self.rotation as SessionSlot;
            if self.io.session(slot).is_some_and(|session| !session.active)
                && self.take_in_session(slot)
            {
                busy = true;
                self.activate(slot);
            }
        }
        busy
    }

    /// Has the session looked at in every pass.
    pub fn activate(&mut self, slot: SessionSlot) {
        if let Some(session) = self.io.session_mut(slot)
            && !session.active
        {
            session.active = true;
            session.idle_passes = 0;
            self.active.push(slot);
        }
    }

    /// Takes in a portion of the session's records. Returns whether there was
    /// any.
    fn take_in_session(&mut self, slot: SessionSlot) -> bool {
        let Some(session) = self.io.session_mut(slot) else {
            return false;
        };
        if session.state != SessionState::Open || session.broken.is_some() {
            return false;
        }
        let map = session.map.clone();
        let ring = map.submission();
        match session.submission.refresh(ring) {
            Ok(false) => return false,
            Ok(true) => {}
            Err(damaged) => {
                self.io.break_session(slot, damaged.to_string());
                return false;
            }
        }
        let most = session.submission.next_position() + PORTION_BYTES;
        let up_to = session.submission.published().min(most);
        let number = session.number;
        self.log_intake(number, up_to);
        self.take_in_up_to(slot, &map, up_to)
    }

    fn log_intake(&self, number: u64, up_to: u64) {
        let committed = |number| {
            let slot = self.by_number.get(&number)?;
            Some(self.io.session(*slot)?.committed)
        };
        self.io.ledger.log_intake(number, up_to, committed);
    }

    /// Applies the session's records before `up_to`, as far as they and the room
    /// for their answers go.
    pub fn take_in_up_to(&mut self, slot: SessionSlot, map: &SessionMap, up_to: u64) -> bool {
        let mut any = false;
        let mut next = 0;
        while let Some(session) = self.io.session_mut(slot) {
            next = session.submission.next_position();
            if next >= up_to || session.broken.is_some() {
                break;
            }
            let closing = session.state == SessionState::Closing;
            let record = session.has_answer_room().and_then(|room| {
                if !room && !closing {
                    return Ok(None);
                }
                session.submission.next(map.submission())
            });
            let applied = match record {
                Ok(None) => break,
                Ok(Some(record)) => self.apply(slot, map, &record),
                Err(damaged) => Err(damaged.to_string()),
            };
            if let Err(reason) = applied {
                self.io.break_session(slot, reason);
                break;
            }
            any = true;
        }
        if any {
            self.hub.taken_in(slot, next);
        }
        any
    }

    fn apply(
        &mut self,
        slot: SessionSlot,
        map: &SessionMap,
        record: &Record,
    ) -> Result<(), String> {
        let ring = map.submission();
        let (hub, io, position) = (&mut self.hub, &mut self.io, record.position);
        match record.kind {
            submission::SEND => {
                let send = record::Send::read(record, ring).map_err(|e| e.to_string())?;
                if let record::Place::Chunk(chunk) = send.place {
                    check_chunk(io, slot, chunk)?;
                }
                hub.send(slot, position, &send, io)
                    .map_err(|e| e.to_string())?;
            }
            submission::ACK | submission::NACK | submission::EXTEND => {
                let leases = record::Leases::read(record, ring).map_err(|e| e.to_string())?;
                let nack = Nack::from_flags(record.flags);
                for index in 0..leases.count {
                    let lease = leases.lease(ring, index);
                    match record.kind {
                        submission::ACK => hub.ack(slot, position, lease, io),
                        submission::NACK => {
                            hub.nack(slot, position, lease, leases.millis, nack, io);
                        }
                        _ => hub.extend(slot, position, lease, leases.millis, io),
                    }
                }
            }
            submission::FLUSH => {
                hub.flush(slot, record.end());
                if record.flags & submission::FLUSH_SYNCED != 0
                    && let Some(session) = io.session_mut(slot)
                {
                    session.flush_synced = record.end();
                }
            }
            // For a broker that was away when the client closed its connection.
            // Nothing follows it.
            submission::END => io.ending.push(slot),
            kind => return Err(format!("a record of unknown kind {kind}")),
        }
        Ok(())
    }

    fn retry_blocked(&mut self) {
        let mut blocked = std::mem::take(&mut self.blocked);
        blocked.retain(|&slot| match self.io.has_room(slot) {
            Some(false) => true,
            Some(true) => {
                self.hub.unblock(slot);
                false
            }
            None => {
                self.io
                    .break_session(slot, "impossible cursor of the delivery ring".to_owned());
                false
            }
        });
        self.blocked = blocked;
    }

    fn note_blocked(&mut self) {
        for slot in self.hub.take_blocked() {
            self.blocked.push(slot);
        }
    }

    /// Closes a round if it is time. Returns whether one was closed.
    fn close_round(&mut self) -> Result<bool, StoreError> {
        if self.hub.round_in_flight() || !self.hub.has_uncommitted() {
            return Ok(false);
        }
        let wait = if self.disk_full {
            FULL_DISK_LOOK_NS
        } else {
            LINGER_NS
        };
        let due = self.now_ns >= self.last_close_ns + wait;
        if !due && !self.hub.close_wanted() {
            return Ok(false);
        }
        self.last_close_ns = self.now_ns;
        self.look_at_disk()?;
        let close = match self.disk_full {
            true => Close::SettledOnly,
            false => Close::Due {
                linger_ns: LINGER_NS,
            },
        };
        self.close_round_as(close);
        Ok(true)
    }

    /// Closes a round, and commits it at once if it has nothing to write.
    pub fn close_round_as(&mut self, close: Close) {
        let Some(frozen) = self.hub.close(close, &mut self.io) else {
            return;
        };
        let round = self.hub.round_number();
        for &SessionPart {
            slot,
            end,
            answer_tail,
        } in self.hub.round_parts()
        {
            if let Some(session) = self.io.session(slot) {
                session.ledger.freeze(round, end, answer_tail);
            }
        }
        self.round_has_batch =
            !(frozen.appends.is_empty() && frozen.moves.is_empty() && frozen.writes.is_empty());
        if !self.round_has_batch {
            self.finish_round(&[]);
            return;
        }
        let (maps, files) = self.sources_of(&frozen);
        self.jobs.push(Job::Commit(CommitJob {
            round,
            frozen,
            maps,
            files,
        }));
    }

    /// The segments that the round's payloads lie in.
    fn sources_of(&self, frozen: &FrozenRound) -> (Maps, Files) {
        let (mut rings, mut chunks) = (Vec::new(), Vec::new());
        for message in frozen.appends.iter().flat_map(|append| &append.messages) {
            match message.source {
                Source::Ring { slot, .. } => rings.push(slot),
                Source::Chunk { slot, at } => chunks.push((slot, at.segment)),
            }
        }
        rings.sort_unstable();
        rings.dedup();
        chunks.sort_unstable();
        chunks.dedup();
        let map = |slot| Some((slot, Arc::clone(&self.io.session(slot)?.map)));
        let file = |(slot, segment)| {
            let outbound = &self.io.session(slot)?.payloads.outbound;
            Some((slot, segment, Arc::clone(outbound.get(segment as usize)?)))
        };
        (
            rings.into_iter().filter_map(map).collect(),
            chunks.into_iter().filter_map(file).collect(),
        )
    }

    /// The disk counts as full if what might be written now, with its own
    /// overhead, does not fit.
    fn look_at_disk(&mut self) -> Result<(), StoreError> {
        const INTERVAL_NS: u64 = 20_000_000;
        if self.now_ns < self.next_disk_look_ns || self.hub.unsettled_bytes() == 0 {
            return Ok(());
        }
        self.next_disk_look_ns = self.now_ns + INTERVAL_NS;
        let full = self.store.room()? < 2 * self.hub.unsettled_bytes();
        if full != self.disk_full {
            self.disk_full = full;
            match full {
                true => error!("the disk is full: sends wait, acks go on; free some space"),
                false => info!("the disk has room again"),
            }
        }
        Ok(())
    }

    /// The steps after a round's commit, in this order; each is harmless when a
    /// successor repeats it.
    fn finish_round(&mut self, blocks: &[(usize, Block)]) {
        let round = self.hub.round_number();
        if self.round_has_batch {
            self.io.ledger.set_written(round);
            self.note_batch(round);
        }
        self.io.ledger.set_committed(round);
        let all_synced = self.last_batch <= self.synced_round;
        let mut sync_wanted = false;
        for index in 0..self.hub.round_parts().len() {
            let SessionPart {
                slot,
                end,
                answer_tail,
            } = self.hub.round_parts()[index];
            if let Some(session) = self.io.session_mut(slot) {
                session.confirm(end, answer_tail, all_synced);
                sync_wanted |= session.flush_synced > session.synced && session.flush_synced <= end;
                // A sender is not woken for a little room that it fills at once.
                let room = if session.is_half_free() {
                    client::ROOM
                } else {
                    0
                };
                self.io
                    .touch(slot, client::ANSWERS | client::CONFIRMATION | room);
            }
        }
        let finished = self.hub.finish(blocks, &mut self.io);
        self.io.ledger.set_finished(round);
        self.io.publish();
        if sync_wanted {
            self.start_sync();
        }
        for slot in finished.gone {
            self.remove_session(slot);
        }
        for (ticket, reply) in finished.admin {
            self.answer_change(ticket, reply);
        }
    }

    /// A batch was written that is not synced.
    pub fn note_batch(&mut self, round: u64) {
        self.last_batch = round;
    }

    /// Whether a sync is under way.
    pub fn sync_running(&self) -> bool {
        self.sync_running
    }

    /// Has everything committed so far synced.
    pub fn start_sync(&mut self) {
        if self.sync_running {
            return;
        }
        self.sync_running = true;
        let sessions = self.io.sessions.iter().flatten();
        self.sync_marks = sessions
            .map(|session| (session.number, session.committed))
            .collect();
        self.sync_leaving = self.leaving.len();
        self.jobs.push(Job::Sync);
    }

    fn synced(&mut self, round: u64) {
        self.sync_running = false;
        self.synced_round = self.synced_round.max(round);
        self.last_sync_ns = self.now_ns;
        for (number, committed) in std::mem::take(&mut self.sync_marks) {
            let Some(&slot) = self.by_number.get(&number) else {
                continue;
            };
            let Some(session) = self.io.session_mut(slot) else {
                continue;
            };
            session.confirm_synced(committed);
            self.io.touch(slot, client::CONFIRMATION);
        }
        self.io.publish();
        let left = self.leaving.drain(..std::mem::take(&mut self.sync_leaving));
        for session in left {
            session.confirm_synced();
            remove_files(&self.setup.shm_dir, session.number);
        }
        // Also of sessions that were not there yet when this sync began.
        let waits = |session: &SessionIo| {
            session.flush_synced > session.synced && session.flush_synced <= session.committed
        };
        if !self.leaving.is_empty() || self.io.sessions.iter().flatten().any(waits) {
            self.start_sync();
        }
    }

    fn sync_by_interval(&mut self) {
        if let Some(due) = self.next_sync_ns()
            && due <= self.now_ns
        {
            self.start_sync();
        }
    }

    fn next_sync_ns(&self) -> Option<u64> {
        let wanted = !self.sync_running && self.last_batch > self.synced_round;
        wanted.then_some(self.last_sync_ns + SYNC_INTERVAL_NS)
    }

    /// A job is done.
    pub fn job_done(&mut self, done: Done) -> Result<(), StoreError> {
        match done {
            Done::Committed { blocks } => self.finish_round(&blocks),
            Done::Read {
                queue,
                from,
                blocks,
            } => self.hub.loaded(queue, from, &blocks),
            Done::Filled {
                ticket,
                failed: None,
            } => {
                self.hub.filled(ticket, &mut self.io);
                self.io.publish();
            }
            Done::Filled {
                ticket,
                failed: Some(error),
            } => {
                // Parts of a message that was purged meanwhile may be gone.
                if self.hub.fill_failed(ticket, &mut self.io) {
                    return Err(error);
                }
            }
            Done::Listed { ticket, listed } => self.answer_ticket(ticket, Ok(listed)),
            Done::Synced { round } => self.synced(round),
            Done::Failed(error) => return Err(error),
        }
        Ok(())
    }

    /// When something is to be done though nobody sends anything.
    pub fn next_wake_ns(&self) -> Option<u64> {
        let wait = if self.disk_full {
            FULL_DISK_LOOK_NS
        } else {
            LINGER_NS
        };
        let round = (!self.hub.round_in_flight() && self.hub.has_uncommitted())
            .then_some(self.last_close_ns + wait);
        [round, self.hub.next_timer_ns(), self.next_sync_ns()]
            .into_iter()
            .flatten()
            .min()
    }

    /// Before a sleep: arms the doorbells of the sessions that were looked at in
    /// every pass, and looks once more. The others are armed since they went
    /// quiet, and a doorbell rung since then ends the sleep. Returns whether
    /// sleeping is right.
    pub fn prepare_sleep(&mut self) -> bool {
        let mut quiet = true;
        for slot in std::mem::take(&mut self.active) {
            let Some(session) = self.io.session_mut(slot) else {
                continue;
            };
            session.active = false;
            let stalled = !session.has_answer_room().unwrap_or(true);
            self.io.arm(slot, stalled || self.blocked.contains(&slot));
            if self.io.has_submissions(slot) {
                quiet = false;
                self.activate(slot);
            }
        }
        for index in 0..self.blocked.len() {
            let slot = self.blocked[index];
            self.io.arm(slot, true);
            quiet &= self.io.has_room(slot) == Some(false);
        }
        quiet
    }

    /// After a sleep: sessions that no client has resumed have no doorbell, and no
    /// socket whose end would be seen.
    pub fn look_at_orphans(&mut self) {
        let mut orphans = std::mem::take(&mut self.orphans);
        orphans.retain(|&slot| {
            self.io
                .session(slot)
                .is_some_and(|session| session.conn.is_none())
        });
        for &slot in &orphans {
            let Some(session) = self.io.session(slot) else {
                continue;
            };
            if session.map.client_wait().is_set(client::GONE) {
                self.end_session(slot);
                self.reader_gone(slot);
            } else if session.state == SessionState::Open {
                self.activate(slot);
            }
        }
        self.orphans = orphans;
    }

    fn end_sessions(&mut self) {
        for slot in std::mem::take(&mut self.io.ending) {
            let Some(session) = self.io.session(slot) else {
                continue;
            };
            let (number, pid, conn) = (session.number, session.peer.pid, session.conn);
            if let Some(reason) = &session.broken {
                warn!(
                    session = number,
                    pid, reason, "session ended: its client broke the protocol"
                );
                self.outward.extend(conn.map(Outward::Close));
            }
            self.end_session(slot);
        }
    }

    /// Ends a session: what its client had published is taken in, its leases go
    /// back, and its files go once all is committed.
    pub fn end_session(&mut self, slot: SessionSlot) {
        let Some(session) = self.io.session_mut(slot) else {
            return;
        };
        if std::mem::replace(&mut session.ended, true) {
            return;
        }
        session.begin_closing();
        let (number, map) = (session.number, session.map.clone());
        if session.broken.is_none() && session.submission.refresh(map.submission()).is_ok() {
            // A predecessor may have told the client already what was the last.
            let up_to = session
                .submission
                .published()
                .min(session.ledger.final_position());
            self.log_intake(number, up_to);
            self.take_in_up_to(slot, &map, up_to);
        }
        self.hub.end_session(slot, &mut self.io);
        if let Some(session) = self.io.session(slot) {
            session.publish_final_position();
        }
        self.io.touch(slot, client::ALL);
        self.blocked.retain(|&other| other != slot);
    }

    /// The session's client reads nothing any more.
    pub fn reader_gone(&mut self, slot: SessionSlot) {
        if let Some(session) = self.io.session_mut(slot)
            && !std::mem::replace(&mut session.reader_gone, true)
        {
            self.hub.reader_gone(slot, &mut self.io);
        }
    }

    fn remove_session(&mut self, slot: SessionSlot) {
        let Some(session) = self.io.sessions[slot as usize].take() else {
            return;
        };
        let leaving = Leaving::of(&session);
        self.io.forget_segments(&session);
        self.outward.push(Outward::Unregister(session.doorbell));
        self.by_number.remove(&session.number);
        if let Some(conn) = session.conn {
            self.by_conn.remove(&conn);
        }
        self.active.retain(|&other| other != slot);
        if session.conn.is_none() {
            self.outward.push(Outward::Unwatch(session.number));
        }
        info!(
            session = session.number,
            pid = session.peer.pid,
            "session gone"
        );
        match leaving {
            Some(leaving) => {
                self.leaving.push(leaving);
                self.start_sync();
            }
            None => remove_files(&self.setup.shm_dir, session.number),
        }
    }

    /// Puts a session in the tables.
    pub fn insert_session(&mut self, slot: SessionSlot, session: SessionIo) {
        self.by_number.insert(session.number, slot);
        if let Some(conn) = session.conn {
            self.by_conn.insert(conn, slot);
        }
        self.io.insert(slot, session);
    }
}
