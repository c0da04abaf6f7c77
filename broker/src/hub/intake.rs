//! What a submission does, record by record.

use super::message::{Message, MessageIndex, NONE, Place, State};
use super::port::{History, LeaseEntry, LeaseState, Port, SessionSlot, Shown};
use super::{Attachment, Hub, Lease, Silent};
use ringmain::ErrorCode;
use ringmain::control::Purpose;
use ringmain::record::{self, Answer, submission};
use std::cmp::Reverse;

/// Why a session that sent this record must end: no correct client writes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The attachment does not exist, or is not for sending.
    #[error("a send to attachment {0}, which is not there for sending")]
    Attachment(u32),
}

/// What a nack says beside the delay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Nack {
    /// It was an attempt.
    Counted,
    /// The client had not handed the message out.
    Uncounted,
    /// The message can't be processed: it is dead.
    Rejected,
}

impl Nack {
    /// What the flags of a nack record say.
    pub fn from_flags(flags: u16) -> Nack {
        if flags & submission::NACK_REJECT != 0 {
            Nack::Rejected
        } else if flags & submission::NACK_UNCOUNTED != 0 {
            Nack::Uncounted
        } else {
            Nack::Counted
        }
    }
}

impl Hub {
    /// Taking in has come to `end`, the end of a record.
    #[inline]
    pub fn taken_in(&mut self, slot: SessionSlot, end: u64) {
        let session = self.session_mut(slot);
        session.taken_in = end;
        let half_full = end - session.frozen > session.ring_bytes / 2;
        let was_silent = session.silent != Silent::No;
        let replayed = session.replay_until > 0 && end >= session.replay_until;
        self.close_wanted |= half_full;
        self.mark_dirty(slot);
        if replayed {
            self.finish_replay(slot);
        }
        if was_silent {
            self.session_mut(slot).silent = Silent::No;
            self.offer_messages(slot);
        }
    }

    /// A send, with its payload in the session's submission ring at `offset`.
    #[inline]
    pub fn send(
        &mut self,
        slot: SessionSlot,
        position: u64,
        send: &record::Send,
        port: &mut impl Port,
    ) -> Result<(), Violation> {
        let session = self.session(slot);
        let number = session.number;
        let queue = match session.attachments.get(send.attachment as usize) {
            Some(&Attachment {
                queue,
                purpose: Purpose::Produce,
                ..
            }) => queue,
            _ => return Err(Violation::Attachment(send.attachment)),
        };
        self.counters.sends += 1;
        let place = self.place_of(slot, position, send);
        if queue == NONE {
            self.refuse(slot, position, place, ErrorCode::NoSuchQueue, port);
            return Ok(());
        }
        if !self.orphans.is_empty()
            && let Some(index) = self.orphans.remove(&(number, position))
        {
            let order = self.next_order();
            self.adopt(slot, index, order, place, send);
            return Ok(());
        }
        let len = send.place.len();
        if len > self.queue(queue).row.settings.max_message_bytes {
            self.refuse(slot, position, place, ErrorCode::TooLarge, port);
            return Ok(());
        }
        let order = self.next_order();
        let index = self.messages.insert(Message {
            session: number,
            position,
            sent_at_ms: send.sent_at_ms,
            order,
            len,
            place,
            prev: NONE,
            next: NONE,
            leases: NONE,
            queue,
            history: History::default(),
            state: State::Ready,
            send_done: false,
            has_position: false,
            in_flight: false,
        });
        self.session_mut(slot).sends.push_back(index);
        self.note_chunk(index);
        let target = self.queue_mut(queue);
        target.messages += 1;
        target.sends += 1;
        if target.is_behind() {
            self.enlist(index, State::Later);
        } else {
            self.enlist(index, State::Ready);
            self.make_runnable(queue);
        }
        Ok(())
    }

    /// Where the payload of a send is. A chunk is held for it from now on.
    #[inline]
    fn place_of(&mut self, slot: SessionSlot, position: u64, send: &record::Send) -> Place {
        match send.place {
            record::Place::Inline { offset, .. } => Place::Ring { slot, offset },
            record::Place::Chunk(at) => {
                self.session_mut(slot).queued_bytes += u64::from(at.len);
                let chunk = self.chunks.hold(slot, at, position);
                Place::Chunk { chunk }
            }
        }
    }

    /// The send of a chunk was taken in: from when it counts as old, it is due to
    /// be stored.
    pub(super) fn note_chunk(&mut self, index: MessageIndex) {
        let Message { place, order, .. } = self.messages[index];
        if let Place::Chunk { chunk } = place {
            self.young_chunks.push_back((order, self.now_ns, index));
            let session = self.session(self.chunks[chunk].slot);
            self.close_wanted |= session.queued_bytes > session.memory.outbound_bytes / 2;
        }
    }

    #[inline]
    fn next_order(&mut self) -> u64 {
        let order = self.next_order;
        self.next_order += 1;
        if self
            .ages
            .back()
            .is_none_or(|&(_, when)| when != self.now_ns)
        {
            self.ages.push_back((order, self.now_ns));
        }
        order
    }

    /// Puts a message in this state at the end of the list that belongs to it.
    #[inline]
    pub(super) fn enlist(&mut self, index: MessageIndex, state: State) {
        self.messages[index].state = state;
        let queue = self.queues[self.messages[index].queue as usize].as_mut();
        let queue = queue.expect("messages name live queues only");
        if let Some(list) = queue.list_of(state) {
            list.push_back(&mut self.messages, index);
        }
    }

    /// Takes the first message of its list out of it.
    #[inline]
    pub(super) fn unlist_first(&mut self, index: MessageIndex) {
        let Message { queue, state, .. } = self.messages[index];
        let queue = self.queues[queue as usize].as_mut();
        let list = queue.and_then(|queue| queue.list_of(state));
        let popped = list.and_then(|list| list.pop_front(&mut self.messages));
        debug_assert_eq!(popped, Some(index));
    }

    fn refuse(
        &mut self,
        slot: SessionSlot,
        position: u64,
        place: Place,
        code: ErrorCode,
        port: &mut impl Port,
    ) {
        self.counters.refused += 1;
        if let Place::Chunk { chunk } = place {
            self.session_mut(slot).refused.push_back((position, chunk));
        }
        let answer = Answer::Refused {
            position,
            code: code as u16,
        };
        self.answer(slot, position, answer, port);
    }

    fn answer(&mut self, slot: SessionSlot, position: u64, answer: Answer, port: &mut impl Port) {
        let end = port.answer(slot, answer);
        self.session_mut(slot).answers.push_back((position, end));
    }

    /// An ack of one lease, by the record at `position`.
    #[inline]
    pub fn ack(
        &mut self,
        slot: SessionSlot,
        position: u64,
        lease: record::Lease,
        port: &mut impl Port,
    ) {
        if !self.holds(slot, lease) {
            return self.lease_lost(slot, position, lease, LeaseState::Acked, port);
        }
        self.counters.acks += 1;
        let message = self.leases[lease.entry as usize].message;
        self.queue_mut(self.messages[message].queue).acks += 1;
        self.end_lease(lease.entry, LeaseState::Acked, false, port);
        self.session_mut(slot)
            .ends
            .push_back((position, lease.entry));
        self.settle(message);
    }

    /// A nack of one lease: its message may be leased again after the delay.
    pub fn nack(
        &mut self,
        slot: SessionSlot,
        position: u64,
        lease: record::Lease,
        delay_ms: u64,
        nack: Nack,
        port: &mut impl Port,
    ) {
        if !self.holds(slot, lease) {
            return self.lease_lost(slot, position, lease, LeaseState::Nacked, port);
        }
        self.counters.returned += 1;
        let message = self.leases[lease.entry as usize].message;
        if nack == Nack::Rejected {
            let history = &mut self.messages[message].history;
            *history = history.rejected();
        }
        let counted = nack != Nack::Uncounted;
        self.end_lease(lease.entry, LeaseState::Nacked, counted, port);
        self.session_mut(slot)
            .ends
            .push_back((position, lease.entry));
        if delay_ms == 0 || self.is_dead(message) {
            return self.put_back(message);
        }
        self.messages[message].state = State::Delayed;
        let due = self
            .now_ns
            .saturating_add(delay_ms.saturating_mul(1_000_000));
        self.delayed.push(Reverse((due, message)));
    }

    /// Makes a lease last for `duration_ms` from now on, at most a week. Never
    /// makes it shorter.
    pub fn extend(
        &mut self,
        slot: SessionSlot,
        position: u64,
        lease: record::Lease,
        duration_ms: u64,
        port: &mut impl Port,
    ) {
        const WEEK_MS: u64 = 7 * 24 * 3600 * 1000;
        if !self.holds(slot, lease) {
            return self.lease_lost(slot, position, lease, LeaseState::Leased, port);
        }
        let asked = self.now_ns + duration_ms.min(WEEK_MS) * 1_000_000;
        let held = &mut self.leases[lease.entry as usize];
        held.deadline_ns = held.deadline_ns.max(asked);
        port.lease_deadline(lease.entry, held.deadline_ns);
    }

    /// Asks for everything before `end` to be stored soon.
    pub fn flush(&mut self, slot: SessionSlot, end: u64) {
        self.session_mut(slot).flush = end;
        self.close_wanted = true;
    }

    /// Whether this session holds this lease now: the entry is checked against
    /// the holder and the delivery, so that a lease can't be forged.
    #[inline]
    fn holds(&self, slot: SessionSlot, lease: record::Lease) -> bool {
        self.leases.get(lease.entry as usize).is_some_and(|held| {
            held.state == LeaseState::Leased
                && held.holder == slot
                && held.delivery_position == lease.delivery_position
        })
    }

    /// An answer to a lease that this session does not hold. During a replay it
    /// may be the very record that ended it before the predecessor's death.
    #[cold]
    fn lease_lost(
        &mut self,
        slot: SessionSlot,
        position: u64,
        lease: record::Lease,
        by: LeaseState,
        port: &mut impl Port,
    ) {
        if let Some(held) = self.leases.get(lease.entry as usize)
            && held.shown != Shown::No
            && held.holder == slot
            && held.delivery_position == lease.delivery_position
            && by != LeaseState::Leased
        {
            self.release_late(lease.entry, port);
        }
        if let Some(held) = self.leases.get_mut(lease.entry as usize)
            && held.replayed
            && held.holder == slot
            && held.delivery_position == lease.delivery_position
        {
            // An extend comes before the record that ended the lease.
            if by == LeaseState::Leased {
                return;
            }
            if held.state == by {
                held.replayed = false;
                self.session_mut(slot)
                    .ends
                    .push_back((position, lease.entry));
                return;
            }
        }
        self.counters.leases_lost += 1;
        let delivery_position = lease.delivery_position;
        self.answer(
            slot,
            position,
            Answer::LeaseLost { delivery_position },
            port,
        );
    }

    /// Ends a live lease in every count but not what becomes of its message.
    #[inline]
    pub(super) fn end_lease(
        &mut self,
        entry: LeaseEntry,
        state: LeaseState,
        counted: bool,
        port: &mut impl Port,
    ) {
        let Lease {
            message,
            holder,
            attachment,
            ..
        } = self.leases[entry as usize];
        self.leases[entry as usize].state = state;
        if matches!(state, LeaseState::Acked | LeaseState::Nacked) {
            self.release_shown(entry, port);
        }
        if !matches!(state, LeaseState::Acked | LeaseState::Shown) {
            let history = self.messages[message].history.after_lease(counted);
            self.messages[message].history = history;
        }
        port.lease_state(entry, state, self.messages[message].history);
        if !matches!(state, LeaseState::Acked | LeaseState::Shown) {
            self.note_history(message, entry, port);
        }
        // What its holder still reads counts in its window.
        if self.leases[entry as usize].shown == Shown::No {
            self.session_mut(holder).attachments[attachment as usize].live -= 1;
        }
        let queue = self.messages[message].queue;
        let now_ns = self.now_ns;
        let entry = self.queue_mut(queue);
        entry.leased -= 1;
        entry.last_end_ns = now_ns;
        self.close_wanted |= self.pressed;
        self.make_runnable(queue);
    }

    /// Rows of earlier leases may outlast that of this one: a successor must
    /// find no history there that is shorter.
    pub(super) fn note_history(
        &mut self,
        message: MessageIndex,
        ended: LeaseEntry,
        port: &mut impl Port,
    ) {
        let Message {
            history, leases, ..
        } = self.messages[message];
        let mut entry = leases;
        while entry != NONE {
            let Lease { state, next, .. } = self.leases[entry as usize];
            if entry != ended {
                port.lease_state(entry, state, history);
            }
            entry = next;
        }
    }

    /// The message is finished with; a round will pass it.
    #[inline]
    pub(super) fn settle(&mut self, message: MessageIndex) {
        self.release_block(message);
        self.messages[message].state = State::Settled;
        let queue = self.messages[message].queue;
        self.queue_mut(queue).messages -= 1;
    }

    /// The message may be leased again now.
    pub(super) fn put_back(&mut self, message: MessageIndex) {
        let Message {
            queue,
            order,
            place,
            has_position,
            ..
        } = self.messages[message];
        if place == Place::Away {
            if !has_position {
                // The replay has yet to find its send, and then calls again.
                self.messages[message].state = State::Again;
                return;
            }
            self.queue_mut(queue).known.insert(order, message);
        }
        if self.is_dead(message) {
            return self.lay_out(message);
        }
        self.enlist(message, State::Again);
        self.make_runnable(queue);
    }

    /// All live leases of a session end.
    pub(super) fn return_leases(&mut self, slot: SessionSlot, port: &mut impl Port) {
        let mut held: Vec<(u64, LeaseEntry)> = (1..self.leases.len() as LeaseEntry)
            .filter(|&entry| {
                let lease = &self.leases[entry as usize];
                lease.state == LeaseState::Leased && lease.holder == slot
            })
            .map(|entry| (self.leases[entry as usize].delivery_position, entry))
            .collect();
        // In the order of delivery, so that they go out again in order.
        held.sort_unstable();
        for (delivery_position, entry) in held {
            let counted = port.taken(slot, delivery_position);
            self.give_back(entry, LeaseState::Returned, counted, port);
        }
    }

    /// A lease ends by no record.
    pub(super) fn give_back(
        &mut self,
        entry: LeaseEntry,
        state: LeaseState,
        counted: bool,
        port: &mut impl Port,
    ) {
        self.counters.returned += 1;
        let message = self.leases[entry as usize].message;
        self.end_lease(entry, state, counted, port);
        self.ends.push(entry);
        self.put_back(message);
    }

    /// Does what is due: leases past their deadline end, delayed messages come
    /// back. Call with the time set.
    pub fn run_timers(&mut self, port: &mut impl Port) {
        while let Some(&Reverse((due, message))) = self.delayed.peek() {
            if due > self.now_ns {
                break;
            }
            self.delayed.pop();
            self.put_back(message);
        }
        if self.now_ns >= self.next_expiry_ns {
            self.expire_leases(port);
        }
        if self.now_ns >= self.starved_until_ns {
            self.retry_starved();
        }
    }

    /// Looks at every lease. That is cheap because it is rare: the next look is
    /// when the earliest deadline of those that are left has come, and not
    /// within 10 ms.
    fn expire_leases(&mut self, port: &mut impl Port) {
        const LOOK_INTERVAL_NS: u64 = 10_000_000;
        let mut earliest = u64::MAX;
        let mut due = Vec::new();
        for entry in 1..self.leases.len() as LeaseEntry {
            let lease = &self.leases[entry as usize];
            if lease.state != LeaseState::Leased {
                continue;
            }
            if lease.deadline_ns <= self.now_ns {
                due.push((lease.deadline_ns, lease.delivery_position, entry));
            } else {
                earliest = earliest.min(lease.deadline_ns);
            }
        }
        due.sort_unstable();
        for (_, delivery_position, entry) in due {
            let holder = self.leases[entry as usize].holder;
            let counted = port.taken(holder, delivery_position);
            let silent = if counted { Silent::Busy } else { Silent::Stuck };
            let session = self.session_mut(holder);
            session.silent = session.silent.max(silent);
            self.give_back(entry, LeaseState::Expired, counted, port);
        }
        self.next_expiry_ns = earliest.max(self.now_ns + LOOK_INTERVAL_NS);
        if earliest == u64::MAX {
            self.next_expiry_ns = u64::MAX;
        }
    }

    /// When [`Hub::run_timers`] has something to do next, if ever.
    pub fn next_timer_ns(&self) -> Option<u64> {
        let delayed = self.delayed.peek().map(|Reverse((due, _))| *due);
        let next = self.next_expiry_ns.min(self.starved_until_ns);
        let next = next.min(delayed.unwrap_or(u64::MAX));
        (next != u64::MAX).then_some(next)
    }
}
