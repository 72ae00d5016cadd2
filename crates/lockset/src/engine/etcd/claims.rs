//! The way of one claim: it enters, waits behind those who came before, and holds.

use std::sync::Arc;
use std::time::Duration;

use super::keys::{self, Keys, Word, mode_of};
use super::leases::Lease;
use super::link::{Failed, PATIENCE, PERSISTENCE, What, failed};
use super::rpc::{KeyValue, TxnRequest, TxnResponse};
use super::txn::{
    always, created, kvs, newest, no_news, nobody, put, read, revision, rewrite, unchanged,
};
use super::{Core, ENGINE};
use crate::clock::Moment;
use crate::engine::common::admission::{Tally, check_permits, clash};
use crate::engine::{Amend, Claim, ClaimId, Grant, Mode, Wait, drift};
use crate::error::{Error, LossReason, Result};
use crate::report::report;
use crate::token::Token;

/// How often something that a change of leader or of a lease disturbed is begun again.
pub(super) const TRIES: usize = 4;
/// However little time is left to wait for the lock, an answer is waited for this long.
const LEAST_PATIENCE: Duration = Duration::from_millis(500);
pub(super) const PAUSES: (Duration, Duration) =
    (Duration::from_millis(20), Duration::from_millis(500));

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
    Tombstones,
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
        let began = self.clock.now();
        let limit = match wait {
            Wait::Until(deadline) => deadline.max(began + LEAST_PATIENCE),
            Wait::No | Wait::Forever => Moment::NEVER,
        };
        let entering = self.first_request(claim, wait, limit);
        let Some(entered) = self.clock.timeout_at(limit, entering).await else {
            // What was sent may still be executed.
            if self.places().is_dirty(claim.id) {
                self.retire_lease_of(claim.id);
            }
            self.places().withdraw(claim.id, self.clock.now());
            self.pulse_soon();
            let waited = self.clock.now().saturating_duration_since(began);
            return Err(failed(format!("no server answered within {waited:.1?}"), true));
        };
        let (asking, believed, entered) = entered?;
        match entered {
            Entered::Key(at, Standing::Admitted) => self.grant(claim, &asking, at, believed).await,
            Entered::Key(at, Standing::Clash(why)) => {
                match at {
                    0 => self.leave_unheld(claim).await?,
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
            Entered::Busy => self.leave_unheld(claim).await.map(|()| None),
            Entered::Tombstones => Err(Error::NotHeld { name: claim.name.clone() }),
        }
    }

    /// The claim's first request, on a lease that stands; until when that was believed before.
    async fn first_request(
        &self,
        claim: &Claim,
        wait: Wait,
        limit: Moment,
    ) -> Result<(Asking<'_>, Moment, Entered)> {
        for _ in 0..TRIES {
            let asking = self.ask_for(claim).await.map_err(Failed::into_error)?;
            let believed = asking.lease.valid_until();
            match self.enter(claim, wait, limit, &asking).await {
                Ok(entered) => return Ok((asking, believed, entered)),
                Err(failed) if failed.what == What::LeaseGone => {
                    self.lose_lease(&asking.lease);
                    // Nothing was created by it, and nothing will be.
                    self.places().forget(claim.id);
                }
                Err(failed) => return Err(failed.into_error()),
            }
        }
        Err(failed("its leases end as soon as they are made".to_owned(), true))
    }

    /// A claim that was refused has no key; but one that was asked for without an answer before
    /// may still get it.
    async fn leave_unheld(&self, claim: &Claim) -> Result<()> {
        if self.places().is_dirty(claim.id) {
            return self.withdraw(claim).await;
        }
        if let Some(place) = self.forget(claim.id) {
            self.give_back_own(&place);
            self.places().spare(place);
        }
        Ok(())
    }

    /// A place for this claim, on a lease.
    async fn ask_for(&self, claim: &Claim) -> std::result::Result<Asking<'_>, Failed> {
        let (lease, place) = loop {
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
            // Given back meanwhile, because nobody used it; see `leases_in_use`.
            if lease.is_gone() {
                continue;
            }
            places.enter(claim, &lease, &self.layout, now);
            places.asks(claim.id);
            let place = places.find(claim.id).cloned();
            break (lease, place);
        };
        self.pulse_by(lease.beat_at());
        let (key, lease) = place.map_or((Vec::new(), lease), |place| (place.key, place.lease));
        Ok(Asking { core: self, id: claim.id, key, lease })
    }

    async fn enter(
        &self,
        claim: &Claim,
        wait: Wait,
        limit: Moment,
        asking: &Asking<'_>,
    ) -> std::result::Result<Entered, Failed> {
        match (wait, claim.mode) {
            (Wait::No, Mode::Exclusive) => self.enter_if_free(claim, asking).await,
            (Wait::No, _) => self.enter_if_admitted(claim, asking).await,
            _ => self.enter_and_queue(claim, limit, asking).await,
        }
    }

    /// One transaction: a key, and who was there before.
    async fn enter_and_queue(
        &self,
        claim: &Claim,
        limit: Moment,
        asking: &Asking<'_>,
    ) -> std::result::Result<Entered, Failed> {
        let (keys, mark) = (self.layout.claims(&claim.name), self.layout.mark(claim.id));
        // An exclusive claim needs to see only the one before it, and itself.
        let most = if claim.mode == Mode::Exclusive { 2 } else { 0 };
        let txn = TxnRequest {
            compare: vec![created(&asking.key, 0), created(&mark, 0)],
            success: vec![self.put_claim(claim, asking), newest(&keys, most, 0)],
            failure: vec![read(&asking.key), read(&mark)],
        };
        let Some(answer) = self.create(claim, txn, limit).await? else {
            return Ok(Entered::Tombstones);
        };
        if !answer.succeeded {
            return Ok(entered_before(claim, &answer));
        }
        let at = revision(&answer);
        Ok(match self.standing(claim.mode, at, kvs(&answer, 1), &keys, most > 0) {
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
        let Some(answer) = self.create(claim, txn, Moment::NEVER).await? else {
            return Ok(Entered::Tombstones);
        };
        if answer.succeeded {
            return Ok(Entered::Key(revision(&answer), Standing::Admitted));
        }
        let others = kvs(&answer, 2);
        match entered_before(claim, &answer) {
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
            match entered_before(claim, &seen) {
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
            let Some(answer) = self.create(claim, txn, Moment::NEVER).await? else {
                return Ok(Entered::Tombstones);
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
        // Whoever waits counts too: once it holds, nobody asks again who came in behind it.
        let clashes = older.iter().enumerate();
        let mut clashes =
            clashes.filter_map(|(place, kv)| Some((place, kv, clash(mode_of(kv), mode)?)));
        match clashes.next() {
            // Whether it holds or waits, only the whole line tells.
            Some(_) if is_part => return Standing::Unclear,
            // One of ours that waits may be about to leave, because it clashes with others.
            Some((1.., kv, _)) if keys::id_of(kv, &Word::read(&kv.value)).is_some() => {
                return Standing::Behind(all.clone());
            }
            Some((_, _, why)) => return Standing::Clash(why),
            None => {}
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
        put(&asking.key, Word::of(claim, &asking.key).write(), asking.lease.id)
    }

    /// Sends a request that may create the claim's key, until it is answered; `None` if the claim
    /// was withdrawn meanwhile. It may be repeated, because it creates only what is not there; but
    /// an attempt without an answer may arrive late, so the claim then ends with a mark.
    async fn create(
        &self,
        claim: &Claim,
        txn: TxnRequest,
        limit: Moment,
    ) -> std::result::Result<Option<TxnResponse>, Failed> {
        let give_up = limit.min(self.clock.now() + PERSISTENCE);
        let mut pause = PAUSES.0;
        loop {
            let Some(was_dirty) = self.places().doubt(claim.id) else { return Ok(None) };
            let failed = match self.coach.act(&claim.name, txn.clone()).await {
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
    pub(super) fn retire_lease_of(&self, id: ClaimId) {
        let lease = self.places().find(id).map(|place| place.lease.clone());
        lease.inspect(|lease| self.retire(lease));
    }

    pub(super) fn retire(&self, lease: &Arc<Lease>) {
        if lease.is_shared {
            self.leases.retire(lease);
        }
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
                    report!(
                        debug,
                        error = failed.into_error(),
                        "a waiter could not read the queue"
                    );
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
                    self.forget(claim.id).inspect(|place| self.give_back_own(place));
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
        if !self.places().holds(claim.id, token, believed + drift(lease.ttl)) {
            return Err(Error::NotHeld { name: claim.name.clone() });
        }
        self.pulse_by(believed);
        Ok(Some(Grant { token, valid_until: believed, key: asking.key.clone() }))
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
    pub(super) fn key_of(&self, claim: &Claim, grant: &Grant) -> Option<Vec<u8>> {
        let known = self.places().find(claim.id).map(|place| place.key.clone());
        // A ticket may be forged, so it must be a key of this name; whether it is the claim's own
        // is written in its value.
        let written = || Some(&grant.key).filter(|key| self.layout.is_ours(&claim.name, key));
        known.or_else(|| written().cloned())
    }
}

/// What the parts "own key, mark" of an answer say.
fn entered_before(claim: &Claim, answer: &TxnResponse) -> Entered {
    match (kvs(answer, 0).first(), kvs(answer, 1).first()) {
        (_, Some(_)) => Entered::Tombstones,
        (Some(own), None) => match keys::id_of(own, &Word::read(&own.value)) == Some(claim.id) {
            true => Entered::Before(own.create_revision),
            // Whoever had this key before was not deleted after all.
            false => Entered::Tombstones,
        },
        (None, None) => Entered::Busy,
    }
}

/// A token is the revision at which the claim's key was created.
pub(super) fn token_of(revision: i64) -> Result<Token> {
    let token = u64::try_from(revision).ok().map(Token::new);
    token.filter(|token| *token <= Token::MAX).ok_or_else(|| {
        failed(format!("the store's revision {revision} is beyond any token"), false)
    })
}

pub(super) fn unsupported(what: &str) -> Error {
    Error::Unsupported { engine: ENGINE, what: what.to_owned() }
}
