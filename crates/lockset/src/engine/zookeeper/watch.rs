//! Watching: the states of names, and each change of them, by one recursive watch of the chroot.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_core::stream::BoxStream;
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use tokio::sync::mpsc;

use super::ZooKeeperCore;
use super::client::{ZkErrorCode, ZkRequestError};
use crate::clock::Moment;
use crate::engine::common::watch::{Recheck, hints_of, watch_states_with};
use crate::engine::{LockState, Scope};
use crate::error::{Error, Result};
use crate::name::{Name, Prefix};
use crate::sync;

/// The pause before a lock is read again that could not be.
const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// The states of all names in scope, then of each that may have changed.
pub(super) fn watch(
    core: Arc<ZooKeeperCore>,
    scope: Scope,
) -> BoxStream<'static, Result<LockState>> {
    futures_util::stream::once(start_watch(core, scope))
        .flat_map(|started| match started {
            Ok(states) => states,
            Err(error) => futures_util::stream::once(async { Err(error) }).boxed(),
        })
        .boxed()
}

async fn start_watch(
    core: Arc<ZooKeeperCore>,
    scope: Scope,
) -> Result<BoxStream<'static, Result<LockState>>> {
    let (changed, changes) = mpsc::unbounded_channel();
    let registration =
        Arc::new(WatcherRegistration { core: core.clone(), changed: changed.clone() });
    let by_polling = loop {
        core.main.wait_connected(Moment::NEVER).await?;
        let added = {
            let mut all = sync::lock(&core.watchers.all);
            if !all.iter().any(|watcher| watcher.changed.same_channel(&changed)) {
                let known = match &scope {
                    Scope::Name(name) => BTreeSet::from([name.clone()]),
                    Scope::Prefix(_) => BTreeSet::new(),
                };
                all.push(NameWatcher { scope: scope.clone(), changed: changed.clone(), known });
            }
            core.main.add_watch(&core.paths.chroot)
        };
        match added.done().await {
            Ok(()) => break false,
            Err(ZkRequestError::Refused(ZkErrorCode::UNIMPLEMENTED)) => break true,
            Err(ZkRequestError::NotSent | ZkRequestError::Unknown) => {}
            Err(error) => return Err(error.into()),
        }
    };
    let first = match &scope {
        Scope::Name(name) => vec![name.clone()],
        Scope::Prefix(prefix) => core.list_names(prefix).await?,
    };
    let recheck = by_polling.then(|| recheck(core.clone(), scope));
    let clock = core.clock.clone();
    let read = move |name: &Name| {
        let (registration, name) = (registration.clone(), name.clone());
        async move {
            let state = inspect_until_reachable(&registration.core, &name).await?;
            registration.core.watchers.on_reported(&registration.changed, &state);
            Ok(state)
        }
    };
    Ok(watch_states_with(clock, first, hints_of(changes), read, recheck))
}

/// A watch survives a lost connection.
async fn inspect_until_reachable(core: &ZooKeeperCore, name: &Name) -> Result<LockState> {
    loop {
        match core.inspect(name).await {
            Err(error) if error.is_retryable() => {
                core.main.wait_connected(Moment::NEVER).await.map_err(|_| Error::Closed)?;
                tokio::time::sleep(RETRY_PAUSE).await;
            }
            state => return state,
        }
    }
}

/// For servers before 3.6, which have no recursive watches.
fn recheck(core: Arc<ZooKeeperCore>, scope: Scope) -> Recheck {
    Recheck::often(Box::new(move || -> BoxFuture<'static, Result<Option<Vec<LockState>>>> {
        let (core, scope) = (core.clone(), scope.clone());
        Box::pin(async move {
            core.wait_connected().await?;
            match &scope {
                Scope::Name(name) => core.inspect(name).await.map(|state| Some(vec![state])),
                Scope::Prefix(prefix) => core.list(prefix).await.map(Some),
            }
        })
    }))
}

/// The watches of this client.
#[derive(Debug, Default)]
pub(super) struct NameWatchers {
    all: Mutex<Vec<NameWatcher>>,
}

#[derive(Debug)]
struct NameWatcher {
    scope: Scope,
    /// Receives the names that may have changed.
    changed: mpsc::UnboundedSender<Name>,
    /// The names to read again after a reconnect: those that were reported or found.
    known: BTreeSet<Name>,
}

impl NameWatchers {
    /// The node at `path` changed.
    pub(super) fn on_node_changed(&self, core: &ZooKeeperCore, path: &str) {
        let mut all = sync::lock(&self.all);
        if all.is_empty() {
            return;
        }
        let Some(name) = core.paths.name_at(path, core.layout) else { return };
        for watcher in all.iter_mut().filter(|watcher| watcher.scope.covers(&name)) {
            watcher.known.insert(name.clone());
            // Fails if the stream was dropped; its registration removes the watcher.
            let _ = watcher.changed.send(name.clone());
        }
    }

    /// A state was reported by the watch. A name that is not used need not be read again after a
    /// reconnect.
    fn on_reported(&self, changed: &mpsc::UnboundedSender<Name>, state: &LockState) {
        let mut all = sync::lock(&self.all);
        let mut all = all.iter_mut().filter(|watcher| matches!(watcher.scope, Scope::Prefix(_)));
        if let Some(watcher) = all.find(|watcher| watcher.changed.same_channel(changed)) {
            match state.is_used() {
                true => watcher.known.insert(state.name.clone()),
                false => watcher.known.remove(&state.name),
            };
        }
    }

    /// There is a new connection: the watch is set again, and every name is read again.
    pub(super) fn on_connected(&self, core: &Arc<ZooKeeperCore>) {
        let all = sync::lock(&self.all);
        if all.is_empty() {
            return;
        }
        let added = core.main.add_watch(&core.paths.chroot);
        let core = core.clone();
        core.runtime.clone().spawn(async move {
            if added.done().await.is_err() {
                // The connection was lost again; the next one starts over.
                return;
            }
            let names = core.list_names(&Prefix::default()).await.unwrap_or_default();
            for watcher in sync::lock(&core.watchers.all).iter_mut() {
                let covered = names.iter().filter(|name| watcher.scope.covers(name)).cloned();
                watcher.known.extend(covered);
                for name in &watcher.known {
                    let _ = watcher.changed.send(name.clone());
                }
            }
        });
    }

    /// Ends all watches.
    pub(super) fn close(&self) {
        sync::lock(&self.all).clear();
    }
}

/// Removes a watcher when its stream is dropped.
struct WatcherRegistration {
    core: Arc<ZooKeeperCore>,
    changed: mpsc::UnboundedSender<Name>,
}

impl Drop for WatcherRegistration {
    fn drop(&mut self) {
        let mut all = sync::lock(&self.core.watchers.all);
        let before = all.len();
        all.retain(|watcher| !watcher.changed.same_channel(&self.changed));
        if all.is_empty() && before > 0 {
            drop(self.core.main.remove_watch(&self.core.paths.chroot));
        }
    }
}
