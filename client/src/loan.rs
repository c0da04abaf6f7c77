//! A payload that is written where it will be read.

use crate::error::Result;
use crate::message::MessageId;
use crate::producer::Producer;
use ringmain_ring::payload;
use std::ops::{Deref, DerefMut};

/// Bytes to be filled and sent without a copy: see [`Producer::loan`]. Dropped
/// unsent, it is nothing.
///
/// It must not be touched in a forked child, where its memory is not mapped.
#[derive(Debug)]
pub struct Loan {
    producer: Producer,
    bytes: Bytes,
}

#[derive(Debug)]
enum Bytes {
    /// So short that it goes into the record.
    Short(Vec<u8>),
    Chunk(payload::Loan),
    /// It has gone.
    Taken,
}

impl Loan {
    pub(crate) fn short(producer: Producer, len: usize) -> Loan {
        let bytes = Bytes::Short(vec![0; len]);
        Loan { producer, bytes }
    }

    pub(crate) fn chunk(producer: Producer, chunk: payload::Loan) -> Loan {
        let bytes = Bytes::Chunk(chunk);
        Loan { producer, bytes }
    }

    /// Makes the payload shorter; longer than it is has no effect.
    pub fn truncate(&mut self, len: usize) {
        match &mut self.bytes {
            Bytes::Short(bytes) => bytes.truncate(len),
            Bytes::Chunk(chunk) => chunk.truncate(len),
            Bytes::Taken => {}
        }
    }

    /// Sends it, as [`Producer::send`] does with a copy. After an error it is
    /// gone.
    pub fn send(mut self) -> Result<MessageId> {
        match std::mem::replace(&mut self.bytes, Bytes::Taken) {
            Bytes::Chunk(chunk) => self.producer.send_chunk(chunk),
            Bytes::Short(bytes) => self.producer.send(bytes),
            // Only this function leaves it so, and it takes the loan.
            Bytes::Taken => self.producer.send([]),
        }
    }
}

impl Deref for Loan {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Short(bytes) => bytes,
            Bytes::Chunk(chunk) => chunk,
            Bytes::Taken => &[],
        }
    }
}

impl DerefMut for Loan {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.bytes {
            Bytes::Short(bytes) => bytes,
            Bytes::Chunk(chunk) => chunk,
            Bytes::Taken => &mut [],
        }
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if let Bytes::Chunk(chunk) = std::mem::replace(&mut self.bytes, Bytes::Taken) {
            self.producer.put_back(chunk);
        }
    }
}
