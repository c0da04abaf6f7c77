//! The store in memory: plain maps, slow and obviously right. Tests compare
//! other engines against it, and the simulation runs on it, with failures and
//! power cuts at will.

use super::block::Block;
use super::parts::{self, Identity};
use super::{Batch, LoadedBlock, QueueNumber, QueueRow, Store, StoreError, StoredQueue, Write};
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What becomes of a commit or sync that reports an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It took no effect.
    Lost,
    /// It took effect all the same.
    Applied,
}

/// The engine in memory.
///
/// It stands for the process's handle and the disk at once: [`reopen`] and
/// [`power_cut`] give the handle that a later process would get.
///
/// [`reopen`]: ModelStore::reopen
/// [`power_cut`]: ModelStore::power_cut
#[derive(Debug)]
pub struct ModelStore {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    committed: State,
    /// `committed` as of the last sync.
    synced: State,
    /// What was written since, in order.
    unsynced: Vec<Change>,
    room: u64,
    commit_fault: Option<Fault>,
    sync_fault: Option<Fault>,
    failed: bool,
}

#[derive(Debug, Clone)]
enum Change {
    Batch(Batch),
    Part(Identity, u32, Bytes),
}

#[derive(Debug, Clone)]
struct State {
    round: u64,
    next_session: u64,
    next_queue: QueueNumber,
    queues: BTreeMap<QueueNumber, Queue>,
    parts: BTreeMap<Identity, BTreeMap<u32, Bytes>>,
}

#[derive(Debug, Clone)]
struct Queue {
    row: QueueRow,
    next: u64,
    /// By the position of the first message.
    blocks: BTreeMap<u64, Entry>,
}

#[derive(Debug, Clone)]
struct Entry {
    block: Block,
    settled: Vec<bool>,
    attempts: BTreeMap<u32, u16>,
}

impl Default for ModelStore {
    fn default() -> ModelStore {
        ModelStore::new()
    }
}

impl ModelStore {
    /// An empty store with endless room.
    pub fn new() -> ModelStore {
        let empty = State {
            round: 0,
            next_session: 1,
            next_queue: 1,
            queues: BTreeMap::new(),
            parts: BTreeMap::new(),
        };
        ModelStore::holding(empty, u64::MAX)
    }

    fn holding(mut state: State, room: u64) -> ModelStore {
        let held = state.held();
        state.parts.retain(|message, _| held.contains(message));
        ModelStore {
            inner: Mutex::new(Inner {
                committed: state.clone(),
                synced: state,
                unsynced: Vec::new(),
                room,
                commit_fault: None,
                sync_fault: None,
                failed: false,
            }),
        }
    }

    /// The next commit fails, and so does everything after it on this handle.
    pub fn fail_next_commit(&self, fault: Fault) {
        self.lock().commit_fault = Some(fault);
    }

    /// The next sync fails, and so does everything after it on this handle.
    pub fn fail_next_sync(&self, fault: Fault) {
        self.lock().sync_fault = Some(fault);
    }

    /// Sets what [`Store::room`] answers, in bytes.
    pub fn set_room(&self, bytes: u64) {
        self.lock().room = bytes;
    }

    /// How many committed batches a power cut could lose.
    pub fn unsynced_batches(&self) -> usize {
        let inner = self.lock();
        let changes = inner.unsynced.iter();
        changes
            .filter(|change| matches!(change, Change::Batch(_)))
            .count()
    }

    /// How many parts of payloads it keeps.
    pub fn parts(&self) -> usize {
        self.lock()
            .committed
            .parts
            .values()
            .map(BTreeMap::len)
            .sum()
    }

    /// The store as the next process finds it after the death of this one: all
    /// that was committed. Opening syncs it.
    pub fn reopen(&self) -> ModelStore {
        let inner = self.lock();
        ModelStore::holding(inner.committed.clone(), inner.room)
    }

    /// The store after a power cut: what was synced, and of the batches
    /// committed since the first `keep_batches`.
    pub fn power_cut(&self, keep_batches: usize) -> ModelStore {
        let inner = self.lock();
        ModelStore::holding(inner.after_power_cut(keep_batches), inner.room)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn check(&self) -> Result<(), StoreError> {
        if self.failed {
            return Err(failed("an earlier commit or sync failed"));
        }
        Ok(())
    }

    fn commit(&mut self, batch: Batch) -> Result<(), StoreError> {
        let fault = self.commit_fault.take();
        if fault == Some(Fault::Lost) {
            return Err(failed("a commit was told to fail"));
        }
        if let Err(refused) = self.committed.apply(batch.clone()) {
            // Part of the batch was applied: it must leave no trace.
            self.committed = self.after_power_cut(self.unsynced.len());
            return Err(refused);
        }
        self.unsynced.push(Change::Batch(batch));
        match fault {
            Some(_) => Err(failed("a commit was told to fail, but was applied")),
            None => Ok(()),
        }
    }

    fn sync(&mut self) -> Result<u64, StoreError> {
        let fault = self.sync_fault.take();
        if fault != Some(Fault::Lost) {
            self.synced = self.after_power_cut(self.unsynced.len());
            self.unsynced.clear();
        }
        match fault {
            Some(_) => Err(failed("a sync was told to fail")),
            None => Ok(self.synced.round),
        }
    }

    fn after_power_cut(&self, keep_batches: usize) -> State {
        let mut state = self.synced.clone();
        let mut left = keep_batches;
        for change in &self.unsynced {
            match change {
                Change::Part(message, part, bytes) => {
                    state.put_part(*message, *part, bytes.clone());
                }
                Change::Batch(_) if left == 0 => break,
                Change::Batch(batch) => {
                    left -= 1;
                    state.apply(batch.clone()).expect("it was applied before");
                }
            }
        }
        state
    }

    /// Remembers a failure: the handle is of no use after it.
    fn failing<T>(&mut self, result: Result<T, StoreError>) -> Result<T, StoreError> {
        self.failed |= result.is_err();
        result
    }
}

impl Store for ModelStore {
    fn committed_round(&self) -> u64 {
        self.lock().committed.round
    }

    fn commit(&self, batch: Batch) -> Result<(), StoreError> {
        let mut inner = self.lock();
        inner.check()?;
        let result = inner.commit(batch);
        inner.failing(result)
    }

    fn put_part(&self, message: Identity, part: u32, bytes: &[u8]) -> Result<(), StoreError> {
        let mut inner = self.lock();
        inner.check()?;
        let checked = parts::check_part(message, part, bytes.len());
        inner.failing(checked)?;
        let bytes = Bytes::copy_from_slice(bytes);
        inner.committed.put_part(message, part, bytes.clone());
        inner.unsynced.push(Change::Part(message, part, bytes));
        Ok(())
    }

    fn read_part(&self, message: Identity, part: u32) -> Result<Bytes, StoreError> {
        let inner = self.lock();
        inner.check()?;
        let parts = inner.committed.parts.get(&message);
        let found = parts.and_then(|parts| parts.get(&part)).cloned();
        found.ok_or_else(|| {
            let what = parts::missing(message, part);
            StoreError::Corrupt(format!("{what} (in-memory store)"))
        })
    }

    fn sync(&self) -> Result<u64, StoreError> {
        let mut inner = self.lock();
        inner.check()?;
        let result = inner.sync();
        inner.failing(result)
    }

    fn room(&self) -> Result<u64, StoreError> {
        let inner = self.lock();
        inner.check()?;
        Ok(inner.room)
    }

    fn queues(&self) -> Result<Vec<StoredQueue>, StoreError> {
        let inner = self.lock();
        inner.check()?;
        let queues = inner.committed.queues.iter();
        Ok(queues
            .map(|(&number, queue)| queue.stored(number))
            .collect())
    }

    fn next_queue(&self) -> QueueNumber {
        self.lock().committed.next_queue
    }

    fn next_session(&self) -> u64 {
        self.lock().committed.next_session
    }

    fn read(
        &self,
        queue: QueueNumber,
        from: u64,
        bytes_max: usize,
    ) -> Result<Vec<LoadedBlock>, StoreError> {
        let inner = self.lock();
        inner.check()?;
        let queue = inner.committed.queues.get(&queue);
        Ok(queue.map_or(Vec::new(), |queue| queue.read(from, bytes_max)))
    }
}

impl State {
    fn apply(&mut self, batch: Batch) -> Result<(), StoreError> {
        if batch.round <= self.round {
            return Err(failed(&format!(
                "round {} came after round {}",
                batch.round, self.round
            )));
        }
        self.round = batch.round;
        // They are needed no more once the batch has settled all that hold them.
        let mut concerned = self.held();
        concerned.extend(batch.writes.iter().filter_map(appended_in_parts));
        batch
            .writes
            .into_iter()
            .try_for_each(|write| self.apply_write(write))?;
        let held = self.held();
        self.parts
            .retain(|message, _| held.contains(message) || !concerned.contains(message));
        Ok(())
    }

    fn put_part(&mut self, message: Identity, part: u32, bytes: Bytes) {
        self.parts.entry(message).or_default().insert(part, bytes);
    }

    /// The unsettled messages in parts.
    fn held(&self) -> BTreeSet<Identity> {
        if self.parts.is_empty() {
            return BTreeSet::new();
        }
        let entries = self.queues.values().flat_map(|queue| queue.blocks.values());
        entries.filter_map(|entry| in_parts(&entry.block)).collect()
    }

    fn check_parts(&self, block: &Block) -> Result<(), StoreError> {
        let Some(message) = in_parts(block) else {
            return Ok(());
        };
        let parts = self.parts.get(&message).into_iter().flatten();
        let lens = parts.map(|(&part, bytes)| (part, bytes.len()));
        parts::check_parts(message, block.payload_len(0), lens)
    }

    fn apply_write(&mut self, write: Write) -> Result<(), StoreError> {
        match write {
            Write::Append {
                queue,
                first,
                block,
            } => {
                self.check_parts(&block)?;
                match self.queues.get_mut(&queue) {
                    Some(found) if found.next == first => found.append(block),
                    _ => {
                        return Err(failed(&format!(
                            "queue {queue} takes no message at {first}"
                        )));
                    }
                }
            }
            Write::Settle { queue, positions } => {
                for position in positions {
                    let Some((entry, index)) = self.message(queue, position)? else {
                        continue;
                    };
                    entry.settled[index as usize] = true;
                }
                self.drop_settled(queue);
            }
            Write::Attempts {
                queue,
                position,
                attempts,
            } => {
                if let Some((entry, index)) = self.message(queue, position)? {
                    entry.attempts.insert(index, attempts);
                }
            }
            Write::PutQueue { queue, row } => match self.queues.get_mut(&queue) {
                Some(found) => found.row = row,
                None if queue < self.next_queue => {
                    return Err(failed(&format!("queue number {queue} was used before")));
                }
                None => {
                    self.next_queue = queue + 1;
                    self.queues.insert(queue, Queue::new(row));
                }
            },
            Write::DeleteQueue { queue } => {
                self.queues.remove(&queue);
            }
            Write::ReserveSessions { below } => self.next_session = self.next_session.max(below),
        }
        Ok(())
    }

    /// The unsettled message at a position; none if it is settled or its queue
    /// is gone. A position that no message ever had is an error.
    fn message(
        &mut self,
        queue: QueueNumber,
        position: u64,
    ) -> Result<Option<(&mut Entry, u32)>, StoreError> {
        let Some(found) = self.queues.get_mut(&queue) else {
            return Ok(None);
        };
        if position >= found.next {
            return Err(failed(&format!(
                "queue {queue} has no message at {position}"
            )));
        }
        let Some((first, entry)) = found.blocks.range_mut(..=position).next_back() else {
            return Ok(None);
        };
        let index = position - first;
        let unsettled = entry.settled.get(index as usize) == Some(&false);
        Ok(unsettled.then_some((entry, index as u32)))
    }

    fn drop_settled(&mut self, queue: QueueNumber) {
        if let Some(found) = self.queues.get_mut(&queue) {
            found
                .blocks
                .retain(|_, entry| entry.settled.contains(&false));
        }
    }
}

impl Queue {
    fn new(row: QueueRow) -> Queue {
        Queue {
            row,
            next: 0,
            blocks: BTreeMap::new(),
        }
    }

    fn append(&mut self, block: Block) {
        let first = self.next;
        self.next += u64::from(block.len());
        let entry = Entry {
            settled: vec![false; block.len() as usize],
            attempts: BTreeMap::new(),
            block,
        };
        self.blocks.insert(first, entry);
    }

    fn stored(&self, queue: QueueNumber) -> StoredQueue {
        let unsettled = self.blocks.iter().flat_map(|(first, entry)| {
            let indices = (0..).zip(&entry.settled).filter(|(_, settled)| !**settled);
            indices.map(move |(index, _)| first + index)
        });
        StoredQueue {
            queue,
            row: self.row.clone(),
            first: unsettled.clone().next().unwrap_or(self.next),
            next: self.next,
            unsettled: unsettled.count() as u64,
        }
    }

    fn read(&self, from: u64, bytes_max: usize) -> Vec<LoadedBlock> {
        let mut loaded = Vec::new();
        let mut bytes = 0;
        for (&first, entry) in &self.blocks {
            if first + u64::from(entry.block.len()) <= from {
                continue;
            }
            bytes += entry.block.payload_total();
            if bytes > bytes_max && !loaded.is_empty() {
                break;
            }
            loaded.push(entry.load(first));
        }
        loaded
    }
}

impl Entry {
    fn load(&self, first: u64) -> LoadedBlock {
        let mut settled = vec![0; self.settled.len().div_ceil(64)];
        for (index, _) in self
            .settled
            .iter()
            .enumerate()
            .filter(|(_, settled)| **settled)
        {
            settled[index / 64] |= 1 << (index % 64);
        }
        LoadedBlock {
            first,
            block: self.block.clone(),
            settled,
            attempts: self
                .attempts
                .iter()
                .map(|(&index, &attempts)| (index, attempts))
                .collect(),
        }
    }
}

/// The identity of a block's message, if that is in parts.
fn in_parts(block: &Block) -> Option<Identity> {
    let head = block.message(0);
    block
        .is_in_parts(0)
        .then_some((head.session, head.position))
}

fn appended_in_parts(write: &Write) -> Option<Identity> {
    match write {
        Write::Append { block, .. } => in_parts(block),
        _ => None,
    }
}

fn failed(why: &str) -> StoreError {
    StoreError::Failed(format!("{why} (in-memory store)"))
}
