//! Renewing: a quorum must renew the lease. Nodes that lost it are asked for it again.

use std::sync::Arc;

use futures_core::future::BoxFuture;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::RedlockCore;
use super::attempt::{AtNode, Attempt, AttemptPhase, counts};
use super::nodes::unreachable_error;
use crate::engine::{Claim, Grant, Wait};
use crate::error::{Error, LossReason, Result};
use crate::token::Token;

/// What one node answered about leases, each with its place in the batch.
type NodeRenewals = (usize, Vec<(usize, Arc<Attempt>, Result<Grant>)>);

impl RedlockCore {
    pub(super) async fn renew(self: &Arc<Self>, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        let attempts: Vec<Option<(Arc<Attempt>, Token)>> =
            batch.iter().map(|(claim, grant)| self.held_attempt(claim, grant)).collect();
        let (asked, tokens): (Vec<_>, Vec<_>) = attempts.iter().flatten().cloned().unzip();
        let mut yes = vec![0_usize; asked.len()];
        let mut revoked = vec![false; asked.len()];
        let mut answers = self.request_renewals(&asked);
        let ttl = batch.iter().map(|(claim, _)| claim.ttl).min().unwrap_or_default();
        let limit = self.clock.now() + self.quorum_timeout(ttl);
        // A quorum is enough; whoever answers later is heard later.
        while yes.iter().any(|yes| *yes < self.nodes.quorum) {
            let next = self.clock.timeout_at(limit, answers.next()).await;
            let Some((node, renewed)) = next.flatten() else { break };
            for (place, attempt, renewal) in renewed {
                let counted = |grant: &Grant| counts(grant.token, tokens[place]);
                yes[place] += usize::from(renewal.as_ref().is_ok_and(counted));
                revoked[place] |= is_revoked(&renewal);
                self.on_renewed(&attempt, node, renewal);
            }
        }
        self.receive_late_renewals(answers);
        let mut place = 0;
        let judged = attempts.into_iter().zip(batch).map(|(attempt, (claim, _))| {
            let Some((attempt, token)) = attempt else {
                return Err(Error::lost(&claim.name, LossReason::Forgotten));
            };
            let judged = self.renewal_outcome(&attempt, token, yes[place], revoked[place]);
            // Also if too few answered: one that is back may be the one that is missing.
            if judged.as_ref().map_or_else(Error::is_retryable, |_| true) {
                self.reacquire_missing(&attempt, token);
            }
            place += 1;
            judged
        });
        judged.collect()
    }

    /// Every node that is worth asking, about the leases that it has.
    fn request_renewals(
        &self,
        attempts: &[Arc<Attempt>],
    ) -> FuturesUnordered<BoxFuture<'static, NodeRenewals>> {
        let answers = FuturesUnordered::new();
        for node in self.nodes.usable() {
            let leases: Vec<(usize, Arc<Attempt>, Grant)> = attempts
                .iter()
                .enumerate()
                .filter_map(|(place, attempt)| match attempt.state().at(node) {
                    AtNode::Granted(grant) => Some((place, attempt.clone(), grant.clone())),
                    _ => None,
                })
                .collect();
            let engine = self.nodes.all[node].engine.clone();
            if leases.is_empty() {
                continue;
            }
            let asking: BoxFuture<'static, NodeRenewals> = Box::pin(async move {
                let batch: Vec<_> = leases.iter().map(|(_, a, grant)| (&a.claim, grant)).collect();
                let renewed = engine.renew(&batch).await;
                let each = leases.into_iter().zip(renewed);
                (node, each.map(|((place, attempt, _), r)| (place, attempt, r)).collect())
            });
            answers.push(asking);
        }
        answers
    }

    /// Renews at one node, in the background.
    pub(super) async fn renew_at(self: &Arc<Self>, attempt: &Arc<Attempt>, node: usize) {
        let at = attempt.state().at(node).clone();
        let AtNode::Granted(grant) = at else { return };
        let engine = &self.nodes.all[node].engine;
        if let Some(renewed) = engine.renew(&[(&attempt.claim, &grant)]).await.pop() {
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
            // Its lease stands, but is the last.
            Err(Error::Lost { reason: LossReason::Revoked, .. }) => {}
            Err(Error::Lost { .. }) => attempt.state().set(node, AtNode::Refused),
            Err(error) if error.is_retryable() => self.nodes.exclude(node),
            Err(_) => {}
        }
    }

    fn receive_late_renewals(
        self: &Arc<Self>,
        mut answers: FuturesUnordered<BoxFuture<'static, NodeRenewals>>,
    ) {
        if answers.is_empty() {
            return;
        }
        let core = self.clone();
        self.nodes.spawn(async move {
            while let Some((node, renewed)) = answers.next().await {
                for (_, attempt, renewal) in renewed {
                    core.on_renewed(&attempt, node, renewal);
                }
            }
        });
    }

    fn renewal_outcome(
        &self,
        attempt: &Attempt,
        token: Token,
        yes: usize,
        revoked: bool,
    ) -> Result<Grant> {
        let quorum = self.nodes.quorum;
        if yes >= quorum {
            return Ok(attempt.grant(token, quorum));
        }
        let name = &attempt.claim.name;
        let standing = attempt.state().possible_nodes(token).len();
        if revoked {
            return Err(Error::lost(name, LossReason::Revoked));
        }
        if standing < quorum {
            return Err(Error::lost(name, LossReason::Forgotten));
        }
        let all = self.nodes.all.len();
        let what = format!("{yes} of {all} nodes renewed `{name}`, {quorum} are needed");
        Err(unreachable_error(what, true))
    }

    /// Nodes that do not have the lock are asked for it again, by its very token: else the quorum
    /// would wear away. One that kept its fence answers one more, and counts too; any other value
    /// may hide somebody else's newer token. One that is still being asked as well: whoever waits
    /// for its answer may rest, as its runtime does.
    fn reacquire_missing(self: &Arc<Self>, attempt: &Arc<Attempt>, token: Token) {
        let missing = {
            let state = attempt.state();
            state.nodes_where(|at| !matches!(at, AtNode::Granted(_)))
        };
        for node in missing.into_iter().filter(|node| self.nodes.is_usable(*node)) {
            let (core, attempt) = (self.clone(), attempt.clone());
            self.nodes.spawn(async move { core.reacquire_at(&attempt, node, token).await });
        }
    }

    async fn reacquire_at(self: &Arc<Self>, attempt: &Arc<Attempt>, node: usize, token: Token) {
        let claim = attempt.with_floor(token);
        let answer = self.nodes.all[node].engine.acquire(&claim, Wait::No).await;
        let keep = matches!(&answer, Ok(Some(grant)) if counts(grant.token, token));
        let over = {
            let mut state = attempt.state();
            let over = state.phase() != AttemptPhase::Held(token);
            if !over && !matches!(state.at(node), AtNode::Granted(_)) {
                state.on_reply(node, &answer);
            }
            over
        };
        let something = !matches!(answer, Ok(None));
        if (over && something) || (matches!(answer, Ok(Some(_))) && !keep) {
            self.release_at(attempt, node).await;
        }
    }
}

fn is_revoked(renewal: &Result<Grant>) -> bool {
    matches!(renewal, Err(Error::Lost { reason: LossReason::Revoked, .. }))
}
