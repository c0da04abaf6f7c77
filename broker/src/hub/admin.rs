//! Queues: made, deleted and looked at. A change takes effect, and is answered,
//! when the round that has it is committed.

use super::message::{MessageIndex, NONE, State};
use super::port::{LeaseEntry, LeaseState, Port, SessionSlot, Shown};
use super::{Attachment, Hub, Lease};
use crate::store::{QueueNumber, QueueRow, Write};
use ringmain::control::{self, Purpose, QueueInfo};
use ringmain::{Error, QueueSettings};

/// Names a request, so that its answer finds back.
pub type Ticket = u64;
/// What became of a change.
pub type AdminReply = Result<(), Error>;

#[derive(Debug)]
enum Change {
    Create { number: QueueNumber, row: QueueRow },
    Delete { queue: u32, number: QueueNumber },
    ReserveSessions { below: u64 },
}

/// A change, and who waits for it.
#[derive(Debug)]
struct Op {
    change: Change,
    tickets: Vec<Ticket>,
}

#[derive(Debug)]
pub(super) struct Admin {
    next_queue: QueueNumber,
    /// For the next round.
    pending: Vec<Op>,
    /// In the round that is being written.
    in_flight: Vec<Op>,
}

impl Admin {
    pub fn new(next_queue: QueueNumber) -> Admin {
        Admin {
            next_queue,
            pending: Vec::new(),
            in_flight: Vec::new(),
        }
    }

    pub fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// The pending changes go into the round.
    pub fn freeze(&mut self) -> Vec<Write> {
        self.in_flight = std::mem::take(&mut self.pending);
        let write = |op: &Op| match &op.change {
            Change::Create { number, row } => Write::PutQueue {
                queue: *number,
                row: row.clone(),
            },
            Change::Delete { number, .. } => Write::DeleteQueue { queue: *number },
            Change::ReserveSessions { below } => Write::ReserveSessions { below: *below },
        };
        self.in_flight.iter().map(write).collect()
    }

    /// Whether the queue is gone from the store, and still here.
    #[cfg(test)]
    pub fn is_deleting(&self, number: QueueNumber) -> bool {
        let deletes =
            |op: &Op| matches!(op.change, Change::Delete { number: n, .. } if n == number);
        self.in_flight.iter().any(deletes)
    }

    fn find_creation(&mut self, name: &str) -> Option<&mut Op> {
        self.find(|change| matches!(change, Change::Create { row, .. } if row.name == name))
    }

    fn find(&mut self, wanted: impl Fn(&Change) -> bool) -> Option<&mut Op> {
        let ops = self.in_flight.iter_mut().chain(&mut self.pending);
        ops.into_iter().find(|op| wanted(&op.change))
    }
}

impl Hub {
    fn change(&mut self, change: Change, tickets: Vec<Ticket>) {
        self.admin.pending.push(Op { change, tickets });
        self.close_wanted = true;
    }

    /// Makes a queue. `Some` is the answer at once; `None`: the ticket is
    /// answered when the change is committed.
    pub fn create_queue(
        &mut self,
        name: &str,
        settings: QueueSettings,
        created_ms: u64,
        ticket: Ticket,
    ) -> Option<AdminReply> {
        if let Err(error) = control::check_queue_name(name).and(control::check_settings(&settings))
        {
            return Some(Err(error));
        }
        if settings.dead_letter_queue.as_deref() == Some(name) {
            return Some(Err(Error::Invalid(format!(
                "{name} can't be its own dead-letter queue"
            ))));
        }
        let same = |row: &QueueRow| match row.settings == settings {
            true => Ok(()),
            false => Err(Error::QueueExists(format!("{name}, with other settings"))),
        };
        if let Some(&queue) = self.by_name.get(name) {
            return Some(same(&self.queue(queue).row));
        }
        if let Some(op) = self.admin.find_creation(name) {
            if let Change::Create { row, .. } = &op.change
                && let Err(error) = same(row)
            {
                return Some(Err(error));
            }
            op.tickets.push(ticket);
            return None;
        }
        // Creations under way are not counted: a few more are no harm.
        if self.by_name.len() >= self.limits.queues_max {
            return Some(Err(Error::Full(format!(
                "there are {} queues already: delete some",
                self.by_name.len()
            ))));
        }
        let row = QueueRow {
            name: name.to_owned(),
            settings,
            created_ms,
        };
        self.add_creation(row, vec![ticket]);
        None
    }

    fn add_creation(&mut self, row: QueueRow, tickets: Vec<Ticket>) {
        let number = self.admin.next_queue;
        self.admin.next_queue += 1;
        self.change(Change::Create { number, row }, tickets);
    }

    /// Makes a queue that is needed, if it is not there or being made.
    pub(super) fn need_queue(&mut self, row: QueueRow) {
        if self.admin.find_creation(&row.name).is_none() {
            self.add_creation(row, Vec::new());
        }
    }

    /// Deletes a queue with all its messages. Answered as
    /// [`Hub::create_queue`].
    pub fn delete_queue(&mut self, name: &str, ticket: Ticket) -> Option<AdminReply> {
        let Some(&queue) = self.by_name.get(name) else {
            return Some(Err(Error::NoSuchQueue(name.to_owned())));
        };
        let number = self.queue(queue).number;
        let wanted =
            |change: &Change| matches!(change, Change::Delete { number: n, .. } if *n == number);
        match self.admin.find(wanted) {
            Some(op) => op.tickets.push(ticket),
            None => self.change(Change::Delete { queue, number }, vec![ticket]),
        }
        None
    }

    /// Has the store note that session numbers below this may be given out.
    /// `ticket` is answered when it is committed.
    pub fn reserve_sessions(&mut self, below: u64, ticket: Ticket) {
        self.change(Change::ReserveSessions { below }, vec![ticket]);
    }

    /// The round's changes take effect.
    pub(super) fn finish_admin(&mut self, port: &mut impl Port) -> Vec<(Ticket, AdminReply)> {
        let mut replies = Vec::new();
        for Op { change, tickets } in std::mem::take(&mut self.admin.in_flight) {
            match change {
                Change::Create { number, row } => {
                    self.add_queue(number, row, 0);
                }
                Change::Delete { queue, .. } => self.drop_queue(queue, port),
                Change::ReserveSessions { .. } => {}
            }
            replies.extend(tickets.into_iter().map(|ticket| (ticket, Ok(()))));
        }
        replies
    }

    /// The queue is deleted in the store: forgets it and all its messages.
    fn drop_queue(&mut self, index: u32, port: &mut impl Port) {
        for entry in 1..self.leases.len() as LeaseEntry {
            let lease = self.leases[entry as usize];
            if lease.state == LeaseState::Leased && self.messages[lease.message].queue == index {
                self.settle_deleted(entry, lease, port);
            }
        }
        self.forget_moves(index);
        let messages = &self.messages;
        self.delayed
            .retain(|delayed| messages[delayed.0.1].queue != index);
        for message in self.messages.of_queue(index) {
            self.purge(message);
        }
        for slot in 0..self.sessions.len() as SessionSlot {
            self.lose_queue(slot, index, port);
        }
        if let Some(queue) = self.queues[index as usize].take() {
            self.by_name.remove(&queue.row.name);
            self.by_number.remove(&queue.number);
            self.abandon_redrive(queue);
        }
    }

    /// A live lease of a deleted queue's message ends. Its holder may go on reading
    /// what it was shown.
    pub(super) fn settle_deleted(&mut self, entry: LeaseEntry, lease: Lease, port: &mut impl Port) {
        if lease.shown == Shown::No {
            self.end_lease(entry, LeaseState::Acked, false, port);
            self.ends.push(entry);
        } else {
            self.end_lease(entry, LeaseState::Shown, false, port);
            self.unchain(lease.message, entry);
            self.leases[entry as usize].message = NONE;
        }
        self.settle(lease.message);
    }

    /// Makes a message of a deleted queue one that is settled and of no queue.
    /// Its send, if it is not committed, is passed by a round as any settled one.
    fn purge(&mut self, index: MessageIndex) {
        self.release_block(index);
        self.messages[index].state = State::Settled;
        self.messages[index].queue = NONE;
        self.remove_if_done(index);
    }

    fn lose_queue(&mut self, slot: SessionSlot, queue: u32, port: &mut impl Port) {
        let Some(session) = self.sessions[slot as usize].as_mut() else {
            return;
        };
        for (attachment, held) in session.attachments.iter_mut().enumerate() {
            if held.queue == queue {
                held.queue = NONE;
                port.queue_deleted(slot, attachment as u32);
            }
        }
    }

    /// Attaches a session to a queue; once more gives it another window. Gives
    /// the attachment's index and the queue's number and settings.
    pub fn attach(
        &mut self,
        slot: SessionSlot,
        name: &str,
        purpose: Purpose,
        window: u32,
    ) -> Result<(u32, QueueNumber, QueueSettings), Error> {
        let Some(&queue) = self.by_name.get(name) else {
            return Err(Error::NoSuchQueue(name.to_owned()));
        };
        if purpose == Purpose::Consume && !(1..=control::WINDOW_MAX).contains(&window) {
            return Err(Error::Invalid(format!(
                "a window of {window} messages: it must be from 1 to {}",
                control::WINDOW_MAX
            )));
        }
        let entry = self.queue(queue);
        let (number, settings) = (entry.number, entry.row.settings.clone());
        let held = &self.session(slot).attachments;
        let same = |a: &Attachment| a.queue == queue && a.purpose == purpose;
        if let Some(index) = held.iter().position(same) {
            self.session_mut(slot).attachments[index].window = window;
            self.offer_messages(slot);
            return Ok((index as u32, number, settings));
        }
        if held.len() == ringmain_ring::layout::ATTACHMENTS_MAX {
            return Err(Error::Full(format!(
                "the session is attached to {} queues already",
                held.len()
            )));
        }
        let index = self.add_attachment(slot, queue, purpose, window);
        Ok((index, number, settings))
    }

    pub(super) fn add_attachment(
        &mut self,
        slot: SessionSlot,
        queue: u32,
        purpose: Purpose,
        window: u32,
    ) -> u32 {
        let attachments = &mut self.session_mut(slot).attachments;
        let index = attachments.len() as u32;
        attachments.push(Attachment {
            queue,
            purpose,
            window,
            live: 0,
        });
        if queue == NONE {
            return index;
        }
        match purpose {
            Purpose::Produce => self.queue_mut(queue).producers += 1,
            Purpose::Consume => {
                self.queue_mut(queue).consumers.push((slot, index));
                self.make_runnable(queue);
            }
        }
        index
    }

    /// What is known of a queue.
    pub fn queue_info(&self, name: &str) -> Result<QueueInfo, Error> {
        match self.by_name.get(name) {
            Some(&queue) => Ok(self.info(queue)),
            None => Err(Error::NoSuchQueue(name.to_owned())),
        }
    }

    /// The number of a queue.
    pub fn queue_number(&self, name: &str) -> Result<QueueNumber, Error> {
        match self.by_name.get(name) {
            Some(&queue) => Ok(self.queue(queue).number),
            None => Err(Error::NoSuchQueue(name.to_owned())),
        }
    }

    /// Every queue, by name.
    pub fn queue_list(&self) -> Vec<QueueInfo> {
        let mut queues: Vec<QueueInfo> = self
            .by_name
            .values()
            .map(|&queue| self.info(queue))
            .collect();
        queues.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        queues
    }

    fn info(&self, index: u32) -> QueueInfo {
        let queue = self.queue(index);
        QueueInfo {
            name: queue.row.name.clone(),
            created_ms: queue.row.created_ms,
            messages: queue.messages,
            leased: queue.leased,
            producers: queue.producers,
            consumers: queue.consumers.len() as u32,
            settings: queue.row.settings.clone(),
        }
    }

    /// Queues, messages that are not settled, and live leases, in all.
    pub fn totals(&self) -> (u64, u64, u64) {
        let queues = || self.queues.iter().flatten();
        (
            queues().count() as u64,
            queues().map(|queue| queue.messages).sum(),
            queues().map(|queue| queue.leased).sum(),
        )
    }
}
