//! The way of one claim: attempts, until one of them has a quorum or the time is over.

use std::sync::Arc;
use std::time::Duration;

use futures_core::future::BoxFuture;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::RedlockCore;
use super::attempt::{AtNode, Attempt, AttemptPhase, attempt_id};
use super::release::Owed;
use super::round::{AttemptRound, RoundOutcome};
use crate::engine::{Claim, Grant, Wait};
use crate::error::{Error, Result};
use crate::token::Token;

/// The pauses between attempts that failed.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(200));
/// Requests under way, and what they are answered.
pub(super) type PendingAcquires =
    FuturesUnordered<BoxFuture<'static, (usize, Result<Option<Grant>>)>>;

impl RedlockCore {
    pub(super) async fn acquire(
        self: &Arc<Self>,
        claim: &Claim,
        wait: Wait,
    ) -> Result<Option<Grant>> {
        self.check(claim)?;
        let (first, grant) = self.resume(claim)?;
        if grant.is_some() {
            return Ok(grant);
        }
        let began = self.clock.now();
        let deadline = wait.deadline().max(began + self.node_timeout(claim.ttl));
        let mut pause = PAUSES.0;
        for number in first..=u8::MAX {
            let attempt = self.begin_attempt(claim, number);
            if self.is_withdrawn(claim.id) {
                self.forget(&attempt);
                return Err(Error::NotHeld { name: claim.name.clone() });
            }
            let mut round = AttemptRound::new(self, &attempt, wait);
            let via_entry_node =
                wait != Wait::No && (self.is_contended(claim) || round.is_queued_at_entry_node());
            let outcome = match via_entry_node {
                true => Box::pin(round.via_entry_node()).await,
                false => round.at_all_nodes().await,
            };
            let (pending, entry) = (std::mem::take(&mut round.pending), round.entry);
            match outcome {
                RoundOutcome::Won(grant) => {
                    self.adopt_late_replies(&attempt, pending);
                    if via_entry_node && !claim.fixed && attempt.has_first_lease_at(entry) {
                        self.extend_first_lease(&attempt, entry);
                    }
                    return Ok(Some(grant));
                }
                RoundOutcome::Busy => {
                    self.abandon(&attempt, pending).await;
                    self.note_contention(claim);
                    if wait == Wait::No || self.clock.now() >= wait.deadline() {
                        return Ok(None);
                    }
                    // Whoever comes through the entry and still finds it busy has met somebody who
                    // came another way.
                    if !via_entry_node {
                        continue;
                    }
                }
                RoundOutcome::Failed(error) => {
                    self.abandon(&attempt, pending).await;
                    if !error.is_retryable() || self.clock.now() >= deadline {
                        return Err(error);
                    }
                }
            }
            let until = self.clock.now() + with_jitter(pause);
            self.clock.sleep_until(until.min(deadline)).await;
            pause = (pause * 2).min(PAUSES.1);
        }
        // All its ids are used up: the caller comes with a fresh claim.
        Err(Error::NotHeld { name: claim.name.clone() })
    }

    /// Which attempt of a claim is next, and its grant if it is held already. One that was
    /// interrupted goes on where it was: it keeps its place in the queue.
    fn resume(&self, claim: &Claim) -> Result<(u8, Option<Grant>)> {
        if self.is_withdrawn(claim.id) {
            return Err(Error::NotHeld { name: claim.name.clone() });
        }
        let Some(attempt) = self.attempt_of(claim.id) else { return Ok((0, None)) };
        let phase = attempt.state().phase();
        let number = attempt.claim.id.to_bits() as u8;
        match phase {
            AttemptPhase::Held(token) => {
                Ok((number, Some(attempt.grant(token, self.nodes.quorum))))
            }
            AttemptPhase::Open | AttemptPhase::Ended => Ok((number, None)),
        }
    }

    pub(super) fn begin_attempt(&self, claim: &Claim, number: u8) -> Arc<Attempt> {
        let id = attempt_id(claim.id, number);
        let mut attempts = self.attempts();
        if let Some(known) = attempts.get(&claim.id).filter(|known| known.claim.id == id) {
            return known.clone();
        }
        let own = Claim { id, ..claim.clone() };
        let attempt = Arc::new(Attempt::new(own, self.nodes.all.len()));
        // Those whose guards were detached, or forgotten, are never given back.
        if attempts.len() == attempts.capacity() {
            let now = self.clock.now();
            attempts.retain(|_, attempt| !attempt.is_expired(now));
        }
        attempts.insert(claim.id, attempt.clone());
        attempt
    }

    /// Asks one node for the lock.
    pub(super) fn ask(
        &self,
        attempt: &Arc<Attempt>,
        node: usize,
        floor: Token,
        wait: Wait,
    ) -> PendingAcquire {
        attempt.state().set(node, AtNode::Requested);
        let engine = self.nodes.all[node].engine.clone();
        let claim = attempt.with_floor(floor);
        Box::pin(async move { (node, engine.acquire(&claim, wait).await) })
    }

    /// What is answered only after the attempt was won is adopted.
    fn adopt_late_replies(self: &Arc<Self>, attempt: &Arc<Attempt>, mut pending: PendingAcquires) {
        if pending.is_empty() {
            return;
        }
        let (core, attempt) = (self.clone(), attempt.clone());
        let nodes = attempt.state().nodes_where(|at| *at == AtNode::Requested);
        let mut owed = Owed::new(self, &attempt, nodes, may_hold);
        self.nodes.beside_the_caller(async move {
            while let Some((node, answer)) = pending.next().await {
                core.on_late_reply(&attempt, node, answer).await;
                owed.settle(node);
            }
        });
    }

    /// The lease that was handed over at the entry may be a short first one.
    fn extend_first_lease(self: &Arc<Self>, attempt: &Arc<Attempt>, entry: usize) {
        let (core, attempt) = (self.clone(), attempt.clone());
        self.nodes.spawn(async move { core.renew_at(&attempt, entry).await });
    }

    async fn on_late_reply(
        self: &Arc<Self>,
        attempt: &Arc<Attempt>,
        node: usize,
        answer: Result<Option<Grant>>,
    ) {
        match &answer {
            Ok(_) => self.nodes.on_reply(node),
            Err(error) if error.is_retryable() => self.nodes.exclude(node),
            Err(_) => {}
        }
        let phase = {
            let mut state = attempt.state();
            if *state.at(node) != AtNode::Requested && *state.at(node) != AtNode::Unknown {
                return;
            }
            state.on_reply(node, &answer);
            state.phase()
        };
        match (phase, answer) {
            (AttemptPhase::Held(token), Ok(Some(grant))) => {
                self.raise_late(attempt, node, grant, token).await;
            }
            (AttemptPhase::Ended, Ok(Some(_)) | Err(_)) => self.release_at(attempt, node).await,
            _ => {}
        }
    }

    /// A node grants late what is held already: it is lifted to the token, so that the holder keeps
    /// all nodes and not just a quorum. A higher value stays as it is, and may not count.
    pub(super) async fn raise_late(
        self: &Arc<Self>,
        attempt: &Arc<Attempt>,
        node: usize,
        grant: Grant,
        token: Token,
    ) {
        if grant.token >= token {
            return;
        }
        let raised = self.nodes.all[node].engine.raise(&attempt.claim, &grant, token).await;
        let over = {
            let mut state = attempt.state();
            if state.phase() == AttemptPhase::Held(token) {
                let at = raised.map_or(AtNode::Unknown, AtNode::Granted);
                state.set(node, at);
            }
            state.phase() == AttemptPhase::Ended || *state.at(node) == AtNode::Unknown
        };
        if over {
            self.release_at(attempt, node).await;
        }
    }

    /// Ends an attempt that failed. What is there is given back before this returns, unless a node
    /// takes too long.
    async fn abandon(self: &Arc<Self>, attempt: &Arc<Attempt>, mut pending: PendingAcquires) {
        attempt.state().end();
        self.forget(attempt);
        let nodes = attempt.state().nodes_where(may_hold);
        let _owed = Owed::new(self, attempt, nodes, may_hold);
        let timeout = self.node_timeout(attempt.claim.ttl);
        // Mostly the last answers are about to come, and say that there is nothing to give back.
        let limit = self.clock.now() + timeout / 4;
        while let Some(Some((node, answer))) = self.clock.timeout_at(limit, pending.next()).await {
            attempt.state().on_reply(node, &answer);
        }
        drop(pending);
        let left = attempt.state().nodes_where(may_hold);
        let each = left.into_iter().map(|node| self.release_at(attempt, node));
        let all = futures_util::future::join_all(each);
        if self.clock.timeout_at(self.clock.now() + timeout, all).await.is_none() {
            let silent = attempt.state().nodes_where(may_hold);
            silent.into_iter().for_each(|node| self.nodes.exclude(node));
        }
    }
}

pub(super) type PendingAcquire = BoxFuture<'static, (usize, Result<Option<Grant>>)>;

/// Whether there may be something to give back.
fn may_hold(at: &AtNode) -> bool {
    !matches!(at, AtNode::Nothing | AtNode::Refused)
}

/// Half of it and up to half more, so that those who lost together do not meet again.
pub(super) fn with_jitter(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + rand::random::<f64>())
}
