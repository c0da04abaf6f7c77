//! What every store engine must do, run over all of them: the in-memory model,
//! and RocksDB.
#![allow(clippy::unwrap_used)]

#[path = "store_conformance/compared.rs"]
mod compared;
#[path = "store_conformance/engines.rs"]
mod engines;
#[path = "store_conformance/model_faults.rs"]
mod model_faults;
#[path = "store_conformance/rocks_only.rs"]
mod rocks_only;

use engines::*;
use ringmain::QueueSettings;
use ringmain_broker::store::block::{BlockBuilder, MessageHead};
use ringmain_broker::store::{Batch, QueueRow, StoreError, Write};

/// One test for each engine.
macro_rules! every_engine {
    ($($name:ident)*) => {
        mod model {
            $(#[test] fn $name() {
                super::$name(&mut super::Model::new());
            })*
        }
        mod rocks {
            $(#[test] fn $name() {
                super::$name(&mut super::Rocks::new());
            })*
        }
    };
}

#[path = "store_conformance/parts.rs"]
mod parts;

every_engine! {
    new_store_is_empty
    appended_messages_are_read_in_order
    settled_messages_are_not_read_again
    positions_may_be_settled_in_any_order_and_twice
    wholly_settled_blocks_are_not_returned
    message_appended_and_settled_in_one_round_is_never_read
    changes_of_one_batch_build_on_each_other
    attempts_are_read_with_the_message
    read_begins_with_the_block_that_holds_the_position
    read_returns_as_much_as_asked_for_and_at_least_a_block
    read_jumps_over_settled_blocks
    first_is_the_first_unsettled_message
    positions_go_on_after_a_queue_was_drained
    large_messages_are_kept
    queues_do_not_see_each_other
    queue_rows_change_and_keep_their_messages
    deleted_queue_is_gone_and_its_number_stays_unused
    queue_of_the_same_name_starts_empty
    queue_created_and_deleted_in_one_round_leaves_nothing
    changes_to_a_queue_that_is_gone_are_left_out
    session_numbers_are_never_unreserved
    committed_rounds_survive_reopening
    sync_returns_the_last_committed_round
    refused_batch_leaves_nothing_and_ends_the_handle
    impossible_changes_are_refused
}

fn attempts(position: u64, attempts: u16) -> Write {
    Write::Attempts {
        queue: 1,
        position,
        attempts,
    }
}

fn new_store_is_empty(engine: &mut dyn Engine) {
    for _ in 0..2 {
        let store = engine.store();
        assert_eq!(store.committed_round(), 0);
        assert_eq!(store.sync().unwrap(), 0);
        assert_eq!(store.queues().unwrap(), []);
        assert_eq!((store.next_queue(), store.next_session()), (1, 1));
        assert!(store.read(1, 0, 100).unwrap().is_empty());
        assert!(store.room().unwrap() > 0);
        engine.reopen();
    }
}

// I2
fn appended_messages_are_read_in_order(engine: &mut dyn Engine) {
    commit(engine.store(), vec![put(1, "a"), append(1, 0..10)]);
    commit(engine.store(), vec![append(1, 10..11), append(1, 11..30)]);
    for _ in 0..2 {
        assert_eq!(read_all(engine.store(), 1), Vec::from_iter(0..30));
        assert_eq!(cursor(engine.store(), 1), (0, 30, 30));
        engine.reopen();
    }
}

fn settled_messages_are_not_read_again(engine: &mut dyn Engine) {
    commit(engine.store(), vec![put(1, "a"), append(1, 0..100)]);
    commit(engine.store(), vec![settle(1, [0, 1, 50, 98, 99])]);
    for _ in 0..2 {
        let left = Vec::from_iter((2..50).chain(51..98));
        assert_eq!(read_all(engine.store(), 1), left);
        assert_eq!(cursor(engine.store(), 1), (2, 100, 95));
        engine.reopen();
    }
}

fn positions_may_be_settled_in_any_order_and_twice(engine: &mut dyn Engine) {
    let blocks = (0..10).map(|block| append(1, block * 10..block * 10 + 10));
    commit(
        engine.store(),
        [put(1, "a")].into_iter().chain(blocks).collect(),
    );
    let settled = vec![settle(1, [95, 3, 44, 3, 12, 0, 95]), settle(1, [44, 7])];
    commit(engine.store(), settled);
    engine.reopen();
    commit(engine.store(), vec![settle(1, (0..90).rev())]);
    assert_eq!(
        read_all(engine.store(), 1),
        [90, 91, 92, 93, 94, 96, 97, 98, 99]
    );
    assert_eq!(cursor(engine.store(), 1), (90, 100, 9));
    // Below the first, in a deleted block, and in a live one.
    commit(engine.store(), vec![settle(1, [95, 20, 0, 99])]);
    assert_eq!(cursor(engine.store(), 1), (90, 100, 8));
}

fn wholly_settled_blocks_are_not_returned(engine: &mut dyn Engine) {
    commit(
        engine.store(),
        vec![
            put(1, "a"),
            append(1, 0..5),
            append(1, 5..9),
            append(1, 9..12),
        ],
    );
    commit(engine.store(), vec![settle(1, [5, 6])]);
    commit(engine.store(), vec![settle(1, [8, 7])]);
    for _ in 0..2 {
        let blocks = engine.store().read(1, 0, usize::MAX).unwrap();
        assert_eq!(
            blocks.iter().map(|block| block.first).collect::<Vec<_>>(),
            [0, 9]
        );
        assert_eq!(cursor(engine.store(), 1), (0, 12, 8));
        engine.reopen();
    }
    commit(engine.store(), vec![settle(1, 0..5)]);
    assert_eq!(cursor(engine.store(), 1), (9, 12, 3));
    commit(engine.store(), vec![settle(1, 9..12)]);
    for _ in 0..2 {
        assert!(engine.store().read(1, 0, usize::MAX).unwrap().is_empty());
        assert_eq!(cursor(engine.store(), 1), (12, 12, 0));
        engine.reopen();
    }
}

fn message_appended_and_settled_in_one_round_is_never_read(engine: &mut dyn Engine) {
    let settled = settle(1, [0, 1, 2, 3, 6]);
    commit(
        engine.store(),
        vec![put(1, "a"), append(1, 0..4), append(1, 4..8), settled],
    );
    for _ in 0..2 {
        assert_eq!(read_all(engine.store(), 1), [4, 5, 7]);
        assert_eq!(cursor(engine.store(), 1), (4, 8, 3));
        engine.reopen();
    }
}

fn changes_of_one_batch_build_on_each_other(engine: &mut dyn Engine) {
    let writes = vec![
        put(1, "a"),
        put(1, "b"),
        append(1, 0..4),
        attempts(2, 1),
        attempts(2, 2),
        settle(1, [0]),
        append(1, 4..6),
        settle(1, [1, 5]),
        put(1, "c"),
    ];
    commit(engine.store(), writes);
    for _ in 0..2 {
        assert_eq!(engine.store().queues().unwrap()[0].row, row("c"));
        let blocks = engine.store().read(1, 0, usize::MAX).unwrap();
        assert_eq!(unsettled(&blocks), [2, 3, 4]);
        assert_eq!(blocks[0].attempts(2), 2);
        engine.reopen();
    }
}

fn attempts_are_read_with_the_message(engine: &mut dyn Engine) {
    let mut builder = BlockBuilder::new();
    for attempts in 0..200 {
        let position = u64::from(attempts);
        builder.push(
            MessageHead {
                attempts,
                ..head(position)
            },
            b"x",
        );
    }
    let append = Write::Append {
        queue: 1,
        first: 0,
        block: builder.finish(),
    };
    commit(engine.store(), vec![put(1, "a"), append]);
    commit(
        engine.store(),
        vec![attempts(150, 9), attempts(3, 7), attempts(199, u16::MAX)],
    );
    engine.reopen();
    commit(
        engine.store(),
        vec![
            attempts(3, 8),
            settle(1, [4]),
            attempts(4, 1),
            attempts(0, 1),
        ],
    );
    for _ in 0..2 {
        let blocks = engine.store().read(1, 0, 1).unwrap();
        let found = [0, 1, 3, 149, 150, 199].map(|index| blocks[0].attempts(index));
        assert_eq!(found, [1, 1, 8, 149, 9, u16::MAX]);
        assert!(blocks[0].is_settled(4) && !blocks[0].is_settled(3));
        engine.reopen();
    }
}

fn read_begins_with_the_block_that_holds_the_position(engine: &mut dyn Engine) {
    commit(
        engine.store(),
        vec![put(1, "a"), append(1, 0..10), append(1, 10..20)],
    );
    let first_of = |from| {
        let blocks = engine.store().read(1, from, 1).unwrap();
        blocks.first().map(|block| block.first)
    };
    assert_eq!([first_of(0), first_of(9)], [Some(0); 2]);
    assert_eq!([first_of(10), first_of(19)], [Some(10); 2]);
    assert_eq!([first_of(20), first_of(u64::MAX)], [None; 2]);
}

fn read_returns_as_much_as_asked_for_and_at_least_a_block(engine: &mut dyn Engine) {
    let blocks = (0..10).map(|position| append(1, position..position + 1));
    commit(
        engine.store(),
        [put(1, "a")].into_iter().chain(blocks).collect(),
    );
    let count = |bytes_max| engine.store().read(1, 2, bytes_max).unwrap().len();
    let bytes = payload(2).len();
    assert_eq!([count(0), count(1), count(bytes)], [1; 3]);
    assert_eq!(
        [count(2 * bytes - 1), count(2 * bytes), count(2 * bytes + 1)],
        [1, 2, 2]
    );
    assert_eq!(count(usize::MAX), 8);
}

fn read_jumps_over_settled_blocks(engine: &mut dyn Engine) {
    let blocks = (0..50).map(|block| append(1, block * 4..block * 4 + 4));
    commit(
        engine.store(),
        [put(1, "a")].into_iter().chain(blocks).collect(),
    );
    // One in the first block, one in the middle, and the last block.
    let left = [1, 101, 196, 197, 198, 199];
    commit(
        engine.store(),
        vec![settle(
            1,
            (0..200).filter(|position| !left.contains(position)),
        )],
    );
    for _ in 0..2 {
        assert_eq!(read_all(engine.store(), 1), left);
        assert_eq!(
            read_from(engine.store(), 1, 2),
            left,
            "from within the first block"
        );
        assert_eq!(read_from(engine.store(), 1, 4), left[1..]);
        assert_eq!(read_from(engine.store(), 1, 104), left[2..]);
        assert_eq!(cursor(engine.store(), 1), (1, 200, 6));
        engine.reopen();
    }
    commit(engine.store(), vec![settle(1, [1])]);
    assert_eq!(cursor(engine.store(), 1), (101, 200, 5));
    engine.reopen();
    commit(engine.store(), vec![settle(1, [101, 60])]);
    assert_eq!(cursor(engine.store(), 1), (196, 200, 4));
}

fn first_is_the_first_unsettled_message(engine: &mut dyn Engine) {
    commit(
        engine.store(),
        vec![put(1, "a"), append(1, 0..300), append(1, 300..310)],
    );
    commit(engine.store(), vec![settle(1, [1, 2])]);
    assert_eq!(cursor(engine.store(), 1).0, 0);
    commit(engine.store(), vec![settle(1, [0])]);
    assert_eq!(cursor(engine.store(), 1).0, 3);
    engine.reopen();
    commit(engine.store(), vec![settle(1, 4..302)]);
    assert_eq!(cursor(engine.store(), 1).0, 3);
    engine.reopen();
    commit(engine.store(), vec![settle(1, [3])]);
    assert_eq!(cursor(engine.store(), 1), (302, 310, 8));
}

fn positions_go_on_after_a_queue_was_drained(engine: &mut dyn Engine) {
    commit(engine.store(), vec![put(1, "a")]);
    for first in (0..500).step_by(5) {
        commit(engine.store(), vec![append(1, first..first + 5)]);
        if first % 50 == 0 {
            engine.reopen();
        }
        commit(engine.store(), vec![settle(1, first..first + 5)]);
        assert_eq!(cursor(engine.store(), 1), (first + 5, first + 5, 0));
        assert!(read_all(engine.store(), 1).is_empty());
    }
}

fn large_messages_are_kept(engine: &mut dyn Engine) {
    let large = |position: u64| vec![position as u8; 5 << 20];
    let mut writes = vec![put(1, "a")];
    for first in 0..3 {
        let mut builder = BlockBuilder::new();
        builder.push(head(first), &large(first));
        let block = builder.finish();
        writes.push(Write::Append {
            queue: 1,
            first,
            block,
        });
    }
    commit(engine.store(), writes);
    commit(engine.store(), vec![settle(1, [1])]);
    for _ in 0..3 {
        let blocks = engine.store().read(1, 0, usize::MAX).unwrap();
        assert_eq!(blocks.len(), 2);
        assert!(blocks[0].block.payload(0) == large(0));
        assert!(blocks[1].block.payload(0) == large(2));
        engine.reopen();
    }
    commit(engine.store(), vec![settle(1, [0, 2])]);
    assert!(engine.store().read(1, 0, 1).unwrap().is_empty());
}

fn queues_do_not_see_each_other(engine: &mut dyn Engine) {
    const COUNT: u32 = 300;
    let mut writes = Vec::new();
    for queue in 1..=COUNT {
        writes.push(put(queue, &format!("queue {queue}")));
        writes.push(append(queue, 0..u64::from(queue % 7) + 1));
    }
    commit(engine.store(), writes);
    commit(
        engine.store(),
        (1..=COUNT)
            .step_by(2)
            .map(|queue| settle(queue, [0]))
            .collect(),
    );
    for _ in 0..2 {
        assert_eq!(engine.store().queues().unwrap().len(), COUNT as usize);
        assert_eq!(engine.store().next_queue(), COUNT + 1);
        for queue in 1..=COUNT {
            let (settled, len) = (u64::from(queue % 2), u64::from(queue % 7) + 1);
            assert_eq!(cursor(engine.store(), queue), (settled, len, len - settled));
            assert_eq!(
                read_all(engine.store(), queue),
                Vec::from_iter(settled..len)
            );
        }
        engine.reopen();
    }
}

fn queue_rows_change_and_keep_their_messages(engine: &mut dyn Engine) {
    commit(
        engine.store(),
        vec![put(1, "a"), append(1, 0..5), settle(1, [0])],
    );
    let row = QueueRow {
        name: "quotes \" and ümlauts".to_owned(),
        settings: QueueSettings {
            visibility_timeout_ms: 777,
            ..QueueSettings::default()
        },
        created_ms: 5,
    };
    commit(
        engine.store(),
        vec![Write::PutQueue {
            queue: 1,
            row: row.clone(),
        }],
    );
    for _ in 0..2 {
        assert_eq!(engine.store().queues().unwrap()[0].row, row);
        assert_eq!(cursor(engine.store(), 1), (1, 5, 4));
        assert_eq!(engine.store().next_queue(), 2);
        engine.reopen();
    }
}

fn deleted_queue_is_gone_and_its_number_stays_unused(engine: &mut dyn Engine) {
    let writes = vec![
        put(1, "a"),
        put(2, "b"),
        append(1, 0..5),
        append(2, 0..5),
        settle(2, [1]),
    ];
    commit(engine.store(), writes);
    commit(engine.store(), vec![Write::DeleteQueue { queue: 2 }]);
    for _ in 0..2 {
        let queues = engine.store().queues().unwrap();
        assert_eq!(
            queues.iter().map(|queue| queue.queue).collect::<Vec<_>>(),
            [1]
        );
        assert!(engine.store().read(2, 0, 100).unwrap().is_empty());
        assert_eq!(read_all(engine.store(), 1).len(), 5);
        assert_eq!(engine.store().next_queue(), 3);
        engine.reopen();
    }
    assert!(try_commit(engine.store(), vec![put(2, "b")]).is_err());
}

fn queue_of_the_same_name_starts_empty(engine: &mut dyn Engine) {
    commit(engine.store(), vec![put(1, "a"), append(1, 0..5)]);
    commit(engine.store(), vec![settle(1, [0])]);
    commit(
        engine.store(),
        vec![Write::DeleteQueue { queue: 1 }, put(2, "a")],
    );
    for _ in 0..2 {
        let queues = engine.store().queues().unwrap();
        assert_eq!((queues.len(), queues[0].queue), (1, 2));
        assert_eq!(cursor(engine.store(), 2), (0, 0, 0));
        assert!(read_all(engine.store(), 2).is_empty());
        engine.reopen();
    }
    commit(engine.store(), vec![append(2, 0..1)]);
    assert_eq!(read_all(engine.store(), 2), [0]);
}

fn queue_created_and_deleted_in_one_round_leaves_nothing(engine: &mut dyn Engine) {
    let deleted = Write::DeleteQueue { queue: 1 };
    commit(
        engine.store(),
        vec![put(1, "a"), append(1, 0..5), settle(1, [2]), deleted],
    );
    for _ in 0..2 {
        assert_eq!(engine.store().queues().unwrap(), []);
        assert!(engine.store().read(1, 0, 100).unwrap().is_empty());
        assert_eq!(engine.store().next_queue(), 2);
        engine.reopen();
    }
}

fn changes_to_a_queue_that_is_gone_are_left_out(engine: &mut dyn Engine) {
    commit(engine.store(), vec![put(1, "a"), append(1, 0..5)]);
    let deleted = || Write::DeleteQueue { queue: 1 };
    commit(
        engine.store(),
        vec![deleted(), settle(1, [0]), attempts(1, 3), deleted()],
    );
    commit(
        engine.store(),
        vec![
            settle(1, [0, 9]),
            attempts(1, 3),
            deleted(),
            settle(70, [1]),
        ],
    );
    assert_eq!(engine.store().queues().unwrap(), []);
}

fn session_numbers_are_never_unreserved(engine: &mut dyn Engine) {
    for (below, expected) in [(100, 100), (50, 100), (101, 101)] {
        commit(engine.store(), vec![Write::ReserveSessions { below }]);
        assert_eq!(engine.store().next_session(), expected);
        engine.reopen();
        assert_eq!(engine.store().next_session(), expected);
    }
}

// I10
fn committed_rounds_survive_reopening(engine: &mut dyn Engine) {
    commit(engine.store(), vec![put(1, "a")]);
    let writes = vec![append(1, 0..5)];
    engine.store().commit(Batch { round: 70, writes }).unwrap();
    engine.reopen();
    assert_eq!(engine.store().committed_round(), 70);
    // A round with nothing in it counts as well.
    let writes = Vec::new();
    engine.store().commit(Batch { round: 71, writes }).unwrap();
    engine.reopen();
    assert_eq!(engine.store().committed_round(), 71);
    assert_eq!(read_all(engine.store(), 1).len(), 5);
}

// I5
fn sync_returns_the_last_committed_round(engine: &mut dyn Engine) {
    commit(engine.store(), vec![put(1, "a")]);
    assert_eq!(engine.store().sync().unwrap(), 1);
    assert_eq!(engine.store().sync().unwrap(), 1);
    let writes = vec![append(1, 0..5)];
    engine.store().commit(Batch { round: 9, writes }).unwrap();
    assert_eq!(engine.store().sync().unwrap(), 9);
    engine.reopen();
    assert_eq!(engine.store().sync().unwrap(), 9);
}

fn refused_batch_leaves_nothing_and_ends_the_handle(engine: &mut dyn Engine) {
    commit(engine.store(), vec![put(1, "a"), append(1, 0..5)]);
    let refused = try_commit(
        engine.store(),
        vec![settle(1, [0]), put(2, "b"), append(1, 6..7)],
    );
    assert!(matches!(refused, Err(StoreError::Failed(_))));
    let store = engine.store();
    assert!(try_commit(store, Vec::new()).is_err());
    assert!(store.sync().is_err());
    assert!(store.room().is_err());
    assert!(store.queues().is_err());
    assert!(store.read(1, 0, 1).is_err());

    engine.reopen();
    assert_eq!(engine.store().committed_round(), 1);
    assert_eq!(read_all(engine.store(), 1).len(), 5);
    assert_eq!(engine.store().next_queue(), 2);
    commit(engine.store(), vec![append(1, 5..6)]);
}

fn impossible_changes_are_refused(engine: &mut dyn Engine) {
    commit(
        engine.store(),
        vec![put(1, "a"), put(2, "b"), append(1, 0..5)],
    );
    commit(engine.store(), vec![Write::DeleteQueue { queue: 2 }]);
    let impossible = [
        append(1, 4..5),
        append(1, 6..7),
        append(2, 0..1),
        append(3, 0..1),
        settle(1, [5]),
        attempts(5, 1),
        put(2, "b"),
    ];
    for write in impossible {
        let what = format!("{write:?}");
        let refused = try_commit(engine.store(), vec![write]);
        assert!(matches!(refused, Err(StoreError::Failed(_))), "{what}");
        engine.reopen();
    }
    let round = engine.store().committed_round();
    let writes = Vec::new();
    assert!(engine.store().commit(Batch { round, writes }).is_err());
}
