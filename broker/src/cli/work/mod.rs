//! `ringmain work`: runs a command for each message of a queue.

mod command;
mod gate;
mod runner;
mod slot;

use super::exit::{FAILED, Failure, USAGE};
use super::units::{duration, show_count};
use super::{Global, progress};
use command::Template;
use gate::Gate;
use indicatif::ProgressBar;
use ringmain::{Client, Confirm, Consumer, ConsumerOptions, Error};
use runner::{Outcome, Runner};
use slot::Slots;
use std::ffi::OsString;
use std::io::{IsTerminal, Write, stderr};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long one wait for a message lasts, before signals are looked at.
const PATIENCE: Duration = Duration::from_millis(50);
/// Between two looks at how many messages the queue has.
const LOOK: Duration = Duration::from_millis(500);
/// How long is waited at the end until the acks are stored.
const LAST_FLUSH: Duration = Duration::from_secs(5);

/// Run a command for each message of a queue
///
/// A crash-safe xargs: a message is done when its command has ended with exit code
/// 0. Else it goes back to the queue, and is tried again after a while, by this
/// worker or another. The lease on it is extended as long as its command runs.
/// If the worker dies, its messages go to others at once.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  ringmain work jobs --parallel 4 -- sha256sum {}
  ringmain work mails --stdin -- msmtp --read-recipients
  ringmain work pictures --file --max-attempts 3 -- convert {} -resize 50% {}.small.png
  ringmain work questions --stdin --reply-to answers --exit-when-empty -- ./answer

The payload takes the place of each {} in the arguments, and is the last argument
if there is none. With --stdin it is the command's standard input, with --file
{} is the name of a temporary file that holds it.

The command finds RINGMAIN_QUEUE, RINGMAIN_MESSAGE_ID and RINGMAIN_ATTEMPT (from 1)
in its environment. What it prints is passed on when it has ended, in one piece.

Ctrl-C or SIGTERM: no further message is taken, and the running commands may end; a
second time: they are ended too, and their messages go back to the queue.

The exit code is 0 if every command succeeded, 123 if some failed (as with xargs),
and 130 or 143 if a second signal ended the worker.")]
pub(super) struct Args {
    /// The queue's name
    queue: String,
    /// Commands that run at a time [default: the number of processors]
    #[arg(long, short = 'P', value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    parallel: Option<u32>,
    /// Give the payload to the command's standard input
    #[arg(long, conflicts_with = "file")]
    stdin: bool,
    /// Give the payload in a temporary file, named by {}
    #[arg(long)]
    file: bool,
    /// After so many failed attempts a message goes to the dead-letter queue
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_attempts: Option<u32>,
    /// How long a message rests after its first failed attempt; twice as long
    /// after each further one
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "1s")]
    backoff: Duration,
    /// How long it rests at most
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "5m")]
    backoff_max: Duration,
    /// End a command that takes longer (SIGTERM, and SIGKILL five seconds later);
    /// it counts as failed
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    timeout: Option<Duration>,
    /// Send what a command prints to this queue, before its message is done
    #[arg(long, value_name = "QUEUE")]
    reply_to: Option<String>,
    /// End after so many messages
    #[arg(long, short = 'n', value_name = "N")]
    count: Option<u64>,
    /// End when the queue is empty: nothing waits, and nobody works on anything
    #[arg(long)]
    exit_when_empty: bool,
    /// No progress bar and no summary
    #[arg(long, short)]
    quiet: bool,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

pub(super) fn run(global: &Global, args: &Args) -> Result<(), Failure> {
    let gate = Gate::catch()?;
    let client = global.connect()?;
    let parallel = args.parallel.unwrap_or_else(|| {
        let processors = std::thread::available_parallelism();
        processors.map_or(1, |count| count.get().min(1024) as u32)
    });
    let settings = client.queue(&args.queue)?.settings;
    let template = Template::new(&args.command, args.stdin, args.file)?;
    let reply = args.reply_to.as_deref();
    let reply = reply.map(|queue| client.producer(queue)).transpose()?;
    let options = ConsumerOptions::new().window(parallel);
    let worker = Worker {
        args,
        consumer: client.consumer_with(&args.queue, options)?,
        runner: Arc::new(Runner {
            queue: args.queue.clone(),
            template,
            reply,
            visibility: Duration::from_millis(settings.visibility_timeout_ms),
            max_attempts: args.max_attempts,
            backoff: args.backoff,
            backoff_max: args.backoff_max,
            timeout: args.timeout,
            gate: gate.clone(),
        }),
        gate,
        slots: Slots::new(parallel),
        bar: bar(args, &client),
        started: 0,
        failed: 0,
        looked: Instant::now(),
        client,
    };
    worker.work()
}

fn bar(args: &Args, client: &Client) -> ProgressBar {
    if args.quiet || !stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let waiting = client.queue(&args.queue).map_or(0, |info| info.messages);
    progress::bar_with_time_left(args.count.unwrap_or(waiting))
}

struct Worker<'a> {
    args: &'a Args,
    client: Client,
    consumer: Consumer,
    runner: Arc<Runner>,
    gate: Gate,
    slots: Slots,
    bar: ProgressBar,
    /// Messages whose command was started.
    started: u64,
    failed: u64,
    looked: Instant,
}

impl Worker<'_> {
    fn work(mut self) -> Result<(), Failure> {
        let outcome = self.feed();
        if outcome.is_err() {
            self.gate.hurry();
        }
        // Running commands may end.
        while self.slots.busy() > 0 {
            self.collect(None);
        }
        self.bar.finish_and_clear();
        let stored = self.consumer.flush_timeout(Confirm::Stored, LAST_FLUSH);
        self.summary();
        outcome?;
        match stored {
            // The acks are accepted, which outlives this process.
            Ok(()) | Err(Error::TimedOut) => {}
            Err(Error::LeaseLost { count }) => {
                return Err(Failure::new(
                    FAILED,
                    format!("{count} message(s) were held too long, and may be worked on again"),
                ));
            }
            Err(error) => return Err(error.into()),
        }
        self.gate.check()?;
        match self.failed {
            0 => Ok(()),
            _ => Err(Failure::silent(SOME_FAILED)),
        }
    }

    /// Starts commands until there is a reason to stop.
    fn feed(&mut self) -> Result<(), Failure> {
        while !self.gate.is_closed() && self.args.count.is_none_or(|most| self.started < most) {
            if self.slots.is_full() {
                self.collect(Some(PATIENCE));
                self.look_at_queue()?;
                continue;
            }
            self.collect(Some(Duration::ZERO));
            match self.consumer.recv_timeout(PATIENCE)? {
                Some(message) => {
                    self.started += 1;
                    let runner = Arc::clone(&self.runner);
                    self.slots.start(move || runner.run(message))?;
                }
                None if self.look_at_queue()? => return Ok(()),
                None => {}
            }
            if let Some(reason) = self.runner.template.broken() {
                return Err(Failure::new(USAGE, reason));
            }
        }
        Ok(())
    }

    /// Takes notice of a command that has ended; waits so long for one, or as long
    /// as it takes.
    fn collect(&mut self, patience: Option<Duration>) {
        let Some(outcome) = self.slots.ended(patience) else {
            return;
        };
        match outcome {
            Outcome::Done => {}
            Outcome::Failed(reason) => {
                self.failed += 1;
                self.complain(&reason);
            }
            Outcome::Returned => self.started -= 1,
        }
        self.bar.inc(1);
        if self.failed > 0 {
            self.bar
                .set_message(format!("{} failed", show_count(self.failed)));
        }
    }

    /// One line on standard error, beside the bar if there is one.
    fn complain(&self, reason: &str) {
        self.bar.suspend(|| {
            // If nobody reads it, the exit code still tells.
            let _ = writeln!(stderr(), "ringmain: {}", reason.replace('\n', " "));
        });
    }

    /// Every now and then: how much there is to do. Returns whether the worker is
    /// to end because there is nothing.
    fn look_at_queue(&mut self) -> Result<bool, Failure> {
        let shows = !self.bar.is_hidden() && self.args.count.is_none();
        if !(shows || self.args.exit_when_empty) || self.looked.elapsed() < LOOK.min(PATIENCE * 2) {
            return Ok(false);
        }
        self.looked = Instant::now();
        let left = match self.client.queue(&self.args.queue) {
            Ok(info) => info.messages,
            // A restart of the broker does not end a worker.
            Err(Error::NotRunning { .. } | Error::Io { .. }) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        self.bar.set_length(self.bar.position() + left);
        // What our own commands work on counts too, until its ack was taken in.
        Ok(self.args.exit_when_empty && left == 0 && self.slots.busy() == 0)
    }

    fn summary(&self) {
        if self.args.quiet || !stderr().is_terminal() {
            return;
        }
        let done = show_count(self.started - self.failed);
        let _ = writeln!(stderr(), "{done} done, {} failed", show_count(self.failed));
    }
}

/// As with `xargs`.
const SOME_FAILED: u8 = 123;
