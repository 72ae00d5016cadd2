//! What the laws have in common.

use std::time::Duration;

use futures_util::StreamExt;
use lockset::engine::Claim;
use lockset::{Guard, LockOptions, LockState, Lockset, Mode};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::form::Alone;
use crate::stage::Stage;
use crate::steps;

/// The terms of the stage: its ttl, renewed.
pub(crate) fn options(stage: &dyn Stage) -> LockOptions {
    LockOptions::default().ttl(stage.ttl())
}

/// How long "soon" is: too short for any lease to run out, or expiry would hide a lost wake-up.
pub(crate) fn patience(stage: &dyn Stage) -> Duration {
    stage.ttl() / 4
}

/// How long it takes at most until a lease that nobody renews has ended, and its end was noticed.
pub(crate) fn lapse(stage: &dyn Stage) -> Duration {
    stage.ttl() + stage.lag() + patience(stage)
}

/// A fresh claim, as the front would make it.
pub(crate) fn claim(stage: &dyn Stage, name: &str, mode: Mode) -> Claim {
    Claim { mode, ..steps::claim(name, stage.ttl()) }
}

/// What `future` answers, which it does within `limit` or the law is broken.
#[track_caller]
pub(crate) fn within<T>(
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

/// What `future` answers, which it does before any lease can run out or the law is broken.
#[track_caller]
pub(crate) fn soon<T>(
    stage: &dyn Stage,
    what: &str,
    future: impl Future<Output = T>,
) -> impl Future<Output = T> {
    within(patience(stage), what, future)
}

/// What a law needs before it begins: it says nothing about how long that may take.
#[track_caller]
pub(crate) fn prepared<T>(what: &str, future: impl Future<Output = T>) -> impl Future<Output = T> {
    within(Duration::from_secs(60), what, future)
}

/// `future` does not answer within `span`, or the law is broken.
pub(crate) async fn not_within<T>(span: Duration, what: &str, future: impl Future<Output = T>) {
    if tokio::time::timeout(span, future).await.is_ok() {
        panic!("it must not happen, and did within {span:?}: {what}");
    }
}

/// The state of `name` as soon as it is as told.
pub(crate) async fn state_with(
    locks: &Lockset,
    name: &str,
    as_told: impl Fn(&LockState) -> bool,
) -> LockState {
    let mut states = locks.watch_name(name).unwrap();
    loop {
        let state = states.next().await.expect("a watch does not end").unwrap();
        if as_told(&state) {
            return state;
        }
    }
}

/// Nobody holds `name` and nobody waits for it, soon.
pub(crate) async fn soon_free(stage: &dyn Stage, locks: &Lockset, name: &str) {
    let nothing = |state: &LockState| state.holders.is_empty() && state.waiters.is_empty();
    soon(stage, "neither a holder nor a waiter is left", state_with(locks, name, nothing)).await;
}

/// Waiters, each with a number, and the guards they get in the order they get them.
pub(crate) struct Line {
    tell: UnboundedSender<(usize, Guard)>,
    served: UnboundedReceiver<(usize, Guard)>,
}

impl Line {
    pub(crate) fn new() -> Self {
        let (tell, served) = unbounded_channel();
        Self { tell, served }
    }

    /// Somebody begins to wait, and is in line inside its process when this returns. Whether the
    /// engine knows it is another matter, see [`Form::visible`](crate::Form::visible).
    pub(crate) fn join(&self, number: usize, lock: &Alone) {
        let (lock, tell) = (lock.clone(), self.tell.clone());
        let mut waiting = Box::pin(async move { lock.lock().await });
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let first = waiting.as_mut().poll(&mut context);
        assert!(first.is_pending(), "number {number} did not have to wait: {first:?}");
        tokio::spawn(async move {
            // If nobody listens any more, the law is over.
            let _ = tell.send((number, waiting.await.unwrap()));
        });
    }

    /// The next to be served.
    pub(crate) async fn next(&mut self) -> (usize, Guard) {
        self.served.recv().await.expect("the line keeps a sender itself")
    }
}
