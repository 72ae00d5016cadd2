//! What an ensemble of three ZooKeeper servers goes on with, and what it does not.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::Duration;

use lockset::{LossReason, State};
use lockset_testkit::contenders::Contenders;
use lockset_testkit::stage::{Chroot, KazooClient};
use lockset_testkit::steps::{
    await_guard_state, await_lost, await_served, client, is_free, lock, spawn_waiter, within,
};

type Home = Chroot<3>;

/// Long enough for another server to be elected before a session ends, also on a busy machine.
const TTL: Duration = Duration::from_secs(6);
/// Too short for a session to end.
const SOON: Duration = Duration::from_millis(1500);
/// How long an election may take on a busy machine.
const ELECTION: Duration = Duration::from_secs(40);

fn chroot() -> (Home, KazooClient) {
    let chroot = Home::start("");
    let kazoo = chroot.servers().kazoo();
    (chroot, kazoo)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_leader_loses_neither_lock_nor_queue_position() {
    let (chroot, _) = chroot();
    let url = chroot.url();
    let (ours, first, second) =
        (client(&url, TTL).await, client(&url, TTL).await, client(&url, TTL).await);
    let guard = lock(&ours, "held").await;
    let (first, second) = (spawn_waiter(&first, "held").await, spawn_waiter(&second, "held").await);
    let old = chroot.servers().leader();
    chroot.servers().nodes()[old].kill();
    chroot.servers().await_another_leader(old);
    await_guard_state(ELECTION, &guard, State::Held).await;
    within(ELECTION, "an answer", guard.confirm()).await.unwrap();
    assert!(!first.is_finished() && !second.is_finished());
    chroot.servers().nodes()[old].start_again();
    chroot.servers().await_serving();
    let token = guard.token();
    guard.release().await.unwrap();
    let guard = await_served(SOON, first).await;
    assert!(guard.token() > token);
    assert!(!second.is_finished(), "the order was kept");
    guard.release().await.unwrap();
    await_served(SOON, second).await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_lock_of_a_client_killed_with_the_leader_passes_on() {
    let (chroot, mut kazoo) = chroot();
    let (ours, theirs) = (client(&chroot.url(), TTL).await, client(&chroot.url(), TTL).await);
    let leader = chroot.servers().leader();
    let peer = KazooClient::on(&chroot.servers().nodes()[leader].host());
    let mut peer = peer;
    let node = peer.create(&chroot.path("orphaned/_c_0-lock-"), "sequential");
    let waiting = spawn_waiter(&theirs, "orphaned").await;
    drop(peer);
    chroot.servers().nodes()[leader].kill();
    chroot.servers().await_another_leader(leader);
    // A new leader lets all sessions begin anew.
    await_served(ELECTION + TTL, waiting).await.release().await.unwrap();
    assert!(kazoo.stat(&node).is_none());
    assert!(is_free(&ours, "orphaned").await);
    chroot.servers().nodes()[leader].start_again();
    chroot.servers().await_serving();
}

/// The server that the client is connected with stops; the client goes to another in time. It does
/// not lead: the others would wait longer for a leader than this session lasts.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_leaves_a_silent_server_in_time() {
    let (chroot, mut kazoo) = chroot();
    let leader = chroot.servers().leader();
    let (guard, node, server) = loop {
        let ours = client(&chroot.url(), TTL).await;
        let guard = lock(&ours, "moved").await;
        let node = chroot.only_node(&mut kazoo, "moved");
        let server = chroot.servers().server_of(kazoo.stat(&node).unwrap().owner);
        match server.expect("it is connected") {
            server if server != leader => break (guard, node, server),
            _ => ours.close().await.unwrap(),
        }
    };
    // The observer must not be connected there too.
    let mut kazoo = KazooClient::on(&chroot.servers().nodes()[leader].host());
    let session = kazoo.stat(&node).unwrap().owner;
    chroot.servers().nodes()[server].freeze();
    let kept = tokio::time::timeout(TTL * 2, guard.lost()).await;
    let moved = chroot.servers().server_of(session);
    chroot.servers().nodes()[server].thaw();
    assert!(kept.is_err(), "it was lost: {kept:?}");
    assert!(moved.is_some_and(|moved| moved != server), "it went to {moved:?}");
    await_guard_state(ELECTION, &guard, State::Held).await;
    let stat = kazoo.stat(&node).unwrap();
    assert_eq!((stat.czxid, stat.owner), (guard.token().get(), session), "all is as it was");
    guard.release().await.unwrap();
    chroot.servers().await_serving();
}

/// The server answers, but only for itself: what it says is no proof that we still hold.
#[tokio::test(flavor = "multi_thread")]
async fn a_partitioned_server_is_not_trusted() {
    let (chroot, _) = chroot();
    let alone = chroot.servers().follower();
    let port = chroot.servers().nodes()[alone].port();
    let ours = client(&chroot.url_by(&[port]), TTL).await;
    let guard = lock(&ours, "cut off").await;
    for other in (0..3).filter(|other| *other != alone) {
        chroot.servers().nodes()[other].freeze();
    }
    assert_eq!(await_lost(TTL, &guard).await, LossReason::Expired);
    chroot.servers().thaw();
    within(ELECTION + TTL, "it goes on", lock(&ours, "cut off")).await.release().await.unwrap();
    chroot.servers().await_serving();
}

#[tokio::test(flavor = "multi_thread")]
async fn locks_are_lost_without_a_majority_and_available_again_with_one() {
    let (chroot, _) = chroot();
    let (ours, theirs) = (client(&chroot.url(), TTL).await, client(&chroot.url(), TTL).await);
    let guard = lock(&ours, "quorum").await;
    let waiting = spawn_waiter(&theirs, "quorum").await;
    let dead = [chroot.servers().leader(), chroot.servers().follower()];
    dead.iter().for_each(|node| chroot.servers().nodes()[*node].kill());
    assert_eq!(await_lost(TTL, &guard).await, LossReason::Expired);
    let patience = Duration::from_millis(500);
    let another = theirs.mutex("another").unwrap();
    let refused = within(patience + SOON, "an answer", another.lock_within(patience)).await;
    let error = refused.unwrap_err();
    assert!(error.is_retryable(), "{error:?}");
    assert!(!waiting.is_finished(), "it was granted without a majority");
    dead.iter().for_each(|node| chroot.servers().nodes()[*node].start_again());
    chroot.servers().await_serving();
    let next = await_served(ELECTION + TTL, waiting).await;
    assert!(next.token() > guard.token());
    within(TTL, "the other goes on", lock(&ours, "another")).await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn two_clients_never_hold_at_once_while_leaders_change() {
    let (chroot, _) = chroot();
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(client(&chroot.url(), TTL).await);
    }
    let contenders = Contenders::start(&clients, 2, &["turns", "others"]);
    contenders.wait_served(20, ELECTION).await;
    for _ in 0..3 {
        let leader = chroot.servers().leader();
        chroot.servers().nodes()[leader].kill();
        chroot.servers().await_another_leader(leader);
        contenders.wait_served(10, ELECTION + TTL).await;
        chroot.servers().nodes()[leader].start_again();
        chroot.servers().await_serving();
        let leader = chroot.servers().leader();
        chroot.servers().nodes()[leader].freeze();
        tokio::time::sleep(Duration::from_secs(2)).await;
        chroot.servers().nodes()[leader].thaw();
        contenders.wait_served(10, ELECTION + TTL).await;
    }
    contenders.stop_and_check().await;
}
