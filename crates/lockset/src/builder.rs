//! From a URL to an engine; the only file that names every engine.

use std::sync::Arc;
use std::time::Duration;

use crate::client::{Client, Settings};
use crate::clock::Clock;
use crate::engine::Engine;
use crate::engine::memory::Memory;
use crate::error::{Error, Result};
use crate::keeper::Keeper;
use crate::locks::Lockset;
use crate::url::{Url, known_engines, not_a_url};

/// How to connect, where a URL alone does not say it. Made by [`Lockset::builder`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockset::Result<()> {
/// use std::time::Duration;
/// use lockset::Lockset;
///
/// let locks = Lockset::builder("memory:").ttl(Duration::from_secs(10)).connect().await?;
/// # locks.close().await }
/// ```
#[derive(Clone)]
pub struct Builder {
    /// `None` if it was invalid.
    url: Option<Url>,
    /// The default ttl, if it is not that of the URL.
    ttl: Option<Duration>,
    label_names: bool,
    holder_process: Option<u32>,
    #[cfg(feature = "redis")]
    redis_client: Option<redis::Client>,
    #[cfg(feature = "postgres")]
    postgres: Option<Box<tokio_postgres::Config>>,
}

impl Lockset {
    /// Connects to the engine that `url` names: `local:` (one file in the user's state folder),
    /// `local:/path/file.db`, `memory:` (a new home each time), `memory:LABEL`; `redis://`,
    /// `redis+sentinel://`, `redis+cluster://`, `redlock://`, `etcd://`, `zk://`, or with TLS
    /// `rediss://`, `rediss+sentinel://`, `rediss+cluster://`, `redlocks://`, `etcds://`, `zks://`;
    /// `postgres://`, with TLS unless the server is on the same machine.
    ///
    /// Every URL may have the options `ttl=5s`, the default ttl, and `token_base=`, which is added
    /// to every token: `redis://host?ttl=5s`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a URL that no engine understands, [`Error::Unsupported`] for an
    /// engine that was not compiled in, [`Error::Unreachable`] if it does not reply.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn connect(url: &str) -> Result<Self> {
        Self::builder(url).connect().await
    }

    /// Like [`connect`](Lockset::connect), with more to choose.
    pub fn builder(url: &str) -> Builder {
        Builder::new(url)
    }
}

impl Builder {
    fn new(url: &str) -> Self {
        Self::with_url(url.parse().ok())
    }

    fn with_url(url: Option<Url>) -> Self {
        Self {
            url,
            ttl: None,
            label_names: false,
            holder_process: None,
            #[cfg(feature = "redis")]
            redis_client: None,
            #[cfg(feature = "postgres")]
            postgres: None,
        }
    }

    /// Connects as the environment says, which is what the `lockset` command does: to the URL in
    /// `LOCKSET_URL`, or to `local:` if that is not set, with the password in the file that
    /// `LOCKSET_PASSWORD_FILE` names, or in `LOCKSET_PASSWORD`.
    ///
    /// ```no_run
    /// # async fn example() -> lockset::Result<()> {
    /// use lockset::Builder;
    ///
    /// let locks = Builder::from_env()?.connect().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if a variable, the file or the URL is invalid.
    pub fn from_env() -> Result<Self> {
        Url::from_env().map(Self::from)
    }

    /// Connects to the server of a Redis client that a service already has: its address, login and
    /// TLS. Lockset opens connections of its own, because it needs other settings for them.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// use lockset::Builder;
    ///
    /// let client = redis::Client::open("redis://worker:s3cret@cache.example/2")?;
    /// let locks = Builder::redis_client(&client).option("prefix", "shop:").connect().await?;
    /// # Ok(()) }
    /// ```
    #[cfg(feature = "redis")]
    pub fn redis_client(client: &redis::Client) -> Self {
        let url = Url::new("redis", "//of-the-client");
        Self { redis_client: Some(client.clone()), ..Self::with_url(Some(url)) }
    }

    /// Connects to the database of a PostgreSQL configuration that a service already has: its
    /// servers, login and database. Lockset opens connections of its own, because a lock must not
    /// wait for a pool. A configuration that requires TLS gets it verified, unless the option
    /// `sslmode` says otherwise.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// use lockset::Builder;
    ///
    /// let config = "postgres://shop:s3cret@db.example/shop".parse()?;
    /// let locks = Builder::postgres(&config).option("schema", "shop_locks").connect().await?;
    /// # Ok(()) }
    /// ```
    #[cfg(feature = "postgres")]
    pub fn postgres(config: &tokio_postgres::Config) -> Self {
        let url = Url::new("postgres", "//of-the-configuration");
        Self { postgres: Some(Box::new(config.clone())), ..Self::with_url(Some(url)) }
    }

    /// Sets an option of the URL: `option("prefix", "shop:")` is `?prefix=shop:`.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> lockset::Result<()> {
    /// use lockset::Lockset;
    ///
    /// let locks = Lockset::builder("memory:").option("ttl", "5s").connect().await?;
    /// # locks.close().await }
    /// ```
    pub fn option(mut self, key: &str, value: &str) -> Self {
        if let Some(url) = &mut self.url {
            url.set_option(key, value);
        }
        self
    }

    /// The default ttl of [`LockOptions`](crate::LockOptions), in place of the URL's `ttl=`; 30
    /// seconds if neither is set. Where all locks of a client share one session, it is the session
    /// timeout that is requested.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// The process by whose death an engine that can see it frees the locks of this client,
    /// instead of this one: a guardian that outlives it, say.
    pub fn holder_process(mut self, pid: u32) -> Self {
        self.holder_process = Some(pid);
        self
    }

    /// Metrics carry the lock's name as a label. Only for services with few names.
    #[cfg(feature = "metrics")]
    pub fn label_names(mut self, yes: bool) -> Self {
        self.label_names = yes;
        self
    }

    /// Connects.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a URL that no engine understands, [`Error::Unsupported`] for an
    /// engine that was not compiled in, [`Error::Unreachable`] if it does not reply.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn connect(self) -> Result<Lockset> {
        self.connect_on(Self::keeper()?).await
    }

    pub(crate) fn keeper() -> Result<Keeper> {
        Keeper::new(Clock::boot())
    }

    pub(crate) async fn connect_on(self, keeper: Keeper) -> Result<Lockset> {
        let url = self.url.clone().ok_or_else(not_a_url)?;
        let mut settings = Settings { token_base: url.token_base()?, ..Settings::default() };
        settings.label_names = self.label_names;
        settings.ttl = self.ttl.or(url.ttl()?).unwrap_or(settings.ttl);
        let session = settings.ttl;
        // On the keeper's runtime, so that the engine's tasks live and die with the keeper.
        let engine = keeper.runtime().spawn(async move { open(url, &self, session).await }).await;
        let engine = engine.map_err(|error| Error::Unreachable {
            engine: "keeper",
            what: "its thread ended while connecting".to_owned(),
            retryable: true,
            source: Some(Arc::new(error)),
        })??;
        Ok(Lockset::from_client(Client::new(engine, keeper, settings)))
    }
}

impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The URL may contain a password.
        f.debug_struct("Builder").field("ttl", &self.ttl).finish_non_exhaustive()
    }
}

impl From<Url> for Builder {
    fn from(url: Url) -> Self {
        Self::with_url(Some(url))
    }
}

/// `session` is the default ttl.
async fn open(url: Url, builder: &Builder, session: Duration) -> Result<Arc<dyn Engine>> {
    match url.scheme() {
        "memory" => {
            url.allow_options(&[])?;
            Ok(match url.rest() {
                "" => Arc::new(Memory::new(Clock::boot())),
                label => Arc::new(Memory::shared(label)),
            })
        }
        "local" => open_local(&url, builder.holder_process),
        "redis" | "rediss" | "redis+sentinel" | "rediss+sentinel" | "redis+cluster"
        | "rediss+cluster" => open_redis(url, builder).await,
        "redlock" | "redlocks" => open_redlock(&url).await,
        "etcd" | "etcds" => open_etcd(url).await,
        "zk" | "zks" => open_zookeeper(url, session).await,
        "postgres" | "postgresql" => open_postgres(url, builder).await,
        other => Err(Error::invalid("engine", other, format!("there are {}", known_engines()))),
    }
}

#[cfg(feature = "local")]
fn open_local(url: &Url, holder_process: Option<u32>) -> Result<Arc<dyn Engine>> {
    use crate::engine::local::{Local, LocalOptions};

    url.allow_options(&["mode"])?;
    let mut options = LocalOptions { holder_process, ..LocalOptions::default() };
    if !url.rest().is_empty() {
        // `local:/path`, `local:///path` and `local:path` all name a file.
        options.path = Some(url.rest().strip_prefix("//").unwrap_or(url.rest()).into());
    }
    if let Some(mode) = url.option("mode") {
        options.mode = u32::from_str_radix(mode, 8)
            .ok()
            .filter(|bits| bits & !0o666 == 0 && bits & 0o600 == 0o600)
            .ok_or_else(|| {
                let why = "it is read and write permissions in octal, such as 600 or 660";
                Error::invalid("file mode", mode, why)
            })?;
    }
    Ok(Arc::new(Local::open(options)?))
}

#[cfg(not(feature = "local"))]
fn open_local(_: &Url, _: Option<u32>) -> Result<Arc<dyn Engine>> {
    Err(not_compiled_in("local"))
}

#[cfg(feature = "redis")]
async fn open_redis(url: Url, builder: &Builder) -> Result<Arc<dyn Engine>> {
    use crate::engine::redis::{Redis, RedisOptions};

    let client = builder.redis_client.clone();
    let options = RedisOptions { client, ..RedisOptions::from_url(url)? };
    Ok(Arc::new(Redis::connect(options).await?))
}

#[cfg(feature = "redis")]
async fn open_redlock(url: &Url) -> Result<Arc<dyn Engine>> {
    use crate::engine::FencedNode;
    use crate::engine::redis::{Quorum, Redis, RedisOptions};
    use crate::engine::redlock::{Redlock, RedlockOptions};

    let own = ["prefix", "node_timeout", "max_ttl"];
    url.allow_options(&[&own[..], &crate::tls::OPTIONS].concat())?;
    let mut options = RedlockOptions::default();
    if let Some(longest) = url.duration("max_ttl")? {
        options.max_ttl = longest;
    }
    options.node_timeout = url.duration("node_timeout")?;
    let nodes = RedisOptions::of_nodes(url, &Quorum::new(options.max_ttl))?;
    let mut engines = Vec::<Arc<dyn FencedNode>>::new();
    for node in futures_util::future::join_all(nodes.into_iter().map(Redis::connect)).await {
        engines.push(Arc::new(node?));
    }
    let redlock = Redlock::over(engines, options, Clock::boot())?;
    redlock.check().await?;
    Ok(Arc::new(redlock))
}

#[cfg(not(feature = "redis"))]
async fn open_redlock(_: &Url) -> Result<Arc<dyn Engine>> {
    Err(not_compiled_in("redis"))
}

#[cfg(not(feature = "redis"))]
async fn open_redis(_: Url, _: &Builder) -> Result<Arc<dyn Engine>> {
    Err(not_compiled_in("redis"))
}

#[cfg(feature = "etcd")]
async fn open_etcd(url: Url) -> Result<Arc<dyn Engine>> {
    use crate::engine::etcd::{Etcd, EtcdOptions};

    Ok(Arc::new(Etcd::connect(EtcdOptions::from_url(url)?).await?))
}

#[cfg(not(feature = "etcd"))]
async fn open_etcd(_: Url) -> Result<Arc<dyn Engine>> {
    Err(not_compiled_in("etcd"))
}

#[cfg(feature = "zookeeper")]
async fn open_zookeeper(url: Url, session: Duration) -> Result<Arc<dyn Engine>> {
    use crate::engine::zookeeper::{ZooKeeper, ZooKeeperOptions};

    let options = ZooKeeperOptions { session, ..ZooKeeperOptions::from_url(url)? };
    Ok(Arc::new(ZooKeeper::connect(options).await?))
}

#[cfg(not(feature = "zookeeper"))]
async fn open_zookeeper(_: Url, _: Duration) -> Result<Arc<dyn Engine>> {
    Err(not_compiled_in("zookeeper"))
}

#[cfg(feature = "postgres")]
async fn open_postgres(url: Url, builder: &Builder) -> Result<Arc<dyn Engine>> {
    use crate::engine::postgres::{Postgres, PostgresOptions};

    let config = builder.postgres.as_deref().cloned();
    let options = PostgresOptions { config, ..PostgresOptions::from_url(url)? };
    Ok(Arc::new(Postgres::connect(options).await?))
}

#[cfg(not(feature = "postgres"))]
async fn open_postgres(_: Url, _: &Builder) -> Result<Arc<dyn Engine>> {
    Err(not_compiled_in("postgres"))
}

#[cfg_attr(
    all(
        feature = "local",
        feature = "redis",
        feature = "etcd",
        feature = "postgres",
        feature = "zookeeper"
    ),
    expect(dead_code, reason = "every engine is compiled in")
)]
fn not_compiled_in(engine: &'static str) -> Error {
    let what = format!("being used: it was not compiled in; enable the cargo feature `{engine}`");
    Error::Unsupported { engine, what }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn refusal(url: &str) -> String {
        Lockset::connect(url).await.unwrap_err().to_string()
    }

    #[tokio::test]
    async fn unknown_schemes_and_options_are_refused_with_what_there_is() {
        assert!(refusal("consul://x").await.contains("local:"));
        assert!(refusal("nonsense").await.contains("memory:"));
        assert!(refusal("memory:?lease=5").await.contains("token_base"));
        assert!(refusal("memory:?ttl=5").await.contains("500ms, 2s or 1m"));
        assert!(refusal("memory:?token_base=-1").await.contains("token_base"));
    }

    #[tokio::test]
    async fn a_url_with_a_password_is_never_repeated() {
        for url in ["consul://user:hunter2@host/", "//hunter2@host:1", "hunter2@host:1/x"] {
            let text = refusal(url).await;
            assert!(!text.contains("hunter2"), "{text}");
        }
        let builder = format!("{:?}", Lockset::builder("x://user:hunter2@host/"));
        assert!(!builder.contains("hunter2"), "{builder}");
    }

    #[cfg(not(feature = "local"))]
    #[tokio::test]
    async fn an_engine_that_is_not_compiled_in_names_its_feature() {
        assert!(refusal("local:").await.contains("cargo feature `local`"));
    }

    #[tokio::test]
    async fn the_url_has_a_default_ttl_that_the_builder_replaces() {
        for (builder, ttl) in [
            (Lockset::builder("memory:"), 30),
            (Lockset::builder("memory:?ttl=5s"), 5),
            (Lockset::builder("memory:").option("ttl", "6s"), 6),
            (Lockset::builder("memory:?ttl=5s").ttl(Duration::from_secs(7)), 7),
        ] {
            let locks = builder.connect().await.unwrap();
            let guard = locks.mutex("m").unwrap().lock().await.unwrap();
            assert_eq!(guard.ttl(), Duration::from_secs(ttl));
        }
    }

    /// The test runs itself in processes with another environment.
    #[tokio::test]
    async fn the_environment_says_where_to_connect() {
        const NAME: &str = "builder::tests::the_environment_says_where_to_connect";
        if let Ok(expected) = std::env::var("EXPECTED_HOME") {
            let home = match Builder::from_env() {
                Ok(builder) => builder.connect().await.unwrap().home().to_owned(),
                Err(error) => error.to_string(),
            };
            assert!(home.contains(&expected) && !home.contains("hunter2"), "{home}");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("password");
        std::fs::write(&file, "hunter2\n").unwrap();
        let file = file.to_str().unwrap();
        for (url, password, password_file, expected) in [
            ("memory:env-test", "", "", "memory:env-test"),
            ("memory:env-test", "hunter2", "", "takes no password"),
            ("redis://me:hunter2@h", "", file, "has a password already"),
            ("redis://me@h", "hunter2", "/does/not/exist", "/does/not/exist"),
            ("nonsense", "", "", "begins with one of"),
        ] {
            let mut test = std::process::Command::new(std::env::current_exe().unwrap());
            test.args(["--exact", NAME]).env("EXPECTED_HOME", expected);
            test.env("LOCKSET_URL", url).env("LOCKSET_PASSWORD", password);
            test.env("LOCKSET_PASSWORD_FILE", password_file);
            let output = test.output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success() && text.contains("1 passed"), "{text}");
        }
    }

    #[tokio::test]
    async fn a_home_names_what_its_tokens_are_counted_from() {
        let home = |url: &'static str| async move {
            Lockset::connect(url).await.unwrap().home().to_owned()
        };
        assert_eq!(home("memory:home-test").await, "memory:home-test");
        assert_eq!(home("memory:home-test?token_base=7").await, "memory:home-test?token_base=7");
    }

    #[tokio::test]
    async fn the_token_base_lifts_every_token() {
        let plain = Lockset::connect("memory:base-test").await.unwrap();
        let lifted =
            Lockset::connect("memory:base-test?token_base=1000000000000000").await.unwrap();
        let guard = lifted.mutex("m").unwrap().lock().await.unwrap();
        let seen = plain.inspect("m").await.unwrap().holders[0].token.unwrap();
        assert_eq!(guard.token().get(), seen.get() + 1_000_000_000_000_000);
        let shown = lifted.inspect("m").await.unwrap().holders[0].token.unwrap();
        assert_eq!(shown, guard.token());
    }
}
