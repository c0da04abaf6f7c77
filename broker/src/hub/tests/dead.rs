//! Messages that are moved to a dead-letter queue, and back.

use super::bench::{Bench, Got, WALL_MS};
use crate::hub::{Close, SessionSlot};
use crate::store::Store;
use ringmain::Error;
use ringmain::control::{DeadLetter, DeadReason};

/// What the store holds unsettled in a queue: text and letter.
fn held(bench: &Bench, name: &str) -> Vec<(String, Option<DeadLetter>)> {
    let queues = bench.store.queues().unwrap();
    let Some(queue) = queues.iter().find(|queue| queue.row.name == name) else {
        return Vec::new();
    };
    let mut held = Vec::new();
    for loaded in bench.store.read(queue.queue, 0, usize::MAX).unwrap() {
        let unsettled = (0..loaded.block.len()).filter(|&at| !loaded.is_settled(at));
        held.extend(unsettled.map(|at| {
            let text = String::from_utf8(loaded.block.payload(at).to_vec()).unwrap();
            (text, loaded.block.letter(at))
        }));
    }
    held
}

fn texts(bench: &Bench, name: &str) -> Vec<String> {
    held(bench, name)
        .into_iter()
        .map(|(text, _)| text)
        .collect()
}

/// Rounds and reads until nothing more happens.
fn settle_down(bench: &mut Bench) {
    loop {
        bench.pump();
        if bench.round(Close::All).is_none() && bench.port.reads.is_empty() {
            return;
        }
    }
}

/// A queue whose messages may be attempted so often, a producer and a consumer.
fn setup(max_attempts: u16) -> (Bench, SessionSlot, SessionSlot) {
    let mut bench = Bench::new();
    bench.create_with("jobs", max_attempts);
    let producer = bench.producer("jobs");
    let consumer = bench.consumer("jobs", 10);
    (bench, producer, consumer)
}

/// Has the consumer fail all that it holds.
fn fail(bench: &mut Bench, consumer: SessionSlot) -> Vec<Got> {
    let got = bench.got(consumer);
    for one in &got {
        bench.nack(consumer, one, 0, true);
    }
    got
}

/// Sends these, has them attempted once too often, and moved.
fn bury(bench: &mut Bench, producer: SessionSlot, consumer: SessionSlot, dead: &[&str]) {
    for text in dead {
        bench.send(producer, text);
    }
    while !fail(bench, consumer).is_empty() {}
    settle_down(bench);
    assert_eq!(texts(bench, "jobs"), [""; 0]);
}

/// I1
#[test]
fn after_the_last_attempt_a_message_lies_in_the_dead_letter_queue_with_its_story() {
    let (mut bench, producer, consumer) = setup(2);
    bench.send(producer, "a");
    bench.round(Close::All);
    assert_eq!(fail(&mut bench, consumer)[0].attempts, 0);
    assert_eq!(fail(&mut bench, consumer)[0].attempts, 1);
    settle_down(&mut bench);
    assert_eq!(texts(&bench, "jobs"), [""; 0]);
    let letter = DeadLetter {
        reason: DeadReason::MaxAttempts,
        source: "jobs".to_owned(),
        died_at_ms: WALL_MS,
        attempts: 2,
    };
    assert_eq!(held(&bench, "jobs.dead"), [("a".to_owned(), Some(letter))]);
    assert_eq!(bench.hub.queue_info("jobs").unwrap().messages, 0);
    assert_eq!(bench.hub.queue_info("jobs.dead").unwrap().messages, 1);
    assert_eq!(bench.hub.counters().dead, 1);

    let reader = bench.consumer("jobs.dead", 1);
    let got = bench.got(reader);
    assert_eq!((got[0].text.as_str(), got[0].attempts), ("a", 0));
    assert!(got[0].redelivered);
    bench.ack(reader, &got[0]);
    bench.check_empty();
}

#[test]
fn a_lease_that_was_not_taken_is_no_attempt() {
    let (mut bench, producer, consumer) = setup(1);
    bench.send(producer, "a");
    for _ in 0..3 {
        let got = bench.got(consumer);
        bench.nack(consumer, &got[0], 0, false);
    }
    settle_down(&mut bench);
    assert_eq!(texts(&bench, "jobs"), ["a"]);
}

/// I1: whether its send is stored, being written, or not even that.
#[test]
fn a_rejected_message_is_dead_wherever_its_send_is() {
    for stage in 0..3 {
        let (mut bench, producer, consumer) = setup(0);
        bench.send(producer, "a");
        bench.send(producer, "b");
        let got = bench.got(consumer);
        let blocks = (stage > 0).then(|| {
            assert!(bench.close(Close::All));
            bench.commit()
        });
        if stage == 2 {
            bench.finish(blocks.as_ref().unwrap());
        }
        bench.reject(consumer, &got[0]);
        if stage == 1 {
            bench.finish(&blocks.unwrap());
        }
        settle_down(&mut bench);
        let dead = held(&bench, "jobs.dead");
        assert_eq!(dead.len(), 1, "stage {stage}");
        let letter = dead[0].1.as_ref().unwrap();
        assert_eq!((letter.reason, letter.attempts), (DeadReason::Rejected, 1));
        assert_eq!(texts(&bench, "jobs"), ["b"], "stage {stage}");
    }
}

/// A message may die with its last consumer.
#[test]
fn messages_are_moved_though_nobody_consumes_the_queue() {
    let (mut bench, producer, consumer) = setup(1);
    for text in ["a", "b", "c"] {
        bench.send(producer, text);
    }
    bench.round(Close::All);
    let got = bench.got(consumer);
    bench.take(consumer, &got[1..]);
    bench.end(consumer);
    settle_down(&mut bench);
    assert_eq!(texts(&bench, "jobs"), ["a"]);
    assert_eq!(texts(&bench, "jobs.dead"), ["b", "c"], "in order");
}

/// I10: the broker dies at each step of a move, and the message is in one queue.
#[test]
fn a_move_is_whole_or_not_at_all_whenever_the_broker_dies() {
    for steps in 0..12 {
        let (mut bench, producer, consumer) = setup(1);
        bench.send(producer, "a");
        bench.send(producer, "b");
        bench.round(Close::All);
        let got = bench.got(consumer);
        bench.nack(consumer, &got[0], 0, true);
        let mut blocks = None;
        for step in 0..steps {
            match step % 4 {
                0 => bench.pump(),
                1 => {
                    if bench.close(Close::All) {
                        blocks = Some(Vec::new());
                    }
                }
                2 => blocks = blocks.map(|_| bench.commit()),
                _ => {
                    if let Some(blocks) = blocks.take() {
                        bench.finish(&blocks);
                    }
                }
            }
        }
        bench.restart();
        settle_down(&mut bench);
        assert_eq!(texts(&bench, "jobs"), ["b"], "after {steps} steps");
        assert_eq!(texts(&bench, "jobs.dead"), ["a"], "after {steps} steps");
        assert_eq!(bench.hub.queue_info("jobs.dead").unwrap().messages, 1);
        assert_eq!(bench.hub.queue_info("jobs").unwrap().messages, 1);
    }
}

/// I2, I3: what was moved comes between what was stored before and after it.
#[test]
fn moved_messages_have_their_place_among_those_of_the_target() {
    let (mut bench, producer, consumer) = setup(1);
    bench.create("jobs.dead");
    let direct = bench.producer("jobs.dead");
    bench.send(direct, "1");
    bench.round(Close::All);
    bench.send(producer, "a");
    bench.round(Close::All);
    fail(&mut bench, consumer);
    bench.pump();
    // Taken in before the move, stored after it.
    bench.send(direct, "2");
    assert!(bench.close(Close::Due { linger_ns: 1_000 }));
    bench.send(direct, "3");
    let blocks = bench.commit();
    bench.finish(&blocks);
    bench.round(Close::All);
    bench.send(direct, "4");
    let reader = bench.consumer("jobs.dead", 10);
    let got = bench.texts(reader);
    assert_eq!(got, ["1", "a", "2", "3", "4"]);
    bench.round(Close::All);
    assert_eq!(bench.texts(reader), [""; 0]);
}

#[test]
fn on_a_full_disk_the_dead_wait() {
    let (mut bench, producer, consumer) = setup(1);
    bench.send(producer, "a");
    bench.round(Close::All);
    fail(&mut bench, consumer);
    bench.pump();
    assert!(bench.hub.unsettled_bytes() > 0, "the disk is looked at");
    while bench.round(Close::SettledOnly).is_some() {}
    assert_eq!(texts(&bench, "jobs"), ["a"]);
    settle_down(&mut bench);
    assert_eq!(texts(&bench, "jobs.dead"), ["a"]);
}

#[test]
fn a_queue_that_is_deleted_takes_its_dying_along() {
    let (mut bench, producer, consumer) = setup(1);
    bench.send(producer, "a");
    bench.round(Close::All);
    fail(&mut bench, consumer);
    bench.pump();
    assert!(bench.hub.delete_queue("jobs", 5).is_none());
    settle_down(&mut bench);
    let left = texts(&bench, "jobs.dead");
    assert!(left.len() <= 1, "{left:?}");
    assert!(bench.hub.queue_info("jobs").is_err());
    assert_eq!(bench.hub.messages_in_memory(), 0);
}

fn redriven(bench: &mut Bench) -> Result<u64, Error> {
    settle_down(bench);
    let mut ended = bench.hub.take_redriven();
    assert_eq!(ended.len(), 1, "it has ended");
    assert_eq!(ended[0].0, 9);
    ended.remove(0).1
}

/// I1, I2
#[test]
fn a_redrive_sends_messages_back_in_order_to_begin_anew() {
    let (mut bench, producer, consumer) = setup(2);
    bury(&mut bench, producer, consumer, &["a", "b", "c"]);
    assert!(bench.hub.redrive("jobs.dead", None, 2, 9).is_none());
    assert_eq!(redriven(&mut bench).unwrap(), 2);
    assert_eq!(texts(&bench, "jobs.dead"), ["c"]);
    let got = bench.got(consumer);
    let texts: Vec<_> = got.iter().map(|got| got.text.as_str()).collect();
    assert_eq!(texts, ["a", "b"]);
    assert_eq!(got[0].attempts, 0);
    for one in &got {
        bench.ack(consumer, one);
    }
    assert!(bench.hub.redrive("jobs.dead", None, 100, 9).is_none());
    assert_eq!(redriven(&mut bench).unwrap(), 1);
    let got = bench.got(consumer);
    bench.ack(consumer, &got[0]);
    bench.check_empty();
}

#[test]
fn a_redrive_can_go_elsewhere_and_ends_where_nothing_is() {
    let (mut bench, producer, consumer) = setup(1);
    bury(&mut bench, producer, consumer, &["a", "b"]);
    bench.create("other");
    let to = Some("other");
    assert!(bench.hub.redrive("jobs.dead", to, 100, 9).is_none());
    assert!(matches!(
        bench.hub.redrive("jobs.dead", to, 100, 10),
        Some(Error::Invalid(_))
    ));
    assert_eq!(redriven(&mut bench).unwrap(), 2);
    assert_eq!(texts(&bench, "other"), ["a", "b"]);
    assert!(
        held(&bench, "other")
            .iter()
            .all(|(_, letter)| letter.is_none())
    );
    assert!(bench.hub.redrive("jobs.dead", to, 100, 9).is_none());
    assert_eq!(redriven(&mut bench).unwrap(), 0);
    for (queue, to) in [("none", None), ("jobs.dead", Some("none"))] {
        let refused = bench.hub.redrive(queue, to, 1, 9);
        assert!(matches!(refused, Some(Error::NoSuchQueue(name)) if name == "none"));
    }
    let itself = bench.hub.redrive("other", Some("other"), 1, 9);
    assert!(matches!(itself, Some(Error::Invalid(_))));
}

/// I1: what can't go back stays.
#[test]
fn a_redrive_stops_at_a_message_that_has_nowhere_to_go() {
    let (mut bench, producer, consumer) = setup(1);
    bury(&mut bench, producer, consumer, &["a"]);
    let direct = bench.producer("jobs.dead");
    bench.send(direct, "b");
    bench.round(Close::All);
    assert!(bench.hub.redrive("jobs.dead", None, 100, 9).is_none());
    assert!(matches!(redriven(&mut bench), Err(Error::Invalid(_))));
    assert_eq!(texts(&bench, "jobs"), ["a"]);
    assert_eq!(texts(&bench, "jobs.dead"), ["b"]);
    bench.end(consumer);
    assert!(bench.hub.delete_queue("jobs.dead", 5).is_none());
    settle_down(&mut bench);
    assert_eq!(bench.hub.totals().1, 1);
}

/// I1, I10: a redrive that the broker's death cuts off has lost nothing.
#[test]
fn a_redrive_that_is_cut_off_leaves_each_message_in_one_queue() {
    let (mut bench, producer, consumer) = setup(1);
    bury(&mut bench, producer, consumer, &["a", "b"]);
    assert!(bench.hub.redrive("jobs.dead", None, 1, 9).is_none());
    bench.pump();
    assert!(bench.close(Close::All));
    bench.commit();
    bench.restart();
    settle_down(&mut bench);
    assert_eq!(texts(&bench, "jobs"), ["a"]);
    assert_eq!(texts(&bench, "jobs.dead"), ["b"]);
}
