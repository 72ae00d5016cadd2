//! The way of one claim: attempts, until one of them has a quorum or the time is over.

use std::sync::Arc;
use std::time::Duration;

use futures_core::future::BoxFuture;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::Core;
use super::attempt::{At, Attempt, Fate, Verdict, numbered};
use super::keeping::Owed;
use super::nodes::failed;
use crate::clock::Moment;
use crate::engine::{Claim, Grant, Wait};
use crate::error::{Error, Result};
use crate::token::Token;

/// The pauses before nodes that another holds are asked again, while the door is ours.
const BUSY_PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));
/// The pauses between attempts that failed.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(200));
/// One that does not wait still lets whoever lost at the same time give back.
const LEAST_PATIENCE: Duration = Duration::from_millis(5);

/// Requests under way, and what they are answered.
type Errands = FuturesUnordered<BoxFuture<'static, (usize, Result<Option<Grant>>)>>;

/// What came of an attempt.
enum Outcome {
    Won(Grant),
    /// Somebody else has it.
    Busy,
    Failed(Error),
}

impl Core {
    pub(super) async fn acquire(
        self: &Arc<Self>,
        claim: &Claim,
        wait: Wait,
    ) -> Result<Option<Grant>> {
        self.check(claim)?;
        let (first, grant) = self.known(claim)?;
        if grant.is_some() {
            return Ok(grant);
        }
        let began = self.clock.now();
        let deadline = wait.deadline().max(began + self.node_timeout(claim.ttl));
        let mut pause = PAUSES.0;
        for number in first..=u8::MAX {
            let attempt = self.begin(claim, number);
            if self.is_withdrawn(claim.id) {
                self.forget(&attempt);
                return Err(Error::NotHeld { name: claim.name.clone() });
            }
            let mut round = Round::new(self, &attempt, wait);
            let through_the_door =
                wait != Wait::No && (self.is_crowded(claim) || round.stands_at_the_door());
            let outcome = match through_the_door {
                true => Box::pin(round.through_the_door()).await,
                false => round.everywhere().await,
            };
            let (errands, round_door) = (std::mem::take(&mut round.errands), round.door);
            match outcome {
                Outcome::Won(grant) => {
                    self.look_after_the_late(&attempt, errands);
                    if through_the_door && !claim.fixed && attempt.is_short_at(round_door) {
                        self.make_whole(&attempt, round_door);
                    }
                    return Ok(Some(grant));
                }
                Outcome::Busy => {
                    self.give_up(&attempt, errands).await;
                    self.crowded(claim);
                    if wait == Wait::No || self.clock.now() >= wait.deadline() {
                        return Ok(None);
                    }
                    // Whoever comes through the door and still finds it busy has met somebody who
                    // came another way.
                    if !through_the_door {
                        continue;
                    }
                }
                Outcome::Failed(error) => {
                    self.give_up(&attempt, errands).await;
                    if !error.is_retryable() || self.clock.now() >= deadline {
                        return Err(error);
                    }
                }
            }
            let until = self.clock.now() + jittered(pause);
            self.clock.sleep_until(until.min(deadline)).await;
            pause = (pause * 2).min(PAUSES.1);
        }
        // All its ids are used up: the caller comes with a fresh claim.
        Err(Error::NotHeld { name: claim.name.clone() })
    }

    /// Which attempt of a claim is next, and its grant if it is held already. One that was
    /// interrupted goes on where it was: it keeps its place in the queue.
    fn known(&self, claim: &Claim) -> Result<(u8, Option<Grant>)> {
        if self.is_withdrawn(claim.id) {
            return Err(Error::NotHeld { name: claim.name.clone() });
        }
        let Some(attempt) = self.attempt_of(claim.id) else { return Ok((0, None)) };
        let fate = attempt.state().fate();
        let number = attempt.claim.id.to_bits() as u8;
        match fate {
            Fate::Held(token) => Ok((number, Some(attempt.grant(token, self.nodes.quorum)))),
            Fate::Open | Fate::Over => Ok((number, None)),
        }
    }

    pub(super) fn begin(&self, claim: &Claim, number: u8) -> Arc<Attempt> {
        let id = numbered(claim.id, number);
        let mut attempts = self.attempts();
        if let Some(known) = attempts.get(&claim.id).filter(|known| known.claim.id == id) {
            return known.clone();
        }
        let own = Claim { id, ..claim.clone() };
        let attempt = Arc::new(Attempt::new(own, self.nodes.all.len()));
        // Those whose guards were detached, or forgotten, are never given back.
        if attempts.len() == attempts.capacity() {
            let now = self.clock.now();
            attempts.retain(|_, attempt| !attempt.is_long_over(now));
        }
        attempts.insert(claim.id, attempt.clone());
        attempt
    }

    /// Asks one node for the lock.
    fn ask(&self, attempt: &Arc<Attempt>, node: usize, floor: Token, wait: Wait) -> Errand {
        attempt.state().set(node, At::Asked);
        let engine = self.nodes.all[node].engine.clone();
        let claim = attempt.proposing(floor);
        Box::pin(async move {
            let decided = engine.acquire(&claim, wait).await;
            (node, decided.and_then(|admission| admission.into_inner(&claim.name)))
        })
    }

    /// What is answered only after the attempt was won is adopted.
    fn look_after_the_late(self: &Arc<Self>, attempt: &Arc<Attempt>, mut errands: Errands) {
        if errands.is_empty() {
            return;
        }
        let (core, attempt) = (self.clone(), attempt.clone());
        let nodes = attempt.state().those(|at| *at == At::Asked);
        let mut owed = Owed::new(self, &attempt, nodes, is_something);
        self.nodes.beside_the_caller(async move {
            while let Some((node, answer)) = errands.next().await {
                core.note_late(&attempt, node, answer).await;
                owed.settle(node);
            }
        });
    }

    /// The lease that was handed over at the door may be a short first one.
    fn make_whole(self: &Arc<Self>, attempt: &Arc<Attempt>, door: usize) {
        let (core, attempt) = (self.clone(), attempt.clone());
        self.nodes.in_background(async move { core.renew_at(&attempt, door).await });
    }

    async fn note_late(
        self: &Arc<Self>,
        attempt: &Arc<Attempt>,
        node: usize,
        answer: Result<Option<Grant>>,
    ) {
        match &answer {
            Ok(_) => self.nodes.answered(node),
            Err(error) if error.is_retryable() => self.nodes.leave_out(node),
            Err(_) => {}
        }
        let fate = {
            let mut state = attempt.state();
            if *state.at(node) != At::Asked && *state.at(node) != At::Unknown {
                return;
            }
            state.answered(node, &answer);
            state.fate()
        };
        match (fate, answer) {
            (Fate::Held(token), Ok(Some(grant))) => {
                self.raise_late(attempt, node, grant, token).await;
            }
            (Fate::Over, Ok(Some(_)) | Err(_)) => self.take_back(attempt, node).await,
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
            if state.fate() == Fate::Held(token) {
                let at = raised.map_or(At::Unknown, At::Granted);
                state.set(node, at);
            }
            state.fate() == Fate::Over || *state.at(node) == At::Unknown
        };
        if over {
            self.take_back(attempt, node).await;
        }
    }

    /// Ends an attempt that failed. What is there is given back before this returns, unless a node
    /// takes too long.
    async fn give_up(self: &Arc<Self>, attempt: &Arc<Attempt>, mut errands: Errands) {
        attempt.state().end();
        self.forget(attempt);
        let nodes = attempt.state().those(is_something);
        let _owed = Owed::new(self, attempt, nodes, is_something);
        let timeout = self.node_timeout(attempt.claim.ttl);
        // Mostly the last answers are about to come, and say that there is nothing to give back.
        let limit = self.clock.now() + timeout / 4;
        while let Some(Some((node, answer))) = self.clock.timeout_at(limit, errands.next()).await {
            attempt.state().answered(node, &answer);
        }
        drop(errands);
        let left = attempt.state().those(is_something);
        let each = left.into_iter().map(|node| self.take_back(attempt, node));
        let all = futures_util::future::join_all(each);
        if self.clock.timeout_at(self.clock.now() + timeout, all).await.is_none() {
            let silent = attempt.state().those(is_something);
            silent.into_iter().for_each(|node| self.nodes.leave_out(node));
        }
    }
}

type Errand = BoxFuture<'static, (usize, Result<Option<Grant>>)>;

/// An attempt under way.
struct Round<'a> {
    core: &'a Arc<Core>,
    attempt: &'a Arc<Attempt>,
    wait: Wait,
    errands: Errands,
    began: Moment,
    /// The node where everybody queues; the first if none is worth asking.
    door: usize,
    /// Why nodes did not answer, if one said so.
    trouble: Option<Error>,
    /// What those said who refuse this name, or this client, and will again.
    refusals: Vec<Error>,
}

impl<'a> Round<'a> {
    fn new(core: &'a Arc<Core>, attempt: &'a Arc<Attempt>, wait: Wait) -> Self {
        let door = core.nodes.door().unwrap_or_default();
        {
            // What was asked for before this round, of a node that is left out now, is not waited
            // for.
            let mut state = attempt.state();
            let asked = state.those(|at| *at == At::Asked);
            let out = asked.into_iter().filter(|node| !core.nodes.is_worth_asking(*node));
            out.for_each(|node| state.set(node, At::Unknown));
        }
        let (errands, began) = (Errands::new(), core.clock.now());
        Self { core, attempt, wait, errands, began, door, trouble: None, refusals: Vec::new() }
    }

    /// All nodes at once, and nobody waits: one round trip, in the usual case.
    async fn everywhere(&mut self) -> Outcome {
        let proposal = self.core.propose();
        self.ask(proposal, |_| true);
        self.decide(proposal, true).await
    }

    /// Asks those of the nodes that are worth it, of which nobody waits.
    fn ask(&mut self, floor: Token, which: impl Fn(usize) -> bool) {
        let nodes = self.core.nodes.worth_asking();
        for node in nodes.into_iter().filter(|node| which(*node)) {
            self.errands.push(self.core.ask(self.attempt, node, floor, Wait::No));
        }
    }

    /// Whether a release of this client has taken it along to the door, and nowhere else.
    fn stands_at_the_door(&self) -> bool {
        self.attempt.state().those(|at| *at != At::Nothing) == [self.door]
    }

    /// Waits at the door; then takes the others, which nobody else asks for who came through it.
    async fn through_the_door(&mut self) -> Outcome {
        let proposal = self.core.propose();
        let door = self.door;
        if !self.core.nodes.is_worth_asking(door) {
            return self.lost();
        }
        if !self.is_let_in() {
            let answer = match self.at_the_door(proposal).await {
                Some(answer) => answer,
                None => return self.past_the_door(proposal).await,
            };
            self.note(door, answer);
        }
        let at = self.attempt.state().at(door).clone();
        let lifted = match at {
            At::Granted(grant) => grant.token,
            At::Refused => return Outcome::Busy,
            _ if !self.refusals.is_empty() => return self.past_the_door(proposal).await,
            _ => return self.lost(),
        };
        self.began = self.core.clock.now();
        self.ask(lifted, |node| node != door);
        self.decide(lifted, true).await
    }

    /// Whether a release of this client has got it the door already.
    fn is_let_in(&self) -> bool {
        let now = self.core.clock.now();
        matches!(self.attempt.state().at(self.door), At::Granted(grant) if grant.valid_until > now)
    }

    /// What the door answers in the end; nothing if something is stuck there.
    async fn at_the_door(&mut self, proposal: Token) -> Option<Result<Option<Grant>>> {
        let door = self.door;
        self.errands.push(self.core.ask(self.attempt, door, proposal, self.wait));
        let mut look_elsewhere = self.began + self.attempt.claim.ttl;
        let mut stuck = None;
        let mut leavings = self.core.nodes.all[door].leavings();
        let _watched = self.core.nodes.watch_over(door);
        loop {
            tokio::select! {
                biased;
                Some((_, answer)) = self.errands.next() => return Some(answer),
                () = leavings.next() => {
                    self.errands.clear();
                    let what = "the node where it queued does not answer any more".to_owned();
                    return Some(Err(failed(what, true)));
                }
                () = self.core.clock.sleep_until(look_elsewhere) => {
                    let Claim { name, ttl, .. } = &self.attempt.claim;
                    let seen = self.core.stuck_at(name, door).await;
                    let before = std::mem::replace(&mut stuck, seen);
                    if stuck.is_some() && stuck == before {
                        return None;
                    }
                    // Or it is just being handed over: then the door looks different soon.
                    let pause = if stuck.is_some() { self.core.patience(*ttl) } else { *ttl };
                    look_elsewhere = self.core.clock.now() + pause;
                }
            }
        }
    }

    /// All but the door, where nothing is to be left.
    async fn past_the_door(&mut self, proposal: Token) -> Outcome {
        let door = self.door;
        self.began = self.core.clock.now();
        self.errands.clear();
        self.attempt.state().set(door, At::Unknown);
        self.core.take_back_later(self.attempt, door);
        self.ask(proposal, |node| node != door);
        self.decide(proposal, false).await
    }

    /// Collects the answers until they are enough.
    async fn decide(&mut self, proposal: Token, minds_the_door: bool) -> Outcome {
        let core = self.core;
        let ttl = self.attempt.claim.ttl;
        let (mut asked, mut patience, mut silent_are_out) = (self.began, None, false);
        let (mut pause, mut ask_again) = (BUSY_PAUSES.0, Moment::NEVER);
        loop {
            let (verdict, door, answers) = {
                let state = self.attempt.state();
                let verdict = state.verdict(core.nodes.quorum);
                (verdict, state.at(self.door).clone(), state.answers())
            };
            let now = core.clock.now();
            let enough = answers >= core.nodes.quorum;
            let limit = asked + if enough { core.node_timeout(ttl) } else { core.patience(ttl) };
            let limit = match self.wait {
                Wait::Until(deadline) => limit.min(deadline.max(asked + core.node_timeout(ttl))),
                Wait::No | Wait::Forever => limit,
            };
            match verdict {
                Verdict::Won(_) if minds_the_door && door == At::Refused => return Outcome::Busy,
                // Nobody gets past those who queue: the door must have its say, in its time.
                Verdict::Won(_) if minds_the_door && door == At::Asked => {}
                Verdict::Won(token) => return self.won(token),
                Verdict::Raise(_) if minds_the_door && door == At::Refused => return Outcome::Busy,
                Verdict::Raise(token) => return self.raise(token).await,
                // Who has the door waits for the others: they come free, and nobody else gets them.
                Verdict::Lost if matches!(door, At::Granted(_)) && ask_again == Moment::NEVER => {
                    let patience = *patience.get_or_insert_with(|| self.patience(now));
                    if now >= patience || !self.could_be_won() {
                        return self.lost();
                    }
                    ask_again = (now + jittered(pause)).min(patience);
                    pause = (pause * 2).min(BUSY_PAUSES.1);
                }
                Verdict::Lost if ask_again == Moment::NEVER => return self.lost(),
                Verdict::Lost | Verdict::Open => {}
            }
            tokio::select! {
                // What was answered counts, although this client looks only after the time.
                biased;
                Some((node, answer)) = self.errands.next() => self.note(node, answer),
                () = core.clock.sleep_until(limit), if !silent_are_out => {
                    silent_are_out = true;
                    self.leave_out_the_silent();
                }
                () = core.clock.sleep_until(ask_again) => {
                    (asked, ask_again, silent_are_out) = (core.clock.now(), Moment::NEVER, false);
                    self.ask_the_busy_again(proposal);
                }
            }
        }
    }

    fn note(&mut self, node: usize, answer: Result<Option<Grant>>) {
        self.attempt.state().answered(node, &answer);
        if let Ok(Some(grant)) = &answer {
            // Else a node whose fence is ahead would stay ahead, and never count.
            self.core.saw(grant.token);
        }
        match answer {
            Ok(_) => self.core.nodes.answered(node),
            Err(error @ Error::Unreachable { retryable: false, .. }) => self.refusals.push(error),
            Err(error) => {
                if error.is_retryable() {
                    self.core.nodes.leave_out(node);
                }
                self.trouble.get_or_insert(error);
            }
        }
    }

    fn leave_out_the_silent(&mut self) {
        let silent = self.attempt.state().those(|at| *at == At::Asked);
        for node in silent {
            self.attempt.state().set(node, At::Unknown);
            self.core.nodes.leave_out(node);
        }
    }

    fn ask_the_busy_again(&mut self, proposal: Token) {
        let busy = self.attempt.state().those(|at| *at == At::Refused);
        self.ask(proposal, |node| busy.contains(&node));
    }

    /// Until when the others are asked again. The lease at the door must last beyond it.
    fn patience(&self, now: Moment) -> Moment {
        let ttl = self.attempt.claim.ttl;
        match self.wait {
            Wait::No => {
                now + (now.saturating_duration_since(self.began) * 4)
                    .max(LEAST_PATIENCE)
                    .min(ttl / 6)
            }
            wait => {
                let at_the_door = match self.attempt.state().at(self.door) {
                    At::Granted(grant) => grant.valid_until,
                    _ => Moment::NEVER,
                };
                wait.deadline().min(now + ttl / 3).min(at_the_door)
            }
        }
    }

    /// Whether enough nodes answer at all.
    fn could_be_won(&self) -> bool {
        self.trouble.as_ref().is_none_or(Error::is_retryable)
            && self.attempt.state().reachable() >= self.core.nodes.quorum
    }

    /// The second round: the values differ, so all are lifted to the greatest.
    async fn raise(&mut self, token: Token) -> Outcome {
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
        let limit = self.core.clock.now() + self.core.patience(self.attempt.claim.ttl);
        loop {
            let next = self.core.clock.timeout_at(limit, raises.next()).await;
            let Some((node, raised)) = next.flatten() else { break };
            // One that was not lifted is not ours by this token, whatever it was before.
            let at = raised.map_or(At::Unknown, At::Granted);
            self.attempt.state().set(node, at);
        }
        let owners = {
            let state = self.attempt.state();
            state.granted().filter(|(_, grant)| grant.token == token).count()
        };
        match owners >= self.core.nodes.quorum {
            true => self.won(token),
            false => self.lost(),
        }
    }

    fn won(&mut self, token: Token) -> Outcome {
        let core = self.core;
        core.saw(token);
        let grant = self.attempt.grant(token, core.nodes.quorum);
        if grant.valid_until <= core.clock.now() {
            return Outcome::Failed(failed("the nodes answered too late".to_owned(), true));
        }
        if !self.attempt.state().hold(token) {
            let name = self.attempt.claim.name.clone();
            return Outcome::Failed(Error::NotHeld { name });
        }
        Outcome::Won(grant)
    }

    /// Busy, or too few answered.
    fn lost(&mut self) -> Outcome {
        let (quorum, all) = (self.core.nodes.quorum, self.core.nodes.all.len());
        // Decided before all have answered, perhaps: one that says no can be enough.
        let answers = self.attempt.state().reachable();
        match self.trouble.take() {
            Some(error) if !matches!(error, Error::Unreachable { .. }) => Outcome::Failed(error),
            _ if answers >= quorum => Outcome::Busy,
            _ if self.refusals.len() > all - quorum => {
                Outcome::Failed(self.refusals.swap_remove(0))
            }
            trouble => {
                let trouble = trouble.or_else(|| self.refusals.pop());
                Outcome::Failed(self.core.nodes.too_few(answers, trouble))
            }
        }
    }
}

/// Whether there may be something to give back.
fn is_something(at: &At) -> bool {
    !matches!(at, At::Nothing | At::Refused)
}

/// Half of it and up to half more, so that those who lost together do not meet again.
fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + rand::random::<f64>())
}
