//! The watch stream: engines tell which names may have changed, and a slow recheck finds what they
//! missed.

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use futures_core::Stream;
use futures_core::future::BoxFuture;
use futures_core::stream::BoxStream;
use futures_util::stream::Fuse;
use futures_util::{FutureExt, StreamExt};
use tokio::sync::mpsc;

use crate::clock::{Clock, Moment};
use crate::engine::{Event, LockState};
use crate::error::Result;
use crate::name::Name;

/// How often a watch looks by itself, where changes may go unreported.
pub(crate) const RECHECK: Duration = Duration::from_secs(1);
/// It takes at most one part in so many of the time.
const RECHECK_SHARE: u32 = 20;

/// What an engine tells a watch. It never has to be exact: a hint costs one look.
#[derive(Clone, Debug)]
pub(crate) enum Hint {
    /// This name may have changed.
    Changed(Name),
    /// Changes may have gone unreported: all names are to be looked at. Only for watches with a
    /// recheck.
    #[cfg_attr(not(feature = "redis"), expect(dead_code, reason = "only redis needs it"))]
    Missed,
}

/// For engines whose hints may get lost.
pub(crate) struct Recheck {
    /// How often to look, as things are now.
    pub(crate) every: Box<dyn Fn() -> Duration + Send>,
    /// The states of all names in the scope of the watch; `None` if nothing has changed at all
    /// since it was called last.
    pub(crate) states: States,
}

type States = Box<dyn FnMut() -> BoxFuture<'static, Result<Option<Vec<LockState>>>> + Send>;

#[cfg(any(feature = "local", feature = "zookeeper"))]
impl Recheck {
    /// Looks every [`RECHECK`].
    pub(crate) fn often(states: States) -> Self {
        Self { every: Box::new(|| RECHECK), states }
    }
}

/// The states of the names in `first`, then of every name in `changes`, then of every name of
/// which a reported lease has run out without a change.
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
    watch_states_with(clock, first, hints_of(changes), read, None)
}

/// The same, and now and then the states of those names of which a change was not reported. With
/// rechecks, a state that is as it was last reported is not reported again.
pub(crate) fn watch_states_with<R, F>(
    clock: Clock,
    first: Vec<Name>,
    hints: impl Stream<Item = Hint> + Send + 'static,
    read: R,
    recheck: Option<Recheck>,
) -> BoxStream<'static, Result<LockState>>
where
    R: Fn(&Name) -> F + Send + 'static,
    F: Future<Output = Result<LockState>> + Send + 'static,
{
    let now = clock.now();
    let watch = Watch {
        clock,
        due: first.into(),
        leases: BTreeMap::new(),
        hints: hints.boxed().fuse(),
        read,
        recheck,
        rechecked: now,
        not_before: now,
        missed: false,
        reported: BTreeMap::new(),
    };
    futures_util::stream::unfold(watch, |mut watch| async {
        let state = watch.next().await?;
        Some((state, watch))
    })
    .boxed()
}

/// Names from a channel as hints.
pub(crate) fn hints_of(
    changes: mpsc::UnboundedReceiver<Name>,
) -> impl Stream<Item = Hint> + Send + 'static {
    receiver_stream(changes).map(Hint::Changed)
}

struct Watch<R> {
    clock: Clock,
    due: VecDeque<Name>,
    /// When the first of the reported leases of a name ends.
    leases: BTreeMap<Name, Moment>,
    hints: Fuse<BoxStream<'static, Hint>>,
    read: R,
    recheck: Option<Recheck>,
    /// When the last recheck ended, and before when there is to be no other.
    rechecked: Moment,
    not_before: Moment,
    /// Hints may have been lost since.
    missed: bool,
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
        loop {
            let Some(name) = self.due.pop_front() else {
                match self.event().await {
                    Wakeup::Closed => return None,
                    Wakeup::Told(hint) => self.on_hint(hint),
                    Wakeup::Recheck => {
                        if let Err(error) = self.look_at_all().await {
                            return Some(Err(error));
                        }
                    }
                }
                continue;
            };
            // What changed twice since is reported once.
            while let Some(Some(hint)) = self.hints.next().now_or_never() {
                self.on_hint(hint);
            }
            self.due.retain(|other| *other != name);
            let state = (self.read)(&name).await;
            if self.is_news(&name, &state) {
                return Some(state);
            }
        }
    }

    fn on_hint(&mut self, hint: Hint) {
        match hint {
            Hint::Changed(name) if self.due.contains(&name) => {}
            Hint::Changed(name) => self.due.push_back(name),
            Hint::Missed => self.missed = true,
        }
    }

    /// Notes what was read of a name, and whether that is to be reported.
    fn is_news(&mut self, name: &Name, state: &Result<LockState>) -> bool {
        self.leases.remove(name);
        let state = match state {
            Ok(state) => state,
            Err(error) => {
                if error.is_retryable() {
                    // What changed is still to be told.
                    self.leases.insert(name.clone(), self.clock.now() + RECHECK);
                    self.reported.remove(name);
                }
                return true;
            }
        };
        if let Some(left) = state.holders.iter().map(|holder| holder.left).min() {
            // A holder whose lease is over, or that has none, stays until it is removed.
            let every = self.recheck.as_ref().map_or(RECHECK, |recheck| (recheck.every)());
            let left = if left.is_zero() { every.max(RECHECK) } else { left };
            self.leases.insert(name.clone(), self.clock.now() + left);
        }
        if self.recheck.is_none() {
            return true;
        }
        let known = match state.is_used() {
            true => self.reported.insert(name.clone(), lasting(state)),
            false => {
                self.reported.remove(name);
                None
            }
        };
        known.is_none() || known != self.reported.get(name).copied()
    }

    async fn event(&mut self) -> Wakeup {
        let lease = self.leases.iter().min_by_key(|(_, ends)| **ends);
        let (name, ends) = match lease {
            Some((name, ends)) => (Some(name.clone()), *ends),
            None => (None, Moment::NEVER),
        };
        let recheck_at = match &self.recheck {
            None => Moment::NEVER,
            Some(_) if self.missed => self.not_before,
            Some(recheck) => (self.rechecked + (recheck.every)()).max(self.not_before),
        };
        tokio::select! {
            hint = self.hints.next() => hint.map_or(Wakeup::Closed, Wakeup::Told),
            () = self.clock.sleep_until(ends) => {
                name.map_or(Wakeup::Closed, |name| Wakeup::Told(Hint::Changed(name)))
            }
            () = self.clock.sleep_until(recheck_at) => Wakeup::Recheck,
        }
    }

    /// Finds the names that are not as they were last reported.
    async fn look_at_all(&mut self) -> Result<()> {
        let Some(recheck) = &mut self.recheck else { return Ok(()) };
        self.missed = false;
        let started = self.clock.now();
        let found = (recheck.states)().await;
        self.rechecked = self.clock.now();
        self.not_before =
            self.rechecked + self.rechecked.saturating_duration_since(started) * RECHECK_SHARE;
        let states = match found {
            Ok(Some(states)) => states,
            // The next one will tell.
            Ok(None) => return Ok(()),
            Err(error) if error.is_retryable() => {
                self.missed = true;
                self.not_before = self.not_before.max(self.rechecked + RECHECK);
                return Ok(());
            }
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

enum Wakeup {
    Told(Hint),
    Recheck,
    /// The engine was closed.
    Closed,
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
    events: Option<mpsc::UnboundedReceiver<Event>>,
) -> BoxStream<'static, Event> {
    match events {
        Some(events) => receiver_stream(events).boxed(),
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
