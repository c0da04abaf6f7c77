//! What lasts: the store's interface, in queue operations and never in keys and
//! values, so that another engine can be built for it.
//!
//! One conformance suite (`broker/tests/store_conformance.rs`) runs over every
//! engine: [`rocks::RocksStore`], which the daemon uses, and
//! [`model::ModelStore`], which the tests compare against.
//!
//! Threads: one thread at a time commits and writes parts; reads, syncs and
//! look-ups may run beside it from other threads. Reads return committed positions only.

pub mod block;
pub mod model;
pub mod parts;
pub mod rocks;

use block::Block;
use bytes::Bytes;
use parts::Identity;
use ringmain::QueueSettings;

/// A queue's number in its instance. Numbers count upwards and are never given
/// a second time.
pub type QueueNumber = u32;

/// One round's changes, applied whole or not at all.
#[derive(Debug, Clone, Default)]
pub struct Batch {
    /// The round's number; greater than that of every batch before it.
    pub round: u64,
    /// The changes, in order.
    pub writes: Vec<Write>,
}

/// One change of a [`Batch`].
#[derive(Debug, Clone)]
pub enum Write {
    /// Appends the messages of `block` to the queue: its first message takes
    /// the position `first`, which is the queue's next position.
    Append {
        /// The queue.
        queue: QueueNumber,
        /// Position of the block's first message.
        first: u64,
        /// The messages.
        block: Block,
    },
    /// The messages at these positions are settled: no read returns them
    /// again. A position that is settled already, or below the queue's first,
    /// is left as it is.
    Settle {
        /// The queue.
        queue: QueueNumber,
        /// Positions in any order.
        positions: Vec<u64>,
    },
    /// The message at this position has been attempted `attempts` times.
    Attempts {
        /// The queue.
        queue: QueueNumber,
        /// The message.
        position: u64,
        /// Its number of attempts from now on.
        attempts: u16,
    },
    /// Creates the queue, or changes its settings.
    PutQueue {
        /// The queue.
        queue: QueueNumber,
        /// What describes it.
        row: QueueRow,
    },
    /// Deletes the queue and all its messages.
    DeleteQueue {
        /// The queue.
        queue: QueueNumber,
    },
    /// Session numbers below this one may have been given out.
    ReserveSessions {
        /// The first number that is still free.
        below: u64,
    },
}

/// What the store keeps of a queue beside its messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueRow {
    /// The queue's name, unique among the queues that exist.
    pub name: String,
    /// Its settings.
    pub settings: QueueSettings,
    /// When it was created, in milliseconds since the Unix epoch.
    pub created_ms: u64,
}

/// A queue as it lies in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredQueue {
    /// The queue.
    pub queue: QueueNumber,
    /// What describes it.
    pub row: QueueRow,
    /// Position of the first unsettled message; `next` if there is none.
    pub first: u64,
    /// The position that the next message gets.
    pub next: u64,
    /// How many messages are unsettled.
    pub unsettled: u64,
}

/// A block read back, with what happened to its messages since it was written.
#[derive(Debug, Clone)]
pub struct LoadedBlock {
    /// Position of the block's first message.
    pub first: u64,
    /// The messages as they were appended.
    pub block: Block,
    /// One bit a message, from the lowest bit of the first word: settled. Words
    /// that are missing at the end are zero.
    pub settled: Vec<u64>,
    /// Attempts of messages whose number changed after the block was written:
    /// *(index in the block, attempts)*, by index.
    pub attempts: Vec<(u32, u16)>,
}

impl LoadedBlock {
    /// Whether the message at this index of the block is settled.
    pub fn is_settled(&self, index: u32) -> bool {
        let word = self.settled.get(index as usize / 64).copied().unwrap_or(0);
        word >> (index % 64) & 1 == 1
    }

    /// How often the message at this index of the block was attempted.
    pub fn attempts(&self, index: u32) -> u16 {
        match self.attempts.binary_search_by_key(&index, |&(i, _)| i) {
            Ok(found) => self.attempts[found].1,
            Err(_) => self.block.message(index).attempts,
        }
    }
}

/// Why the store could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Reading, writing or syncing failed. The handle must not be used again.
    #[error("the store failed: {0}")]
    Failed(String),
    /// What lies in the store is not what was written there.
    #[error("the store is damaged: {0}")]
    Corrupt(String),
    /// The data folder was written by a version that this one cannot read.
    #[error(
        "the store has format {found}, this version reads format {known}: use the version of ringmain that wrote it"
    )]
    Version {
        /// The format found.
        found: u32,
        /// The format that this version reads and writes.
        known: u32,
    },
    /// Another broker uses the data folder.
    #[error("the data folder {0} is in use by another broker")]
    InUse(String),
}

/// The queue engine behind the broker.
pub trait Store: Send + Sync {
    /// The last committed round, 0 before the first.
    fn committed_round(&self) -> u64;

    /// Applies the batch whole, and returns once it would survive SIGKILL of
    /// this process. After an error the handle must be dropped: whether the
    /// batch will be there after the next opening is unknown.
    fn commit(&self, batch: Batch) -> Result<(), StoreError>;

    /// Writes part `part` (from 0) of the payload of the message of this
    /// identity, ahead of the commit that appends it in parts; which the commit
    /// refuses if parts are missing. See [`parts::part_range`] for how a payload
    /// is cut. Writing a part again replaces it.
    ///
    /// Parts are kept as long as a committed message of that identity lies
    /// unsettled in some queue: it may move to another queue, appended there and
    /// settled here in one batch. The batch that settles it or deletes its queue
    /// deletes them. Parts that no commit followed are gone after the next
    /// opening.
    ///
    /// Called by the thread that commits. After an error the handle must be
    /// dropped.
    fn put_part(&self, message: Identity, part: u32, bytes: &[u8]) -> Result<(), StoreError>;

    /// Part `part` (from 0) of the payload of a message in parts.
    ///
    /// May be called from any thread, but not while the message may be settled or
    /// its queue deleted: a part that is missing or damaged is
    /// [`StoreError::Corrupt`].
    fn read_part(&self, message: Identity, part: u32) -> Result<Bytes, StoreError>;

    /// Returns once all that was committed when it was called would survive a
    /// power cut, with the number of the last round that does. Blocks; after an
    /// error the handle must be dropped.
    fn sync(&self) -> Result<u64, StoreError>;

    /// Bytes that batches may still take before the disk counts as full: what
    /// the file system has free, less the reserve kept for settling.
    fn room(&self) -> Result<u64, StoreError>;

    /// Every queue, by number.
    fn queues(&self) -> Result<Vec<StoredQueue>, StoreError>;

    /// The number that the next queue gets, 1 in a new store.
    fn next_queue(&self) -> QueueNumber;

    /// The first session number that was never reserved, 1 in a new store.
    fn next_session(&self) -> u64;

    /// Blocks of the queue in order, from the one that holds `from` or else the
    /// first one after it, as many as hold no more than `bytes_max` of payload
    /// and at least one if there is one. Blocks whose messages are all settled are not
    /// returned.
    fn read(
        &self,
        queue: QueueNumber,
        from: u64,
        bytes_max: usize,
    ) -> Result<Vec<LoadedBlock>, StoreError>;
}
