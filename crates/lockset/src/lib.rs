//! Distributed locks with one set of verbs on every engine.
//!
//! Every grant carries a fencing [`Token`]; every [`Guard`] knows until when it may be trusted and
//! says so before anyone else can hold the lock; a release wakes one waiter, without polling.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> lockset::Result<()> {
//! use lockset::Lockset;
//!
//! let locks = Lockset::connect("memory:").await?;   // or "local:", see `Lockset::connect`
//! let guard = locks.mutex("orders/42")?.lock().await?;
//! guard.run(async { /* the work, cancelled if the lock is lost */ }).await?;
//! guard.release().await?;
//! # Ok(()) }
//! ```
//!
//! # The way of one acquisition
//! `connect` picked the engine → [`Lockset::mutex`] parses the name once → [`Mutex::lock`] makes a
//! claim → `acquire` passes the in-process gate, opens the span and owns the outcome → the
//! [engine](engine::Engine) grants, or queues and is woken → [`Guard`] and keeper renew and watch
//! the deadline → [`Guard::release`] gives it back, and the engine admits the next.
//!
//! # Runtime
//! The async front needs a tokio runtime with time and I/O enabled. Renewals run on a thread of
//! their own, so code that blocks a worker does not cost a lock. Without a runtime, use
#![cfg_attr(feature = "blocking", doc = "[`blocking`].")]
#![cfg_attr(not(feature = "blocking"), doc = "the `blocking` feature.")]
//!
//! # Observing
//! `tracing`: the span `lockset.acquire` (name, engine, mode, note), events for grants, releases,
//! unconfirmed renewals and losses. With the feature `metrics`, the facade of that name:
#![cfg_attr(feature = "metrics", doc = include_str!("telemetry.md"))]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod acquire;
mod attach;
mod barrier;
#[cfg(feature = "blocking")]
pub mod blocking;
mod builder;
mod cell;
mod client;
pub mod clock;
mod election;
pub mod engine;
mod error;
mod fork;
mod gate;
mod guard;
mod hash;
mod hold;
mod keeper;
mod latch;
mod locks;
mod multi;
mod mutex;
mod name;
mod options;
mod report;
mod rwlock;
mod semaphore;
mod sync;
#[cfg_attr(not(feature = "metrics"), path = "telemetry/off.rs")]
mod telemetry;
mod ticket;
#[cfg(any(feature = "redis", feature = "etcd", feature = "zookeeper"))]
mod tls;
mod token;
mod url;

pub use barrier::Barrier;
pub use builder::Builder;
pub use election::{Election, Leader};
pub use engine::{Break, ClaimId, Holder, LockState, Mode, Replicas, Waiter};
pub use error::{Error, LossReason, Result};
pub use guard::Guard;
pub use hold::State;
pub use latch::Latch;
pub use locks::Lockset;
pub use multi::{All, Guards, Lockable, all};
pub use mutex::Mutex;
pub use name::{Name, Note, Prefix};
pub use options::LockOptions;
pub use rwlock::RwLock;
pub use semaphore::Semaphore;
pub use ticket::{Lease, Ticket};
#[cfg(any(feature = "redis", feature = "etcd", feature = "zookeeper"))]
pub use tls::TlsOptions;
pub use token::Token;
pub use url::Url;
