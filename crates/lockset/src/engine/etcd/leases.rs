//! Leases: one for all claims of a client with the same ttl, and one of its own for a claim that
//! is not to live as long as the client.
//!
//! A lease is believed until the moment before its last confirmed keep-alive was sent, plus its
//! ttl, less drift. A keep-alive is answered by whoever takes itself for the leader; only a read
//! after it, answered by a majority in the same term, confirms that it was.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::watch;

use super::link::{Failed, Link, PERSISTENCE};
use crate::clock::{Clock, Moment};
use crate::engine::trusted_until;
use crate::sync;

/// A lease that no claim uses is kept this long for the next one.
const IDLE: Duration = Duration::from_secs(60);

/// A lease at the server.
#[derive(Debug)]
pub(super) struct Lease {
    pub(super) id: i64,
    /// As long as the server says, which may be longer than it was asked for.
    pub(super) ttl: Duration,
    /// Of all claims with the same ttl.
    pub(super) is_shared: bool,
    times: Mutex<Times>,
    gone: watch::Sender<bool>,
}

#[derive(Clone, Copy, Debug)]
struct Times {
    valid_until: Moment,
    /// When it is kept alive again.
    beat_at: Moment,
    /// When a claim last used it.
    used_at: Moment,
}

impl Lease {
    /// A lease that was granted, or kept alive, by a request sent then.
    pub(super) fn new(id: i64, ttl: Duration, is_shared: bool, sent: Moment) -> Arc<Self> {
        let times =
            Times { valid_until: trusted_until(sent, ttl), beat_at: sent + ttl / 3, used_at: sent };
        Arc::new(Self {
            id,
            ttl,
            is_shared,
            times: Mutex::new(times),
            gone: watch::Sender::new(false),
        })
    }

    fn times(&self) -> MutexGuard<'_, Times> {
        sync::lock(&self.times)
    }

    /// Until when it stands by what was confirmed so far.
    pub(super) fn valid_until(&self) -> Moment {
        self.times().valid_until
    }

    pub(super) fn beat_at(&self) -> Moment {
        self.times().beat_at
    }

    /// Begins to keep it alive, so that nobody else does meanwhile; without an answer it is tried
    /// again soon.
    pub(super) fn beating(&self, now: Moment) {
        self.times().beat_at = now + self.ttl / 12;
    }

    /// A keep-alive sent then was confirmed.
    pub(super) fn confirmed(&self, sent: Moment, ttl: Duration) -> Moment {
        let mut times = self.times();
        times.valid_until = times.valid_until.max(trusted_until(sent, ttl));
        times.beat_at = sent + ttl / 3;
        times.valid_until
    }

    pub(super) fn used(&self, now: Moment) {
        self.times().used_at = now;
    }

    pub(super) fn is_idle(&self, now: Moment) -> bool {
        self.times().used_at + IDLE < now
    }

    pub(super) fn is_gone(&self) -> bool {
        *self.gone.borrow()
    }

    /// The server does not know it any more. Whether that is news.
    pub(super) fn end(&self) -> bool {
        !self.gone.send_replace(true)
    }

    /// Pending until it is gone.
    pub(super) async fn ended(&self) {
        let mut gone = self.gone.subscribe();
        // The sender lives in this very lease.
        let _ = gone.wait_for(|gone| *gone).await;
    }
}

/// The leases of a client.
#[derive(Debug)]
pub(super) struct Leases {
    link: Arc<Link>,
    clock: Clock,
    /// By what was asked for, in seconds.
    shared: Mutex<HashMap<u64, Arc<Lease>>>,
    /// No new claim gets these; they end with their last one.
    retired: Mutex<Vec<Arc<Lease>>>,
    granting: tokio::sync::Mutex<()>,
}

impl Leases {
    pub(super) fn new(link: Arc<Link>, clock: Clock) -> Self {
        Self {
            link,
            clock,
            shared: Mutex::default(),
            retired: Mutex::default(),
            granting: tokio::sync::Mutex::default(),
        }
    }

    /// The lease for all claims with this ttl, if there is one.
    pub(super) fn ready(&self, ttl: Duration) -> Option<Arc<Lease>> {
        let now = self.clock.now();
        let lease = sync::lock(&self.shared).get(&seconds(ttl)).cloned()?;
        lease.used(now);
        Some(lease).filter(|lease| !lease.is_gone() && lease.valid_until() > now + lease.ttl / 4)
    }

    /// The lease for all claims with this ttl.
    pub(super) async fn shared(&self, ttl: Duration) -> Result<Arc<Lease>, Failed> {
        if let Some(lease) = self.ready(ttl) {
            return Ok(lease);
        }
        let _alone = in_time(self.granting.lock()).await?;
        if let Some(lease) = self.ready(ttl) {
            return Ok(lease);
        }
        let lease = self.granted(ttl, true).await?;
        let old = sync::lock(&self.shared).insert(seconds(ttl), lease.clone());
        sync::lock(&self.retired).extend(old);
        Ok(lease)
    }

    /// A new lease.
    pub(super) async fn granted(
        &self,
        ttl: Duration,
        is_shared: bool,
    ) -> Result<Arc<Lease>, Failed> {
        let sent = self.clock.now();
        let wanted = i64::try_from(seconds(ttl)).unwrap_or(i64::MAX);
        let answer = self.link.grant_lease(wanted).await?;
        let ttl = Duration::from_secs(u64::try_from(answer.ttl).unwrap_or(0));
        if ttl.is_zero() {
            return Err(Failed::lease_gone());
        }
        Ok(Lease::new(answer.id, ttl, is_shared, sent))
    }

    /// All that are shared, the retired ones included.
    pub(super) fn all_shared(&self) -> Vec<Arc<Lease>> {
        let mut all: Vec<_> = sync::lock(&self.shared).values().cloned().collect();
        all.extend(sync::lock(&self.retired).iter().cloned());
        all
    }

    /// No new claim gets it.
    pub(super) fn retire(&self, lease: &Arc<Lease>) {
        let mut shared = sync::lock(&self.shared);
        let before = shared.len();
        shared.retain(|_, other| !Arc::ptr_eq(other, lease));
        if shared.len() < before {
            sync::lock(&self.retired).push(lease.clone());
        }
    }

    pub(super) fn is_retired(&self, lease: &Arc<Lease>) -> bool {
        sync::lock(&self.retired).iter().any(|other| Arc::ptr_eq(other, lease))
    }

    /// It is not needed any more, or gone.
    pub(super) fn forget(&self, lease: &Arc<Lease>) {
        sync::lock(&self.shared).retain(|_, other| !Arc::ptr_eq(other, lease));
        sync::lock(&self.retired).retain(|other| !Arc::ptr_eq(other, lease));
    }
}

/// Whoever waits for another's question to a silent server does not wait longer than if it had
/// asked itself.
async fn in_time<T>(locking: impl Future<Output = T>) -> Result<T, Failed> {
    let locked = tokio::time::timeout(PERSISTENCE, locking).await;
    locked.map_err(|_| Failed::unsent(format!("no lease was granted within {PERSISTENCE:.1?}")))
}

/// Whole seconds, rounded up: the server knows no others.
fn seconds(ttl: Duration) -> u64 {
    ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::drift;

    #[test]
    fn a_ttl_is_never_rounded_down() {
        assert_eq!(seconds(Duration::from_secs(3)), 3);
        assert_eq!(seconds(Duration::from_millis(3001)), 4);
    }

    #[test]
    fn a_lease_is_believed_from_before_its_request_and_never_less_than_before() {
        let at = |secs: u64| Moment::from_nanos(secs * 1_000_000_000);
        let ttl = Duration::from_secs(10);
        let lease = Lease::new(1, ttl, true, at(100));
        assert_eq!(lease.valid_until(), at(110).saturating_sub(drift(ttl)));
        lease.confirmed(at(105), ttl);
        lease.confirmed(at(103), ttl);
        assert_eq!(lease.valid_until(), at(115).saturating_sub(drift(ttl)));
        assert!(lease.end() && !lease.end() && lease.is_gone());
    }
}
