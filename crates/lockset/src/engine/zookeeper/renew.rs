//! Renewing: one `sync` per session, and a check of each node that is not watched yet.

use std::sync::Arc;

use futures_util::future::join_all;
use tokio::sync::oneshot;

use super::claim_table::{ClaimEntry, ClaimNode};
use super::client::{Session, SessionEvent, ZkErrorCode, ZkRequestError, ZkResult};
use super::record::{NodeRecord, ZooKeeperKey};
use super::{CONNECT_TIMEOUT, MAIN_SESSION, ZooKeeperCore};
use crate::engine::{Claim, Grant};
use crate::error::{Error, LossReason, Result};

/// The node of a claim that is renewed, and its session.
pub(super) struct RenewalTarget {
    pub(super) session: Arc<Session>,
    pub(super) node: ClaimNode,
}

impl ZooKeeperCore {
    /// Sends one `sync` per session, whatever the number of its locks. A node is read and watched
    /// when it is renewed for the first time on a connection. From then on the watch reports
    /// changes, and its events come before the reply to the `sync`.
    pub(super) async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        let targets =
            join_all(batch.iter().map(|(claim, grant)| self.renewal_target(claim, grant))).await;
        let mut sessions: Vec<Arc<Session>> = Vec::new();
        for target in targets.iter().flatten() {
            if !sessions.iter().any(|session| Arc::ptr_eq(session, &target.session)) {
                sessions.push(target.session.clone());
            }
        }
        let synced = join_all(sessions.iter().map(|session| self.sync_session(session))).await;
        self.flush_events().await;
        join_all(batch.iter().zip(targets).map(|((claim, grant), target)| async {
            let target = target?;
            let session = sessions.iter().position(|one| Arc::ptr_eq(one, &target.session));
            let synced = session.and_then(|index| synced.get(index)).cloned();
            let synced = synced.unwrap_or(Err(ZkRequestError::NotSent));
            self.renew_synced(claim, grant, target, synced).await
        }))
        .await
    }

    async fn renewal_target(&self, claim: &Claim, grant: &Grant) -> Result<RenewalTarget> {
        let forgotten = || Error::lost(&claim.name, LossReason::Forgotten);
        let known = {
            let claims = self.claims();
            claims.entries.get(&claim.id).map(|entry| {
                let node = entry.node.clone().filter(|node| node.token == grant.token);
                let session = entry.session.clone();
                node.filter(|_| entry.lease.is_some()).map(|node| RenewalTarget { session, node })
            })
        };
        match (known, grant.zookeeper_key()) {
            (Some(known), _) => known.ok_or_else(forgotten),
            (None, Some(ZooKeeperKey { path, session: Some(session) })) => {
                // Checked before the session is touched: another claim may hold by it.
                let (record, _) = self.read_record(claim, grant, &path).await?;
                if self.holding_claim(&path, &record) != Some(claim.id) {
                    return Err(forgotten());
                }
                self.attach_session(claim, ClaimNode { path, token: grant.token }, session).await
            }
            (None, _) => Err(forgotten()),
        }
    }

    async fn sync_session(&self, session: &Session) -> ZkResult<()> {
        let first = session.sync(&self.paths.chroot).done().await;
        match first {
            // The session may connect on demand only; if it still exists, this connects it.
            Err(ZkRequestError::NotSent) => {
                let connected = session.wait_connected(self.clock.now() + CONNECT_TIMEOUT).await;
                // An unreachable server alone does not end the lease.
                connected.map_err(|_| match session.status().ended {
                    true => ZkRequestError::SessionEnded,
                    false => ZkRequestError::NotSent,
                })?;
                session.sync(&self.paths.chroot).done().await
            }
            first => first,
        }
    }

    /// Waits until the claim table reflects all events so far: a watch event arrives before the
    /// reply to a `sync`, but is handled by another task.
    async fn flush_events(&self) {
        let (tell_flushed, flushed) = oneshot::channel();
        if self.session_events.send((MAIN_SESSION, SessionEvent::Flush(tell_flushed))).is_ok() {
            // Fails if the engine was closed and events are no longer handled.
            let _ = flushed.await;
        }
    }

    /// Renews a lock after its session was synced, or tells why it cannot be renewed.
    async fn renew_synced(
        &self,
        claim: &Claim,
        grant: &Grant,
        target: RenewalTarget,
        synced: ZkResult<()>,
    ) -> Result<Grant> {
        let RenewalTarget { session, node } = target;
        if let Err(error) = synced {
            let ended = session.status().ended || matches!(error, ZkRequestError::SessionEnded);
            return Err(match ended {
                true => Error::lost(&claim.name, LossReason::SessionEnded),
                false => error.into(),
            });
        }
        // Read after the `sync`, which may have had to wait for another connection.
        let connection = session.status().connection;
        let watched_on = self.claims().entries.get(&claim.id).map(|entry| entry.watched_on);
        if watched_on != Some(connection) {
            self.check_and_watch(claim, grant, &session, node.path).await?;
        }
        let valid_until = session.lease_end(self.clock.now());
        // Read after the lease's end, which thus is not that of a later session: this task may have
        // been stalled for long.
        let now = session.status().epoch;
        let path = match self.claims().entries.get_mut(&claim.id) {
            Some(ClaimEntry { epoch, .. }) if *epoch != now => {
                return Err(Error::lost(&claim.name, LossReason::SessionEnded));
            }
            // A concurrent downgrade may have moved the node.
            Some(ClaimEntry { lease, node: Some(node), .. }) => {
                // A slower concurrent renewal must not shorten what was promised.
                *lease = (*lease).max(Some(valid_until));
                node.path.clone()
            }
            // It was lost meanwhile.
            _ => return Err(Error::lost(&claim.name, LossReason::Broken)),
        };
        let session = grant.zookeeper_key().and_then(|key| key.session);
        let key = ZooKeeperKey { path, session }.encode();
        Ok(Grant { token: grant.token, valid_until, key })
    }

    /// Checks that the node exists, and watches it. A downgrade may move it meanwhile, or may have
    /// moved it before without its outcome being known.
    async fn check_and_watch(
        &self,
        claim: &Claim,
        grant: &Grant,
        session: &Session,
        first_path: String,
    ) -> Result<()> {
        let lost = |reason| {
            self.claims().remove(claim.id);
            Err(Error::lost(&claim.name, reason))
        };
        let (connection, mut path) = (session.status().connection, first_path.clone());
        let (data, stat, changes) = loop {
            let changes = {
                let mut claims = self.claims();
                claims.watched.insert(path.clone(), claim.id);
                claims.entries.get(&claim.id).map(|entry| entry.changes)
            };
            let error = match session.data(&path, true).data().await {
                Ok((data, stat)) => break (data, stat, changes),
                Err(error) => error,
            };
            if !error.is(ZkErrorCode::NO_NODE) {
                return Err(error.into());
            }
            let other_path = {
                let mut claims = self.claims();
                claims.watched.remove(&path);
                claims.entries.get(&claim.id).and_then(|entry| entry.other_path(&path))
            };
            match other_path {
                Some(other) if path == first_path => path = other,
                _ => return lost(LossReason::Broken),
            }
        };
        let record = NodeRecord::decode(&data);
        // Data of another program says nothing about the lock: the path is the claim's.
        let is_of_another = |record: &NodeRecord| {
            let is_own = self.holding_claim(&path, record) == Some(claim.id);
            record.token(stat.czxid) != grant.token || !is_own
        };
        if stat.ephemeral_owner != session.id() || record.as_ref().is_some_and(is_of_another) {
            return lost(LossReason::Forgotten);
        }
        if record.is_some_and(|record| record.revoked) {
            return Err(Error::lost(&claim.name, LossReason::Revoked));
        }
        let mut claims = self.claims();
        if path != first_path {
            claims.set_node_path(claim.id, &path);
        }
        // A node that is being moved, or that changed meanwhile, is checked by the next renewal.
        if let Some(entry) = claims.entries.get_mut(&claim.id)
            && Some(entry.changes) == changes
            && entry.known_path().is_some_and(|known| known == path)
        {
            entry.watched_on = connection;
        }
        Ok(())
    }
}
