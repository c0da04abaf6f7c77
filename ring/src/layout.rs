//! The layout of a session segment, pinned.
//!
//! ```text
//!     0  preamble: magic, layout version, instance, session, geometry
//!   128  submission tail      client writes
//!   256  submission head      broker writes
//!   384  delivery tail        broker writes
//!   512  delivery head        client writes
//!   640  answer tail          broker writes
//!   768  answer head          client writes
//!   896  confirmations        broker writes: stored, synced, final position
//!  1024  broker's wait word   both write
//!  1152  client's wait word   both write
//!  1280  reserved, zero
//!  2048  attachment words     broker writes; 512 of 4 bytes
//!  4096  submission ring | delivery ring | answer ring
//! ```
//!
//! All numbers are in the machine's byte order: a segment never leaves it.
//! Cursors lie 128 bytes apart, since processors fetch lines of 64 bytes in
//! pairs. Padding is made of atomics too: another process may write it while a
//! reference to the header lives, which plain bytes would not allow.
//!
//! **To change anything here:** raise [`LAYOUT_VERSION`], change the literal
//! offsets in the assertions below and the golden bytes in `tests/layout.rs`,
//! and say in the change log that brokers must be stopped with all rings drained
//! before the upgrade. A broker refuses segments of another version, and so does
//! a client.

use crate::atomic::{AtomicU32, AtomicU64};

/// First eight bytes of a session segment: "RINGMAIN" in memory order.
pub const MAGIC: u64 = u64::from_ne_bytes(*b"RINGMAIN");
/// Version of everything in this file, of payload segments, and of the records in
/// the rings.
pub const LAYOUT_VERSION: u32 = 2;
/// Where the rings begin.
pub const HEADER_BYTES: usize = 4096;
/// How many attachment words a header has.
pub const ATTACHMENTS_MAX: usize = 512;
/// Smallest ring, in bytes.
pub const RING_BYTES_MIN: u32 = 4096;
/// Largest ring, in bytes.
pub const RING_BYTES_MAX: u32 = 1 << 30;

/// The sizes of a session's three rings, in bytes; powers of two from
/// [`RING_BYTES_MIN`] to [`RING_BYTES_MAX`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// The client's ring to the broker.
    pub submission_bytes: u32,
    /// The broker's ring of messages to the client.
    pub delivery_bytes: u32,
    /// The broker's ring of answers to the client.
    pub answer_bytes: u32,
}

impl Default for Geometry {
    fn default() -> Geometry {
        Geometry {
            submission_bytes: 128 * 1024,
            delivery_bytes: 64 * 1024,
            answer_bytes: 16 * 1024,
        }
    }
}

impl Geometry {
    /// Whether each ring has a size that is allowed.
    pub fn is_valid(&self) -> bool {
        [
            self.submission_bytes,
            self.delivery_bytes,
            self.answer_bytes,
        ]
        .iter()
        .all(|bytes| bytes.is_power_of_two() && (RING_BYTES_MIN..=RING_BYTES_MAX).contains(bytes))
    }

    /// Length of a session segment with these rings, in bytes.
    pub fn segment_bytes(&self) -> usize {
        HEADER_BYTES
            + self.submission_bytes as usize
            + self.delivery_bytes as usize
            + self.answer_bytes as usize
    }
}

/// Pads a cursor to a pair of cache lines of its own. (crossbeam's
/// `CachePadded` differs between processors, which a shared layout must not.)
#[repr(C)]
pub struct Line<T> {
    /// What lies on the line.
    pub word: T,
    _pad: [AtomicU64; 15],
}

/// What identifies a segment. Written once, before it is shared.
#[repr(C)]
pub struct Preamble {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// [`LAYOUT_VERSION`]; stored last with Release, so that a segment whose
    /// maker died half-way is told from a finished one.
    pub layout_version: AtomicU32,
    /// [`HEADER_BYTES`].
    pub header_bytes: AtomicU32,
    /// Number of the broker's instance, made at random with its data folder.
    pub instance: AtomicU64,
    /// The session's number.
    pub session: AtomicU64,
    /// Size of the submission ring in bytes.
    pub submission_bytes: AtomicU32,
    /// Size of the delivery ring in bytes.
    pub delivery_bytes: AtomicU32,
    /// Size of the answer ring in bytes.
    pub answer_bytes: AtomicU32,
    /// [`ATTACHMENTS_MAX`].
    pub attachments_max: AtomicU32,
    _reserved: [AtomicU64; 10],
}

/// What the broker has to say of submissions: positions in the submission ring.
#[repr(C)]
pub struct Confirmations {
    /// All submissions before this position are stored.
    pub stored: AtomicU64,
    /// All submissions before this position are synced.
    pub synced: AtomicU64,
    /// After the session was closed by the broker: what was published before
    /// this position was taken in, and nothing else. [`NOT_FINAL`] until then.
    pub final_position: AtomicU64,
    _pad: [AtomicU64; 13],
}

/// Value of [`Confirmations::final_position`] while the session is open.
pub const NOT_FINAL: u64 = u64::MAX;

/// The head of a session segment.
#[repr(C)]
pub struct SessionHeader {
    /// Who this is.
    pub preamble: Preamble,
    /// Up to where the client has published submissions.
    pub submission_tail: Line<AtomicU64>,
    /// Up to where the broker has freed the submission ring.
    pub submission_head: Line<AtomicU64>,
    /// Up to where the broker has published deliveries.
    pub delivery_tail: Line<AtomicU64>,
    /// Up to where the client has taken deliveries.
    pub delivery_head: Line<AtomicU64>,
    /// Up to where the broker has published answers.
    pub answer_tail: Line<AtomicU64>,
    /// Up to where the client has read answers.
    pub answer_head: Line<AtomicU64>,
    /// What is stored and synced.
    pub confirmations: Confirmations,
    /// What the broker waits for, and the state of the session: see
    /// [`crate::wait`].
    pub broker_wait: Line<AtomicU32Pair>,
    /// What the client waits for: see [`crate::wait`].
    pub client_wait: Line<AtomicU32Pair>,
    _reserved: [AtomicU64; 96],
    /// The state of each queue that the session is attached to, by attachment
    /// index: bits of [`attachment`].
    pub attachments: [AtomicU32; ATTACHMENTS_MAX],
}

/// A futex word and its unused neighbour, so that every [`Line`] holds 8 bytes.
#[repr(C)]
pub struct AtomicU32Pair {
    /// The word.
    pub word: AtomicU32,
    _unused: AtomicU32,
}

/// Bits of an attachment word. All clear: send.
pub mod attachment {
    /// The queue has reached a limit; wait or give up.
    pub const FULL: u32 = 1;
    /// Sending is paused by an administrator.
    pub const PAUSED: u32 = 2;
    /// The queue does not exist any more.
    pub const DELETED: u32 = 4;
}

// loom's atomics have another size, and are never mapped.
#[cfg(not(loom))]
const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(offset_of!(Preamble, magic) == 0);
    assert!(offset_of!(Preamble, layout_version) == 8);
    assert!(offset_of!(Preamble, header_bytes) == 12);
    assert!(offset_of!(Preamble, instance) == 16);
    assert!(offset_of!(Preamble, session) == 24);
    assert!(offset_of!(Preamble, submission_bytes) == 32);
    assert!(offset_of!(Preamble, delivery_bytes) == 36);
    assert!(offset_of!(Preamble, answer_bytes) == 40);
    assert!(offset_of!(Preamble, attachments_max) == 44);
    assert!(size_of::<Preamble>() == 128);
    assert!(size_of::<Line<AtomicU64>>() == 128);
    assert!(offset_of!(SessionHeader, submission_tail) == 128);
    assert!(offset_of!(SessionHeader, submission_head) == 256);
    assert!(offset_of!(SessionHeader, delivery_tail) == 384);
    assert!(offset_of!(SessionHeader, delivery_head) == 512);
    assert!(offset_of!(SessionHeader, answer_tail) == 640);
    assert!(offset_of!(SessionHeader, answer_head) == 768);
    assert!(offset_of!(SessionHeader, confirmations) == 896);
    assert!(offset_of!(Confirmations, synced) == 8);
    assert!(offset_of!(Confirmations, final_position) == 16);
    assert!(offset_of!(SessionHeader, broker_wait) == 1024);
    assert!(offset_of!(SessionHeader, client_wait) == 1152);
    assert!(offset_of!(SessionHeader, attachments) == 2048);
    assert!(size_of::<SessionHeader>() == HEADER_BYTES);
};
