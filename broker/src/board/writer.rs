//! Posting to the status board.

use super::{NAME_PREFIX, Status, note_of, read_note};
use crate::control::start_time;
use crate::crash::crash_point;
use ringmain_ring::board::{self, Board};
use ringmain_ring::segment::SegmentError;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Instant;
use tracing::warn;

/// Between two postings, while something happens, and while nothing does.
const BUSY_NS: u64 = 100_000_000;
const IDLE_NS: u64 = 1_000_000_000;
/// Rates are over this time.
const RATE_NS: u64 = 1_000_000_000;
/// Posting takes no more than this part of the time, however many queues there
/// are.
const SHARE: u64 = 100;
/// Bytes of the first board; a fuller one is made when it does not hold all.
const FIRST_BYTES: usize = 16 * 1024;
/// A board that could not be made is tried again after this time.
const RETRY_NS: u64 = 10_000_000_000;

/// Sends, deliveries and acks.
type Counts = [u64; 3];

/// Keeps the board. It is no one's to wait for: what goes wrong with it is
/// logged, and the broker serves without.
#[derive(Debug)]
pub(crate) struct BoardWriter {
    note: PathBuf,
    /// When this process started: found once, since that reads a file.
    start_time: u64,
    prefix: String,
    /// Boards made so far: part of their names.
    made: u32,
    board: Option<Board>,
    capacity: usize,
    retry_ns: u64,
    last_ns: u64,
    busy_ns: u64,
    /// Something happened since.
    dirty: bool,
    /// When the rates were taken, the counts then, in all and by queue, and the
    /// rates.
    mark_ns: u64,
    marks: HashMap<String, (Counts, Counts)>,
}

impl BoardWriter {
    /// Removes the board of a predecessor that died. The first posting makes one.
    pub fn new(socket: &Path, instance: u64) -> BoardWriter {
        let note = note_of(socket);
        // It may have died between making a board and putting the note in place.
        for note in [&note, &draft_of(&note)] {
            if let Some(name) = read_note(note) {
                crash_point("remove a dead broker's board");
                if let Err(error) = board::remove(&name) {
                    warn!(%error, "a dead broker's status board stays");
                }
            }
        }
        let pid = std::process::id();
        BoardWriter {
            note,
            start_time: start_time(pid as i32).unwrap_or(0),
            prefix: format!("{NAME_PREFIX}{instance:016x}-{pid}"),
            made: 0,
            board: None,
            capacity: FIRST_BYTES,
            retry_ns: 0,
            last_ns: 0,
            busy_ns: BUSY_NS,
            dirty: true,
            mark_ns: 0,
            marks: HashMap::new(),
        }
    }

    /// Whether it is time to post. `busy`: something has happened.
    #[inline]
    pub fn is_due(&mut self, now_ns: u64, busy: bool) -> bool {
        self.dirty |= busy;
        now_ns >= self.due_ns()
    }

    /// When it is time to post, by the monotonic clock.
    pub fn due_ns(&self) -> u64 {
        self.last_ns + if self.dirty { self.busy_ns } else { IDLE_NS }
    }

    /// Posts what the broker is doing; who it is, and rates, are put in here.
    pub fn post(&mut self, mut status: Status) {
        let started = Instant::now();
        let now_ns = status.posted_ns;
        status.version = env!("CARGO_PKG_VERSION").to_owned();
        status.pid = std::process::id();
        status.start_time = self.start_time;
        self.put_rates(&mut status);
        self.dirty = false;
        self.last_ns = now_ns;
        let Ok(bytes) = serde_json::to_vec(&status) else {
            return;
        };
        if self.board.as_mut().is_none_or(|board| !board.post(&bytes)) && now_ns >= self.retry_ns {
            self.renew(&bytes, now_ns);
        }
        let took = started.elapsed().as_nanos() as u64;
        self.busy_ns = BUSY_NS.max(took * SHARE);
    }

    /// Makes a board that holds this, and names it in the note.
    fn renew(&mut self, bytes: &[u8], now_ns: u64) {
        while self.capacity < bytes.len() {
            self.capacity *= 2;
        }
        self.board = None;
        match self.make(bytes) {
            Ok(board) => self.board = Some(board),
            Err(error) => {
                warn!(%error, "no status board: `ringmain stats` and `top` don't work");
                let _ = std::fs::remove_file(&self.note);
                self.retry_ns = now_ns + RETRY_NS;
            }
        }
    }

    fn make(&mut self, bytes: &[u8]) -> Result<Board, SegmentError> {
        let name = format!("{}-{}", self.prefix, self.made);
        self.made += 1;
        let cannot_write = |source| SegmentError::Io {
            what: "cannot write",
            path: self.note.clone(),
            source,
        };
        // The draft first: whoever finds it removes the board, if there is one.
        // Renamed into place, so that a reader finds a whole name of a board that
        // was posted to.
        let draft = draft_of(&self.note);
        crash_point("draft the board's note");
        std::fs::write(&draft, &name).map_err(cannot_write)?;
        crash_point("make a board");
        let mut board = Board::create(&name, self.capacity)?;
        board.post(bytes);
        crash_point("put the board's note in place");
        std::fs::rename(&draft, &self.note).map_err(cannot_write)?;
        Ok(board)
    }

    fn put_rates(&mut self, status: &mut Status) {
        let passed = status.posted_ns - self.mark_ns;
        let renew = passed >= RATE_NS;
        let mut marks = HashMap::new();
        let mut rates = |name: &str, counts: Counts| -> Counts {
            let (before, rates) = match self.marks.get(name) {
                Some(mark) => *mark,
                None => (counts, [0; 3]),
            };
            if !renew {
                return rates;
            }
            let rate = |index: usize| {
                let done = counts[index].saturating_sub(before[index]);
                (u128::from(done) * 1_000_000_000 / u128::from(passed)) as u64
            };
            let rates = [rate(0), rate(1), rate(2)];
            marks.insert(name.to_owned(), (counts, rates));
            rates
        };
        // No queue has an empty name.
        let stats = &status.stats;
        [
            status.sends_per_s,
            status.deliveries_per_s,
            status.acks_per_s,
        ] = rates("", [stats.sends, stats.deliveries, stats.acks]);
        for queue in &mut status.per_queue {
            [queue.sends_per_s, queue.deliveries_per_s, queue.acks_per_s] =
                rates(&queue.name, [queue.sends, queue.deliveries, queue.acks]);
        }
        if renew {
            self.marks = marks;
            self.mark_ns = status.posted_ns;
        }
    }
}

impl Drop for BoardWriter {
    /// The broker ends in order: it leaves no board.
    fn drop(&mut self) {
        if self.board.take().is_some() {
            crash_point("remove the board's note");
            let _ = std::fs::remove_file(&self.note);
        }
    }
}

/// Where the note is written before it is put in its place.
fn draft_of(note: &Path) -> PathBuf {
    note.with_extension("board.new")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::board::look;
    use crate::hub::QueueStatus;

    fn status(posted_ns: u64, queues: usize, sends: u64) -> Status {
        let mut status = Status {
            posted_ns,
            per_queue: (0..queues)
                .map(|number| QueueStatus {
                    name: format!("queue {number}"),
                    sends,
                    ..QueueStatus::default()
                })
                .collect(),
            ..Status::default()
        };
        status.stats.sends = sends * queues as u64;
        status
    }

    #[test]
    #[allow(clippy::unwrap_used)]
    fn a_board_grows_shows_rates_and_goes_with_its_writer() {
        const SECOND: u64 = 1_000_000_000;
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        assert!(look(&socket).is_err());
        let mut writer = BoardWriter::new(&socket, 7);
        assert!(writer.is_due(SECOND, false));
        writer.post(status(SECOND, 2, 0));
        assert!(!writer.is_due(SECOND + 1, true));
        assert!(writer.is_due(2 * SECOND, true));
        writer.post(status(2 * SECOND, 2, 500));
        let seen = look(&socket).unwrap().status;
        assert_eq!(seen.sends_per_s, 1000);
        assert_eq!(seen.per_queue[1].sends_per_s, 500);

        // Between two marks the last rates stay.
        writer.post(status(2 * SECOND + SECOND / 2, 2, 501));
        assert_eq!(look(&socket).unwrap().status.sends_per_s, 1000);

        // It outgrows the first board.
        writer.post(status(4 * SECOND, 500, 501));
        let seen = look(&socket).unwrap().status;
        assert_eq!(seen.per_queue.len(), 500);
        assert_eq!(seen.per_queue[1].sends_per_s, 0, "over two seconds");

        drop(writer);
        assert!(look(&socket).is_err());
        assert_eq!(folder.path().read_dir().unwrap().count(), 0);
    }
}
