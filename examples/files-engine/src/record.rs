//! The rules of one lock, as a record that is read, changed and written as a whole.

use std::time::Duration;

use lockset::clock::{Moment, wall_micros};
use lockset::engine::{
    Admission, Break, Claim, ClaimId, Grant, Holder, LockState, Renewal, Waiter, drift,
};
use lockset::{LossReason, Mode, Name, Note, Token};
use serde::{Deserialize, Serialize};

/// How long a withdrawn claim is remembered. A request cannot be late by more.
const TOMBSTONE_LIFE: Duration = Duration::from_secs(60);

/// All that is stored of one name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) name: Name,
    /// The greatest token so far.
    fence: u64,
    holder: Option<Held>,
    /// First come, first served. Empty while there is no holder.
    waiters: Vec<Waiting>,
    withdrawn: Vec<Tombstone>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Held {
    claim: ClaimId,
    token: Token,
    ttl: Duration,
    #[serde(with = "nanos")]
    expires: Moment,
    pub(crate) note: Note,
    revoked: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Waiting {
    claim: ClaimId,
    ttl: Duration,
    note: Note,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Tombstone {
    claim: ClaimId,
    #[serde(with = "nanos")]
    expires: Moment,
}

impl Record {
    /// A name that was never used.
    pub(crate) fn new(name: Name) -> Self {
        Self { name, fence: 0, holder: None, waiters: Vec::new(), withdrawn: Vec::new() }
    }

    /// Applies what time alone has changed. Every transaction begins with it.
    pub(crate) fn advance(&mut self, now: Moment) {
        // Nothing expires later than its full time from now, unless the machine was restarted, and
        // its clock with it. Then the holder's process is gone, and its lease begins anew.
        if let Some(held) = &mut self.holder {
            held.expires = held.expires.min(now + held.ttl);
        }
        for tombstone in &mut self.withdrawn {
            tombstone.expires = tombstone.expires.min(now + TOMBSTONE_LIFE);
        }
        self.withdrawn.retain(|tombstone| tombstone.expires > now);
        self.holder.take_if(|held| held.expires <= now);
        self.admit(now);
    }

    /// A claim's first request, or a repetition of it. `None`: the claim is queued.
    pub(crate) fn enter(&mut self, claim: &Claim, queue: bool, now: Moment) -> Option<Admission> {
        if self.is_withdrawn(claim.id) {
            return Some(Admission::Forgotten);
        }
        let known = self.holder.as_ref().is_some_and(|held| held.claim == claim.id)
            || self.waiters.iter().any(|waiting| waiting.claim == claim.id);
        if !known {
            if self.holder.is_some() && !queue {
                return Some(Admission::NotInTime);
            }
            let note = claim.note.clone();
            self.waiters.push(Waiting { claim: claim.id, ttl: claim.ttl, note });
            self.admit(now);
        }
        self.look(claim.id, false)
    }

    /// The decision about a claim that entered before. `None`: it still waits. If its time is
    /// `over`, it leaves the queue in the same step.
    pub(crate) fn look(&mut self, id: ClaimId, over: bool) -> Option<Admission> {
        if let Some(held) = self.holder.as_ref().filter(|held| held.claim == id) {
            return Some(Admission::Granted(held.grant()));
        }
        let Some(place) = self.waiters.iter().position(|waiting| waiting.claim == id) else {
            // Withdrawn, or granted and expired while its process slept.
            return Some(Admission::Forgotten);
        };
        over.then(|| {
            self.waiters.remove(place);
            Admission::NotInTime
        })
    }

    /// The holder, if it has this id and this token.
    pub(crate) fn held_by(&mut self, id: ClaimId, token: Token) -> Option<&mut Held> {
        self.holder.as_mut().filter(|held| held.claim == id && held.token == token)
    }

    pub(crate) fn renew(&mut self, claim: &Claim, token: Token, now: Moment) -> Renewal {
        match self.held_by(claim.id, token) {
            None => Renewal::Lost(LossReason::Forgotten),
            Some(held) if held.revoked => Renewal::LastLease,
            Some(held) => {
                (held.ttl, held.expires) = (claim.ttl, now + claim.ttl);
                Renewal::Renewed(held.grant())
            }
        }
    }

    /// Passes the lock on to `successor`. Token and lease stay as they are. `None`: `id` does not
    /// hold it.
    pub(crate) fn adopt(
        &mut self,
        id: ClaimId,
        token: Token,
        successor: &Claim,
        now: Moment,
    ) -> Option<Grant> {
        if let Some(held) = self.held_by(successor.id, token) {
            // A repetition.
            return Some(held.grant());
        }
        let held = self.held_by(id, token)?;
        (held.claim, held.note) = (successor.id, successor.note.clone());
        let grant = held.grant();
        self.add_tombstone(id, now);
        Some(grant)
    }

    /// Removes a claim, held or waiting, and admits the next.
    pub(crate) fn remove(&mut self, id: ClaimId, now: Moment) {
        self.holder.take_if(|held| held.claim == id);
        self.waiters.retain(|waiting| waiting.claim != id);
        self.admit(now);
    }

    /// The same, for ever: the claim may not come back.
    pub(crate) fn withdraw(&mut self, id: ClaimId, now: Moment) {
        self.remove(id, now);
        self.add_tombstone(id, now);
    }

    pub(crate) fn is_withdrawn(&self, id: ClaimId) -> bool {
        self.withdrawn.iter().any(|tombstone| tombstone.claim == id)
    }

    fn add_tombstone(&mut self, claim: ClaimId, now: Moment) {
        if !self.is_withdrawn(claim) {
            self.withdrawn.push(Tombstone { claim, expires: now + TOMBSTONE_LIFE });
        }
    }

    /// Takes the lock away from its holder. Returns who that was.
    pub(crate) fn force_release(&mut self, how: Break, now: Moment) -> Vec<Holder> {
        let Some(held) = &mut self.holder else { return Vec::new() };
        held.revoked = true;
        let broken = held.describe(now);
        if how == Break::Now {
            self.holder = None;
            self.admit(now);
        }
        vec![broken]
    }

    pub(crate) fn state(&self, now: Moment) -> LockState {
        let waiters = self.waiters.iter().map(|waiting| Waiter {
            claim: waiting.claim,
            mode: Mode::Exclusive,
            note: waiting.note.clone(),
        });
        LockState {
            holders: self.holder.iter().map(|held| held.describe(now)).collect(),
            waiters: waiters.collect(),
            fence: (self.fence > 0).then_some(Token::new(self.fence)),
            ..LockState::free(self.name.clone())
        }
    }

    /// Grants a free lock to the first waiter, whose lease begins now.
    fn admit(&mut self, now: Moment) {
        if self.holder.is_some() || self.waiters.is_empty() {
            return;
        }
        let Waiting { claim, ttl, note } = self.waiters.remove(0);
        // The wall clock keeps tokens growing if the file was lost.
        self.fence = (self.fence + 1).max(wall_micros());
        let token = Token::new(self.fence);
        self.holder = Some(Held { claim, token, ttl, expires: now + ttl, note, revoked: false });
    }
}

impl Held {
    /// Valid until shortly before it expires. The lease may count from the transaction, instead of
    /// from before the request, because both ends read the same clock.
    pub(crate) fn grant(&self) -> Grant {
        let valid_until = self.expires.saturating_sub(drift(self.ttl));
        Grant { token: self.token, valid_until, key: Vec::new() }
    }

    fn describe(&self, now: Moment) -> Holder {
        Holder {
            claim: Some(self.claim),
            token: Some(self.token),
            mode: Mode::Exclusive,
            note: self.note.clone(),
            left: self.expires.saturating_duration_since(now),
            revoked: self.revoked,
        }
    }
}

/// A moment of the boot clock as a number.
mod nanos {
    use lockset::clock::Moment;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(at: &Moment, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(at.as_nanos())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Moment, D::Error> {
        u64::deserialize(from).map(Moment::from_nanos)
    }
}

#[cfg(test)]
mod tests {
    use lockset_testkit::steps;

    use super::*;

    /// The boot clock begins at zero again, and what is stored lies far in its future.
    #[test]
    fn after_a_restart_of_the_machine_a_lease_lasts_its_ttl_at_most() {
        let ttl = Duration::from_secs(5);
        let (claim, boot) = (steps::claim("nightly", ttl), Moment::from_nanos(0));
        let mut record = Record::new(claim.name.clone());
        record.enter(&claim, false, boot + Duration::from_secs(86_400));
        record.withdraw(ClaimId::random(), boot + Duration::from_secs(86_400));

        record.advance(boot);
        assert_eq!(record.state(boot).holders[0].left, ttl);
        record.advance(boot + ttl);
        assert!(record.state(boot + ttl).holders.is_empty());
        record.advance(boot + TOMBSTONE_LIFE);
        assert!(record.withdrawn.is_empty());
    }
}
