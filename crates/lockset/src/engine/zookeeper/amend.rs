//! Changing a lock that is held: its mode and its note.

use std::sync::Arc;

use super::claim_table::ClaimNode;
use super::client::{CreateMode, MultiOp, Session, ZkErrorCode, ZkRequestError};
use super::record::{NodeRecord, ZooKeeperKey, edit_record};
use super::{CONNECT_TIMEOUT, MAIN_SESSION, SessionTag, ZooKeeperCore};
use crate::engine::{Claim, Grant, Mode};
use crate::error::{Error, LossReason, Result};
use crate::name::Note;

impl ZooKeeperCore {
    /// Replaces the writer's node by a reader's with the same sequence number, as Curator does; its
    /// record names the writer's token. While the outcome is not known, the claim table says that
    /// the node may have moved.
    pub(super) async fn downgrade(&self, claim: &Claim, grant: &Grant) -> Result<Grant> {
        let (session, tag, node) = self.held_node(claim, grant)?;
        let lost = || Error::lost(&claim.name, LossReason::Forgotten);
        let queued = self.layout.queue_node(node.name()).ok_or_else(lost)?;
        let prefix = self.layout.node_prefix(claim.id, Mode::Shared);
        let path = format!("{}/{prefix}{}", node.parent(), queued.sequence_text());
        // An earlier downgrade that was given up may have been carried out, and found by a renewal.
        if node.path != path {
            self.move_node(claim, &session, &node, &path).await?;
        }
        if !self.claims().set_node_path(claim.id, &path) {
            return Err(lost());
        }
        let is_detached = tag != MAIN_SESSION && claim.detachable;
        let key = ZooKeeperKey { path, session: is_detached.then(|| session.credentials()) };
        Ok(Grant { key: key.encode(), ..grant.clone() })
    }

    pub(super) async fn set_note(&self, claim: &Claim, grant: &Grant, note: Note) -> Result<Grant> {
        let (session, _, node) = self.held_node(claim, grant)?;
        let write = async |path: &str| {
            edit_record(&session, path, |record| record.set_note(note.clone())).await
        };
        let mut written = write(&node.path).await;
        if written.as_ref().is_err_and(|error| error.is(ZkErrorCode::NO_NODE)) {
            let other_path = {
                let claims = self.claims();
                claims.entries.get(&claim.id).and_then(|entry| entry.other_path(&node.path))
            };
            if let Some(path) = other_path {
                written = write(&path).await;
            }
        }
        match written {
            Ok(()) => Ok(grant.clone()),
            Err(error) if error.is(ZkErrorCode::NO_NODE) => {
                Err(Error::lost(&claim.name, LossReason::Forgotten))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The claim's node and its session, if it holds the lock.
    pub(super) fn held_node(
        &self,
        claim: &Claim,
        grant: &Grant,
    ) -> Result<(Arc<Session>, SessionTag, ClaimNode)> {
        let claims = self.claims();
        let entry = claims.entries.get(&claim.id).filter(|entry| entry.lease.is_some());
        let held = entry.and_then(|entry| {
            let node = entry.node.clone().filter(|node| node.token == grant.token)?;
            Some((entry.session.clone(), entry.tag, node))
        });
        held.ok_or_else(|| Error::lost(&claim.name, LossReason::Forgotten))
    }

    /// Moves a claim's node to `path`, once.
    async fn move_node(
        &self,
        claim: &Claim,
        session: &Session,
        node: &ClaimNode,
        path: &str,
    ) -> Result<()> {
        let lost = || Error::lost(&claim.name, LossReason::Forgotten);
        let (acl, mode) = (self.acl, CreateMode::Ephemeral);
        let (mut record, mut version) = (NodeRecord::new(claim), 0);
        loop {
            let data = record.clone().with_token(node.token).encode();
            let ops = [
                MultiOp::Create { path: path.to_owned(), data, acl, mode },
                MultiOp::Delete { path: node.path.clone(), version },
            ];
            let moved = {
                // Sent while the table is locked, so that a release deletes the node afterwards.
                let mut claims = self.claims();
                let entry = claims.entries.get_mut(&claim.id).ok_or_else(lost)?;
                entry.moving_to = Some(path.to_owned());
                session.multi(&ops)
            };
            match moved.committed().await {
                Ok(_) | Err(ZkRequestError::Refused(ZkErrorCode::NODE_EXISTS)) => return Ok(()),
                Err(ZkRequestError::Refused(ZkErrorCode::NO_NODE)) => {
                    self.claims().remove(claim.id);
                    return Err(lost());
                }
                // The record was changed since the node was created, perhaps by an operator who
                // wants the lock back: the change is kept.
                Err(ZkRequestError::Refused(ZkErrorCode::BAD_VERSION)) => {
                    match session.data(&node.path, false).data().await {
                        Ok((data, stat)) => {
                            record = NodeRecord::decode(&data).ok_or_else(lost)?;
                            version = stat.version;
                        }
                        // The next attempt tells whether the node was moved or is gone.
                        Err(error) if error.is(ZkErrorCode::NO_NODE) => {}
                        Err(error) => return Err(error.into()),
                    }
                }
                // Sent again: it can be carried out only once.
                Err(ZkRequestError::Unknown) => {
                    session.wait_connected(self.clock.now() + CONNECT_TIMEOUT).await?;
                    session.sync(path).done().await?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}
