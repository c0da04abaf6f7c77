//! What is done with the store, off the service thread.
//!
//! Three threads, so that a sync delays no commit and neither delays a read. A
//! job that fails ends the service: the handle is dropped and opened anew.

use super::payloads::{InboundFile, OutboundFile};
use crate::hub::{Append, FrozenMessage, FrozenMove, FrozenRound, SessionSlot, Source, Ticket};
use crate::store::block::{Block, BlockBuilder, PART_BYTES};
use crate::store::{Batch, LoadedBlock, QueueNumber, Store, StoreError, Write};
use crate::wake::Wake;
use ringmain::MessageId;
use ringmain::control::DeadMessage;
use ringmain::record::Chunk;
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
    /// Outbound segments: session, number.
    pub files: Vec<(SessionSlot, u32, Arc<OutboundFile>)>,
}

/// A payload to be copied into an inbound chunk.
#[derive(Debug)]
pub(super) struct FillJob {
    pub ticket: u64,
    /// The session and position that identify the message.
    pub message: (u64, u64),
    /// The chunk that has the payload; `None`: it is in the store in parts.
    pub from: Option<(Arc<OutboundFile>, Chunk)>,
    pub target: Arc<InboundFile>,
    pub into: Chunk,
}

/// A look at the messages of a queue.
#[derive(Debug)]
pub(super) struct ListJob {
    pub ticket: Ticket,
    pub queue: QueueNumber,
    /// Position to begin at.
    pub from: u64,
    pub limit: usize,
}

/// Something to do with the store.
#[derive(Debug)]
pub(super) enum Job {
    Commit(CommitJob),
    Read { queue: QueueNumber, from: u64 },
    Fill(FillJob),
    List(ListJob),
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
    /// A payload was copied, unless the store failed.
    Filled {
        ticket: u64,
        failed: Option<StoreError>,
    },
    /// What a queue holds in the store.
    Listed {
        ticket: Ticket,
        listed: Vec<DeadMessage>,
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
            Job::Fill(job) => {
                let failed = job.run(store).err();
                Ok(Done::Filled {
                    ticket: job.ticket,
                    failed,
                })
            }
            Job::List(job) => job.run(store).map(|listed| Done::Listed {
                ticket: job.ticket,
                listed,
            }),
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
            for block in self.pack(append, store)? {
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
        for (queue, first, block) in pack_moves(&self.frozen.moves) {
            writes.push(Write::Append {
                queue,
                first,
                block,
            });
        }
        writes.extend(self.frozen.writes);
        store.commit(Batch {
            round: self.round,
            writes,
        })?;
        Ok(blocks)
    }

    /// Copies the messages into blocks: the only copy that what is stored takes in
    /// memory. What is too long for a block goes to the store in parts, ahead of
    /// the batch.
    fn pack(&self, append: &Append, store: &dyn Store) -> Result<Vec<Block>, StoreError> {
        let mut blocks = Vec::new();
        let mut builder = BlockBuilder::new();
        for message in &append.messages {
            let len = message.len as usize;
            if !builder.is_empty() && !builder.takes(len) {
                blocks.push(std::mem::replace(&mut builder, BlockBuilder::new()).finish());
            }
            if len > PART_BYTES {
                self.put_parts(message, store)?;
                builder.push_in_parts(message.head, None, message.len);
            } else {
                builder.push_with(message.head, None, len, |bytes| {
                    self.copy_out(&message.source, 0, bytes);
                });
            }
        }
        if !builder.is_empty() {
            blocks.push(builder.finish());
        }
        Ok(blocks)
    }

    fn put_parts(&self, message: &FrozenMessage, store: &dyn Store) -> Result<(), StoreError> {
        let len = message.len as usize;
        let identity = (message.head.session, message.head.position);
        let mut buffer = vec![0; PART_BYTES];
        for (part, offset) in (0..len).step_by(PART_BYTES).enumerate() {
            let bytes = &mut buffer[..PART_BYTES.min(len - offset)];
            self.copy_out(&message.source, offset, bytes);
            store.put_part(identity, part as u32, bytes)?;
        }
        Ok(())
    }

    /// Copies a part of a payload, from `offset` bytes within it.
    fn copy_out(&self, source: &Source, offset: usize, bytes: &mut [u8]) {
        match *source {
            Source::Ring { slot, offset: at } => {
                let map = self.maps.iter().find(|(other, _)| *other == slot);
                if let Some((_, map)) = map {
                    let area = map.submission().area;
                    area.copy_out(at as usize + offset, bytes);
                }
            }
            Source::Chunk { slot, at } => {
                let of = |file: &&(SessionSlot, u32, Arc<OutboundFile>)| {
                    (file.0, file.1) == (slot, at.segment)
                };
                if let Some((_, _, file)) = self.files.iter().find(of) {
                    file.read(at, offset, bytes);
                }
            }
        }
    }
}

/// Copies messages from blocks of their sources into such of their targets, each
/// with the position of its first message.
pub(crate) fn pack_moves(moves: &[FrozenMove]) -> Vec<(QueueNumber, u64, Block)> {
    let mut order: Vec<&FrozenMove> = moves.iter().collect();
    order.sort_by_key(|moved| (moved.target, moved.position));
    let mut packed = Vec::new();
    for of_target in order.chunk_by(|a, b| a.target == b.target) {
        let mut builder = BlockBuilder::new();
        let mut first = of_target[0].position;
        for moved in of_target {
            let in_parts = moved.block.is_in_parts(moved.index);
            let payload = moved.block.payload(moved.index);
            if !builder.is_empty() && (in_parts || !builder.takes(payload.len())) {
                let full = std::mem::take(&mut builder).finish();
                packed.push((moved.target, first, full));
                first = moved.position;
            }
            if in_parts {
                let len = moved.block.payload_len(moved.index) as u32;
                builder.push_in_parts(moved.head, moved.letter.as_ref(), len);
            } else {
                let letter = moved.letter.as_ref();
                builder.push_with(moved.head, letter, payload.len(), |bytes| {
                    bytes.copy_from_slice(payload);
                });
            }
        }
        packed.push((of_target[0].target, first, builder.finish()));
    }
    packed
}

impl FillJob {
    fn run(&self, store: &dyn Store) -> Result<(), StoreError> {
        /// Small enough to stay in the processor's cache between the two copies.
        const STEP: usize = 128 * 1024;
        let len = self.into.len as usize;
        let Some((file, at)) = &self.from else {
            return self.fill_from_store(store, len);
        };
        let mut buffer = vec![0; STEP.min(len)];
        for offset in (0..len).step_by(STEP) {
            let bytes = &mut buffer[..STEP.min(len - offset)];
            file.read(*at, offset, bytes);
            self.write(offset, bytes)?;
        }
        Ok(())
    }

    fn fill_from_store(&self, store: &dyn Store, len: usize) -> Result<(), StoreError> {
        for (part, offset) in (0..len).step_by(PART_BYTES).enumerate() {
            let bytes = store.read_part(self.message, part as u32)?;
            if bytes.len() != PART_BYTES.min(len - offset) {
                let (session, position) = self.message;
                return Err(StoreError::Corrupt(format!(
                    "part {part} of message {session}-{position} has {} bytes",
                    bytes.len()
                )));
            }
            self.write(offset, &bytes)?;
        }
        Ok(())
    }

    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), StoreError> {
        let written = self.target.write(self.into, offset, bytes);
        written.map_err(|error| StoreError::Failed(format!("a payload segment: {error}")))
    }
}

impl ListJob {
    fn run(&self, store: &dyn Store) -> Result<Vec<DeadMessage>, StoreError> {
        let mut listed = Vec::new();
        let mut from = self.from;
        loop {
            let blocks = store.read(self.queue, from, READ_BYTES)?;
            let Some(last) = blocks.last() else {
                return Ok(listed);
            };
            from = last.first + u64::from(last.block.len());
            for loaded in &blocks {
                let unsettled = (0..loaded.block.len()).filter(|&at| !loaded.is_settled(at));
                let messages = unsettled.map(|at| describe(loaded, at));
                listed.extend(messages.filter(|message| message.position >= self.from));
            }
            if listed.len() >= self.limit {
                listed.truncate(self.limit);
                return Ok(listed);
            }
        }
    }
}

fn describe(loaded: &LoadedBlock, at: u32) -> DeadMessage {
    let head = loaded.block.message(at);
    DeadMessage {
        id: MessageId {
            session: head.session,
            position: head.position,
        },
        position: loaded.first + u64::from(at),
        bytes: loaded.block.payload_len(at) as u64,
        sent_at_ms: head.sent_at_ms,
        death: loaded.block.letter(at),
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
            Job::Read { .. } | Job::Fill(_) | Job::List(_) => &self.reads,
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
