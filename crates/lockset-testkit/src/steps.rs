//! Steps that the tests of real servers have in common.

use std::time::{Duration, Instant};

use futures_util::StreamExt;
use lockset::engine::Claim;
use lockset::{Break, ClaimId, Error, Guard, LockState, Lockset, LossReason, Mode, Note, State};
use tokio::task::JoinHandle;

/// How long a test waits for what must happen but has no bound of its own.
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

/// What `future` answers, which it does within `limit` or the test fails.
#[track_caller]
pub fn within<T>(
    limit: Duration,
    what: &str,
    future: impl Future<Output = T>,
) -> impl Future<Output = T> {
    let place = std::panic::Location::caller();
    async move {
        match tokio::time::timeout(limit, future).await {
            Ok(answer) => answer,
            Err(_) => panic!("not within {limit:?}: {what} ({place})"),
        }
    }
}

/// Asks again and again: for what a server does not tell by itself.
#[track_caller]
pub fn until(what: &str, mut happened: impl FnMut() -> bool) {
    let began = Instant::now();
    while !happened() {
        assert!(began.elapsed() < PATIENCE, "it did not happen: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// All that is done with a mutex, where there are no other locks: held, waited for, confirmed,
/// noted, handed over within this time, listed, and broken in the end.
pub async fn used_and_broken(
    limit: Duration,
    ours: &Lockset,
    theirs: &Lockset,
    name: &str,
) -> Guard {
    let guard = lock(ours, name).await;
    let waiting = waiter(theirs, name).await;
    guard.confirm().await.unwrap();
    guard.set_note("a note").await.unwrap();
    guard.release().await.unwrap();
    let guard = served(limit, waiting).await;
    assert_eq!(ours.list("").await.unwrap().len(), 1);
    assert_eq!(ours.force_release(name, Break::Now).await.unwrap().len(), 1);
    guard
}

/// Asks until the home answers that it is held.
pub async fn confirmed(limit: Duration, guard: &Guard) {
    let began = Instant::now();
    while let Err(error) = guard.confirm().await {
        assert!(error.is_retryable(), "{error}");
        assert!(began.elapsed() < limit, "still {error}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Takes a free lock.
pub async fn lock(locks: &Lockset, name: &str) -> Guard {
    within(PATIENCE, "a free lock", locks.mutex(name).unwrap().lock()).await.unwrap()
}

/// Whether nobody holds the lock.
pub async fn is_free(locks: &Lockset, name: &str) -> bool {
    match locks.mutex(name).unwrap().try_lock().await.unwrap() {
        None => false,
        Some(guard) => guard.release().await.is_ok(),
    }
}

/// Somebody who waits for a lock.
pub type Waiting = JoinHandle<lockset::Result<Guard>>;

/// Somebody waits for the lock, and the server knows.
pub async fn waiter(locks: &Lockset, name: &str) -> Waiting {
    let before = locks.inspect(name).await.unwrap().waiters.len();
    let mutex = locks.mutex(name).unwrap();
    let waiting = tokio::spawn(async move { mutex.lock().await });
    state_with(locks, name, |state| state.waiters.len() > before).await;
    waiting
}

/// The waiter has the lock within this time.
#[track_caller]
pub fn served(limit: Duration, waiting: Waiting) -> impl Future<Output = Guard> {
    let served = within(limit, "the waiter is served", waiting);
    async move { served.await.unwrap().unwrap() }
}

/// The holder is told within this time that it lost.
#[track_caller]
pub fn lost(limit: Duration, guard: &Guard) -> impl Future<Output = LossReason> {
    within(limit, "the holder is told", guard.lost())
}

/// The guard says this of itself within this time. Nobody tells, so it is asked again and again.
#[track_caller]
pub fn becomes(limit: Duration, guard: &Guard, state: State) -> impl Future<Output = ()> {
    let asked = async move {
        while guard.state() != state {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    within(limit, "the guard changes its mind", asked)
}

/// Watches the lock until it is as told.
pub async fn state_with(locks: &Lockset, name: &str, as_told: impl Fn(&LockState) -> bool) {
    let mut states = locks.watch_name(name).unwrap();
    let found = async { while !as_told(&states.next().await.unwrap().unwrap()) {} };
    within(PATIENCE, "the state that is waited for", found).await;
}

/// The message with all its causes.
pub fn told(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// The error says one of these words, and whether trying again may help.
#[track_caller]
pub fn assert_told(error: &Error, words: &[&str], retryable: bool) {
    let text = told(error);
    assert!(words.iter().any(|word| text.contains(word)), "none of {words:?} is in {text:?}");
    assert_eq!(error.is_retryable(), retryable, "{text}");
}
