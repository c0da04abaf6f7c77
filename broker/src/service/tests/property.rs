//! The property: whatever happens, in any order, and whoever dies at whatever
//! place, the invariants of the design hold. Random operations run against the
//! real core, rings, ledger and recovery, and the model judges what is seen.
//!
//! It sees neither memory ordering (one thread), nor real processes, nor RocksDB.
//!
//! A failure names its seed. `RINGMAIN_SEED=<seed>` runs that one again and
//! prints what happened; `RINGMAIN_CASES=<n>` runs more, from that seed on if one
//! is given.

#![allow(clippy::print_stderr, reason = "the report of the run")]

use super::world::{Dice, PAYLOAD_MAX, World};
use crate::store::model::Fault;
use proptest::prelude::*;
use ringmain::control::Purpose;
use std::panic::{AssertUnwindSafe, catch_unwind};

const NAMES: [&str; 2] = ["jobs", "mail"];
const CLIENTS_MAX: usize = 6;
const OPERATIONS: usize = 250;
/// Seeds of an ordinary run.
const CASES: u64 = 3000;

/// Seeds that have found faults, or would have: chunks given back before their sends were
/// committed (I1), and under readers of deleted queues and of mad senders (I9); a message
/// that came again though its ack was stored, since the nack before it, behind sends on a
/// full disk, was not (I5).
const FOUND: [u64; 5] = [25, 2705, 8456, 31405, 102357];

/// An operation: what, and two numbers that mean what it likes.
type Operation = (u32, u32, u32);

/// What there is, with how often it is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Send,
    Take,
    Ack,
    Nack,
    Extend,
    AckAgain,
    Forge,
    Flush,
    ReadAnswers,
    Pass,
    Advance,
    RunJob,
    FinishJob,
    Open,
    Attach,
    Resume,
    Kill,
    End,
    Reap,
    Vandalise,
    BrokerDies,
    Start,
    Fuse,
    Fault,
    DiskFull,
    DiskFree,
    PowerCut,
    CreateQueue,
    DeleteQueue,
    Rest,
    Check,
}

const WEIGHTS: [(What, u32); 31] = [
    (What::Send, 26),
    (What::Take, 14),
    (What::Ack, 14),
    (What::Nack, 5),
    (What::Extend, 2),
    (What::AckAgain, 2),
    (What::Forge, 1),
    (What::Flush, 4),
    (What::ReadAnswers, 8),
    (What::Pass, 40),
    (What::Advance, 4),
    (What::RunJob, 18),
    (What::FinishJob, 16),
    (What::Open, 5),
    (What::Attach, 6),
    (What::Resume, 6),
    (What::Kill, 2),
    (What::End, 1),
    (What::Reap, 2),
    (What::Vandalise, 1),
    (What::BrokerDies, 3),
    (What::Start, 10),
    (What::Fuse, 6),
    (What::Fault, 1),
    (What::DiskFull, 1),
    (What::DiskFree, 3),
    (What::PowerCut, 1),
    (What::CreateQueue, 3),
    (What::DeleteQueue, 1),
    (What::Rest, 2),
    (What::Check, 1),
];

fn what(number: u32) -> What {
    let total: u32 = WEIGHTS.iter().map(|(_, weight)| weight).sum();
    let mut left = number % total;
    for (what, weight) in WEIGHTS {
        if left < weight {
            return what;
        }
        left -= weight;
    }
    unreachable!("the weights sum up to the total")
}

fn some_client(world: &World, number: u32) -> Option<usize> {
    let alive: Vec<usize> = (0..world.clients.len())
        .filter(|&i| world.clients[i].is_alive())
        .collect();
    (!alive.is_empty()).then(|| alive[number as usize % alive.len()])
}

fn apply(world: &mut World, (number, a, b): Operation) {
    let what = what(number);
    let few = (b % 5 + 1) as usize;
    let name = NAMES[b as usize % NAMES.len()];
    let Some(client) = some_client(world, a) else {
        return apply_without_client(world, what, a, b);
    };
    match what {
        What::Send => {
            let lens: Vec<usize> = (0..few)
                .map(|at| len(a.wrapping_mul(at as u32 + 1) ^ b))
                .collect();
            world.send(client, b as usize / 7, &lens);
        }
        What::Take => world.take(client, few),
        What::Ack => world.ack(client, few, b as usize / 8),
        What::Nack => {
            let delay_ms = [0, 0, 3, 40][b as usize / 16 % 4];
            world.nack(client, few, b as usize / 8, delay_ms, b & 8 == 0);
        }
        What::Extend => world.extend(client, b as usize, [0, 50, 200][b as usize % 3]),
        What::AckAgain => world.ack_again(client, b as usize),
        What::Forge => world.forge(client, b as usize % 1000),
        What::Flush => world.flush(client, b % 2 == 0),
        What::ReadAnswers => world.read_answers(client),
        What::Attach => {
            let purpose = if b & 4 == 0 {
                Purpose::Produce
            } else {
                Purpose::Consume
            };
            world.attach(client, name, purpose, 1 + b / 8 % 12);
        }
        What::Resume => world.resume(client),
        What::Kill => world.kill_client(client),
        What::End => world.end(client),
        What::Vandalise => world.vandalise(client, b),
        other => apply_without_client(world, other, a, b),
    }
}

/// Payloads of all sizes, mostly small ones.
fn len(number: u32) -> usize {
    match number % 16 {
        0 => 0,
        1..=10 => (number / 16 % 60) as usize,
        11..=14 => (number / 16 % PAYLOAD_MAX) as usize,
        _ => (number / 16 % (PAYLOAD_MAX + 20)) as usize,
    }
}

fn apply_without_client(world: &mut World, what: What, a: u32, b: u32) {
    let name = NAMES[b as usize % NAMES.len()];
    match what {
        What::Pass => {
            world.now_ns += u64::from(a % 4) * 400_000;
            world.pass();
        }
        What::Advance => world.now_ns += u64::from(a % 250) * 1_000_000,
        What::RunJob => world.run_job(a as usize),
        What::FinishJob => world.finish_job(a as usize),
        What::Open if world.clients.iter().filter(|c| c.is_alive()).count() < CLIENTS_MAX => {
            if let Some(client) = world.open(a.is_multiple_of(4)) {
                // Mostly one thing, sometimes both.
                if !b.is_multiple_of(4) {
                    world.attach(client, name, Purpose::Produce, 0);
                }
                if b % 4 != 1 {
                    world.attach(client, name, Purpose::Consume, 1 + b / 8 % 12);
                }
            }
        }
        What::Reap => world.reap(),
        What::BrokerDies if world.core.is_some() => {
            world.note(|| "-- the broker dies".to_owned());
            world.broker_dies();
        }
        What::Start => world.start(),
        What::Fuse => world.fuse = Some(a % [4, 30, 120][b as usize % 3]),
        What::Fault => {
            let fault = if a & 1 == 0 {
                Fault::Lost
            } else {
                Fault::Applied
            };
            world.fail_next(a & 2 == 0, fault);
        }
        What::DiskFull => world.store.set_room(0),
        What::DiskFree => world.store.set_room(u64::MAX),
        What::PowerCut => world.power_cut(),
        What::CreateQueue => world.create_queue(name, [100, 400][a as usize % 2]),
        What::DeleteQueue => world.delete_queue(name),
        What::Rest => {
            if let Some(quiet) = world.call(|core| core.prepare_sleep())
                && quiet
            {
                world.call(|core| core.look_at_orphans());
            }
        }
        What::Check => world.check_progress(),
        _ => {}
    }
}

/// Enough for something to happen.
fn set_up(world: &mut World) {
    for name in NAMES {
        world.create_queue(name, 100);
        world.settle();
    }
    for number in 0..4 {
        let client = world.open(number == 3).unwrap();
        let name = NAMES[world.dice.below(NAMES.len())];
        match number % 2 {
            0 => world.attach(client, name, Purpose::Produce, 0),
            _ => world.attach(client, name, Purpose::Consume, 1 + number * 3),
        }
    }
}

fn run(seed: u64, operations: &[Operation]) -> Result<(), (String, Vec<String>)> {
    let mut trace = Vec::new();
    let mut world = None;
    let result = catch_unwind(AssertUnwindSafe(|| {
        let world = world.insert(World::new(seed));
        set_up(world);
        for &operation in operations {
            apply(world, operation);
        }
        world.check_drained();
    }));
    if let Some(world) = &mut world {
        trace.append(&mut world.trace);
    }
    result.map_err(|panic| (text_of(panic.as_ref()), trace))
}

fn text_of(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap_or_default()
}

fn operations_of(seed: u64) -> Vec<Operation> {
    let mut dice = Dice(seed);
    let mut draw = || dice.roll() as u32;
    (0..OPERATIONS).map(|_| (draw(), draw(), draw())).collect()
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name)
        .ok()
        .map(|value| value.parse().expect("a number"))
}

/// I1 to I10, as far as one thread can tell.
#[test]
fn whoever_dies_nothing_accepted_is_lost() {
    let (seed, cases) = (number("RINGMAIN_SEED"), number("RINGMAIN_CASES"));
    let first = seed.unwrap_or(0);
    // A seed alone is a failure to be looked into.
    let traced = seed.is_some() && cases.is_none();
    let cases = cases.unwrap_or(if traced { 1 } else { CASES });
    let found = FOUND.into_iter().filter(|_| seed.is_none());
    for seed in (first..first + cases).chain(found) {
        let Err((why, trace)) = run(seed, &operations_of(seed)) else {
            continue;
        };
        let trace = if traced {
            trace.join("\n")
        } else {
            String::new()
        };
        panic!("{trace}\nseed {seed}: {why}\nto see how it came to this: RINGMAIN_SEED={seed}");
    }
    eprintln!("simulation: {cases} seeds from {first} on, 0 violations");
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 60,
        failure_persistence: None,
        max_shrink_iters: 4000,
        ..ProptestConfig::default()
    })]

    /// The same with other numbers, which are made fewer when it fails.
    #[test]
    fn whoever_dies_nothing_accepted_is_lost_shrunk(
        seed in 0u64..1000,
        operations in prop::collection::vec(any::<Operation>(), 0..OPERATIONS),
    ) {
        if let Err((why, trace)) = run(seed, &operations) {
            let end = trace.len().saturating_sub(120);
            return Err(TestCaseError::fail(format!("{}\n{why}", trace[end..].join("\n"))));
        }
    }
}
