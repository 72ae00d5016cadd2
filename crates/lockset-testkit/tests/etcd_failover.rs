//! A cluster of etcd servers that loses its leader, most of its servers, or one of them.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::Duration;

use lockset::{Lockset, LossReason, State};
use lockset_testkit::contenders::Contenders;
use lockset_testkit::stage::EtcdServers;
use lockset_testkit::steps::{self, is_free, lock, lost, served, until, waiter, within};
use rustix::process::Signal;

/// Long enough for an election in the time between two renewals and the deadline.
const TTL: Duration = Duration::from_secs(6);
/// An election, a server that does not answer, and a busy machine.
const RECOVERED: Duration = Duration::from_secs(15);

async fn client(servers: &EtcdServers) -> Lockset {
    steps::client(&servers.url("p"), TTL).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_death_of_the_leader_costs_neither_lock_nor_place() {
    let servers = EtcdServers::start(3);
    let (ours, first, second) =
        (client(&servers).await, client(&servers).await, client(&servers).await);
    let guard = lock(&ours, "held").await;
    let (first, second) = (waiter(&first, "held").await, waiter(&second, "held").await);
    let leader = servers.leader();
    servers.kill(leader);
    assert!(tokio::time::timeout(TTL * 2, guard.lost()).await.is_err(), "it was renewed");
    within(RECOVERED, "a new leader", guard.confirm()).await.unwrap();
    guard.release().await.unwrap();
    let next = served(RECOVERED, first).await;
    assert!(!second.is_finished(), "the order was kept");
    servers.bring_back(leader);
    next.release().await.unwrap();
    served(RECOVERED, second).await.release().await.unwrap();
    assert_eq!(servers.keys("p/held/"), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_given_back_while_there_is_no_leader_is_passed_on_by_the_next() {
    let servers = EtcdServers::start(3);
    let (ours, theirs) = (client(&servers).await, client(&servers).await);
    let guard = lock(&ours, "passed").await;
    let waiting = waiter(&theirs, "passed").await;
    let leader = servers.leader();
    servers.kill(leader);
    // Whether it is told as done or as unknown, it is done in the end.
    let _ = within(RECOVERED, "it is told", guard.release()).await;
    let next = served(RECOVERED, waiting).await;
    within(RECOVERED, "it is held", next.confirm()).await.unwrap();
    servers.bring_back(leader);
    assert_eq!(servers.keys("p/passed/").len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_majority_locks_are_doubted_and_lost_by_their_deadline() {
    let servers = EtcdServers::start(3);
    let (ours, theirs) = (client(&servers).await, client(&servers).await);
    let guard = lock(&ours, "lonely").await;
    let waiting = waiter(&theirs, "lonely").await;
    let leader = servers.leader();
    let others: Vec<usize> = (0..3).filter(|node| *node != leader).collect();
    // The leader stays, and must not go on alone.
    others.iter().for_each(|node| servers.signal(*node, Signal::STOP));
    until("the guard doubts", || guard.state() == State::Uncertain);
    assert!(guard.valid_for() <= TTL);
    let busy = within(RECOVERED, "an answer", ours.mutex("new").unwrap().try_lock()).await;
    assert!(busy.unwrap_err().is_retryable());
    assert_eq!(lost(TTL, &guard).await, LossReason::Expired);
    assert!(!waiting.is_finished(), "nobody can be granted anything");
    others.iter().for_each(|node| servers.signal(*node, Signal::CONT));
    let next = served(RECOVERED + TTL, waiting).await;
    assert!(next.token() > guard.token());
    let again = within(RECOVERED, "it goes on", ours.mutex("new").unwrap().lock()).await;
    again.unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_freezes_under_its_client_is_left_for_another() {
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
async fn a_dead_address_in_the_url_costs_a_moment() {
    let servers = EtcdServers::start(3);
    servers.kill(0);
    let ours = within(RECOVERED, "a connection", client(&servers)).await;
    assert!(within(RECOVERED, "an answer", is_free(&ours, "free")).await);
    lock(&ours, "free").await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn no_two_believe_at_once_while_leaders_die() {
    let servers = EtcdServers::start(3);
    let clients = [client(&servers).await, client(&servers).await, client(&servers).await];
    let contenders = Contenders::gather(&clients, 4, &["a", "b"]);
    for _ in 0..3 {
        contenders.served(100, RECOVERED * 2).await;
        let leader = servers.leader();
        servers.kill(leader);
        contenders.served(50, RECOVERED * 2).await;
        servers.bring_back(leader);
    }
    contenders.part().await;
    until("nothing is left", || servers.keys("p/").is_empty());
}
