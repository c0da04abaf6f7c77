//! Queues that come and go under their messages.

use super::bench::{Bench, LEASE_NS};
use crate::hub::Close;
use ringmain::control::Purpose;
use ringmain::record::Answer;
use ringmain::{Error, ErrorCode, QueueSettings};

#[test]
fn a_queue_is_there_when_its_creation_is_committed() {
    let mut bench = Bench::new();
    assert!(
        bench
            .hub
            .create_queue("jobs", QueueSettings::default(), 1, 5)
            .is_none()
    );
    assert!(bench.hub.queue_info("jobs").is_err());
    // Who asks meanwhile is told at the same time.
    assert!(
        bench
            .hub
            .create_queue("jobs", QueueSettings::default(), 1, 6)
            .is_none()
    );
    let finished = bench.round(Close::All).unwrap();
    let tickets: Vec<_> = finished.admin.iter().map(|(ticket, _)| *ticket).collect();
    assert_eq!(tickets, [5, 6]);
    assert!(bench.hub.queue_info("jobs").is_ok());
    assert_eq!(bench.store.reopen().power_cut(0).unsynced_batches(), 0);
}

#[test]
fn the_same_queue_can_be_created_again_and_another_of_its_name_can_not() {
    let mut bench = Bench::new();
    bench
        .hub
        .create_queue("jobs", QueueSettings::default(), 1, 1);
    bench.round(Close::All);
    let same = bench
        .hub
        .create_queue("jobs", QueueSettings::default(), 2, 2);
    assert!(matches!(same, Some(Ok(()))), "{same:?}");
    let other = QueueSettings {
        visibility_timeout_ms: 1234,
        ..QueueSettings::default()
    };
    let other = bench.hub.create_queue("jobs", other, 2, 3);
    assert!(
        matches!(other, Some(Err(Error::QueueExists(_)))),
        "{other:?}"
    );
}

/// Messages in every state there is go with their queue, and nothing stays.
#[test]
fn a_deleted_queue_takes_its_messages_with_it() {
    let mut bench = Bench::with_cache(400);
    bench.create("jobs");
    bench.create("mail");
    let producer = bench.producer("jobs");
    bench.attach(producer, "mail", Purpose::Produce, 0);
    for number in 0..8 {
        bench.send(producer, &number.to_string());
    }
    bench.round(Close::All);
    bench.send(producer, "in the ring");
    let consumer = bench.consumer("jobs", 7);
    let got = bench.got(consumer);
    bench.ack(consumer, &got[0]);
    bench.nack(consumer, &got[1], 0, true);
    bench.nack(consumer, &got[2], 50, true);
    bench.take(consumer, &got[3..4]);
    bench.got(consumer);
    assert!(bench.hub.delete_queue("jobs", 9).is_none());
    bench.close(Close::All);
    // Sent while the deletion is written; and an ack.
    bench.send(producer, "late");
    bench.ack(consumer, &got[4]);
    let blocks = bench.commit();
    let finished = bench.finish(&blocks);
    assert_eq!(finished.admin.len(), 1);
    assert_eq!(bench.port.deleted, [(producer, 0), (consumer, 0)]);
    // Its leases have ended: an ack comes too late.
    bench.ack(consumer, &got[5]);
    let lost = Answer::LeaseLost {
        delivery_position: got[5].position,
    };
    assert_eq!(bench.answers(consumer), [lost]);
    let position = bench.send(producer, "too late");
    let refused = Answer::Refused {
        position,
        code: ErrorCode::NoSuchQueue as u16,
    };
    assert_eq!(bench.answers(producer), [refused]);
    bench.wait(10 * LEASE_NS);
    assert_eq!(bench.got(consumer), []);
    // The session goes on with its other queue.
    bench.send_to(producer, 1, "m");
    let reader = bench.consumer("mail", 1);
    let got = bench.got(reader);
    assert_eq!(got[0].text, "m");
    bench.ack(reader, &got[0]);
    bench.check_empty();
}

#[test]
fn a_read_that_comes_after_the_deletion_is_forgotten() {
    let mut bench = Bench::with_cache(0);
    bench.create("jobs");
    let producer = bench.producer("jobs");
    bench.send(producer, "a");
    bench.round(Close::All);
    bench.consumer("jobs", 1);
    bench.dispatch();
    assert_eq!(bench.port.reads.len(), 1);
    bench.hub.delete_queue("jobs", 1);
    bench.round(Close::All);
    bench.create("jobs");
    bench.read_all(usize::MAX);
    let consumer = bench.consumer("jobs", 1);
    assert_eq!(bench.got(consumer), []);
    bench.check_empty();
}

#[test]
fn a_deleted_name_can_be_used_again_for_an_empty_queue() {
    let (mut bench, producer, _) = Bench::with_queue(1);
    bench.send(producer, "old");
    bench.round(Close::All);
    bench.hub.delete_queue("jobs", 1);
    bench.round(Close::All);
    bench.create("jobs");
    let (producer, consumer) = (bench.producer("jobs"), bench.consumer("jobs", 1));
    bench.send(producer, "new");
    assert_eq!(bench.texts(consumer), ["new"]);
}

#[test]
fn a_session_to_a_deleted_queue_ends_as_any_other() {
    let (mut bench, producer, consumer) = Bench::with_queue(2);
    bench.send(producer, "a");
    bench.got(consumer);
    bench.hub.delete_queue("jobs", 1);
    bench.round(Close::All);
    bench.end(producer);
    bench.end(consumer);
    let mut gone = bench.round(Close::All).unwrap().gone;
    gone.sort_unstable();
    assert_eq!(gone, [producer, consumer]);
    bench.check_empty();
}

#[test]
fn attaching_again_changes_the_window_and_nothing_else() {
    let (mut bench, producer, consumer) = Bench::with_queue(1);
    for text in ["a", "b", "c"] {
        bench.send(producer, text);
    }
    assert_eq!(bench.texts(consumer), ["a"]);
    let (index, ..) = bench
        .hub
        .attach(consumer, "jobs", Purpose::Consume, 2)
        .unwrap();
    assert_eq!(index, 0);
    assert_eq!(bench.texts(consumer), ["b"]);
    assert_eq!(bench.hub.queue_info("jobs").unwrap().consumers, 1);
}

#[test]
fn queues_beyond_the_limit_are_refused_and_told_so() {
    let mut bench = Bench::new();
    for name in ["a", "b", "c"] {
        bench.create(name);
    }
    let refused = bench
        .hub
        .create_queue("d", QueueSettings::default(), 1, 1)
        .unwrap();
    let refused = refused.unwrap_err();
    assert_eq!(refused.code(), ErrorCode::Full);
    assert!(
        refused.to_string().contains("3 queues already"),
        "{refused}"
    );
    bench.hub.delete_queue("a", 2);
    bench.round(Close::All);
    bench.create("d");
}
