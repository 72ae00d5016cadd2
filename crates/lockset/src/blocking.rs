//! The same API for code without an async runtime.
//!
//! Every method does what the async method of the same name does, and blocks until it is done. The
//! keeper's thread drives the futures. In async code a call would block a worker thread, so it
//! returns [`Error::Unsupported`] there. Threads of [`tokio::task::spawn_blocking`] may block.
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
use crate::engine::{Break, Capabilities, Grant, Holder, LockState};
use crate::error::{Error, LossReason, Result};
use crate::hold::State;
use crate::run::after_work;
use crate::{ClaimId, Leader, Lease, LockOptions, Mode, Name, RunError, Ticket, Token};

/// Runs `future` on the keeper's runtime while this thread waits.
fn wait_for<T>(client: &Client, future: impl Future<Output = Result<T>>) -> Result<T> {
    check_may_block()?;
    client.keeper.runtime().block_on(future)
}

fn check_may_block() -> Result<()> {
    if Handle::try_current().is_err() || !is_async() {
        return Ok(());
    }
    let what = "being called in async code; use the async API there, or `spawn_blocking`";
    Err(Error::Unsupported { engine: "blocking", what: what.to_owned() })
}

/// Whether this thread is polling a future. tokio gives every poll a budget, and none to threads
/// that may block. So this spends the budget, and restores it.
fn is_async() -> bool {
    let mut context = Context::from_waker(Waker::noop());
    // Dropping it without progress restores the budget.
    let Poll::Ready(_before) = coop::poll_proceed(&mut context) else { return true };
    (0..=u8::MAX).any(|_| match coop::poll_proceed(&mut context) {
        Poll::Pending => true,
        Poll::Ready(spent) => {
            spent.made_progress();
            false
        }
    })
}

/// An async type, and the client whose keeper drives its futures.
#[derive(Clone, Debug)]
struct Wrapped<T> {
    inner: T,
    client: Arc<Client>,
}

impl<T> Wrapped<T> {
    fn wait<'a, R, F>(&'a self, method: impl FnOnce(&'a T) -> F) -> Result<R>
    where
        F: Future<Output = Result<R>>,
    {
        wait_for(&self.client, method(&self.inner))
    }
}

/// What a blocking method returns for a result of the async one.
trait IntoBlocking {
    type Blocking;

    fn into_blocking(self, client: &Arc<Client>) -> Self::Blocking;
}

impl<T: IntoBlocking> IntoBlocking for Option<T> {
    type Blocking = Option<T::Blocking>;

    fn into_blocking(self, client: &Arc<Client>) -> Self::Blocking {
        self.map(|some| some.into_blocking(client))
    }
}

impl<T> IntoBlocking for BoxStream<'static, Result<T>> {
    type Blocking = Items<T>;

    fn into_blocking(self, client: &Arc<Client>) -> Items<T> {
        Items { stream: self, client: client.clone() }
    }
}

/// Results that are the same in both APIs.
macro_rules! same {
    ($($type:ty),*) => {$(
        impl IntoBlocking for $type {
            type Blocking = Self;

            fn into_blocking(self, _: &Arc<Client>) -> Self {
                self
            }
        }
    )*};
}

same!((), bool, u32, LockState, Leader, Lease, Ticket, Vec<LockState>, Vec<Holder>);

/// Declares a blocking type. Each line names a method of the async type: `block` for an async
/// method, `last` for one that consumes the value, `make` for one that returns at once but may
/// fail, `get` for one that cannot fail.
macro_rules! blocking {
    ($(#[$attribute:meta])* $name:ident {
        $($kind:ident $method:ident($($arg:ident: $type:ty),*) -> $out:ty;)*
    }) => {
        $(#[$attribute])*
        #[doc = concat!("[`lockset::", stringify!($name), "`](crate::", stringify!($name), ") without async.")]
        pub struct $name(Wrapped<crate::$name>);

        impl $name {
            $(blocking!(@$kind $name $method($($arg: $type),*) -> $out);)*
        }

        impl IntoBlocking for crate::$name {
            type Blocking = $name;

            fn into_blocking(self, client: &Arc<Client>) -> $name {
                $name(Wrapped { inner: self, client: client.clone() })
            }
        }
    };
    (@block $name:ident $method:ident($($arg:ident: $type:ty),*) -> $out:ty) => {
        #[doc = blocking!(@see $name $method)]
        ///
        /// # Errors
        /// As there, and [`Error::Unsupported`] in async code.
        pub fn $method(&self, $($arg: $type),*) -> Result<$out> {
            let done = self.0.wait(|inner| inner.$method($($arg),*));
            done.map(|done| done.into_blocking(&self.0.client))
        }
    };
    (@last $name:ident $method:ident($($arg:ident: $type:ty),*) -> $out:ty) => {
        #[doc = blocking!(@see $name $method)]
        ///
        /// # Errors
        /// As there, and [`Error::Unsupported`] in async code.
        pub fn $method(self, $($arg: $type),*) -> Result<$out> {
            wait_for(&self.0.client, self.0.inner.$method($($arg),*))
        }
    };
    (@make $name:ident $method:ident($($arg:ident: $type:ty),*) -> $out:ty) => {
        #[doc = blocking!(@see $name $method)]
        ///
        /// # Errors
        /// As there.
        pub fn $method(&self, $($arg: $type),*) -> Result<$out> {
            self.0.inner.$method($($arg),*).map(|made| made.into_blocking(&self.0.client))
        }
    };
    (@get $name:ident $method:ident($($arg:ident: $type:ty),*) -> $out:ty) => {
        #[doc = blocking!(@see $name $method)]
        pub fn $method(&self, $($arg: $type),*) -> $out {
            self.0.inner.$method($($arg),*)
        }
    };
    (@see $name:ident $method:ident) => {
        concat!(
            "See [`lockset::", stringify!($name), "::", stringify!($method), "`](crate::",
            stringify!($name), "::", stringify!($method), ")."
        )
    };
}

blocking! {
    #[derive(Clone, Debug)]
    Lockset {
        make namespace(outer: impl TryInto<Name, Error: Into<Error>>) -> Lockset;
        get engine() -> &'static str;
        get home() -> &str;
        get capabilities() -> Capabilities;
        make mutex(name: impl TryInto<Name, Error: Into<Error>>) -> Mutex;
        make rwlock(name: impl TryInto<Name, Error: Into<Error>>) -> RwLock;
        make semaphore(name: impl TryInto<Name, Error: Into<Error>>, limit: u32) -> Semaphore;
        make election(name: impl TryInto<Name, Error: Into<Error>>) -> Election;
        make latch(name: impl TryInto<Name, Error: Into<Error>>, count: u32) -> Latch;
        make barrier(name: impl TryInto<Name, Error: Into<Error>>, parties: u32) -> Barrier;
        block attach(ticket: &Ticket) -> Guard;
        block renew(ticket: &Ticket) -> Lease;
        block inspect(name: impl TryInto<Name, Error: Into<Error>>) -> LockState;
        block list(prefix: &str) -> Vec<LockState>;
        make watch(prefix: &str) -> Items<LockState>;
        make watch_name(name: impl TryInto<Name, Error: Into<Error>>) -> Items<LockState>;
        block force_release(
            name: impl TryInto<Name, Error: Into<Error>>,
            how: Break
        ) -> Vec<Holder>;
        block close() -> ();
    }
}

blocking! {
    #[derive(Clone, Debug)]
    Mutex {
        get name() -> &Name;
        block lock() -> Guard;
        block try_lock() -> Option<Guard>;
        block lock_within(limit: Duration) -> Guard;
    }
}

blocking! {
    #[derive(Clone, Debug)]
    RwLock {
        get name() -> &Name;
        block read() -> Guard;
        block try_read() -> Option<Guard>;
        block read_within(limit: Duration) -> Guard;
        block write() -> Guard;
        block try_write() -> Option<Guard>;
        block write_within(limit: Duration) -> Guard;
    }
}

blocking! {
    #[derive(Clone, Debug)]
    Semaphore {
        get name() -> &Name;
        get limit() -> u32;
        block acquire() -> Guard;
        block try_acquire() -> Option<Guard>;
        block acquire_within(limit: Duration) -> Guard;
        block acquire_many(permits: u32) -> Guard;
        block try_acquire_many(permits: u32) -> Option<Guard>;
        block acquire_many_within(permits: u32, limit: Duration) -> Guard;
        make permits(permits: u32) -> Lockable;
    }
}

blocking! {
    #[derive(Clone, Debug)]
    Lockable {
        get name() -> &Name;
    }
}

blocking! {
    #[derive(Clone, Debug)]
    #[must_use = "it locks only when `run` is called"]
    Within {}
}

blocking! {
    #[derive(Clone, Debug)]
    Election {
        get name() -> &Name;
        block campaign() -> Guard;
        block try_campaign() -> Option<Guard>;
        block campaign_within(limit: Duration) -> Guard;
        block leader() -> Option<Leader>;
    }
}

blocking! {
    #[derive(Clone, Debug)]
    Latch {
        get name() -> &Name;
        block count_down() -> u32;
        block wait() -> ();
        block remaining() -> u32;
        block clear() -> ();
    }
}

blocking! {
    #[derive(Clone, Debug)]
    Barrier {
        get name() -> &Name;
        block wait() -> bool;
        block waiting() -> u32;
        block clear() -> ();
    }
}

blocking! {
    #[derive(Clone, Debug)]
    All {
        block lock() -> Guards;
        block try_lock() -> Option<Guards>;
        block lock_within(limit: Duration) -> Guards;
    }
}

blocking! {
    #[derive(Debug)]
    #[must_use = "guards that are dropped release their locks"]
    Guards {
        get token(name: &str) -> Option<Token>;
        get state() -> State;
        get valid_for() -> Duration;
        last release() -> ();
    }
}

blocking! {
    #[derive(Debug)]
    #[must_use = "a guard that is dropped releases its lock"]
    Guard {
        get token() -> Token;
        get name() -> &Name;
        get claim_id() -> ClaimId;
        get grant() -> Grant;
        get mode() -> Mode;
        get ttl() -> Duration;
        get state() -> State;
        get valid_for() -> Duration;
        block confirm() -> ();
        block downgrade() -> ();
        block set_note(text: &str) -> ();
        make reenter() -> Guard;
        last release() -> ();
        last detach() -> Ticket;
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
        Ok(inner.into_blocking(&client))
    }
}

impl Lockset {
    /// Connects; see [`lockset::Lockset::connect`](crate::Lockset::connect).
    ///
    /// # Errors
    /// As there, and [`Error::Unsupported`] in async code.
    pub fn connect(url: &str) -> Result<Self> {
        crate::Lockset::builder(url).connect_blocking()
    }

    /// Several locks, all or none; see [`lockset::all`](crate::all). They may belong to other
    /// clients.
    ///
    /// # Errors
    /// As there.
    pub fn all<L: Into<crate::Lockable>>(&self, locks: impl IntoIterator<Item = L>) -> Result<All> {
        crate::all(locks).map(|all| all.into_blocking(&self.0.client))
    }
}

/// `with(options)` for the primitives that have it.
macro_rules! with_options {
    ($($name:ident),*) => {$(
        impl $name {
            /// Replaces the options. Locking fails if the engine cannot keep them.
            pub fn with(mut self, options: LockOptions) -> Self {
                self.0.inner = self.0.inner.with(options);
                self
            }
        }
    )*};
}

with_options!(Mutex, RwLock, Semaphore, Election);

impl RwLock {
    /// The read side, for [`run`](Lockable::run) and [`Lockset::all`].
    pub fn reader(&self) -> Lockable {
        self.0.inner.reader().into_blocking(&self.0.client)
    }

    /// The write side, for [`run`](Lockable::run) and [`Lockset::all`].
    pub fn writer(&self) -> Lockable {
        self.0.inner.writer().into_blocking(&self.0.client)
    }
}

impl From<&Mutex> for crate::Lockable {
    fn from(mutex: &Mutex) -> Self {
        (&mutex.0.inner).into()
    }
}

impl From<Lockable> for crate::Lockable {
    fn from(lock: Lockable) -> Self {
        lock.0.inner
    }
}

/// `run(work)` for what can be locked, and `within(limit)` where the limit is not set yet.
macro_rules! run {
    ($($name:ident $lock:ident),*) => {$(
        impl $name {
            /// Locks, runs `work` and releases. Unlike the async `run` it cannot stop the work, so
            /// it never returns [`RunError::Interrupted`]: check [`Guard::state`] before each step
            /// that must not be done twice.
            ///
            /// # Errors
            /// See [`RunError`].
            pub fn run<T, E>(
                &self,
                work: impl FnOnce(&Guard) -> Result<T, E>,
            ) -> Result<T, RunError<E>> {
                let granted = self.0.wait(|inner| inner.$lock());
                let guard = granted.map_err(RunError::NotGranted)?.into_blocking(&self.0.client);
                let done = work(&guard);
                let name = guard.name().clone();
                // Closing the client releases its locks: then the release reports no loss.
                let released = match guard.state() {
                    State::Lost(reason) => Err(Error::lost(&name, reason)),
                    State::Held | State::Uncertain => guard.release(),
                };
                after_work(&name, done, released)
            }
        }
    )*};
}

run!(Mutex lock, Semaphore acquire, Lockable lock, Within lock);

macro_rules! within {
    ($($name:ident),*) => {$(
        impl $name {
            /// The same with a limit on the wait, for [`run`](Within::run).
            pub fn within(&self, limit: Duration) -> Within {
                self.0.inner.within(limit).into_blocking(&self.0.client)
            }
        }
    )*};
}

within!(Mutex, Semaphore, Lockable);

impl Election {
    /// The leader, now and after every change.
    pub fn observe(&self) -> Items<Option<Leader>> {
        self.0.inner.observe().into_blocking(&self.0.client)
    }
}

impl Guard {
    /// Blocks until the lock can no longer be trusted.
    ///
    /// # Errors
    /// [`Error::Unsupported`] in async code.
    pub fn lost(&self) -> Result<LossReason> {
        self.0.wait(|guard| async { Ok(guard.lost().await) })
    }

    /// Runs `work`, and rejects its result if the lock was lost meanwhile. Unlike the async `run`
    /// it cannot stop the work: check [`state`](Guard::state) inside, before each step that must
    /// not be done twice.
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
}

/// The items of an async stream. Each step blocks until there is one.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_verb_works_without_a_runtime() {
        let locks = Lockset::connect("memory:").unwrap();
        let options = LockOptions::default().ttl(Duration::from_millis(300)).detachable();
        let mutex = locks.mutex("m").unwrap().with(options);
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
        let halves = locks.semaphore("s", 2).unwrap();
        let limit = Duration::from_secs(1);
        assert_eq!(mutex.run(|held| Ok::<_, Error>(held.mode())).unwrap(), Mode::Exclusive);
        mutex.within(limit).run(|_| halves.run(|_| Ok::<_, Error>(()))).unwrap();
        let both = halves.permits(2).unwrap();
        both.within(limit).run(|_| Ok::<_, Error>(())).unwrap();
        let refused = both.run(|_| halves.within(Duration::ZERO).run(|_| Ok::<_, Error>(())));
        assert!(matches!(refused, Err(RunError::Failed(RunError::NotGranted(_)))));
        locks.rwlock("r").unwrap().reader().run(|_| Ok::<_, Error>(())).unwrap();
        let term = locks.election("e").unwrap().campaign().unwrap();
        assert!(locks.election("e").unwrap().observe().next().unwrap().unwrap().is_some());
        term.release().unwrap();
        locks.close().unwrap();
        assert!(matches!(mutex.lock(), Err(Error::Closed)));
    }

    /// Every method of the async types is here too, under the same name.
    #[test]
    fn no_method_is_missing() {
        let blocking = include_str!("blocking.rs");
        let sources = [
            ("Lockset", include_str!("locks.rs")),
            ("Mutex", include_str!("mutex.rs")),
            ("RwLock", include_str!("rwlock.rs")),
            ("Semaphore", include_str!("semaphore.rs")),
            ("Election", include_str!("election.rs")),
            ("Latch", include_str!("latch.rs")),
            ("Barrier", include_str!("barrier.rs")),
            ("Guard", include_str!("guard.rs")),
            ("Within", include_str!("run.rs")),
        ];
        // What works on both kinds of client; and `lead`, which must be able to stop the work.
        let only_async = ["with_engine", "lead"];
        for (name, source) in sources {
            let declared = |text: &str| {
                let start = text.find(&format!("\n    {name} {{")).expect(name);
                let body = &text[start..];
                body[..body.find("\n    }\n").expect(name)].to_owned()
            };
            let (lines, rest) = (declared(blocking), blocking);
            for line in source.lines().filter_map(|line| line.trim().strip_prefix("pub ")) {
                let method = line.strip_prefix("async ").unwrap_or(line).strip_prefix("fn ");
                let Some(method) = method.and_then(|rest| rest.split(['(', '<']).next()) else {
                    continue;
                };
                let there = lines.contains(&format!(" {method}("))
                    || rest.contains(&format!("pub fn {method}("))
                    || rest.contains(&format!("pub fn {method}<"));
                assert!(there || only_async.contains(&method), "{name}::{method} is missing");
            }
        }
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
