//! Looking: one name, all names, and what changes; and taking a lock away.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_core::stream::BoxStream;
use futures_util::StreamExt;
use futures_util::future::{BoxFuture, join_all};
use tokio::sync::mpsc;

use super::acquire::Trouble;
use super::admission::holders;
use super::cells::cell_of;
use super::client::session::Fault;
use super::client::wire::{Refusal, Stat};
use super::layout::Place;
use super::record::Words;
use super::renew::{cannot_ask, edit};
use super::{Core, PATIENCE};
use crate::clock::Moment;
use crate::engine::common::watch::{Recheck, hints_of, watch_states_with};
use crate::engine::{Break, Cell, ClaimId, Holder, LockState, Scope, Waiter};
use crate::error::{Error, Result};
use crate::name::{Name, Note, Prefix};
use crate::sync;

/// The pause before something is looked at again that could not be.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// One who holds or waits, as its node tells.
struct Seen {
    place: Place,
    /// `None`: it is not lockset's.
    words: Option<Words>,
    stat: Stat,
}

impl Core {
    pub(super) async fn look(&self, name: &Name) -> Result<LockState> {
        let give_up = self.clock.now() + PATIENCE;
        loop {
            match self.try_to_look(name).await {
                // To look again does no harm.
                Err(Trouble::Fault(Fault::NotSent | Fault::Unknown))
                    if self.clock.now() < give_up =>
                {
                    self.ready().await?;
                }
                Err(trouble) => return Err(trouble.into()),
                Ok(state) => return Ok(state),
            }
        }
    }

    async fn try_to_look(&self, name: &Name) -> Result<LockState, Trouble> {
        let (queue, cell) = self.survey(name).await?;
        let places: Vec<Place> = queue.iter().map(|seen| seen.place.clone()).collect();
        let (holding, waiting) = queue.split_at(holders(&places));
        Ok(LockState {
            name: name.clone(),
            holders: holding.iter().map(|seen| self.holder(seen)).collect(),
            waiters: waiting.iter().map(|seen| self.waiter(seen)).collect(),
            fence: None,
            cell,
        })
    }

    /// All who hold or wait, in their order, and the cell: as new as what the leader knows now.
    async fn survey(&self, name: &Name) -> Result<(Vec<Seen>, Option<Cell>), Trouble> {
        let (parent, cell) = (self.paths.lock(name)?, self.paths.cell(name));
        self.ready().await?;
        let session = &self.main;
        let (sync, list, cell) =
            (session.sync(&parent), session.children(&parent, false), session.data(&cell, false));
        sync.done().await?;
        let children = match list.children().await {
            Err(fault) if fault.is(Refusal::NO_NODE) => Vec::new(),
            children => children?,
        };
        let cell = match cell.data().await {
            Ok((data, stat)) => Some(cell_of(name, &data, stat)?),
            Err(fault) if fault.is(Refusal::NO_NODE) => None,
            Err(fault) => return Err(fault.into()),
        };
        let places = self.layout.queue(&children);
        let asked: Vec<_> = places
            .iter()
            .map(|place| session.data(&format!("{parent}/{}", place.node), false))
            .collect();
        let mut queue = Vec::with_capacity(places.len());
        for (place, asked) in places.into_iter().zip(asked) {
            match asked.data().await {
                Ok((data, stat)) => queue.push(Seen { place, words: Words::read(&data), stat }),
                // It left in between.
                Err(fault) if fault.is(Refusal::NO_NODE) => {}
                // It is there, but what it says is not for everybody.
                Err(fault) if fault.is(Refusal::NO_AUTH) => {
                    queue.push(Seen { place, words: None, stat: Stat::default() });
                }
                Err(fault) => return Err(fault.into()),
            }
        }
        Ok((queue, cell))
    }

    fn claim_of(&self, seen: &Seen) -> Option<ClaimId> {
        let first = self.layout.claim_of(&seen.place.node)?;
        seen.words.as_ref().map(|words| words.claim(first))
    }

    fn holder(&self, seen: &Seen) -> Holder {
        let (claim, words) = (self.claim_of(seen), seen.words.as_ref());
        // Nobody but the leader knows when a session ends; for our own locks we know it better.
        let lease = claim.and_then(|id| self.book().entries.get(&id)?.lease);
        let left = match lease {
            Some(lease) => lease.saturating_duration_since(self.clock.now()),
            None => words.map_or(self.timeout, Words::ttl),
        };
        Holder {
            claim,
            token: words.map(|words| words.token(seen.stat.czxid)),
            mode: seen.place.mode.into(),
            note: words.map_or_else(Note::default, |words| words.note().clone()),
            left,
            revoked: words.is_some_and(|words| words.revoked),
        }
    }

    fn waiter(&self, seen: &Seen) -> Waiter {
        let claim = self.layout.claim_of(&seen.place.node);
        Waiter {
            claim: claim.unwrap_or(ClaimId::from_bits(0)),
            mode: seen.place.mode.into(),
            note: seen.words.as_ref().map_or_else(Note::default, |words| words.note().clone()),
        }
    }

    pub(super) async fn list(&self, prefix: &Prefix) -> Result<Vec<LockState>> {
        let names = self.names(prefix).await?;
        let looks = join_all(names.iter().map(|name| self.try_to_look(name))).await;
        let mut states = Vec::new();
        for look in looks {
            match look {
                Ok(state) => states.push(state),
                // A listing shows what this user may see.
                Err(Trouble::Fault(fault)) if fault.is(Refusal::NO_AUTH) => {}
                Err(trouble) => return Err(trouble.into()),
            }
        }
        Ok(states.into_iter().filter(LockState::is_used).collect())
    }

    /// The names with this prefix that have a node or a cell; in order.
    async fn names(&self, prefix: &Prefix) -> Result<Vec<Name>> {
        self.ready().await?;
        let (chroot, cells) = (&self.paths.chroot, self.paths.cells());
        let sync = self.main.sync(chroot);
        let (locks, cells) = (self.main.children(chroot, false), self.main.children(&cells, false));
        sync.done().await?;
        let locks = locks.children().await?;
        let cells = match cells.children().await {
            Err(fault) if fault.is(Refusal::NO_NODE) => Vec::new(),
            cells => cells?,
        };
        let mut names: BTreeSet<Name> =
            cells.iter().filter_map(|cell| self.paths.name_of_cell(cell)).collect();
        let locks = locks.into_iter().filter(|child| !self.paths.is_cells(child));
        if self.paths.raw {
            self.names_below(locks.collect(), &mut names).await?;
        } else {
            names.extend(locks.filter_map(|lock| self.paths.name_of_lock(&lock)));
        }
        Ok(names.into_iter().filter(|name| prefix.covers(name)).collect())
    }

    /// Raw names are paths: whatever has claims for children is a lock.
    async fn names_below(&self, mut level: Vec<String>, names: &mut BTreeSet<Name>) -> Result<()> {
        while !level.is_empty() {
            let asked: Vec<_> = level
                .iter()
                .map(|below| self.main.children(&format!("{}/{below}", self.paths.chroot), false))
                .collect();
            let mut next = Vec::new();
            for (below, asked) in level.into_iter().zip(asked) {
                let children = match asked.children().await {
                    Err(Fault::Refused(_)) => continue,
                    children => children?,
                };
                let (claims, others): (Vec<String>, Vec<String>) =
                    children.into_iter().partition(|child| self.layout.is_claim(child));
                if !claims.is_empty() {
                    names.extend(self.paths.name_of_lock(&below));
                }
                next.extend(others.into_iter().map(|child| format!("{below}/{child}")));
            }
            level = next;
        }
        Ok(())
    }

    pub(super) async fn force_release(&self, name: &Name, how: Break) -> Result<Vec<Holder>> {
        let parent = self.paths.lock(name)?;
        let (mut queue, _) = self.survey(name).await?;
        let places: Vec<Place> = queue.iter().map(|seen| seen.place.clone()).collect();
        queue.truncate(holders(&places));
        if how == Break::WhenLeaseEnds && queue.iter().any(|seen| seen.words.is_none()) {
            return Err(cannot_ask());
        }
        for seen in &queue {
            let path = format!("{parent}/{}", seen.place.node);
            let outcome = match how {
                Break::Now => self.main.delete(&path).done().await,
                Break::WhenLeaseEnds => edit(&self.main, &path, |words| words.revoked = true).await,
            };
            match outcome {
                Err(fault) if !fault.is(Refusal::NO_NODE) => return Err(fault.into()),
                _ => {}
            }
        }
        Ok(queue.iter().map(|seen| self.holder(seen)).collect())
    }
}

/// Those who watch names.
#[derive(Debug, Default)]
pub(super) struct Observers {
    all: Mutex<Vec<Observer>>,
}

#[derive(Debug)]
struct Observer {
    scope: Scope,
    tell: mpsc::UnboundedSender<Name>,
    /// What it was told of, or found: it must be looked at again after a gap.
    known: BTreeSet<Name>,
}

impl Observers {
    /// Something at `path` changed.
    pub(super) fn changed(&self, core: &Core, path: &str) {
        let mut all = sync::lock(&self.all);
        if all.is_empty() {
            return;
        }
        let Some(name) = core.paths.name_at(path, core.layout) else { return };
        for observer in all.iter_mut().filter(|observer| observer.scope.covers(&name)) {
            observer.known.insert(name.clone());
            // One that is gone takes itself out.
            let _ = observer.tell.send(name.clone());
        }
    }

    /// An observer has seen this: a name that nobody uses need not be looked at again after a gap.
    fn seen(&self, tell: &mpsc::UnboundedSender<Name>, state: &LockState) {
        let mut all = sync::lock(&self.all);
        let mut all = all.iter_mut().filter(|observer| matches!(observer.scope, Scope::Prefix(_)));
        if let Some(observer) = all.find(|observer| observer.tell.same_channel(tell)) {
            match state.is_used() {
                true => observer.known.insert(state.name.clone()),
                false => observer.known.remove(&state.name),
            };
        }
    }

    /// There is a new connection, so the watch has to be set again, and everything looked at.
    pub(super) fn reconnected(&self, core: &Arc<Core>) {
        let all = sync::lock(&self.all);
        if all.is_empty() {
            return;
        }
        let added = core.main.add_watch(&core.paths.chroot);
        let core = core.clone();
        core.runtime.clone().spawn(async move {
            if added.done().await.is_err() {
                // The connection is gone again, and the next one begins here.
                return;
            }
            let names = core.names(&Prefix::default()).await.unwrap_or_default();
            for observer in sync::lock(&core.observers.all).iter_mut() {
                let covered = names.iter().filter(|name| observer.scope.covers(name)).cloned();
                observer.known.extend(covered);
                for name in &observer.known {
                    let _ = observer.tell.send(name.clone());
                }
            }
        });
    }

    /// Ends all watches.
    pub(super) fn close(&self) {
        sync::lock(&self.all).clear();
    }
}

/// Takes an observer out when nobody listens to it any more.
struct Seat {
    core: Arc<Core>,
    tell: mpsc::UnboundedSender<Name>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut all = sync::lock(&self.core.observers.all);
        let before = all.len();
        all.retain(|observer| !observer.tell.same_channel(&self.tell));
        if all.is_empty() && before > 0 {
            drop(self.core.main.remove_watch(&self.core.paths.chroot));
        }
    }
}

/// The states of all names in scope, then of each that may have changed.
pub(super) fn watch(core: Arc<Core>, scope: Scope) -> BoxStream<'static, Result<LockState>> {
    futures_util::stream::once(begin(core, scope))
        .flat_map(|begun| match begun {
            Ok(states) => states,
            Err(error) => futures_util::stream::once(async { Err(error) }).boxed(),
        })
        .boxed()
}

async fn begin(core: Arc<Core>, scope: Scope) -> Result<BoxStream<'static, Result<LockState>>> {
    let (tell, changes) = mpsc::unbounded_channel();
    let seat = Arc::new(Seat { core: core.clone(), tell: tell.clone() });
    let by_looking = loop {
        core.main.ready(Moment::NEVER).await?;
        let added = {
            let mut all = sync::lock(&core.observers.all);
            if !all.iter().any(|observer| observer.tell.same_channel(&tell)) {
                let known = match &scope {
                    Scope::Name(name) => BTreeSet::from([name.clone()]),
                    Scope::Prefix(_) => BTreeSet::new(),
                };
                all.push(Observer { scope: scope.clone(), tell: tell.clone(), known });
            }
            core.main.add_watch(&core.paths.chroot)
        };
        match added.done().await {
            Ok(()) => break false,
            Err(Fault::Refused(Refusal::UNIMPLEMENTED)) => break true,
            Err(Fault::NotSent | Fault::Unknown) => {}
            Err(fault) => return Err(fault.into()),
        }
    };
    let first = match &scope {
        Scope::Name(name) => vec![name.clone()],
        Scope::Prefix(prefix) => core.names(prefix).await?,
    };
    let recheck = by_looking.then(|| recheck(core.clone(), scope));
    let clock = core.clock.clone();
    let read = move |name: &Name| {
        let (seat, name) = (seat.clone(), name.clone());
        async move {
            let state = look_until_seen(&seat.core, &name).await?;
            seat.core.observers.seen(&seat.tell, &state);
            Ok(state)
        }
    };
    Ok(watch_states_with(clock, first, hints_of(changes), read, recheck))
}

/// A watch goes on over a lost connection.
async fn look_until_seen(core: &Core, name: &Name) -> Result<LockState> {
    loop {
        match core.look(name).await {
            Err(error) if error.is_retryable() => {
                core.main.ready(Moment::NEVER).await.map_err(|_| Error::Closed)?;
                tokio::time::sleep(LOOK_AGAIN).await;
            }
            state => return state,
        }
    }
}

/// For servers before 3.6, which cannot watch a node and all below it.
fn recheck(core: Arc<Core>, scope: Scope) -> Recheck {
    Recheck::often(Box::new(move || -> BoxFuture<'static, Result<Option<Vec<LockState>>>> {
        let (core, scope) = (core.clone(), scope.clone());
        Box::pin(async move {
            core.main.ready(core.clock.now() + PATIENCE).await?;
            match &scope {
                Scope::Name(name) => core.look(name).await.map(|state| Some(vec![state])),
                Scope::Prefix(prefix) => core.list(prefix).await.map(Some),
            }
        })
    }))
}
