//! What locks cost a Redis server: connections, letters and scripts, as the server counts them.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::Duration;

use lockset::Lockset;
use lockset_testkit::stage::{RedisCluster, RedisServer};
use lockset_testkit::steps::{
    await_lock_state, await_served, client, lock, spawn_waiter, until, within,
};

/// Signs of life are rare, and nothing runs out.
const TTL: Duration = Duration::from_secs(60);
const SOON: Duration = Duration::from_secs(5);

#[tokio::test(flavor = "multi_thread")]
async fn waiters_for_a_hundred_names_share_one_connection() {
    let server = RedisServer::start();
    let theirs = client(&server.url(), TTL).await;
    let names: Vec<String> = (0..100).map(|number| format!("n{number}")).collect();
    let mut guards = Vec::new();
    for name in &names {
        guards.push(lock(&theirs, name).await);
    }
    assert_eq!(server.listeners(), 1, "a holder has one");
    let ours = client(&server.url(), TTL).await;
    let mut waiting = Vec::new();
    for name in &names {
        waiting.push(spawn_waiter(&ours, name).await);
    }
    assert_eq!(server.listeners(), 2, "a waiter has one, too");
    assert_eq!(server.ask(&["PUBSUB", "CHANNELS"]).lines().count(), 2, "an inbox each");
    for (guard, waiting) in guards.into_iter().zip(waiting) {
        guard.release().await.unwrap();
        await_served(SOON, waiting).await.release().await.unwrap();
    }
    assert_eq!(server.listeners(), 2);
}

/// Each waiter takes the lock once and gives it back.
fn line_up(clients: &[Lockset], name: &str, count: u64) -> Vec<tokio::task::JoinHandle<()>> {
    let waiters = (0..count).map(|number| {
        let mutex = clients[number as usize % clients.len()].mutex(name).unwrap();
        tokio::spawn(async move { mutex.lock().await.unwrap().release().await.unwrap() })
    });
    waiters.collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handoff_takes_one_script_and_one_message() {
    let server = RedisServer::start();
    let url = server.url();
    let clients = [client(&url, TTL).await, client(&url, TTL).await, client(&url, TTL).await];
    let first = lock(&client(&url, TTL).await, "wanted").await;
    let count = 128;
    let waiters = line_up(&clients, "wanted", count);
    await_lock_state(&clients[0], "wanted", |state| state.waiters.len() >= clients.len()).await;
    let before = (server.calls("publish"), server.calls("evalsha"));
    first.release().await.unwrap();
    for waiter in waiters {
        within(SOON, "all are served", waiter).await.unwrap();
    }
    let letters = server.calls("publish") - before.0;
    let scripts = server.calls("evalsha") - before.1;
    assert_eq!(letters, count, "one for each hand-over, and none without a waiter");
    assert!(scripts <= count * 12 / 10, "{scripts} scripts for {count} grants");
}

/// A letter in a plain channel of a cluster would go to all of its nodes.
#[tokio::test(flavor = "multi_thread")]
async fn in_a_cluster_the_inbox_is_a_channel_of_one_shard() {
    let cluster = RedisCluster::start();
    let (ours, theirs) = (client(&cluster.url(), TTL).await, client(&cluster.url(), TTL).await);
    let guard = lock(&ours, "sharded").await;
    let waiting = spawn_waiter(&theirs, "sharded").await;
    let owner = &cluster.nodes()[cluster.owner(cluster.slot_of("lockset:sharded"))];
    let all = |kind: &str| -> Vec<String> {
        let nodes = cluster.nodes().iter();
        let channels = nodes.flat_map(|node| {
            let answer = node.ask(&["PUBSUB", kind, "lockset:*"]);
            answer.lines().map(str::to_owned).collect::<Vec<_>>()
        });
        channels.filter(|channel| !channel.is_empty()).collect()
    };
    let sharded = owner.ask(&["PUBSUB", "SHARDCHANNELS", "lockset:inbox:*"]);
    if sharded.starts_with("ERR") {
        // Redis 6 has no such channels.
        assert!(!all("CHANNELS").is_empty());
        return;
    }
    assert_eq!(sharded.lines().count(), 2, "both listen where the lock is: {sharded}");
    assert_eq!(all("CHANNELS"), Vec::<String>::new());
    let before = (owner.calls("spublish"), owner.calls("publish"));
    guard.release().await.unwrap();
    await_served(SOON, waiting).await.release().await.unwrap();
    until("it was counted", || owner.calls("spublish") > before.0);
    assert_eq!((owner.calls("spublish"), owner.calls("publish")), (before.0 + 1, before.1));
}
