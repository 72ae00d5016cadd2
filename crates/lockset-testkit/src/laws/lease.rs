//! How long a lock lasts.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use lockset::engine::{Claim, Wait, drift};
use lockset::{Error, Guard, LossReason, State};

use crate::law_support::{
    WaiterQueue, await_lock_state, claim, expect_ready, expiry_limit, handoff_limit, options, soon,
    within,
};
use crate::lock_kind::LockKind;
use crate::stage::Stage;

/// The lease is renewed while the guard lives.
pub async fn a_renewed_guard_outlives_its_ttl(stage: &dyn Stage, kind: LockKind) {
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let guard = kind.new_lock(&ours, "kept", options(stage)).lock().await.unwrap();
    let stranger = kind.new_lock(&theirs, "kept", options(stage));
    let token = guard.token();
    for _ in 0..6 {
        tokio::time::sleep(stage.ttl() / 2).await;
        assert_eq!(guard.state(), State::Held);
        assert!(stranger.try_lock().await.unwrap().is_none(), "it was free while kept");
        guard.confirm().await.unwrap();
    }
    assert_eq!(guard.token(), token, "renewing changes no token");
    guard.release().await.unwrap();
}

/// A lease that is not renewed ends after its ttl; not before, and not much later.
pub async fn a_fixed_lease_ends_by_itself(stage: &dyn Stage, kind: LockKind) {
    let (clock, ttl) = (stage.clock(), stage.ttl());
    let (engine, ours, theirs) = (stage.engine().await, stage.client().await, stage.client().await);

    // Without a guard, because a guard would also withdraw the claim when its lease ends.
    let fixed = Claim { fixed: true, ..claim(stage, "bare", kind.mode()) };
    let grant = engine.acquire(&fixed, Wait::No).await.unwrap().granted().expect("it is free");
    let granted = clock.now();
    assert!(grant.valid_until <= granted + ttl, "it promises more than its ttl");
    assert!(grant.valid_until > granted + ttl / 2, "it promises much less than its ttl");
    let lock = kind.new_lock(&theirs, "bare", options(stage));
    let next = within(expiry_limit(stage), "a bare lease ends", lock.lock()).await.unwrap();
    assert!(clock.now() >= grant.valid_until, "somebody was granted before the lease ended");
    assert!(next.token() > grant.token);

    let before = clock.now();
    let guard = kind.new_lock(&ours, "fixed", options(stage).no_renewal()).lock().await.unwrap();
    let reason = within(ttl, "a guard on a fixed lease ends", guard.lost()).await;
    assert_eq!(reason, LossReason::MaxHold);
    assert!(
        clock.now().saturating_duration_since(before) + handoff_limit(stage) > ttl,
        "it ended long before its ttl"
    );
}

/// A lock with `max_hold` ends then, however often it could be renewed.
pub async fn max_hold_ends_the_lock(stage: &dyn Stage, kind: LockKind) {
    let (clock, longest) = (stage.clock(), stage.ttl() * 2);
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let before = clock.now();
    let stuck =
        kind.new_lock(&ours, "stuck", options(stage).max_hold(longest)).lock().await.unwrap();
    let mut queue = WaiterQueue::new();
    queue.join(1, &kind.new_lock(&theirs, "stuck", options(stage)));

    let reason = within(longest + handoff_limit(stage), "it ends", stuck.lost()).await;
    assert_eq!(reason, LossReason::MaxHold);
    assert!(
        clock.now().saturating_duration_since(before) >= longest,
        "it ended before its longest hold"
    );
    assert_eq!(stuck.state(), State::Lost(LossReason::MaxHold));
    drop(soon(stage, "the next has it when it ended", queue.next()).await);
}

/// Dropping a guard releases the lock, also if its client is dropped at the same time.
pub async fn a_dropped_guard_releases(stage: &dyn Stage, kind: LockKind) {
    let theirs = stage.client().await;
    for the_client_too in [false, true] {
        let ours = stage.client().await;
        let guard = kind.new_lock(&ours, "dropped", options(stage)).lock().await.unwrap();
        let mut queue = WaiterQueue::new();
        queue.join(1, &kind.new_lock(&theirs, "dropped", options(stage)));
        let queued = await_lock_state(&theirs, "dropped", |state| state.waiters.len() == 1);
        expect_ready("the waiter is seen", queued).await;
        drop(guard);
        if the_client_too {
            drop(ours);
        }
        let (_, next) = soon(stage, "the waiter has it after the drop", queue.next()).await;
        next.release().await.unwrap();
    }
}

/// User code that blocks its whole runtime does not lose the lock.
pub async fn a_renewed_guard_survives_a_blocked_runtime(stage: &dyn Stage) {
    let blocked = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let locks = stage.client().await;
            let guard =
                LockKind::Mutex.new_lock(&locks, "blocked", options(stage)).lock().await.unwrap();
            std::thread::sleep(stage.ttl() * 2);
            assert_eq!(guard.state(), State::Held, "after the runtime was blocked");
            assert!(guard.valid_for() > drift(stage.ttl()));
            guard.confirm().await.unwrap();
            guard.release().await.unwrap();
        });
    };
    // A thread of its own, because a runtime cannot be blocked from within another.
    std::thread::scope(|scope| {
        if let Err(broken) = scope.spawn(blocked).join() {
            std::panic::resume_unwind(broken);
        }
    });
}

/// A guard is held when it is returned, on every path from a grant to a guard: by its own request,
/// by the release before it, and by a ticket. Here the reply is read only after the lease that it
/// reports has ended.
pub async fn an_expired_lease_is_never_returned_as_a_guard(stage: &dyn Stage) {
    let locks = stage.client().await;
    let pause = stage.ttl() + stage.ttl() / 4;
    let lock = |name| LockKind::Mutex.new_lock(&locks, name, options(stage).detachable());
    let (first, second) = (lock("late"), lock("late"));
    // A first acquisition may need more than one round trip.
    let (guard, mut waiting) = (first.lock().await.unwrap(), PolledOnce::new(second.lock()));
    drop(guard.release().await);
    drop(waiting.end().await.unwrap().release().await);

    let mut locking = PolledOnce::new(first.lock());
    if locking.output.is_pending() {
        stage.pause(pause).await;
    }
    let guard = locking.end().await.unwrap();
    assert_held(&guard, "by its own request").await;

    let mut waiting = PolledOnce::new(second.lock());
    let mut releasing = PolledOnce::new(guard.release());
    stage.pause(pause).await;
    let (released, granted) = tokio::join!(releasing.end(), waiting.end());
    let is_told = matches!(released, Ok(()) | Err(Error::NotHeld { .. }));
    assert!(is_told, "the release: {released:?}");
    let guard = granted.unwrap();
    assert_held(&guard, "by the release before it").await;

    let ticket = guard.detach().await.unwrap();
    let mut attaching = PolledOnce::new(locks.attach(&ticket));
    if attaching.output.is_pending() {
        stage.pause(pause).await;
    }
    match attaching.end().await {
        Ok(guard) => assert_held(&guard, "by a ticket").await,
        Err(Error::Lost { .. } | Error::Unreachable { .. }) => {}
        Err(error) => panic!("by a ticket: {error}"),
    }
}

async fn assert_held(guard: &Guard, how: &str) {
    assert_eq!(guard.state(), State::Held, "it was over when it was handed out, {how}");
    let confirmed = guard.confirm().await;
    assert!(confirmed.is_ok(), "its home does not know it ({how}): {confirmed:?}");
}

/// A future that was polled once, so that its request is in flight.
struct PolledOnce<'a, T> {
    future: Pin<Box<dyn Future<Output = T> + 'a>>,
    output: Poll<T>,
}

impl<'a, T> PolledOnce<'a, T> {
    fn new(future: impl Future<Output = T> + 'a) -> Self {
        let mut future = Box::pin(future);
        let output = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        Self { future, output }
    }

    async fn end(&mut self) -> T {
        match std::mem::replace(&mut self.output, Poll::Pending) {
            Poll::Ready(output) => output,
            Poll::Pending => self.future.as_mut().await,
        }
    }
}
