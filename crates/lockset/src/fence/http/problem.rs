//! Why a request was rejected, and the response that says so.

use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Response, StatusCode};
use serde_json::json;

use super::TOKEN_HEADER;
use crate::fence::FenceError;
use crate::name::Name;

#[derive(Debug)]
pub(super) enum Refusal {
    NoToken,
    NoLock,
    Malformed(String),
    TooManyWaiting,
    Fence(FenceError),
}

impl From<FenceError> for Refusal {
    fn from(error: FenceError) -> Self {
        Refusal::Fence(error)
    }
}

impl Refusal {
    pub(super) fn response<B: From<String>>(&self, resource: &Name) -> Response<B> {
        let (status, kind, title) = self.kind();
        let mut problem = json!({
            "type": format!("urn:lockset:{kind}"),
            "title": title,
            "status": status.as_u16(),
            "detail": self.detail(resource),
            "resource": resource,
        });
        match self {
            Refusal::Fence(FenceError::Stale { lock, token, seen, .. }) => {
                problem["lock"] = json!(lock);
                problem["token"] = json!(token.to_string());
                problem["seen"] = json!(seen.to_string());
            }
            Refusal::Fence(FenceError::WrongLock { expected, given, .. }) => {
                problem["expected"] = json!(expected);
                problem["given"] = json!(given);
            }
            _ => {}
        }
        let mut response = Response::new(B::from(problem.to_string()));
        *response.status_mut() = status;
        let problem_json = HeaderValue::from_static("application/problem+json");
        response.headers_mut().insert(CONTENT_TYPE, problem_json);
        response
    }

    fn kind(&self) -> (StatusCode, &'static str, &'static str) {
        match self {
            Refusal::NoToken => {
                (StatusCode::PRECONDITION_REQUIRED, "token-required", "A fencing token is required")
            }
            Refusal::NoLock => {
                (StatusCode::BAD_REQUEST, "no-lock", "No lock protects what was requested")
            }
            Refusal::Malformed(_) => {
                (StatusCode::BAD_REQUEST, "malformed-token", "The fencing token is malformed")
            }
            Refusal::TooManyWaiting => {
                (StatusCode::SERVICE_UNAVAILABLE, "too-many-waiting", "Too many requests wait")
            }
            Refusal::Fence(FenceError::Stale { .. }) => {
                (StatusCode::CONFLICT, "stale-token", "The fencing token is stale")
            }
            Refusal::Fence(FenceError::WrongLock { .. }) => {
                (StatusCode::FORBIDDEN, "wrong-lock", "The fencing token belongs to another lock")
            }
            Refusal::Fence(FenceError::Invalid(_) | FenceError::Store { .. }) => (
                StatusCode::SERVICE_UNAVAILABLE,
                "store-failed",
                "Fencing tokens cannot be checked",
            ),
        }
    }

    fn detail(&self, resource: &Name) -> String {
        match self {
            Refusal::NoToken => format!(
                "a write to `{resource}` needs the header `{TOKEN_HEADER}: name=token`: take the \
                 lock that protects it and send its token"
            ),
            Refusal::NoLock => {
                format!("no lock of `{resource}` protects this path, so its writes are rejected")
            }
            Refusal::Malformed(why) => {
                format!("the header `{TOKEN_HEADER}` has the form `name=token`: {why}")
            }
            Refusal::TooManyWaiting => format!(
                "too many requests to `{resource}` wait for requests with lower tokens; repeat \
                 this one later"
            ),
            // What the store says may name hosts and paths of the server: it is for its log.
            Refusal::Fence(error @ (FenceError::Invalid(_) | FenceError::Store { .. })) => {
                tracing::error!(%resource, %error, "a fencing token cannot be checked");
                format!("the marks of `{resource}` cannot be read or raised; nothing was written")
            }
            Refusal::Fence(error) => error.to_string(),
        }
    }
}
