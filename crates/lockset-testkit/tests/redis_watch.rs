//! How a watch on Redis learns of changes: the server tells, whatever the name, and is not asked
//! while nothing changes.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use lockset::{Break, LockOptions, LockState, Lockset};
use lockset_testkit::stage::{RedisCluster, RedisSentinel, RedisServer};
use lockset_testkit::steps::{client, lock, spawn_waiter, until, within};
use tokio::task::JoinHandle;

/// Long enough that no renewal and no heartbeat comes during a test.
const TTL: Duration = Duration::from_secs(120);
/// Far shorter than the time between two rechecks, which must not be what tells.
const SOON: Duration = Duration::from_secs(4);
/// How long the server is looked at.
const QUIET: Duration = Duration::from_secs(2);

/// A watch that is read all the time, and the last state that it told of each name.
struct Seen {
    states: Arc<Mutex<Vec<LockState>>>,
    task: JoinHandle<()>,
}

impl Seen {
    fn by(mut states: BoxStream<'static, lockset::Result<LockState>>) -> Self {
        let seen = Arc::<Mutex<Vec<LockState>>>::default();
        let told = seen.clone();
        let task = tokio::spawn(async move {
            while let Some(state) = states.next().await {
                // A server that is down for a moment is told, and is no end.
                let Ok(state) = state else { continue };
                let mut told = told.lock().unwrap();
                told.retain(|known| known.name != state.name);
                told.push(state);
            }
        });
        Self { states: seen, task }
    }

    /// Returns when the watch has told this of the name.
    async fn tells(&self, name: &str, what: &str, is_so: impl Fn(&LockState) -> bool) {
        let told = async {
            loop {
                let is_told = |state: &LockState| state.name.as_str() == name && is_so(state);
                if self.states.lock().unwrap().iter().any(is_told) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        if tokio::time::timeout(SOON, told).await.is_err() {
            panic!("{name}: not told within {SOON:?}: {what}: {:?}", self.states.lock().unwrap());
        }
    }
}

impl Drop for Seen {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn three(url: &str) -> [Lockset; 3] {
    [client(url, TTL).await, client(url, TTL).await, client(url, TTL).await]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_sends_no_requests_while_nothing_changes() {
    let server = RedisServer::start();
    let (ours, theirs) = (client(&server.url(), TTL).await, client(&server.url(), TTL).await);
    let _guard = lock(&ours, "quiet/lock").await;
    let all = Seen::by(theirs.watch("quiet/").unwrap());
    let one = Seen::by(theirs.watch_name("quiet/lock").unwrap());
    for seen in [&all, &one] {
        seen.tells("quiet/lock", "it is held", |state| state.holders.len() == 1).await;
    }
    tokio::time::sleep(QUIET / 4).await;
    let asked = || server.calls("scan") + server.calls("evalsha") + server.calls("get");
    let before = asked();
    tokio::time::sleep(QUIET).await;
    assert_eq!(asked() - before, 0, "looks at the server in {QUIET:?}");
    let guard = lock(&ours, "quiet/other").await;
    all.tells("quiet/other", "it is held", |state| state.holders.len() == 1).await;
    guard.release().await.unwrap();
}

/// A grant, a waiter that comes and goes, a note, a hand-over, a revocation, readers, permits, the
/// end, and a cell: each is told by a watch of the name and by one of all names.
async fn every_change_is_told([ours, theirs, others]: &[Lockset; 3], name: &str) {
    let watches = [Seen::by(theirs.watch_name(name).unwrap()), Seen::by(theirs.watch("").unwrap())];
    let reports = async |what: &str, is_so: &dyn Fn(&LockState) -> bool| {
        for seen in &watches {
            seen.tells(name, what, is_so).await;
        }
    };
    let note = |state: &LockState| state.holders.first().map(|it| it.note.text.to_string());
    let guard = lock(ours, name).await;
    reports("a grant", &|state| state.holders.len() == 1).await;
    guard.set_note("word").await.unwrap();
    reports("a note", &|state| note(state).as_deref() == Some("word")).await;
    let (leaves, stays) = (spawn_waiter(others, name).await, spawn_waiter(theirs, name).await);
    reports("two waiters", &|state| state.waiters.len() == 2).await;
    leaves.abort();
    reports("one waiter", &|state| state.waiters.len() == 1).await;
    guard.release().await.unwrap();
    let guard = within(SOON, "the hand-over", stays).await.unwrap().unwrap();
    reports("a hand-over", &|state| note(state).as_deref() == Some("") && state.waiters.is_empty())
        .await;
    theirs.force_release(name, Break::WhenLeaseEnds).await.unwrap();
    reports("a revocation", &|state| state.holders.iter().any(|holder| holder.revoked)).await;
    guard.release().await.unwrap();
    reports("a release", &|state| state.holders.is_empty()).await;

    let shorter = LockOptions::default().ttl(TTL / 2);
    let first = ours.rwlock(name).unwrap().read().await.unwrap();
    reports("a reader", &|state| state.holders.len() == 1).await;
    let second = theirs.rwlock(name).unwrap().with(shorter).read().await.unwrap();
    reports("two readers", &|state| state.holders.len() == 2).await;
    second.set_note("word").await.unwrap();
    reports("a reader's note", &|state| state.holders.iter().any(|it| &*it.note.text == "word"))
        .await;
    second.release().await.unwrap();
    reports("one reader", &|state| state.holders.len() == 1).await;
    first.release().await.unwrap();
    reports("no reader", &|state| state.holders.is_empty()).await;

    let latch = ours.latch(name, 2).unwrap();
    latch.count_down().await.unwrap();
    reports("a cell", &|state| state.cell.is_some()).await;
    let before = theirs.inspect(name).await.unwrap().cell.unwrap().version;
    latch.count_down().await.unwrap();
    reports("another value", &|state| state.cell.as_ref().is_some_and(|it| it.version > before))
        .await;
    latch.clear().await.unwrap();
    reports("no cell", &|state| state.cell.is_none()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_change_of_every_name_is_reported() {
    let server = RedisServer::start();
    for prefix in ["lockset:", "", "{all}:", "{"] {
        let clients = three(&format!("{}?prefix={prefix}", server.url())).await;
        for name in ["plain", "{tag}/x", "x/{tag}", "a}b", "{}"] {
            every_change_is_told(&clients, name).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_change_in_a_cluster_is_reported() {
    let cluster = RedisCluster::start();
    let clients = three(&cluster.url()).await;
    let names = (0..3).map(|node| cluster.name_at(node)).chain(["{tag}/x".to_owned()]);
    for name in names {
        every_change_is_told(&clients, &name).await;
    }
}

/// Changes during the time without a connection are told after it.
#[tokio::test(flavor = "multi_thread")]
async fn a_watch_survives_cut_connections() {
    let server = RedisServer::start();
    let (ours, theirs) = (client(&server.url(), TTL).await, client(&server.url(), TTL).await);
    let watches =
        [Seen::by(theirs.watch_name("cut").unwrap()), Seen::by(theirs.watch("").unwrap())];
    for round in 0..5 {
        let guard = lock(&ours, "cut").await;
        for seen in &watches {
            seen.tells("cut", "a grant", |state| state.holders.len() == 1).await;
        }
        let change = tokio::spawn(async move { guard.release().await });
        if round > 0 {
            for kind in ["normal", "pubsub"] {
                server.ask(&["CLIENT", "KILL", "TYPE", kind]);
            }
        }
        // What was not answered is repeated by the client, or known to be done.
        let _ = change.await.unwrap();
        for seen in &watches {
            seen.tells("cut", "a release", |state| state.holders.is_empty()).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_survives_a_failover() {
    let servers = RedisSentinel::start();
    let (ours, theirs) = (client(&servers.url(), TTL).await, client(&servers.url(), TTL).await);
    let watches =
        [Seen::by(theirs.watch_name("next").unwrap()), Seen::by(theirs.watch("").unwrap())];
    let guard = lock(&ours, "next").await;
    for seen in &watches {
        seen.tells("next", "a grant", |state| state.holders.len() == 1).await;
    }
    servers.kill_master();
    lockset_testkit::steps::await_confirmed(Duration::from_secs(8), &guard).await;
    guard.release().await.unwrap();
    for seen in &watches {
        seen.tells("next", "a release", |state| state.holders.is_empty()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_follows_a_moved_slot() {
    let cluster = RedisCluster::start();
    let (ours, theirs) = (client(&cluster.url(), TTL).await, client(&cluster.url(), TTL).await);
    let watches =
        [Seen::by(theirs.watch_name("moved").unwrap()), Seen::by(theirs.watch("").unwrap())];
    let guard = lock(&ours, "moved").await;
    for seen in &watches {
        seen.tells("moved", "a grant", |state| state.holders.len() == 1).await;
    }
    let slot = cluster.slot_of("lockset:moved");
    cluster.migrate_slot(slot, cluster.another_master(cluster.owner(slot)));
    for word in ["one", "two", "three"] {
        guard.set_note(word).await.unwrap();
        for seen in &watches {
            let says = |state: &LockState| state.holders.iter().any(|it| &*it.note.text == word);
            seen.tells("moved", word, says).await;
        }
    }
    guard.release().await.unwrap();
}

/// A watch that ended costs the server nothing any more.
#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_watch_leaves_no_connection() {
    let server = RedisServer::start();
    let locks = client(&server.url(), TTL).await;
    let connections = || server.ask(&["CLIENT", "LIST"]).lines().count();
    let before = connections();
    for _ in 0..3 {
        let seen = Seen::by(locks.watch("").unwrap());
        let guard = lock(&locks, "looked/at").await;
        seen.tells("looked/at", "a grant", |state| state.holders.len() == 1).await;
        guard.release().await.unwrap();
    }
    until("its connections are gone", || connections() <= before);
}
