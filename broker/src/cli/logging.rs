//! The broker's log: standard error, as text or JSON.

use super::exit::{Failure, USAGE};
use std::io;
use tracing_subscriber::EnvFilter;

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Format {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Sends what the program logs to standard error, from `level` on.
pub(super) fn start(format: Format, level: &str) -> Result<(), Failure> {
    let filter = EnvFilter::try_new(level)
        .map_err(|e| Failure::new(USAGE, format!("invalid --log-level: {e}")))?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr);
    let outcome = match format {
        Format::Text => builder.with_ansi(false).try_init(),
        Format::Json => builder.json().flatten_event(true).try_init(),
    };
    outcome.map_err(|e| Failure::new(super::exit::FAILED, format!("cannot start the log: {e}")))
}
