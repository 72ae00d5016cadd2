//! Requests that travel together.
//!
//! A request that finds its connection idle goes alone, at once. Those that come while it is under
//! way wait for each other, and leave in one script when it is back: a crowd costs the server
//! little more than its commands.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use redis::Value;
use tokio::sync::oneshot;

use super::link::{Answer, Unanswered, Up, failed};
use super::scripts::{Script, Scripts};
use super::{BATCH, PATIENCE};
use crate::mutual::unpoisoned;

/// A lock to give back, a lock to take, or both: then it is taken only if it was given back.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) give: Option<Give>,
    pub(super) take: Option<Take>,
}

impl Request {
    fn is_both(&self) -> bool {
        self.give.is_some() && self.take.is_some()
    }
}

/// A lock to give back.
#[derive(Debug)]
pub(super) struct Give {
    pub(super) lock: String,
    pub(super) queue: String,
    /// How the lock's value begins if it is ours: `id:token:`.
    pub(super) held: String,
}

/// A lock to take.
#[derive(Debug)]
pub(super) struct Take {
    pub(super) lock: String,
    pub(super) fence: String,
    pub(super) queue: String,
    pub(super) mark: String,
    pub(super) id: String,
    pub(super) ttl: String,
    /// What follows id and token in the value of a lock; empty if it is no plain mutex.
    pub(super) tail: String,
    /// The claim as `common.lua` reads it.
    pub(super) body: String,
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
    waiting: Vec<(Request, oneshot::Sender<Acted>)>,
}

impl Crowd {
    pub(super) fn new(allowed: bool) -> Self {
        Self { allowed, line: Mutex::default() }
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        unpoisoned(&self.line)
    }
}

impl Up {
    /// Sends a request, alone or with others.
    pub(super) async fn act(
        self: &Arc<Self>,
        scripts: &Arc<Scripts>,
        request: Request,
        patience: Duration,
    ) -> Acted {
        if !self.crowd.allowed {
            return alone(self.send(&scripts.act, std::slice::from_ref(&request), patience).await);
        }
        let answer = {
            let mut line = self.crowd.line();
            if line.under_way {
                let (tell, answer) = oneshot::channel();
                line.waiting.push((request, tell));
                Err(answer)
            } else {
                line.under_way = true;
                Ok(request)
            }
        };
        match answer {
            Ok(request) => {
                let _turn = Turn { up: self, scripts };
                alone(self.send(&scripts.act, std::slice::from_ref(&request), patience).await)
            }
            Err(answer) => match tokio::time::timeout(patience, answer).await {
                Ok(Ok(acted)) => acted,
                // Perhaps sent, perhaps not.
                _ => {
                    let what = format!("no answer within {patience:.1?}");
                    Err(Unanswered::Unknown(failed(what, true, None)))
                }
            },
        }
    }

    /// Runs `act.lua` for these requests. One answer for each, in their order.
    async fn send(
        &self,
        script: &Script,
        requests: &[Request],
        patience: Duration,
    ) -> Result<Vec<Both>, Unanswered> {
        let command = written(script, self.floor, requests);
        let mut connection = self.connection.clone();
        let sent = script.run(&command, &mut connection);
        sorted(requests, self.answer(patience, sent).await)
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
            let crowd = line.waiting.len().min(BATCH);
            let leaving = line.waiting.drain(..crowd);
            let mut leaving: Vec<_> = leaving.filter(|(_, tell)| !tell.is_closed()).collect();
            leaving.sort_by_key(|(request, _)| !request.is_both());
            leaving.into_iter().unzip()
        };
        if !requests.is_empty() {
            match up.send(&scripts.act, &requests, PATIENCE).await {
                Ok(answers) => tell.into_iter().zip(answers).for_each(|(tell, answer)| {
                    let _ = tell.send(Ok(answer));
                }),
                Err(why) => tell.into_iter().for_each(|tell| {
                    let _ = tell.send(Err(why.again()));
                }),
            }
            // Those who were just answered may have the next request ready at once.
            tokio::task::yield_now().await;
        }
    }
}

fn alone(answers: Result<Vec<Both>, Unanswered>) -> Acted {
    Ok(answers?.pop().unwrap_or_default())
}

/// The command, as `act.lua` reads it: all that is given back before all that is taken. Requests
/// for both come first.
fn written(script: &Script, floor: u64, requests: &[Request]) -> redis::Cmd {
    let gives = || requests.iter().filter_map(|request| request.give.as_ref());
    let takes = || requests.iter().filter_map(|request| request.take.as_ref());
    let (given, taken) = (gives().count(), takes().count());
    let mut command = script.call(2 * given + 4 * taken);
    let keys = gives().map(|give| &give.lock).chain(takes().map(|take| &take.lock));
    let keys = keys.chain(takes().map(|take| &take.fence));
    let keys = keys.chain(gives().map(|give| &give.queue)).chain(takes().map(|take| &take.queue));
    for key in keys.chain(takes().map(|take| &take.mark)) {
        command.arg(key);
    }
    let both = requests.iter().filter(|request| request.is_both()).count();
    command.arg(floor).arg(given).arg(both);
    for give in gives() {
        command.arg(&give.held);
    }
    for take in takes() {
        command.arg(&take.id).arg(&take.ttl).arg(&take.tail).arg(&take.body);
    }
    command
}

/// The answers, back in the order of the requests.
fn sorted(requests: &[Request], answer: Answer) -> Result<Vec<Both>, Unanswered> {
    let Value::Array(answers) = answer? else {
        let what = "the server answered something unexpected".to_owned();
        return Err(Unanswered::Unknown(failed(what, false, None)));
    };
    let given = requests.iter().filter(|request| request.give.is_some()).count();
    let mut answers = answers.into_iter();
    let mut gives: Vec<Value> = answers.by_ref().take(given).collect();
    gives.reverse();
    let each = |request: &Request| {
        let give = request.give.as_ref().and_then(|_| gives.pop());
        let take = request.take.as_ref().and_then(|_| answers.next());
        (give, take)
    };
    Ok(requests.iter().map(each).collect())
}
