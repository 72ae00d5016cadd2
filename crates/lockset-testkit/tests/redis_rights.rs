//! What a user may do on a Redis server, and what it costs if that is not enough for some names.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use lockset::{Guard, Lockset, LossReason, State};
use lockset_testkit::stage::RedisServer;
use lockset_testkit::steps::{
    assert_error, await_lock_state, await_lost, await_served, client, exercise_and_break, is_free,
    lock, spawn_waiter, until, within,
};

const TTL: Duration = Duration::from_secs(3);
const SOON: Duration = Duration::from_secs(1);

/// A server, and where the documented user enters it.
fn guarded() -> (RedisServer, String) {
    let server = RedisServer::start();
    server.add_documented_user("change-me", &[]);
    let url = format!("redis://lockset:change-me@127.0.0.1:{}", server.port());
    (server, url)
}

fn change(server: &RedisServer, rules: &[&str]) {
    assert_eq!(server.ask(&[&["ACL", "SETUSER", "lockset"], rules].concat()), "OK");
}

/// Only names of our team, and what is beside them.
const OURS: [&str; 3] = ["resetkeys", "~lockset:ours/*", "~{lockset:ours/*"];

#[tokio::test(flavor = "multi_thread")]
async fn the_documented_rules_are_enough_for_a_quorum() {
    let servers = [RedisServer::start(), RedisServer::start(), RedisServer::start()];
    servers.iter().for_each(|server| server.add_documented_user("change-me", &[]));
    let hosts: Vec<String> =
        servers.iter().map(|it| format!("lockset:change-me@127.0.0.1:{}", it.port())).collect();
    let url = format!("redlock://{}?max_ttl=3s", hosts.join(","));
    // The settings may not be read, so servers are not counted at first.
    let counted = async {
        loop {
            match Lockset::builder(&url).ttl(TTL).connect().await {
                Ok(locks) => return locks,
                Err(error) => assert_error(&error, &["started lately"], true),
            }
            tokio::time::sleep(TTL / 10).await;
        }
    };
    let ours = within(TTL * 3, "the servers are counted", counted).await;
    let theirs = client(&url, TTL).await;
    let guard = lock(&ours, "mutex").await;
    let mutex = theirs.mutex("mutex").unwrap();
    let waiting = tokio::spawn(async move { mutex.lock().await });
    until("a client waits", || {
        servers.iter().any(|server| server.ask(&["ZCARD", "{lockset:mutex}:queue"]) == "1")
    });
    guard.release().await.unwrap();
    await_served(SOON, waiting).await.release().await.unwrap();
}

/// The rules that `docs/redis.md` gives are enough for everything, and for nothing else.
#[tokio::test(flavor = "multi_thread")]
async fn the_documented_rules_are_enough() {
    let (server, url) = guarded();
    let (ours, theirs) = (client(&url, TTL).await, client(&url, TTL).await);

    let guard = exercise_and_break(SOON, &ours, &theirs, "mutex").await;
    assert_eq!(await_lost(SOON, &guard).await, LossReason::Broken);

    let (reads, reads_too) = (ours.rwlock("{tag}/rw").unwrap(), theirs.rwlock("{tag}/rw").unwrap());
    let writer = reads.write().await.unwrap();
    writer.downgrade().await.unwrap();
    let reader = reads_too.try_read().await.unwrap().expect("readers share");
    assert!(tokio::time::timeout(TTL * 2, reader.lost()).await.is_err(), "it was renewed");
    assert_eq!((writer.state(), reader.state()), (State::Held, State::Held));
    let permit = ours.semaphore("permits", 2).unwrap().acquire_many(2).await.unwrap();
    permit.release().await.unwrap();
    ours.latch("latch", 1).unwrap().count_down().await.unwrap();
    theirs.latch("latch", 1).unwrap().wait().await.unwrap();
    let (mut all, kept) = (ours.watch("").unwrap(), lock(&theirs, "seen").await);
    let seen = async { while all.next().await.unwrap().unwrap().name.as_str() != "seen" {} };
    within(SOON, "the grant is seen", seen).await;
    kept.release().await.unwrap();
    // `t`: what is read is tracked; `B`: every change of some keys is pushed.
    let clients = server.ask(&["CLIENT", "LIST"]);
    let fields = || clients.split_whitespace().filter_map(|field| field.strip_prefix("flags="));
    for flag in ['t', 'B'] {
        assert!(
            fields().any(|flags| flags.contains(flag)),
            "no client is notified of changes: {clients}"
        );
    }
    ours.close().await.unwrap();

    let error = match Lockset::connect(&format!("{url}?prefix=other:")).await {
        Err(error) => error,
        // Redis 6.0 does not mind the channel, but the keys.
        Ok(others) => others.mutex("refused").unwrap().try_lock().await.unwrap_err(),
    };
    assert_error(&error, &["check user, password and ACL rules"], false);
}

/// They are asked for together, in one request that the server refuses as a whole.
#[tokio::test(flavor = "multi_thread")]
async fn a_name_without_rights_does_not_affect_other_locks() {
    let (server, url) = guarded();
    change(&server, &OURS);
    let locks = client(&url, TTL).await;
    for _ in 0..3 {
        let names: Vec<String> = (0..50).map(|n| format!("ours/{n}")).collect();
        let mutexes = names.iter().map(String::as_str).chain(["theirs/x"]);
        let mutexes: Vec<_> = mutexes.map(|name| locks.mutex(name).unwrap()).collect();
        let mut guards = join_all(mutexes.iter().map(|mutex| mutex.try_lock())).await;
        let refused = guards.pop().unwrap().unwrap_err();
        assert_error(&refused, &["check user, password and ACL rules"], false);
        let guards: Vec<Guard> = guards.into_iter().map(|it| it.unwrap().unwrap()).collect();
        let release = guards.into_iter().map(Guard::release);
        join_all(release).await.into_iter().for_each(|released| released.unwrap());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_right_affects_only_its_own_lock() {
    let (server, url) = guarded();
    let locks = client(&url, TTL).await;
    let mut guards = Vec::new();
    for name in (0..20).map(|n| format!("ours/{n}")).chain(["theirs/x".to_owned()]) {
        guards.push(lock(&locks, &name).await);
    }
    change(&server, &OURS);
    let theirs = guards.pop().unwrap();
    await_lost(TTL, &theirs).await;
    tokio::time::sleep(TTL).await;
    assert!(guards.iter().all(|guard| guard.state() == State::Held));
}

/// Told by the script for one claim, not for the whole request.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_without_the_right_to_send_heartbeats_is_told() {
    let (server, url) = guarded();
    let holder = client(&server.url(), Duration::from_secs(60)).await;
    let _kept = lock(&holder, "n").await;
    let waiting = spawn_waiter(&client(&url, TTL).await, "n").await;
    change(&server, &["-hset"]);
    let refused = within(TTL, "an error", waiting).await.unwrap().unwrap_err();
    assert_error(&refused, &["check user, password and ACL rules"], false);
}

/// The holder stays, so nothing else would ever wake it.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_whose_right_is_revoked_fails_and_others_keep_waiting() {
    let (server, url) = guarded();
    let holder = client(&server.url(), Duration::from_secs(60)).await;
    let (kept, other) = (lock(&holder, "ours/a").await, lock(&holder, "theirs/x").await);
    let locks = client(&url, TTL).await;
    let (waits, is_told) =
        (spawn_waiter(&locks, "ours/a").await, spawn_waiter(&locks, "theirs/x").await);
    change(&server, &OURS);
    let refused = within(TTL, "an error", is_told).await.unwrap().unwrap_err();
    assert_error(&refused, &["check user, password and ACL rules"], false);
    tokio::time::sleep(TTL).await;
    await_lock_state(&holder, "ours/a", |state| state.waiters.len() == 1).await;
    kept.release().await.unwrap();
    await_served(SOON, waits).await.release().await.unwrap();
    other.release().await.unwrap();
    assert!(is_free(&holder, "theirs/x").await);
}

/// Changes are then found by polling, and the end of a foreign lock by the next heartbeat.
#[tokio::test(flavor = "multi_thread")]
async fn without_the_right_to_track_changes_a_watch_polls() {
    let (server, url) = guarded();
    change(&server, &["-client"]);
    let (ours, theirs) = (client(&url, TTL).await, client(&url, TTL).await);
    let (mut one, mut all) = (theirs.watch_name("n").unwrap(), theirs.watch("").unwrap());
    for round in 0..2 {
        let guard = lock(&ours, "n").await;
        for states in [&mut one, &mut all] {
            let held = async { while states.next().await.unwrap().unwrap().holders.is_empty() {} };
            within(SOON * 2, &format!("the grant, round {round}"), held).await;
        }
        guard.release().await.unwrap();
        for states in [&mut one, &mut all] {
            let free = async { while !states.next().await.unwrap().unwrap().holders.is_empty() {} };
            within(SOON * 2, &format!("the release, round {round}"), free).await;
        }
    }
    assert_eq!(server.ask(&["SET", "lockset:n", "foreign", "PX", "60000"]), "OK");
    let waiting = spawn_waiter(&ours, "n").await;
    server.ask(&["DEL", "lockset:n"]);
    await_served(TTL / 6 + SOON, waiting).await.release().await.unwrap();
}
