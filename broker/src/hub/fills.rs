//! Payloads that are copied into a consumer's inbound chunk before they are
//! delivered: beside the service, since they are long or must be read from the
//! store. What comes later in the queue waits meanwhile (I2).

use super::Hub;
use super::chunks::ChunkIndex;
use super::dispatch::Way;
use super::message::{Message, MessageIndex, NONE, State};
use super::port::{Fill, Port, SessionSlot, Shown};
use ringmain::record;

/// A copy under way.
#[derive(Debug)]
pub(super) struct Filling {
    ticket: u64,
    queue: u32,
    message: MessageIndex,
    /// Session and position of the message: its index may be another's by then.
    identity: (u64, u64),
    slot: SessionSlot,
    /// Number of the consumer's session: its slot may be another's by then.
    holder: u64,
    attachment: u32,
    into: Shown,
    /// The outbound chunk that is copied, if it is one.
    from: ChunkIndex,
}

impl Hub {
    /// Has the payload copied into the inbound chunk `into`, to be delivered then.
    pub(super) fn start_fill(
        &mut self,
        index: MessageIndex,
        slot: SessionSlot,
        attachment: u32,
        (into, from): (Shown, ChunkIndex),
        port: &mut impl Port,
    ) {
        let ticket = self.next_fill;
        self.next_fill += 1;
        let Message {
            queue,
            session,
            position,
            len,
            ..
        } = self.messages[index];
        if from != NONE {
            self.show_chunk(from);
        }
        self.queue_mut(queue).filling = Some(ticket);
        self.fills.push(Filling {
            ticket,
            queue,
            message: index,
            identity: (session, position),
            slot,
            holder: self.session(slot).number,
            attachment,
            into,
            from,
        });
        let source = (from != NONE).then(|| (self.chunks[from].slot, self.chunks[from].at));
        if let Some(into) = chunk_of(into, len) {
            port.fill(Fill {
                ticket,
                to: slot,
                into,
                message: (session, position),
                from: source,
            });
        }
    }

    /// A copy that [`Port::fill`] asked for is done.
    pub fn filled(&mut self, ticket: u64, port: &mut impl Port) {
        let Some(at) = self.fills.iter().position(|fill| fill.ticket == ticket) else {
            return;
        };
        let fill = self.fills.swap_remove(at);
        if fill.from != NONE {
            self.unshow_chunk(fill.from, port);
        }
        let waits = self.queues.get_mut(fill.queue as usize);
        let waits = waits.and_then(Option::as_mut).is_some_and(|queue| {
            let waits = queue.filling == Some(ticket);
            if waits {
                queue.filling = None;
            }
            waits
        });
        let holder = self.sessions.get(fill.slot as usize);
        let there = holder
            .and_then(Option::as_ref)
            .is_some_and(|session| session.number == fill.holder);
        let delivered = waits && there && self.deliver_filled(&fill, port);
        if there && !delivered {
            self.free_inbound(fill.slot, fill.into);
        }
        if waits {
            self.make_runnable(fill.queue);
        }
    }

    /// The copy could not be made. Returns whether the message is still wanted: if
    /// not, its payload may be gone with its queue.
    pub fn fill_failed(&mut self, ticket: u64, port: &mut impl Port) -> bool {
        let wanted = self.queues.iter().flatten();
        let wanted = wanted.filter(|queue| queue.filling == Some(ticket)).count() > 0;
        if !wanted {
            self.filled(ticket, port);
        }
        wanted
    }

    /// Delivers the message, if it is still what comes next and its consumer can
    /// still take it.
    fn deliver_filled(&mut self, fill: &Filling, port: &mut impl Port) -> bool {
        let message = &self.messages[fill.message];
        let queue = self.queue(fill.queue);
        let first = match message.state {
            State::Ready => queue.ready.first(),
            State::Again => queue.again.first(),
            _ => None,
        };
        let same = (message.session, message.position) == fill.identity
            && message.queue == fill.queue
            && first == Some(fill.message);
        let session = self.session(fill.slot);
        let held = session.attachments[fill.attachment as usize];
        let takes = !session.ended && held.queue == fill.queue && held.live < held.window;
        if !same || !takes {
            return false;
        }
        let Some(entry) = self.take_lease_entry(port) else {
            return false;
        };
        let way = Way::Filled(fill.into);
        let delivered = self.deliver(fill.message, fill.slot, fill.attachment, entry, way, port);
        if !delivered {
            self.free_leases.push(entry);
            self.block(fill.slot);
        }
        delivered
    }
}

/// The chunk as a record names it.
pub(super) fn chunk_of(shown: Shown, len: u32) -> Option<record::Chunk> {
    match shown {
        Shown::No => None,
        Shown::InPlace { segment, unit, .. } | Shown::Inbound { segment, unit, .. } => {
            Some(record::Chunk { segment, unit, len })
        }
    }
}
