//! One client among busy clients of another library, on one key: none starves.
//!
//! redis-py is the real library, in processes of its own, and asks every 0.1 s as it does by
//! itself.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

use std::path::Path;
use std::time::{Duration, Instant};

use lockset::Lockset;
use lockset_testkit::contenders::Contenders;
use lockset_testkit::python::PythonPeer;
use lockset_testkit::stage::{RedisCluster, RedisServer};
use lockset_testkit::steps::{await_served, lock, spawn_waiter};
use tokio::task::JoinHandle;

/// Leaves several chances within the longest wait, in case a poll comes late.
const COURTESY: &str = "700ms";
/// How many are busy.
const BUSY: usize = 3;
/// How long each of them holds.
const HOLD: Duration = Duration::from_millis(10);
/// How often the one among them waits, and how long they are among themselves before.
const ROUNDS: usize = 8;
const BETWEEN: Duration = Duration::from_millis(330);
const SOON: Duration = Duration::from_secs(2);
/// How long at most.
const LONGEST: Duration = Duration::from_secs(3);

/// A process with redis-py that has come so far that it answers.
fn redis_py(server: &RedisServer) -> PythonPeer {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peers/peers.py");
    let mut peer = PythonPeer::start(&program, &["redis-py", &server.port().to_string()]);
    peer.ask("acquire awake 1");
    peer
}

/// A client that leaves the lock free after so much time of hand-offs.
async fn client(server: &RedisServer, courtesy: &str) -> Lockset {
    let url = format!("{}?prefix=&courtesy={courtesy}", server.url());
    Lockset::connect(&url).await.unwrap()
}

/// Takes, holds and gives back until it is aborted.
fn keep_busy(locks: &Lockset) -> JoinHandle<()> {
    let mutex = locks.mutex("shared").unwrap();
    tokio::spawn(async move {
        loop {
            let guard = mutex.lock().await.unwrap();
            tokio::time::sleep(HOLD).await;
            guard.release().await.unwrap();
        }
    })
}

fn check(what: &str, waits: &[Duration]) {
    println!("{what} waited {waits:.2?}");
    assert!(waits.iter().all(|wait| *wait <= LONGEST), "{what} waited {waits:?}");
}

/// How long redis-py waits, again and again, while these tasks pass the lock on.
async fn peer_waits(server: &RedisServer, busy: Vec<JoinHandle<()>>) {
    let mut peer = redis_py(server);
    let mut waits = Vec::new();
    for _ in 0..ROUNDS {
        tokio::time::sleep(BETWEEN).await;
        let began = Instant::now();
        let answer = tokio::task::block_in_place(|| peer.ask("block shared 10000 20"));
        waits.push(began.elapsed());
        if answer == "yes" {
            assert_eq!(peer.ask("release shared"), "yes");
        }
    }
    check("redis-py", &waits);
    assert!(busy.iter().all(|one| !one.is_finished()), "a peer failed");
    busy.iter().for_each(JoinHandle::abort);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_client_among_busy_lockset_clients_does_not_starve() {
    let server = RedisServer::start();
    let mut clients = Vec::new();
    for _ in 0..BUSY {
        clients.push(client(&server, COURTESY).await);
    }
    peer_waits(&server, clients.iter().map(keep_busy).collect()).await;
}

/// Its tasks pass the lock on inside the process, and no claim queues at the server.
#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_client_beside_busy_tasks_of_one_client_does_not_starve() {
    let server = RedisServer::start();
    let ours = client(&server, COURTESY).await;
    peer_waits(&server, (0..BUSY).map(|_| keep_busy(&ours)).collect()).await;
}

/// While it is left free only a peer can take it; then the first waiter gets it, and so on.
#[tokio::test(flavor = "multi_thread")]
async fn a_lock_left_free_for_pollers_goes_to_the_first_waiter_afterwards() {
    let server = RedisServer::start();
    let clients = [client(&server, "200ms").await, client(&server, "200ms").await];
    let (newcomer, last) = (client(&server, "200ms").await, client(&server, "200ms").await);
    let is_free = || server.ask(&["GET", "{shared}:handoffs"]) == "free";
    for _ in 0..3 {
        let mut guard = lock(&clients[0], "shared").await;
        let began = Instant::now();
        for round in 1.. {
            let first = spawn_waiter(&clients[round % 2], "shared").await;
            let is_over = began.elapsed() > Duration::from_millis(250);
            let second = match is_over {
                true => Some(spawn_waiter(&last, "shared").await),
                false => None,
            };
            let token = guard.token();
            guard.release().await.unwrap();
            let Some(second) = second else {
                guard = await_served(SOON, first).await;
                continue;
            };
            if is_free() {
                assert_eq!(server.ask(&["EXISTS", "shared"]), "0");
                let early = newcomer.mutex("shared").unwrap().try_lock().await.unwrap();
                assert!(early.is_none() || !is_free(), "a newcomer came first");
            }
            guard = await_served(SOON, first).await;
            assert!(guard.token() > token && !second.is_finished(), "out of order");
            guard.release().await.unwrap();
            await_served(SOON, second).await.release().await.unwrap();
            break;
        }
    }
}

/// Whatever happens to the message that the lock is left free, it is granted again soon.
#[tokio::test(flavor = "multi_thread")]
async fn courtesy_under_contention_keeps_exclusion() {
    let server = RedisServer::start();
    is_courteous(&server.url(), &server).await;
    let cluster = RedisCluster::start();
    let owner = cluster.owner(cluster.slot_of("shared"));
    is_courteous(&cluster.url(), &cluster.nodes()[owner]).await;
}

async fn is_courteous(url: &str, server: &RedisServer) {
    let mut clients = Vec::new();
    for _ in 0..BUSY {
        let url = format!("{url}?prefix=&courtesy=200ms");
        clients.push(Lockset::connect(&url).await.unwrap());
    }
    let contenders = Contenders::start(&clients, 3, &["shared"]);
    contenders.wait_served(20, SOON).await;
    let (mut seen_free, began) = (0, Instant::now());
    while began.elapsed() < Duration::from_secs(4) {
        seen_free += usize::from(server.ask(&["GET", "{shared}:handoffs"]) == "free");
        if seen_free == 3 {
            server.ask(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        }
        contenders.wait_served(1, SOON * 2).await;
    }
    assert!(seen_free > 3, "it was left free {seen_free} times only");
    contenders.wait_each_served(5, SOON * 5).await;
    contenders.stop_and_check().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lockset_client_among_busy_foreign_clients_does_not_starve() {
    let server = RedisServer::start();
    let ours = client(&server, COURTESY).await;
    let mut peers: Vec<_> = (0..BUSY).map(|_| redis_py(&server)).collect();
    for peer in &mut peers {
        peer.send(&format!("busy shared 10000 {}", HOLD.as_millis()));
    }
    let mut waits = Vec::new();
    for _ in 0..ROUNDS {
        tokio::time::sleep(BETWEEN).await;
        let began = Instant::now();
        let mutex = ours.mutex("shared").unwrap();
        let locked = mutex.lock_within(Duration::from_secs(20)).await;
        waits.push(began.elapsed());
        if let Ok(guard) = locked {
            guard.release().await.unwrap();
        }
    }
    check("lockset", &waits);
}
