//! Protocols of lockset as models, explored in every order of events.
//!
//! * [`explorer`]: visits every state that can be reached, and finds the shortest way to a bad one.
//! * [`handoff_model`] and [`redlock_model`]: the queue of the Redis engine, and fenced Redlock.
//!
//! A crate of its own because it is compiled with optimisations also for tests: there are millions
//! of states to visit.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a model that cannot go on is a failed test"
)]

pub mod explorer;
pub mod handoff_model;
pub mod redlock_model;
