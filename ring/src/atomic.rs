//! The only import of atomics in this crate: the real ones, or loom's, which
//! make a model checker run the code that production runs.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::fence;
#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU32, AtomicU64};
pub use std::sync::atomic::Ordering;
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::fence;
#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicU32, AtomicU64};
