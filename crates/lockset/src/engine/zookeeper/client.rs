//! A ZooKeeper client that knows nothing of locks.

pub(super) mod connection;
pub(super) mod session;
pub(super) mod session_lease;
pub(super) mod wire;
