//! Dead letters, with real processes: `dlq`, large payloads, and a broker that is
//! killed while messages die.

#![allow(clippy::unwrap_used, reason = "a test that can't go on has failed")]
#![allow(clippy::print_stderr, reason = "logs are shown when a test fails")]

mod common;

use common::{Broker, guide, wait_until};
use ringmain::control::DeadReason;
use ringmain::{Client, Confirm, Error, QueueSettings};
use std::collections::BTreeSet;
use std::process::Output;
use std::sync::mpsc::{self, TryRecvError};
use std::time::Duration;

fn start(max_attempts: u16) -> Broker {
    let broker = Broker::start();
    let settings = QueueSettings {
        max_attempts,
        ..QueueSettings::default()
    };
    broker.create("jobs", &settings);
    broker
}

fn send(client: &Client, payloads: &[impl AsRef<[u8]>]) {
    let producer = client.producer("jobs").unwrap();
    for payload in payloads {
        producer.send(payload).unwrap();
    }
    producer.flush(Confirm::Stored).unwrap();
}

/// What a queue gives, acked.
fn take(client: &Client, queue: &str, count: usize) -> Vec<Vec<u8>> {
    let mut consumer = client.consumer(queue).unwrap();
    let payloads = (0..count).map(|_| {
        let message = consumer.recv().unwrap();
        let payload = message.payload().to_vec();
        message.ack().unwrap();
        payload
    });
    let payloads = payloads.collect();
    consumer.flush(Confirm::Stored).unwrap();
    payloads
}

fn wait_dead(broker: &Broker, messages: u64) {
    wait_until("they are moved", || {
        let queues = broker.client().queues().unwrap();
        let dead = queues.iter().find(|queue| queue.name == "jobs.dead");
        dead.is_some_and(|queue| queue.messages == messages)
    });
}

#[track_caller]
fn printed(code: i32, output: &Output) -> String {
    let errors = String::from_utf8_lossy(&output.stderr);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(code), "{text}{errors}");
    text + &errors
}

#[test]
fn the_guide_is_true() {
    let shown = guide::run("docs/guide/dead-letters.md");
    assert!(shown.contains("not an order"), "{shown}");
    assert!(shown.contains("1 message(s) sent back"), "{shown}");
}

/// I1
#[test]
fn dead_letters_tell_their_story() {
    let broker = start(2);
    let client = broker.client();
    send(&client, &["one", "two"]);
    let mut consumer = client.consumer("jobs").unwrap();
    consumer.recv().unwrap().reject().unwrap();
    for _ in 0..2 {
        consumer.recv().unwrap().nack(Duration::ZERO).unwrap();
    }
    wait_dead(&broker, 2);
    let listed = client.dead_letters("jobs.dead", 0, 10).unwrap();
    let story: Vec<_> = listed
        .iter()
        .map(|message| {
            let death = message.death.as_ref().unwrap();
            assert!(death.died_at_ms >= message.sent_at_ms);
            (
                message.bytes,
                death.reason,
                death.source.as_str(),
                death.attempts,
            )
        })
        .collect();
    let expected = [
        (3, DeadReason::Rejected, "jobs", 1),
        (3, DeadReason::MaxAttempts, "jobs", 2),
    ];
    assert_eq!(story, expected);
    assert_eq!(broker.stats().dead, 2);
    let behind = client.dead_letters("jobs.dead", listed[1].position, 10);
    assert_eq!(behind.unwrap(), listed[1..]);
    assert_eq!(client.dead_letters("jobs.dead", 0, 1).unwrap(), listed[..1]);

    let shown = printed(0, &broker.run(&["dlq", "list", "jobs.dead"]));
    for word in ["rejected", "too many attempts", "jobs", "3 B"] {
        assert!(shown.contains(word), "{shown}");
    }
    let all = printed(0, &broker.run(&["dlq", "list", "--json"]));
    assert!(all.contains("\"jobs.dead\"") && !all.contains("\"name\": \"jobs\""));
}

/// I10: parts go along, and come back, over a death of the broker.
#[test]
fn large_messages_die_and_come_back_whole() {
    let mut broker = start(0);
    let payloads: Vec<Vec<u8>> = [100, 200_000, 3 << 20]
        .iter()
        .map(|&len: &usize| (0..len).map(|at| (at % 251) as u8).collect())
        .collect();
    let client = broker.client();
    send(&client, &payloads);
    let mut consumer = client.consumer("jobs").unwrap();
    for _ in &payloads {
        consumer.recv().unwrap().reject().unwrap();
    }
    wait_dead(&broker, 3);
    drop(consumer);
    broker.kill();
    broker.restart();
    assert_eq!(broker.client().redrive("jobs.dead", None, None).unwrap(), 3);
    broker.kill();
    broker.restart();
    assert!(take(&broker.client(), "jobs", 3) == payloads);
    broker.wait_drained("jobs");
    broker.wait_drained("jobs.dead");
}

fn all_died(broker: &Broker) -> bool {
    broker.info("jobs").messages == 0
}

/// I1, I10: whenever the broker is killed, each message is in one queue, once.
#[test]
fn messages_that_die_while_the_broker_does_are_moved_once() {
    const COUNT: u64 = 20_000;
    let mut broker = start(2);
    let client = broker.client();
    let payloads: Vec<String> = (0..COUNT).map(|number| number.to_string()).collect();
    send(&client, &payloads);
    let (stop, stopped) = mpsc::channel::<()>();
    let failing = std::thread::spawn(move || {
        let mut consumer = client.consumer("jobs").unwrap();
        while stopped.try_recv() == Err(TryRecvError::Empty) {
            if let Some(message) = consumer.recv_timeout(Duration::from_millis(20)).unwrap() {
                message.nack(Duration::ZERO).unwrap();
            }
        }
    });
    let mut kills = 0;
    loop {
        wait_until("some have died", || {
            broker.stats().dead > 0 || all_died(&broker)
        });
        if all_died(&broker) {
            break;
        }
        broker.kill();
        broker.restart();
        kills += 1;
    }
    drop(stop);
    failing.join().unwrap();
    assert!(kills >= 3, "{kills} kills are too few to tell anything");
    wait_dead(&broker, COUNT);
    let dead = take(&broker.client(), "jobs.dead", COUNT as usize);
    let distinct: BTreeSet<_> = dead.iter().collect();
    assert_eq!(distinct.len() as u64, COUNT);
    broker.wait_drained("jobs.dead");
}

#[test]
fn what_is_wrong_is_told() {
    let broker = start(3);
    let client = broker.client();
    let none = client.dead_letters("none", 0, 10);
    assert!(matches!(none, Err(Error::NoSuchQueue(name)) if name == "none"));
    for limit in [0, 1001] {
        let refused = client.dead_letters("jobs", 0, limit);
        assert!(matches!(refused, Err(Error::Invalid(_))), "{limit}");
    }
    let nowhere = client.redrive("jobs", Some("none"), None);
    assert!(matches!(nowhere, Ok(0) | Err(Error::NoSuchQueue(_))));
    send(&client, &["one"]);
    let direct = client.redrive("jobs", None, None);
    assert!(matches!(direct, Err(Error::Invalid(_))), "{direct:?}");
    let itself = QueueSettings {
        dead_letter_queue: Some("loop".to_owned()),
        ..QueueSettings::default()
    };
    let refused = client.create_queue("loop", &itself);
    assert!(matches!(refused, Err(Error::Invalid(_))));
    printed(4, &broker.run(&["dlq", "list", "none"]));
    printed(4, &broker.run(&["dlq", "redrive", "none"]));
    for attempts in ["0", "10001"] {
        let create = ["queue", "create", "x", "--max-attempts", attempts];
        printed(2, &broker.run(&create));
    }
    let shown = printed(0, &broker.run(&["queue", "info", "jobs"]));
    assert!(shown.contains("jobs.dead"), "{shown}");
}
