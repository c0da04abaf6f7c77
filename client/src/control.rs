//! The control protocol: one JSON object a line over a unix stream socket.
//! Client and broker share this file.
//!
//! A connection may carry administration, or one session, or both. The client
//! writes a [`Request`], the broker answers it with a [`Reply`], in order.
//! Descriptors travel beside the line that announces them (`SCM_RIGHTS`).
//!
//! ```text
//! {"op":"hello","protocol":1}
//! {"ok":{"version":"0.1.0","protocol":1,"layout":1,"instance":"5f…","pid":417}}
//! {"op":"queue_info","name":"job"}
//! {"error":{"code":"no_such_queue","message":"no such queue: job"}}
//! ```
//!
//! A session lives as long as its connection: when that ends while the broker
//! lives, the broker takes in what the client had published and ends the
//! session. When it was the broker that ended, the client connects anew and
//! says [`Request::Resume`].

use crate::error::{Error, ErrorCode};
use crate::message::MessageId;
use crate::settings::{Confirm, QueueSettings};
use ringmain_ring::layout::Geometry;
use serde::{Deserialize, Serialize};

/// Version of this protocol; in [`Hello`].
pub const PROTOCOL: u32 = 1;
/// Longest line either side takes, in bytes, the newline included.
pub const LINE_BYTES_MAX: usize = 1 << 20;
/// Longest queue name in bytes.
pub const NAME_BYTES_MAX: usize = 200;
/// Largest window of a consumer, in messages.
pub const WINDOW_MAX: u32 = 16_384;
/// Largest value of [`QueueSettings::max_attempts`].
pub const ATTEMPTS_MAX: u16 = 10_000;
/// Most messages that one [`Request::DeadLetters`] lists.
pub const DEAD_LETTERS_MAX: u32 = 1000;
/// Window of a consumer that does not ask for another.
pub const WINDOW_DEFAULT: u32 = 256;

/// What a client asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// First line of every connection. Answered by [`Hello`].
    Hello {
        /// [`PROTOCOL`] of the client.
        protocol: u32,
    },
    /// Makes a session for this connection. Answered by [`Opened`], with two
    /// descriptors: the segment, and the doorbell (an eventfd).
    Open {
        /// [`ringmain_ring::layout::LAYOUT_VERSION`] of the client.
        layout: u32,
        /// Sizes of the rings.
        rings: Rings,
    },
    /// The session's segment is mapped: from now on it outlives the broker.
    Ready,
    /// Takes a session up again after the broker was restarted. Answered by
    /// [`Opened`], with one descriptor: the new doorbell.
    Resume {
        /// The session's number.
        session: u64,
    },
    /// Makes an outbound payload segment for the session, with room for a payload
    /// of so many bytes. Answered by [`PayloadSegment`], with one descriptor;
    /// [`ErrorCode::Full`] if a limit or the shared memory does not allow it.
    Outbound {
        /// The payload's length.
        bytes: u64,
    },
    /// Attaches the session to a queue. Answered by [`Attached`]. Attaching
    /// again for the same purpose gives the same index.
    Attach {
        /// The queue's name.
        queue: String,
        /// What for.
        purpose: Purpose,
        /// Most live leases at a time, to consume: 1 to [`WINDOW_MAX`].
        window: u32,
    },
    /// Makes a queue. Answered by `{}` at its commit; also if the queue exists
    /// with the same settings.
    QueueCreate {
        /// Its name; see [`check_queue_name`].
        name: String,
        /// Its settings.
        #[serde(default)]
        settings: QueueSettings,
    },
    /// Deletes a queue with all its messages. Answered by `{}` at its commit.
    QueueDelete {
        /// Its name.
        name: String,
    },
    /// Every queue, by name. Answered by a list of [`QueueInfo`].
    QueueList,
    /// One queue. Answered by [`QueueInfo`].
    QueueInfo {
        /// Its name.
        name: String,
    },
    /// What the broker has done. Answered by [`Stats`].
    Stats,
    /// Messages of a queue with what is known of their death, oldest first,
    /// without taking them. Answered by a list of [`DeadMessage`].
    DeadLetters {
        /// The queue.
        queue: String,
        /// From this position of the queue on.
        from: u64,
        /// Most messages to list: up to [`DEAD_LETTERS_MAX`].
        limit: u32,
    },
    /// Moves messages of a dead-letter queue back to where they came from, oldest
    /// first. Answered by [`Redriven`] when the moves are committed.
    Redrive {
        /// The dead-letter queue.
        queue: String,
        /// Where to, instead of where each came from.
        to: Option<String>,
        /// Most messages to move; `None`: all that are there now.
        limit: Option<u64>,
    },
    /// Ends the broker. Answered by `{}` when all is committed and synced; then
    /// the broker ends.
    Stop {
        /// Also take in all rings, and end all sessions: nothing is left in shared
        /// memory.
        drain: bool,
    },
}

/// Why a message is in a dead-letter queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum DeadReason {
    /// It was attempted as often as its queue allows.
    MaxAttempts = 1,
    /// Its consumer said that it can't be processed.
    Rejected = 2,
}

/// What is known of a message's death.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeadLetter {
    /// Why.
    pub reason: DeadReason,
    /// The queue that it was in.
    pub source: String,
    /// When it died, in milliseconds since the Unix epoch.
    pub died_at_ms: u64,
    /// How often it had been attempted.
    pub attempts: u16,
}

/// A message in a dead-letter queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeadMessage {
    /// Which message.
    pub id: MessageId,
    /// Its position in the dead-letter queue.
    pub position: u64,
    /// Length of its payload in bytes.
    pub bytes: u64,
    /// When it was sent, in milliseconds since the Unix epoch.
    pub sent_at_ms: u64,
    /// Its death; `None` if it was sent to this queue directly.
    pub death: Option<DeadLetter>,
}

/// Answer to [`Request::Redrive`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Redriven {
    /// How many messages were moved.
    pub moved: u64,
}

/// What an attachment is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// To send to the queue.
    Produce,
    /// To receive from it.
    Consume,
}

/// Sizes of a session's rings in bytes: powers of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields of Geometry say what they mean")]
pub struct Rings {
    pub submission_bytes: u32,
    pub delivery_bytes: u32,
    pub answer_bytes: u32,
}

impl From<Geometry> for Rings {
    fn from(geometry: Geometry) -> Rings {
        Rings {
            submission_bytes: geometry.submission_bytes,
            delivery_bytes: geometry.delivery_bytes,
            answer_bytes: geometry.answer_bytes,
        }
    }
}

impl From<Rings> for Geometry {
    fn from(rings: Rings) -> Geometry {
        Geometry {
            submission_bytes: rings.submission_bytes,
            delivery_bytes: rings.delivery_bytes,
            answer_bytes: rings.answer_bytes,
        }
    }
}

/// What the broker answers: the value that belongs to the request, or an error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// It was done. What the value is depends on the request.
    Ok(serde_json::Value),
    /// It was not done.
    Error(WireError),
    /// No answer: the broker tells something of its own accord, between others.
    Notice(Notice),
}

/// What the broker tells the client of a session unasked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Notice {
    /// Deliveries may name this inbound segment of the session from now on. One
    /// descriptor comes along, to read.
    Inbound(PayloadSegment),
    /// Deliveries may name this outbound segment of another session, which sent
    /// them. One descriptor comes along, to read.
    Outbound {
        /// The session that sends.
        session: u64,
        /// The segment.
        segment: PayloadSegment,
    },
    /// That session has ended, and none of its segments will be named again.
    Gone {
        /// The session that sent.
        session: u64,
    },
}

/// A payload segment, and answer to [`Request::Outbound`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PayloadSegment {
    /// Its number; from 0 for each session and direction.
    pub segment: u32,
    /// Its size in units of [`ringmain_ring::payload::UNIT_BYTES`].
    pub units: u32,
}

/// An error on the wire.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireError {
    /// Its kind.
    pub code: ErrorCode,
    /// Its text, for people.
    pub message: String,
}

impl From<&Error> for WireError {
    fn from(error: &Error) -> WireError {
        // The text of these three is made from the inner part when the client
        // turns the line into an error again, so only that part travels.
        let message = match error {
            Error::NoSuchQueue(inner)
            | Error::QueueExists(inner)
            | Error::NotPermitted(inner)
            | Error::Full(inner)
            | Error::Closed(inner)
            | Error::VersionMismatch(inner)
            | Error::Corrupt(inner)
            | Error::StoreUnavailable(inner)
            | Error::Invalid(inner) => inner.clone(),
            other => other.to_string(),
        };
        WireError {
            code: error.code(),
            message,
        }
    }
}

impl From<WireError> for Error {
    fn from(wire: WireError) -> Error {
        let WireError { code, message } = wire;
        match code {
            ErrorCode::NoSuchQueue => Error::NoSuchQueue(message),
            ErrorCode::QueueExists => Error::QueueExists(message),
            ErrorCode::NotPermitted => Error::NotPermitted(message),
            ErrorCode::Full => Error::Full(message),
            ErrorCode::Closed => Error::Closed(message),
            ErrorCode::VersionMismatch => Error::VersionMismatch(message),
            ErrorCode::Corrupt => Error::Corrupt(message),
            ErrorCode::StoreUnavailable => Error::StoreUnavailable(message),
            ErrorCode::TimedOut => Error::TimedOut,
            ErrorCode::Forked => Error::Forked,
            ErrorCode::Invalid => Error::Invalid(message),
            ErrorCode::NotRunning
            | ErrorCode::TooLarge
            | ErrorCode::LeaseLost
            | ErrorCode::Refused
            | ErrorCode::Io => Error::Io {
                what: "the broker answered".to_owned(),
                source: std::io::Error::other(message),
            },
        }
    }
}

/// Answer to [`Request::Hello`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The broker's version.
    pub version: String,
    /// Its [`PROTOCOL`].
    pub protocol: u32,
    /// Its layout of shared memory.
    pub layout: u32,
    /// Its instance, in hexadecimal.
    pub instance: String,
    /// Its process.
    pub pid: u32,
}

/// Answer to [`Request::Open`] and [`Request::Resume`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opened {
    /// The session's number.
    pub session: u64,
}

/// Answer to [`Request::Attach`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attached {
    /// Index of the attachment, by which sends name the queue.
    pub index: u32,
    /// The queue's settings.
    pub settings: QueueSettings,
}

/// What can be known of a queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueInfo {
    /// Its name.
    pub name: String,
    /// When it was created, in milliseconds since the Unix epoch.
    pub created_ms: u64,
    /// Messages that are not settled: ready and leased ones.
    pub messages: u64,
    /// Messages under a lease.
    pub leased: u64,
    /// Sessions attached to send.
    pub producers: u32,
    /// Sessions attached to receive.
    pub consumers: u32,
    /// Its settings.
    pub settings: QueueSettings,
}

/// What the broker has done since it was started, and what it holds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Milliseconds since the broker was in service.
    pub uptime_ms: u64,
    /// Open sessions.
    pub sessions: u64,
    /// Queues.
    pub queues: u64,
    /// Messages that are not settled, in all queues.
    pub messages: u64,
    /// Live leases.
    pub leased: u64,
    /// Sends taken in.
    pub sends: u64,
    /// Sends refused.
    pub refused: u64,
    /// Deliveries made.
    pub deliveries: u64,
    /// Deliveries of messages that were leased before.
    pub redeliveries: u64,
    /// Acks.
    pub acks: u64,
    /// Leases that ended by nack, time or their holder's end.
    pub returned: u64,
    /// Acks, nacks and extends that came too late.
    pub leases_lost: u64,
    /// Messages written to the store.
    pub stored: u64,
    /// Messages moved to a dead-letter queue.
    pub dead: u64,
    /// Number of the last committed round.
    pub round: u64,
    /// Number of the last synced round.
    pub synced_round: u64,
    /// Whether the disk counts as full: sends wait, acks go on.
    pub disk_full: bool,
}

/// Checks a queue's name: 1 to [`NAME_BYTES_MAX`] bytes of UTF-8 without control
/// characters, and without white space at either end.
pub fn check_queue_name(name: &str) -> Result<(), Error> {
    let wrong = if name.is_empty() {
        "is empty"
    } else if name.len() > NAME_BYTES_MAX {
        "is longer than 200 bytes"
    } else if name.chars().any(char::is_control) {
        "has a control character"
    } else if name.trim() != name {
        "begins or ends with white space"
    } else {
        return Ok(());
    };
    // Escaped and cut: the name goes to terminals and logs.
    let shown: String = name.chars().take(64).flat_map(char::escape_debug).collect();
    Err(Error::Invalid(format!(
        "the queue name \"{shown}\" {wrong}"
    )))
}

/// The queue that takes the dead messages of the queue of this name.
pub fn dead_letter_name(queue: &str, settings: &QueueSettings) -> String {
    const SUFFIX: &str = ".dead";
    if let Some(name) = &settings.dead_letter_queue {
        return name.clone();
    }
    // A name that leaves no room is cut. What is left is shorter than it, so that
    // no queue is its own dead-letter queue.
    let mut end = queue.len();
    if end + SUFFIX.len() > NAME_BYTES_MAX {
        end = NAME_BYTES_MAX - 2 * SUFFIX.len();
        while !queue.is_char_boundary(end) {
            end -= 1;
        }
    }
    format!("{}{SUFFIX}", &queue[..end])
}

/// Checks a queue's settings against their ranges.
pub fn check_settings(settings: &QueueSettings) -> Result<(), Error> {
    const WEEK_MS: u64 = 7 * 24 * 3600 * 1000;
    if !(100..=WEEK_MS).contains(&settings.visibility_timeout_ms) {
        return Err(Error::Invalid(format!(
            "a visibility timeout of {} ms: it must be from 100 ms to a week",
            settings.visibility_timeout_ms
        )));
    }
    if settings.max_attempts > ATTEMPTS_MAX {
        return Err(Error::Invalid(format!(
            "a maximum of {} attempts: it can be at most {ATTEMPTS_MAX}",
            settings.max_attempts
        )));
    }
    if let Some(name) = &settings.dead_letter_queue {
        check_queue_name(name)?;
    }
    if settings.max_message_bytes > MESSAGE_BYTES_LIMIT {
        return Err(Error::Invalid(format!(
            "a maximum message size of {} bytes: it can be at most {MESSAGE_BYTES_LIMIT}",
            settings.max_message_bytes
        )));
    }
    Ok(())
}

/// Largest value of [`QueueSettings::max_message_bytes`].
pub const MESSAGE_BYTES_LIMIT: u32 = 1 << 30;

/// What a queue's `confirm` setting adds to each send: flags of a flush record.
pub fn flush_flags(confirm: Confirm) -> Option<u16> {
    match confirm {
        Confirm::Accepted => None,
        Confirm::Stored => Some(crate::record::submission::FLUSH_STORED),
        Confirm::Synced => Some(crate::record::submission::FLUSH_SYNCED),
    }
}
