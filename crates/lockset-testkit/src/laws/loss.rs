//! A guard reports truthfully whether it is held.

use lockset::engine::trusted_until;
use lockset::{Break, Guard, LossReason, State};

use crate::law_support::{
    WaiterQueue, await_lock_state, expect_ready, expiry_limit, handoff_limit, not_within, options,
    soon, within,
};
use crate::lock_kind::LockKind;
use crate::stage::{LinkState, Stage};

/// When the backend stops responding, the guard reports it: first uncertain, then lost, by its
/// deadline and before another claim is granted the lock.
pub async fn a_guard_on_a_frozen_backend_is_lost_by_its_deadline(
    stage: &dyn Stage,
    kind: LockKind,
) {
    let (clock, ttl) = (stage.clock(), stage.ttl());
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let guard = kind.new_lock(&ours, "frozen", options(stage)).lock().await.unwrap();
    let mut queue = WaiterQueue::new();
    queue.join(1, &kind.new_lock(&theirs, "frozen", options(stage)));
    let queued = await_lock_state(&ours, "frozen", |state| state.waiters.len() == 1);
    expect_ready("the waiter is seen", queued).await;
    assert_eq!(guard.state(), State::Held);

    stage.freeze().await;
    let frozen = clock.now();
    let uncertain = until(stage, &guard, State::Uncertain);
    within(ttl, "the guard doubts before it loses", uncertain).await;
    let reason = within(ttl, "the guard loses by its deadline", guard.lost()).await;
    assert_eq!(reason, LossReason::Expired);
    let lost = clock.now();
    assert!(
        lost.saturating_duration_since(frozen) > ttl / 3,
        "it was given up long before its deadline"
    );
    assert_eq!(guard.state(), State::Lost(LossReason::Expired));

    stage.thaw().await;
    // Requests that waited during the freeze may take as long to return as a lease lasts.
    let after_the_thaw =
        within(expiry_limit(stage), "the next has it after the thaw", queue.next());
    let (_, next) = after_the_thaw.await;
    assert!(next.token() > guard.token());
    assert_eq!(guard.state(), State::Lost(LossReason::Expired), "a loss is final");
    guard.release().await.expect_err("a lost lock cannot be released as if nothing happened");
}

/// Nothing is confirmed from some moment on, so one lease later no guard reports `Held`: not a
/// watched one, and not one that is read right after a pause of the process.
pub async fn a_guard_never_reports_held_after_its_deadline(stage: &dyn Stage, kind: LockKind) {
    let (clock, ttl) = (stage.clock(), stage.ttl());
    let locks = stage.client().await;
    let watched = kind.new_lock(&locks, "watched", options(stage)).lock().await.unwrap();
    let paused = kind.new_lock(&locks, "paused", options(stage)).lock().await.unwrap();
    let fixed = kind.new_lock(&locks, "fixed", options(stage).no_renewal()).lock().await.unwrap();
    stage.freeze().await;
    let deadline = trusted_until(clock.now(), ttl);
    loop {
        // The clock is read before the state, so a delay in between cannot hide a late `Held`.
        let before = clock.now();
        let state = watched.state();
        if let State::Lost(_) = state {
            break;
        }
        assert!(
            before < deadline,
            "{state:?} {:?} after its deadline",
            before.saturating_duration_since(deadline)
        );
        assert!(watched.valid_for() <= ttl, "it promises more than its ttl");
        tokio::time::sleep(ttl / 100).await;
        if before + ttl / 2 > deadline {
            stage.pause(ttl).await;
            for guard in [&paused, &fixed] {
                let state = guard.state();
                assert!(matches!(state, State::Lost(_)), "{state:?} right after a pause");
                assert!(guard.valid_for().is_zero());
                guard.reenter().expect_err("a lost lock cannot be reentered");
            }
        }
    }
    stage.thaw().await;
}

/// An immediate forced release is reported to the holder: at once if the engine pushes events,
/// otherwise at its next renewal.
pub async fn a_forced_release_is_reported_at_once(stage: &dyn Stage, kind: LockKind) {
    let (ours, theirs, operator) =
        (stage.client().await, stage.client().await, stage.client().await);
    let guard = kind.new_lock(&ours, "broken", options(stage)).lock().await.unwrap();
    let mut queue = WaiterQueue::new();
    queue.join(1, &kind.new_lock(&theirs, "broken", options(stage)));
    let queued = await_lock_state(&ours, "broken", |state| state.waiters.len() == 1);
    expect_ready("the waiter is seen", queued).await;

    stage.change_leader().await;
    let broken = operator.force_release("broken", Break::Now).await.unwrap();
    let tokens: Vec<_> = broken.iter().map(|holder| holder.token).collect();
    assert_eq!(tokens, [Some(guard.token())], "who it was taken from");
    let (_, next) = soon(stage, "the next has it at once", queue.next()).await;
    assert!(next.token() > guard.token());
    let pushes = ours.capabilities().pushes;
    let limit = if pushes { handoff_limit(stage) } else { stage.ttl() / 3 + handoff_limit(stage) };
    let reason = within(limit, "the holder is told", guard.lost()).await;
    assert!(!pushes || reason == LossReason::Broken, "told {reason:?}");
    assert_eq!(next.state(), State::Held);
}

/// A holder that attached a ticket is notified of a forced release like any other.
pub async fn a_forced_release_is_reported_to_an_attached_holder(stage: &dyn Stage, kind: LockKind) {
    let (ours, theirs, operator) =
        (stage.client().await, stage.client().await, stage.client().await);
    let lock = kind.new_lock(&ours, "broken", options(stage).detachable());
    let ticket = lock.lock().await.unwrap().detach().await.unwrap();
    let guard = theirs.attach(&ticket).await.unwrap();
    operator.force_release("broken", Break::Now).await.unwrap();
    let pushes = ours.capabilities().pushes;
    let limit = if pushes { handoff_limit(stage) } else { stage.ttl() / 3 + handoff_limit(stage) };
    let reason = within(limit, "whoever attached is told", guard.lost()).await;
    assert!(!pushes || reason == LossReason::Broken, "told {reason:?}");
}

/// A revoked lock (`Break::WhenLeaseEnds`) remains held until its running lease ends.
pub async fn a_revocation_takes_effect_when_the_lease_ends(stage: &dyn Stage, kind: LockKind) {
    let ttl = stage.ttl();
    let (ours, theirs, operator) =
        (stage.client().await, stage.client().await, stage.client().await);
    let guard = kind.new_lock(&ours, "asked", options(stage)).lock().await.unwrap();
    let mut queue = WaiterQueue::new();
    queue.join(1, &kind.new_lock(&theirs, "asked", options(stage)));
    let queued = await_lock_state(&ours, "asked", |state| state.waiters.len() == 1);
    expect_ready("the waiter is seen", queued).await;

    operator.force_release("asked", Break::WhenLeaseEnds).await.unwrap();
    stage.change_leader().await;
    let seen = operator.inspect("asked").await.unwrap();
    assert!(seen.holders.iter().all(|holder| holder.revoked), "others see it: {seen:?}");
    let told = if ours.capabilities().pushes { handoff_limit(stage) } else { ttl / 2 };
    within(told, "the holder is told", until(stage, &guard, State::Uncertain)).await;
    guard.confirm().await.expect("it is still the holder's");
    let still_ours = guard.valid_for() / 2;
    not_within(still_ours, "somebody else has it before the lease ends", queue.next()).await;
    assert_eq!(guard.state(), State::Uncertain);
    let reason = within(ttl, "the running lease is the last", guard.lost()).await;
    assert_eq!(reason, LossReason::Revoked);
    let limit = stage.expiry_lag() + handoff_limit(stage);
    drop(within(limit, "the next has it when the lease ended", queue.next()).await);
}

/// A process that was stopped for longer than its lease reports the loss as soon as it resumes.
pub async fn a_stopped_process_sees_its_loss_on_resume(stage: &dyn Stage) {
    let mut process = stage.process().await.expect("there are processes");
    let locks = stage.client().await;
    let call = process.begin_lock("stopped", LockKind::Mutex.mode(), stage.ttl());
    let first = process.granted(call).await;
    process.stop();
    stage.change_leader().await;
    let lock = LockKind::Mutex.new_lock(&locks, "stopped", options(stage));
    let next =
        within(expiry_limit(stage), "a stopped process is succeeded", lock.lock()).await.unwrap();
    assert!(next.token() > first);
    process.resume();
    assert_eq!(process.state(call).await, "lost", "the first word after the stop");
    assert_eq!(next.state(), State::Held, "its late words do not touch the next");
    next.confirm().await.unwrap();
}

/// The connection between one client and a healthy backend is cut. The guard becomes uncertain. If
/// the connection returns in time, it is held again; otherwise it is lost by its deadline, and the
/// client continues with new locks.
pub async fn a_cut_connection_is_reported_by_the_guard(stage: &dyn Stage) {
    let (clock, ttl) = (stage.clock(), stage.ttl());
    let theirs = stage.client().await;
    let linked_client = stage.linked_client().await.expect("there is a connection");
    let ours = |name| LockKind::Mutex.new_lock(&linked_client.locks, name, options(stage));

    let guard = ours("healed").lock().await.unwrap();
    linked_client.link.set(LinkState::Closed);
    // A third of the ttl until the next renewal, plus some time for that to fail.
    let doubts = until(stage, &guard, State::Uncertain);
    within(ttl * 2 / 3, "the guard doubts when its connection ends", doubts).await;
    linked_client.link.set(LinkState::Up);
    let again = until(stage, &guard, State::Held);
    within(guard.valid_for(), "it is held again", again).await;
    guard.confirm().await.expect("it was never lost");
    guard.release().await.unwrap();

    let guard = ours("silent").lock().await.unwrap();
    linked_client.link.set(LinkState::Silent);
    let deadline = clock.now() + ttl;
    stage.change_leader().await;
    let doubts = until(stage, &guard, State::Uncertain);
    within(ttl * 2 / 3, "the guard doubts when nothing is answered", doubts).await;
    let reason = within(ttl, "the guard loses by its deadline", guard.lost()).await;
    assert_eq!(reason, LossReason::Expired);
    assert!(clock.now() < deadline + handoff_limit(stage), "it lost long after its deadline");
    let next = LockKind::Mutex.new_lock(&theirs, "silent", options(stage));
    let next = within(expiry_limit(stage), "the home passes it on", next.lock()).await.unwrap();
    assert!(next.token() > guard.token());
    linked_client.link.set(LinkState::Up);
    let anew =
        within(expiry_limit(stage), "the client goes on", ours("anew").lock()).await.unwrap();
    assert_eq!(anew.state(), State::Held);
    assert_eq!(guard.state(), State::Lost(LossReason::Expired), "a loss is final");
    next.confirm().await.expect("what the lost one does late does not touch the next");
}

/// Guards do not notify when they become uncertain, so this polls.
async fn until(stage: &dyn Stage, guard: &Guard, state: State) {
    while guard.state() != state {
        tokio::time::sleep(stage.ttl() / 200).await;
    }
}
