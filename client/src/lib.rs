//! Client library of Ringmain, a durable message broker for the processes of one
//! Linux machine.
//!
//! ```no_run
//! # fn main() -> ringmain::Result<()> {
//! let client = ringmain::Client::connect()?;
//! client.create_queue("jobs", &ringmain::QueueSettings::default())?;
//! client.producer("jobs")?.send("hello")?;
//! let mut consumer = client.consumer("jobs")?;
//! let message = consumer.recv()?;
//! println!("{}", String::from_utf8_lossy(message.payload()));
//! message.ack()?;
//! # Ok(())
//! # }
//! ```
//!
//! # Types
//!
//! - [`Client`]: a broker. Makes the others, and administers queues.
//! - [`Producer`]: sends to one queue.
//! - [`Consumer`]: receives from one queue.
//! - [`Message`]: a received message, and the lease on it. Acked, or it comes
//!   again.
//! - [`Error`]: what can go wrong, one set for all calls.
//!
//! [`control`], [`record`], [`wire`] and [`paths`] are what the client shares
//! with the broker; programs do not need them.
//!
//! # Promises
//!
//! A send, ack or nack that returned `Ok` is *accepted*: it lies in shared
//! memory, and no death of any process, the broker included, loses it. What more
//! it is, is the caller's choice, by queue, by producer, or by `flush`: see
//! [`Confirm`]. A message is delivered until it is acked, so it may be delivered
//! more than once: see [`Message::redelivered`].
//!
//! Sends, receives and answers make no system call while both sides are awake,
//! and need no broker to be there: a client takes its session up again by itself
//! when the broker was restarted. Calls that wait do so until their time is over.
//!
//! # Threads and forks
//!
//! [`Client`] and [`Producer`] are for any number of threads at once. A
//! [`Consumer`] is used by one at a time; a [`Message`] may be answered from any
//! thread. After `fork`, all handles made before fail with [`Error::Forked`] in
//! the child, where they may be dropped: connect again. The parent's go on. (A
//! child made by the bare `clone` system call can't be told from its parent, and
//! must leave the handles alone.)
//!
//! # What this does not do
//!
//! No threads of its own, no signal handlers, no `async`. Nothing is printed,
//! and no error is a panic. No machine but this one.

mod admin;
mod answers;
mod broker;
mod client;
mod clock;
mod connection;
mod consumer;
pub mod control;
mod error;
mod fork;
mod link;
mod loan;
mod message;
mod outbound;
pub mod paths;
mod payload;
mod producer;
pub mod record;
mod segments;
mod session;
mod settings;
mod submitter;
#[cfg(test)]
mod tests;
mod wait;
pub mod wire;

pub use broker::Broker;
pub use client::Client;
pub use consumer::{Consumer, ConsumerOptions};
pub use control::{QueueInfo, Stats};
pub use error::{Error, ErrorCode, Refusal, Result};
pub use loan::Loan;
pub use message::{Message, MessageId};
pub use producer::{Producer, ProducerOptions};
pub use settings::{Confirm, QueueSettings};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks, also after a panic of another thread: no lock here guards a state that
/// a panic can leave half changed.
#[inline]
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The examples of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
