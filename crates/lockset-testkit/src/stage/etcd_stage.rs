//! The stage of the etcd engine: a prefix of its own on servers that laws use one after the other.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use lockset::Lockset;
use lockset::clock::Clock;
use lockset::engine::Engine;
use lockset::engine::etcd::{Etcd, EtcdOptions};
use rustix::process::Signal;

use super::etcd::EtcdServers;
use super::{LinkedClient, Stage, Time};
use crate::process::{Process, StateSource};
use crate::steps::until;

/// An empty prefix on one server, or on a cluster of three, for one law.
#[derive(Debug)]
pub struct EtcdStage {
    /// `None` only while it is dropped.
    servers: Option<EtcdServers>,
    prefix: String,
    expiry_lag: Duration,
    actor: &'static str,
    freeze_kills_leader: bool,
    leader_changes: bool,
    /// The killed leader, which is to be restarted.
    dead: Mutex<Option<usize>>,
}

impl EtcdStage {
    /// An empty prefix on one server; see [`LocalStage::start`](super::LocalStage::start).
    pub fn start(actor: &'static str) -> Self {
        // etcd checks its leases twice a second.
        Self::start_on(1, Duration::from_millis(700), actor)
    }

    /// An empty prefix on a cluster of three. A restart restarts its leader.
    pub fn start_cluster(actor: &'static str) -> Self {
        // A new leader must be elected first, and then restarts all leases.
        Self::start_on(3, Duration::from_secs(2), actor)
    }

    /// A freeze also kills the leader, and a thaw restarts it.
    pub fn with_leader_killed_by_freeze(mut self) -> Self {
        self.freeze_kills_leader = true;
        self
    }

    /// The leader is killed in the middle of a law, and the others elect another. All leases last
    /// long enough for that.
    pub fn with_leader_change(mut self) -> Self {
        self.leader_changes = true;
        // Clients connect to the first server, so they notice that it is killed.
        self.servers().make_lead(0);
        self
    }

    fn start_on(number: usize, expiry_lag: Duration, actor: &'static str) -> Self {
        static HOMES: AtomicU32 = AtomicU32::new(0);
        let home = HOMES.fetch_add(1, Ordering::Relaxed);
        let servers = Some(POOL.take(number));
        let prefix = format!("home{home}");
        let (freeze_kills_leader, leader_changes, dead) = (false, false, Mutex::new(None));
        Self { servers, prefix, expiry_lag, actor, freeze_kills_leader, leader_changes, dead }
    }

    fn servers(&self) -> &EtcdServers {
        self.servers.as_ref().expect("it is not being dropped")
    }

    fn url(&self) -> String {
        self.servers().url(&self.prefix)
    }
}

impl Drop for EtcdStage {
    fn drop(&mut self) {
        if let Some(servers) = self.servers.take() {
            if let Some(dead) = self.dead.lock().unwrap().take() {
                // A law left it killed, but the pool signals all servers.
                servers.bring_back(dead);
            }
            POOL.give_back(servers);
        }
    }
}

/// Servers that no law uses at the moment. They are kept only while another law runs: nothing in
/// this process would stop them after the last law.
struct Pool {
    state: Mutex<PoolState>,
}

struct PoolState {
    in_use: usize,
    idle: Vec<EtcdServers>,
}

static POOL: Pool = Pool { state: Mutex::new(PoolState { in_use: 0, idle: Vec::new() }) };

impl Pool {
    fn take(&self, number: usize) -> EtcdServers {
        let found = {
            let mut state = self.state.lock().unwrap();
            state.in_use += 1;
            let index = state.idle.iter().position(|servers| servers.number() == number);
            index.map(|index| state.idle.remove(index))
        };
        found.unwrap_or_else(|| EtcdServers::start(number))
    }

    fn give_back(&self, servers: EtcdServers) {
        servers.thaw();
        let is_well = (0..servers.number()).all(|node| servers.is_well(node));
        let ended = {
            let mut state = self.state.lock().unwrap();
            state.in_use -= 1;
            if is_well {
                state.idle.push(servers);
            }
            if state.in_use == 0 { std::mem::take(&mut state.idle) } else { Vec::new() }
        };
        drop(ended);
    }
}

#[async_trait]
impl Stage for EtcdStage {
    fn time(&self) -> Time {
        Time::Real
    }

    fn clock(&self) -> Clock {
        Clock::boot()
    }

    fn ttl(&self) -> Duration {
        // An election may take a quarter of it on a busy machine.
        Duration::from_secs(if self.leader_changes { 16 } else { 2 })
    }

    fn expiry_lag(&self) -> Duration {
        self.expiry_lag
    }

    async fn client(&self) -> Lockset {
        Lockset::connect(&self.url()).await.unwrap()
    }

    async fn engine(&self) -> Arc<dyn Engine> {
        let options = EtcdOptions { url: self.url().parse().unwrap(), ..EtcdOptions::default() };
        Arc::new(Etcd::connect(options).await.unwrap())
    }

    async fn other_backend(&self) -> Lockset {
        Lockset::connect(&format!("{}-elsewhere", self.url())).await.unwrap()
    }

    async fn freeze(&self) {
        let servers = self.servers();
        if !self.freeze_kills_leader {
            return servers.freeze();
        }
        let leader = servers.leader();
        servers.kill(leader);
        *self.dead.lock().unwrap() = Some(leader);
        let rest = (0..servers.number()).filter(|node| *node != leader);
        rest.for_each(|node| servers.signal(node, Signal::STOP));
    }

    async fn thaw(&self) {
        let (servers, dead) = (self.servers(), self.dead.lock().unwrap().take());
        let rest = (0..servers.number()).filter(|node| Some(*node) != dead);
        rest.for_each(|node| servers.signal(node, Signal::CONT));
        if let Some(dead) = dead {
            servers.bring_back(dead);
        }
    }

    async fn change_leader(&self) {
        if self.leader_changes {
            let servers = self.servers();
            let leader = servers.leader();
            servers.kill(leader);
            *self.dead.lock().unwrap() = Some(leader);
            until("another leads", || servers.leader() != leader);
        }
    }

    async fn restart(&self) {
        self.servers().restart_leader();
    }

    async fn process(&self) -> Option<Process> {
        Some(Process::start(self.actor, &self.url(), StateSource::Guard))
    }

    async fn linked_client(&self) -> Option<LinkedClient> {
        let proxies = self.servers().proxies();
        let url = self.servers().url_through(&proxies, &self.prefix);
        let locks = Lockset::connect(&url).await.unwrap();
        Some(LinkedClient { locks, link: Box::new(proxies) })
    }
}
