//! The lease table: one row of 64 bytes for each lease entry.
//!
//! ```text
//!   0 state u8 | 1 zero | 2 history u16 | 4 queue u32    stored last
//!   8 sender's session    16 position of its record
//!  24 position in the queue plus one, or 0
//!  32 holder's session    40 position of the delivery
//!  48 deadline (ns)       56 the chunk that it shows its holder
//! ```
//!
//! Row 0 is the table's head. The file is as long as the limit; memory is
//! reserved as the table grows.

use super::{LedgerError, Words};
use crate::crash::crash_point;
use crate::hub::{Delivery, History, LeaseEntry, LeaseRow, LeaseState, Shown};
use ringmain_ring::Ordering;
use ringmain_ring::segment;
use std::fs::OpenOptions;
use std::path::Path;

const ROW_WORDS: usize = 8;
const ROW_BYTES: u64 = 64;
/// Rows that the table has at first, and gets more of at a time.
const STEP: u32 = 4096;
/// Most rows.
pub const ROWS_MAX: u32 = 64 * 1024;
/// Word of row 0 that says how many rows are reserved.
const RESERVED: usize = 2;

/// The lease table of an instance.
#[derive(Debug)]
pub struct LeaseTable {
    words: Words,
    rows: u32,
}

impl LeaseTable {
    /// Makes an empty table.
    pub fn create(dir: &Path) -> Result<LeaseTable, LedgerError> {
        let reserved = u64::from(STEP) * ROW_BYTES;
        let bytes = u64::from(ROWS_MAX) * ROW_BYTES;
        let words = Words::create(dir.join("leases"), reserved, bytes)?;
        words.put(RESERVED, u64::from(STEP));
        words.publish();
        Ok(LeaseTable { words, rows: STEP })
    }

    /// Opens the table that a predecessor left.
    pub fn open(dir: &Path) -> Result<LeaseTable, LedgerError> {
        let words = Words::open(dir.join("leases"), u64::from(ROWS_MAX) * ROW_BYTES)?;
        let rows = words.get(RESERVED);
        if rows == 0 || rows > u64::from(ROWS_MAX) {
            return Err(words.corrupt("impossible number of leases"));
        }
        Ok(LeaseTable {
            words,
            rows: rows as u32,
        })
    }

    /// How many rows there are, row 0 included.
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// Reserves memory for more rows. Gives their number, or `None` at the limit
    /// or when no shared memory is left.
    pub fn grow(&mut self) -> Option<u32> {
        let more = (self.rows + STEP).min(ROWS_MAX);
        let file = OpenOptions::new().write(true).open(&self.words.path).ok()?;
        let (from, to) = (
            u64::from(self.rows) * ROW_BYTES,
            u64::from(more) * ROW_BYTES,
        );
        crash_point("reserve more lease entries");
        if more == self.rows || segment::reserve(&file, &self.words.path, from, to).is_err() {
            return None;
        }
        self.words
            .set("note more lease entries", RESERVED, u64::from(more));
        self.rows = more;
        Some(more)
    }

    /// Writes the row of a delivery, its state last: a successor that does not
    /// find the state finds a free row.
    #[inline]
    pub fn lease(&self, delivery: &Delivery<'_>, delivery_position: u64) {
        let row = &self.words.mapping.words()[delivery.entry as usize * ROW_WORDS..][..ROW_WORDS];
        crash_point("write a lease entry");
        // Relaxed: the Release of the state orders them.
        row[1].store(delivery.session, Ordering::Relaxed);
        row[2].store(delivery.position, Ordering::Relaxed);
        row[3].store(delivery.queue_position, Ordering::Relaxed);
        row[4].store(delivery.holder, Ordering::Relaxed);
        row[5].store(delivery_position, Ordering::Relaxed);
        row[6].store(delivery.deadline_ns, Ordering::Relaxed);
        row[7].store(delivery.shown.bits(), Ordering::Relaxed);
        crash_point("take a lease entry");
        row[0].store(
            pack(LeaseState::Leased, delivery.history, delivery.queue),
            Ordering::Release,
        );
    }

    /// Changes the state of a row, and what its message has been through.
    #[inline]
    pub fn set_state(&self, entry: LeaseEntry, state: LeaseState, history: History) {
        let at = entry as usize * ROW_WORDS;
        let queue = (self.words.get(at) >> 32) as u32;
        self.words
            .set("note a lease's state", at, pack(state, history, queue));
    }

    /// Changes a row's deadline.
    pub fn set_deadline(&self, entry: LeaseEntry, deadline_ns: u64) {
        self.words.set(
            "note a lease's deadline",
            entry as usize * ROW_WORDS + 6,
            deadline_ns,
        );
    }

    /// Gives a row's message a position (plus one) in its queue.
    pub fn set_queue_position(&self, entry: LeaseEntry, queue_position: u64) {
        let at = entry as usize * ROW_WORDS + 3;
        self.words
            .set("note a leased message's place", at, queue_position);
    }

    /// The lease shows its holder nothing any more.
    pub fn set_unshown(&self, entry: LeaseEntry) {
        self.words.set(
            "note that a lease shows nothing",
            entry as usize * ROW_WORDS + 7,
            0,
        );
    }

    /// The rows in use.
    pub fn used_rows(&self) -> Result<Vec<LeaseRow>, LedgerError> {
        let mut rows = Vec::new();
        for entry in 1..self.rows {
            let at = |word: usize| self.words.get(entry as usize * ROW_WORDS + word);
            let head = at(0);
            let state = LeaseState::from_number(head as u8);
            let state = state.ok_or_else(|| self.words.corrupt("impossible state of a lease"))?;
            if state == LeaseState::Free {
                continue;
            }
            rows.push(LeaseRow {
                entry,
                state,
                history: History::from_bits((head >> 16) as u16),
                queue: (head >> 32) as u32,
                session: at(1),
                position: at(2),
                queue_position: at(3),
                holder: at(4),
                delivery_position: at(5),
                deadline_ns: at(6),
                shown: Shown::from_bits(at(7)),
            });
        }
        Ok(rows)
    }
}

fn pack(state: LeaseState, history: History, queue: u32) -> u64 {
    state as u64 | u64::from(history.bits()) << 16 | u64::from(queue) << 32
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::hub::Payload;

    const SHOWN: Shown = Shown::Inbound {
        segment: 3,
        unit: 1 << 20,
        units: 1 << 19,
    };

    #[test]
    fn rows_survive_their_writer_and_free_ones_are_not_found() {
        let dir = tempfile::tempdir().unwrap();
        let table = LeaseTable::create(dir.path()).unwrap();
        let delivery = Delivery {
            to: 0,
            holder: 9,
            attachment: 0,
            entry: 5,
            deadline_ns: 77,
            queue: 3,
            queue_position: 0,
            session: 4,
            position: 128,
            sent_at_ms: 1,
            history: History::default().after_lease(true),
            len: 0,
            payload: Payload::Block(b""),
            shown: SHOWN,
        };
        table.lease(&delivery, 640);
        table.lease(
            &Delivery {
                entry: 6,
                ..delivery
            },
            720,
        );
        table.set_state(6, LeaseState::Free, History::default());
        table.set_queue_position(5, 12);
        table.set_deadline(5, 78);
        table.set_unshown(6);
        drop(table);
        let rows = LeaseTable::open(dir.path()).unwrap().used_rows().unwrap();
        assert_eq!(rows.len(), 1);
        let row = rows[0];
        assert_eq!(
            (row.entry, row.state, row.queue),
            (5, LeaseState::Leased, 3)
        );
        assert_eq!(
            (row.session, row.position, row.queue_position),
            (4, 128, 12)
        );
        assert_eq!(
            (row.holder, row.delivery_position, row.deadline_ns),
            (9, 640, 78)
        );
        assert_eq!(row.history.attempts(), 1);
        assert_eq!(row.shown, SHOWN);
    }

    #[test]
    fn the_table_grows_to_its_limit() {
        let dir = tempfile::tempdir().unwrap();
        let mut table = LeaseTable::create(dir.path()).unwrap();
        while let Some(rows) = table.grow() {
            table.set_state(rows - 1, LeaseState::Acked, History::default());
        }
        assert_eq!(table.rows(), ROWS_MAX);
        assert_eq!(LeaseTable::open(dir.path()).unwrap().rows(), ROWS_MAX);
    }
}
