//! The errors of Ringmain: one set, the same words in Rust, in the control
//! protocol, and in the languages above.

use crate::message::MessageId;
use ringmain_ring::segment::SegmentError;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What went wrong. The text says what to do about it, where something can be
/// done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No broker listens on the socket.
    #[error("no broker is running at {socket}: start one with `ringmain serve`")]
    NotRunning {
        /// The socket tried.
        socket: PathBuf,
    },
    /// The queue does not exist, or was deleted.
    #[error("no such queue: {0}")]
    NoSuchQueue(String),
    /// A queue of this name exists with other settings.
    #[error("the queue exists already: {0}")]
    QueueExists(String),
    /// The user may not do this.
    #[error("not permitted: {0}")]
    NotPermitted(String),
    /// There is no room: a ring, a limit, or the disk.
    #[error("full: {0}")]
    Full(String),
    /// The message is longer than the queue or the ring allows.
    #[error(
        "the message has {bytes} bytes, at most {limit} are allowed: see `ringmain queue create --max-message-size`"
    )]
    TooLarge {
        /// Length of the payload.
        bytes: u64,
        /// Longest allowed payload.
        limit: u64,
    },
    /// The session, or the handle, is closed.
    #[error("closed: {0}")]
    Closed(String),
    /// The time given was over first.
    #[error("timed out")]
    TimedOut,
    /// The lease had ended when its ack, nack or extend arrived: the message
    /// may be delivered again.
    #[error(
        "lease lost: {count} message(s) were answered after their lease had ended, and may be delivered again"
    )]
    LeaseLost {
        /// How many leases, since this was last reported.
        count: u64,
    },
    /// The broker refused sends that had been accepted: they are not in the
    /// queue.
    #[error("{} message(s) were refused; the first: {}", .0.len(), .0.first().map_or_else(String::new, |r| r.code.to_string()))]
    Refused(Vec<Refusal>),
    /// Client and broker are of versions that do not understand each other.
    #[error("version mismatch: {0}")]
    VersionMismatch(String),
    /// Bytes in shared memory, on the socket or on disk are not what they must
    /// be.
    #[error("corrupt: {0}")]
    Corrupt(String),
    /// The broker can't write to its store.
    #[error("the store is unavailable: {0}")]
    StoreUnavailable(String),
    /// The handle was made before this process was forked.
    #[error("this handle belongs to the parent process: connect again after fork")]
    Forked,
    /// A name, size or setting is out of its range.
    #[error("invalid: {0}")]
    Invalid(String),
    /// A call of the system failed.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// What the system said.
        source: std::io::Error,
    },
}

/// A send that the broker refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The message.
    pub id: MessageId,
    /// Why.
    pub code: ErrorCode,
}

/// The kinds of [`Error`] by the names that the control protocol uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u16)]
#[allow(missing_docs, reason = "the variants of Error say what they mean")]
pub enum ErrorCode {
    NotRunning = 1,
    NoSuchQueue = 2,
    QueueExists = 3,
    NotPermitted = 4,
    Full = 5,
    TooLarge = 6,
    Closed = 7,
    TimedOut = 8,
    LeaseLost = 9,
    Refused = 10,
    VersionMismatch = 11,
    Corrupt = 12,
    StoreUnavailable = 13,
    Forked = 14,
    Invalid = 15,
    Io = 16,
}

impl ErrorCode {
    /// All codes, by number from 1.
    pub const ALL: [ErrorCode; 16] = [
        ErrorCode::NotRunning,
        ErrorCode::NoSuchQueue,
        ErrorCode::QueueExists,
        ErrorCode::NotPermitted,
        ErrorCode::Full,
        ErrorCode::TooLarge,
        ErrorCode::Closed,
        ErrorCode::TimedOut,
        ErrorCode::LeaseLost,
        ErrorCode::Refused,
        ErrorCode::VersionMismatch,
        ErrorCode::Corrupt,
        ErrorCode::StoreUnavailable,
        ErrorCode::Forked,
        ErrorCode::Invalid,
        ErrorCode::Io,
    ];

    /// The code with this number.
    pub fn from_number(number: u16) -> Option<ErrorCode> {
        Self::ALL.get(usize::from(number).checked_sub(1)?).copied()
    }

    /// The code's name in the control protocol.
    pub fn name(self) -> &'static str {
        match self {
            ErrorCode::NotRunning => "not_running",
            ErrorCode::NoSuchQueue => "no_such_queue",
            ErrorCode::QueueExists => "queue_exists",
            ErrorCode::NotPermitted => "not_permitted",
            ErrorCode::Full => "full",
            ErrorCode::TooLarge => "too_large",
            ErrorCode::Closed => "closed",
            ErrorCode::TimedOut => "timed_out",
            ErrorCode::LeaseLost => "lease_lost",
            ErrorCode::Refused => "refused",
            ErrorCode::VersionMismatch => "version_mismatch",
            ErrorCode::Corrupt => "corrupt",
            ErrorCode::StoreUnavailable => "store_unavailable",
            ErrorCode::Forked => "forked",
            ErrorCode::Invalid => "invalid",
            ErrorCode::Io => "io",
        }
    }
}

impl std::fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl Error {
    /// The kind of this error.
    pub fn code(&self) -> ErrorCode {
        match self {
            Error::NotRunning { .. } => ErrorCode::NotRunning,
            Error::NoSuchQueue(_) => ErrorCode::NoSuchQueue,
            Error::QueueExists(_) => ErrorCode::QueueExists,
            Error::NotPermitted(_) => ErrorCode::NotPermitted,
            Error::Full(_) => ErrorCode::Full,
            Error::TooLarge { .. } => ErrorCode::TooLarge,
            Error::Closed(_) => ErrorCode::Closed,
            Error::TimedOut => ErrorCode::TimedOut,
            Error::LeaseLost { .. } => ErrorCode::LeaseLost,
            Error::Refused(_) => ErrorCode::Refused,
            Error::VersionMismatch(_) => ErrorCode::VersionMismatch,
            Error::Corrupt(_) => ErrorCode::Corrupt,
            Error::StoreUnavailable(_) => ErrorCode::StoreUnavailable,
            Error::Forked => ErrorCode::Forked,
            Error::Invalid(_) => ErrorCode::Invalid,
            Error::Io { .. } => ErrorCode::Io,
        }
    }

    pub(crate) fn io(what: impl Into<String>, source: impl Into<std::io::Error>) -> Error {
        Error::Io {
            what: what.into(),
            source: source.into(),
        }
    }
}

impl From<SegmentError> for Error {
    fn from(error: SegmentError) -> Error {
        match error {
            SegmentError::NoSpace { .. } => Error::Full(error.to_string()),
            SegmentError::Version { .. } => Error::VersionMismatch(error.to_string()),
            SegmentError::Initialising | SegmentError::Corrupt(_) => {
                Error::Corrupt(error.to_string())
            }
            SegmentError::Io { what, path, source } => Error::Io {
                what: format!("{what} {}", path.display()),
                source,
            },
        }
    }
}

/// Result of Ringmain's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;
