//! The nodes of a Redis Cluster, and which of them serves a slot.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::Value;
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::connect::RedisAddress;
use super::connection::ManagedConnection;
use super::error::{classify, unreachable_error, with_server};
use super::reconnect::RedisConnector;
use super::routing::{MIN_REDIRECT_PAUSE, RedisNode};
use super::slots::{SlotMap, most_replicas, parse_slot_ranges};
use crate::error::Result;
use crate::report::report;
use crate::sync;

/// The time in which a node must report the slots of its cluster, connecting included.
const SLOTS_TIMEOUT: Duration = Duration::from_millis(500);

/// The nodes of a cluster; each is connected when it is first needed.
#[derive(Debug)]
pub(super) struct RedisCluster {
    connector: RedisConnector,
    slots: Arc<SlotMap>,
    nodes: Mutex<HashMap<RedisAddress, Arc<RedisNode>>>,
    refreshed_at: tokio::sync::Mutex<Option<Instant>>,
    pub(super) runtime: Handle,
}

impl RedisCluster {
    pub(super) async fn open(connector: RedisConnector, slots: Arc<SlotMap>) -> Result<Self> {
        let cluster = Self {
            connector,
            slots,
            nodes: Mutex::default(),
            refreshed_at: tokio::sync::Mutex::default(),
            runtime: Handle::current(),
        };
        cluster.load_slots().await?;
        Ok(cluster)
    }

    pub(super) fn node_for_slot(&self, slot: u16) -> Option<Arc<RedisNode>> {
        self.slots.owner(slot).map(|master| self.node_at(&master))
    }

    /// All masters, as the cluster reports them now.
    pub(super) async fn masters(&self) -> Vec<Arc<RedisNode>> {
        self.refresh_slots().await;
        self.slots.masters().iter().map(|master| self.node_at(master)).collect()
    }

    pub(super) fn close(&self) {
        sync::lock(&self.nodes).values().for_each(|node| node.connection.close());
    }

    fn node_at(&self, master: &RedisAddress) -> Arc<RedisNode> {
        let mut nodes = sync::lock(&self.nodes);
        let node = nodes.entry(master.clone()).or_insert_with(|| {
            // Its tasks run where the client's do, not on the caller's runtime.
            let _entered = self.runtime.enter();
            let connector = RedisConnector { node: Some(master.clone()), ..self.connector.clone() };
            let connection = ManagedConnection::start(connector.clone());
            Arc::new(RedisNode::new(connector, connection))
        });
        node.clone()
    }

    /// Reloads the slots, unless that was done a moment ago.
    pub(super) async fn refresh_slots(&self) {
        let mut refreshed_at = self.refreshed_at.lock().await;
        if refreshed_at.is_some_and(|at| at.elapsed() < MIN_REDIRECT_PAUSE) {
            return;
        }
        if let Err(error) = self.load_slots().await {
            report!(debug, error = error, "no node reports the slots of the cluster");
        }
        *refreshed_at = Some(Instant::now());
    }

    /// Any node reports the slots. The order is random, because one node may be cut off.
    async fn load_slots(&self) -> Result<()> {
        let mut known = self.slots.masters();
        known.extend(self.connector.servers.hosts.iter().cloned());
        let first = rand::random_range(0..known.len().max(1));
        known.rotate_left(first);
        let mut why = unreachable_error("no node is known".to_owned(), false, None);
        for address in known {
            match self.load_slots_from(&address).await {
                Ok(()) => return Ok(()),
                Err(error) => why = error,
            }
        }
        Err(why)
    }

    async fn load_slots_from(&self, address: &RedisAddress) -> Result<()> {
        let open = sync::lock(&self.nodes).get(address).and_then(|node| node.connection.current());
        let query = async {
            let mut multiplexed = match open {
                Some(connection) => connection.multiplexed.clone(),
                None => {
                    let client = self.connector.servers.client(address)?;
                    client.get_multiplexed_async_connection().await?
                }
            };
            let mut both = redis::pipe();
            both.cmd("CLUSTER").arg("SLOTS").cmd("CLUSTER").arg("NODES");
            both.query_async::<(Value, String)>(&mut multiplexed).await
        };
        let (slots, nodes) = match tokio::time::timeout(SLOTS_TIMEOUT, query).await {
            Ok(reply) => {
                reply.map_err(|error| with_server(address, classify(error).into_error()))?
            }
            Err(_) => {
                let what = format!("no answer within {SLOTS_TIMEOUT:?}");
                return Err(with_server(address, unreachable_error(what, true, None)));
            }
        };
        let ranges = parse_slot_ranges(&slots, address)?;
        self.connector.replicas.fetch_max(most_replicas(&nodes), Ordering::Relaxed);
        if ranges.is_empty() {
            let what = "the node serves no slots: it is in no cluster yet".to_owned();
            return Err(with_server(address, unreachable_error(what, true, None)));
        }
        self.slots.replace(ranges);
        let masters = self.slots.masters();
        sync::lock(&self.nodes).retain(|address, _| masters.contains(address));
        Ok(())
    }
}
