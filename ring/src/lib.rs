//! Shared memory for Ringmain, and nothing else: segments and their layout, the
//! record ring, payloads, waiting and waking, the status board. Knows no queue, no socket and no store.
//!
//! What holds in this crate:
//!
//! - All `unsafe` for shared memory is here, and pointers into it are made in
//!   few places: `view`, `session`, `payload` and `board`.
//! - What another process can write is input: copied once, checked, then used.
//!   No byte in a segment makes this crate panic, hang, or read out of bounds.
//! - A cursor has one writer. Who dies between two stores leaves a segment that
//!   the other side can go on with, without repair.
//! - Nothing sleeps without having announced it, and no sleep is unbounded.

mod atomic;
#[cfg(not(loom))]
pub mod board;
#[cfg(not(loom))]
pub mod fault;
#[cfg(not(loom))]
pub mod layout;
#[cfg(not(loom))]
pub mod payload;
pub mod record_ring;
#[cfg(not(loom))]
pub mod segment;
#[cfg(not(loom))]
pub mod session;
pub mod snapshot;
#[cfg(not(loom))]
pub mod units;
pub mod view;
pub mod wait;

pub use atomic::{AtomicU32, AtomicU64, Ordering};
