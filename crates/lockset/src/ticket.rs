//! Tickets: what one process needs to take a held lock over from another.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::clock::Moment;
use crate::engine::{Capabilities, Claim, Grant};
use crate::error::{Error, Result};
use crate::name::Name;
use crate::token::Token;

const VERSION: u32 = 1;

/// A held lock that can be passed to another process: made by
/// [`Guard::detach`](crate::Guard::detach), used by [`Lockset::attach`](crate::Lockset::attach),
/// written as one line of JSON.
///
/// A process that has the ticket can renew and release the lock, so keep it private. The ticket
/// does not keep the lock alive: the lease runs on, and ends. A ticket can be attached once: the
/// first process has the lock, and every later one is refused.
#[derive(Clone, Serialize, Deserialize)]
pub struct Ticket {
    version: u32,
    engine: String,
    home: String,
    pub(crate) claim: Claim,
    token: Token,
    key: Vec<u8>,
}

/// The lease of a detached lock after [`Lockset::renew`](crate::Lockset::renew).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Lease {
    /// The fencing token of the lock.
    pub token: Token,
    /// How long the lease runs from now on.
    pub valid_for: Duration,
}

impl Ticket {
    pub(crate) fn new(engine: &str, home: &str, claim: &Claim, grant: &Grant) -> Self {
        Self {
            version: VERSION,
            engine: engine.to_owned(),
            home: home.to_owned(),
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

    /// The grant as it was when the lock was detached. Its lease must be looked up or renewed.
    pub(crate) fn grant(&self) -> Grant {
        Grant { token: self.token, valid_until: Moment::from_nanos(0), key: self.key.clone() }
    }

    /// Checks that the lock lives at `home` on this engine.
    pub(crate) fn check_home(&self, can: &Capabilities, home: &str) -> Result<()> {
        let refuse = |why: String| Err(Error::invalid("ticket", self.name().as_str(), why));
        if self.engine != can.engine {
            let why = format!("it is for the {} engine, not for {}", self.engine, can.engine);
            return refuse(why);
        }
        if self.claim.ttl < can.min_ttl || self.claim.ttl > can.max_ttl {
            return refuse(format!("this engine does not support its ttl of {:?}", self.claim.ttl));
        }
        if self.home != home {
            return refuse(format!("its lock lives at {}, not at {home}", self.home));
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
        // The text itself is a secret, so no error repeats it. The message of serde may.
        let refuse = |why: String| Error::invalid("ticket", "(not shown)", why);
        let place =
            |error: serde_json::Error| format!("line {} column {}", error.line(), error.column());
        let any: AnyVersion = serde_json::from_str(text)
            .map_err(|error| refuse(format!("it is not a lockset ticket ({})", place(error))))?;
        if any.version != VERSION {
            let why = format!("it has version {}, this lockset knows {VERSION}", any.version);
            return Err(refuse(why));
        }
        serde_json::from_str(text)
            .map_err(|error| refuse(format!("it is damaged ({})", place(error))))
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

    use proptest::prelude::*;

    use super::*;
    use crate::{LockOptions, Lockset};

    async fn ticket(locks: &Lockset) -> Ticket {
        let options = LockOptions::default().ttl(Duration::from_secs(5)).detachable();
        let mutex = locks.mutex("m").unwrap().with(options);
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

    fn written() -> String {
        let claim = Claim { id: SECRET.parse().unwrap(), ..Claim::plain("m", Duration::MAX / 2) };
        let key = vec![1, 2, 3];
        let grant = Grant { token: Token::new(77), valid_until: Moment::NEVER, key };
        Ticket::new("memory", "memory:", &claim, &grant).to_string()
    }

    const SECRET: &str = "0123456789abcdef0123456789abcdef";

    /// A ticket that does not parse is still a secret: the lock may be held.
    fn check(text: &str) {
        match text.parse::<Ticket>() {
            Ok(ticket) => {
                let again: Ticket = ticket.to_string().parse().unwrap();
                assert_eq!(again.to_string(), ticket.to_string());
            }
            Err(error) => {
                let error = error.to_string();
                let parts = SECRET.as_bytes().windows(8).map(|part| str::from_utf8(part).unwrap());
                for part in parts {
                    assert!(!error.contains(part), "{error}");
                }
                assert!(error.len() < 300, "{error}");
            }
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_ticket_or_rejected(text in "\\PC{0,80}") {
            check(&text);
        }

        #[test]
        fn damaged_tickets_are_rejected_without_showing_them(
            edits in prop::collection::vec((any::<prop::sample::Index>(), 0..4, "\\PC"), 1..4),
        ) {
            let mut text: Vec<char> = written().chars().collect();
            for (at, edit, character) in edits {
                let (at, character) = (at.index(text.len()), character.chars().next().unwrap());
                match edit {
                    0 => text.truncate(at + 1),
                    1 => drop(text.remove(at)),
                    2 => text.insert(at, character),
                    _ => text[at] = character,
                }
                if text.is_empty() {
                    break;
                }
            }
            check(&text.into_iter().collect::<String>());
        }

        #[test]
        fn secrets_in_the_wrong_place_are_not_shown(field in 0_usize..12) {
            let written = written();
            let fields: Vec<&str> = written.split(',').collect();
            let (key, _) = fields[field % fields.len()].rsplit_once(':').unwrap();
            check(&written.replace(fields[field % fields.len()], &format!("{key}:\"{SECRET}\"")));
        }
    }
}
