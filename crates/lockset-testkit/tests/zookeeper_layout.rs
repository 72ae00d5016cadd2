//! What we put on a ZooKeeper server, and how we read what others put there: Curator's layout to
//! the letter, seen by a client that shares no code with us.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::Duration;

use lockset::{Break, Guard, Lockset};
use lockset_testkit::stage::{Chroot, KazooClient};
use lockset_testkit::steps::{await_served, client, is_free, lock, spawn_waiter, until, within};

type Home = Chroot<1>;

const TTL: Duration = Duration::from_secs(4);
/// Too short for any session to end.
const SOON: Duration = Duration::from_millis(1200);
/// What Curator would choose.
const A_UUID: &str = "0f0f0f0f-1111-4222-8333-444444444444";

fn chroot() -> (Home, KazooClient) {
    let chroot = Home::start("");
    let kazoo = chroot.servers().kazoo();
    (chroot, kazoo)
}

/// The only node's name without what differs from time to time: digits of the id are `x`, those of
/// the number `9`.
fn shape(chroot: &Home, kazoo: &mut KazooClient, name: &str) -> String {
    let node = chroot.only_node(kazoo, name);
    let node = node.rsplit('/').next().unwrap();
    let number = node.len() - 10;
    let is_hex = |letter: char| letter.is_ascii_digit() || ('a'..='f').contains(&letter);
    let masked = node.char_indices().map(|(at, letter)| match letter {
        '0'..='9' if at >= number => '9',
        // `_c_` is three letters, the id is 36.
        _ if (3..39).contains(&at) && is_hex(letter) => 'x',
        _ => letter,
    });
    masked.collect()
}

fn ours_is_of(node: &str, guard: &Guard) -> bool {
    node.replace('-', "").contains(&guard.claim_id().to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn our_nodes_are_named_like_those_of_curator() {
    let (chroot, mut kazoo) = chroot();
    let locks = client(&chroot.url(), TTL).await;
    let id = "_c_xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx";
    let guard = lock(&locks, "mutex").await;
    assert_eq!(shape(&chroot, &mut kazoo, "mutex"), format!("{id}-lock-9999999999"));
    let node = chroot.only_node(&mut kazoo, "mutex");
    assert!(ours_is_of(&node, &guard), "{node} is of {}", guard.claim_id());
    let stat = kazoo.stat(&node).unwrap();
    assert_eq!(stat.czxid, guard.token().get(), "the token is the transaction");
    assert_ne!(stat.owner, 0, "it ends with its session");
    assert_eq!(kazoo.ask(&["acl", &node]), "[[\"world\", \"anyone\", 31]]");
    guard.release().await.unwrap();
    assert!(kazoo.stat(&node).is_none());

    let writer = locks.rwlock("writer").unwrap().write().await.unwrap();
    assert_eq!(shape(&chroot, &mut kazoo, "writer"), format!("{id}-lock-9999999999"));
    writer.release().await.unwrap();
    let reader = locks.rwlock("reader").unwrap().read().await.unwrap();
    assert_eq!(shape(&chroot, &mut kazoo, "reader"), format!("{id}-__READ__9999999999"));
    reader.release().await.unwrap();

    let locks = client(&format!("{}?layout=curator-rw", chroot.url()), TTL).await;
    let guard = locks.rwlock("writer").unwrap().write().await.unwrap();
    assert_eq!(shape(&chroot, &mut kazoo, "writer"), format!("{id}-__WRIT__9999999999"));
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn our_nodes_are_named_like_those_of_kazoo_if_configured() {
    let (chroot, mut kazoo) = chroot();
    let locks = client(&format!("{}?layout=kazoo", chroot.url()), TTL).await;
    let name_of = |kazoo: &mut KazooClient, name: &str| {
        let node = chroot.only_node(kazoo, name);
        node.rsplit('/').next().unwrap().to_owned()
    };
    let is_number = |text: &str| text.len() == 10 && text.parse::<u32>().is_ok();
    let guard = lock(&locks, "mutex").await;
    let node = name_of(&mut kazoo, "mutex");
    let (id, number) = node.split_once("__lock__").unwrap();
    assert!(id == guard.claim_id().to_string() && id.len() == 32 && is_number(number), "{node}");
    let reader = locks.rwlock("reader").unwrap().read().await.unwrap();
    let node = name_of(&mut kazoo, "reader");
    let (id, number) = node.split_once("__rlock__").unwrap();
    assert!(id == reader.claim_id().to_string() && is_number(number), "{node}");
    drop((guard, reader));
    // kazoo's parents stay: they are not reaped.
    until("they are given back", || chroot.contenders(&mut kazoo, "mutex").is_empty());
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(kazoo.stat(&chroot.path("mutex")).is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn parents_are_containers_and_leave_nothing_behind() {
    let (chroot, mut kazoo) = chroot();
    let locks = client(&chroot.url(), TTL).await;
    let deep = "a/b/c";
    let (guard, permit) =
        (lock(&locks, deep).await, locks.semaphore("permits", 2).unwrap().acquire().await.unwrap());
    let read = locks.rwlock("read").unwrap().read().await.unwrap();
    let top = chroot.path("").trim_end_matches('/').to_owned();
    let names = kazoo.children(&top).unwrap();
    assert!(names.contains(&"a%2Fb%2Fc".to_owned()), "a name is one node: {names:?}");
    for guard in [guard, permit, read] {
        guard.release().await.unwrap();
    }
    until("all are reaped", || {
        let left = kazoo.children(&top).unwrap_or_default();
        !left.iter().any(|name| ["a%2Fb%2Fc", "permits", "read"].contains(&name.as_str()))
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn different_names_never_collide() {
    let (chroot, _) = chroot();
    let locks = client(&chroot.url(), TTL).await;
    let names = ["a", "a/b", "a%2Fb", "a%2fb", "a%b", "%", "zookeeper", "_", "a b", "ä"];
    let mut held = Vec::new();
    for name in names {
        let free = locks.mutex(name).unwrap().try_lock().await.unwrap();
        held.push(free.unwrap_or_else(|| panic!("{name} meets another")));
    }
    let mut listed: Vec<_> = locks.list("").await.unwrap();
    listed.retain(|state| !state.holders.is_empty());
    let mut listed: Vec<_> = listed.iter().map(|state| state.name.as_str().to_owned()).collect();
    let mut expected = names.map(str::to_owned).to_vec();
    listed.sort();
    expected.sort();
    assert_eq!(listed, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn raw_names_keep_their_slashes() {
    let (chroot, mut kazoo) = chroot();
    let locks = client(&format!("{}?names=raw", chroot.url()), TTL).await;
    let guard = lock(&locks, "app/jobs").await;
    let node = chroot.only_node(&mut kazoo, "app/jobs");
    assert!(ours_is_of(&node, &guard), "{node}");
    guard.release().await.unwrap();
}

/// The number behind the last `lock-` decides, not who has the smaller id.
#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_mutex_node_before_ours_holds_and_one_after_it_waits() {
    let (chroot, mut kazoo) = chroot();
    let (ours, theirs) = (client(&chroot.url(), TTL).await, client(&chroot.url(), TTL).await);
    for id in ["00000000-0000-4000-8000-000000000000", "ffffffff-ffff-4fff-bfff-ffffffffffff"] {
        let foreign = chroot.path(&format!("order/_c_{id}-lock-"));
        let before = kazoo.create(&foreign, "sequential");
        assert!(!is_free(&ours, "order").await, "{before} holds");
        let waiting = spawn_waiter(&ours, "order").await;
        assert!(kazoo.delete(&before));
        let guard = await_served(SOON, waiting).await;
        let after = kazoo.create(&foreign, "sequential");
        guard.confirm().await.unwrap();
        assert!(!is_free(&theirs, "order").await);
        let behind = spawn_waiter(&theirs, "order").await;
        guard.release().await.unwrap();
        tokio::time::sleep(SOON / 4).await;
        assert!(!behind.is_finished(), "{after} holds now");
        assert!(kazoo.delete(&after));
        await_served(SOON, behind).await.release().await.unwrap();
    }
}

/// A node without a number cannot be a claim: no claim waits for it, and it is not shown.
#[tokio::test(flavor = "multi_thread")]
async fn children_that_are_not_claims_are_ignored() {
    let (chroot, mut kazoo) = chroot();
    let locks = client(&chroot.url(), TTL).await;
    // Letters stand behind our numbers, a dash and an exclamation mark before them.
    for child in ["readme", "zzz", "-first", "!", "lock-", "__WRIT__x"] {
        let path = chroot.path(&format!("beside/{child}"));
        kazoo.create(&path, "persistent");
        is_unused(&locks, "beside", child).await;
        assert!(kazoo.delete(&path));
    }
}

/// Curator's `InterProcessSemaphoreV2` keeps two children that stay.
#[tokio::test(flavor = "multi_thread")]
async fn leftovers_of_a_curator_semaphore_are_not_claims() {
    let (chroot, mut kazoo) = chroot();
    for child in ["locks", "leases"] {
        kazoo.create(&chroot.path(&format!("app/permits/{child}")), "persistent");
        kazoo.create(&chroot.path(&format!("permits/{child}")), "persistent");
    }
    let (escaped, raw) = (chroot.url(), format!("{}?names=raw", chroot.url()));
    is_unused(&client(&escaped, TTL).await, "permits", "escaped").await;
    is_unused(&client(&raw, TTL).await, "app/permits", "raw").await;
}

/// Inspecting, listing and acquiring all find that the lock is free.
async fn is_unused(locks: &Lockset, name: &str, what: &str) {
    let state = locks.inspect(name).await.unwrap();
    assert!(state.holders.is_empty() && state.waiters.is_empty(), "{what}: {state:?}");
    assert!(is_free(locks, name).await, "{what}");
    assert!(locks.list("").await.unwrap().is_empty(), "{what}");
    assert!(locks.force_release(name, Break::Now).await.unwrap().is_empty(), "{what}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_reader_shares_and_a_foreign_writer_does_not() {
    let (chroot, mut kazoo) = chroot();
    let locks = client(&chroot.url(), TTL).await;
    let rwlock = locks.rwlock("rw").unwrap();
    let child = |kind: &str| chroot.path(&format!("rw/_c_{A_UUID}-{kind}"));
    let reader = kazoo.create(&child("__READ__"), "sequential");
    let ours = rwlock.try_read().await.unwrap().expect("readers share");
    assert!(rwlock.try_write().await.unwrap().is_none());
    let writer = kazoo.create(&child("__WRIT__"), "sequential");
    assert!(rwlock.try_read().await.unwrap().is_none(), "a waiting writer is not passed");
    ours.release().await.unwrap();
    assert!(kazoo.delete(&reader));
    assert!(rwlock.try_read().await.unwrap().is_none(), "the writer holds");

    // A writer of Curator that reads too has a second node of the same number.
    let number = writer.rsplit("__").next().unwrap();
    let downgraded = kazoo.create(&format!("{}{number}", child("__READ__")), "ephemeral");
    assert!(rwlock.try_read().await.unwrap().is_none(), "it still writes");
    let state = locks.inspect("rw").await.unwrap();
    assert!(!state.holders.is_empty(), "{state:?}");
    assert!(kazoo.delete(&writer));
    let ours = within(SOON, "it only reads now", rwlock.read()).await.unwrap();
    assert!(rwlock.try_write().await.unwrap().is_none());
    assert!(kazoo.delete(&downgraded));
    ours.release().await.unwrap();
    assert!(rwlock.try_write().await.unwrap().is_some());
}
