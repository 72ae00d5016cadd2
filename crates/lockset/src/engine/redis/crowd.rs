//! Requests that travel together.
//!
//! A request that finds its connection idle goes alone, at once. Those that come while it is under
//! way wait for each other, and leave in one script when it is back: a crowd costs the server
//! little more than its commands. Together they get the usual case only; one whose lock is not as
//! expected then goes alone.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::sync::oneshot;

use super::keys::{self, Keys};
use super::link::{Answer, Unanswered, Up, failed};
use super::scripts::{Script, Scripts};
use super::waiting::Waiter;
use super::{BATCH, PATIENCE};
use crate::engine::{Claim, ClaimId, Mode};
use crate::mutual::unpoisoned;
use crate::name::Note;
use crate::token::Token;

/// A lock to give back, a lock to take, or both of one name: then it is taken only if it was given
/// back.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) keys: Keys,
    pub(super) give: Option<Give>,
    pub(super) take: Option<Take>,
}

/// A lock to give back.
#[derive(Debug)]
pub(super) struct Give {
    pub(super) id: ClaimId,
    pub(super) token: Token,
    pub(super) ttl: Duration,
    /// What is in its value, if that may still be as it was written.
    pub(super) note: Option<Note>,
}

/// A lock to take.
#[derive(Debug)]
pub(super) struct Take {
    pub(super) waiter: Arc<Waiter>,
    pub(super) waits: bool,
}

impl Request {
    /// Whether the usual case may be enough for it.
    fn is_usual(&self) -> bool {
        self.give.as_ref().is_none_or(|give| give.note.is_some())
            && self.take.as_ref().is_none_or(|take| take.waiter.claim.is_plain())
    }

    /// The claim that it is about.
    fn claim(&self) -> Option<ClaimId> {
        let taken = self.take.as_ref().map(|take| take.waiter.claim.id);
        taken.or(self.give.as_ref().map(|give| give.id))
    }

    fn is_both(&self) -> bool {
        self.give.is_some() && self.take.is_some()
    }

    /// Whether those to take have the same ttl, if both take something.
    fn goes_with(&self, other: &Self) -> bool {
        let (Some(one), Some(other)) = (&self.take, &other.take) else { return true };
        one.waiter.claim.ttl == other.waiter.claim.ttl
    }
}

impl Claim {
    /// What the usual case can take.
    fn is_plain(&self) -> bool {
        self.mode == Mode::Exclusive
    }
}

/// What became of the lock to give back and of the one to take.
type Both = (Option<Value>, Option<Value>);
pub(super) type Acted = Result<Both, Unanswered>;

/// The requests that wait for the one under way.
#[derive(Debug)]
pub(super) struct Crowd {
    /// Keys of different slots cannot travel together in a cluster.
    allowed: bool,
    line: Mutex<Line>,
}

#[derive(Debug, Default)]
struct Line {
    under_way: bool,
    waiting: Vec<Waiting>,
}

type Waiting = (Arc<Request>, oneshot::Sender<Acted>);

impl Crowd {
    pub(super) fn new(allowed: bool) -> Self {
        Self { allowed, line: Mutex::default() }
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        unpoisoned(&self.line)
    }
}

impl Line {
    /// Those who can leave together now, requests for both first.
    fn leave(&mut self) -> Vec<Waiting> {
        let (mut leaving, mut staying): (Vec<Waiting>, Vec<Waiting>) = Default::default();
        let mut first = None;
        for (request, tell) in self.waiting.drain(..) {
            let first = first.get_or_insert_with(|| request.clone());
            if leaving.len() >= BATCH || !first.goes_with(&request) {
                staying.push((request, tell));
            } else if !tell.is_closed() {
                // The first that takes something says the ttl of all.
                if first.take.is_none() {
                    *first = request.clone();
                }
                leaving.push((request, tell));
            }
        }
        self.waiting = staying;
        if leaving.iter().any(|(request, _)| request.is_both()) {
            leaving.sort_by_key(|(request, _)| !request.is_both());
        }
        leaving
    }
}

impl Up {
    /// Sends a request, alone or with others.
    pub(super) async fn act(
        self: &Arc<Self>,
        scripts: &Arc<Scripts>,
        request: &Arc<Request>,
        patience: Duration,
    ) -> Acted {
        if !self.crowd.allowed || !request.is_usual() {
            return Box::pin(self.act_alone(scripts, request, patience)).await;
        }
        let answer = {
            let mut line = self.crowd.line();
            if line.under_way {
                let (tell, answer) = oneshot::channel();
                line.waiting.push((request.clone(), tell));
                Some(answer)
            } else {
                line.under_way = true;
                None
            }
        };
        let Some(answer) = answer else {
            let _turn = Turn { up: self, scripts };
            return Box::pin(self.act_alone(scripts, request, patience)).await;
        };
        let answer = match patience < PATIENCE {
            true => Box::pin(tokio::time::timeout(patience, answer)).await.ok(),
            // The one who leads is not more patient than that.
            false => Some(answer.await),
        };
        match answer {
            // Not the usual case.
            Some(Ok(Ok((Some(Value::Nil), _) | (None, Some(Value::Nil))))) => {
                Box::pin(self.act_alone(scripts, request, patience)).await
            }
            // Given back already; the next asks for itself.
            Some(Ok(Ok((given, Some(Value::Nil))))) => Ok((given, None)),
            Some(Ok(acted)) => acted,
            // Perhaps sent, perhaps not.
            _ => {
                let what = format!("no answer within {patience:.1?}");
                Err(Unanswered::Unknown(failed(what, true, None)))
            }
        }
    }

    async fn act_alone(&self, scripts: &Scripts, request: &Request, patience: Duration) -> Acted {
        let (script, command) = self.written(scripts, request);
        let mut connection = self.connection.clone();
        let answer = self.answer(patience, script.run(&command, &mut connection)).await?;
        Ok(match (&request.give, &request.take, answer) {
            (Some(_), None, answer) => (Some(answer), None),
            (None, _, answer) => (None, Some(answer)),
            (Some(_), Some(_), Value::Array(both)) => {
                let mut both = both.into_iter();
                (both.next(), both.next())
            }
            (Some(_), Some(_), other) => (Some(other), None),
        })
    }

    /// The command of a request that goes alone, as `take.lua`, `give.lua` and `pass.lua` read it.
    fn written<'s>(&self, scripts: &'s Scripts, request: &Request) -> (&'s Script, Cmd) {
        let keys = &request.keys;
        // A cluster must know all keys: see `Core::declared`.
        let others = match (self.crowd.allowed, request.claim()) {
            (false, Some(id)) => keys.others(id).to_vec(),
            _ => Vec::new(),
        };
        let (script, count) = match (&request.give, &request.take) {
            (Some(_), None) => (&scripts.give, 2),
            (None, _) => (&scripts.take, 3),
            (Some(_), Some(_)) => (&scripts.pass, 3),
        };
        let mut command = script.call(count + others.len());
        let mut text = String::with_capacity(256);
        command.arg(keys.lock());
        if request.take.is_some() {
            command.arg(keys.beside_in(&mut text, "fence"));
        }
        command.arg(keys.beside_in(&mut text, "queue")).arg(&others);
        if let Some(Take { waiter, waits }) = &request.take {
            let claim = &waiter.claim;
            let note = claim.is_plain().then_some(&claim.note);
            command.arg(self.value(&mut text, claim.id, claim.ttl, note));
            command.arg(claim.ttl.as_millis() as u64).arg(self.floor).arg(claim.id.to_string());
            command.arg(keys::written(claim, self.floor, &self.inbox)).arg(u8::from(*waits));
            // One that also gives back has none.
            if let (Some(floor), None) = (claim.floor, &request.give) {
                command.arg(floor.get());
            }
        }
        if let Some(Give { id, token, ttl, note }) = &request.give {
            command.arg(self.value(&mut text, *id, *ttl, note.as_ref()));
            command.arg(id.to_string()).arg(token.get());
        }
        (script, command)
    }

    /// The value of a mutex that was just taken; nothing if it is not one.
    fn value<'t>(
        &self,
        text: &'t mut String,
        id: ClaimId,
        ttl: Duration,
        note: Option<&Note>,
    ) -> &'t str {
        text.clear();
        if let Some(note) = note {
            keys::write_value(text, id, ttl, note, &self.inbox);
        }
        text
    }

    /// Runs `crowd.lua` for these requests. One answer for each, in their order.
    async fn send(
        &self,
        script: &Script,
        requests: &[Arc<Request>],
    ) -> Result<Vec<Both>, Unanswered> {
        let command = self.written_together(script, requests);
        let mut connection = self.connection.clone();
        sorted(requests, self.answer(PATIENCE, script.run(&command, &mut connection)).await)
    }

    /// The command, as `crowd.lua` reads it.
    fn written_together(&self, script: &Script, requests: &[Arc<Request>]) -> Cmd {
        let gives = || requests.iter().filter_map(|one| one.give.as_ref().map(|give| (one, give)));
        let takes = || requests.iter().filter_map(|one| one.take.as_ref().map(|take| (one, take)));
        let (given, taken) = (gives().count(), takes().count());
        let mut command = script.call(given + 3 * taken);
        for (one, _) in gives() {
            command.arg(one.keys.lock());
        }
        for (one, _) in takes() {
            command.arg(one.keys.lock());
        }
        let mut text = String::with_capacity(256);
        for (one, _) in takes() {
            command.arg(one.keys.beside_in(&mut text, "fence"));
        }
        for (one, _) in takes() {
            command.arg(one.keys.beside_in(&mut text, "queue"));
        }
        let both = requests.iter().filter(|request| request.is_both()).count();
        let ttl = takes().next().map_or(Duration::ZERO, |(_, take)| take.waiter.claim.ttl);
        let numbers = [given as u64, taken as u64, both as u64, ttl.as_millis() as u64];
        command.arg(self.floor).arg(&numbers);
        for (_, Give { id, ttl, note, .. }) in gives() {
            command.arg(self.value(&mut text, *id, *ttl, note.as_ref()));
        }
        for (_, Take { waiter, .. }) in takes() {
            let Claim { id, ttl, note, .. } = &waiter.claim;
            command.arg(self.value(&mut text, *id, *ttl, Some(note)));
        }
        if takes().any(|(_, take)| take.waiter.claim.floor.is_some()) {
            for (_, take) in takes() {
                let own = take.waiter.claim.floor.map(|floor| floor.to_string());
                command.arg(own.unwrap_or_default());
            }
        }
        command
    }
}

/// One whose request is under way alone. Those who came meanwhile leave when it is back.
struct Turn<'a> {
    up: &'a Arc<Up>,
    scripts: &'a Arc<Scripts>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut line = self.up.crowd.line();
        if line.waiting.is_empty() {
            line.under_way = false;
            return;
        }
        drop(line);
        let leading = Leading { up: self.up.clone(), nobody_waits: false };
        self.up.runtime.spawn(lead(leading, self.scripts.clone()));
    }
}

/// The one who leads the crowd. If it ends early, because its runtime does, nobody waits in vain.
struct Leading {
    up: Arc<Up>,
    nobody_waits: bool,
}

impl Drop for Leading {
    fn drop(&mut self) {
        if !self.nobody_waits {
            let mut line = self.up.crowd.line();
            line.under_way = false;
            line.waiting.clear();
        }
    }
}

/// Sends all who wait, together, until nobody does.
async fn lead(mut leading: Leading, scripts: Arc<Scripts>) {
    let up = leading.up.clone();
    loop {
        let (requests, tell): (Vec<_>, Vec<_>) = {
            let mut line = up.crowd.line();
            if line.waiting.is_empty() {
                line.under_way = false;
                leading.nobody_waits = true;
                return;
            }
            line.leave().into_iter().unzip()
        };
        if requests.is_empty() {
            continue;
        }
        match up.send(&scripts.crowd, &requests).await {
            Ok(answers) => tell.into_iter().zip(answers).for_each(|(tell, answer)| {
                let _ = tell.send(Ok(answer));
            }),
            Err(why) => {
                tell.into_iter().for_each(|tell| {
                    let _ = tell.send(Err(why.again()));
                });
                // Those who still wait would wait as long again.
                if matches!(why, Unanswered::Unknown(_)) {
                    return;
                }
            }
        }
        // Those who were just answered may have the next request ready at once.
        tokio::task::yield_now().await;
    }
}

/// The answers, back in the order of the requests.
fn sorted(requests: &[Arc<Request>], answer: Answer) -> Result<Vec<Both>, Unanswered> {
    let Value::Array(answers) = answer? else {
        let what = "the server answered something unexpected".to_owned();
        return Err(Unanswered::Unknown(failed(what, false, None)));
    };
    let given = requests.iter().filter(|request| request.give.is_some()).count();
    let mut answers = answers.into_iter();
    let gives: Vec<Value> = answers.by_ref().take(given).collect();
    let mut gives = gives.into_iter();
    let each = |request: &Arc<Request>| {
        let give = request.give.as_ref().and_then(|_| gives.next());
        let take = request.take.as_ref().and_then(|_| answers.next());
        (give, take)
    };
    Ok(requests.iter().map(each).collect())
}
