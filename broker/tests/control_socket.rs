//! The control thread over real sockets and processes.

#![allow(clippy::unwrap_used, reason = "a test that can't go on has failed")]
#![allow(clippy::print_stdout, reason = "child processes report to their test")]

use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use nix::unistd::Pid;
use ringmain::ErrorCode;
use ringmain::control::{Hello, LINE_BYTES_MAX, PROTOCOL, Reply, Request};
use ringmain_broker::control::{ConnId, Control, ControlError, Event, Limits};
use ringmain_broker::wake::Wake;
use std::fs::File;
use std::io::{BufRead, BufReader, IoSliceMut, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(5);
const NOT_YET: Duration = Duration::from_millis(150);

struct Broker {
    control: Control,
    events: mpsc::Receiver<Event>,
    wake: Arc<Wake>,
    socket: PathBuf,
    _folder: tempfile::TempDir,
}

fn hello() -> Hello {
    Hello {
        version: "1.2.3".to_owned(),
        protocol: PROTOCOL,
        layout: 1,
        instance: "5f".to_owned(),
        pid: std::process::id(),
    }
}

fn wake() -> Arc<Wake> {
    Arc::new(Wake::new().unwrap())
}

fn start_with(limits: Limits) -> Broker {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("run/socket");
    let wake = wake();
    let (control, events) =
        Control::start_with(&socket, hello(), Arc::clone(&wake), limits).unwrap();
    Broker {
        control,
        events,
        wake,
        socket,
        _folder: folder,
    }
}

fn start() -> Broker {
    start_with(Limits::default())
}

impl Broker {
    fn event(&self) -> Event {
        self.events.recv_timeout(SOON).unwrap()
    }

    fn request(&self) -> (ConnId, Request) {
        match self.event() {
            Event::Request {
                conn,
                peer,
                request,
            } => {
                assert_eq!(peer.uid, nix::unistd::getuid().as_raw());
                assert!(peer.pid > 0 && peer.start_time > 0);
                (conn, request)
            }
            other => panic!("expected a request, got {other:?}"),
        }
    }

    fn expect_gone(&self, gone: ConnId) {
        assert!(matches!(self.event(), Event::Gone { conn } if conn == gone));
        assert!(
            self.events.recv_timeout(NOT_YET).is_err(),
            "gone comes once"
        );
    }

    fn client(&self) -> Client {
        Client::connect(&self.socket)
    }

    /// A client that has said hello.
    fn greeted(&self) -> Client {
        let mut client = self.client();
        client.write(&format!("{{\"op\":\"hello\",\"protocol\":{PROTOCOL}}}\n"));
        assert!(client.line().contains("\"version\":\"1.2.3\""));
        client
    }
}

struct Client {
    stream: UnixStream,
    reader: BufReader<UnixStream>,
}

impl Client {
    fn connect(socket: &Path) -> Client {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        let reader = BufReader::new(stream.try_clone().unwrap());
        Client { stream, reader }
    }

    fn write(&mut self, text: &str) {
        self.stream.write_all(text.as_bytes()).unwrap();
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.reader.read_line(&mut line).unwrap();
        line
    }

    fn error(&mut self) -> (ErrorCode, String) {
        match serde_json::from_str(&self.line()).unwrap() {
            Reply::Error(error) => (error.code, error.message),
            other => panic!("expected an error, got {other:?}"),
        }
    }

    fn expect_closed(&mut self) {
        assert_eq!(self.reader.read(&mut [0; 1]).unwrap_or(0), 0);
    }
}

fn done() -> Reply {
    Reply::Ok(serde_json::json!({}))
}

// --- requests and replies

#[test]
fn a_request_reaches_the_service_and_its_reply_the_client() {
    let broker = start();
    let mut client = broker.greeted();
    client.write("{\"op\":\"queue_info\",\"name\":\"jobs\"}\n");
    let (conn, request) = broker.request();
    let name = "jobs".to_owned();
    assert_eq!(request, Request::QueueInfo { name });
    // The wake-up follows the event.
    let deadline = Instant::now() + SOON;
    while !broker.wake.take() {
        assert!(Instant::now() < deadline, "the service is not woken");
    }
    broker.control.reply(conn, done(), Vec::new());
    assert_eq!(client.line(), "{\"ok\":{}}\n");
    // Nobody asked for a second one.
    broker
        .control
        .reply(conn, Reply::Ok(serde_json::json!("extra")), Vec::new());
    // Commands are taken in order: once this one is answered, so was that.
    broker.control.watch(0, 0, 1);
    assert!(matches!(broker.event(), Event::Died { token: 1 }));
    client.write("{\"op\":\"stats\"}\n");
    assert_eq!(broker.request().0, conn);
    broker.control.reply(conn, done(), Vec::new());
    assert_eq!(client.line(), "{\"ok\":{}}\n");
    drop(client);
    broker.expect_gone(conn);
}

/// The answer to `stop` is the last thing that a broker does.
#[test]
fn what_was_replied_before_the_end_reaches_the_client_whole() {
    let broker = start();
    let (mut prompt, mut slow) = (broker.greeted(), broker.greeted());
    let long = "x".repeat(LINE_BYTES_MAX / 2);
    let replies = [done(), Reply::Ok(serde_json::json!(long))];
    for (client, reply) in [&mut prompt, &mut slow].into_iter().zip(replies) {
        client.write("{\"op\":\"stop\",\"drain\":false}\n");
        let (conn, request) = broker.request();
        assert_eq!(request, Request::Stop { drain: false });
        broker.control.reply(conn, reply, Vec::new());
    }
    let socket = broker.socket.clone();
    // More than the socket has room for: it leaves as it is read.
    let reader = std::thread::spawn(move || slow.line());
    drop(broker.control);
    assert!(!socket.exists());
    assert_eq!(prompt.line(), "{\"ok\":{}}\n");
    assert_eq!(reader.join().unwrap(), format!("{{\"ok\":\"{long}\"}}\n"));
}

#[test]
fn the_next_request_waits_for_the_reply() {
    let broker = start();
    let mut client = broker.greeted();
    client.write("{\"op\":\"stats\"}\n{\"op\":\"ready\"}\n{\"op\":\"queue_list\"}\n");
    for expected in [Request::Stats, Request::Ready, Request::QueueList] {
        let (conn, request) = broker.request();
        assert_eq!(request, expected);
        assert!(broker.events.recv_timeout(NOT_YET).is_err());
        broker.control.reply(conn, done(), Vec::new());
        assert_eq!(client.line(), "{\"ok\":{}}\n");
    }
}

#[test]
fn descriptors_travel_beside_the_reply() {
    let broker = start();
    let mut client = broker.greeted();
    client.write("{\"op\":\"resume\",\"session\":7}\n");
    let (conn, _) = broker.request();
    let (read_end, write_end) = nix::unistd::pipe().unwrap();
    broker.control.reply(conn, done(), vec![write_end]);

    let mut bytes = [0; 64];
    let mut space = nix::cmsg_space!([i32; 4]);
    let mut iov = [IoSliceMut::new(&mut bytes)];
    let message = recvmsg::<()>(
        client.stream.as_raw_fd(),
        &mut iov,
        Some(&mut space),
        MsgFlags::empty(),
    )
    .unwrap();
    assert_eq!(message.bytes, "{\"ok\":{}}\n".len());
    let mut received = Vec::new();
    for part in message.cmsgs().unwrap() {
        if let ControlMessageOwned::ScmRights(descriptors) = part {
            received.extend(descriptors);
        }
    }
    assert_eq!(received.len(), 1);
    // SAFETY: just received, and owned by nobody else.
    let mut passed = File::from(unsafe { OwnedFd::from_raw_fd(received[0]) });
    passed.write_all(b"hi").unwrap();
    drop(passed);
    // The end: the broker has closed its own copy.
    let mut text = String::new();
    File::from(read_end).read_to_string(&mut text).unwrap();
    assert_eq!(text, "hi");
}

#[test]
fn a_half_closed_client_still_gets_its_reply() {
    let broker = start();
    let mut client = broker.greeted();
    client.write("{\"op\":\"stats\"}\n");
    client.stream.shutdown(std::net::Shutdown::Write).unwrap();
    let (conn, _) = broker.request();
    broker.control.reply(conn, done(), Vec::new());
    assert_eq!(client.line(), "{\"ok\":{}}\n");
    client.expect_closed();
    broker.expect_gone(conn);
}

#[test]
fn a_client_that_leaves_before_its_reply_is_gone() {
    let broker = start();
    let mut client = broker.greeted();
    client.write("{\"op\":\"stats\"}\n");
    let (conn, _) = broker.request();
    drop(client);
    broker.expect_gone(conn);
    broker.control.reply(conn, done(), Vec::new());
    broker.greeted();
}

#[test]
fn the_service_can_close_a_connection() {
    let broker = start();
    let mut client = broker.greeted();
    client.write("{\"op\":\"stats\"}\n");
    let (conn, _) = broker.request();
    broker.control.reply(conn, done(), Vec::new());
    broker.control.close(conn);
    assert_eq!(client.line(), "{\"ok\":{}}\n");
    client.expect_closed();
    broker.expect_gone(conn);
}

// --- bad input

#[test]
fn another_protocol_is_refused_with_both_versions() {
    let broker = start();
    let mut client = broker.client();
    client.write("{\"op\":\"hello\",\"protocol\":99,\"and\":\"more\"}\n");
    let (code, message) = client.error();
    assert_eq!(code, ErrorCode::VersionMismatch);
    assert!(message.contains("99") && message.contains(&PROTOCOL.to_string()));
    client.expect_closed();
}

#[test]
fn the_first_line_must_be_hello() {
    let broker = start();
    for line in [
        "{\"op\":\"stats\"}\n",
        "[]\n",
        "{\"op\":\"hello\"}\n",
        "17\n",
    ] {
        let mut client = broker.client();
        client.write(line);
        let (code, message) = client.error();
        assert_eq!(code, ErrorCode::Invalid);
        assert!(message.contains("hello"), "{message}");
        client.expect_closed();
    }
}

#[test]
fn what_is_json_but_no_request_is_refused_and_the_connection_goes_on() {
    let broker = start();
    let mut client = broker.greeted();
    for line in [
        "{\"op\":\"dance\"}",
        "{\"op\":\"queue_info\"}",
        "{\"op\":\"queue_info\",\"name\":7}",
        "{}",
        "[1,2]",
        "{\"op\":\"hello\",\"protocol\":1}",
    ] {
        client.write(&format!("{line}\n"));
        let (code, _) = client.error();
        assert_eq!(code, ErrorCode::Invalid, "{line}");
    }
    client.write("{\"op\":\"stats\"}\n");
    broker.request();
}

#[test]
fn garbage_is_answered_and_closed_and_disturbs_nobody() {
    let broker = start();
    let mut bystander = broker.greeted();
    for garbage in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        b"\n",
        b"\xff\xfe\x00\n",
        b"{\"op\":\"\xff\"}\n",
        b"{\"op\":\n",
        &[b'['; 100_000],
    ] {
        let mut client = broker.greeted();
        client.stream.write_all(garbage).unwrap();
        if !garbage.ends_with(b"\n") {
            client.stream.write_all(b"\n").unwrap();
        }
        let (code, message) = client.error();
        assert_eq!(code, ErrorCode::Invalid);
        assert!(message.contains("not JSON"), "{message}");
        client.expect_closed();
    }
    bystander.write("{\"op\":\"stats\"}\n");
    broker.request();
}

#[test]
fn a_line_without_end_is_refused() {
    let broker = start();
    let mut client = broker.greeted();
    let endless = vec![b' '; LINE_BYTES_MAX + 4096];
    // The broker may close before it has read all.
    let _ = client.stream.write_all(&endless);
    let mut line = String::new();
    match client.reader.read_line(&mut line) {
        Ok(_) => assert!(line.contains("a line of more than"), "{line}"),
        Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::ConnectionReset),
    }
}

#[test]
fn a_reply_longer_than_a_line_becomes_an_error() {
    let broker = start();
    let mut client = broker.greeted();
    client.write("{\"op\":\"queue_list\"}\n");
    let (conn, _) = broker.request();
    let long = Reply::Ok(serde_json::json!("x".repeat(LINE_BYTES_MAX)));
    broker.control.reply(conn, long, Vec::new());
    assert_eq!(client.error().0, ErrorCode::Full);
}

#[test]
fn a_client_that_does_not_read_is_closed_and_others_are_served() {
    let broker = start_with(Limits {
        stall_max: Duration::from_millis(300),
        ..Limits::default()
    });
    let mut deaf = broker.greeted();
    deaf.write("{\"op\":\"queue_list\"}\n{\"op\":\"queue_list\"}\n");
    let (conn, _) = broker.request();
    let long = Reply::Ok(serde_json::json!("x".repeat(LINE_BYTES_MAX - 100)));
    broker.control.reply(conn, long, Vec::new());
    broker.greeted();
    broker.expect_gone(conn);
}

#[test]
fn connections_beyond_the_limit_are_told_so() {
    let broker = start_with(Limits {
        connections_max: 2,
        ..Limits::default()
    });
    let first = broker.greeted();
    let mut second = broker.greeted();
    let mut third = broker.client();
    assert_eq!(third.error().0, ErrorCode::Full);
    third.expect_closed();
    drop(first);
    let deadline = Instant::now() + SOON;
    loop {
        let mut again = broker.client();
        // Who is refused may be closed before it has said a word.
        let _ = again
            .stream
            .write_all(b"{\"op\":\"hello\",\"protocol\":1}\n");
        if again.line().contains("1.2.3") {
            break;
        }
        assert!(Instant::now() < deadline);
    }
    second.write("{\"op\":\"stats\"}\n");
    broker.request();
}

// --- the socket file

#[test]
fn the_socket_and_its_folder_are_the_owners_alone_and_go_with_the_broker() {
    let broker = start();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&broker.socket), 0o600);
    assert_eq!(mode(broker.socket.parent().unwrap()), 0o700);
    drop(broker.control);
    assert!(!broker.socket.exists());
}

#[test]
fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    assert!(socket.exists());
    let (control, _events) = Control::start(&socket, hello(), wake()).unwrap();
    let error = Control::start(&socket, hello(), wake()).unwrap_err();
    assert!(matches!(error, ControlError::InUse { .. }), "{error}");
    UnixStream::connect(&socket).unwrap();
    drop(control);
    assert!(!socket.exists());
}

#[test]
fn a_socket_made_by_another_in_the_meantime_is_left_alone() {
    let broker = start();
    std::fs::remove_file(&broker.socket).unwrap();
    let _other = std::os::unix::net::UnixListener::bind(&broker.socket).unwrap();
    drop(broker.control);
    assert!(broker.socket.exists());
}

#[test]
fn bad_places_for_a_socket_are_clear_errors() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    let error = Control::start(&file, hello(), wake()).unwrap_err();
    assert!(matches!(error, ControlError::NotASocket { .. }), "{error}");
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");

    let error = Control::start(&file.join("socket"), hello(), wake()).unwrap_err();
    assert!(matches!(error, ControlError::Io { .. }), "{error}");

    let long = folder.path().join("x".repeat(120));
    let error = Control::start(&long, hello(), wake()).unwrap_err();
    assert!(matches!(error, ControlError::PathTooLong { .. }), "{error}");
    assert!(error.to_string().contains("107"));
}

// --- processes

/// Starts this test program again as the process that a test needs: it runs
/// `child_role` alone, with the role in its environment.
fn child(role: &str, argument: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_role", "--nocapture"])
        .env("CONTROL_TEST_ROLE", role)
        .env("CONTROL_TEST_ARGUMENT", argument)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn child_role() {
    let Some(role) = std::env::var_os("CONTROL_TEST_ROLE") else {
        return;
    };
    let argument = PathBuf::from(std::env::var_os("CONTROL_TEST_ARGUMENT").unwrap());
    match role.to_str().unwrap() {
        "parent_of_a_holder" => hold_the_socket_in_a_child(&argument),
        "few_descriptors" => serve_with_few_descriptors(&argument),
        "stranger" => ask_as_another_user(&argument),
        _ => {}
    }
}

/// Connects, asks, and has a child that inherits the socket and outlives us.
fn hold_the_socket_in_a_child(socket: &Path) {
    let mut client = Client::connect(socket);
    client.write(&format!(
        "{{\"op\":\"hello\",\"protocol\":{PROTOCOL}}}\n{{\"op\":\"stats\"}}\n"
    ));
    let inherited = nix::unistd::dup(&client.stream).unwrap();
    nix::fcntl::fcntl(
        &inherited,
        nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty()),
    )
    .unwrap();
    let mut holder = Command::new("sleep").arg("60").spawn().unwrap();
    println!("holder {}", holder.id());
    holder.wait().unwrap();
}

#[test]
fn a_dead_process_is_gone_though_its_child_holds_the_socket() {
    let broker = start();
    let mut parent = child("parent_of_a_holder", &broker.socket);
    let (conn, _) = broker.request();
    let holder: i32 = BufReader::new(parent.stdout.take().unwrap())
        .lines()
        .find_map(|line| line.unwrap().split("holder ").nth(1)?.parse().ok())
        .unwrap();
    assert!(broker.events.recv_timeout(NOT_YET).is_err());
    parent.kill().unwrap();
    let killed = Instant::now();
    broker.expect_gone(conn);
    assert!(killed.elapsed() < Duration::from_secs(2));
    parent.wait().unwrap();
    kill(Pid::from_raw(holder), Signal::SIGKILL).unwrap();
}

/// When the process started, by its stat file.
fn start_time(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let rest = &stat[stat.rfind(')').unwrap() + 2..];
    rest.split(' ').nth(19).unwrap().parse().unwrap()
}

#[test]
fn a_watched_process_is_reported_when_it_dies() {
    let broker = start();
    let mut process = Command::new("sleep").arg("60").spawn().unwrap();
    let started = start_time(process.id());
    broker.control.watch(process.id() as i32, started, 41);
    broker.control.watch(process.id() as i32, started, 42);
    broker.control.unwatch(41);
    assert!(broker.events.recv_timeout(NOT_YET).is_err());
    // A zombie is dead: nobody has waited for it yet.
    process.kill().unwrap();
    assert!(matches!(broker.event(), Event::Died { token: 42 }));
    assert!(broker.events.recv_timeout(NOT_YET).is_err());
    process.wait().unwrap();
}

#[test]
fn a_process_that_is_not_there_is_dead_at_once() {
    let broker = start();
    let own = std::process::id();
    broker.control.watch(own as i32, start_time(own) + 1, 1);
    assert!(matches!(broker.event(), Event::Died { token: 1 }));
    broker.control.watch(i32::MAX, 1, 2);
    assert!(matches!(broker.event(), Event::Died { token: 2 }));
    broker.control.watch(0, 0, 3);
    assert!(matches!(broker.event(), Event::Died { token: 3 }));
}

fn ask_as_another_user(socket: &Path) {
    nix::unistd::setuid(nix::unistd::Uid::from_raw(65_534)).unwrap();
    let mut client = Client::connect(socket);
    let _ = client
        .stream
        .write_all(b"{\"op\":\"hello\",\"protocol\":1}\n");
    println!("\nanswer {}", client.line());
    client.expect_closed();
}

#[test]
fn another_user_is_refused() {
    if !nix::unistd::geteuid().is_root() {
        // Only root can become another user.
        return;
    }
    let broker = start();
    // Past the file's own protection, which is tested elsewhere.
    let open = |path: &Path| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
    };
    open(broker.socket.parent().unwrap().parent().unwrap());
    open(broker.socket.parent().unwrap());
    open(&broker.socket);
    let stranger = child("stranger", &broker.socket);
    let output = stranger.wait_with_output().unwrap();
    let output = String::from_utf8(output.stdout).unwrap();
    let answer = output.lines().find_map(|line| line.strip_prefix("answer "));
    assert!(answer.unwrap().contains("not_permitted"), "{output}");
    assert!(broker.events.try_recv().is_err());
}

/// A control thread in a process that has hardly any descriptors left.
fn serve_with_few_descriptors(socket: &Path) {
    let (control, _events) = Control::start(socket, hello(), wake()).unwrap();
    let mut held = Vec::new();
    let limit = libc::rlimit {
        rlim_cur: 64,
        rlim_max: 64,
    };
    // SAFETY: the call reads the struct, which lives.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
    while let Ok(file) = File::open("/dev/null") {
        held.push(file);
    }
    println!("\nserving");
    let mut go = String::new();
    std::io::stdin().read_line(&mut go).unwrap();
    held.clear();
    println!("\nfreed");
    std::io::stdin().read_line(&mut go).unwrap();
    drop(control);
}

#[test]
fn running_out_of_descriptors_neither_ends_nor_spins_the_thread() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let mut server = child("few_descriptors", &socket);
    let mut output = BufReader::new(server.stdout.take().unwrap()).lines();
    let mut wait_for = |word: &str| while output.next().unwrap().unwrap() != word {};
    wait_for("serving");
    let mut refused = Client::connect(&socket);
    assert_eq!(refused.error().0, ErrorCode::Full);

    let ticks = |pid: u32| -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let rest = &stat[stat.rfind(')').unwrap() + 2..];
        let fields: Vec<&str> = rest.split(' ').collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    };
    let before = ticks(server.id());
    std::thread::sleep(Duration::from_millis(500));
    assert!(ticks(server.id()) - before < 10, "the thread spins");

    let mut input = server.stdin.take().unwrap();
    input.write_all(b"go\n").unwrap();
    wait_for("freed");
    let mut client = Client::connect(&socket);
    client.write(&format!("{{\"op\":\"hello\",\"protocol\":{PROTOCOL}}}\n"));
    assert!(client.line().contains("1.2.3"));
    input.write_all(b"go\n").unwrap();
    assert!(server.wait().unwrap().success());
}
