//! What the PostgreSQL engine makes of faults: each has a clear outcome, seen on a real server.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::time::Duration;

use lockset::{Error, Guard, Lockset, LossReason};
use lockset_testkit::proxy::Proxy;
use lockset_testkit::stage::{PostgresSchema, PostgresServer};
use lockset_testkit::steps::{PendingLock, await_served, within};

const TTL: Duration = Duration::from_secs(6);
/// For what happens at once, on a busy machine.
const SOON: Duration = Duration::from_secs(3);
/// For what happens after a connection was made again, or by the next heartbeat.
const BY_HEARTBEAT: Duration = Duration::from_secs(5);

async fn client(url: &str) -> Lockset {
    Lockset::builder(url).ttl(TTL).connect().await.unwrap()
}

async fn lock(locks: &Lockset, name: &str) -> Guard {
    within(SOON, "a free lock", locks.mutex(name).unwrap().lock()).await.unwrap()
}

/// A client waits for the lock, and the server knows.
async fn spawn_waiter(locks: &Lockset, name: &str) -> PendingLock {
    let before = locks.inspect(name).await.unwrap().waiters.len();
    let mutex = locks.mutex(name).unwrap();
    let waiting = tokio::spawn(async move { mutex.lock().await });
    let queued = async {
        while locks.inspect(name).await.unwrap().waiters.len() == before {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    within(SOON, "it is queued", queued).await;
    waiting
}

/// A holder and a waiter of two clients; after `fault` the lock is held, renewed and handed over.
async fn survives(home: &PostgresSchema, url: &str, fault: impl AsyncFnOnce()) {
    let (ours, theirs) = (client(url).await, client(&home.url()).await);
    let guard = lock(&ours, "it").await;
    let token = guard.token();
    let waiting = spawn_waiter(&theirs, "it").await;
    fault().await;
    assert!(tokio::time::timeout(TTL, guard.lost()).await.is_err(), "it was renewed");
    guard.release().await.unwrap();
    let next = await_served(BY_HEARTBEAT, waiting).await;
    assert!(next.token() > token, "{} after {token}", next.token());
    next.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminated_backend_loses_neither_lock_nor_queue_position() {
    let home = PostgresSchema::start();
    survives(&home, &home.url(), async || {
        let all = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                   WHERE application_name = 'lockset'";
        assert!(home.server().ask(all).parse::<u32>().unwrap() >= 4);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_server_loses_neither_lock_nor_queue_position() {
    let home = PostgresSchema::start();
    survives(&home, &home.url(), async || home.server().restart()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_connection_is_made_again() {
    let home = PostgresSchema::start();
    let proxy = Proxy::before(home.server().port());
    let (port, schema) = (proxy.port(), home.name());
    let url = format!("postgres://postgres@127.0.0.1:{port}/postgres?schema={schema}");
    survives(&home, &url, async || proxy.cut()).await;
}

/// The reply to a request is lost: the claim id tells what became of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_reply_is_resolved_by_the_claim_id() {
    let home = PostgresSchema::start();
    let proxy = Proxy::before(home.server().port());
    let (port, schema) = (proxy.port(), home.name());
    let url = format!("postgres://postgres@127.0.0.1:{port}/postgres?schema={schema}");
    let (ours, theirs) = (client(&url).await, client(&home.url()).await);
    for round in 0..5 {
        let name = format!("reply/{round}");
        let mutex = ours.mutex(name.as_str()).unwrap();
        let locking = tokio::spawn(async move { mutex.lock().await });
        tokio::time::sleep(Duration::from_millis(round)).await;
        proxy.cut();
        let guard = within(BY_HEARTBEAT, "an answer", locking).await.unwrap().unwrap();
        let seen = theirs.inspect(name.as_str()).await.unwrap();
        assert_eq!(seen.holders.len(), 1, "{seen:?}");
        assert_eq!(seen.holders[0].token, Some(guard.token()));
        // The cut can also meet the release. Then its outcome is unknown, and the claim is
        // withdrawn in the background.
        match within(BY_HEARTBEAT, "an answer to the release", guard.release()).await {
            Ok(()) | Err(Error::Unreachable { retryable: true, .. }) => {}
            other => panic!("released, or not known, instead of {other:?}"),
        }
        let free = theirs.mutex(name.as_str()).unwrap().lock_within(BY_HEARTBEAT).await;
        assert!(free.is_ok(), "nothing is left behind: {free:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_of_the_role_do_not_reach_the_sessions() {
    let home = PostgresSchema::start();
    let (server, role) = (home.server(), format!("strict_{}", home.name()));
    client(&home.url()).await;
    server.ask(&format!(
        "CREATE ROLE {role} LOGIN SUPERUSER;
         ALTER ROLE {role} SET statement_timeout = '1ms';
         ALTER ROLE {role} SET idle_in_transaction_session_timeout = '1ms';
         ALTER ROLE {role} SET default_transaction_isolation = 'serializable';
         ALTER ROLE {role} SET synchronous_commit = 'off'"
    ));
    let url = format!("{}?schema={}", server.url_of(&role), home.name());
    let (ours, theirs) = (client(&url).await, client(&url).await);
    let guard = lock(&ours, "it").await;
    let waiting = spawn_waiter(&theirs, "it").await;
    guard.release().await.unwrap();
    await_served(BY_HEARTBEAT, waiting).await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_schema_is_made_again_and_its_locks_are_lost() {
    let home = PostgresSchema::start();
    let ours = client(&home.url()).await;
    let guard = lock(&ours, "it").await;
    home.server().ask(&format!("DROP SCHEMA {} CASCADE", home.name()));
    let lost = within(TTL, "its renewal fails", guard.lost()).await;
    assert_eq!(lost, LossReason::Forgotten);
    let again = lock(&ours, "it").await;
    assert!(again.token() > guard.token(), "the clock keeps tokens growing");
    again.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_schema_is_refused_with_what_to_do() {
    let home = PostgresSchema::start();
    client(&home.url()).await.close().await.unwrap();
    home.server().ask(&format!("UPDATE {}.meta SET version = 99", home.name()));
    let refused = Lockset::connect(&home.url()).await.unwrap_err();
    let text = refused.to_string();
    assert!(matches!(refused, Error::Unsupported { .. }), "{text}");
    assert!(text.contains("version 99") && text.contains("update the program"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn too_many_connections_are_reported_and_cost_no_lock() {
    let server = PostgresServer::start_with(&[
        "fsync=off",
        "max_connections=8",
        "superuser_reserved_connections=0",
    ]);
    let ours = client(&server.url()).await;
    let guard = lock(&ours, "it").await;
    let mut others = Vec::new();
    let refused = loop {
        match Lockset::connect(&server.url()).await {
            Ok(locks) => others.push(locks),
            Err(error) => break error,
        }
        assert!(others.len() < 8, "they all fit");
    };
    assert!(refused.to_string().contains("too many connections"), "{refused}");
    assert!(refused.is_retryable());
    drop(others);
    assert!(tokio::time::timeout(TTL, guard.lost()).await.is_err(), "it was renewed");
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_only_server_is_refused_with_the_reason() {
    let server = PostgresServer::start_with(&["fsync=off"]);
    client(&server.url()).await.close().await.unwrap();
    server.ask("ALTER SYSTEM SET default_transaction_read_only = on; SELECT pg_reload_conf()");
    let refused = Lockset::connect(&server.url()).await.unwrap_err();
    assert!(refused.to_string().contains("standby or read-only"), "{refused}");
    assert!(refused.is_retryable());
}

/// Waiters are not told: the queue of notifications is as if it were full.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_is_not_sent_costs_a_heartbeat() {
    let home = PostgresSchema::start();
    let (ours, theirs) = (client(&home.url()).await, client(&home.url()).await);
    let schema = home.name();
    home.server().ask(&format!(
        "CREATE OR REPLACE FUNCTION {schema}.tell(inbox text, message text) RETURNS void
         LANGUAGE sql AS 'SELECT NULL::void'"
    ));
    let guard = lock(&ours, "it").await;
    let waiting = spawn_waiter(&theirs, "it").await;
    guard.release().await.unwrap();
    await_served(BY_HEARTBEAT, waiting).await.release().await.unwrap();
}

/// A holder that dies without a word leaves its rows, and a sweep removes what is not used.
#[tokio::test(flavor = "multi_thread")]
async fn cycles_leave_tables_of_bounded_size() {
    let home = PostgresSchema::start();
    let (server, schema) = (home.server(), home.name());
    client(&home.url()).await;
    // The functions themselves, so that a hundred thousand cycles take seconds.
    server.ask(&format!(
        "DO $$
         DECLARE token bigint; id uuid;
         BEGIN
           FOR i IN 1..20000 LOOP
             id := gen_random_uuid();
             SELECT given INTO token FROM {schema}.exchange('', 'n' || i % 10, NULL, NULL, false,
               id, 'x', 0, 0, 1000, 2000, 30000, NULL, true, '', '');
             PERFORM {schema}.exchange('', 'n' || i % 10, id, token, false, NULL, NULL, 0, 0, 0, 0,
               0, NULL, false, '', '');
             COMMIT;
           END LOOP;
         END $$"
    ));
    let size = format!("SELECT pg_relation_size('{schema}.lock')");
    let bytes: u64 = server.ask(&size).parse().unwrap();
    assert!(bytes <= 64 * 8192, "{bytes} bytes after 20,000 cycles on 10 names");
    let hot = format!(
        "SELECT pg_stat_force_next_flush(), n_tup_hot_upd >= 0.95 * n_tup_upd
         FROM pg_stat_user_tables WHERE schemaname = '{schema}' AND relname = 'lock'"
    );
    assert!(server.ask(&hot).ends_with('t'), "updates stay in their page");
}

/// The exact fence: a transaction that relies on a lock keeps it, beyond its lease.
#[tokio::test(flavor = "multi_thread")]
async fn a_lock_waits_for_the_transaction_that_relies_on_it() {
    use lockset::LockOptions;
    use lockset::fence::assert_held;

    let home = PostgresSchema::start();
    let (ours, theirs) = (client(&home.url()).await, client(&home.url()).await);
    let (mut db, connection) =
        tokio_postgres::connect(&home.server().url(), tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    let short = LockOptions::default().ttl(Duration::from_secs(1)).no_renewal();
    let guard = ours.mutex("stock").unwrap().with(short).lock().await.unwrap();
    let write = db.transaction().await.unwrap();
    assert_held(&write, home.name(), &guard).await.unwrap();
    let mutex = theirs.mutex("stock").unwrap();
    let mut waiting = tokio::spawn(async move { mutex.lock().await });
    let early = tokio::time::timeout(Duration::from_secs(3), &mut waiting).await;
    assert!(early.is_err(), "the lease is over, the transaction is not");
    let seen = theirs.inspect("stock").await.unwrap();
    assert!(seen.holders[0].note.text.contains("in a transaction of backend"), "{seen:?}");
    write.commit().await.unwrap();
    let next = await_served(SOON, waiting).await;
    // The former holder is too late now.
    let late = db.transaction().await.unwrap();
    let refused = assert_held(&late, home.name(), &guard).await.unwrap_err();
    assert!(matches!(refused, Error::Lost { .. }), "{refused}");
    drop(late);
    // A release while the transaction is open does not let the next one in either.
    let write = db.transaction().await.unwrap();
    assert_held(&write, home.name(), &next).await.unwrap();
    next.release().await.unwrap();
    let held = ours.mutex("stock").unwrap().try_lock().await.unwrap();
    assert!(held.is_none(), "the transaction is still open");
    write.rollback().await.unwrap();
    let _free = within(SOON, "it is free", ours.mutex("stock").unwrap().lock()).await.unwrap();
}

/// A client that stops in the middle of its transaction keeps the lock for a bounded time.
#[tokio::test(flavor = "multi_thread")]
async fn an_idle_transaction_is_ended_by_the_server() {
    let home = PostgresSchema::start();
    let (ours, theirs) = (client(&home.url()).await, client(&home.url()).await);
    let (db, connection) =
        tokio_postgres::connect(&home.server().url(), tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    let guard = lock(&ours, "stock").await;
    let (schema, token) = (home.name(), guard.token());
    let check = format!("BEGIN; SELECT {schema}.assert_held('stock', {token}, '1 second')");
    db.batch_execute(&check).await.unwrap();
    guard.release().await.unwrap();
    let _next = within(SOON * 2, "the next", theirs.mutex("stock").unwrap().lock()).await.unwrap();
    assert!(db.batch_execute("COMMIT").await.is_err(), "the session was ended");
}

/// Holders that stop at every step of their work: the counter loses no update.
#[tokio::test(flavor = "multi_thread")]
async fn no_update_is_lost_whatever_step_a_holder_stops_at() {
    use lockset::LockOptions;
    use lockset::fence::assert_held;

    const TASKS: u64 = 4;
    const ROUNDS: u64 = 8;
    let home = PostgresSchema::start();
    let table = format!("stock_{}", home.name());
    home.server().ask(&format!("CREATE TABLE {table} AS SELECT 0::bigint AS count"));
    let url = home.url();
    let mut tasks = Vec::new();
    for task in 0..TASKS {
        let (locks, table, schema) = (client(&url).await, table.clone(), home.name().to_owned());
        let (mut db, connection) =
            tokio_postgres::connect(&home.server().url(), tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        tasks.push(tokio::spawn(async move {
            let mut committed = 0;
            for round in 0..ROUNDS {
                let options = LockOptions::default().ttl(Duration::from_millis(400)).no_renewal();
                let mutex = locks.mutex("stock").unwrap().with(options);
                let guard = mutex.lock().await.unwrap();
                // It stops for longer than its lease, at another step each time.
                let stop = async |step: u64| {
                    if (task + round) % 5 == step {
                        tokio::time::sleep(Duration::from_millis(700)).await;
                    }
                };
                stop(0).await;
                let write = db.transaction().await.unwrap();
                stop(1).await;
                if assert_held(&write, &schema, &guard).await.is_err() {
                    continue;
                }
                stop(2).await;
                let read = format!("SELECT count FROM {table}");
                let count: i64 = write.query_one(&read, &[]).await.unwrap().get(0);
                stop(3).await;
                let update = format!("UPDATE {table} SET count = $1");
                write.execute(&update, &[&(count + 1)]).await.unwrap();
                stop(4).await;
                write.commit().await.unwrap();
                committed += 1;
            }
            committed
        }));
    }
    let mut committed = 0;
    for task in tasks {
        committed += within(Duration::from_secs(100), "its rounds", task).await.unwrap();
    }
    let count: u64 = home.server().ask(&format!("SELECT count FROM {table}")).parse().unwrap();
    assert_eq!(count, committed, "an update was lost");
    assert!(committed >= TASKS * ROUNDS / 2, "{committed} is too few to prove anything");
}
