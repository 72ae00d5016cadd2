//! A limited number of permits.

use std::time::Duration;

use crate::acquire::{LockRequest, acquire, acquire_patiently, acquire_within};
use crate::engine::{Mode, Wait};
use crate::error::{Error, Result};
use crate::guard::Guard;
use crate::name::Name;
use crate::options::LockOptions;
use crate::run::{RunError, Within, run};

/// At most `limit` permits at a time, in strict order: a request for more permits than are free
/// makes those behind it wait, too. Made by [`Lockset::semaphore`](crate::Lockset::semaphore).
///
/// Permits of a process that died come back when its lease ends, or at once where the engine can
/// see it die. All clients that use a name at the same time must agree on its limit; another limit
/// is rejected with [`Error::Conflict`] while any permit is held or waited for.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockset::Result<()> {
/// let locks = lockset::Lockset::connect("memory:").await?;
/// let licences = locks.semaphore("licences", 3)?;
///
/// let one = licences.acquire().await?;
/// let two = licences.acquire_many(2).await?;
/// assert!(licences.try_acquire().await?.is_none());
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Semaphore {
    request: LockRequest,
    limit: u32,
}

impl Semaphore {
    pub(crate) fn new(request: LockRequest) -> Self {
        let limit = match request.mode {
            Mode::Permits { limit, .. } => limit,
            Mode::Exclusive | Mode::Shared => 1,
        };
        Self { request, limit }
    }

    /// The same semaphore with these options. Acquiring fails if the engine cannot keep them.
    pub fn with(mut self, options: LockOptions) -> Self {
        self.request.set_options(options);
        self
    }

    /// The name of the semaphore.
    pub fn name(&self) -> &Name {
        &self.request.name
    }

    /// How many permits there are.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Waits for a permit, as long as it takes.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the engine has no semaphores; otherwise as
    /// [`Mutex::lock`](crate::Mutex::lock).
    ///
    /// # Cancel safety
    /// Cancel safe: dropped, it leaves nothing behind.
    pub async fn acquire(&self) -> Result<Guard> {
        acquire_patiently(&self.request).await
    }

    /// Takes a permit if one is free and no other claim waits.
    ///
    /// # Errors
    /// As [`acquire`](Semaphore::acquire).
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn try_acquire(&self) -> Result<Option<Guard>> {
        acquire(&self.request, Wait::No).await
    }

    /// Waits for a permit, at most this long.
    ///
    /// # Errors
    /// [`Error::Timeout`]; otherwise as [`acquire`](Semaphore::acquire).
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn acquire_within(&self, limit: Duration) -> Result<Guard> {
        acquire_within(&self.request, limit).await
    }

    /// Waits for `permits` permits at once, as long as it takes. One guard holds them all.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `permits` is zero or above the limit; otherwise as
    /// [`acquire`](Semaphore::acquire).
    ///
    /// # Cancel safety
    /// Cancel safe: dropped, it leaves nothing behind.
    pub async fn acquire_many(&self, permits: u32) -> Result<Guard> {
        acquire_patiently(&self.taking(permits)?).await
    }

    /// Takes `permits` permits if they are free and no other claim waits.
    ///
    /// # Errors
    /// As [`acquire_many`](Semaphore::acquire_many).
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn try_acquire_many(&self, permits: u32) -> Result<Option<Guard>> {
        acquire(&self.taking(permits)?, Wait::No).await
    }

    /// Waits for `permits` permits, at most this long.
    ///
    /// # Errors
    /// [`Error::Timeout`]; otherwise as [`acquire_many`](Semaphore::acquire_many).
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn acquire_many_within(&self, permits: u32, limit: Duration) -> Result<Guard> {
        acquire_within(&self.taking(permits)?, limit).await
    }

    /// Takes a permit, runs `work` and gives the permit back; see
    /// [`Mutex::run`](crate::Mutex::run). For several permits: `permits(n)?.run(..)`.
    ///
    /// # Errors
    /// See [`RunError`].
    ///
    /// # Cancel safety
    /// If cancelled, the work is dropped, and the permit is given back in the background.
    pub async fn run<T, E, F>(&self, work: F) -> Result<T, RunError<E>>
    where
        F: AsyncFnOnce(&Guard) -> Result<T, E>,
    {
        run(&self.request, work).await
    }

    /// One permit with a limit on the wait, for [`run`](Within::run).
    pub fn within(&self, limit: Duration) -> Within {
        Within::new(&self.request, limit)
    }

    /// `permits` permits, for [`all`](crate::all) and [`run`](crate::Lockable::run).
    ///
    /// # Errors
    /// [`Error::Invalid`] if it asks for none or for more than there are.
    pub fn permits(&self, permits: u32) -> Result<crate::Lockable> {
        self.taking(permits).map(crate::Lockable)
    }

    fn taking(&self, take: u32) -> Result<LockRequest> {
        if take == 0 || take > self.limit {
            let why = format!("the semaphore has 1 to {} permits to give", self.limit);
            return Err(Error::invalid("number of permits", &take.to_string(), why));
        }
        Ok(self.request.in_mode(Mode::Permits { take, limit: self.limit }))
    }
}
