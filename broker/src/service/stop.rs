//! Stopping on request.
//!
//! A plain stop is what SIGTERM does: what was taken in is committed and synced,
//! and sessions stay for the next broker. A *drain* leaves nothing in shared
//! memory, so that a broker of any version can come next. Its steps:
//!
//! 1. every session is ended from this side ([`Core::end_session`]): closed to its
//!    client, taken in to the end, its leases returned
//! 2. rounds go on as always; a session's files go when it is committed, and
//!    synced if its client waits for that
//! 3. when all are committed, everything is synced
//! 4. the files of sessions whose payloads are still read go, the lease table,
//!    and the ledger last
//! 5. who asked is answered
//!
//! A broker that dies between any two of them leaves what any other death leaves:
//! sessions that are closing, or open; or, after step 3, a ledger without
//! sessions. Its successor takes it up, and can be drained.

use super::BrokerError;
use super::core::{Core, Outward};
use super::recovery;
use crate::control::{ConnId, Peer};
use nix::unistd::geteuid;
use ringmain::Error;
use ringmain::control::{Reply, Request};
use tracing::{info, warn};

/// How far stopping is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Stage {
    /// Nobody has asked for it.
    #[default]
    Serving,
    /// To be done at once.
    Stopping,
    /// Sessions are being ended: to be done when there are none.
    Draining,
}

/// Who asked the broker to stop, and how far that is.
#[derive(Debug, Default)]
pub(super) struct Stopping {
    stage: Stage,
    /// Who waits for the end, and whether it asked for a drain.
    waiting: Vec<(ConnId, bool)>,
}

impl Stopping {
    /// Whether a drain is under way.
    pub fn is_draining(&self) -> bool {
        self.stage == Stage::Draining
    }

    /// Whether the request must not be taken any more: it would give a session
    /// something new to do, or open one.
    pub fn refuses(&self, request: &Request) -> bool {
        let looks = matches!(
            request,
            Request::Hello { .. }
                | Request::Stop { .. }
                | Request::Stats
                | Request::QueueList
                | Request::QueueInfo { .. }
        );
        self.stage == Stage::Draining && !looks
    }
}

/// What a client is told whose request [`Stopping::refuses`].
pub(super) fn refusal() -> Error {
    Error::Closed(
        "the broker is being drained to be stopped: connect again when the next one is there"
            .to_owned(),
    )
}

fn disk_full(what_now: &str) -> Error {
    Error::StoreUnavailable(format!(
        "the disk is full, so that not all can be stored; {what_now}: free some space, then drain \
         again"
    ))
}

impl Core {
    /// Somebody asks the broker to stop. The answer comes from
    /// [`Core::finish_stop`], unless this fails.
    pub fn stop(&mut self, conn: ConnId, peer: Peer, drain: bool) -> Result<(), Error> {
        let own = geteuid().as_raw();
        if peer.uid != own && peer.uid != 0 {
            return Err(Error::NotPermitted(format!(
                "user {own}, whose broker this is, or root may stop it, and not user {}",
                peer.uid
            )));
        }
        info!(
            pid = peer.pid,
            uid = peer.uid,
            drain,
            "asked to stop over the control socket"
        );
        match (drain, self.stopping.stage) {
            (true, Stage::Serving | Stage::Stopping) => self.begin_drain()?,
            (false, Stage::Serving) => self.stopping.stage = Stage::Stopping,
            _ => {}
        }
        self.stopping.waiting.push((conn, drain));
        Ok(())
    }

    fn begin_drain(&mut self) -> Result<(), Error> {
        let need = 2 * self.uncommitted_bytes();
        let room = self.store.room();
        let room = room.map_err(|error| Error::StoreUnavailable(error.to_string()))?;
        if need > 0 && room < need {
            return Err(disk_full("no session was ended, and service goes on"));
        }
        // What was found when it was looked at last.
        self.disk_full = false;
        self.stopping.stage = Stage::Draining;
        let mut sessions: Vec<_> = self.by_number.iter().map(|(&n, &slot)| (n, slot)).collect();
        sessions.sort_unstable();
        info!(sessions = sessions.len(), "draining");
        for (_, slot) in sessions {
            self.end_session(slot);
        }
        Ok(())
    }

    /// Bytes of all submission rings that are not committed, as far as can be
    /// seen now.
    fn uncommitted_bytes(&mut self) -> u64 {
        let sessions = self.io.sessions.iter_mut().flatten();
        sessions
            .map(|session| {
                let map = session.map.clone();
                // A damaged ring ends its session, and needs no room.
                let _ = session.submission.refresh(map.submission());
                session
                    .submission
                    .published()
                    .saturating_sub(session.committed)
            })
            .sum()
    }

    /// Whether it is time for the last steps. A drain that the disk has no room
    /// for is given up here.
    pub fn stop_due(&mut self) -> bool {
        if self.stopping.stage == Stage::Draining && self.disk_full && !self.is_drained() {
            self.give_up_drain();
        }
        match self.stopping.stage {
            Stage::Serving => false,
            Stage::Stopping => true,
            Stage::Draining => self.is_drained(),
        }
    }

    /// Whether every session has ended, and all is committed. Those whose payload
    /// segments somebody still reads need not be gone: the reader has them mapped,
    /// and their chunks must not be freed under it.
    fn is_drained(&self) -> bool {
        let is_committed = |&slot| self.hub.is_committed_to_its_end(slot);
        self.by_number.values().all(is_committed)
            && self.leaving.is_empty()
            && !self.hub.round_in_flight()
            && !self.hub.has_uncommitted()
    }

    /// Who only wants the broker to stop gets that all the same.
    fn give_up_drain(&mut self) {
        warn!("the disk is full: the drain is given up, service goes on");
        let (drains, stops) = std::mem::take(&mut self.stopping.waiting)
            .into_iter()
            .partition::<Vec<_>, _>(|&(_, drain)| drain);
        self.stopping.stage = match stops.is_empty() {
            true => Stage::Serving,
            false => Stage::Stopping,
        };
        self.stopping.waiting = stops;
        for (conn, _) in drains {
            let error = disk_full(
                "the sessions are ended, what they had sent stays in shared memory until there is \
                 room, and the broker goes on serving",
            );
            self.answer_stop(conn, Err(error));
        }
    }

    /// The last step of a stop, when everything is committed and synced: after a
    /// drain nothing stays in shared memory. Answers who asked.
    pub fn finish_stop(&mut self) -> Result<(), BrokerError> {
        let drained = self.stopping.stage == Stage::Draining && self.is_drained();
        if drained {
            recovery::remove_all(&self.setup.shm_dir)?;
            info!("drained: all is stored, and nothing is left in shared memory");
        } else if self.disk_full {
            warn!(
                "the disk is full: what is not stored stays in shared memory; start the broker \
                 again before the machine restarts"
            );
        }
        for (conn, drain) in std::mem::take(&mut self.stopping.waiting) {
            let outcome = match drain && !drained {
                true => Err(Error::StoreUnavailable(
                    "the broker was stopped before it was drained: start it again, then drain it"
                        .to_owned(),
                )),
                false => Ok(()),
            };
            self.answer_stop(conn, outcome);
        }
        Ok(())
    }

    fn answer_stop(&mut self, conn: ConnId, outcome: Result<(), Error>) {
        let reply = match outcome {
            Ok(()) => Reply::Ok(serde_json::Value::Object(serde_json::Map::new())),
            Err(error) => Reply::Error((&error).into()),
        };
        self.outward.push(Outward::Reply(conn, reply, Vec::new()));
    }
}
