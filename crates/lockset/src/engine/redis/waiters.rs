//! The waiters of this client, and the foreign locks for which some of them wait.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::oneshot;

use crate::engine::ClaimId;
use crate::engine::common::waiters::HandoffWaiters;
pub(super) use crate::engine::common::waiters::{
    HandoffWaiter as RedisWaiter, WaiterLeases, WaiterState,
};
use crate::sync;

/// All claims of this client that wait.
#[derive(Debug)]
pub(super) struct RedisWaiters {
    all: HandoffWaiters,
    /// Who listens for a change of a foreign lock that is tracked, by the lock's key.
    foreign_locks: Mutex<HashMap<String, Vec<ChangeListener>>>,
}

type ChangeListener = (ClaimId, oneshot::Sender<()>);

impl Deref for RedisWaiters {
    type Target = HandoffWaiters;

    fn deref(&self) -> &HandoffWaiters {
        &self.all
    }
}

impl RedisWaiters {
    pub(super) fn new(longest_first_lease: Duration) -> Self {
        let all = HandoffWaiters::new(longest_first_lease);
        Self { all, foreign_locks: Mutex::default() }
    }

    /// This claim no longer waits and sends no more heartbeats.
    pub(super) fn remove(&self, id: ClaimId) -> Option<Arc<RedisWaiter>> {
        let waiter = self.all.remove(id)?;
        self.cancel_change(&waiter);
        Some(waiter)
    }

    /// Resolves when the tracked lock with this key changes, for which the waiter waits. `None` if
    /// the waiter listens already, or no longer waits.
    pub(super) fn subscribe_change(
        &self,
        lock: &str,
        waiter: &RedisWaiter,
    ) -> Option<oneshot::Receiver<()>> {
        let id = waiter.claim.id;
        // Set before the lookup, so that a concurrent `remove` sees it.
        let _ = waiter.tracked.set(lock.to_owned());
        let mut foreign_locks = sync::lock(&self.foreign_locks);
        self.find(id)?;
        let listeners = foreign_locks.entry(lock.to_owned()).or_default();
        if listeners.iter().any(|(other, _)| *other == id) {
            return None;
        }
        let (sender, changed) = oneshot::channel();
        listeners.push((id, sender));
        Some(changed)
    }

    pub(super) fn cancel_change(&self, waiter: &RedisWaiter) {
        let Some(lock) = waiter.tracked.get() else { return };
        let mut foreign_locks = sync::lock(&self.foreign_locks);
        if let Some(listeners) = foreign_locks.get_mut(lock) {
            listeners.retain(|(id, _)| *id != waiter.claim.id);
            if listeners.is_empty() {
                foreign_locks.remove(lock);
            }
        }
    }

    /// A connection was lost, and with it what the server tracked for it.
    pub(super) fn cancel_all_changes(&self) {
        sync::lock(&self.foreign_locks).clear();
    }

    /// The lock with this key has changed, if it is tracked.
    pub(super) fn on_key_changed(&self, lock: &str) {
        let listeners = sync::lock(&self.foreign_locks).remove(lock).unwrap_or_default();
        for (_, sender) in listeners {
            let _ = sender.send(());
        }
    }

    /// All locks have changed.
    pub(super) fn on_all_changed(&self) {
        let foreign_locks = std::mem::take(&mut *sync::lock(&self.foreign_locks));
        for (_, sender) in foreign_locks.into_values().flatten() {
            let _ = sender.send(());
        }
    }
}
