//! The Rust peers: distkit, async-redis-lock, etcd-client. The protocol is in ../README.md.
//!
//! usage: lockset-bench-peers PEER ADDRESS TTL_MS

#[path = "../../../src/driver.rs"]
mod driver;
#[allow(dead_code, reason = "only the clock is needed")]
#[path = "../../../src/measure.rs"]
mod measure;
#[allow(dead_code, reason = "only the turns are needed")]
#[path = "../../../src/turns.rs"]
mod turns;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_redis_lock::{Locker, Options};
use distkit::DistkitRedisKey;
use distkit::lock::{LockOptions, Mutex, MutexGuard};
use etcd_client::Client;
use redis::aio::ConnectionManager;
use tokio::sync::OnceCell;

use driver::Locks;
use turns::Lock;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let (peer, address) = (args[1].as_str(), args[2].clone());
    let ttl = Duration::from_millis(args[3].parse().unwrap());
    match peer {
        "distkit" => driver::obey(version("distkit"), async || {
            let client = redis::Client::open(format!("redis://{address}")).unwrap();
            Distkit { connection: client.get_connection_manager().await.unwrap(), ttl }
        }),
        "async-redis-lock" => driver::obey(version("async-redis-lock"), async || {
            let url = format!("redis://{address}");
            AsyncRedisLock { locker: Arc::new(Locker::from_redis_url(&url).await.unwrap()), ttl }
        }),
        "etcd-client" => driver::obey(version("etcd-client"), async || Etcd::new(address, ttl).await),
        other => panic!("no such peer: {other}"),
    }
}

/// As Cargo.toml pins it.
fn version(name: &str) -> &'static str {
    let pins = include_str!("../Cargo.toml");
    let line = pins.lines().find(|line| line.starts_with(&format!("{name} = "))).unwrap();
    line.split_once("\"=").unwrap().1.split('"').next().unwrap()
}

struct Distkit {
    connection: ConnectionManager,
    ttl: Duration,
}

struct DistkitLock(Arc<Mutex>);

impl Locks for Distkit {
    type Lock = DistkitLock;

    fn named(&self, name: &str) -> DistkitLock {
        // A mutex is who holds: every task has its own. The rest are its defaults.
        let key = DistkitRedisKey::try_from(name.replace(['/', ':'], "-")).unwrap();
        let options = LockOptions::builder(key, self.connection.clone()).ttl(self.ttl).build();
        DistkitLock(Mutex::new(options))
    }
}

impl Lock for DistkitLock {
    type Held = MutexGuard;

    async fn lock(&self) -> MutexGuard {
        self.0.lock().await.unwrap()
    }

    async fn unlock(&self, held: MutexGuard) {
        held.release().await.unwrap();
    }
}

struct AsyncRedisLock {
    locker: Arc<Locker>,
    ttl: Duration,
}

struct AsyncRedisLockOf {
    locker: Arc<Locker>,
    name: String,
    ttl: Duration,
}

impl Locks for AsyncRedisLock {
    type Lock = AsyncRedisLockOf;

    fn named(&self, name: &str) -> AsyncRedisLockOf {
        AsyncRedisLockOf { locker: self.locker.clone(), name: name.to_owned(), ttl: self.ttl }
    }
}

impl Lock for AsyncRedisLockOf {
    type Held = async_redis_lock::Lock;

    async fn lock(&self) -> async_redis_lock::Lock {
        let options = Options::new().ttl(self.ttl).extend(self.ttl / 3).timeout(None);
        self.locker.acquire_with_options(&options, &self.name).await.unwrap()
    }

    async fn unlock(&self, held: async_redis_lock::Lock) {
        held.release().await.unwrap();
    }
}

/// The Lock RPC, in which the server waits.
struct Etcd {
    client: Client,
    leases: std::sync::Mutex<Leases>,
    ttl: i64,
}

/// A lease is who holds: every waiter for one name needs its own. Later orders use them again.
#[derive(Default)]
struct Leases {
    all: Vec<Arc<OnceCell<i64>>>,
    used: HashMap<String, usize>,
}

struct EtcdLock {
    client: Client,
    name: String,
    lease: Arc<OnceCell<i64>>,
    ttl: i64,
}

impl Etcd {
    async fn new(address: String, ttl: Duration) -> Self {
        let client = Client::connect([address], None).await.unwrap();
        Self { client, leases: Default::default(), ttl: ttl.as_secs() as i64 }
    }
}

/// A lease that is kept alive for as long as the process lives.
async fn grant(mut client: Client, ttl: i64) -> i64 {
    let lease = client.lease_grant(ttl, None).await.unwrap().id();
    let (mut keeper, mut answers) = client.lease_keep_alive(lease).await.unwrap();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_millis(ttl as u64 * 1000 / 3)).await;
            keeper.keep_alive().await.unwrap();
            answers.message().await.unwrap();
        }
    });
    lease
}

impl Locks for Etcd {
    type Lock = EtcdLock;

    fn named(&self, name: &str) -> EtcdLock {
        let Leases { all, used } = &mut *self.leases.lock().unwrap();
        let place = used.entry(name.to_owned()).or_default();
        if *place == all.len() {
            all.push(Arc::default());
        }
        let lease = all[*place].clone();
        *place += 1;
        let name = format!("client/{name}");
        EtcdLock { client: self.client.clone(), name, lease, ttl: self.ttl }
    }

    fn begin(&self) {
        self.leases.lock().unwrap().used.clear();
    }
}

impl Lock for EtcdLock {
    type Held = Vec<u8>;

    async fn lock(&self) -> Vec<u8> {
        let mut client = self.client.clone();
        let lease = self.lease.get_or_init(|| grant(self.client.clone(), self.ttl)).await;
        let options = etcd_client::LockOptions::new().with_lease(*lease);
        client.lock(self.name.as_str(), Some(options)).await.unwrap().key().to_vec()
    }

    async fn unlock(&self, key: Vec<u8>) {
        self.client.clone().unlock(key).await.unwrap();
    }
}
