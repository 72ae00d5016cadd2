//! Releasing, withdrawing and breaking locks.

use tokio_postgres::types::Type;

use super::acquire::PostgresOutcome;
use super::batch::{ClaimPart, EndPart, ExchangeReply, PostgresRequest};
use super::error::PostgresRequestError;
use super::record::parse_former_holder;
use super::statements::Call;
use super::{PostgresCore, REQUEST_TIMEOUT};
use crate::engine::{Break, Claim, Grant, Holder};
use crate::error::{Error, Result};
use crate::name::Name;

impl PostgresCore {
    /// Releases a lock, and acquires or queues for it on behalf of `next` in the same request.
    pub(super) async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        // A claim with a request that got no reply leaves a tombstone; the next claim then sends
        // its own request.
        let buried = self.dirty().contains_key(&claim.id);
        let next = next.filter(|_| !buried);
        let sent = self.clock.now();
        let waiter = next.map(|next| {
            let waiter = self.waiters.register(next);
            waiter.on_sending(sent);
            waiter
        });
        // Dirty from the first byte on: this future may be dropped before the reply.
        let made_dirty = next.filter(|next| self.dirty().insert(next.id, ()).is_none());
        let part = waiter.clone().map(|waiter| ClaimPart { waiter, waits: true });
        let end = EndPart { id: claim.id, token: Some(grant.token), buried };
        let request = PostgresRequest { name: claim.name.clone(), end: Some(end), claim: part };
        let result = self.exchange(request, REQUEST_TIMEOUT).await;
        if !matches!(result, Err(PostgresRequestError::Unknown(_))) {
            made_dirty.and_then(|next| self.dirty().remove(&next.id));
        }
        let reply = result.map_err(PostgresRequestError::into_error)?;
        if buried {
            self.dirty().remove(&claim.id);
        }
        if !reply.released {
            return Err(Error::NotHeld { name: claim.name.clone() });
        }
        let (Some(waiter), ExchangeReply { claim: Some(reply), .. }) = (waiter, reply) else {
            return Ok(None);
        };
        match self.on_reply(&waiter, sent, reply) {
            Ok(PostgresOutcome::Granted(grant)) => {
                self.waiters.remove(waiter.claim.id);
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
        let end = EndPart { id: claim.id, token: None, buried: true };
        let request = PostgresRequest { name: claim.name.clone(), end: Some(end), claim: None };
        let ended = self.exchange(request, REQUEST_TIMEOUT).await;
        ended.map_err(PostgresRequestError::into_error)?;
        self.dirty().remove(&claim.id);
        Ok(())
    }

    pub(super) async fn force_release(&self, name: &Name, how: Break) -> Result<Vec<Holder>> {
        let (name, at_once) = (name.as_str(), how == Break::Now);
        let arguments: &[super::connection::Argument<'_>] =
            &[(&name, Type::TEXT), (&at_once, Type::BOOL)];
        let rows = self.main.call(Call::ForceRelease, arguments, REQUEST_TIMEOUT).await;
        let rows = rows.map_err(PostgresRequestError::into_error)?;
        rows.iter().map(parse_former_holder).collect()
    }
}
