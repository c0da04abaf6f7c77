//! Payload segments that a consumer reads from: its own inbound ones, and the
//! outbound ones of sessions that sent to it.

use crate::control::{Notice, PayloadSegment};
use crate::error::{Error, Result};
use crate::record::Chunk;
use ringmain_ring::payload::{PayloadMap, ReadChunk};
use std::collections::HashMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Segments {
    inbound: HashMap<u32, Arc<PayloadMap>>,
    /// By session and number.
    outbound: HashMap<(u64, u32), Arc<PayloadMap>>,
}

/// A chunk that a delivery names.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Named {
    /// Of the session with this number.
    Outbound(u64, Chunk),
    /// Of our own.
    Inbound(Chunk),
}

impl Segments {
    /// Takes in what the broker has told.
    pub(crate) fn note(&mut self, notice: Notice, descriptor: Option<OwnedFd>) -> Result<()> {
        let map = |segment: PayloadSegment| {
            let missing = || Error::Corrupt("a payload segment without a descriptor".to_owned());
            let file = File::from(descriptor.ok_or_else(missing)?);
            let path = Path::new("a payload segment");
            Ok::<_, Error>(Arc::new(PayloadMap::read_only(&file, path, segment.units)?))
        };
        match notice {
            Notice::Inbound(segment) => {
                self.inbound.insert(segment.segment, map(segment)?);
            }
            Notice::Outbound { session, segment } => {
                self.outbound
                    .insert((session, segment.segment), map(segment)?);
            }
            // Chunks that are being read keep their mapping.
            Notice::Gone { session } => self.outbound.retain(|&(owner, _), _| owner != session),
        }
        Ok(())
    }

    /// The bytes of a chunk. `None`: its segment is not known yet.
    pub(crate) fn find(&self, named: Named) -> Result<Option<ReadChunk>> {
        let (map, chunk) = match named {
            Named::Outbound(session, chunk) => {
                (self.outbound.get(&(session, chunk.segment)), chunk)
            }
            Named::Inbound(chunk) => (self.inbound.get(&chunk.segment), chunk),
        };
        let Some(map) = map else { return Ok(None) };
        match map.read(chunk.unit, chunk.len as usize) {
            Some(bytes) => Ok(Some(bytes)),
            None => Err(Error::Corrupt("a chunk outside of its segment".to_owned())),
        }
    }
}
