//! A Redis Cluster of three masters with a replica each.

use lockset_testkit::stage::RedisCluster;
use rustix::process::Signal;

use super::{Backend, EngineKind, Strike, redis, unsupported};
use crate::schedule::Fault;

/// The lock whose slot decides which master is struck.
const STRUCK: &str = "lockset:{m0}";

#[derive(Debug)]
pub(super) struct ClusterBackend {
    cluster: RedisCluster,
}

impl ClusterBackend {
    pub(super) fn start() -> Self {
        Self { cluster: RedisCluster::start_with_replicas() }
    }
}

impl Backend for ClusterBackend {
    fn url(&self, _: usize) -> String {
        self.cluster.url()
    }

    fn strike(&self, fault: Fault, _: u64) -> Strike<'_> {
        let cluster = &self.cluster;
        let slot = cluster.slot_of(STRUCK);
        let owner = cluster.owner(slot);
        let node = &cluster.nodes()[owner];
        let target = format!("master {owner}");
        match fault {
            Fault::LeaderKill => {
                node.kill();
                Strike::new(target, move || {
                    cluster.await_promotion(owner, slot);
                    node.restart();
                    cluster.await_ok();
                })
            }
            Fault::LeaderStop => {
                node.signal(Signal::STOP);
                Strike::new(target, move || {
                    cluster.await_promotion(owner, slot);
                    node.signal(Signal::CONT);
                    cluster.await_ok();
                })
            }
            Fault::Disconnect | Fault::ScriptFlush => redis::ask(node, fault, &target),
            _ => unsupported(EngineKind::Cluster, fault),
        }
    }
}
