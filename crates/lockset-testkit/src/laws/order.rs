//! Who comes next.

use lockset::engine::{Grant, Wait};
use lockset::{Lockset, Mode, Result};

use crate::form::Form;
use crate::stage::Stage;
use crate::tools::{
    Line, claim, not_within, patience, prepared, soon, soon_free, state_with, options,
};

/// A waiter is woken by the release, not by the end of a lease.
pub async fn a_release_admits_the_waiter_and_not_its_expiry(stage: &dyn Stage, form: Form) {
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let holder = form.of(&ours, "door", options(stage)).lock().await.unwrap();
    let mut line = Line::new();
    line.join(1, &form.of(&theirs, "door", options(stage)));
    waiters(&ours, "door", 1).await;
    not_within(patience(stage), "a second holder", line.next()).await;
    let first = holder.token();
    holder.release().await.unwrap();
    let (_, next) = soon(stage, "the waiter is admitted by the release", line.next()).await;
    assert!(next.token() > first, "{} after {first}", next.token());
}

/// Tasks of one client get the lock in the order in which they asked.
pub async fn waiters_of_one_process_are_served_in_order(stage: &dyn Stage, form: Form) {
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let mut guard = form.of(&ours, "desk", options(stage)).lock().await.unwrap();
    let lock = form.of(&theirs, "desk", options(stage));
    let mut line = Line::new();
    for number in 0..6 {
        line.join(number, &lock);
        waiters(&ours, "desk", form.visible(number + 1)).await;
    }
    for expected in 0..6 {
        guard.release().await.unwrap();
        let served = soon(stage, "the next in line is served", line.next()).await;
        assert_eq!(served.0, expected, "served out of turn");
        guard = served.1;
    }
}

/// A process with many waiters does not keep the lock to itself.
pub async fn processes_take_turns(stage: &dyn Stage, form: Form) {
    let (ours, even, odd) = (stage.client().await, stage.client().await, stage.client().await);
    let mut guard = form.of(&ours, "turn", options(stage)).lock().await.unwrap();
    let mut line = Line::new();
    for number in 0..8 {
        let client = if number % 2 == 0 { &even } else { &odd };
        line.join(number, &form.of(client, "turn", options(stage)));
        let (evens, odds) = (number / 2 + 1, number.div_ceil(2));
        waiters(&ours, "turn", form.visible(evens) + form.visible(odds)).await;
    }
    for expected in 0..8 {
        guard.release().await.unwrap();
        let served = soon(stage, "the next process is served", line.next()).await;
        assert_eq!(served.0 % 2, expected % 2, "a process had two turns in a row");
        assert_eq!(served.0, expected, "served out of turn");
        guard = served.1;
    }
}

/// A release takes the next of its client along to the queue: that one has its place from then on,
/// although it has not asked yet.
pub async fn a_release_takes_the_next_along(stage: &dyn Stage) {
    let (ours, theirs, locks) =
        (stage.engine().await, stage.engine().await, stage.client().await);
    let [first, second, next, late] =
        std::array::from_fn(|_| claim(stage, "along", Mode::Exclusive));
    let grant = granted(ours.acquire(&first, Wait::No).await);
    let waiting = theirs.acquire(&second, Wait::Forever);
    let releasing = async {
        waiters(&locks, "along", 1).await;
        ours.release(&first, &grant, Some(&next)).await.unwrap()
    };
    let (waited, at_once) = tokio::join!(waiting, releasing);
    assert!(at_once.is_none(), "the next came before who waited: {at_once:?}");
    theirs.release(&second, &granted(waited), None).await.unwrap();
    let taken = theirs.acquire(&late, Wait::No).await.unwrap();
    assert!(taken.is_none(), "somebody who came later was before the next");
    let served = soon(stage, "the next is served", ours.acquire(&next, Wait::Forever)).await;
    let grant = granted(served);
    ours.release(&next, &grant, None).await.unwrap();
    soon_free(stage, &locks, "along").await;
}

fn granted(answer: Result<Option<Grant>>) -> Grant {
    answer.unwrap().expect("it is granted")
}

/// Of several waiters a release admits one, and the others go on waiting.
pub async fn a_release_admits_exactly_one_waiter(stage: &dyn Stage, form: Form) {
    let ours = stage.client().await;
    let mut guard = form.of(&ours, "seat", options(stage)).lock().await.unwrap();
    let mut line = Line::new();
    for number in 0..4 {
        line.join(number, &form.of(&stage.client().await, "seat", options(stage)));
        waiters(&ours, "seat", number + 1).await;
    }
    for left in (0..4).rev() {
        guard.release().await.unwrap();
        guard = soon(stage, "one waiter is admitted", line.next()).await.1;
        not_within(patience(stage), "another is admitted too", line.next()).await;
        let seen = ours.inspect("seat").await.unwrap();
        assert_eq!((seen.holders.len(), seen.waiters.len()), (1, left), "{seen:?}");
    }
}

/// Waits until the engine knows of `count` waiters.
async fn waiters(locks: &Lockset, name: &str, count: usize) {
    let seen = state_with(locks, name, |state| state.waiters.len() == count);
    prepared(&format!("{count} waiters are seen"), seen).await;
}
