//! What the ZooKeeper engine makes of nodes that others delete, write, count and guard.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::{Duration, Instant};

use lockset::{Guard, Lockset, State};
use lockset_testkit::contenders::Contenders;
use lockset_testkit::stage::{Chroot, KazooClient, ZooKeeperNode, ZooKeeperServers};
use lockset_testkit::steps::{
    PendingLock, assert_error, await_lost, await_served, client, error_chain, is_free, lock,
    spawn_waiter, until, within,
};

type Home = Chroot<1>;

/// A lock is then trusted for 2 s after each renewal, which come every second.
const TTL: Duration = Duration::from_secs(3);
/// Too short for any session to end, and for a renewal after which it would be noticed anyway.
const SOON: Duration = Duration::from_millis(900);
/// A third of the ttl, and the time that an answer takes on a busy machine.
const BY_RENEWAL: Duration = Duration::from_millis(1800);

fn chroot() -> (Home, KazooClient) {
    let chroot = Home::start("");
    let kazoo = chroot.servers().kazoo();
    (chroot, kazoo)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reaped_parent_is_created_again() {
    let (chroot, mut kazoo) = chroot();
    let ours = client(&chroot.url(), TTL).await;
    let mut last = None;
    for _ in 0..3 {
        let guard = lock(&ours, "reaped").await;
        assert!(Some(guard.token()) > last, "{:?} after {last:?}", guard.token());
        last = Some(guard.token());
        guard.release().await.unwrap();
        until("the empty parent is reaped", || kazoo.stat(&chroot.path("reaped")).is_none());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_request_fails_while_parents_are_reaped_and_created() {
    let (chroot, _) = chroot();
    let (ours, theirs) = (client(&chroot.url(), TTL).await, client(&chroot.url(), TTL).await);
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(4) {
        let pause = began.elapsed().subsec_micros() % 300;
        tokio::time::sleep(Duration::from_millis(pause.into())).await;
        let (one, other) = tokio::join!(lock_and_release(&ours), lock_and_release(&theirs));
        assert_ne!(one, other);
    }
}

async fn lock_and_release(locks: &Lockset) -> lockset::Token {
    let guard = lock(locks, "hectic").await;
    let token = guard.token();
    guard.release().await.unwrap();
    token
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_parent_loses_the_lock_but_waiters_are_served() {
    let (chroot, mut kazoo) = chroot();
    let url = chroot.url();
    let (ours, first, second) =
        (client(&url, TTL).await, client(&url, TTL).await, client(&url, TTL).await);
    let guard = lock(&ours, "deleted").await;
    let (first, second) =
        (spawn_waiter(&first, "deleted").await, spawn_waiter(&second, "deleted").await);
    assert!(kazoo.delete(&chroot.path("deleted")));
    await_lost(BY_RENEWAL, &guard).await;
    // Their order may have changed: the client that comes back first is first. And nodes are
    // deleted one by one, so a client may have been served, and have lost it again, before the end.
    let (one, other) = within(TTL, "a waiter is served", first_of(first, second)).await;
    assert!(one.token() > guard.token());
    drop(one);
    let other = await_served(TTL, other).await;
    assert!(other.token() > guard.token());
    drop(other);
    lock(&ours, "deleted").await.release().await.unwrap();
    until("nothing is left", || chroot.contenders(&mut kazoo, "deleted").is_empty());
}

async fn first_of(mut one: PendingLock, mut other: PendingLock) -> (Guard, PendingLock) {
    tokio::select! {
        guard = &mut one => (guard.unwrap().unwrap(), other),
        guard = &mut other => (guard.unwrap().unwrap(), one),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_whose_node_was_deleted_is_still_served() {
    let (chroot, mut kazoo) = chroot();
    let (ours, theirs) = (client(&chroot.url(), TTL).await, client(&chroot.url(), TTL).await);
    let guard = lock(&ours, "waiting").await;
    let held = chroot.only_node(&mut kazoo, "waiting");
    let waiting = spawn_waiter(&theirs, "waiting").await;
    for node in chroot.contenders(&mut kazoo, "waiting") {
        let node = chroot.path(&format!("waiting/{node}"));
        if node != held {
            assert!(kazoo.delete(&node));
        }
    }
    guard.confirm().await.unwrap();
    guard.release().await.unwrap();
    await_served(BY_RENEWAL, waiting).await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_chroot_is_created_again() {
    let (chroot, mut kazoo) = chroot();
    let ours = client(&chroot.url(), TTL).await;
    let guard = lock(&ours, "gone").await;
    assert!(kazoo.delete(chroot.path("").trim_end_matches('/')));
    await_lost(BY_RENEWAL, &guard).await;
    let next = lock(&ours, "gone").await;
    assert!(next.token() > guard.token());
    next.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn foreign_data_in_our_nodes_is_harmless() {
    let (chroot, mut kazoo) = chroot();
    let (ours, theirs) = (client(&chroot.url(), TTL).await, client(&chroot.url(), TTL).await);
    let guard = lock(&ours, "scribbled").await;
    let node = chroot.only_node(&mut kazoo, "scribbled");
    let waiting = spawn_waiter(&theirs, "scribbled").await;
    for data in ["", "127.0.0.1", "\u{0}\u{1}\u{ff}", "{\"v\":1}", &"x".repeat(10_000)] {
        kazoo.set(&node, data);
        let state = theirs.inspect("scribbled").await.unwrap();
        assert_eq!((state.holders.len(), state.waiters.len()), (1, 1), "with {data:?}");
        assert_eq!(theirs.list("").await.unwrap().len(), 1);
    }
    guard.confirm().await.expect("its node is still there");
    guard.release().await.unwrap();
    await_served(SOON, waiting).await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_node_among_locks_is_reported_or_ignored() {
    let (chroot, mut kazoo) = chroot();
    let ours = client(&chroot.url(), TTL).await;
    lock(&ours, "fine").await.release().await.unwrap();
    // A file, so to speak, where a folder is expected: it has no children, so it is free.
    kazoo.create(&chroot.path("plain"), "persistent");
    kazoo.set(&chroot.path("plain"), "not ours");
    let guard = lock(&ours, "plain").await;
    assert_eq!(kazoo.data(&chroot.path("plain")).as_deref(), Some("not ours"));
    guard.release().await.unwrap();
    // An ephemeral node cannot have children.
    kazoo.create(&chroot.path("leaf"), "ephemeral");
    let error = ours.mutex("leaf").unwrap().try_lock().await.unwrap_err();
    assert!(error_chain(&error).contains("leaf"), "{}", error_chain(&error));
    assert!(!error.is_retryable(), "{}", error_chain(&error));
}

/// A parent that has had as many children as ZooKeeper can count.
#[tokio::test(flavor = "multi_thread")]
async fn locks_stay_exclusive_when_sequence_numbers_run_out() {
    let (chroot, mut kazoo) = chroot();
    // A container would be reaped, and its successor begins at zero.
    kazoo.create(&chroot.path("full"), "persistent");
    drop(kazoo);
    chroot.servers().nodes()[0].count_children_from(&chroot.path("full"), i32::MAX - 12);
    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(client(&chroot.url(), TTL).await);
    }
    // Waiters who queue before the numbers end, and after.
    for _ in 0..4 {
        let holder = lock(&clients[0], "full").await;
        let waiting =
            [spawn_waiter(&clients[1], "full").await, spawn_waiter(&clients[2], "full").await];
        assert!(!is_free(&clients[3], "full").await, "a newcomer is not before the holder");
        assert!(waiting.iter().all(|waiting| !waiting.is_finished()), "one at a time");
        assert_eq!(holder.state(), State::Held);
        let mut last = holder.token();
        holder.release().await.unwrap();
        let [one, other] = waiting;
        let (first, rest) = within(TTL, "one is served", first_of(one, other)).await;
        assert!(first.token() > last);
        last = first.token();
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(!rest.is_finished(), "one at a time");
        first.release().await.unwrap();
        let second = await_served(TTL, rest).await;
        assert!(second.token() > last);
        second.release().await.unwrap();
    }
    let contenders = Contenders::start(&clients, 2, &["full"]);
    contenders.wait_served(40, Duration::from_secs(20)).await;
    contenders.stop_and_check().await;
}

/// Each release wakes one, however many wait.
#[tokio::test(flavor = "multi_thread")]
async fn each_release_wakes_one_of_a_thousand_waiters() {
    const WAITERS: usize = 1000;
    const RELEASES: u64 = 50;
    let servers = ZooKeeperServers::start(1);
    let server = &servers.nodes()[0];
    let ttl = Duration::from_secs(20);
    let url = servers.url("many");
    let clients = [client(&url, ttl).await, client(&url, ttl).await];
    let holder = clients[0].rwlock("crowded").unwrap().write().await.unwrap();
    // Writers do not wait for each other in their process, so each has a node.
    let (tell, mut granted) = tokio::sync::mpsc::unbounded_channel();
    for number in 0..WAITERS {
        let (rwlock, tell) = (clients[number % 2].rwlock("crowded").unwrap(), tell.clone());
        tokio::spawn(async move { tell.send(rwlock.write().await) });
    }
    let mut kazoo = servers.kazoo();
    let all = || kazoo.stat("/many/crowded").is_some_and(|stat| stat.children as usize > WAITERS);
    until("a thousand wait", all);
    let events = |server: &ZooKeeperNode| server.figure("sum_node_deleted_watch_count");
    // All of them watch before the first is woken.
    until("each watches one", || server.figure("watch_count") as usize >= WAITERS);
    let (before, reads) = (events(server), server.figure("packets_received"));
    let mut last = holder.token();
    holder.release().await.unwrap();
    for _ in 0..RELEASES {
        let next = within(ttl, "the next is served", granted.recv()).await.unwrap().unwrap();
        assert!(next.token() > last);
        last = next.token();
        next.release().await.unwrap();
    }
    let next = within(ttl, "the next is served", granted.recv()).await.unwrap().unwrap();
    assert!(granted.try_recv().is_err(), "one at a time");
    let (woken, asked) = (events(server) - before, server.figure("packets_received") - reads);
    assert_eq!(woken, RELEASES + 1, "events for {} releases", RELEASES + 1);
    assert!(asked < RELEASES * 8, "{asked} requests for {RELEASES} releases");
    next.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_of_a_user_are_protected_from_other_users() {
    let (chroot, mut kazoo) = chroot();
    let login = |user: &str| chroot.url().replacen("zk://", &format!("zk://{user}@"), 1);
    // The home itself is open to all users.
    let open = client(&chroot.url(), TTL).await;
    lock(&open, "open").await.release().await.unwrap();
    let (ours, same) =
        (client(&login("alice:pa55word"), TTL).await, client(&login("alice:pa55word"), TTL).await);
    let guard = lock(&ours, "alices").await;
    assert!(!is_free(&same, "alices").await, "the same user is excluded by the lock alone");
    let node = KazooClient::with_login(&chroot.servers().hosts(), "alice:pa55word");
    let node = chroot.only_node(&mut { node }, "alices");
    for mut stranger in [
        chroot.servers().kazoo(),
        KazooClient::with_login(&chroot.servers().hosts(), "alice:guess"),
        KazooClient::with_login(&chroot.servers().hosts(), "bob:pa55word"),
    ] {
        assert_eq!(stranger.ask(&["delete", &node]), "{\"error\": \"NoAuthError\"}");
    }
    let kept = lock(&open, "kept").await;
    for user in ["alice:guess", "bob:pa55word"] {
        let stranger = client(&login(user), TTL).await;
        let error = stranger.mutex("alices").unwrap().try_lock().await.unwrap_err();
        assert_error(&error, &["not allowed"], false);
        assert!(
            !error_chain(&error).contains("pa55word") && !error_chain(&error).contains("guess")
        );
        assert!(!format!("{stranger:?}").contains(user.split(':').next_back().unwrap()));
        let seen = stranger.list("").await.unwrap();
        let names: Vec<_> = seen.iter().map(|state| state.name.as_str()).collect();
        assert_eq!(names, ["kept"], "a listing shows what this user may see");
    }
    guard.confirm().await.unwrap();
    assert_eq!(kazoo.ask(&["acl", &chroot.path("kept")]), "[[\"world\", \"anyone\", 31]]");
    kept.release().await.unwrap();
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prepared_chroot_is_usable_without_the_right_to_create_it() {
    let (chroot, _) = chroot();
    let alice = chroot.url().replacen("zk://", "zk://alice:pa55word@", 1);
    client(&alice, TTL).await.close().await.unwrap();
    let mut kazoo = KazooClient::with_login(&chroot.servers().hosts(), "alice:pa55word");
    kazoo.create(&chroot.path("team"), "persistent");
    let team = client(&format!("{}/team", chroot.url()), TTL).await;
    lock(&team, "ours").await.release().await.unwrap();
    let other_backend =
        Lockset::builder(&format!("{}/other", chroot.url())).ttl(TTL).connect().await;
    assert_error(&other_backend.unwrap_err(), &["cannot be made"], false);
}
