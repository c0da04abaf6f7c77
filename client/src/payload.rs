//! The bytes of a received message: short ones inside of it, long ones on the
//! heap, those of chunks where they are.

use bytes::Bytes;
use ringmain_ring::payload::ReadChunk;
use ringmain_ring::view::Area;

/// Longest payload that takes no allocation. With it a [`Payload`] has 104
/// bytes.
const SHORT_BYTES_MAX: usize = 102;

/// See the module.
pub(crate) enum Payload {
    /// So many of these bytes.
    Short(u8, [u8; SHORT_BYTES_MAX]),
    /// Longer.
    Long(Bytes),
    /// In shared memory, until the lease is answered.
    Chunk(ReadChunk),
}

impl Payload {
    /// Copies the payload out of a ring, of which it must be within.
    #[inline]
    pub(crate) fn copied(area: Area<'_>, offset: usize, len: usize) -> Payload {
        if len <= SHORT_BYTES_MAX {
            let mut bytes = [0; SHORT_BYTES_MAX];
            area.copy_out(offset, &mut bytes[..len]);
            return Payload::Short(len as u8, bytes);
        }
        let mut bytes = Vec::new();
        bytes.reserve_exact(len);
        area.append_to(offset, len, &mut bytes);
        Payload::Long(Bytes::from(bytes))
    }

    pub(crate) fn empty() -> Payload {
        Payload::Short(0, [0; SHORT_BYTES_MAX])
    }

    #[inline]
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Payload::Short(len, bytes) => &bytes[..usize::from(*len)],
            Payload::Long(bytes) => bytes,
            Payload::Chunk(bytes) => bytes,
        }
    }
}

const _: () = assert!(size_of::<Payload>() == 104);
