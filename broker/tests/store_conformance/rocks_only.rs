//! What damage, a second broker, SIGKILL and a long life do to the store on
//! RocksDB. These tests reach for its files and counters.

use super::engines::*;
use ringmain_broker::store::block::{BYTES_TARGET, BlockBuilder, MESSAGES_MAX};
use ringmain_broker::store::rocks::{FORMAT, RocksOptions, RocksStore};
use ringmain_broker::store::{Store, StoreError, Write};
use rocksdb::perf::{PerfContext, PerfMetric, PerfStatsLevel, set_perf_stats};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

#[test]
fn second_broker_is_kept_out() {
    let mut rocks = Rocks::new();
    match open(rocks.dir()).err() {
        Some(StoreError::InUse(path)) => assert_eq!(Path::new(&path), rocks.dir()),
        other => panic!("{other:?}"),
    }
    rocks.reopen();
}

#[test]
fn new_folder_is_for_its_user_alone() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("not/there");
    let _store = open(&dir).unwrap();
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&dir), 0o700);
    assert_eq!(mode(&dir.join("lock")), 0o600);
    assert_eq!(mode(&dir.join("synced")), 0o600);
}

#[test]
fn folder_that_cannot_be_used_is_named() {
    let parent = tempfile::tempdir().unwrap();
    let file = parent.path().join("file");
    std::fs::write(&file, "x").unwrap();
    for path in [file.clone(), file.join("below")] {
        match open(&path).err() {
            Some(StoreError::Failed(text)) => {
                assert!(text.contains(path.to_str().unwrap()), "{text}");
                assert!(
                    text.contains("a file is in the place of a folder"),
                    "{text}"
                );
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn reserve_is_taken_off_the_room() {
    let dir = tempfile::tempdir().unwrap();
    let options = RocksOptions {
        reserve_bytes: u64::MAX,
    };
    let store = RocksStore::open(dir.path(), &options).unwrap();
    assert_eq!(store.room().unwrap(), 0);
}

#[test]
fn newer_format_is_refused() {
    let mut rocks = Rocks::new();
    rocks.close();
    let mut options = rocksdb::Options::default();
    options.create_missing_column_families(true);
    // A later format may have families that this version has never heard of.
    let families = ["default", "blocks", "marks", "parts", "of the future"];
    let db = rocksdb::DB::open_cf(&options, rocks.database(), families).unwrap();
    db.put("meta/format", (FORMAT + 1).to_le_bytes()).unwrap();
    drop(db);
    match rocks.try_open() {
        Err(StoreError::Version { found, known }) => {
            assert_eq!((found, known), (FORMAT + 1, FORMAT));
        }
        other => panic!("{other:?}"),
    }
}

/// Rounds 1 to 10, with ten messages each. Up to round 5 they are synced.
fn half_synced() -> Rocks {
    let mut rocks = Rocks::new();
    commit(rocks.store(), vec![put(1, "a"), append(1, 0..10)]);
    for round in 2..=10 {
        commit(rocks.store(), vec![append(1, (round - 1) * 10..round * 10)]);
        if round == 5 {
            assert_eq!(rocks.store().sync().unwrap(), 5);
        }
    }
    rocks.close();
    rocks
}

fn assert_refused(rocks: &mut Rocks, because: &str) {
    match rocks.try_open() {
        Err(StoreError::Corrupt(text)) => assert!(text.contains(because), "{text}"),
        other => panic!("{other:?}"),
    }
}

fn flip(path: &Path, at: usize) {
    let mut bytes = std::fs::read(path).unwrap();
    bytes[at] ^= 1;
    std::fs::write(path, bytes).unwrap();
}

fn files(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let paths = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    paths
        .map(|path| (path.clone(), std::fs::read(path).unwrap()))
        .collect()
}

// I10
#[test]
fn torn_unsynced_tail_of_the_log_leaves_a_prefix() {
    // Within the last record, and within those of earlier rounds.
    for cut in [1, 100, 1_000, 2_000, 3_000] {
        let mut rocks = half_synced();
        let log = rocks.file("log");
        let len = log.metadata().unwrap().len();
        std::fs::File::options()
            .write(true)
            .open(log)
            .unwrap()
            .set_len(len - cut)
            .unwrap();
        rocks.try_open().unwrap();
        let round = rocks.store().committed_round();
        assert!((5..10).contains(&round), "cut {cut}, round {round}");
        assert_eq!(read_all(rocks.store(), 1), Vec::from_iter(0..round * 10));
        commit(rocks.store(), vec![append(1, round * 10..round * 10 + 1)]);
        rocks.reopen();
        assert_eq!(
            read_all(rocks.store(), 1),
            Vec::from_iter(0..round * 10 + 1)
        );
    }
}

// I5
#[test]
fn damaged_log_below_the_mark_is_refused_and_left_as_it_is() {
    let mut rocks = half_synced();
    let log = rocks.file("log");
    flip(&log, 600);
    let before = files(&rocks.database());
    for _ in 0..2 {
        assert_refused(&mut rocks, "round 5 had been synced");
    }
    assert!(before == files(&rocks.database()), "opening changed it");
    flip(&log, 600);
    rocks.try_open().unwrap();
    assert_eq!(read_all(rocks.store(), 1), Vec::from_iter(0..100));
}

// I5
#[test]
fn missing_log_or_database_below_the_mark_is_refused() {
    let mut rocks = half_synced();
    std::fs::remove_file(rocks.file("log")).unwrap();
    assert_refused(&mut rocks, "round 5 had been synced");
    std::fs::remove_dir_all(rocks.database()).unwrap();
    assert_refused(&mut rocks, "round 5 had been synced");
    assert!(!rocks.database().exists());
}

// I5
#[test]
fn mark_above_the_store_is_refused_and_an_unreadable_one_is_not() {
    let mut rocks = half_synced();
    let mark = rocks.dir().join("synced");
    let later = {
        let mut later = half_synced();
        later.try_open().unwrap();
        commit(later.store(), Vec::new());
        assert_eq!(later.store().sync().unwrap(), 11);
        std::fs::read(later.dir().join("synced")).unwrap()
    };
    std::fs::write(&mark, &later).unwrap();
    assert_refused(&mut rocks, "round 11 had been synced");
    std::fs::write(&mark, &later[..11]).unwrap();
    rocks.try_open().unwrap();
    // Opening syncs what it finds.
    assert_ne!(std::fs::read(&mark).unwrap(), later);
    assert_eq!(std::fs::read(&mark).unwrap().len(), later.len());
}

#[test]
fn damaged_table_is_noticed_when_it_is_read() {
    let mut rocks = half_synced();
    // Opening moves what the log holds into tables.
    rocks.try_open().unwrap();
    rocks.close();
    let table = rocks.file("sst");
    flip(&table, table.metadata().unwrap().len() as usize / 4);
    rocks.try_open().unwrap();
    match rocks.store().read(1, 0, usize::MAX) {
        Err(StoreError::Corrupt(text)) => assert!(text.contains("backup"), "{text}"),
        other => panic!("{other:?}"),
    }
}

/// Counts the tombstones and overwritten entries that this thread walks over.
fn walked_over<T>(work: impl FnOnce() -> T) -> (T, u64) {
    set_perf_stats(PerfStatsLevel::EnableCount);
    let mut context = PerfContext::default();
    context.reset();
    let result = work();
    let walked = context.metric(PerfMetric::InternalDeleteSkippedCount)
        + context.metric(PerfMetric::InternalKeySkippedCount);
    set_perf_stats(PerfStatsLevel::Disable);
    (result, walked)
}

fn fill(store: &dyn Store, count: u64) {
    commit(store, vec![put(1, "a")]);
    for first in (0..count).step_by(100) {
        commit(store, vec![append(1, first..first + 100)]);
    }
}

#[test]
fn drained_queue_walks_over_no_tombstones() {
    const COUNT: u64 = 200_000;
    let rocks = Rocks::new();
    let store = rocks.store();
    fill(store, COUNT);
    let ((), walked) = walked_over(|| {
        for first in (0..COUNT).step_by(10) {
            commit(store, vec![settle(1, first..first + 10)]);
        }
    });
    assert!(walked < 100, "settling walked over {walked}");
    assert_eq!(cursor(store, 1), (COUNT, COUNT, 0));
    commit(store, vec![append(1, COUNT..COUNT + 1)]);
    let (found, walked) = walked_over(|| read_all(store, 1));
    assert_eq!(found, [COUNT]);
    assert!(walked < 10, "a read walked over {walked}");
}

#[test]
fn straggler_costs_one_walk_after_opening_and_none_before() {
    const COUNT: u64 = 100_000;
    let mut rocks = Rocks::new();
    fill(rocks.store(), COUNT);
    commit(rocks.store(), vec![settle(1, (1..COUNT - 1).rev())]);
    let left = [0, COUNT - 1];
    for _ in 0..2 {
        let (found, walked) = walked_over(|| read_all(rocks.store(), 1));
        assert_eq!(found, left);
        assert!(walked < 10, "a read walked over {walked}");
        let (found, walked) = walked_over(|| read_from(rocks.store(), 1, COUNT / 2));
        assert_eq!(found, left[1..]);
        assert!(walked < 10, "a read walked over {walked}");
        rocks.reopen();
        // The one walk.
        read_all(rocks.store(), 1);
    }
}

#[test]
fn reads_beside_commits_see_whole_rounds() {
    const ROUNDS: u64 = 2_000;
    let rocks = Rocks::new();
    let store = rocks.store();
    commit(store, vec![put(1, "a"), append(1, 0..70)]);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let before = store.committed_round();
                assert!(store.sync().unwrap() >= before);
            }
        });
        scope.spawn(|| {
            let mut last = 0;
            while !done.load(Ordering::Relaxed) {
                // Each round settles seven at the front and appends seven. A read
                // may end before the round that it began in.
                let found = read_all(store, 1);
                assert!((63..=70).contains(&found.len()), "{found:?}");
                assert_eq!(found[found.len() - 1] - found[0] + 1, found.len() as u64);
                assert_eq!(found[0] % 7, 0);
                assert!(found[0] >= last);
                last = found[0];
            }
        });
        for round in 0..ROUNDS {
            let (front, back) = (round * 7, round * 7 + 70);
            commit(
                store,
                vec![append(1, back..back + 7), settle(1, front..front + 7)],
            );
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(cursor(store, 1), (ROUNDS * 7, ROUNDS * 7 + 70, 70));
}

const KILLED: &str = "RINGMAIN_TEST_STORE_TO_BE_KILLED";

/// Not a test by itself: commits rounds until it is killed, and says which.
#[test]
fn process_to_be_killed() {
    let Ok(dir) = std::env::var(KILLED) else {
        return;
    };
    let store = open(Path::new(&dir)).unwrap();
    if store.next_queue() == 1 {
        commit(&store, vec![put(1, "a")]);
    }
    let mut first = cursor(&store, 1).1;
    loop {
        let next = first + u64::from(MESSAGES_MAX);
        commit(&store, vec![append(1, first..next)]);
        first = next;
        writeln!(std::io::stdout(), "committed {next}").unwrap();
    }
}

// I10
#[test]
fn committed_rounds_survive_sigkill() {
    let dir = tempfile::tempdir().unwrap();
    for kill_after in [1, 40, 300] {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "rocks_only::process_to_be_killed", "--nocapture"])
            .env(KILLED, dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let committed: u64 = lines
            .filter_map(|line| line.unwrap().rsplit_once("committed ")?.1.parse().ok())
            .nth(kill_after)
            .unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let store = open(dir.path()).unwrap();
        let (first, next, unsettled) = cursor(&store, 1);
        assert!(next >= committed);
        assert_eq!((first, unsettled), (0, next));
        assert_eq!(read_all(&store, 1), Vec::from_iter(0..next));
    }
}

/// How many keys lie in a family of a closed database.
fn keys(rocks: &Rocks, family: &str) -> usize {
    rocks.keys(family).len()
}

// I7
#[test]
fn settled_messages_and_deleted_queues_leave_no_rows() {
    let mut rocks = Rocks::new();
    commit(rocks.store(), vec![put(1, "a"), put(2, "b")]);
    for first in (0..400).step_by(40) {
        commit(
            rocks.store(),
            vec![append(1, first..first + 40), append(2, first..first + 40)],
        );
    }
    rocks.close();
    assert_eq!((keys(&rocks, "blocks"), keys(&rocks, "marks")), (20, 0));
    rocks.try_open().unwrap();
    // Blocks settled at once, in parts, and in parts by two processes.
    for positions in [0..50, 350..400, 50..130, 200..350, 130..200] {
        if positions.start % 100 == 50 {
            rocks.reopen();
        }
        for half in [
            positions.start..positions.end - 25,
            positions.end - 25..positions.end,
        ] {
            commit(rocks.store(), vec![settle(1, half)]);
        }
        commit(rocks.store(), vec![settle(2, [positions.start])]);
    }
    rocks.close();
    assert_eq!((keys(&rocks, "blocks"), keys(&rocks, "marks")), (10, 5));
    rocks.reopen();
    commit(rocks.store(), vec![Write::DeleteQueue { queue: 2 }]);
    rocks.close();
    assert_eq!((keys(&rocks, "blocks"), keys(&rocks, "marks")), (0, 0));
}

/// Bytes in the files of a database that is in use, so that they come and go.
fn disk_bytes(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).unwrap();
    entries
        .filter_map(|entry| Some(entry.ok()?.metadata().ok()?.len()))
        .sum()
}

// On a full disk nothing but settling goes on: that alone must free it.
#[test]
fn backlog_gives_its_room_back_once_it_is_settled() {
    const BLOCKS: u64 = 2_400;
    let rocks = Rocks::new();
    let store = rocks.store();
    commit(store, vec![put(1, "a")]);
    for first in 0..BLOCKS {
        let mut builder = BlockBuilder::new();
        builder.push(head(first), &vec![1; BYTES_TARGET]);
        let block = builder.finish();
        commit(
            store,
            vec![Write::Append {
                queue: 1,
                first,
                block,
            }],
        );
    }
    assert!(disk_bytes(&rocks.database()) > BLOCKS * BYTES_TARGET as u64 / 2);
    for first in (0..BLOCKS).step_by(100) {
        commit(store, vec![settle(1, first..first + 100)]);
    }
    store.sync().unwrap();
    for _ in 0..600 {
        if disk_bytes(&rocks.database()) < 80 << 20 {
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    panic!("{} bytes are still taken", disk_bytes(&rocks.database()));
}
