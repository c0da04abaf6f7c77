//! One message from its receipt to its answer.

use super::command::{Ended, Running, Template, failure};
use super::gate::Gate;
use ringmain::{Confirm, Error, Message, Producer};
use std::io::{Write, stderr, stdout};
use std::time::{Duration, Instant};

/// What all messages of a worker have in common.
pub(super) struct Runner {
    pub queue: String,
    pub template: Template,
    /// Where the output goes, if not to ours.
    pub reply: Option<Producer>,
    /// How long a lease lasts.
    pub visibility: Duration,
    pub max_attempts: Option<u32>,
    pub backoff: Duration,
    pub backoff_max: Duration,
    pub timeout: Option<Duration>,
    pub gate: Gate,
}

/// What became of a message.
pub(super) enum Outcome {
    /// Its command succeeded.
    Done,
    /// It failed; the message is tried again, or dead.
    Failed(String),
    /// The worker ends: it was given back.
    Returned,
}

impl Runner {
    /// Runs the command for the message, and answers it.
    pub(super) fn run(&self, message: Message) -> Outcome {
        match self.attempt(&message) {
            Ok(()) => match message.ack() {
                Ok(()) => Outcome::Done,
                Err(error) => Outcome::Failed(format!("an ack: {error}")),
            },
            Err(_) if self.gate.is_hurried() || self.template.broken().is_some() => {
                // It was not the message's fault. If this fails, its lease ends with
                // the worker.
                let _ = message.release();
                Outcome::Returned
            }
            Err(reason) => Outcome::Failed(self.give_up(message, &reason)),
        }
    }

    fn attempt(&self, message: &Message) -> Result<(), String> {
        let variables = [
            ("RINGMAIN_QUEUE", self.queue.clone()),
            ("RINGMAIN_MESSAGE_ID", message.id().to_string()),
            ("RINGMAIN_ATTEMPT", (message.attempts() + 1).to_string()),
        ];
        let running = self.template.start(message.payload(), &variables)?;
        let ended = self.watch(running, message)?;
        print(stderr(), &ended.errors);
        if let Some(reason) = failure(ended.status) {
            if self.reply.is_none() {
                print(stdout(), &ended.output);
            }
            return Err(format!("its command {reason}"));
        }
        match &self.reply {
            None => print(stdout(), &ended.output),
            Some(producer) => {
                // Before the ack: should the worker die between, there is a reply
                // too many rather than none.
                producer
                    .send(&ended.output)
                    .and_then(|_| producer.flush(Confirm::Stored))
                    .map_err(|error| format!("its reply was not sent: {error}"))?;
            }
        }
        Ok(())
    }

    /// Waits for the command, and keeps the message meanwhile.
    fn watch(&self, running: Running, message: &Message) -> Result<Ended, String> {
        let started = Instant::now();
        let mut extend_at = started + self.visibility / 3;
        let mut over = None;
        let meanwhile = || {
            let now = Instant::now();
            if now >= extend_at {
                extend_at = now + self.visibility / 3;
                // A full ring is tried again the next time; a lost lease is
                // reported in the end.
                let _ = message.extend(self.visibility);
            }
            over = self.timeout.filter(|&most| started.elapsed() > most);
            over.is_some() || self.gate.is_hurried()
        };
        let ended = running
            .wait(meanwhile)
            .map_err(|e| format!("cannot wait for its command: {e}"))?;
        match over {
            Some(_) if !ended.status.success() => {
                print(stderr(), &ended.errors);
                Err(format!(
                    "its command took longer than {over:.0?}",
                    over = self.timeout.unwrap_or_default()
                ))
            }
            _ => Ok(ended),
        }
    }

    /// Gives the message back for later, or away for good. Returns what to say.
    fn give_up(&self, message: Message, reason: &str) -> String {
        let (id, attempt) = (message.id(), message.attempts() + 1);
        let last = self.max_attempts.is_some_and(|most| attempt >= most);
        let rest = self.rest(attempt);
        let (answered, then) = if last {
            (
                message.reject(),
                "it goes to the dead-letter queue".to_owned(),
            )
        } else {
            (
                message.nack(rest),
                format!("it is tried again in {rest:.0?}"),
            )
        };
        match answered {
            Ok(()) => format!("message {id}, attempt {attempt}: {reason}; {then}"),
            // Then its lease ends by itself.
            Err(error @ Error::Closed(_)) => format!("message {id}: {reason}; {error}"),
            Err(error) => format!("message {id}, attempt {attempt}: {reason}; {error}"),
        }
    }

    /// How long a message rests after this attempt.
    fn rest(&self, attempt: u32) -> Duration {
        let doubled = 2u32.saturating_pow(attempt.saturating_sub(1));
        self.backoff.saturating_mul(doubled).min(self.backoff_max)
    }
}

/// In one piece. Nobody is told if it can't be written: the work is done all the
/// same.
fn print(target: impl Write, bytes: &[u8]) {
    if !bytes.is_empty() {
        let mut target = std::io::BufWriter::with_capacity(bytes.len(), target);
        let _ = target.write_all(bytes).and_then(|()| target.flush());
    }
}
