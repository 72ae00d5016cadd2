//! Requests to release and to acquire locks, alone or in one script: see
//! `crate::engine::common::batch`.
//!
//! The batch script only has the fast path. A request whose lock is not as expected is then sent
//! alone.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::runtime::Handle;

use super::connection::RedisConnection;
use super::error::{RedisReply, RedisRequestError, unreachable_error};
use super::keys::RedisKeys;
use super::record;
use super::scripts::Script;
use super::waiters::RedisWaiter;
use super::{MAX_BATCH, REQUEST_TIMEOUT, RedisShortcuts};
use crate::engine::common::batch::{Batcher, Entered, Transport};
use crate::engine::{Claim, ClaimId, Mode};
use crate::name::Note;
use crate::token::Token;

/// A release, an acquisition, or both for one name: a hand-over. The acquisition of a hand-over
/// only happens if the lock was released.
#[derive(Debug)]
pub(super) struct RedisRequest {
    pub(super) keys: RedisKeys,
    pub(super) release: Option<ReleasePart>,
    pub(super) acquire: Option<AcquirePart>,
}

#[derive(Debug)]
pub(super) struct ReleasePart {
    pub(super) id: ClaimId,
    pub(super) token: Token,
    pub(super) ttl: Duration,
    /// The note in the stored value, if that may still be as the fast path wrote it.
    pub(super) note: Option<Note>,
}

#[derive(Debug)]
pub(super) struct AcquirePart {
    pub(super) waiter: Arc<RedisWaiter>,
    pub(super) waits: bool,
}

impl RedisRequest {
    /// Whether the fast path may be enough for it.
    fn has_fast_path(&self) -> bool {
        self.release.as_ref().is_none_or(|release| release.note.is_some())
            && self.acquire.as_ref().is_none_or(|acquire| acquire.waiter.claim.has_fast_path())
    }

    /// The claim whose tombstone the script looks for.
    fn claim(&self) -> Option<ClaimId> {
        let acquired = self.acquire.as_ref().map(|acquire| acquire.waiter.claim.id);
        acquired.or(self.release.as_ref().map(|release| release.id))
    }

    fn is_handover(&self) -> bool {
        self.release.is_some() && self.acquire.is_some()
    }
}

impl Claim {
    /// Whether the fast path can acquire it. The fast path does not store the token: the fence is
    /// the token until the first renewal stores it. A fixed lease has no renewal.
    pub(super) fn has_fast_path(&self) -> bool {
        self.mode == Mode::Exclusive && !self.fixed
    }
}

/// The replies to the release and to the acquisition.
type RequestReplies = (Option<Value>, Option<Value>);
pub(super) type RequestResult = Result<RequestReplies, RedisRequestError>;

impl RedisConnection {
    /// Sends a request, alone or in a batch.
    pub(super) async fn send_request(
        self: &Arc<Self>,
        request: &Arc<RedisRequest>,
        timeout: Duration,
    ) -> RequestResult {
        // Courtesy must know since when a lock is handed over, which the fast path does not store.
        let needs_run = request.is_handover() && self.scripts.has_courtesy;
        let shortcuts = self.scripts.shortcuts;
        if !(self.can_batch && shortcuts.batches && shortcuts.fast_paths)
            || needs_run
            || !request.has_fast_path()
        {
            return Box::pin(self.send_alone(request, timeout)).await;
        }
        let behind = match Batcher::enter(self, request) {
            Entered::Alone(_turn) => return Box::pin(self.send_alone(request, timeout)).await,
            Entered::Behind(behind) => behind,
        };
        let result = match timeout < REQUEST_TIMEOUT {
            true => Box::pin(tokio::time::timeout(timeout, behind.answer())).await.ok().flatten(),
            // The batch has this timeout itself.
            false => behind.answer().await,
        };
        match result {
            // The fast path was not enough.
            Some(Ok((Some(Value::Nil), _) | (None, Some(Value::Nil)))) => {
                Box::pin(self.send_alone(request, timeout)).await
            }
            // Released; the next claim sends its own request.
            Some(Ok((released, Some(Value::Nil)))) => Ok((released, None)),
            Some(result) => result,
            // It may have been sent.
            None => {
                let what = format!("no answer within {timeout:.1?}");
                Err(RedisRequestError::Unknown(unreachable_error(what, true, None)))
            }
        }
    }

    async fn send_alone(&self, request: &RedisRequest, timeout: Duration) -> RequestResult {
        let (script, command) = self.command(request);
        let mut multiplexed = self.multiplexed.clone();
        let reply = self.await_reply(timeout, script.run(&command, &mut multiplexed)).await?;
        Ok(match (&request.release, &request.acquire, reply) {
            (Some(_), None, reply) => (Some(reply), None),
            (None, _, reply) => (None, Some(reply)),
            (Some(_), Some(_), Value::Array(both)) => {
                let mut both = both.into_iter();
                (both.next(), both.next())
            }
            (Some(_), Some(_), other) => (Some(other), None),
        })
    }

    /// The command for one request, as `acquire_fast.lua`, `release_fast.lua` and
    /// `handover_fast.lua` read it.
    fn command(&self, request: &RedisRequest) -> (&Script, Cmd) {
        let (keys, scripts) = (&request.keys, &self.scripts);
        // A cluster must know all keys: see `RedisCore::declared_keys`.
        let mut others = match (self.can_batch, request.claim()) {
            (false, Some(id)) => keys.others(id).to_vec(),
            _ => Vec::new(),
        };
        if !self.can_batch && scripts.has_courtesy {
            others.push(keys.handoffs());
        }
        let (script, count) = match (&request.release, &request.acquire) {
            (Some(_), None) => (&scripts.release, 2),
            (None, _) => (&scripts.acquire, 3),
            (Some(_), Some(_)) => (&scripts.handover, 3),
        };
        let mut command = script.call(count + others.len());
        let mut buffer = String::with_capacity(256);
        command.arg(keys.lock());
        if request.acquire.is_some() {
            command.arg(keys.write_aux_key(&mut buffer, "fence"));
        }
        command.arg(keys.write_aux_key(&mut buffer, "queue")).arg(&others);
        if let Some(AcquirePart { waiter, waits }) = &request.acquire {
            let (claim, connected_at) = (&waiter.claim, self.connected_at_us);
            let note = claim.has_fast_path().then_some(&claim.note);
            command.arg(self.fresh_value(&mut buffer, claim.id, None, claim.ttl, note));
            command.arg(claim.ttl.as_millis() as u64).arg(connected_at).arg(claim.id.to_string());
            command
                .arg(record::encode_claim(claim, waiter.leases, connected_at, &self.inbox))
                .arg(u8::from(*waits));
        }
        if let Some(ReleasePart { id, token, ttl, note }) = &request.release {
            command.arg(self.fresh_value(&mut buffer, *id, Some(*token), *ttl, note.as_ref()));
            command.arg(id.to_string()).arg(token.get());
            if request.acquire.is_none() {
                command.arg(self.connected_at_us);
            }
        }
        let acquire = request.acquire.as_ref();
        if let Some(floor) = acquire.and_then(|acquire| acquire.waiter.claim.floor) {
            command.arg(floor.get());
        }
        (script, command)
    }

    /// The value of a mutex as the fast path stores it; empty without a note.
    fn fresh_value<'t>(
        &self,
        buffer: &'t mut String,
        id: ClaimId,
        token: Option<Token>,
        ttl: Duration,
        note: Option<&Note>,
    ) -> &'t str {
        let RedisShortcuts { fast_paths, late_tokens, .. } = self.scripts.shortcuts;
        buffer.clear();
        if let Some(note) = note.filter(|_| fast_paths) {
            let token = token.filter(|_| !late_tokens);
            record::encode_fresh_value(buffer, id, token, ttl, note, &self.inbox);
        }
        buffer
    }

    /// The command for a batch, as `batch.lua` reads it.
    fn batch_command(&self, requests: &[Arc<RedisRequest>]) -> Cmd {
        let script = &self.scripts.batch;
        let releases =
            || handovers_first(requests).filter_map(|one| Some((one, one.release.as_ref()?)));
        let acquires =
            || handovers_first(requests).filter_map(|one| Some((one, one.acquire.as_ref()?)));
        let (released, acquired) = (releases().count(), acquires().count());
        let mut command = script.call(released + 3 * acquired);
        for (one, _) in releases() {
            command.arg(one.keys.lock());
        }
        for (one, _) in acquires() {
            command.arg(one.keys.lock());
        }
        let mut buffer = String::with_capacity(256);
        for (one, _) in acquires() {
            command.arg(one.keys.write_aux_key(&mut buffer, "fence"));
        }
        for (one, _) in acquires() {
            command.arg(one.keys.write_aux_key(&mut buffer, "queue"));
        }
        let handovers = requests.iter().filter(|request| request.is_handover()).count();
        let ttl = acquires().next().map_or(Duration::ZERO, |(_, one)| one.waiter.claim.ttl);
        let numbers = [released as u64, acquired as u64, handovers as u64, ttl.as_millis() as u64];
        command.arg(self.connected_at_us).arg(&numbers);
        for (_, ReleasePart { id, token, ttl, note }) in releases() {
            command.arg(self.fresh_value(&mut buffer, *id, Some(*token), *ttl, note.as_ref()));
        }
        for (_, AcquirePart { waiter, .. }) in acquires() {
            let Claim { id, ttl, note, .. } = &waiter.claim;
            command.arg(self.fresh_value(&mut buffer, *id, None, *ttl, Some(note)));
        }
        if acquires().any(|(_, acquire)| acquire.waiter.claim.floor.is_some()) {
            for (_, acquire) in acquires() {
                let floor = acquire.waiter.claim.floor.map(|floor| floor.to_string());
                command.arg(floor.unwrap_or_default());
            }
        }
        command
    }
}

impl Transport for RedisConnection {
    type Request = Arc<RedisRequest>;
    type Answer = RequestReplies;
    type Failed = RedisRequestError;

    fn batch(&self) -> &Batcher<Self> {
        &self.batcher
    }

    fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// All acquisitions of a batch have the same ttl.
    fn goes_with(&self, leaving: &[Arc<RedisRequest>], request: &Arc<RedisRequest>) -> bool {
        let ttl = |one: &RedisRequest| one.acquire.as_ref().map(|part| part.waiter.claim.ttl);
        let theirs = || leaving.iter().find_map(|one| ttl(one));
        leaving.len() < MAX_BATCH
            && ttl(request).is_none_or(|own| theirs().is_none_or(|theirs| theirs == own))
    }

    async fn send(
        &self,
        requests: Vec<Arc<RedisRequest>>,
    ) -> Result<Vec<RequestReplies>, RedisRequestError> {
        let command = self.batch_command(&requests);
        let mut multiplexed = self.multiplexed.clone();
        let running = self.scripts.batch.run(&command, &mut multiplexed);
        match self.await_reply(REQUEST_TIMEOUT, running).await {
            // One of them may be the cause, such as a name that the user may not touch. Send each
            // alone, as if the fast path were not enough.
            Err(RedisRequestError::Refused(error)) if !error.is_retryable() => {
                let nothing = |wanted: bool| wanted.then_some(Value::Nil);
                let each = requests.iter();
                Ok(each
                    .map(|one| (nothing(one.release.is_some()), nothing(one.acquire.is_some())))
                    .collect())
            }
            reply => split_replies(&requests, reply),
        }
    }

    fn silence(failed: &RedisRequestError) -> Option<RedisRequestError> {
        matches!(failed, RedisRequestError::Unknown(_)).then(|| failed.clone())
    }
}

/// The order in which `batch.lua` reads the requests.
fn handovers_first(requests: &[Arc<RedisRequest>]) -> impl Iterator<Item = &Arc<RedisRequest>> {
    let handovers = requests.iter().filter(|request| request.is_handover());
    handovers.chain(requests.iter().filter(|request| !request.is_handover()))
}

/// The replies of `batch.lua`, in the order of the requests.
fn split_replies(
    requests: &[Arc<RedisRequest>],
    reply: RedisReply,
) -> Result<Vec<RequestReplies>, RedisRequestError> {
    let Value::Array(replies) = reply? else {
        let what = "the server answered something unexpected".to_owned();
        return Err(RedisRequestError::Unknown(unreachable_error(what, false, None)));
    };
    let handovers = requests.iter().filter(|request| request.is_handover()).count();
    let releases = requests.iter().filter(|request| request.release.is_some()).count();
    let mut replies = replies.into_iter();
    let mut part = |count| replies.by_ref().take(count).collect::<Vec<_>>().into_iter();
    let mut handover_releases = part(handovers);
    let mut releases = part(releases - handovers);
    let mut handover_acquires = part(handovers);
    let each = |request: &Arc<RedisRequest>| match (&request.release, &request.acquire) {
        (Some(_), Some(_)) => (handover_releases.next(), handover_acquires.next()),
        (Some(_), None) => (releases.next(), None),
        (None, _) => (None, replies.next()),
    };
    Ok(requests.iter().map(each).collect())
}

#[cfg(test)]
mod tests {
    use super::super::waiters::RedisWaiters;
    use super::*;

    /// `batch.lua` replies to the releases, those of hand-overs first, then to the acquisitions,
    /// likewise. Here each reply is the name of its request, in lower case for a release.
    #[test]
    fn every_request_gets_its_own_replies_whatever_came_before_it() {
        let ttl = Duration::from_secs(9);
        let waiters = RedisWaiters::new(ttl);
        let request = |name: &str, releases: bool, acquires: bool| {
            let claim = Claim::plain(name, ttl);
            let release = ReleasePart { id: claim.id, token: Token::new(1), ttl, note: None };
            let acquire = AcquirePart { waiter: waiters.register(&claim), waits: true };
            Arc::new(RedisRequest {
                keys: RedisKeys::new("", &claim.name),
                release: releases.then_some(release),
                acquire: acquires.then_some(acquire),
            })
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
        let replies = ["c", "f", "a", "e", "C", "F", "B", "D"].map(text);
        let order = handovers_first(&requests).map(|one| one.keys.lock()).collect::<String>();
        assert_eq!(order, "cfabde");
        let split = split_replies(&requests, Ok(Value::Array(replies.to_vec()))).ok().unwrap();
        let expected = [("a", ""), ("", "B"), ("c", "C"), ("", "D"), ("e", ""), ("f", "F")];
        let some = |letter: &str| (!letter.is_empty()).then(|| text(letter));
        assert_eq!(split, expected.map(|(released, acquired)| (some(released), some(acquired))));
    }
}
