//! The way in: a broker, its queues, producers and consumers.

use crate::admin::Admin;
use crate::consumer::{Consumer, ConsumerOptions};
use crate::control::{
    DeadMessage, Purpose, QueueInfo, Stats, WINDOW_MAX, check_queue_name, check_settings,
};
use crate::error::{Error, Result};
use crate::fork::Maker;
use crate::lock;
use crate::paths;
use crate::producer::{Producer, ProducerOptions};
use crate::record::LEASE_BYTES;
use crate::session::Session;
use crate::settings::QueueSettings;
use ringmain_ring::layout::Geometry;
use ringmain_ring::record_ring::record_bytes;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// A client of one broker. Cheap to clone; any number of threads may use it at
/// once. What it opens closes when the last clone and the last
/// [`Producer`] are dropped.
#[derive(Debug, Clone)]
pub struct Client {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    maker: Maker,
    socket: PathBuf,
    admin: Mutex<Admin>,
    /// The sessions that producers share: one, unless it had all the attachments
    /// that a session can have.
    producing: Mutex<Vec<Arc<Session>>>,
}

impl Client {
    /// Connects to the broker at `$RINGMAIN_SOCKET`, or else at the socket that a
    /// broker of this user has by default
    /// ([`default_socket`](paths::default_socket)).
    ///
    /// Errors: [`NotRunning`](Error::NotRunning), with the socket tried;
    /// [`VersionMismatch`](Error::VersionMismatch);
    /// [`NotPermitted`](Error::NotPermitted), also if others could have put a
    /// socket at the default place.
    pub fn connect() -> Result<Client> {
        if let Some(socket) = std::env::var_os(paths::SOCKET_VARIABLE) {
            return Client::connect_to(PathBuf::from(socket));
        }
        let socket = paths::default_socket();
        paths::check_socket_folder(&socket)?;
        Client::connect_to(socket)
    }

    /// Connects to the broker at this socket.
    pub fn connect_to(socket: impl AsRef<Path>) -> Result<Client> {
        let socket = socket.as_ref();
        let maker = Maker::this_process()?;
        let inner = Inner {
            maker,
            socket: socket.to_owned(),
            admin: Mutex::new(Admin::connect(socket)?),
            producing: Mutex::new(Vec::new()),
        };
        Ok(Client {
            inner: Arc::new(inner),
        })
    }

    /// The socket of the broker.
    pub fn socket(&self) -> &Path {
        &self.inner.socket
    }

    /// A producer that sends to this queue. Errors:
    /// [`NoSuchQueue`](Error::NoSuchQueue), [`Invalid`](Error::Invalid) for a name
    /// that no queue can have, [`NotRunning`](Error::NotRunning),
    /// [`NotPermitted`](Error::NotPermitted), [`Full`](Error::Full) if there is
    /// no shared memory for its session.
    pub fn producer(&self, queue: &str) -> Result<Producer> {
        self.producer_with(queue, ProducerOptions::new())
    }

    /// A producer that sends to this queue, with options.
    pub fn producer_with(&self, queue: &str, options: ProducerOptions) -> Result<Producer> {
        // Asked before a session is made for a queue that is not there.
        self.queue(queue)?;
        // Held while a session is opened, so that not two threads open one each.
        let mut sessions = lock(&self.inner.producing);
        sessions.retain(|session| session.is_open());
        for session in sessions.iter() {
            match session.attach(queue, Purpose::Produce, 1) {
                // It has all the attachments that it can have.
                Err(Error::Full(_)) => {}
                attached => {
                    return Ok(Producer::new(
                        Arc::clone(session),
                        queue,
                        &attached?,
                        &options,
                    ));
                }
            }
        }
        let session = Arc::new(Session::open(&self.inner.socket, Geometry::default())?);
        let attached = session.attach(queue, Purpose::Produce, 1)?;
        sessions.push(Arc::clone(&session));
        Ok(Producer::new(session, queue, &attached, &options))
    }

    /// A consumer that receives from this queue. Errors are those of
    /// [`Client::producer`].
    pub fn consumer(&self, queue: &str) -> Result<Consumer> {
        self.consumer_with(queue, ConsumerOptions::new())
    }

    /// A consumer that receives from this queue, with options.
    /// [`Invalid`](Error::Invalid) if the window is out of its range.
    pub fn consumer_with(&self, queue: &str, options: ConsumerOptions) -> Result<Consumer> {
        let window = options.window;
        if !(1..=WINDOW_MAX).contains(&window) {
            return Err(Error::Invalid(format!(
                "a window of {window} messages: it can be from 1 to {WINDOW_MAX}"
            )));
        }
        self.queue(queue)?;
        let mut geometry = Geometry::default();
        // Twice what the answers of a whole window take: one half lies before
        // the broker while the other fills.
        let answers_bytes = 2 * window * record_bytes(8 + LEASE_BYTES) as u32;
        geometry.submission_bytes = geometry
            .submission_bytes
            .max(answers_bytes.next_power_of_two());
        let session = Session::open(&self.inner.socket, geometry)?;
        let attached = session.attach(queue, Purpose::Consume, window)?;
        Ok(Consumer::new(Arc::new(session), queue, attached.index))
    }

    /// Makes a queue; no error if it exists with the same settings.
    ///
    /// Administrative calls wait up to 30 seconds for the broker's answer, then
    /// fail with [`TimedOut`](Error::TimedOut), and may take effect later. They
    /// are answered when the change is stored. Errors:
    /// [`QueueExists`](Error::QueueExists) with other settings,
    /// [`Invalid`](Error::Invalid) for a name or setting out of its range,
    /// [`NotRunning`](Error::NotRunning), [`NotPermitted`](Error::NotPermitted),
    /// [`StoreUnavailable`](Error::StoreUnavailable).
    pub fn create_queue(&self, name: &str, settings: &QueueSettings) -> Result<()> {
        check_settings(settings)?;
        self.admin(name)?.create_queue(name, settings)
    }

    /// Deletes a queue with all its messages. [`NoSuchQueue`](Error::NoSuchQueue)
    /// if there is none; otherwise as [`Client::create_queue`].
    pub fn delete_queue(&self, name: &str) -> Result<()> {
        self.admin(name)?.delete_queue(name)
    }

    /// Every queue, by name.
    pub fn queues(&self) -> Result<Vec<QueueInfo>> {
        self.inner.maker.check()?;
        lock(&self.inner.admin).queues()
    }

    /// One queue. [`NoSuchQueue`](Error::NoSuchQueue) if there is none.
    pub fn queue(&self, name: &str) -> Result<QueueInfo> {
        self.admin(name)?.queue(name)
    }

    /// What the broker has done since it was started, and what it holds.
    pub fn stats(&self) -> Result<Stats> {
        self.inner.maker.check()?;
        lock(&self.inner.admin).stats()
    }

    /// Messages of a dead-letter queue (or any other), oldest first, from this
    /// position of the queue on, without taking them: those that are stored, at
    /// most `limit`, which is from 1 to
    /// [`DEAD_LETTERS_MAX`](crate::control::DEAD_LETTERS_MAX). Errors are those of
    /// [`Client::queue`], and [`Invalid`](Error::Invalid) for the limit.
    pub fn dead_letters(&self, queue: &str, from: u64, limit: u32) -> Result<Vec<DeadMessage>> {
        self.admin(queue)?.dead_letters(queue, from, limit)
    }

    /// Moves the messages of a dead-letter queue back to the queues that they came
    /// from, or to the queue `to`, oldest first and at most `limit`; their attempts
    /// begin anew. Messages that a consumer holds, and those that come meanwhile,
    /// stay. Returns how many were moved; each move is stored by then.
    ///
    /// Errors are those of [`Client::create_queue`]. It stops at a message that
    /// came from a queue that is gone ([`NoSuchQueue`](Error::NoSuchQueue)) or was
    /// sent to this queue directly ([`Invalid`](Error::Invalid)); what it has moved
    /// until then is moved.
    pub fn redrive(&self, queue: &str, to: Option<&str>, limit: Option<u64>) -> Result<u64> {
        /// Moves that one request may take, so that its answer comes in time.
        const LOT: u64 = 10_000;
        if let Some(to) = to {
            check_queue_name(to)?;
        }
        let there = self.queue(queue)?.messages;
        let most = limit.unwrap_or(u64::MAX).min(there);
        let mut moved = 0;
        loop {
            let lot = LOT.min(most - moved);
            let done = self.admin(queue)?.redrive(queue, to, lot)?;
            moved += done;
            if done < lot || moved >= most {
                return Ok(moved);
            }
        }
    }

    /// The connection for administration, for a call that names a queue.
    fn admin(&self, name: &str) -> Result<std::sync::MutexGuard<'_, Admin>> {
        self.inner.maker.check()?;
        check_queue_name(name)?;
        Ok(lock(&self.inner.admin))
    }
}
