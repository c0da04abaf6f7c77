//! The messages that the hub knows: a slab, and lists through it.
//!
//! A message is here while it is in a submission ring, leased, about to be
//! delivered, or while something of it is not committed. The backlog behind that
//! is in the store alone.

use super::chunks::ChunkIndex;
use super::port::{History, LeaseEntry, SessionSlot};

/// Index of a message in the slab.
pub(super) type MessageIndex = u32;
/// No message, or no lease.
pub(super) const NONE: u32 = u32::MAX;

/// Where a message's payload is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// In the store alone, or nowhere any more.
    Away,
    /// In its sender's submission ring.
    Ring { slot: SessionSlot, offset: u32 },
    /// In a chunk of its sender's.
    Chunk { chunk: ChunkIndex },
    /// In a block that the hub holds, at this index; or in parts beside it.
    Block { block: u32, index: u32 },
}

/// What a message is doing. Each message is in exactly one state, and in the
/// list of its queue that belongs to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// In `Queue::ready`: to be leased for the first time.
    Ready,
    /// In `Queue::later`: behind messages that are in the store alone.
    Later,
    /// In `Queue::again`: leased before, to be leased next.
    Again,
    /// Under a lease.
    Leased,
    /// Waiting for the delay of its nack.
    Delayed,
    /// In `Queue::dying`: dead, and its payload is to be read back.
    Dying,
    /// In no list: it goes to another queue once it is stored.
    Moving,
    /// Acked, moved or purged.
    Settled,
}

#[derive(Debug)]
pub(super) struct Message {
    /// Number of the session that sent it.
    pub session: u64,
    /// Position of its record in that session's submission ring.
    pub position: u64,
    pub sent_at_ms: u64,
    /// Until a round has taken it: its place in the order of intake. From then
    /// on: its position in its queue.
    pub order: u64,
    pub len: u32,
    pub place: Place,
    pub prev: MessageIndex,
    pub next: MessageIndex,
    /// Leases of it whose entries are in use, live or not: a list.
    pub leases: LeaseEntry,
    /// The hub's index of its queue.
    pub queue: u32,
    pub history: History,
    pub state: State,
    /// Its send is committed, or in the round that is being written.
    pub send_done: bool,
    /// `order` is its position in the queue.
    pub has_position: bool,
    /// It is in the round that is being written: what happens to it now is the
    /// next round's matter.
    pub in_flight: bool,
}

impl Message {
    /// A message of which nothing but its queue is known yet.
    pub fn unknown(queue: u32) -> Message {
        Message {
            session: 0,
            position: 0,
            sent_at_ms: 0,
            order: 0,
            len: 0,
            place: Place::Away,
            prev: NONE,
            next: NONE,
            leases: NONE,
            queue,
            history: History::default(),
            state: State::Settled,
            send_done: false,
            has_position: false,
            in_flight: false,
        }
    }

    /// Position in the queue plus one, or 0.
    #[inline]
    pub fn queue_position(&self) -> u64 {
        if self.has_position { self.order + 1 } else { 0 }
    }
}

#[derive(Debug, Default)]
pub(super) struct Messages {
    slots: Vec<Message>,
    /// First free slot; free slots are chained by `next`.
    free: Option<MessageIndex>,
}

impl std::ops::Index<MessageIndex> for Messages {
    type Output = Message;
    #[inline]
    fn index(&self, index: MessageIndex) -> &Message {
        &self.slots[index as usize]
    }
}

impl std::ops::IndexMut<MessageIndex> for Messages {
    #[inline]
    fn index_mut(&mut self, index: MessageIndex) -> &mut Message {
        &mut self.slots[index as usize]
    }
}

impl Messages {
    #[inline]
    pub fn insert(&mut self, message: Message) -> MessageIndex {
        match self.free {
            Some(index) => {
                let next = self.slots[index as usize].next;
                self.free = (next != NONE).then_some(next);
                self.slots[index as usize] = message;
                index
            }
            None => {
                self.slots.push(message);
                (self.slots.len() - 1) as MessageIndex
            }
        }
    }

    #[inline]
    pub fn remove(&mut self, index: MessageIndex) {
        self.slots[index as usize].next = self.free.unwrap_or(NONE);
        self.slots[index as usize].queue = NONE;
        self.free = Some(index);
    }

    /// All messages of a queue.
    pub fn of_queue(&self, queue: u32) -> Vec<MessageIndex> {
        let of_queue = |index: &MessageIndex| self.slots[*index as usize].queue == queue;
        (0..self.slots.len() as MessageIndex)
            .filter(of_queue)
            .collect()
    }

    /// How many messages are in the slab.
    #[cfg(test)]
    pub fn used(&self) -> u32 {
        let next_free = |&index: &MessageIndex| {
            let next = self.slots[index as usize].next;
            (next != NONE).then_some(next)
        };
        let free = std::iter::successors(self.free, next_free).count();
        (self.slots.len() - free) as u32
    }
}

/// A list through the slab, by `prev` and `next`.
#[derive(Debug, Clone, Copy)]
pub(super) struct List {
    head: MessageIndex,
    tail: MessageIndex,
}

impl Default for List {
    fn default() -> List {
        List {
            head: NONE,
            tail: NONE,
        }
    }
}

impl List {
    #[inline]
    pub fn first(&self) -> Option<MessageIndex> {
        (self.head != NONE).then_some(self.head)
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.head == NONE
    }

    #[inline]
    pub fn push_back(&mut self, messages: &mut Messages, index: MessageIndex) {
        messages[index].prev = self.tail;
        messages[index].next = NONE;
        match self.tail {
            NONE => self.head = index,
            tail => messages[tail].next = index,
        }
        self.tail = index;
    }

    #[inline]
    pub fn pop_front(&mut self, messages: &mut Messages) -> Option<MessageIndex> {
        let index = self.first()?;
        self.head = messages[index].next;
        match self.head {
            NONE => self.tail = NONE,
            head => messages[head].prev = NONE,
        }
        Some(index)
    }

    /// Cuts the list before `index`, a member of it, and gives the rest.
    pub fn split_off(&mut self, messages: &mut Messages, index: MessageIndex) -> List {
        let rest = List {
            head: index,
            tail: self.tail,
        };
        self.tail = messages[index].prev;
        messages[index].prev = NONE;
        match self.tail {
            NONE => self.head = NONE,
            tail => messages[tail].next = NONE,
        }
        rest
    }

    /// Appends all of `other`.
    pub fn append(&mut self, messages: &mut Messages, other: List) {
        let Some(first) = other.first() else { return };
        messages[first].prev = self.tail;
        match self.tail {
            NONE => self.head = first,
            tail => messages[tail].next = first,
        }
        self.tail = other.tail;
    }

    /// The members, front to back.
    pub fn iter<'a>(&self, messages: &'a Messages) -> impl Iterator<Item = MessageIndex> + use<'a> {
        let mut at = self.head;
        std::iter::from_fn(move || {
            let index = (at != NONE).then_some(at)?;
            at = messages[index].next;
            Some(index)
        })
    }
}
