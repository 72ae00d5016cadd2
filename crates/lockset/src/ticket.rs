//! A lock on paper: what one process needs to take a held lock over from another.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::acquire::WithdrawOnDrop;
use crate::client::Client;
use crate::clock::Moment;
use crate::engine::{Claim, ClaimId, Grant};
use crate::error::{Error, LossReason, Result};
use crate::guard::Guard;
use crate::name::{Name, Note};
use crate::options::ResolvedOptions;
use crate::token::Token;

const VERSION: u32 = 1;

/// A held lock that travels: made by [`Guard::detach`], used by
/// [`Lockset::attach`](crate::Lockset::attach), written down as one line of JSON.
///
/// Whoever has the ticket can renew and release the lock, so keep it as private as the lock
/// matters. It does not keep the lock alive: the lease runs on, and ends. A ticket is attached
/// once: the first process to do so has the lock, and every later one is refused.
#[derive(Clone, Serialize, Deserialize)]
pub struct Ticket {
    version: u32,
    engine: String,
    home: String,
    claim: Claim,
    token: Token,
    key: Vec<u8>,
}

/// The lease of a lock that a ticket keeps, as [`Lockset::renew`](crate::Lockset::renew) left it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Lease {
    /// The fencing token of the lock.
    pub token: Token,
    /// How long the lease runs from now on.
    pub valid_for: Duration,
}

impl Ticket {
    pub(crate) fn new(client: &Client, claim: &Claim, grant: &Grant) -> Self {
        Self {
            version: VERSION,
            engine: client.capabilities.engine.to_owned(),
            home: client.home.clone(),
            claim: claim.clone(),
            token: grant.token,
            key: grant.key.clone(),
        }
    }

    /// The engine the lock lives on.
    pub fn engine(&self) -> &str {
        &self.engine
    }

    /// Where the lock lives, as [`Lockset::home`](crate::Lockset::home) tells it: a URL without
    /// secrets where one can be given.
    pub fn home(&self) -> &str {
        &self.home
    }

    /// The lock.
    pub fn name(&self) -> &Name {
        &self.claim.name
    }

    /// Takes the lock over for `client`, under a claim of its own: whoever does so first wins.
    pub(crate) async fn attach(&self, client: &Arc<Client>) -> Result<Guard> {
        self.check_home(client)?;
        let note = Note::new(&self.claim.note.text)?;
        let claim = Arc::new(Claim { id: ClaimId::random(), note, ..self.claim.clone() });
        let _visit = client.visit()?;
        let _under_way = client.awaits(&claim);
        // If it ends before there is a guard, what may have been passed on is released.
        let undo = WithdrawOnDrop::new(client, &claim);
        let before = self.grant();
        let adopting = || client.engine.adopt(&self.claim, &before, &claim);
        let adopted = client.asked_again(claim.ttl, adopting).await;
        let grant = self.or_why(client, adopted, claim.id).await?;
        let renewed = match claim.fixed {
            false => client.engine.renew(&[(&claim, &grant)]).await.pop(),
            true => None,
        };
        // A lock that was asked back is held until its lease ends, and can be given back.
        let is_last = matches!(renewed, Some(Err(Error::Lost { reason: LossReason::Revoked, .. })));
        let grant = match renewed {
            Some(renewed) if !is_last => renewed,
            _ => client.lease_of(&claim, &grant).await,
        };
        let grant = self.or_why(client, grant, claim.id).await?;
        let options = ResolvedOptions {
            ttl: claim.ttl,
            fixed: claim.fixed,
            max_hold: None,
            note: claim.note.clone(),
            detachable: true,
            replicas: None,
        };
        let guard = Guard::new(client.clone(), claim, grant, &options, &mut None)
            .ok_or_else(|| Error::lost(self.name(), LossReason::Expired))?;
        undo.defuse();
        if is_last {
            guard.asked_back();
        }
        client.check_usable().map(|()| guard)
    }

    /// Renews the lease without taking the lock over.
    pub(crate) async fn renew(&self, client: &Arc<Client>) -> Result<Lease> {
        self.check_home(client)?;
        if self.claim.fixed {
            let why = "its lease is fixed, and is never renewed";
            return Err(Error::invalid("ticket", self.name().as_str(), why));
        }
        let _visit = client.visit()?;
        let grant = self.grant();
        let renewing = || async {
            let renewed = client.engine.renew(&[(&self.claim, &grant)]).await.pop();
            renewed.unwrap_or_else(|| Err(Error::lost(self.name(), LossReason::Forgotten)))
        };
        let renewed = client.asked_again(self.claim.ttl, renewing).await;
        let renewed = self.or_why(client, renewed, self.claim.id).await?;
        let valid_for = renewed.valid_until.saturating_duration_since(client.clock.now());
        Ok(Lease { token: client.shown(self.token), valid_for })
    }

    fn grant(&self) -> Grant {
        Grant { token: self.token, valid_until: Moment::from_nanos(0), key: self.key.clone() }
    }

    /// A ticket's lock that its home does not know any more was attached by another, or its lease
    /// has ended: nobody looked after it meanwhile.
    async fn or_why(
        &self,
        client: &Client,
        answer: Result<Grant>,
        asked_by: ClaimId,
    ) -> Result<Grant> {
        let Err(Error::Lost { reason: LossReason::Forgotten, .. }) = answer else { return answer };
        let Ok(state) = client.engine.inspect(self.name()).await else { return answer };
        let holder = state.holders.iter().find(|holder| holder.token == Some(self.token));
        match holder.map(|holder| holder.claim) {
            None => Err(Error::lost(self.name(), LossReason::Expired)),
            Some(claim) if claim == Some(asked_by) => answer,
            Some(_) => Err(Error::lost(self.name(), LossReason::TicketUsed)),
        }
    }

    fn check_home(&self, client: &Client) -> Result<()> {
        let refuse = |why: String| Err(Error::invalid("ticket", self.name().as_str(), why));
        if self.engine != client.capabilities.engine {
            return refuse(format!(
                "it is for the {} engine, this is the {} engine",
                self.engine, client.capabilities.engine
            ));
        }
        let can = client.capabilities;
        if self.claim.ttl < can.min_ttl || self.claim.ttl > can.max_ttl {
            return refuse(format!("its ttl of {:?} is none of this engine's", self.claim.ttl));
        }
        if self.home != client.home {
            return refuse(format!("its lock lives at {}, not at {}", self.home, client.home));
        }
        Ok(())
    }
}

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self).map_err(|_| fmt::Error)?)
    }
}

impl FromStr for Ticket {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        #[derive(Deserialize)]
        struct AnyVersion {
            version: u32,
        }
        // The text itself is a secret, so no error repeats it.
        let refuse = |why: String| Error::invalid("ticket", "(not shown)", why);
        let any: AnyVersion = serde_json::from_str(text)
            .map_err(|error| refuse(format!("it is not a lockset ticket ({error})")))?;
        if any.version != VERSION {
            let why = format!("it has version {}, this lockset knows {VERSION}", any.version);
            return Err(refuse(why));
        }
        serde_json::from_str(text).map_err(|error| refuse(format!("it is damaged ({error})")))
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket")
            .field("engine", &self.engine)
            .field("name", self.name())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{LockOptions, Lockset};

    async fn ticket(locks: &Lockset) -> Ticket {
        let options = LockOptions::default().ttl(Duration::from_secs(5)).detachable();
        let mutex = locks.mutex("m").unwrap().with(options).unwrap();
        mutex.lock().await.unwrap().detach().await.unwrap()
    }

    #[tokio::test]
    async fn a_ticket_survives_being_written_down() {
        let locks = Lockset::connect("memory:").await.unwrap();
        let written = ticket(&locks).await.to_string();
        let read: Ticket = written.parse().unwrap();
        assert_eq!((read.engine(), read.name().as_str()), ("memory", "m"));
        locks.attach(&read).await.unwrap().release().await.unwrap();
        assert!(matches!(locks.attach(&read).await, Err(Error::Lost { .. })), "it was released");
    }

    #[tokio::test]
    async fn malformed_old_and_foreign_tickets_are_refused_without_showing_them() {
        let locks = Lockset::connect("memory:").await.unwrap();
        let good = ticket(&locks).await.to_string();
        let newer = good.replace("\"version\":1", "\"version\":2");
        let damaged = good.replace("\"token\"", "\"broken\"");
        for (text, reason) in
            [("", "not a lockset ticket"), ("{}", "not a lockset ticket"), (&newer, "version 2")]
                .into_iter()
                .chain([(damaged.as_str(), "damaged")])
        {
            let error = text.parse::<Ticket>().unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
        let ticket: Ticket = good.parse().unwrap();
        let elsewhere = Lockset::connect("memory:").await.unwrap();
        let error = elsewhere.attach(&ticket).await.unwrap_err().to_string();
        assert!(error.contains("lives at memory:"), "{error}");
        assert!(!format!("{ticket:?}").contains(&ticket.claim.id.to_string()));
    }

    #[tokio::test]
    async fn only_a_lock_that_was_taken_to_be_detached_is() {
        let locks = Lockset::connect("memory:").await.unwrap();
        let error = locks.mutex("m").unwrap().lock().await.unwrap().detach().await.unwrap_err();
        assert!(error.to_string().contains("detachable"), "{error}");
    }
}
