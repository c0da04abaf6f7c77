//! Input that is wrong, from users, clients and disks: each is refused with an
//! error that names what is wrong, and disturbs nobody else.

#![allow(clippy::unwrap_used, reason = "a test that can't go on has failed")]
#![allow(clippy::print_stderr, reason = "logs are shown when a test fails")]

mod common;

use common::{
    Broker, Kind, Role, SmallFileSystem, Witness, files, payload, scramble, skip, wait_until,
};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use ringmain::control::{LINE_BYTES_MAX, MESSAGE_BYTES_LIMIT, WINDOW_MAX};
use ringmain::{Client, Confirm, Error, ErrorCode, QueueSettings};
use serde_json::{Value, json};
use std::fs::{File, OpenOptions, Permissions};
use std::io::{BufRead, BufReader, IoSlice, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// Not a test: what the children run.
#[test]
fn child_process() {
    common::run_child();
}

/// Names that no queue can have, and what is said of them.
fn bad_names() -> Vec<(String, &'static str)> {
    let bad = |name: &str, wrong| (name.to_owned(), wrong);
    vec![
        bad("", "is empty"),
        ("x".repeat(201), "is longer than 200 bytes"),
        // 67 characters of 3 bytes.
        ("☂".repeat(67), "is longer than 200 bytes"),
        ("x".repeat(100_000), "is longer than 200 bytes"),
        bad("a\tb", "has a control character"),
        bad("a\nb", "has a control character"),
        bad("a\0b", "has a control character"),
        bad("\u{1b}[31mred", "has a control character"),
        bad("a\u{7f}", "has a control character"),
        bad("a\u{85}b", "has a control character"),
        bad(" a", "begins or ends with white space"),
        bad("a ", "begins or ends with white space"),
        bad(" ", "begins or ends with white space"),
        bad("\u{a0}a", "begins or ends with white space"),
        bad("a\u{3000}", "begins or ends with white space"),
    ]
}

fn good_names() -> Vec<String> {
    let mut names: Vec<String> = [
        "a",
        "a b",
        "a/b",
        "../a",
        "--all",
        "größer",
        "☂☂",
        "a\"b\\c",
        "日本語",
        "👩‍🚀",
        "%00",
        "null",
    ]
    .map(str::to_owned)
    .to_vec();
    names.push("x".repeat(200));
    names.push(format!("{}xx", "☂".repeat(66)));
    names
}

#[track_caller]
fn expect_error<T>(outcome: ringmain::Result<T>, code: ErrorCode, said: &str) {
    let error = match outcome {
        Ok(_) => panic!("no error; expected: {said}"),
        Err(error) => error,
    };
    let text = error.to_string();
    assert_eq!(error.code(), code, "{text}");
    assert!(text.contains(said), "{text:?} does not say {said:?}");
    assert!(!text.chars().any(char::is_control), "{text:?}");
    assert!(text.len() < 600, "{text:?}");
}

/// The control socket without the library.
struct Raw {
    stream: UnixStream,
    reader: BufReader<UnixStream>,
}

impl Raw {
    fn connect(broker: &Broker) -> Raw {
        let stream = UnixStream::connect(broker.socket()).unwrap();
        stream.set_read_timeout(Some(common::BOUND)).unwrap();
        stream.set_write_timeout(Some(common::BOUND)).unwrap();
        let reader = BufReader::new(stream.try_clone().unwrap());
        Raw { stream, reader }
    }

    fn greeted(broker: &Broker) -> Raw {
        let mut raw = Raw::connect(broker);
        let hello = raw.ask(&json!({"op": "hello", "protocol": 1}));
        assert_eq!(hello["ok"]["pid"], broker.pid(), "{hello}");
        raw
    }

    /// Writes bytes, however many the broker still takes.
    fn write(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes);
    }

    /// The next line, or `None` at the end.
    fn line(&mut self) -> Option<Value> {
        let mut line = String::new();
        match self.reader.read_line(&mut line) {
            Ok(0) => None,
            Ok(_) => Some(serde_json::from_str(&line).unwrap()),
            // What was not read is thrown away with the connection.
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => None,
            Err(e) => panic!("{e}"),
        }
    }

    fn ask(&mut self, request: &Value) -> Value {
        self.write(format!("{request}\n").as_bytes());
        self.line().expect("an answer")
    }

    #[track_caller]
    fn refused(&mut self, request: &Value, code: &str, said: &str) {
        let reply = self.ask(request);
        assert_eq!(reply["error"]["code"], code, "{request}: {reply}");
        let text = reply["error"]["message"].as_str().unwrap();
        assert!(
            text.contains(said),
            "{request}: {text:?} does not say {said:?}"
        );
    }
}

#[test]
fn odd_names_are_names_and_bad_ones_are_refused_by_client_and_broker() {
    let broker = Broker::start();
    let client = broker.client();
    let settings = QueueSettings::default();
    let mut names = good_names();
    for name in &names {
        client.create_queue(name, &settings).unwrap();
        client.producer(name).unwrap().send(name).unwrap();
        let mut consumer = client.consumer(name).unwrap();
        let message = consumer.recv().unwrap();
        assert_eq!(message.payload(), name.as_bytes());
        message.ack().unwrap();
        consumer.flush(Confirm::Stored).unwrap();
    }
    names.sort_unstable();
    let found: Vec<String> = client
        .queues()
        .unwrap()
        .into_iter()
        .map(|q| q.name)
        .collect();
    assert_eq!(found, names);

    let mut raw = Raw::greeted(&broker);
    for (name, wrong) in bad_names() {
        expect_error(
            client.create_queue(&name, &settings),
            ErrorCode::Invalid,
            wrong,
        );
        expect_error(client.delete_queue(&name), ErrorCode::Invalid, wrong);
        expect_error(client.queue(&name), ErrorCode::Invalid, wrong);
        expect_error(client.producer(&name), ErrorCode::Invalid, wrong);
        expect_error(client.consumer(&name), ErrorCode::Invalid, wrong);
        // The broker does not believe that clients look.
        raw.refused(
            &json!({"op": "queue_create", "name": name}),
            "invalid",
            wrong,
        );
        // And knows no such queue, whatever the name.
        for op in ["queue_info", "queue_delete"] {
            let reply = raw.ask(&json!({"op": op, "name": name}));
            let code = reply["error"]["code"].as_str().unwrap();
            assert!(["invalid", "no_such_queue"].contains(&code), "{reply}");
        }
    }
    assert_eq!(client.queues().unwrap().len(), names.len());
    for name in &names {
        client.delete_queue(name).unwrap();
    }
}

#[test]
fn a_queue_that_is_not_there_is_named() {
    let broker = Broker::with_queue("jobs");
    let client = broker.client();
    let said = "no such queue: none";
    expect_error(client.producer("none"), ErrorCode::NoSuchQueue, said);
    expect_error(client.consumer("none"), ErrorCode::NoSuchQueue, said);
    expect_error(client.queue("none"), ErrorCode::NoSuchQueue, said);
    expect_error(client.delete_queue("none"), ErrorCode::NoSuchQueue, said);
    // Names differ by every byte.
    expect_error(client.queue("Jobs"), ErrorCode::NoSuchQueue, "Jobs");
    assert!(broker.session_files().is_empty());
}

#[test]
fn settings_out_of_range_are_refused_by_client_and_broker() {
    let broker = Broker::with_queue("jobs");
    let client = broker.client();
    let mut raw = Raw::greeted(&broker);
    const WEEK_MS: u64 = 7 * 24 * 3600 * 1000;
    let with = |visibility_timeout_ms, max_message_bytes| QueueSettings {
        visibility_timeout_ms,
        max_message_bytes,
        ..QueueSettings::default()
    };
    for (settings, said) in [
        (with(99, 100), "99 ms"),
        (with(0, 100), "from 100 ms to a week"),
        (with(WEEK_MS + 1, 100), "from 100 ms to a week"),
        (with(u64::MAX, 100), "from 100 ms to a week"),
        (with(1000, MESSAGE_BYTES_LIMIT + 1), "at most 1073741824"),
        (with(1000, u32::MAX), "at most 1073741824"),
    ] {
        expect_error(
            client.create_queue("x", &settings),
            ErrorCode::Invalid,
            said,
        );
        let request = json!({"op": "queue_create", "name": "x", "settings": settings});
        raw.refused(&request, "invalid", said);
    }
    for (index, settings) in [with(100, 0), with(WEEK_MS, MESSAGE_BYTES_LIMIT)]
        .iter()
        .enumerate()
    {
        client.create_queue(&format!("q{index}"), settings).unwrap();
    }
    let other = with(100, 1);
    expect_error(
        client.create_queue("jobs", &other),
        ErrorCode::QueueExists,
        "jobs",
    );
    let window = |window| ringmain::ConsumerOptions::new().window(window);
    for wrong in [0, WINDOW_MAX + 1, u32::MAX] {
        let said = format!("a window of {wrong} messages");
        expect_error(
            client.consumer_with("jobs", window(wrong)),
            ErrorCode::Invalid,
            &said,
        );
    }
}

// I8
#[test]
fn messages_at_the_limit_pass_and_one_byte_more_is_too_large() {
    let broker = Broker::start();
    let client = broker.client();
    for limit in [
        0,
        1,
        102,
        15 * 1024,
        15 * 1024 + 1,
        100_000,
        1 << 20,
        (1 << 20) + 1,
        5_000_000,
    ] {
        let queue = format!("up to {limit}");
        let settings = QueueSettings {
            max_message_bytes: limit,
            ..QueueSettings::default()
        };
        client.create_queue(&queue, &settings).unwrap();
        let producer = client.producer(&queue).unwrap();
        let sent: Vec<u8> = (0..limit).map(|at| (at * 31 % 251) as u8).collect();
        let long = [&sent[..], b"x"].concat();
        let said = format!("has {} bytes, at most {limit}", long.len());
        expect_error(producer.send(&long), ErrorCode::TooLarge, &said);
        expect_error(producer.try_send(&long), ErrorCode::TooLarge, &said);
        // Nothing of a batch goes out if one message is too long.
        expect_error(
            producer.send_batch([&sent, &long]),
            ErrorCode::TooLarge,
            &said,
        );
        producer.send(&sent).unwrap();
        producer.send([]).unwrap();
        producer.flush(Confirm::Stored).unwrap();
        let mut consumer = client.consumer(&queue).unwrap();
        for expected in [&sent[..], &[]] {
            let message = consumer.recv().unwrap();
            assert!(
                message.payload() == expected,
                "{} bytes",
                message.payload().len()
            );
            message.ack().unwrap();
        }
        consumer.flush(Confirm::Stored).unwrap();
        assert_eq!(broker.info(&queue).messages, 0);
    }
}

// I6: shared memory that runs out is an error for who asks for more, and for
// nobody else.
#[test]
fn without_shared_memory_new_clients_are_told_and_old_ones_go_on() {
    let mut broker = Broker::new();
    std::fs::create_dir(broker.shm_dir()).unwrap();
    let Some(_small) =
        SmallFileSystem::at(&broker.shm_dir(), 6 << 20, "shared memory that runs out")
    else {
        return;
    };
    broker.restart();
    let witness = Witness::of(&broker);
    broker.create("jobs", &QueueSettings::default());
    let client = broker.client();
    let mut consumers = Vec::new();
    let refusal = loop {
        match client.consumer("jobs") {
            Ok(consumer) => consumers.push(consumer),
            Err(error) => break error,
        }
        assert!(consumers.len() < 100, "6 MiB hold no hundred sessions");
    };
    let shm = broker.shm_dir();
    expect_error::<()>(Err(refusal), ErrorCode::Full, shm.to_str().unwrap());
    expect_error(broker.client().producer("jobs"), ErrorCode::Full, "full");
    // Nothing is left of those that were refused.
    assert_eq!(broker.session_files().len(), 2 * (consumers.len() + 2));
    let send = broker
        .command(&["send", "jobs", "--count", "1"])
        .output()
        .unwrap();
    assert_eq!(send.status.code(), Some(7), "{}", errors(&send));
    witness.undisturbed();
    consumers.pop();
    consumers.pop();
    wait_until("there is room again", || client.consumer("jobs").is_ok());
    broker.kill();
    broker.restart();
    witness.finish(&broker);
}

// I10: not even the broker's own files fit.
#[test]
fn without_shared_memory_a_broker_does_not_start() {
    let broker = Broker::new();
    std::fs::create_dir(broker.shm_dir()).unwrap();
    let Some(_small) =
        SmallFileSystem::at(&broker.shm_dir(), 16 << 10, "shared memory that runs out")
    else {
        return;
    };
    let said = refusal(&broker);
    assert!(said.contains(broker.shm_dir().to_str().unwrap()), "{said}");
    expect_said(&said, &["no shared memory left"]);
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Starts a broker that must refuse. Returns the line that says why.
#[track_caller]
fn refusal(broker: &Broker) -> String {
    let command = common::serve_command(&broker.data_dir(), &broker.shm_dir(), &broker.socket());
    refusal_of(command)
}

#[track_caller]
fn refusal_of(mut command: Command) -> String {
    let child = command.args(["--log-level", "off"]).spawn().unwrap();
    let output = ended(child);
    let said = errors(&output);
    // What another version wrote has a code of its own.
    let code = if said.contains("version of ringmain") {
        8
    } else {
        1
    };
    assert_eq!(output.status.code(), Some(code), "{said}");
    assert!(output.stdout.is_empty(), "it was never in service");
    assert!(said.starts_with("ringmain: "), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    said
}

/// Waits for the end of a process.
#[track_caller]
fn ended(mut child: Child) -> Output {
    let started = std::time::Instant::now();
    while child.try_wait().unwrap().is_none() {
        if started.elapsed() > common::BOUND {
            child.kill().unwrap();
            panic!("it runs: {}", errors(&child.wait_with_output().unwrap()));
        }
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    child.wait_with_output().unwrap()
}

#[track_caller]
fn expect_said(said: &str, pieces: &[&str]) {
    for piece in pieces {
        assert!(said.contains(piece), "{said:?} does not say {piece:?}");
    }
}

#[test]
fn a_stale_socket_is_replaced_and_anything_else_in_its_place_is_not() {
    let mut broker = Broker::with_queue("jobs");
    broker.kill();
    assert!(broker.socket().exists(), "nobody has removed it");
    // Clients take it for what it is.
    let said = "ringmain serve";
    expect_error(
        Client::connect_to(broker.socket()),
        ErrorCode::NotRunning,
        said,
    );
    broker.restart();
    assert_eq!(broker.info("jobs").messages, 0);
    broker.terminate();

    std::fs::write(broker.socket(), "my notes").unwrap();
    expect_said(&refusal(&broker), &["is no socket", "--socket"]);
    assert_eq!(std::fs::read(broker.socket()).unwrap(), b"my notes");
    expect_error(
        Client::connect_to(broker.socket()),
        ErrorCode::NotRunning,
        said,
    );
    std::fs::remove_file(broker.socket()).unwrap();

    std::fs::create_dir(broker.socket()).unwrap();
    expect_said(&refusal(&broker), &["is no socket", "--socket"]);
    std::fs::remove_dir(broker.socket()).unwrap();

    // A link to nowhere is not followed.
    std::os::unix::fs::symlink("/nonexistent/socket", broker.socket()).unwrap();
    expect_said(&refusal(&broker), &["is no socket", "--socket"]);
    std::fs::remove_file(broker.socket()).unwrap();
    broker.restart();
}

#[test]
fn socket_paths_that_cannot_be_are_named() {
    let broker = Broker::new();
    let serve = |socket: &Path| {
        refusal_of(common::serve_command(
            &broker.data_dir(),
            &broker.shm_dir(),
            socket,
        ))
    };
    let long = broker.folder().join("x".repeat(120));
    expect_said(&serve(&long), &["at most 107", "--socket"]);
    expect_said(&serve(Path::new("/proc/none/socket")), &["/proc/none"]);
    expect_error(
        Client::connect_to(&long),
        ErrorCode::Invalid,
        "can't be the name of a socket",
    );
    let none = Path::new("/nonexistent/socket");
    expect_error(
        Client::connect_to(none),
        ErrorCode::NotRunning,
        "/nonexistent/socket",
    );
    let below_a_file = Path::new("/etc/passwd/socket");
    expect_error(
        Client::connect_to(below_a_file),
        ErrorCode::NotRunning,
        "/etc/passwd/socket",
    );
}

#[test]
fn who_talks_to_something_else_than_a_broker_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    let hello = |protocol, layout| {
        let hello = json!({"version": "9.9.9", "protocol": protocol, "layout": layout,
            "instance": "5f", "pid": 1});
        format!("{}\n", json!({"ok": hello})).into_bytes()
    };
    for (answer, code, said) in [
        (
            b"220 mail.example ESMTP\r\n".to_vec(),
            ErrorCode::Corrupt,
            "the broker's answer",
        ),
        (b"{}\n".to_vec(), ErrorCode::Corrupt, "the broker's answer"),
        (
            b"\xff\xfe\n".to_vec(),
            ErrorCode::Corrupt,
            "the broker's answer",
        ),
        (
            vec![b'x'; LINE_BYTES_MAX + 1],
            ErrorCode::Corrupt,
            "a line of more than",
        ),
        (
            Vec::new(),
            ErrorCode::Io,
            "the broker closed the connection",
        ),
        (
            b"{\"ok\":".to_vec(),
            ErrorCode::Io,
            "the broker closed the connection",
        ),
        (hello(99, 1), ErrorCode::VersionMismatch, "9.9.9"),
        (
            hello(1, 99),
            ErrorCode::VersionMismatch,
            "same version of ringmain on both sides",
        ),
    ] {
        let fake = std::thread::scope(|scope| {
            let fake = scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut line = String::new();
                BufReader::new(stream.try_clone().unwrap())
                    .read_line(&mut line)
                    .unwrap();
                // It may have read enough before the end.
                let _ = stream.write_all(&answer);
                line
            });
            expect_error(Client::connect_to(&socket), code, said);
            fake.join().unwrap()
        });
        assert!(fake.contains("hello"), "{fake}");
    }
}

// I6
#[test]
fn a_second_broker_is_refused_whatever_it_shares_with_the_first() {
    let broker = Broker::start();
    let witness = Witness::of(&broker);
    let other = Broker::new();
    let serve = |data: &Path, shm: &Path, socket: &Path| {
        refusal_of(common::serve_command(data, shm, socket))
    };
    let (data, shm, socket) = (broker.data_dir(), broker.shm_dir(), broker.socket());
    let (data2, shm2, socket2) = (other.data_dir(), other.shm_dir(), other.socket());
    let in_use = "another broker";
    expect_said(&serve(&data, &shm, &socket), &[in_use]);
    expect_said(&serve(&data, &shm, &socket2), &[in_use]);
    expect_said(
        &serve(&data, &shm2, &socket2),
        &[in_use, data.to_str().unwrap()],
    );
    expect_said(
        &serve(&data2, &shm, &socket2),
        &[in_use, shm.to_str().unwrap()],
    );
    expect_said(
        &serve(&data2, &shm2, &socket),
        &[in_use, socket.to_str().unwrap(), "--socket"],
    );
    // Nothing of all that has taken its socket away.
    witness.finish(&broker);
}

// I6, I8
#[test]
fn garbage_on_the_socket_is_answered_and_disturbs_nobody() {
    let broker = Broker::start();
    let witness = Witness::of(&broker);
    let memory = resident_kib(broker.pid());
    // Before the greeting: one answer, and the end.
    let long = [
        b"{\"op\":\"hello\",\"x\":\"".to_vec(),
        vec![b'x'; 2 * LINE_BYTES_MAX],
    ]
    .concat();
    let noise: Vec<u8> = (0..10_000).map(|at| scramble(at) as u8).collect();
    let nested = [vec![b'['; 100_000], b"\n".to_vec()].concat();
    for garbage in [
        &b"\n"[..],
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\n",
        b"\0\0\0\0\n",
        b"null\n",
        b"[]\n",
        b"{}\n",
        b"{\"op\":\"stats\"}\n",
        b"{\"op\":\"hello\"}\n",
        b"{\"op\":\"hello\",\"protocol\":\"one\"}\n",
        b"{\"op\":\"hello\",\"protocol\":-1}\n",
        b"{\"op\":\"hello\",\"protocol\":1e400}\n",
        b"{\"op\":\"hello\",\"protocol\":99}\n",
        b"{\"op\":\"\\ud800\"}\n",
        &nested,
        &noise,
        &long,
    ] {
        let shown = String::from_utf8_lossy(&garbage[..garbage.len().min(40)]).into_owned();
        let mut raw = Raw::connect(&broker);
        raw.write(garbage);
        if !garbage.contains(&b'\n') {
            // Else it waits for the rest of the line, as it should.
            raw.stream.shutdown(std::net::Shutdown::Write).unwrap();
        }
        match raw.line() {
            Some(reply) => assert!(reply["error"]["code"].is_string(), "{shown:?}: {reply}"),
            None => assert!(
                garbage == noise || garbage == long,
                "{shown:?} had no answer"
            ),
        }
    }
    // Half a line, held, dropped and never ended.
    let mut halves = Vec::new();
    for at in 0..20 {
        let mut raw = if at % 2 == 0 {
            Raw::connect(&broker)
        } else {
            Raw::greeted(&broker)
        };
        raw.write(b"{\"op\":\"queue_create\",\"name\":\"ha");
        halves.push(raw);
    }
    witness.undisturbed();
    drop(halves);
    assert_eq!(broker.client().queues().unwrap().len(), 1);

    // Descriptors that nobody asked for are not kept.
    let open_before = open_files(broker.pid());
    let null = File::open("/dev/null").unwrap();
    for _ in 0..20 {
        let raw = Raw::greeted(&broker);
        let descriptors = [null.as_raw_fd(); 50];
        let rights = [ControlMessage::ScmRights(&descriptors)];
        let line = [IoSlice::new(b"{\"op\":\"stats\"}\n")];
        let socket = raw.stream.as_raw_fd();
        sendmsg::<()>(socket, &line, &rights, MsgFlags::empty(), None).unwrap();
        let mut raw = raw;
        assert!(raw.line().unwrap()["ok"]["queues"].is_u64());
    }
    wait_until("none is kept", || {
        open_files(broker.pid()) <= open_before + 4
    });
    let grown = resident_kib(broker.pid()).saturating_sub(memory);
    assert!(grown < 64 * 1024, "{grown} KiB more");
    witness.finish(&broker);
}

fn open_files(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .count()
}

fn resident_kib(pid: u32) -> u64 {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4
}

// I6, I8
#[test]
fn requests_that_make_no_sense_are_refused_and_the_connection_goes_on() {
    let broker = Broker::with_queue("jobs");
    let witness = Witness::of(&broker);
    let mut raw = Raw::greeted(&broker);
    let open = |submission: u64, delivery: u64, answer: u64| {
        json!({"op": "open", "layout": ringmain_ring::layout::LAYOUT_VERSION, "rings": {"submission_bytes": submission,
            "delivery_bytes": delivery, "answer_bytes": answer}})
    };
    let attach = |queue: &str, purpose: &str, window: u64| json!({"op": "attach", "queue": queue, "purpose": purpose, "window": window});
    raw.refused(&attach("jobs", "produce", 1), "invalid", "open one first");
    raw.refused(&json!({"op": "ready"}), "invalid", "open one first");
    raw.refused(
        &json!({"op": "resume", "session": 12345}),
        "closed",
        "12345",
    );
    raw.refused(&json!({"op": "fly"}), "invalid", "fly");
    raw.refused(&json!({"op": "queue_info"}), "invalid", "name");
    raw.refused(&json!({"op": "queue_info", "name": 7}), "invalid", "");
    raw.refused(
        &json!({"op": "queue_info", "name": "a", "b": 1}),
        "invalid",
        "b",
    );
    raw.refused(
        &json!({"op": "queue_create", "name": "a", "settings": {"colour": "red"}}),
        "invalid",
        "colour",
    );
    raw.refused(
        &json!({"op": "queue_create", "name": "a", "settings": {"confirm": "perhaps"}}),
        "invalid",
        "perhaps",
    );
    raw.refused(
        &json!({"op": "queue_create", "name": "a", "settings": 7}),
        "invalid",
        "",
    );
    let another_layout = json!({"op": "open", "layout": 99, "rings": {"submission_bytes": 4096,
        "delivery_bytes": 4096, "answer_bytes": 4096}});
    raw.refused(&another_layout, "version_mismatch", "layout 99");
    for rings in [
        open(0, 4096, 4096),
        open(4096, 5000, 4096),
        open(4096, 4096, 1 << 31),
        open(8, 8, 8),
    ] {
        raw.refused(&rings, "invalid", "a power of two");
    }
    raw.refused(&open(1 << 40, 4096, 4096), "invalid", "");
    assert!(broker.session_files().len() == 4, "the witness's");

    // A session that is small, but a session.
    let opened = raw.ask(&open(4096, 4096, 4096));
    let session = opened["ok"]["session"].as_u64().unwrap();
    raw.refused(&attach("jobs", "produce", 1), "invalid", "not ready");
    raw.refused(&open(4096, 4096, 4096), "invalid", "already");
    assert!(raw.ask(&json!({"op": "ready"}))["ok"].is_object());
    raw.refused(&attach("none", "produce", 1), "no_such_queue", "none");
    raw.refused(&attach("jobs", "eat", 1), "invalid", "eat");
    let payload = |bytes: u64| json!({"op": "outbound", "bytes": bytes});
    raw.refused(&payload((1 << 30) + 1), "invalid", "at most 1073741824");
    raw.refused(&payload(u64::MAX), "invalid", "at most");
    let small = json!({"op": "queue_create", "name": "small",
        "settings": {"max_message_bytes": 100}});
    assert!(raw.ask(&small)["ok"].is_object());
    raw.refused(&attach("small", "consume", 0), "invalid", "a window of 0");
    raw.refused(
        &attach("small", "consume", 1 << 20),
        "invalid",
        "a window of",
    );
    assert_eq!(raw.ask(&attach("small", "consume", 1))["ok"]["index"], 0);
    assert_eq!(
        raw.ask(&attach("small", "consume", 1))["ok"]["index"],
        0,
        "the same again"
    );
    // A session that lives is nobody else's, not even for the same process.
    let mut thief = Raw::greeted(&broker);
    thief.refused(
        &json!({"op": "resume", "session": session}),
        "closed",
        "has ended",
    );
    // A line that is no JSON ends the connection, and the session with it.
    raw.write(b"}\n");
    assert!(raw.line().unwrap()["error"]["code"].is_string());
    assert!(raw.line().is_none());
    wait_until("its session is gone", || broker.session_files().len() == 4);
    witness.finish(&broker);
}

// I8: and in order.
#[test]
fn a_thousand_requests_at_once_get_a_thousand_answers() {
    let broker = Broker::with_queue("jobs");
    let witness = Witness::of(&broker);
    let mut raw = Raw::greeted(&broker);
    let mut requests = Vec::new();
    for number in 0..1000 {
        let request = match number % 4 {
            0 => json!({"op": "queue_info", "name": "jobs"}),
            1 => json!({"op": "queue_info", "name": format!("none {number}")}),
            2 => json!({"op": "queue_create", "name": format!("q{}", number % 8)}),
            _ => json!({"op": "queue_list"}),
        };
        requests.extend_from_slice(format!("{request}\n").as_bytes());
    }
    // From another thread: it does not take more while it answers.
    let mut stream = raw.stream.try_clone().unwrap();
    let writer = std::thread::spawn(move || stream.write_all(&requests).unwrap());
    for number in 0..1000 {
        let reply = raw.line().unwrap();
        match number % 4 {
            0 => assert_eq!(reply["ok"]["name"], "jobs"),
            1 => {
                let said = reply["error"]["message"].as_str().unwrap();
                assert!(said.ends_with(&format!("none {number}")), "{said}");
            }
            2 => assert!(reply["ok"].is_object(), "{reply}"),
            _ => assert!(reply["ok"].is_array(), "{reply}"),
        }
    }
    writer.join().unwrap();
    // And one who leaves in the middle.
    let mut raw = Raw::greeted(&broker);
    for _ in 0..200 {
        raw.write(b"{\"op\":\"queue_list\"}\n");
    }
    drop(raw);
    witness.finish(&broker);
}

#[test]
fn data_folders_that_cannot_be_used_are_named() {
    let broker = Broker::new();
    let serve = |data: &Path| {
        refusal_of(common::serve_command(
            data,
            &broker.shm_dir(),
            &broker.socket(),
        ))
    };
    let file = broker.folder().join("file");
    std::fs::write(&file, "x").unwrap();
    for path in [&file, &file.join("below")] {
        let said = serve(path);
        expect_said(
            &said,
            &[path.to_str().unwrap(), "a file is in the place of a folder"],
        );
    }
    assert_eq!(std::fs::read(&file).unwrap(), b"x");
    expect_said(&serve(Path::new("/proc/none")), &["/proc/none"]);
    expect_said(&serve(Path::new("/sys/none")), &["/sys/none"]);
}

#[test]
fn shared_memory_folders_that_cannot_be_used_are_named() {
    let broker = Broker::new();
    let serve = |shm: &Path| {
        refusal_of(common::serve_command(
            &broker.data_dir(),
            shm,
            &broker.socket(),
        ))
    };
    let file = broker.folder().join("file");
    std::fs::write(&file, "x").unwrap();
    for path in [&file, &file.join("below"), &PathBuf::from("/proc/none")] {
        expect_said(&serve(path), &[path.to_str().unwrap(), "--shm-dir"]);
    }
    let open = broker.folder().join("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, Permissions::from_mode(0o777)).unwrap();
    expect_said(&serve(&open), &[open.to_str().unwrap(), "chmod 700"]);
    assert!(files(&open).is_empty(), "nothing was put there");
}

#[test]
fn a_data_folder_of_a_newer_version_is_refused_and_left_alone() {
    let mut broker = Broker::with_queue("jobs");
    broker
        .client()
        .producer("jobs")
        .unwrap()
        .send("kept")
        .unwrap();
    broker.terminate();
    let format = |change: i32| {
        let database = broker.data_dir().join("rocksdb");
        let options = rocksdb::Options::default();
        let families = rocksdb::DB::list_cf(&options, &database).unwrap();
        let db = rocksdb::DB::open_cf(&options, &database, families).unwrap();
        let found = db.get("meta/format").unwrap().unwrap();
        let found = i32::from_le_bytes(found.try_into().unwrap());
        db.put("meta/format", (found + change).to_le_bytes())
            .unwrap();
        found
    };
    let known = format(1);
    let said = refusal(&broker);
    let newer = format!("format {}", known + 1);
    expect_said(
        &said,
        &[
            &newer,
            &format!("format {known}"),
            broker.data_dir().to_str().unwrap(),
        ],
    );
    format(-1);
    broker.restart();
    assert_eq!(broker.info("jobs").messages, 1);
}

/// Changes a byte in the middle of a file.
fn damage(path: &Path) {
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    let middle = file.metadata().unwrap().len() / 2;
    let mut byte = [0];
    file.seek(SeekFrom::Start(middle)).unwrap();
    file.read_exact(&mut byte).unwrap();
    file.seek(SeekFrom::Start(middle)).unwrap();
    file.write_all(&[!byte[0]]).unwrap();
}

fn copy_folder(from: &Path, to: &Path) {
    let status = Command::new("cp")
        .arg("-a")
        .arg(from)
        .arg(to)
        .status()
        .unwrap();
    assert!(status.success());
}

// I5, I10: damage is refused, never skipped in silence.
#[test]
fn a_damaged_data_folder_is_refused_until_it_is_put_back() {
    let mut broker = Broker::with_queue("jobs");
    let producer = broker.client().producer("jobs").unwrap();
    for number in 0..2000 {
        producer.send(payload(0, number, 500)).unwrap();
    }
    producer.flush(Confirm::Synced).unwrap();
    drop(producer);
    broker.kill();
    let good = broker.folder().join("good");
    let (data, database) = (broker.data_dir(), broker.data_dir().join("rocksdb"));
    copy_folder(&data, &good);
    let put_back = || {
        std::fs::remove_dir_all(&data).unwrap();
        copy_folder(&good, &data);
    };
    let logs = || -> Vec<PathBuf> {
        if !database.exists() {
            return Vec::new();
        }
        let mut logs = files(&database);
        logs.retain(|name| name.ends_with(".log"));
        logs.iter().map(|name| database.join(name)).collect()
    };
    let largest = || {
        logs()
            .into_iter()
            .max_by_key(|log| log.metadata().unwrap().len())
            .unwrap()
    };

    for breakage in [
        &|| damage(&largest()) as (),
        &|| {
            let log = OpenOptions::new().write(true).open(largest()).unwrap();
            log.set_len(log.metadata().unwrap().len() / 2).unwrap();
        },
        &|| {
            logs()
                .iter()
                .for_each(|log| std::fs::remove_file(log).unwrap())
        },
        &|| std::fs::write(database.join("CURRENT"), "MANIFEST-999999\n").unwrap(),
        &|| std::fs::remove_file(database.join("CURRENT")).unwrap(),
        &|| std::fs::remove_dir_all(&database).unwrap(),
    ] as [&dyn Fn(); 6]
    {
        breakage();
        let before = logs();
        let said = refusal(&broker);
        expect_said(&said, &[data.to_str().unwrap()]);
        assert_eq!(logs(), before, "nothing was changed: {said}");
        put_back();
    }
    std::fs::write(data.join("instance"), "what?\n").unwrap();
    expect_said(&refusal(&broker), &[data.to_str().unwrap(), "backup"]);
    put_back();
    broker.restart();
    assert_eq!(broker.info("jobs").messages, 2000);
    let mut consumer = broker.client().consumer("jobs").unwrap();
    for number in 0..2000 {
        let message = consumer.recv().unwrap();
        assert_eq!(message.payload(), payload(0, number, 500));
        message.ack().unwrap();
    }
}

// I5, I10: what the shared memory knows of is missing in an older copy.
#[test]
fn an_older_copy_of_the_data_folder_is_refused_beside_newer_shared_memory() {
    let mut broker = Broker::with_queue("jobs");
    let client = broker.client();
    let producer = client.producer("jobs").unwrap();
    producer.send("one").unwrap();
    producer.flush(Confirm::Synced).unwrap();
    broker.kill();
    let (data, old) = (broker.data_dir(), broker.folder().join("old"));
    copy_folder(&data, &old);
    broker.restart();
    producer.send("two").unwrap();
    producer.flush(Confirm::Synced).unwrap();
    broker.kill();
    let new = broker.folder().join("new");
    std::fs::rename(&data, &new).unwrap();
    std::fs::rename(&old, &data).unwrap();
    let said = refusal(&broker);
    expect_said(
        &said,
        &[data.to_str().unwrap(), "put the right data folder back"],
    );
    std::fs::remove_dir_all(&data).unwrap();
    std::fs::rename(&new, &data).unwrap();
    broker.restart();
    assert_eq!(broker.info("jobs").messages, 2);
}

// I10
#[test]
fn shared_memory_of_another_instance_is_refused_and_left_alone() {
    let mut broker = Broker::with_queue("jobs");
    let client = broker.client();
    let producer = client.producer("jobs").unwrap();
    broker.pause();
    producer.send("in the ring alone").unwrap();
    broker.kill();
    let other = Broker::new();
    let command = common::serve_command(&other.data_dir(), &broker.shm_dir(), &broker.socket());
    let said = refusal_of(command);
    expect_said(
        &said,
        &[
            broker.shm_dir().to_str().unwrap(),
            "another data folder",
            "--shm-dir",
        ],
    );
    broker.restart();
    producer.flush(Confirm::Stored).unwrap();
    assert_eq!(broker.info("jobs").messages, 1);
}

// I6: a client whose broker was replaced by another one is told.
#[test]
fn a_session_is_not_resumed_by_another_instance() {
    let mut broker = Broker::with_queue("jobs");
    let producer = broker.client().producer("jobs").unwrap();
    let mut consumer = broker.client().consumer("jobs").unwrap();
    broker.kill();
    let other = Broker::new();
    let command = common::serve_command(&other.data_dir(), &other.shm_dir(), &broker.socket());
    let mut another = { command }.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(another.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    assert_eq!(Path::new(line.trim_end()), broker.socket());
    let said = "another broker";
    expect_error(producer.flush(Confirm::Stored), ErrorCode::Closed, said);
    expect_error(consumer.recv(), ErrorCode::Closed, said);
    another.kill().unwrap();
    another.wait().unwrap();
}

// I10: what may hold accepted messages is never thrown away unasked.
#[test]
fn a_damaged_ledger_is_refused_until_it_is_put_back() {
    let mut broker = Broker::with_queue("jobs");
    let client = broker.client();
    let producer = client.producer("jobs").unwrap();
    let mut consumer = client.consumer("jobs").unwrap();
    producer.send_batch(["one", "two"]).unwrap();
    let held = consumer.recv().unwrap();
    broker.pause();
    producer.send("in the ring alone").unwrap();
    broker.kill();
    let shm = broker.shm_dir();
    let good = broker.folder().join("good");
    copy_folder(&shm, &good);
    let ledgers: Vec<String> = files(&shm)
        .into_iter()
        .filter(|f| f.ends_with(".ledger"))
        .collect();
    assert_eq!(ledgers.len(), 2);
    let mut paths: Vec<PathBuf> = ledgers.iter().map(|name| shm.join(name)).collect();
    paths.push(shm.join("ledger"));
    paths.push(shm.join("leases"));
    for path in &paths {
        let length = path.metadata().unwrap().len();
        let set_length = |bytes| {
            let file = OpenOptions::new().write(true).open(path).unwrap();
            file.set_len(bytes).unwrap();
        };
        let overwrite = |at: u64, bytes: &[u8]| {
            let mut file = OpenOptions::new().write(true).open(path).unwrap();
            file.seek(SeekFrom::Start(at)).unwrap();
            file.write_all(bytes).unwrap();
        };
        for breakage in [
            &|| set_length(length / 2) as (),
            &|| overwrite(0, b"garbage!"),
            // The version, which is its second word.
            &|| overwrite(8, &99u64.to_ne_bytes()),
            &|| std::fs::remove_file(path).unwrap(),
        ] as [&dyn Fn(); 4]
        {
            breakage();
            let removed_session = !path.exists() && path.extension().is_some();
            if !removed_session {
                let said = refusal(&broker);
                expect_said(&said, &[path.to_str().unwrap()]);
            }
            // In place: the client still maps what was there.
            std::fs::remove_dir_all(&shm).unwrap();
            copy_folder(&good, &shm);
        }
    }
    // Copies are other files than those that the clients map: so they see
    // nothing of what this broker does, and it ends them when they do not come.
    broker.restart();
    wait_until("the message in the ring is found", || {
        broker.info("jobs").messages == 3
    });
    drop(held);
}

// I6, I8: a segment that was cut off ends its session, and no other.
#[test]
fn a_truncated_segment_ends_its_session_alone() {
    let mut broker = Broker::with_queue("jobs");
    let mut child = broker.child(Role::Attach {
        queue: "jobs".to_owned(),
        pairs: 1,
    });
    child.wait_noted(Kind::Confirmed, 1);
    let witness = Witness::of(&broker);
    broker.kill();
    let ring = broker.shm_dir().join("s1.ring");
    OpenOptions::new()
        .write(true)
        .open(&ring)
        .unwrap()
        .set_len(100)
        .unwrap();
    broker.restart();
    wait_until("its session is gone", || !ring.exists());
    assert_eq!(broker.info("jobs").consumers, 0);
    child.kill();
    witness.finish(&broker);
}

/// Runs a command as another user.
fn as_nobody(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(program)
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// A copy of the program where another user can run it, if there can be one.
fn program_for_nobody(folder: &Path) -> Option<PathBuf> {
    std::fs::set_permissions(folder, Permissions::from_mode(0o755)).unwrap();
    let program = folder.join("ringmain");
    std::fs::copy(common::PROGRAM, &program).unwrap();
    let runs = as_nobody(&program).arg("--version").output();
    if runs.is_ok_and(|output| output.status.success()) {
        return Some(program);
    }
    skip("no program can be run as another user: other users are NOT tested");
    None
}

#[test]
fn another_user_is_refused_by_socket_and_folders() {
    let broker = Broker::start();
    let Some(program) = program_for_nobody(broker.folder()) else {
        return;
    };
    let witness = Witness::of(&broker);
    let ask = || {
        let mut command = as_nobody(&program);
        command
            .args(["queue", "list", "--socket"])
            .arg(broker.socket());
        command.output().unwrap()
    };
    // By the file's mode.
    let output = ask();
    assert_eq!(output.status.code(), Some(6), "{}", errors(&output));
    expect_said(
        &errors(&output),
        &["not permitted", broker.socket().to_str().unwrap()],
    );
    // And by its number, where somebody has opened that.
    std::fs::set_permissions(broker.socket(), Permissions::from_mode(0o666)).unwrap();
    let output = ask();
    assert_eq!(output.status.code(), Some(6), "{}", errors(&output));
    expect_said(&errors(&output), &["not permitted", "user 65534"]);

    // A broker of another user, with folders that are not its own.
    let theirs = tempfile::tempdir().unwrap();
    std::fs::set_permissions(theirs.path(), Permissions::from_mode(0o777)).unwrap();
    let shm = tempfile::tempdir_in("/dev/shm").unwrap();
    std::fs::set_permissions(shm.path(), Permissions::from_mode(0o777)).unwrap();
    let serve = |data: &Path, shm: &Path| {
        let mut command = as_nobody(&program);
        command
            .args(["serve", "--data-dir"])
            .arg(data)
            .arg("--shm-dir")
            .arg(shm)
            .arg("--socket")
            .arg(theirs.path().join("socket"));
        refusal_of(command)
    };
    let (data2, shm2) = (theirs.path().join("data"), shm.path().join("shm"));
    let data = broker.data_dir();
    let said = serve(&data, &shm2);
    expect_said(
        &said,
        &[data.to_str().unwrap(), "Permission denied", "user"],
    );
    let said = serve(&data2, &broker.shm_dir());
    expect_said(&said, &[broker.shm_dir().to_str().unwrap(), "--shm-dir"]);
    witness.finish(&broker);
}

#[test]
fn commands_say_what_is_wrong_with_their_arguments() {
    let broker = Broker::with_queue("jobs");
    let expect = |arguments: &[&str], code: i32, said: &str| {
        let output = broker.run(arguments);
        let text = errors(&output);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {text}");
        assert!(text.contains(said), "{arguments:?}: {text}");
    };
    for (name, wrong) in bad_names() {
        // What no command line can pass.
        if name.contains('\0') || name.len() > 1000 {
            continue;
        }
        expect(&["queue", "create", "--", &name], 2, wrong);
        expect(&["queue", "info", "--", &name], 2, wrong);
        expect(&["queue", "delete", "--yes", "--", &name], 2, wrong);
        expect(&["send", "--", &name], 2, wrong);
        expect(&["recv", "--", &name], 2, wrong);
    }
    for (arguments, said) in [
        (
            &["queue", "create", "x", "--visibility-timeout", "99ms"][..],
            "100 ms",
        ),
        (
            &["queue", "create", "x", "--visibility-timeout", "30"],
            "unit",
        ),
        (
            &["queue", "create", "x", "--max-message-size", "1025MiB"],
            "at most",
        ),
        (&["queue", "create", "x", "--confirm", "maybe"], "maybe"),
        (&["recv", "jobs", "--count", "-1"], "-1"),
        (&["recv", "jobs", "--wait", "soon"], "soon"),
        (&["send", "jobs", "--count", "ten"], "ten"),
        (&["send", "jobs", "--size", "10"], "--count"),
        (&["send", "jobs", "--file", "x", "--null"], "cannot be used"),
        (&["fly"], "fly"),
        (&["serve", "--log-level", "a=b=c"], "--log-level"),
    ] {
        expect(arguments, 2, said);
    }
    expect(
        &["send", "jobs", "--file", "/nonexistent/file"],
        1,
        "/nonexistent/file",
    );
    expect(&["send", "jobs", "--file", "/"], 1, "/");
    expect(&["queue", "info", "none"], 4, "no such queue: none");
    assert_eq!(broker.info("jobs").messages, 0);
    assert_eq!(broker.client().queues().unwrap().len(), 1);
}

#[test]
fn errors_have_codes_that_programs_can_tell_apart() {
    // The set is public: a number, once given, stays.
    for (index, code) in ErrorCode::ALL.iter().enumerate() {
        assert_eq!(*code as usize, index + 1);
        assert_eq!(ErrorCode::from_number(*code as u16), Some(*code));
        assert_eq!(serde_json::to_value(code).unwrap(), code.name());
    }
    assert_eq!(ErrorCode::from_number(0), None);
    assert_eq!(ErrorCode::from_number(17), None);
    assert_eq!(Error::Forked.code(), ErrorCode::Forked);
}
