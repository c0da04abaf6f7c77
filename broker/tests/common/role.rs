//! What a child process does.

use super::mixed::Mixed;
use super::tally::{Entry, Kind, Tally};
use ringmain::{Client, Confirm, ConsumerOptions, Error, Message, Producer, ProducerOptions};
use serde::{Deserialize, Serialize};
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The variable that makes this program a child.
pub(super) const ROLE_VARIABLE: &str = "RINGMAIN_TEST_ROLE";

/// What a child is to do. When its standard input closes, it comes to its end.
#[derive(Debug, Serialize, Deserialize)]
pub enum Role {
    Produce(Produce),
    Consume(Consume),
    Hold(Hold),
    /// Loans a payload of so many bytes, writes it, and sends it when it is told to
    /// come to its end.
    Loan {
        queue: String,
        bytes: usize,
    },
    /// Forks, and looks what works on either side.
    Fork {
        queue: String,
    },
    /// Sends in all ways: see [`mixed`](super::mixed).
    MixedProduce {
        queue: String,
        producer: u64,
        seed: u64,
    },
    /// Receives and answers in all ways.
    MixedConsume {
        queue: String,
        seed: u64,
    },
    /// Makes and deletes queues of its own.
    Churn {
        seed: u64,
    },
    /// Opens so many producers and consumers of the queue, and waits.
    Attach {
        queue: String,
        pairs: u32,
    },
}

/// Sends numbered messages.
#[derive(Debug, Serialize, Deserialize)]
pub struct Produce {
    pub queue: String,
    /// Its number.
    pub producer: u64,
    /// How many messages; those from 0 on.
    pub count: u64,
    /// Length of each.
    pub bytes: usize,
    /// Messages that go out in one call.
    pub batch: u64,
    /// After so many messages it waits for a confirmation.
    pub flush_every: u64,
    pub confirm: Confirm,
}

impl Produce {
    /// An endless stream of short messages.
    pub fn new(queue: &str, producer: u64) -> Produce {
        Produce {
            queue: queue.to_owned(),
            producer,
            count: u64::MAX,
            bytes: 64,
            batch: 1,
            flush_every: u64::MAX,
            confirm: Confirm::Stored,
        }
    }
}

/// Receives and acks.
#[derive(Debug, Serialize, Deserialize)]
pub struct Consume {
    pub queue: String,
    pub window: u32,
    /// After so many acks it waits for a confirmation.
    pub flush_every: u64,
    pub confirm: Confirm,
    /// Acks go out in runs of so many.
    pub batch: usize,
}

impl Consume {
    pub fn new(queue: &str) -> Consume {
        Consume {
            queue: queue.to_owned(),
            window: 64,
            flush_every: u64::MAX,
            confirm: Confirm::Stored,
            batch: 1,
        }
    }
}

/// Takes messages and holds them; told to end, it acks them.
#[derive(Debug, Serialize, Deserialize)]
pub struct Hold {
    pub queue: String,
    pub window: u32,
    pub take: u64,
}

/// The payload of a message: who sent it, which it is, and bytes that follow
/// from these.
pub fn payload(producer: u64, number: u64, bytes: usize) -> Vec<u8> {
    let mut payload = Vec::with_capacity(bytes.max(16));
    payload.extend_from_slice(&producer.to_ne_bytes());
    payload.extend_from_slice(&number.to_ne_bytes());
    while payload.len() < bytes {
        payload.push((number as usize + payload.len()) as u8);
    }
    payload
}

/// Who sent this, and which it is; `None` if it is damaged.
pub(super) fn parse(bytes: &[u8]) -> Option<(u64, u64)> {
    let word = |at: usize| Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let (producer, number) = (word(0)?, word(8)?);
    (bytes == payload(producer, number, bytes.len())).then_some((producer, number))
}

/// Whether somebody has made this program a child.
pub fn is_child() -> bool {
    std::env::var_os(ROLE_VARIABLE).is_some()
}

/// The body of the test `child_process`: returns at once in a test program that
/// nobody has made a child.
pub fn run_child() {
    let Ok(role) = std::env::var(ROLE_VARIABLE) else {
        return;
    };
    let (socket, tally, role): (PathBuf, PathBuf, Role) = serde_json::from_str(&role).unwrap();
    let mut tally = Tally::append_to(&tally);
    let told = watch_stdin();
    if let Some(mixed) = Mixed::of(&role, &socket, &mut tally, &told) {
        mixed.run();
        return tally.note(Entry::new(Kind::Done));
    }
    let client = Client::connect_to(socket).unwrap();
    match role {
        Role::Produce(role) => produce(&client, &role, &mut tally, &told),
        Role::Consume(role) => consume(&client, &role, &mut tally, &told),
        Role::Hold(role) => hold(&client, &role, &mut tally, &told),
        Role::Loan { queue, bytes } => loan(&client, &queue, bytes, &mut tally, &told),
        Role::Fork { queue } => fork(&client, &queue),
        Role::Attach { queue, pairs } => attach(&client, &queue, pairs, &mut tally, &told),
        Role::MixedProduce { .. } | Role::MixedConsume { .. } | Role::Churn { .. } => {}
    }
    tally.note(Entry::new(Kind::Done));
}

fn watch_stdin() -> Arc<AtomicBool> {
    let told = Arc::new(AtomicBool::new(false));
    let tell = Arc::clone(&told);
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        tell.store(true, Ordering::Relaxed);
    });
    told
}

fn wait_told(told: &AtomicBool) {
    while !told.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn produce(client: &Client, role: &Produce, tally: &mut Tally, told: &AtomicBool) {
    let options = ProducerOptions::new().confirm(Confirm::Accepted);
    let producer = client.producer_with(&role.queue, options).unwrap();
    let mut next = 0;
    let mut unconfirmed = 0;
    while next < role.count && !told.load(Ordering::Relaxed) {
        let numbers = next..(next + role.batch).min(role.count);
        let of = |kind: Kind, number: u64, id: (u64, u64)| Entry {
            producer: role.producer,
            number,
            id,
            ..Entry::new(kind)
        };
        for number in numbers.clone() {
            tally.note(of(Kind::Intent, number, (0, 0)));
        }
        let ids = if role.batch == 1 {
            vec![
                producer
                    .send(payload(role.producer, next, role.bytes))
                    .unwrap(),
            ]
        } else {
            let payloads = numbers
                .clone()
                .map(|n| payload(role.producer, n, role.bytes));
            producer.send_batch(payloads).unwrap()
        };
        for (number, id) in numbers.clone().zip(ids) {
            tally.note(of(Kind::Accepted, number, (id.session, id.position)));
        }
        unconfirmed += numbers.end - numbers.start;
        next = numbers.end;
        if unconfirmed >= role.flush_every {
            unconfirmed = 0;
            confirm(&producer, role.confirm, tally);
        }
    }
    confirm(&producer, role.confirm, tally);
}

fn confirm(producer: &Producer, level: Confirm, tally: &mut Tally) {
    producer.flush(level).unwrap();
    tally.note(Entry::new(Kind::Confirmed));
}

pub(super) fn taken(message: &Message) -> Entry {
    let id = message.id();
    let about = parse(message.payload());
    let (producer, number) = about.unwrap_or_default();
    Entry {
        producer,
        number,
        id: (id.session, id.position),
        redelivered: message.redelivered(),
        attempts: u64::from(message.attempts()),
        ..Entry::new(if about.is_some() {
            Kind::Taken
        } else {
            Kind::Damaged
        })
    }
}

fn consume(client: &Client, role: &Consume, tally: &mut Tally, told: &AtomicBool) {
    let options = ConsumerOptions::new().window(role.window);
    let mut consumer = client.consumer_with(&role.queue, options).unwrap();
    let mut unconfirmed = 0;
    let mut held = Vec::new();
    while !told.load(Ordering::Relaxed) {
        let message = consumer.recv_timeout(Duration::from_millis(20)).unwrap();
        let idle = message.is_none();
        if let Some(message) = message {
            let entry = taken(&message);
            tally.note(entry);
            held.push((message, entry));
        }
        // A run that is not full goes out when nothing more comes.
        if held.len() < role.batch && (held.is_empty() || !idle) {
            continue;
        }
        let (messages, entries): (Vec<_>, Vec<_>) = held.drain(..).unzip();
        unconfirmed += entries.len() as u64;
        Message::ack_batch(messages).unwrap();
        for entry in entries {
            let Entry { kind, at_ns, .. } = Entry::new(Kind::Acked);
            tally.note(Entry {
                kind,
                at_ns,
                ..entry
            });
        }
        if unconfirmed >= role.flush_every {
            unconfirmed = 0;
            consumer.flush(role.confirm).unwrap();
            tally.note(Entry::new(Kind::AcksConfirmed));
        }
    }
    drop(held);
    consumer.flush(role.confirm).unwrap();
    tally.note(Entry::new(Kind::AcksConfirmed));
}

fn hold(client: &Client, role: &Hold, tally: &mut Tally, told: &AtomicBool) {
    let options = ConsumerOptions::new().window(role.window);
    let mut consumer = client.consumer_with(&role.queue, options).unwrap();
    let mut held = Vec::new();
    for _ in 0..role.take {
        let message = consumer.recv().unwrap();
        tally.note(taken(&message));
        held.push(message);
    }
    wait_told(told);
    for message in held {
        let entry = taken(&message);
        message.ack().unwrap();
        tally.note(Entry {
            kind: Kind::Acked,
            ..entry
        });
    }
    match consumer.flush(Confirm::Stored) {
        Ok(()) => {}
        Err(Error::LeaseLost { count }) => tally.note(Entry {
            number: count,
            ..Entry::new(Kind::LeasesLost)
        }),
        Err(error) => panic!("{error}"),
    }
}

fn loan(client: &Client, queue: &str, bytes: usize, tally: &mut Tally, told: &AtomicBool) {
    let producer = client.producer(queue).unwrap();
    let mut loan = producer.loan(bytes).unwrap();
    loan.copy_from_slice(&payload(1, 0, bytes));
    let of = |kind: Kind, id: (u64, u64)| Entry {
        producer: 1,
        id,
        ..Entry::new(kind)
    };
    tally.note(of(Kind::Intent, (0, 0)));
    wait_told(told);
    let id = loan.send().unwrap();
    tally.note(of(Kind::Accepted, (id.session, id.position)));
    producer.flush(Confirm::Stored).unwrap();
}

fn fork(client: &Client, queue: &str) {
    use nix::sys::wait::{WaitStatus, waitpid};
    use nix::unistd::{ForkResult, fork};
    let producer = client.producer(queue).unwrap();
    let mut consumer = client.consumer(queue).unwrap();
    producer.send("one").unwrap();
    producer.send("two").unwrap();
    let message = consumer.recv().unwrap();
    // SAFETY: this process has one other thread, which reads standard input
    // and holds no lock; the child ends by `_exit`.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            let forked = |outcome: Result<(), Error>| matches!(outcome, Err(Error::Forked));
            let all = [
                forked(producer.send("three").map(drop)),
                forked(producer.flush(Confirm::Stored)),
                forked(consumer.try_recv().map(drop)),
                forked(consumer.recv().map(drop)),
                forked(consumer.flush(Confirm::Stored)),
                forked(message.extend(Duration::from_secs(60))),
                forked(message.ack()),
                forked(client.stats().map(drop)),
                forked(client.producer(queue).map(drop)),
            ];
            // Handles of the parent may be dropped, and new ones made.
            drop(consumer);
            drop(producer);
            let own = Client::connect_to(client.socket());
            let sent = own.is_ok_and(|own| {
                own.producer(queue)
                    .is_ok_and(|producer| producer.send("child").is_ok())
            });
            let wrong = all.iter().position(|ok| !ok).map_or(0, |at| at as i32 + 1);
            // SAFETY: ends the child, and runs nothing of what it inherited.
            unsafe { libc::_exit(if sent { wrong } else { 99 }) }
        }
        ForkResult::Parent { child } => {
            assert_eq!(waitpid(child, None).unwrap(), WaitStatus::Exited(child, 0));
        }
    }
    message.ack().unwrap();
    producer.send("parent").unwrap();
    for expected in ["two", "child", "parent"] {
        let message = consumer.recv().unwrap();
        assert_eq!(message.payload(), expected.as_bytes());
        assert!(!message.redelivered());
        message.ack().unwrap();
    }
    consumer.flush(Confirm::Stored).unwrap();
}

fn attach(client: &Client, queue: &str, pairs: u32, tally: &mut Tally, told: &AtomicBool) {
    let consumers: Vec<_> = (0..pairs)
        .map(|_| client.consumer(queue).unwrap())
        .collect();
    let others: Vec<_> = (0..pairs)
        .map(|_| Client::connect_to(client.socket()).unwrap())
        .collect();
    let producers: Vec<_> = others.iter().map(|c| c.producer(queue).unwrap()).collect();
    tally.note(Entry::new(Kind::Confirmed));
    wait_told(told);
    drop((consumers, producers));
}
