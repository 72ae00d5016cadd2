//! The URL of the engine, and its password, which is used but never shown.

use std::time::Duration;

use lockset::{Builder, Lockset, Ticket, Url};

use crate::args::EngineArgs;
use crate::output::Failure;

/// The variables that the guardian does not inherit. The command is given a URL without passwords.
pub(crate) const SECRET_VARIABLES: [&str; 3] =
    ["LOCKSET_URL", "LOCKSET_PASSWORD", "LOCKSET_PASSWORD_FILE"];

/// A complete URL, including the password. Therefore it has no `Debug` and no `Display`.
#[derive(Clone)]
pub(crate) struct Home {
    url: Url,
    /// No URL was given: it is the one that a ticket names.
    from_ticket: bool,
}

impl Home {
    /// The URL that was given, else the one that the ticket names, else the default.
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

    /// The URL in the command's environment: without passwords, so that a nested call that needs
    /// one fails, and with the path of the file that was used, wherever the nested call runs.
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

    /// Removes every password of the URL from a text that will be shown.
    pub(crate) fn redact(&self, text: &str) -> String {
        self.url.redact(text)
    }
}

/// The URL of a ticket's engine.
fn url_of(ticket: &Ticket) -> Result<&str, Failure> {
    let home = ticket.home();
    // It does not name sentinels, and another process has other memory.
    match home.contains("://") || home.starts_with("local:") {
        true => Ok(home),
        false => Err(Failure::own(format!(
            "the ticket's lock `{}` is at {home}, which is not a URL to connect to",
            ticket.name()
        ))
        .hint("set LOCKSET_URL to the URL with which it was acquired")),
    }
}
