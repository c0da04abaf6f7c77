//! Real processes on one segment, and what is left when one of them is killed.
//!
//! The other process is this test binary again: it runs the test
//! `other_process`, which does what its environment says. Each test waits for
//! what it wants to see and never for time to pass; a lost wake-up, which would
//! cost a second and pass unnoticed, fails.
//!
//! What SIGKILL can't show: the loss of power, and orders of memory that this
//! processor does not have (`loom_*.rs`).
#![cfg(not(loom))]
#![allow(clippy::unwrap_used)]

use ringmain_ring::layout::Geometry;
use ringmain_ring::record_ring::{Reader, Record, Ring, Writer};
use ringmain_ring::segment::create;
use ringmain_ring::session::SessionMap;
use ringmain_ring::wait::{SLEEP_MAX, WaitWord, broker, client};
use ringmain_ring::{AtomicU64, Ordering};
use std::collections::VecDeque;
use std::fs::OpenOptions;
use std::hint::spin_loop;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::yield_now;
use std::time::Instant;
use tempfile::TempDir;

const ROLE: &str = "RINGMAIN_TEST_ROLE";
const SEGMENT: &str = "RINGMAIN_TEST_SEGMENT";
const NUMBER: &str = "RINGMAIN_TEST_NUMBER";

/// A fresh session in a folder of its own.
struct Session {
    _folder: TempDir,
    path: PathBuf,
    map: SessionMap,
}

impl Session {
    fn new(ring_bytes: u32) -> Session {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = folder.path().join("session");
        let geometry = Geometry {
            submission_bytes: ring_bytes,
            delivery_bytes: ring_bytes,
            answer_bytes: ring_bytes,
        };
        let file = create(&path, geometry.segment_bytes() as u64).unwrap();
        let map = SessionMap::initialise(&file, &path, geometry, 1, 1).unwrap();
        Session {
            _folder: folder,
            path,
            map,
        }
    }

    fn start(&self, role: &str, number: u64) -> Process {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["other_process", "--exact", "--ignored", "--nocapture"])
            .env(ROLE, role)
            .env(SEGMENT, &self.path)
            .env(NUMBER, number.to_string())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Process { child }
    }
}

/// A process that is gone when the test is.
struct Process {
    child: Child,
}

impl Process {
    /// Kills it, at whatever instruction it is, and returns when it is dead.
    fn kill(mut self) {
        self.child.kill().unwrap();
        let status = self.child.wait().unwrap();
        assert_eq!(
            status.signal(),
            Some(libc::SIGKILL),
            "ended before: {status}"
        );
    }

    /// Whether it still runs; for loops that wait for it. Panics if it failed.
    fn runs(&mut self) -> bool {
        yield_now();
        match self.child.try_wait().unwrap() {
            None => true,
            Some(status) => {
                assert!(status.success(), "the other process failed: {status}");
                false
            }
        }
    }

    /// Until it ends by itself, and well.
    fn join(mut self) {
        let status = self.child.wait().unwrap();
        assert!(status.success(), "the other process failed: {status}");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// xorshift: the seed of a failing run is in its output.
struct Random(u64);

impl Random {
    fn seeded() -> Random {
        let time = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
        let seed = time ^ u64::from(std::process::id()) << 40 | 1;
        say_seed(seed);
        Random(seed)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }
}

/// In a test's own process, for the harness to show if the test fails.
#[allow(clippy::print_stderr)]
fn say_seed(seed: u64) {
    if std::env::var_os(ROLE).is_none() {
        eprintln!("seed {seed:#x}");
    }
}

/// Record `number` says its number, its position, and bytes that follow from
/// both; the last eight are a checksum.
fn content(number: u64, position: u64) -> Vec<u8> {
    let len = 24 + (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) as usize % 300;
    let mut bytes = Vec::with_capacity(len);
    bytes.extend(number.to_ne_bytes());
    bytes.extend(position.to_ne_bytes());
    let mut word = number ^ position.rotate_left(32);
    while bytes.len() < len - 8 {
        word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        bytes.push((word >> 56) as u8);
    }
    bytes.extend(checksum(&bytes).to_ne_bytes());
    bytes
}

fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// The record's number, after all of it was checked.
fn checked_number(ring: Ring<'_>, record: &Record) -> u64 {
    let mut bytes = vec![0; record.len as usize];
    ring.area.copy_out(record.offset as usize, &mut bytes);
    let number = u64::from_ne_bytes(bytes[..8].try_into().unwrap());
    assert_eq!(
        bytes,
        content(number, record.position),
        "record {number} is torn"
    );
    number
}

/// Writes record `number` if there is room, without publishing it.
fn write(writer: &mut Writer, ring: Ring<'_>, number: u64) -> Option<u64> {
    // The position comes after the room, and doesn't change the length.
    let len = content(number, 0).len();
    let slot = writer.begin(ring, 1, 0, len).unwrap().ok()?;
    slot.put_bytes(0, &content(number, slot.position));
    Some(slot.position)
}

/// The other process of all tests here.
#[test]
#[ignore = "started by the other tests, as the process that they look at or kill"]
fn other_process() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    // Some roles never end by themselves, and the parent may be killed.
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL).unwrap();
    let path = PathBuf::from(std::env::var_os(SEGMENT).unwrap());
    let number = std::env::var(NUMBER).unwrap().parse().unwrap();
    let map = open(&path);
    match role.as_str() {
        "read for ever" => read_for_ever(map.delivery(), number),
        "read asleep" => read_asleep(&map, number),
        "wake up" => wake_up(&map, number),
        "scribble" => scribble(&map, number),
        _ => {
            let death = role.strip_prefix("write until ").expect("a role");
            let death: usize = death.parse().unwrap();
            write_for_ever(&map, number, DEATHS[death]);
        }
    }
}

fn open(path: &Path) -> SessionMap {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    SessionMap::open(&file, path).unwrap()
}

/// The attachment word in which the other process says that it has come to where
/// it is to be killed, and waits there.
const THERE: u32 = 0;

/// Where in its work a writer is killed.
#[derive(Clone, Copy, PartialEq)]
enum Death {
    /// Wherever it happens to be.
    Anywhere,
    /// Waiting for room, or on the way there.
    Full,
    /// With a header written, but no content.
    Begun,
    /// With some records written, but not published.
    Unpublished,
}

const DEATHS: [Death; 4] = [
    Death::Anywhere,
    Death::Full,
    Death::Begun,
    Death::Unpublished,
];

/// Writes from record `number` on, where a predecessor stopped.
fn write_for_ever(map: &SessionMap, number: u64, death: Death) {
    let mut random = Random::seeded();
    let ring = map.submission();
    let mut writer = Writer::resume(ring, ring.tail.load(Ordering::Acquire)).unwrap();
    let stop = number + 1 + random.below(500);
    for number in number.. {
        if number >= stop && death == Death::Begun {
            let _slot = writer.begin(ring, 1, 0, content(number, 0).len());
            say_there_and_wait(map);
        }
        while write(&mut writer, ring, number).is_none() {
            writer.publish(ring);
            yield_now();
        }
        if number >= stop && death == Death::Unpublished {
            say_there_and_wait(map);
        }
        if random.below(4) == 0 {
            writer.publish(ring);
        }
    }
}

fn say_there_and_wait(map: &SessionMap) {
    let there = map.attachment(THERE).unwrap();
    there.store(1, Ordering::Release);
    loop {
        yield_now();
    }
}

// I1, I6, I10: whoever reads after a writer's death finds an intact prefix of
// what it wrote, and a successor goes on at `tail` as if nothing had been.
#[test]
fn a_killed_writer_leaves_an_intact_prefix_and_its_successor_goes_on() {
    const LIVES: usize = 100;
    let mut random = Random::seeded();
    let session = Session::new(16 * 1024);
    let ring = session.map.submission();
    let there = session.map.attachment(THERE).unwrap();
    let mut reader = Reader::new(0, 0);
    let mut expected = 0;
    for life in 0..LIVES {
        let death = DEATHS[life % DEATHS.len()];
        let role = format!("write until {}", life % DEATHS.len());
        let mut writer = session.start(&role, expected);
        let mut read = || {
            let record = reader.next(ring).unwrap()?;
            assert_eq!(checked_number(ring, &record), expected);
            expected += 1;
            reader.free(ring, record.end());
            Some(record)
        };
        match death {
            Death::Anywhere | Death::Full => {
                let mut missing = random.below(500);
                while missing > 0 {
                    match read() {
                        Some(_) => missing -= 1,
                        None => assert!(writer.runs()),
                    }
                }
            }
            Death::Begun | Death::Unpublished => {
                while there.load(Ordering::Acquire) == 0 {
                    assert!(read().is_some() || writer.runs());
                }
            }
        }
        if death == Death::Full {
            let head = ring.head.load(Ordering::Relaxed);
            while ring.tail.load(Ordering::Relaxed) - head < 12 * 1024 {
                assert!(writer.runs());
            }
        }
        for _ in 0..random.below(3000) {
            spin_loop();
        }
        writer.kill();
        there.store(0, Ordering::Release);
        while read().is_some() {}
        let tail = ring.tail.load(Ordering::Acquire);
        assert_eq!(reader.next_position(), tail, "read up to the end");
    }
}

/// Reads for ever, expecting record `number` at `head`.
fn read_for_ever(ring: Ring<'_>, number: u64) {
    let mut random = Random::seeded();
    let head = ring.head.load(Ordering::Acquire);
    let mut reader = Reader::new(head, head);
    let mut expected = number;
    loop {
        let Some(record) = reader.next(ring).unwrap() else {
            yield_now();
            continue;
        };
        assert_eq!(checked_number(ring, &record), expected);
        expected += 1;
        if random.below(4) == 0 {
            reader.free(ring, record.end());
        }
    }
}

// I6, I10: what a killed reader had not freed is there for its successor, whole
// and in order, and the writer needs to do nothing about it.
#[test]
fn a_killed_reader_leaves_what_it_had_not_freed() {
    const LIVES: u64 = 100;
    let mut random = Random::seeded();
    let session = Session::new(16 * 1024);
    let ring = session.map.delivery();
    let mut writer = Writer::new(0, 0);
    let mut number = 0;
    // Where each record that is not freed begins, padding included.
    let mut begins: VecDeque<(u64, u64)> = VecDeque::new();
    let mut reread = 0;
    for _ in 0..LIVES {
        let head = ring.head.load(Ordering::Acquire);
        while begins.front().is_some_and(|begin| begin.0 < head) {
            begins.pop_front();
        }
        let first = begins.front().map_or(number, |begin| begin.1);
        assert_eq!(
            begins.front().map_or(head, |begin| begin.0),
            head,
            "at a record"
        );
        let mut reader = session.start("read for ever", first);
        let end = head + random.below(64 * 1024);
        while ring.head.load(Ordering::Relaxed) <= end {
            let begin = writer.next_position();
            match write(&mut writer, ring, number) {
                Some(_) => {
                    begins.push_back((begin, number));
                    number += 1;
                    if random.below(4) == 0 {
                        writer.publish(ring);
                    }
                }
                None => {
                    writer.publish(ring);
                    assert!(reader.runs());
                }
            }
            // No more fit into the ring: the first of them is freed.
            while begins.len() > 16 * 1024 / 32 {
                begins.pop_front();
            }
        }
        for _ in 0..random.below(3000) {
            spin_loop();
        }
        reader.kill();
        reread += u64::from(writer.refresh(ring).unwrap() > 0);
    }
    assert!(reread > 0, "every life ended with an empty ring");
}

/// Sleeps while `look` is false, and fails if wake-ups get lost: a sleep that ran
/// out although what it waited for was there.
struct Sleeper<'a> {
    word: WaitWord<'a>,
    bits: u32,
    sleeps: u64,
    /// Ran out, and the announcement had been taken. On a machine that is busy
    /// for seconds the wake may just have been on its way, so a few are allowed.
    late: u64,
}

impl<'a> Sleeper<'a> {
    fn new(word: WaitWord<'a>, bits: u32) -> Sleeper<'a> {
        Sleeper {
            word,
            bits,
            sleeps: 0,
            late: 0,
        }
    }

    fn sleep_until(&mut self, mut look: impl FnMut() -> bool) {
        loop {
            let announced = self.word.announce(self.bits);
            if look() {
                return;
            }
            let start = Instant::now();
            self.word.sleep(announced, SLEEP_MAX);
            self.sleeps += 1;
            if start.elapsed() >= SLEEP_MAX && look() {
                let told = self.word.peek() & self.bits == 0;
                assert!(told, "lost: nobody looked at the announcement");
                self.late += 1;
                assert!(self.late < 4, "announcements taken, nobody woken");
            }
        }
    }
}

const STREAMED: u64 = 1_000_000;

fn read_asleep(map: &SessionMap, until: u64) {
    let ring = map.delivery();
    let mut reader = Reader::new(0, 0);
    let mut sleeper = Sleeper::new(map.client_wait(), client::MESSAGES);
    for expected in 0..until {
        let record = loop {
            if let Some(record) = reader.next(ring).unwrap() {
                break record;
            }
            // What is read is freed before the sleep, else both might sleep.
            let position = reader.next_position();
            reader.free(ring, position);
            map.broker_wait().wake(broker::ROOM);
            sleeper.sleep_until(|| reader.refresh(ring).unwrap());
        };
        assert_eq!(ring.area.load(record.offset as usize), expected);
        if expected % 8 == 7 {
            reader.free(ring, record.end());
            map.broker_wait().wake(broker::ROOM);
        }
    }
    assert!(sleeper.sleeps > 0, "never slept");
}

// I1, I2, I6: both sides sleep again and again in a stream through a small
// ring, and neither sleeps through what the other did.
#[test]
fn a_million_records_stream_between_two_processes_that_sleep() {
    let session = Session::new(4096);
    let map = &session.map;
    let ring = map.delivery();
    let mut random = Random::seeded();
    let mut writer = Writer::new(0, 0);
    let mut sleeper = Sleeper::new(map.broker_wait(), broker::ROOM);
    let mut reader = None;
    for number in 0..STREAMED {
        let len = 8 + random.below(48) as usize;
        let slot = loop {
            if let Ok(slot) = writer.begin(ring, 1, 0, len).unwrap() {
                break slot;
            }
            writer.publish(ring);
            map.client_wait().wake(client::MESSAGES);
            // Only now, so that this side sleeps at least once.
            reader.get_or_insert_with(|| session.start("read asleep", STREAMED));
            sleeper.sleep_until(|| writer.fits(ring, len).unwrap());
        };
        slot.put_u64(0, number);
        if random.below(8) == 0 || number + 1 == STREAMED {
            writer.publish(ring);
            map.client_wait().wake(client::MESSAGES);
        }
        if number == STREAMED / 2 {
            // And the other at least once.
            writer.publish(ring);
            map.client_wait().wake(client::MESSAGES);
            while map.client_wait().peek() & client::MESSAGES == 0 {
                assert!(reader.as_mut().unwrap().runs());
            }
        }
    }
    reader.unwrap().join();
    assert!(sleeper.sleeps > 0, "never slept");
}

/// The attachment word in which the role "wake up" says which thread it is.
const THREAD: u32 = 1;

fn wake_up(map: &SessionMap, rounds: u64) {
    let stored = &map.header().confirmations.stored;
    let answered = &map.header().confirmations.synced;
    // SAFETY: takes nothing and can't fail.
    let thread = unsafe { libc::gettid() };
    map.attachment(THREAD)
        .unwrap()
        .store(thread as u32, Ordering::Release);
    let mut sleeper = Sleeper::new(map.client_wait(), client::CONFIRMATION);
    for round in 1..=rounds {
        sleeper.sleep_until(|| stored.load(Ordering::Acquire) == round);
        answered.store(round, Ordering::Release);
        map.broker_wait().wake(broker::ROOM);
    }
    assert!(sleeper.sleeps >= rounds, "slept {} times", sleeper.sleeps);
}

/// Whether the kernel says that the thread sleeps.
fn sleeps(process: &Process, thread: u32) -> bool {
    let path = format!("/proc/{}/task/{thread}/stat", process.child.id());
    let stat = std::fs::read_to_string(path).unwrap_or_default();
    let state = stat
        .rsplit(") ")
        .next()
        .and_then(|rest| rest.chars().next());
    state == Some('S')
}

// I6: a process asleep in the kernel is woken by another's store, and only by
// one that it waits for.
#[test]
fn a_process_asleep_in_the_kernel_is_woken_by_another() {
    const ROUNDS: u64 = 200;
    let session = Session::new(4096);
    let map = &session.map;
    let confirmations = &map.header().confirmations;
    let mut process = session.start("wake up", ROUNDS);
    let mut sleeper = Sleeper::new(map.broker_wait(), broker::ROOM);
    for round in 1..=ROUNDS {
        let asleep = |process: &mut Process| {
            assert!(process.runs());
            let thread = map.attachment(THREAD).unwrap().load(Ordering::Acquire);
            let announced = map.client_wait().peek() & client::CONFIRMATION != 0;
            announced && sleeps(process, thread)
        };
        while !asleep(&mut process) {}
        // Not what it waits for: nobody is woken, nothing is taken.
        map.client_wait().wake(client::MESSAGES | client::ROOM);
        assert_eq!(map.client_wait().peek(), client::CONFIRMATION);
        confirmations.stored.store(round, Ordering::Release);
        map.client_wait().wake(client::CONFIRMATION);
        sleeper.sleep_until(|| confirmations.synced.load(Ordering::Acquire) == round);
    }
    process.join();
}

/// Writes what it likes wherever a client can, until it is killed.
fn scribble(map: &SessionMap, seed: u64) {
    let mut random = Random(seed | 1);
    let near = |random: &mut Random, cursor: &AtomicU64| {
        let value = cursor.load(Ordering::Relaxed);
        let moved = value.wrapping_add(random.below(640) * 8).wrapping_sub(64);
        let anything = random.below(u64::MAX);
        let choice = if random.below(64) == 0 {
            anything
        } else {
            moved
        };
        cursor.store(choice, Ordering::Release);
    };
    let (submission, delivery) = (map.submission(), map.delivery());
    loop {
        for _ in 0..8 {
            let offset = random.below(submission.area.size() as u64 / 8) as usize * 8;
            // Mostly small records and padding, sometimes anything.
            let header = random.below(3) << 32 | random.below(80);
            let anything = random.below(u64::MAX);
            let word = if random.below(16) == 0 {
                anything
            } else {
                header
            };
            submission.area.store(offset, word);
        }
        match random.below(4) {
            0 => near(&mut random, submission.tail),
            1 => near(&mut random, delivery.head),
            // A cursor that helps the broker along, or it would only meet damage.
            2 => {
                let tail = submission.head.load(Ordering::Relaxed) + random.below(512) * 8;
                submission.tail.store(tail, Ordering::Release);
            }
            _ => {
                let head = delivery.tail.load(Ordering::Relaxed);
                delivery.head.store(head, Ordering::Release);
            }
        }
    }
}

// I8: a client that writes anything at any moment, between a check and a use as
// well, makes the broker's side neither panic nor hang nor leave the ring.
#[test]
fn a_hostile_process_harms_nobody_but_its_session() {
    let session = Session::new(4096);
    let map = &session.map;
    let (submission, delivery) = (map.submission(), map.delivery());
    let mut random = Random::seeded();
    let process = session.start("scribble", random.0);
    let (mut reader, mut writer) = (Reader::new(0, 0), Writer::new(0, 0));
    let (mut records, mut written, mut damages) = (0_u64, 0_u64, 0_u64);
    let mut bytes = Vec::new();
    // What happens depends on the other process, so that is what is waited for.
    while records < 10_000 || written < 10_000 || damages < 500 {
        match reader.next(submission) {
            Ok(Some(record)) => {
                records += 1;
                let end = record.offset as usize + record.len as usize;
                assert!(record.kind != 0 && end <= submission.area.size());
                assert!(record.end() - reader.freed() <= submission.area.size() as u64);
                bytes.clear();
                let (offset, len) = (record.offset as usize, record.len as usize);
                submission.area.append_to(offset, len, &mut bytes);
                assert_eq!(bytes.len(), len);
            }
            Ok(None) => {
                let position = reader.next_position();
                reader.free(submission, position);
                yield_now();
            }
            Err(_) => {
                damages += 1;
                let position = reader.next_position();
                reader = Reader::new(position, position);
                reader.free(submission, position);
            }
        }
        let len = random.below(100) as usize;
        match writer.begin(delivery, 1, 0, len) {
            Ok(Ok(slot)) => {
                written += 1;
                slot.put_bytes(0, &[7; 100][..len]);
                writer.publish(delivery);
            }
            Ok(Err(_)) => {}
            Err(_) => {
                damages += 1;
                let tail = delivery.tail.load(Ordering::Relaxed);
                match Writer::resume(delivery, tail) {
                    Ok(resumed) => writer = resumed,
                    Err(_) => delivery.head.store(tail, Ordering::Release),
                }
            }
        }
    }
    process.kill();
    assert_eq!(map.answers().tail.load(Ordering::Relaxed), 0);
    let answers = map.answers().area;
    for offset in (0..answers.size()).step_by(8) {
        assert_eq!(answers.load(offset), 0, "written beyond the delivery ring");
    }
}
