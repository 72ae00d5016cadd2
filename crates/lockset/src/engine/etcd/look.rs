//! What others see: states, lists, watches, cells; and what an operator does.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use futures_core::stream::BoxStream;
use futures_util::StreamExt;
use tokio::sync::{mpsc, oneshot};

use super::Core;
use super::claims::token_of;
use super::keys::{Word, id_of};
use super::link::{Failed, PERSISTENCE, failed};
use super::news::{News, Reader};
use super::rpc::{KeyValue, TxnRequest};
use super::txn::{always, created, delete, kvs, put, range, read, revision, rewrite, unchanged};
use crate::engine::common::admission::Tally;
use crate::engine::common::watch::watch_states;
use crate::engine::{Break, Cell, ClaimId, Holder, LockState, Scope, Swap, Version, Waiter};
use crate::error::{Error, Result};
use crate::name::{Name, Prefix};
use crate::report::report;

/// So many leases are asked about at once.
const QUESTIONS: usize = 32;
/// How often a claim that changes while it is broken is tried.
const TRIES: usize = 8;
/// A watch looks which names are still in use when it knows so many more than were.
const ROOM: usize = 1024;
const PAUSE: Duration = Duration::from_millis(200);
/// The lease of a key that had none, when it is to end.
const NO_LEASE: Duration = Duration::from_secs(60);

/// One claim as it is written.
struct Seen {
    kv: KeyValue,
    word: Word,
    holds: bool,
}

impl Core {
    pub(super) async fn inspect(&self, name: &Name) -> Result<LockState> {
        let claims = self.layout.claims(name);
        let txn = always(vec![range(&claims), read(&self.layout.cell(name))]);
        let answer = self.link.txn(txn, PERSISTENCE).await.map_err(Failed::into_error)?;
        let ours = kvs(&answer, 0).iter().filter(|kv| self.layout.is_claim_on(&claims, &kv.key));
        let seen = seen(ours.cloned().collect());
        let left = self.left(seen.iter()).await?;
        self.state(name, seen, kvs(&answer, 1).first(), &left)
    }

    pub(super) async fn list(&self, prefix: &Prefix) -> Result<Vec<LockState>> {
        let (claims, cells) = (self.layout.claims_below(prefix), self.layout.cells_below(prefix));
        let txn = always(vec![range(&claims), range(&cells)]);
        let answer = self.link.txn(txn, PERSISTENCE).await.map_err(Failed::into_error)?;
        let mut names = BTreeMap::<Name, (Vec<KeyValue>, Option<&KeyValue>)>::new();
        for kv in kvs(&answer, 0) {
            let is_cell = self.layout.is_beside(&kv.key);
            if let Some(name) = self.layout.name_of(&kv.key).filter(|_| !is_cell) {
                names.entry(name).or_default().0.push(kv.clone());
            }
        }
        for kv in kvs(&answer, 1) {
            if let Some(name) = self.layout.name_of(&kv.key) {
                names.entry(name).or_default().1 = Some(kv);
            }
        }
        let names: Vec<_> = names
            .into_iter()
            .filter(|(name, _)| prefix.covers(name))
            .map(|(name, (claims, cell))| (name, seen(claims), cell))
            .collect();
        let left = self.left(names.iter().flat_map(|(_, seen, _)| seen)).await?;
        let states =
            names.into_iter().map(|(name, seen, cell)| self.state(&name, seen, cell, &left));
        states.collect()
    }

    /// How long the leases of these holders still run; those of this client are known.
    async fn left(&self, seen: impl Iterator<Item = &Seen>) -> Result<HashMap<i64, Duration>> {
        let unknown = |one: &&Seen| {
            let ours = id_of(&one.kv, &one.word).filter(|id| self.places().find(*id).is_some());
            one.holds && ours.is_none() && one.kv.lease != 0
        };
        let leases: BTreeSet<i64> = seen.filter(unknown).map(|one| one.kv.lease).collect();
        let questions = leases.into_iter().map(|lease| async move {
            let answer = self.link.lease_left(lease).await.map_err(Failed::into_error)?;
            // While its leader changes, a server may say that a lease never ends.
            let left = answer.ttl.min(answer.granted_ttl);
            Ok((lease, Duration::from_secs(u64::try_from(left).unwrap_or(0))))
        });
        let answers = futures_util::stream::iter(questions).buffer_unordered(QUESTIONS);
        answers.collect::<Vec<_>>().await.into_iter().collect()
    }

    fn state(
        &self,
        name: &Name,
        seen: Vec<Seen>,
        cell: Option<&KeyValue>,
        left: &HashMap<i64, Duration>,
    ) -> Result<LockState> {
        let mut state = LockState::free(name.clone());
        state.cell = cell.map(cell_of);
        let now = self.clock.now();
        for Seen { kv, word, holds } in seen {
            let id = id_of(&kv, &word);
            if !holds {
                // Of another program: its lease is all that it is known by.
                let claim = id.unwrap_or(ClaimId::from_bits(u128::from(kv.lease.unsigned_abs())));
                state.waiters.push(Waiter { claim, mode: word.mode, note: word.note() });
                continue;
            }
            let ours = id.and_then(|id| self.places().left_of(id, now));
            state.holders.push(Holder {
                claim: id,
                token: Some(token_of(kv.create_revision)?),
                mode: word.mode,
                note: word.note(),
                left: ours.or_else(|| left.get(&kv.lease).copied()).unwrap_or_default(),
                revoked: word.revoked,
            });
        }
        Ok(state)
    }

    pub(super) fn watch(self: &Arc<Self>, scope: &Scope) -> BoxStream<'static, Result<LockState>> {
        let (tell, changes) = mpsc::unbounded_channel();
        let first = match scope {
            Scope::Name(name) => vec![name.clone()],
            Scope::Prefix(_) => Vec::new(),
        };
        let (refuse, refused) = oneshot::channel();
        self.runtime.spawn(report(Arc::downgrade(self), scope.clone(), tell, refuse));
        let core = self.clone();
        let states = watch_states(self.clock.clone(), first, changes, move |name| {
            let (core, name) = (core.clone(), name.clone());
            async move { core.inspect(&name).await }
        });
        // If it ends because it was refused, it says so.
        let why = futures_util::stream::once(refused).filter_map(|why| async { why.ok().map(Err) });
        states.chain(why).boxed()
    }

    pub(super) async fn cell(
        &self,
        name: &Name,
        expect: Version,
        value: Option<Vec<u8>>,
    ) -> Result<Swap> {
        let key = self.layout.cell(name);
        let is_kept = value.is_some();
        let change = value.map_or_else(|| delete(&key), |value| put(&key, value, 0));
        let txn = TxnRequest {
            compare: vec![unchanged(&key, i64::try_from(expect.0).unwrap_or(i64::MAX))],
            success: vec![change],
            failure: vec![read(&key)],
        };
        // Not repeated after an unknown outcome: whoever asks finds out by reading again.
        let answer = self.link.txn_if_unsent(txn).await.map_err(Failed::into_error)?;
        if !answer.succeeded {
            return Ok(Swap::Found(kvs(&answer, 0).first().map(cell_of).unwrap_or_default()));
        }
        let version = if is_kept { revision(&answer) } else { 0 };
        Ok(Swap::Done(Version(u64::try_from(version).unwrap_or(0))))
    }

    pub(super) async fn force_release(&self, name: &Name, how: Break) -> Result<Vec<Holder>> {
        let before = self.inspect(name).await?;
        let mut broken = Vec::new();
        for holder in before.holders {
            if self.break_one(name, &holder, how).await? {
                broken.push(Holder { revoked: true, ..holder });
            }
        }
        Ok(broken)
    }

    /// Whether there was still something to break.
    async fn break_one(&self, name: &Name, holder: &Holder, how: Break) -> Result<bool> {
        let at = holder.token.map_or(0, |token| i64::try_from(token.get()).unwrap_or(i64::MAX));
        for _ in 0..TRIES {
            let all = always(vec![range(&self.layout.claims(name))]);
            let answer = self.link.txn(all, PERSISTENCE).await.map_err(Failed::into_error)?;
            let Some(kv) = kvs(&answer, 0).iter().find(|kv| kv.create_revision == at) else {
                return Ok(false);
            };
            let mut word = Word::read(&kv.value);
            word.revoked = true;
            let change = match how {
                Break::Now => delete(&kv.key),
                // A holder of ours renews no more when it sees this, and is gone by its deadline.
                Break::WhenLeaseEnds if id_of(kv, &word).is_some() => {
                    rewrite(&kv.key, word.write())
                }
                // Others look at nothing but whether the key is there: it gets a lease that nobody
                // keeps alive, and ends when its own would have.
                Break::WhenLeaseEnds => {
                    let left = match kv.lease {
                        0 => NO_LEASE,
                        _ => holder.left + Duration::from_secs(1),
                    };
                    let lease = self.leases.granted(left, false).await;
                    put(&kv.key, word.write(), lease.map_err(Failed::into_error)?.id)
                }
            };
            let txn = TxnRequest {
                compare: vec![created(&kv.key, at), unchanged(&kv.key, kv.mod_revision)],
                success: vec![change],
                failure: Vec::new(),
            };
            let answer = self.link.txn(txn, PERSISTENCE).await.map_err(Failed::into_error)?;
            if answer.succeeded {
                return Ok(true);
            }
        }
        Err(failed(format!("`{name}` changes too often to be broken"), true))
    }
}

/// In the order of the queue, and who of them holds.
fn seen(mut claims: Vec<KeyValue>) -> Vec<Seen> {
    claims.sort_unstable_by_key(|kv| kv.create_revision);
    let mut tally = Tally::default();
    let each = claims.into_iter().map(|kv| {
        let word = Word::read(&kv.value);
        let holds = tally.admits(word.mode);
        tally.add(word.mode);
        Seen { kv, word, holds }
    });
    each.collect()
}

fn cell_of(kv: &KeyValue) -> Cell {
    Cell { version: Version(u64::try_from(kv.mod_revision).unwrap_or(0)), value: kv.value.clone() }
}

/// Tells of every name in scope that may have changed, until nobody listens or it is refused.
async fn report(
    core: std::sync::Weak<Core>,
    scope: Scope,
    tell: mpsc::UnboundedSender<Name>,
    refuse: oneshot::Sender<Error>,
) {
    let Some((mut claims, mut cells)) = core.upgrade().map(|core| readers(&core, &scope)) else {
        return;
    };
    let mut known = Known::default();
    loop {
        let news = tokio::select! {
            news = claims.next() => news,
            news = cells.next() => news,
            () = tell.closed() => None,
        };
        let Some(core) = core.upgrade() else { return };
        let changed = match news {
            None => return,
            Some(News::Changed { key, .. }) => {
                let name = core.layout.name_of(&key).filter(|name| scope.covers(name));
                known.names.extend(name.clone());
                let looked = match known.are_many() {
                    true => in_scope(&core, &scope, &tell).await.map(|used| known.renew(used)),
                    false => Ok(()),
                };
                looked.map(|()| name.into_iter().collect())
            }
            // All that is there, and all that was and may have gone meanwhile.
            Some(News::Fresh) => {
                let used = in_scope(&core, &scope, &tell).await;
                used.map(|used| &used | &known.forget_but(used.clone()))
            }
            Some(News::Refused(error)) => Err(error),
        };
        let told = match changed {
            Ok(names) => names.into_iter().all(|name| tell.send(name).is_ok()),
            Err(error) => {
                // Nobody may read any more.
                let _ = refuse.send(error);
                return;
            }
        };
        if !told {
            return;
        }
    }
}

/// The names that were seen, for those who go while nobody can look.
#[derive(Default)]
struct Known {
    names: BTreeSet<Name>,
    /// So many of them were in use when that was last looked up.
    used: usize,
    /// Those who were not: news of their end may be under way.
    fading: BTreeSet<Name>,
}

impl Known {
    /// Whether most of them may not be in use any more.
    fn are_many(&self) -> bool {
        self.names.len() > 2 * self.used + ROOM
    }

    /// These are in use; the others fade, and those who did so before are forgotten.
    fn renew(&mut self, used: BTreeSet<Name>) {
        self.used = used.len();
        let before = std::mem::replace(&mut self.names, used);
        self.fading = &before - &self.names;
    }

    /// Knows only these from now on. All that it knew before.
    fn forget_but(&mut self, used: BTreeSet<Name>) -> BTreeSet<Name> {
        let before = &self.names | &self.fading;
        *self = Self { used: used.len(), names: used, fading: BTreeSet::new() };
        before
    }
}

fn readers(core: &Core, scope: &Scope) -> (Reader, Reader) {
    let (claims, cells) = match scope {
        Scope::Name(name) => {
            (core.layout.claims(name), super::keys::Keys::one(core.layout.cell(name)))
        }
        Scope::Prefix(prefix) => {
            (core.layout.claims_below(prefix), core.layout.cells_below(prefix))
        }
    };
    (core.stand.watch(claims), core.stand.watch(cells))
}

/// The names in use; fails if nobody listens any more, or may look.
async fn in_scope(
    core: &Core,
    scope: &Scope,
    tell: &mpsc::UnboundedSender<Name>,
) -> Result<BTreeSet<Name>> {
    let prefix = match scope {
        Scope::Name(name) => return Ok(BTreeSet::from([name.clone()])),
        Scope::Prefix(prefix) => prefix,
    };
    while !tell.is_closed() {
        match core.list(prefix).await {
            Ok(states) => return Ok(states.into_iter().map(|state| state.name).collect()),
            Err(error) if !error.is_retryable() => return Err(error),
            Err(error) => {
                report!(debug, error = error, "a watch could not read");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
    Err(Error::Closed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_does_not_remember_names_for_ever_and_forgets_none_too_early() {
        let names = |numbers: std::ops::Range<usize>| -> BTreeSet<Name> {
            numbers.map(|number| format!("n{number}").parse().unwrap()).collect()
        };
        let mut known = Known::default();
        known.names.extend(names(0..ROOM));
        assert!(!known.are_many());
        known.names.extend(names(ROOM..ROOM + 1));
        assert!(known.are_many());
        known.renew(names(0..10));
        assert_eq!((&known.names, &known.fading), (&names(0..10), &names(10..ROOM + 1)));
        known.names.extend(names(0..ROOM + 20));
        assert!(!known.are_many(), "it would look again too often");
        known.renew(names(0..3));
        known.names.extend(names(5000..5001));
        assert_eq!(known.forget_but(names(0..1)), &names(0..ROOM + 20) | &names(5000..5001));
        assert_eq!((&known.names, &known.fading), (&names(0..1), &names(0..0)));
    }
}
