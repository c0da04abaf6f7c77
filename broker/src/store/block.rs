//! Blocks: many messages stored as one value.
//!
//! A block is immutable. What happens to its messages later (settled, attempted
//! again) stands in a row beside it, so that the block is written once and
//! deleted once.

use bytes::Bytes;

/// At most this many messages are packed in one block.
pub const MESSAGES_MAX: u32 = 1024;
/// A block takes no further message once its payloads have reached this many
/// bytes. A longer message has a block of its own.
pub const BYTES_TARGET: usize = 128 * 1024;

/// What is stored of a message beside its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageHead {
    /// Number of the session that sent it.
    pub session: u64,
    /// Position of its record in that session's submission ring.
    pub position: u64,
    /// When it was sent, in milliseconds since the Unix epoch.
    pub sent_at_ms: u64,
    /// How often it had been attempted when the block was written.
    pub attempts: u16,
}
