//! Locks on Redis servers: plain keys, scripts, and a queue with hand-off.
//!
//! An exclusive lock is a plain string key, so it excludes, and is excluded by, every lock that is
//! taken with `SET key value NX PX`. Everything else about a name is in auxiliary keys in the same
//! hash slot; `redis/common.lua` lists them. The parts, in the order in which a claim meets them:
//!
//! * `acquire` requests a lock and waits for it; `common::waiters` has the rules by which a queued
//!   claim may assume that it holds the lock; `waiters` also tracks locks of other libraries;
//!   `heartbeat` keeps a queue entry alive;
//! * `renew` renews leases, and changes what is stored for a held lock; `release` releases and
//!   withdraws; `wait_replicas` waits for replicas;
//! * `inspect` shows what is stored, `watch` what changes; `cells` serve latches and barriers;
//!   `health` reports how the server is;
//! * `request` sends what they need: `routing` finds the node (in a `cluster` by its `slots`) and
//!   the connection; `batch` puts requests together into one script;
//! * `connect` reads the URL; `reconnect` opens connections and replaces broken ones; `connection`
//!   is one of them; `push` handles what the server pushes; `error` says whether a failed request
//!   may have been executed;
//! * `keys`, `record` and `reply` are the formats; `scripts` are `redis/*.lua`, which decide, on
//!   the server and by its clock.
//!
//! # The hand-off
//! A claim that finds the lock held is queued. The release script grants the lock to the first live
//! waiter and publishes that to the inbox of its process: one waiter is woken, and already holds
//! the lock. A queue entry lives for `q` = min(5 s, ttl/2). Heartbeats refresh it every q/3, for
//! all waiters of a process at once. A handed-over lock has a first lease of `f` = 2q; the first
//! renewal confirms it. `docs/redis-handoff.md` has the rules.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use futures_core::stream::BoxStream;
use tokio::sync::mpsc;

use self::acquire::check_token;
use self::connect::RedisServers;
pub use self::health::Quorum;
use self::heartbeat::{HeartbeatSchedule, run_heartbeats};
use self::keys::RedisKeys;
use self::push::on_push;
use self::routing::RedisRouter;
use self::scripts::Scripts;
use self::waiters::RedisWaiters;
use self::watch::WatchList;
use super::common::hints::told_once;
use super::common::tombstones::TOMBSTONE_LIFE;
use super::common::waiters::FIRST_LEASE_RANGE;
use super::{
    Admission, Amend, Break, Capabilities, Claim, ClaimId, Engine, Event, FencedNode, Grant,
    Health, Hint, Holder, LockState, Renewal, Replicas, Scope, Swap, Version, Wait,
};
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::hash::FastMap;
use crate::name::{Name, Prefix};
use crate::sync;
use crate::tls::TlsOptions;
use crate::token::Token;
use crate::url::Url;

mod acquire;
mod batch;
mod cells;
mod cluster;
mod connect;
mod connection;
mod error;
mod health;
mod heartbeat;
mod inspect;
mod keys;
#[cfg(any(test, fuzzing))]
pub(crate) mod malformed;
mod push;
mod reconnect;
mod record;
mod release;
mod renew;
mod reply;
mod request;
mod routing;
mod scripts;
mod slots;
mod text;
mod wait_replicas;
mod waiters;
mod watch;

const ENGINE: &str = "redis";
/// The time in which a request must have its reply, including the wait for a connection.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// The shortest timeout of a request, however little time the caller has left.
const MIN_REQUEST_TIMEOUT: Duration = Duration::from_millis(50);
/// The range of `courtesy`.
const COURTESY_RANGE: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(60));
/// Maximum claims per batch or heartbeat script.
const MAX_BATCH: usize = 100;

/// How a [`Redis`] is connected.
#[derive(Clone)]
pub struct RedisOptions {
    /// `redis://[user:password@]host[:port][/db]` for one server,
    /// `redis+sentinel://[user:password@]host[:port],…/service[/db]` for the master that the
    /// sentinels name, `redis+cluster://[user:password@]host[:port],…` for a cluster; `rediss` for
    /// TLS.
    pub url: Url,
    /// A client whose address, login and TLS are used instead of those of the URL.
    pub client: Option<redis::Client>,
    /// The prefix of every key.
    pub prefix: String,
    /// How long the fence of a name is kept after it was last set from the clock. When it is gone,
    /// the clock keeps tokens growing.
    pub fence_idle: Duration,
    /// The longest first lease of a lock that is handed to a waiter, and so the longest time that a
    /// waiter that died unnoticed can cost the others: 10 s by default, from 0.5 s to 60 s. A
    /// waiter's queue entry lives for half of it without a heartbeat; heartbeats are sent after
    /// each sixth of it.
    pub first_lease: Duration,
    /// For locks that are shared with other libraries, which poll: after this time of hand-offs
    /// without a gap, one release leaves the lock free for 150 ms. From 0.2 s to 60 s; `None`:
    /// never.
    pub courtesy: Option<Duration>,
    /// How many replicas must have a grant before it counts, for locks whose options do not say.
    pub replicas: Replicas,
    /// The certificates to use.
    pub tls: TlsOptions,
    /// `user:password` (or `:password`) for the sentinels; those in the URL are for the servers.
    pub sentinel_login: Option<String>,
    /// For a node of a quorum, which may be down at first: what it shares with the other nodes.
    pub quorum: Option<Arc<Quorum>>,
    /// For the benchmark of what each is worth.
    #[doc(hidden)]
    pub shortcuts: RedisShortcuts,
}

/// What only makes the engine faster. The benchmark switches each off.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RedisShortcuts {
    /// Requests that were made while another was in flight are sent in one script.
    pub batches: bool,
    /// Scripts try the usual case before they define their functions.
    pub fast_paths: bool,
    /// A token is not stored in the lock until a claim queues.
    pub late_tokens: bool,
}

impl Default for RedisShortcuts {
    fn default() -> Self {
        Self { batches: true, fast_paths: true, late_tokens: true }
    }
}

impl std::fmt::Debug for RedisOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The URL may contain a password.
        f.debug_struct("RedisOptions").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

impl Default for RedisOptions {
    fn default() -> Self {
        Self {
            url: Url::new("redis", "//127.0.0.1:6379"),
            client: None,
            prefix: "lockset:".to_owned(),
            fence_idle: Duration::from_secs(7 * 86_400),
            first_lease: Duration::from_secs(10),
            courtesy: None,
            replicas: Replicas::None,
            tls: TlsOptions::default(),
            sentinel_login: None,
            quorum: None,
            shortcuts: RedisShortcuts::default(),
        }
    }
}

/// One client of a Redis server, of the master that the sentinels name, or of a cluster.
pub struct Redis {
    core: Arc<RedisCore>,
    heartbeat_task: tokio::task::AbortHandle,
}

#[derive(Debug)]
struct RedisCore {
    router: RedisRouter,
    scripts: Arc<Scripts>,
    prefix: String,
    identity: String,
    replicas: Replicas,
    clock: Clock,
    waiters: Arc<RedisWaiters>,
    watches: Arc<WatchList>,
    heartbeats: HeartbeatSchedule,
    /// Claims with a creating request that got no reply: they end with a tombstone.
    dirty: Mutex<FastMap<ClaimId, ()>>,
    events: Mutex<Option<mpsc::UnboundedReceiver<Event>>>,
}

impl std::fmt::Debug for Redis {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Redis({})", self.identity())
    }
}

impl Redis {
    /// Connects. Must be called inside a tokio runtime, on which the connection then lives.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the URL or an option is invalid;
    /// [`Error::Unreachable`] if the server does not reply or refuses the user.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn connect(options: RedisOptions) -> Result<Self> {
        let servers = RedisServers::new(&options)?;
        if options.prefix.len() > 200 || options.prefix.contains(['|', '\n', '\r', '\0']) {
            let why = "it has at most 200 bytes, and no `|` or line ends";
            return Err(Error::invalid("prefix", &options.prefix, why));
        }
        if !(FIRST_LEASE_RANGE.0..=FIRST_LEASE_RANGE.1).contains(&options.first_lease) {
            let given = format!("{:?}", options.first_lease);
            return Err(Error::invalid("first_lease", &given, "it is from 500ms to 60s"));
        }
        let courtesy_range = COURTESY_RANGE.0..=COURTESY_RANGE.1;
        if options.courtesy.is_some_and(|after| !courtesy_range.contains(&after)) {
            let given = format!("{:?}", options.courtesy.unwrap_or_default());
            return Err(Error::invalid("courtesy", &given, "it is from 200ms to 60s"));
        }
        let identity = format!("{}?prefix={}", servers.identity(), options.prefix);
        let inbox = format!("{}inbox:{:016x}", options.prefix, rand::random::<u64>());
        let waiters = Arc::new(RedisWaiters::new(options.first_lease));
        let watches = Arc::<WatchList>::default();
        let (sender, events) = mpsc::unbounded_channel();
        let on_push = on_push(waiters.clone(), watches.clone(), options.prefix.clone(), sender);
        let scripts = Arc::new(Scripts::new(&options));
        let core = Arc::new(RedisCore {
            router: RedisRouter::open(servers, inbox, on_push, scripts.clone()).await?,
            scripts,
            prefix: options.prefix,
            identity,
            replicas: options.replicas,
            clock: Clock::boot(),
            waiters,
            watches,
            heartbeats: HeartbeatSchedule::new(),
            dirty: Mutex::default(),
            events: Mutex::new(Some(events)),
        });
        let heartbeat_task = tokio::spawn(run_heartbeats(core.clone())).abort_handle();
        Ok(Self { core, heartbeat_task })
    }

    /// Ends all tasks and connections.
    fn shut_down(&self) {
        self.heartbeat_task.abort();
        self.core.watches.close();
        self.core.router.close();
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.shut_down();
    }
}

impl RedisCore {
    fn keys(&self, name: &Name) -> RedisKeys {
        RedisKeys::new(&self.prefix, name)
    }

    fn dirty(&self) -> MutexGuard<'_, FastMap<ClaimId, ()>> {
        sync::lock(&self.dirty)
    }

    fn check_name(&self, name: &Name) -> Result<()> {
        let may_be_ambiguous = self.prefix.is_empty() || self.prefix.starts_with('{');
        if !may_be_ambiguous || !self.keys(name).is_ambiguous() {
            return Ok(());
        }
        let why = "with this prefix it would be taken for a key of another lock";
        Err(Error::invalid("lock name", name.as_str(), why))
    }
}

#[async_trait]
impl Engine for Redis {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            engine: ENGINE,
            shared: true,
            permits: true,
            cells: true,
            sees_death: false,
            pushes: true,
            durable: true,
            replicas: true,
            session: None,
            shared_lease: false,
            min_ttl: Duration::from_millis(200),
            max_ttl: Duration::from_secs(7 * 86_400),
        }
    }

    fn identity(&self) -> String {
        self.core.identity.clone()
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        Admission::from_inner(self.core.acquire(claim, wait).await)
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        let replies = self.core.renew(batch).await;
        replies.into_iter().map(Renewal::from_inner).collect()
    }

    async fn amend(&self, claim: &Claim, grant: &Grant, to: Amend) -> Result<Grant> {
        match to {
            Amend::Downgrade => self.core.amend(claim, grant, "downgrade", "").await?,
            Amend::Note(note) => {
                let note = record::encode_note(&note, &self.core.inbox_of(claim).await?);
                self.core.amend(claim, grant, "note", &note).await?;
            }
        }
        Ok(grant.clone())
    }

    async fn adopt(&self, claim: &Claim, grant: &Grant, successor: &Claim) -> Result<Grant> {
        self.core.adopt(claim, grant, successor).await
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        self.core.release(claim, grant, next).await
    }

    async fn withdraw(&self, claim: &Claim) -> Result<()> {
        self.core.withdraw(claim).await
    }

    fn hints(&self, scope: &Scope) -> BoxStream<'static, Result<Hint>> {
        self.core.hints(scope)
    }

    async fn inspect(&self, name: &Name) -> Result<LockState> {
        self.core.inspect(name).await
    }

    async fn list(&self, prefix: &Prefix) -> Result<Vec<LockState>> {
        self.core.list(prefix).await
    }

    async fn cell(&self, name: &Name, expect: Version, value: Option<Vec<u8>>) -> Result<Swap> {
        self.core.cell(name, expect, value).await
    }

    async fn force_release(&self, name: &Name, how: Break) -> Result<Vec<Holder>> {
        self.core.force_release(name, how).await
    }

    fn events(&self) -> BoxStream<'static, Event> {
        told_once(sync::lock(&self.core.events).take())
    }

    async fn close(&self) {
        self.shut_down();
    }

    fn as_fenced_node(&self) -> Option<&dyn FencedNode> {
        Some(self)
    }
}

#[async_trait]
impl FencedNode for Redis {
    async fn raise(&self, claim: &Claim, grant: &Grant, to: Token) -> Result<Grant> {
        check_token(to)?;
        self.core.amend(claim, grant, "raise", &to.to_string()).await?;
        Ok(Grant { token: to, ..grant.clone() })
    }

    async fn health(&self) -> Result<Health> {
        self.core.health().await
    }
}
