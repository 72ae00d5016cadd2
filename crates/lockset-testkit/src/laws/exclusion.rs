//! One holder at a time, and independent names.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::join_all;
use tokio::task::JoinSet;

use crate::law_support::{options, soon, within};
use crate::lock_kind::LockKind;
use crate::stage::Stage;

/// Many clients and tasks contend for one lock; one holds it at a time.
pub async fn two_claims_never_hold_at_once(stage: &dyn Stage, kind: LockKind) {
    let inside = Arc::new(AtomicUsize::new(0));
    let work = stage.ttl() / 400;
    let mut tasks = JoinSet::new();
    for _ in 0..3 {
        let lock = kind.new_lock(&stage.client().await, "shelf", options(stage));
        for _ in 0..3 {
            let (lock, inside) = (lock.clone(), inside.clone());
            tasks.spawn(async move {
                for _ in 0..5 {
                    let guard = lock.lock().await.unwrap();
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "somebody was inside");
                    tokio::time::sleep(work).await;
                    assert!(lock.try_lock().await.unwrap().is_none(), "it was free while held");
                    inside.fetch_sub(1, Ordering::SeqCst);
                    guard.release().await.unwrap();
                }
            });
        }
    }
    within(stage.ttl() * 20, "45 turns of 9 tasks", tasks.join_all()).await;
}

/// Many clients may connect to an unused backend at the same time: none is rejected, and they
/// exclude each other.
pub async fn many_clients_may_start_on_an_empty_backend_at_once(stage: &dyn Stage) {
    let clients = join_all((0..8).map(|_| stage.client())).await;
    let inside = AtomicUsize::new(0);
    let visits = clients.iter().map(|locks| async {
        let lock = LockKind::Mutex.new_lock(locks, "hall", options(stage));
        let guard = lock.lock().await.unwrap();
        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "they did not meet");
        tokio::task::yield_now().await;
        inside.fetch_sub(1, Ordering::SeqCst);
        guard.release().await.unwrap();
    });
    within(stage.ttl(), "all were inside", join_all(visits)).await;
}

/// Names that look alike, contain each other, or need escaping are still different locks.
pub async fn names_are_independent(stage: &dyn Stage) {
    let names = ["a", "a/b", "ab", "A", "a b", "a:b", "{a}", "a%2Fb", "a_b", "größe", "a/b/c", "*"];
    let (ours, theirs) = (stage.client().await, stage.client().await);
    let mut guards = Vec::new();
    for name in names {
        let lock = LockKind::Mutex.new_lock(&ours, name, options(stage));
        let guard = soon(stage, name, lock.try_lock()).await.unwrap();
        guards.push(guard.unwrap_or_else(|| panic!("{name} was taken together with another")));
    }
    for (name, guard) in names.into_iter().zip(guards) {
        let lock = LockKind::Mutex.new_lock(&theirs, name, options(stage));
        assert!(lock.try_lock().await.unwrap().is_none(), "{name} was freed with another");
        guard.release().await.unwrap();
        assert!(lock.try_lock().await.unwrap().is_some(), "{name} was released");
    }
}
