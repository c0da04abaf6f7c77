//! The status board: what `stats` and `top` show, whatever the broker does.
#![allow(clippy::unwrap_used, reason = "a test that can't go on has failed")]
#![allow(clippy::print_stderr, reason = "logs are shown when a test fails")]

mod common;

use common::{BOUND, Broker, PROGRAM, guide, signal, wait_for, wait_until};
use nix::sys::signal::Signal;
use ringmain::{Confirm, ProducerOptions, QueueSettings};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Output, Stdio};

#[test]
fn child_process() {
    common::run_child();
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// What `stats --json` prints, and what it ends with.
#[track_caller]
fn stats(broker: &Broker) -> (i32, Value) {
    let output = broker.run(&["stats", "--json"]);
    let value = serde_json::from_slice(&output.stdout);
    let value = value.unwrap_or_else(|e| panic!("{e}: {}", text(&output)));
    (output.status.code().unwrap(), value)
}

/// Sends so many messages, and waits until the board shows them.
fn fill(broker: &Broker, queue: &str, count: u64) {
    let options = ProducerOptions::new().confirm(Confirm::Stored);
    let producer = broker.client().producer_with(queue, options).unwrap();
    producer
        .send_batch((0..count).map(|n| n.to_string()))
        .unwrap();
    wait_until("the board shows them", || {
        stats(broker).1["messages"] == count
    });
}

#[test]
fn the_guide_is_true() {
    let shown = guide::run("docs/guide/monitoring.md");
    assert!(
        shown.contains("in service") && shown.contains("orders"),
        "{shown}"
    );
}

#[test]
fn a_broker_that_stands_still_is_looked_at_all_the_same() {
    let broker = Broker::with_queue("jobs");
    fill(&broker, "jobs", 3);
    assert_eq!(stats(&broker).1["condition"], "serving");
    broker.pause();
    let (code, seen) = stats(&broker);
    assert_eq!((code, &seen["messages"]), (0, &3.into()));
    wait_until("it counts as stuck", || {
        stats(&broker).1["condition"] == "stuck"
    });
    let shown = text(&broker.run(&["stats"]));
    assert!(shown.contains("STUCK"), "{shown}");
    broker.resume();
    wait_until("it serves", || stats(&broker).1["condition"] == "serving");
}

// I7: a dead broker's board goes when the next one comes.
#[test]
fn a_dead_brokers_last_figures_stay_until_the_next_one_comes() {
    let mut broker = Broker::with_queue("jobs");
    fill(&broker, "jobs", 3);
    let board = broker.board_file().unwrap();
    assert!(board.exists());
    broker.kill();
    let (code, seen) = stats(&broker);
    assert_eq!((code, &seen["condition"]), (3, &"dead".into()));
    assert_eq!(seen["messages"], 3);
    let shown = text(&broker.run(&["stats"]));
    assert!(
        shown.contains("DEAD") && shown.contains("has died"),
        "{shown}"
    );

    broker.restart();
    assert!(!board.exists());
    let (code, seen) = stats(&broker);
    assert_eq!((code, &seen["condition"]), (0, &"serving".into()));
    assert_eq!(seen["messages"], 3);

    let board = broker.board_file().unwrap();
    broker.terminate();
    assert!(!board.exists() && !broker.board_note().exists());
    assert_eq!(broker.run(&["stats"]).status.code(), Some(3));
}

#[test]
fn queues_are_shown_with_their_backlog_and_its_age() {
    let mut broker = Broker::with_queue("jobs");
    fill(&broker, "jobs", 2000);
    broker.terminate();
    broker.restart();
    // Nobody consumes: the oldest is read for the board alone.
    let queue = wait_for("the oldest is known", || {
        let queue = stats(&broker).1["per_queue"][0].clone();
        queue["oldest_ms"].is_u64().then_some(queue)
    });
    assert_eq!(
        (&queue["name"], &queue["messages"]),
        (&"jobs".into(), &2000.into())
    );
    assert_eq!(
        (&queue["leased"], &queue["consumers"]),
        (&0.into(), &0.into())
    );
    let mut consumer = broker.client().consumer("jobs").unwrap();
    for number in 0..2000_u64 {
        let message = consumer.recv().unwrap();
        assert_eq!(message.payload(), number.to_string().as_bytes());
        message.ack().unwrap();
    }
    wait_until("it is drained", || {
        let queue = stats(&broker).1["per_queue"][0].clone();
        queue["messages"] == 0 && queue["acks"] == 2000 && queue["oldest_ms"].is_null()
    });
}

#[test]
fn a_board_grows_with_the_queues() {
    let broker = Broker::start();
    for number in 0..200 {
        broker.create(&format!("queue {number}"), &QueueSettings::default());
    }
    wait_until("all are shown", || {
        stats(&broker).1["per_queue"].as_array().unwrap().len() == 200
    });
    let file = broker.board_file().unwrap();
    assert!(file.metadata().unwrap().len() > 64 * 1024);
}

#[test]
fn what_is_no_board_is_told() {
    let broker = Broker::with_queue("jobs");
    let note = broker.board_note();
    let own = std::fs::read(&note).unwrap();
    for (content, told) in [
        ("/etc/passwd", "keeps no status board"),
        ("/ringmain-board-../passwd", "keeps no status board"),
        ("/ringmain-board-none", "keeps no status board"),
        ("", "keeps no status board"),
    ] {
        std::fs::write(&note, content).unwrap();
        let output = broker.run(&["stats"]);
        assert_eq!(output.status.code(), Some(1), "{content}");
        assert!(text(&output).contains(told), "{}", text(&output));
    }
    std::fs::write(&note, own).unwrap();
    let board = broker.board_file().unwrap();
    let bytes = std::fs::read(&board).unwrap();
    for length in [0, 8, 100] {
        std::fs::write(&board, &bytes[..length]).unwrap();
        let output = broker.run(&["stats"]);
        assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    }
    // I8: the broker goes on, with what is left of its board.
    fill_without_board(&broker);
}

fn fill_without_board(broker: &Broker) {
    let client = broker.client();
    let producer = client.producer("jobs").unwrap();
    let mut consumer = client.consumer("jobs").unwrap();
    wait_until("it has posted more than once", || {
        for _ in 0..100 {
            producer.send("x").unwrap();
            consumer.recv().unwrap().ack().unwrap();
        }
        broker.stats().uptime_ms > 1000
    });
}

#[test]
fn watch_prints_a_line_again_and_again_and_sees_the_broker_die_and_come() {
    let mut broker = Broker::with_queue("jobs");
    fill(&broker, "jobs", 7);
    let mut watch = broker.command(&["stats", "--watch=100ms"]).spawn().unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    let mut wait_line = |what: &str| {
        for line in lines.by_ref() {
            if line.unwrap().contains(what) {
                return;
            }
        }
        panic!("it ended without {what}");
    };
    wait_line("MESSAGES");
    wait_line("in service");
    broker.kill();
    wait_line("DEAD");
    broker.restart();
    wait_line("in service");
    broker.terminate();
    wait_line("no broker");
    signal(watch.id(), Signal::SIGINT);
    assert_eq!(watch.wait().unwrap().code(), Some(130));

    broker.restart();
    let mut watch = broker
        .command(&["stats", "--watch", "--json"])
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(watch.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let seen: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(seen["messages"], 7);
    watch.kill().unwrap();
    watch.wait().unwrap();
}

#[test]
fn top_prints_text_when_there_is_no_terminal() {
    let broker = Broker::with_queue("jobs");
    fill(&broker, "jobs", 3);
    let output = broker.run(&["top"]);
    let shown = text(&output);
    assert!(output.status.success(), "{shown}");
    assert!(
        shown.contains("in service") && shown.contains("jobs"),
        "{shown}"
    );
    assert!(!shown.contains('\u{1b}'), "{shown}");
}

/// Runs `top` in a terminal of its own, and gives all that it wrote there until it
/// ended. It is told these keys when it shows `jobs`.
fn top_in_a_terminal(broker: &Broker, keys: &str) -> (i32, String) {
    let mut command = Command::new("script");
    let inner = format!("stty rows 24 cols 100; exec {PROGRAM} top --interval 100ms");
    command
        .args([
            "--quiet",
            "--flush",
            "--return",
            "--command",
            &inner,
            "/dev/null",
        ])
        .env("RINGMAIN_SOCKET", broker.socket())
        .env("TERM", "xterm")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut child = common::dies_with_us(&mut command).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let mut seen = Vec::new();
    let started = std::time::Instant::now();
    let mut told = false;
    loop {
        let mut bytes = [0; 4096];
        let got = stdout.read(&mut bytes).unwrap();
        seen.extend_from_slice(&bytes[..got]);
        let shown = String::from_utf8_lossy(&seen).into_owned();
        if got == 0 {
            break;
        }
        if !told && shown.contains("jobs") {
            stdin.write_all(keys.as_bytes()).unwrap();
            told = true;
        }
        if started.elapsed() > BOUND {
            child.kill().unwrap();
        }
    }
    let ended = child.wait().unwrap().code();
    (
        ended.unwrap_or(-1),
        String::from_utf8_lossy(&seen).into_owned(),
    )
}

#[test]
fn top_fills_the_terminal_and_gives_it_back() {
    let broker = Broker::with_queue("jobs");
    fill(&broker, "jobs", 1234);
    for (keys, code) in [("q", 0), ("sssq", 0), ("\u{3}", 0)] {
        let (ended, shown) = top_in_a_terminal(&broker, keys);
        assert_eq!(ended, code, "{shown}");
        for piece in [
            "\u{1b}[?1049h",
            "MESSAGES",
            "1,234",
            "service",
            "\u{1b}[?1049l",
        ] {
            assert!(shown.contains(piece), "{piece:?}: {shown:?}");
        }
    }
}
