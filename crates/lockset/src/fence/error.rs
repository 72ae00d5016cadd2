//! Why a write was not admitted.

use crate::error::Error;
use crate::name::Name;
use crate::token::Token;

use super::FencingToken;

/// Why a write was not admitted. Whatever the variant: nothing may be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FenceError {
    /// The resource has seen a greater token: another client has held the lock since. Give up the
    /// work and take the lock again.
    #[error(
        "the write to `{resource}` was rejected: token {token} of the lock `{lock}` is stale, \
         {seen} was seen"
    )]
    Stale {
        /// The resource.
        resource: Name,
        /// The lock.
        lock: Name,
        /// The token of the write.
        token: Token,
        /// The greatest token that the resource has seen.
        seen: Token,
    },

    /// The token belongs to another lock than the one that protects the resource: a mistake in the
    /// program.
    #[error(
        "the write to `{resource}` was rejected: it is protected by the lock `{expected}`, and the \
         token is one of `{given}`"
    )]
    WrongLock {
        /// The resource.
        resource: Name,
        /// The lock that protects it.
        expected: Name,
        /// The lock of the token.
        given: Name,
    },

    /// The token, a name or an option is not valid.
    #[error(transparent)]
    Invalid(#[from] Error),

    /// The store failed or cannot be used. A write that it was to make itself may have been made;
    /// repeat it with the same token, which is admitted again, if that does no harm.
    #[error("the {store} fence failed: {what}")]
    Store {
        /// The kind of store.
        store: &'static str,
        /// What was found, and where known what to do about it.
        what: String,
        /// The store's own error; `what` contains its message.
        cause: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
}

impl FenceError {
    /// That the token is lower than `seen`.
    pub fn stale(resource: &Name, token: &FencingToken, seen: Token) -> Self {
        FenceError::Stale {
            resource: resource.clone(),
            lock: token.lock().clone(),
            token: token.token(),
            seen,
        }
    }

    /// That the store named `store` failed for this reason.
    pub fn store(store: &'static str, what: impl Into<String>) -> Self {
        FenceError::Store { store, what: what.into(), cause: None }
    }

    /// That the store named `store` failed with `cause` while it did `what`.
    pub fn store_error(
        store: &'static str,
        what: &str,
        cause: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        let what = format!("{what}: {cause}");
        FenceError::Store { store, what, cause: Some(Box::new(cause)) }
    }

    /// Whether the resource has seen a greater token. Everything else is a mistake or a failure.
    pub fn is_stale(&self) -> bool {
        matches!(self, FenceError::Stale { .. })
    }
}
