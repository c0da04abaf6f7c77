//! Compares the tallies of an epoch, at whose end everything was consumed.

use super::common::{Entry, Kind, Process};
use std::collections::{HashMap, HashSet};
use std::fmt;

/// A consumer that was killed.
pub struct Death {
    /// Its place in the list.
    pub consumer: usize,
    pub at_ns: u64,
    /// Nobody else was disturbed around it.
    pub quiet: bool,
}

/// What an epoch, or several, came to.
#[derive(Debug, Default)]
pub struct Verdict {
    accepted: u64,
    in_doubt: u64,
    deliveries: u64,
    redeliveries: u64,
    leases_lost: u64,
    /// From the death of a holder to the next delivery, in nanoseconds.
    delays: Vec<u64>,
}

impl Verdict {
    pub fn add(&mut self, other: Verdict) {
        self.accepted += other.accepted;
        self.in_doubt += other.in_doubt;
        self.deliveries += other.deliveries;
        self.redeliveries += other.redeliveries;
        self.leases_lost += other.leases_lost;
        self.delays.extend(other.delays);
        self.delays.sort_unstable();
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.delays.len();
        let ms = |at: usize| self.delays.get(at).map_or(0.0, |ns| *ns as f64 / 1e6);
        let late = self.delays.iter().filter(|ns| **ns > 100_000_000).count();
        write!(
            f,
            "{} accepted, {} in doubt, {} deliveries, {} again, {} leases lost; held by {count} dead \
             holders' leases and back after {:.1} ms (median), {:.1} (99 %), {:.1} (most), {late} after \
             more than 100 ms",
            self.accepted,
            self.in_doubt,
            self.deliveries,
            self.redeliveries,
            self.leases_lost,
            ms(count / 2),
            ms(count * 99 / 100),
            ms(count.saturating_sub(1)),
        )
    }
}

type Id = (u64, u64);

/// A delivery, from its taking on.
#[derive(Debug)]
struct Holding {
    consumer: usize,
    taken_ns: u64,
    /// When its lease ends by time, about; it may have been extended.
    deadline_ns: u64,
    /// The holder gave it up then: sent it back, acked it or died.
    until_ns: u64,
}

/// What a message has been through.
#[derive(Debug, Default)]
struct Life {
    /// Deliveries that did not say that they were repeated.
    fresh: u32,
    /// Acked: when that was confirmed, if it was.
    confirmed_ns: Option<u64>,
    /// Acked without a confirmation that says so.
    ack_in_doubt: bool,
    holdings: Vec<Holding>,
}

/// What is known of an epoch.
pub struct Tallies<'a> {
    pub producers: &'a [Process],
    pub consumers: &'a [Process],
    pub deaths: &'a [Death],
    /// When drains began and were over: somewhere between all leases ended.
    pub drains: &'a [(u64, u64)],
}

/// Fails if the tallies contradict the invariants.
#[track_caller]
pub fn judge(tallies: &Tallies<'_>) -> Verdict {
    let Tallies {
        producers,
        consumers,
        deaths,
        ..
    } = *tallies;
    let mut verdict = Verdict::default();
    let sent = Sent::of(producers, &mut verdict);
    let died: HashMap<usize, u64> = deaths.iter().map(|d| (d.consumer, d.at_ns)).collect();
    let mut lives: HashMap<Id, Life> = HashMap::new();
    let mut unknown_empties = 0;
    for (number, consumer) in consumers.iter().enumerate() {
        let entries = consumer.entries();
        // Killed with all the others, the moment is not known: it ends with the last
        // entry, or later.
        let end_ns = died.get(&number).copied();
        let end_ns = end_ns.or(consumer
            .was_killed()
            .then(|| entries.last().map_or(0, |e| e.at_ns)));
        note_holdings(number, &entries, end_ns, &mut lives, &mut verdict);
        note_acks(consumer.was_killed(), &entries, &mut lives);
        sent.check_order(&entries);
        unknown_empties += sent.check_known(&entries);
    }
    // I1: what nobody knows of can only be what was in doubt.
    assert!(
        unknown_empties <= sent.empties_in_doubt,
        "{unknown_empties} empty messages that nobody sent"
    );
    for id in sent.accepted.keys() {
        let life = lives.get(id);
        let settled = life.is_some_and(|l| l.confirmed_ns.is_some() || l.ack_in_doubt);
        assert!(
            settled,
            "accepted, and lost: {id:?}, {:?}",
            sent.accepted[id]
        );
    }
    for (id, life) in &lives {
        // I3
        assert!(
            life.fresh <= 1,
            "delivered {} times as new: {id:?}",
            life.fresh
        );
        check_holdings(*id, life, tallies);
    }
    measure_delays(deaths, &lives, &mut verdict);
    verdict
}

/// What producers have noted.
struct Sent {
    /// Producer and number of each accepted message.
    accepted: HashMap<Id, (u64, u64)>,
    /// Those that may be there, with their identity if it is known.
    possible: HashMap<(u64, u64), Option<Id>>,
    empties_in_doubt: usize,
}

impl Sent {
    fn of(producers: &[Process], verdict: &mut Verdict) -> Sent {
        let mut sent = Sent {
            accepted: HashMap::new(),
            possible: HashMap::new(),
            empties_in_doubt: 0,
        };
        for producer in producers {
            let entries = producer.entries();
            let mut open: HashMap<u64, Entry> = HashMap::new();
            for entry in entries {
                match entry.kind {
                    Kind::Intent => _ = open.insert(entry.number, entry),
                    Kind::Withdrawn => _ = open.remove(&entry.number),
                    Kind::Accepted => {
                        open.remove(&entry.number);
                        let before = sent.accepted.insert(entry.id, entry.message());
                        assert!(before.is_none(), "two messages are {:?}", entry.id);
                        sent.possible.insert(entry.message(), Some(entry.id));
                    }
                    _ => {}
                }
            }
            for entry in open.into_values() {
                verdict.in_doubt += 1;
                sent.possible.insert(entry.message(), None);
                sent.empties_in_doubt += usize::from(entry.attempts == 0);
            }
        }
        verdict.accepted = sent.accepted.len() as u64;
        sent
    }

    /// Each delivery is of something that was sent. Counts the empty ones of which
    /// that is not known.
    fn check_known(&self, entries: &[Entry]) -> usize {
        let mut unknown = HashSet::new();
        for entry in entries {
            match entry.kind {
                Kind::Damaged => panic!("a damaged payload: {entry:?}"),
                Kind::Taken
                    if entry.producer == u64::MAX && self.accepted.contains_key(&entry.id) => {}
                Kind::Taken if entry.producer == u64::MAX => _ = unknown.insert(entry.id),
                Kind::Taken => match self.possible.get(&entry.message()) {
                    None => panic!("nobody sent this, or its send had failed: {entry:?}"),
                    Some(id) => assert!(id.is_none_or(|id| id == entry.id), "{entry:?}"),
                },
                _ => {}
            }
        }
        unknown.len()
    }

    /// I2: of one session's messages a consumer gets the earlier first, unless one
    /// of them was leased before.
    fn check_order(&self, entries: &[Entry]) {
        let mut last: HashMap<u64, u64> = HashMap::new();
        for entry in entries {
            if entry.kind == Kind::Taken && !entry.redelivered {
                let (session, position) = entry.id;
                let before = last.insert(session, position);
                assert!(
                    before.is_none_or(|before| before < position),
                    "out of order after {before:?}: {entry:?}"
                );
            }
        }
    }
}

fn note_holdings(
    consumer: usize,
    entries: &[Entry],
    end_ns: Option<u64>,
    lives: &mut HashMap<Id, Life>,
    verdict: &mut Verdict,
) {
    for entry in entries {
        match entry.kind {
            Kind::Taken => {
                verdict.deliveries += 1;
                verdict.redeliveries += u64::from(entry.redelivered);
                let life = lives.entry(entry.id).or_default();
                life.fresh += u32::from(!entry.redelivered);
                life.holdings.push(Holding {
                    consumer,
                    taken_ns: entry.at_ns,
                    deadline_ns: entry.deadline_ns,
                    until_ns: end_ns.unwrap_or(u64::MAX),
                });
            }
            Kind::SentBack | Kind::Acked => {
                let holdings = &mut lives.get_mut(&entry.id).unwrap().holdings;
                let own = holdings.iter_mut().rfind(|h| h.consumer == consumer);
                own.unwrap().until_ns = entry.at_ns;
            }
            Kind::LeasesLost => verdict.leases_lost += entry.number,
            _ => {}
        }
    }
}

/// Which acks count for sure, and from when on.
fn note_acks(killed: bool, entries: &[Entry], lives: &mut HashMap<Id, Life>) {
    let mut unconfirmed: Vec<Id> = Vec::new();
    for entry in entries {
        match entry.kind {
            Kind::Acked => unconfirmed.push(entry.id),
            Kind::AcksConfirmed => {
                for id in unconfirmed.drain(..) {
                    lives.get_mut(&id).unwrap().confirmed_ns = Some(entry.at_ns);
                }
            }
            // It does not say which of them.
            Kind::LeasesLost => {
                for id in unconfirmed.drain(..) {
                    lives.get_mut(&id).unwrap().ack_in_doubt = true;
                }
            }
            _ => {}
        }
    }
    for id in unconfirmed {
        lives.get_mut(&id).unwrap().ack_in_doubt = true;
    }
    if killed {
        // Between an ack and its note: at most a run.
        let mut open: Vec<Id> = Vec::new();
        for entry in entries {
            match entry.kind {
                Kind::Taken => open.push(entry.id),
                Kind::Acked | Kind::SentBack => open.retain(|id| *id != entry.id),
                _ => {}
            }
        }
        for id in open {
            lives.get_mut(&id).unwrap().ack_in_doubt = true;
        }
    }
}

#[track_caller]
fn check_holdings(id: Id, life: &Life, tallies: &Tallies<'_>) {
    // Of the clocks that clients read.
    const COARSE_NS: u64 = 10_000_000;
    // One that was stopped between taking a message and noting it may find that its
    // time is over: it holds nothing.
    let valid = |holding: &&Holding| holding.deadline_ns > holding.taken_ns;
    for holding in life.holdings.iter().filter(valid) {
        // I5: a confirmed ack is the end.
        assert!(
            life.confirmed_ns.is_none_or(|at| holding.taken_ns <= at),
            "taken by {} at {} after its ack was confirmed: {id:?}, {life:?}",
            holding.consumer,
            holding.taken_ns,
        );
        // I4: two held it at once, and the first one's time was not over.
        let drain = tallies
            .drains
            .iter()
            .find(|drain| drain.1 > holding.taken_ns);
        let until_ns = holding
            .until_ns
            .min(drain.map_or(u64::MAX, |drain| drain.0));
        let until_ns = until_ns.min(holding.deadline_ns - COARSE_NS);
        let mut others = life.holdings.iter().filter(valid);
        let other =
            others.find(|other| holding.taken_ns < other.taken_ns && other.taken_ns < until_ns);
        assert!(
            other.is_none(),
            "{id:?} was held by {} from {} to {} and by {} from {}",
            holding.consumer,
            holding.taken_ns,
            holding.until_ns,
            other.unwrap().consumer,
            other.unwrap().taken_ns,
        );
    }
}

/// From a holder's death to the next delivery of what it held.
fn measure_delays(deaths: &[Death], lives: &HashMap<Id, Life>, verdict: &mut Verdict) {
    for death in deaths.iter().filter(|death| death.quiet) {
        for life in lives.values() {
            let held = life
                .holdings
                .iter()
                .any(|h| h.consumer == death.consumer && h.until_ns == death.at_ns);
            if !held {
                continue;
            }
            let next = life.holdings.iter().map(|h| h.taken_ns);
            let next = next.filter(|taken| *taken > death.at_ns).min();
            verdict.delays.extend(next.map(|taken| taken - death.at_ns));
        }
    }
}
