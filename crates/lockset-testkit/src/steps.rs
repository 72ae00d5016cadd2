//! Building blocks for tests of one engine on real servers: connect, lock, wait, expect.

use std::time::{Duration, Instant};

use futures_util::StreamExt;
use lockset::engine::Claim;
use lockset::{Break, ClaimId, Error, Guard, LockState, Lockset, LossReason, Mode, Note, State};
use tokio::task::JoinHandle;

/// Timeout for events that must happen but have no bound of their own.
const PATIENCE: Duration = Duration::from_secs(60);

/// A fresh exclusive claim, as the front would make it.
pub fn claim(name: &str, ttl: Duration) -> Claim {
    Claim {
        id: ClaimId::random(),
        name: name.parse().unwrap(),
        mode: Mode::Exclusive,
        ttl,
        fixed: false,
        floor: None,
        note: Note::default(),
        detachable: false,
        replicas: None,
    }
}

/// A client whose locks have this ttl.
pub async fn client(url: &str, ttl: Duration) -> Lockset {
    Lockset::builder(url).ttl(ttl).connect().await.unwrap()
}

/// Awaits `future`, and panics if it takes longer than `limit`.
#[track_caller]
pub fn within<T>(
    limit: Duration,
    what: &str,
    future: impl Future<Output = T>,
) -> impl Future<Output = T> {
    let caller = std::panic::Location::caller();
    async move {
        match tokio::time::timeout(limit, future).await {
            Ok(output) => output,
            Err(_) => panic!("not within {limit:?}: {what} ({caller})"),
        }
    }
}

/// Polls until `happened` returns true, for what a server does not report by itself.
#[track_caller]
pub fn until(what: &str, mut happened: impl FnMut() -> bool) {
    let began = Instant::now();
    while !happened() {
        assert!(began.elapsed() < PATIENCE, "it did not happen: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Exercises a mutex on a backend without other locks: holds it, waits for it, confirms it, sets a
/// note, hands it over within `limit`, lists it, and finally force-releases it.
pub async fn exercise_and_break(
    limit: Duration,
    ours: &Lockset,
    theirs: &Lockset,
    name: &str,
) -> Guard {
    let guard = lock(ours, name).await;
    let waiting = spawn_waiter(theirs, name).await;
    guard.confirm().await.unwrap();
    guard.set_note("a note").await.unwrap();
    guard.release().await.unwrap();
    let guard = await_served(limit, waiting).await;
    assert_eq!(ours.list("").await.unwrap().len(), 1);
    assert_eq!(ours.force_release(name, Break::Now).await.unwrap().len(), 1);
    guard
}

/// Confirms the guard, and retries until the backend replies that it is held.
pub async fn await_confirmed(limit: Duration, guard: &Guard) {
    let began = Instant::now();
    while let Err(error) = guard.confirm().await {
        assert!(error.is_retryable(), "{error}");
        assert!(began.elapsed() < limit, "still {error}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Acquires a free lock.
pub async fn lock(locks: &Lockset, name: &str) -> Guard {
    within(PATIENCE, "a free lock", locks.mutex(name).unwrap().lock()).await.unwrap()
}

/// Whether the lock is free.
pub async fn is_free(locks: &Lockset, name: &str) -> bool {
    match locks.mutex(name).unwrap().try_lock().await.unwrap() {
        None => false,
        Some(guard) => guard.release().await.is_ok(),
    }
}

/// A task that waits for a lock.
pub type PendingLock = JoinHandle<lockset::Result<Guard>>;

/// Spawns a task that waits for the lock, and returns once the server lists it as a waiter.
pub async fn spawn_waiter(locks: &Lockset, name: &str) -> PendingLock {
    let before = locks.inspect(name).await.unwrap().waiters.len();
    let mutex = locks.mutex(name).unwrap();
    let waiting = tokio::spawn(async move { mutex.lock().await });
    await_lock_state(locks, name, |state| state.waiters.len() > before).await;
    waiting
}

/// Awaits the guard of a waiter, and panics if it takes longer than `limit`.
#[track_caller]
pub fn await_served(limit: Duration, waiting: PendingLock) -> impl Future<Output = Guard> {
    let served = within(limit, "the waiter is served", waiting);
    async move { served.await.unwrap().unwrap() }
}

/// Awaits the loss of the guard, and panics if it takes longer than `limit`.
#[track_caller]
pub fn await_lost(limit: Duration, guard: &Guard) -> impl Future<Output = LossReason> {
    within(limit, "the holder is told", guard.lost())
}

/// Waits until the guard reports `state`, and panics if it takes longer than `limit`. Guards do not
/// notify of a changed state, so this polls.
#[track_caller]
pub fn await_guard_state(limit: Duration, guard: &Guard, state: State) -> impl Future<Output = ()> {
    let polled = async move {
        while guard.state() != state {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    within(limit, "the guard changes its state", polled)
}

/// Watches the lock until its state matches.
pub async fn await_lock_state(locks: &Lockset, name: &str, matches: impl Fn(&LockState) -> bool) {
    let mut states = locks.watch_name(name).unwrap();
    let found = async { while !matches(&states.next().await.unwrap().unwrap()) {} };
    within(PATIENCE, "the state that is waited for", found).await;
}

/// The error message followed by the messages of all its sources.
pub fn error_chain(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// Asserts that the error chain contains one of `words`, and whether the error is retryable.
#[track_caller]
pub fn assert_error(error: &Error, words: &[&str], retryable: bool) {
    let text = error_chain(error);
    assert!(words.iter().any(|word| text.contains(word)), "none of {words:?} is in {text:?}");
    assert_eq!(error.is_retryable(), retryable, "{text}");
}
