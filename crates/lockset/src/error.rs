//! One public error, its variants ordered by what the caller does next.

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::name::Name;
use crate::state::Holder;

/// The result of every fallible operation of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// So many characters of an invalid value are shown.
const LONGEST_SHOWN: usize = 80;

/// Shared, because one failed request may have several callers.
type Source = Arc<dyn std::error::Error + Send + Sync>;

/// What went wrong. That a lock is busy is not an error: `try_lock` returns `Ok(None)`.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The lock was not granted in the time given. Try again later, or tell the holder.
    #[error("`{name}` was not granted within {waited:.1?}{}", held_by(holder))]
    Timeout {
        /// The lock.
        name: Name,
        /// How long the caller was ready to wait.
        waited: Duration,
        /// Who held it when the time was over, if that could still be found out.
        holder: Option<Box<Holder>>,
    },

    /// The lock was held and can no longer be trusted. Stop the protected work.
    #[error("the lock `{name}` was lost: {reason}")]
    Lost {
        /// The lock.
        name: Name,
        /// Why.
        reason: LossReason,
    },

    /// There was nothing to renew or release: the claim does not hold the lock (any more).
    #[error("`{name}` is not held by this claim (any more)")]
    NotHeld {
        /// The lock.
        name: Name,
    },

    /// The name is in use in another way: as a mutex and as a semaphore, say, or with another
    /// limit. Agree on one use per name.
    #[error("`{name}` cannot be used this way: {why}")]
    Conflict {
        /// The lock.
        name: Name,
        /// What it is used as, and what was asked for.
        why: String,
    },

    /// The engine cannot do this, now or ever. Choose another engine or another primitive.
    #[error("the {engine} engine does not support {what}")]
    Unsupported {
        /// The engine.
        engine: &'static str,
        /// What was asked for.
        what: String,
    },

    /// The lock's home could not be reached or could not do its work. Whether the request took
    /// effect is unknown unless the source says so; lockset itself cleans up after it.
    #[error("the {engine} engine failed: {what}")]
    Unreachable {
        /// The engine.
        engine: &'static str,
        /// What was found, and where known what to do about it.
        what: String,
        /// Whether the same call may succeed later without any other change.
        retryable: bool,
        /// The engine's own error.
        #[source]
        source: Option<Source>,
    },

    /// Something the caller gave is not valid: a name, a duration, a URL, a ticket.
    #[error("the {what} {value:?} is not valid: {why}")]
    Invalid {
        /// What kind of thing.
        what: &'static str,
        /// The thing, shortened; never a secret.
        value: String,
        /// The reason, and what would be valid.
        why: String,
    },

    /// The client was closed by [`Lockset::close`](crate::Lockset::close).
    #[error("this client was closed")]
    Closed,
}

impl Error {
    pub(crate) fn invalid(what: &'static str, value: &str, why: impl Into<String>) -> Self {
        Error::Invalid { what, value: shorten(value, LONGEST_SHOWN), why: why.into() }
    }

    pub(crate) fn lost(name: &Name, reason: LossReason) -> Self {
        Error::Lost { name: name.clone(), reason }
    }

    /// Whether the same call may succeed later without any other change.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Error::Timeout { .. } | Error::Unreachable { retryable: true, .. })
    }
}

/// Anything that converts without failing can be given where a conversion may fail.
impl From<Infallible> for Error {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

/// The first characters of a text that came from outside, and whether there are more.
pub(crate) fn shorten(text: &str, longest: usize) -> String {
    let mut shown: String = text.chars().take(longest).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    shown
}

fn held_by(holder: &Option<Box<Holder>>) -> String {
    match holder {
        None => String::new(),
        Some(holder) => {
            let by = if holder.note.by.is_empty() { "another client" } else { &holder.note.by };
            match &*holder.note.text {
                "" => format!("; it is held by {by}"),
                text => format!("; it is held by {by} ({text})"),
            }
        }
    }
}

/// Why a lock that was held can no longer be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LossReason {
    /// The lease was not renewed in time: the engine did not reply, this process slept, or the
    /// ticket was not attached in time.
    Expired,
    /// The lease was not to be renewed, or `max_hold` is over.
    MaxHold,
    /// The engine no longer knows the claim: it lost state, or its clock jumped.
    Forgotten,
    /// An operator freed the lock at once.
    Broken,
    /// An operator asked for the lock back: renewals were refused and the lease ran out.
    Revoked,
    /// The session with the engine ended, and the lock with it.
    SessionEnded,
    /// The process was forked; the lock belongs to the parent.
    Forked,
    /// The ticket was attached before, by this process or another.
    TicketUsed,
    /// The client was closed, which released the lock.
    ClientClosed,
}

impl LossReason {
    /// A word for machines: metrics labels, JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            LossReason::Expired => "expired",
            LossReason::MaxHold => "max_hold",
            LossReason::Forgotten => "forgotten",
            LossReason::Broken => "broken",
            LossReason::Revoked => "revoked",
            LossReason::SessionEnded => "session_ended",
            LossReason::Forked => "forked",
            LossReason::TicketUsed => "ticket_used",
            LossReason::ClientClosed => "client_closed",
        }
    }
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LossReason::Expired => "its lease was not renewed in time and has ended",
            LossReason::MaxHold => "the longest time it may be held is over",
            LossReason::Forgotten => "the engine no longer knows it",
            LossReason::Broken => "an operator broke it",
            LossReason::Revoked => "an operator asked for it back and the lease ran out",
            LossReason::SessionEnded => "the session with the engine ended",
            LossReason::Forked => "this process is a fork of the one that holds it",
            LossReason::TicketUsed => "its ticket was attached before",
            LossReason::ClientClosed => "its client was closed",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_value_is_shortened_by_characters_and_says_so() {
        let shown = |value: &str| match Error::invalid("name", value, "it is too long") {
            Error::Invalid { value, .. } => value,
            _ => String::new(),
        };
        assert_eq!(shown(&"é".repeat(LONGEST_SHOWN)), "é".repeat(LONGEST_SHOWN));
        assert_eq!(shown(&"x".repeat(LONGEST_SHOWN)), "x".repeat(LONGEST_SHOWN));
        for letter in ["é", "x"] {
            let long = shown(&letter.repeat(LONGEST_SHOWN + 1));
            assert_eq!(long, format!("{}…", letter.repeat(LONGEST_SHOWN)));
        }
    }
}
