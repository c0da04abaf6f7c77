//! The store on RocksDB. Nothing outside of this module knows that it is there.
//!
//! # What lies where
//!
//! ```text
//! <data folder>/lock       held while a broker uses the folder
//! <data folder>/synced     number of the last synced round (the mark)
//! <data folder>/rocksdb/   the database
//!
//! column family   key                       value
//! default         meta/format               u32: FORMAT
//!                 meta/round                u64: the last committed round
//!                 meta/sessions             u64: the first session number never reserved
//!                 meta/queues               u32: the next queue's number
//!                 queue/<queue>             JSON: name, settings, time of creation
//!                 cursor/<queue>            3 x u64: first, next, unsettled
//!                 begun/<message>           nothing: it has parts, and no queue yet
//!                 holders/<message>         u32: in how many places it lies
//!                 in-parts/<queue><position>  3 x u64: message, length
//! blocks          <queue><first position>   a block
//! marks           <queue><first position>   what happened to the block's messages
//! parts           <message><part>           a piece of a payload
//! ```
//!
//! A `<message>` is *(session, position)*, its identity. Numbers in keys are big-endian, so that they sort; in values little-endian.
//! A change of any of this takes a new [`FORMAT`].
//!
//! # Why it does not slow down as a queue is used
//!
//! A block is put once and deleted once, when the last of its messages is
//! settled: one tombstone for up to a thousand messages, which a *single delete*
//! lets vanish together with the block at the next flush or compaction. Until
//! then nobody walks over them: no read starts before the queue's first unsettled
//! message, and behind it the holes are known and jumped over. What has
//! become of a block's messages is one row beside it, found by its key.
//!
//! # What must not be changed lightly
//!
//! - Keys of blocks are never reused while RocksDB may hold an older one: a
//!   single delete of a key that was put twice is undefined.
//! - The database is examined read-only before it is opened for writing. Opening
//!   writes out what the log gave and drops the log, so whatever is found wrong
//!   later could no longer be looked at.

mod cache;
mod engine;
mod folder;
mod holes;
mod keys;
mod mark;
mod marks;
mod parts;
mod plan;
mod view;
mod walk;

use self::cache::Cache;
use self::engine::Engine;
use self::folder::Folder;
use self::mark::MarkFile;
use self::parts::Begun;
use self::plan::Plan;
use self::view::View;
use self::walk::Walk;
use super::parts::{Identity, check_part};
use super::{Batch, LoadedBlock, QueueNumber, Store, StoreError, StoredQueue};
use crate::crash::crash_point;
use bytes::Bytes;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// The version of the data folder that this version of ringmain reads and
/// writes.
pub const FORMAT: u32 = 1;
/// The version of RocksDB that is built in.
pub const ROCKSDB_VERSION: &str = "11.8.1";

/// Once deleted blocks or parts of this many bytes lie in the database, their
/// tombstones are flushed, so that compaction gives the room back. Without this a queue
/// that is only drained, as on a full disk, would never give back anything.
const RECLAIM_BYTES: u64 = 256 << 20;

/// How a [`RocksStore`] is opened.
#[derive(Debug, Clone, Copy)]
pub struct RocksOptions {
    /// How much of the file system's free space batches may not take, in bytes.
    /// Settling, deleting and RocksDB's own compaction live on it.
    pub reserve_bytes: u64,
}

/// The store on RocksDB.
pub struct RocksStore {
    // Closed in this order: the folder stays locked until the database is shut.
    engine: Engine,
    folder: Folder,
    reserve_bytes: u64,
    /// What reads may see: the state as of the last commit.
    view: Mutex<View>,
    /// Blocks that are being settled. Locked for a whole commit.
    cache: Mutex<Cache>,
    /// Messages in parts that are still to be appended. Locked for a whole commit,
    /// after `cache`.
    begun: Mutex<Begun>,
    committed: AtomicU64,
    sync: Mutex<Sync>,
    /// Bytes of deleted blocks whose tombstones may still be in memory.
    dead_bytes: AtomicU64,
    /// The same for parts.
    dead_part_bytes: AtomicU64,
    /// Why a commit or sync failed, after which nothing works any more.
    failed: OnceLock<String>,
}

struct Sync {
    mark: MarkFile,
    round: u64,
}

impl RocksStore {
    /// Opens the store in a data folder, which is created if need be. What is
    /// found there is behind a sync when this returns.
    ///
    /// # Errors
    ///
    /// - [`StoreError::InUse`]: another broker has it open;
    /// - [`StoreError::Version`]: a later version of ringmain wrote it;
    /// - [`StoreError::Corrupt`]: it is damaged, or rounds that were synced are
    ///   missing, which is noticed before anything in the folder is changed;
    /// - [`StoreError::Failed`]: the folder or its files cannot be used.
    pub fn open(dir: &Path, options: &RocksOptions) -> Result<RocksStore, StoreError> {
        let folder = Folder::lock(dir)?;
        let mark = MarkFile::open(&folder.path("synced"))?;
        let path = folder.path("rocksdb");
        engine::examine(&path, mark.found())?;
        folder.make(&path)?;
        crash_point("open the database");
        let engine = Engine::open(path)?;
        folder.sync()?;
        let (view, round) = View::load(&engine)?;
        mark.check(round)?;
        mark.write(round);
        parts::delete_orphans(&engine)?;
        Ok(RocksStore {
            engine,
            folder,
            reserve_bytes: options.reserve_bytes,
            view: Mutex::new(view),
            cache: Mutex::default(),
            begun: Mutex::default(),
            committed: AtomicU64::new(round),
            sync: Mutex::new(Sync { mark, round }),
            dead_bytes: AtomicU64::new(0),
            dead_part_bytes: AtomicU64::new(0),
            failed: OnceLock::new(),
        })
    }

    fn check(&self) -> Result<(), StoreError> {
        match self.failed.get() {
            Some(why) => Err(StoreError::Failed(format!(
                "nothing more is done after an earlier failure: {why}"
            ))),
            None => Ok(()),
        }
    }

    /// Remembers a failure of a commit or sync, the first one.
    fn failing<T>(&self, result: Result<T, StoreError>) -> Result<T, StoreError> {
        if let Err(error) = &result {
            // A later failure follows from the first and says less.
            let _ = self.failed.set(error.to_string());
        }
        result
    }

    fn try_commit(&self, batch: Batch) -> Result<(), StoreError> {
        let mut cache = lock(&self.cache);
        let last = self.committed.load(Ordering::Relaxed);
        if batch.round <= last {
            return Err(StoreError::Failed(format!(
                "round {} came after round {last}",
                batch.round
            )));
        }
        let mut begun = lock(&self.begun);
        let mut plan = Plan::new(&self.engine, &self.view, &mut cache, &mut begun);
        for write in batch.writes {
            plan.apply(write)?;
        }
        let changes = plan.encode(batch.round)?;
        crash_point("write a batch");
        self.engine.write(changes)?;
        let done = plan.publish(&self.engine);
        self.dead_bytes
            .fetch_add(done.dead_bytes, Ordering::Relaxed);
        self.dead_part_bytes
            .fetch_add(done.dead_part_bytes, Ordering::Relaxed);
        // Release: pairs with the Acquire in `try_sync`, which may then count on
        // the log holding this round.
        self.committed.store(batch.round, Ordering::Release);
        Ok(())
    }

    fn try_sync(&self) -> Result<u64, StoreError> {
        let mut sync = lock(&self.sync);
        // Before the log is synced: a round that commits meanwhile may be in
        // what is synced, or not.
        let committed = self.committed.load(Ordering::Acquire);
        if committed > sync.round {
            crash_point("sync the store");
            self.engine.sync()?;
            sync.round = committed;
            sync.mark.write(committed);
            self.reclaim()?;
        }
        Ok(sync.round)
    }

    fn reclaim(&self) -> Result<(), StoreError> {
        if self.dead_bytes.load(Ordering::Relaxed) >= RECLAIM_BYTES {
            self.dead_bytes.store(0, Ordering::Relaxed);
            self.engine.flush_blocks()?;
        }
        if self.dead_part_bytes.load(Ordering::Relaxed) >= RECLAIM_BYTES {
            self.dead_part_bytes.store(0, Ordering::Relaxed);
            self.engine.flush_parts()?;
        }
        Ok(())
    }

    fn try_put_part(&self, message: Identity, part: u32, bytes: &[u8]) -> Result<(), StoreError> {
        check_part(message, part, bytes.len())?;
        parts::put(&self.engine, &mut lock(&self.begun), message, part, bytes)
    }
}

impl Store for RocksStore {
    fn committed_round(&self) -> u64 {
        self.committed.load(Ordering::Acquire)
    }

    fn commit(&self, batch: Batch) -> Result<(), StoreError> {
        self.check()?;
        self.failing(self.try_commit(batch))
    }

    fn put_part(&self, message: Identity, part: u32, bytes: &[u8]) -> Result<(), StoreError> {
        self.check()?;
        self.failing(self.try_put_part(message, part, bytes))
    }

    fn read_part(&self, message: Identity, part: u32) -> Result<Bytes, StoreError> {
        self.check()?;
        parts::read(&self.engine, message, part)
    }

    fn sync(&self) -> Result<u64, StoreError> {
        self.check()?;
        self.failing(self.try_sync())
    }

    fn room(&self) -> Result<u64, StoreError> {
        self.check()?;
        // What lies in memory will be written a second time.
        let taken = self
            .reserve_bytes
            .saturating_add(self.engine.memory_bytes()?);
        Ok(self.folder.free_bytes()?.saturating_sub(taken))
    }

    fn queues(&self) -> Result<Vec<StoredQueue>, StoreError> {
        self.check()?;
        Ok(lock(&self.view).queues())
    }

    fn next_queue(&self) -> QueueNumber {
        lock(&self.view).next_queue
    }

    fn next_session(&self) -> u64 {
        lock(&self.view).next_session
    }

    fn read(
        &self,
        queue: QueueNumber,
        from: u64,
        bytes_max: usize,
    ) -> Result<Vec<LoadedBlock>, StoreError> {
        self.check()?;
        let view = lock(&self.view);
        let Some(cursor) = view.cursor(queue) else {
            return Ok(Vec::new());
        };
        // Taken after the cursor: all below its `next` is in the snapshot, or
        // was deleted. And under its lock: so at most one round lies between
        // them, and not so many that nothing of what the cursor spans is left.
        // One snapshot for blocks and marks, or a block deleted meanwhile would
        // seem to have none.
        let snapshot = self.engine.snapshot();
        drop(view);
        let mut walk = Walk::new(
            &self.engine,
            Some(&snapshot),
            &self.view,
            queue,
            cursor.next,
        );
        let mut at = from.max(cursor.first);
        let mut loaded = Vec::new();
        let mut bytes = 0;
        while let Some(found) = walk.seek(at)? {
            bytes += found.payload;
            if bytes > bytes_max && !loaded.is_empty() {
                break;
            }
            at = found.end();
            loaded.push(walk.load(found)?);
        }
        Ok(loaded)
    }
}

/// Locks what no panic leaves half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    /// The crate can't be asked: the lock file knows what is built.
    #[test]
    fn the_version_of_rocksdb_is_that_of_the_lock_file() {
        let lock = include_str!("../../../Cargo.lock");
        let (_, package) = lock.split_once("name = \"librocksdb-sys\"").unwrap();
        let version = package.split('"').nth(1).unwrap();
        assert_eq!(version.split_once('+').unwrap().1, ROCKSDB_VERSION);
    }
}
