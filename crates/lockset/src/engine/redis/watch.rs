//! Hints for watches. They use the server's tracking for client-side caches, in two ways:
//!
//! * `OPTIN`, on the main connection. After `CLIENT CACHING YES` the server remembers the keys that
//!   the next command reads, and pushes once when one of them changes. It serves watches of one
//!   name, and waiters behind a foreign lock.
//! * `BCAST`, on an extra connection to each server. The server pushes every change of a key with
//!   one of the given prefixes. It serves watches of a prefix.
//!
//! Where the server does not allow tracking, watches poll and waiters rely on their heartbeats.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_core::stream::BoxStream;
use tokio::task::AbortHandle;

use super::connect::RedisAddress;
use super::error::RedisRequestError;
use super::keys::RedisKeys;
use super::push::{OnPush, RedisPush};
use super::routing::RedisNode;
use super::{REQUEST_TIMEOUT, RedisCore};
use crate::engine::common::hints::{HintSender, HintSenders, RECHECK};
use crate::engine::{Hint, Scope};
use crate::error::Result;
use crate::name::{Name, Prefix};
use crate::sync;

/// The time between two rechecks of a watch while the server pushes changes.
const RECHECK_TRACKED: Duration = Duration::from_secs(15);
/// The time between two rechecks where the server does not allow tracking.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The pause before a tracking connection is opened again.
const RECONNECT_PAUSE: Duration = Duration::from_millis(100);

impl RedisCore {
    /// The names in scope that may have changed. For a watch of one name, the server pushes its
    /// next change after each [`inspect`](Self::inspect) of it.
    pub(super) fn hints(self: &Arc<Self>, scope: &Scope) -> BoxStream<'static, Result<Hint>> {
        let mut listed = sync::lock(&self.watches.listed);
        let (sender, hints) = listed.senders.add(scope);
        let Scope::Prefix(prefix) = scope else {
            let watches = self.watches.clone();
            return hints.with_recheck(move || watches.recheck_interval());
        };
        let servers = Arc::<PushingServers>::default();
        let track = track_prefix(self.clone(), sender, servers.clone(), prefix.clone());
        listed.tasks.retain(|task| !task.is_finished());
        listed.tasks.push(self.router.runtime().spawn(track).abort_handle());
        hints.with_recheck(move || servers.recheck_interval())
    }
}

/// The watches of this client.
#[derive(Debug, Default)]
pub(super) struct WatchList {
    listed: Mutex<ListedWatches>,
    /// A server refuses to track the reads of the main connection.
    is_refused: AtomicBool,
}

#[derive(Debug, Default)]
struct ListedWatches {
    senders: HintSenders,
    /// Keep the tracking connections for watches of a prefix.
    tasks: Vec<AbortHandle>,
}

impl WatchList {
    /// Whether a read of this name should be tracked.
    pub(super) fn has_name(&self, name: &Name) -> bool {
        sync::lock(&self.listed).senders.has_name(name)
    }

    /// A watched name was read, and the server does or does not push its next change.
    pub(super) fn on_read(&self, is_tracked: bool) {
        if !is_tracked && !self.is_refused.swap(true, Ordering::Relaxed) {
            tracing::debug!("tracking is refused; watches of names poll");
            // So that every watch polls from now on.
            sync::lock(&self.listed).senders.missed();
        }
    }

    /// The server pushed a change of this name.
    pub(super) fn on_changed(&self, name: &Name) {
        sync::lock(&self.listed).senders.changed(name);
    }

    /// Any name may have changed: the server lost what it tracked, or all keys were deleted.
    pub(super) fn on_all_changed(&self) {
        self.is_refused.store(false, Ordering::Relaxed);
        sync::lock(&self.listed).senders.missed();
    }

    /// Ends all watches.
    pub(super) fn close(&self) {
        let mut listed = sync::lock(&self.listed);
        listed.senders.close();
        listed.tasks.drain(..).for_each(|task| task.abort());
    }

    /// The time between two rechecks of a name.
    fn recheck_interval(&self) -> Duration {
        if self.is_refused.load(Ordering::Relaxed) { POLL_INTERVAL } else { RECHECK_TRACKED }
    }
}

/// The servers that push to a watch of a prefix: the nodes of a cluster by their addresses, or the
/// one server.
#[derive(Debug, Default)]
struct PushingServers(Mutex<HashMap<Option<RedisAddress>, PushState>>);

/// Whether a server pushes changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PushState {
    Pushing,
    /// Not connected at the moment.
    Down,
    /// The server refuses tracking: not allowed, or not supported.
    Refused,
}

impl PushingServers {
    fn set(&self, address: &Option<RedisAddress>, state: PushState) {
        sync::lock(&self.0).insert(address.clone(), state);
    }

    /// Sets which servers there are.
    fn set_all(&self, all: &[Option<RedisAddress>]) {
        let mut servers = sync::lock(&self.0);
        servers.retain(|address, _| all.contains(address));
        for address in all {
            servers.entry(address.clone()).or_insert(PushState::Down);
        }
    }

    fn any(&self, state: PushState) -> bool {
        sync::lock(&self.0).values().any(|other| *other == state)
    }

    /// The time between two rechecks, by the current state of the servers.
    fn recheck_interval(&self) -> Duration {
        if self.any(PushState::Refused) {
            POLL_INTERVAL
        } else if self.any(PushState::Down) || sync::lock(&self.0).is_empty() {
            RECHECK
        } else {
            RECHECK_TRACKED
        }
    }
}

/// Keeps a tracking connection to every server, for a watch of this prefix.
async fn track_prefix(
    core: Arc<RedisCore>,
    hints: HintSender,
    servers: Arc<PushingServers>,
    prefix: Prefix,
) {
    let key_prefixes = RedisKeys::tracked_prefixes(&core.prefix, prefix.as_str());
    let on_push: OnPush = {
        let (hints, key_prefix) = (hints.clone(), core.prefix.clone());
        Arc::new(move |push| match push {
            RedisPush::Invalidated(key) => {
                let key = str::from_utf8(key).ok();
                if let Some(name) = key.and_then(|key| RedisKeys::name_of(&key_prefix, key)) {
                    hints.changed(&name);
                }
            }
            RedisPush::Flushed => hints.missed(),
            RedisPush::Message(_) => {}
        })
    };
    let mut reconnects = core.router.reconnects();
    let mut tasks: HashMap<Option<RedisAddress>, TrackingTask> = HashMap::new();
    loop {
        let nodes = core.router.masters().await;
        let all: Vec<Option<RedisAddress>> =
            nodes.iter().map(|node| node.connector.node.clone()).collect();
        servers.set_all(&all);
        tasks.retain(|address, _| all.contains(address));
        for node in nodes {
            tasks.entry(node.connector.node.clone()).or_insert_with(|| {
                let (hints, servers) = (hints.clone(), servers.clone());
                let track = track_node(node, hints, servers, on_push.clone(), key_prefixes.clone());
                TrackingTask(tokio::spawn(track).abort_handle())
            });
        }
        tokio::select! {
            changed = reconnects.changed() => if changed.is_err() { return },
            () = hints.closed() => return,
            () = tokio::time::sleep(RECHECK_TRACKED) => {}
        }
    }
}

/// The task of one tracking connection; aborted when dropped.
struct TrackingTask(AbortHandle);

impl Drop for TrackingTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Keeps a tracking connection to one server. It is replaced whenever the main connection is.
async fn track_node(
    node: Arc<RedisNode>,
    hints: HintSender,
    servers: Arc<PushingServers>,
    on_push: OnPush,
    key_prefixes: Vec<String>,
) {
    let address = &node.connector.node;
    // For what the server did not push before. A recheck reads all servers, so one is enough for
    // all, once no server is down.
    let started = |state| {
        servers.set(address, state);
        if !servers.any(PushState::Down) {
            hints.missed();
        }
    };
    loop {
        let Ok(main) = node.connection.connected(REQUEST_TIMEOUT).await else {
            tokio::time::sleep(RECONNECT_PAUSE).await;
            continue;
        };
        match node.connector.connect_tracking(&main, on_push.clone(), &key_prefixes).await {
            Ok(connection) => {
                started(PushState::Pushing);
                tokio::select! {
                    () = connection.until_closed() => {}
                    () = node.connection.until_replaced(&main) => {}
                }
                servers.set(address, PushState::Down);
            }
            Err(RedisRequestError::Refused(error)) if !error.is_retryable() => {
                tracing::debug!(%error, "tracking is refused; the watch polls");
                started(PushState::Refused);
                node.connection.until_replaced(&main).await;
                servers.set(address, PushState::Down);
            }
            Err(_) => {}
        }
        tokio::time::sleep(RECONNECT_PAUSE).await;
    }
}
