//! What the ledger keeps of one session.
//!
//! ```text
//!   word 2 session           8 state
//!        3 pid | uid << 32   9 round, end, answer tail
//!        4 start time       12 round, end, answer tail
//!        5 gid              15 delivery cursor
//!        6 submission | delivery ring bytes << 32
//!        7 answer ring bytes
//!       16 number of attachments    17 final position    18 layout of the segment
//!       20 number of outbound, inbound payload segments
//!       24 units of outbound segments    40 units of inbound segments
//!       64 attachments: queue | purpose << 32, window
//! ```
//!
//! Up to where a session is committed follows from two slots, written in turn
//! when a round is closed that has a part of it: the end of a round counts if
//! the round is committed, which one word decides for all sessions at once. A
//! slot's round is stored after its end, and cleared before: so no end is ever
//! read with another round's number. A round that was closed and never committed
//! may stay in a slot; a successor forgets it before it commits a later one,
//! which would make it count.

use super::{LedgerError, Words};
use crate::control::Peer;
use crate::store::QueueNumber;
use ringmain::control::Purpose;
use ringmain_ring::layout::{ATTACHMENTS_MAX, Geometry, LAYOUT_VERSION};
use ringmain_ring::payload::UNITS_MAX;
use std::path::{Path, PathBuf};

const SESSION: usize = 2;
const PID_UID: usize = 3;
const START_TIME: usize = 4;
const GID: usize = 5;
const RINGS: usize = 6;
const ANSWER_BYTES: usize = 7;
const STATE: usize = 8;
const SLOTS: usize = 9;
const DELIVERY_CURSOR: usize = 15;
const ATTACHMENTS: usize = 16;
const FINAL_POSITION: usize = 17;
const LAYOUT: usize = 18;
const SEGMENT_COUNTS: usize = 20;
const SEGMENT_UNITS: usize = 24;
const FIRST_ATTACHMENT: usize = 64;
const BYTES: u64 = ((FIRST_ATTACHMENT + 2 * ATTACHMENTS_MAX) * 8) as u64;

/// Most payload segments of a session in each direction. Each is as large as all
/// before it, so that a session meets other limits first.
pub const SEGMENTS_MAX: usize = 16;
const _: () = assert!(SEGMENT_UNITS + 2 * SEGMENTS_MAX <= FIRST_ATTACHMENT);

/// Which way a payload segment's contents go, as the client sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Direction {
    /// The client writes.
    Outbound = 0,
    /// The broker writes.
    Inbound = 1,
}

/// Round number of a slot that says nothing.
const NO_ROUND: u64 = u64::MAX;

/// How far a session has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum SessionState {
    /// Its client has not said that it is ready. It has sent nothing.
    Opening = 1,
    /// In use.
    Open = 2,
    /// No more records come from it.
    Closing = 3,
}

/// The ledger of one session.
#[derive(Debug)]
pub struct SessionLedger {
    words: Words,
}

impl SessionLedger {
    /// Where it lies.
    pub fn path(dir: &Path, session: u64) -> PathBuf {
        dir.join(format!("s{session}.ledger"))
    }

    /// Makes the ledger of a session that is opening.
    pub fn create(
        dir: &Path,
        session: u64,
        peer: Peer,
        geometry: Geometry,
    ) -> Result<SessionLedger, LedgerError> {
        let words = Words::create(Self::path(dir, session), BYTES, BYTES)?;
        words.put(SESSION, session);
        words.put(
            PID_UID,
            u64::from(peer.pid as u32) | u64::from(peer.uid) << 32,
        );
        words.put(START_TIME, peer.start_time);
        words.put(GID, u64::from(peer.gid));
        let rings = u64::from(geometry.submission_bytes) | u64::from(geometry.delivery_bytes) << 32;
        words.put(RINGS, rings);
        words.put(ANSWER_BYTES, u64::from(geometry.answer_bytes));
        words.put(SLOTS, NO_ROUND);
        words.put(SLOTS + 3, NO_ROUND);
        words.put(FINAL_POSITION, u64::MAX);
        words.put(LAYOUT, u64::from(LAYOUT_VERSION));
        words.put(STATE, SessionState::Opening as u64);
        words.publish();
        Ok(SessionLedger { words })
    }

    /// Opens the ledger of a session that a predecessor left.
    pub fn open(dir: &Path, session: u64) -> Result<SessionLedger, LedgerError> {
        let words = Words::open(Self::path(dir, session), BYTES)?;
        if words.get(SESSION) != session {
            return Err(words.corrupt("another session's number"));
        }
        match words.get(LAYOUT) {
            layout if layout == u64::from(LAYOUT_VERSION) => Ok(SessionLedger { words }),
            found => Err(LedgerError::Version {
                path: words.path,
                found,
                known: u64::from(LAYOUT_VERSION),
            }),
        }
    }

    /// Whose it is.
    pub fn peer(&self) -> Peer {
        Peer {
            pid: self.words.get(PID_UID) as u32 as i32,
            start_time: self.words.get(START_TIME),
            uid: (self.words.get(PID_UID) >> 32) as u32,
            gid: self.words.get(GID) as u32,
        }
    }

    /// The sizes of its rings.
    pub fn geometry(&self) -> Geometry {
        let rings = self.words.get(RINGS);
        Geometry {
            submission_bytes: rings as u32,
            delivery_bytes: (rings >> 32) as u32,
            answer_bytes: self.words.get(ANSWER_BYTES) as u32,
        }
    }

    /// How far it has come.
    pub fn state(&self) -> Result<SessionState, LedgerError> {
        match self.words.get(STATE) {
            1 => Ok(SessionState::Opening),
            2 => Ok(SessionState::Open),
            3 => Ok(SessionState::Closing),
            _ => Err(self.words.corrupt("impossible state of a session")),
        }
    }

    /// It has come further.
    pub fn set_state(&self, state: SessionState) {
        self.words
            .set("note a session's state", STATE, state as u64);
    }

    /// The round, which is being closed, has the session's records before `end`
    /// and its answers before `answer_tail`.
    pub fn freeze(&self, round: u64, end: u64, answer_tail: u64) {
        // The other slot has the end that counts until this round is committed.
        // NO_ROUND comes first in this order.
        let age = |slot: &usize| self.words.get(*slot).wrapping_add(1);
        let [first, second] = [SLOTS, SLOTS + 3];
        let slot = if age(&first) <= age(&second) {
            first
        } else {
            second
        };
        self.words.set("retire a session's round", slot, NO_ROUND);
        self.words.put(slot + 1, end);
        self.words.put(slot + 2, answer_tail);
        self.words.set("freeze a session's round", slot, round);
    }

    /// End of the committed records and of their answers, if `round` is the last
    /// committed one.
    pub fn committed(&self, round: u64) -> (u64, u64) {
        let slots = [SLOTS, SLOTS + 3].map(|slot| {
            let known = self.words.get(slot);
            // NO_ROUND is greater than any round.
            match known <= round {
                true => (self.words.get(slot + 1), self.words.get(slot + 2)),
                false => (0, 0),
            }
        });
        slots[0].max(slots[1])
    }

    /// Forgets rounds after `round`, the last committed one: they never were.
    pub fn forget_rounds_after(&self, round: u64) {
        for slot in [SLOTS, SLOTS + 3] {
            if self.words.get(slot) > round {
                self.words.set("forget a lost round", slot, NO_ROUND);
            }
        }
    }

    /// Deliveries before this position are leased, whether published or not.
    pub fn delivery_cursor(&self) -> u64 {
        self.words.get(DELIVERY_CURSOR)
    }

    /// The moment of leasing: deliveries before this position are leased now.
    #[inline]
    pub fn set_delivery_cursor(&self, position: u64) {
        self.words
            .set("lease deliveries", DELIVERY_CURSOR, position);
    }

    /// Once the client was told where its submissions end: there.
    /// [`u64::MAX`] before.
    pub fn final_position(&self) -> u64 {
        self.words.get(FINAL_POSITION)
    }

    /// Notes, before the client is told, where its submissions end.
    pub fn set_final_position(&self, position: u64) {
        self.words
            .set("note the final position", FINAL_POSITION, position);
    }

    /// The units of its payload segments in this direction, by number.
    pub fn segments(&self, direction: Direction) -> Result<Vec<u32>, LedgerError> {
        let count = self.words.get(SEGMENT_COUNTS + direction as usize) as usize;
        if count > SEGMENTS_MAX {
            return Err(self.words.corrupt("impossible number of payload segments"));
        }
        let first = SEGMENT_UNITS + direction as usize * SEGMENTS_MAX;
        (first..first + count)
            .map(|at| {
                let units = u32::try_from(self.words.get(at)).ok();
                let units = units.filter(|units| (1..=UNITS_MAX).contains(units));
                units.ok_or_else(|| self.words.corrupt("impossible size of a payload segment"))
            })
            .collect()
    }

    /// Notes a payload segment, which is there, before anything uses it.
    pub fn add_segment(&self, direction: Direction, segment: u32, units: u32) {
        let first = SEGMENT_UNITS + direction as usize * SEGMENTS_MAX;
        self.words.put(first + segment as usize, u64::from(units));
        let count = SEGMENT_COUNTS + direction as usize;
        self.words
            .set("note a payload segment", count, u64::from(segment) + 1);
    }

    /// Its attachments, by index.
    pub fn attachments(&self) -> Result<Vec<(QueueNumber, Purpose, u32)>, LedgerError> {
        let count = self.words.get(ATTACHMENTS) as usize;
        if count > ATTACHMENTS_MAX {
            return Err(self.words.corrupt("impossible number of attachments"));
        }
        let attachment = |index: usize| {
            let word = self.words.get(FIRST_ATTACHMENT + 2 * index);
            let purpose = match word >> 32 {
                0 => Purpose::Produce,
                _ => Purpose::Consume,
            };
            let window = self.words.get(FIRST_ATTACHMENT + 2 * index + 1) as u32;
            (word as QueueNumber, purpose, window)
        };
        Ok((0..count).map(attachment).collect())
    }

    /// Notes an attachment, before anything uses it. Noting it again changes
    /// nothing.
    pub fn attach(&self, index: u32, queue: QueueNumber, purpose: Purpose, window: u32) {
        let at = FIRST_ATTACHMENT + 2 * index as usize;
        let consume = u64::from(purpose == Purpose::Consume);
        self.words.put(at, u64::from(queue) | consume << 32);
        self.words.put(at + 1, u64::from(window));
        let count = self.words.get(ATTACHMENTS);
        self.words.set(
            "note an attachment",
            ATTACHMENTS,
            count.max(u64::from(index) + 1),
        );
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    const PEER: Peer = Peer {
        pid: 12,
        start_time: 34,
        uid: 56,
        gid: 78,
    };

    #[test]
    fn a_successor_finds_the_session() {
        let dir = tempfile::tempdir().unwrap();
        let made = SessionLedger::create(dir.path(), 5, PEER, Geometry::default()).unwrap();
        made.attach(0, 3, Purpose::Produce, 0);
        made.attach(1, 4, Purpose::Consume, 9);
        made.set_delivery_cursor(640);
        made.add_segment(Direction::Outbound, 0, 1024);
        made.add_segment(Direction::Outbound, 1, 2048);
        made.add_segment(Direction::Inbound, 0, 77);
        made.set_state(SessionState::Open);
        drop(made);
        let found = SessionLedger::open(dir.path(), 5).unwrap();
        assert_eq!(found.peer(), PEER);
        assert_eq!(found.geometry(), Geometry::default());
        assert_eq!(found.state().unwrap(), SessionState::Open);
        assert_eq!(found.delivery_cursor(), 640);
        let attachments = [(3, Purpose::Produce, 0), (4, Purpose::Consume, 9)];
        assert_eq!(found.attachments().unwrap(), attachments);
        assert_eq!(found.segments(Direction::Outbound).unwrap(), [1024, 2048]);
        assert_eq!(found.segments(Direction::Inbound).unwrap(), [77]);
    }

    /// I10: which records count as committed is decided by the round alone.
    #[test]
    fn the_committed_end_is_that_of_the_last_committed_round() {
        let dir = tempfile::tempdir().unwrap();
        let ledger = SessionLedger::create(dir.path(), 5, PEER, Geometry::default()).unwrap();
        assert_eq!(ledger.committed(9), (0, 0));
        ledger.freeze(10, 100, 8);
        assert_eq!(ledger.committed(9), (0, 0));
        assert_eq!(ledger.committed(10), (100, 8));
        ledger.freeze(11, 200, 16);
        assert_eq!(ledger.committed(10), (100, 8));
        assert_eq!(ledger.committed(11), (200, 16));
        // A session that sits out rounds, by any pattern.
        for (last, next) in [(11, 13), (13, 15), (15, 18), (18, 20)] {
            let before = ledger.committed(last);
            ledger.freeze(next, next * 100, 16);
            assert_eq!(ledger.committed(next - 1), before);
            assert_eq!(ledger.committed(next), (next * 100, 16));
        }
        // A round that was closed and lost does not count when later ones have
        // been committed.
        ledger.freeze(21, 9999, 16);
        ledger.forget_rounds_after(20);
        assert_eq!(ledger.committed(25), (2000, 16));
    }
}
