//! One call that locks, works and releases, and an error that says how far it came.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use crate::acquire::{LockRequest, acquire_patiently, acquire_within};
use crate::error::{Error, Result};
use crate::guard::Guard;
use crate::name::Name;
use crate::report::report;

/// A lock and the longest time to wait for it. Made by [`Mutex::within`](crate::Mutex::within),
/// [`Semaphore::within`](crate::Semaphore::within) and
/// [`Lockable::within`](crate::Lockable::within).
#[derive(Clone, Debug)]
#[must_use = "it locks only when `run` is called"]
pub struct Within {
    request: LockRequest,
    limit: Duration,
}

impl Within {
    pub(crate) fn new(request: &LockRequest, limit: Duration) -> Self {
        Self { request: request.clone(), limit }
    }

    /// As [`Mutex::run`](crate::Mutex::run), but waits for the lock at most as long as was said. If
    /// it was not granted by then, the error is [`RunError::NotGranted`] with [`Error::Timeout`],
    /// which names the holder.
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
        let granted = acquire_within(&self.request, self.limit).await;
        run_held(granted.map_err(RunError::NotGranted)?, work).await
    }

    #[cfg(feature = "blocking")]
    pub(crate) async fn lock(&self) -> Result<Guard> {
        acquire_within(&self.request, self.limit).await
    }
}

/// Why a `run` did not do its work under the lock from beginning to end. The variants differ in
/// what may have been done.
///
/// `E` is the error of the work itself. If that is [`lockset::Error`](Error), `?` turns a
/// `RunError` into one. Match on it instead where it matters whether something was done.
#[derive(Debug)]
#[non_exhaustive]
pub enum RunError<E> {
    /// Nothing was done: the lock was not granted, and the work was not started. The cause says
    /// why, and [`Error::is_retryable`] whether to try again later.
    NotGranted(Error),
    /// Something may have been done: the lock was lost during the work, which was then dropped at
    /// an await point. Steps before that point are done, and a request that was under way there
    /// may take effect.
    Interrupted(Error),
    /// Everything was done: the work returned `Ok`. But the lock was lost before it was released,
    /// so another client may have held it at the same time.
    DoneButLost(Error),
    /// The work itself failed. This hides a loss of the lock that happened before the release.
    Failed(E),
}

impl<E: fmt::Display> fmt::Display for RunError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RunError::NotGranted(error) => write!(f, "the work was not started: {error}"),
            RunError::Interrupted(error) => write!(f, "the work was interrupted: {error}"),
            RunError::DoneButLost(error) => {
                write!(f, "the work is done, but not under the lock until its end: {error}")
            }
            RunError::Failed(error) => error.fmt(f),
        }
    }
}

impl<E: StdError + 'static> StdError for RunError<E> {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        // The message contains that of the error itself, so its cause is the next one.
        match self {
            RunError::NotGranted(error)
            | RunError::Interrupted(error)
            | RunError::DoneButLost(error) => error.source(),
            RunError::Failed(error) => error.source(),
        }
    }
}

impl From<RunError<Error>> for Error {
    fn from(error: RunError<Error>) -> Self {
        match error {
            RunError::NotGranted(error)
            | RunError::Interrupted(error)
            | RunError::DoneButLost(error)
            | RunError::Failed(error) => error,
        }
    }
}

/// Waits for the lock as long as it takes, and runs `work` under it.
pub(crate) async fn run<T, E, F>(request: &LockRequest, work: F) -> Result<T, RunError<E>>
where
    F: AsyncFnOnce(&Guard) -> Result<T, E>,
{
    let granted = acquire_patiently(request).await;
    run_held(granted.map_err(RunError::NotGranted)?, work).await
}

/// Runs `work` while the lock can be trusted, then releases the lock.
pub(crate) async fn run_held<T, E, F>(guard: Guard, work: F) -> Result<T, RunError<E>>
where
    F: AsyncFnOnce(&Guard) -> Result<T, E>,
{
    let done = tokio::select! {
        // After a loss the work is not polled again, so it cannot begin another step.
        biased;
        reason = guard.lost() => {
            return Err(RunError::Interrupted(Error::lost(guard.name(), reason)));
        }
        done = work(&guard) => done,
    };
    let name = guard.name().clone();
    let released = guard.release().await;
    after_work(&name, done, released)
}

/// What `run` returns for work that ended by itself.
pub(crate) fn after_work<T, E>(
    name: &Name,
    done: Result<T, E>,
    released: Result<()>,
) -> Result<T, RunError<E>> {
    let done = done.map_err(RunError::Failed)?;
    match released {
        Err(error @ (Error::Lost { .. } | Error::NotHeld { .. })) => {
            Err(RunError::DoneButLost(error))
        }
        Err(error) => {
            // The lock was held until the work was done. The release goes on in the background.
            report!(warn, name = name, error = error, "a release got no reply");
            Ok(done)
        }
        Ok(()) => Ok(done),
    }
}
