//! What becomes of locks in a Redis Cluster whose masters die and whose slots move.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use lockset::{Error, Lockset, State};
use lockset_testkit::contenders::Contenders;
use lockset_testkit::stage::RedisCluster;
use lockset_testkit::steps::{
    assert_error, await_confirmed, await_served, client, error_chain, is_free, lock, spawn_waiter,
    until, within,
};

const TTL: Duration = Duration::from_secs(10);
/// A third of a place's lease, at most 1.7 s, and the time that a busy machine takes.
const BY_HEARTBEAT: Duration = Duration::from_secs(4);
const SOON: Duration = Duration::from_secs(1);
/// How long after a promotion a client has found the new master.
const FOLLOWED: Duration = Duration::from_secs(8);

/// The slot of a lock, where it is, and where it could be.
fn places(cluster: &RedisCluster, name: &str) -> (usize, usize, usize) {
    let slot = cluster.slot_of(&format!("lockset:{name}"));
    let from = cluster.owner(slot);
    (slot, from, cluster.another_master(from))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_promoted_replica_continues_for_a_killed_master() {
    let cluster = RedisCluster::start_with_replicas();
    let url = cluster.url();
    let (ours, theirs) = (client(&url, TTL).await, client(&url, TTL).await);
    let guard = lock(&ours, "killed").await;
    let waiting = spawn_waiter(&theirs, "killed").await;
    cluster.kill_owner(cluster.slot_of("lockset:killed"));
    await_confirmed(FOLLOWED, &guard).await;
    assert_eq!(guard.state(), State::Held);
    assert!(!waiting.is_finished(), "one holds");
    let before = guard.token();
    guard.release().await.unwrap();
    let next = await_served(BY_HEARTBEAT, waiting).await;
    assert!(next.token() > before);
    next.release().await.unwrap();
}

/// A URL that takes a node for a server of its own is an error that names the right URL.
#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_node_addressed_as_a_single_server_is_reported() {
    let cluster = RedisCluster::start();
    let (_, there, other_backend) = places(&cluster, "moved");
    let url = |node: usize| format!("redis://127.0.0.1:{}", cluster.nodes()[node].port());
    let wrong = client(&url(other_backend), TTL).await;
    let error = wrong.mutex("moved").unwrap().try_lock().await.unwrap_err();
    assert_error(&error, &["use redis+cluster://"], false);
    lock(&client(&url(there), TTL).await, "moved").await.release().await.unwrap();
}

/// Without a replica the slots of a dead node are nowhere, until it comes back with what it wrote.
#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_node_keeps_its_locks() {
    let cluster = RedisCluster::start();
    let url = cluster.url();
    let (ours, theirs) = (client(&url, TTL).await, client(&url, TTL).await);
    let guard = lock(&ours, "down").await;
    let (_, node, _) = places(&cluster, "down");
    cluster.nodes()[node].kill();
    let asked = theirs.mutex("down").unwrap().lock_within(SOON).await.unwrap_err();
    assert!(asked.is_retryable(), "{}", error_chain(&asked));
    cluster.nodes()[node].restart();
    cluster.await_ok();
    await_confirmed(FOLLOWED, &guard).await;
    assert!(!is_free(&theirs, "down").await);
    guard.release().await.unwrap();
    assert!(is_free(&theirs, "down").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_moves_with_its_slot() {
    let cluster = RedisCluster::start();
    let url = cluster.url();
    let (ours, theirs) = (client(&url, TTL).await, client(&url, TTL).await);
    let guard = lock(&ours, "moved").await;
    let waiting = spawn_waiter(&theirs, "moved").await;
    let (slot, from, to) = places(&cluster, "moved");
    cluster.migrate_slot(slot, to);
    await_confirmed(FOLLOWED, &guard).await;
    assert_eq!(guard.state(), State::Held);
    assert!(!waiting.is_finished(), "one holds");
    cluster.nodes()[to].ask(&["PEXPIRE", "lockset:moved", "6000"]);
    until("it is renewed at its new node", || {
        let left = cluster.nodes()[to].ask(&["PTTL", "lockset:moved"]);
        left.parse::<u64>().is_ok_and(|left| left > 8000)
    });
    guard.release().await.unwrap();
    let guard = await_served(BY_HEARTBEAT, waiting).await;
    let waiting = spawn_waiter(&ours, "moved").await;
    cluster.migrate_slot(slot, from);
    guard.release().await.unwrap();
    await_served(BY_HEARTBEAT, waiting).await.release().await.unwrap();
}

/// Readers, permits and cells have more keys.
#[tokio::test(flavor = "multi_thread")]
async fn every_kind_of_lock_moves() {
    let cluster = RedisCluster::start();
    let url = cluster.url();
    let (ours, theirs) = (client(&url, TTL).await, client(&url, TTL).await);
    let reader = ours.rwlock("read").unwrap().read().await.unwrap();
    let permit = ours.semaphore("permit", 2).unwrap().acquire().await.unwrap();
    ours.latch("latch", 2).unwrap().count_down().await.unwrap();
    for name in ["read", "permit", "latch"] {
        let (slot, _, to) = places(&cluster, name);
        cluster.migrate_slot(slot, to);
    }
    await_confirmed(FOLLOWED, &reader).await;
    await_confirmed(FOLLOWED, &permit).await;
    assert!(theirs.rwlock("read").unwrap().try_write().await.unwrap().is_none());
    let second = theirs.rwlock("read").unwrap().try_read().await.unwrap();
    assert!(second.is_some(), "readers share");
    assert!(theirs.semaphore("permit", 2).unwrap().try_acquire_many(2).await.unwrap().is_none());
    theirs.latch("latch", 2).unwrap().count_down().await.unwrap();
    let open = ours.latch("latch", 2).unwrap();
    within(BY_HEARTBEAT, "it is open", open.wait()).await.unwrap();
    permit.release().await.unwrap();
    reader.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn contenders_are_served_while_slots_move_and_never_two_at_once() {
    let cluster = RedisCluster::start();
    let url = cluster.url();
    let ttl = Duration::from_secs(4);
    let clients = [client(&url, ttl).await, client(&url, ttl).await, client(&url, ttl).await];
    let names = ["contenders/1", "contenders/2"];
    let contenders = Contenders::start(&clients, 4, &names);
    contenders.wait_served(50, FOLLOWED).await;
    for round in 0..6 {
        let (slot, _, to) = places(&cluster, names[round % 2]);
        cluster.migrate_slot(slot, to);
        contenders.wait_served(20, FOLLOWED).await;
    }
    contenders.stop_and_check().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn contenders_are_served_when_a_master_dies_and_never_two_at_once() {
    let cluster = RedisCluster::start_with_replicas();
    let url = cluster.url();
    let ttl = Duration::from_secs(4);
    let clients = [client(&url, ttl).await, client(&url, ttl).await, client(&url, ttl).await];
    let contenders = Contenders::start(&clients, 4, &["contenders"]);
    contenders.wait_served(50, FOLLOWED).await;
    let killed = cluster.kill_owner(cluster.slot_of("lockset:contenders"));
    contenders.wait_served(50, FOLLOWED * 2).await;
    cluster.nodes()[killed].restart();
    cluster.await_ok();
    contenders.wait_served(50, FOLLOWED).await;
    contenders.stop_and_check().await;
}

/// Where pushes are subscribed: a channel has a slot too, and its subscribers are sent away when
/// that moves. Those of Redis 6 have none, and its subscribers stay.
fn inboxes(cluster: &RedisCluster) -> BTreeSet<String> {
    let kinds = ["SHARDCHANNELS", "CHANNELS"];
    let listed =
        cluster.nodes().iter().flat_map(|node| kinds.map(|kind| node.ask(&["PUBSUB", kind])));
    let all: Vec<String> = listed.collect();
    let channels = all.iter().flat_map(|lines| lines.lines());
    channels.filter(|channel| channel.contains(":inbox:")).map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn pushes_resume_after_the_slot_of_an_inbox_moved() {
    let cluster = RedisCluster::start();
    let url = cluster.url();
    let (ours, theirs) = (client(&url, TTL).await, client(&url, TTL).await);
    let guard = lock(&ours, "pushed").await;
    let waiting = spawn_waiter(&theirs, "pushed").await;
    let moved = inboxes(&cluster);
    assert!(!moved.is_empty(), "no client listens");
    for inbox in &moved {
        let slot = cluster.slot_of(inbox);
        cluster.migrate_slot(slot, cluster.another_master(cluster.owner(slot)));
    }
    guard.release().await.unwrap();
    let guard = await_served(BY_HEARTBEAT, waiting).await;
    // Afterwards a release is told by a push again, and not by the next sign of life: ten of them
    // would take longer.
    let began = Instant::now();
    let mut guard = guard;
    for round in 0..10 {
        let locks = if round % 2 == 0 { &ours } else { &theirs };
        let waiting = spawn_waiter(locks, "pushed").await;
        guard.release().await.unwrap();
        guard = await_served(BY_HEARTBEAT, waiting).await;
    }
    assert!(began.elapsed() < Duration::from_secs(8), "no push came: {:?}", began.elapsed());
}

/// Some keys of the lock are here and some there: no node can decide about it.
#[tokio::test(flavor = "multi_thread")]
async fn a_stuck_slot_is_reported_and_recovers() {
    let cluster = RedisCluster::start();
    let url = cluster.url();
    let (ours, theirs) = (client(&url, TTL).await, client(&url, TTL).await);
    let guard = lock(&ours, "stuck").await;
    let waiting = spawn_waiter(&theirs, "stuck").await;
    let (slot, from, to) = places(&cluster, "stuck");
    cluster.begin_migration(slot, to);
    cluster.move_a_key(slot, from, to).unwrap();
    let began = Instant::now();
    let error = ours.mutex("stuck").unwrap().try_lock().await;
    // Ours is behind our own guard, so another client is used.
    let others = client(&url, TTL).await;
    let theirs_told = others.mutex("stuck").unwrap().try_lock().await;
    assert!(began.elapsed() < FOLLOWED, "it is told in good time");
    assert!(!matches!(error, Ok(Some(_))), "one holds");
    match theirs_told {
        Ok(taken) => assert!(taken.is_none(), "one holds"),
        Err(error) => assert!(
            matches!(error, Error::Unreachable { retryable: true, .. }),
            "it may be tried again: {}",
            error_chain(&error)
        ),
    }
    // Nothing else is hurt meanwhile.
    let names = (0..10).map(|number| format!("spared/{number}"));
    for name in names.filter(|name| cluster.slot_of(&format!("lockset:{name}")) != slot) {
        within(SOON, "another lock", lock(&ours, &name)).await.release().await.unwrap();
    }
    cluster.finish_migration(slot, from, to);
    await_confirmed(FOLLOWED, &guard).await;
    guard.release().await.unwrap();
    await_served(BY_HEARTBEAT, waiting).await.release().await.unwrap();
}

/// All keys of a name lie in one slot, whatever braces the name has.
#[tokio::test(flavor = "multi_thread")]
async fn all_keys_of_unusual_names_share_a_slot() {
    let cluster = RedisCluster::start();
    let url = cluster.url();
    let (ours, theirs) = (client(&url, TTL).await, client(&url, TTL).await);
    let names =
        ["plain", "{tag}", "{tag}/x", "x/{tag}/{other}", "{", "{a", "{{x}}", "b}c{d}", "}x{y}"];
    for name in names {
        every_use(&ours, &theirs, name).await;
    }
    // A brace that closes nothing ends what Redis hashes of the keys beside the lock: such a name
    // works, or it is refused as a name.
    for name in ["}", "{}", "}{", "a}b", "{}{x}", "{}x{y}"] {
        match ours.mutex(name).unwrap().try_lock().await {
            Err(error) => assert!(matches!(error, Error::Invalid { .. }), "{name}: {error}"),
            Ok(guard) => {
                guard.unwrap().release().await.unwrap();
                every_use(&ours, &theirs, name).await;
            }
        }
    }
    let tagged = cluster.slot_of("lockset:{tag}");
    assert_eq!(tagged, cluster.slot_of("tag"), "a tag of the user's is kept");
}

async fn every_use(ours: &Lockset, theirs: &Lockset, name: &str) {
    let guard = within(SOON, name, lock(ours, name)).await;
    let waiting = spawn_waiter(theirs, name).await;
    guard.set_note("a note").await.unwrap();
    guard.confirm().await.unwrap();
    guard.release().await.unwrap();
    await_served(BY_HEARTBEAT, waiting).await.release().await.unwrap();
    let readers = ours.rwlock(name).unwrap();
    let (one, two) = (readers.read().await.unwrap(), readers.read().await.unwrap());
    one.release().await.unwrap();
    two.release().await.unwrap();
    ours.latch(name, 1).unwrap().count_down().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn list_shows_the_names_of_all_nodes() {
    let cluster = RedisCluster::start();
    let url = cluster.url();
    let (ours, theirs) = (client(&url, TTL).await, client(&url, TTL).await);
    let names: BTreeSet<String> = (0..12).map(|number| format!("seen/{number}")).collect();
    let owners: BTreeSet<usize> = names.iter().map(|name| places(&cluster, name).1).collect();
    assert_eq!(owners.len(), 3, "they lie on all nodes");
    let mut seen = theirs.watch("seen/").unwrap();
    let mut guards = Vec::new();
    for name in &names {
        guards.push(lock(&ours, name).await);
    }
    let listed = theirs.list("seen/").await.unwrap();
    let listed: BTreeSet<String> = listed.iter().map(|state| state.name.to_string()).collect();
    assert_eq!(listed, names);
    let mut missing = names.clone();
    let all_held = async {
        while !missing.is_empty() {
            let state = seen.next().await.unwrap().unwrap();
            if !state.holders.is_empty() {
                missing.remove(state.name.as_str());
            }
        }
    };
    within(BY_HEARTBEAT, "all are seen", all_held).await;
    // One after the other, on every node.
    for guard in guards {
        let name = guard.name().to_string();
        guard.release().await.unwrap();
        let freed = async {
            loop {
                let state = seen.next().await.unwrap().unwrap();
                if state.name.as_str() == name && state.holders.is_empty() {
                    return;
                }
            }
        };
        within(BY_HEARTBEAT, "its end is seen", freed).await;
    }
    assert!(theirs.list("").await.unwrap().iter().all(|state| !state.is_used()));
}

#[tokio::test(flavor = "multi_thread")]
async fn one_node_is_enough_to_find_all() {
    let cluster = RedisCluster::start();
    let urls: Vec<String> = cluster.nodes().iter().map(|node| node.port().to_string()).collect();
    let url = format!("redis+cluster://127.0.0.1:1,127.0.0.1:{}", urls[2]);
    let ours = within(FOLLOWED, "a connection", client(&url, TTL)).await;
    for number in 0..12 {
        lock(&ours, &format!("found/{number}")).await.release().await.unwrap();
    }
    let unreachable = Lockset::connect("redis+cluster://127.0.0.1:1,127.0.0.1:2");
    let error = within(FOLLOWED, "a refusal", unreachable).await.unwrap_err();
    assert!(error.is_retryable(), "{}", error_chain(&error));
}
