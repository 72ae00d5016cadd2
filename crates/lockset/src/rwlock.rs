//! Many readers or one writer.

use std::time::Duration;

use crate::acquire::{LockRequest, acquire, acquire_patiently, acquire_within};
use crate::engine::{Mode, Wait};
use crate::error::Result;
use crate::guard::Guard;
use crate::name::Name;
use crate::options::LockOptions;

/// Many readers or one writer, in the order they came: readers that come after a waiting writer
/// wait behind it, so neither side starves. Made by [`Lockset::rwlock`](crate::Lockset::rwlock).
///
/// A write lock can be [downgraded](Guard::downgrade). A read lock cannot be upgraded: two readers
/// that both try would wait for each other for ever. A [`Mutex`](crate::Mutex) of the same name is
/// a writer.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockset::Result<()> {
/// let locks = lockset::Lockset::connect("memory:").await?;
/// let catalogue = locks.rwlock("catalogue")?;
///
/// let (one, two) = (catalogue.read().await?, catalogue.read().await?);
/// assert!(catalogue.try_write().await?.is_none());
/// one.release().await?;
/// two.release().await?;
///
/// let writer = catalogue.write().await?;
/// writer.downgrade().await?;
/// assert!(catalogue.try_read().await?.is_some());
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct RwLock {
    read: LockRequest,
    write: LockRequest,
}

impl RwLock {
    pub(crate) fn new(write: LockRequest) -> Self {
        Self { read: write.in_mode(Mode::Shared), write }
    }

    /// The same lock with these options. Locking fails if the engine cannot keep them.
    pub fn with(mut self, options: LockOptions) -> Self {
        self.read.set_options(options.clone());
        self.write.set_options(options);
        self
    }

    /// The name of the lock.
    pub fn name(&self) -> &Name {
        &self.write.name
    }

    /// Waits until the lock is granted for reading, as long as it takes.
    ///
    /// # Errors
    /// As [`Mutex::lock`](crate::Mutex::lock), and
    /// [`Error::Unsupported`](crate::Error::Unsupported) if the engine has no readers.
    ///
    /// # Cancel safety
    /// Cancel safe: dropped, it leaves nothing behind.
    pub async fn read(&self) -> Result<Guard> {
        acquire_patiently(&self.read).await
    }

    /// Takes the lock for reading if no writer has it or waits for it.
    ///
    /// # Errors
    /// As [`read`](RwLock::read).
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn try_read(&self) -> Result<Option<Guard>> {
        acquire(&self.read, Wait::No).await
    }

    /// Waits at most this long for reading.
    ///
    /// # Errors
    /// [`Error::Timeout`](crate::Error::Timeout); otherwise as [`read`](RwLock::read).
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn read_within(&self, limit: Duration) -> Result<Guard> {
        acquire_within(&self.read, limit).await
    }

    /// Waits until the lock is granted for writing, as long as it takes.
    ///
    /// # Errors
    /// As [`Mutex::lock`](crate::Mutex::lock).
    ///
    /// # Cancel safety
    /// Cancel safe: dropped, it leaves nothing behind.
    pub async fn write(&self) -> Result<Guard> {
        acquire_patiently(&self.write).await
    }

    /// Takes the lock for writing if it is free.
    ///
    /// # Errors
    /// As [`write`](RwLock::write).
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn try_write(&self) -> Result<Option<Guard>> {
        acquire(&self.write, Wait::No).await
    }

    /// Waits at most this long for writing.
    ///
    /// # Errors
    /// [`Error::Timeout`](crate::Error::Timeout); otherwise as [`write`](RwLock::write).
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn write_within(&self, limit: Duration) -> Result<Guard> {
        acquire_within(&self.write, limit).await
    }

    /// The read side, for [`run`](crate::Lockable::run) and [`all`](crate::all).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> lockset::Result<()> {
    /// # let locks = lockset::Lockset::connect("memory:").await?;
    /// let catalogue = locks.rwlock("catalogue")?;
    /// let items = catalogue.reader().run(async |_| Ok::<_, lockset::Error>(7)).await?;
    /// # assert_eq!(items, 7); Ok(()) }
    /// ```
    pub fn reader(&self) -> crate::Lockable {
        crate::Lockable(self.read.clone())
    }

    /// The write side, for [`run`](crate::Lockable::run) and [`all`](crate::all).
    pub fn writer(&self) -> crate::Lockable {
        crate::Lockable(self.write.clone())
    }
}
