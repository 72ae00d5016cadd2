//! Releasing and withdrawing: a claim's node is deleted and stays deleted, even if replies are
//! lost.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::acquire::{ClaimContext, CreateOutcome, NodeLookup, ZkAttemptError};
use super::admission::{AdmissionDecision, count_holders, decide};
use super::claim_table::{ClaimNode, TrackedClaim};
use super::client::{
    PendingReply, Session, TRANSIENT_PAUSE, ZkErrorCode, ZkRequestError, ZkResult,
    unreachable_error,
};
use super::inspect::{ObservedNode, queue_nodes};
use super::layout::{Layout, sequence_number};
use super::record::edit_record;
use super::{CONNECT_TIMEOUT, MAIN_SESSION, ZooKeeperCore};
use crate::clock::Moment;
use crate::engine::{Break, Claim, ClaimId, Grant, Holder};
use crate::error::{Error, Result};
use crate::name::Name;
use crate::report::report;

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
        let not_held = || Error::NotHeld { name: claim.name.clone() };
        let entry = self.claims().remove(claim.id).ok_or_else(not_held)?;
        let (known_path, moving_to) = (entry.known_path(), entry.moving_to);
        let Some(node) = entry.node else { return Err(not_held()) };
        let parent = node.parent().to_owned();
        let context = ClaimContext { claim, session: entry.session, tag: entry.tag, parent };
        let mut on_drop = DeleteOnDrop::new(self, &context, known_path);
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
            Ok(()) if node.token == grant.token => on_drop.disarm(),
            Ok(()) | Err(ZkRequestError::Refused(ZkErrorCode::NO_NODE)) => {
                on_drop.disarm();
                if let Some((next, NodeLookup::Requested { .. })) = requested {
                    self.cancel_node_request(next).await;
                }
                return Err(not_held());
            }
            Err(error) => return Err(error.into()),
        }
        if !is_main {
            context.session.close().await;
        }
        let Some((next, requested)) = requested else { return Ok(None) };
        Ok(self.grant_if_admitted(next, requested).await.ok().flatten())
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

    /// Deletes a node that was requested in vain.
    async fn cancel_node_request(&self, context: &ClaimContext<'_>) {
        let entry = self.claims().remove(context.claim.id);
        if let Some(entry) = entry {
            // After the timeout it continues in the background.
            let deleted = self.delete_until_done(context, entry.known_path());
            tokio::time::timeout(CONNECT_TIMEOUT, deleted).await.ok();
        }
    }

    /// Deletes the node of a claim that was not admitted. If that fails now, it continues in the
    /// background.
    pub(super) async fn leave_queue(
        &self,
        context: &ClaimContext<'_>,
        node: &ClaimNode,
    ) -> Result<(), ZkAttemptError> {
        self.claims().remove(context.claim.id);
        if context.tag != MAIN_SESSION {
            context.session.close().await;
            return Ok(());
        }
        let mut on_drop = DeleteOnDrop::new(self, context, Some(node.path.clone()));
        match context.session.delete(&node.path).deleted().await {
            Ok(()) => on_drop.disarm(),
            Err(error) => return Err(ZkAttemptError::Fatal(error.into())),
        }
        Ok(())
    }

    /// Deletes every node of the claim, and makes sure that none is created later.
    pub(super) async fn withdraw(&self, claim: &Claim) -> Result<()> {
        let entry = {
            let mut claims = self.claims();
            claims.withdrawn.insert(claim.id, self.clock.now());
            claims.remove(claim.id)
        };
        let parent = self.paths.lock_parent(&claim.name)?;
        let Some(entry) = entry else {
            // A claim of this client that is not in the table has no node; one of a ticket may.
            if !claim.detachable {
                return Ok(());
            }
            self.wait_connected().await?;
            let context =
                ClaimContext { claim, session: self.main.clone(), tag: MAIN_SESSION, parent };
            return NodeDeletion::new(self, &context, None).attempt().await.map_err(Error::from);
        };
        let path = entry.known_path();
        let context = ClaimContext { claim, session: entry.session, tag: entry.tag, parent };
        if context.tag != MAIN_SESSION && context.session.status().connected {
            context.session.close().await;
            return Ok(());
        }
        let deleted = self.delete_until_done(&context, path);
        match tokio::time::timeout(CONNECT_TIMEOUT, deleted).await {
            Ok(Ok(())) => Ok(()),
            _ => {
                let what = "the connection is down; the node is deleted once it is back";
                Err(unreachable_error(what.to_owned(), true))
            }
        }
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

    /// Deletes a claim's node in the background, until the delete is answered: the session
    /// continues after a release, and the node would, too. The receiver resolves when it is done,
    /// and may be dropped.
    pub(super) fn delete_until_done(
        &self,
        context: &ClaimContext<'_>,
        path: Option<String>,
    ) -> oneshot::Receiver<()> {
        self.spawn_deletion(NodeDeletion::new(self, context, path))
    }

    /// The same, for a lease that has ended.
    pub(super) fn delete_ended(&self, id: ClaimId, entry: TrackedClaim) {
        let (layout, path) = (self.layout, entry.known_path());
        let TrackedClaim { session, epoch, node: Some(node), .. } = entry else { return };
        let parent = node.parent().to_owned();
        drop(self.spawn_deletion(NodeDeletion { layout, session, epoch, parent, id, path }));
    }

    fn spawn_deletion(&self, deletion: NodeDeletion) -> oneshot::Receiver<()> {
        let (tell_done, done) = oneshot::channel();
        // Sent at once, so that later requests come after it.
        let first = deletion.path.as_ref().map(|path| deletion.session.delete(path));
        self.runtime.spawn(async move {
            deletion.run(first).await;
            // The caller need not wait for it.
            let _ = tell_done.send(());
        });
        done
    }
}

/// A node that must be deleted.
struct NodeDeletion {
    layout: Layout,
    session: Arc<Session>,
    epoch: u64,
    parent: String,
    id: ClaimId,
    /// `None` if it has to be searched for.
    path: Option<String>,
}

impl NodeDeletion {
    fn new(core: &ZooKeeperCore, context: &ClaimContext<'_>, path: Option<String>) -> Self {
        Self {
            layout: core.layout,
            session: context.session.clone(),
            epoch: context.session.status().epoch,
            parent: context.parent.clone(),
            id: context.claim.id,
            path,
        }
    }

    /// Repeats the delete until it is answered or the session has ended. `first` is the first
    /// attempt, if it was sent already.
    async fn run(self, first: Option<PendingReply>) {
        let mut outcome = match first {
            Some(first) => first.deleted().await,
            None => self.attempt().await,
        };
        loop {
            match outcome {
                Ok(()) => return,
                Err(error @ ZkRequestError::Refused(_)) if error.is_transient() => {
                    tokio::time::sleep(TRANSIENT_PAUSE).await;
                }
                Err(ZkRequestError::Refused(code)) => {
                    report!(warn, parent = self.parent, reason = code, "a node cannot be deleted");
                    return;
                }
                Err(_) => {}
            }
            match self.session.wait_connected(Moment::NEVER).await {
                Ok(status) if status.epoch == self.epoch => {}
                // The node ended with its session.
                _ => return,
            }
            outcome = self.attempt().await;
        }
    }

    async fn attempt(&self) -> ZkResult<()> {
        let Self { session, parent, .. } = self;
        if let Some(path) = &self.path {
            return session.delete(path).deleted().await;
        }
        let (sync, list) = (session.sync(parent), session.children(parent, false));
        sync.done().await?;
        let children = list.children_if_any().await?;
        for child in children.iter().filter(|child| self.layout.is_node_of(child, self.id)) {
            session.delete(&format!("{parent}/{child}")).deleted().await?;
        }
        Ok(())
    }
}

/// A delete under way. If it is dropped before the reply is known, the delete is repeated in the
/// background.
pub(super) struct DeleteOnDrop<'a> {
    core: &'a ZooKeeperCore,
    context: &'a ClaimContext<'a>,
    /// `None` if the node has to be searched for.
    path: Option<String>,
    is_armed: bool,
}

impl<'a> DeleteOnDrop<'a> {
    pub(super) fn new(
        core: &'a ZooKeeperCore,
        context: &'a ClaimContext<'a>,
        path: Option<String>,
    ) -> Self {
        Self { core, context, path, is_armed: true }
    }

    pub(super) fn disarm(&mut self) {
        self.is_armed = false;
    }
}

impl Drop for DeleteOnDrop<'_> {
    fn drop(&mut self) {
        if self.is_armed {
            drop(self.core.delete_until_done(self.context, self.path.take()));
        }
    }
}
