//! An etcd cluster of three.

use lockset_testkit::stage::EtcdServers;
use rustix::process::Signal;

use super::{Backend, EngineKind, Links, Strike, unsupported};
use crate::oracle::LEADER;
use crate::schedule::Fault;

#[derive(Debug)]
pub(super) struct EtcdBackend {
    servers: EtcdServers,
    links: Links,
}

impl EtcdBackend {
    pub(super) fn start(clients: usize) -> Self {
        let servers = EtcdServers::start(3);
        let ports: Vec<u16> = (0..servers.number()).map(|node| servers.port(node)).collect();
        Self { servers, links: Links::new(clients, &ports) }
    }
}

impl Backend for EtcdBackend {
    fn url(&self, client: usize) -> String {
        format!("etcd://{}/torture", self.links.hosts(client))
    }

    fn links(&self) -> Option<&Links> {
        Some(&self.links)
    }

    fn strike(&self, fault: Fault, pick: u64) -> Strike<'_> {
        let servers = &self.servers;
        let leader = servers.leader();
        let place = match fault {
            Fault::LeaderKill | Fault::LeaderStop => leader,
            _ => pick as usize % servers.number(),
        };
        // The oracle excepts something only if it led.
        let role = if place == leader { LEADER } else { "" };
        let target = format!("server {place}{role}");
        match fault {
            Fault::ServerStop | Fault::LeaderStop => {
                servers.signal(place, Signal::STOP);
                Strike::new(target, move || {
                    servers.signal(place, Signal::CONT);
                    servers.await_well();
                })
            }
            Fault::ServerKill | Fault::LeaderKill => {
                servers.kill(place);
                Strike::new(target, move || {
                    servers.bring_back(place);
                    servers.await_well();
                })
            }
            _ => unsupported(EngineKind::Etcd, fault),
        }
    }
}
