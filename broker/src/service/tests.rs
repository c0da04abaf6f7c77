//! Tests of the service: the whole broker without its threads and its socket.
#![allow(clippy::unwrap_used, reason = "tests")]

mod client;
mod drain;
mod model;
mod property;
mod stories;
mod world;
