//! One session as the service thread holds it.

use super::payloads::{Payloads, remove_segments};
use crate::control::{ConnId, Peer};
use crate::crash::crash_point;
use crate::ledger::{LedgerError, SessionLedger, SessionState};
use nix::sys::eventfd::{EfdFlags, EventFd};
use ringmain::record::{LEASES_MAX, answer};
use ringmain_ring::Ordering;
use ringmain_ring::layout::{Geometry, RING_BYTES_MIN};
use ringmain_ring::record_ring::{Damaged, Reader, Writer};
use ringmain_ring::segment::{self, SegmentError};
use ringmain_ring::session::SessionMap;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Room in the answer ring without which no further record is read: that of the
/// answers to one record. All answers are of one size, so there is no padding.
const ANSWER_ROOM: u64 = (LEASES_MAX * answer::BYTES) as u64;
const _: () = assert!(
    ANSWER_ROOM <= RING_BYTES_MIN as u64 && (RING_BYTES_MIN as usize).is_multiple_of(answer::BYTES)
);

/// A session's rings, its ledger, and its ways to the client.
#[derive(Debug)]
pub(super) struct SessionIo {
    pub number: u64,
    pub map: Arc<SessionMap>,
    pub ledger: SessionLedger,
    pub submission: Reader,
    pub delivery: Writer,
    pub answers: Writer,
    pub payloads: Payloads,
    /// Rung by the client when the broker sleeps.
    pub doorbell: EventFd,
    /// Its connection; `None` while an adopted session has not been resumed.
    pub conn: Option<ConnId>,
    pub peer: Peer,
    pub state: SessionState,
    /// End of the committed records.
    pub committed: u64,
    /// End of the synced records.
    pub synced: u64,
    /// Someone waits for the records before this to be synced.
    pub flush_synced: u64,
    /// What happened that its client may wait for.
    pub wake: u32,
    /// It is in the list of sessions that are looked at in every pass.
    pub active: bool,
    /// Passes since it sent something.
    pub idle_passes: u32,
    /// The hub was told that it has ended.
    pub ended: bool,
    /// And that its client reads nothing any more.
    pub reader_gone: bool,
    /// What its client did that no correct client does.
    pub broken: Option<String>,
}

/// Where a session's segment lies.
pub(super) fn segment_path(dir: &Path, session: u64) -> PathBuf {
    dir.join(format!("s{session}.ring"))
}

fn is_cut_short(file: &File, geometry: Geometry) -> bool {
    let found = file.metadata();
    found.is_ok_and(|found| found.len() < geometry.segment_bytes() as u64)
}

fn doorbell() -> Result<EventFd, SegmentError> {
    let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
    EventFd::from_value_and_flags(0, flags).map_err(|errno| SegmentError::Io {
        what: "cannot make a doorbell for a session in",
        path: PathBuf::from("eventfd"),
        source: errno.into(),
    })
}

impl SessionIo {
    /// Makes a session's segment and ledger. Gives the segment's file too, for
    /// the client.
    pub fn create(
        dir: &Path,
        instance: u64,
        number: u64,
        geometry: Geometry,
        conn: ConnId,
        peer: Peer,
    ) -> Result<(SessionIo, File), LedgerError> {
        let path = segment_path(dir, number);
        let doorbell = doorbell()?;
        crash_point("make a session's segment");
        let file = segment::create(&path, geometry.segment_bytes() as u64)?;
        crash_point("initialise a session's segment");
        let map = SessionMap::initialise(&file, &path, geometry, instance, number);
        // The ledger last: a segment without one is what a broker left that died
        // here, and nobody has used it.
        let ledger = map.map_err(LedgerError::from).and_then(|map| {
            let ledger = SessionLedger::create(dir, number, peer, geometry)?;
            Ok((map, ledger))
        });
        let (map, ledger) = match ledger {
            Ok(made) => made,
            Err(error) => {
                remove_files(dir, number);
                return Err(error);
            }
        };
        let session = SessionIo {
            number,
            map: Arc::new(map),
            ledger,
            submission: Reader::new(0, 0),
            delivery: Writer::new(0, 0),
            answers: Writer::new(0, 0),
            payloads: Payloads::default(),
            doorbell,
            conn: Some(conn),
            peer,
            state: SessionState::Opening,
            committed: 0,
            synced: 0,
            flush_synced: 0,
            wake: 0,
            active: false,
            idle_passes: 0,
            ended: false,
            reader_gone: false,
            broken: None,
        };
        Ok((session, file))
    }

    /// Takes over a session that a predecessor left, committed up to
    /// `committed` with its answers up to `answer_tail`. What the client's
    /// cursors say is checked by the first look at each ring.
    pub fn adopt(
        dir: &Path,
        instance: u64,
        number: u64,
        ledger: SessionLedger,
        (committed, answer_tail): (u64, u64),
    ) -> Result<SessionIo, LedgerError> {
        let path = segment_path(dir, number);
        let file = OpenOptions::new().read(true).write(true).open(&path);
        let file = file.map_err(|source| SegmentError::Io {
            what: "cannot open",
            path: path.clone(),
            source,
        })?;
        let geometry = ledger.geometry();
        let mut broken = None;
        if geometry.is_valid() && is_cut_short(&file, geometry) {
            // All of it was there before its client had it. What it had sent is
            // gone; a start that failed here would make it everybody's loss.
            crash_point("make up for what a segment lacks");
            segment::reserve(&file, &path, 0, geometry.segment_bytes() as u64)?;
            broken = Some("its segment was cut short".to_owned());
        }
        let map = SessionMap::adopt(&file, &path, geometry, instance, number)?;
        let (payloads, damage) = Payloads::adopt(dir, number, &ledger)?;
        broken = broken.or(damage);
        let cursor = ledger.delivery_cursor();
        let header = map.header();
        let head = |word: &ringmain_ring::AtomicU64, tail: u64, size: u32| {
            let head = word.load(Ordering::Acquire);
            let plausible =
                head <= tail && tail - head <= u64::from(size) && head.is_multiple_of(8);
            plausible.then_some(head)
        };
        let delivery = head(&header.delivery_head.word, cursor, geometry.delivery_bytes);
        let answer = head(&header.answer_head.word, answer_tail, geometry.answer_bytes);
        if broken.is_none() && (delivery.is_none() || answer.is_none()) {
            broken = Some("impossible cursors after a restart of the broker".to_owned());
        }
        let peer = ledger.peer();
        let state = ledger.state()?;
        Ok(SessionIo {
            number,
            ledger,
            submission: Reader::new(committed, committed),
            delivery: Writer::new(cursor, delivery.unwrap_or(cursor)),
            answers: Writer::new(answer_tail, answer.unwrap_or(answer_tail)),
            map: Arc::new(map),
            payloads,
            doorbell: doorbell()?,
            conn: None,
            peer,
            state,
            committed,
            // The store was synced when it was opened.
            synced: committed,
            flush_synced: 0,
            wake: 0,
            active: false,
            idle_passes: 0,
            ended: false,
            reader_gone: false,
            broken,
        })
    }

    /// Brings the shared cursors to what is committed and leased: the steps of
    /// the last committed round that a predecessor may have left undone, and the
    /// deliveries that it wrote and did not lease.
    pub fn finish_predecessors_round(&mut self) {
        let map = self.map.clone();
        let header = map.header();
        crash_point("publish a predecessor's answers");
        self.answers.publish(map.answers());
        crash_point("confirm a predecessor's round");
        header
            .confirmations
            .stored
            .store(self.committed, Ordering::Release);
        crash_point("confirm what the store had synced");
        header
            .confirmations
            .synced
            .store(self.committed, Ordering::Release);
        crash_point("free a predecessor's records");
        self.submission.free(map.submission(), self.committed);
        crash_point("publish a predecessor's deliveries");
        self.delivery.publish(map.delivery());
    }

    /// A new doorbell, for a client that resumes.
    pub fn renew_doorbell(&mut self) -> Result<(), SegmentError> {
        self.doorbell = doorbell()?;
        Ok(())
    }

    /// Whether the answers to one more record are sure to find room.
    #[inline]
    pub fn has_answer_room(&mut self) -> Result<bool, Damaged> {
        let ring = self.map.answers();
        let most = ring.area.size() as u64 - ANSWER_ROOM;
        Ok(self.answers.used() <= most || self.answers.refresh(ring)? <= most)
    }

    /// Publishes that records before `end` are committed.
    pub fn confirm(&mut self, end: u64, answer_tail: u64, synced: bool) {
        let map = self.map.clone();
        let confirmations = &map.header().confirmations;
        self.committed = end;
        crash_point("publish answers");
        self.answers.publish_to(map.answers(), answer_tail);
        crash_point("confirm what is stored");
        // Release: pairs with the client's Acquire; who sees the cursor finds
        // the answers published before.
        confirmations.stored.store(end, Ordering::Release);
        if synced {
            self.confirm_synced(end);
        }
        crash_point("free records");
        self.submission.free(map.submission(), end);
    }

    /// Whether half of the submission ring is free, as far as was looked.
    pub fn is_half_free(&self) -> bool {
        let used = self.submission.published() - self.submission.freed();
        used <= self.map.submission().area.size() as u64 / 2
    }

    /// Publishes that records before `end` are synced.
    pub fn confirm_synced(&mut self, end: u64) {
        self.synced = self.synced.max(end);
        let synced = &self.map.header().confirmations.synced;
        crash_point("confirm what is synced");
        synced.store(self.synced, Ordering::Release);
    }

    /// Closes the session to its client: reads `tail` a last time.
    pub fn begin_closing(&mut self) {
        crash_point("close a session to its client");
        self.map
            .broker_wait()
            .set(ringmain_ring::wait::broker::CLOSING);
        self.ledger.set_state(SessionState::Closing);
        self.state = SessionState::Closing;
    }

    /// Tells the client exactly what was taken in.
    pub fn publish_final_position(&self) {
        let position = self.submission.next_position();
        self.ledger.set_final_position(position);
        let word = &self.map.header().confirmations.final_position;
        crash_point("publish the final position");
        word.store(position, Ordering::Release);
    }
}

/// Removes a session's files, the ledger first: a segment without a ledger is
/// nobody's.
pub(super) fn remove_files(dir: &Path, number: u64) {
    crash_point("remove a session's ledger");
    let _ = std::fs::remove_file(SessionLedger::path(dir, number));
    crash_point("remove a session's segment");
    let _ = std::fs::remove_file(segment_path(dir, number));
    remove_segments(dir, number);
}
