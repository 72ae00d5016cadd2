//! One Redis server that keeps what it acknowledged, unless its data is removed.

use std::time::Duration;

use lockset_testkit::stage::{ClockSkew, DURABLE, RedisServer};
use rustix::process::Signal;

use super::{Backend, EngineKind, Links, Strike, unsupported};
use crate::schedule::Fault;

/// How far a clock jumps, as a part of the ttl: far enough to end a lease early.
pub(super) const JUMP: f64 = 1.2;

#[derive(Debug)]
pub(super) struct RedisBackend {
    server: RedisServer,
    skew: ClockSkew,
    links: Links,
    ttl: Duration,
}

impl RedisBackend {
    pub(super) fn start(clients: usize, ttl: Duration) -> Self {
        let skew = ClockSkew::new();
        let server = RedisServer::start_skewed(&skew, DURABLE);
        let links = Links::new(clients, &[server.port()]);
        Self { server, skew, links, ttl }
    }
}

impl Backend for RedisBackend {
    fn url(&self, client: usize) -> String {
        format!("redis://{}", self.links.hosts(client))
    }

    fn links(&self) -> Option<&Links> {
        Some(&self.links)
    }

    fn strike(&self, fault: Fault, _: u64) -> Strike<'_> {
        strike(EngineKind::Redis, &self.server, &self.skew, self.ttl, fault, "the server")
    }
}

/// A fault of one server, of this engine or of a quorum.
pub(super) fn strike<'a>(
    engine: EngineKind,
    server: &'a RedisServer,
    skew: &'a ClockSkew,
    ttl: Duration,
    fault: Fault,
    target: &str,
) -> Strike<'a> {
    let jump = ttl.mul_f64(JUMP).as_millis() as i64;
    match fault {
        Fault::ServerStop => {
            server.signal(Signal::STOP);
            Strike::new(target, || server.signal(Signal::CONT))
        }
        Fault::ServerKill => {
            server.kill();
            Strike::new(target, || server.restart())
        }
        Fault::ServerWipe => {
            server.kill();
            Strike::new(target, || server.restart_empty())
        }
        // A jump and its way back are a jump forward and one back, in this or the other order.
        Fault::ClockForward => {
            skew.set(jump);
            Strike::new(format!("{target}, +{jump} ms"), || skew.set(0))
        }
        Fault::ClockBack => {
            skew.set(-jump);
            Strike::new(format!("{target}, -{jump} ms"), || skew.set(0))
        }
        Fault::Disconnect | Fault::ScriptFlush => ask(server, fault, target),
        _ => unsupported(engine, fault),
    }
}

/// A fault that is a command.
pub(super) fn ask<'a>(server: &RedisServer, fault: Fault, target: &str) -> Strike<'a> {
    let command: &[&str] = match fault {
        Fault::Disconnect => &["CLIENT", "KILL", "TYPE", "normal"],
        _ => &["SCRIPT", "FLUSH"],
    };
    server.ask(command);
    if fault == Fault::Disconnect {
        server.ask(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    }
    Strike::new(target, || ())
}
