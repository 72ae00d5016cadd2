//! What the public types promise by their traits.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use lockset::testing::{Connection, TestServer};
use lockset::{
    All, Barrier, Builder, Election, Error, Guard, Guards, Latch, Leader, Lease, LockOptions,
    LockState, Lockable, Lockset, Mutex, Name, Note, Prefix, RunError, RwLock, Semaphore, Ticket,
    Within,
};

macro_rules! all_are {
    ($check:ident: $($type:ty),+ $(,)?) => { $($check::<$type>();)+ };
}

fn send_and_sync<T: Send + Sync + 'static>() {}

fn shown<T: std::fmt::Debug>() {}

#[test]
fn public_types_cross_threads_and_can_be_shown() {
    all_are!(send_and_sync:
        All, Barrier, Builder, Connection, Election, Error, Guard, Guards, Latch, Leader, Lease,
        LockOptions, LockState, Lockable, Lockset, Mutex, Name, Note, Prefix, RunError<Error>,
        RwLock, Semaphore, TestServer, Ticket, Within,
    );
    all_are!(shown: Builder, Connection, Guard, Guards, RunError<Error>, TestServer, Within);
}

/// Handlers of web frameworks must be `Send`.
#[tokio::test(flavor = "multi_thread")]
async fn work_under_a_lock_can_move_to_another_thread() -> lockset::Result<()> {
    let locks = Lockset::connect("memory:").await?;
    let order = String::from("42");
    let running = tokio::spawn(async move {
        let mutex = locks.mutex(["orders", &order])?.with(LockOptions::default());
        let limit = Duration::from_secs(2);
        let written = async |held: &Guard| {
            tokio::task::yield_now().await;
            Ok::<_, Error>(format!("{} {order}", held.token()))
        };
        mutex.within(limit).run(written).await?;
        mutex.run(async |held| held.confirm().await).await?;
        let sides = locks.rwlock("book")?;
        sides.reader().run(async |held| held.set_note(&order).await).await?;
        locks.semaphore("pool", 1)?.run(async |held| held.confirm().await).await?;
        let election = locks.election("chair")?;
        let terms = AtomicU32::new(0);
        let led = election.lead(async |term| {
            term.confirm().await?;
            Ok::<_, Error>(terms.fetch_add(1, Ordering::Relaxed))
        });
        assert_eq!(led.await?, 0);
        locks.close().await
    });
    running.await.map_err(|_| Error::Closed)?
}

#[cfg(feature = "blocking")]
#[test]
fn blocking_types_cross_threads() {
    use lockset::blocking;
    all_are!(send_and_sync:
        blocking::Lockset, blocking::Mutex, blocking::RwLock, blocking::Semaphore,
        blocking::Election, blocking::Latch, blocking::Barrier, blocking::All, blocking::Guard,
        blocking::Guards, blocking::Lockable, blocking::Within,
    );
}
