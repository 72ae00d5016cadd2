//! Renewals: leases kept alive, and a look whether the claims on them still hold.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;

use super::Core;
use super::claims::{TRIES, token_of};
use super::keys::{self, Word};
use super::leases::Lease;
use super::link::{Failed, PATIENCE, PERSISTENCE, What, failed};
use super::rpc::{KeyValue, TxnRequest, TxnResponse};
use super::txn::{always, kvs, put, read, rewrite, term, unchanged};
use crate::clock::Moment;
use crate::engine::{Claim, Grant, drift};
use crate::error::{Error, LossReason, Result};

/// At most so many keys are read by one transaction.
const READS: usize = 100;

/// The claims of a batch that hold by the same lease.
struct Group<'b> {
    lease: Arc<Lease>,
    entries: Vec<Entry<'b>>,
}

/// One claim of a batch.
struct Entry<'b> {
    /// In the batch.
    place: usize,
    claim: &'b Claim,
    grant: &'b Grant,
    key: Vec<u8>,
}

impl Core {
    /// Keeps a lease alive and then reads: answers by a majority in the same term, which confirm
    /// that the keep-alive was answered by the leader. Until when the lease stands.
    pub(super) async fn beat(
        &self,
        lease: &Arc<Lease>,
        mut reads: Vec<TxnRequest>,
        patience: Duration,
    ) -> std::result::Result<(Moment, Vec<TxnResponse>), Failed> {
        if reads.is_empty() {
            reads.push(always(vec![read(&self.layout.nothing())]));
        }
        for _ in 0..TRIES {
            let sent = self.clock.now();
            lease.beating(sent);
            let kept = self.link.keep_alive(lease.id, patience).await?;
            let ttl = Duration::from_secs(u64::try_from(kept.ttl).unwrap_or(0));
            if ttl.is_zero() {
                self.lose_lease(lease);
                return Err(Failed::lease_gone());
            }
            let answers =
                join_all(reads.iter().map(|one| self.link.txn_once(one.clone(), patience))).await;
            let answers = answers.into_iter().collect::<std::result::Result<Vec<_>, _>>()?;
            let by = kept.header.map_or(0, |header| header.raft_term);
            if answers.iter().all(|answer| term(answer) == by) {
                return Ok((lease.confirmed(sent, ttl), answers));
            }
        }
        Err(Failed::silent("the leader changes again and again".to_owned()))
    }

    pub(super) async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        let known = join_all(batch.iter().map(|(claim, grant)| self.known(claim, grant))).await;
        let mut groups = BTreeMap::<i64, Group<'_>>::new();
        let mut answers = Vec::new();
        for (place, (known, (claim, grant))) in known.into_iter().zip(batch).enumerate() {
            match known {
                Ok((lease, key)) => {
                    let group = groups
                        .entry(lease.id)
                        .or_insert_with(|| Group { lease, entries: Vec::new() });
                    group.entries.push(Entry { place, claim, grant, key });
                }
                Err(error) => answers.push((place, Err(error))),
            }
        }
        let renewed = join_all(groups.values().map(|group| self.renew_group(group))).await;
        answers.extend(renewed.into_iter().flatten());
        answers.sort_unstable_by_key(|(place, _)| *place);
        answers.into_iter().map(|(_, answer)| answer).collect()
    }

    /// Lease and key of a held claim. One that comes from another process is looked up first.
    async fn known(&self, claim: &Claim, grant: &Grant) -> Result<(Arc<Lease>, Vec<u8>)> {
        if let Some(place) = self.places().find(claim.id) {
            return Ok((place.lease.clone(), place.key.clone()));
        }
        let lost = || Error::lost(&claim.name, LossReason::Forgotten);
        if self.places().is_leaving(claim.id) {
            return Err(Error::lost(&claim.name, LossReason::Expired));
        }
        // Others share their lease, and what is done to it is done to all.
        let key = self.key_of(claim, grant).filter(|_| claim.detachable || claim.fixed);
        let key = key.ok_or_else(lost)?;
        let patience = patience_for(claim.ttl);
        let answer = self.link.txn_once(always(vec![read(&key)]), patience).await;
        let answer = answer.map_err(Failed::into_error)?;
        let kv = still_held(claim, grant, kvs(&answer, 0))?;
        // Not believed before it is confirmed.
        let lease = Lease::new(kv.lease, claim.ttl, false, Moment::from_nanos(0));
        self.places().attach(claim, key.clone(), &lease, grant.token, self.clock.now());
        Ok((lease, key))
    }

    /// Passes the key of a held claim on to another claim, together with its lease. A tombstone on
    /// that lease refuses what may still come for the first one: without the lease nothing can be
    /// created either.
    pub(super) async fn adopt(
        &self,
        claim: &Claim,
        grant: &Grant,
        successor: &Claim,
    ) -> Result<Grant> {
        let lost = || Error::lost(&claim.name, LossReason::Forgotten);
        let not_held = || Error::NotHeld { name: claim.name.clone() };
        let key = self.key_of(claim, grant).ok_or_else(lost)?;
        for _ in 0..TRIES {
            if self.places().is_withdrawn(successor.id) {
                return Err(not_held());
            }
            let seen = self.link.txn(always(vec![read(&key)]), PERSISTENCE).await;
            let seen = seen.map_err(Failed::into_error)?;
            let kv = kvs(&seen, 0).first().ok_or_else(lost)?;
            let mut word = Word::read(&kv.value);
            let owner = keys::id_of(kv, &word);
            if token_of(kv.create_revision)? != grant.token {
                return Err(lost());
            }
            if owner == Some(successor.id) {
                return Ok(self.adopted(claim, grant, successor, kv));
            }
            if owner != Some(claim.id) {
                return Err(lost());
            }
            word.pass_on(successor);
            let tombstone = put(&self.layout.mark(claim.id), Vec::new(), kv.lease);
            let txn = TxnRequest {
                compare: vec![unchanged(&key, kv.mod_revision)],
                success: vec![rewrite(&key, word.write()), tombstone],
                failure: Vec::new(),
            };
            // Whether it was done is read from the key.
            self.link.txn(txn, PERSISTENCE).await.map_err(Failed::into_error)?;
        }
        Err(failed(format!("`{}` changes too often to be passed on", claim.name), true))
    }

    fn adopted(&self, claim: &Claim, grant: &Grant, successor: &Claim, kv: &KeyValue) -> Grant {
        let now = self.clock.now();
        let mut places = self.places();
        let known = places.find(claim.id).map(|place| place.lease.clone());
        let unconfirmed = || Lease::new(kv.lease, claim.ttl, false, Moment::from_nanos(0));
        let lease = known.filter(|lease| lease.id == kv.lease).unwrap_or_else(unconfirmed);
        places.passed_on(claim.id, now);
        places.attach(successor, kv.key.clone(), &lease, grant.token, now);
        Grant { key: kv.key.clone(), ..grant.clone() }
    }

    async fn renew_group(&self, group: &Group<'_>) -> Vec<(usize, Result<Grant>)> {
        let ttl = group.entries.iter().map(|entry| entry.claim.ttl).min().unwrap_or_default();
        let read_part =
            |part: &[Entry<'_>]| always(part.iter().map(|entry| read(&entry.key)).collect());
        let reads = group.entries.chunks(READS).map(read_part).collect();
        let beaten = self.beat(&group.lease, reads, patience_for(ttl)).await;
        let each = group.entries.iter().enumerate().map(|(at, entry)| {
            let answer = match &beaten {
                Ok((until, answers)) => {
                    let kvs = answers.get(at / READS).map_or(&[][..], |one| kvs(one, at % READS));
                    self.renewed(entry, kvs, *until)
                }
                Err(failed) if failed.what == What::LeaseGone => {
                    Err(Error::lost(&entry.claim.name, LossReason::SessionEnded))
                }
                Err(failed) => Err(failed.again().into_error()),
            };
            (entry.place, answer)
        });
        each.collect()
    }

    fn renewed(&self, entry: &Entry<'_>, kvs: &[KeyValue], until: Moment) -> Result<Grant> {
        let Entry { claim, grant, key, .. } = entry;
        still_held(claim, grant, kvs)?;
        if !self.places().holds(claim.id, grant.token, until + drift(claim.ttl)) {
            return Err(Error::lost(&claim.name, LossReason::Expired));
        }
        let valid_until = until.max(grant.valid_until);
        Ok(Grant { token: grant.token, valid_until, key: key.clone() })
    }
}

/// The key by which the claim holds, if it still does.
fn still_held<'k>(claim: &Claim, grant: &Grant, kvs: &'k [KeyValue]) -> Result<&'k KeyValue> {
    let forgotten = || Error::lost(&claim.name, LossReason::Forgotten);
    let kv = kvs.first().ok_or_else(forgotten)?;
    let word = Word::read(&kv.value);
    if token_of(kv.create_revision)? != grant.token || keys::id_of(kv, &word) != Some(claim.id) {
        return Err(forgotten());
    }
    match word.revoked {
        true => Err(Error::lost(&claim.name, LossReason::Revoked)),
        false => Ok(kv),
    }
}

/// The keeper does not wait much longer.
fn patience_for(ttl: Duration) -> Duration {
    PATIENCE.min(ttl / 8)
}
