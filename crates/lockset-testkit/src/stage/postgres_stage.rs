//! The stage of the PostgreSQL engine: a schema of its own on a server that laws use one after the
//! other.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use lockset::Lockset;
use lockset::clock::Clock;
use lockset::engine::Engine;
use lockset::engine::postgres::{Postgres, PostgresOptions};

use super::postgres::PostgresServer;
use super::{LinkedClient, Stage, Time};
use crate::process::{Process, StateSource};
use crate::proxy::Proxy;

/// An empty schema on a server that no other test uses at the moment.
#[derive(Debug)]
pub struct PostgresSchema {
    /// `None` only while it is dropped.
    server: Option<PostgresServer>,
    schema: String,
}

impl PostgresSchema {
    /// An empty schema.
    pub fn start() -> Self {
        static HOMES: AtomicU32 = AtomicU32::new(0);
        let home = HOMES.fetch_add(1, Ordering::Relaxed);
        Self { server: Some(POOL.take()), schema: format!("home{home}") }
    }

    /// The server, for this test alone.
    pub fn server(&self) -> &PostgresServer {
        self.server.as_ref().expect("it is not being dropped")
    }

    /// The name of the schema.
    pub fn name(&self) -> &str {
        &self.schema
    }

    /// The URL of the locks in this schema.
    pub fn url(&self) -> String {
        format!("{}?schema={}", self.server().url(), self.schema)
    }
}

impl Drop for PostgresSchema {
    fn drop(&mut self) {
        if let Some(server) = self.server.take() {
            POOL.give_back(server);
        }
    }
}

/// A schema of its own for one law.
#[derive(Debug)]
pub struct PostgresStage {
    home: PostgresSchema,
    actor: &'static str,
}

impl PostgresStage {
    /// An empty schema; see [`LocalStage::start`](super::LocalStage::start).
    pub fn start(actor: &'static str) -> Self {
        Self { home: PostgresSchema::start(), actor }
    }
}

/// Servers that no law uses at the moment. They are kept only while another law runs: nothing in
/// this process would stop them after the last law.
struct Pool {
    state: Mutex<PoolState>,
}

struct PoolState {
    in_use: usize,
    idle: Vec<PostgresServer>,
}

static POOL: Pool = Pool { state: Mutex::new(PoolState { in_use: 0, idle: Vec::new() }) };

impl Pool {
    fn take(&self) -> PostgresServer {
        let found = {
            let mut state = self.state.lock().unwrap();
            state.in_use += 1;
            state.idle.pop()
        };
        // A crash of the server loses nothing that it has written, only one of the machine does.
        found.unwrap_or_else(|| PostgresServer::start_with(&["fsync=off"]))
    }

    fn give_back(&self, server: PostgresServer) {
        server.thaw();
        let ended = {
            let mut state = self.state.lock().unwrap();
            state.in_use -= 1;
            state.idle.push(server);
            if state.in_use == 0 { std::mem::take(&mut state.idle) } else { Vec::new() }
        };
        drop(ended);
    }
}

#[async_trait]
impl Stage for PostgresStage {
    fn time(&self) -> Time {
        Time::Real
    }

    fn clock(&self) -> Clock {
        Clock::boot()
    }

    fn ttl(&self) -> Duration {
        Duration::from_millis(2000)
    }

    async fn client(&self) -> Lockset {
        Lockset::connect(&self.home.url()).await.unwrap()
    }

    async fn engine(&self) -> Arc<dyn Engine> {
        let (url, schema) = (self.home.server().url().parse().unwrap(), self.home.schema.clone());
        let options = PostgresOptions { url, schema, ..PostgresOptions::default() };
        Arc::new(Postgres::connect(options).await.unwrap())
    }

    async fn other_backend(&self) -> Lockset {
        let url = format!("{}?schema={}_other", self.home.server().url(), self.home.schema);
        Lockset::connect(&url).await.unwrap()
    }

    async fn freeze(&self) {
        self.home.server().freeze();
    }

    async fn thaw(&self) {
        self.home.server().thaw();
    }

    async fn restart(&self) {
        self.home.server().restart();
    }

    async fn process(&self) -> Option<Process> {
        Some(Process::start(self.actor, &self.home.url(), StateSource::Guard))
    }

    async fn linked_client(&self) -> Option<LinkedClient> {
        let proxy = Proxy::before(self.home.server().port());
        let through = format!("postgres://postgres@127.0.0.1:{}/postgres", proxy.port());
        let locks =
            Lockset::connect(&format!("{through}?schema={}", self.home.schema)).await.unwrap();
        Some(LinkedClient { locks, link: Box::new(vec![proxy]) })
    }
}
