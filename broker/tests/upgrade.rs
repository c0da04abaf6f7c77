//! Stores that earlier versions wrote: this one opens them, and has all that is in
//! them. A fixture is made once, by `fixtures/make.sh`, and never changed.
#![allow(clippy::unwrap_used, reason = "a test that can't go on has failed")]
#![allow(clippy::print_stderr, reason = "logs are shown when a test fails")]

mod common;

use common::{BOUND, Broker};
use ringmain::{Confirm, Message, QueueInfo};
use std::path::Path;
use std::process::Command;

/// A broker that has not been started, over the store of this fixture.
fn with_store(fixture: &str) -> Broker {
    let broker = Broker::new();
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(fixture);
    let mut tar = Command::new("tar");
    tar.arg("-xzf").arg(path).arg("-C").arg(broker.folder());
    assert!(tar.status().unwrap().success());
    assert!(broker.data_dir().is_dir());
    broker
}

#[track_caller]
fn take(broker: &Broker, queue: &str, count: usize) -> Vec<Message> {
    let mut consumer = broker.client().consumer(queue).unwrap();
    (0..count)
        .map(|_| consumer.recv_timeout(BOUND).unwrap().expect("a message"))
        .collect()
}

// I1, I2, I10
#[test]
fn a_store_of_version_0_1_has_all_that_was_in_it() {
    let mut broker = with_store("store-0.1.tar.gz");
    for life in 0..2 {
        broker.restart();
        let queues = broker.client().queues().unwrap();
        let of = |name: &str| -> &QueueInfo { queues.iter().find(|q| q.name == name).unwrap() };
        let names: Vec<&str> = queues.iter().map(|queue| queue.name.as_str()).collect();
        assert_eq!(
            names,
            ["empty", "jobs", "large", "orders", "orders.dead"],
            "{life}"
        );
        let messages = ["empty", "jobs", "large", "orders", "orders.dead"].map(|q| of(q).messages);
        assert_eq!(messages, [0, 8, 1, 0, 1]);
        let settings = &of("jobs").settings;
        assert_eq!(
            (settings.visibility_timeout_ms, settings.max_attempts),
            (300_000, 3)
        );
        assert_eq!(of("large").settings.max_message_bytes, 8 << 20);

        let jobs = take(&broker, "jobs", 8);
        let numbers: Vec<&[u8]> = jobs.iter().map(Message::payload).collect();
        assert_eq!(
            numbers,
            [&b"3"[..], b"4", b"5", b"6", b"7", b"8", b"9", b"10"]
        );
        drop(jobs);
        let large = take(&broker, "large", 1);
        assert_eq!(large[0].payload(), vec![0; 3 << 20]);
        drop(large);
        broker.terminate();
    }

    // What it has can be finished with, and comes back from the dead.
    broker.restart();
    let shown = String::from_utf8(broker.run(&["dlq", "list", "orders.dead"]).stdout).unwrap();
    assert!(
        shown.contains("rejected") && shown.contains("orders"),
        "{shown}"
    );
    assert!(
        broker
            .run(&["dlq", "redrive", "orders.dead"])
            .status
            .success()
    );
    for (queue, count) in [("jobs", 8), ("large", 1), ("orders", 1)] {
        let mut consumer = broker.client().consumer(queue).unwrap();
        for _ in 0..count {
            consumer
                .recv_timeout(BOUND)
                .unwrap()
                .unwrap()
                .ack()
                .unwrap();
        }
        consumer.flush(Confirm::Synced).unwrap();
    }
    broker.kill();
    broker.restart();
    assert_eq!(broker.stats().messages, 0);
}
