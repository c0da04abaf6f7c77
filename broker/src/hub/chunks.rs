//! Chunks: payloads in shared memory, and who still needs them (I9).
//!
//! A chunk of a client's outbound segments is held by its message until that is
//! stored or settled, by each lease that shows it to a consumer until the
//! consumer has answered or is gone (expiry takes the message, not the chunk under
//! a reader), and by a copy under way. When nobody holds it any more it goes back to its
//! client. What a consumer can't read in place is copied into a chunk of its own
//! inbound segments, where this hub allocates.

use super::message::NONE;
use super::port::{LeaseEntry, LeaseState, Port, SessionSlot, Shown};
use super::{FREE_LEASE, History, Hub};
use ringmain::record;
use ringmain_ring::payload::{UNIT_BYTES, units_for};
use ringmain_ring::units::Units;
use std::collections::HashMap;

/// Index of a chunk in the hub's table.
pub(super) type ChunkIndex = u32;

/// A consumer for which there was no memory is offered messages again after so
/// long, or when it gives back some.
const STARVED_NS: u64 = 100_000_000;

/// A chunk of an outbound segment that somebody needs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Chunk {
    /// The session that it belongs to.
    pub slot: SessionSlot,
    pub at: record::Chunk,
    /// Position of the submission that took it.
    position: u64,
    holds: u32,
}

#[derive(Debug, Default)]
pub(super) struct Chunks {
    slots: Vec<Option<Chunk>>,
    free: Vec<ChunkIndex>,
    by_place: HashMap<(SessionSlot, u32, u32, u64), ChunkIndex>,
}

impl std::ops::Index<ChunkIndex> for Chunks {
    type Output = Chunk;

    fn index(&self, index: ChunkIndex) -> &Chunk {
        self.slots[index as usize]
            .as_ref()
            .expect("messages and leases name held chunks only")
    }
}

impl Chunks {
    /// Holds the chunk that the submission at `position` took.
    pub fn hold(&mut self, slot: SessionSlot, at: record::Chunk, position: u64) -> ChunkIndex {
        let place = (slot, at.segment, at.unit, position);
        let index = *self.by_place.entry(place).or_insert_with(|| {
            self.free.pop().unwrap_or_else(|| {
                self.slots.push(None);
                (self.slots.len() - 1) as ChunkIndex
            })
        });
        let chunk = self.slots[index as usize].get_or_insert(Chunk {
            slot,
            at,
            position,
            holds: 0,
        });
        // A successor knows the length from the send alone.
        chunk.at = at;
        chunk.holds += 1;
        index
    }

    fn hold_again(&mut self, index: ChunkIndex) {
        if let Some(chunk) = &mut self.slots[index as usize] {
            chunk.holds += 1;
        }
    }

    /// Holds it once less; gives it if that was the last time.
    fn release(&mut self, index: ChunkIndex) -> Option<Chunk> {
        let chunk = self.slots[index as usize].as_mut()?;
        chunk.holds -= 1;
        if chunk.holds > 0 {
            return None;
        }
        let chunk = self.slots[index as usize].take()?;
        let place = (chunk.slot, chunk.at.segment, chunk.at.unit, chunk.position);
        self.by_place.remove(&place);
        self.free.push(index);
        Some(chunk)
    }

    /// Whether somebody needs the chunk that this submission took.
    pub fn is_held(&self, slot: SessionSlot, segment: u32, unit: u32, position: u64) -> bool {
        self.by_place.contains_key(&(slot, segment, unit, position))
    }
}

/// Bytes of memory that a chunk takes.
fn bytes_of(chunk: record::Chunk) -> u64 {
    let units = units_for(u64::from(chunk.len));
    u64::from(units.unwrap_or_default()) * UNIT_BYTES as u64
}

/// The payload memory of a session.
#[derive(Debug, Default)]
pub(super) struct Memory {
    /// Bytes of its outbound segments.
    pub outbound_bytes: u64,
    /// Bytes of those that are shown to consumers.
    shown_bytes: u64,
    /// Leases and copies that show its outbound chunks.
    pub shown: u32,
    /// Its inbound segments, by number.
    inbound: Vec<Units>,
    /// Leases that show it something, its own inbound chunks included.
    pub reads: u32,
    /// There was no memory for what it would have been given.
    starved: bool,
}

impl Memory {
    /// Nobody reads its chunks, and it reads none.
    pub fn is_unread(&self) -> bool {
        self.shown == 0 && self.reads == 0
    }

    /// Of a session that a successor finds.
    pub fn restored(outbound_bytes: u64, inbound: &[u32]) -> Memory {
        Memory {
            outbound_bytes,
            inbound: inbound.iter().map(|&units| Units::new(units)).collect(),
            ..Memory::default()
        }
    }

    pub fn is_starved(&self) -> bool {
        self.starved
    }

    /// Whether a chunk of this length may be shown too: readers that never answer
    /// hold half of a client's memory at most.
    pub fn may_show(&self, len: u32) -> bool {
        self.shown == 0 || self.shown_bytes + u64::from(len) <= self.outbound_bytes / 2
    }
}

impl Hub {
    /// The session has an outbound segment more, of so many bytes.
    pub fn add_outbound(&mut self, slot: SessionSlot, bytes: u64) {
        self.session_mut(slot).memory.outbound_bytes += bytes;
    }

    /// Whether anybody needs the chunk that the session's submission at `position`
    /// took. For a successor, which finds it taken.
    pub fn holds_chunk(&self, slot: SessionSlot, segment: u32, unit: u32, position: u64) -> bool {
        self.chunks.is_held(slot, segment, unit, position)
    }

    /// Outbound chunks that the session reads in place: slot of their session,
    /// and segment.
    pub fn reads_in_place(&self, slot: SessionSlot) -> Vec<(SessionSlot, u32)> {
        let of_session = |lease: &&super::Lease| lease.holder == slot && lease.chunk != NONE;
        let mut segments: Vec<_> = self
            .leases
            .iter()
            .filter(of_session)
            .map(|lease| {
                let chunk = &self.chunks[lease.chunk];
                (chunk.slot, chunk.at.segment)
            })
            .collect();
        segments.sort_unstable();
        segments.dedup();
        segments
    }

    /// One holder of the chunk less, which is not the last one.
    pub(super) fn unhold(&mut self, index: ChunkIndex) {
        let last = self.chunks.release(index);
        debug_assert!(last.is_none(), "another holder was there");
    }

    /// One holder of the chunk less; the last one's gives it back. But not before
    /// its send is committed: a successor knows leases before the sends that they
    /// are about, which hold the chunk again once they are found.
    pub(super) fn release_chunk(&mut self, index: ChunkIndex, port: &mut impl Port) {
        if let Some(chunk) = self.chunks.release(index)
            && chunk.position < self.session(chunk.slot).committed
        {
            port.return_chunk(chunk.slot, chunk.at, chunk.position);
        }
    }

    /// A lease or a copy shows the chunk.
    pub(super) fn show_chunk(&mut self, index: ChunkIndex) {
        self.chunks.hold_again(index);
        let Chunk { slot, at, .. } = self.chunks[index];
        let memory = &mut self.session_mut(slot).memory;
        memory.shown += 1;
        memory.shown_bytes += bytes_of(at);
    }

    /// And now does not any more.
    pub(super) fn unshow_chunk(&mut self, index: ChunkIndex, port: &mut impl Port) {
        let Chunk { slot, at, .. } = self.chunks[index];
        let session = self.session_mut(slot);
        session.memory.shown -= 1;
        session.memory.shown_bytes -= bytes_of(at);
        self.release_chunk(index, port);
        self.look_whether_gone(slot);
        for queue in std::mem::take(&mut self.share_waiters) {
            if self.queues[queue as usize].is_some() {
                self.make_runnable(queue);
            }
        }
    }

    /// An ended session goes with a round once nothing of it is needed.
    fn look_whether_gone(&mut self, slot: SessionSlot) {
        let session = self.session(slot);
        if session.ended && session.memory.is_unread() {
            self.mark_dirty(slot);
            self.close_wanted = true;
        }
    }

    /// A chunk in the session's inbound segments. `None`: there is no memory for
    /// it now.
    pub(super) fn allocate_inbound(
        &mut self,
        slot: SessionSlot,
        len: u32,
        port: &mut impl Port,
    ) -> Option<Shown> {
        let units = units_for(u64::from(len))?;
        let found = |inbound: &mut Vec<Units>| {
            let mut segments = inbound.iter_mut().enumerate();
            segments.find_map(|(segment, free)| {
                let unit = free.allocate(units)?;
                let segment = segment as u32;
                Some(Shown::Inbound {
                    segment,
                    unit,
                    units,
                })
            })
        };
        if let Some(shown) = found(&mut self.session_mut(slot).memory.inbound) {
            return Some(shown);
        }
        let Some(made) = port.grow_inbound(slot, len) else {
            let again = self.now_ns + STARVED_NS;
            self.session_mut(slot).memory.starved = true;
            self.starved_until_ns = self.starved_until_ns.min(again);
            return None;
        };
        let inbound = &mut self.session_mut(slot).memory.inbound;
        inbound.push(Units::new(made));
        found(inbound)
    }

    /// The chunk in the session's inbound segments is free again.
    pub(super) fn free_inbound(&mut self, slot: SessionSlot, shown: Shown) {
        let Shown::Inbound {
            segment,
            unit,
            units,
        } = shown
        else {
            return;
        };
        let memory = &mut self.session_mut(slot).memory;
        if let Some(free) = memory.inbound.get_mut(segment as usize) {
            free.give_back(unit, units);
        }
        if std::mem::take(&mut memory.starved) {
            self.offer_messages(slot);
        }
    }

    /// A successor finds a lease that shows its holder a chunk there. False: it
    /// can't be.
    pub(super) fn reserve_inbound(&mut self, slot: SessionSlot, shown: Shown) -> bool {
        let Shown::Inbound {
            segment,
            unit,
            units,
        } = shown
        else {
            return false;
        };
        let inbound = &mut self.session_mut(slot).memory.inbound;
        let free = inbound.get_mut(segment as usize);
        free.is_some_and(|free| free.reserve(unit, units))
    }

    /// Memory may have become free elsewhere: whoever lacked some is offered
    /// messages again.
    pub(super) fn retry_starved(&mut self) {
        self.starved_until_ns = u64::MAX;
        for slot in 0..self.sessions.len() as SessionSlot {
            if let Some(session) = &mut self.sessions[slot as usize]
                && std::mem::take(&mut session.memory.starved)
            {
                self.offer_messages(slot);
            }
        }
    }

    /// The lease's reader has answered, or is gone: what it was shown is not needed
    /// for it.
    pub(super) fn release_shown(&mut self, entry: LeaseEntry, port: &mut impl Port) {
        let lease = &mut self.leases[entry as usize];
        let (holder, chunk) = (lease.holder, lease.chunk);
        let shown = std::mem::take(&mut lease.shown);
        lease.chunk = NONE;
        if shown == Shown::No {
            return;
        }
        // Before the chunk is used again: a successor must not take it for one
        // that is still read.
        port.lease_unshown(entry);
        self.session_mut(holder).memory.reads -= 1;
        self.free_inbound(holder, shown);
        if chunk != NONE {
            self.unshow_chunk(chunk, port);
        }
        self.look_whether_gone(holder);
    }

    /// The same for a lease that ended before by time or its queue's end. It
    /// counted in the window till now, so that a reader that never answers does
    /// not use up lease entries and memory without end.
    pub(super) fn release_late(&mut self, entry: LeaseEntry, port: &mut impl Port) {
        self.release_shown(entry, port);
        let super::Lease {
            holder,
            attachment,
            state,
            ..
        } = self.leases[entry as usize];
        // A successor may have found the lease without its attachment.
        let attachments = &mut self.session_mut(holder).attachments;
        if let Some(held) = attachments.get_mut(attachment as usize) {
            held.live -= 1;
        }
        self.offer_messages(holder);
        if state == LeaseState::Shown {
            self.leases[entry as usize] = FREE_LEASE;
            port.lease_state(entry, LeaseState::Free, History::default());
            self.free_leases.push(entry);
        }
    }

    /// The session's client reads nothing any more: its process has ended, or it
    /// has closed the connection.
    pub fn reader_gone(&mut self, slot: SessionSlot, port: &mut impl Port) {
        for entry in 1..self.leases.len() as LeaseEntry {
            let lease = &self.leases[entry as usize];
            if lease.holder == slot && lease.shown != Shown::No {
                self.release_late(entry, port);
            }
        }
    }
}
