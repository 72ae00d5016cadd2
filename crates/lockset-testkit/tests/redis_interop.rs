//! Locks of other libraries on the same key: ours exclude theirs, theirs exclude ours.
//!
//! redis-py is the real library in a process of its own; the others are played by
//! `peers/peers.py`, which puts on the wire what they do.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use lockset::{Guard, Lockset};
use lockset_testkit::python::PythonPeer;
use lockset_testkit::stage::{RedisCluster, RedisSentinel, RedisServer};
use lockset_testkit::steps::{await_served, is_free, lock, spawn_waiter};

/// Signs of life then come every 500 ms.
const TTL: Duration = Duration::from_secs(3);
const PEERS: [&str; 5] = ["redis-py", "redsync", "bsm/redislock", "node-redlock", "rslock"];
/// The end of a foreign lock is seen when its time is over, with some time for a busy machine.
const SOON: Duration = Duration::from_secs(1);
/// One that was given back before is seen by the next sign of life, likewise.
const BY_HEARTBEAT: Duration = Duration::from_millis(1500);

/// A server, two clients of ours on bare keys, and the peer.
struct Meeting {
    server: RedisServer,
    ours: Lockset,
    others: Lockset,
    peer: PythonPeer,
}

impl Meeting {
    async fn with(kind: &str) -> Self {
        let server = RedisServer::start();
        let (ours, others) = (client(&server).await, client(&server).await);
        let peer = peer(kind, &server);
        Self { server, ours, others, peer }
    }

    #[track_caller]
    fn expect(&mut self, order: &str, answer: &str) {
        assert_eq!(self.peer.ask(order), answer, "{order}");
    }
}

async fn client(server: &RedisServer) -> Lockset {
    let url = format!("{}?prefix=", server.url());
    Lockset::builder(&url).ttl(TTL).connect().await.unwrap()
}

fn peer(kind: &str, server: &RedisServer) -> PythonPeer {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peers/peers.py");
    PythonPeer::start(&program, &[kind, &server.port().to_string()])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_held_by_a_peer_excludes_us_until_it_is_released() {
    for kind in PEERS {
        let mut at = Meeting::with(kind).await;
        at.expect("acquire jobs/42 20000", "yes");
        assert!(!is_free(&at.ours, "jobs/42").await, "{kind}");
        let reader = at.ours.rwlock("jobs/42").unwrap().try_read().await.unwrap();
        assert!(reader.is_none(), "{kind} excludes readers");
        let permit = at.ours.semaphore("jobs/42", 2).unwrap().try_acquire().await;
        assert!(!matches!(permit, Ok(Some(_))), "{kind} excludes permits");
        let (first, second) =
            (spawn_waiter(&at.ours, "jobs/42").await, spawn_waiter(&at.others, "jobs/42"));
        let second = second.await;
        at.expect("release jobs/42", "yes");
        let guard = await_served(BY_HEARTBEAT, first).await;
        at.expect("acquire jobs/42 20000", "no");
        guard.release().await.unwrap();
        let guard = await_served(SOON, second).await;
        at.expect("acquire jobs/42 20000", "no");
        guard.release().await.unwrap();
        at.expect("acquire jobs/42 20000", "yes");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_lock_of_a_vanished_peer_is_acquired_when_it_expires() {
    for kind in PEERS {
        let mut at = Meeting::with(kind).await;
        at.expect("acquire vanished 1200", "yes");
        let waiting = spawn_waiter(&at.ours, "vanished").await;
        await_served(Duration::from_millis(1200) + SOON, waiting).await.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_keeps_a_lock_that_it_extends() {
    for kind in PEERS {
        let mut at = Meeting::with(kind).await;
        at.expect("acquire extended 1000", "yes");
        let mut waiting = spawn_waiter(&at.ours, "extended").await;
        at.expect("extend extended 4000", "yes");
        let early = tokio::time::timeout(Duration::from_millis(2500), &mut waiting).await;
        assert!(early.is_err(), "{kind}: its first time to live was believed");
        let guard = await_served(Duration::from_millis(1500) + SOON, waiting).await;
        let late = at.peer.ask("extend extended 4000");
        assert!(["no", "LockNotOwnedError"].contains(&late.as_str()), "{kind}: {late}");
        guard.confirm().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_keeps_a_lock_without_expiry_until_it_releases() {
    let mut at = Meeting::with("redis-py").await;
    at.expect("acquire endless -", "yes");
    let mut waiting = spawn_waiter(&at.ours, "endless").await;
    let early = tokio::time::timeout(TTL + SOON, &mut waiting).await;
    assert!(early.is_err(), "it was taken from its holder");
    assert_eq!(at.server.ask(&["PTTL", "endless"]), "-1", "it was given an end");
    at.expect("release endless", "yes");
    await_served(BY_HEARTBEAT, waiting).await.release().await.unwrap();
}

/// The ways in which we can hold a lock.
async fn holds(at: &Meeting, how: &str) -> Guard {
    let name = "held";
    match how {
        "taken" => lock(&at.ours, name).await,
        "handed over" => {
            let guard = lock(&at.others, name).await;
            let waiting = spawn_waiter(&at.ours, name).await;
            guard.release().await.unwrap();
            await_served(SOON, waiting).await
        }
        "renewed" => {
            let guard = lock(&at.ours, name).await;
            let early = tokio::time::timeout(TTL + SOON, guard.lost()).await;
            assert!(early.is_err(), "it was renewed");
            guard
        }
        "read" => at.ours.rwlock(name).unwrap().read().await.unwrap(),
        "downgraded" => {
            let guard = at.ours.rwlock(name).unwrap().write().await.unwrap();
            guard.downgrade().await.unwrap();
            guard
        }
        "permit" => at.ours.semaphore(name, 2).unwrap().acquire().await.unwrap(),
        other => unreachable!("{other}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_kind_of_our_locks_excludes_peers() {
    for kind in PEERS {
        let mut at = Meeting::with(kind).await;
        let mut ways = vec!["taken", "handed over", "read", "downgraded", "permit"];
        // A renewal takes its time, and leaves the same key for all of them.
        ways.extend((kind == "redis-py").then_some("renewed"));
        for how in ways {
            let guard = holds(&at, how).await;
            assert_eq!(at.peer.ask("acquire held 20000"), "no", "{kind}, {how}");
            at.peer.send("wait held 20000 10");
            guard.confirm().await.unwrap();
            guard.release().await.unwrap();
            assert_eq!(at.peer.receive(), "yes", "{kind}, {how}: it waited for our release");
            assert_eq!(at.peer.ask("release held"), "yes", "{kind}, {how}: it is its own");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_cannot_release_or_extend_our_lock() {
    for kind in PEERS {
        let mut at = Meeting::with(kind).await;
        at.expect("acquire late 200", "yes");
        let guard =
            await_served(Duration::from_millis(200) + SOON, spawn_waiter(&at.ours, "late").await)
                .await;
        let refused = if kind == "redis-py" { "LockNotOwnedError" } else { "no" };
        at.expect("extend late 20000", refused);
        at.expect("release late", refused);
        guard.confirm().await.unwrap();
        assert!(!is_free(&at.others, "late").await, "{kind}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn we_cannot_release_or_renew_the_lock_of_a_peer() {
    for kind in PEERS {
        let mut at = Meeting::with(kind).await;
        let (released, renewed) = (lock(&at.ours, "late").await, lock(&at.ours, "later").await);
        at.server.ask(&["DEL", "late", "later"]);
        at.expect("acquire late 1000", "yes");
        at.expect("acquire later 1000", "yes");
        assert!(renewed.confirm().await.is_err(), "{kind}");
        // Whatever it answers: it is the other's.
        let _ = released.release().await;
        at.expect("extend late 20000", "yes");
        at.expect("release late", "yes");
        at.expect("release later", "yes");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn inspect_shows_that_a_peer_holds() {
    for kind in PEERS {
        let mut at = Meeting::with(kind).await;
        at.expect("acquire seen 20000", "yes");
        let state = at.ours.inspect("seen").await.unwrap();
        assert_eq!(state.holders.len(), 1, "{kind}: {state:?}");
        let listed = at.ours.list("").await.unwrap();
        let names: Vec<_> = listed.iter().map(|state| state.name.as_str()).collect();
        assert_eq!(names, ["seen"], "{kind}");
    }
}

/// A lock without any library: `SET NX PX` and `DEL` over a connection of its own.
struct Bare(TcpStream);

impl Bare {
    fn at(port: u16) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_nodelay(true).unwrap();
        Self(stream)
    }

    /// What the server answers to an inline command, which is short.
    fn ask(&mut self, command: &str) -> String {
        self.0.write_all(format!("{command}\r\n").as_bytes()).unwrap();
        let mut answer = [0; 256];
        let length = self.0.read(&mut answer).unwrap();
        String::from_utf8_lossy(&answer[..length]).trim_end().to_owned()
    }

    fn acquire(&mut self, key: &str) {
        assert_eq!(self.ask(&format!("SET {key} somebody NX PX 60000")), "+OK");
    }

    fn release(&mut self, key: &str) {
        assert_eq!(self.ask(&format!("DEL {key}")), ":1");
    }
}

/// Foreign releases per measurement.
const RELEASES: usize = 20;
/// The median time until our waiter holds after a foreign release. It is a few milliseconds on an
/// idle machine, and far more on a busy one; heartbeats alone would take a quarter of a second.
const WOKEN: Duration = Duration::from_millis(50);

/// Measures the time from each foreign release until our waiter holds.
async fn woken(what: &str, ours: &Lockset, mut turn: impl FnMut(bool)) {
    let mut times = Vec::new();
    for _ in 0..RELEASES {
        turn(true);
        let waiting = spawn_waiter(ours, "woken").await;
        // At another time between two heartbeats each.
        tokio::time::sleep(Duration::from_millis(17 * times.len() as u64 % 300)).await;
        let released = Instant::now();
        turn(false);
        let guard = await_served(BY_HEARTBEAT, waiting).await;
        times.push(released.elapsed());
        guard.release().await.unwrap();
    }
    times.sort();
    let (p50, most) = (times[RELEASES / 2], times[RELEASES - 1]);
    println!("{what}: woken after a foreign release: p50 {p50:?}, at most {most:?}");
    assert!(p50 <= WOKEN, "{what}: {times:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_is_woken_by_the_release_of_a_peer() {
    let Meeting { server, ours, mut peer, .. } = Meeting::with("redis-py").await;
    woken("redis-py", &ours, |takes| {
        let order = if takes { "acquire woken 60000" } else { "release woken" };
        assert_eq!(peer.ask(order), "yes");
    })
    .await;
    let mut bare = Bare::at(server.port());
    woken("one server", &ours, |takes| match takes {
        true => bare.acquire("woken"),
        false => bare.release("woken"),
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_is_woken_by_a_foreign_release_at_the_master_that_sentinels_name() {
    let servers = RedisSentinel::start();
    let ours = Lockset::builder(&servers.url()).ttl(TTL).connect().await.unwrap();
    let mut bare = Bare::at(servers.servers()[servers.master()].port());
    woken("Sentinel", &ours, |takes| match takes {
        true => bare.acquire("lockset:woken"),
        false => bare.release("lockset:woken"),
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_is_woken_by_a_foreign_release_in_a_cluster() {
    let cluster = RedisCluster::start();
    let ours = Lockset::builder(&cluster.url()).ttl(TTL).connect().await.unwrap();
    let owner = cluster.owner(cluster.slot_of("lockset:woken"));
    let mut bare = Bare::at(cluster.nodes()[owner].port());
    woken("Cluster", &ours, |takes| match takes {
        true => bare.acquire("lockset:woken"),
        false => bare.release("lockset:woken"),
    })
    .await;
}

/// Ours wait in line and theirs ask again and again, and some of ours do as they do.
#[tokio::test(flavor = "multi_thread")]
async fn a_counter_shared_with_peers_loses_no_update() {
    const EACH: u64 = 20;
    let at = Meeting::with("redis-py").await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("count");
    std::fs::write(&file, "0").unwrap();
    let order = format!("count counted {} {EACH}", file.display());
    let mut peers: Vec<_> = PEERS.iter().map(|kind| peer(kind, &at.server)).collect();
    peers.iter_mut().for_each(|peer| peer.send(&order));
    let clients = [(&at.ours, true), (&at.ours, false), (&at.others, true), (&at.others, false)];
    let ours = clients.map(|(locks, in_line)| {
        let (mutex, file) = (locks.mutex("counted").unwrap(), file.clone());
        tokio::spawn(async move {
            for _ in 0..EACH {
                let guard = loop {
                    match in_line {
                        true => break mutex.lock().await.unwrap(),
                        false => match mutex.try_lock().await.unwrap() {
                            Some(guard) => break guard,
                            None => tokio::time::sleep(Duration::from_millis(5)).await,
                        },
                    }
                };
                let count: u64 = std::fs::read_to_string(&file).unwrap().parse().unwrap();
                tokio::time::sleep(Duration::from_millis(1)).await;
                std::fs::write(&file, (count + 1).to_string()).unwrap();
                guard.release().await.unwrap();
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        })
    });
    for task in ours {
        task.await.unwrap();
    }
    let theirs =
        tokio::task::block_in_place(|| peers.iter_mut().all(|peer| peer.receive() == "yes"));
    assert!(theirs, "a peer waited too long");
    let count: u64 = std::fs::read_to_string(&file).unwrap().parse().unwrap();
    assert_eq!(count, EACH * (clients.len() + PEERS.len()) as u64);
}
