//! Several locks, all or none.

use std::time::Duration;

use futures_util::future::{join_all, select_all};

#[cfg(feature = "blocking")]
use crate::acquire::acquire_patiently;
use crate::acquire::{LockRequest, acquire, timed_out};
use crate::engine::Wait;
use crate::error::{Error, LossReason, Result};
use crate::guard::Guard;
use crate::hold::State;
use crate::mutex::Mutex;
use crate::name::Name;
use crate::run::{RunError, Within, run};
use crate::token::Token;

/// A lock and how it is taken: a [`Mutex`], a side of an [`RwLock`](crate::RwLock), some permits of
/// a [`Semaphore`](crate::Semaphore). For [`all`], and to [`run`](Lockable::run) work under it.
#[derive(Clone, Debug)]
pub struct Lockable(pub(crate) LockRequest);

impl Lockable {
    /// The name of the lock.
    pub fn name(&self) -> &Name {
        &self.0.name
    }

    /// Locks, runs `work` and releases; see [`Mutex::run`].
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
    pub fn within(&self, limit: Duration) -> Within {
        Within::new(&self.0, limit)
    }

    #[cfg(feature = "blocking")]
    pub(crate) async fn lock(&self) -> Result<Guard> {
        acquire_patiently(&self.0).await
    }
}

impl From<Mutex> for Lockable {
    fn from(mutex: Mutex) -> Self {
        Self(mutex.0)
    }
}

impl From<&Mutex> for Lockable {
    fn from(mutex: &Mutex) -> Self {
        Self(mutex.0.clone())
    }
}

/// Several locks, of one or of several clients, taken all or none.
///
/// They are taken one after the other, sorted by home and name and without duplicates, so that two
/// callers that request the same locks in different orders do not wait for each other. Homes are
/// sorted by how they are written in the URL: let all processes write them the same way.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockset::Result<()> {
/// let locks = lockset::Lockset::connect("memory:").await?;
/// let accounts = lockset::all([locks.mutex("account/7")?, locks.mutex("account/3")?])?;
///
/// let both = accounts.lock().await?;
/// assert!(accounts.try_lock().await?.is_none());
/// both.release().await?;
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`Error::Invalid`] if there is no lock, or one lock is asked for in two ways.
pub fn all<L: Into<Lockable>>(locks: impl IntoIterator<Item = L>) -> Result<All> {
    let mut requests: Vec<LockRequest> = locks.into_iter().map(|lock| lock.into().0).collect();
    requests.sort_by(|a, b| home_and_name(a).cmp(&home_and_name(b)));
    let is_same_lock = |a: &LockRequest, b: &LockRequest| home_and_name(a) == home_and_name(b);
    let mut pairs = requests.windows(2);
    if let Some([request, _]) = pairs.find(|w| is_same_lock(&w[0], &w[1]) && w[0].mode != w[1].mode)
    {
        let why = "it is asked for in two different ways";
        return Err(Error::invalid("set of locks", request.name.as_str(), why));
    }
    requests.dedup_by(|a, b| is_same_lock(a, b));
    match requests.is_empty() {
        true => Err(Error::invalid("set of locks", "", "it is empty")),
        false => Ok(All(requests)),
    }
}

fn home_and_name(request: &LockRequest) -> (&str, &Name) {
    (&request.client.identity, &request.name)
}

/// Several locks, taken all or none. Made by [`all`].
#[derive(Clone, Debug)]
pub struct All(Vec<LockRequest>);

impl All {
    /// Waits until all are granted, as long as it takes.
    ///
    /// # Errors
    /// As [`Mutex::lock`]; none is held then.
    ///
    /// # Cancel safety
    /// Cancel safe: dropped, none is held.
    pub async fn lock(&self) -> Result<Guards> {
        loop {
            if let Some(guards) = self.acquire_all(|_| Wait::Forever).await? {
                return Ok(guards);
            }
        }
    }

    /// Acquires all if all are free.
    ///
    /// # Errors
    /// As [`Mutex::lock`]; none is held then.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn try_lock(&self) -> Result<Option<Guards>> {
        self.acquire_all(|_| Wait::No).await
    }

    /// Waits at most this long for all of them together.
    ///
    /// # Errors
    /// [`Error::Timeout`] with the name that was not granted and who holds it; otherwise as
    /// [`Mutex::lock`]. None is held then.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn lock_within(&self, limit: Duration) -> Result<Guards> {
        // Clients may have different clocks: each deadline is made on its own.
        let deadlines: Vec<_> = self.0.iter().map(|w| w.client.clock.now() + limit).collect();
        let mut missing = self.0.len() - 1;
        let acquired = self
            .acquire_all(|index| {
                missing = index;
                Wait::Until(deadlines[index])
            })
            .await?;
        match acquired {
            Some(guards) => Ok(guards),
            None => Err(timed_out(&self.0[missing], limit).await),
        }
    }

    /// All of them, or `None` if one was not granted in time.
    async fn acquire_all(&self, mut wait: impl FnMut(usize) -> Wait) -> Result<Option<Guards>> {
        loop {
            let mut guards = Guards(Vec::with_capacity(self.0.len()));
            let mut missing = None;
            for (index, request) in self.0.iter().enumerate() {
                match acquire(request, wait(index)).await {
                    Ok(Some(guard)) => guards.0.push(guard),
                    other => {
                        missing = Some(other.map(|_| ()));
                        break;
                    }
                }
            }
            let complete = missing.is_none();
            if complete && guards.check().is_ok() {
                return Ok(Some(guards));
            }
            // What cannot be released now goes on being released in the background.
            let _ = guards.release().await;
            if let Some(missing) = missing {
                return missing.map(|()| None);
            }
            // The first was lost while the last was waited for (a fixed lease, a break): again.
            if wait(0) == Wait::No {
                return Ok(None);
            }
        }
    }
}

/// Several locks that are held together; lost as soon as one of them is lost.
///
/// # Drop
/// As [`Guard`]: they are released in the background.
#[derive(Debug)]
#[must_use = "guards that are dropped release their locks"]
pub struct Guards(Vec<Guard>);

impl Guards {
    /// The token of the lock with this full name.
    pub fn token(&self, name: &str) -> Option<Token> {
        self.0.iter().find(|guard| guard.name().as_str() == name).map(Guard::token)
    }

    /// The guards, in the order in which they were taken.
    pub fn iter(&self) -> impl Iterator<Item = &Guard> {
        self.0.iter()
    }

    /// Whether all can be trusted now: the worst of their states.
    pub fn state(&self) -> State {
        let states = self.0.iter().map(Guard::state);
        states.fold(State::Held, |worst, state| match (worst, state) {
            (State::Lost(_), _) | (_, State::Held) => worst,
            _ => state,
        })
    }

    /// For how long all can be trusted if no renewal succeeds.
    pub fn valid_for(&self) -> Duration {
        self.0.iter().map(Guard::valid_for).min().unwrap_or_default()
    }

    /// Resolves when one of them can no longer be trusted.
    ///
    /// # Cancel safety
    /// Cancel safe: it only observes.
    pub async fn lost(&self) -> (&Name, LossReason) {
        let all = self.0.iter().map(|guard| Box::pin(async { (guard.name(), guard.lost().await) }));
        select_all(all).await.0
    }

    /// Runs `work` for as long as all can be trusted, and drops it otherwise.
    ///
    /// # Errors
    /// [`Error::Lost`] with the lock that was lost before `work` was done.
    ///
    /// # Cancel safety
    /// As cancel safe as `work`.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        tokio::select! {
            biased;
            (name, reason) = self.lost() => Err(Error::lost(name, reason)),
            output = work => self.check().map(|()| output),
        }
    }

    /// Whether all are still held.
    fn check(&self) -> Result<()> {
        self.0.iter().try_for_each(|guard| match guard.state() {
            State::Lost(reason) => Err(Error::lost(guard.name(), reason)),
            State::Held | State::Uncertain => Ok(()),
        })
    }

    /// Releases all.
    ///
    /// # Errors
    /// The first error, after all were tried; see [`Guard::release`].
    ///
    /// # Cancel safety
    /// If cancelled, the releases go on in the background.
    pub async fn release(self) -> Result<()> {
        let outcomes = join_all(self.0.into_iter().map(Guard::release)).await;
        outcomes.into_iter().collect()
    }
}
