//! The classic accident: a holder is paused beyond its lease, another client is granted the lock
//! and writes, then the first one goes on and writes too.
//!
//! With a fence the late write is rejected. Without one it replaces the newer value. Client A is a
//! process that is stopped with SIGSTOP; it is a client that was paused between its last check and
//! its write: it has taken its token while it held the lock, and does not ask the guard again.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lockset::fence::{
    FenceError, FencingToken, FileFence, ObjectFence, PostgresFence, RedisFence, SqliteFence,
};
use lockset::{Mode, Token};
use object_store::ObjectStoreExt as _;
use redis::AsyncCommands;
use rusqlite::{Connection, TransactionBehavior};
use serde::{Deserialize, Serialize};

use crate::process::Process;
use crate::stage::{
    ClusterStage, EtcdStage, LocalStage, PostgresServer, PostgresStage, RedisServer, RedisStage,
    RedlockStage, S3Server, SentinelStage, Stage, ZooKeeperStage,
};
use crate::steps::within;

/// Timeout for each step. On a loaded machine a lease of two seconds may take several to end.
const PATIENCE: Duration = Duration::from_secs(60);

type Failed = Box<dyn std::error::Error + Send + Sync>;

/// A register in a store, written with the fence of the store or without it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Register {
    /// Where it is.
    pub place: Place,
    /// Its name: the resource, and the row, the file or the key.
    pub name: String,
    /// Whether a write passes the fence.
    pub fenced: bool,
}

/// Where a register is.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// A SQLite database.
    Sqlite(PathBuf),
    /// A folder.
    Folder(PathBuf),
    /// A Redis server, by its URL.
    Redis(String),
    /// A database of a PostgreSQL server, by its URL.
    Postgres(String),
    /// The bucket of an S3 server, by its URL.
    S3(String),
}

/// The outcome of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It was written.
    Written,
    /// The fence rejected it.
    Stale {
        /// The greatest token that the resource has seen.
        seen: Token,
    },
}

impl Register {
    /// Writes `value`.
    ///
    /// # Errors
    /// Everything but a stale token.
    pub async fn write(&self, token: &FencingToken, value: &str) -> Result<Verdict, Failed> {
        let written = match &self.place {
            Place::Sqlite(path) => self.write_sqlite(path, token, value),
            Place::Folder(folder) => self.write_file(folder, token, value),
            Place::Redis(url) => self.write_redis(url, token, value).await,
            Place::Postgres(url) => self.write_postgres(url, token, value).await,
            Place::S3(url) => self.write_s3(url, token, value).await,
        };
        match written {
            Ok(()) => Ok(Verdict::Written),
            Err(error) => match error.downcast_ref() {
                Some(FenceError::Stale { seen, .. }) => Ok(Verdict::Stale { seen: *seen }),
                _ => Err(error),
            },
        }
    }

    /// The value, read without the fence.
    ///
    /// # Errors
    /// Any of the store.
    pub async fn read(&self) -> Result<String, Failed> {
        let name = &self.name;
        match &self.place {
            Place::Sqlite(path) => {
                let sql = "SELECT value FROM registers WHERE name = ?1";
                Ok(Connection::open(path)?.query_row(sql, [name], |row| row.get(0))?)
            }
            Place::Folder(folder) => Ok(std::fs::read_to_string(folder.join(name))?),
            Place::Redis(url) => Ok(redis(url).await?.get(name).await?),
            Place::Postgres(url) => {
                let sql = "SELECT value FROM registers WHERE name = $1";
                Ok(postgres(url).await?.query_one(sql, &[name]).await?.get(0))
            }
            Place::S3(url) => {
                let object = S3Server::store_at(url).get(&name.as_str().into()).await?;
                let text = String::from_utf8(object.bytes().await?.to_vec())?;
                // The first line of a guarded object contains the marks.
                let content = text.split_once('\n').filter(|_| self.fenced);
                Ok(content.map_or(text.as_str(), |(_, content)| content).to_owned())
            }
        }
    }

    fn write_sqlite(&self, path: &Path, token: &FencingToken, value: &str) -> Result<(), Failed> {
        let mut db = Connection::open(path)?;
        db.busy_timeout(PATIENCE)?;
        let fence = SqliteFence::new(&db, self.name.as_str())?;
        let write = db.transaction_with_behavior(TransactionBehavior::Immediate)?;
        if self.fenced {
            fence.admit(&write, token.lock(), token)?;
        }
        write.execute("INSERT OR REPLACE INTO registers VALUES (?1, ?2)", [&self.name, value])?;
        Ok(write.commit()?)
    }

    fn write_file(&self, folder: &Path, token: &FencingToken, value: &str) -> Result<(), Failed> {
        let fence = FileFence::open(folder)?;
        match self.fenced {
            true => Ok(fence.write(&self.name, token.lock(), token, value.as_bytes())?),
            false => Ok(std::fs::write(folder.join(&self.name), value)?),
        }
    }

    async fn write_redis(
        &self,
        url: &str,
        token: &FencingToken,
        value: &str,
    ) -> Result<(), Failed> {
        let mut connection = redis(url).await?;
        let fence = RedisFence::new(self.name.as_str())?;
        match self.fenced {
            true => Ok(fence.set(&mut connection, token.lock(), token, &self.name, value).await?),
            false => Ok(connection.set(&self.name, value).await?),
        }
    }

    async fn write_postgres(
        &self,
        url: &str,
        token: &FencingToken,
        value: &str,
    ) -> Result<(), Failed> {
        let mut client = postgres(url).await?;
        let fence = PostgresFence::new(&client, self.name.as_str()).await?;
        let write = client.transaction().await?;
        if self.fenced {
            fence.admit(&write, token.lock(), token).await?;
        }
        let sql = "INSERT INTO registers VALUES ($1, $2)
            ON CONFLICT (name) DO UPDATE SET value = excluded.value";
        write.execute(sql, &[&self.name, &value]).await?;
        Ok(write.commit().await?)
    }

    async fn write_s3(&self, url: &str, token: &FencingToken, value: &str) -> Result<(), Failed> {
        let (store, path) = (Arc::new(S3Server::store_at(url)), self.name.as_str().into());
        let value = value.to_owned();
        match self.fenced {
            true => {
                let fence = ObjectFence::new(store).await?;
                Ok(fence.put(&path, token.lock(), token, value).await?)
            }
            false => Ok(store.put(&path, value.into()).await.map(|_| ())?),
        }
    }
}

async fn redis(url: &str) -> Result<redis::aio::MultiplexedConnection, Failed> {
    Ok(redis::Client::open(url)?.get_multiplexed_async_connection().await?)
}

async fn postgres(url: &str) -> Result<tokio_postgres::Client, Failed> {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

/// The stores, by name.
pub const STORES: &[&str] = &["sqlite", "file", "redis", "postgres", "s3"];

/// The stores that were asked for, each started once and empty.
#[derive(Debug)]
pub struct Stores {
    folder: tempfile::TempDir,
    redis: Option<RedisServer>,
    postgres: Option<PostgresServer>,
    s3: Option<S3Server>,
}

impl Stores {
    /// Starts the stores with these names.
    pub fn start(names: &[&str]) -> Self {
        const TABLE: &str = "CREATE TABLE registers (name TEXT PRIMARY KEY, value TEXT NOT NULL)";
        let folder = tempfile::tempdir().unwrap();
        Connection::open(folder.path().join("stock.db")).unwrap().execute_batch(TABLE).unwrap();
        let redis = names.contains(&"redis").then(RedisServer::start);
        let postgres = names.contains(&"postgres").then(PostgresServer::start);
        if let Some(postgres) = &postgres {
            postgres.ask(TABLE);
        }
        let s3 = names.contains(&"s3").then(S3Server::start);
        Self { folder, redis, postgres, s3 }
    }

    /// A register in one of them.
    ///
    /// # Panics
    /// If that store was not started.
    pub fn register(&self, store: &str, name: &str, fenced: bool) -> Register {
        let place = match store {
            "sqlite" => Some(Place::Sqlite(self.folder.path().join("stock.db"))),
            "file" => Some(Place::Folder(self.folder.path().join("stock"))),
            "redis" => self.redis.as_ref().map(|server| Place::Redis(server.url())),
            "postgres" => self.postgres.as_ref().map(|server| Place::Postgres(server.url())),
            "s3" => self.s3.as_ref().map(|server| Place::S3(server.url())),
            _ => None,
        };
        let place = place.unwrap_or_else(|| panic!("the store {store} was not started"));
        Register { place, name: name.to_owned(), fenced }
    }
}

/// Plays the accident on the lock `lock` and returns the timeline.
///
/// # Panics
/// If a late write is not rejected although there is a fence, or does not replace the newer value
/// although there is none.
pub async fn play(stage: &dyn Stage, lock: &str, register: &Register) -> Vec<String> {
    let mut timeline = Timeline { began: Instant::now(), lines: Vec::new() };
    let ttl = stage.ttl();

    let mut a = process(stage).await;
    let call_a = a.begin_lock(lock, Mode::Exclusive, ttl);
    let old = within(PATIENCE, "A is granted the lock", a.granted(call_a)).await;
    timeline.add("A", format!("is granted the lock, token {old}, lease {ttl:?}"));
    a.stop();
    timeline.add("A", "is stopped (SIGSTOP) just before its write".to_owned());

    let mut b = process(stage).await;
    let call_b = b.begin_lock(lock, Mode::Exclusive, ttl);
    let new = within(PATIENCE, "B is granted the lock", b.granted(call_b)).await;
    timeline.add("B", format!("is granted the lock, token {new}: the lease of A has ended"));
    assert!(old < new, "{lock}: token {new} was granted after {old}");
    b.begin_write(call_b, register, "from B");
    let of_b = within(PATIENCE, "B writes", b.written(call_b)).await;
    timeline.add("B", format!("writes: {}", told(of_b)));
    assert_eq!(of_b, Verdict::Written, "{lock}: the write of the holder");

    // It reads the command when it is resumed.
    a.begin_write(call_a, register, "from A");
    a.resume();
    timeline.add("A", "is continued (SIGCONT)".to_owned());
    let of_a = within(PATIENCE, "A writes", a.written(call_a)).await;
    timeline.add("A", format!("writes: {}", told(of_a)));
    let value = register.read().await.unwrap();
    timeline.add("", format!("the register contains the value {value}"));

    let expected = match register.fenced {
        true => (Verdict::Stale { seen: new }, "from B"),
        false => (Verdict::Written, "from A"),
    };
    assert_eq!((of_a, value.as_str()), expected, "{lock}: {register:?}");
    timeline.lines
}

async fn process(stage: &dyn Stage) -> Process {
    stage.process().await.expect("the clients of this engine are processes")
}

/// Plays the accident in each of these stores, with the fence and without it, all side by side.
/// Returns the timelines, each with its title.
///
/// # Panics
/// As [`play`].
pub async fn play_all(
    stage: &dyn Stage,
    stores: &Stores,
    names: &[&str],
) -> Vec<(String, Vec<String>)> {
    let cases = names.iter().flat_map(|store| [(*store, true), (*store, false)]);
    let plays = cases.map(|(store, fenced)| async move {
        let name = format!("{store}-{}", if fenced { "fenced" } else { "unfenced" });
        let register = stores.register(store, &name, fenced);
        let timeline = play(stage, &name, &register).await;
        (name, timeline)
    });
    futures_util::future::join_all(plays).await
}

/// The engines whose clients are processes, by name.
pub const ENGINES: &[&str] =
    &["local", "redis", "sentinel", "cluster", "redlock", "zookeeper", "etcd", "postgres"];

/// Starts the backend of an engine. `actor` is a program that calls
/// [`serve_arguments`](crate::process::serve_arguments).
///
/// # Panics
/// If there is no such engine.
pub fn stage_of(engine: &str, actor: &'static str) -> Box<dyn Stage> {
    match engine {
        "local" => Box::new(LocalStage::start(actor)),
        "redis" => Box::new(RedisStage::start(actor)),
        "sentinel" => Box::new(SentinelStage::start(actor)),
        "cluster" => Box::new(ClusterStage::start(actor)),
        "redlock" => Box::new(RedlockStage::start(actor)),
        "zookeeper" => Box::new(ZooKeeperStage::start(actor)),
        "etcd" => Box::new(EtcdStage::start(actor)),
        "postgres" => Box::new(PostgresStage::start(actor)),
        _ => panic!("there is no engine {engine}"),
    }
}

fn told(verdict: Verdict) -> String {
    match verdict {
        Verdict::Written => "done".to_owned(),
        Verdict::Stale { seen } => format!("rejected, {seen} was seen"),
    }
}

/// What happened, with the time since it began.
struct Timeline {
    began: Instant,
    lines: Vec<String>,
}

impl Timeline {
    fn add(&mut self, who: &str, what: String) {
        let since = self.began.elapsed().as_secs_f64();
        self.lines.push(format!("{since:5.2} s  {who:1}  {what}"));
    }
}
