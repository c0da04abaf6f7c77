//! Tests of the hub alone, under a simulated port, store and clock.
#![allow(clippy::unwrap_used, reason = "tests")]

mod backlog;
mod bench;
mod check;
mod dead;
mod leases;
mod queues;
mod restore;
mod rounds;
