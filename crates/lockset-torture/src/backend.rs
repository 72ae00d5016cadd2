//! The servers of each engine, and how they are broken.
//!
//! A new engine needs a variant of [`EngineKind`], a file with a [`Backend`], and a line in
//! [`EngineKind::start`]; if GUARANTEES.md excepts something, also in `oracle/exceptions.rs`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::schedule::Fault;

mod cluster;
mod etcd;
mod links;
mod local;
mod redis;
mod redlock;
mod sentinel;
mod zookeeper;

pub use links::Links;

/// The engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EngineKind {
    /// A file.
    Local,
    /// One server.
    Redis,
    /// A master, two replicas, three sentinels.
    Sentinel,
    /// Three masters with a replica each.
    Cluster,
    /// Five independent Redis servers.
    Redlock,
    /// An ensemble of three.
    ZooKeeper,
    /// A cluster of three.
    Etcd,
}

impl EngineKind {
    /// All engines.
    pub const ALL: [EngineKind; 7] = [
        EngineKind::Local,
        EngineKind::Redis,
        EngineKind::Sentinel,
        EngineKind::Cluster,
        EngineKind::Redlock,
        EngineKind::ZooKeeper,
        EngineKind::Etcd,
    ];

    /// Its name on the command line and in the history.
    pub fn name(self) -> &'static str {
        match self {
            EngineKind::Local => "local",
            EngineKind::Redis => "redis",
            EngineKind::Sentinel => "sentinel",
            EngineKind::Cluster => "cluster",
            EngineKind::Redlock => "redlock",
            EngineKind::ZooKeeper => "zookeeper",
            EngineKind::Etcd => "etcd",
        }
    }

    /// Starts its servers, for this number of clients.
    pub fn start(self, clients: usize, ttl: Duration) -> Box<dyn Backend> {
        match self {
            EngineKind::Local => Box::new(local::LocalBackend::start()),
            EngineKind::Redis => Box::new(redis::RedisBackend::start(clients, ttl)),
            EngineKind::Sentinel => Box::new(sentinel::SentinelBackend::start()),
            EngineKind::Cluster => Box::new(cluster::ClusterBackend::start()),
            EngineKind::Redlock => Box::new(redlock::RedlockBackend::start(clients, ttl)),
            EngineKind::ZooKeeper => Box::new(zookeeper::ZooKeeperBackend::start(clients, ttl)),
            EngineKind::Etcd => Box::new(etcd::EtcdBackend::start(clients)),
        }
    }

    /// The faults that its servers and connections can have, besides those of clients.
    pub fn faults(self) -> Vec<Fault> {
        use Fault::*;
        let links = [ClientCut, ClientSilent, NodeCut, Delay, Drop, Late];
        let own: &[Fault] = match self {
            EngineKind::Local => &[DiskFull, FileBusy],
            EngineKind::Redis => &[
                ServerStop,
                ServerKill,
                ServerWipe,
                Duplicate,
                ClockForward,
                ClockBack,
                Disconnect,
                ScriptFlush,
            ],
            EngineKind::Sentinel => &[LeaderKill, LeaderStop, CutOff, Disconnect, ScriptFlush],
            EngineKind::Cluster => &[LeaderKill, LeaderStop, Disconnect, ScriptFlush],
            EngineKind::Redlock => &[
                ServerStop,
                ServerKill,
                ServerWipe,
                MajorityCut,
                Duplicate,
                ClockForward,
                ClockBack,
                Disconnect,
                ScriptFlush,
            ],
            EngineKind::ZooKeeper | EngineKind::Etcd => {
                &[ServerStop, ServerKill, LeaderKill, LeaderStop, MajorityCut]
            }
        };
        let has_links =
            !matches!(self, EngineKind::Local | EngineKind::Sentinel | EngineKind::Cluster);
        let links = if has_links { &links[..] } else { &[] };
        [&[ClientStop, ClientKill], links, own].concat()
    }

    /// How much longer than two leases it may need after the last fault.
    pub fn recovery(self, ttl: Duration) -> Duration {
        let quick = Duration::from_secs(1);
        match self {
            EngineKind::Local => quick,
            // A lock that was taken while the clock was ahead lasts longer by the jump.
            EngineKind::Redis => quick + ttl.mul_f64(redis::JUMP),
            EngineKind::Sentinel | EngineKind::Cluster => 3 * quick,
            // A server that lost its data is not counted for a while.
            EngineKind::Redlock => 2 * quick + 2 * ttl,
            // A new leader restarts all leases.
            EngineKind::ZooKeeper | EngineKind::Etcd => 3 * quick + ttl,
        }
    }

    /// Whether it has readers and permits.
    pub fn has_all_modes(self) -> bool {
        self != EngineKind::Redlock
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for EngineKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = if text == "zk" { "zookeeper" } else { text };
        let found = Self::ALL.into_iter().find(|engine| engine.name() == text);
        let known = || Self::ALL.map(Self::name).join(", ");
        found.ok_or_else(|| format!("there is no engine {text}; there are {} and all", known()))
    }
}

/// The running servers of an engine.
pub trait Backend: Send + Sync {
    /// The URL for this client.
    fn url(&self, client: usize) -> String;

    /// The connections of the clients, where they can be broken.
    fn links(&self) -> Option<&Links> {
        None
    }

    /// Begins a fault of the servers. `pick` decides which of them it strikes.
    fn strike(&self, fault: Fault, pick: u64) -> Strike<'_>;
}

/// A fault that has begun.
#[expect(missing_debug_implementations, reason = "it contains a function")]
pub struct Strike<'a> {
    /// What it struck.
    pub target: String,
    /// Ends it, and returns when what it struck works again.
    pub heal: Box<dyn FnOnce() + Send + 'a>,
}

impl<'a> Strike<'a> {
    /// A fault of this target, ended by this function.
    pub fn new(target: impl Into<String>, heal: impl FnOnce() + Send + 'a) -> Self {
        Self { target: target.into(), heal: Box::new(heal) }
    }
}

/// For a fault that is not in [`EngineKind::faults`].
fn unsupported(engine: EngineKind, fault: Fault) -> ! {
    panic!("{engine} has no fault {fault}")
}
