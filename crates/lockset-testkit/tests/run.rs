//! `run` and `lead`: what their errors say about the work, with faults from `lockset::testing`.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::cell::RefCell;
use std::error::Error as _;
use std::time::Duration;

use lockset::testing::TestServer;
use lockset::{Break, Error, Lockset, LossReason, RunError, State};
use tokio::time::sleep;

const SECOND: Duration = Duration::from_secs(1);

type Outcome<T> = Result<T, RunError<std::io::Error>>;

async fn done_late() -> std::io::Result<&'static str> {
    sleep(SECOND).await;
    Ok("done")
}

#[tokio::test(start_paused = true)]
async fn work_runs_under_the_lock_and_the_lock_is_free_afterwards() {
    let server = TestServer::new();
    let (ours, theirs) = (server.client().unwrap(), server.client().unwrap());
    let mutex = ours.mutex(["orders", "4/2"]).unwrap();
    let done: Outcome<_> = mutex
        .run(async |held| {
            assert_eq!((held.name(), held.state()), (mutex.name(), State::Held));
            assert!(theirs.mutex(mutex.name()).unwrap().try_lock().await.unwrap().is_none());
            done_late().await
        })
        .await;
    assert_eq!(done.unwrap(), "done");
    assert!(theirs.mutex("orders/4%2F2").unwrap().try_lock().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn work_is_not_started_without_the_lock() {
    let server = TestServer::new();
    let (ours, connection) = server.faulty_client().unwrap();
    let guard = server.client().unwrap().mutex("m").unwrap().lock().await.unwrap();
    let mut started = false;
    let mutex = ours.mutex("m").unwrap();
    let refused: Outcome<()> = mutex
        .within(2 * SECOND)
        .run(async |_| {
            started = true;
            Ok(())
        })
        .await;
    let Err(RunError::NotGranted(Error::Timeout { holder, .. })) = refused else {
        unreachable!("{refused:?}")
    };
    assert_eq!(holder.unwrap().token, Some(guard.token()));
    connection.cut();
    let refused: Outcome<()> = mutex.run(async |_| Ok(())).await;
    assert!(matches!(refused, Err(RunError::NotGranted(ref error)) if error.is_retryable()));
    assert!(!started);
}

#[tokio::test(start_paused = true)]
async fn work_is_interrupted_by_a_loss() {
    for fault in ["cut", "freeze", "lapse", "break"] {
        let server = TestServer::new();
        let (locks, connection) = server.faulty_client().unwrap();
        let other = server.client().unwrap();
        let mut steps = 0;
        let interrupted: Outcome<()> = locks
            .mutex("m")
            .unwrap()
            .run(async |_| {
                match fault {
                    "cut" => connection.cut(),
                    "freeze" => connection.freeze(),
                    "lapse" => assert_eq!(server.lapse("m").await.unwrap(), 1),
                    _ => drop(other.force_release("m", Break::Now).await.unwrap()),
                }
                loop {
                    steps += 1;
                    sleep(SECOND).await;
                }
            })
            .await;
        let Err(RunError::Interrupted(Error::Lost { name, reason })) = interrupted else {
            unreachable!("{fault}: {interrupted:?}")
        };
        assert_eq!(name.as_str(), "m");
        let (why, most) = match fault {
            "break" => (LossReason::Broken, 1),
            "lapse" => (LossReason::Expired, 1),
            _ => (LossReason::Expired, 30),
        };
        assert_eq!(reason, why, "{fault}");
        assert!(steps <= most, "{fault}: {steps} steps");
    }
}

#[tokio::test(start_paused = true)]
async fn work_that_is_done_after_a_loss_is_told_from_work_that_is_not() {
    let server = TestServer::new();
    let (locks, connection) = server.faulty_client().unwrap();
    let other = server.client().unwrap();
    let done: Outcome<()> = locks
        .mutex("m")
        .unwrap()
        .run(async |held| {
            connection.freeze(); // So that the guard does not hear of the break.
            other.force_release("m", Break::Now).await.unwrap();
            assert_eq!(held.state(), State::Held);
            let connection = connection.clone();
            tokio::spawn(async move {
                sleep(SECOND).await;
                connection.restore();
            });
            Ok(())
        })
        .await;
    let Err(RunError::DoneButLost(error)) = &done else { unreachable!("{done:?}") };
    assert!(matches!(error, Error::NotHeld { .. } | Error::Lost { .. }), "{error}");
    assert!(done.unwrap_err().to_string().starts_with("the work is done, but"));
}

#[tokio::test(start_paused = true)]
async fn a_release_without_a_reply_is_no_error_of_the_work() {
    let server = TestServer::new();
    let (locks, connection) = server.faulty_client().unwrap();
    let done: Outcome<_> = locks
        .mutex("m")
        .unwrap()
        .run(async |_| {
            connection.cut();
            Ok(7)
        })
        .await;
    assert_eq!(done.unwrap(), 7);
    connection.restore();
    let other = server.client().unwrap().mutex("m").unwrap();
    other.lock_within(2 * SECOND).await.unwrap().release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_error_of_the_work_comes_out_and_the_lock_is_free() {
    let server = TestServer::new();
    let locks = server.client().unwrap();
    let mutex = locks.mutex("m").unwrap();
    let failed: Outcome<()> = mutex.run(async |_| Err(std::io::Error::other("no paper"))).await;
    assert!(matches!(&failed, Err(RunError::Failed(error)) if error.to_string() == "no paper"));
    let error = failed.unwrap_err();
    assert_eq!((error.to_string(), error.source().is_none()), ("no paper".to_owned(), true));
    assert!(mutex.try_lock().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn sides_and_permits_run_work_too() {
    async fn nested(locks: &Lockset) -> lockset::Result<usize> {
        let (book, pool) = (locks.rwlock("book")?, locks.semaphore("pool", 3)?);
        let reader = book.reader();
        let both = reader.run(async |_| {
            book.reader().within(SECOND).run(async |_| locks.inspect("book").await).await
        });
        let readers = both.await.map_err(|error| match error {
            RunError::Failed(inner) => Error::from(inner),
            RunError::NotGranted(error) | RunError::Interrupted(error) => error,
            other => unreachable!("{other:?}"),
        })?;
        book.writer().run(async |_| Ok::<_, lockset::Error>(())).await?;
        pool.permits(2)?
            .run(async |_| Ok(pool.run(async |_| pool.try_acquire().await).await?))
            .await?;
        Ok(readers.holders.len())
    }
    let server = TestServer::new();
    assert_eq!(nested(&server.client().unwrap()).await.unwrap(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_leader_campaigns_again_after_a_loss_and_over_an_outage() {
    let server = TestServer::new();
    let (locks, connection) = server.faulty_client().unwrap();
    let election = locks.election("chair").unwrap();
    let terms = RefCell::new(Vec::new());
    let led = election.lead(async |term| {
        terms.borrow_mut().push(term.token());
        let number = terms.borrow().len();
        match number {
            1 => drop(server.lapse("chair").await.unwrap()),
            2 => {
                connection.cut();
                let connection = connection.clone();
                tokio::spawn(async move {
                    sleep(100 * SECOND).await;
                    connection.restore();
                });
            }
            _ => return std::io::Result::Ok("enough"),
        }
        std::future::pending().await
    });
    assert_eq!(led.await.unwrap(), "enough");
    let terms = terms.into_inner();
    assert!(terms.len() == 3 && terms.is_sorted(), "{terms:?}");
    assert!(election.leader().await.unwrap().is_none(), "it resigned");
}

#[tokio::test(start_paused = true)]
async fn leading_ends_when_the_client_is_closed() {
    let server = TestServer::new();
    let locks = server.client().unwrap();
    let election = locks.election("chair").unwrap();
    let led = election.lead(async |_| std::future::pending::<std::io::Result<()>>().await);
    let (led, closed) = tokio::join!(led, async {
        sleep(SECOND).await;
        locks.close().await
    });
    closed.unwrap();
    assert!(matches!(led, Err(RunError::NotGranted(Error::Closed))), "{led:?}");
}

#[tokio::test(start_paused = true)]
async fn a_dropped_run_releases() {
    let server = TestServer::new();
    let locks = server.client().unwrap();
    let mutex = locks.mutex("m").unwrap();
    let run = mutex.run(async |_| std::future::pending::<std::io::Result<()>>().await);
    assert!(tokio::time::timeout(SECOND, run).await.is_err());
    mutex.lock_within(SECOND).await.unwrap().release().await.unwrap();
}
