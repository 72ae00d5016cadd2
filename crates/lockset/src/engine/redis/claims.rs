//! The way of one claim: asked for, waited for, believed, given back.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, ToRedisArgs, Value};

use super::answers::{Standing, list, number, standing, word};
use super::batch::{Acted, Give, Request, Take};
use super::keys::{self, Keys};
use super::link::{self, Answer, Unanswered, Up};
use super::nodes::Way;
use super::scripts::{Script, TOKENS_END};
use super::waiting::{News, Waiter};
use super::{Core, LEAST_PATIENCE, PATIENCE, TOMBSTONE_LIFE, answers};
use crate::clock::Moment;
use crate::engine::{Claim, Grant, Mode, Replicas, Wait, drift, trusted_until};
use crate::error::{Error, LossReason, Result};
use crate::name::Name;
use crate::report::report;
use crate::token::Token;

/// The pause before a request is repeated that was not answered, or refused for the moment.
const ASK_AGAIN: Duration = Duration::from_millis(20);

/// How many waiters, from the head of the queue, track a foreign lock. One would do if the first
/// entry were never the `!` of the marks, or dead.
const HEADS: u32 = 2;

/// At most so many leases are renewed in one script: a command or two for each.
const RENEWALS: usize = 200;

/// What came of a request.
enum Asked {
    /// The full ttl, at once.
    Granted(Grant),
    Busy,
    /// The waiter knows.
    News,
}

impl Core {
    /// The whole way of one claim, until it is granted or its time is over. What happens seldom is
    /// boxed here and below: the way of a free lock must be short, in memory too.
    pub(super) async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        claim.floor.map_or(Ok(()), check_token)?;
        self.check_name(&claim.name)?;
        let waiter = self.waiters.enter(claim);
        let began = self.clock.now();
        let granted = match waiter.is_new() {
            true => self.ask(&waiter, wait).await,
            false => Ok(Asked::News),
        };
        let granted = match granted {
            Ok(Asked::Granted(grant)) => Ok(Some(grant)),
            Ok(Asked::Busy) => Ok(None),
            Ok(Asked::News) => Box::pin(self.wait_for(&waiter, wait)).await,
            // Asked again by the same id, even for one that does not wait, if the connection broke.
            Err(error)
                if error.is_retryable()
                    && self.clock.now() < wait.deadline().max(began + PATIENCE / 2) =>
            {
                Box::pin(self.wait_for(&waiter, wait)).await
            }
            Err(error) => Err(error),
        };
        // Who may ask again is remembered.
        if matches!(granted, Ok(_) | Err(Error::NotHeld { .. })) {
            self.waiters.remove(claim.id);
        }
        match granted? {
            Some(grant) if self.policy(claim) != Replicas::None => {
                Box::pin(self.made_sure(claim, grant)).await.map(Some)
            }
            granted => Ok(granted),
        }
    }

    async fn wait_for(&self, waiter: &Arc<Waiter>, wait: Wait) -> Result<Option<Grant>> {
        let claim = &waiter.claim;
        loop {
            let now = self.clock.now();
            let look_at = match waiter.news(now) {
                News::Granted(grant) => match self.believe(claim, grant).await? {
                    Some(grant) => return Ok(Some(grant)),
                    None => return Err(Error::NotHeld { name: claim.name.clone() }),
                },
                News::Gone => return Err(Error::NotHeld { name: claim.name.clone() }),
                News::Refused(why) => return Err(why),
                News::Ask => match self.ask(waiter, wait).await {
                    Ok(Asked::Granted(grant)) => return Ok(Some(grant)),
                    // One whose first request was not answered may still be taken: it is withdrawn.
                    Ok(Asked::Busy) => return self.leave(claim).await.map(|()| None),
                    Ok(Asked::News) => continue,
                    Err(error) if error.is_retryable() && self.clock.now() < wait.deadline() => {
                        // Asked again by the same id, which changes nothing if it was executed.
                        tokio::time::sleep(ASK_AGAIN).await;
                        continue;
                    }
                    Err(error) => return Err(error),
                },
                News::Waits(look_at) => look_at,
            };
            if now >= wait.deadline() {
                self.leave(claim).await?;
                return Ok(None);
            }
            tokio::select! {
                () = waiter.news.notified() => {}
                () = self.clock.sleep_until(look_at.min(wait.deadline())) => {
                    if self.clock.now() >= look_at {
                        // The lease before us may have ended: a sign of life finds out.
                        self.beat_one(waiter).await;
                    }
                }
            }
        }
    }

    /// One request for a claim: queues it, or finds out how it stands.
    async fn ask(&self, waiter: &Arc<Waiter>, wait: Wait) -> Result<Asked> {
        let claim = &waiter.claim;
        let sent = self.clock.now();
        waiter.sending(sent);
        // Nobody waits longer for an answer than for the lock.
        let patience = match wait {
            Wait::Until(deadline) => {
                deadline.saturating_duration_since(sent).clamp(LEAST_PATIENCE, PATIENCE)
            }
            Wait::No | Wait::Forever => PATIENCE,
        };
        let take = Take { waiter: waiter.clone(), waits: wait != Wait::No };
        match self.act(&claim.name, None, Some(take), patience).await {
            Ok((_, answer)) => {
                let answer = answer.ok_or_else(|| answers::unexpected("no answer"))?;
                self.take_answer(waiter, sent, &answer)
            }
            Err(unanswered) => {
                if let Unanswered::Unknown(_) = unanswered {
                    self.dirty().insert(claim.id, ());
                }
                Err(unanswered.into_error())
            }
        }
    }

    /// Gives a lock back, takes another of the same name, or both: in one request.
    async fn act(
        &self,
        name: &Name,
        give: Option<Give>,
        take: Option<Take>,
        patience: Duration,
    ) -> Acted {
        let request = Arc::new(Request { keys: self.keys(name), give, take });
        match self.nodes.at_hand() {
            Some(up) => up.act(&request, patience).await,
            None => Box::pin(self.act_afar(&request, patience)).await,
        }
    }

    /// Where a connection is to be found or waited for first.
    async fn act_afar(&self, request: &Arc<Request>, patience: Duration) -> Acted {
        let mut way = self.way(&request.keys, patience)?;
        loop {
            let (node, left) = way.node().await?;
            let up = node.nearest(node.link.up(left).await?);
            let acted = up.act(request, left).await;
            if let Some(acted) = way.follow(acted).await {
                return acted;
            }
        }
    }

    fn way(&self, keys: &Keys, patience: Duration) -> std::result::Result<Way<'_>, Unanswered> {
        let slot = if self.nodes.by_slot() { keys.slot() } else { Some(0) };
        let slot = slot.ok_or_else(|| {
            let why = "in a cluster a name with `}` needs a hash tag such as `{tag}`";
            Unanswered::Refused(Error::invalid("name", keys.lock(), why))
        })?;
        Ok(self.nodes.way(slot, patience))
    }

    /// The keys of a script: lock and queue of each claim. A script finds the others by itself; a
    /// cluster must know them all, or it would begin one while half of them are being moved.
    fn declared<'a>(&self, claims: impl Iterator<Item = &'a Claim> + Clone) -> Vec<String> {
        let keys = claims.clone().map(|claim| self.keys(&claim.name));
        let mut names: Vec<String> =
            keys.flat_map(|keys| [keys.lock().to_owned(), keys.queue()]).collect();
        if self.nodes.by_slot() {
            for claim in claims {
                let keys = self.keys(&claim.name);
                names.extend(keys.others(claim.id));
                names.extend(self.scripts.has_courtesy.then(|| keys.handoffs()));
            }
        }
        names
    }

    /// Runs a script that concerns the name of these keys.
    pub(super) async fn run(
        &self,
        script: &Script,
        of: &Keys,
        keys: &[impl ToRedisArgs],
        args: &[impl ToRedisArgs],
    ) -> Answer {
        self.run_as(PATIENCE, script, of, |_| script.call_with(keys, args)).await
    }

    /// The same for one that may hand the lock on: its last argument is when its connection was
    /// made.
    pub(super) async fn run_handing_on(
        &self,
        script: &Script,
        of: &Keys,
        keys: &[impl ToRedisArgs],
        args: &[impl ToRedisArgs],
    ) -> Answer {
        let written = |up: &Up| {
            let mut command = script.call_with(keys, args);
            command.arg(up.floor);
            command
        };
        self.run_as(PATIENCE, script, of, written).await
    }

    /// Sends a command that reads these keys over the client's own connection. Returns also whether
    /// the server will push their next change. `script` is what the command runs.
    pub(super) async fn ask_tracked(
        &self,
        script: Option<&Script>,
        of: &Keys,
        command: &Cmd,
    ) -> std::result::Result<(Value, bool), Unanswered> {
        let mut way = self.way(of, PATIENCE)?;
        loop {
            let (node, left) = way.node().await?;
            let answer = node.link.up(left).await?.ask_tracked(left, script, command).await;
            if let Some(answer) = way.follow(answer).await {
                return answer;
            }
        }
    }

    /// Runs a script as it is written for the connection that it takes.
    async fn run_as(
        &self,
        patience: Duration,
        script: &Script,
        of: &Keys,
        written: impl Fn(&Up) -> Cmd,
    ) -> Answer {
        let mut way = self.way(of, patience)?;
        loop {
            let (node, left) = way.node().await?;
            let up = node.link.up(left).await?;
            let (command, mut connection) = (written(&up), up.connection.clone());
            let answer = up.answer(left, script.run(&command, &mut connection)).await;
            if let Some(answer) = way.follow(answer).await {
                return answer;
            }
        }
    }

    /// Notes what a request sent at `sent` was answered.
    fn take_answer(&self, waiter: &Waiter, sent: Moment, answer: &Value) -> Result<Asked> {
        let claim = &waiter.claim;
        match standing(answer)? {
            Standing::GrantedNow(token) => {
                let valid_until = trusted_until(sent, claim.ttl);
                let token = Token::new(token);
                return Ok(Asked::Granted(match claim.is_plain() {
                    true => keys::fresh_grant(token, valid_until),
                    false => keys::grant(token, valid_until),
                }));
            }
            Standing::Granted(token, left) => waiter.granted(sent, token, left),
            Standing::Queued { stamp, place, left, is_foreign } => {
                waiter.queued(sent, self.clock.now(), stamp, place, left);
                self.pulse.by(waiter);
                if is_foreign && place < HEADS {
                    self.pulse.await_foreign(claim.id);
                }
            }
            Standing::Gone => waiter.gone(),
            Standing::Busy => return Ok(Asked::Busy),
            Standing::Clash(why) => {
                return Err(Error::Conflict { name: claim.name.clone(), why: clash(&why, claim) });
            }
        }
        Ok(Asked::News)
    }

    async fn beat_one(&self, waiter: &Waiter) {
        if let Some(waiter) = self.waiters.find(waiter.claim.id) {
            waiter.beating(self.clock.now());
            self.beat(&[waiter]).await;
        }
    }

    /// Tracks the lock of a waiter behind a foreign holder, and sends a heartbeat as soon as that
    /// changes: it competes with those who poll, so everything is prepared before.
    pub(super) async fn await_foreign(self: Arc<Self>, waiter: Arc<Waiter>) {
        let keys = self.keys(&waiter.claim.name);
        let Some(changed) = self.waiters.await_change(keys.lock(), &waiter) else { return };
        let names = self.declared([&waiter.claim].into_iter());
        let mut get = redis::cmd("GET");
        get.arg(keys.lock());
        let is_free = match self.ask_tracked(None, &keys, &get).await {
            Ok((value, _)) => value == Value::Nil,
            Err(_) => return self.waiters.forget_change(&waiter),
        };
        if is_free {
            self.waiters.forget_change(&waiter);
        } else if changed.await.is_err() {
            // It does not wait any more, or the connection was lost and its next heartbeat tells.
            return;
        }
        let sent = self.clock.now();
        waiter.beating(sent);
        let waiters = std::slice::from_ref(&waiter);
        let answer = self.send_beat(&keys, &names, waiters).await;
        self.take_beats(waiters, sent, answer).await;
    }

    /// One sign of life for each of these waiters, who must be of one slot in a cluster.
    pub(super) async fn beat(&self, waiters: &[Arc<Waiter>]) {
        let Some(first) = waiters.first() else { return };
        let sent = self.clock.now();
        let names = self.declared(waiters.iter().map(|waiter| &waiter.claim));
        let answer = self.send_beat(&self.keys(&first.claim.name), &names, waiters).await;
        self.take_beats(waiters, sent, answer).await;
    }

    /// Notes what heartbeats sent at `sent` were answered.
    async fn take_beats(&self, waiters: &[Arc<Waiter>], sent: Moment, answer: Answer) {
        match answer {
            Ok(Value::Array(answers)) => {
                for (waiter, answer) in waiters.iter().zip(&answers) {
                    if let Err(error) = self.take_answer(waiter, sent, answer) {
                        report!(debug, error = error, "a heartbeat got an unexpected answer");
                        if !error.is_retryable() {
                            waiter.refused(error);
                        }
                    }
                }
            }
            Ok(_) => {}
            Err(why) => {
                let error = why.into_error();
                report!(debug, error = error, "a heartbeat was not answered");
                if !error.is_retryable() {
                    self.heed_refusal(waiters, error).await;
                }
            }
        }
    }

    /// A refusal that waiting does not cure is told to the one whom it concerns.
    async fn heed_refusal(&self, waiters: &[Arc<Waiter>], why: Error) {
        match waiters {
            [waiter] => waiter.refused(why),
            _ => {
                let each = waiters.iter().map(|waiter| self.beat(std::slice::from_ref(waiter)));
                Box::pin(futures_util::future::join_all(each)).await;
            }
        }
    }

    async fn send_beat(&self, of: &Keys, names: &[String], waiters: &[Arc<Waiter>]) -> Answer {
        let script = &self.scripts.heartbeat;
        let ids: Vec<String> = waiters.iter().map(|waiter| waiter.claim.id.to_string()).collect();
        let written = |up: &Up| {
            let mut command = script.call(names.len());
            // Where the waiters can be told is where this very connection listens.
            command.arg(names).arg(&up.inbox).arg(up.floor).arg(&ids);
            command
        };
        self.run_as(PATIENCE, script, of, written).await
    }

    /// A grant that was read only after its time is believed if it can be renewed, not otherwise.
    async fn believe(&self, claim: &Claim, grant: Grant) -> Result<Option<Grant>> {
        if grant.valid_until > self.clock.now() {
            return self.complete(claim, grant).await;
        }
        let sent = self.clock.now();
        let answers = self.extend(&[(claim, &grant)], None).await?;
        match renewed(claim, &grant, sent, first_of(&answers)?) {
            Ok(grant) => Ok(Some(grant)),
            Err(Error::Lost { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// A handed-over fixed lease is made as long as was asked for, counted from the grant.
    async fn complete(&self, claim: &Claim, grant: Grant) -> Result<Option<Grant>> {
        let first = self.waiters.leases(claim.ttl).first;
        let is_whole = grant.valid_until > self.clock.now() + first;
        if !claim.fixed || claim.ttl <= first || is_whole {
            return Ok(Some(grant));
        }
        let (more, sent) = (claim.ttl.saturating_sub(first), self.clock.now());
        let answers = self.extend(&[(claim, &grant)], Some(more)).await?;
        let answer = list(first_of(&answers)?)?;
        match word(answer, 0)?.as_str() {
            "renewed" => {
                let left = Duration::from_millis(number(answer, 1)?);
                let valid_until = (sent + left).saturating_sub(drift(claim.ttl));
                Ok(Some(Grant { valid_until, ..grant }))
            }
            _ => Ok(None),
        }
    }

    /// Renews, or makes a lease longer by `more`. All claims must be of one slot in a cluster.
    async fn extend(
        &self,
        batch: &[(&Claim, &Grant)],
        more: Option<Duration>,
    ) -> Result<Vec<Value>> {
        let Some((first, _)) = batch.first() else { return Ok(Vec::new()) };
        let (names, args) = self.extension(batch, more);
        let of = self.keys(&first.name);
        let script = &self.scripts.renew;
        // The keeper does not wait much longer, and one node that is silent must not cost others.
        let patience = PATIENCE.min(first.ttl / 8).max(LEAST_PATIENCE);
        let written = |up: &Up| {
            let mut command = script.call(names.len());
            // Whoever renews is told of a break: a ticket may have come from another client, or the
            // slot of the inbox may have moved.
            command.arg(&names).arg(&up.inbox).arg(&args);
            command
        };
        let answer = self.run_as(patience, script, &of, written).await;
        match answer.map_err(Unanswered::into_error)? {
            Value::Array(answers) if answers.len() == batch.len() => Ok(answers),
            other => Err(answers::unexpected(&format!("{other:?}"))),
        }
    }

    /// Keys of `renew.lua`, and its arguments behind the inbox.
    fn extension(
        &self,
        batch: &[(&Claim, &Grant)],
        more: Option<Duration>,
    ) -> (Vec<String>, Vec<String>) {
        let names = self.declared(batch.iter().map(|(claim, _)| *claim));
        let mut args = Vec::new();
        for (claim, grant) in batch {
            args.extend([
                claim.id.to_string(),
                grant.token.to_string(),
                more.unwrap_or(claim.ttl).as_millis().to_string(),
                u8::from(more.is_some()).to_string(),
            ]);
        }
        (names, args)
    }

    pub(super) async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        let sent = self.clock.now();
        let parts =
            self.together(batch, RENEWALS, |(claim, _)| &claim.name).into_iter().map(|part| {
                let part: Vec<(usize, (&Claim, &Grant))> = part;
                async move {
                    let leases: Vec<_> = part.iter().map(|(_, lease)| *lease).collect();
                    let answers = self.renew_together(&leases, sent).await;
                    part.into_iter().map(|(place, _)| place).zip(answers).collect::<Vec<_>>()
                }
            });
        let mut answers: Vec<(usize, Result<Grant>)> =
            futures_util::future::join_all(parts).await.into_iter().flatten().collect();
        answers.sort_unstable_by_key(|(place, _)| *place);
        answers.into_iter().map(|(_, answer)| answer).collect()
    }

    /// Those of one slot in a cluster, in one request.
    async fn renew_together(
        &self,
        leases: &[(&Claim, &Grant)],
        sent: Moment,
    ) -> Vec<Result<Grant>> {
        let each = leases.iter();
        match self.extend(leases, None).await {
            Ok(answers) => each
                .zip(&answers)
                .map(|((claim, grant), answer)| renewed(claim, grant, sent, answer))
                .collect(),
            // Perhaps for the sake of one of them, such as a name that the user may not touch.
            Err(error) if leases.len() > 1 && !error.is_retryable() => {
                let alone = each.map(|(claim, grant)| async move {
                    let answers = self.extend(&[(claim, grant)], None).await?;
                    renewed(claim, grant, sent, first_of(&answers)?)
                });
                futures_util::future::join_all(alone).await
            }
            Err(error) => each.map(|_| Err(link::again(&error))).collect(),
        }
    }

    /// What can travel in one script each, with its place in the whole.
    pub(super) fn together<T: Clone>(
        &self,
        all: &[T],
        most: usize,
        name: impl Fn(&T) -> &Name,
    ) -> Vec<Vec<(usize, T)>> {
        let mut by_slot = std::collections::BTreeMap::<_, Vec<(usize, T)>>::new();
        for (place, item) in all.iter().enumerate() {
            let slot = if self.nodes.by_slot() { self.keys(name(item)).slot() } else { None };
            by_slot.entry(slot).or_default().push((place, item.clone()));
        }
        by_slot
            .into_values()
            .flat_map(|part| part.chunks(most).map(<[_]>::to_vec).collect::<Vec<_>>())
            .collect()
    }

    /// A grant that must be on replicas is confirmed by them, or given back.
    async fn made_sure(&self, claim: &Claim, grant: Grant) -> Result<Grant> {
        match self.confirm(claim, &grant, self.policy(claim)).await {
            Ok(grant) => Ok(grant),
            Err(error) => {
                self.leave(claim).await?;
                Err(error)
            }
        }
    }

    pub(super) fn policy(&self, claim: &Claim) -> Replicas {
        claim.replicas.unwrap_or(self.replicas)
    }

    async fn confirm(&self, claim: &Claim, grant: &Grant, policy: Replicas) -> Result<Grant> {
        // A fixed lease is not made longer, only written again.
        let more = claim.fixed.then_some(Duration::ZERO);
        let (names, args) = self.extension(&[(claim, grant)], more);
        let mut command = self.scripts.renew.call(names.len());
        command.arg(&names).arg("").arg(&args);
        let sent = self.clock.now();
        let keys = self.keys(&claim.name);
        let mut way = self.way(&keys, PATIENCE).map_err(Unanswered::into_error)?;
        let answer = loop {
            let (node, left) = way.node().await.map_err(Unanswered::into_error)?;
            let wanted = node.wanted(policy);
            if wanted == 0 {
                return Ok(grant.clone());
            }
            let patience = left.min(claim.ttl / 2);
            let answer = node.confirm(&self.scripts.renew, &command, wanted, patience).await;
            if let Some(answer) = way.follow(answer).await {
                break answer.map_err(Unanswered::into_error)?;
            }
        };
        let renewal = renewed(claim, grant, sent, first_of(list(&answer)?)?)?;
        Ok(if claim.fixed { grant.clone() } else { renewal })
    }

    pub(super) async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        if self.dirty().contains_key(&claim.id) {
            // It ends with a mark; whoever is next asks for itself.
            let outcome = Box::pin(self.finish(claim, Some(grant.token))).await?;
            return if outcome {
                Ok(None)
            } else {
                Err(Error::NotHeld { name: claim.name.clone() })
            };
        }
        // One that replicas must confirm finds out by its own request.
        let next = next.filter(|next| {
            self.policy(next) == Replicas::None
                && next.floor.is_none_or(|floor| check_token(floor).is_ok())
        });
        let sent = self.clock.now();
        let waiter = next.map(|next| {
            let waiter = self.waiters.enter(next);
            waiter.sending(sent);
            waiter
        });
        // In doubt from the first byte on: this future may be dropped before the answer.
        let doubt = next.filter(|next| self.dirty().insert(next.id, ()).is_none());
        let take = waiter.clone().map(|waiter| Take { waiter, waits: true });
        let Claim { id, ttl, ref note, .. } = *claim;
        let note = keys::is_fresh(grant).then(|| note.clone());
        let give = Give { id, token: grant.token, ttl, note };
        let acted = self.act(&claim.name, Some(give), take, PATIENCE).await;
        if !matches!(acted, Err(Unanswered::Unknown(_))) {
            doubt.and_then(|next| self.dirty().remove(&next.id));
        }
        let (given, taken) = acted.map_err(Unanswered::into_error)?;
        if given != Some(Value::Int(1)) {
            return Err(Error::NotHeld { name: claim.name.clone() });
        }
        let (Some(waiter), Some(answer)) = (waiter, taken) else { return Ok(None) };
        match self.take_answer(&waiter, sent, &answer) {
            Ok(Asked::Granted(grant)) => {
                self.waiters.remove(waiter.claim.id);
                Ok(Some(grant))
            }
            // It finds out by its own request.
            _ => Ok(None),
        }
    }

    /// Nothing is asked for this claim any more; then it is withdrawn.
    pub(super) async fn leave(&self, claim: &Claim) -> Result<()> {
        if let Some(waiter) = self.waiters.remove(claim.id) {
            waiter.gone();
        }
        self.finish(claim, None).await.map(drop)
    }

    /// Removes whatever bears the id, hands on, and leaves a mark. Whether it held by this token.
    async fn finish(&self, claim: &Claim, token: Option<Token>) -> Result<bool> {
        let keys = self.keys(&claim.name);
        let names = self.declared([claim].into_iter());
        let token = token.map(|token| token.to_string()).unwrap_or_default();
        let args = [claim.id.to_string(), token, TOMBSTONE_LIFE.as_millis().to_string()];
        let answer = self.run_handing_on(&self.scripts.finish, &keys, &names, &args).await;
        let answer = answer.map_err(Unanswered::into_error)?;
        self.dirty().remove(&claim.id);
        Ok(word(list(&answer)?, 0)? == "released")
    }

    pub(super) async fn adopt(
        &self,
        claim: &Claim,
        grant: &Grant,
        successor: &Claim,
    ) -> Result<Grant> {
        let keys = self.keys(&claim.name);
        let mut names = self.declared([claim].into_iter());
        if self.nodes.by_slot() {
            names.extend(keys.others(successor.id).last().cloned());
        }
        let script = &self.scripts.adopt;
        let written = |up: &Up| {
            let mut command = script.call(names.len());
            command.arg(&names).arg(claim.id.to_string()).arg(grant.token.get());
            command.arg(successor.id.to_string());
            command.arg(keys::written_note(&successor.note, &up.inbox));
            command.arg(TOMBSTONE_LIFE.as_millis() as u64);
            command
        };
        let answer = self.run_as(PATIENCE, script, &keys, written).await;
        let answer = answer.map_err(Unanswered::into_error)?;
        match word(list(&answer)?, 0)?.as_str() {
            "done" => Ok(Grant { key: Vec::new(), ..grant.clone() }),
            "gone" => Err(Error::NotHeld { name: claim.name.clone() }),
            _ => Err(Error::lost(&claim.name, LossReason::Forgotten)),
        }
    }

    pub(super) async fn amend(
        &self,
        claim: &Claim,
        grant: &Grant,
        what: &str,
        to: &str,
    ) -> Result<()> {
        let keys = self.keys(&claim.name);
        let names = self.declared([claim].into_iter());
        let args = [claim.id.to_string(), grant.token.to_string(), what.to_owned(), to.to_owned()];
        let answer = self.run_handing_on(&self.scripts.amend, &keys, &names, &args).await;
        match word(list(&answer.map_err(Unanswered::into_error)?)?, 0)?.as_str() {
            "done" => Ok(()),
            _ => Err(Error::lost(&claim.name, LossReason::Forgotten)),
        }
    }

    /// Where a holder of this claim's name can be told.
    pub(super) async fn inbox_of(&self, claim: &Claim) -> Result<String> {
        let keys = self.keys(&claim.name);
        let inbox = async {
            let (node, left) = self.way(&keys, PATIENCE)?.node().await?;
            node.link.up(left).await.map(|up| up.inbox.clone())
        };
        inbox.await.map_err(Unanswered::into_error)
    }
}

fn renewed(claim: &Claim, grant: &Grant, sent: Moment, answer: &Value) -> Result<Grant> {
    match word(list(answer)?, 0)?.as_str() {
        "renewed" => {
            let valid_until = trusted_until(sent, claim.ttl);
            Ok(Grant { valid_until: valid_until.max(grant.valid_until), ..grant.clone() })
        }
        "revoked" => Err(Error::lost(&claim.name, LossReason::Revoked)),
        "failed" => {
            let why = word(list(answer)?, 1)?;
            // Of the wrong type: somebody wrote something else in its place.
            match why.contains("WRONGTYPE") {
                true => Err(Error::lost(&claim.name, LossReason::Forgotten)),
                false => Err(link::told(&why)),
            }
        }
        _ => Err(Error::lost(&claim.name, LossReason::Forgotten)),
    }
}

fn clash(used: &str, claim: &Claim) -> String {
    let used = match used.split_once(':') {
        Some((_, limit)) => format!("a semaphore of {limit} permits"),
        None => "a lock".to_owned(),
    };
    match claim.mode {
        Mode::Permits { limit, .. } => {
            format!("it is in use as {used}, not as a semaphore of {limit} permits")
        }
        Mode::Exclusive | Mode::Shared => format!("it is in use as {used}, not as a lock"),
    }
}

pub(super) fn check_token(token: Token) -> Result<()> {
    if token < Token::new(TOKENS_END) {
        return Ok(());
    }
    Err(Error::invalid("token", &token.to_string(), "on Redis tokens are below 2^53"))
}

fn first_of(values: &[Value]) -> Result<&Value> {
    values.first().ok_or_else(|| answers::unexpected("no answer"))
}
