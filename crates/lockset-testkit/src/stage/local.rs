//! The local engine: one SQLite file, several real processes, the machine's own time.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use lockset::Lockset;
use lockset::clock::Clock;
use lockset::engine::Engine;
use lockset::engine::local::{Local, LocalOptions};

use super::{Stage, Time};
use crate::process::{Judging, Process};

/// A file of its own in a folder of its own.
#[derive(Debug)]
pub struct LocalStage {
    folder: tempfile::TempDir,
    actor: &'static str,
    judging: Judging,
    grip: Mutex<Option<Grip>>,
}

impl LocalStage {
    /// An empty home. `actor` is the path of this crate's binary `actor`, which only its tests
    /// can know: `env!("CARGO_BIN_EXE_actor")`.
    pub fn start(actor: &'static str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self { folder, actor, judging: Judging::ByTheGuard, grip: Mutex::new(None) }
    }

    /// Its processes tell the state of their locks by hearsay: a mutant.
    pub fn by_hearsay(mut self) -> Self {
        self.judging = Judging::ByHearsay;
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

    async fn elsewhere(&self) -> Lockset {
        let other = self.folder.path().join("elsewhere.db");
        Lockset::connect(&format!("local:{}", other.display())).await.unwrap()
    }

    async fn freeze(&self) {
        *self.grip.lock().unwrap() = Some(Grip::on(&self.file()));
    }

    async fn thaw(&self) {
        *self.grip.lock().unwrap() = None;
    }

    async fn process(&self) -> Option<Process> {
        Some(Process::start(self.actor, &self.url(), self.judging))
    }
}

/// Somebody who has SQLite's write lock and does not let go of it: a real fault, and the only way
/// to make a file stop answering.
#[derive(Debug)]
struct Grip(rusqlite::Connection);

impl Grip {
    fn on(file: &std::path::Path) -> Self {
        let connection = rusqlite::Connection::open(file).unwrap();
        connection.busy_timeout(Duration::from_secs(10)).unwrap();
        connection.execute_batch("BEGIN IMMEDIATE").unwrap();
        Self(connection)
    }
}

impl Drop for Grip {
    fn drop(&mut self) {
        // If this fails the connection is dropped next, and the lock with it.
        let _ = self.0.execute_batch("ROLLBACK");
    }
}
