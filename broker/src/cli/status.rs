//! The status board as `stats` and `top` show it.

use super::Global;
use super::exit::{Failure, NOT_RUNNING};
use super::output::Align;
use super::units::{show_count, show_duration, show_size};
use ringmain::paths;
use ringmain_broker::board::{self, BoardError, Condition, Look};
use ringmain_broker::hub::QueueStatus;
use std::time::Duration;

/// Looks at the board. Whoever gets no look is told whether there is a broker.
pub(super) fn look(global: &Global) -> Result<Look, Failure> {
    let socket = global.socket();
    if global.socket.is_none() {
        paths::check_socket_folder(&socket)?;
    }
    match board::look(&socket) {
        Ok(look) => Ok(look),
        Err(BoardError::Missing(_)) => {
            global.connect()?;
            Err(Failure::new(
                super::exit::FAILED,
                "the broker keeps no status board: its log says why",
            ))
        }
        Err(error) => Err(Failure::new(super::exit::FAILED, error.to_string())),
    }
}

/// An error if the broker is dead: what is shown is its last.
pub(super) fn check_alive(look: &Look) -> Result<(), Failure> {
    match look.condition {
        Condition::Dead => Err(Failure::new(
            NOT_RUNNING,
            format!(
                "the broker (process {}) has died: these are its last figures, of {} ago",
                look.status.pid,
                age(look)
            ),
        )),
        _ => Ok(()),
    }
}

fn age(look: &Look) -> String {
    show_duration(Duration::from_millis(look.age_ms))
}

/// How the broker is, for people.
pub(super) fn condition(look: &Look) -> String {
    match look.condition {
        Condition::Serving => "in service".to_owned(),
        Condition::Draining => "being drained".to_owned(),
        Condition::Stuck => format!("STUCK: not heard of for {}", age(look)),
        Condition::Dead => format!("DEAD: last heard of {} ago", age(look)),
    }
}

/// Names and values of all that is not about one queue.
pub(super) fn rows(look: &Look) -> Vec<(&'static str, String)> {
    let status = &look.status;
    let stats = &status.stats;
    let disk = if stats.disk_full {
        "full: sends wait"
    } else {
        "has room"
    };
    vec![
        (
            "broker",
            format!("process {}, {}", status.pid, condition(look)),
        ),
        ("up", show_duration(Duration::from_millis(stats.uptime_ms))),
        ("sessions", show_count(stats.sessions)),
        ("queues", show_count(stats.queues)),
        ("messages", show_count(stats.messages)),
        ("leased", show_count(stats.leased)),
        ("sends", with_rate(stats.sends, status.sends_per_s)),
        ("refused", show_count(stats.refused)),
        (
            "deliveries",
            with_rate(stats.deliveries, status.deliveries_per_s),
        ),
        ("redeliveries", show_count(stats.redeliveries)),
        ("acks", with_rate(stats.acks, status.acks_per_s)),
        ("returned", show_count(stats.returned)),
        ("leases lost", show_count(stats.leases_lost)),
        ("stored", show_count(stats.stored)),
        ("dead", show_count(stats.dead)),
        ("round", show_count(stats.round)),
        ("synced round", show_count(stats.synced_round)),
        ("memory", show_size(status.cached_bytes)),
        ("payload memory", show_size(status.payload_bytes)),
        ("disk", disk.to_owned()),
    ]
}

fn with_rate(count: u64, per_s: u64) -> String {
    format!("{} ({}/s)", show_count(count), show_count(per_s))
}

/// The heading of the table of queues.
pub(super) const HEADING: [(&str, Align); 9] = [
    ("QUEUE", Align::Left),
    ("MESSAGES", Align::Right),
    ("LEASED", Align::Right),
    ("SENDS/s", Align::Right),
    ("ACKS/s", Align::Right),
    ("OLDEST", Align::Right),
    ("ON DISK", Align::Right),
    ("MEMORY", Align::Right),
    ("PROD/CONS", Align::Right),
];

/// A row of that table.
pub(super) fn queue_row(queue: &QueueStatus) -> Vec<String> {
    vec![
        queue.name.clone(),
        show_count(queue.messages),
        show_count(queue.leased),
        show_count(queue.sends_per_s),
        show_count(queue.acks_per_s),
        queue.oldest_ms.map_or_else(
            || "-".to_owned(),
            |ms| show_duration(Duration::from_millis(ms)),
        ),
        show_count(queue.on_disk),
        show_size(queue.memory_bytes),
        format!("{}/{}", queue.producers, queue.consumers),
    ]
}
