//! What happens around a broker and its clients: numbers of processes that are
//! used again, other namespaces, programs that are started, and few descriptors
//! (I6, I7).

#![allow(clippy::unwrap_used, reason = "a test that can't go on has failed")]
#![allow(clippy::print_stderr, reason = "logs are shown when a test fails")]

mod common;

use common::{Broker, Hold, Kind, PROGRAM, Witness, skip, wait_until};
use ringmain::{Client, Error};
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// Not a test: what the children run.
#[test]
fn child_process() {
    common::run_child();
}

fn said(output: &Output) -> String {
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&text).into_owned()
}

// A program that a client starts gets nothing of its session.
#[test]
fn a_started_program_inherits_no_descriptor() {
    let broker = Broker::with_queue("jobs");
    let client = broker.client();
    let producer = client.producer("jobs").unwrap();
    producer.send(vec![1; 100_000]).unwrap();
    let mut consumer = client.consumer("jobs").unwrap();
    let message = consumer.recv().unwrap();
    let listed = Command::new("sh")
        .args(["-c", "ls -l /proc/self/fd"])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let listed = said(&listed);
    assert!(!listed.contains("shm"), "{listed}");
    assert!(!listed.contains("socket:"), "{listed}");
    assert!(!listed.contains("eventfd"), "{listed}");
    assert_eq!(message.payload(), [1; 100_000]);
}

/// Starts a process with this number, if the machine permits to choose.
fn start_as(pid: u32) -> Option<std::process::Child> {
    for _ in 0..200 {
        std::fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string()).ok()?;
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        if child.id() == pid {
            return Some(child);
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
    None
}

// I6: another process with a dead client's number is not taken for it.
#[test]
fn a_number_that_is_used_again_is_another_process() {
    let mut broker = Broker::with_queue("jobs");
    let client = broker.client();
    let producer = client.producer("jobs").unwrap();
    producer.send(common::payload(1, 0, 64)).unwrap();
    let mut holder = broker.hold(Hold {
        queue: "jobs".to_owned(),
        window: 1,
        take: 1,
    });
    holder.wait_noted(Kind::Taken, 1);
    broker.kill();
    holder.kill();
    let Some(mut other) = start_as(holder.pid()) else {
        return skip("no process can be given a number: numbers used again are NOT tested");
    };
    broker.restart();
    let mut consumer = broker.client().consumer("jobs").unwrap();
    let message = consumer.recv_timeout(common::BOUND).unwrap().unwrap();
    assert!(message.redelivered());
    message.ack().unwrap();
    other.kill().unwrap();
    other.wait().unwrap();
}

/// A command in a process namespace of its own; `None` where that is not permitted.
fn in_a_namespace(program: &str) -> Option<Command> {
    let unshare = || {
        let mut unshare = Command::new("unshare");
        unshare.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
        unshare
    };
    let tried = unshare().arg("true").output();
    if !tried.is_ok_and(|tried| tried.status.success()) {
        skip("no namespaces can be made: clients in others are NOT tested");
        return None;
    }
    let mut command = unshare();
    command.arg(program).stdin(Stdio::null());
    Some(command)
}

// I6: a client whose process numbers are others, as in a container.
#[test]
fn a_client_in_another_process_namespace_is_one_like_others() {
    let mut broker = Broker::with_queue("jobs");
    let run = |arguments: &[&str]| {
        let mut command = in_a_namespace(PROGRAM)?;
        command
            .args(arguments)
            .env("RINGMAIN_SOCKET", broker.socket());
        Some(command)
    };
    let text = broker.folder().join("text");
    std::fs::write(&text, "from a container").unwrap();
    let Some(mut send) = run(&["send", "jobs", "--file", text.to_str().unwrap()]) else {
        return;
    };
    let sent = send.output().unwrap();
    assert!(sent.status.success(), "{}", said(&sent));
    // One that holds the message, and is killed, with a restart between.
    let mut work = run(&["work", "jobs", "--", "sleep", "1000"]).unwrap();
    let mut work = work.stdout(Stdio::null()).spawn().unwrap();
    wait_until("it is held", || broker.info("jobs").leased == 1);
    broker.kill();
    broker.restart();
    wait_until("it is still held", || broker.info("jobs").leased == 1);
    work.kill().unwrap();
    work.wait().unwrap();
    let mut consumer = broker.client().consumer("jobs").unwrap();
    let message = consumer.recv_timeout(common::BOUND).unwrap().unwrap();
    assert_eq!(message.payload(), b"from a container");
    message.ack().unwrap();
}

// A broker that can't see its clients' processes says so, or serves them.
#[test]
fn a_broker_in_another_process_namespace_serves_or_says_why_not() {
    let folder = tempfile::tempdir().unwrap();
    let shm = tempfile::Builder::new().tempdir_in("/dev/shm").unwrap();
    let socket = folder.path().join("socket");
    let Some(mut serve) = in_a_namespace(PROGRAM) else {
        return;
    };
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    serve
        .arg("serve")
        .args(["--data-dir", &path(&folder.path().join("data"))])
        .args(["--shm-dir", &path(&shm.path().join("shm"))])
        .args(["--socket", &path(&socket)])
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut broker = common::dies_with_us(&mut serve).spawn().unwrap();
    wait_until("it is in service", || Client::connect_to(&socket).is_ok());
    let outcome = Client::connect_to(&socket).and_then(|client| {
        client.create_queue("jobs", &ringmain::QueueSettings::default())?;
        client.producer("jobs")?.send("hello")?;
        let mut consumer = client.consumer("jobs")?;
        consumer.recv()?.ack()
    });
    match outcome {
        Ok(()) => {}
        Err(Error::NotPermitted(why)) => assert!(why.contains("namespace"), "{why}"),
        Err(error) => panic!("{error}"),
    }
    broker.kill().unwrap();
    broker.wait().unwrap();
}

// I6, I7: a broker at its limit of descriptors tells who comes, and serves who is
// there.
#[test]
fn few_descriptors_are_told_and_disturb_nobody() {
    let broker = Broker::with_queue("jobs");
    let witness = Witness::of(&broker);
    let used = std::fs::read_dir(format!("/proc/{}/fd", broker.pid()))
        .unwrap()
        .count();
    let limit = libc::rlimit {
        rlim_cur: used as u64 + 20,
        rlim_max: used as u64 + 20,
    };
    // SAFETY: a plain system call, with a struct that outlives it.
    let set = unsafe {
        libc::prlimit(
            broker.pid() as i32,
            libc::RLIMIT_NOFILE,
            &raw const limit,
            std::ptr::null_mut(),
        )
    };
    assert_eq!(set, 0);
    let mut clients = Vec::new();
    let mut consumers = Vec::new();
    let mut refusals = 0;
    for _ in 0..60 {
        let opened = Client::connect_to(broker.socket()).and_then(|client| {
            let consumer = client.consumer("jobs");
            clients.push(client);
            consumer
        });
        match opened {
            Ok(consumer) => consumers.push(consumer),
            Err(Error::Full(_) | Error::Io { .. } | Error::Closed(_)) => refusals += 1,
            Err(error) => panic!("{error:?}"),
        }
    }
    assert!(refusals > 0 && !consumers.is_empty());
    witness.undisturbed();
    drop((clients, consumers));
    wait_until("there is room again", || {
        let client = Client::connect_to(broker.socket());
        client.is_ok_and(|client| client.consumer("jobs").is_ok())
    });
    witness.finish(&broker);
}
