//! The etcd servers that the other tests break do break, and mend, as those tests believe.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::{Duration, Instant};

use lockset_testkit::stage::EtcdServers;
use lockset_testkit::steps::until;

#[test]
fn a_restarted_server_keeps_its_data() {
    let server = EtcdServers::start(1);
    server.ask(&["put", "key", "value"]);
    let before = server.revision();
    server.restart_leader();
    assert_eq!(server.ask(&["get", "--print-value-only", "key"]), "value");
    assert_eq!(server.revision(), before, "it goes on counting where it was");
    assert_eq!(server.keys("k"), ["key"]);
}

#[test]
fn a_lease_of_one_second_is_granted_as_such_and_ends() {
    let server = EtcdServers::start(1);
    let granted = server.ask(&["lease", "grant", "1"]);
    assert!(granted.ends_with("TTL(1s)"), "{granted}");
    let lease = granted.split(' ').nth(1).unwrap();
    assert_eq!(server.leases(), [lease]);
    let began = Instant::now();
    until("the lease has ended", || server.leases().is_empty());
    // What the stages call their lag.
    assert!(began.elapsed() < Duration::from_secs(2), "it took {:?}", began.elapsed());
}

#[test]
fn another_server_leads_when_the_leader_is_killed() {
    let servers = EtcdServers::start(3);
    servers.ask(&["put", "key", "value"]);
    for _ in 0..2 {
        let old = servers.leader();
        servers.kill(old);
        until("another leads", || servers.leader() != old);
        assert_eq!(servers.ask(&["get", "--print-value-only", "key"]), "value");
        servers.bring_back(old);
    }
    let old = servers.restart_leader();
    assert!(servers.is_well(old));
}

#[test]
fn frozen_servers_do_not_answer_and_thawed_ones_do() {
    let servers = EtcdServers::start(3);
    servers.freeze();
    assert!((0..3).all(|node| !servers.is_well(node)));
    servers.thaw();
    servers.await_well();
    servers.leader();
}
