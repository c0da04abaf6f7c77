//! The command line as scripts use it: a real broker, real pipes, exit codes.

#![allow(clippy::unwrap_used, reason = "a test that can't go on has failed")]
#![allow(clippy::print_stderr, reason = "logs are shown when a test fails")]

mod common;

use common::{Broker, PROGRAM, wait_for, wait_until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Output, Stdio};

/// Runs a command that must end with this code. Returns its output.
#[track_caller]
fn expect_run(broker: &Broker, code: i32, arguments: &[&str]) -> String {
    expect(code, &broker.run(arguments), arguments)
}

#[track_caller]
fn feed(broker: &Broker, input: &[u8], arguments: &[&str]) -> Output {
    let mut child = broker
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

#[track_caller]
fn info(broker: &Broker, queue: &str) -> Value {
    serde_json::from_str(&expect_run(broker, 0, &["queue", "info", queue, "--json"])).unwrap()
}

/// Waits until nothing is leased any more, and returns how many messages there
/// are.
#[track_caller]
fn messages_at_rest(broker: &Broker, queue: &str) -> u64 {
    wait_for("nothing is leased", || {
        let info = broker.info(queue);
        (info.leased == 0 && info.consumers == 0).then_some(info.messages)
    })
}

#[track_caller]
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
    expect_run(&broker, 0, &["queue", "create", "jobs"]);
    let input = b"one\n\nth\xffree\nlast";
    assert!(feed(&broker, input, &["send", "jobs"]).status.success());
    assert_eq!(info(&broker, "jobs")["messages"], 4);

    // Without --ack they return.
    let output = broker.run(&["recv", "jobs", "--wait", "300ms"]);
    assert_eq!(output.stdout, b"one\n\nth\xffree\nlast\n");
    assert_eq!(messages_at_rest(&broker, "jobs"), 4);

    let lines = expect_run(&broker, 0, &["recv", "jobs", "--json", "--ack"]);
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
    assert_eq!(messages_at_rest(&broker, "jobs"), 0);
}

#[test]
fn every_way_to_send_works() {
    let broker = Broker::start();
    expect_run(&broker, 0, &["queue", "create", "jobs"]);
    assert!(
        feed(&broker, b"a\nb\0c\0", &["send", "jobs", "--null"])
            .status
            .success()
    );
    let file = broker.folder().join("file");
    std::fs::write(&file, "whole\nfile").unwrap();
    let file = file.to_str().unwrap();
    expect_run(
        &broker,
        0,
        &["send", "jobs", "--file", file, "--file", file],
    );
    expect_run(
        &broker,
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
    expect_run(&broker, 0, &["send", "jobs"]);
    let text = expect_run(
        &broker,
        0,
        &["recv", "jobs", "--null", "--count", "7", "--ack"],
    );
    let messages: Vec<&str> = text.split_terminator('\0').collect();
    assert_eq!(messages[..4], ["a\nb", "c", "whole\nfile", "whole\nfile"]);
    assert!(messages[4..].iter().all(|m| m.len() == 20));
}

#[test]
fn exit_codes_tell_what_went_wrong() {
    let mut broker = Broker::start();
    expect_run(
        &broker,
        0,
        &["queue", "create", "jobs", "--max-message-size", "10B"],
    );
    expect_run(
        &broker,
        0,
        &["queue", "create", "jobs", "--max-message-size", "10B"],
    );
    expect_run(&broker, 1, &["queue", "create", "jobs"]);
    expect_run(&broker, 2, &["queue", "create", "a\tb"]);
    expect_run(&broker, 2, &["queue", "create", &"x".repeat(201)]);
    expect_run(
        &broker,
        2,
        &["queue", "create", "x", "--visibility-timeout", "1ms"],
    );
    expect_run(
        &broker,
        2,
        &["queue", "create", "x", "--visibility-timeout", "30"],
    );
    expect_run(
        &broker,
        2,
        &["queue", "create", "x", "--max-message-size", "5GiB"],
    );
    expect_run(&broker, 2, &["recv", "jobs", "--follow"]);
    for arguments in [
        &["send", "none"][..],
        &["recv", "none"],
        &["queue", "info", "none"],
        &["queue", "delete", "none"],
    ] {
        expect_run(&broker, 4, arguments);
    }
    expect_run(&broker, 5, &["recv", "jobs", "--wait", "50ms"]);
    expect_run(
        &broker,
        0,
        &["send", "jobs", "--count", "1", "--size", "10B"],
    );
    expect_run(
        &broker,
        5,
        &["recv", "jobs", "--count", "2", "--wait", "50ms"],
    );
    expect_run(
        &broker,
        7,
        &["send", "jobs", "--count", "1", "--size", "11B"],
    );
    expect_run(&broker, 0, &["queue", "delete", "jobs"]);
    broker.kill();
    for arguments in [
        &["send", "jobs"][..],
        &["recv", "jobs"],
        &["stats"],
        &["queue", "list"],
    ] {
        expect_run(&broker, 3, arguments);
    }
}

#[test]
fn a_line_too_long_is_named_and_those_before_it_are_stored() {
    let broker = Broker::start();
    expect_run(
        &broker,
        0,
        &["queue", "create", "jobs", "--max-message-size", "5B"],
    );
    let output = feed(&broker, b"12345\n123456\n1\n", &["send", "jobs"]);
    expect(7, &output, &["send"]);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(
        errors.contains("line 2") && errors.contains("1 message(s) are stored"),
        "{errors}"
    );
    assert_eq!(info(&broker, "jobs")["messages"], 1);
}

#[test]
fn a_closed_pipe_ends_recv_and_what_was_not_acked_returns() {
    let broker = Broker::start();
    expect_run(&broker, 0, &["queue", "create", "jobs"]);
    expect_run(
        &broker,
        0,
        &["send", "jobs", "--count", "20000", "--size", "100B"],
    );
    let mut recv = broker
        .command(&["recv", "jobs", "--ack", "--follow"])
        .spawn()
        .unwrap();
    let mut some = [0; 1000];
    recv.stdout.take().unwrap().read_exact(&mut some).unwrap();
    let output = recv.wait_with_output().unwrap();
    assert_eq!(expect(0, &output, &["recv"]), "");
    assert!(output.stderr.is_empty());
    let left = messages_at_rest(&broker, "jobs");
    // A pipe holds 64 KiB, and a batch may have been on its way into it.
    assert!((18_000..20_000).contains(&left), "{left}");
}

#[test]
fn signals_end_recv_and_send_in_order() {
    let broker = Broker::start();
    expect_run(&broker, 0, &["queue", "create", "jobs"]);
    for (number, code) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143)] {
        let mut send = broker
            .command(&["send", "jobs"])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = send.stdin.take().unwrap();
        stdin.write_all(b"one\ntwo\n").unwrap();
        wait_until("both are stored", || broker.info("jobs").messages == 2);
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
        assert_eq!(messages_at_rest(&broker, "jobs"), 0);
    }
}

#[test]
fn commands_go_on_through_the_brokers_death() {
    let mut broker = Broker::start();
    expect_run(&broker, 0, &["queue", "create", "jobs"]);
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
    wait_until("both are there", || {
        let info = broker.info("jobs");
        (info.producers, info.consumers) == (1, 1)
    });
    broker.kill();
    broker.restart();
    stdin.write_all(lines(10_000..20_000).as_bytes()).unwrap();
    drop(stdin);
    assert!(send.wait().unwrap().success());
    let output = recv.wait_with_output().unwrap();
    assert_eq!(expect(0, &output, &["recv"]), lines(0..20_000));
}

#[test]
fn what_is_printed_can_be_read_by_people_and_programs() {
    let broker = Broker::start();
    expect_run(
        &broker,
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
    expect_run(&broker, 0, &["queue", "create", "a b"]);
    let list = expect_run(&broker, 0, &["queue", "list"]);
    let names: Vec<&str> = list.lines().map(|line| &line[..3]).collect();
    assert_eq!(names, ["NAM", "a b", "b  "]);
    let list: Value =
        serde_json::from_str(&expect_run(&broker, 0, &["queue", "list", "--json"])).unwrap();
    assert_eq!(list[1]["settings"]["visibility_timeout_ms"], 300_000);
    assert_eq!(list[1]["settings"]["confirm"], "stored");
    wait_until("the status board shows both", || {
        let stats = expect_run(&broker, 0, &["stats", "--json"]);
        serde_json::from_str::<Value>(&stats).unwrap()["queues"] == 2
    });
    assert!(expect_run(&broker, 0, &["stats"]).contains("synced round"));
    assert!(expect_run(&broker, 0, &["--version"]).starts_with("ringmain "));
    let version: Value =
        serde_json::from_str(&expect_run(&broker, 0, &["version", "--json"])).unwrap();
    assert_eq!(version["protocol"], 1);
    assert!(expect_run(&broker, 0, &["--help"]).contains("Exit codes"));
}

#[test]
fn a_second_broker_is_refused_and_a_stopped_one_leaves_no_socket() {
    let mut broker = Broker::start();
    let second = Command::new(PROGRAM)
        .args(["serve", "--data-dir"])
        .arg(broker.data_dir())
        .arg("--shm-dir")
        .arg(broker.shm_dir())
        .arg("--socket")
        .arg(broker.folder().join("socket2"))
        .args(["--log-level", "error"])
        .output()
        .unwrap();
    expect(1, &second, &["serve"]);
    expect_run(&broker, 0, &["queue", "list"]);
    broker.terminate();
    assert!(!broker.socket().exists());
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

/// Runs a line of shell, as people type it.
#[track_caller]
fn shell(broker: &Broker, line: &str) -> Output {
    let path = std::path::Path::new(PROGRAM).parent().unwrap();
    let path = format!("{}:{}", path.display(), std::env::var("PATH").unwrap());
    let mut command = Command::new("bash");
    command
        .args(["-o", "pipefail", "-c", line])
        .env("PATH", path)
        .env("RINGMAIN_SOCKET", broker.socket())
        .stdin(Stdio::null());
    command.output().unwrap()
}

#[test]
fn what_the_documentation_shows_can_be_typed() {
    let broker = Broker::start();
    let file = broker.folder().join("report");
    std::fs::write(&file, "a report").unwrap();
    let find = "find /usr/bin /usr/lib -maxdepth 1 -type f";
    let lines = |output: &Output| output.stdout.iter().filter(|&&byte| byte == b'\n').count();
    let run = |line: &str| {
        let output = shell(&broker, line);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            output.status.success(),
            "{line}: {:?} {errors}",
            output.status
        );
        assert!(errors.is_empty(), "{line}: {errors}");
        output
    };
    let found = lines(&run(find));
    assert!(found > 100);
    run("ringmain queue create jobs");
    run(&format!("{find} | ringmain send jobs"));
    assert_eq!(broker.info("jobs").messages, found as u64);
    assert_eq!(lines(&run("ringmain recv jobs --count 10 --ack")), 10);
    assert_eq!(messages_at_rest(&broker, "jobs"), found as u64 - 10);
    // All come back, and again all.
    for _ in 0..2 {
        assert_eq!(lines(&run("ringmain recv jobs --wait 200ms")), found - 10);
    }
    assert_eq!(messages_at_rest(&broker, "jobs"), found as u64 - 10);
    run("ringmain queue list");
    run("ringmain queue info jobs");
    run("ringmain stats");
    run("ringmain stats --json");
    run("ringmain queue delete jobs");
    run(
        "ringmain queue create --visibility-timeout 5m --max-message-size 64KiB --confirm synced big",
    );
    run(&format!("ringmain send big --file {}", file.display()));
    run("ringmain send big --count 5 --size 60KiB");
    assert_eq!(lines(&run("ringmain recv big --ack --count 6")), 6);
    let script = "ringmain recv big --wait 10ms; test $? -eq 5; ringmain recv none; test $? -eq 4";
    shell(&broker, script);
}

#[test]
fn any_bytes_come_back_as_they_were_sent() {
    let broker = Broker::with_queue("jobs");
    // Every byte but the one that ends a message.
    let mut input = Vec::new();
    for length in [0, 1, 255, 256, 4000, 15 * 1024] {
        input.extend((0..length).map(|at| (at % 255 + 1) as u8));
        input.push(0);
    }
    assert!(
        feed(&broker, &input, &["send", "jobs", "--null"])
            .status
            .success()
    );
    let output = broker.run(&["recv", "jobs", "--null", "--ack", "--count", "6"]);
    expect(0, &output, &["recv"]);
    assert!(output.stdout == input, "{} bytes", output.stdout.len());

    // From one program to the next, at once.
    let line = "{ head -c 300000 /dev/urandom | tr -d '\\0' | fold -b -w 997 | tr '\\n' '\\0'; \
        printf '\\0'; } > bytes; \
        ringmain send jobs --null < bytes; \
        ringmain recv jobs --null --ack --wait 200ms | cmp - bytes";
    let output = shell(
        &broker,
        &format!("cd {}; {line}", broker.folder().display()),
    );
    assert!(output.status.success(), "{output:?}");

    // A file is taken whole, whatever is in it.
    let file = broker.folder().join("file");
    let bytes: Vec<u8> = (0..=255).collect();
    std::fs::write(&file, &bytes).unwrap();
    expect_run(
        &broker,
        0,
        &["send", "jobs", "--file", file.to_str().unwrap()],
    );
    let output = broker.run(&["recv", "jobs", "--ack", "--count", "1"]);
    assert_eq!(output.stdout, [&bytes[..], b"\n"].concat());
}

#[test]
fn send_and_recv_meet_in_the_middle() {
    let broker = Broker::with_queue("jobs");
    let line = "ringmain recv jobs --ack --count 20000 --wait 20s > received & \
        seq 20000 | ringmain send jobs && wait $! && seq 20000 | cmp - received";
    let output = shell(
        &broker,
        &format!("cd {}; {line}", broker.folder().display()),
    );
    assert!(output.status.success(), "{output:?}");
    assert_eq!(broker.info("jobs").messages, 0);
}

#[test]
fn head_takes_what_it_wants_and_the_rest_returns() {
    let broker = Broker::with_queue("jobs");
    expect_run(
        &broker,
        0,
        &["send", "jobs", "--count", "5000", "--size", "100B"],
    );
    let output = shell(&broker, "ringmain recv jobs | head -1");
    assert!(output.status.success(), "{output:?}");
    assert!(output.stdout.starts_with(b"message 1 "));
    assert_eq!(messages_at_rest(&broker, "jobs"), 5000);
    // What has no room to be written is not acked.
    let mut recv = broker.command(&["recv", "jobs", "--ack"]);
    let output = recv
        .stdout(File::create("/dev/full").unwrap())
        .output()
        .unwrap();
    expect(1, &output, &["recv"]);
    assert_eq!(messages_at_rest(&broker, "jobs"), 5000);
    // Nor is what nobody ever read.
    let mut recv = broker
        .command(&["recv", "jobs", "--ack", "--follow"])
        .spawn()
        .unwrap();
    drop(recv.stdout.take());
    assert!(recv.wait().unwrap().success());
    assert_eq!(messages_at_rest(&broker, "jobs"), 5000);
}

#[test]
fn everything_that_is_printed_as_json_parses() {
    let broker = Broker::with_queue("jobs");
    expect_run(&broker, 0, &["send", "jobs", "--count", "3"]);
    let json = |arguments: &[&str]| -> Value {
        serde_json::from_str(&expect_run(&broker, 0, arguments)).unwrap()
    };
    let list = json(&["queue", "list", "--json"]);
    assert_eq!(list[0], json(&["queue", "info", "jobs", "--json"]));
    assert_eq!(list[0]["messages"], 3);
    assert_eq!(list[0]["settings"]["confirm"], "accepted");
    wait_until("the status board shows them", || {
        let stats = json(&["stats", "--json"]);
        (&stats["messages"], &stats["sends"]) == (&3.into(), &3.into())
    });
    assert!(json(&["version", "--json"])["version"].is_string());
    let lines = expect_run(&broker, 0, &["recv", "jobs", "--json", "--wait", "100ms"]);
    let ids: Vec<Value> = lines
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["id"].clone())
        .collect();
    assert_eq!(ids.len(), 3);
    assert!(ids.iter().all(Value::is_string));
}

#[test]
fn every_command_explains_itself() {
    let broker = Broker::new();
    for command in [
        &["serve"][..],
        &["queue"],
        &["queue", "create"],
        &["queue", "list"],
        &["queue", "info"],
        &["queue", "delete"],
        &["send"],
        &["recv"],
        &["stats"],
        &["top"],
        &["demo"],
        &["version"],
    ] {
        let help = [command, &["--help"]].concat();
        let text = expect_run(&broker, 0, &help);
        assert!(
            text.contains("Example") && text.contains("ringmain "),
            "{command:?}: {text}"
        );
        assert!(
            text.contains("--socket") || command == ["demo"],
            "{command:?}"
        );
    }
    // Without a command, and with one that there is not.
    assert_eq!(broker.run(&[]).status.code(), Some(2));
    assert_eq!(broker.run(&["fly"]).status.code(), Some(2));
}

#[test]
fn serve_obeys_both_signals_and_says_nothing_but_its_socket() {
    for number in [Signal::SIGINT, Signal::SIGTERM] {
        let broker = Broker::new();
        let mut command =
            common::serve_command(&broker.data_dir(), &broker.shm_dir(), &broker.socket());
        let mut serve = command.args(["--log-format", "json"]).spawn().unwrap();
        let mut output = BufReader::new(serve.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        assert_eq!(line, format!("{}\n", broker.socket().display()));
        expect_run(&broker, 0, &["queue", "create", "jobs"]);
        expect_run(&broker, 0, &["send", "jobs", "--count", "10"]);
        // A client that is there does not keep it.
        let mut recv = broker
            .command(&["recv", "jobs", "--ack", "--follow"])
            .spawn()
            .unwrap();
        wait_until("it is there", || broker.info("jobs").consumers == 1);
        signal(&serve, number);
        let log = serve.wait_with_output().unwrap();
        assert_eq!(log.status.code(), Some(0));
        assert!(!broker.socket().exists());
        let mut rest = String::new();
        output.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "");
        let log = String::from_utf8(log.stderr).unwrap();
        let events: Vec<Value> = log
            .lines()
            .map(|l| serde_json::from_str(l).unwrap())
            .collect();
        assert!(
            events.iter().any(|event| event["message"] == "in service"),
            "{log}"
        );
        assert!(
            events.iter().any(|event| event["message"] == "stopped"),
            "{log}"
        );
        recv.kill().unwrap();
        recv.wait().unwrap();
    }
}

#[test]
fn folders_and_socket_are_found_by_variable_option_and_default() {
    let broker = Broker::new();
    let home = broker.folder().join("home");
    let run = home.join("run");
    std::fs::create_dir_all(&run).unwrap();
    let with_home = |arguments: &[&str]| {
        let mut command = Command::new(PROGRAM);
        command
            .args(arguments)
            .env_remove("RINGMAIN_SOCKET")
            .env("XDG_RUNTIME_DIR", &run)
            .env("XDG_DATA_HOME", home.join("share"))
            .env("RINGMAIN_SHM_DIR", broker.shm_dir())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        common::dies_with_us(&mut command);
        command
    };
    let output = with_home(&["queue", "list"]).output().unwrap();
    expect(3, &output, &["list"]);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        errors.contains("ringmain.sock") && errors.contains("ringmain serve"),
        "{errors}"
    );

    let mut serve = with_home(&["serve", "--disk-reserve", "1MiB"])
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut stdout = BufReader::new(serve.stdout.take().unwrap());
    stdout.read_line(&mut line).unwrap();
    let socket = run.join("ringmain/ringmain.sock");
    assert_eq!(line.trim_end(), socket.to_str().unwrap());
    assert!(home.join("share/ringmain/rocksdb").is_dir());
    assert!(broker.shm_dir().join("ledger").is_file());
    let create = with_home(&["queue", "create", "jobs"]).output().unwrap();
    expect(0, &create, &["create"]);
    // The option counts more than the variable.
    let mut list = with_home(&["queue", "list", "--socket", socket.to_str().unwrap()]);
    let list = list
        .env("RINGMAIN_SOCKET", "/nonexistent")
        .output()
        .unwrap();
    assert!(expect(0, &list, &["list"]).contains("jobs"));
    let list = with_home(&["queue", "list"])
        .env("RINGMAIN_SOCKET", "/nonexistent")
        .output();
    expect(3, &list.unwrap(), &["list"]);
    signal(&serve, Signal::SIGTERM);
    assert!(serve.wait().unwrap().success());
}

#[test]
fn a_queue_deleted_under_recv_ends_it() {
    let broker = Broker::with_queue("jobs");
    let recv = broker
        .command(&["recv", "jobs", "--ack", "--follow"])
        .spawn()
        .unwrap();
    wait_until("it is there", || broker.info("jobs").consumers == 1);
    expect_run(&broker, 0, &["queue", "delete", "jobs"]);
    let output = recv.wait_with_output().unwrap();
    expect(4, &output, &["recv"]);
}

#[test]
fn a_send_that_waits_for_room_ends_on_a_signal_and_says_what_is_stored() {
    let mut broker = Broker::with_queue("jobs");
    let mut send = broker
        .command(&["send", "jobs"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = send.stdin.take().unwrap();
    stdin.write_all(b"first\n").unwrap();
    wait_until("it is there", || broker.info("jobs").messages == 1);
    broker.kill();
    // More than its ring and its pipe hold.
    let feeder = std::thread::spawn(move || {
        let _ = stdin.write_all(&b"more of the same\n".repeat(100_000));
    });
    let pid = send.id() as i32;
    common::wait_asleep(pid, pid);
    signal(&send, Signal::SIGTERM);
    let started = std::time::Instant::now();
    let output = { send }.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(143));
    assert!(
        started.elapsed() < std::time::Duration::from_secs(9),
        "{:?}",
        started.elapsed()
    );
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains("not all confirmed"), "{errors}");
    feeder.join().unwrap();
    // What it had sent is there all the same.
    broker.restart();
    assert!(messages_at_rest(&broker, "jobs") > 1000);
}
