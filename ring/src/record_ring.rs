//! The record ring: one writer, one reader, records of bytes.
//!
//! ```text
//!            head                     tail
//!             |  published, to be read  |
//!   | free    v#########################v        free     |
//!   0 ................................................. len
//! ```
//!
//! Positions count bytes for ever upwards; a record lies at its position modulo
//! the ring's length, which is a power of two. A record is a header of 8 bytes
//! and its content, padded to 8 bytes, in one piece: where it would wrap, a
//! padding record fills the rest.
//!
//! The protocol is two cursors, each with one writer:
//!
//! - The writer fills records beyond `tail`, then stores `tail` with Release.
//!   The reader loads it with Acquire: without the pair it could see the new
//!   `tail` and old bytes. One store publishes any number of records.
//! - The reader stores `head` with Release when it needs the bytes before it no
//!   more. The writer loads it with Acquire: without the pair its next record
//!   could overwrite bytes that the reader still copies.
//!
//! A writer that dies before the store of `tail` has written nothing; a reader
//! that dies before the store of `head` has freed nothing. So neither leaves
//! anything to repair.
//!
//! Each side keeps its own cursor in private memory and never reads it back,
//! and caches the other's, so that a batch moves few cache lines and a foreign
//! process that scribbles over a cursor is noticed ([`Damaged`]), never obeyed.

use crate::atomic::{AtomicU64, Ordering};
use crate::view::Area;

/// Bytes of a record's header.
pub const RECORD_HEADER_BYTES: usize = 8;
/// Kind of a record that only fills the ring up to its end.
const PADDING: u8 = 0;

/// One ring as it lies in memory: what both sides share.
#[derive(Clone, Copy)]
pub struct Ring<'a> {
    /// Up to where records are published.
    pub tail: &'a AtomicU64,
    /// Up to where bytes are free again.
    pub head: &'a AtomicU64,
    /// The records.
    pub area: Area<'a>,
}

impl Ring<'_> {
    #[inline]
    fn offset(&self, position: u64) -> usize {
        (position & (self.area.size() as u64 - 1)) as usize
    }
}

/// The ring has no room for the record now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the ring is full")]
pub struct Full;

/// The other side wrote what no correct program writes; the session must end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Damaged {
    /// A cursor that runs backwards, is not a multiple of 8, or is further from
    /// its partner than the ring is long.
    #[error("cursor at {found} where {low} to {high} is possible")]
    Cursor {
        /// What the cursor said.
        found: u64,
        /// Least possible value.
        low: u64,
        /// Greatest possible value.
        high: u64,
    },
    /// A record that reaches beyond what is published, or beyond the ring's end.
    #[error("record at {position} claims {length} bytes where {available} are there")]
    Record {
        /// Where the record lies.
        position: u64,
        /// The length in its header.
        length: u32,
        /// Bytes there are for its content.
        available: u64,
    },
}

fn check_cursor(found: u64, low: u64, high: u64) -> Result<u64, Damaged> {
    // In the order of the ring's positions, which never reach 2^63.
    if found < low || found > high || !found.is_multiple_of(8) {
        return Err(Damaged::Cursor { found, low, high });
    }
    Ok(found)
}

/// Bytes that a record with so much content takes in a ring.
#[inline]
pub const fn record_bytes(content: usize) -> usize {
    RECORD_HEADER_BYTES + content.next_multiple_of(8)
}

#[inline]
fn pack(kind: u8, flags: u16, length: u32) -> u64 {
    u64::from(length) | u64::from(kind) << 32 | u64::from(flags) << 40
}

/// The writing side's private state.
#[derive(Debug)]
pub struct Writer {
    /// Where the next record goes.
    next: u64,
    /// Last value stored in `tail`.
    published: u64,
    /// Last value read from `head`.
    head: u64,
}

/// Room for one record's content, to be filled before the publish.
pub struct Slot<'a> {
    area: Area<'a>,
    offset: usize,
    /// The record's position in the ring.
    pub position: u64,
}

impl<'a> Slot<'a> {
    /// Sets eight bytes of the content at `at`, a multiple of 8.
    #[inline]
    pub fn put_u64(&self, at: usize, value: u64) {
        self.area.store(self.offset + at, value);
    }

    /// Sets bytes of the content from `at`.
    #[inline]
    pub fn put_bytes(&self, at: usize, bytes: &[u8]) {
        self.area.copy_in(self.offset + at, bytes);
    }

    /// The ring's bytes and where this content begins in them, to copy from
    /// another ring without a stop in private memory.
    #[inline]
    pub fn target(&self) -> (Area<'a>, usize) {
        (self.area, self.offset)
    }
}

impl Writer {
    /// A writer that goes on at `tail`: 0 for a new ring. Neither cursor may
    /// come from memory that another side can write: see [`Writer::resume`].
    pub fn new(tail: u64, head: u64) -> Writer {
        assert!(head <= tail && tail.is_multiple_of(8));
        Writer {
            next: tail,
            published: tail,
            head,
        }
    }

    /// A writer that goes on at `tail`, which this side knows, with the `head`
    /// that the other side has in the ring.
    pub fn resume(ring: Ring<'_>, tail: u64) -> Result<Writer, Damaged> {
        let low = tail.saturating_sub(ring.area.size() as u64);
        // Acquire: as in `refresh`.
        let head = check_cursor(ring.head.load(Ordering::Acquire), low, tail)?;
        Ok(Writer::new(tail, head))
    }

    /// Position of the next record, unless padding has to come first.
    #[inline]
    pub fn next_position(&self) -> u64 {
        self.next
    }

    /// Whether records wait for [`Writer::publish`].
    #[inline]
    pub fn has_unpublished(&self) -> bool {
        self.next != self.published
    }

    /// Bytes in use, as far as this side knows without asking `head` again.
    #[inline]
    pub fn used(&self) -> u64 {
        self.next - self.head
    }

    /// Reads the other side's `head`. Returns bytes in use now.
    pub fn refresh(&mut self, ring: Ring<'_>) -> Result<u64, Damaged> {
        // Acquire: pairs with the Release in `Reader::free`; what the reader
        // copied out was copied before we write over it.
        let head = ring.head.load(Ordering::Acquire);
        self.head = check_cursor(head, self.head, self.published)?;
        Ok(self.used())
    }

    /// Whether a record with `content` bytes fits now. Records of up to half the
    /// ring, header included, always fit an empty ring; longer ones may never.
    #[inline]
    pub fn fits(&mut self, ring: Ring<'_>, content: usize) -> Result<bool, Damaged> {
        if content > ring.area.size() {
            // Nor may it reach the sums below, which could overflow.
            return Ok(false);
        }
        let needed = self.needed(ring, content);
        if self.next + needed - self.head <= ring.area.size() as u64 {
            return Ok(true);
        }
        self.refresh(ring)?;
        Ok(self.next + needed - self.head <= ring.area.size() as u64)
    }

    /// Bytes that the record takes together with the padding before it.
    #[inline]
    fn needed(&self, ring: Ring<'_>, content: usize) -> u64 {
        let record = record_bytes(content) as u64;
        let to_end = ring.area.size() as u64 - ring.offset(self.next) as u64;
        if record > to_end {
            to_end + record
        } else {
            record
        }
    }

    /// Begins a record: writes its header and gives the room for its content,
    /// or [`Full`]. Nothing is visible to the reader before
    /// [`Writer::publish`]. `kind` must not be 0.
    #[inline(always)]
    pub fn begin<'a>(
        &mut self,
        ring: Ring<'a>,
        kind: u8,
        flags: u16,
        content: usize,
    ) -> Result<Result<Slot<'a>, Full>, Damaged> {
        let size = ring.area.size();
        if content > size {
            return Ok(Err(Full));
        }
        let record = record_bytes(content);
        let fits_for_sure =
            ring.offset(self.next) + record <= size && self.used() + record as u64 <= size as u64;
        if !fits_for_sure && !self.make_room(ring, content)? {
            return Ok(Err(Full));
        }
        let position = self.next;
        let offset = ring.offset(position);
        ring.area.store(offset, pack(kind, flags, content as u32));
        self.next += record as u64;
        Ok(Ok(Slot {
            area: ring.area,
            offset: offset + RECORD_HEADER_BYTES,
            position,
        }))
    }

    /// The rarer part of [`Writer::begin`]: asks the reader's cursor, and pads
    /// up to the ring's end if the record would wrap.
    #[cold]
    fn make_room(&mut self, ring: Ring<'_>, content: usize) -> Result<bool, Damaged> {
        if !self.fits(ring, content)? {
            return Ok(false);
        }
        let offset = ring.offset(self.next);
        let to_end = ring.area.size() - offset;
        if record_bytes(content) > to_end {
            let padding = (to_end - RECORD_HEADER_BYTES) as u32;
            ring.area.store(offset, pack(PADDING, 0, padding));
            self.next += to_end as u64;
        }
        Ok(true)
    }

    /// Makes all records begun so far visible, by one store.
    #[inline]
    pub fn publish(&mut self, ring: Ring<'_>) {
        self.publish_to(ring, self.next);
    }

    /// Makes the records before `position` visible. Later ones wait.
    #[inline]
    pub fn publish_to(&mut self, ring: Ring<'_>, position: u64) {
        assert!(position >= self.published && position <= self.next);
        // Release: pairs with the Acquire in `Reader::refresh`; without it the
        // reader could see unwritten records.
        ring.tail.store(position, Ordering::Release);
        self.published = position;
    }

    /// Forgets the records that are not published.
    pub fn discard(&mut self) {
        self.next = self.published;
    }
}

/// A record as the reader found it: checked, and its header copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// Where it begins in the ring.
    pub position: u64,
    /// What it is; never the padding.
    pub kind: u8,
    /// Flags of its kind.
    pub flags: u16,
    /// Bytes of content.
    pub len: u32,
    /// Where the content begins in the ring's area. The content ends before the
    /// area does.
    pub offset: u32,
}

impl Record {
    /// Position of the record after this one.
    #[inline]
    pub fn end(&self) -> u64 {
        self.position + record_bytes(self.len as usize) as u64
    }
}

/// The reading side's private state.
#[derive(Debug)]
pub struct Reader {
    /// Where the next record is read.
    next: u64,
    /// Last value stored in `head`.
    freed: u64,
    /// Last value read from `tail`.
    tail: u64,
}

impl Reader {
    /// A reader that goes on at `next`, with everything before `head` freed:
    /// both 0 for a new ring. Neither may come from memory that another side
    /// can write.
    pub fn new(next: u64, head: u64) -> Reader {
        assert!(head <= next && next.is_multiple_of(8));
        Reader {
            next,
            freed: head,
            tail: next,
        }
    }

    /// Position of the next record to be read.
    #[inline]
    pub fn next_position(&self) -> u64 {
        self.next
    }

    /// Up to where records are published, as of the last
    /// [`Reader::refresh`].
    #[inline]
    pub fn published(&self) -> u64 {
        self.tail
    }

    /// Up to where the ring was freed.
    #[inline]
    pub fn freed(&self) -> u64 {
        self.freed
    }

    /// Reads the other side's `tail`. Returns whether there is something to read.
    #[inline]
    pub fn refresh(&mut self, ring: Ring<'_>) -> Result<bool, Damaged> {
        // Acquire: pairs with the Release in `Writer::publish_to`.
        let tail = ring.tail.load(Ordering::Acquire);
        if tail != self.tail {
            let high = self.freed + ring.area.size() as u64;
            self.tail = check_cursor(tail, self.tail, high)?;
        }
        Ok(self.next < self.tail)
    }

    /// The next record, if one is published. Its bytes stay in place until
    /// [`Reader::free`] passes them, but the other side may be hostile and
    /// change them: copy what is checked before it is used.
    ///
    /// Bounded: steps over at most one padding record.
    #[inline]
    pub fn next(&mut self, ring: Ring<'_>) -> Result<Option<Record>, Damaged> {
        if self.next == self.tail && !self.refresh(ring)? {
            return Ok(None);
        }
        let record = self.record(ring)?;
        if record.kind != PADDING {
            self.next = record.end();
            return Ok(Some(record));
        }
        // Padding always reaches the ring's end. The record that it makes way
        // for may be published later.
        if ring.offset(record.end()) != 0 {
            return Err(self.damaged_record(&record));
        }
        self.next = record.end();
        if self.next == self.tail && !self.refresh(ring)? {
            return Ok(None);
        }
        let record = self.record(ring)?;
        if record.kind == PADDING {
            return Err(self.damaged_record(&record));
        }
        self.next = record.end();
        Ok(Some(record))
    }

    /// Reads and checks the header at `next`, which is below `tail`.
    #[inline]
    fn record(&self, ring: Ring<'_>) -> Result<Record, Damaged> {
        let offset = ring.offset(self.next);
        let header = ring.area.load(offset);
        let record = Record {
            position: self.next,
            kind: (header >> 32) as u8,
            flags: (header >> 40) as u16,
            len: header as u32,
            offset: (offset + RECORD_HEADER_BYTES) as u32,
        };
        let in_ring = ring.area.size() - offset;
        let published = (self.tail - self.next).min(in_ring as u64);
        if record_bytes(record.len as usize) as u64 > published {
            return Err(self.damaged_record(&record));
        }
        Ok(record)
    }

    fn damaged_record(&self, record: &Record) -> Damaged {
        Damaged::Record {
            position: record.position,
            length: record.len,
            available: self.tail - record.position - RECORD_HEADER_BYTES as u64,
        }
    }

    /// Gives everything before `position` back to the writer.
    #[inline]
    pub fn free(&mut self, ring: Ring<'_>, position: u64) {
        assert!(position >= self.freed && position <= self.next);
        // Release: pairs with the Acquire in `Writer::refresh`; our copies out
        // of these bytes come before their reuse.
        ring.head.store(position, Ordering::Release);
        self.freed = position;
    }
}

// Under loom the ring is examined by `tests/loom_ring.rs`.
#[cfg(all(test, not(loom)))]
mod tests;
