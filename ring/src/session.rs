//! A session segment, mapped and checked.

use crate::atomic::{AtomicU32, Ordering};
use crate::layout::{
    ATTACHMENTS_MAX, Geometry, HEADER_BYTES, LAYOUT_VERSION, MAGIC, NOT_FINAL, SessionHeader,
};
use crate::record_ring::Ring;
use crate::segment::{Mapping, SegmentError};
use crate::view::Area;
use crate::wait::WaitWord;
use std::fs::File;
use std::path::Path;

/// A mapped session segment. Either side holds one.
#[derive(Debug)]
pub struct SessionMap {
    mapping: Mapping,
    geometry: Geometry,
    instance: u64,
    session: u64,
}

impl SessionMap {
    /// Maps a segment just made by [`crate::segment::create`], and writes its
    /// header. The layout version comes last: until then nobody can open it.
    pub fn initialise(
        file: &File,
        path: &Path,
        geometry: Geometry,
        instance: u64,
        session: u64,
    ) -> Result<SessionMap, SegmentError> {
        let map = SessionMap::adopt(file, path, geometry, instance, session)?;
        let preamble = &map.header().preamble;
        preamble.magic.store(MAGIC, Ordering::Relaxed);
        preamble
            .header_bytes
            .store(HEADER_BYTES as u32, Ordering::Relaxed);
        preamble.instance.store(instance, Ordering::Relaxed);
        preamble.session.store(session, Ordering::Relaxed);
        preamble
            .submission_bytes
            .store(geometry.submission_bytes, Ordering::Relaxed);
        preamble
            .delivery_bytes
            .store(geometry.delivery_bytes, Ordering::Relaxed);
        preamble
            .answer_bytes
            .store(geometry.answer_bytes, Ordering::Relaxed);
        preamble
            .attachments_max
            .store(ATTACHMENTS_MAX as u32, Ordering::Relaxed);
        map.header()
            .confirmations
            .final_position
            .store(NOT_FINAL, Ordering::Relaxed);
        // Release: pairs with the Acquire in `open`; who sees the version sees
        // the rest of the header.
        preamble
            .layout_version
            .store(LAYOUT_VERSION, Ordering::Release);
        Ok(map)
    }

    /// Maps a segment that another process made, and checks its header. Tells
    /// unfinished, of another version, and corrupt apart.
    pub fn open(file: &File, path: &Path) -> Result<SessionMap, SegmentError> {
        // The maker died, or is, between making the file and reserving memory.
        let unreserved = file.metadata().is_ok_and(|file| file.len() == 0);
        if unreserved {
            return Err(SegmentError::Initialising);
        }
        let header = Mapping::new(file, path, HEADER_BYTES)?;
        let (geometry, instance, session) = Self::read_preamble(header_of(&header))?;
        drop(header);
        let mapping = Mapping::new(file, path, geometry.segment_bytes())?;
        Ok(SessionMap {
            mapping,
            geometry,
            instance,
            session,
        })
    }

    /// Maps a segment whose geometry the caller knows for sure, and believes
    /// nothing that the file says: its client could write there, and could cut it
    /// short ([`SessionMap::is_damaged`]).
    pub fn adopt(
        file: &File,
        path: &Path,
        geometry: Geometry,
        instance: u64,
        session: u64,
    ) -> Result<SessionMap, SegmentError> {
        if !geometry.is_valid() {
            return Err(SegmentError::Corrupt("ring sizes out of range"));
        }
        let mapping = Mapping::new(file, path, geometry.segment_bytes())?.watched();
        Ok(SessionMap {
            mapping,
            geometry,
            instance,
            session,
        })
    }

    fn read_preamble(header: &SessionHeader) -> Result<(Geometry, u64, u64), SegmentError> {
        let preamble = &header.preamble;
        // Acquire: pairs with the Release in `initialise`.
        match preamble.layout_version.load(Ordering::Acquire) {
            0 => return Err(SegmentError::Initialising),
            LAYOUT_VERSION => {}
            found => {
                return Err(SegmentError::Version {
                    found,
                    known: LAYOUT_VERSION,
                });
            }
        }
        let geometry = Geometry {
            submission_bytes: preamble.submission_bytes.load(Ordering::Relaxed),
            delivery_bytes: preamble.delivery_bytes.load(Ordering::Relaxed),
            answer_bytes: preamble.answer_bytes.load(Ordering::Relaxed),
        };
        if preamble.magic.load(Ordering::Relaxed) != MAGIC {
            return Err(SegmentError::Corrupt("wrong magic number"));
        }
        if preamble.header_bytes.load(Ordering::Relaxed) != HEADER_BYTES as u32
            || preamble.attachments_max.load(Ordering::Relaxed) != ATTACHMENTS_MAX as u32
            || !geometry.is_valid()
        {
            return Err(SegmentError::Corrupt("impossible geometry"));
        }
        Ok((
            geometry,
            preamble.instance.load(Ordering::Relaxed),
            preamble.session.load(Ordering::Relaxed),
        ))
    }

    /// The header.
    #[inline]
    pub fn header(&self) -> &SessionHeader {
        header_of(&self.mapping)
    }

    /// Whether the client has cut the segment short: of the maker's and the
    /// adopter's mapping.
    pub fn is_damaged(&self) -> bool {
        self.mapping.is_damaged()
    }

    /// The sizes of the rings, as checked when the segment was opened.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The broker's instance, as read when the segment was opened.
    pub fn instance(&self) -> u64 {
        self.instance
    }

    /// The session's number, as read when the segment was opened.
    pub fn session(&self) -> u64 {
        self.session
    }

    /// The submission ring.
    #[inline]
    pub fn submission(&self) -> Ring<'_> {
        Ring {
            tail: &self.header().submission_tail.word,
            head: &self.header().submission_head.word,
            area: self.area(HEADER_BYTES, self.geometry.submission_bytes),
        }
    }

    /// The delivery ring.
    #[inline]
    pub fn delivery(&self) -> Ring<'_> {
        let start = HEADER_BYTES + self.geometry.submission_bytes as usize;
        Ring {
            tail: &self.header().delivery_tail.word,
            head: &self.header().delivery_head.word,
            area: self.area(start, self.geometry.delivery_bytes),
        }
    }

    /// The answer ring.
    #[inline]
    pub fn answers(&self) -> Ring<'_> {
        let start = HEADER_BYTES
            + self.geometry.submission_bytes as usize
            + self.geometry.delivery_bytes as usize;
        Ring {
            tail: &self.header().answer_tail.word,
            head: &self.header().answer_head.word,
            area: self.area(start, self.geometry.answer_bytes),
        }
    }

    #[inline]
    fn area(&self, start: usize, len: u32) -> Area<'_> {
        // SAFETY: `geometry` was checked and the mapping made with its
        // `segment_bytes`, so the three areas lie within it; all starts are
        // multiples of a page.
        unsafe { Area::new(self.mapping.start().add(start), len as usize) }
    }

    /// The broker's wait word.
    #[inline]
    pub fn broker_wait(&self) -> WaitWord<'_> {
        WaitWord(&self.header().broker_wait.word.word)
    }

    /// The client's wait word.
    #[inline]
    pub fn client_wait(&self) -> WaitWord<'_> {
        WaitWord(&self.header().client_wait.word.word)
    }

    /// The word of an attachment, if the index is one.
    #[inline]
    pub fn attachment(&self, index: u32) -> Option<&AtomicU32> {
        self.header().attachments.get(index as usize)
    }
}

fn header_of(mapping: &Mapping) -> &SessionHeader {
    // SAFETY: every mapping that reaches here has at least HEADER_BYTES and
    // begins at a page; the header is made of atomics alone, for which any
    // bytes are valid and foreign writes are allowed.
    unsafe { &*mapping.start().cast::<SessionHeader>() }
}
