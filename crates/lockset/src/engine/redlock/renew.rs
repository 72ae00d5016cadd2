//! Renewing: a quorum must renew a lease. Nodes that lost it are asked for it again.

use std::sync::Arc;

use futures_core::future::BoxFuture;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::oneshot;

use super::RedlockCore;
use super::attempt::{AtNode, Attempt, AttemptPhase, counts};
use super::nodes::unreachable_error;
use crate::engine::{Claim, Grant, Renewal, Wait};
use crate::error::{Error, LossReason, Result};
use crate::token::Token;

/// What one node replied about leases, each with its index in the batch.
type NodeRenewals = (usize, Vec<(usize, Arc<Attempt>, Result<Grant>)>);

/// The renewal requests that have no reply yet, one for each node.
type PendingRenewals = FuturesUnordered<BoxFuture<'static, NodeRenewals>>;

impl RedlockCore {
    /// Renews these leases, sends the outcome of each, and goes on with the replies that come
    /// later.
    pub(super) async fn renew(
        self: Arc<Self>,
        held: Vec<(Arc<Attempt>, Token)>,
        reply: oneshot::Sender<Vec<Result<Grant>>>,
    ) {
        let mut renewed = vec![0_usize; held.len()];
        let mut revoked = vec![false; held.len()];
        let mut pending = self.request_renewals(&held);
        let ttl = held.iter().map(|(attempt, _)| attempt.claim.ttl).min().unwrap_or_default();
        let limit = self.clock.now() + self.quorum_timeout(ttl);
        while renewed.iter().any(|renewed| *renewed < self.nodes.quorum) {
            let next = self.clock.timeout_at(limit, pending.next()).await;
            let Some((node, renewals)) = next.flatten() else { break };
            for (index, attempt, renewal) in renewals {
                let counted = |grant: &Grant| counts(grant.token, held[index].1);
                renewed[index] += usize::from(renewal.as_ref().is_ok_and(counted));
                revoked[index] |= is_revoked(&renewal);
                self.on_renewed(&attempt, node, renewal);
            }
        }
        let outcomes = held.iter().enumerate().map(|(index, (attempt, token))| {
            let outcome = self.renewal_outcome(attempt, *token, renewed[index], revoked[index]);
            // Also if too few replied: a node that is back may be the one that is missing.
            if outcome.as_ref().map_or_else(Error::is_retryable, |_| true) {
                self.reacquire_missing(attempt, *token);
            }
            outcome
        });
        // The keeper may have given up this renewal.
        let _ = reply.send(outcomes.collect());
        while let Some((node, renewals)) = pending.next().await {
            for (_, attempt, renewal) in renewals {
                self.on_renewed(&attempt, node, renewal);
            }
        }
    }

    /// Asks every usable node to renew the leases that it has.
    fn request_renewals(&self, held: &[(Arc<Attempt>, Token)]) -> PendingRenewals {
        let pending = PendingRenewals::new();
        for node in self.nodes.usable() {
            let leases: Vec<(usize, Arc<Attempt>, Grant)> = held
                .iter()
                .enumerate()
                .filter_map(|(index, (attempt, _))| match attempt.state().at(node) {
                    AtNode::Granted(grant) => Some((index, attempt.clone(), grant.clone())),
                    _ => None,
                })
                .collect();
            if leases.is_empty() {
                continue;
            }
            let engine = self.nodes.all[node].engine.clone();
            pending.push(Box::pin(async move {
                let batch: Vec<_> = leases.iter().map(|(_, a, grant)| (&a.claim, grant)).collect();
                let renewed = inner_replies(&batch, engine.renew(&batch).await);
                let each = leases.into_iter().zip(renewed);
                (node, each.map(|((index, attempt, _), r)| (index, attempt, r)).collect())
            }) as BoxFuture<'static, NodeRenewals>);
        }
        pending
    }

    /// Renews at one node.
    pub(super) async fn renew_at(self: &Arc<Self>, attempt: &Arc<Attempt>, node: usize) {
        let at = attempt.state().at(node).clone();
        let AtNode::Granted(grant) = at else { return };
        let engine = &self.nodes.all[node].engine;
        let batch = [(&attempt.claim, &grant)];
        if let Some(renewed) = inner_replies(&batch, engine.renew(&batch).await).pop() {
            self.on_renewed(attempt, node, renewed);
        }
    }

    fn on_renewed(self: &Arc<Self>, attempt: &Arc<Attempt>, node: usize, renewed: Result<Grant>) {
        match renewed {
            Ok(grant) => {
                self.nodes.on_reply(node);
                let mut state = attempt.state();
                if matches!(state.at(node), AtNode::Granted(_)) {
                    state.set(node, AtNode::Granted(grant));
                }
            }
            // The running lease stands, but it is the last.
            Err(Error::Lost { reason: LossReason::Revoked, .. }) => {}
            Err(Error::Lost { .. }) => attempt.state().set(node, AtNode::Refused),
            Err(error) if error.is_retryable() => self.nodes.exclude(node),
            Err(_) => {}
        }
    }

    /// What follows from `renewed` nodes that renewed and count, and from a revocation.
    fn renewal_outcome(
        &self,
        attempt: &Attempt,
        token: Token,
        renewed: usize,
        revoked: bool,
    ) -> Result<Grant> {
        let quorum = self.nodes.quorum;
        if renewed >= quorum {
            return Ok(attempt.grant(token, quorum));
        }
        let name = &attempt.claim.name;
        if revoked {
            return Err(Error::lost(name, LossReason::Revoked));
        }
        let possible = attempt.state().possible_nodes(token).len();
        if possible < quorum {
            return Err(Error::lost(name, LossReason::Forgotten));
        }
        let all = self.nodes.all.len();
        let what = format!("{renewed} of {all} nodes renewed `{name}`, {quorum} are needed");
        Err(unreachable_error(what, true))
    }

    /// Requests the lock again, by its own token, from nodes that do not have it: otherwise the
    /// quorum would wear away. A node that kept its fence replies with one more, and counts too;
    /// any other value may hide a newer token of another claim.
    fn reacquire_missing(self: &Arc<Self>, attempt: &Arc<Attempt>, token: Token) {
        let has_or_asks = |at: &AtNode| matches!(at, AtNode::Granted(_) | AtNode::Requested);
        let missing = attempt.state().nodes_where(|at| !has_or_asks(at));
        for node in missing.into_iter().filter(|node| self.nodes.is_usable(*node)) {
            let (core, attempt) = (self.clone(), attempt.clone());
            self.nodes.spawn(async move { core.reacquire_at(&attempt, node, token).await });
        }
    }

    async fn reacquire_at(self: &Arc<Self>, attempt: &Arc<Attempt>, node: usize, token: Token) {
        let claim = attempt.with_floor(token);
        let reply = self.nodes.all[node].engine.acquire(&claim, Wait::No).await;
        let reply = reply.and_then(|admission| admission.into_inner(&claim.name));
        let is_kept = matches!(&reply, Ok(Some(grant)) if counts(grant.token, token));
        let has_ended = {
            let mut state = attempt.state();
            let has_ended = state.phase() != AttemptPhase::Held(token);
            if !has_ended && !matches!(state.at(node), AtNode::Granted(_)) {
                state.on_reply(node, &reply);
            }
            has_ended
        };
        let may_hold = !matches!(reply, Ok(None));
        if (has_ended && may_hold) || (matches!(reply, Ok(Some(_))) && !is_kept) {
            self.release_at(attempt, node).await;
        }
    }
}

fn is_revoked(renewal: &Result<Grant>) -> bool {
    matches!(renewal, Err(Error::Lost { reason: LossReason::Revoked, .. }))
}

/// The replies of a node, with a refusal as an error.
fn inner_replies(batch: &[(&Claim, &Grant)], replies: Vec<Result<Renewal>>) -> Vec<Result<Grant>> {
    let inner = |(reply, (claim, _)): (Result<Renewal>, &(&Claim, &Grant))| {
        reply.and_then(|renewal| renewal.into_inner(&claim.name))
    };
    replies.into_iter().zip(batch).map(inner).collect()
}
