//! The check at the resource: a write with a stale token is rejected.
//!
//! A lease can end while its holder is paused. The holder goes on and writes, although another
//! client has been granted the lock since. No lock can prevent that, but the resource can: it
//! remembers the greatest [token](crate::Token) it has seen for a lock, the *mark*, and rejects
//! a write with a lower one. This module is that check, for the usual kinds of resource:
//!
//! | the resource | use | feature |
//! |---|---|---|
//! | a SQLite database | `SqliteFence`, inside your transaction | `fence-sqlite` |
//! | a PostgreSQL database | `PostgresFence`, inside your transaction | `fence-postgres` |
//! | keys of a Redis server | `RedisFence`: `set`, `hset`, `del` | `fence-redis` |
//! | files of a folder | [`FileFence::write`] | always there |
//! | objects in S3 and the like | `ObjectFence::put` | `fence-object-store` |
//! | an HTTP service | `FenceLayer`, and `FenceClientLayer` for its clients | `fence-http` |
//! | keys of etcd, nodes of ZooKeeper | `EtcdOwnership`, `ZooKeeperOwnership` as a condition of your transaction | `etcd`, `zookeeper` |
//! | a value in this process | [`MemoryFence`] | always there |
//!
//! `docs/fencing.md` of the repository shows where the check goes in a system, by kind of resource.
//!
//! # The contract of a store
//! A [`FenceStore`] has one mark for each pair of a resource and a lock name.
//!
//! * A token equal to the mark is admitted again, a greater one is admitted and becomes the mark, a
//!   lower one is rejected ([`FenceError::Stale`]).
//! * A mark never falls, and survives a restart of the resource.
//! * A token of another lock than the one that protects the resource is rejected
//!   ([`FenceError::WrongLock`]).
//! * What cannot be decided is rejected: every error means that nothing may be written.
//!
//! The laws of `lockset-testkit` check it on every store, and each law fails on a broken store.
//!
//! # What it does not cover
//! The check must be atomic with the write: a write that is only *preceded* by a check can be
//! overtaken by a newer holder in between. The stores above are atomic where they write themselves
//! or take part in your transaction. [`FenceStore::admit`] alone is not: use it only if nothing can
//! pause between it and the write, or if a late write does no harm.
//!
//! All writes to the resource must be checked. Tokens of different lock names are not comparable,
//! so a resource must not be protected by two names at the same time.

mod error;
mod fencing_token;
mod file;
#[cfg(feature = "fence-http")]
mod http;
mod memory;
#[cfg(feature = "fence-object-store")]
mod object;
#[cfg(feature = "fence-postgres")]
mod postgres;
#[cfg(feature = "fence-redis")]
mod redis;
#[cfg(any(feature = "fence-sqlite", feature = "fence-postgres"))]
mod sql;
#[cfg(feature = "fence-sqlite")]
mod sqlite;

use std::fmt;

use async_trait::async_trait;

pub use self::error::FenceError;
pub use self::fencing_token::FencingToken;
pub use self::file::FileFence;
#[cfg(feature = "fence-http")]
#[cfg_attr(docsrs, doc(cfg(feature = "fence-http")))]
pub use self::http::{
    FenceClientLayer, FenceClientService, FenceLayer, FenceService, TOKEN_HEADER,
};
pub use self::memory::MemoryFence;
#[cfg(feature = "fence-object-store")]
#[cfg_attr(docsrs, doc(cfg(feature = "fence-object-store")))]
pub use self::object::ObjectFence;
#[cfg(feature = "fence-postgres")]
#[cfg_attr(docsrs, doc(cfg(feature = "fence-postgres")))]
pub use self::postgres::{PostgresFence, PostgresFenceStore};
#[cfg(feature = "fence-redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "fence-redis")))]
pub use self::redis::{RedisFence, RedisFenceStore};
#[cfg(feature = "fence-sqlite")]
#[cfg_attr(docsrs, doc(cfg(feature = "fence-sqlite")))]
pub use self::sqlite::{SqliteFence, SqliteFenceStore};
#[cfg(feature = "etcd")]
#[cfg_attr(docsrs, doc(cfg(feature = "etcd")))]
pub use crate::engine::etcd::EtcdOwnership;
#[cfg(feature = "zookeeper")]
#[cfg_attr(docsrs, doc(cfg(feature = "zookeeper")))]
pub use crate::engine::zookeeper::ZooKeeperOwnership;
use crate::name::Name;
use crate::token::Token;

/// A store of marks. The [module](self) has the contract.
#[async_trait]
pub trait FenceStore: fmt::Debug + Send + Sync {
    /// Admits or rejects a write to `resource`, which the lock `lock` protects.
    ///
    /// # Errors
    /// [`FenceError`]: nothing may be written.
    async fn admit(
        &self,
        resource: &Name,
        lock: &Name,
        token: &FencingToken,
    ) -> Result<(), FenceError>;

    /// All marks, in the order of resource and lock name.
    ///
    /// # Errors
    /// [`FenceError::Store`] if they cannot be read.
    async fn marks(&self) -> Result<Vec<FenceMark>, FenceError>;
}

/// The greatest token that a resource has seen for a lock.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[non_exhaustive]
pub struct FenceMark {
    /// The resource.
    pub resource: Name,
    /// The lock that protects it.
    pub lock: Name,
    /// The greatest token that was admitted.
    pub token: Token,
}

impl FenceMark {
    /// A mark, for stores outside this crate.
    pub fn new(resource: Name, lock: Name, token: Token) -> Self {
        Self { resource, lock, token }
    }
}

/// The rule of every store: whether a write is admitted if `seen` is the mark. The mark must be
/// raised to the token in the same atomic step.
///
/// # Errors
/// [`FenceError::WrongLock`] or [`FenceError::Stale`].
pub fn check(
    resource: &Name,
    lock: &Name,
    token: &FencingToken,
    seen: Option<Token>,
) -> Result<(), FenceError> {
    token.check_lock(resource, lock)?;
    match seen {
        Some(seen) if token.token() < seen => Err(FenceError::stale(resource, token, seen)),
        _ => Ok(()),
    }
}
