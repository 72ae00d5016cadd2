//! A lock on paper: what one process needs to take a held lock over from another.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::client::Client;
use crate::engine::{Claim, Grant};
use crate::error::{Error, LossReason, Result};
use crate::guard::Guard;
use crate::name::Name;
use crate::terms::Checked;
use crate::token::Token;

const VERSION: u32 = 1;

/// A held lock that travels: made by [`Guard::detach`], used by
/// [`Lockset::attach`](crate::Lockset::attach), written down as one line of JSON.
///
/// Whoever has the ticket can renew and release the lock, so keep it as private as the lock
/// matters. It does not keep the lock alive: the lease runs on, and ends.
#[derive(Clone, Serialize, Deserialize)]
pub struct Ticket {
    version: u32,
    engine: String,
    home: String,
    claim: Claim,
    token: Token,
    key: Vec<u8>,
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

    /// Takes the lock over for `client`.
    pub(crate) async fn attach(&self, client: &Arc<Client>) -> Result<Guard> {
        self.check_home(client)?;
        let claim = Arc::new(self.claim.clone());
        let _visit = client.visit()?;
        let under_way = client.awaits_alone(&claim);
        // In this order: whoever attaches it is in care before it is under way no more.
        let Some(_under_way) = under_way.filter(|_| !client.keeper.keeps(claim.id)) else {
            let why = "this client holds its lock already; reenter that guard";
            return Err(Error::invalid("ticket", self.name().as_str(), why));
        };
        let sent = client.clock.now();
        let grant = Grant { token: self.token, valid_until: sent, key: self.key.clone() };
        let renewed = match self.claim.fixed {
            false => client.engine.renew(&[(&self.claim, &grant)]).await.pop(),
            true => None,
        };
        // A lock that was asked back is held until its lease ends, and can be given back.
        let is_last = matches!(renewed, Some(Err(Error::Lost { reason: LossReason::Revoked, .. })));
        let grant = match renewed {
            Some(renewed) if !is_last => renewed?,
            _ => client.lease_of(&self.claim, &grant).await?,
        };
        let terms = Checked {
            ttl: self.claim.ttl,
            fixed: self.claim.fixed,
            max_hold: None,
            note: self.claim.note.clone(),
            detachable: true,
            replicas: None,
        };
        let guard = Guard::new(client.clone(), claim, grant, &terms, None, sent);
        if is_last {
            guard.asked_back();
        }
        client.check_usable().map(|()| guard)
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
    use crate::{Lockset, Terms};

    async fn ticket(locks: &Lockset) -> Ticket {
        let terms = Terms::default().ttl(Duration::from_secs(5)).detachable();
        let mutex = locks.mutex("m").unwrap().with(terms).unwrap();
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
