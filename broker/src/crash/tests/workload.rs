//! A client that does everything that clients do, and whose tally must come out
//! whatever happens to its broker.

use super::supervisor::Supervisor;
use ringmain::{
    Broker, Client, Confirm, Consumer, ConsumerOptions, Error, Message, Producer, QueueSettings,
};
use std::collections::HashSet;
use std::time::{Duration, Instant};

/// No wait lasts longer.
const BOUND: Duration = Duration::from_secs(30);
const LARGE: usize = 300 * 1024;
/// Stored in parts.
const HUGE: usize = 1536 * 1024;

struct Workload<'a> {
    supervisor: &'a Supervisor,
    client: Client,
    next: u64,
    /// Sent, and not acked.
    open: HashSet<u64>,
    acked: HashSet<u64>,
}

/// Does everything, with the broker of the supervisor, and stops it.
pub fn run(supervisor: &Supervisor) {
    let client = retry(supervisor, || Client::connect_to(supervisor.socket()));
    let mut workload = Workload {
        supervisor,
        client,
        next: 0,
        open: HashSet::new(),
        acked: HashSet::new(),
    };
    workload.queues();
    workload.backlog();
    workload.deliver_while_sending();
    workload.dead_letters();
    workload.expiry();
    workload.nothing_is_left();
    workload.stop();
}

/// Tries until it works. What a broker that is away, or was while a session was
/// being opened, costs the caller is one more try.
fn retry<T>(supervisor: &Supervisor, mut work: impl FnMut() -> ringmain::Result<T>) -> T {
    let started = Instant::now();
    loop {
        supervisor.check();
        match work() {
            Ok(done) => return done,
            Err(
                Error::NotRunning { .. }
                | Error::Io { .. }
                | Error::Closed(_)
                | Error::TimedOut
                | Error::StoreUnavailable(_),
            ) if started.elapsed() < BOUND => std::thread::sleep(Duration::from_millis(2)),
            Err(error) => panic!("{}: {error:?}", supervisor.what()),
        }
    }
}

fn payload(number: u64, len: usize) -> Vec<u8> {
    let mut payload = vec![number as u8; len.max(8)];
    payload[..8].copy_from_slice(&number.to_ne_bytes());
    payload
}

fn number_of(message: &Message) -> u64 {
    let bytes = message.payload();
    let number = u64::from_ne_bytes(bytes[..8].try_into().unwrap());
    assert!(bytes[8..].iter().all(|&byte| byte == number as u8), "whole");
    number
}

impl Workload<'_> {
    fn queues(&self) {
        let create = |name: &str, settings: &QueueSettings| {
            retry(self.supervisor, || {
                match self.client.create_queue(name, settings) {
                    // The try before was committed, and its answer was lost.
                    Err(Error::QueueExists(_)) => Ok(()),
                    other => other,
                }
            });
        };
        create("jobs", &QueueSettings::default());
        let short = QueueSettings {
            visibility_timeout_ms: 100,
            ..QueueSettings::default()
        };
        create("short", &short);
        create("gone", &QueueSettings::default());
        let producer = self.producer("gone");
        let mut consumer = self.consumer("gone", 1);
        producer.send("a").unwrap();
        producer.send("b").unwrap();
        producer.flush(Confirm::Stored).unwrap();
        let held = self.receive(&mut consumer);
        retry(self.supervisor, || match self.client.delete_queue("gone") {
            Err(Error::NoSuchQueue(_)) => Ok(()),
            other => other,
        });
        // Its lease is lost, or not, depending on what comes first.
        let _ = held.ack();
        let refused = self.until(|| producer.send("c").is_err());
        assert!(refused);
    }

    fn until(&self, mut condition: impl FnMut() -> bool) -> bool {
        let started = Instant::now();
        while started.elapsed() < BOUND {
            self.supervisor.check();
            if condition() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        false
    }

    fn producer(&self, queue: &str) -> Producer {
        retry(self.supervisor, || self.client.producer(queue))
    }

    fn consumer(&self, queue: &str, window: u32) -> Consumer {
        let options = ConsumerOptions::new().window(window);
        retry(self.supervisor, || {
            self.client.consumer_with(queue, options.clone())
        })
    }

    fn receive(&self, consumer: &mut Consumer) -> Message {
        let message = consumer.recv_timeout(BOUND).unwrap();
        self.supervisor.check();
        message.unwrap_or_else(|| panic!("{}: lost: {:?}", self.supervisor.what(), self.open))
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.open.insert(self.next);
        self.next
    }

    fn send(&mut self, producer: &Producer, len: usize) {
        let number = self.number();
        // The first large one needs a broker; the others do not.
        retry(self.supervisor, || producer.send(payload(number, len)));
    }

    /// Acks what nobody has acked before.
    fn ack(&mut self, message: Message) {
        let number = number_of(&message);
        assert!(
            self.open.remove(&number),
            "{}: {number} was {}",
            self.supervisor.what(),
            match self.acked.contains(&number) {
                true => "acked before",
                false => "never sent",
            }
        );
        message.ack().unwrap();
        self.acked.insert(number);
    }

    /// Sent before anybody receives, by ways that differ in what they store.
    fn backlog(&mut self) {
        let producer = self.producer("jobs");
        for len in [0, 100, 4000, LARGE, HUGE] {
            self.send(&producer, len);
        }
        producer.flush(Confirm::Stored).unwrap();
        let numbers: Vec<u64> = (0..20).map(|_| self.number()).collect();
        let payloads = numbers.iter().map(|&number| payload(number, 200));
        producer.send_batch(payloads).unwrap();
        let number = self.number();
        let mut loan = retry(self.supervisor, || producer.loan(LARGE));
        loan.copy_from_slice(&payload(number, LARGE));
        loan.send().unwrap();
        producer.flush(Confirm::Synced).unwrap();
        let mut consumer = self.consumer("jobs", 4);
        let mut last = 0;
        while !self.open.is_empty() {
            let message = self.receive(&mut consumer);
            // I2: nothing was leased before, unless it says so.
            let number = number_of(&message);
            assert!(
                message.redelivered() || number > last,
                "{}: {number} after {last}",
                self.supervisor.what()
            );
            last = last.max(number);
            self.ack(message);
        }
        consumer.flush(Confirm::Synced).unwrap();
    }

    /// With a consumer that is awake: little is stored.
    fn deliver_while_sending(&mut self) {
        let mut consumer = self.consumer("jobs", 16);
        let producer = self.producer("jobs");
        let mut refused = HashSet::new();
        for turn in 0..30 {
            let len = match turn % 10 {
                3 => LARGE,
                6 => 5000,
                _ => 50,
            };
            self.send(&producer, len);
            if turn % 8 == 7 {
                producer.flush(Confirm::Stored).unwrap();
            }
            if turn % 3 != 2 {
                continue;
            }
            for message in consumer.recv_batch(2).unwrap() {
                let number = number_of(&message);
                match number % 5 {
                    0 if refused.insert(number) => message.nack(Duration::ZERO).unwrap(),
                    1 if refused.insert(number) => message.release().unwrap(),
                    2 if refused.insert(number) => drop(message),
                    _ => {
                        message.extend(Duration::from_secs(60)).unwrap();
                        self.ack(message);
                    }
                }
            }
        }
        // Some are held when their consumer goes.
        let held = self.receive(&mut consumer);
        drop(consumer);
        drop(held);
        self.drain("jobs");
    }

    /// Receives and acks all that is open.
    fn drain(&mut self, queue: &str) {
        let mut consumer = self.consumer(queue, 32);
        while !self.open.is_empty() {
            let message = self.receive(&mut consumer);
            self.ack(message);
        }
        consumer.flush(Confirm::Stored).unwrap();
    }

    fn dead_letters(&mut self) {
        let producer = self.producer("jobs");
        let mut consumer = self.consumer("jobs", 8);
        for len in [10, LARGE, 20, 30] {
            self.send(&producer, len);
        }
        for _ in 0..4 {
            self.receive(&mut consumer).reject().unwrap();
        }
        consumer.flush(Confirm::Stored).unwrap();
        drop(consumer);
        // The queue is made by the first move.
        let there = self.until(|| {
            let listed = retry(self.supervisor, || {
                match self.client.dead_letters("jobs.dead", 0, 10) {
                    Err(Error::NoSuchQueue(_)) => Ok(Vec::new()),
                    other => other,
                }
            });
            listed.len() == 4
        });
        assert!(there, "{}: dead letters are lost", self.supervisor.what());
        let mut sent_back = 0;
        while sent_back < 2 {
            // An answer that is lost leaves open how many it were.
            retry(self.supervisor, || {
                self.client.redrive("jobs.dead", None, Some(1))
            });
            let left = retry(self.supervisor, || self.client.queue("jobs.dead"));
            sent_back = 4 - left.messages;
        }
        let mut consumer = self.consumer("jobs", 8);
        for _ in 0..sent_back {
            let message = self.receive(&mut consumer);
            self.ack(message);
        }
        consumer.flush(Confirm::Stored).unwrap();
        self.drain("jobs.dead");
    }

    /// A lease ends by time, and its ack comes too late.
    fn expiry(&mut self) {
        let producer = self.producer("short");
        let mut consumer = self.consumer("short", 1);
        self.send(&producer, 50);
        let message = self.receive(&mut consumer);
        let again = self.receive(&mut consumer);
        assert!(again.redelivered());
        message.ack().unwrap();
        drop(again);
        match consumer.flush(Confirm::Stored) {
            // The second may have expired as well, while a broker was away.
            Err(Error::LeaseLost { .. }) => {}
            other => panic!("{}: {other:?}", self.supervisor.what()),
        }
        // What expires meanwhile comes again.
        while !self.open.is_empty() {
            let message = self.receive(&mut consumer);
            self.ack(message);
            match consumer.flush(Confirm::Stored) {
                Ok(()) => {}
                Err(Error::LeaseLost { .. }) => {
                    self.open.insert(self.next);
                }
                Err(error) => panic!("{}: {error:?}", self.supervisor.what()),
            }
        }
    }

    /// I7: no session, lease, chunk or file of one stays.
    fn nothing_is_left(&mut self) {
        self.client = retry(self.supervisor, || {
            Client::connect_to(self.supervisor.socket())
        });
        let clean = self.until(|| {
            let stats = retry(self.supervisor, || self.client.stats());
            let names = std::fs::read_dir(self.supervisor.shm()).unwrap();
            let of_sessions = names
                .filter(|name| {
                    let name = name.as_ref().unwrap().file_name();
                    name.to_str().unwrap().starts_with('s')
                })
                .count();
            (stats.messages, stats.leased, stats.sessions, of_sessions) == (0, 0, 0, 0)
        });
        assert!(
            clean,
            "{}: left: {:?}",
            self.supervisor.what(),
            self.client.stats()
        );
    }

    /// In order, then with a drain, in which what was sent last goes to the store.
    fn stop(&mut self) {
        let stop = |drain: bool| {
            retry(self.supervisor, || {
                let broker = Broker::at(self.supervisor.socket())?;
                match drain {
                    true => broker.drain_timeout(BOUND),
                    false => broker.stop_timeout(BOUND),
                }
            });
        };
        stop(false);
        let producer = self.producer("jobs");
        self.send(&producer, 100);
        self.send(&producer, LARGE);
        stop(true);
        self.client = retry(self.supervisor, || {
            Client::connect_to(self.supervisor.socket())
        });
        self.drain("jobs");
        self.nothing_is_left();
    }
}
