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
use crate::engine::{Claim, Grant, Wait};
use crate::error::{Error, Result};
use crate::token::Token;

/// The pauses before nodes that another holds are asked again, while the door is ours.
const REFUSED_PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));
/// One that does not wait still lets whoever lost at the same time give back.
const MIN_RETRY: Duration = Duration::from_millis(5);

/// What came of an attempt.
pub(super) enum RoundOutcome {
    Won(Grant),
    /// Somebody else has it.
    Busy,
    Failed(Error),
}

/// An attempt under way.
pub(super) struct AttemptRound<'a> {
    core: &'a Arc<RedlockCore>,
    attempt: &'a Arc<Attempt>,
    wait: Wait,
    pub(super) pending: PendingAcquires,
    began: Moment,
    /// The node where everybody queues; the first if none is worth asking.
    pub(super) entry: usize,
    /// Why nodes did not answer, if one said so.
    first_error: Option<Error>,
    /// What those said who refuse this name, or this client, and will again.
    refusals: Vec<Error>,
}

impl<'a> AttemptRound<'a> {
    pub(super) fn new(core: &'a Arc<RedlockCore>, attempt: &'a Arc<Attempt>, wait: Wait) -> Self {
        let entry = core.nodes.entry_node().unwrap_or_default();
        {
            // What was asked for before this round, of a node that is left out now, is not waited
            // for.
            let mut state = attempt.state();
            let asked = state.nodes_where(|at| *at == AtNode::Requested);
            let out = asked.into_iter().filter(|node| !core.nodes.is_usable(*node));
            out.for_each(|node| state.set(node, AtNode::Unknown));
        }
        let (pending, began) = (PendingAcquires::new(), core.clock.now());
        Self { core, attempt, wait, pending, began, entry, first_error: None, refusals: Vec::new() }
    }

    /// All nodes at once, and nobody waits: one round trip, in the usual case.
    pub(super) async fn at_all_nodes(&mut self) -> RoundOutcome {
        let proposal = self.core.propose_token();
        self.ask(proposal, |_| true);
        self.decide(proposal, true).await
    }

    /// Asks those of the nodes that are worth it, of which nobody waits.
    fn ask(&mut self, floor: Token, which: impl Fn(usize) -> bool) {
        let nodes = self.core.nodes.usable();
        for node in nodes.into_iter().filter(|node| which(*node)) {
            self.pending.push(self.core.ask(self.attempt, node, floor, Wait::No));
        }
    }

    /// Whether a release of this client has taken it along to the entry, and nowhere else.
    pub(super) fn is_queued_at_entry_node(&self) -> bool {
        self.attempt.state().nodes_where(|at| *at != AtNode::Nothing) == [self.entry]
    }

    /// Waits at the entry; then takes the others, which nobody else asks for who came through it.
    pub(super) async fn via_entry_node(&mut self) -> RoundOutcome {
        let proposal = self.core.propose_token();
        let entry = self.entry;
        if !self.core.nodes.is_usable(entry) {
            return self.failure();
        }
        if !self.holds_entry_node() {
            let answer = match self.wait_at_entry_node(proposal).await {
                Some(answer) => answer,
                None => return self.around_entry_node(proposal).await,
            };
            self.on_reply(entry, answer);
        }
        let at = self.attempt.state().at(entry).clone();
        let lifted = match at {
            AtNode::Granted(grant) => grant.token,
            AtNode::Refused => return RoundOutcome::Busy,
            _ if !self.refusals.is_empty() => return self.around_entry_node(proposal).await,
            _ => return self.failure(),
        };
        self.began = self.core.clock.now();
        self.ask(lifted, |node| node != entry);
        self.decide(lifted, true).await
    }

    /// Whether a release of this client has got it the entry already.
    fn holds_entry_node(&self) -> bool {
        let now = self.core.clock.now();
        matches!(self.attempt.state().at(self.entry), AtNode::Granted(grant) if grant.valid_until > now)
    }

    /// What the entry answers in the end; nothing if something is stuck there.
    async fn wait_at_entry_node(&mut self, proposal: Token) -> Option<Result<Option<Grant>>> {
        let entry = self.entry;
        self.pending.push(self.core.ask(self.attempt, entry, proposal, self.wait));
        let mut look_elsewhere = self.began + self.attempt.claim.ttl;
        let mut stuck = None;
        let mut exclusions = self.core.nodes.all[entry].exclusions();
        let _watched = self.core.nodes.monitor(entry);
        loop {
            tokio::select! {
                biased;
                Some((_, answer)) = self.pending.next() => return Some(answer),
                () = exclusions.next() => {
                    self.pending.clear();
                    let what = "the node where it queued does not answer any more".to_owned();
                    return Some(Err(unreachable_error(what, true)));
                }
                () = self.core.clock.sleep_until(look_elsewhere) => {
                    let Claim { name, ttl, .. } = &self.attempt.claim;
                    let seen = self.core.stuck_holders(name, entry).await;
                    let before = std::mem::replace(&mut stuck, seen);
                    if stuck.is_some() && stuck == before {
                        return None;
                    }
                    // Or it is just being handed over: then the entry looks different soon.
                    let pause = if stuck.is_some() { self.core.quorum_timeout(*ttl) } else { *ttl };
                    look_elsewhere = self.core.clock.now() + pause;
                }
            }
        }
    }

    /// All but the entry, where nothing is to be left.
    async fn around_entry_node(&mut self, proposal: Token) -> RoundOutcome {
        let entry = self.entry;
        self.began = self.core.clock.now();
        self.pending.clear();
        self.attempt.state().set(entry, AtNode::Unknown);
        self.core.release_in_background(self.attempt, entry);
        self.ask(proposal, |node| node != entry);
        self.decide(proposal, false).await
    }

    /// Collects the answers until they are enough.
    async fn decide(&mut self, proposal: Token, respects_entry_node: bool) -> RoundOutcome {
        let core = self.core;
        let ttl = self.attempt.claim.ttl;
        let (mut asked, mut retry_until, mut silent_are_out) = (self.began, None, false);
        let (mut pause, mut ask_again) = (REFUSED_PAUSES.0, Moment::NEVER);
        loop {
            let (verdict, entry, answers) = {
                let state = self.attempt.state();
                let verdict = state.verdict(core.nodes.quorum);
                (verdict, state.at(self.entry).clone(), state.replies())
            };
            let now = core.clock.now();
            let enough = answers >= core.nodes.quorum;
            let limit =
                asked + if enough { core.node_timeout(ttl) } else { core.quorum_timeout(ttl) };
            let limit = match self.wait {
                Wait::Until(deadline) => limit.min(deadline.max(asked + core.node_timeout(ttl))),
                Wait::No | Wait::Forever => limit,
            };
            match verdict {
                Verdict::Won(_) if respects_entry_node && entry == AtNode::Refused => {
                    return RoundOutcome::Busy;
                }
                // Nobody gets past those who queue: the entry must have its say, in its time.
                Verdict::Won(_) if respects_entry_node && entry == AtNode::Requested => {}
                Verdict::Won(token) => return self.won(token),
                Verdict::Raise(_) if respects_entry_node && entry == AtNode::Refused => {
                    return RoundOutcome::Busy;
                }
                Verdict::Raise(token) => return self.raise(token).await,
                // Who has the entry waits for the others: they come free, and nobody else gets them.
                Verdict::Lost
                    if matches!(entry, AtNode::Granted(_)) && ask_again == Moment::NEVER =>
                {
                    let retry_until = *retry_until.get_or_insert_with(|| self.retry_until(now));
                    if now >= retry_until || !self.could_be_won() {
                        return self.failure();
                    }
                    ask_again = (now + with_jitter(pause)).min(retry_until);
                    pause = (pause * 2).min(REFUSED_PAUSES.1);
                }
                Verdict::Lost if ask_again == Moment::NEVER => return self.failure(),
                Verdict::Lost | Verdict::Open => {}
            }
            tokio::select! {
                // What was answered counts, although this client looks only after the time.
                biased;
                Some((node, answer)) = self.pending.next() => self.on_reply(node, answer),
                () = core.clock.sleep_until(limit), if !silent_are_out => {
                    silent_are_out = true;
                    self.exclude_silent();
                }
                () = core.clock.sleep_until(ask_again) => {
                    (asked, ask_again, silent_are_out) = (core.clock.now(), Moment::NEVER, false);
                    self.request_refused_again(proposal);
                }
            }
        }
    }

    fn on_reply(&mut self, node: usize, answer: Result<Option<Grant>>) {
        self.attempt.state().on_reply(node, &answer);
        if let Ok(Some(grant)) = &answer {
            // Else a node whose fence is ahead would stay ahead, and never count.
            self.core.observe_token(grant.token);
        }
        match answer {
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
        let busy = self.attempt.state().nodes_where(|at| *at == AtNode::Refused);
        self.ask(proposal, |node| busy.contains(&node));
    }

    /// Until when the others are asked again. The lease at the entry must last beyond it.
    fn retry_until(&self, now: Moment) -> Moment {
        let ttl = self.attempt.claim.ttl;
        match self.wait {
            Wait::No => {
                now + (now.saturating_duration_since(self.began) * 4).max(MIN_RETRY).min(ttl / 6)
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

    /// Whether enough nodes answer at all.
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
        let limit = self.core.clock.now() + self.core.quorum_timeout(self.attempt.claim.ttl);
        loop {
            let next = self.core.clock.timeout_at(limit, raises.next()).await;
            let Some((node, raised)) = next.flatten() else { break };
            // One that was not lifted is not ours by this token, whatever it was before.
            let at = raised.map_or(AtNode::Unknown, AtNode::Granted);
            self.attempt.state().set(node, at);
        }
        let owners = {
            let state = self.attempt.state();
            state.granted().filter(|(_, grant)| grant.token == token).count()
        };
        match owners >= self.core.nodes.quorum {
            true => self.won(token),
            false => self.failure(),
        }
    }

    fn won(&mut self, token: Token) -> RoundOutcome {
        let core = self.core;
        core.observe_token(token);
        let grant = self.attempt.grant(token, core.nodes.quorum);
        if grant.valid_until <= core.clock.now() {
            return RoundOutcome::Failed(unreachable_error(
                "the nodes answered too late".to_owned(),
                true,
            ));
        }
        if !self.attempt.state().hold(token) {
            let name = self.attempt.claim.name.clone();
            return RoundOutcome::Failed(Error::NotHeld { name });
        }
        RoundOutcome::Won(grant)
    }

    /// Busy, or too few answered.
    fn failure(&mut self) -> RoundOutcome {
        let (quorum, all) = (self.core.nodes.quorum, self.core.nodes.all.len());
        // Decided before all have answered, perhaps: one that says no can be enough.
        let answers = self.attempt.state().reachable();
        match self.first_error.take() {
            Some(error) if !matches!(error, Error::Unreachable { .. }) => {
                RoundOutcome::Failed(error)
            }
            _ if answers >= quorum => RoundOutcome::Busy,
            _ if self.refusals.len() > all - quorum => {
                RoundOutcome::Failed(self.refusals.swap_remove(0))
            }
            first_error => {
                let first_error = first_error.or_else(|| self.refusals.pop());
                RoundOutcome::Failed(self.core.nodes.too_few_replies(answers, first_error))
            }
        }
    }
}
