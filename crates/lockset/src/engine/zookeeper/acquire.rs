//! Acquiring: a claim gets a node, and waits in the queue until it is admitted.

use std::sync::Arc;

use super::admission::{AdmissionDecision, decide};
use super::claim_table::{ClaimEntry, ClaimNode};
use super::client::{
    ConnectRequest, CreateMode, ENGINE, PendingReply, Session, TRANSIENT_PAUSE, ZkErrorCode,
    ZkRequestError, event_sink, unreachable_error,
};
use super::layout::sequence_number;
use super::record::{NodeRecord, ZooKeeperKey, token_of};
use super::{
    CONNECT_TIMEOUT, MAIN_SESSION, SessionTag, ZooKeeperCore, chosen_tokens_unsupported,
    new_session_request,
};
use crate::engine::common::admission::check_permits;
use crate::engine::{Claim, Grant, Wait, trusted_until};
use crate::error::{Error, Result};

/// A claim, the session of its node, and the node's parent.
pub(super) struct ClaimContext<'a> {
    pub(super) claim: &'a Claim,
    pub(super) session: Arc<Session>,
    pub(super) tag: SessionTag,
    pub(super) parent: String,
}

/// Why one attempt at a claim, or one look at a lock, failed.
pub(super) enum ZkAttemptError {
    /// The connection or the session failed. A waiting claim tries again with the next one.
    Request(ZkRequestError),
    Fatal(Error),
}

impl From<ZkRequestError> for ZkAttemptError {
    fn from(error: ZkRequestError) -> Self {
        ZkAttemptError::Request(error)
    }
}

impl From<Error> for ZkAttemptError {
    fn from(error: Error) -> Self {
        ZkAttemptError::Fatal(error)
    }
}

impl From<ZkAttemptError> for Error {
    fn from(error: ZkAttemptError) -> Self {
        match error {
            ZkAttemptError::Request(error) => error.into(),
            ZkAttemptError::Fatal(error) => error,
        }
    }
}

/// The result of one attempt at a claim.
enum QueueOutcome {
    Granted(Grant),
    TimedOut,
    Retry,
}

/// What is known of a claim's node.
pub(super) enum NodeLookup {
    Known(ClaimNode),
    /// The reply to its create was lost.
    OutcomeUnknown,
    /// Its create was sent just now, and a request for the parent's children after it.
    Requested {
        create: PendingReply,
        list: PendingReply,
    },
}

/// The result of a create.
pub(super) enum CreateOutcome {
    Created(ClaimNode),
    Retry,
    /// The parent's sequence numbers are used up, and it still has other children.
    SequenceExhausted,
}

impl ZooKeeperCore {
    pub(super) async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        if claim.floor.is_some() {
            return Err(chosen_tokens_unsupported());
        }
        check_permits(claim)?;
        let parent = self.paths.lock_parent(&claim.name)?;
        let (session, tag) = self.session_for(claim).await?;
        let context = ClaimContext { claim, session, tag, parent };
        let mut give_up = self.clock.now() + CONNECT_TIMEOUT;
        loop {
            let error = match self.try_acquire(&context, wait).await {
                Ok(QueueOutcome::Granted(grant)) => return Ok(Some(grant)),
                Ok(QueueOutcome::TimedOut) => return Ok(None),
                Ok(QueueOutcome::Retry) => {
                    // It had a node in the queue, and keeps it while the connection is down.
                    if wait != Wait::No {
                        give_up = wait.deadline();
                    }
                    continue;
                }
                Err(ZkAttemptError::Fatal(error)) => return Err(error),
                Err(ZkAttemptError::Request(error)) => error,
            };
            if !error.is_transient() {
                return Err(error.into());
            }
            if let ZkRequestError::Refused(_) = error {
                // The server closes the connection now, and the next one settles it.
                tokio::time::sleep(TRANSIENT_PAUSE).await;
            }
            let is_queued = self.claims().entries.contains_key(&claim.id);
            if is_queued && wait != Wait::No {
                give_up = wait.deadline();
            }
            context.session.wait_connected(give_up).await?;
        }
    }

    /// The client's main session, or a separate one for a lock that outlives it or ends before it.
    async fn session_for(&self, claim: &Claim) -> Result<(Arc<Session>, SessionTag)> {
        if !claim.fixed && !claim.detachable {
            return Ok((self.main.clone(), MAIN_SESSION));
        }
        let unsupported = |what: String| Err(Error::Unsupported { engine: ENGINE, what });
        if claim.fixed && claim.detachable {
            let what = "a fixed lease that is detachable: its remaining time cannot be determined";
            return unsupported(what.to_owned());
        }
        if let Some(entry) = self.claims().entries.get(&claim.id)
            && !entry.session.status().ended
        {
            return Ok((entry.session.clone(), entry.tag));
        }
        let tag = self.new_tag();
        let session = self.start_session(new_session_request(claim.ttl)?, tag);
        Box::pin(session.wait_connected(self.clock.now() + CONNECT_TIMEOUT)).await?;
        let negotiated = session.timeout();
        if negotiated < claim.ttl {
            session.close().await;
            return unsupported(format!(
                "a lease of {:?} that is fixed or detachable: the server keeps sessions for at \
                 most {negotiated:?} (maxSessionTimeout)",
                claim.ttl
            ));
        }
        Ok((session, tag))
    }

    /// Starts a session for one lock, on the engine's runtime: the caller's may end before the lock
    /// does.
    pub(super) fn start_session(&self, request: ConnectRequest, tag: SessionTag) -> Arc<Session> {
        let _on = self.runtime.enter();
        let events = event_sink(tag, self.session_events.clone());
        Arc::new(Session::start(self.servers.clone(), self.clock.clone(), request, false, events))
    }

    /// Gets a node into the queue, and is granted or waits until the queue may have changed.
    async fn try_acquire(
        &self,
        context: &ClaimContext<'_>,
        wait: Wait,
    ) -> Result<QueueOutcome, ZkAttemptError> {
        let (node, children) = match self.request_node(context)? {
            NodeLookup::Known(node) => {
                let list = context.session.children(&context.parent, false);
                (node, list.children_if_any().await?)
            }
            NodeLookup::OutcomeUnknown => match self.find_node(context).await? {
                Some(found) => found,
                None => return Ok(QueueOutcome::Retry),
            },
            NodeLookup::Requested { create, list } => {
                match self.resolve_create(context, create).await? {
                    CreateOutcome::Created(node) => (node, list.children_if_any().await?),
                    CreateOutcome::Retry => return Ok(QueueOutcome::Retry),
                    CreateOutcome::SequenceExhausted if self.clock.now() >= wait.deadline() => {
                        return Ok(QueueOutcome::TimedOut);
                    }
                    CreateOutcome::SequenceExhausted => {
                        let deadline = wait.deadline();
                        Box::pin(self.wait_for_sequence_numbers(context, deadline)).await?;
                        return Ok(QueueOutcome::Retry);
                    }
                }
            }
        };
        let queue = self.layout.queue(&children);
        match decide(&queue, node.name()) {
            AdmissionDecision::Admitted => match self.grant(context, &node).await? {
                Some(grant) => Ok(QueueOutcome::Granted(grant)),
                None => Ok(QueueOutcome::Retry),
            },
            AdmissionDecision::NotQueued => {
                // The node was deleted, or ended with its session. The claim may start over.
                self.claims().remove(context.claim.id);
                Ok(QueueOutcome::Retry)
            }
            AdmissionDecision::Conflict(why) => {
                self.leave_queue(context).await?;
                let name = context.claim.name.clone();
                Err(Error::Conflict { name, why }.into())
            }
            AdmissionDecision::Wait(_) if self.clock.now() >= wait.deadline() => {
                self.leave_queue(context).await?;
                Ok(QueueOutcome::TimedOut)
            }
            AdmissionDecision::Wait(nodes) => {
                // Boxed, because an uncontended claim does not get here.
                Box::pin(self.wait_for_nodes(context, &nodes, wait.deadline())).await?;
                Ok(QueueOutcome::Retry)
            }
        }
    }

    /// Requests a node unless the claim has one. The claim table is locked while the request is
    /// sent: a withdrawal comes either before it, and nothing is sent, or after it, and sends its
    /// own request later.
    pub(super) fn request_node(
        &self,
        context: &ClaimContext<'_>,
    ) -> Result<NodeLookup, ZkAttemptError> {
        let ClaimContext { claim, session, tag, parent } = context;
        let mut claims = self.claims();
        if claims.withdrawn.contains(claim.id) {
            return Err(Error::NotHeld { name: claim.name.clone() }.into());
        }
        let status = session.status();
        match claims.entries.get(&claim.id) {
            Some(entry) if entry.epoch == status.epoch => {
                return Ok(entry
                    .node
                    .clone()
                    .map_or(NodeLookup::OutcomeUnknown, NodeLookup::Known));
            }
            // It ended with its session.
            Some(_) => drop(claims.remove(claim.id)),
            None => {}
        }
        if !status.connected {
            let error = match status.ended {
                true => ZkRequestError::SessionEnded,
                false => ZkRequestError::NotSent,
            };
            return Err(error.into());
        }
        claims.entries.insert(claim.id, ClaimEntry::new(session, *tag, status.epoch));
        let node = format!("{parent}/{}", self.layout.node_prefix(claim.id, claim.mode));
        let data = NodeRecord::new(claim).encode();
        let create = session.create(&node, &data, self.acl, CreateMode::EphemeralSequential);
        let list = session.children(parent, false);
        Ok(NodeLookup::Requested { create, list })
    }

    /// Awaits a create, and creates missing parents.
    pub(super) async fn resolve_create(
        &self,
        context: &ClaimContext<'_>,
        create: PendingReply,
    ) -> Result<CreateOutcome, ZkAttemptError> {
        let ClaimContext { claim, session, .. } = context;
        match create.created().await {
            Ok((path, stat)) => {
                let node = ClaimNode { path, token: token_of(stat.czxid) };
                if sequence_number(node.name()).is_some_and(|n| !(0..i32::MAX).contains(&n)) {
                    return self.return_sequence_number(context, &node).await;
                }
                match self.track_node(context, &node, stat.ephemeral_owner)? {
                    true => Ok(CreateOutcome::Created(node)),
                    false => Ok(CreateOutcome::Retry),
                }
            }
            Err(ZkRequestError::NotSent) => {
                self.claims().remove(claim.id);
                Err(ZkRequestError::NotSent.into())
            }
            Err(error @ (ZkRequestError::Unknown | ZkRequestError::SessionEnded)) => {
                Err(error.into())
            }
            Err(error @ ZkRequestError::Refused(code)) => {
                self.claims().remove(claim.id);
                if error.is_transient() {
                    return Err(error.into());
                }
                if code != ZkErrorCode::NO_NODE {
                    let what = format!(
                        "the server refused to create a node at `{}`: {code}",
                        context.parent
                    );
                    return Err(unreachable_error(what, false).into());
                }
                let mode = match self.layout.uses_containers() {
                    true => CreateMode::Container,
                    false => CreateMode::Persistent,
                };
                // The chroot may have been removed, too.
                let chroot = &self.paths.chroot;
                let mut created =
                    self.create_missing(session, "", chroot, CreateMode::Persistent).await;
                if created.is_ok() {
                    created = self.create_missing(session, chroot, &context.parent, mode).await;
                }
                match created {
                    Ok(()) => Ok(CreateOutcome::Retry),
                    // Created or not, the next connection tells.
                    Err(error) if error.is_retryable() => Err(ZkRequestError::Unknown.into()),
                    Err(error) => Err(error.into()),
                }
            }
        }
    }

    /// Enters a node into the claim table, if it belongs to the current session.
    fn track_node(
        &self,
        context: &ClaimContext<'_>,
        node: &ClaimNode,
        owner: i64,
    ) -> Result<bool, ZkAttemptError> {
        let mut claims = self.claims();
        let status = context.session.status();
        if claims.withdrawn.contains(context.claim.id) {
            // The withdrawal searches for the node, by requests that are sent after the create.
            return Err(Error::NotHeld { name: context.claim.name.clone() }.into());
        }
        if owner != context.session.id() {
            // A node of an earlier session is never trusted; the server deletes it.
            claims.remove(context.claim.id);
            return Ok(false);
        }
        let entry = claims
            .entries
            .entry(context.claim.id)
            .or_insert_with(|| ClaimEntry::new(&context.session, context.tag, status.epoch));
        entry.epoch = status.epoch;
        entry.node = Some(node.clone());
        Ok(true)
    }

    /// Deletes a node whose sequence number is not usable: after the last number the server repeats
    /// it, or gives negative ones, and there is no order. A new parent starts from 0, so the old
    /// one is deleted as soon as it is empty.
    async fn return_sequence_number(
        &self,
        context: &ClaimContext<'_>,
        node: &ClaimNode,
    ) -> Result<CreateOutcome, ZkAttemptError> {
        let id = context.claim.id;
        self.claims().end(id, &context.parent);
        let node_deleted = context.session.delete(&node.path);
        let parent_deleted = context.session.delete(&context.parent);
        // If this fails, the caller withdraws the claim.
        node_deleted.deleted().await.map_err(Error::from)?;
        self.claims().finish_deletion(id);
        match parent_deleted.deleted().await {
            Ok(()) => Ok(CreateOutcome::Retry),
            Err(ZkRequestError::Refused(_)) => Ok(CreateOutcome::SequenceExhausted),
            Err(error) => Err(error.into()),
        }
    }

    /// Searches for the node of a create whose reply was lost.
    async fn find_node(
        &self,
        context: &ClaimContext<'_>,
    ) -> Result<Option<(ClaimNode, Vec<String>)>, ZkAttemptError> {
        let ClaimContext { claim, session, parent, .. } = context;
        let (sync, list) = (session.sync(parent), session.children(parent, false));
        sync.done().await?;
        let children = list.children_if_any().await?;
        let Some(child) = children.iter().find(|child| self.layout.is_node_of(child, claim.id))
        else {
            // It does not exist, and never will: see the documentation of `zookeeper.rs`.
            let mut claims = self.claims();
            if claims.entries.get(&claim.id).is_some_and(|entry| entry.node.is_none()) {
                claims.remove(claim.id);
            }
            return Ok(None);
        };
        let path = format!("{parent}/{child}");
        match session.data(&path, false).data().await {
            Ok((data, stat)) => {
                let token = NodeRecord::decode(&data)
                    .map_or_else(|| token_of(stat.czxid), |record| record.token(stat.czxid));
                let node = ClaimNode { path, token };
                let is_ours = self.track_node(context, &node, stat.ephemeral_owner)?;
                Ok(is_ours.then_some((node, children)))
            }
            Err(error) if error.is(ZkErrorCode::NO_NODE) => {
                self.claims().remove(claim.id);
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Grants an admitted claim, unless its node was lost in the last moment.
    pub(super) async fn grant(
        &self,
        context: &ClaimContext<'_>,
        node: &ClaimNode,
    ) -> Result<Option<Grant>, ZkAttemptError> {
        let ClaimContext { claim, session, tag, .. } = context;
        let (now, timeout) = (self.clock.now(), session.timeout());
        let left = session.valid_until().saturating_duration_since(now);
        if *tag != MAIN_SESSION {
            session.keep_on_demand();
        }
        if claim.fixed && left < timeout / 10 * 9 {
            Box::pin(session.reconnect(now + CONNECT_TIMEOUT)).await?;
        } else if !claim.fixed && left < timeout / 3 {
            session.sync(&self.paths.chroot).done().await?;
        }
        let valid_until = match claim.fixed {
            // It is not renewed, so it lasts for the requested ttl.
            true => {
                let requested = trusted_until(self.clock.now(), claim.ttl);
                session.valid_until().min(requested)
            }
            false => session.lease_end(self.clock.now()),
        };
        {
            let mut claims = self.claims();
            if claims.withdrawn.contains(claim.id) {
                return Err(Error::NotHeld { name: claim.name.clone() }.into());
            }
            let status = session.status();
            let entry = claims.entries.get_mut(&claim.id);
            let entry = entry.filter(|entry| entry.epoch == status.epoch);
            let Some(entry) = entry else { return Ok(None) };
            entry.lease = Some(valid_until);
        }
        let key = ZooKeeperKey {
            path: node.path.clone(),
            session: (*tag != MAIN_SESSION && claim.detachable).then(|| session.credentials()),
        };
        Ok(Some(Grant { token: node.token, valid_until, key: key.encode() }))
    }
}
