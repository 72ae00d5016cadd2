//! Why a request failed, and whether it may have been executed all the same.

use tonic::{Code, Status};

use super::ENGINE;
use crate::error::Error;

/// The result of one request, or of one request and its repetitions.
pub(super) type EtcdResult<T> = Result<T, EtcdRequestError>;

/// A request that has no usable reply.
#[derive(Clone, Debug)]
pub(super) struct EtcdRequestError {
    pub(super) kind: EtcdErrorKind,
    /// Whether the request may have been executed, or may still be.
    pub(super) outcome_unknown: bool,
    error: Error,
}

/// The kinds of failure that the engine treats differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EtcdErrorKind {
    /// The server does not know the lease (any more).
    LeaseNotFound,
    /// The token of the login has expired.
    LoginExpired,
    /// Another server may reply, or the same one later.
    Unavailable,
    /// Every server would reject the request.
    Rejected,
}

impl EtcdRequestError {
    /// The error of a request that this server answered with an error status.
    pub(super) fn from_status(host: &str, status: &Status) -> Self {
        let said = status.message();
        if said.contains("requested lease not found") {
            return Self::lease_not_found();
        }
        if status.code() == Code::Unauthenticated || said.contains("auth store is old") {
            let what = format!("{host} no longer knows this login ({said})");
            return Self { kind: EtcdErrorKind::LoginExpired, ..Self::rejected(what, true) };
        }
        if let Some(hint) = hint_for(status) {
            return Self::rejected(format!("{host} says: {said}; {hint}"), false);
        }
        if is_connect_error(status) {
            let what = format!("{host} cannot be reached: {}", root_cause(status));
            // A repetition would meet the same certificate.
            return match what.contains("certificate") {
                true => Self::rejected(what, false),
                false => Self::not_sent(what),
            };
        }
        match status.code() {
            Code::InvalidArgument
            | Code::FailedPrecondition
            | Code::OutOfRange
            | Code::Unimplemented
            | Code::NotFound => Self::rejected(format!("{host} says: {said}"), false),
            // Without that text the connection may have ended, with requests under way.
            Code::ResourceExhausted if said.contains("too many requests") => {
                Self::not_sent(format!("{host} says: {said}"))
            }
            _ => Self::unavailable(format!("{host} failed: {said}")),
        }
    }

    /// Every server would reject the request, so it was not executed.
    pub(super) fn rejected(what: String, retryable: bool) -> Self {
        let error = unreachable_error(what, retryable);
        Self { kind: EtcdErrorKind::Rejected, outcome_unknown: false, error }
    }

    /// The client was closed while the request may have been under way.
    pub(super) fn client_closed() -> Self {
        let what = "this client was closed".to_owned();
        Self { outcome_unknown: true, ..Self::rejected(what, false) }
    }

    /// There was no reply; the request may have been executed.
    pub(super) fn unavailable(what: String) -> Self {
        let error = unreachable_error(what, true);
        Self { kind: EtcdErrorKind::Unavailable, outcome_unknown: true, error }
    }

    /// The request was not sent, or not accepted, and may be sent to another server.
    pub(super) fn not_sent(what: String) -> Self {
        Self { outcome_unknown: false, ..Self::unavailable(what) }
    }

    pub(super) fn lease_not_found() -> Self {
        let what = "the lease is gone".to_owned();
        Self { kind: EtcdErrorKind::LeaseNotFound, ..Self::rejected(what, true) }
    }

    pub(super) fn was_not_sent(&self) -> bool {
        self.kind == EtcdErrorKind::Unavailable && !self.outcome_unknown
    }

    /// The same error, for a request that was not even sent because of it.
    pub(super) fn as_not_sent(&self) -> Self {
        Self { outcome_unknown: false, ..self.clone() }
    }
}

impl From<EtcdRequestError> for Error {
    fn from(error: EtcdRequestError) -> Self {
        error.error
    }
}

pub(super) fn unreachable_error(what: String, retryable: bool) -> Error {
    Error::Unreachable { engine: ENGINE, what, retryable, source: None }
}

/// How to fix the cause of a rejection, where that is known.
fn hint_for(status: &Status) -> Option<&'static str> {
    let said = status.message();
    if said.contains("database space exceeded") {
        return Some("compact and defragment it, then `etcdctl alarm disarm`");
    }
    if said.contains("user name is empty") {
        return Some("it requires a login: etcd://user:password@host");
    }
    if said.contains("authentication failed") {
        return Some("check user and password");
    }
    match status.code() {
        Code::PermissionDenied => Some("the user needs to read and write below the prefix"),
        _ => None,
    }
}

fn is_connect_error(status: &Status) -> bool {
    sources(status).any(|error| error.is::<tonic::ConnectError>())
}

/// The last source: the error of the operating system.
fn root_cause(status: &Status) -> String {
    sources(status).last().map_or_else(|| status.message().to_owned(), ToString::to_string)
}

fn sources(status: &Status) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
    std::iter::successors(std::error::Error::source(status), |error| error.source())
}
