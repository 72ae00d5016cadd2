//! Heartbeats: they keep the queue entries of this client's waiters alive, find out when a lease
//! ended without a message, and track foreign locks.

use std::sync::{Arc, Mutex};

use redis::Value;

use super::connection::RedisConnection;
use super::error::RedisReply;
use super::keys::RedisKeys;
use super::waiters::RedisWaiter;
use super::{MAX_BATCH, REQUEST_TIMEOUT, RedisCore};
use crate::clock::Moment;
use crate::engine::ClaimId;
use crate::error::Error;
use crate::report::report;
use crate::sync;

/// When the heartbeat task runs next, and how it is woken earlier.
#[derive(Debug)]
pub(super) struct HeartbeatSchedule {
    next: Mutex<Moment>,
    /// Waiters behind a foreign lock that is not tracked yet.
    to_track: Mutex<Vec<ClaimId>>,
    wake: tokio::sync::Notify,
}

impl HeartbeatSchedule {
    pub(super) fn new() -> Self {
        let next = Mutex::new(Moment::NEVER);
        Self { next, to_track: Mutex::default(), wake: tokio::sync::Notify::new() }
    }

    /// Makes sure that the task runs in time for the next heartbeat of this waiter.
    pub(super) fn schedule(&self, waiter: &RedisWaiter) {
        let heartbeat_at = waiter.heartbeat_at().unwrap_or(Moment::NEVER);
        let mut next = sync::lock(&self.next);
        if heartbeat_at < *next {
            *next = heartbeat_at;
            self.wake.notify_one();
        }
    }

    /// Makes the task track the foreign lock for which this claim waits.
    pub(super) fn track_foreign(&self, id: ClaimId) {
        sync::lock(&self.to_track).push(id);
        self.wake.notify_one();
    }

    fn take_to_track(&self) -> Vec<ClaimId> {
        std::mem::take(&mut *sync::lock(&self.to_track))
    }
}

/// Sends the heartbeats that are due, in as few requests as possible; after a reconnection all.
pub(super) async fn run_heartbeats(core: Arc<RedisCore>) {
    let mut reconnects = core.router.reconnects();
    let mut all = false;
    loop {
        let now = core.clock.now();
        for id in core.heartbeats.take_to_track() {
            if let Some(waiter) = core.waiters.find(id) {
                tokio::spawn(core.clone().await_foreign(waiter));
            }
        }
        let due = core.waiters.due(now, all);
        due.iter().for_each(|waiter| waiter.on_heartbeat_sent(now));
        for part in core.group_by_slot(&due, MAX_BATCH, |waiter| &waiter.claim.name) {
            let part: Vec<Arc<RedisWaiter>> = part.into_iter().map(|(_, waiter)| waiter).collect();
            let core = core.clone();
            // One task each: a silent node must not cost the waiters on other nodes their entries.
            tokio::spawn(async move { core.heartbeat(&part).await });
        }
        let next = {
            // Lock before computing it, or a new waiter would compare itself with the old time.
            let mut next = sync::lock(&core.heartbeats.next);
            *next = core.waiters.next_heartbeat();
            *next
        };
        all = tokio::select! {
            () = core.heartbeats.wake.notified() => false,
            () = core.clock.sleep_until(next) => false,
            changed = reconnects.changed() => {
                if changed.is_err() {
                    return;
                }
                core.waiters.cancel_all_changes();
                core.watches.on_all_changed();
                true
            }
        };
    }
}

impl RedisCore {
    /// Sends a heartbeat for this waiter now, if it still waits.
    pub(super) async fn heartbeat_now(&self, waiter: &RedisWaiter) {
        if let Some(waiter) = self.waiters.find(waiter.claim.id) {
            waiter.on_heartbeat_sent(self.clock.now());
            self.heartbeat(&[waiter]).await;
        }
    }

    /// Sends one heartbeat for each of these waiters. In a cluster all must be of one slot.
    async fn heartbeat(&self, waiters: &[Arc<RedisWaiter>]) {
        let Some(first) = waiters.first() else { return };
        let sent = self.clock.now();
        let names = self.declared_keys(waiters.iter().map(|waiter| &waiter.claim));
        let reply = self.send_heartbeats(&self.keys(&first.claim.name), &names, waiters).await;
        self.on_heartbeat_replies(waiters, sent, reply).await;
    }

    /// Tracks the foreign lock for which a waiter waits, and sends a heartbeat as soon as it
    /// changes. The heartbeat competes with clients that poll, so everything is prepared before.
    async fn await_foreign(self: Arc<Self>, waiter: Arc<RedisWaiter>) {
        let keys = self.keys(&waiter.claim.name);
        let Some(changed) = self.waiters.subscribe_change(keys.lock(), &waiter) else { return };
        let names = self.declared_keys([&waiter.claim].into_iter());
        let mut get = redis::cmd("GET");
        get.arg(keys.lock());
        let is_free = match self.query_tracked(None, &keys, &get).await {
            Ok((value, _)) => value == Value::Nil,
            Err(_) => return self.waiters.cancel_change(&waiter),
        };
        if is_free {
            self.waiters.cancel_change(&waiter);
        } else if changed.await.is_err() {
            // It no longer waits, or the connection was lost; then its next heartbeat finds out.
            return;
        }
        let sent = self.clock.now();
        waiter.on_heartbeat_sent(sent);
        let waiters = std::slice::from_ref(&waiter);
        let reply = self.send_heartbeats(&keys, &names, waiters).await;
        self.on_heartbeat_replies(waiters, sent, reply).await;
    }

    async fn send_heartbeats(
        &self,
        of: &RedisKeys,
        names: &[String],
        waiters: &[Arc<RedisWaiter>],
    ) -> RedisReply {
        let script = &self.scripts.heartbeat;
        let ids: Vec<String> = waiters.iter().map(|waiter| waiter.claim.id.to_string()).collect();
        let command = |connection: &RedisConnection| {
            let mut command = script.call(names.len());
            // Grants are published to the inbox of the connection that sends the heartbeat.
            command.arg(names).arg(&connection.inbox).arg(connection.connected_at_us).arg(&ids);
            command
        };
        self.run_command(REQUEST_TIMEOUT, script, of, command).await
    }

    /// Handles the reply to heartbeats that were sent at `sent`.
    async fn on_heartbeat_replies(
        &self,
        waiters: &[Arc<RedisWaiter>],
        sent: Moment,
        reply: RedisReply,
    ) {
        match reply {
            Ok(Value::Array(replies)) => {
                for (waiter, reply) in waiters.iter().zip(&replies) {
                    if let Err(error) = self.on_reply(&waiter.claim, Some(waiter), sent, reply) {
                        report!(debug, error = error, "a heartbeat got an unexpected reply");
                        if !error.is_retryable() {
                            waiter.on_refused(error);
                        }
                    }
                }
            }
            Ok(_) => {}
            Err(error) => {
                let error = error.into_error();
                report!(debug, error = error, "a heartbeat got no reply");
                if !error.is_retryable() {
                    self.on_heartbeats_refused(waiters, error).await;
                }
            }
        }
    }

    /// Fails the waiter to which a refusal applies that a retry does not cure. If there are several
    /// waiters, each sends its own heartbeat to find out.
    async fn on_heartbeats_refused(&self, waiters: &[Arc<RedisWaiter>], why: Error) {
        match waiters {
            [waiter] => waiter.on_refused(why),
            _ => {
                let each =
                    waiters.iter().map(|waiter| self.heartbeat(std::slice::from_ref(waiter)));
                Box::pin(futures_util::future::join_all(each)).await;
            }
        }
    }
}
