//! The status board: what the broker is doing, posted in shared memory of its own
//! several times a second, for `ringmain stats` and `ringmain top`. Who looks asks
//! nobody: it answers when the broker is stuck, and when it is dead.
//!
//! What is posted is JSON, so that a reader of another version finds what it
//! knows. A note beside the socket, `<socket>.board`, holds the board's name.

mod reader;
mod writer;

pub use reader::{BoardError, Condition, Look, look};
pub(crate) use writer::BoardWriter;

use crate::hub::QueueStatus;
use ringmain::control::Stats;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// What is posted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// The version of the broker.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// When that started, in clock ticks since the machine did.
    pub start_time: u64,
    /// When this was posted, in nanoseconds of the monotonic clock.
    pub posted_ns: u64,
    /// Whether it is being drained.
    pub draining: bool,
    /// What it has done, and holds.
    #[serde(flatten)]
    pub stats: Stats,
    /// Sends in the last second.
    pub sends_per_s: u64,
    /// Deliveries in the last second.
    pub deliveries_per_s: u64,
    /// Acks in the last second.
    pub acks_per_s: u64,
    /// Bytes of memory that stored messages take.
    pub cached_bytes: u64,
    /// Bytes of shared memory of payload segments.
    pub payload_bytes: u64,
    /// Every queue, by name.
    pub per_queue: Vec<QueueStatus>,
}

/// The note that names the board of the broker with this socket.
fn note_of(socket: &Path) -> PathBuf {
    let mut name = socket.as_os_str().to_owned();
    name.push(".board");
    PathBuf::from(name)
}

/// What boards are called. A note with another name is not believed: nothing else
/// is opened, or removed.
const NAME_PREFIX: &str = "/ringmain-board-";

/// The name in a note.
fn read_note(note: &Path) -> Option<String> {
    let name = std::fs::read_to_string(note).ok()?;
    let rest = name.strip_prefix(NAME_PREFIX)?;
    (!rest.contains('/')).then_some(name)
}
