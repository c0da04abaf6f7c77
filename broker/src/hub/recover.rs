//! What a successor does: makes the hub again from the store, the ledger and the
//! rings.
//!
//! The order is: queues from the store, sessions and leases from the ledger, the
//! records that are not committed from the rings (by the ordinary calls of
//! intake), then [`Hub::finish_restore`]. A message that was leased before its
//! send was committed is known by its identity, *(session, position)*; its lease
//! waits in `orphans` for the replay to find the send.
//!
//! Every step may be repeated by the next successor: nothing is written here but
//! lease states that are true already.

use super::chunks::{ChunkIndex, Memory};
use super::message::{Message, MessageIndex, NONE, Place, State};
use super::port::{History, LeaseEntry, LeaseState, Port, SessionSlot, Shown};
use super::{FREE_LEASE, Hub, Lease};
use crate::store::{QueueNumber, StoredQueue};
use ringmain::control::Purpose;
use ringmain::record;
use ringmain_ring::layout::Geometry;
use ringmain_ring::payload::UNIT_BYTES;
use std::collections::HashMap;

/// A session as the ledger has it.
#[derive(Debug)]
pub struct RestoredSession {
    /// Its number.
    pub number: u64,
    /// The sizes of its rings.
    pub rings: Geometry,
    /// Bytes of its outbound segments.
    pub outbound_bytes: u64,
    /// Units of its inbound segments, by number.
    pub inbound: Vec<u32>,
    /// End of its committed records.
    pub committed: u64,
    /// End of its published answers.
    pub answer_tail: u64,
    /// Its attachments, by index.
    pub attachments: Vec<(QueueNumber, Purpose, u32)>,
}

/// An entry of the lease table as the ledger has it.
#[derive(Debug, Clone, Copy)]
pub struct LeaseRow {
    /// Its index.
    pub entry: LeaseEntry,
    /// How it stands.
    pub state: LeaseState,
    /// What the message had been through.
    pub history: History,
    /// The message's queue.
    pub queue: QueueNumber,
    /// Its position there plus one, or 0: valid if its send is committed.
    pub queue_position: u64,
    /// Session that sent it.
    pub session: u64,
    /// Position of its record.
    pub position: u64,
    /// Number of the session that holds it.
    pub holder: u64,
    /// Position of the delivery's record.
    pub delivery_position: u64,
    /// When the lease ends.
    pub deadline_ns: u64,
    /// What it shows its holder.
    pub shown: Shown,
}

impl Hub {
    /// A queue that lies in the store.
    pub fn restore_queue(&mut self, stored: StoredQueue) {
        let index = self.add_queue(stored.queue, stored.row, stored.next);
        let queue = self.queue_mut(index);
        queue.gap = stored.first..stored.next;
        queue.messages = stored.unsettled;
    }

    /// A session that outlived the broker.
    pub fn restore_session(&mut self, restored: &RestoredSession) -> SessionSlot {
        let slot = self.open_session(restored.number, restored.rings);
        let session = self.session_mut(slot);
        session.taken_in = restored.committed;
        session.frozen = restored.committed;
        session.committed = restored.committed;
        session.answer_tail = restored.answer_tail;
        session.memory = Memory::restored(restored.outbound_bytes, &restored.inbound);
        for &(number, purpose, window) in &restored.attachments {
            let queue = self.by_number.get(&number).copied().unwrap_or(NONE);
            self.add_attachment(slot, queue, purpose, window);
        }
        slot
    }

    /// Says of which of the session's attachments the queue is gone.
    pub fn report_deleted_queues(&self, slot: SessionSlot, port: &mut impl Port) {
        for (index, attachment) in self.session(slot).attachments.iter().enumerate() {
            if attachment.queue == NONE {
                port.queue_deleted(slot, index as u32);
            }
        }
    }

    /// The lease table, of `entries` entries, with those rows in use. Call when
    /// all queues and sessions are restored.
    pub fn restore_leases(&mut self, entries: u32, rows: &[LeaseRow], port: &mut impl Port) {
        self.leases.resize(entries.max(1) as usize, FREE_LEASE);
        let slots: HashMap<u64, SessionSlot> = self
            .sessions
            .iter()
            .enumerate()
            .filter_map(|(slot, session)| Some((session.as_ref()?.number, slot as SessionSlot)))
            .collect();
        let mut messages = Vec::new();
        for row in rows {
            if row.state == LeaseState::Shown {
                self.restore_shown(row, &slots, port);
                continue;
            }
            let message = self.message_of(row, &slots, port);
            let ended_by_record = matches!(row.state, LeaseState::Acked | LeaseState::Nacked);
            if message == NONE && row.shown != Shown::No && !ended_by_record {
                // Its message is gone, with its queue perhaps, and its holder reads on.
                port.lease_state(row.entry, LeaseState::Shown, History::default());
                self.restore_shown(row, &slots, port);
                continue;
            }
            self.restore_lease(row, message, &slots, port);
            if message != NONE {
                messages.push(message);
            }
        }
        messages.sort_unstable();
        messages.dedup();
        for message in messages {
            self.restore_state(message, port);
        }
        self.free_leases = (1..entries)
            .rev()
            .filter(|&entry| self.leases[entry as usize].state == LeaseState::Free)
            .collect();
    }

    /// The message that a row is about: one in the store, one whose send the
    /// replay will find, or none that is left.
    fn message_of(
        &mut self,
        row: &LeaseRow,
        slots: &HashMap<u64, SessionSlot>,
        port: &mut impl Port,
    ) -> MessageIndex {
        let Some(&queue) = self.by_number.get(&row.queue) else {
            return NONE;
        };
        let uncommitted = slots
            .get(&row.session)
            .is_some_and(|&slot| row.position >= self.session(slot).committed);
        if uncommitted {
            // The position is of a round that never was, and may be another
            // message's by the time that this one's send is committed.
            port.lease_position(row.entry, 0);
            let identity = (row.session, row.position);
            if let Some(&message) = self.orphans.get(&identity) {
                return message;
            }
            let message = self.new_orphan(queue, row);
            self.orphans.insert(identity, message);
            return message;
        }
        // Committed without a position: it was settled by then.
        let Some(position) = row.queue_position.checked_sub(1) else {
            return NONE;
        };
        match self.queue(queue).known.get(&position) {
            Some(&message) => message,
            None => {
                let message = self.new_stored(queue, position);
                self.messages[message].session = row.session;
                self.messages[message].position = row.position;
                self.queue_mut(queue).known.insert(position, message);
                message
            }
        }
    }

    fn new_orphan(&mut self, queue: u32, row: &LeaseRow) -> MessageIndex {
        self.messages.insert(Message {
            session: row.session,
            position: row.position,
            ..Message::unknown(queue)
        })
    }

    fn restore_lease(
        &mut self,
        row: &LeaseRow,
        message: MessageIndex,
        slots: &HashMap<u64, SessionSlot>,
        port: &mut impl Port,
    ) {
        let holder = slots.get(&row.holder).copied();
        let attachment = holder.and_then(|slot| self.consumer_attachment(slot, row.queue));
        let mut state = row.state;
        let mut history = row.history;
        if state == LeaseState::Leased && (message == NONE || attachment.is_none()) {
            // Its message or its holder is gone, committed in full.
            state = if message == NONE {
                LeaseState::Acked
            } else {
                LeaseState::Returned
            };
            history = history.after_lease(false);
            port.lease_state(row.entry, state, history);
        }
        let mut next = NONE;
        if message != NONE {
            let known = &mut self.messages[message];
            next = std::mem::replace(&mut known.leases, row.entry);
            let bits = known.history.bits().max(history.bits());
            known.history = History::from_bits(bits);
        }
        // The replay finds the record, and then the end is committed with it.
        let by_record = matches!(state, LeaseState::Acked | LeaseState::Nacked) && holder.is_some();
        self.leases[row.entry as usize] = Lease {
            message,
            holder: holder.unwrap_or(SessionSlot::MAX),
            attachment: attachment.unwrap_or(0),
            delivery_position: row.delivery_position,
            deadline_ns: row.deadline_ns,
            next,
            shown: Shown::No,
            chunk: NONE,
            state,
            end_done: false,
            replayed: by_record,
        };
        if !matches!(row.state, LeaseState::Acked | LeaseState::Nacked) {
            self.show_again(row, slots, port);
        }
        if state != LeaseState::Leased && !by_record {
            self.ends.push(row.entry);
        }
    }

    /// An entry that is kept for its reader alone.
    fn restore_shown(
        &mut self,
        row: &LeaseRow,
        slots: &HashMap<u64, SessionSlot>,
        port: &mut impl Port,
    ) {
        let holder = slots.get(&row.holder).copied();
        self.leases[row.entry as usize] = Lease {
            holder: holder.unwrap_or(SessionSlot::MAX),
            delivery_position: row.delivery_position,
            state: LeaseState::Shown,
            ..FREE_LEASE
        };
        self.show_again(row, slots, port);
        if self.leases[row.entry as usize].shown == Shown::No {
            self.leases[row.entry as usize] = FREE_LEASE;
            port.lease_state(row.entry, LeaseState::Free, History::default());
        }
    }

    /// The lease's holder may still read what it was shown. What can't be is
    /// forgotten: it is the holder's own loss.
    fn show_again(
        &mut self,
        row: &LeaseRow,
        slots: &HashMap<u64, SessionSlot>,
        port: &mut impl Port,
    ) {
        let Some(&holder) = slots.get(&row.holder) else {
            return;
        };
        let (shown, chunk) = match row.shown {
            Shown::No => return,
            inbound @ Shown::Inbound { .. } if self.reserve_inbound(holder, inbound) => {
                (inbound, NONE)
            }
            shown @ Shown::InPlace { .. } if slots.contains_key(&row.session) => (
                shown,
                self.show_in_place(slots[&row.session], shown, row.position),
            ),
            Shown::Inbound { .. } | Shown::InPlace { .. } => {
                return port.lease_unshown(row.entry);
            }
        };
        let lease = &mut self.leases[row.entry as usize];
        (lease.shown, lease.chunk) = (shown, chunk);
        let ended = lease.state != LeaseState::Leased;
        // Of a live lease, with that of its message.
        let attachment = lease.attachment as usize;
        let session = self.session_mut(holder);
        session.memory.reads += 1;
        if ended && let Some(held) = session.attachments.get_mut(attachment) {
            held.live += 1;
        }
    }

    fn show_in_place(&mut self, owner: SessionSlot, shown: Shown, position: u64) -> ChunkIndex {
        let (segment, unit, units) = match shown {
            Shown::InPlace {
                segment,
                unit,
                units,
            } => (segment, unit, units),
            Shown::Inbound { .. } | Shown::No => return NONE,
        };
        // The send says how long it is, if it is read again.
        let len = units.saturating_mul(UNIT_BYTES as u32);
        let at = record::Chunk { segment, unit, len };
        let chunk = self.chunks.hold(owner, at, position);
        self.show_chunk(chunk);
        // The lease's hold is that of `show_chunk`.
        self.unhold(chunk);
        chunk
    }

    fn consumer_attachment(&self, slot: SessionSlot, number: QueueNumber) -> Option<u32> {
        let &queue = self.by_number.get(&number)?;
        let attachments = &self.session(slot).attachments;
        let consumes = |a: &super::Attachment| a.queue == queue && a.purpose == Purpose::Consume;
        attachments
            .iter()
            .position(consumes)
            .map(|index| index as u32)
    }

    /// The state of a message follows from its leases: settled if one was acked,
    /// leased if one lives, else to be leased again.
    fn restore_state(&mut self, message: MessageIndex, port: &mut impl Port) {
        // Its predecessor may have died before it noted that everywhere.
        self.note_history(message, NONE, port);
        let mut live = None;
        let mut acked = false;
        let mut entry = self.messages[message].leases;
        while entry != NONE {
            let lease = &self.leases[entry as usize];
            acked |= lease.state == LeaseState::Acked;
            if lease.state == LeaseState::Leased {
                live = Some(*lease);
            }
            entry = lease.next;
        }
        let Message {
            queue, send_done, ..
        } = self.messages[message];
        // The store has counted what lies there, and nobody the rest.
        match (send_done, acked) {
            (true, true) => self.queue_mut(queue).messages -= 1,
            (false, false) => self.queue_mut(queue).messages += 1,
            _ => {}
        }
        if acked {
            return;
        }
        if let Some(lease) = live {
            self.messages[message].state = State::Leased;
            self.queue_mut(queue).leased += 1;
            let holder = self.session_mut(lease.holder);
            holder.attachments[lease.attachment as usize].live += 1;
            self.next_expiry_ns = self.next_expiry_ns.min(lease.deadline_ns);
        } else {
            self.put_back(message);
        }
    }

    /// The replay has found the send of a message that was leased.
    pub(super) fn adopt(
        &mut self,
        slot: SessionSlot,
        index: MessageIndex,
        order: u64,
        place: Place,
        send: &record::Send,
    ) {
        let message = &mut self.messages[index];
        message.order = order;
        message.place = place;
        message.len = send.place.len();
        message.sent_at_ms = send.sent_at_ms;
        let state = message.state;
        self.session_mut(slot).sends.push_back(index);
        self.note_chunk(index);
        if state == State::Again {
            self.put_back(index);
        }
    }

    /// The replay is done, but of these sessions, which are short of room for
    /// answers: their records up to there come later.
    pub fn finish_restore(&mut self, behind: &[(SessionSlot, u64)]) {
        for &(slot, end) in behind {
            self.session_mut(slot).replay_until = end;
        }
        let is_behind = |slot| behind.iter().any(|&(other, _)| other == slot);
        self.end_replays(|lease| !is_behind(lease.holder));
        self.close_wanted = true;
    }

    /// All records that a predecessor may have taken in were taken in.
    pub(super) fn finish_replay(&mut self, slot: SessionSlot) {
        if std::mem::take(&mut self.session_mut(slot).replay_until) > 0 {
            self.end_replays(|lease| lease.holder == slot);
        }
    }

    /// From now on an answer to an ended lease is too late. The ends that the
    /// predecessor left go into the next round, also those whose records did not
    /// come: they are committed, or the queue was deleted.
    fn end_replays(&mut self, of: impl Fn(&Lease) -> bool) {
        for (entry, lease) in self.leases.iter_mut().enumerate() {
            if lease.replayed && of(lease) {
                lease.replayed = false;
                self.ends.push(entry as LeaseEntry);
            }
        }
    }

    /// All records of the session were taken in. Leases of sends that were not
    /// among them can only be there if its client has damaged its ring.
    pub(super) fn drop_orphans(&mut self, session: u64, port: &mut impl Port) {
        if self.orphans.is_empty() {
            return;
        }
        let mut lost = Vec::new();
        self.orphans.retain(|&(sender, _), &mut message| {
            if sender == session {
                lost.push(message);
            }
            sender != session
        });
        for message in lost {
            self.drop_orphan(message, port);
        }
    }

    fn drop_orphan(&mut self, message: MessageIndex, port: &mut impl Port) {
        let mut entry = self.messages[message].leases;
        while entry != NONE {
            let lease = self.leases[entry as usize];
            if lease.state == LeaseState::Leased {
                // Its holder reads on: the loss is the sender's alone.
                self.settle_deleted(entry, lease, port);
            } else if lease.end_done {
                // It waited for the send.
                self.ends.push(entry);
            }
            entry = lease.next;
        }
        if self.messages[message].state != State::Settled {
            self.delayed.retain(|delayed| delayed.0.1 != message);
            self.settle(message);
        }
        // Its entries, and with them itself, go with the next rounds.
        self.messages[message].send_done = true;
        self.remove_if_done(message);
    }
}
