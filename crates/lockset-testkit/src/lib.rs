//! What every engine of lockset must keep, and the proof that each rule can be broken.
//!
//! * [`laws`]: the promises, each a function that panics with a telling message when broken.
//! * [`stage`]: what an engine gives the laws to play on: clients, processes, faults, time.
//! * [`suite!`](macro@crate::suite): one test per law and form, and a test that none was forgotten.
//! * [`mutants`]: for each law a broken engine that fails it.
//! * [`steps`], [`contenders`], [`log`](mod@log), [`proxy`] and [`python`]: what the tests of real
//!   servers share, and other people's clients.
//! * [`simulation`] and [`oracle`]: the real front over a faulty engine in virtual time, and the
//!   judge of what was seen. [`redlock_simulation`]: the same over a quorum of faulty nodes.
// This crate is test code: a broken expectation must end the test, with words.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub mod contenders;
pub mod form;
pub mod laws;
pub mod layer;
pub mod log;
pub mod mutants;
pub mod oracle;
pub mod process;
pub mod proxy;
pub mod python;
pub mod redlock_simulation;
pub mod simulation;
pub mod stage;
pub mod steps;
pub mod suite;
mod tools;

pub use form::Form;
pub use laws::Law;
pub use stage::{Need, Stage, Time};
