//! What a correct broker may show: every accepted message, who was seen to hold
//! it, what was acked, and what of it is certain.
//!
//! The model sees what a client could see (rings, cursors, answers, replies) and
//! nothing of the broker's inside. Where a death leaves something open it says
//! so ([`Fate::Doubt`]), and takes either outcome.

use super::client::{Found, Life};
use ringmain::record;
use std::collections::HashMap;

/// What must become of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It has to be delivered until it is acked.
    Owed,
    /// Its ack was confirmed: it must never come back.
    Acked,
    /// It may be there or not: its queue is being deleted, its ack's fate or the
    /// power cut's is unknown.
    Doubt,
    /// It was refused, and must never come.
    Refused,
}

#[derive(Debug)]
pub struct Message {
    pub session: u64,
    pub position: u64,
    pub end: u64,
    /// The model's number of its queue.
    pub queue: usize,
    pub payload: Vec<u8>,
    pub fate: Fate,
    /// Its queue's deletion was asked for, or its sender went mad: nothing is
    /// owed any more.
    pub unbound: bool,
    /// How often it was seen leased.
    pub seen: u32,
    /// Its latest lease.
    pub lease: Option<usize>,
    /// Least and greatest number of attempts that a delivery may show.
    attempts: (u32, u32),
    /// Deaths of brokers before it was sent.
    deaths: u32,
    /// A power cut may have taken what was known of its leases.
    history_lost: bool,
    pub too_large: bool,
}

/// Whether a delivery was taken before its lease ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    Never,
    InTime,
    Unsure,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answered {
    Ack,
    Nack { counted: bool, due_ns: u64 },
}

#[derive(Debug)]
pub struct Lease {
    pub client: usize,
    pub entry: u32,
    pub position: u64,
    pub message: usize,
    /// Before this time only its holder can end it, as far as is known.
    deadline_ns: u64,
    /// Extends under way: *(end of the record, least new deadline)*.
    extends: Vec<(u64, u64)>,
    pub taken: Taken,
    /// The first ack or nack, and the end of its record.
    pub answered: Option<(Answered, u64)>,
    /// Deaths of brokers before that.
    answered_deaths: u32,
    /// Extends before and anything after `answered` that name it: records whose
    /// answer, if the lease holds, is none; and those that are sure to be lost.
    pub named: u32,
    pub named_after: u32,
    /// Answers that said it was lost.
    pub lost: u32,
    /// End of the last record that names it.
    last_end: u64,
    pub resolved: bool,
}

impl Lease {
    /// Before this time only its holder can end it.
    fn may_end_ns(&self) -> u64 {
        self.deadline_ns
    }

    fn end_any_time(&mut self) {
        self.deadline_ns = 0;
        self.extends.clear();
    }
}

/// How a queue stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stand {
    Creating,
    Live,
    Deleting,
    Gone,
}

#[derive(Debug)]
pub struct Queue {
    pub name: String,
    pub number: Option<u32>,
    pub stand: Stand,
}

#[derive(Default)]
pub struct Model {
    pub messages: Vec<Message>,
    pub by_identity: HashMap<(u64, u64), usize>,
    pub leases: Vec<Lease>,
    /// By client and delivery position.
    pub by_delivery: HashMap<(usize, u64), usize>,
    pub queues: Vec<Queue>,
    /// The last message seen leased for the first time, by sender and queue.
    newest: HashMap<(u64, usize), u64>,
    /// Brokers that died.
    pub deaths: u32,
    /// Leases that were made up, by client, and how often they were named.
    pub forged: HashMap<(usize, u64), u32>,
}

impl Model {
    /// A queue got this number. A power cut may have taken the one that had it.
    pub fn set_number(&mut self, queue: usize, number: u32) {
        for other in self
            .queues
            .iter_mut()
            .filter(|other| other.number == Some(number))
        {
            other.number = None;
        }
        self.queues[queue].number = Some(number);
    }

    pub fn accepted(
        &mut self,
        session: u64,
        (position, end): (u64, u64),
        queue: usize,
        payload: Vec<u8>,
        too_large: bool,
    ) {
        let unbound = self.queues[queue].stand != Stand::Live;
        let fate = if unbound || too_large {
            Fate::Doubt
        } else {
            Fate::Owed
        };
        let before = self
            .by_identity
            .insert((session, position), self.messages.len());
        assert_eq!(
            before, None,
            "an identity was given twice: session {session}, {position}"
        );
        self.messages.push(Message {
            session,
            position,
            end,
            queue,
            payload,
            fate,
            unbound,
            seen: 0,
            lease: None,
            attempts: (0, 0),
            deaths: self.deaths,
            history_lost: false,
            too_large,
        });
    }

    /// Deliveries that have become visible at once. `starting`: by a broker's
    /// start, which publishes what its predecessor had leased.
    pub fn delivered(
        &mut self,
        found: &[(usize, usize, Life, Found)],
        now_ns: u64,
        starting: bool,
    ) {
        let mut fresh = Vec::new();
        for (client, queue, life, found) in found {
            let message = self.one_delivered(*client, *queue, *life, found, now_ns);
            if !found.delivery.redelivered {
                fresh.push(message);
            }
        }
        // I2, over all consumers at once: within one look any order of seeing.
        fresh.sort_unstable_by_key(|&index| self.messages[index].position);
        for index in fresh {
            let message = &self.messages[index];
            let newest = self
                .newest
                .entry((message.session, message.queue))
                .or_insert(0);
            // Positions begin at 0, so that the newest is kept plus one.
            if !starting {
                assert!(
                    message.position >= *newest,
                    "I2: session {} position {} was first leased after position {}",
                    message.session,
                    message.position,
                    *newest - 1
                );
            }
            *newest = (*newest).max(message.position + 1);
        }
    }

    fn one_delivered(
        &mut self,
        client: usize,
        queue: usize,
        life: Life,
        found: &Found,
        now_ns: u64,
    ) -> usize {
        let delivery = &found.delivery;
        let identity = (delivery.session, delivery.position);
        let Some(&index) = self.by_identity.get(&identity) else {
            panic!("a message that nobody sent was delivered: {delivery:?}");
        };
        let message = &self.messages[index];
        assert_eq!(found.payload, message.payload, "the bytes of {identity:?}");
        assert_eq!(queue, message.queue, "{identity:?} came to the wrong queue");
        assert_ne!(
            self.queues[queue].stand,
            Stand::Gone,
            "{identity:?} came from a deleted queue"
        );
        assert_ne!(
            message.fate,
            Fate::Acked,
            "I5: {identity:?} came back after its ack was confirmed"
        );
        assert_ne!(
            message.fate,
            Fate::Refused,
            "{identity:?} was refused, and delivered"
        );
        assert!(
            !message.too_large,
            "{identity:?} is longer than its queue allows"
        );
        self.check_previous(index, now_ns);
        let message = &mut self.messages[index];
        if message.seen > 0 && !message.history_lost {
            assert!(
                delivery.redelivered,
                "{identity:?} was leased before, and does not say so"
            );
        }
        if message.seen == 0 && message.deaths == self.deaths {
            assert!(
                !delivery.redelivered,
                "I3: {identity:?} says that it was leased before"
            );
        }
        let (least, most) = message.attempts;
        let least = if message.history_lost { 0 } else { least };
        assert!(
            (least..=most).contains(&delivery.attempts),
            "{identity:?} shows {} attempts instead of {least} to {most}",
            delivery.attempts
        );
        message.attempts = (delivery.attempts, delivery.attempts);
        message.history_lost = false;
        message.seen += 1;
        if message.fate == Fate::Doubt && !message.unbound {
            message.fate = Fate::Owed;
        }
        let bound = life == Life::Alive && !message.unbound;
        message.lease = Some(self.leases.len());
        let before = self
            .by_delivery
            .insert((client, found.position), self.leases.len());
        assert_eq!(before, None);
        self.leases.push(Lease {
            client,
            entry: delivery.entry,
            position: found.position,
            message: index,
            deadline_ns: if bound { delivery.deadline_ns } else { 0 },
            extends: Vec::new(),
            taken: if life == Life::Mad {
                Taken::Unsure
            } else {
                Taken::Never
            },
            answered: None,
            answered_deaths: 0,
            named: 0,
            named_after: 0,
            lost: 0,
            last_end: 0,
            resolved: false,
        });
        index
    }

    /// The message is leased again: its lease before has ended, and counts as an
    /// attempt or not.
    fn check_previous(&mut self, index: usize, now_ns: u64) {
        let Some(lease) = self.messages[index].lease else {
            return;
        };
        let lease = &self.leases[lease];
        let message = &mut self.messages[index];
        let may_have_ended = lease.may_end_ns() <= now_ns;
        let identity = (message.session, message.position);
        let by_itself = match lease.taken {
            Taken::Never => (0, 0),
            Taken::InTime => (1, 1),
            Taken::Unsure => (0, 1),
        };
        let counted = match lease.answered {
            Some((Answered::Nack { counted, due_ns }, _)) => {
                if !may_have_ended && lease.answered_deaths == self.deaths {
                    assert!(
                        due_ns <= now_ns,
                        "{identity:?} came before its delay was over"
                    );
                }
                let counted = u32::from(counted);
                match may_have_ended {
                    true => (by_itself.0.min(counted), by_itself.1.max(counted)),
                    false => (counted, counted),
                }
            }
            _ => {
                assert!(
                    may_have_ended || message.unbound,
                    "I4: {identity:?} is leased twice: {lease:?}"
                );
                by_itself
            }
        };
        message.attempts.0 += counted.0;
        message.attempts.1 += counted.1;
    }

    pub fn lease_of(&self, client: usize, position: u64) -> usize {
        self.by_delivery[&(client, position)]
    }

    /// A delivery was taken.
    pub fn taken(&mut self, client: usize, position: u64, now_ns: u64) {
        let lease = self.lease_of(client, position);
        let lease = &mut self.leases[lease];
        lease.taken = match now_ns < lease.may_end_ns() {
            true => Taken::InTime,
            false => Taken::Unsure,
        };
    }

    /// A record that answers the lease was published.
    pub fn answered(&mut self, lease: usize, answer: Answered, end: u64) {
        let deaths = self.deaths;
        let lease = &mut self.leases[lease];
        lease.last_end = end;
        match lease.answered {
            None => {
                lease.named += 1;
                lease.answered = Some((answer, end));
                lease.answered_deaths = deaths;
            }
            Some(_) => lease.named_after += 1,
        }
    }

    /// An extend was published.
    pub fn extended(&mut self, lease: usize, duration_ms: u64, end: u64, now_ns: u64) {
        let lease = &mut self.leases[lease];
        lease.last_end = end;
        match lease.answered {
            None => lease.named += 1,
            Some(_) => lease.named_after += 1,
        }
        lease.extends.push((end, now_ns + duration_ms * 1_000_000));
    }

    /// The client has read that this lease was lost.
    pub fn lost(&mut self, client: usize, position: u64) {
        if let Some(&lease) = self.by_delivery.get(&(client, position)) {
            let lease = &mut self.leases[lease];
            lease.lost += 1;
            assert!(
                lease.lost <= lease.named + lease.named_after,
                "too many answers for {lease:?}"
            );
            return;
        }
        let left = self.forged.get_mut(&(client, position));
        let left = left.expect("an answer to a lease that the client never named");
        *left = left
            .checked_sub(1)
            .expect("a second answer to the same lease");
    }

    /// The client has read all answers to records before `stored`.
    pub fn resolve(&mut self, client: usize, stored: u64) {
        for index in 0..self.leases.len() {
            let lease = &mut self.leases[index];
            if lease.client != client || lease.resolved || lease.last_end > stored {
                continue;
            }
            if lease.lost == 0
                && let Some((_, until)) = lease.extends.pop()
            {
                lease.deadline_ns = lease.deadline_ns.max(until);
            }
            lease.extends.clear();
            let Some((answer, _)) = lease.answered else {
                continue;
            };
            lease.resolved = true;
            // Once lost, lost for all that follow; and what follows the first
            // answer is lost in any case.
            let held = lease.lost <= lease.named_after;
            // (A successor can't tell a second ack from the first if that was
            // committed, and its round not finished.)
            if held && lease.answered_deaths == self.deaths && !self.messages[lease.message].unbound
            {
                assert_eq!(
                    lease.lost, lease.named_after,
                    "a second answer was not said to be lost: {lease:?}"
                );
            }
            if answer == Answered::Ack {
                self.resolve_ack(index, held);
            }
        }
    }

    fn resolve_ack(&mut self, index: usize, held: bool) {
        let lease = &self.leases[index];
        let message = &mut self.messages[lease.message];
        if message.unbound || !held {
            return;
        }
        let identity = (message.session, message.position);
        assert_eq!(
            message.lease,
            Some(index),
            "I5: {identity:?} was leased again, and its old ack counted"
        );
        assert_ne!(message.fate, Fate::Refused);
        message.fate = Fate::Acked;
    }

    /// Whether the message has an ack whose fate is not known yet.
    pub fn has_open_ack(&self, message: &Message) -> bool {
        message.lease.is_some_and(|lease| {
            let lease = &self.leases[lease];
            !lease.resolved && matches!(lease.answered, Some((Answered::Ack, _)))
        })
    }

    /// The client reads no answers any more, and its leases end.
    pub fn client_died(&mut self, client: usize) {
        for index in 0..self.leases.len() {
            let lease = &mut self.leases[index];
            if lease.client != client {
                continue;
            }
            lease.end_any_time();
            let open = !lease.resolved && matches!(lease.answered, Some((Answered::Ack, _)));
            lease.resolved = true;
            let message = &mut self.messages[lease.message];
            if open && message.lease == Some(index) && message.fate == Fate::Owed {
                message.fate = Fate::Doubt;
            }
        }
    }

    /// The client wrote what no correct client writes: what it sent that is not
    /// known to be stored may be lost, and what it did with its leases is
    /// nobody's guess.
    pub fn client_broke(&mut self, client: usize, session: u64, stored: u64) {
        self.client_died(client);
        for lease in self
            .leases
            .iter_mut()
            .filter(|lease| lease.client == client)
        {
            lease.taken = Taken::Unsure;
        }
        for message in self.messages.iter_mut() {
            if message.session != session || message.end <= stored {
                continue;
            }
            message.unbound = true;
            if message.fate == Fate::Owed {
                message.fate = Fate::Doubt;
            }
            // A successor may not find what it sent, and then ends the lease.
            if let Some(lease) = message.lease {
                self.leases[lease].end_any_time();
            }
        }
    }

    pub fn refused(&mut self, session: u64, position: u64) {
        let index = self.by_identity.get(&(session, position));
        let message = &mut self.messages[*index.expect("an answer to a send that was never sent")];
        assert!(
            message.unbound || message.too_large,
            "session {session} position {position} was refused for no reason"
        );
        message.fate = Fate::Refused;
    }

    /// The queue's deletion was asked for.
    pub fn purge(&mut self, queue: usize) {
        for message in self
            .messages
            .iter_mut()
            .filter(|message| message.queue == queue)
        {
            message.unbound = true;
            if message.fate == Fate::Owed {
                message.fate = Fate::Doubt;
            }
            if let Some(lease) = message.lease {
                self.leases[lease].end_any_time();
            }
        }
    }

    /// The machine lost power. `synced` gives a session's confirmed cursor, and
    /// `ack_synced` that of a client.
    pub fn power_cut(&mut self, synced: impl Fn(u64) -> u64, ack_synced: impl Fn(usize) -> u64) {
        self.newest.clear();
        for index in 0..self.messages.len() {
            let message = &self.messages[index];
            let lease = message.lease.map(|lease| &self.leases[lease]);
            let answer = lease.and_then(|lease| Some((lease.client, lease.answered?.1)));
            let certain = match message.fate {
                Fate::Owed => !self.has_open_ack(message) && message.end <= synced(message.session),
                Fate::Acked => answer.is_some_and(|(client, end)| end <= ack_synced(client)),
                Fate::Doubt | Fate::Refused => true,
            };
            let message = &mut self.messages[index];
            message.history_lost = true;
            if !certain {
                message.fate = Fate::Doubt;
            }
        }
        for lease in &mut self.leases {
            lease.end_any_time();
            lease.resolved = true;
            // Nothing is known of its end, so nothing of how it counted.
            lease.taken = Taken::Unsure;
            lease.answered = lease
                .answered
                .filter(|(answer, _)| *answer == Answered::Ack);
        }
    }

    /// Leases of the client that nothing can have ended.
    pub fn live_leases(&self, client: usize, now_ns: u64) -> usize {
        let live = |lease: &&Lease| {
            lease.client == client && lease.answered.is_none() && lease.may_end_ns() > now_ns
        };
        self.leases.iter().filter(live).count()
    }

    pub fn record_lease(&self, lease: usize) -> record::Lease {
        let lease = &self.leases[lease];
        record::Lease {
            delivery_position: lease.position,
            entry: lease.entry,
        }
    }
}
