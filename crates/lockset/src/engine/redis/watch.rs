//! Watches. They use the server's tracking for client-side caches, in two ways:
//!
//! * `OPTIN`, on the main connection. After `CLIENT CACHING YES` the server remembers the keys that
//!   the next command reads, and pushes once when one of them changes. It serves watches of one
//!   name, and waiters behind a foreign lock.
//! * `BCAST`, on an extra connection to each server. The server pushes every change of a key with
//!   one of the given prefixes. It serves watches of a prefix.
//!
//! Where the server does not allow tracking, watches poll and waiters rely on their heartbeats.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use futures_core::Stream;
use futures_core::stream::BoxStream;
use futures_util::FutureExt;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use super::connect::RedisAddress;
use super::error::RedisRequestError;
use super::keys::RedisKeys;
use super::push::{OnPush, RedisPush};
use super::routing::RedisNode;
use super::{REQUEST_TIMEOUT, RedisCore};
use crate::engine::common::watch::{Hint, RECHECK, Recheck, watch_states_with};
use crate::engine::{LockState, Scope};
use crate::error::Result;
use crate::hash::FastMap;
use crate::name::{Name, Prefix};
use crate::sync;

/// The time between two rechecks of a watch while the server pushes changes.
const RECHECK_TRACKED: Duration = Duration::from_secs(15);
/// The time between two rechecks where the server does not allow tracking.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The pause before a tracking connection is opened again.
const RECONNECT_PAUSE: Duration = Duration::from_millis(100);

impl RedisCore {
    /// The states of all names in scope, then of each that may have changed.
    pub(super) fn watch(self: &Arc<Self>, scope: &Scope) -> BoxStream<'static, Result<LockState>> {
        let hints = self.watches.add(scope);
        let first = match scope {
            Scope::Name(name) => vec![name.clone()],
            Scope::Prefix(prefix) => {
                let track = track_prefix(self.clone(), hints.clone(), prefix.clone());
                let task = self.router.runtime().spawn(track).abort_handle();
                let _ = hints.task.set(task);
                Vec::new()
            }
        };
        let handle = WatchHandle { core: self.clone(), scope: scope.clone(), hints: hints.clone() };
        let (handle, interval_hints) = (Arc::new(handle), hints.clone());
        let recheck_handle = handle.clone();
        let recheck = Recheck {
            every: Box::new(move || interval_hints.recheck_interval()),
            states: Box::new(move || {
                let handle = recheck_handle.clone();
                async move { handle.inspect_scope().await.map(Some) }.boxed()
            }),
        };
        let read = move |name: &Name| {
            let (handle, name) = (handle.clone(), name.clone());
            async move { handle.inspect(&name).await }
        };
        watch_states_with(self.clock.clone(), first, hints.stream(), read, Some(recheck))
    }
}

/// Ends the watch when dropped.
struct WatchHandle {
    core: Arc<RedisCore>,
    scope: Scope,
    hints: Arc<PendingHints>,
}

impl Drop for WatchHandle {
    fn drop(&mut self) {
        self.core.watches.remove(&self.scope, &self.hints);
        self.hints.close();
    }
}

impl WatchHandle {
    /// Reads a name. For a watch of one name the server pushes its next change.
    async fn inspect(&self, name: &Name) -> Result<LockState> {
        if let Scope::Prefix(_) = self.scope {
            return self.core.inspect(name).await;
        }
        let (state, is_tracked) = self.core.inspect_tracked(name).await?;
        let source = if is_tracked { PushSource::Pushing } else { PushSource::Refused };
        self.hints.set_source(&None, source);
        Ok(state)
    }

    async fn inspect_scope(&self) -> Result<Vec<LockState>> {
        match &self.scope {
            Scope::Name(name) => self.inspect(name).await.map(|state| vec![state]),
            Scope::Prefix(prefix) => self.core.list(prefix).await,
        }
    }
}

/// The watches of this client.
#[derive(Debug, Default)]
pub(super) struct WatchList(Mutex<ListedWatches>);

#[derive(Debug, Default)]
struct ListedWatches {
    names: FastMap<Name, Vec<Arc<PendingHints>>>,
    prefixes: Vec<Arc<PendingHints>>,
    closed: bool,
}

impl WatchList {
    fn add(&self, scope: &Scope) -> Arc<PendingHints> {
        let hints = Arc::new(PendingHints::default());
        let mut all = sync::lock(&self.0);
        match scope {
            _ if all.closed => hints.close(),
            Scope::Name(name) => all.names.entry(name.clone()).or_default().push(hints.clone()),
            Scope::Prefix(_) => all.prefixes.push(hints.clone()),
        }
        hints
    }

    fn remove(&self, scope: &Scope, hints: &Arc<PendingHints>) {
        let mut all = sync::lock(&self.0);
        let is_other = |other: &Arc<PendingHints>| !Arc::ptr_eq(other, hints);
        match scope {
            Scope::Prefix(_) => all.prefixes.retain(is_other),
            Scope::Name(name) => {
                if let Some(watches) = all.names.get_mut(name) {
                    watches.retain(is_other);
                    if watches.is_empty() {
                        all.names.remove(name);
                    }
                }
            }
        }
    }

    /// The server pushed a change of this name.
    pub(super) fn on_changed(&self, name: &Name) {
        if let Some(watches) = sync::lock(&self.0).names.get(name) {
            watches.iter().for_each(|hints| hints.on_changed(name.clone()));
        }
    }

    /// Any name may have changed: the server lost what it tracked, or all keys were deleted.
    pub(super) fn on_all_changed(&self) {
        for (name, watches) in &sync::lock(&self.0).names {
            watches.iter().for_each(|hints| hints.on_changed(name.clone()));
        }
    }

    /// Ends all watches.
    pub(super) fn close(&self) {
        let mut all = sync::lock(&self.0);
        all.closed = true;
        for hints in all.names.values().flatten().chain(&all.prefixes) {
            hints.close();
        }
    }
}

/// The hints that a watch has not consumed yet: each name once, however often it changes.
#[derive(Debug, Default)]
struct PendingHints {
    changes: Mutex<PendingChanges>,
    wake: Notify,
    /// Keeps the tracking connections of a watch of a prefix.
    task: OnceLock<AbortHandle>,
}

#[derive(Debug, Default)]
struct PendingChanges {
    names: BTreeSet<Name>,
    missed: bool,
    closed: bool,
    /// Where hints come from: the nodes of a cluster by their addresses, or the one server.
    sources: HashMap<Option<RedisAddress>, PushSource>,
}

/// Whether a server pushes changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PushSource {
    Pushing,
    /// Not connected at the moment.
    Down,
    /// The server refuses tracking: not allowed, or not supported.
    Refused,
}

impl PendingHints {
    fn on_changed(&self, name: Name) {
        if self.changes().names.insert(name) {
            self.wake.notify_one();
        }
    }

    fn on_missed(&self) {
        self.changes().missed = true;
        self.wake.notify_one();
    }

    fn close(&self) {
        self.changes().closed = true;
        self.wake.notify_one();
        if let Some(task) = self.task.get() {
            task.abort();
        }
    }

    fn set_source(&self, address: &Option<RedisAddress>, source: PushSource) {
        self.changes().sources.insert(address.clone(), source);
    }

    /// This server pushes from now on, or refuses to. A recheck for what it did not push before
    /// follows once no server is down: a recheck reads all servers, so one is enough for all.
    fn on_source(&self, address: &Option<RedisAddress>, source: PushSource) {
        self.set_source(address, source);
        if self.changes().sources.values().all(|source| *source != PushSource::Down) {
            self.on_missed();
        }
    }

    /// Sets which servers there are.
    fn set_servers(&self, all: &[Option<RedisAddress>]) {
        let mut changes = self.changes();
        changes.sources.retain(|address, _| all.contains(address));
        for address in all {
            changes.sources.entry(address.clone()).or_insert(PushSource::Down);
        }
    }

    /// The time between two rechecks, by the current state of the servers.
    fn recheck_interval(&self) -> Duration {
        let changes = self.changes();
        let any = |source: PushSource| changes.sources.values().any(|other| *other == source);
        if any(PushSource::Refused) {
            POLL_INTERVAL
        } else if any(PushSource::Down) || changes.sources.is_empty() {
            RECHECK
        } else {
            RECHECK_TRACKED
        }
    }

    fn stream(self: Arc<Self>) -> impl Stream<Item = Hint> + Send {
        futures_util::stream::unfold(self, |hints| async {
            loop {
                let hint = {
                    let mut changes = hints.changes();
                    if changes.closed {
                        return None;
                    }
                    match std::mem::take(&mut changes.missed) {
                        true => Some(Hint::Missed),
                        false => changes.names.pop_first().map(Hint::Changed),
                    }
                };
                match hint {
                    Some(hint) => return Some((hint, hints)),
                    None => hints.wake.notified().await,
                }
            }
        })
    }

    fn changes(&self) -> MutexGuard<'_, PendingChanges> {
        sync::lock(&self.changes)
    }
}

/// Keeps a tracking connection to every server, for a watch of this prefix.
async fn track_prefix(core: Arc<RedisCore>, hints: Arc<PendingHints>, prefix: Prefix) {
    let key_prefixes = RedisKeys::tracked_prefixes(&core.prefix, prefix.as_str());
    let on_push: OnPush = {
        let (hints, key_prefix) = (hints.clone(), core.prefix.clone());
        Arc::new(move |push| match push {
            RedisPush::Invalidated(key) => {
                let key = str::from_utf8(key).ok();
                let name = key.and_then(|key| RedisKeys::name_of(&key_prefix, key));
                if let Some(name) = name.filter(|name| prefix.covers(name)) {
                    hints.on_changed(name);
                }
            }
            RedisPush::Flushed => hints.on_missed(),
            RedisPush::Message(_) => {}
        })
    };
    let mut reconnects = core.router.reconnects();
    let mut tasks: HashMap<Option<RedisAddress>, TrackingTask> = HashMap::new();
    loop {
        let nodes = core.router.masters().await;
        let all: Vec<Option<RedisAddress>> =
            nodes.iter().map(|node| node.connector.node.clone()).collect();
        hints.set_servers(&all);
        tasks.retain(|address, _| all.contains(address));
        for node in nodes {
            let start = |node: Arc<RedisNode>| {
                let track = track_node(node, hints.clone(), on_push.clone(), key_prefixes.clone());
                TrackingTask(tokio::spawn(track).abort_handle())
            };
            tasks.entry(node.connector.node.clone()).or_insert_with(|| start(node));
        }
        tokio::select! {
            changed = reconnects.changed() => if changed.is_err() { return },
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
    hints: Arc<PendingHints>,
    on_push: OnPush,
    key_prefixes: Vec<String>,
) {
    let address = &node.connector.node;
    loop {
        let Ok(main) = node.connection.connected(REQUEST_TIMEOUT).await else {
            tokio::time::sleep(RECONNECT_PAUSE).await;
            continue;
        };
        match node.connector.connect_tracking(&main, on_push.clone(), &key_prefixes).await {
            Ok(connection) => {
                hints.on_source(address, PushSource::Pushing);
                tokio::select! {
                    () = connection.until_closed() => {}
                    () = node.connection.until_replaced(&main) => {}
                }
                hints.set_source(address, PushSource::Down);
            }
            Err(RedisRequestError::Refused(error)) if !error.is_retryable() => {
                tracing::debug!(%error, "tracking is refused; the watch polls");
                hints.on_source(address, PushSource::Refused);
                node.connection.until_replaced(&main).await;
                hints.set_source(address, PushSource::Down);
            }
            Err(_) => {}
        }
        tokio::time::sleep(RECONNECT_PAUSE).await;
    }
}
