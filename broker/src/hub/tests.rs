//! Tests of the hub, alone.
#![allow(clippy::unwrap_used, reason = "tests")]

mod check;
