//! Conformance tests for lockset engines.
//!
//! An engine implements [`lockset::engine::Engine`]. This crate checks that an engine keeps the
//! promises that the rest of lockset relies on, and that each of these checks can fail.
//!
//! | module | contents |
//! |---|---|
//! | [`laws`] | the promises: one async function each, which panics if the promise is broken |
//! | [`stage`] | the [`Stage`] trait (the environment in which a law runs), and one stage per engine |
//! | [`suite`](mod@suite) | runs laws on a stage; the [`suite!`](macro@crate::suite) macro makes one test per law |
//! | [`mutants`] | for each law, a broken engine on which the law must fail |
//! | [`layer`] | engines that wrap another engine and change some of its methods |
//! | [`simulation`] | many seeds of the real front over a faulty network, in virtual time |
//! | [`redlock_simulation`] | the same for fenced Redlock over faulty nodes |
//! | [`history`] | records what clients believed, and checks that it is consistent |
//! | [`steps`], [`contenders`] | building blocks for tests of one engine on real servers |
//! | [`proxy`], [`process`], [`python`] | TCP faults, client processes, clients in other languages |
//!
//! # Testing an engine of your own
//!
//! **1. Write a stage.** Implement [`Stage`] for a type that owns one empty backend: a server that
//! the stage starts, a file, a prefix that nothing else uses. Each law gets a fresh stage. A stage
//! must provide:
//!
//! * independent clients ([`Stage::client`], [`Stage::engine`]), as separate processes would have
//!   them, and a client of a second backend ([`Stage::other_backend`]);
//! * the clock that leases are measured by ([`Stage::clock`]), and a ttl of which a quarter is
//!   enough for a hand-off on a loaded machine ([`Stage::ttl`]);
//! * a backend that stops responding and resumes ([`Stage::freeze`], [`Stage::thaw`]).
//!
//! The other methods have defaults. Implement them if the backend has what they stand for: a
//! restart on its own data, client processes that can be killed, connections that can be cut,
//! a leader that can change.
//!
//! **2. Run the laws.** List every law in a [`suite!`](macro@crate::suite). It makes one test per
//! law (three for laws that hold for each [`LockKind`]) and one test that no law is missing from
//! the lists. A law may be skipped only if the stage really lacks one of its [`Need`]s; the suite
//! checks this as well. `tests/laws_memory.rs` is a complete example. To run a single law:
//!
//! ```
//! use lockset_testkit::stage::MemoryStage;
//! use lockset_testkit::suite::assert_law_holds;
//! use lockset_testkit::{LockKind, Stage, Time};
//!
//! assert_law_holds("a_dropped_guard_releases", LockKind::Mutex, Time::Virtual, || {
//!     Box::pin(async { Box::new(MemoryStage::start()) as Box<dyn Stage> })
//! });
//! ```
//!
//! **3. Prove that a law can fail.** A law that no engine can break proves nothing. Each law has at
//! least one [`Mutant`](mutants::Mutant): the memory engine with one fault, on which the law must
//! fail with the expected message. A new law needs a mutant too. The fault is a
//! [`Layer`](layer::Layer) over a sound engine:
//!
//! ```
//! use std::sync::Arc;
//!
//! use async_trait::async_trait;
//! use lockset::engine::{Claim, Engine, Grant};
//! use lockset_testkit::layer::{Layer, Layered};
//! use lockset_testkit::mutants::Mutant;
//! use lockset_testkit::stage::MemoryStage;
//! use lockset_testkit::{LockKind, Stage, Time};
//!
//! /// Reports success without releasing.
//! #[derive(Debug)]
//! struct NeverReleases(Arc<dyn Engine>);
//!
//! #[async_trait]
//! impl Layer for NeverReleases {
//!     fn inner(&self) -> &Arc<dyn Engine> {
//!         &self.0
//!     }
//!
//!     async fn release(
//!         &self,
//!         _: &Claim,
//!         _: &Grant,
//!         _: Option<&Claim>,
//!     ) -> lockset::Result<Option<Grant>> {
//!         Ok(None)
//!     }
//! }
//!
//! let mutant = Mutant {
//!     law: "a_dropped_guard_releases",
//!     expected: "after the drop",
//!     kind: LockKind::Mutex,
//!     time: Time::Virtual,
//!     stage_factory: || {
//!         Box::pin(async {
//!             let stage = MemoryStage::start();
//!             let stage = stage.wrapped(|inner| Arc::new(Layered(NeverReleases(inner))));
//!             Box::new(stage) as Box<dyn Stage>
//!         })
//!     },
//! };
//! mutant.assert_law_fails();
//! ```
// This crate is test code: a broken expectation must end the test with a message.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub mod contenders;
pub mod history;
mod law_support;
pub mod laws;
pub mod layer;
pub mod lock_kind;
pub mod log_capture;
pub mod mutants;
pub mod process;
pub mod proxy;
pub mod python;
pub mod redlock_simulation;
pub mod simulation;
pub mod stage;
pub mod steps;
pub mod suite;

pub use laws::Law;
pub use lock_kind::LockKind;
pub use stage::{Need, Stage, Time};

/// The code of the README, compiled with the other examples. It is here because the library is
/// published without the workspace.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
