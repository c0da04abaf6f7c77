//! What the records in the three rings say. Client and broker share this file;
//! the ring below it knows bytes only.
//!
//! Numbers are in the machine's byte order. Each record is the ring's header
//! (kind, flags, length) and this content:
//!
//! ```text
//! submission ring
//!   SEND    0 attachment u32 | 4 options length u32 | 8 sent at (ms) u64 |
//!           16 options, padded to 8 | payload, or a chunk if the flags say so
//!   ACK     leases of 16 bytes: 0 delivery position u64 | 8 entry u32 | 12 zero
//!   NACK    0 delay (ms) u64 | leases
//!   EXTEND  0 duration (ms) u64 | leases
//!   FLUSH   (flags: 1 stored, 2 synced)
//!   END     (the client ends the session; nothing follows)
//! delivery ring
//!   MESSAGE 0 entry u32 | 4 attachment u32 | 8 sender's session u64 |
//!           16 sender's position u64 | 24 sent at (ms) u64 |
//!           32 deadline (ns, monotonic clock) u64 | 40 attempts u32 |
//!           44 options length u32 | 48 options, padded to 8 | payload, or a
//!           chunk if the flags say so
//! answer ring
//!   REFUSED     (flags: error code) 0 submission position u64
//!   LEASE_LOST  0 delivery position u64
//! ```
//!
//! A chunk is 0 segment u32 | 4 first unit u32 | 8 length of the payload u64.
//!
//! *Options* leave room for what later versions say of a message (headers,
//! times, priority, group, transaction): flags say which are there. Today none
//! is defined, and the length is 0.

use ringmain_ring::record_ring::{Damaged, Full, Record, Ring, Slot, Writer};

/// Kinds of records in the submission ring.
pub mod submission {
    /// A message.
    pub const SEND: u8 = 1;
    /// These leases' messages are done.
    pub const ACK: u8 = 2;
    /// These leases' messages go back to their queue.
    pub const NACK: u8 = 3;
    /// These leases last longer.
    pub const EXTEND: u8 = 4;
    /// Asks that all before it be confirmed.
    pub const FLUSH: u8 = 5;
    /// The client ends the session: the last record. It may go on reading the
    /// chunks that it was shown, until it closes the socket.
    pub const END: u8 = 6;
    /// Flag of [`SEND`]: the payload is a chunk of the session's outbound
    /// segments.
    pub const SEND_CHUNK: u16 = 1;
    /// Flag of [`NACK`]: the client did not hand the message out, so that this
    /// is no attempt.
    pub const NACK_UNCOUNTED: u16 = 1;
    /// Flag of [`NACK`]: the message can't be processed, and goes to the
    /// dead-letter queue.
    pub const NACK_REJECT: u16 = 2;
    /// Flag of [`FLUSH`].
    pub const FLUSH_STORED: u16 = 1;
    /// Flag of [`FLUSH`].
    pub const FLUSH_SYNCED: u16 = 2;
}

/// Kinds of records in the delivery ring.
pub mod delivery {
    /// A message.
    pub const MESSAGE: u8 = 1;
    /// Flag of [`MESSAGE`]: it was leased before.
    pub const REDELIVERED: u16 = 1;
    /// Flag of [`MESSAGE`]: the payload is a chunk of the sender's outbound
    /// segments, to be read in place.
    pub const IN_PLACE: u16 = 2;
    /// Flag of [`MESSAGE`]: the payload is a chunk of the session's inbound
    /// segments.
    pub const INBOUND: u16 = 4;
}

/// Kinds of records in the answer ring.
pub mod answer {
    /// A send was refused.
    pub const REFUSED: u8 = 1;
    /// A lease had ended when its ack, nack or extend came.
    pub const LEASE_LOST: u8 = 2;
    /// Bytes that any answer takes in the ring.
    pub const BYTES: usize = 16;
}

/// Bytes of a send before its options and payload.
pub const SEND_HEAD_BYTES: usize = 16;
/// Bytes of a delivery before its options and payload.
pub const DELIVERY_HEAD_BYTES: usize = 48;
/// Bytes of a lease in an ack, nack or extend.
pub const LEASE_BYTES: usize = 16;
/// Most leases that one ack, nack or extend names.
pub const LEASES_MAX: usize = 256;

/// Bytes of a chunk's description.
pub const CHUNK_BYTES: usize = 16;
/// Longest payload that a client puts into a record. What is longer goes into a
/// chunk, which is not copied on its way.
pub const INLINE_BYTES_MAX: u32 = 15 * 1024;

/// Longest payload that is put into a record of this submission ring: the record
/// takes at most a quarter of the ring.
pub const fn inline_max_of_submission_ring(ring_bytes: u32) -> u32 {
    inline_max(ring_bytes, SEND_HEAD_BYTES as u32)
}

/// Longest payload that is put into a record of this delivery ring: the record
/// takes at most a quarter of the ring.
pub const fn inline_max_of_delivery_ring(ring_bytes: u32) -> u32 {
    inline_max(ring_bytes, DELIVERY_HEAD_BYTES as u32)
}

const fn inline_max(ring_bytes: u32, head_bytes: u32) -> u32 {
    let most = ring_bytes / 4 - 8 - head_bytes;
    if most < INLINE_BYTES_MAX {
        most
    } else {
        INLINE_BYTES_MAX
    }
}

/// A chunk, as a record names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Chunk {
    /// Number of the payload segment.
    pub segment: u32,
    /// Its first unit there.
    pub unit: u32,
    /// Length of the payload in bytes.
    pub len: u32,
}

impl Chunk {
    fn write(self, slot: &Slot<'_>, at: usize) {
        slot.put_u64(at, u64::from(self.segment) | u64::from(self.unit) << 32);
        slot.put_u64(at + 8, u64::from(self.len));
    }

    /// Reads what a record has behind its head.
    fn read(record: &Record, head_bytes: usize, ring: Ring<'_>) -> Result<Chunk, Malformed> {
        if record.len as usize != head_bytes + CHUNK_BYTES {
            return Err(malformed(record, "not the length of a chunk's description"));
        }
        let at = record.offset as usize + head_bytes;
        let (place, len) = (ring.area.load(at), ring.area.load(at + 8));
        let len = u32::try_from(len).map_err(|_| malformed(record, "a chunk beyond 4 GiB"))?;
        Ok(Chunk {
            segment: place as u32,
            unit: (place >> 32) as u32,
            len,
        })
    }
}

/// Where a record has its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In the record itself.
    Inline {
        /// Where in the ring's area.
        offset: u32,
        /// Length of the payload.
        len: u32,
    },
    /// In a chunk. For the receiver to check.
    Chunk(Chunk),
}

impl Place {
    /// Length of the payload in bytes.
    #[inline]
    pub fn len(&self) -> u32 {
        match self {
            Place::Inline { len, .. } => *len,
            Place::Chunk(chunk) => chunk.len,
        }
    }

    /// Whether the payload is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A lease, as an ack names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Lease {
    /// Position of the delivery's record.
    pub delivery_position: u64,
    /// Entry in the broker's lease table.
    pub entry: u32,
}

/// Content of a record that does not fit its kind; the session must end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed record of kind {kind} at {position}: {what}")]
pub struct Malformed {
    /// The record's kind.
    pub kind: u8,
    /// The record's position.
    pub position: u64,
    /// What is wrong.
    pub what: &'static str,
}

fn malformed(record: &Record, what: &'static str) -> Malformed {
    Malformed {
        kind: record.kind,
        position: record.position,
        what,
    }
}

/// What a ring gives for a record to be written: room, or [`Full`]; or the news
/// that the other side has damaged the ring.
pub type Begun<T> = std::result::Result<std::result::Result<T, Full>, Damaged>;

/// The head of a send, and where its payload is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Send {
    /// Index of the attachment.
    pub attachment: u32,
    /// Milliseconds since the Unix epoch, by the client's clock.
    pub sent_at_ms: u64,
    /// Where the payload is.
    pub place: Place,
}

impl Send {
    /// Begins a send of `payload_len` bytes. The payload goes to
    /// [`SEND_HEAD_BYTES`] of the slot.
    #[inline(always)]
    pub fn begin<'a>(
        writer: &mut Writer,
        ring: Ring<'a>,
        attachment: u32,
        sent_at_ms: u64,
        payload_len: usize,
    ) -> Begun<Slot<'a>> {
        let content = SEND_HEAD_BYTES + payload_len;
        Ok(writer
            .begin(ring, submission::SEND, 0, content)?
            .inspect(|slot| {
                slot.put_u64(0, u64::from(attachment));
                slot.put_u64(8, sent_at_ms);
            }))
    }

    /// Writes a send whose payload is a chunk.
    pub fn write_chunk(
        writer: &mut Writer,
        ring: Ring<'_>,
        attachment: u32,
        sent_at_ms: u64,
        chunk: Chunk,
    ) -> Begun<u64> {
        let content = SEND_HEAD_BYTES + CHUNK_BYTES;
        let begun = writer.begin(ring, submission::SEND, submission::SEND_CHUNK, content)?;
        Ok(begun.map(|slot| {
            slot.put_u64(0, u64::from(attachment));
            slot.put_u64(8, sent_at_ms);
            chunk.write(&slot, SEND_HEAD_BYTES);
            slot.position
        }))
    }

    /// Reads a send. The place of an inline payload is within the ring; its bytes
    /// are not looked at.
    #[inline]
    pub fn read(record: &Record, ring: Ring<'_>) -> Result<Send, Malformed> {
        if (record.len as usize) < SEND_HEAD_BYTES {
            return Err(malformed(record, "too short"));
        }
        let offset = record.offset as usize;
        let first = ring.area.load(offset);
        if record.flags & !submission::SEND_CHUNK != 0 || first >> 32 != 0 {
            return Err(malformed(record, "options that this version does not know"));
        }
        let place = match record.flags {
            submission::SEND_CHUNK => Place::Chunk(Chunk::read(record, SEND_HEAD_BYTES, ring)?),
            _ => Place::Inline {
                offset: record.offset + SEND_HEAD_BYTES as u32,
                len: record.len - SEND_HEAD_BYTES as u32,
            },
        };
        Ok(Send {
            attachment: first as u32,
            sent_at_ms: ring.area.load(offset + 8),
            place,
        })
    }
}

/// An ack, nack or extend: a number that depends on the kind, and leases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leases {
    /// Delay of a nack or duration of an extend in milliseconds; 0 of an ack.
    pub millis: u64,
    first: u32,
    /// How many leases it names.
    pub count: u32,
}

impl Leases {
    /// Writes an ack of at most [`LEASES_MAX`] leases.
    #[inline]
    pub fn write_ack(writer: &mut Writer, ring: Ring<'_>, leases: &[Lease]) -> Begun<u64> {
        Self::write(writer, ring, submission::ACK, 0, None, leases)
    }

    /// Writes a nack of at most [`LEASES_MAX`] leases.
    pub fn write_nack(
        writer: &mut Writer,
        ring: Ring<'_>,
        flags: u16,
        delay_ms: u64,
        leases: &[Lease],
    ) -> Begun<u64> {
        Self::write(
            writer,
            ring,
            submission::NACK,
            flags,
            Some(delay_ms),
            leases,
        )
    }

    /// Writes an extend of at most [`LEASES_MAX`] leases.
    pub fn write_extend(
        writer: &mut Writer,
        ring: Ring<'_>,
        duration_ms: u64,
        leases: &[Lease],
    ) -> Begun<u64> {
        Self::write(
            writer,
            ring,
            submission::EXTEND,
            0,
            Some(duration_ms),
            leases,
        )
    }

    #[inline]
    fn write(
        writer: &mut Writer,
        ring: Ring<'_>,
        kind: u8,
        flags: u16,
        millis: Option<u64>,
        leases: &[Lease],
    ) -> Begun<u64> {
        let head = if millis.is_some() { 8 } else { 0 };
        let content = head + leases.len() * LEASE_BYTES;
        Ok(writer.begin(ring, kind, flags, content)?.map(|slot| {
            if let Some(millis) = millis {
                slot.put_u64(0, millis);
            }
            for (index, lease) in leases.iter().enumerate() {
                let at = head + index * LEASE_BYTES;
                slot.put_u64(at, lease.delivery_position);
                slot.put_u64(at + 8, u64::from(lease.entry));
            }
            slot.position
        }))
    }

    /// Reads an ack, nack or extend.
    #[inline]
    pub fn read(record: &Record, ring: Ring<'_>) -> Result<Leases, Malformed> {
        let head = if record.kind == submission::ACK { 0 } else { 8 };
        let len = record.len as usize;
        if len < head || !(len - head).is_multiple_of(LEASE_BYTES) {
            return Err(malformed(record, "not a number of leases"));
        }
        let count = (len - head) / LEASE_BYTES;
        if count > LEASES_MAX {
            return Err(malformed(record, "too many leases"));
        }
        let millis = match head {
            0 => 0,
            _ => ring.area.load(record.offset as usize),
        };
        Ok(Leases {
            millis,
            first: record.offset + head as u32,
            count: count as u32,
        })
    }

    /// The lease at this index, below `count`.
    #[inline]
    pub fn lease(&self, ring: Ring<'_>, index: u32) -> Lease {
        let at = self.first as usize + index as usize * LEASE_BYTES;
        Lease {
            delivery_position: ring.area.load(at),
            entry: ring.area.load(at + 8) as u32,
        }
    }
}

/// Writes a flush; `flags` are those of [`submission::FLUSH`].
pub fn write_flush(writer: &mut Writer, ring: Ring<'_>, flags: u16) -> Begun<u64> {
    let begun = writer.begin(ring, submission::FLUSH, flags, 0)?;
    Ok(begun.map(|slot| slot.position))
}

/// Writes the end of the session.
pub fn write_end(writer: &mut Writer, ring: Ring<'_>) -> Begun<u64> {
    let begun = writer.begin(ring, submission::END, 0, 0)?;
    Ok(begun.map(|slot| slot.position))
}

/// Where a delivery has its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivered {
    /// In the record itself.
    Inline {
        /// Where in the ring's area.
        offset: usize,
        /// Length of the payload.
        len: usize,
    },
    /// In a chunk of the sender's session.
    InPlace(Chunk),
    /// In a chunk of the consumer's session.
    Inbound(Chunk),
}

/// The head of a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delivery {
    /// Entry in the lease table.
    pub entry: u32,
    /// Index of the attachment.
    pub attachment: u32,
    /// The sender's session.
    pub session: u64,
    /// Position of the send in the sender's submission ring.
    pub position: u64,
    /// When it was sent, in milliseconds since the Unix epoch.
    pub sent_at_ms: u64,
    /// When the lease ends, in nanoseconds of the machine's monotonic clock.
    pub deadline_ns: u64,
    /// How often the message was attempted before.
    pub attempts: u32,
    /// Whether it was leased before.
    pub redelivered: bool,
}

impl Delivery {
    /// Begins a delivery with a payload of so many bytes, which go to
    /// [`DELIVERY_HEAD_BYTES`] of the slot.
    #[inline]
    pub fn begin<'a>(
        &self,
        writer: &mut Writer,
        ring: Ring<'a>,
        payload_len: usize,
    ) -> Begun<Slot<'a>> {
        self.begin_as(writer, ring, 0, payload_len)
    }

    /// Writes a delivery whose payload is a chunk: `flag` is
    /// [`delivery::IN_PLACE`] or [`delivery::INBOUND`].
    pub fn write_chunk(
        &self,
        writer: &mut Writer,
        ring: Ring<'_>,
        flag: u16,
        chunk: Chunk,
    ) -> Begun<u64> {
        let begun = self.begin_as(writer, ring, flag, CHUNK_BYTES)?;
        Ok(begun.map(|slot| {
            chunk.write(&slot, DELIVERY_HEAD_BYTES);
            slot.position
        }))
    }

    #[inline]
    fn begin_as<'a>(
        &self,
        writer: &mut Writer,
        ring: Ring<'a>,
        flag: u16,
        behind_head: usize,
    ) -> Begun<Slot<'a>> {
        let redelivered = if self.redelivered {
            delivery::REDELIVERED
        } else {
            0
        };
        let content = DELIVERY_HEAD_BYTES + behind_head;
        Ok(writer
            .begin(ring, delivery::MESSAGE, flag | redelivered, content)?
            .inspect(|slot| {
                slot.put_u64(0, u64::from(self.entry) | u64::from(self.attachment) << 32);
                slot.put_u64(8, self.session);
                slot.put_u64(16, self.position);
                slot.put_u64(24, self.sent_at_ms);
                slot.put_u64(32, self.deadline_ns);
                slot.put_u64(40, u64::from(self.attempts));
            }))
    }

    /// Reads a delivery. The place of an inline payload is within the ring.
    #[inline]
    pub fn read(record: &Record, ring: Ring<'_>) -> Result<(Delivery, Delivered), Malformed> {
        if record.kind != delivery::MESSAGE || (record.len as usize) < DELIVERY_HEAD_BYTES {
            return Err(malformed(record, "not a delivery"));
        }
        let offset = record.offset as usize;
        let word = |at: usize| ring.area.load(offset + at);
        if word(40) >> 32 != 0 {
            return Err(malformed(record, "options that this version does not know"));
        }
        let delivery = Delivery {
            entry: word(0) as u32,
            attachment: (word(0) >> 32) as u32,
            session: word(8),
            position: word(16),
            sent_at_ms: word(24),
            deadline_ns: word(32),
            attempts: word(40) as u32,
            redelivered: record.flags & delivery::REDELIVERED != 0,
        };
        let chunk = || Chunk::read(record, DELIVERY_HEAD_BYTES, ring);
        let place = match record.flags & !delivery::REDELIVERED {
            0 => Delivered::Inline {
                offset: offset + DELIVERY_HEAD_BYTES,
                len: record.len as usize - DELIVERY_HEAD_BYTES,
            },
            delivery::IN_PLACE => Delivered::InPlace(chunk()?),
            delivery::INBOUND => Delivered::Inbound(chunk()?),
            _ => return Err(malformed(record, "flags that this version does not know")),
        };
        Ok((delivery, place))
    }
}

/// An answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The send at this submission position was refused, for the reason with
    /// this number (see [`crate::ErrorCode`]).
    Refused {
        /// Where the send lies.
        position: u64,
        /// Number of the error code.
        code: u16,
    },
    /// The lease of the delivery at this position had ended.
    LeaseLost {
        /// Where the delivery lay.
        delivery_position: u64,
    },
}

impl Answer {
    /// Writes the answer, unpublished.
    pub fn write(&self, writer: &mut Writer, ring: Ring<'_>) -> Begun<u64> {
        let (kind, flags, word) = match *self {
            Answer::Refused { position, code } => (answer::REFUSED, code, position),
            Answer::LeaseLost { delivery_position } => (answer::LEASE_LOST, 0, delivery_position),
        };
        Ok(writer.begin(ring, kind, flags, 8)?.map(|slot| {
            slot.put_u64(0, word);
            slot.position
        }))
    }

    /// Reads an answer.
    pub fn read(record: &Record, ring: Ring<'_>) -> Result<Answer, Malformed> {
        if record.len != 8 {
            return Err(malformed(record, "not an answer"));
        }
        let word = ring.area.load(record.offset as usize);
        match record.kind {
            answer::REFUSED => Ok(Answer::Refused {
                position: word,
                code: record.flags,
            }),
            answer::LEASE_LOST => Ok(Answer::LeaseLost {
                delivery_position: word,
            }),
            _ => Err(malformed(record, "unknown kind of answer")),
        }
    }
}
