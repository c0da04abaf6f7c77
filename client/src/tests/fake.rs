//! A broker as far as a client can tell: the control socket and the segments,
//! and of the rest what a test does by hand.

use crate::control::{
    Attached, Hello, Opened, PROTOCOL, QueueInfo, Reply, Request, Stats, WireError,
};
use crate::error::Error;
use crate::lock;
use crate::record::{Answer, Delivery, Lease, Leases, Place, Send, submission};
use crate::settings::QueueSettings;
use crate::wire::{self, LineBuffer};
use nix::sys::eventfd::{EfdFlags, EventFd};
use ringmain_ring::Ordering;
use ringmain_ring::layout::LAYOUT_VERSION;
use ringmain_ring::record_ring::{Reader, Record, Writer};
use ringmain_ring::session::SessionMap;
use ringmain_ring::wait::{SLEEP_MAX, broker, client};
use serde::Serialize;
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How a fake broker answers, and what it has.
pub(super) struct State {
    pub(super) protocol: u32,
    pub(super) instance: u64,
    pub(super) settings: QueueSettings,
    /// What Resume is answered, if not by the session.
    pub(super) resume_error: Option<Error>,
    pub(super) resumed: u32,
    pub(super) connections: u32,
    sessions: HashMap<u64, Arc<SessionMap>>,
    doorbells: HashMap<u64, EventFd>,
    attachments: HashMap<String, u32>,
    streams: Vec<UnixStream>,
}

/// A broker in this process.
pub(super) struct FakeBroker {
    folder: tempfile::TempDir,
    pub(super) state: Arc<Mutex<State>>,
    listening: Option<UnixListener>,
}

impl FakeBroker {
    pub(super) fn start() -> FakeBroker {
        let mut broker = FakeBroker {
            folder: tempfile::tempdir().expect("folder"),
            state: Arc::new(Mutex::new(State {
                protocol: PROTOCOL,
                instance: 0xfeed_beef,
                settings: QueueSettings::default(),
                resume_error: None,
                resumed: 0,
                connections: 0,
                sessions: HashMap::new(),
                doorbells: HashMap::new(),
                attachments: HashMap::new(),
                streams: Vec::new(),
            })),
            listening: None,
        };
        broker.listen();
        broker
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.folder.path().join("ringmain.sock")
    }

    pub(super) fn client(&self) -> crate::Client {
        crate::Client::connect_to(self.socket()).expect("connects")
    }

    /// Dies: sockets close, segments stay.
    pub(super) fn kill(&mut self) {
        if let Some(listener) = self.listening.take() {
            // Ends the thread's accept, and with it the last descriptor.
            let _ = nix::sys::socket::shutdown(
                std::os::fd::AsRawFd::as_raw_fd(&listener),
                nix::sys::socket::Shutdown::Both,
            );
        }
        for stream in lock(&self.state).streams.drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    /// A successor: finds the sessions, and calls them orphaned.
    pub(super) fn listen(&mut self) {
        let _ = std::fs::remove_file(self.socket());
        let listener = UnixListener::bind(self.socket()).expect("binds");
        for map in lock(&self.state).sessions.values() {
            map.broker_wait().set(broker::ORPHANED);
            map.client_wait().wake(client::ALL);
        }
        let accepting = listener.try_clone().expect("clones");
        let (state, folder) = (Arc::clone(&self.state), self.folder.path().to_owned());
        std::thread::spawn(move || {
            while let Ok((stream, _)) = accepting.accept() {
                let (state, folder) = (Arc::clone(&state), folder.clone());
                let mut locked = lock(&state);
                locked.connections += 1;
                locked.streams.push(stream.try_clone().expect("clones"));
                drop(locked);
                std::thread::spawn(move || serve(&stream, &state, &folder));
            }
        });
        self.listening = Some(listener);
    }

    /// The broker's side of the newest session.
    pub(super) fn newest(&self) -> Peer {
        let state = lock(&self.state);
        let number = *state.sessions.keys().max().expect("a session");
        Peer::of(Arc::clone(&state.sessions[&number]))
    }

    /// Whether somebody rang since the last look.
    pub(super) fn was_rung(&self, session: u64) -> bool {
        lock(&self.state).doorbells[&session].read().is_ok()
    }
}

impl Drop for FakeBroker {
    fn drop(&mut self) {
        self.kill();
    }
}

fn serve(stream: &UnixStream, state: &Mutex<State>, folder: &Path) {
    let (mut lines, mut none) = (LineBuffer::new(), Vec::new());
    while let Ok(count @ 1..) = wire::receive(stream, &mut lines, &mut none) {
        let _: usize = count;
        while let Some(line) = lines.next_line().expect("short lines") {
            let request = serde_json::from_slice(&line).expect("a request");
            answer(stream, &mut lock(state), folder, request);
        }
    }
}

fn reply(stream: &UnixStream, value: &impl Serialize, descriptors: &[BorrowedFd<'_>]) {
    let reply = Reply::Ok(serde_json::to_value(value).expect("a value"));
    let line = wire::encode(&reply).expect("short");
    let _ = wire::send(stream, &line, descriptors);
}

fn refuse(stream: &UnixStream, error: &Error) {
    let line = wire::encode(&Reply::Error(WireError::from(error))).expect("short");
    let _ = wire::send(stream, &line, &[]);
}

fn doorbell() -> EventFd {
    EventFd::from_value_and_flags(0, EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)
        .expect("eventfd")
}

fn answer(stream: &UnixStream, state: &mut State, folder: &Path, request: Request) {
    let done: HashMap<String, String> = HashMap::new();
    match request {
        Request::Hello { .. } => {
            let hello = Hello {
                version: "9.9.9".to_owned(),
                protocol: state.protocol,
                layout: LAYOUT_VERSION,
                instance: format!("{:x}", state.instance),
                pid: std::process::id(),
            };
            reply(stream, &hello, &[]);
        }
        Request::Open { rings, .. } => {
            let session = state.sessions.len() as u64 + 1;
            let (geometry, path) = (rings.into(), folder.join(format!("session-{session}")));
            let bytes = ringmain_ring::layout::Geometry::segment_bytes(&geometry) as u64;
            let file = ringmain_ring::segment::create(&path, bytes).expect("creates");
            let map = SessionMap::initialise(&file, &path, geometry, state.instance, session)
                .expect("initialises");
            let bell = doorbell();
            reply(stream, &Opened { session }, &[file.as_fd(), bell.as_fd()]);
            state.sessions.insert(session, Arc::new(map));
            state.doorbells.insert(session, bell);
        }
        Request::Resume { session } => {
            if let Some(error) = &state.resume_error {
                return refuse(stream, error);
            }
            let bell = doorbell();
            state.sessions[&session]
                .broker_wait()
                .take(broker::ORPHANED);
            reply(stream, &Opened { session }, &[bell.as_fd()]);
            state.doorbells.insert(session, bell);
            state.resumed += 1;
        }
        Request::Attach { queue, .. } => {
            let next = state.attachments.len() as u32;
            let index = *state.attachments.entry(queue).or_insert(next);
            let settings = state.settings.clone();
            reply(stream, &Attached { index, settings }, &[]);
        }
        Request::QueueInfo { name } if name == "missing" => {
            refuse(stream, &Error::NoSuchQueue(name));
        }
        Request::QueueInfo { name } => reply(stream, &info(name, state), &[]),
        Request::QueueList => reply(stream, &vec![info("jobs".to_owned(), state)], &[]),
        Request::Stats => reply(stream, &Stats::default(), &[]),
        Request::Ready
        | Request::QueueCreate { .. }
        | Request::QueueDelete { .. }
        | Request::Stop { .. } => reply(stream, &done, &[]),
        Request::DeadLetters { .. } | Request::Redrive { .. } | Request::Outbound { .. } => {
            refuse(stream, &Error::Invalid("not in this fake".to_owned()));
        }
    }
}

fn info(name: String, state: &State) -> QueueInfo {
    QueueInfo {
        name,
        created_ms: 0,
        messages: 0,
        leased: 0,
        producers: 0,
        consumers: 0,
        settings: state.settings.clone(),
    }
}

/// What a test finds in a submission ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Seen {
    Send(u64, Vec<u8>),
    Ack(Vec<Lease>),
    Nack(u16, u64, Vec<Lease>),
    Extend(u64, Vec<Lease>),
    Flush(u16),
    End,
}

/// The broker's side of a session, in the test's hands.
pub(super) struct Peer {
    pub(super) map: Arc<SessionMap>,
    pub(super) submissions: Reader,
    deliveries: Writer,
    answers: Writer,
}

impl Peer {
    fn of(map: Arc<SessionMap>) -> Peer {
        Peer {
            map,
            submissions: Reader::new(0, 0),
            deliveries: Writer::new(0, 0),
            answers: Writer::new(0, 0),
        }
    }

    /// The next submission; its room is not free yet.
    pub(super) fn next(&mut self) -> Option<Seen> {
        let ring = self.map.submission();
        let record = self.submissions.next(ring).expect("a sound ring")?;
        Some(self.seen(&record))
    }

    fn seen(&self, record: &Record) -> Seen {
        let ring = self.map.submission();
        let leases = || {
            let read = Leases::read(record, ring).expect("leases");
            let all = (0..read.count)
                .map(|index| read.lease(ring, index))
                .collect();
            (read.millis, all)
        };
        match record.kind {
            submission::SEND => {
                let send = Send::read(record, ring).expect("a send");
                let Place::Inline { offset, len } = send.place else {
                    panic!("a chunk, which this fake does not know");
                };
                let mut payload = vec![0; len as usize];
                ring.area.copy_out(offset as usize, &mut payload);
                Seen::Send(record.position, payload)
            }
            submission::ACK => Seen::Ack(leases().1),
            submission::NACK => Seen::Nack(record.flags, leases().0, leases().1),
            submission::EXTEND => Seen::Extend(leases().0, leases().1),
            submission::FLUSH => Seen::Flush(record.flags),
            submission::END => Seen::End,
            kind => panic!("a record of kind {kind}"),
        }
    }

    /// All submissions that are there, their room freed.
    pub(super) fn take_all(&mut self) -> Vec<Seen> {
        let seen = std::iter::from_fn(|| self.next()).collect();
        let position = self.submissions.next_position();
        self.submissions.free(self.map.submission(), position);
        self.map.client_wait().wake(client::ROOM);
        seen
    }

    /// The payloads of the sends that come, until there are so many.
    pub(super) fn sends(&mut self, count: usize) -> Vec<Vec<u8>> {
        let mut payloads = Vec::new();
        let end = Instant::now() + Duration::from_secs(20);
        while payloads.len() < count {
            assert!(Instant::now() < end, "the sends do not come");
            for seen in self.take_all() {
                match seen {
                    Seen::Send(_, payload) => payloads.push(payload),
                    Seen::End => {}
                    other => panic!("{other:?} is no send"),
                }
            }
            std::thread::yield_now();
        }
        payloads
    }

    /// Delivers a message under a lease of this entry, with half a minute to go.
    pub(super) fn deliver(&mut self, entry: u32, payload: &[u8]) -> bool {
        let deadline_ns = crate::clock::monotonic_ns() + 30_000_000_000;
        self.deliver_until(entry, payload, deadline_ns)
    }

    pub(super) fn deliver_until(&mut self, entry: u32, payload: &[u8], deadline_ns: u64) -> bool {
        let delivery = Delivery {
            entry,
            attachment: 0,
            session: 77,
            position: u64::from(entry) * 8,
            sent_at_ms: 1_000_000,
            deadline_ns,
            attempts: 3,
            redelivered: true,
        };
        let ring = self.map.delivery();
        let begun = delivery.begin(&mut self.deliveries, ring, payload.len());
        let Ok(slot) = begun.expect("a sound ring") else {
            return false;
        };
        slot.put_bytes(crate::record::DELIVERY_HEAD_BYTES, payload);
        self.deliveries.publish(ring);
        self.map.client_wait().wake(client::MESSAGES);
        true
    }

    pub(super) fn answer(&mut self, answer: Answer) {
        let ring = self.map.answers();
        let room = answer.write(&mut self.answers, ring).expect("a sound ring");
        room.expect("room for an answer");
        self.answers.publish(ring);
        self.map.client_wait().wake(client::ANSWERS);
    }

    /// Confirms everything that was read as stored, and not as synced.
    pub(super) fn confirm_stored(&mut self) {
        let position = self.submissions.next_position();
        let stored = &self.map.header().confirmations.stored;
        stored.store(position, Ordering::Release);
        self.map.client_wait().wake(client::CONFIRMATION);
    }

    /// Closes the session, with this as the end of what was taken in.
    pub(super) fn finish(&self, position: u64) {
        self.map.broker_wait().set(broker::CLOSING);
        let word = &self.map.header().confirmations.final_position;
        word.store(position, Ordering::Release);
        self.map.client_wait().wake(client::ALL);
    }

    /// Waits until the client sleeps for one of these.
    pub(super) fn until_asleep_for(&self, bits: u32) {
        until(|| self.map.client_wait().peek() & bits != 0);
    }
}

/// Waits for a condition, within a bound that only a failure reaches.
pub(super) fn until(condition: impl Fn() -> bool) {
    let end = Instant::now() + 10 * SLEEP_MAX;
    while !condition() {
        assert!(Instant::now() < end, "it does not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}
