//! A round as it becomes a write: what its changes amount to for each queue and
//! block, worked out beside the committed state, which stays as it is until the
//! write has succeeded.

use super::super::block::Block;
use super::super::{QueueNumber, QueueRow, StoreError, Write};
use super::cache::{Cache, Known};
use super::engine::{Changes, Engine};
use super::parts::{Begun, Holding, InParts};
use super::view::{Cursor, QueueView, View};
use super::walk::Walk;
use super::{keys, lock};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// The changes of one round.
pub(super) struct Plan<'a> {
    source: Source<'a>,
    queues: BTreeMap<QueueNumber, Touched>,
    next_queue: Option<QueueNumber>,
    next_session: Option<u64>,
    begun: &'a mut Begun,
    holding: Holding,
    /// Bytes of the parts that it deletes.
    dead_part_bytes: u64,
}

/// What a published round has done.
pub(super) struct Published {
    /// Bytes of the blocks that it deleted.
    pub(super) dead_bytes: u64,
    /// Bytes of the parts that it deleted.
    pub(super) dead_part_bytes: u64,
}

/// Where committed state comes from.
struct Source<'a> {
    engine: &'a Engine,
    view: &'a Mutex<View>,
    cache: &'a mut Cache,
}

/// A queue that the round has to do with.
struct Touched {
    queue: QueueNumber,
    /// As committed, if it existed before the round.
    before: Option<Cursor>,
    cursor: Cursor,
    /// If it changed.
    row: Option<Arc<QueueRow>>,
    deleted: bool,
    /// By first position.
    blocks: BTreeMap<u64, TouchedBlock>,
}

struct TouchedBlock {
    known: Known,
    /// If it was appended in this round.
    new: Option<Block>,
    marks_changed: bool,
}

/// What is committed at a position.
enum Stored {
    Block(u64, Known),
    /// See [`Located::Hole`].
    Hole(u64),
}

/// What lies at a position.
enum Located {
    /// The block that begins here.
    Block(u64),
    /// Nothing, up to this position: all is settled.
    Hole(u64),
}

impl<'a> Plan<'a> {
    pub(super) fn new(
        engine: &'a Engine,
        view: &'a Mutex<View>,
        cache: &'a mut Cache,
        begun: &'a mut Begun,
    ) -> Plan<'a> {
        Plan {
            source: Source {
                engine,
                view,
                cache,
            },
            queues: BTreeMap::new(),
            next_queue: None,
            next_session: None,
            begun,
            holding: Holding::default(),
            dead_part_bytes: 0,
        }
    }

    /// Adds a change. After an error the plan must be dropped.
    pub(super) fn apply(&mut self, write: Write) -> Result<(), StoreError> {
        match write {
            Write::Append {
                queue,
                first,
                block,
            } => {
                if let Some(message) = InParts::of(&block) {
                    let engine = self.source.engine;
                    self.holding.append(engine, self.begun, message)?;
                }
                match self.touch(queue) {
                    Some((touched, _)) if touched.cursor.next == first => touched.append(block),
                    _ => {
                        return Err(refused(&format!(
                            "queue {queue} takes no message at {first}"
                        )));
                    }
                }
            }
            Write::Settle { queue, positions } => {
                if let Some((touched, source)) = self.touch(queue) {
                    touched.settle(source, positions)?;
                }
            }
            Write::Attempts {
                queue,
                position,
                attempts,
            } => {
                if let Some((touched, source)) = self.touch(queue) {
                    touched.note_attempts(source, position, attempts)?;
                }
            }
            Write::PutQueue { queue, row } => self.put_queue(queue, row)?,
            Write::DeleteQueue { queue } => {
                if let Some((touched, _)) = self.touch(queue) {
                    touched.deleted = true;
                    touched.blocks.clear();
                }
            }
            Write::ReserveSessions { below } => self.reserve_sessions(below),
        }
        Ok(())
    }

    /// The queue, if it exists.
    fn touch(&mut self, queue: QueueNumber) -> Option<(&mut Touched, &mut Source<'a>)> {
        if !self.queues.contains_key(&queue) {
            let cursor = lock(self.source.view).cursor(queue)?;
            self.queues.insert(queue, Touched::new(queue, Some(cursor)));
        }
        let touched = self
            .queues
            .get_mut(&queue)
            .filter(|touched| !touched.deleted)?;
        Some((touched, &mut self.source))
    }

    fn put_queue(&mut self, queue: QueueNumber, row: QueueRow) -> Result<(), StoreError> {
        if let Some((touched, _)) = self.touch(queue) {
            touched.row = Some(Arc::new(row));
            return Ok(());
        }
        let next = self
            .next_queue
            .unwrap_or_else(|| lock(self.source.view).next_queue);
        if queue < next {
            return Err(refused(&format!("queue number {queue} was used before")));
        }
        let after = queue.checked_add(1);
        self.next_queue = Some(after.ok_or_else(|| refused("no queue number is left"))?);
        let mut touched = Touched::new(queue, None);
        touched.row = Some(Arc::new(row));
        self.queues.insert(queue, touched);
        Ok(())
    }

    fn reserve_sessions(&mut self, below: u64) {
        let reserved = self
            .next_session
            .unwrap_or_else(|| lock(self.source.view).next_session);
        self.next_session = Some(reserved.max(below));
    }

    /// The write that makes the changes, with the round's number.
    pub(super) fn encode(&mut self, round: u64) -> Result<Changes<'a>, StoreError> {
        for touched in self.queues.values_mut() {
            touched.advance_first(&mut self.source)?;
        }
        let new_bytes = self.queues.values().map(Touched::new_bytes).sum();
        let mut changes = self.source.engine.changes(new_bytes);
        let engine = self.source.engine;
        for touched in self.queues.values() {
            touched.encode(&mut changes);
            touched.encode_holding(engine, &mut changes, &mut self.holding)?;
        }
        self.dead_part_bytes = self.holding.encode(engine, self.begun, &mut changes)?;
        if let Some(number) = self.next_queue {
            changes.put_row(keys::META_QUEUES, &number.to_le_bytes());
        }
        if let Some(number) = self.next_session {
            changes.put_row(keys::META_SESSIONS, &number.to_le_bytes());
        }
        changes.put_row(keys::META_ROUND, &round.to_le_bytes());
        Ok(changes)
    }

    /// Lets everybody see the changes, once they are written.
    pub(super) fn publish(self, engine: &Engine) -> Published {
        let mut dead_bytes = 0;
        self.holding.publish(self.begun);
        let mut view = lock(self.source.view);
        view.next_queue = self.next_queue.unwrap_or(view.next_queue);
        view.next_session = self.next_session.unwrap_or(view.next_session);
        let mut deleted = Vec::new();
        for (queue, touched) in self.queues {
            if touched.deleted {
                view.queues.remove(&queue);
                deleted.push(queue);
            } else {
                dead_bytes += touched.publish(&mut view, self.source.cache);
            }
        }
        drop(view);
        for queue in deleted {
            engine.drop_files(queue);
        }
        Published {
            dead_bytes,
            dead_part_bytes: self.dead_part_bytes,
        }
    }
}

impl Source<'_> {
    /// What is committed at a position below the queue's committed end.
    fn find(&mut self, queue: QueueNumber, position: u64, end: u64) -> Result<Stored, StoreError> {
        if let Some((first, known)) = self.cache.take(queue, position) {
            return Ok(Stored::Block(first, known));
        }
        if let Some(hole_end) = lock(self.view).hole_end(queue, position) {
            return Ok(Stored::Hole(hole_end));
        }
        let mut walk = Walk::new(self.engine, None, self.view, queue, end);
        Ok(match walk.seek(position)? {
            Some(found) if found.first <= position => Stored::Block(found.first, walk.know(found)?),
            Some(found) => Stored::Hole(found.first),
            None => Stored::Hole(end),
        })
    }
}

impl Touched {
    fn new(queue: QueueNumber, before: Option<Cursor>) -> Touched {
        Touched {
            queue,
            before,
            cursor: before.unwrap_or_default(),
            row: None,
            deleted: false,
            blocks: BTreeMap::new(),
        }
    }

    fn append(&mut self, block: Block) {
        let first = self.cursor.next;
        self.cursor.next += u64::from(block.len());
        self.cursor.unsettled += u64::from(block.len());
        let known = Known {
            count: block.len(),
            bytes: block.as_bytes().len(),
            marks: Default::default(),
            has_row: false,
            in_parts: InParts::of(&block).map(Box::new),
        };
        let touched = TouchedBlock {
            known,
            new: Some(block),
            marks_changed: false,
        };
        self.blocks.insert(first, touched);
    }

    fn settle(
        &mut self,
        source: &mut Source<'_>,
        mut positions: Vec<u64>,
    ) -> Result<(), StoreError> {
        positions.sort_unstable();
        if let Some(&last) = positions.last() {
            self.check_given(last)?;
        }
        let unsettled_from = positions.partition_point(|&position| position < self.cursor.first);
        let mut rest = &positions[unsettled_from..];
        while let Some(&position) = rest.first() {
            let end = match self.locate(source, position)? {
                Located::Hole(end) => end,
                Located::Block(first) => self.settle_in(source, first, rest)?,
            };
            rest = &rest[rest.partition_point(|&position| position < end)..];
        }
        Ok(())
    }

    /// Settles those of the positions, which are sorted, that lie in one block.
    /// Returns the block's end.
    fn settle_in(
        &mut self,
        source: &Source<'_>,
        first: u64,
        positions: &[u64],
    ) -> Result<u64, StoreError> {
        let block = self.blocks.get_mut(&first).expect("it was located");
        let end = first + u64::from(block.known.count);
        let mut settled = 0;
        for position in positions.iter().take_while(|&&position| position < end) {
            let index = (position - first) as u32;
            settled += u64::from(block.known.marks.settle(index, block.known.count));
        }
        block.marks_changed |= settled > 0;
        let left = self.cursor.unsettled.checked_sub(settled);
        self.cursor.unsettled = left.ok_or_else(|| {
            source
                .engine
                .damaged(&format!("the number of messages in queue {}", self.queue))
        })?;
        Ok(end)
    }

    fn note_attempts(
        &mut self,
        source: &mut Source<'_>,
        position: u64,
        attempts: u16,
    ) -> Result<(), StoreError> {
        self.check_given(position)?;
        if position < self.cursor.first {
            return Ok(());
        }
        if let Located::Block(first) = self.locate(source, position)? {
            let block = self.blocks.get_mut(&first).expect("it was located");
            let index = (position - first) as u32;
            if !block.known.marks.is_settled(index) {
                block.known.marks.note_attempts(index, attempts);
                block.marks_changed = true;
            }
        }
        Ok(())
    }

    fn check_given(&self, position: u64) -> Result<(), StoreError> {
        if position >= self.cursor.next {
            let queue = self.queue;
            return Err(refused(&format!(
                "queue {queue} has no message at {position}"
            )));
        }
        Ok(())
    }

    /// Finds the block that holds a position of the queue, and touches it.
    fn locate(&mut self, source: &mut Source<'_>, position: u64) -> Result<Located, StoreError> {
        if let Some(first) = self.touched_at(position) {
            return Ok(Located::Block(first));
        }
        let end = self.before.map_or(0, |before| before.next);
        match source.find(self.queue, position, end)? {
            Stored::Block(first, known) => {
                let touched = TouchedBlock {
                    known,
                    new: None,
                    marks_changed: false,
                };
                self.blocks.insert(first, touched);
                Ok(Located::Block(first))
            }
            Stored::Hole(end) => Ok(Located::Hole(end)),
        }
    }

    fn touched_at(&self, position: u64) -> Option<u64> {
        let (&first, block) = self.blocks.range(..=position).next_back()?;
        (position - first < u64::from(block.known.count)).then_some(first)
    }

    /// Moves `first` to the first message that is unsettled now.
    fn advance_first(&mut self, source: &mut Source<'_>) -> Result<(), StoreError> {
        if self.deleted || self.touched_at(self.cursor.first).is_none() {
            // Nothing has happened to the message there.
            return Ok(());
        }
        while self.cursor.first < self.cursor.next {
            let first = match self.locate(source, self.cursor.first)? {
                Located::Hole(end) => {
                    self.cursor.first = end;
                    continue;
                }
                Located::Block(first) => first,
            };
            let Known { count, marks, .. } = &self.blocks[&first].known;
            let index = (self.cursor.first - first) as u32;
            match marks.first_unsettled(index, *count) {
                Some(index) => {
                    self.cursor.first = first + u64::from(index);
                    break;
                }
                None => self.cursor.first = first + u64::from(*count),
            }
        }
        Ok(())
    }

    /// Bytes of the blocks that it adds to the store.
    fn new_bytes(&self) -> usize {
        let kept = self.blocks.values().filter(|block| !block.known.is_dead());
        kept.filter_map(|block| block.new.as_ref())
            .map(|block| block.as_bytes().len())
            .sum()
    }

    fn encode(&self, changes: &mut Changes<'_>) {
        if self.deleted {
            if self.before.is_some() {
                changes.delete_row(&keys::queue_key(self.queue));
                changes.delete_row(&keys::cursor_key(self.queue));
                changes.delete_blocks_of(self.queue);
            }
            return;
        }
        if let Some(row) = &self.row {
            changes.put_row(&keys::queue_key(self.queue), &keys::encode_row(row));
        }
        if self.before != Some(self.cursor) {
            changes.put_row(
                &keys::cursor_key(self.queue),
                &keys::encode_cursor(self.cursor),
            );
        }
        for (&first, block) in &self.blocks {
            block.encode(keys::block_key(self.queue, first), changes);
        }
    }

    /// Its messages in parts that come and go.
    fn encode_holding(
        &self,
        engine: &Engine,
        changes: &mut Changes<'_>,
        holding: &mut Holding,
    ) -> Result<(), StoreError> {
        if self.deleted {
            return match self.before {
                Some(_) => holding.release_all(engine, changes, self.queue),
                None => Ok(()),
            };
        }
        for (&first, block) in &self.blocks {
            let Some(message) = block.known.in_parts.as_deref().copied() else {
                continue;
            };
            match (&block.new, block.known.is_dead()) {
                (Some(_), false) => holding.hold(changes, self.queue, first, message),
                (None, true) => holding.release(changes, self.queue, first, message),
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns the bytes of the blocks that are dead now.
    fn publish(self, view: &mut View, cache: &mut Cache) -> u64 {
        let queue = match self.row {
            Some(row) => {
                let queue = view.queues.entry(self.queue).or_insert_with(|| QueueView {
                    row: row.clone(),
                    cursor: self.cursor,
                    holes: Default::default(),
                });
                queue.row = row;
                queue
            }
            None => view
                .queues
                .get_mut(&self.queue)
                .expect("it existed before the round"),
        };
        queue.cursor = self.cursor;
        let mut dead_bytes = 0;
        for (first, mut block) in self.blocks {
            if !block.known.is_dead() {
                block.known.has_row |= block.marks_changed;
                cache.put(self.queue, first, block.known);
                continue;
            }
            dead_bytes += block.known.bytes as u64;
            let end = first + u64::from(block.known.count);
            if end > self.cursor.first {
                queue.holes.add(first..end);
            }
        }
        queue.holes.forget_below(self.cursor.first);
        dead_bytes
    }
}

impl TouchedBlock {
    fn encode(&self, key: [u8; 12], changes: &mut Changes<'_>) {
        match &self.new {
            Some(_) if self.known.is_dead() => return,
            Some(block) => changes.put_block(key, block.as_bytes()),
            None if self.known.is_dead() => {
                changes.delete_block(key);
                if self.known.has_row {
                    changes.delete_marks(key);
                }
                return;
            }
            None => {}
        }
        if self.marks_changed {
            changes.put_marks(key, &self.known.marks.encode());
        }
    }
}

/// The hub asked for what cannot be: a bug, and not to be written.
fn refused(why: &str) -> StoreError {
    StoreError::Failed(format!("a round contradicts the store: {why}"))
}
