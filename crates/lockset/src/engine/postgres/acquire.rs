//! Acquiring: requesting a lock, waiting for it, and confirming the grant.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::batch::{ClaimPart, ExchangeReply, PostgresRequest};
use super::error::{PostgresRequestError, unexpected_reply};
use super::record::PostgresClaimReply;
use super::{MIN_REQUEST_TIMEOUT, PostgresCore, REQUEST_TIMEOUT};
use crate::clock::Moment;
use crate::engine::common::admission::{check_permits, clash};
use crate::engine::common::waiters::{HandoffWaiter, WaiterState};
use crate::engine::{Claim, Grant, Mode, Replicas, Wait, drift, trusted_until};
use crate::error::{Error, Result};
use crate::token::Token;

/// The pause before a request is sent again that got no reply or a temporary refusal.
const RETRY_PAUSE: Duration = Duration::from_millis(20);
/// How often a waiter asks while nothing tells it that it was granted the lock.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// The outcome of a request for a claim.
pub(super) enum PostgresOutcome {
    /// Granted for the full ttl by this request.
    Granted(Grant),
    Busy,
    /// The outcome is in the waiter's state.
    SeeWaiter,
}

impl PostgresCore {
    /// Requests a lock and waits until it is granted or the time is over.
    pub(super) async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        check_permits(claim)?;
        if !matches!(claim.replicas, None | Some(Replicas::None)) {
            let what = "waiting for replicas: set synchronous_commit and standbys on the server";
            return Err(Error::Unsupported { engine: super::ENGINE, what: what.to_owned() });
        }
        let waiter = self.waiters.register(claim);
        let began = self.clock.now();
        let outcome = match waiter.is_new() {
            true => self.request_lock(&waiter, wait).await,
            false => Ok(PostgresOutcome::SeeWaiter),
        };
        let granted = match outcome {
            Ok(PostgresOutcome::Granted(grant)) => Ok(Some(grant)),
            Ok(PostgresOutcome::Busy) => Ok(None),
            Ok(PostgresOutcome::SeeWaiter) => Box::pin(self.wait_for(&waiter, wait)).await,
            // Send again with the same id, even for a claim that does not wait: the connection may
            // have broken.
            Err(error)
                if error.is_retryable()
                    && self.clock.now() < wait.deadline().max(began + REQUEST_TIMEOUT / 2) =>
            {
                Box::pin(self.wait_for(&waiter, wait)).await
            }
            Err(error) => Err(error),
        };
        // After any other error the caller may call again, and the waiter must be known then.
        if matches!(granted, Ok(_) | Err(Error::NotHeld { .. })) {
            self.waiters.remove(claim.id);
        }
        granted
    }

    async fn wait_for(&self, waiter: &Arc<HandoffWaiter>, wait: Wait) -> Result<Option<Grant>> {
        let claim = &waiter.claim;
        loop {
            let now = self.clock.now();
            let recheck_at = match waiter.state(now) {
                WaiterState::Granted(grant) => match self.confirm_grant(claim, grant).await? {
                    Some(grant) => return Ok(Some(grant)),
                    None => return Err(Error::NotHeld { name: claim.name.clone() }),
                },
                WaiterState::Gone => return Err(Error::NotHeld { name: claim.name.clone() }),
                WaiterState::Failed(why) => return Err(why),
                WaiterState::NotQueued => match self.request_lock(waiter, wait).await {
                    Ok(PostgresOutcome::Granted(grant)) => return Ok(Some(grant)),
                    // An earlier request without a reply may still acquire the lock: withdraw it.
                    Ok(PostgresOutcome::Busy) => {
                        return self.withdraw(claim).await.map(|()| None);
                    }
                    Ok(PostgresOutcome::SeeWaiter) => continue,
                    Err(error) if error.is_retryable() && self.clock.now() < wait.deadline() => {
                        // Sent again with the same id, which is harmless if it was executed.
                        tokio::time::sleep(RETRY_PAUSE).await;
                        continue;
                    }
                    Err(error) => return Err(error),
                },
                WaiterState::Waiting(recheck_at) => recheck_at,
            };
            if now >= wait.deadline() {
                self.withdraw(claim).await?;
                return Ok(None);
            }
            let recheck_at = match self.shared.is_listening.load(Ordering::Acquire) {
                true => recheck_at,
                false => recheck_at.min(now + POLL_INTERVAL),
            };
            tokio::select! {
                () = waiter.changed.notified() => {}
                () = self.clock.sleep_until(recheck_at.min(wait.deadline())) => {
                    if self.clock.now() >= recheck_at {
                        // The current lease may have ended: a heartbeat finds out.
                        self.heartbeat_now(waiter).await;
                    }
                }
            }
        }
    }

    /// Sends one request for a claim: it acquires the lock, queues the claim, or finds its state.
    async fn request_lock(
        &self,
        waiter: &Arc<HandoffWaiter>,
        wait: Wait,
    ) -> Result<PostgresOutcome> {
        let claim = &waiter.claim;
        let sent = self.clock.now();
        waiter.on_sending(sent);
        // The reply is not awaited for longer than the lock.
        let timeout = match wait {
            Wait::Until(deadline) => {
                let left = deadline.saturating_duration_since(sent);
                left.clamp(MIN_REQUEST_TIMEOUT, REQUEST_TIMEOUT)
            }
            Wait::No | Wait::Forever => REQUEST_TIMEOUT,
        };
        let part = ClaimPart { waiter: waiter.clone(), waits: wait != Wait::No };
        let request = PostgresRequest { name: claim.name.clone(), end: None, claim: Some(part) };
        match self.exchange(request, timeout).await {
            Ok(ExchangeReply { claim: Some(reply), .. }) => self.on_reply(waiter, sent, reply),
            Ok(_) => Err(unexpected_reply("no reply to a claim")),
            Err(error) => {
                if let PostgresRequestError::Unknown(_) = error {
                    self.dirty().insert(claim.id, ());
                }
                Err(error.into_error())
            }
        }
    }

    pub(super) async fn exchange(
        &self,
        request: PostgresRequest,
        timeout: Duration,
    ) -> Result<ExchangeReply, PostgresRequestError> {
        let connection = self.main.connected(timeout).await?;
        connection.exchange(&Arc::new(request), timeout).await
    }

    /// Handles the reply to a request for this waiter that was sent at `sent`.
    pub(super) fn on_reply(
        &self,
        waiter: &HandoffWaiter,
        sent: Moment,
        reply: PostgresClaimReply,
    ) -> Result<PostgresOutcome> {
        let claim = &waiter.claim;
        match reply {
            PostgresClaimReply::GrantedNow(token) => {
                let valid_until = trusted_until(sent, claim.ttl);
                let (token, key) = (Token::new(token), Vec::new());
                return Ok(PostgresOutcome::Granted(Grant { token, valid_until, key }));
            }
            PostgresClaimReply::Granted(token, left) => waiter.on_granted(sent, token, left),
            PostgresClaimReply::Queued { stamp, position, left } => {
                waiter.on_queued(sent, self.clock.now(), stamp, position, Some(left));
                self.heartbeats.schedule(waiter);
            }
            PostgresClaimReply::Gone => waiter.on_gone(),
            PostgresClaimReply::Busy => return Ok(PostgresOutcome::Busy),
            PostgresClaimReply::Clash(limit) => {
                let used = match u32::try_from(limit).unwrap_or(u32::MAX) {
                    0 => Mode::Exclusive,
                    limit => Mode::Permits { take: 1, limit },
                };
                let why = clash(used, claim.mode).unwrap_or_default();
                return Err(Error::Conflict { name: claim.name.clone(), why });
            }
        }
        Ok(PostgresOutcome::SeeWaiter)
    }

    /// Renews a grant that was read only after its time; `None` if that shows that it was lost.
    async fn confirm_grant(&self, claim: &Claim, grant: Grant) -> Result<Option<Grant>> {
        if grant.valid_until > self.clock.now() {
            return self.extend_fixed(claim, grant).await;
        }
        let renewed = self.renew(&[(claim, &grant)]).await.pop();
        match renewed.unwrap_or_else(|| Err(unexpected_reply("no row"))) {
            Ok(grant) => Ok(Some(grant)),
            Err(Error::Lost { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Extends the first lease of a handed-over fixed claim to its full ttl, from the grant on.
    async fn extend_fixed(&self, claim: &Claim, grant: Grant) -> Result<Option<Grant>> {
        let first = self.waiters.leases(claim.ttl).first;
        let is_full = grant.valid_until > self.clock.now() + first;
        if !claim.fixed || claim.ttl <= first || is_full {
            return Ok(Some(grant));
        }
        let (extension, sent) = (claim.ttl.saturating_sub(first), self.clock.now());
        let left = self.extend(&[(claim, &grant)], Some(extension)).await?;
        Ok(left.first().copied().and_then(|left| u64::try_from(left).ok()).map(|left| {
            let left = Duration::from_millis(left);
            let valid_until = (sent + left).saturating_sub(drift(claim.ttl));
            Grant { valid_until, ..grant }
        }))
    }
}
