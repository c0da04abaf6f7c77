//! The service: one thread that moves records between the sessions' rings, the
//! hub and the store's threads.
//!
//! ```text
//!   rings --take in--> hub --dispatch--> rings      (this thread, in passes)
//!                       | close, finish
//!                       v
//!            jobs for the store's threads: commit, read, sync
//! ```
//!
//! While anybody sends, the thread goes from pass to pass without a system call.
//! When nothing has happened for a while it arms all doorbells and sleeps in
//! epoll.

mod core;
mod io;
mod leaving;
mod payloads;
mod recovery;
mod requests;
mod session;
mod stop;
#[cfg(test)]
mod tests;
mod worker;

#[cfg(test)]
pub(crate) use worker::pack_moves;

use self::core::{Core, Outward, Setup};
use self::payloads::PayloadLimits;
use self::worker::Workers;
use crate::board::BoardWriter;
use crate::control::{Control, ControlError, Event};
use crate::crash::crash_point;
use crate::hub::{Close, HubLimits};
use crate::ledger::LedgerError;
use crate::store::rocks::{RocksOptions, RocksStore};
use crate::store::{Store, StoreError};
use crate::wake::Wake;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::statvfs::statvfs;
use ringmain::control::{Hello, PROTOCOL};
use ringmain_ring::fault;
use ringmain_ring::layout::LAYOUT_VERSION;
use std::fs::{DirBuilder, File, OpenOptions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use tracing::{error, info};

/// Passes without anything to do before the thread yields the processor, and
/// yields before it sleeps. Longer spinning takes the processor away from the
/// very processes that are waited for, where there are more of them than cores.
const IDLE_SPINS: u32 = 50;
const IDLE_YIELDS: u32 = 4;
/// No sleep is longer.
const SLEEP_MAX: Duration = Duration::from_secs(1);
/// Most sessions at a time.
const SESSIONS_MAX: usize = 1024;

/// What a broker is started with.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// Where the store lies.
    pub data_dir: PathBuf,
    /// Where the rings lie: a folder on a tmpfs.
    pub shm_dir: PathBuf,
    /// The control socket.
    pub socket: PathBuf,
    /// Bytes of the disk that sends leave free, for settling and deleting.
    pub disk_reserve_bytes: u64,
    /// Payload memory of one session, in bytes, in each direction.
    pub session_payload_bytes: u64,
    /// Payload memory of all sessions, in bytes, half of it for each direction;
    /// `None`: half of the file system
    /// of `shm_dir`.
    pub payload_bytes: Option<u64>,
}

/// Why a broker can't be started, or can't go on.
#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Shared memory.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// The control socket.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The shared-memory folder could be changed by others.
    #[error(
        "the shared-memory folder {dir} is another user's, or others may write to it: choose \
         another --shm-dir, or make it yours alone (chmod 700)"
    )]
    NotPrivate {
        /// The folder.
        dir: PathBuf,
    },
    /// The shared-memory folder belongs to another data folder.
    #[error(
        "the shared memory in {dir} belongs to another data folder, and may hold its accepted \
         messages: start the broker with that data folder, or choose another --shm-dir"
    )]
    OtherInstance {
        /// The folder.
        dir: PathBuf,
    },
    /// Another broker uses the shared-memory folder.
    #[error("the shared-memory folder {dir} is in use by another broker")]
    InUse {
        /// The folder.
        dir: PathBuf,
    },
    /// A file or folder.
    #[error("{what} {path}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

impl BrokerError {
    /// Whether another version of ringmain wrote what this one was to take over:
    /// starting it again is of no use.
    pub fn is_of_another_version(&self) -> bool {
        matches!(
            self,
            BrokerError::Store(StoreError::Version { .. })
                | BrokerError::Ledger(LedgerError::Version { .. })
        )
    }

    fn io(what: &'static str, path: &Path, source: impl Into<std::io::Error>) -> BrokerError {
        BrokerError::Io {
            what,
            path: path.to_owned(),
            source: source.into(),
        }
    }
}

/// Tells a broker to stop, from any thread.
#[derive(Debug, Clone)]
pub struct StopHandle {
    flag: Arc<AtomicBool>,
    wake: Arc<Wake>,
}

impl StopHandle {
    /// Has [`serve`] return as soon as everything is committed and synced.
    pub fn stop(&self) {
        self.flag.store(true, Ordering::Release);
        self.wake.ring();
    }
}

/// The broker's side of a [`StopHandle`].
#[derive(Debug)]
pub struct Stop {
    flag: Arc<AtomicBool>,
    wake: Arc<Wake>,
}

impl Stop {
    /// Makes both sides.
    pub fn new() -> std::io::Result<(Stop, StopHandle)> {
        let wake = Arc::new(Wake::new()?);
        let flag = Arc::new(AtomicBool::new(false));
        let stop = Stop {
            flag: flag.clone(),
            wake: wake.clone(),
        };
        Ok((stop, StopHandle { flag, wake }))
    }

    fn is_set(&self) -> bool {
        // Acquire: pairs with the Release in `stop`.
        self.flag.load(Ordering::Acquire)
    }
}

/// Nanoseconds of the machine's monotonic clock, which clients read too.
pub(crate) fn now_ns() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC);
    // It can't fail with this clock.
    now.map_or(0, |now| {
        now.tv_sec() as u64 * 1_000_000_000 + now.tv_nsec() as u64
    })
}

/// Runs a broker until it is stopped. `on_ready` is called once, when it is in
/// service. When the store fails, everything is dropped and started anew, as
/// after a death.
pub fn serve(
    options: &ServeOptions,
    stop: &Stop,
    on_ready: impl FnOnce(),
) -> Result<(), BrokerError> {
    fault::install()
        .map_err(|e| BrokerError::io("cannot handle SIGBUS for", &options.shm_dir, e))?;
    make_shm(&options.shm_dir)?;
    check_private(&options.shm_dir)?;
    let _lock = lock_shm(&options.shm_dir)?;
    let mut on_ready = Some(on_ready);
    let mut pause = Duration::from_millis(100);
    loop {
        let started = Instant::now();
        match serve_once(options, stop, &mut on_ready) {
            Err(BrokerError::Store(StoreError::Failed(reason))) if on_ready.is_none() => {
                error!(reason, "the store failed: starting anew");
            }
            other => return other,
        }
        if started.elapsed() > Duration::from_secs(60) {
            pause = Duration::from_millis(100);
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_secs(5));
        if stop.is_set() {
            return Ok(());
        }
    }
}

fn serve_once(
    options: &ServeOptions,
    stop: &Stop,
    on_ready: &mut Option<impl FnOnce()>,
) -> Result<(), BrokerError> {
    let rocks = RocksOptions {
        reserve_bytes: options.disk_reserve_bytes,
    };
    let store: Arc<dyn Store> = Arc::new(RocksStore::open(&options.data_dir, &rocks)?);
    let instance = instance(&options.data_dir)?;
    let setup = Setup {
        shm_dir: options.shm_dir.clone(),
        instance,
        sessions_max: SESSIONS_MAX,
        payload_limits: PayloadLimits {
            session_bytes: options.session_payload_bytes,
            total_bytes: match options.payload_bytes {
                Some(bytes) => bytes,
                None => half_of(&options.shm_dir)?,
            },
        },
    };
    let started = Instant::now();
    let core = recovery::start(
        setup,
        store.clone(),
        HubLimits::default(),
        boot()?,
        now_ns(),
    )?;
    let hello = Hello {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        protocol: PROTOCOL,
        layout: LAYOUT_VERSION,
        instance: format!("{instance:016x}"),
        pid: std::process::id(),
    };
    let (control, events) = Control::start(&options.socket, hello, stop.wake.clone())?;
    let failed = |source| BrokerError::io("cannot start the threads of", &options.data_dir, source);
    let workers = Workers::start(&store, &stop.wake).map_err(failed)?;
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(|e| failed(e.into()))?;
    let wake = EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, WAKE);
    epoll
        .add(stop.wake.descriptor(), wake)
        .map_err(|e| failed(e.into()))?;
    let mut service = Service {
        core,
        control,
        events,
        workers,
        epoll,
        board: BoardWriter::new(&options.socket, instance),
    };
    // For who looks as soon as it hears that there is a broker.
    service.post();
    info!(
        socket = %options.socket.display(),
        sessions = service.core.by_number.len(),
        recovery_ms = started.elapsed().as_millis() as u64,
        "in service"
    );
    if let Some(on_ready) = on_ready.take() {
        on_ready();
    }
    service.run(stop)?;
    service.finish()?;
    info!("stopped");
    Ok(())
}

/// What the wake-up descriptor is called in epoll; doorbells have their
/// session's slot.
const WAKE: u64 = u64::MAX;

struct Service {
    core: Core,
    control: Control,
    events: mpsc::Receiver<Event>,
    workers: Workers,
    epoll: Epoll,
    board: BoardWriter,
}

impl Service {
    fn run(&mut self, stop: &Stop) -> Result<(), BrokerError> {
        let mut idle = 0;
        while !stop.is_set() && !self.core.stop_due() {
            let mut busy = stop.wake.take();
            if busy {
                self.take_events();
                while let Ok(done) = self.workers.done.try_recv() {
                    self.core.job_done(done)?;
                }
            }
            busy |= self.core.pass(now_ns())?;
            self.send_out()?;
            if self.board.is_due(self.core.now_ns, busy) {
                self.post();
            }
            idle = if busy { 0 } else { idle + 1 };
            if idle <= IDLE_SPINS {
                std::hint::spin_loop();
            } else if idle <= IDLE_SPINS + IDLE_YIELDS {
                std::thread::yield_now();
            } else {
                self.sleep()?;
                idle = 0;
            }
        }
        Ok(())
    }

    fn post(&mut self) {
        let status = self.core.status();
        self.board.post(status);
    }

    fn take_events(&mut self) {
        while let Ok(event) = self.events.try_recv() {
            match event {
                Event::Request {
                    conn,
                    peer,
                    request,
                } => self.core.request(conn, peer, request),
                Event::Gone { conn } => self.core.conn_gone(conn),
                Event::Died { token } => self.core.process_died(token),
            }
        }
    }

    fn send_out(&mut self) -> Result<(), BrokerError> {
        for job in self.core.jobs.drain(..) {
            self.workers.submit(job);
        }
        if self.core.outward.is_empty() {
            return Ok(());
        }
        for outward in std::mem::take(&mut self.core.outward) {
            match outward {
                Outward::Reply(conn, reply, fds) => self.control.reply(conn, reply, fds),
                Outward::Tell(conn, notice, fd) => self.control.tell(conn, notice, fd),
                Outward::Close(conn) => self.control.close(conn),
                Outward::Watch(peer, token) => self.control.watch(peer.pid, peer.start_time, token),
                Outward::Unwatch(token) => self.control.unwatch(token),
                Outward::Register(slot) => {
                    let Some(session) = self.core.io.session(slot) else {
                        continue;
                    };
                    let event =
                        EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, u64::from(slot));
                    self.epoll
                        .add(&session.doorbell, event)
                        .map_err(epoll_error)?;
                }
                Outward::Unregister(doorbell) => match self.epoll.delete(&doorbell) {
                    // An adopted session's that was never resumed.
                    Ok(()) | Err(Errno::ENOENT) => {}
                    Err(errno) => return Err(epoll_error(errno)),
                },
            }
        }
        Ok(())
    }

    fn sleep(&mut self) -> Result<(), BrokerError> {
        if !self.core.prepare_sleep() {
            return Ok(());
        }
        let now = now_ns();
        let post = self.board.due_ns();
        let due = self.core.next_wake_ns().map_or(post, |due| due.min(post));
        let until = Duration::from_nanos(due.saturating_sub(now)).min(SLEEP_MAX);
        // Rounded up: waking before it is time would only spin.
        let millis = until.as_nanos().div_ceil(1_000_000) as u16;
        let mut events = [EpollEvent::empty(); 64];
        match self.epoll.wait(&mut events, EpollTimeout::from(millis)) {
            Ok(count) => {
                for event in &events[..count] {
                    if event.data() != WAKE {
                        self.core.activate(event.data() as u32);
                    }
                }
            }
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(epoll_error(errno)),
        }
        self.core.look_at_orphans();
        Ok(())
    }

    /// A graceful stop: what was taken in is committed and synced. The segments
    /// of living clients stay.
    fn finish(mut self) -> Result<(), BrokerError> {
        self.core.pass(now_ns())?;
        loop {
            if !self.core.hub.round_in_flight()
                && self.core.hub.has_uncommitted()
                && !self.core.disk_full
            {
                self.core.close_round_as(Close::All);
            }
            self.send_out()?;
            if !self.core.hub.round_in_flight() {
                break;
            }
            self.wait_for_job()?;
        }
        // One that is under way may have begun before the last commit.
        self.wait_for_sync()?;
        self.core.start_sync();
        self.wait_for_sync()?;
        self.core.finish_stop()?;
        self.send_out()
        // The control thread, as it is dropped, lets the last answers out.
    }

    fn wait_for_sync(&mut self) -> Result<(), BrokerError> {
        self.send_out()?;
        while self.core.sync_running() {
            self.wait_for_job()?;
            self.send_out()?;
        }
        Ok(())
    }

    fn wait_for_job(&mut self) -> Result<(), BrokerError> {
        match self.workers.done.recv() {
            Ok(done) => Ok(self.core.job_done(done)?),
            Err(_ended) => Err(StoreError::Failed("its threads have ended".to_owned()).into()),
        }
    }
}

fn epoll_error(errno: Errno) -> BrokerError {
    BrokerError::io("waiting for", Path::new("doorbells"), errno)
}

fn make_shm(dir: &Path) -> Result<(), BrokerError> {
    crash_point("make the shared-memory folder");
    let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.map_err(|source| BrokerError::io("cannot make the folder of --shm-dir", dir, source))
}

/// Who can write to the folder could put segments of their own there.
fn check_private(dir: &Path) -> Result<(), BrokerError> {
    let found = std::fs::metadata(dir);
    let found = found.map_err(|source| BrokerError::io("cannot look at", dir, source))?;
    let ours = found.uid() == nix::unistd::geteuid().as_raw();
    if ours && found.mode() & 0o022 == 0 {
        return Ok(());
    }
    Err(BrokerError::NotPrivate {
        dir: dir.to_owned(),
    })
}

/// Half of the size of the file system that the folder is on.
fn half_of(dir: &Path) -> Result<u64, BrokerError> {
    let found = statvfs(dir);
    let found = found.map_err(|e| BrokerError::io("cannot look at the file system of", dir, e))?;
    Ok(found.blocks() as u64 * found.fragment_size() as u64 / 2)
}

/// Keeps a second broker out of the shared-memory folder, until it is dropped or
/// this process dies.
fn lock_shm(dir: &Path) -> Result<Flock<File>, BrokerError> {
    let path = dir.join("lock");
    crash_point("make the lock of the shared-memory folder");
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path);
    let file = file.map_err(|source| BrokerError::io("cannot open", &path, source))?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(lock),
        Err((_, Errno::EWOULDBLOCK)) => Err(BrokerError::InUse {
            dir: dir.to_owned(),
        }),
        Err((_, errno)) => Err(BrokerError::io("cannot lock", &path, errno)),
    }
}

/// The instance's number: made at random with the data folder.
fn instance(data_dir: &Path) -> Result<u64, BrokerError> {
    let path = data_dir.join("instance");
    match std::fs::read_to_string(&path) {
        Ok(text) => u64::from_str_radix(text.trim(), 16).map_err(|_| {
            let source = std::io::Error::other(
                "it is no hexadecimal number: restore the whole data folder from a backup",
            );
            BrokerError::io("cannot read the instance's number in", &path, source)
        }),
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => {
            let number = random()?;
            // Renamed into place, so that a death leaves all of it or nothing.
            let draft = data_dir.join("instance.new");
            crash_point("draft the instance's number");
            std::fs::write(&draft, format!("{number:016x}\n"))
                .and_then(|()| {
                    crash_point("sync the instance's number");
                    File::open(&draft)?.sync_all()
                })
                .and_then(|()| {
                    crash_point("put the instance's number in place");
                    std::fs::rename(&draft, &path)
                })
                .map_err(|source| BrokerError::io("cannot write", &path, source))?;
            Ok(number)
        }
        Err(source) => Err(BrokerError::io("cannot read", &path, source)),
    }
}

fn random() -> Result<u64, BrokerError> {
    use std::io::Read;
    let path = Path::new("/dev/urandom");
    let mut bytes = [0; 8];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut bytes));
    read.map_err(|source| BrokerError::io("cannot read", path, source))?;
    Ok(u64::from_ne_bytes(bytes))
}

/// The boot of the machine, as a number.
fn boot() -> Result<u64, BrokerError> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    let text = std::fs::read_to_string(path);
    let text = text.map_err(|source| BrokerError::io("cannot read", path, source))?;
    let digits: String = text
        .chars()
        .filter(char::is_ascii_hexdigit)
        .take(16)
        .collect();
    Ok(u64::from_str_radix(&digits, 16).unwrap_or(0))
}
