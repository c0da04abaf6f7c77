//! The control socket's thread: connections, credentials and lines of JSON on
//! one side, typed events for the service thread on the other. Knows no queue.
//!
//! What holds here:
//!
//! - A connection has one request on the way. Its next line is read when the
//!   reply has left: so what the thread keeps for it is bounded, and a client
//!   that does not read its replies waits for itself alone.
//! - The thread blocks in `epoll_wait` only.
//! - A connection ends when its socket does or when its process dies, though a
//!   forked child may hold the socket: pidfds tell.

mod connection;
mod listener;
mod process;
mod reactor;

pub(crate) use process::start_time;

pub use listener::ControlError;

use crate::wake::Wake;
use nix::sys::eventfd::{EfdFlags, EventFd};
use reactor::Reactor;
use ringmain::control::{Hello, Notice, Reply, Request};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

/// A connection's number; never reused while the broker runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnId(pub u64);

/// Who is at the other end, by the kernel's word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Its process when it connected.
    pub pid: i32,
    /// When that process started, in clock ticks since boot: a recycled pid has
    /// another. 0 if the process was gone already.
    pub start_time: u64,
    /// Its user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
}

/// What the service thread is told.
#[derive(Debug)]
pub enum Event {
    /// A request. The connection's next one comes after this one's reply.
    /// `Hello` is answered here and never comes.
    Request {
        /// Where it came from.
        conn: ConnId,
        /// Who sent it.
        peer: Peer,
        /// What is asked.
        request: Request,
    },
    /// The connection has ended, or its process has died. Nothing more comes
    /// from it, and replies to it are dropped. Comes once, for connections
    /// that have made a request.
    Gone {
        /// The connection.
        conn: ConnId,
    },
    /// A process watched by [`Control::watch`] is dead.
    Died {
        /// The token given then.
        token: u64,
    },
}

/// What the control thread allows.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Most connections at a time.
    pub connections_max: usize,
    /// How long a client may leave a reply unread.
    pub stall_max: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections_max: 4096,
            stall_max: Duration::from_secs(10),
        }
    }
}

/// What the thread is asked to do.
#[derive(Debug)]
enum Command {
    Reply(ConnId, Reply, Vec<OwnedFd>),
    Tell(ConnId, Notice, Option<OwnedFd>),
    Close(ConnId),
    Watch {
        pid: i32,
        start_time: u64,
        token: u64,
    },
    Unwatch(u64),
    Stop,
}

/// Commands on their way to the thread.
#[derive(Debug)]
struct Inbox {
    commands: Mutex<Vec<Command>>,
    bell: EventFd,
}

impl Inbox {
    fn put(&self, command: Command) {
        self.commands
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(command);
        // It can fail only when the count is at its end: then the thread is
        // awake as it is.
        let _ = self.bell.write(1);
    }

    fn take(&self) -> Vec<Command> {
        let _ = self.bell.read();
        std::mem::take(&mut self.commands.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The control socket and its thread. Dropping it stops the thread and removes
/// the socket file; connections close, after what was replied before has gone out
/// (for which a client that does not read has a second).
#[derive(Debug)]
pub struct Control {
    inbox: Arc<Inbox>,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    /// Binds the socket and starts the thread. After each event in the channel
    /// it rings `wake`.
    ///
    /// The socket's folder is made if it is missing. A socket file at which
    /// nobody listens is replaced.
    pub fn start(
        socket: &Path,
        hello: Hello,
        wake: Arc<Wake>,
    ) -> Result<(Control, mpsc::Receiver<Event>), ControlError> {
        Control::start_with(socket, hello, wake, Limits::default())
    }

    /// [`Control::start`] with other limits.
    pub fn start_with(
        socket: &Path,
        hello: Hello,
        wake: Arc<Wake>,
        limits: Limits,
    ) -> Result<(Control, mpsc::Receiver<Event>), ControlError> {
        let bound = listener::Bound::bind(socket)?;
        let bell = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|e| ControlError::system("cannot make an eventfd", e))?;
        let inbox = Arc::new(Inbox {
            commands: Mutex::default(),
            bell,
        });
        let (events, receiver) = mpsc::channel();
        let reactor = Reactor::new(
            bound,
            Arc::clone(&inbox),
            reactor::Outbox { events, wake },
            hello,
            limits,
        )
        .map_err(|e| ControlError::system("cannot set up epoll", e))?;
        let thread = std::thread::Builder::new()
            .name("control".to_owned())
            .spawn(move || reactor.run())
            .map_err(|source| ControlError::System {
                what: "cannot start the control thread",
                source,
            })?;
        let control = Control {
            inbox,
            thread: Some(thread),
        };
        Ok((control, receiver))
    }

    /// Answers the connection's request. The descriptors travel beside the
    /// reply, and are closed here in any case.
    pub fn reply(&self, conn: ConnId, reply: Reply, descriptors: Vec<OwnedFd>) {
        self.inbox.put(Command::Reply(conn, reply, descriptors));
    }

    /// Tells the client at the connection something unasked, with a descriptor that
    /// is closed here in any case.
    pub fn tell(&self, conn: ConnId, notice: Notice, descriptor: Option<OwnedFd>) {
        self.inbox.put(Command::Tell(conn, notice, descriptor));
    }

    /// Closes the connection; [`Event::Gone`] follows. What was replied before
    /// goes out if there is room for it.
    pub fn close(&self, conn: ConnId) {
        self.inbox.put(Command::Close(conn));
    }

    /// Watches a process that need not have a connection: [`Event::Died`] comes
    /// once it is dead, at once if there is none with this pid and start time.
    pub fn watch(&self, pid: i32, start_time: u64, token: u64) {
        self.inbox.put(Command::Watch {
            pid,
            start_time,
            token,
        });
    }

    /// Ends a watch. Its event may be in the channel already.
    pub fn unwatch(&self, token: u64) {
        self.inbox.put(Command::Unwatch(token));
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.inbox.put(Command::Stop);
        if let Some(thread) = self.thread.take() {
            // A panic there has been printed; there is nothing to add.
            let _ = thread.join();
        }
    }
}
