//! Deliveries: which message goes to whom, and when.

use super::chunks::{Chunk, ChunkIndex};
use super::message::{Message, MessageIndex, NONE, Place, State};
use super::moves::Diverted;
use super::port::{Delivery, History, LeaseEntry, LeaseState, Payload, Port, SessionSlot, Shown};
use super::{Attachment, Hub, Lease, Silent};
use crate::store::block::PART_BYTES;
use crate::store::{LoadedBlock, QueueNumber};
use ringmain::record;
use ringmain_ring::payload::units_for;

/// Deliveries of one queue before another gets its turn.
const TURN: u32 = 256;

/// With less than this in memory, more is read.
const READ_AHEAD_BYTES: usize = 128 * 1024;

/// A payload up to this length is copied from a client's chunk within a pass, a
/// longer one beside the service.
const COPIED_AT_ONCE: u32 = 256 * 1024;

/// How a payload gets to its consumer.
#[derive(Debug, Clone, Copy)]
pub(super) enum Way {
    /// In the delivery's record.
    Record,
    /// Read where it is.
    InPlace(ChunkIndex),
    /// Copied into this inbound chunk.
    Copied(Shown),
    /// It was copied there before.
    Filled(Shown),
}

impl Way {
    /// The inbound chunk that was allocated for it.
    fn shown(self) -> Shown {
        match self {
            Way::Record | Way::InPlace(_) => Shown::No,
            Way::Copied(into) | Way::Filled(into) => into,
        }
    }
}

/// What can be done for a delivery.
enum Route {
    /// It can be made.
    Now(Way),
    /// Its payload must be copied into this inbound chunk first, from this
    /// outbound one or from the store.
    Fill(Shown, ChunkIndex),
    /// There is no memory for this consumer.
    Starved,
    /// Something must happen first.
    Later,
}

fn in_place(at: record::Chunk) -> Shown {
    Shown::InPlace {
        segment: at.segment,
        unit: at.unit,
        units: units_for(u64::from(at.len)).unwrap_or_default(),
    }
}

/// How a queue's turn ended.
#[derive(PartialEq, Eq)]
enum Turn {
    /// There may be more to deliver at once.
    Over,
    /// Nothing more until something happens: a message, room, an ack, a read.
    Waits,
}

impl Hub {
    /// Delivers what can be delivered, at most one turn for each queue. Returns
    /// whether there may be more.
    pub fn dispatch(&mut self, port: &mut impl Port) -> bool {
        for _ in 0..self.runnable.len() {
            let Some(queue) = self.runnable.pop_front() else {
                break;
            };
            // A queue that was deleted meanwhile is gone from its place.
            let Some(entry) = self.queues[queue as usize].as_mut() else {
                continue;
            };
            entry.runnable = false;
            if self.run_queue(queue, port) == Turn::Over {
                self.make_runnable(queue);
            }
        }
        !self.runnable.is_empty()
    }

    fn run_queue(&mut self, queue: u32, port: &mut impl Port) -> Turn {
        for _ in 0..TURN {
            let Some(message) = self.next_message(queue, port) else {
                self.nothing_to_divert(queue);
                return Turn::Waits;
            };
            match self.divert(queue, message) {
                Diverted::No => {}
                Diverted::Yes => continue,
                Diverted::Later => return Turn::Waits,
            }
            let Some((slot, attachment)) = self.choose_consumer(queue) else {
                return Turn::Waits;
            };
            let way = match self.way(message, slot, port) {
                Route::Now(way) => way,
                Route::Fill(into, from) => {
                    self.start_fill(message, slot, attachment, (into, from), port);
                    return Turn::Waits;
                }
                // Another consumer may have memory.
                Route::Starved => continue,
                Route::Later => return Turn::Waits,
            };
            let Some(entry) = self.take_lease_entry(port) else {
                self.free_inbound(slot, way.shown());
                return Turn::Waits;
            };
            if !self.deliver(message, slot, attachment, entry, way, port) {
                // The ring is full; another consumer may have room.
                self.free_leases.push(entry);
                self.free_inbound(slot, way.shown());
                self.block(slot);
            }
        }
        Turn::Over
    }

    /// The session's delivery ring has no room.
    pub(super) fn block(&mut self, slot: SessionSlot) {
        self.session_mut(slot).blocked = true;
        self.newly_blocked.push(slot);
    }

    /// How the message's payload can get to the consumer.
    fn way(&mut self, index: MessageIndex, slot: SessionSlot, port: &mut impl Port) -> Route {
        let Message {
            place, len, queue, ..
        } = self.messages[index];
        let from = match place {
            Place::Ring { .. } | Place::Block { .. } => {
                if len <= self.session(slot).inline_max {
                    return Route::Now(Way::Record);
                }
                NONE
            }
            Place::Chunk { chunk } => {
                let Chunk {
                    slot: owner, at, ..
                } = self.chunks[chunk];
                if port.can_read(slot, owner, at.segment) {
                    if self.session(owner).memory.may_show(at.len) {
                        return Route::Now(Way::InPlace(chunk));
                    }
                    // Consumers are at work on what is shown; if they are not, the
                    // message is soon stored, and comes from there.
                    self.share_waiters.push(queue);
                    return Route::Later;
                }
                chunk
            }
            Place::Away => return Route::Later,
        };
        let Some(into) = self.allocate_inbound(slot, len, port) else {
            return Route::Starved;
        };
        let in_parts = len as usize > PART_BYTES && matches!(place, Place::Block { .. });
        if in_parts || (from != NONE && len > COPIED_AT_ONCE) {
            return Route::Fill(into, from);
        }
        Route::Now(Way::Copied(into))
    }

    /// The message to be delivered next, still in its list. Asks for a read if
    /// what comes next is in the store.
    fn next_message(&mut self, index: u32, port: &mut impl Port) -> Option<MessageIndex> {
        let queue = self.queues[index as usize].as_mut()?;
        if queue.filling.is_some() {
            return None;
        }
        let away = |index: &MessageIndex| self.messages[*index].place == Place::Away;
        let again = queue.dying.first().or(queue.again.first());
        if again.is_some() && !again.as_ref().is_some_and(away) {
            return again;
        }
        let from = match again {
            Some(message) => Some(self.messages[message].order),
            None if queue.gap.is_empty() || queue.cached_bytes >= READ_AHEAD_BYTES => None,
            None => Some(queue.gap.start),
        };
        if let Some(from) = from {
            queue.ask_for(from, port);
        }
        // Returned messages go before newer ones, and so does the wait for a
        // payload that is on its way.
        match again {
            Some(_) => None,
            None => queue.ready.first(),
        }
    }

    /// The consumer with the fewest leases among those with room, and that are
    /// heard of.
    fn choose_consumer(&self, queue: u32) -> Option<(SessionSlot, u32)> {
        let mut best = None;
        let mut least = (Silent::Stuck, 0);
        for &(slot, index) in &self.queue(queue).consumers {
            let session = self.session(slot);
            let Attachment { window, live, .. } = session.attachments[index as usize];
            let load = (session.silent, live);
            let has_room = !session.blocked && !session.memory.is_starved();
            if live < window && load < least && has_room {
                least = load;
                best = Some((slot, index));
            }
        }
        best
    }

    pub(super) fn take_lease_entry(&mut self, port: &mut impl Port) -> Option<LeaseEntry> {
        if self.free_leases.is_empty() {
            let Some(entries) = port.grow_leases() else {
                // Entries come back with the next round.
                self.leases_short = true;
                self.close_wanted = true;
                return None;
            };
            let first_new = self.leases.len() as LeaseEntry;
            self.leases.resize(entries as usize, super::FREE_LEASE);
            // Lowest last, so that it is used first.
            self.free_leases.extend((first_new..entries).rev());
        }
        self.free_leases.pop()
    }

    /// Leases the message to a consumer. False if its ring has no room.
    pub(super) fn deliver(
        &mut self,
        index: MessageIndex,
        slot: SessionSlot,
        attachment: u32,
        entry: LeaseEntry,
        way: Way,
        port: &mut impl Port,
    ) -> bool {
        let message = &self.messages[index];
        let Some(queue) = self.queues[message.queue as usize].as_mut() else {
            return false;
        };
        let deadline_ns = self.now_ns + queue.row.settings.visibility_timeout_ms * 1_000_000;
        let payload = match message.place {
            _ if matches!(way, Way::Filled(_)) => Payload::Filled,
            Place::Chunk { chunk } => {
                let Chunk { slot, at, .. } = self.chunks[chunk];
                Payload::Chunk { slot, at }
            }
            Place::Ring { slot, offset } => Payload::Ring {
                slot,
                offset,
                len: message.len,
            },
            Place::Block { block, index } => match &self.blocks[block as usize] {
                Some(cached) => Payload::Block(cached.block.payload(index)),
                None => return false,
            },
            Place::Away => return false,
        };
        let (shown, chunk) = match way {
            Way::Record => (Shown::No, NONE),
            Way::Copied(into) | Way::Filled(into) => (into, NONE),
            Way::InPlace(chunk) => (in_place(self.chunks[chunk].at), chunk),
        };
        let session = self.sessions[slot as usize].as_mut();
        let session = session.expect("consumers are sessions that are open");
        let delivered = port.deliver(&Delivery {
            to: slot,
            holder: session.number,
            attachment,
            entry,
            deadline_ns,
            queue: queue.number,
            queue_position: message.queue_position(),
            session: message.session,
            position: message.position,
            sent_at_ms: message.sent_at_ms,
            history: message.history,
            len: message.len,
            payload,
            shown,
        });
        let Some(delivery_position) = delivered else {
            return false;
        };
        self.counters.deliveries += 1;
        self.counters.redeliveries += u64::from(message.history.was_leased());
        queue.leased += 1;
        queue.deliveries += 1;
        session.attachments[attachment as usize].live += 1;
        session.memory.reads += u32::from(shown != Shown::No);
        self.next_expiry_ns = self.next_expiry_ns.min(deadline_ns);
        self.leases[entry as usize] = Lease {
            message: index,
            holder: slot,
            attachment,
            delivery_position,
            deadline_ns,
            next: message.leases,
            shown,
            chunk,
            state: LeaseState::Leased,
            end_done: false,
            replayed: false,
        };
        self.unlist_first(index);
        self.messages[index].leases = entry;
        self.messages[index].state = State::Leased;
        self.release_block(index);
        if chunk != NONE {
            self.show_chunk(chunk);
        }
        true
    }

    /// Blocks that [`Port::read`] asked for, from position `from` on.
    pub fn loaded(&mut self, number: QueueNumber, from: u64, blocks: &[LoadedBlock]) {
        let Some(&queue) = self.by_number.get(&number) else {
            return;
        };
        let Some(end) = self.queue_mut(queue).reading.take() else {
            return;
        };
        // Only a read that began at the gap's start says what comes next; one
        // for a returned message may have begun further on.
        let contiguous = from <= self.queue(queue).gap.start;
        let mut at = from;
        for loaded in blocks {
            self.skip_settled(queue, at..loaded.first, contiguous);
            self.take_block(queue, loaded, contiguous);
            at = loaded.first + u64::from(loaded.block.len());
        }
        if blocks.is_empty() {
            self.skip_settled(queue, from..end, contiguous);
        }
        let entry = self.queue_mut(queue);
        if !entry.is_behind() {
            // The gap is closed: what came later comes next.
            let later = std::mem::take(&mut entry.later);
            for message in later.iter(&self.messages).collect::<Vec<_>>() {
                self.messages[message].state = State::Ready;
            }
            let entry = self.queues[queue as usize].as_mut();
            let entry = entry.expect("looked up above");
            entry.ready.append(&mut self.messages, later);
        }
        self.make_runnable(queue);
    }

    /// The store has no unsettled message in this range: the gap has none there,
    /// and returned messages there were settled before a crash.
    fn skip_settled(&mut self, queue: u32, range: std::ops::Range<u64>, contiguous: bool) {
        if range.is_empty() {
            return;
        }
        let entry = self.queue_mut(queue);
        if contiguous {
            entry.gap.start = entry.gap.start.max(range.end.min(entry.gap.end));
        }
        let passed = entry.gap.start;
        let found = entry.known.range(range);
        for (position, message) in found.map(|(&p, &m)| (p, m)).collect::<Vec<_>>() {
            if position < passed {
                self.queue_mut(queue).known.remove(&position);
            }
            self.drop_if_settled_before(message);
        }
    }

    fn take_block(&mut self, queue: u32, loaded: &LoadedBlock, contiguous: bool) {
        let block = self.use_block(&loaded.block);
        for index in 0..loaded.block.len() {
            let position = loaded.first + u64::from(index);
            let settled = loaded.is_settled(index);
            let entry = self.queue_mut(queue);
            let in_gap = entry.gap.contains(&position);
            if let Some(&message) = entry.known.get(&position) {
                // It stays known until the gap has passed it, or it is done with.
                if contiguous && in_gap {
                    entry.known.remove(&position);
                }
                self.fill_known(message, block, loaded, index);
            } else if !settled && in_gap && contiguous {
                let message = self.new_stored(queue, position);
                self.set_from_block(message, block, loaded, index);
                self.messages[message].history = History::from_bits(loaded.attempts(index));
                self.enlist(message, State::Ready);
            }
        }
        if contiguous {
            let end = loaded.first + u64::from(loaded.block.len());
            let gap = &mut self.queue_mut(queue).gap;
            gap.start = gap.start.max(end.min(gap.end));
        }
        self.forget_unused_block(block);
    }

    /// The block has a message that is in memory already: if that waits for its
    /// payload, here it is.
    fn fill_known(&mut self, message: MessageIndex, block: u32, loaded: &LoadedBlock, index: u32) {
        if message == NONE {
            return;
        }
        if loaded.is_settled(index) {
            self.drop_if_settled_before(message);
            return;
        }
        let Message { state, place, .. } = self.messages[message];
        if matches!(state, State::Again | State::Dying) && place == Place::Away {
            self.set_from_block(message, block, loaded, index);
        }
    }

    /// A message that lies in the store: committed, with its position.
    pub(super) fn new_stored(&mut self, queue: u32, position: u64) -> MessageIndex {
        self.messages.insert(Message {
            order: position,
            send_done: true,
            has_position: true,
            ..Message::unknown(queue)
        })
    }

    fn set_from_block(
        &mut self,
        message: MessageIndex,
        block: u32,
        loaded: &LoadedBlock,
        index: u32,
    ) {
        let head = loaded.block.message(index);
        let target = &mut self.messages[message];
        target.session = head.session;
        target.position = head.position;
        target.sent_at_ms = head.sent_at_ms;
        target.len = loaded.block.payload_len(index) as u32;
        self.put_in_block(message, block, index);
    }

    /// A message that a predecessor's ledger had as returned, and the store as
    /// settled: the later word counts.
    fn drop_if_settled_before(&mut self, message: MessageIndex) {
        if message == NONE {
            return;
        }
        let Message { state, place, .. } = self.messages[message];
        // One that has its payload is not waiting for it. (Not to be found all
        // the same: its queue is being deleted.)
        if !matches!(state, State::Again | State::Dying) || place != Place::Away {
            return;
        }
        let queue = self.messages[message].queue;
        let entry = self.queues[queue as usize].as_mut();
        let Some(list) = entry.and_then(|entry| entry.list_of(state)) else {
            return;
        };
        let mut kept = super::List::default();
        while let Some(other) = list.pop_front(&mut self.messages) {
            if other != message {
                kept.push_back(&mut self.messages, other);
            }
        }
        *list = kept;
        self.messages[message].state = State::Settled;
        self.remove_if_done(message);
    }
}
