//! From a URL to an engine; the only file that names every engine.

#[cfg(any(feature = "redis", feature = "etcd", feature = "zookeeper"))]
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::client::{Client, Settings};
use crate::clock::Clock;
use crate::engine::Engine;
use crate::engine::memory::Memory;
use crate::error::{Error, Result};
use crate::keeper::Keeper;
use crate::locks::Lockset;
use crate::token::Token;

/// The engines there are, as their URLs are written.
const ENGINES: &[&str] = &[
    "memory:",
    "local:",
    "local:/path/file.db",
    "redis://host:port",
    "redis+sentinel://host:port,…/service",
    "redis+cluster://host:port,…",
    "redlock://host:port,host:port,host:port,…",
    "etcd://host:port,…/prefix",
    "zk://host:port,…/chroot",
    "rediss://, redlocks://, etcds:// and zks:// for TLS",
];

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
    url: String,
    settings: Settings,
    holder_process: Option<u32>,
}

impl Lockset {
    /// Connects to the engine that `url` names: `local:` (one file in the user's state folder),
    /// `local:/path/file.db`, `memory:` (a new home each time), `memory:LABEL`; `redis://`,
    /// `redis+sentinel://`, `redis+cluster://`, `redlock://`, `etcd://`, `zk://`, or with TLS
    /// `rediss://`, `rediss+sentinel://`, `rediss+cluster://`, `redlocks://`, `etcds://`, `zks://`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a URL that no engine understands, [`Error::Unsupported`] for an
    /// engine that was not compiled in, [`Error::Unreachable`] if there is no answer.
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
        Self { url: url.to_owned(), settings: Settings::default(), holder_process: None }
    }

    /// The default ttl of [`LockOptions`](crate::LockOptions); 30 seconds if not set. Where all
    /// locks of a client share one session, it is the session timeout that is requested.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.settings.ttl = ttl;
        self
    }

    /// The process by whose death an engine that can see it frees the locks of this client,
    /// instead of this one: a guardian that outlives it, say.
    pub fn holder_process(mut self, pid: u32) -> Self {
        self.holder_process = Some(pid);
        self
    }

    /// Metrics carry the lock's name as a label. Only for services with few names.
    pub fn label_names(mut self, yes: bool) -> Self {
        self.settings.label_names = yes;
        self
    }

    /// Connects.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a URL that no engine understands, [`Error::Unsupported`] for an
    /// engine that was not compiled in, [`Error::Unreachable`] if there is no answer.
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
        let url = EngineUrl::parse(&self.url)?;
        let mut settings = self.settings.clone();
        settings.token_base = url.token_base()?;
        // On the keeper's runtime, so that the engine's tasks live and die with the keeper.
        let engine = keeper.runtime().spawn(async move { open(&url, &self).await }).await;
        let engine = engine.map_err(|error| Error::Unreachable {
            engine: "keeper",
            what: "its thread ended while connecting".to_owned(),
            retryable: true,
            source: Some(error.into()),
        })??;
        Ok(Lockset::from_client(Client::new(engine, keeper, settings)))
    }
}

impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The URL may carry a password.
        f.debug_struct("Builder").field("settings", &self.settings).finish_non_exhaustive()
    }
}

async fn open(url: &EngineUrl, how: &Builder) -> Result<Arc<dyn Engine>> {
    match url.scheme.as_str() {
        "memory" => {
            url.allow_options(&[])?;
            Ok(match url.rest.as_str() {
                "" => Arc::new(Memory::new(Clock::boot())),
                label => Arc::new(Memory::shared(label)),
            })
        }
        "local" => open_local(url, how.holder_process),
        "redis" | "rediss" | "redis+sentinel" | "rediss+sentinel" | "redis+cluster"
        | "rediss+cluster" => open_redis(url).await,
        "redlock" | "redlocks" => open_redlock(url).await,
        "etcd" | "etcds" => open_etcd(url).await,
        "zk" | "zks" => open_zookeeper(url, how.settings.ttl).await,
        other => Err(Error::invalid("engine", other, format!("there are {}", known_engines()))),
    }
}

#[cfg(feature = "local")]
fn open_local(url: &EngineUrl, holder_process: Option<u32>) -> Result<Arc<dyn Engine>> {
    use crate::engine::local::{Local, LocalOptions};

    url.allow_options(&["mode"])?;
    let mut options = LocalOptions { holder_process, ..LocalOptions::default() };
    if !url.rest.is_empty() {
        // `local:/path`, `local:///path` and `local:path` all name a file.
        options.path = Some(url.rest.strip_prefix("//").unwrap_or(&url.rest).into());
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
fn open_local(_: &EngineUrl, _: Option<u32>) -> Result<Arc<dyn Engine>> {
    Err(not_compiled_in("local"))
}

#[cfg(feature = "redis")]
async fn open_redis(url: &EngineUrl) -> Result<Arc<dyn Engine>> {
    use crate::engine::redis::{Redis, RedisOptions};

    url.allow_options(&[
        "prefix",
        "replicas",
        "fence_idle",
        "first_lease",
        "courtesy",
        "ca",
        "cert",
        "key",
        "sentinel_login",
    ])?;
    let mut options =
        RedisOptions { url: format!("{}:{}", url.scheme, url.rest), ..redis_options(url)? };
    if let Some(replicas) = url.option("replicas") {
        options.replicas = replicas.parse()?;
    }
    if let Some(idle) = url.option("fence_idle") {
        let days = idle.parse::<u64>().ok().filter(|days| (1..=3650).contains(days));
        let days = days.ok_or_else(|| {
            Error::invalid("fence_idle", idle, "it is a number of days from 1 to 3650")
        })?;
        options.fence_idle = Duration::from_secs(days * 86_400);
    }
    if let Some(longest) = url.duration("first_lease")? {
        options.first_lease = longest;
    }
    options.courtesy = url.duration("courtesy")?;
    options.sentinel_login = url.option("sentinel_login").map(str::to_owned);
    Ok(Arc::new(Redis::connect(options).await?))
}

/// What the URLs of one server and of a quorum have in common.
#[cfg(feature = "redis")]
fn redis_options(url: &EngineUrl) -> Result<crate::engine::redis::RedisOptions> {
    let mut options = crate::engine::redis::RedisOptions::default();
    if let Some(prefix) = url.option("prefix") {
        options.prefix = prefix.to_owned();
    }
    options.ca = url.option("ca").map(Into::into);
    options.client_certificate = url.client_certificate()?;
    Ok(options)
}

#[cfg(feature = "redis")]
async fn open_redlock(url: &EngineUrl) -> Result<Arc<dyn Engine>> {
    use crate::engine::redis::{Quorum, Redis, RedisOptions};
    use crate::engine::redlock::{Redlock, RedlockOptions};

    url.allow_options(&["prefix", "node_timeout", "max_ttl", "ca", "cert", "key"])?;
    let like = redis_options(url)?;
    let mut options = RedlockOptions::default();
    if let Some(longest) = url.duration("max_ttl")? {
        options.max_ttl = longest;
    }
    options.node_timeout = url.duration("node_timeout")?;
    let scheme = if url.scheme == "redlocks" { "rediss" } else { "redis" };
    let rest = url.rest.strip_prefix("//").unwrap_or(&url.rest);
    let (hosts, db) = rest.split_once('/').unwrap_or((rest, ""));
    let quorum = Quorum::new(options.max_ttl);
    let nodes = hosts.split(',').map(|host| {
        let url = format!("{scheme}://{host}/{db}");
        Redis::connect(RedisOptions { url, quorum: Some(quorum.clone()), ..like.clone() })
    });
    let mut engines = Vec::<Arc<dyn Engine>>::new();
    for node in futures_util::future::join_all(nodes).await {
        engines.push(Arc::new(node?));
    }
    let redlock = Redlock::over(engines, options, Clock::boot())?;
    redlock.check().await?;
    Ok(Arc::new(redlock))
}

#[cfg(not(feature = "redis"))]
async fn open_redlock(_: &EngineUrl) -> Result<Arc<dyn Engine>> {
    Err(not_compiled_in("redis"))
}

#[cfg(not(feature = "redis"))]
async fn open_redis(_: &EngineUrl) -> Result<Arc<dyn Engine>> {
    Err(not_compiled_in("redis"))
}

#[cfg(feature = "etcd")]
async fn open_etcd(url: &EngineUrl) -> Result<Arc<dyn Engine>> {
    use crate::engine::etcd::{Etcd, EtcdOptions};

    url.allow_options(&["names", "ca", "cert", "key"])?;
    let raw_names = match url.option("names") {
        None | Some("escaped") => false,
        Some("raw") => true,
        Some(other) => return Err(Error::invalid("names", other, "it is `escaped` or `raw`")),
    };
    let options = EtcdOptions {
        url: format!("{}:{}", url.scheme, url.rest),
        raw_names,
        ca: url.option("ca").map(Into::into),
        client_certificate: url.client_certificate()?,
    };
    Ok(Arc::new(Etcd::connect(options).await?))
}

#[cfg(not(feature = "etcd"))]
async fn open_etcd(_: &EngineUrl) -> Result<Arc<dyn Engine>> {
    Err(not_compiled_in("etcd"))
}

#[cfg(feature = "zookeeper")]
async fn open_zookeeper(url: &EngineUrl, session: Duration) -> Result<Arc<dyn Engine>> {
    use crate::engine::zookeeper::{ZooKeeper, ZooKeeperOptions};

    url.allow_options(&["layout", "names", "ca", "cert", "key"])?;
    let options = ZooKeeperOptions {
        url: format!("{}:{}", url.scheme, url.rest),
        layout: url.option("layout").map(str::parse).transpose()?.unwrap_or_default(),
        raw_names: match url.option("names") {
            None | Some("escaped") => false,
            Some("raw") => true,
            Some(other) => {
                return Err(Error::invalid("names", other, "there are escaped and raw"));
            }
        },
        session,
        ca: url.option("ca").map(Into::into),
        client_certificate: url.client_certificate()?,
    };
    Ok(Arc::new(ZooKeeper::connect(options).await?))
}

#[cfg(not(feature = "zookeeper"))]
async fn open_zookeeper(_: &EngineUrl, _: Duration) -> Result<Arc<dyn Engine>> {
    Err(not_compiled_in("zookeeper"))
}

#[cfg_attr(
    all(feature = "local", feature = "redis", feature = "etcd", feature = "zookeeper"),
    expect(dead_code, reason = "every engine is compiled in")
)]
fn not_compiled_in(engine: &'static str) -> Error {
    let what = format!("being used: it was not compiled in; enable the cargo feature `{engine}`");
    Error::Unsupported { engine, what }
}

fn known_engines() -> String {
    ENGINES.join(", ")
}

/// `scheme:rest?key=value&…`, as far as all engines have it in common.
#[derive(Debug)]
struct EngineUrl {
    scheme: String,
    rest: String,
    options: Vec<(String, String)>,
}

impl EngineUrl {
    fn parse(url: &str) -> Result<Self> {
        // What is before the colon carries no secret; the rest is never repeated.
        let is_word = |scheme: &str| {
            scheme.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.'))
        };
        let Some((scheme, rest)) = url.split_once(':').filter(|(scheme, _)| is_word(scheme)) else {
            let why = format!("an engine's URL begins with one of {}", known_engines());
            return Err(Error::invalid("URL", "(not shown)", why));
        };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let options = query
            .split('&')
            .filter(|option| !option.is_empty())
            .map(|option| {
                let (key, value) = option.split_once('=').unwrap_or((option, ""));
                (key.to_owned(), value.to_owned())
            })
            .collect();
        Ok(Self { scheme: scheme.to_owned(), rest: rest.to_owned(), options })
    }

    fn option(&self, key: &str) -> Option<&str> {
        self.options.iter().find(|(k, _)| k == key).map(|(_, value)| value.as_str())
    }

    /// Refuses options that neither this engine nor all engines know.
    fn allow_options(&self, known: &[&str]) -> Result<()> {
        match self.options.iter().find(|(k, _)| k != "token_base" && !known.contains(&k.as_str())) {
            None => Ok(()),
            Some((key, _)) => {
                let mut all = vec!["token_base"];
                all.extend(known);
                let why = format!("{}: knows {}", self.scheme, all.join(", "));
                Err(Error::invalid("URL option", key, why))
            }
        }
    }

    /// A span of time: `500ms`, `2s`, `1m`.
    #[cfg(feature = "redis")]
    fn duration(&self, key: &'static str) -> Result<Option<Duration>> {
        let Some(text) = self.option(key) else { return Ok(None) };
        let units = [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000)];
        let span = units.into_iter().find_map(|(unit, millis)| {
            let number = text.strip_suffix(unit)?.parse::<u64>().ok()?;
            number.checked_mul(millis).filter(|span| (1..=86_400_000).contains(span))
        });
        let bad = || Error::invalid(key, text, "it is a time such as 500ms, 2s or 1m, up to 24h");
        span.map(Duration::from_millis).map(Some).ok_or_else(bad)
    }

    /// The files of this client's own certificate and its key.
    #[cfg(any(feature = "redis", feature = "etcd", feature = "zookeeper"))]
    fn client_certificate(&self) -> Result<Option<(PathBuf, PathBuf)>> {
        match (self.option("cert"), self.option("key")) {
            (Some(cert), Some(key)) => Ok(Some((cert.into(), key.into()))),
            (None, None) => Ok(None),
            _ => {
                let why = "a certificate and its key go together";
                Err(Error::invalid("URL options", "cert, key", why))
            }
        }
    }

    fn token_base(&self) -> Result<u64> {
        let Some(text) = self.option("token_base") else { return Ok(0) };
        text.parse()
            .ok()
            .filter(|base| *base < Token::MAX.get() / 2)
            .ok_or_else(|| Error::invalid("token_base", text, "it is a number below 2^52"))
    }
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
        assert!(refusal("memory:?ttl=5").await.contains("token_base"));
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
