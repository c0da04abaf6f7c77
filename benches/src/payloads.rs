//! Large payloads: time and memory.

use crate::Outcome;
use crate::broker::Broker;
use crate::measure::{broker_with_queue, role, stop_when_empty};
use crate::roles::{Kind, Role};
use crate::stats::{memory_mib, now_ns, spread};
use clap::Args;
use ringmain::Confirm;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// See `ringmain-bench payloads --help`.
#[derive(Debug, Args)]
pub struct Payloads {
    /// Bytes of a message
    #[arg(long, default_value_t = 1 << 20)]
    size: usize,
    /// Messages of a run
    #[arg(long, default_value_t = 10_000)]
    messages: u64,
    /// Runs of each case
    #[arg(long, default_value_t = 3)]
    runs: usize,
}

impl Default for Payloads {
    fn default() -> Payloads {
        Payloads {
            size: 1 << 20,
            messages: 10_000,
            runs: 3,
        }
    }
}

impl Payloads {
    /// Measures and prints.
    pub fn run(&self) -> Outcome {
        println!(
            "\nPayloads: {} x {} B through loans, one process to another, every message acked; \
             median (range)",
            self.messages, self.size
        );
        println!(
            "| payloads | seconds | GB/s | shared memory at most MiB | broker at most MiB | stored % |"
        );
        println!("| --- | --- | --- | --- | --- | --- |");
        for (name, touch) in [("untouched", false), ("copied in and read", true)] {
            let (mut seconds, mut rates) = (vec![], vec![]);
            let (mut shm, mut resident, mut stored) = (vec![], vec![], vec![]);
            for _ in 0..self.runs {
                let run = self.once(touch)?;
                seconds.push(run.seconds);
                rates.push((self.messages * self.size as u64) as f64 / run.seconds / 1e9);
                shm.push(run.shm_bytes as f64 / f64::from(1 << 20));
                resident.push(run.broker_mib as f64);
                stored.push(run.stored as f64 * 100.0 / self.messages as f64);
            }
            let row = [
                spread(seconds, 2),
                spread(rates, 1),
                spread(shm, 0),
                spread(resident, 0),
                spread(stored, 1),
            ];
            println!("| {name} | {} |", row.join(" | "));
        }
        Ok(())
    }

    fn once(&self, touch: bool) -> Result<Run, Box<dyn std::error::Error>> {
        let broker = broker_with_queue(self.size)?;
        let mut sender = Role {
            count: self.messages,
            size: self.size,
            loan: true,
            touch,
            ..role(&broker, Kind::Produce)
        }
        .start()?;
        let receiver = Role {
            touch,
            ..role(&broker, Kind::Consume)
        };
        let mut receivers = [receiver.start()?];
        let start = now_ns();
        for process in receivers.iter_mut().chain([&mut sender]) {
            process.sign()?;
        }
        let (done, most) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    most.fetch_max(broker.shm_bytes(), Ordering::Relaxed);
                    std::thread::sleep(Duration::from_millis(20));
                }
            });
            let sent = sender.report();
            done.store(true, Ordering::Relaxed);
            sent
        })?;
        stop_when_empty(&broker, &mut receivers)?;
        let [receiver] = receivers;
        let report = receiver.report()?;
        if report.count < self.messages {
            return Err(format!("{} messages came", report.count).into());
        }
        Ok(Run {
            seconds: (report.end_ns - start) as f64 / 1e9,
            shm_bytes: most.into_inner(),
            broker_mib: memory_mib(broker.pid(), "VmHWM:"),
            stored: broker.client()?.stats()?.stored,
        })
    }
}

struct Run {
    seconds: f64,
    shm_bytes: u64,
    broker_mib: u64,
    stored: u64,
}

/// See `ringmain-bench large --help`.
#[derive(Debug, Args)]
pub struct Large {
    /// Bytes of the message
    #[arg(long, value_delimiter = ',', default_values_t = [100 << 20, 1 << 30])]
    size: Vec<usize>,
}

impl Default for Large {
    fn default() -> Large {
        Large {
            size: vec![100 << 20, 1 << 30],
        }
    }
}

impl Large {
    /// Measures and prints.
    pub fn run(&self) -> Outcome {
        println!("\nOne large message: stored, the broker killed and restarted, received, checked");
        println!(
            "| MiB | write the loan s | send, stored s | restart s | receive s | broker at most MiB, \
             before and after | disk MiB, with and after |"
        );
        println!("| --- | --- | --- | --- | --- | --- | --- |");
        for &size in &self.size {
            Self::case(size)?;
        }
        Ok(())
    }

    fn case(size: usize) -> Outcome {
        let mut broker = broker_with_queue(size)?;
        let producer = broker.client()?.producer("bench")?;
        let start = Instant::now();
        let mut loan = producer.loan(size)?;
        for (at, word) in loan.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&pattern(at));
        }
        let written = start.elapsed();
        let start = Instant::now();
        loan.send()?;
        producer.flush(Confirm::Stored)?;
        let stored = start.elapsed();
        drop(producer);
        let before = memory_mib(broker.pid(), "VmHWM:");
        let disk = broker.disk_bytes() >> 20;
        let restarted = broker.kill_and_restart()?;
        let mut consumer = broker.client()?.consumer("bench")?;
        let start = Instant::now();
        let message = consumer.recv()?;
        let received = start.elapsed();
        let words = message.payload().chunks_exact(8).enumerate();
        let wrong = words.filter(|(at, word)| **word != pattern(*at)).count();
        if wrong > 0 || message.payload().len() != size {
            return Err(format!("the message of {size} bytes is not what was sent").into());
        }
        message.ack()?;
        consumer.flush(Confirm::Stored)?;
        let after = memory_mib(broker.pid(), "VmHWM:");
        println!(
            "| {} | {:.2} | {:.2} | {:.2} | {:.2} | {before}, {after} | {disk}, {} |",
            size >> 20,
            written.as_secs_f64(),
            stored.as_secs_f64(),
            restarted.as_secs_f64(),
            received.as_secs_f64(),
            Self::settled_disk(&broker) >> 20,
        );
        Ok(())
    }

    /// What the data folder takes once the store has cleared up, or ten seconds
    /// later.
    fn settled_disk(broker: &Broker) -> u64 {
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut least = broker.disk_bytes();
        while Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(200));
            least = least.min(broker.disk_bytes());
        }
        least
    }
}

/// What the message has at this word.
fn pattern(at: usize) -> [u8; 8] {
    (at as u64)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .to_ne_bytes()
}
