//! Locks that so many replicas must have before they are handed out.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::{Duration, Instant};

use lockset::{Guard, LockOptions, Lockset, Replicas};
use lockset_testkit::stage::{RedisCluster, RedisSentinel, RedisServer};
use lockset_testkit::steps::{
    assert_error, await_lock_state, await_served, client, is_free, lock, spawn_waiter, until,
    within,
};
use rustix::process::Signal;
use tokio::task::JoinHandle;

const TTL: Duration = Duration::from_secs(10);
const SOON: Duration = Duration::from_secs(1);
/// A refusal takes as long as an answer is waited for.
const ANSWERED: Duration = Duration::from_secs(5);

/// A service with a client, and one replica that was stopped.
struct Scene {
    servers: RedisSentinel,
    ours: Lockset,
}

impl Scene {
    async fn new() -> Self {
        let servers = RedisSentinel::start();
        let ours = client(&servers.url(), TTL).await;
        Self { servers, ours }
    }

    fn master(&self) -> &RedisServer {
        &self.servers.servers()[0]
    }

    fn replica(&self, signal: Signal) {
        self.servers.servers()[2].signal(signal);
    }

    /// How often `WAIT` was run.
    fn waits(&self) -> u64 {
        self.master().calls("wait")
    }
}

fn begin(locks: &Lockset, name: &str, replicas: Replicas) -> JoinHandle<lockset::Result<Guard>> {
    let options = LockOptions::default().replicas(replicas);
    let mutex = locks.mutex(name).unwrap().with(options);
    tokio::spawn(async move { mutex.lock_within(ANSWERED).await })
}

async fn try_with(
    locks: &Lockset,
    name: &str,
    replicas: Replicas,
) -> lockset::Result<Option<Guard>> {
    let options = LockOptions::default().replicas(replicas);
    let mutex = locks.mutex(name).unwrap().with(options);
    within(ANSWERED, "an answer", mutex.try_lock()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn with_too_few_replicas_a_lock_is_refused_and_leaves_nothing() {
    let at = Scene::new().await;
    at.replica(Signal::STOP);
    let refused = try_with(&at.ours, "refused", Replicas::AtLeast(2)).await.unwrap_err();
    assert_error(&refused, &["1 of the 2 replicas"], true);
    until("it is withdrawn", || at.master().ask(&["GET", "lockset:refused"]).is_empty());
    let theirs = client(&at.servers.url(), TTL).await;
    assert!(is_free(&theirs, "refused").await);
    await_lock_state(&theirs, "refused", |state| !state.is_used()).await;
    at.replica(Signal::CONT);
    let guard = try_with(&at.ours, "refused", Replicas::AtLeast(2)).await.unwrap();
    guard.expect("all replicas answer again").release().await.unwrap();
    let never = try_with(&at.ours, "refused", Replicas::AtLeast(3)).await.unwrap_err();
    assert_error(&never, &["2 of the 3 replicas"], true);
}

#[tokio::test(flavor = "multi_thread")]
async fn locks_without_a_replica_policy_are_not_stalled() {
    let at = Scene::new().await;
    let kept = lock(&at.ours, "kept").await;
    at.replica(Signal::STOP);
    let before = at.waits();
    let sure: Vec<_> =
        (0..6).map(|n| begin(&at.ours, &format!("sure/{n}"), Replicas::AtLeast(2))).collect();
    // They wait for the replica over connections of their own.
    until("they wait", || at.master().ask(&["INFO", "clients"]).contains("blocked_clients:6"));
    let began = Instant::now();
    for number in 0..20 {
        lock(&at.ours, &format!("plain/{number}")).await.release().await.unwrap();
    }
    kept.confirm().await.unwrap();
    assert!(began.elapsed() < SOON, "they were stalled for {:?}", began.elapsed());
    assert!(at.waits() <= before + 6, "only those with a policy wait");
    for refused in sure {
        assert!(within(ANSWERED * 2, "an answer", refused).await.unwrap().is_err());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_majority_is_reached_without_one_replica() {
    let at = Scene::new().await;
    at.replica(Signal::STOP);
    let before = at.waits();
    let guard = try_with(&at.ours, "most", Replicas::Majority).await.unwrap().expect("it is free");
    assert!(at.waits() > before, "it waited for the others");
    guard.release().await.unwrap();
    let by_default = client(&format!("{}?replicas=majority", at.servers.url()), TTL).await;
    let before = at.waits();
    lock(&by_default, "most").await.release().await.unwrap();
    assert!(at.waits() > before, "it is the URL's policy");
    at.servers.servers()[1].signal(Signal::STOP);
    let refused = try_with(&at.ours, "most", Replicas::Majority).await.unwrap_err();
    assert_error(&refused, &["0 of the 1 replicas"], true);
}

/// Replicas that ended are missing, not forgotten.
#[tokio::test(flavor = "multi_thread")]
async fn a_majority_is_counted_over_all_known_replicas() {
    let at = Scene::new().await;
    at.servers.servers()[1].kill();
    at.servers.servers()[2].kill();
    until("they are gone", || at.master().ask(&["INFO", "replication"]).contains("slaves:0"));
    let refused = try_with(&at.ours, "alone", Replicas::Majority).await;
    assert!(refused.is_err(), "the server alone is no majority");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handed_over_lock_waits_for_replicas_too() {
    let at = Scene::new().await;
    let theirs = client(&at.servers.url(), TTL).await;
    let guard = lock(&theirs, "handed").await;
    let waiting = begin(&at.ours, "handed", Replicas::AtLeast(2));
    await_lock_state(&theirs, "handed", |state| state.waiters.len() == 1).await;
    let before = at.waits();
    guard.release().await.unwrap();
    let guard = await_served(SOON, waiting).await;
    assert!(at.waits() > before, "it waited for the replicas");
    guard.release().await.unwrap();
}

/// It is handed over to the next waiter, and not kept until its lease ends.
#[tokio::test(flavor = "multi_thread")]
async fn a_handoff_with_too_few_replicas_passes_on_to_the_next_waiter() {
    let at = Scene::new().await;
    let (theirs, last) =
        (client(&at.servers.url(), TTL).await, client(&at.servers.url(), TTL).await);
    let guard = lock(&theirs, "passed").await;
    let picky = begin(&at.ours, "passed", Replicas::AtLeast(2));
    await_lock_state(&theirs, "passed", |state| state.waiters.len() == 1).await;
    let waiting = spawn_waiter(&last, "passed").await;
    at.replica(Signal::STOP);
    guard.release().await.unwrap();
    let refused = within(ANSWERED, "an answer", picky).await.unwrap().unwrap_err();
    assert_error(&refused, &["1 of the 2 replicas"], true);
    await_served(SOON * 2, waiting).await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_policy_no_replica_is_waited_for() {
    let at = Scene::new().await;
    let theirs = client(&at.servers.url(), TTL).await;
    let before = at.waits();
    let guard = lock(&at.ours, "plain").await;
    let waiting = spawn_waiter(&theirs, "plain").await;
    guard.confirm().await.unwrap();
    guard.release().await.unwrap();
    await_served(SOON, waiting).await.release().await.unwrap();
    let none = try_with(&at.ours, "plain", Replicas::None).await.unwrap().expect("it is free");
    none.release().await.unwrap();
    at.ours.rwlock("read").unwrap().read().await.unwrap().release().await.unwrap();
    assert_eq!(at.waits(), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_and_permits_wait_for_replicas_too() {
    let at = Scene::new().await;
    at.replica(Signal::STOP);
    let options = || LockOptions::default().replicas(Replicas::AtLeast(2));
    let readers = at.ours.rwlock("read").unwrap().with(options());
    let refused = within(ANSWERED, "an answer", readers.try_read()).await.unwrap_err();
    assert_error(&refused, &["1 of the 2 replicas"], true);
    let permits = at.ours.semaphore("permits", 2).unwrap().with(options());
    let refused = within(ANSWERED, "an answer", permits.try_acquire()).await.unwrap_err();
    assert_error(&refused, &["1 of the 2 replicas"], true);
    let theirs = client(&at.servers.url(), TTL).await;
    for name in ["read", "permits"] {
        await_lock_state(&theirs, name, |state| !state.is_used()).await;
    }
}

/// However many ask at once, the server is not flooded with connections.
#[tokio::test(flavor = "multi_thread")]
async fn many_waits_for_replicas_share_few_connections() {
    let at = Scene::new().await;
    let locks = client(&format!("{}?replicas=1", at.servers.url()), TTL).await;
    let names: Vec<String> = (0..200).map(|n| format!("n{n}")).collect();
    let opened = || {
        let opened = at.master().info(&["INFO", "stats"], "total_connections_received");
        opened.unwrap().parse::<u64>().unwrap()
    };
    let before = opened();
    let mutexes = names.iter().map(|name| locks.mutex(name).unwrap()).collect::<Vec<_>>();
    let guards = futures_util::future::join_all(mutexes.iter().map(|mutex| mutex.lock())).await;
    let of_others = 20;
    assert!(opened() - before < 32 + of_others, "{before} {}", opened());
    for guard in guards {
        guard.unwrap().release().await.unwrap();
    }
}

/// A cluster whose masters have a replica each, and names at two of the masters.
struct Shards {
    cluster: RedisCluster,
    names: [String; 2],
    masters: [usize; 2],
}

impl Shards {
    fn start() -> Self {
        let cluster = RedisCluster::start_with_replicas();
        let first = cluster.owner(cluster.slot_of("lockset:n0"));
        let masters = [first, cluster.another_master(first)];
        let names = masters.map(|master| cluster.name_at(master));
        Self { cluster, names, masters }
    }

    fn master(&self) -> &RedisServer {
        &self.cluster.nodes()[self.masters[0]]
    }

    fn replica(&self) -> &RedisServer {
        let follows = format!("master_port:{}", self.master().port());
        let replicas = &self.cluster.nodes()[3..];
        let is_ours = |node: &&RedisServer| node.ask(&["INFO", "replication"]).contains(&follows);
        replicas.iter().find(is_ours).unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn in_a_cluster_the_replica_of_a_name_is_waited_for() {
    let at = Shards::start();
    let url = format!("{}?replicas=1", at.cluster.url());
    let (ours, theirs) = (client(&url, TTL).await, client(&url, TTL).await);
    let before = at.master().calls("wait");
    let guard = lock(&ours, &at.names[0]).await;
    assert!(at.master().calls("wait") > before, "it waited for the replica");
    let waiting = spawn_waiter(&theirs, &at.names[0]).await;
    let before = at.master().calls("wait");
    guard.release().await.unwrap();
    let next = await_served(SOON, waiting).await;
    assert!(at.master().calls("wait") > before, "a hand-over waits too");
    next.release().await.unwrap();
}

/// Only the names of its master are refused, and only for as long as it is gone.
#[tokio::test(flavor = "multi_thread")]
async fn in_a_cluster_a_missing_replica_affects_only_its_names() {
    let at = Shards::start();
    let ours = client(&format!("{}?replicas=1", at.cluster.url()), TTL).await;
    let plain = client(&at.cluster.url(), TTL).await;
    for name in &at.names {
        lock(&ours, name).await.release().await.unwrap();
    }
    let replica = at.replica();
    replica.kill();
    let [gone, other] = at.names.each_ref().map(|name| ours.mutex(name).unwrap());
    for _ in 0..2 {
        let refused = within(ANSWERED, "an answer", gone.try_lock()).await.unwrap_err();
        assert_error(&refused, &["0 of the 1 replicas"], true);
    }
    let key = format!("lockset:{}", at.names[0]);
    until("it is withdrawn", || at.master().ask(&["GET", &key]).is_empty());
    assert!(is_free(&plain, &at.names[0]).await);
    // One that comes when the cluster has given the replica up counts it all the same.
    until("it is given up", || at.cluster.nodes()[..3].iter().all(gave_a_replica_up));
    for client in [plain, client(&at.cluster.url(), TTL).await] {
        let majority = try_with(&client, &at.names[0], Replicas::Majority).await;
        assert!(majority.is_err(), "a master alone is no majority");
    }
    let kept = within(ANSWERED, "an answer", other.try_lock()).await.unwrap();
    kept.expect("the other master has its replica").release().await.unwrap();
    replica.restart();
    until("it is back", || at.master().is_replicated_to(1));
    let guard = within(ANSWERED, "an answer", gone.try_lock()).await.unwrap();
    guard.expect("the replica answers again").release().await.unwrap();
}

fn gave_a_replica_up(node: &RedisServer) -> bool {
    let known = node.ask(&["CLUSTER", "NODES"]);
    known.lines().any(|line| line.contains("slave,fail "))
}
