//! The watch stream of engines that learn of changes name by name.

use std::collections::BTreeMap;
use std::collections::VecDeque;
use std::future::Future;

use futures_core::Stream;
use futures_core::stream::BoxStream;
use futures_util::StreamExt;
use tokio::sync::mpsc;

use super::LockState;
use crate::clock::{Clock, Moment};
use crate::error::Result;
use crate::name::Name;

/// The states of the names in `first`, then of every name in `changes`, then of every name of
/// which a reported lease has run out without anybody touching it.
pub(crate) fn watch_states<R, F>(
    clock: Clock,
    first: Vec<Name>,
    changes: mpsc::UnboundedReceiver<Name>,
    read: R,
) -> BoxStream<'static, Result<LockState>>
where
    R: Fn(&Name) -> F + Send + 'static,
    F: Future<Output = Result<LockState>> + Send + 'static,
{
    let watch = Watch { clock, due: first.into(), leases: BTreeMap::new(), changes, read };
    futures_util::stream::unfold(watch, |mut watch| async {
        let state = watch.next().await?;
        Some((state, watch))
    })
    .boxed()
}

struct Watch<R> {
    clock: Clock,
    due: VecDeque<Name>,
    /// When the first of the reported leases of a name ends.
    leases: BTreeMap<Name, Moment>,
    changes: mpsc::UnboundedReceiver<Name>,
    read: R,
}

impl<R, F> Watch<R>
where
    R: Fn(&Name) -> F,
    F: Future<Output = Result<LockState>>,
{
    async fn next(&mut self) -> Option<Result<LockState>> {
        let name = match self.due.pop_front() {
            Some(name) => name,
            None => self.changed().await?,
        };
        // What changed twice since is reported once.
        while let Ok(other) = self.changes.try_recv() {
            if other != name && !self.due.contains(&other) {
                self.due.push_back(other);
            }
        }
        let state = (self.read)(&name).await;
        self.leases.remove(&name);
        let holders = state.iter().flat_map(|state| &state.holders);
        if let Some(left) = holders.map(|holder| holder.left).min() {
            self.leases.insert(name, self.clock.now() + left);
        }
        Some(state)
    }

    async fn changed(&mut self) -> Option<Name> {
        let lease = self.leases.iter().min_by_key(|(_, ends)| **ends);
        let (name, ends) = match lease {
            Some((name, ends)) => (Some(name.clone()), *ends),
            None => (None, Moment::NEVER),
        };
        tokio::select! {
            changed = self.changes.recv() => changed,
            () = self.clock.sleep_until(ends) => name,
        }
    }
}

/// A channel as a stream.
pub(crate) fn receiver_stream<T: Send + 'static>(
    receiver: mpsc::UnboundedReceiver<T>,
) -> impl Stream<Item = T> + Send + 'static {
    futures_util::stream::unfold(receiver, |mut receiver| async {
        let item = receiver.recv().await?;
        Some((item, receiver))
    })
}
