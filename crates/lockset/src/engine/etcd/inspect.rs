//! Reading what is stored: the state of a lock, lists, and hints of what changes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_core::stream::BoxStream;
use futures_util::StreamExt;

use super::EtcdCore;
use super::cells::decode_cell;
use super::connection::RETRY_TIMEOUT;
use super::keys::KeyRange;
use super::record::{KeyRecord, claim_id_of, token_from_revision};
use super::rpc::KeyValue;
use super::txn::{get, kvs, range, unconditional};
use super::watch::{KeyEvent, WatchSubscription};
use crate::engine::common::admission::Tally;
use crate::engine::common::hints::{HintSender, hint_channel};
use crate::engine::{ClaimId, Hint, Holder, LockState, Scope, Waiter};
use crate::error::{Error, Result};
use crate::name::{Name, Prefix};

/// Maximum leases that are read at once.
const MAX_CONCURRENT_LEASE_READS: usize = 32;

/// One claim as it is stored.
struct StoredClaim {
    kv: KeyValue,
    record: KeyRecord,
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

    pub(super) fn hints(self: &Arc<Self>, scope: &Scope) -> BoxStream<'static, Result<Hint>> {
        let (sender, hints) = hint_channel(scope);
        let (claims, cells) = subscribe(self, scope);
        self.runtime.spawn(send_hints(Arc::downgrade(self), sender, claims, cells));
        hints.into_stream()
    }
}

/// The claims in the order of the queue, and which of them hold.
fn stored_claims(mut kvs: Vec<KeyValue>) -> Vec<StoredClaim> {
    kvs.sort_unstable_by_key(|kv| kv.create_revision);
    let mut tally = Tally::default();
    let claims = kvs.into_iter().map(|kv| {
        let record = KeyRecord::decode(&kv.value);
        let holds = tally.admits(record.mode);
        tally.add(record.mode);
        StoredClaim { kv, record, holds }
    });
    claims.collect()
}

/// Sends every name that may have changed, until the watch is dropped or the server rejects it.
async fn send_hints(
    core: Weak<EtcdCore>,
    hints: HintSender,
    mut claims: WatchSubscription,
    mut cells: WatchSubscription,
) {
    loop {
        let event = tokio::select! {
            event = claims.next() => event,
            event = cells.next() => event,
            () = hints.closed() => None,
        };
        match event {
            None => return,
            Some(KeyEvent::Established) => hints.missed(),
            Some(KeyEvent::Changed { key, .. }) => {
                let Some(core) = core.upgrade() else { return };
                if let Some(name) = core.layout.name_of(&key) {
                    hints.changed(&name);
                }
            }
            Some(KeyEvent::Rejected(error)) => return hints.fail(error),
        }
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
