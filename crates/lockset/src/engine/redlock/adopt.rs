//! Passing a held lock on to another claim, for a ticket that is attached.

use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::RedlockCore;
use super::attempt::{AtNode, AttemptPhase, counts};
use super::nodes::unreachable_error;
use crate::engine::{Claim, Grant};
use crate::error::{Error, LossReason, Result};

impl RedlockCore {
    /// Passes a lock on at every node that has it; a quorum must agree. At each node the first
    /// successor wins, and two quorums share a node: so a ticket has at most one successor. For the
    /// tokens nothing changes: the token has the same owner under another id.
    pub(super) async fn adopt(
        self: &Arc<Self>,
        claim: &Claim,
        grant: &Grant,
        successor: &Claim,
    ) -> Result<Grant> {
        self.check(successor)?;
        let lost = || Error::lost(&claim.name, LossReason::Forgotten);
        let (attempt, token) = self.held_attempt(claim, grant).ok_or_else(lost)?;
        let next = self.begin_attempt(successor, 0);
        if next.state().phase() == AttemptPhase::Held(token) {
            return Ok(next.grant(token, self.nodes.quorum));
        }
        // Recorded before the check whether it was withdrawn; `withdraw` does the reverse, so one
        // of the two sees the other.
        let granted: Vec<(usize, Grant)> = {
            let state = attempt.state();
            state.granted().map(|(node, grant)| (node, grant.clone())).collect()
        };
        let had = granted.len();
        granted.iter().for_each(|(node, _)| next.state().set(*node, AtNode::Requested));
        if self.is_withdrawn(successor.id) {
            self.forget(&next);
            return Err(Error::NotHeld { name: claim.name.clone() });
        }
        let mut pending: FuturesUnordered<_> = granted
            .into_iter()
            .map(|(node, grant)| {
                let engine = self.nodes.all[node].engine.clone();
                let (attempt, next) = (attempt.clone(), next.clone());
                async move { (node, engine.adopt(&attempt.claim, &grant, &next.claim).await) }
            })
            .collect();
        let started = self.clock.now();
        let (mut adopted, mut lost_at) = (0, 0);
        loop {
            let enough = adopted >= self.nodes.quorum;
            let timeout = match enough {
                true => self.node_timeout(claim.ttl),
                false => self.quorum_timeout(claim.ttl),
            };
            let reply = self.clock.timeout_at(started + timeout, pending.next()).await;
            let Some((node, reply)) = reply.flatten() else { break };
            adopted += usize::from(reply.as_ref().is_ok_and(|grant| counts(grant.token, token)));
            lost_at += usize::from(matches!(reply, Err(Error::Lost { .. })));
            next.state().set(
                node,
                match reply {
                    Ok(grant) => AtNode::Granted(grant),
                    Err(Error::Lost { .. }) => AtNode::Refused,
                    Err(_) => AtNode::Unknown,
                },
            );
        }
        if adopted < self.nodes.quorum {
            // What the successor got is withdrawn with it, unless it is repeated.
            let all = self.nodes.all.len();
            let what = format!("{adopted} of {all} nodes passed `{}` on", claim.name);
            let is_lost = had - lost_at < self.nodes.quorum;
            return Err(if is_lost { lost() } else { unreachable_error(what, true) });
        }
        self.forget(&attempt);
        self.remember_withdrawn(claim.id);
        attempt.state().end();
        let silent = next.state().nodes_where(|at| !matches!(at, AtNode::Granted(_)));
        for node in silent {
            next.state().set(node, AtNode::Unknown);
            self.release_in_background(&attempt, node);
        }
        let holds = next.state().hold(token);
        match holds {
            true => Ok(next.grant(token, self.nodes.quorum)),
            false => Err(Error::NotHeld { name: claim.name.clone() }),
        }
    }
}
