//! Where the locks live: the URL, and a password that is used but never shown.

use std::time::Duration;

use lockset::{Builder, Lockset, Ticket, Url};

use crate::args::EngineArgs;
use crate::output::Failure;

/// The variables that the guardian does not inherit. The command is given a URL without passwords.
pub(crate) const SECRET_VARIABLES: [&str; 3] =
    ["LOCKSET_URL", "LOCKSET_PASSWORD", "LOCKSET_PASSWORD_FILE"];

/// A URL that is complete, password included.
#[derive(Clone)]
pub(crate) struct Home {
    url: Url,
    /// Nobody gave a URL: it is the one that a ticket names.
    from_ticket: bool,
}

impl Home {
    /// The URL that was given, else the one that the ticket names, else the usual one.
    pub(crate) fn from_args(args: &EngineArgs, ticket: Option<&Ticket>) -> Result<Self, Failure> {
        let given = args.url.as_deref().filter(|url| !url.is_empty());
        let (url, from_ticket) = match (given, ticket) {
            (Some(url), _) => (url, false),
            (None, Some(ticket)) => (url_of(ticket)?, true),
            (None, None) => ("local:", false),
        };
        let url = url.parse::<Url>()?.with_stored_password(args.password_file.as_deref());
        let url = url.map_err(|error| {
            let hint = "give a password to an engine that takes one, and in one place: in the \
                        URL, in a file, or in LOCKSET_PASSWORD";
            Failure::from(error).hint(hint)
        })?;
        Ok(Self { url, from_ticket })
    }

    /// The ttl of locks for which none is given.
    pub(crate) fn ttl(&self) -> Result<Option<Duration>, Failure> {
        Ok(self.url.ttl()?)
    }

    /// Connects, for verbs that do not wait.
    pub(crate) async fn connect(&self) -> Result<Lockset, Failure> {
        self.builder().connect().await.map_err(|error| match self.from_ticket {
            true => Failure::from(error).hint(format!(
                "LOCKSET_URL is not set, so the ticket's own home was tried: {}",
                self.url
            )),
            false => error.into(),
        })
    }

    pub(crate) fn builder(&self) -> Builder {
        Builder::from(self.url.clone())
    }

    /// The URL as the command finds it: without passwords, so that a nested call that needs one
    /// fails, and naming the file that was used, wherever the nested call looks for it.
    pub(crate) fn url_for_command(&self, locks: &Lockset) -> String {
        let url = self.url.to_string();
        // A path that is not UTF-8, or that a URL cannot name, is not replaced by another one.
        match locks.home() {
            home if url.starts_with("local:") && !home.contains(['\u{fffd}', '?']) => {
                let options = url.split_once('?').map(|(_, options)| format!("?{options}"));
                format!("{home}{}", options.unwrap_or_default())
            }
            _ => url,
        }
    }

    /// Takes every password of the URL out of a text that is going to be shown.
    pub(crate) fn redact(&self, text: &str) -> String {
        self.url.redact(text)
    }
}

/// Where a ticket's lock can be connected to.
fn url_of(ticket: &Ticket) -> Result<&str, Failure> {
    let home = ticket.home();
    // Sentinels are not named by it, and another process has another memory.
    match home.contains("://") || home.starts_with("local:") {
        true => Ok(home),
        false => Err(Failure::own(format!(
            "the ticket's lock `{}` lives at {home}, which does not tell how to connect to it",
            ticket.name()
        ))
        .hint("set LOCKSET_URL to the URL by which it was taken")),
    }
}
