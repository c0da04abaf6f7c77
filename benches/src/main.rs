//! Measures Ringmain with real processes: a broker, producers and consumers,
//! each a process of its own, on whatever the machine has.
//!
//! `ringmain-bench all` prints every table; the other commands print one. Each
//! row is the median of several runs, with the range beside it. Nothing here
//! asserts a time: what is compared must be measured in one run.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program that prints"
)]

mod broker;
mod measure;
mod payloads;
mod roles;
mod stats;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(version, about = "Measure Ringmain with real processes")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Everything below, with the default numbers
    All,
    /// Messages per second from producers through the broker to consumers, each
    /// message acked
    Throughput(measure::Throughput),
    /// One way, at a steady rate
    Latency(measure::Latency),
    /// There and back over two queues, one message at a time
    RoundTrip(measure::RoundTrip),
    /// What a send costs that waits for its confirmation
    Confirm(measure::Confirm),
    /// Filling a queue that nobody reads, and draining it
    Backlog(measure::Backlog),
    /// Large payloads through loans, from process to process
    Payloads(payloads::Payloads),
    /// One very large message through a backlog and a restart of the broker
    Large(payloads::Large),
    /// One process of a measurement
    #[command(hide = true)]
    Role(roles::Role),
}

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn main() -> Outcome {
    match Cli::parse().command {
        Command::All => measure::all(),
        Command::Throughput(measure) => measure.run(),
        Command::Latency(measure) => measure.run(),
        Command::RoundTrip(measure) => measure.run(),
        Command::Confirm(measure) => measure.run(),
        Command::Backlog(measure) => measure.run(),
        Command::Payloads(measure) => measure.run(),
        Command::Large(measure) => measure.run(),
        Command::Role(role) => role.run(),
    }
}
