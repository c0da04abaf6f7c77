//! `ringmain recv`.

use super::exit::{Failure, TIMED_OUT};
use super::interrupt::Interrupt;
use super::units::{duration, show_count, show_duration};
use super::{Global, output, progress};
use indicatif::ProgressBar;
use ringmain::control::WINDOW_MAX;
use ringmain::{Client, Confirm, Consumer, ConsumerOptions, Error, Message};
use serde::Serialize;
use std::io::{self, BufWriter, IsTerminal, StdoutLock, Write};
use std::time::{Duration, Instant, UNIX_EPOCH};

/// Most messages written before they are flushed and acked.
const BATCH_MAX: usize = 256;
/// How long one wait lasts, before signals are looked at.
const PATIENCE: Duration = Duration::from_millis(100);
/// How long is waited at the end until the acks are stored.
const LAST_FLUSH: Duration = Duration::from_secs(5);

/// Receive messages from a queue, and print them
///
/// Prints each payload and a newline. With --ack a message is done once it was
/// written out; without, it is only shown, and all of them return to the queue
/// in the end.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  ringmain recv jobs --count 10 --ack        # take ten
  ringmain recv jobs                         # look at what is there
  ringmain recv jobs --ack --follow --json | jq -r .payload
  ringmain recv jobs --ack --null | xargs -0 -n1 echo

It ends after --count messages, or when nothing has come for the time of --wait;
never by itself with --follow. The exit code is 5 if there were fewer than
--count, or none at all. When it is ended by a signal, or its output is closed,
what was not acked returns to the queue.

Without --ack at most 16384 messages are shown, and those held for longer than
the queue's visibility timeout are shown again.

With --json, an object a line: id, attempts, redelivered, sent_at_ms, and
payload, or payload_hex if the payload is not UTF-8.")]
pub(super) struct Args {
    /// The queue's name
    queue: String,
    /// Receive at most so many
    #[arg(long, short = 'n', value_name = "N")]
    count: Option<u64>,
    /// Ack what was printed: it does not come again
    #[arg(long)]
    ack: bool,
    /// How long to wait for the next message
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "1s")]
    wait: Duration,
    /// Go on for ever
    #[arg(long, conflicts_with = "wait", requires = "ack")]
    follow: bool,
    /// Print a NUL byte after each payload instead of a newline
    #[arg(long, short = '0', conflicts_with = "json")]
    null: bool,
    /// Print a JSON object a line
    #[arg(long)]
    json: bool,
}

pub(super) fn run(global: &Global, args: &Args) -> Result<(), Failure> {
    let interrupt = Interrupt::catch()?;
    let consumer = open(&global.connect()?, args)?;
    let to_terminal = io::stdout().is_terminal();
    let mut receiver = Receiver {
        args,
        consumer,
        interrupt,
        output: BufWriter::with_capacity(64 * 1024, io::stdout().lock()),
        // It would stand in between the messages.
        progress: if to_terminal {
            ProgressBar::hidden()
        } else {
            progress::bar(args.count, "messages")
        },
        shown: Vec::new(),
        received: 0,
    };
    let outcome = receiver.receive();
    receiver.progress.finish_and_clear();
    receiver.finish(outcome)
}

fn open(client: &Client, args: &Args) -> Result<Consumer, Failure> {
    let mut options = ConsumerOptions::new();
    if !args.ack {
        // All that is shown is held.
        let held = args
            .count
            .unwrap_or(u64::MAX)
            .clamp(1, u64::from(WINDOW_MAX));
        options = options.window(held as u32);
    } else if let Some(count) = args.count.filter(|&count| count < 256) {
        // What is not asked for is left to others.
        options = options.window(count.max(1) as u32);
    }
    Ok(client.consumer_with(&args.queue, options)?)
}

struct Receiver<'a> {
    args: &'a Args,
    consumer: Consumer,
    interrupt: Interrupt,
    output: BufWriter<StdoutLock<'static>>,
    progress: ProgressBar,
    /// Held to the end, so that they are not shown again.
    shown: Vec<Message>,
    received: u64,
}

impl Receiver<'_> {
    fn receive(&mut self) -> Result<(), Failure> {
        let mut batch = Vec::with_capacity(BATCH_MAX);
        while self.left() > 0 {
            let Some(first) = self.wait()? else {
                return Ok(());
            };
            batch.push(first);
            let wanted = self.left().min(BATCH_MAX as u64) as usize;
            while batch.len() < wanted {
                let Some(message) = self.consumer.try_recv()? else {
                    break;
                };
                batch.push(message);
            }
            self.print(&batch).map_err(|e| output::failure(&e))?;
            self.received += batch.len() as u64;
            self.progress.set_position(self.received);
            if self.args.ack {
                Message::ack_batch(batch.drain(..))?;
            } else {
                self.shown.append(&mut batch);
            }
        }
        Ok(())
    }

    fn left(&self) -> u64 {
        self.args
            .count
            .map_or(u64::MAX, |count| count - self.received)
    }

    /// The next message, or `None` when the time is over.
    fn wait(&mut self) -> Result<Option<Message>, Failure> {
        let started = Instant::now();
        loop {
            self.interrupt.check()?;
            let waited = started.elapsed();
            let patience = if self.args.follow {
                PATIENCE
            } else {
                PATIENCE.min(self.args.wait.saturating_sub(waited))
            };
            if let Some(message) = self.consumer.recv_timeout(patience)? {
                return Ok(Some(message));
            }
            if !self.args.follow && started.elapsed() >= self.args.wait {
                return Ok(None);
            }
        }
    }

    /// Writes the messages all the way out.
    fn print(&mut self, messages: &[Message]) -> io::Result<()> {
        for message in messages {
            if self.args.json {
                serde_json::to_writer(&mut self.output, &Line::of(message))?;
                self.output.write_all(b"\n")?;
            } else {
                self.output.write_all(message.payload())?;
                let end = if self.args.null { b"\0" } else { b"\n" };
                self.output.write_all(end)?;
            }
        }
        self.output.flush()
    }

    /// However it ended: returns what is held, and waits until acks are stored.
    fn finish(mut self, outcome: Result<(), Failure>) -> Result<(), Failure> {
        self.shown.clear();
        let flushed = match self.consumer.flush_timeout(Confirm::Stored, LAST_FLUSH) {
            Err(Error::TimedOut) => {
                tracing::debug!("the broker has not stored the acks yet");
                Ok(())
            }
            other => other,
        };
        outcome?;
        flushed?;
        match self.args.count {
            Some(count) if self.received < count => Err(Failure::new(
                TIMED_OUT,
                format!(
                    "{} of {} message(s) within {}",
                    show_count(self.received),
                    show_count(count),
                    show_duration(self.args.wait)
                ),
            )),
            None if self.received == 0 => Err(Failure::new(
                TIMED_OUT,
                format!("no message within {}", show_duration(self.args.wait)),
            )),
            _ => Ok(()),
        }
    }
}

/// A message as JSON.
#[derive(Debug, Serialize)]
struct Line<'a> {
    id: String,
    attempts: u32,
    redelivered: bool,
    sent_at_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload_hex: Option<String>,
}

impl<'a> Line<'a> {
    fn of(message: &'a Message) -> Line<'a> {
        let payload = std::str::from_utf8(message.payload()).ok();
        Line {
            id: message.id().to_string(),
            attempts: message.attempts(),
            redelivered: message.redelivered(),
            sent_at_ms: message
                .sent_at()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_millis() as u64),
            payload_hex: payload.is_none().then(|| hex(message.payload())),
            payload,
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_is_two_digits_a_byte() {
        assert_eq!(hex(b"\x00\xff\x1a"), "00ff1a");
    }
}
