//! The tally as people and programs read it.

use super::tally::Tally;
use crate::cli::output;
use crate::cli::units::{show_count, show_duration, show_size};
use serde::Serialize;
use std::time::Duration;

/// What the demo found.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// What was sent.
    source: String,
    sent: u64,
    delivered: u64,
    redelivered: u64,
    lost: u64,
    out_of_order: u64,
    duplicated: u64,
    damaged: u64,
    /// Sends that a producer was at when it was killed.
    in_doubt: u64,
    /// How many of those arrived.
    in_doubt_delivered: u64,
    kills: Vec<Kill>,
    seconds: f64,
    messages_per_second: f64,
    /// From just before the send to the taking; first deliveries.
    latency_us: Latency,
    peak_memory_bytes: PeakMemory,
}

/// A process that was killed.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Kill {
    pub(super) what: &'static str,
    pub(super) pid: u32,
    /// How many messages had been received then.
    pub(super) after_messages: u64,
    /// How long until its successor was started; of the broker, in service.
    pub(super) back_after_ms: u64,
}

impl Kill {
    pub(super) fn show(&self) -> String {
        format!(
            "killed {} {} with SIGKILL after {} messages; its successor was there {} ms later",
            self.what,
            self.pid,
            show_count(self.after_messages),
            self.back_after_ms
        )
    }
}

#[derive(Debug, Clone, Copy, Serialize)]
struct Latency {
    p50: f64,
    p99: f64,
    p999: f64,
    max: f64,
}

/// The most memory that one process of a kind had (VmHWM: shared memory that it
/// touched included).
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct PeakMemory {
    broker: u64,
    producer: u64,
    consumer: u64,
}

impl PeakMemory {
    pub(super) fn note_broker(&mut self, bytes: u64) {
        self.broker = self.broker.max(bytes);
    }

    pub(super) fn note_producer(&mut self, bytes: u64) {
        self.producer = self.producer.max(bytes);
    }

    pub(super) fn note_consumer(&mut self, bytes: u64) {
        self.consumer = self.consumer.max(bytes);
    }
}

impl Report {
    pub(super) fn new(
        source: String,
        tally: &Tally,
        took: Duration,
        kills: Vec<Kill>,
        peak_memory_bytes: PeakMemory,
    ) -> Report {
        let micros = |per_thousand| tally.latency_ns(per_thousand) as f64 / 1000.0;
        let arrived = tally.delivered + tally.in_doubt_delivered;
        Report {
            source,
            sent: tally.sent,
            delivered: tally.delivered,
            redelivered: tally.redelivered,
            lost: tally.lost,
            out_of_order: tally.out_of_order,
            duplicated: tally.duplicated,
            damaged: tally.damaged,
            in_doubt: tally.in_doubt,
            in_doubt_delivered: tally.in_doubt_delivered,
            kills,
            seconds: took.as_secs_f64(),
            messages_per_second: arrived as f64 / took.as_secs_f64(),
            latency_us: Latency {
                p50: micros(500),
                p99: micros(990),
                p999: micros(999),
                max: micros(1000),
            },
            peak_memory_bytes,
        }
    }

    /// How much went wrong.
    pub(super) fn faults(&self) -> u64 {
        self.lost + self.out_of_order + self.duplicated + self.damaged
    }

    pub(super) fn show(&self) -> String {
        let kills = self.kills.iter().map(Kill::show).collect::<Vec<_>>();
        let latency = self.latency_us;
        let micros = |micros: f64| show_duration(Duration::from_secs_f64(micros / 1e6));
        let memory = self.peak_memory_bytes;
        let rows = [
            ("input", self.source.clone()),
            ("sent", show_count(self.sent)),
            ("delivered", show_count(self.delivered)),
            (
                "redelivered",
                format!(
                    "{} (marked so: their holder died)",
                    show_count(self.redelivered)
                ),
            ),
            ("lost", show_count(self.lost)),
            ("out of order", show_count(self.out_of_order)),
            ("duplicated", show_count(self.duplicated)),
            ("damaged", show_count(self.damaged)),
            (
                "in doubt",
                format!(
                    "{} (send that a killed producer was at; arrived: {})",
                    self.in_doubt, self.in_doubt_delivered
                ),
            ),
            (
                "messages per second",
                format!(
                    "{} ({:.1} s in all)",
                    show_count(self.messages_per_second as u64),
                    self.seconds
                ),
            ),
            (
                "one-way latency",
                format!(
                    "p50 {}, p99 {}, p99.9 {}, max {}",
                    micros(latency.p50),
                    micros(latency.p99),
                    micros(latency.p999),
                    micros(latency.max)
                ),
            ),
            (
                "peak memory",
                format!(
                    "broker {}, a producer {}, a consumer {}",
                    show_size(memory.broker),
                    show_size(memory.producer),
                    show_size(memory.consumer)
                ),
            ),
        ];
        let verdict = match self.faults() {
            0 => "Nothing was lost, and nothing came out of order.",
            _ => "FAULTS: see above.",
        };
        let kills = if kills.is_empty() {
            String::new()
        } else {
            kills.join("\n") + "\n\n"
        };
        format!("{kills}{}\n\n{verdict}", output::pairs(&rows))
    }
}
