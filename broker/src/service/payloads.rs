//! Payload segments of sessions: their files, their limits, and who was told of
//! them.

use super::io::Io;
use super::session::SessionIo;
use crate::control::ConnId;
use crate::crash::crash_point;
use crate::hub::SessionSlot;
use crate::ledger::{Direction, LedgerError, SEGMENTS_MAX, SessionLedger};
use ringmain::Error;
use ringmain::control::{Notice, PayloadSegment};
use ringmain::record::Chunk;
use ringmain_ring::payload::{ChunkWords, UNIT_BYTES, segment_bytes, unit_offset, units_for};
use ringmain_ring::segment::{self, SegmentError};
use std::fs::{File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tracing::warn;

/// A session's first payload segment has so many bytes, if its payload needs no
/// more.
const FIRST_BYTES: u64 = 4 << 20;
/// A further one is as large as all before it, up to this, if its payload needs
/// no more.
const STEP_BYTES_MAX: u64 = 256 << 20;
/// Outbound segments of others that a consumer is told of; what lies in more of
/// them is copied for it.
const ANNOUNCED_MAX: usize = 64;

/// What payloads may take of shared memory, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct PayloadLimits {
    /// A session's segments, in each direction.
    pub session_bytes: u64,
    /// All segments; half of it for each direction.
    pub total_bytes: u64,
}

/// Tells something to the client at this connection, with a descriptor.
pub(super) type Told = (ConnId, Notice, Option<OwnedFd>);

/// A client's outbound segment, as the broker has it: the words mapped, the data
/// read by the descriptor, since a client that cuts the file short must not harm
/// the threads that copy.
#[derive(Debug)]
pub(super) struct OutboundFile {
    file: File,
    pub words: ChunkWords,
}

impl OutboundFile {
    fn new(file: File, path: &Path, units: u32) -> Result<OutboundFile, SegmentError> {
        let words = ChunkWords::new(&file, path, units)?;
        Ok(OutboundFile { file, words })
    }

    /// Whether a client can have such a chunk in it.
    pub fn holds(&self, at: Chunk) -> bool {
        let units = units_for(u64::from(at.len));
        units.is_some_and(|units| {
            u64::from(at.unit) + u64::from(units) <= u64::from(self.words.units())
        })
    }

    /// Reads a part of a chunk, from `offset` bytes within it. What its client has
    /// cut off or can't be read is zeroes, at the client's own cost.
    pub fn read(&self, at: Chunk, offset: usize, bytes: &mut [u8]) {
        let start = unit_offset(self.words.units(), at.unit) + offset as u64;
        if self.file.read_exact_at(bytes, start).is_err() {
            bytes.fill(0);
            // The service thread sees it, and ends the session.
            self.words.set_damaged();
        }
    }
}

/// An inbound segment, written by the descriptor: a mapping of it would only count
/// as this process's memory.
#[derive(Debug)]
pub(super) struct InboundFile {
    file: File,
    units: u32,
}

impl InboundFile {
    /// Writes a part of a chunk, from `offset` bytes within it. The memory was
    /// reserved when the segment was made, and its client can only read.
    pub fn write(&self, into: Chunk, offset: usize, bytes: &[u8]) -> std::io::Result<()> {
        let start = unit_offset(self.units, into.unit) + offset as u64;
        crash_point("write into a consumer's payload segment");
        self.file.write_all_at(bytes, start)
    }
}

/// Where a payload segment of a session lies.
fn path_of(dir: &Path, session: u64, direction: Direction, segment: usize) -> PathBuf {
    match direction {
        Direction::Outbound => dir.join(format!("s{session}.out{segment}")),
        Direction::Inbound => dir.join(format!("s{session}.in{segment}")),
    }
}

/// Removes a session's payload segments.
pub(super) fn remove_segments(dir: &Path, session: u64) {
    for direction in [Direction::Outbound, Direction::Inbound] {
        for segment in 0..SEGMENTS_MAX {
            let path = path_of(dir, session, direction, segment);
            crash_point("remove a payload segment");
            if std::fs::remove_file(path).is_err() {
                break;
            }
        }
    }
}

/// A session's payload segments.
#[derive(Debug, Default)]
pub(super) struct Payloads {
    pub outbound: Vec<Arc<OutboundFile>>,
    pub inbound: Vec<Arc<InboundFile>>,
    /// Outbound segments of others that its client was told of: session, segment.
    announced: Vec<(u64, u32)>,
}

impl Payloads {
    /// Opens those that a predecessor left. Gives what is wrong with them, too: a
    /// segment that its client has damaged is replaced, so that its loss is
    /// nobody else's.
    pub fn adopt(
        dir: &Path,
        session: u64,
        ledger: &SessionLedger,
    ) -> Result<(Payloads, Option<String>), LedgerError> {
        let mut payloads = Payloads::default();
        let mut damage = None;
        for (segment, units) in ledger
            .segments(Direction::Outbound)?
            .into_iter()
            .enumerate()
        {
            let path = path_of(dir, session, Direction::Outbound, segment);
            let file = reopen(&path, units, &mut damage)?;
            let file = OutboundFile::new(file, &path, units)?;
            payloads.outbound.push(Arc::new(file));
        }
        for (segment, units) in ledger.segments(Direction::Inbound)?.into_iter().enumerate() {
            let path = path_of(dir, session, Direction::Inbound, segment);
            let file = reopen(&path, units, &mut damage)?;
            payloads.inbound.push(Arc::new(InboundFile { file, units }));
        }
        Ok((payloads, damage))
    }

    /// Bytes of the segments in this direction.
    pub fn bytes(&self, direction: Direction) -> u64 {
        match direction {
            Direction::Outbound => self
                .outbound
                .iter()
                .map(|s| segment_bytes(s.words.units()))
                .sum(),
            Direction::Inbound => self.inbound.iter().map(|s| segment_bytes(s.units)).sum(),
        }
    }

    /// Whether the session's client has cut one short.
    pub fn is_damaged(&self) -> bool {
        self.outbound.iter().any(|file| file.words.is_damaged())
    }

    fn count(&self, direction: Direction) -> usize {
        match direction {
            Direction::Outbound => self.outbound.len(),
            Direction::Inbound => self.inbound.len(),
        }
    }

    /// Units of the inbound segments, by number.
    pub fn inbound_units(&self) -> Vec<u32> {
        self.inbound.iter().map(|segment| segment.units).collect()
    }
}

/// Opens a segment that was there; makes up for what is missing of it.
fn reopen(path: &Path, units: u32, damage: &mut Option<String>) -> Result<File, SegmentError> {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    let file = match options.open(path) {
        Ok(file) => file,
        Err(_) => {
            *damage = Some("a payload segment of it is missing".to_owned());
            crash_point("make up for a missing payload segment");
            return segment::create(path, segment_bytes(units));
        }
    };
    let whole = file
        .metadata()
        .is_ok_and(|found| found.len() >= segment_bytes(units));
    if !whole {
        *damage = Some("a payload segment of it was cut short".to_owned());
        crash_point("make up for what a payload segment lacks");
        segment::reserve(&file, path, 0, segment_bytes(units))?;
    }
    Ok(file)
}

impl Io {
    /// Makes an outbound segment for a client that has a payload of `len` bytes to
    /// send. Gives the file for the client.
    pub fn add_outbound(
        &mut self,
        slot: SessionSlot,
        len: u64,
    ) -> Result<(PayloadSegment, File), Error> {
        let (made, path) = self.make_segment(slot, Direction::Outbound, len)?;
        let open = || OpenOptions::new().read(true).write(true).open(&path);
        let files = open().and_then(|ours| Ok((ours, open()?)));
        let (ours, theirs) = files.map_err(|e| cannot_open(&path, e))?;
        let ours = OutboundFile::new(ours, &path, made.units)?;
        self.note_segment(slot, Direction::Outbound, made, |payloads| {
            payloads.outbound.push(Arc::new(ours));
        });
        Ok((made, theirs))
    }

    /// Makes an inbound segment for a session that is to get a payload of `len`
    /// bytes, and tells its client.
    pub fn add_inbound(&mut self, slot: SessionSlot, len: u32) -> Result<u32, Error> {
        let (made, path) = self.make_segment(slot, Direction::Inbound, u64::from(len))?;
        let file = OpenOptions::new().read(true).write(true).open(&path);
        let file = file.map_err(|e| cannot_open(&path, e))?;
        let units = made.units;
        let descriptor = File::open(&path).map_err(|e| cannot_open(&path, e))?;
        self.note_segment(slot, Direction::Inbound, made, |payloads| {
            payloads.inbound.push(Arc::new(InboundFile { file, units }));
        });
        self.tell(slot, Notice::Inbound(made), Some(descriptor.into()));
        Ok(made.units)
    }

    /// Makes the file, as large as is sensible, or as large as it must be.
    fn make_segment(
        &self,
        slot: SessionSlot,
        direction: Direction,
        len: u64,
    ) -> Result<(PayloadSegment, PathBuf), Error> {
        let closed = || Error::Closed("the session has ended".to_owned());
        let session = self.session(slot).ok_or_else(closed)?;
        let needed = units_for(len);
        let needed = needed.ok_or_else(|| Error::Full(format!("no segment holds {len} bytes")))?;
        let have = session.payloads.bytes(direction);
        let step = have.clamp(FIRST_BYTES, STEP_BYTES_MAX) / UNIT_BYTES as u64;
        let segment = session.payloads.count(direction);
        let path = path_of(&self.dir, session.number, direction, segment);
        if segment == SEGMENTS_MAX {
            return Err(Error::Full(format!(
                "the session has {segment} payload segments already"
            )));
        }
        let mut units = needed.max(step as u32);
        if self.make_file(&path, direction, have, units).is_err() {
            units = needed;
            self.make_file(&path, direction, have, units)?;
        }
        let segment = segment as u32;
        Ok((PayloadSegment { segment, units }, path))
    }

    fn make_file(
        &self,
        path: &Path,
        direction: Direction,
        have: u64,
        units: u32,
    ) -> Result<(), Error> {
        let bytes = segment_bytes(units);
        let limit = self.limits.session_bytes;
        if have + bytes > limit {
            return Err(Error::Full(format!(
                "the session has {have} bytes of payload memory, and {bytes} more would exceed its \
                 limit of {limit}: see `ringmain serve --session-payload-memory`"
            )));
        }
        // Half for each, so that neither senders nor receivers can take all of it
        // and have the others wait for ever.
        let (all, limit) = (
            self.payload_bytes[direction as usize],
            self.limits.total_bytes / 2,
        );
        if all + bytes > limit {
            let whose = match direction {
                Direction::Outbound => "senders",
                Direction::Inbound => "receivers",
            };
            return Err(Error::Full(format!(
                "{all} bytes of payload memory are in use by {whose}, and {bytes} more would exceed \
                 their limit of {limit}: see `ringmain serve --payload-memory`"
            )));
        }
        crash_point("clear the place of a payload segment");
        // What a broker left that died before it noted the segment.
        let _ = std::fs::remove_file(path);
        crash_point("make a payload segment");
        segment::create(path, bytes)?;
        Ok(())
    }

    /// The segment is there: notes it in the ledger and here.
    fn note_segment(
        &mut self,
        slot: SessionSlot,
        direction: Direction,
        made: PayloadSegment,
        add: impl FnOnce(&mut Payloads),
    ) {
        if let Some(session) = self.session_mut(slot) {
            session
                .ledger
                .add_segment(direction, made.segment, made.units);
            add(&mut session.payloads);
            self.payload_bytes[direction as usize] += segment_bytes(made.units);
        }
    }

    /// Has the client told something, if it is connected. One that resumes its
    /// session is told again.
    fn tell(&mut self, slot: SessionSlot, notice: Notice, descriptor: Option<OwnedFd>) {
        if let Some(conn) = self.session(slot).and_then(|session| session.conn) {
            self.told.push((conn, notice, descriptor));
        }
    }

    /// Whether the consumer can read this outbound segment in place. Its client is
    /// told of the segment before the first delivery that names it.
    pub fn announce(&mut self, consumer: SessionSlot, owner: SessionSlot, segment: u32) -> bool {
        let (Some(reader), Some(sender)) = (self.session(consumer), self.session(owner)) else {
            return false;
        };
        let key = (sender.number, segment);
        let announced = &reader.payloads.announced;
        // Clients of one user could harm each other anyway.
        if reader.peer.uid != sender.peer.uid {
            return false;
        }
        if announced.contains(&key) {
            return true;
        }
        if announced.len() >= ANNOUNCED_MAX {
            return false;
        }
        let Some(file) = sender.payloads.outbound.get(segment as usize) else {
            return false;
        };
        let units = file.words.units();
        let path = path_of(
            &self.dir,
            sender.number,
            Direction::Outbound,
            segment as usize,
        );
        let descriptor = match File::open(&path) {
            Ok(file) => file.into(),
            Err(error) => {
                warn!(path = %path.display(), %error, "a payload segment can't be passed on");
                return false;
            }
        };
        let notice = Notice::Outbound {
            session: sender.number,
            segment: PayloadSegment { segment, units },
        };
        if let Some(reader) = self.session_mut(consumer) {
            reader.payloads.announced.push(key);
        }
        self.tell(consumer, notice, Some(descriptor));
        true
    }

    /// A client has resumed its session: what it was told by a predecessor may have
    /// been lost. `reads` are the outbound segments of what it is shown.
    pub fn announce_again(&mut self, slot: SessionSlot, reads: &[(SessionSlot, u32)]) {
        let Some(session) = self.session_mut(slot) else {
            return;
        };
        session.payloads.announced.clear();
        let number = session.number;
        let inbound = session.payloads.inbound_units();
        for (segment, units) in inbound.into_iter().enumerate() {
            let path = path_of(&self.dir, number, Direction::Inbound, segment);
            let segment = segment as u32;
            match File::open(&path) {
                Ok(file) => {
                    let made = PayloadSegment { segment, units };
                    self.tell(slot, Notice::Inbound(made), Some(file.into()));
                }
                Err(error) => {
                    self.break_session(slot, format!("its payload segment is gone: {error}"));
                }
            }
        }
        for &(owner, segment) in reads {
            self.announce(slot, owner, segment);
        }
    }

    /// The session is gone: its memory is free, and whoever was told of its
    /// segments is told that.
    pub fn forget_segments(&mut self, session: &SessionIo) {
        for direction in [Direction::Outbound, Direction::Inbound] {
            self.payload_bytes[direction as usize] -= session.payloads.bytes(direction);
        }
        if session.payloads.outbound.is_empty() {
            return;
        }
        let number = session.number;
        for slot in 0..self.sessions.len() as SessionSlot {
            let Some(reader) = self.session_mut(slot) else {
                continue;
            };
            let announced = &mut reader.payloads.announced;
            let before = announced.len();
            announced.retain(|&(owner, _)| owner != number);
            if announced.len() < before {
                self.tell(slot, Notice::Gone { session: number }, None);
            }
        }
    }
}

fn cannot_open(path: &Path, source: std::io::Error) -> Error {
    Error::Io {
        what: format!("cannot open {}", path.display()),
        source,
    }
}
