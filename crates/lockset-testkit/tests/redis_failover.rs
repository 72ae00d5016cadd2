//! What becomes of locks when the master of a Redis Sentinel service changes.
//!
//! A failover can lose what the old master did not send on in time. That loss is documented, and
//! kept out of these tests: masters are settled before they end, but for one.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lockset::{Guard, Lockset, State};
use lockset_testkit::contenders::Contenders;
use lockset_testkit::stage::RedisSentinel;
use lockset_testkit::steps::{
    await_confirmed, await_lost, await_served, client, lock, spawn_waiter, until, within,
};
use rustix::process::Signal;
use tokio::task::JoinHandle;

/// Longer than a failover takes.
const TTL: Duration = Duration::from_secs(10);
/// A third of a place's lease, at most 1.7 s, and the time that a busy machine takes.
const BY_HEARTBEAT: Duration = Duration::from_secs(4);
/// How long after a promotion a client has found the new master.
const FOLLOWED: Duration = Duration::from_secs(8);

/// A client that tries to take the lock again and again, and fails the test if that works while the
/// holder may still believe.
struct Rival {
    over: Arc<AtomicBool>,
    trying: JoinHandle<()>,
}

impl Rival {
    fn of(guard: &Arc<Guard>, locks: Lockset) -> Self {
        let over = Arc::<AtomicBool>::default();
        let (guard, ends) = (guard.clone(), over.clone());
        let trying = tokio::spawn(async move {
            let mutex = locks.mutex(guard.name().as_str()).unwrap();
            while !ends.load(Ordering::Relaxed) {
                if let Ok(Some(theirs)) = mutex.try_lock().await {
                    let state = guard.state();
                    assert!(matches!(state, State::Lost(_)), "two hold: {theirs:?}, {state:?}");
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        Self { over, trying }
    }

    async fn leave(self) {
        self.over.store(true, Ordering::Relaxed);
        self.trying.await.unwrap();
    }
}

/// The key of a lock, as the master has it.
fn holder(servers: &RedisSentinel, name: &str) -> String {
    servers.servers()[servers.master()].ask(&["GET", &format!("lockset:{name}")])
}

async fn a_kept_guard_goes_on(end_master: fn(&RedisSentinel) -> usize) {
    let servers = RedisSentinel::start();
    let url = servers.url();
    let guard = Arc::new(lock(&client(&url, TTL).await, "kept").await);
    let rival = Rival::of(&guard, client(&url, TTL).await);
    end_master(&servers);
    await_confirmed(FOLLOWED, &guard).await;
    assert_eq!(guard.state(), State::Held);
    let holds = holder(&servers, "kept");
    assert!(holds.starts_with(&guard.claim_id().to_string()), "the new master knows: {holds}");
    // By itself too, and not only when asked.
    let master = &servers.servers()[servers.master()];
    master.ask(&["PEXPIRE", "lockset:kept", "6000"]);
    until("it is renewed at the new master", || {
        master.ask(&["PTTL", "lockset:kept"]).parse::<u64>().is_ok_and(|left| left > 8000)
    });
    rival.leave().await;
    Arc::into_inner(guard).unwrap().release().await.unwrap();
    assert_eq!(holder(&servers, "kept"), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewed_guard_survives_a_killed_master() {
    a_kept_guard_goes_on(RedisSentinel::kill_master).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewed_guard_survives_a_stopped_master() {
    a_kept_guard_goes_on(RedisSentinel::stop_master).await;
}

/// The old master is the only one who knows of the second's grant. The new one hands the lock on as
/// if it had never been; then the second has been told, and its token is not given again.
#[tokio::test(flavor = "multi_thread")]
async fn a_grant_lost_by_a_failover_is_reported_and_its_token_is_not_reused() {
    let servers = RedisSentinel::start();
    let url = servers.url();
    let (ours, theirs, others) =
        (client(&url, TTL).await, client(&url, TTL).await, client(&url, TTL).await);
    let held = lock(&ours, "lost").await;
    let (second, third) =
        (spawn_waiter(&theirs, "lost").await, spawn_waiter(&others, "lost").await);
    let old = servers.cut_off_master();
    held.release().await.unwrap();
    let second = await_served(BY_HEARTBEAT, second).await;
    servers.lose_master(old);
    await_lost(TTL + FOLLOWED, &second).await;
    let third = await_served(TTL + FOLLOWED, third).await;
    assert!(third.token() > second.token(), "{} after {}", third.token(), second.token());
}

/// Its lease is shorter than the failover: it is lost, and known to be, before another client
/// holds.
#[tokio::test(flavor = "multi_thread")]
async fn a_guard_with_a_short_ttl_is_lost_by_its_deadline() {
    let servers = RedisSentinel::start();
    let (url, short) = (servers.url(), Duration::from_secs(1));
    let guard = Arc::new(lock(&client(&url, short).await, "short").await);
    let rival = Rival::of(&guard, client(&url, short).await);
    let deadline = Instant::now() + short;
    let told = {
        let guard = guard.clone();
        tokio::spawn(async move {
            guard.lost().await;
            Instant::now()
        })
    };
    let old = servers.master();
    servers.servers()[old].kill();
    let told = within(short * 2, "it is told", told).await.unwrap();
    // It may have been renewed just before the end.
    assert!(told < deadline + short, "it was told too late");
    servers.await_promotion(old);
    within(FOLLOWED, "the rival takes it", rival.trying).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn waiters_keep_their_order_and_tokens_grow() {
    let servers = RedisSentinel::start();
    let url = servers.url();
    let (ours, theirs) = (client(&url, TTL).await, client(&url, TTL).await);
    let others = client(&url, TTL).await;
    let guard = lock(&ours, "line").await;
    let before = guard.token();
    let (first, second) =
        (spawn_waiter(&theirs, "line").await, spawn_waiter(&others, "line").await);
    servers.kill_master();
    await_confirmed(FOLLOWED, &guard).await;
    // A waiter that does not listen yet is passed over, and keeps its queue entry.
    let master = &servers.servers()[servers.master()];
    until("all listen again", || {
        master.ask(&["PUBSUB", "CHANNELS", "*inbox*"]).lines().count() == 3
    });
    guard.release().await.unwrap();
    let guard = await_served(BY_HEARTBEAT, first).await;
    assert!(!second.is_finished(), "the order was kept");
    let between = guard.token();
    guard.release().await.unwrap();
    let guard = await_served(BY_HEARTBEAT, second).await;
    assert!(before < between && between < guard.token(), "tokens grow");
    guard.release().await.unwrap();
    let last = lock(&client(&url, TTL).await, "line").await;
    assert!(last.token() > between);
}

/// A release that finds no master is not forgotten: the waiter has the lock when one is there.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_during_a_failover_is_retried() {
    let servers = RedisSentinel::start();
    let url = servers.url();
    let (ours, theirs) = (client(&url, TTL).await, client(&url, TTL).await);
    let guard = lock(&ours, "dropped").await;
    let waiting = spawn_waiter(&theirs, "dropped").await;
    let old = servers.stop_master();
    drop(guard);
    await_served(TTL + FOLLOWED, waiting).await.release().await.unwrap();
    servers.resume(old);
}

#[tokio::test(flavor = "multi_thread")]
async fn contenders_are_served_through_failovers_and_never_two_at_once() {
    let servers = RedisSentinel::start();
    let url = servers.url();
    let ttl = Duration::from_secs(4);
    let clients = [client(&url, ttl).await, client(&url, ttl).await, client(&url, ttl).await];
    let contenders = Contenders::start(&clients, 4, &["contenders/1", "contenders/2"]);
    contenders.wait_served(50, FOLLOWED).await;
    let killed = servers.kill_master();
    contenders.wait_served(50, FOLLOWED * 2).await;
    servers.bring_back(killed);
    contenders.wait_served(50, FOLLOWED).await;
    let stopped = servers.stop_master();
    contenders.wait_served(50, FOLLOWED * 2).await;
    servers.resume(stopped);
    contenders.wait_served(50, FOLLOWED).await;
    contenders.stop_and_check().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unresponsive_sentinel_does_not_matter() {
    let servers = RedisSentinel::start();
    let url = servers.url();
    let ours = client(&url, TTL).await;
    let guard = lock(&ours, "silent").await;
    // The first in the list.
    servers.sentinels()[0].signal(Signal::STOP);
    let theirs = within(FOLLOWED, "a connection", client(&url, TTL)).await;
    let waiting = spawn_waiter(&theirs, "silent").await;
    servers.kill_master();
    await_confirmed(FOLLOWED, &guard).await;
    guard.release().await.unwrap();
    await_served(BY_HEARTBEAT, waiting).await.release().await.unwrap();
    let others = within(FOLLOWED, "a connection", client(&url, TTL)).await;
    lock(&others, "silent").await.release().await.unwrap();
}

/// It comes back as an empty master, until the sentinels tell it otherwise.
#[tokio::test(flavor = "multi_thread")]
async fn the_old_master_is_not_used_when_it_comes_back() {
    let servers = RedisSentinel::start();
    let url = servers.url();
    let (ours, theirs) = (client(&url, TTL).await, client(&url, TTL).await);
    let guard = Arc::new(lock(&ours, "returned").await);
    servers.sentinels()[0].signal(Signal::STOP);
    let old = servers.kill_master();
    await_confirmed(FOLLOWED, &guard).await;
    let rival = Rival::of(&guard, theirs);
    let (old, new) = (&servers.servers()[old], &servers.servers()[servers.master()]);
    old.restart();
    servers.sentinels()[0].signal(Signal::CONT);
    // A client that has to find the master again while both claim to be it.
    for _ in 0..10 {
        new.ask(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        new.ask(&["CLIENT", "KILL", "TYPE", "normal"]);
        let newcomer = within(FOLLOWED, "a connection", client(&url, TTL)).await;
        await_confirmed(FOLLOWED, &guard).await;
        assert!(newcomer.mutex("returned").unwrap().try_lock().await.unwrap().is_none());
    }
    until("it follows", || old.ask(&["ROLE"]).starts_with("slave"));
    let done = old.ask(&["INFO", "commandstats"]);
    let scripts = ["cmdstat_eval", "cmdstat_evalsha", "cmdstat_fcall"];
    assert!(!scripts.iter().any(|script| done.contains(script)), "it was used: {done}");
    rival.leave().await;
    await_confirmed(FOLLOWED, &guard).await;
}

/// Clients of a stopped master may still be connected to it when it goes on.
#[tokio::test(flavor = "multi_thread")]
async fn late_replies_of_a_stopped_master_are_ignored() {
    let servers = RedisSentinel::start();
    let url = servers.url();
    let (ours, theirs) = (client(&url, TTL).await, client(&url, TTL).await);
    assert!(lockset_testkit::steps::is_free(&ours, "late").await);
    // Asked of a master that holds writes back, then stops: it does as asked when it goes on.
    let old = servers.master();
    servers.servers()[old].ask(&["CLIENT", "PAUSE", "2000", "WRITE"]);
    let mutex = ours.mutex("late").unwrap();
    let asking = tokio::spawn(async move { mutex.lock().await });
    servers.servers()[old].signal(Signal::STOP);
    servers.await_promotion(old);
    let first = within(FOLLOWED, "it asks the new master", asking).await.unwrap().unwrap();
    let first = Arc::new(first);
    let rival = Rival::of(&first, theirs);
    servers.resume(old);
    await_confirmed(FOLLOWED, &first).await;
    rival.leave().await;
    assert_eq!(first.state(), State::Held);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_master_or_unknown_service_is_reported() {
    let servers = RedisSentinel::start();
    let unknown = servers.url().replace("/locks", "/nobody");
    let error = within(FOLLOWED, "a refusal", Lockset::connect(&unknown)).await.unwrap_err();
    let text = lockset_testkit::steps::error_chain(&error);
    assert!(text.contains("nobody"), "it names the service: {text}");
    servers.sentinels().iter().for_each(|sentinel| sentinel.signal(Signal::STOP));
    let url = servers.url();
    let silent = within(FOLLOWED * 2, "a refusal", Lockset::connect(&url));
    assert!(silent.await.unwrap_err().is_retryable());
}
