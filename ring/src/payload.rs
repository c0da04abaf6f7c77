//! Payload segments: chunks for payloads too large for a record.
//!
//! ```text
//!   0      a word of 8 bytes for each unit, padded to a page
//!   data   units of 4096 bytes
//! ```
//!
//! A chunk is a run of units. Of an *outbound* segment, the client's, the word of
//! a chunk's first unit carries the submission that took it: its position plus
//! one, written before the submission is published. The broker gives the chunk
//! back by compare-and-swap from that value to 0: so a successor that repeats the
//! step cannot take a chunk that the client has used again. Everything else of
//! the allocation ([`Outbound`]) is in the client's own memory: it ends with the
//! client, and so does the segment.
//!
//! Of an *inbound* segment, where the broker allocates and the client returns by
//! answering, the words are not used.

use crate::atomic::{AtomicU64, Ordering};
use crate::segment::{Mapping, SegmentError};
use crate::units::Units;
use std::collections::VecDeque;
use std::fs::File;
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Bytes of a unit: a page, so that chunks lie on pages of their own.
pub const UNIT_BYTES: usize = 4096;
/// Most units of a segment: 4 GiB.
pub const UNITS_MAX: u32 = 1 << 20;

/// How many units a payload of so many bytes takes: at least one. `None` if no
/// segment can hold it.
pub fn units_for(bytes: u64) -> Option<u32> {
    let units = bytes.div_ceil(UNIT_BYTES as u64).max(1);
    u32::try_from(units)
        .ok()
        .filter(|units| *units <= UNITS_MAX)
}

/// Length of a payload segment of so many units, in bytes.
pub fn segment_bytes(units: u32) -> u64 {
    words_bytes(units) + u64::from(units) * UNIT_BYTES as u64
}

/// Where the data of a segment begins.
fn words_bytes(units: u32) -> u64 {
    (u64::from(units) * 8).next_multiple_of(UNIT_BYTES as u64)
}

/// Where a unit's data lies in the file.
pub fn unit_offset(units: u32, unit: u32) -> u64 {
    words_bytes(units) + u64::from(unit) * UNIT_BYTES as u64
}

/// The words of an outbound segment, as the broker maps them: it reads the data
/// by the descriptor.
#[derive(Debug)]
pub struct ChunkWords {
    mapping: Mapping,
    units: u32,
}

impl ChunkWords {
    /// Maps the words of a segment of so many units.
    pub fn new(file: &File, path: &Path, units: u32) -> Result<ChunkWords, SegmentError> {
        let mapping = Mapping::new(file, path, words_bytes(units) as usize)?.watched();
        Ok(ChunkWords { mapping, units })
    }

    /// How many units the segment has.
    pub fn units(&self) -> u32 {
        self.units
    }

    /// Gives the chunk at this unit back, if it is the one that the submission at
    /// `position` took. Repeating it changes nothing.
    pub fn give_back(&self, unit: u32, position: u64) {
        if let Some(word) = self.mapping.words().get(unit as usize) {
            // Release: pairs with the Acquire in `Outbound::sweep`; whoever has
            // read the chunk has done so before the client writes it again. A
            // failure is a predecessor's success, or a client that writes
            // its words as it likes, at its own cost.
            let _ = word.compare_exchange(position + 1, 0, Ordering::Release, Ordering::Relaxed);
        }
    }

    /// The chunks that are taken, by what their words say: *(first unit, position
    /// of the submission)*. For a successor; to be checked.
    pub fn taken(&self) -> Vec<(u32, u64)> {
        let words = self.mapping.words().iter().take(self.units as usize);
        words
            .enumerate()
            .filter_map(|(unit, word)| {
                let position = word.load(Ordering::Acquire).checked_sub(1)?;
                Some((unit as u32, position))
            })
            .collect()
    }

    /// Whether the client has cut the segment short.
    pub fn is_damaged(&self) -> bool {
        self.mapping.is_damaged()
    }

    /// Says so, if a read of the data has found it.
    pub fn set_damaged(&self) {
        self.mapping.set_damaged();
    }
}

/// A payload segment, mapped whole.
#[derive(Debug)]
pub struct PayloadMap {
    mapping: Mapping,
    units: u32,
}

impl PayloadMap {
    /// Maps a segment of so many units, to write and read.
    pub fn new(file: &File, path: &Path, units: u32) -> Result<PayloadMap, SegmentError> {
        let mapping = Mapping::new(file, path, segment_bytes(units) as usize)?;
        Ok(PayloadMap { mapping, units })
    }

    /// Maps a segment of so many units, to read.
    pub fn read_only(file: &File, path: &Path, units: u32) -> Result<PayloadMap, SegmentError> {
        let mapping = Mapping::read_only(file, path, segment_bytes(units) as usize)?;
        Ok(PayloadMap { mapping, units })
    }

    /// How many units it has.
    pub fn units(&self) -> u32 {
        self.units
    }

    fn word(&self, unit: u32) -> &AtomicU64 {
        &self.mapping.words()[unit as usize]
    }

    /// Where the bytes of a chunk begin; panics if they are not all within.
    fn chunk(&self, unit: u32, len: usize) -> *mut u8 {
        assert!(self.holds(unit, len), "a chunk outside of its segment");
        let offset = unit_offset(self.units, unit) as usize;
        // SAFETY: within the mapping, by the line above.
        unsafe { self.mapping.start().add(offset) }
    }

    /// Whether a chunk of so many bytes can begin at this unit.
    pub fn holds(&self, unit: u32, len: usize) -> bool {
        let room = u64::from(self.units.saturating_sub(unit)) * UNIT_BYTES as u64;
        unit < self.units && len as u64 <= room
    }

    /// The bytes of a chunk, to be read in place; `None` if they are not all
    /// within the segment.
    ///
    /// Between clients of one user, which could harm each other anyway: a client
    /// that writes to a chunk after it was sent, or cuts its segment short,
    /// breaks its readers. No correct client does either.
    pub fn read(self: &Arc<Self>, unit: u32, len: usize) -> Option<ReadChunk> {
        self.holds(unit, len).then(|| ReadChunk {
            start: self.chunk(unit, len),
            len,
            _map: Arc::clone(self),
        })
    }
}

/// The bytes of a chunk that its owner does not write while this is here. Keeps
/// the segment mapped.
#[derive(Debug, Clone)]
pub struct ReadChunk {
    start: *const u8,
    len: usize,
    _map: Arc<PayloadMap>,
}

// SAFETY: the bytes are only read, and stay mapped as long as `_map` is held.
unsafe impl Send for ReadChunk {}
// SAFETY: as for Send.
unsafe impl Sync for ReadChunk {}

impl Deref for ReadChunk {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: in bounds and mapped, as `PayloadMap::read` has seen to; that
        // nobody writes there is what the protocol promises: the broker gives
        // the chunk back only after this reader has answered.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

/// A chunk that is being written, by its one owner.
#[derive(Debug)]
pub struct Loan {
    start: *mut u8,
    len: usize,
    unit: u32,
    units: u32,
    segment: u32,
    /// A submission that was published has taken it.
    taken: AtomicBool,
    map: Arc<PayloadMap>,
}

// SAFETY: the units are this loan's alone until it is sent or given back, and
// stay mapped as long as `map` is held.
unsafe impl Send for Loan {}
// SAFETY: as for Send; a shared loan is only read.
unsafe impl Sync for Loan {}

impl Loan {
    /// Number of the segment that it lies in.
    pub fn segment(&self) -> u32 {
        self.segment
    }

    /// Its first unit.
    pub fn unit(&self) -> u32 {
        self.unit
    }

    /// Makes it shorter; longer than it is has no effect.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Writes the chunk's word: the submission at `position` takes it, which must
    /// be published next.
    pub fn take(&self, position: u64) {
        // Relaxed, as this loan's owner alone asks.
        self.taken.store(true, Ordering::Relaxed);
        // Relaxed: the Release of the ring's tail comes after, and the broker
        // touches the word only once it has read the submission.
        self.map
            .word(self.unit)
            .store(position + 1, Ordering::Relaxed);
    }
}

impl Deref for Loan {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: in bounds and mapped, as `Outbound::allocate` has seen to.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl DerefMut for Loan {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and nobody else has these units.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

/// A chunk that was sent and not seen to be given back.
#[derive(Debug)]
struct Queued {
    unit: u32,
    units: u32,
}

/// A client's end of one outbound segment: it alone allocates.
#[derive(Debug)]
pub struct Outbound {
    map: Arc<PayloadMap>,
    /// The segment's number.
    segment: u32,
    free: Units,
    /// In the order of sending.
    queued: VecDeque<Queued>,
}

impl Outbound {
    /// Its number.
    pub fn segment(&self) -> u32 {
        self.segment
    }

    /// Of a new segment.
    pub fn new(map: PayloadMap, segment: u32) -> Outbound {
        Outbound {
            free: Units::new(map.units()),
            map: Arc::new(map),
            segment,
            queued: VecDeque::new(),
        }
    }

    /// How many units it has.
    pub fn units(&self) -> u32 {
        self.map.units()
    }

    /// Whether some chunk was sent and has not come back.
    pub fn has_queued(&self) -> bool {
        !self.queued.is_empty()
    }

    /// A chunk for `len` bytes, if there is one. What it holds is what was there
    /// before.
    pub fn allocate(&mut self, len: usize) -> Option<Loan> {
        let units = units_for(len as u64)?;
        self.sweep_oldest();
        let unit = self.free.allocate(units).or_else(|| {
            self.sweep();
            self.free.allocate(units)
        })?;
        Some(Loan {
            start: self.map.chunk(unit, len),
            len,
            unit,
            units,
            segment: self.segment,
            taken: AtomicBool::new(false),
            map: Arc::clone(&self.map),
        })
    }

    /// Its owner is done with a loan of this segment: if a submission has taken
    /// it, the broker gives it back some time; else it is free.
    pub fn put_back(&mut self, loan: Loan) {
        let Loan { unit, units, .. } = loan;
        if loan.taken.load(Ordering::Relaxed) {
            self.queued.push_back(Queued { unit, units });
        } else {
            self.free.give_back(unit, units);
        }
    }

    fn is_returned(map: &PayloadMap, queued: &Queued) -> bool {
        // Acquire: pairs with the Release in `ChunkWords::give_back`.
        map.word(queued.unit).load(Ordering::Acquire) == 0
    }

    /// Takes back what came back in the order of sending, which is nearly all:
    /// so that a chunk in use again is one that was used a moment ago, and still
    /// lies in the cache.
    fn sweep_oldest(&mut self) {
        while let Some(queued) = self.queued.front()
            && Self::is_returned(&self.map, queued)
        {
            self.free.give_back(queued.unit, queued.units);
            self.queued.pop_front();
        }
    }

    fn sweep(&mut self) {
        let (map, free) = (&self.map, &mut self.free);
        self.queued.retain(|queued| {
            let returned = Self::is_returned(map, queued);
            if returned {
                free.give_back(queued.unit, queued.units);
            }
            !returned
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(units: u32) -> (tempfile::TempDir, File, std::path::PathBuf) {
        let dir = tempfile::tempdir().expect("folder");
        let path = dir.path().join("payloads");
        let file = crate::segment::create(&path, segment_bytes(units)).expect("creates");
        (dir, file, path)
    }

    /// I9: a chunk that was sent comes back by its word, and not before.
    #[test]
    fn a_chunk_is_free_again_when_the_broker_gives_it_back() {
        let (_dir, file, path) = segment(4);
        let mut outbound = Outbound::new(PayloadMap::new(&file, &path, 4).expect("maps"), 0);
        let words = ChunkWords::new(&file, &path, 4).expect("maps");
        let mut loans: Vec<Loan> = (0..4)
            .map(|_| outbound.allocate(UNIT_BYTES).expect("free"))
            .collect();
        assert!(outbound.allocate(1).is_none());
        for (at, loan) in loans.drain(..).enumerate() {
            loan.take(at as u64 * 64);
            outbound.put_back(loan);
        }
        assert_eq!(words.taken(), [(0, 0), (1, 64), (2, 128), (3, 192)]);
        assert!(outbound.allocate(1).is_none());
        // Of another submission: not this chunk any more.
        words.give_back(2, 0);
        assert!(outbound.allocate(1).is_none());
        words.give_back(2, 128);
        assert_eq!(outbound.allocate(1).expect("free").unit(), 2);
        words.give_back(0, 0);
        words.give_back(1, 64);
        assert_eq!(outbound.allocate(2 * UNIT_BYTES).expect("free").unit(), 0);
    }

    #[test]
    fn a_loan_given_back_is_free_and_what_was_written_is_read() {
        let (_dir, file, path) = segment(8);
        let mut outbound = Outbound::new(PayloadMap::new(&file, &path, 8).expect("maps"), 3);
        let mut loan = outbound.allocate(5000).expect("free");
        assert_eq!((loan.segment(), loan.len()), (3, 5000));
        loan.fill(7);
        loan.truncate(4999);
        let reader = Arc::new(PayloadMap::read_only(&file, &path, 8).expect("maps"));
        let seen = reader.read(loan.unit(), loan.len()).expect("within");
        assert_eq!(&seen[..], &[7; 4999]);
        outbound.put_back(loan);
        assert_eq!(outbound.allocate(8 * UNIT_BYTES).expect("free").unit(), 0);
        assert!(!outbound.has_queued());
    }

    /// I8: what a reader is told is checked.
    #[test]
    fn no_chunk_lies_outside_of_its_segment() {
        let (_dir, file, path) = segment(4);
        let map = Arc::new(PayloadMap::read_only(&file, &path, 4).expect("maps"));
        assert!(map.read(3, UNIT_BYTES).is_some());
        for (unit, len) in [(3, UNIT_BYTES + 1), (4, 0), (u32::MAX, 1), (0, usize::MAX)] {
            assert!(map.read(unit, len).is_none(), "{unit} {len}");
        }
        assert_eq!(units_for(0), Some(1));
        assert_eq!(units_for(4097), Some(2));
        assert_eq!(units_for(u64::MAX), None);
    }
}
