//! Deaths by SIGKILL, of real processes: consumers, producers, the broker, and
//! all at once. What each did stands in its tally, and the tallies are compared.

#![allow(clippy::unwrap_used, reason = "a test that can't go on has failed")]
#![allow(clippy::print_stderr, reason = "logs are shown when a test fails")]

mod common;

use common::{
    Broker, Consume, Hold, Kind, Process, Produce, audit, finish, scramble, settled_after,
    this_thread, wait_asleep, wait_until,
};
use ringmain::{Confirm, Consumer, ConsumerOptions, Error, QueueSettings};
use std::collections::HashSet;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Not a test: what the children run.
#[test]
fn child_process() {
    common::run_child();
}

/// Two producers, one of which asks for confirmations, and two consumers.
fn load(broker: &Broker) -> (Vec<Process>, Vec<Process>) {
    let quiet = Produce::new("jobs", 1);
    let confirmed = Produce {
        flush_every: 50,
        confirm: Confirm::Synced,
        ..Produce::new("jobs", 2)
    };
    let runs = Consume {
        batch: 8,
        flush_every: 200,
        ..Consume::new("jobs")
    };
    let producers = vec![broker.produce(quiet), broker.produce(confirmed)];
    let consumers = vec![broker.consume(Consume::new("jobs")), broker.consume(runs)];
    // Who connects to a broker that dies gets an error: that is not what is
    // looked at here.
    for process in producers.iter().chain(&consumers) {
        process.wait_for_more(1);
    }
    (producers, consumers)
}

/// Waits until every one of them has done so much more.
#[track_caller]
fn wait_for_all(processes: &[Process], entries: u64) {
    let goals: Vec<u64> = processes.iter().map(|p| p.count() + entries).collect();
    for (process, goal) in processes.iter().zip(goals) {
        wait_until("all go on", || process.count() >= goal);
    }
}

/// Receives so many messages, by their numbers as [`common::payload`] has them.
#[track_caller]
fn receive(consumer: &mut Consumer, count: usize) -> Vec<ringmain::Message> {
    let message = |_| {
        let message = consumer.recv_timeout(common::BOUND).unwrap();
        message.expect("a message comes")
    };
    (0..count).map(message).collect()
}

fn number(message: &ringmain::Message) -> u64 {
    u64::from_ne_bytes(message.payload()[8..16].try_into().unwrap())
}

fn numbers(messages: &[ringmain::Message]) -> Vec<u64> {
    messages.iter().map(number).collect()
}

/// Sends messages from a client of this process.
fn send(broker: &Broker, range: std::ops::Range<u64>) {
    let client = broker.client();
    let producer = client.producer("jobs").unwrap();
    for number in range {
        producer.send(common::payload(0, number, 64)).unwrap();
    }
    producer.flush(Confirm::Stored).unwrap();
}

// I1, I2, I6: what a dead consumer held goes to another, in order, and only what
// it had taken counts as attempted.
#[test]
fn leases_of_a_killed_consumer_go_to_another_in_order() {
    let broker = Broker::with_queue("jobs");
    send(&broker, 0..10);
    let mut holder = broker.hold(Hold {
        queue: "jobs".to_owned(),
        window: 10,
        take: 4,
    });
    holder.wait_noted(Kind::Taken, 4);
    assert_eq!(broker.info("jobs").leased, 10);
    holder.kill();
    let mut consumer = broker.client().consumer("jobs").unwrap();
    let messages = receive(&mut consumer, 10);
    assert_eq!(numbers(&messages), (0..10).collect::<Vec<_>>());
    assert!(messages.iter().all(|message| message.redelivered()));
    let attempts: Vec<u32> = messages.iter().map(|message| message.attempts()).collect();
    assert_eq!(attempts, [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]);
    ringmain::Message::ack_batch(messages).unwrap();
    consumer.flush(Confirm::Stored).unwrap();
    assert_eq!(broker.info("jobs").messages, 0);
}

// I6: available again within 100 ms. The best of some deaths counts: this
// machine may be busy.
#[test]
fn leases_of_a_killed_consumer_are_free_within_100_ms() {
    let broker = Broker::with_queue("jobs");
    send(&broker, 0..1);
    let mut best = Duration::MAX;
    for _ in 0..5 {
        let mut holder = broker.hold(Hold {
            queue: "jobs".to_owned(),
            window: 1,
            take: 1,
        });
        holder.wait_noted(Kind::Taken, 1);
        let mut consumer = broker.client().consumer("jobs").unwrap();
        let killed = Instant::now();
        holder.kill_at_once();
        let message = consumer.recv().unwrap();
        best = best.min(killed.elapsed());
        holder.reap();
        drop(message);
        drop(consumer);
        wait_until("it is back", || broker.info("jobs").leased == 0);
    }
    assert!(best < Duration::from_millis(100), "{best:?}");
}

// I1, I2, I3, I6
#[test]
fn a_killed_producer_loses_and_doubles_nothing() {
    let broker = Broker::with_queue("jobs");
    let mut consumers = [broker.consume(Consume::new("jobs"))];
    let mut producers = Vec::new();
    for index in 0..6 {
        let mut producer = broker.produce(Produce {
            // Up to records of which few fit the ring, and runs of them.
            bytes: [64, 2000, 9000][index as usize % 3],
            ..Produce::new("jobs", index)
        });
        producer.wait_for_more(200 + scramble(index) % 400);
        producer.kill();
        producers.push(producer);
    }
    let report = finish(&broker, &mut producers, &mut consumers);
    assert_eq!(report.redelivered, 0);
    assert!(report.in_doubt <= producers.len() as u64, "{report:?}");
    let sent = report.accepted..=report.accepted + report.in_doubt;
    assert!(sent.contains(&report.delivered), "{report:?}");
    assert_eq!(broker.info("jobs").producers, 0);
}

// I1, I2, I3, I6: clients go on in the same processes, and notice nothing.
#[test]
fn a_broker_killed_under_load_costs_nothing() {
    let mut broker = Broker::with_queue("jobs");
    let (mut producers, mut consumers) = load(&broker);
    for round in 0..5 {
        wait_for_all(&producers, 300 + scramble(round) % 500);
        wait_for_all(&consumers, 300);
        broker.kill();
        broker.restart();
    }
    wait_for_all(&producers, 500);
    wait_for_all(&consumers, 500);
    let report = finish(&broker, &mut producers, &mut consumers);
    // Living consumers keep their leases: nobody got anything again. (A delivery
    // that was not published when the broker died counts as a lease.)
    assert_eq!((report.in_doubt, report.repeated), (0, 0), "{report:?}");
    assert_eq!(report.delivered, report.accepted);
}

// I1, I2, I6: the same with a full load of rings and cache while nobody consumes.
#[test]
fn a_broker_killed_while_a_backlog_grows_keeps_it_in_order() {
    let mut broker = Broker::with_queue("jobs");
    let large = |producer| Produce {
        bytes: 3000,
        batch: 7,
        ..Produce::new("jobs", producer)
    };
    let mut producers = [broker.produce(large(1)), broker.produce(large(2))];
    for _ in 0..3 {
        wait_for_all(&producers, 2000);
        broker.kill();
        broker.restart();
    }
    for producer in &mut producers {
        producer.finish();
    }
    broker.kill();
    broker.restart();
    let mut consumers = [broker.consume(Consume::new("jobs"))];
    broker.wait_drained("jobs");
    consumers[0].finish();
    let [one, two] = &producers;
    let report = audit(&[one, two], &[&consumers[0]]);
    assert_eq!(
        (report.delivered, report.redelivered),
        (report.accepted, 0),
        "{report:?}"
    );
}

// I6: whatever a client waits for when the broker dies, it gets it from the
// next one.
#[test]
fn clients_that_sleep_when_the_broker_dies_are_woken_by_the_next() {
    let mut broker = Broker::with_queue("jobs");
    broker.create("empty", &QueueSettings::default());
    let pid = std::process::id() as i32;
    let (tell, told) = mpsc::channel();
    let sleeper = |name: &'static str, work: Box<dyn FnOnce() + Send>| {
        let tell = tell.clone();
        std::thread::spawn(move || {
            tell.send(this_thread()).unwrap();
            work();
            name
        })
    };

    let mut idle = broker.client().consumer("empty").unwrap();
    let receiver = sleeper(
        "recv",
        Box::new(move || assert_eq!(idle.recv().unwrap().payload(), b"wake up")),
    );
    let receiver_thread = told.recv().unwrap();
    wait_asleep(pid, receiver_thread);

    // Two clients: two sessions.
    let client = broker.client();
    let producer = client.producer("jobs").unwrap();
    let full = broker.client().producer("jobs").unwrap();
    // It takes nothing in any more, and what waits for it goes to sleep.
    broker.pause();
    producer.send(common::payload(1, 0, 64)).unwrap();
    let flusher = sleeper(
        "flush",
        Box::new(move || producer.flush(Confirm::Synced).unwrap()),
    );
    let flusher_thread = told.recv().unwrap();
    let mut sent = 0;
    loop {
        match full.try_send(common::payload(2, sent, 1000)) {
            Ok(_) => sent += 1,
            Err(Error::Full(_)) => break,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(sent > 50, "{sent}");
    let sender = sleeper(
        "send",
        Box::new(move || {
            for number in sent..sent + 300 {
                full.send(common::payload(2, number, 1000)).unwrap();
            }
        }),
    );
    let sender_thread = told.recv().unwrap();
    for thread in [flusher_thread, sender_thread, receiver_thread] {
        wait_asleep(pid, thread);
    }
    broker.kill();
    broker.restart();
    for sleeper in [flusher, sender] {
        sleeper.join().unwrap();
    }
    broker
        .client()
        .producer("empty")
        .unwrap()
        .send("wake up")
        .unwrap();
    receiver.join().unwrap();

    let options = ConsumerOptions::new().window(2000);
    let mut consumer = client.consumer_with("jobs", options).unwrap();
    let messages = receive(&mut consumer, 1 + sent as usize + 300);
    let of_two: Vec<u64> = messages
        .iter()
        .filter(|message| message.payload()[0] == 2)
        .map(number)
        .collect();
    assert_eq!(of_two, (0..sent + 300).collect::<Vec<_>>());
    assert!(messages.iter().all(|message| !message.redelivered()));
}

// I1, I2, I10
#[test]
fn all_killed_at_once_leaves_every_accepted_message() {
    let mut broker = Broker::with_queue("jobs");
    let (mut producers, mut consumers) = load(&broker);
    for round in 0..3 {
        let from = producers.len() - 2;
        wait_for_all(&producers[from..], 500 + scramble(round) % 500);
        let last = consumers.len() - 2;
        wait_for_all(&consumers[last..], 300);
        // In an order that changes from round to round.
        let mut steps: Vec<u64> = (0..5).collect();
        steps.sort_unstable_by_key(|step| scramble(round * 8 + step));
        for step in steps {
            match step {
                0 => broker.kill_at_once(),
                1 | 2 => producers[from + step as usize - 1].kill_at_once(),
                _ => consumers[last + step as usize - 3].kill_at_once(),
            }
        }
        broker.reap();
        for process in producers[from..].iter_mut().chain(&mut consumers[last..]) {
            process.reap();
        }
        broker.restart();
        let number = 10 * (round + 1);
        producers.push(broker.produce(Produce::new("jobs", number + 1)));
        producers.push(broker.produce(Produce::new("jobs", number + 2)));
        consumers.push(broker.consume(Consume::new("jobs")));
        consumers.push(broker.consume(Consume::new("jobs")));
    }
    let report = finish(&broker, &mut producers, &mut consumers);
    assert!(report.in_doubt <= 6, "{report:?}");
    wait_until("the sessions of the dead are gone", || {
        broker.session_files().is_empty()
    });
}

// I10: a successor may die at any moment of its start, and the next one too.
#[test]
fn a_broker_killed_again_and_again_while_it_starts_loses_nothing() {
    let mut broker = Broker::with_queue("jobs");
    let (mut producers, mut consumers) = load(&broker);
    for round in 0..3u64 {
        wait_for_all(&producers, 400);
        wait_for_all(&consumers, 300);
        let started = Instant::now();
        broker.kill();
        broker.restart();
        // What a start takes here, clients' sessions included.
        let start_us = started.elapsed().as_micros() as u64;
        wait_for_all(&producers, 300);
        broker.kill();
        for attempt in 0..6 {
            let starting = broker.spawn();
            let seed = round * 16 + attempt;
            // The moment of the death, not a wait for anything.
            let life = Duration::from_micros(scramble(seed) % start_us);
            eprintln!("seed {seed}: killed after {life:?} of {start_us} us");
            std::thread::sleep(life);
            starting.kill();
        }
        broker.restart();
    }
    wait_for_all(&producers, 400);
    wait_for_all(&consumers, 400);
    let report = finish(&broker, &mut producers, &mut consumers);
    assert_eq!((report.in_doubt, report.repeated), (0, 0), "{report:?}");
    assert_eq!(report.delivered, report.accepted);
}

// I1, I2, I3, I6
#[test]
fn a_graceful_restart_under_load_goes_unnoticed() {
    let mut broker = Broker::with_queue("jobs");
    let (mut producers, mut consumers) = load(&broker);
    for _ in 0..3 {
        wait_for_all(&producers, 400);
        wait_for_all(&consumers, 300);
        broker.terminate();
        assert!(!broker.socket().exists());
        broker.restart();
    }
    wait_for_all(&producers, 400);
    wait_for_all(&consumers, 400);
    let report = finish(&broker, &mut producers, &mut consumers);
    assert_eq!((report.in_doubt, report.redelivered), (0, 0), "{report:?}");
    assert_eq!(report.delivered, report.accepted);
}

// I5, I10: after a restart of the machine the store is all there is.
#[test]
fn a_machine_restart_keeps_what_was_confirmed_as_synced() {
    let mut broker = Broker::with_queue("jobs");
    let synced = |producer| Produce {
        flush_every: 20,
        confirm: Confirm::Synced,
        ..Produce::new("jobs", producer)
    };
    let mut producers = [broker.produce(synced(1)), broker.produce(synced(2))];
    wait_for_all(&producers, 1500);
    let mut consumer = broker.consume(Consume {
        flush_every: 20,
        confirm: Confirm::Synced,
        ..Consume::new("jobs")
    });
    consumer.wait_noted(Kind::AcksConfirmed, 10);
    broker.kill_at_once();
    for process in producers.iter_mut().chain([&mut consumer]) {
        process.kill_at_once();
        process.reap();
    }
    broker.reap();
    broker.wipe_shm();
    broker.restart();

    let acked = settled_after(&consumer.entries(), Kind::Acked, Kind::AcksConfirmed);
    let taken: HashSet<(u64, u64)> = consumer
        .entries()
        .iter()
        .filter(|entry| entry.kind == Kind::Taken)
        .map(|entry| entry.message())
        .collect();
    assert!(acked.len() >= 200);
    let mut successor = broker.consume(Consume::new("jobs"));
    broker.wait_drained("jobs");
    successor.finish();
    let found: Vec<(u64, u64)> = successor
        .entries()
        .iter()
        .filter(|entry| entry.kind == Kind::Taken)
        .map(|entry| entry.message())
        .collect();
    for producer in [1, 2] {
        let numbers: Vec<u64> = found
            .iter()
            .filter(|m| m.0 == producer)
            .map(|m| m.1)
            .collect();
        assert!(
            numbers.is_sorted_by(|a, b| a < b),
            "in order, and each once"
        );
    }
    let found: HashSet<(u64, u64)> = found.into_iter().collect();
    let come_back: Vec<_> = acked.intersection(&found).collect();
    assert!(
        come_back.is_empty(),
        "acked, synced, and back: {come_back:?}"
    );
    for producer in &producers {
        let sent = settled_after(&producer.entries(), Kind::Accepted, Kind::Confirmed);
        assert!(sent.len() >= 500);
        // What the consumer took may have been acked without a confirmation.
        let lost: Vec<_> = sent
            .iter()
            .filter(|m| !found.contains(m) && !taken.contains(m))
            .collect();
        assert!(lost.is_empty(), "synced and lost: {lost:?}");
    }
}

// I6: a client that stands still is slow, not dead.
#[test]
fn a_client_stopped_across_a_restart_goes_on_when_continued() {
    let mut broker = Broker::with_queue("jobs");
    let (mut producers, mut consumers) = load(&broker);
    wait_for_all(&producers, 300);
    wait_for_all(&consumers, 300);
    for process in producers.iter().chain(&consumers) {
        process.pause();
    }
    broker.kill();
    broker.restart();
    assert_eq!(broker.info("jobs").consumers, 2);
    // Once more, with nobody having resumed.
    broker.kill();
    broker.restart();
    assert_eq!(broker.info("jobs").producers, 2);
    for process in producers.iter().chain(&consumers) {
        process.resume();
    }
    wait_for_all(&producers, 500);
    wait_for_all(&consumers, 500);
    let report = finish(&broker, &mut producers, &mut consumers);
    assert_eq!(report.repeated, 0);
    assert_eq!(report.delivered, report.accepted);
}

// I1, I4: the lease ends, the message is somebody else's, and the late ack is
// told so.
#[test]
fn a_consumer_stopped_past_its_visibility_timeout_loses_its_lease() {
    let broker = Broker::start();
    let settings = QueueSettings {
        visibility_timeout_ms: 300,
        ..QueueSettings::default()
    };
    broker.create("jobs", &settings);
    send(&broker, 0..1);
    let mut slow = broker.hold(Hold {
        queue: "jobs".to_owned(),
        window: 1,
        take: 1,
    });
    slow.wait_noted(Kind::Taken, 1);
    slow.pause();
    let mut consumer = broker.client().consumer("jobs").unwrap();
    let messages = receive(&mut consumer, 1);
    assert_eq!(
        (messages[0].redelivered(), messages[0].attempts()),
        (true, 1)
    );
    messages[0].extend(common::BOUND).unwrap();
    slow.resume();
    slow.finish();
    let lost = slow.entries();
    let lost = lost.iter().find(|entry| entry.kind == Kind::LeasesLost);
    assert_eq!(lost.unwrap().number, 1);
    // The late ack has done nothing: the message is held by the other.
    assert_eq!(
        (broker.info("jobs").messages, broker.info("jobs").leased),
        (1, 1)
    );
    ringmain::Message::ack_batch(messages).unwrap();
    consumer.flush(Confirm::Stored).unwrap();
    assert_eq!(broker.info("jobs").messages, 0);
    assert!(consumer.try_recv().unwrap().is_none());
    let stats = broker.stats();
    assert_eq!((stats.leases_lost, stats.redeliveries), (1, 1));
}

// I6, I7: the end of a session needs no broker to be there.
#[test]
fn a_session_dropped_while_the_broker_is_down_ends_with_its_restart() {
    let mut broker = Broker::with_queue("jobs");
    send(&broker, 0..20);
    let client = broker.client();
    let mut consumer = client.consumer("jobs").unwrap();
    let mut other = client.consumer("jobs").unwrap();
    let held = receive(&mut consumer, 5);
    broker.kill();
    ringmain::Message::ack_batch(held.into_iter().take(2)).unwrap();
    drop(consumer);
    broker.restart();
    let messages = receive(&mut other, 18);
    let mut found = numbers(&messages);
    found.sort_unstable();
    assert_eq!(found, (2..20).collect::<Vec<_>>());
    wait_until("its session is gone", || broker.info("jobs").consumers == 1);
    wait_until("its files are gone", || broker.session_files().len() == 2);
}

// I3, I4, I6
#[test]
fn leases_outlive_the_broker_and_acks_after_its_restart_count() {
    let mut broker = Broker::with_queue("jobs");
    send(&broker, 0..100);
    let mut consumer = broker.client().consumer("jobs").unwrap();
    let mut messages = receive(&mut consumer, 60);
    assert_eq!(broker.info("jobs").leased, 100);
    broker.kill();
    // While it is away, and after it is back; received before, and after.
    ringmain::Message::ack_batch(messages.drain(..20)).unwrap();
    messages.extend(receive(&mut consumer, 20));
    broker.restart();
    assert_eq!(broker.info("jobs").messages, 80);
    ringmain::Message::ack_batch(messages.drain(..20)).unwrap();
    messages.extend(receive(&mut consumer, 20));
    assert_eq!(numbers(&messages), (40..100).collect::<Vec<_>>());
    assert!(messages.iter().all(|message| !message.redelivered()));
    broker.terminate();
    broker.restart();
    ringmain::Message::ack_batch(messages).unwrap();
    consumer.flush(Confirm::Synced).unwrap();
    let info = broker.info("jobs");
    assert_eq!((info.messages, info.leased), (0, 0));
    assert!(consumer.try_recv().unwrap().is_none());
    assert_eq!(broker.stats().deliveries, 0, "in this life");
}

// I1: a delay is no place to get lost in.
#[test]
fn delayed_and_returned_messages_survive_the_broker() {
    let mut broker = Broker::with_queue("jobs");
    send(&broker, 0..6);
    let client = broker.client();
    let options = ConsumerOptions::new().window(4);
    let mut consumer = client.consumer_with("jobs", options).unwrap();
    let mut messages = receive(&mut consumer, 4);
    messages.remove(0).nack(Duration::from_millis(300)).unwrap();
    drop(messages.remove(0));
    consumer.flush(Confirm::Stored).unwrap();
    drop((messages, consumer));
    broker.kill();
    broker.restart();
    let mut consumer = broker.client().consumer("jobs").unwrap();
    let messages = receive(&mut consumer, 6);
    let mut found: Vec<(u64, bool, u32)> = messages
        .iter()
        .map(|m| (number(m), m.redelivered(), m.attempts()))
        .collect();
    found.sort_unstable();
    let taken = |number| (number, true, 1);
    let untaken = |number| (number, true, 0);
    assert_eq!(
        found[..4],
        [taken(0), taken(1), taken(2), taken(3)],
        "four were taken and returned"
    );
    // Those two may have been pushed ahead when there was room, or not.
    for at in [4, 5] {
        let (number, redelivered, attempts) = found[at];
        let expected = if redelivered {
            untaken(at as u64)
        } else {
            (at as u64, false, 0)
        };
        assert_eq!((number, redelivered, attempts), expected);
    }
}

// I1, I2, I3, I5, I6: deaths of all kinds in a row, by a seed.
#[test]
fn deaths_of_all_kinds_in_a_row_cost_nothing() {
    let mut broker = Broker::with_queue("jobs");
    let (mut producers, mut consumers) = load(&broker);
    for step in 0..12 {
        let dice = scramble(1000 + step);
        eprintln!("step {step}: {}", dice % 4);
        let alive = |processes: &[Process]| -> usize {
            let at = processes.iter().rposition(|process| !process.was_killed());
            at.unwrap()
        };
        match dice % 4 {
            0 => {
                broker.kill();
                broker.restart();
            }
            1 => {
                let at = alive(&producers);
                producers[at].wait_for_more(100);
                producers[at].kill();
                producers.push(broker.produce(Produce::new("jobs", 100 + step)));
            }
            2 => {
                let at = alive(&consumers);
                consumers[at].wait_for_more(100);
                consumers[at].kill();
                consumers.push(broker.consume(Consume::new("jobs")));
            }
            _ => {
                // While a client is away.
                let at = alive(&consumers);
                broker.kill_at_once();
                consumers[at].kill();
                broker.reap();
                broker.restart();
                consumers.push(broker.consume(Consume::new("jobs")));
            }
        }
        let newest = alive(&producers);
        producers[newest].wait_for_more(200 + dice % 300);
        let newest = alive(&consumers);
        consumers[newest].wait_for_more(100);
    }
    let report = finish(&broker, &mut producers, &mut consumers);
    assert!(report.in_doubt <= 12, "{report:?}");
    assert!(
        report.redelivered > 0,
        "consumers died with leases: {report:?}"
    );
}
