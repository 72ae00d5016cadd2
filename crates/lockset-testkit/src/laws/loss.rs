//! A guard is honest about what it has.

use lockset::engine::trusted_until;
use lockset::{Break, Guard, LossReason, State};

use crate::form::Form;
use crate::stage::{Connection, Stage};
use crate::tools::{Line, lapse, not_within, patience, prepared, soon, state_with, options, within};

/// When the home stops answering, the guard says so: first in doubt, then lost, by its deadline
/// and before anybody else is granted the lock.
pub async fn a_frozen_server_loses_the_guard_by_its_deadline(stage: &dyn Stage, form: Form) {
    let (clock, ttl) = (stage.clock(), stage.ttl());
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let guard = form.of(&ours, "frozen", options(stage)).lock().await.unwrap();
    let mut line = Line::new();
    line.join(1, &form.of(&theirs, "frozen", options(stage)));
    let queued = state_with(&ours, "frozen", |state| state.waiters.len() == 1);
    prepared("the waiter is seen", queued).await;
    assert_eq!(guard.state(), State::Held);

    stage.freeze().await;
    let frozen = clock.now();
    let uncertain = until(stage, &guard, State::Uncertain);
    within(ttl, "the guard doubts before it loses", uncertain).await;
    let reason = within(ttl, "the guard loses by its deadline", guard.lost()).await;
    assert_eq!(reason, LossReason::Expired);
    let lost = clock.now();
    assert!(lost.saturating_duration_since(frozen) > ttl / 3, "it was given up long before its deadline");
    assert_eq!(guard.state(), State::Lost(LossReason::Expired));

    stage.thaw().await;
    // What waited for the ice may take as long to come back as a lease lasts.
    let after_the_thaw = within(lapse(stage), "the next has it after the thaw", line.next());
    let (_, next) = after_the_thaw.await;
    assert!(next.token() > guard.token());
    assert_eq!(guard.state(), State::Lost(LossReason::Expired), "a loss is final");
    guard.release().await.expect_err("a lost lock cannot be released as if nothing happened");
}

/// Nothing is confirmed from some moment on, so one lease later the guard cannot say `Held`: not
/// while we watch, and not when it is asked right after a pause.
pub async fn a_guard_never_says_held_after_its_deadline(stage: &dyn Stage, form: Form) {
    let (clock, ttl) = (stage.clock(), stage.ttl());
    let locks = stage.client().await;
    let watched = form.of(&locks, "watched", options(stage)).lock().await.unwrap();
    let paused = form.of(&locks, "paused", options(stage)).lock().await.unwrap();
    let fixed = form.of(&locks, "fixed", options(stage).no_renewal()).lock().await.unwrap();
    stage.freeze().await;
    let deadline = trusted_until(clock.now(), ttl);
    loop {
        // Asked before the state: the answer may be late, the question not.
        let before = clock.now();
        let state = watched.state();
        if let State::Lost(_) = state {
            break;
        }
        assert!(before < deadline, "{state:?} {:?} after its deadline", before.saturating_duration_since(deadline));
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

/// A lock that an operator frees at once tells its holder at once where the engine pushes, and at
/// its next renewal where it does not.
pub async fn a_break_now_is_told_at_once(stage: &dyn Stage, form: Form) {
    let (ours, theirs, operator) =
        (stage.client().await, stage.client().await, stage.client().await);
    let guard = form.of(&ours, "broken", options(stage)).lock().await.unwrap();
    let mut line = Line::new();
    line.join(1, &form.of(&theirs, "broken", options(stage)));
    let queued = state_with(&ours, "broken", |state| state.waiters.len() == 1);
    prepared("the waiter is seen", queued).await;

    stage.change_leader().await;
    let broken = operator.force_release("broken", Break::Now).await.unwrap();
    let tokens: Vec<_> = broken.iter().map(|holder| holder.token).collect();
    assert_eq!(tokens, [Some(guard.token())], "who it was taken from");
    let (_, next) = soon(stage, "the next has it at once", line.next()).await;
    assert!(next.token() > guard.token());
    let pushes = ours.capabilities().pushes;
    let limit = if pushes { patience(stage) } else { stage.ttl() / 3 + patience(stage) };
    let reason = within(limit, "the holder is told", guard.lost()).await;
    assert!(!pushes || reason == LossReason::Broken, "told {reason:?}");
    assert_eq!(next.state(), State::Held);
}

/// A holder that has its lock by a ticket is told of a break as any other.
pub async fn a_break_now_is_told_to_whoever_attached(stage: &dyn Stage, form: Form) {
    let (ours, theirs, operator) =
        (stage.client().await, stage.client().await, stage.client().await);
    let lock = form.of(&ours, "broken", options(stage).detachable());
    let ticket = lock.lock().await.unwrap().detach().await.unwrap();
    let guard = theirs.attach(&ticket).await.unwrap();
    operator.force_release("broken", Break::Now).await.unwrap();
    let pushes = ours.capabilities().pushes;
    let limit = if pushes { patience(stage) } else { stage.ttl() / 3 + patience(stage) };
    let reason = within(limit, "whoever attached is told", guard.lost()).await;
    assert!(!pushes || reason == LossReason::Broken, "told {reason:?}");
}

/// A lock that an operator asks for politely stays the holder's until its running lease ends.
pub async fn a_gentle_break_ends_with_the_lease(stage: &dyn Stage, form: Form) {
    let ttl = stage.ttl();
    let (ours, theirs, operator) =
        (stage.client().await, stage.client().await, stage.client().await);
    let guard = form.of(&ours, "asked", options(stage)).lock().await.unwrap();
    let mut line = Line::new();
    line.join(1, &form.of(&theirs, "asked", options(stage)));
    let queued = state_with(&ours, "asked", |state| state.waiters.len() == 1);
    prepared("the waiter is seen", queued).await;

    operator.force_release("asked", Break::WhenLeaseEnds).await.unwrap();
    stage.change_leader().await;
    let seen = operator.inspect("asked").await.unwrap();
    assert!(seen.holders.iter().all(|holder| holder.revoked), "others see it: {seen:?}");
    let told = if ours.capabilities().pushes { patience(stage) } else { ttl / 2 };
    within(told, "the holder is told", until(stage, &guard, State::Uncertain)).await;
    guard.confirm().await.expect("it is still the holder's");
    let still_ours = guard.valid_for() / 2;
    not_within(still_ours, "somebody else has it before the lease ends", line.next()).await;
    assert_eq!(guard.state(), State::Uncertain);
    let reason = within(ttl, "the running lease is the last", guard.lost()).await;
    assert_eq!(reason, LossReason::Revoked);
    let limit = stage.lag() + patience(stage);
    drop(within(limit, "the next has it when the lease ended", line.next()).await);
}

/// A process that was stopped beyond its lease knows it as soon as it goes on.
pub async fn a_stopped_process_knows_that_it_lost(stage: &dyn Stage) {
    let mut process = stage.process().await.expect("there are processes");
    let locks = stage.client().await;
    let call = process.begin_lock("stopped", Form::Mutex.mode(), stage.ttl());
    let first = process.granted(call).await;
    process.stop();
    stage.change_leader().await;
    let lock = Form::Mutex.of(&locks, "stopped", options(stage));
    let next = within(lapse(stage), "a stopped process is succeeded", lock.lock()).await.unwrap();
    assert!(next.token() > first);
    process.resume();
    assert_eq!(process.state(call).await, "lost", "the first word after the stop");
    assert_eq!(next.state(), State::Held, "its late words do not touch the next");
    next.confirm().await.unwrap();
}

/// The connection between one client and its home is cut, while the home is well. The guard doubts;
/// a connection that comes back in time ends the doubt, and one that does not is a loss by the
/// deadline. Then the client goes on with new locks.
pub async fn a_cut_session_is_told(stage: &dyn Stage) {
    let (clock, ttl) = (stage.clock(), stage.ttl());
    let theirs = stage.client().await;
    let linked = stage.linked().await.expect("there is a connection");
    let ours = |name| Form::Mutex.of(&linked.locks, name, options(stage));

    let guard = ours("healed").lock().await.unwrap();
    linked.link.set(Connection::Ended);
    // A third of it until the next renewal, and some time for that to fail.
    let doubts = until(stage, &guard, State::Uncertain);
    within(ttl * 2 / 3, "the guard doubts when its connection ends", doubts).await;
    linked.link.set(Connection::Whole);
    let again = until(stage, &guard, State::Held);
    within(guard.valid_for(), "it is held again", again).await;
    guard.confirm().await.expect("it was never lost");
    guard.release().await.unwrap();

    let guard = ours("silent").lock().await.unwrap();
    linked.link.set(Connection::Silent);
    let deadline = clock.now() + ttl;
    stage.change_leader().await;
    let doubts = until(stage, &guard, State::Uncertain);
    within(ttl * 2 / 3, "the guard doubts when nothing is answered", doubts).await;
    let reason = within(ttl, "the guard loses by its deadline", guard.lost()).await;
    assert_eq!(reason, LossReason::Expired);
    assert!(clock.now() < deadline + patience(stage), "it lost long after its deadline");
    let next = Form::Mutex.of(&theirs, "silent", options(stage));
    let next = within(lapse(stage), "the home passes it on", next.lock()).await.unwrap();
    assert!(next.token() > guard.token());
    linked.link.set(Connection::Whole);
    let anew = within(lapse(stage), "the client goes on", ours("anew").lock()).await.unwrap();
    assert_eq!(anew.state(), State::Held);
    assert_eq!(guard.state(), State::Lost(LossReason::Expired), "a loss is final");
    next.confirm().await.expect("what the lost one does late does not touch the next");
}

/// Nobody tells when a guard begins to doubt, so it is asked again and again.
async fn until(stage: &dyn Stage, guard: &Guard, state: State) {
    while guard.state() != state {
        tokio::time::sleep(stage.ttl() / 200).await;
    }
}
