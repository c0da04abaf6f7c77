//! Looking at the status board.

use super::{Status, note_of, read_note};
use crate::control::start_time;
use crate::service::now_ns;
use ringmain_ring::board::Board;
use ringmain_ring::fault;
use ringmain_ring::segment::SegmentError;
use serde::Serialize;
use std::path::Path;
use std::time::Duration;

/// A broker that has posted nothing for so long is stuck: it posts once a second
/// when it has nothing to do.
const STUCK: Duration = Duration::from_secs(5);

/// How the broker is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Condition {
    /// In service.
    Serving,
    /// Being drained, to be stopped.
    Draining,
    /// Its process is there, and posts nothing.
    Stuck,
    /// Its process has died.
    Dead,
}

/// What the board shows, and what that means now.
#[derive(Debug, Clone, Serialize)]
pub struct Look {
    /// How the broker is.
    pub condition: Condition,
    /// How long ago it posted this, in milliseconds.
    pub age_ms: u64,
    /// What it posted.
    #[serde(flatten)]
    pub status: Status,
}

/// Why there is nothing to look at.
#[derive(Debug, thiserror::Error)]
pub enum BoardError {
    /// No broker has a board there.
    #[error("no broker keeps a status board at {0}")]
    Missing(String),
    /// There is one, and it can't be used.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// What is posted makes no sense.
    #[error("the status board of {0} can't be read: it is damaged")]
    Damaged(String),
}

/// Looks at the board of the broker with this socket. Asks nobody, and never
/// waits.
pub fn look(socket: &Path) -> Result<Look, BoardError> {
    let shown = || socket.display().to_string();
    // What another process may cut short is read here.
    fault::install().map_err(|source| SegmentError::Io {
        what: "cannot handle SIGBUS for",
        path: socket.to_owned(),
        source,
    })?;
    let name = read_note(&note_of(socket)).ok_or_else(|| BoardError::Missing(shown()))?;
    let board = match Board::open(&name) {
        Ok(board) => board,
        Err(SegmentError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            return Err(BoardError::Missing(shown()));
        }
        Err(error) => return Err(error.into()),
    };
    // A broker posts before it notes the name.
    let bytes = board.look().ok_or_else(|| BoardError::Damaged(shown()))?;
    let status: Status =
        serde_json::from_slice(&bytes).map_err(|_| BoardError::Damaged(shown()))?;
    Ok(judge(status))
}

fn judge(status: Status) -> Look {
    let age = Duration::from_nanos(now_ns().saturating_sub(status.posted_ns));
    let alive = start_time(status.pid as i32) == Some(status.start_time);
    let condition = match alive {
        false => Condition::Dead,
        true if age > STUCK => Condition::Stuck,
        true if status.draining => Condition::Draining,
        true => Condition::Serving,
    };
    Look {
        condition,
        age_ms: age.as_millis() as u64,
        status,
    }
}
