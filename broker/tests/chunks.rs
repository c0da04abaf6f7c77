//! Large payloads: every state of a chunk, and who can die or misbehave in it.
//!
//! The states: loaned (not sent), queued, shown in place to a consumer, copied into
//! a consumer's memory, stored, expired under a reader, returned.

#![allow(clippy::unwrap_used, reason = "a test that can't go on has failed")]
#![allow(clippy::print_stderr, reason = "logs are shown when a test fails")]

mod common;

use common::{
    Broker, Consume, Hold, Kind, Process, Produce, Role, SmallFileSystem, Witness, audit, files,
    finish, scramble, wait_until,
};
use ringmain::{Confirm, ConsumerOptions, Error, Message, ProducerOptions, QueueSettings};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Too long for a record.
const LEN: usize = 300_000;

/// Not a test: what the children run.
#[test]
fn child_process() {
    common::run_child();
}

fn large(producer: u64, count: u64) -> Produce {
    Produce {
        bytes: LEN,
        count,
        ..Produce::new("jobs", producer)
    }
}

fn hold(broker: &Broker, take: u64) -> Process {
    let holder = broker.hold(Hold {
        queue: "jobs".to_owned(),
        window: take as u32,
        take,
    });
    wait_until("it holds them", || holder.count() >= take);
    assert_eq!(holder.count_of(Kind::Taken), take, "{:?}", holder.entries());
    holder
}

fn loaner(broker: &Broker) -> Process {
    let loaner = broker.child(Role::Loan {
        queue: "jobs".to_owned(),
        bytes: LEN,
    });
    loaner.wait_noted(Kind::Intent, 1);
    loaner
}

/// The payload segments that are there.
fn segments(broker: &Broker) -> Vec<PathBuf> {
    let dir = broker.shm_dir();
    let names = files(&dir).into_iter();
    names
        .filter(|name| name.contains(".out") || name.contains(".in"))
        .map(|name| dir.join(name))
        .collect()
}

// I7: memory goes back when those who used it have gone.
#[track_caller]
fn wait_no_segments(broker: &Broker) {
    wait_until("all payload memory is back", || segments(broker).is_empty());
}

/// Consumes what there is, and compares.
#[track_caller]
fn drain(broker: &Broker, producers: &[&Process], earlier: &[&Process]) -> common::Report {
    let mut consumer = broker.consume(Consume::new("jobs"));
    broker.wait_drained("jobs");
    consumer.finish();
    let consumers: Vec<&Process> = earlier.iter().copied().chain([&consumer]).collect();
    audit(producers, &consumers)
}

// I9: loaned, and the producer dies.
#[test]
fn a_loan_of_a_killed_producer_is_nothing() {
    let broker = Broker::with_queue("jobs");
    let mut loaner = loaner(&broker);
    assert_eq!(segments(&broker).len(), 1);
    loaner.kill();
    wait_no_segments(&broker);
    assert_eq!(broker.info("jobs").messages, 0);
}

// I1, I9: loaned, and the broker dies: the loan is sent to the next one.
#[test]
fn a_loan_outlives_the_broker() {
    let mut broker = Broker::with_queue("jobs");
    let mut loaner = loaner(&broker);
    broker.kill();
    broker.restart();
    loaner.finish();
    let report = drain(&broker, &[&loaner], &[]);
    assert_eq!((report.delivered, report.in_doubt), (1, 0));
    wait_no_segments(&broker);
}

// I1, I2, I9: queued, and the producer dies, at many moments.
#[test]
fn chunks_of_a_killed_producer_are_all_there() {
    let broker = Broker::with_queue("jobs");
    for round in 0..8 {
        let mut producer = broker.produce(large(round, u64::MAX));
        producer.wait_noted(Kind::Accepted, scramble(round) % 8);
        producer.kill();
        let report = drain(&broker, &[&producer], &[]);
        assert_eq!(report.redelivered, 0, "{report:?}");
        assert!(report.delivered >= report.accepted, "{report:?}");
    }
    wait_no_segments(&broker);
}

// I1, I2, I9: queued, and the broker dies, and then both.
#[test]
fn chunks_that_are_queued_outlive_the_broker_and_both() {
    let mut broker = Broker::with_queue("jobs");
    let mut producer = broker.produce(large(1, u64::MAX));
    for round in 0..4 {
        producer.wait_for_more(2 + scramble(round) % 20);
        broker.kill();
        broker.restart();
    }
    producer.wait_for_more(4);
    broker.kill_at_once();
    producer.kill();
    broker.reap();
    broker.restart();
    let report = drain(&broker, &[&producer], &[]);
    assert_eq!(report.redelivered, 0, "{report:?}");
    assert!(report.delivered >= report.accepted, "{report:?}");
    wait_no_segments(&broker);
}

// I9: read in place, and the producer dies: the reader reads on.
#[test]
fn a_reader_reads_on_when_the_producer_is_killed() {
    let broker = Broker::with_queue("jobs");
    let mut producer = broker.produce(large(1, 4));
    producer.wait_noted(Kind::Confirmed, 1);
    let mut holder = hold(&broker, 4);
    producer.kill();
    // What it reads is compared again when it acks.
    let mut witness = broker.produce(large(2, 8));
    witness.wait();
    holder.finish();
    assert_eq!(holder.count_of(Kind::Damaged), 0);
    let report = drain(&broker, &[&producer, &witness], &[&holder]);
    // What it was given after that, and did not take, came again.
    assert_eq!((report.delivered, report.repeated), (12, 0), "{report:?}");
    wait_no_segments(&broker);
}

// I1, I3, I9: read in place, and the consumer dies.
#[test]
fn what_a_killed_consumer_read_in_place_comes_again_whole() {
    let broker = Broker::with_queue("jobs");
    let mut producer = broker.produce(Produce {
        flush_every: 1,
        ..large(1, 6)
    });
    producer.wait_noted(Kind::Confirmed, 6);
    let mut holder = hold(&broker, 4);
    holder.kill();
    let report = drain(&broker, &[&producer], &[&holder]);
    assert_eq!((report.delivered, report.repeated), (6, 4), "{report:?}");
    producer.finish();
    wait_no_segments(&broker);
}

// I1, I4, I9: read, in place or from the store, and the broker dies: leases stay.
#[test]
fn readers_read_on_when_the_broker_is_killed() {
    let mut broker = Broker::with_queue("jobs");
    let mut stored = broker.produce(large(1, 3));
    stored.wait();
    let mut producer = broker.produce(large(2, 3));
    producer.wait_noted(Kind::Confirmed, 1);
    let mut holder = hold(&broker, 6);
    for _ in 0..2 {
        broker.kill();
        broker.restart();
    }
    producer.finish();
    holder.finish();
    assert_eq!(
        holder.count_of(Kind::Damaged) + holder.count_of(Kind::LeasesLost),
        0
    );
    let report = drain(&broker, &[&stored, &producer], &[&holder]);
    assert_eq!((report.delivered, report.redelivered), (6, 0), "{report:?}");
    wait_no_segments(&broker);
}

// I1, I3, I9: copied from the store into the consumer's memory, and it dies.
#[test]
fn what_a_killed_consumer_had_from_the_store_comes_again_whole() {
    let broker = Broker::with_queue("jobs");
    let mut producer = broker.produce(large(1, 6));
    producer.wait();
    let mut holder = hold(&broker, 4);
    holder.kill();
    wait_no_segments(&broker);
    let report = drain(&broker, &[&producer], &[&holder]);
    assert_eq!((report.delivered, report.repeated), (6, 4), "{report:?}");
    wait_no_segments(&broker);
}

// I4, I9: a lease runs out under a live reader: the message goes, the bytes stay.
#[test]
fn expiry_takes_the_message_and_not_the_bytes_under_a_reader() {
    let broker = Broker::start();
    let settings = QueueSettings {
        visibility_timeout_ms: 300,
        ..QueueSettings::default()
    };
    broker.create("jobs", &settings);
    let client = broker.client();
    let producer = client.producer("jobs").unwrap();
    let mut slow = client.consumer("jobs").unwrap();
    let sent = common::payload(1, 0, LEN);
    producer.send(&sent).unwrap();
    let late = slow.recv().unwrap();
    assert_eq!(late.payload(), sent);
    let mut other = broker.client().consumer("jobs").unwrap();
    let again = other.recv_timeout(common::BOUND).unwrap().unwrap();
    assert_eq!((again.payload(), again.redelivered()), (&sent[..], true));
    again.ack().unwrap();
    other.flush(Confirm::Stored).unwrap();
    // It is settled, and its sender sends much more than a segment holds.
    let options = ConsumerOptions::new().window(1);
    let mut reader = broker.client().consumer_with("jobs", options).unwrap();
    drop(other);
    for number in 1..200 {
        producer.send(common::payload(1, number, LEN)).unwrap();
        // The slow one may get some of them: it answers them.
        while let Some(message) = reader.try_recv().unwrap() {
            message.ack().unwrap();
        }
        while let Some(message) = slow.try_recv().unwrap() {
            message.ack().unwrap();
        }
    }
    assert_eq!(late.payload(), sent, "under the reader");
    late.ack().unwrap();
    let lost = slow.flush(Confirm::Stored).unwrap_err();
    assert!(matches!(lost, Error::LeaseLost { count: 1 }), "{lost}");
}

// I9: `Bytes` hold the memory and the lease, in whatever thread, and after the
// consumer and the client are gone.
#[test]
fn bytes_of_a_message_outlive_everything_but_their_last_owner() {
    let broker = Broker::with_queue("jobs");
    let client = broker.client();
    let producer = client.producer("jobs").unwrap();
    let sent = common::payload(1, 0, LEN);
    producer.send(&sent).unwrap();
    let mut consumer = client.consumer("jobs").unwrap();
    let message = consumer.recv().unwrap();
    let bytes = message.into_bytes();
    let part = bytes.slice(1000..2000);
    drop(bytes);
    drop(producer);
    let expected = sent[1000..2000].to_vec();
    let check = move || assert_eq!(part, expected);
    assert_eq!(broker.info("jobs").leased, 1);
    std::thread::spawn(check).join().unwrap();
    broker.wait_drained("jobs");

    // Without the consumer the lease is over, and the bytes are there.
    client.producer("jobs").unwrap().send(&sent).unwrap();
    let bytes = consumer.recv().unwrap().into_bytes();
    drop((consumer, client));
    assert_eq!(bytes, sent);
    let mut other = broker.client().consumer("jobs").unwrap();
    let again = other.recv_timeout(common::BOUND).unwrap().unwrap();
    assert_eq!((again.payload(), again.redelivered()), (&sent[..], true));
    again.ack().unwrap();
    drop((bytes, other));
    broker.wait_drained("jobs");
    wait_no_segments(&broker);
}

/// Bytes of the payload segments.
/// I7: a consumer, and what it read in place, dropped while there is no broker, are
/// nothing to the next one, though their process lives on.
#[test]
fn what_was_dropped_without_a_broker_is_given_back_by_the_next() {
    let mut broker = Broker::with_queue("jobs");
    let producer = broker.client().producer("jobs").unwrap();
    producer.send(vec![1; LEN]).unwrap();
    let mut consumer = broker.client().consumer("jobs").unwrap();
    let read = consumer.recv().unwrap();
    broker.kill();
    drop(consumer);
    drop(read);
    broker.restart();
    wait_until("its session is gone", || broker.info("jobs").consumers == 0);
    let mut consumer = broker.client().consumer("jobs").unwrap();
    let message = consumer.recv().unwrap();
    assert_eq!(message.payload(), [1; LEN]);
    message.ack().unwrap();
    drop((producer, consumer));
    wait_until("nothing is left", || broker.session_files().is_empty());
}

fn segment_bytes(broker: &Broker) -> u64 {
    let sizes = segments(broker).into_iter();
    sizes
        .map(|path| path.metadata().map_or(0, |m| m.len()))
        .sum()
}

// A consumer that never acks costs its own memory, and stops no sender.
#[test]
fn a_consumer_that_never_acks_costs_disk_and_its_own_memory_alone() {
    const MIB: usize = 1 << 20;
    let broker = Broker::start_with(&["--session-payload-memory", "16MiB"], "jobs");
    let producer_client = broker.client();
    let options = ProducerOptions::new().confirm(Confirm::Stored);
    let producer = producer_client.producer_with("jobs", options).unwrap();
    let consumer_client = broker.client();
    let options = ConsumerOptions::new().window(1000);
    let mut consumer = consumer_client.consumer_with("jobs", options).unwrap();
    let mut held = Vec::new();
    for number in 0..100 {
        producer.send(common::payload(1, number, MIB)).unwrap();
        held.extend(consumer.try_recv().unwrap());
    }
    while let Some(message) = consumer.recv_timeout(Duration::from_millis(300)).unwrap() {
        held.push(message);
    }
    assert!((5..60).contains(&held.len()), "{} held", held.len());
    assert!(segment_bytes(&broker) < (33 * MIB) as u64);
    let check = |message: &Message, number: usize| {
        assert!(!message.redelivered(), "{number}");
        let expected = common::payload(1, number as u64, MIB);
        assert!(message.payload() == expected, "message {number}");
    };
    for (number, message) in held.iter().enumerate() {
        check(message, number);
    }
    let first = held.len();
    Message::ack_batch(held).unwrap();
    for number in first..100 {
        let message = consumer.recv_timeout(common::BOUND).unwrap().unwrap();
        check(&message, number);
        message.ack().unwrap();
    }
    consumer.flush(Confirm::Stored).unwrap();
    assert_eq!(broker.info("jobs").messages, 0);
}

// I1, I2, I3, I9: everybody at random.
#[test]
fn producers_consumers_and_brokers_of_large_payloads_die_at_random() {
    let mut broker = Broker::with_queue("jobs");
    let start_producer = |broker: &Broker, number: u64| {
        broker.produce(Produce {
            bytes: [64, 20_000, 300_000, 1_200_000][number as usize % 4],
            flush_every: if number.is_multiple_of(2) {
                10
            } else {
                u64::MAX
            },
            ..Produce::new("jobs", number)
        })
    };
    let start_consumer = |broker: &Broker, number: u64| {
        broker.consume(Consume {
            window: [1, 4, 32][number as usize % 3],
            ..Consume::new("jobs")
        })
    };
    let mut producers: Vec<Process> = (0..2).map(|n| start_producer(&broker, n)).collect();
    let mut consumers: Vec<Process> = (0..2).map(|n| start_consumer(&broker, n)).collect();
    for step in 0..16_u64 {
        let (producer, consumer) = (producers.len() - 1, consumers.len() - 1);
        producers[producer].wait_for_more(5 + scramble(step) % 20);
        match scramble(step + 1000) % 3 {
            0 => {
                producers[producer].kill();
                producers.push(start_producer(&broker, step + 10));
                producers.last().unwrap().wait_for_more(1);
            }
            1 => {
                consumers[consumer].kill();
                consumers.push(start_consumer(&broker, step));
            }
            _ => {
                // Who is just connecting would be told.
                consumers[consumer].wait_for_more(1);
                broker.kill();
                broker.restart();
            }
        }
    }
    let report = finish(&broker, &mut producers, &mut consumers);
    assert!(report.delivered >= report.accepted, "{report:?}");
    wait_no_segments(&broker);
}

/// A paused producer of large payloads with some of them queued, and the file of
/// its payload segment.
fn owner(broker: &Broker) -> (Process, PathBuf) {
    let owner = broker.produce(large(7, u64::MAX));
    owner.wait_noted(Kind::Accepted, 3);
    owner.pause();
    let path = segments(broker).into_iter().find(|path| {
        let name = path.file_name().unwrap().to_str().unwrap();
        name.contains(".out")
    });
    (owner, path.unwrap())
}

fn open(path: &Path) -> File {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap()
}

// I8: a segment cut short under the broker and under readers ends its session.
#[test]
fn a_payload_segment_cut_short_by_its_owner_harms_its_session_alone() {
    for keep in [0, 4096] {
        let broker = Broker::with_queue("jobs");
        let witness = Witness::of(&broker);
        let (mut owner, path) = owner(&broker);
        open(&path).set_len(keep).unwrap();
        owner.resume();
        // Its next sends, or what the broker has yet to store, are not there.
        wait_until("its session has ended", || !path.exists());
        owner.kill();
        let session = path.file_name().unwrap().to_str().unwrap();
        let session = session.split('.').next().unwrap().to_owned();
        wait_until("its files are gone", || {
            files(&broker.shm_dir())
                .iter()
                .all(|name| !name.starts_with(&format!("{session}.")))
        });
        witness.finish(&broker);
    }
}

// I8: the same of the rings, under a broker that looks at them.
#[test]
fn rings_cut_short_by_their_owner_harm_its_session_alone() {
    let broker = Broker::with_queue("jobs");
    let child = broker.child(Role::Attach {
        queue: "jobs".to_owned(),
        pairs: 1,
    });
    child.wait_noted(Kind::Confirmed, 1);
    let rings: Vec<PathBuf> = broker
        .session_files()
        .into_iter()
        .filter(|name| name.ends_with(".ring"))
        .map(|name| broker.shm_dir().join(name))
        .collect();
    assert_eq!(rings.len(), 2);
    let witness = Witness::of(&broker);
    // It does not touch them itself: the broker does.
    child.pause();
    for ring in &rings {
        open(ring).set_len(0).unwrap();
    }
    for ring in &rings {
        wait_until("its sessions are gone", || !ring.exists());
    }
    assert!(broker.log_text().contains("cut short"));
    assert_eq!(broker.info("jobs").consumers, 0);
    witness.finish(&broker);
}

// I8: garbage in its payloads and chunk words is its own.
#[test]
fn a_payload_segment_rewritten_by_its_owner_harms_its_session_alone() {
    let broker = Broker::with_queue("jobs");
    let witness = Witness::of(&broker);
    for seed in 0..6 {
        let (mut owner, path) = owner(&broker);
        let file = open(&path);
        let bytes = file.metadata().unwrap().len();
        let garbage: Vec<u8> = (0..4096).map(|n| scramble(seed * 4096 + n) as u8).collect();
        // The words lie at the front.
        file.write_all_at(&garbage, 0).unwrap();
        for part in 0..16 {
            let at = scramble(seed + part) % (bytes - 4096);
            file.write_all_at(&garbage, at).unwrap();
        }
        owner.resume();
        witness.undisturbed();
        owner.kill();
        wait_until("its memory is back", || !path.exists());
    }
    // What it sent is there, with whatever it made of it.
    let mut consumer = broker.client().consumer("jobs").unwrap();
    wait_until("all that it sent is taken", || {
        while let Some(message) = consumer.try_recv().unwrap() {
            assert_eq!(message.payload().len(), LEN);
            message.ack().unwrap();
        }
        broker.info("jobs").messages == 0
    });
    drop(consumer);
    wait_no_segments(&broker);
    witness.finish(&broker);
}

// I7: in a container's 64 MiB, everything works; full, all is told, and what there
// is goes on.
#[test]
fn shared_memory_of_64_mib_and_full_is_enough_for_what_is_there() {
    const MIB: usize = 1 << 20;
    let folder = tempfile::tempdir().unwrap();
    let Some(shm) = SmallFileSystem::at(folder.path(), 64 << 20, "64 MiB of shared memory") else {
        return;
    };
    let mut broker = Broker::new_in(folder.path());
    broker.restart();
    broker.create("jobs", &QueueSettings::default());
    let client = broker.client();
    let producer = client.producer("jobs").unwrap();
    let small = broker.client();
    let small = small.producer("jobs").unwrap();
    let mut consumer = broker.client().consumer("jobs").unwrap();

    let hog = shm.fill(0);
    let told = producer.try_send(vec![0; 4 * MIB]).unwrap_err();
    assert!(matches!(told, Error::Full(_)), "{told}");
    assert!(told.to_string().contains("shared memory"), "{told}");
    small.send("goes on").unwrap();
    let message = consumer.recv_timeout(common::BOUND).unwrap().unwrap();
    assert_eq!(message.payload(), b"goes on");
    message.ack().unwrap();

    // By itself, once there is room: and more than fits.
    hog.set_len(0).unwrap();
    for number in 0..40 {
        producer.send(common::payload(1, number, 4 * MIB)).unwrap();
    }
    producer.flush(Confirm::Stored).unwrap();
    for number in 0..40 {
        let message = consumer.recv_timeout(common::BOUND).unwrap().unwrap();
        assert!(
            message.payload() == common::payload(1, number, 4 * MIB),
            "{number}"
        );
        message.ack().unwrap();
    }
    consumer.flush(Confirm::Stored).unwrap();
}

// I1, I9: longer than one value of the store: through a backlog and deaths.
#[test]
fn a_message_in_many_values_comes_back_as_one() {
    const BYTES: usize = 40 << 20;
    let mut broker = Broker::start();
    let settings = QueueSettings {
        max_message_bytes: BYTES as u32,
        ..QueueSettings::default()
    };
    broker.create("jobs", &settings);
    let client = broker.client();
    let producer = client.producer("jobs").unwrap();
    let sent = common::payload(1, 0, BYTES);
    let mut loan = producer.loan(BYTES).unwrap();
    loan.copy_from_slice(&sent);
    loan.send().unwrap();
    broker.kill();
    broker.restart();
    producer.flush(Confirm::Stored).unwrap();
    drop((producer, client));
    broker.kill();
    broker.restart();
    let mut consumer = broker.client().consumer("jobs").unwrap();
    let message = consumer.recv_timeout(common::BOUND).unwrap().unwrap();
    assert!(message.payload() == sent);
    broker.kill();
    broker.restart();
    assert!(message.payload() == sent);
    message.ack().unwrap();
    consumer.flush(Confirm::Stored).unwrap();
    assert_eq!(broker.info("jobs").messages, 0);
}

#[test]
fn the_guide_is_true() {
    let shown = common::guide::run("docs/guide/large-payloads.md");
    assert!(shown.contains("the same"), "{shown}");
}
