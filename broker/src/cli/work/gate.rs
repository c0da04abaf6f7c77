//! Signals: the first one closes the gate to further messages, the second one ends
//! the running commands too.

use super::super::exit::Failure;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

/// See the module. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Gate {
    /// How many signals have come; more than one: hurry.
    count: Arc<AtomicU32>,
    /// The last one's number.
    signal: Arc<AtomicU8>,
}

impl Gate {
    /// From now on signals show here.
    pub(super) fn catch() -> Result<Gate, Failure> {
        let gate = Gate {
            count: Arc::default(),
            signal: Arc::default(),
        };
        let failed = |e| Failure::io("cannot catch signals", &e);
        let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(failed)?;
        let told = gate.clone();
        std::thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || {
                for number in signals.forever() {
                    // Relaxed: each stands for itself.
                    told.signal.store(number as u8, Ordering::Relaxed);
                    told.count.fetch_add(1, Ordering::Relaxed);
                }
            })
            .map_err(failed)?;
        Ok(gate)
    }

    /// Whether no further message is to be taken.
    pub(super) fn is_closed(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    /// Whether running commands are to be ended.
    pub(super) fn is_hurried(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 1
    }

    /// Has running commands ended, for another reason than a signal.
    pub(super) fn hurry(&self) {
        self.count.fetch_add(2, Ordering::Relaxed);
    }

    /// An error with the exit code of a signal that was hurried with.
    pub(super) fn check(&self) -> Result<(), Failure> {
        match self.signal.load(Ordering::Relaxed) {
            signal if signal > 0 && self.is_hurried() => Err(Failure::silent(128 + signal)),
            _ => Ok(()),
        }
    }
}
