//! The handle of one session: requests, watches, and how long the session can be trusted.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot, watch};

use super::connection;
use super::request::{PendingReply, ZkRequestError, unreachable_error};
use super::servers::ServerList;
use super::session_lease::SessionLease;
use super::shared::SessionShared;
use super::wire::{self, Acl, ConnectRequest, CreateMode, MultiOp, NodeEvent, OpCode};
use crate::clock::{Clock, Moment};
use crate::error::Result;

/// What a session reports unasked.
#[derive(Debug)]
pub(crate) enum SessionEvent {
    NodeChanged(NodeEvent),
    Connected,
    Disconnected,
    /// All earlier events have been handled.
    Flush(oneshot::Sender<()>),
    /// The server that the session moved to grants a shorter timeout than the one before.
    TimeoutShortened,
    /// The session of this epoch is over, and all its ephemeral nodes with it.
    Expired(u64),
}

/// Receives the events of a session.
pub(super) type EventSink = Box<dyn Fn(SessionEvent) + Send + Sync>;

/// Sends the events of a session to a channel, each with `tag`.
pub(crate) fn event_sink<T: Copy + Send + Sync + 'static>(
    tag: T,
    channel: mpsc::UnboundedSender<(T, SessionEvent)>,
) -> EventSink {
    Box::new(move |event| {
        // The receiver is gone once the engine is closed.
        let _ = channel.send((tag, event));
    })
}

/// Whether there is a connection, and in which session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SessionStatus {
    pub(crate) connected: bool,
    /// The number of the connection; never reused.
    pub(crate) connection: u64,
    /// The number of the session among those that this handle has had; never reused.
    pub(crate) epoch: u64,
    /// There will be no further connection.
    pub(crate) ended: bool,
}

/// A session and its connection, until this is dropped.
pub(crate) struct Session {
    shared: Arc<SessionShared>,
    task: tokio::task::AbortHandle,
}

impl Session {
    /// Starts to connect, on the current runtime. Nothing is known of the session before
    /// [`wait_connected`](Session::wait_connected). If it `recreates_expired` sessions, a new one
    /// is requested when this one has expired.
    pub(crate) fn start(
        servers: Arc<ServerList>,
        clock: Clock,
        connect_request: ConnectRequest,
        recreates_expired: bool,
        events: EventSink,
    ) -> Self {
        let shared = SessionShared::new(servers, clock, connect_request, recreates_expired, events);
        let shared = Arc::new(shared);
        let task = tokio::spawn(connection::run(shared.clone())).abort_handle();
        Self { shared, task }
    }

    pub(crate) fn status(&self) -> SessionStatus {
        *self.shared.status.borrow()
    }

    fn subscribe_status(&self) -> watch::Receiver<SessionStatus> {
        self.shared.status.subscribe()
    }

    /// Waits for a connection.
    pub(crate) async fn wait_connected(&self, deadline: Moment) -> Result<SessionStatus> {
        let status = self.status();
        if status.connected {
            return Ok(status);
        }
        let _demand = self.shared.demand_connection();
        let mut statuses = self.subscribe_status();
        let connected = statuses.wait_for(|status| status.connected || status.ended);
        tokio::select! {
            status = connected => match status {
                Ok(status) if status.connected => Ok(*status),
                _ => Err(self.shared.ended_error()),
            },
            () = self.shared.clock.sleep_until(deadline) => {
                let reason = self.shared.state().disconnect_reason.clone();
                Err(unreachable_error(format!("no server answers ({reason})"), true))
            }
        }
    }

    /// The negotiated timeout.
    pub(crate) fn timeout(&self) -> Duration {
        self.shared.state().timeout
    }

    /// Id and password, with which another process can take the session over.
    pub(crate) fn credentials(&self) -> (i64, Vec<u8>) {
        let state = self.shared.state();
        (state.connect_request.session_id, state.connect_request.password.clone())
    }

    pub(crate) fn id(&self) -> i64 {
        self.shared.state().connect_request.session_id
    }

    /// Until when the session, and thus its nodes, are certain to exist.
    pub(crate) fn valid_until(&self) -> Moment {
        let state = self.shared.state();
        state.lease.as_ref().map_or(Moment::from_nanos(0), SessionLease::valid_until)
    }

    /// Until when something that is renewed now is valid: at most two thirds of the timeout, also
    /// right after a handshake that is good for more, so that all leases have the same length.
    pub(crate) fn lease_end(&self, now: Moment) -> Moment {
        self.valid_until().min(now + self.timeout() * 2 / 3)
    }

    /// From now on the session sends no heartbeats, and reconnects only while a caller waits for a
    /// connection: only the requests of its users keep it alive.
    pub(crate) fn keep_on_demand(&self) {
        self.shared.state().on_demand = true;
    }

    /// Makes a new connection: its handshake reaches the leader, and the session lasts a whole
    /// timeout again.
    pub(crate) async fn reconnect(&self, deadline: Moment) -> Result<()> {
        let before = self.status().connection;
        self.shared.state().reconnect = true;
        let _demand = self.shared.demand_connection();
        let mut statuses = self.subscribe_status();
        let reconnected =
            statuses.wait_for(|now| now.ended || (now.connected && now.connection != before));
        tokio::select! {
            status = reconnected => match status {
                Ok(status) if status.connected => Ok(()),
                _ => Err(ZkRequestError::SessionEnded.into()),
            },
            () = self.shared.clock.sleep_until(deadline) => Err(ZkRequestError::NotSent.into()),
        }
    }

    /// Registers for the next change of `path`. The caller must then send a request that sets the
    /// watch.
    pub(crate) fn watch(&self, path: &str) -> NodeWatch {
        let change = Arc::new(Notify::new());
        let mut state = self.shared.state();
        state.watches.entry(path.to_owned()).or_default().push(Arc::downgrade(&change));
        NodeWatch { shared: self.shared.clone(), path: path.to_owned(), change }
    }

    /// Ends the session and deletes its nodes.
    pub(crate) async fn close(&self) {
        let closing = self.shared.send(OpCode::CloseSession, |_| {});
        let _ = tokio::time::timeout(Duration::from_secs(1), closing.reply()).await;
        self.task.abort();
        self.shared.status.send_modify(|status| {
            status.connected = false;
            status.ended = true;
        });
        // Pending requests fail now: no reply will come.
        self.shared.on_disconnected("it was closed".to_owned());
    }

    pub(crate) fn create(
        &self,
        path: &str,
        data: &[u8],
        acl: Acl,
        mode: CreateMode,
    ) -> PendingReply {
        let is_container = mode == CreateMode::Container;
        let op = if is_container { OpCode::CreateContainer } else { OpCode::Create };
        self.shared.send(op, |w| wire::write_create(w, path, data, acl, mode))
    }

    pub(crate) fn delete(&self, path: &str) -> PendingReply {
        self.delete_version(path, -1)
    }

    /// Deletes a node if its data has this version.
    pub(crate) fn delete_version(&self, path: &str, version: i32) -> PendingReply {
        self.shared.send(OpCode::Delete, |w| {
            w.string(path).int(version);
        })
    }

    pub(crate) fn data(&self, path: &str, watch: bool) -> PendingReply {
        self.shared.send(OpCode::GetData, |w| {
            w.string(path).boolean(watch);
        })
    }

    pub(crate) fn set_data(&self, path: &str, data: &[u8], version: i32) -> PendingReply {
        self.shared.send(OpCode::SetData, |w| {
            w.string(path).buffer(data).int(version);
        })
    }

    pub(crate) fn children(&self, path: &str, watch: bool) -> PendingReply {
        self.shared.send(OpCode::GetChildren, |w| {
            w.string(path).boolean(watch);
        })
    }

    /// Later reads are at least as new as what the leader knows now.
    pub(crate) fn sync(&self, path: &str) -> PendingReply {
        self.shared.send(OpCode::Sync, |w| {
            w.string(path);
        })
    }

    pub(crate) fn multi(&self, ops: &[MultiOp]) -> PendingReply {
        self.shared.send(OpCode::Multi, |w| wire::write_multi(w, ops))
    }

    /// Sets a persistent watch on a node and all below it.
    pub(crate) fn add_watch(&self, path: &str) -> PendingReply {
        const PERSISTENT_RECURSIVE: i32 = 1;
        self.shared.send(OpCode::AddWatch, |w| {
            w.string(path).int(PERSISTENT_RECURSIVE);
        })
    }

    pub(crate) fn remove_watch(&self, path: &str) -> PendingReply {
        const ANY: i32 = 3;
        self.shared.send(OpCode::RemoveWatches, |w| {
            w.string(path).int(ANY);
        })
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The password would give access to all its locks.
        f.debug_struct("Session").field("status", &self.status()).finish_non_exhaustive()
    }
}

/// A registration for the next change of a node, until this is dropped.
pub(crate) struct NodeWatch {
    shared: Arc<SessionShared>,
    path: String,
    change: Arc<Notify>,
}

impl NodeWatch {
    /// Resolves when the node has changed, or the connection ended and the watch with it.
    pub(crate) async fn changed(&self) {
        self.change.notified().await;
    }
}

impl Drop for NodeWatch {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        if let Some(waiting) = state.watches.get_mut(&self.path) {
            waiting.retain(|other| !std::ptr::eq(other.as_ptr(), &*self.change));
            if waiting.is_empty() {
                state.watches.remove(&self.path);
            }
        }
    }
}
