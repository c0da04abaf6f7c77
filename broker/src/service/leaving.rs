//! What is kept of a session that has gone while its client waits for a sync.
//!
//! The broker ends a session of a living client when it is drained, or when that
//! client broke the protocol. The client may have been told that all it published
//! was taken in, and now wait for that to be synced. Nobody but the broker can
//! tell it, in the segment, and a client that looks after a closing session does
//! not connect again: so the files stay until it was told, for a successor too.

use super::session::SessionIo;
use crate::crash::crash_point;
use ringmain_ring::Ordering;
use ringmain_ring::session::SessionMap;
use ringmain_ring::wait::client;
use std::sync::Arc;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Leaving {
    pub number: u64,
    map: Arc<SessionMap>,
    /// End of its records, all of which are committed.
    end: u64,
}

impl Leaving {
    /// What is to be kept of this session, which is committed to its end; `None`
    /// if its client waits for no sync.
    pub fn of(session: &SessionIo) -> Option<Leaving> {
        (session.flush_synced > session.synced).then(|| Leaving {
            number: session.number,
            map: session.map.clone(),
            end: session.committed,
        })
    }

    /// Tells the client that all it sent is synced.
    pub fn confirm_synced(&self) {
        let synced = &self.map.header().confirmations.synced;
        crash_point("confirm the last sync of a session that has gone");
        // Release: pairs with the Acquire of the client that waits for it.
        synced.store(self.end, Ordering::Release);
        let word = self.map.client_wait();
        crash_point("wake the client of a session that has gone");
        if word.seen_after_publish() & client::CONFIRMATION != 0 {
            word.wake_announced(client::CONFIRMATION);
        }
    }
}
