//! Acquiring: attempts, until one of them has a quorum or the time is over.

use std::sync::Arc;
use std::time::Duration;

use futures_core::future::BoxFuture;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::oneshot;

use super::RedlockCore;
use super::attempt::{AtNode, Attempt, AttemptPhase, attempt_id};
use super::release::CleanupGuard;
use super::round::{AttemptRound, RoundOutcome};
use crate::engine::common::backoff::Backoff;
use crate::engine::{Claim, Grant, Wait};
use crate::error::{Error, Result};
use crate::token::Token;

/// The first and the longest pause between attempts that failed.
const PAUSES: Backoff = Backoff::new(Duration::from_millis(5), Duration::from_millis(200));

/// A request for the lock at one node.
pub(super) type PendingAcquire = BoxFuture<'static, (usize, Result<Option<Grant>>)>;
/// The requests of an attempt that have no reply yet.
pub(super) type PendingAcquires = FuturesUnordered<PendingAcquire>;

/// A lock that was acquired, and the requests for it that have no reply yet.
struct Acquired {
    grant: Grant,
    attempt: Arc<Attempt>,
    pending: PendingAcquires,
}

impl RedlockCore {
    /// Acquires the lock, sends the grant, and goes on with the replies that come later. Ends early
    /// if the caller is gone: it then withdraws the claim.
    pub(super) async fn acquire(
        self: Arc<Self>,
        claim: Claim,
        wait: Wait,
        mut reply: oneshot::Sender<Result<Option<Grant>>>,
    ) {
        let acquired = tokio::select! {
            biased;
            acquired = self.run_attempts(&claim, wait) => acquired,
            () = reply.closed() => return,
        };
        // A grant that the caller no longer receives is withdrawn by it.
        let _ = match acquired {
            Err(error) => reply.send(Err(error)),
            Ok(None) => reply.send(Ok(None)),
            Ok(Some(Acquired { grant, attempt, pending })) => {
                let _cleanup = CleanupGuard::new(&self);
                let _ = reply.send(Ok(Some(grant)));
                return self.adopt_late_replies(&attempt, pending).await;
            }
        };
    }

    /// Makes attempts until one holds. Cancelled, it leaves the current attempt behind, which
    /// `withdraw` finds by its claim.
    async fn run_attempts(self: &Arc<Self>, claim: &Claim, wait: Wait) -> Result<Option<Acquired>> {
        let (first, held) = self.resume(claim)?;
        if held.is_some() {
            return Ok(held);
        }
        let started = self.clock.now();
        let deadline = wait.deadline().max(started + self.node_timeout(claim.ttl));
        let mut pauses = PAUSES;
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
                    if via_entry_node && !claim.fixed && attempt.has_first_lease_at(entry) {
                        self.extend_first_lease(&attempt, entry);
                    }
                    return Ok(Some(Acquired { grant, attempt, pending }));
                }
                RoundOutcome::Busy => {
                    self.abandon(&attempt, pending).await;
                    self.note_contention(claim);
                    if wait == Wait::No || self.clock.now() >= wait.deadline() {
                        return Ok(None);
                    }
                    // A claim that passed the entry node and still found the lock taken met a
                    // holder that came another way: it pauses. Any other queues at once.
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
            let until = self.clock.now() + with_jitter(pauses.next_pause());
            self.clock.sleep_until(until.min(deadline)).await;
        }
        // All attempt ids of the claim are used up. The caller repeats with a fresh claim.
        Err(Error::NotHeld { name: claim.name.clone() })
    }

    /// The number of the claim's next attempt, and the attempt if it holds already. An attempt that
    /// was interrupted is continued, so that it keeps its queue entry.
    fn resume(&self, claim: &Claim) -> Result<(u8, Option<Acquired>)> {
        if self.is_withdrawn(claim.id) {
            return Err(Error::NotHeld { name: claim.name.clone() });
        }
        let Some(attempt) = self.attempt_of(claim.id) else { return Ok((0, None)) };
        let phase = attempt.state().phase();
        let number = attempt.claim.id.to_bits() as u8;
        match phase {
            AttemptPhase::Held(token) => {
                let grant = attempt.grant(token, self.nodes.quorum);
                let pending = PendingAcquires::new();
                Ok((number, Some(Acquired { grant, attempt, pending })))
            }
            AttemptPhase::Open | AttemptPhase::Ended => Ok((number, None)),
        }
    }

    /// The claim's attempt with this number, which is made unless it is the current one.
    pub(super) fn begin_attempt(&self, claim: &Claim, number: u8) -> Arc<Attempt> {
        let id = attempt_id(claim.id, number);
        let mut attempts = self.attempts();
        if let Some(known) = attempts.get(&claim.id).filter(|known| known.claim.id == id) {
            return known.clone();
        }
        let own = Claim { id, ..claim.clone() };
        let attempt = Arc::new(Attempt::new(own, self.nodes.all.len()));
        // Attempts whose guards were detached or forgotten are never released.
        if attempts.len() == attempts.capacity() {
            let now = self.clock.now();
            attempts.retain(|_, attempt| !attempt.is_expired(now));
        }
        attempts.insert(claim.id, attempt.clone());
        attempt
    }

    /// Requests the lock from one node. Returns `None` if the attempt has ended meanwhile: a
    /// withdrawal would not know of this request.
    pub(super) fn request_at(
        &self,
        attempt: &Arc<Attempt>,
        node: usize,
        floor: Token,
        wait: Wait,
    ) -> Option<PendingAcquire> {
        {
            let mut state = attempt.state();
            if state.phase() != AttemptPhase::Open {
                return None;
            }
            state.set(node, AtNode::Requested);
        }
        let engine = self.nodes.all[node].engine.clone();
        let claim = attempt.with_floor(floor);
        Some(Box::pin(async move {
            let decided = engine.acquire(&claim, wait).await;
            (node, decided.and_then(|admission| admission.into_inner(&claim.name)))
        }))
    }

    /// Adopts grants that arrive after the attempt was won, or releases them if it has ended.
    async fn adopt_late_replies(
        self: &Arc<Self>,
        attempt: &Arc<Attempt>,
        mut pending: PendingAcquires,
    ) {
        while let Some((node, reply)) = pending.next().await {
            self.on_late_reply(attempt, node, reply).await;
        }
    }

    /// Renews at the entry node, which may have handed the lock over with a short first lease.
    fn extend_first_lease(self: &Arc<Self>, attempt: &Arc<Attempt>, entry: usize) {
        let (core, attempt) = (self.clone(), attempt.clone());
        self.nodes.spawn(async move { core.renew_at(&attempt, entry).await });
    }

    async fn on_late_reply(
        self: &Arc<Self>,
        attempt: &Arc<Attempt>,
        node: usize,
        reply: Result<Option<Grant>>,
    ) {
        match &reply {
            Ok(_) => self.nodes.on_reply(node),
            Err(error) if error.is_retryable() => self.nodes.exclude(node),
            Err(_) => {}
        }
        let phase = {
            let mut state = attempt.state();
            if *state.at(node) != AtNode::Requested && *state.at(node) != AtNode::Unknown {
                return;
            }
            state.on_reply(node, &reply);
            state.phase()
        };
        match (phase, reply) {
            (AttemptPhase::Held(token), Ok(Some(grant))) => {
                self.raise_late(attempt, node, grant, token).await;
            }
            // In the background: the replies of other nodes must not wait for it.
            (AttemptPhase::Ended, Ok(Some(_)) | Err(_)) => {
                self.release_in_background(attempt, node);
            }
            _ => {}
        }
    }

    /// Lifts a late grant to the token, so that the holder has all nodes and not just a quorum. A
    /// greater value stays as it is, and may not count.
    async fn raise_late(
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
        let must_release = {
            let mut state = attempt.state();
            if state.phase() == AttemptPhase::Held(token) {
                let at = raised.map_or(AtNode::Unknown, AtNode::Granted);
                state.set(node, at);
            }
            state.phase() == AttemptPhase::Ended || *state.at(node) == AtNode::Unknown
        };
        if must_release {
            self.release_in_background(attempt, node);
        }
    }

    /// Ends an attempt that failed, and releases what it got. Returns when that is done, or when a
    /// node takes too long. The cleanup goes on if this future is dropped.
    async fn abandon(self: &Arc<Self>, attempt: &Arc<Attempt>, pending: PendingAcquires) {
        attempt.state().end();
        self.forget(attempt);
        let (core, attempt) = (self.clone(), attempt.clone());
        let cleanup = self.nodes.spawn(async move { core.clean_up(&attempt, pending).await });
        // It fails only if the runtime ends.
        let _ = cleanup.await;
    }

    async fn clean_up(self: &Arc<Self>, attempt: &Arc<Attempt>, mut pending: PendingAcquires) {
        let _cleanup = CleanupGuard::new(self);
        let timeout = self.node_timeout(attempt.claim.ttl);
        // Usually the last replies are about to arrive, and say that there is nothing to release.
        let limit = self.clock.now() + timeout / 4;
        while let Some(Some((node, reply))) = self.clock.timeout_at(limit, pending.next()).await {
            attempt.state().on_reply(node, &reply);
        }
        drop(pending);
        let left = attempt.state().nodes_where(may_hold);
        let releases = left.into_iter().map(|node| self.release_in_background(attempt, node));
        let releases = futures_util::future::join_all(releases);
        if self.clock.timeout_at(self.clock.now() + timeout, releases).await.is_none() {
            let silent = attempt.state().nodes_where(may_hold);
            silent.into_iter().for_each(|node| self.nodes.exclude(node));
        }
    }
}

/// Whether there may be something to release.
fn may_hold(at: &AtNode) -> bool {
    !matches!(at, AtNode::Nothing | AtNode::Refused)
}

/// Between half of `pause` and one and a half, so that attempts that lost together do not collide
/// again.
pub(super) fn with_jitter(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + rand::random::<f64>())
}
