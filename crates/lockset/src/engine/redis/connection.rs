//! One connection: sending, waiting for the reply, and tracking reads. `reconnect` replaces it when
//! it breaks.
//!
//! A request that was sent and got no reply may have been executed, or may be executed later.
//! Nothing is retried here: the caller decides, and the claim id makes a retry safe.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, RedisError, Value};
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};

use super::connect::RedisAddress;
use super::error::{RedisReply, RedisRequestError, classify, unreachable_error};
use super::reconnect::{CONNECT_TIMEOUT, RedisConnector, replicas_of_master};
use super::scripts::{Script, Scripts};
use crate::engine::common::batch::Batcher;
use crate::error::Error;

/// A connection whose probe gets no reply within this time is closed, even if nothing broke.
const PROBE_TIMEOUT: Duration = Duration::from_secs(3);
/// The time between two probes of a connection.
pub(super) const PROBE_INTERVAL: Duration = Duration::from_secs(5);

/// An open connection.
#[derive(Debug)]
pub(super) struct RedisConnection {
    pub(super) multiplexed: MultiplexedConnection,
    pub(super) address: RedisAddress,
    /// The server's time when this connection was opened, in µs. No token is below it.
    pub(super) connected_at_us: u64,
    /// The same as text, of at least 16 digits.
    pub(super) connected_at: String,
    /// The channel on which this client receives messages.
    pub(super) inbox: String,
    /// The client's main connection to this server: it subscribes to the inbox, and a task probes
    /// it. All others are extra ones.
    pub(super) is_main: bool,
    pub(super) tracking: TrackingState,
    /// Whether one script may serve several names. In a cluster their slots may differ.
    pub(super) can_batch: bool,
    /// Whether the server is a node of a quorum.
    pub(super) in_quorum: bool,
    pub(super) batcher: Batcher<Self>,
    pub(super) scripts: Arc<Scripts>,
    /// The runtime on which its task runs.
    pub(super) runtime: Handle,
    pub(super) status: Arc<RedisConnectionStatus>,
}

/// Whether the server tracks what is read over a connection.
#[derive(Debug, Default)]
pub(super) struct TrackingState {
    is_on: AtomicBool,
    is_refused: AtomicBool,
}

/// Whether a connection may still be used.
#[derive(Debug, Default)]
pub(super) struct RedisConnectionStatus {
    closed: AtomicBool,
    /// Replies belong to other requests: see `RedisConnector::push_handler`.
    misaligned: AtomicBool,
    /// Notified when the connection is closed, or is to be probed.
    pub(super) wake: Notify,
}

impl RedisConnectionStatus {
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.wake.notify_one();
    }

    pub(super) fn close_misaligned(&self) {
        self.misaligned.store(true, Ordering::Release);
        self.close();
    }
}

impl RedisConnection {
    /// Waits for the reply to a request that is sent over this connection.
    pub(super) async fn await_reply(
        &self,
        timeout: Duration,
        request: impl Future<Output = Result<Value, RedisError>>,
    ) -> RedisReply {
        let reply = match tokio::time::timeout(timeout, request).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => {
                // READONLY: the master became a replica, and a new connection finds the new master.
                // A failed connection fails again: close it before anything else is sent over it.
                let failed = error.is_io_error() || error.is_connection_dropped();
                if failed || error.code() == Some("READONLY") {
                    self.status.close();
                }
                Err(classify(error).at(&self.address))
            }
            Err(_) => {
                // No task probes an extra connection.
                match self.is_main {
                    true => self.status.wake.notify_one(),
                    false => self.status.close(),
                }
                let what = format!("no answer within {timeout:.1?}");
                Err(RedisRequestError::Unknown(unreachable_error(what, true, None))
                    .at(&self.address))
            }
        };
        if self.status.misaligned.load(Ordering::Acquire) {
            let what = "the connection broke before the answer could be trusted".to_owned();
            return Err(
                RedisRequestError::Unknown(unreachable_error(what, true, None)).at(&self.address)
            );
        }
        reply
    }

    /// Sends a command that reads. Also returns whether the server will push the next change of a
    /// key that was read. `script` is the script that the command runs.
    pub(super) async fn query_tracked(
        &self,
        timeout: Duration,
        script: Option<&Script>,
        command: &Cmd,
    ) -> Result<(Value, bool), RedisRequestError> {
        let mut is_tracked = false;
        let request = async {
            let mut reply;
            (reply, is_tracked) = self.send_tracked(command).await?;
            if let (Err(error), Some(script)) = (&reply, script)
                && error.code() == Some("NOSCRIPT")
            {
                script.load().query_async::<Value>(&mut self.multiplexed.clone()).await?;
                (reply, is_tracked) = self.send_tracked(command).await?;
            }
            reply
        };
        let reply = self.await_reply(timeout, request).await?;
        Ok((reply, is_tracked))
    }

    /// `CLIENT CACHING YES` applies to the next command of the connection. A pipeline is one
    /// message to the connection's task, so no other request comes in between.
    async fn send_tracked(
        &self,
        command: &Cmd,
    ) -> Result<(Result<Value, RedisError>, bool), RedisError> {
        let TrackingState { is_on, is_refused } = &self.tracking;
        let mut pipeline = redis::pipe();
        let tracks = !is_refused.load(Ordering::Relaxed);
        if tracks && !is_on.load(Ordering::Relaxed) {
            pipeline.cmd("CLIENT").arg("TRACKING").arg("ON").arg("OPTIN");
        }
        if tracks {
            pipeline.cmd("CLIENT").arg("CACHING").arg("YES");
        }
        pipeline.add_command(command.clone()).ignore_errors();
        let mut multiplexed = self.multiplexed.clone();
        let mut replies: Vec<Result<Value, RedisError>> =
            pipeline.query_async(&mut multiplexed).await?;
        let reply = replies.pop().unwrap_or(Ok(Value::Nil));
        let refusal = replies.into_iter().find_map(Result::err);
        let is_tracked = tracks && refusal.is_none();
        is_on.store(is_tracked, Ordering::Relaxed);
        if refusal.is_some_and(|error| !classify(error).into_error().is_retryable()) {
            is_refused.store(true, Ordering::Relaxed);
        }
        Ok((reply, is_tracked))
    }

    /// Makes the server push every change of a key with one of these prefixes; of every key if
    /// there are none.
    pub(super) async fn track_prefixes(
        &self,
        prefixes: &[String],
    ) -> Result<(), RedisRequestError> {
        let mut track = redis::cmd("CLIENT");
        track.arg("TRACKING").arg("ON").arg("BCAST");
        for prefix in prefixes {
            track.arg("PREFIX").arg(prefix);
        }
        let mut multiplexed = self.multiplexed.clone();
        self.await_reply(CONNECT_TIMEOUT, track.query_async(&mut multiplexed)).await.map(drop)
    }

    /// Returns when the connection broke or stopped responding.
    pub(super) async fn until_closed(&self) {
        while !self.is_closed() {
            tokio::select! {
                () = self.status.wake.notified() => {}
                () = tokio::time::sleep(PROBE_INTERVAL) => {}
            }
            if !self.is_closed() && !self.is_responsive_master().await {
                self.status.close();
            }
        }
    }

    /// A master that becomes a replica closes no connections. It may have lost grants by the time
    /// it is a master again; then tokens must start above the time of a new connection. A server
    /// that is a replica only between two probes goes unnoticed.
    pub(super) async fn is_responsive_master(&self) -> bool {
        let mut multiplexed = self.multiplexed.clone();
        let role = redis::cmd("ROLE");
        let reply =
            tokio::time::timeout(PROBE_TIMEOUT, role.query_async::<Value>(&mut multiplexed));
        matches!(reply.await, Ok(Ok(role)) if replicas_of_master(&role).is_ok())
    }

    pub(super) fn is_closed(&self) -> bool {
        self.status.closed.load(Ordering::Acquire)
    }
}

/// The client's main connection to one server, replaced whenever it breaks.
#[derive(Debug)]
pub(super) struct ManagedConnection {
    state: watch::Receiver<RedisConnectionState>,
    task: tokio::task::AbortHandle,
}

#[derive(Clone, Debug)]
pub(super) enum RedisConnectionState {
    Connected(Arc<RedisConnection>),
    /// Not connected, and why.
    Down(Error),
}

impl ManagedConnection {
    /// Connects, and reconnects from then on. Fails if the first attempt fails.
    pub(super) async fn open(connector: RedisConnector) -> Result<Self, Error> {
        let connection = connector.connect().await?;
        Ok(Self::spawn(connector, RedisConnectionState::Connected(Arc::new(connection))))
    }

    /// Connects in the background.
    pub(super) fn start(connector: RedisConnector) -> Self {
        let not_yet = unreachable_error("not connected yet".to_owned(), true, None);
        Self::spawn(connector, RedisConnectionState::Down(not_yet))
    }

    fn spawn(connector: RedisConnector, state: RedisConnectionState) -> Self {
        let (sender, state) = watch::channel(state);
        let task = tokio::spawn(connector.keep_connected(sender)).abort_handle();
        Self { state, task }
    }

    /// The connection, if it is open now.
    pub(super) fn current(&self) -> Option<Arc<RedisConnection>> {
        match &*self.state.borrow() {
            RedisConnectionState::Connected(connection) if !connection.is_closed() => {
                Some(connection.clone())
            }
            _ => None,
        }
    }

    /// The connection, as soon as it is open.
    pub(super) async fn connected(
        &self,
        timeout: Duration,
    ) -> Result<Arc<RedisConnection>, RedisRequestError> {
        if let Some(connection) = self.current() {
            return Ok(connection);
        }
        let mut state = self.state.clone();
        // A refusal that a retry does not cure ends the wait as well.
        let is_settled = |state: &RedisConnectionState| match state {
            RedisConnectionState::Connected(connection) => !connection.is_closed(),
            RedisConnectionState::Down(error) => !error.is_retryable(),
        };
        let settled = tokio::time::timeout(timeout, async {
            state.wait_for(is_settled).await.map(|state| state.clone())
        });
        match settled.await {
            Ok(Ok(RedisConnectionState::Connected(connection))) => Ok(connection),
            Ok(Err(_)) => Err(RedisRequestError::Refused(Error::Closed)),
            _ => Err(RedisRequestError::Refused(match &*self.state.borrow() {
                RedisConnectionState::Down(error) => error.clone(),
                RedisConnectionState::Connected(_) => {
                    unreachable_error("the connection broke".to_owned(), true, None)
                }
            })),
        }
    }

    /// Returns when the given connection is no longer the current one.
    pub(super) async fn until_replaced(&self, connection: &Arc<RedisConnection>) {
        let is_other = |state: &RedisConnectionState| match state {
            RedisConnectionState::Connected(current) => !Arc::ptr_eq(current, connection),
            RedisConnectionState::Down(_) => true,
        };
        let _ = self.state.clone().wait_for(is_other).await;
    }

    pub(super) fn close(&self) {
        self.task.abort();
    }
}

impl Drop for ManagedConnection {
    fn drop(&mut self) {
        self.close();
    }
}
