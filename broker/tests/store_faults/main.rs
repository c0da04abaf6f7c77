//! Failing disks: calls that fail, power cuts, damage, and disks that are full (I5,
//! I10). Each ends in a refusal that says why, or in exactly the messages that were
//! confirmed.
//!
//! `RINGMAIN_SLICE=all` takes all cases of the long lists; without it, some that
//! `RINGMAIN_SEED` or the clock chooses.

#![allow(clippy::unwrap_used, reason = "a test that can't go on has failed")]
#![allow(clippy::print_stderr, reason = "logs are shown when a test fails")]

#[path = "../common/mod.rs"]
mod common;
mod shim;

use common::{
    Broker, Consume, Kind, Process, Produce, Random, SmallFileSystem, audit, finish, settled_after,
    wait_until,
};
use ringmain::{Confirm, Error, QueueSettings};
use shim::{Call, Shim, files_below};
use std::collections::HashSet;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Not a test: what the children run.
#[test]
fn child_process() {
    common::run_child();
}

fn seed() -> u64 {
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed = std::env::var("RINGMAIN_SEED").ok();
    let seed = seed.map_or(clock.as_secs(), |seed| seed.parse().unwrap());
    eprintln!("seed {seed}");
    seed
}

/// All, or one in so many.
fn slice(of: u64) -> impl FnMut() -> bool {
    let all = std::env::var("RINGMAIN_SLICE").is_ok_and(|slice| slice == "all");
    let mut random = Random(seed());
    move || all || random.below(of) == 0
}

/// A broker behind a shim, with a queue.
fn shimmed() -> (Broker, Shim) {
    let mut broker = Broker::new();
    let shim = Shim::before(&mut broker);
    broker.restart();
    broker.create("jobs", &QueueSettings::default());
    (broker, shim)
}

/// Producers that ask for confirmations.
fn producers(broker: &Broker) -> Vec<Process> {
    let of = |producer, confirm, bytes| {
        broker.produce(Produce {
            flush_every: 20,
            confirm,
            bytes,
            ..Produce::new("jobs", producer)
        })
    };
    vec![
        of(1, Confirm::Synced, 300),
        of(2, Confirm::Stored, 2000),
        of(3, Confirm::Synced, 40_000),
    ]
}

const FAULTS: [(Call, i32); 13] = [
    (Call::Write, libc::EIO),
    (Call::Write, libc::ENOSPC),
    // Cut short.
    (Call::Write, 0),
    (Call::Sync, libc::EIO),
    (Call::Sync, libc::ENOSPC),
    (Call::Open, libc::EIO),
    (Call::Open, libc::ENOSPC),
    (Call::Open, libc::EMFILE),
    (Call::Rename, libc::EIO),
    (Call::Reserve, libc::ENOSPC),
    (Call::Reserve, libc::EIO),
    (Call::Read, libc::EIO),
    (Call::Unlink, libc::EIO),
];

// I5, I10: whatever call fails, and whenever, service goes on by itself, and what
// was accepted is there.
#[test]
fn calls_that_fail_cost_nothing_but_time() {
    let mut chosen = slice(4);
    for (call, error) in FAULTS {
        if !chosen() {
            continue;
        }
        let (broker, shim) = shimmed();
        let mut producers = producers(&broker);
        let mut consumers = vec![broker.consume(Consume::new("jobs"))];
        // Who connects to a broker that starts anew gets an error: that is not what is
        // looked at here.
        for process in producers.iter().chain(&consumers) {
            process.wait_for_more(1);
        }
        for after in [0, 3, 30] {
            let failed = shim.failed();
            shim.fail(call, error, after, 1);
            if after == 0 && matches!(call, Call::Write | Call::Sync) {
                shim.wait_failed(failed);
            } else if matches!(call, Call::Write | Call::Sync) {
                for producer in &producers {
                    producer.wait_for_more(50);
                }
            } else {
                // These calls are made when the store is opened, above all.
                let broken = shim.failed();
                shim.fail(Call::Sync, libc::EIO, 0, 1);
                shim.wait_failed(broken);
                shim.fail(call, error, after, 1);
            }
            for producer in &producers {
                producer.wait_for_more(100);
            }
        }
        shim.heal();
        let report = finish(&broker, &mut producers, &mut consumers);
        assert_eq!(report.in_doubt, 0, "{call:?} {error}");
        assert!(report.delivered == report.accepted, "{call:?} {report:?}");
    }
}

// I5: what could not be synced is not confirmed until it was written and synced
// again; then it outlasts a power cut.
#[test]
fn nothing_is_synced_by_a_sync_that_failed() {
    let mut random = Random(seed());
    for times in [1, 1_000_000] {
        let (mut broker, shim) = shimmed();
        let client = broker.client();
        let producer = client.producer("jobs").unwrap();
        producer.send(vec![1; 700]).unwrap();
        producer.flush(Confirm::Synced).unwrap();
        producer.send(vec![2; 700]).unwrap();
        producer.flush(Confirm::Stored).unwrap();
        let failed = shim.failed();
        shim.fail(Call::Sync, libc::EIO, 0, times);
        producer.send(vec![3; 700]).unwrap();
        if times > 1 {
            let waited = producer.flush_timeout(Confirm::Synced, Duration::from_millis(400));
            assert!(matches!(waited, Err(Error::TimedOut)), "{waited:?}");
            shim.wait_failed(failed);
            shim.heal();
        }
        producer.flush(Confirm::Synced).unwrap();
        assert!(shim.failed() > failed);
        assert!(broker.log_text().contains("starting anew"));
        broker.kill();
        drop((producer, client));
        broker.wipe_shm();
        shim.power_cut(|limit| random.below(limit));
        broker.restart();
        let mut consumer = broker.client().consumer("jobs").unwrap();
        for number in 1..=3 {
            let message = consumer.recv_timeout(common::BOUND).unwrap().unwrap();
            assert_eq!(message.payload(), [number; 700]);
        }
    }
}

// I5, I10: a power cut at any moment leaves all that was confirmed as synced, and
// nothing that was never sent.
#[test]
fn power_cuts_leave_what_was_synced() {
    let seed = seed();
    let cuts = match std::env::var("RINGMAIN_SLICE").is_ok_and(|slice| slice == "all") {
        true => 60,
        false => 6,
    };
    for cut in 0..cuts {
        let mut random = Random(seed.wrapping_add(cut << 32));
        let (mut broker, shim) = shimmed();
        let mut producers = producers(&broker);
        // In some, acks are synced as well; in some everything is a backlog.
        let mut consumers = Vec::new();
        if cut % 3 != 0 {
            consumers.push(broker.consume(Consume {
                flush_every: 10,
                confirm: Confirm::Synced,
                ..Consume::new("jobs")
            }));
        }
        for producer in &producers {
            producer.wait_for_more(10 + random.below(400));
        }
        if cut % 2 == 0 {
            // Tables, and not the log alone.
            broker.kill();
            broker.restart();
            producers[0].wait_for_more(50);
        }
        std::thread::sleep(Duration::from_micros(random.below(3000)));
        broker.kill_at_once();
        for process in producers.iter_mut().chain(&mut consumers) {
            process.kill();
        }
        let _ = broker.reap();
        broker.wipe_shm();
        shim.power_cut(|limit| random.below(limit));
        broker.restart();

        let mut confirmed = HashSet::new();
        let mut sent = HashSet::new();
        for producer in &producers {
            let entries = producer.entries();
            let intents = entries.iter().filter(|entry| entry.kind == Kind::Intent);
            sent.extend(intents.map(|entry| entry.message()));
            confirmed.extend(settled_after(&entries, Kind::Accepted, Kind::Confirmed));
        }
        // The second asks for less than a sync.
        confirmed.retain(|message| message.0 != 2);
        let (mut acked, mut maybe_acked) = (HashSet::new(), HashSet::new());
        for consumer in &consumers {
            let entries = consumer.entries();
            acked.extend(settled_after(&entries, Kind::Acked, Kind::AcksConfirmed));
            let taken = entries.iter().filter(|entry| entry.kind == Kind::Taken);
            maybe_acked.extend(taken.map(|entry| entry.message()));
        }
        let rest = broker.consume(Consume::new("jobs"));
        broker.wait_drained("jobs");
        let entries = rest.entries();
        let mut found = HashSet::new();
        let mut last = [0; 4];
        for entry in entries.iter().filter(|entry| entry.kind == Kind::Taken) {
            let message = entry.message();
            assert!(sent.contains(&message), "cut {cut}: never sent: {entry:?}");
            assert!(found.insert(message), "cut {cut}: twice: {entry:?}");
            assert!(!acked.contains(&message), "cut {cut}: acked: {entry:?}");
            // I2: of one producer, in order, but for what a consumer had.
            let last = &mut last[message.0 as usize];
            assert!(
                entry.redelivered || message.1 >= *last || maybe_acked.contains(&message),
                "cut {cut}: {entry:?} after {last}"
            );
            *last = message.1.max(*last);
        }
        let lost: Vec<_> = confirmed
            .iter()
            .filter(|message| !found.contains(*message) && !maybe_acked.contains(*message))
            .collect();
        assert!(lost.is_empty(), "cut {cut} of seed {seed}: lost: {lost:?}");
    }
}

/// A data folder with messages in tables and in the log, some of them acked, all
/// synced; and the numbers of the others.
fn a_store(broker: &mut Broker) -> HashSet<u64> {
    broker.restart();
    broker.create("jobs", &QueueSettings::default());
    for range in [0..150, 150..300] {
        let client = broker.client();
        let producer = client.producer("jobs").unwrap();
        for number in range {
            producer.send(common::payload(1, number, 400)).unwrap();
        }
        producer.flush(Confirm::Synced).unwrap();
        drop((producer, client));
        broker.kill();
        broker.restart();
    }
    let client = broker.client();
    let producer = client.producer("jobs").unwrap();
    for number in 300..450 {
        producer.send(common::payload(1, number, 400)).unwrap();
    }
    producer.flush(Confirm::Synced).unwrap();
    let mut consumer = client.consumer("jobs").unwrap();
    for _ in 0..60 {
        consumer.recv().unwrap().ack().unwrap();
    }
    consumer.flush(Confirm::Synced).unwrap();
    broker.kill();
    (60..450).collect()
}

fn copy_folder(from: &Path, to: &Path) {
    let done = Command::new("cp").arg("-a").arg(from).arg(to).status();
    assert!(done.unwrap().success());
}

/// Starts a broker on the damaged folder. It refuses, or ends, and says why; or all
/// is there.
fn expect_all_or_a_refusal(broker: &mut Broker, numbers: &HashSet<u64>, what: &str) -> bool {
    let log_before = broker.log_text().len();
    let outcome = broker.try_restart();
    if outcome.is_ok() {
        let client = broker.client();
        let mut found = HashSet::new();
        if let Ok(mut consumer) = client.consumer("jobs") {
            while found.len() < numbers.len() {
                match consumer.recv_timeout(Duration::from_millis(50)) {
                    Ok(Some(message)) => {
                        let number = number_of(message.payload());
                        let number = number.unwrap_or_else(|| panic!("{what}: a wrong payload"));
                        assert!(numbers.contains(&number), "{what}: {number} was acked");
                        assert!(found.insert(number), "{what}: {number} twice");
                        message.ack().unwrap();
                    }
                    Ok(None) if broker.has_ended() => break,
                    Ok(None) => {}
                    Err(_) => break,
                }
            }
        }
        if found == *numbers {
            broker.kill();
            return true;
        }
        wait_until(&format!("{what}: the broker ends"), || broker.has_ended());
    }
    let said = broker.log_text()[log_before..].to_owned();
    let named = ["damaged", "the store failed", "cannot read"];
    assert!(
        named.iter().any(|word| said.contains(word)),
        "{what}: it does not say why it ended: {said}"
    );
    false
}

fn number_of(bytes: &[u8]) -> Option<u64> {
    let number = u64::from_ne_bytes(bytes.get(8..16)?.try_into().ok()?);
    (bytes == common::payload(1, number, 400)).then_some(number)
}

// I5: no damage passes in silence.
#[test]
fn files_that_are_damaged_are_refused_or_whole() {
    let mut broker = Broker::new();
    let numbers = a_store(&mut broker);
    let whole = broker.folder().join("whole");
    copy_folder(&broker.data_dir(), &whole);
    let mut random = Random(seed());
    let trials = match std::env::var("RINGMAIN_SLICE").is_ok_and(|slice| slice == "all") {
        true => 1500,
        false => 60,
    };
    let (mut refused, mut served) = (0, 0);
    for trial in 0..trials {
        std::fs::remove_dir_all(broker.data_dir()).unwrap();
        copy_folder(&whole, &broker.data_dir());
        broker.wipe_shm();
        let files = files_below(&broker.data_dir());
        let file = &files[random.below(files.len() as u64) as usize];
        let mut bytes = std::fs::read(file).unwrap();
        if bytes.is_empty() {
            continue;
        }
        let at = random.below(bytes.len() as u64) as usize;
        let what = match trial % 2 {
            0 => {
                bytes.truncate(at);
                format!("{} cut to {at} bytes", file.display())
            }
            _ => {
                let bit = random.below(8);
                bytes[at] ^= 1 << bit;
                format!("{}: bit {bit} of byte {at} flipped", file.display())
            }
        };
        std::fs::write(file, bytes).unwrap();
        match expect_all_or_a_refusal(&mut broker, &numbers, &what) {
            true => served += 1,
            false => refused += 1,
        }
    }
    eprintln!("damage: {refused} refused, {served} whole");
    assert!(refused > 0 && served > 0);
}

// I10: a disk that is full, though the broker had kept a reserve: it waits, and
// goes on when there is room.
#[test]
fn a_disk_that_others_fill_costs_nothing_but_time() {
    let mut broker = Broker::new();
    std::fs::create_dir(broker.data_dir()).unwrap();
    let size = 300 << 20;
    let Some(disk) = SmallFileSystem::at(&broker.data_dir(), size, "a full disk") else {
        return;
    };
    broker.restart();
    broker.create("jobs", &QueueSettings::default());
    let mut producers = producers(&broker);
    for producer in &producers {
        producer.wait_for_more(100);
    }
    for left in [4 << 20, 0] {
        let hog = disk.fill(left);
        wait_until("the disk counts as full, or the store fails", || {
            let full = broker.client().stats();
            full.map_or(true, |stats| stats.disk_full)
        });
        std::thread::sleep(Duration::from_millis(300));
        hog.set_len(0).unwrap();
        for producer in &producers {
            producer.wait_for_more(100);
        }
    }
    let mut consumers = vec![broker.consume(Consume::new("jobs"))];
    let report = finish(&broker, &mut producers, &mut consumers);
    assert_eq!(report.delivered, report.accepted);
    let (one, rest) = (&producers, &consumers);
    audit(
        &one.iter().collect::<Vec<_>>(),
        &rest.iter().collect::<Vec<_>>(),
    );
    broker.terminate();
}

// I1, I3: a wall clock that is set back or forth by hours decides nothing.
#[test]
fn a_wall_clock_that_jumps_changes_nothing() {
    let (mut broker, shim) = shimmed();
    let client = broker.client();
    let producer = client.producer("jobs").unwrap();
    let mut consumer = client.consumer("jobs").unwrap();
    producer.send("held").unwrap();
    let held = consumer.recv().unwrap();
    for hours in [-5, 5, -100_000, 0] {
        shim.set_clock(hours * 3600);
        producer.send("passes").unwrap();
        producer.flush(Confirm::Synced).unwrap();
        let message = consumer.recv_timeout(common::BOUND).unwrap().unwrap();
        assert!(message.payload() == b"passes" && !message.redelivered());
        message.ack().unwrap();
        consumer.flush(Confirm::Synced).unwrap();
        assert_eq!(broker.info("jobs").leased, 1, "the lease goes on");
        broker.kill();
        broker.restart();
        let queue = broker.run(&["stats"]);
        assert!(queue.status.success());
    }
    held.ack().unwrap();
    consumer.flush(Confirm::Stored).unwrap();
    assert_eq!(broker.info("jobs").messages, 0);
}
