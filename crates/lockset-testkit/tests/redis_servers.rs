//! The servers that the other tests break do break, and mend, as those tests believe.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::Duration;

use lockset_testkit::stage::{RedisCluster, RedisSentinel};
use lockset_testkit::steps::until;
use rustix::process::Signal;

#[test]
fn sentinels_promote_a_replica_when_the_master_dies_or_stops() {
    let servers = RedisSentinel::start();
    assert_eq!(servers.master(), 0);
    servers.servers()[0].ask(&["SET", "key", "value"]);
    until("it is replicated", || servers.servers()[0].is_replicated_to(2));
    let old = servers.kill_master();
    let second = servers.master();
    assert_eq!((old, servers.servers()[second].ask(&["GET", "key"])), (0, "value".to_owned()));
    servers.bring_back(old);
    assert_eq!(servers.servers()[old].ask(&["GET", "key"]), "value");
    assert_eq!(servers.stop_master(), second);
    let third = servers.master();
    assert_ne!(third, second);
    servers.resume(second);
    assert_eq!(servers.master(), third);
}

#[test]
fn a_thaw_causes_no_failover() {
    for span in [1, 3] {
        let servers = RedisSentinel::start();
        servers.freeze();
        std::thread::sleep(Duration::from_secs(span));
        servers.thaw();
        // Long enough for a failover.
        std::thread::sleep(Duration::from_secs(3));
        assert_eq!(servers.master(), 0, "after {span} s");
    }
}

#[test]
fn two_sentinels_are_enough() {
    let servers = RedisSentinel::start();
    servers.sentinels()[0].signal(Signal::STOP);
    servers.servers()[0].kill();
    let named = |sentinel: usize| {
        let ask = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "locks"];
        servers.sentinels()[sentinel].ask(&ask)
    };
    let old = servers.servers()[0].port().to_string();
    until("the others go on", || [1, 2].iter().all(|one| !named(*one).contains(&old)));
}

#[test]
fn a_slot_moves_with_its_keys() {
    let cluster = RedisCluster::start();
    let slot = cluster.slot_of("{tag}");
    let from = cluster.owner(slot);
    let to = cluster.another_master(from);
    for key in ["{tag}1", "{tag}2", "{tag} 3"] {
        assert_eq!(cluster.nodes()[from].ask(&["SET", key, key, "PX", "60000"]), "OK");
    }
    assert_eq!(cluster.begin_migration(slot, to), from);
    assert!(cluster.move_a_key(slot, from, to).is_some());
    cluster.finish_migration(slot, from, to);
    assert_eq!(cluster.owner(slot), to);
    assert_eq!(cluster.nodes()[to].ask(&["GET", "{tag} 3"]), "{tag} 3");
    assert!(cluster.nodes()[from].ask(&["GET", "{tag} 3"]).starts_with("MOVED"));
    cluster.migrate_slot(slot, from);
    assert_eq!(cluster.nodes()[from].ask(&["GET", "{tag}1"]), "{tag}1");
    cluster.restart();
    assert_eq!(cluster.nodes()[from].ask(&["GET", "{tag}1"]), "{tag}1", "it was written down");
}

#[test]
fn a_replica_takes_the_slots_of_a_dead_master() {
    let cluster = RedisCluster::start_with_replicas();
    let slot = cluster.slot_of("key");
    let old = cluster.owner(slot);
    cluster.nodes()[old].ask(&["SET", "key", "value"]);
    until("it is replicated", || cluster.nodes()[old].is_replicated_to(1));
    assert_eq!(cluster.kill_owner(slot), old);
    let new = cluster.owner(slot);
    assert_eq!(cluster.nodes()[new].ask(&["GET", "key"]), "value");
    cluster.nodes()[old].restart();
    cluster.await_ok();
    assert_eq!(cluster.owner(slot), new);
}

#[test]
fn sentinels_promote_one_after_the_other() {
    let servers = RedisSentinel::start();
    for _ in 0..4 {
        let old = servers.kill_master();
        servers.bring_back(old);
        assert_ne!(servers.master(), old);
    }
}
