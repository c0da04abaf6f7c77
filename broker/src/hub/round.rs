//! Rounds: how memory and store stay one.
//!
//! Closing a round freezes a prefix of each session's records. What is in it:
//!
//! - sends that are settled: left out, they never touch the disk;
//! - sends that are not: they get their positions in their queues, in the order
//!   of intake, and go to the store;
//! - ends of leases: of stored messages they become marks and attempts.
//!
//! A prefix ends before the first send that is neither settled nor due. Which
//! are due is one cut in the order of intake for all sessions, so that the order
//! of positions is the order of the queue's lists.
//!
//! A lease's entry can be used again when both its message's send and its end
//! are committed. Until then it is the only thing that says, after a crash, what
//! became of a message that lies in a ring.

use super::chunks::{Chunk, ChunkIndex};
use super::message::{Message, MessageIndex, NONE, Place, State};
use super::moves::{FrozenMove, Moved};
use super::port::{LeaseEntry, LeaseState, Port, SessionSlot, Shown};
use super::{AdminReply, Hub, Ticket, memory_of};
use crate::store::block::{Block, MessageHead};
use crate::store::{QueueNumber, Write};
use ringmain::record;

/// A queue whose consumers have ended a lease within this time is being
/// consumed. Several times what a consumer needs to be woken.
const CONSUMED_NS: u64 = 300_000;

/// How long an unsettled send of a chunk waits for its ack before it is written:
/// that costs the disk more, and the submission ring less, than with a short one.
const CHUNK_LINGER_NS: u64 = 50_000_000;
/// As [`CONSUMED_NS`], where messages are large and take longer.
const CONSUMED_CHUNK_NS: u64 = 5_000_000;

/// How much a round takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Close {
    /// Everything that was taken in.
    All,
    /// Unsettled sends only if they are older than so many nanoseconds, or
    /// someone waits, or their ring runs full.
    Due {
        /// The linger.
        linger_ns: u64,
    },
    /// No unsettled send: the disk is full, and settling must go on.
    SettledOnly,
}

/// One session's part of a round.
#[derive(Debug, Clone, Copy)]
pub struct SessionPart {
    /// The session.
    pub slot: SessionSlot,
    /// The round has its records before this position.
    pub end: u64,
    /// And the answers before this position of the answer ring.
    pub answer_tail: u64,
}

/// Where a round finds the payload of a message that it stores.
#[derive(Debug, Clone)]
pub enum Source {
    /// In its sender's submission ring.
    Ring {
        /// The session.
        slot: SessionSlot,
        /// Where in the ring's area.
        offset: u32,
    },
    /// In a chunk of its sender's.
    Chunk {
        /// The session.
        slot: SessionSlot,
        /// The chunk.
        at: record::Chunk,
    },
}

/// A message of a round, with its bytes still elsewhere.
#[derive(Debug, Clone)]
pub struct FrozenMessage {
    /// What is stored beside the payload.
    pub head: MessageHead,
    /// Where the payload is.
    pub source: Source,
    /// Length of the payload.
    pub len: u32,
}

/// Messages that a round appends to a queue.
#[derive(Debug)]
pub struct Append {
    /// The queue.
    pub queue: QueueNumber,
    /// Position of the first message.
    pub first: u64,
    /// The messages.
    pub messages: Vec<FrozenMessage>,
}

/// What a round writes to the store.
#[derive(Debug)]
pub struct FrozenRound {
    /// Messages, one entry a queue; packed into blocks by who writes them.
    pub appends: Vec<Append>,
    /// Messages from other queues, to be written behind those.
    pub moves: Vec<FrozenMove>,
    /// The other changes.
    pub writes: Vec<Write>,
}

/// What a finished round brought about.
#[derive(Debug, Default)]
pub struct Finished {
    /// Sessions that are ended and committed: their segments can go.
    pub gone: Vec<SessionSlot>,
    /// Administrative changes that took effect.
    pub admin: Vec<(Ticket, AdminReply)>,
}

/// The round that is being written, kept from one round to the next for its
/// memory.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    parts: Vec<SessionPart>,
    /// Messages that get stored, sorted by order of intake.
    stored: Vec<(u64, MessageIndex)>,
    /// The hub's queue and its messages, per append.
    appends: Vec<(u32, Vec<MessageIndex>)>,
    pub settled: Vec<(QueueNumber, u64)>,
    attempts: Vec<(QueueNumber, u64, u16)>,
    free: Vec<LeaseEntry>,
    /// Entries of earlier leases of what is settled, whose ends are in no round yet.
    outlived: Vec<LeaseEntry>,
    /// Chunks of sends that the round passes without storing them.
    chunks: Vec<ChunkIndex>,
    pub moved: Vec<Moved>,
}

impl Hub {
    /// Whether a round should be closed now, by anything but the linger.
    pub fn close_wanted(&self) -> bool {
        !self.round_in_flight && self.close_wanted
    }

    /// Whether there is anything that a round could take, some time.
    pub fn has_uncommitted(&self) -> bool {
        !self.dirty.is_empty()
            || !self.ends.is_empty()
            || self.admin.has_pending()
            || self.moves.has_pending()
    }

    /// Whether a round was closed and not finished.
    pub fn round_in_flight(&self) -> bool {
        self.round_in_flight
    }

    /// Number of the round being written, or of the next one.
    pub fn round_number(&self) -> u64 {
        self.next_round
    }

    /// The parts of the round that is being written.
    pub fn round_parts(&self) -> &[SessionPart] {
        &self.in_flight.parts
    }

    /// Whether the unsettled sends that the next round could take would be
    /// written to the store.
    pub fn unsettled_bytes(&self) -> u64 {
        self.dirty
            .iter()
            .filter_map(|&slot| self.sessions[slot as usize].as_ref())
            .map(|session| session.taken_in - session.frozen + session.queued_bytes)
            .sum::<u64>()
            + self.moves.bytes()
    }

    /// Whether the session has ended, and all its records are committed.
    pub fn is_committed_to_its_end(&self, slot: SessionSlot) -> bool {
        let session = self.session(slot);
        session.ended && session.committed == session.taken_in && session.ends.is_empty()
    }

    /// Closes a round. `None`: there was nothing to close. Otherwise the caller
    /// notes [`Hub::round_parts`] in the ledger, commits what the round writes,
    /// if anything, and calls [`Hub::finish`].
    pub fn close(&mut self, close: Close, port: &mut impl Port) -> Option<FrozenRound> {
        debug_assert!(!self.round_in_flight);
        self.close_wanted = false;
        self.pressed = false;
        let cut = self.cut(close);
        let mut round = std::mem::take(&mut self.in_flight);
        for slot in std::mem::take(&mut self.dirty) {
            self.freeze_session(slot, cut, &mut round);
        }
        let appends = self.place_stored(&mut round, port);
        for index in 0..round.parts.len() {
            let SessionPart { slot, end, .. } = round.parts[index];
            while let Some(&(position, entry)) = self.session(slot).ends.front() {
                if position >= end {
                    break;
                }
                self.session_mut(slot).ends.pop_front();
                self.include_end(entry, &mut round);
            }
        }
        for entry in std::mem::take(&mut self.ends) {
            self.include_end(entry, &mut round);
        }
        // What must go on though the disk is full is settling.
        let moves = match close {
            Close::SettledOnly => Vec::new(),
            Close::All | Close::Due { .. } => self.freeze_moves(&mut round, port),
        };
        let writes = self.writes(&mut round);
        let empty = round.parts.is_empty()
            && appends.is_empty()
            && moves.is_empty()
            && writes.is_empty()
            && round.free.is_empty()
            && round.chunks.is_empty();
        self.in_flight = round;
        if empty {
            return None;
        }
        self.round_in_flight = true;
        Some(FrozenRound {
            appends,
            moves,
            writes,
        })
    }

    /// The first order of intake that the round does not take while unsettled.
    fn cut(&mut self, close: Close) -> u64 {
        let linger_ns = match close {
            Close::All => return self.next_order,
            Close::SettledOnly => {
                // It may be long before the disk has room, and then all are due.
                self.ages.clear();
                return 0;
            }
            Close::Due { linger_ns } => linger_ns,
        };
        let someone_waits = |session: &super::Session| session.flush > session.frozen;
        let sessions = || {
            self.dirty
                .iter()
                .filter_map(|&slot| self.sessions[slot as usize].as_ref())
        };
        if sessions().any(someone_waits) {
            return self.next_order;
        }
        let pressed = sessions()
            .map(|session| {
                self.pressed_cut(session)
                    .max(self.pressed_by_chunks(session))
            })
            .max()
            .unwrap_or(0);
        let old = self.now_ns.saturating_sub(linger_ns);
        while self.ages.front().is_some_and(|&(_, when)| when <= old) {
            self.ages.pop_front();
        }
        let by_age = self
            .ages
            .front()
            .map_or(self.next_order, |&(order, _)| order);
        pressed.max(by_age.min(self.first_young_chunk()))
    }

    /// The first unsettled send of a chunk that may still be consumed in time, by
    /// its order of intake. Since all sessions have one cut, what comes later waits
    /// with it.
    fn first_young_chunk(&mut self) -> u64 {
        while let Some(&(order, when, index)) = self.young_chunks.front() {
            let message = &self.messages[index];
            let waits = message.order == order
                && !message.send_done
                && message.state != State::Settled
                && matches!(message.place, Place::Chunk { .. });
            if waits && when + CHUNK_LINGER_NS > self.now_ns {
                return order;
            }
            self.young_chunks.pop_front();
        }
        u64::MAX
    }

    /// A session whose sends hold more than half of its payload memory gets the
    /// older half of them stored, unless consumers are at work on them.
    fn pressed_by_chunks(&self, session: &super::Session) -> u64 {
        if session.queued_bytes <= session.memory.outbound_bytes / 2 {
            return 0;
        }
        let unsettled = |index: &&MessageIndex| self.messages[**index].state != State::Settled;
        let first = session.sends.iter().find(unsettled);
        let Some(&first) = first else { return 0 };
        let last_end_ns = self.queue(self.messages[first].queue).last_end_ns;
        if self.now_ns - last_end_ns < CONSUMED_CHUNK_NS {
            return 0;
        }
        let mut bytes = 0;
        let older = session.sends.iter().take_while(|&&index| {
            let before = bytes;
            bytes += u64::from(self.messages[index].len);
            before <= session.queued_bytes / 2
        });
        let last = older.filter(unsettled).last();
        last.map_or(0, |&last| self.messages[last].order + 1)
    }

    /// A ring that is more than half full, and that passing its settled sends
    /// would hardly free, gets its first half stored: unless consumers are at
    /// work on what blocks it, and will have settled it sooner than the disk.
    fn pressed_cut(&self, session: &super::Session) -> u64 {
        let half = session.ring_bytes / 2;
        if session.taken_in - session.frozen < half {
            return 0;
        }
        let unsettled = |index: &&MessageIndex| self.messages[**index].state != State::Settled;
        let first = session.sends.iter().find(unsettled);
        let Some(&first) = first else { return 0 };
        let first = &self.messages[first];
        let consumed = self.now_ns - self.queue(first.queue).last_end_ns < CONSUMED_NS;
        if consumed || first.position - session.frozen > half / 2 {
            return 0;
        }
        let in_first_half =
            |index: &&MessageIndex| self.messages[**index].position < session.frozen + half;
        let last = session
            .sends
            .iter()
            .take_while(in_first_half)
            .filter(unsettled)
            .last();
        last.map_or(0, |&last| self.messages[last].order + 1)
    }

    /// Takes the session's prefix: passes settled sends, collects those that
    /// are due, and stops at the first other one.
    fn freeze_session(&mut self, slot: SessionSlot, cut: u64, round: &mut InFlight) {
        let Some(session) = self.sessions[slot as usize].as_mut() else {
            return;
        };
        let mut end = session.taken_in;
        while let Some(session) = self.sessions[slot as usize].as_mut()
            && let Some(&index) = session.sends.front()
        {
            let message = &self.messages[index];
            if message.state != State::Settled {
                if message.order >= cut {
                    end = message.position;
                    break;
                }
                round.stored.push((message.order, index));
            }
            session.sends.pop_front();
            self.include_send(index, round);
        }
        let session = self.session_mut(slot);
        while let Some(&(position, chunk)) = session.refused.front() {
            if position >= end {
                break;
            }
            session.refused.pop_front();
            round.chunks.push(chunk);
        }
        while let Some(&(position, tail)) = session.answers.front() {
            if position >= end {
                break;
            }
            session.answers.pop_front();
            session.answer_tail = tail;
        }
        session.dirty = false;
        if end > session.frozen || (session.ended && end == session.taken_in) {
            session.frozen = end;
            let answer_tail = session.answer_tail;
            round.parts.push(SessionPart {
                slot,
                end,
                answer_tail,
            });
        }
        if end < session.taken_in {
            self.pressed |= session.taken_in - end > session.ring_bytes / 2;
            self.mark_dirty(slot);
        }
    }

    /// The message's send is in the round: entries of leases that ended before
    /// can go, and so can the message itself if it is settled.
    fn include_send(&mut self, index: MessageIndex, round: &mut InFlight) {
        self.messages[index].send_done = true;
        if self.messages[index].state == State::Settled
            && let Place::Chunk { chunk } = self.messages[index].place
        {
            round.chunks.push(chunk);
            self.messages[index].place = Place::Away;
        }
        let mut entry = self.messages[index].leases;
        while entry != NONE {
            let next = self.leases[entry as usize].next;
            if self.leases[entry as usize].end_done {
                self.unchain(index, entry);
                round.free.push(entry);
            }
            entry = next;
        }
        self.remove_if_done(index);
    }

    /// The end of a lease is in the round.
    fn include_end(&mut self, entry: LeaseEntry, round: &mut InFlight) {
        let lease = &mut self.leases[entry as usize];
        lease.end_done = true;
        let index = lease.message;
        if index == NONE {
            round.free.push(entry);
            return;
        }
        let acked = lease.state == LeaseState::Acked;
        let message = &self.messages[index];
        if !message.send_done {
            return;
        }
        if message.has_position && !message.in_flight && message.queue != NONE {
            if acked {
                self.settle_in_store(index, round);
            } else if message.state != State::Settled {
                let queue = self.queue(message.queue).number;
                round
                    .attempts
                    .push((queue, message.order, message.history.bits()));
            }
        }
        self.unchain(index, entry);
        round.free.push(entry);
        self.remove_if_done(index);
    }

    /// The round settles a stored message. Entries of earlier leases whose ends have
    /// to wait, as behind sends on a full disk, are not about it any more: or a
    /// successor would find it in them, and deliver it again.
    pub(super) fn settle_in_store(&mut self, index: MessageIndex, round: &mut InFlight) {
        let message = &self.messages[index];
        let queue = self.queue(message.queue).number;
        round.settled.push((queue, message.order));
        let mut entry = message.leases;
        while entry != NONE {
            round.outlived.push(entry);
            entry = self.leases[entry as usize].next;
        }
    }

    pub(super) fn unchain(&mut self, index: MessageIndex, entry: LeaseEntry) {
        let after = self.leases[entry as usize].next;
        let mut at = self.messages[index].leases;
        if at == entry {
            self.messages[index].leases = after;
            return;
        }
        while at != NONE {
            let next = self.leases[at as usize].next;
            if next == entry {
                self.leases[at as usize].next = after;
                return;
            }
            at = next;
        }
    }

    /// Drops a settled message that nothing refers to any more.
    #[inline]
    pub(super) fn remove_if_done(&mut self, index: MessageIndex) {
        let message = &self.messages[index];
        if message.state != State::Settled || !message.send_done || message.leases != NONE {
            return;
        }
        if message.has_position && message.queue != NONE {
            let Message { queue, order, .. } = *message;
            let queue = self.queue_mut(queue);
            if queue.gap.contains(&order) {
                // A read that began before the mark was committed may still
                // bring it.
                queue.known.insert(order, NONE);
            } else {
                queue.known.remove(&order);
            }
        }
        self.messages.remove(index);
    }

    /// Gives the round's messages their positions, and says where the queue's
    /// memory ends.
    fn place_stored(&mut self, round: &mut InFlight, port: &mut impl Port) -> Vec<Append> {
        let mut appends: Vec<Append> = Vec::new();
        // Sorted runs, one a session: nearly free for this sort.
        round.stored.sort_unstable();
        let cache_share = self.cache_share();
        for (_, index) in round.stored.drain(..) {
            let queue = self.messages[index].queue;
            let at = match round.appends.iter().position(|&(other, _)| other == queue) {
                Some(at) => at,
                None => {
                    round.appends.push((queue, Vec::new()));
                    let entry = self.queue(queue);
                    appends.push(Append {
                        queue: entry.number,
                        first: entry.next,
                        messages: Vec::new(),
                    });
                    round.appends.len() - 1
                }
            };
            round.appends[at].1.push(index);
            if let Some(frozen) = self.freeze_message(index, cache_share, port) {
                appends[at].messages.push(frozen);
            }
        }
        appends
    }

    /// What one queue may keep in memory.
    fn cache_share(&self) -> usize {
        const LEAST: usize = 256 * 1024;
        let users = self
            .queues
            .iter()
            .flatten()
            .filter(|queue| queue.cached_bytes > 0)
            .count();
        (self.limits.cache_bytes / users.max(1)).max(LEAST.min(self.limits.cache_bytes))
    }

    fn freeze_message(
        &mut self,
        index: MessageIndex,
        cache_share: usize,
        port: &mut impl Port,
    ) -> Option<FrozenMessage> {
        let message = &mut self.messages[index];
        let queue = self.queues[message.queue as usize].as_mut()?;
        message.order = queue.next;
        message.has_position = true;
        message.in_flight = true;
        queue.next += 1;
        self.counters.stored += 1;
        let source = match message.place {
            Place::Ring { slot, offset } => Source::Ring { slot, offset },
            Place::Chunk { chunk } => {
                let Chunk { slot, at, .. } = self.chunks[chunk];
                Source::Chunk { slot, at }
            }
            Place::Away | Place::Block { .. } => {
                debug_assert!(false, "what was not stored lies with its sender");
                return None;
            }
        };
        let frozen = FrozenMessage {
            head: MessageHead {
                session: message.session,
                position: message.position,
                sent_at_ms: message.sent_at_ms,
                attempts: message.history.bits(),
            },
            source,
            len: message.len,
        };
        let mut entry = message.leases;
        while entry != NONE {
            port.lease_position(entry, message.queue_position());
            entry = self.leases[entry as usize].next;
        }
        if message.state == State::Ready {
            queue.freezing_bytes += memory_of(message.len);
            if queue.cached_bytes + queue.freezing_bytes > cache_share {
                self.spill_from(index);
            }
        }
        Some(frozen)
    }

    /// From this message, one of `ready`, on, the queue goes on in the store alone.
    pub(super) fn spill_from(&mut self, index: MessageIndex) {
        let Some(queue) = self.queues[self.messages[index].queue as usize].as_mut() else {
            return;
        };
        let rest = queue.ready.split_off(&mut self.messages, index);
        for message in rest.iter(&self.messages).collect::<Vec<_>>() {
            self.messages[message].state = State::Later;
        }
        debug_assert!(
            queue.later.is_empty(),
            "a queue with a gap has nothing new in `ready`"
        );
        queue.later = rest;
        queue.spilling = true;
    }

    fn writes(&mut self, round: &mut InFlight) -> Vec<Write> {
        let mut writes = Vec::new();
        round.settled.sort_unstable();
        for run in round.settled.chunk_by(|a, b| a.0 == b.0) {
            let positions = run.iter().map(|&(_, position)| position).collect();
            writes.push(Write::Settle {
                queue: run[0].0,
                positions,
            });
        }
        for &(queue, position, attempts) in &round.attempts {
            writes.push(Write::Attempts {
                queue,
                position,
                attempts,
            });
        }
        round.settled.clear();
        round.attempts.clear();
        writes.extend(self.admin.freeze());
        writes
    }

    /// The round is committed, and its confirmations are published: what it
    /// stored lies in `blocks` now, per append in the round's order *(index of
    /// the append, block)*.
    pub fn finish(&mut self, blocks: &[(usize, Block)], port: &mut impl Port) -> Finished {
        debug_assert!(self.round_in_flight);
        let mut round = std::mem::take(&mut self.in_flight);
        for &SessionPart { slot, end, .. } in &round.parts {
            self.session_mut(slot).committed = end;
        }
        let mut taken = vec![0; round.appends.len()];
        for (append, block) in blocks {
            let members = &round.appends[*append].1[taken[*append]..];
            taken[*append] += block.len() as usize;
            self.settle_in_block(block, &members[..block.len() as usize], port);
        }
        for (index, _) in round.appends.drain(..) {
            if let Some(queue) = self.queues[index as usize].as_mut() {
                queue.spilling = false;
                queue.freezing_bytes = 0;
                queue.committed = queue.next;
                // What fell out of memory can be read now.
                self.make_runnable(index);
            }
        }
        self.finish_moves(&mut round.moved);
        for chunk in round.chunks.drain(..) {
            self.release_sent(chunk, port);
        }
        // Before the entries that are free: a successor that finds the round unfinished
        // does this again.
        for entry in round.outlived.drain(..) {
            port.lease_position(entry, 0);
        }
        for entry in round.free.drain(..) {
            if self.leases[entry as usize].shown != Shown::No {
                self.leases[entry as usize].state = LeaseState::Shown;
                self.leases[entry as usize].message = NONE;
                port.lease_state(entry, LeaseState::Shown, super::History::default());
                continue;
            }
            self.leases[entry as usize] = super::FREE_LEASE;
            port.lease_state(entry, LeaseState::Free, super::History::default());
            self.free_leases.push(entry);
        }
        let mut finished = Finished::default();
        for SessionPart { slot, .. } in round.parts.drain(..) {
            let session = self.session(slot);
            let is_done = session.committed == session.taken_in && session.ends.is_empty();
            if session.ended && is_done && session.memory.is_unread() {
                self.sessions[slot as usize] = None;
                // It may have been told to end while the round was written.
                self.dirty.retain(|&dirty| dirty != slot);
                finished.gone.push(slot);
            }
        }
        self.in_flight = round;
        self.round_in_flight = false;
        self.next_round += 1;
        finished.admin = self.finish_admin(port);
        if std::mem::take(&mut self.leases_short) {
            for queue in 0..self.queues.len() as u32 {
                if self.queues[queue as usize].is_some() {
                    self.make_runnable(queue);
                }
            }
        }
        finished
    }

    /// These messages of the round lie in `block` now, in this order.
    fn settle_in_block(&mut self, block: &Block, members: &[MessageIndex], port: &mut impl Port) {
        let cached = self.use_block(block);
        for (at, &index) in members.iter().enumerate() {
            let message = &mut self.messages[index];
            message.in_flight = false;
            let place = std::mem::replace(&mut message.place, Place::Away);
            let state = message.state;
            if let Place::Chunk { chunk } = place {
                self.release_sent(chunk, port);
            }
            self.keep_known(index);
            match state {
                State::Ready | State::Again => self.put_in_block(index, cached, at as u32),
                State::Moving => {
                    self.put_in_block(index, cached, at as u32);
                    self.start_move(index, None);
                }
                State::Later => self.evict(index),
                State::Leased | State::Delayed | State::Dying => {}
                State::Settled => self.remove_if_done(index),
            }
        }
        self.forget_unused_block(cached);
    }

    /// The send that took the chunk is committed: the message holds it no longer.
    fn release_sent(&mut self, chunk: ChunkIndex, port: &mut impl Port) {
        let Chunk { slot, at, .. } = self.chunks[chunk];
        self.session_mut(slot).queued_bytes -= u64::from(at.len);
        self.release_chunk(chunk, port);
    }

    /// After a restart a message that was leased may lie behind the gap, which
    /// then grows over it: reads must not take it for a new one.
    fn keep_known(&mut self, index: MessageIndex) {
        let Message {
            queue,
            order,
            state,
            ..
        } = self.messages[index];
        let Some(queue) = self.queues[queue as usize].as_mut() else {
            return;
        };
        if queue.is_behind() && !matches!(state, State::Ready | State::Later) {
            queue.known.insert(order, index);
        }
    }

    /// The message, the oldest of `later`, is in the store alone from now on.
    fn evict(&mut self, index: MessageIndex) {
        let Message { queue, order, .. } = self.messages[index];
        let Some(queue) = self.queues[queue as usize].as_mut() else {
            return;
        };
        let oldest = queue.later.pop_front(&mut self.messages);
        debug_assert_eq!(oldest, Some(index));
        if queue.gap.is_empty() {
            queue.gap.start = order;
        }
        queue.gap.end = order + 1;
        self.messages.remove(index);
    }
}
