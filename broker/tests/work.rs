//! `ringmain work`: real workers, real commands, and a tally that the commands
//! keep themselves.

#![allow(clippy::unwrap_used, reason = "a test that can't go on has failed")]
#![allow(clippy::print_stderr, reason = "logs are shown when a test fails")]

mod common;

use common::{Broker, guide, wait_for, wait_until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use ringmain::{Confirm, QueueSettings};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};

/// A broker with a queue of short leases, and a folder for what commands leave.
struct Bench {
    broker: Broker,
    folder: tempfile::TempDir,
}

impl Bench {
    fn new() -> Bench {
        let broker = Broker::start();
        let settings = QueueSettings {
            visibility_timeout_ms: 300,
            ..QueueSettings::default()
        };
        broker.create("jobs", &settings);
        broker.create("answers", &QueueSettings::default());
        let folder = tempfile::tempdir().unwrap();
        Bench { broker, folder }
    }

    fn send(&self, payloads: &[&str]) {
        let producer = self.broker.client().producer("jobs").unwrap();
        producer.send_batch(payloads).unwrap();
        producer.flush(Confirm::Stored).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, arguments: &[&str]) -> std::process::Command {
        let mut all = vec!["work", "jobs"];
        all.extend_from_slice(arguments);
        let mut command = self.broker.command(&all);
        command.current_dir(self.folder.path());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    fn spawn(&self, arguments: &[&str]) -> Child {
        let mut command = self.command(arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    #[track_caller]
    fn expect(&self, code: i32, arguments: &[&str]) -> String {
        expect(code, &self.run(arguments))
    }

    /// How often each line stands in a file that commands append to.
    fn tally(&self, name: &str) -> BTreeMap<String, u32> {
        tally(&self.path(name))
    }
}

fn tally(path: &Path) -> BTreeMap<String, u32> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let mut counts = BTreeMap::new();
    for line in text.lines() {
        *counts.entry(line.to_owned()).or_insert(0) += 1;
    }
    counts
}

#[track_caller]
fn expect(code: i32, output: &Output) -> String {
    let errors = String::from_utf8_lossy(&output.stderr);
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(code), "{printed}{errors}");
    printed
}

fn terminate(child: &Child) {
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
}

#[test]
fn the_payload_is_an_argument_or_the_input_or_a_file() {
    let bench = Bench::new();
    let once = ["--count", "1", "--"];
    let with = |options: &[&'static str], command: &[&'static str]| {
        bench.send(&["a b"]);
        let arguments: Vec<&str> = [options, &once, command].concat();
        bench.expect(0, &arguments)
    };
    assert_eq!(with(&[], &["printf", "%s|", "x{}y", "{}"]), "xa by|a b|");
    assert_eq!(with(&[], &["echo"]), "a b\n");
    assert_eq!(with(&["--stdin"], &["cat"]), "a b");
    let shown = with(&["--file"], &["sh", "-c", "cat {}; stat -c %a {}; echo {}"]);
    let mut lines = shown.lines();
    assert_eq!(lines.next(), Some("a b600"));
    assert!(!Path::new(lines.next().unwrap()).exists(), "it is removed");
    let variables = "echo $RINGMAIN_QUEUE $RINGMAIN_ATTEMPT ${RINGMAIN_MESSAGE_ID%%-*}";
    let shown = with(&[], &["sh", "-c", variables]);
    assert!(shown.starts_with("jobs 1 "), "{shown}");
    assert_eq!(bench.broker.info("jobs").messages, 0, "I1: all are done");
}

#[test]
fn what_no_argument_can_be_fails_with_the_reason_and_passes_on_stdin() {
    let bench = Bench::new();
    bench.send(&["a\0b"]);
    let failed = bench.run(&["--count", "1", "--", "echo"]);
    expect(123, &failed);
    let said = String::from_utf8_lossy(&failed.stderr);
    assert!(said.contains("NUL") && said.contains("--stdin"), "{said}");
    let shown = bench.expect(0, &["--stdin", "--count", "1", "--", "od", "-An", "-tx1"]);
    assert_eq!(shown.trim(), "61 00 62");
    // Longer than one argument may be, on any Linux.
    bench.send(&[&"x".repeat(3 << 20)]);
    let failed = bench.run(&["--count", "1", "--", "true"]);
    expect(123, &failed);
    assert!(String::from_utf8_lossy(&failed.stderr).contains("too long"));
    let shown = bench.expect(0, &["--stdin", "--count", "1", "--", "wc", "-c"]);
    assert_eq!(shown.trim(), "3145728");
}

/// I1: a message is tried until its command succeeds.
#[test]
fn a_failed_command_is_tried_again_and_says_so() {
    let bench = Bench::new();
    bench.send(&["one"]);
    let script = "echo $RINGMAIN_ATTEMPT >> tried; test $RINGMAIN_ATTEMPT = 3";
    let output = bench.run(&[
        "--backoff",
        "10ms",
        "--exit-when-empty",
        "--",
        "sh",
        "-c",
        script,
        "_",
    ]);
    expect(123, &output);
    let tried: Vec<String> = bench.tally("tried").into_keys().collect();
    assert_eq!(tried, ["1", "2", "3"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(said.matches("exit code 1").count(), 2, "{said}");
    assert!(
        said.contains("again in 10ms") && said.contains("again in 20ms"),
        "{said}"
    );
}

#[test]
fn a_command_that_is_not_there_ends_the_worker_and_costs_no_message_an_attempt() {
    let bench = Bench::new();
    bench.send(&["one", "two"]);
    let output = bench.run(&["--", "./no-such-program"]);
    expect(2, &output);
    assert!(String::from_utf8_lossy(&output.stderr).contains("./no-such-program"));
    let attempts = "echo $RINGMAIN_ATTEMPT";
    let shown = bench.expect(0, &["--exit-when-empty", "--", "sh", "-c", attempts, "_"]);
    assert_eq!(shown, "1\n1\n");
}

/// I4: a command may take longer than a lease lasts, and is run once.
#[test]
fn the_lease_is_extended_while_the_command_runs() {
    let bench = Bench::new();
    bench.send(&["one"]);
    let script = "echo {} >> ran; until test -e go; do sleep 0.01; done";
    let worker = bench.spawn(&["--exit-when-empty", "--", "sh", "-c", script]);
    wait_until("it runs", || bench.path("ran").exists());
    // A second worker would be given the message when its lease ended.
    let other = bench.spawn(&["--", "sh", "-c", "echo other {} >> ran"]);
    let started = std::time::Instant::now();
    wait_until("three leases would have ended", || {
        assert_eq!(bench.broker.info("jobs").leased, 1, "it is held");
        started.elapsed().as_millis() > 900
    });
    std::fs::write(bench.path("go"), "").unwrap();
    expect(0, &worker.wait_with_output().unwrap());
    terminate(&other);
    expect(0, &other.wait_with_output().unwrap());
    assert_eq!(bench.tally("ran"), BTreeMap::from([("one".to_owned(), 1)]));
}

#[test]
fn so_many_commands_run_at_a_time() {
    let bench = Bench::new();
    bench.send(&["1", "2", "3"]);
    // Each waits for the two others.
    let script = "touch here{}; until test -e here1 -a -e here2 -a -e here3; do sleep 0.01; done";
    bench.expect(
        0,
        &[
            "--parallel",
            "3",
            "--exit-when-empty",
            "--",
            "sh",
            "-c",
            script,
        ],
    );
}

/// Not before messages that others work on, or that rest, are done.
#[test]
fn a_worker_that_exits_when_empty_waits_for_what_is_leased_and_delayed() {
    let bench = Bench::new();
    bench.send(&["one"]);
    let mut consumer = bench.broker.client().consumer("jobs").unwrap();
    let held = consumer.recv().unwrap();
    held.nack(std::time::Duration::from_millis(300)).unwrap();
    consumer.flush(Confirm::Stored).unwrap();
    drop(consumer);
    assert_eq!(
        bench.expect(0, &["--exit-when-empty", "--", "echo"]),
        "one\n"
    );
}

#[test]
fn what_commands_print_is_sent_and_what_can_not_be_sent_is_not_acked() {
    let bench = Bench::new();
    bench.send(&["3", "4"]);
    let square = [
        "--stdin",
        "--reply-to",
        "answers",
        "--exit-when-empty",
        "--",
        "sh",
        "-c",
        "read x; printf %s $((x * x))",
    ];
    assert_eq!(bench.expect(0, &square), "");
    let mut answers = bench.broker.client().consumer("answers").unwrap();
    let mut got: Vec<Vec<u8>> = (0..2)
        .map(|_| {
            let message = answers.recv().unwrap();
            let payload = message.payload().to_vec();
            message.ack().unwrap();
            payload
        })
        .collect();
    got.sort();
    assert_eq!(got, [b"16".to_vec(), b"9".to_vec()]);
    let small = QueueSettings {
        max_message_bytes: 3,
        ..QueueSettings::default()
    };
    bench.broker.create("small", &small);
    bench.send(&["long"]);
    let output = bench.run(&["--reply-to", "small", "--count", "1", "--", "echo"]);
    expect(123, &output);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("5 bytes, at most 3"), "{said}");
    assert_eq!(bench.broker.info("jobs").messages, 1, "I1");
}

#[test]
fn a_command_that_takes_too_long_is_ended() {
    let bench = Bench::new();
    bench.send(&["one"]);
    let script = "echo $$ > pid; exec sleep 1000";
    let output = bench.run(&[
        "--timeout",
        "100ms",
        "--count",
        "1",
        "--",
        "sh",
        "-c",
        script,
        "_",
    ]);
    expect(123, &output);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("longer than 100ms"), "{said}");
    assert_gone(&bench, "pid");
}

/// The process whose number a command has written is no more.
#[track_caller]
fn assert_gone(bench: &Bench, name: &str) {
    let text = std::fs::read_to_string(bench.path(name)).unwrap();
    let status = PathBuf::from(format!("/proc/{}/status", text.trim()));
    wait_until("the command has gone", || {
        let status = std::fs::read_to_string(&status).unwrap_or_default();
        status.is_empty() || status.contains("State:\tZ")
    });
}

#[test]
fn the_first_signal_lets_running_commands_end_and_gives_the_rest_back() {
    let bench = Bench::new();
    bench.send(&["one", "two", "three"]);
    let script = "echo {} >> ran; until test -e go; do sleep 0.01; done; echo {} >> done";
    let worker = bench.spawn(&["--parallel", "1", "--", "sh", "-c", script]);
    wait_until("it runs", || bench.path("ran").exists());
    terminate(&worker);
    // Nothing tells that a signal was taken in; that it ends nothing is seen in
    // the end.
    std::fs::write(bench.path("go"), "").unwrap();
    let output = worker.wait_with_output().unwrap();
    expect(0, &output);
    assert_eq!(
        bench.tally("ran"),
        bench.tally("done"),
        "nothing was cut off"
    );
    let done: u32 = bench.tally("done").values().sum();
    let left = wait_for("all is at rest", || {
        let info = bench.broker.info("jobs");
        (info.consumers == 0 && info.leased == 0).then_some(info.messages)
    });
    assert_eq!(u64::from(done) + left, 3, "I1");
}

#[test]
fn the_second_signal_ends_the_commands_too() {
    let bench = Bench::new();
    bench.send(&["one"]);
    let script = "echo $$ > pid.new; mv pid.new pid; exec sleep 1000";
    let worker = bench.spawn(&["--", "sh", "-c", script, "_"]);
    wait_until("it runs", || bench.path("pid").exists());
    // Two that come at once count as one.
    let mut worker = worker;
    wait_until("it ends", || {
        if worker.try_wait().unwrap().is_none() {
            terminate(&worker);
        }
        worker.try_wait().unwrap().is_some()
    });
    expect(143, &worker.wait_with_output().unwrap());
    assert_gone(&bench, "pid");
    let shown = bench.expect(0, &["--exit-when-empty", "--", "echo"]);
    assert_eq!(shown, "one\n", "I1");
}

/// I1, I6: workers are killed at random, and every message is worked on to the
/// end.
#[test]
fn killed_workers_lose_nothing() {
    let bench = Bench::new();
    let all: Vec<String> = (0..60).map(|n| format!("job-{n}")).collect();
    let payloads: Vec<&str> = all.iter().map(String::as_str).collect();
    bench.send(&payloads);
    let script = "sleep 0.01; echo {} >> done";
    let arguments = [
        "--parallel",
        "4",
        "--exit-when-empty",
        "--",
        "sh",
        "-c",
        script,
    ];
    for round in 1..=4u32 {
        let mut worker = bench.spawn(&arguments);
        wait_until("it has done some", || {
            bench.tally("done").len() as u32 >= round * 8
        });
        worker.kill().unwrap();
        worker.wait().unwrap();
    }
    bench.expect(0, &arguments);
    let done = bench.tally("done");
    assert_eq!(done.len(), all.len(), "each at least once: {done:?}");
    assert_eq!(bench.broker.info("jobs").messages, 0);
}

/// I6: the broker's death only delays.
#[test]
fn a_worker_survives_its_broker() {
    let mut bench = Bench::new();
    let all: Vec<String> = (0..40).map(|n| format!("job-{n}")).collect();
    let payloads: Vec<&str> = all.iter().map(String::as_str).collect();
    bench.send(&payloads);
    let script = "sleep 0.01; echo {} >> done";
    let worker = bench.spawn(&[
        "--parallel",
        "2",
        "--exit-when-empty",
        "--",
        "sh",
        "-c",
        script,
    ]);
    for round in 1..=2usize {
        wait_until("it has done some", || {
            bench.tally("done").len() >= round * 8
        });
        bench.broker.kill();
        bench.broker.restart();
    }
    expect(0, &worker.wait_with_output().unwrap());
    assert_eq!(bench.tally("done").len(), all.len());
}

#[test]
fn a_queue_that_is_not_there_and_wrong_options_are_told() {
    let bench = Bench::new();
    let broker = &bench.broker;
    expect(4, &broker.run(&["work", "none", "--", "true"]));
    expect(2, &broker.run(&["work", "jobs"]));
    expect(
        2,
        &broker.run(&["work", "jobs", "--stdin", "--file", "--", "cat"]),
    );
    expect(
        2,
        &broker.run(&["work", "jobs", "--parallel", "0", "--", "true"]),
    );
    expect(
        4,
        &broker.run(&["work", "jobs", "--reply-to", "none", "--", "true"]),
    );
}

#[test]
fn the_guide_is_true() {
    let printed = guide::run("docs/guide/work.md");
    assert!(printed.contains("HELLO"), "{printed}");
}
