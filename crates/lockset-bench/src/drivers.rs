//! The drivers inside this program: Lockset, the peers that are its dependencies, the floors.
//!
//! `lockset-bench driver NAME ADDRESS TTL_MS`, spoken to by the protocol of `peers/README.md`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex as Shared};
use std::time::Duration;

use lockset::{Guard, Lockset, Mutex};
use rslock::{Lock as RslockHeld, LockManager};
use zookeeper_client::{Acls, Client, CreateMode, LockOptions, LockPrefix};

use crate::driver::{Locks, obey};
use crate::etcd::calls::Calls;
use crate::floors;
use crate::turns::Lock;

pub(crate) fn run(args: &[&str]) {
    let [name, address, ttl] = args else { panic!("driver NAME ADDRESS TTL_MS") };
    let ttl = Duration::from_millis(ttl.parse().unwrap());
    match *name {
        "lockset" => obey(env!("CARGO_PKG_VERSION"), async || {
            Lockset::builder(address).ttl(ttl).connect().await.unwrap()
        }),
        "rslock" => obey("0.10.0", async || {
            let urls: Vec<_> = address.split(',').map(|one| format!("redis://{one}")).collect();
            Rslock { locks: LockManager::new(urls), ttl }
        }),
        "zookeeper-client" => {
            obey("0.11.2", async || ZooKeeper(zookeeper(address, ttl).await));
        }
        "floor-memory" => obey("tokio's Mutex", async || InProcess::default()),
        "floor-etcd" => obey("put, delete", async || EtcdWrites::new(address).await),
        "floor-zookeeper" => obey("create, delete", async || {
            let client = zookeeper(address, ttl).await;
            let containers = CreateMode::Container.with_acls(Acls::anyone_all());
            let _ = client.create("/floor", b"", &containers).await;
            ZooKeeperWrites(client)
        }),
        "floor-redis" => floors::obey("bare socket", floors::Redis::new(address)),
        "floor-redlock" => floors::obey("bare sockets", floors::Redlock::new(address)),
        "floor-local" => floors::obey("two SQLite transactions", floors::Sqlite::new(address)),
        other => panic!("no such driver: {other}"),
    }
}

impl Locks for Lockset {
    type Lock = Mutex;

    fn named(&self, name: &str) -> Mutex {
        self.mutex(name).unwrap()
    }
}

impl Lock for Mutex {
    type Held = Guard;

    fn lock(&self) -> impl Future<Output = Guard> + Send {
        let locking = Self::lock(self);
        async { locking.await.unwrap() }
    }

    async fn unlock(&self, held: Guard) {
        held.release().await.unwrap();
    }

    fn token(held: &Guard) -> u64 {
        held.token().get()
    }
}

/// The crate rslock; a contender that gave up asks again.
struct Rslock {
    locks: LockManager,
    ttl: Duration,
}

struct RslockOf {
    locks: LockManager,
    name: String,
    ttl: Duration,
}

impl Locks for Rslock {
    type Lock = RslockOf;

    fn named(&self, name: &str) -> RslockOf {
        RslockOf { locks: self.locks.clone(), name: name.to_owned(), ttl: self.ttl }
    }
}

impl Lock for RslockOf {
    type Held = RslockHeld;

    async fn lock(&self) -> RslockHeld {
        loop {
            if let Ok(held) = self.locks.lock(self.name.as_str(), self.ttl).await {
                return held;
            }
        }
    }

    async fn unlock(&self, held: RslockHeld) {
        self.locks.unlock(&held).await;
    }
}

/// The lock of the crate zookeeper-client, all of one session.
struct ZooKeeper(Client);

struct ZooKeeperLock {
    client: Client,
    folder: String,
}

async fn zookeeper(address: &str, ttl: Duration) -> Client {
    Client::connector().with_session_timeout(ttl).connect(address).await.unwrap()
}

impl Locks for ZooKeeper {
    type Lock = ZooKeeperLock;

    fn named(&self, name: &str) -> ZooKeeperLock {
        let folder = format!("/peer/{}", name.replace('/', "-"));
        ZooKeeperLock { client: self.0.clone(), folder }
    }
}

impl Lock for ZooKeeperLock {
    type Held = String;

    async fn lock(&self) -> String {
        let containers = CreateMode::Container.with_acls(Acls::anyone_all());
        let options = LockOptions::new(Acls::anyone_all());
        let options = options.with_ancestor_options(containers).unwrap();
        let prefix = LockPrefix::new_curator(&self.folder, "lock-").unwrap();
        let held = self.client.lock(prefix, b"", options).await.unwrap();
        let path = held.lock_path().to_owned();
        // Its drop would delete the node, and that could not be waited for.
        std::mem::forget(held);
        path
    }

    async fn unlock(&self, path: String) {
        self.client.delete(&path, None).await.unwrap();
    }
}

/// tokio's own mutex, by name.
#[derive(Default)]
struct InProcess(Shared<HashMap<String, Arc<tokio::sync::Mutex<()>>>>);

impl Locks for InProcess {
    type Lock = Arc<tokio::sync::Mutex<()>>;

    fn named(&self, name: &str) -> Self::Lock {
        self.0.lock().unwrap().entry(name.to_owned()).or_default().clone()
    }
}

impl Lock for Arc<tokio::sync::Mutex<()>> {
    type Held = tokio::sync::OwnedMutexGuard<()>;

    fn lock(&self) -> impl Future<Output = Self::Held> + Send {
        self.clone().lock_owned()
    }

    async fn unlock(&self, held: Self::Held) {
        drop(held);
    }
}

/// The two writes that every lock on etcd needs, and nothing else.
struct EtcdWrites {
    calls: Calls,
    lease: i64,
}

struct EtcdKey {
    calls: Calls,
    key: String,
    lease: i64,
}

impl EtcdWrites {
    async fn new(address: &str) -> Self {
        let port = address.rsplit(':').next().unwrap().parse().unwrap();
        let calls = Calls::connect(port).await;
        let lease = calls.lease(3600).await;
        Self { calls, lease }
    }
}

impl Locks for EtcdWrites {
    type Lock = EtcdKey;

    fn named(&self, name: &str) -> EtcdKey {
        EtcdKey { calls: self.calls.clone(), key: format!("floor/{name}"), lease: self.lease }
    }
}

impl Lock for EtcdKey {
    type Held = ();

    async fn lock(&self) {
        self.calls.put(&self.key, self.lease).await;
    }

    async fn unlock(&self, (): ()) {
        self.calls.delete(&self.key).await;
    }
}

/// The two writes that every lock on ZooKeeper needs, and nothing else.
struct ZooKeeperWrites(Client);

struct ZooKeeperNode {
    client: Client,
    path: String,
}

impl Locks for ZooKeeperWrites {
    type Lock = ZooKeeperNode;

    fn named(&self, name: &str) -> ZooKeeperNode {
        let path = format!("/floor/{}", name.replace('/', "-"));
        ZooKeeperNode { client: self.0.clone(), path }
    }
}

impl Lock for ZooKeeperNode {
    type Held = ();

    async fn lock(&self) {
        let ephemeral = CreateMode::Ephemeral.with_acls(Acls::anyone_all());
        self.client.create(&self.path, b"", &ephemeral).await.unwrap();
    }

    async fn unlock(&self, (): ()) {
        self.client.delete(&self.path, None).await.unwrap();
    }
}
