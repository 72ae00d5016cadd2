//! The Redis hand-off queue as a model, explored in every order of events.
//!
//! The rules are those of `docs/redis-handoff.md`, by the names they have there. The model is the
//! server's scripts ([`Script`]), what a client makes of what it hears ([`Claim`]), and between
//! them letters that may take any time, overtake each other, and be lost or late when a connection
//! ends ([`World`]). [`explore`](crate::explorer::explore) visits every state that can be reached
//! and looks for broken
//! promises ([`Violation`]). Each [`Rule`] can be left out, and the search must then find what it
//! is good for.
//!
//! Time is relative to now, so runs are not bounded in time; a pause is a client that does nothing;
//! tokens are compared by their order only. Not in the model: marks that expire, drift, different
//! ttls in one queue, readers and permits, foreign locks (courtesy comes with any release), C7 (a
//! push for a claim that is unknown), which is not needed for safety.

mod client;
mod rules;
mod scenario;
mod server;
mod steps;
mod world;

pub use client::{Claim, ClientRules, Phase};
pub use rules::{Leases, Rule, Rules};
pub use scenario::{Scenario, Timers};
pub use server::{Id, Lock, QueueEntry, Reply, Script, Server, Token};
pub use steps::Step;
pub use world::{Faults, Message, Payload, Violation, World};
