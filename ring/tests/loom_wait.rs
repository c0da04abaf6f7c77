//! Waiting and waking under loom: the code of `wait.rs` and of the record ring,
//! in every order that the memory model allows.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p ringmain-ring --test 'loom_*'`
//!
//! The futex is modelled without its time-out, so that a lost wake-up is a
//! deadlock and fails the test; in production it would cost a second.
#![cfg(loom)]
#![allow(clippy::unwrap_used)]

mod model;

use loom::sync::{Arc, Notify};
use loom::thread;
use model::{Memory, value, write};
use ringmain_ring::record_ring::{Reader, Writer};
use ringmain_ring::wait::{SLEEP_MAX, WaitWord, broker, client};
use ringmain_ring::{AtomicU32, AtomicU64, Ordering};

/// A ring, and the wait word of the side that sleeps.
struct Shared {
    memory: Memory,
    word: AtomicU32,
}

impl Shared {
    fn new(bytes: usize) -> Arc<Shared> {
        Arc::new(Shared {
            memory: Memory::new(bytes, 0),
            word: AtomicU32::new(0),
        })
    }

    fn wait_word(&self) -> WaitWord<'_> {
        WaitWord(&self.word)
    }
}

/// Explores the orders in which a thread is interrupted at most so many times
/// where it could have gone on: all that the broken versions of `wait.rs` needed
/// to fail were three.
fn bounded(preemptions: usize) -> loom::model::Builder {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder
}

fn read_sleeping(shared: &Shared, reader: &mut Reader) -> u64 {
    let ring = shared.memory.ring();
    loop {
        if let Some(record) = reader.next(ring).unwrap() {
            return value(ring, &record);
        }
        let announced = shared.wait_word().announce(client::MESSAGES);
        if !reader.refresh(ring).unwrap() {
            shared.wait_word().sleep(announced, SLEEP_MAX);
        }
    }
}

/// I6, and the promise that nobody sleeps through a message. Caught when either
/// fence is missing. Two publishes: the second meets a reader that is up, going
/// to sleep, or asleep again.
#[test]
fn a_sleeping_reader_is_woken_by_every_publish_it_waits_for() {
    // Bounded by 3 preemptions; unbounded it takes minutes.
    bounded(3).check(|| {
        let shared = Shared::new(64);
        let publisher = thread::spawn({
            let shared = shared.clone();
            move || {
                let mut writer = Writer::new(0, 0);
                for n in 1..=2 {
                    write(&mut writer, shared.memory.ring(), n);
                    writer.publish(shared.memory.ring());
                    shared.wait_word().wake(client::MESSAGES);
                }
            }
        });
        let mut reader = Reader::new(0, 0);
        for n in 1..=2 {
            assert_eq!(read_sleeping(&shared, &mut reader), n);
        }
        publisher.join().unwrap();
    });
}

/// I6: the other direction, a writer that sleeps until there is room.
#[test]
fn a_writer_asleep_for_room_is_woken_when_room_is_freed() {
    loom::model(|| {
        // Holds one record.
        let shared = Shared::new(16);
        let writer = thread::spawn({
            let shared = shared.clone();
            move || {
                let mut writer = Writer::new(0, 0);
                let ring = shared.memory.ring();
                for n in 1..=2 {
                    while !writer.fits(ring, 8).unwrap() {
                        let announced = shared.wait_word().announce(client::ROOM);
                        if !writer.fits(ring, 8).unwrap() {
                            shared.wait_word().sleep(announced, SLEEP_MAX);
                        }
                    }
                    write(&mut writer, ring, n);
                    writer.publish(ring);
                }
            }
        });
        let mut reader = Reader::new(0, 0);
        for n in 1..=2 {
            let ring = shared.memory.ring();
            assert_eq!(model::read_spinning(&mut reader, ring), n);
            let position = reader.next_position();
            reader.free(ring, position);
            shared.wait_word().wake(client::ROOM);
        }
        writer.join().unwrap();
    });
}

/// I6: the broker sleeps in epoll on a doorbell. It arms, looks again, sleeps;
/// of the client's publishes the one that takes the announcement rings.
#[test]
fn a_sleeping_broker_hears_the_doorbell() {
    // Bounded by 3 preemptions. Unbounded it passes too, in a quarter of a minute.
    bounded(3).check(|| {
        let shared = Shared::new(64);
        let doorbell = Arc::new(Notify::new());
        let publisher = thread::spawn({
            let (shared, doorbell) = (shared.clone(), doorbell.clone());
            move || {
                let mut writer = Writer::new(0, 0);
                for n in 1..=2 {
                    write(&mut writer, shared.memory.ring(), n);
                    writer.publish(shared.memory.ring());
                    let seen = shared.wait_word().seen_after_publish();
                    if seen & broker::SUBMISSIONS != 0
                        && shared.wait_word().take(broker::SUBMISSIONS) != 0
                    {
                        doorbell.notify();
                    }
                }
            }
        });
        let mut reader = Reader::new(0, 0);
        let ring = shared.memory.ring();
        for n in 1..=2 {
            loop {
                if let Some(record) = reader.next(ring).unwrap() {
                    assert_eq!(value(ring, &record), n);
                    break;
                }
                shared.wait_word().announce(broker::SUBMISSIONS);
                if reader.refresh(ring).unwrap() {
                    shared.wait_word().withdraw(broker::SUBMISSIONS);
                } else {
                    doorbell.wait();
                }
            }
        }
        publisher.join().unwrap();
    });
}

/// Promise 2: of two publishers at one announcement, one calls the kernel.
#[test]
fn an_announcement_is_taken_once() {
    loom::model(|| {
        let word = Arc::new(AtomicU32::new(0));
        WaitWord(&word).announce(broker::SUBMISSIONS | broker::ROOM);
        let other = thread::spawn({
            let word = word.clone();
            move || WaitWord(&word).take(broker::SUBMISSIONS)
        });
        let mine = WaitWord(&word).take(broker::SUBMISSIONS);
        assert_eq!(mine + other.join().unwrap(), broker::SUBMISSIONS);
        assert_eq!(WaitWord(&word).peek(), broker::ROOM);
    });
}

/// Sleeps until the cursor has reached `position`.
fn sleep_until(word: WaitWord<'_>, cursor: &AtomicU64, position: u64) {
    while cursor.load(Ordering::Acquire) < position {
        let announced = word.announce(client::CONFIRMATION);
        if cursor.load(Ordering::Acquire) < position {
            word.sleep(announced, SLEEP_MAX);
        }
    }
}

/// I6: two threads of a client wait for confirmations of different positions.
/// The wake for the first may come while it is between its look and its sleep,
/// and the second has announced the same bit anew: caught when the word does
/// not count the wakes. The cursor goes on to 2 only after the first thread has
/// returned, as a client's next send may depend on the answer to its last.
#[test]
fn a_second_sleepers_announcement_does_not_hide_the_firsts_wake() {
    // Bounded by 3 preemptions; unbounded it takes minutes.
    bounded(3).check(|| {
        let word = Arc::new(AtomicU32::new(0));
        let stored = Arc::new(AtomicU64::new(0));
        let sleepers = [1, 2].map(|position| {
            let (word, stored) = (word.clone(), stored.clone());
            thread::spawn(move || sleep_until(WaitWord(&word), &stored, position))
        });
        let [first, second] = sleepers;
        stored.store(1, Ordering::Release);
        WaitWord(&word).wake(client::CONFIRMATION);
        first.join().unwrap();
        stored.store(2, Ordering::Release);
        WaitWord(&word).wake(client::CONFIRMATION);
        second.join().unwrap();
    });
}

/// I1, I5: the broker closes while the client publishes. A publish that saw no
/// `CLOSING` lies before the final position; the broker reads `tail` after it has
/// set the bit. Caught when the fence of `set` or of `seen_after_publish` is
/// missing.
#[test]
fn a_publish_that_saw_no_closing_is_before_the_final_position() {
    loom::model(|| {
        let shared = Shared::new(64);
        let publisher = thread::spawn({
            let shared = shared.clone();
            move || {
                let mut accepted = 0;
                let mut writer = Writer::new(0, 0);
                for n in 1..=2 {
                    write(&mut writer, shared.memory.ring(), n);
                    writer.publish(shared.memory.ring());
                    if shared.wait_word().seen_after_publish() & broker::CLOSING != 0 {
                        break;
                    }
                    accepted = writer.next_position();
                }
                accepted
            }
        });
        let ring = shared.memory.ring();
        shared.wait_word().set(broker::CLOSING);
        let final_position = ring.tail.load(Ordering::Acquire);
        let mut reader = Reader::new(0, 0);
        while reader.next_position() < final_position {
            let record = reader.next(ring).unwrap().expect("below the tail");
            value(ring, &record);
        }
        let accepted = publisher.join().unwrap();
        assert!(
            accepted <= final_position,
            "accepted up to {accepted}, final position {final_position}"
        );
    });
}
