//! Acquiring: requesting a lock, waiting for it, and confirming the grant.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;

use super::batch::AcquirePart;
use super::error::RedisRequestError;
use super::record;
use super::renew::{first_reply, parse_renewal};
use super::reply::{ClaimReply, array, number_at, parse_claim_reply, text_at, unexpected_reply};
use super::scripts::TOKENS_END;
use super::waiters::{RedisWaiter, WaiterState};
use super::{MIN_REQUEST_TIMEOUT, REQUEST_TIMEOUT, RedisCore};
use crate::clock::Moment;
use crate::engine::{Claim, Grant, Mode, Replicas, Wait, drift, trusted_until};
use crate::error::{Error, Result};
use crate::token::Token;

/// The pause before a request is sent again that got no reply or a temporary refusal.
const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// How many waiters, from the head of the queue, track a foreign lock. One would do, but the first
/// entry may be dead, or the `!` that stands for tombstones.
const TRACKING_WAITERS: u32 = 2;

/// The outcome of a request for a claim.
pub(super) enum RedisRequestOutcome {
    /// Granted for the full ttl by this request.
    Granted(Grant),
    Busy,
    /// The outcome is in the waiter's state.
    SeeWaiter,
}

impl RedisCore {
    /// Requests a lock and waits until it is granted or the time is over. Rare paths are boxed,
    /// here and below, so that the future for a free lock stays small.
    pub(super) async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        claim.floor.map_or(Ok(()), check_token)?;
        self.check_name(&claim.name)?;
        let began = self.clock.now();
        let (waiter, outcome) = match self.waiters.find(claim.id).filter(|known| !known.is_new()) {
            Some(known) => (Some(known), Ok(RedisRequestOutcome::SeeWaiter)),
            None => self.request_lock(claim, wait).await,
        };
        let is_known = waiter.is_some();
        let granted = match outcome {
            Ok(RedisRequestOutcome::Granted(grant)) => Ok(Some(grant)),
            Ok(RedisRequestOutcome::Busy) => Ok(None),
            Ok(RedisRequestOutcome::SeeWaiter) => {
                Box::pin(self.wait_for(claim, waiter, began, wait)).await
            }
            // Send again with the same id, even for a claim that does not wait: the connection may
            // have broken.
            Err(error)
                if error.is_retryable()
                    && self.clock.now() < wait.deadline().max(began + REQUEST_TIMEOUT / 2) =>
            {
                Box::pin(self.wait_for(claim, waiter, began, wait)).await
            }
            Err(error) => Err(error),
        };
        // After any other error the caller may call again, and the waiter must be known then.
        if is_known && matches!(granted, Ok(_) | Err(Error::NotHeld { .. })) {
            self.waiters.remove(claim.id);
        }
        match granted? {
            Some(grant) if self.replica_policy(claim) != Replicas::None => {
                Box::pin(self.confirm_on_replicas(claim, grant)).await.map(Some)
            }
            granted => Ok(granted),
        }
    }

    /// Waits until the lock is granted or the time is over. A waiter that is not registered yet had
    /// its first request sent at `began`.
    async fn wait_for(
        &self,
        claim: &Claim,
        waiter: Option<Arc<RedisWaiter>>,
        began: Moment,
        wait: Wait,
    ) -> Result<Option<Grant>> {
        let waiter = &waiter.unwrap_or_else(|| self.register(claim, began));
        loop {
            let now = self.clock.now();
            let recheck_at = match waiter.state(now) {
                WaiterState::Granted(grant) => match self.confirm_grant(claim, grant).await? {
                    Some(grant) => return Ok(Some(grant)),
                    None => return Err(Error::NotHeld { name: claim.name.clone() }),
                },
                WaiterState::Gone => return Err(Error::NotHeld { name: claim.name.clone() }),
                WaiterState::Failed(why) => return Err(why),
                WaiterState::NotQueued => match self.request_lock(claim, wait).await.1 {
                    Ok(RedisRequestOutcome::Granted(grant)) => return Ok(Some(grant)),
                    // An earlier request without a reply may still acquire the lock: withdraw it.
                    Ok(RedisRequestOutcome::Busy) => {
                        return self.withdraw(claim).await.map(|()| None);
                    }
                    Ok(RedisRequestOutcome::SeeWaiter) => continue,
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
    /// Also returns the waiter, if the claim may be queued.
    async fn request_lock(
        &self,
        claim: &Claim,
        wait: Wait,
    ) -> (Option<Arc<RedisWaiter>>, Result<RedisRequestOutcome>) {
        let sent = self.clock.now();
        // The reply is not awaited for longer than the lock.
        let timeout = match wait {
            Wait::Until(deadline) => {
                let left = deadline.saturating_duration_since(sent);
                left.clamp(MIN_REQUEST_TIMEOUT, REQUEST_TIMEOUT)
            }
            Wait::No | Wait::Forever => REQUEST_TIMEOUT,
        };
        let acquire = AcquirePart {
            claim: claim.clone(),
            leases: self.waiters.leases(claim.ttl),
            waits: wait != Wait::No,
        };
        let (result, waiter) = self.send(&claim.name, None, Some(acquire), sent, timeout).await;
        let outcome = match result {
            Ok((_, reply)) => match reply {
                Some(reply) => self.on_reply(claim, waiter.as_deref(), sent, &reply),
                None => Err(unexpected_reply("no answer")),
            },
            Err(error) => {
                if let RedisRequestError::Unknown(_) = error {
                    self.dirty().insert(claim.id, ());
                }
                Err(error.into_error())
            }
        };
        (waiter, outcome)
    }

    /// Handles the reply to a request for this claim that was sent at `sent`. Without a waiter, the
    /// request cannot have queued it.
    pub(super) fn on_reply(
        &self,
        claim: &Claim,
        waiter: Option<&RedisWaiter>,
        sent: Moment,
        reply: &Value,
    ) -> Result<RedisRequestOutcome> {
        match (parse_claim_reply(reply)?, waiter) {
            (ClaimReply::GrantedNow(token), _) => {
                let valid_until = trusted_until(sent, claim.ttl);
                let token = Token::new(token);
                return Ok(RedisRequestOutcome::Granted(match claim.has_fast_path() {
                    true => record::fresh_grant(token, valid_until),
                    false => record::grant(token, valid_until),
                }));
            }
            (ClaimReply::Granted(token, left), Some(waiter)) => {
                waiter.on_granted(sent, token, left);
            }
            (ClaimReply::Queued { stamp, position, left, is_foreign }, Some(waiter)) => {
                waiter.on_queued(sent, self.clock.now(), stamp, position, left);
                self.heartbeats.schedule(waiter);
                if is_foreign && position < TRACKING_WAITERS {
                    self.heartbeats.track_foreign(claim.id);
                }
            }
            (ClaimReply::Gone, Some(waiter)) => waiter.on_gone(),
            (ClaimReply::Busy, _) => return Ok(RedisRequestOutcome::Busy),
            (ClaimReply::Clash(used_as), _) => {
                let why = explain_clash(&used_as, claim);
                return Err(Error::Conflict { name: claim.name.clone(), why });
            }
            (_, None) => return Err(unexpected_reply("a batch does not queue claims")),
        }
        Ok(RedisRequestOutcome::SeeWaiter)
    }

    /// Renews a grant that was read only after its time; `None` if that shows that it was lost.
    async fn confirm_grant(&self, claim: &Claim, grant: Grant) -> Result<Option<Grant>> {
        if grant.valid_until > self.clock.now() {
            return self.extend_fixed(claim, grant).await;
        }
        let sent = self.clock.now();
        let replies = self.extend(&[(claim, &grant)], None).await?;
        match parse_renewal(claim, &grant, sent, first_reply(&replies)?) {
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
        let replies = self.extend(&[(claim, &grant)], Some(extension)).await?;
        let reply = array(first_reply(&replies)?)?;
        match text_at(reply, 0)?.as_str() {
            "renewed" => {
                let left = Duration::from_millis(number_at(reply, 1)?);
                let valid_until = (sent + left).saturating_sub(drift(claim.ttl));
                Ok(Some(Grant { valid_until, ..grant }))
            }
            _ => Ok(None),
        }
    }
}

fn explain_clash(used_as: &str, claim: &Claim) -> String {
    let used_as = match used_as.split_once(':') {
        Some((_, limit)) => format!("a semaphore of {limit} permits"),
        None => "a lock".to_owned(),
    };
    match claim.mode {
        Mode::Permits { limit, .. } => {
            format!("it is in use as {used_as}, not as a semaphore of {limit} permits")
        }
        Mode::Exclusive | Mode::Shared => format!("it is in use as {used_as}, not as a lock"),
    }
}

/// Refuses a token that the scripts cannot represent.
pub(super) fn check_token(token: Token) -> Result<()> {
    if token < Token::new(TOKENS_END) {
        return Ok(());
    }
    Err(Error::invalid("token", &token.to_string(), "on Redis tokens are below 2^53"))
}
