//! `ringmain stop`, with and without `--drain`, over real processes: what clients
//! see, what the next broker finds, and a drain that is killed. What was accepted
//! is counted outside of the broker, by who sent it.

#![allow(clippy::unwrap_used, reason = "a test that can't go on has failed")]
#![allow(clippy::print_stderr, reason = "logs are shown when a test fails")]

mod common;

use common::{
    Broker, Consume, PROGRAM, Produce, audit, dies_with_us, files, payload, scramble, this_thread,
    wait_asleep, wait_until,
};
use ringmain::control::{PROTOCOL, Request};
use ringmain::{Client, Confirm, ConsumerOptions, Error, Message, ProducerOptions, QueueSettings};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{OpenOptions, Permissions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;

/// Not a test: what the children run.
#[test]
fn child_process() {
    common::run_child();
}

/// Written past the test harness, which would swallow it.
fn skip(why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[track_caller]
fn expect_code(output: &Output, code: i32) {
    assert_eq!(output.status.code(), Some(code), "{}", errors(output));
}

/// Stops the broker, which has ended when this returns.
#[track_caller]
fn stop(broker: &mut Broker, arguments: &[&str]) {
    let pid = broker.pid();
    expect_code(&broker.run(&[&["stop"], arguments].concat()), 0);
    assert!(
        has_ended(pid),
        "the command returned before the broker ended"
    );
    assert!(!broker.socket().exists());
    assert!(broker.reap().success());
}

/// Whether the process has ended, fetched by its parent or not.
fn has_ended(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.map_or(true, |stat| {
        stat.rsplit(") ").next().unwrap().starts_with('Z')
    })
}

#[track_caller]
fn assert_nothing_in_shared_memory(broker: &Broker) {
    assert_eq!(files(&broker.shm_dir()), ["lock"]);
}

/// *(producer, number)*, as [`payload`] has them.
type Name = (u64, u64);

fn name_of(message: &Message) -> Name {
    let word = |at| u64::from_ne_bytes(message.payload()[at..at + 8].try_into().unwrap());
    (word(0), word(8))
}

/// Takes everything out of the queue, in order.
#[track_caller]
fn take_all(broker: &Broker, queue: &str) -> Vec<Name> {
    let mut consumer = broker.client().consumer(queue).unwrap();
    let mut names = Vec::new();
    let count = broker.info(queue).messages;
    while (names.len() as u64) < count {
        let message = consumer.recv_timeout(common::BOUND).unwrap();
        let message = message.expect("a message comes");
        names.push(name_of(&message));
        message.ack().unwrap();
    }
    consumer.flush(Confirm::Stored).unwrap();
    assert_eq!(broker.info(queue).messages, 0);
    names
}

/// What is to be found in the queue, by producer: the numbers, in order.
type Expected = BTreeMap<u64, Vec<u64>>;

/// I1, I2, I10: exactly what is expected is there, and each producer's in order.
#[track_caller]
fn check_found(found: &[Name], expected: &Expected) {
    let mut by_producer = Expected::new();
    for &(producer, number) in found {
        by_producer.entry(producer).or_default().push(number);
    }
    for (producer, numbers) in expected {
        let found = by_producer.remove(producer).unwrap_or_default();
        assert_eq!(
            found.len(),
            numbers.len(),
            "of producer {producer}: {:?} is there, {:?} should be",
            found.last(),
            numbers.last()
        );
        assert_eq!(&found, numbers, "of producer {producer}");
    }
    by_producer.retain(|_, numbers| !numbers.is_empty());
    assert!(by_producer.is_empty(), "never accepted: {by_producer:?}");
}

/// Threads that send, each with a session of its own, until they are told to end
/// or their session is closed.
struct Senders {
    told: Arc<AtomicBool>,
    sent: Arc<AtomicU64>,
    /// The producer's number, and how many it was told are accepted.
    threads: Vec<JoinHandle<(u64, u64)>>,
}

impl Senders {
    fn start(broker: &Broker, queue: &str, levels: &[Confirm]) -> Senders {
        let told = Arc::new(AtomicBool::new(false));
        let sent = Arc::new(AtomicU64::new(0));
        let start = |(at, &level): (usize, &Confirm)| {
            let producer = at as u64 + 1;
            let options = ProducerOptions::new().confirm(level);
            let sender = broker.client().producer_with(queue, options).unwrap();
            let (told, sent) = (told.clone(), sent.clone());
            std::thread::spawn(move || {
                let mut number = 0;
                while !told.load(Ordering::Relaxed) {
                    match sender.send(payload(producer, number, 64)) {
                        Ok(_) => number += 1,
                        Err(Error::Closed(_)) => break,
                        Err(error) => panic!("producer {producer}: {error}"),
                    }
                    sent.fetch_add(1, Ordering::Relaxed);
                }
                (producer, number)
            })
        };
        let threads = levels.iter().enumerate().map(start).collect();
        Senders {
            told,
            sent,
            threads,
        }
    }

    /// Waits until so many messages were accepted from now on.
    #[track_caller]
    fn wait_for_more(&self, count: u64) {
        let goal = self.sent.load(Ordering::Relaxed) + count;
        wait_until("messages are sent", || {
            self.sent.load(Ordering::Relaxed) >= goal
        });
    }

    fn tell(&self) {
        self.told.store(true, Ordering::Relaxed);
    }

    /// Waits for their end, which a closed session brings about too.
    #[track_caller]
    fn accepted(self) -> Expected {
        wait_until("the senders end", || {
            self.threads.iter().all(JoinHandle::is_finished)
        });
        let accepted = self.threads.into_iter().map(|thread| {
            let (producer, count) = thread.join().unwrap();
            (producer, (0..count).collect())
        });
        accepted.collect()
    }
}

/// What a thread that receives and acks was told.
#[derive(Default)]
struct Acks {
    acked: BTreeSet<Name>,
    /// Acks that returned an error.
    failed: BTreeSet<Name>,
}

/// Receives and acks until its session is closed, or it is told.
fn receiver(broker: &Broker, queue: &str, told: Arc<AtomicBool>) -> JoinHandle<Acks> {
    let options = ConsumerOptions::new().window(32);
    let mut consumer = broker.client().consumer_with(queue, options).unwrap();
    std::thread::spawn(move || {
        let mut acks = Acks::default();
        while !told.load(Ordering::Relaxed) {
            match consumer.recv_timeout(std::time::Duration::from_millis(20)) {
                Ok(Some(message)) => {
                    let name = name_of(&message);
                    match message.ack() {
                        Ok(()) => acks.acked.insert(name),
                        Err(_) => acks.failed.insert(name),
                    };
                }
                Ok(None) => {}
                Err(Error::Closed(_)) => break,
                Err(error) => panic!("{error}"),
            }
        }
        acks
    })
}

/// What is left of what was accepted when this was acked.
fn without(mut accepted: Expected, acked: &BTreeSet<Name>) -> Expected {
    for (producer, numbers) in &mut accepted {
        numbers.retain(|number| !acked.contains(&(*producer, *number)));
    }
    accepted
}

// I1, I2, I3, I6
#[test]
fn a_stop_under_load_goes_unnoticed_and_the_next_broker_can_start_at_once() {
    let mut broker = Broker::with_queue("jobs");
    let mut producers = [
        broker.produce(Produce::new("jobs", 1)),
        broker.produce(Produce {
            flush_every: 50,
            confirm: Confirm::Synced,
            ..Produce::new("jobs", 2)
        }),
    ];
    let mut consumer = broker.consume(Consume::new("jobs"));
    for process in producers.iter().chain([&consumer]) {
        process.wait_for_more(1);
    }
    for _ in 0..3 {
        for process in producers.iter().chain([&consumer]) {
            process.wait_for_more(300);
        }
        stop(&mut broker, &[]);
        assert!(!broker.session_files().is_empty(), "sessions stay");
        broker.restart();
    }
    for producer in &mut producers {
        producer.wait_for_more(300);
        producer.finish();
    }
    broker.wait_drained("jobs");
    consumer.finish();
    let report = audit(&[&producers[0], &producers[1]], &[&consumer]);
    assert_eq!((report.in_doubt, report.redelivered), (0, 0), "{report:?}");
    assert_eq!(report.delivered, report.accepted);
}

// I1: a backlog, and clients that wait when the broker goes.
#[test]
fn clients_that_wait_across_a_stop_go_on_with_the_next_broker() {
    let mut broker = Broker::with_queue("jobs");
    broker.create("idle", &QueueSettings::default());
    let sender = broker.client().producer("jobs").unwrap();
    for number in 0..500 {
        sender.send(payload(1, number, 64)).unwrap();
    }
    let mut waiting = broker.client().consumer("idle").unwrap();
    let (thread, receives) = mpsc::channel();
    let receiver = std::thread::spawn(move || {
        thread.send(this_thread()).unwrap();
        let message = waiting.recv().unwrap();
        name_of(&message)
    });
    let tid = receives.recv().unwrap();
    wait_asleep(std::process::id() as i32, tid);
    stop(&mut broker, &["--timeout", "20s"]);
    sender.send(payload(1, 500, 64)).unwrap();
    broker.restart();
    let other = broker.client().producer("idle").unwrap();
    other.send(payload(7, 0, 64)).unwrap();
    wait_until("the receiver is woken", || receiver.is_finished());
    assert_eq!(receiver.join().unwrap(), (7, 0));
    sender.flush(Confirm::Stored).unwrap();
    let expected = Expected::from([(1, (0..501).collect())]);
    check_found(&take_all(&broker, "jobs"), &expected);
}

// I1, I2, I10
#[test]
fn a_drain_stores_rings_returns_leases_and_closes_clients_that_wait() {
    let mut broker = Broker::with_queue("jobs");
    broker.create("idle", &QueueSettings::default());
    let sender = broker.client().producer("jobs").unwrap();
    for number in 0..300 {
        sender.send(payload(1, number, 64)).unwrap();
    }
    let options = ConsumerOptions::new().window(20);
    let mut holder = broker.client().consumer_with("jobs", options).unwrap();
    let mut held: Vec<Message> = (0..10).map(|_| holder.recv().unwrap()).collect();
    // One that waits for messages, and one that waits for room.
    let mut idle = broker.client().consumer("idle").unwrap();
    let (thread, waits) = mpsc::channel();
    let waiting = thread.clone();
    let receiver = std::thread::spawn(move || {
        waiting.send(this_thread()).unwrap();
        idle.recv().map(|message| name_of(&message))
    });
    broker.pause();
    for message in held.drain(..3) {
        message.ack().unwrap();
    }
    let mut count = 300;
    loop {
        match sender.try_send(payload(1, count, 64)) {
            Ok(_) => count += 1,
            Err(Error::Full(_)) => break,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(count > 600, "the ring took {count} messages");
    let blocked = sender.clone();
    let blocked = std::thread::spawn(move || {
        thread.send(this_thread()).unwrap();
        let mut number = count;
        // The broker may make room before it is asked to stop.
        loop {
            match blocked.send(payload(1, number, 64)) {
                Ok(_) => number += 1,
                Err(error) => return (number, error),
            }
        }
    });
    for tid in [waits.recv().unwrap(), waits.recv().unwrap()] {
        wait_asleep(std::process::id() as i32, tid);
    }
    let asked = broker.command(&["stop", "--drain"]).spawn().unwrap();
    broker.resume();
    let output = asked.wait_with_output().unwrap();
    expect_code(&output, 0);
    assert!(has_ended(broker.pid()));
    assert!(broker.reap().success());
    assert_nothing_in_shared_memory(&broker);

    wait_until("the receiver is told", || receiver.is_finished());
    let received = receiver.join().unwrap();
    assert!(matches!(received, Err(Error::Closed(_))), "{received:?}");
    wait_until("the sender is told", || blocked.is_finished());
    let (count, error) = blocked.join().unwrap();
    assert!(matches!(error, Error::Closed(_)), "{error}");
    let error = sender.try_send("more").unwrap_err();
    assert!(matches!(error, Error::Closed(_)), "{error}");
    let error = held.pop().unwrap().ack().unwrap_err();
    assert!(matches!(error, Error::Closed(_)), "{error}");
    drop(held);

    broker.restart();
    assert_eq!(broker.info("jobs").leased, 0);
    let found = take_all(&broker, "jobs");
    // Returned ones first, as they are the oldest.
    assert!(found.is_sorted(), "{found:?}");
    check_found(&found, &Expected::from([(1, (3..count).collect())]));
}

// I1, I9, I10: payloads in chunks, some of them under a reader.
#[test]
fn a_drain_waits_for_no_reader_of_a_payload_and_takes_it_from_none() {
    const BYTES: usize = 300_000;
    let mut broker = Broker::with_queue("jobs");
    let sender = broker.client().producer("jobs").unwrap();
    for number in 0..4 {
        sender.send(payload(1, number, BYTES)).unwrap();
    }
    let mut reader = broker.client().consumer("jobs").unwrap();
    let held: Vec<Message> = (0..2).map(|_| reader.recv().unwrap()).collect();
    stop(&mut broker, &["--drain"]);
    assert_nothing_in_shared_memory(&broker);
    // Their chunks are nobody else's, whatever the sender tries.
    for number in 10..20 {
        let sent = sender.try_send(payload(2, number, BYTES));
        assert!(sent.is_err(), "a drained session took a message");
    }
    for (number, message) in held.iter().enumerate() {
        assert!(message.payload() == payload(1, number as u64, BYTES));
    }
    broker.restart();
    drop(held);
    let found = take_all(&broker, "jobs");
    assert!(found.is_sorted(), "{found:?}");
    check_found(&found, &Expected::from([(1, (0..4).collect())]));
}

// I1, I2, I5, I10: each send and each ack is exactly what its caller was told.
#[test]
fn a_drain_under_load_tells_everybody_exactly_what_was_taken_in() {
    let mut broker = Broker::with_queue("jobs");
    let accepted = Confirm::Accepted;
    let levels = [accepted, accepted, Confirm::Stored, Confirm::Synced];
    for _ in 0..3 {
        let senders = Senders::start(&broker, "jobs", &levels);
        let never = Arc::new(AtomicBool::new(false));
        let receiver = receiver(&broker, "jobs", never);
        senders.wait_for_more(2000);
        stop(&mut broker, &["--drain"]);
        assert_nothing_in_shared_memory(&broker);
        let accepted = senders.accepted();
        wait_until("the receiver is told", || receiver.is_finished());
        let acks = receiver.join().unwrap();
        broker.restart();
        let found = take_all(&broker, "jobs");
        check_found(&found, &without(accepted, &acks.acked));
        let found = BTreeSet::from_iter(found);
        assert!(acks.failed.is_subset(&found), "an ack failed, and counts");
    }
}

/// Looks at the drain from outside, at which point it is to be killed.
fn moment(broker: &Broker, number: u64, log_before: usize) -> bool {
    let logged = |what: &str| broker.log_text()[log_before..].contains(what);
    let names = files(&broker.shm_dir());
    let sessions = names.iter().filter(|name| name.starts_with('s')).count();
    match number {
        0 => logged("asked to stop"),
        1 => logged("draining"),
        2 => logged("session gone"),
        3 => sessions < 6,
        4 => sessions == 0,
        5 => !names.iter().any(|name| name == "leases"),
        _ => !names.iter().any(|name| name == "ledger"),
    }
}

// I1, I2, I10
#[test]
fn a_drain_that_is_killed_loses_nothing() {
    let mut broker = Broker::with_queue("jobs");
    let mut killed = 0;
    for number in 0..7 {
        let levels = [Confirm::Accepted, Confirm::Accepted, Confirm::Stored];
        let senders = Senders::start(&broker, "jobs", &levels);
        let told = Arc::new(AtomicBool::new(false));
        let receiver = receiver(&broker, "jobs", told.clone());
        senders.wait_for_more(scramble(number) % 2000 + 500);
        let log_before = broker.log_text().len();
        let mut asked = broker.command(&["stop", "--drain"]).spawn().unwrap();
        let pid = broker.pid();
        while !moment(&broker, number, log_before) && !has_ended(pid) {
            std::hint::spin_loop();
        }
        killed += u32::from(!has_ended(pid));
        broker.kill();
        asked.wait().unwrap();
        broker.restart();
        // Those whose session was not closed yet go on.
        senders.tell();
        told.store(true, Ordering::Relaxed);
        let accepted = senders.accepted();
        wait_until("the receiver ends", || receiver.is_finished());
        let acks = receiver.join().unwrap();
        stop(&mut broker, &["--drain"]);
        assert_nothing_in_shared_memory(&broker);
        broker.restart();
        // An ack that got no answer within its time may count or not.
        let mut found = take_all(&broker, "jobs");
        found.retain(|name| !acks.failed.contains(name));
        let settled: BTreeSet<Name> = acks.acked.union(&acks.failed).copied().collect();
        check_found(&found, &without(accepted, &settled));
    }
    assert!(killed > 0, "no drain was caught in the act");
}

// I1, I2, I10: who is sure that it was drained can rely on it.
#[test]
fn a_drain_that_is_cut_short_by_sigterm_says_whether_it_was_done() {
    let mut broker = Broker::with_queue("jobs");
    let senders = Senders::start(&broker, "jobs", &[Confirm::Accepted, Confirm::Synced]);
    senders.wait_for_more(1000);
    let asked = broker.command(&["stop", "--drain"]).spawn().unwrap();
    wait_until("the drain begins", || {
        broker.log_text().contains("draining")
    });
    broker.terminate();
    let output = asked.wait_with_output().unwrap();
    match output.status.code() {
        Some(0) => assert_nothing_in_shared_memory(&broker),
        Some(1) => assert!(errors(&output).contains("before it was drained")),
        code => panic!("{code:?}: {}", errors(&output)),
    }
    broker.restart();
    let accepted = senders.accepted();
    check_found(&take_all(&broker, "jobs"), &accepted);
}

/// A broker that is started by hand. It ends with the test.
struct Serving(Child);

impl Serving {
    /// One whose disk counts as full.
    fn on_a_full_disk(broker: &Broker) -> Serving {
        let mut command = Command::new(PROGRAM);
        command
            .args(["serve", "--disk-reserve", "1000000TiB", "--data-dir"])
            .arg(broker.data_dir())
            .arg("--shm-dir")
            .arg(broker.shm_dir())
            .arg("--socket")
            .arg(broker.socket())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut child = dies_with_us(&mut command).spawn().unwrap();
        let mut line = [0];
        child
            .stdout
            .as_mut()
            .unwrap()
            .read_exact(&mut line)
            .unwrap();
        Serving(child)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

// I1: what can't be stored is not given up.
#[test]
fn a_drain_on_a_full_disk_is_refused_and_nobody_notices() {
    let mut broker = Broker::with_queue("jobs");
    stop(&mut broker, &[]);
    let mut full = Serving::on_a_full_disk(&broker);
    let sender = broker.client().producer("jobs").unwrap();
    for number in 0..100 {
        sender.send(payload(1, number, 64)).unwrap();
    }
    let output = broker.run(&["stop", "--drain"]);
    expect_code(&output, 1);
    let said = errors(&output);
    assert!(
        said.contains("disk is full") && said.contains("drain again"),
        "{said}"
    );
    // It serves: messages go from ring to ring.
    let mut consumer = broker.client().consumer("jobs").unwrap();
    assert_eq!(name_of(&consumer.recv().unwrap()), (1, 0));
    drop(consumer);
    sender.send(payload(1, 100, 64)).unwrap();
    // A plain stop leaves the rings.
    expect_code(&broker.run(&["stop"]), 0);
    assert!(full.0.wait().unwrap().success());
    broker.restart();
    sender.send(payload(1, 101, 64)).unwrap();
    sender.flush(Confirm::Stored).unwrap();
    let expected = Expected::from([(1, (0..102).collect())]);
    check_found(&take_all(&broker, "jobs"), &expected);
}

#[test]
fn a_stop_takes_no_longer_than_it_may() {
    let mut broker = Broker::start();
    broker.pause();
    let output = broker.run(&["stop", "--timeout", "100ms"]);
    expect_code(&output, 5);
    assert!(
        errors(&output).contains("does not answer"),
        "{}",
        errors(&output)
    );
    broker.resume();
    stop(&mut broker, &[]);
    let output = broker.run(&["stop"]);
    expect_code(&output, 3);
}

/// A word of a file of the ledger, changed; gives what it was.
fn patch(path: &Path, word: u64, value: u64) -> u64 {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    let mut before = [0; 8];
    file.read_exact_at(&mut before, word * 8).unwrap();
    file.write_all_at(&value.to_ne_bytes(), word * 8).unwrap();
    u64::from_ne_bytes(before)
}

/// The files of a folder with their bytes.
fn contents(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let read = |name: String| (name.clone(), std::fs::read(folder.join(name)).unwrap());
    files(folder).into_iter().map(read).collect()
}

// I1: shared memory of another layout may hold accepted messages.
#[test]
fn a_broker_refuses_to_start_over_another_layout_and_changes_nothing() {
    let mut broker = Broker::with_queue("jobs");
    let sender = broker.client().producer("jobs").unwrap();
    let other = broker.client().producer("jobs").unwrap();
    sender.send(payload(1, 0, 64)).unwrap();
    stop(&mut broker, &[]);
    sender.send(payload(1, 1, 64)).unwrap();
    other.send(payload(2, 0, 64)).unwrap();
    let mut session = broker.session_files();
    session.retain(|name| name.ends_with(".ledger"));
    let session = session.pop().unwrap();
    for (name, word) in [("ledger", 1), (&session, 1), (&session, 18)] {
        let path = broker.shm_dir().join(name);
        let before = patch(&path, word, 77);
        let found = contents(&broker.shm_dir());
        let output = serve_in(&broker);
        expect_code(&output, 8);
        let said = errors(&output);
        let line = said.lines().last().unwrap();
        assert!(line.starts_with("ringmain: "), "{said}");
        for words in [path.to_str().unwrap(), "77", "ringmain stop --drain"] {
            assert!(line.contains(words), "{line}");
        }
        assert!(
            contents(&broker.shm_dir()) == found,
            "something was changed"
        );
        patch(&path, word, before);
    }
    broker.restart();
    sender.flush(Confirm::Stored).unwrap();
    other.flush(Confirm::Stored).unwrap();
    let expected = Expected::from([(1, vec![0, 1]), (2, vec![0])]);
    check_found(&take_all(&broker, "jobs"), &expected);
}

/// A broker that must not come into service.
fn serve_in(broker: &Broker) -> Output {
    let (data, shm) = (broker.data_dir(), broker.shm_dir());
    let mut serve = common::serve_command(&data, &shm, &broker.socket());
    let output = serve.output().unwrap();
    assert!(output.stdout.is_empty(), "it was in service");
    output
}

/// After a drain even a ledger of another layout is no hindrance: there is none.
#[test]
fn a_drained_broker_leaves_no_layout_behind() {
    let mut broker = Broker::with_queue("jobs");
    let client = broker.client();
    let sender = client.producer("jobs").unwrap();
    sender.send(payload(1, 0, 64)).unwrap();
    stop(&mut broker, &["--drain"]);
    assert_nothing_in_shared_memory(&broker);
    broker.restart();
    // The same client connects again by asking for a producer.
    let error = sender.send(payload(1, 1, 64)).unwrap_err();
    assert!(matches!(error, Error::Closed(_)), "{error}");
    let sender = client.producer("jobs").unwrap();
    sender.send(payload(1, 1, 64)).unwrap();
    sender.flush(Confirm::Stored).unwrap();
    let expected = Expected::from([(1, vec![0, 1])]);
    check_found(&take_all(&broker, "jobs"), &expected);
}

/// Runs a program as this user.
fn as_user(uid: u32, program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command
        .arg(format!("--reuid={uid}"))
        .arg(format!("--regid={uid}"))
        .arg("--clear-groups")
        .arg(program)
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// A copy of the program where other users can run it, if there can be one.
fn program_for_others(folder: &Path) -> Option<PathBuf> {
    std::fs::set_permissions(folder, Permissions::from_mode(0o755)).unwrap();
    let program = folder.join("ringmain");
    std::fs::copy(PROGRAM, &program).unwrap();
    let runs = as_user(65534, &program).arg("--version").output();
    if runs.is_ok_and(|output| output.status.success()) {
        return Some(program);
    }
    skip("not root, or no setpriv: that other users may not stop a broker is NOT tested");
    None
}

// I8
#[test]
fn another_user_may_not_stop_the_broker_whether_the_socket_keeps_it_out_or_not() {
    let mut broker = Broker::with_queue("jobs");
    let Some(program) = program_for_others(broker.folder()) else {
        return;
    };
    let sender = broker.client().producer("jobs").unwrap();
    let ask = |arguments: &[&str]| {
        let mut command = as_user(65534, &program);
        command.args(arguments).arg("--socket").arg(broker.socket());
        command.output().unwrap()
    };
    for mode in [0o600, 0o666] {
        std::fs::set_permissions(broker.socket(), Permissions::from_mode(mode)).unwrap();
        for arguments in [&["stop"][..], &["stop", "--drain"], &["queue", "list"]] {
            let output = ask(arguments);
            expect_code(&output, 6);
            let said = errors(&output);
            for words in ["not permitted", "user 65534", "run this as", "root"] {
                assert!(said.contains(words), "{mode:o} {arguments:?}: {said}");
            }
            assert_eq!(said.lines().count(), 1, "{said}");
        }
        let output = ask(&["version", "--verbose"]);
        expect_code(&output, 0);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(said.contains("not permitted"), "{said}");
    }
    // Nobody was disturbed.
    sender.send(payload(1, 0, 64)).unwrap();
    sender.flush(Confirm::Stored).unwrap();
    drop(sender);
    stop(&mut broker, &["--drain"]);
}

#[test]
fn root_may_stop_the_broker_of_another_user_and_a_third_may_not() {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = program_for_others(folder.path()) else {
        return;
    };
    std::fs::set_permissions(folder.path(), Permissions::from_mode(0o777)).unwrap();
    let shm = tempfile::tempdir_in("/dev/shm").unwrap();
    std::fs::set_permissions(shm.path(), Permissions::from_mode(0o777)).unwrap();
    let socket = folder.path().join("socket");
    let mut serve = as_user(65534, &program);
    serve
        .args(["serve", "--disk-reserve", "1MiB", "--data-dir"])
        .arg(folder.path().join("data"))
        .arg("--shm-dir")
        .arg(shm.path().join("shm"))
        .arg("--socket")
        .arg(&socket)
        .stderr(Stdio::null());
    let mut serve = Serving(dies_with_us(&mut serve).spawn().unwrap());
    let mut line = [0];
    serve
        .0
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut line)
        .unwrap();
    std::fs::set_permissions(&socket, Permissions::from_mode(0o666)).unwrap();
    let mut third = as_user(65533, &program);
    let output = third
        .args(["stop", "--socket"])
        .arg(&socket)
        .output()
        .unwrap();
    expect_code(&output, 6);
    assert!(
        errors(&output).contains("user 65533"),
        "{}",
        errors(&output)
    );
    Client::connect_to(&socket).unwrap().stats().unwrap();
    let mut root = Command::new(PROGRAM);
    let output = root
        .args(["stop", "--drain", "--socket"])
        .arg(&socket)
        .output()
        .unwrap();
    expect_code(&output, 0);
    assert!(serve.0.wait().unwrap().success());
}

/// Plays a broker of another layout at this socket, for one connection; gives
/// what it was asked after the hello.
fn another_layout(socket: &Path) -> JoinHandle<Option<String>> {
    let listener = UnixListener::bind(socket).unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
        lines.next().unwrap().unwrap();
        let hello = serde_json::json!({"version": "9.9.9", "protocol": PROTOCOL, "layout": 99,
            "instance": "5f", "pid": std::process::id()});
        writeln!(stream, "{}", serde_json::json!({"ok": hello})).unwrap();
        let asked = lines.next()?.unwrap();
        let error = serde_json::json!({"code": "store_unavailable", "message": "it is played"});
        writeln!(stream, "{}", serde_json::json!({"error": error})).unwrap();
        Some(asked)
    })
}

/// The new program is there before the old broker is gone.
#[test]
fn a_broker_of_another_layout_can_be_asked_and_drained() {
    let broker = Broker::new();
    let played = another_layout(&broker.socket());
    let output = broker.run(&["version", "--verbose", "--json"]);
    expect_code(&output, 0);
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said["broker"]["layout"], 99);
    assert_eq!(said["broker"]["version"], "9.9.9");
    assert_eq!(played.join().unwrap(), None);

    std::fs::remove_file(broker.socket()).unwrap();
    let played = another_layout(&broker.socket());
    let output = broker.run(&["stop", "--drain"]);
    expect_code(&output, 1);
    assert!(
        errors(&output).contains("it is played"),
        "{}",
        errors(&output)
    );
    let asked: Request = serde_json::from_str(&played.join().unwrap().unwrap()).unwrap();
    assert_eq!(asked, Request::Stop { drain: true });
}

#[test]
fn the_version_is_told_of_program_and_broker() {
    let mut broker = Broker::start();
    let json = |broker: &Broker| -> serde_json::Value {
        let output = broker.run(&["version", "--verbose", "--json"]);
        expect_code(&output, 0);
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let said = json(&broker);
    assert_eq!(said["version"], env!("CARGO_PKG_VERSION"));
    for field in ["protocol", "layout", "store_format"] {
        assert!(said[field].as_u64().unwrap() >= 1, "{field}: {said}");
    }
    for field in ["rocksdb", "target", "profile"] {
        assert!(!said[field].as_str().unwrap().is_empty(), "{field}: {said}");
    }
    assert_eq!(said["broker"]["pid"], broker.pid());
    assert_eq!(said["broker"]["version"], said["version"]);
    assert_eq!(said["broker"]["layout"], said["layout"]);
    let output = broker.run(&["version", "--verbose"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        text.contains(&format!("process {}", broker.pid())),
        "{text}"
    );
    stop(&mut broker, &[]);
    let said = json(&broker);
    assert!(said["broker"].is_null(), "{said}");
    let why = said["broker_error"].as_str().unwrap();
    assert!(why.contains("no broker is running"), "{why}");
}
