//! A holder that is paused beyond its lease and then writes: with a fence it is rejected, without
//! one it replaces the newer value. Every engine with SQLite, every store with `local`, Redis with
//! PostgreSQL; `cargo run -p lockset-testkit --example paused_holders -- all` plays all pairs.

use lockset_testkit::paused_holder::{ENGINES, STORES, Stores, play_all, stage_of};

/// `play` asserts the outcome of each case; here it is asserted that all were played.
async fn play(engine: &str, stores: &[&str]) {
    assert!(ENGINES.contains(&engine), "{engine} is not in the list of engines");
    let stage = stage_of(engine, env!("CARGO_BIN_EXE_actor"));
    let played = play_all(&*stage, &Stores::start(stores), stores).await;
    assert_eq!(played.len(), 2 * stores.len());
    for (title, timeline) in played {
        let is_rejected = timeline.iter().any(|line| line.contains("A  writes: rejected"));
        assert_eq!(is_rejected, title.ends_with("-fenced"), "{title}: {timeline:#?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_local_with_every_store() {
    play("local", STORES).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_redis() {
    play("redis", &["sqlite", "postgres"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_sentinel() {
    play("sentinel", &["sqlite"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_cluster() {
    play("cluster", &["sqlite"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_redlock() {
    play("redlock", &["sqlite"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_zookeeper() {
    play("zookeeper", &["sqlite"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_etcd() {
    play("etcd", &["sqlite"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_postgres() {
    play("postgres", &["sqlite"]).await;
}
