//! What is done with the store, off the service thread.
//!
//! Three threads, so that a sync delays no commit and neither delays a read. A
//! job that fails ends the service: the handle is dropped and opened anew.

use crate::hub::{Append, FrozenRound, SessionSlot, Source};
use crate::store::block::{Block, BlockBuilder};
use crate::store::{Batch, LoadedBlock, QueueNumber, Store, StoreError, Write};
use crate::wake::Wake;
use ringmain_ring::session::SessionMap;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;

/// Payload bytes that one read brings, about.
const READ_BYTES: usize = 256 * 1024;

/// A round to be written, with the segments that its payloads lie in.
#[derive(Debug)]
pub(super) struct CommitJob {
    pub round: u64,
    pub frozen: FrozenRound,
    pub maps: Vec<(SessionSlot, Arc<SessionMap>)>,
}

/// Something to do with the store.
#[derive(Debug)]
pub(super) enum Job {
    Commit(CommitJob),
    Read { queue: QueueNumber, from: u64 },
    Sync,
}

/// A job that is done.
#[derive(Debug)]
pub(super) enum Done {
    /// The round is in the store: its blocks, each with the index of its append.
    Committed { blocks: Vec<(usize, Block)> },
    /// What was read.
    Read {
        queue: QueueNumber,
        from: u64,
        blocks: Vec<LoadedBlock>,
    },
    /// Rounds up to this one are synced.
    Synced { round: u64 },
    /// It failed.
    Failed(StoreError),
}

impl Job {
    /// Does it. Blocks on the disk.
    pub fn run(self, store: &dyn Store) -> Done {
        let done = match self {
            Job::Commit(job) => job.run(store).map(|blocks| Done::Committed { blocks }),
            Job::Read { queue, from } => {
                store
                    .read(queue, from, READ_BYTES)
                    .map(|blocks| Done::Read {
                        queue,
                        from,
                        blocks,
                    })
            }
            Job::Sync => store.sync().map(|round| Done::Synced { round }),
        };
        done.unwrap_or_else(Done::Failed)
    }
}

impl CommitJob {
    fn run(self, store: &dyn Store) -> Result<Vec<(usize, Block)>, StoreError> {
        let mut blocks = Vec::new();
        let mut writes = Vec::new();
        for (index, append) in self.frozen.appends.iter().enumerate() {
            let mut first = append.first;
            for block in self.pack(append) {
                let queue = append.queue;
                writes.push(Write::Append {
                    queue,
                    first,
                    block: block.clone(),
                });
                first += u64::from(block.len());
                blocks.push((index, block));
            }
        }
        writes.extend(self.frozen.writes);
        store.commit(Batch {
            round: self.round,
            writes,
        })?;
        Ok(blocks)
    }

    /// Copies the messages out of the rings into blocks: the only copy that what
    /// is stored takes in memory.
    fn pack(&self, append: &Append) -> Vec<Block> {
        let mut blocks = Vec::new();
        let mut builder = BlockBuilder::new();
        for message in &append.messages {
            let len = message.len as usize;
            if !builder.is_empty() && !builder.takes(len) {
                blocks.push(std::mem::replace(&mut builder, BlockBuilder::new()).finish());
            }
            let Source::Ring { slot, offset } = message.source;
            let map = self.maps.iter().find(|(other, _)| *other == slot);
            builder.push_with(message.head, None, len, |bytes| {
                if let Some((_, map)) = map {
                    map.submission().area.copy_out(offset as usize, bytes);
                }
            });
        }
        if !builder.is_empty() {
            blocks.push(builder.finish());
        }
        blocks
    }
}

/// The threads.
pub(super) struct Workers {
    commits: Option<mpsc::Sender<Job>>,
    reads: Option<mpsc::Sender<Job>>,
    syncs: Option<mpsc::Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
    /// What is done, in any order.
    pub done: mpsc::Receiver<Done>,
}

impl Workers {
    /// Starts them. Each rings `wake` when something is done.
    pub fn start(store: &Arc<dyn Store>, wake: &Arc<Wake>) -> std::io::Result<Workers> {
        let (results, done) = mpsc::channel();
        let mut threads = Vec::new();
        let mut start = |name: &str| {
            let (sender, jobs) = mpsc::channel::<Job>();
            let (store, wake, results) = (store.clone(), wake.clone(), results.clone());
            let body = move || {
                for job in jobs {
                    if results.send(job.run(store.as_ref())).is_err() {
                        return;
                    }
                    wake.ring();
                }
            };
            let thread = std::thread::Builder::new()
                .name(name.to_owned())
                .spawn(body)?;
            threads.push(thread);
            std::io::Result::Ok(Some(sender))
        };
        let (commits, reads, syncs) = (start("commit")?, start("read")?, start("sync")?);
        Ok(Workers {
            commits,
            reads,
            syncs,
            threads,
            done,
        })
    }

    /// Hands a job to its thread.
    pub fn submit(&self, job: Job) {
        let thread = match job {
            Job::Commit(_) => &self.commits,
            Job::Read { .. } => &self.reads,
            Job::Sync => &self.syncs,
        };
        // A thread ends only when it is dropped.
        if let Some(thread) = thread {
            let _ = thread.send(job);
        }
    }
}

impl Drop for Workers {
    /// Waits until nothing uses the store any more, so that it can be closed.
    fn drop(&mut self) {
        (self.commits, self.reads, self.syncs) = (None, None, None);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
