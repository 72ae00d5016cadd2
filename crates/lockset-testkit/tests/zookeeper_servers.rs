//! The ZooKeeper servers that the other tests break do break, and mend, as those tests believe.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::{Duration, Instant};

use lockset_testkit::stage::ZooKeeperServers;
use lockset_testkit::steps::until;

#[test]
fn a_restarted_server_keeps_its_data() {
    let servers = ZooKeeperServers::start(1);
    assert_eq!(servers.nodes()[0].role().as_deref(), Some("standalone"));
    let mut kazoo = servers.kazoo();
    kazoo.create("/a/b", "persistent");
    kazoo.set("/a/b", "kept");
    drop(kazoo);
    let before = servers.nodes()[0].last_transaction();
    servers.restart_leader();
    assert!(servers.nodes()[0].last_transaction() >= before);
    assert_eq!(servers.kazoo().data("/a/b").as_deref(), Some("kept"));
}

#[test]
fn an_ensemble_works_without_its_leader_and_readmits_it() {
    let servers = ZooKeeperServers::start(3);
    let old = servers.leader();
    servers.kazoo().create("/kept", "persistent");
    servers.nodes()[old].kill();
    servers.await_another_leader(old);
    assert!(servers.kazoo().stat("/kept").is_some());
    servers.nodes()[old].start_again();
    servers.await_serving();
    assert_eq!(servers.nodes()[old].role().as_deref(), Some("follower"));
    servers.restart_leader();
    assert!(servers.kazoo().stat("/kept").is_some());
}

#[test]
fn a_thaw_causes_no_election() {
    let servers = ZooKeeperServers::start(3);
    let leader = servers.leader();
    let epoch = servers.nodes()[leader].last_transaction() >> 32;
    servers.freeze();
    std::thread::sleep(Duration::from_millis(2500));
    servers.thaw();
    let mut kazoo = servers.kazoo();
    kazoo.create("/after", "persistent");
    let written = kazoo.stat("/after").unwrap().czxid;
    assert_eq!((servers.leader(), written >> 32), (leader, epoch));
}

#[test]
fn a_majority_is_required_and_sufficient() {
    let servers = ZooKeeperServers::start(3);
    let (leader, follower) = (servers.leader(), servers.follower());
    servers.nodes()[follower].kill();
    servers.kazoo().create("/by-two", "persistent");
    let other = 3 - leader - follower;
    servers.nodes()[other].kill();
    until("the last does not serve alone", || servers.nodes()[leader].role().is_none());
    servers.nodes()[other].start_again();
    until("two serve", || servers.nodes()[other].role().is_some());
    assert!(servers.kazoo().stat("/by-two").is_some());
}

#[test]
fn empty_containers_are_reaped_and_ephemeral_nodes_end_with_their_session() {
    let servers = ZooKeeperServers::start(1);
    let (mut kazoo, mut another) = (servers.kazoo(), servers.kazoo());
    kazoo.create("/box", "container");
    let made = another.create("/box/one-", "sequential");
    assert_eq!(made, "/box/one-0000000000");
    assert_ne!(kazoo.stat(&made).unwrap().owner, 0);
    // A killed client's session is not closed: it ends by its time.
    drop(another);
    let began = Instant::now();
    until("its session ends", || kazoo.stat(&made).is_none());
    assert!(began.elapsed() > Duration::from_secs(1), "it was closed");
    until("the container is reaped", || kazoo.stat("/box").is_none());
}

#[test]
fn servers_end_with_the_test_process() {
    let servers = ZooKeeperServers::start(1);
    let port = servers.nodes()[0].port();
    drop(servers);
    assert!(std::net::TcpStream::connect(("127.0.0.1", port)).is_err(), "it still listens");
}

#[test]
fn the_child_counter_of_a_server_can_be_set_near_its_maximum() {
    let servers = ZooKeeperServers::start(1);
    servers.kazoo().create("/counted", "persistent");
    servers.nodes()[0].count_children_from("/counted", i32::MAX - 1);
    let mut kazoo = servers.kazoo();
    // What ZooKeeper 3.8 makes of it: it stays at the last number.
    let names = ["a-2147483646", "b-2147483647", "c-2147483647", "d-2147483647"];
    for name in names {
        let made = kazoo.create(&format!("/counted/{}", &name[..2]), "sequential");
        assert_eq!(made, format!("/counted/{name}"));
    }
}

#[test]
fn an_operator_can_end_a_session() {
    let servers = ZooKeeperServers::start(3);
    let (mut kazoo, mut victim) = (servers.kazoo(), servers.kazoo());
    let made = victim.create("/made", "ephemeral");
    let session = kazoo.stat(&made).unwrap().owner;
    assert!(servers.server_of(session).is_some());
    kazoo.end_session(session);
    assert!(kazoo.stat(&made).is_none());
}
