//! The engines under test, and short ways to fill and read a store.

use ringmain::QueueSettings;
use ringmain_broker::store::block::{Block, BlockBuilder, MessageHead};
use ringmain_broker::store::model::ModelStore;
use ringmain_broker::store::rocks::{RocksOptions, RocksStore};
use ringmain_broker::store::{Batch, LoadedBlock, QueueRow, Store, StoreError, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

pub trait Engine {
    fn store(&self) -> &dyn Store;
    /// Lets go of the handle and opens the store again.
    fn reopen(&mut self);
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
