//! Other people's locks, and ours, as something that can be asked for one cycle after the other.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use lockset::engine::Engine;
use lockset::{Lockset, Mutex};
use redis::AsyncConnectionConfig;
use redis::aio::MultiplexedConnection;
use rslock::LockManager;

use crate::bare::{COMPARE_AND_DELETE, ID, TTL_MS};
use crate::child::Child;
use crate::server::Server;

const TTL: Duration = Duration::from_secs(30);

/// One task that locks and releases a name of its own, again and again.
pub(crate) trait Worker: Send + 'static {
    /// Locks and releases.
    fn cycle(&mut self) -> impl Future<Output = ()> + Send;
}

#[derive(Debug)]
pub(crate) struct Ours(Mutex);

impl Ours {
    pub(crate) async fn workers(server: &Server, count: usize) -> Vec<Self> {
        Self::with(&Lockset::connect(&server.url()).await.unwrap(), count, count)
    }

    /// `tasks` tasks that share `names` names, on an engine with its own options.
    pub(crate) fn on(engine: Arc<dyn Engine>, tasks: usize, names: usize) -> Vec<Self> {
        Self::with(&Lockset::with_engine(engine).unwrap(), tasks, names)
    }

    fn with(locks: &Lockset, tasks: usize, names: usize) -> Vec<Self> {
        // Runs beside others of its kind in the same round, hence names of its own.
        let own = unique();
        let names = (0..tasks).map(|number| format!("ours/{own:032x}/{}", number % names));
        names.map(|name| Self(locks.mutex(&name).unwrap())).collect()
    }
}

impl Worker for Ours {
    async fn cycle(&mut self) {
        let guard = self.0.lock().await.unwrap();
        assert_ne!(guard.token().get(), 0, "ours is with a token");
        guard.release().await.unwrap();
    }
}

/// A lock written with redis-rs and no lock library: no token, no waiting, no timeout.
#[derive(Debug)]
pub(crate) struct ByHand {
    connection: MultiplexedConnection,
    sha: String,
    key: String,
}

impl ByHand {
    pub(crate) async fn workers(server: &Server, count: usize) -> Vec<Self> {
        let sha = server.ask(&["script", "load", COMPARE_AND_DELETE]);
        let client = redis::Client::open(server.url()).unwrap();
        let config = AsyncConnectionConfig::new().set_response_timeout(None);
        let connection = client.get_multiplexed_async_connection_with_config(&config).await;
        let connection = connection.unwrap();
        let keys = (0..count).map(|number| format!("by-hand/{:032x}/{number}", unique()));
        keys.map(|key| Self { connection: connection.clone(), sha: sha.clone(), key }).collect()
    }
}

impl Worker for ByHand {
    async fn cycle(&mut self) {
        let Self { connection, sha, key } = self;
        let mut set = redis::cmd("SET");
        set.arg(&*key).arg(ID).arg("NX").arg("PX").arg(TTL_MS);
        let locked: Option<String> = set.query_async(connection).await.unwrap();
        assert!(locked.is_some());
        let mut release = redis::cmd("EVALSHA");
        release.arg(&*sha).arg(1).arg(&*key).arg(ID);
        let released: u32 = release.query_async(connection).await.unwrap();
        assert_eq!(released, 1);
    }
}

/// The crate rslock with one server.
#[derive(Debug)]
pub(crate) struct Rslock {
    locks: LockManager,
    name: String,
}

impl Rslock {
    pub(crate) async fn workers(server: &Server, count: usize) -> Vec<Self> {
        let locks = LockManager::new(vec![server.url()]);
        let names = (0..count).map(|number| format!("rslock/{:032x}/{number}", unique()));
        names.map(|name| Self { locks: locks.clone(), name }).collect()
    }
}

impl Worker for Rslock {
    async fn cycle(&mut self) {
        let lock = self.locks.lock(self.name.as_str(), TTL).await.unwrap();
        self.locks.unlock(&lock).await;
    }
}

/// A process with python-redis-lock in it.
pub(crate) fn python(server: &Server) -> Child {
    let python = target_folder().join("venv/bin/python");
    let found = python.is_file();
    assert!(found, "{} is needed: run `cargo xtask setup`", python.display());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/python/driver.py");
    let mut command = Command::new(python);
    let address = format!("127.0.0.1:{}", server.port());
    command.arg(script).args(["python-redis-lock", &address, "30000"]);
    Child::start(&mut command)
}

/// Holds the lock `name` as python-redis-lock does.
pub(crate) fn hold_for_python(server: &Server, name: &str) {
    assert_eq!(server.ask(&["set", &format!("lock:{name}"), "held", "nx"]), "OK");
}

/// Releases what [`hold_for_python`] held, with the signal that python-redis-lock's waiters await.
pub(crate) fn let_python_go(server: &Server, name: &str) {
    let release = "redis.call('del', KEYS[1]) redis.call('lpush', KEYS[2], 1)";
    server.ask(&["eval", release, "2", &format!("lock:{name}"), &format!("lock-signal:{name}")]);
}

fn unique() -> u128 {
    lockset::engine::ClaimId::random().to_bits()
}

pub(crate) fn target_folder() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => folder.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target"),
    }
}
