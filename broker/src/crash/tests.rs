//! Death of a real broker at every crash point, once, and twice in a row (I10, with
//! I1 to I7 and I9): a client does everything that clients do, and finds every
//! message where it belongs, whenever its broker died.
//!
//! `RINGMAIN_SLICE=all` takes all points, `i/n` every `n`-th from `i` on. Without
//! it, as many as fit into the other tests' time, chosen by `RINGMAIN_SEED` or by
//! the clock. `RINGMAIN_CRASH_AT=name#times` takes that death alone, or, with two of
//! these and a comma between, the two.

#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(clippy::print_stderr, reason = "the report of the run")]

mod supervisor;
mod workload;

use super::plan::DIE_AT;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use supervisor::{Supervisor, be_the_broker};

/// Deaths without a wish: single ones, and such in a row.
const SINGLE: usize = 30;
const DOUBLE: usize = 30;

/// Deaths that leave a lot to the next start.
const PROBES: [&str; 5] = [
    "free records#16",
    "write a batch#8",
    "write a part#2",
    "give back a chunk#1",
    "publish the final position#2",
];

/// Not a test: the broker that is killed.
#[test]
fn broker_process() {
    be_the_broker();
}

/// A death: the name of the point, `#`, and which of its passings.
type Death = String;

/// Runs the workload, in which the broker dies these deaths one after the other.
/// Gives the deaths that there could have been, for each life of the broker.
fn run(deaths: &[Death]) -> Vec<Vec<Death>> {
    let supervisor = Supervisor::start(deaths);
    workload::run(&supervisor);
    supervisor.finish()
}

fn name_of(death: &str) -> &str {
    death.split_once('#').unwrap().0
}

/// Of all, those in the slice.
fn slice<T>(all: Vec<T>, most: usize) -> Vec<T> {
    let count = all.len();
    let (index, of) = match std::env::var("RINGMAIN_SLICE").ok().as_deref() {
        Some("all") => (0, 1),
        Some(text) if !text.is_empty() => {
            let (index, of) = text.split_once('/').expect("`all` or `i/n`");
            (index.parse().unwrap(), of.parse().unwrap())
        }
        _ => {
            let seed = std::env::var("RINGMAIN_SEED").ok();
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
            let seed = seed.map_or(now.as_secs() as usize, |seed| seed.parse().unwrap());
            let of = count.div_ceil(most).max(1);
            (seed % of, of)
        }
    };
    all.into_iter().skip(index).step_by(of).collect()
}

#[test]
fn broker_that_dies_at_any_point_loses_nothing() {
    if let Ok(wish) = std::env::var(DIE_AT)
        && !supervisor::is_broker()
    {
        let deaths: Vec<Death> = wish.split(',').map(str::to_owned).collect();
        run(&deaths);
        return;
    }
    let all: BTreeSet<Death> = run(&[]).into_iter().flatten().collect();
    let mut seen: BTreeSet<Death> = all.clone();
    // Deaths in the middle of everything, to see what a start after them passes until
    // there is a client again.
    let mut start = BTreeSet::new();
    for death in PROBES {
        let lives = run(&[death.to_owned()]);
        seen.extend(lives.iter().flatten().cloned());
        let before_clients = |death: &&Death| name_of(death) != "accept a connection";
        start.extend(lives[1].iter().take_while(before_clients).cloned());
    }
    let pairs: Vec<[Death; 2]> = all
        .iter()
        .filter(|death| death.ends_with("#1"))
        .flat_map(|first| start.iter().map(|second| [first.clone(), second.clone()]))
        .collect();
    let (singles, doubles) = (all.len(), pairs.len());
    let single = slice(all.iter().cloned().collect(), SINGLE);
    let double = slice(pairs, DOUBLE);
    for death in &single {
        seen.extend(run(std::slice::from_ref(death)).into_iter().flatten());
    }
    for deaths in &double {
        seen.extend(run(deaths).into_iter().flatten());
    }
    let reached: BTreeSet<&str> = seen.iter().map(|death| name_of(death)).collect();
    let known = names_in_the_source();
    eprintln!(
        "crash points: {} of {} names reached, {} of {singles} deaths, {} of {doubles} pairs, 0 violations",
        reached.len(),
        known.len(),
        single.len(),
        double.len(),
    );
    let missed: Vec<&str> = known
        .iter()
        .map(String::as_str)
        .filter(|name| !reached.contains(name) && !RARE.contains(name))
        .collect();
    assert!(missed.is_empty(), "no run passes {missed:?}");
}

/// Points that this workload does not come to; the simulation does.
const RARE: [&str; 11] = [
    // More connections than the broker takes.
    "turn a client away",
    // Clients damage their segments.
    "make up for what a segment lacks",
    "make up for a missing payload segment",
    "make up for what a payload segment lacks",
    // A session is drained while its client waits for a sync.
    "confirm the last sync of a session that has gone",
    "wake the client of a session that has gone",
    // More than 4096 leases; more than 4096 turns between sessions.
    "reserve more lease entries",
    "note more lease entries",
    "drop the oldest intake",
    // A death at the moment: see the pairs.
    "forget a lost round",
    "give back a predecessor's chunk",
];

/// The names that the broker's source gives to its points.
fn names_in_the_source() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (_, text) in sources() {
        for call in ["crash_point(\"", ".set(\""] {
            for (at, _) in text.match_indices(call) {
                let rest = &text[at + call.len()..];
                names.insert(rest[..rest.find('"').unwrap()].to_owned());
            }
        }
        // Formatted over two lines.
        for (at, _) in text.match_indices(".set(\n") {
            let rest = text[at + 6..].trim_start();
            if let Some(rest) = rest.strip_prefix('"') {
                names.insert(rest[..rest.find('"').unwrap()].to_owned());
            }
        }
    }
    names
}

/// The broker's source, without its tests: path and text of each file.
fn sources() -> Vec<(PathBuf, String)> {
    fn collect(dir: &Path, files: &mut Vec<(PathBuf, String)>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                collect(&path, files);
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let end = text
                .find("#[cfg(test)]\n#[allow")
                .or(text.find("#[cfg(test)]\nmod tests {"));
            files.push((path, text[..end.unwrap_or(text.len())].to_owned()));
        }
    }
    let mut files = Vec::new();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for part in ["board", "control", "ledger", "service", "store"] {
        collect(&source.join(part), &mut files);
    }
    files.retain(|(path, _)| {
        let path = path.to_str().unwrap();
        !path.contains("/tests/") && !path.ends_with("tests.rs") && !path.ends_with("model.rs")
    });
    files
}

/// What changes something that a successor, a client or the disk can see.
const EFFECTS: [&str; 29] = [
    // Shared memory.
    ".store(",
    "_to(map.",
    ".publish(map.",
    ".publish(session.map.",
    ".free(map.",
    ".give_back(",
    ".wake_announced(",
    ".announce(broker",
    "broker_wait().set(",
    "broker_wait().take(",
    "SessionMap::initialise(",
    "Board::create(",
    "board::remove(",
    // Files.
    "segment::create(",
    "segment::reserve(",
    "fs::remove_file(",
    "fs::write(",
    "fs::rename(",
    "sync_all(",
    "write_all_at(",
    "DirBuilder::new(",
    ".create(true)",
    "set_permissions(",
    // The store.
    "engine.write(",
    "engine.sync(",
    "delete_file_in_range_cf(",
    // Sockets.
    "bind(fd",
    "listen(&fd",
    "wire::send(",
];

/// What is no effect, or has its point elsewhere, with the reason.
const NO_EFFECTS: [(&str, &str); 9] = [
    ("self.committed.store(", "the store's own memory"),
    ("_bytes.store(0", "the store's own memory"),
    ("self.flag.store(true", "the broker's own memory"),
    ("self.rung.store(", "the broker's own memory"),
    (
        "self.word(index).store(value, Ordering::Relaxed)",
        "says nothing before the next set",
    ),
    ("row[", "of a lease entry that is not taken"),
    ("fn give_back", "a declaration"),
    ("fn free(", "a declaration"),
    (
        "let _ = std::fs::remove_file(&self.note);\n                self.retry_ns",
        "no board",
    ),
];

#[test]
fn every_effect_has_a_crash_point() {
    let mut without = Vec::new();
    for (path, text) in sources() {
        let lines: Vec<&str> = text.lines().collect();
        for (number, line) in lines.iter().enumerate() {
            let code = line.split("//").next().unwrap();
            if !EFFECTS.iter().any(|effect| code.contains(effect)) {
                continue;
            }
            let with_next = lines[number..lines.len().min(number + 2)].join("\n");
            if NO_EFFECTS.iter().any(|(text, _)| with_next.contains(text)) {
                continue;
            }
            // A point names what comes next: it stands right before it.
            let before = &lines[number.saturating_sub(6)..=number];
            if !before.iter().any(|line| line.contains("crash_point(")) {
                without.push(format!(
                    "{}:{}: {}",
                    path.display(),
                    number + 1,
                    line.trim()
                ));
            }
        }
    }
    assert!(
        without.is_empty(),
        "effects without a crash point before them:\n{}",
        without.join("\n")
    );
}
