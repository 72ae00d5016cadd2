//! What the ZooKeeper engine makes of nodes that others delete, write, count and guard.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::{Duration, Instant};

use lockset::{Guard, Lockset, State};
use lockset_testkit::contenders::Contenders;
use lockset_testkit::stage::{Chroot, Eyes, ZooKeeperNode, ZooKeeperServers};
use lockset_testkit::steps::{
    Waiting, assert_told, client, is_free, lock, lost, served, told, until, waiter, within,
};

type Home = Chroot<1>;

/// A lock is then trusted for 2 s after each renewal, which come every second.
const TTL: Duration = Duration::from_secs(3);
/// Too short for any session to end, and for a renewal after which it would be noticed anyway.
const SOON: Duration = Duration::from_millis(900);
/// A third of the ttl, and the time that an answer takes on a busy machine.
const BY_RENEWAL: Duration = Duration::from_millis(1800);

fn home() -> (Home, Eyes) {
    let home = Home::start("");
    let eyes = home.servers().eyes();
    (home, eyes)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parent_that_was_reaped_is_made_again() {
    let (home, mut eyes) = home();
    let ours = client(&home.url(), TTL).await;
    let mut last = None;
    for _ in 0..3 {
        let guard = lock(&ours, "reaped").await;
        assert!(Some(guard.token()) > last, "{:?} after {last:?}", guard.token());
        last = Some(guard.token());
        guard.release().await.unwrap();
        until("the empty parent is reaped", || eyes.stat(&home.path("reaped")).is_none());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_is_refused_while_parents_come_and_go() {
    let (home, _) = home();
    let (ours, theirs) = (client(&home.url(), TTL).await, client(&home.url(), TTL).await);
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
async fn a_parent_deleted_by_hand_costs_the_holder_the_lock_and_the_waiters_nothing() {
    let (home, mut eyes) = home();
    let url = home.url();
    let (ours, first, second) =
        (client(&url, TTL).await, client(&url, TTL).await, client(&url, TTL).await);
    let guard = lock(&ours, "deleted").await;
    let (first, second) = (waiter(&first, "deleted").await, waiter(&second, "deleted").await);
    assert!(eyes.delete(&home.path("deleted")));
    lost(BY_RENEWAL, &guard).await;
    // They may have changed places: whoever comes back first is first. And nodes are deleted one by
    // one, so somebody may have been served, and have lost it again, before the end.
    let (one, other) = within(TTL, "a waiter is served", first_of(first, second)).await;
    assert!(one.token() > guard.token());
    drop(one);
    let other = served(TTL, other).await;
    assert!(other.token() > guard.token());
    drop(other);
    lock(&ours, "deleted").await.release().await.unwrap();
    until("nothing is left", || home.contenders(&mut eyes, "deleted").is_empty());
}

async fn first_of(mut one: Waiting, mut other: Waiting) -> (Guard, Waiting) {
    tokio::select! {
        guard = &mut one => (guard.unwrap().unwrap(), other),
        guard = &mut other => (guard.unwrap().unwrap(), one),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_whose_node_was_deleted_is_served_all_the_same() {
    let (home, mut eyes) = home();
    let (ours, theirs) = (client(&home.url(), TTL).await, client(&home.url(), TTL).await);
    let guard = lock(&ours, "waiting").await;
    let held = home.only_node(&mut eyes, "waiting");
    let waiting = waiter(&theirs, "waiting").await;
    for node in home.contenders(&mut eyes, "waiting") {
        let node = home.path(&format!("waiting/{node}"));
        if node != held {
            assert!(eyes.delete(&node));
        }
    }
    guard.confirm().await.unwrap();
    guard.release().await.unwrap();
    served(BY_RENEWAL, waiting).await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_home_deleted_by_hand_is_made_again() {
    let (home, mut eyes) = home();
    let ours = client(&home.url(), TTL).await;
    let guard = lock(&ours, "gone").await;
    assert!(eyes.delete(home.path("").trim_end_matches('/')));
    lost(BY_RENEWAL, &guard).await;
    let next = lock(&ours, "gone").await;
    assert!(next.token() > guard.token());
    next.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_others_write_into_our_nodes_harms_nobody() {
    let (home, mut eyes) = home();
    let (ours, theirs) = (client(&home.url(), TTL).await, client(&home.url(), TTL).await);
    let guard = lock(&ours, "scribbled").await;
    let node = home.only_node(&mut eyes, "scribbled");
    let waiting = waiter(&theirs, "scribbled").await;
    for data in ["", "127.0.0.1", "\u{0}\u{1}\u{ff}", "{\"v\":1}", &"x".repeat(10_000)] {
        eyes.set(&node, data);
        let state = theirs.inspect("scribbled").await.unwrap();
        assert_eq!((state.holders.len(), state.waiters.len()), (1, 1), "with {data:?}");
        assert_eq!(theirs.list("").await.unwrap().len(), 1);
    }
    guard.confirm().await.expect("its node is still there");
    guard.release().await.unwrap();
    served(SOON, waiting).await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_no_lock_where_locks_are_is_told_or_passed_over() {
    let (home, mut eyes) = home();
    let ours = client(&home.url(), TTL).await;
    lock(&ours, "fine").await.release().await.unwrap();
    // A file, so to speak, where a folder is expected: it has no children, so it is free.
    eyes.create(&home.path("plain"), "persistent");
    eyes.set(&home.path("plain"), "not ours");
    let guard = lock(&ours, "plain").await;
    assert_eq!(eyes.data(&home.path("plain")).as_deref(), Some("not ours"));
    guard.release().await.unwrap();
    // An ephemeral node cannot have children.
    eyes.create(&home.path("leaf"), "ephemeral");
    let error = ours.mutex("leaf").unwrap().try_lock().await.unwrap_err();
    assert!(told(&error).contains("leaf"), "{}", told(&error));
    assert!(!error.is_retryable(), "{}", told(&error));
}

/// A parent that has had as many children as ZooKeeper can count.
#[tokio::test(flavor = "multi_thread")]
async fn nobody_shares_a_lock_where_the_numbers_end() {
    let (home, mut eyes) = home();
    // A container would be reaped, and its successor begins at zero.
    eyes.create(&home.path("full"), "persistent");
    drop(eyes);
    home.servers().nodes()[0].count_children_from(&home.path("full"), i32::MAX - 12);
    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(client(&home.url(), TTL).await);
    }
    // Waiters who queue before the numbers end, and after.
    for _ in 0..4 {
        let holder = lock(&clients[0], "full").await;
        let waiting = [waiter(&clients[1], "full").await, waiter(&clients[2], "full").await];
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
        let second = served(TTL, rest).await;
        assert!(second.token() > last);
        second.release().await.unwrap();
    }
    let contenders = Contenders::gather(&clients, 2, &["full"]);
    contenders.served(40, Duration::from_secs(20)).await;
    contenders.part().await;
}

/// Each release wakes one, however many wait.
#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_wait_and_one_is_woken_by_each_release() {
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
    let mut eyes = servers.eyes();
    let all = || eyes.stat("/many/crowded").is_some_and(|stat| stat.children as usize > WAITERS);
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
async fn what_a_user_makes_nobody_else_can_touch() {
    let (home, mut eyes) = home();
    let login = |user: &str| home.url().replacen("zk://", &format!("zk://{user}@"), 1);
    // The home itself is everybody's.
    let open = client(&home.url(), TTL).await;
    lock(&open, "open").await.release().await.unwrap();
    let (ours, same) =
        (client(&login("alice:pa55word"), TTL).await, client(&login("alice:pa55word"), TTL).await);
    let guard = lock(&ours, "alices").await;
    assert!(!is_free(&same, "alices").await, "the same user is excluded by the lock alone");
    let node = Eyes::with_login(&home.servers().hosts(), "alice:pa55word");
    let node = home.only_node(&mut { node }, "alices");
    for mut stranger in [
        home.servers().eyes(),
        Eyes::with_login(&home.servers().hosts(), "alice:guess"),
        Eyes::with_login(&home.servers().hosts(), "bob:pa55word"),
    ] {
        assert_eq!(stranger.ask(&["delete", &node]), "{\"error\": \"NoAuthError\"}");
    }
    let kept = lock(&open, "kept").await;
    for user in ["alice:guess", "bob:pa55word"] {
        let stranger = client(&login(user), TTL).await;
        let error = stranger.mutex("alices").unwrap().try_lock().await.unwrap_err();
        assert_told(&error, &["not allowed"], false);
        assert!(!told(&error).contains("pa55word") && !told(&error).contains("guess"));
        assert!(!format!("{stranger:?}").contains(user.split(':').next_back().unwrap()));
        let seen = stranger.list("").await.unwrap();
        let names: Vec<_> = seen.iter().map(|state| state.name.as_str()).collect();
        assert_eq!(names, ["kept"], "a listing shows what this user may see");
    }
    guard.confirm().await.unwrap();
    assert_eq!(eyes.ask(&["acl", &home.path("kept")]), "[[\"world\", \"anyone\", 31]]");
    kept.release().await.unwrap();
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_home_that_was_prepared_where_we_may_make_nothing_is_ours_all_the_same() {
    let (home, _) = home();
    let alice = home.url().replacen("zk://", "zk://alice:pa55word@", 1);
    client(&alice, TTL).await.close().await.unwrap();
    let mut eyes = Eyes::with_login(&home.servers().hosts(), "alice:pa55word");
    eyes.create(&home.path("team"), "persistent");
    let team = client(&format!("{}/team", home.url()), TTL).await;
    lock(&team, "ours").await.release().await.unwrap();
    let elsewhere = Lockset::builder(&format!("{}/other", home.url())).ttl(TTL).connect().await;
    assert_told(&elsewhere.unwrap_err(), &["cannot be made"], false);
}
