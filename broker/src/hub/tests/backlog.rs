//! A backlog that memory does not hold.

use super::bench::{Bench, LEASE_NS};
use crate::hub::{Close, SessionSlot};
use crate::store::Store;

/// A queue that keeps no more than about three stored messages in memory.
fn small() -> (Bench, SessionSlot) {
    let mut bench = Bench::with_cache(400);
    bench.create("jobs");
    let producer = bench.producer("jobs");
    (bench, producer)
}

fn send(bench: &mut Bench, producer: SessionSlot, numbers: std::ops::Range<u32>) {
    for number in numbers {
        bench.send(producer, &number.to_string());
    }
}

fn numbers(range: std::ops::Range<u32>) -> Vec<String> {
    range.map(|number| number.to_string()).collect()
}

/// Takes and acks everything there is.
fn drain(bench: &mut Bench, consumer: SessionSlot) -> Vec<String> {
    let mut texts = Vec::new();
    loop {
        let got = bench.got(consumer);
        if got.is_empty() {
            return texts;
        }
        for got in got {
            bench.ack(consumer, &got);
            texts.push(got.text);
        }
    }
}

/// I7, I2
#[test]
fn what_memory_does_not_hold_is_read_back_in_order() {
    let (mut bench, producer) = small();
    for round in 0..4 {
        send(&mut bench, producer, round * 5..round * 5 + 5);
        bench.round(Close::All);
    }
    send(&mut bench, producer, 20..23);
    assert!(bench.hub.cached_bytes() <= 400);
    assert!(
        bench.hub.messages_in_memory() <= 6,
        "three in memory, three not stored"
    );
    assert_eq!(bench.hub.totals().1, 23);
    let consumer = bench.consumer("jobs", 4);
    assert_eq!(drain(&mut bench, consumer), numbers(0..23));
    bench.check_empty();
}

/// The consumer must not depend on an event of its own to be served.
#[test]
fn a_waiting_consumer_gets_what_spilled_while_it_waited() {
    let (mut bench, producer) = small();
    let consumer = bench.consumer("jobs", 100);
    send(&mut bench, producer, 0..10);
    bench.close(Close::All);
    let first = bench.texts(consumer);
    assert!(first.len() < 10, "the rest has fallen out of memory");
    let blocks = bench.commit();
    bench.finish(&blocks);
    let mut all = first;
    all.extend(bench.texts(consumer));
    assert_eq!(all, numbers(0..10));
}

#[test]
fn consumers_that_come_in_the_middle_of_a_round_disturb_no_order() {
    let (mut bench, producer) = small();
    send(&mut bench, producer, 0..8);
    bench.close(Close::All);
    send(&mut bench, producer, 8..12);
    let consumer = bench.consumer("jobs", 3);
    let held = bench.got(consumer);
    let blocks = bench.commit();
    bench.finish(&blocks);
    bench.close(Close::All);
    let blocks = bench.commit();
    // The read runs before the round is finished, and finds all of it.
    bench.dispatch();
    bench.read_all(usize::MAX);
    bench.finish(&blocks);
    let mut all = Vec::new();
    for got in held {
        bench.ack(consumer, &got);
        all.push(got.text);
    }
    all.extend(drain(&mut bench, consumer));
    assert_eq!(all, numbers(0..12));
    bench.check_empty();
}

#[test]
fn a_nacked_message_whose_payload_is_away_is_read_before_newer_ones_go() {
    let (mut bench, producer) = small();
    send(&mut bench, producer, 0..2);
    bench.round(Close::All);
    let consumer = bench.consumer("jobs", 1);
    let got = bench.got(consumer);
    assert_eq!(got[0].text, "0");
    bench.nack(consumer, &got[0], 0, true);
    bench.dispatch();
    assert!(!bench.port.delivered.contains_key(&consumer), "it waits");
    bench.read_all(usize::MAX);
    bench.dispatch();
    let again = bench.port.delivered.remove(&consumer).unwrap();
    assert_eq!(again[0].text, "0");
    bench.ack(consumer, &again[0]);
    assert_eq!(bench.texts(consumer), ["1"]);
}

#[test]
fn a_read_that_was_under_way_while_marks_were_committed_brings_nothing_back() {
    let (mut bench, producer) = small();
    send(&mut bench, producer, 0..8);
    bench.round(Close::All);
    let consumer = bench.consumer("jobs", 100);
    bench.dispatch();
    let &(queue, from) = bench.port.reads.first().unwrap();
    let early = bench.store.read(queue, from, usize::MAX).unwrap();
    for got in bench.port.delivered.remove(&consumer).unwrap() {
        bench.ack(consumer, &got);
    }
    bench.round(Close::All);
    bench.port.reads.clear();
    bench.hub.loaded(queue, from, &early);
    assert_eq!(drain(&mut bench, consumer).len(), bench_left(&early));
    bench.check_empty();
}

/// Messages in the blocks that lie behind what was in memory.
fn bench_left(blocks: &[crate::store::LoadedBlock]) -> usize {
    // Two fit in memory: the third would make it more than 400 bytes.
    blocks
        .iter()
        .map(|block| block.block.len() as usize)
        .sum::<usize>()
        - 3
}

/// A read that found nothing knows nothing of what was committed since.
#[test]
fn a_read_that_found_nothing_does_not_pass_what_was_stored_meanwhile() {
    let (mut bench, producer) = small();
    send(&mut bench, producer, 0..6);
    bench.round(Close::All);
    let consumer = bench.consumer("jobs", 100);
    // All of it is leased, and then a successor knows it by its leases alone.
    let got = bench.got(consumer);
    assert_eq!(got.len(), 6);
    let slots = bench.restart();
    let (producer, consumer) = (slots[&producer], slots[&consumer]);
    for got in &got {
        bench.ack(consumer, got);
    }
    bench.round(Close::All);
    bench.dispatch();
    let (queue, from) = bench.port.reads.remove(0);
    let nothing = bench.store.read(queue, from, usize::MAX).unwrap();
    assert!(nothing.is_empty());
    send(&mut bench, producer, 6..12);
    bench.round(Close::All);
    bench.hub.loaded(queue, from, &nothing);
    assert_eq!(drain(&mut bench, consumer), numbers(6..12));
    bench.check_empty();
}

/// I1: returned messages of the backlog, whoever holds them when.
#[test]
fn leases_of_the_backlog_that_run_out_come_back() {
    let (mut bench, producer) = small();
    send(&mut bench, producer, 0..9);
    bench.round(Close::All);
    let consumer = bench.consumer("jobs", 5);
    let got = bench.got(consumer);
    bench.take(consumer, &got);
    bench.wait(LEASE_NS);
    bench.end(consumer);
    bench.round(Close::All);
    let consumer = bench.consumer("jobs", 100);
    let mut texts = drain(&mut bench, consumer);
    texts.sort();
    assert_eq!(texts, numbers(0..9));
    bench.check_empty();
}
