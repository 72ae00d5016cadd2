//! The connections between clients and servers, each through a proxy.

use std::time::Duration;

use lockset_testkit::proxy::Proxy;
use lockset_testkit::stage::{Link, LinkState};

use super::Strike;
use crate::schedule::Fault;

/// A proxy for each client and each server.
#[derive(Debug)]
pub struct Links {
    /// By client, then by server.
    proxies: Vec<Vec<Proxy>>,
}

impl Links {
    /// Proxies before the servers on these ports.
    pub fn new(clients: usize, servers: &[u16]) -> Self {
        let of_client = |_| servers.iter().map(|&port| Proxy::before(port)).collect();
        Self { proxies: (0..clients).map(of_client).collect() }
    }

    /// The addresses of the servers for this client, as in a URL.
    pub fn hosts(&self, client: usize) -> String {
        let hosts = self.proxies[client].iter().map(|proxy| format!("127.0.0.1:{}", proxy.port()));
        hosts.collect::<Vec<_>>().join(",")
    }

    /// Begins a fault of the connections; `None` if it is a fault of something else.
    pub fn strike(&self, fault: Fault, pick: u64) -> Option<Strike<'_>> {
        let client = pick as usize % self.proxies.len();
        let own = &self.proxies[client];
        let name = format!("c{client}");
        Some(match fault {
            Fault::ClientCut => {
                own.set(LinkState::Closed);
                Strike::new(name, || own.set(LinkState::Up))
            }
            Fault::ClientSilent => {
                own.set(LinkState::Silent);
                Strike::new(name, || own.set(LinkState::Up))
            }
            Fault::NodeCut => self.silence(pick, 1),
            Fault::MajorityCut => self.silence(pick, own.len() / 2 + 1),
            Fault::Delay => {
                let delay = Duration::from_millis(20 + pick / 7 % 200);
                own.iter().for_each(|proxy| proxy.set_delay(delay));
                Strike::new(format!("{name}, {delay:?}"), || {
                    own.iter().for_each(|proxy| proxy.set_delay(Duration::ZERO));
                })
            }
            Fault::Drop => {
                own.iter().for_each(Proxy::drop_replies);
                Strike::new(name, || own.iter().for_each(Proxy::cut))
            }
            Fault::Late => {
                own.iter().for_each(Proxy::hold_requests);
                std::thread::sleep(Duration::from_millis(300));
                own.iter().for_each(Proxy::cut);
                Strike::new(name, || own.iter().for_each(Proxy::release_requests))
            }
            Fault::Duplicate => {
                let later = Duration::from_millis(pick / 7 % 2000);
                own.iter().for_each(|proxy| proxy.set_repeat(Some(later)));
                Strike::new(format!("{name}, {later:?} later"), move || {
                    own.iter().for_each(|proxy| proxy.set_repeat(None));
                    std::thread::sleep(later);
                })
            }
            _ => return None,
        })
    }

    /// Cuts `count` servers off from all clients.
    fn silence(&self, pick: u64, count: usize) -> Strike<'_> {
        let servers = self.proxies[0].len();
        let struck: Vec<usize> = (0..count).map(|n| (pick as usize + n) % servers).collect();
        let target = format!("servers {struck:?}");
        self.set_silent(&struck, true);
        Strike::new(target, move || self.set_silent(&struck, false))
    }

    fn set_silent(&self, servers: &[usize], silent: bool) {
        for client in &self.proxies {
            servers.iter().for_each(|&server| client[server].set_silent(silent));
        }
    }
}
