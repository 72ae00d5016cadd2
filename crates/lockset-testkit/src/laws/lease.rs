//! How long a lock lasts.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use lockset::engine::{Claim, Wait, drift};
use lockset::{Error, Guard, LossReason, State};

use crate::form::Form;
use crate::stage::Stage;
use crate::tools::{Line, claim, lapse, patience, prepared, soon, state_with, options, within};

/// While the guard lives its lease is renewed.
pub async fn a_kept_guard_outlives_its_ttl(stage: &dyn Stage, form: Form) {
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let guard = form.of(&ours, "kept", options(stage)).lock().await.unwrap();
    let stranger = form.of(&theirs, "kept", options(stage));
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

/// A lease that nobody renews ends after its ttl; not before, and not much later.
pub async fn a_fixed_lease_ends_by_itself(stage: &dyn Stage, form: Form) {
    let (clock, ttl) = (stage.clock(), stage.ttl());
    let (engine, ours, theirs) =
        (stage.engine().await, stage.client().await, stage.client().await);

    // Bare, because a guard would also withdraw the claim when it sees it end.
    let fixed = Claim { fixed: true, ..claim(stage, "bare", form.mode()) };
    let grant = engine.acquire(&fixed, Wait::No).await.unwrap().expect("it is free");
    let granted = clock.now();
    assert!(grant.valid_until <= granted + ttl, "it promises more than its ttl");
    assert!(grant.valid_until > granted + ttl / 2, "it promises much less than its ttl");
    let lock = form.of(&theirs, "bare", options(stage));
    let next = within(lapse(stage), "a bare lease ends", lock.lock()).await.unwrap();
    assert!(clock.now() >= grant.valid_until, "somebody was granted before the lease ended");
    assert!(next.token() > grant.token);

    let before = clock.now();
    let guard = form.of(&ours, "fixed", options(stage).no_renewal()).lock().await.unwrap();
    let reason = within(ttl, "a guard on a fixed lease ends", guard.lost()).await;
    assert_eq!(reason, LossReason::MaxHold);
    assert!(clock.now().saturating_duration_since(before) + patience(stage) > ttl, "it ended long before its ttl");
}

/// A lock with a longest hold ends then, however often it could be renewed.
pub async fn a_longest_hold_ends_the_lock(stage: &dyn Stage, form: Form) {
    let (clock, longest) = (stage.clock(), stage.ttl() * 2);
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let before = clock.now();
    let stuck = form.of(&ours, "stuck", options(stage).max_hold(longest)).lock().await.unwrap();
    let mut line = Line::new();
    line.join(1, &form.of(&theirs, "stuck", options(stage)));

    let reason = within(longest + patience(stage), "it ends", stuck.lost()).await;
    assert_eq!(reason, LossReason::MaxHold);
    assert!(clock.now().saturating_duration_since(before) >= longest, "it ended before its longest hold");
    assert_eq!(stuck.state(), State::Lost(LossReason::MaxHold));
    drop(soon(stage, "the next has it when it ended", line.next()).await);
}

/// Dropping a guard is enough, also if its client is dropped in the same moment.
pub async fn a_dropped_guard_releases(stage: &dyn Stage, form: Form) {
    let theirs = stage.client().await;
    for the_client_too in [false, true] {
        let ours = stage.client().await;
        let guard = form.of(&ours, "dropped", options(stage)).lock().await.unwrap();
        let mut line = Line::new();
        line.join(1, &form.of(&theirs, "dropped", options(stage)));
        let queued = state_with(&theirs, "dropped", |state| state.waiters.len() == 1);
        prepared("the waiter is seen", queued).await;
        drop(guard);
        if the_client_too {
            drop(ours);
        }
        let (_, next) = soon(stage, "the waiter has it after the drop", line.next()).await;
        next.release().await.unwrap();
    }
}

/// User code that blocks its whole runtime does not cost the lock.
pub async fn kept_guards_survive_a_blocked_runtime(stage: &dyn Stage) {
    let blocked = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let locks = stage.client().await;
            let guard = Form::Mutex.of(&locks, "blocked", options(stage)).lock().await.unwrap();
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

/// A guard is held when it is handed out, on every way from a grant to a guard: by the holder's own
/// request, by the release before it, and by a ticket. Here the answer is read only after the
/// lease that it tells of has ended.
pub async fn a_lease_that_is_over_is_not_handed_out(stage: &dyn Stage) {
    let locks = stage.client().await;
    let pause = stage.ttl() + stage.ttl() / 4;
    let lock = |name| Form::Mutex.of(&locks, name, options(stage).detachable());
    let (first, second) = (lock("late"), lock("late"));
    // What is done for the first time may need more round trips than one.
    let (guard, mut waiting) = (first.lock().await.unwrap(), Begun::new(second.lock()));
    drop(guard.release().await);
    drop(waiting.end().await.unwrap().release().await);

    let mut locking = Begun::new(first.lock());
    if locking.answer.is_pending() {
        stage.pause(pause).await;
    }
    let guard = locking.end().await.unwrap();
    assert_held(&guard, "by its own request").await;

    let mut waiting = Begun::new(second.lock());
    let mut releasing = Begun::new(guard.release());
    stage.pause(pause).await;
    let (released, granted) = tokio::join!(releasing.end(), waiting.end());
    let is_told = matches!(released, Ok(()) | Err(Error::NotHeld { .. }));
    assert!(is_told, "the release: {released:?}");
    let guard = granted.unwrap();
    assert_held(&guard, "by the release before it").await;

    let ticket = guard.detach().await.unwrap();
    let mut attaching = Begun::new(locks.attach(&ticket));
    if attaching.answer.is_pending() {
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

/// A future that was polled once, so that its request is under way.
struct Begun<'a, T> {
    future: Pin<Box<dyn Future<Output = T> + 'a>>,
    answer: Poll<T>,
}

impl<'a, T> Begun<'a, T> {
    fn new(future: impl Future<Output = T> + 'a) -> Self {
        let mut future = Box::pin(future);
        let answer = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        Self { future, answer }
    }

    async fn end(&mut self) -> T {
        match std::mem::replace(&mut self.answer, Poll::Pending) {
            Poll::Ready(answer) => answer,
            Poll::Pending => self.future.as_mut().await,
        }
    }
}
