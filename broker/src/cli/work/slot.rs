//! So many commands at a time, each with a thread of its own that waits for it.

use super::super::exit::Failure;
use super::runner::Outcome;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

pub(super) struct Slots {
    most: u32,
    busy: u32,
    sender: Sender<Outcome>,
    ended: Receiver<Outcome>,
}

impl Slots {
    pub(super) fn new(most: u32) -> Slots {
        let (sender, ended) = channel();
        Slots {
            most,
            busy: 0,
            sender,
            ended,
        }
    }

    pub(super) fn busy(&self) -> u32 {
        self.busy
    }

    pub(super) fn is_full(&self) -> bool {
        self.busy == self.most
    }

    pub(super) fn start(
        &mut self,
        run: impl FnOnce() -> Outcome + Send + 'static,
    ) -> Result<(), Failure> {
        let sender = self.sender.clone();
        std::thread::Builder::new()
            .name("command".to_owned())
            .spawn(move || {
                // The receiver lives as long as anything is busy.
                let _ = sender.send(run());
            })
            .map_err(|e| Failure::io("cannot start a thread", &e))?;
        self.busy += 1;
        Ok(())
    }

    /// What came of a command that has ended, if one does within this time.
    pub(super) fn ended(&mut self, patience: Option<Duration>) -> Option<Outcome> {
        let outcome = match patience {
            Some(patience) => self.ended.recv_timeout(patience).ok(),
            None => self.ended.recv().ok(),
        };
        self.busy -= u32::from(outcome.is_some());
        outcome
    }
}
