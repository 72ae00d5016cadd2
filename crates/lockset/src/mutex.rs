//! One holder at a time.

use std::time::Duration;

use crate::acquire::{LockRequest, acquire, acquire_patiently, acquire_within};
use crate::engine::Wait;
use crate::error::Result;
use crate::guard::Guard;
use crate::name::Name;
use crate::options::LockOptions;
use crate::run::{RunError, Within, run};

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
    pub async fn lock_within(&self, limit: Duration) -> Result<Guard> {
        acquire_within(&self.0, limit).await
    }

    /// Locks, runs `work` and releases. Waits for the lock as long as it takes; with a limit:
    /// `mutex.within(limit).run(..)`.
    ///
    /// The work gets the guard, for its token and state. If the lock is lost, the work is dropped
    /// where it awaits; see [`Guard::run`]. If the work is done and the engine does not reply to
    /// the release, that is not an error: the release goes on in the background.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> lockset::Result<()> {
    /// # async fn ship(order: &str, token: lockset::Token) -> std::io::Result<u32> { Ok(1) }
    /// use lockset::RunError;
    /// # let locks = lockset::Lockset::connect("memory:").await?;
    /// let order = "42";
    /// let mutex = locks.mutex(["orders", order])?;
    /// let shipped = mutex.run(async |held| ship(order, held.token()).await).await;
    /// match shipped {
    ///     Ok(parcels) => println!("{parcels} parcels"),
    ///     Err(RunError::NotGranted(why)) => println!("not done: {why}"),
    ///     Err(RunError::Interrupted(why)) => println!("perhaps done in part: {why}"),
    ///     Err(RunError::DoneButLost(why)) => println!("done, but check the order: {why}"),
    ///     Err(error) => println!("the work failed: {error}"),
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// See [`RunError`].
    ///
    /// # Cancel safety
    /// If cancelled, the work is dropped, and the lock is released in the background.
    pub async fn run<T, E, F>(&self, work: F) -> Result<T, RunError<E>>
    where
        F: AsyncFnOnce(&Guard) -> Result<T, E>,
    {
        run(&self.0, work).await
    }

    /// This lock with a limit on the wait, for [`run`](Within::run).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> lockset::Result<()> {
    /// # let locks = lockset::Lockset::connect("memory:").await?;
    /// use std::time::Duration;
    /// let limit = Duration::from_secs(2);
    /// let soon = locks.mutex("m")?.within(limit);
    /// let answer = soon.run(async |_| Ok::<_, lockset::Error>(42)).await?;
    /// assert_eq!(answer, 42);
    /// # Ok(()) }
    /// ```
    pub fn within(&self, limit: Duration) -> Within {
        Within::new(&self.0, limit)
    }
}
