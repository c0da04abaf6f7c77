//! `ringmain stats`.

use super::Global;
use super::exit::Failure;
use super::output;
use super::units::{show_count, show_duration};
use ringmain::control::Stats;
use std::time::Duration;

/// Show what the broker has done since it was started
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  ringmain stats --json | jq .messages")]
pub(super) struct Args {
    /// Print them as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(global: &Global, args: &Args) -> Result<(), Failure> {
    let stats = global.connect()?.stats()?;
    if args.json {
        return output::json(&stats);
    }
    output::line(&show(&stats))
}

fn show(stats: &Stats) -> String {
    let disk = if stats.disk_full {
        "full: sends wait"
    } else {
        "has room"
    };
    output::pairs(&[
        ("up", show_duration(Duration::from_millis(stats.uptime_ms))),
        ("sessions", show_count(stats.sessions)),
        ("queues", show_count(stats.queues)),
        ("messages", show_count(stats.messages)),
        ("leased", show_count(stats.leased)),
        ("sends", show_count(stats.sends)),
        ("refused", show_count(stats.refused)),
        ("deliveries", show_count(stats.deliveries)),
        ("redeliveries", show_count(stats.redeliveries)),
        ("acks", show_count(stats.acks)),
        ("returned", show_count(stats.returned)),
        ("leases lost", show_count(stats.leases_lost)),
        ("stored", show_count(stats.stored)),
        ("dead", show_count(stats.dead)),
        ("round", show_count(stats.round)),
        ("synced round", show_count(stats.synced_round)),
        ("disk", disk.to_owned()),
    ])
}
