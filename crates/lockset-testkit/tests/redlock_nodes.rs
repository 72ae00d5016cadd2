//! A quorum of real Redis servers of which some end, freeze, forget, or tell the wrong time.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lockset::engine::{Engine, Renewal, Wait};
use lockset::{LockOptions, Lockset, LossReason, State, Token};
use lockset_testkit::contenders::Contenders;
use lockset_testkit::history::HoldInterval;
use lockset_testkit::log_capture::LogCapture;
use lockset_testkit::proxy::Proxy;
use lockset_testkit::stage::{ClockSkew, DURABLE, RedisServer, RedlockNodes};
use lockset_testkit::steps::{
    assert_error, await_lost, await_served, claim, client, lock, spawn_waiter, until, within,
};
use rustix::process::Signal;

const TTL: Duration = Duration::from_secs(3);
/// What a busy machine may take for anything.
const SOON: Duration = Duration::from_secs(10);
/// How long the last contender may wait for its turn.
const EACH_SERVED: Duration = Duration::from_secs(20);

fn five() -> RedlockNodes {
    RedlockNodes::start(5, DURABLE)
}

/// What these nodes have as the lock's value: the holder and its token.
fn holders(servers: &RedlockNodes, name: &str) -> Vec<String> {
    let key = format!("lockset:{name}");
    servers.nodes.iter().map(|node| node.ask(&["GET", &key])).collect()
}

fn all_hold(servers: &RedlockNodes, name: &str) -> bool {
    holders(servers, name).iter().all(|value| !value.is_empty())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_has_one_token_at_all_nodes_and_is_released_at_all() {
    let servers = five();
    let locks = client(&servers.url(), TTL).await;
    let guard = lock(&locks, "all").await;
    // It returned with a quorum; the others are adopted.
    until("all nodes hold it", || all_hold(&servers, "all"));
    let fences: Vec<_> =
        servers.nodes.iter().map(|node| node.ask(&["GET", "{lockset:all}:fence"])).collect();
    assert!(fences.iter().all(|fence| *fence == guard.token().to_string()), "{fences:?}");
    guard.release().await.unwrap();
    until("no node holds it", || holders(&servers, "all").iter().all(String::is_empty));
    for node in &servers.nodes {
        let ttl = node.ask(&["PTTL", "{lockset:all}:fence"]);
        assert_eq!(ttl, "-1", "the fence of a quorum must never be forgotten");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_of_five_nodes_may_fail() {
    let servers = five();
    let locks = client(&servers.url(), TTL).await;
    let kept = lock(&locks, "kept").await;
    servers.nodes[0].kill();
    servers.nodes[3].kill();
    for _ in 0..3 {
        let guard = lock(&locks, "after").await;
        guard.release().await.unwrap();
    }
    tokio::time::sleep(TTL + TTL / 2).await;
    assert_eq!(kept.state(), State::Held, "three of five renewed it");
    // Another client works without them, and queues at another entry node.
    let other = client(&servers.url(), TTL).await;
    let waiting = spawn_waiter(&other, "kept").await;
    let token = kept.token();
    kept.release().await.unwrap();
    assert!(await_served(SOON, waiting).await.token() > token);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_quorum_requests_fail_clearly_and_the_holder_loses() {
    let servers = five();
    let locks = client(&servers.url(), TTL).await;
    let guard = lock(&locks, "lost").await;
    servers.nodes[1..4].iter().for_each(RedisServer::kill);
    let reason = await_lost(TTL + SOON, &guard).await;
    assert!(matches!(reason, LossReason::Expired | LossReason::Forgotten), "{reason:?}");
    let error = locks.mutex("more").unwrap().try_lock().await.unwrap_err();
    assert_error(&error, &["of 5 nodes answered, 3 are needed"], true);
    let error = Lockset::connect(&servers.url()).await.unwrap_err();
    assert_error(&error, &["2 of 5 nodes answered, 3 are needed"], true);
}

#[tokio::test(flavor = "multi_thread")]
async fn frozen_nodes_delay_once_and_are_used_again_after_the_thaw() {
    let servers = five();
    let node_timeout = Duration::from_secs(1);
    let url = format!("{}?node_timeout=1s", servers.url());
    let locks = client(&url, TTL).await;
    lock(&locks, "warm").await.release().await.unwrap();
    // The entry node is among them.
    servers.signal(&[0, 2], Signal::STOP);
    let mutex = locks.mutex("cold").unwrap();
    let mut took = Vec::new();
    for _ in 0..20 {
        let began = Instant::now();
        let guard = within(SOON, "a lock", mutex.lock()).await.unwrap();
        took.push(began.elapsed());
        guard.release().await.unwrap();
    }
    let slower = |than: Duration| took.iter().filter(|took| **took > than).count();
    assert!(slower(node_timeout / 2) <= 2, "each frozen node costs its time once: {took:?}");
    assert!(slower(node_timeout * 3 / 2) <= 1, "and no more than its time: {took:?}");
    assert_eq!(slower(node_timeout * 3), 0, "{took:?}");
    let kept = lock(&locks, "kept").await;
    servers.signal(&[0, 2], Signal::CONT);
    // A renewal reacquires the lock there.
    until("all nodes hold it", || all_hold(&servers, "kept"));
    assert_eq!(kept.state(), State::Held);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quorum_that_was_silent_is_used_again_at_once() {
    let servers = five();
    let locks = client(&servers.url(), TTL * 5).await;
    let guard = lock(&locks, "silent").await;
    until("all nodes hold it", || all_hold(&servers, "silent"));
    servers.signal(&[2, 3, 4], Signal::STOP);
    let seen = locks.inspect("silent").await;
    assert!(matches!(&seen, Err(error) if error.is_retryable()), "three were silent: {seen:?}");
    servers.signal(&[2, 3, 4], Signal::CONT);
    let seen = locks.inspect("silent").await.expect("they answer");
    assert_eq!(seen.holders.len(), 1, "{seen:?}");
    guard.release().await.unwrap();
}

/// It is not the entry node, and a quorum has refused before it could reply.
#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_node_delays_only_the_first_of_many_attempts() {
    let servers = RedlockNodes::start(3, DURABLE);
    let node_timeout = Duration::from_secs(1);
    let url = format!("{}?node_timeout=1s", servers.url());
    let (ours, theirs) = (client(&url, TTL).await, client(&url, TTL).await);
    let held = lock(&theirs, "held").await;
    until("all nodes hold it", || all_hold(&servers, "held"));
    lock(&ours, "warm").await.release().await.unwrap();
    servers.signal(&[2], Signal::STOP);
    let (mutex, mut took) = (ours.mutex("held").unwrap(), Vec::new());
    for _ in 0..10 {
        let began = Instant::now();
        assert!(within(SOON, "an answer", mutex.try_lock()).await.unwrap().is_none());
        took.push(began.elapsed());
    }
    let slow = took.iter().filter(|took| **took > node_timeout / 2).count();
    assert!(slow <= 2, "{took:?}");
    // The other client has found out by its renewals.
    tokio::time::sleep(TTL).await;
    let began = Instant::now();
    held.set_note("a note").await.unwrap();
    assert!(began.elapsed() < node_timeout / 2, "{:?}", began.elapsed());
    servers.signal(&[2], Signal::CONT);
}

/// The lease of a late node must be kept although the caller's runtime does not run, or the lock
/// would have no more than a quorum.
#[tokio::test(flavor = "current_thread")]
async fn a_late_grant_is_kept_although_its_reply_is_not_awaited() {
    let servers = RedlockNodes::start(3, DURABLE);
    let locks = client(&servers.url(), TTL).await;
    lock(&locks, "warm").await.release().await.unwrap();
    servers.signal(&[2], Signal::STOP);
    let guard = lock(&locks, "kept").await;
    servers.signal(&[2], Signal::CONT);
    // The caller's runtime has only this thread, and it is blocked.
    std::thread::sleep(TTL * 2);
    assert!(all_hold(&servers, "kept"), "{:?}", holders(&servers, "kept"));
    servers.nodes[1].kill();
    std::thread::sleep(TTL * 2);
    assert_eq!(guard.state(), State::Held, "two of three have it");
}

/// Nodes that kept their fence grant one more than the token when the lock is reacquired.
#[tokio::test(flavor = "multi_thread")]
async fn a_lock_reacquired_at_a_node_shows_its_original_token() {
    let servers = RedlockNodes::start(3, DURABLE);
    let ttl = Duration::from_millis(1500);
    let locks = client(&servers.url(), ttl).await;
    let guard = lock(&locks, "kept").await;
    for node in &servers.nodes[1..] {
        until("all nodes hold it", || all_hold(&servers, "kept"));
        node.kill();
        tokio::time::sleep(ttl).await;
        node.restart();
    }
    until("all nodes hold it again", || all_hold(&servers, "kept"));
    let held = locks.inspect("kept").await.unwrap().holders;
    assert_eq!(held.iter().map(|holder| holder.token).collect::<Vec<_>>(), [Some(guard.token())]);
}

/// The entry node replies, but late: it is excluded until it is quick again, not asked every time.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_node_delays_only_occasionally() {
    let servers = Arc::new(five());
    let locks = client(&format!("{}?node_timeout=300ms", servers.url()), TTL).await;
    lock(&locks, "warm").await.release().await.unwrap();
    let slowed = Slowed::now(&servers, 0, Duration::from_millis(700));
    let mut took = Vec::new();
    for _ in 0..60 {
        let began = Instant::now();
        lock(&locks, "slow").await.release().await.unwrap();
        took.push(began.elapsed());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    drop(slowed);
    let often = took.iter().filter(|took| **took > Duration::from_millis(250)).count();
    assert!(often <= 3, "{often} of {} were slow: {took:?}", took.len());
    let _kept = lock(&locks, "kept").await;
    until("it is used again", || all_hold(&servers, "kept"));
}

/// A node that never replies quickly is excluded, but better than none.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_node_is_used_when_there_is_no_quorum_without_it() {
    let servers = Arc::new(RedlockNodes::start(3, DURABLE));
    let locks = client(&servers.url(), TTL).await;
    lock(&locks, "warm").await.release().await.unwrap();
    let noted = lock(&locks, "noted").await;
    let slowed = Slowed::now(&servers, 2, Duration::from_millis(600));
    // A change of a note waits for all nodes, until their timeout.
    for _ in 0..3 {
        noted.set_note("one is excluded").await.unwrap();
    }
    noted.release().await.unwrap();
    servers.signal(&[0], Signal::STOP);
    let two = locks.mutex("two").unwrap();
    within(SOON, "a lock of two", two.lock()).await.unwrap().release().await.unwrap();
    drop(slowed);
    servers.signal(&[0], Signal::CONT);
}

/// A node that stands still most of the time, until this is dropped.
struct Slowed {
    is_slow: Arc<AtomicBool>,
    slowing: Option<std::thread::JoinHandle<()>>,
}

impl Slowed {
    fn now(servers: &Arc<RedlockNodes>, node: usize, for_so_long: Duration) -> Self {
        let is_slow = Arc::new(AtomicBool::new(true));
        let (servers, on) = (servers.clone(), is_slow.clone());
        let slowing = std::thread::spawn(move || {
            while on.load(Ordering::Relaxed) {
                servers.signal(&[node], Signal::STOP);
                std::thread::sleep(for_so_long);
                servers.signal(&[node], Signal::CONT);
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        Self { is_slow, slowing: Some(slowing) }
    }
}

impl Drop for Slowed {
    fn drop(&mut self) {
        self.is_slow.store(false, Ordering::Relaxed);
        self.slowing.take().unwrap().join().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_the_same_server_as_another_is_not_counted() {
    let servers = RedlockNodes::start(3, DURABLE);
    let proxy = Proxy::before(servers.nodes[2].port());
    let locks = client(&servers.url_through(2, &proxy), TTL).await;
    let mutex = locks.mutex("one").unwrap();
    within(SOON, "a lock", mutex.lock()).await.unwrap().release().await.unwrap();
    let before = proxy.connections();
    proxy.set_server(servers.nodes[1].port());
    proxy.cut();
    until("it is connected again", || proxy.connections() > before);
    servers.nodes[0].kill();
    for _ in 0..5 {
        let granted = within(SOON, "an answer", mutex.try_lock()).await;
        assert!(granted.is_err(), "one server was counted twice: {granted:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_rejected_by_one_node_is_locked_at_the_others() {
    let servers = RedlockNodes::start(3, DURABLE);
    let url = format!("{}?node_timeout=3s", servers.url());
    let (ours, theirs) = (client(&url, TTL).await, client(&url, TTL).await);
    let quick = Duration::from_secs(2);
    let other_names_are_quick = async |locks: &Lockset| {
        within(quick, "another name", lock(locks, "good")).await.release().await.unwrap();
    };
    servers.nodes[0].ask(&["HSET", "lockset:bad", "a", "b"]);
    let guard = lock(&ours, "bad").await;
    let mutex = theirs.mutex("bad").unwrap();
    for _ in 0..3 {
        assert!(within(quick, "an answer", mutex.try_lock()).await.unwrap().is_none());
        other_names_are_quick(&theirs).await;
    }
    let waiting = tokio::spawn(async move { mutex.lock().await });
    tokio::time::sleep(TTL / 3).await;
    guard.release().await.unwrap();
    await_served(SOON, waiting).await.release().await.unwrap();
    other_names_are_quick(&ours).await;

    servers.nodes[1].ask(&["HSET", "lockset:bad", "a", "b"]);
    let refused = within(SOON, "an answer", ours.mutex("bad").unwrap().lock()).await;
    assert_error(&refused.unwrap_err(), &["something that is not a lock (WRONGTYPE)"], false);
    other_names_are_quick(&ours).await;
}

/// The next claim asks there first.
#[tokio::test(flavor = "multi_thread")]
async fn a_released_lock_is_free_at_the_entry_node() {
    let servers = RedlockNodes::start(3, DURABLE);
    let proxy = Proxy::before(servers.nodes[0].port());
    let url = format!("{}?node_timeout=2s", servers.url_through(0, &proxy));
    let ours = client(&url, TTL).await;
    let theirs = client(&servers.url(), TTL).await;
    let guard = lock(&ours, "entry").await;
    until("all nodes hold it", || all_hold(&servers, "entry"));
    proxy.hold_requests();
    let handed_over = async {
        guard.release().await.unwrap();
        theirs.mutex("entry").unwrap().try_lock().await.unwrap()
    };
    let late = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        proxy.release_requests();
    };
    let (next, ()) = tokio::join!(handed_over, late);
    assert!(next.is_some(), "it was released, and is not free");
}

#[tokio::test(flavor = "multi_thread")]
async fn waiters_are_served_although_the_entry_node_freezes() {
    let servers = five();
    let (ours, theirs) = (client(&servers.url(), TTL).await, client(&servers.url(), TTL).await);
    let guard = lock(&ours, "entry").await;
    let waiting = spawn_waiter(&theirs, "entry").await;
    servers.signal(&[0], Signal::STOP);
    guard.release().await.unwrap();
    await_served(SOON, waiting).await.release().await.unwrap();
    servers.signal(&[0], Signal::CONT);
    until("nothing is left", || holders(&servers, "entry").iter().all(String::is_empty));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stuck_key_at_the_entry_node_delays_only_briefly() {
    let servers = five();
    let locks = client(&servers.url(), Duration::from_secs(1)).await;
    assert_eq!(servers.nodes[0].ask(&["SET", "lockset:stuck", "somebody"]), "OK");
    let guard = within(SOON, "a lock", locks.mutex("stuck").unwrap().lock()).await.unwrap();
    guard.release().await.unwrap();
    assert_eq!(servers.nodes[0].ask(&["GET", "lockset:stuck"]), "somebody", "it is not ours");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_lost_its_data_is_not_counted_until_its_leases_have_ended() {
    let servers = RedlockNodes::start(3, &[]);
    let url = format!("{}?max_ttl=4s", servers.url());
    let error = Lockset::connect(&url).await.unwrap_err();
    assert_error(&error, &["started lately"], true);
    until("they have rested", || {
        let up = |node: &RedisServer| node.info(&["INFO", "server"], "uptime_in_seconds");
        servers.nodes.iter().all(|node| up(node).unwrap().parse::<u64>().unwrap() >= 4)
    });
    let (ours, theirs) = (client(&url, TTL).await, client(&url, TTL).await);
    let guard = lock(&ours, "held").await;
    until("all hold it", || all_hold(&servers, "held"));
    // Two of three forget, one after the other. Were they counted at once, they could be a quorum.
    servers.nodes[0].restart();
    servers.nodes[1].restart();
    let try_it = theirs.mutex("held").unwrap();
    let began = Instant::now();
    while guard.state() != State::Lost(LossReason::Expired) {
        if let Ok(Some(second)) = try_it.try_lock().await {
            let (first, second) = (guard.state(), second.state());
            assert!(matches!(first, State::Lost(_)), "two hold: {first:?} and {second:?}");
            break;
        }
        if matches!(guard.state(), State::Lost(_)) {
            break;
        }
        assert!(began.elapsed() < SOON, "the holder must lose it: it has no quorum");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let token = guard.token();
    let next = within(SOON, "a lock", theirs.mutex("held").unwrap().lock()).await.unwrap();
    assert!(next.token() > token);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_survives_nodes_restarting_one_by_one() {
    let servers = RedlockNodes::start(3, &[]);
    let url = format!("{}?max_ttl=2s", servers.url());
    let began = Instant::now();
    let locks = loop {
        match Lockset::builder(&url).ttl(Duration::from_millis(1500)).connect().await {
            Ok(locks) => break locks,
            Err(error) => assert_error(&error, &["started lately"], true),
        }
        assert!(began.elapsed() < SOON);
    };
    let guard = lock(&locks, "kept").await;
    for node in &servers.nodes {
        until("all hold it", || all_hold(&servers, "kept"));
        node.restart();
        assert_eq!(node.ask(&["EXISTS", "lockset:kept"]), "0", "it has forgotten");
    }
    until("all hold it again", || all_hold(&servers, "kept"));
    assert_eq!(guard.state(), State::Held);
    let values = holders(&servers, "kept");
    let token = format!(":{}:", guard.token());
    let fence = |node: &RedisServer| node.ask(&["GET", "{lockset:kept}:fence"]);
    for (node, value) in servers.nodes.iter().zip(values) {
        let same = value.contains(&token) || fence(node) == guard.token().to_string();
        assert!(same, "reacquired by the token itself: {value}, not {token}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_clock_may_jump_either_way() {
    let far = TTL.as_millis() as i64 * 2;
    for jump in [far, -far] {
        let skew = ClockSkew::new();
        let mut nodes: Vec<_> = (0..4).map(|_| RedisServer::start_with(DURABLE)).collect();
        // The clock of the entry node is wrong.
        nodes.insert(0, RedisServer::start_skewed(&skew, DURABLE));
        let servers = RedlockNodes { nodes };
        let (ours, theirs) = (client(&servers.url(), TTL).await, client(&servers.url(), TTL).await);
        let guard = lock(&ours, "jump").await;
        until("all nodes hold it", || all_hold(&servers, "jump"));
        assert!(ahead(&servers).abs() < 1000, "all clocks are right so far");
        skew.set(jump);
        let off = ahead(&servers) - jump;
        assert!(off.abs() < 1000, "it jumped by {jump} ms, and {off} ms more");
        let began = Instant::now();
        let mutex = theirs.mutex("jump").unwrap();
        while began.elapsed() < TTL {
            let second = mutex.try_lock().await.unwrap();
            assert!(second.is_none(), "one clock of five is not a quorum");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert_eq!(guard.state(), State::Held);
        let token = guard.token();
        guard.release().await.unwrap();
        let next = within(SOON, "a lock", mutex.lock()).await.unwrap();
        assert!(next.token() > token);
    }
}

/// How many milliseconds the clock of the first node is ahead of the second's.
fn ahead(servers: &RedlockNodes) -> i64 {
    let millis = |node: &RedisServer| {
        let time = node.ask(&["TIME"]);
        let parts: Vec<i64> = time.lines().map(|part| part.parse().unwrap()).collect();
        parts[0] * 1000 + parts[1] / 1000
    };
    millis(&servers.nodes[0]) - millis(&servers.nodes[1])
}

/// A resource that refuses a token lower than the greatest it has seen.
#[derive(Default)]
struct Register(Mutex<(Option<Token>, String)>);

impl Register {
    fn write(&self, token: Token, text: &str) -> bool {
        let mut register = self.0.lock().unwrap();
        let fresh = register.0.is_none_or(|greatest| token >= greatest);
        if fresh {
            *register = (Some(token), text.to_owned());
        }
        fresh
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_write_of_a_paused_client_is_rejected_by_its_token() {
    let servers = five();
    let paused = servers.engine().await;
    let claim = claim("paused", Duration::from_secs(1));
    // No keeper renews it: to the servers that is a client that stopped.
    let stale = paused.acquire(&claim, Wait::No).await.unwrap().granted().unwrap();
    let locks = client(&servers.url(), TTL).await;
    let newer = within(SOON, "the lock", locks.mutex("paused").unwrap().lock()).await.unwrap();
    let register = Register::default();
    assert!(register.write(newer.token(), "newer"));
    assert!(!register.write(stale.token, "stale"), "{} and {}", stale.token, newer.token());
    assert_eq!(register.0.lock().unwrap().1, "newer");
    let renewed = paused.renew(&[(&claim, &stale)]).await.remove(0);
    assert!(!matches!(renewed, Ok(Renewal::Renewed(_))), "{renewed:?}");
    assert_eq!(newer.state(), State::Held);
}

/// Each contender is a client of its own: those of one client would queue at their gate.
#[tokio::test(flavor = "multi_thread")]
async fn two_ten_and_fifty_contenders_are_all_served() {
    let servers = RedlockNodes::start(3, DURABLE);
    for count in [2, 10, 50] {
        let mut all = Vec::new();
        for _ in 0..count {
            all.push(client(&servers.url(), TTL).await);
        }
        let began = Instant::now();
        let contenders = Contenders::start(&all, 1, &["wanted"]);
        contenders.wait_each_served(1, EACH_SERVED).await;
        contenders.wait_served(40, EACH_SERVED).await;
        let intervals = contenders.stop_and_check().await;
        let a_second = intervals.len() as f64 / began.elapsed().as_secs_f64();
        let longest = longest_wait(&intervals);
        println!("{count} clients: {a_second:.0} grants a second, the longest wait {longest:?}");
        assert!(longest < EACH_SERVED, "somebody waited for {longest:?}");
    }
}

/// From one end to the next beginning, whatever was tried in between.
fn longest_wait(intervals: &[HoldInterval]) -> Duration {
    let began = intervals.iter().map(|interval| interval.asked).min().unwrap();
    let mut free_since = HashMap::new();
    let mut longest = Duration::ZERO;
    // Those of one contender are in order.
    for interval in intervals {
        let since = free_since.insert(&interval.client, interval.until).unwrap_or(began);
        longest = longest.max(interval.enter.saturating_duration_since(since));
    }
    longest
}

#[tokio::test(flavor = "multi_thread")]
async fn contenders_are_served_while_nodes_stop_and_return() {
    let servers = five();
    let mut all = Vec::new();
    for _ in 0..4 {
        all.push(client(&servers.url(), TTL).await);
    }
    let contenders = Contenders::start(&all, 3, &["one", "two"]);
    for node in [0, 4, 2] {
        contenders.wait_served(20, Duration::from_secs(60)).await;
        servers.signal(&[node], Signal::STOP);
        contenders.wait_served(20, Duration::from_secs(60)).await;
        servers.signal(&[node], Signal::CONT);
        contenders.wait_served(5, Duration::from_secs(60)).await;
        servers.nodes[node].restart();
    }
    contenders.stop_and_check().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ticket_carries_the_grants_of_all_nodes() {
    let servers = five();
    let (ours, theirs) = (client(&servers.url(), TTL).await, client(&servers.url(), TTL).await);
    let options = LockOptions::default().detachable();
    let guard = ours.mutex("ticket").unwrap().with(options).lock().await.unwrap();
    until("all nodes hold it", || all_hold(&servers, "ticket"));
    let ticket = guard.detach().await.unwrap();
    let attached = theirs.attach(&ticket).await.unwrap();
    tokio::time::sleep(TTL).await;
    assert_eq!(attached.state(), State::Held);
    attached.release().await.unwrap();
    until("no node holds it", || holders(&servers, "ticket").iter().all(String::is_empty));
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_quorums_are_refused() {
    let servers = RedlockNodes::start(3, DURABLE);
    let host = |node: usize| format!("127.0.0.1:{}", servers.nodes[node].port());
    let refused = async |url: String| Lockset::connect(&url).await.unwrap_err();
    let error = refused(format!("redlock://{}", host(0))).await;
    assert_error(&error, &["at least three nodes"], false);
    let error = refused(format!("redlock://{},{},{}", host(0), host(1), host(0))).await;
    assert_error(&error, &["named twice"], false);
    let alias = format!("localhost:{}", servers.nodes[0].port());
    let error = refused(format!("redlock://{},{},{alias}", host(0), host(1))).await;
    assert_error(&error, &["the same server"], false);
    let error = refused(format!("{}?max_ttl=soon", servers.url())).await;
    assert_error(&error, &["such as 500ms"], false);
    let error = refused(format!("{}?replicas=1", servers.url())).await;
    assert_error(&error, &["node_timeout"], false);

    let locks = Lockset::connect(&format!("{}?max_ttl=40s", servers.url())).await.unwrap();
    let long = LockOptions::default().ttl(Duration::from_secs(41));
    let error = locks.mutex("long").unwrap().with(long).lock().await.unwrap_err();
    assert_error(&error, &["at most 40s"], false);
    let error = locks.rwlock("shared").unwrap().read().await.unwrap_err();
    assert_error(&error, &["does not support readers"], false);
    let error = locks.semaphore("permits", 2).unwrap().acquire().await.unwrap_err();
    assert_error(&error, &["does not support semaphores"], false);
}

#[test]
fn unsafe_server_settings_are_warned_of() {
    let risky = ["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"];
    let mut servers = RedlockNodes::start(3, DURABLE);
    servers.nodes.push(RedisServer::start_with(&[DURABLE, &risky].concat()));
    let said = LogCapture::default();
    let writer = said.clone();
    let subscriber =
        tracing_subscriber::fmt().with_writer(move || writer.clone()).with_ansi(false).finish();
    // On one thread, because the subscriber is that of the thread.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tracing::subscriber::with_default(subscriber, || {
        runtime.block_on(async {
            servers.engine().await.check().await.unwrap();
        });
    });
    let said = said.text();
    assert!(said.contains("even number"), "{said}");
    assert!(said.contains("allkeys-lru"), "{said}");
    assert_eq!(said.matches("WARN").count(), 2, "nothing else is wrong: {said}");
}

/// Connects, takes a lock, gives it back and ends: what every `lockset run` does.
async fn used_by_a_fresh_client(servers: &RedlockNodes) -> Duration {
    let began = Instant::now();
    let locks = client(&servers.url(), TTL).await;
    assert!(locks.mutex("tried").unwrap().try_lock().await.unwrap().is_some());
    let within = locks.mutex("within").unwrap().lock_within(SOON).await.unwrap();
    within.release().await.unwrap();
    locks.close().await.unwrap();
    began.elapsed()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fresh_client_does_not_wait_for_frozen_nodes() {
    let servers = five();
    for frozen in [[0, 1], [3, 4], [1, 3]] {
        servers.signal(&frozen, Signal::STOP);
        let mut took = Vec::new();
        for _ in 0..3 {
            took.push(used_by_a_fresh_client(&servers).await);
        }
        servers.signal(&frozen, Signal::CONT);
        println!("{frozen:?} frozen: {took:.0?}");
        assert!(took.iter().min().unwrap() < &Duration::from_secs(1), "{frozen:?}: {took:?}");
    }
}

/// A rejected login is reported at once, not after the timeout of a silent node.
#[tokio::test(flavor = "multi_thread")]
async fn a_rejected_login_is_reported_at_once() {
    let servers = RedlockNodes::start(3, &["--requirepass", "hunter2"]);
    let began = Instant::now();
    let error = Lockset::connect(&servers.url()).await.unwrap_err();
    assert_error(&error, &["refuses this user"], false);
    assert!(began.elapsed() < SOON / 5, "{:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_wait_of_the_first_minute_is_explained() {
    let servers = RedlockNodes::start(3, &[]);
    let error = Lockset::connect(&servers.url()).await.unwrap_err();
    let port = servers.nodes[1].port();
    let said = error.to_string();
    for words in [
        "0 of 3 nodes answered, 2 are needed",
        &format!("127.0.0.1:{port} for "),
        "appendfsync always",
        "max_ttl=",
    ] {
        assert!(said.contains(words), "{words:?} is not in {said:?}");
    }
    let seconds = said.split(&format!("127.0.0.1:{port} for ")).nth(1).unwrap();
    let seconds: u64 = seconds.split(' ').next().unwrap().parse().unwrap();
    assert!((50..=61).contains(&seconds), "{said}");
    assert!(error.is_retryable() && !said.contains("RESTS"), "{said}");
    // With a shorter max_ttl it takes no longer than that.
    let short = format!("{}?max_ttl=2s", servers.url());
    tokio::time::sleep(Duration::from_secs(3)).await;
    let locks = Lockset::builder(&short).ttl(Duration::from_secs(1)).connect().await.unwrap();
    lock(&locks, "counted").await.release().await.unwrap();
}
