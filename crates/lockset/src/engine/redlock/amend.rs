//! Changing the note of a held lock at a quorum.

use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::RedlockCore;
use super::nodes::unreachable_error;
use crate::engine::{Amend, Claim, Grant};
use crate::error::{Error, LossReason, Result};

impl RedlockCore {
    /// Changes the lock at the usable nodes that have it, or at all that have it if those are too
    /// few. A quorum must agree.
    pub(super) async fn amend(
        self: &Arc<Self>,
        claim: &Claim,
        grant: &Grant,
        to: &Amend,
    ) -> Result<Grant> {
        let lost = || Error::lost(&claim.name, LossReason::Forgotten);
        let (attempt, token) = self.held_attempt(claim, grant).ok_or_else(lost)?;
        let granted: Vec<_> = {
            let state = attempt.state();
            let is_usable = |node: usize| self.nodes.is_usable(node);
            let usable = state.granted().filter(|(node, _)| is_usable(*node)).count();
            let enough = usable >= self.nodes.quorum;
            let granted = state.granted().filter(|(node, _)| !enough || is_usable(*node));
            granted.map(|(node, grant)| (node, grant.clone())).collect()
        };
        let mut silent: Vec<usize> = granted.iter().map(|(node, _)| *node).collect();
        let mut pending: FuturesUnordered<_> = granted
            .into_iter()
            .map(|(node, grant)| {
                let (engine, attempt) = (self.nodes.all[node].engine.clone(), attempt.clone());
                let to = to.clone();
                async move { (node, engine.amend(&attempt.claim, &grant, to).await) }
            })
            .collect();
        let started = self.clock.now();
        let (mut amended, mut lost_at) = (0, 0);
        loop {
            let enough = amended >= self.nodes.quorum;
            let timeout = match enough {
                true => self.node_timeout(claim.ttl),
                false => self.quorum_timeout(claim.ttl),
            };
            let next = self.clock.timeout_at(started + timeout, pending.next()).await;
            let Some((node, reply)) = next.flatten() else { break };
            silent.retain(|other| *other != node);
            amended += usize::from(reply.is_ok());
            lost_at += usize::from(matches!(reply, Err(Error::Lost { .. })));
        }
        silent.into_iter().for_each(|node| self.nodes.exclude(node));
        match () {
            () if amended >= self.nodes.quorum => Ok(attempt.grant(token, self.nodes.quorum)),
            () if lost_at > self.nodes.all.len() - self.nodes.quorum => Err(lost()),
            () => Err(unreachable_error("too few nodes answered".to_owned(), true)),
        }
    }
}
