//! Renewing: keeping leases alive, and reading whether the claims on them still hold.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;

use super::connection::REQUEST_TIMEOUT;
use super::leases::EtcdLease;
use super::record::{KeyRecord, claim_id_of, token_from_revision};
use super::request_error::{EtcdErrorKind, EtcdRequestError, EtcdResult};
use super::rpc::{KeyValue, TxnRequest, TxnResponse};
use super::txn::{get, kvs, term_of, unconditional};
use super::{EtcdCore, MAX_ATTEMPTS};
use crate::clock::Moment;
use crate::engine::{Claim, Grant, Renewal, drift};
use crate::error::{LossReason, Result};

/// Maximum keys read by one transaction; a server takes 128 operations.
const MAX_READS_PER_TXN: usize = 100;

const FORGOTTEN: Renewal = Renewal::Lost(LossReason::Forgotten);

/// The claims of a batch that hold by the same lease.
struct LeaseRenewal<'b> {
    lease: Arc<EtcdLease>,
    claims: Vec<ClaimRenewal<'b>>,
}

/// One claim of a batch.
struct ClaimRenewal<'b> {
    /// In the batch.
    index: usize,
    claim: &'b Claim,
    grant: &'b Grant,
    key: Vec<u8>,
}

impl EtcdCore {
    pub(super) async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        let found =
            join_all(batch.iter().map(|(claim, grant)| self.lease_and_key(claim, grant))).await;
        let mut by_lease = BTreeMap::<i64, LeaseRenewal<'_>>::new();
        let mut results = Vec::new();
        for (index, (found, (claim, grant))) in found.into_iter().zip(batch).enumerate() {
            match found {
                Ok(Ok((lease, key))) => {
                    let renewal = by_lease
                        .entry(lease.id)
                        .or_insert_with(|| LeaseRenewal { lease, claims: Vec::new() });
                    renewal.claims.push(ClaimRenewal { index, claim, grant, key });
                }
                Ok(Err(refusal)) => results.push((index, Ok(refusal))),
                Err(error) => results.push((index, Err(error))),
            }
        }
        let renewed = join_all(by_lease.values().map(|renewal| self.renew_lease(renewal))).await;
        results.extend(renewed.into_iter().flatten());
        results.sort_unstable_by_key(|(index, _)| *index);
        results.into_iter().map(|(_, result)| result).collect()
    }

    /// The lease and the key of a held claim, or why it is not renewed. A claim that another
    /// process acquired is read first.
    async fn lease_and_key(
        &self,
        claim: &Claim,
        grant: &Grant,
    ) -> Result<Result<(Arc<EtcdLease>, Vec<u8>), Renewal>> {
        if let Some(entry) = self.ledger().find(claim.id) {
            return Ok(Ok((entry.lease.clone(), entry.key.clone())));
        }
        if self.ledger().is_being_removed(claim.id) {
            return Ok(Err(Renewal::Lost(LossReason::Expired)));
        }
        // The lease of any other claim is shared: renewing it would renew claims of other clients.
        let key = self.key_of(claim, grant).filter(|_| claim.detachable || claim.fixed);
        let Some(key) = key else { return Ok(Err(FORGOTTEN)) };
        let read = unconditional(vec![get(&key)]);
        let reply = self.connection.txn_once(read, timeout_for(claim.ttl)).await?;
        let kv = match still_held(claim, grant, kvs(&reply, 0)) {
            Ok(kv) => kv,
            Err(refusal) => return Ok(Err(refusal)),
        };
        // Not valid until a keep-alive is confirmed.
        let lease = EtcdLease::new(kv.lease, claim.ttl, false, Moment::from_nanos(0));
        self.ledger().insert_held(claim, key.clone(), &lease, grant.token, self.clock.now());
        Ok(Ok((lease, key)))
    }

    async fn renew_lease(&self, renewal: &LeaseRenewal<'_>) -> Vec<(usize, Result<Renewal>)> {
        let ttl = renewal.claims.iter().map(|one| one.claim.ttl).min().unwrap_or_default();
        let read_chunk = |chunk: &[ClaimRenewal<'_>]| {
            unconditional(chunk.iter().map(|one| get(&one.key)).collect())
        };
        let reads = renewal.claims.chunks(MAX_READS_PER_TXN).map(read_chunk).collect();
        let kept = self.keep_alive_and_read(&renewal.lease, reads, timeout_for(ttl)).await;
        let results = renewal.claims.iter().enumerate().map(|(position, one)| {
            let result = match &kept {
                Ok((until, replies)) => {
                    let reply = replies.get(position / MAX_READS_PER_TXN);
                    let kvs =
                        reply.map_or(&[][..], |reply| kvs(reply, position % MAX_READS_PER_TXN));
                    Ok(self.renewal_of(one, kvs, *until))
                }
                Err(error) if error.kind == EtcdErrorKind::LeaseNotFound => {
                    Ok(Renewal::Lost(LossReason::SessionEnded))
                }
                Err(error) => Err(error.clone().into()),
            };
            (one.index, result)
        });
        results.collect()
    }

    /// Keeps a lease alive, and then reads. The reads are answered by a majority; if that is in the
    /// same term, the keep-alive was answered by the leader. Returns until when the lease is valid,
    /// and the replies to the reads.
    pub(super) async fn keep_alive_and_read(
        &self,
        lease: &Arc<EtcdLease>,
        mut reads: Vec<TxnRequest>,
        timeout: Duration,
    ) -> EtcdResult<(Moment, Vec<TxnResponse>)> {
        if reads.is_empty() {
            reads.push(unconditional(vec![get(&self.layout.absent_key())]));
        }
        for _ in 0..MAX_ATTEMPTS {
            let sent = self.clock.now();
            lease.mark_keep_alive_sent(sent);
            let kept = self.connection.keep_alive(lease.id, timeout).await?;
            let ttl = Duration::from_secs(u64::try_from(kept.ttl).unwrap_or(0));
            if ttl.is_zero() {
                self.lose_lease(lease);
                return Err(EtcdRequestError::lease_not_found());
            }
            let replies =
                join_all(reads.iter().map(|read| self.connection.txn_once(read.clone(), timeout)));
            let replies = replies.await.into_iter().collect::<EtcdResult<Vec<_>>>()?;
            let term = kept.header.map_or(0, |header| header.raft_term);
            if replies.iter().all(|reply| term_of(reply) == term) {
                return Ok((lease.confirm_keep_alive(sent, ttl), replies));
            }
        }
        Err(EtcdRequestError::unavailable("the leader keeps changing".to_owned()))
    }

    /// The reply to one claim of a lease that is valid until then.
    fn renewal_of(&self, renewal: &ClaimRenewal<'_>, kvs: &[KeyValue], until: Moment) -> Renewal {
        let ClaimRenewal { claim, grant, key, .. } = renewal;
        if let Err(refusal) = still_held(claim, grant, kvs) {
            return refusal;
        }
        if !self.ledger().set_held(claim.id, grant.token, until + drift(claim.ttl)) {
            return Renewal::Lost(LossReason::Expired);
        }
        let valid_until = until.max(grant.valid_until);
        Renewal::Renewed(Grant { token: grant.token, valid_until, key: key.clone() })
    }
}

/// The key by which the claim holds, or why it is not renewed.
fn still_held<'k>(
    claim: &Claim,
    grant: &Grant,
    kvs: &'k [KeyValue],
) -> Result<&'k KeyValue, Renewal> {
    let kv = kvs.first().ok_or(FORGOTTEN)?;
    let record = KeyRecord::decode(&kv.value);
    let has_token = token_from_revision(kv.create_revision).is_ok_and(|token| token == grant.token);
    if !has_token || claim_id_of(kv, &record) != Some(claim.id) {
        return Err(FORGOTTEN);
    }
    match record.revoked {
        true => Err(Renewal::LastLease),
        false => Ok(kv),
    }
}

/// The keeper does not wait much longer than this for a renewal.
fn timeout_for(ttl: Duration) -> Duration {
    REQUEST_TIMEOUT.min(ttl / 8)
}
