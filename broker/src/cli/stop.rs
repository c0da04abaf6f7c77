//! `ringmain stop`.

use super::Global;
use super::exit::{Failure, TIMED_OUT};
use super::units::duration;
use ringmain::Error;
use std::time::Duration;

/// Stop the broker
///
/// Returns when its process has ended, so that another broker can be started at
/// once. What it holds is stored and synced first, as with SIGTERM. Its clients
/// wait for the next broker, and go on with that.
///
/// With --drain, before an upgrade, it also ends all sessions and leaves nothing
/// in shared memory: a broker of any later version can come next. Clients are told
/// that they are closed, and exactly what was taken in. If the disk has no room
/// for all, nothing is ended.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  ringmain stop --drain --timeout 1m && ringmain serve")]
pub(super) struct Args {
    /// End all sessions, and leave nothing in shared memory
    #[arg(long)]
    drain: bool,
    /// How long to wait for its end. It goes on stopping after that
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "1m")]
    timeout: Duration,
}

pub(super) fn run(global: &Global, args: &Args) -> Result<(), Failure> {
    let broker = global.broker(args.timeout)?;
    let outcome = match args.drain {
        true => broker.drain_timeout(args.timeout),
        false => broker.stop_timeout(args.timeout),
    };
    match outcome {
        Err(Error::TimedOut) => Err(Failure::new(
            TIMED_OUT,
            "timed out: the broker goes on stopping; run this again to wait for it",
        )),
        outcome => Ok(outcome?),
    }
}
