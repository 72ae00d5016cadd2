//! PostgreSQL behind a pooler and with a standby: real servers in the shapes that services have.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::Duration;

use lockset::{Builder, Guard, Lockset};
use lockset_testkit::stage::{PgBouncer, PostgresSchema, PostgresServer};
use lockset_testkit::steps::{await_served, within};

const TTL: Duration = Duration::from_secs(6);
const SOON: Duration = Duration::from_secs(4);

async fn client(url: &str) -> Lockset {
    Lockset::builder(url).ttl(TTL).connect().await.unwrap()
}

async fn lock(locks: &Lockset, name: &str) -> Guard {
    within(SOON, "a free lock", locks.mutex(name).unwrap().lock()).await.unwrap()
}

/// Two clients hand a lock over, and the second one is renewed.
async fn hand_over(ours: &Lockset, theirs: &Lockset) {
    let guard = lock(ours, "it").await;
    let mutex = theirs.mutex("it").unwrap();
    let waiting = tokio::spawn(async move { mutex.lock().await });
    let queued = async {
        while ours.inspect("it").await.unwrap().waiters.is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    within(SOON, "it is queued", queued).await;
    guard.release().await.unwrap();
    let next = await_served(SOON, waiting).await;
    assert!(tokio::time::timeout(TTL, next.lost()).await.is_err(), "it is renewed");
    next.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_a_pooler_in_transaction_mode_waiters_ask_or_listen_elsewhere() {
    let home = PostgresSchema::start();
    let pooler = PgBouncer::before(home.server(), "transaction");
    let asking = format!("{}?schema={}", pooler.url(), home.name());
    let listening = format!("{asking}&listen={}", home.server().url());
    let (ours, theirs) = (client(&asking).await, client(&listening).await);
    hand_over(&ours, &theirs).await;
    hand_over(&theirs, &ours).await;
    let listeners = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'";
    assert_eq!(home.server().ask(listeners), "1", "one listens, and not through the pooler");
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_a_pooler_in_session_mode_all_is_as_usual() {
    let home = PostgresSchema::start();
    let pooler = PgBouncer::before(home.server(), "session");
    let url = format!("{}?schema={}", pooler.url(), home.name());
    hand_over(&client(&url).await, &client(&url).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pooler_in_statement_mode_is_refused_with_the_reason() {
    let home = PostgresSchema::start();
    let pooler = PgBouncer::before(home.server(), "statement");
    let url = format!("{}?schema={}", pooler.url(), home.name());
    let refused = Lockset::connect(&url).await.unwrap_err().to_string();
    assert!(refused.contains("statement mode"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_promoted_standby_is_followed() {
    let primary = PostgresServer::start_with(&["fsync=off"]);
    let standby = PostgresServer::start_standby_of(&primary);
    let hosts = format!("127.0.0.1:{},127.0.0.1:{}", standby.port(), primary.port());
    let url = format!("postgres://postgres@{hosts}/postgres");
    let ours = client(&url).await;
    let guard = lock(&ours, "it").await;
    let has_it = "SELECT count(*) FROM lockset.lock WHERE id IS NOT NULL";
    lockset_testkit::steps::until("the standby has it", || standby.ask(has_it) == "1");
    primary.stop();
    standby.ask("SELECT pg_promote()");
    assert!(tokio::time::timeout(TTL, guard.lost()).await.is_err(), "it was renewed there");
    let token = guard.token();
    guard.release().await.unwrap();
    let next = lock(&ours, "it").await;
    assert!(next.token() > token, "tokens keep growing");
    next.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_configuration_that_a_service_has_is_enough() {
    let home = PostgresSchema::start();
    let config = home.server().url().parse().unwrap();
    let locks = Builder::postgres(&config).option("schema", home.name()).connect().await.unwrap();
    lock(&locks, "it").await.release().await.unwrap();
    assert_eq!(locks.home(), client(&home.url()).await.home(), "it is the same home");
}
