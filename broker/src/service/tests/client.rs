//! A client without its library: rings, cursors and nothing else.

use crate::control::{ConnId, Peer};
use ringmain::control::Purpose;
use ringmain::record::{self, Answer, Chunk, Delivered, Delivery, Lease};
use ringmain_ring::Ordering;
use ringmain_ring::payload::{Outbound, unit_offset};
use ringmain_ring::record_ring::{Reader, Writer};
use ringmain_ring::session::SessionMap;
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

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

/// A payload in a chunk, and what it was when it was delivered.
struct Shown {
    file: File,
    offset: u64,
    payload: Vec<u8>,
}

impl Shown {
    /// By its file, and not by the descriptor that the broker sends: so it is read
    /// at once.
    fn at(path: &Path, chunk: Chunk) -> Shown {
        let file = File::open(path).unwrap();
        let mut units = 1;
        // Nothing says how many units a segment has but its length.
        while ringmain_ring::payload::segment_bytes(units) < file.metadata().unwrap().len() {
            units += 1;
        }
        let offset = unit_offset(units, chunk.unit);
        let payload = vec![0; chunk.len as usize];
        let mut shown = Shown {
            file,
            offset,
            payload,
        };
        shown.payload = shown.read();
        shown
    }

    fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.payload.len()];
        self.file.read_exact_at(&mut bytes, self.offset).unwrap();
        bytes
    }
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
    dir: PathBuf,
    /// Its outbound payload segments.
    pub outbound: Vec<Outbound>,
    /// Chunks that deliveries show it, by their positions.
    shown: HashMap<u64, Shown>,
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
    pub fn new(conn: ConnId, peer: Peer, map: SessionMap, dir: &Path) -> Client {
        Client {
            conn: Some(conn),
            peer,
            session: map.session(),
            life: Life::Alive,
            attachments: Vec::new(),
            attaching: None,
            dir: dir.to_owned(),
            outbound: Vec::new(),
            shown: HashMap::new(),
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

    /// The same with the payload in a chunk. `None`: no room, or no chunk.
    pub fn send_chunk(&mut self, attachment: u32, payload: &[u8]) -> Option<(u64, u64)> {
        let mut segments = self.outbound.iter_mut();
        let (owner, mut loan) =
            segments.find_map(|o| o.allocate(payload.len()).map(|loan| (o, loan)))?;
        loan.copy_from_slice(payload);
        let chunk = Chunk {
            segment: loan.segment(),
            unit: loan.unit(),
            len: payload.len() as u32,
        };
        let ring = self.map.submission();
        let begun = record::Send::write_chunk(&mut self.writer, ring, attachment, 1, chunk);
        let position = begun.unwrap().ok();
        if let Some(position) = position {
            loan.take(position);
        }
        owner.put_back(loan);
        Some((position?, self.writer.next_position()))
    }

    /// I9: what a delivery showed it is there until it answers.
    pub fn check_shown(&self, positions: &[u64]) {
        for shown in positions.iter().filter_map(|at| self.shown.get(at)) {
            assert!(
                shown.read() == shown.payload,
                "I9: a chunk was used again under its reader"
            );
        }
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
            let shown = match place {
                Delivered::Inline { .. } => None,
                Delivered::InPlace(chunk) => {
                    Some((format!("s{}.out{}", delivery.session, chunk.segment), chunk))
                }
                Delivered::Inbound(chunk) => {
                    Some((format!("s{}.in{}", self.session, chunk.segment), chunk))
                }
            };
            let shown = shown.map(|(name, chunk)| Shown::at(&self.dir.join(name), chunk));
            let mut payload = Vec::new();
            if let Delivered::Inline { offset, len } = place {
                payload.resize(len, 0);
                ring.area.copy_out(offset, &mut payload);
            }
            if let Some(shown) = shown {
                payload.clone_from(&shown.payload);
                self.shown.insert(record.position, shown);
            }
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
        self.shown.clear();
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
