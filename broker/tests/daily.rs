//! What a program sees through the client library on an ordinary day, with a
//! broker in a process of its own.

#![allow(clippy::unwrap_used, reason = "a test that can't go on has failed")]
#![allow(clippy::print_stderr, reason = "logs are shown when a test fails")]

mod common;

use common::{Broker, Hold, Kind, Produce, Role, payload, signal, timed, wait_for, wait_until};
use nix::sys::signal::Signal;
use ringmain::{
    Confirm, Consumer, ConsumerOptions, Error, ErrorCode, Message, Producer, ProducerOptions,
    QueueSettings,
};
use std::collections::{HashMap, HashSet};
use std::sync::mpsc;
use std::time::{Duration, SystemTime};

/// Not a test: what the children run.
#[test]
fn child_process() {
    common::run_child();
}

fn settings(visibility_timeout_ms: u64) -> QueueSettings {
    QueueSettings {
        visibility_timeout_ms,
        ..QueueSettings::default()
    }
}

#[track_caller]
fn next(consumer: &mut Consumer) -> Message {
    let message = consumer.recv_timeout(common::BOUND).unwrap();
    message.expect("a message comes")
}

#[track_caller]
fn expect(consumer: &mut Consumer, payload: &str) -> Message {
    let message = next(consumer);
    assert_eq!(String::from_utf8_lossy(message.payload()), payload);
    message
}

/// Fills the ring of a producer whose broker takes nothing in. Returns how many
/// messages it took.
#[track_caller]
fn fill(producer: &Producer, bytes: usize) -> u64 {
    for number in 0.. {
        match producer.try_send(payload(0, number, bytes)) {
            Ok(_) => {}
            Err(Error::Full(what)) => {
                assert!(what.contains("submission ring"), "{what}");
                return number;
            }
            Err(error) => panic!("{error}"),
        }
    }
    unreachable!()
}

fn number(message: &Message) -> u64 {
    u64::from_ne_bytes(message.payload()[8..16].try_into().unwrap())
}

// I5
#[test]
fn a_send_waits_for_the_confirmation_that_was_asked_for() {
    let mut broker = Broker::start();
    let confirmed = |confirm| QueueSettings {
        confirm,
        ..QueueSettings::default()
    };
    broker.create("accepted", &confirmed(Confirm::Accepted));
    broker.create("stored", &confirmed(Confirm::Stored));
    broker.create("synced", &confirmed(Confirm::Synced));
    let client = broker.client();
    let accepted = client.producer("accepted").unwrap();
    let stored = client.producer("stored").unwrap();
    let synced = client.producer("synced").unwrap();
    let by_option = ProducerOptions::new().confirm(Confirm::Synced);
    let by_option = client.producer_with("accepted", by_option).unwrap();

    // Nobody confirms while it stands still; accepted is what needs nobody.
    broker.pause();
    accepted.send("one").unwrap();
    accepted.flush(Confirm::Accepted).unwrap();
    let short = Duration::from_millis(50);
    for producer in [&stored, &synced, &by_option] {
        let error = producer.send_timeout("two", short).unwrap_err();
        assert_eq!(error.code(), ErrorCode::TimedOut);
    }
    for level in [Confirm::Stored, Confirm::Synced] {
        let error = accepted.flush_timeout(level, short).unwrap_err();
        assert_eq!(error.code(), ErrorCode::TimedOut);
    }
    broker.resume();
    // What timed out was accepted all the same.
    stored.flush(Confirm::Synced).unwrap();
    stored.send("three").unwrap();
    assert!(broker.stats().stored >= 5);
    synced.send("three").unwrap();
    by_option.send("three").unwrap();
    let stats = broker.stats();
    assert!(
        stats.synced_round > 0 && stats.synced_round <= stats.round,
        "{stats:?}"
    );

    // A power cut, as far as processes can have one: what was synced is there.
    broker.kill();
    broker.wipe_shm();
    broker.restart();
    for (queue, messages) in [("accepted", 3), ("synced", 2)] {
        assert_eq!(broker.info(queue).messages, messages, "{queue}");
    }
}

// I1, I2
#[test]
fn a_batch_larger_than_the_ring_arrives_in_order() {
    let broker = Broker::with_queue("jobs");
    let client = broker.client();
    let producer = client.producer("jobs").unwrap();
    let sizes = [0, 1, 7, 8, 9, 100, 1000, 15_000];
    let payloads: Vec<Vec<u8>> = (0..2000)
        .map(|number| vec![number as u8; sizes[number % sizes.len()]])
        .collect();
    let ids = producer.send_batch(&payloads).unwrap();
    assert_eq!(ids.len(), payloads.len());
    assert!(ids.is_sorted_by(|a, b| a < b));
    assert!(producer.send_batch::<[&str; 0]>([]).unwrap().is_empty());

    let mut consumer = client.consumer("jobs").unwrap();
    let mut received = 0;
    while received < payloads.len() {
        let batch = consumer.recv_batch(100).unwrap();
        assert!((1..=100).contains(&batch.len()));
        for message in &batch {
            assert_eq!(message.payload(), payloads[received]);
            assert_eq!(message.id(), ids[received]);
            received += 1;
        }
        Message::ack_batch(batch).unwrap();
    }
    assert!(consumer.recv_batch(0).unwrap().is_empty());
    consumer.flush(Confirm::Stored).unwrap();
    assert_eq!(broker.info("jobs").messages, 0);
}

// I1: a full ring refuses, and never drops.
#[test]
fn a_full_ring_is_said_and_holds_what_it_took() {
    let broker = Broker::with_queue("jobs");
    let client = broker.client();
    let producer = client.producer("jobs").unwrap();
    broker.pause();
    let sent = fill(&producer, 500);
    // A ring of 128 KiB, and what a message takes beside its payload.
    assert!((200..=260).contains(&sent), "{sent}");
    let error = producer
        .send_timeout([0; 500], Duration::from_millis(50))
        .unwrap_err();
    assert_eq!(error.code(), ErrorCode::TimedOut);
    broker.resume();
    producer.send(payload(0, sent, 500)).unwrap();
    wait_until("there is room again", || {
        match producer.try_send(payload(0, sent + 1, 500)) {
            Ok(_) => true,
            Err(Error::Full(_)) => false,
            Err(error) => panic!("{error}"),
        }
    });
    let mut consumer = client.consumer("jobs").unwrap();
    for expected in 0..sent + 2 {
        let message = next(&mut consumer);
        assert_eq!(number(&message), expected);
        message.ack().unwrap();
    }
    assert!(consumer.try_recv().unwrap().is_none());
}

// I2, I4
#[test]
fn a_consumer_holds_no_more_than_its_window() {
    let broker = Broker::with_queue("jobs");
    let client = broker.client();
    let window = |window| ConsumerOptions::new().window(window);
    for wrong in [0, ringmain::control::WINDOW_MAX + 1] {
        let error = client.consumer_with("jobs", window(wrong)).unwrap_err();
        assert_eq!(error.code(), ErrorCode::Invalid);
    }
    let mut small = client.consumer_with("jobs", window(3)).unwrap();
    let producer = client.producer("jobs").unwrap();
    producer.send_batch((0..10).map(|n| n.to_string())).unwrap();
    producer.flush(Confirm::Stored).unwrap();
    wait_until("the window is full", || broker.info("jobs").leased == 3);
    let first = expect(&mut small, "0");
    let held = [expect(&mut small, "1"), expect(&mut small, "2")];
    assert!(small.try_recv().unwrap().is_none());
    // The others are for others.
    let mut large = client.consumer("jobs").unwrap();
    let others: Vec<Message> = (3..10)
        .map(|n| expect(&mut large, &n.to_string()))
        .collect();
    first.ack().unwrap();
    producer.send("10").unwrap();
    expect(&mut small, "10");
    drop((held, others));
}

#[test]
fn recv_timeout_lasts_as_long_as_it_says() {
    let broker = Broker::with_queue("jobs");
    let mut consumer = broker.client().consumer("jobs").unwrap();
    let (nothing, took) = timed(|| consumer.recv_timeout(Duration::from_millis(150)).unwrap());
    assert!(nothing.is_none());
    assert!(took >= Duration::from_millis(150), "{took:?}");
    assert!(consumer.recv_timeout(Duration::ZERO).unwrap().is_none());
    assert!(consumer.try_recv().unwrap().is_none());
    broker
        .client()
        .producer("jobs")
        .unwrap()
        .send("late")
        .unwrap();
    expect(&mut consumer, "late");
}

// I1: returned messages come again, delayed ones when it is time.
#[test]
fn returned_messages_come_again_and_count_their_attempts() {
    let broker = Broker::with_queue("jobs");
    let client = broker.client();
    let producer = client.producer("jobs").unwrap();
    let options = ConsumerOptions::new().window(1);
    let mut consumer = client.consumer_with("jobs", options).unwrap();
    producer.send("one").unwrap();
    for attempt in 0..4 {
        let message = expect(&mut consumer, "one");
        assert_eq!(
            (message.attempts(), message.redelivered()),
            (attempt, attempt > 0)
        );
        // Both ways back count.
        match attempt % 2 {
            0 => drop(message),
            _ => message.nack(Duration::ZERO).unwrap(),
        }
    }
    let delay = Duration::from_millis(200);
    let ((), took) = timed(|| {
        expect(&mut consumer, "one").nack(delay).unwrap();
        producer.send("two").unwrap();
        let message = expect(&mut consumer, "two");
        assert_eq!((message.attempts(), message.redelivered()), (0, false));
        message.ack().unwrap();
        let message = expect(&mut consumer, "one");
        assert_eq!((message.attempts(), message.redelivered()), (5, true));
        message.ack().unwrap();
    });
    assert!(took >= delay, "{took:?}");
    consumer.flush(Confirm::Stored).unwrap();
    assert_eq!(broker.info("jobs").messages, 0);
}

// I4
#[test]
fn a_lease_that_is_extended_does_not_end() {
    let broker = Broker::start();
    broker.create("jobs", &settings(500));
    let client = broker.client();
    client.producer("jobs").unwrap().send("long work").unwrap();
    let mut consumer = client.consumer("jobs").unwrap();
    let mut other = client.consumer("jobs").unwrap();
    let message = expect(&mut consumer, "long work");
    // By coarse clocks, which lag on a busy machine.
    assert!(message.lease_remaining() <= Duration::from_millis(600));
    message.extend(Duration::from_secs(20)).unwrap();
    assert!(message.lease_remaining() > Duration::from_secs(15));
    // Well beyond its first end: nobody gets it.
    assert!(
        other
            .recv_timeout(Duration::from_millis(1000))
            .unwrap()
            .is_none()
    );
    message.ack().unwrap();
    consumer.flush(Confirm::Stored).unwrap();
    let stats = broker.stats();
    assert_eq!(
        (stats.messages, stats.redeliveries, stats.leases_lost),
        (0, 0, 0)
    );
}

// I1, I4
#[test]
fn a_lease_that_ends_goes_to_another_and_its_ack_is_too_late() {
    let broker = Broker::start();
    broker.create("jobs", &settings(400));
    let client = broker.client();
    let producer = client.producer("jobs").unwrap();
    let mut slow = client.consumer("jobs").unwrap();
    producer.send_batch(["one", "two"]).unwrap();
    let late = [expect(&mut slow, "one"), expect(&mut slow, "two")];
    let mut other = client.consumer("jobs").unwrap();
    let again = [expect(&mut other, "one"), expect(&mut other, "two")];
    for message in &again {
        assert_eq!((message.attempts(), message.redelivered()), (1, true));
        message.extend(Duration::from_secs(30)).unwrap();
    }
    assert!(late[0].lease_remaining() <= Duration::from_millis(100));
    let [one, two] = late;
    one.ack().unwrap();
    two.nack(Duration::ZERO).unwrap();
    match slow.flush(Confirm::Stored) {
        Err(Error::LeaseLost { count }) => assert_eq!(count, 2),
        other => panic!("{other:?}"),
    }
    // Said once.
    slow.flush(Confirm::Stored).unwrap();
    assert_eq!(broker.info("jobs").messages, 2);
    Message::ack_batch(again).unwrap();
    other.flush(Confirm::Stored).unwrap();
    assert_eq!(broker.info("jobs").messages, 0);
}

// I1, I4: one that stands still is given nothing more, and is forgiven when it
// goes on.
#[test]
fn a_consumer_that_stands_still_holds_nothing_up_for_long() {
    let broker = Broker::start();
    broker.create("jobs", &settings(200));
    let mut still = broker.hold(Hold {
        queue: "jobs".to_owned(),
        window: 10,
        take: 1,
    });
    wait_until("it is there", || broker.info("jobs").consumers == 1);
    let client = broker.client();
    let producer = client.producer("jobs").unwrap();
    producer.send("first").unwrap();
    still.wait_noted(Kind::Damaged, 1);
    still.pause();
    let mut living = client.consumer("jobs").unwrap();
    for number in 0..50 {
        producer.send(number.to_string()).unwrap();
    }
    let ((), took) = timed(|| {
        for _ in 0..51 {
            next(&mut living).ack().unwrap();
        }
    });
    // Twice the visibility timeout, and not once more a message.
    assert!(took < Duration::from_secs(2), "{took:?}");
    living.flush(Confirm::Stored).unwrap();
    assert_eq!(broker.info("jobs").messages, 0);
    still.resume();
    still.finish();
}

// I2, I3
#[test]
fn two_consumers_share_a_queue() {
    let broker = Broker::with_queue("jobs");
    let client = broker.client();
    let options = || ConsumerOptions::new().window(4);
    let consumers = [0, 1].map(|_| client.consumer_with("jobs", options()).unwrap());
    let (tell, told) = mpsc::channel();
    let threads = consumers.map(|mut consumer| {
        let tell = tell.clone();
        std::thread::spawn(move || {
            let mut got = Vec::new();
            while let Some(message) = consumer.recv_timeout(Duration::from_millis(500)).unwrap() {
                assert!(!message.redelivered());
                got.push(number(&message));
                message.ack().unwrap();
                if got.len() == 1 {
                    tell.send(()).unwrap();
                }
            }
            got
        })
    });
    let producer = client.producer("jobs").unwrap();
    let mut sent = 0;
    // Until both have something, and then some.
    let mut started = 0;
    while started < 2 {
        producer.send(payload(0, sent, 32)).unwrap();
        sent += 1;
        started += told.try_iter().count();
    }
    for number in sent..sent + 1000 {
        producer.send(payload(0, number, 32)).unwrap();
    }
    let shares = threads.map(|thread| thread.join().unwrap());
    let mut all: Vec<u64> = shares.concat();
    assert!(shares.iter().all(|share| share.is_sorted_by(|a, b| a < b)));
    all.sort_unstable();
    assert_eq!(all, (0..sent + 1000).collect::<Vec<_>>());
}

// I1, I3
#[test]
fn messages_can_be_acked_from_any_thread() {
    let broker = Broker::with_queue("jobs");
    let client = broker.client();
    let mut consumer = client.consumer("jobs").unwrap();
    let producer = client.producer("jobs").unwrap();
    let senders: Vec<_> = (0..4)
        .map(|thread| {
            let producer = producer.clone();
            std::thread::spawn(move || {
                for number in 0..2500 {
                    producer.send(payload(thread, number, 100)).unwrap();
                }
            })
        })
        .collect();
    let workers: Vec<_> = (0..4)
        .map(|_| {
            let (work, jobs) = mpsc::sync_channel::<Message>(16);
            let thread = std::thread::spawn(move || {
                for message in jobs {
                    message.ack().unwrap();
                }
            });
            (work, thread)
        })
        .collect();
    let mut last = HashMap::new();
    for index in 0..10_000 {
        let message = next(&mut consumer);
        assert!(!message.redelivered());
        // What one thread sends is in order.
        let before = last.insert(message.payload()[0], number(&message));
        assert!(before.is_none_or(|before| before + 1 == number(&message)));
        workers[index % workers.len()].0.send(message).unwrap();
    }
    for (work, thread) in workers {
        drop(work);
        thread.join().unwrap();
    }
    for sender in senders {
        sender.join().unwrap();
    }
    consumer.flush(Confirm::Stored).unwrap();
    let stats = broker.stats();
    assert_eq!(
        (stats.messages, stats.acks, stats.redeliveries),
        (0, 10_000, 0)
    );
}

/// A number of `/proc/<pid>/status` in KiB.
fn status_kib(pid: u32, name: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .unwrap();
    line.trim_start_matches(':')
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap()
}

// I1, I2, I3, I7: a backlog costs disk, not memory, and never order.
#[test]
fn a_backlog_beyond_memory_comes_back_in_order_while_new_messages_arrive() {
    const BACKLOG: u64 = 400_000;
    const MORE: u64 = 50_000;
    let broker = Broker::with_queue("jobs");
    let mut producer = broker.produce(Produce {
        count: BACKLOG,
        bytes: 1024,
        batch: 50,
        ..Produce::new("jobs", 1)
    });
    producer.wait();
    assert_eq!(broker.info("jobs").messages, BACKLOG);
    let mut other = broker.produce(Produce {
        count: MORE,
        bytes: 1024,
        batch: 50,
        ..Produce::new("jobs", 2)
    });
    let mut consumer = broker.client().consumer("jobs").unwrap();
    let mut expected = HashMap::from([(1, 0), (2, 0)]);
    for _ in 0..BACKLOG + MORE {
        let message = next(&mut consumer);
        assert!(!message.redelivered());
        assert_eq!(message.payload().len(), 1024);
        let producer = u64::from_ne_bytes(message.payload()[..8].try_into().unwrap());
        let due = expected.get_mut(&producer).unwrap();
        assert_eq!(number(&message), *due, "of producer {producer}");
        *due += 1;
        message.ack().unwrap();
    }
    other.wait();
    consumer.flush(Confirm::Stored).unwrap();
    assert!(consumer.try_recv().unwrap().is_none());
    assert_eq!(broker.info("jobs").messages, 0);
    let peak = status_kib(broker.pid(), "VmHWM");
    eprintln!("peak memory of the broker: {} MiB", peak / 1024);
    // 440 MiB went through it. RocksDB's buffers are most of it.
    assert!(peak < 330 * 1024, "{peak} KiB");
}

// I6
#[test]
fn a_forked_child_is_told_to_connect_again_and_its_parent_goes_on() {
    let broker = Broker::with_queue("jobs");
    let mut child = broker.child(Role::Fork {
        queue: "jobs".to_owned(),
    });
    child.wait();
    assert_eq!(broker.info("jobs").messages, 0);
    wait_until("their sessions are gone", || {
        broker.session_files().is_empty()
    });
}

// I1, I2: more queues than a session has room for.
#[test]
fn one_client_serves_many_queues_from_many_threads() {
    const QUEUES: u64 = 520;
    let broker = Broker::start();
    let client = broker.client();
    for queue in 0..QUEUES {
        client
            .create_queue(&format!("q{queue}"), &settings(30_000))
            .unwrap();
    }
    let producers: Vec<Producer> = (0..QUEUES)
        .map(|queue| client.producer(&format!("q{queue}")).unwrap())
        .collect();
    // One session for 512 queues, one for the rest.
    assert_eq!(broker.session_files().len(), 4);
    std::thread::scope(|scope| {
        for chunk in producers.chunks(65) {
            scope.spawn(move || {
                for round in 0..5 {
                    for producer in chunk {
                        producer
                            .send(format!("{} {round}", producer.queue()))
                            .unwrap();
                    }
                }
            });
        }
    });
    producers[0].flush(Confirm::Stored).unwrap();
    producers.last().unwrap().flush(Confirm::Stored).unwrap();
    assert_eq!(broker.stats().messages, 5 * QUEUES);
    assert_eq!(client.queues().unwrap().len() as u64, QUEUES);
    for queue in ["q0", "q511", "q512", "q519"] {
        let mut consumer = client.consumer(queue).unwrap();
        for round in 0..5 {
            expect(&mut consumer, &format!("{queue} {round}"))
                .ack()
                .unwrap();
        }
        assert!(consumer.try_recv().unwrap().is_none());
    }
}

// I6, I8: a queue goes, and takes nothing else with it.
#[test]
fn a_queue_deleted_under_its_users_says_so() {
    let broker = Broker::with_queue("jobs");
    broker.create("other", &QueueSettings::default());
    let client = broker.client();
    let producer = client.producer("jobs").unwrap();
    let other = client.producer("other").unwrap();
    let mut consumer = client.consumer("jobs").unwrap();
    producer.send_batch(["one", "two"]).unwrap();
    let held = expect(&mut consumer, "one");
    let asleep = client.consumer("jobs").unwrap();
    let (tell, told) = mpsc::channel();
    let sleeper = std::thread::spawn(move || {
        let mut asleep = asleep;
        tell.send(common::this_thread()).unwrap();
        asleep.recv().map(drop)
    });
    common::wait_asleep(std::process::id() as i32, told.recv().unwrap());
    client.delete_queue("jobs").unwrap();

    let gone = |error: Error| {
        assert_eq!(error.code(), ErrorCode::NoSuchQueue);
        assert!(error.to_string().contains("jobs"), "{error}");
    };
    gone(sleeper.join().unwrap().unwrap_err());
    gone(producer.send("three").unwrap_err());
    gone(producer.try_send("three").unwrap_err());
    gone(client.producer("jobs").unwrap_err());
    gone(client.consumer("jobs").map(drop).unwrap_err());
    gone(client.queue("jobs").unwrap_err());
    gone(client.delete_queue("jobs").unwrap_err());
    // What was pushed ahead may still be taken; then it says so too.
    let end = wait_for("the end", || consumer.try_recv().err());
    gone(end);
    // The ack of a message that went with its queue is one that comes too late.
    held.ack().unwrap();
    match consumer.flush(Confirm::Stored) {
        Ok(()) | Err(Error::LeaseLost { .. }) => {}
        Err(error) => panic!("{error}"),
    }
    other.send("still here").unwrap();
    producer.flush(Confirm::Stored).unwrap();
    let mut consumer = client.consumer("other").unwrap();
    expect(&mut consumer, "still here").ack().unwrap();

    // A new queue of the same name is another one.
    client.create_queue("jobs", &settings(1000)).unwrap();
    gone(producer.send("to the old one").unwrap_err());
    assert_eq!(broker.info("jobs").messages, 0);
    client.producer("jobs").unwrap().send("new").unwrap();
    let mut consumer = client.consumer("jobs").unwrap();
    let message = expect(&mut consumer, "new");
    assert!(message.lease_remaining() <= Duration::from_millis(1100));
    assert!(!message.redelivered());
}

// I1: sends that were accepted before the queue went are refused by name.
#[test]
fn sends_to_a_queue_that_goes_are_refused_one_by_one() {
    let broker = Broker::with_queue("jobs");
    broker.create("other", &QueueSettings::default());
    let client = broker.client();
    let producer = client.producer("jobs").unwrap();
    let other = client.producer("other").unwrap();
    let pid = broker.pid();
    // A producer that sends while the queue goes: what it got in either went
    // with the queue, or is refused.
    let sender = std::thread::spawn(move || {
        let mut ids = Vec::new();
        loop {
            match producer.send("x") {
                Ok(id) => ids.push(id),
                Err(Error::NoSuchQueue(_)) => break,
                Err(error) => panic!("{error}"),
            }
        }
        let refused = match producer.flush(Confirm::Stored) {
            Ok(()) => Vec::new(),
            Err(Error::Refused(refusals)) => refusals,
            Err(error) => panic!("{error}"),
        };
        (ids, refused)
    });
    wait_until("it sends", || broker.stats().sends > 1000);
    // So that the ring has some when the deletion comes.
    broker.pause();
    let admin = std::thread::spawn({
        let client = client.clone();
        move || client.delete_queue("jobs")
    });
    signal(pid, Signal::SIGCONT);
    admin.join().unwrap().unwrap();
    let (ids, refused) = sender.join().unwrap();
    assert!(
        refused
            .iter()
            .all(|refusal| refusal.code == ErrorCode::NoSuchQueue)
    );
    assert_eq!(refused.len() as u64, broker.stats().refused);
    // The last ones, in order.
    let last: Vec<_> = ids[ids.len() - refused.len()..].to_vec();
    assert_eq!(
        refused.iter().map(|refusal| refusal.id).collect::<Vec<_>>(),
        last
    );
    other.send("unharmed").unwrap();
    other.flush(Confirm::Stored).unwrap();
    assert_eq!(broker.info("other").messages, 1);
}

#[test]
fn infos_and_stats_say_the_same() {
    let broker = Broker::start();
    broker.create("b", &settings(20_000));
    broker.create("a", &QueueSettings::default());
    let client = broker.client();
    let before = broker.stats();
    assert_eq!((before.queues, before.messages, before.sessions), (2, 0, 0));
    let a = client.producer("a").unwrap();
    let b = client.producer("b").unwrap();
    a.send_batch((0..30).map(|n| n.to_string())).unwrap();
    b.send_batch((0..12).map(|n| n.to_string())).unwrap();
    b.flush(Confirm::Stored).unwrap();
    let options = ConsumerOptions::new().window(10);
    let mut consumer = client.consumer_with("a", options).unwrap();
    let mut held: Vec<Message> = (0..10).map(|_| next(&mut consumer)).collect();
    Message::ack_batch(held.drain(..4)).unwrap();
    held.pop().unwrap().nack(Duration::from_secs(60)).unwrap();
    consumer.flush(Confirm::Stored).unwrap();
    wait_until("the window is full again", || broker.info("a").leased == 10);

    let list = client.queues().unwrap();
    assert_eq!(
        list.iter().map(|queue| &queue.name).collect::<Vec<_>>(),
        ["a", "b"]
    );
    let (a, b) = (&list[0], &list[1]);
    assert_eq!(
        (a.messages, a.leased, a.producers, a.consumers),
        (26, 10, 1, 1)
    );
    assert_eq!(
        (b.messages, b.leased, b.producers, b.consumers),
        (12, 0, 1, 0)
    );
    assert_eq!(b.settings, settings(20_000));
    let age = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH + Duration::from_millis(a.created_ms));
    assert!(age.unwrap() < Duration::from_secs(60));
    let stats = broker.stats();
    assert_eq!(
        (stats.queues, stats.messages, stats.leased, stats.sessions),
        (2, 38, 10, 2)
    );
    assert_eq!((stats.sends, stats.acks, stats.returned), (42, 4, 1));
    assert_eq!(stats.deliveries, 4 + 1 + 10);
    assert_eq!(
        (stats.redeliveries, stats.leases_lost, stats.refused),
        (0, 0, 0)
    );
    assert!(
        stats.stored >= 38 && stats.round > before.round && !stats.disk_full,
        "{stats:?}"
    );
    drop((consumer, held));
    wait_until("it has left", || {
        let info = broker.info("a");
        (info.messages, info.leased, info.consumers) == (26, 0, 0)
    });
}

fn open_files(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .count()
}

fn mappings(pid: u32) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    maps.lines()
        .filter(|line| line.contains(".ring") || line.contains(".ledger"))
        .count()
}

// I7: all that a session used returns when it has gone, whichever way it went.
#[test]
fn sessions_leave_nothing_behind() {
    let broker = Broker::with_queue("jobs");
    let client = broker.client();
    let round = |leave: &dyn Fn(common::Process)| {
        let child = broker.child(Role::Attach {
            queue: "jobs".to_owned(),
            pairs: 20,
        });
        child.wait_noted(Kind::Confirmed, 1);
        let info = client.queue("jobs").unwrap();
        assert_eq!((info.producers, info.consumers), (20, 20));
        assert_eq!(broker.session_files().len(), 2 * 40);
        leave(child);
        wait_until("its files are gone", || broker.session_files().is_empty());
        let info = client.queue("jobs").unwrap();
        assert_eq!((info.producers, info.consumers), (0, 0));
        assert_eq!(client.stats().unwrap().sessions, 0);
    };
    let finish = |mut child: common::Process| child.finish();
    let kill = |mut child: common::Process| child.kill();
    let stop_and_kill = |mut child: common::Process| {
        child.pause();
        child.kill();
    };
    round(&finish);
    let pid = broker.pid();
    // Connections close a moment after their sessions.
    let files = wait_for("its descriptors are few", || {
        Some(open_files(pid)).filter(|count| *count < 80)
    });
    let before = (mappings(pid), status_kib(pid, "RssShmem"));
    for leave in [
        &kill as &dyn Fn(common::Process),
        &stop_and_kill,
        &finish,
        &kill,
    ] {
        round(leave);
    }
    wait_until("its descriptors are closed", || open_files(pid) <= files);
    wait_until("its mappings are gone", || mappings(pid) <= before.0);
    assert!(status_kib(pid, "RssShmem") <= before.1 + 64);
}

// I6, I8: a full answer ring stalls who does not drain it, and nobody else.
#[test]
fn a_client_that_does_not_read_its_answers_stalls_itself_alone() {
    const MESSAGES: u64 = 3000;
    let broker = Broker::start();
    broker.create("jobs", &settings(1000));
    broker.create("other", &QueueSettings::default());
    let client = broker.client();
    let producer = client.producer("jobs").unwrap();
    for number in 0..MESSAGES {
        producer.send(payload(0, number, 32)).unwrap();
    }
    producer.flush(Confirm::Stored).unwrap();
    let options = ConsumerOptions::new().window(MESSAGES as u32);
    let mut slow = client.consumer_with("jobs", options.clone()).unwrap();
    let late: Vec<Message> = (0..MESSAGES).map(|_| next(&mut slow)).collect();
    // All of them end, and go to another.
    let mut quick = client.consumer_with("jobs", options).unwrap();
    for _ in 0..MESSAGES {
        next(&mut quick).ack().unwrap();
    }
    quick.flush(Confirm::Stored).unwrap();
    // Each of these is answered that it comes too late; the ring has room for a
    // thousand answers.
    for message in late {
        message.ack().unwrap();
    }
    wait_until("its session stalls", || broker.stats().leases_lost >= 700);
    let before = broker.stats().leases_lost;
    // Others go on.
    let other = client.producer("other").unwrap();
    let mut consumer = client.consumer("other").unwrap();
    for number in 0..2000 {
        other.send(payload(0, number, 100)).unwrap();
        let message = next(&mut consumer);
        assert_eq!(self::number(&message), number);
        message.ack().unwrap();
    }
    other.flush(Confirm::Synced).unwrap();
    assert_eq!(broker.stats().leases_lost, before, "it has stalled");
    assert!(before < MESSAGES);
    match slow.flush(Confirm::Stored) {
        Err(Error::LeaseLost { count }) => assert_eq!(count, MESSAGES),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_message_arrives_as_it_was_sent() {
    let broker = Broker::with_queue("jobs");
    let client = broker.client();
    let producer = client.producer("jobs").unwrap();
    let mut consumer = client.consumer("jobs").unwrap();
    // Around the sizes at which something changes: empty, words, what fits a
    // message's own bytes, the limit.
    for len in [0, 1, 7, 8, 9, 101, 102, 103, 104, 4096, 15 * 1024] {
        let sent: Vec<u8> = (0..len).map(|at| (at * 7 + len) as u8).collect();
        let started = SystemTime::now();
        let id = producer.send(&sent).unwrap();
        let message = next(&mut consumer);
        assert_eq!(message.payload(), sent);
        assert_eq!((message.id(), message.attempts()), (id, 0));
        assert!(!message.redelivered());
        let tolerance = Duration::from_millis(20);
        assert!(message.sent_at() + tolerance >= started);
        assert!(message.sent_at() <= SystemTime::now() + tolerance);
        message.ack().unwrap();
    }
    // Identities never come again.
    let ids: HashSet<_> = (0..1000).map(|_| producer.send("x").unwrap()).collect();
    assert_eq!(ids.len(), 1000);
}

// I1: messages of an ended consumer can't be answered, but be read.
#[test]
fn messages_outlive_their_consumer_as_bytes_only() {
    let broker = Broker::with_queue("jobs");
    let client = broker.client();
    client.producer("jobs").unwrap().send("one").unwrap();
    let mut consumer = client.consumer("jobs").unwrap();
    let message = expect(&mut consumer, "one");
    drop(consumer);
    let mut other = client.consumer("jobs").unwrap();
    let again = expect(&mut other, "one");
    assert_eq!(message.payload(), b"one");
    assert_eq!(
        message.extend(Duration::from_secs(1)).unwrap_err().code(),
        ErrorCode::Closed
    );
    assert_eq!(message.ack().unwrap_err().code(), ErrorCode::Closed);
    again.ack().unwrap();
    other.flush(Confirm::Stored).unwrap();
    assert_eq!(broker.info("jobs").messages, 0);
}

// I1: what a program that ends has sent is there, though it never flushed.
#[test]
fn sends_outlive_their_program() {
    let broker = Broker::with_queue("jobs");
    broker.pause();
    broker.resume();
    {
        let client = broker.client();
        let producer = client.producer("jobs").unwrap();
        broker.pause();
        producer
            .send_batch((0..100).map(|n| n.to_string()))
            .unwrap();
    }
    broker.resume();
    wait_until("they are there", || broker.info("jobs").messages == 100);
    wait_until("its session is gone", || broker.session_files().is_empty());
}

/// User and system time of a process, in clock ticks of 10 ms.
fn cpu_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

// Idle means no CPU.
#[test]
fn an_idle_broker_and_its_idle_clients_take_no_cpu() {
    let broker = Broker::with_queue("jobs");
    broker.create("idle", &QueueSettings::default());
    let child = broker.child(Role::Attach {
        queue: "idle".to_owned(),
        pairs: 5,
    });
    child.wait_noted(Kind::Confirmed, 1);
    let idle = broker.consume(common::Consume::new("jobs"));
    let client = broker.client();
    client
        .producer("jobs")
        .unwrap()
        .send(payload(1, 0, 64))
        .unwrap();
    idle.wait_noted(Kind::Acked, 1);
    broker.wait_drained("jobs");
    // What it still has to do (a sync after a second) comes once.
    let quiet = wait_for("a quiet second", || {
        let before = cpu_ticks(broker.pid());
        std::thread::sleep(Duration::from_secs(1));
        Some(cpu_ticks(broker.pid()) - before).filter(|ticks| *ticks <= 2)
    });
    eprintln!("ticks of 10 ms in a second: {quiet}");
}
