//! A [`Stage`] is the environment in which a law runs: an empty backend with clients, processes,
//! faults and time. This module defines the trait; its submodules are the stages of lockset's own
//! engines and the servers that they start.
//!
//! A *backend* is where the locks live: a server, a cluster, a file, or memory.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use lockset::clock::Clock;
use lockset::engine::{Claim, Engine, Wait};
use lockset::{Error, Lockset, Mode, Token};

use crate::law_support;
use crate::process::Process;

mod access;
mod cluster;
mod etcd;
mod etcd_stage;
mod link;
mod local;
mod memory;
mod port;
mod postgres;
mod redis;
mod redlock;
mod s3;
mod sentinel;
mod skew;
mod zookeeper;

pub use access::{Access, Tls};
pub use cluster::{ClusterStage, RedisCluster};
pub use etcd::EtcdServers;
pub use etcd_stage::EtcdStage;
pub use link::{Link, LinkState, LinkedClient};
pub use local::LocalStage;
pub use memory::MemoryStage;
pub use postgres::PostgresServer;
pub use redis::{RedisServer, RedisStage};
pub use redlock::{DURABLE, RedlockNodes, RedlockStage};
pub use s3::S3Server;
pub use sentinel::{RedisSentinel, SentinelStage};
pub use skew::ClockSkew;
pub use zookeeper::{Chroot, KazooClient, SESSIONS, Stat, ZooKeeperNode, ZooKeeperServers};
pub use zookeeper::{ZooKeeperEnsembleStage, ZooKeeperStage};

/// The environment of a law: one backend, empty at first, with clients, processes, faults and time.
/// Every law gets a fresh stage.
///
/// A stage of a server-based engine starts a server of its own: `freeze` stops that server process,
/// `restart` starts it again on the same data, `process` runs the `actor` binary on its URL.
#[async_trait]
pub trait Stage: Send + Sync {
    /// How time passes on this stage.
    fn time(&self) -> Time;

    /// The clock that leases are measured by.
    fn clock(&self) -> Clock;

    /// The ttl that the laws use. A quarter of it must be enough for a hand-off on a loaded
    /// machine. The whole suite takes several hundred times the ttl.
    fn ttl(&self) -> Duration;

    /// How long after the end of a lease the backend may notice it. Some backends check leases
    /// periodically; some restart all leases when their leader changes.
    fn expiry_lag(&self) -> Duration {
        Duration::ZERO
    }

    /// A client with a connection of its own, as another process would have it.
    async fn client(&self) -> Lockset;

    /// An engine with a connection of its own, without guard and keeper.
    async fn engine(&self) -> Arc<dyn Engine>;

    /// A client of another backend of the same kind.
    async fn other_backend(&self) -> Lockset;

    /// The backend stops responding to all clients.
    async fn freeze(&self);

    /// The backend responds again.
    async fn thaw(&self);

    /// Changes the leader in the middle of a law, if the stage is set up for it. No promise of a
    /// law may depend on which server leads.
    async fn change_leader(&self) {}

    /// Restarts the backend on its own data. All clients are closed before. Called only for durable
    /// engines.
    async fn restart(&self) {}

    /// A client in a process of its own, which can be killed; `None` if the backend lives inside
    /// one process.
    async fn process(&self) -> Option<Process> {
        None
    }

    /// A client whose connection can be cut while the backend and all other clients work; `None` if
    /// there is no connection, or if the client would route around the cut.
    async fn linked_client(&self) -> Option<LinkedClient> {
        None
    }

    /// Pauses this whole process for `span`.
    async fn pause(&self, span: Duration) {
        match self.time() {
            Time::Virtual => tokio::time::advance(span).await,
            Time::Real => std::thread::sleep(span),
        }
    }
}

/// How time passes on a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Time {
    /// tokio's paused clock on one thread: it advances to the next timer when all tasks are idle.
    Virtual,
    /// The machine's clock, on several threads.
    Real,
}

/// What a law needs of a stage. A suite may skip a law only if one of its needs is not met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Clients in processes of their own.
    Processes,
    /// A connection that can be cut.
    Link,
    /// State that outlives the last client.
    Durable,
    /// The machine's own clock.
    RealTime,
    /// Readers.
    Shared,
    /// Semaphores.
    Permits,
    /// Latches and barriers.
    Cells,
    /// A fence that the caller can set and raise.
    Fence,
    /// A mode that the engine does not have.
    MissingMode,
}

impl Need {
    /// Whether the stage meets this need.
    pub async fn is_met(self, stage: &dyn Stage) -> bool {
        let can = stage.engine().await.capabilities();
        match self {
            Need::Processes => stage.process().await.is_some(),
            Need::Link => stage.linked_client().await.is_some(),
            Need::Durable => can.durable,
            Need::RealTime => stage.time() == Time::Real,
            Need::Shared => can.shared,
            Need::Permits => can.permits,
            Need::Cells => can.cells,
            Need::Fence => has_fence(stage).await,
            Need::MissingMode => !can.shared || !can.permits,
        }
    }
}

/// `Capabilities` do not include this, so it is tried: an engine that derives its tokens from
/// something else (a revision, a transaction id) rejects a floor.
async fn has_fence(stage: &dyn Stage) -> bool {
    let engine = stage.engine().await;
    let floor = Some(Token::new(7));
    let claim = Claim { floor, ..law_support::claim(stage, "floor", Mode::Exclusive) };
    let refused = matches!(engine.acquire(&claim, Wait::No).await, Err(Error::Unsupported { .. }));
    engine.withdraw(&claim).await.expect("a claim can be withdrawn");
    !refused
}
