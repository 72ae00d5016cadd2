//! Opening connections, and replacing the main one whenever it breaks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use redis::{AsyncConnectionConfig, PushInfo, PushKind, RedisError, Value};
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::connect::{Deployment, RedisAddress, RedisServers};
use super::connection::{
    PROBE_INTERVAL, RedisConnection, RedisConnectionState, RedisConnectionStatus, TrackingState,
};
use super::error::{RedisRequestError, classify, unreachable_error, with_server};
use super::health::RedisServerInfo;
use super::push::{OnPush, RedisInbox, RedisPush, subscribe};
use super::scripts::Scripts;
use crate::engine::common::backoff::{Backoff, RETRY};
use crate::engine::common::batch::Batcher;
use crate::error::Error;

/// The time in which a new connection must be ready, login and subscription included.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Pauses between attempts to connect to a node that is a replica: it may be promoted soon, or stay
/// one for ever.
const REPLICA_RETRY: Backoff = Backoff::new(Duration::from_millis(20), PROBE_INTERVAL);

/// Opens connections to one server, or to the current master.
#[derive(Clone)]
pub(super) struct RedisConnector {
    pub(super) servers: Arc<RedisServers>,
    /// The node, if this is a cluster.
    pub(super) node: Option<RedisAddress>,
    pub(super) inbox: RedisInbox,
    pub(super) on_push: OnPush,
    pub(super) scripts: Arc<Scripts>,
    /// The greatest number of replicas seen so far.
    pub(super) replicas: Arc<AtomicU32>,
    /// Counts the main connections that were replaced.
    pub(super) reconnects: watch::Sender<u64>,
}

impl std::fmt::Debug for RedisConnector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisConnector").field("servers", &self.servers).finish_non_exhaustive()
    }
}

impl RedisConnector {
    /// Opens the main connection.
    pub(super) async fn connect(&self) -> Result<RedisConnection, Error> {
        let (address, replicas) = match (&self.node, &self.servers.deployment) {
            (Some(node), _) => (node.clone(), 0),
            (None, Deployment::Sentinel(service)) => {
                let master = self.servers.master(service).await?;
                (master.address, master.replicas)
            }
            (None, _) => (self.servers.hosts.first().cloned().unwrap_or_default(), 0),
        };
        self.replicas.fetch_max(replicas, Ordering::Relaxed);
        let inbox = self.inbox.channel_at(&address);
        self.connect_to(address, inbox, true).await
    }

    /// Opens an extra connection to the server of `main`, on the caller's runtime. It does not
    /// subscribe: messages arrive on `main`.
    pub(super) async fn connect_extra(
        &self,
        main: &RedisConnection,
    ) -> Result<RedisConnection, Error> {
        self.connect_to(main.address.clone(), main.inbox.clone(), false).await
    }

    /// Opens an extra connection to which the server pushes every change of a key with one of these
    /// prefixes.
    pub(super) async fn connect_tracking(
        &self,
        main: &RedisConnection,
        on_push: OnPush,
        prefixes: &[String],
    ) -> Result<RedisConnection, RedisRequestError> {
        let connector = Self { on_push, ..self.clone() };
        // Any failure to connect may be temporary.
        let connection = connector.connect_extra(main).await.map_err(RedisRequestError::Unknown)?;
        connection.track_prefixes(prefixes).await.map(|()| connection)
    }

    async fn connect_to(
        &self,
        address: RedisAddress,
        inbox: String,
        is_main: bool,
    ) -> Result<RedisConnection, Error> {
        let connecting = async {
            let (connection, info) =
                self.try_connect(address.clone(), inbox, is_main).await.map_err(classify)?;
            if let (Some(quorum), Some(info)) = (&self.servers.quorum, info) {
                quorum.admit(&address, &info, is_main).map_err(RedisRequestError::Refused)?;
            }
            Ok::<_, RedisRequestError>(connection)
        };
        match tokio::time::timeout(CONNECT_TIMEOUT, connecting).await {
            Ok(Ok(connection)) => Ok(connection),
            Ok(Err(error)) => Err(error.at(&address).into_error()),
            Err(_) => {
                let what = format!("no connection within {CONNECT_TIMEOUT:?}");
                Err(with_server(&address, unreachable_error(what, true, None)))
            }
        }
    }

    /// Opens a connection. For a node of a quorum, also returns what the server reports of itself.
    async fn try_connect(
        &self,
        address: RedisAddress,
        mut inbox: String,
        is_main: bool,
    ) -> Result<(RedisConnection, Option<RedisServerInfo>), RedisError> {
        let status = Arc::new(RedisConnectionStatus::default());
        let config = AsyncConnectionConfig::new()
            .set_response_timeout(None)
            .set_connection_timeout(Some(CONNECT_TIMEOUT))
            .set_push_sender(self.push_handler(status.clone()));
        let client = self.servers.client(&address)?;
        let mut multiplexed = client.get_multiplexed_async_connection_with_config(&config).await?;
        if is_main {
            inbox = subscribe(&mut multiplexed, inbox).await?;
        }
        let (role, time): (Value, (u64, u64)) =
            redis::pipe().cmd("ROLE").cmd("TIME").query_async(&mut multiplexed).await?;
        self.replicas.fetch_max(replicas_of_master(&role)?, Ordering::Relaxed);
        let info = match &self.servers.quorum {
            Some(_) => Some(RedisServerInfo::read(&mut multiplexed).await?),
            None => None,
        };
        let connected_at_us = time.0 * 1_000_000 + time.1;
        let connection = RedisConnection {
            multiplexed,
            address,
            connected_at_us,
            connected_at: format!("{connected_at_us:016}"),
            inbox,
            is_main,
            tracking: TrackingState::default(),
            can_batch: self.servers.deployment != Deployment::Cluster,
            in_quorum: self.servers.quorum.is_some(),
            batcher: Batcher::default(),
            scripts: self.scripts.clone(),
            runtime: Handle::current(),
            status,
        };
        Ok((connection, info))
    }

    /// Passes pushes on, and notices the end of the connection.
    fn push_handler(
        &self,
        status: Arc<RedisConnectionStatus>,
    ) -> impl Fn(PushInfo) -> Result<(), std::convert::Infallible> + Send + Sync + 'static {
        let on_push = self.on_push.clone();
        move |push: PushInfo| {
            match (&push.kind, push.data.get(1)) {
                (PushKind::Message | PushKind::SMessage, Some(Value::BulkString(text))) => {
                    on_push(RedisPush::Message(text));
                }
                (PushKind::Invalidate, _) => match push.data.first() {
                    Some(Value::Array(keys)) => keys.iter().for_each(|key| {
                        if let Value::BulkString(key) = key {
                            on_push(RedisPush::Invalidated(key));
                        }
                    }),
                    _ => on_push(RedisPush::Flushed),
                },
                // A slot that moves away takes its channel along. The client library takes this
                // push for the reply to the oldest request: all later replies are shifted by one.
                (PushKind::SUnsubscribe, _) => status.close_misaligned(),
                (PushKind::Disconnection, _) => status.close(),
                _ => {}
            }
            Ok(())
        }
    }

    /// Replaces the main connection whenever it breaks.
    pub(super) async fn keep_connected(self, state: watch::Sender<RedisConnectionState>) {
        loop {
            self.until_broken(&state).await;
            let (mut backoff, mut replica_backoff) = (RETRY, REPLICA_RETRY);
            let connection = loop {
                let error = match self.connect().await {
                    Ok(connection) => break connection,
                    Err(error) => error,
                };
                state.send_replace(RedisConnectionState::Down(error.clone()));
                // A cluster node that became a replica is not needed any more.
                let is_replica = self.node.is_some() && error.to_string().contains("READONLY");
                match is_replica {
                    true => replica_backoff.pause().await,
                    false => backoff.pause().await,
                }
            };
            state.send_replace(RedisConnectionState::Connected(Arc::new(connection)));
            self.reconnects.send_modify(|count| *count += 1);
        }
    }

    /// Returns when the current connection broke or stopped responding, or its server is no longer
    /// the master.
    async fn until_broken(&self, state: &watch::Sender<RedisConnectionState>) {
        let RedisConnectionState::Connected(connection) = state.borrow().clone() else { return };
        while !connection.is_closed() {
            tokio::select! {
                () = connection.status.wake.notified() => {}
                () = tokio::time::sleep(PROBE_INTERVAL) => {}
            }
            if connection.is_closed()
                || self.has_other_master(&connection).await
                || !connection.is_responsive_master().await
            {
                break;
            }
        }
        connection.status.close();
        let broke = unreachable_error("the connection broke".to_owned(), true, None);
        let broke = with_server(&connection.address, broke);
        state.send_replace(RedisConnectionState::Down(broke));
    }

    /// Whether the sentinels name another master by now.
    async fn has_other_master(&self, connection: &RedisConnection) -> bool {
        let Deployment::Sentinel(service) = &self.servers.deployment else { return false };
        let master = self.servers.master(service).await;
        master.is_ok_and(|master| master.address != connection.address)
    }
}

/// The number of connected replicas, by the reply to `ROLE`. An error if it is not a master's.
pub(super) fn replicas_of_master(role: &Value) -> Result<u32, RedisError> {
    let Value::Array(parts) = role else { return Ok(0) };
    if parts.first() != Some(&Value::BulkString(b"master".to_vec())) {
        let kind = redis::ErrorKind::Extension;
        return Err((kind, "the server is not a master", "READONLY".to_owned()).into());
    }
    match parts.get(2) {
        Some(Value::Array(replicas)) => Ok(u32::try_from(replicas.len()).unwrap_or(u32::MAX)),
        _ => Ok(0),
    }
}
