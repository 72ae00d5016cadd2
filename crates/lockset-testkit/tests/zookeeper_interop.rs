//! Locks of other libraries on the same nodes: ours exclude theirs, theirs exclude ours.
//!
//! kazoo is the real library in a process of its own; Curator is played by `peers/zookeeper.py`,
//! which makes, orders and watches the nodes that it does.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::Duration;

use lockset::{Guard, Lockset};
use lockset_testkit::process::Process;
use lockset_testkit::stage::{Chroot, KazooClient};
use lockset_testkit::steps::{
    await_lock_state, await_served, client, is_free, spawn_waiter, within,
};

const TTL: Duration = Duration::from_secs(3);
/// Too short for any session to end.
const SOON: Duration = Duration::from_millis(900);
/// The session of a peer that was killed, and some time for a busy machine.
const BY_DEATH: Duration = Duration::from_secs(6);

/// How a family of locks calls its mutex, or its readers and its writers.
struct Mutexes {
    layout: &'static str,
    mutex: &'static str,
}
struct RwLocks {
    layout: &'static str,
    read: &'static str,
    write: &'static str,
}

const MUTEXES: [Mutexes; 2] = [
    Mutexes { layout: "kazoo", mutex: "lock" },
    Mutexes { layout: "curator", mutex: "curator mutex" },
];
const RW_LOCKS: [RwLocks; 2] = [
    RwLocks { layout: "kazoo", read: "read", write: "write" },
    RwLocks { layout: "curator-rw", read: "curator read", write: "curator write" },
];

/// A home, two clients of ours in the layout of a family, and a peer of that family.
struct Meeting {
    chroot: Chroot<1>,
    ours: Lockset,
    others: Lockset,
    peer: KazooClient,
}

impl Meeting {
    async fn in_layout(layout: &str) -> Self {
        let chroot = Chroot::start(env!("CARGO_BIN_EXE_actor"));
        let url = url(&chroot, layout);
        let (ours, others) = (client(&url, TTL).await, client(&url, TTL).await);
        let peer = chroot.servers().kazoo();
        Self { chroot, ours, others, peer }
    }

    fn takes(&mut self, kind: &str, name: &str) -> bool {
        self.peer.ask(&["acquire", kind, &self.chroot.path(name), "0"]) == "true"
    }

    fn gives_back(&mut self, kind: &str, name: &str) {
        assert_eq!(self.peer.ask(&["release", kind, &self.chroot.path(name)]), "true");
    }

    /// The peer begins to wait, and is in line.
    fn begins_to_wait(&mut self, kind: &str, name: &str) {
        let path = self.chroot.path(name);
        let mut kazoo = self.chroot.servers().kazoo();
        let before = kazoo.children(&path).unwrap_or_default().len();
        self.peer.send(&["acquire", kind, &path, "-1"]);
        lockset_testkit::steps::until("the peer is in line", || {
            kazoo.children(&path).unwrap_or_default().len() > before
        });
    }

    fn has_waited(&mut self) {
        assert_eq!(self.peer.receive(), "true");
    }
}

fn url(chroot: &Chroot<1>, layout: &str) -> String {
    format!("{}?layout={layout}", chroot.url())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_held_by_a_peer_excludes_us_until_it_is_released() {
    for family in MUTEXES {
        let mut at = Meeting::in_layout(family.layout).await;
        assert!(at.takes(family.mutex, "jobs"));
        assert!(!is_free(&at.ours, "jobs").await, "{}", family.layout);
        let (first, second) =
            (spawn_waiter(&at.ours, "jobs").await, spawn_waiter(&at.others, "jobs").await);
        assert!(!first.is_finished() && !second.is_finished());
        at.gives_back(family.mutex, "jobs");
        let guard = await_served(SOON, first).await;
        assert!(!at.takes(family.mutex, "jobs"), "{}", family.layout);
        guard.release().await.unwrap();
        let guard = await_served(SOON, second).await;
        assert!(!at.takes(family.mutex, "jobs"), "{}", family.layout);
        guard.release().await.unwrap();
        assert!(at.takes(family.mutex, "jobs"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_waits_for_us_in_its_turn() {
    for family in MUTEXES {
        let mut at = Meeting::in_layout(family.layout).await;
        let guard = lock(&at.ours, "turns").await;
        at.begins_to_wait(family.mutex, "turns");
        let behind = spawn_waiter(&at.others, "turns").await;
        guard.release().await.unwrap();
        at.has_waited();
        assert!(!behind.is_finished(), "{}: the order is one", family.layout);
        at.gives_back(family.mutex, "turns");
        await_served(SOON, behind).await.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_peer_is_succeeded_by_us_and_we_by_a_peer() {
    for family in MUTEXES {
        let mut at = Meeting::in_layout(family.layout).await;
        assert!(at.takes(family.mutex, "died"));
        let waiting = spawn_waiter(&at.ours, "died").await;
        at.peer = at.chroot.servers().kazoo();
        await_served(BY_DEATH, waiting).await.release().await.unwrap();

        let actor = env!("CARGO_BIN_EXE_actor");
        let mut ours = Process::start_with_ttl(actor, &url(&at.chroot, family.layout), TTL);
        let call = ours.begin_lock("killed", lockset::Mode::Exclusive, TTL);
        ours.granted(call).await;
        assert!(!at.takes(family.mutex, "killed"), "{}", family.layout);
        at.begins_to_wait(family.mutex, "killed");
        ours.kill();
        at.has_waited();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_share_with_a_peers_readers_and_writers_exclude_all() {
    for family in RW_LOCKS {
        let mut at = Meeting::in_layout(family.layout).await;
        let rwlock = at.ours.rwlock("shared").unwrap();
        assert!(at.takes(family.read, "shared"));
        let reader = rwlock.try_read().await.unwrap().expect("readers share");
        assert!(rwlock.try_write().await.unwrap().is_none(), "{}: their reader", family.layout);
        at.gives_back(family.read, "shared");
        assert!(at.takes(family.read, "shared"), "{}: our reader shares", family.layout);
        at.gives_back(family.read, "shared");
        assert!(!at.takes(family.write, "shared"), "{}: our reader", family.layout);
        reader.release().await.unwrap();

        assert!(at.takes(family.write, "shared"));
        assert!(rwlock.try_read().await.unwrap().is_none(), "{}: their writer", family.layout);
        assert!(rwlock.try_write().await.unwrap().is_none(), "{}: their writer", family.layout);
        at.gives_back(family.write, "shared");

        let writer = rwlock.try_write().await.unwrap().expect("it is free");
        assert!(!at.takes(family.read, "shared"), "{}: our writer", family.layout);
        assert!(!at.takes(family.write, "shared"), "{}: our writer", family.layout);
        writer.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_and_writers_of_both_sides_share_one_queue() {
    for family in RW_LOCKS {
        let mut at = Meeting::in_layout(family.layout).await;
        assert!(at.takes(family.write, "line"));
        let writer = waiting_writer(&at.ours, "line").await;
        at.gives_back(family.write, "line");
        let writer = await_served(SOON, writer).await;
        at.begins_to_wait(family.read, "line");
        let behind = waiting_writer(&at.others, "line").await;
        writer.release().await.unwrap();
        at.has_waited();
        let early = !behind.is_finished();
        assert!(early, "{}: a writer waits for a reader before it", family.layout);
        at.gives_back(family.read, "line");
        let behind = await_served(SOON, behind).await;
        at.begins_to_wait(family.write, "line");
        behind.release().await.unwrap();
        at.has_waited();
        at.gives_back(family.write, "line");
    }
}

async fn waiting_writer(locks: &Lockset, name: &str) -> lockset_testkit::steps::PendingLock {
    let rwlock = locks.rwlock(name).unwrap();
    let waiting = tokio::spawn(async move { rwlock.write().await });
    await_lock_state(locks, name, |state| !state.waiters.is_empty()).await;
    waiting
}

#[tokio::test(flavor = "multi_thread")]
async fn inspect_shows_that_a_peer_holds_and_waits() {
    for family in MUTEXES {
        let mut at = Meeting::in_layout(family.layout).await;
        assert!(at.takes(family.mutex, "seen"));
        let state = at.ours.inspect("seen").await.unwrap();
        assert_eq!(state.holders.len(), 1, "{}: {state:?}", family.layout);
        assert_eq!(state.holders[0].claim, None, "it is not one of ours");
        let listed = at.ours.list("").await.unwrap();
        let names: Vec<_> = listed.iter().map(|state| state.name.as_str()).collect();
        assert_eq!(names, ["seen"], "{}", family.layout);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn our_notes_do_not_disturb_a_peer() {
    for family in MUTEXES {
        let mut at = Meeting::in_layout(family.layout).await;
        let options = lockset::LockOptions::default().note("nightly \u{1F512}");
        let mutex = at.ours.mutex("noted").unwrap().with(options);
        let guard = within(SOON, "it is free", mutex.lock()).await.unwrap();
        at.begins_to_wait(family.mutex, "noted");
        guard.set_note("changed").await.unwrap();
        guard.release().await.unwrap();
        at.has_waited();
    }
}

/// A number in a file is read, and the next one is written, by all of them.
#[tokio::test(flavor = "multi_thread")]
async fn a_counter_shared_with_peers_loses_no_update() {
    const EACH: u64 = 15;
    for family in MUTEXES {
        let at = Meeting::in_layout(family.layout).await;
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("count");
        std::fs::write(&file, "0").unwrap();
        let mut peers = [at.chroot.servers().kazoo(), at.chroot.servers().kazoo()];
        let path = at.chroot.path("counted");
        let (path, times) = (path.as_str(), EACH.to_string());
        for peer in &mut peers {
            peer.send(&["count", family.mutex, path, file.to_str().unwrap(), &times]);
        }
        let clients = [&at.ours, &at.ours, &at.others, &at.others];
        let ours = clients.map(|locks| {
            let (locks, file) = (locks.clone(), file.clone());
            tokio::spawn(async move {
                for _ in 0..EACH {
                    let guard = lock(&locks, "counted").await;
                    let count: u64 = std::fs::read_to_string(&file).unwrap().parse().unwrap();
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    std::fs::write(&file, (count + 1).to_string()).unwrap();
                    guard.release().await.unwrap();
                }
            })
        });
        for task in ours {
            task.await.unwrap();
        }
        let heard = tokio::task::block_in_place(|| peers.iter_mut().all(|p| p.receive() == "true"));
        assert!(heard, "a peer failed");
        let count: u64 = std::fs::read_to_string(&file).unwrap().parse().unwrap();
        assert_eq!(count, EACH * 6, "{}", family.layout);
    }
}

/// Waits as long as the others need.
async fn lock(locks: &Lockset, name: &str) -> Guard {
    let mutex = locks.mutex(name).unwrap();
    within(Duration::from_secs(20), "its turn", mutex.lock()).await.unwrap()
}
