//! `ringmain queue`: make, show and delete queues.

use super::Global;
use super::exit::{FAILED, Failure, USAGE};
use super::output::{self, Align};
use super::units::{duration, show_count, show_duration, show_size, size};
use ringmain::control::{
    ATTEMPTS_MAX, QueueInfo, check_queue_name, check_settings, dead_letter_name,
};
use ringmain::{Confirm, QueueSettings};
use std::io::{self, BufRead, IsTerminal, Write};
use std::time::Duration;

/// Make, show and delete queues
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  ringmain queue create jobs --visibility-timeout 5m\n  ringmain queue list"
)]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Create(Create),
    List(List),
    Info(Info),
    Delete(Delete),
}

/// Make a queue
///
/// A queue that exists with the same settings is left as it is; with other
/// settings it is an error.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  ringmain queue create jobs --visibility-timeout 5m --confirm stored"
)]
struct Create {
    /// The queue's name: 1 to 200 bytes, without control characters
    name: String,
    /// How long a consumer may hold a message before it returns to the queue:
    /// 100ms to 7d [default: 30s]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    visibility_timeout: Option<Duration>,
    /// The longest payload that the queue takes, up to 1GiB [default: 64MiB]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    max_message_size: Option<u64>,
    /// After so many failed attempts a message goes to the dead-letter queue, up to
    /// 10000 [default: it is tried for ever]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=i64::from(ATTEMPTS_MAX)))]
    max_attempts: Option<u16>,
    /// Where dead messages go; made when it is needed [default: the queue's name
    /// with .dead behind it]
    #[arg(long, value_name = "QUEUE")]
    dead_letter_queue: Option<String>,
    /// What a send waits for
    #[arg(long, value_enum, default_value_t = Level::Accepted)]
    confirm: Level,
}

/// Show all queues
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  ringmain queue list --json | jq -r '.[].name'")]
struct List {
    /// Print them as JSON
    #[arg(long)]
    json: bool,
}

/// Show one queue
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  ringmain queue info jobs --json | jq .messages")]
struct Info {
    /// The queue's name
    name: String,
    /// Print it as JSON
    #[arg(long)]
    json: bool,
}

/// Delete a queue with all its messages
///
/// Asks first if it is called from a terminal.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  ringmain queue delete jobs --yes")]
struct Delete {
    /// The queue's name
    name: String,
    /// Do not ask
    #[arg(long, short)]
    yes: bool,
}

/// What a confirmation stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Level {
    /// Survives the death of any process
    Accepted,
    /// Written to the store, or settled
    Stored,
    /// Behind an fdatasync: survives a power cut
    Synced,
}

impl From<Level> for Confirm {
    fn from(level: Level) -> Confirm {
        match level {
            Level::Accepted => Confirm::Accepted,
            Level::Stored => Confirm::Stored,
            Level::Synced => Confirm::Synced,
        }
    }
}

pub(super) fn run(global: &Global, args: &Args) -> Result<(), Failure> {
    match &args.command {
        Command::Create(args) => create(global, args),
        Command::List(args) => list(global, args),
        Command::Info(args) => info(global, args),
        Command::Delete(args) => delete(global, args),
    }
}

fn create(global: &Global, args: &Create) -> Result<(), Failure> {
    check_queue_name(&args.name)?;
    let settings = settings(args)?;
    Ok(global.connect()?.create_queue(&args.name, &settings)?)
}

fn settings(args: &Create) -> Result<QueueSettings, Failure> {
    let mut settings = QueueSettings {
        confirm: args.confirm.into(),
        max_attempts: args.max_attempts.unwrap_or(0),
        dead_letter_queue: args.dead_letter_queue.clone(),
        ..QueueSettings::default()
    };
    if let Some(timeout) = args.visibility_timeout {
        settings.visibility_timeout_ms = timeout.as_millis() as u64;
    }
    if let Some(bytes) = args.max_message_size {
        settings.max_message_bytes = u32::try_from(bytes)
            .map_err(|_| Failure::new(USAGE, "the maximum message size can be at most 1 GiB"))?;
    }
    check_settings(&settings)?;
    Ok(settings)
}

fn list(global: &Global, args: &List) -> Result<(), Failure> {
    let queues = global.connect()?.queues()?;
    if args.json {
        return output::json(&queues);
    }
    output::line(&show_list(&queues))
}

fn show_list(queues: &[QueueInfo]) -> String {
    let heading = [
        ("NAME", Align::Left),
        ("MESSAGES", Align::Right),
        ("LEASED", Align::Right),
        ("PRODUCERS", Align::Right),
        ("CONSUMERS", Align::Right),
        ("VISIBILITY", Align::Right),
        ("MAX SIZE", Align::Right),
        ("CONFIRM", Align::Left),
    ];
    let rows: Vec<Vec<String>> = queues
        .iter()
        .map(|queue| {
            vec![
                queue.name.clone(),
                queue.messages.to_string(),
                queue.leased.to_string(),
                queue.producers.to_string(),
                queue.consumers.to_string(),
                show_timeout(&queue.settings),
                show_size(u64::from(queue.settings.max_message_bytes)),
                show_confirm(queue.settings.confirm).to_owned(),
            ]
        })
        .collect();
    output::table(&heading, &rows)
}

fn info(global: &Global, args: &Info) -> Result<(), Failure> {
    let queue = global.connect()?.queue(&args.name)?;
    if args.json {
        return output::json(&queue);
    }
    let age = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH + Duration::from_millis(queue.created_ms))
        .unwrap_or_default();
    output::line(&output::pairs(&[
        ("name", queue.name.clone()),
        ("created", format!("{} ago", show_duration(age))),
        ("messages", show_count(queue.messages)),
        ("leased", show_count(queue.leased)),
        ("producers", queue.producers.to_string()),
        ("consumers", queue.consumers.to_string()),
        ("visibility timeout", show_timeout(&queue.settings)),
        (
            "max message size",
            show_size(u64::from(queue.settings.max_message_bytes)),
        ),
        ("max attempts", show_attempts(&queue.settings)),
        (
            "dead-letter queue",
            dead_letter_name(&queue.name, &queue.settings),
        ),
        ("confirm", show_confirm(queue.settings.confirm).to_owned()),
    ]))
}

fn delete(global: &Global, args: &Delete) -> Result<(), Failure> {
    let client = global.connect()?;
    if !args.yes && io::stdin().is_terminal() {
        let messages = client.queue(&args.name)?.messages;
        if !ask(&args.name, messages)? {
            return Err(Failure::new(FAILED, "not deleted"));
        }
    }
    Ok(client.delete_queue(&args.name)?)
}

fn ask(name: &str, messages: u64) -> Result<bool, Failure> {
    let question = format!(
        "Delete the queue {name} with {} message(s)? [y/N] ",
        show_count(messages)
    );
    let mut stderr = io::stderr();
    let _ = stderr.write_all(question.as_bytes());
    let _ = stderr.flush();
    let mut answer = String::new();
    io::stdin()
        .lock()
        .read_line(&mut answer)
        .map_err(|e| Failure::io("cannot read the answer", &e))?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

fn show_timeout(settings: &QueueSettings) -> String {
    show_duration(Duration::from_millis(settings.visibility_timeout_ms))
}

fn show_attempts(settings: &QueueSettings) -> String {
    match settings.max_attempts {
        0 => "no limit".to_owned(),
        most => most.to_string(),
    }
}

fn show_confirm(confirm: Confirm) -> &'static str {
    match confirm {
        Confirm::Accepted => "accepted",
        Confirm::Stored => "stored",
        Confirm::Synced => "synced",
    }
}
