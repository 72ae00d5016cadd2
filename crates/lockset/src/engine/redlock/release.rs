//! Releasing and withdrawing at all nodes, and cleaning up at nodes that do not reply in time.

use std::sync::Arc;
use std::time::Duration;

use futures_core::future::BoxFuture;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::RedlockCore;
use super::attempt::{AtNode, Attempt, AttemptPhase, claim_of};
use super::nodes::unreachable_error;
use crate::engine::common::backoff::Backoff;
use crate::engine::{Break, Claim, ClaimId, Engine, Grant, Holder};
use crate::error::{Error, Result};
use crate::name::Name;
use crate::token::Token;

/// The first and the longest pause between tries to release at one node.
const PAUSES: Backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(1));
/// How long a release waits for a quorum, however short the lease.
const MIN_RELEASE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long after the end of the lease a release is still repeated.
const CLEANUP_AFTER_LEASE: Duration = Duration::from_secs(5);

/// The release requests that have no reply yet.
type PendingReleases = FuturesUnordered<BoxFuture<'static, (usize, Result<()>)>>;

impl RedlockCore {
    /// Releases the lock at all nodes that have it, sends the outcome when a quorum has replied,
    /// and goes on with the other nodes.
    pub(super) async fn release(
        self: Arc<Self>,
        attempt: Arc<Attempt>,
        next: Option<Claim>,
        reply: oneshot::Sender<Result<()>>,
    ) {
        let _cleanup = CleanupGuard::new(&self);
        let Claim { name, ttl, .. } = &attempt.claim;
        // A node that was asked for the lock and has not replied yet is left to the task that waits
        // for the reply: it mostly arrives soon, and a release costs the node less than a
        // withdrawal.
        let (granted, unknown, refused) = {
            let mut state = attempt.state();
            state.end();
            let granted = state.granted().map(|(node, grant)| (node, grant.clone()));
            let granted: Vec<_> = granted.collect();
            let nodes_in = |at: AtNode| state.nodes_where(|other| *other == at);
            (granted, nodes_in(AtNode::Unknown), nodes_in(AtNode::Refused).len())
        };
        self.forget(&attempt);
        unknown.into_iter().for_each(|node| drop(self.release_in_background(&attempt, node)));
        let is_held_at = |node: &usize| granted.iter().any(|(granted, _)| granted == node);
        let mut entry = self.nodes.entry_node().filter(is_held_at);
        let next = next.zip(entry).and_then(|(next, entry)| self.enqueue_next(&next, entry));
        let requests = granted.into_iter().map(|(node, grant)| {
            let next = next.as_ref().filter(|next| next.entry == node).cloned();
            self.request_release(&attempt, node, grant, next)
        });
        let mut pending: PendingReleases = requests.collect();
        let mut limit = self.clock.now() + self.quorum_timeout(*ttl).max(MIN_RELEASE_TIMEOUT);
        let (mut released, mut not_held) = (0, 0);
        // The entry node must reply too, within its time: the next claim asks there first.
        while released < self.nodes.quorum || entry.is_some() {
            let next = self.clock.timeout_at(limit, pending.next()).await;
            let Some((node, outcome)) = next.flatten() else { break };
            entry.take_if(|entry| *entry == node);
            released += usize::from(outcome.is_ok());
            not_held += usize::from(matches!(outcome, Err(Error::NotHeld { .. })));
            self.on_released(&attempt, node, outcome);
            if released == self.nodes.quorum {
                limit = limit.min(self.clock.now() + self.node_timeout(*ttl));
            }
        }
        entry.iter().for_each(|silent| self.nodes.exclude(*silent));
        // The release stands, whether the caller still waits or not.
        let _ = reply.send(self.release_outcome(name, released, not_held, refused));
        while let Some((node, outcome)) = pending.next().await {
            self.on_released(&attempt, node, outcome);
        }
    }

    /// The first attempt of the next claim, which the release enqueues at the entry node. It is
    /// recorded before the check whether the claim was withdrawn; `withdraw` does the reverse, so
    /// one of the two sees the other.
    fn enqueue_next(&self, next: &Claim, entry: usize) -> Option<NextClaim> {
        self.check(next).ok()?;
        let attempt = self.begin_attempt(next, 0);
        attempt.state().set(entry, AtNode::Requested);
        if self.is_withdrawn(next.id) {
            self.forget(&attempt);
            return None;
        }
        Some(NextClaim { attempt, entry, floor: self.propose_token() })
    }

    fn request_release(
        self: &Arc<Self>,
        attempt: &Arc<Attempt>,
        node: usize,
        grant: Grant,
        next: Option<NextClaim>,
    ) -> BoxFuture<'static, (usize, Result<()>)> {
        let (core, attempt) = (self.clone(), attempt.clone());
        Box::pin(async move {
            let claim = next.as_ref().map(|next| next.attempt.with_floor(next.floor));
            let engine = &core.nodes.all[node].engine;
            let released = engine.release(&attempt.claim, &grant, claim.as_ref()).await;
            if let (Some(next), Ok(Some(grant))) = (next, &released) {
                core.observe_token(grant.token);
                let mut state = next.attempt.state();
                let is_open = state.phase() == AttemptPhase::Open;
                if is_open && *state.at(node) == AtNode::Requested {
                    state.set(node, AtNode::Granted(grant.clone()));
                }
            }
            (node, released.map(drop))
        })
    }

    /// The outcome of a release by the numbers of replies, and of nodes that had refused the lock
    /// before. The lock was not held if no quorum can have had it.
    fn release_outcome(
        &self,
        name: &Name,
        released: usize,
        not_held: usize,
        refused: usize,
    ) -> Result<()> {
        let (quorum, all) = (self.nodes.quorum, self.nodes.all.len());
        if released >= quorum {
            return Ok(());
        }
        let no_quorum_had_it = not_held + refused > all - quorum;
        if no_quorum_had_it || (not_held > 0 && released + not_held >= quorum) {
            return Err(Error::NotHeld { name: name.clone() });
        }
        Err(unreachable_error(format!("{released} of {all} nodes released `{name}`"), true))
    }

    fn on_released(self: &Arc<Self>, attempt: &Arc<Attempt>, node: usize, outcome: Result<()>) {
        match outcome {
            Ok(()) | Err(Error::NotHeld { .. }) => attempt.state().set(node, AtNode::Nothing),
            Err(_) => {
                attempt.state().set(node, AtNode::Unknown);
                self.release_in_background(attempt, node);
            }
        }
    }

    /// [`release_at`](Self::release_at) as a task of its own, which closing waits for.
    pub(super) fn release_in_background(
        self: &Arc<Self>,
        attempt: &Arc<Attempt>,
        node: usize,
    ) -> JoinHandle<()> {
        let (core, attempt) = (self.clone(), attempt.clone());
        let cleanup = CleanupGuard::new(self);
        self.nodes.spawn(async move {
            core.release_at(&attempt, node).await;
            drop(cleanup);
        })
    }

    /// Releases what an attempt has, or may have, at one node. Repeats it until the node has
    /// replied or the lease is long over. The client above cannot: it knows claims, and a claim is
    /// released when a quorum has released it.
    pub(super) async fn release_at(self: &Arc<Self>, attempt: &Arc<Attempt>, node: usize) {
        let engine = &self.nodes.all[node].engine;
        let give_up_at = self.clock.now() + attempt.claim.ttl + CLEANUP_AFTER_LEASE;
        let mut pauses = PAUSES;
        loop {
            let at = attempt.state().at(node).clone();
            let outcome = match &at {
                AtNode::Granted(grant) => {
                    engine.release(&attempt.claim, grant, None).await.map(drop)
                }
                _ => engine.withdraw(&attempt.claim).await,
            };
            match outcome {
                Ok(()) | Err(Error::NotHeld { .. }) => {
                    return attempt.state().set(node, AtNode::Nothing);
                }
                Err(error) => {
                    attempt.state().set(node, AtNode::Unknown);
                    // A node that refuses now will refuse again.
                    if !error.is_retryable() {
                        return;
                    }
                }
            }
            if self.clock.now() >= give_up_at {
                return;
            }
            self.clock.sleep_until(self.clock.now() + pauses.next_pause()).await;
        }
    }

    /// Removes everything that has the claim's id, also if another client requested it.
    pub(super) async fn withdraw(self: &Arc<Self>, claim: &Claim) -> Result<()> {
        self.remember_withdrawn(claim.id);
        let known = self.attempts().remove(&claim.id);
        match known {
            Some(attempt) => {
                self.withdraw_attempt(&attempt).await;
                Ok(())
            }
            None => self.withdraw_unknown(claim).await,
        }
    }

    /// Withdraws an attempt of this client. A node that does not reply in time may still have it
    /// and is cleaned up in the background.
    async fn withdraw_attempt(self: &Arc<Self>, attempt: &Arc<Attempt>) {
        let nodes = {
            let mut state = attempt.state();
            state.end();
            state.nodes_where(|at| *at != AtNode::Nothing)
        };
        let each = nodes.into_iter().map(|node| async move {
            match self.withdraw_at(node, &attempt.claim).await {
                true => attempt.state().set(node, AtNode::Nothing),
                false => drop(self.release_in_background(attempt, node)),
            }
        });
        futures_util::future::join_all(each).await;
    }

    /// Withdraws all attempts of a claim that this client knows nothing of; a quorum must reply.
    async fn withdraw_unknown(self: &Arc<Self>, claim: &Claim) -> Result<()> {
        let each = self.nodes.usable().into_iter().map(|node| async move {
            let Some(others) = self.attempt_ids_at(node, claim).await else { return false };
            let ids = [claim.id].into_iter().chain(others);
            let each = ids.map(|id| async move {
                self.withdraw_at(node, &Claim { id, ..claim.clone() }).await
            });
            futures_util::future::join_all(each).await.into_iter().all(|done| done)
        });
        let done = futures_util::future::join_all(each).await;
        match done.iter().filter(|done| **done).count() >= self.nodes.quorum {
            true => Ok(()),
            false => {
                let what = "too few nodes answered a withdrawal".to_owned();
                Err(unreachable_error(what, true))
            }
        }
    }

    /// Whether a node has withdrawn this attempt within its time.
    async fn withdraw_at(&self, node: usize, claim: &Claim) -> bool {
        if !self.nodes.is_usable(node) {
            return false;
        }
        let limit = self.clock.now() + self.quorum_timeout(claim.ttl);
        let done = self.clock.timeout_at(limit, self.nodes.all[node].engine.withdraw(claim)).await;
        matches!(done, Some(Ok(())))
    }

    /// The ids of a claim's later attempts at a node.
    async fn attempt_ids_at(&self, node: usize, claim: &Claim) -> Option<Vec<ClaimId>> {
        let limit = self.clock.now() + self.node_timeout(claim.ttl);
        let inspection = self.nodes.all[node].engine.inspect(&claim.name);
        let Some(Ok(state)) = self.clock.timeout_at(limit, inspection).await else { return None };
        let holders = state.holders.iter().filter_map(|holder| holder.claim);
        let waiters = state.waiters.iter().map(|waiter| waiter.claim);
        let is_ours = |id: &ClaimId| *id != claim.id && claim_of(*id) == claim.id;
        Some(holders.chain(waiters).filter(is_ours).collect())
    }

    /// Breaks the lock at every node that replies, which must be a quorum. The entry node is last:
    /// it hands the lock to the next claim, and a request that reached other nodes after that would
    /// break the next holder there.
    pub(super) async fn force_release(
        self: &Arc<Self>,
        name: &Name,
        how: Break,
    ) -> Result<Vec<Holder>> {
        let before = self.inspect(name).await?.holders;
        let request = |engine: Arc<dyn Engine>| {
            let name = name.clone();
            async move { engine.force_release(&name, how).await }
        };
        let (quorum, entry) = (self.nodes.quorum, self.nodes.entry_node());
        let (last, others): (Vec<_>, Vec<_>) =
            self.nodes.usable().into_iter().partition(|node| Some(*node) == entry);
        let mut broken = self.at_nodes(others, quorum.saturating_sub(1), request).await?;
        let still_needed = quorum.saturating_sub(broken.len());
        broken.extend(self.at_nodes(last, still_needed, request).await?);
        let is_broken = |holder: &Holder| {
            let is_same = |at: &Holder| at.claim.map(claim_of) == holder.claim;
            broken.iter().flatten().any(is_same)
        };
        Ok(before.into_iter().filter(is_broken).collect())
    }
}

/// The next claim of this client, which a release enqueues at the entry node.
#[derive(Clone)]
struct NextClaim {
    attempt: Arc<Attempt>,
    entry: usize,
    floor: Token,
}

/// A task that cleans up. Closing waits for it.
pub(super) struct CleanupGuard(Arc<RedlockCore>);

impl CleanupGuard {
    pub(super) fn new(core: &Arc<RedlockCore>) -> Self {
        core.cleanups.send_modify(|running| *running += 1);
        Self(core.clone())
    }
}

impl Drop for CleanupGuard {
    fn drop(&mut self) {
        self.0.cleanups.send_modify(|running| *running -= 1);
    }
}
