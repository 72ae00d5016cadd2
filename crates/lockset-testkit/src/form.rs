//! The three ways to be alone: every mutex law holds for each of them.

use std::time::Duration;

use lockset::{Guard, LockOptions, Lockable, Lockset, Mode, Mutex, Result, RwLock, Semaphore};

/// A primitive used so that there is one holder at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A mutex.
    Mutex,
    /// The write side of a reader-writer lock.
    Writer,
    /// The only permit of a semaphore.
    OnePermit,
}

impl Form {
    /// All of them.
    pub const ALL: [Form; 3] = [Form::Mutex, Form::Writer, Form::OnePermit];

    /// What an engine is asked for.
    pub fn mode(self) -> Mode {
        match self {
            Form::Mutex | Form::Writer => Mode::Exclusive,
            Form::OnePermit => Mode::Permits { take: 1, limit: 1 },
        }
    }

    /// The lock `name` in this form.
    pub fn of(self, locks: &Lockset, name: &str, options: LockOptions) -> Alone {
        match self {
            Form::Mutex => Alone::Mutex(locks.mutex(name).unwrap().with(options).unwrap()),
            Form::Writer => Alone::Writer(locks.rwlock(name).unwrap().with(options).unwrap()),
            Form::OnePermit => {
                Alone::OnePermit(locks.semaphore(name, 1).unwrap().with(options).unwrap())
            }
        }
    }

    /// How many of `waiters` waiters that one client has on one name its engine can see: those of
    /// a mutex stand in line inside their process, and the first of them waits for all.
    pub fn visible(self, waiters: usize) -> usize {
        match self {
            Form::Mutex => waiters.min(1),
            Form::Writer | Form::OnePermit => waiters,
        }
    }
}

/// A lock in one of the forms, with the verbs they share.
#[derive(Clone, Debug)]
pub enum Alone {
    /// A mutex.
    Mutex(Mutex),
    /// A reader-writer lock, used for writing.
    Writer(RwLock),
    /// A semaphore of one permit.
    OnePermit(Semaphore),
}

impl Alone {
    /// Waits as long as it takes.
    ///
    /// # Errors
    /// As [`Mutex::lock`].
    pub async fn lock(&self) -> Result<Guard> {
        match self {
            Alone::Mutex(mutex) => mutex.lock().await,
            Alone::Writer(rwlock) => rwlock.write().await,
            Alone::OnePermit(semaphore) => semaphore.acquire(1).await,
        }
    }

    /// Takes the lock if it is free.
    ///
    /// # Errors
    /// As [`Mutex::try_lock`].
    pub async fn try_lock(&self) -> Result<Option<Guard>> {
        match self {
            Alone::Mutex(mutex) => mutex.try_lock().await,
            Alone::Writer(rwlock) => rwlock.try_write().await,
            Alone::OnePermit(semaphore) => semaphore.try_acquire(1).await,
        }
    }

    /// Waits at most this long.
    ///
    /// # Errors
    /// As [`Mutex::lock_within`].
    pub async fn lock_within(&self, patience: Duration) -> Result<Guard> {
        match self {
            Alone::Mutex(mutex) => mutex.lock_within(patience).await,
            Alone::Writer(rwlock) => rwlock.write_within(patience).await,
            Alone::OnePermit(semaphore) => semaphore.acquire_within(1, patience).await,
        }
    }

    /// As one of several locks.
    pub fn lockable(&self) -> Lockable {
        match self {
            Alone::Mutex(mutex) => mutex.into(),
            Alone::Writer(rwlock) => rwlock.writer(),
            Alone::OnePermit(semaphore) => semaphore.permits(1).unwrap(),
        }
    }
}
