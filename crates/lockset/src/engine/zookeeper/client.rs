//! A ZooKeeper client that knows nothing of locks.
//!
//! It says of every request whether it was answered, never sent, or sent without an answer. It
//! never queues a request while there is no connection, and never sends one twice. The parts, in
//! the order in which a request meets them:
//!
//! * `session` is the handle: requests, watches, the session's status and events;
//! * `request` is a reply under way, and why there may be none;
//! * `shared` holds what the handle and the connection share: unsent and unanswered requests;
//! * `connection` connects to one of the `servers`, writes requests and dispatches replies;
//! * `session_lease` computes until when the session is certain to be alive;
//! * `wire` is ZooKeeper's wire format.

pub(super) use self::request::{
    PendingReply, TRANSIENT_PAUSE, ZkRequestError, ZkResult, unreachable_error,
};
pub(super) use self::servers::ServerList;
pub(super) use self::session::{Session, SessionEvent, event_sink};
pub(super) use self::wire::{
    Acl, ConnectRequest, CreateMode, MultiOp, NodeEvent, NodeStat, WatchEventKind, ZkErrorCode,
};

mod connection;
#[cfg(any(test, fuzzing))]
pub(crate) mod malformed;
mod request;
mod servers;
mod session;
mod session_lease;
mod shared;
mod wire;

/// The engine's name in errors.
pub(super) const ENGINE: &str = "zookeeper";
