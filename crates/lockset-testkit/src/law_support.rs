//! What the laws have in common: timeouts, claims, and waiters in order.

use std::time::Duration;

use futures_util::StreamExt;
use lockset::engine::Claim;
use lockset::{Guard, LockOptions, LockState, Lockset, Mode};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::lock_kind::ExclusiveLock;
use crate::stage::Stage;
use crate::steps;
pub(crate) use crate::steps::within;

/// Lock options with the ttl of the stage.
pub(crate) fn options(stage: &dyn Stage) -> LockOptions {
    LockOptions::default().ttl(stage.ttl())
}

/// How long "soon" is: too short for any lease to expire, or expiry would hide a lost wake-up.
pub(crate) fn handoff_limit(stage: &dyn Stage) -> Duration {
    stage.ttl() / 4
}

/// Maximum time until an unrenewed lease has ended and the backend has noticed it.
pub(crate) fn expiry_limit(stage: &dyn Stage) -> Duration {
    stage.ttl() + stage.expiry_lag() + handoff_limit(stage)
}

/// A fresh claim, as the front would make it.
pub(crate) fn claim(stage: &dyn Stage, name: &str, mode: Mode) -> Claim {
    Claim { mode, ..steps::claim(name, stage.ttl()) }
}

/// Awaits `future`; if it takes so long that a lease could expire, the law is broken.
#[track_caller]
pub(crate) fn soon<T>(
    stage: &dyn Stage,
    what: &str,
    future: impl Future<Output = T>,
) -> impl Future<Output = T> {
    within(handoff_limit(stage), what, future)
}

/// Awaits a precondition of a law. The law promises nothing about how long that takes.
#[track_caller]
pub(crate) fn expect_ready<T>(
    what: &str,
    future: impl Future<Output = T>,
) -> impl Future<Output = T> {
    within(Duration::from_secs(60), what, future)
}

/// If `future` completes within `span`, the law is broken.
pub(crate) async fn not_within<T>(span: Duration, what: &str, future: impl Future<Output = T>) {
    if tokio::time::timeout(span, future).await.is_ok() {
        panic!("it must not happen, and did within {span:?}: {what}");
    }
}

/// The state of `name` as soon as it matches.
pub(crate) async fn await_lock_state(
    locks: &Lockset,
    name: &str,
    matches: impl Fn(&LockState) -> bool,
) -> LockState {
    let mut states = locks.watch_name(name).unwrap();
    loop {
        let state = states.next().await.expect("a watch does not end").unwrap();
        if matches(&state) {
            return state;
        }
    }
}

/// Waits until `name` has neither a holder nor a waiter; if that takes too long, the law is broken.
pub(crate) async fn expect_free_soon(stage: &dyn Stage, locks: &Lockset, name: &str) {
    let nothing = |state: &LockState| state.holders.is_empty() && state.waiters.is_empty();
    soon(stage, "neither a holder nor a waiter is left", await_lock_state(locks, name, nothing))
        .await;
}

/// Numbered waiters, and their guards in the order in which they are served.
pub(crate) struct WaiterQueue {
    sender: UnboundedSender<(usize, Guard)>,
    served: UnboundedReceiver<(usize, Guard)>,
}

impl WaiterQueue {
    pub(crate) fn new() -> Self {
        let (sender, served) = unbounded_channel();
        Self { sender, served }
    }

    /// Starts a waiter, which is queued inside its process when this returns. Whether the engine
    /// sees it is another matter, see [`LockKind::visible`](crate::LockKind::visible).
    pub(crate) fn join(&self, number: usize, lock: &ExclusiveLock) {
        let (lock, sender) = (lock.clone(), self.sender.clone());
        let mut waiting = Box::pin(async move { lock.lock().await });
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let first = waiting.as_mut().poll(&mut context);
        assert!(first.is_pending(), "number {number} did not have to wait: {first:?}");
        tokio::spawn(async move {
            // If the receiver is gone, the law is over.
            let _ = sender.send((number, waiting.await.unwrap()));
        });
    }

    /// The next waiter that is served.
    pub(crate) async fn next(&mut self) -> (usize, Guard) {
        self.served.recv().await.expect("the queue keeps a sender itself")
    }
}
