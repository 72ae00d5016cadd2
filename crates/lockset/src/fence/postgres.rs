//! Marks in a PostgreSQL database.

use std::error::Error as _;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio_postgres::config::SslMode;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Config, GenericClient, NoTls, Transaction};

use crate::error::Error;
use crate::name::Name;

use super::sql::{check_version, token_of};
use super::{FenceError, FenceMark, FenceStore, FencingToken};

/// How errors name this store.
const POSTGRES: &str = "PostgreSQL";
/// The version of the tables.
const VERSION: i64 = 1;
/// How long a [`PostgresFenceStore`] waits for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long it waits for a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

const CREATE: &str = include_str!("postgres.sql");

/// An equal token is written again: the row stays locked until the end of the transaction, so that
/// no greater one is admitted before.
const RAISE: &str = "
    INSERT INTO lockset_fence.marks AS mark (resource, lock, token) VALUES ($1, $2, $3)
    ON CONFLICT (resource, lock) DO UPDATE SET token = excluded.token
    WHERE mark.token <= excluded.token
    RETURNING mark.token";
const SEEN: &str = "SELECT token FROM lockset_fence.marks WHERE resource = $1 AND lock = $2";
const MARKS: &str = "SELECT resource, lock, token FROM lockset_fence.marks ORDER BY resource, lock";
/// The server ends what this client no longer waits for, and a role or database whose commits are
/// not durable does not lose a mark.
const SETTINGS: &str = "
    SET statement_timeout = '5s';
    SELECT set_config('synchronous_commit', 'on', false)
    WHERE current_setting('synchronous_commit') = 'off'";

/// Marks in your PostgreSQL database, checked inside the transaction that writes.
///
/// The marks are in the schema `lockset_fence`, which [`new`](PostgresFence::new) creates. A
/// transaction waits at [`admit`](PostgresFence::admit) until every transaction that was admitted
/// for the same resource and lock has ended.
///
/// ```no_run
/// # async fn example(guard: lockset::Guard) -> Result<(), Box<dyn std::error::Error>> {
/// use lockset::fence::PostgresFence;
/// use tokio_postgres::NoTls;
///
/// let (mut db, connection) =
///     tokio_postgres::connect("postgres://shop@localhost/shop", NoTls).await?;
/// tokio::spawn(connection);
/// let fence = PostgresFence::new(&db, "stock").await?;
///
/// let write = db.transaction().await?;
/// fence.admit(&write, "orders", &guard).await?;
/// write.execute("UPDATE stock SET count = count - 1 WHERE item = 'apple'", &[]).await?;
/// write.commit().await?;
/// # Ok(()) }
/// ```
///
/// Outside a transaction it does not compile:
/// ```compile_fail,E0308
/// # async fn example(
/// #     fence: lockset::fence::PostgresFence,
/// #     db: tokio_postgres::Client,
/// #     guard: lockset::Guard,
/// # ) -> Result<(), lockset::fence::FenceError> {
/// fence.admit(&db, "orders", &guard).await
/// # }
/// ```
///
/// # What it does not cover
/// A mark is as durable as your other data: with `synchronous_commit=off`, or after a failover to a
/// replica that is behind, the last transactions are lost, and their marks with them.
///
/// If the check is made in a savepoint that is rolled back, the mark is rolled back too. Make it
/// before the savepoint. Transactions that check several resources in different orders can
/// deadlock; PostgreSQL then fails one of them.
#[derive(Clone, Debug)]
pub struct PostgresFence {
    resource: Name,
}

impl PostgresFence {
    /// A fence for this resource: a table, a group of tables, or the whole database. Creates the
    /// schema of the marks if it is missing. If it is there, the role needs `USAGE` on it,
    /// `SELECT`, `INSERT` and `UPDATE` on `lockset_fence.marks`, and `SELECT` on
    /// `lockset_fence.version`.
    ///
    /// # Errors
    /// [`FenceError::Invalid`] if the name is not valid, [`FenceError::Store`] if the schema cannot
    /// be created or read, or is of a newer version.
    ///
    /// # Cancel safety
    /// If dropped, the schema may have been created.
    pub async fn new(
        db: &(impl GenericClient + Sync),
        resource: impl TryInto<Name, Error: Into<Error>>,
    ) -> Result<Self, FenceError> {
        let resource = resource.try_into().map_err(Into::into)?;
        create(db).await?;
        Ok(Self { resource })
    }

    /// Admits or rejects the write that this transaction makes, which the lock `lock` protects.
    /// Call it before the first write of the transaction, and roll back if it fails.
    ///
    /// # Errors
    /// [`FenceError::Stale`], [`FenceError::WrongLock`]; [`FenceError::Invalid`] if `lock` is not
    /// valid; [`FenceError::Store`] if the database fails. Its `cause` is the
    /// [`tokio_postgres::Error`], with the SQLSTATE of a serialization failure or deadlock.
    ///
    /// # Cancel safety
    /// If dropped, the transaction may have been admitted. Roll it back.
    pub async fn admit(
        &self,
        write: &Transaction<'_>,
        lock: impl TryInto<Name, Error: Into<Error>>,
        token: impl Into<FencingToken>,
    ) -> Result<(), FenceError> {
        let lock = lock.try_into().map_err(Into::into)?;
        raise(write, &self.resource, &lock, &token.into()).await
    }
}

async fn create(db: &(impl GenericClient + Sync)) -> Result<(), FenceError> {
    let failed = |error| store_error("the tables of the marks could not be read", error);
    // First read only: a role without the right to create can use tables that are there. A failed
    // statement would end the caller's transaction, so this asks whether the table is there.
    let found = match version(db).await.map_err(failed)? {
        Some(version) => Some(version),
        None => {
            let failed = |error| store_error("the tables of the marks could not be made", error);
            // Without a transaction of the caller, the statements of one batch are one.
            db.batch_execute(CREATE).await.map_err(failed)?;
            version(db).await.map_err(failed)?
        }
    };
    check_version(POSTGRES, found.map(i64::from), VERSION)
}

async fn version(db: &(impl GenericClient + Sync)) -> Result<Option<i32>, tokio_postgres::Error> {
    let found = "SELECT to_regclass('lockset_fence.version') IS NOT NULL";
    let rows = db.query_typed(found, &[]).await?;
    match rows.first().map(|row| row.try_get(0)).transpose()? {
        Some(true) => {
            let newest = "SELECT max(version) FROM lockset_fence.version";
            let rows = db.query_typed(newest, &[]).await?;
            Ok(rows.first().map(|row| row.try_get(0)).transpose()?.flatten())
        }
        _ => Ok(None),
    }
}

async fn raise(
    db: &(impl GenericClient + Sync),
    resource: &Name,
    lock: &Name,
    token: &FencingToken,
) -> Result<(), FenceError> {
    token.check_lock(resource, lock)?;
    let failed = |error| store_error("the token could not be checked", error);
    let (resource_name, lock_name) = (resource.as_str(), lock.as_str());
    let names = [(&resource_name as _, Type::TEXT), (&lock_name as _, Type::TEXT)];
    let number = token.as_i64();
    let [of_resource, of_lock] = names.clone();
    // One round trip: with the types given, nothing has to be prepared.
    let raised = db.query_typed(RAISE, &[of_resource, of_lock, (&number, Type::INT8)]).await;
    if !raised.map_err(failed)?.is_empty() {
        return Ok(());
    }
    let rows = db.query_typed(SEEN, &names).await.map_err(failed)?;
    match rows.first() {
        Some(row) => {
            let seen = token_of(POSTGRES, row.try_get(0).map_err(failed)?)?;
            Err(FenceError::stale(resource, token, seen))
        }
        None => Err(FenceError::store(POSTGRES, "the mark was removed during the check")),
    }
}

/// The text of `tokio_postgres::Error` does not contain its cause.
fn store_error(what: &str, error: tokio_postgres::Error) -> FenceError {
    let mut what = format!("{what}: {error}");
    let mut cause = error.source();
    while let Some(error) = cause {
        what = format!("{what}: {error}");
        cause = error.source();
    }
    if let Some(code) = error.code() {
        what = format!("{what} (SQLSTATE {})", code.code());
    }
    FenceError::Store { store: POSTGRES, what, cause: Some(Box::new(error)) }
}

/// Marks in a PostgreSQL database, on a connection of their own: for the command line, and for
/// resources that are not in this database.
///
/// Each check is a transaction of its own, so it is not atomic with your write. If the data is in
/// PostgreSQL too, use [`PostgresFence`].
///
/// A lost connection is replaced by the next call. The connection is not encrypted: a URL that
/// demands TLS is rejected.
#[derive(Debug)]
pub struct PostgresFenceStore {
    config: Config,
    /// Locked only while it is replaced.
    client: tokio::sync::Mutex<Option<Arc<Client>>>,
}

impl PostgresFenceStore {
    /// Connects to a server: `postgres://user:password@host:port/database`. Creates the schema of
    /// the marks if it is missing; see [`PostgresFence::new`] for the rights it needs.
    ///
    /// # Errors
    /// [`FenceError::Store`] if the URL is not valid or demands TLS, the server does not respond
    /// within 5 seconds, or the schema cannot be created or is of a newer version.
    ///
    /// # Cancel safety
    /// If dropped, the schema may have been created.
    pub async fn connect(url: &str) -> Result<Self, FenceError> {
        let store = Self { config: config_of(url)?, client: tokio::sync::Mutex::new(None) };
        store.client().await?;
        Ok(store)
    }

    async fn client(&self) -> Result<Arc<Client>, FenceError> {
        let mut current = self.client.lock().await;
        if let Some(client) = current.as_ref().filter(|client| !client.is_closed()) {
            return Ok(client.clone());
        }
        *current = None;
        let connecting = async {
            let failed = |error| store_error("no connection could be made", error);
            let (client, connection) = self.config.connect(NoTls).await.map_err(failed)?;
            // It ends when the client is dropped. Its error is also that of the request.
            tokio::spawn(connection);
            client.batch_execute(SETTINGS).await.map_err(failed)?;
            create(&client).await?;
            Ok(Arc::new(client))
        };
        let client = bounded(CONNECT_TIMEOUT, connecting).await?;
        *current = Some(client.clone());
        Ok(client)
    }

    /// Drops a connection on which a request got no reply, so that the next call makes a new one.
    async fn forget(&self, client: &Arc<Client>) {
        let mut current = self.client.lock().await;
        if current.as_ref().is_some_and(|current| Arc::ptr_eq(current, client)) {
            *current = None;
        }
    }

    async fn request<T>(
        &self,
        client: &Arc<Client>,
        request: impl Future<Output = Result<T, FenceError>>,
    ) -> Result<T, FenceError> {
        let outcome = bounded(REQUEST_TIMEOUT, request).await;
        if matches!(outcome, Err(FenceError::Store { .. })) {
            self.forget(client).await;
        }
        outcome
    }
}

async fn bounded<T>(
    limit: Duration,
    request: impl Future<Output = Result<T, FenceError>>,
) -> Result<T, FenceError> {
    match tokio::time::timeout(limit, request).await {
        Ok(outcome) => outcome,
        Err(_) => {
            let what = format!("the server did not reply within {} s", limit.as_secs());
            Err(FenceError::store(POSTGRES, what))
        }
    }
}

/// The parser's own errors can contain parts of the URL, and so the password.
fn config_of(url: &str) -> Result<Config, FenceError> {
    let has_scheme = ["postgres://", "postgresql://"].iter().any(|head| url.starts_with(head));
    if !has_scheme {
        let what = "the URL has the form `postgres://user:password@host:port/database`";
        return Err(FenceError::store(POSTGRES, what));
    }
    let no_tls = || {
        let what = "the URL demands TLS (`sslmode=`), which this store does not have; use a local \
                    socket or a tunnel, and `sslmode=disable`";
        FenceError::store(POSTGRES, what)
    };
    let options = url.rsplit_once('?').map_or("", |(_, options)| options);
    let mut modes = options.split('&').filter_map(|option| option.strip_prefix("sslmode="));
    if modes.any(|mode| !["disable", "allow", "prefer"].contains(&mode)) {
        return Err(no_tls());
    }
    let config = url.parse::<Config>().map_err(|_| {
        let what = "the URL or one of its options is not valid; it has the form \
                    `postgres://user:password@host:port/database`";
        FenceError::store(POSTGRES, what)
    });
    let mut config = config?;
    // Once more by the parser's reading, which also decodes `%`.
    if !matches!(config.get_ssl_mode(), SslMode::Disable | SslMode::Prefer) {
        return Err(no_tls());
    }
    if config.get_application_name().is_none() {
        config.application_name("lockset-fence");
    }
    config.connect_timeout(CONNECT_TIMEOUT);
    Ok(config)
}

#[async_trait]
impl FenceStore for PostgresFenceStore {
    async fn admit(
        &self,
        resource: &Name,
        lock: &Name,
        token: &FencingToken,
    ) -> Result<(), FenceError> {
        let client = self.client().await?;
        self.request(&client, raise(&*client, resource, lock, token)).await
    }

    async fn marks(&self) -> Result<Vec<FenceMark>, FenceError> {
        let client = self.client().await?;
        let failed = |error| store_error("the marks could not be read", error);
        let reading = async {
            let rows = client.query_typed(MARKS, &[]).await.map_err(failed)?;
            let marks = rows.iter().map(|row| {
                let resource: String = row.try_get(0).map_err(failed)?;
                let lock: String = row.try_get(1).map_err(failed)?;
                let token = token_of(POSTGRES, row.try_get(2).map_err(failed)?)?;
                Ok(FenceMark::new(resource.parse()?, lock.parse()?, token))
            });
            marks.collect()
        };
        self.request(&client, reading).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_that_demands_tls_or_is_not_valid_is_rejected_without_its_password() {
        let wrong = [
            ("postgres://u:secret@h/db?sslmode=require", "TLS"),
            ("postgres://u:secret@h/db?sslmode=verify-full", "TLS"),
            ("postgres://u:secret@h/db?connect_timeout=1&sslmode=verify-ca", "TLS"),
            ("postgres://u:secret@h/db?sslmode=%72equire", "TLS"),
            ("postgres://u:secret@h/db?secret=1", "not valid"),
            ("postgres://u:secret@h:port/db", "not valid"),
            ("redis://u:secret@h/db?x=1", "form"),
            ("host=h password=secret", "form"),
            ("", "form"),
        ];
        for (url, reason) in wrong {
            let error = config_of(url).unwrap_err();
            let text = format!("{error} {error:?}");
            assert!(text.contains(reason), "{url}: {text}");
            assert!(!text.contains("secret"), "{url}: {text}");
        }
        let config = config_of("postgresql://u:secret@h/db?sslmode=disable").unwrap();
        assert!(!format!("{config:?}").contains("secret"));
        config_of("postgres://u:secret@h/db").unwrap();
    }
}
