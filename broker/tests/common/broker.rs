//! A broker process in folders of its own.

use super::child::Process;
use super::role::{Consume, Hold, Produce, Role};
use super::{BOUND, dies_with_us, files, show_if_failing, signal, wait_until};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use ringmain::{Client, QueueInfo, QueueSettings, Stats};
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

/// The program under test.
pub const PROGRAM: &str = env!("CARGO_BIN_EXE_ringmain");

/// The command that starts a broker with these folders.
pub fn serve_command(data: &Path, shm: &Path, socket: &Path) -> Command {
    let mut command = Command::new(PROGRAM);
    command
        .arg("serve")
        .arg("--data-dir")
        .arg(data)
        .arg("--shm-dir")
        .arg(shm)
        .arg("--socket")
        .arg(socket)
        .args(["--disk-reserve", "1MiB"])
        .env_remove("RINGMAIN_SOCKET")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    dies_with_us(&mut command);
    command
}

/// A broker process that may not be in service yet.
pub struct Starting {
    child: Child,
}

impl Starting {
    /// Waits until it prints its socket.
    #[track_caller]
    fn in_service(mut self, socket: &Path) -> Child {
        let deadline = Instant::now() + BOUND;
        let stdout = self.child.stdout.take().unwrap();
        let mut polled = [PollFd::new(stdout.as_fd(), PollFlags::POLLIN)];
        let left = deadline.saturating_duration_since(Instant::now());
        let ready = poll(&mut polled, PollTimeout::try_from(left).unwrap()).unwrap();
        assert_eq!(ready, 1, "the broker does not come into service");
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).unwrap();
        assert_eq!(line.trim_end(), socket.to_str().unwrap(), "it has ended");
        self.child
    }

    /// Kills it, wherever it is.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// A private broker. Killed, and its log shown if the test fails, when this is
/// dropped.
pub struct Broker {
    folder: tempfile::TempDir,
    shm: tempfile::TempDir,
    process: Option<Child>,
    arguments: Vec<String>,
    /// Variables that the process is started with.
    pub environment: Vec<(&'static str, PathBuf)>,
    children: std::cell::Cell<u32>,
}

impl Broker {
    /// Starts a broker with new folders.
    #[track_caller]
    pub fn start() -> Broker {
        let mut broker = Broker::new();
        broker.restart();
        broker
    }

    /// One with a queue of this name.
    #[track_caller]
    pub fn with_queue(queue: &str) -> Broker {
        let broker = Broker::start();
        broker.create(queue, &QueueSettings::default());
        broker
    }

    /// Starts a broker with these arguments more, and a queue of this name.
    #[track_caller]
    pub fn start_with(arguments: &[&str], queue: &str) -> Broker {
        let mut broker = Broker::new();
        broker.arguments = arguments.iter().map(|&a| a.to_owned()).collect();
        broker.restart();
        broker.create(queue, &QueueSettings::default());
        broker
    }

    /// New folders, and no broker yet.
    pub fn new() -> Broker {
        Broker::new_in(Path::new("/dev/shm"))
    }

    /// The same, with the folder of shared memory in this one.
    pub fn new_in(shm: &Path) -> Broker {
        let name = |builder: &mut tempfile::Builder<'_, '_>, folder: &Path| {
            builder.prefix("ringmain-test-").tempdir_in(folder).unwrap()
        };
        Broker {
            folder: name(&mut tempfile::Builder::new(), Path::new("/tmp")),
            shm: name(&mut tempfile::Builder::new(), shm),
            process: None,
            arguments: Vec::new(),
            environment: Vec::new(),
            children: std::cell::Cell::new(0),
        }
    }

    /// The folder of everything that is not shared memory.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn data_dir(&self) -> PathBuf {
        self.folder().join("data")
    }

    pub fn shm_dir(&self) -> PathBuf {
        self.shm.path().join("shm")
    }

    pub fn socket(&self) -> PathBuf {
        self.folder().join("socket")
    }

    fn log(&self) -> PathBuf {
        self.folder().join("broker.log")
    }

    /// What the broker has logged, over all its lives.
    pub fn log_text(&self) -> String {
        std::fs::read_to_string(self.log()).unwrap_or_default()
    }

    pub fn pid(&self) -> u32 {
        self.process.as_ref().expect("it runs").id()
    }

    /// Starts the process, and does not wait.
    pub fn spawn(&self) -> Starting {
        let log = OpenOptions::new()
            .append(true)
            .create(true)
            .open(self.log());
        let mut command = serve_command(&self.data_dir(), &self.shm_dir(), &self.socket());
        command.args(&self.arguments);
        command.envs(self.environment.iter().cloned());
        let child = command.stderr(log.unwrap()).spawn().unwrap();
        Starting { child }
    }

    /// Starts the broker, again, in the same folders; returns when it is in
    /// service.
    #[track_caller]
    pub fn restart(&mut self) {
        assert!(self.process.is_none(), "it runs already");
        self.process = Some(self.spawn().in_service(&self.socket()));
    }

    /// The same, or how it ended before.
    pub fn try_restart(&mut self) -> Result<(), ExitStatus> {
        let mut child = self.spawn().child;
        let mut line = String::new();
        let stdout = child.stdout.take().unwrap();
        BufReader::new(stdout).read_line(&mut line).unwrap();
        if line.is_empty() {
            return Err(child.wait().unwrap());
        }
        self.process = Some(child);
        Ok(())
    }

    /// Whether it has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        let process = self.process.as_mut();
        let ended = process.is_none_or(|process| process.try_wait().unwrap().is_some());
        if ended {
            self.process = None;
        }
        ended
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        let mut process = self.process.take().expect("it runs");
        process.kill().unwrap();
        process.wait().unwrap();
    }

    /// SIGKILL, and does not wait for the end: see [`Broker::reap`].
    pub fn kill_at_once(&mut self) {
        signal(self.pid(), Signal::SIGKILL);
    }

    /// Waits for the end of a process that was sent a signal.
    #[track_caller]
    pub fn reap(&mut self) -> ExitStatus {
        let mut process = self.process.take().expect("it ran");
        let mut status = None;
        wait_until("the broker ends", || {
            status = process.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }

    /// SIGTERM; returns when it has ended in order.
    #[track_caller]
    pub fn terminate(&mut self) {
        signal(self.pid(), Signal::SIGTERM);
        let status = self.reap();
        assert!(status.success(), "{status}");
    }

    /// SIGSTOP. Returns when the whole process stands still.
    pub fn pause(&self) {
        pause(self.pid());
    }

    /// SIGCONT.
    pub fn resume(&self) {
        signal(self.pid(), Signal::SIGCONT);
    }

    /// What a restart of the machine does to shared memory.
    pub fn wipe_shm(&self) {
        if self.shm_dir().exists() {
            std::fs::remove_dir_all(self.shm_dir()).unwrap();
        }
    }

    /// The note that names its status board.
    pub fn board_note(&self) -> PathBuf {
        self.folder().join("socket.board")
    }

    /// The file of its status board, if it has one.
    pub fn board_file(&self) -> Option<PathBuf> {
        let name = std::fs::read_to_string(self.board_note()).ok()?;
        Some(Path::new("/dev/shm").join(name.trim_start_matches('/')))
    }

    /// The sessions whose files are in the shared-memory folder.
    pub fn session_files(&self) -> Vec<String> {
        let mut names = files(&self.shm_dir());
        names.retain(|name| name.starts_with('s'));
        names
    }

    #[track_caller]
    pub fn client(&self) -> Client {
        Client::connect_to(self.socket()).unwrap()
    }

    #[track_caller]
    pub fn create(&self, queue: &str, settings: &QueueSettings) {
        self.client().create_queue(queue, settings).unwrap();
    }

    #[track_caller]
    pub fn info(&self, queue: &str) -> QueueInfo {
        self.client().queue(queue).unwrap()
    }

    #[track_caller]
    pub fn stats(&self) -> Stats {
        self.client().stats().unwrap()
    }

    /// Waits until the queue has no messages.
    #[track_caller]
    pub fn wait_drained(&self, queue: &str) {
        let client = self.client();
        wait_until("the queue is drained", || {
            client.queue(queue).unwrap().messages == 0
        });
    }

    /// A command of the program, for this broker.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(PROGRAM);
        command
            .args(arguments)
            .env("RINGMAIN_SOCKET", self.socket())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        dies_with_us(&mut command);
        command
    }

    /// Runs a command to its end.
    pub fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    pub fn produce(&self, produce: Produce) -> Process {
        self.child(Role::Produce(produce))
    }

    pub fn consume(&self, consume: Consume) -> Process {
        self.child(Role::Consume(consume))
    }

    pub fn hold(&self, hold: Hold) -> Process {
        self.child(Role::Hold(hold))
    }

    /// Removes what children that are no more had noted.
    pub fn forget_children(&self) {
        for name in files(self.folder()) {
            if name.starts_with("child") {
                std::fs::remove_file(self.folder().join(name)).unwrap();
            }
        }
    }

    /// A client in a process of its own.
    pub fn child(&self, role: Role) -> Process {
        let number = self.children.get();
        self.children.set(number + 1);
        Process::start(self.folder(), number, &self.socket(), role)
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
        // A killed broker's stays, and no successor comes.
        if let Some(board) = self.board_file() {
            let _ = std::fs::remove_file(board);
        }
        show_if_failing("broker", &self.log());
    }
}

/// Stops a process, and returns when it stands still.
pub fn pause(pid: u32) {
    signal(pid, Signal::SIGSTOP);
    let path = format!("/proc/{pid}/stat");
    wait_until("a process is stopped", || {
        let stat = std::fs::read_to_string(&path).unwrap();
        stat.rsplit(") ").next().unwrap().starts_with('T')
    });
}

/// How long something takes.
pub fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let started = Instant::now();
    let done = work();
    (done, started.elapsed())
}
