use super::fake::{FakeBroker, Peer, Seen, until};
use crate::record::{Answer, submission};
use crate::{Confirm, Error, ErrorCode, MessageId, Producer, ProducerOptions};
use ringmain_ring::Ordering;
use ringmain_ring::layout::attachment;
use ringmain_ring::wait::{broker, client};
use std::time::{Duration, Instant};

fn setup() -> (FakeBroker, Producer, Peer) {
    setup_with(ProducerOptions::new())
}

fn setup_with(options: ProducerOptions) -> (FakeBroker, Producer, Peer) {
    let broker = FakeBroker::start();
    let producer = broker
        .client()
        .producer_with("jobs", options)
        .expect("opens");
    let peer = broker.newest();
    (broker, producer, peer)
}

/// Fills the ring; returns how many messages fitted.
fn fill(producer: &Producer) -> usize {
    let mut count = 0;
    loop {
        match producer.try_send([0; 1000]) {
            Ok(_) => count += 1,
            Err(Error::Full(_)) => return count,
            Err(other) => panic!("{other:?}"),
        }
    }
}

#[test]
fn sends_lie_in_the_ring_in_order_under_their_identity() {
    let (_broker, producer, mut peer) = setup();
    let mut expected = Vec::new();
    for payload in [&b""[..], b"one", &[5; 15 * 1024]] {
        let id = producer.send(payload).expect("sends");
        assert_eq!(id.session, peer.map.session());
        expected.push(Seen::Send(id.position, payload.to_vec()));
    }
    assert_eq!(peer.take_all(), expected);
}

#[test]
fn the_ring_turns_over_many_times() {
    let (_broker, producer, mut peer) = setup();
    for round in 0..5000u32 {
        let payload = vec![round as u8; (round as usize * 37) % 3000];
        producer.send(&payload).expect("sends");
        assert_eq!(peer.sends(1), [payload]);
    }
}

#[test]
fn one_byte_past_the_limit_is_too_large_and_writes_nothing() {
    let broker = FakeBroker::start();
    crate::lock(&broker.state).settings.max_message_bytes = 15 * 1024;
    let producer = broker.client().producer("jobs").expect("opens");
    let mut peer = broker.newest();
    producer.send(vec![1; 15 * 1024]).expect("at the limit");
    let past = vec![1; 15 * 1024 + 1];
    assert!(matches!(
        producer.send(&past),
        Err(Error::TooLarge {
            bytes: 15_361,
            limit: 15_360
        })
    ));
    let batch = producer.send_batch([&b"fits"[..], &past]);
    assert!(matches!(batch, Err(Error::TooLarge { .. })));
    assert_eq!(peer.take_all().len(), 1);
}

#[test]
fn a_full_ring_is_full_at_once_or_after_the_time_given() {
    let (_broker, producer, _peer) = setup();
    assert!(fill(&producer) > 100);
    let start = Instant::now();
    let over = producer.send_timeout([0; 1000], Duration::from_millis(50));
    assert!(matches!(over, Err(Error::TimedOut)));
    assert!(start.elapsed() >= Duration::from_millis(50));
}

#[test]
fn a_send_sleeps_until_there_is_room() {
    let (_broker, producer, mut peer) = setup();
    let count = fill(&producer);
    let sender = std::thread::spawn(move || producer.send([1; 1000]));
    peer.until_asleep_for(client::ROOM);
    let start = Instant::now();
    assert_eq!(peer.take_all().len(), count);
    sender.join().expect("no panic").expect("sends");
    assert!(
        start.elapsed() < Duration::from_millis(500),
        "was woken, and did not wake up"
    );
    assert_eq!(peer.sends(1), [[1; 1000]]);
}

#[test]
fn a_batch_larger_than_the_ring_goes_through_it_in_order() {
    let (_broker, producer, mut peer) = setup();
    let payloads: Vec<Vec<u8>> = (0..5000u32)
        .map(|number| number.to_le_bytes().repeat(1 + number as usize % 60))
        .collect();
    let expected = payloads.clone();
    let sender = std::thread::spawn(move || producer.send_batch(payloads));
    assert_eq!(peer.sends(5000), expected);
    let ids = sender.join().expect("no panic").expect("sends");
    assert_eq!(ids.len(), 5000);
    assert!(ids.is_sorted());
}

#[test]
fn a_batch_whose_iterator_panics_sends_nothing() {
    let (_broker, producer, mut peer) = setup();
    let batch = std::panic::catch_unwind(|| {
        let payloads = (0..10).map(|number| {
            assert!(number < 5, "on purpose");
            [number]
        });
        producer.send_batch(payloads)
    });
    assert!(batch.is_err());
    assert_eq!(peer.take_all(), []);
    producer.send("after").expect("goes on");
    assert_eq!(peer.sends(1), [b"after"]);
}

#[test]
fn threads_share_a_producer_and_each_keeps_its_order() {
    const COUNT: u32 = 20_000;
    let (_broker, producer, mut peer) = setup();
    let senders: Vec<_> = (0..4u32)
        .map(|thread| {
            let producer = producer.clone();
            std::thread::spawn(move || {
                for number in 0..COUNT {
                    let payload = [thread.to_le_bytes(), number.to_le_bytes()].concat();
                    producer.send(payload).expect("sends");
                }
            })
        })
        .collect();
    let mut next = [0; 4];
    for payload in peer.sends(4 * COUNT as usize) {
        let number =
            |at: usize| u32::from_le_bytes(payload[at..at + 4].try_into().expect("four bytes"));
        let expected = &mut next[number(0) as usize];
        assert_eq!(number(4), *expected);
        *expected += 1;
    }
    for sender in senders {
        sender.join().expect("no panic");
    }
}

#[test]
fn only_a_sleeping_broker_is_rung_and_once() {
    let (broker, producer, peer) = setup();
    let session = peer.map.session();
    producer.send("awake").expect("sends");
    assert!(!broker.was_rung(session));
    peer.map.broker_wait().announce(broker::SUBMISSIONS);
    producer.send("asleep").expect("sends");
    assert!(broker.was_rung(session));
    producer.send("woken").expect("sends");
    assert!(!broker.was_rung(session));
}

#[test]
fn a_confirmed_send_brings_its_flush_and_waits() {
    let options = ProducerOptions::new().confirm(Confirm::Stored);
    let (_broker, producer, mut peer) = setup_with(options);
    let over = producer.send_timeout("first", Duration::from_millis(20));
    assert!(matches!(over, Err(Error::TimedOut)));
    let flush = Seen::Flush(submission::FLUSH_STORED);
    assert_eq!(
        peer.take_all(),
        [Seen::Send(0, b"first".to_vec()), flush.clone()]
    );
    peer.confirm_stored();

    let sender = std::thread::spawn(move || producer.send("second"));
    peer.until_asleep_for(client::CONFIRMATION);
    let seen = peer.take_all();
    assert!(!sender.is_finished());
    peer.confirm_stored();
    let id = sender.join().expect("no panic").expect("confirmed");
    assert_eq!(seen, [Seen::Send(id.position, b"second".to_vec()), flush]);
}

#[test]
fn the_queue_decides_what_a_send_waits_for_unless_the_producer_does() {
    let broker = FakeBroker::start();
    crate::lock(&broker.state).settings.confirm = Confirm::Synced;
    let client = broker.client();
    let short = Duration::from_millis(5);
    let synced = client.producer("jobs").expect("opens");
    assert!(matches!(
        synced.send_timeout("x", short),
        Err(Error::TimedOut)
    ));
    let options = ProducerOptions::new().confirm(Confirm::Accepted);
    let accepted = client.producer_with("jobs", options).expect("opens");
    accepted
        .send_timeout("x", short)
        .expect("waits for nothing");
    let kinds: Vec<_> = broker.newest().take_all();
    assert!(matches!(
        kinds[..],
        [
            Seen::Send(..),
            Seen::Flush(submission::FLUSH_SYNCED),
            Seen::Send(..)
        ]
    ));
}

#[test]
fn a_refused_send_is_told_to_its_sender() {
    let options = ProducerOptions::new().confirm(Confirm::Stored);
    let (_broker, producer, mut peer) = setup_with(options);
    let sender = {
        let producer = producer.clone();
        std::thread::spawn(move || producer.send_batch(["good", "bad"]))
    };
    until(|| peer.map.submission().tail.load(Ordering::Acquire) > 64);
    let seen = peer.take_all();
    let Seen::Send(position, _) = seen[1] else {
        panic!("{seen:?}")
    };
    let code = ErrorCode::Full as u16;
    peer.answer(Answer::Refused { position, code });
    peer.confirm_stored();
    let refused = sender.join().expect("no panic");
    let Err(Error::Refused(list)) = refused else {
        panic!("{refused:?}")
    };
    let id = MessageId {
        session: peer.map.session(),
        position,
    };
    assert_eq!(
        (list.len(), list[0].id, list[0].code),
        (1, id, ErrorCode::Full)
    );
}

/// Flushes while the peer takes everything in and confirms it.
fn flush(producer: &Producer, peer: &mut Peer) -> Result<(), Error> {
    std::thread::scope(|scope| {
        let flushing = scope.spawn(|| producer.flush(Confirm::Stored));
        while !flushing.is_finished() {
            peer.take_all();
            peer.confirm_stored();
        }
        flushing.join().expect("no panic")
    })
}

#[test]
fn a_flush_reports_each_refusal_once_though_it_is_repeated() {
    let (_broker, producer, mut peer) = setup();
    let ids: Vec<_> = (0..3).map(|_| producer.send("x").expect("sends")).collect();
    let code = ErrorCode::NoSuchQueue as u16;
    for id in &ids[1..] {
        peer.answer(Answer::Refused {
            position: id.position,
            code,
        });
    }
    match flush(&producer, &mut peer) {
        Err(Error::Refused(list)) => {
            let refused: Vec<_> = list.iter().map(|refusal| refusal.id).collect();
            assert_eq!(refused, ids[1..]);
            assert_eq!(list[0].code, ErrorCode::NoSuchQueue);
        }
        other => panic!("{other:?}"),
    }
    // As a restarted broker does.
    peer.answer(Answer::Refused {
        position: ids[2].position,
        code,
    });
    flush(&producer, &mut peer).expect("nothing new");
    producer
        .flush(Confirm::Accepted)
        .expect("waits for nothing");
}

#[test]
fn a_flush_times_out_and_another_level_does_not_help() {
    let (_broker, producer, mut peer) = setup();
    producer.send("x").expect("sends");
    peer.take_all();
    peer.confirm_stored();
    flush(&producer, &mut peer).expect("stored");
    let over = producer.flush_timeout(Confirm::Synced, Duration::from_millis(20));
    assert!(matches!(over, Err(Error::TimedOut)));
}

#[test]
fn a_full_or_deleted_queue_is_seen_before_anything_is_written() {
    let (_broker, producer, mut peer) = setup();
    let map = std::sync::Arc::clone(&peer.map);
    let word = map.attachment(0).expect("the first");
    for bits in [attachment::FULL, attachment::PAUSED] {
        word.store(bits, Ordering::Release);
        assert!(matches!(producer.try_send("x"), Err(Error::Full(_))));
        let over = producer.send_timeout("x", Duration::from_millis(5));
        assert!(matches!(over, Err(Error::TimedOut)));
    }
    let sender = {
        let producer = producer.clone();
        std::thread::spawn(move || producer.send("waits"))
    };
    peer.until_asleep_for(client::LIMIT);
    word.store(0, Ordering::Release);
    map.client_wait().wake(client::LIMIT);
    sender.join().expect("no panic").expect("sends");
    word.store(attachment::DELETED, Ordering::Release);
    match producer.send("x") {
        Err(Error::NoSuchQueue(name)) => assert_eq!(name, "jobs"),
        other => panic!("{other:?}"),
    }
    assert_eq!(peer.sends(1), [b"waits"]);
}

#[test]
fn the_final_position_decides_what_was_accepted() {
    let (_broker, producer, peer) = setup();
    let first = producer.send("first").expect("sends");
    assert_eq!(first.position, 0);
    peer.map.broker_wait().set(broker::CLOSING);
    let sender = {
        let producer = producer.clone();
        std::thread::spawn(move || producer.send("second"))
    };
    until(|| peer.map.submission().tail.load(Ordering::Acquire) > 32);
    assert!(!sender.is_finished(), "it can't know yet");
    let tail = peer.map.submission().tail.load(Ordering::Acquire);
    peer.finish(tail);
    sender.join().expect("no panic").expect("taken in");
    assert!(matches!(producer.send("third"), Err(Error::Closed(_))));
    assert!(matches!(
        producer.flush(Confirm::Stored),
        Err(Error::Closed(_))
    ));
}

#[test]
fn a_send_behind_the_final_position_was_not_accepted() {
    let (_broker, producer, peer) = setup();
    producer.send("first").expect("sends");
    let tail = peer.map.submission().tail.load(Ordering::Acquire);
    peer.finish(tail);
    assert!(matches!(producer.send("second"), Err(Error::Closed(_))));
}

#[test]
fn a_sender_that_waits_for_room_hears_of_the_end() {
    let (_broker, producer, peer) = setup();
    fill(&producer);
    let sender = std::thread::spawn(move || producer.send([0; 1000]));
    peer.until_asleep_for(client::ROOM);
    peer.finish(0);
    assert!(matches!(
        sender.join().expect("no panic"),
        Err(Error::Closed(_))
    ));
}

#[test]
fn after_its_session_ended_a_client_opens_another() {
    let broker = FakeBroker::start();
    let client = broker.client();
    let old = client.producer("jobs").expect("opens");
    broker.newest().finish(0);
    assert!(old.send("x").is_err());
    let new = client.producer("jobs").expect("opens");
    assert_eq!(new.send("x").expect("sends").session, 2);
}

#[test]
fn a_damaged_cursor_is_corrupt_and_ends_the_session() {
    let (_broker, producer, peer) = setup();
    fill(&producer);
    peer.map.submission().head.store(3, Ordering::Release);
    assert!(matches!(producer.send([0; 1000]), Err(Error::Corrupt(_))));
    assert!(matches!(producer.send("x"), Err(Error::Corrupt(_))));
}

#[test]
fn an_unreadable_answer_is_corrupt() {
    let (_broker, producer, peer) = setup();
    peer.map.answers().area.store(0, 8 | 9 << 32);
    peer.map.answers().tail.store(16, Ordering::Release);
    assert!(matches!(
        producer.flush(Confirm::Stored),
        Err(Error::Corrupt(_))
    ));
}
