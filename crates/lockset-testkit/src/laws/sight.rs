//! What others see of a lock.

use futures_util::StreamExt;
use lockset::engine::Wait;
use lockset::{LockState, Lockset};

use crate::form::Form;
use crate::stage::Stage;
use crate::tools::{Line, claim, lapse, patience, soon, state_with, options, within};

/// A watch tells of every change: a grant, a waiter, a hand-off, the end of a lease, a release.
pub async fn watch_tells_of_changes(stage: &dyn Stage, form: Form) {
    let (ours, theirs, eye) = (stage.client().await, stage.client().await, stage.client().await);
    let mut states = eye.watch("seen/").unwrap();
    let mut until = async |limit, what: &str, as_told: &dyn Fn(&LockState) -> bool| {
        let told = async {
            loop {
                let state = states.next().await.expect("a watch does not end").unwrap();
                assert_eq!(state.name.as_str(), "seen/it", "a name that is not watched");
                if as_told(&state) {
                    return state;
                }
            }
        };
        within(limit, what, told).await
    };
    let short = patience(stage);
    let elsewhere = form.of(&ours, "unseen", options(stage)).lock().await.unwrap();
    let guard = form.of(&ours, "seen/it", options(stage)).lock().await.unwrap();
    let held_by = |token| move |state: &LockState| {
        state.holders.iter().map(|holder| holder.token).eq([Some(token)])
    };
    until(short, "the grant", &held_by(guard.token())).await;
    let mut line = Line::new();
    line.join(1, &form.of(&theirs, "seen/it", options(stage)));
    until(short, "the waiter", &|state| state.waiters.len() == 1).await;
    guard.release().await.unwrap();
    let (_, next) = soon(stage, "the hand-off", line.next()).await;
    until(short, "the hand-off", &held_by(next.token())).await;
    next.release().await.unwrap();
    let gone = until(short, "the release", &|state| state.holders.is_empty()).await;
    assert!(gone.waiters.is_empty(), "{gone:?}");

    // A lease that ends with somebody behind it: two changes that nobody asked for.
    let engine = stage.engine().await;
    let left = claim(stage, "seen/it", form.mode());
    let grant = engine.acquire(&left, Wait::No).await.unwrap().expect("it is free");
    until(short, "the bare grant", &held_by(grant.token)).await;
    line.join(2, &form.of(&theirs, "seen/it", options(stage)));
    // Looked at all the time: whoever looks only afterwards sees it in any case.
    let limit = lapse(stage);
    let inherited = |state: &LockState| {
        state.holders.iter().any(|holder| holder.token > Some(grant.token))
    };
    let ((_, heir), seen) = tokio::join!(
        within(limit, "the lease ends", line.next()),
        until(limit, "the heir", &inherited),
    );
    assert!(held_by(heir.token())(&seen), "{seen:?}");
    elsewhere.release().await.unwrap();
}

/// A list shows what is held and waited for under a prefix, in order, and nothing else.
pub async fn list_shows_holders_and_waiters(stage: &dyn Stage, form: Form) {
    let (ours, theirs, eye) = (stage.client().await, stage.client().await, stage.client().await);
    let take = async |locks: &Lockset, name: &str| {
        form.of(locks, name, options(stage).note(format!("note of {name}"))).lock().await.unwrap()
    };
    let (b, a) = (take(&ours, "list/b").await, take(&theirs, "list/a").await);
    let beside = take(&ours, "listless").await;
    let line = Line::new();
    line.join(1, &form.of(&theirs, "list/b", options(stage).note("patient")));
    let queued = state_with(&eye, "list/b", |state| state.waiters.len() == 1);
    soon(stage, "the waiter is seen", queued).await;

    let seen = eye.list("list/").await.unwrap();
    let names: Vec<&str> = seen.iter().map(|state| state.name.as_str()).collect();
    assert_eq!(names, ["list/a", "list/b"], "in order, and only with the prefix");
    for (state, guard) in seen.iter().zip([&a, &b]) {
        let holder = state.holders.first().expect("it is held");
        assert_eq!(holder.token, Some(guard.token()));
        assert_eq!((holder.claim, holder.mode), (Some(guard.claim_id()), form.mode()));
        assert_eq!(*holder.note.text, *format!("note of {}", guard.name()));
        assert!(holder.left <= stage.ttl() && !holder.left.is_zero(), "{:?}", holder.left);
        assert!(!holder.revoked);
    }
    assert!(seen[0].waiters.is_empty());
    let notes: Vec<&str> = seen[1].waiters.iter().map(|waiter| &*waiter.note.text).collect();
    assert_eq!(notes, ["patient"]);
    assert_eq!(eye.list("").await.unwrap().len(), 3, "the empty prefix looks at all");
    a.release().await.unwrap();
    beside.release().await.unwrap();
    let names: Vec<_> = eye.list("list").await.unwrap().into_iter().map(|s| s.name).collect();
    assert_eq!(names.iter().map(|name| name.as_str()).collect::<Vec<_>>(), ["list/b"]);
    drop(b);
}

/// A holder can change its word while it holds.
pub async fn a_notes_change_is_seen(stage: &dyn Stage) {
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let lock = Form::Mutex.of(&ours, "word", options(stage).note("before"));
    let guard = lock.lock().await.unwrap();
    let says = |text: &'static str| {
        state_with(&theirs, "word", move |state| {
            state.holders.first().is_some_and(|holder| &*holder.note.text == text)
        })
    };
    soon(stage, "the first word is seen", says("before")).await;
    let (change, seen) = tokio::join!(
        guard.set_note("after"),
        soon(stage, "the new word is seen", says("after")),
    );
    change.unwrap();
    assert_eq!(seen.holders[0].token, Some(guard.token()), "the lock is the same");
    tokio::time::sleep(stage.ttl()).await;
    soon(stage, "renewals keep it", says("after")).await;
    guard.release().await.unwrap();
}
