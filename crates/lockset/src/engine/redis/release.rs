//! Releasing, withdrawing and breaking locks.

use redis::Value;

use super::acquire::{RedisRequestOutcome, check_token};
use super::batch::{AcquirePart, ReleasePart};
use super::error::RedisRequestError;
use super::record;
use super::reply::{array, parse_former_holders, text_at};
use super::{REQUEST_TIMEOUT, RedisCore, TOMBSTONE_LIFE};
use crate::engine::{Break, Claim, ClaimId, Grant, Holder, Replicas};
use crate::error::{Error, Result};
use crate::name::Name;
use crate::token::Token;

impl RedisCore {
    /// Releases a lock, and acquires or queues for it on behalf of `next` in the same request.
    pub(super) async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        if self.dirty().contains_key(&claim.id) {
            // It ends with a tombstone; the next claim sends its own request.
            let released = Box::pin(self.end_with_tombstone(claim, Some(grant.token))).await?;
            return if released {
                Ok(None)
            } else {
                Err(Error::NotHeld { name: claim.name.clone() })
            };
        }
        // A claim that replicas must confirm sends its own request.
        let next = next.filter(|next| {
            self.replica_policy(next) == Replicas::None
                && next.floor.is_none_or(|floor| check_token(floor).is_ok())
        });
        let sent = self.clock.now();
        let waiter = next.map(|next| self.register(next, sent));
        // Dirty from the first byte on: this future may be dropped before the reply.
        let made_dirty = next.filter(|next| self.dirty().insert(next.id, ()).is_none());
        let acquire = next.map(|next| AcquirePart {
            claim: next.clone(),
            leases: self.waiters.leases(next.ttl),
            waits: true,
        });
        let Claim { id, ttl, ref note, .. } = *claim;
        let note = record::is_fresh(grant).then(|| note.clone());
        let release = ReleasePart { id, token: grant.token, ttl, note };
        let (result, _) =
            self.send(&claim.name, Some(release), acquire, sent, REQUEST_TIMEOUT).await;
        if !matches!(result, Err(RedisRequestError::Unknown(_))) {
            made_dirty.and_then(|next| self.dirty().remove(&next.id));
        }
        let (released, acquired) = result.map_err(RedisRequestError::into_error)?;
        if released != Some(Value::Int(1)) {
            return Err(Error::NotHeld { name: claim.name.clone() });
        }
        let (Some(next), Some(reply)) = (next, acquired) else { return Ok(None) };
        match self.on_reply(next, waiter.as_deref(), sent, &reply) {
            Ok(RedisRequestOutcome::Granted(grant)) => {
                self.waiters.remove(next.id);
                Ok(Some(grant))
            }
            // The next claim finds out by its own request.
            _ => Ok(None),
        }
    }

    /// Stops sending anything for this claim, then withdraws it.
    pub(super) async fn withdraw(&self, claim: &Claim) -> Result<()> {
        if let Some(waiter) = self.waiters.remove(claim.id) {
            waiter.on_gone();
        }
        self.end_with_tombstone(claim, None).await.map(drop)
    }

    /// Removes the claim from the lock and the queue, hands the lock over, and leaves a tombstone.
    /// Returns whether the claim held the lock with this token.
    async fn end_with_tombstone(&self, claim: &Claim, token: Option<Token>) -> Result<bool> {
        let keys = self.keys(&claim.name);
        let names = self.declared_keys([claim].into_iter());
        let token = token.map(|token| token.to_string()).unwrap_or_default();
        let args = [claim.id.to_string(), token, TOMBSTONE_LIFE.as_millis().to_string()];
        let reply = self.run_handover_script(&self.scripts.withdraw, &keys, &names, &args).await;
        let reply = reply.map_err(RedisRequestError::into_error)?;
        self.dirty().remove(&claim.id);
        Ok(text_at(array(&reply)?, 0)? == "released")
    }

    pub(super) async fn force_release(&self, name: &Name, how: Break) -> Result<Vec<Holder>> {
        let keys = self.keys(name);
        let mut names = vec![keys.lock().to_owned(), keys.queue()];
        names.extend(keys.others(ClaimId::from_bits(0)));
        names.extend(self.scripts.has_courtesy.then(|| keys.handoffs()));
        let args = [u8::from(how == Break::Now).to_string()];
        let script = &self.scripts.force_release;
        let reply = self.run_handover_script(script, &keys, &names, &args).await;
        parse_former_holders(&reply.map_err(RedisRequestError::into_error)?)
    }
}
