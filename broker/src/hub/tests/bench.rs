//! The hub's surroundings over vectors: a port that remembers what it was told,
//! the store in memory, and a clock that stands still until it is set.

use crate::hub::{
    Close, Delivery, Fill, Finished, FrozenRound, History, Hub, HubLimits, LeaseEntry, LeaseRow,
    LeaseState, Nack, Payload, Port, RestoredSession, SessionSlot, Shown, Source,
};
use crate::service::pack_moves;
use crate::store::block::{Block, BlockBuilder};
use crate::store::model::ModelStore;
use crate::store::{Batch, QueueNumber, Store, Write};
use ringmain::QueueSettings;
use ringmain::control::Purpose;
use ringmain::record::{self, Answer};
use ringmain_ring::layout::Geometry;
use std::collections::{BTreeMap, HashMap, HashSet};

/// How long a lease lasts in these tests.
pub const LEASE_NS: u64 = 100_000_000;
pub const LINGER: Close = Close::Due {
    linger_ns: 2_000_000,
};
const RINGS: Geometry = Geometry {
    submission_bytes: 4096,
    delivery_bytes: 4096,
    answer_bytes: 4096,
};
/// What the clock on the wall says.
pub const WALL_MS: u64 = 5_000_000;
/// Bytes that every record takes here.
const RECORD_BYTES: u64 = 64;

/// A delivery as a consumer sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Got {
    pub text: String,
    pub entry: LeaseEntry,
    pub position: u64,
    pub attempts: u16,
    pub redelivered: bool,
}

impl Got {
    pub fn lease(&self) -> record::Lease {
        record::Lease {
            delivery_position: self.position,
            entry: self.entry,
        }
    }
}

/// What a record of a session says, for a successor to read again.
#[derive(Debug, Clone)]
enum Said {
    Send(u32, String),
    Ack(record::Lease),
    Nack(record::Lease, u64, Nack),
}

/// The port.
#[derive(Default)]
pub struct Ports {
    /// Deliveries by session, oldest first.
    pub delivered: HashMap<SessionSlot, Vec<Got>>,
    /// Positions that the next delivery of a session gets.
    next: HashMap<SessionSlot, u64>,
    /// Room for so many more deliveries; any number if not here.
    pub room: HashMap<SessionSlot, u32>,
    /// Deliveries that were taken.
    pub taken: HashSet<(SessionSlot, u64)>,
    pub answers: HashMap<SessionSlot, Vec<Answer>>,
    pub reads: Vec<(QueueNumber, u64)>,
    /// The ledger's lease table.
    pub rows: BTreeMap<LeaseEntry, LeaseRow>,
    pub entries: u32,
    pub entries_max: u32,
    pub deleted: Vec<(SessionSlot, u32)>,
    /// What lies in the submission rings.
    texts: HashMap<(SessionSlot, u32), String>,
}

impl Port for Ports {
    fn deliver(&mut self, delivery: &Delivery<'_>) -> Option<u64> {
        if let Some(room) = self.room.get_mut(&delivery.to) {
            *room = room.checked_sub(1)?;
        }
        let text = match delivery.payload {
            Payload::Ring { slot, offset, .. } => self.texts[&(slot, offset)].clone(),
            Payload::Block(bytes) => String::from_utf8(bytes.to_vec()).unwrap(),
            Payload::Chunk { .. } | Payload::Filled => panic!("there are no chunks here"),
        };
        let next = self.next.entry(delivery.to).or_insert(0);
        let position = *next;
        *next += RECORD_BYTES;
        self.delivered.entry(delivery.to).or_default().push(Got {
            text,
            entry: delivery.entry,
            position,
            attempts: delivery.history.attempts(),
            redelivered: delivery.history.was_leased(),
        });
        let row = LeaseRow {
            entry: delivery.entry,
            state: LeaseState::Leased,
            history: delivery.history,
            queue: delivery.queue,
            queue_position: delivery.queue_position,
            session: delivery.session,
            position: delivery.position,
            holder: delivery.holder,
            delivery_position: position,
            deadline_ns: delivery.deadline_ns,
            shown: delivery.shown,
        };
        let before = self.rows.insert(delivery.entry, row);
        assert!(
            before.is_none(),
            "an entry was given away twice: {before:?}"
        );
        Some(position)
    }

    fn taken(&self, slot: SessionSlot, delivery_position: u64) -> bool {
        self.taken.contains(&(slot, delivery_position))
    }

    fn lease_state(&mut self, entry: LeaseEntry, state: LeaseState, history: History) {
        if state == LeaseState::Free {
            self.rows.remove(&entry);
            return;
        }
        let row = self.rows.get_mut(&entry).expect("a row in use");
        (row.state, row.history) = (state, history);
    }

    fn lease_deadline(&mut self, entry: LeaseEntry, deadline_ns: u64) {
        self.rows.get_mut(&entry).expect("a row in use").deadline_ns = deadline_ns;
    }

    fn lease_position(&mut self, entry: LeaseEntry, queue_position: u64) {
        self.rows
            .get_mut(&entry)
            .expect("a row in use")
            .queue_position = queue_position;
    }

    fn lease_unshown(&mut self, entry: LeaseEntry) {
        self.rows.get_mut(&entry).expect("a row in use").shown = Shown::No;
    }

    fn can_read(&mut self, _: SessionSlot, _: SessionSlot, _: u32) -> bool {
        true
    }

    fn grow_inbound(&mut self, _: SessionSlot, _: u32) -> Option<u32> {
        None
    }

    fn fill(&mut self, fill: Fill) {
        panic!("there are no chunks here: {fill:?}");
    }

    fn return_chunk(&mut self, slot: SessionSlot, at: record::Chunk, _: u64) {
        panic!("there are no chunks here: {slot} {at:?}");
    }

    fn grow_leases(&mut self) -> Option<u32> {
        let more = (self.entries + 4).min(self.entries_max);
        (more > self.entries).then(|| {
            self.entries = more;
            more
        })
    }

    fn answer(&mut self, slot: SessionSlot, answer: Answer) -> u64 {
        let answers = self.answers.entry(slot).or_default();
        answers.push(answer);
        answers.len() as u64 * record::answer::BYTES as u64
    }

    fn queue_deleted(&mut self, slot: SessionSlot, attachment: u32) {
        self.deleted.push((slot, attachment));
    }

    fn wall_ms(&self) -> u64 {
        WALL_MS
    }

    fn read(&mut self, queue: QueueNumber, from: u64) {
        self.reads.push((queue, from));
    }
}

/// A session as its client knows it.
#[derive(Debug, Default, Clone)]
struct Client {
    number: u64,
    /// Where its next record goes.
    next: u64,
    said: Vec<(u64, Said)>,
    attachments: Vec<(QueueNumber, Purpose, u32)>,
    committed: u64,
    answer_tail: u64,
}

/// See the module's text.
pub struct Bench {
    pub hub: Hub,
    pub port: Ports,
    pub store: ModelStore,
    clients: HashMap<SessionSlot, Client>,
    pub now_ns: u64,
    cache_bytes: usize,
    next_session: u64,
    in_flight: Option<FrozenRound>,
    /// A session whose records a successor can't take in at once.
    pub stalled: Option<SessionSlot>,
}

fn limits(cache_bytes: usize) -> HubLimits {
    HubLimits {
        cache_bytes,
        queues_max: 3,
    }
}

impl Bench {
    /// With room for the whole backlog in memory.
    pub fn new() -> Bench {
        Bench::with_cache(1 << 20)
    }

    pub fn with_cache(cache_bytes: usize) -> Bench {
        let mut bench = Bench {
            hub: Hub::new(limits(cache_bytes), 1, 1),
            port: Ports {
                entries_max: 1000,
                entries: 1,
                ..Ports::default()
            },
            store: ModelStore::new(),
            clients: HashMap::new(),
            now_ns: 1_000_000_000,
            cache_bytes,
            next_session: 1,
            in_flight: None,
            stalled: None,
        };
        bench.set_now(bench.now_ns);
        bench
    }

    /// With a queue `jobs`, a producer and a consumer with this window.
    pub fn with_queue(window: u32) -> (Bench, SessionSlot, SessionSlot) {
        let mut bench = Bench::new();
        bench.create("jobs");
        let producer = bench.producer("jobs");
        let consumer = bench.consumer("jobs", window);
        (bench, producer, consumer)
    }

    pub fn set_now(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        self.hub.set_now(now_ns);
    }

    /// Lets time go by, and what is due be done.
    pub fn wait(&mut self, ns: u64) {
        self.set_now(self.now_ns + ns);
        self.hub.run_timers(&mut self.port);
        self.hub.check();
    }

    pub fn create(&mut self, name: &str) {
        self.create_with(name, 0);
    }

    /// A queue with a maximum of attempts.
    pub fn create_with(&mut self, name: &str, max_attempts: u16) {
        let settings = QueueSettings {
            visibility_timeout_ms: LEASE_NS / 1_000_000,
            max_message_bytes: 15 * 1024,
            max_attempts,
            ..QueueSettings::default()
        };
        assert!(self.hub.create_queue(name, settings, 1, 1).is_none());
        assert_eq!(self.round(Close::All).unwrap().admin.len(), 1);
    }

    pub fn open(&mut self) -> SessionSlot {
        let number = self.next_session;
        self.next_session += 1;
        let slot = self.hub.open_session(number, RINGS);
        let client = Client {
            number,
            ..Client::default()
        };
        self.clients.insert(slot, client);
        slot
    }

    pub fn attach(&mut self, slot: SessionSlot, name: &str, purpose: Purpose, window: u32) {
        let (index, queue, _) = self.hub.attach(slot, name, purpose, window).unwrap();
        let client = self.clients.get_mut(&slot).unwrap();
        assert_eq!(index as usize, client.attachments.len());
        client.attachments.push((queue, purpose, window));
    }

    pub fn producer(&mut self, name: &str) -> SessionSlot {
        let slot = self.open();
        self.attach(slot, name, Purpose::Produce, 0);
        slot
    }

    pub fn consumer(&mut self, name: &str, window: u32) -> SessionSlot {
        let slot = self.open();
        self.attach(slot, name, Purpose::Consume, window);
        slot
    }

    fn say(&mut self, slot: SessionSlot, said: Said) -> u64 {
        let client = self.clients.get_mut(&slot).unwrap();
        let position = client.next;
        client.next += RECORD_BYTES;
        client.said.push((position, said.clone()));
        self.hear(slot, position, &said);
        position
    }

    /// The hub takes the record in.
    fn hear(&mut self, slot: SessionSlot, position: u64, said: &Said) {
        let (hub, port) = (&mut self.hub, &mut self.port);
        match said {
            Said::Send(attachment, text) => {
                let offset = (position + 24) as u32;
                port.texts.insert((slot, offset), text.clone());
                let send = record::Send {
                    attachment: *attachment,
                    sent_at_ms: 7,
                    place: record::Place::Inline {
                        offset,
                        len: text.len() as u32,
                    },
                };
                hub.send(slot, position, &send, port).unwrap();
            }
            Said::Ack(lease) => hub.ack(slot, position, *lease, port),
            Said::Nack(lease, delay_ms, nack) => {
                hub.nack(slot, position, *lease, *delay_ms, *nack, port);
            }
        }
        hub.taken_in(slot, position + RECORD_BYTES);
        hub.check();
    }

    /// Sends to the session's first attachment.
    pub fn send(&mut self, slot: SessionSlot, text: &str) -> u64 {
        self.say(slot, Said::Send(0, text.to_owned()))
    }

    pub fn send_to(&mut self, slot: SessionSlot, attachment: u32, text: &str) -> u64 {
        self.say(slot, Said::Send(attachment, text.to_owned()))
    }

    pub fn ack(&mut self, slot: SessionSlot, got: &Got) -> u64 {
        self.say(slot, Said::Ack(got.lease()))
    }

    pub fn ack_lease(&mut self, slot: SessionSlot, lease: record::Lease) {
        self.say(slot, Said::Ack(lease));
    }

    pub fn nack(&mut self, slot: SessionSlot, got: &Got, delay_ms: u64, counted: bool) {
        let nack = if counted {
            Nack::Counted
        } else {
            Nack::Uncounted
        };
        self.say(slot, Said::Nack(got.lease(), delay_ms, nack));
    }

    pub fn reject(&mut self, slot: SessionSlot, got: &Got) {
        self.say(slot, Said::Nack(got.lease(), 0, Nack::Rejected));
    }

    pub fn extend(&mut self, slot: SessionSlot, got: &Got, duration_ms: u64) {
        let position = self.clients[&slot].next;
        self.hub
            .extend(slot, position, got.lease(), duration_ms, &mut self.port);
    }

    pub fn flush(&mut self, slot: SessionSlot) {
        let end = self.clients[&slot].next;
        self.hub.flush(slot, end);
    }

    pub fn end(&mut self, slot: SessionSlot) {
        self.hub.end_session(slot, &mut self.port);
        self.hub.reader_gone(slot, &mut self.port);
        self.hub.check();
    }

    /// Delivers all that can be, without reads.
    pub fn dispatch(&mut self) {
        while self.hub.dispatch(&mut self.port) {}
        self.hub.check();
    }

    /// Delivers all that can be, and reads what that takes.
    pub fn pump(&mut self) {
        self.dispatch();
        while !self.port.reads.is_empty() {
            self.read_all(usize::MAX);
            self.dispatch();
        }
    }

    /// Does the reads that were asked for.
    pub fn read_all(&mut self, bytes_max: usize) {
        for (queue, from) in std::mem::take(&mut self.port.reads) {
            let blocks = self.store.read(queue, from, bytes_max).unwrap();
            self.hub.loaded(queue, from, &blocks);
            self.hub.check();
        }
    }

    /// What the consumer has got since the last call.
    pub fn got(&mut self, slot: SessionSlot) -> Vec<Got> {
        self.pump();
        self.port.delivered.remove(&slot).unwrap_or_default()
    }

    /// The same, as texts.
    pub fn texts(&mut self, slot: SessionSlot) -> Vec<String> {
        self.got(slot).into_iter().map(|got| got.text).collect()
    }

    /// Marks deliveries as taken.
    pub fn take(&mut self, slot: SessionSlot, got: &[Got]) {
        self.port
            .taken
            .extend(got.iter().map(|got| (slot, got.position)));
    }

    pub fn answers(&mut self, slot: SessionSlot) -> Vec<Answer> {
        self.port.answers.remove(&slot).unwrap_or_default()
    }

    /// Closes a round. Returns whether there was anything.
    pub fn close(&mut self, close: Close) -> bool {
        self.in_flight = self.hub.close(close, &mut self.port);
        self.hub.check();
        self.in_flight.is_some()
    }

    /// What the round in flight writes to the store.
    pub fn frozen(&self) -> &FrozenRound {
        self.in_flight.as_ref().unwrap()
    }

    /// The store commits the round that was closed: the blocks.
    pub fn commit(&mut self) -> Vec<(usize, Block)> {
        let frozen = self.in_flight.take().unwrap();
        let mut blocks = Vec::new();
        let mut writes = Vec::new();
        for (index, append) in frozen.appends.iter().enumerate() {
            let mut builder = BlockBuilder::new();
            for message in &append.messages {
                let Source::Ring { slot, offset } = message.source else {
                    panic!("there are no chunks here: {message:?}");
                };
                let text = &self.port.texts[&(slot, offset)];
                builder.push_with(message.head, None, text.len(), |bytes| {
                    bytes.copy_from_slice(text.as_bytes())
                });
            }
            let block = builder.finish();
            let (queue, first) = (append.queue, append.first);
            writes.push(Write::Append {
                queue,
                first,
                block: block.clone(),
            });
            blocks.push((index, block));
        }
        for (queue, first, block) in pack_moves(&frozen.moves) {
            writes.push(Write::Append {
                queue,
                first,
                block,
            });
        }
        writes.extend(frozen.writes);
        if !writes.is_empty() {
            let round = self.hub.round_number();
            self.store.commit(Batch { round, writes }).unwrap();
        }
        blocks
    }

    /// The round's steps after the commit.
    pub fn finish(&mut self, blocks: &[(usize, Block)]) -> Finished {
        for part in self.hub.round_parts() {
            let client = self.clients.get_mut(&part.slot).unwrap();
            (client.committed, client.answer_tail) = (part.end, part.answer_tail);
        }
        let finished = self.hub.finish(blocks, &mut self.port);
        for slot in &finished.gone {
            self.clients.remove(slot);
        }
        self.hub.check();
        finished
    }

    /// Closes, commits and finishes a round.
    pub fn round(&mut self, close: Close) -> Option<Finished> {
        self.close(close).then(|| {
            let blocks = self.commit();
            self.finish(&blocks)
        })
    }

    pub fn committed(&self, slot: SessionSlot) -> u64 {
        self.clients[&slot].committed
    }

    /// Texts that the store holds unsettled, in order.
    pub fn stored(&self) -> Vec<String> {
        let mut texts = Vec::new();
        for queue in self.store.queues().unwrap() {
            for block in self.store.read(queue.queue, 0, usize::MAX).unwrap() {
                let unsettled = (0..block.block.len()).filter(|&index| !block.is_settled(index));
                texts.extend(
                    unsettled.map(|index| {
                        String::from_utf8(block.block.payload(index).to_vec()).unwrap()
                    }),
                );
            }
        }
        texts
    }

    /// How many lease entries are in use.
    pub fn entries_in_use(&self) -> usize {
        self.port.rows.len()
    }

    /// The client has damaged its ring: none of its records is found again.
    pub fn forget_records(&mut self, slot: SessionSlot) {
        self.clients.get_mut(&slot).unwrap().said.clear();
    }

    /// A successor takes over, from what the store, the rows and the rings hold.
    /// Gives each session's new slot.
    pub fn restart(&mut self) -> HashMap<SessionSlot, SessionSlot> {
        let round = self.store.committed_round().max(self.hub.round_number()) + 1;
        self.hub = Hub::new(limits(self.cache_bytes), round, self.store.next_queue());
        self.hub.set_now(self.now_ns);
        self.in_flight = None;
        self.port.reads.clear();
        for queue in self.store.queues().unwrap() {
            self.hub.restore_queue(queue);
        }
        let mut old: Vec<(SessionSlot, Client)> =
            std::mem::take(&mut self.clients).into_iter().collect();
        old.sort_by_key(|(_, client)| client.number);
        let mut slots = HashMap::new();
        let mut moved = Ports {
            entries: self.port.entries,
            entries_max: self.port.entries_max,
            rows: std::mem::take(&mut self.port.rows),
            ..Ports::default()
        };
        for (before, client) in old {
            let slot = self.hub.restore_session(&RestoredSession {
                number: client.number,
                rings: RINGS,
                outbound_bytes: 0,
                inbound: Vec::new(),
                committed: client.committed,
                answer_tail: client.answer_tail,
                attachments: client.attachments.clone(),
            });
            moved
                .next
                .insert(slot, self.port.next.get(&before).copied().unwrap_or(0));
            let taken = self.port.taken.iter().filter(|(slot, _)| *slot == before);
            moved
                .taken
                .extend(taken.map(|&(_, position)| (slot, position)));
            self.hub.report_deleted_queues(slot, &mut moved);
            self.clients.insert(slot, client);
            slots.insert(before, slot);
        }
        self.port = moved;
        let rows: Vec<LeaseRow> = self.port.rows.values().copied().collect();
        self.hub
            .restore_leases(self.port.entries, &rows, &mut self.port);
        self.replay();
        let behind = self.stalled.map(|slot| (slot, self.clients[&slot].next));
        self.hub.finish_restore(behind.as_slice());
        self.hub.check();
        slots
    }

    fn replay(&mut self) {
        let mut slots: Vec<SessionSlot> = self.clients.keys().copied().collect();
        slots.sort_unstable();
        slots.retain(|&slot| Some(slot) != self.stalled);
        for slot in slots {
            self.catch_up(slot);
        }
    }

    /// The session's records that are not committed are taken in again.
    pub fn catch_up(&mut self, slot: SessionSlot) {
        let client = &self.clients[&slot];
        let committed = client.committed;
        let rest = client.said.iter();
        let rest = rest.filter(|(position, _)| *position >= committed);
        for (position, said) in rest.cloned().collect::<Vec<_>>() {
            self.hear(slot, position, &said);
        }
    }

    /// Commits all that is left, and checks that nothing is.
    pub fn check_empty(&mut self) {
        while self.round(Close::All).is_some() {}
        assert_eq!(
            self.hub.messages_in_memory(),
            0,
            "I7: messages are left in memory"
        );
        assert_eq!(self.entries_in_use(), 0, "I7: lease entries are left");
        assert_eq!(self.hub.free_lease_entries() as u32, self.port.entries - 1);
        assert_eq!(self.hub.cached_bytes(), 0);
        assert_eq!(self.stored(), [""; 0]);
        let (_, messages, leased) = self.hub.totals();
        assert_eq!((messages, leased), (0, 0));
    }
}
