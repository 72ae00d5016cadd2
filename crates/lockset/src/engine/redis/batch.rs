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
use super::text::{push_id, push_number};
use super::waiters::WaiterLeases;
use super::{MAX_BATCH, REQUEST_TIMEOUT};
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
    pub(super) claim: Claim,
    pub(super) leases: WaiterLeases,
    pub(super) waits: bool,
}

impl RedisRequest {
    /// Whether the fast path may be enough for it.
    fn has_fast_path(&self) -> bool {
        self.keys.follow_from_lock()
            && self.release.as_ref().is_none_or(|release| release.note.is_some())
            && self.acquire.as_ref().is_none_or(|acquire| acquire.claim.has_fast_path())
    }

    /// The claim whose tombstone the script looks for.
    fn claim(&self) -> Option<ClaimId> {
        let acquired = self.acquire.as_ref().map(|acquire| acquire.claim.id);
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
    /// Sends a request, alone or in a batch. Only a request that is sent alone can queue its claim:
    /// `before_alone` is called first.
    pub(super) async fn send_request(
        self: &Arc<Self>,
        request: &Arc<RedisRequest>,
        timeout: Duration,
        before_alone: &mut (impl FnMut() + Send),
    ) -> RequestResult {
        // Courtesy must know since when a lock is handed over, which the fast path does not store.
        let needs_run = request.is_handover() && self.scripts.has_courtesy;
        let shortcuts = self.scripts.shortcuts;
        if !(self.can_batch && shortcuts.batches && shortcuts.fast_paths)
            || needs_run
            || !request.has_fast_path()
        {
            before_alone();
            return Box::pin(self.send_alone(request, timeout)).await;
        }
        let behind = match Batcher::enter(self, request) {
            Entered::Alone(_turn) => {
                before_alone();
                return Box::pin(self.send_alone(request, timeout)).await;
            }
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
                before_alone();
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
        let others = self.other_keys(request);
        let script = match (&request.release, &request.acquire) {
            (Some(_), None) => &scripts.release,
            (None, _) => &scripts.acquire,
            (Some(_), Some(_)) => &scripts.handover,
        };
        let mut command = script.call(1 + others.len());
        command.arg(keys.lock()).arg(&others);
        let mut buffer = Vec::with_capacity(256);
        if let Some(acquire) = &request.acquire {
            self.add_acquire(&mut command, &mut buffer, acquire, request.is_handover());
        }
        if let Some(ReleasePart { id, token, ttl, note }) = &request.release {
            match note.as_ref().filter(|_| scripts.shortcuts.fast_paths) {
                Some(note) => self.write_value(&mut buffer, *id, Some(*token), *ttl, note),
                None => {
                    buffer.clear();
                    push_id(&mut buffer, *id);
                }
            }
            command.arg(&buffer);
            buffer.clear();
            push_number(&mut buffer, token.get());
            if request.acquire.is_none() {
                buffer.push(b'|');
                buffer.extend_from_slice(self.connected_at.as_bytes());
            }
            command.arg(&buffer);
        }
        (script, command)
    }

    /// The keys of a request that its script is told beside the lock: the queue, from which all
    /// others follow if they do not follow from the lock. A cluster must know them all: see
    /// `RedisCore::declared_keys`.
    fn other_keys(&self, request: &RedisRequest) -> Vec<String> {
        let keys = &request.keys;
        if self.can_batch && keys.follow_from_lock() {
            return Vec::new();
        }
        let mut others = vec![keys.queue()];
        if let (false, Some(id)) = (self.can_batch, request.claim()) {
            others.extend(keys.others(id));
            others.extend(self.scripts.has_courtesy.then(|| keys.handoffs()));
        }
        others
    }

    /// The arguments of `acquire_fast.lua`. In a hand-over others follow, so that none is left out.
    fn add_acquire(
        &self,
        command: &mut Cmd,
        buffer: &mut Vec<u8>,
        AcquirePart { claim, leases, waits }: &AcquirePart,
        is_handover: bool,
    ) {
        let is_fast = claim.has_fast_path() && self.scripts.shortcuts.fast_paths;
        if is_fast {
            self.write_value(buffer, claim.id, None, claim.ttl, &claim.note);
            command.arg(&*buffer);
            command.arg(number(buffer, claim.ttl.as_millis() as u64));
        } else {
            buffer.clear();
            push_id(buffer, claim.id);
            command.arg("").arg(&*buffer);
        }
        buffer.clear();
        buffer.extend_from_slice(self.connected_at.as_bytes());
        buffer.extend_from_slice(if *waits { b"|1|" } else { b"|0|" });
        push_number(buffer, leases.entry.as_millis() as u64);
        buffer.push(b'|');
        push_number(buffer, leases.first.as_millis() as u64);
        command.arg(&*buffer);
        match claim.floor {
            _ if !is_fast => {
                let body = record::encode_claim(claim, *leases, self.connected_at_us, &self.inbox);
                command.arg(body);
            }
            Some(floor) => drop(command.arg(number(buffer, floor.get()))),
            None if is_handover => drop(command.arg("")),
            None => {}
        }
    }

    /// Writes the value of a mutex as the fast path stores it into a buffer, which replaces its
    /// content.
    fn write_value(
        &self,
        buffer: &mut Vec<u8>,
        id: ClaimId,
        token: Option<Token>,
        ttl: Duration,
        note: &Note,
    ) {
        buffer.clear();
        let token = token.filter(|_| !self.scripts.shortcuts.late_tokens);
        record::encode_fresh_value(buffer, id, token, ttl, note, &self.inbox);
    }

    /// The command for a batch, as `batch.lua` reads it.
    fn batch_command(&self, requests: &[Arc<RedisRequest>]) -> Cmd {
        let handovers = requests.iter().filter(|request| request.is_handover()).count();
        let ordered: Vec<&RedisRequest> = match handovers {
            0 => requests.iter().map(|one| &**one).collect(),
            _ => handovers_first(requests).map(|one| &**one).collect(),
        };
        let releases = || ordered.iter().filter_map(|one| one.release.as_ref());
        let acquires = || ordered.iter().filter_map(|one| one.acquire.as_ref());
        let (released, acquired) = (releases().count(), acquires().count());
        let (locks, lock) = (released + acquired, ordered.first().map(|one| one.keys.lock()));
        let bytes = locks * (lock.map_or(0, str::len) + 192) + 128;
        let mut command = self.scripts.batch.call_sized(locks, 5 + 3 * locks, bytes);
        for one in ordered.iter().filter(|one| one.release.is_some()) {
            command.arg(one.keys.lock());
        }
        for one in ordered.iter().filter(|one| one.acquire.is_some()) {
            command.arg(one.keys.lock());
        }
        let ttl = acquires().next().map_or(Duration::ZERO, |one| one.claim.ttl);
        let numbers = [released as u64, acquired as u64, handovers as u64, ttl.as_millis() as u64];
        let mut buffer = Vec::with_capacity(256);
        command.arg(&self.connected_at);
        for one in numbers {
            command.arg(number(&mut buffer, one));
        }
        for ReleasePart { id, token, ttl, note } in releases() {
            if let Some(note) = note {
                self.write_value(&mut buffer, *id, Some(*token), *ttl, note);
            }
            command.arg(&buffer);
        }
        for AcquirePart { claim: Claim { id, ttl, note, .. }, .. } in acquires() {
            self.write_value(&mut buffer, *id, None, *ttl, note);
            command.arg(&buffer);
        }
        if acquires().any(|acquire| acquire.claim.floor.is_some()) {
            for AcquirePart { claim, .. } in acquires() {
                match claim.floor {
                    Some(floor) => command.arg(number(&mut buffer, floor.get())),
                    None => command.arg(""),
                };
            }
        }
        command
    }
}

/// Writes a number into a buffer, which replaces its content.
fn number(buffer: &mut Vec<u8>, number: u64) -> &[u8] {
    buffer.clear();
    push_number(buffer, number);
    buffer
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

    /// The nodes of a quorum get one batch at a time: halves would cost as many scripts more at
    /// each of them.
    fn max_in_flight(&self) -> usize {
        if self.in_quorum { 1 } else { 2 }
    }

    /// All acquisitions of a batch have the same ttl.
    fn goes_with(&self, leaving: &[Arc<RedisRequest>], request: &Arc<RedisRequest>) -> bool {
        let ttl = |one: &RedisRequest| one.acquire.as_ref().map(|part| part.claim.ttl);
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
        let leases = RedisWaiters::new(ttl).leases(ttl);
        let request = |name: &str, releases: bool, acquires: bool| {
            let claim = Claim::plain(name, ttl);
            let release = ReleasePart { id: claim.id, token: Token::new(1), ttl, note: None };
            let acquire = AcquirePart { claim: claim.clone(), leases, waits: true };
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
