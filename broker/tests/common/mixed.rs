//! Clients that do everything that clients do, in an order that a seed gives, and
//! go on whatever happens to the broker.

use super::Random;
use super::role::{Role, payload, taken};
use super::tally::{Entry, Kind, Tally};
use ringmain::{
    Client, Confirm, Consumer, ConsumerOptions, Error, Message, MessageId, Producer, QueueSettings,
};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Longest wait of a call.
const PATIENCE: Duration = Duration::from_millis(200);

/// See the module.
pub struct Mixed<'a> {
    socket: &'a Path,
    role: &'a Role,
    tally: &'a mut Tally,
    told: &'a AtomicBool,
    random: Random,
    /// The number of the next message.
    next: u64,
}

impl<'a> Mixed<'a> {
    /// If the role is one of these.
    pub fn of(
        role: &'a Role,
        socket: &'a Path,
        tally: &'a mut Tally,
        told: &'a AtomicBool,
    ) -> Option<Mixed<'a>> {
        let seed = match role {
            Role::MixedProduce { seed, .. }
            | Role::MixedConsume { seed, .. }
            | Role::Churn { seed } => *seed,
            _ => return None,
        };
        Some(Mixed {
            socket,
            role,
            tally,
            told,
            random: Random(seed),
            next: 0,
        })
    }

    pub fn run(mut self) {
        // Each turn is a session, which ends by wish or with its broker.
        while !self.is_told() {
            let outcome = match self.role {
                Role::MixedProduce {
                    queue, producer, ..
                } => self.produce(queue, *producer),
                Role::MixedConsume { queue, .. } => self.consume(queue),
                _ => self.churn(),
            };
            match outcome {
                Ok(()) => {}
                Err(error) if is_of_the_brokers_end(&error) => {
                    eprintln!("{} {error:?}", Entry::new(Kind::Done).at_ns);
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error) => panic!("{error:?}"),
            }
        }
    }

    fn is_told(&self) -> bool {
        self.told.load(Ordering::Relaxed)
    }

    fn produce(&mut self, queue: &str, number: u64) -> Result<(), Error> {
        let producer = Client::connect_to(self.socket)?.producer(queue)?;
        for _ in 0..50 + self.random.below(2000) {
            if self.is_told() {
                break;
            }
            self.send_some(&producer, number)?;
            if self.random.below(4) == 0 {
                std::thread::sleep(Duration::from_micros(self.random.below(2000)));
            }
        }
        let level = [Confirm::Stored, Confirm::Synced][self.random.below(2) as usize];
        producer.flush(level)?;
        self.tally.note(Entry::new(Kind::Confirmed));
        Ok(())
    }

    /// From nothing at all to more than a segment has at first.
    fn len(&mut self) -> usize {
        let len = match self.random.below(1000) {
            0..50 => return 0,
            50..800 => self.random.below(300),
            800..970 => self.random.below(15 << 10),
            970..995 => self.random.below(300 << 10),
            995..999 => self.random.below(1500 << 10),
            _ => self.random.below(6 << 20),
        };
        16 + len as usize
    }

    fn send_some(&mut self, producer: &Producer, number: u64) -> Result<(), Error> {
        let way = self.random.below(100);
        let count = match way {
            0..10 => 1 + self.random.below(30),
            _ => 1,
        };
        let first = self.next;
        self.next += count;
        let payloads: Vec<Vec<u8>> = (first..first + count)
            .map(|message| match self.len() {
                0 => Vec::new(),
                len => payload(number, message, len),
            })
            .collect();
        let note = |kind: Kind, at: usize, id: Option<MessageId>| Entry {
            producer: number,
            number: first + at as u64,
            id: id.map_or((0, 0), |id| (id.session, id.position)),
            attempts: payloads[at].len() as u64,
            ..Entry::new(kind)
        };
        for at in 0..payloads.len() {
            self.tally.note(note(Kind::Intent, at, None));
        }
        let sent = match way {
            0..10 => producer.send_batch(&payloads),
            10..20 => producer.try_send(&payloads[0]).map(|id| vec![id]),
            20..30 => producer
                .send_timeout(&payloads[0], PATIENCE)
                .map(|id| vec![id]),
            30..45 => send_loan(producer, &payloads[0]).map(|id| vec![id]),
            _ => producer.send(&payloads[0]).map(|id| vec![id]),
        };
        match sent {
            Ok(ids) => {
                for (at, id) in ids.into_iter().enumerate() {
                    self.tally.note(note(Kind::Accepted, at, Some(id)));
                }
            }
            // Of a batch, some may have been accepted.
            Err(error) => {
                if count == 1 {
                    self.tally.note(note(Kind::Withdrawn, 0, None));
                }
                if !matches!(error, Error::Full(_) | Error::TimedOut) {
                    return Err(error);
                }
            }
        }
        match self.random.below(200) {
            0 => producer.flush(Confirm::Stored),
            1 => producer.flush(Confirm::Synced),
            2 => producer.loan(100_000).map(drop),
            _ => Ok(()),
        }
    }

    fn consume(&mut self, queue: &str) -> Result<(), Error> {
        let window = 1 + self.random.below(60) as u32;
        let options = ConsumerOptions::new().window(window);
        let mut consumer = Client::connect_to(self.socket)?.consumer_with(queue, options)?;
        let mut held: Vec<(Message, Entry)> = Vec::new();
        let outcome = self.receive_and_answer(&mut consumer, &mut held);
        // Those that are held go back.
        for (_, entry) in &held {
            self.send_back(*entry);
        }
        match self.random.below(2) {
            0 => drop(held),
            _ => {
                drop(consumer);
                return outcome;
            }
        }
        outcome?;
        self.confirm(&consumer)
    }

    fn receive_and_answer(
        &mut self,
        consumer: &mut Consumer,
        held: &mut Vec<(Message, Entry)>,
    ) -> Result<(), Error> {
        for _ in 0..100 + self.random.below(3000) {
            if self.is_told() {
                break;
            }
            let messages = match self.random.below(5) {
                0 => consumer.try_recv()?.into_iter().collect(),
                _ => match consumer.recv_timeout(Duration::from_millis(5))? {
                    None => Vec::new(),
                    Some(first) => {
                        let mut all = vec![first];
                        if self.random.below(3) == 0
                            && let Some(next) = consumer.try_recv()?
                        {
                            all.push(next);
                        }
                        all
                    }
                },
            };
            for message in messages {
                let mut entry = match message.payload().is_empty() {
                    true => empty(&message),
                    false => taken(&message),
                };
                entry.deadline_ns = entry.at_ns + message.lease_remaining().as_nanos() as u64;
                self.tally.note(entry);
                held.push((message, entry));
            }
            // Answered at once, or in another order, and in runs.
            while held.len() > self.random.below(8) as usize {
                self.answer(held)?;
            }
            if self.random.below(30) == 0 {
                self.confirm(consumer)?;
            }
        }
        Ok(())
    }

    fn send_back(&mut self, entry: Entry) {
        let Entry { at_ns, .. } = Entry::new(Kind::SentBack);
        self.tally.note(Entry {
            kind: Kind::SentBack,
            at_ns,
            ..entry
        });
    }

    fn answer(&mut self, held: &mut Vec<(Message, Entry)>) -> Result<(), Error> {
        let which = self.random.below(held.len() as u64) as usize;
        let (message, entry) = held.swap_remove(which);
        match self.random.below(100) {
            0..3 => {
                self.send_back(entry);
                message.nack(Duration::from_millis(self.random.below(30)))
            }
            3..6 => {
                self.send_back(entry);
                message.release()
            }
            6..8 => {
                self.send_back(entry);
                drop(message);
                Ok(())
            }
            8..9 => {
                self.send_back(entry);
                message.reject()
            }
            9..12 => {
                let extended = message.extend(Duration::from_secs(2));
                held.push((message, entry));
                extended
            }
            12..20 => {
                let mut run = vec![(message, entry)];
                run.append(held);
                let (messages, entries): (Vec<_>, Vec<_>) = run.into_iter().unzip();
                Message::ack_batch(messages)?;
                entries.into_iter().for_each(|entry| self.acked(entry));
                Ok(())
            }
            _ => {
                message.ack()?;
                self.acked(entry);
                Ok(())
            }
        }
    }

    fn acked(&mut self, entry: Entry) {
        let Entry { at_ns, .. } = Entry::new(Kind::Acked);
        self.tally.note(Entry {
            kind: Kind::Acked,
            at_ns,
            ..entry
        });
    }

    fn confirm(&mut self, consumer: &Consumer) -> Result<(), Error> {
        let level = [Confirm::Stored, Confirm::Synced][self.random.below(2) as usize];
        match consumer.flush(level) {
            Ok(()) => self.tally.note(Entry::new(Kind::AcksConfirmed)),
            Err(Error::LeaseLost { count }) => self.tally.note(Entry {
                number: count,
                ..Entry::new(Kind::LeasesLost)
            }),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn churn(&mut self) -> Result<(), Error> {
        let client = Client::connect_to(self.socket)?;
        let name = format!("churn-{}", self.random.next());
        client.create_queue(&name, &QueueSettings::default())?;
        let producer = client.producer(&name)?;
        let mut consumer = client.consumer(&name)?;
        for len in [0, 100, 20_000, 200_000] {
            producer.send(vec![7; len])?;
        }
        let held = consumer.recv_timeout(PATIENCE)?;
        client.delete_queue(&name)?;
        // It is not there any more; what was shown stays whole.
        if let Some(held) = held {
            assert!(held.payload().iter().all(|&byte| byte == 7));
        }
        match producer.send("late").map(drop) {
            Ok(()) | Err(Error::NoSuchQueue(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// What a call can end with when the broker dies, stops or is drained.
fn is_of_the_brokers_end(error: &Error) -> bool {
    matches!(
        error,
        Error::NotRunning { .. }
            | Error::Io { .. }
            | Error::Closed(_)
            | Error::TimedOut
            | Error::StoreUnavailable(_)
            | Error::Full(_)
            // Of a queue whose deletion was committed, and its answer lost; or whose
            // making was.
            | Error::NoSuchQueue(_)
            | Error::QueueExists(_)
    )
}

fn send_loan(producer: &Producer, payload: &[u8]) -> Result<MessageId, Error> {
    let mut loan = producer.loan_timeout(payload.len() + 10, PATIENCE)?;
    loan[..payload.len()].copy_from_slice(payload);
    loan.truncate(payload.len());
    loan.send()
}

/// Who sent an empty message only its identity tells.
fn empty(message: &Message) -> Entry {
    let id = message.id();
    Entry {
        id: (id.session, id.position),
        redelivered: message.redelivered(),
        attempts: u64::from(message.attempts()),
        producer: u64::MAX,
        ..Entry::new(Kind::Taken)
    }
}
