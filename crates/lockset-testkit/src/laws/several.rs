//! Acquiring several locks at once.

use lockset::{Error, Lockable, Lockset, all};
use tokio::task::JoinSet;

use crate::law_support::{expect_free_soon, handoff_limit, options, soon, within};
use crate::lock_kind::LockKind;
use crate::stage::Stage;

/// Either all locks are held or none, on one backend and on two.
pub async fn several_locks_are_acquired_all_or_none(stage: &dyn Stage, kind: LockKind) {
    let (ours, theirs, far) =
        (stage.client().await, stage.client().await, stage.other_backend().await);
    let one = |locks: &Lockset, name| kind.new_lock(locks, name, options(stage));
    for homes in [[&ours, &ours, &ours], [&far, &ours, &far]] {
        let names = ["c", "b", "a"];
        let locks = homes.iter().zip(names).map(|(home, name)| one(home, name).lockable());
        // A lock that is listed twice is acquired once.
        let wanted: Vec<Lockable> = locks.chain([one(&ours, "b").lockable()]).collect();
        let set = all(wanted).unwrap();

        let obstacle = one(&theirs, "b").lock().await.unwrap();
        assert!(set.try_lock().await.unwrap().is_none(), "one of them was taken");
        let late = set.lock_within(handoff_limit(stage) / 2).await;
        match late {
            Err(Error::Timeout { name, .. }) => {
                assert_eq!(name.as_str(), "b", "who was in the way");
            }
            other => panic!("a timeout that names b, not {other:?}"),
        }
        for (home, name) in homes.iter().zip(names).filter(|(_, name)| *name != "b") {
            expect_free_soon(stage, home, name).await;
        }
        obstacle.release().await.unwrap();
        let guards = soon(stage, "all are free", set.lock()).await.unwrap();
        assert_eq!(guards.iter().count(), 3);
        for (home, name) in homes.iter().zip(names) {
            let seen = home.inspect(name).await.unwrap();
            assert_eq!(seen.holders.first().and_then(|h| h.token), guards.token(name), "{name}");
        }
        guards.release().await.unwrap();
        for (home, name) in homes.iter().zip(names) {
            expect_free_soon(stage, home, name).await;
        }
    }
}

/// Clients that list the same locks in different orders do not deadlock.
pub async fn opposite_lock_orders_do_not_deadlock(stage: &dyn Stage) {
    let far = stage.other_backend().await;
    let mut tasks = JoinSet::new();
    for turned in [false, true, false, true] {
        let near = stage.client().await;
        let mut wanted = vec![
            Lockable::from(near.mutex("x").unwrap().with(options(stage))),
            Lockable::from(near.mutex("y").unwrap().with(options(stage))),
            Lockable::from(far.mutex("x").unwrap().with(options(stage))),
        ];
        if turned {
            wanted.reverse();
        }
        let set = all(wanted).unwrap();
        tasks.spawn(async move {
            for _ in 0..10 {
                let guards = set.lock().await.unwrap();
                tokio::task::yield_now().await;
                guards.release().await.unwrap();
            }
        });
    }
    within(stage.ttl() * 10, "all had all locks ten times", tasks.join_all()).await;
}
