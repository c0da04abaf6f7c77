//! The hub: the broker's state machine. Records, session events, store results
//! and the time go in; deliveries, rounds, answers and wake-up times come out,
//! through [`Port`].
//!
//! It knows no clock, thread, file, socket or shared memory, so every policy is
//! here and the real code runs in tests under a simulated clock, store and
//! crash.
//!
//! The life of a message:
//!
//! ```text
//!           send                     lease                  ack
//!   (ring) ------> Ready | Later  --------->  Leased  ------------> Settled
//!                                  <---- Again ----+
//!                         nack, expiry, the holder's end
//! ```
//!
//! A message that was attempted too often, or rejected, is `Moving` instead, and
//! settled by the round that stores it in the dead-letter queue.
//!
//! Beside that it has a place in the order of commits: while its send is not
//! committed its bytes lie in its sender's ring; the round that commits the send
//! either finds it settled and leaves it out, or gives it a position in its
//! queue and stores it. See `round.rs` for rounds, and `recover.rs` for what a
//! successor does.

mod admin;
mod chunks;
mod dispatch;
mod fills;
mod intake;
mod message;
mod moves;
mod port;
mod recover;
mod round;
mod status;
#[cfg(test)]
mod tests;

pub use admin::{AdminReply, Ticket};
pub use intake::Nack;
pub use moves::FrozenMove;
pub use port::{
    Delivery, Fill, History, LeaseEntry, LeaseState, Payload, Port, SessionSlot, Shown,
};
pub use recover::{LeaseRow, RestoredSession};
pub use round::{Append, Close, Finished, FrozenMessage, FrozenRound, SessionPart, Source};
pub use status::QueueStatus;

use crate::store::block::{Block, PART_BYTES};
use crate::store::{QueueNumber, QueueRow};
use chunks::{ChunkIndex, Chunks, Memory};
use message::{List, MessageIndex, Messages, NONE, Place, State};
use ringmain::control::Purpose;
use ringmain::record::inline_max_of_delivery_ring;
use ringmain_ring::layout::Geometry;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};

/// Limits of the hub.
#[derive(Debug, Clone)]
pub struct HubLimits {
    /// Memory for stored messages that wait for consumers, over all queues; what
    /// falls out is read back from the store.
    pub cache_bytes: usize,
    /// Most queues, since each takes memory, used or not. Queues of dead letters are
    /// made beyond it.
    pub queues_max: usize,
}

impl Default for HubLimits {
    fn default() -> HubLimits {
        HubLimits {
            cache_bytes: 32 << 20,
            queues_max: 100_000,
        }
    }
}

/// A session's hold on a queue.
#[derive(Debug, Clone, Copy)]
struct Attachment {
    /// The hub's index of the queue, [`NONE`] once that is deleted.
    queue: u32,
    purpose: Purpose,
    /// Most live leases.
    window: u32,
    /// Live leases.
    live: u32,
}

/// What is thought of a session that let a lease run out. Whatever it sends
/// makes it an ordinary one again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Silent {
    /// Nothing.
    No,
    /// It had taken the message: others are preferred.
    Busy,
    /// It had not even taken the message, and gets no more: it may stand still,
    /// and what it was given would be nobody's for one visibility timeout after
    /// the other. When it goes on it finds the delivery late, and says so.
    Stuck,
}

/// One client's session.
#[derive(Debug)]
struct Session {
    number: u64,
    attachments: Vec<Attachment>,
    /// Sends that no round has taken yet, in order. Settled ones stay until a
    /// round passes them.
    sends: VecDeque<MessageIndex>,
    /// Ends of leases by records of this session that no round has taken yet:
    /// *(position of the record, entry)*.
    ends: VecDeque<(u64, LeaseEntry)>,
    /// Answers that no round has taken yet: *(position of the record, end of the
    /// answer in the answer ring)*.
    answers: VecDeque<(u64, u64)>,
    /// End of the answers that a round has taken.
    answer_tail: u64,
    /// End of the records taken in.
    taken_in: u64,
    /// End of the records that a round has taken, committed or being written.
    frozen: u64,
    /// End of the records that are committed.
    committed: u64,
    /// Someone waits for the records before this to be stored.
    flush: u64,
    /// Size of its submission ring.
    ring_bytes: u64,
    /// Longest payload that fits a record of its delivery ring.
    inline_max: u32,
    /// Bytes of chunks that its uncommitted sends hold.
    queued_bytes: u64,
    /// Chunks of sends that were refused and that no round has taken yet:
    /// *(position of the record, chunk)*.
    refused: VecDeque<(u64, ChunkIndex)>,
    memory: Memory,
    /// Its delivery ring had no room at the last try.
    blocked: bool,
    /// A lease of it ran out, and it has sent nothing since.
    silent: Silent,
    /// Records before this position are those of a predecessor's time, and not
    /// all taken in again. 0: they are.
    replay_until: u64,
    /// It takes part in the next round.
    dirty: bool,
    /// No more records come; it goes when all is committed.
    ended: bool,
}

/// A queue.
#[derive(Debug)]
struct Queue {
    number: QueueNumber,
    row: QueueRow,
    /// Position of the next message that a round takes.
    next: u64,
    /// To be leased for the first time, oldest first.
    ready: List,
    /// As `ready`, but behind the gap, so not to be leased yet.
    later: List,
    /// Returned ones, to be leased before `ready`.
    again: List,
    /// Dead ones that wait for their payload, to be moved before anything else.
    dying: List,
    /// Positions that are in the store alone: after those of `ready`, before
    /// those of `later`. None of them was ever leased, save those in `known`.
    gap: std::ops::Range<u64>,
    /// From the closing of a round that goes into the gap to its end.
    spilling: bool,
    /// Messages whose positions a read must not take for new: leased ones that
    /// a predecessor stored, and those of `again` whose payload is away.
    /// [`NONE`]: settled since.
    known: BTreeMap<u64, MessageIndex>,
    /// Messages before this position are committed.
    committed: u64,
    /// A read is under way, and this is what `committed` was when it began: what
    /// it does not find before that was settled, and of the rest it knows
    /// nothing.
    reading: Option<u64>,
    /// The payload of what comes next is being copied.
    filling: Option<u64>,
    redrive: Option<moves::Redrive>,
    /// Bytes in memory of messages that are stored: see [`memory_of`].
    cached_bytes: usize,
    /// Bytes that the round being written will add to those.
    freezing_bytes: usize,
    consumers: Vec<(SessionSlot, u32)>,
    producers: u32,
    /// Messages that are not settled.
    messages: u64,
    leased: u64,
    /// Sends taken in, deliveries and acks, since the hub was made.
    sends: u64,
    deliveries: u64,
    acks: u64,
    /// When a lease of it ended last.
    last_end_ns: u64,
    /// Whether it stands in `Hub::runnable`.
    runnable: bool,
}

impl Queue {
    /// The list of messages in this state.
    #[inline]
    fn list_of(&mut self, state: State) -> Option<&mut List> {
        match state {
            State::Ready => Some(&mut self.ready),
            State::Later => Some(&mut self.later),
            State::Again => Some(&mut self.again),
            State::Dying => Some(&mut self.dying),
            State::Leased | State::Delayed | State::Moving | State::Settled => None,
        }
    }

    /// Whether it needs turns though nobody consumes it.
    fn diverts(&self) -> bool {
        !self.dying.is_empty() || self.redrive.is_some()
    }

    /// Asks for stored messages from this position on, unless a read is under way.
    fn ask_for(&mut self, from: u64, port: &mut impl Port) {
        if self.reading.is_none() {
            self.reading = Some(self.committed);
            port.read(self.number, from);
        }
    }

    fn is_behind(&self) -> bool {
        self.spilling || !self.gap.is_empty()
    }
}

/// A lease, by entry. The ledger has the same by the same index.
#[derive(Debug, Clone, Copy)]
struct Lease {
    message: MessageIndex,
    holder: SessionSlot,
    attachment: u32,
    delivery_position: u64,
    deadline_ns: u64,
    /// Next lease of the same message.
    next: LeaseEntry,
    /// What its holder may be reading.
    shown: Shown,
    /// The same if that is an outbound chunk, else [`NONE`].
    chunk: ChunkIndex,
    state: LeaseState,
    /// The end is committed, or in the round that is being written.
    end_done: bool,
    /// Found ended by a successor, which has not come to the record that ended
    /// it.
    replayed: bool,
}

const FREE_LEASE: Lease = Lease {
    message: NONE,
    holder: 0,
    attachment: 0,
    delivery_position: 0,
    deadline_ns: 0,
    next: NONE,
    shown: Shown::No,
    chunk: NONE,
    state: LeaseState::Free,
    end_done: false,
    replayed: false,
};

/// A block that messages in memory point into.
#[derive(Debug)]
struct CachedBlock {
    block: Block,
    /// Messages that point into it.
    users: u32,
}

/// Counters since the hub was made.
#[derive(Debug, Clone, Copy, Default)]
#[allow(
    missing_docs,
    reason = "the fields of control::Stats say what they mean"
)]
pub struct Counters {
    pub sends: u64,
    pub refused: u64,
    pub deliveries: u64,
    pub redeliveries: u64,
    pub acks: u64,
    pub returned: u64,
    pub leases_lost: u64,
    pub stored: u64,
    pub dead: u64,
}

/// The hub. See the module's text.
#[derive(Debug)]
pub struct Hub {
    limits: HubLimits,
    /// Milliseconds and nanoseconds by the caller's clocks, as last told.
    now_ns: u64,
    sessions: Vec<Option<Session>>,
    queues: Vec<Option<Queue>>,
    by_name: HashMap<String, u32>,
    by_number: HashMap<QueueNumber, u32>,
    messages: Messages,
    leases: Vec<Lease>,
    free_leases: Vec<LeaseEntry>,
    /// No deadline of a live lease lies before this.
    next_expiry_ns: u64,
    blocks: Vec<Option<CachedBlock>>,
    free_blocks: Vec<u32>,
    chunks: Chunks,
    /// Copies under way.
    fills: Vec<fills::Filling>,
    next_fill: u64,
    /// Queues whose next message can't be shown before another chunk of its
    /// session is answered.
    share_waiters: Vec<u32>,
    /// When consumers that lacked memory are offered messages again.
    starved_until_ns: u64,
    /// Sends of chunks, in the order of intake, and when they were taken in.
    young_chunks: VecDeque<(u64, u64, MessageIndex)>,
    /// Queues that may have something to deliver to somebody.
    runnable: VecDeque<u32>,
    /// Delayed messages: *(due, message)*, the earliest first.
    delayed: BinaryHeap<std::cmp::Reverse<(u64, MessageIndex)>>,
    moves: moves::Moves,
    /// Order of intake of the next send.
    next_order: u64,
    /// *(first order, when)*: sends from that order on were taken in then or
    /// later.
    ages: VecDeque<(u64, u64)>,
    /// Sessions with something for the next round.
    dirty: Vec<SessionSlot>,
    /// Ends of leases by no record (time, a session's end): for the next round.
    ends: Vec<LeaseEntry>,
    /// A round is being written: this one, if so.
    round_in_flight: bool,
    in_flight: round::InFlight,
    /// A round should be closed without waiting for the linger.
    close_wanted: bool,
    /// The last round left some ring more than half full: the next one is closed
    /// as soon as there are settled messages to be passed.
    pressed: bool,
    /// A delivery found no lease entry.
    leases_short: bool,
    /// Sessions whose delivery ring had no room, since the last
    /// [`Hub::take_blocked`].
    newly_blocked: Vec<SessionSlot>,
    next_round: u64,
    admin: admin::Admin,
    /// Leased messages of unfinished sends, by identity, until the replay finds
    /// their sends.
    orphans: HashMap<(u64, u64), MessageIndex>,
    /// See [`Hub::counters`].
    counters: Counters,
}

impl Hub {
    /// An empty hub whose first round has this number.
    pub fn new(limits: HubLimits, first_round: u64, next_queue: QueueNumber) -> Hub {
        Hub {
            limits,
            now_ns: 0,
            sessions: Vec::new(),
            queues: Vec::new(),
            by_name: HashMap::new(),
            by_number: HashMap::new(),
            messages: Messages::default(),
            // Entry 0 is never used: it is the table's own head in the ledger.
            leases: vec![FREE_LEASE],
            free_leases: Vec::new(),
            next_expiry_ns: u64::MAX,
            blocks: Vec::new(),
            free_blocks: Vec::new(),
            chunks: Chunks::default(),
            fills: Vec::new(),
            next_fill: 0,
            share_waiters: Vec::new(),
            starved_until_ns: u64::MAX,
            young_chunks: VecDeque::new(),
            runnable: VecDeque::new(),
            delayed: BinaryHeap::new(),
            moves: moves::Moves::default(),
            next_order: 0,
            ages: VecDeque::new(),
            dirty: Vec::new(),
            ends: Vec::new(),
            round_in_flight: false,
            in_flight: round::InFlight::default(),
            close_wanted: false,
            pressed: false,
            leases_short: false,
            newly_blocked: Vec::new(),
            next_round: first_round,
            admin: admin::Admin::new(next_queue),
            orphans: HashMap::new(),
            counters: Counters::default(),
        }
    }

    /// Says what time it is, in nanoseconds of the monotonic clock.
    pub fn set_now(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
    }

    /// What was done since the hub was made.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Messages in memory; for limits and tests.
    #[cfg(test)]
    pub fn messages_in_memory(&self) -> u32 {
        self.messages.used()
    }

    /// Lease entries that a delivery could use without growing the table.
    #[cfg(test)]
    pub fn free_lease_entries(&self) -> usize {
        self.free_leases.len()
    }

    fn session(&self, slot: SessionSlot) -> &Session {
        self.sessions[slot as usize]
            .as_ref()
            .expect("the caller names open sessions only")
    }

    fn session_mut(&mut self, slot: SessionSlot) -> &mut Session {
        self.sessions[slot as usize]
            .as_mut()
            .expect("the caller names open sessions only")
    }

    fn queue(&self, index: u32) -> &Queue {
        self.queues[index as usize]
            .as_ref()
            .expect("messages and attachments name live queues only")
    }

    fn queue_mut(&mut self, index: u32) -> &mut Queue {
        self.queues[index as usize]
            .as_mut()
            .expect("messages and attachments name live queues only")
    }

    fn add_queue(&mut self, number: QueueNumber, row: QueueRow, next: u64) -> u32 {
        let index = free_index(&mut self.queues);
        self.by_name.insert(row.name.clone(), index);
        self.by_number.insert(number, index);
        self.queues[index as usize] = Some(Queue {
            number,
            row,
            next,
            ready: List::default(),
            later: List::default(),
            again: List::default(),
            dying: List::default(),
            gap: next..next,
            spilling: false,
            known: BTreeMap::new(),
            committed: next,
            reading: None,
            filling: None,
            redrive: None,
            cached_bytes: 0,
            freezing_bytes: 0,
            consumers: Vec::new(),
            producers: 0,
            messages: 0,
            leased: 0,
            sends: 0,
            deliveries: 0,
            acks: 0,
            last_end_ns: 0,
            runnable: false,
        });
        index
    }

    /// Opens a session with such rings, and gives its slot.
    pub fn open_session(&mut self, number: u64, rings: Geometry) -> SessionSlot {
        let slot = free_index(&mut self.sessions);
        self.sessions[slot as usize] = Some(Session {
            number,
            attachments: Vec::new(),
            sends: VecDeque::new(),
            ends: VecDeque::new(),
            answers: VecDeque::new(),
            answer_tail: 0,
            taken_in: 0,
            frozen: 0,
            committed: 0,
            flush: 0,
            ring_bytes: u64::from(rings.submission_bytes),
            inline_max: inline_max_of_delivery_ring(rings.delivery_bytes),
            queued_bytes: 0,
            refused: VecDeque::new(),
            memory: Memory::default(),
            blocked: false,
            silent: Silent::No,
            replay_until: 0,
            dirty: false,
            ended: false,
        });
        slot
    }

    /// Ends a session whose records were all taken in: its leases go back, and
    /// when the rest of it is committed, and nothing that it sent or was shown is
    /// being read, [`Finished::gone`] names it. Its client may go on reading until
    /// [`Hub::reader_gone`].
    pub fn end_session(&mut self, slot: SessionSlot, port: &mut impl Port) {
        if std::mem::replace(&mut self.session_mut(slot).ended, true) {
            return;
        }
        for index in 0..self.session(slot).attachments.len() {
            self.detach(slot, index as u32);
        }
        self.return_leases(slot, port);
        self.finish_replay(slot);
        self.drop_orphans(self.session(slot).number, port);
        self.mark_dirty(slot);
        self.close_wanted = true;
    }

    fn detach(&mut self, slot: SessionSlot, index: u32) {
        let Attachment { queue, purpose, .. } = self.session(slot).attachments[index as usize];
        if queue == NONE {
            return;
        }
        let queue = self.queue_mut(queue);
        match purpose {
            Purpose::Produce => queue.producers -= 1,
            Purpose::Consume => queue
                .consumers
                .retain(|&consumer| consumer != (slot, index)),
        }
    }

    /// Sessions that get nothing more until [`Hub::unblock`], since the last
    /// call: their delivery rings had no room.
    pub fn take_blocked(&mut self) -> Vec<SessionSlot> {
        std::mem::take(&mut self.newly_blocked)
    }

    /// The session's delivery ring has room again.
    pub fn unblock(&mut self, slot: SessionSlot) {
        self.session_mut(slot).blocked = false;
        self.offer_messages(slot);
    }

    /// The session can be given messages that it could not before.
    fn offer_messages(&mut self, slot: SessionSlot) {
        for index in 0..self.session(slot).attachments.len() {
            let Attachment { queue, purpose, .. } = self.session(slot).attachments[index];
            if queue != NONE && purpose == Purpose::Consume {
                self.make_runnable(queue);
            }
        }
    }

    #[inline]
    fn make_runnable(&mut self, index: u32) {
        let queue = self.queue_mut(index);
        if !queue.runnable && (!queue.consumers.is_empty() || queue.diverts()) {
            queue.runnable = true;
            self.runnable.push_back(index);
        }
    }

    #[inline]
    fn mark_dirty(&mut self, slot: SessionSlot) {
        let session = self.session_mut(slot);
        if !session.dirty {
            session.dirty = true;
            self.dirty.push(slot);
        }
    }

    fn use_block(&mut self, block: &Block) -> u32 {
        let index = match self.free_blocks.pop() {
            Some(index) => index,
            None => {
                self.blocks.push(None);
                (self.blocks.len() - 1) as u32
            }
        };
        self.blocks[index as usize] = Some(CachedBlock {
            block: block.clone(),
            users: 0,
        });
        index
    }

    /// Gives back a block that turned out to have no users.
    fn forget_unused_block(&mut self, index: u32) {
        let cached = &mut self.blocks[index as usize];
        if cached.as_ref().is_some_and(|cached| cached.users == 0) {
            *cached = None;
            self.free_blocks.push(index);
        }
    }

    fn put_in_block(&mut self, message: MessageIndex, block: u32, index: u32) {
        let (queue, len) = (self.messages[message].queue, self.messages[message].len);
        self.messages[message].place = Place::Block { block, index };
        self.queue_mut(queue).cached_bytes += memory_of(len);
        if let Some(cached) = &mut self.blocks[block as usize] {
            cached.users += 1;
        }
    }

    /// The message's bytes are not needed in memory any more. Those in a ring
    /// stay its place: the round that stores them reads them there.
    #[inline]
    fn release_block(&mut self, message: MessageIndex) {
        let Place::Block { block, .. } = self.messages[message].place else {
            return;
        };
        let (queue, len) = (self.messages[message].queue, self.messages[message].len);
        self.messages[message].place = Place::Away;
        self.queue_mut(queue).cached_bytes -= memory_of(len);
        if let Some(cached) = &mut self.blocks[block as usize] {
            cached.users -= 1;
        }
        self.forget_unused_block(block);
    }
}

/// What a stored message takes in memory: its payload in a block, unless that is
/// in parts, its entry there, and its place in the slab.
fn memory_of(len: u32) -> usize {
    const OVERHEAD: usize = 128;
    let len = len as usize;
    OVERHEAD + if len > PART_BYTES { 0 } else { len }
}

/// An index of `slots` that is free; makes one.
fn free_index<T>(slots: &mut Vec<Option<T>>) -> u32 {
    let index = slots.iter().position(Option::is_none).unwrap_or_else(|| {
        slots.push(None);
        slots.len() - 1
    });
    index as u32
}
