//! What an ensemble of three ZooKeeper servers goes on with, and what it does not.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::Duration;

use lockset::{LossReason, State};
use lockset_testkit::contenders::Contenders;
use lockset_testkit::stage::{Chroot, Eyes};
use lockset_testkit::steps::{becomes, client, is_free, lock, lost, served, waiter, within};

type Home = Chroot<3>;

/// Long enough for another server to be elected before a session ends, also on a busy machine.
const TTL: Duration = Duration::from_secs(6);
/// Too short for a session to end.
const SOON: Duration = Duration::from_millis(1500);
/// How long an election may take on a busy machine.
const ELECTION: Duration = Duration::from_secs(40);

fn home() -> (Home, Eyes) {
    let home = Home::start("");
    let eyes = home.servers().eyes();
    (home, eyes)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_dies_costs_neither_lock_nor_place() {
    let (home, _) = home();
    let url = home.url();
    let (ours, first, second) =
        (client(&url, TTL).await, client(&url, TTL).await, client(&url, TTL).await);
    let guard = lock(&ours, "held").await;
    let (first, second) = (waiter(&first, "held").await, waiter(&second, "held").await);
    let old = home.servers().leader();
    home.servers().nodes()[old].kill();
    home.servers().await_another_leader(old);
    becomes(ELECTION, &guard, State::Held).await;
    within(ELECTION, "an answer", guard.confirm()).await.unwrap();
    assert!(!first.is_finished() && !second.is_finished());
    home.servers().nodes()[old].start_again();
    home.servers().await_serving();
    let token = guard.token();
    guard.release().await.unwrap();
    let guard = served(SOON, first).await;
    assert!(guard.token() > token);
    assert!(!second.is_finished(), "the order was kept");
    guard.release().await.unwrap();
    served(SOON, second).await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_died_with_the_leader_is_succeeded() {
    let (home, mut eyes) = home();
    let (ours, theirs) = (client(&home.url(), TTL).await, client(&home.url(), TTL).await);
    let leader = home.servers().leader();
    let peer = Eyes::on(&home.servers().nodes()[leader].host());
    let mut peer = peer;
    let node = peer.create(&home.path("orphaned/_c_0-lock-"), "sequential");
    let waiting = waiter(&theirs, "orphaned").await;
    drop(peer);
    home.servers().nodes()[leader].kill();
    home.servers().await_another_leader(leader);
    // A new leader lets all sessions begin anew.
    served(ELECTION + TTL, waiting).await.release().await.unwrap();
    assert!(eyes.stat(&node).is_none());
    assert!(is_free(&ours, "orphaned").await);
    home.servers().nodes()[leader].start_again();
    home.servers().await_serving();
}

/// The server that the client is connected with stops; the client goes to another in time. It does
/// not lead: the others would wait longer for a leader than this session lasts.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_falls_silent_is_left_in_time() {
    let (home, mut eyes) = home();
    let leader = home.servers().leader();
    let (guard, node, server) = loop {
        let ours = client(&home.url(), TTL).await;
        let guard = lock(&ours, "moved").await;
        let node = home.only_node(&mut eyes, "moved");
        let server = home.servers().server_of(eyes.stat(&node).unwrap().owner);
        match server.expect("it is connected") {
            server if server != leader => break (guard, node, server),
            _ => ours.close().await.unwrap(),
        }
    };
    // Whoever looks must not be there too.
    let mut eyes = Eyes::on(&home.servers().nodes()[leader].host());
    let session = eyes.stat(&node).unwrap().owner;
    home.servers().nodes()[server].freeze();
    let kept = tokio::time::timeout(TTL * 2, guard.lost()).await;
    let moved = home.servers().server_of(session);
    home.servers().nodes()[server].thaw();
    assert!(kept.is_err(), "it was lost: {kept:?}");
    assert!(moved.is_some_and(|moved| moved != server), "it went to {moved:?}");
    becomes(ELECTION, &guard, State::Held).await;
    let stat = eyes.stat(&node).unwrap();
    assert_eq!((stat.czxid, stat.owner), (guard.token().get(), session), "all is as it was");
    guard.release().await.unwrap();
    home.servers().await_serving();
}

/// The server answers, but only for itself: what it says is no proof that we still hold.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_the_others_is_not_believed() {
    let (home, _) = home();
    let alone = home.servers().follower();
    let port = home.servers().nodes()[alone].port();
    let ours = client(&home.url_by(&[port]), TTL).await;
    let guard = lock(&ours, "cut off").await;
    for other in (0..3).filter(|other| *other != alone) {
        home.servers().nodes()[other].freeze();
    }
    assert_eq!(lost(TTL, &guard).await, LossReason::Expired);
    home.servers().thaw();
    within(ELECTION + TTL, "it goes on", lock(&ours, "cut off")).await.release().await.unwrap();
    home.servers().await_serving();
}

#[tokio::test(flavor = "multi_thread")]
async fn without_most_servers_locks_are_lost_and_with_them_they_can_be_had_again() {
    let (home, _) = home();
    let (ours, theirs) = (client(&home.url(), TTL).await, client(&home.url(), TTL).await);
    let guard = lock(&ours, "quorum").await;
    let waiting = waiter(&theirs, "quorum").await;
    let dead = [home.servers().leader(), home.servers().follower()];
    dead.iter().for_each(|node| home.servers().nodes()[*node].kill());
    assert_eq!(lost(TTL, &guard).await, LossReason::Expired);
    let patience = Duration::from_millis(500);
    let another = theirs.mutex("another").unwrap();
    let refused = within(patience + SOON, "an answer", another.lock_within(patience)).await;
    let error = refused.unwrap_err();
    assert!(error.is_retryable(), "{error:?}");
    assert!(!waiting.is_finished(), "nobody is granted anything");
    dead.iter().for_each(|node| home.servers().nodes()[*node].start_again());
    home.servers().await_serving();
    let next = served(ELECTION + TTL, waiting).await;
    assert!(next.token() > guard.token());
    within(TTL, "the other goes on", lock(&ours, "another")).await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_ever_holds_together_while_leaders_come_and_go() {
    let (home, _) = home();
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(client(&home.url(), TTL).await);
    }
    let contenders = Contenders::gather(&clients, 2, &["turns", "others"]);
    contenders.served(20, ELECTION).await;
    for _ in 0..3 {
        let leader = home.servers().leader();
        home.servers().nodes()[leader].kill();
        home.servers().await_another_leader(leader);
        contenders.served(10, ELECTION + TTL).await;
        home.servers().nodes()[leader].start_again();
        home.servers().await_serving();
        let leader = home.servers().leader();
        home.servers().nodes()[leader].freeze();
        tokio::time::sleep(Duration::from_secs(2)).await;
        home.servers().nodes()[leader].thaw();
        contenders.served(10, ELECTION + TTL).await;
    }
    contenders.part().await;
}
