//! Changing a held claim in place: its mode, its note, or the claim that owns its key.

use super::connection::RETRY_TIMEOUT;
use super::leases::EtcdLease;
use super::record::{KeyRecord, claim_id_of, token_from_revision};
use super::request_error::unreachable_error;
use super::rpc::{KeyValue, TxnRequest};
use super::txn::{get, kvs, mod_revision_is, put, put_keeping_lease, unconditional};
use super::{EtcdCore, MAX_ATTEMPTS};
use crate::clock::Moment;
use crate::engine::{Amend, Claim, Grant, Mode};
use crate::error::{Error, LossReason, Result};

impl EtcdCore {
    pub(super) async fn amend(&self, claim: &Claim, grant: &Grant, to: Amend) -> Result<Grant> {
        let lost = || Error::lost(&claim.name, LossReason::Forgotten);
        let key = self.key_of(claim, grant).ok_or_else(lost)?;
        for _ in 0..MAX_ATTEMPTS {
            let read = unconditional(vec![get(&key)]);
            let seen = self.connection.txn_with_retry(read, RETRY_TIMEOUT).await?;
            let kv = kvs(&seen, 0).first().ok_or_else(lost)?;
            let mut record = KeyRecord::decode(&kv.value);
            let is_own = claim_id_of(kv, &record) == Some(claim.id);
            if token_from_revision(kv.create_revision)? != grant.token || !is_own {
                return Err(lost());
            }
            match &to {
                Amend::Downgrade => record.mode = Mode::Shared,
                Amend::Note(note) => record.set_note(note),
            }
            let txn = TxnRequest {
                compare: vec![mod_revision_is(&key, kv.mod_revision)],
                success: vec![put_keeping_lease(&key, record.encode())],
                failure: Vec::new(),
            };
            let reply = self.connection.txn_with_retry(txn, RETRY_TIMEOUT).await?;
            if reply.succeeded {
                return Ok(grant.clone());
            }
        }
        Err(unreachable_error(format!("`{}` changes too often to be amended", claim.name), true))
    }

    /// Transfers the key of a held claim to another claim, together with its lease. A tombstone on
    /// that lease rejects late requests for the first claim. Once the lease is gone, they cannot
    /// create anything either.
    pub(super) async fn adopt(
        &self,
        claim: &Claim,
        grant: &Grant,
        successor: &Claim,
    ) -> Result<Grant> {
        let lost = || Error::lost(&claim.name, LossReason::Forgotten);
        let not_held = || Error::NotHeld { name: claim.name.clone() };
        let key = self.key_of(claim, grant).ok_or_else(lost)?;
        for _ in 0..MAX_ATTEMPTS {
            if self.ledger().is_withdrawn(successor.id) {
                return Err(not_held());
            }
            let read = unconditional(vec![get(&key)]);
            let seen = self.connection.txn_with_retry(read, RETRY_TIMEOUT).await?;
            let kv = kvs(&seen, 0).first().ok_or_else(lost)?;
            let mut record = KeyRecord::decode(&kv.value);
            let owner = claim_id_of(kv, &record);
            if token_from_revision(kv.create_revision)? != grant.token {
                return Err(lost());
            }
            if owner == Some(successor.id) {
                return Ok(self.record_adoption(claim, grant, successor, kv));
            }
            if owner != Some(claim.id) {
                return Err(lost());
            }
            record.transfer_to(successor);
            let tombstone = put(&self.layout.tombstone(claim.id), Vec::new(), kv.lease);
            let txn = TxnRequest {
                compare: vec![mod_revision_is(&key, kv.mod_revision)],
                success: vec![put_keeping_lease(&key, record.encode()), tombstone],
                failure: Vec::new(),
            };
            // The next read of the key shows whether this succeeded.
            self.connection.txn_with_retry(txn, RETRY_TIMEOUT).await?;
        }
        let what = format!("`{}` changes too often to be passed on", claim.name);
        Err(unreachable_error(what, true))
    }

    /// Moves the ledger entry of a claim to its successor, which owns the key now.
    fn record_adoption(
        &self,
        claim: &Claim,
        grant: &Grant,
        successor: &Claim,
        kv: &KeyValue,
    ) -> Grant {
        let now = self.clock.now();
        let mut ledger = self.ledger();
        let known = ledger.find(claim.id).map(|entry| entry.lease.clone());
        let unconfirmed = || EtcdLease::new(kv.lease, claim.ttl, false, Moment::from_nanos(0));
        let lease = known.filter(|lease| lease.id == kv.lease).unwrap_or_else(unconfirmed);
        ledger.remove_transferred(claim.id, now);
        ledger.insert_held(successor, kv.key.clone(), &lease, grant.token, now);
        Grant { key: kv.key.clone(), ..grant.clone() }
    }

    /// The key of a claim of this client, or of a claim that was attached by a ticket.
    pub(super) fn key_of(&self, claim: &Claim, grant: &Grant) -> Option<Vec<u8>> {
        let known = self.ledger().find(claim.id).map(|entry| entry.key.clone());
        // A ticket may be forged, so its key must be a claim key of this name. The value of the key
        // then says whether it belongs to this claim.
        let in_grant =
            || Some(&grant.key).filter(|key| self.layout.is_own_claim_key(&claim.name, key));
        known.or_else(|| in_grant().cloned())
    }
}
