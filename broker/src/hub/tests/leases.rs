//! Who gets what, and how a lease ends.

use super::bench::{Bench, LEASE_NS};
use crate::hub::{Close, LeaseState};
use ringmain::record::{self, Answer};

/// I2
#[test]
fn messages_of_a_session_are_leased_in_order() {
    let (mut bench, producer, consumer) = Bench::with_queue(10);
    for text in ["a", "b", "c"] {
        bench.send(producer, text);
    }
    assert_eq!(bench.texts(consumer), ["a", "b", "c"]);
}

/// I3, I4
#[test]
fn a_message_goes_to_one_consumer_once() {
    let (mut bench, producer, first) = Bench::with_queue(10);
    let second = bench.consumer("jobs", 10);
    bench.send(producer, "a");
    let mut texts = bench.texts(first);
    texts.extend(bench.texts(second));
    assert_eq!(texts, ["a"]);
    bench.round(Close::All);
    assert_eq!(bench.texts(first).len() + bench.texts(second).len(), 0);
}

#[test]
fn a_consumer_has_no_more_leases_than_its_window() {
    let (mut bench, producer, consumer) = Bench::with_queue(2);
    for text in ["a", "b", "c", "d"] {
        bench.send(producer, text);
    }
    let got = bench.got(consumer);
    assert_eq!(got.len(), 2);
    bench.ack(consumer, &got[0]);
    assert_eq!(bench.texts(consumer), ["c"]);
    bench.nack(consumer, &got[1], 0, true);
    assert_eq!(bench.texts(consumer), ["b"]);
}

#[test]
fn the_least_loaded_consumer_is_served_first() {
    let (mut bench, producer, first) = Bench::with_queue(10);
    for text in ["a", "b", "c"] {
        bench.send(producer, text);
    }
    assert_eq!(bench.texts(first).len(), 3);
    let second = bench.consumer("jobs", 10);
    for text in ["d", "e", "f", "g", "h"] {
        bench.send(producer, text);
    }
    assert_eq!(bench.texts(second), ["d", "e", "f", "h"]);
    assert_eq!(bench.texts(first), ["g"]);
}

#[test]
fn a_consumer_without_room_is_passed_over_until_it_has_some() {
    let (mut bench, producer, first) = Bench::with_queue(10);
    let second = bench.consumer("jobs", 1);
    bench.port.room.insert(first, 0);
    bench.send(producer, "a");
    bench.send(producer, "b");
    assert_eq!(bench.texts(second), ["a"]);
    assert_eq!(bench.hub.take_blocked(), [first]);
    bench.port.room.clear();
    assert_eq!(bench.texts(first), [""; 0]);
    bench.hub.unblock(first);
    assert_eq!(bench.texts(first), ["b"]);
}

/// I1
#[test]
fn an_acked_message_is_finished_with() {
    let (mut bench, producer, consumer) = Bench::with_queue(10);
    bench.send(producer, "a");
    let got = bench.got(consumer);
    bench.ack(consumer, &got[0]);
    bench.wait(10 * LEASE_NS);
    assert_eq!(bench.got(consumer), []);
    bench.check_empty();
}

#[test]
fn a_nacked_message_comes_back_before_newer_ones() {
    let (mut bench, producer, consumer) = Bench::with_queue(2);
    for text in ["a", "b", "c"] {
        bench.send(producer, text);
    }
    let got = bench.got(consumer);
    bench.take(consumer, &got);
    bench.nack(consumer, &got[0], 0, true);
    let again = bench.got(consumer);
    assert_eq!(
        (
            again[0].text.as_str(),
            again[0].attempts,
            again[0].redelivered
        ),
        ("a", 1, true)
    );
}

#[test]
fn a_nack_that_was_not_handed_out_is_no_attempt() {
    let (mut bench, producer, consumer) = Bench::with_queue(2);
    bench.send(producer, "a");
    let got = bench.got(consumer);
    bench.nack(consumer, &got[0], 0, false);
    let again = bench.got(consumer);
    assert_eq!((again[0].attempts, again[0].redelivered), (0, true));
}

#[test]
fn a_nacked_message_waits_for_its_delay() {
    let (mut bench, producer, consumer) = Bench::with_queue(2);
    bench.send(producer, "a");
    let got = bench.got(consumer);
    bench.nack(consumer, &got[0], 5, true);
    assert_eq!(bench.hub.next_timer_ns(), Some(bench.now_ns + 5_000_000));
    bench.wait(4_999_999);
    assert_eq!(bench.got(consumer), []);
    bench.wait(1);
    assert_eq!(bench.texts(consumer), ["a"]);
}

#[test]
fn a_lease_ends_at_its_deadline_and_counts_if_it_was_taken() {
    let (mut bench, producer, consumer) = Bench::with_queue(2);
    bench.send(producer, "a");
    bench.send(producer, "b");
    let got = bench.got(consumer);
    bench.take(consumer, &got[..1]);
    bench.wait(LEASE_NS - 1);
    assert_eq!(bench.got(consumer), []);
    bench.wait(1);
    let fresh = bench.consumer("jobs", 2);
    let got = bench.got(fresh);
    let seen: Vec<_> = got
        .iter()
        .map(|got| (got.text.as_str(), got.attempts, got.redelivered))
        .collect();
    assert_eq!(seen, [("a", 1, true), ("b", 0, true)]);
    assert!(
        bench
            .port
            .rows
            .values()
            .any(|row| row.state == LeaseState::Expired)
    );
}

#[test]
fn an_extended_lease_lasts_longer_and_never_shorter() {
    let (mut bench, producer, consumer) = Bench::with_queue(1);
    bench.send(producer, "a");
    let got = bench.got(consumer);
    bench.take(consumer, &got);
    bench.extend(consumer, &got[0], 300);
    bench.extend(consumer, &got[0], 0);
    bench.wait(LEASE_NS * 3 - 1);
    assert_eq!(bench.got(consumer), []);
    assert_eq!(bench.port.rows[&got[0].entry].deadline_ns, bench.now_ns + 1);
    bench.wait(LEASE_NS);
    assert_eq!(bench.texts(consumer), ["a"]);
}

/// I6
#[test]
fn the_end_of_a_session_returns_its_leases_in_order() {
    let (mut bench, producer, first) = Bench::with_queue(10);
    for text in ["a", "b", "c"] {
        bench.send(producer, text);
    }
    let got = bench.got(first);
    bench.ack(first, &got[1]);
    bench.take(first, &got[..1]);
    bench.end(first);
    let second = bench.consumer("jobs", 10);
    let got = bench.got(second);
    let seen: Vec<_> = got
        .iter()
        .map(|got| (got.text.as_str(), got.attempts))
        .collect();
    assert_eq!(seen, [("a", 1), ("c", 0)]);
    assert!(got.iter().all(|got| got.redelivered));
}

/// I8: whatever is claimed of a lease, only its holder can end it, and once.
#[test]
fn forged_foreign_double_and_late_acks_are_said_to_be_lost() {
    let (mut bench, producer, holder) = Bench::with_queue(1);
    let other = bench.consumer("jobs", 1);
    bench.send(producer, "a");
    let got = bench.got(holder).remove(0);
    let lost = |delivery_position| Answer::LeaseLost { delivery_position };
    let lease = got.lease();
    // Foreign; an entry beyond the table; entry 0; a free entry; another position.
    let forged = [
        (other, lease),
        (
            holder,
            record::Lease {
                entry: u32::MAX,
                ..lease
            },
        ),
        (holder, record::Lease { entry: 0, ..lease }),
        (
            holder,
            record::Lease {
                entry: lease.entry + 1,
                ..lease
            },
        ),
        (
            holder,
            record::Lease {
                delivery_position: 640,
                ..lease
            },
        ),
    ];
    for (slot, lease) in forged {
        bench.ack_lease(slot, lease);
        assert_eq!(bench.answers(slot), [lost(lease.delivery_position)]);
        bench.extend(other, &got, 1000);
        assert_eq!(bench.answers(other), [lost(0)]);
    }
    bench.ack(holder, &got);
    assert_eq!(bench.answers(holder), []);
    bench.ack(holder, &got);
    assert_eq!(bench.answers(holder), [lost(0)]);
    bench.send(producer, "b");
    let late = bench.got(holder).remove(0);
    bench.wait(LEASE_NS);
    bench.ack(holder, &late);
    assert_eq!(bench.answers(holder), [lost(late.position)]);
    bench.pump();
    let leased = bench.hub.totals().2;
    assert_eq!(
        leased, 1,
        "I1: the message whose ack was late is leased again"
    );
}

#[test]
fn with_every_lease_entry_in_use_delivery_goes_on_after_the_next_round() {
    let (mut bench, producer, consumer) = Bench::with_queue(100);
    bench.port.entries_max = 4;
    for text in ["a", "b", "c", "d", "e"] {
        bench.send(producer, text);
    }
    let got = bench.got(consumer);
    assert_eq!(got.len(), 3);
    assert!(bench.hub.close_wanted());
    bench.ack(consumer, &got[0]);
    assert_eq!(
        bench.texts(consumer),
        [""; 0],
        "an entry is not free before its end is committed"
    );
    bench.round(Close::All);
    assert_eq!(bench.texts(consumer), ["d"]);
}

#[test]
fn a_stuck_consumer_gets_no_more_until_it_is_heard_of() {
    let (mut bench, producer, consumer) = Bench::with_queue(1);
    bench.send(producer, "a");
    let got = bench.got(consumer);
    bench.wait(LEASE_NS);
    assert_eq!(bench.got(consumer), []);
    bench.take(consumer, &got);
    bench.nack(consumer, &got[0], 0, false);
    assert_eq!(bench.texts(consumer), ["a"]);
}
