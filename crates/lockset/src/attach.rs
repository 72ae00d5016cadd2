//! What a client does with a ticket: take the lock over, or renew its lease.

use std::sync::Arc;

use crate::client::{Client, WithdrawOnDrop};
use crate::engine::{Claim, ClaimId, Grant, Renewal};
use crate::error::{Error, LossReason, Result};
use crate::guard::Guard;
use crate::hold::Hold;
use crate::keeper::KeptLease;
use crate::name::Note;
use crate::options::ResolvedOptions;
use crate::ticket::{Lease, Ticket};

/// Takes the lock of `ticket` over, under a fresh claim. The first client to do so has it.
pub(crate) async fn attach(client: &Arc<Client>, ticket: &Ticket) -> Result<Guard> {
    client.check_usable()?;
    ticket.check_home(&client.capabilities, &client.home)?;
    let note = Note::new(&ticket.claim.note.text)?;
    let claim = Arc::new(Claim { id: ClaimId::random(), note, ..ticket.claim.clone() });
    let _in_flight = client.start()?;
    let _tracked = client.track(&claim);
    // If this ends before there is a guard, a lock that was passed on is released.
    let undo = WithdrawOnDrop::new(client, &claim);
    let detached = ticket.grant();
    let adopt = || client.engine.adopt(&ticket.claim, &detached, &claim);
    let adopted = client.retry_held(claim.ttl, adopt).await;
    let grant = explain_loss(client, ticket, adopted, claim.id).await?;
    let renew = || async {
        let reply = client.engine.renew(&[(&claim, &grant)]).await.pop();
        reply.unwrap_or(Ok(Renewal::Lost(LossReason::Forgotten)))
    };
    let renewed = match claim.fixed {
        false => Some(client.retry_held(claim.ttl, renew).await),
        true => None,
    };
    // A lock that an operator wants back is held until its lease ends, and can be released.
    let is_last = matches!(renewed, Some(Ok(Renewal::LastLease)));
    let grant = match renewed {
        Some(Ok(Renewal::LastLease)) | None => {
            client.retry_held(claim.ttl, || client.lease_of(&claim, &grant)).await
        }
        Some(renewed) => renewed.and_then(|renewal| renewal.into_inner(&claim.name)),
    };
    let grant = explain_loss(client, ticket, grant, claim.id).await?;
    let options = ResolvedOptions {
        ttl: claim.ttl,
        fixed: claim.fixed,
        max_hold: None,
        note: claim.note.clone(),
        detachable: true,
        replicas: None,
    };
    let hold = Hold::start(client.clone(), claim, grant, &options, &mut None)
        .ok_or_else(|| Error::lost(ticket.name(), LossReason::Expired))?;
    undo.disarm();
    if is_last {
        hold.on_last_lease();
    }
    client.check_usable().map(|()| Guard::new(hold))
}

/// Renews the lease of `ticket` without taking the lock over.
pub(crate) async fn renew(client: &Arc<Client>, ticket: &Ticket) -> Result<Lease> {
    client.check_usable()?;
    ticket.check_home(&client.capabilities, &client.home)?;
    if ticket.claim.fixed {
        let why = "its lease is not to be renewed";
        return Err(Error::invalid("ticket", ticket.name().as_str(), why));
    }
    let _in_flight = client.start()?;
    let grant = ticket.grant();
    let request = || async {
        let reply = client.engine.renew(&[(&ticket.claim, &grant)]).await.pop();
        reply.unwrap_or(Ok(Renewal::Lost(LossReason::Forgotten)))?.into_inner(ticket.name())
    };
    let renewed = client.retry_held(ticket.claim.ttl, request).await;
    let renewed = explain_loss(client, ticket, renewed, ticket.claim.id).await?;
    let valid_for = renewed.valid_until.saturating_duration_since(client.clock.now());
    Ok(Lease { token: client.settings.shown(grant.token), valid_for })
}

/// If the engine no longer knows the lock of a ticket, another client attached it, or its lease
/// ended. Replaces [`LossReason::Forgotten`] by the reason. `claim` is the claim of the request.
async fn explain_loss(
    client: &Client,
    ticket: &Ticket,
    reply: Result<Grant>,
    claim: ClaimId,
) -> Result<Grant> {
    let Err(Error::Lost { reason: LossReason::Forgotten, .. }) = reply else { return reply };
    let Ok(state) = client.engine.inspect(ticket.name()).await else { return reply };
    let token = ticket.grant().token;
    let holder = state.holders.iter().find(|holder| holder.token == Some(token));
    match holder.map(|holder| holder.claim) {
        None => Err(Error::lost(ticket.name(), LossReason::Expired)),
        Some(held_by) if held_by == Some(claim) => reply,
        Some(_) => Err(Error::lost(ticket.name(), LossReason::TicketUsed)),
    }
}
