//! The measurements: each starts a broker and processes, runs them several
//! times, and prints one row for each case.

use crate::Outcome;
use crate::broker::Broker;
use crate::roles::{Kind, Process, Role};
use crate::stats::{cpu_seconds, memory_mib, now_ns, spread, tail_us};
use clap::Args;
use ringmain::QueueSettings;

/// All tables with the default numbers.
pub fn all() -> Outcome {
    Throughput::default().run()?;
    Latency::default().run()?;
    RoundTrip::default().run()?;
    Confirm::default().run()?;
    Backlog::default().run()?;
    crate::payloads::Payloads::default().run()?;
    crate::payloads::Large::default().run()
}

pub fn role(broker: &Broker, kind: Kind) -> Role {
    Role {
        kind,
        socket: broker.socket(),
        queue: "bench".to_owned(),
        count: 0,
        size: 64,
        batch: 1,
        rate: 0,
        spin: false,
        confirm: "accepted".to_owned(),
        times: false,
        loan: false,
        touch: false,
    }
}

pub fn broker_with_queue(size: usize) -> Result<Broker, Box<dyn std::error::Error>> {
    let broker = Broker::start()?;
    let mut settings = QueueSettings::default();
    settings.max_message_bytes = settings.max_message_bytes.max(size as u32);
    for queue in ["bench", "ping", "pong"] {
        broker.client()?.create_queue(queue, &settings)?;
    }
    Ok(broker)
}

/// Waits until a queue holds nothing, then has its consumers stop.
pub fn stop_when_empty(broker: &Broker, consumers: &mut [Process]) -> Outcome {
    let client = broker.client()?;
    while client.queue("bench")?.messages > 0 {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    for consumer in consumers {
        consumer.sign()?;
    }
    Ok(())
}

/// See `ringmain-bench throughput --help`.
#[derive(Debug, Args)]
pub struct Throughput {
    /// Bytes of a message
    #[arg(long, value_delimiter = ',', default_value = "64,256,1024")]
    size: Vec<usize>,
    /// Producers x consumers
    #[arg(long, value_delimiter = ',', default_value = "1x1,4x4")]
    shape: Vec<String>,
    /// Messages a call, on both sides
    #[arg(long, value_delimiter = ',', default_value = "1,32")]
    batch: Vec<usize>,
    /// Messages of a run
    #[arg(long, default_value_t = 2_000_000)]
    messages: u64,
    /// Runs of each case
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Consumers never sleep
    #[arg(long)]
    spin: bool,
}

impl Default for Throughput {
    fn default() -> Throughput {
        Throughput {
            size: vec![64, 256, 1024],
            shape: vec!["1x1".to_owned(), "4x4".to_owned()],
            batch: vec![1, 32],
            messages: 2_000_000,
            runs: 3,
            spin: false,
        }
    }
}

impl Throughput {
    /// Measures and prints.
    pub fn run(&self) -> Outcome {
        println!("\nThroughput: accepted sends, every message acked; M messages/s, median (range)");
        println!(
            "| size | producers x consumers | batch | M/s | broker CPU ns a message | stored % | least share % |"
        );
        println!("| --- | --- | --- | --- | --- | --- | --- |");
        for &size in &self.size {
            for shape in &self.shape {
                for &batch in &self.batch {
                    self.case(size, shape, batch)?;
                }
            }
        }
        Ok(())
    }

    fn case(&self, size: usize, shape: &str, batch: usize) -> Outcome {
        let (producers, consumers) = shape.split_once('x').ok_or("a shape is like 1x1")?;
        let (producers, consumers) = (producers.parse()?, consumers.parse()?);
        let (mut rates, mut cpu, mut stored, mut shares) = (vec![], vec![], vec![], vec![]);
        for _ in 0..self.runs {
            let run = self.once(size, producers, consumers, batch)?;
            rates.push(run.rate / 1e6);
            cpu.push(run.broker_cpu_ns);
            stored.push(run.stored_percent);
            shares.push(run.least_share_percent);
        }
        let row = [
            spread(rates, 2),
            spread(cpu, 0),
            spread(stored, 1),
            spread(shares, 0),
        ];
        println!("| {size} B | {shape} | {batch} | {} |", row.join(" | "));
        Ok(())
    }

    fn once(
        &self,
        size: usize,
        producers: u64,
        consumers: u64,
        batch: usize,
    ) -> Result<Run, Box<dyn std::error::Error>> {
        let broker = broker_with_queue(size)?;
        let mut senders = Vec::new();
        let mut receivers = Vec::new();
        for _ in 0..producers {
            let count = self.messages / producers;
            senders.push(
                Role {
                    count,
                    size,
                    batch,
                    ..role(&broker, Kind::Produce)
                }
                .start()?,
            );
        }
        for _ in 0..consumers {
            let spin = self.spin;
            receivers.push(
                Role {
                    batch,
                    spin,
                    ..role(&broker, Kind::Consume)
                }
                .start()?,
            );
        }
        let cpu = cpu_seconds(broker.pid());
        let start = now_ns();
        for process in receivers.iter_mut().chain(&mut senders) {
            process.sign()?;
        }
        for sender in senders {
            sender.report()?;
        }
        stop_when_empty(&broker, &mut receivers)?;
        let cpu = cpu_seconds(broker.pid()) - cpu;
        let mut end = start;
        let mut counts = Vec::new();
        for receiver in receivers {
            let report = receiver.report()?;
            end = end.max(report.end_ns);
            counts.push(report.count);
        }
        let total: u64 = counts.iter().sum();
        let least = counts.into_iter().min().unwrap_or(0);
        let stats = broker.client()?.stats()?;
        Ok(Run {
            rate: total as f64 / (end - start) as f64 * 1e9,
            broker_cpu_ns: cpu * 1e9 / total as f64,
            stored_percent: stats.stored as f64 * 100.0 / total as f64,
            least_share_percent: least as f64 * consumers as f64 * 100.0 / total as f64,
        })
    }
}

struct Run {
    rate: f64,
    broker_cpu_ns: f64,
    stored_percent: f64,
    least_share_percent: f64,
}

/// See `ringmain-bench latency --help`.
#[derive(Debug, Args)]
pub struct Latency {
    /// Messages a second
    #[arg(long, value_delimiter = ',', default_value = "1000,20000,100000")]
    rate: Vec<u64>,
    /// Bytes of a message
    #[arg(long, default_value_t = 64)]
    size: usize,
    /// Seconds of a run
    #[arg(long, default_value_t = 3)]
    seconds: u64,
}

impl Default for Latency {
    fn default() -> Latency {
        Latency {
            rate: vec![1000, 20_000, 100_000],
            size: 64,
            seconds: 3,
        }
    }
}

impl Latency {
    /// Measures and prints.
    pub fn run(&self) -> Outcome {
        println!("\nOne way at a steady rate, {} B; us", self.size);
        println!(
            "| messages/s | consumer | p50 / p99 / p99.9 | CPU of broker, producer, consumer % |"
        );
        println!("| --- | --- | --- | --- |");
        for &rate in &self.rate {
            for spin in [false, true] {
                self.case(rate, spin)?;
            }
        }
        Ok(())
    }

    fn case(&self, rate: u64, spin: bool) -> Outcome {
        let broker = broker_with_queue(self.size)?;
        let (size, count) = (self.size, rate * self.seconds);
        let mut sender = Role {
            count,
            size,
            rate,
            ..role(&broker, Kind::Produce)
        }
        .start()?;
        let mut receiver = Role {
            spin,
            times: true,
            ..role(&broker, Kind::Consume)
        }
        .start()?;
        let pids = [broker.pid(), sender.pid(), receiver.pid()];
        let (cpu, start) = (pids.map(cpu_seconds), now_ns());
        receiver.sign()?;
        sender.sign()?;
        let producer_cpu = sender.pid();
        std::thread::sleep(std::time::Duration::from_secs(self.seconds).mul_f64(0.9));
        let seconds = (now_ns() - start) as f64 / 1e9;
        let used = [broker.pid(), producer_cpu, receiver.pid()].map(cpu_seconds);
        sender.report()?;
        stop_when_empty(&broker, std::slice::from_mut(&mut receiver))?;
        let times = receiver.report()?.times_ns;
        let cpu: Vec<String> = used
            .iter()
            .zip(cpu)
            .map(|(after, before)| format!("{:.0}", (after - before) / seconds * 100.0))
            .collect();
        let waits = if spin { "spinning" } else { "blocking" };
        println!(
            "| {rate} | {waits} | {} | {} |",
            tail_us(times),
            cpu.join(", ")
        );
        Ok(())
    }
}

/// See `ringmain-bench round-trip --help`.
#[derive(Debug, Args)]
pub struct RoundTrip {
    /// Bytes of a message
    #[arg(long, value_delimiter = ',', default_value = "64,1024")]
    size: Vec<usize>,
    /// Round trips; a fiftieth of it where the processes spin
    #[arg(long, default_value_t = 50_000)]
    count: u64,
}

impl Default for RoundTrip {
    fn default() -> RoundTrip {
        RoundTrip {
            size: vec![64, 1024],
            count: 50_000,
        }
    }
}

impl RoundTrip {
    /// Measures and prints.
    pub fn run(&self) -> Outcome {
        println!("\nThere and back, two queues, two processes and the broker; us");
        println!("| size | waiting | p50 / p99 / p99.9 |");
        println!("| --- | --- | --- |");
        for &size in &self.size {
            for spin in [false, true] {
                let broker = broker_with_queue(size)?;
                // Two spinning processes and the broker on two cores take turns by
                // the scheduler's clock: milliseconds a round trip.
                let count = if spin { self.count / 50 } else { self.count };
                let mut ping = Role {
                    count,
                    size,
                    spin,
                    ..role(&broker, Kind::Ping)
                }
                .start()?;
                let mut pong = Role {
                    count,
                    size,
                    spin,
                    ..role(&broker, Kind::Pong)
                }
                .start()?;
                pong.sign()?;
                ping.sign()?;
                let times = ping.report()?.times_ns;
                pong.report()?;
                let waits = if spin { "spinning" } else { "blocking" };
                println!("| {size} B | {waits} | {} |", tail_us(times));
            }
        }
        Ok(())
    }
}

/// See `ringmain-bench confirm --help`.
#[derive(Debug, Args)]
pub struct Confirm {
    /// Bytes of a message
    #[arg(long, default_value_t = 256)]
    size: usize,
    /// Calls of a run
    #[arg(long, default_value_t = 3_000)]
    calls: u64,
}

impl Default for Confirm {
    fn default() -> Confirm {
        Confirm {
            size: 256,
            calls: 3_000,
        }
    }
}

impl Confirm {
    /// Measures and prints.
    pub fn run(&self) -> Outcome {
        println!(
            "\nConfirmed sends, {} B, nobody receives; us a call",
            self.size
        );
        println!("| confirm | messages a call | p50 / p99 / p99.9 | messages/s |");
        println!("| --- | --- | --- | --- |");
        for confirm in ["accepted", "stored", "synced"] {
            for batch in [1, 100, 1000] {
                let broker = broker_with_queue(self.size)?;
                let count = self.calls.min(300_000 / batch as u64) * batch as u64;
                let mut sender = Role {
                    count,
                    batch,
                    size: self.size,
                    confirm: confirm.to_owned(),
                    times: true,
                    ..role(&broker, Kind::Produce)
                }
                .start()?;
                let start = now_ns();
                sender.sign()?;
                let report = sender.report()?;
                let rate = report.count as f64 / (report.end_ns - start) as f64 * 1e9;
                println!(
                    "| {confirm} | {batch} | {} | {rate:.0} |",
                    tail_us(report.times_ns)
                );
            }
        }
        Ok(())
    }
}

/// See `ringmain-bench backlog --help`.
#[derive(Debug, Args)]
pub struct Backlog {
    /// Bytes of a message
    #[arg(long, default_value_t = 256)]
    size: usize,
    /// Messages
    #[arg(long, default_value_t = 2_000_000)]
    messages: u64,
}

impl Default for Backlog {
    fn default() -> Backlog {
        Backlog {
            size: 256,
            messages: 2_000_000,
        }
    }
}

impl Backlog {
    /// Measures and prints.
    pub fn run(&self) -> Outcome {
        println!("\nBacklog of {} messages of {} B", self.messages, self.size);
        println!("| what | M messages/s | broker's memory MiB |");
        println!("| --- | --- | --- |");
        let broker = broker_with_queue(self.size)?;
        let produce = role(&broker, Kind::Produce);
        let confirm = "stored".to_owned();
        let mut sender = Role {
            count: self.messages,
            size: self.size,
            batch: 256,
            confirm,
            ..produce
        }
        .start()?;
        let start = now_ns();
        sender.sign()?;
        let report = sender.report()?;
        let rate = |count: u64, ns: u64| count as f64 / ns as f64 * 1e3;
        let filled = rate(report.count, report.end_ns - start);
        println!(
            "| fill, stored, 256 a flush | {filled:.2} | {} |",
            memory_mib(broker.pid(), "VmRSS:")
        );
        let consume = role(&broker, Kind::Consume);
        let mut receiver = Role {
            count: self.messages,
            batch: 32,
            ..consume
        }
        .start()?;
        let start = now_ns();
        receiver.sign()?;
        let report = receiver.report()?;
        println!(
            "| drain, batches of 32 | {:.2} | {} |",
            rate(report.count, report.end_ns - start),
            memory_mib(broker.pid(), "VmRSS:")
        );
        let mut before = start;
        for (tenth, &at) in report.times_ns.iter().enumerate() {
            println!(
                "| drain, tenth {} | {:.2} | |",
                tenth + 1,
                rate(self.messages / 10, at - before)
            );
            before = at;
        }
        Ok(())
    }
}
