//! What can be set for a queue.

use serde::{Deserialize, Serialize};

/// What a confirmation stands for: how much a message, or an ack, survives.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default,
)]
#[serde(rename_all = "snake_case")]
pub enum Confirm {
    /// Published in the submission ring: survives the death of any process.
    #[default]
    Accepted,
    /// Written to the store, or settled.
    Stored,
    /// Behind an `fdatasync`, or settled: survives a power cut.
    Synced,
}

/// The settings of one queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct QueueSettings {
    /// How long a consumer may hold a message before it goes back to the queue,
    /// in milliseconds, from 100 up to a week.
    pub visibility_timeout_ms: u64,
    /// The longest payload that the queue takes, in bytes, up to 1 GiB.
    pub max_message_bytes: u32,
    /// What `send` waits for unless the producer says otherwise.
    pub confirm: Confirm,
    /// After so many attempts a message moves to the dead-letter queue, up to
    /// [`ATTEMPTS_MAX`](crate::control::ATTEMPTS_MAX). 0: it is tried for ever.
    pub max_attempts: u16,
    /// Where dead messages go; made when it is first needed. `None`: the queue of
    /// this one's name with `.dead` behind it.
    pub dead_letter_queue: Option<String>,
}

impl Default for QueueSettings {
    fn default() -> QueueSettings {
        QueueSettings {
            visibility_timeout_ms: 30_000,
            max_message_bytes: 64 << 20,
            confirm: Confirm::Accepted,
            max_attempts: 0,
            dead_letter_queue: None,
        }
    }
}
