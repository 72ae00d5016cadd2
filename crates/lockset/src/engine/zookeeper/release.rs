//! Releasing and withdrawing: a claim's node is deleted and stays deleted, even if replies are
//! lost.

use std::sync::Arc;

use super::acquire::{ClaimContext, CreateOutcome, NodeLookup, ZkAttemptError};
use super::admission::{AdmissionDecision, count_holders, decide};
use super::client::{Session, ZkErrorCode, ZkRequestError, ZkResult, unreachable_error};
use super::inspect::{ObservedNode, queue_nodes};
use super::layout::{Layout, sequence_number};
use super::record::{NodeRecord, edit_record};
use super::{CONNECT_TIMEOUT, MAIN_SESSION, SessionTag, ZooKeeperCore};
use crate::engine::{Break, Claim, ClaimId, Grant, Holder};
use crate::error::{Error, Result};
use crate::name::Name;

/// From this sequence number on, a lock's parent is deleted as soon as it is empty, so that the
/// numbers start from 0 again. A parent that is never empty may still overflow:
/// `return_sequence_number` handles that.
const HIGH_NUMBER: i32 = i32::MAX - (1 << 20);

impl ZooKeeperCore {
    /// Releases a lock, and requests a node for the next claim together with it.
    pub(super) async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        if claim.detachable {
            return self.release_if_owned(claim, grant).await.map(|()| None);
        }
        let not_held = || Error::NotHeld { name: claim.name.clone() };
        let (context, node, moving_to) = {
            let mut claims = self.claims();
            let entry = claims.entries.get(&claim.id).ok_or_else(not_held)?;
            let node = entry.node.clone().ok_or_else(not_held)?;
            let (session, tag) = (entry.session.clone(), entry.tag);
            let (parent, moving_to) = (node.parent().to_owned(), entry.moving_to.clone());
            // Until the delete is answered: if this fails or is dropped, the claim is withdrawn.
            claims.end(claim.id, &parent);
            (ClaimContext { claim, session, tag, parent }, node, moving_to)
        };
        let deleted = context.session.delete(&node.path);
        // The node is at one of the two paths, and the request that moves it was sent before.
        let moved_deleted = moving_to.map(|path| context.session.delete(&path));
        if sequence_number(node.name()).is_some_and(|number| number > HIGH_NUMBER) {
            drop(context.session.delete(&context.parent));
        }
        let is_main = context.tag == MAIN_SESSION;
        let next = next.filter(|next| is_main && !next.fixed && !next.detachable);
        let next = next.map(|next| ClaimContext {
            claim: next,
            session: context.session.clone(),
            tag: MAIN_SESSION,
            parent: context.parent.clone(),
        });
        // The release succeeds whatever becomes of the next claim.
        let requested = next.as_ref().and_then(|next| Some((next, self.request_node(next).ok()?)));
        let mut released = deleted.done().await;
        if let (Some(moved), Err(ZkRequestError::Refused(ZkErrorCode::NO_NODE))) =
            (moved_deleted, &released)
        {
            released = moved.done().await;
        }
        match released {
            Ok(()) => self.claims().finish_deletion(claim.id),
            // The next claim, if there is one, finds its node itself.
            Err(ZkRequestError::Refused(ZkErrorCode::NO_NODE)) => {
                self.claims().finish_deletion(claim.id);
                return Err(not_held());
            }
            Err(error) => return Err(error.into()),
        }
        if node.token != grant.token {
            return Err(not_held());
        }
        if !is_main {
            context.session.close().await;
        }
        let Some((next, requested)) = requested else { return Ok(None) };
        Ok(self.grant_if_admitted(next, requested).await.ok().flatten())
    }

    /// Releases a lock that may have been passed on to another claim: only if this claim still owns
    /// the node. A next claim is not handed off to; it acquires by itself.
    async fn release_if_owned(&self, claim: &Claim, grant: &Grant) -> Result<()> {
        let not_held = || Error::NotHeld { name: claim.name.clone() };
        let (_, _, node) = self.held_node(claim, grant).map_err(|_| not_held())?;
        // Until the delete is answered: if this fails or is dropped, the claim is withdrawn.
        let deletion = self.claims().end(claim.id, node.parent()).ok_or_else(not_held)?;
        match self.delete_if_owned(claim.id, &deletion).await? {
            NodeOwner::ThisClaim => Ok(()),
            NodeOwner::OtherClaim | NodeOwner::Absent => Err(not_held()),
        }
    }

    /// The grant of a claim whose node was requested together with a release. `None` if it is not
    /// admitted at once: it then finds its node itself.
    async fn grant_if_admitted(
        &self,
        next: &ClaimContext<'_>,
        requested: NodeLookup,
    ) -> Result<Option<Grant>, ZkAttemptError> {
        let NodeLookup::Requested { create, list } = requested else { return Ok(None) };
        let CreateOutcome::Created(node) = self.resolve_create(next, create).await? else {
            return Ok(None);
        };
        let children = list.children_if_any().await?;
        match decide(&self.layout.queue(&children), node.name()) {
            AdmissionDecision::Admitted => self.grant(next, &node).await,
            _ => Ok(None),
        }
    }

    /// Deletes the node of a claim that was not admitted. If that fails, the caller withdraws the
    /// claim.
    pub(super) async fn leave_queue(
        &self,
        context: &ClaimContext<'_>,
    ) -> Result<(), ZkAttemptError> {
        let id = context.claim.id;
        let deletion = self.claims().end(id, &context.parent);
        if let Some(deletion) = deletion {
            self.delete_node(id, &deletion).await.map_err(Error::from)?;
        }
        Ok(())
    }

    /// Deletes every node of the claim, and makes sure that none is created later.
    pub(super) async fn withdraw(&self, claim: &Claim) -> Result<()> {
        let parent = self.paths.lock_parent(&claim.name)?;
        let deletion = {
            let mut claims = self.claims();
            claims.withdrawn.insert(claim.id, self.clock.now());
            claims.end(claim.id, &parent)
        };
        let deletion = match deletion {
            Some(deletion) if claim.detachable && deletion.path.is_some() => {
                return self.delete_if_owned(claim.id, &deletion).await.map(drop);
            }
            Some(deletion) => deletion,
            // A claim of this client that is not in the table has no node; one of a ticket may.
            None if !claim.detachable => return Ok(()),
            None => self.main_deletion(parent, None),
        };
        let connected = deletion.session.wait_connected(self.clock.now() + CONNECT_TIMEOUT).await;
        match connected {
            Err(error) if !deletion.session_is_over() => return Err(error),
            _ => {}
        }
        self.delete_node(claim.id, &deletion).await.map_err(Error::from)
    }

    /// The deletion, over the main session, of a node that another session may own.
    pub(super) fn main_deletion(&self, parent: String, path: Option<String>) -> NodeDeletion {
        let (session, epoch) = (self.main.clone(), self.main.status().epoch);
        NodeDeletion { session, tag: MAIN_SESSION, epoch, parent, path }
    }

    /// Deletes the node of a detachable lock unless it was passed on to another claim. The node's
    /// own session is ended afterwards: to connect it would take it from the owner of the ticket.
    async fn delete_if_owned(&self, id: ClaimId, deletion: &NodeDeletion) -> Result<NodeOwner> {
        let Some(path) = &deletion.path else { return Ok(NodeOwner::Absent) };
        let owner = loop {
            self.wait_connected().await?;
            let (sync, data) = (self.main.sync(path), self.main.data(path, false));
            sync.done().await?;
            let (data, stat) = match data.data().await {
                Err(error) if error.is(ZkErrorCode::NO_NODE) => break NodeOwner::Absent,
                read => read?,
            };
            let record = NodeRecord::decode(&data);
            let owner = record.and_then(|record| self.holding_claim(path, &record));
            if owner.is_some_and(|owner| owner != id) {
                break NodeOwner::OtherClaim;
            }
            match self.main.delete_version(path, stat.version).done().await {
                Ok(()) => break NodeOwner::ThisClaim,
                // Whatever changed the record may have passed the lock on.
                Err(error) if error.is(ZkErrorCode::BAD_VERSION) => {}
                Err(error) if error.is(ZkErrorCode::NO_NODE) => break NodeOwner::Absent,
                Err(error) => return Err(error.into()),
            }
        };
        if owner != NodeOwner::OtherClaim && deletion.tag != MAIN_SESSION {
            deletion.session.close().await;
        }
        self.claims().finish_deletion(id);
        Ok(owner)
    }

    /// Deletes the node of a claim that is over, once. If that fails, it must be repeated: the
    /// session continues, and the node would, too.
    pub(super) async fn delete_node(&self, id: ClaimId, deletion: &NodeDeletion) -> ZkResult<()> {
        match deletion.attempt(self.layout, id).await {
            Err(error) if !deletion.session_is_over() => return Err(error),
            _ => {}
        }
        self.claims().finish_deletion(id);
        Ok(())
    }

    /// Takes the lock away from its holders, now or by asking them to give it back.
    pub(super) async fn force_release(&self, name: &Name, how: Break) -> Result<Vec<Holder>> {
        let parent = self.paths.lock_parent(name)?;
        let (mut queue, _) = self.read_queue(name).await?;
        queue.truncate(count_holders(&queue_nodes(&queue)));
        let is_foreign = |observed: &ObservedNode| observed.record.is_none();
        if how == Break::WhenLeaseEnds && queue.iter().any(is_foreign) {
            let what = "a holder that is not lockset cannot be asked to give the lock back; break \
                        it at once, or end its session";
            return Err(unreachable_error(what.to_owned(), false));
        }
        for observed in &queue {
            let path = format!("{parent}/{}", observed.node.name);
            let outcome = match how {
                Break::Now => self.main.delete(&path).done().await,
                Break::WhenLeaseEnds => {
                    edit_record(&self.main, &path, |record| record.revoked = true).await
                }
            };
            match outcome {
                Err(error) if !error.is(ZkErrorCode::NO_NODE) => return Err(error.into()),
                _ => {}
            }
        }
        Ok(queue.iter().map(|observed| self.holder(observed)).collect())
    }
}

/// The claim to which the node of a detachable lock belongs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum NodeOwner {
    ThisClaim,
    OtherClaim,
    Absent,
}

/// A node that must be deleted.
#[derive(Clone, Debug)]
pub(super) struct NodeDeletion {
    pub(super) session: Arc<Session>,
    pub(super) tag: SessionTag,
    pub(super) epoch: u64,
    pub(super) parent: String,
    /// `None` if it has to be searched for.
    pub(super) path: Option<String>,
}

impl NodeDeletion {
    async fn attempt(&self, layout: Layout, id: ClaimId) -> ZkResult<()> {
        let Self { session, parent, .. } = self;
        if self.tag != MAIN_SESSION {
            session.close().await;
            return Ok(());
        }
        if let Some(path) = &self.path {
            return session.delete(path).deleted().await;
        }
        let (sync, list) = (session.sync(parent), session.children(parent, false));
        sync.done().await?;
        let children = list.children_if_any().await?;
        for child in children.iter().filter(|child| layout.is_node_of(child, id)) {
            let path = format!("{parent}/{child}");
            // A detachable lock may have been passed on to another claim, by the same node.
            let (data, stat) = match session.data(&path, false).data().await {
                Err(error) if error.is(ZkErrorCode::NO_NODE) => continue,
                read => read?,
            };
            let owner = NodeRecord::decode(&data).map_or(id, |record| record.claim(id));
            if owner == id {
                session.delete_version(&path, stat.version).deleted().await?;
            }
        }
        Ok(())
    }

    /// Whether the session of the node is over, and the node with it.
    fn session_is_over(&self) -> bool {
        let status = self.session.status();
        status.ended || status.epoch != self.epoch
    }
}
