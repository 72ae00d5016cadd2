//! The laws on each store of marks alone, for values that are elsewhere. `fence_redis.rs` has them
//! for Redis.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use lockset::Name;
use lockset::fence::{
    FenceError, FenceMark, FenceStore, FencingToken, FileFence, MemoryFence, PostgresFenceStore,
    SqliteFenceStore,
};
use lockset_testkit::fence_laws::{FencedRegister, LAWS, check};
use lockset_testkit::fence_suite;
use lockset_testkit::stage::PostgresServer;

/// Where the marks are.
#[async_trait]
trait Backend: Send + Sync {
    async fn open(&self) -> Arc<dyn FenceStore>;
    fn stop(&self);
    fn resume(&self);
}

struct Guarded<B> {
    backend: B,
    store: Mutex<Arc<dyn FenceStore>>,
    values: tokio::sync::Mutex<BTreeMap<Name, String>>,
}

impl<B: Backend> Guarded<B> {
    async fn start(backend: B) -> Self {
        let store = Mutex::new(backend.open().await);
        Self { backend, store, values: tokio::sync::Mutex::default() }
    }

    fn store(&self) -> Arc<dyn FenceStore> {
        self.store.lock().unwrap().clone()
    }
}

#[async_trait]
impl<B: Backend> FencedRegister for Guarded<B> {
    /// The check and the write are two steps, so writers take turns.
    async fn write(
        &self,
        resource: &Name,
        lock: &Name,
        token: &FencingToken,
        value: &str,
    ) -> Result<(), FenceError> {
        let mut values = self.values.lock().await;
        self.store().admit(resource, lock, token).await?;
        values.insert(resource.clone(), value.to_owned());
        Ok(())
    }

    async fn read(&self, resource: &Name) -> Option<String> {
        self.values.lock().await.get(resource).cloned()
    }

    async fn marks(&self) -> Result<Vec<FenceMark>, FenceError> {
        self.store().marks().await
    }

    async fn restart(&self) {
        self.backend.resume();
        let store = self.backend.open().await;
        *self.store.lock().unwrap() = store;
    }

    async fn stop(&self) {
        self.backend.stop();
    }
}

/// A file or a folder. Something else takes its place while it is stopped: tests may run as root,
/// whom no permission stops.
struct OnDisk {
    folder: tempfile::TempDir,
    open: fn(PathBuf) -> Result<Arc<dyn FenceStore>, FenceError>,
}

impl OnDisk {
    fn new(open: fn(PathBuf) -> Result<Arc<dyn FenceStore>, FenceError>) -> Self {
        Self { folder: tempfile::tempdir().unwrap(), open }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

#[async_trait]
impl Backend for OnDisk {
    async fn open(&self) -> Arc<dyn FenceStore> {
        (self.open)(self.path("marks")).unwrap()
    }

    fn stop(&self) {
        fs::rename(self.path("marks"), self.path("away")).unwrap();
        fs::write(self.path("marks"), "something else").unwrap();
    }

    fn resume(&self) {
        if self.path("away").exists() {
            fs::remove_file(self.path("marks")).unwrap();
            fs::rename(self.path("away"), self.path("marks")).unwrap();
        }
    }
}

struct Postgres(PostgresServer);

#[async_trait]
impl Backend for Postgres {
    async fn open(&self) -> Arc<dyn FenceStore> {
        Arc::new(PostgresFenceStore::connect(&self.0.url()).await.unwrap())
    }

    fn stop(&self) {
        self.0.stop();
    }

    fn resume(&self) {
        self.0.stop();
        self.0.resume();
    }
}

mod sqlite {
    use super::*;
    fence_suite!(Guarded::start(OnDisk::new(|path| Ok(Arc::new(SqliteFenceStore::open(path)?)))));
}

mod files {
    use super::*;
    fence_suite!(Guarded::start(OnDisk::new(|path| Ok(Arc::new(FileFence::open(path)?)))));
}

mod postgres {
    use super::*;
    fence_suite!(Guarded::start(Postgres(PostgresServer::start())));
}

/// Values and marks in this process.
#[derive(Default)]
struct InMemory {
    fence: MemoryFence,
    values: Mutex<BTreeMap<Name, String>>,
}

#[async_trait]
impl FencedRegister for InMemory {
    async fn write(
        &self,
        resource: &Name,
        lock: &Name,
        token: &FencingToken,
        value: &str,
    ) -> Result<(), FenceError> {
        self.fence.write(resource, lock, token, || {
            self.values.lock().unwrap().insert(resource.clone(), value.to_owned());
        })
    }

    async fn read(&self, resource: &Name) -> Option<String> {
        self.values.lock().unwrap().get(resource).cloned()
    }

    async fn marks(&self) -> Result<Vec<FenceMark>, FenceError> {
        self.fence.marks().await
    }

    async fn restart(&self) {
        panic!("memory ends with its process");
    }

    async fn stop(&self) {
        panic!("memory cannot be stopped");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_obeys_every_law_that_needs_no_restart() {
    let others = ["a_mark_survives_a_restart", "a_stopped_store_rejects"];
    let laws: Vec<&str> = LAWS.iter().map(|(law, _)| *law).collect();
    assert!(others.iter().all(|law| laws.contains(law)));
    for law in laws.iter().filter(|law| !others.contains(law)) {
        check(law, Arc::new(InMemory::default())).await;
    }
}
