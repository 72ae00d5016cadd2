//! Hand-made locks on one Redis server. Each function plays the shortest schedule that breaks one.

use lockset_testkit::stage::RedisServer;
use lockset_torture::history::{Outcome, now};

use crate::play::Play;

/// Takes the lock as it is done right: one command, with an expiry and the owner.
fn take(play: &mut Play, server: &RedisServer, who: &str) {
    play.asks(who);
    let reply = play.redis(who, server, &format!("SET lock {who} NX PX 30000"));
    assert_eq!(reply, "OK", "{who} is the only client that asks");
}

/// Releases or renews as it is done right: by a script that checks the owner in the same step.
fn if_owned(play: &mut Play, server: &RedisServer, who: &str, what: &str, call: &str) -> String {
    let owned = "redis.call('GET',KEYS[1])==ARGV[1]";
    let script = format!("return(({owned})and(redis.call({call})))or(0)");
    let reply = play.send(who, server, &format!("EVAL {script} 1 lock {who}"));
    play.step(who, format!("EVAL \"if owned by {who}, {what}\" → {reply}"));
    reply
}

/// Two clients check before either of them writes.
pub fn check_then_set(play: &mut Play) {
    let server = RedisServer::start();
    for who in ["A", "B"] {
        play.asks(who);
        assert_eq!(play.redis(who, &server, "EXISTS lock"), "0");
    }
    for who in ["A", "B"] {
        play.redis(who, &server, &format!("SET lock {who}"));
        play.enters(who);
    }
    play.finishes("A");
    play.finishes("B");
}

/// `lock()` sends the command and returns true, also if the reply is nil.
pub fn always_true(play: &mut Play) {
    let server = RedisServer::start();
    take(play, &server, "A");
    play.enters("A");
    play.asks("B");
    assert_eq!(play.redis("B", &server, "SET lock B NX PX 30000"), "nil");
    play.step("B", "lock() returns true");
    play.enters("B");
    play.finishes("A");
    play.finishes("B");
}

/// A poll loop ends when the lock was taken or when the time is over, and does not say which.
pub fn timeout_is_success(play: &mut Play) {
    let server = RedisServer::start();
    take(play, &server, "A");
    play.enters("A");
    play.asks("B");
    for _ in 0..3 {
        assert_eq!(play.redis("B", &server, "SET lock B NX PX 30000"), "nil");
    }
    play.step("B", "the loop ends: no time left");
    play.enters("B");
    play.finishes("A");
    play.finishes("B");
}

/// A lock without an expiry belongs to its owner for ever, also to a dead one.
pub fn no_expiry(play: &mut Play) {
    let server = RedisServer::start();
    play.asks("A");
    assert_eq!(play.redis("A", &server, "SETNX lock A"), "1");
    play.enters("A");
    play.crashes("A");
    play.asks("B");
    assert_eq!(play.redis("B", &server, "SETNX lock B"), "0");
    never_again(play, &server);
}

/// The crash comes between the two commands.
pub fn expire_later(play: &mut Play) {
    let server = RedisServer::start();
    play.asks("A");
    assert_eq!(play.redis("A", &server, "SETNX lock A"), "1");
    play.crashes("A");
    play.step("A", "(EXPIRE lock 30 is never sent)");
    play.asks("B");
    assert_eq!(play.redis("B", &server, "SETNX lock B"), "0");
    assert_eq!(play.redis("B", &server, "TTL lock"), "-1");
    never_again(play, &server);
}

fn never_again(play: &mut Play, server: &RedisServer) {
    play.wait_for_progress();
    play.happens("two leases later");
    assert_eq!(play.redis("B", server, "SETNX lock B"), "0");
    play.fails("B", "held");
}

/// The old recipe: `SETNX lock <expiry>`, and `GETSET` if the expiry is over. B's clock is ten
/// seconds ahead of A's.
pub fn clock_in_value(play: &mut Play) {
    let server = RedisServer::start();
    play.happens("A's clock shows 1000, B's clock 1010; a lease is 5");
    play.asks("A");
    assert_eq!(play.redis("A", &server, "SETNX lock 1005"), "1");
    play.enters("A");
    play.asks("B");
    assert_eq!(play.redis("B", &server, "SETNX lock 1015"), "0");
    let expiry = play.redis("B", &server, "GET lock");
    assert!(expiry.parse::<u32>().unwrap() < 1010, "expired by B's clock");
    play.step("B", "1005 is over, by B's clock");
    assert_eq!(play.redis("B", &server, "GETSET lock 1015"), expiry, "no other client was faster");
    play.enters("B");
    play.finishes("A");
    play.finishes("B");
}

/// A's `DEL` comes after its lease, when the lock is B's.
pub fn delete_any(play: &mut Play) {
    let server = RedisServer::start();
    take(play, &server, "A");
    play.enters("A");
    play.finishes("A");
    deletes_the_next_lock(play, &server);
}

/// A asks whether the lock is its own; when it deletes the key, the answer is old.
pub fn look_then_delete(play: &mut Play) {
    let server = RedisServer::start();
    take(play, &server, "A");
    play.enters("A");
    play.finishes("A");
    assert_eq!(play.redis("A", &server, "GET lock"), "A");
    deletes_the_next_lock(play, &server);
}

/// A's `DEL` comes when the lock is B's, so C can take it while B is inside.
fn deletes_the_next_lock(play: &mut Play, server: &RedisServer) {
    play.lease_ends(server, "A");
    take(play, server, "B");
    play.enters("B");
    assert_eq!(play.redis("A", server, "DEL lock"), "1");
    take(play, server, "C");
    play.enters("C");
    play.finishes("B");
    play.finishes("C");
}

/// The script is right: it deletes the key only if it is A's. But A does not look at its reply.
pub fn silent_unlock(play: &mut Play) {
    let server = RedisServer::start();
    take(play, &server, "A");
    play.enters("A");
    play.lease_ends(&server, "A");
    let lease_end = now();
    play.step("A", "changes the data");
    assert_eq!(if_owned(play, &server, "A", "delete", "'DEL',KEYS[1]"), "0");
    play.step("A", "unlock() returns without an error");
    // An unlock that succeeds says that the lock was held until now.
    play.says("A", now(), "held", lease_end);
    play.exits("A");
    play.released("A", None);
}

/// Nothing extends the lease while A works.
pub fn no_renewal(play: &mut Play) {
    let server = RedisServer::start();
    take(play, &server, "A");
    play.enters("A");
    play.lease_ends(&server, "A");
    play.step("A", "still works");
    take(play, &server, "B");
    play.enters("B");
    play.finishes("A");
    play.finishes("B");
}

/// A's watchdog was stalled with the rest of A. Its renewal fails, and A goes on.
pub fn deaf_watchdog(play: &mut Play) {
    let server = RedisServer::start();
    take(play, &server, "A");
    play.enters("A");
    play.step("A", "is stalled, and its watchdog");
    play.lease_ends(&server, "A");
    take(play, &server, "B");
    play.enters("B");
    play.step("A", "goes on");
    assert_eq!(if_owned(play, &server, "A", "renew", "'PEXPIRE',KEYS[1],30000"), "0");
    play.step("A", "the watchdog logs a warning");
    play.finishes("A");
    play.finishes("B");
}

/// A's work has failed. Its watchdog is a thread of its own and renews as long as A lives.
pub fn orphaned_watchdog(play: &mut Play) {
    let server = RedisServer::start();
    take(play, &server, "A");
    play.enters("A");
    play.exits("A");
    play.step("A", "the work fails; no unlock");
    play.quiet();
    play.asks("B");
    while play.progress_limit().is_some_and(|limit| now() <= limit) {
        play.send("A", &server, "PEXPIRE lock 30000");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    play.redis("A", &server, "PEXPIRE lock 30000");
    assert_eq!(play.redis("B", &server, "SET lock B NX PX 30000"), "nil");
    play.happens("two leases later");
    play.redis("A", &server, "PEXPIRE lock 30000");
    assert_eq!(play.redis("B", &server, "SET lock B NX PX 30000"), "nil");
    play.fails("B", "held");
}

/// The watchdog renews every 30 s a lease of 30 s. Worse: it then renews B's lock.
pub fn late_watchdog(play: &mut Play) {
    let server = RedisServer::start();
    take(play, &server, "A");
    play.enters("A");
    play.lease_ends(&server, "A");
    take(play, &server, "B");
    play.enters("B");
    assert_eq!(play.redis("A", &server, "PEXPIRE lock 30000"), "1");
    play.step("A", "renewed, as it seems");
    play.finishes("A");
    play.finishes("B");
}

/// The lock is right. A even asks whether it still holds, and is paused after the reply.
pub fn no_fence(play: &mut Play) {
    let server = RedisServer::start();
    play.send("time", &server, "SET balance 100");
    take(play, &server, "A");
    play.enters("A");
    assert_eq!(play.redis("A", &server, "GET balance"), "100");
    assert_eq!(play.redis("A", &server, "GET lock"), "A");
    play.step("A", "is paused");
    play.lease_ends(&server, "A");
    take(play, &server, "B");
    play.enters("B");
    assert_eq!(play.redis("B", &server, "GET balance"), "100");
    play.redis("B", &server, "SET balance 150");
    play.writes("B", "+50", Outcome::Acknowledged);
    play.finishes("B");
    play.step("A", "goes on");
    play.redis("A", &server, "SET balance 90");
    play.writes("A", "-10", Outcome::Acknowledged);
    play.finishes("A");
    // The balance is 90.
    play.ends_with(&["-10"]);
}
