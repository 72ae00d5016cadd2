//! Distributed locks with the same API on every engine.
//!
//! Every grant carries a fencing [`Token`]. Every [`Guard`] knows until when it can be trusted, and
//! reports a loss before another client can be granted the lock. A release wakes one waiter,
//! without polling.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> lockset::Result<()> {
//! use std::time::Duration;
//! use lockset::Lockset;
//!
//! let locks = Lockset::connect("memory:").await?; // or "redis://127.0.0.1:6379", see below
//! let order = locks.mutex(["orders", "42"])?;
//! order
//!     .within(Duration::from_secs(2))
//!     .run(async |held| {
//!         // Cancelled if the lock is lost. Send `held.token()` with every write.
//!         Ok::<_, lockset::Error>(())
//!     })
//!     .await?;
//! locks.close().await
//! # }
//! ```
//!
//! | to | use |
//! |---|---|
//! | work under a lock | [`Mutex::run`], [`Mutex::within`]; or [`Mutex::lock`] and a [`Guard`] |
//! | let readers share | [`Lockset::rwlock`] |
//! | limit how many work at once | [`Lockset::semaphore`] |
//! | have one leader | [`Election::lead`] |
//! | wait for each other | [`Lockset::latch`], [`Lockset::barrier`] |
//! | take several locks, all or none | [`all`] |
//! | let the resource reject a stale holder | [`fence`] |
//! | pass a lock to another process | [`Guard::detach`], [`Lockset::attach`] |
//! | see and break locks | [`Lockset::inspect`], [`list`](Lockset::list), [`watch`](Lockset::watch), [`force_release`](Lockset::force_release) |
//!
//! # Engines
//! [`Lockset::connect`] takes a URL. [`Builder`] sets what a URL does not say.
//!
//! | URL | feature | locks live in | options of the URL |
//! |---|---|---|---|
//! | `memory:`, `memory:LABEL` | always there | this process; clients of one label share them | |
//! | `local:`, `local:/path/file.db` | `local` | a file of this machine (SQLite) | `mode=` |
//! | `redis://[user:password@]host[:port][/db]` | `redis` | one Redis or Valkey server | `prefix=`, `replicas=`, `fence_idle=`, `first_lease=`, `courtesy=` |
//! | `redis+sentinel://[user:password@]host,…/service[/db]` | `redis` | the master that the sentinels name | as `redis:`, and `sentinel_login=` |
//! | `redis+cluster://[user:password@]host,…` | `redis` | a Redis cluster | as `redis:` |
//! | `redlock://[user:password@]host,…[/db]` | `redis` | a majority of independent Redis servers | `prefix=`, `max_ttl=`, `node_timeout=` |
//! | `etcd://[user:password@]host,…[/prefix]` | `etcd` | an etcd cluster | `names=` |
//! | `zk://[user:password@]host,…[/chroot]` | `zookeeper` | a ZooKeeper ensemble | `layout=`, `names=` |
//! | `postgres://[user:password@]host,…[/database]` | `postgres` | a PostgreSQL database | `schema=`, `sslmode=`, `listen=`, `first_lease=` |
//!
//! With TLS: `rediss://`, `rediss+sentinel://`, `rediss+cluster://`, `redlocks://`, `etcds://`,
//! `zks://`, and `postgres://` unless the server is on the same machine or `sslmode=` says otherwise;
//! with the options `ca=`, `cert=` and `key=` (PEM files). Every URL has the options
//! `ttl=`, the default ttl, and `token_base=`, which is added to every token. The pages in `docs/`
//! of the repository describe the options.
//!
//! # Features
//! | feature | adds |
//! |---|---|
//! | `local` (default) | the engine `local:` |
//! | `redis` | the engines `redis://` and `redlock://`, and [`Builder::redis_client`](Builder) |
//! | `redis-tls` | `redis`, and TLS for it; the other engines always have TLS |
//! | `etcd`, `zookeeper` | an engine each |
//! | `postgres` | the engine `postgres://`, and [`Builder::postgres`](Builder) |
//! | `fence-sqlite`, `fence-postgres`, `fence-redis`, `fence-object-store`, `fence-http` | checks of tokens at a resource, see [`fence`] |
//! | `blocking` | the same API for code without an async runtime |
//! | `metrics` | counters and histograms through the `metrics` facade |
//!
//! No feature changes what is already there.
//!
//! # Runtime
//! The async API needs a tokio runtime with time and I/O enabled. Renewals run on a thread of their
//! own, so code that blocks a worker thread does not cost a lock. Without a runtime, use
#![cfg_attr(feature = "blocking", doc = "[`blocking`].")]
#![cfg_attr(not(feature = "blocking"), doc = "the `blocking` feature.")]
//!
//! # Testing
//! [`testing`] is the way to test a service that uses locks: a lock server inside the test, on
//! virtual time, with faults to inject.
//!
//! # Guarantees
//! * **Exclusive**: one holder at a time, or readers together, or at most `limit` permits.
//! * **No deadlock by a crash**: the lock of a crashed holder is free when its lease ends, or at
//!   once where the engine sees the death.
//! * **Fenced**: tokens strictly grow per name, over all grants.
//! * **Honest about loss**: a guard is never [`State::Held`] after the moment until which the
//!   engine promised the lock, whatever the network does.
//! * **In order**: waiters of one process are served first come first served, and processes take
//!   turns.
//! * **Cancel safe**: dropping a pending `lock()` leaves neither a lock nor a queue entry.
//!
//! What no lock can promise: a process may be paused between the check and the action. Send the
//! token with every write, and let the resource reject older ones: [`fence`]. `GUARANTEES.md` of
//! the repository says what each promise means on each engine and what it does not cover.
//!
//! # Observing
//! `tracing`: the span `lockset.acquire` (name, engine, mode, note), events for grants, releases,
//! unconfirmed renewals and losses. The feature `metrics` adds metrics, through the facade of that
//! name.
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
pub mod fence;
mod fork;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
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
mod run;
mod rwlock;
mod semaphore;
mod state;
mod sync;
#[cfg_attr(not(feature = "metrics"), path = "telemetry/off.rs")]
mod telemetry;
pub mod testing;
mod ticket;
#[cfg(any(feature = "redis", feature = "etcd", feature = "postgres", feature = "zookeeper"))]
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
pub use run::{RunError, Within};
pub use rwlock::RwLock;
pub use semaphore::Semaphore;
pub use ticket::{Lease, Ticket};
#[cfg(any(feature = "redis", feature = "etcd", feature = "postgres", feature = "zookeeper"))]
pub use tls::TlsOptions;
pub use token::Token;
pub use url::Url;
