//! Random rounds, applied to both engines, must leave both the same.

use super::engines::*;
use proptest::prelude::*;
use ringmain_broker::store::block::BlockBuilder;
use ringmain_broker::store::{Batch, LoadedBlock, Store, Write};

/// A change whose queue and positions are chosen when it is made, from what
/// there is.
#[derive(Debug, Clone)]
enum Step {
    Append {
        queue: usize,
        lens: Vec<usize>,
    },
    SettleRun {
        queue: usize,
        from: usize,
        len: usize,
        step: usize,
    },
    SettleAnywhere {
        queue: usize,
        picks: Vec<usize>,
    },
    Attempts {
        queue: usize,
        pick: usize,
        attempts: u16,
    },
    Create,
    Delete {
        queue: usize,
    },
    Reserve {
        more: u64,
    },
}

/// One round, and what is done after it.
#[derive(Debug, Clone)]
struct Turn {
    steps: Vec<Step>,
    rounds: u64,
    sync: bool,
    reopen: bool,
    read_from: usize,
    bytes_max: usize,
}

fn step() -> impl Strategy<Value = Step> {
    let queue = any::<usize>();
    let lens = prop::collection::vec(0usize..400, 1..150);
    let picks = prop::collection::vec(any::<usize>(), 0..20);
    prop_oneof![
        6 => (queue, lens).prop_map(|(queue, lens)| Step::Append { queue, lens }),
        6 => (queue, any::<usize>(), 1usize..300, 1usize..4)
            .prop_map(|(queue, from, len, step)| Step::SettleRun { queue, from, len, step }),
        3 => (queue, picks).prop_map(|(queue, picks)| Step::SettleAnywhere { queue, picks }),
        2 => (queue, any::<usize>(), any::<u16>())
            .prop_map(|(queue, pick, attempts)| Step::Attempts { queue, pick, attempts }),
        1 => Just(Step::Create),
        1 => queue.prop_map(|queue| Step::Delete { queue }),
        1 => (0u64..50).prop_map(|more| Step::Reserve { more }),
    ]
}

prop_compose! {
    fn turn()(
        steps in prop::collection::vec(step(), 0..5),
        rounds in 1u64..4,
        sync in prop::bool::weighted(0.2),
        reopen in prop::bool::weighted(0.15),
        read_from in any::<usize>(),
        bytes_max in 0usize..60_000,
    ) -> Turn {
        Turn { steps, rounds, sync, reopen, read_from, bytes_max }
    }
}

/// The store as it will be in the middle of a batch.
struct Planned {
    /// Number and next position.
    queues: Vec<(u32, u64)>,
    next_queue: u32,
    next_session: u64,
}

impl Planned {
    fn new(store: &dyn Store) -> Planned {
        let queues = store.queues().unwrap();
        Planned {
            queues: queues
                .iter()
                .map(|queue| (queue.queue, queue.next))
                .collect(),
            next_queue: store.next_queue(),
            next_session: store.next_session(),
        }
    }

    /// None if there is no queue or message to do this to.
    fn write(&mut self, step: &Step) -> Option<Write> {
        Some(match step {
            Step::Append { queue, lens } => {
                let (queue, next) = self.queue(*queue)?;
                let mut builder = BlockBuilder::new();
                for (&len, position) in lens.iter().zip(*next..) {
                    builder.push(head(position), &vec![position as u8; len]);
                }
                let (first, block) = (*next, builder.finish());
                *next += lens.len() as u64;
                Write::Append {
                    queue: *queue,
                    first,
                    block,
                }
            }
            Step::SettleRun {
                queue,
                from,
                len,
                step,
            } => {
                let (queue, next) = self.queue(*queue)?;
                let from = pick(*from, *next)?;
                settle(*queue, (from..*next).step_by(*step).take(*len))
            }
            Step::SettleAnywhere { queue, picks } => {
                let (queue, next) = self.queue(*queue)?;
                settle(
                    *queue,
                    picks.iter().filter_map(|&picked| pick(picked, *next)),
                )
            }
            Step::Attempts {
                queue,
                pick: picked,
                attempts,
            } => {
                let (queue, next) = self.queue(*queue)?;
                let position = pick(*picked, *next)?;
                Write::Attempts {
                    queue: *queue,
                    position,
                    attempts: *attempts,
                }
            }
            Step::Create => {
                let queue = self.next_queue;
                self.next_queue += 1;
                self.queues.push((queue, 0));
                put(queue, &format!("queue {queue}"))
            }
            Step::Delete { queue } => {
                let (queue, _) = *self.queue(*queue)?;
                self.queues.retain(|&(other, _)| other != queue);
                Write::DeleteQueue { queue }
            }
            Step::Reserve { more } => {
                self.next_session += more;
                Write::ReserveSessions {
                    below: self.next_session,
                }
            }
        })
    }

    fn queue(&mut self, picked: usize) -> Option<&mut (u32, u64)> {
        let picked = pick(picked, self.queues.len() as u64)?;
        self.queues.get_mut(picked as usize)
    }
}

fn pick(picked: usize, len: u64) -> Option<u64> {
    (picked as u64).checked_rem(len)
}

fn assert_same(a: &dyn Store, b: &dyn Store, turn: &Turn) {
    assert_eq!(a.committed_round(), b.committed_round());
    assert_eq!(a.next_queue(), b.next_queue());
    assert_eq!(a.next_session(), b.next_session());
    let queues = a.queues().unwrap();
    assert_eq!(queues, b.queues().unwrap());
    for queue in queues {
        let from = turn.read_from as u64 % (queue.next + 1);
        for (from, bytes_max) in [(from, turn.bytes_max), (0, usize::MAX)] {
            assert_same_blocks(
                &a.read(queue.queue, from, bytes_max).unwrap(),
                &b.read(queue.queue, from, bytes_max).unwrap(),
            );
        }
    }
}

fn assert_same_blocks(a: &[LoadedBlock], b: &[LoadedBlock]) {
    let firsts = |blocks: &[LoadedBlock]| Vec::from_iter(blocks.iter().map(|block| block.first));
    assert_eq!(firsts(a), firsts(b));
    for (a, b) in a.iter().zip(b) {
        assert_eq!(a.block.as_bytes(), b.block.as_bytes());
        for index in 0..a.block.len() {
            assert_eq!(
                a.is_settled(index),
                b.is_settled(index),
                "{} + {index}",
                a.first
            );
            if !a.is_settled(index) {
                assert_eq!(
                    a.attempts(index),
                    b.attempts(index),
                    "{} + {index}",
                    a.first
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(48) })]

    // I1, I2, I10
    #[test]
    fn rocks_and_model_hold_the_same(turns in prop::collection::vec(turn(), 1..25)) {
        let mut model = Model::new();
        let mut rocks = Rocks::new();
        for store in [model.store(), rocks.store()] {
            commit(store, vec![put(1, "one"), put(2, "two")]);
        }
        for turn in &turns {
            let mut planned = Planned::new(model.store());
            let writes = turn.steps.iter().filter_map(|step| planned.write(step)).collect();
            let round = model.store().committed_round() + turn.rounds;
            let batch = Batch { round, writes };
            model.store().commit(batch.clone()).unwrap();
            rocks.store().commit(batch).unwrap();
            if turn.sync {
                assert_eq!(model.store().sync().unwrap(), rocks.store().sync().unwrap());
            }
            if turn.reopen {
                model.reopen();
                rocks.reopen();
            }
            assert_same(model.store(), rocks.store(), turn);
        }
    }
}
