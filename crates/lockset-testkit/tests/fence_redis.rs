//! The laws of a fence on keys of Redis, and what a server and a caller can do wrong.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::Duration;

use async_trait::async_trait;
use lockset::fence::{
    FenceError, FenceMark, FenceStore, FencingToken, RedisFence, RedisFenceStore,
};
use lockset::{Name, Token};
use lockset_testkit::fence_laws::FencedRegister;
use lockset_testkit::fence_suite;
use lockset_testkit::stage::{RedisCluster, RedisServer};
use lockset_testkit::steps::until;
use redis::aio::MultiplexedConnection;

const DURABLE: &[&str] = &["--appendonly", "yes", "--appendfsync", "always"];

struct Keys {
    server: RedisServer,
    connection: tokio::sync::Mutex<MultiplexedConnection>,
    store: RedisFenceStore,
}

impl Keys {
    async fn start() -> Self {
        let server = RedisServer::start_with(DURABLE);
        let connection = connect(&server).await.into();
        let store = RedisFenceStore::connect(&server.url()).await.unwrap();
        Self { server, connection, store }
    }
}

async fn connect(server: &RedisServer) -> MultiplexedConnection {
    let client = redis::Client::open(server.url()).unwrap();
    client.get_multiplexed_async_connection().await.unwrap()
}

fn data_key(resource: &Name) -> String {
    format!("data:{resource}")
}

#[async_trait]
impl FencedRegister for Keys {
    async fn write(
        &self,
        resource: &Name,
        lock: &Name,
        token: &FencingToken,
        value: &str,
    ) -> Result<(), FenceError> {
        let mut connection = self.connection.lock().await.clone();
        let fence = RedisFence::new(resource.clone())?;
        fence.set(&mut connection, lock.clone(), token, data_key(resource), value).await
    }

    async fn read(&self, resource: &Name) -> Option<String> {
        let mut connection = self.connection.lock().await.clone();
        redis::cmd("GET").arg(data_key(resource)).query_async(&mut connection).await.unwrap()
    }

    async fn marks(&self) -> Result<Vec<FenceMark>, FenceError> {
        self.store.marks().await
    }

    async fn restart(&self) {
        self.server.restart();
        // It accepts connections before it has read its data, and rejects commands meanwhile.
        until("the data is loaded", || self.server.ask(&["PING"]) == "PONG");
        *self.connection.lock().await = connect(&self.server).await;
    }

    async fn stop(&self) {
        self.server.kill();
    }
}

mod scripts {
    use super::*;
    fence_suite!(Keys::start());
}

/// The store with its own connection, which guards a register that is not in Redis.
struct Marks(Keys);

#[async_trait]
impl FencedRegister for Marks {
    /// The check and the write are two steps, so writers take turns.
    async fn write(
        &self,
        resource: &Name,
        lock: &Name,
        token: &FencingToken,
        value: &str,
    ) -> Result<(), FenceError> {
        let mut connection = self.0.connection.lock().await;
        self.0.store.admit(resource, lock, token).await?;
        let mut set = redis::cmd("SET");
        set.arg(data_key(resource)).arg(value).exec_async(&mut *connection).await.unwrap();
        Ok(())
    }

    async fn read(&self, resource: &Name) -> Option<String> {
        self.0.read(resource).await
    }

    async fn marks(&self) -> Result<Vec<FenceMark>, FenceError> {
        self.0.marks().await
    }

    async fn restart(&self) {
        self.0.restart().await;
    }

    async fn stop(&self) {
        self.0.stop().await;
    }
}

mod store {
    use super::*;
    fence_suite!(async { Marks(Keys::start().await) });
}

fn token(value: u64) -> FencingToken {
    FencingToken::new("orders", Token::new(value)).unwrap()
}

fn text(error: &FenceError) -> String {
    assert!(matches!(error, FenceError::Store { .. }), "{error:?}");
    error.to_string()
}

#[tokio::test]
async fn every_command_is_guarded() {
    let server = RedisServer::start();
    let redis = &mut connect(&server).await;
    let fence = RedisFence::new("stock").unwrap();
    fence.set(redis, "orders", token(5), "apples", 17).await.unwrap();
    assert_eq!(server.ask(&["GET", "apples"]), "17");
    let fields = [("red", 1), ("green", 2)];
    assert_eq!(fence.hset(redis, "orders", token(6), "pears", &fields).await.unwrap(), 2);
    assert_eq!(fence.hset(redis, "orders", token(6), "pears", &[("red", 3)]).await.unwrap(), 0);
    assert_eq!(server.ask(&["HMGET", "pears", "red", "green"]), "3\n2");

    assert!(fence.set(redis, "orders", token(5), "apples", 0).await.unwrap_err().is_stale());
    let late = fence.hset(redis, "orders", token(5), "pears", &fields).await;
    assert!(late.unwrap_err().is_stale());
    assert!(fence.del(redis, "orders", token(5), "apples").await.unwrap_err().is_stale());
    assert_eq!(server.ask(&["GET", "apples"]), "17");
    assert_eq!(server.ask(&["HGET", "pears", "red"]), "3");

    assert!(fence.del(redis, "orders", token(7), "apples").await.unwrap());
    assert!(!fence.del(redis, "orders", token(7), "apples").await.unwrap());
    assert!(fence.set(redis, "orders", token(6), "apples", 0).await.unwrap_err().is_stale());
    assert_eq!(server.ask(&["EXISTS", "apples"]), "0");
    assert_eq!(server.ask(&["TTL", "lockset:fence:{stock}"]), "-1");
}

#[tokio::test]
async fn as_many_fields_are_written_as_are_passed() {
    let server = RedisServer::start();
    let redis = &mut connect(&server).await;
    let fields: Vec<(u32, u32)> = (0..20_000).map(|field| (field, field)).collect();
    let fence = RedisFence::new("stock").unwrap();
    assert_eq!(fence.hset(redis, "orders", token(5), "many", &fields).await.unwrap(), 20_000);
    assert_eq!(server.ask(&["HLEN", "many"]), "20000");
    let none: [(u32, u32); 0] = [];
    let error = fence.hset(redis, "orders", token(5), "many", &none).await.unwrap_err();
    assert!(matches!(error, FenceError::Invalid(_)), "{error}");
}

/// Doubles cannot tell these apart.
#[tokio::test]
async fn neighbours_are_told_apart_wherever_their_digits_end() {
    let server = RedisServer::start();
    let redis = &mut connect(&server).await;
    let numbers = [
        2,
        10,
        100,
        999_999_999,
        1_000_000_000,
        9_999_999_999,
        10_000_000_000,
        1 << 53,
        (1 << 53) + 1,
        1 << 62,
        4_999_999_999_999_999_999,
        5_000_000_000_000_000_000,
        i64::MAX as u64,
    ];
    for number in numbers {
        let fence = RedisFence::new(format!("r{number}")).unwrap();
        fence.set(redis, "orders", token(number), "k", number).await.unwrap();
        let error = fence.set(redis, "orders", token(number - 1), "k", 0).await.unwrap_err();
        assert!(error.is_stale(), "{number}: {error}");
        fence.set(redis, "orders", token(number), "k", number).await.unwrap();
        if number < i64::MAX as u64 {
            fence.set(redis, "orders", token(number + 1), "k", number).await.unwrap();
            let error = fence.set(redis, "orders", token(number), "k", 0).await.unwrap_err();
            assert!(error.is_stale(), "{number}: {error}");
        }
        assert_eq!(server.ask(&["GET", "k"]), number.to_string());
    }
}

#[tokio::test]
async fn a_mark_that_cannot_be_understood_rejects_every_write() {
    let server = RedisServer::start();
    let redis = &mut connect(&server).await;
    let store = RedisFenceStore::connect(&server.url()).await.unwrap();
    let fence = RedisFence::new("stock").unwrap();
    let marks = "lockset:fence:{stock}";
    let cases: [(&[&str], &str); 8] = [
        (&["SET", marks, "5"], "WRONGTYPE"),
        (&["HSET", marks, "", "2", "orders", "5"], "version"),
        (&["HSET", marks, "", "1", "orders", "0"], "mark"),
        (&["HSET", marks, "", "1", "orders", "x"], "mark"),
        (&["HSET", marks, "", "1", "orders", "05"], "mark"),
        (&["HSET", marks, "", "1", "orders", ""], "mark"),
        (&["HSET", marks, "", "1", "orders", "10000000000000000000"], "mark"),
        (&["HSET", marks, "orders", "5"], "mark"),
    ];
    for (command, expected) in cases {
        server.ask(&["DEL", marks]);
        server.ask(&["SET", "apples", "old"]);
        server.ask(command);
        let before = server.ask(&["HGETALL", marks]);
        let error = fence.set(redis, "orders", token(9), "apples", "new").await.unwrap_err();
        assert!(text(&error).contains(expected), "{command:?}: {error}");
        assert_eq!(server.ask(&["GET", "apples"]), "old", "{command:?}");
        assert_eq!(server.ask(&["HGETALL", marks]), before, "{command:?}");
        let lock: Name = "orders".parse().unwrap();
        text(&store.admit(&"stock".parse().unwrap(), &lock, &token(9)).await.unwrap_err());
        text(&store.marks().await.unwrap_err());
    }
}

#[tokio::test]
async fn a_key_of_marks_is_not_written() {
    let server = RedisServer::start();
    let redis = &mut connect(&server).await;
    let fence = RedisFence::new("stock").unwrap();
    fence.set(redis, "orders", token(5), "apples", 1).await.unwrap();
    let error = fence.del(redis, "orders", token(6), "lockset:fence:{stock}").await.unwrap_err();
    assert!(matches!(error, FenceError::Invalid(_)), "{error}");
    assert_eq!(server.ask(&["HGET", "lockset:fence:{stock}", "orders"]), "5");
}

/// A command that fails has raised the mark, which does no harm: its token is admitted again.
#[tokio::test]
async fn a_command_that_fails_writes_nothing() {
    let server = RedisServer::start();
    let redis = &mut connect(&server).await;
    let fence = RedisFence::new("stock").unwrap();
    server.ask(&["SET", "apples", "old"]);
    let error = fence.hset(redis, "orders", token(5), "apples", &[("a", 1)]).await.unwrap_err();
    assert!(text(&error).contains("WRONGTYPE"), "{error}");
    assert_eq!(server.ask(&["GET", "apples"]), "old");
    fence.set(redis, "orders", token(5), "apples", "new").await.unwrap();
}

#[tokio::test]
async fn a_store_connects_again_and_shows_no_password() {
    let server = RedisServer::start_with(&["--requirepass", "hunter2"]);
    let address = format!("127.0.0.1:{}", server.port());
    let wrong = RedisFenceStore::connect(&format!("redis://:hunter3@{address}")).await;
    let wrong = wrong.unwrap_err();
    assert!(!format!("{wrong} {wrong:?}").contains("hunter3"), "{wrong:?}");
    let invalid = RedisFenceStore::connect("redis://:hunter3@host:port:7").await.unwrap_err();
    assert!(matches!(invalid, FenceError::Invalid(_)), "{invalid}");
    assert!(!format!("{invalid} {invalid:?}").contains("hunter3"), "{invalid:?}");

    let store = RedisFenceStore::connect(&format!("redis://:hunter2@{address}")).await.unwrap();
    assert!(!format!("{store:?}").contains("hunter2"));
    let (resource, lock) = ("stock".parse().unwrap(), "orders".parse().unwrap());
    store.admit(&resource, &lock, &token(5)).await.unwrap();
    server.restart();
    // The server has no persistence: what it does not cover.
    store.admit(&resource, &lock, &token(4)).await.unwrap();
    server.kill();
    let down = store.admit(&resource, &lock, &token(6)).await.unwrap_err();
    assert!(!format!("{} {down:?}", text(&down)).contains("hunter2"));
}

#[tokio::test]
async fn a_server_that_does_not_reply_is_an_error_within_a_bound() {
    let server = RedisServer::start();
    let store = RedisFenceStore::connect(&server.url()).await.unwrap();
    server.signal(rustix::process::Signal::STOP);
    let (resource, lock) = ("stock".parse().unwrap(), "orders".parse().unwrap());
    let sent = token(5);
    let admitting = store.admit(&resource, &lock, &sent);
    let outcome = tokio::time::timeout(Duration::from_secs(15), admitting).await.unwrap();
    text(&outcome.unwrap_err());
    server.signal(rustix::process::Signal::CONT);
    store.admit(&resource, &lock, &token(5)).await.unwrap();
}

#[tokio::test]
async fn on_a_cluster_a_key_needs_the_hash_tag_of_the_resource() {
    let cluster = RedisCluster::start();
    let fence = RedisFence::new("stock/{a}").unwrap();
    let key = format!("{}:apples", fence.hash_tag());
    let node = &cluster.nodes()[cluster.owner(cluster.slot_of(&key))];
    let redis = &mut connect(node).await;
    fence.set(redis, "orders", token(5), &key, 17).await.unwrap();
    assert!(fence.set(redis, "orders", token(4), &key, 0).await.unwrap_err().is_stale());
    assert_eq!(node.ask(&["GET", &key]), "17");
    let error = fence.set(redis, "orders", token(6), "apples", 17).await.unwrap_err();
    assert!(text(&error).contains("hash tag"), "{error}");
    let mark = node.ask(&["HGET", &format!("lockset:fence:{}", fence.hash_tag()), "orders"]);
    assert_eq!(mark, "5", "a write that cannot be made has raised the mark");
}
