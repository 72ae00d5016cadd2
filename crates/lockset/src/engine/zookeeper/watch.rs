//! Hints for watches, by one recursive watch of the chroot.

use std::sync::{Arc, Mutex};

use futures_core::stream::BoxStream;
use futures_util::{StreamExt, TryFutureExt};

use super::ZooKeeperCore;
use super::client::{ZkErrorCode, ZkRequestError};
use crate::clock::Moment;
use crate::engine::common::hints::{HintReceiver, HintSenders, polling_hints};
use crate::engine::{Hint, Scope};
use crate::error::Result;
use crate::sync;

/// The names in scope that may have changed. Servers before 3.6 have no recursive watches, so all
/// names are read again and again.
pub(super) fn hints(core: Arc<ZooKeeperCore>, scope: Scope) -> BoxStream<'static, Result<Hint>> {
    let start = async move {
        // Listed before the request is sent, so that the end of another watch does not undo it.
        let hints = sync::lock(&core.watchers.0).add(&scope).1;
        let listed = (hints, WatchRegistration(core.clone()));
        loop {
            core.main.wait_connected(Moment::NEVER).await?;
            let added = core.main.add_watch(&core.paths.chroot);
            match added.done().await {
                Ok(()) => break,
                Err(ZkRequestError::Refused(ZkErrorCode::UNIMPLEMENTED)) => {
                    return Ok(polling_hints());
                }
                Err(ZkRequestError::NotSent | ZkRequestError::Unknown) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let next = |(mut hints, registration): (HintReceiver, WatchRegistration)| async {
            Some((hints.next().await?, (hints, registration)))
        };
        let changes = futures_util::stream::unfold(listed, next);
        Ok(futures_util::stream::iter([Ok(Hint::Missed)]).chain(changes).boxed())
    };
    start.try_flatten_stream().boxed()
}

/// The watches of this client.
#[derive(Debug, Default)]
pub(super) struct NameWatchers(Mutex<HintSenders>);

impl NameWatchers {
    /// The node at `path` changed.
    pub(super) fn on_node_changed(&self, core: &ZooKeeperCore, path: &str) {
        let mut all = sync::lock(&self.0);
        if !all.is_empty()
            && let Some(name) = core.paths.name_at(path, core.layout)
        {
            all.changed(&name);
        }
    }

    /// There is a new connection: the watch is set again, and every name is read again.
    pub(super) fn on_connected(&self, core: &Arc<ZooKeeperCore>) {
        if sync::lock(&self.0).is_empty() {
            return;
        }
        let (added, core) = (core.main.add_watch(&core.paths.chroot), core.clone());
        core.runtime.clone().spawn(async move {
            // If the connection was lost again, the next one starts over.
            if added.done().await.is_ok() {
                sync::lock(&core.watchers.0).missed();
            }
        });
    }

    /// Ends all watches.
    pub(super) fn close(&self) {
        sync::lock(&self.0).close();
    }
}

/// Removes the watch at the server with the last watch of this client.
struct WatchRegistration(Arc<ZooKeeperCore>);

impl Drop for WatchRegistration {
    fn drop(&mut self) {
        let core = &self.0;
        let mut all = sync::lock(&core.watchers.0);
        if !all.is_empty() {
            all.sweep();
            if all.is_empty() {
                drop(core.main.remove_watch(&core.paths.chroot));
            }
        }
    }
}
