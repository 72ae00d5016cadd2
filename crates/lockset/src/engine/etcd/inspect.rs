//! Reading what is stored: the state of a lock, lists, and watches of states.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_core::stream::BoxStream;
use futures_util::StreamExt;
use tokio::sync::{mpsc, oneshot};

use super::EtcdCore;
use super::cells::decode_cell;
use super::connection::RETRY_TIMEOUT;
use super::keys::KeyRange;
use super::record::{ClaimRecord, claim_id_of, token_from_revision};
use super::rpc::KeyValue;
use super::txn::{get, kvs, range, unconditional};
use super::watch::{WatchEvent, WatchSubscription};
use crate::engine::common::admission::Tally;
use crate::engine::common::watch::watch_states;
use crate::engine::{ClaimId, Holder, LockState, Scope, Waiter};
use crate::error::{Error, Result};
use crate::name::{Name, Prefix};
use crate::report::report;

/// Maximum leases that are read at once.
const MAX_CONCURRENT_LEASE_READS: usize = 32;
/// A watch prunes its names when it knows this many more than twice those in use.
const MAX_UNUSED_NAMES: usize = 1024;
const LIST_RETRY_PAUSE: Duration = Duration::from_millis(200);

/// One claim as it is stored.
struct StoredClaim {
    kv: KeyValue,
    record: ClaimRecord,
    holds: bool,
}

impl EtcdCore {
    pub(super) async fn inspect(&self, name: &Name) -> Result<LockState> {
        let queue = self.layout.claims(name);
        let txn = unconditional(vec![range(&queue), get(&self.layout.cell(name))]);
        let reply = self.connection.txn_with_retry(txn, RETRY_TIMEOUT).await?;
        let claims = kvs(&reply, 0).iter().filter(|kv| self.layout.is_claim_on(&queue, &kv.key));
        let claims = stored_claims(claims.cloned().collect());
        let leases_left = self.leases_left(claims.iter()).await?;
        self.lock_state(name, claims, kvs(&reply, 1).first(), &leases_left)
    }

    pub(super) async fn list(&self, prefix: &Prefix) -> Result<Vec<LockState>> {
        let (claims, cells) = (self.layout.claims_below(prefix), self.layout.cells_below(prefix));
        let txn = unconditional(vec![range(&claims), range(&cells)]);
        let reply = self.connection.txn_with_retry(txn, RETRY_TIMEOUT).await?;
        let mut names = BTreeMap::<Name, (Vec<KeyValue>, Option<&KeyValue>)>::new();
        for kv in kvs(&reply, 0) {
            let is_reserved = self.layout.is_reserved(&kv.key);
            if let Some(name) = self.layout.name_of(&kv.key).filter(|_| !is_reserved) {
                names.entry(name).or_default().0.push(kv.clone());
            }
        }
        for kv in kvs(&reply, 1) {
            if let Some(name) = self.layout.name_of(&kv.key) {
                names.entry(name).or_default().1 = Some(kv);
            }
        }
        let names: Vec<_> = names
            .into_iter()
            .filter(|(name, _)| prefix.covers(name))
            .map(|(name, (claims, cell))| (name, stored_claims(claims), cell))
            .collect();
        let leases_left = self.leases_left(names.iter().flat_map(|(_, claims, _)| claims)).await?;
        let states = names
            .into_iter()
            .map(|(name, claims, cell)| self.lock_state(&name, claims, cell, &leases_left));
        states.collect()
    }

    /// How long the leases of these holders still run. Those of this client's claims are not read:
    /// the ledger knows them.
    async fn leases_left(
        &self,
        claims: impl Iterator<Item = &StoredClaim>,
    ) -> Result<HashMap<i64, Duration>> {
        let is_unknown = |claim: &&StoredClaim| {
            let id = claim_id_of(&claim.kv, &claim.record);
            let own = id.filter(|id| self.ledger().find(*id).is_some());
            claim.holds && own.is_none() && claim.kv.lease != 0
        };
        let leases: BTreeSet<i64> = claims.filter(is_unknown).map(|claim| claim.kv.lease).collect();
        let reads = leases.into_iter().map(|lease| async move {
            let reply = self.connection.lease_time_to_live(lease).await?;
            // During a change of leader, a server may reply that a lease never ends.
            let left = reply.ttl.min(reply.granted_ttl);
            Ok::<_, Error>((lease, Duration::from_secs(u64::try_from(left).unwrap_or(0))))
        });
        let replies =
            futures_util::stream::iter(reads).buffer_unordered(MAX_CONCURRENT_LEASE_READS);
        replies.collect::<Vec<_>>().await.into_iter().collect()
    }

    fn lock_state(
        &self,
        name: &Name,
        claims: Vec<StoredClaim>,
        cell: Option<&KeyValue>,
        leases_left: &HashMap<i64, Duration>,
    ) -> Result<LockState> {
        let mut state = LockState::free(name.clone());
        state.cell = cell.map(decode_cell);
        let now = self.clock.now();
        for StoredClaim { kv, record, holds } in claims {
            let id = claim_id_of(&kv, &record);
            if !holds {
                // A claim of another program is identified by its lease only.
                let claim = id.unwrap_or(ClaimId::from_bits(u128::from(kv.lease.unsigned_abs())));
                state.waiters.push(Waiter { claim, mode: record.mode, note: record.note() });
                continue;
            }
            let own = id.and_then(|id| self.ledger().time_left(id, now));
            state.holders.push(Holder {
                claim: id,
                token: Some(token_from_revision(kv.create_revision)?),
                mode: record.mode,
                note: record.note(),
                left: own.or_else(|| leases_left.get(&kv.lease).copied()).unwrap_or_default(),
                revoked: record.revoked,
            });
        }
        Ok(state)
    }

    pub(super) fn watch(self: &Arc<Self>, scope: &Scope) -> BoxStream<'static, Result<LockState>> {
        let (changed, changes) = mpsc::unbounded_channel();
        let first = match scope {
            Scope::Name(name) => vec![name.clone()],
            Scope::Prefix(_) => Vec::new(),
        };
        let (reject, rejected) = oneshot::channel();
        self.runtime.spawn(report_changes(Arc::downgrade(self), scope.clone(), changed, reject));
        let core = self.clone();
        let states = watch_states(self.clock.clone(), first, changes, move |name| {
            let (core, name) = (core.clone(), name.clone());
            async move { core.inspect(&name).await }
        });
        // If the watch was rejected, the stream ends with that error.
        let error =
            futures_util::stream::once(rejected).filter_map(|error| async { error.ok().map(Err) });
        states.chain(error).boxed()
    }
}

/// The claims in the order of the queue, and which of them hold.
fn stored_claims(mut kvs: Vec<KeyValue>) -> Vec<StoredClaim> {
    kvs.sort_unstable_by_key(|kv| kv.create_revision);
    let mut tally = Tally::default();
    let claims = kvs.into_iter().map(|kv| {
        let record = ClaimRecord::decode(&kv.value);
        let holds = tally.admits(record.mode);
        tally.add(record.mode);
        StoredClaim { kv, record, holds }
    });
    claims.collect()
}

/// Sends every name in scope that may have changed, until the receiver is dropped or the watch is
/// rejected.
async fn report_changes(
    core: Weak<EtcdCore>,
    scope: Scope,
    changed: mpsc::UnboundedSender<Name>,
    reject: oneshot::Sender<Error>,
) {
    let Some((mut claims, mut cells)) = core.upgrade().map(|core| subscribe(&core, &scope)) else {
        return;
    };
    let mut watched = WatchedNames::default();
    loop {
        let event = tokio::select! {
            event = claims.next() => event,
            event = cells.next() => event,
            () = changed.closed() => None,
        };
        let Some(core) = core.upgrade() else { return };
        let names = match event {
            None => return,
            Some(WatchEvent::Changed { key, .. }) => {
                let name = core.layout.name_of(&key).filter(|name| scope.covers(name));
                watched.names.extend(name.clone());
                let pruned = match watched.need_pruning() {
                    true => names_in_use(&core, &scope, &changed)
                        .await
                        .map(|in_use| watched.prune(in_use)),
                    false => Ok(()),
                };
                pruned.map(|()| name.into_iter().collect())
            }
            // All names in use, and all that were before and may be unused now.
            Some(WatchEvent::Established) => {
                let in_use = names_in_use(&core, &scope, &changed).await;
                in_use.map(|in_use| &in_use | &watched.reset(in_use.clone()))
            }
            Some(WatchEvent::Rejected(error)) => Err(error),
        };
        let is_received = match names {
            Ok(names) => names.into_iter().all(|name| changed.send(name).is_ok()),
            Err(error) => {
                // The stream may have been dropped.
                let _ = reject.send(error);
                return;
            }
        };
        if !is_received {
            return;
        }
    }
}

/// The names a watch has seen, for those that become unused while the watch is disconnected.
#[derive(Default)]
struct WatchedNames {
    names: BTreeSet<Name>,
    /// How many were in use when that was last read.
    in_use: usize,
    /// Those that were not: the event of their end may still be under way.
    unused: BTreeSet<Name>,
}

impl WatchedNames {
    /// Whether most of them may be unused by now.
    fn need_pruning(&self) -> bool {
        self.names.len() > 2 * self.in_use + MAX_UNUSED_NAMES
    }

    /// Keeps the names in use. The others become the unused ones, and the unused ones so far are
    /// forgotten.
    fn prune(&mut self, in_use: BTreeSet<Name>) {
        self.in_use = in_use.len();
        let before = std::mem::replace(&mut self.names, in_use);
        self.unused = &before - &self.names;
    }

    /// Keeps only the names in use. Returns all names known before.
    fn reset(&mut self, in_use: BTreeSet<Name>) -> BTreeSet<Name> {
        let before = &self.names | &self.unused;
        *self = Self { in_use: in_use.len(), names: in_use, unused: BTreeSet::new() };
        before
    }
}

/// Subscriptions of the claims and the cells in scope.
fn subscribe(core: &EtcdCore, scope: &Scope) -> (WatchSubscription, WatchSubscription) {
    let (claims, cells) = match scope {
        Scope::Name(name) => (core.layout.claims(name), KeyRange::single(core.layout.cell(name))),
        Scope::Prefix(prefix) => {
            (core.layout.claims_below(prefix), core.layout.cells_below(prefix))
        }
    };
    (core.watcher.subscribe(claims), core.watcher.subscribe(cells))
}

/// Reads the names in use, until it succeeds. Fails if the read is rejected or the receiver of
/// `changed` is dropped.
async fn names_in_use(
    core: &EtcdCore,
    scope: &Scope,
    changed: &mpsc::UnboundedSender<Name>,
) -> Result<BTreeSet<Name>> {
    let prefix = match scope {
        Scope::Name(name) => return Ok(BTreeSet::from([name.clone()])),
        Scope::Prefix(prefix) => prefix,
    };
    while !changed.is_closed() {
        match core.list(prefix).await {
            Ok(states) => return Ok(states.into_iter().map(|state| state.name).collect()),
            Err(error) if !error.is_retryable() => return Err(error),
            Err(error) => {
                report!(debug, error = error, "a watch could not read");
                tokio::time::sleep(LIST_RETRY_PAUSE).await;
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
        let mut watched = WatchedNames::default();
        watched.names.extend(names(0..MAX_UNUSED_NAMES));
        assert!(!watched.need_pruning());
        watched.names.extend(names(MAX_UNUSED_NAMES..MAX_UNUSED_NAMES + 1));
        assert!(watched.need_pruning());
        watched.prune(names(0..10));
        let expected = (&names(0..10), &names(10..MAX_UNUSED_NAMES + 1));
        assert_eq!((&watched.names, &watched.unused), expected);
        watched.names.extend(names(0..MAX_UNUSED_NAMES + 20));
        assert!(!watched.need_pruning(), "it would prune again too often");
        watched.prune(names(0..3));
        watched.names.extend(names(5000..5001));
        let before = &names(0..MAX_UNUSED_NAMES + 20) | &names(5000..5001);
        assert_eq!(watched.reset(names(0..1)), before);
        assert_eq!((&watched.names, &watched.unused), (&names(0..1), &names(0..0)));
    }
}
