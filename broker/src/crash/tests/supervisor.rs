//! Starts the broker, again whenever it was killed.

use super::Death;
use crate::crash::plan::{DIE_AT, LOG};
use crate::service::{ServeOptions, Stop, serve};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// The variable that makes this program the broker.
const FOLDER: &str = "RINGMAIN_CRASH_BROKER";

/// Whether this process is the broker.
pub fn is_broker() -> bool {
    std::env::var_os(FOLDER).is_some()
}

/// The broker, if this process was started as it.
pub fn be_the_broker() {
    let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else {
        return;
    };
    let _ = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .try_init();
    let (stop, _handle) = Stop::new().unwrap();
    let options = ServeOptions {
        data_dir: folder.join("data"),
        shm_dir: folder.join("shm"),
        socket: folder.join("socket"),
        disk_reserve_bytes: 1 << 20,
        session_payload_bytes: 64 << 20,
        payload_bytes: Some(256 << 20),
    };
    serve(&options, &stop, || {}).unwrap();
}

/// What the thread that starts brokers and the workload share.
struct Shared {
    folder: PathBuf,
    /// Deaths that are still to be died.
    deaths: Mutex<Vec<Death>>,
    child: Mutex<Option<Child>>,
    /// No other broker is to be started.
    over: AtomicBool,
    /// How many lives there were.
    lives: Mutex<usize>,
    /// What a broker died of that was not to die.
    fault: Mutex<Option<String>>,
}

pub struct Supervisor {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    what: String,
    _folder: tempfile::TempDir,
}

impl Supervisor {
    /// Starts a broker that dies the first of these deaths, then one that dies the
    /// next, then one that lives.
    pub fn start(deaths: &[Death]) -> Supervisor {
        let folder = tempfile::Builder::new()
            .prefix("ringmain-crash-")
            .tempdir_in("/dev/shm")
            .unwrap();
        let shared = Arc::new(Shared {
            folder: folder.path().to_owned(),
            deaths: Mutex::new(deaths.iter().rev().cloned().collect()),
            child: Mutex::new(None),
            over: AtomicBool::new(false),
            lives: Mutex::new(0),
            fault: Mutex::new(None),
        });
        let theirs = Arc::clone(&shared);
        Supervisor {
            thread: Some(std::thread::spawn(move || theirs.keep_up())),
            shared,
            what: format!("{deaths:?}"),
            _folder: folder,
        }
    }

    pub fn socket(&self) -> PathBuf {
        self.shared.folder.join("socket")
    }

    pub fn shm(&self) -> PathBuf {
        self.shared.folder.join("shm")
    }

    /// What this run is about, for messages.
    pub fn what(&self) -> &str {
        &self.what
    }

    /// Fails if a broker has ended that was neither killed nor told to.
    #[track_caller]
    pub fn check(&self) {
        if let Some(fault) = &*self.shared.fault.lock().unwrap() {
            panic!("{}: {fault}", self.what);
        }
    }

    /// Ends the broker. Gives, for each of its lives, the points that were passed, in
    /// the order of their first time, each as a death: for the first, second,
    /// fourth ... time.
    pub fn finish(mut self) -> Vec<Vec<Death>> {
        self.end();
        self.check();
        let lives = 0..*self.shared.lives.lock().unwrap();
        let passed = |life| std::fs::read_to_string(self.shared.log(life)).unwrap_or_default();
        lives
            .map(|life| passed(life).lines().map(str::to_owned).collect())
            .collect()
    }

    fn end(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
        if let Some(child) = &mut *self.shared.child.lock().unwrap() {
            let _ = child.kill();
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.end();
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.shared.folder.join("broker.log"));
            let log = log.unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            let last = &lines[lines.len().saturating_sub(60)..];
            eprintln!("{}\n{}", self.what, last.join("\n"));
        }
    }
}

impl Shared {
    fn log(&self, life: usize) -> PathBuf {
        self.folder.join(format!("passed{life}"))
    }

    /// Until all is over: a broker at any time.
    fn keep_up(&self) {
        while !self.over.load(Ordering::Relaxed) && self.fault.lock().unwrap().is_none() {
            let child = self.spawn();
            *self.child.lock().unwrap() = Some(child);
            let status = loop {
                let status = self.child.lock().unwrap().as_mut().unwrap().try_wait();
                if let Some(status) = status.unwrap() {
                    break status;
                }
                std::thread::sleep(Duration::from_millis(1));
            };
            let killed = status.signal() == Some(libc::SIGKILL);
            if !killed && !status.success() {
                *self.fault.lock().unwrap() = Some(format!("the broker ended: {status}"));
            }
        }
    }

    fn spawn(&self) -> Child {
        let mut lives = self.lives.lock().unwrap();
        let log = self.log(*lives);
        *lives += 1;
        let output = output_to(&self.folder.join("broker.log"));
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["crash::tests::broker_process", "--exact", "--nocapture"])
            .env(FOLDER, &self.folder)
            .env(LOG, log)
            .env_remove(DIE_AT)
            .stdin(Stdio::null())
            .stdout(output.try_clone().unwrap())
            .stderr(output);
        if let Some(death) = self.deaths.lock().unwrap().pop() {
            command.env(DIE_AT, death);
        }
        // SAFETY: `prctl` is a plain system call, allowed between fork and exec.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        command.spawn().unwrap()
    }
}

fn output_to(path: &Path) -> std::fs::File {
    let mut options = std::fs::OpenOptions::new();
    options.append(true).create(true).open(path).unwrap()
}
