//! What this client knows of its claims: where they stand, and which still have to go.

use std::sync::Arc;
use std::time::Duration;

use super::keys::Layout;
use super::leases::Lease;
use crate::clock::Moment;
use crate::engine::common::tombstones::Tombstones;
use crate::engine::{Claim, ClaimId};
use crate::hash::FastMap;
use crate::name::Name;
use crate::token::Token;

const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// Whoever withdraws a claim tries it at once; the first try of the pulse comes after that.
const FIRST_TRY: Duration = Duration::from_millis(2500);

/// How many keys are spared of one name, and of how many names.
const MOST_SPARE: usize = 4;
const MOST_NAMES: usize = 4096;

/// All claims of a client that may have a key.
#[derive(Debug, Default)]
pub(super) struct Places {
    places: FastMap<ClaimId, Place>,
    leaving: FastMap<ClaimId, Leaving>,
    withdrawn: Tombstones,
    /// Keys on shared leases that were deleted for sure, for the next claims on their names.
    spare: FastMap<Name, Vec<(i64, Vec<u8>)>>,
}

/// Where a claim stands.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) name: Name,
    pub(super) key: Vec<u8>,
    pub(super) lease: Arc<Lease>,
    /// By which it holds, if it does.
    pub(super) token: Option<Token>,
    /// A request that creates its key was not answered: it ends with a mark.
    pub(super) is_dirty: bool,
    /// How many are waiting for its grant.
    asking: u32,
    /// If nobody asks or renews until then, it is over, although its lease may live on.
    lapses: Moment,
    /// It may be renewed by another process: then only its lease ends it.
    pub(super) may_travel: bool,
}

/// A claim whose key has to go. It is tried until it is done: its lease may live for ever.
#[derive(Clone, Debug)]
pub(super) struct Leaving {
    pub(super) place: Place,
    pause: Duration,
    pub(super) try_at: Moment,
}

/// What must be done now about claims that nobody asks for any more.
#[derive(Debug, Default)]
pub(super) struct Due {
    /// These have to go.
    pub(super) leaving: Vec<(ClaimId, Place)>,
    /// When to look again.
    pub(super) next: Option<Moment>,
}

impl Places {
    /// Where this claim stands, if it has been asked for before.
    pub(super) fn find(&self, id: ClaimId) -> Option<&Place> {
        self.places.get(&id)
    }

    /// A place for a claim, with a key to spare if there is one. If it has a place already, that
    /// one stays.
    pub(super) fn enter(
        &mut self,
        claim: &Claim,
        lease: &Arc<Lease>,
        layout: &Layout,
        now: Moment,
    ) {
        let spare = &mut self.spare;
        self.places.entry(claim.id).or_insert_with(|| Place {
            name: claim.name.clone(),
            key: take_spare(spare, claim, lease)
                .unwrap_or_else(|| layout.claim(&claim.name, lease.id, claim.id)),
            lease: lease.clone(),
            token: None,
            is_dirty: false,
            asking: 0,
            lapses: now + lease.ttl,
            may_travel: claim.detachable,
        });
    }

    /// The place of a claim that holds already, by a key that another process may have made.
    pub(super) fn attach(
        &mut self,
        claim: &Claim,
        key: Vec<u8>,
        lease: &Arc<Lease>,
        token: Token,
        now: Moment,
    ) {
        let place = Place {
            name: claim.name.clone(),
            key,
            lease: lease.clone(),
            token: Some(token),
            is_dirty: false,
            asking: 0,
            lapses: now + claim.ttl,
            may_travel: claim.detachable,
        };
        self.places.insert(claim.id, place);
    }

    /// Whether nothing is to be asked for this claim any more.
    pub(super) fn is_withdrawn(&self, id: ClaimId) -> bool {
        self.withdrawn.contains(id)
    }

    /// Another claim has the key of this one now.
    pub(super) fn passed_on(&mut self, id: ClaimId, now: Moment) {
        self.places.remove(&id);
        self.withdrawn.insert(id, now);
    }

    /// Whether a request that creates this claim's key was not answered.
    pub(super) fn is_dirty(&self, id: ClaimId) -> bool {
        self.find(id).is_some_and(|place| place.is_dirty)
    }

    /// Somebody waits for this claim's grant from now on.
    pub(super) fn asks(&mut self, id: ClaimId) {
        if let Some(place) = self.places.get_mut(&id) {
            place.asking += 1;
        }
    }

    /// Nobody does any more; it is over soon, unless somebody asks again.
    pub(super) fn asked(&mut self, id: ClaimId, now: Moment) {
        if let Some(place) = self.places.get_mut(&id) {
            place.asking = place.asking.saturating_sub(1);
            if place.asking == 0 && place.token.is_none() {
                place.lapses = now + place.lease.ttl;
            }
        }
    }

    /// A request that creates this claim's key is about to be sent: from here on it is in doubt.
    /// Whether it was before; `None` if it must not be sent.
    pub(super) fn doubt(&mut self, id: ClaimId) -> Option<bool> {
        if self.withdrawn.contains(id) {
            return None;
        }
        let place = self.places.get_mut(&id)?;
        Some(std::mem::replace(&mut place.is_dirty, true))
    }

    /// That request was answered.
    pub(super) fn settle(&mut self, id: ClaimId, is_dirty: bool) {
        if let Some(place) = self.places.get_mut(&id) {
            place.is_dirty = is_dirty;
        }
    }

    /// It holds, until then if it is not renewed. Not if it has lapsed or was withdrawn meanwhile:
    /// then its key is about to go, or gone.
    #[must_use]
    pub(super) fn holds(&mut self, id: ClaimId, token: Token, lapses: Moment) -> bool {
        let Some(place) = self.places.get_mut(&id) else { return false };
        place.token = Some(token);
        place.lapses = lapses;
        true
    }

    /// It has no key any more.
    pub(super) fn forget(&mut self, id: ClaimId) -> Option<Place> {
        self.places.remove(&id)
    }

    /// This place has no key any more, or never had, and nothing is under way that could make or
    /// delete it: the next claim on its name may have the same key.
    pub(super) fn spare(&mut self, place: Place) {
        if place.is_dirty || !place.lease.is_shared || place.lease.is_gone() {
            return;
        }
        if self.spare.len() >= MOST_NAMES && !self.spare.contains_key(&place.name) {
            self.spare.clear();
        }
        let keys = self.spare.entry(place.name).or_default();
        if keys.len() >= MOST_SPARE {
            keys.remove(0);
        }
        keys.push((place.lease.id, place.key));
    }

    /// It is withdrawn: nothing is asked for it any more, and its key has to go.
    pub(super) fn withdraw(&mut self, id: ClaimId, now: Moment) -> Option<Place> {
        self.withdrawn.insert(id, now);
        match self.places.remove(&id) {
            Some(place) => {
                self.leave(id, place.clone(), now);
                Some(place)
            }
            None => self.leaving.get(&id).map(|leaving| leaving.place.clone()),
        }
    }

    fn leave(&mut self, id: ClaimId, place: Place, now: Moment) {
        let (pause, try_at) = (PAUSES.0, now + FIRST_TRY);
        self.leaving.insert(id, Leaving { place, pause, try_at });
    }

    pub(super) fn is_leaving(&self, id: ClaimId) -> bool {
        self.leaving.contains_key(&id)
    }

    /// Its key is gone.
    pub(super) fn left(&mut self, id: ClaimId) {
        self.leaving.remove(&id);
    }

    /// The claims that have to go and are to be tried now: those that lapsed, and those that were
    /// tried in vain.
    pub(super) fn due(&mut self, now: Moment) -> Due {
        let lapsed: Vec<ClaimId> = self
            .places
            .iter()
            .filter(|(_, place)| place.asking == 0 && place.lapses <= now)
            .map(|(id, _)| *id)
            .collect();
        let mut due = Due::default();
        for id in lapsed {
            if let Some(place) = self.places.remove(&id).filter(|place| !place.may_travel) {
                // Nothing may be asked for it any more: its key would be deleted under it.
                self.withdrawn.insert(id, now);
                self.leave(id, place.clone(), now);
                due.leaving.push((id, place));
            }
        }
        for (id, leaving) in &mut self.leaving {
            if leaving.try_at <= now {
                leaving.pause = (leaving.pause * 2).min(PAUSES.1);
                leaving.try_at = now + leaving.pause;
                due.leaving.push((*id, leaving.place.clone()));
            }
        }
        let lapses = self.places.values().filter(|place| place.asking == 0);
        let lapses = lapses.map(|place| place.lapses);
        due.next = lapses.chain(self.leaving.values().map(|leaving| leaving.try_at)).min();
        due
    }

    /// The leases that waiting claims have for themselves.
    pub(super) fn waiting_leases(&self) -> Vec<Arc<Lease>> {
        let waiting =
            self.places.values().filter(|place| place.asking > 0 && place.token.is_none());
        waiting.map(|place| place.lease.clone()).filter(|lease| !lease.is_shared).collect()
    }

    /// Whether some claim has a key on this lease.
    pub(super) fn uses(&self, lease: &Arc<Lease>) -> bool {
        let leaving = self.leaving.values().map(|leaving| &leaving.place);
        self.places.values().chain(leaving).any(|place| Arc::ptr_eq(&place.lease, lease))
    }

    /// The claims that hold by this lease.
    pub(super) fn holders(&self, lease: &Arc<Lease>) -> Vec<ClaimId> {
        let held = self.places.iter().filter(|(_, place)| place.token.is_some());
        held.filter(|(_, place)| Arc::ptr_eq(&place.lease, lease)).map(|(id, _)| *id).collect()
    }

    /// A lease is gone, and the keys of its claims with it. Answers who held by it.
    pub(super) fn lose(&mut self, lease: &Arc<Lease>) -> Vec<ClaimId> {
        let holders = self.holders(lease);
        self.places.retain(|_, place| !Arc::ptr_eq(&place.lease, lease));
        holders
    }

    /// How long this claim lasts if nobody renews it.
    pub(super) fn left_of(&self, id: ClaimId, now: Moment) -> Option<Duration> {
        let place = self.places.get(&id)?;
        let until = place.lapses.min(place.lease.valid_until());
        Some(until.saturating_duration_since(now))
    }
}

/// A key on this lease, if one is left of this claim's name.
fn take_spare(
    spare: &mut FastMap<Name, Vec<(i64, Vec<u8>)>>,
    claim: &Claim,
    lease: &Lease,
) -> Option<Vec<u8>> {
    let keys = spare.get_mut(&claim.name).filter(|_| lease.is_shared)?;
    let place = keys.iter().position(|(id, _)| *id == lease.id)?;
    Some(keys.swap_remove(place).1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_that_lapsed_neither_holds_nor_enters_again() {
        let at = |secs: u64| Moment::from_nanos(secs * 1_000_000_000);
        let ttl = Duration::from_secs(3);
        let (claim, layout) = (Claim::plain("lapsed", ttl), Layout::new("p", false));
        let (mut places, lease) = (Places::default(), Lease::new(1, ttl, true, at(100)));
        places.enter(&claim, &lease, &layout, at(100));
        assert!(places.holds(claim.id, Token::new(1), at(103)));
        assert!(places.due(at(102)).leaving.is_empty());
        assert_eq!(places.due(at(104)).leaving.len(), 1);
        assert!(!places.holds(claim.id, Token::new(1), at(110)), "its key is being deleted");
        places.left(claim.id);
        places.enter(&claim, &lease, &layout, at(105));
        assert_eq!(places.doubt(claim.id), None, "a late request of it is not sent");
    }
}
