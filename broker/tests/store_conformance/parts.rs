//! Payloads in parts, and what is known of dead letters.

use super::engines::*;
use ringmain::control::{DeadLetter, DeadReason};
use ringmain_broker::store::block::{BlockBuilder, MessageHead, PART_BYTES};
use ringmain_broker::store::parts::{Identity, part_count};
use ringmain_broker::store::{Store, StoreError, Write};

every_engine! {
    payload_in_parts_is_read_back
    payloads_in_parts_lie_between_others
    shortest_and_empty_payloads_may_lie_in_parts
    moved_message_keeps_its_parts
    message_may_move_out_of_a_queue_that_is_deleted
    copied_message_keeps_its_parts_until_both_are_settled
    settled_message_leaves_no_parts
    deleted_queue_leaves_no_parts
    message_in_parts_that_is_gone_at_once_leaves_no_parts
    parts_without_a_commit_are_gone_after_opening
    parts_of_a_later_round_outlast_the_rounds_before
    part_that_is_written_again_replaces_the_first
    parts_that_were_being_replaced_are_kept
    message_whose_parts_are_missing_is_refused
    impossible_parts_are_refused
    dead_letters_are_kept
}

const COUNT: usize = LARGE.div_ceil(PART_BYTES);

fn id(position: u64) -> Identity {
    identity(head(position))
}

/// Queues 1 and 2, with one message in parts at the front of queue 1.
fn one_in_parts(store: &dyn Store) {
    put_parts(store, id(0), LARGE);
    commit(
        store,
        vec![
            put(1, "a"),
            put(2, "b"),
            append_in_parts(1, 0, head(0), LARGE),
        ],
    );
}

/// The heads of a queue's messages in parts, all of them whole.
fn in_parts(store: &dyn Store, queue: u32) -> Vec<MessageHead> {
    let mut heads = Vec::new();
    for loaded in store.read(queue, 0, usize::MAX).unwrap() {
        if loaded.block.is_in_parts(0) {
            let (head, len) = (loaded.block.message(0), loaded.block.payload_len(0));
            assert_eq!((loaded.block.len(), loaded.block.payload(0)), (1, &b""[..]));
            assert_parts(store, identity(head), len);
            heads.push(head);
        }
    }
    heads
}

fn payload_in_parts_is_read_back(engine: &mut dyn Engine) {
    one_in_parts(engine.store());
    for _ in 0..3 {
        assert_eq!(in_parts(engine.store(), 1), [head(0)]);
        assert_eq!(cursor(engine.store(), 1), (0, 1, 1));
        let blocks = engine.store().read(1, 0, usize::MAX).unwrap();
        assert_eq!(blocks[0].block.payload_len(0), LARGE);
        engine.store().sync().unwrap();
        engine.reopen();
    }
    assert_eq!(engine.parts(), COUNT);
}

// I2
fn payloads_in_parts_lie_between_others(engine: &mut dyn Engine) {
    let store = engine.store();
    for position in [3, 4, 9] {
        put_parts(store, id(position), LARGE + position as usize);
    }
    let large = |position| append_in_parts(1, position, head(position), LARGE + position as usize);
    commit(
        store,
        vec![put(1, "a"), append(1, 0..3), large(3), large(4)],
    );
    commit(store, vec![append(1, 5..9), large(9)]);
    commit(store, vec![settle(1, [0, 4, 6])]);
    for _ in 0..2 {
        assert_eq!(in_parts(engine.store(), 1), [head(3), head(9)]);
        assert_eq!(cursor(engine.store(), 1), (1, 10, 7));
        engine.reopen();
    }
    assert_eq!(engine.parts(), 2 * COUNT);
    commit(engine.store(), vec![settle(1, (0..10).rev())]);
    assert_eq!(engine.parts(), 0);
}

fn shortest_and_empty_payloads_may_lie_in_parts(engine: &mut dyn Engine) {
    let lens = [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1];
    let mut writes = vec![put(1, "a")];
    for (&len, position) in lens.iter().zip(0..) {
        put_parts(engine.store(), id(position), len);
        writes.push(append_in_parts(1, position, head(position), len));
    }
    commit(engine.store(), writes);
    assert_eq!(in_parts(engine.store(), 1).len(), lens.len());
    assert_eq!(engine.parts(), 1 + 1 + 1 + 2);
    assert_eq!(in_parts(engine.store(), 1).len(), lens.len());
    commit(engine.store(), vec![settle(1, 0..5)]);
    assert_eq!(engine.parts(), 0);
}

// I1
fn moved_message_keeps_its_parts(engine: &mut dyn Engine) {
    one_in_parts(engine.store());
    // There, back, and there again; by handles that know the block and ones that
    // must read it; the append first, and last.
    for turn in 0..4 {
        let (from, to, at) = (1 + turn % 2, 2 - turn % 2, u64::from(turn) / 2);
        let next = u64::from(turn).div_ceil(2);
        let mut writes = vec![
            append_in_parts(to, next, head(0), LARGE),
            settle(from, [at]),
        ];
        if turn % 2 == 1 {
            writes.reverse();
        }
        commit(engine.store(), writes);
        assert!(in_parts(engine.store(), from).is_empty());
        assert_eq!(in_parts(engine.store(), to), [head(0)]);
        if turn >= 2 {
            assert_eq!(engine.parts(), COUNT);
        }
    }
    commit(engine.store(), vec![settle(1, [2])]);
    assert_no_part(engine.store(), id(0), 0);
    assert_eq!(engine.parts(), 0);
}

// I1
fn message_may_move_out_of_a_queue_that_is_deleted(engine: &mut dyn Engine) {
    one_in_parts(engine.store());
    let moved = append_in_parts(2, 0, head(0), LARGE);
    commit(
        engine.store(),
        vec![moved, settle(1, [0]), Write::DeleteQueue { queue: 1 }],
    );
    for _ in 0..2 {
        assert_eq!(in_parts(engine.store(), 2), [head(0)]);
        assert_eq!(engine.parts(), COUNT);
    }
    commit(engine.store(), vec![Write::DeleteQueue { queue: 2 }]);
    assert_eq!(engine.parts(), 0);
}

fn copied_message_keeps_its_parts_until_both_are_settled(engine: &mut dyn Engine) {
    one_in_parts(engine.store());
    commit(
        engine.store(),
        vec![append_in_parts(2, 0, head(0), LARGE), append(1, 1..5)],
    );
    assert_eq!(engine.parts(), COUNT);
    commit(engine.store(), vec![settle(2, [0])]);
    assert_eq!(in_parts(engine.store(), 1), [head(0)]);
    assert_eq!(engine.parts(), COUNT);
    commit(engine.store(), vec![Write::DeleteQueue { queue: 1 }]);
    assert_eq!(engine.parts(), 0);
}

// I7
fn settled_message_leaves_no_parts(engine: &mut dyn Engine) {
    for (reopened, position) in [(false, 0), (true, 1)] {
        put_parts(engine.store(), id(position), LARGE);
        let mut writes = vec![append_in_parts(1, position, head(position), LARGE)];
        if position == 0 {
            writes.insert(0, put(1, "a"));
        }
        commit(engine.store(), writes);
        if reopened {
            engine.reopen();
        }
        commit(engine.store(), vec![settle(1, [position])]);
        for part in 0..COUNT as u32 {
            assert_no_part(engine.store(), id(position), part);
        }
        assert_eq!(engine.parts(), 0);
    }
}

// I7
fn deleted_queue_leaves_no_parts(engine: &mut dyn Engine) {
    for reopened in [false, true] {
        let (a, b) = if reopened { (3, 4) } else { (1, 2) };
        let messages = [0, 1, 2].map(|number| head(number + 10 * u64::from(a)));
        for message in messages {
            put_parts(engine.store(), identity(message), LARGE);
        }
        let writes = vec![
            put(a, "a"),
            put(b, "b"),
            append_in_parts(a, 0, messages[0], LARGE),
            append_in_parts(a, 1, messages[1], LARGE),
            append_in_parts(b, 0, messages[2], LARGE),
        ];
        commit(engine.store(), writes);
        if reopened {
            engine.reopen();
        }
        let deleted = Write::DeleteQueue { queue: a };
        commit(engine.store(), vec![settle(a, [0]), deleted]);
        assert_eq!(in_parts(engine.store(), b), [messages[2]]);
        assert_eq!(engine.parts(), COUNT);
        commit(engine.store(), vec![Write::DeleteQueue { queue: b }]);
        assert_eq!(engine.parts(), 0);
    }
}

// I7
fn message_in_parts_that_is_gone_at_once_leaves_no_parts(engine: &mut dyn Engine) {
    commit(engine.store(), vec![put(1, "a"), put(2, "b")]);
    put_parts(engine.store(), id(0), LARGE);
    put_parts(engine.store(), id(1), LARGE);
    let writes = vec![
        append_in_parts(1, 0, head(0), LARGE),
        append_in_parts(2, 0, head(1), LARGE),
        settle(1, [0]),
        Write::DeleteQueue { queue: 2 },
    ];
    commit(engine.store(), writes);
    for position in [0, 1] {
        assert_no_part(engine.store(), id(position), 0);
    }
    assert_eq!(engine.parts(), 0);
}

// I7, I10
fn parts_without_a_commit_are_gone_after_opening(engine: &mut dyn Engine) {
    one_in_parts(engine.store());
    put_parts(engine.store(), id(5), LARGE);
    let first = part_bytes(id(6), LARGE, 0);
    engine.store().put_part(id(6), 0, &first).unwrap();
    engine.reopen();
    for position in [5, 6] {
        for part in 0..COUNT as u32 {
            assert_no_part(engine.store(), id(position), part);
        }
    }
    assert_eq!(in_parts(engine.store(), 1), [head(0)]);
    assert_eq!(engine.parts(), COUNT);
    // The same message again, as a successor writes it.
    put_parts(engine.store(), id(5), LARGE);
    commit(
        engine.store(),
        vec![append_in_parts(1, 1, head(5), LARGE), settle(1, [0])],
    );
    engine.reopen();
    assert_eq!(in_parts(engine.store(), 1), [head(5)]);
}

fn parts_of_a_later_round_outlast_the_rounds_before(engine: &mut dyn Engine) {
    one_in_parts(engine.store());
    put_parts(engine.store(), id(5), LARGE);
    commit(engine.store(), vec![settle(1, [0])]);
    commit(engine.store(), vec![put(3, "c")]);
    engine.store().sync().unwrap();
    commit(engine.store(), vec![append_in_parts(3, 0, head(5), LARGE)]);
    assert_eq!(in_parts(engine.store(), 3), [head(5)]);
    assert_eq!(engine.parts(), COUNT);
}

fn part_that_is_written_again_replaces_the_first(engine: &mut dyn Engine) {
    let store = engine.store();
    for part in 0..COUNT as u32 {
        store.put_part(id(0), part, &[9; 500]).unwrap();
    }
    one_in_parts(store);
    assert_eq!(in_parts(engine.store(), 1), [head(0)]);
    assert_eq!(engine.parts(), COUNT);
    assert_eq!(in_parts(engine.store(), 1), [head(0)]);
}

fn parts_that_were_being_replaced_are_kept(engine: &mut dyn Engine) {
    one_in_parts(engine.store());
    let last = part_bytes(id(0), LARGE, 2);
    engine.store().put_part(id(0), 2, &last).unwrap();
    engine.reopen();
    assert_eq!(in_parts(engine.store(), 1), [head(0)]);
    engine.store().put_part(id(0), 2, &last).unwrap();
    commit(
        engine.store(),
        vec![append_in_parts(2, 0, head(0), LARGE), settle(1, [0])],
    );
    assert_eq!(in_parts(engine.store(), 2), [head(0)]);
    assert_eq!(engine.parts(), COUNT);
    engine.store().put_part(id(0), 2, &last).unwrap();
    commit(engine.store(), vec![settle(2, [0])]);
    assert_eq!(engine.parts(), 0);
}

fn message_whose_parts_are_missing_is_refused(engine: &mut dyn Engine) {
    commit(engine.store(), vec![put(1, "a")]);
    let wrong: [&[(u32, usize)]; 5] = [
        &[],
        &[(0, PART_BYTES), (1, PART_BYTES)],
        &[(0, PART_BYTES), (2, 1000)],
        &[(0, PART_BYTES), (1, PART_BYTES), (2, 999)],
        &[(0, PART_BYTES), (1, PART_BYTES), (2, 1000), (3, 1)],
    ];
    for parts in wrong {
        for &(part, len) in parts {
            engine.store().put_part(id(0), part, &vec![1; len]).unwrap();
        }
        let appended = append_in_parts(1, 0, head(0), LARGE);
        let refused = try_commit(engine.store(), vec![appended]);
        assert!(matches!(refused, Err(StoreError::Failed(_))), "{parts:?}");
        assert!(engine.store().read_part(id(0), 0).is_err());
        engine.reopen();
        assert_eq!(cursor(engine.store(), 1), (0, 0, 0));
        assert_eq!(engine.parts(), 0);
    }
}

fn impossible_parts_are_refused(engine: &mut dyn Engine) {
    for (part, len) in [(1024, 1), (u32::MAX, 1), (0, PART_BYTES + 1), (0, 0)] {
        let refused = engine.store().put_part(id(0), part, &vec![1; len]);
        assert!(
            matches!(refused, Err(StoreError::Failed(_))),
            "{part} {len}"
        );
        assert!(engine.store().put_part(id(0), 0, b"x").is_err());
        engine.reopen();
    }
    assert_eq!(engine.parts(), 0);
}

fn dead_letters_are_kept(engine: &mut dyn Engine) {
    let letter = DeadLetter {
        reason: DeadReason::MaxAttempts,
        source: "quotes \" and ümlauts".to_owned(),
        died_at_ms: 1_700_000_000_123,
        attempts: 5,
    };
    let rejected = DeadLetter {
        reason: DeadReason::Rejected,
        ..letter.clone()
    };
    put_parts(engine.store(), id(2), LARGE);
    let mut builder = BlockBuilder::new();
    builder.push(head(0), &payload(0));
    builder.push_with(head(1), Some(&letter), 4, |room| {
        room.copy_from_slice(b"dead")
    });
    let mut large = BlockBuilder::new();
    large.push_in_parts(head(2), Some(&rejected), LARGE as u32);
    let writes = [(0, builder), (2, large)].map(|(first, builder)| Write::Append {
        queue: 1,
        first,
        block: builder.finish(),
    });
    commit(engine.store(), vec![put(1, "dead")]);
    commit(engine.store(), writes.to_vec());
    for _ in 0..2 {
        let blocks = engine.store().read(1, 0, usize::MAX).unwrap();
        assert_eq!(blocks[0].block.letter(0), None);
        assert_eq!(blocks[0].block.letter(1), Some(letter.clone()));
        assert_eq!(blocks[0].block.payload(1), b"dead");
        assert_eq!(blocks[1].block.letter(0), Some(rejected.clone()));
        assert_eq!(in_parts(engine.store(), 1), [head(2)]);
        engine.reopen();
    }
    assert_eq!(part_count(LARGE) as usize, engine.parts());
}
