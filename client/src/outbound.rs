//! A session's outbound payload segments: where large payloads are written before
//! they are sent.

use crate::clock;
use crate::control::{PayloadSegment, Request};
use crate::error::{Error, Result};
use crate::lock;
use crate::session::Session;
use crate::wait::{Deadline, Progress};
use ringmain_ring::payload::{self, Loan, PayloadMap, units_for};
use ringmain_ring::wait::client;
use std::fs::File;
use std::path::Path;
use std::sync::{Mutex, TryLockError};
use std::time::Duration;

/// Until it has so much, a session asks for more memory rather than wait for
/// chunks to come back: enough to have a consumer at work while the next
/// messages are written.
const ENOUGH_BYTES: u64 = 64 << 20;
/// And enough for so many payloads of the size at hand.
const ENOUGH_PAYLOADS: u64 = 4;
/// After the broker has refused more memory, chunks are waited for so long before
/// it is asked again.
const REFUSED_NS: u64 = 100_000_000;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Outbounds {
    segments: Mutex<Segments>,
    /// Held while a segment is asked for, so that not two threads ask for one
    /// each.
    growing: Mutex<()>,
}

#[derive(Debug, Default)]
struct Segments {
    /// In the order of their numbers, some of which may be missing: of segments
    /// that a broker made, and did not live to pass on.
    list: Vec<payload::Outbound>,
    /// No more is asked for before this time of the monotonic clock.
    refused_until_ns: u64,
}

enum Found {
    Chunk(Loan),
    /// None is free: ask for more memory.
    Grow,
    /// None is free: one will come back.
    Wait,
}

impl Segments {
    fn find(&mut self, len: usize) -> Found {
        if let Some(loan) = self.list.iter_mut().find_map(|s| s.allocate(len)) {
            return Found::Chunk(loan);
        }
        let refused = clock::monotonic_ns() < self.refused_until_ns;
        let bytes = self.list.iter().map(|s| payload::segment_bytes(s.units()));
        let enough = bytes.sum::<u64>() >= ENOUGH_BYTES.max(ENOUGH_PAYLOADS * len as u64);
        match self.comes_back(len) && (enough || refused) {
            true => Found::Wait,
            false => Found::Grow,
        }
    }

    /// Whether there will be a chunk of this length without anything new.
    fn comes_back(&self, len: usize) -> bool {
        let holds = |s: &payload::Outbound| units_for(len as u64).is_some_and(|u| u <= s.units());
        self.list.iter().any(|s| holds(s) && s.has_queued())
    }
}

impl Outbounds {
    /// Its owner is done with a loan, whether it was sent or not.
    pub(crate) fn put_back(&self, loan: Loan) {
        let mut segments = lock(&self.segments);
        let number = loan.segment();
        if let Some(segment) = segments.list.iter_mut().find(|s| s.segment() == number) {
            segment.put_back(loan);
        }
    }
}

impl Session {
    /// A chunk for `len` bytes. Waits for one as long as the deadline allows.
    /// [`Error::Full`] if there is no memory for it, and waiting for other chunks
    /// of this session would not help.
    pub(crate) fn allocate(&self, len: usize, deadline: Deadline) -> Result<Loan> {
        self.check_process()?;
        self.wait_for(deadline, || {
            self.check_open()?;
            let found = lock(&self.outbounds().segments).find(len);
            match found {
                Found::Chunk(loan) => Ok(Progress::Done(loan)),
                Found::Wait => Ok(Progress::Wait(client::ROOM)),
                Found::Grow => self.grow(len, deadline),
            }
        })
    }

    fn grow(&self, len: usize, deadline: Deadline) -> Result<Progress<Loan>> {
        if matches!(deadline, Deadline::Now) && !self.link().is_up() {
            return Ok(Progress::Wait(client::ROOM));
        }
        let outbounds = self.outbounds();
        let _growing = match outbounds.growing.try_lock() {
            Err(TryLockError::WouldBlock) => return Ok(Progress::Wait(client::ROOM)),
            other => other,
        };
        let bytes = len as u64;
        match self.link().call_for(&Request::Outbound { bytes }) {
            Ok((made, [descriptor])) => {
                let segment = self.map_outbound(made, File::from(descriptor))?;
                lock(&outbounds.segments).list.push(segment);
                // For threads that wait for this, as for the broker.
                self.map().client_wait().wake_announced(client::ROOM);
            }
            Err(Error::Full(why)) => {
                let mut segments = lock(&outbounds.segments);
                segments.refused_until_ns = clock::monotonic_ns() + REFUSED_NS;
                if !segments.comes_back(len) {
                    return Err(Error::Full(why));
                }
            }
            // The broker died, or restarts: the next one is asked.
            Err(Error::Io { .. }) if !self.link().keep_up(Duration::ZERO)? => {
                return Ok(Progress::Wait(client::ROOM));
            }
            Err(error) => return Err(error),
        }
        match lock(&outbounds.segments).find(len) {
            Found::Chunk(loan) => Ok(Progress::Done(loan)),
            Found::Grow | Found::Wait => Ok(Progress::Wait(client::ROOM)),
        }
    }

    fn map_outbound(&self, made: PayloadSegment, file: File) -> Result<payload::Outbound> {
        let segments = lock(&self.outbounds().segments);
        let last = segments.list.last().map(payload::Outbound::segment);
        drop(segments);
        if last.is_some_and(|last| made.segment <= last) {
            return Err(self.corrupt(&"a payload segment out of its turn"));
        }
        let map = PayloadMap::new(&file, Path::new("a payload segment"), made.units)?;
        Ok(payload::Outbound::new(map, made.segment))
    }
}
