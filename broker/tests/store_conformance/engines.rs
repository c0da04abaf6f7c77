//! The engines under test, and short ways to fill and read a store.

use ringmain::QueueSettings;
use ringmain_broker::store::block::{Block, BlockBuilder, MessageHead, PART_BYTES};
use ringmain_broker::store::model::ModelStore;
use ringmain_broker::store::parts::{Identity, part_count, part_range};
use ringmain_broker::store::rocks::{RocksOptions, RocksStore};
use ringmain_broker::store::{Batch, LoadedBlock, QueueRow, Store, StoreError, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

pub trait Engine {
    fn store(&self) -> &dyn Store;
    /// Lets go of the handle and opens the store again.
    fn reopen(&mut self);
    /// How many parts of payloads it keeps. Lets go of the handle, opens the store
    /// again, and does not count what opening removes.
    fn parts(&mut self) -> usize;
}

pub struct Model(ModelStore);

impl Model {
    pub fn new() -> Model {
        Model(ModelStore::new())
    }
}

impl Engine for Model {
    fn store(&self) -> &dyn Store {
        &self.0
    }

    fn reopen(&mut self) {
        self.0 = self.0.reopen();
    }

    fn parts(&mut self) -> usize {
        self.reopen();
        self.0.parts()
    }
}

pub struct Rocks {
    store: Option<RocksStore>,
    dir: TempDir,
}

impl Rocks {
    pub fn new() -> Rocks {
        let dir = tempfile::tempdir().unwrap();
        let store = Some(open(dir.path()).unwrap());
        Rocks { store, dir }
    }

    pub fn close(&mut self) {
        self.store = None;
    }

    pub fn try_open(&mut self) -> Result<(), StoreError> {
        self.store = Some(open(self.dir.path())?);
        Ok(())
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The keys of a family of a closed database.
    pub fn keys(&self, family: &str) -> Vec<Box<[u8]>> {
        let families = ["default", "blocks", "marks", "parts"];
        let options = rocksdb::Options::default();
        let db = rocksdb::DB::open_cf_for_read_only(&options, self.database(), families, false);
        let db = db.unwrap();
        let rows = db.iterator_cf(db.cf_handle(family).unwrap(), rocksdb::IteratorMode::Start);
        rows.map(|row| row.unwrap().0).collect()
    }

    /// Where the database itself lies.
    pub fn database(&self) -> PathBuf {
        self.dir().join("rocksdb")
    }

    /// The largest file of the database that ends so.
    pub fn file(&self, ending: &str) -> PathBuf {
        let files = std::fs::read_dir(self.database()).unwrap();
        let paths = files.map(|file| file.unwrap().path());
        paths
            .filter(|path| path.extension().is_some_and(|found| found == ending))
            .max_by_key(|path| path.metadata().unwrap().len())
            .unwrap()
    }
}

impl Engine for Rocks {
    fn store(&self) -> &dyn Store {
        self.store.as_ref().unwrap()
    }

    fn reopen(&mut self) {
        self.close();
        self.try_open().unwrap();
    }

    fn parts(&mut self) -> usize {
        self.reopen();
        self.close();
        let parts = self.keys("parts").len();
        let rows = self.keys("default");
        let count = |prefix: &[u8]| rows.iter().filter(|key| key.starts_with(prefix)).count();
        assert_eq!(count(b"begun/"), 0);
        assert_eq!(count(b"holders/") == 0, parts == 0);
        assert_eq!(count(b"in-parts/") == 0, parts == 0);
        self.try_open().unwrap();
        parts
    }
}

pub fn open(dir: &Path) -> Result<RocksStore, StoreError> {
    RocksStore::open(dir, &RocksOptions { reserve_bytes: 0 })
}

/// What these tests put at a position.
pub fn head(position: u64) -> MessageHead {
    MessageHead {
        session: 40,
        position: position * 64,
        sent_at_ms: 1_700_000_000_000 + position,
        attempts: 0,
    }
}

pub fn payload(position: u64) -> Vec<u8> {
    format!("message {position}").into_bytes()
}

pub fn block(positions: Range<u64>) -> Block {
    let mut builder = BlockBuilder::new();
    for position in positions {
        builder.push(head(position), &payload(position));
    }
    builder.finish()
}

pub fn append(queue: u32, positions: Range<u64>) -> Write {
    Write::Append {
        queue,
        first: positions.start,
        block: block(positions),
    }
}

/// Length of a payload in parts: two whole ones and a short one.
pub const LARGE: usize = 2 * PART_BYTES + 1000;

pub fn identity(head: MessageHead) -> Identity {
    (head.session, head.position)
}

/// What these tests send in part `part` of a message.
pub fn part_bytes(message: Identity, len: usize, part: u32) -> Vec<u8> {
    let byte = message.1 as u8 ^ part as u8 ^ 0x55;
    vec![byte; part_range(len, part).len()]
}

pub fn put_parts(store: &dyn Store, message: Identity, len: usize) {
    for part in 0..part_count(len) {
        let bytes = part_bytes(message, len, part);
        store.put_part(message, part, &bytes).unwrap();
    }
}

/// Appends a message of `len` bytes in parts as the queue's message `first`.
pub fn append_in_parts(queue: u32, first: u64, head: MessageHead, len: usize) -> Write {
    let mut builder = BlockBuilder::new();
    builder.push_in_parts(head, None, len as u32);
    Write::Append {
        queue,
        first,
        block: builder.finish(),
    }
}

pub fn assert_parts(store: &dyn Store, message: Identity, len: usize) {
    for part in 0..part_count(len) {
        let found = store.read_part(message, part).unwrap();
        assert!(
            found == part_bytes(message, len, part),
            "{message:?}, {part}"
        );
    }
    assert_no_part(store, message, part_count(len));
}

pub fn assert_no_part(store: &dyn Store, message: Identity, part: u32) {
    match store.read_part(message, part) {
        Err(StoreError::Corrupt(text)) => assert!(text.contains("is missing"), "{text}"),
        other => panic!("{message:?}, {part}: {other:?}"),
    }
}

pub fn settle(queue: u32, positions: impl IntoIterator<Item = u64>) -> Write {
    Write::Settle {
        queue,
        positions: positions.into_iter().collect(),
    }
}

pub fn row(name: &str) -> QueueRow {
    QueueRow {
        name: name.to_owned(),
        settings: QueueSettings::default(),
        created_ms: 1_700_000_000_000,
    }
}

pub fn put(queue: u32, name: &str) -> Write {
    Write::PutQueue {
        queue,
        row: row(name),
    }
}

pub fn try_commit(store: &dyn Store, writes: Vec<Write>) -> Result<(), StoreError> {
    let round = store.committed_round() + 1;
    store.commit(Batch { round, writes })
}

pub fn commit(store: &dyn Store, writes: Vec<Write>) {
    try_commit(store, writes).unwrap();
}

/// First, next and the number of unsettled messages of a queue.
pub fn cursor(store: &dyn Store, queue: u32) -> (u64, u64, u64) {
    let queues = store.queues().unwrap();
    let found = queues.iter().find(|found| found.queue == queue).unwrap();
    (found.first, found.next, found.unsettled)
}

/// Positions of the unsettled messages. Checks that each message is the one that
/// belongs there.
pub fn unsettled(blocks: &[LoadedBlock]) -> Vec<u64> {
    let mut positions = Vec::new();
    for loaded in blocks {
        for index in 0..loaded.block.len() {
            let position = loaded.first + u64::from(index);
            assert_eq!(loaded.block.message(index), head(position));
            assert_eq!(loaded.block.payload(index), payload(position));
            if !loaded.is_settled(index) {
                positions.push(position);
            }
        }
    }
    positions
}

pub fn read_from(store: &dyn Store, queue: u32, from: u64) -> Vec<u64> {
    unsettled(&store.read(queue, from, usize::MAX).unwrap())
}

pub fn read_all(store: &dyn Store, queue: u32) -> Vec<u64> {
    read_from(store, queue, 0)
}
