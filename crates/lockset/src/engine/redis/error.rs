//! Failed requests: whether the request was executed, and what to tell the user.

use redis::{RedisError, Value};

use super::ENGINE;
use super::connect::RedisAddress;
use crate::error::{Error, shorten};

/// Maximum length of a message, in characters: it may contain what the server sent.
const MAX_MESSAGE: usize = 500;

/// Why a request has no usable reply.
#[derive(Clone, Debug)]
pub(super) enum RedisRequestError {
    /// The request was not executed.
    Refused(Error),
    /// The request was not executed: another node of the cluster serves this key, or will soon.
    WrongNode(Error),
    /// The request may have been executed, or may still be.
    Unknown(Error),
}

/// The reply to a command.
pub(super) type RedisReply = Result<Value, RedisRequestError>;

impl RedisRequestError {
    pub(super) fn into_error(self) -> Error {
        match self {
            Self::Refused(error) | Self::WrongNode(error) | Self::Unknown(error) => error,
        }
    }

    /// Adds the address of the server to the message.
    pub(super) fn at(self, server: &RedisAddress) -> Self {
        match self {
            Self::Refused(error) => Self::Refused(with_server(server, error)),
            Self::WrongNode(error) => Self::WrongNode(with_server(server, error)),
            Self::Unknown(error) => Self::Unknown(with_server(server, error)),
        }
    }
}

/// Decides whether a request that ended in this error was executed, and what to tell the user.
pub(super) fn classify(error: RedisError) -> RedisRequestError {
    let error = first_server_error(error);
    let detail = error.detail().unwrap_or_default().to_owned();
    let code = match error.code() {
        None if error.kind() == redis::ErrorKind::AuthenticationFailed => "WRONGPASS",
        None if error.kind() == redis::ErrorKind::Extension => detail.as_str(),
        None => "",
        Some("ERR") => code_in_text(&detail).unwrap_or("ERR"),
        Some(code) => code,
    };
    let with_code = |what: &str, retryable| {
        unreachable_error(format!("{what} ({code})"), retryable, Some(&error))
    };
    match explain_code(code) {
        Some((what, retryable)) => match code {
            "MOVED" | "ASK" | "TRYAGAIN" | "CLUSTERDOWN" => {
                RedisRequestError::WrongNode(with_code(what, retryable))
            }
            _ => RedisRequestError::Refused(with_code(what, retryable)),
        },
        None if error.to_string().contains("invalid peer certificate") => {
            let text = error.to_string();
            let reason = text.split("invalid peer certificate: ").nth(1).unwrap_or("invalid");
            let what = format!(
                "the server's certificate is not trusted ({reason}); check host name and `ca`"
            );
            RedisRequestError::Refused(unreachable_error(what, false, Some(&error)))
        }
        // The TLS alert says why; usually our own certificate is missing or wrong.
        None if error.to_string().contains("received fatal alert") => {
            let what = format!("the server refuses the TLS connection: {error}");
            RedisRequestError::Refused(unreachable_error(what, false, None))
        }
        None if error.is_io_error() || error.is_connection_dropped() => {
            let what = format!("the connection failed: {error}");
            RedisRequestError::Unknown(unreachable_error(what, true, None))
        }
        None if error.kind() == redis::ErrorKind::Extension && error.code().is_none() => {
            RedisRequestError::Refused(unreachable_error(detail, false, None))
        }
        None if !code.is_empty() => {
            let what = format!("the server answered: {detail}");
            RedisRequestError::Refused(with_code(&what, false))
        }
        None => RedisRequestError::Unknown(unreachable_error(format!("{error}"), true, None)),
    }
}

/// The error that a script reported for one claim of a batch.
pub(super) fn error_from_text(text: &str) -> Error {
    match code_in_text(text).and_then(|code| explain_code(code).map(|known| (code, known))) {
        Some((code, (what, retryable))) => {
            unreachable_error(format!("{what} ({code})"), retryable, None)
        }
        None => unreachable_error(format!("the server answered: {text}"), false, None),
    }
}

/// What a Redis error code means for a lock, and whether a retry may help.
fn explain_code(code: &str) -> Option<(&'static str, bool)> {
    Some(match code {
        "NOAUTH" | "WRONGPASS" | "NOPERM" => {
            ("the server refuses this user; check user, password and ACL rules", false)
        }
        "LOADING" => ("the server is loading its data; it will answer soon", true),
        "READONLY" => ("the server is a replica; name the master or use Sentinel", true),
        "OOM" => ("the server is out of memory; raise maxmemory or free some", true),
        "MISCONF" => ("the server cannot save its data and refuses writes", true),
        "WRONGTYPE" => ("the key holds something that is not a lock", false),
        "MOVED" | "CROSSSLOT" => ("the server is part of a cluster; use redis+cluster://", false),
        "ASK" | "TRYAGAIN" => ("the slot of this lock is being moved to another node", true),
        "CLUSTERDOWN" => ("no node of the cluster serves this lock at the moment", true),
        "NOREPLICAS" | "MASTERDOWN" | "BUSY" => {
            ("the server cannot take requests at the moment", true)
        }
        // The scripts were flushed between SCRIPT LOAD and EVALSHA: the script did not run.
        "NOSCRIPT" => ("the server forgot a script twice in a row", true),
        _ => return None,
    })
}

/// The code of an error inside a script. Before Redis 7 it is in the middle of the text.
fn code_in_text(text: &str) -> Option<&str> {
    // A command that the user may not run inside a script has no code of its own.
    let forbidden = ["The user executing the script can't", "ACL failure in script"];
    if forbidden.iter().any(|why| text.contains(why)) {
        return Some("NOPERM");
    }
    text.split(|c: char| !c.is_ascii_uppercase()).find(|word| explain_code(word).is_some())
}

/// The commands of a pipeline fail together; the server's own errors are inside.
fn first_server_error(error: RedisError) -> RedisError {
    let each = error.clone().into_server_errors();
    each.and_then(|each| each.first().map(|(_, first)| first.clone().into())).unwrap_or(error)
}

/// The engine's error. Redis errors never contain a password.
pub(super) fn unreachable_error(
    what: String,
    retryable: bool,
    source: Option<&RedisError>,
) -> Error {
    let source = source.map(|error| {
        let text = shorten(&error.to_string(), MAX_MESSAGE);
        Box::<dyn std::error::Error + Send + Sync>::from(text).into()
    });
    let what = shorten(&what, MAX_MESSAGE);
    Error::Unreachable { engine: ENGINE, what, retryable, source }
}

/// Adds the address of the server to the message.
pub(super) fn with_server((host, port): &RedisAddress, error: Error) -> Error {
    match error {
        Error::Unreachable { engine, what, retryable, source } => {
            Error::Unreachable { engine, what: format!("{host}:{port}: {what}"), retryable, source }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_inside_scripts_are_explained_for_old_servers_too() {
        let old =
            "Error running script (call to f_0): @user_script:4: @user_script: 4: -OOM command";
        assert!(error_from_text(old).is_retryable());
        let new = "WRONGTYPE Operation against a key holding the wrong kind of value";
        assert!(error_from_text(new).to_string().contains("not a lock (WRONGTYPE)"));
        assert!(error_from_text("ERR something else").to_string().contains("something else"));
        for forbidden in [
            "ERR The user executing the script can't run this command or subcommand script: f1",
            "ERR ACL failure in script: User worker has no permissions to run the 'set' command",
        ] {
            assert!(error_from_text(forbidden).to_string().contains("ACL rules (NOPERM)"));
        }
    }
}
