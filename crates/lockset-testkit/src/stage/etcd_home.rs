//! Homes on etcd servers that several laws use one after the other, each with a prefix of its own.

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
use super::{Linked, Stage, Time};
use crate::process::{Judging, Process};
use crate::steps::until;

/// An empty prefix on one server, or on a cluster of three, for one law.
#[derive(Debug)]
pub struct EtcdStage {
    /// `None` only while it is dropped.
    servers: Option<EtcdServers>,
    prefix: String,
    lag: Duration,
    actor: &'static str,
    leader_dies: bool,
    leader_is_succeeded: bool,
    /// The leader that died, and is to come back.
    dead: Mutex<Option<usize>>,
}

impl EtcdStage {
    /// An empty home on one server; see [`LocalStage::start`](super::LocalStage::start).
    pub fn start(actor: &'static str) -> Self {
        // etcd looks at its leases twice a second.
        Self::start_on(1, Duration::from_millis(700), actor)
    }

    /// An empty home on a cluster, whose leader is the one that ends when the home begins again.
    pub fn start_cluster(actor: &'static str) -> Self {
        // A new leader lets all leases begin anew, and first it must be elected.
        Self::start_on(3, Duration::from_secs(2), actor)
    }

    /// When the home freezes its leader does not only stop but dies, and comes back in the thaw.
    pub fn whose_leader_dies(mut self) -> Self {
        self.leader_dies = true;
        self
    }

    /// The leader dies in the middle of a law, the others elect another and go on. All leases last
    /// long enough for that.
    pub fn whose_leader_is_succeeded(mut self) -> Self {
        self.leader_is_succeeded = true;
        // Clients begin with the first, and are to feel that it dies.
        self.servers().make_lead(0);
        self
    }

    fn start_on(number: usize, lag: Duration, actor: &'static str) -> Self {
        static HOMES: AtomicU32 = AtomicU32::new(0);
        let home = HOMES.fetch_add(1, Ordering::Relaxed);
        let servers = Some(POOL.take(number));
        let prefix = format!("home{home}");
        let (leader_dies, leader_is_succeeded, dead) = (false, false, Mutex::new(None));
        Self { servers, prefix, lag, actor, leader_dies, leader_is_succeeded, dead }
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
                // A law left it so; the pool wants to signal all of them.
                servers.bring_back(dead);
            }
            POOL.give_back(servers);
        }
    }
}

/// Servers that no law uses at the moment. They are kept only while another law is being played:
/// nothing in this process would end them after the last.
struct Pool {
    desk: Mutex<Desk>,
}

struct Desk {
    in_use: usize,
    idle: Vec<EtcdServers>,
}

static POOL: Pool = Pool { desk: Mutex::new(Desk { in_use: 0, idle: Vec::new() }) };

impl Pool {
    fn take(&self, number: usize) -> EtcdServers {
        let found = {
            let mut desk = self.desk.lock().unwrap();
            desk.in_use += 1;
            let place = desk.idle.iter().position(|servers| servers.number() == number);
            place.map(|place| desk.idle.remove(place))
        };
        found.unwrap_or_else(|| EtcdServers::start(number))
    }

    fn give_back(&self, servers: EtcdServers) {
        servers.thaw();
        let is_well = (0..servers.number()).all(|node| servers.is_well(node));
        let ended = {
            let mut desk = self.desk.lock().unwrap();
            desk.in_use -= 1;
            if is_well {
                desk.idle.push(servers);
            }
            if desk.in_use == 0 { std::mem::take(&mut desk.idle) } else { Vec::new() }
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
        // An election may take a quarter of it, also on a busy machine.
        Duration::from_secs(if self.leader_is_succeeded { 16 } else { 2 })
    }

    fn lag(&self) -> Duration {
        self.lag
    }

    async fn client(&self) -> Lockset {
        Lockset::connect(&self.url()).await.unwrap()
    }

    async fn engine(&self) -> Arc<dyn Engine> {
        let options = EtcdOptions { url: self.url(), ..EtcdOptions::default() };
        Arc::new(Etcd::connect(options).await.unwrap())
    }

    async fn elsewhere(&self) -> Lockset {
        Lockset::connect(&format!("{}-elsewhere", self.url())).await.unwrap()
    }

    async fn freeze(&self) {
        let servers = self.servers();
        if !self.leader_dies {
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
        if self.leader_is_succeeded {
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
        Some(Process::start(self.actor, &self.url(), Judging::ByTheGuard))
    }

    async fn linked(&self) -> Option<Linked> {
        let proxies = self.servers().proxies();
        let url = self.servers().url_through(&proxies, &self.prefix);
        let locks = Lockset::connect(&url).await.unwrap();
        Some(Linked { locks, link: Box::new(proxies) })
    }
}
