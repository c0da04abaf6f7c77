//! What the broker answers a session: refused sends, and leases that were lost.

use crate::error::{ErrorCode, Refusal};
use crate::message::MessageId;
use crate::record::{Answer, Malformed, answer};
use ringmain_ring::record_ring::{Damaged, Reader, Ring};
use std::collections::{HashMap, HashSet, VecDeque};

/// The reading end of a session's answer ring, and what nobody was told yet.
#[derive(Debug)]
pub(crate) struct Answers {
    reader: Reader,
    session: u64,
    refused: Vec<Refusal>,
    lost: u64,
    recent: Recent,
    /// Calls that send and wait for the confirmation at the moment.
    pub(crate) confirming: usize,
}

/// The ring was not what it must be.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unreadable {
    #[error(transparent)]
    Damaged(#[from] Damaged),
    #[error(transparent)]
    Malformed(#[from] Malformed),
}

impl Answers {
    /// Of a new session.
    pub(crate) fn new(session: u64, ring: Ring<'_>) -> Answers {
        Answers {
            reader: Reader::new(0, 0),
            session,
            refused: Vec::new(),
            lost: 0,
            recent: Recent::new(ring.area.size() / answer::BYTES),
            confirming: 0,
        }
    }

    /// Reads all answers that are there, and frees their room. Returns whether
    /// there was one.
    pub(crate) fn drain(&mut self, ring: Ring<'_>) -> Result<bool, Unreadable> {
        let mut end = None;
        while let Some(record) = self.reader.next(ring)? {
            self.take(Answer::read(&record, ring)?);
            end = Some(record.end());
        }
        if let Some(end) = end {
            self.reader.free(ring, end);
        }
        Ok(end.is_some())
    }

    fn take(&mut self, answer: Answer) {
        // A call in progress still has to find its answer here, so what is
        // recent is not cut while there is one.
        if !self.recent.insert(answer, self.confirming > 0) {
            return;
        }
        match answer {
            Answer::Refused { position, code } => {
                self.refused.push(self.refusal(position, code));
            }
            Answer::LeaseLost { .. } => self.lost += 1,
        }
    }

    fn refusal(&self, position: u64, code: u16) -> Refusal {
        Refusal {
            id: MessageId {
                session: self.session,
                position,
            },
            // A number that this version does not know is a refusal still.
            code: ErrorCode::from_number(code).unwrap_or(ErrorCode::Refused),
        }
    }

    /// The refused sends that were not reported yet.
    pub(crate) fn take_refused(&mut self) -> Vec<Refusal> {
        std::mem::take(&mut self.refused)
    }

    /// The refusal of this send, also if it was reported to another caller.
    pub(crate) fn take_refusal_of(&mut self, id: MessageId) -> Option<Refusal> {
        let code = *self.recent.refused.get(&id.position)?;
        self.refused.retain(|refusal| refusal.id != id);
        Some(self.refusal(id.position, code))
    }

    /// How many leases were lost that were not reported yet.
    pub(crate) fn take_lost(&mut self) -> u64 {
        std::mem::take(&mut self.lost)
    }
}

/// The last answers, to know repeated ones by: after a restart the broker may
/// write those of its last round again, which are not more than the ring holds.
#[derive(Debug)]
struct Recent {
    order: VecDeque<Answer>,
    refused: HashMap<u64, u16>,
    lost: HashSet<u64>,
    count_max: usize,
}

impl Recent {
    fn new(count_max: usize) -> Recent {
        Recent {
            order: VecDeque::new(),
            refused: HashMap::new(),
            lost: HashSet::new(),
            count_max,
        }
    }

    /// Whether the answer is new.
    fn insert(&mut self, answer: Answer, keep_all: bool) -> bool {
        let new = match answer {
            Answer::Refused { position, code } => self.refused.insert(position, code).is_none(),
            Answer::LeaseLost { delivery_position } => self.lost.insert(delivery_position),
        };
        if new {
            self.order.push_back(answer);
        }
        while self.order.len() > self.count_max && !keep_all {
            match self.order.pop_front() {
                Some(Answer::Refused { position, .. }) => {
                    self.refused.remove(&position);
                }
                Some(Answer::LeaseLost { delivery_position }) => {
                    self.lost.remove(&delivery_position);
                }
                None => {}
            }
        }
        new
    }
}
