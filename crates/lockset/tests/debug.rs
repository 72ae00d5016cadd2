//! Whatever a user prints with `{:?}` fits one line, and tells which lock it is about.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::fmt::Debug;

use lockset::{LockOptions, Lockable, Lockset, all};

/// More is not one line any more.
const LINE: usize = 400;

#[track_caller]
fn assert_short(what: &dyn Debug, tells: &str) {
    let text = format!("{what:?}");
    assert!(text.len() <= LINE && !text.contains('\n'), "{} characters: {text}", text.len());
    assert!(text.contains(tells), "it does not tell {tells:?}: {text}");
}

async fn is_short_on(url: &str) {
    let locks = Lockset::connect(url).await.unwrap();
    assert_short(&locks, locks.engine());
    let mutex = locks.mutex("orders/42").unwrap().with(LockOptions::default().detachable());
    let rwlock = locks.rwlock("orders/43").unwrap();
    let semaphore = locks.semaphore("orders/44", 3).unwrap();
    assert_short(&mutex, "orders/42");
    assert_short(&rwlock, "orders/43");
    assert_short(&semaphore, "orders/44");
    assert_short(&Lockable::from(&mutex), "orders/42");
    assert_short(&locks.election("chair").unwrap(), "chair");
    assert_short(&locks.latch("latch", 2).unwrap(), "latch");
    assert_short(&locks.barrier("barrier", 2).unwrap(), "barrier");
    assert_short(&all([&mutex]).unwrap(), "orders/42");
    assert_short(&Lockset::builder(url), "Builder");
    let guard = mutex.lock().await.unwrap();
    assert_short(&guard, "orders/42");
    assert_short(&guard.grant(), "token");
    assert_short(&locks.inspect("orders/42").await.unwrap(), "orders/42");
    assert_short(&mutex.lock_within(std::time::Duration::ZERO).await.unwrap_err(), "orders/42");
    assert_short(&guard.detach().await.unwrap(), "orders/42");
    locks.close().await.unwrap();
}

#[tokio::test]
async fn every_type_has_a_one_line_debug_output() {
    is_short_on("memory:").await;
    #[cfg(feature = "local")]
    {
        let folder = tempfile::tempdir().unwrap();
        is_short_on(&format!("local:{}/locks.db", folder.path().display())).await;
    }
}
