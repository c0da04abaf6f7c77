//! The processes of a measurement. Each says `ready` on its output, waits for a
//! line on its input, does its work, and prints what it has seen.

use crate::stats::{now_ns, sleep_until_ns};
use clap::{Args, ValueEnum};
use ringmain::{Client, Confirm, Consumer, Message, Producer, ProducerOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What a process does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    Produce,
    Consume,
    Ping,
    Pong,
}

/// One process.
#[derive(Debug, Clone, Args)]
pub struct Role {
    pub kind: Kind,
    #[arg(long)]
    pub socket: PathBuf,
    #[arg(long, default_value = "bench")]
    pub queue: String,
    /// Messages to send, in all
    #[arg(long, default_value_t = 0)]
    pub count: u64,
    /// Bytes of each
    #[arg(long, default_value_t = 64)]
    pub size: usize,
    /// Messages a call
    #[arg(long, default_value_t = 1)]
    pub batch: usize,
    /// Messages a second; 0: as fast as it goes
    #[arg(long, default_value_t = 0)]
    pub rate: u64,
    /// Wait by trying again and again, never asleep
    #[arg(long)]
    pub spin: bool,
    #[arg(long, default_value = "accepted")]
    pub confirm: String,
    /// Keep how long each message, or each call, took
    #[arg(long)]
    pub times: bool,
    /// Send loans
    #[arg(long)]
    pub loan: bool,
    /// Fill each loan from memory of one's own, and read every byte that comes
    #[arg(long)]
    pub touch: bool,
}

/// What a process reports: when its work ended, how many messages it handled,
/// and the times it kept, in nanoseconds.
#[derive(Debug, Default)]
pub struct Report {
    pub end_ns: u64,
    pub count: u64,
    pub times_ns: Vec<u64>,
}

impl Role {
    /// Starts a process with this role.
    pub fn start(&self) -> std::io::Result<Process> {
        let mut command = Command::new(std::env::current_exe()?);
        let kind = self.kind.to_possible_value();
        command
            .arg("role")
            .arg(kind.as_ref().map_or("", |kind| kind.get_name()));
        command
            .arg("--socket")
            .arg(&self.socket)
            .args(["--queue", &self.queue]);
        command.args(["--confirm", &self.confirm]);
        for (name, value) in [("--count", self.count), ("--size", self.size as u64)] {
            command.args([name, &value.to_string()]);
        }
        for (name, value) in [("--batch", self.batch as u64), ("--rate", self.rate)] {
            command.args([name, &value.to_string()]);
        }
        command
            .args(self.spin.then_some("--spin"))
            .args(self.times.then_some("--times"))
            .args(self.loan.then_some("--loan"))
            .args(self.touch.then_some("--touch"));
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let out = child
            .stdout
            .take()
            .ok_or_else(|| std::io::Error::other("no output"))?;
        let mut process = Process {
            child,
            out: BufReader::new(out),
        };
        process.line()?;
        Ok(process)
    }

    /// Does the work of the process.
    pub fn run(self) -> crate::Outcome {
        let client = Client::connect_to(&self.socket)?;
        let report = match self.kind {
            Kind::Produce => self.produce(&client)?,
            Kind::Consume => self.consume(&client)?,
            Kind::Ping => self.ping(&client)?,
            Kind::Pong => self.pong(&client)?,
        };
        let mut out = std::io::stdout().lock();
        writeln!(out, "{} {}", report.end_ns, report.count)?;
        let times: Vec<String> = report.times_ns.iter().map(u64::to_string).collect();
        writeln!(out, "{}", times.join(" "))?;
        Ok(())
    }

    fn produce(&self, client: &Client) -> Result<Report, Box<dyn std::error::Error>> {
        let confirm = match self.confirm.as_str() {
            "stored" => Confirm::Stored,
            "synced" => Confirm::Synced,
            _ => Confirm::Accepted,
        };
        // Pipelined confirmation: sends are accepted, and one flush a batch.
        let each = if self.batch == 1 {
            confirm
        } else {
            Confirm::Accepted
        };
        let options = ProducerOptions::new().confirm(each);
        let producer = client.producer_with(&self.queue, options)?;
        let mut report = Report::default();
        let mut payload = vec![0u8; self.size];
        wait_for_go()?;
        let start = now_ns();
        let mut sent = 0;
        while sent < self.count {
            if let Some(elapsed) = (sent * 1_000_000_000).checked_div(self.rate) {
                sleep_until_ns(start + elapsed);
            }
            let before = if self.times || self.rate > 0 {
                now_ns()
            } else {
                0
            };
            if let Some(stamp) = payload.get_mut(..8) {
                stamp.copy_from_slice(&before.to_ne_bytes());
            }
            sent += self.send(&producer, &payload, confirm)?;
            if self.times {
                report.times_ns.push(now_ns() - before);
            }
        }
        if self.confirm != "accepted" {
            producer.flush(confirm)?;
        }
        report.count = sent;
        report.end_ns = now_ns();
        Ok(report)
    }

    fn send(&self, producer: &Producer, payload: &[u8], confirm: Confirm) -> ringmain::Result<u64> {
        if self.loan {
            let mut loan = producer.loan(payload.len())?;
            if self.touch {
                loan.copy_from_slice(payload);
            }
            loan.send()?;
            return Ok(1);
        }
        if self.batch == 1 {
            producer.send(payload)?;
            return Ok(1);
        }
        producer.send_batch(std::iter::repeat_n(payload, self.batch))?;
        producer.flush(confirm)?;
        Ok(self.batch as u64)
    }

    fn consume(&self, client: &Client) -> Result<Report, Box<dyn std::error::Error>> {
        let mut consumer = client.consumer(&self.queue)?;
        let mut report = Report::default();
        wait_for_go()?;
        let stop = stop_on_second_line();
        // A backlog is being drained: every tenth of it is timed.
        let tenth = (self.count / 10).max(1);
        while !stop.load(Ordering::Relaxed) && (self.count == 0 || report.count < self.count) {
            let messages = self.receive(&mut consumer)?;
            if messages.is_empty() {
                continue;
            }
            report.end_ns = now_ns();
            for message in &messages {
                report.count += 1;
                if self.touch {
                    std::hint::black_box(sum_of(message.payload()));
                }
                if let (true, Some(stamp)) = (self.times, message.payload().first_chunk()) {
                    report
                        .times_ns
                        .push(report.end_ns - u64::from_ne_bytes(*stamp));
                }
                if self.count > 0 && report.count % tenth == 0 {
                    report.times_ns.push(report.end_ns);
                }
            }
            Message::ack_batch(messages)?;
        }
        consumer.flush(Confirm::Stored)?;
        Ok(report)
    }

    fn receive(&self, consumer: &mut Consumer) -> ringmain::Result<Vec<Message>> {
        if self.spin {
            return Ok(consumer.try_recv()?.into_iter().collect());
        }
        let first = consumer.recv_timeout(Duration::from_millis(100))?;
        let Some(first) = first else {
            return Ok(Vec::new());
        };
        let mut messages = vec![first];
        while messages.len() < self.batch {
            match consumer.try_recv()? {
                Some(message) => messages.push(message),
                None => break,
            }
        }
        Ok(messages)
    }

    fn ping(&self, client: &Client) -> Result<Report, Box<dyn std::error::Error>> {
        let producer = client.producer("ping")?;
        let mut consumer = client.consumer("pong")?;
        let payload = vec![0u8; self.size];
        let mut report = Report::default();
        wait_for_go()?;
        for _ in 0..self.count {
            let before = now_ns();
            producer.send(&payload)?;
            self.take(&mut consumer)?.ack()?;
            report.times_ns.push(now_ns() - before);
        }
        report.end_ns = now_ns();
        report.count = self.count;
        Ok(report)
    }

    fn pong(&self, client: &Client) -> Result<Report, Box<dyn std::error::Error>> {
        let producer = client.producer("pong")?;
        let mut consumer = client.consumer("ping")?;
        wait_for_go()?;
        for _ in 0..self.count {
            let message = self.take(&mut consumer)?;
            producer.send(message.payload())?;
            message.ack()?;
        }
        Ok(Report::default())
    }

    fn take(&self, consumer: &mut Consumer) -> ringmain::Result<Message> {
        if !self.spin {
            return consumer.recv();
        }
        loop {
            if let Some(message) = consumer.try_recv()? {
                return Ok(message);
            }
            std::hint::spin_loop();
        }
    }
}

/// Something for which every byte must be read.
fn sum_of(bytes: &[u8]) -> u64 {
    let words = bytes.chunks_exact(8).filter_map(|word| word.first_chunk());
    words.fold(0, |sum, word| sum.wrapping_add(u64::from_ne_bytes(*word)))
}

fn wait_for_go() -> std::io::Result<()> {
    println!("ready");
    std::io::stdin().read_line(&mut String::new())?;
    Ok(())
}

fn stop_on_second_line() -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let set = stop.clone();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_line(&mut String::new());
        set.store(true, Ordering::Relaxed);
    });
    stop
}

/// A process that was started, seen from outside.
pub struct Process {
    child: Child,
    out: BufReader<ChildStdout>,
}

impl Process {
    fn line(&mut self) -> std::io::Result<String> {
        let mut line = String::new();
        self.out.read_line(&mut line)?;
        if line.is_empty() {
            return Err(std::io::Error::other(
                "a process of the measurement has failed",
            ));
        }
        Ok(line)
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Gives the sign to begin, or the second time to stop.
    pub fn sign(&mut self) -> std::io::Result<()> {
        match &mut self.child.stdin {
            Some(input) => writeln!(input),
            None => Ok(()),
        }
    }

    /// Waits for its report.
    pub fn report(mut self) -> std::io::Result<Report> {
        let odd = || std::io::Error::other("a report that makes no sense");
        let head = self.line()?;
        let (end, count) = head.trim().split_once(' ').ok_or_else(odd)?;
        let times = self.line()?;
        let report = Report {
            end_ns: end.parse().map_err(|_| odd())?,
            count: count.parse().map_err(|_| odd())?,
            times_ns: times
                .split_whitespace()
                .filter_map(|time| time.parse().ok())
                .collect(),
        };
        self.child.wait()?;
        Ok(report)
    }
}
