//! What follows a grant: it is renewed at a quorum, sown again where it was lost, given back
//! everywhere.

use std::sync::Arc;
use std::time::Duration;

use futures_core::future::BoxFuture;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::Core;
use super::attempt::{At, Attempt, Fate, counts, whole};
use super::nodes::failed;
use crate::engine::{Amend, Break, Claim, ClaimId, Event, Grant, Holder, Renewal, Wait};
use crate::error::{Error, LossReason, Result};
use crate::name::Name;
use crate::sync;
use crate::token::Token;

/// The pauses between tries to give something back.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));
/// How long a release waits for a quorum, however short the lease.
const RELEASED: Duration = Duration::from_secs(2);
/// How much longer than its lease something is tried to be given back.
const LONG_OVER: Duration = Duration::from_secs(5);

/// How long an answer may come after its attempt was over, until what was asked for is withdrawn.
const LATE: Duration = Duration::from_millis(500);

/// What one node answered about leases, each with its place in the batch.
type Renewals = (usize, Vec<(usize, Arc<Attempt>, Result<Grant>)>);

impl Core {
    pub(super) async fn renew(self: &Arc<Self>, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        let attempts: Vec<Option<(Arc<Attempt>, Token)>> =
            batch.iter().map(|(claim, grant)| self.holding(claim, grant)).collect();
        let (asked, tokens): (Vec<_>, Vec<_>) = attempts.iter().flatten().cloned().unzip();
        let mut yes = vec![0_usize; asked.len()];
        let mut revoked = vec![false; asked.len()];
        let mut answers = self.ask_to_renew(&asked);
        let ttl = batch.iter().map(|(claim, _)| claim.ttl).min().unwrap_or_default();
        let limit = self.clock.now() + self.patience(ttl);
        // A quorum is enough; whoever answers later is heard later.
        while yes.iter().any(|yes| *yes < self.nodes.quorum) {
            let next = self.clock.timeout_at(limit, answers.next()).await;
            let Some((node, renewed)) = next.flatten() else { break };
            for (place, attempt, renewal) in renewed {
                let counted = |grant: &Grant| counts(grant.token, tokens[place]);
                yes[place] += usize::from(renewal.as_ref().is_ok_and(counted));
                revoked[place] |= is_revoked(&renewal);
                self.note_renewal(&attempt, node, renewal);
            }
        }
        self.hear_the_late(answers);
        let mut place = 0;
        let judged = attempts.into_iter().zip(batch).map(|(attempt, (claim, _))| {
            let Some((attempt, token)) = attempt else {
                return Err(Error::lost(&claim.name, LossReason::Forgotten));
            };
            let judged = self.judge(&attempt, token, yes[place], revoked[place]);
            // Also if too few answered: one that is back may be the one that is missing.
            if judged.as_ref().map_or_else(Error::is_retryable, |_| true) {
                self.sow_again(&attempt, token);
            }
            place += 1;
            judged
        });
        judged.collect()
    }

    /// The attempt by which a claim holds, as this client knows it, or as the grant's key tells.
    fn holding(&self, claim: &Claim, grant: &Grant) -> Option<(Arc<Attempt>, Token)> {
        let attempt = match self.attempt_of(claim.id) {
            Some(attempt) => attempt,
            None => {
                let attempt = Attempt::from_key(claim, grant, self.nodes.all.len())?;
                let attempt = Arc::new(attempt);
                self.attempts().insert(claim.id, attempt.clone());
                attempt
            }
        };
        let fate = attempt.state().fate();
        (fate == Fate::Held(grant.token)).then_some((attempt, grant.token))
    }

    /// Every node that is worth asking, about the leases that it has.
    fn ask_to_renew(
        &self,
        attempts: &[Arc<Attempt>],
    ) -> FuturesUnordered<BoxFuture<'static, Renewals>> {
        let answers = FuturesUnordered::new();
        for node in self.nodes.worth_asking() {
            let leases: Vec<(usize, Arc<Attempt>, Grant)> = attempts
                .iter()
                .enumerate()
                .filter_map(|(place, attempt)| match attempt.state().at(node) {
                    At::Granted(grant) => Some((place, attempt.clone(), grant.clone())),
                    _ => None,
                })
                .collect();
            let engine = self.nodes.all[node].engine.clone();
            if leases.is_empty() {
                continue;
            }
            let asking: BoxFuture<'static, Renewals> = Box::pin(async move {
                let batch: Vec<_> = leases.iter().map(|(_, a, grant)| (&a.claim, grant)).collect();
                let renewed = inner_replies(&batch, engine.renew(&batch).await);
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
        let At::Granted(grant) = at else { return };
        let engine = &self.nodes.all[node].engine;
        let batch = [(&attempt.claim, &grant)];
        if let Some(renewed) = inner_replies(&batch, engine.renew(&batch).await).pop() {
            self.note_renewal(attempt, node, renewed);
        }
    }

    fn note_renewal(self: &Arc<Self>, attempt: &Arc<Attempt>, node: usize, renewed: Result<Grant>) {
        match renewed {
            Ok(grant) => {
                self.nodes.answered(node);
                let mut state = attempt.state();
                if matches!(state.at(node), At::Granted(_)) {
                    state.set(node, At::Granted(grant));
                }
            }
            // Its lease stands, but is the last.
            Err(Error::Lost { reason: LossReason::Revoked, .. }) => {}
            Err(Error::Lost { .. }) => attempt.state().set(node, At::Refused),
            Err(error) if error.is_retryable() => self.nodes.leave_out(node),
            Err(_) => {}
        }
    }

    fn hear_the_late(
        self: &Arc<Self>,
        mut answers: FuturesUnordered<BoxFuture<'static, Renewals>>,
    ) {
        if answers.is_empty() {
            return;
        }
        let core = self.clone();
        self.nodes.in_background(async move {
            while let Some((node, renewed)) = answers.next().await {
                for (_, attempt, renewal) in renewed {
                    core.note_renewal(&attempt, node, renewal);
                }
            }
        });
    }

    fn judge(&self, attempt: &Attempt, token: Token, yes: usize, revoked: bool) -> Result<Grant> {
        let quorum = self.nodes.quorum;
        if yes >= quorum {
            return Ok(attempt.grant(token, quorum));
        }
        let name = &attempt.claim.name;
        let standing = attempt.state().standing(token).len();
        if revoked {
            return Err(Error::lost(name, LossReason::Revoked));
        }
        if standing < quorum {
            return Err(Error::lost(name, LossReason::Forgotten));
        }
        let all = self.nodes.all.len();
        let what = format!("{yes} of {all} nodes renewed `{name}`, {quorum} are needed");
        Err(failed(what, true))
    }

    /// Nodes that do not have the lock are asked for it again, by its very token: else the quorum
    /// would wear away. One that kept its fence answers one more, and counts too; any other value
    /// may hide somebody else's newer token. One that is still being asked as well: whoever waits
    /// for its answer may rest, as its runtime does.
    fn sow_again(self: &Arc<Self>, attempt: &Arc<Attempt>, token: Token) {
        let missing = {
            let state = attempt.state();
            state.those(|at| !matches!(at, At::Granted(_)))
        };
        for node in missing.into_iter().filter(|node| self.nodes.is_worth_asking(*node)) {
            let (core, attempt) = (self.clone(), attempt.clone());
            self.nodes.in_background(async move { core.sow_at(&attempt, node, token).await });
        }
    }

    async fn sow_at(self: &Arc<Self>, attempt: &Arc<Attempt>, node: usize, token: Token) {
        let claim = attempt.proposing(token);
        let answer = self.nodes.all[node].engine.acquire(&claim, Wait::No).await;
        let answer = answer.and_then(|admission| admission.into_inner(&claim.name));
        let keep = matches!(&answer, Ok(Some(grant)) if counts(grant.token, token));
        let over = {
            let mut state = attempt.state();
            let over = state.fate() != Fate::Held(token);
            if !over && !matches!(state.at(node), At::Granted(_)) {
                state.answered(node, &answer);
            }
            over
        };
        let something = !matches!(answer, Ok(None));
        if (over && something) || (matches!(answer, Ok(Some(_))) && !keep) {
            self.take_back(attempt, node).await;
        }
    }

    pub(super) async fn release(
        self: &Arc<Self>,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<()> {
        let not_held = || Error::NotHeld { name: claim.name.clone() };
        let (attempt, _) = self.holding(claim, grant).ok_or_else(not_held)?;
        // What is still asked for is given back by whoever waits for the answer: it is mostly about
        // to come, and to give back what is known costs the node less than to withdraw.
        let (granted, unknown, owed) = {
            let mut state = attempt.state();
            state.end();
            if !state.those(|at| *at == At::Asked).is_empty() {
                self.look_again(&attempt);
            }
            let granted = state.granted().map(|(node, grant)| (node, grant.clone()));
            let granted: Vec<_> = granted.collect();
            let nodes = granted.iter().map(|(node, _)| *node).collect();
            let owed = Owed::new(self, &attempt, nodes, |at| matches!(at, At::Granted(_)));
            (granted, state.those(|at| *at == At::Unknown), owed)
        };
        self.forget(&attempt);
        unknown.into_iter().for_each(|node| self.take_back_later(&attempt, node));
        let held_at = |node: &usize| granted.iter().any(|(granted, _)| granted == node);
        let mut door = self.nodes.door().filter(held_at);
        let following = next.zip(door).and_then(|(next, door)| self.take_along(next, door));
        let mut answers: FuturesUnordered<_> = granted
            .into_iter()
            .map(|(node, grant)| {
                let next = following.as_ref().filter(|next| next.door == node).cloned();
                self.release_at(&attempt, node, grant, next)
            })
            .collect();
        let mut limit = self.clock.now() + self.patience(claim.ttl).max(RELEASED);
        let (mut yes, mut no) = (0, 0);
        // The door must have its say, in its time: whoever is next asks there first.
        while yes < self.nodes.quorum || door.is_some() {
            let answer = self.clock.timeout_at(limit, answers.next()).await;
            let Some((node, answer)) = answer.flatten() else { break };
            door.take_if(|door| *door == node);
            yes += usize::from(answer.is_ok());
            no += usize::from(matches!(answer, Err(Error::NotHeld { .. })));
            self.note_release(&attempt, node, answer);
            if yes == self.nodes.quorum {
                limit = limit.min(self.clock.now() + self.node_timeout(claim.ttl));
            }
        }
        door.iter().for_each(|silent| self.nodes.leave_out(*silent));
        if !answers.is_empty() {
            self.nodes.beside_the_caller(async move {
                while let Some((node, answer)) = answers.next().await {
                    owed.core.note_release(&owed.attempt, node, answer);
                }
            });
        }
        self.released(claim, yes, no)
    }

    /// The first attempt of the claim that is next, which a release takes along to the door. Noted
    /// before it is looked whether the claim was withdrawn: whoever withdraws it does the reverse.
    fn take_along(&self, next: &Claim, door: usize) -> Option<Following> {
        self.check(next).ok()?;
        let attempt = self.begin(next, 0);
        attempt.state().set(door, At::Asked);
        if self.is_withdrawn(next.id) {
            self.forget(&attempt);
            return None;
        }
        Some(Following { attempt, door, floor: self.propose() })
    }

    fn release_at(
        self: &Arc<Self>,
        attempt: &Arc<Attempt>,
        node: usize,
        grant: Grant,
        next: Option<Following>,
    ) -> BoxFuture<'static, (usize, Result<()>)> {
        let (core, attempt) = (self.clone(), attempt.clone());
        Box::pin(async move {
            let claim = next.as_ref().map(|next| next.attempt.proposing(next.floor));
            let engine = &core.nodes.all[node].engine;
            let answer = engine.release(&attempt.claim, &grant, claim.as_ref()).await;
            if let (Some(next), Ok(Some(grant))) = (next, &answer) {
                core.saw(grant.token);
                let mut state = next.attempt.state();
                if state.fate() == Fate::Open && *state.at(node) == At::Asked {
                    state.set(node, At::Granted(grant.clone()));
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
            self.nodes.in_background(async move { core.withdraw_the_late().await });
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
                let asked = attempt.state().those(|at| *at == At::Asked);
                asked.into_iter().for_each(|node| self.take_back_later(&attempt, node));
            }
            if is_done {
                return;
            }
        }
    }

    /// What so many answers of each kind to a release come to.
    fn released(&self, claim: &Claim, yes: usize, no: usize) -> Result<()> {
        let (quorum, all) = (self.nodes.quorum, self.nodes.all.len());
        if yes >= quorum {
            return Ok(());
        }
        if no > 0 && yes + no >= quorum {
            return Err(Error::NotHeld { name: claim.name.clone() });
        }
        Err(failed(format!("{yes} of {all} nodes released `{}`", claim.name), true))
    }

    fn note_release(self: &Arc<Self>, attempt: &Arc<Attempt>, node: usize, answer: Result<()>) {
        match answer {
            Ok(()) | Err(Error::NotHeld { .. }) => attempt.state().set(node, At::Nothing),
            Err(_) => {
                attempt.state().set(node, At::Unknown);
                self.take_back_later(attempt, node);
            }
        }
    }

    pub(super) fn take_back_later(self: &Arc<Self>, attempt: &Arc<Attempt>, node: usize) {
        let (core, attempt) = (self.clone(), attempt.clone());
        let owing = Owing::one_more(self);
        self.nodes.in_background(async move {
            core.take_back(&attempt, node).await;
            drop(owing);
        });
    }

    /// Gives back what an attempt has, or may have, at a node; again and again until the node has
    /// answered or the lease is long over.
    pub(super) async fn take_back(self: &Arc<Self>, attempt: &Arc<Attempt>, node: usize) {
        let engine = &self.nodes.all[node].engine;
        let long_over = self.clock.now() + attempt.claim.ttl + LONG_OVER;
        let mut pause = PAUSES.0;
        loop {
            let at = attempt.state().at(node).clone();
            let answer = match &at {
                At::Granted(grant) => engine.release(&attempt.claim, grant, None).await.map(drop),
                _ => engine.withdraw(&attempt.claim).await,
            };
            match answer {
                Ok(()) | Err(Error::NotHeld { .. }) => {
                    return attempt.state().set(node, At::Nothing);
                }
                Err(error) => {
                    attempt.state().set(node, At::Unknown);
                    // One that refuses refuses the next time too.
                    if !error.is_retryable() {
                        return;
                    }
                }
            }
            if self.clock.now() >= long_over {
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
            let there = attempt.state().those(|at| *at != At::Nothing);
            let each = there.into_iter().map(|node| self.withdraw_at(node, &attempt.claim));
            // What a node does not answer it may still have; the rest happens behind.
            for (node, done) in futures_util::future::join_all(each).await {
                match done {
                    true => attempt.state().set(node, At::Nothing),
                    false => self.take_back_later(&attempt, node),
                }
            }
            return Ok(());
        }
        let each = self.nodes.worth_asking().into_iter().map(|node| async move {
            let Some(others) = self.ids_at(node, claim).await else { return false };
            let ids = [claim.id].into_iter().chain(others);
            let each = ids.map(|id| async move {
                self.withdraw_at(node, &Claim { id, ..claim.clone() }).await.1
            });
            futures_util::future::join_all(each).await.into_iter().all(|done| done)
        });
        let done = futures_util::future::join_all(each).await;
        match done.iter().filter(|done| **done).count() >= self.nodes.quorum {
            true => Ok(()),
            false => Err(failed("too few nodes answered a withdrawal".to_owned(), true)),
        }
    }

    /// Whether a node has withdrawn this attempt in its time.
    async fn withdraw_at(&self, node: usize, claim: &Claim) -> (usize, bool) {
        if !self.nodes.is_worth_asking(node) {
            return (node, false);
        }
        let limit = self.clock.now() + self.patience(claim.ttl);
        let done = self.clock.timeout_at(limit, self.nodes.all[node].engine.withdraw(claim)).await;
        (node, matches!(done, Some(Ok(()))))
    }

    /// The ids at a node that belong to attempts of a claim.
    async fn ids_at(&self, node: usize, claim: &Claim) -> Option<Vec<ClaimId>> {
        let limit = self.clock.now() + self.node_timeout(claim.ttl);
        let looking = self.nodes.all[node].engine.inspect(&claim.name);
        let Some(Ok(state)) = self.clock.timeout_at(limit, looking).await else { return None };
        let holders = state.holders.iter().filter_map(|holder| holder.claim);
        let waiters = state.waiters.iter().map(|waiter| waiter.claim);
        let ours = |id: &ClaimId| *id != claim.id && whole(*id) == claim.id;
        Some(holders.chain(waiters).filter(ours).collect())
    }

    pub(super) async fn amend(
        self: &Arc<Self>,
        claim: &Claim,
        grant: &Grant,
        to: &Amend,
    ) -> Result<Grant> {
        let lost = || Error::lost(&claim.name, LossReason::Forgotten);
        let (attempt, token) = self.holding(claim, grant).ok_or_else(lost)?;
        let granted: Vec<_> = {
            let state = attempt.state();
            let is_well = |node: usize| self.nodes.is_worth_asking(node);
            let well = state.granted().filter(|(node, _)| is_well(*node)).count();
            let enough = well >= self.nodes.quorum;
            let granted = state.granted().filter(|(node, _)| !enough || is_well(*node));
            granted.map(|(node, grant)| (node, grant.clone())).collect()
        };
        let mut silent: Vec<usize> = granted.iter().map(|(node, _)| *node).collect();
        let mut answers: FuturesUnordered<_> = granted
            .into_iter()
            .map(|(node, grant)| {
                let (engine, attempt) = (self.nodes.all[node].engine.clone(), attempt.clone());
                let to = to.clone();
                async move { (node, engine.amend(&attempt.claim, &grant, to).await) }
            })
            .collect();
        let began = self.clock.now();
        let (mut yes, mut gone) = (0, 0);
        loop {
            let enough = yes >= self.nodes.quorum;
            let patience = match enough {
                true => self.node_timeout(claim.ttl),
                false => self.patience(claim.ttl),
            };
            let next = self.clock.timeout_at(began + patience, answers.next()).await;
            let Some((node, answer)) = next.flatten() else { break };
            silent.retain(|other| *other != node);
            yes += usize::from(answer.is_ok());
            gone += usize::from(matches!(answer, Err(Error::Lost { .. })));
        }
        silent.into_iter().for_each(|node| self.nodes.leave_out(node));
        match () {
            () if yes >= self.nodes.quorum => Ok(attempt.grant(token, self.nodes.quorum)),
            () if gone > self.nodes.all.len() - self.nodes.quorum => Err(lost()),
            () => Err(failed("too few nodes answered".to_owned(), true)),
        }
    }

    /// Passes a lock on at every node that has it, of which a quorum must agree. At each node the
    /// first successor wins, and two quorums share a node: so one ticket has one successor at most.
    /// For the tokens nothing changes: whoever owned this one owns it on, under another id.
    pub(super) async fn adopt(
        self: &Arc<Self>,
        claim: &Claim,
        grant: &Grant,
        successor: &Claim,
    ) -> Result<Grant> {
        self.check(successor)?;
        let lost = || Error::lost(&claim.name, LossReason::Forgotten);
        let (attempt, token) = self.holding(claim, grant).ok_or_else(lost)?;
        let next = self.begin(successor, 0);
        if next.state().fate() == Fate::Held(token) {
            return Ok(next.grant(token, self.nodes.quorum));
        }
        // Noted before it is looked whether it was withdrawn: a withdrawal does the reverse.
        let granted: Vec<(usize, Grant)> = {
            let state = attempt.state();
            state.granted().map(|(node, grant)| (node, grant.clone())).collect()
        };
        let had = granted.len();
        granted.iter().for_each(|(node, _)| next.state().set(*node, At::Asked));
        if self.is_withdrawn(successor.id) {
            return Err(Error::NotHeld { name: claim.name.clone() });
        }
        let mut answers: FuturesUnordered<_> = granted
            .into_iter()
            .map(|(node, grant)| {
                let engine = self.nodes.all[node].engine.clone();
                let (attempt, next) = (attempt.clone(), next.clone());
                async move { (node, engine.adopt(&attempt.claim, &grant, &next.claim).await) }
            })
            .collect();
        let began = self.clock.now();
        let (mut yes, mut gone) = (0, 0);
        loop {
            let enough = yes >= self.nodes.quorum;
            let patience = match enough {
                true => self.node_timeout(claim.ttl),
                false => self.patience(claim.ttl),
            };
            let answer = self.clock.timeout_at(began + patience, answers.next()).await;
            let Some((node, answer)) = answer.flatten() else { break };
            yes += usize::from(answer.as_ref().is_ok_and(|grant| counts(grant.token, token)));
            gone += usize::from(matches!(answer, Err(Error::Lost { .. })));
            next.state().set(
                node,
                match answer {
                    Ok(grant) => At::Granted(grant),
                    Err(Error::Lost { .. }) => At::Refused,
                    Err(_) => At::Unknown,
                },
            );
        }
        if yes < self.nodes.quorum {
            // What it has got is withdrawn with it, unless it asks again.
            let all = self.nodes.all.len();
            let what = format!("{yes} of {all} nodes passed `{}` on", claim.name);
            let is_lost = had - gone < self.nodes.quorum;
            return Err(if is_lost { lost() } else { failed(what, true) });
        }
        self.forget(&attempt);
        self.remember_withdrawn(claim.id);
        attempt.state().end();
        let silent = next.state().those(|at| !matches!(at, At::Granted(_)));
        for node in silent {
            next.state().set(node, At::Unknown);
            self.take_back_later(&attempt, node);
        }
        let holds = next.state().hold(token);
        match holds {
            true => Ok(next.grant(token, self.nodes.quorum)),
            false => Err(Error::NotHeld { name: claim.name.clone() }),
        }
    }

    /// Breaks the lock at every node that answers, which must be a quorum.
    pub(super) async fn force_release(
        self: &Arc<Self>,
        name: &Name,
        how: Break,
    ) -> Result<Vec<Holder>> {
        let before = self.look(name).await?.holders;
        let broken = self.at_each(|engine| {
            let name = name.clone();
            async move { engine.force_release(&name, how).await }
        });
        let answered = broken.await?;
        let freed = |holder: &Holder| {
            let same = |at: &&Holder| at.claim.map(whole) == holder.claim;
            answered.iter().flatten().filter(same).count() > 0
        };
        Ok(before.into_iter().filter(freed).collect())
    }

    /// Hears what the nodes have to tell, and tells what follows for the whole.
    pub(super) fn hear(self: &Arc<Self>, node: usize, event: Event) {
        let (id, why) = match event {
            Event::Lost(id, why) => (id, Some(why)),
            Event::LastLease(id) => (id, Some(LossReason::Revoked)),
            Event::Doubt(id) => (id, None),
        };
        let attempt = self.attempt_of(whole(id)).filter(|attempt| attempt.claim.id == id);
        let Some(attempt) = attempt else { return };
        let quorum = self.nodes.quorum;
        let told = match why {
            Some(why) => {
                let lost = attempt.state().taken_away(node, why, quorum);
                lost.map(|why| Event::from_reason(whole(id), why))
            }
            None => attempt.state().doubt(node, quorum).then(|| Event::Doubt(whole(id))),
        };
        if let Some(signal) = told {
            // Nobody listens any more after the keeper has ended.
            let _ = self.tell.send(signal);
        }
    }
}

/// Whoever is next after a release, and is taken along to the door.
#[derive(Clone)]
struct Following {
    attempt: Arc<Attempt>,
    door: usize,
    floor: Token,
}

/// Whoever looks after what an attempt has at its nodes. Dropped before everything is settled (by a
/// caller that was cancelled, or a runtime that ended), it leaves the rest to the background.
pub(super) struct Owed {
    core: Arc<Core>,
    attempt: Arc<Attempt>,
    /// What it is to give back, of an attempt that is over: at these nodes, if it stands like this
    /// there. Others may look after the rest.
    nodes: Vec<usize>,
    which: fn(&At) -> bool,
    _owing: Owing,
}

impl Owed {
    pub(super) fn new(
        core: &Arc<Core>,
        attempt: &Arc<Attempt>,
        nodes: Vec<usize>,
        which: fn(&At) -> bool,
    ) -> Self {
        let owing = Owing::one_more(core);
        Self { core: core.clone(), attempt: attempt.clone(), nodes, which, _owing: owing }
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
            match state.fate() {
                Fate::Open => left.clear(),
                Fate::Held(_) => {
                    left.retain(|node| *state.at(*node) == At::Asked);
                    // The next renewal asks again.
                    left.drain(..).for_each(|node| state.set(node, At::Unknown));
                }
                Fate::Over => left.retain(|node| (self.which)(state.at(*node))),
            }
            left
        };
        left.into_iter().for_each(|node| self.core.take_back_later(&self.attempt, node));
    }
}

/// One who gives something back, which closing waits for.
struct Owing(Arc<Core>);

impl Owing {
    fn one_more(core: &Arc<Core>) -> Self {
        core.owing.send_modify(|owing| *owing += 1);
        Self(core.clone())
    }
}

impl Drop for Owing {
    fn drop(&mut self) {
        self.0.owing.send_modify(|owing| *owing -= 1);
    }
}

/// The replies of a node, with a refusal as an error.
fn inner_replies(batch: &[(&Claim, &Grant)], replies: Vec<Result<Renewal>>) -> Vec<Result<Grant>> {
    let inner = |(reply, (claim, _)): (Result<Renewal>, &(&Claim, &Grant))| {
        reply.and_then(|renewal| renewal.into_inner(&claim.name))
    };
    replies.into_iter().zip(batch).map(inner).collect()
}

fn is_revoked(renewal: &Result<Grant>) -> bool {
    matches!(renewal, Err(Error::Lost { reason: LossReason::Revoked, .. }))
}
