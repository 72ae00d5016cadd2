//! The watch: reads each name in scope, and again whenever the engine hints that it may have
//! changed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_core::stream::BoxStream;
use futures_util::stream::Fuse;
use futures_util::{FutureExt, StreamExt};

use crate::clock::{Clock, Moment};
use crate::engine::{Engine, Hint, LockState, Scope};
use crate::error::{Error, Result};
use crate::name::Name;
use crate::report::report;

/// The pause before a name is read again that could not be.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// The time after which a name is read again whose lease has no known end.
const UNTIMED_RECHECK: Duration = Duration::from_secs(15);
/// Maximum names that wait to be read.
const MAX_DUE: usize = 1024;
/// The inverse of the largest share of the time that listing may take.
const LISTING_SHARE: u32 = 20;

/// The states of all names in scope, then of each that changed. It ends when the engine is closed
/// or dropped.
pub(crate) fn watch(
    engine: &Arc<dyn Engine>,
    clock: Clock,
    scope: Scope,
) -> BoxStream<'static, Result<LockState>> {
    let watch = Watch::new(engine, clock, scope);
    futures_util::stream::unfold(watch, |mut watch| async {
        let state = watch.next().await?;
        Some((state, watch))
    })
    .boxed()
}

struct Watch {
    engine: Weak<dyn Engine>,
    clock: Clock,
    scope: Scope,
    hints: Fuse<BoxStream<'static, Result<Hint>>>,
    /// The names to read.
    due: Due,
    /// When the first of the reported leases of a name ends: nothing else may tell that.
    leases: BTreeMap<Name, Moment>,
    /// The whole scope is to be read again, but not before that moment.
    missed: bool,
    list_not_before: Moment,
    /// What the engine's hints ended with.
    failed: Option<Error>,
    /// What was last reported of the names in use, as far as it does not change by itself.
    reported: BTreeMap<Name, u64>,
}

impl Watch {
    fn new(engine: &Arc<dyn Engine>, clock: Clock, scope: Scope) -> Self {
        let mut due = Due::default();
        if let Scope::Name(name) = &scope {
            due.push(name.clone());
        }
        Self {
            hints: engine.hints(&scope).fuse(),
            engine: Arc::downgrade(engine),
            due,
            leases: BTreeMap::new(),
            missed: false,
            list_not_before: clock.now(),
            failed: None,
            reported: BTreeMap::new(),
            clock,
            scope,
        }
    }

    async fn next(&mut self) -> Option<Result<LockState>> {
        loop {
            // What changed twice is read once. Hints that do not fit stay where they are bounded.
            while self.due.queue.len() < MAX_DUE {
                let Some(Some(hint)) = self.hints.next().now_or_never() else { break };
                self.on_hint(hint);
            }
            if let Some(name) = self.due.pop() {
                let state = self.engine.upgrade()?.inspect(&name).await;
                if self.is_news(&name, &state) {
                    return Some(state);
                }
            } else if let Some(error) = self.failed.take() {
                return Some(Err(error));
            } else {
                match self.wakeup().await {
                    Wakeup::Closed => return None,
                    Wakeup::Hint(hint) => self.on_hint(hint),
                    Wakeup::LeaseEnd(name) => {
                        self.leases.remove(&name);
                        self.due.push(name);
                    }
                    Wakeup::List => {
                        let engine = self.engine.upgrade()?;
                        if let Err(error) = self.find_changes(&*engine).await {
                            return Some(Err(error));
                        }
                    }
                }
            }
        }
    }

    fn on_hint(&mut self, hint: Result<Hint>) {
        match (hint, &self.scope) {
            (Ok(Hint::Changed(name)), scope) if scope.covers(&name) => self.due.push(name),
            (Ok(Hint::Changed(_)), _) => {}
            (Ok(Hint::Missed), Scope::Name(name)) => self.due.push(name.clone()),
            (Ok(Hint::Missed), Scope::Prefix(_)) => self.missed = true,
            (Err(error), _) => self.failed = Some(error),
        }
    }

    /// Records what was read of a name, and returns whether it is to be reported.
    fn is_news(&mut self, name: &Name, state: &Result<LockState>) -> bool {
        self.leases.remove(name);
        let state = match state {
            Ok(state) => state,
            Err(error) => {
                if error.is_retryable() {
                    // What changed is still to be reported.
                    self.leases.insert(name.clone(), self.clock.now() + RETRY_PAUSE);
                    self.reported.remove(name);
                }
                return true;
            }
        };
        if let Some(left) = state.holders.iter().map(|holder| holder.left).min() {
            // A holder whose lease is over, or that has none, stays until it is removed.
            let left = if left.is_zero() { UNTIMED_RECHECK } else { left };
            self.leases.insert(name.clone(), self.clock.now() + left);
        }
        let lasting = lasting(state);
        let known = match (state.is_used(), &self.scope) {
            (false, Scope::Prefix(_)) => {
                self.reported.remove(name);
                None
            }
            _ => self.reported.insert(name.clone(), lasting),
        };
        known != Some(lasting)
    }

    async fn wakeup(&mut self) -> Wakeup {
        let lease = self.leases.iter().min_by_key(|(_, ends)| **ends);
        let (name, ends) = match lease {
            Some((name, ends)) => (Some(name.clone()), *ends),
            None => (None, Moment::NEVER),
        };
        let list_at = if self.missed { self.list_not_before } else { Moment::NEVER };
        tokio::select! {
            hint = self.hints.next() => hint.map_or(Wakeup::Closed, Wakeup::Hint),
            () = self.clock.sleep_until(ends) => name.map_or(Wakeup::Closed, Wakeup::LeaseEnd),
            () = self.clock.sleep_until(list_at) => Wakeup::List,
        }
    }

    /// Finds the names that are not as they were last reported.
    async fn find_changes(&mut self, engine: &dyn Engine) -> Result<()> {
        let Scope::Prefix(prefix) = &self.scope else { return Ok(()) };
        self.missed = false;
        let started = self.clock.now();
        let listed = engine.list(prefix).await;
        let now = self.clock.now();
        self.list_not_before = now + now.saturating_duration_since(started) * LISTING_SHARE;
        let states = match listed {
            Ok(states) => states,
            Err(error) if error.is_retryable() => {
                report!(debug, error = error, "a watch could not list its names");
                self.missed = true;
                self.list_not_before = self.list_not_before.max(now + RETRY_PAUSE);
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let mut gone: BTreeSet<Name> = self.reported.keys().cloned().collect();
        for state in states {
            gone.remove(&state.name);
            if self.reported.get(&state.name) != Some(&lasting(&state)) {
                self.due.push(state.name);
            }
        }
        gone.into_iter().for_each(|name| self.due.push(name));
        Ok(())
    }
}

enum Wakeup {
    Hint(Result<Hint>),
    LeaseEnd(Name),
    List,
    /// The engine was closed.
    Closed,
}

/// Names, each once, in the order in which they came.
#[derive(Default)]
struct Due {
    queue: VecDeque<Name>,
    queued: BTreeSet<Name>,
}

impl Due {
    fn push(&mut self, name: Name) {
        if self.queued.insert(name.clone()) {
            self.queue.push_back(name);
        }
    }

    fn pop(&mut self) -> Option<Name> {
        let name = self.queue.pop_front()?;
        self.queued.remove(&name);
        Some(name)
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::memory::Memory;
    use crate::engine::{Claim, Wait};

    const NAMES: usize = 3_000;

    /// More names change than hints are kept of.
    #[tokio::test(start_paused = true)]
    async fn a_watch_does_not_remember_names_for_ever_and_forgets_none_too_early() {
        let engine: Arc<dyn Engine> = Arc::new(Memory::new(Clock::tokio()));
        let all = Scope::Prefix("".parse().unwrap());
        let mut watch = Watch::new(&engine, Clock::tokio(), all);
        let mut reported = async |what: &str| {
            let next = async |watch: &mut Watch| watch.next().await.unwrap().unwrap();
            let mut states = BTreeMap::new();
            let wait = Duration::from_secs(1);
            while let Ok(state) = tokio::time::timeout(wait, next(&mut watch)).await {
                states.insert(state.name, state.holders.len());
            }
            assert_eq!(states.len(), NAMES, "{what}");
            (states, watch.reported.len(), watch.leases.len())
        };
        let claim = |number| Claim::plain(&format!("n{number}"), Duration::from_secs(3600));
        let mut held = Vec::new();
        for claim in (0..NAMES).map(claim) {
            let grant = engine.acquire(&claim, Wait::No).await.unwrap().granted().unwrap();
            held.push((claim, grant));
        }
        let (states, known, leases) = reported("all are held").await;
        assert!(states.values().all(|holders| *holders == 1));
        assert_eq!((known, leases), (NAMES, NAMES));
        for (claim, grant) in &held {
            engine.release(claim, grant, None).await.unwrap();
        }
        let (states, known, leases) = reported("all are free").await;
        assert!(states.values().all(|holders| *holders == 0));
        assert_eq!((known, leases), (0, 0));
    }
}
