//! The stage of the Redlock engine: five independent Redis servers.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use lockset::Lockset;
use lockset::clock::Clock;
use lockset::engine::redis::{Redis, RedisOptions};
use lockset::engine::redlock::{Redlock, RedlockOptions};
use lockset::engine::{Engine, FencedNode};
use rustix::process::Signal;

use super::{RedisServer, Stage, Time};
use crate::process::{Process, StateSource};
use crate::proxy::Proxy;

/// Options that make a server keep every acknowledged write.
pub const DURABLE: &[&str] = &["--appendonly", "yes", "--appendfsync", "always"];

/// The nodes of a quorum.
#[derive(Debug)]
pub struct RedlockNodes {
    /// The servers, in the order of the URL.
    pub nodes: Vec<RedisServer>,
}

impl RedlockNodes {
    /// Starts `count` servers with these options.
    pub fn start(count: usize, options: &[&str]) -> Self {
        Self { nodes: (0..count).map(|_| RedisServer::start_with(options)).collect() }
    }

    /// The URL of the quorum.
    pub fn url(&self) -> String {
        url_of(self.nodes.iter().map(RedisServer::port))
    }

    /// The same, with one of them behind a proxy.
    pub fn url_through(&self, node: usize, proxy: &Proxy) -> String {
        let nodes = self.nodes.iter().enumerate();
        url_of(nodes.map(|(place, one)| if place == node { proxy.port() } else { one.port() }))
    }

    /// An engine with fresh connections to all nodes.
    pub async fn engine(&self) -> Redlock {
        let mut nodes = Vec::<Arc<dyn FencedNode>>::new();
        for node in &self.nodes {
            let options =
                RedisOptions { url: node.url().parse().unwrap(), ..RedisOptions::default() };
            nodes.push(Arc::new(Redis::connect(options).await.unwrap()));
        }
        Redlock::over(nodes, RedlockOptions::default(), Clock::boot()).unwrap()
    }

    /// Sends a signal to these servers.
    pub fn signal(&self, nodes: &[usize], signal: Signal) {
        nodes.iter().for_each(|node| self.nodes[*node].signal(signal));
    }
}

fn url_of(ports: impl Iterator<Item = u16>) -> String {
    let hosts: Vec<_> = ports.map(|port| format!("127.0.0.1:{port}")).collect();
    format!("redlock://{}", hosts.join(","))
}

/// Five servers for one law.
#[derive(Debug)]
pub struct RedlockStage {
    servers: RedlockNodes,
    actor: &'static str,
}

impl RedlockStage {
    /// An empty backend; see [`LocalStage::start`](super::LocalStage::start).
    pub fn start(actor: &'static str) -> Self {
        Self { servers: RedlockNodes::start(5, DURABLE), actor }
    }
}

#[async_trait]
impl Stage for RedlockStage {
    fn time(&self) -> Time {
        Time::Real
    }

    fn clock(&self) -> Clock {
        Clock::boot()
    }

    fn ttl(&self) -> Duration {
        Duration::from_millis(1200)
    }

    async fn client(&self) -> Lockset {
        Lockset::connect(&self.servers.url()).await.unwrap()
    }

    async fn engine(&self) -> Arc<dyn Engine> {
        Arc::new(self.servers.engine().await)
    }

    async fn other_backend(&self) -> Lockset {
        Lockset::connect(&format!("{}?prefix=elsewhere:", self.servers.url())).await.unwrap()
    }

    async fn freeze(&self) {
        self.servers.signal(&[0, 1, 2, 3, 4], Signal::STOP);
    }

    async fn thaw(&self) {
        self.servers.signal(&[0, 1, 2, 3, 4], Signal::CONT);
    }

    async fn restart(&self) {
        self.servers.nodes.iter().for_each(RedisServer::restart);
    }

    async fn process(&self) -> Option<Process> {
        Some(Process::start(self.actor, &self.servers.url(), StateSource::Guard))
    }
}
