//! Clients that mean harm (I8, with I6 and I7): whatever one writes into its own
//! shared memory or says on the control socket ends its own session at most.
//!
//! `RINGMAIN_SECONDS` says how long each fuzzer runs (default 5), `RINGMAIN_SEED`
//! what it begins with (default: the clock).

#![allow(clippy::unwrap_used, reason = "a test that can't go on has failed")]
#![allow(clippy::print_stderr, reason = "the report of the run")]

mod common;

use common::{Broker, Hold, Kind, Random, Witness, wait_until};
use ringmain::{Client, Confirm, Consumer, ConsumerOptions, Error, Producer, QueueSettings};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const LARGE: usize = 100_000;

/// Not a test: what the children run.
#[test]
fn child_process() {
    common::run_child();
}

fn seed() -> u64 {
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed = std::env::var("RINGMAIN_SEED").ok();
    seed.map_or(clock.as_secs(), |seed| seed.parse().unwrap())
}

fn time() -> Duration {
    let seconds = std::env::var("RINGMAIN_SECONDS").ok();
    Duration::from_secs(seconds.map_or(5, |seconds| seconds.parse().unwrap()))
}

/// A client whose memory is written over.
struct Hostile {
    producer: Producer,
    consumer: Consumer,
    /// The rings of both sessions, and the producer's payload segment.
    rings: Vec<File>,
    words: Option<File>,
}

fn session_numbers(broker: &Broker) -> Vec<u64> {
    let names = broker.session_files().into_iter();
    let mut numbers: Vec<u64> = names
        .filter_map(|name| name.strip_prefix('s')?.strip_suffix(".ring")?.parse().ok())
        .collect();
    numbers.sort_unstable();
    numbers
}

impl Hostile {
    fn new(broker: &Broker) -> Hostile {
        let before = session_numbers(broker);
        let client = broker.client();
        let producer = client.producer("victim").unwrap();
        let consumer = client.consumer("victim").unwrap();
        let made = session_numbers(broker).into_iter();
        let made: Vec<u64> = made.filter(|number| !before.contains(number)).collect();
        let open = |name: String| {
            let mut options = OpenOptions::new();
            options.read(true).write(true);
            options.open(broker.shm_dir().join(name)).ok()
        };
        let _ = producer.send(vec![9; LARGE]);
        let rings = made.iter().filter_map(|n| open(format!("s{n}.ring")));
        Hostile {
            rings: rings.collect(),
            words: made.iter().find_map(|n| open(format!("s{n}.out0"))),
            producer,
            consumer,
        }
    }

    /// Writes somewhere what has a chance to be believed.
    fn scribble(&self, random: &mut Random) {
        if random.below(4) == 0
            && let Some(words) = &self.words
        {
            // Chunk words, and their payload.
            let at = random.below(16) * 8;
            let _ = words.write_at(&value(random, 0).to_ne_bytes(), at);
            return;
        }
        let Some(file) = self.rings.get(random.below(2) as usize) else {
            return;
        };
        let len = file.metadata().map_or(0, |found| found.len());
        let at = match random.below(10) {
            // The preamble.
            0 => random.below(16) * 4,
            // A cursor, a confirmation or a wait word.
            1..6 => 128 * (1 + random.below(9)) + 8 * random.below(3),
            // An attachment's.
            6 => 2048 + 4 * random.below(8),
            // A record.
            _ => 4096 + 8 * random.below(len.saturating_sub(4096) / 8 + 1),
        };
        let mut there = [0; 8];
        let _ = file.read_at(&mut there, at);
        let value = value(random, u64::from_ne_bytes(there));
        let _ = match random.below(8) {
            0 => {
                let bytes: Vec<u8> = (0..random.below(200))
                    .map(|_| random.next() as u8)
                    .collect();
                file.write_at(&bytes, at)
            }
            1 => file.write_at(&(value as u32).to_ne_bytes(), at),
            _ => file.write_at(&value.to_ne_bytes(), at),
        };
    }

    /// Goes on as a client does, whatever comes of it.
    fn use_it(&mut self, random: &mut Random) -> Result<(), Error> {
        let wait = Duration::from_millis(2);
        match random.below(6) {
            0 => self.producer.try_send(vec![1; 3000]).map(drop),
            1 => self.producer.send_timeout(vec![2; LARGE], wait).map(drop),
            2 => self.producer.flush_timeout(Confirm::Stored, wait),
            3 => match self.consumer.recv_timeout(wait)? {
                Some(message) => message.ack(),
                None => Ok(()),
            },
            4 => match self.consumer.try_recv()? {
                Some(message) => message.nack(Duration::ZERO),
                None => Ok(()),
            },
            _ => self.producer.try_send(b"short").map(drop),
        }
    }
}

/// A value near another one, or at a limit.
fn value(random: &mut Random, near: u64) -> u64 {
    match random.below(12) {
        0 => 0,
        1 => u64::MAX,
        2 => near.wrapping_add(8),
        3 => near.wrapping_sub(8),
        4 => near.wrapping_add(1 << random.below(64)),
        5 => near ^ 1 << random.below(64),
        6 => 128 * 1024,
        7 => near.wrapping_add(128 * 1024),
        8 => u64::from(u32::MAX),
        9 => 1 << 63,
        10 => random.below(100) << 32 | random.below(7),
        _ => random.next(),
    }
}

fn resident_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS"))
        .unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// The broker serves, in the same process, and nothing is left of the hostile.
#[track_caller]
fn expect_unharmed(broker: &Broker, pid: u32, sessions: u64, witness: Witness) {
    assert_eq!(broker.pid(), pid);
    let log = broker.log_text();
    assert!(!log.contains("panicked"), "{log}");
    assert_eq!(log.matches("in service").count(), 1, "it started anew");
    // I7
    wait_until("its sessions are gone", || {
        broker.stats().sessions == sessions
    });
    witness.finish(broker);
}

#[test]
fn bytes_written_over_a_clients_own_memory_harm_nobody_else() {
    let seed = seed();
    let mut random = Random(seed);
    let broker = Broker::with_queue("victim");
    let witness = Witness::of(&broker);
    let (pid, sessions) = (broker.pid(), broker.stats().sessions);
    let started = Instant::now();
    let (mut writes, mut ended) = (0_u64, 0_u64);
    let mut resident = 0;
    while started.elapsed() < time() {
        let mut hostile = Hostile::new(&broker);
        for _ in 0..1 + random.below(60) {
            for _ in 0..1 + random.below(4) {
                hostile.scribble(&mut random);
                writes += 1;
            }
            match hostile.use_it(&mut random) {
                Ok(()) | Err(Error::Full(_) | Error::TimedOut | Error::LeaseLost { .. }) => {}
                Err(_) => break,
            }
        }
        ended += 1;
        drop(hostile);
        if ended % 50 == 0 {
            witness.undisturbed();
            // What hostile clients left in their queue is nobody's concern.
            let client = broker.client();
            client.delete_queue("victim").unwrap();
            client
                .create_queue("victim", &QueueSettings::default())
                .unwrap();
            let now = resident_kib(pid);
            if ended == 100 {
                resident = now;
            }
        }
    }
    eprintln!("memory: {writes} writes over {ended} sessions from seed {seed}");
    assert!(ended > 5);
    if resident > 0 {
        let now = resident_kib(pid);
        // RocksDB's memory for writes is part of it.
        assert!(now < resident + 200 * 1024, "{resident} KiB became {now}");
    }
    expect_unharmed(&broker, pid, sessions, witness);
}

/// Lines that requests are made of.
const REQUESTS: [&str; 16] = [
    r#"{"op":"hello","protocol":1}"#,
    r#"{"op":"open","layout":2,"rings":{"submission":131072,"delivery":65536,"answer":16384}}"#,
    r#"{"op":"ready"}"#,
    r#"{"op":"attach","queue":"victim","purpose":"consume","window":10}"#,
    r#"{"op":"attach","queue":"victim","purpose":"produce","window":1}"#,
    r#"{"op":"resume","session":1}"#,
    r#"{"op":"outbound","bytes":100000}"#,
    r#"{"op":"create_queue","name":"other","settings":{}}"#,
    r#"{"op":"delete_queue","name":"other"}"#,
    r#"{"op":"queues"}"#,
    r#"{"op":"queue","name":"victim"}"#,
    r#"{"op":"stats"}"#,
    r#"{"op":"dead_letters","queue":"victim","from":0,"limit":10}"#,
    r#"{"op":"redrive","queue":"victim","to":null,"limit":null}"#,
    r#"{"op":"nothing"}"#,
    "[[[[[[[[[[[[[[[[",
];

/// A line, more or less.
fn line(random: &mut Random) -> Vec<u8> {
    let whole = REQUESTS[random.below(REQUESTS.len() as u64) as usize];
    let mut line = whole.as_bytes().to_vec();
    for _ in 0..[0, 0, 1, 2, 10][random.below(5) as usize] {
        let at = random.below(line.len() as u64 + 1) as usize;
        match random.below(6) {
            0 => line.truncate(at),
            1 => line.insert(at, random.next() as u8),
            2 if at < line.len() => _ = line.remove(at),
            3 if at < line.len() => line[at] ^= 1 << random.below(8),
            4 => {
                let number = value(random, 0).to_string();
                line.splice(at..at, number.into_bytes());
            }
            _ => {
                let other = REQUESTS[random.below(REQUESTS.len() as u64) as usize];
                line.splice(at..at, other.bytes());
            }
        }
        if line.is_empty() {
            line.push(b'{');
        }
    }
    if random.below(20) > 0 {
        line.push(b'\n');
    }
    line
}

#[test]
fn lines_of_all_kinds_on_the_control_socket_harm_nobody() {
    let seed = seed();
    let mut random = Random(seed);
    let broker = Broker::with_queue("victim");
    let witness = Witness::of(&broker);
    let (pid, sessions) = (broker.pid(), broker.stats().sessions);
    let started = Instant::now();
    let (mut lines, mut answers) = (0_u64, 0_u64);
    while started.elapsed() < time() {
        let Ok(stream) = UnixStream::connect(broker.socket()) else {
            continue;
        };
        stream.set_read_timeout(Some(common::BOUND)).unwrap();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut writer = &stream;
        if random.below(4) > 0 {
            let _ = writer.write_all(REQUESTS[0].as_bytes());
            let _ = writer.write_all(b"\n");
        }
        for _ in 0..random.below(30) {
            let line = line(&mut random);
            lines += 1;
            if writer.write_all(&line).is_err() {
                break;
            }
        }
        // Some are gone before they are answered.
        if random.below(3) > 0 {
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let mut answer = String::new();
            while reader.read_line(&mut answer).is_ok_and(|len| len > 0) {
                let parsed: serde_json::Value = serde_json::from_str(&answer).unwrap();
                assert!(parsed.is_object(), "{answer}");
                answers += 1;
                answer.clear();
            }
            let mut rest = Vec::new();
            let _ = reader.read_to_end(&mut rest);
        }
        if lines % 500 < 30 {
            witness.undisturbed();
        }
    }
    eprintln!("socket: {lines} lines, {answers} answers from seed {seed}");
    assert!(answers > 100);
    expect_unharmed(&broker, pid, sessions, witness);
}

// I8: leases are named by number, and another's can't be.
#[test]
fn acks_of_others_messages_are_worth_nothing() {
    let broker = Broker::with_queue("jobs");
    let client = broker.client();
    let producer = client.producer("jobs").unwrap();
    for number in 0..20 {
        producer.send(common::payload(1, number, 64)).unwrap();
    }
    let mut holder = broker.hold(Hold {
        queue: "jobs".to_owned(),
        window: 20,
        take: 20,
    });
    holder.wait_noted(Kind::Taken, 20);
    // The forger's own session, whose submission ring it fills by hand.
    let before = session_numbers(&broker);
    let forger = client.consumer("jobs").unwrap();
    let made = session_numbers(&broker);
    let own = made.iter().find(|number| !before.contains(number)).unwrap();
    let path = broker.shm_dir().join(format!("s{own}.ring"));
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    let map = ringmain_ring::session::SessionMap::open(&file, &path).unwrap();
    let mut writer = ringmain_ring::record_ring::Writer::new(0, 0);
    let mut forged = 0;
    for entry in 0..64 {
        for delivery_position in (0..2048).step_by(8) {
            let lease = ringmain::record::Lease {
                delivery_position,
                entry,
            };
            wait_until("there is room", || {
                let written =
                    ringmain::record::Leases::write_ack(&mut writer, map.submission(), &[lease]);
                matches!(written, Ok(Ok(_))) || {
                    let _ = writer.refresh(map.submission());
                    false
                }
            });
            writer.publish(map.submission());
            forged += 1;
            read_answers(&map);
        }
    }
    wait_until("all were looked at", || {
        read_answers(&map);
        broker.stats().leases_lost >= forged
    });
    assert_eq!(broker.info("jobs").leased, 20);
    drop((map, forger));
    holder.finish();
    assert_eq!(holder.count_of(Kind::Acked), 20);
    assert_eq!(holder.count_of(Kind::LeasesLost), 0);
    assert_eq!(broker.info("jobs").messages, 0);
}

/// So that the broker has room for more.
fn read_answers(map: &ringmain_ring::session::SessionMap) {
    use ringmain_ring::Ordering;
    let header = map.header();
    let tail = header.answer_tail.word.load(Ordering::Acquire);
    header.answer_head.word.store(tail, Ordering::Release);
}

// I6, I7: who never reads what it is given has no more than its window.
#[test]
fn a_consumer_that_never_reads_its_deliveries_holds_up_nobody() {
    let broker = Broker::with_queue("jobs");
    let client = broker.client();
    let options = ConsumerOptions::new().window(50);
    let idle = client.consumer_with("jobs", options).unwrap();
    let producer = client.producer("jobs").unwrap();
    for number in 0..5000 {
        producer.send(common::payload(1, number, 1000)).unwrap();
    }
    let mut other = client.consumer("jobs").unwrap();
    for _ in 0..4950 {
        other
            .recv_timeout(common::BOUND)
            .unwrap()
            .unwrap()
            .ack()
            .unwrap();
    }
    other.flush(Confirm::Stored).unwrap();
    assert_eq!(broker.info("jobs").leased, 50);
    drop(idle);
    for _ in 0..50 {
        other
            .recv_timeout(common::BOUND)
            .unwrap()
            .unwrap()
            .ack()
            .unwrap();
    }
    other.flush(Confirm::Stored).unwrap();
    assert_eq!(broker.info("jobs").messages, 0);
}

// I7, I8: sessions have a limit; who has them all is told, and others go on.
#[test]
fn ten_thousand_sessions_meet_the_limit_and_go_again() {
    let broker = Broker::with_queue("jobs");
    let witness = Witness::of(&broker);
    let sessions = broker.stats().sessions;
    let clients: Vec<Client> = (0..4).map(|_| broker.client()).collect();
    let mut opened = Vec::new();
    let mut refused = 0;
    for number in 0..10_000 {
        match clients[number % 4].consumer("jobs") {
            Ok(consumer) => opened.push(consumer),
            Err(Error::Full(why)) => {
                assert!(why.contains("sessions"), "{why}");
                refused += 1;
            }
            // Numbers of sessions are reserved a thousand at a time.
            Err(Error::StoreUnavailable(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }
    assert!(opened.len() > 1000 && refused > 8000, "{}", opened.len());
    witness.undisturbed();
    drop(opened);
    wait_until("they are gone", || broker.stats().sessions == sessions);
    clients[0].consumer("jobs").unwrap();
    witness.finish(&broker);
}
