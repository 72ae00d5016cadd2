//! Breaks real servers under real clients, and judges what happened.
//!
//! `cargo xtask torture` runs it; `cargo test -p lockset-torture` runs a short round on each
//! engine. The parts that can be used without the rest:
//!
//! * [`history`]: the events of a run, one JSON line each. A client in any language can write them.
//! * [`oracle`]: [`judge`](oracle::judge) finds broken promises in a [`History`](history::History),
//!   from the history alone.
//!
//! ```
//! use lockset::Mode;
//! use lockset_torture::history::{Event, History, Promise, Setup, What};
//! use lockset_torture::oracle::judge;
//!
//! let setup = Setup {
//!     engine: "hand-made".to_owned(),
//!     seed: 1,
//!     ttl_ms: 1000,
//!     names: vec!["m".to_owned()],
//!     promises: vec![Promise::Exclusion],
//!     recovery_ms: 0,
//! };
//! let event = |at, by: &str, what| Event { at, by: by.to_owned(), what };
//! let ask = || What::Ask { op: 1, name: "m".to_owned(), mode: Mode::Exclusive };
//! let enter = || What::Enter { op: 1, token: None, valid_until: None };
//! let history = History::new(vec![
//!     event(0, "harness", What::Setup(setup)),
//!     event(1, "c0.1", ask()),
//!     event(2, "c0.1", enter()),
//!     event(3, "c1.1", ask()),
//!     event(4, "c1.1", enter()),
//!     event(5, "c0.1", What::Exit { op: 1 }),
//!     event(6, "c1.1", What::Exit { op: 1 }),
//! ]);
//! assert_eq!(judge(&history).count(Promise::Exclusion), 1);
//! ```
// This crate is test code: a broken expectation must end the run with a message.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub mod history;
pub mod holds;
pub mod oracle;
