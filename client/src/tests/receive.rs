use super::fake::{FakeBroker, Peer, Seen, until};
use crate::record::{Answer, Lease, submission};
use crate::{Confirm, Consumer, ConsumerOptions, Error, Message};
use ringmain_ring::Ordering;
use ringmain_ring::layout::attachment;
use ringmain_ring::wait::{broker, client};
use std::time::{Duration, Instant, UNIX_EPOCH};

fn setup() -> (FakeBroker, Consumer, Peer) {
    let broker = FakeBroker::start();
    let consumer = broker.client().consumer("jobs").expect("opens");
    let peer = broker.newest();
    (broker, consumer, peer)
}

fn leases(seen: &Seen) -> &[Lease] {
    match seen {
        Seen::Ack(leases) | Seen::Nack(_, _, leases) | Seen::Extend(_, leases) => leases,
        other => panic!("{other:?} has no leases"),
    }
}

#[test]
fn a_message_says_what_the_broker_said() {
    let (_broker, mut consumer, mut peer) = setup();
    assert!(consumer.try_recv().expect("looks").is_none());
    for len in [0, 1, 101, 102, 103, 104, 5000, 15 * 1024] {
        let payload: Vec<u8> = (0..len).map(|at| at as u8).collect();
        assert!(peer.deliver(9, &payload));
        let message = consumer.recv().expect("receives");
        assert_eq!(message.payload(), payload);
        assert_eq!(message.id().to_string(), "77-72");
        assert_eq!((message.attempts(), message.redelivered()), (3, true));
        assert_eq!(message.sent_at(), UNIX_EPOCH + Duration::from_secs(1000));
        let left = message.lease_remaining();
        assert!(left > Duration::from_secs(20) && left <= Duration::from_secs(30));
        message.ack().expect("acks");
        assert_eq!(leases(&peer.take_all()[0])[0].entry, 9);
    }
}

#[test]
fn each_way_to_answer_is_one_record() {
    let (_broker, mut consumer, mut peer) = setup();
    for entry in 0..4 {
        peer.deliver(entry, b"x");
    }
    let mut messages = consumer.recv_batch(10).expect("receives");
    assert_eq!(messages.len(), 4);
    let long = Duration::from_secs(3600);
    messages[0].extend(long).expect("extends");
    assert!(messages[0].lease_remaining() > long - Duration::from_secs(1));
    messages.remove(0).ack().expect("acks");
    messages
        .remove(0)
        .nack(Duration::from_millis(1500))
        .expect("nacks");
    drop(messages.remove(0));
    Message::ack_batch(messages).expect("acks");
    let seen = peer.take_all();
    let lease = |entry: u32| {
        vec![Lease {
            delivery_position: u64::from(entry) * 64,
            entry,
        }]
    };
    let expected = [
        Seen::Extend(3_600_000, lease(0)),
        Seen::Ack(lease(0)),
        Seen::Nack(0, 1500, lease(1)),
        Seen::Nack(0, 0, lease(2)),
        Seen::Ack(lease(3)),
    ];
    assert_eq!(seen, expected);
}

#[test]
fn a_batch_of_acks_is_a_record_for_each_256_and_session() {
    let broker = FakeBroker::start();
    let client = broker.client();
    let options = ConsumerOptions::new().window(1000);
    let mut messages = Vec::new();
    let mut ends = Vec::new();
    for _ in 0..2 {
        let mut consumer = client
            .consumer_with("jobs", options.clone())
            .expect("opens");
        let mut peer = broker.newest();
        for entry in 0..300 {
            assert!(peer.deliver(entry, b"x"));
        }
        messages.extend(consumer.recv_batch(1000).expect("receives"));
        ends.push((consumer, peer));
    }
    assert_eq!(messages.len(), 600);
    Message::ack_batch(messages).expect("acks");
    for (_, peer) in &mut ends {
        let counts: Vec<usize> = peer
            .take_all()
            .iter()
            .map(|seen| leases(seen).len())
            .collect();
        assert_eq!(counts, [256, 44]);
    }
}

#[test]
fn a_message_past_its_deadline_is_given_back_uncounted() {
    let (_broker, mut consumer, mut peer) = setup();
    peer.deliver_until(1, b"late", crate::clock::monotonic_ns() - 1);
    peer.deliver(2, b"in time");
    assert_eq!(consumer.recv().expect("receives").payload(), b"in time");
    let seen = peer.take_all();
    let Seen::Nack(flags, 0, _) = &seen[0] else {
        panic!("{seen:?}")
    };
    assert_eq!(
        (*flags, leases(&seen[0])[0].entry),
        (submission::NACK_UNCOUNTED, 1)
    );
}

#[test]
fn a_sleeping_consumer_is_woken() {
    let (_broker, mut consumer, mut peer) = setup();
    let receiver = std::thread::spawn(move || {
        let message = consumer.recv().expect("receives");
        (message.payload().to_vec(), consumer)
    });
    peer.until_asleep_for(client::MESSAGES);
    let start = Instant::now();
    peer.deliver(0, b"wake");
    assert_eq!(receiver.join().expect("no panic").0, b"wake");
    assert!(
        start.elapsed() < Duration::from_millis(500),
        "was woken, and did not wake up"
    );
}

#[test]
fn the_time_is_over_when_it_is() {
    let (_broker, mut consumer, _peer) = setup();
    let start = Instant::now();
    let none = consumer
        .recv_timeout(Duration::from_millis(30))
        .expect("waits");
    assert!(none.is_none());
    assert!(start.elapsed() >= Duration::from_millis(30));
    assert!(
        consumer
            .recv_timeout(Duration::ZERO)
            .expect("looks")
            .is_none()
    );
    assert!(consumer.recv_batch(0).expect("nothing").is_empty());
}

#[test]
fn messages_are_answered_from_other_threads() {
    let (_broker, mut consumer, mut peer) = setup();
    let (to_worker, from_consumer) = std::sync::mpsc::channel::<Message>();
    let worker = std::thread::spawn(move || {
        for message in from_consumer {
            message.ack().expect("acks");
        }
    });
    for entry in 0..10_000 {
        assert!(peer.deliver(entry, b"x"));
        to_worker
            .send(consumer.recv().expect("receives"))
            .expect("a worker");
        if entry % 100 == 0 {
            peer.take_all();
        }
    }
    drop(to_worker);
    worker.join().expect("no panic");
}

#[test]
fn a_broker_without_room_is_rung_when_there_is_some() {
    let (broker, mut consumer, mut peer) = setup();
    let session = peer.map.session();
    let mut count = 0;
    while peer.deliver(count, &[0; 1000]) {
        count += 1;
    }
    peer.map.broker_wait().announce(broker::ROOM);
    let mut taken = 0;
    while !broker.was_rung(session) {
        consumer.recv().expect("receives").ack().expect("acks");
        taken += 1;
    }
    assert!(taken <= count / 4 + 2, "rung after {taken} of {count}");
    // It finds the ring empty, and says so, though no quarter has passed.
    while consumer.try_recv().expect("receives").is_some() {}
    assert!(peer.deliver(0, b"x"));
    peer.map.broker_wait().announce(broker::ROOM);
    drop(consumer.recv().expect("receives"));
    assert!(!broker.was_rung(session));
    assert!(consumer.try_recv().expect("looks").is_none());
    assert!(broker.was_rung(session));
}

#[test]
fn whatever_is_held_can_be_answered_though_the_broker_reads_nothing() {
    // At many places in the ring, so that its end falls everywhere.
    for skip in 0..40 {
        let broker = FakeBroker::start();
        let options = ConsumerOptions::new().window(16_384);
        let mut consumer = broker
            .client()
            .consumer_with("jobs", options)
            .expect("opens");
        let mut peer = broker.newest();
        for entry in 0..skip * 7 {
            peer.deliver(entry, b"x");
            drop(consumer.recv().expect("receives"));
        }
        peer.take_all();
        let mut held = Vec::new();
        let mut given = 0;
        loop {
            given += u32::from(peer.deliver(given, b"x"));
            match consumer.try_recv().expect("receives") {
                Some(message) => held.push(message),
                None => break,
            }
            // Others that submit must not take the room.
            let _ = held[held.len() / 2].extend(Duration::from_secs(40));
        }
        let ring_bytes = peer.map.geometry().submission_bytes as usize;
        assert!(
            held.len() > ring_bytes / 200,
            "only {} were handed out",
            held.len()
        );
        assert!(matches!(
            held[0].extend(Duration::from_secs(40)),
            Err(Error::Full(_))
        ));
        let over = consumer.flush_timeout(Confirm::Stored, Duration::ZERO);
        assert!(matches!(over, Err(Error::TimedOut)));
        for (index, message) in held.drain(..).enumerate() {
            match (index + skip as usize) % 3 {
                0 => message.nack(Duration::ZERO).expect("room for a nack"),
                1 => message.ack().expect("room for an ack"),
                _ => Message::ack_batch([message]).expect("room for an ack"),
            }
        }
        assert!(
            consumer
                .recv_timeout(Duration::ZERO)
                .expect("looks")
                .is_some()
                || given > 0
        );
        drop(consumer);
        let last = peer.take_all().pop();
        assert_eq!(last, Some(Seen::End), "room for the end as well");
    }
}

#[test]
fn a_consumer_without_room_for_answers_waits_for_it() {
    let broker = FakeBroker::start();
    let options = ConsumerOptions::new().window(16_384);
    let mut consumer = broker
        .client()
        .consumer_with("jobs", options)
        .expect("opens");
    let mut peer = broker.newest();
    let mut entry = 0;
    loop {
        peer.deliver(entry, b"x");
        entry += 1;
        match consumer.try_recv().expect("receives") {
            Some(message) => message.ack().expect("acks"),
            None => break,
        }
    }
    let receiver = std::thread::spawn(move || consumer.recv().map(|message| message.ack()));
    peer.until_asleep_for(client::ROOM);
    peer.take_all();
    receiver
        .join()
        .expect("no panic")
        .expect("receives")
        .expect("acks");
}

#[test]
fn lost_leases_are_counted_once() {
    let (_broker, mut consumer, mut peer) = setup();
    for entry in 0..3 {
        peer.deliver(entry, b"x");
    }
    Message::ack_batch(consumer.recv_batch(3).expect("receives")).expect("acks");
    for delivery_position in [0, 64, 64] {
        peer.answer(Answer::LeaseLost { delivery_position });
    }
    let mut flush = || {
        std::thread::scope(|scope| {
            let flushing = scope.spawn(|| consumer.flush(Confirm::Stored));
            while !flushing.is_finished() {
                peer.take_all();
                peer.confirm_stored();
            }
            flushing.join().expect("no panic")
        })
    };
    assert!(matches!(flush(), Err(Error::LeaseLost { count: 2 })));
    flush().expect("nothing new");
}

#[test]
fn a_full_answer_ring_is_drained_by_who_waits() {
    let (_broker, mut consumer, mut peer) = setup();
    let capacity = peer.map.geometry().answer_bytes as u64 / 16;
    for position in 0..capacity {
        peer.answer(Answer::LeaseLost {
            delivery_position: position * 64,
        });
    }
    peer.map.broker_wait().announce(broker::ROOM);
    let session = peer.map.session();
    assert!(
        consumer
            .recv_timeout(Duration::from_millis(20))
            .expect("waits")
            .is_none()
    );
    assert!(_broker.was_rung(session), "the broker was told of the room");
    peer.answer(Answer::LeaseLost {
        delivery_position: capacity * 64,
    });
}

#[test]
fn a_dropped_consumer_ends_its_session_and_its_messages_with_it() {
    let (broker, mut consumer, mut peer) = setup();
    peer.deliver(0, b"held");
    peer.deliver(1, b"acked");
    let held = consumer.recv().expect("receives");
    consumer.recv().expect("receives").ack().expect("acks");
    drop(consumer);
    assert_eq!(held.payload(), b"held", "can still be read");
    assert!(matches!(held.ack(), Err(Error::Closed(_))));
    let seen = peer.take_all();
    assert!(matches!(seen[..], [Seen::Ack(_), Seen::End]), "{seen:?}");
    drop(broker);
}

#[test]
fn the_end_of_queue_or_session_ends_the_wait() {
    let (_broker, mut consumer, peer) = setup();
    let receiver = std::thread::spawn(move || (consumer.recv().map(|_| ()), consumer));
    peer.until_asleep_for(client::LIMIT);
    let word = peer.map.attachment(0).expect("the first");
    word.store(attachment::DELETED, Ordering::Release);
    peer.map.client_wait().wake(client::LIMIT);
    let (result, mut consumer) = receiver.join().expect("no panic");
    assert!(matches!(result, Err(Error::NoSuchQueue(_))));
    word.store(0, Ordering::Release);

    let receiver = std::thread::spawn(move || consumer.recv().map(|_| ()));
    peer.until_asleep_for(client::MESSAGES);
    peer.finish(0);
    assert!(matches!(
        receiver.join().expect("no panic"),
        Err(Error::Closed(_))
    ));
}

/// I4: the leases of a closed session have gone back, and others may have them.
#[test]
fn what_lies_in_the_ring_of_a_closed_session_is_not_handed_out() {
    let (_broker, mut consumer, mut peer) = setup();
    peer.deliver(0, b"leased once");
    peer.finish(0);
    assert!(matches!(consumer.recv(), Err(Error::Closed(_))));
    assert!(matches!(consumer.try_recv(), Err(Error::Closed(_))));
}

#[test]
fn a_damaged_delivery_is_corrupt() {
    let (_broker, mut consumer, peer) = setup();
    peer.map.delivery().area.store(0, 1 << 40);
    peer.map.delivery().tail.store(64, Ordering::Release);
    assert!(matches!(consumer.recv(), Err(Error::Corrupt(_))));
    assert!(consumer.try_recv().is_err());
    until(|| peer.map.delivery().head.load(Ordering::Acquire) == 0);
}
