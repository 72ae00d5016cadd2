//! The way of one claim: it enters, waits behind those who came before, holds, and leaves.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;

use super::keys::{self, Keys, Word, mode_of};
use super::leases::Lease;
use super::link::{Failed, PATIENCE, PERSISTENCE, What, failed};
use super::places::Place;
use super::rpc::{KeyValue, TxnRequest, TxnResponse};
use super::txn::{
    always, created, delete, kvs, nested, newest, no_news, nobody, parts, put, range, read,
    revision, rewrite, term, unchanged,
};
use super::{Core, ENGINE};
use crate::clock::Moment;
use crate::engine::queue::{Tally, check_permits, clash};
use crate::engine::{Amend, Claim, ClaimId, Grant, Mode, Wait};
use crate::error::{Error, LossReason, Result};
use crate::token::Token;

/// At most so many keys are read by one transaction.
const READS: usize = 100;
/// How often something that a change of leader or of a lease disturbed is begun again.
const TRIES: usize = 4;
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));

/// How a claim stands with those who came before it.
enum Standing {
    Admitted,
    /// Until one of these keys is deleted (or rewritten) nothing changes.
    Behind(Keys),
    Clash(String),
    /// Somebody else's key was seen where the one before was looked for.
    Unclear,
}

/// What became of a claim's first request.
enum Entered {
    /// Its key was created at this revision; this is how it stands.
    Key(i64, Standing),
    /// It has had a key before.
    Before(i64),
    Busy,
    Withdrawn,
}

/// Somebody waits for a claim's grant, until this is dropped.
struct Asking<'a> {
    core: &'a Core,
    id: ClaimId,
    key: Vec<u8>,
    lease: Arc<Lease>,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        let now = self.core.clock.now();
        self.core.places().asked(self.id, now);
        self.core.pulse_by(now + self.lease.ttl);
    }
}

impl Core {
    pub(super) async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        if claim.floor.is_some() {
            return Err(unsupported("a floor: its tokens are revisions of the store"));
        }
        check_permits(claim)?;
        for _ in 0..TRIES {
            let asking = self.ask_for(claim).await.map_err(Failed::into_error)?;
            let believed = asking.lease.valid_until();
            let entered = match self.enter(claim, wait, &asking).await {
                Ok(entered) => entered,
                Err(failed) if failed.what == What::LeaseGone => {
                    self.lose_lease(&asking.lease);
                    // Nothing was created by it, and nothing will be.
                    self.places().forget(claim.id);
                    continue;
                }
                Err(failed) => return Err(failed.into_error()),
            };
            return match entered {
                Entered::Key(at, Standing::Admitted) => {
                    self.grant(claim, &asking, at, believed).await
                }
                Entered::Key(at, Standing::Clash(why)) => {
                    match at {
                        0 => drop(self.places().forget(claim.id)),
                        _ => self.withdraw(claim).await?,
                    }
                    Err(Error::Conflict { name: claim.name.clone(), why })
                }
                Entered::Key(at, Standing::Behind(keys)) => {
                    Box::pin(self.wait(claim, &asking, at, Some(keys), wait)).await
                }
                Entered::Before(at) | Entered::Key(at, Standing::Unclear) => {
                    Box::pin(self.wait(claim, &asking, at, None, wait)).await
                }
                Entered::Busy => {
                    self.places().forget(claim.id);
                    Ok(None)
                }
                Entered::Withdrawn => Err(Error::NotHeld { name: claim.name.clone() }),
            };
        }
        Err(failed("its leases end as soon as they are made".to_owned(), true))
    }

    /// A place for this claim, on a lease.
    async fn ask_for(&self, claim: &Claim) -> std::result::Result<Asking<'_>, Failed> {
        let known = self.places().find(claim.id).cloned();
        let lease = match known.filter(|place| !place.lease.is_gone()) {
            Some(place) => place.lease,
            None if claim.fixed || claim.detachable => {
                self.leases.granted(claim.ttl, false).await?
            }
            None => self.leases.shared(claim.ttl).await?,
        };
        let now = self.clock.now();
        let mut places = self.places();
        places.enter(claim, self.layout.claim(&claim.name, lease.id, claim.id), &lease, now);
        places.asks(claim.id);
        let place = places.find(claim.id).cloned();
        drop(places);
        self.pulse_by(lease.beat_at());
        let (key, lease) = place.map_or((Vec::new(), lease), |place| (place.key, place.lease));
        Ok(Asking { core: self, id: claim.id, key, lease })
    }

    async fn enter(
        &self,
        claim: &Claim,
        wait: Wait,
        asking: &Asking<'_>,
    ) -> std::result::Result<Entered, Failed> {
        match (wait, claim.mode) {
            (Wait::No, Mode::Exclusive) => self.enter_if_free(claim, asking).await,
            (Wait::No, _) => self.enter_if_admitted(claim, asking).await,
            _ => self.enter_and_queue(claim, asking).await,
        }
    }

    /// One transaction: a key, and who was there before.
    async fn enter_and_queue(
        &self,
        claim: &Claim,
        asking: &Asking<'_>,
    ) -> std::result::Result<Entered, Failed> {
        let (keys, mark) = (self.layout.claims(&claim.name), self.layout.mark(claim.id));
        // An exclusive claim needs to see only the one before it, and itself.
        let limit = if claim.mode == Mode::Exclusive { 2 } else { 0 };
        let txn = TxnRequest {
            compare: vec![created(&asking.key, 0), created(&mark, 0)],
            success: vec![self.put_claim(claim, asking), newest(&keys, limit, 0)],
            failure: vec![read(&asking.key), read(&mark)],
        };
        let Some(answer) = self.create(claim, txn).await? else { return Ok(Entered::Withdrawn) };
        if !answer.succeeded {
            return Ok(entered_before(&answer));
        }
        let at = revision(&answer);
        Ok(match self.standing(claim.mode, at, kvs(&answer, 1), &keys, limit > 0) {
            Standing::Unclear => Entered::Before(at),
            standing => Entered::Key(at, standing),
        })
    }

    /// One transaction that leaves nothing behind if somebody is there.
    async fn enter_if_free(
        &self,
        claim: &Claim,
        asking: &Asking<'_>,
    ) -> std::result::Result<Entered, Failed> {
        let (keys, mark) = (self.layout.claims(&claim.name), self.layout.mark(claim.id));
        let txn = TxnRequest {
            compare: vec![nobody(&keys), created(&mark, 0)],
            success: vec![self.put_claim(claim, asking)],
            failure: vec![read(&asking.key), read(&mark), newest(&keys, 1, 0)],
        };
        let Some(answer) = self.create(claim, txn).await? else { return Ok(Entered::Withdrawn) };
        if answer.succeeded {
            return Ok(Entered::Key(revision(&answer), Standing::Admitted));
        }
        let others = kvs(&answer, 2);
        match entered_before(&answer) {
            Entered::Busy => {}
            before => return Ok(before),
        }
        match self.standing(claim.mode, i64::MAX, others, &keys, true) {
            Standing::Unclear => self.enter_if_admitted(claim, asking).await,
            clash @ Standing::Clash(_) => Ok(Entered::Key(0, clash)),
            // Free again by now, perhaps; it was not when it was asked for.
            _ => Ok(Entered::Busy),
        }
    }

    /// Looks first, and takes a key only if nothing has come since; so nobody meets a key of one
    /// who does not wait.
    async fn enter_if_admitted(
        &self,
        claim: &Claim,
        asking: &Asking<'_>,
    ) -> std::result::Result<Entered, Failed> {
        let (keys, mark) = (self.layout.claims(&claim.name), self.layout.mark(claim.id));
        loop {
            let look = always(vec![read(&asking.key), read(&mark), newest(&keys, 0, 0)]);
            let seen = self.link.txn(look, PERSISTENCE).await?;
            match entered_before(&seen) {
                Entered::Busy => {}
                before => return Ok(before),
            }
            match self.standing(claim.mode, i64::MAX, kvs(&seen, 2), &keys, false) {
                Standing::Admitted => {}
                Standing::Behind(_) | Standing::Unclear => return Ok(Entered::Busy),
                clash @ Standing::Clash(_) => return Ok(Entered::Key(0, clash)),
            }
            let txn = TxnRequest {
                compare: vec![no_news(&keys, revision(&seen)), created(&mark, 0)],
                success: vec![self.put_claim(claim, asking)],
                failure: vec![read(&asking.key), read(&mark)],
            };
            let Some(answer) = self.create(claim, txn).await? else {
                return Ok(Entered::Withdrawn);
            };
            if answer.succeeded {
                return Ok(Entered::Key(revision(&answer), Standing::Admitted));
            }
        }
    }

    /// How a claim with a key of revision `at` stands with those before it. `kvs` may hold others
    /// too; `is_part` says that there may be more than these.
    fn standing(
        &self,
        mode: Mode,
        at: i64,
        kvs: &[KeyValue],
        all: &Keys,
        is_part: bool,
    ) -> Standing {
        let others = kvs.iter().filter(|kv| self.layout.is_claim_on(all, &kv.key));
        if is_part && others.clone().count() < kvs.len() {
            return Standing::Unclear;
        }
        let mut older: Vec<&KeyValue> = others.filter(|kv| kv.create_revision < at).collect();
        older.sort_unstable_by_key(|kv| kv.create_revision);
        if let Some(why) = older.first().and_then(|first| clash(mode_of(first), mode)) {
            return Standing::Clash(why);
        }
        let mut tally = Tally::default();
        older.iter().for_each(|kv| tally.add(mode_of(kv)));
        if tally.admits(mode) {
            return Standing::Admitted;
        }
        let blocking = match mode {
            Mode::Exclusive => older.last(),
            Mode::Shared => older.iter().rfind(|kv| mode_of(kv) == Mode::Exclusive),
            // Any of them may make room.
            Mode::Permits { .. } => None,
        };
        Standing::Behind(blocking.map_or_else(|| all.clone(), |kv| Keys::one(kv.key.clone())))
    }

    fn put_claim(&self, claim: &Claim, asking: &Asking<'_>) -> super::rpc::RequestOp {
        put(&asking.key, Word::of(claim).write(), asking.lease.id)
    }

    /// Sends a request that may create the claim's key, until it is answered; `None` if the claim
    /// was withdrawn meanwhile. It may be repeated, because it creates only what is not there; but
    /// an attempt without an answer may arrive late, so the claim then ends with a mark.
    async fn create(
        &self,
        claim: &Claim,
        txn: TxnRequest,
    ) -> std::result::Result<Option<TxnResponse>, Failed> {
        let give_up = self.clock.now() + PERSISTENCE;
        let mut pause = PAUSES.0;
        loop {
            let Some(was_dirty) = self.places().doubt(claim.id) else { return Ok(None) };
            let failed = match self.crowd.act(&claim.name, txn.clone()).await {
                Ok(answer) => {
                    self.places().settle(claim.id, was_dirty);
                    return Ok(Some(answer));
                }
                Err(failed) => failed,
            };
            self.places().settle(claim.id, was_dirty || failed.unknown);
            if failed.unknown {
                self.retire_lease_of(claim.id);
            }
            if failed.what != What::Silent || self.clock.now() + pause >= give_up {
                return Err(failed);
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    /// A request that creates a key on this lease may arrive at any time, even after a mark has
    /// ended. So no new claims get it, and when its last one leaves, it ends, and nothing can be
    /// created on it any more.
    fn retire_lease_of(&self, id: ClaimId) {
        let lease = self.places().find(id).map(|place| place.lease.clone());
        lease.filter(|lease| lease.is_shared).inspect(|lease| self.leases.retire(lease));
    }

    /// Waits for those who came before. `behind`: whom to wait for, if that is known.
    async fn wait(
        &self,
        claim: &Claim,
        asking: &Asking<'_>,
        at: i64,
        behind: Option<Keys>,
        wait: Wait,
    ) -> Result<Option<Grant>> {
        let waiting = self.admitted(claim, asking, at, behind, wait);
        let waited = tokio::select! {
            biased;
            waited = waiting => waited,
            // Gone with its lease: it has no place any more.
            () = asking.lease.ended() => Err(Error::NotHeld { name: claim.name.clone() }),
            () = self.clock.sleep_until(wait.deadline()), if wait != Wait::No => Ok(None),
        };
        match waited {
            // A lease that is never renewed begins with the grant.
            Ok(Some(_)) if claim.fixed => {
                self.grant(claim, asking, at, Moment::from_nanos(0)).await
            }
            Ok(Some(believed)) => self.grant(claim, asking, at, believed).await,
            Ok(None) => self.withdraw(claim).await.map(|()| None),
            Err(error) => Err(error),
        }
    }

    /// Until when the lease was known to stand before the claim was seen to be admitted; `None` if
    /// it does not wait.
    async fn admitted(
        &self,
        claim: &Claim,
        asking: &Asking<'_>,
        at: i64,
        mut behind: Option<Keys>,
        wait: Wait,
    ) -> Result<Option<Moment>> {
        let mut pause = PAUSES.0;
        let mut reader = None;
        loop {
            // Watched before it is looked at again, so that nothing happens in between.
            if let Some(keys) = behind.take() {
                reader = Some(self.stand.watch(keys));
            }
            if let Some(reader) = &mut reader {
                reader.worth_a_look().await?;
            }
            let believed = asking.lease.valid_until();
            let standing = match self.look_before(claim, asking, at).await {
                Ok(standing) => standing,
                Err(failed) if failed.what == What::Silent && wait != Wait::No => {
                    tracing::debug!(error = %failed.into_error(), "a waiter could not look");
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(PAUSES.1);
                    // What it watched may have gone meanwhile.
                    (behind, reader) = (None, None);
                    continue;
                }
                Err(failed) => return Err(failed.into_error()),
            };
            pause = PAUSES.0;
            match standing {
                None => {
                    self.places().forget(claim.id);
                    return Err(Error::NotHeld { name: claim.name.clone() });
                }
                Some(Standing::Admitted) => return Ok(Some(believed)),
                Some(Standing::Unclear) => {}
                Some(_) if wait == Wait::No => return Ok(None),
                Some(Standing::Behind(keys)) => {
                    if reader.as_ref().is_none_or(|reader| *reader.keys() != keys) {
                        behind = Some(keys);
                    }
                }
                Some(Standing::Clash(why)) => {
                    self.withdraw(claim).await?;
                    return Err(Error::Conflict { name: claim.name.clone(), why });
                }
            }
        }
    }

    /// Reads the claim's own key and those before it: all, or as few as may be enough.
    fn look_txn(&self, claim: &Claim, key: &[u8], at: i64, all: bool) -> TxnRequest {
        let limit = i64::from(!all && claim.mode == Mode::Exclusive);
        always(vec![read(key), newest(&self.layout.claims(&claim.name), limit, at)])
    }

    /// How the claim stands with those before it; `None` if its key is gone.
    async fn look_before(
        &self,
        claim: &Claim,
        asking: &Asking<'_>,
        at: i64,
    ) -> std::result::Result<Option<Standing>, Failed> {
        for all in [false, true] {
            let look = self.look_txn(claim, &asking.key, at, all);
            let answer = self.link.txn_once(look, PATIENCE).await?;
            match self.seen_before(claim, &answer, at, all) {
                Some(Standing::Unclear) => {}
                standing => return Ok(standing),
            }
        }
        Ok(Some(Standing::Unclear))
    }

    fn seen_before(
        &self,
        claim: &Claim,
        answer: &TxnResponse,
        at: i64,
        all: bool,
    ) -> Option<Standing> {
        let own = kvs(answer, 0).first().filter(|own| own.create_revision == at)?;
        let keys = self.layout.claims(&claim.name);
        // Downgraded and asked again: it holds as it is written.
        let mode = mode_of(own);
        let is_part = !all && claim.mode == Mode::Exclusive;
        Some(self.standing(mode, at, kvs(answer, 1), &keys, is_part))
    }

    /// The claim was seen to be admitted while its lease was known to stand until `believed`. If
    /// that is soon, or the lease is to begin only now, it is confirmed, and the claim with it.
    async fn grant(
        &self,
        claim: &Claim,
        asking: &Asking<'_>,
        at: i64,
        mut believed: Moment,
    ) -> Result<Option<Grant>> {
        let lease = &asking.lease;
        let token = token_of(at)?;
        if believed <= self.clock.now() + lease.ttl / 2 {
            let look = self.look_txn(claim, &asking.key, at, true);
            let (until, answers) =
                self.beat(lease, vec![look], PATIENCE).await.map_err(Failed::into_error)?;
            let answer = answers.first();
            let standing = answer.and_then(|answer| self.seen_before(claim, answer, at, true));
            if !matches!(standing, Some(Standing::Admitted)) {
                return Err(Error::NotHeld { name: claim.name.clone() });
            }
            believed = until;
        }
        self.places().holds(claim.id, token, believed + crate::engine::drift(lease.ttl));
        self.pulse_by(believed);
        Ok(Some(Grant { token, valid_until: believed, key: asking.key.clone() }))
    }

    /// Keeps a lease alive and then reads: answers by a majority in the same term, which confirm
    /// that the keep-alive was answered by the leader. Until when the lease stands.
    pub(super) async fn beat(
        &self,
        lease: &Arc<Lease>,
        mut reads: Vec<TxnRequest>,
        patience: Duration,
    ) -> std::result::Result<(Moment, Vec<TxnResponse>), Failed> {
        if reads.is_empty() {
            reads.push(always(vec![read(&self.layout.nothing())]));
        }
        for _ in 0..TRIES {
            let sent = self.clock.now();
            lease.beating(sent);
            let kept = self.link.keep_alive(lease.id, patience).await?;
            let ttl = Duration::from_secs(u64::try_from(kept.ttl).unwrap_or(0));
            if ttl.is_zero() {
                self.lose_lease(lease);
                return Err(Failed::lease_gone());
            }
            let answers =
                join_all(reads.iter().map(|one| self.link.txn_once(one.clone(), patience))).await;
            let answers = answers.into_iter().collect::<std::result::Result<Vec<_>, _>>()?;
            let by = kept.header.map_or(0, |header| header.raft_term);
            if answers.iter().all(|answer| term(answer) == by) {
                return Ok((lease.confirmed(sent, ttl), answers));
            }
        }
        Err(Failed::silent("the leader changes again and again".to_owned()))
    }

    pub(super) async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        let known = join_all(batch.iter().map(|(claim, grant)| self.known(claim, grant))).await;
        let mut by_lease: Vec<(Arc<Lease>, Vec<(usize, Vec<u8>)>)> = Vec::new();
        let mut answers: Vec<Option<Result<Grant>>> = Vec::new();
        let mut index = std::collections::HashMap::new();
        for (number, known) in known.into_iter().enumerate() {
            answers.push(None);
            match known {
                Ok((lease, key)) => {
                    let at = *index.entry(lease.id).or_insert_with(|| {
                        by_lease.push((lease, Vec::new()));
                        by_lease.len() - 1
                    });
                    if let Some((_, group)) = by_lease.get_mut(at) {
                        group.push((number, key));
                    }
                }
                Err(error) => answers[number] = Some(Err(error)),
            }
        }
        let groups = by_lease.iter().map(|(lease, group)| self.renew_group(batch, lease, group));
        for (number, answer) in join_all(groups).await.into_iter().flatten() {
            answers[number] = Some(answer);
        }
        let unanswered = || Err(failed("no answer".to_owned(), true));
        answers.into_iter().map(|answer| answer.unwrap_or_else(unanswered)).collect()
    }

    /// Lease and key of a held claim. One that comes from another process is looked up first.
    async fn known(&self, claim: &Claim, grant: &Grant) -> Result<(Arc<Lease>, Vec<u8>)> {
        if let Some(place) = self.places().find(claim.id) {
            return Ok((place.lease.clone(), place.key.clone()));
        }
        let lost = || Error::lost(&claim.name, LossReason::Forgotten);
        if self.places().is_leaving(claim.id) {
            return Err(Error::lost(&claim.name, LossReason::Expired));
        }
        // Others share their lease, and what is done to it is done to all.
        let lease = keys::lease_of(&grant.key).filter(|_| claim.detachable || claim.fixed);
        let lease = lease.ok_or_else(lost)?;
        let key = self.layout.claim(&claim.name, lease, claim.id);
        let patience = patience_for(claim.ttl);
        let answer = self.link.txn_once(always(vec![read(&key)]), patience).await;
        let answer = answer.map_err(Failed::into_error)?;
        still_held(claim, grant, kvs(&answer, 0))?;
        // Not believed before it is confirmed.
        let lease = Lease::new(lease, claim.ttl, false, Moment::from_nanos(0));
        let mut places = self.places();
        places.enter(claim, key.clone(), &lease, self.clock.now());
        places.holds(claim.id, grant.token, self.clock.now() + claim.ttl);
        Ok((lease, key))
    }

    async fn renew_group(
        &self,
        batch: &[(&Claim, &Grant)],
        lease: &Arc<Lease>,
        group: &[(usize, Vec<u8>)],
    ) -> Vec<(usize, Result<Grant>)> {
        let ttl = group.iter().map(|(number, _)| batch[*number].0.ttl).min().unwrap_or_default();
        let read_part = |part: &[(usize, Vec<u8>)]| {
            always(part.iter().map(|(_, key)| read(key)).collect::<Vec<_>>())
        };
        let reads = group.chunks(READS).map(read_part).collect();
        let beaten = self.beat(lease, reads, patience_for(ttl)).await;
        let each = group.iter().enumerate().map(|(at, (number, key))| {
            let (claim, grant) = batch[*number];
            let answer = match &beaten {
                Ok((until, answers)) => {
                    let kvs = answers.get(at / READS).map_or(&[][..], |one| kvs(one, at % READS));
                    self.renewed(claim, grant, kvs, key, *until)
                }
                Err(failed) if failed.what == What::LeaseGone => {
                    Err(Error::lost(&claim.name, LossReason::SessionEnded))
                }
                Err(failed) => Err(failed.again().into_error()),
            };
            (*number, answer)
        });
        each.collect()
    }

    fn renewed(
        &self,
        claim: &Claim,
        grant: &Grant,
        kvs: &[KeyValue],
        key: &[u8],
        until: Moment,
    ) -> Result<Grant> {
        still_held(claim, grant, kvs)?;
        self.places().holds(claim.id, grant.token, until + crate::engine::drift(claim.ttl));
        let valid_until = until.max(grant.valid_until);
        Ok(Grant { token: grant.token, valid_until, key: key.to_vec() })
    }

    pub(super) async fn amend(&self, claim: &Claim, grant: &Grant, to: Amend) -> Result<Grant> {
        let lost = || Error::lost(&claim.name, LossReason::Forgotten);
        let key = self.key_of(claim, grant).ok_or_else(lost)?;
        for _ in 0..TRIES {
            let seen = self.link.txn(always(vec![read(&key)]), PERSISTENCE).await;
            let seen = seen.map_err(Failed::into_error)?;
            let kv = kvs(&seen, 0).first().ok_or_else(lost)?;
            let mut word = Word::read(&kv.value);
            if token_of(kv.create_revision)? != grant.token {
                return Err(lost());
            }
            match &to {
                Amend::Downgrade => word.mode = Mode::Shared,
                Amend::Note(note) => word.set_note(note),
            }
            let txn = TxnRequest {
                compare: vec![unchanged(&key, kv.mod_revision)],
                success: vec![rewrite(&key, word.write())],
                failure: Vec::new(),
            };
            let answer = self.link.txn(txn, PERSISTENCE).await.map_err(Failed::into_error)?;
            if answer.succeeded {
                return Ok(grant.clone());
            }
        }
        Err(failed(format!("`{}` changes too often to be changed", claim.name), true))
    }

    /// The key of a claim of this client, or of one that came by a ticket.
    fn key_of(&self, claim: &Claim, grant: &Grant) -> Option<Vec<u8>> {
        let known = self.places().find(claim.id).map(|place| place.key.clone());
        let written = || {
            let lease = keys::lease_of(&grant.key)?;
            Some(self.layout.claim(&claim.name, lease, claim.id))
        };
        known.or_else(written)
    }

    pub(super) async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let not_held = || Error::NotHeld { name: claim.name.clone() };
        let key = self.key_of(claim, grant).ok_or_else(not_held)?;
        let place = self.places().find(claim.id).cloned();
        let at = i64::try_from(grant.token.get()).unwrap_or(i64::MAX);
        let mut give = TxnRequest {
            compare: vec![created(&key, at)],
            success: vec![delete(&key)],
            failure: Vec::new(),
        };
        if place.as_ref().is_some_and(|place| place.is_dirty) {
            let lease = self.leases.for_a_mark().await.map_err(Failed::into_error)?;
            give.success.push(put(&self.layout.mark(claim.id), Vec::new(), lease));
            give.failure.push(put(&self.layout.mark(claim.id), Vec::new(), lease));
        }
        let next = next.and_then(|next| self.take_along(next));
        let txn = match &next {
            Some(next) => next.after(self, give),
            None => give,
        };
        let (answer, repeated) = match self.give(claim, txn).await {
            Ok(answer) => answer,
            Err(failed) => {
                // It may be done, or still be; until then it stays in the way of others.
                self.places().withdraw(claim.id, self.clock.now());
                next.iter().for_each(|next| self.retire_lease_of(next.claim.id));
                self.pulse_soon();
                return Err(failed.into_error());
            }
        };
        let (released, taken) = match &next {
            None => (answer.succeeded, None),
            Some(next) => next.outcome(self, &answer, repeated),
        };
        if !released && !repeated {
            // Whatever bears the id has to go.
            if self.places().withdraw(claim.id, self.clock.now()).is_some() {
                self.pulse_soon();
            }
        } else if let Some(place) = self.forget(claim.id) {
            self.give_back_own(&place);
        } else if let Some(lease) = keys::lease_of(&key).filter(|_| released && claim.detachable) {
            self.revoke_in_background(lease);
        }
        match released || repeated {
            true => Ok(taken),
            false => Err(not_held()),
        }
    }

    /// Sends a release until it is answered; whether an attempt before may have done it.
    async fn give(
        &self,
        claim: &Claim,
        txn: TxnRequest,
    ) -> std::result::Result<(TxnResponse, bool), Failed> {
        let give_up = self.clock.now() + PERSISTENCE;
        let (mut pause, mut repeated) = (PAUSES.0, false);
        loop {
            let failed = match self.crowd.act(&claim.name, txn.clone()).await {
                Ok(answer) => return Ok((answer, repeated)),
                Err(failed) => failed,
            };
            repeated |= failed.unknown;
            if failed.what == What::LeaseGone {
                // Of the mark, or of the next: whoever withdraws makes another.
                self.leases.forget_marks().await;
            }
            if failed.what != What::Silent || self.clock.now() + pause >= give_up {
                return Err(failed);
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    /// The next claim of this client, if it can go with the release of another: an exclusive one
    /// for which a lease is there.
    fn take_along<'c>(&self, next: &'c Claim) -> Option<Next<'c>> {
        let plain = next.mode == Mode::Exclusive && !next.fixed && !next.detachable;
        if !plain || next.floor.is_some() {
            return None;
        }
        let lease = self.leases.ready(next.ttl)?;
        let believed = lease.valid_until();
        let key = self.layout.claim(&next.name, lease.id, next.id);
        let mut places = self.places();
        places.enter(next, key, &lease, self.clock.now());
        let place = places.find(next.id).cloned()?;
        let was_dirty = places.doubt(next.id);
        drop(places);
        self.pulse_by(self.clock.now() + lease.ttl);
        Some(Next { claim: next, place, believed, was_dirty: was_dirty? })
    }

    /// Withdraws the claim; nothing is left behind when it is done.
    pub(super) async fn withdraw(&self, claim: &Claim) -> Result<()> {
        let now = self.clock.now();
        let place = self.places().withdraw(claim.id, now);
        match place {
            Some(place) => self.clear(claim.id, &place).await.map_err(Failed::into_error),
            None => self.clear_unknown(claim).await.map_err(Failed::into_error),
        }
    }

    /// Deletes the key of a claim that leaves, with a mark where it may still be created.
    pub(super) async fn clear(
        &self,
        id: ClaimId,
        place: &Place,
    ) -> std::result::Result<(), Failed> {
        let mut ops = vec![delete(&place.key)];
        if place.is_dirty {
            ops.push(put(&self.layout.mark(id), Vec::new(), self.leases.for_a_mark().await?));
        }
        let cleared = self.link.txn(always(ops), PATIENCE).await;
        if cleared.as_ref().is_err_and(|failed| failed.what == What::LeaseGone) {
            self.leases.forget_marks().await;
        }
        cleared?;
        self.places().left(id);
        self.give_back_own(place);
        Ok(())
    }

    /// A claim that another process took: whatever bears its id.
    async fn clear_unknown(&self, claim: &Claim) -> std::result::Result<(), Failed> {
        let all = always(vec![range(&self.layout.claims(&claim.name))]);
        let seen = self.link.txn(all, PATIENCE).await?;
        let ours = kvs(&seen, 0).iter().filter(|kv| keys::id_of(&kv.key) == Some(claim.id));
        let ops: Vec<_> = ours.map(|kv| delete(&kv.key)).collect();
        if !ops.is_empty() {
            self.link.txn(always(ops), PATIENCE).await?;
        }
        Ok(())
    }

    /// A lease that served one claim only is not needed any more.
    fn give_back_own(&self, place: &Place) {
        if !place.lease.is_shared {
            self.revoke_in_background(place.lease.id);
        }
    }
}

/// The next claim of a client, taken along by a release.
struct Next<'c> {
    claim: &'c Claim,
    place: Place,
    believed: Moment,
    was_dirty: bool,
}

impl Next<'_> {
    /// Both in one transaction. If the next cannot enter, the release stands all the same.
    fn after(&self, core: &Core, mut give: TxnRequest) -> TxnRequest {
        let (keys, mark) = (core.layout.claims(&self.claim.name), core.layout.mark(self.claim.id));
        let alone = give.clone();
        give.compare.extend([created(&self.place.key, 0), created(&mark, 0)]);
        let word = Word::of(self.claim).write();
        give.success = vec![newest(&keys, 2, 0)];
        give.success.splice(0..0, alone.success.iter().cloned());
        give.success.insert(alone.success.len(), put(&self.place.key, word, self.place.lease.id));
        give.failure = vec![nested(alone)];
        give
    }

    /// Whether the release was done, and what the next got.
    fn outcome(&self, core: &Core, answer: &TxnResponse, repeated: bool) -> (bool, Option<Grant>) {
        let id = self.claim.id;
        core.places().settle(id, self.was_dirty || repeated);
        if repeated {
            core.retire_lease_of(id);
        }
        if !answer.succeeded {
            let given = parts(answer.clone()).first().is_some_and(|alone| alone.succeeded);
            return (given, None);
        }
        let last = answer.responses.len().saturating_sub(1);
        let others = kvs(answer, last).iter().any(|kv| kv.key != self.place.key);
        let token = token_of(revision(answer)).ok().filter(|_| !others);
        let grant = token.filter(|_| self.believed > core.clock.now()).map(|token| {
            let lapses = self.believed + crate::engine::drift(self.place.lease.ttl);
            core.places().holds(id, token, lapses);
            Grant { token, valid_until: self.believed, key: self.place.key.clone() }
        });
        (true, grant)
    }
}

/// What the parts "own key, mark" of an answer say.
fn entered_before(answer: &TxnResponse) -> Entered {
    match (kvs(answer, 0).first(), kvs(answer, 1).first()) {
        (_, Some(_)) => Entered::Withdrawn,
        (Some(own), None) => Entered::Before(own.create_revision),
        (None, None) => Entered::Busy,
    }
}

/// Whether this is still the key by which the claim holds.
fn still_held(claim: &Claim, grant: &Grant, kvs: &[KeyValue]) -> Result<()> {
    match kvs.first() {
        Some(kv) if token_of(kv.create_revision)? == grant.token => {
            match Word::read(&kv.value).revoked {
                true => Err(Error::lost(&claim.name, LossReason::Revoked)),
                false => Ok(()),
            }
        }
        _ => Err(Error::lost(&claim.name, LossReason::Forgotten)),
    }
}

/// A token is the revision at which the claim's key was created.
pub(super) fn token_of(revision: i64) -> Result<Token> {
    let token = u64::try_from(revision).ok().map(Token::new);
    token.filter(|token| *token <= Token::MAX).ok_or_else(|| {
        failed(format!("the store's revision {revision} is beyond any token"), false)
    })
}

/// The keeper does not wait much longer.
fn patience_for(ttl: Duration) -> Duration {
    PATIENCE.min(ttl / 8)
}

pub(super) fn unsupported(what: &str) -> Error {
    Error::Unsupported { engine: ENGINE, what: what.to_owned() }
}
