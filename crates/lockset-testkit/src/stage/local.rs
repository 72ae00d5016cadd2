//! The stage of the local engine: one SQLite file, several real processes, real time.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use lockset::Lockset;
use lockset::clock::Clock;
use lockset::engine::Engine;
use lockset::engine::local::{Local, LocalOptions};

use super::{Stage, Time};
use crate::process::{Process, StateSource};

/// A lock file in a temporary folder.
#[derive(Debug)]
pub struct LocalStage {
    folder: tempfile::TempDir,
    actor: &'static str,
    state_source: StateSource,
    write_lock: Mutex<Option<WriteLock>>,
}

impl LocalStage {
    /// An empty home. `actor` is the path of this crate's binary `actor`, which only its tests
    /// can know: `env!("CARGO_BIN_EXE_actor")`.
    pub fn start(actor: &'static str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self { folder, actor, state_source: StateSource::Guard, write_lock: Mutex::new(None) }
    }

    /// Makes a mutant whose processes report a stale state of their locks.
    pub fn with_stale_state(mut self) -> Self {
        self.state_source = StateSource::Stale;
        self
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("locks.db")
    }

    fn url(&self) -> String {
        format!("local:{}", self.file().display())
    }
}

#[async_trait]
impl Stage for LocalStage {
    fn time(&self) -> Time {
        Time::Real
    }

    fn clock(&self) -> Clock {
        Clock::boot()
    }

    fn ttl(&self) -> Duration {
        Duration::from_millis(1200)
    }

    async fn client(&self) -> Lockset {
        Lockset::connect(&self.url()).await.unwrap()
    }

    async fn engine(&self) -> Arc<dyn Engine> {
        let path = Some(self.file());
        Arc::new(Local::open(LocalOptions { path, ..LocalOptions::default() }).unwrap())
    }

    async fn other_backend(&self) -> Lockset {
        let other = self.folder.path().join("elsewhere.db");
        Lockset::connect(&format!("local:{}", other.display())).await.unwrap()
    }

    async fn freeze(&self) {
        *self.write_lock.lock().unwrap() = Some(WriteLock::on(&self.file()));
    }

    async fn thaw(&self) {
        *self.write_lock.lock().unwrap() = None;
    }

    async fn process(&self) -> Option<Process> {
        Some(Process::start(self.actor, &self.url(), self.state_source))
    }
}

/// Holds SQLite's write lock: a realistic fault, and the only way to make a file unresponsive.
#[derive(Debug)]
pub struct WriteLock(rusqlite::Connection);

impl WriteLock {
    /// Takes the lock of this file, and holds it until it is dropped.
    pub fn on(file: &std::path::Path) -> Self {
        let connection = rusqlite::Connection::open(file).unwrap();
        connection.busy_timeout(Duration::from_secs(10)).unwrap();
        connection.execute_batch("BEGIN IMMEDIATE").unwrap();
        Self(connection)
    }
}

impl Drop for WriteLock {
    fn drop(&mut self) {
        // If this fails the connection is dropped next, and the lock with it.
        let _ = self.0.execute_batch("ROLLBACK");
    }
}
