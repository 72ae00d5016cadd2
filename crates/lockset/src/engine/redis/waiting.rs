//! By which rules a queued claim may believe that it holds.
//!
//! A lock that was handed over has a first lease of `f` from the moment of the grant, which nobody
//! here knows. But every request that was answered "queued" was executed before the grant, if the
//! grant's token is above the fence that the answer told; so the lease runs at least `f` from when
//! that request was *sent*. A grant whose token is not above that fence was over before: void.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};

use super::keys::{Leases, grant};
use crate::clock::Moment;
use crate::engine::{Claim, ClaimId, Grant, trusted_until};
use crate::error::Error;
use crate::hash::FastMap;
use crate::sync;
use crate::token::Token;

/// Waiters further back look a little later when a lease ends: they must not all come at once.
const STEP_BACK: Duration = Duration::from_millis(5);
/// The server tells what is left in whole milliseconds: one more, and it is over.
const ROUNDED: Duration = Duration::from_millis(1);

/// All claims of this client that wait.
#[derive(Debug)]
pub(super) struct Waiters {
    longest_first_lease: Duration,
    table: Mutex<FastMap<ClaimId, Arc<Waiter>>>,
    /// Waiters whose lock is foreign and tracked, by its key.
    behind_foreign: Mutex<HashMap<String, Vec<AwaitsChange>>>,
}

/// Who is told of a change, and how.
type AwaitsChange = (ClaimId, oneshot::Sender<()>);

impl Waiters {
    pub(super) fn new(longest_first_lease: Duration) -> Self {
        Self { longest_first_lease, table: Mutex::default(), behind_foreign: Mutex::default() }
    }

    /// The waiter of this claim, new or known from a release that took it along.
    pub(super) fn enter(&self, claim: &Claim) -> Arc<Waiter> {
        let new = || Arc::new(Waiter::new(claim.clone(), self.leases(claim.ttl)));
        self.table().entry(claim.id).or_insert_with(new).clone()
    }

    /// Those of a claim with this ttl.
    pub(super) fn leases(&self, ttl: Duration) -> Leases {
        Leases::new(self.longest_first_lease, ttl)
    }

    pub(super) fn find(&self, id: ClaimId) -> Option<Arc<Waiter>> {
        self.table().get(&id).cloned()
    }

    /// This claim waits no more, and shows no more signs of life.
    pub(super) fn remove(&self, id: ClaimId) -> Option<Arc<Waiter>> {
        let waiter = self.table().remove(&id)?;
        self.forget_change(&waiter);
        Some(waiter)
    }

    /// Resolves when the lock of this waiter, which has this key and is tracked, changes. `None` if
    /// that is awaited already, or if it does not wait any more.
    pub(super) fn await_change(
        &self,
        lock: &str,
        waiter: &Waiter,
    ) -> Option<oneshot::Receiver<()>> {
        let id = waiter.claim.id;
        // Set before the lookup, so that a concurrent `remove` sees it.
        let _ = waiter.tracked.set(lock.to_owned());
        let mut behind = sync::lock(&self.behind_foreign);
        self.find(id)?;
        let awaiting = behind.entry(lock.to_owned()).or_default();
        if awaiting.iter().any(|(other, _)| *other == id) {
            return None;
        }
        let (tell, changed) = oneshot::channel();
        awaiting.push((id, tell));
        Some(changed)
    }

    pub(super) fn forget_change(&self, waiter: &Waiter) {
        let Some(lock) = waiter.tracked.get() else { return };
        let mut behind = sync::lock(&self.behind_foreign);
        if let Some(awaiting) = behind.get_mut(lock) {
            awaiting.retain(|(id, _)| *id != waiter.claim.id);
            if awaiting.is_empty() {
                behind.remove(lock);
            }
        }
    }

    /// A connection was lost, and with it what the server tracked for it.
    pub(super) fn forget_changes(&self) {
        sync::lock(&self.behind_foreign).clear();
    }

    /// The lock with this key has changed, if it is tracked.
    pub(super) fn changed(&self, lock: &str) {
        let awaiting = sync::lock(&self.behind_foreign).remove(lock).unwrap_or_default();
        for (_, tell) in awaiting {
            let _ = tell.send(());
        }
    }

    /// All locks have changed.
    pub(super) fn all_changed(&self) {
        let behind = std::mem::take(&mut *sync::lock(&self.behind_foreign));
        for (_, tell) in behind.into_values().flatten() {
            let _ = tell.send(());
        }
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
        sync::lock(&self.table)
    }
}

/// One claim that waits.
#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) claim: Claim,
    pub(super) leases: Leases,
    /// Rings when there is news.
    pub(super) news: Notify,
    /// The key of its lock, if it may be in `behind_foreign`.
    tracked: OnceLock<String>,
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
    /// When the lock is left free no more, as a push told. No answer takes it back: answers and
    /// pushes overtake each other.
    free_until: Option<Moment>,
    offer: Option<(u64, Moment)>,
    gone: bool,
    refused: Option<Error>,
}

/// What is known of a waiter.
pub(super) enum News {
    /// Not yet queued, as far as is known: ask (again).
    Ask,
    Granted(Grant),
    Gone,
    Refused(Error),
    /// Look again at this time, if nothing comes before.
    Waits(Moment),
}

impl Waiter {
    fn new(claim: Claim, leases: Leases) -> Self {
        let (news, tracked) = (Notify::new(), OnceLock::new());
        Self { claim, leases, news, tracked, facts: Mutex::default() }
    }

    /// Nothing was asked for it yet.
    pub(super) fn is_new(&self) -> bool {
        let facts = self.facts();
        facts.sent_before.is_none() && !facts.gone
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
        facts.beat_at = Some(sent + self.leases.place / 3);
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
            let first = self.leases.first;
            let until = trusted_until(since, first);
            facts.offer = Some((token, until));
        }
        drop(facts);
        self.news.notify_one();
    }

    /// A request sent at `sent` was answered "granted", with so much left of the lease.
    pub(super) fn granted(&self, sent: Moment, token: u64, left: Duration) {
        let is_first = self.facts().sent_before == Some(sent);
        self.offered(token);
        let mut facts = self.facts();
        if let Some((known, until)) = &mut facts.offer
            && *known == token
        {
            let left = trusted_until(sent, left);
            // Nothing was sent before this request: it was granted before, nobody knows when.
            *until = if is_first { left } else { (*until).max(left) };
        }
    }

    /// The lock is left free for others for so long, and this one is the first to be granted then.
    pub(super) fn look_in(&self, now: Moment, left: Duration) {
        self.facts().free_until = Some(now + left + ROUNDED);
        self.news.notify_one();
    }

    pub(super) fn gone(&self) {
        self.facts().gone = true;
        self.news.notify_one();
    }

    /// Its signs of life are refused for a reason that waiting does not cure.
    pub(super) fn refused(&self, why: Error) {
        self.facts().refused = Some(why);
        self.news.notify_one();
    }

    pub(super) fn news(&self, now: Moment) -> News {
        let mut facts = self.facts();
        if facts.gone {
            return News::Gone;
        }
        if let Some((token, valid_until)) = facts.offer {
            return News::Granted(grant(Token::new(token), valid_until));
        }
        if let Some(why) = facts.refused.take() {
            return News::Refused(why);
        }
        if !facts.queued {
            return News::Ask;
        }
        // Once looked, the next signs of life tell how long to wait.
        facts.look_at = facts.look_at.filter(|at| *at > now);
        facts.free_until = facts.free_until.filter(|at| *at > now);
        let look_at = [facts.look_at, facts.free_until].into_iter().flatten().min();
        News::Waits(look_at.unwrap_or(Moment::NEVER))
    }

    pub(super) fn beat_at(&self) -> Option<Moment> {
        let facts = self.facts();
        facts.beat_at.filter(|_| facts.queued && !facts.gone && facts.offer.is_none())
    }

    /// The next sign of life is under way.
    pub(super) fn beating(&self, now: Moment) {
        self.facts().beat_at = Some(now + self.leases.place / 3);
    }

    fn facts(&self) -> MutexGuard<'_, Facts> {
        sync::lock(&self.facts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::drift;

    const TTL: Duration = Duration::from_secs(30);

    fn at(millis: u64) -> Moment {
        Moment::from_nanos(millis * 1_000_000)
    }

    fn leases() -> Leases {
        Leases::new(Duration::from_secs(10), TTL)
    }

    fn waiter() -> Waiter {
        Waiter::new(Claim::plain("name", TTL), leases())
    }

    /// Asked at 1 s, and answered "queued" with this stamp 100 ms later.
    fn queued(stamp: u64) -> Waiter {
        let waiter = waiter();
        waiter.sending(at(1_000));
        waiter.queued(at(1_000), at(1_100), stamp, 0, Some(TTL));
        waiter
    }

    /// The token of the grant, and until when it is believed without the drift.
    #[track_caller]
    fn grant_of(waiter: &Waiter) -> (u64, Moment) {
        match waiter.news(at(2_000)) {
            News::Granted(grant) => (grant.token.get(), grant.valid_until + drift(leases().first)),
            _ => panic!("no grant is known"),
        }
    }

    #[track_caller]
    fn waits(waiter: &Waiter) {
        assert!(matches!(waiter.news(at(2_000)), News::Waits(_)), "it does not wait");
    }

    #[test]
    fn c1_the_first_request_counts_even_without_an_answer() {
        let waiter = waiter();
        waiter.sending(at(1_000));
        waiter.sending(at(5_000));
        assert!(matches!(waiter.news(at(6_000)), News::Ask), "C3: it asks again");
        waiter.offered(3);
        assert_eq!(grant_of(&waiter), (3, at(1_000) + leases().first));
    }

    #[test]
    fn c1_the_last_request_answered_queued_counts() {
        let waiter = queued(2);
        waiter.queued(at(4_000), at(4_100), 2, 0, Some(TTL));
        // An answer that was overtaken takes nothing back.
        waiter.queued(at(3_000), at(4_200), 1, 0, Some(TTL));
        waiter.offered(2);
        waits(&waiter);
        waiter.offered(3);
        assert_eq!(grant_of(&waiter), (3, at(4_000) + leases().first));
    }

    #[test]
    fn c2_a_heartbeat_under_way_does_not_count() {
        let waiter = queued(2);
        waiter.beating(at(5_000));
        waiter.offered(3);
        assert_eq!(grant_of(&waiter), (3, at(1_000) + leases().first));
    }

    #[test]
    fn c2_a_grant_not_above_the_stamp_is_void() {
        let waiter = queued(5);
        waiter.offered(4);
        waits(&waiter);
        waiter.offered(5);
        waits(&waiter);
        waiter.granted(at(1_500), 5, TTL);
        waits(&waiter);
        waiter.offered(6);
        assert_eq!(grant_of(&waiter).0, 6);
    }

    #[test]
    fn c2_a_known_grant_is_dropped_by_a_later_stamp() {
        let waiter = waiter();
        waiter.sending(at(1_000));
        waiter.offered(3);
        assert_eq!(grant_of(&waiter).0, 3);
        waiter.queued(at(1_500), at(1_600), 4, 0, Some(TTL));
        waits(&waiter);
        // One from before the grant leaves it.
        waiter.offered(6);
        waiter.queued(at(1_700), at(1_800), 5, 0, Some(TTL));
        assert_eq!(grant_of(&waiter).0, 6);
    }

    #[test]
    fn c2_a_greater_token_replaces_a_known_grant() {
        let waiter = queued(2);
        waiter.offered(5);
        waiter.offered(4);
        assert_eq!(grant_of(&waiter).0, 5);
        waiter.offered(8);
        assert_eq!(grant_of(&waiter).0, 8);
    }

    #[test]
    fn c2_what_is_left_counts_from_the_request_that_was_told() {
        let (first, left) = (leases().first, Duration::from_secs(7));
        // Sent long after the last "queued": what is left is the better knowledge.
        let waiter = queued(2);
        waiter.granted(at(6_000), 3, left);
        let News::Granted(told) = waiter.news(at(6_100)) else { panic!("no grant") };
        assert_eq!(told.valid_until + drift(left), at(6_000) + left);
        // Never from the request that was answered "granted" plus a first lease.
        assert!(grant_of(&waiter).1 < at(6_000) + first);
        // Sent soon after: the first lease from then is the better.
        let waiter = queued(2);
        waiter.granted(at(1_200), 3, left);
        assert_eq!(grant_of(&waiter), (3, at(1_000) + first));
        // Told of an older grant than the one that is known: nothing changes.
        waiter.offered(5);
        waiter.granted(at(9_000), 4, TTL);
        assert_eq!(grant_of(&waiter), (5, at(1_000) + first));
    }

    #[test]
    fn c4_a_grant_read_too_late_is_not_valid_any_more() {
        let waiter = queued(2);
        waiter.offered(3);
        let late = at(1_000) + leases().first;
        match waiter.news(late) {
            News::Granted(grant) => assert!(grant.valid_until < late, "it would be believed"),
            _ => panic!("the grant is still worth a renewal"),
        }
    }

    #[test]
    fn c4_a_grant_without_any_request_is_never_valid() {
        let waiter = waiter();
        waiter.offered(3);
        assert!(grant_of(&waiter).1 <= Moment::from_nanos(0) + leases().first);
    }

    #[test]
    fn c6_who_is_gone_stays_gone_and_shows_no_life() {
        let waiter = queued(2);
        assert!(waiter.beat_at().is_some(), "it shows life before");
        waiter.gone();
        waiter.offered(9);
        waiter.queued(at(3_000), at(3_100), 2, 0, Some(TTL));
        assert!(matches!(waiter.news(at(4_000)), News::Gone));
        assert_eq!(waiter.beat_at(), None);
    }

    #[test]
    fn c8_all_waiters_are_due_after_a_reconnection() {
        let waiters = Waiters::new(leases().first);
        let waiter = waiters.enter(&waiter().claim);
        assert_eq!(waiters.due(at(9_000), true).len(), 0, "not queued yet: it asks instead");
        waiter.queued(at(1_000), at(1_100), 2, 0, Some(TTL));
        assert_eq!(waiters.due(at(1_200), false).len(), 0);
        assert_eq!(waiters.due(at(1_200), true).len(), 1);
        assert_eq!(waiters.due(at(1_000) + leases().place / 3, false).len(), 1);
    }

    #[test]
    fn c9_the_first_looks_when_the_lease_before_it_ends_and_the_others_later() {
        let look_at = |place| {
            let waiter = waiter();
            waiter.sending(at(1_000));
            waiter.queued(at(1_000), at(1_100), 2, place, Some(Duration::from_secs(5)));
            match waiter.news(at(1_200)) {
                News::Waits(look_at) => look_at,
                _ => panic!("it does not wait"),
            }
        };
        let (waiter, moment) = (queued(2), Duration::from_millis(150));
        waiter.look_in(at(1_200), moment);
        // An answer from before the release comes late.
        waiter.queued(at(1_000), at(1_210), 2, 0, Some(TTL));
        let until = at(1_200) + moment + ROUNDED;
        assert!(matches!(waiter.news(at(1_220)), News::Waits(at) if at == until));
        assert_eq!(look_at(0), at(6_100) + ROUNDED);
        assert_eq!(look_at(2), look_at(0) + STEP_BACK * 2);
    }
}
