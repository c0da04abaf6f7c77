//! The command line as scripts use it: a real broker, real pipes, exit codes.

#![allow(clippy::unwrap_used, reason = "a test that can't go on has failed")]

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const PROGRAM: &str = env!("CARGO_BIN_EXE_ringmain");
const SOON: Duration = Duration::from_secs(10);

/// A broker in folders of its own.
struct Broker {
    process: Child,
    socket: PathBuf,
    folder: tempfile::TempDir,
    shm: tempfile::TempDir,
}

impl Broker {
    fn start() -> Broker {
        let folder = tempfile::tempdir().unwrap();
        let shm = tempfile::tempdir_in("/dev/shm").unwrap();
        let socket = folder.path().join("socket");
        let process = serve(folder.path(), shm.path(), &socket);
        Broker {
            process,
            socket,
            folder,
            shm,
        }
    }

    fn kill_and_restart(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        self.process = serve(self.folder.path(), self.shm.path(), &self.socket);
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(PROGRAM);
        command
            .args(arguments)
            .env("RINGMAIN_SOCKET", &self.socket)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Runs a command that must end with this code. Returns its output.
    fn expect(&self, code: i32, arguments: &[&str]) -> String {
        expect(code, &self.run(arguments), arguments)
    }

    fn feed(&self, input: &[u8], arguments: &[&str]) -> Output {
        let mut child = self
            .command(arguments)
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        // It may have had enough before the end.
        let _ = stdin.write_all(input);
        drop(stdin);
        child.wait_with_output().unwrap()
    }

    fn info(&self, queue: &str) -> Value {
        serde_json::from_str(&self.expect(0, &["queue", "info", queue, "--json"])).unwrap()
    }

    /// Waits until nothing is leased any more, and returns how many messages
    /// there are.
    fn messages_at_rest(&self, queue: &str) -> u64 {
        let deadline = Instant::now() + SOON;
        loop {
            let info = self.info(queue);
            if info["leased"] == 0 && info["consumers"] == 0 {
                return info["messages"].as_u64().unwrap();
            }
            assert!(Instant::now() < deadline, "{info}");
        }
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn serve(data: &Path, shm: &Path, socket: &Path) -> Child {
    let mut process = Command::new(PROGRAM)
        .arg("serve")
        .arg("--data-dir")
        .arg(data.join("data"))
        .arg("--shm-dir")
        .arg(shm)
        .arg("--socket")
        .arg(socket)
        .args(["--disk-reserve", "1MiB"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut output = BufReader::new(process.stdout.take().unwrap());
    output.read_line(&mut line).unwrap();
    assert_eq!(line.trim_end(), socket.to_str().unwrap());
    process
}

fn expect(code: i32, output: &Output, what: &[&str]) -> String {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{what:?}: {errors}");
    if code != 0 && code != 2 && code < 128 {
        assert!(errors.starts_with("ringmain: "), "{errors}");
        assert_eq!(errors.lines().count(), 1, "{errors}");
    }
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn signal(child: &Child, signal: Signal) {
    kill(Pid::from_raw(child.id() as i32), signal).unwrap();
}

#[test]
fn messages_go_in_and_come_out_once() {
    let broker = Broker::start();
    broker.expect(0, &["queue", "create", "jobs"]);
    let input = b"one\n\nth\xffree\nlast";
    assert!(broker.feed(input, &["send", "jobs"]).status.success());
    assert_eq!(broker.info("jobs")["messages"], 4);

    // Without --ack they return.
    let output = broker.run(&["recv", "jobs", "--wait", "300ms"]);
    assert_eq!(output.stdout, b"one\n\nth\xffree\nlast\n");
    assert_eq!(broker.messages_at_rest("jobs"), 4);

    let lines = broker.expect(0, &["recv", "jobs", "--json", "--ack"]);
    let lines: Vec<Value> = lines
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    assert_eq!(lines.len(), 4);
    assert_eq!(lines[0]["payload"], "one");
    assert_eq!(lines[0]["redelivered"], true);
    assert_eq!(lines[1]["payload"], "");
    assert_eq!(lines[2]["payload_hex"], "7468ff726565");
    assert!(lines[3]["sent_at_ms"].as_u64().unwrap() > 1_600_000_000_000);
    assert_eq!(broker.messages_at_rest("jobs"), 0);
}

#[test]
fn every_way_to_send_works() {
    let broker = Broker::start();
    broker.expect(0, &["queue", "create", "jobs"]);
    assert!(
        broker
            .feed(b"a\nb\0c\0", &["send", "jobs", "--null"])
            .status
            .success()
    );
    let file = broker.folder.path().join("file");
    std::fs::write(&file, "whole\nfile").unwrap();
    let file = file.to_str().unwrap();
    broker.expect(0, &["send", "jobs", "--file", file, "--file", file]);
    broker.expect(
        0,
        &[
            "send",
            "jobs",
            "--count",
            "3",
            "--size",
            "20B",
            "--confirm",
            "synced",
        ],
    );
    broker.expect(0, &["send", "jobs"]);
    let text = broker.expect(0, &["recv", "jobs", "--null", "--count", "7", "--ack"]);
    let messages: Vec<&str> = text.split_terminator('\0').collect();
    assert_eq!(messages[..4], ["a\nb", "c", "whole\nfile", "whole\nfile"]);
    assert!(messages[4..].iter().all(|m| m.len() == 20));
}

#[test]
fn exit_codes_tell_what_went_wrong() {
    let mut broker = Broker::start();
    broker.expect(0, &["queue", "create", "jobs", "--max-message-size", "10B"]);
    broker.expect(0, &["queue", "create", "jobs", "--max-message-size", "10B"]);
    broker.expect(1, &["queue", "create", "jobs"]);
    broker.expect(2, &["queue", "create", "a\tb"]);
    broker.expect(2, &["queue", "create", &"x".repeat(201)]);
    broker.expect(2, &["queue", "create", "x", "--visibility-timeout", "1ms"]);
    broker.expect(2, &["queue", "create", "x", "--visibility-timeout", "30"]);
    broker.expect(2, &["queue", "create", "x", "--max-message-size", "5GiB"]);
    broker.expect(2, &["recv", "jobs", "--follow"]);
    for arguments in [
        &["send", "none"][..],
        &["recv", "none"],
        &["queue", "info", "none"],
        &["queue", "delete", "none"],
    ] {
        broker.expect(4, arguments);
    }
    broker.expect(5, &["recv", "jobs", "--wait", "50ms"]);
    broker.expect(0, &["send", "jobs", "--count", "1", "--size", "10B"]);
    broker.expect(5, &["recv", "jobs", "--count", "2", "--wait", "50ms"]);
    broker.expect(7, &["send", "jobs", "--count", "1", "--size", "11B"]);
    broker.expect(0, &["queue", "delete", "jobs"]);
    broker.process.kill().unwrap();
    broker.process.wait().unwrap();
    for arguments in [
        &["send", "jobs"][..],
        &["recv", "jobs"],
        &["stats"],
        &["queue", "list"],
    ] {
        broker.expect(3, arguments);
    }
}

#[test]
fn a_line_too_long_is_named_and_those_before_it_are_stored() {
    let broker = Broker::start();
    broker.expect(0, &["queue", "create", "jobs", "--max-message-size", "5B"]);
    let output = broker.feed(b"12345\n123456\n1\n", &["send", "jobs"]);
    expect(7, &output, &["send"]);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(
        errors.contains("line 2") && errors.contains("1 message(s) are stored"),
        "{errors}"
    );
    assert_eq!(broker.info("jobs")["messages"], 1);
}

#[test]
fn a_closed_pipe_ends_recv_and_what_was_not_acked_returns() {
    let broker = Broker::start();
    broker.expect(0, &["queue", "create", "jobs"]);
    broker.expect(0, &["send", "jobs", "--count", "20000", "--size", "100B"]);
    let mut recv = broker
        .command(&["recv", "jobs", "--ack", "--follow"])
        .spawn()
        .unwrap();
    let mut some = [0; 1000];
    recv.stdout.take().unwrap().read_exact(&mut some).unwrap();
    let output = recv.wait_with_output().unwrap();
    assert_eq!(expect(0, &output, &["recv"]), "");
    assert!(output.stderr.is_empty());
    let left = broker.messages_at_rest("jobs");
    // A pipe holds 64 KiB, and a batch may have been on its way into it.
    assert!((18_000..20_000).contains(&left), "{left}");
}

#[test]
fn signals_end_recv_and_send_in_order() {
    let broker = Broker::start();
    broker.expect(0, &["queue", "create", "jobs"]);
    for (number, code) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143)] {
        let mut send = broker
            .command(&["send", "jobs"])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = send.stdin.take().unwrap();
        stdin.write_all(b"one\ntwo\n").unwrap();
        while broker.info("jobs")["messages"] != 2 {}
        signal(&send, number);
        let output = send.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code));
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(errors.contains("2 message(s) are stored"), "{errors}");

        let mut recv = broker
            .command(&["recv", "jobs", "--ack", "--follow"])
            .spawn()
            .unwrap();
        let mut text = [0; 8];
        recv.stdout.as_mut().unwrap().read_exact(&mut text).unwrap();
        signal(&recv, number);
        assert_eq!(recv.wait().unwrap().code(), Some(code));
        assert_eq!(broker.messages_at_rest("jobs"), 0);
    }
}

#[test]
fn commands_go_on_through_the_brokers_death() {
    let mut broker = Broker::start();
    broker.expect(0, &["queue", "create", "jobs"]);
    let mut send = broker
        .command(&["send", "jobs"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let recv = broker.command(&["recv", "jobs", "--ack", "--count", "20000", "--wait", "20s"]);
    let recv = { recv }.spawn().unwrap();
    let mut stdin = send.stdin.take().unwrap();
    let lines =
        |range: std::ops::Range<u32>| -> String { range.map(|n| format!("{n}\n")).collect() };
    stdin.write_all(lines(0..10_000).as_bytes()).unwrap();
    // Both must be in a session: who connects in that moment gets an error.
    while broker.info("jobs")["producers"] != 1 || broker.info("jobs")["consumers"] != 1 {}
    broker.kill_and_restart();
    stdin.write_all(lines(10_000..20_000).as_bytes()).unwrap();
    drop(stdin);
    assert!(send.wait().unwrap().success());
    let output = recv.wait_with_output().unwrap();
    assert_eq!(expect(0, &output, &["recv"]), lines(0..20_000));
}

#[test]
fn what_is_printed_can_be_read_by_people_and_programs() {
    let broker = Broker::start();
    broker.expect(
        0,
        &[
            "queue",
            "create",
            "b",
            "--visibility-timeout",
            "5m",
            "--confirm",
            "stored",
        ],
    );
    broker.expect(0, &["queue", "create", "a b"]);
    let list = broker.expect(0, &["queue", "list"]);
    let names: Vec<&str> = list.lines().map(|line| &line[..3]).collect();
    assert_eq!(names, ["NAM", "a b", "b  "]);
    let list: Value =
        serde_json::from_str(&broker.expect(0, &["queue", "list", "--json"])).unwrap();
    assert_eq!(list[1]["settings"]["visibility_timeout_ms"], 300_000);
    assert_eq!(list[1]["settings"]["confirm"], "stored");
    let stats: Value = serde_json::from_str(&broker.expect(0, &["stats", "--json"])).unwrap();
    assert_eq!(stats["queues"], 2);
    assert!(broker.expect(0, &["stats"]).contains("synced round"));
    assert!(broker.expect(0, &["--version"]).starts_with("ringmain "));
    let version: Value = serde_json::from_str(&broker.expect(0, &["version", "--json"])).unwrap();
    assert_eq!(version["protocol"], 1);
    assert!(broker.expect(0, &["--help"]).contains("Exit codes"));
}

#[test]
fn a_second_broker_is_refused_and_a_stopped_one_leaves_no_socket() {
    let mut broker = Broker::start();
    let second = Command::new(PROGRAM)
        .args(["serve", "--data-dir"])
        .arg(broker.folder.path().join("data"))
        .arg("--shm-dir")
        .arg(broker.shm.path())
        .arg("--socket")
        .arg(broker.folder.path().join("socket2"))
        .args(["--log-level", "error"])
        .output()
        .unwrap();
    expect(1, &second, &["serve"]);
    broker.expect(0, &["queue", "list"]);
    signal(&broker.process, Signal::SIGTERM);
    assert!(broker.process.wait().unwrap().success());
    assert!(!broker.socket.exists());
}

#[test]
fn the_demo_loses_nothing() {
    let demo = Command::new(PROGRAM)
        .args(["demo", "--json", "--messages", "60000"])
        .output()
        .unwrap();
    let report: Value = serde_json::from_str(&expect(0, &demo, &["demo"])).unwrap();
    // A producer that is done before its time has come is spared.
    assert!(report["kills"].as_array().unwrap().len() >= 2);
    let certain = report["sent"].as_u64().unwrap();
    assert_eq!(certain + report["in_doubt"].as_u64().unwrap(), 60_000);
    assert_eq!(report["delivered"].as_u64().unwrap(), certain);
    for fault in ["lost", "out_of_order", "duplicated", "damaged"] {
        assert_eq!(report[fault], 0, "{fault}");
    }
}
