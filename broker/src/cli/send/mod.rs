//! `ringmain send`.

mod batch;
mod source;

use super::exit::Failure;
use super::interrupt::Interrupt;
use super::units::{show_count, size};
use super::{Global, progress};
use batch::Batch;
use indicatif::ProgressBar;
use ringmain::{Confirm, Error, Producer, ProducerOptions};
use source::{Next, Source};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How long one try to send takes, before signals are looked at.
const PATIENCE: Duration = Duration::from_millis(250);
/// How long is waited for a confirmation after a signal.
const LAST_FLUSH: Duration = Duration::from_secs(5);

/// Send messages to a queue
///
/// Each line of standard input is a message, without its newline; it need not
/// be UTF-8. The exit code is 0 only when all messages are stored.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  find /usr -type f | ringmain send jobs
  find /usr -type f -print0 | ringmain send jobs --null
  ringmain send jobs --file report.pdf --file report.txt
  ringmain send jobs --count 1000000 --size 128

After Ctrl-C or SIGTERM, what was sent until then is stored, and counted.")]
pub(super) struct Args {
    /// The queue's name
    queue: String,
    /// Messages end with a NUL byte instead of a newline
    #[arg(long, short = '0')]
    null: bool,
    /// Send this file as one message; can be given many times
    #[arg(long, value_name = "FILE", conflicts_with_all = ["null", "count"])]
    file: Vec<PathBuf>,
    /// Send so many made-up messages
    #[arg(long, value_name = "N", conflicts_with = "null")]
    count: Option<u64>,
    /// Length of each made-up message
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "100B", requires = "count")]
    size: u64,
    /// What to wait for at the end
    #[arg(long, value_enum, default_value_t = Level::Stored)]
    confirm: Level,
}

/// What `send` waits for at its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Level {
    /// Written to the store, or settled
    Stored,
    /// Behind an fdatasync: survives a power cut
    Synced,
}

impl From<Level> for Confirm {
    fn from(level: Level) -> Confirm {
        match level {
            Level::Stored => Confirm::Stored,
            Level::Synced => Confirm::Synced,
        }
    }
}

pub(super) fn run(global: &Global, args: &Args) -> Result<(), Failure> {
    let interrupt = Interrupt::catch()?;
    let client = global.connect()?;
    let limit = u64::from(client.queue(&args.queue)?.settings.max_message_bytes);
    let source = source(args, limit)?;
    // Confirmed once, at the end.
    let options = ProducerOptions::new().confirm(Confirm::Accepted);
    let mut sender = Sender {
        producer: client.producer_with(&args.queue, options)?,
        confirm: args.confirm.into(),
        interrupt,
        progress: progress::bar(source.total(), "messages"),
        sent: 0,
    };
    let outcome = sender.send_all(source);
    let outcome = sender.finish(outcome);
    sender.progress.finish_and_clear();
    outcome
}

fn source(args: &Args, limit: u64) -> Result<Source, Failure> {
    if let Some(count) = args.count {
        Source::load(count, args.size, limit)
    } else if !args.file.is_empty() {
        Ok(Source::files(args.file.clone(), limit))
    } else {
        let separator = if args.null { b'\0' } else { b'\n' };
        Source::lines(separator, limit)
    }
}

struct Sender {
    producer: Producer,
    confirm: Confirm,
    interrupt: Interrupt,
    progress: ProgressBar,
    sent: u64,
}

impl Sender {
    fn send_all(&mut self, mut source: Source) -> Result<(), Failure> {
        let mut batch = Batch::default();
        loop {
            let next = source.next(&mut batch, &self.interrupt);
            // Also when that failed: what came before is to be sent.
            self.send(&batch)?;
            batch.clear();
            if next? == Next::End {
                return Ok(());
            }
        }
    }

    /// Sends the batch, however long the broker may be away, unless a signal
    /// comes.
    fn send(&mut self, batch: &Batch) -> Result<(), Failure> {
        for message in batch.messages() {
            loop {
                match self.producer.send_timeout(message, PATIENCE) {
                    Ok(_) => break,
                    Err(Error::TimedOut) => {
                        self.progress.set_message("(waiting for room)");
                        self.interrupt.check()?;
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            self.sent += 1;
        }
        self.progress.set_message("");
        self.progress.set_position(self.sent);
        Ok(())
    }

    /// However it ended: waits until what was sent is stored.
    fn finish(&mut self, outcome: Result<(), Failure>) -> Result<(), Failure> {
        self.progress.set_message("(waiting for the confirmation)");
        let flushed = self.flush();
        let sent = show_count(self.sent);
        let stored = match &flushed {
            Ok(()) => format!("{sent} message(s) are stored"),
            Err(_) => format!("{sent} message(s) were sent, and not all confirmed"),
        };
        match (outcome, flushed) {
            (Ok(()), Ok(())) => Ok(()),
            (Ok(()), Err(failure)) => Err(failure.and(&stored)),
            (Err(failure), _) if self.interrupt.came() => Err(failure.and(&stored)),
            (Err(failure), _) => Err(failure.and(&format!("before that, {stored}"))),
        }
    }

    fn flush(&self) -> Result<(), Failure> {
        let mut last_try = None;
        loop {
            match self.producer.flush_timeout(self.confirm, PATIENCE) {
                Ok(()) => return Ok(()),
                Err(Error::TimedOut) => {}
                Err(error) => return Err(error.into()),
            }
            if self.interrupt.came() {
                let last_try = *last_try.get_or_insert_with(|| Instant::now() + LAST_FLUSH);
                if Instant::now() >= last_try {
                    return self.interrupt.check();
                }
            }
        }
    }
}
