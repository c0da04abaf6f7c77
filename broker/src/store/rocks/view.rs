//! The queues as of the last commit.

use super::super::{QueueNumber, QueueRow, StoreError, StoredQueue};
use super::engine::Engine;
use super::holes::Holes;
use super::keys;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Where a queue begins and ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Cursor {
    /// Position of the first unsettled message; `next` if there is none.
    pub(super) first: u64,
    /// Position of the next message.
    pub(super) next: u64,
    /// How many messages are unsettled.
    pub(super) unsettled: u64,
}

/// One queue.
#[derive(Debug)]
pub(super) struct QueueView {
    pub(super) row: Arc<QueueRow>,
    pub(super) cursor: Cursor,
    pub(super) holes: Holes,
}

/// All that is kept in memory of all queues; no message, and nothing a message.
#[derive(Debug)]
pub(super) struct View {
    pub(super) queues: BTreeMap<QueueNumber, QueueView>,
    pub(super) next_queue: QueueNumber,
    pub(super) next_session: u64,
}

impl View {
    /// Reads the view and the number of the last committed round.
    pub(super) fn load(engine: &Engine) -> Result<(View, u64), StoreError> {
        let mut queues = BTreeMap::new();
        for (key, value) in engine.rows(keys::QUEUE_ROWS)? {
            let queue =
                keys::queue_of(&key).ok_or_else(|| engine.damaged("the key of a queue's row"))?;
            queues.insert(queue, load_queue(engine, queue, &value)?);
        }
        let view = View {
            queues,
            next_queue: engine
                .number_row(keys::META_QUEUES, keys::decode_u32)?
                .unwrap_or(1),
            next_session: engine
                .number_row(keys::META_SESSIONS, keys::decode_u64)?
                .unwrap_or(1),
        };
        let round = engine
            .number_row(keys::META_ROUND, keys::decode_u64)?
            .unwrap_or(0);
        Ok((view, round))
    }

    pub(super) fn queues(&self) -> Vec<StoredQueue> {
        let stored = |(&queue, view): (&QueueNumber, &QueueView)| StoredQueue {
            queue,
            row: QueueRow::clone(&view.row),
            first: view.cursor.first,
            next: view.cursor.next,
            unsettled: view.cursor.unsettled,
        };
        self.queues.iter().map(stored).collect()
    }

    pub(super) fn cursor(&self, queue: QueueNumber) -> Option<Cursor> {
        self.queues.get(&queue).map(|queue| queue.cursor)
    }

    pub(super) fn hole_end(&self, queue: QueueNumber, position: u64) -> Option<u64> {
        self.queues.get(&queue)?.holes.end_of(position)
    }

    /// Notes a hole that a search came upon.
    pub(super) fn learn_hole(&mut self, queue: QueueNumber, hole: Range<u64>) {
        if let Some(queue) = self.queues.get_mut(&queue) {
            queue.holes.add(hole);
            // It may have been found by a read that began before `first` moved.
            queue.holes.forget_below(queue.cursor.first);
        }
    }
}

fn load_queue(engine: &Engine, queue: QueueNumber, row: &[u8]) -> Result<QueueView, StoreError> {
    let row = keys::decode_row(row)
        .map_err(|error| engine.damaged(&format!("the row of queue {queue}: {error}")))?;
    let cursor = engine
        .number_row(&keys::cursor_key(queue), keys::decode_cursor)?
        .ok_or_else(|| engine.damaged(&format!("queue {queue} ({}) has no cursor", row.name)))?;
    Ok(QueueView {
        row: Arc::new(row),
        cursor,
        holes: Holes::default(),
    })
}
