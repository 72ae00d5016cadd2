//! Routing: to the node that serves a name, over the client's main connection or over one that
//! lives on the caller's runtime.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::runtime::{Handle, Id};
use tokio::sync::watch;
use tokio::time::Instant;

use super::cluster::RedisCluster;
use super::connect::{Deployment, RedisServers};
use super::connection::{ManagedConnection, RedisConnection};
use super::error::{RedisRequestError, unreachable_error};
use super::push::{OnPush, RedisInbox};
use super::reconnect::RedisConnector;
use super::scripts::Scripts;
use super::slots::SlotMap;
use super::wait_replicas::ReplicaConnections;
use crate::engine::common::backoff::Backoff;
use crate::error::{Error, Result};
use crate::sync;

/// A runtime gets a connection of its own after this many requests over the main one. Occasional
/// users of locks need none.
const REQUESTS_BEFORE_OPENING: u32 = 32;
/// Maximum runtimes with a connection of their own, in case a program creates many of them.
const MAX_RUNTIMES: usize = 8;
/// The first and the longest pause before a request is sent again because its node was the wrong
/// one or was down. The slots are not reloaded more often than by the first.
pub(super) const MIN_REDIRECT_PAUSE: Duration = Duration::from_millis(5);
const MAX_REDIRECT_PAUSE: Duration = Duration::from_millis(100);

/// All servers of a client.
#[derive(Debug)]
pub(super) struct RedisRouter {
    topology: Topology,
    reconnects: watch::Receiver<u64>,
}

#[derive(Debug)]
enum Topology {
    Single(Arc<RedisNode>),
    Cluster(Box<RedisCluster>),
}

impl RedisRouter {
    /// Connects, on the caller's runtime.
    pub(super) async fn open(
        servers: RedisServers,
        inbox: String,
        on_push: OnPush,
        scripts: Arc<Scripts>,
    ) -> Result<Self> {
        let (sender, reconnects) = watch::channel(0);
        let slots = (servers.deployment == Deployment::Cluster).then(Arc::<SlotMap>::default);
        let connector = RedisConnector {
            servers: Arc::new(servers),
            node: None,
            inbox: RedisInbox { base: inbox, slots: slots.clone() },
            on_push,
            scripts,
            replicas: Arc::default(),
            reconnects: sender,
        };
        let topology = match slots {
            None => Topology::Single(Arc::new(RedisNode::open(connector).await?)),
            Some(slots) => Topology::Cluster(Box::new(RedisCluster::open(connector, slots).await?)),
        };
        Ok(Self { topology, reconnects })
    }

    /// Changes whenever a main connection was replaced.
    pub(super) fn reconnects(&self) -> watch::Receiver<u64> {
        self.reconnects.clone()
    }

    /// In a cluster, claims of different slots cannot share a script.
    pub(super) fn is_cluster(&self) -> bool {
        matches!(self.topology, Topology::Cluster(_))
    }

    /// The connection for a request, if there is only one server and it is connected.
    pub(super) fn direct_connection(&self) -> Option<Arc<RedisConnection>> {
        match &self.topology {
            Topology::Single(node) => {
                node.connection.current().map(|main| node.connection_for_caller(main))
            }
            Topology::Cluster(_) => None,
        }
    }

    /// The route of a request to the node that serves `slot`.
    pub(super) fn route(&self, slot: u16, timeout: Duration) -> Route<'_> {
        let backoff = Backoff::new(MIN_REDIRECT_PAUSE, MAX_REDIRECT_PAUSE);
        Route { router: self, slot, until: Instant::now() + timeout, backoff }
    }

    /// All nodes that have keys.
    pub(super) async fn masters(&self) -> Vec<Arc<RedisNode>> {
        match &self.topology {
            Topology::Single(node) => vec![node.clone()],
            Topology::Cluster(cluster) => cluster.masters().await,
        }
    }

    /// The runtime on which the main connections live.
    pub(super) fn runtime(&self) -> &Handle {
        match &self.topology {
            Topology::Single(node) => &node.runtime,
            Topology::Cluster(cluster) => &cluster.runtime,
        }
    }

    pub(super) fn close(&self) {
        match &self.topology {
            Topology::Single(node) => node.connection.close(),
            Topology::Cluster(cluster) => cluster.close(),
        }
    }
}

/// The route of one request. In a cluster it may lead over more than one node.
pub(super) struct Route<'a> {
    router: &'a RedisRouter,
    slot: u16,
    until: Instant,
    backoff: Backoff,
}

impl Route<'_> {
    /// The node to send to now, and the time left.
    pub(super) async fn next_node(
        &mut self,
    ) -> std::result::Result<(Arc<RedisNode>, Duration), RedisRequestError> {
        let what = "the time was over before it could be asked".to_owned();
        let mut why = unreachable_error(what, true, None);
        loop {
            let left = self.until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                // If it were sent now, its reply would not be awaited and its outcome unknown.
                return Err(RedisRequestError::Refused(why));
            }
            let cluster = match &self.router.topology {
                Topology::Single(node) => return Ok((node.clone(), left)),
                Topology::Cluster(cluster) => cluster,
            };
            let down = match cluster.node_for_slot(self.slot) {
                None => {
                    let what = "no node serves this lock at the moment".to_owned();
                    unreachable_error(what, true, None)
                }
                // A node that is down may have a successor: reload the slots soon.
                Some(node) => match node.connection.connected(left.min(MAX_REDIRECT_PAUSE)).await {
                    Ok(_) => return Ok((node, left)),
                    Err(down) => down.into_error(),
                },
            };
            why = down.clone();
            self.refresh_slots(cluster, down).await.map_err(RedisRequestError::Refused)?;
        }
    }

    /// Returns the reply, or `None` if the request must go to another node.
    pub(super) async fn redirect<T>(
        &mut self,
        reply: std::result::Result<T, RedisRequestError>,
    ) -> Option<std::result::Result<T, RedisRequestError>> {
        match (reply, &self.router.topology) {
            (Err(RedisRequestError::WrongNode(error)), Topology::Single(_)) => {
                Some(Err(RedisRequestError::Refused(error)))
            }
            (Err(RedisRequestError::WrongNode(error)), Topology::Cluster(cluster)) => {
                let refused = self.refresh_slots(cluster, error).await.err()?;
                Some(Err(RedisRequestError::Refused(refused)))
            }
            (reply, _) => Some(reply),
        }
    }

    /// Reloads the slots, then pauses. Fails with `why` when the time is over.
    async fn refresh_slots(&mut self, cluster: &RedisCluster, why: Error) -> Result<()> {
        if Instant::now() >= self.until {
            return Err(why);
        }
        cluster.refresh_slots().await;
        self.backoff.pause().await;
        Ok(())
    }
}

/// A server that has keys.
pub(super) struct RedisNode {
    pub(super) connection: ManagedConnection,
    pub(super) connector: RedisConnector,
    pub(super) replica_connections: ReplicaConnections,
    /// Few entries, so a list is faster than a map.
    per_runtime: Mutex<Vec<(Id, PerRuntime)>>,
    pub(super) runtime: Handle,
}

/// The extra connection of a runtime that makes many requests.
enum PerRuntime {
    /// The number of requests so far.
    Counting(u32),
    Opening,
    /// It goes with the main connection that was current when it was opened.
    Open {
        connection: Arc<RedisConnection>,
        main: Arc<RedisConnection>,
    },
}

impl RedisNode {
    /// Connects. A node of a quorum connects in the background, since it may be down for now.
    async fn open(connector: RedisConnector) -> Result<Self> {
        let connection = match &connector.servers.quorum {
            None => ManagedConnection::open(connector.clone()).await?,
            Some(_) => ManagedConnection::start(connector.clone()),
        };
        Ok(Self::new(connector, connection))
    }

    pub(super) fn new(connector: RedisConnector, connection: ManagedConnection) -> Self {
        Self {
            connection,
            connector,
            replica_connections: ReplicaConnections::default(),
            per_runtime: Mutex::default(),
            runtime: Handle::current(),
        }
    }

    /// The greatest number of replicas seen so far.
    pub(super) fn replicas(&self) -> u32 {
        self.connector.replicas.load(Ordering::Relaxed)
    }

    /// The connection for a request of the caller: one on the caller's runtime if that makes many
    /// requests, so that no other thread has to be woken.
    pub(super) fn connection_for_caller(
        self: &Arc<Self>,
        main: Arc<RedisConnection>,
    ) -> Arc<RedisConnection> {
        let Ok(runtime) = Handle::try_current() else { return main };
        if runtime.id() == self.runtime.id() {
            return main;
        }
        let mut per_runtime = sync::lock(&self.per_runtime);
        let entry = entry_of(&mut per_runtime, runtime.id());
        match entry {
            PerRuntime::Open { connection, main: of }
                if !connection.is_closed() && Arc::ptr_eq(of, &main) =>
            {
                return connection.clone();
            }
            PerRuntime::Open { .. } => *entry = PerRuntime::Counting(0),
            PerRuntime::Opening => {}
            PerRuntime::Counting(count) if *count < REQUESTS_BEFORE_OPENING => *count += 1,
            PerRuntime::Counting(_) => {
                *entry = PerRuntime::Opening;
                let (node, main) = (self.clone(), main.clone());
                runtime.spawn(async move { node.open_per_runtime(main).await });
            }
        }
        main
    }

    async fn open_per_runtime(self: Arc<Self>, main: Arc<RedisConnection>) {
        let entry = match self.connector.connect_extra(&main).await {
            Ok(connection) => PerRuntime::Open { connection: Arc::new(connection), main },
            Err(_) => PerRuntime::Counting(0),
        };
        *entry_of(&mut sync::lock(&self.per_runtime), Handle::current().id()) = entry;
    }
}

/// The entry of a runtime, a new one if it has none.
fn entry_of(per_runtime: &mut Vec<(Id, PerRuntime)>, runtime: Id) -> &mut PerRuntime {
    let known = per_runtime.iter().position(|(id, _)| *id == runtime);
    let index = known.unwrap_or_else(|| {
        if per_runtime.len() >= MAX_RUNTIMES {
            per_runtime.clear();
        }
        per_runtime.push((runtime, PerRuntime::Counting(0)));
        per_runtime.len() - 1
    });
    &mut per_runtime[index].1
}

impl std::fmt::Debug for RedisNode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisNode").field("connection", &self.connection).finish_non_exhaustive()
    }
}
