//! Watches. They use the server's tracking for client-side caches, in two ways:
//!
//! * `OPTIN`, on the client's own connection. After `CLIENT CACHING YES` the server remembers the
//!   keys that the next command reads, and pushes once when one of them changes. It serves watches
//!   of one name, and waiters behind a foreign lock.
//! * `BCAST`, on a connection of its own to each server. The server pushes every change of a key
//!   with one of the given prefixes. It serves watches of a prefix.
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

use super::keys::Keys;
use super::link::{Postman, Pushed, Unanswered};
use super::nodes::Node;
use super::servers::Address;
use super::{Core, PATIENCE};
use crate::engine::common::watch::{Hint, RECHECK, Recheck, watch_states_with};
use crate::engine::{LockState, Scope};
use crate::error::Result;
use crate::hash::FastMap;
use crate::name::{Name, Prefix};
use crate::sync;

/// The time between two rechecks of a watch while the server pushes changes.
const RECHECK_TRACKED: Duration = Duration::from_secs(15);
/// The time between two rechecks where the server does not allow tracking.
const POLL_EVERY: Duration = Duration::from_millis(100);
/// The pause before a tracking connection is opened again.
const RECONNECT_PAUSE: Duration = Duration::from_millis(100);

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
    pub(super) fn changed(&self, name: &Name) {
        if let Some(watches) = sync::lock(&self.0).names.get(name) {
            watches.iter().for_each(|hints| hints.changed(name.clone()));
        }
    }

    /// Any name may have changed: the server forgot what it tracked, or all keys.
    pub(super) fn all_changed(&self) {
        for (name, watches) in &sync::lock(&self.0).names {
            watches.iter().for_each(|hints| hints.changed(name.clone()));
        }
    }

    /// Ends all of them.
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
    pending: Mutex<Pending>,
    wake: Notify,
    /// Keeps the tracking connections of a watch of a prefix.
    task: OnceLock<AbortHandle>,
}

#[derive(Debug, Default)]
struct Pending {
    names: BTreeSet<Name>,
    missed: bool,
    closed: bool,
    /// Where hints come from: the nodes of a cluster by their addresses, or the one server.
    sources: HashMap<Option<Address>, Source>,
}

/// Whether a server pushes changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Pushing,
    /// Not connected at the moment.
    Down,
    /// The server refuses tracking: not allowed, or not known.
    Refused,
}

impl PendingHints {
    fn changed(&self, name: Name) {
        if self.pending().names.insert(name) {
            self.wake.notify_one();
        }
    }

    fn missed(&self) {
        self.pending().missed = true;
        self.wake.notify_one();
    }

    fn close(&self) {
        self.pending().closed = true;
        self.wake.notify_one();
        if let Some(task) = self.task.get() {
            task.abort();
        }
    }

    fn set_source(&self, at: &Option<Address>, source: Source) {
        self.pending().sources.insert(at.clone(), source);
    }

    /// This server pushes from now on, or refuses to. A recheck for what it did not push before
    /// follows once no server is down: a recheck reads all servers, so one is enough for all.
    fn on_source(&self, at: &Option<Address>, source: Source) {
        self.set_source(at, source);
        if self.pending().sources.values().all(|source| *source != Source::Down) {
            self.missed();
        }
    }

    /// Sets which servers there are.
    fn servers(&self, all: &[Option<Address>]) {
        let mut pending = self.pending();
        pending.sources.retain(|at, _| all.contains(at));
        for at in all {
            pending.sources.entry(at.clone()).or_insert(Source::Down);
        }
    }

    /// The time between two rechecks, as the servers are now.
    fn every(&self) -> Duration {
        let pending = self.pending();
        let any = |source: Source| pending.sources.values().any(|other| *other == source);
        if any(Source::Refused) {
            POLL_EVERY
        } else if any(Source::Down) || pending.sources.is_empty() {
            RECHECK
        } else {
            RECHECK_TRACKED
        }
    }

    fn stream(self: Arc<Self>) -> impl Stream<Item = Hint> + Send {
        futures_util::stream::unfold(self, |hints| async {
            loop {
                let hint = {
                    let mut pending = hints.pending();
                    if pending.closed {
                        return None;
                    }
                    match std::mem::take(&mut pending.missed) {
                        true => Some(Hint::Missed),
                        false => pending.names.pop_first().map(Hint::Changed),
                    }
                };
                match hint {
                    Some(hint) => return Some((hint, hints)),
                    None => hints.wake.notified().await,
                }
            }
        })
    }

    fn pending(&self) -> MutexGuard<'_, Pending> {
        sync::lock(&self.pending)
    }
}

/// Ends the watch when dropped.
struct WatchHandle {
    core: Arc<Core>,
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
    /// Reads a name. For a watch of one name the server pushes the next change of it.
    async fn look(&self, name: &Name) -> Result<LockState> {
        if let Scope::Prefix(_) = self.scope {
            return self.core.look(name).await;
        }
        let (state, is_tracked) = self.core.look_tracked(name).await?;
        let source = if is_tracked { Source::Pushing } else { Source::Refused };
        self.hints.set_source(&None, source);
        Ok(state)
    }

    async fn look_at_all(&self) -> Result<Vec<LockState>> {
        match &self.scope {
            Scope::Name(name) => self.look(name).await.map(|state| vec![state]),
            Scope::Prefix(prefix) => self.core.list(prefix).await,
        }
    }
}

impl Core {
    /// The states of all names in scope, then of each that may have changed.
    pub(super) fn watch(self: &Arc<Self>, scope: &Scope) -> BoxStream<'static, Result<LockState>> {
        let hints = self.watches.add(scope);
        let first = match scope {
            Scope::Name(name) => vec![name.clone()],
            Scope::Prefix(prefix) => {
                let follow = follow(self.clone(), hints.clone(), prefix.clone());
                let task = self.nodes.home().spawn(follow).abort_handle();
                let _ = hints.task.set(task);
                Vec::new()
            }
        };
        let handle = WatchHandle { core: self.clone(), scope: scope.clone(), hints: hints.clone() };
        let (handle, of_every) = (Arc::new(handle), hints.clone());
        let of_recheck = handle.clone();
        let recheck = Recheck {
            every: Box::new(move || of_every.every()),
            states: Box::new(move || {
                let handle = of_recheck.clone();
                async move { handle.look_at_all().await.map(Some) }.boxed()
            }),
        };
        let read = move |name: &Name| {
            let (handle, name) = (handle.clone(), name.clone());
            async move { handle.look(&name).await }
        };
        watch_states_with(self.clock.clone(), first, hints.stream(), read, Some(recheck))
    }
}

/// Keeps a tracking connection to every server, for a watch of this prefix.
async fn follow(core: Arc<Core>, hints: Arc<PendingHints>, prefix: Prefix) {
    let begins = Keys::begin_with(&core.prefix, prefix.as_str());
    let postman: Postman = {
        let (hints, key_prefix) = (hints.clone(), core.prefix.clone());
        Arc::new(move |pushed| match pushed {
            Pushed::Changed(key) => {
                let name = str::from_utf8(key).ok().and_then(|key| Keys::name_of(&key_prefix, key));
                if let Some(name) = name.filter(|name| prefix.covers(name)) {
                    hints.changed(name);
                }
            }
            Pushed::Flushed => hints.missed(),
            Pushed::Message(_) => {}
        })
    };
    let mut made = core.nodes.made();
    let mut tasks: HashMap<Option<Address>, TrackingTask> = HashMap::new();
    loop {
        let nodes = core.nodes.everyone().await;
        let all: Vec<Option<Address>> = nodes.iter().map(|node| node.maker.node.clone()).collect();
        hints.servers(&all);
        tasks.retain(|at, _| all.contains(at));
        for node in nodes {
            let begin = |node: Arc<Node>| {
                let track = track(node, hints.clone(), postman.clone(), begins.clone());
                TrackingTask(tokio::spawn(track).abort_handle())
            };
            tasks.entry(node.maker.node.clone()).or_insert_with(|| begin(node));
        }
        tokio::select! {
            changed = made.changed() => if changed.is_err() { return },
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

/// Keeps a tracking connection to one server, beside the client's own and replaced with it.
async fn track(node: Arc<Node>, hints: Arc<PendingHints>, postman: Postman, begins: Vec<String>) {
    let at = &node.maker.node;
    loop {
        let Ok(main) = node.link.up(PATIENCE).await else {
            tokio::time::sleep(RECONNECT_PAUSE).await;
            continue;
        };
        match node.maker.tracking_beside(&main, postman.clone(), &begins).await {
            Ok(up) => {
                hints.on_source(at, Source::Pushing);
                tokio::select! {
                    () = up.until_over() => {}
                    () = node.link.until_replaced(&main) => {}
                }
                hints.set_source(at, Source::Down);
            }
            Err(Unanswered::Refused(error)) if !error.is_retryable() => {
                tracing::debug!(%error, "tracking is refused; the watch polls");
                hints.on_source(at, Source::Refused);
                node.link.until_replaced(&main).await;
                hints.set_source(at, Source::Down);
            }
            Err(_) => {}
        }
        tokio::time::sleep(RECONNECT_PAUSE).await;
    }
}
