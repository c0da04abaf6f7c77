//! The operations in which the victim dies.

use super::page::{Page, Trap};
use ringmain::{Client, Confirm, Consumer, ConsumerOptions, Message, MessageId, Producer};
use std::mem::forget;
use std::path::Path;
use std::time::Duration;

/// The queue of the victim and of the survivors.
pub const QUEUE: &str = "jobs";
/// As every session has it without a wish.
const SUBMISSION_RING_BYTES: u64 = 128 * 1024;
const DELIVERY_RING_BYTES: u64 = 64 * 1024;
const SHORT: usize = 64;
/// Too long for a record.
const LARGE: usize = 20 * 1024;
/// The same, loaned: only its ends are written, in few steps.
const LOANED: usize = 20_000;
/// A long record.
const LONG: usize = 14 * 1024;
/// How many messages an operation on several has.
const SEVERAL: u64 = 5;

/// What the broker does while the victim dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Broker {
    /// Sleeps, until the victim wakes it.
    Asleep,
    /// Is busy with others.
    Awake,
    /// Was killed before the operation, and is started again when the victim
    /// waits for it, or is dead.
    Dead,
    /// Does not run until the victim waits for it, or is dead.
    Stopped,
    /// Was killed and started again before the operation.
    Restarted,
}

use Broker::{Asleep, Awake, Dead, Restarted, Stopped};

/// An operation. Forgets all handles, so that nothing else happens at its end.
pub type Operation = Box<dyn FnOnce()>;

pub struct Case {
    pub name: &'static str,
    pub broker: Broker,
    /// When the victim waits, it is sent a message.
    pub send_when_waiting: bool,
    prepare: fn(&Stage<'_>) -> Operation,
}

impl Case {
    pub fn awake(&self) -> bool {
        self.broker == Awake
    }

    /// In the victim's process: the operation, ready to be run.
    pub fn prepare(&self, stage: &Stage<'_>) -> Operation {
        (self.prepare)(stage)
    }
}

const fn case(name: &'static str, broker: Broker, prepare: fn(&Stage<'_>) -> Operation) -> Case {
    Case {
        name,
        broker,
        send_when_waiting: false,
        prepare,
    }
}

/// All operations, in the states that change their way.
pub const CASES: &[Case] = &[
    case("send, broker asleep", Asleep, send),
    case("send, broker awake", Awake, send),
    case("send, broker dead", Dead, send),
    case("send, ring wrapping", Asleep, send_wrapping),
    case("send, ring nearly full", Stopped, send_nearly_full),
    case("send, ring full", Stopped, send_full),
    case("send, stored, broker asleep", Asleep, send_stored),
    case("send batch, broker asleep", Asleep, send_batch),
    case("send batch, broker dead", Dead, send_batch),
    case("send batch, ring wrapping", Asleep, send_batch_wrapping),
    case("send batch, ring full", Stopped, send_batch_full),
    case("loan and send, broker asleep", Asleep, loan_and_send),
    case("loan and send, broker awake", Awake, loan_and_send),
    case("loan and send, broker dead", Dead, loan_and_send),
    case("loan unsent", Asleep, loan_unsent),
    case("large send, copied", Asleep, large_send),
    case("first payload segment", Asleep, first_segment),
    case("first payload segment, broker dead", Dead, first_segment),
    case("another payload segment", Asleep, another_segment),
    case("receive, broker asleep", Asleep, receive),
    case("receive, broker awake", Awake, receive),
    case("receive, broker dead", Dead, receive),
    case("receive, ring wrapping", Asleep, receive_wrapping),
    case("receive, ring full", Asleep, receive_full),
    case("receive, nothing there", Asleep, receive_nothing),
    Case {
        send_when_waiting: true,
        ..case("receive, asleep and woken", Asleep, receive_waiting)
    },
    case("receive in place", Asleep, receive_in_place),
    case(
        "receive a stored large payload",
        Asleep,
        receive_stored_large,
    ),
    case("batch receive, broker asleep", Asleep, receive_batch),
    case("batch receive, broker dead", Dead, receive_batch),
    case("ack, broker asleep", Asleep, ack),
    case("ack, broker awake", Awake, ack),
    case("ack, broker dead", Dead, ack),
    case("ack, ring wrapping", Asleep, ack_wrapping),
    case("ack of a large payload", Asleep, ack_in_place),
    case("ack batch", Asleep, ack_batch),
    case("ack batch, broker dead", Dead, ack_batch),
    case("nack, broker asleep", Asleep, nack),
    case("nack, broker dead", Dead, nack),
    case("nack of a large payload", Asleep, nack_in_place),
    case("drop, broker asleep", Asleep, drop_message),
    case("drop, broker dead", Dead, drop_message),
    case("drop of a large payload", Asleep, drop_in_place),
    case("extend", Asleep, extend),
    case("flush stored", Asleep, flush_stored),
    case("flush synced", Asleep, flush_synced),
    case("flush stored, broker dead", Dead, flush_stored),
    case("flush of acks", Asleep, flush_acks),
    case("connect", Asleep, connect),
    case("connect, broker dead", Dead, connect),
    case("attach a producer", Asleep, attach_producer),
    case("attach a consumer", Asleep, attach_consumer),
    case("attach a consumer, broker awake", Awake, attach_consumer),
    case("attach a consumer, broker dead", Dead, attach_consumer),
    case("detach a producer", Asleep, detach_producer),
    case("detach a producer, broker dead", Dead, detach_producer),
    case("detach a consumer", Asleep, detach_consumer),
    case("detach a consumer, broker dead", Dead, detach_consumer),
    case("resume a producer", Restarted, resume_producer),
    case("resume a consumer", Restarted, resume_consumer),
    case("resume with large payloads", Restarted, resume_large),
];

/// What the victim has to prepare with.
pub struct Stage<'a> {
    pub socket: &'a Path,
    pub page: &'a Page,
}

impl Stage<'_> {
    fn client(&self) -> Client {
        Client::connect_to(self.socket).unwrap()
    }

    fn producer(&self) -> Producer {
        self.client().producer(QUEUE).unwrap()
    }

    fn consumer(&self) -> Consumer {
        self.client().consumer(QUEUE).unwrap()
    }

    /// Sends a message, which is accepted before the operation.
    fn sent(&self, producer: &Producer, number: u64, len: usize) -> MessageId {
        let id = producer.send(payload(number, len)).unwrap();
        self.page.accepted.push(number);
        id
    }

    /// A survivor sends these; returns when they are accepted.
    fn asked(&self, numbers: impl IntoIterator<Item = u64>, len: usize) {
        for number in numbers {
            self.page
                .number
                .store(number, std::sync::atomic::Ordering::Relaxed);
            self.page
                .len
                .store(len, std::sync::atomic::Ordering::Relaxed);
            self.page.trap(Trap::Send);
        }
    }

    /// Short messages, from a survivor, in the victim's delivery ring.
    fn delivered(&self, count: u64) -> Consumer {
        self.asked(1..=count, SHORT);
        self.consumer()
    }

    /// The same, taken.
    fn taken(&self, count: u64) -> (Consumer, Vec<Message>) {
        let mut consumer = self.delivered(count);
        let messages = (0..count).map(|_| consumer.recv().unwrap()).collect();
        (consumer, messages)
    }

    /// One large message, which is in the memory of its sender.
    fn taken_in_place(&self) -> (Consumer, Message) {
        let mut consumer = self.consumer();
        self.asked([1], LARGE);
        let message = consumer.recv().unwrap();
        (consumer, message)
    }

    fn operation_sends(&self, numbers: impl IntoIterator<Item = u64>) {
        numbers.into_iter().for_each(|n| self.page.sends.push(n));
    }

    fn operation_acks(&self, numbers: impl IntoIterator<Item = u64>) {
        numbers.into_iter().for_each(|n| self.page.acks.push(n));
    }

    /// Brings the broker into the state of the case now, instead of at the
    /// beginning of the operation.
    fn broker_now(&self) {
        self.page.trap(Trap::Broker);
    }
}

/// The payload of a message.
pub fn payload(number: u64, len: usize) -> Vec<u8> {
    let mut payload = vec![number as u8; len];
    payload[..8].copy_from_slice(&number.to_ne_bytes());
    payload
}

/// The number of the message, if the payload is whole.
pub fn number_of(bytes: &[u8]) -> Option<u64> {
    let number = u64::from_ne_bytes(bytes.first_chunk().copied()?);
    let whole = match bytes.len() {
        LOANED => bytes.last_chunk() == Some(&number.to_ne_bytes()),
        len => bytes == payload(number, len),
    };
    whole.then_some(number)
}

fn several(len: usize) -> Vec<Vec<u8>> {
    (1..=SEVERAL).map(|number| payload(number, len)).collect()
}

fn send(stage: &Stage<'_>) -> Operation {
    let producer = stage.producer();
    // Before the operation everything is warm, as in a program at work.
    stage.sent(&producer, 100, SHORT);
    producer.flush(Confirm::Stored).unwrap();
    send_with(stage, producer, SHORT)
}

fn send_with(stage: &Stage<'_>, producer: Producer, len: usize) -> Operation {
    stage.operation_sends([1]);
    let payload = payload(1, len);
    Box::new(move || {
        producer.send(&payload).unwrap();
        forget((producer, payload));
    })
}

/// A producer whose next record of up to 1 KiB does not fit before the ring's end.
fn near_the_end(stage: &Stage<'_>) -> Producer {
    let producer = stage.producer();
    let mut number = 100;
    loop {
        let len = match number {
            ..109 => LONG,
            _ => 400,
        };
        let id = stage.sent(&producer, number, len);
        // Where the next record begins, about.
        if id.position + len as u64 + 600 > SUBMISSION_RING_BYTES {
            producer.flush(Confirm::Stored).unwrap();
            return producer;
        }
        number += 1;
    }
}

fn send_wrapping(stage: &Stage<'_>) -> Operation {
    let producer = near_the_end(stage);
    send_with(stage, producer, 1024)
}

/// A producer whose ring has no room for another `len` bytes.
fn full_of(stage: &Stage<'_>, len: usize) -> Producer {
    let producer = stage.producer();
    stage.broker_now();
    let mut number = 100;
    for len in [LONG, len] {
        while producer.try_send(payload(number, len)).is_ok() {
            stage.page.accepted.push(number);
            number += 1;
        }
    }
    producer
}

fn send_nearly_full(stage: &Stage<'_>) -> Operation {
    let producer = full_of(stage, 600);
    send_with(stage, producer, 8)
}

fn send_full(stage: &Stage<'_>) -> Operation {
    let producer = full_of(stage, SHORT);
    send_with(stage, producer, SHORT)
}

fn send_stored(stage: &Stage<'_>) -> Operation {
    let options = ringmain::ProducerOptions::new().confirm(Confirm::Stored);
    let producer = stage.client().producer_with(QUEUE, options).unwrap();
    stage.sent(&producer, 100, SHORT);
    send_with(stage, producer, SHORT)
}

fn send_batch_with(stage: &Stage<'_>, producer: Producer, len: usize) -> Operation {
    stage.operation_sends(1..=SEVERAL);
    let payloads = several(len);
    Box::new(move || {
        forget(producer.send_batch(&payloads).unwrap());
        forget((producer, payloads));
    })
}

fn send_batch(stage: &Stage<'_>) -> Operation {
    let producer = stage.producer();
    send_batch_with(stage, producer, SHORT)
}

fn send_batch_wrapping(stage: &Stage<'_>) -> Operation {
    let producer = near_the_end(stage);
    send_batch_with(stage, producer, 200)
}

fn send_batch_full(stage: &Stage<'_>) -> Operation {
    // Room for some of them.
    let producer = full_of(stage, 300);
    send_batch_with(stage, producer, SHORT)
}

fn loan_with(stage: &Stage<'_>, producer: Producer) -> Operation {
    stage.operation_sends([1]);
    Box::new(move || {
        // Without a broker, and without memory, there is an error.
        if let Ok(mut loan) = producer.loan(LOANED) {
            loan[..8].copy_from_slice(&1u64.to_ne_bytes());
            loan[LOANED - 8..].copy_from_slice(&1u64.to_ne_bytes());
            loan.send().unwrap();
        }
        forget(producer);
    })
}

/// A producer that has a payload segment.
fn with_segment(stage: &Stage<'_>) -> Producer {
    let producer = stage.producer();
    stage.sent(&producer, 100, LARGE);
    producer.flush(Confirm::Stored).unwrap();
    producer
}

fn loan_and_send(stage: &Stage<'_>) -> Operation {
    let producer = with_segment(stage);
    loan_with(stage, producer)
}

fn loan_unsent(stage: &Stage<'_>) -> Operation {
    let producer = with_segment(stage);
    Box::new(move || {
        drop(producer.loan(LARGE).unwrap());
        forget(producer);
    })
}

fn large_send(stage: &Stage<'_>) -> Operation {
    let producer = with_segment(stage);
    send_with(stage, producer, LARGE)
}

fn first_segment(stage: &Stage<'_>) -> Operation {
    let producer = stage.producer();
    loan_with(stage, producer)
}

fn another_segment(stage: &Stage<'_>) -> Operation {
    let producer = with_segment(stage);
    // As much as the first one has, so that it is not enough.
    forget(producer.loan(600 * 1024).unwrap());
    Box::new(move || {
        forget(producer.loan(4 << 20).unwrap());
        forget(producer);
    })
}

fn receive_with(mut consumer: Consumer) -> Operation {
    Box::new(move || {
        forget(consumer.recv().unwrap());
        forget(consumer);
    })
}

fn receive(stage: &Stage<'_>) -> Operation {
    receive_with(filled(stage.delivered(2)))
}

/// The consumer, when something is in its ring.
fn filled(mut consumer: Consumer) -> Consumer {
    // Taken and sent back: it comes again at once, and is waited for.
    let message = consumer.recv().unwrap();
    message.release().unwrap();
    consumer.flush(Confirm::Stored).unwrap();
    consumer
}

fn receive_wrapping(stage: &Stage<'_>) -> Operation {
    let mut consumer = stage.consumer();
    let mut left = DELIVERY_RING_BYTES;
    while left > 600 {
        let len = if left > LONG as u64 + 600 { LONG } else { 400 };
        stage.asked([7], len);
        consumer.recv().unwrap().ack().unwrap();
        stage.page.accepted.remove(7);
        // With its head, about.
        left -= len as u64 + 64;
    }
    consumer.flush(Confirm::Stored).unwrap();
    stage.asked([1], 1024);
    stage.asked([2], SHORT);
    receive_with(consumer)
}

/// The first one gives room for the next.
fn receive_full(stage: &Stage<'_>) -> Operation {
    stage.asked(1..=6, LONG);
    receive_with(stage.consumer())
}

fn receive_nothing(stage: &Stage<'_>) -> Operation {
    let mut consumer = stage.consumer();
    Box::new(move || {
        assert!(consumer.try_recv().unwrap().is_none());
        forget(consumer);
    })
}

fn receive_waiting(stage: &Stage<'_>) -> Operation {
    receive_with(stage.consumer())
}

fn receive_in_place(stage: &Stage<'_>) -> Operation {
    let consumer = stage.consumer();
    stage.asked([1], LARGE);
    receive_with(consumer)
}

fn receive_stored_large(stage: &Stage<'_>) -> Operation {
    // It is stored before there is a consumer: so it is copied out.
    stage.asked([1], LARGE);
    receive_with(stage.consumer())
}

fn receive_batch(stage: &Stage<'_>) -> Operation {
    let mut consumer = filled(stage.delivered(SEVERAL));
    Box::new(move || {
        forget(consumer.recv_batch(SEVERAL as usize).unwrap());
        forget(consumer);
    })
}

fn ack(stage: &Stage<'_>) -> Operation {
    let (consumer, messages) = stage.taken(2);
    ack_first(stage, consumer, messages)
}

fn ack_first(stage: &Stage<'_>, consumer: Consumer, mut messages: Vec<Message>) -> Operation {
    stage.operation_acks([1]);
    let first = messages.remove(0);
    Box::new(move || {
        first.ack().unwrap();
        forget((consumer, messages));
    })
}

fn ack_wrapping(stage: &Stage<'_>) -> Operation {
    let (consumer, messages) = stage.taken(2);
    // Each of these is a record. The last of them is at the ring's end, about.
    for _ in 0..SUBMISSION_RING_BYTES / 40 - 1 {
        messages[1].extend(Duration::from_secs(60)).unwrap();
    }
    consumer.flush(Confirm::Stored).unwrap();
    ack_first(stage, consumer, messages)
}

fn ack_in_place(stage: &Stage<'_>) -> Operation {
    let (consumer, message) = stage.taken_in_place();
    ack_first(stage, consumer, vec![message])
}

fn ack_batch(stage: &Stage<'_>) -> Operation {
    let (consumer, messages) = stage.taken(SEVERAL);
    stage.operation_acks(1..=SEVERAL);
    Box::new(move || {
        Message::ack_batch(messages).unwrap();
        forget(consumer);
    })
}

fn nack(stage: &Stage<'_>) -> Operation {
    let (consumer, mut messages) = stage.taken(2);
    let first = messages.remove(0);
    Box::new(move || {
        first.nack(Duration::ZERO).unwrap();
        forget((consumer, messages));
    })
}

fn nack_in_place(stage: &Stage<'_>) -> Operation {
    let (consumer, message) = stage.taken_in_place();
    Box::new(move || {
        message.nack(Duration::ZERO).unwrap();
        forget(consumer);
    })
}

fn drop_message(stage: &Stage<'_>) -> Operation {
    let (consumer, mut messages) = stage.taken(2);
    let first = messages.remove(0);
    Box::new(move || {
        drop(first);
        forget((consumer, messages));
    })
}

fn drop_in_place(stage: &Stage<'_>) -> Operation {
    let (consumer, message) = stage.taken_in_place();
    Box::new(move || {
        drop(message);
        forget(consumer);
    })
}

fn extend(stage: &Stage<'_>) -> Operation {
    let (consumer, messages) = stage.taken(1);
    Box::new(move || {
        messages[0].extend(Duration::from_secs(60)).unwrap();
        forget((consumer, messages));
    })
}

fn flush_with(stage: &Stage<'_>, level: Confirm) -> Operation {
    let producer = stage.producer();
    stage.sent(&producer, 100, SHORT);
    Box::new(move || {
        producer.flush(level).unwrap();
        forget(producer);
    })
}

fn flush_stored(stage: &Stage<'_>) -> Operation {
    flush_with(stage, Confirm::Stored)
}

fn flush_synced(stage: &Stage<'_>) -> Operation {
    flush_with(stage, Confirm::Synced)
}

fn flush_acks(stage: &Stage<'_>) -> Operation {
    let (consumer, mut messages) = stage.taken(2);
    messages.remove(0).ack().unwrap();
    stage.page.accepted.remove(1);
    Box::new(move || {
        consumer.flush(Confirm::Stored).unwrap();
        forget((consumer, messages));
    })
}

fn connect(stage: &Stage<'_>) -> Operation {
    let socket = stage.socket.to_owned();
    Box::new(move || {
        // Without a broker, an error.
        forget(Client::connect_to(&socket));
        forget(socket);
    })
}

fn attach_producer(stage: &Stage<'_>) -> Operation {
    let client = stage.client();
    Box::new(move || {
        forget(client.producer(QUEUE).unwrap());
        forget(client);
    })
}

fn attach_consumer(stage: &Stage<'_>) -> Operation {
    stage.asked([1, 2, 3], SHORT);
    let client = stage.client();
    Box::new(move || {
        // Without a broker, an error.
        forget(client.consumer_with(QUEUE, ConsumerOptions::new().window(2)));
        forget(client);
    })
}

fn detach_producer(stage: &Stage<'_>) -> Operation {
    let client = stage.client();
    let producer = client.producer(QUEUE).unwrap();
    stage.sent(&producer, 100, SHORT);
    producer.flush(Confirm::Stored).unwrap();
    stage.sent(&producer, 101, SHORT);
    Box::new(move || {
        drop(producer);
        drop(client);
    })
}

fn detach_consumer(stage: &Stage<'_>) -> Operation {
    let mut consumer = stage.delivered(3);
    let message = consumer.recv().unwrap();
    Box::new(move || {
        drop(consumer);
        forget(message);
    })
}

fn resume_producer(stage: &Stage<'_>) -> Operation {
    let producer = stage.producer();
    stage.sent(&producer, 100, SHORT);
    stage.operation_sends([1]);
    let payload = payload(1, SHORT);
    Box::new(move || {
        producer.send(&payload).unwrap();
        producer.flush(Confirm::Stored).unwrap();
        forget((producer, payload));
    })
}

fn resume_consumer(stage: &Stage<'_>) -> Operation {
    let (mut consumer, mut messages) = stage.taken(2);
    stage.asked([3], SHORT);
    stage.operation_acks([1]);
    let first = messages.remove(0);
    Box::new(move || {
        first.ack().unwrap();
        consumer.flush(Confirm::Stored).unwrap();
        forget(consumer.recv().unwrap());
        forget((consumer, messages));
    })
}

fn resume_large(stage: &Stage<'_>) -> Operation {
    let producer = stage.producer();
    stage.sent(&producer, 100, SHORT);
    loan_with(stage, producer)
}
