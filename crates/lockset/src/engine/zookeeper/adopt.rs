//! Adopting: a lock that was detached is transferred to another claim, with its session.

use std::sync::Arc;

use super::claim_table::{ClaimEntry, ClaimNode};
use super::client::{ConnectRequest, Session, ZkErrorCode};
use super::record::NodeRecord;
use super::renew::RenewalTarget;
use super::{CONNECT_TIMEOUT, SessionTag, ZooKeeperCore};
use crate::engine::{Claim, ClaimId, Grant};
use crate::error::{Error, LossReason, Result};

impl ZooKeeperCore {
    /// Transfers the lock of a ticket to `successor`. The node's record is written first; only the
    /// client that has written it takes the session over.
    pub(super) async fn adopt(
        &self,
        claim: &Claim,
        grant: &Grant,
        successor: &Claim,
    ) -> Result<Grant> {
        let forgotten = || Error::lost(&claim.name, LossReason::Forgotten);
        let key = grant.zookeeper_key().ok_or_else(forgotten)?;
        let session = key.session.clone().ok_or_else(forgotten)?;
        let give_up = self.clock.now() + CONNECT_TIMEOUT;
        loop {
            if self.claims().withdrawn.contains(successor.id) {
                return Err(Error::NotHeld { name: claim.name.clone() });
            }
            let (mut record, version) = self.read_record(claim, grant, &key.path).await?;
            match self.holding_claim(&key.path, &record) {
                Some(owner) if owner == successor.id => break,
                Some(owner) if owner == claim.id => {}
                _ => return Err(forgotten()),
            }
            record.transfer_to(successor);
            // If this is given up, the successor is withdrawn: by this path, because the node is
            // not named after it.
            let parent = self.paths.lock_parent(&claim.name)?;
            let deletion = self.main_deletion(parent, Some(key.path.clone()));
            self.claims().expect_deletion(successor.id, deletion);
            match self.main.set_data(&key.path, &record.encode(), version).done().await {
                Ok(()) => break,
                // Another client was faster, or the outcome is unknown: the record decides.
                Err(error) if error.is(ZkErrorCode::BAD_VERSION) => {}
                Err(error) if error.is_transient() && self.clock.now() < give_up => {
                    self.wait_connected().await?;
                }
                Err(error) if error.is(ZkErrorCode::NO_NODE) => return Err(forgotten()),
                Err(error) => return Err(error.into()),
            }
        }
        let own_entry = {
            let mut claims = self.claims();
            if claims.entries.contains_key(&successor.id) {
                return Ok(grant.clone());
            }
            claims.withdrawn.insert(claim.id, self.clock.now());
            claims.remove(claim.id).filter(|entry| !entry.session.status().ended)
        };
        let node = ClaimNode { path: key.path, token: grant.token };
        match own_entry {
            // Detached by this client, which still has the session.
            Some(ClaimEntry { session, tag, .. }) => {
                self.track_session(successor, node, session, tag).await?;
            }
            None => drop(self.attach_session(successor, node, session).await?),
        }
        self.claims().finish_deletion(successor.id);
        Ok(grant.clone())
    }

    /// The record at the node of a held lock, and its version.
    pub(super) async fn read_record(
        &self,
        claim: &Claim,
        grant: &Grant,
        path: &str,
    ) -> Result<(NodeRecord, i32)> {
        let forgotten = || Error::lost(&claim.name, LossReason::Forgotten);
        if !path.starts_with(&format!("{}/", self.paths.lock_parent(&claim.name)?)) {
            return Err(forgotten());
        }
        self.wait_connected().await?;
        let (sync, data) = (self.main.sync(path), self.main.data(path, false));
        sync.done().await?;
        let (data, stat) = match data.data().await {
            Err(error) if error.is(ZkErrorCode::NO_NODE) => return Err(forgotten()),
            found => found?,
        };
        let record = NodeRecord::decode(&data);
        let record = record.filter(|record| record.token(stat.czxid) == grant.token);
        record.map(|record| (record, stat.version)).ok_or_else(forgotten)
    }

    /// The claim that holds by the node at `path`.
    pub(super) fn holding_claim(&self, path: &str, record: &NodeRecord) -> Option<ClaimId> {
        let first = self.layout.claim_id(path.rsplit('/').next()?)?;
        Some(record.claim(first))
    }

    /// Takes over the session of a ticket, given by id and password.
    pub(super) async fn attach_session(
        &self,
        claim: &Claim,
        node: ClaimNode,
        (session_id, password): (i64, Vec<u8>),
    ) -> Result<RenewalTarget> {
        let timeout_ms = i32::try_from(claim.ttl.as_millis()).unwrap_or(i32::MAX);
        let request = ConnectRequest { last_zxid_seen: 0, timeout_ms, session_id, password };
        let tag = self.new_tag();
        let session = self.start_session(request, tag);
        self.track_session(claim, node, session, tag).await
    }

    /// Enters a lock with a session of its own into the claim table.
    async fn track_session(
        &self,
        claim: &Claim,
        node: ClaimNode,
        session: Arc<Session>,
        tag: SessionTag,
    ) -> Result<RenewalTarget> {
        session.keep_on_demand();
        if let Err(error) = session.wait_connected(self.clock.now() + CONNECT_TIMEOUT).await {
            return match session.status().ended {
                true => Err(Error::lost(&claim.name, LossReason::SessionEnded)),
                false => Err(error),
            };
        }
        let mut entry = ClaimEntry::new(&session, tag, session.status().epoch);
        entry.node = Some(node.clone());
        entry.lease = Some(session.valid_until());
        self.claims().entries.insert(claim.id, entry);
        Ok(RenewalTarget { session, node })
    }
}
