//! A reply under way, and why a request may have none.

use std::time::Duration;

use tokio::sync::oneshot;

use super::ENGINE;
use super::wire::{self, JuteReader, MalformedReply, NodeStat, ZkErrorCode};
use crate::error::Error;

/// Why a request has no successful reply.
#[derive(Clone, Debug)]
pub(crate) enum ZkRequestError {
    /// The server refused it; nothing was changed.
    Refused(ZkErrorCode),
    /// It was never sent.
    NotSent,
    /// It was sent, and the connection ended before the reply. The server may have carried it out,
    /// or may still do so.
    Unknown,
    /// The session has ended for good.
    SessionEnded,
}

pub(crate) type ZkResult<T> = std::result::Result<T, ZkRequestError>;

/// The pause before a request is repeated that failed with a transient error: the server is about
/// to close the connection.
pub(crate) const TRANSIENT_PAUSE: Duration = Duration::from_millis(5);

impl ZkRequestError {
    /// Whether the server refused the request with this code.
    pub(crate) fn is(&self, code: ZkErrorCode) -> bool {
        matches!(self, ZkRequestError::Refused(refused) if *refused == code)
    }

    /// Whether the next connection, perhaps with another session, settles it.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            ZkRequestError::Refused(code) => is_transient(*code),
            ZkRequestError::NotSent | ZkRequestError::Unknown => true,
            ZkRequestError::SessionEnded => false,
        }
    }
}

fn is_transient(code: ZkErrorCode) -> bool {
    code == ZkErrorCode::SESSION_EXPIRED || code == ZkErrorCode::SESSION_MOVED
}

impl From<MalformedReply> for ZkRequestError {
    fn from(_: MalformedReply) -> ZkRequestError {
        ZkRequestError::Unknown
    }
}

impl From<ZkRequestError> for Error {
    fn from(error: ZkRequestError) -> Error {
        let (what, retryable) = match error {
            ZkRequestError::Refused(code) => {
                (format!("the server refused the request: {code}"), is_transient(code))
            }
            ZkRequestError::NotSent => ("there is no connection at the moment".to_owned(), true),
            ZkRequestError::Unknown => ("the connection ended before the reply".to_owned(), true),
            ZkRequestError::SessionEnded => ("the session has ended".to_owned(), true),
        };
        unreachable_error(what, retryable)
    }
}

pub(crate) fn unreachable_error(what: String, retryable: bool) -> Error {
    Error::Unreachable { engine: ENGINE, what, retryable, source: None }
}

/// The body of a successful reply, and the last transaction that the server knew.
#[derive(Debug)]
pub(super) struct ZkReply {
    pub(super) zxid: i64,
    pub(super) body: Vec<u8>,
}

/// A request that was sent, or could not be. Dropping it does not cancel the request.
#[derive(Debug)]
pub(crate) struct PendingReply(pub(super) ZkResult<oneshot::Receiver<ZkResult<ZkReply>>>);

impl PendingReply {
    pub(super) async fn reply(self) -> ZkResult<ZkReply> {
        self.0?.await.unwrap_or(Err(ZkRequestError::Unknown))
    }

    pub(crate) async fn done(self) -> ZkResult<()> {
        self.reply().await.map(|_| ())
    }

    /// Of a create: the node's path and metadata.
    pub(crate) async fn created(self) -> ZkResult<(String, NodeStat)> {
        let reply = self.reply().await?;
        let mut reader = JuteReader(&reply.body);
        Ok((reader.string()?.to_owned(), reader.stat()?))
    }

    pub(crate) async fn data(self) -> ZkResult<(Vec<u8>, NodeStat)> {
        let reply = self.reply().await?;
        let mut reader = JuteReader(&reply.body);
        Ok((reader.buffer()?.to_vec(), reader.stat()?))
    }

    pub(crate) async fn children(self) -> ZkResult<Vec<String>> {
        Ok(JuteReader(&self.reply().await?.body).strings()?)
    }

    /// The children; none if the node does not exist.
    pub(crate) async fn children_if_any(self) -> ZkResult<Vec<String>> {
        match self.children().await {
            Err(error) if error.is(ZkErrorCode::NO_NODE) => Ok(Vec::new()),
            children => children,
        }
    }

    /// Of a delete: succeeds also if the node did not exist.
    pub(crate) async fn deleted(self) -> ZkResult<()> {
        match self.done().await {
            Err(error) if error.is(ZkErrorCode::NO_NODE) => Ok(()),
            deleted => deleted,
        }
    }

    /// Of a multi: the number of its transaction.
    pub(crate) async fn committed(self) -> ZkResult<i64> {
        let reply = self.reply().await?;
        match wire::multi_error(&reply.body)? {
            None => Ok(reply.zxid),
            Some((_, code)) => Err(ZkRequestError::Refused(code)),
        }
    }
}
