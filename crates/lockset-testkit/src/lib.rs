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
//! | [`fence_laws`] | the promises of a fence store |
//! | [`paused_holder`] | a holder that is paused beyond its lease, on every engine and store |
//! | [`layer`] | engines that wrap another engine and change some of its methods |
//! | [`simulation`] | many seeds of the real front over a faulty network, in virtual time |
//! | [`redlock_simulation`] | the same for fenced Redlock over faulty nodes |
//! | [`history`] | records what clients believed, and checks that it is consistent |
//! | [`steps`], [`contenders`] | building blocks for tests of one engine on real servers |
//! | [`proxy`], [`signals`] | TCP faults, processes that are stopped |
//! | [`process`], [`python`] | client processes, clients in other languages |
//!
//! # Test an engine of your own
//!
//! `docs/engines.md` says what an engine has to do. `examples/files-engine` is a complete crate
//! outside the library: an engine over a directory of files, with its stage and its suite.
//!
//! **1. Write a stage.** Implement [`Stage`] for a type that owns one empty backend: a server that
//! the stage starts, a directory, a prefix that nothing else uses. Each law gets a fresh stage. A
//! stage must provide:
//!
//! * independent clients ([`Stage::client`], [`Stage::engine`]), as separate processes would have
//!   them, and a client of a second backend ([`Stage::other_backend`]);
//! * the clock that leases are measured by ([`Stage::clock`]), and a ttl of which a quarter is
//!   enough for a hand-off on a loaded machine ([`Stage::ttl`]);
//! * a backend that stops responding and resumes ([`Stage::freeze`], [`Stage::thaw`]). Break
//!   something real if there is something: stop the server process, hold the lock of the file.
//!   Otherwise wrap the engine in [`Freezable`](layer::Freezable).
//!
//! The other methods have defaults. Implement them if the backend has what they stand for: a
//! restart on its own data, client processes that can be killed, connections that can be cut,
//! a leader that can change.
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use async_trait::async_trait;
//! use lockset::Lockset;
//! use lockset::clock::Clock;
//! use lockset::engine::Engine;
//! use lockset::engine::memory::Memory as MyEngine;
//! use lockset_testkit::layer::{Freezable, FreezeSwitch, Layered};
//! use lockset_testkit::suite::assert_law_holds;
//! use lockset_testkit::{LockKind, Stage, Time};
//!
//! struct MyStage {
//!     clock: Clock,
//!     backend: MyEngine,
//!     switch: FreezeSwitch,
//! }
//!
//! impl MyStage {
//!     fn start() -> Self {
//!         let clock = Clock::tokio();
//!         let backend = MyEngine::new(clock.clone());
//!         Self { clock, backend, switch: FreezeSwitch::default() }
//!     }
//! }
//!
//! #[async_trait]
//! impl Stage for MyStage {
//!     // `Time::Real` and `Clock::boot()`, unless the engine can run on tokio's paused clock.
//!     fn time(&self) -> Time {
//!         Time::Virtual
//!     }
//!
//!     fn clock(&self) -> Clock {
//!         self.clock.clone()
//!     }
//!
//!     fn ttl(&self) -> Duration {
//!         Duration::from_secs(2)
//!     }
//!
//!     async fn engine(&self) -> Arc<dyn Engine> {
//!         let inner = Arc::new(self.backend.another_client());
//!         Arc::new(Layered(Freezable { inner, switch: self.switch.clone() }))
//!     }
//!
//!     async fn client(&self) -> Lockset {
//!         Lockset::with_engine(self.engine().await).unwrap()
//!     }
//!
//!     async fn other_backend(&self) -> Lockset {
//!         Lockset::with_engine(Arc::new(MyEngine::new(self.clock()))).unwrap()
//!     }
//!
//!     async fn freeze(&self) {
//!         self.switch.freeze();
//!     }
//!
//!     async fn thaw(&self) {
//!         self.switch.thaw();
//!     }
//! }
//!
//! assert_law_holds("a_dropped_guard_releases", LockKind::Mutex, Time::Virtual, || {
//!     Box::pin(async { Box::new(MyStage::start()) as Box<dyn Stage> })
//! });
//! ```
//!
//! Client processes: write a binary that passes a client of your engine to
//! [`serve_stdio`](process::serve_stdio), and start it in [`Stage::process`] with
//! [`Process::spawn`](process::Process::spawn). Cargo tells a test the path of its package's binary
//! `NAME` as `env!("CARGO_BIN_EXE_NAME")`. The binary cannot use dev-dependencies.
//!
//! **2. Run the laws.** List every law in a [`suite!`](macro@crate::suite). It makes one test per
//! law (three for laws that hold for each [`LockKind`]) and one test that no law is missing from
//! the lists. A law may be skipped only if the stage really lacks one of its [`Need`]s; the suite
//! checks this as well. `tests/laws_memory.rs` and `examples/files-engine/tests/laws.rs` are
//! complete lists, of an engine with all modes and of one with exclusive locks only. Run the suite
//! many times, also on a loaded machine: a law that fails once in a hundred runs is broken.
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
pub mod fence_laws;
pub mod history;
mod law_support;
pub mod laws;
pub mod layer;
pub mod lock_kind;
pub mod log_capture;
pub mod mutants;
pub mod paused_holder;
pub mod process;
pub mod proxy;
pub mod python;
pub mod redlock_simulation;
pub mod signals;
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
