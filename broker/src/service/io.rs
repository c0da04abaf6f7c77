//! The sessions' rings and the ledger, as the hub's [`Port`].

use super::core::Setup;
use super::payloads::{PayloadLimits, Told};
use super::session::SessionIo;
use super::worker::FillJob;
use crate::crash::crash_point;
use crate::hub::{
    Delivery, Fill, History, LeaseEntry, LeaseState, Payload, Port, SessionSlot, Shown,
};
use crate::ledger::{Direction, LeaseTable, Ledger, SessionState};
use crate::store::QueueNumber;
use ringmain::record::{self, Answer, Begun, Chunk, DELIVERY_HEAD_BYTES};
use ringmain_ring::Ordering;
use ringmain_ring::layout::attachment;
use ringmain_ring::record_ring::Full;
use ringmain_ring::wait::{broker, client};
use std::path::PathBuf;
use std::sync::Arc;
use tracing::warn;

/// Everything that the service thread shares with others: rings and ledger.
#[derive(Debug)]
pub(super) struct Io {
    pub ledger: Ledger,
    pub leases: LeaseTable,
    /// By the hub's slots.
    pub sessions: Vec<Option<SessionIo>>,
    /// Sessions with unpublished deliveries, or to be looked at for a wake.
    touched: Vec<SessionSlot>,
    /// Reads that the hub has asked for.
    pub reads: Vec<(QueueNumber, u64)>,
    /// Copies that it has asked for.
    pub fills: Vec<FillJob>,
    /// What clients are to be told.
    pub told: Vec<Told>,
    /// The folder of the segments.
    pub dir: PathBuf,
    pub limits: PayloadLimits,
    /// Bytes of all payload segments, in each direction.
    pub payload_bytes: [u64; 2],
    /// For payloads on their way from one segment to another.
    buffer: Vec<u8>,
    /// Sessions to be ended at the end of the pass: their client has said so, or
    /// broke the protocol.
    pub ending: Vec<SessionSlot>,
}

impl Io {
    pub fn new(ledger: Ledger, leases: LeaseTable, setup: &Setup) -> Io {
        Io {
            ledger,
            leases,
            sessions: Vec::new(),
            touched: Vec::new(),
            reads: Vec::new(),
            fills: Vec::new(),
            told: Vec::new(),
            dir: setup.shm_dir.clone(),
            limits: setup.payload_limits,
            payload_bytes: [0; 2],
            buffer: Vec::new(),
            ending: Vec::new(),
        }
    }

    #[inline]
    pub fn session(&self, slot: SessionSlot) -> Option<&SessionIo> {
        self.sessions.get(slot as usize)?.as_ref()
    }

    #[inline]
    pub fn session_mut(&mut self, slot: SessionSlot) -> Option<&mut SessionIo> {
        self.sessions.get_mut(slot as usize)?.as_mut()
    }

    pub fn insert(&mut self, slot: SessionSlot, session: SessionIo) {
        for direction in [Direction::Outbound, Direction::Inbound] {
            self.payload_bytes[direction as usize] += session.payloads.bytes(direction);
        }
        let needed = slot as usize + 1;
        if self.sessions.len() < needed {
            self.sessions.resize_with(needed, || None);
        }
        self.sessions[slot as usize] = Some(session);
    }

    /// Has [`Io::publish`] look whether the client waits for any of `bits`.
    #[inline]
    pub fn touch(&mut self, slot: SessionSlot, bits: u32) {
        if let Some(session) = self.session_mut(slot) {
            let first = session.wake == 0;
            session.wake |= bits;
            if first {
                self.touched.push(slot);
            }
        }
    }

    /// Publishes the deliveries written since the last call, and wakes clients
    /// that wait for what happened.
    ///
    /// The ledger's cursor comes before the ring's `tail`: a client must never
    /// take a delivery that a successor would not know to be leased.
    pub fn publish(&mut self) {
        for &slot in &self.touched {
            let Some(session) = self.sessions[slot as usize].as_mut() else {
                continue;
            };
            if session.delivery.has_unpublished() {
                session
                    .ledger
                    .set_delivery_cursor(session.delivery.next_position());
                crash_point("publish deliveries");
                session.delivery.publish(session.map.delivery());
            }
        }
        let mut fenced = false;
        for slot in self.touched.drain(..) {
            let Some(session) = self.sessions[slot as usize].as_mut() else {
                continue;
            };
            let bits = std::mem::take(&mut session.wake);
            let word = session.map.client_wait();
            // One fence orders all publishes above before all looks.
            let seen = if fenced {
                word.peek()
            } else {
                word.seen_after_publish()
            };
            fenced = true;
            if seen & bits != 0 {
                crash_point("wake a client");
                word.wake_announced(bits);
            }
        }
    }

    /// The client did what no correct client does: nothing more is read from it,
    /// and its session is ended by the end of the pass.
    #[cold]
    pub fn break_session(&mut self, slot: SessionSlot, reason: String) {
        if let Some(session) = self.session_mut(slot)
            && session.broken.is_none()
        {
            session.broken = Some(reason);
            self.ending.push(slot);
        }
    }

    /// Whether there are records that can be taken in. Damage counts as such:
    /// the next pass deals with it.
    pub fn has_submissions(&mut self, slot: SessionSlot) -> bool {
        let Some(session) = self.session_mut(slot) else {
            return false;
        };
        let map = session.map.clone();
        session.state == SessionState::Open
            && session.submission.refresh(map.submission()).unwrap_or(true)
            && session.has_answer_room().unwrap_or(true)
    }

    /// Whether the session's delivery ring, which was full, is worth another
    /// try: half of it is free, which is enough for any delivery, with the
    /// padding before it. `None`: its client has damaged the ring.
    pub fn has_room(&mut self, slot: SessionSlot) -> Option<bool> {
        let session = self.session_mut(slot)?;
        let size = session.map.delivery().area.size() as u64;
        let used = session.delivery.refresh(session.map.delivery()).ok()?;
        Some(used <= size / 2)
    }

    /// Says that the broker sleeps: the client rings after its next publish, or
    /// when it takes deliveries, if `blocked`. Whether there is something to do
    /// already is the caller's next look.
    pub fn arm(&mut self, slot: SessionSlot, blocked: bool) {
        if let Some(session) = self.session_mut(slot) {
            crash_point("arm a doorbell");
            let room = if blocked { broker::ROOM } else { 0 };
            session
                .map
                .broker_wait()
                .announce(broker::SUBMISSIONS | room);
        }
    }
}

impl Io {
    /// Writes a delivery with the payload in its record.
    #[inline]
    fn write_inline(&mut self, delivery: &Delivery<'_>, head: &record::Delivery) -> Begun<u64> {
        let Some(session) = self.sessions[delivery.to as usize].as_mut() else {
            return Ok(Err(Full));
        };
        let map = session.map.clone();
        let len = delivery.len as usize;
        let slot = match head.begin(&mut session.delivery, map.delivery(), len)? {
            Ok(slot) => slot,
            Err(full) => return Ok(Err(full)),
        };
        match delivery.payload {
            Payload::Block(bytes) => slot.put_bytes(DELIVERY_HEAD_BYTES, bytes),
            Payload::Ring {
                slot: from, offset, ..
            } => {
                if let Some(source) = self.session(from) {
                    let (area, at) = slot.target();
                    let from = source.map.submission().area;
                    from.copy_across(offset as usize, area, at + DELIVERY_HEAD_BYTES, len);
                }
            }
            // The hub shows these.
            Payload::Chunk { .. } | Payload::Filled => {}
        }
        Ok(Ok(slot.position))
    }

    /// Writes a delivery whose payload is in a chunk; copies it there first if it
    /// is not there yet.
    fn write_chunk(
        &mut self,
        delivery: &Delivery<'_>,
        head: &record::Delivery,
        shown: Shown,
    ) -> Begun<u64> {
        let (flag, segment, unit) = match shown {
            Shown::InPlace { segment, unit, .. } => (record::delivery::IN_PLACE, segment, unit),
            Shown::Inbound { segment, unit, .. } => (record::delivery::INBOUND, segment, unit),
            Shown::No => return Ok(Err(Full)),
        };
        let len = delivery.len;
        let chunk = Chunk { segment, unit, len };
        if flag == record::delivery::INBOUND
            && let Err(error) = self.copy_payload(delivery, chunk)
        {
            self.break_session(delivery.to, format!("its payload segment: {error}"));
            return Ok(Err(Full));
        }
        let Some(session) = self.sessions[delivery.to as usize].as_mut() else {
            return Ok(Err(Full));
        };
        let map = session.map.clone();
        head.write_chunk(&mut session.delivery, map.delivery(), flag, chunk)
    }

    fn copy_payload(&mut self, delivery: &Delivery<'_>, into: Chunk) -> std::io::Result<()> {
        if delivery.payload == Payload::Filled {
            return Ok(());
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        buffer.resize(into.len as usize, 0);
        let bytes = match delivery.payload {
            Payload::Filled => &[],
            Payload::Block(bytes) => bytes,
            Payload::Ring { slot, offset, .. } => {
                if let Some(source) = self.session(slot) {
                    source
                        .map
                        .submission()
                        .area
                        .copy_out(offset as usize, &mut buffer);
                }
                &buffer
            }
            Payload::Chunk { slot, at } => {
                let source = self.session(slot);
                let source =
                    source.and_then(|source| source.payloads.outbound.get(at.segment as usize));
                if let Some(file) = source {
                    file.read(at, 0, &mut buffer);
                }
                &buffer
            }
        };
        let consumer = self.session(delivery.to);
        let target =
            consumer.and_then(|consumer| consumer.payloads.inbound.get(into.segment as usize));
        let written = target.map_or(Ok(()), |file| file.write(into, 0, bytes));
        self.buffer = buffer;
        written
    }
}

impl Port for Io {
    #[inline]
    fn deliver(&mut self, delivery: &Delivery<'_>) -> Option<u64> {
        let head = record::Delivery {
            entry: delivery.entry,
            attachment: delivery.attachment,
            session: delivery.session,
            position: delivery.position,
            sent_at_ms: delivery.sent_at_ms,
            deadline_ns: delivery.deadline_ns,
            attempts: u32::from(delivery.history.attempts()),
            redelivered: delivery.history.was_leased(),
        };
        let written = match delivery.shown {
            Shown::No => self.write_inline(delivery, &head),
            shown => self.write_chunk(delivery, &head, shown),
        };
        let position = match written {
            Ok(Ok(position)) => position,
            Ok(Err(_full)) => return None,
            Err(damaged) => {
                self.break_session(delivery.to, damaged.to_string());
                return None;
            }
        };
        self.leases.lease(delivery, position);
        self.touch(delivery.to, client::MESSAGES);
        Some(position)
    }

    fn taken(&self, slot: SessionSlot, delivery_position: u64) -> bool {
        let head = |session: &SessionIo| {
            let head = &session.map.header().delivery_head.word;
            // Acquire: pairs with the client's Release when it frees a record.
            head.load(Ordering::Acquire)
        };
        self.session(slot)
            .is_some_and(|session| head(session) > delivery_position)
    }

    #[inline]
    fn lease_state(&mut self, entry: LeaseEntry, state: LeaseState, history: History) {
        self.leases.set_state(entry, state, history);
    }

    fn lease_deadline(&mut self, entry: LeaseEntry, deadline_ns: u64) {
        self.leases.set_deadline(entry, deadline_ns);
    }

    fn lease_position(&mut self, entry: LeaseEntry, queue_position: u64) {
        self.leases.set_queue_position(entry, queue_position);
    }

    fn lease_unshown(&mut self, entry: LeaseEntry) {
        self.leases.set_unshown(entry);
    }

    fn can_read(&mut self, consumer: SessionSlot, owner: SessionSlot, segment: u32) -> bool {
        self.announce(consumer, owner, segment)
    }

    fn grow_inbound(&mut self, slot: SessionSlot, len: u32) -> Option<u32> {
        match self.add_inbound(slot, len) {
            Ok(units) => Some(units),
            Err(error) => {
                let session = self.session(slot).map(|session| session.number);
                warn!(session, len, %error, "no payload memory for a consumer");
                None
            }
        }
    }

    fn fill(&mut self, fill: Fill) {
        let target = self.session(fill.to).and_then(|session| {
            let segment = fill.into.segment as usize;
            session.payloads.inbound.get(segment).map(Arc::clone)
        });
        let from = fill.from.and_then(|(slot, at)| {
            let outbound = &self.session(slot)?.payloads.outbound;
            Some((Arc::clone(outbound.get(at.segment as usize)?), at))
        });
        if let Some(target) = target {
            self.fills.push(FillJob {
                ticket: fill.ticket,
                message: fill.message,
                from,
                target,
                into: fill.into,
            });
        }
    }

    fn return_chunk(&mut self, slot: SessionSlot, at: Chunk, position: u64) {
        if let Some(session) = self.session(slot)
            && let Some(outbound) = session.payloads.outbound.get(at.segment as usize)
        {
            crash_point("give back a chunk");
            outbound.words.give_back(at.unit, position);
        }
        self.touch(slot, client::ROOM);
    }

    fn grow_leases(&mut self) -> Option<u32> {
        self.leases.grow()
    }

    fn answer(&mut self, slot: SessionSlot, answer: Answer) -> u64 {
        let Some(session) = self.session_mut(slot) else {
            return 0;
        };
        let map = session.map.clone();
        // Room was reserved before the record was read, unless the session is
        // ending: then nobody reads the answer.
        let written = answer.write(&mut session.answers, map.answers());
        let end = session.answers.next_position();
        if let Err(damaged) = written {
            self.break_session(slot, damaged.to_string());
        }
        end
    }

    fn queue_deleted(&mut self, slot: SessionSlot, index: u32) {
        let Some(session) = self.session_mut(slot) else {
            return;
        };
        if let Some(word) = session.map.attachment(index) {
            crash_point("tell that a queue is deleted");
            // Relaxed: a hint. A send that misses it is refused in an answer.
            word.store(attachment::DELETED, Ordering::Relaxed);
        }
        self.touch(slot, client::LIMIT | client::MESSAGES);
    }

    fn wall_ms(&self) -> u64 {
        super::requests::wall_ms()
    }

    fn read(&mut self, queue: QueueNumber, from: u64) {
        self.reads.push((queue, from));
    }
}
