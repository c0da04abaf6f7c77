//! Progress on a terminal: nothing in a pipe.

use super::units::show_count;
use indicatif::{ProgressBar, ProgressState, ProgressStyle};
use std::fmt::Write;
use std::time::Duration;

/// A bar up to `total`, or a count if that is not known. Drawn on standard
/// error, if that is a terminal.
pub(super) fn bar(total: Option<u64>, what: &'static str) -> ProgressBar {
    let (bar, template) = match total {
        Some(total) => (
            ProgressBar::new(total),
            "{bar:30} {human_pos}/{human_len} {prefix}, {rate}, {elapsed} {msg}",
        ),
        None => (
            ProgressBar::new_spinner(),
            "{spinner} {human_pos} {prefix}, {rate}, {elapsed} {msg}",
        ),
    };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.with_key("rate", show_rate));
    }
    bar.set_prefix(what);
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

/// A bar of work on messages: up to `total`, with the time that is left.
pub(super) fn bar_with_time_left(total: u64) -> ProgressBar {
    let bar = ProgressBar::new(total);
    let template = "{bar:30} {human_pos}/{human_len} messages, {rate}, {eta} left {msg}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.with_key("rate", show_rate));
    }
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

fn show_rate(state: &ProgressState, output: &mut dyn Write) {
    // It has nowhere to report an error to.
    let _ = write!(output, "{}/s", show_count(state.per_sec() as u64));
}
