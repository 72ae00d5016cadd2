//! The real binary, real processes, a real file: what `lockset` promises on its command line.
//!
//! Nothing here sleeps for a fixed time where an event can be awaited, and nothing is repeated
//! until it works: `until` waits for a state of the world and fails loudly if it never comes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

mod death;
mod election;
mod environment;
mod everywhere;
mod exit_codes;
mod fence;
mod input;
mod lease;
mod looking;
mod outage;
mod postgres;
mod signals;
mod terminal;
mod tickets;
mod zookeeper;
