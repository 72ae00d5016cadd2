//! Failed requests: whether the request was executed, and what to tell the user.

use std::error::Error as _;
use std::sync::Arc;

use tokio_postgres::error::SqlState;

use super::ENGINE;
use crate::error::Error;

/// The code of an error that only this schema raises.
pub(super) const INVALID: &str = "LF002";

/// Why a request has no usable reply.
#[derive(Clone, Debug)]
pub(super) enum PostgresRequestError {
    /// The request was not executed.
    Refused(Error),
    /// The same, and the connection is of no use: it leads to a standby, or the schema is gone.
    WrongServer(Error),
    /// The request may have been executed, or may still be.
    Unknown(Error),
}

impl PostgresRequestError {
    pub(super) fn into_error(self) -> Error {
        match self {
            Self::Refused(error) | Self::WrongServer(error) | Self::Unknown(error) => error,
        }
    }
}

/// Decides whether a request that ended in this error was executed, and what to tell the user.
pub(super) fn classify(error: tokio_postgres::Error) -> PostgresRequestError {
    let Some(db) = error.as_db_error() else {
        let text = with_causes(&error);
        return match tls_fault(&text) {
            Some(what) => PostgresRequestError::Refused(unreachable_error(what, false, None)),
            // A URL without a user or password that the server asks for.
            None if text.contains("missing") && text.contains("password") => {
                let what = "the server asks for a password, and none is given".to_owned();
                PostgresRequestError::Refused(unreachable_error(what, false, None))
            }
            None => {
                let what = format!("the connection failed: {text}");
                PostgresRequestError::Unknown(unreachable_error(what, true, None))
            }
        };
    };
    let (code, message) = (db.code().code().to_owned(), db.message().to_owned());
    let (what, retryable) = match explain_code(db.code()) {
        Some((what, retryable)) => (format!("{what} ({message}, SQLSTATE {code})"), retryable),
        None => (format!("the server replied: {message} (SQLSTATE {code})"), false),
    };
    let failed = unreachable_error(what, retryable, Some(error));
    match code.as_str() {
        // The session was ended. A commit that waited for a standby may have happened.
        "57P01" | "57P02" | "57P05" => PostgresRequestError::Unknown(failed),
        "25006" | "3F000" | "42883" | "42P01" => PostgresRequestError::WrongServer(failed),
        _ => PostgresRequestError::Refused(failed),
    }
}

/// What an error code means for a lock, and whether a retry may help.
fn explain_code(code: &SqlState) -> Option<(&'static str, bool)> {
    Some(match code.code() {
        "28000" | "28P01" => ("the server refuses this user; check user and password", false),
        "42501" => {
            ("the role lacks rights on the schema of the locks; see docs/postgres.md", false)
        }
        "3D000" => ("the database does not exist", false),
        "25006" => ("the server is a standby; name the primary too", true),
        "3F000" | "42883" | "42P01" => ("the schema of the locks is gone", true),
        "53100" => ("the disk of the server is full", true),
        "53200" => ("the server is out of memory", true),
        "53300" => ("the server has too many connections", true),
        "57P03" => ("the server is starting, stopping or recovering", true),
        "57P01" | "57P02" | "57P05" => ("the server ended the session", true),
        "57014" => ("the server cancelled the statement", true),
        "40001" | "40P01" | "55P03" => ("the request met another transaction", true),
        "54000" => ("a limit of the server is reached", true),
        INVALID => ("the schema refuses it", false),
        // A function or type was replaced while it was in use.
        "XX000" => ("the schema is being changed", true),
        code if code.starts_with("08") => ("the connection failed", true),
        _ => return None,
    })
}

/// What is wrong if the text is that of a TLS failure.
fn tls_fault(text: &str) -> Option<String> {
    if let Some((_, reason)) = text.split_once("invalid peer certificate: ") {
        return Some(format!(
            "the server's certificate is not trusted ({reason}); check host name and `ca`, or \
             choose another `sslmode`"
        ));
    }
    if text.contains("server does not support TLS") {
        return Some(
            "the server does not offer TLS; if the network is trusted, say `sslmode=disable`"
                .to_owned(),
        );
    }
    let refuses = text.contains("received fatal alert");
    refuses.then(|| format!("the server refuses the TLS connection: {text}"))
}

/// The text of `tokio_postgres::Error` does not contain its causes.
fn with_causes(error: &tokio_postgres::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// The engine's error. The server's errors never contain a password.
pub(super) fn unreachable_error(
    what: String,
    retryable: bool,
    source: Option<tokio_postgres::Error>,
) -> Error {
    let source = source.map(|error| Arc::new(error) as _);
    Error::Unreachable { engine: ENGINE, what, retryable, source }
}

/// The reply is not what this version expects.
pub(super) fn unexpected_reply(what: &str) -> Error {
    unreachable_error(format!("the server answered something unexpected: {what}"), false, None)
}
