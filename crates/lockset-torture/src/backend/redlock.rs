//! Five independent Redis servers, two of which may lose their data.

use std::time::Duration;

use lockset_testkit::stage::{ClockSkew, DURABLE, RedisServer};

use super::{Backend, EngineKind, Links, Strike, redis};
use crate::schedule::Fault;

/// The first servers keep what they acknowledged, and say so. The others do not, so clients do not
/// count them for `max_ttl` after a start.
const DURABLE_SERVERS: usize = 3;
const SERVERS: usize = 5;

#[derive(Debug)]
pub(super) struct RedlockBackend {
    servers: Vec<(RedisServer, ClockSkew)>,
    links: Links,
    ttl: Duration,
}

impl RedlockBackend {
    pub(super) fn start(clients: usize, ttl: Duration) -> Self {
        let start = |index| {
            let skew = ClockSkew::new();
            let options = if index < DURABLE_SERVERS { DURABLE } else { &[] };
            (RedisServer::start_skewed(&skew, options), skew)
        };
        let servers: Vec<_> = (0..SERVERS).map(start).collect();
        let ports: Vec<u16> = servers.iter().map(|(server, _)| server.port()).collect();
        Self { servers, links: Links::new(clients, &ports), ttl }
    }
}

impl Backend for RedlockBackend {
    fn url(&self, client: usize) -> String {
        let max_ttl = self.ttl.as_millis();
        format!("redlock://{}?max_ttl={max_ttl}ms", self.links.hosts(client))
    }

    fn links(&self) -> Option<&Links> {
        Some(&self.links)
    }

    fn strike(&self, fault: Fault, pick: u64) -> Strike<'_> {
        let pick = pick as usize;
        let place = match fault {
            Fault::ServerKill => pick % DURABLE_SERVERS,
            Fault::ServerWipe => DURABLE_SERVERS + pick % (SERVERS - DURABLE_SERVERS),
            _ => pick % SERVERS,
        };
        let (server, skew) = &self.servers[place];
        let target = format!("server {place}");
        redis::strike(EngineKind::Redlock, server, skew, self.ttl, fault, &target)
    }
}
