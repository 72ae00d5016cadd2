//! The ZooKeeper servers that the other tests break do break, and mend, as those tests believe.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::{Duration, Instant};

use lockset_testkit::stage::ZooKeeperServers;
use lockset_testkit::steps::until;

#[test]
fn a_server_comes_back_with_what_it_had() {
    let servers = ZooKeeperServers::start(1);
    assert_eq!(servers.nodes()[0].role().as_deref(), Some("standalone"));
    let mut eyes = servers.eyes();
    eyes.create("/a/b", "persistent");
    eyes.set("/a/b", "kept");
    drop(eyes);
    let before = servers.nodes()[0].last_transaction();
    servers.restart_leader();
    assert!(servers.nodes()[0].last_transaction() >= before);
    assert_eq!(servers.eyes().data("/a/b").as_deref(), Some("kept"));
}

#[test]
fn an_ensemble_goes_on_without_its_leader_and_takes_it_back() {
    let servers = ZooKeeperServers::start(3);
    let old = servers.leader();
    servers.eyes().create("/kept", "persistent");
    servers.nodes()[old].kill();
    servers.await_another_leader(old);
    assert!(servers.eyes().stat("/kept").is_some());
    servers.nodes()[old].start_again();
    servers.await_serving();
    assert_eq!(servers.nodes()[old].role().as_deref(), Some("follower"));
    servers.restart_leader();
    assert!(servers.eyes().stat("/kept").is_some());
}

#[test]
fn a_thaw_is_not_an_election() {
    let servers = ZooKeeperServers::start(3);
    let leader = servers.leader();
    let epoch = servers.nodes()[leader].last_transaction() >> 32;
    servers.freeze();
    std::thread::sleep(Duration::from_millis(2500));
    servers.thaw();
    let mut eyes = servers.eyes();
    eyes.create("/after", "persistent");
    let written = eyes.stat("/after").unwrap().czxid;
    assert_eq!((servers.leader(), written >> 32), (leader, epoch));
}

#[test]
fn most_servers_are_enough_and_fewer_are_not() {
    let servers = ZooKeeperServers::start(3);
    let (leader, follower) = (servers.leader(), servers.follower());
    servers.nodes()[follower].kill();
    servers.eyes().create("/by-two", "persistent");
    let other = 3 - leader - follower;
    servers.nodes()[other].kill();
    until("the last does not serve alone", || servers.nodes()[leader].role().is_none());
    servers.nodes()[other].start_again();
    until("two serve", || servers.nodes()[other].role().is_some());
    assert!(servers.eyes().stat("/by-two").is_some());
}

#[test]
fn an_empty_container_is_reaped_and_what_a_session_made_ends_with_it() {
    let servers = ZooKeeperServers::start(1);
    let (mut eyes, mut another) = (servers.eyes(), servers.eyes());
    eyes.create("/box", "container");
    let made = another.create("/box/one-", "sequential");
    assert_eq!(made, "/box/one-0000000000");
    assert_ne!(eyes.stat(&made).unwrap().owner, 0);
    // A killed client's session is not closed: it ends by its time.
    drop(another);
    let began = Instant::now();
    until("its session ends", || eyes.stat(&made).is_none());
    assert!(began.elapsed() > Duration::from_secs(1), "it was closed");
    until("the container is reaped", || eyes.stat("/box").is_none());
}

#[test]
fn servers_end_with_the_process_that_left_them() {
    let servers = ZooKeeperServers::start(1);
    let port = servers.nodes()[0].port();
    drop(servers);
    assert!(std::net::TcpStream::connect(("127.0.0.1", port)).is_err(), "it still listens");
}

#[test]
fn a_server_can_be_made_to_count_beyond_its_numbers() {
    let servers = ZooKeeperServers::start(1);
    servers.eyes().create("/counted", "persistent");
    servers.nodes()[0].count_children_from("/counted", i32::MAX - 1);
    let mut eyes = servers.eyes();
    // What ZooKeeper 3.8 makes of it: it stays at the last number.
    let names = ["a-2147483646", "b-2147483647", "c-2147483647", "d-2147483647"];
    for name in names {
        let made = eyes.create(&format!("/counted/{}", &name[..2]), "sequential");
        assert_eq!(made, format!("/counted/{name}"));
    }
}

#[test]
fn an_operator_can_end_a_session() {
    let servers = ZooKeeperServers::start(3);
    let (mut eyes, mut victim) = (servers.eyes(), servers.eyes());
    let made = victim.create("/made", "ephemeral");
    let session = eyes.stat(&made).unwrap().owner;
    assert!(servers.server_of(session).is_some());
    eyes.end_session(session);
    assert!(eyes.stat(&made).is_none());
}
