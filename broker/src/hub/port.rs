//! What the hub needs from outside, and what it causes there.

use crate::store::QueueNumber;
use ringmain::record::{self, Answer};

/// Where a session stands in the hub's table. Reused after the session's end.
pub type SessionSlot = u32;
/// Index of an entry in the lease table, from 1.
pub type LeaseEntry = u32;

/// How a lease stands. The numbers are those of the ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum LeaseState {
    /// The entry is free.
    Free = 0,
    /// A consumer holds the message.
    Leased = 1,
    /// It was acked, or its message was purged.
    Acked = 2,
    /// It was nacked.
    Nacked = 3,
    /// It ran past its deadline.
    Expired = 4,
    /// Its holder's session ended.
    Returned = 5,
    /// All of it is committed, or its queue is gone; but its holder may still be
    /// reading the chunk that it was shown.
    Shown = 6,
}

impl LeaseState {
    /// The state with this number.
    pub fn from_number(number: u8) -> Option<LeaseState> {
        [
            LeaseState::Free,
            LeaseState::Leased,
            LeaseState::Acked,
            LeaseState::Nacked,
            LeaseState::Expired,
            LeaseState::Returned,
            LeaseState::Shown,
        ]
        .get(usize::from(number))
        .copied()
    }
}

/// What a message has been through: how often it was attempted, whether it was
/// ever leased (a lease whose delivery was not taken is no attempt), and whether
/// it was rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct History(u16);

impl History {
    const LEASED: u16 = 1 << 15;
    const REJECTED: u16 = 1 << 14;
    const ATTEMPTS: u16 = Self::REJECTED - 1;

    /// From the number that ledger and store keep.
    pub fn from_bits(bits: u16) -> History {
        History(bits)
    }

    /// The number that ledger and store keep.
    pub fn bits(self) -> u16 {
        self.0
    }

    /// How often it was attempted; counts no further than 16383.
    #[inline]
    pub fn attempts(self) -> u16 {
        self.0 & Self::ATTEMPTS
    }

    /// Whether it was leased before.
    #[inline]
    pub fn was_leased(self) -> bool {
        self.0 & Self::LEASED != 0
    }

    /// Whether a consumer has said that it can't be processed.
    #[inline]
    pub fn is_rejected(self) -> bool {
        self.0 & Self::REJECTED != 0
    }

    /// After a consumer has said so.
    pub fn rejected(self) -> History {
        History(self.0 | Self::REJECTED)
    }

    /// After a lease has ended without an ack.
    pub fn after_lease(self, counted: bool) -> History {
        let attempts = self.attempts() + u16::from(counted);
        let rejected = self.0 & Self::REJECTED;
        History(attempts.min(Self::ATTEMPTS) | rejected | Self::LEASED)
    }

    /// In the queue that it was moved to: it was leased, and begins anew.
    pub fn after_move() -> History {
        History(Self::LEASED)
    }
}

/// The chunk that a lease shows its holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Shown {
    /// None: the payload was in the delivery's record.
    #[default]
    No,
    /// One of the sender's outbound segments.
    InPlace {
        /// The segment.
        segment: u32,
        /// First unit.
        unit: u32,
        /// How many units.
        units: u32,
    },
    /// One of the holder's inbound segments.
    Inbound {
        /// The segment.
        segment: u32,
        /// First unit.
        unit: u32,
        /// How many units.
        units: u32,
    },
}

impl Shown {
    const IN_PLACE: u64 = 1 << 62;
    const INBOUND: u64 = 2 << 62;

    /// The number that the ledger keeps: kind in 2 bits, segment in 14, units and
    /// first unit in 24 each.
    pub fn bits(self) -> u64 {
        let place = |segment: u32, unit: u32, units: u32| {
            u64::from(segment & 0x3fff) << 48 | u64::from(units) << 24 | u64::from(unit)
        };
        match self {
            Shown::No => 0,
            Shown::InPlace {
                segment,
                unit,
                units,
            } => Self::IN_PLACE | place(segment, unit, units),
            Shown::Inbound {
                segment,
                unit,
                units,
            } => Self::INBOUND | place(segment, unit, units),
        }
    }

    /// From the number that the ledger keeps.
    pub fn from_bits(bits: u64) -> Shown {
        let segment = (bits >> 48) as u32 & 0x3fff;
        let units = (bits >> 24) as u32 & 0xff_ffff;
        let unit = bits as u32 & 0xff_ffff;
        match bits & 3 << 62 {
            Self::IN_PLACE => Shown::InPlace {
                segment,
                unit,
                units,
            },
            Self::INBOUND => Shown::Inbound {
                segment,
                unit,
                units,
            },
            _ => Shown::No,
        }
    }
}

const _: () = assert!(ringmain_ring::payload::UNITS_MAX < 1 << 24);

/// Where a payload's bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Payload<'a> {
    /// In the submission ring of the session that sent it.
    Ring {
        /// The session.
        slot: SessionSlot,
        /// Where in the ring's area.
        offset: u32,
        /// Length.
        len: u32,
    },
    /// In a block, in memory.
    Block(&'a [u8]),
    /// In a chunk of an outbound segment.
    Chunk {
        /// The session that it belongs to.
        slot: SessionSlot,
        /// The chunk.
        at: record::Chunk,
    },
    /// In the consumer's inbound chunk already.
    Filled,
}

/// A payload to be copied into a consumer's inbound chunk, beside the service:
/// it is long, or must be read from the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fill {
    /// What [`super::Hub::filled`] is to be called with.
    pub ticket: u64,
    /// The consumer's session.
    pub to: SessionSlot,
    /// The inbound chunk.
    pub into: record::Chunk,
    /// The session and position that identify the message.
    pub message: (u64, u64),
    /// The chunk that has the payload; `None`: it is in the store in parts.
    pub from: Option<(SessionSlot, record::Chunk)>,
}

/// A message to be put in a consumer's delivery ring, with its lease.
#[derive(Debug)]
pub struct Delivery<'a> {
    /// The consumer's session.
    pub to: SessionSlot,
    /// Number of that session.
    pub holder: u64,
    /// Its attachment.
    pub attachment: u32,
    /// The lease's entry.
    pub entry: LeaseEntry,
    /// When the lease ends, in nanoseconds of the monotonic clock.
    pub deadline_ns: u64,
    /// The queue.
    pub queue: QueueNumber,
    /// Position in the queue plus one; 0 while it has none.
    pub queue_position: u64,
    /// Session that sent it.
    pub session: u64,
    /// Position of its record in that session's submission ring.
    pub position: u64,
    /// When it was sent, in milliseconds since the Unix epoch.
    pub sent_at_ms: u64,
    /// Attempts so far.
    pub history: History,
    /// Length of its payload.
    pub len: u32,
    /// Where its bytes are.
    pub payload: Payload<'a>,
    /// The chunk in which the consumer is to find them: that of `payload`, or one
    /// of its own, into which they are copied.
    pub shown: Shown,
}

/// The way out of the hub. The service implements it over rings, ledger and
/// store; tests implement it over vectors.
pub trait Port {
    /// Writes the delivery's record, unpublished, and its row in the lease
    /// table, state last. Gives the record's position, or `None` if the ring
    /// has no room.
    fn deliver(&mut self, delivery: &Delivery<'_>) -> Option<u64>;

    /// Whether the consumer had taken the delivery at this position.
    fn taken(&self, slot: SessionSlot, delivery_position: u64) -> bool;

    /// The lease has ended, or (with [`LeaseState::Free`]) its entry may be used
    /// again.
    fn lease_state(&mut self, entry: LeaseEntry, state: LeaseState, history: History);

    /// The lease lasts until `deadline_ns` now.
    fn lease_deadline(&mut self, entry: LeaseEntry, deadline_ns: u64);

    /// The leased message gets this position plus one in its queue with the
    /// round that is being closed.
    fn lease_position(&mut self, entry: LeaseEntry, queue_position: u64);

    /// The lease shows its holder nothing any more.
    fn lease_unshown(&mut self, entry: LeaseEntry);

    /// Whether the consumer can read chunks of this outbound segment in place.
    fn can_read(&mut self, consumer: SessionSlot, owner: SessionSlot, segment: u32) -> bool;

    /// Makes an inbound segment for the session, with room for a payload of so
    /// many bytes. Gives its units, or `None` if there is no memory.
    fn grow_inbound(&mut self, slot: SessionSlot, len: u32) -> Option<u32>;

    /// Copies a payload; [`super::Hub::filled`] is called when it is done.
    fn fill(&mut self, fill: Fill);

    /// Gives a chunk back to the client whose submission at `position` took it.
    fn return_chunk(&mut self, slot: SessionSlot, at: record::Chunk, position: u64);

    /// Makes the lease table larger. Gives the number of entries that exist
    /// now, or `None` at the limit.
    fn grow_leases(&mut self) -> Option<u32>;

    /// Writes the answer, unpublished, and gives the ring position after it.
    fn answer(&mut self, slot: SessionSlot, answer: Answer) -> u64;

    /// Says in the attachment's word that the queue is gone.
    fn queue_deleted(&mut self, slot: SessionSlot, attachment: u32);

    /// Milliseconds since the Unix epoch.
    fn wall_ms(&self) -> u64;

    /// Asks the store for blocks of the queue from this position on; the answer
    /// comes back by [`super::Hub::loaded`].
    fn read(&mut self, queue: QueueNumber, from: u64);
}
