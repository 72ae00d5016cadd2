//! The waiters of one client of an engine whose server hands locks over, and when a queued claim
//! may assume that it holds the lock. `docs/redis-handoff.md` has the rules.
//!
//! A lock that was handed over has a first lease of `f`, from the moment of the grant on. The
//! client does not know that moment. But a request whose reply was "queued" was executed before the
//! grant if the grant's token is above the fence in that reply (the *stamp*). So the lease runs for
//! at least `f` from when that request was *sent*. A grant whose token is not above the stamp had
//! ended before that request was executed: it is void.

#[cfg(feature = "redis")]
use std::sync::OnceLock;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::Notify;

use crate::clock::Moment;
use crate::engine::{Claim, ClaimId, Grant, trusted_until};
use crate::error::Error;
use crate::hash::FastMap;
use crate::sync;
use crate::token::Token;

/// The range of `first_lease`.
pub(crate) const FIRST_LEASE_RANGE: (Duration, Duration) =
    (Duration::from_millis(500), Duration::from_secs(60));
/// When a lease ends, each waiter rechecks this much later than the one before it, so that they do
/// not all send at once.
const POSITION_STEP: Duration = Duration::from_millis(5);
/// The server reports what is left in whole milliseconds, rounded down.
const ROUNDING: Duration = Duration::from_millis(1);

/// How long a waiter counts as alive without a heartbeat: its queue entry for `q`, and a lock that
/// was handed to it for the first lease `f`. Always q < f ≤ ttl, and f = 2q.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaiterLeases {
    pub(crate) entry: Duration,
    pub(crate) first: Duration,
}

impl WaiterLeases {
    /// For a claim with this ttl, if no first lease is longer than `longest`.
    pub(crate) fn new(longest: Duration, ttl: Duration) -> Self {
        let entry = longest.min(ttl) / 2;
        Self { entry, first: entry * 2 }
    }

    /// The time between two heartbeats: one may be lost and the next one late, and the queue entry
    /// still lives.
    fn heartbeat_interval(self) -> Duration {
        self.entry / 3
    }
}

/// All claims of this client that wait.
#[derive(Debug)]
pub(crate) struct HandoffWaiters {
    longest_first_lease: Duration,
    table: Mutex<FastMap<ClaimId, Arc<HandoffWaiter>>>,
}

impl HandoffWaiters {
    pub(crate) fn new(longest_first_lease: Duration) -> Self {
        Self { longest_first_lease, table: Mutex::default() }
    }

    /// The waiter of this claim: a new one, or the one that a hand-over has registered.
    pub(crate) fn register(&self, claim: &Claim) -> Arc<HandoffWaiter> {
        let new = || Arc::new(HandoffWaiter::new(claim.clone(), self.leases(claim.ttl)));
        self.table().entry(claim.id).or_insert_with(new).clone()
    }

    pub(crate) fn leases(&self, ttl: Duration) -> WaiterLeases {
        WaiterLeases::new(self.longest_first_lease, ttl)
    }

    pub(crate) fn find(&self, id: ClaimId) -> Option<Arc<HandoffWaiter>> {
        self.table().get(&id).cloned()
    }

    /// This claim no longer waits and sends no more heartbeats.
    pub(crate) fn remove(&self, id: ClaimId) -> Option<Arc<HandoffWaiter>> {
        self.table().remove(&id)
    }

    /// The waiters whose next heartbeat is due at `now`; or all that are queued.
    pub(crate) fn due(&self, now: Moment, all: bool) -> Vec<Arc<HandoffWaiter>> {
        let is_due =
            |waiter: &&Arc<HandoffWaiter>| waiter.heartbeat_at().is_some_and(|at| all || at <= now);
        self.table().values().filter(is_due).cloned().collect()
    }

    /// When the next heartbeat is due.
    pub(crate) fn next_heartbeat(&self) -> Moment {
        let table = self.table();
        table.values().filter_map(|waiter| waiter.heartbeat_at()).min().unwrap_or(Moment::NEVER)
    }

    fn table(&self) -> MutexGuard<'_, FastMap<ClaimId, Arc<HandoffWaiter>>> {
        sync::lock(&self.table)
    }
}

/// One claim that waits.
#[derive(Debug)]
pub(crate) struct HandoffWaiter {
    pub(crate) claim: Claim,
    pub(crate) leases: WaiterLeases,
    /// Notified when the state may have changed.
    pub(crate) changed: Notify,
    /// The key of a foreign lock that is tracked for it.
    #[cfg(feature = "redis")]
    pub(crate) tracked: OnceLock<String>,
    observed: Mutex<Observed>,
}

/// What replies and messages have told.
#[derive(Debug, Default)]
struct Observed {
    /// When the last request was sent that is known to have been executed before any grant.
    sent_before: Option<Moment>,
    /// The greatest fence in a "queued" reply: a token must be above it.
    stamp: u64,
    queued: bool,
    heartbeat_at: Option<Moment>,
    /// When the lease of the current holder may end.
    recheck_at: Option<Moment>,
    /// The end of the time for which courtesy leaves the lock free, as a message said. No reply
    /// overrides it: replies and messages overtake each other.
    free_until: Option<Moment>,
    /// A grant: its token, and until when it is valid.
    granted: Option<(u64, Moment)>,
    gone: bool,
    refused: Option<Error>,
}

/// What a waiter should do now.
pub(crate) enum WaiterState {
    /// Not queued as far as is known: send a request, also again.
    NotQueued,
    Granted(Grant),
    Gone,
    Failed(Error),
    /// Wait for a change, and recheck at this time.
    Waiting(Moment),
}

impl HandoffWaiter {
    fn new(claim: Claim, leases: WaiterLeases) -> Self {
        Self {
            claim,
            leases,
            changed: Notify::new(),
            #[cfg(feature = "redis")]
            tracked: OnceLock::new(),
            observed: Mutex::default(),
        }
    }

    /// Whether no request was sent for it yet.
    pub(crate) fn is_new(&self) -> bool {
        let observed = self.observed();
        observed.sent_before.is_none() && !observed.gone
    }

    /// Call this before sending a request that may queue the claim.
    pub(crate) fn on_sending(&self, now: Moment) {
        self.observed().sent_before.get_or_insert(now);
    }

    /// The reply to a request sent at `sent` is "queued". `left` is the rest of the current
    /// holder's lease. If it has no end, only heartbeats find out that it is over.
    pub(crate) fn on_queued(
        &self,
        sent: Moment,
        now: Moment,
        stamp: u64,
        position: u32,
        left: Option<Duration>,
    ) {
        let mut observed = self.observed();
        observed.sent_before = observed.sent_before.max(Some(sent));
        observed.stamp = observed.stamp.max(stamp);
        observed.queued = true;
        observed.heartbeat_at = Some(sent + self.leases.heartbeat_interval());
        observed.recheck_at = left.map(|left| now + left + ROUNDING + POSITION_STEP * position);
        let stamp = observed.stamp;
        observed.granted = observed.granted.filter(|(token, _)| *token > stamp);
        drop(observed);
        self.changed.notify_one();
    }

    /// The server pushed a grant.
    pub(crate) fn on_grant_pushed(&self, token: u64) {
        let mut observed = self.observed();
        if token > observed.stamp && observed.granted.is_none_or(|(known, _)| token > known) {
            let since = observed.sent_before.unwrap_or(Moment::from_nanos(0));
            observed.granted = Some((token, trusted_until(since, self.leases.first)));
        }
        drop(observed);
        self.changed.notify_one();
    }

    /// The reply to a request sent at `sent` is "granted", with `left` of the lease left.
    pub(crate) fn on_granted(&self, sent: Moment, token: u64, left: Duration) {
        let is_first = self.observed().sent_before == Some(sent);
        self.on_grant_pushed(token);
        let mut observed = self.observed();
        if let Some((known, until)) = &mut observed.granted
            && *known == token
        {
            let left = trusted_until(sent, left);
            // If no request was sent before this one, the time of the grant is unknown.
            *until = if is_first { left } else { (*until).max(left) };
        }
    }

    #[cfg(any(feature = "redis", test))]
    /// Courtesy leaves the lock free for this time; then this waiter is the first to be granted it.
    pub(crate) fn on_left_free(&self, now: Moment, left: Duration) {
        self.observed().free_until = Some(now + left + ROUNDING);
        self.changed.notify_one();
    }

    pub(crate) fn on_gone(&self) {
        self.observed().gone = true;
        self.changed.notify_one();
    }

    /// Its heartbeats are refused for a reason that a retry does not cure.
    pub(crate) fn on_refused(&self, why: Error) {
        self.observed().refused = Some(why);
        self.changed.notify_one();
    }

    pub(crate) fn state(&self, now: Moment) -> WaiterState {
        let mut observed = self.observed();
        if observed.gone {
            return WaiterState::Gone;
        }
        if let Some((token, valid_until)) = observed.granted {
            let token = Token::new(token);
            return WaiterState::Granted(Grant { token, valid_until, key: Vec::new() });
        }
        if let Some(why) = observed.refused.take() {
            return WaiterState::Failed(why);
        }
        if !observed.queued {
            return WaiterState::NotQueued;
        }
        // After a recheck, the reply to the next heartbeat says how long to wait.
        observed.recheck_at = observed.recheck_at.filter(|at| *at > now);
        observed.free_until = observed.free_until.filter(|at| *at > now);
        let recheck_at = [observed.recheck_at, observed.free_until].into_iter().flatten().min();
        WaiterState::Waiting(recheck_at.unwrap_or(Moment::NEVER))
    }

    /// When the next heartbeat is due, if this waiter sends any.
    pub(crate) fn heartbeat_at(&self) -> Option<Moment> {
        let observed = self.observed();
        let sends = observed.queued && !observed.gone && observed.granted.is_none();
        observed.heartbeat_at.filter(|_| sends)
    }

    pub(crate) fn on_heartbeat_sent(&self, now: Moment) {
        self.observed().heartbeat_at = Some(now + self.leases.heartbeat_interval());
    }

    fn observed(&self) -> MutexGuard<'_, Observed> {
        sync::lock(&self.observed)
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

    fn leases() -> WaiterLeases {
        WaiterLeases::new(Duration::from_secs(10), TTL)
    }

    fn waiter() -> HandoffWaiter {
        HandoffWaiter::new(Claim::plain("name", TTL), leases())
    }

    /// Sent at 1 s; the reply "queued" with this stamp comes 100 ms later.
    fn queued(stamp: u64) -> HandoffWaiter {
        let waiter = waiter();
        waiter.on_sending(at(1_000));
        waiter.on_queued(at(1_000), at(1_100), stamp, 0, Some(TTL));
        waiter
    }

    /// The token of the grant, and until when it is valid without the drift.
    #[track_caller]
    fn grant_of(waiter: &HandoffWaiter) -> (u64, Moment) {
        match waiter.state(at(2_000)) {
            WaiterState::Granted(grant) => {
                (grant.token.get(), grant.valid_until + drift(leases().first))
            }
            _ => panic!("no grant is known"),
        }
    }

    #[track_caller]
    fn waits(waiter: &HandoffWaiter) {
        assert!(matches!(waiter.state(at(2_000)), WaiterState::Waiting(_)), "it does not wait");
    }

    #[test]
    fn c1_the_first_request_counts_even_without_a_reply() {
        let waiter = waiter();
        waiter.on_sending(at(1_000));
        waiter.on_sending(at(5_000));
        assert!(matches!(waiter.state(at(6_000)), WaiterState::NotQueued), "C3: it sends again");
        waiter.on_grant_pushed(3);
        assert_eq!(grant_of(&waiter), (3, at(1_000) + leases().first));
    }

    #[test]
    fn c1_the_last_request_with_reply_queued_counts() {
        let waiter = queued(2);
        waiter.on_queued(at(4_000), at(4_100), 2, 0, Some(TTL));
        // A reply that was overtaken changes nothing.
        waiter.on_queued(at(3_000), at(4_200), 1, 0, Some(TTL));
        waiter.on_grant_pushed(2);
        waits(&waiter);
        waiter.on_grant_pushed(3);
        assert_eq!(grant_of(&waiter), (3, at(4_000) + leases().first));
    }

    #[test]
    fn c2_a_heartbeat_under_way_does_not_count() {
        let waiter = queued(2);
        waiter.on_heartbeat_sent(at(5_000));
        waiter.on_grant_pushed(3);
        assert_eq!(grant_of(&waiter), (3, at(1_000) + leases().first));
    }

    #[test]
    fn c2_a_grant_not_above_the_stamp_is_void() {
        let waiter = queued(5);
        waiter.on_grant_pushed(4);
        waits(&waiter);
        waiter.on_grant_pushed(5);
        waits(&waiter);
        waiter.on_granted(at(1_500), 5, TTL);
        waits(&waiter);
        waiter.on_grant_pushed(6);
        assert_eq!(grant_of(&waiter).0, 6);
    }

    #[test]
    fn c2_a_known_grant_is_dropped_by_a_later_stamp() {
        let waiter = waiter();
        waiter.on_sending(at(1_000));
        waiter.on_grant_pushed(3);
        assert_eq!(grant_of(&waiter).0, 3);
        waiter.on_queued(at(1_500), at(1_600), 4, 0, Some(TTL));
        waits(&waiter);
        // A reply from before the grant keeps it.
        waiter.on_grant_pushed(6);
        waiter.on_queued(at(1_700), at(1_800), 5, 0, Some(TTL));
        assert_eq!(grant_of(&waiter).0, 6);
    }

    #[test]
    fn c2_a_greater_token_replaces_a_known_grant() {
        let waiter = queued(2);
        waiter.on_grant_pushed(5);
        waiter.on_grant_pushed(4);
        assert_eq!(grant_of(&waiter).0, 5);
        waiter.on_grant_pushed(8);
        assert_eq!(grant_of(&waiter).0, 8);
    }

    #[test]
    fn c2_what_is_left_counts_from_the_request() {
        let (first, left) = (leases().first, Duration::from_secs(7));
        // Sent long after the last "queued": what is left gives the later end.
        let waiter = queued(2);
        waiter.on_granted(at(6_000), 3, left);
        let WaiterState::Granted(grant) = waiter.state(at(6_100)) else { panic!("no grant") };
        assert_eq!(grant.valid_until + drift(left), at(6_000) + left);
        // Never a first lease from the request whose reply is "granted".
        assert!(grant_of(&waiter).1 < at(6_000) + first);
        // Sent soon after it: the first lease gives the later end.
        let waiter = queued(2);
        waiter.on_granted(at(1_200), 3, left);
        assert_eq!(grant_of(&waiter), (3, at(1_000) + first));
        // An older grant than the known one changes nothing.
        waiter.on_grant_pushed(5);
        waiter.on_granted(at(9_000), 4, TTL);
        assert_eq!(grant_of(&waiter), (5, at(1_000) + first));
    }

    #[test]
    fn c4_a_grant_read_too_late_is_not_valid_any_more() {
        let waiter = queued(2);
        waiter.on_grant_pushed(3);
        let late = at(1_000) + leases().first;
        match waiter.state(late) {
            WaiterState::Granted(grant) => assert!(grant.valid_until < late, "it would count"),
            _ => panic!("the grant can still be renewed"),
        }
    }

    #[test]
    fn c4_a_grant_without_any_request_is_never_valid() {
        let waiter = waiter();
        waiter.on_grant_pushed(3);
        assert!(grant_of(&waiter).1 <= Moment::from_nanos(0) + leases().first);
    }

    #[test]
    fn c6_a_gone_waiter_stays_gone_and_sends_no_heartbeats() {
        let waiter = queued(2);
        assert!(waiter.heartbeat_at().is_some(), "it sends heartbeats before");
        waiter.on_gone();
        waiter.on_grant_pushed(9);
        waiter.on_queued(at(3_000), at(3_100), 2, 0, Some(TTL));
        assert!(matches!(waiter.state(at(4_000)), WaiterState::Gone));
        assert_eq!(waiter.heartbeat_at(), None);
    }

    #[test]
    fn c8_all_waiters_are_due_after_a_reconnection() {
        let waiters = HandoffWaiters::new(leases().first);
        let waiter = waiters.register(&waiter().claim);
        assert_eq!(
            waiters.due(at(9_000), true).len(),
            0,
            "not queued yet: it sends a request instead"
        );
        waiter.on_queued(at(1_000), at(1_100), 2, 0, Some(TTL));
        assert_eq!(waiters.due(at(1_200), false).len(), 0);
        assert_eq!(waiters.due(at(1_200), true).len(), 1);
        assert_eq!(waiters.due(at(1_000) + leases().entry / 3, false).len(), 1);
    }

    #[test]
    fn c9_the_first_rechecks_when_the_lease_ends_and_the_others_later() {
        let recheck_at = |position| {
            let waiter = waiter();
            waiter.on_sending(at(1_000));
            waiter.on_queued(at(1_000), at(1_100), 2, position, Some(Duration::from_secs(5)));
            match waiter.state(at(1_200)) {
                WaiterState::Waiting(recheck_at) => recheck_at,
                _ => panic!("it does not wait"),
            }
        };
        let (waiter, moment) = (queued(2), Duration::from_millis(150));
        waiter.on_left_free(at(1_200), moment);
        // A reply from before the release comes late.
        waiter.on_queued(at(1_000), at(1_210), 2, 0, Some(TTL));
        let until = at(1_200) + moment + ROUNDING;
        assert!(matches!(waiter.state(at(1_220)), WaiterState::Waiting(at) if at == until));
        assert_eq!(recheck_at(0), at(6_100) + ROUNDING);
        assert_eq!(recheck_at(2), recheck_at(0) + POSITION_STEP * 2);
    }

    /// What `docs/redis-handoff.md` relies on, from the shortest ttl to the longest.
    #[test]
    fn leases_keep_their_order() {
        let millis = [200, 201, 333, 1_000, 9_999, 10_000, 10_001, 30_000, 600_000, 604_800_000];
        for ttl in millis.map(Duration::from_millis) {
            let WaiterLeases { entry: q, first: f } =
                WaiterLeases::new(Duration::from_secs(10), ttl);
            assert!(q < f && f <= ttl, "q < f <= ttl: {q:?} {f:?} {ttl:?}");
            // They are sent in whole milliseconds.
            assert!(q.as_millis() < f.as_millis() && f.as_millis() <= ttl.as_millis(), "{ttl:?}");
            // See `heartbeat_interval`.
            assert!(q / 3 >= Duration::from_millis(30), "time between heartbeats: {ttl:?}");
            assert!(ttl > Duration::from_secs(10) || f >= ttl - Duration::from_millis(1));
            let shorter = WaiterLeases::new(FIRST_LEASE_RANGE.0, ttl);
            assert!(shorter.entry < shorter.first && shorter.first <= f, "{shorter:?}");
            assert!(shorter.entry / 3 >= Duration::from_millis(30), "{shorter:?}");
        }
    }
}
