//! The order in which waiters are served.

use lockset::engine::{Admission, Grant, Wait};
use lockset::{Lockset, Mode, Result};

use crate::law_support::{
    WaiterQueue, await_lock_state, claim, expect_free_soon, expect_ready, handoff_limit,
    not_within, options, soon,
};
use crate::lock_kind::LockKind;
use crate::stage::Stage;

/// A release admits the waiter; it does not have to wait for a lease to end.
pub async fn a_waiter_is_admitted_by_the_release_and_not_by_expiry(
    stage: &dyn Stage,
    kind: LockKind,
) {
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let holder = kind.new_lock(&ours, "door", options(stage)).lock().await.unwrap();
    let mut queue = WaiterQueue::new();
    queue.join(1, &kind.new_lock(&theirs, "door", options(stage)));
    await_waiters(&ours, "door", 1).await;
    not_within(handoff_limit(stage), "a second holder", queue.next()).await;
    let first = holder.token();
    holder.release().await.unwrap();
    let (_, next) = soon(stage, "the waiter is admitted by the release", queue.next()).await;
    assert!(next.token() > first, "{} after {first}", next.token());
}

/// Tasks of one client get the lock in the order in which they requested it.
pub async fn waiters_of_one_process_are_served_in_order(stage: &dyn Stage, kind: LockKind) {
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let mut guard = kind.new_lock(&ours, "desk", options(stage)).lock().await.unwrap();
    let lock = kind.new_lock(&theirs, "desk", options(stage));
    let mut queue = WaiterQueue::new();
    for number in 0..6 {
        queue.join(number, &lock);
        await_waiters(&ours, "desk", kind.visible_waiters(number + 1)).await;
    }
    for expected in 0..6 {
        guard.release().await.unwrap();
        let served = soon(stage, "the next in line is served", queue.next()).await;
        assert_eq!(served.0, expected, "served out of turn");
        guard = served.1;
    }
}

/// A process with many waiters does not keep the lock to itself.
pub async fn processes_take_turns(stage: &dyn Stage, kind: LockKind) {
    let (ours, even, odd) = (stage.client().await, stage.client().await, stage.client().await);
    let mut guard = kind.new_lock(&ours, "turn", options(stage)).lock().await.unwrap();
    let mut queue = WaiterQueue::new();
    for number in 0..8 {
        let client = if number % 2 == 0 { &even } else { &odd };
        queue.join(number, &kind.new_lock(client, "turn", options(stage)));
        let (evens, odds) = (number / 2 + 1, number.div_ceil(2));
        await_waiters(&ours, "turn", kind.visible_waiters(evens) + kind.visible_waiters(odds))
            .await;
    }
    for expected in 0..8 {
        guard.release().await.unwrap();
        let served = soon(stage, "the next process is served", queue.next()).await;
        assert_eq!(served.0 % 2, expected % 2, "a process had two turns in a row");
        assert_eq!(served.0, expected, "served out of turn");
        guard = served.1;
    }
}

/// A release can carry the next claim of its client: this claim is queued from then on, although it
/// has not sent a request of its own.
pub async fn a_release_can_enqueue_the_next_claim(stage: &dyn Stage) {
    let (ours, theirs, locks) = (stage.engine().await, stage.engine().await, stage.client().await);
    let [first, second, next, late] =
        std::array::from_fn(|_| claim(stage, "along", Mode::Exclusive));
    let grant = granted(ours.acquire(&first, Wait::No).await);
    let waiting = theirs.acquire(&second, Wait::Forever);
    let releasing = async {
        await_waiters(&locks, "along", 1).await;
        ours.release(&first, &grant, Some(&next)).await.unwrap()
    };
    let (waited, at_once) = tokio::join!(waiting, releasing);
    assert!(at_once.is_none(), "the next came before who waited: {at_once:?}");
    theirs.release(&second, &granted(waited), None).await.unwrap();
    let taken = theirs.acquire(&late, Wait::No).await.unwrap();
    assert!(taken.granted().is_none(), "somebody who came later was before the next");
    let served = soon(stage, "the next is served", ours.acquire(&next, Wait::Forever)).await;
    let grant = granted(served);
    ours.release(&next, &grant, None).await.unwrap();
    expect_free_soon(stage, &locks, "along").await;
}

fn granted(answer: Result<Admission>) -> Grant {
    answer.unwrap().granted().expect("it is granted")
}

/// Of several waiters a release admits one, and the others go on waiting.
pub async fn a_release_admits_exactly_one_waiter(stage: &dyn Stage, kind: LockKind) {
    let ours = stage.client().await;
    let mut guard = kind.new_lock(&ours, "seat", options(stage)).lock().await.unwrap();
    let mut queue = WaiterQueue::new();
    for number in 0..4 {
        queue.join(number, &kind.new_lock(&stage.client().await, "seat", options(stage)));
        await_waiters(&ours, "seat", number + 1).await;
    }
    for left in (0..4).rev() {
        guard.release().await.unwrap();
        guard = soon(stage, "one waiter is admitted", queue.next()).await.1;
        not_within(handoff_limit(stage), "another is admitted too", queue.next()).await;
        let seen = ours.inspect("seat").await.unwrap();
        assert_eq!((seen.holders.len(), seen.waiters.len()), (1, left), "{seen:?}");
    }
}

/// Waits until the engine knows of `count` waiters.
async fn await_waiters(locks: &Lockset, name: &str, count: usize) {
    let seen = await_lock_state(locks, name, |state| state.waiters.len() == count);
    expect_ready(&format!("{count} waiters are seen"), seen).await;
}
