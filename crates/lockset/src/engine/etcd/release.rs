//! Releasing a claim, alone or with a hand-off to the next one; withdrawing it; and breaking the
//! locks of others.

use std::time::Duration;

use super::EtcdCore;
use super::connection::{REQUEST_TIMEOUT, RETRY_TIMEOUT};
use super::keys::lease_id_in;
use super::leases::EtcdLease;
use super::ledger::LedgerEntry;
use super::record::{KeyRecord, claim_id_of, token_from_revision};
use super::request_error::{EtcdErrorKind, EtcdResult, unreachable_error};
use super::rpc::{KeyValue, RequestOp, TxnRequest, TxnResponse};
use super::txn::{
    create_revision_is, delete, get, kvs, mod_revision_is, nested, nested_replies, newest, put,
    put_keeping_lease, range, revision_of, unconditional,
};
use crate::clock::Moment;
use crate::engine::{Break, Claim, ClaimId, Grant, Holder, Mode, drift};
use crate::error::{Error, Result};
use crate::name::Name;

/// How often breaking a claim is tried while the claim changes.
const MAX_BREAK_ATTEMPTS: usize = 8;
/// The lease of a broken key that had none.
const BROKEN_WITHOUT_LEASE: Duration = Duration::from_secs(60);

impl EtcdCore {
    pub(super) async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let not_held = || Error::NotHeld { name: claim.name.clone() };
        let key = self.key_of(claim, grant).ok_or_else(not_held)?;
        let entry = self.ledger().find(claim.id).cloned();
        if entry.as_ref().is_none_or(|entry| entry.is_detachable) {
            return self.release_if_owned(claim, grant, &key).await.map(|()| None);
        }
        let tombstone_on = entry.filter(|entry| entry.create_is_in_doubt).map(|entry| entry.lease);
        let revision = i64::try_from(grant.token.get()).unwrap_or(i64::MAX);
        let mut next = next.and_then(|next| self.prepare_hand_off(next));
        let release = self.release_txn(claim, &key, revision, tombstone_on.as_deref());
        let txn = match &next {
            Some(next) => next.append_to(self, release.clone()),
            None => release.clone(),
        };
        let mut sent = self.send_release(claim, txn).await;
        if let Err(error) = &sent
            && error.kind == EtcdErrorKind::LeaseNotFound
            && let Some(next) = next.take()
        {
            // It may be the next claim's lease that is gone. That claim then acquires by itself.
            let may_be_done = error.outcome_unknown;
            next.settle(self, may_be_done);
            sent = self.send_release(claim, release).await;
            sent = sent.map(|(reply, again)| (reply, again || may_be_done));
        }
        let (reply, may_be_repeated) = match sent {
            Ok(sent) => sent,
            Err(error) if error.kind == EtcdErrorKind::LeaseNotFound => {
                // The claim's own lease: its key went with it, and cannot be created again.
                self.forget(claim.id);
                return Err(not_held());
            }
            Err(error) => {
                // The release may have been executed, or may still be. The caller withdraws the
                // claim.
                next.iter().for_each(|next| self.retire_lease_of(next.claim.id));
                return Err(error.into());
            }
        };
        let (is_released, granted) = match &next {
            None => (reply.succeeded, None),
            Some(next) => next.outcome(self, &reply, may_be_repeated),
        };
        if !is_released && !may_be_repeated {
            // A key with another revision may still bear the claim's id: it is removed.
            self.ledger().lapse(claim.id, self.clock.now());
            self.run_maintenance_now();
        } else if let Some(entry) = self.forget(claim.id) {
            self.revoke_own_lease(&entry);
            if !may_be_repeated {
                self.ledger().keep_key_for_reuse(entry);
            }
        }
        match is_released || may_be_repeated {
            true => Ok(granted),
            false => Err(not_held()),
        }
    }

    /// Releases a lock that may have been passed on to another claim: only if this claim still owns
    /// the key. A next claim is not handed off to; it acquires by itself.
    async fn release_if_owned(&self, claim: &Claim, grant: &Grant, key: &[u8]) -> Result<()> {
        let not_held = || Error::NotHeld { name: claim.name.clone() };
        let known = self.ledger().find(claim.id).and_then(|entry| entry.token);
        let token = match known {
            Some(token) => token,
            None => {
                let read = unconditional(vec![get(key)]);
                let seen = self.connection.txn_with_retry(read, REQUEST_TIMEOUT).await?;
                let kv = kvs(&seen, 0).first().ok_or_else(not_held)?;
                token_from_revision(kv.create_revision)?
            }
        };
        if token != grant.token {
            return Err(not_held());
        }
        let entry = self.withdraw_in_ledger(claim);
        let owner = match &entry {
            Some(entry) => self.remove_key(claim.id, entry).await,
            None => self.delete_if_owned(claim.id, key, None).await,
        };
        match owner {
            Ok(KeyOwner::ThisClaim) => {
                if entry.is_none() && claim.detachable {
                    lease_id_in(key).into_iter().for_each(|lease| self.revoke_in_background(lease));
                }
                Ok(())
            }
            Ok(KeyOwner::OtherClaim | KeyOwner::Absent) => Err(not_held()),
            Err(error) => Err(error.into()),
        }
    }

    /// Deletes a key if it belongs to this claim. Returns the owner of the key.
    async fn delete_if_owned(
        &self,
        id: ClaimId,
        key: &[u8],
        tombstone: Option<RequestOp>,
    ) -> EtcdResult<KeyOwner> {
        let mut if_absent = KeyOwner::Absent;
        loop {
            let ops = [get(key)].into_iter().chain(tombstone.clone()).collect();
            let seen = self.connection.txn_with_retry(unconditional(ops), REQUEST_TIMEOUT).await?;
            let Some(kv) = kvs(&seen, 0).first() else { return Ok(if_absent) };
            if claim_id_of(kv, &KeyRecord::decode(&kv.value)) != Some(id) {
                return Ok(KeyOwner::OtherClaim);
            }
            let delete = TxnRequest {
                compare: vec![mod_revision_is(key, kv.mod_revision)],
                success: vec![delete(key)],
                failure: Vec::new(),
            };
            if self.connection.txn_with_retry(delete, REQUEST_TIMEOUT).await?.succeeded {
                return Ok(KeyOwner::ThisClaim);
            }
            // The key changed, or an attempt without a reply deleted it.
            if_absent = KeyOwner::ThisClaim;
        }
    }

    /// Deletes a key, and writes a tombstone on this lease if a create request may still arrive.
    fn release_txn(
        &self,
        claim: &Claim,
        key: &[u8],
        revision: i64,
        tombstone_on: Option<&EtcdLease>,
    ) -> TxnRequest {
        let tombstone = tombstone_on.map(|lease| self.put_tombstone(claim.id, lease));
        TxnRequest {
            compare: vec![create_revision_is(key, revision)],
            success: [delete(key)].into_iter().chain(tombstone.clone()).collect(),
            failure: tombstone.into_iter().collect(),
        }
    }

    /// The tombstone rejects late requests for a claim. It lives as long as the lease on which they
    /// would create their key: without that lease they create nothing.
    fn put_tombstone(&self, id: ClaimId, lease: &EtcdLease) -> RequestOp {
        put(&self.layout.tombstone(id), Vec::new(), lease.id)
    }

    /// Sends a release until it is answered. Also returns whether an earlier attempt may have been
    /// executed. The outcome of a failure is unknown if that of any attempt is.
    async fn send_release(
        &self,
        claim: &Claim,
        txn: TxnRequest,
    ) -> EtcdResult<(TxnResponse, bool)> {
        let deadline = self.clock.now() + RETRY_TIMEOUT;
        let attempt = || self.batcher.send_txn(&claim.name, txn.clone());
        self.connection.retry(deadline, attempt).await
    }

    /// Prepares the client's next claim to be created by the release of another. Only an exclusive
    /// claim for which a shared lease is ready can be handed off to.
    fn prepare_hand_off<'c>(&self, next: &'c Claim) -> Option<EtcdHandOff<'c>> {
        let is_plain = next.mode == Mode::Exclusive && !next.fixed && !next.detachable;
        if !is_plain || next.floor.is_some() {
            return None;
        }
        let lease = self.leases.find_usable(next.ttl)?;
        let lease_valid_until = lease.valid_until();
        let mut ledger = self.ledger();
        // Revoked in the meantime because it was unused: see `leases_in_use`.
        if lease.is_gone() {
            return None;
        }
        ledger.insert(next, &lease, &self.layout, self.clock.now());
        let entry = ledger.find(next.id).cloned()?;
        let was_in_doubt = ledger.mark_create_sent(next.id);
        drop(ledger);
        self.run_maintenance_by(self.clock.now() + lease.ttl);
        Some(EtcdHandOff { claim: next, entry, lease_valid_until, was_in_doubt: was_in_doubt? })
    }

    /// Withdraws the claim. On success nothing of it is left at the server.
    pub(super) async fn withdraw(&self, claim: &Claim) -> Result<()> {
        match self.withdraw_in_ledger(claim) {
            Some(entry) => drop(self.remove_key(claim.id, &entry).await?),
            // Another process may have acquired it. All keys of this client's claims are in the
            // ledger until they are removed.
            None if claim.fixed || claim.detachable => self.remove_keys_by_id(claim).await?,
            None => {}
        }
        Ok(())
    }

    fn withdraw_in_ledger(&self, claim: &Claim) -> Option<LedgerEntry> {
        let now = self.clock.now();
        let entry = self.ledger().withdraw(claim.id, now);
        if entry.as_ref().is_some_and(|entry| !entry.lease.is_shared) {
            self.run_maintenance_by(now + claim.ttl);
        }
        entry
    }

    /// Deletes the key of a claim that is over, with a tombstone if the key may still be created.
    /// In that case the lease is retired, so that it ends, and its tombstones with it. Returns the
    /// owner of the key: a detachable lock can have been passed on to another claim.
    pub(super) async fn remove_key(
        &self,
        id: ClaimId,
        entry: &LedgerEntry,
    ) -> EtcdResult<KeyOwner> {
        let tombstone = entry.create_is_in_doubt.then(|| {
            self.retire_lease(&entry.lease);
            self.put_tombstone(id, &entry.lease)
        });
        let removed = match entry.is_detachable {
            true => self.delete_if_owned(id, &entry.key, tombstone).await,
            false => {
                let ops = [delete(&entry.key)].into_iter().chain(tombstone).collect();
                let removed =
                    self.connection.txn_with_retry(unconditional(ops), REQUEST_TIMEOUT).await;
                removed.map(|_| KeyOwner::ThisClaim)
            }
        };
        let owner = match removed {
            // The key went with its lease, and cannot be created again.
            Err(error) if error.kind == EtcdErrorKind::LeaseNotFound => KeyOwner::Absent,
            removed => removed?,
        };
        self.ledger().finish_removal(id);
        if owner != KeyOwner::OtherClaim {
            self.revoke_own_lease(entry);
        }
        Ok(owner)
    }

    /// Deletes every key that belongs to this claim, for a claim that another process acquired.
    async fn remove_keys_by_id(&self, claim: &Claim) -> EtcdResult<()> {
        let read = unconditional(vec![range(&self.layout.claims(&claim.name))]);
        let seen = self.connection.txn_with_retry(read, REQUEST_TIMEOUT).await?;
        let belongs_to_claim =
            |kv: &&KeyValue| claim_id_of(kv, &KeyRecord::decode(&kv.value)) == Some(claim.id);
        for kv in kvs(&seen, 0).iter().filter(belongs_to_claim) {
            // The key may be passed on to another claim meanwhile.
            self.delete_if_owned(claim.id, &kv.key, None).await?;
        }
        Ok(())
    }

    pub(super) async fn force_release(&self, name: &Name, how: Break) -> Result<Vec<Holder>> {
        let before = self.inspect(name).await?;
        let mut broken = Vec::new();
        for holder in before.holders {
            if self.break_holder(name, &holder, how).await? {
                broken.push(Holder { revoked: true, ..holder });
            }
        }
        Ok(broken)
    }

    /// Returns whether the holder was still there.
    async fn break_holder(&self, name: &Name, holder: &Holder, how: Break) -> Result<bool> {
        let revision =
            holder.token.map_or(0, |token| i64::try_from(token.get()).unwrap_or(i64::MAX));
        for _ in 0..MAX_BREAK_ATTEMPTS {
            let read = unconditional(vec![range(&self.layout.claims(name))]);
            let seen = self.connection.txn_with_retry(read, RETRY_TIMEOUT).await?;
            let Some(kv) = kvs(&seen, 0).iter().find(|kv| kv.create_revision == revision) else {
                return Ok(false);
            };
            let mut record = KeyRecord::decode(&kv.value);
            record.revoked = true;
            let change = match how {
                Break::Now => delete(&kv.key),
                // A holder of this library that reads this stops renewing, and is gone by its
                // deadline.
                Break::WhenLeaseEnds if claim_id_of(kv, &record).is_some() => {
                    put_keeping_lease(&kv.key, record.encode())
                }
                // Other programs check only that the key exists. It gets a lease that is not kept
                // alive, and ends when its own would have.
                Break::WhenLeaseEnds => {
                    let left = match kv.lease {
                        0 => BROKEN_WITHOUT_LEASE,
                        _ => holder.left + Duration::from_secs(1),
                    };
                    let lease = self.leases.grant(left, false).await?;
                    put(&kv.key, record.encode(), lease.id)
                }
            };
            let txn = TxnRequest {
                compare: vec![
                    create_revision_is(&kv.key, revision),
                    mod_revision_is(&kv.key, kv.mod_revision),
                ],
                success: vec![change],
                failure: Vec::new(),
            };
            let reply = self.connection.txn_with_retry(txn, RETRY_TIMEOUT).await?;
            if reply.succeeded {
                return Ok(true);
            }
        }
        Err(unreachable_error(format!("`{name}` changes too often to be broken"), true))
    }

    /// Revokes the lease of a claim that is over, if no other claim shares it.
    pub(super) fn revoke_own_lease(&self, entry: &LedgerEntry) {
        if !entry.lease.is_shared {
            self.revoke_in_background(entry.lease.id);
        }
    }
}

/// The claim to which a key belongs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum KeyOwner {
    ThisClaim,
    OtherClaim,
    Absent,
}

/// The client's next claim, created by the same transaction that releases the current one.
struct EtcdHandOff<'c> {
    claim: &'c Claim,
    entry: LedgerEntry,
    lease_valid_until: Moment,
    was_in_doubt: bool,
}

impl EtcdHandOff<'_> {
    /// Both in one transaction. If the next key cannot be created, the release is still executed.
    fn append_to(&self, core: &EtcdCore, release: TxnRequest) -> TxnRequest {
        let EtcdHandOff { claim, entry, .. } = self;
        let tombstone = core.layout.tombstone(claim.id);
        let record = KeyRecord::for_claim(claim, &entry.key).encode();
        let mut both = release.clone();
        both.compare.extend([create_revision_is(&entry.key, 0), create_revision_is(&tombstone, 0)]);
        both.success.push(put(&entry.key, record, entry.lease.id));
        both.success.push(newest(&core.layout.claims(&claim.name), 2, 0));
        both.failure = vec![nested(release)];
        both
    }

    /// No create request is under way any more; `may_be_done`: an unanswered one may have been.
    fn settle(&self, core: &EtcdCore, may_be_done: bool) {
        core.ledger().set_create_in_doubt(self.claim.id, self.was_in_doubt || may_be_done);
        if may_be_done {
            core.retire_lease_of(self.claim.id);
        }
    }

    /// Whether the release was executed, and the grant of the next claim if it holds.
    fn outcome(
        &self,
        core: &EtcdCore,
        reply: &TxnResponse,
        may_be_repeated: bool,
    ) -> (bool, Option<Grant>) {
        self.settle(core, may_be_repeated);
        if !reply.succeeded {
            let release = nested_replies(reply.clone());
            return (release.first().is_some_and(|release| release.succeeded), None);
        }
        let last = reply.responses.len().saturating_sub(1);
        let has_others = kvs(reply, last).iter().any(|kv| kv.key != self.entry.key);
        let token = token_from_revision(revision_of(reply)).ok().filter(|_| !has_others);
        let lapses_at = self.lease_valid_until + drift(self.entry.lease.ttl);
        let token = token
            .filter(|_| self.lease_valid_until > core.clock.now())
            .filter(|token| core.ledger().set_held(self.claim.id, *token, lapses_at));
        let grant = token.map(|token| Grant {
            token,
            valid_until: self.lease_valid_until,
            key: self.entry.key.clone(),
        });
        (true, grant)
    }
}
