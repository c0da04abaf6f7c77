//! Death at every instruction of a client (I6, with I1 to I4, I7 and I9).
//!
//! A victim, forked from this program, runs one operation of the real library
//! under `ptrace`, one instruction at a time, and is killed with SIGKILL after
//! `k` of them: for every `k`, where the operation has up to [`ALL_MAX`], else
//! after each store to shared memory and each system call. Survivors use the
//! same queue before and after, and what they see is compared with what the
//! victim's operation may have done.
//!
//! `RINGMAIN_SLICE=all` takes all deaths, `i/n` those whose number is `i` modulo
//! `n`. Without it, a slice that fits into the other tests' time is chosen by
//! `RINGMAIN_SEED`, or by the clock. `RINGMAIN_ONLY=text` takes the operations
//! with this text in their name.

#![allow(clippy::unwrap_used, reason = "a test that can't go on has failed")]
#![allow(clippy::print_stderr, reason = "logs are shown when a test fails")]
#![allow(clippy::print_stdout, reason = "the report of the run")]

mod cases;
#[path = "../common/mod.rs"]
mod common;
mod page;
mod tracer;
mod trial;

use cases::{CASES, Case};
use common::Witness;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use trial::{Outcome, World};

/// Operations of so many instructions are interrupted after each of them.
const ALL_MAX: usize = 5000;
/// Of all deaths, the slice without a wish is one in so many.
const SLICES: usize = 250;
/// How soon what a dead process held must be there again.
const PROMPT: Duration = Duration::from_millis(100);

/// Which deaths are taken.
struct Slice {
    index: usize,
    of: usize,
}

impl Slice {
    fn from_environment() -> Slice {
        match std::env::var("RINGMAIN_SLICE").ok().as_deref() {
            Some("all") => Slice { index: 0, of: 1 },
            Some(text) if !text.is_empty() => {
                let parsed = text.split_once('/').and_then(|(index, of)| {
                    let (index, of) = (index.parse().ok()?, of.parse().ok()?);
                    (index < of).then_some(Slice { index, of })
                });
                parsed.expect("RINGMAIN_SLICE is `all` or `i/n`, with i below n")
            }
            _ => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
                let seed = std::env::var("RINGMAIN_SEED").ok();
                let seed = seed.map_or(now.as_secs(), |seed| seed.parse().unwrap());
                Slice {
                    index: (common::scramble(seed) % SLICES as u64) as usize,
                    of: SLICES,
                }
            }
        }
    }

    /// Of these points, those in the slice: one at least.
    fn of(&self, points: Vec<usize>) -> Vec<usize> {
        let of = self.of.min(points.len());
        points
            .into_iter()
            .skip(self.index % of)
            .step_by(of)
            .collect()
    }
}

/// What came out of the deaths in one operation.
#[derive(Default)]
struct Sum {
    deaths: usize,
    late: usize,
    slowest: Duration,
}

impl Sum {
    fn add(&mut self, outcome: &Outcome) {
        self.deaths += 1;
        let delay = outcome.delay;
        self.late += usize::from(delay > PROMPT);
        self.slowest = self.slowest.max(delay);
    }
}

fn run(case: &Case, slice: &Slice) -> Sum {
    let started = Instant::now();
    let mut world = World::new(case);
    let witness = case.awake().then(|| Witness::of(world.broker()));
    world.settle();
    let traced = world.trace();
    let points = match traced.instructions {
        few if few <= ALL_MAX => (0..=few).collect(),
        _ => traced.effects,
    };
    let kinds = if traced.instructions <= ALL_MAX {
        "each"
    } else {
        "effects"
    };
    let all = points.len();
    let mut sum = Sum::default();
    for point in slice.of(points) {
        sum.add(&world.kill_after(point));
    }
    if let Some(witness) = witness {
        witness.finish(world.broker());
    }
    println!(
        "{:<44} {:>6} instructions ({kinds}), {:>5} deaths of {all:>5}, slowest return {:>3} ms, {:>4} s",
        case.name,
        traced.instructions,
        sum.deaths,
        sum.slowest.as_millis(),
        started.elapsed().as_secs(),
    );
    sum
}

fn main() {
    if common::is_child() {
        return common::run_child();
    }
    let slice = Slice::from_environment();
    println!(
        "death at every instruction: slice {}/{}",
        slice.index, slice.of
    );
    let only = std::env::var("RINGMAIN_ONLY").unwrap_or_default();
    let cases = CASES.iter();
    let chosen: Vec<_> = cases.filter(|case| case.name.contains(&only)).collect();
    let mut total = Sum::default();
    for case in &chosen {
        let sum = run(case, &slice);
        total.deaths += sum.deaths;
        total.late += sum.late;
        total.slowest = total.slowest.max(sum.slowest);
    }
    println!(
        "death: {} operations, {} deaths, 0 violations; return after more than 100 ms: {}, slowest {} ms",
        chosen.len(),
        total.deaths,
        total.late,
        total.slowest.as_millis(),
    );
    // This machine may be busy with something else for a moment. A wake-up that is
    // lost shows as a second, the bound of each sleep.
    assert!(
        total.late * 200 <= total.deaths && total.slowest < Duration::from_millis(900),
        "what the dead held was not back in time"
    );
}
