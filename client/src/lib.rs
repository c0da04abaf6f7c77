//! Client library of Ringmain.
mod settings;
pub use settings::{Confirm, QueueSettings};
