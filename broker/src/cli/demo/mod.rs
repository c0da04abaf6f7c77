//! `ringmain demo`: processes of every kind, killed and started again, and a
//! count of what came of it.
//!
//! ```text
//!               +- broker (serve)
//!   supervisor -+- producers      each writes what it sent to its board,
//!               +- consumers      and what it received to a file
//! ```
//!
//! The account is kept outside of the broker, in files that outlive the kill of
//! their writer. At the end the supervisor reads it, and compares.

mod board;
mod input;
mod message;
mod process;
mod report;
mod roles;
mod supervisor;
mod tally;

use super::exit::{FAILED, Failure};
use super::interrupt::Interrupt;
use super::output;
use std::path::PathBuf;
use std::time::Duration;

pub(super) use roles::{RoleArgs, run as run_role};

/// See it all at work: producers, consumers, kills, and a tally
///
/// Starts a private broker in temporary folders, sends real lines through it
/// from several processes to several others, kills a consumer, a producer and
/// the broker on the way, starts them again, and counts what arrived. The
/// folders are removed at the end.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  ringmain demo
  ringmain demo --input /var/log/syslog --messages 100000 --json

The exit code is 1 if any message was lost, came in disorder, came twice without
saying so, or was damaged.

The one send that a killed producer was at is in doubt: it may have arrived or
not. Everything it had sent before must arrive.")]
pub(super) struct Args {
    /// Send the lines of this file [default: the names of files under /usr]
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,
    /// How many messages to send; the input is repeated
    #[arg(long, value_name = "N", default_value_t = 1_000_000,
          value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    messages: u64,
    /// How many producer processes
    #[arg(long, value_name = "N", default_value_t = 3,
          value_parser = clap::value_parser!(u32).range(1..=100))]
    producers: u32,
    /// How many consumer processes
    #[arg(long, value_name = "N", default_value_t = 4,
          value_parser = clap::value_parser!(u32).range(1..=100))]
    consumers: u32,
    /// How many queues
    #[arg(long, value_name = "N", default_value_t = 2,
          value_parser = clap::value_parser!(u32).range(1..=100))]
    queues: u32,
    /// Kill nobody
    #[arg(long)]
    no_kills: bool,
    /// Folder for shared memory, on a tmpfs
    #[arg(long, value_name = "PATH", default_value = "/dev/shm")]
    shm_dir: PathBuf,
    /// Give up when nothing arrives for so long
    #[arg(long, value_name = "DURATION", value_parser = super::units::duration, default_value = "30s")]
    patience: Duration,
    /// Print the tally as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    if args.consumers < args.queues {
        return Err(Failure::new(
            super::exit::USAGE,
            "--consumers must be at least --queues, so that each queue has one",
        ));
    }
    let interrupt = Interrupt::catch()?;
    let report = supervisor::run(args, &interrupt)?;
    if args.json {
        output::json(&report)?;
    } else {
        output::line(&report.show())?;
    }
    match report.faults() {
        0 => Ok(()),
        faults => Err(Failure::new(
            FAILED,
            format!("{faults} fault(s): see the tally"),
        )),
    }
}
