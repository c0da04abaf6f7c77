//! What a successor makes of store, lease rows and rings (I10): every kind of
//! row, with its send committed or not, its end committed or not, and its holder
//! there or gone.

use super::bench::{Bench, Got, LEASE_NS, LINGER};
use crate::hub::{Close, LeaseState, SessionSlot};
use ringmain::control::Purpose;

/// How the predecessor's lease stood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Leased,
    Acked,
    Nacked,
    Expired,
    Returned,
}

/// How far its send had come when the predecessor died.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sent {
    InRing,
    /// Closed in a round that was lost.
    Closed,
    Stored,
}

struct Left {
    bench: Bench,
    consumer: SessionSlot,
    got: Got,
}

/// A message `a`, leased and ended as wanted, and the predecessor dead.
fn left(end: End, sent: Sent) -> Left {
    let (mut bench, producer, consumer) = Bench::with_queue(1);
    bench.send(producer, "a");
    if sent == Sent::Stored {
        bench.round(Close::All);
    }
    let got = bench.got(consumer).remove(0);
    bench.take(consumer, std::slice::from_ref(&got));
    if sent == Sent::Closed {
        bench.close(Close::All);
    }
    // The returned message must not go out again before the death.
    bench.port.room.insert(consumer, 0);
    match end {
        End::Leased => {}
        End::Acked => _ = bench.ack(consumer, &got),
        End::Nacked => bench.nack(consumer, &got, 0, true),
        End::Expired => bench.wait(LEASE_NS),
        End::Returned => bench.end(consumer),
    }
    bench.dispatch();
    let slots = bench.restart();
    Left {
        consumer: slots[&consumer],
        bench,
        got,
    }
}

const SENT: [Sent; 3] = [Sent::InRing, Sent::Closed, Sent::Stored];

#[test]
fn a_live_lease_lives_on_and_its_holder_can_ack() {
    for sent in SENT {
        let Left {
            mut bench,
            consumer,
            got,
            ..
        } = left(End::Leased, sent);
        assert_eq!(bench.got(consumer), [], "I4, {sent:?}");
        assert_eq!(bench.hub.totals(), (1, 1, 1));
        bench.ack(consumer, &got);
        assert_eq!(bench.answers(consumer), []);
        bench.check_empty();
    }
}

#[test]
fn a_live_lease_still_ends_at_its_deadline() {
    for sent in SENT {
        let Left {
            mut bench,
            consumer,
            ..
        } = left(End::Leased, sent);
        bench.wait(LEASE_NS);
        let again = bench.got(consumer);
        assert_eq!(
            (again[0].text.as_str(), again[0].attempts),
            ("a", 1),
            "{sent:?}"
        );
        bench.ack(consumer, &again[0]);
        bench.check_empty();
    }
}

/// I5
#[test]
fn an_acked_message_does_not_come_back_and_its_ack_is_not_said_to_be_late() {
    for sent in SENT {
        let Left {
            mut bench,
            consumer,
            ..
        } = left(End::Acked, sent);
        assert_eq!(bench.got(consumer), [], "{sent:?}");
        assert_eq!(bench.answers(consumer), [], "{sent:?}");
        assert_eq!(bench.hub.totals(), (1, 0, 0));
        bench.check_empty();
    }
}

#[test]
fn a_second_ack_after_the_replay_is_late() {
    let Left {
        mut bench,
        consumer,
        got,
        ..
    } = left(End::Acked, Sent::InRing);
    bench.ack(consumer, &got);
    assert_eq!(bench.answers(consumer).len(), 1);
    bench.check_empty();
}

/// I1
#[test]
fn a_message_that_had_gone_back_is_leased_again_and_its_attempt_counts_once() {
    for sent in SENT {
        for end in [End::Nacked, End::Expired, End::Returned] {
            let Left {
                mut bench,
                consumer,
                ..
            } = left(end, sent);
            assert_eq!(bench.answers(consumer), [], "{end:?} {sent:?}");
            let fresh = bench.consumer("jobs", 1);
            bench.end(consumer);
            let again = bench.got(fresh);
            let seen: Vec<_> = again
                .iter()
                .map(|got| (got.text.as_str(), got.attempts, got.redelivered))
                .collect();
            assert_eq!(seen, [("a", 1, true)], "{end:?} {sent:?}");
            bench.ack(fresh, &again[0]);
            bench.check_empty();
        }
    }
}

/// The holder's session was gone with all it had.
#[test]
fn a_row_of_a_holder_that_is_gone_counts_as_returned() {
    for sent in SENT {
        let (mut bench, producer, consumer) = Bench::with_queue(1);
        bench.send(producer, "a");
        if sent == Sent::Stored {
            bench.round(Close::All);
        }
        bench.got(consumer);
        bench.round(LINGER);
        for row in bench.port.rows.values_mut() {
            row.holder = 999;
        }
        bench.restart();
        assert!(
            bench
                .port
                .rows
                .values()
                .all(|row| row.state == LeaseState::Returned)
        );
        let fresh = bench.consumer("jobs", 1);
        bench.end(consumer);
        let got = bench.got(fresh);
        assert_eq!(
            (got[0].text.as_str(), got[0].redelivered),
            ("a", true),
            "{sent:?}"
        );
    }
}

/// The successor may die too, at any point after it has begun.
#[test]
fn restarting_twice_is_as_restarting_once() {
    for sent in SENT {
        for end in [
            End::Leased,
            End::Acked,
            End::Nacked,
            End::Expired,
            End::Returned,
        ] {
            let Left {
                mut bench,
                consumer,
                got,
                ..
            } = left(end, sent);
            let slots = bench.restart();
            bench.close(Close::All);
            let slots_again = bench.restart();
            let consumer = slots_again[&slots[&consumer]];
            match end {
                End::Leased => _ = bench.ack(consumer, &got),
                End::Acked => assert_eq!(bench.got(consumer), []),
                End::Nacked | End::Expired | End::Returned => {
                    let fresh = bench.consumer("jobs", 1);
                    bench.end(consumer);
                    let again = bench.got(fresh);
                    assert_eq!((again.len(), again[0].attempts), (1, 1), "{end:?} {sent:?}");
                    bench.ack(fresh, &again[0]);
                }
            }
            bench.check_empty();
        }
    }
}

/// A position that a lost round gave must not outlive it: another message may
/// get it.
#[test]
fn the_position_of_a_lost_round_is_forgotten() {
    let Left { bench, .. } = left(End::Acked, Sent::Closed);
    assert!(bench.port.rows.values().all(|row| row.queue_position == 0));
}

/// I2
#[test]
fn what_was_not_leased_keeps_its_order_behind_what_was() {
    let (mut bench, producer, consumer) = Bench::with_queue(2);
    for text in ["a", "b"] {
        bench.send(producer, text);
    }
    bench.round(Close::All);
    for text in ["c", "d", "e"] {
        bench.send(producer, text);
    }
    bench.got(consumer);
    let slots = bench.restart();
    let (producer, consumer) = (slots[&producer], slots[&consumer]);
    bench.send(producer, "f");
    bench.end(consumer);
    let fresh = bench.consumer("jobs", 100);
    assert_eq!(bench.texts(fresh), ["a", "b", "c", "d", "e", "f"]);
}

/// The gap grows over messages that were leased before the restart.
#[test]
fn a_leased_message_behind_the_backlog_is_delivered_once() {
    let mut bench = Bench::with_cache(0);
    bench.create("jobs");
    let producer = bench.producer("jobs");
    let consumer = bench.consumer("jobs", 2);
    bench.send(producer, "a");
    bench.send(producer, "b");
    let got = bench.got(consumer);
    bench.round(LINGER);
    bench.send(producer, "c");
    bench.send(producer, "d");
    // Stored: "x", whose lease is none of the consumer's.
    let other = bench.producer("jobs");
    bench.send(other, "x");
    let slots = bench.restart();
    let consumer = slots[&consumer];
    bench.round(Close::All);
    bench.restart();
    bench.round(Close::All);
    assert_eq!(got.len(), 2);
    let fresh = bench.consumer("jobs", 100);
    let texts = bench.texts(fresh);
    assert_eq!(texts, ["c", "d", "x"]);
    for got in &got {
        bench.ack(consumer, got);
    }
    bench.wait(LEASE_NS / 2);
    assert_eq!(bench.texts(fresh), [""; 0]);
}

/// A lease of a send that no ring has any more.
#[test]
fn leases_of_a_broken_sender_end_with_its_session() {
    let (mut bench, producer, consumer) = Bench::with_queue(2);
    bench.send(producer, "a");
    let got = bench.got(consumer);
    bench.forget_records(producer);
    let slots = bench.restart();
    bench.nack(slots[&consumer], &got[0], 5, true);
    bench.end(slots[&producer]);
    bench.wait(LEASE_NS);
    assert_eq!(bench.got(slots[&consumer]), []);
    bench.check_empty();
}

/// A session that is short of room for answers is replayed later.
#[test]
fn an_ack_that_is_replayed_late_is_not_said_to_be_late() {
    let (mut bench, producer, consumer) = Bench::with_queue(2);
    for text in ["a", "b"] {
        bench.send(producer, text);
    }
    let got = bench.got(consumer);
    bench.ack(consumer, &got[0]);
    bench.stalled = Some(consumer);
    let slots = bench.restart();
    assert_eq!(slots[&consumer], consumer);
    bench.round(Close::All);
    assert_eq!(
        bench.stored(),
        ["b"],
        "the first is settled, as its row says"
    );
    bench.catch_up(consumer);
    assert_eq!(bench.answers(consumer), []);
    bench.ack(consumer, &got[0]);
    assert_eq!(bench.answers(consumer).len(), 1, "this one is late");
    bench.ack(consumer, &got[1]);
    bench.check_empty();
}

/// The row of an earlier lease may outlast that of a later one, which counts.
#[test]
fn attempts_are_not_forgotten_while_an_earlier_end_is_not_committed() {
    let (mut bench, producer, other) = Bench::with_queue(1);
    let both = bench.producer("jobs");
    bench.attach(both, "jobs", Purpose::Consume, 1);
    bench.port.room.insert(other, 0);
    bench.send(producer, "a");
    bench.round(Close::All);
    let first = bench.got(both).remove(0);
    // The nack is behind a send that no round takes.
    bench.send(both, "young");
    bench.port.room = [(both, 0), (other, 1)].into();
    bench.hub.unblock(other);
    bench.nack(both, &first, 0, true);
    let second = bench.got(other);
    assert_eq!((second[0].text.as_str(), second[0].attempts), ("a", 1));
    bench.take(other, &second);
    bench.wait(LEASE_NS);
    bench.round(Close::SettledOnly);
    assert_eq!(bench.committed(both), 0);
    let slots = bench.restart();
    bench.round(Close::SettledOnly);
    let mut got = bench.got(slots[&both]);
    got.extend(bench.got(slots[&other]));
    let again = got.iter().find(|got| got.text == "a").unwrap();
    assert_eq!(again.attempts, 2);
}

/// I5: a nack can wait behind sends that a full disk holds up, while the message is
/// delivered again, and its ack stored. Its row then says nothing of it any more.
#[test]
fn a_message_whose_ack_is_stored_stays_settled_though_an_earlier_nack_is_not() {
    let (mut bench, producer, first) = Bench::with_queue(1);
    bench.create("other");
    bench.attach(first, "other", Purpose::Produce, 0);
    bench.send(producer, "a");
    bench.round(Close::All);
    bench.dispatch();
    let got = bench.got(first).remove(0);
    bench.take(first, std::slice::from_ref(&got));
    bench.send_to(first, 1, "held up");
    bench.port.room.insert(first, 0);
    bench.nack(first, &got, 0, true);
    let second = bench.consumer("jobs", 1);
    bench.dispatch();
    let again = bench.got(second).remove(0);
    assert!(again.text == "a");
    bench.ack(second, &again);
    bench.round(Close::SettledOnly);
    bench.restart();
    bench.dispatch();
    assert_eq!(bench.hub.totals().1, 1, "only what is held up");
}
