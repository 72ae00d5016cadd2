//! The three kinds of exclusive lock. Every law about a mutex holds for each of them.

use std::time::Duration;

use lockset::{Guard, LockOptions, Lockable, Lockset, Mode, Mutex, Result, RwLock, Semaphore};

/// A primitive that admits one holder at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockKind {
    /// A mutex.
    Mutex,
    /// The write side of a reader-writer lock.
    Writer,
    /// The only permit of a semaphore.
    OnePermit,
}

impl LockKind {
    /// All kinds.
    pub const ALL: [LockKind; 3] = [LockKind::Mutex, LockKind::Writer, LockKind::OnePermit];

    /// The mode of its claims.
    pub fn mode(self) -> Mode {
        match self {
            LockKind::Mutex | LockKind::Writer => Mode::Exclusive,
            LockKind::OnePermit => Mode::Permits { take: 1, limit: 1 },
        }
    }

    /// The lock `name` of this kind.
    pub fn new_lock(self, locks: &Lockset, name: &str, options: LockOptions) -> ExclusiveLock {
        match self {
            LockKind::Mutex => ExclusiveLock::Mutex(locks.mutex(name).unwrap().with(options)),
            LockKind::Writer => ExclusiveLock::Writer(locks.rwlock(name).unwrap().with(options)),
            LockKind::OnePermit => {
                ExclusiveLock::OnePermit(locks.semaphore(name, 1).unwrap().with(options))
            }
        }
    }

    /// How many of `waiters` waiters of one client on one name the engine sees: the waiters of a
    /// mutex queue inside their process, and only the first of them waits at the engine.
    pub fn visible_waiters(self, waiters: usize) -> usize {
        match self {
            LockKind::Mutex => waiters.min(1),
            LockKind::Writer | LockKind::OnePermit => waiters,
        }
    }
}

/// A lock of one of the kinds, with the methods that they share.
#[derive(Clone, Debug)]
pub enum ExclusiveLock {
    /// A mutex.
    Mutex(Mutex),
    /// A reader-writer lock, used for writing.
    Writer(RwLock),
    /// A semaphore of one permit.
    OnePermit(Semaphore),
}

impl ExclusiveLock {
    /// Waits as long as it takes.
    ///
    /// # Errors
    /// As [`Mutex::lock`].
    pub async fn lock(&self) -> Result<Guard> {
        match self {
            ExclusiveLock::Mutex(mutex) => mutex.lock().await,
            ExclusiveLock::Writer(rwlock) => rwlock.write().await,
            ExclusiveLock::OnePermit(semaphore) => semaphore.acquire().await,
        }
    }

    /// Takes the lock if it is free.
    ///
    /// # Errors
    /// As [`Mutex::try_lock`].
    pub async fn try_lock(&self) -> Result<Option<Guard>> {
        match self {
            ExclusiveLock::Mutex(mutex) => mutex.try_lock().await,
            ExclusiveLock::Writer(rwlock) => rwlock.try_write().await,
            ExclusiveLock::OnePermit(semaphore) => semaphore.try_acquire().await,
        }
    }

    /// Waits at most this long.
    ///
    /// # Errors
    /// As [`Mutex::lock_within`].
    pub async fn lock_within(&self, patience: Duration) -> Result<Guard> {
        match self {
            ExclusiveLock::Mutex(mutex) => mutex.lock_within(patience).await,
            ExclusiveLock::Writer(rwlock) => rwlock.write_within(patience).await,
            ExclusiveLock::OnePermit(semaphore) => semaphore.acquire_within(patience).await,
        }
    }

    /// As one of several locks.
    pub fn lockable(&self) -> Lockable {
        match self {
            ExclusiveLock::Mutex(mutex) => mutex.into(),
            ExclusiveLock::Writer(rwlock) => rwlock.writer(),
            ExclusiveLock::OnePermit(semaphore) => semaphore.permits(1).unwrap(),
        }
    }
}
