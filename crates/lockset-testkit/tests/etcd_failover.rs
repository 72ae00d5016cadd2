//! A cluster of etcd servers that loses its leader, most of its servers, or one of them.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::Duration;

use lockset::{Lockset, LossReason, State};
use lockset_testkit::contenders::Contenders;
use lockset_testkit::stage::EtcdServers;
use lockset_testkit::steps::{
    self, await_lost, await_served, is_free, lock, spawn_waiter, until, within,
};
use rustix::process::Signal;

/// Long enough for an election in the time between two renewals and the deadline.
const TTL: Duration = Duration::from_secs(6);
/// An election, a server that does not answer, and a busy machine.
const RECOVERED: Duration = Duration::from_secs(15);

async fn client(servers: &EtcdServers) -> Lockset {
    steps::client(&servers.url("p"), TTL).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_leader_loses_neither_lock_nor_queue_position() {
    let servers = EtcdServers::start(3);
    let (ours, first, second) =
        (client(&servers).await, client(&servers).await, client(&servers).await);
    let guard = lock(&ours, "held").await;
    let (first, second) = (spawn_waiter(&first, "held").await, spawn_waiter(&second, "held").await);
    let leader = servers.leader();
    servers.kill(leader);
    assert!(tokio::time::timeout(TTL * 2, guard.lost()).await.is_err(), "it was renewed");
    within(RECOVERED, "a new leader", guard.confirm()).await.unwrap();
    guard.release().await.unwrap();
    let next = await_served(RECOVERED, first).await;
    assert!(!second.is_finished(), "the order was kept");
    servers.bring_back(leader);
    next.release().await.unwrap();
    await_served(RECOVERED, second).await.release().await.unwrap();
    assert_eq!(servers.keys("p/held/"), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_without_a_leader_is_completed_by_the_next_leader() {
    let servers = EtcdServers::start(3);
    let (ours, theirs) = (client(&servers).await, client(&servers).await);
    let guard = lock(&ours, "passed").await;
    let waiting = spawn_waiter(&theirs, "passed").await;
    let leader = servers.leader();
    servers.kill(leader);
    // Whether it is told as done or as unknown, it is done in the end.
    let _ = within(RECOVERED, "it is told", guard.release()).await;
    let next = await_served(RECOVERED, waiting).await;
    within(RECOVERED, "it is held", next.confirm()).await.unwrap();
    servers.bring_back(leader);
    assert_eq!(servers.keys("p/passed/").len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_majority_locks_become_uncertain_and_are_lost_by_their_deadline() {
    let servers = EtcdServers::start(3);
    let (ours, theirs) = (client(&servers).await, client(&servers).await);
    let guard = lock(&ours, "lonely").await;
    let waiting = spawn_waiter(&theirs, "lonely").await;
    let leader = servers.leader();
    let others: Vec<usize> = (0..3).filter(|node| *node != leader).collect();
    // The leader stays, and must not go on alone.
    others.iter().for_each(|node| servers.signal(*node, Signal::STOP));
    until("the guard doubts", || guard.state() == State::Uncertain);
    assert!(guard.valid_for() <= TTL);
    let busy = within(RECOVERED, "an answer", ours.mutex("new").unwrap().try_lock()).await;
    assert!(busy.unwrap_err().is_retryable());
    assert_eq!(await_lost(TTL, &guard).await, LossReason::Expired);
    assert!(!waiting.is_finished(), "it was granted without a majority");
    others.iter().for_each(|node| servers.signal(*node, Signal::CONT));
    let next = await_served(RECOVERED + TTL, waiting).await;
    assert!(next.token() > guard.token());
    let again = within(RECOVERED, "it goes on", ours.mutex("new").unwrap().lock()).await;
    again.unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_leaves_a_frozen_server_for_another() {
    let servers = EtcdServers::start(3);
    let ours = client(&servers).await;
    let guard = lock(&ours, "kept").await;
    // The client is at one of them; whichever that is, it is frozen at some time.
    for node in 0..3 {
        servers.signal(node, Signal::STOP);
        let cycle = async {
            until_free(&ours, "cycle").await;
            guard.confirm().await
        };
        // A first word may fall into the silence.
        let _ = within(RECOVERED, "the others answer", cycle).await;
        within(RECOVERED, "the others answer", until_free(&ours, "cycle")).await;
        assert!(!matches!(guard.state(), State::Lost(_)), "{:?}", guard.state());
        servers.signal(node, Signal::CONT);
        servers.await_well();
        within(RECOVERED, "it is held", async {
            while guard.state() != State::Held {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        })
        .await;
    }
    guard.release().await.unwrap();
}

/// A lock is taken and given back, however often it must be asked for.
async fn until_free(locks: &Lockset, name: &str) {
    loop {
        match locks.mutex(name).unwrap().try_lock().await {
            Ok(Some(guard)) => return drop(guard.release().await),
            Ok(None) => {}
            Err(error) => assert!(error.is_retryable(), "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_address_in_the_url_causes_a_short_delay_only() {
    let servers = EtcdServers::start(3);
    servers.kill(0);
    let ours = within(RECOVERED, "a connection", client(&servers)).await;
    assert!(within(RECOVERED, "an answer", is_free(&ours, "free")).await);
    lock(&ours, "free").await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn two_clients_never_hold_at_once_while_leaders_are_killed() {
    let servers = EtcdServers::start(3);
    let clients = [client(&servers).await, client(&servers).await, client(&servers).await];
    let contenders = Contenders::start(&clients, 4, &["a", "b"]);
    for _ in 0..3 {
        contenders.wait_served(100, RECOVERED * 2).await;
        let leader = servers.leader();
        servers.kill(leader);
        contenders.wait_served(50, RECOVERED * 2).await;
        servers.bring_back(leader);
    }
    contenders.stop_and_check().await;
    until("nothing is left", || servers.keys("p/").is_empty());
}
