//! The same verbs for code without an async runtime.
//!
//! The keeper's own thread drives everything, so nothing else is needed. In async code these calls
//! would block a worker and perhaps wait for themselves; they return [`Error::Unsupported`] there.
//! Threads of [`tokio::task::spawn_blocking`] may use them.
//!
//! ```
//! use lockset::blocking::Lockset;
//!
//! let locks = Lockset::connect("memory:")?;
//! let guard = locks.mutex("nightly")?.lock()?;
//! println!("token {}", guard.token());
//! guard.release()?;
//! locks.close()?;
//! # Ok::<(), lockset::Error>(())
//! ```

use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_core::stream::BoxStream;
use futures_util::StreamExt;
use tokio::runtime::Handle;
use tokio::task::coop;

use crate::builder::Builder;
use crate::client::Client;
use crate::engine::{Break, Capabilities, Holder, LockState};
use crate::error::{Error, LossReason, Result};
use crate::hold::State;
use crate::{ClaimId, Leader, Lease, LockOptions, Lockable, Name, Ticket, Token};

/// Runs `future` on the keeper's runtime while this thread waits.
fn wait_for<T>(client: &Client, future: impl Future<Output = Result<T>>) -> Result<T> {
    check_may_block()?;
    client.keeper.runtime().block_on(future)
}

fn check_may_block() -> Result<()> {
    if Handle::try_current().is_err() || !is_async() {
        return Ok(());
    }
    let what = "being called in async code; use the async front there, or `spawn_blocking`";
    Err(Error::Unsupported { engine: "blocking", what: what.to_owned() })
}

/// Whether this thread is polling a future. tokio gives every poll a budget, and none to threads
/// that may block; so it is spent, and given back.
fn is_async() -> bool {
    let mut context = Context::from_waker(Waker::noop());
    // Dropped without progress, it restores the budget as it was before.
    let Poll::Ready(_before) = coop::poll_proceed(&mut context) else { return true };
    (0..=u8::MAX).any(|_| match coop::poll_proceed(&mut context) {
        Poll::Pending => true,
        Poll::Ready(spent) => {
            spent.made_progress();
            false
        }
    })
}

/// A front with the verbs of its async twin.
#[derive(Clone, Debug)]
struct Front<T> {
    inner: T,
    /// Whose keeper drives it; it must live as long as this.
    client: Arc<Client>,
}

impl<T> Front<T> {
    fn wait<'a, R, F>(&'a self, verb: impl FnOnce(&'a T) -> F) -> Result<R>
    where
        F: Future<Output = Result<R>>,
    {
        wait_for(&self.client, verb(&self.inner))
    }

    fn guard(&self, guard: crate::Guard) -> Guard {
        Guard(Front { inner: guard, client: self.client.clone() })
    }
}

impl Builder {
    /// Like [`connect`](Builder::connect), for code without an async runtime.
    ///
    /// # Errors
    /// As [`connect`](Builder::connect), and [`Error::Unsupported`] in async code.
    pub fn connect_blocking(self) -> Result<Lockset> {
        check_may_block()?;
        let keeper = Self::keeper()?;
        let runtime = keeper.runtime().clone();
        let inner = runtime.block_on(self.connect_on(keeper))?;
        let client = inner.client().clone();
        Ok(Lockset(Front { inner, client }))
    }
}

/// [`lockset::Lockset`](crate::Lockset) without async.
#[derive(Clone, Debug)]
pub struct Lockset(Front<crate::Lockset>);

impl Lockset {
    /// Connects; see [`lockset::Lockset::connect`](crate::Lockset::connect).
    ///
    /// # Errors
    /// As there, and [`Error::Unsupported`] in async code; so do all verbs here.
    pub fn connect(url: &str) -> Result<Self> {
        crate::Lockset::builder(url).connect_blocking()
    }

    /// The same connection, with every name below `outer`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `outer` is not a name.
    pub fn namespace(&self, outer: &str) -> Result<Self> {
        Ok(Self(self.front(self.0.inner.namespace(outer)?)))
    }

    /// The engine's name.
    pub fn engine(&self) -> &'static str {
        self.0.inner.engine()
    }

    /// What the engine can do.
    pub fn capabilities(&self) -> Capabilities {
        self.0.inner.capabilities()
    }

    /// One holder at a time.
    ///
    /// # Errors
    /// As [`lockset::Lockset::mutex`](crate::Lockset::mutex).
    pub fn mutex(&self, name: &str) -> Result<Mutex> {
        Ok(Mutex(self.front(self.0.inner.mutex(name)?)))
    }

    /// Many readers or one writer.
    ///
    /// # Errors
    /// As [`lockset::Lockset::rwlock`](crate::Lockset::rwlock).
    pub fn rwlock(&self, name: &str) -> Result<RwLock> {
        Ok(RwLock(self.front(self.0.inner.rwlock(name)?)))
    }

    /// At most `limit` permits at a time.
    ///
    /// # Errors
    /// As [`lockset::Lockset::semaphore`](crate::Lockset::semaphore).
    pub fn semaphore(&self, name: &str, limit: u32) -> Result<Semaphore> {
        Ok(Semaphore(self.front(self.0.inner.semaphore(name, limit)?)))
    }

    /// One leader at a time, known to all.
    ///
    /// # Errors
    /// As [`lockset::Lockset::election`](crate::Lockset::election).
    pub fn election(&self, name: &str) -> Result<Election> {
        Ok(Election(self.front(self.0.inner.election(name)?)))
    }

    /// A door that opens when it was counted down `count` times.
    ///
    /// # Errors
    /// As [`lockset::Lockset::latch`](crate::Lockset::latch).
    pub fn latch(&self, name: &str, count: u32) -> Result<Latch> {
        Ok(Latch(self.front(self.0.inner.latch(name, count)?)))
    }

    /// A place where `parties` wait for each other.
    ///
    /// # Errors
    /// As [`lockset::Lockset::barrier`](crate::Lockset::barrier).
    pub fn barrier(&self, name: &str, parties: u32) -> Result<Barrier> {
        Ok(Barrier(self.front(self.0.inner.barrier(name, parties)?)))
    }

    /// Takes over a lock that another process let go of.
    ///
    /// # Errors
    /// As [`lockset::Lockset::attach`](crate::Lockset::attach).
    pub fn attach(&self, ticket: &Ticket) -> Result<Guard> {
        self.0.wait(|locks| locks.attach(ticket)).map(|guard| self.0.guard(guard))
    }

    /// Renews the lease of a lock that was let go of, without taking it over.
    ///
    /// # Errors
    /// As [`lockset::Lockset::renew`](crate::Lockset::renew).
    pub fn renew(&self, ticket: &Ticket) -> Result<Lease> {
        self.0.wait(|locks| locks.renew(ticket))
    }

    /// What is known of one name now.
    ///
    /// # Errors
    /// As [`lockset::Lockset::inspect`](crate::Lockset::inspect).
    pub fn inspect(&self, name: &str) -> Result<LockState> {
        self.0.wait(|locks| locks.inspect(name))
    }

    /// All names with this prefix that are held or waited for.
    ///
    /// # Errors
    /// As [`lockset::Lockset::list`](crate::Lockset::list).
    pub fn list(&self, prefix: &str) -> Result<Vec<LockState>> {
        self.0.wait(|locks| locks.list(prefix))
    }

    /// The state of every name with this prefix, then of each again whenever it may have changed.
    ///
    /// # Errors
    /// As [`lockset::Lockset::watch`](crate::Lockset::watch).
    pub fn watch(&self, prefix: &str) -> Result<Items<LockState>> {
        Ok(self.items(self.0.inner.watch(prefix)?))
    }

    /// The state of one name, now and whenever it may have changed.
    ///
    /// # Errors
    /// As [`lockset::Lockset::watch_name`](crate::Lockset::watch_name).
    pub fn watch_name(&self, name: &str) -> Result<Items<LockState>> {
        Ok(self.items(self.0.inner.watch_name(name)?))
    }

    /// Takes a lock away from whoever holds it, and answers who that was.
    ///
    /// # Errors
    /// As [`lockset::Lockset::force_release`](crate::Lockset::force_release).
    pub fn force_release(&self, name: &str, how: Break) -> Result<Vec<Holder>> {
        self.0.wait(|locks| locks.force_release(name, how))
    }

    /// Releases everything and ends the connection.
    ///
    /// # Errors
    /// As [`lockset::Lockset::close`](crate::Lockset::close).
    pub fn close(&self) -> Result<()> {
        self.0.wait(crate::Lockset::close)
    }

    /// Several locks, all or none; see [`lockset::all`](crate::all). They may be of other clients
    /// too.
    ///
    /// # Errors
    /// As there.
    pub fn all<L: Into<Lockable>>(&self, locks: impl IntoIterator<Item = L>) -> Result<All> {
        Ok(All(self.front(crate::all(locks)?)))
    }

    fn front<T>(&self, inner: T) -> Front<T> {
        Front { inner, client: self.0.client.clone() }
    }

    fn items<T>(&self, stream: BoxStream<'static, Result<T>>) -> Items<T> {
        Items { stream, client: self.0.client.clone() }
    }
}

/// What a stream of the async front gives, one by one; each step blocks until there is something.
pub struct Items<T> {
    stream: BoxStream<'static, Result<T>>,
    client: Arc<Client>,
}

impl<T> Iterator for Items<T> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Self::Item> {
        match check_may_block() {
            Ok(()) => self.client.keeper.runtime().block_on(self.stream.next()),
            Err(error) => Some(Err(error)),
        }
    }
}

impl<T> std::fmt::Debug for Items<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Items").finish_non_exhaustive()
    }
}

/// [`lockset::Mutex`](crate::Mutex) without async.
#[derive(Clone, Debug)]
pub struct Mutex(Front<crate::Mutex>);

impl Mutex {
    /// The same lock on these terms.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the engine cannot keep them.
    pub fn with(mut self, options: LockOptions) -> Result<Self> {
        self.0.inner = self.0.inner.with(options)?;
        Ok(self)
    }

    /// Waits until the lock is granted.
    ///
    /// # Errors
    /// As [`lockset::Mutex::lock`](crate::Mutex::lock).
    pub fn lock(&self) -> Result<Guard> {
        self.0.wait(crate::Mutex::lock).map(|guard| self.0.guard(guard))
    }

    /// Takes the lock if it is free.
    ///
    /// # Errors
    /// As [`lockset::Mutex::try_lock`](crate::Mutex::try_lock).
    pub fn try_lock(&self) -> Result<Option<Guard>> {
        let taken = self.0.wait(crate::Mutex::try_lock)?;
        Ok(taken.map(|guard| self.0.guard(guard)))
    }

    /// Waits at most this long.
    ///
    /// # Errors
    /// As [`lockset::Mutex::lock_within`](crate::Mutex::lock_within).
    pub fn lock_within(&self, patience: Duration) -> Result<Guard> {
        self.0.wait(|mutex| mutex.lock_within(patience)).map(|guard| self.0.guard(guard))
    }
}

impl From<&Mutex> for Lockable {
    fn from(mutex: &Mutex) -> Self {
        (&mutex.0.inner).into()
    }
}

/// [`lockset::RwLock`](crate::RwLock) without async.
#[derive(Clone, Debug)]
pub struct RwLock(Front<crate::RwLock>);

impl RwLock {
    /// The same lock on these terms.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the engine cannot keep them.
    pub fn with(mut self, options: LockOptions) -> Result<Self> {
        self.0.inner = self.0.inner.with(options)?;
        Ok(self)
    }

    /// Waits until the lock is granted for reading.
    ///
    /// # Errors
    /// As [`lockset::RwLock::read`](crate::RwLock::read).
    pub fn read(&self) -> Result<Guard> {
        self.0.wait(crate::RwLock::read).map(|guard| self.0.guard(guard))
    }

    /// Takes the lock for reading if no writer has it or waits for it.
    ///
    /// # Errors
    /// As [`lockset::RwLock::try_read`](crate::RwLock::try_read).
    pub fn try_read(&self) -> Result<Option<Guard>> {
        Ok(self.0.wait(crate::RwLock::try_read)?.map(|guard| self.0.guard(guard)))
    }

    /// Waits at most this long for reading.
    ///
    /// # Errors
    /// As [`lockset::RwLock::read_within`](crate::RwLock::read_within).
    pub fn read_within(&self, patience: Duration) -> Result<Guard> {
        self.0.wait(|lock| lock.read_within(patience)).map(|guard| self.0.guard(guard))
    }

    /// Waits until the lock is granted for writing.
    ///
    /// # Errors
    /// As [`lockset::RwLock::write`](crate::RwLock::write).
    pub fn write(&self) -> Result<Guard> {
        self.0.wait(crate::RwLock::write).map(|guard| self.0.guard(guard))
    }

    /// Takes the lock for writing if it is free.
    ///
    /// # Errors
    /// As [`lockset::RwLock::try_write`](crate::RwLock::try_write).
    pub fn try_write(&self) -> Result<Option<Guard>> {
        Ok(self.0.wait(crate::RwLock::try_write)?.map(|guard| self.0.guard(guard)))
    }

    /// Waits at most this long for writing.
    ///
    /// # Errors
    /// As [`lockset::RwLock::write_within`](crate::RwLock::write_within).
    pub fn write_within(&self, patience: Duration) -> Result<Guard> {
        self.0.wait(|lock| lock.write_within(patience)).map(|guard| self.0.guard(guard))
    }

    /// The read side, for [`Lockset::all`].
    pub fn reader(&self) -> Lockable {
        self.0.inner.reader()
    }

    /// The write side, for [`Lockset::all`].
    pub fn writer(&self) -> Lockable {
        self.0.inner.writer()
    }
}

/// [`lockset::Semaphore`](crate::Semaphore) without async.
#[derive(Clone, Debug)]
pub struct Semaphore(Front<crate::Semaphore>);

impl Semaphore {
    /// The same semaphore on these terms.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the engine cannot keep them.
    pub fn with(mut self, options: LockOptions) -> Result<Self> {
        self.0.inner = self.0.inner.with(options)?;
        Ok(self)
    }

    /// Waits for `permits` permits at once.
    ///
    /// # Errors
    /// As [`lockset::Semaphore::acquire`](crate::Semaphore::acquire).
    pub fn acquire(&self, permits: u32) -> Result<Guard> {
        self.0.wait(|all| all.acquire(permits)).map(|guard| self.0.guard(guard))
    }

    /// Takes `permits` permits if they are free and nobody waits.
    ///
    /// # Errors
    /// As [`lockset::Semaphore::try_acquire`](crate::Semaphore::try_acquire).
    pub fn try_acquire(&self, permits: u32) -> Result<Option<Guard>> {
        Ok(self.0.wait(|all| all.try_acquire(permits))?.map(|guard| self.0.guard(guard)))
    }

    /// Waits at most this long.
    ///
    /// # Errors
    /// As [`lockset::Semaphore::acquire_within`](crate::Semaphore::acquire_within).
    pub fn acquire_within(&self, permits: u32, patience: Duration) -> Result<Guard> {
        self.0.wait(|all| all.acquire_within(permits, patience)).map(|guard| self.0.guard(guard))
    }

    /// `permits` permits, for [`Lockset::all`].
    ///
    /// # Errors
    /// As [`lockset::Semaphore::permits`](crate::Semaphore::permits).
    pub fn permits(&self, permits: u32) -> Result<Lockable> {
        self.0.inner.permits(permits)
    }
}

/// [`lockset::Election`](crate::Election) without async.
#[derive(Clone, Debug)]
pub struct Election(Front<crate::Election>);

impl Election {
    /// The same election on these terms.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the engine cannot keep them.
    pub fn with(mut self, options: LockOptions) -> Result<Self> {
        self.0.inner = self.0.inner.with(options)?;
        Ok(self)
    }

    /// Waits until elected.
    ///
    /// # Errors
    /// As [`lockset::Election::campaign`](crate::Election::campaign).
    pub fn campaign(&self) -> Result<Guard> {
        self.0.wait(crate::Election::campaign).map(|guard| self.0.guard(guard))
    }

    /// Leads if nobody does.
    ///
    /// # Errors
    /// As [`lockset::Election::try_campaign`](crate::Election::try_campaign).
    pub fn try_campaign(&self) -> Result<Option<Guard>> {
        Ok(self.0.wait(crate::Election::try_campaign)?.map(|guard| self.0.guard(guard)))
    }

    /// Campaigns at most this long.
    ///
    /// # Errors
    /// As [`lockset::Election::campaign_within`](crate::Election::campaign_within).
    pub fn campaign_within(&self, patience: Duration) -> Result<Guard> {
        self.0.wait(|election| election.campaign_within(patience)).map(|guard| self.0.guard(guard))
    }

    /// Who leads now.
    ///
    /// # Errors
    /// As [`lockset::Election::leader`](crate::Election::leader).
    pub fn leader(&self) -> Result<Option<Leader>> {
        self.0.wait(crate::Election::leader)
    }

    /// Who leads, now and after every change.
    pub fn observe(&self) -> Items<Option<Leader>> {
        Items { stream: self.0.inner.observe(), client: self.0.client.clone() }
    }
}

/// [`lockset::Latch`](crate::Latch) without async.
#[derive(Clone, Debug)]
pub struct Latch(Front<crate::Latch>);

impl Latch {
    /// Counts down by one and answers what remains.
    ///
    /// # Errors
    /// As [`lockset::Latch::count_down`](crate::Latch::count_down).
    pub fn count_down(&self) -> Result<u32> {
        self.0.wait(crate::Latch::count_down)
    }

    /// Waits until the latch is open.
    ///
    /// # Errors
    /// As [`lockset::Latch::wait`](crate::Latch::wait).
    pub fn wait(&self) -> Result<()> {
        self.0.wait(crate::Latch::wait)
    }

    /// How often it must still be counted down.
    ///
    /// # Errors
    /// As [`lockset::Latch::remaining`](crate::Latch::remaining).
    pub fn remaining(&self) -> Result<u32> {
        self.0.wait(crate::Latch::remaining)
    }

    /// Forgets the latch.
    ///
    /// # Errors
    /// As [`lockset::Latch::clear`](crate::Latch::clear).
    pub fn clear(&self) -> Result<()> {
        self.0.wait(crate::Latch::clear)
    }
}

/// [`lockset::Barrier`](crate::Barrier) without async.
#[derive(Clone, Debug)]
pub struct Barrier(Front<crate::Barrier>);

impl Barrier {
    /// Waits until all parties are here. `true` for the one that came last.
    ///
    /// # Errors
    /// As [`lockset::Barrier::wait`](crate::Barrier::wait).
    pub fn wait(&self) -> Result<bool> {
        self.0.wait(crate::Barrier::wait)
    }

    /// How many are waiting.
    ///
    /// # Errors
    /// As [`lockset::Barrier::waiting`](crate::Barrier::waiting).
    pub fn waiting(&self) -> Result<u32> {
        self.0.wait(crate::Barrier::waiting)
    }

    /// Forgets the barrier.
    ///
    /// # Errors
    /// As [`lockset::Barrier::clear`](crate::Barrier::clear).
    pub fn clear(&self) -> Result<()> {
        self.0.wait(crate::Barrier::clear)
    }
}

/// [`lockset::All`](crate::All) without async. Made by [`Lockset::all`].
#[derive(Clone, Debug)]
pub struct All(Front<crate::All>);

impl All {
    /// Waits until all are granted.
    ///
    /// # Errors
    /// As [`lockset::All::lock`](crate::All::lock).
    pub fn lock(&self) -> Result<Guards> {
        self.0.wait(crate::All::lock).map(|guards| self.guards(guards))
    }

    /// Takes all if all are free.
    ///
    /// # Errors
    /// As [`lockset::All::try_lock`](crate::All::try_lock).
    pub fn try_lock(&self) -> Result<Option<Guards>> {
        Ok(self.0.wait(crate::All::try_lock)?.map(|guards| self.guards(guards)))
    }

    /// Waits at most this long for all of them together.
    ///
    /// # Errors
    /// As [`lockset::All::lock_within`](crate::All::lock_within).
    pub fn lock_within(&self, patience: Duration) -> Result<Guards> {
        self.0.wait(|all| all.lock_within(patience)).map(|guards| self.guards(guards))
    }

    fn guards(&self, inner: crate::Guards) -> Guards {
        Guards(Front { inner, client: self.0.client.clone() })
    }
}

/// [`lockset::Guards`](crate::Guards) without async.
#[derive(Debug)]
#[must_use = "guards that are dropped release their locks"]
pub struct Guards(Front<crate::Guards>);

impl Guards {
    /// The token of the lock with this full name.
    pub fn token(&self, name: &str) -> Option<Token> {
        self.0.inner.token(name)
    }

    /// Whether all can be trusted now.
    pub fn state(&self) -> State {
        self.0.inner.state()
    }

    /// For how long all can be trusted if no renewal succeeds.
    pub fn valid_for(&self) -> Duration {
        self.0.inner.valid_for()
    }

    /// Gives all back.
    ///
    /// # Errors
    /// As [`lockset::Guards::release`](crate::Guards::release).
    pub fn release(self) -> Result<()> {
        wait_for(&self.0.client, self.0.inner.release())
    }
}

/// [`lockset::Guard`](crate::Guard) without async. Renewed in the background all the same.
///
/// # Drop
/// As there: the lock is released in the background.
#[derive(Debug)]
#[must_use = "a guard that is dropped releases its lock"]
pub struct Guard(Front<crate::Guard>);

impl Guard {
    /// The fencing token of this hold.
    pub fn token(&self) -> Token {
        self.0.inner.token()
    }

    /// The name of the lock.
    pub fn name(&self) -> &Name {
        self.0.inner.name()
    }

    /// The id of the claim by which the lock is held.
    pub fn claim_id(&self) -> ClaimId {
        self.0.inner.claim_id()
    }

    /// Whether the lock can be trusted now.
    pub fn state(&self) -> State {
        self.0.inner.state()
    }

    /// For how long the lock can be trusted from now on if no renewal succeeds.
    pub fn valid_for(&self) -> Duration {
        self.0.inner.valid_for()
    }

    /// Blocks until the lock can no longer be trusted.
    ///
    /// # Errors
    /// [`Error::Unsupported`] in async code.
    pub fn lost(&self) -> Result<LossReason> {
        self.0.wait(|guard| async { Ok(guard.lost().await) })
    }

    /// Runs `work`, and refuses its result if the lock was lost meanwhile. Unlike the async
    /// `run` it cannot stop the work: ask [`state`](Guard::state) inside, before each step that
    /// must not be done twice.
    ///
    /// # Errors
    /// [`Error::Lost`] if the lock was lost before `work` was done.
    pub fn run<T>(&self, work: impl FnOnce() -> T) -> Result<T> {
        let output = work();
        match self.state() {
            State::Lost(reason) => Err(Error::lost(self.name(), reason)),
            State::Held | State::Uncertain => Ok(output),
        }
    }

    /// Asks the engine whether the lock is still held.
    ///
    /// # Errors
    /// As [`lockset::Guard::confirm`](crate::Guard::confirm).
    pub fn confirm(&self) -> Result<()> {
        self.0.wait(crate::Guard::confirm)
    }

    /// Turns a write lock into a read lock without letting go of it.
    ///
    /// # Errors
    /// As [`lockset::Guard::downgrade`](crate::Guard::downgrade).
    pub fn downgrade(&self) -> Result<()> {
        self.0.wait(crate::Guard::downgrade)
    }

    /// Changes what others see of this holder.
    ///
    /// # Errors
    /// As [`lockset::Guard::set_note`](crate::Guard::set_note).
    pub fn set_note(&self, text: &str) -> Result<()> {
        self.0.wait(|guard| guard.set_note(text))
    }

    /// A second guard on the same hold.
    ///
    /// # Errors
    /// As [`lockset::Guard::reenter`](crate::Guard::reenter).
    pub fn reenter(&self) -> Result<Guard> {
        self.0.inner.reenter().map(|guard| self.0.guard(guard))
    }

    /// Gives the lock back.
    ///
    /// # Errors
    /// As [`lockset::Guard::release`](crate::Guard::release).
    pub fn release(self) -> Result<()> {
        wait_for(&self.0.client, self.0.inner.release())
    }

    /// Lets go of the lock without releasing it.
    ///
    /// # Errors
    /// As [`lockset::Guard::detach`](crate::Guard::detach).
    pub fn detach(self) -> Result<Ticket> {
        wait_for(&self.0.client, self.0.inner.detach())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_verb_works_without_a_runtime() {
        let locks = Lockset::connect("memory:").unwrap();
        let options = LockOptions::default().ttl(Duration::from_millis(300)).detachable();
        let mutex = locks.mutex("m").unwrap().with(options).unwrap();
        let guard = mutex.lock().unwrap();
        assert!(mutex.try_lock().unwrap().is_none());
        // Longer than the ttl: the keeper renews while this thread blocks.
        assert!(mutex.lock_within(Duration::from_millis(700)).is_err());
        guard.confirm().unwrap();
        assert_eq!(guard.run(|| 7).unwrap(), 7);
        let ticket = guard.detach().unwrap();
        assert!(locks.renew(&ticket).unwrap().valid_for > Duration::from_millis(100));
        locks.attach(&ticket).unwrap().release().unwrap();
        let both = locks.all([&mutex, &locks.mutex("n").unwrap()]).unwrap();
        both.lock().unwrap().release().unwrap();
        locks.latch("l", 1).unwrap().count_down().unwrap();
        locks.latch("l", 1).unwrap().wait().unwrap();
        assert!(locks.barrier("b", 1).unwrap().wait().unwrap());
        let term = locks.election("e").unwrap().campaign().unwrap();
        assert!(locks.election("e").unwrap().observe().next().unwrap().unwrap().is_some());
        term.release().unwrap();
        locks.close().unwrap();
        assert!(matches!(mutex.lock(), Err(Error::Closed)));
    }

    #[tokio::test]
    async fn async_code_is_refused_and_its_budget_is_left_as_it_was() {
        for _ in 0..3 {
            assert!(matches!(Lockset::connect("memory:"), Err(Error::Unsupported { .. })));
            assert!(coop::has_budget_remaining());
        }
    }

    #[tokio::test]
    async fn a_thread_of_spawn_blocking_may_block() {
        let used = tokio::task::spawn_blocking(|| {
            let locks = Lockset::connect("memory:")?;
            locks.mutex("m")?.lock()?.release()?;
            locks.close()
        });
        used.await.unwrap().unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn so_may_one_of_a_runtime_with_several_threads() {
        let refused = tokio::spawn(async { Lockset::connect("memory:").is_err() });
        assert!(refused.await.unwrap(), "a task of a worker is async code");
        let used = tokio::task::spawn_blocking(|| Lockset::connect("memory:").map(drop));
        used.await.unwrap().unwrap();
    }
}
