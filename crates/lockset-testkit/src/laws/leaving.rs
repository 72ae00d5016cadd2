//! Whoever leaves takes everything along.

use std::task::Poll;
use std::time::Duration;

use lockset::{Error, LossReason, State};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::form::{Alone, Form};
use crate::stage::{Stage, Time};
use crate::tools::{Line, patience, prepared, soon, soon_free, state_with, options, within};

/// Dropping a pending `lock()` at any moment leaves neither a lock nor a place in the queue.
pub async fn a_cancelled_lock_leaves_nothing(stage: &dyn Stage, form: Form) {
    // Always the same points: what fails once must fail again.
    let mut random = SmallRng::seed_from_u64(42);
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let holding = form.of(&ours, "left", options(stage));
    let lock = form.of(&theirs, "left", options(stage));
    for round in 0..40 {
        // A holder of the same client takes the next in line along when it releases.
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
            // Released while they wait: some are cancelled with the grant on its way.
            Some(holder) if round % 4 != 3 => {
                pause.pass().await;
                holder.release().await.unwrap();
            }
            // They leave a queue.
            Some(holder) => {
                for attempt in attempts.drain(..) {
                    attempt.await.unwrap();
                }
                let no_waiter = state_with(&ours, "left", |state| state.waiters.is_empty());
                soon(stage, "no waiter is left", no_waiter).await;
                holder.release().await.unwrap();
            }
            None => pause.pass().await,
        }
        for attempt in attempts {
            attempt.await.unwrap();
        }
        soon_free(stage, &ours, "left").await;
    }
    let free = soon(stage, "an answer", holding.try_lock()).await.unwrap();
    assert!(free.is_some(), "it must be free");
}

/// Whoever stops waiting because its time is over is no longer in the queue.
pub async fn a_timed_out_waiter_leaves_nothing(stage: &dyn Stage, form: Form) {
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let holder = form.of(&ours, "patience", options(stage)).lock().await.unwrap();
    let lock = form.of(&theirs, "patience", options(stage));
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
    soon_free(stage, &ours, "patience").await;
    assert!(lock.try_lock().await.unwrap().is_some(), "it must be free");
}

/// A home that falls silent while a claim waits there does not make the wait longer than it was
/// given, but for a small constant; and the error says that it is the home that does not answer.
pub async fn a_silent_home_does_not_prolong_a_wait(stage: &dyn Stage, form: Form) {
    let (clock, given) = (stage.clock(), stage.ttl() / 4);
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let holder = form.of(&ours, "silent", options(stage)).lock().await.unwrap();
    let lock = form.of(&theirs, "silent", options(stage));
    // Before the home is silent, whatever had to be done for the first time.
    assert!(lock.try_lock().await.unwrap().is_none());
    let waiting = tokio::spawn(async move {
        let began = clock.now();
        (lock.lock_within(given).await.map(|guard| guard.token()), clock.now().saturating_duration_since(began))
    });
    let queued = state_with(&ours, "silent", |state| state.waiters.len() == 1);
    within(given, "the waiter is seen before its time is over", queued).await;
    stage.freeze().await;
    let limit = given + Duration::from_secs(1) + patience(stage);
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

/// Closing a client gives back all it held and ends all it waited for.
pub async fn close_releases_everything(stage: &dyn Stage) {
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let mut guards = Vec::new();
    let permits = stage.engine().await.capabilities().permits;
    for form in Form::ALL.into_iter().filter(|form| permits || *form != Form::OnePermit) {
        let name = format!("closed/{form:?}");
        guards.push(form.of(&ours, &name, options(stage)).lock().await.unwrap());
    }
    drop(Form::Mutex.of(&ours, "closed/dropped", options(stage)).lock().await.unwrap());
    let latch = ours.latch("never", 1);
    let busy = Form::Mutex.of(&theirs, "busy", options(stage)).lock().await.unwrap();
    let waiting = Form::Mutex.of(&ours, "busy", options(stage));
    let waiter = tokio::spawn(async move { waiting.lock().await.map(|guard| guard.token()) });
    let latch = latch.map(|latch| tokio::spawn(async move { latch.wait().await }));
    let mut line = Line::new();
    line.join(1, &Form::Mutex.of(&theirs, "closed/Mutex", options(stage)));
    let queued = state_with(&theirs, "busy", |state| state.waiters.len() == 1);
    prepared("the waiter is seen", queued).await;

    soon(stage, "it closes", ours.close()).await.unwrap();
    for guard in &guards {
        assert_eq!(guard.state(), State::Lost(LossReason::ClientClosed));
    }
    let (_, next) = soon(stage, "the next has it when its holder closed", line.next()).await;
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
    soon_free(stage, &theirs, "busy").await;
    let refused = ours.mutex("closed/after").unwrap().try_lock().await;
    assert!(matches!(refused, Err(Error::Closed)), "{refused:?}");
    ours.close().await.expect("closing twice is harmless");
}

/// Some point on the way of an acquisition.
enum AtSomePoint {
    /// After so many steps of the future.
    Polls(u32),
    /// After so long.
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

/// As long as a hand-off may take; on virtual time it takes none, and only the steps count.
fn moment(stage: &dyn Stage, random: &mut SmallRng) -> AtSomePoint {
    match stage.time() {
        Time::Virtual => AtSomePoint::Polls(random.random_range(0..6)),
        Time::Real => AtSomePoint::Span(Duration::from_micros(random.random_range(0..6000))),
    }
}

/// Begins to lock, and drops the attempt at that point.
async fn cancelled(lock: Alone, at: AtSomePoint) {
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
