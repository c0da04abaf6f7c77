//! Death of a real process: by SIGKILL, at a crash point that is given by its name
//! and by how often it was passed.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex, PoisonError};

/// `name#times`: this process dies there.
pub(super) const DIE_AT: &str = "RINGMAIN_CRASH_AT";
/// A file that is told of the points that are passed for the first, second,
/// fourth ... time, each with that number.
pub(super) const LOG: &str = "RINGMAIN_CRASH_LOG";

struct Plan {
    die_at: Option<(String, u64)>,
    log: Option<PathBuf>,
    passed: Mutex<HashMap<&'static str, u64>>,
}

static PLAN: LazyLock<Option<Plan>> = LazyLock::new(|| {
    let die_at = std::env::var(DIE_AT).ok();
    let die_at = die_at.and_then(|text| {
        let (name, times) = text.split_once('#')?;
        Some((name.to_owned(), times.parse().ok()?))
    });
    let log = std::env::var_os(LOG).map(PathBuf::from);
    (die_at.is_some() || log.is_some()).then(|| Plan {
        die_at,
        log,
        passed: Mutex::default(),
    })
});

pub(super) fn pass(name: &'static str) {
    let Some(plan) = PLAN.as_ref() else { return };
    let mut passed = plan.passed.lock().unwrap_or_else(PoisonError::into_inner);
    let times = passed.entry(name).or_default();
    *times += 1;
    if let Some(log) = &plan.log
        && times.is_power_of_two()
    {
        let file = OpenOptions::new().append(true).create(true).open(log);
        let line = format!("{name}#{times}\n");
        assert!(file.is_ok_and(|mut file| file.write_all(line.as_bytes()).is_ok()));
    }
    let here = |(wanted, at): &(String, u64)| wanted == name && at == times;
    if plan.die_at.as_ref().is_some_and(here) {
        // SAFETY: signals this process, which does not come to the next line.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        loop {
            std::thread::park();
        }
    }
}
