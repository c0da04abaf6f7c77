//! `ringmain dlq`: what could not be processed.

use super::Global;
use super::exit::Failure;
use super::output::{self, Align};
use super::units::{show_count, show_duration, show_size};
use ringmain::Client;
use ringmain::control::{
    DEAD_LETTERS_MAX, DeadMessage, DeadReason, QueueInfo, check_queue_name, dead_letter_name,
};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Look at dead letters, and send them back
///
/// A message that was attempted as often as its queue allows, or that its
/// consumer rejected, is moved to the queue's dead-letter queue: an ordinary
/// queue, which can be received from as any other.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  ringmain dlq list jobs.dead\n  ringmain dlq redrive jobs.dead")]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    List(List),
    Redrive(Redrive),
}

/// Show the dead-letter queues, or the messages of one
///
/// The messages stay where they are. Oldest first.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  ringmain dlq list jobs.dead --limit 20\n  \
                  ringmain dlq list jobs.dead --json | jq -r '.[].death.reason'")]
struct List {
    /// The dead-letter queue; without it, all dead-letter queues are shown
    queue: Option<String>,
    /// Show so many messages at most
    #[arg(long, short = 'n', value_name = "N", default_value_t = 100, requires = "queue",
          value_parser = clap::value_parser!(u64).range(1..))]
    limit: u64,
    /// Print them as JSON
    #[arg(long)]
    json: bool,
}

/// Send dead messages back to the queues that they came from
///
/// Oldest first; their attempts begin anew. Messages that a consumer holds stay,
/// and so do those that come meanwhile.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  ringmain dlq redrive jobs.dead\n  \
                  ringmain dlq redrive jobs.dead --limit 1 --to jobs")]
struct Redrive {
    /// The dead-letter queue
    queue: String,
    /// Send them to this queue instead
    #[arg(long, value_name = "QUEUE")]
    to: Option<String>,
    /// Send back so many messages at most
    #[arg(long, short = 'n', value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
}

pub(super) fn run(global: &Global, args: &Args) -> Result<(), Failure> {
    match &args.command {
        Command::List(args) => match &args.queue {
            Some(queue) => list(global, args, queue),
            None => list_queues(global, args.json),
        },
        Command::Redrive(args) => redrive(global, args),
    }
}

/// A dead-letter queue.
#[derive(Debug, Serialize)]
struct DeadLetterQueue {
    name: String,
    messages: u64,
    /// The queues whose dead it takes.
    sources: Vec<String>,
}

fn list_queues(global: &Global, json: bool) -> Result<(), Failure> {
    let found = dead_letter_queues(&global.connect()?.queues()?);
    if json {
        return output::json(&found);
    }
    let heading = [
        ("NAME", Align::Left),
        ("MESSAGES", Align::Right),
        ("FROM", Align::Left),
    ];
    let rows: Vec<Vec<String>> = found
        .into_iter()
        .map(|queue| {
            vec![
                queue.name,
                queue.messages.to_string(),
                queue.sources.join(", "),
            ]
        })
        .collect();
    output::line(&output::table(&heading, &rows))
}

/// Those that exist.
fn dead_letter_queues(queues: &[QueueInfo]) -> Vec<DeadLetterQueue> {
    let mut sources: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for queue in queues {
        let target = dead_letter_name(&queue.name, &queue.settings);
        sources.entry(target).or_default().push(queue.name.clone());
    }
    let is_target = |queue: &&QueueInfo| sources.contains_key(&queue.name);
    queues
        .iter()
        .filter(is_target)
        .map(|queue| DeadLetterQueue {
            name: queue.name.clone(),
            messages: queue.messages,
            sources: sources[&queue.name].clone(),
        })
        .collect()
}

fn list(global: &Global, args: &List, queue: &str) -> Result<(), Failure> {
    let messages = fetch(&global.connect()?, queue, args.limit)?;
    if args.json {
        return output::json(&messages);
    }
    let heading = [
        ("MESSAGE", Align::Left),
        ("SIZE", Align::Right),
        ("REASON", Align::Left),
        ("FROM", Align::Left),
        ("ATTEMPTS", Align::Right),
        ("SENT", Align::Right),
        ("DIED", Align::Right),
    ];
    let rows: Vec<Vec<String>> = messages.iter().map(row).collect();
    output::line(&output::table(&heading, &rows))
}

fn fetch(client: &Client, queue: &str, limit: u64) -> Result<Vec<DeadMessage>, Failure> {
    let mut messages: Vec<DeadMessage> = Vec::new();
    loop {
        let from = messages.last().map_or(0, |last| last.position + 1);
        let lot = (limit - messages.len() as u64).min(u64::from(DEAD_LETTERS_MAX)) as u32;
        let more = client.dead_letters(queue, from, lot)?;
        let is_last = more.len() < lot as usize;
        messages.extend(more);
        if is_last || messages.len() as u64 == limit {
            return Ok(messages);
        }
    }
}

fn row(message: &DeadMessage) -> Vec<String> {
    let mut row = vec![message.id.to_string(), show_size(message.bytes)];
    let sent = ago(message.sent_at_ms);
    match &message.death {
        Some(death) => {
            let reason = match death.reason {
                DeadReason::MaxAttempts => "too many attempts",
                DeadReason::Rejected => "rejected",
            };
            row.extend([
                reason.to_owned(),
                death.source.clone(),
                death.attempts.to_string(),
                sent,
                ago(death.died_at_ms),
            ]);
        }
        None => {
            let none = || "-".to_owned();
            row.extend([none(), none(), none(), sent, none()]);
        }
    }
    row
}

fn ago(at_ms: u64) -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH + Duration::from_millis(at_ms));
    format!("{} ago", show_duration(since.unwrap_or_default()))
}

fn redrive(global: &Global, args: &Redrive) -> Result<(), Failure> {
    check_queue_name(&args.queue)?;
    let client = global.connect()?;
    let moved = client.redrive(&args.queue, args.to.as_deref(), args.limit)?;
    output::line(&format!("{} message(s) sent back", show_count(moved)))
}
