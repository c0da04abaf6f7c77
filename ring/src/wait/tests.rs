//! What one thread can see of waiting. The rest is in `tests/loom_wait.rs` and
//! `tests/process_death.rs`.

use super::*;
use std::time::Instant;

const LONG: Duration = Duration::from_secs(20);

/// Fails by sleeping: a second for each call.
fn returns_at_once(word: WaitWord<'_>, announced: Announced) {
    let start = Instant::now();
    word.sleep(announced, LONG);
    assert!(start.elapsed() < SLEEP_MAX, "slept through a wake");
}

// I6.
#[test]
fn nobody_sleeps_whose_announcement_was_taken() {
    let word = AtomicU32::new(0);
    let word = WaitWord(&word);
    let announced = word.announce(client::MESSAGES | client::ANSWERS);
    word.wake(client::ANSWERS);
    assert_eq!(word.peek(), client::MESSAGES);
    returns_at_once(word, announced);
}

// I6: the wake came before the sleep, and another thread has announced the same
// bit since.
#[test]
fn nobody_sleeps_whose_announcement_was_taken_and_set_by_another() {
    let word = AtomicU32::new(0);
    let word = WaitWord(&word);
    let announced = word.announce(client::CONFIRMATION);
    word.wake(client::CONFIRMATION);
    word.announce(client::CONFIRMATION);
    returns_at_once(word, announced);
}

// I6: the other side may have died before its wake.
#[test]
fn no_sleep_is_longer_than_the_maximum() {
    let word = AtomicU32::new(0);
    let word = WaitWord(&word);
    let announced = word.announce(client::ROOM);
    let start = Instant::now();
    word.sleep(announced, LONG);
    assert!(start.elapsed() < 10 * SLEEP_MAX);
    assert_eq!(word.peek(), client::ROOM, "nobody took it");
}

#[test]
fn the_count_of_wakes_overflows_into_nothing() {
    let word = AtomicU32::new(!BITS);
    let word = WaitWord(&word);
    let announced = word.announce(client::ROOM);
    assert_eq!(word.take(client::ROOM), client::ROOM);
    assert_eq!(word.0.load(Ordering::Relaxed), 0);
    returns_at_once(word, announced);
}

// The states of a session lie beside what the broker waits for, and stay.
#[test]
fn taking_an_announcement_leaves_the_other_bits() {
    let word = AtomicU32::new(0);
    let word = WaitWord(&word);
    word.set(broker::CLOSING);
    word.announce(broker::SUBMISSIONS | broker::ROOM);
    assert_eq!(word.take(broker::SUBMISSIONS), broker::SUBMISSIONS);
    assert_eq!(word.take(broker::SUBMISSIONS), 0);
    assert_eq!(word.seen_after_publish(), broker::CLOSING | broker::ROOM);
    word.withdraw(broker::ROOM);
    assert_eq!(word.peek(), broker::CLOSING);
}
