//! The watch stream of engines that learn of changes name by name.

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use futures_core::Stream;
use futures_core::future::BoxFuture;
use futures_core::stream::BoxStream;
use futures_util::StreamExt;
use tokio::sync::mpsc;

use super::{LockState, Signal};
use crate::clock::{Clock, Moment};
use crate::error::{Error, Result};
use crate::name::Name;

/// How often a watch looks by itself, where changes may go unreported.
const RECHECK: Duration = Duration::from_secs(1);
/// It takes at most one part in so many of the time.
const RECHECK_SHARE: u32 = 20;

/// For engines whose reports of changes may get lost: the states of all names in the scope of the
/// watch; `None` if nothing has changed at all since it was called last.
pub(crate) type Recheck =
    Box<dyn FnMut() -> BoxFuture<'static, Result<Option<Vec<LockState>>>> + Send>;

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
    watch_states_with(clock, first, changes, read, None)
}

/// The same, and now and then the states of those names of which a change was not reported.
pub(crate) fn watch_states_with<R, F>(
    clock: Clock,
    first: Vec<Name>,
    changes: mpsc::UnboundedReceiver<Name>,
    read: R,
    recheck: Option<Recheck>,
) -> BoxStream<'static, Result<LockState>>
where
    R: Fn(&Name) -> F + Send + 'static,
    F: Future<Output = Result<LockState>> + Send + 'static,
{
    let recheck_at = if recheck.is_some() { clock.now() + RECHECK } else { Moment::NEVER };
    let watch = Watch {
        clock,
        due: first.into(),
        leases: BTreeMap::new(),
        changes,
        read,
        recheck,
        recheck_at,
        reported: BTreeMap::new(),
    };
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
    recheck: Option<Recheck>,
    recheck_at: Moment,
    /// What was last reported of the names in use, as far as it does not change by itself. Only
    /// kept if there are rechecks.
    reported: BTreeMap<Name, u64>,
}

impl<R, F> Watch<R>
where
    R: Fn(&Name) -> F,
    F: Future<Output = Result<LockState>>,
{
    async fn next(&mut self) -> Option<Result<LockState>> {
        let name = loop {
            if let Some(name) = self.due.pop_front() {
                break name;
            }
            match self.event().await {
                Event::Changed(name) => break name?,
                Event::Recheck => {
                    if let Err(error) = self.look_at_all().await {
                        return Some(Err(error));
                    }
                }
            }
        };
        // What changed twice since is reported once.
        while let Ok(other) = self.changes.try_recv() {
            if other != name && !self.due.contains(&other) {
                self.due.push_back(other);
            }
        }
        let state = (self.read)(&name).await;
        self.leases.remove(&name);
        if state.as_ref().is_err_and(Error::is_retryable) {
            // What changed is still to be told.
            self.leases.insert(name.clone(), self.clock.now() + RECHECK);
        }
        if let (Ok(state), Some(_)) = (&state, &self.recheck) {
            match state.is_used() {
                true => self.reported.insert(name.clone(), lasting(state)),
                false => self.reported.remove(&name),
            };
        }
        let holders = state.iter().flat_map(|state| &state.holders);
        if let Some(left) = holders.map(|holder| holder.left).min() {
            // One whose lease is over, or has none, is there until somebody takes it away.
            let left = if left.is_zero() { RECHECK } else { left };
            self.leases.insert(name, self.clock.now() + left);
        }
        Some(state)
    }

    async fn event(&mut self) -> Event {
        let lease = self.leases.iter().min_by_key(|(_, ends)| **ends);
        let (name, ends) = match lease {
            Some((name, ends)) => (Some(name.clone()), *ends),
            None => (None, Moment::NEVER),
        };
        tokio::select! {
            changed = self.changes.recv() => Event::Changed(changed),
            () = self.clock.sleep_until(ends) => Event::Changed(name),
            () = self.clock.sleep_until(self.recheck_at) => Event::Recheck,
        }
    }

    /// Finds the names that are not as they were last reported.
    async fn look_at_all(&mut self) -> Result<()> {
        let Some(recheck) = &mut self.recheck else { return Ok(()) };
        let started = self.clock.now();
        let found = recheck().await;
        let now = self.clock.now();
        self.recheck_at = now + RECHECK.max(now.since(started) * RECHECK_SHARE);
        let states = match found {
            Ok(Some(states)) => states,
            // The next one will tell.
            Ok(None) => return Ok(()),
            Err(error) if error.is_retryable() => return Ok(()),
            Err(error) => return Err(error),
        };
        let used: BTreeMap<Name, u64> = states
            .iter()
            .filter(|state| state.is_used())
            .map(|state| (state.name.clone(), lasting(state)))
            .collect();
        let news = used.iter().filter(|(name, state)| self.reported.get(*name) != Some(*state));
        let gone = self.reported.keys().filter(|name| !used.contains_key(*name));
        self.due.extend(news.map(|(name, _)| name).chain(gone).cloned());
        Ok(())
    }
}

enum Event {
    /// `None`: the engine was closed.
    Changed(Option<Name>),
    Recheck,
}

/// All of a state but what changes while time passes.
fn lasting(state: &LockState) -> u64 {
    let mut hasher = DefaultHasher::new();
    for holder in &state.holders {
        let note = (&*holder.note.by, &*holder.note.text);
        (holder.claim, holder.token, holder.mode, holder.revoked, note).hash(&mut hasher);
    }
    for waiter in &state.waiters {
        (waiter.claim, waiter.mode, &*waiter.note.by, &*waiter.note.text).hash(&mut hasher);
    }
    let version = state.cell.as_ref().map(|cell| cell.version.0);
    (state.holders.len(), state.waiters.len(), state.fence, version).hash(&mut hasher);
    hasher.finish()
}

/// What an engine tells its keeper, which asks for it once.
pub(crate) fn told_once(
    signals: Option<mpsc::UnboundedReceiver<Signal>>,
) -> BoxStream<'static, Signal> {
    match signals {
        Some(signals) => receiver_stream(signals).boxed(),
        None => futures_util::stream::empty().boxed(),
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
