//! Heartbeats: they keep the queue entries of this client's waiters alive, and find out when a
//! lease ended without a message.

use std::sync::{Arc, Mutex};

use tokio_postgres::types::Type;

use super::connection::Argument;
use super::error::PostgresRequestError;
use super::record::parse_claim_reply;
use super::statements::Call;
use super::{MAX_BATCH, PostgresCore, REQUEST_TIMEOUT};
use crate::clock::Moment;
use crate::engine::common::waiters::HandoffWaiter;
use crate::report::report;
use crate::sync;

/// When the heartbeat task runs next, and how it is woken earlier.
#[derive(Debug)]
pub(super) struct PostgresHeartbeats {
    next: Mutex<Moment>,
    /// All waiters are to send one now.
    all: Mutex<bool>,
    wake: tokio::sync::Notify,
}

impl PostgresHeartbeats {
    pub(super) fn new() -> Self {
        let next = Mutex::new(Moment::NEVER);
        Self { next, all: Mutex::new(false), wake: tokio::sync::Notify::new() }
    }

    /// Makes sure that the task runs in time for the next heartbeat of this waiter.
    pub(super) fn schedule(&self, waiter: &HandoffWaiter) {
        let heartbeat_at = waiter.heartbeat_at().unwrap_or(Moment::NEVER);
        let mut next = sync::lock(&self.next);
        if heartbeat_at < *next {
            *next = heartbeat_at;
            self.wake.notify_one();
        }
    }

    /// Messages may have been lost, or sent elsewhere: all waiters ask.
    pub(super) fn send_all(&self) {
        *sync::lock(&self.all) = true;
        self.wake.notify_one();
    }
}

/// Sends the heartbeats that are due, in as few requests as possible.
pub(super) async fn run_heartbeats(core: Arc<PostgresCore>) {
    loop {
        let now = core.clock.now();
        let all = std::mem::take(&mut *sync::lock(&core.heartbeats.all));
        let mut due = core.waiters.due(now, all);
        due.iter().for_each(|waiter| waiter.on_heartbeat_sent(now));
        // In the order of names, so that two batches do not deadlock.
        due.sort_by(|a, b| a.claim.name.as_str().cmp(b.claim.name.as_str()));
        for part in due.chunks(MAX_BATCH) {
            let (core, part) = (core.clone(), part.to_vec());
            tokio::spawn(async move { core.heartbeat(&part).await });
        }
        let next = {
            // Lock before computing it, or a new waiter would compare itself with the old time.
            let mut next = sync::lock(&core.heartbeats.next);
            *next = core.waiters.next_heartbeat();
            *next
        };
        tokio::select! {
            () = core.heartbeats.wake.notified() => {}
            () = core.clock.sleep_until(next) => {}
        }
    }
}

impl PostgresCore {
    /// Sends a heartbeat for this waiter now, if it still waits.
    pub(super) async fn heartbeat_now(&self, waiter: &HandoffWaiter) {
        if let Some(waiter) = self.waiters.find(waiter.claim.id) {
            waiter.on_heartbeat_sent(self.clock.now());
            self.heartbeat(&[waiter]).await;
        }
    }

    /// Sends one heartbeat for each of these waiters, which are in the order of names.
    async fn heartbeat(&self, waiters: &[Arc<HandoffWaiter>]) {
        let sent = self.clock.now();
        let inbox = self.shared.inbox();
        let names: Vec<&str> = waiters.iter().map(|waiter| waiter.claim.name.as_str()).collect();
        let ids: Vec<String> = waiters.iter().map(|waiter| waiter.claim.id.to_string()).collect();
        let arguments: &[Argument<'_>] =
            &[(&inbox, Type::TEXT), (&names, Type::TEXT_ARRAY), (&ids, Type::TEXT_ARRAY)];
        match self.upkeep.call(Call::Heartbeat, arguments, REQUEST_TIMEOUT).await {
            Ok(rows) => {
                for (waiter, row) in waiters.iter().zip(&rows) {
                    let reply = parse_claim_reply(row, 0).and_then(|reply| match reply {
                        Some(reply) => self.on_reply(waiter, sent, reply).map(drop),
                        None => Ok(()),
                    });
                    if let Err(error) = reply {
                        waiter.on_refused(error);
                    }
                }
            }
            Err(error) => {
                let error = PostgresRequestError::into_error(error);
                report!(debug, error = error, "a heartbeat got no reply");
                if !error.is_retryable() {
                    waiters.iter().for_each(|waiter| waiter.on_refused(error.clone()));
                }
            }
        }
    }
}
