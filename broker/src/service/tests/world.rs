//! The broker's core with everything around it, in one thread: real rings and
//! ledger in a folder of shared memory, the store in memory, a clock that is
//! set by hand, clients, and deaths.

use super::super::core::{Core, Outward, Setup};
use super::super::recovery;
use super::super::worker::{Done, Job};
use super::client::{Client, Life};
use super::model::{Answered, Fate, Model, Queue, Stand};
use crate::control::{self, ConnId, Peer};
use crate::crash::fuse;
use crate::hub::HubLimits;
use crate::service::BrokerError;
use crate::store::model::{Fault, ModelStore};
use crate::store::{Store, StoreError, StoredQueue};
use ringmain::QueueSettings;
use ringmain::control::{Attached, PayloadSegment, Purpose, Reply, Request, Rings};
use ringmain::record::{self, Answer, submission};
use ringmain_ring::layout::LAYOUT_VERSION;
use ringmain_ring::payload::{Outbound, PayloadMap};
use ringmain_ring::session::SessionMap;
use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Longest payload of the queues.
pub const PAYLOAD_MAX: u32 = 2500;
/// Longest payload that is sent in a record, and may come in one.
const INLINE_MAX: usize = 900;
/// A payload segment is asked for so many bytes.
const SEGMENT_BYTES: u64 = 3 * 4096;
/// Every wait in the world is over after so long: leases, delays, intervals.
const LONG_NS: u64 = 2_000_000_000;
const RINGS: Rings = Rings {
    submission_bytes: 4096,
    delivery_bytes: 4096,
    answer_bytes: 4096,
};

/// An administrative change that was asked for.
#[derive(Debug, Clone, Copy)]
struct Asked {
    conn: ConnId,
    queue: usize,
}

/// Numbers without end from a seed.
#[derive(Debug, Clone)]
pub struct Dice(pub u64);

impl Dice {
    pub fn roll(&mut self) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.roll() % limit.max(1) as u64) as usize
    }
}

/// See the module's text.
pub struct World {
    pub dir: tempfile::TempDir,
    pub store: Arc<ModelStore>,
    pub core: Option<Core>,
    boot: u64,
    pub now_ns: u64,
    pub jobs: Vec<Job>,
    pub dones: VecDeque<Done>,
    pub clients: Vec<Client>,
    pub model: Model,
    next_conn: u64,
    pub replies: HashMap<ConnId, VecDeque<(Reply, Vec<OwnedFd>)>>,
    asked: Option<Asked>,
    /// The next call of the broker dies at this place.
    pub fuse: Option<u32>,
    /// A commit or sync was told to fail.
    fault: bool,
    pub dice: Dice,
    cache_bytes: usize,
    /// Sessions that nobody has.
    strays: Vec<u64>,
    /// What was done, for who looks into a failure.
    pub trace: Vec<String>,
}

impl World {
    pub fn new(seed: u64) -> World {
        let mut dice = Dice(seed);
        let cache_bytes = [0, 600, 2000, 1 << 20][dice.below(4)];
        let mut world = World {
            dir: tempfile::tempdir_in("/dev/shm").unwrap(),
            store: Arc::new(ModelStore::new()),
            core: None,
            boot: 1,
            now_ns: 1_000_000_000,
            jobs: Vec::new(),
            dones: VecDeque::new(),
            clients: Vec::new(),
            model: Model::default(),
            next_conn: 0,
            replies: HashMap::new(),
            asked: None,
            fuse: None,
            fault: false,
            dice,
            cache_bytes,
            strays: Vec::new(),
            trace: Vec::new(),
        };
        world.start();
        world
    }

    pub fn note(&mut self, what: impl FnOnce() -> String) {
        let now = self.now_ns;
        self.trace.push(format!(
            "{}.{:06} {}",
            now / 1_000_000,
            now % 1_000_000,
            what()
        ));
    }

    // Calls of the broker.

    /// Calls the broker, if it lives; it may die in it.
    pub fn call<R>(&mut self, body: impl FnOnce(&mut Core) -> R) -> Option<R> {
        let core = self.core.as_mut()?;
        let result = fuse::kill_after(self.fuse.take(), || body(core));
        if result.is_none() {
            self.note(|| "-- killed".to_owned());
            self.broker_dies();
        }
        self.see(false);
        result
    }

    /// Takes notice of what the broker has done.
    fn see(&mut self, starting: bool) {
        self.look(starting);
        let Some(core) = self.core.as_mut() else {
            return;
        };
        core.hub.check();
        self.jobs.append(&mut core.jobs);
        let mut gone = Vec::new();
        for outward in std::mem::take(&mut core.outward) {
            match outward {
                Outward::Reply(conn, reply, fds) => {
                    self.replies
                        .entry(conn)
                        .or_default()
                        .push_back((reply, fds));
                }
                Outward::Close(conn) => gone.push(conn),
                Outward::Tell(..) => {}
                Outward::Watch(..) | Outward::Unwatch(_) | Outward::Register(_) => {}
                Outward::Unregister(_) => {}
            }
        }
        for conn in gone {
            self.call(|core| core.conn_gone(conn));
        }
    }

    /// Looks into all delivery rings.
    fn look(&mut self, starting: bool) {
        let mut all = Vec::new();
        for (index, client) in self.clients.iter_mut().enumerate() {
            for found in client.look() {
                let named = |a: &&super::client::Attachment| a.index == found.delivery.attachment;
                let attachment = client.attachments.iter().find(named);
                // Its broker may have died between noting and answering it.
                let attachment = attachment.or(client.attaching.as_ref());
                let queue = attachment.expect("a delivery names an attachment").queue;
                all.push((index, queue, client.life, found));
            }
        }
        if all.is_empty() {
            return;
        }
        let seen: Vec<_> = all
            .iter()
            .map(|(client, _, _, found)| {
                let d = &found.delivery;
                (
                    *client,
                    d.session,
                    d.position,
                    d.redelivered,
                    found.position,
                    d.entry,
                )
            })
            .collect();
        self.note(|| format!("   sees (client, session, position, again, at, entry) {seen:?}"));
        self.model.delivered(&all, self.now_ns, starting);
        for (index, client) in self.clients.iter().enumerate() {
            let window: u32 = client
                .attachments
                .iter()
                .chain(&client.attaching)
                .map(|a| a.window)
                .sum();
            let live = self.model.live_leases(index, self.now_ns);
            assert!(
                live <= window as usize,
                "client {index} holds {live} leases, its window is {window}"
            );
        }
    }

    pub fn pass(&mut self) {
        let now_ns = self.now_ns;
        let result = self.call(|core| core.pass(now_ns));
        self.after(result.map(|result| result.map(|_| ())));
    }

    /// A store that failed is dropped, and the core with it, as by
    /// [`crate::service::serve`].
    fn after(&mut self, result: Option<Result<(), StoreError>>) {
        match result {
            Some(Err(StoreError::Failed(why))) if self.fault => {
                self.note(|| format!("-- the store failed: {why}"));
                self.broker_dies();
            }
            Some(Err(error)) => panic!("{error}"),
            Some(Ok(())) | None => {}
        }
    }

    /// Does a job for the store; its end is noted later.
    pub fn run_job(&mut self, which: usize) {
        if self.jobs.is_empty() {
            return;
        }
        let job = self.jobs.remove(which % self.jobs.len());
        self.note(|| format!("runs {}", name(&job)));
        let done = match job {
            Job::Read { queue, from } => {
                let bytes = self.dice.below(3000);
                match self.store.read(queue, from, bytes) {
                    Ok(blocks) => Done::Read {
                        queue,
                        from,
                        blocks,
                    },
                    Err(error) => Done::Failed(error),
                }
            }
            job => job.run(self.store.as_ref()),
        };
        self.dones.push_back(done);
    }

    /// Tells the broker of a job that is done.
    pub fn finish_job(&mut self, which: usize) {
        if self.dones.is_empty() {
            return;
        }
        let which = which % self.dones.len();
        let done = self.dones.remove(which).unwrap();
        let result = self.call(|core| core.job_done(done));
        self.after(result);
        self.take_admin_reply();
    }

    pub fn request(
        &mut self,
        conn: ConnId,
        peer: Peer,
        request: Request,
    ) -> Option<(Reply, Vec<OwnedFd>)> {
        self.call(|core| core.request(conn, peer, request))?;
        self.replies.get_mut(&conn)?.pop_front()
    }

    // Deaths.

    /// The broker is gone. The jobs that its threads had may be done or not.
    pub fn broker_dies(&mut self) {
        self.model.deaths += 1;
        self.core = None;
        self.dones.clear();
        for job in std::mem::take(&mut self.jobs) {
            if self.dice.below(2) == 0 {
                self.note(|| format!("-- {} was still done", name(&job)));
                let _ = job.run(self.store.as_ref());
            }
        }
        self.store = Arc::new(self.store.reopen());
        self.fault = false;
        self.replies.clear();
        for client in &mut self.clients {
            client.conn = None;
        }
    }

    /// A broker starts, if there is none. It may die in that.
    pub fn start(&mut self) {
        if self.core.is_some() {
            return;
        }
        for index in 0..self.clients.len() {
            let client = &self.clients[index];
            if client.is_alive() && client.peer.start_time == DOOMED {
                self.client_dies(index);
            }
        }
        let setup = Setup {
            shm_dir: self.dir.path().to_owned(),
            instance: 7,
            sessions_max: 64,
            payload_limits: crate::service::payloads::PayloadLimits {
                session_bytes: 64 << 10,
                total_bytes: 256 << 20,
            },
        };
        let limits = HubLimits {
            cache_bytes: self.cache_bytes,
            ..HubLimits::default()
        };
        let (store, boot, now_ns) = (self.store.clone(), self.boot, self.now_ns);
        let started = fuse::kill_after(self.fuse.take(), || {
            recovery::start(setup, store, limits, boot, now_ns)
        });
        self.note(|| format!("-- broker started: {}", started.is_some()));
        match started {
            Some(Ok(core)) => self.core = Some(core),
            Some(Err(error)) => panic!("a broker can't start: {}", message_of(&error)),
            None => self.broker_dies(),
        }
        self.see(true);
        self.reconcile();
    }

    /// After a death nobody answers what was asked before it: the store says
    /// what became of it.
    fn reconcile(&mut self) {
        if self.core.is_none() {
            return;
        }
        self.asked = None;
        let stored = self.store.reopen().queues().unwrap();
        let known: Vec<u32> = self
            .model
            .queues
            .iter()
            .filter_map(|queue| queue.number)
            .collect();
        for index in 0..self.model.queues.len() {
            let queue = &self.model.queues[index];
            let found = stored
                .iter()
                .map(|s| (s.queue, &s.row.name))
                .find(|(number, name)| {
                    let new = queue.stand == Stand::Creating && **name == queue.name;
                    queue.number == Some(*number) || new && !known.contains(number)
                });
            self.model.queues[index].stand = Stand::Gone;
            if let Some((number, _)) = found {
                self.model.queues[index].stand = Stand::Live;
                self.model.set_number(index, number);
            }
        }
        for index in 0..self.model.queues.len() {
            if self.model.queues[index].stand == Stand::Gone {
                self.model.purge(index);
            }
        }
    }

    /// The process of a client is gone; the broker has not noticed.
    pub fn client_dies(&mut self, index: usize) {
        self.note(|| format!("client {index} dies"));
        self.clients[index].life = Life::Dead;
        self.model.client_died(index);
    }

    /// Kills a client. The broker notices, if it lives.
    pub fn kill_client(&mut self, index: usize) {
        if self.clients[index].is_alive() {
            self.read_answers(index);
            self.client_dies(index);
        }
        if let Some(conn) = self.clients[index].conn.take() {
            self.call(|core| core.conn_gone(conn));
        }
    }

    /// The broker notices the deaths that it slept through.
    pub fn reap(&mut self) {
        for index in 0..self.clients.len() {
            let client = &self.clients[index];
            if !client.is_alive() && client.conn.is_none() {
                let number = client.session;
                self.call(|core| core.process_died(number));
            }
        }
        for number in self.strays.clone() {
            self.call(|core| core.process_died(number));
        }
    }

    /// All processes are gone, and with them all that was not synced, save some
    /// of it.
    pub fn power_cut(&mut self) {
        self.note(|| "-- power cut".to_owned());
        for index in 0..self.clients.len() {
            if self.clients[index].is_alive() {
                self.read_answers(index);
            }
        }
        let synced: HashMap<u64, u64> = self
            .clients
            .iter()
            .map(|c| (c.session, c.cursors().1))
            .collect();
        let clients: Vec<u64> = self.clients.iter().map(|c| c.cursors().1).collect();
        self.model
            .power_cut(|session| synced[&session], |client| clients[client]);
        let keep = self.dice.below(self.store.unsynced_batches() + 1);
        let store = Arc::new(self.store.power_cut(keep));
        self.broker_dies();
        self.store = store;
        for client in &mut self.clients {
            client.life = Life::Dead;
            client.forget();
        }
        // The folder lies in memory; or another boot finds it as it was.
        if self.dice.below(2) == 0 {
            for file in std::fs::read_dir(self.dir.path()).unwrap() {
                std::fs::remove_file(file.unwrap().path()).unwrap();
            }
        }
        self.boot += 1;
        // What is not there now never was, and its number may be given again.
        let stored = self.store.queues().unwrap();
        for queue in &mut self.model.queues {
            queue.number = queue
                .number
                .filter(|&number| stored.iter().any(|s| s.queue == number));
        }
    }

    pub fn fail_next(&mut self, sync: bool, fault: Fault) {
        if self.core.is_none() {
            return;
        }
        self.fault = true;
        match sync {
            true => self.store.fail_next_sync(fault),
            false => self.store.fail_next_commit(fault),
        }
    }

    // Queues.

    /// The model's number of the queue with this name that exists, if one does.
    pub fn queue(&self, name: &str) -> Option<usize> {
        let exists = |q: &Queue| q.name == name && matches!(q.stand, Stand::Live | Stand::Deleting);
        self.model.queues.iter().position(exists)
    }

    pub fn create_queue(&mut self, name: &str, visibility_timeout_ms: u64) {
        if self.core.is_none() || self.asked.is_some() || self.queue(name).is_some() {
            return;
        }
        self.note(|| format!("creates {name}"));
        self.model.queues.push(Queue {
            name: name.to_owned(),
            number: None,
            stand: Stand::Creating,
        });
        let queue = self.model.queues.len() - 1;
        let settings = QueueSettings {
            visibility_timeout_ms,
            max_message_bytes: PAYLOAD_MAX,
            ..QueueSettings::default()
        };
        self.ask(
            queue,
            Request::QueueCreate {
                name: name.to_owned(),
                settings,
            },
        );
    }

    pub fn delete_queue(&mut self, name: &str) {
        let Some(queue) = self.queue(name) else {
            return;
        };
        if self.core.is_none() || self.asked.is_some() {
            return;
        }
        self.note(|| format!("deletes {name}"));
        self.model.queues[queue].stand = Stand::Deleting;
        self.model.purge(queue);
        self.ask(
            queue,
            Request::QueueDelete {
                name: name.to_owned(),
            },
        );
    }

    fn ask(&mut self, queue: usize, request: Request) {
        let conn = self.new_conn();
        self.asked = Some(Asked { conn, queue });
        self.call(|core| core.request(conn, alive(), request));
        self.take_admin_reply();
    }

    fn take_admin_reply(&mut self) {
        let Some(Asked { conn, queue }) = self.asked else {
            return;
        };
        let Some((reply, _)) = self.replies.get_mut(&conn).and_then(VecDeque::pop_front) else {
            return;
        };
        assert!(matches!(reply, Reply::Ok(_)), "{reply:?}");
        self.note(|| "   is told that it is done".to_owned());
        self.asked = None;
        let stored = self.store.reopen().queues().unwrap();
        let asked = queue;
        let queue = &mut self.model.queues[queue];
        match queue.stand {
            Stand::Creating => {
                let found = stored.iter().find(|s| s.row.name == queue.name);
                let number = found.expect("a queue is answered when it is stored").queue;
                queue.stand = Stand::Live;
                self.model.set_number(asked, number);
            }
            _ => {
                assert!(
                    !stored.iter().any(|s| Some(s.queue) == queue.number),
                    "a deletion was answered early"
                );
                queue.stand = Stand::Gone;
            }
        }
    }

    // Clients.

    pub fn new_conn(&mut self) -> ConnId {
        self.next_conn += 1;
        ConnId(self.next_conn)
    }

    /// A client opens a session. A doomed one does not live to see the next
    /// broker.
    pub fn open(&mut self, doomed: bool) -> Option<usize> {
        let mut peer = alive();
        if doomed {
            peer.start_time = DOOMED;
        }
        // Another user's chunks are not read in place.
        peer.uid = self.dice.below(2) as u32;
        let conn = self.new_conn();
        let request = Request::Open {
            layout: LAYOUT_VERSION,
            rings: RINGS,
        };
        let (reply, fds) = self.request(conn, peer, request)?;
        if let Reply::Error(error) = reply {
            self.note(|| format!("is refused a session: {error:?}"));
            return None;
        }
        let file = File::from(fds.into_iter().next().unwrap());
        let map = SessionMap::open(&file, self.dir.path()).unwrap();
        let ready = self.request(conn, peer, Request::Ready);
        if ready.is_none() {
            // Its broker died; it gives up.
            self.strays.push(map.session());
            return None;
        }
        self.clients
            .push(Client::new(conn, peer, map, self.dir.path()));
        let index = self.clients.len() - 1;
        let session = self.clients[index].session;
        self.note(|| format!("client {index} opens session {session}, doomed: {doomed}"));
        Some(index)
    }

    pub fn attach(&mut self, client: usize, name: &str, purpose: Purpose, window: u32) {
        let Some(queue) = self.queue(name) else {
            return;
        };
        let (Some(conn), peer) = (self.clients[client].conn, self.clients[client].peer) else {
            return;
        };
        if !self.clients[client].is_alive()
            || self.clients[client].attachment(queue, purpose).is_some()
        {
            return;
        }
        let request = Request::Attach {
            queue: name.to_owned(),
            purpose,
            window,
        };
        let attaching = super::client::Attachment {
            queue,
            purpose,
            index: u32::MAX,
            window,
        };
        self.clients[client].attaching = Some(attaching);
        let Some((reply, _)) = self.request(conn, peer, request) else {
            return;
        };
        self.clients[client].attaching = None;
        let Reply::Ok(value) = reply else { return };
        let attached: Attached = serde_json::from_value(value).unwrap();
        self.note(|| format!("client {client} attaches to {name} for {purpose:?}, {window}"));
        self.clients[client]
            .attachments
            .push(super::client::Attachment {
                queue,
                purpose,
                index: attached.index,
                window,
            });
    }

    pub fn resume(&mut self, client: usize) {
        let (session, peer) = (self.clients[client].session, self.clients[client].peer);
        if !self.clients[client].is_alive()
            || self.clients[client].conn.is_some()
            || self.core.is_none()
        {
            return;
        }
        let conn = self.new_conn();
        let Some((reply, _)) = self.request(conn, peer, Request::Resume { session }) else {
            return;
        };
        assert!(
            matches!(reply, Reply::Ok(_)),
            "a session of the living is not resumed: {reply:?}"
        );
        self.clients[client].conn = Some(conn);
        self.note(|| format!("client {client} resumes"));
        if let Some(attaching) = self.clients[client].attaching {
            let name = self.model.queues[attaching.queue].name.clone();
            if self.queue(&name) == Some(attaching.queue) {
                self.attach(client, &name, attaching.purpose, attaching.window);
            }
        }
    }

    /// Publishes a run of messages at once.
    pub fn send(&mut self, client: usize, queue_of: usize, lens: &[usize]) {
        if !self.clients[client].is_alive() {
            return;
        }
        let produce = |a: &&super::client::Attachment| a.purpose == Purpose::Produce;
        let choices: Vec<_> = self.clients[client]
            .attachments
            .iter()
            .filter(produce)
            .copied()
            .collect();
        if choices.is_empty() {
            return;
        }
        let attachment = choices[queue_of % choices.len()];
        let session = self.clients[client].session;
        for &len in lens {
            let stamp = self.model.messages.len() as u64;
            let payload: Vec<u8> = (0..len)
                .map(|at| (stamp * 31 + at as u64 * 7) as u8)
                .collect();
            // Some that would fit a record, too.
            let in_chunk = len > INLINE_MAX || (len > 128 && len.is_multiple_of(2));
            let sent = match in_chunk {
                true => self.send_chunk(client, attachment.index, &payload),
                false => self.clients[client].send(attachment.index, &payload),
            };
            let Some(range) = sent else { break };
            let too_large = len > PAYLOAD_MAX as usize;
            self.note(|| {
                format!(
                    "client {client} sends session {session} position {} of {len} to {}",
                    range.0, attachment.queue
                )
            });
            self.model
                .accepted(session, range, attachment.queue, payload, too_large);
        }
        self.clients[client].publish();
    }

    /// Sends in a chunk, of a new segment if the client has none that is free.
    fn send_chunk(&mut self, client: usize, attachment: u32, payload: &[u8]) -> Option<(u64, u64)> {
        if let Some(range) = self.clients[client].send_chunk(attachment, payload) {
            return Some(range);
        }
        let Client {
            conn,
            peer,
            session,
            ..
        } = self.clients[client];
        // What was written is published first: the broker may look.
        self.clients[client].publish();
        let request = Request::Outbound {
            bytes: SEGMENT_BYTES,
        };
        let (reply, fds) = self.request(conn?, peer, request)?;
        let Reply::Ok(value) = reply else { return None };
        let PayloadSegment { segment, units } = serde_json::from_value(value).unwrap();
        self.note(|| format!("client {client} has segment {segment} of session {session}"));
        let file = File::from(fds.into_iter().next().unwrap());
        let map = PayloadMap::new(&file, self.dir.path(), units).unwrap();
        let client = &mut self.clients[client];
        client.outbound.push(Outbound::new(map, segment));
        if !client.is_alive() {
            return None;
        }
        client.send_chunk(attachment, payload)
    }

    pub fn take(&mut self, client: usize, most: usize) {
        for _ in 0..most {
            if !self.clients[client].is_alive() {
                return;
            }
            let Some(position) = self.clients[client].take() else {
                return;
            };
            self.note(|| format!("client {client} takes {position}"));
            self.model.taken(client, position, self.now_ns);
        }
    }

    fn some_held(&mut self, client: usize, most: usize, from: usize) -> Vec<u64> {
        let held = &mut self.clients[client].held;
        let from = from % held.len().max(1);
        let to = (from + most).min(held.len());
        let some: Vec<u64> = held.drain(from..to).collect();
        self.clients[client].check_shown(&some);
        some
    }

    /// Acks some of what the client holds, in one record.
    pub fn ack(&mut self, client: usize, most: usize, from: usize) {
        self.answer(client, most, from, Answered::Ack, |client, leases| {
            client.ack(leases)
        });
    }

    pub fn nack(&mut self, client: usize, most: usize, from: usize, delay_ms: u64, counted: bool) {
        let due_ns = self.now_ns + delay_ms * 1_000_000;
        let flags = if counted {
            0
        } else {
            submission::NACK_UNCOUNTED
        };
        let answer = Answered::Nack { counted, due_ns };
        self.answer(client, most, from, answer, |client, leases| {
            client.nack(flags, delay_ms, leases)
        });
    }

    fn answer(
        &mut self,
        client: usize,
        most: usize,
        from: usize,
        answer: Answered,
        write: impl FnOnce(&mut Client, &[record::Lease]) -> Option<u64>,
    ) {
        if !self.clients[client].is_alive() {
            return;
        }
        let held = self.some_held(client, most, from);
        if held.is_empty() {
            return;
        }
        let leases: Vec<usize> = held
            .iter()
            .map(|&position| self.model.lease_of(client, position))
            .collect();
        let records: Vec<_> = leases
            .iter()
            .map(|&lease| self.model.record_lease(lease))
            .collect();
        let Some(end) = write(&mut self.clients[client], &records) else {
            self.clients[client].held.extend(held);
            return;
        };
        self.clients[client].publish();
        self.note(|| format!("client {client} answers {held:?}: {answer:?}, record ends {end}"));
        for lease in leases {
            self.model.answered(lease, answer, end);
        }
    }

    /// Acks a lease that was answered already.
    pub fn ack_again(&mut self, client: usize, which: usize) {
        let open = |index: &usize| {
            let lease = &self.model.leases[*index];
            lease.client == client && lease.answered.is_some() && !lease.resolved
        };
        let open: Vec<usize> = (0..self.model.leases.len()).filter(open).collect();
        if open.is_empty() || !self.clients[client].is_alive() {
            return;
        }
        let lease = open[which % open.len()];
        let record = self.model.record_lease(lease);
        let Some(end) = self.clients[client].ack(&[record]) else {
            return;
        };
        self.clients[client].publish();
        self.note(|| {
            format!(
                "client {client} acks {} once more",
                record.delivery_position
            )
        });
        self.model.answered(lease, Answered::Ack, end);
    }

    pub fn extend(&mut self, client: usize, which: usize, duration_ms: u64) {
        let held = &self.clients[client].held;
        if held.is_empty() || !self.clients[client].is_alive() {
            return;
        }
        let position = held[which % held.len()];
        let lease = self.model.lease_of(client, position);
        let record = self.model.record_lease(lease);
        let Some(end) = self.clients[client].extend(duration_ms, &[record]) else {
            return;
        };
        self.clients[client].publish();
        self.note(|| format!("client {client} extends {position} by {duration_ms} ms"));
        self.model.extended(lease, duration_ms, end, self.now_ns);
    }

    /// Acks a lease of another client, or one that never was.
    pub fn forge(&mut self, client: usize, which: usize) {
        if !self.clients[client].is_alive() {
            return;
        }
        let count = self.model.leases.len();
        let mut lease = record::Lease {
            delivery_position: which as u64 | 1 << 40,
            entry: (which % 64) as u32,
        };
        let foreign = (0..count).map(|at| (at + which) % count).find(|&at| {
            let lease = &self.model.leases[at];
            lease.client != client
                && !self
                    .model
                    .by_delivery
                    .contains_key(&(client, lease.position))
        });
        if let Some(foreign) = foreign {
            lease = self.model.record_lease(foreign);
        }
        // A position that this client has not reached could be given later.
        if lease.delivery_position < 1 << 40
            && !self.clients[client].is_beyond(lease.delivery_position)
        {
            return;
        }
        let key = (client, lease.delivery_position);
        if self.clients[client].ack(&[lease]).is_none() {
            return;
        }
        self.clients[client].publish();
        self.note(|| format!("client {client} forges {lease:?}"));
        *self.model.forged.entry(key).or_insert(0) += 1;
    }

    pub fn flush(&mut self, client: usize, synced: bool) {
        if !self.clients[client].is_alive() {
            return;
        }
        let flags = if synced {
            submission::FLUSH_SYNCED
        } else {
            submission::FLUSH_STORED
        };
        let Some(end) = self.clients[client].flush(flags) else {
            return;
        };
        self.clients[client].publish();
        let flush = &mut self.clients[client].flush;
        flush.0 = end;
        if synced {
            flush.1 = end;
        }
    }

    /// Ends a session as a client's library does.
    pub fn end(&mut self, client: usize) {
        if !self.clients[client].is_alive() {
            return;
        }
        self.read_answers(client);
        if self.clients[client].end().is_some() {
            self.clients[client].publish();
            self.note(|| format!("client {client} ends its session"));
            self.client_dies(client);
        }
    }

    /// A client that no correct program is.
    pub fn vandalise(&mut self, client: usize, how: u32) {
        if !self.clients[client].is_alive() {
            return;
        }
        self.read_answers(client);
        let stored = self.clients[client].cursors().0;
        let session = self.clients[client].session;
        self.note(|| format!("client {client} goes mad"));
        self.clients[client].life = Life::Mad;
        match how % 5 {
            0 => _ = self.clients[client].garbage(),
            1 => _ = self.clients[client].send(99, b"nowhere"),
            _ => {}
        }
        self.clients[client].publish();
        if how % 5 > 1 {
            self.clients[client].scribble(how % 5);
        }
        self.model.client_broke(client, session, stored);
    }

    /// The client reads its cursors, and then its answers.
    pub fn read_answers(&mut self, client: usize) {
        if !self.clients[client].is_alive() {
            return;
        }
        let cursors = self.clients[client].cursors();
        let before = std::mem::replace(&mut self.clients[client].confirmed, cursors);
        assert!(
            before.0 <= cursors.0 && before.1 <= cursors.1,
            "a confirmation was taken back"
        );
        assert!(cursors.1 <= cursors.0, "synced before it was stored");
        assert!(
            cursors.0 <= self.clients[client].tail(),
            "stored before it was sent"
        );
        let session = self.clients[client].session;
        for answer in self.clients[client].answers() {
            self.note(|| format!("client {client} reads {answer:?}"));
            match answer {
                Answer::Refused { position, .. } => self.model.refused(session, position),
                Answer::LeaseLost { delivery_position } => {
                    self.model.lost(client, delivery_position)
                }
            }
        }
        self.model.resolve(client, cursors.0);
    }

    // Checks.

    /// Lets everything come to rest.
    pub fn settle(&mut self) {
        for _ in 0..12 {
            self.start();
            self.pass();
            while !self.jobs.is_empty() {
                self.run_job(0);
            }
            while !self.dones.is_empty() {
                self.finish_job(0);
            }
            for client in 0..self.clients.len() {
                self.read_answers(client);
            }
            self.now_ns += 1_000_000;
        }
    }

    /// With consumers that do their work everything gets done.
    pub fn check_progress(&mut self) {
        self.note(|| "== consumers do their work".to_owned());
        self.fuse = None;
        self.store.set_room(u64::MAX);
        self.start();
        self.reap();
        for client in 0..self.clients.len() {
            self.resume(client);
            if !self.clients[client].is_alive() {
                self.kill_client(client);
            }
        }
        let mut quiet = 0;
        let mut rounds = 0;
        while quiet < 3 {
            let before = self.progress();
            self.settle();
            for client in 0..self.clients.len() {
                self.take(client, usize::MAX);
                while self.clients[client].is_alive() && !self.clients[client].held.is_empty() {
                    let before = self.clients[client].held.len();
                    self.ack(client, 40, 0);
                    if self.clients[client].held.len() == before {
                        break;
                    }
                }
            }
            let held = self
                .clients
                .iter()
                .any(|c| c.is_alive() && !c.held.is_empty());
            let moved = before != self.progress() || held;
            quiet = if moved { 0 } else { quiet + 1 };
            if quiet > 0 {
                self.now_ns += LONG_NS;
            }
            rounds += 1;
            assert!(rounds < 3000, "there is no end to it");
        }
        self.settle();
        self.check_nothing_waits();
        self.check_store();
    }

    /// What grows while there is something to do.
    fn progress(&self) -> (usize, u64) {
        let confirmed = self.clients.iter().map(|client| client.cursors().0);
        (self.model.leases.len(), confirmed.sum())
    }

    /// Every queue with a consumer is empty, and all that was sent is confirmed.
    fn check_nothing_waits(&self) {
        let is_consumed = |queue: usize| {
            let consumes =
                |c: &Client| c.is_alive() && c.attachment(queue, Purpose::Consume).is_some();
            self.clients.iter().any(consumes)
        };
        for message in &self.model.messages {
            let waits = message.fate == Fate::Owed && is_consumed(message.queue);
            assert!(
                !waits,
                "I1: nobody gets session {} position {}: {message:?}",
                message.session, message.position
            );
        }
        for (index, client) in self
            .clients
            .iter()
            .enumerate()
            .filter(|(_, c)| c.is_alive())
        {
            let (stored, synced) = client.cursors();
            assert_eq!(
                stored,
                client.tail(),
                "what client {index} sent is not confirmed"
            );
            assert!(
                synced >= client.flush.1,
                "the flush of client {index} is not answered"
            );
        }
    }

    /// The store holds what is owed, nothing that was acked, and all in order.
    pub fn check_store(&self) {
        let held = self.check_stored(self.store.as_ref(), |client| client.cursors().0);
        for message in self
            .model
            .messages
            .iter()
            .filter(|message| message.fate == Fate::Acked)
        {
            let identity = (message.session, message.position);
            assert!(
                !held.contains(&identity),
                "I5: {identity:?} is in the store, and its ack was confirmed"
            );
        }
        self.check_stored(&self.store.power_cut(0), |client| client.cursors().1);
    }

    /// What is confirmed by the cursor, and still owed, is in the store. Gives
    /// what the store holds.
    fn check_stored(
        &self,
        store: &ModelStore,
        cursor: impl Fn(&Client) -> u64,
    ) -> HashSet<(u64, u64)> {
        let mut held = HashSet::new();
        for queue in store.queues().unwrap() {
            self.check_queue(store, &queue, &mut held);
        }
        let cursors: HashMap<u64, u64> = self
            .clients
            .iter()
            .map(|c| (c.session, cursor(c)))
            .collect();
        for message in self
            .model
            .messages
            .iter()
            .filter(|message| message.fate == Fate::Owed)
        {
            let identity = (message.session, message.position);
            let confirmed = message.end <= cursors[&message.session];
            if confirmed && !self.model.has_open_ack(message) {
                assert!(
                    held.contains(&identity),
                    "I5: {identity:?} was confirmed, and is not in the store"
                );
            }
        }
        held
    }

    fn check_queue(&self, store: &ModelStore, queue: &StoredQueue, held: &mut HashSet<(u64, u64)>) {
        let mut newest: HashMap<u64, u64> = HashMap::new();
        for block in store.read(queue.queue, 0, usize::MAX).unwrap() {
            for index in 0..block.block.len() {
                let head = block.block.message(index);
                let identity = (head.session, head.position);
                let message = &self.model.messages[self.model.by_identity[&identity]];
                assert_eq!(
                    block.block.payload(index),
                    message.payload,
                    "the stored bytes of {identity:?}"
                );
                let before = newest.insert(head.session, head.position);
                assert!(
                    before.is_none_or(|before| before < head.position),
                    "I2: {identity:?} is stored out of order"
                );
                if !block.is_settled(index) {
                    assert!(held.insert(identity), "I10: {identity:?} is stored twice");
                }
            }
        }
    }

    /// The end: fresh consumers take all there is, and then nothing is left.
    pub fn check_drained(&mut self) {
        self.check_progress();
        self.note(|| "== fresh consumers take what is left".to_owned());
        self.kill_everybody();
        self.now_ns += LONG_NS;
        let names: Vec<String> = self
            .store
            .reopen()
            .queues()
            .unwrap()
            .into_iter()
            .map(|q| q.row.name)
            .collect();
        for name in &names {
            let client = self.open(false).unwrap();
            self.attach(client, name, Purpose::Consume, 7);
        }
        self.check_progress();
        for message in &self.model.messages {
            assert_ne!(message.fate, Fate::Owed, "I1: lost: {message:?}");
        }
        self.kill_everybody();
        self.check_empty();
    }

    fn kill_everybody(&mut self) {
        for client in 0..self.clients.len() {
            self.kill_client(client);
        }
        self.settle();
        self.reap();
        self.settle();
    }

    fn check_empty(&self) {
        let core = self.core.as_ref().unwrap();
        assert_eq!(
            core.hub.messages_in_memory(),
            0,
            "I7: messages are left in memory"
        );
        assert_eq!(
            core.hub.free_lease_entries(),
            core.io.leases.rows() as usize - 1,
            "I7: lease entries are left"
        );
        assert_eq!(core.io.leases.used_rows().unwrap().len(), 0);
        assert_eq!(core.hub.cached_bytes(), 0);
        for queue in core.hub.queue_list() {
            assert_eq!((queue.messages, queue.leased), (0, 0), "{queue:?}");
        }
        for queue in self.store.reopen().queues().unwrap() {
            assert_eq!(queue.unsettled, 0, "{queue:?}");
        }
        let mut files: Vec<_> = std::fs::read_dir(self.dir.path())
            .unwrap()
            .map(|file| file.unwrap().file_name().into_string().unwrap())
            .collect();
        files.sort();
        assert_eq!(
            files,
            ["leases", "ledger"],
            "I7: files of sessions are left"
        );
    }
}

/// Start time of processes that are dead when a broker looks.
const DOOMED: u64 = 1;

pub fn alive() -> Peer {
    let pid = std::process::id() as i32;
    Peer {
        pid,
        start_time: control::start_time(pid).unwrap(),
        uid: 0,
        gid: 0,
    }
}

fn name(job: &Job) -> String {
    match job {
        Job::Commit(job) => format!("commit of round {}", job.round),
        Job::Read { queue, from } => format!("read of {queue} from {from}"),
        Job::Fill(job) => format!("fill {}", job.ticket),
        Job::List(job) => format!("list {}", job.ticket),
        Job::Sync => "sync".to_owned(),
    }
}

fn message_of(error: &BrokerError) -> String {
    error.to_string()
}
