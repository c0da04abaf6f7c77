//! Start: from what a predecessor left to a core in service.
//!
//! The order, each step harmless when a successor repeats it:
//!
//! 1. the store, which syncs what it had; the last committed round is the later
//!    of the store's and the ledger's
//! 2. sessions: cursors are brought to what is committed and leased
//! 3. the hub: queues, sessions, leases
//! 4. the records beyond what is committed, in the order of the intake log, then
//!    the rest of the rings
//! 5. sessions of the dead end; everybody else is told and woken

use super::BrokerError;
use super::core::{Core, Outward, Setup};
use super::io::Io;
use super::requests::SESSION_LOT;
use super::session::{SessionIo, remove_files, segment_path};
use crate::control;
use crate::crash::crash_point;
use crate::hub::{Hub, HubLimits, LeaseRow, LeaseState, RestoredSession, SessionSlot, Shown};
use crate::ledger::{Direction, LeaseTable, Ledger, LedgerError, SessionLedger, SessionState};
use crate::store::{Batch, Store, StoreError, Write};
use ringmain_ring::wait::{broker, client};
use std::path::Path;
use std::sync::Arc;
use tracing::{info, warn};

/// Makes a core from store and shared memory.
pub(super) fn start(
    setup: Setup,
    store: Arc<dyn Store>,
    limits: HubLimits,
    boot: u64,
    now_ns: u64,
) -> Result<Core, BrokerError> {
    let (ledger, leases) = open_ledger(&setup, boot, store.as_ref())?;
    let last = check_rounds(&ledger, store.as_ref())?;
    let sessions = adopt_sessions(&setup, last)?;
    let rows = live_rows(&leases, &sessions)?;
    let rows = without_settled(&ledger, &leases, store.as_ref(), rows, last)?;

    let hub = Hub::new(limits, last + 2, store.next_queue());
    let log = ledger.log();
    let io = Io::new(ledger, leases, &setup);
    let mut core = Core::new(setup, store, hub, io, now_ns, last);
    core.hub.set_now(now_ns);
    reserve_sessions(&mut core, last + 1)?;
    restore(&mut core, sessions, &rows)?;
    replay(&mut core, &log);
    let behind = sessions_behind(&core);
    core.hub.finish_restore(&behind);
    return_chunks(&core);
    greet_sessions(&mut core);
    Ok(core)
}

/// Opens the predecessor's ledger, or makes one if there is none. One that is of
/// no use is replaced where nothing can be lost by it: when there are no sessions
/// beside it, or it is of another boot, whose processes and memory are gone.
fn open_ledger(
    setup: &Setup,
    boot: u64,
    store: &dyn Store,
) -> Result<(Ledger, LeaseTable), BrokerError> {
    let dir = &setup.shm_dir;
    let path = Ledger::path(dir);
    let has_sessions = !numbers_of(dir, ".ledger")?.is_empty();
    if has_sessions && !path.exists() {
        // It is made before the first session, and removed after the last one.
        let what = "it is missing, and there are sessions";
        return Err(LedgerError::Corrupt { path, what }.into());
    }
    if has_sessions || (path.exists() && !half_made(&path)) {
        match open_usable(setup, boot) {
            Ok(Some(opened)) => return Ok(opened),
            Ok(None) => info!("removing the shared memory of another boot"),
            Err(error) if !has_sessions => {
                info!(%error, "replacing a ledger that has no sessions");
            }
            Err(error) => return Err(error),
        }
    }
    // The ledger last: whoever finds it finds the lease table.
    remove_all(dir)?;
    let leases = LeaseTable::create(dir)?;
    let ledger = Ledger::create(dir, setup.instance, boot, store.committed_round())?;
    Ok((ledger, leases))
}

/// The ledger as it is, if it is of this boot.
fn open_usable(setup: &Setup, boot: u64) -> Result<Option<(Ledger, LeaseTable)>, BrokerError> {
    let dir = &setup.shm_dir;
    let ledger = Ledger::open(dir)?;
    if ledger.boot() != boot {
        return Ok(None);
    }
    if ledger.instance() != setup.instance {
        return Err(BrokerError::OtherInstance { dir: dir.clone() });
    }
    Ok(Some((ledger, LeaseTable::open(dir)?)))
}

/// Numbers of the sessions that have a file with this ending.
fn numbers_of(dir: &Path, suffix: &str) -> Result<Vec<u64>, BrokerError> {
    let number = |name: String| name.strip_prefix('s')?.strip_suffix(suffix)?.parse().ok();
    Ok(file_names(dir)?.into_iter().filter_map(number).collect())
}

/// Number of the session whose file has this name.
fn session_of(name: &str) -> Option<u64> {
    name.strip_prefix('s')?.split_once('.')?.0.parse().ok()
}

/// Removes what brokers make in the folder, the ledger last.
pub(super) fn remove_all(dir: &Path) -> Result<(), BrokerError> {
    for number in numbers_of(dir, ".ledger")? {
        remove(&SessionLedger::path(dir, number))?;
    }
    for name in file_names(dir)? {
        if session_of(&name).is_some() {
            remove(&dir.join(name))?;
        }
    }
    remove(&dir.join("leases"))?;
    remove(&Ledger::path(dir))
}

fn remove(path: &Path) -> Result<(), BrokerError> {
    crash_point("remove what nobody needs");
    match std::fs::remove_file(path) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
            Err(BrokerError::io("cannot remove", path, source))
        }
        _ => Ok(()),
    }
}

fn file_names(dir: &Path) -> Result<Vec<String>, BrokerError> {
    let failed = |source| BrokerError::io("cannot read the folder", dir, source);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        names.extend(entry.map_err(failed)?.file_name().into_string());
    }
    Ok(names)
}

/// The last committed round.
fn check_rounds(ledger: &Ledger, store: &dyn Store) -> Result<u64, BrokerError> {
    let stored = store.committed_round();
    if stored < ledger.written() {
        let written = ledger.written();
        return Err(BrokerError::Store(StoreError::Corrupt(format!(
            "it ends at round {stored}, but round {written} had been written: rounds are lost, by \
             damage or by an older copy put in its place; put the right data folder back, or, to \
             go on without them, remove the shared-memory folder"
        ))));
    }
    Ok(stored.max(ledger.committed()))
}

/// Opens every session that can have sent something, and removes the rest.
fn adopt_sessions(setup: &Setup, last: u64) -> Result<Vec<SessionIo>, BrokerError> {
    let dir = &setup.shm_dir;
    let ledgers = numbers_of(dir, ".ledger")?;
    refuse_another_layout(dir, &ledgers)?;
    for name in file_names(dir)? {
        // Without a ledger: its maker died before that, or its remover after.
        if session_of(&name).is_some_and(|number| !ledgers.contains(&number)) {
            remove(&dir.join(name))?;
        }
    }
    let mut sessions = Vec::new();
    for number in ledgers {
        let ledger = match SessionLedger::open(dir, number) {
            // A ledger whose maker died in it; its client never had the segment.
            Err(LedgerError::Corrupt { .. }) if half_made(&SessionLedger::path(dir, number)) => {
                remove_files(dir, number);
                continue;
            }
            other => other?,
        };
        if ledger.state()? == SessionState::Opening {
            remove_files(dir, number);
            continue;
        }
        ledger.forget_rounds_after(last);
        let committed = ledger.committed(last);
        if ledger.state()? == SessionState::Closing && !segment_path(dir, number).exists() {
            remove_files(dir, number);
            continue;
        }
        let mut session = SessionIo::adopt(dir, setup.instance, number, ledger, committed)?;
        session.finish_predecessors_round();
        sessions.push(session);
    }
    sessions.sort_unstable_by_key(|session| session.number);
    Ok(sessions)
}

/// Before any file is changed: whether all are of this version.
fn refuse_another_layout(dir: &Path, ledgers: &[u64]) -> Result<(), LedgerError> {
    for &number in ledgers {
        if let Err(error @ LedgerError::Version { .. }) = SessionLedger::open(dir, number) {
            return Err(error);
        }
    }
    Ok(())
}

/// Whether a file of the ledger was never finished: its version, which is
/// written last, is not there.
fn half_made(path: &Path) -> bool {
    let bytes = std::fs::read(path);
    bytes.is_ok_and(|bytes| bytes.iter().skip(8).take(8).all(|&byte| byte == 0))
}

/// The rows of the lease table. A delivery that was written and not published
/// (the cursor had not passed it) goes back: its message goes out before newer
/// ones, which other consumers may have got already.
fn live_rows(leases: &LeaseTable, sessions: &[SessionIo]) -> Result<Vec<LeaseRow>, BrokerError> {
    let mut rows = leases.used_rows()?;
    for row in rows
        .iter_mut()
        .filter(|row| row.state == LeaseState::Leased)
    {
        let holder = sessions.binary_search_by_key(&row.holder, |session| session.number);
        let leased = holder.map_or(true, |at| {
            row.delivery_position < sessions[at].ledger.delivery_cursor()
        });
        if !leased {
            row.state = LeaseState::Returned;
            row.history = row.history.after_lease(false);
            // Nobody was shown it.
            row.shown = Shown::No;
            leases.set_unshown(row.entry);
            leases.set_state(row.entry, row.state, row.history);
        }
    }
    Ok(rows)
}

/// Where the last round was committed and not finished, the store may have the
/// marks of messages whose leases still have rows: such a row says nothing any
/// more, and its entry is merely to be freed.
fn without_settled(
    ledger: &Ledger,
    leases: &LeaseTable,
    store: &dyn Store,
    mut rows: Vec<LeaseRow>,
    last: u64,
) -> Result<Vec<LeaseRow>, BrokerError> {
    if ledger.finished() == last {
        return Ok(rows);
    }
    for row in rows
        .iter_mut()
        .filter(|row| row.state != LeaseState::Leased)
    {
        let Some(position) = row.queue_position.checked_sub(1) else {
            continue;
        };
        let blocks = store.read(row.queue, position, 1)?;
        let unsettled = blocks.first().is_some_and(|block| {
            let index = position.checked_sub(block.first);
            index.is_some_and(|index| {
                index < u64::from(block.block.len()) && !block.is_settled(index as u32)
            })
        });
        if !unsettled {
            row.queue_position = 0;
            // For a successor too: its record may keep the row past the next
            // round.
            leases.set_queue_position(row.entry, 0);
        }
    }
    Ok(rows)
}

/// Session numbers are reserved by a round of their own, before anybody asks. It
/// does not count as finished: what the predecessor's last round left undone is
/// done when the first ordinary round is.
fn reserve_sessions(core: &mut Core, round: u64) -> Result<(), BrokerError> {
    let below = core.next_session + SESSION_LOT;
    let writes = vec![Write::ReserveSessions { below }];
    core.store.commit(Batch { round, writes })?;
    // Not even a power cut has a number given twice.
    let synced = core.store.sync()?;
    core.io.ledger.set_written(round);
    core.io.ledger.set_committed(round);
    core.sessions_reserved = below;
    core.note_batch(round);
    core.synced_round = synced;
    Ok(())
}

fn restore(
    core: &mut Core,
    sessions: Vec<SessionIo>,
    rows: &[LeaseRow],
) -> Result<(), BrokerError> {
    for queue in core.store.queues()? {
        core.hub.restore_queue(queue);
    }
    for session in sessions {
        let restored = RestoredSession {
            number: session.number,
            rings: session.map.geometry(),
            outbound_bytes: session.payloads.bytes(Direction::Outbound),
            inbound: session.payloads.inbound_units(),
            committed: session.committed,
            answer_tail: session.answers.next_position(),
            attachments: session.ledger.attachments()?,
        };
        let slot = core.hub.restore_session(&restored);
        core.insert_session(slot, session);
        core.hub.report_deleted_queues(slot, &mut core.io);
    }
    core.hub
        .restore_leases(core.io.leases.rows(), rows, &mut core.io);
    Ok(())
}

/// Applies what the predecessor had taken in, in its order, then what it had
/// not.
fn replay(core: &mut Core, log: &[(u64, u64)]) {
    let mut rest: Vec<(u64, u64)> = core
        .by_number
        .keys()
        .map(|&number| (number, u64::MAX))
        .collect();
    rest.sort_unstable();
    for &(number, up_to) in log.iter().chain(&rest) {
        let Some(&slot) = core.by_number.get(&number) else {
            continue;
        };
        let Some(session) = core.io.session_mut(slot) else {
            continue;
        };
        let map = session.map.clone();
        match session.submission.refresh(map.submission()) {
            Ok(true) => {
                let up_to = up_to.min(session.submission.published());
                let up_to = up_to.min(session.ledger.final_position());
                core.io.ledger.log_intake(number, up_to, |_| Some(0));
                core.take_in_up_to(slot, &map, up_to);
            }
            Ok(false) => {}
            Err(damaged) => core.io.break_session(slot, damaged.to_string()),
        }
    }
}

/// Chunks that the predecessor did not come to give back: those of committed sends
/// that nobody reads any more.
fn return_chunks(core: &Core) {
    for (slot, session) in core.io.sessions.iter().enumerate() {
        let Some(session) = session else { continue };
        for (segment, file) in session.payloads.outbound.iter().enumerate() {
            for (unit, position) in file.words.taken() {
                let held = || {
                    let slot = slot as SessionSlot;
                    core.hub.holds_chunk(slot, segment as u32, unit, position)
                };
                if position < session.committed && !held() {
                    crash_point("give back a predecessor's chunk");
                    file.words.give_back(unit, position);
                }
            }
        }
    }
}

/// Sessions whose rings could not be taken in again to the end, and where that
/// is.
fn sessions_behind(core: &Core) -> Vec<(SessionSlot, u64)> {
    let behind = |(slot, session): (usize, &Option<SessionIo>)| {
        let session = session.as_ref()?;
        let end = session.submission.published();
        let end = end.min(session.ledger.final_position());
        (session.submission.next_position() < end).then_some((slot as SessionSlot, end))
    };
    let sessions = core.io.sessions.iter().enumerate();
    sessions.filter_map(behind).collect()
}

/// Ends the sessions of the dead, and tells the living.
fn greet_sessions(core: &mut Core) {
    let mut sessions: Vec<_> = core
        .by_number
        .iter()
        .map(|(&number, &slot)| (number, slot))
        .collect();
    sessions.sort_unstable();
    for (number, slot) in sessions {
        let Some(session) = core.io.session(slot) else {
            continue;
        };
        let peer = session.peer;
        let alive = control::start_time(peer.pid) == Some(peer.start_time);
        if let Some(reason) = session.broken.clone() {
            warn!(session = number, pid = peer.pid, reason, "session damaged");
        }
        let closing = session.state == SessionState::Closing;
        if closing || !alive || session.broken.is_some() {
            core.end_session(slot);
            if !closing || !alive {
                core.reader_gone(slot);
            } else {
                // It may still read what it was shown before it closed.
                core.outward.push(Outward::Watch(peer, number));
                core.orphans.push(slot);
            }
            continue;
        }
        crash_point("tell a client that its broker has died");
        session.map.broker_wait().set(broker::ORPHANED);
        core.io.touch(slot, client::ALL);
        core.outward.push(Outward::Watch(peer, number));
        core.orphans.push(slot);
        core.activate(slot);
    }
    core.io.publish();
}
