//! `ringmain stats`.

use super::Global;
use super::exit::Failure;
use super::interrupt::Interrupt;
use super::output::{self, Align};
use super::status::{HEADING, check_alive, condition, look, queue_row, rows};
use super::units::{self, show_count};
use ringmain_broker::board::{Condition, Look};
use std::time::Duration;

/// Show what the broker does, and what it has done since it was started
///
/// Reads the broker's status board in shared memory, and asks nobody: it answers
/// also when the broker is stuck or dead.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  ringmain stats
  ringmain stats --watch=5s
  ringmain stats --json | jq '.per_queue[] | {name, messages}'")]
pub(super) struct Args {
    /// Print them as JSON; with --watch, one object a line
    #[arg(long)]
    json: bool,
    /// Print a line again and again, until interrupted
    #[arg(
        long,
        value_name = "INTERVAL",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "1s",
        value_parser = units::duration,
    )]
    watch: Option<Duration>,
}

pub(super) fn run(global: &Global, args: &Args) -> Result<(), Failure> {
    if let Some(interval) = args.watch {
        return watch(global, args.json, interval.max(Duration::from_millis(100)));
    }
    let look = look(global)?;
    if args.json {
        output::json(&look)?;
    } else {
        output::line(&show(&look))?;
    }
    check_alive(&look)
}

/// All of it, as text.
pub(super) fn show(look: &Look) -> String {
    let mut text = output::pairs(&rows(look));
    let queues: Vec<_> = look.status.per_queue.iter().map(queue_row).collect();
    if !queues.is_empty() {
        text.push_str("\n\n");
        text.push_str(&output::table(&HEADING, &queues));
    }
    text
}

/// Lines between two headings.
const PAGE: usize = 20;

const COLUMNS: [(&str, Align); 8] = [
    ("MESSAGES", Align::Right),
    ("LEASED", Align::Right),
    ("SENDS/s", Align::Right),
    ("DELIVERIES/s", Align::Right),
    ("ACKS/s", Align::Right),
    ("STORED", Align::Right),
    ("SESSIONS", Align::Right),
    ("BROKER", Align::Left),
];

fn watch(global: &Global, json: bool, interval: Duration) -> Result<(), Failure> {
    let interrupt = Interrupt::catch()?;
    let mut lines = 0;
    loop {
        // A broker that is not there may come.
        match look(global) {
            Ok(look) if json => output::json_line(&look)?,
            Ok(look) => {
                output::line(&line_of(&look, lines % PAGE == 0))?;
                lines += 1;
            }
            Err(failure) if lines == 0 => return Err(failure),
            Err(failure) => output::line(failure.text())?,
        }
        if interrupt.wait(interval) {
            return interrupt.check();
        }
    }
}

fn line_of(look: &Look, with_heading: bool) -> String {
    let status = &look.status;
    let broker = match look.condition {
        Condition::Serving => "in service".to_owned(),
        _ => condition(look),
    };
    let cells = [
        status.stats.messages,
        status.stats.leased,
        status.sends_per_s,
        status.deliveries_per_s,
        status.acks_per_s,
        status.stats.stored,
        status.stats.sessions,
    ];
    // As wide as most numbers, so that the lines stand below each other.
    let mut row: Vec<String> = cells
        .iter()
        .map(|&cell| format!("{:>12}", show_count(cell)))
        .collect();
    row.push(broker);
    let table = output::table(&COLUMNS, &[row]);
    match table.split_once('\n') {
        Some((_, line)) if !with_heading => line.to_owned(),
        _ => table,
    }
}
