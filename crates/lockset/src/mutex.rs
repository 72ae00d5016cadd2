//! One holder at a time.

use std::time::Duration;

use crate::acquire::{LockRequest, acquire, acquire_patiently, acquire_within};
use crate::engine::Wait;
use crate::error::Result;
use crate::guard::Guard;
use crate::name::Name;
use crate::options::LockOptions;

/// One holder at a time. Made by [`Lockset::mutex`](crate::Lockset::mutex).
///
/// Waiters of one process are served in the order they came, and processes take turns.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockset::Result<()> {
/// use std::time::Duration;
/// let locks = lockset::Lockset::connect("memory:").await?;
/// let mutex = locks.mutex("stock/shoes")?;
///
/// let guard = mutex.lock().await?;
/// assert!(mutex.try_lock().await?.is_none());
/// assert!(mutex.lock_within(Duration::from_millis(10)).await.is_err());
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Mutex(pub(crate) LockRequest);

impl Mutex {
    pub(crate) fn new(request: LockRequest) -> Self {
        Self(request)
    }

    /// The same lock with these options. Locking fails if the engine cannot keep them.
    pub fn with(mut self, options: LockOptions) -> Self {
        self.0.set_options(options);
        self
    }

    /// The name of the lock.
    pub fn name(&self) -> &Name {
        &self.0.name
    }

    /// Waits until the lock is granted, as long as it takes.
    ///
    /// # Errors
    /// [`Error::Conflict`](crate::Error::Conflict) if the name is in use as something else;
    /// [`Error::Unreachable`](crate::Error::Unreachable) if the engine cannot be reached;
    /// [`Error::Closed`](crate::Error::Closed).
    ///
    /// # Cancel safety
    /// Cancel safe: dropped, it leaves nothing behind, neither a lock nor a place in the queue.
    pub async fn lock(&self) -> Result<Guard> {
        acquire_patiently(&self.0).await
    }

    /// Takes the lock if it is free; `None` if it is not.
    ///
    /// # Errors
    /// As [`lock`](Mutex::lock).
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn try_lock(&self) -> Result<Option<Guard>> {
        acquire(&self.0, Wait::No).await
    }

    /// Waits at most this long.
    ///
    /// # Errors
    /// [`Error::Timeout`](crate::Error::Timeout), which says who holds the lock; otherwise as
    /// [`lock`](Mutex::lock).
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn lock_within(&self, patience: Duration) -> Result<Guard> {
        acquire_within(&self.0, patience).await
    }
}
