//! What the Redis engine makes of faults: each has a clear outcome, seen on a real server.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::{Duration, Instant};

use futures_util::StreamExt;
use lockset::{Guard, LockOptions, LockState, Lockset, LossReason, Mode, State};
use lockset_testkit::process::{Process, StateSource};
use lockset_testkit::proxy::Proxy;
use lockset_testkit::stage::RedisServer;
use lockset_testkit::steps::{
    PendingLock, assert_error, await_lost, await_served, error_chain, is_free, within,
};

/// The place of a waiter then lives for 1.5 s and is refreshed every 500 ms.
const TTL: Duration = Duration::from_secs(3);
/// Too short for any lease to run out.
const SOON: Duration = Duration::from_millis(750);
/// A third of the ttl, and the time that an answer takes on a busy machine.
const BY_RENEWAL: Duration = Duration::from_millis(1500);
/// A third of a place's lease, likewise.
const BY_HEARTBEAT: Duration = Duration::from_secs(1);
/// A ttl that no test lives to see the end of.
const LONG: Duration = Duration::from_secs(60);
/// What a waiter that was handed a lock is given to say that it is there, at most.
const FIRST_LEASE: Duration = Duration::from_secs(10);

async fn client(url: &str) -> Lockset {
    client_with(TTL, url).await
}

async fn client_with(ttl: Duration, url: &str) -> Lockset {
    Lockset::builder(url).ttl(ttl).connect().await.unwrap()
}

async fn lock(locks: &Lockset, name: &str) -> Guard {
    within(SOON, "a free lock", locks.mutex(name).unwrap().lock()).await.unwrap()
}

/// A client waits for the lock, and the server knows.
async fn spawn_waiter(locks: &Lockset, name: &str) -> PendingLock {
    let before = locks.inspect(name).await.unwrap().waiters.len();
    let mutex = locks.mutex(name).unwrap();
    let waiting = tokio::spawn(async move { mutex.lock().await });
    await_lock_state(locks, name, |state| state.waiters.len() > before).await;
    waiting
}

async fn await_lock_state(locks: &Lockset, name: &str, as_told: impl Fn(&LockState) -> bool) {
    let mut states = locks.watch_name(name).unwrap();
    let found = async { while !as_told(&states.next().await.unwrap().unwrap()) {} };
    within(Duration::from_secs(5), "the state that is waited for", found).await;
}

/// Redis tells of no such thing by itself, so it is asked.
async fn until(what: &str, mut happened: impl FnMut() -> bool) {
    let began = Instant::now();
    while !happened() {
        assert!(began.elapsed() < Duration::from_secs(10), "it did not happen: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Cuts every connection of lockset, and returns when as many stand again.
async fn kill_connections(server: &RedisServer, count: usize) {
    let killed = server.ask(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    assert_eq!(killed, count.to_string());
    until("the connections stand again", || server.listeners() == count).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn flushed_scripts_are_loaded_again() {
    let server = RedisServer::start();
    let (ours, theirs) = (client(&server.url()).await, client(&server.url()).await);
    let guard = lock(&ours, "flushed").await;
    let waiting = spawn_waiter(&theirs, "flushed").await;
    server.ask(&["SCRIPT", "FLUSH"]);
    guard.release().await.unwrap();
    let guard = await_served(SOON, waiting).await;
    server.ask(&["SCRIPT", "FLUSH"]);
    assert!(tokio::time::timeout(TTL * 2, guard.lost()).await.is_err(), "it was renewed");
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_connection_loses_neither_lock_nor_queue_position() {
    let server = RedisServer::start();
    let url = server.url();
    let (ours, first, second) = (client(&url).await, client(&url).await, client(&url).await);
    let guard = lock(&ours, "cut").await;
    let (first, second) = (spawn_waiter(&first, "cut").await, spawn_waiter(&second, "cut").await);
    let line = || server.ask(&["ZRANGE", "{lockset:cut}:queue", "0", "-1", "WITHSCORES"]);
    let before = line();
    kill_connections(&server, 3).await;
    assert!(tokio::time::timeout(TTL * 2, guard.lost()).await.is_err(), "it was renewed");
    kill_connections(&server, 3).await;
    assert_eq!(line(), before, "the places were kept");
    guard.release().await.unwrap();
    let guard = await_served(SOON, first).await;
    assert!(!second.is_finished(), "the order was kept");
    guard.release().await.unwrap();
    await_served(SOON, second).await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_server_state_is_reported_and_waiters_are_served() {
    let server = RedisServer::start();
    let (ours, theirs) = (client(&server.url()).await, client(&server.url()).await);
    let guard = lock(&ours, "flushed").await;
    let waiting = spawn_waiter(&theirs, "flushed").await;
    server.ask(&["FLUSHALL"]);
    let next = await_served(BY_HEARTBEAT, waiting).await;
    assert_eq!(await_lost(BY_RENEWAL, &guard).await, LossReason::Forgotten);
    assert!(next.token() > guard.token());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_comes_back_empty_has_lost_the_locks() {
    let server = RedisServer::start();
    let (ours, theirs) = (client(&server.url()).await, client(&server.url()).await);
    let guard = lock(&ours, "restarted").await;
    let waiting = spawn_waiter(&theirs, "restarted").await;
    server.restart();
    let next = await_served(TTL * 2, waiting).await;
    assert_eq!(await_lost(TTL, &guard).await, LossReason::Forgotten);
    assert!(next.token() > guard.token());
    next.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acquisition_with_a_lost_reply_is_recovered_by_its_id() {
    let server = RedisServer::start();
    let proxy = Proxy::before(server.port());
    let (ours, theirs) = (client(&server.url_through(&proxy)).await, client(&server.url()).await);
    is_free(&ours, "unanswered").await;
    proxy.drop_replies();
    let mutex = ours.mutex("unanswered").unwrap();
    let asking = tokio::spawn(async move { mutex.lock().await });
    proxy.until("an answer is lost", |seen| seen.dropped > 0);
    let holder = server.ask(&["GET", "lockset:unanswered"]);
    assert!(!holder.is_empty(), "it was executed");
    proxy.cut();
    let guard = await_served(SOON, asking).await;
    assert!(holder.starts_with(&guard.claim_id().to_string()), "the same claim holds");
    assert!(!is_free(&theirs, "unanswered").await);
    guard.release().await.unwrap();
    assert!(is_free(&theirs, "unanswered").await);
}

/// A repeated request finds the whole lease, not the short one of a lock that was handed over.
#[tokio::test(flavor = "multi_thread")]
async fn a_fixed_lease_with_a_lost_reply_is_not_extended() {
    let server = RedisServer::start();
    let proxy = Proxy::before(server.port());
    let ours = client(&server.url_through(&proxy)).await;
    let fixed = || LockOptions::default().ttl(LONG).no_renewal();
    let names = ["mutex", "read"];
    for name in names {
        is_free(&ours, name).await;
        proxy.drop_replies();
        let (mutex, rwlock) = (ours.mutex(name).unwrap(), ours.rwlock(name).unwrap());
        let (mutex, rwlock) = (mutex.with(fixed()), rwlock.with(fixed()));
        let asking = tokio::spawn(async move {
            if name == "mutex" { mutex.lock().await } else { rwlock.read().await }
        });
        until("it was executed", || !server.ask(&["GET", &format!("lockset:{name}")]).is_empty())
            .await;
        proxy.cut();
        let guard = await_served(SOON, asking).await;
        assert!(guard.valid_for() <= LONG, "{:?}", guard.valid_for());
        let left = server.ask(&["PTTL", &format!("lockset:{name}")]).parse::<u128>().unwrap();
        assert!(left <= LONG.as_millis(), "{left}");
        assert!(guard.valid_for() > LONG / 2, "{:?}", guard.valid_for());
    }
}

/// The server has granted it, and no client is left that would know. Its withdrawal finds the
/// connection as it is: deaf, or stuck until another stands.
#[tokio::test(flavor = "multi_thread")]
async fn an_acquisition_cancelled_without_a_reply_is_withdrawn() {
    for stuck in [false, true] {
        let server = RedisServer::start();
        let proxy = Proxy::before(server.port());
        let ours = client_with(LONG, &server.url_through(&proxy)).await;
        let theirs = client_with(LONG, &server.url()).await;
        is_free(&ours, "orphan").await;
        proxy.drop_replies();
        let mutex = ours.mutex("orphan").unwrap();
        let asking = tokio::spawn(async move { mutex.lock().await });
        proxy.until("an answer is lost", |seen| seen.dropped > 0);
        let is_taken = || !server.ask(&["GET", "lockset:orphan"]).is_empty();
        assert!(is_taken(), "it was executed");
        if stuck {
            proxy.hold_requests();
        }
        asking.abort();
        assert!(asking.await.unwrap_err().is_cancelled(), "it is given up");
        if stuck {
            proxy.until("the withdrawal is held back", |seen| seen.held > 0);
            assert!(is_taken(), "it cannot be withdrawn yet");
        }
        proxy.cut();
        within(SOON, "it is withdrawn", until("it is free", || !is_taken())).await;
        let next = within(SOON, "a free lock", theirs.mutex("orphan").unwrap().lock()).await;
        next.unwrap().release().await.unwrap();
    }
}

/// Its connection stands, so the server has told it and believes that it heard.
#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_waiter_delays_by_its_first_lease_and_not_its_ttl() {
    let server = RedisServer::start();
    let ours = client_with(LONG, &server.url()).await;
    let theirs = client_with(LONG, &server.url()).await;
    let guard = lock(&ours, "stopped").await;
    let actor = env!("CARGO_BIN_EXE_actor");
    let mut stopped = Process::start(actor, &server.url(), StateSource::Guard);
    let call = stopped.begin_lock("stopped", Mode::Exclusive, LONG);
    await_lock_state(&ours, "stopped", |state| state.waiters.len() == 1).await;
    let behind = spawn_waiter(&theirs, "stopped").await;
    stopped.stop();
    guard.release().await.unwrap();
    let released = Instant::now();
    let left = server.ask(&["PTTL", "lockset:stopped"]).parse::<u128>().unwrap();
    assert!(left > 0 && left <= FIRST_LEASE.as_millis(), "it was given {left} ms");
    let next = await_served(FIRST_LEASE + 2 * SOON, behind).await;
    let waited = released.elapsed();
    assert!(waited > FIRST_LEASE / 2, "it went to the stopped one first, for {waited:?}");
    // It may have the letter still in its ears, and must not believe it.
    stopped.resume();
    next.confirm().await.unwrap();
    let token = next.token();
    next.release().await.unwrap();
    assert!(within(LONG, "its turn", stopped.granted(call)).await > token);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_arrives_after_the_release_acquires_nothing() {
    let server = RedisServer::start();
    let proxy = Proxy::before(server.port());
    let (ours, theirs) = (client(&server.url_through(&proxy)).await, client(&server.url()).await);
    is_free(&ours, "late").await;
    proxy.hold_requests();
    let mutex = ours.mutex("late").unwrap();
    let asking = tokio::spawn(async move { mutex.lock().await });
    proxy.until("a request is held back", |seen| seen.held > 0);
    proxy.cut();
    let guard = await_served(SOON, asking).await;
    guard.release().await.unwrap();
    proxy.deliver_late();
    assert_eq!(server.ask(&["GET", "lockset:late"]), "");
    assert!(is_free(&theirs, "late").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_withdrawn_claim_stays_withdrawn_when_its_request_arrives_late() {
    let server = RedisServer::start();
    let proxy = Proxy::before(server.port());
    let (ours, theirs) = (client(&server.url_through(&proxy)).await, client(&server.url()).await);
    is_free(&ours, "withdrawn").await;
    proxy.hold_requests();
    let began = Instant::now();
    let patience = Duration::from_millis(200);
    let error = ours.mutex("withdrawn").unwrap().lock_within(patience).await.unwrap_err();
    assert_error(&error, &["no answer within"], true);
    assert!(began.elapsed() < patience + SOON, "it waited longer than it was told to");
    proxy.cut();
    until("it is withdrawn", || server.ask(&["KEYS", "*:tombstone:*"]).contains("withdrawn")).await;
    proxy.deliver_late();
    assert_eq!(server.ask(&["GET", "lockset:withdrawn"]), "");
    assert!(is_free(&theirs, "withdrawn").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_with_a_lost_reply_hands_over_once() {
    let server = RedisServer::start();
    let proxy = Proxy::before(server.port());
    let (ours, theirs) = (client(&server.url_through(&proxy)).await, client(&server.url()).await);
    is_free(&ours, "handed").await;
    let guard = lock(&ours, "handed").await;
    let waiting = spawn_waiter(&theirs, "handed").await;
    proxy.drop_replies();
    let releasing = tokio::spawn(guard.release());
    let next = await_served(SOON, waiting).await;
    proxy.until("an answer is lost", |seen| seen.dropped > 0);
    proxy.cut();
    let error = within(SOON, "it is told", releasing).await.unwrap().unwrap_err();
    assert_error(&error, &["the connection failed"], true);
    until("the rest is withdrawn", || server.ask(&["KEYS", "*:tombstone:*"]).contains("handed"))
        .await;
    next.confirm().await.unwrap();
    assert!(!is_free(&ours, "handed").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_with_a_lost_reply_is_queued_once() {
    let server = RedisServer::start();
    let proxy = Proxy::before(server.port());
    let (ours, theirs) = (client(&server.url()).await, client(&server.url_through(&proxy)).await);
    is_free(&theirs, "line").await;
    let guard = lock(&ours, "line").await;
    proxy.drop_replies();
    let mutex = theirs.mutex("line").unwrap();
    let waiting = tokio::spawn(async move { mutex.lock().await });
    proxy.until("an answer is lost", |seen| seen.dropped > 0);
    let place = server.ask(&["ZRANGE", "{lockset:line}:queue", "0", "-1", "WITHSCORES"]);
    assert_eq!(place.lines().count(), 2, "it was executed");
    proxy.cut();
    until("it is back", || server.ask(&["PUBSUB", "CHANNELS"]).lines().count() == 2).await;
    let beats = executed(&server);
    until("it asked again", || executed(&server) > beats + 1).await;
    let now = server.ask(&["ZRANGE", "{lockset:line}:queue", "0", "-1", "WITHSCORES"]);
    assert_eq!(now, place, "the same claim, in the same place");
    guard.release().await.unwrap();
    await_served(SOON, waiting).await.release().await.unwrap();
    assert!(is_free(&ours, "line").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_with_a_next_claim_is_cleaned_up_when_its_reply_is_lost() {
    let server = RedisServer::start();
    let proxy = Proxy::before(server.port());
    let (ours, theirs) = (client(&server.url_through(&proxy)).await, client(&server.url()).await);
    is_free(&ours, "along").await;
    let guard = lock(&ours, "along").await;
    let mutex = ours.mutex("along").unwrap();
    let mut next = Box::pin(async move { mutex.lock().await });
    assert!(futures_util::poll!(&mut next).is_pending(), "it stands in line behind the guard");
    proxy.drop_replies();
    let releasing = tokio::spawn(guard.release());
    proxy.until("an answer is lost", |seen| seen.dropped > 0);
    proxy.cut();
    within(SOON, "it is told", releasing).await.unwrap().unwrap_err();
    let next = await_served(TTL, tokio::spawn(next)).await;
    let holder = server.ask(&["GET", "lockset:along"]);
    assert!(holder.starts_with(&next.claim_id().to_string()), "{holder}");
    assert!(!is_free(&theirs, "along").await);
    next.release().await.unwrap();
    assert!(is_free(&theirs, "along").await, "nothing is left behind");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_without_a_connection_is_skipped_and_keeps_its_position() {
    let server = RedisServer::start();
    let proxy = Proxy::before(server.port());
    // So long that no place ends during the test.
    let ttl = Duration::from_secs(20);
    let (ours, theirs) = (
        client_with(ttl, &server.url()).await,
        client_with(ttl, &server.url_through(&proxy)).await,
    );
    let others = client_with(ttl, &server.url()).await;
    let guard = lock(&ours, "deaf").await;
    let waiting = spawn_waiter(&theirs, "deaf").await;
    proxy.refuse(true);
    proxy.cut();
    until("the server saw it go", || server.ask(&["PUBSUB", "CHANNELS"]).lines().count() == 2)
        .await;
    guard.release().await.unwrap();
    let guard = ours.mutex("deaf").unwrap().try_lock().await.unwrap().expect("it is free");
    let last = spawn_waiter(&others, "deaf").await;
    proxy.refuse(false);
    until("it is back", || server.ask(&["PUBSUB", "CHANNELS"]).lines().count() == 3).await;
    guard.release().await.unwrap();
    await_served(SOON, waiting).await.release().await.unwrap();
    await_served(SOON, last).await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_of_another_type_is_rejected_and_affects_only_its_own_lock() {
    let server = RedisServer::start();
    let ours = client(&server.url()).await;
    server.ask(&["HSET", "lockset:typed", "a", "b"]);
    let error = ours.mutex("typed").unwrap().lock().await.unwrap_err();
    assert_error(&error, &["something that is not a lock (WRONGTYPE)"], false);
    let (hit, spared) = (lock(&ours, "hit").await, lock(&ours, "spared").await);
    server.ask(&["DEL", "lockset:hit"]);
    server.ask(&["HSET", "lockset:hit", "a", "b"]);
    assert_eq!(await_lost(BY_RENEWAL, &hit).await, LossReason::Forgotten);
    assert!(tokio::time::timeout(TTL, spared.lost()).await.is_err());
    let listed: Vec<_> = ours.list("").await.unwrap();
    assert_eq!(listed.len(), 1, "{listed:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rejected_login_says_what_to_check_and_shows_no_secrets() {
    let server = RedisServer::start_with(&["--requirepass", "right-secret"]);
    let with = |who: &str| format!("redis://{who}127.0.0.1:{}", server.port());
    let words = "check user, password and ACL rules";
    for who in ["", ":wrong-secret@", "nobody:wrong-secret@"] {
        let error = Lockset::connect(&with(who)).await.unwrap_err();
        assert_error(&error, &[words], false);
        let shown = format!("{error:?} {}", error_chain(&error));
        assert!(!shown.contains("-secret"), "{shown}");
    }
    let url = with(":right-secret@");
    let ours = client(&url).await;
    assert!(is_free(&ours, "refused").await);
    let builder = Lockset::builder(&url);
    let url = url.parse().unwrap();
    let options = lockset::engine::redis::RedisOptions { url, ..Default::default() };
    let engine = lockset::engine::redis::Redis::connect(options.clone()).await.unwrap();
    let shown = format!("{ours:?} {builder:?} {options:?} {engine:?}");
    assert!(!shown.contains("-secret"), "{shown}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_is_not_taken_for_a_master() {
    let (master, replica) = (RedisServer::start(), RedisServer::start());
    let ours = client(&replica.url()).await;
    replica.ask(&["REPLICAOF", "127.0.0.1", &master.port().to_string()]);
    let patience = Duration::from_millis(200);
    let error = ours.mutex("demoted").unwrap().lock_within(patience).await.unwrap_err();
    assert_error(&error, &["the server is a replica"], true);
    let error = Lockset::connect(&replica.url()).await.unwrap_err();
    assert_error(&error, &["the server is a replica"], true);
    replica.ask(&["REPLICAOF", "NO", "ONE"]);
    lock(&ours, "demoted").await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn without_memory_locks_can_be_renewed_and_released_but_not_acquired() {
    let server = RedisServer::start();
    let (ours, theirs) = (client(&server.url()).await, client(&server.url()).await);
    let guard = lock(&ours, "kept").await;
    let waiting = spawn_waiter(&theirs, "kept").await;
    server.ask(&["CONFIG", "SET", "maxmemory", "1"]);
    let error = ours.mutex("new").unwrap().try_lock().await.unwrap_err();
    assert_error(&error, &["out of memory"], true);
    assert!(tokio::time::timeout(TTL * 2, guard.lost()).await.is_err(), "it was renewed");
    guard.release().await.unwrap();
    await_served(SOON, waiting).await.release().await.unwrap();
    assert_eq!(server.ask(&["GET", "lockset:kept"]), "");
}

/// Of each kind one without waiters, with a client of its own: what a server does for one may
/// help the others in the same request.
#[tokio::test(flavor = "multi_thread")]
async fn without_memory_all_kinds_of_locks_and_queue_entries_are_renewed() {
    let server = RedisServer::start();
    let url = server.url();
    let (mutexes, readers, permits) = (client(&url).await, client(&url).await, client(&url).await);
    let (held, waits) = (client_with(LONG, &url).await, client(&url).await);
    let mutex = lock(&mutexes, "mutex").await;
    let reader = readers.rwlock("read").unwrap().read().await.unwrap();
    let permit = permits.semaphore("permits", 2).unwrap().acquire().await.unwrap();
    let awaited = lock(&held, "awaited").await;
    let waiting = spawn_waiter(&waits, "awaited").await;
    server.ask(&["CONFIG", "SET", "maxmemory", "1"]);
    tokio::time::sleep(TTL * 2).await;
    assert_eq!([&mutex, &reader, &permit].map(Guard::state), [State::Held; 3]);
    assert_eq!(held.inspect("awaited").await.unwrap().waiters.len(), 1, "its place is kept");
    awaited.release().await.unwrap();
    await_served(SOON, waiting).await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_evicted_lock_is_reported() {
    let server = RedisServer::start();
    let ours = client(&server.url()).await;
    let guard = lock(&ours, "evicted").await;
    let reader = ours.rwlock("read").unwrap().read().await.unwrap();
    server.ask(&["CONFIG", "SET", "maxmemory-policy", "allkeys-random"]);
    server.ask(&["CONFIG", "SET", "maxmemory", "1"]);
    until("all keys are evicted", || server.ask(&["DBSIZE"]) == "0").await;
    assert_eq!(await_lost(BY_RENEWAL, &guard).await, LossReason::Forgotten);
    assert_eq!(await_lost(BY_RENEWAL, &reader).await, LossReason::Forgotten);
    server.ask(&["CONFIG", "SET", "maxmemory", "0"]);
    assert!(lock(&ours, "evicted").await.token() > guard.token());
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_whose_key_was_deleted_are_reported_lost() {
    let server = RedisServer::start();
    let (ours, theirs) = (client(&server.url()).await, client(&server.url()).await);
    let reader = ours.rwlock("read").unwrap().read().await.unwrap();
    server.ask(&["DEL", "lockset:read"]);
    let writer = theirs.rwlock("read").unwrap().try_write().await.unwrap().expect("it is free");
    assert_eq!(await_lost(BY_RENEWAL, &reader).await, LossReason::Forgotten);
    writer.confirm().await.unwrap();
    let next = ours.rwlock("read").unwrap();
    writer.release().await.unwrap();
    assert!(next.try_write().await.unwrap().is_some(), "no reader is left");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_loading_server_is_waited_for() {
    let server = RedisServer::start();
    // While it loads it answers after every 2 MiB.
    let fill = "for n = 1, 400 do redis.call('SET', 'filling:' .. n, string.rep('x', 65536)) end";
    server.ask(&["EVAL", fill, "0"]);
    server.ask(&["CONFIG", "SET", "rdbcompression", "no"]);
    assert_eq!(server.ask(&["SAVE"]), "OK");
    server.restart_with(&["--key-load-delay", "5000"]);
    let ours = client(&server.url()).await;
    let error = ours.mutex("loading").unwrap().try_lock().await.unwrap_err();
    assert_error(&error, &["loading its data"], true);
    let waiting = ours.mutex("loading").unwrap();
    within(Duration::from_secs(10), "it is loaded", waiting.lock())
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
}

/// The second's grant is not in the snapshot, so the third is served as if it had never been. The
/// place of the second is over by then, or it would be granted the lock once more.
#[tokio::test(flavor = "multi_thread")]
async fn the_token_of_a_forgotten_grant_is_not_reused() {
    let server = RedisServer::start();
    let (first, second) = (client(&server.url()).await, client(&server.url()).await);
    let third = client(&server.url()).await;
    let held = lock(&first, "forgot").await;
    let (second, third) =
        (spawn_waiter(&second, "forgot").await, spawn_waiter(&third, "forgot").await);
    held.confirm().await.unwrap();
    assert_eq!(server.ask(&["SAVE"]), "OK");
    held.release().await.unwrap();
    let second = await_served(SOON, second).await;
    server.restart();
    let third = await_served(TTL * 2 + SOON, third).await;
    assert!(third.token() > second.token(), "{} after {}", third.token(), second.token());
}

/// A fixed lease is only looked up, and may be longer than a fence lives.
#[tokio::test(flavor = "multi_thread")]
async fn a_fixed_lock_survives_the_loss_of_its_fence() {
    let server = RedisServer::start();
    let ours = client(&server.url()).await;
    let mutex = ours.mutex("fixed").unwrap().with(LockOptions::default().no_renewal());
    let guard = within(SOON, "a free lock", mutex.lock()).await.unwrap();
    assert_eq!(server.ask(&["DEL", "{lockset:fixed}:fence"]), "1");
    guard.confirm().await.unwrap();
    assert!(tokio::time::timeout(TTL / 2, guard.lost()).await.is_err(), "it was looked up");
    guard.release().await.unwrap();
    assert!(is_free(&ours, "fixed").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn foreign_locks_exclude_ours_until_they_end() {
    let server = RedisServer::start();
    let (ours, theirs) = (client(&server.url()).await, client(&server.url()).await);
    let take = |more: &[&str]| server.ask(&[&["SET", "lockset:foreign", "x", "NX"], more].concat());
    assert_eq!(take(&["PX", "1500"]), "OK");
    assert!(!is_free(&ours, "foreign").await);
    let guard =
        await_served(Duration::from_millis(1500) + SOON, spawn_waiter(&ours, "foreign").await)
            .await;
    assert_eq!(take(&["PX", "1500"]), "", "ours excludes theirs");
    guard.release().await.unwrap();
    assert_eq!(take(&[]), "OK", "without an end");
    let mut waiting = spawn_waiter(&ours, "foreign").await;
    let behind = spawn_waiter(&theirs, "foreign").await;
    let before = executed(&server);
    assert!(tokio::time::timeout(TTL, &mut waiting).await.is_err(), "theirs excludes ours");
    let asked = executed(&server) - before;
    assert!(asked <= 16, "two waiters asked {asked} times in the time of 6 heartbeats each");
    server.ask(&["DEL", "lockset:foreign"]);
    await_served(BY_HEARTBEAT, waiting).await.release().await.unwrap();
    await_served(SOON, behind).await.release().await.unwrap();
    let reader = ours.rwlock("foreign").unwrap().read().await.unwrap();
    assert_eq!(take(&["PX", "1500"]), "", "readers exclude theirs");
    reader.release().await.unwrap();
    assert_eq!(take(&["PX", "1500"]), "OK");
}

/// How often scripts were run.
fn executed(server: &RedisServer) -> u64 {
    let calls = server.calls("evalsha");
    assert_ne!(calls, 0, "the server counts scripts");
    calls
}
