//! By which rules a queued claim may believe that it holds.
//!
//! A lock that was handed over has a first lease of `f` from the moment of the grant, which nobody
//! here knows. But every request that was answered "queued" was executed before the grant, if the
//! grant's token is above the fence that the answer told; so the lease runs at least `f` from when
//! that request was *sent*. A grant whose token is not above that fence was over before: void.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::Notify;

use super::keys::{first_lease, grant, place_lease};
use crate::clock::Moment;
use crate::engine::{Claim, ClaimId, Grant, drift};
use crate::hash::FastMap;
use crate::mutual::unpoisoned;
use crate::token::Token;

/// Waiters further back look a little later when a lease ends: they must not all come at once.
const STEP_BACK: Duration = Duration::from_millis(5);
/// The server tells what is left in whole milliseconds: one more, and it is over.
const ROUNDED: Duration = Duration::from_millis(1);

/// All claims of this client that wait.
#[derive(Debug, Default)]
pub(super) struct Waiters(Mutex<FastMap<ClaimId, Arc<Waiter>>>);

impl Waiters {
    /// The waiter of this claim, new or known from a release that took it along.
    pub(super) fn enter(&self, claim: &Claim) -> Arc<Waiter> {
        self.table().entry(claim.id).or_insert_with(|| Arc::new(Waiter::new(claim.clone()))).clone()
    }

    pub(super) fn find(&self, id: ClaimId) -> Option<Arc<Waiter>> {
        self.table().get(&id).cloned()
    }

    /// This claim waits no more, and shows no more signs of life.
    pub(super) fn remove(&self, id: ClaimId) -> Option<Arc<Waiter>> {
        self.table().remove(&id)
    }

    /// Those whose next sign of life is due at `now`; or all.
    pub(super) fn due(&self, now: Moment, all: bool) -> Vec<Arc<Waiter>> {
        let is_due = |waiter: &&Arc<Waiter>| waiter.beat_at().is_some_and(|at| all || at <= now);
        self.table().values().filter(is_due).cloned().collect()
    }

    /// When the next sign of life is due.
    pub(super) fn next_beat(&self) -> Moment {
        let beats = self.table();
        beats.values().filter_map(|waiter| waiter.beat_at()).min().unwrap_or(Moment::NEVER)
    }

    fn table(&self) -> MutexGuard<'_, FastMap<ClaimId, Arc<Waiter>>> {
        unpoisoned(&self.0)
    }
}

/// One claim that waits.
#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) claim: Claim,
    /// Rings when there is news.
    pub(super) news: Notify,
    facts: Mutex<Facts>,
}

#[derive(Debug, Default)]
struct Facts {
    /// When the last request was sent that is known to have been executed before any grant.
    sent_before: Option<Moment>,
    /// The fence that the last "queued" told.
    stamp: u64,
    queued: bool,
    /// When the next sign of life is due, and when the lease before us may end.
    beat_at: Option<Moment>,
    look_at: Option<Moment>,
    offer: Option<(u64, Moment)>,
    gone: bool,
}

/// What is known of a waiter.
pub(super) enum News {
    /// Not yet queued, as far as is known: ask (again).
    Ask,
    Granted(Grant),
    Gone,
    /// Look again at this time, if nothing comes before.
    Waits(Moment),
}

impl Waiter {
    fn new(claim: Claim) -> Self {
        Self { claim, news: Notify::new(), facts: Mutex::default() }
    }

    /// To be called before a request is sent that may queue this claim.
    pub(super) fn sending(&self, now: Moment) {
        self.facts().sent_before.get_or_insert(now);
    }

    /// A request sent at `sent` was answered "queued".
    /// The lease before it has so much left, if it has an end at all: otherwise only the signs of
    /// life find out that it is over.
    pub(super) fn queued(
        &self,
        sent: Moment,
        now: Moment,
        stamp: u64,
        place: u32,
        left: Option<Duration>,
    ) {
        let mut facts = self.facts();
        facts.sent_before = facts.sent_before.max(Some(sent));
        facts.stamp = facts.stamp.max(stamp);
        facts.queued = true;
        facts.beat_at = Some(sent + place_lease(self.claim.ttl) / 3);
        facts.look_at = left.map(|left| now + left + ROUNDED + STEP_BACK * place);
        let stamp = facts.stamp;
        facts.offer = facts.offer.filter(|(token, _)| *token > stamp);
        drop(facts);
        self.news.notify_one();
    }

    /// The server pushed a grant.
    pub(super) fn offered(&self, token: u64) {
        let mut facts = self.facts();
        if token > facts.stamp && facts.offer.is_none_or(|(known, _)| token > known) {
            let since = facts.sent_before.unwrap_or(Moment::from_nanos(0));
            let until = since + first_lease(self.claim.ttl);
            facts.offer = Some((token, until));
        }
        drop(facts);
        self.news.notify_one();
    }

    /// A request sent at `sent` was answered "granted", with so much left of the lease.
    pub(super) fn granted(&self, sent: Moment, token: u64, left: Duration) {
        self.offered(token);
        let mut facts = self.facts();
        if let Some((known, until)) = &mut facts.offer
            && *known == token
        {
            *until = (*until).max(sent + left);
        }
    }

    pub(super) fn gone(&self) {
        self.facts().gone = true;
        self.news.notify_one();
    }

    pub(super) fn news(&self, now: Moment) -> News {
        let mut facts = self.facts();
        if facts.gone {
            return News::Gone;
        }
        if let Some((token, until)) = facts.offer {
            let valid_until = until.before(drift(self.claim.ttl));
            return News::Granted(grant(Token::new(token), valid_until));
        }
        if !facts.queued {
            return News::Ask;
        }
        // Once looked, the next signs of life tell how long to wait.
        let look_at = facts.look_at.filter(|at| *at > now);
        facts.look_at = look_at;
        News::Waits(look_at.unwrap_or(Moment::NEVER))
    }

    pub(super) fn beat_at(&self) -> Option<Moment> {
        let facts = self.facts();
        facts.beat_at.filter(|_| facts.queued && !facts.gone && facts.offer.is_none())
    }

    /// The next sign of life is under way.
    pub(super) fn beating(&self, now: Moment) {
        self.facts().beat_at = Some(now + place_lease(self.claim.ttl) / 3);
    }

    fn facts(&self) -> MutexGuard<'_, Facts> {
        unpoisoned(&self.facts)
    }
}
