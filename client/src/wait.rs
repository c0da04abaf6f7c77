//! How a client waits: a little awake, then asleep in the segment, looking
//! around each time it wakes.

use crate::error::{Error, Result};
use crate::session::Session;
use crossbeam_utils::Backoff;
use ringmain_ring::wait::client;
use std::time::{Duration, Instant};

/// Until when to wait.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Deadline {
    /// Not at all.
    Now,
    /// Until then.
    At(Instant),
    /// As long as it takes.
    Never,
}

impl Deadline {
    /// So long from now.
    pub(crate) fn after(time: Duration) -> Deadline {
        match Instant::now().checked_add(time) {
            Some(instant) => Deadline::At(instant),
            None => Deadline::Never,
        }
    }

    /// The time that is left.
    pub(crate) fn left(self) -> Duration {
        match self {
            Deadline::Now => Duration::ZERO,
            Deadline::At(instant) => instant.saturating_duration_since(Instant::now()),
            Deadline::Never => Duration::MAX,
        }
    }

    pub(crate) fn is_over(self) -> bool {
        self.left().is_zero()
    }
}

/// What a look has given.
pub(crate) enum Progress<T> {
    /// The thing that was waited for.
    Done(T),
    /// Nothing yet; these bits of the client's wait word tell of a change.
    Wait(u32),
}

impl Session {
    /// Looks, and waits until the look gives something, or [`Error::TimedOut`].
    pub(crate) fn wait_for<T>(
        &self,
        deadline: Deadline,
        mut look: impl FnMut() -> Result<Progress<T>>,
    ) -> Result<T> {
        let backoff = Backoff::new();
        loop {
            match look()? {
                Progress::Done(done) => return Ok(done),
                Progress::Wait(_) if deadline.is_over() => return Err(Error::TimedOut),
                Progress::Wait(bits) if backoff.is_completed() => {
                    if let Some(done) = self.sleep(deadline, bits, &mut look)? {
                        return Ok(done);
                    }
                }
                Progress::Wait(_) => backoff.snooze(),
            }
        }
    }

    /// Announces, looks once more, looks around, and sleeps. Announcements are
    /// not taken back: another thread may sleep behind the same bits.
    fn sleep<T>(
        &self,
        deadline: Deadline,
        bits: u32,
        look: &mut impl FnMut() -> Result<Progress<T>>,
    ) -> Result<Option<T>> {
        // Answers as well: the broker takes in nothing more of a session whose
        // answer ring is full.
        let bits = bits | client::ANSWERS;
        let word = self.map().client_wait();
        let announced = word.announce(bits);
        match look()? {
            Progress::Done(done) => return Ok(Some(done)),
            // It lacks something else now: announce that first.
            Progress::Wait(other) if other & !bits != 0 => return Ok(None),
            Progress::Wait(_) => {}
        }
        match self.look_around(deadline.left()) {
            Ok(nap) => word.sleep(announced, nap.min(deadline.left())),
            // The broker may have done it just before the end.
            Err(error) => match look()? {
                Progress::Done(done) => return Ok(Some(done)),
                Progress::Wait(_) => return Err(error),
            },
        }
        Ok(None)
    }
}
