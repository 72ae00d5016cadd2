//! How a claim leaves: released, with the next one in its place, or withdrawn.

use super::Core;
use super::claims::{PAUSES, token_of};
use super::keys::{self, Word};
use super::leases::Lease;
use super::link::{Failed, PATIENCE, PERSISTENCE, What};
use super::places::Place;
use super::rpc::{KeyValue, RequestOp, TxnRequest, TxnResponse};
use super::txn::{
    always, created, delete, kvs, nested, newest, parts, put, range, read, revision, unchanged,
};
use crate::clock::Moment;
use crate::engine::{Claim, ClaimId, Grant, Mode, drift};
use crate::error::{Error, Result};

impl Core {
    pub(super) async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let not_held = || Error::NotHeld { name: claim.name.clone() };
        let key = self.key_of(claim, grant).ok_or_else(not_held)?;
        let place = self.places().find(claim.id).cloned();
        if place.as_ref().is_none_or(|place| place.may_travel) {
            return self.release_if_owned(claim, grant, &key).await.map(|()| None);
        }
        let tombstone_on = place.filter(|place| place.is_dirty).map(|place| place.lease);
        let at = i64::try_from(grant.token.get()).unwrap_or(i64::MAX);
        let mut next = next.and_then(|next| self.take_along(next));
        let give = self.giving(claim, &key, at, tombstone_on.as_deref());
        let mut given = self.give_with(claim, give.clone(), next.as_ref()).await;
        if let Err(failed) = &given
            && failed.what == What::LeaseGone
            && let Some(next) = next.take()
        {
            // Of the next, perhaps, which asks for itself then.
            let repeated = failed.unknown;
            next.stays(self, repeated);
            given = self.give_with(claim, give, None).await;
            given = given.map(|(answer, again)| (answer, again || repeated));
        }
        let (answer, repeated) = match given {
            Ok(answer) => answer,
            Err(failed) if failed.what == What::LeaseGone => {
                // Its own: then its key went with it, and no other can come.
                self.forget(claim.id);
                return Err(not_held());
            }
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
            if !repeated {
                self.places().spare(place);
            }
        }
        match released || repeated {
            true => Ok(taken),
            false => Err(not_held()),
        }
    }

    /// Releases a lock that may have been passed on: only if the claim still owns the key. A next
    /// claim is not taken along; it sends its own request.
    async fn release_if_owned(&self, claim: &Claim, grant: &Grant, key: &[u8]) -> Result<()> {
        let not_held = || Error::NotHeld { name: claim.name.clone() };
        let known = self.places().find(claim.id).and_then(|place| place.token);
        let token = match known {
            Some(token) => token,
            None => {
                let seen = self.link.txn(always(vec![read(key)]), PATIENCE).await;
                let seen = seen.map_err(Failed::into_error)?;
                token_of(kvs(&seen, 0).first().ok_or_else(not_held)?.create_revision)?
            }
        };
        if token != grant.token {
            return Err(not_held());
        }
        let place = self.places().withdraw(claim.id, self.clock.now());
        let deleted = match &place {
            Some(place) => self.clear(claim.id, place).await,
            None => self.delete_if_owned(claim.id, key, None).await,
        };
        match deleted {
            Ok(Owner::This) => {
                if place.is_none() && claim.detachable {
                    keys::lease_of(key).into_iter().for_each(|it| self.revoke_in_background(it));
                }
                Ok(())
            }
            Ok(Owner::Another | Owner::Nobody) => Err(not_held()),
            Err(failed) => {
                self.pulse_soon();
                Err(failed.into_error())
            }
        }
    }

    /// Deletes a key if it belongs to this claim. Returns its owner.
    async fn delete_if_owned(
        &self,
        id: ClaimId,
        key: &[u8],
        tombstone: Option<RequestOp>,
    ) -> std::result::Result<Owner, Failed> {
        let mut absent = Owner::Nobody;
        loop {
            let reads = [read(key)].into_iter().chain(tombstone.clone()).collect();
            let seen = self.link.txn(always(reads), PATIENCE).await?;
            let Some(kv) = kvs(&seen, 0).first() else { return Ok(absent) };
            if keys::id_of(kv, &Word::read(&kv.value)) != Some(id) {
                return Ok(Owner::Another);
            }
            let delete = TxnRequest {
                compare: vec![unchanged(key, kv.mod_revision)],
                success: vec![delete(key)],
                failure: Vec::new(),
            };
            if self.link.txn(delete, PATIENCE).await?.succeeded {
                return Ok(Owner::This);
            }
            // The key changed, or a repeated request deleted it at its first attempt.
            absent = Owner::This;
        }
    }

    /// The release of a key, with a tombstone where a request for the claim may still come.
    fn giving(&self, claim: &Claim, key: &[u8], at: i64, dirty: Option<&Lease>) -> TxnRequest {
        let tombstone = dirty.map(|lease| self.tombstone(claim.id, lease));
        TxnRequest {
            compare: vec![created(key, at)],
            success: [delete(key)].into_iter().chain(tombstone.clone()).collect(),
            failure: tombstone.into_iter().collect(),
        }
    }

    /// What refuses late requests for a claim. It lives as long as the lease by which they would
    /// create their key: without that, they create nothing.
    fn tombstone(&self, id: ClaimId, lease: &Lease) -> RequestOp {
        put(&self.layout.mark(id), Vec::new(), lease.id)
    }

    /// Releases, and takes the next along.
    async fn give_with(
        &self,
        claim: &Claim,
        give: TxnRequest,
        next: Option<&Next<'_>>,
    ) -> std::result::Result<(TxnResponse, bool), Failed> {
        let txn = match next {
            Some(next) => next.after(self, give),
            None => give,
        };
        self.give(claim, txn).await
    }

    /// Sends a release until it is answered; whether an attempt before may have done it. A failure
    /// is unknown if any of the attempts was.
    async fn give(
        &self,
        claim: &Claim,
        txn: TxnRequest,
    ) -> std::result::Result<(TxnResponse, bool), Failed> {
        let give_up = self.clock.now() + PERSISTENCE;
        let (mut pause, mut repeated) = (PAUSES.0, false);
        loop {
            let mut failed = match self.coach.act(&claim.name, txn.clone()).await {
                Ok(answer) => return Ok((answer, repeated)),
                Err(failed) => failed,
            };
            repeated |= failed.unknown;
            failed.unknown = repeated;
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
        let mut places = self.places();
        // Given back meanwhile, because nobody used it.
        if lease.is_gone() {
            return None;
        }
        places.enter(next, &lease, &self.layout, self.clock.now());
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
            Some(place) => self.clear(claim.id, &place).await.map(drop).map_err(Failed::into_error),
            None => self.clear_unknown(claim).await.map_err(Failed::into_error),
        }
    }

    /// Deletes the key of a claim that leaves, with a tombstone where it may still be created. No
    /// new claim gets the lease of that one, so that it ends, and its tombstones with it. Returns
    /// who owned the key: a lock that may travel can have been passed on.
    pub(super) async fn clear(
        &self,
        id: ClaimId,
        place: &Place,
    ) -> std::result::Result<Owner, Failed> {
        let tombstone = place.is_dirty.then(|| {
            self.retire(&place.lease);
            self.tombstone(id, &place.lease)
        });
        let cleared = match place.may_travel {
            true => self.delete_if_owned(id, &place.key, tombstone).await,
            false => {
                let ops = [delete(&place.key)].into_iter().chain(tombstone).collect();
                self.link.txn(always(ops), PATIENCE).await.map(|_| Owner::This)
            }
        };
        let owner = match cleared {
            // With its lease the key is gone, and no other can come.
            Err(failed) if failed.what == What::LeaseGone => Owner::Nobody,
            cleared => cleared?,
        };
        self.places().left(id);
        if owner != Owner::Another {
            self.give_back_own(place);
        }
        Ok(owner)
    }

    /// A claim that another process took: whatever bears its id.
    async fn clear_unknown(&self, claim: &Claim) -> std::result::Result<(), Failed> {
        let all = always(vec![range(&self.layout.claims(&claim.name))]);
        let seen = self.link.txn(all, PATIENCE).await?;
        let is_its = |kv: &&KeyValue| keys::id_of(kv, &Word::read(&kv.value)) == Some(claim.id);
        let ours = kvs(&seen, 0).iter().filter(is_its);
        let ops: Vec<_> = ours.map(|kv| delete(&kv.key)).collect();
        if !ops.is_empty() {
            self.link.txn(always(ops), PATIENCE).await?;
        }
        Ok(())
    }

    /// A lease that served one claim only is not needed any more.
    pub(super) fn give_back_own(&self, place: &Place) {
        if !place.lease.is_shared {
            self.revoke_in_background(place.lease.id);
        }
    }
}

/// Which claim owns a key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    This,
    Another,
    Nobody,
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
        let word = Word::of(self.claim, &self.place.key).write();
        give.success = vec![newest(&keys, 2, 0)];
        give.success.splice(0..0, alone.success.iter().cloned());
        give.success.insert(alone.success.len(), put(&self.place.key, word, self.place.lease.id));
        give.failure = vec![nested(alone)];
        give
    }

    /// It was not taken along, unless by an attempt without an answer.
    fn stays(&self, core: &Core, repeated: bool) {
        core.places().settle(self.claim.id, self.was_dirty || repeated);
        if repeated {
            core.retire_lease_of(self.claim.id);
        }
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
        let lapses = self.believed + drift(self.place.lease.ttl);
        let token = token
            .filter(|_| self.believed > core.clock.now())
            .filter(|token| core.places().holds(id, *token, lapses));
        let grant = token.map(|token| Grant {
            token,
            valid_until: self.believed,
            key: self.place.key.clone(),
        });
        (true, grant)
    }
}
