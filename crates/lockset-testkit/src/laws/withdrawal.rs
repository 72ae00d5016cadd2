//! Cancelling, timing out and closing leave nothing behind.

use std::task::Poll;
use std::time::Duration;

use lockset::{Error, LossReason, State};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::law_support::{
    WaiterQueue, await_lock_state, expect_free_soon, expect_ready, handoff_limit, options, soon,
    within,
};
use crate::lock_kind::{ExclusiveLock, LockKind};
use crate::stage::{Stage, Time};

/// Dropping a pending `lock()` at any moment leaves neither a lock nor a queue entry.
pub async fn a_cancelled_acquire_leaves_nothing_behind(stage: &dyn Stage, kind: LockKind) {
    // A fixed seed, so that a failure is reproducible.
    let mut random = SmallRng::seed_from_u64(42);
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let holding = kind.new_lock(&ours, "left", options(stage));
    let lock = kind.new_lock(&theirs, "left", options(stage));
    for round in 0..40 {
        // A holder of the same client enqueues the next waiter when it releases.
        let holding = if round % 8 < 4 { &holding } else { &lock };
        let holder = match round % 4 {
            0 => None,
            _ => Some(soon(stage, "it is free", holding.lock()).await.unwrap()),
        };
        let mut attempts = Vec::new();
        for _ in 0..random.random_range(1..4) {
            attempts.push(tokio::spawn(cancelled(lock.clone(), moment(stage, &mut random))));
        }
        let pause = moment(stage, &mut random);
        match holder {
            // Released while they wait: some are cancelled while their grant is in flight.
            Some(holder) if round % 4 != 3 => {
                pause.pass().await;
                holder.release().await.unwrap();
            }
            // They leave a queue.
            Some(holder) => {
                for attempt in attempts.drain(..) {
                    attempt.await.unwrap();
                }
                let no_waiter = await_lock_state(&ours, "left", |state| state.waiters.is_empty());
                soon(stage, "no waiter is left", no_waiter).await;
                holder.release().await.unwrap();
            }
            None => pause.pass().await,
        }
        for attempt in attempts {
            attempt.await.unwrap();
        }
        expect_free_soon(stage, &ours, "left").await;
    }
    let free = soon(stage, "an answer", holding.try_lock()).await.unwrap();
    assert!(free.is_some(), "it must be free");
}

/// A waiter that timed out is no longer queued.
pub async fn a_timed_out_waiter_leaves_nothing_behind(stage: &dyn Stage, kind: LockKind) {
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let holder = kind.new_lock(&ours, "patience", options(stage)).lock().await.unwrap();
    let lock = kind.new_lock(&theirs, "patience", options(stage));
    let attempts = (0..3).map(|_| lock.lock_within(stage.ttl() / 8));
    for attempt in futures_util::future::join_all(attempts).await {
        match attempt {
            Err(Error::Timeout { holder: Some(seen), .. }) => {
                assert_eq!(seen.token, Some(holder.token()), "it says who holds the lock");
            }
            other => panic!("a timeout that says who holds the lock, not {other:?}"),
        }
    }
    let seen = ours.inspect("patience").await.unwrap();
    assert_eq!((seen.holders.len(), seen.waiters.len()), (1, 0), "{seen:?}");
    holder.release().await.unwrap();
    expect_free_soon(stage, &ours, "patience").await;
    assert!(lock.try_lock().await.unwrap().is_some(), "it must be free");
}

/// A backend that stops responding while a claim waits extends the wait by a small constant at
/// most, and the error says that the backend does not respond.
pub async fn an_unresponsive_backend_does_not_extend_a_wait(stage: &dyn Stage, kind: LockKind) {
    let (clock, given) = (stage.clock(), stage.ttl() / 4);
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let holder = kind.new_lock(&ours, "silent", options(stage)).lock().await.unwrap();
    let lock = kind.new_lock(&theirs, "silent", options(stage));
    // First-time work is done before the backend freezes.
    assert!(lock.try_lock().await.unwrap().is_none());
    let waiting = tokio::spawn(async move {
        let began = clock.now();
        (
            lock.lock_within(given).await.map(|guard| guard.token()),
            clock.now().saturating_duration_since(began),
        )
    });
    let queued = await_lock_state(&ours, "silent", |state| state.waiters.len() == 1);
    within(given, "the waiter is seen before its time is over", queued).await;
    stage.freeze().await;
    let limit = given + Duration::from_secs(1) + handoff_limit(stage);
    let ended = tokio::time::timeout(limit, waiting).await;
    stage.thaw().await;
    let (outcome, waited) = ended.expect("a silent home kept the waiter").unwrap();
    assert!(waited >= given, "it gave up after {waited:?} of {given:?}");
    match outcome {
        Err(error @ Error::Unreachable { retryable: true, .. }) => drop(error),
        other => panic!("an error that says that nobody answers, not {other:?}"),
    }
    drop(holder);
}

/// Closing a client releases all its locks and ends all its waits.
pub async fn close_releases_everything(stage: &dyn Stage) {
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let mut guards = Vec::new();
    let permits = stage.engine().await.capabilities().permits;
    for kind in LockKind::ALL.into_iter().filter(|kind| permits || *kind != LockKind::OnePermit) {
        let name = format!("closed/{kind:?}");
        guards.push(kind.new_lock(&ours, &name, options(stage)).lock().await.unwrap());
    }
    drop(LockKind::Mutex.new_lock(&ours, "closed/dropped", options(stage)).lock().await.unwrap());
    let latch = ours.latch("never", 1);
    let busy = LockKind::Mutex.new_lock(&theirs, "busy", options(stage)).lock().await.unwrap();
    let waiting = LockKind::Mutex.new_lock(&ours, "busy", options(stage));
    let waiter = tokio::spawn(async move { waiting.lock().await.map(|guard| guard.token()) });
    let latch = latch.map(|latch| tokio::spawn(async move { latch.wait().await }));
    let mut queue = WaiterQueue::new();
    queue.join(1, &LockKind::Mutex.new_lock(&theirs, "closed/Mutex", options(stage)));
    let queued = await_lock_state(&theirs, "busy", |state| state.waiters.len() == 1);
    expect_ready("the waiter is seen", queued).await;

    soon(stage, "it closes", ours.close()).await.unwrap();
    for guard in &guards {
        assert_eq!(guard.state(), State::Lost(LossReason::ClientClosed));
    }
    let (_, next) = soon(stage, "the next has it when its holder closed", queue.next()).await;
    next.release().await.unwrap();
    let left = theirs.list("closed/").await.unwrap();
    assert!(left.is_empty(), "nothing is left when it has closed: {left:?}");
    let ended = soon(stage, "those who waited are told", waiter).await.unwrap();
    assert!(matches!(ended, Err(Error::Closed)), "told {ended:?}");
    if let Ok(latch) = latch {
        let ended = soon(stage, "those at a latch are told", latch).await.unwrap();
        assert!(matches!(ended, Err(Error::Closed)), "told {ended:?}");
    }
    busy.release().await.unwrap();
    expect_free_soon(stage, &theirs, "busy").await;
    let refused = ours.mutex("closed/after").unwrap().try_lock().await;
    assert!(matches!(refused, Err(Error::Closed)), "{refused:?}");
    ours.close().await.expect("closing twice is harmless");
}

/// Some point in the course of an acquisition.
enum AtSomePoint {
    /// After this many polls of the future.
    Polls(u32),
    /// After this time.
    Span(Duration),
}

impl AtSomePoint {
    async fn pass(self) {
        match self {
            AtSomePoint::Polls(polls) => {
                for _ in 0..polls {
                    tokio::task::yield_now().await;
                }
            }
            AtSomePoint::Span(span) => tokio::time::sleep(span).await,
        }
    }
}

/// A random point within the duration of a hand-off. In virtual time a hand-off takes no time, so
/// polls are counted instead.
fn moment(stage: &dyn Stage, random: &mut SmallRng) -> AtSomePoint {
    match stage.time() {
        Time::Virtual => AtSomePoint::Polls(random.random_range(0..6)),
        Time::Real => AtSomePoint::Span(Duration::from_micros(random.random_range(0..6000))),
    }
}

/// Begins to lock, and drops the future at that point.
async fn cancelled(lock: ExclusiveLock, at: AtSomePoint) {
    let mut attempt = Box::pin(lock.lock());
    match at {
        AtSomePoint::Span(span) => drop(tokio::time::timeout(span, attempt).await),
        AtSomePoint::Polls(polls) => {
            for _ in 0..=polls {
                if let Poll::Ready(outcome) = futures_util::poll!(attempt.as_mut()) {
                    return drop(outcome.unwrap());
                }
                tokio::task::yield_now().await;
            }
        }
    }
}
