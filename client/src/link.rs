//! A session's connection to its broker: rings the doorbell, notices the
//! broker's end, and takes the session up again with the next one.
//!
//! Nothing here waits while others could need it: the doorbell has a lock of
//! its own, held for one write, and who finds the connection's lock taken leaves
//! the work to who has it.

use crate::clock;
use crate::connection::{Connection, check_hello, instance_of, value_of};
use crate::control::{Hello, Notice, Opened, Reply, Request};
use crate::error::{Error, Result};
use crate::lock;
use crate::wait::Deadline;
use serde::de::DeserializeOwned;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, TryLockError};
use std::time::{Duration, Instant};

/// Between two tries to reach a broker that is away.
pub(crate) const RETRY: Duration = Duration::from_millis(50);
/// Longest wait of one look for the next step of resuming.
const STEP: Duration = Duration::from_millis(20);
/// Between two looks by threads that publish, which are many a millisecond.
const LOOK_NS: u64 = 4_000_000;
/// How long a call waits for a broker that is being restarted.
const CALL_PATIENCE: Duration = Duration::from_secs(2);

/// See the module.
#[derive(Debug)]
pub(crate) struct Link {
    socket: PathBuf,
    instance: u64,
    session: u64,
    state: Mutex<State>,
    doorbell: Mutex<OwnedFd>,
    /// Whether the doorbell is the one that the broker listens to, as far as is
    /// known. Changed with `state` locked.
    up: AtomicBool,
    /// When a publishing thread looks next, by the coarse monotonic clock.
    next_look_ns: AtomicU64,
    /// What the broker, or a predecessor, has told, and nobody has taken.
    notices: Mutex<Vec<(Notice, Option<OwnedFd>)>>,
}

#[derive(Debug)]
enum State {
    /// Connected, and the session is ours.
    Up(Connection),
    /// No broker.
    Down { retry_at: Instant },
    /// Connected to a broker that was asked who it is.
    Greeting(Connection),
    /// Connected to our broker, which was asked for the session.
    Resuming(Connection),
    /// The session has ended.
    Ended,
}

/// What one step has come to.
enum Step {
    /// Here the state is settled for now.
    Rest(State),
    /// There may be more to do at once.
    More(State),
}

impl Link {
    pub(crate) fn new(
        socket: &Path,
        (instance, session): (u64, u64),
        connection: Connection,
        doorbell: OwnedFd,
    ) -> Link {
        Link {
            socket: socket.to_owned(),
            instance,
            session,
            state: Mutex::new(State::Up(connection)),
            doorbell: Mutex::new(doorbell),
            up: AtomicBool::new(true),
            next_look_ns: AtomicU64::new(0),
            notices: Mutex::new(Vec::new()),
        }
    }

    /// Wakes the broker out of its epoll.
    pub(crate) fn ring(&self) {
        // An error means that nobody listens, or that the counter is at its
        // limit, rung often enough.
        let _ = nix::unistd::write(&*lock(&self.doorbell), &1u64.to_ne_bytes());
    }

    /// Whether there is sense in ringing. (If not, and the broker is back, it
    /// looks at the session now and then, until it is resumed.)
    pub(crate) fn is_up(&self) -> bool {
        // Relaxed: who is late rings for nobody, and the thread that took the
        // session up rings once more.
        self.up.load(Ordering::Relaxed)
    }

    /// Looks after the connection; for threads that wait. Returns whether it is
    /// up. An error means that the session can't be had again, ever.
    pub(crate) fn keep_up(&self, patience: Duration) -> Result<bool> {
        match self.state.try_lock() {
            Ok(mut state) => self.advance(&mut state, patience.min(STEP)),
            Err(TryLockError::Poisoned(state)) => {
                self.advance(&mut state.into_inner(), patience.min(STEP))
            }
            Err(TryLockError::WouldBlock) => Ok(false),
        }
    }

    /// The same for threads that publish and saw the session orphaned: looks now
    /// and then only, and waits for nothing but the last step.
    pub(crate) fn keep_up_in_passing(&self) -> Result<()> {
        let now = clock::monotonic_ns();
        // Relaxed: two threads that look at once do no harm.
        if now >= self.next_look_ns.load(Ordering::Relaxed) {
            self.next_look_ns.store(now + LOOK_NS, Ordering::Relaxed);
            self.keep_up(Duration::ZERO)?;
        }
        Ok(())
    }

    /// What the broker has told unasked since the last call; waits so long for
    /// something to come if there is nothing.
    pub(crate) fn notices(&self, time: Duration) -> Result<Vec<(Notice, Option<OwnedFd>)>> {
        if self.keep_up(Duration::ZERO)?
            && lock(&self.notices).is_empty()
            && !time.is_zero()
            // Who is in a call has the connection, and finds the notices.
            && let Ok(mut state) = self.state.try_lock()
            && let State::Up(connection) = &mut *state
            // An error is found again, and acted on, by the next look.
            && let Ok(told) = connection.notices(time)
        {
            lock(&self.notices).extend(told);
        }
        Ok(std::mem::take(&mut *lock(&self.notices)))
    }

    /// Asks the broker something over the session's own connection, which is
    /// resumed first if need be.
    pub(crate) fn call<T: DeserializeOwned>(&self, request: &Request) -> Result<T> {
        let (value, []) = self.call_for::<T, 0>(request)?;
        Ok(value)
    }

    /// The same, with `N` descriptors that come with the answer.
    pub(crate) fn call_for<T: DeserializeOwned, const N: usize>(
        &self,
        request: &Request,
    ) -> Result<(T, [OwnedFd; N])> {
        let deadline = Deadline::after(CALL_PATIENCE);
        let mut state = lock(&self.state);
        while !self.advance(&mut state, STEP)? {
            if deadline.is_over() {
                let socket = self.socket.clone();
                return Err(Error::NotRunning { socket });
            }
            if let State::Down { retry_at } = *state {
                std::thread::sleep(retry_at.saturating_duration_since(Instant::now()));
            }
        }
        match &mut *state {
            State::Up(connection) => connection.call_for(request),
            _ => Err(ended()),
        }
    }

    /// Ends the session for the broker.
    pub(crate) fn close(&self) {
        let state = std::mem::replace(&mut *lock(&self.state), State::Ended);
        if let State::Up(connection) | State::Greeting(connection) | State::Resuming(connection) =
            state
        {
            connection.shut_down();
        }
    }

    /// Goes as far as it can without waiting longer than `patience` for a reply.
    fn advance(&self, state: &mut State, patience: Duration) -> Result<bool> {
        // At most four steps lead from a lost connection to a new one.
        loop {
            match self.step(std::mem::replace(state, State::Ended), patience)? {
                Step::Rest(rest) => {
                    let up = matches!(rest, State::Up(_));
                    *state = rest;
                    self.up.store(up, Ordering::Relaxed);
                    return Ok(up);
                }
                Step::More(more) => *state = more,
            }
        }
    }

    fn step(&self, state: State, patience: Duration) -> Result<Step> {
        match state {
            State::Up(connection) => Ok(self.look_at(connection)),
            State::Down { retry_at } if Instant::now() < retry_at => {
                Ok(Step::Rest(State::Down { retry_at }))
            }
            State::Down { .. } => Ok(self.greet()),
            State::Greeting(mut connection) => match connection.reply_within(patience) {
                Ok(None) => Ok(Step::Rest(State::Greeting(connection))),
                Ok(Some(reply)) => self.ask_for_session(connection, reply),
                Err(_) => Ok(retry()),
            },
            State::Resuming(connection) => self.await_session(connection, patience),
            State::Ended => Err(ended()),
        }
    }

    /// Reads what the broker has told, up to the end of the connection if that has
    /// come.
    fn look_at(&self, mut connection: Connection) -> Step {
        loop {
            match connection.notices(Duration::ZERO) {
                Ok(told) if told.is_empty() => return Step::Rest(State::Up(connection)),
                Ok(told) => lock(&self.notices).extend(told),
                Err(_) => {
                    return Step::More(State::Down {
                        retry_at: Instant::now(),
                    });
                }
            }
        }
    }

    fn greet(&self) -> Step {
        let greeted = Connection::open(&self.socket)
            .and_then(|connection| connection.send(&Connection::hello()).map(|()| connection));
        match greeted {
            Ok(connection) => Step::More(State::Greeting(connection)),
            Err(_) => retry(),
        }
    }

    fn ask_for_session(&self, connection: Connection, reply: Reply) -> Result<Step> {
        let hello: Hello = match value_of(reply) {
            Err(error) if is_temporary(&error) => return Ok(retry()),
            hello => check_hello(hello?)?,
        };
        // Sessions are numbered by instance: another one's session of this
        // number is not ours.
        if instance_of(&hello)? != self.instance {
            return Err(Error::Closed(format!(
                "another broker, with another data folder, has taken the place at {}",
                self.socket.display()
            )));
        }
        let session = self.session;
        if connection.send(&Request::Resume { session }).is_err() {
            return Ok(retry());
        }
        // From now on the broker may wait for the new doorbell to be rung. So
        // this is waited for, by a thread that only passes by too; the broker is
        // awake, having just answered.
        self.await_session(connection, STEP)
    }

    fn await_session(&self, mut connection: Connection, patience: Duration) -> Result<Step> {
        match connection.reply_within(patience) {
            Ok(None) => Ok(Step::Rest(State::Resuming(connection))),
            Ok(Some(reply)) => self.take_up(connection, reply),
            Err(_) => Ok(retry()),
        }
    }

    fn take_up(&self, mut connection: Connection, reply: Reply) -> Result<Step> {
        match value_of::<Opened>(reply) {
            Err(error) if is_temporary(&error) => return Ok(retry()),
            Err(error) => {
                return Err(Error::Closed(format!(
                    "the broker does not resume this session: {error}"
                )));
            }
            Ok(_) => {}
        }
        let [doorbell] = connection.take_descriptors()?;
        *lock(&self.doorbell) = doorbell;
        // For what was published since the broker began to listen.
        self.ring();
        Ok(Step::Rest(State::Up(connection)))
    }
}

fn retry() -> Step {
    Step::Rest(State::Down {
        retry_at: Instant::now() + RETRY,
    })
}

fn ended() -> Error {
    Error::Closed("the session has ended".to_owned())
}

/// Whether a broker that answered so may answer otherwise later.
fn is_temporary(error: &Error) -> bool {
    matches!(
        error,
        Error::StoreUnavailable(_) | Error::Full(_) | Error::TimedOut | Error::Io { .. }
    )
}
