//! Acquiring: a claim creates its key, waits for the claims before it, and holds.

use std::sync::Arc;
use std::time::Duration;

use super::connection::{REQUEST_TIMEOUT, RETRY_TIMEOUT};
use super::keys::KeyRange;
use super::leases::EtcdLease;
use super::record::{KeyRecord, claim_id_of, mode_of, token_from_revision};
use super::request_error::{EtcdErrorKind, EtcdResult, unreachable_error};
use super::rpc::{KeyValue, RequestOp, TxnRequest, TxnResponse};
use super::txn::{
    create_revision_is, get, kvs, newest, put, range_is_empty, range_unchanged_since, revision_of,
    serializable, unconditional,
};
use super::{EtcdCore, MAX_ATTEMPTS, unsupported};
use crate::clock::Moment;
use crate::engine::common::admission::{Tally, check_permits, clash};
use crate::engine::common::backoff::RETRY;
use crate::engine::{Admission, Claim, ClaimId, Grant, Mode, Wait, drift};
use crate::error::{Error, Result};
use crate::report::report;

/// The first request of a claim has at least this long, even if the caller's deadline is nearer.
const MIN_FIRST_REQUEST_TIMEOUT: Duration = Duration::from_millis(500);

/// Whether the claims before it admit a claim.
enum EtcdAdmission {
    Admitted,
    /// Nothing changes until one of these keys is deleted (or rewritten).
    Blocked(KeyRange),
    /// The claim contradicts another one; the text says how.
    Conflict(String),
    /// Too little of the queue was read to decide.
    Inconclusive,
}

/// The result of a claim's first request.
enum CreateKeyOutcome {
    /// The key was created at this revision. Zero: a conflict was found before creating it.
    Created(i64, EtcdAdmission),
    /// An earlier request created the key, at this revision.
    AlreadyQueued(i64),
    /// The lock is taken and the claim does not wait: no key was created.
    Busy,
    /// The claim was withdrawn.
    Withdrawn,
}

/// How the wait of a claim in the queue ended.
enum WaitOutcome {
    /// It was seen to be admitted. The lease was known before to be valid until this moment.
    Admitted(Moment),
    NotInTime,
    /// Its key is gone.
    Forgotten,
}

/// One call that waits for a claim's grant. While it exists, the claim does not lapse.
struct EtcdAcquireCall<'a> {
    core: &'a EtcdCore,
    id: ClaimId,
    key: Vec<u8>,
    lease: Arc<EtcdLease>,
}

impl Drop for EtcdAcquireCall<'_> {
    fn drop(&mut self) {
        let now = self.core.clock.now();
        self.core.ledger().remove_caller(self.id, now);
        self.core.run_maintenance_by(now + self.lease.ttl);
    }
}

impl EtcdCore {
    pub(super) async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        if claim.floor.is_some() {
            return Err(unsupported("a floor: its tokens are revisions of the store"));
        }
        check_permits(claim)?;
        let started = self.clock.now();
        let deadline = match wait {
            Wait::Until(deadline) => deadline.max(started + MIN_FIRST_REQUEST_TIMEOUT),
            Wait::No | Wait::Forever => Moment::NEVER,
        };
        let first_request = self.send_first_request(claim, wait, deadline);
        let Some(replied) = self.clock.timeout_at(deadline, first_request).await else {
            // A request that was sent may still be executed. The caller withdraws the claim.
            if self.ledger().create_is_in_doubt(claim.id) {
                self.retire_lease_of(claim.id);
            }
            let waited = self.clock.now().saturating_duration_since(started);
            return Err(unreachable_error(format!("no server replied within {waited:.1?}"), true));
        };
        let (call, lease_valid_until, outcome) = replied?;
        match outcome {
            CreateKeyOutcome::Created(revision, EtcdAdmission::Admitted) => {
                self.confirm_grant(claim, &call, revision, lease_valid_until).await
            }
            CreateKeyOutcome::Created(revision, EtcdAdmission::Conflict(why)) => {
                match revision {
                    0 => self.forget_rejected(claim).await?,
                    _ => self.withdraw(claim).await?,
                }
                Err(Error::Conflict { name: claim.name.clone(), why })
            }
            CreateKeyOutcome::Created(revision, EtcdAdmission::Blocked(keys)) => {
                Box::pin(self.wait_for_grant(claim, &call, revision, Some(keys), wait)).await
            }
            CreateKeyOutcome::AlreadyQueued(revision)
            | CreateKeyOutcome::Created(revision, EtcdAdmission::Inconclusive) => {
                Box::pin(self.wait_for_grant(claim, &call, revision, None, wait)).await
            }
            CreateKeyOutcome::Busy => {
                self.forget_rejected(claim).await.map(|()| Admission::NotInTime)
            }
            CreateKeyOutcome::Withdrawn => Ok(Admission::Forgotten),
        }
    }

    /// Sends the claim's first request, on a lease that is valid. Also returns until when that
    /// lease was known to be valid before the request.
    async fn send_first_request(
        &self,
        claim: &Claim,
        wait: Wait,
        deadline: Moment,
    ) -> Result<(EtcdAcquireCall<'_>, Moment, CreateKeyOutcome)> {
        for _ in 0..MAX_ATTEMPTS {
            let call = self.register_call(claim).await?;
            let lease_valid_until = call.lease.valid_until();
            match self.create_key(claim, wait, deadline, &call).await {
                Ok(outcome) => return Ok((call, lease_valid_until, outcome)),
                Err(error) if error.kind == EtcdErrorKind::LeaseNotFound => {
                    self.lose_lease(&call.lease);
                    // Without the lease no request has created the key, and none will.
                    self.ledger().remove(claim.id);
                }
                Err(error) => return Err(error.into()),
            }
        }
        Err(unreachable_error("every new lease ended at once".to_owned(), true))
    }

    /// Forgets a claim that was rejected and has no key. If an earlier request for it was not
    /// answered, that one may still create the key: then the claim is withdrawn.
    async fn forget_rejected(&self, claim: &Claim) -> Result<()> {
        if self.ledger().create_is_in_doubt(claim.id) {
            return self.withdraw(claim).await;
        }
        if let Some(entry) = self.forget(claim.id) {
            self.revoke_own_lease(&entry);
            self.ledger().keep_key_for_reuse(entry);
        }
        Ok(())
    }

    /// Adds the claim to the ledger, with a key and a lease, and counts this call as waiting.
    async fn register_call(&self, claim: &Claim) -> EtcdResult<EtcdAcquireCall<'_>> {
        let (lease, entry) = loop {
            let known = self.ledger().find(claim.id).cloned();
            let lease = match known.filter(|entry| !entry.lease.is_gone()) {
                Some(entry) => entry.lease,
                None if claim.fixed || claim.detachable => {
                    self.leases.grant(claim.ttl, false).await?
                }
                None => self.leases.shared_for(claim.ttl).await?,
            };
            let now = self.clock.now();
            let mut ledger = self.ledger();
            // Revoked in the meantime because it was unused: see `leases_in_use`.
            if lease.is_gone() {
                continue;
            }
            ledger.insert(claim, &lease, &self.layout, now);
            ledger.add_caller(claim.id);
            let entry = ledger.find(claim.id).cloned();
            break (lease, entry);
        };
        self.run_maintenance_by(lease.keep_alive_at());
        let (key, lease) = entry.map_or((Vec::new(), lease), |entry| (entry.key, entry.lease));
        Ok(EtcdAcquireCall { core: self, id: claim.id, key, lease })
    }

    async fn create_key(
        &self,
        claim: &Claim,
        wait: Wait,
        deadline: Moment,
        call: &EtcdAcquireCall<'_>,
    ) -> EtcdResult<CreateKeyOutcome> {
        match (wait, claim.mode) {
            (Wait::No, Mode::Exclusive) => self.create_key_if_free(claim, call).await,
            (Wait::No, _) => self.create_key_if_admitted(claim, call).await,
            _ => self.create_key_and_queue(claim, deadline, call).await,
        }
    }

    /// One transaction creates the key and reads the claims before it.
    async fn create_key_and_queue(
        &self,
        claim: &Claim,
        deadline: Moment,
        call: &EtcdAcquireCall<'_>,
    ) -> EtcdResult<CreateKeyOutcome> {
        let (queue, tombstone) = (self.layout.claims(&claim.name), self.layout.tombstone(claim.id));
        // An exclusive claim needs to see only itself and the claim before it.
        let limit = if claim.mode == Mode::Exclusive { 2 } else { 0 };
        let txn = TxnRequest {
            compare: vec![create_revision_is(&call.key, 0), create_revision_is(&tombstone, 0)],
            success: vec![put_claim(claim, call), newest(&queue, limit, 0)],
            failure: vec![get(&call.key), get(&tombstone)],
        };
        let Some(reply) = self.send_create(claim, txn, deadline).await? else {
            return Ok(CreateKeyOutcome::Withdrawn);
        };
        if !reply.succeeded {
            return Ok(outcome_from_own_key(claim, &reply));
        }
        let revision = revision_of(&reply);
        Ok(match self.check_admission(claim.mode, revision, kvs(&reply, 1), &queue, limit > 0) {
            EtcdAdmission::Inconclusive => CreateKeyOutcome::AlreadyQueued(revision),
            admission => CreateKeyOutcome::Created(revision, admission),
        })
    }

    /// One transaction creates the key only if there is no other claim.
    async fn create_key_if_free(
        &self,
        claim: &Claim,
        call: &EtcdAcquireCall<'_>,
    ) -> EtcdResult<CreateKeyOutcome> {
        let (queue, tombstone) = (self.layout.claims(&claim.name), self.layout.tombstone(claim.id));
        let txn = TxnRequest {
            compare: vec![range_is_empty(&queue), create_revision_is(&tombstone, 0)],
            success: vec![put_claim(claim, call)],
            failure: vec![get(&call.key), get(&tombstone), newest(&queue, 1, 0)],
        };
        let Some(reply) = self.send_create(claim, txn, Moment::NEVER).await? else {
            return Ok(CreateKeyOutcome::Withdrawn);
        };
        if reply.succeeded {
            return Ok(CreateKeyOutcome::Created(revision_of(&reply), EtcdAdmission::Admitted));
        }
        match outcome_from_own_key(claim, &reply) {
            CreateKeyOutcome::Busy => {}
            earlier => return Ok(earlier),
        }
        match self.check_admission(claim.mode, i64::MAX, kvs(&reply, 2), &queue, true) {
            EtcdAdmission::Inconclusive => self.create_key_if_admitted(claim, call).await,
            conflict @ EtcdAdmission::Conflict(_) => Ok(CreateKeyOutcome::Created(0, conflict)),
            // The lock may be free by now, but it was not when the transaction ran.
            _ => Ok(CreateKeyOutcome::Busy),
        }
    }

    /// Reads first, and creates the key only if the queue has not changed since. So no other claim
    /// ever waits for the key of a claim that does not wait itself.
    async fn create_key_if_admitted(
        &self,
        claim: &Claim,
        call: &EtcdAcquireCall<'_>,
    ) -> EtcdResult<CreateKeyOutcome> {
        let (queue, tombstone) = (self.layout.claims(&claim.name), self.layout.tombstone(claim.id));
        loop {
            let read = unconditional(vec![get(&call.key), get(&tombstone), newest(&queue, 0, 0)]);
            let seen = self.connection.txn_with_retry(read, RETRY_TIMEOUT).await?;
            match outcome_from_own_key(claim, &seen) {
                CreateKeyOutcome::Busy => {}
                earlier => return Ok(earlier),
            }
            match self.check_admission(claim.mode, i64::MAX, kvs(&seen, 2), &queue, false) {
                EtcdAdmission::Admitted => {}
                EtcdAdmission::Blocked(_) | EtcdAdmission::Inconclusive => {
                    return Ok(CreateKeyOutcome::Busy);
                }
                conflict @ EtcdAdmission::Conflict(_) => {
                    return Ok(CreateKeyOutcome::Created(0, conflict));
                }
            }
            let txn = TxnRequest {
                compare: vec![
                    range_unchanged_since(&queue, revision_of(&seen)),
                    create_revision_is(&tombstone, 0),
                ],
                success: vec![put_claim(claim, call)],
                failure: vec![get(&call.key), get(&tombstone)],
            };
            let Some(reply) = self.send_create(claim, txn, Moment::NEVER).await? else {
                return Ok(CreateKeyOutcome::Withdrawn);
            };
            if reply.succeeded {
                return Ok(CreateKeyOutcome::Created(revision_of(&reply), EtcdAdmission::Admitted));
            }
        }
    }

    /// Whether a claim whose key has this create revision is admitted by those before it. `kvs` may
    /// also hold keys that are no claims of this queue, and later claims. `is_partial`: the queue
    /// may have more keys than these.
    fn check_admission(
        &self,
        mode: Mode,
        revision: i64,
        kvs: &[KeyValue],
        queue: &KeyRange,
        is_partial: bool,
    ) -> EtcdAdmission {
        let claims = kvs.iter().filter(|kv| self.layout.is_claim_on(queue, &kv.key));
        if is_partial && claims.clone().count() < kvs.len() {
            return EtcdAdmission::Inconclusive;
        }
        let mut older: Vec<&KeyValue> = claims.filter(|kv| kv.create_revision < revision).collect();
        older.sort_unstable_by_key(|kv| kv.create_revision);
        // Waiters count too: once a waiter holds, nothing checks the claims behind it again.
        let clashes = older.iter().enumerate();
        let mut clashes =
            clashes.filter_map(|(position, kv)| Some((position, kv, clash(mode_of(kv), mode)?)));
        match clashes.next() {
            // Whether the other one holds or waits can be seen only in the whole queue.
            Some(_) if is_partial => return EtcdAdmission::Inconclusive,
            // A waiter of this library may be about to withdraw because of a conflict of its own.
            Some((1.., kv, _)) if claim_id_of(kv, &KeyRecord::decode(&kv.value)).is_some() => {
                return EtcdAdmission::Blocked(queue.clone());
            }
            Some((_, _, why)) => return EtcdAdmission::Conflict(why),
            None => {}
        }
        let mut tally = Tally::default();
        older.iter().for_each(|kv| tally.add(mode_of(kv)));
        if tally.admits(mode) {
            return EtcdAdmission::Admitted;
        }
        let blocking = match mode {
            Mode::Exclusive => older.last(),
            Mode::Shared => older.iter().rfind(|kv| mode_of(kv) == Mode::Exclusive),
            // Any of them may make room.
            Mode::Permits { .. } => None,
        };
        let blocking = blocking.map(|kv| KeyRange::single(kv.key.clone()));
        EtcdAdmission::Blocked(blocking.unwrap_or_else(|| queue.clone()))
    }

    /// Sends a request that may create the claim's key, until it is answered. Returns `None` if the
    /// claim was withdrawn in the meantime. Repeating is safe because the request creates only a
    /// key that does not exist. But an unanswered attempt may arrive late, so the claim then ends
    /// with a tombstone.
    async fn send_create(
        &self,
        claim: &Claim,
        txn: TxnRequest,
        deadline: Moment,
    ) -> EtcdResult<Option<TxnResponse>> {
        let deadline = deadline.min(self.clock.now() + RETRY_TIMEOUT);
        let attempt = || async {
            let Some(was_in_doubt) = self.ledger().mark_create_sent(claim.id) else {
                return Ok(None);
            };
            let sent = self.batcher.send_txn(&claim.name, txn.clone()).await;
            let outcome_unknown = sent.as_ref().is_err_and(|error| error.outcome_unknown);
            self.ledger().set_create_in_doubt(claim.id, was_in_doubt || outcome_unknown);
            if outcome_unknown {
                self.retire_lease_of(claim.id);
            }
            sent.map(Some)
        };
        self.connection.retry(deadline, attempt).await.map(|(reply, _)| reply)
    }

    /// Retires the lease of a claim whose create request is in doubt. That request may arrive at
    /// any time, even after the tombstone is gone. So the lease gets no new claims and ends with
    /// its last one; after that, nothing can be created on it.
    pub(super) fn retire_lease_of(&self, id: ClaimId) {
        let lease = self.ledger().find(id).map(|entry| entry.lease.clone());
        lease.inspect(|lease| self.retire_lease(lease));
    }

    pub(super) fn retire_lease(&self, lease: &Arc<EtcdLease>) {
        if lease.is_shared {
            self.leases.retire(lease);
        }
    }

    /// Waits for the claims before this one. `blocked_by`: the keys to wait for, if known.
    async fn wait_for_grant(
        &self,
        claim: &Claim,
        call: &EtcdAcquireCall<'_>,
        revision: i64,
        blocked_by: Option<KeyRange>,
        wait: Wait,
    ) -> Result<Admission> {
        let waiting = self.wait_until_admitted(claim, call, revision, blocked_by, wait);
        let outcome = tokio::select! {
            biased;
            outcome = waiting => outcome?,
            // The key went with its lease.
            () = call.lease.wait_until_gone() => WaitOutcome::Forgotten,
            () = self.clock.sleep_until(wait.deadline()), if wait != Wait::No => {
                WaitOutcome::NotInTime
            }
        };
        match outcome {
            // A lease that is never renewed begins with the grant.
            WaitOutcome::Admitted(_) if claim.fixed => {
                self.confirm_grant(claim, call, revision, Moment::from_nanos(0)).await
            }
            WaitOutcome::Admitted(lease_valid_until) => {
                self.confirm_grant(claim, call, revision, lease_valid_until).await
            }
            WaitOutcome::NotInTime => self.withdraw(claim).await.map(|()| Admission::NotInTime),
            WaitOutcome::Forgotten => Ok(Admission::Forgotten),
        }
    }

    /// Waits until the claim is admitted, gone, or blocked if it does not wait.
    async fn wait_until_admitted(
        &self,
        claim: &Claim,
        call: &EtcdAcquireCall<'_>,
        revision: i64,
        mut blocked_by: Option<KeyRange>,
        wait: Wait,
    ) -> Result<WaitOutcome> {
        let mut backoff = RETRY;
        let mut subscription = None;
        loop {
            // Subscribed before reading, so that no change falls in between.
            if let Some(keys) = blocked_by.take() {
                subscription = Some(self.watcher.subscribe(keys));
            }
            let was_deleted = match &mut subscription {
                Some(subscription) => subscription.wait_for_change().await?,
                None => false,
            };
            let lease_valid_until = call.lease.valid_until();
            let admission = match self.read_admission(claim, call, revision, was_deleted).await {
                Ok(admission) => admission,
                Err(error) if error.kind == EtcdErrorKind::Unavailable && wait != Wait::No => {
                    report!(debug, error = Error::from(error), "a waiter could not read the queue");
                    backoff.pause().await;
                    // The watched key may have gone in the meantime.
                    (blocked_by, subscription) = (None, None);
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            backoff.reset();
            match admission {
                None => {
                    self.forget(claim.id).inspect(|entry| self.revoke_own_lease(entry));
                    return Ok(WaitOutcome::Forgotten);
                }
                Some(EtcdAdmission::Admitted) => {
                    return Ok(WaitOutcome::Admitted(lease_valid_until));
                }
                Some(EtcdAdmission::Inconclusive) => {}
                Some(_) if wait == Wait::No => return Ok(WaitOutcome::NotInTime),
                Some(EtcdAdmission::Blocked(keys)) => {
                    if subscription.as_ref().is_none_or(|current| *current.keys() != keys) {
                        blocked_by = Some(keys);
                    }
                }
                Some(EtcdAdmission::Conflict(why)) => {
                    self.withdraw(claim).await?;
                    return Err(Error::Conflict { name: claim.name.clone(), why });
                }
            }
        }
    }

    /// Reads the claim's own key and the claims before it: all of them, or as few as may be enough.
    fn queue_read_txn(&self, claim: &Claim, key: &[u8], revision: i64, all: bool) -> TxnRequest {
        let limit = i64::from(!all && claim.mode == Mode::Exclusive);
        unconditional(vec![get(key), newest(&self.layout.claims(&claim.name), limit, revision)])
    }

    /// Reads whether the claim is admitted; `None` if its key is gone.
    ///
    /// After the event of a delete (`was_deleted`), the server that sent it is first asked for its
    /// own state, without a round of consensus. If that state admits the claim, it is proof: no
    /// claim ever gets in before this one, so a state without those before it, and with the
    /// claim's key, is at least as new as the last of their deletes. Any other reply may be old.
    async fn read_admission(
        &self,
        claim: &Claim,
        call: &EtcdAcquireCall<'_>,
        revision: i64,
        was_deleted: bool,
    ) -> EtcdResult<Option<EtcdAdmission>> {
        if was_deleted {
            let read = serializable(self.queue_read_txn(claim, &call.key, revision, false));
            let reply = self.connection.txn_once(read, REQUEST_TIMEOUT).await?;
            let admission = self.admission_in(claim, &reply, revision, false);
            if matches!(admission, Some(EtcdAdmission::Admitted)) {
                return Ok(admission);
            }
        }
        for all in [false, true] {
            let read = self.queue_read_txn(claim, &call.key, revision, all);
            let reply = self.connection.txn_once(read, REQUEST_TIMEOUT).await?;
            match self.admission_in(claim, &reply, revision, all) {
                Some(EtcdAdmission::Inconclusive) => {}
                admission => return Ok(admission),
            }
        }
        Ok(Some(EtcdAdmission::Inconclusive))
    }

    /// The admission in the reply to `queue_read_txn`; `None` if the claim's key is gone.
    fn admission_in(
        &self,
        claim: &Claim,
        reply: &TxnResponse,
        revision: i64,
        all: bool,
    ) -> Option<EtcdAdmission> {
        let own = kvs(reply, 0).first().filter(|own| own.create_revision == revision)?;
        let queue = self.layout.claims(&claim.name);
        // A claim may have been downgraded since it was first asked for: the stored mode counts.
        let mode = mode_of(own);
        let is_partial = !all && claim.mode == Mode::Exclusive;
        Some(self.check_admission(mode, revision, kvs(reply, 1), &queue, is_partial))
    }

    /// Grants a claim that was seen to be admitted while its lease was known to be valid until
    /// `lease_valid_until`. If that is soon, or the lease is to begin only now, the lease and the
    /// admission are confirmed first.
    async fn confirm_grant(
        &self,
        claim: &Claim,
        call: &EtcdAcquireCall<'_>,
        revision: i64,
        mut lease_valid_until: Moment,
    ) -> Result<Admission> {
        let lease = &call.lease;
        let token = token_from_revision(revision)?;
        if lease_valid_until <= self.clock.now() + lease.ttl / 2 {
            let read = self.queue_read_txn(claim, &call.key, revision, true);
            let (until, replies) =
                self.keep_alive_and_read(lease, vec![read], REQUEST_TIMEOUT).await?;
            let reply = replies.first();
            let admission = reply.and_then(|reply| self.admission_in(claim, reply, revision, true));
            if !matches!(admission, Some(EtcdAdmission::Admitted)) {
                return Ok(Admission::Forgotten);
            }
            lease_valid_until = until;
        }
        if !self.ledger().set_held(claim.id, token, lease_valid_until + drift(lease.ttl)) {
            return Ok(Admission::Forgotten);
        }
        self.run_maintenance_by(lease_valid_until);
        let grant = Grant { token, valid_until: lease_valid_until, key: call.key.clone() };
        Ok(Admission::Granted(grant))
    }
}

fn put_claim(claim: &Claim, call: &EtcdAcquireCall<'_>) -> RequestOp {
    put(&call.key, KeyRecord::for_claim(claim, &call.key).encode(), call.lease.id)
}

/// The outcome according to a reply whose first two parts are the claim's own key and tombstone.
fn outcome_from_own_key(claim: &Claim, reply: &TxnResponse) -> CreateKeyOutcome {
    match (kvs(reply, 0).first(), kvs(reply, 1).first()) {
        (_, Some(_)) => CreateKeyOutcome::Withdrawn,
        (Some(own), None) => {
            match claim_id_of(own, &KeyRecord::decode(&own.value)) == Some(claim.id) {
                true => CreateKeyOutcome::AlreadyQueued(own.create_revision),
                // The claim that had this key before was not deleted after all.
                false => CreateKeyOutcome::Withdrawn,
            }
        }
        (None, None) => CreateKeyOutcome::Busy,
    }
}
