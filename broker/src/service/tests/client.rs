//! A client without its library: rings, cursors and nothing else.

use crate::control::{ConnId, Peer};
use ringmain::control::Purpose;
use ringmain::record::{self, Answer, Delivered, Delivery, Lease};
use ringmain_ring::Ordering;
use ringmain_ring::record_ring::{Reader, Writer};
use ringmain_ring::session::SessionMap;
use std::collections::VecDeque;

/// What the session holds of a queue.
#[derive(Debug, Clone, Copy)]
pub struct Attachment {
    /// The model's number of the queue.
    pub queue: usize,
    pub purpose: Purpose,
    /// The broker's index.
    pub index: u32,
    pub window: u32,
}

/// A delivery as it was found in the ring.
#[derive(Debug)]
pub struct Found {
    pub delivery: Delivery,
    pub position: u64,
    pub payload: Vec<u8>,
}

/// What became of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Life {
    Alive,
    /// Its process is gone, and so will its session be.
    Dead,
    /// It wrote what no correct client writes: nothing in its rings can be
    /// believed.
    Mad,
}

/// See the module's text.
pub struct Client {
    /// `None`: no broker that lives knows of it.
    pub conn: Option<ConnId>,
    pub peer: Peer,
    pub session: u64,
    pub life: Life,
    pub attachments: Vec<Attachment>,
    /// An attachment that was asked for and never answered.
    pub attaching: Option<Attachment>,
    map: SessionMap,
    writer: Writer,
    deliveries: Reader,
    answers: Reader,
    /// Deliveries that were seen and not taken: *(position, end)*.
    pub inbox: VecDeque<(u64, u64)>,
    /// Deliveries that were taken and not answered.
    pub held: Vec<u64>,
    /// Highest end of a flush it has asked for: stored, synced.
    pub flush: (u64, u64),
    /// Confirmations seen.
    pub confirmed: (u64, u64),
}

impl Client {
    pub fn new(conn: ConnId, peer: Peer, map: SessionMap) -> Client {
        Client {
            conn: Some(conn),
            peer,
            session: map.session(),
            life: Life::Alive,
            attachments: Vec::new(),
            attaching: None,
            map,
            writer: Writer::new(0, 0),
            deliveries: Reader::new(0, 0),
            answers: Reader::new(0, 0),
            inbox: VecDeque::new(),
            held: Vec::new(),
            flush: (0, 0),
            confirmed: (0, 0),
        }
    }

    pub fn is_alive(&self) -> bool {
        self.life == Life::Alive
    }

    pub fn attachment(&self, queue: usize, purpose: Purpose) -> Option<Attachment> {
        let wanted = |a: &&Attachment| a.queue == queue && a.purpose == purpose;
        self.attachments.iter().find(wanted).copied()
    }

    /// End of what is published.
    pub fn tail(&self) -> u64 {
        self.map.submission().tail.load(Ordering::Acquire)
    }

    /// Writes a send, unpublished: its position and end. `None`: no room.
    pub fn send(&mut self, attachment: u32, payload: &[u8]) -> Option<(u64, u64)> {
        let ring = self.map.submission();
        let begun = record::Send::begin(&mut self.writer, ring, attachment, 1, payload.len());
        let slot = begun.unwrap().ok()?;
        slot.put_bytes(record::SEND_HEAD_BYTES, payload);
        Some((slot.position, self.writer.next_position()))
    }

    /// The records below give the end of what they wrote, unpublished.
    pub fn ack(&mut self, leases: &[Lease]) -> Option<u64> {
        let ring = self.map.submission();
        let begun = record::Leases::write_ack(&mut self.writer, ring, leases);
        begun.unwrap().ok().map(|_| self.writer.next_position())
    }

    pub fn nack(&mut self, flags: u16, delay_ms: u64, leases: &[Lease]) -> Option<u64> {
        let ring = self.map.submission();
        let begun = record::Leases::write_nack(&mut self.writer, ring, flags, delay_ms, leases);
        begun.unwrap().ok().map(|_| self.writer.next_position())
    }

    pub fn extend(&mut self, duration_ms: u64, leases: &[Lease]) -> Option<u64> {
        let ring = self.map.submission();
        let begun = record::Leases::write_extend(&mut self.writer, ring, duration_ms, leases);
        begun.unwrap().ok().map(|_| self.writer.next_position())
    }

    pub fn flush(&mut self, flags: u16) -> Option<u64> {
        let ring = self.map.submission();
        let begun = record::write_flush(&mut self.writer, ring, flags);
        begun.unwrap().ok().map(|_| self.writer.next_position())
    }

    pub fn end(&mut self) -> Option<u64> {
        let begun = record::write_end(&mut self.writer, self.map.submission());
        begun.unwrap().ok().map(|_| self.writer.next_position())
    }

    /// A record of no known kind.
    pub fn garbage(&mut self) -> Option<u64> {
        let begun = self.writer.begin(self.map.submission(), 77, 0, 8);
        begun.unwrap().ok().map(|_| self.writer.next_position())
    }

    pub fn publish(&mut self) {
        self.writer.publish(self.map.submission());
    }

    /// Sets a cursor to what it can't be.
    pub fn scribble(&mut self, which: u32) {
        let header = self.map.header();
        let word = match which % 3 {
            0 => &header.submission_tail.word,
            1 => &header.delivery_head.word,
            _ => &header.answer_head.word,
        };
        word.store(u64::MAX - 7, Ordering::Release);
    }

    /// What has appeared in the delivery ring since the last call.
    pub fn look(&mut self) -> Vec<Found> {
        let ring = self.map.delivery();
        let mut found = Vec::new();
        while let Some(record) = self.deliveries.next(ring).unwrap() {
            let (delivery, place) = Delivery::read(&record, ring).unwrap();
            let Delivered::Inline { offset, len } = place else {
                panic!("a chunk, which this client does not know");
            };
            let mut payload = vec![0; len];
            ring.area.copy_out(offset, &mut payload);
            self.inbox.push_back((record.position, record.end()));
            found.push(Found {
                delivery,
                position: record.position,
                payload,
            });
        }
        found
    }

    /// Whether its delivery ring has come past this position.
    pub fn is_beyond(&self, position: u64) -> bool {
        position < self.deliveries.next_position()
    }

    /// Its process is gone, with all it had in hand.
    pub fn forget(&mut self) {
        self.inbox.clear();
        self.held.clear();
    }

    /// Takes the oldest delivery that was seen.
    pub fn take(&mut self) -> Option<u64> {
        let (position, end) = self.inbox.pop_front()?;
        if self.is_alive() {
            self.deliveries.free(self.map.delivery(), end);
        }
        self.held.push(position);
        Some(position)
    }

    /// The stored and synced cursors, as a client reads them: before the
    /// answers.
    pub fn cursors(&self) -> (u64, u64) {
        let confirmations = &self.map.header().confirmations;
        let synced = confirmations.synced.load(Ordering::Acquire);
        (confirmations.stored.load(Ordering::Acquire), synced)
    }

    /// Reads all answers, and frees them.
    pub fn answers(&mut self) -> Vec<Answer> {
        let ring = self.map.answers();
        let mut answers = Vec::new();
        let mut end = None;
        while let Some(record) = self.answers.next(ring).unwrap() {
            answers.push(Answer::read(&record, ring).unwrap());
            end = Some(record.end());
        }
        if let Some(end) = end
            && self.is_alive()
        {
            self.answers.free(ring, end);
        }
        answers
    }
}
