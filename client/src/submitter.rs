//! The writing end of a session's submission ring, and the account of the room
//! in it that is kept for acks.
//!
//! A client keeps room for one answer (an ack or a nack) per lease that it
//! holds, so that these never wait: not for a slow broker, and not for one that
//! is away. A delivery is taken only against a *credit*, and credits are given
//! while this holds:
//!
//! ```text
//! free room >= credits and leases held * 32 + 40
//! ```
//!
//! 32 bytes is the record of a nack; an ack is shorter, and *n* leases in one
//! record take less than *n* records. One answer may have to be preceded by
//! padding, shorter than itself: 24 of the 40 bytes (a run of *n* pays its own
//! from what it saves). One is enough, for until credits are given again, which
//! settles the account anew, less is written than a ring holds, so that its end
//! is passed at most once. The last 8 are for the record that ends the session.
//! What else is submitted (extends and flushes) leaves all this alone.

use crate::record::{self, Begun, Chunk, LEASE_BYTES, Lease, Leases, Send};
use ringmain_ring::record_ring::{Damaged, Full, Ring, Writer, record_bytes};
use std::sync::MutexGuard;

/// Room kept for each lease.
const ANSWER_BYTES: u64 = record_bytes(8 + LEASE_BYTES) as u64;
/// Room kept besides.
const SLACK_BYTES: u64 = ANSWER_BYTES - 8 + record_bytes(0) as u64;

/// See the module. Behind a lock, so that any thread may submit.
#[derive(Debug)]
pub(crate) struct Submitter {
    writer: Writer,
    /// Credits and leases held.
    reserved: u64,
    /// Nothing more may be submitted.
    pub(crate) closed: bool,
}

impl Submitter {
    /// Of a new session.
    pub(crate) fn new() -> Submitter {
        Submitter {
            writer: Writer::new(0, 0),
            reserved: 0,
            closed: false,
        }
    }
}

/// The locked submitter. Records are visible once published; those that are not
/// when this is dropped, by a panic too, were never there.
pub(crate) struct Submission<'a> {
    pub(crate) submitter: MutexGuard<'a, Submitter>,
    pub(crate) ring: Ring<'a>,
}

impl Drop for Submission<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.submitter.writer.has_unpublished() {
            self.submitter.writer.discard();
        }
    }
}

impl Submission<'_> {
    /// Writes a send. Returns its position.
    // Always: as a call, its nested results would go through memory, which costs
    // more than the rest. So does `Send::begin`.
    #[inline(always)]
    pub(crate) fn send(&mut self, attachment: u32, sent_at_ms: u64, payload: &[u8]) -> Begun<u64> {
        let writer = &mut self.submitter.writer;
        let begun = Send::begin(writer, self.ring, attachment, sent_at_ms, payload.len())?;
        Ok(begun.map(|slot| {
            slot.put_bytes(record::SEND_HEAD_BYTES, payload);
            slot.position
        }))
    }

    /// Writes a send whose payload is a chunk. Returns its position.
    pub(crate) fn send_chunk(
        &mut self,
        attachment: u32,
        sent_at_ms: u64,
        chunk: Chunk,
    ) -> Begun<u64> {
        let writer = &mut self.submitter.writer;
        Send::write_chunk(writer, self.ring, attachment, sent_at_ms, chunk)
    }

    /// Writes a flush, if that leaves the answers their room.
    pub(crate) fn flush(&mut self, flags: u16) -> Begun<u64> {
        if !self.leaves_reserve(0)? {
            return Ok(Err(Full));
        }
        record::write_flush(&mut self.submitter.writer, self.ring, flags)
    }

    /// Writes an extend of one lease, if that leaves the answers their room.
    pub(crate) fn extend(&mut self, duration_ms: u64, lease: Lease) -> Begun<u64> {
        if !self.leaves_reserve(8 + LEASE_BYTES)? {
            return Ok(Err(Full));
        }
        Leases::write_extend(&mut self.submitter.writer, self.ring, duration_ms, &[lease])
    }

    /// Writes an ack, in the room that was kept for it.
    #[inline]
    pub(crate) fn ack(&mut self, leases: &[Lease]) -> Begun<u64> {
        let begun = Leases::write_ack(&mut self.submitter.writer, self.ring, leases)?;
        self.release(leases.len(), begun.is_ok());
        Ok(begun)
    }

    /// Writes a nack, in the room that was kept for it.
    pub(crate) fn nack(&mut self, flags: u16, delay_ms: u64, leases: &[Lease]) -> Begun<u64> {
        let writer = &mut self.submitter.writer;
        let begun = Leases::write_nack(writer, self.ring, flags, delay_ms, leases)?;
        self.release(leases.len(), begun.is_ok());
        Ok(begun)
    }

    /// Writes the end of the session.
    pub(crate) fn end(&mut self) -> Begun<u64> {
        record::write_end(&mut self.submitter.writer, self.ring)
    }

    #[inline]
    fn release(&mut self, leases: usize, written: bool) {
        if written {
            self.submitter.reserved -= leases as u64;
        }
    }

    /// Makes everything written visible. Returns where it ends.
    #[inline]
    pub(crate) fn publish(&mut self) -> u64 {
        self.submitter.writer.publish(self.ring);
        self.submitter.writer.next_position()
    }

    /// Keeps room for the answers of up to `count` more leases. Returns for how
    /// many there is.
    pub(crate) fn reserve(&mut self, count: u64) -> Result<u64, Damaged> {
        let free = self.free(self.reserve_bytes() + count * ANSWER_BYTES)?;
        let spare = free.saturating_sub(self.reserve_bytes());
        let granted = count.min(spare / ANSWER_BYTES);
        self.submitter.reserved += granted;
        Ok(granted)
    }

    fn reserve_bytes(&self) -> u64 {
        self.submitter.reserved * ANSWER_BYTES + SLACK_BYTES
    }

    /// Whether a record with so much content can be written on top of what is
    /// kept for answers.
    fn leaves_reserve(&mut self, content: usize) -> Result<bool, Damaged> {
        // Twice: the padding that may precede a record is shorter than it.
        let needed = self.reserve_bytes() + 2 * record_bytes(content) as u64;
        Ok(self.free(needed)? >= needed)
    }

    /// Free bytes; the broker's cursor is asked if those known are not enough.
    fn free(&mut self, enough: u64) -> Result<u64, Damaged> {
        let size = self.ring.area.size() as u64;
        let free = size - self.submitter.writer.used();
        if free >= enough {
            return Ok(free);
        }
        Ok(size - self.submitter.writer.refresh(self.ring)?)
    }
}
