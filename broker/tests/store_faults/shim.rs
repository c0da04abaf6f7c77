//! The test's side of `shim.c`.

use super::common::{Broker, wait_until};
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicI64, Ordering};

/// Kinds of calls, as `shim.c` numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Call {
    Write,
    Sync,
    Open,
    Rename,
    Reserve,
    Read,
    Unlink,
}

/// `struct control` of `shim.c`.
#[repr(C)]
struct Control {
    kind: AtomicI32,
    error: AtomicI32,
    after: AtomicI64,
    times: AtomicI64,
    calls: [AtomicI64; 7],
    failed: AtomicI64,
    clock: AtomicI64,
}

/// In front of a broker's store.
pub struct Shim {
    control: *mut Control,
    log: PathBuf,
    data: PathBuf,
}

/// The library, built once.
fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/store_faults/shim.c");
        let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join("shim.so");
        let made = library.with_extension(std::process::id().to_string());
        let mut compile = Command::new("cc");
        compile.args(["-shared", "-fPIC", "-O1", "-o"]);
        let done = compile.arg(&made).arg(source).arg("-ldl").output().unwrap();
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{said}");
        // Renamed into place: another test program may be using it.
        std::fs::rename(&made, &library).unwrap();
        library
    })
}

impl Shim {
    /// For a broker that is not started yet.
    pub fn before(broker: &mut Broker) -> Shim {
        let control = broker.folder().join("shim.control");
        let log = broker.folder().join("shim.log");
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true);
        let file = options.open(&control).unwrap();
        file.set_len(size_of::<Control>() as u64).unwrap();
        broker.environment = vec![
            ("LD_PRELOAD", library().to_owned()),
            ("RINGMAIN_SHIM_FOLDER", broker.data_dir()),
            ("RINGMAIN_SHIM_CONTROL", control),
            ("RINGMAIN_SHIM_LOG", log.clone()),
        ];
        Shim {
            control: map(&file),
            log,
            data: broker.data_dir(),
        }
    }

    fn control(&self) -> &Control {
        // SAFETY: mapped as long as this lives, of this size, and zeroed, which is
        // a value of these atomics.
        unsafe { &*self.control }
    }

    /// Has calls of this kind fail, after so many more, so many times. The error is
    /// an errno; 0: a write is cut short.
    pub fn fail(&self, call: Call, error: i32, after: i64, times: i64) {
        let control = self.control();
        control.times.store(0, Ordering::SeqCst);
        control.kind.store(call as i32, Ordering::SeqCst);
        control.error.store(error, Ordering::SeqCst);
        control.after.store(after, Ordering::SeqCst);
        control.times.store(times, Ordering::SeqCst);
    }

    /// Sets the broker's wall clock, so many seconds off.
    pub fn set_clock(&self, seconds: i64) {
        self.control().clock.store(seconds, Ordering::SeqCst);
    }

    /// From now on all calls work.
    pub fn heal(&self) {
        self.control().times.store(0, Ordering::SeqCst);
    }

    /// How many calls have failed.
    pub fn failed(&self) -> i64 {
        self.control().failed.load(Ordering::SeqCst)
    }

    #[track_caller]
    pub fn wait_failed(&self, more_than: i64) {
        wait_until("a call fails", || self.failed() > more_than);
    }

    /// Leaves of the data folder what a power cut may leave, when no broker runs:
    /// of each file at least what was synced, and of the rest what the dice say.
    pub fn power_cut(&self, mut dice: impl FnMut(u64) -> u64) {
        let files = self.synced();
        for path in files_below(&self.data) {
            let Some(synced) = files.get(&path) else {
                continue;
            };
            if !synced.entry && dice(2) == 0 {
                std::fs::remove_file(&path).unwrap();
                continue;
            }
            let len = path.metadata().unwrap().len();
            let least = synced.bytes.min(len);
            let most = synced.lost_from.map_or(len, |from| from.min(len));
            let kept = match dice(3) {
                0 => least,
                1 => most,
                _ => least + dice(most.max(least) - least + 1),
            };
            let file = OpenOptions::new().write(true).open(&path).unwrap();
            file.set_len(kept.max(least)).unwrap();
        }
        std::fs::remove_file(&self.log).unwrap();
    }

    /// What is safe of each file that the broker made.
    fn synced(&self) -> HashMap<PathBuf, Synced> {
        let mut files: HashMap<PathBuf, Synced> = HashMap::new();
        for line in std::fs::read_to_string(&self.log).unwrap().lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let path = PathBuf::from(words[1]);
            match words[0] {
                "C" => _ = files.insert(path, Synced::default()),
                "S" => {
                    let synced = files.entry(path).or_insert(Synced::OLD);
                    synced.bytes = synced.bytes.max(words[2].parse().unwrap());
                    // Pages that could not be written count as clean afterwards: a
                    // later sync says nothing of them.
                    let from = synced.lost_from.unwrap_or(u64::MAX);
                    synced.bytes = synced.bytes.min(from);
                }
                "F" => {
                    let synced = files.entry(path).or_insert(Synced::OLD);
                    synced.lost_from = synced.lost_from.or(Some(synced.bytes));
                }
                "D" => {
                    let inside = files
                        .iter_mut()
                        .filter(|(file, _)| file.parent() == Some(&path));
                    inside.for_each(|(_, synced)| synced.entry = true);
                }
                "R" => {
                    if let Some(synced) = files.remove(&path) {
                        files.insert(PathBuf::from(words[2]), synced);
                    }
                }
                _ => _ = files.remove(&path),
            }
        }
        files
    }
}

impl Drop for Shim {
    fn drop(&mut self) {
        // SAFETY: this one's own mapping.
        unsafe { libc::munmap(self.control.cast(), size_of::<Control>()) };
    }
}

#[derive(Debug, Default)]
struct Synced {
    /// So many of its bytes.
    bytes: u64,
    /// Its entry in the folder.
    entry: bool,
    /// From here on a sync has failed.
    lost_from: Option<u64>,
}

impl Synced {
    /// One that was there before.
    const OLD: Synced = Synced {
        bytes: 0,
        entry: true,
        lost_from: None,
    };
}

fn map(file: &File) -> *mut Control {
    use std::os::fd::AsRawFd;
    // SAFETY: a new mapping of a file of this length.
    let at = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            size_of::<Control>(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    assert_ne!(at, libc::MAP_FAILED);
    at.cast()
}

/// All files below a folder.
pub fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => files.extend(files_below(&path)),
            false => files.push(path),
        }
    }
    files.sort_unstable();
    files
}
