//! Releasing and withdrawing at all nodes, and cleaning up at nodes that do not reply in time.

use std::sync::Arc;
use std::time::Duration;

use futures_core::future::BoxFuture;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::RedlockCore;
use super::attempt::{AtNode, Attempt, AttemptPhase, claim_of};
use super::nodes::unreachable_error;
use crate::engine::{Break, Claim, ClaimId, Grant, Holder};
use crate::error::{Error, Result};
use crate::name::Name;
use crate::sync;
use crate::token::Token;

/// The pauses between tries to give something back.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));
/// How long a release waits for a quorum, however short the lease.
const MIN_RELEASE_TIMEOUT: Duration = Duration::from_secs(2);
/// How much longer than its lease something is tried to be given back.
const CLEANUP_AFTER_LEASE: Duration = Duration::from_secs(5);

/// How long an answer may come after its attempt was over, until what was asked for is withdrawn.
const LATE: Duration = Duration::from_millis(500);

impl RedlockCore {
    pub(super) async fn release(
        self: &Arc<Self>,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<()> {
        let not_held = || Error::NotHeld { name: claim.name.clone() };
        let (attempt, _) = self.held_attempt(claim, grant).ok_or_else(not_held)?;
        // What is still asked for is given back by whoever waits for the answer: it is mostly about
        // to come, and to give back what is known costs the node less than to withdraw.
        let (granted, unknown, owed) = {
            let mut state = attempt.state();
            state.end();
            if !state.nodes_where(|at| *at == AtNode::Requested).is_empty() {
                self.look_again(&attempt);
            }
            let granted = state.granted().map(|(node, grant)| (node, grant.clone()));
            let granted: Vec<_> = granted.collect();
            let nodes = granted.iter().map(|(node, _)| *node).collect();
            let owed = Owed::new(self, &attempt, nodes, |at| matches!(at, AtNode::Granted(_)));
            (granted, state.nodes_where(|at| *at == AtNode::Unknown), owed)
        };
        self.forget(&attempt);
        unknown.into_iter().for_each(|node| self.release_in_background(&attempt, node));
        let held_at = |node: &usize| granted.iter().any(|(granted, _)| granted == node);
        let mut entry = self.nodes.entry_node().filter(held_at);
        let next_claim = next.zip(entry).and_then(|(next, entry)| self.enqueue_next(next, entry));
        let mut answers: FuturesUnordered<_> = granted
            .into_iter()
            .map(|(node, grant)| {
                let next = next_claim.as_ref().filter(|next| next.entry == node).cloned();
                self.request_release(&attempt, node, grant, next)
            })
            .collect();
        let mut limit = self.clock.now() + self.quorum_timeout(claim.ttl).max(MIN_RELEASE_TIMEOUT);
        let (mut yes, mut no) = (0, 0);
        // The entry must have its say, in its time: whoever is next asks there first.
        while yes < self.nodes.quorum || entry.is_some() {
            let answer = self.clock.timeout_at(limit, answers.next()).await;
            let Some((node, answer)) = answer.flatten() else { break };
            entry.take_if(|entry| *entry == node);
            yes += usize::from(answer.is_ok());
            no += usize::from(matches!(answer, Err(Error::NotHeld { .. })));
            self.on_released(&attempt, node, answer);
            if yes == self.nodes.quorum {
                limit = limit.min(self.clock.now() + self.node_timeout(claim.ttl));
            }
        }
        entry.iter().for_each(|silent| self.nodes.exclude(*silent));
        if !answers.is_empty() {
            self.nodes.beside_the_caller(async move {
                while let Some((node, answer)) = answers.next().await {
                    owed.core.on_released(&owed.attempt, node, answer);
                }
            });
        }
        self.release_outcome(claim, yes, no)
    }

    /// The first attempt of the claim that is next, which a release takes along to the entry. Noted
    /// before it is looked whether the claim was withdrawn: whoever withdraws it does the reverse.
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
            let answer = engine.release(&attempt.claim, &grant, claim.as_ref()).await;
            if let (Some(next), Ok(Some(grant))) = (next, &answer) {
                core.observe_token(grant.token);
                let mut state = next.attempt.state();
                if state.phase() == AttemptPhase::Open && *state.at(node) == AtNode::Requested {
                    state.set(node, AtNode::Granted(grant.clone()));
                }
            }
            (node, answer.map(drop))
        })
    }

    /// An attempt is over while a node is still asked. Whoever waits for the answer may rest, as
    /// its runtime does, so it is looked later whether it came. One look serves for many.
    fn look_again(self: &Arc<Self>, attempt: &Arc<Attempt>) {
        let mut late = sync::lock(&self.late);
        late.push((self.clock.now() + LATE, attempt.clone()));
        if late.len() == 1 {
            let core = self.clone();
            self.nodes.spawn(async move { core.withdraw_the_late().await });
        }
    }

    async fn withdraw_the_late(self: &Arc<Self>) {
        loop {
            self.clock.sleep_until(self.clock.now() + LATE).await;
            let now = self.clock.now();
            let (due, is_done) = {
                let mut late = sync::lock(&self.late);
                let due: Vec<_> = late.extract_if(.., |(at, _)| *at <= now).collect();
                (due, late.is_empty())
            };
            for (_, attempt) in due {
                let asked = attempt.state().nodes_where(|at| *at == AtNode::Requested);
                asked.into_iter().for_each(|node| self.release_in_background(&attempt, node));
            }
            if is_done {
                return;
            }
        }
    }

    /// What so many answers of each kind to a release come to.
    fn release_outcome(&self, claim: &Claim, yes: usize, no: usize) -> Result<()> {
        let (quorum, all) = (self.nodes.quorum, self.nodes.all.len());
        if yes >= quorum {
            return Ok(());
        }
        if no > 0 && yes + no >= quorum {
            return Err(Error::NotHeld { name: claim.name.clone() });
        }
        Err(unreachable_error(format!("{yes} of {all} nodes released `{}`", claim.name), true))
    }

    fn on_released(self: &Arc<Self>, attempt: &Arc<Attempt>, node: usize, answer: Result<()>) {
        match answer {
            Ok(()) | Err(Error::NotHeld { .. }) => attempt.state().set(node, AtNode::Nothing),
            Err(_) => {
                attempt.state().set(node, AtNode::Unknown);
                self.release_in_background(attempt, node);
            }
        }
    }

    pub(super) fn release_in_background(self: &Arc<Self>, attempt: &Arc<Attempt>, node: usize) {
        let (core, attempt) = (self.clone(), attempt.clone());
        let cleanups = CleanupGuard::new(self);
        self.nodes.spawn(async move {
            core.release_at(&attempt, node).await;
            drop(cleanups);
        });
    }

    /// Gives back what an attempt has, or may have, at a node; again and again until the node has
    /// answered or the lease is long over.
    pub(super) async fn release_at(self: &Arc<Self>, attempt: &Arc<Attempt>, node: usize) {
        let engine = &self.nodes.all[node].engine;
        let give_up_at = self.clock.now() + attempt.claim.ttl + CLEANUP_AFTER_LEASE;
        let mut pause = PAUSES.0;
        loop {
            let at = attempt.state().at(node).clone();
            let answer = match &at {
                AtNode::Granted(grant) => {
                    engine.release(&attempt.claim, grant, None).await.map(drop)
                }
                _ => engine.withdraw(&attempt.claim).await,
            };
            match answer {
                Ok(()) | Err(Error::NotHeld { .. }) => {
                    return attempt.state().set(node, AtNode::Nothing);
                }
                Err(error) => {
                    attempt.state().set(node, AtNode::Unknown);
                    // One that refuses refuses the next time too.
                    if !error.is_retryable() {
                        return;
                    }
                }
            }
            if self.clock.now() >= give_up_at {
                return;
            }
            self.clock.sleep_until(self.clock.now() + pause).await;
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    /// Everything that bears the claim's id, whoever asked for it.
    pub(super) async fn withdraw(self: &Arc<Self>, claim: &Claim) -> Result<()> {
        self.remember_withdrawn(claim.id);
        let known = self.attempts().remove(&claim.id);
        if let Some(attempt) = known {
            attempt.state().end();
            let there = attempt.state().nodes_where(|at| *at != AtNode::Nothing);
            let each = there.into_iter().map(|node| self.withdraw_at(node, &attempt.claim));
            // What a node does not answer it may still have; the rest happens behind.
            for (node, done) in futures_util::future::join_all(each).await {
                match done {
                    true => attempt.state().set(node, AtNode::Nothing),
                    false => self.release_in_background(&attempt, node),
                }
            }
            return Ok(());
        }
        let each = self.nodes.usable().into_iter().map(|node| async move {
            let Some(others) = self.attempt_ids_at(node, claim).await else { return false };
            let ids = [claim.id].into_iter().chain(others);
            let each = ids.map(|id| async move {
                self.withdraw_at(node, &Claim { id, ..claim.clone() }).await.1
            });
            futures_util::future::join_all(each).await.into_iter().all(|done| done)
        });
        let done = futures_util::future::join_all(each).await;
        match done.iter().filter(|done| **done).count() >= self.nodes.quorum {
            true => Ok(()),
            false => Err(unreachable_error("too few nodes answered a withdrawal".to_owned(), true)),
        }
    }

    /// Whether a node has withdrawn this attempt in its time.
    async fn withdraw_at(&self, node: usize, claim: &Claim) -> (usize, bool) {
        if !self.nodes.is_usable(node) {
            return (node, false);
        }
        let limit = self.clock.now() + self.quorum_timeout(claim.ttl);
        let done = self.clock.timeout_at(limit, self.nodes.all[node].engine.withdraw(claim)).await;
        (node, matches!(done, Some(Ok(()))))
    }

    /// The ids at a node that belong to attempts of a claim.
    async fn attempt_ids_at(&self, node: usize, claim: &Claim) -> Option<Vec<ClaimId>> {
        let limit = self.clock.now() + self.node_timeout(claim.ttl);
        let looking = self.nodes.all[node].engine.inspect(&claim.name);
        let Some(Ok(state)) = self.clock.timeout_at(limit, looking).await else { return None };
        let holders = state.holders.iter().filter_map(|holder| holder.claim);
        let waiters = state.waiters.iter().map(|waiter| waiter.claim);
        let ours = |id: &ClaimId| *id != claim.id && claim_of(*id) == claim.id;
        Some(holders.chain(waiters).filter(ours).collect())
    }

    /// Breaks the lock at every node that answers, which must be a quorum.
    pub(super) async fn force_release(
        self: &Arc<Self>,
        name: &Name,
        how: Break,
    ) -> Result<Vec<Holder>> {
        let before = self.inspect(name).await?.holders;
        let broken = self.at_usable_nodes(|engine| {
            let name = name.clone();
            async move { engine.force_release(&name, how).await }
        });
        let answered = broken.await?;
        let freed = |holder: &Holder| {
            let same = |at: &&Holder| at.claim.map(claim_of) == holder.claim;
            answered.iter().flatten().filter(same).count() > 0
        };
        Ok(before.into_iter().filter(freed).collect())
    }
}

/// Whoever is next after a release, and is taken along to the entry.
#[derive(Clone)]
struct NextClaim {
    attempt: Arc<Attempt>,
    entry: usize,
    floor: Token,
}

/// Whoever looks after what an attempt has at its nodes. Dropped before everything is settled (by a
/// caller that was cancelled, or a runtime that ended), it leaves the rest to the background.
pub(super) struct Owed {
    core: Arc<RedlockCore>,
    attempt: Arc<Attempt>,
    /// What it is to give back, of an attempt that is over: at these nodes, if it stands like this
    /// there. Others may look after the rest.
    nodes: Vec<usize>,
    which: fn(&AtNode) -> bool,
    _owing: CleanupGuard,
}

impl Owed {
    pub(super) fn new(
        core: &Arc<RedlockCore>,
        attempt: &Arc<Attempt>,
        nodes: Vec<usize>,
        which: fn(&AtNode) -> bool,
    ) -> Self {
        let cleanups = CleanupGuard::new(core);
        Self { core: core.clone(), attempt: attempt.clone(), nodes, which, _owing: cleanups }
    }

    /// What there is at this node is looked after.
    pub(super) fn settle(&mut self, node: usize) {
        self.nodes.retain(|other| *other != node);
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        let left = {
            let mut state = self.attempt.state();
            let mut left = std::mem::take(&mut self.nodes);
            match state.phase() {
                AttemptPhase::Open => left.clear(),
                AttemptPhase::Held(_) => {
                    left.retain(|node| *state.at(*node) == AtNode::Requested);
                    // The next renewal asks again.
                    left.drain(..).for_each(|node| state.set(node, AtNode::Unknown));
                }
                AttemptPhase::Ended => left.retain(|node| (self.which)(state.at(*node))),
            }
            left
        };
        left.into_iter().for_each(|node| self.core.release_in_background(&self.attempt, node));
    }
}

/// One who gives something back, which closing waits for.
struct CleanupGuard(Arc<RedlockCore>);

impl CleanupGuard {
    fn new(core: &Arc<RedlockCore>) -> Self {
        core.cleanups.send_modify(|cleanups| *cleanups += 1);
        Self(core.clone())
    }
}

impl Drop for CleanupGuard {
    fn drop(&mut self) {
        self.0.cleanups.send_modify(|cleanups| *cleanups -= 1);
    }
}
