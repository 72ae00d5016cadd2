//! Keys of a Redis server that are written only with a token that is not stale.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::OnceLock;
use std::time::Duration;

use async_trait::async_trait;
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{
    AsyncConnectionConfig, Client, RedisError, Script, ScriptInvocation, ToSingleRedisArg, Value,
};
use tokio::sync::Mutex;

use crate::error::Error;
use crate::name::Name;
use crate::token::Token;
use crate::url::{percent_decode, percent_encode};

use super::{FenceError, FenceMark, FenceStore, FencingToken};

const STORE: &str = "Redis";
/// The keys of the marks: this, and the resource as a hash tag.
const PREFIX: &str = "lockset:fence:";
const VERSION: &str = "1";
/// For a connection, and for each reply.
const TIMEOUT: Duration = Duration::from_secs(5);
/// For a list of all marks, which looks at every key of the database.
const LIST_TIMEOUT: Duration = Duration::from_secs(60);
/// How many resources such a list may have.
const LIST_LIMIT: usize = 100_000;

/// Keys of a Redis server that belong to one resource, written only with a token that is not stale.
///
/// Each write is one script, which checks the token, raises the mark and writes: no other command
/// comes between. It uses a connection of the caller. The marks of a resource are the fields of one
/// hash, `lockset:fence:{resource}`, which never expires.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// # let locks = lockset::Lockset::connect("memory:").await?;
/// use lockset::fence::RedisFence;
///
/// let client = redis::Client::open("redis://127.0.0.1")?;
/// let mut redis = client.get_multiplexed_async_connection().await?;
/// let fence = RedisFence::new("stock")?;
/// let mutex = locks.mutex("orders/42")?;
/// let guard = mutex.lock().await?;
/// fence.set(&mut redis, mutex.name(), &guard, "stock:apples", 17).await?;
/// # Ok(()) }
/// ```
///
/// # Redis Cluster
/// A script writes keys of one slot only. All keys of the resource must contain its
/// [`hash_tag`](RedisFence::hash_tag), such as `{stock}:apples`; the server rejects others.
///
/// # What it does not cover
/// A mark lives as long as Redis keeps the writes it has acknowledged. Without `appendonly yes` and
/// `appendfsync always`, a crash of the server can lose the last marks; a replica that becomes the
/// master lacks what it had not received, because replication is asynchronous; `FLUSHALL`, and
/// eviction by a `maxmemory-policy` of `allkeys-…`, remove marks. In all these cases a stale token
/// can be admitted. Where that is not acceptable, keep the data in a database. Commands that do not
/// use the fence are not checked.
#[derive(Clone, Debug)]
pub struct RedisFence {
    resource: Name,
    marks: String,
}

impl RedisFence {
    /// The fence of this resource.
    ///
    /// # Errors
    /// [`FenceError::Invalid`] if the name is not valid.
    pub fn new(resource: impl TryInto<Name, Error: Into<Error>>) -> Result<Self, FenceError> {
        let resource = resource.try_into().map_err(Into::into)?;
        let marks = format!("{PREFIX}{{{}}}", percent_encode(resource.as_str()));
        Ok(Self { resource, marks })
    }

    /// What the keys of this resource contain on a Redis Cluster: the resource in braces, with the
    /// bytes other than ASCII letters, digits and `-._~` written as `%` and two hexadecimal digits.
    ///
    /// ```
    /// # use lockset::fence::RedisFence;
    /// assert_eq!(RedisFence::new("stock")?.hash_tag(), "{stock}");
    /// # Ok::<(), lockset::fence::FenceError>(())
    /// ```
    pub fn hash_tag(&self) -> &str {
        self.marks.get(PREFIX.len()..).unwrap_or_default()
    }

    /// `SET key value`, if the token is admitted.
    ///
    /// # Errors
    /// As [`del`](Self::del).
    ///
    /// # Cancel safety
    /// A call that is cancelled may have written.
    pub async fn set(
        &self,
        connection: &mut impl ConnectionLike,
        lock: impl TryInto<Name, Error: Into<Error>>,
        token: impl Into<FencingToken>,
        key: impl ToSingleRedisArg,
        value: impl ToSingleRedisArg,
    ) -> Result<(), FenceError> {
        let lock = lock.try_into().map_err(Into::into)?;
        let mut script = self.script(&lock, &token.into(), Some(&key))?;
        script.0.arg("SET").arg(value);
        self.invoke(connection, &script).await?;
        Ok(())
    }

    /// `HSET key field value …`, if the token is admitted. Returns how many fields are new.
    ///
    /// # Errors
    /// As [`del`](Self::del); also [`FenceError::Invalid`] without fields.
    ///
    /// # Cancel safety
    /// A call that is cancelled may have written.
    pub async fn hset(
        &self,
        connection: &mut impl ConnectionLike,
        lock: impl TryInto<Name, Error: Into<Error>>,
        token: impl Into<FencingToken>,
        key: impl ToSingleRedisArg,
        fields: &[(impl ToSingleRedisArg, impl ToSingleRedisArg)],
    ) -> Result<u64, FenceError> {
        if fields.is_empty() {
            return Err(Error::invalid("fields", "", "there are none").into());
        }
        let lock = lock.try_into().map_err(Into::into)?;
        let mut script = self.script(&lock, &token.into(), Some(&key))?;
        script.0.arg("HSET");
        for (field, value) in fields {
            script.0.arg(field.to_redis_args()).arg(value.to_redis_args());
        }
        self.invoke(connection, &script).await
    }

    /// `DEL key`, if the token is admitted. Returns whether the key existed. The mark stays.
    ///
    /// # Errors
    /// [`FenceError::Stale`], [`FenceError::WrongLock`] and [`FenceError::Invalid`]: nothing was
    /// written. [`FenceError::Store`]: nothing was written, if the server replied; otherwise it is
    /// not known.
    ///
    /// # Cancel safety
    /// A call that is cancelled may have written.
    pub async fn del(
        &self,
        connection: &mut impl ConnectionLike,
        lock: impl TryInto<Name, Error: Into<Error>>,
        token: impl Into<FencingToken>,
        key: impl ToSingleRedisArg,
    ) -> Result<bool, FenceError> {
        let lock = lock.try_into().map_err(Into::into)?;
        let mut script = self.script(&lock, &token.into(), Some(&key))?;
        script.0.arg("DEL");
        Ok(self.invoke(connection, &script).await? > 0)
    }

    /// The script with its first arguments, and the token for what it returns.
    fn script(
        &self,
        lock: &Name,
        token: &FencingToken,
        key: Option<&dyn RedisArgument>,
    ) -> Result<(ScriptInvocation<'static>, FencingToken), FenceError> {
        static SCRIPT: OnceLock<Script> = OnceLock::new();
        let script = SCRIPT.get_or_init(|| Script::new(include_str!("guarded.lua")));
        token.check_lock(&self.resource, lock)?;
        let mut script = script.prepare_invoke();
        script.key(&self.marks);
        if let Some(key) = key.map(RedisArgument::bytes) {
            if key.starts_with(PREFIX.as_bytes()) {
                let why = "keys that begin like this contain marks";
                return Err(Error::invalid("key", PREFIX, why).into());
            }
            script.key(key);
        }
        script.arg(lock.as_str()).arg(token.token().get());
        Ok((script, token.clone()))
    }

    async fn invoke(
        &self,
        connection: &mut impl ConnectionLike,
        (script, token): &(ScriptInvocation<'static>, FencingToken),
    ) -> Result<u64, FenceError> {
        let reply = script.invoke_async(connection).await.map_err(failed)?;
        self.outcome(token, reply)
    }

    fn outcome(&self, token: &FencingToken, reply: Value) -> Result<u64, FenceError> {
        let seen = match &reply {
            Value::Int(count) => return Ok(u64::try_from(*count).unwrap_or_default()),
            Value::BulkString(seen) => std::str::from_utf8(seen).ok(),
            _ => None,
        };
        match seen.and_then(|seen| seen.parse().ok()) {
            Some(seen) => Err(FenceError::stale(&self.resource, token, seen)),
            None => Err(FenceError::store(STORE, "the script returned what it cannot return")),
        }
    }
}

/// The bytes of a key of any type, so that one function serves all.
trait RedisArgument {
    fn bytes(&self) -> Vec<u8>;
}

impl<T: ToSingleRedisArg> RedisArgument for T {
    fn bytes(&self) -> Vec<u8> {
        self.to_redis_args().into_iter().next().unwrap_or_default()
    }
}

/// The marks of a Redis server, with a connection of its own: for resources that are not keys of
/// that server. See [`RedisFence`] for what Redis does not guarantee.
///
/// The connection is made anew when it was lost. Connecting, and each reply, may take 5 seconds.
pub struct RedisFenceStore {
    client: Client,
    connection: Mutex<Option<MultiplexedConnection>>,
}

impl RedisFenceStore {
    /// Connects to one server: `redis://[user:password@]host[:port][/db]`, or `rediss://…` with the
    /// feature `redis-tls`. Sentinel and Cluster are not supported.
    ///
    /// # Errors
    /// [`FenceError::Invalid`] if the URL is not valid, [`FenceError::Store`] if the server cannot
    /// be reached. The password is in neither.
    ///
    /// # Cancel safety
    /// Nothing is left of a call that is cancelled.
    pub async fn connect(url: &str) -> Result<Self, FenceError> {
        let client = Client::open(url).map_err(|_| {
            let why = "it has the form redis://[user:password@]host[:port][/db]";
            Error::invalid("URL", "(not shown)", why)
        })?;
        let store = Self { client, connection: Mutex::new(None) };
        store.connection().await?;
        Ok(store)
    }

    async fn connection(&self) -> Result<MultiplexedConnection, FenceError> {
        let mut connection = self.connection.lock().await;
        if let Some(connection) = &*connection {
            return Ok(connection.clone());
        }
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(TIMEOUT))
            .set_response_timeout(Some(TIMEOUT));
        let connecting = self.client.get_multiplexed_async_connection_with_config(&config);
        // The timeout of the crate does not include the login.
        let new = match tokio::time::timeout(TIMEOUT, connecting).await {
            Ok(new) => new.map_err(failed)?,
            Err(_) => {
                let what = format!("no connection within {TIMEOUT:?}");
                return Err(FenceError::store(STORE, what));
            }
        };
        Ok(connection.insert(new).clone())
    }

    async fn list(&self) -> Result<Vec<FenceMark>, RedisListError> {
        let mut connection = self.connection().await?;
        let (mut keys, mut cursor) = (BTreeSet::new(), 0_u64);
        loop {
            let mut scan = redis::cmd("SCAN");
            scan.arg(cursor).arg("MATCH").arg(format!("{PREFIX}{{*}}")).arg("COUNT").arg(1000);
            let (next, found): (u64, Vec<String>) = scan.query_async(&mut connection).await?;
            keys.extend(found);
            if keys.len() > LIST_LIMIT {
                let what = format!("there are more than {LIST_LIMIT} resources: too many to list");
                return Err(FenceError::store(STORE, what).into());
            }
            cursor = next;
            if cursor == 0 {
                break;
            }
        }
        let mut marks = Vec::new();
        for key in keys {
            let fields: Vec<(String, String)> =
                redis::cmd("HGETALL").arg(&key).query_async(&mut connection).await?;
            marks.extend(marks_of(&key, fields)?);
        }
        marks.sort();
        Ok(marks)
    }

    /// The next call connects again.
    async fn disconnect(&self) {
        *self.connection.lock().await = None;
    }
}

/// A failure of the server, after which the connection may be of no use, or another one.
enum RedisListError {
    Server(RedisError),
    Fence(FenceError),
}

impl From<RedisError> for RedisListError {
    fn from(error: RedisError) -> Self {
        Self::Server(error)
    }
}

impl From<FenceError> for RedisListError {
    fn from(error: FenceError) -> Self {
        Self::Fence(error)
    }
}

#[async_trait]
impl FenceStore for RedisFenceStore {
    async fn admit(
        &self,
        resource: &Name,
        lock: &Name,
        token: &FencingToken,
    ) -> Result<(), FenceError> {
        let fence = RedisFence::new(resource.clone())?;
        let (script, token) = fence.script(lock, token, None)?;
        let mut is_second = false;
        loop {
            let mut connection = self.connection().await?;
            match script.invoke_async(&mut connection).await {
                Ok(reply) => return fence.outcome(&token, reply).map(|_| ()),
                Err(error) if is_lost(&error) => {
                    self.disconnect().await;
                    // An idle connection may have been closed long ago. The script may be repeated:
                    // an equal token is admitted again.
                    if is_second || !error.is_connection_dropped() {
                        return Err(failed(error));
                    }
                    is_second = true;
                }
                Err(error) => return Err(failed(error)),
            }
        }
    }

    async fn marks(&self) -> Result<Vec<FenceMark>, FenceError> {
        match tokio::time::timeout(LIST_TIMEOUT, self.list()).await {
            Ok(Ok(marks)) => Ok(marks),
            Ok(Err(RedisListError::Fence(error))) => Err(error),
            Ok(Err(RedisListError::Server(error))) => {
                if is_lost(&error) {
                    self.disconnect().await;
                }
                Err(failed(error))
            }
            Err(_) => {
                let what = format!("the marks were not listed within {LIST_TIMEOUT:?}");
                Err(FenceError::store(STORE, what))
            }
        }
    }
}

/// Without the URL, which may contain a password.
impl fmt::Debug for RedisFenceStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisFenceStore").finish_non_exhaustive()
    }
}

fn is_lost(error: &RedisError) -> bool {
    error.is_io_error() || error.is_timeout() || error.is_unrecoverable_error()
}

/// The marks that the hash of a resource contains.
fn marks_of(key: &str, fields: Vec<(String, String)>) -> Result<Vec<FenceMark>, FenceError> {
    let corrupt = || {
        let what = format!("the key `{key}` does not contain marks: restore or remove it");
        FenceError::store(STORE, what)
    };
    let resource = key.strip_prefix(PREFIX).and_then(|tag| tag.strip_prefix('{'));
    let resource = resource.and_then(|tag| percent_decode(tag.strip_suffix('}')?));
    let resource: Name = resource.and_then(|name| name.parse().ok()).ok_or_else(corrupt)?;
    let version = fields.iter().find(|(lock, _)| lock.is_empty()).map(|(_, version)| version);
    match version.map(String::as_str) {
        Some(VERSION) => {}
        Some(_) => return Err(newer(key)),
        None => return Err(corrupt()),
    }
    let marks = fields.iter().filter(|(lock, _)| !lock.is_empty()).map(|(lock, token)| {
        // Exactly as it was written, as the script demands.
        let token = token.parse().ok().filter(|number: &Token| number.to_string() == *token)?;
        let token = FencingToken::new(lock.as_str(), token).ok()?;
        Some(FenceMark::new(resource.clone(), token.lock().clone(), token.token()))
    });
    marks.collect::<Option<_>>().ok_or_else(corrupt)
}

fn newer(key: &str) -> FenceError {
    let what = format!("the marks in `{key}` have another version: use a newer Lockset");
    FenceError::store(STORE, what)
}

fn failed(error: RedisError) -> FenceError {
    let what = match error.code() {
        Some("CROSSSLOT") => {
            "on a Redis Cluster the key must contain the hash tag of the resource \
             (RedisFence::hash_tag)"
        }
        Some("LOCKSETVERSION") => "the marks have another version, use a newer Lockset",
        Some("LOCKSETMARK") => "the mark is corrupt, restore it",
        Some("WRONGTYPE") => "the key, or that of the marks, is of another type",
        _ => "the server was not reached or refused",
    };
    FenceError::store_error(STORE, what, error)
}
