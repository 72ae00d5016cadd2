//! One attempt: requests to the nodes, until their replies decide it.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::RedlockCore;
use super::acquire::{PendingAcquires, with_jitter};
use super::attempt::{AtNode, Attempt, Verdict};
use super::nodes::unreachable_error;
use crate::clock::Moment;
use crate::engine::common::backoff::Backoff;
use crate::engine::{Claim, Grant, Wait};
use crate::error::{Error, Result};
use crate::token::Token;

/// The first and the longest pause before nodes that refused are asked again by an attempt that
/// holds the entry node.
const REFUSED_PAUSES: Backoff = Backoff::new(Duration::from_millis(1), Duration::from_millis(20));
/// How long an attempt that does not wait gives others, which lost at the same time, to release.
const MIN_RETRY: Duration = Duration::from_millis(5);

/// The outcome of an attempt.
pub(super) enum RoundOutcome {
    Won(Grant),
    /// Another claim holds the lock.
    Busy,
    Failed(Error),
}

/// An attempt and its requests.
pub(super) struct AttemptRound<'a> {
    core: &'a Arc<RedlockCore>,
    attempt: &'a Arc<Attempt>,
    wait: Wait,
    pub(super) pending: PendingAcquires,
    started: Moment,
    /// The entry node; the first node if none is usable.
    pub(super) entry: usize,
    /// Why nodes did not reply: the first error.
    first_error: Option<Error>,
    /// The errors of nodes that reject this name, or this client, and will reject it again.
    refusals: Vec<Error>,
}

impl<'a> AttemptRound<'a> {
    pub(super) fn new(core: &'a Arc<RedlockCore>, attempt: &'a Arc<Attempt>, wait: Wait) -> Self {
        let entry = core.nodes.entry_node().unwrap_or_default();
        {
            // Earlier requests to nodes that are excluded by now are not waited for.
            let mut state = attempt.state();
            let requested = state.nodes_where(|at| *at == AtNode::Requested);
            let excluded = requested.into_iter().filter(|node| !core.nodes.is_usable(*node));
            excluded.for_each(|node| state.set(node, AtNode::Unknown));
        }
        let (pending, started) = (PendingAcquires::new(), core.clock.now());
        let (first_error, refusals) = (None, Vec::new());
        Self { core, attempt, wait, pending, started, entry, first_error, refusals }
    }

    /// Asks all nodes at once, without waiting in a queue: usually one round trip.
    pub(super) async fn at_all_nodes(&mut self) -> RoundOutcome {
        let proposal = self.core.propose_token();
        self.request_where(proposal, |_| true);
        self.decide(proposal, true).await
    }

    /// Sends requests that do not wait to usable nodes.
    fn request_where(&mut self, floor: Token, is_asked: impl Fn(usize) -> bool) {
        let nodes = self.core.nodes.usable();
        for node in nodes.into_iter().filter(|node| is_asked(*node)) {
            self.pending.extend(self.core.request_at(self.attempt, node, floor, Wait::No));
        }
    }

    /// Whether a release of this client has enqueued the claim at the entry node, and nowhere else.
    pub(super) fn is_queued_at_entry_node(&self) -> bool {
        self.attempt.state().nodes_where(|at| *at != AtNode::Nothing) == [self.entry]
    }

    /// Queues at the entry node. Once granted there, it asks the others, for which no other claim
    /// that queued competes.
    pub(super) async fn via_entry_node(&mut self) -> RoundOutcome {
        let proposal = self.core.propose_token();
        let entry = self.entry;
        if !self.core.nodes.is_usable(entry) {
            return self.failure();
        }
        if !self.holds_entry_node() {
            let reply = match self.wait_at_entry_node(proposal).await {
                Some(reply) => reply,
                None => return self.around_entry_node(proposal).await,
            };
            self.on_reply(entry, reply);
        }
        let at = self.attempt.state().at(entry).clone();
        let floor = match at {
            AtNode::Granted(grant) => grant.token,
            AtNode::Refused => return RoundOutcome::Busy,
            _ if !self.refusals.is_empty() => return self.around_entry_node(proposal).await,
            _ => return self.failure(),
        };
        self.started = self.core.clock.now();
        self.request_where(floor, |node| node != entry);
        self.decide(floor, true).await
    }

    /// Whether a release of this client has got it the entry node already.
    fn holds_entry_node(&self) -> bool {
        let now = self.core.clock.now();
        let state = self.attempt.state();
        matches!(state.at(self.entry), AtNode::Granted(grant) if grant.valid_until > now)
    }

    /// The reply of the entry node; `None` if something is stuck there.
    async fn wait_at_entry_node(&mut self, proposal: Token) -> Option<Result<Option<Grant>>> {
        let entry = self.entry;
        match self.core.request_at(self.attempt, entry, proposal, self.wait) {
            Some(request) => self.pending.push(request),
            None => {
                let name = self.attempt.claim.name.clone();
                return Some(Err(Error::NotHeld { name }));
            }
        }
        let mut check_others_at = self.started + self.attempt.claim.ttl;
        let mut stuck = None;
        let mut exclusions = self.core.nodes.all[entry].exclusions();
        let _monitored = self.core.nodes.monitor(entry);
        loop {
            tokio::select! {
                biased;
                Some((_, reply)) = self.pending.next() => return Some(reply),
                () = exclusions.next() => {
                    self.pending.clear();
                    let what = "the node where it queued does not answer any more".to_owned();
                    return Some(Err(unreachable_error(what, true)));
                }
                () = self.core.clock.sleep_until(check_others_at) => {
                    let Claim { name, ttl, .. } = &self.attempt.claim;
                    let seen = self.core.stuck_holders(name, entry).await;
                    let before = std::mem::replace(&mut stuck, seen);
                    if stuck.is_some() && stuck == before {
                        return None;
                    }
                    // It may just be handed over: then the entry node shows another holder soon.
                    let pause = if stuck.is_some() { self.core.quorum_timeout(*ttl) } else { *ttl };
                    check_others_at = self.core.clock.now() + pause;
                }
            }
        }
    }

    /// Asks all nodes but the entry node, where nothing is to be left.
    async fn around_entry_node(&mut self, proposal: Token) -> RoundOutcome {
        let entry = self.entry;
        self.started = self.core.clock.now();
        self.pending.clear();
        self.attempt.state().set(entry, AtNode::Unknown);
        self.core.release_in_background(self.attempt, entry);
        self.request_where(proposal, |node| node != entry);
        self.decide(proposal, false).await
    }

    /// Collects replies until they decide the attempt.
    async fn decide(&mut self, proposal: Token, respects_entry_node: bool) -> RoundOutcome {
        let core = self.core;
        let ttl = self.attempt.claim.ttl;
        let (mut asked, mut retry_until, mut silent_excluded) = (self.started, None, false);
        let (mut pauses, mut ask_again) = (REFUSED_PAUSES, Moment::NEVER);
        loop {
            let (verdict, entry, replies) = {
                let state = self.attempt.state();
                let verdict = state.verdict(core.nodes.quorum);
                (verdict, state.at(self.entry).clone(), state.replies())
            };
            let entry_refused = respects_entry_node && entry == AtNode::Refused;
            let now = core.clock.now();
            let limit = asked
                + match replies >= core.nodes.quorum {
                    true => core.node_timeout(ttl),
                    false => core.quorum_timeout(ttl),
                };
            let limit = match self.wait {
                Wait::Until(deadline) => limit.min(deadline.max(asked + core.node_timeout(ttl))),
                Wait::No | Wait::Forever => limit,
            };
            match verdict {
                Verdict::Won(_) | Verdict::Raise(_) if entry_refused => return RoundOutcome::Busy,
                // No claim overtakes those that queue: the entry node must reply, within its time.
                Verdict::Won(_) if respects_entry_node && entry == AtNode::Requested => {}
                Verdict::Won(token) => return self.won(token),
                Verdict::Raise(token) => return self.raise(token).await,
                // With the entry node held, the others become free and no other claim gets them.
                Verdict::Lost
                    if matches!(entry, AtNode::Granted(_)) && ask_again == Moment::NEVER =>
                {
                    let retry_until = *retry_until.get_or_insert_with(|| self.retry_until(now));
                    if now >= retry_until || !self.could_be_won() {
                        return self.failure();
                    }
                    ask_again = (now + with_jitter(pauses.next_pause())).min(retry_until);
                }
                Verdict::Lost if ask_again == Moment::NEVER => return self.failure(),
                Verdict::Lost | Verdict::Open => {}
            }
            tokio::select! {
                // A reply that has arrived counts, even if it is read after the limit.
                biased;
                Some((node, reply)) = self.pending.next() => self.on_reply(node, reply),
                () = core.clock.sleep_until(limit), if !silent_excluded => {
                    silent_excluded = true;
                    self.exclude_silent();
                }
                () = core.clock.sleep_until(ask_again) => {
                    (asked, ask_again, silent_excluded) = (core.clock.now(), Moment::NEVER, false);
                    self.request_refused_again(proposal);
                }
            }
        }
    }

    fn on_reply(&mut self, node: usize, reply: Result<Option<Grant>>) {
        self.attempt.state().on_reply(node, &reply);
        if let Ok(Some(grant)) = &reply {
            // Otherwise a node whose fence is ahead would stay ahead, and never count.
            self.core.observe_token(grant.token);
        }
        match reply {
            Ok(_) => self.core.nodes.on_reply(node),
            Err(error @ Error::Unreachable { retryable: false, .. }) => self.refusals.push(error),
            Err(error) => {
                if error.is_retryable() {
                    self.core.nodes.exclude(node);
                }
                self.first_error.get_or_insert(error);
            }
        }
    }

    fn exclude_silent(&mut self) {
        let silent = self.attempt.state().nodes_where(|at| *at == AtNode::Requested);
        for node in silent {
            self.attempt.state().set(node, AtNode::Unknown);
            self.core.nodes.exclude(node);
        }
    }

    fn request_refused_again(&mut self, proposal: Token) {
        let refused = self.attempt.state().nodes_where(|at| *at == AtNode::Refused);
        self.request_where(proposal, |node| refused.contains(&node));
    }

    /// Until when nodes that refused are asked again. The lease at the entry node must last longer.
    fn retry_until(&self, now: Moment) -> Moment {
        let ttl = self.attempt.claim.ttl;
        match self.wait {
            Wait::No => {
                let so_far = now.saturating_duration_since(self.started);
                now + (so_far * 4).max(MIN_RETRY).min(ttl / 6)
            }
            wait => {
                let entry_lease_end = match self.attempt.state().at(self.entry) {
                    AtNode::Granted(grant) => grant.valid_until,
                    _ => Moment::NEVER,
                };
                wait.deadline().min(now + ttl / 3).min(entry_lease_end)
            }
        }
    }

    /// Whether enough nodes reply at all.
    fn could_be_won(&self) -> bool {
        self.first_error.as_ref().is_none_or(Error::is_retryable)
            && self.attempt.state().reachable() >= self.core.nodes.quorum
    }

    /// The second round: the values differ, so all are lifted to the greatest.
    async fn raise(&mut self, token: Token) -> RoundOutcome {
        let lower: Vec<(usize, Grant)> = {
            let state = self.attempt.state();
            let lower = state.granted().filter(|(_, grant)| grant.token < token);
            lower.map(|(node, grant)| (node, grant.clone())).collect()
        };
        let (core, attempt) = (self.core, self.attempt);
        let mut raises: FuturesUnordered<_> = lower
            .into_iter()
            .map(|(node, grant)| async move {
                (node, core.nodes.all[node].engine.raise(&attempt.claim, &grant, token).await)
            })
            .collect();
        let limit = core.clock.now() + core.quorum_timeout(attempt.claim.ttl);
        loop {
            let next = core.clock.timeout_at(limit, raises.next()).await;
            let Some((node, raised)) = next.flatten() else { break };
            // A node that was not lifted does not hold by this token, whatever it held by before.
            let at = raised.map_or(AtNode::Unknown, AtNode::Granted);
            attempt.state().set(node, at);
        }
        let owners = {
            let state = attempt.state();
            state.granted().filter(|(_, grant)| grant.token == token).count()
        };
        match owners >= core.nodes.quorum {
            true => self.won(token),
            false => self.failure(),
        }
    }

    fn won(&mut self, token: Token) -> RoundOutcome {
        let core = self.core;
        core.observe_token(token);
        let grant = self.attempt.grant(token, core.nodes.quorum);
        if grant.valid_until <= core.clock.now() {
            let what = "the nodes answered too late".to_owned();
            return RoundOutcome::Failed(unreachable_error(what, true));
        }
        if !self.attempt.state().hold(token) {
            let name = self.attempt.claim.name.clone();
            return RoundOutcome::Failed(Error::NotHeld { name });
        }
        RoundOutcome::Won(grant)
    }

    /// Busy, or too few replies.
    fn failure(&mut self) -> RoundOutcome {
        let (quorum, all) = (self.core.nodes.quorum, self.core.nodes.all.len());
        // It may be decided before all have replied: one refusal can be enough.
        let reachable = self.attempt.state().reachable();
        match self.first_error.take() {
            Some(error) if !matches!(error, Error::Unreachable { .. }) => {
                RoundOutcome::Failed(error)
            }
            _ if reachable >= quorum => RoundOutcome::Busy,
            _ if self.refusals.len() > all - quorum => {
                RoundOutcome::Failed(self.refusals.swap_remove(0))
            }
            error => {
                let error = error.or_else(|| self.refusals.pop());
                RoundOutcome::Failed(self.core.nodes.too_few_replies(reachable, error))
            }
        }
    }
}
