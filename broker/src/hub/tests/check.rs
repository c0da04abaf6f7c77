//! What must be true of a hub between any two calls.

use crate::hub::message::{List, MessageIndex, NONE, Place, State};
use crate::hub::{Hub, LeaseState, Shown};
use std::collections::HashMap;

impl Hub {
    /// Checks the hub's own bookkeeping.
    pub(crate) fn check(&self) {
        let listed = self.check_lists();
        self.check_leases();
        self.check_counts();
        self.check_blocks();
        self.check_sessions();
        for index in self.live_messages() {
            let message = &self.messages[index];
            let expected = matches!(
                message.state,
                State::Ready | State::Later | State::Again | State::Dying
            );
            let orphan = message.state == State::Again
                && message.place == Place::Away
                && !message.has_position;
            assert_eq!(
                listed.contains_key(&index),
                expected && !orphan,
                "message {index} is in the wrong lists: {message:?}"
            );
            let queue = self.queue(message.queue);
            if message.has_position && queue.gap.contains(&message.order) {
                let known = queue.known.get(&message.order);
                assert_eq!(
                    known,
                    Some(&index),
                    "a read would find message {index} once more: {:?} {message:?}",
                    queue.gap
                );
            }
            if message.state == State::Settled && message.send_done {
                assert_ne!(
                    message.leases, NONE,
                    "message {index} is done with, and still there"
                );
            }
        }
    }

    fn live_messages(&self) -> Vec<MessageIndex> {
        // Deleted queues' messages have no queue; a free slot has none either,
        // so those are found by what refers to them.
        (0..self.queues.len() as u32)
            .flat_map(|queue| self.messages.of_queue(queue))
            .collect()
    }

    /// Every list holds messages of its queue in its state; gives all members.
    fn check_lists(&self) -> HashMap<MessageIndex, State> {
        let mut listed = HashMap::new();
        for (index, queue) in self.queues.iter().enumerate() {
            let Some(queue) = queue else { continue };
            let mut check = |list: &List, state: State| {
                let mut newest = None;
                for at in list.iter(&self.messages) {
                    let message = &self.messages[at];
                    assert_eq!(message.state, state, "message {at}: {message:?}");
                    assert_eq!(message.queue, index as u32);
                    assert_eq!(
                        listed.insert(at, state),
                        None,
                        "message {at} is in two lists"
                    );
                    // Those with a position come first, and each kind in order.
                    let place = (!message.has_position, message.order);
                    if matches!(state, State::Ready | State::Later) {
                        assert!(
                            newest.is_none_or(|newest| newest < place),
                            "{state:?} is out of order"
                        );
                        newest = Some(place);
                    }
                }
            };
            check(&queue.ready, State::Ready);
            check(&queue.later, State::Later);
            check(&queue.again, State::Again);
            check(&queue.dying, State::Dying);
            for message in queue.ready.iter(&self.messages) {
                assert_ne!(
                    self.messages[message].place,
                    Place::Away,
                    "what is ready has its bytes"
                );
            }
            assert!(
                queue.is_behind() || queue.later.is_empty(),
                "nothing comes before what is for later"
            );
            for (&position, &message) in &queue.known {
                if message != NONE {
                    let known = &self.messages[message];
                    assert_eq!(
                        (known.queue, known.order),
                        (index as u32, position),
                        "known: {known:?}"
                    );
                }
            }
        }
        listed
    }

    fn check_leases(&self) {
        let mut live: HashMap<(u32, u32), u32> = HashMap::new();
        let mut leased: HashMap<u32, u64> = HashMap::new();
        for lease in &self.leases {
            let is_live = lease.state == LeaseState::Leased;
            // What its holder still reads counts in its window.
            if is_live || lease.shown != Shown::No {
                *live.entry((lease.holder, lease.attachment)).or_default() += 1;
            }
            if !is_live {
                continue;
            }
            *leased
                .entry(self.messages[lease.message].queue)
                .or_default() += 1;
            assert_eq!(
                self.messages[lease.message].state,
                State::Leased,
                "I4: {lease:?}"
            );
            assert!(lease.deadline_ns >= self.next_expiry_ns.min(lease.deadline_ns));
        }
        for (slot, session) in self.sessions.iter().enumerate() {
            for (index, attachment) in session
                .iter()
                .flat_map(|session| session.attachments.iter().enumerate())
            {
                let found = live.get(&(slot as u32, index as u32)).copied().unwrap_or(0);
                assert_eq!(attachment.live, found, "leases of session {slot}");
            }
        }
        for (index, queue) in self.queues.iter().enumerate() {
            let Some(queue) = queue else { continue };
            assert_eq!(
                queue.leased,
                leased.get(&(index as u32)).copied().unwrap_or(0)
            );
        }
        let free = self
            .leases
            .iter()
            .skip(1)
            .filter(|lease| lease.state == LeaseState::Free)
            .count();
        assert_eq!(free, self.free_leases.len(), "free lease entries");
    }

    fn check_counts(&self) {
        for (index, queue) in self.queues.iter().enumerate() {
            let Some(queue) = queue else { continue };
            let in_memory = self.messages.of_queue(index as u32);
            let unsettled = in_memory
                .iter()
                .filter(|&&m| self.messages[m].state != State::Settled)
                .count();
            assert!(
                queue.messages >= unsettled as u64,
                "queue {index}: {} < {unsettled}",
                queue.messages
            );
            if !queue.is_behind() && !self.admin.is_deleting(queue.number) {
                assert_eq!(queue.messages, unsettled as u64, "queue {index}");
            }
        }
    }

    fn check_blocks(&self) {
        let mut users: HashMap<u32, u32> = HashMap::new();
        let mut bytes: HashMap<u32, usize> = HashMap::new();
        for index in self.live_messages() {
            let message = &self.messages[index];
            if let Place::Block { block, .. } = message.place {
                *users.entry(block).or_default() += 1;
                *bytes.entry(message.queue).or_default() += crate::hub::memory_of(message.len);
            }
        }
        for (index, block) in self.blocks.iter().enumerate() {
            let used = block.as_ref().map(|block| block.users);
            assert_eq!(
                used,
                users.get(&(index as u32)).copied(),
                "users of block {index}"
            );
        }
        for (index, queue) in self.queues.iter().enumerate() {
            let cached = queue.as_ref().map_or(0, |queue| queue.cached_bytes);
            assert_eq!(
                cached,
                bytes.get(&(index as u32)).copied().unwrap_or(0),
                "bytes of queue {index}"
            );
        }
    }

    fn check_sessions(&self) {
        for (slot, session) in self.sessions.iter().enumerate() {
            let Some(session) = session else { continue };
            assert!(session.committed <= session.frozen && session.frozen <= session.taken_in);
            let listed = self
                .dirty
                .iter()
                .filter(|&&dirty| dirty == slot as u32)
                .count();
            assert_eq!(
                listed,
                usize::from(session.dirty),
                "how often session {slot} waits for a round"
            );
            assert!(
                session.sends.is_empty() || session.dirty,
                "session {slot} has sends and waits for no round"
            );
        }
    }
}
