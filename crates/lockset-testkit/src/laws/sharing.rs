//! Readers and writers, permits, and the use of a name.

use std::collections::BTreeSet;

use lockset::engine::Wait;
use lockset::{Error, Guard, Lockset, Mode, RwLock, Semaphore, State};
use tokio::sync::mpsc::unbounded_channel;

use crate::law_support::{
    await_lock_state, claim, expect_ready, handoff_limit, not_within, options, soon,
};
use crate::lock_kind::LockKind;
use crate::stage::Stage;

/// Readers hold together, a writer holds alone.
pub async fn readers_share_and_writers_exclude(stage: &dyn Stage) {
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let (here, there) = (rwlock(stage, &ours), rwlock(stage, &theirs));
    let readers = [
        soon(stage, "a first reader", here.read()).await.unwrap(),
        soon(stage, "another of the same client", here.read()).await.unwrap(),
        soon(stage, "one of another client", there.read()).await.unwrap(),
    ];
    let tokens: BTreeSet<_> = readers.iter().map(Guard::token).collect();
    assert_eq!(tokens.len(), 3, "every grant has its own token");
    assert!(here.try_write().await.unwrap().is_none(), "a writer beside readers");
    let mutex = theirs.mutex("book").unwrap();
    assert!(mutex.try_lock().await.unwrap().is_none(), "a mutex is a writer");
    for reader in readers {
        assert!(there.try_write().await.unwrap().is_none(), "a writer beside a reader");
        reader.release().await.unwrap();
    }
    let writer = soon(stage, "a writer after the readers", there.write()).await.unwrap();
    assert!(tokens.iter().all(|token| *token < writer.token()));
    assert!(here.try_read().await.unwrap().is_none(), "a reader beside a writer");
    assert!(here.try_write().await.unwrap().is_none(), "two writers");
    writer.release().await.unwrap();
}

/// Readers that arrive after a waiting writer queue behind it, and are admitted together after it.
pub async fn a_waiting_writer_is_not_starved(stage: &dyn Stage) {
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let (here, there) = (rwlock(stage, &ours), rwlock(stage, &theirs));
    let reader = here.read().await.unwrap();
    let (tell, mut served) = unbounded_channel();
    for (index, write) in [true, false, false].into_iter().enumerate() {
        let (lock, tell) = (there.clone(), tell.clone());
        tokio::spawn(async move {
            let guard = if write { lock.write().await } else { lock.read().await };
            // If there is no receiver any more, the law is over.
            let _ = tell.send((write, guard.unwrap()));
        });
        let queued = await_lock_state(&ours, "book", |state| state.waiters.len() == index + 1);
        expect_ready("they queue", queued).await;
    }
    assert!(here.try_read().await.unwrap().is_none(), "a reader passed the waiting writer");
    not_within(handoff_limit(stage), "somebody passed the writer", served.recv()).await;
    reader.release().await.unwrap();
    let (writes, guard) = soon(stage, "the writer", served.recv()).await.unwrap();
    assert!(writes, "a reader passed the writer");
    not_within(handoff_limit(stage), "a reader came in with the writer", served.recv()).await;
    guard.release().await.unwrap();
    let first = soon(stage, "a reader", served.recv()).await.unwrap();
    let second = soon(stage, "the other, together", served.recv()).await.unwrap();
    assert!(!first.0 && !second.0);
    assert_eq!((first.1.state(), second.1.state()), (State::Held, State::Held));
}

/// A writer that downgrades admits readers, keeps its token, and holds without interruption.
pub async fn a_downgrade_lets_readers_in_and_keeps_the_token(stage: &dyn Stage) {
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let (here, there) = (rwlock(stage, &ours), rwlock(stage, &theirs));
    let writer = here.write().await.unwrap();
    let token = writer.token();
    let waiting = tokio::spawn(async move { (there.read().await.unwrap(), there) });
    let queued = await_lock_state(&ours, "book", |state| state.waiters.len() == 1);
    expect_ready("a reader waits", queued).await;
    writer.downgrade().await.unwrap();
    let (reader, there) = soon(stage, "it comes in", waiting).await.unwrap();
    assert_eq!((writer.token(), writer.mode()), (token, Mode::Shared));
    assert!(reader.token() > token);
    assert!(there.try_write().await.unwrap().is_none(), "the first never let go");
    writer.confirm().await.unwrap();
    writer.downgrade().await.expect("once more is harmless");
    tokio::time::sleep(stage.ttl()).await;
    assert_eq!(writer.state(), State::Held, "it is renewed as a reader");
    writer.release().await.unwrap();
    reader.release().await.unwrap();
    assert!(there.try_write().await.unwrap().is_some(), "both are gone");
}

/// The permits held never exceed the limit.
pub async fn permits_add_up_to_the_limit(stage: &dyn Stage) {
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let (here, there) = (semaphore(stage, &ours, 5), semaphore(stage, &theirs, 5));
    let two = soon(stage, "two of five", here.acquire_many(2)).await.unwrap();
    let three = soon(stage, "three of five", there.acquire_many(3)).await.unwrap();
    assert!(here.try_acquire().await.unwrap().is_none(), "a sixth permit");
    two.release().await.unwrap();
    assert!(there.try_acquire_many(3).await.unwrap().is_none(), "a sixth permit");
    let one = soon(stage, "one came back", here.try_acquire()).await.unwrap();
    let other = soon(stage, "another came back", there.try_acquire()).await.unwrap();
    assert!(one.is_some() && other.is_some(), "two came back");
    assert!(here.try_acquire().await.unwrap().is_none(), "a sixth permit");
    three.release().await.unwrap();
    drop((one, other));
    let all = soon(stage, "all came back", here.acquire_many(5)).await.unwrap();
    assert!(
        matches!(here.acquire_many(6).await, Err(Error::Invalid { .. })),
        "more than there are"
    );
    all.release().await.unwrap();
}

/// A request for more permits than are free also makes those behind it wait.
pub async fn permits_are_served_in_strict_order(stage: &dyn Stage) {
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let (here, there) = (semaphore(stage, &ours, 3), semaphore(stage, &theirs, 3));
    let mut out = vec![here.acquire().await.unwrap(), here.acquire().await.unwrap()];
    let (tell, mut served) = unbounded_channel();
    for (index, take) in [3, 1, 2].into_iter().enumerate() {
        let (there, tell) = (there.clone(), tell.clone());
        tokio::spawn(async move {
            let guard = there.acquire_many(take).await.unwrap();
            // If there is no receiver any more, the law is over.
            let _ = tell.send((take, guard));
        });
        let queued = await_lock_state(&ours, "pool", |state| state.waiters.len() == index + 1);
        expect_ready("they queue", queued).await;
    }
    assert!(here.try_acquire().await.unwrap().is_none(), "one passed the queue");
    while let Some(guard) = out.pop() {
        not_within(handoff_limit(stage), "a small one passed the great one", served.recv()).await;
        guard.release().await.unwrap();
    }
    let (take, all) = soon(stage, "the first in line", served.recv()).await.unwrap();
    assert_eq!(take, 3, "somebody passed the first in line");
    not_within(handoff_limit(stage), "more permits than there are", served.recv()).await;
    all.release().await.unwrap();
    let first = soon(stage, "the second", served.recv()).await.unwrap();
    let second = soon(stage, "the third, together", served.recv()).await.unwrap();
    assert_eq!(first.0 + second.0, 3);
}

/// All permits are held, one each. Whichever holder releases, the waiter is served soon, and the
/// others keep their permits.
pub async fn any_returned_permit_admits_the_waiter(stage: &dyn Stage) {
    let (ours, theirs) = (stage.client().await, stage.client().await);
    // Of different clients, because a waiter may treat holders of its own client differently.
    let [here, there] = [&ours, &theirs].map(|locks| semaphore(stage, locks, 3));
    for leaver in 0..3 {
        let mut out = Vec::new();
        for pool in [&here, &there, &here] {
            out.push(expect_ready("a free permit", pool.acquire()).await.unwrap());
        }
        let pool = there.clone();
        let waiting = tokio::spawn(async move { pool.acquire().await.unwrap() });
        let queued = await_lock_state(&ours, "pool", |state| state.waiters.len() == 1);
        expect_ready("somebody waits", queued).await;
        out.remove(leaver).release().await.unwrap();
        let what = format!("the waiter is served when number {leaver} of 3 leaves");
        out.push(soon(stage, &what, waiting).await.unwrap());
        assert!(here.try_acquire().await.unwrap().is_none(), "a fourth permit");
        for guard in out {
            guard.confirm().await.expect("the others keep their permits");
            assert_eq!(guard.state(), State::Held);
            guard.release().await.unwrap();
        }
    }
}

/// A name in use as one primitive cannot be used as another.
pub async fn a_name_has_one_use_at_a_time(stage: &dyn Stage) {
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let permit = semaphore(stage, &ours, 3).acquire().await.unwrap();
    let other_limit = semaphore(stage, &theirs, 2).try_acquire().await;
    assert!(matches!(other_limit, Err(Error::Conflict { .. })), "two limits: {other_limit:?}");
    let mutex = LockKind::Mutex.new_lock(&theirs, "pool", options(stage));
    for attempt in [mutex.try_lock().await, mutex.lock_within(stage.ttl()).await.map(Some)] {
        assert!(matches!(attempt, Err(Error::Conflict { .. })), "as a mutex: {attempt:?}");
    }
    permit.release().await.unwrap();
    let guard = soon(stage, "it is free for another use", mutex.lock()).await.unwrap();
    let permit = soon(stage, "an answer", semaphore(stage, &ours, 3).acquire()).await;
    assert!(matches!(permit, Err(Error::Conflict { .. })), "as a semaphore: {permit:?}");
    guard.release().await.unwrap();
}

/// An engine that lacks a mode rejects it at once, both through the front and directly.
pub async fn an_unsupported_mode_is_refused_at_once(stage: &dyn Stage) {
    let (engine, locks) = (stage.engine().await, stage.client().await);
    let can = engine.capabilities();
    let mut missing = Vec::new();
    if !can.shared {
        missing.push(Mode::Shared);
        let read = soon(stage, "an answer", rwlock(stage, &locks).read()).await;
        assert!(matches!(read, Err(Error::Unsupported { .. })), "{read:?}");
    }
    if !can.permits {
        missing.push(Mode::Permits { take: 1, limit: 1 });
        let permit = soon(stage, "an answer", semaphore(stage, &locks, 1).acquire()).await;
        assert!(matches!(permit, Err(Error::Unsupported { .. })), "{permit:?}");
    }
    assert!(!missing.is_empty(), "this engine has all modes");
    for mode in missing {
        let claim = claim(stage, "refused", mode);
        let answer = soon(stage, "an answer", engine.acquire(&claim, Wait::Forever)).await;
        assert!(matches!(answer, Err(Error::Unsupported { .. })), "{mode}: {answer:?}");
    }
}

fn rwlock(stage: &dyn Stage, locks: &Lockset) -> RwLock {
    locks.rwlock("book").unwrap().with(options(stage))
}

fn semaphore(stage: &dyn Stage, locks: &Lockset, limit: u32) -> Semaphore {
    locks.semaphore("pool", limit).unwrap().with(options(stage))
}
