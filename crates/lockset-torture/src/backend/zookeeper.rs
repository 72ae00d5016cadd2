//! A ZooKeeper ensemble of three.

use std::time::Duration;

use lockset_testkit::stage::ZooKeeperServers;

use super::{Backend, EngineKind, Links, Strike, unsupported};
use crate::schedule::Fault;

#[derive(Debug)]
pub(super) struct ZooKeeperBackend {
    servers: ZooKeeperServers,
    links: Links,
}

impl ZooKeeperBackend {
    pub(super) fn start(clients: usize, ttl: Duration) -> Self {
        // A leader that was cut off must notice within a third of the ttl; a tick is 100 ms.
        let ticks = (ttl.as_millis() / 100 / 3).saturating_sub(1).max(2);
        let lines = [format!("syncLimit={ticks}")];
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        let servers = ZooKeeperServers::start_configured(3, &[], &lines);
        let ports: Vec<u16> = servers.nodes().iter().map(|node| node.port()).collect();
        Self { servers, links: Links::new(clients, &ports) }
    }
}

impl Backend for ZooKeeperBackend {
    fn url(&self, client: usize) -> String {
        format!("zk://{}/torture", self.links.hosts(client))
    }

    fn links(&self) -> Option<&Links> {
        Some(&self.links)
    }

    fn strike(&self, fault: Fault, pick: u64) -> Strike<'_> {
        let servers = &self.servers;
        let place = match fault {
            Fault::LeaderKill | Fault::LeaderStop => servers.leader(),
            _ => pick as usize % servers.nodes().len(),
        };
        let (node, target) = (&servers.nodes()[place], format!("server {place}"));
        match fault {
            Fault::ServerStop | Fault::LeaderStop => {
                node.freeze();
                Strike::new(target, || {
                    node.thaw();
                    servers.await_serving();
                })
            }
            Fault::ServerKill | Fault::LeaderKill => {
                node.kill();
                Strike::new(target, || {
                    node.start_again();
                    servers.await_serving();
                })
            }
            _ => unsupported(EngineKind::ZooKeeper, fault),
        }
    }
}
