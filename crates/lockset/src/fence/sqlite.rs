//! Marks in a SQLite database.

use std::fs::{File, Metadata};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use rusqlite::{Connection, ErrorCode, OpenFlags, OptionalExtension, TransactionBehavior, params};

use crate::error::Error;
use crate::name::Name;
use crate::sync;

use super::sql::{check_version, token_of};
use super::{FenceError, FenceMark, FenceStore, FencingToken};

/// How errors name this store.
const SQLITE: &str = "SQLite";
/// The version of the tables.
const VERSION: i64 = 1;
/// How long other processes may keep the file of a [`SqliteFenceStore`] locked.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

const CREATE: &str = include_str!("sqlite.sql");

/// An equal token is written again: it takes the write lock of the database, so that no greater one
/// is admitted before this transaction ends.
const RAISE: &str = "
    INSERT INTO main.lockset_fence_marks AS mark (resource, lock, token) VALUES (?1, ?2, ?3)
    ON CONFLICT (resource, lock) DO UPDATE SET token = excluded.token
    WHERE mark.token <= excluded.token
    RETURNING token";
const SEEN: &str = "SELECT token FROM main.lockset_fence_marks WHERE resource = ?1 AND lock = ?2";
const MARKS: &str =
    "SELECT resource, lock, token FROM main.lockset_fence_marks ORDER BY resource, lock";

/// Marks in your SQLite database, checked inside the transaction that writes.
///
/// The marks are in two tables of the database `main`, which [`new`](SqliteFence::new) creates.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let locks = lockset::Lockset::connect("memory:").await?;
/// use lockset::fence::SqliteFence;
///
/// let mut db = rusqlite::Connection::open_in_memory()?;
/// db.execute_batch("CREATE TABLE stock (item TEXT PRIMARY KEY, count INTEGER)")?;
/// let fence = SqliteFence::new(&db, "stock")?;
///
/// let guard = locks.mutex("orders")?.lock().await?;
/// let write = db.transaction()?;
/// fence.admit(&write, "orders", &guard)?;
/// write.execute("INSERT INTO stock VALUES ('apple', 3)", [])?;
/// write.commit()?;
/// # Ok(()) }
/// ```
///
/// # What it does not cover
/// A mark is as durable as your other data: with `synchronous=OFF`, or `NORMAL` in WAL mode, the
/// last transactions can be lost in a power cut, and their marks with them.
///
/// If the check is made in a savepoint that is rolled back, the mark is rolled back too. Make it
/// before the savepoint.
#[derive(Clone, Debug)]
pub struct SqliteFence {
    resource: Name,
}

impl SqliteFence {
    /// A fence for this resource: a table, a group of tables, or the whole database. Creates the
    /// tables of the marks if they are missing.
    ///
    /// # Errors
    /// [`FenceError::Invalid`] if the name is not valid, [`FenceError::Store`] if the tables cannot
    /// be created or are of a newer version.
    pub fn new(
        db: &Connection,
        resource: impl TryInto<Name, Error: Into<Error>>,
    ) -> Result<Self, FenceError> {
        let resource = resource.try_into().map_err(Into::into)?;
        create(db)?;
        Ok(Self { resource })
    }

    /// Admits or rejects the write that this transaction makes, which the lock `lock` protects.
    /// Call it before the first write of the transaction, and roll back if it fails.
    ///
    /// # Errors
    /// [`FenceError::Stale`], [`FenceError::WrongLock`]; [`FenceError::Invalid`] if `lock` is not
    /// valid; [`FenceError::Store`] if the database fails or `db` is not in a transaction.
    pub fn admit(
        &self,
        db: &Connection,
        lock: impl TryInto<Name, Error: Into<Error>>,
        token: impl Into<FencingToken>,
    ) -> Result<(), FenceError> {
        let lock = lock.try_into().map_err(Into::into)?;
        raise(db, &self.resource, &lock, &token.into())
    }
}

fn create(db: &Connection) -> Result<(), FenceError> {
    let version = |db: &Connection| {
        let found = "SELECT count(*) FROM main.sqlite_schema WHERE name = 'lockset_fence_version'";
        if db.query_row(found, [], |row| row.get::<_, i64>(0))? == 0 {
            return Ok(None);
        }
        db.query_row("SELECT max(version) FROM main.lockset_fence_version", [], |row| row.get(0))
    };
    let failed = |error| store_error("the tables of the marks could not be read", error);
    // First read only: the tables are usually there, and creating them takes the write lock.
    let found = match version(db).map_err(failed)? {
        Some(version) => Some(version),
        None => {
            let failed = |error| store_error("the tables of the marks could not be made", error);
            db.execute_batch(CREATE).map_err(failed)?;
            version(db).map_err(failed)?
        }
    };
    check_version(SQLITE, found, VERSION)
}

fn raise(
    db: &Connection,
    resource: &Name,
    lock: &Name,
    token: &FencingToken,
) -> Result<(), FenceError> {
    token.check_lock(resource, lock)?;
    if db.is_autocommit() {
        let what = "the check was made outside a transaction, where it does not protect the write; \
                    begin one, and pass it to `admit`";
        return Err(FenceError::store(SQLITE, what));
    }
    let failed = |error| store_error("the token could not be checked", error);
    let (resource_name, lock_name) = (resource.as_str(), lock.as_str());
    let mut raise = db.prepare_cached(RAISE).map_err(failed)?;
    let raised = raise
        .query_row(params![resource_name, lock_name, token.as_i64()], |_| Ok(()))
        .optional()
        .map_err(failed)?;
    if raised.is_some() {
        return Ok(());
    }
    let mut seen = db.prepare_cached(SEEN).map_err(failed)?;
    let seen: i64 = seen.query_row([resource_name, lock_name], |row| row.get(0)).map_err(failed)?;
    Err(FenceError::stale(resource, token, token_of(SQLITE, seen)?))
}

fn store_error(what: &str, error: rusqlite::Error) -> FenceError {
    match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
            let what = format!("{what}, because another connection is writing; try it again");
            FenceError::store_error(SQLITE, &what, error)
        }
        _ => FenceError::store_error(SQLITE, what, error),
    }
}

/// Marks in a SQLite file, on a connection of their own: for the command line, and for resources
/// that are not in this file.
///
/// Each check is a transaction of its own, so it is not atomic with your write. If the data is in
/// SQLite too, use [`SqliteFence`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("marks.db");
/// use lockset::fence::{FenceStore, SqliteFenceStore};
///
/// let store = SqliteFenceStore::open(&path)?;
/// let (resource, lock) = ("printer".parse()?, "jobs".parse()?);
/// store.admit(&resource, &lock, &"jobs=17".parse()?).await?;
/// let late = store.admit(&resource, &lock, &"jobs=16".parse()?).await;
/// assert!(late.is_err_and(|error| error.is_stale()));
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct SqliteFenceStore {
    file: Arc<MarkFile>,
}

#[derive(Debug)]
struct MarkFile {
    path: PathBuf,
    /// Device and inode.
    identity: (u64, u64),
    db: Mutex<Connection>,
}

impl SqliteFenceStore {
    /// Opens the file. A new one can be read and written only by this user.
    ///
    /// # Errors
    /// [`FenceError::Store`] if the file cannot be opened or made, is no SQLite database, or has
    /// tables of a newer version.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, FenceError> {
        // A new file is made through a second descriptor. Closing it would drop the locks that
        // another thread has just taken on the file.
        static OPENING: Mutex<()> = Mutex::new(());
        let path = path.as_ref();
        let failed = |error: std::io::Error| {
            FenceError::store_error(SQLITE, &format!("{} cannot be opened", path.display()), error)
        };
        // Absolute, so that `:memory:` is a file like any other.
        let path = std::path::absolute(path).map_err(failed)?;
        let _alone = sync::lock(&OPENING);
        let made = File::options().write(true).create_new(true).mode(0o600).open(&path);
        match made {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(failed(error));
            }
            _ => drop(made),
        }
        let failed_db = |error| store_error(&format!("{} cannot be opened", path.display()), error);
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
            | OpenFlags::SQLITE_OPEN_NO_MUTEX
            | OpenFlags::SQLITE_OPEN_PRIVATE_CACHE;
        let db = Connection::open_with_flags(&path, flags).map_err(failed_db)?;
        db.busy_timeout(BUSY_TIMEOUT).map_err(failed_db)?;
        // With FULL, the last commit can be lost in a power cut if the journal is deleted.
        db.pragma_update(None, "synchronous", "EXTRA").map_err(failed_db)?;
        create(&db)?;
        let identity = std::fs::metadata(&path).map(|file| identity_of(&file)).map_err(failed)?;
        let file = MarkFile { path: path.clone(), identity, db: Mutex::new(db) };
        Ok(Self { file: Arc::new(file) })
    }

    /// Runs `work` on a thread that may block. It runs to its end even if this future is dropped.
    async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Connection) -> Result<T, FenceError> + Send + 'static,
    ) -> Result<T, FenceError> {
        let file = self.file.clone();
        let done = tokio::task::spawn_blocking(move || {
            let mut db = sync::lock(&file.db);
            file.check_unchanged()?;
            work(&mut db)
        });
        let ended = |error| FenceError::store_error(SQLITE, "the check was interrupted", error);
        done.await.map_err(ended)?
    }
}

impl MarkFile {
    /// Fails if the path leads to another file: other processes would use other marks.
    fn check_unchanged(&self) -> Result<(), FenceError> {
        match std::fs::metadata(&self.path) {
            Ok(file) if identity_of(&file) == self.identity => Ok(()),
            _ => {
                let path = self.path.display();
                let what = format!("{path} was removed or replaced; open it again");
                Err(FenceError::store(SQLITE, what))
            }
        }
    }
}

fn identity_of(file: &Metadata) -> (u64, u64) {
    (file.dev(), file.ino())
}

#[async_trait]
impl FenceStore for SqliteFenceStore {
    async fn admit(
        &self,
        resource: &Name,
        lock: &Name,
        token: &FencingToken,
    ) -> Result<(), FenceError> {
        let (resource, lock, token) = (resource.clone(), lock.clone(), token.clone());
        self.run(move |db| {
            let failed = |error| store_error("the token could not be checked", error);
            let write = db.transaction_with_behavior(TransactionBehavior::Immediate);
            let write = write.map_err(failed)?;
            raise(&write, &resource, &lock, &token)?;
            write.commit().map_err(failed)
        })
        .await
    }

    async fn marks(&self) -> Result<Vec<FenceMark>, FenceError> {
        self.run(|db| {
            let failed = |error| store_error("the marks could not be read", error);
            let mut marks = db.prepare_cached(MARKS).map_err(failed)?;
            let rows = marks.query_map([], |row| {
                Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?, row.get::<_, i64>(2)?))
            });
            rows.map_err(failed)?
                .map(|row| {
                    let (resource, lock, token) = row.map_err(failed)?;
                    Ok(FenceMark::new(resource.parse()?, lock.parse()?, token_of(SQLITE, token)?))
                })
                .collect()
        })
        .await
    }
}
