//! Messages that go from one queue to another: dead ones to the dead-letter
//! queue, and back by a redrive.
//!
//! A move is one round's work: the message is stored in the target and settled
//! in its source by one batch, so that it is in exactly one of them whenever the
//! broker dies. What is to be moved is therefore stored first, and found in a
//! block that was read or written by this hub: nothing is moved on the word of a
//! predecessor's ledger, which may be older than the store.
//!
//! In the target the message is one that is in the store alone (part of its gap),
//! and comes up in the order of positions as any other.

use super::message::{MessageIndex, Place, State};
use super::port::{History, Port};
use super::round::InFlight;
use super::{Hub, Queue, Ticket};
use crate::store::block::{Block, MessageHead, PART_BYTES};
use crate::store::{QueueNumber, QueueRow};
use ringmain::control::{DeadLetter, DeadReason, dead_letter_name};
use ringmain::{Error, QueueSettings};

/// With so many moves waiting for a round, no queue starts more.
const PENDING_MAX: usize = 1024;

/// Moves that wait for a round, and redrives that have ended.
#[derive(Debug, Default)]
pub(super) struct Moves {
    pending: Vec<Move>,
    redriven: Vec<(Ticket, Result<u64, Error>)>,
}

#[derive(Debug, Clone, Copy)]
struct Move {
    message: MessageIndex,
    /// Bytes that it takes in the round.
    bytes: u64,
    /// Where a redrive sends it; `None`: to the dead-letter queue.
    to: Option<QueueNumber>,
}

/// A move of the round that is being written.
#[derive(Debug)]
pub(super) struct Moved {
    source: u32,
    target: u32,
    /// In the target.
    position: u64,
    by_redrive: bool,
}

/// A message to be stored in another queue.
#[derive(Debug)]
pub struct FrozenMove {
    /// The queue.
    pub target: QueueNumber,
    /// Its position there.
    pub position: u64,
    /// What is stored beside the payload.
    pub head: MessageHead,
    /// What is known of its death; `None`: it lives again.
    pub letter: Option<DeadLetter>,
    /// The block that has its payload,
    pub block: Block,
    /// at this index. One in parts keeps them.
    pub index: u32,
}

/// A redrive of a queue.
#[derive(Debug)]
pub(super) struct Redrive {
    ticket: Ticket,
    /// Where to; `None`: where each message came from.
    to: Option<QueueNumber>,
    /// Messages from this position on came later, and stay.
    up_to: u64,
    /// So many more may be taken.
    left: u64,
    /// Taken, and not committed.
    moving: u64,
    moved: u64,
    failed: Option<Error>,
}

/// Whether the next message of a queue was taken to be moved.
pub(super) enum Diverted {
    No,
    Yes,
    /// It is to be, when earlier moves are done.
    Later,
}

impl Moves {
    pub fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Bytes that the pending moves will take in the store.
    pub fn bytes(&self) -> u64 {
        self.pending.iter().map(|pending| pending.bytes).sum()
    }
}

impl Hub {
    /// Whether the message is to be tried no more.
    #[inline]
    pub(super) fn is_dead(&self, index: MessageIndex) -> bool {
        let message = &self.messages[index];
        let history = message.history;
        if history == History::default() {
            return false;
        }
        let most = self.queue(message.queue).row.settings.max_attempts;
        history.is_rejected() || (most > 0 && history.attempts() >= most)
    }

    /// A dead message is under no lease any more.
    pub(super) fn lay_out(&mut self, index: MessageIndex) {
        let queue = self.messages[index].queue;
        match self.messages[index].place {
            Place::Away => {
                self.enlist(index, State::Dying);
                self.make_runnable(queue);
            }
            // The round that stores it moves it on.
            Place::Ring { .. } | Place::Chunk { .. } => self.messages[index].state = State::Moving,
            Place::Block { .. } => {
                self.messages[index].state = State::Moving;
                self.start_move(index, None);
            }
        }
    }

    /// The message is in a block, and in no list.
    pub(super) fn start_move(&mut self, message: MessageIndex, to: Option<QueueNumber>) {
        let len = self.messages[message].len as usize;
        let bytes = if len > PART_BYTES { 0 } else { len as u64 };
        self.moves.pending.push(Move { message, bytes, to });
        self.close_wanted = true;
    }

    /// Takes the message, the next one of its queue, if it is to be moved.
    #[inline]
    pub(super) fn divert(&mut self, queue: u32, index: MessageIndex) -> Diverted {
        if self.queue(queue).redrive.is_none() && !self.is_dead(index) {
            return Diverted::No;
        }
        self.divert_now(queue, index)
    }

    #[cold]
    fn divert_now(&mut self, queue: u32, index: MessageIndex) -> Diverted {
        if self.moves.pending.len() >= PENDING_MAX {
            return Diverted::Later;
        }
        let to = self.redrive_to(queue, index);
        if to.is_none() && !self.is_dead(index) {
            return Diverted::No;
        }
        let entry = self.queue_mut(queue);
        if let Some(redrive) = &mut entry.redrive
            && to.is_some()
        {
            redrive.left -= 1;
            redrive.moving += 1;
        }
        self.unlist_first(index);
        self.messages[index].state = State::Moving;
        self.start_move(index, to);
        Diverted::Yes
    }

    /// Where the queue's redrive sends its next message, if there is one that takes
    /// it. Otherwise the redrive has seen all that it was to see.
    fn redrive_to(&mut self, queue: u32, index: MessageIndex) -> Option<QueueNumber> {
        let redrive = self.queue(queue).redrive.as_ref()?;
        let message = &self.messages[index];
        let wanted = redrive.left > 0 && message.has_position && message.order < redrive.up_to;
        let target = match redrive.to {
            _ if !wanted => Ok(None),
            Some(to) => Ok(Some(to)),
            None => self.source_of(index).map(Some),
        };
        match target {
            Ok(Some(to)) => return Some(to),
            Ok(None) => self.stop_redrive(queue, None),
            Err(error) => self.stop_redrive(queue, Some(error)),
        }
        None
    }

    /// The queue that a dead message came from.
    fn source_of(&self, index: MessageIndex) -> Result<QueueNumber, Error> {
        let letter = match self.messages[index].place {
            Place::Block { block, index } => self.blocks[block as usize]
                .as_ref()
                .and_then(|cached| cached.block.letter(index)),
            Place::Away | Place::Ring { .. } | Place::Chunk { .. } => None,
        };
        let Some(letter) = letter else {
            return Err(Error::Invalid(
                "the next message was sent to this queue and came from no other: say where to"
                    .to_owned(),
            ));
        };
        match self.by_name.get(&letter.source) {
            Some(&queue) => Ok(self.queue(queue).number),
            None => Err(Error::NoSuchQueue(letter.source)),
        }
    }

    /// The queue has no next message for now.
    #[inline]
    pub(super) fn nothing_to_divert(&mut self, queue: u32) {
        let entry = self.queue(queue);
        let empty = entry.ready.is_empty()
            && entry.again.is_empty()
            && entry.dying.is_empty()
            && !entry.is_behind();
        if empty && entry.redrive.is_some() {
            self.stop_redrive(queue, None);
        }
    }

    /// Moves messages of the queue back to where they came from, or to `to`: those
    /// that are committed now, oldest first, at most `limit`. `Some` is the answer
    /// at once; `None`: see [`Hub::take_redriven`].
    pub fn redrive(
        &mut self,
        name: &str,
        to: Option<&str>,
        limit: u64,
        ticket: Ticket,
    ) -> Option<Error> {
        let find = |name: &str| {
            let found = self.by_name.get(name).copied();
            found.ok_or_else(|| Error::NoSuchQueue(name.to_owned()))
        };
        let (queue, target) = match (find(name), to.map(find).transpose()) {
            (Ok(queue), Ok(target)) => (queue, target),
            (Err(error), _) | (_, Err(error)) => return Some(error),
        };
        if target == Some(queue) {
            return Some(Error::Invalid(format!(
                "the messages of {name} are in {name} already"
            )));
        }
        if self.queue(queue).redrive.is_some() {
            return Some(Error::Invalid(format!(
                "a redrive of {name} is under way: try again when it has ended"
            )));
        }
        let to = target.map(|target| self.queue(target).number);
        let entry = self.queue_mut(queue);
        entry.redrive = Some(Redrive {
            ticket,
            to,
            up_to: entry.committed,
            left: limit,
            moving: 0,
            moved: 0,
            failed: None,
        });
        self.make_runnable(queue);
        None
    }

    /// Redrives that have ended since the last call: how many messages were
    /// moved, or why it stopped.
    pub fn take_redriven(&mut self) -> Vec<(Ticket, Result<u64, Error>)> {
        std::mem::take(&mut self.moves.redriven)
    }

    /// The queue's redrive takes no further message.
    fn stop_redrive(&mut self, queue: u32, failed: Option<Error>) {
        if let Some(redrive) = &mut self.queue_mut(queue).redrive {
            redrive.left = 0;
            redrive.failed = redrive.failed.take().or(failed);
        }
        self.end_redrive(queue);
    }

    /// Answers the queue's redrive if nothing is left for it to do.
    fn end_redrive(&mut self, queue: u32) {
        let over = |redrive: &mut Redrive| redrive.left == 0 && redrive.moving == 0;
        if let Some(redrive) = self.queue_mut(queue).redrive.take_if(over) {
            let outcome = match redrive.failed {
                None => Ok(redrive.moved),
                Some(error) => Err(error),
            };
            self.moves.redriven.push((redrive.ticket, outcome));
        }
    }

    /// The queue is gone, and its redrive with it.
    pub(super) fn abandon_redrive(&mut self, queue: Queue) {
        if let Some(redrive) = queue.redrive {
            let error = Error::NoSuchQueue(queue.row.name);
            self.moves.redriven.push((redrive.ticket, Err(error)));
        }
    }

    /// The queue is about to be forgotten with all its messages.
    pub(super) fn forget_moves(&mut self, queue: u32) {
        let messages = &self.messages;
        self.moves
            .pending
            .retain(|pending| messages[pending.message].queue != queue);
    }

    /// The pending moves go into the round, save those whose target is yet to be
    /// made.
    pub(super) fn freeze_moves(
        &mut self,
        round: &mut InFlight,
        port: &mut impl Port,
    ) -> Vec<FrozenMove> {
        let mut frozen = Vec::new();
        for pending in std::mem::take(&mut self.moves.pending) {
            let target = match pending.to {
                Some(number) => self.by_number.get(&number).copied(),
                None => self.dead_letter_queue(pending.message, port),
            };
            match target {
                Some(target) => frozen.extend(self.freeze_move(pending, target, round, port)),
                None if pending.to.is_none() => self.moves.pending.push(pending),
                None => self.give_up_redrive_of(pending.message),
            }
        }
        frozen
    }

    /// The queue that takes the dead of the message's queue; has it made.
    fn dead_letter_queue(&mut self, message: MessageIndex, port: &mut impl Port) -> Option<u32> {
        let row = &self.queue(self.messages[message].queue).row;
        let name = dead_letter_name(&row.name, &row.settings);
        if let Some(&target) = self.by_name.get(&name) {
            return Some(target);
        }
        let settings = QueueSettings {
            max_message_bytes: row.settings.max_message_bytes,
            ..QueueSettings::default()
        };
        let created_ms = port.wall_ms();
        self.need_queue(QueueRow {
            name,
            settings,
            created_ms,
        });
        None
    }

    fn freeze_move(
        &mut self,
        pending: Move,
        target: u32,
        round: &mut InFlight,
        port: &mut impl Port,
    ) -> Option<FrozenMove> {
        let index = pending.message;
        let message = &self.messages[index];
        let (source, history) = (message.queue, message.history);
        let Place::Block { block, index: at } = message.place else {
            debug_assert!(false, "what is to be moved was stored");
            return None;
        };
        let block = self.blocks[block as usize].as_ref()?.block.clone();
        let letter = pending.to.is_none().then(|| DeadLetter {
            reason: match history.is_rejected() {
                true => DeadReason::Rejected,
                false => DeadReason::MaxAttempts,
            },
            source: self.queue(source).row.name.clone(),
            died_at_ms: port.wall_ms(),
            attempts: history.attempts(),
        });
        let head = MessageHead {
            attempts: History::after_move().bits(),
            ..block.message(at)
        };
        self.go_on_in_store(target);
        let entry = self.queue_mut(target);
        let (number, position) = (entry.number, entry.next);
        entry.next += 1;
        self.counters.dead += u64::from(letter.is_some());
        round.moved.push(Moved {
            source,
            target,
            position,
            by_redrive: pending.to.is_some(),
        });
        self.settle_in_store(index, round);
        self.settle(index);
        self.remove_if_done(index);
        Some(FrozenMove {
            target: number,
            position,
            head,
            letter,
            block,
            index: at,
        })
    }

    /// What has no position yet comes behind the messages that are moved here, and
    /// those are in the store alone.
    fn go_on_in_store(&mut self, target: u32) {
        let queue = self.queue(target);
        // If it is behind, `ready` has none of these.
        let mut first = None;
        if !queue.is_behind() {
            let mut ready = queue.ready.iter(&self.messages);
            first = ready.find(|&index| !self.messages[index].has_position);
        }
        match first {
            Some(first) => self.spill_from(first),
            None => self.queue_mut(target).spilling = true,
        }
    }

    /// The target of a redriven message is gone: it stays where it is.
    fn give_up_redrive_of(&mut self, message: MessageIndex) {
        let queue = self.messages[message].queue;
        if let Some(redrive) = &mut self.queue_mut(queue).redrive {
            redrive.moving -= 1;
        }
        self.put_back(message);
        let error = Error::NoSuchQueue("where the messages were to go".to_owned());
        self.stop_redrive(queue, Some(error));
    }

    /// The round's moves are committed.
    pub(super) fn finish_moves(&mut self, moved: &mut Vec<Moved>) {
        for Moved {
            source,
            target,
            position,
            by_redrive,
        } in moved.drain(..)
        {
            let queue = self.queue_mut(target);
            queue.spilling = false;
            queue.committed = queue.next;
            queue.messages += 1;
            if queue.gap.is_empty() {
                queue.gap.start = position;
            }
            queue.gap.end = position + 1;
            self.make_runnable(target);
            if let Some(redrive) = &mut self.queue_mut(source).redrive
                && by_redrive
            {
                redrive.moving -= 1;
                redrive.moved += 1;
            }
            self.end_redrive(source);
            self.make_runnable(source);
        }
        // With targets that were made by this round.
        self.close_wanted |= self.moves.has_pending();
    }
}
