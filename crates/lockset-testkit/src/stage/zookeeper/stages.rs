//! The stage of the ZooKeeper engine.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use lockset::Lockset;
use lockset::clock::Clock;
use lockset::engine::Engine;
use lockset::engine::zookeeper::{ZooKeeper, ZooKeeperOptions};

use super::chroot::Chroot;
use crate::process::Process;
use crate::proxy::Proxy;
use crate::stage::{LinkedClient, Stage, Time};
use crate::steps;

/// One server.
pub type ZooKeeperStage = Chroot<1>;
/// An ensemble of three.
pub type ZooKeeperEnsembleStage = Chroot<3>;

/// The session of every client, and so the ttl of its locks.
const TTL: Duration = Duration::from_secs(2);
/// The same if the leader changes: an election takes up to a quarter of it on a busy machine.
const LONG: Duration = Duration::from_secs(16);

#[async_trait]
impl<const N: usize> Stage for Chroot<N> {
    fn time(&self) -> Time {
        Time::Real
    }

    fn clock(&self) -> Clock {
        Clock::boot()
    }

    fn ttl(&self) -> Duration {
        if self.has_long_sessions() { LONG } else { TTL }
    }

    /// Sessions expire in steps of a tick, and the leader learns of heartbeats through the others.
    fn expiry_lag(&self) -> Duration {
        Duration::from_millis(300)
    }

    async fn client(&self) -> Lockset {
        steps::client(&self.url(), self.ttl()).await
    }

    async fn engine(&self) -> Arc<dyn Engine> {
        let options = ZooKeeperOptions {
            url: self.url().parse().unwrap(),
            session: self.ttl(),
            ..ZooKeeperOptions::default()
        };
        Arc::new(ZooKeeper::connect(options).await.unwrap())
    }

    async fn other_backend(&self) -> Lockset {
        steps::client(&self.url_elsewhere(), self.ttl()).await
    }

    async fn freeze(&self) {
        self.freeze_all();
    }

    async fn thaw(&self) {
        self.thaw_all();
    }

    async fn change_leader(&self) {
        self.kill_leader();
    }

    async fn restart(&self) {
        self.servers().restart_leader();
    }

    async fn linked_client(&self) -> Option<LinkedClient> {
        let nodes = self.servers().nodes();
        let link: Vec<Proxy> = nodes.iter().map(|node| Proxy::before(node.port())).collect();
        let ports: Vec<u16> = link.iter().map(Proxy::port).collect();
        let locks = steps::client(&self.url_by(&ports), self.ttl()).await;
        Some(LinkedClient { locks, link: Box::new(link) })
    }

    async fn process(&self) -> Option<Process> {
        Some(Process::start_with_ttl(self.actor, &self.url(), self.ttl()))
    }
}
