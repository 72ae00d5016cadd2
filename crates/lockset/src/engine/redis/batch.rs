//! Requests that travel together, in one script: see `crate::engine::common::batch`.
//!
//! Together they get the usual case only; one whose lock is not as expected then goes alone.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::runtime::Handle;

use super::keys::{self, Keys};
use super::link::{Answer, Unanswered, Up, failed};
use super::scripts::Script;
use super::waiting::Waiter;
use super::{BATCH, PATIENCE};
use crate::engine::common::batch::{Batcher, Entered, Transport};
use crate::engine::{Claim, ClaimId, Mode};
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
}

impl Claim {
    /// What the usual case can take. It leaves the token to the fence until the first renewal
    /// writes it down, and a fixed lease has none.
    pub(super) fn is_plain(&self) -> bool {
        self.mode == Mode::Exclusive && !self.fixed
    }
}

/// What became of the lock to give back and of the one to take.
type Both = (Option<Value>, Option<Value>);
pub(super) type Acted = Result<Both, Unanswered>;

impl Up {
    /// Sends a request, alone or with others.
    pub(super) async fn act(self: &Arc<Self>, request: &Arc<Request>, patience: Duration) -> Acted {
        let is_counted = request.is_both() && self.scripts.has_courtesy;
        if !self.in_crowds || is_counted || !request.is_usual() {
            return Box::pin(self.act_alone(request, patience)).await;
        }
        let behind = match Batcher::enter(self, request) {
            Entered::Alone(_turn) => return Box::pin(self.act_alone(request, patience)).await,
            Entered::Behind(behind) => behind,
        };
        let answer = match patience < PATIENCE {
            true => Box::pin(tokio::time::timeout(patience, behind.answer())).await.ok().flatten(),
            // The one who leads is not more patient than that.
            false => behind.answer().await,
        };
        match answer {
            // Not the usual case.
            Some(Ok((Some(Value::Nil), _) | (None, Some(Value::Nil)))) => {
                Box::pin(self.act_alone(request, patience)).await
            }
            // Given back already; the next asks for itself.
            Some(Ok((given, Some(Value::Nil)))) => Ok((given, None)),
            Some(acted) => acted,
            // Perhaps sent, perhaps not.
            None => {
                let what = format!("no answer within {patience:.1?}");
                Err(Unanswered::Unknown(failed(what, true, None)))
            }
        }
    }

    async fn act_alone(&self, request: &Request, patience: Duration) -> Acted {
        let (script, command) = self.written(request);
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
    fn written(&self, request: &Request) -> (&Script, Cmd) {
        let (keys, scripts) = (&request.keys, &self.scripts);
        // A cluster must know all keys: see `Core::declared`.
        let mut others = match (self.in_crowds, request.claim()) {
            (false, Some(id)) => keys.others(id).to_vec(),
            _ => Vec::new(),
        };
        if !self.in_crowds && scripts.has_courtesy {
            others.push(keys.handoffs());
        }
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
            command
                .arg(keys::written(claim, waiter.leases, self.floor, &self.inbox))
                .arg(u8::from(*waits));
        }
        if let Some(Give { id, token, ttl, note }) = &request.give {
            command.arg(self.value(&mut text, *id, *ttl, note.as_ref()));
            command.arg(id.to_string()).arg(token.get());
            if request.take.is_none() {
                command.arg(self.floor);
            }
        }
        if let Some(floor) = request.take.as_ref().and_then(|take| take.waiter.claim.floor) {
            command.arg(floor.get());
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

    /// The command, as `batch.lua` reads it.
    fn written_together(&self, requests: &[Arc<Request>]) -> Cmd {
        let script = &self.scripts.batch;
        let gives = || both_first(requests).filter_map(|one| Some((one, one.give.as_ref()?)));
        let takes = || both_first(requests).filter_map(|one| Some((one, one.take.as_ref()?)));
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

impl Transport for Up {
    type Request = Arc<Request>;
    type Answer = Both;
    type Failed = Unanswered;

    fn batch(&self) -> &Batcher<Self> {
        &self.batch
    }

    fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// All that take something have the same ttl.
    fn goes_with(&self, leaving: &[Arc<Request>], request: &Arc<Request>) -> bool {
        let ttl = |one: &Request| one.take.as_ref().map(|take| take.waiter.claim.ttl);
        let theirs = || leaving.iter().find_map(|one| ttl(one));
        leaving.len() < BATCH
            && ttl(request).is_none_or(|own| theirs().is_none_or(|theirs| theirs == own))
    }

    async fn send(&self, requests: Vec<Arc<Request>>) -> Result<Vec<Both>, Unanswered> {
        let command = self.written_together(&requests);
        let mut connection = self.connection.clone();
        let running = self.scripts.batch.run(&command, &mut connection);
        match self.answer(PATIENCE, running).await {
            // Perhaps for the sake of one of them, such as a name that the user may not touch: each
            // goes alone, as if it were not the usual case.
            Err(Unanswered::Refused(error)) if !error.is_retryable() => {
                let nothing = |wanted: bool| wanted.then_some(Value::Nil);
                let each = requests.iter();
                Ok(each
                    .map(|it| (nothing(it.give.is_some()), nothing(it.take.is_some())))
                    .collect())
            }
            answer => told_apart(&requests, answer),
        }
    }

    fn again(failed: &Unanswered) -> Unanswered {
        failed.again()
    }

    fn silence(failed: &Unanswered) -> Option<Unanswered> {
        matches!(failed, Unanswered::Unknown(_)).then(|| failed.again())
    }
}

/// The order in which `batch.lua` reads requests and answers them.
fn both_first(requests: &[Arc<Request>]) -> impl Iterator<Item = &Arc<Request>> {
    let both = requests.iter().filter(|request| request.is_both());
    both.chain(requests.iter().filter(|request| !request.is_both()))
}

/// The answers, back in the order of the requests.
fn told_apart(requests: &[Arc<Request>], answer: Answer) -> Result<Vec<Both>, Unanswered> {
    let Value::Array(answers) = answer? else {
        let what = "the server answered something unexpected".to_owned();
        return Err(Unanswered::Unknown(failed(what, false, None)));
    };
    let both = requests.iter().filter(|request| request.is_both()).count();
    let given = requests.iter().filter(|request| request.give.is_some()).count();
    let mut answers = answers.into_iter();
    let mut part = |count| answers.by_ref().take(count).collect::<Vec<_>>().into_iter();
    let (mut both_given, mut given, mut both_taken) = (part(both), part(given - both), part(both));
    let each = |request: &Arc<Request>| match (&request.give, &request.take) {
        (Some(_), Some(_)) => (both_given.next(), both_taken.next()),
        (Some(_), None) => (given.next(), None),
        (None, _) => (None, answers.next()),
    };
    Ok(requests.iter().map(each).collect())
}

#[cfg(test)]
mod tests {
    use super::super::waiting::Waiters;
    use super::*;

    /// As `batch.lua` answers: the locks given back, those of requests for both first, then those
    /// taken, likewise. Here each by the letter of its request, small if it is given back.
    #[test]
    fn every_request_gets_its_own_answers_whatever_came_before_it() {
        let ttl = Duration::from_secs(9);
        let waiters = Waiters::new(ttl);
        let request = |name: &str, gives: bool, takes: bool| {
            let claim = Claim::plain(name, ttl);
            let give = Give { id: claim.id, token: Token::new(1), ttl, note: None };
            let keys = Keys::new("", &claim.name);
            let take = Take { waiter: waiters.enter(&claim), waits: true };
            Arc::new(Request { keys, give: gives.then_some(give), take: takes.then_some(take) })
        };
        let requests = [
            request("a", true, false),
            request("b", false, true),
            request("c", true, true),
            request("d", false, true),
            request("e", true, false),
            request("f", true, true),
        ];
        let text = |letter: &str| Value::SimpleString(letter.to_owned());
        let answers = ["c", "f", "a", "e", "C", "F", "B", "D"].map(text);
        let order = both_first(&requests).map(|one| one.keys.lock()).collect::<String>();
        assert_eq!(order, "cfabde");
        let told = told_apart(&requests, Ok(Value::Array(answers.to_vec()))).ok().unwrap();
        let expected = [("a", ""), ("", "B"), ("c", "C"), ("", "D"), ("e", ""), ("f", "F")];
        let some = |letter: &str| (!letter.is_empty()).then(|| text(letter));
        assert_eq!(told, expected.map(|(given, taken)| (some(given), some(taken))));
    }
}
