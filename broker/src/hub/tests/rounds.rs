//! What a round takes, and when a lease's entry is free again.

use super::bench::{Bench, LEASE_NS, LINGER};
use crate::hub::Close;
use ringmain::ErrorCode;
use ringmain::control::Purpose;
use ringmain::record::Answer;

#[test]
fn what_is_settled_in_time_is_never_stored() {
    let (mut bench, producer, consumer) = Bench::with_queue(10);
    bench.send(producer, "a");
    let got = bench.got(consumer);
    bench.ack(consumer, &got[0]);
    assert!(bench.close(Close::All));
    assert!(bench.frozen().appends.is_empty() && bench.frozen().writes.is_empty());
    let blocks = bench.commit();
    bench.finish(&blocks);
    assert_eq!(
        (bench.committed(producer), bench.committed(consumer)),
        (64, 64)
    );
    bench.check_empty();
}

#[test]
fn young_sends_wait_for_the_linger_and_old_ones_are_stored() {
    let (mut bench, producer, _) = Bench::with_queue(10);
    bench.send(producer, "a");
    bench.wait(1_000_000);
    bench.send(producer, "b");
    assert!(bench.round(LINGER).is_none());
    bench.wait(1_000_000);
    bench.round(LINGER);
    assert_eq!(bench.stored(), ["a"]);
    assert_eq!(bench.committed(producer), 64);
    bench.wait(1_000_000);
    bench.round(LINGER);
    assert_eq!(bench.stored(), ["a", "b"]);
}

#[test]
fn settled_sends_are_passed_up_to_the_first_young_one() {
    let (mut bench, producer, consumer) = Bench::with_queue(10);
    for text in ["a", "b", "c"] {
        bench.send(producer, text);
    }
    let got = bench.got(consumer);
    bench.ack(consumer, &got[0]);
    bench.ack(consumer, &got[2]);
    bench.round(LINGER);
    assert_eq!(
        bench.committed(producer),
        64,
        "c is behind b, which is not settled"
    );
    assert_eq!(bench.stored(), [""; 0]);
}

#[test]
fn a_flush_takes_everything() {
    let (mut bench, producer, _) = Bench::with_queue(10);
    let other = bench.producer("jobs");
    bench.send(producer, "a");
    bench.send(other, "b");
    bench.flush(producer);
    assert!(bench.hub.close_wanted());
    bench.round(LINGER);
    assert_eq!(bench.stored(), ["a", "b"]);
}

#[test]
fn a_ring_that_is_half_full_gets_its_first_half_stored() {
    let mut bench = Bench::new();
    bench.create("jobs");
    let producer = bench.producer("jobs");
    bench.wait(LEASE_NS);
    // 33 records of 64 bytes: more than half of 4096.
    for number in 0..33 {
        bench.send(producer, &number.to_string());
    }
    assert!(bench.hub.close_wanted());
    bench.round(LINGER);
    assert_eq!(bench.stored().len(), 32);
}

#[test]
fn on_a_full_disk_settling_goes_on_and_nothing_is_stored() {
    let (mut bench, producer, consumer) = Bench::with_queue(2);
    for text in ["a", "b", "c"] {
        bench.send(producer, text);
    }
    let got = bench.got(consumer);
    bench.ack(consumer, &got[0]);
    bench.wait(LEASE_NS / 2);
    bench.flush(producer);
    bench.round(Close::SettledOnly);
    assert_eq!(
        (bench.committed(producer), bench.committed(consumer)),
        (64, 64)
    );
    assert_eq!(bench.stored(), [""; 0]);
    // With room again nothing is left behind.
    bench.round(LINGER);
    assert_eq!(bench.stored(), ["b", "c"]);
}

#[test]
fn on_a_full_disk_stored_messages_are_settled() {
    let (mut bench, producer, consumer) = Bench::with_queue(2);
    bench.send(producer, "a");
    bench.round(Close::All);
    bench.send(producer, "b");
    let got = bench.got(consumer);
    bench.ack(consumer, &got[0]);
    bench.round(Close::SettledOnly);
    assert_eq!(bench.stored(), [""; 0]);
    assert_eq!(bench.committed(producer), 64);
}

/// I2: positions follow the order of intake, over all sessions.
#[test]
fn positions_are_given_in_the_order_of_intake() {
    let (mut bench, first, _) = Bench::with_queue(10);
    let second = bench.producer("jobs");
    for (slot, text) in [
        (first, "a"),
        (second, "b"),
        (first, "c"),
        (second, "d"),
        (second, "e"),
        (first, "f"),
    ] {
        bench.send(slot, text);
        bench.wait(500_000);
    }
    bench.round(LINGER);
    bench.round(Close::All);
    assert_eq!(bench.stored(), ["a", "b", "c", "d", "e", "f"]);
}

/// The entry is the only thing that tells a successor of a message in a ring
/// what became of it.
#[test]
fn an_entry_is_free_when_its_send_and_its_end_are_committed() {
    // The ack's round first: the send waits behind a young one.
    let (mut bench, producer, consumer) = Bench::with_queue(10);
    bench.send(producer, "young");
    bench.send(producer, "a");
    let got = bench.got(consumer);
    bench.ack(consumer, &got[1]);
    bench.round(LINGER);
    assert_eq!(
        (bench.committed(consumer), bench.committed(producer)),
        (64, 0)
    );
    assert_eq!(bench.entries_in_use(), 2);
    bench.round(Close::All);
    assert_eq!(
        bench.entries_in_use(),
        1,
        "that of the young one, which is leased"
    );

    // The send's round first.
    let (mut bench, producer, consumer) = Bench::with_queue(10);
    bench.send(producer, "a");
    let got = bench.got(consumer);
    bench.round(Close::All);
    assert_eq!(bench.entries_in_use(), 1);
    bench.ack(consumer, &got[0]);
    assert_eq!(bench.entries_in_use(), 1);
    bench.round(Close::All);
    assert_eq!(bench.entries_in_use(), 0);
    bench.check_empty();

    // Both in one round, and an end by no record.
    let (mut bench, producer, consumer) = Bench::with_queue(10);
    bench.send(producer, "a");
    bench.got(consumer);
    bench.wait(LEASE_NS);
    bench.round(Close::All);
    assert_eq!(bench.entries_in_use(), 0);
}

/// An ack behind a young send of the same session is not committed before it.
#[test]
fn an_ack_is_committed_in_the_order_of_its_session() {
    let mut bench = Bench::new();
    bench.create("jobs");
    let both = bench.producer("jobs");
    bench.attach(both, "jobs", Purpose::Consume, 1);
    bench.send(both, "a");
    let got = bench.got(both);
    bench.send(both, "b");
    bench.ack(both, &got[0]);
    bench.round(LINGER);
    assert_eq!(bench.committed(both), 64, "the send of a, which is settled");
    assert_eq!(bench.entries_in_use(), 1);
    bench.round(Close::All);
    assert_eq!(bench.stored(), ["b"]);
    assert_eq!(bench.entries_in_use(), 0);
}

#[test]
fn an_ack_while_its_message_is_being_written_is_marked_by_the_next_round() {
    let (mut bench, producer, consumer) = Bench::with_queue(10);
    bench.send(producer, "a");
    let got = bench.got(consumer);
    bench.close(Close::All);
    bench.ack(consumer, &got[0]);
    let blocks = bench.commit();
    bench.finish(&blocks);
    assert_eq!(bench.stored(), ["a"]);
    bench.round(Close::All);
    assert_eq!(bench.stored(), [""; 0]);
    bench.check_empty();
}

#[test]
fn a_message_that_returns_while_it_is_being_written_is_leased_again() {
    let (mut bench, producer, consumer) = Bench::with_queue(10);
    bench.send(producer, "a");
    let got = bench.got(consumer);
    bench.close(Close::All);
    bench.nack(consumer, &got[0], 0, true);
    let blocks = bench.commit();
    bench.finish(&blocks);
    let again = bench.got(consumer);
    assert_eq!((again[0].text.as_str(), again[0].attempts), ("a", 1));
    bench.ack(consumer, &again[0]);
    bench.check_empty();
}

#[test]
fn attempts_of_stored_messages_are_stored() {
    let (mut bench, producer, consumer) = Bench::with_queue(10);
    bench.send(producer, "a");
    bench.round(Close::All);
    let got = bench.got(consumer);
    bench.nack(consumer, &got[0], 0, true);
    bench.round(Close::All);
    bench.restart();
    let slot = bench.consumer("jobs", 10);
    bench.end(consumer);
    let got = bench.got(slot);
    assert_eq!((got[0].attempts, got[0].redelivered), (1, true));
}

#[test]
fn answers_belong_to_the_round_of_their_record() {
    let (mut bench, producer, _) = Bench::with_queue(10);
    bench.send(producer, "a");
    let position = bench.send(producer, &"x".repeat(16 * 1024));
    bench.close(LINGER);
    assert_eq!(
        bench.answers(producer),
        [Answer::Refused {
            position,
            code: ErrorCode::TooLarge as u16
        }]
    );
    assert!(
        bench.hub.round_parts().is_empty(),
        "it is behind a young send"
    );
    bench.close(Close::All);
    let parts: Vec<_> = bench
        .hub
        .round_parts()
        .iter()
        .map(|part| (part.end, part.answer_tail))
        .collect();
    assert_eq!(parts, [(128, 16)]);
    let blocks = bench.commit();
    bench.finish(&blocks);
    assert_eq!(bench.stored(), ["a"]);
}

/// I1
#[test]
fn what_an_ended_session_sent_is_stored_and_only_then_is_it_gone() {
    let (mut bench, producer, _) = Bench::with_queue(1);
    bench.send(producer, "a");
    bench.send(producer, "b");
    bench.end(producer);
    assert!(bench.hub.close_wanted());
    bench.wait(LEASE_NS);
    let finished = bench.round(LINGER).unwrap();
    assert_eq!(finished.gone, [producer]);
    assert_eq!(bench.stored(), ["a", "b"]);
}

#[test]
fn a_session_that_ends_while_its_last_round_is_written_is_gone_once() {
    let (mut bench, producer, _) = Bench::with_queue(1);
    bench.send(producer, "a");
    bench.close(Close::All);
    bench.end(producer);
    let blocks = bench.commit();
    assert_eq!(bench.finish(&blocks).gone, [producer]);
    // Its slot is another's now, which must not be mistaken for it.
    let next = bench.producer("jobs");
    assert_eq!(next, producer);
    bench.send(next, "b");
    bench.end(next);
    assert_eq!(bench.round(Close::All).unwrap().gone, [next]);
}
