//! The schedules of the hand-made locks, played by Lockset.

use std::time::Duration;

use lockset::Token;
use lockset::fence::{FencingToken, MemoryFence};
use lockset_testkit::stage::{ClockSkew, DURABLE, RedisServer, RedlockNodes, ZooKeeperServers};
use lockset_torture::history::Outcome;

use crate::lockset_client::LocksetClient;
use crate::lockset_client::Renewal::{Once, Renewed};
use crate::play::{LOCK, Play};
use crate::several_servers::Replicated;

/// Long enough for a busy machine.
const LEASE: Duration = Duration::from_millis(1500);
/// For schedules in which a lease has to end.
const SHORT: Duration = Duration::from_millis(400);
/// How long a client waits that must be granted the lock in the end.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long a client waits that is refused.
const NO_PATIENCE: Duration = Duration::from_millis(200);
/// What a busy machine may need beyond two leases.
const RECOVERY: Duration = Duration::from_secs(5);

/// Two clients ask at the same time: one waits.
pub fn contend(play: &mut Play) {
    let server = RedisServer::start();
    let [mut a, mut b] = ["A", "B"].map(|who| LocksetClient::start(who, &server.url()));
    assert!(a.lock(play, (LEASE, Renewed), PATIENCE));
    assert!(!b.lock(play, (LEASE, Renewed), NO_PATIENCE));
    assert!(a.release(play));
    assert!(b.lock(play, (LEASE, Renewed), PATIENCE));
    assert!(b.release(play));
}

/// A timeout is an error.
pub fn wait_in_vain(play: &mut Play) {
    let server = RedisServer::start();
    let [mut a, mut b] = ["A", "B"].map(|who| LocksetClient::start(who, &server.url()));
    assert!(a.lock(play, (LEASE, Renewed), PATIENCE));
    assert!(!b.lock(play, (LEASE, Renewed), NO_PATIENCE));
    assert!(a.release(play));
}

/// The lease of a dead client ends.
pub fn crash(play: &mut Play) {
    let server = RedisServer::start();
    play.set_ttl(SHORT, RECOVERY);
    let [mut a, mut b] = ["A", "B"].map(|who| LocksetClient::start(who, &server.url()));
    assert!(a.lock(play, (SHORT, Renewed), PATIENCE));
    a.kill(play);
    assert!(b.lock(play, (LEASE, Renewed), PATIENCE));
    assert!(b.release(play));
    play.wait_for_progress();
}

/// No client compares its wall clock with anything.
pub fn skewed_clock(play: &mut Play) {
    let (server, skew) = (RedisServer::start(), ClockSkew::new());
    skew.set(10_000);
    let mut a = LocksetClient::start("A", &server.url());
    let mut b = LocksetClient::start_with("B", &server.url(), &skew.environment());
    play.happens("B's clock is 10 s ahead");
    assert!(a.lock(play, (LEASE, Renewed), PATIENCE));
    assert!(!b.lock(play, (LEASE, Renewed), NO_PATIENCE));
    assert!(a.release(play));
    assert!(b.lock(play, (LEASE, Renewed), PATIENCE));
    assert!(b.release(play));
}

/// A release after the lease touches nothing, and says so.
pub fn late_release(play: &mut Play) {
    let server = RedisServer::start();
    let [mut a, mut b, mut c] = ["A", "B", "C"].map(|who| LocksetClient::start(who, &server.url()));
    assert!(a.lock(play, (SHORT, Once), PATIENCE));
    play.happens("the lease of A ends");
    assert!(b.lock(play, (LEASE, Renewed), PATIENCE));
    assert!(!a.release(play), "A is told");
    assert!(!c.lock(play, (LEASE, Renewed), NO_PATIENCE), "B's lock is still there");
    assert!(b.release(play));
}

/// The lease is renewed while A works.
pub fn long_work(play: &mut Play) {
    let server = RedisServer::start();
    let [mut a, mut b] = ["A", "B"].map(|who| LocksetClient::start(who, &server.url()));
    assert!(a.lock(play, (LEASE, Renewed), PATIENCE));
    play.happens("A works for two leases");
    assert!(!b.lock(play, (LEASE, Renewed), 2 * LEASE));
    assert_eq!(a.state(play), "held");
    assert!(a.release(play));
    assert!(b.lock(play, (LEASE, Renewed), PATIENCE));
    assert!(b.release(play));
}

/// A guard knows its deadline without asking the server.
pub fn stall(play: &mut Play) {
    let server = RedisServer::start();
    let [mut a, mut b] = ["A", "B"].map(|who| LocksetClient::start(who, &server.url()));
    assert!(a.lock(play, (LEASE, Renewed), PATIENCE));
    a.stop(play);
    play.happens("the lease of A ends");
    assert!(b.lock(play, (LEASE, Renewed), PATIENCE));
    a.resume(play);
    assert_eq!(a.state(play), "lost");
    assert!(!a.release(play), "A is told");
    assert!(b.release(play));
}

/// A guard that is dropped is released, and its renewal ends with it.
pub fn failing_work(play: &mut Play) {
    let server = RedisServer::start();
    play.set_ttl(LEASE, RECOVERY);
    let [mut a, mut b] = ["A", "B"].map(|who| LocksetClient::start(who, &server.url()));
    assert!(a.lock(play, (LEASE, Renewed), PATIENCE));
    a.panic(play);
    play.quiet();
    assert!(b.lock(play, (LEASE, Renewed), PATIENCE));
    assert!(b.release(play));
    play.wait_for_progress();
}

/// With `replicas=1` a grant counts when a replica has it.
pub fn failover(play: &mut Play) {
    let servers = Replicated::start();
    let url = format!("{}?replicas=1", servers.master.url());
    let mut a = LocksetClient::start("A", &url);
    servers.cut();
    assert!(!a.lock(play, (LEASE, Renewed), PATIENCE), "no replica confirms it");
    servers.promote();
    play.happens("the master dies; the replica is promoted");
    let mut b = LocksetClient::start("B", &servers.replica.url());
    assert!(b.lock(play, (LEASE, Renewed), PATIENCE));
    assert!(b.release(play));
}

/// The deadline is counted from before the request, on a clock that does not jump.
pub fn quorum_with_skewed_clock(play: &mut Play) {
    let (nodes, skew) = (RedlockNodes::start(3, DURABLE), ClockSkew::new());
    let mut a = LocksetClient::start_with("A", &nodes.url(), &skew.environment());
    let mut b = LocksetClient::start("B", &nodes.url());
    assert!(a.lock(play, (LEASE, Once), PATIENCE));
    skew.set(-10_000);
    play.step("A", "its clock is set back by 10 s");
    play.happens("the lease of A ends on all nodes");
    assert!(b.lock(play, (LEASE, Renewed), PATIENCE));
    assert_eq!(a.state(play), "lost");
    assert!(!a.release(play), "A is told");
    assert!(b.release(play));
}

/// A node belongs to the session that created it.
pub fn session(play: &mut Play) {
    let servers = ZooKeeperServers::start(1);
    let url = format!("{}?ttl=4s", servers.url("wrong-ways"));
    let lease = (Duration::from_secs(4), Renewed);
    let mut first = LocksetClient::start("A", &url);
    assert!(first.lock(play, lease, PATIENCE));
    first.kill_and_restart(play);
    let mut second = LocksetClient::start("A", &url);
    assert!(!second.lock(play, lease, NO_PATIENCE), "the node of the old session is not its own");
    play.happens("session 1 expires");
    let mut b = LocksetClient::start("B", &url);
    assert!(b.lock(play, lease, PATIENCE));
    assert!(!second.lock(play, lease, NO_PATIENCE));
    assert!(b.release(play));
}

/// The data remembers the greatest token it has seen.
pub fn fence(play: &mut Play) {
    let server = RedisServer::start();
    let [mut a, mut b] = ["A", "B"].map(|who| LocksetClient::start(who, &server.url()));
    let (balance, name) = (MemoryFence::new(), LOCK.parse().unwrap());
    let write = |play: &mut Play, who: &str, token: u64, value: &str| {
        let token = FencingToken::new(LOCK, Token::new(token)).unwrap();
        let is_written = balance.write(&name, &name, &token, || ()).is_ok();
        let outcome = if is_written { Outcome::Acknowledged } else { Outcome::Rejected };
        play.writes(who, value, outcome);
        let reply = if is_written { "written" } else { "rejected" };
        play.step(who, format!("writes {value} with its token → {reply}"));
        is_written
    };
    assert!(a.lock(play, (LEASE, Renewed), PATIENCE));
    let token_a = play.last_token();
    assert_eq!(a.state(play), "held");
    a.stop(play);
    play.happens("the lease of A ends");
    assert!(b.lock(play, (LEASE, Renewed), PATIENCE));
    let token_b = play.last_token();
    assert!(write(play, "B", token_b, "+50"));
    assert!(b.release(play));
    a.resume(play);
    assert!(!write(play, "A", token_a, "-10"), "the greater token was seen");
    play.ends_with(&["+50"]);
}
