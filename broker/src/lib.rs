//! The Ringmain broker and its command line. The library is the binary's inside
//! and what the tests reach; programs use the crate `ringmain`.

pub mod board;
pub mod control;
mod crash;
pub mod hub;
pub mod ledger;
pub mod service;
pub mod store;
pub mod wake;
