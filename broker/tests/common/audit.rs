//! Compares what producers and consumers have noted.

use super::broker::Broker;
use super::child::Process;
use super::tally::{Entry, Kind};
use std::collections::{HashMap, HashSet};

/// What came out of an audit.
#[derive(Debug, Default)]
pub struct Report {
    /// Sends that returned.
    pub accepted: u64,
    /// Messages that somebody took.
    pub delivered: u64,
    /// Deliveries that said that the message had been leased before.
    pub redelivered: u64,
    /// Deliveries of messages that somebody had taken before.
    pub repeated: u64,
    /// Sends of killed producers that did not return.
    pub in_doubt: u64,
}

/// What a message has been through.
#[derive(Default)]
struct Life {
    /// Deliveries that did not say that they were repeated.
    fresh: u32,
    taken: u32,
    acked: bool,
    /// A consumer was killed between taking it and noting its ack.
    ack_in_doubt: bool,
}

/// Ends the load on the queue `jobs`: the producers first, the consumers when all
/// is consumed; and compares.
#[track_caller]
pub fn finish(broker: &Broker, producers: &mut [Process], consumers: &mut [Process]) -> Report {
    for producer in producers.iter_mut().filter(|p| !p.was_killed()) {
        producer.finish();
    }
    broker.wait_drained("jobs");
    for consumer in consumers.iter_mut().filter(|c| !c.was_killed()) {
        consumer.finish();
    }
    let producers: Vec<&Process> = producers.iter().collect();
    let consumers: Vec<&Process> = consumers.iter().collect();
    audit(&producers, &consumers)
}

/// Compares the tallies when the queue is drained. Fails the test if an
/// accepted message was not settled by anybody (I1), was delivered twice
/// without saying so (I3) or after its ack (I5), was never sent, or overtook an
/// earlier one of its producer on the way to a consumer (I2).
#[track_caller]
pub fn audit(producers: &[&Process], consumers: &[&Process]) -> Report {
    let mut report = Report::default();
    let mut intended = HashSet::new();
    let mut accepted = HashMap::new();
    for producer in producers {
        let entries = producer.entries();
        let sends = entries.iter().filter(|entry| entry.kind == Kind::Intent);
        intended.extend(sends.map(Entry::message));
        let sends = entries.iter().filter(|entry| entry.kind == Kind::Accepted);
        let before = accepted.len();
        accepted.extend(sends.map(|entry| (entry.message(), entry.id)));
        let doubts =
            entries.iter().filter(|e| e.kind == Kind::Intent).count() - (accepted.len() - before);
        assert!(
            producer.was_killed() || doubts == 0,
            "{doubts} sends did not return"
        );
        report.in_doubt += doubts as u64;
    }
    report.accepted = accepted.len() as u64;

    let mut lives: HashMap<(u64, u64), Life> = HashMap::new();
    let mut acked_at = HashMap::new();
    let mut taken_at = Vec::new();
    for consumer in consumers {
        let entries = consumer.entries();
        check_order(&entries);
        // Taken, and not acked yet.
        let mut open = Vec::new();
        for entry in &entries {
            match entry.kind {
                Kind::Damaged => panic!("a damaged payload: {entry:?}"),
                Kind::Taken => {
                    assert!(intended.contains(&entry.message()), "never sent: {entry:?}");
                    let id = accepted.get(&entry.message());
                    assert!(
                        id.is_none_or(|id| *id == entry.id),
                        "another identity: {entry:?}"
                    );
                    let life = lives.entry(entry.message()).or_default();
                    life.taken += 1;
                    life.fresh += u32::from(!entry.redelivered);
                    report.redelivered += u64::from(entry.redelivered);
                    taken_at.push((entry.message(), entry.at_ns));
                    open.push(entry.message());
                }
                Kind::Acked => {
                    lives.entry(entry.message()).or_default().acked = true;
                    acked_at.insert(entry.message(), entry.at_ns);
                    open.retain(|message| *message != entry.message());
                }
                _ => {}
            }
        }
        for message in open.iter().rev().take(consumer.acks_in_doubt_max()) {
            lives.entry(*message).or_default().ack_in_doubt = true;
        }
    }
    report.delivered = lives.len() as u64;
    report.repeated = lives
        .values()
        .map(|life| u64::from(life.taken.max(1) - 1))
        .sum();

    let fault = |what: &str, faulty: &mut dyn Iterator<Item = (u64, u64)>| {
        let mut faulty: Vec<(u64, u64)> = faulty.collect();
        faulty.sort_unstable();
        let first = &faulty[..faulty.len().min(10)];
        assert!(
            faulty.is_empty(),
            "{} {what}: {first:?}; {report:?}",
            faulty.len()
        );
    };
    let unsettled = |message: &&(u64, u64)| {
        let life = lives.get(*message);
        !life.is_some_and(|life| life.acked || life.ack_in_doubt)
    };
    fault(
        "accepted and not settled",
        &mut accepted.keys().filter(unsettled).copied(),
    );
    let doubled = lives.iter().filter(|(_, life)| life.fresh > 1);
    fault(
        "delivered twice as new",
        &mut doubled.map(|(message, _)| *message),
    );
    let late =
        |(message, at): &&((u64, u64), u64)| acked_at.get(message).is_some_and(|acked| acked < at);
    fault(
        "delivered after the ack",
        &mut taken_at.iter().filter(late).map(|(message, _)| *message),
    );
    report
}

/// Of one producer's messages, a consumer gets the earlier first, unless one of
/// them was redelivered.
#[track_caller]
fn check_order(entries: &[Entry]) {
    let mut last: HashMap<u64, u64> = HashMap::new();
    for entry in entries {
        if entry.kind == Kind::Taken && !entry.redelivered {
            let before = last.insert(entry.producer, entry.number);
            assert!(
                before.is_none_or(|before| before < entry.number),
                "out of order after {before:?}: {entry:?}"
            );
        }
    }
}

/// The messages noted before the last entry of this kind: those that are
/// confirmed.
pub fn settled_after(entries: &[Entry], what: Kind, confirmation: Kind) -> HashSet<(u64, u64)> {
    let end = entries.iter().rposition(|entry| entry.kind == confirmation);
    let before = &entries[..end.unwrap_or(0)];
    let noted = before.iter().filter(|entry| entry.kind == what);
    noted.map(Entry::message).collect()
}
