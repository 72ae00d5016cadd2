//! Leases: one for all claims of a client with the same ttl, and a separate one for each claim
//! that must not live as long as the client.
//!
//! A lease is valid from the moment before its last confirmed keep-alive was sent, for its ttl less
//! drift. A keep-alive may be answered by a server that wrongly takes itself for the leader. Only a
//! later read, answered by a majority in the same term, confirms it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::watch;

use super::connection::{EtcdConnection, RETRY_TIMEOUT};
use super::request_error::{EtcdRequestError, EtcdResult};
use crate::clock::{Clock, Moment};
use crate::engine::trusted_until;
use crate::sync;

/// How long a lease without claims is kept for the next one.
const MAX_IDLE: Duration = Duration::from_secs(60);

/// A lease at the server.
#[derive(Debug)]
pub(super) struct EtcdLease {
    pub(super) id: i64,
    /// As granted by the server, which may be longer than requested.
    pub(super) ttl: Duration,
    /// Whether all claims with the same ttl use it.
    pub(super) is_shared: bool,
    times: Mutex<LeaseTimes>,
    gone: watch::Sender<bool>,
}

#[derive(Clone, Copy, Debug)]
struct LeaseTimes {
    valid_until: Moment,
    /// When the next keep-alive is due.
    keep_alive_at: Moment,
    /// When a claim last used the lease.
    used_at: Moment,
}

impl EtcdLease {
    /// A lease that was granted, or kept alive, by a request sent at `sent`.
    pub(super) fn new(id: i64, ttl: Duration, is_shared: bool, sent: Moment) -> Arc<Self> {
        let times = LeaseTimes {
            valid_until: trusted_until(sent, ttl),
            keep_alive_at: sent + ttl / 3,
            used_at: sent,
        };
        Arc::new(Self {
            id,
            ttl,
            is_shared,
            times: Mutex::new(times),
            gone: watch::Sender::new(false),
        })
    }

    fn times(&self) -> MutexGuard<'_, LeaseTimes> {
        sync::lock(&self.times)
    }

    /// Until when the lease is valid, according to the last confirmed keep-alive.
    pub(super) fn valid_until(&self) -> Moment {
        self.times().valid_until
    }

    pub(super) fn keep_alive_at(&self) -> Moment {
        self.times().keep_alive_at
    }

    /// Postpones the next keep-alive while one is under way. If that one is not answered, the next
    /// follows after a twelfth of the ttl; after a confirmed one it follows after a third.
    pub(super) fn mark_keep_alive_sent(&self, now: Moment) {
        self.times().keep_alive_at = now + self.ttl / 12;
    }

    /// Records that a keep-alive sent at `sent` was confirmed. Returns until when the lease is
    /// valid.
    pub(super) fn confirm_keep_alive(&self, sent: Moment, ttl: Duration) -> Moment {
        let mut times = self.times();
        times.valid_until = times.valid_until.max(trusted_until(sent, ttl));
        times.keep_alive_at = sent + ttl / 3;
        times.valid_until
    }

    pub(super) fn mark_used(&self, now: Moment) {
        self.times().used_at = now;
    }

    pub(super) fn is_idle(&self, now: Moment) -> bool {
        self.times().used_at + MAX_IDLE < now
    }

    pub(super) fn is_gone(&self) -> bool {
        *self.gone.borrow()
    }

    /// Records that the lease is revoked or expired. Returns whether that was unknown before.
    pub(super) fn mark_gone(&self) -> bool {
        !self.gone.send_replace(true)
    }

    pub(super) async fn wait_until_gone(&self) {
        let mut gone = self.gone.subscribe();
        // The sender is in this very lease, so it is not dropped while this waits.
        let _ = gone.wait_for(|gone| *gone).await;
    }
}

/// The leases of a client.
#[derive(Debug)]
pub(super) struct EtcdLeases {
    connection: Arc<EtcdConnection>,
    clock: Clock,
    /// By the requested ttl, in seconds.
    shared: Mutex<HashMap<u64, Arc<EtcdLease>>>,
    /// These get no new claims, and end with their last one.
    retired: Mutex<Vec<Arc<EtcdLease>>>,
    grant_in_progress: tokio::sync::Mutex<()>,
}

impl EtcdLeases {
    pub(super) fn new(connection: Arc<EtcdConnection>, clock: Clock) -> Self {
        Self {
            connection,
            clock,
            shared: Mutex::default(),
            retired: Mutex::default(),
            grant_in_progress: tokio::sync::Mutex::default(),
        }
    }

    /// The shared lease for this ttl, if there is one that is valid long enough.
    pub(super) fn find_usable(&self, ttl: Duration) -> Option<Arc<EtcdLease>> {
        let now = self.clock.now();
        let lease = sync::lock(&self.shared).get(&whole_seconds(ttl)).cloned()?;
        lease.mark_used(now);
        Some(lease).filter(|lease| !lease.is_gone() && lease.valid_until() > now + lease.ttl / 4)
    }

    /// The shared lease for this ttl, granted if there is none.
    pub(super) async fn shared_for(&self, ttl: Duration) -> EtcdResult<Arc<EtcdLease>> {
        if let Some(lease) = self.find_usable(ttl) {
            return Ok(lease);
        }
        let _granting = within_retry_timeout(self.grant_in_progress.lock()).await?;
        if let Some(lease) = self.find_usable(ttl) {
            return Ok(lease);
        }
        let lease = self.grant(ttl, true).await?;
        let old = sync::lock(&self.shared).insert(whole_seconds(ttl), lease.clone());
        sync::lock(&self.retired).extend(old);
        Ok(lease)
    }

    /// Grants a new lease.
    pub(super) async fn grant(&self, ttl: Duration, is_shared: bool) -> EtcdResult<Arc<EtcdLease>> {
        let sent = self.clock.now();
        let requested = i64::try_from(whole_seconds(ttl)).unwrap_or(i64::MAX);
        let reply = self.connection.grant_lease(requested).await?;
        let ttl = Duration::from_secs(u64::try_from(reply.ttl).unwrap_or(0));
        if ttl.is_zero() {
            return Err(EtcdRequestError::lease_not_found());
        }
        Ok(EtcdLease::new(reply.id, ttl, is_shared, sent))
    }

    /// All shared leases, including the retired ones.
    pub(super) fn all_shared(&self) -> Vec<Arc<EtcdLease>> {
        let mut all: Vec<_> = sync::lock(&self.shared).values().cloned().collect();
        all.extend(sync::lock(&self.retired).iter().cloned());
        all
    }

    /// Gives the lease no new claims from now on.
    pub(super) fn retire(&self, lease: &Arc<EtcdLease>) {
        let mut shared = sync::lock(&self.shared);
        let before = shared.len();
        shared.retain(|_, other| !Arc::ptr_eq(other, lease));
        if shared.len() < before {
            sync::lock(&self.retired).push(lease.clone());
        }
    }

    pub(super) fn is_retired(&self, lease: &Arc<EtcdLease>) -> bool {
        sync::lock(&self.retired).iter().any(|other| Arc::ptr_eq(other, lease))
    }

    /// Forgets a lease that is gone or no longer needed.
    pub(super) fn forget(&self, lease: &Arc<EtcdLease>) {
        sync::lock(&self.shared).retain(|_, other| !Arc::ptr_eq(other, lease));
        sync::lock(&self.retired).retain(|other| !Arc::ptr_eq(other, lease));
    }
}

/// A call that waits for the grant request of another one waits no longer than for its own.
async fn within_retry_timeout<T>(locking: impl Future<Output = T>) -> EtcdResult<T> {
    let locked = tokio::time::timeout(RETRY_TIMEOUT, locking).await;
    locked.map_err(|_| {
        EtcdRequestError::not_sent(format!("no lease was granted within {RETRY_TIMEOUT:.1?}"))
    })
}

/// Rounded up, because a server grants whole seconds.
fn whole_seconds(ttl: Duration) -> u64 {
    ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::drift;

    #[test]
    fn a_ttl_is_never_rounded_down() {
        assert_eq!(whole_seconds(Duration::from_secs(3)), 3);
        assert_eq!(whole_seconds(Duration::from_millis(3001)), 4);
    }

    #[test]
    fn a_lease_is_valid_from_before_its_request_and_never_less_long_than_before() {
        let at = |secs: u64| Moment::from_nanos(secs * 1_000_000_000);
        let ttl = Duration::from_secs(10);
        let lease = EtcdLease::new(1, ttl, true, at(100));
        assert_eq!(lease.valid_until(), at(110).saturating_sub(drift(ttl)));
        lease.confirm_keep_alive(at(105), ttl);
        lease.confirm_keep_alive(at(103), ttl);
        assert_eq!(lease.valid_until(), at(115).saturating_sub(drift(ttl)));
        assert!(lease.mark_gone() && !lease.mark_gone() && lease.is_gone());
    }
}
