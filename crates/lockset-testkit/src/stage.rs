//! What an engine gives the laws to play on.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use lockset::clock::Clock;
use lockset::engine::{Claim, Engine, Wait};
use lockset::{Error, Lockset, Mode, Token};

use crate::process::Process;
use crate::tools;

mod access;
mod cluster;
mod etcd;
mod etcd_home;
mod link;
mod local;
mod memory;
mod port;
mod redis;
mod redlock;
mod sentinel;
mod skew;
mod zookeeper;

pub use access::{Access, Tls};
pub use cluster::{ClusterStage, RedisCluster};
pub use etcd::EtcdServers;
pub use etcd_home::EtcdStage;
pub use link::{Connection, Link, Linked};
pub use local::LocalStage;
pub use memory::MemoryStage;
pub use redis::{RedisServer, RedisStage};
pub use redlock::{DURABLE, RedlockNodes, RedlockStage};
pub use sentinel::{RedisSentinel, SentinelStage};
pub use skew::Skew;
pub use zookeeper::{Chroot, Eyes, SESSIONS, Stat, ZooKeeperNode, ZooKeeperServers};
pub use zookeeper::{ZooKeeperEnsembleStage, ZooKeeperStage};

/// One home, empty at first, with clients, processes, faults and time as the laws need them. Every
/// law gets a fresh one.
///
/// An engine behind a real server makes its stage from a server of its own: `freeze` stops that
/// process, `restart` starts it again on the same data, `process` runs the actor on its URL.
#[async_trait]
pub trait Stage: Send + Sync {
    /// How time passes here.
    fn time(&self) -> Time;

    /// The clock that leases are judged by.
    fn clock(&self) -> Clock;

    /// The ttl that the laws use. A quarter of it must be enough for a hand-off on a loaded
    /// machine; the suite takes some hundred times as long.
    fn ttl(&self) -> Duration;

    /// How much later than a lease ends its home may notice: some look at their leases only now and
    /// then, and some let all of them begin anew when another of their servers leads.
    fn lag(&self) -> Duration {
        Duration::ZERO
    }

    /// A fresh connection, as another process would have it.
    async fn client(&self) -> Lockset;

    /// The engine of a fresh connection, without guard and keeper.
    async fn engine(&self) -> Arc<dyn Engine>;

    /// A connection to another home of the same kind.
    async fn elsewhere(&self) -> Lockset;

    /// The home stops answering everybody.
    async fn freeze(&self);

    /// The home answers again.
    async fn thaw(&self);

    /// In the middle of a law another server begins to lead, where the stage wants that: nothing
    /// that a law promises may depend on who leads.
    async fn change_leader(&self) {}

    /// The home ends and begins again with what it had written down. All clients are closed
    /// before. Only asked of durable engines.
    async fn restart(&self) {}

    /// A client in a process of its own, which can be killed; `None` where a home lives inside
    /// one process.
    async fn process(&self) -> Option<Process> {
        None
    }

    /// A client whose connection can be cut while the home and everybody else are well; `None`
    /// where there is no connection, or the client would find a way around.
    async fn linked(&self) -> Option<Linked> {
        None
    }

    /// This process does nothing at all for so long.
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
    /// tokio's paused clock on one thread: it jumps to the next timer when all are idle.
    Virtual,
    /// The machine's clock, several threads.
    Real,
}

/// What a law needs of a stage. An engine may refuse a law only if a need is really not met.
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
    /// A fence that can be set and lifted by the caller.
    Fence,
    /// A mode that the engine does not have.
    MissingMode,
}

impl Need {
    /// Whether this stage has what is needed.
    pub async fn is_met(self, stage: &dyn Stage) -> bool {
        let can = stage.engine().await.capabilities();
        match self {
            Need::Processes => stage.process().await.is_some(),
            Need::Link => stage.linked().await.is_some(),
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

/// Capabilities do not speak of it, so it is tried: an engine that takes its tokens from elsewhere
/// (a revision, a transaction id) refuses a floor.
async fn has_fence(stage: &dyn Stage) -> bool {
    let engine = stage.engine().await;
    let floor = Some(Token::new(7));
    let claim = Claim { floor, ..tools::claim(stage, "floor", Mode::Exclusive) };
    let refused = matches!(engine.acquire(&claim, Wait::No).await, Err(Error::Unsupported { .. }));
    engine.withdraw(&claim).await.expect("a claim can be withdrawn");
    !refused
}
