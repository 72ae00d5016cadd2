//! What other clients see of a lock: watch, list, notes.

use futures_util::StreamExt;
use lockset::engine::Wait;
use lockset::{LockState, Lockset};

use crate::law_support::{
    WaiterQueue, await_lock_state, claim, expiry_limit, handoff_limit, options, soon, within,
};
use crate::lock_kind::LockKind;
use crate::stage::Stage;

/// A watch reports every change: a grant, a waiter, a hand-off, the end of a lease, a release.
pub async fn watch_reports_every_change(stage: &dyn Stage, kind: LockKind) {
    let (ours, theirs, observer) =
        (stage.client().await, stage.client().await, stage.client().await);
    let mut states = observer.watch("seen/").unwrap();
    let mut until = async |limit, what: &str, matches: &dyn Fn(&LockState) -> bool| {
        let told = async {
            loop {
                let state = states.next().await.expect("a watch does not end").unwrap();
                assert_eq!(state.name.as_str(), "seen/it", "a name that is not watched");
                if matches(&state) {
                    return state;
                }
            }
        };
        within(limit, what, told).await
    };
    let short = handoff_limit(stage);
    let other_backend = kind.new_lock(&ours, "unseen", options(stage)).lock().await.unwrap();
    let guard = kind.new_lock(&ours, "seen/it", options(stage)).lock().await.unwrap();
    let held_by = |token| {
        move |state: &LockState| state.holders.iter().map(|holder| holder.token).eq([Some(token)])
    };
    until(short, "the grant", &held_by(guard.token())).await;
    let mut queue = WaiterQueue::new();
    queue.join(1, &kind.new_lock(&theirs, "seen/it", options(stage)));
    until(short, "the waiter", &|state| state.waiters.len() == 1).await;
    guard.release().await.unwrap();
    let (_, next) = soon(stage, "the hand-off", queue.next()).await;
    until(short, "the hand-off", &held_by(next.token())).await;
    next.release().await.unwrap();
    let gone = until(short, "the release", &|state| state.holders.is_empty()).await;
    assert!(gone.waiters.is_empty(), "{gone:?}");

    // A lease that ends while another claim waits: two changes without any request.
    let engine = stage.engine().await;
    let left = claim(stage, "seen/it", kind.mode());
    let grant = engine.acquire(&left, Wait::No).await.unwrap().granted().expect("it is free");
    until(short, "the bare grant", &held_by(grant.token)).await;
    queue.join(2, &kind.new_lock(&theirs, "seen/it", options(stage)));
    // Watched all the time: a look afterwards would see the change in any case.
    let limit = expiry_limit(stage);
    let inherited =
        |state: &LockState| state.holders.iter().any(|holder| holder.token > Some(grant.token));
    let ((_, successor), seen) = tokio::join!(
        within(limit, "the lease ends", queue.next()),
        until(limit, "the heir", &inherited),
    );
    assert!(held_by(successor.token())(&seen), "{seen:?}");
    other_backend.release().await.unwrap();
}

/// A list shows the holders and waiters under a prefix, sorted by name, and nothing else.
pub async fn list_shows_holders_and_waiters(stage: &dyn Stage, kind: LockKind) {
    let (ours, theirs, observer) =
        (stage.client().await, stage.client().await, stage.client().await);
    let take = async |locks: &Lockset, name: &str| {
        kind.new_lock(locks, name, options(stage).note(format!("note of {name}")))
            .lock()
            .await
            .unwrap()
    };
    let (b, a) = (take(&ours, "list/b").await, take(&theirs, "list/a").await);
    let beside = take(&ours, "listless").await;
    let queue = WaiterQueue::new();
    queue.join(1, &kind.new_lock(&theirs, "list/b", options(stage).note("patient")));
    let queued = await_lock_state(&observer, "list/b", |state| state.waiters.len() == 1);
    soon(stage, "the waiter is seen", queued).await;

    let seen = observer.list("list/").await.unwrap();
    let names: Vec<&str> = seen.iter().map(|state| state.name.as_str()).collect();
    assert_eq!(names, ["list/a", "list/b"], "in order, and only with the prefix");
    for (state, guard) in seen.iter().zip([&a, &b]) {
        let holder = state.holders.first().expect("it is held");
        assert_eq!(holder.token, Some(guard.token()));
        assert_eq!((holder.claim, holder.mode), (Some(guard.claim_id()), kind.mode()));
        assert_eq!(*holder.note.text, *format!("note of {}", guard.name()));
        assert!(holder.left <= stage.ttl() && !holder.left.is_zero(), "{:?}", holder.left);
        assert!(!holder.revoked);
    }
    assert!(seen[0].waiters.is_empty());
    let notes: Vec<&str> = seen[1].waiters.iter().map(|waiter| &*waiter.note.text).collect();
    assert_eq!(notes, ["patient"]);
    assert_eq!(observer.list("").await.unwrap().len(), 3, "the empty prefix looks at all");
    a.release().await.unwrap();
    beside.release().await.unwrap();
    let names: Vec<_> = observer.list("list").await.unwrap().into_iter().map(|s| s.name).collect();
    assert_eq!(names.iter().map(|name| name.as_str()).collect::<Vec<_>>(), ["list/b"]);
    drop(b);
}

/// A holder can change its note while it holds, and others see it.
pub async fn a_changed_note_is_visible(stage: &dyn Stage) {
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let lock = LockKind::Mutex.new_lock(&ours, "word", options(stage).note("before"));
    let guard = lock.lock().await.unwrap();
    let says = |text: &'static str| {
        await_lock_state(&theirs, "word", move |state| {
            state.holders.first().is_some_and(|holder| &*holder.note.text == text)
        })
    };
    soon(stage, "the first word is seen", says("before")).await;
    let (change, seen) =
        tokio::join!(guard.set_note("after"), soon(stage, "the new word is seen", says("after")),);
    change.unwrap();
    assert_eq!(seen.holders[0].token, Some(guard.token()), "the lock is the same");
    tokio::time::sleep(stage.ttl()).await;
    soon(stage, "renewals keep it", says("after")).await;
    guard.release().await.unwrap();
}
