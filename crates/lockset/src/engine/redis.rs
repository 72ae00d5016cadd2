//! Locks on Redis servers: plain keys, scripts, and a queue that hands over.
//!
//! An exclusive lock is a plain string key, so it excludes, and is excluded by, every lock that is
//! taken with `SET key value NX PX`. Everything else about a name lies beside it in the same hash
//! slot; `redis/common.lua` lists the keys. The parts, in the order in which a claim meets them:
//!
//! * `claims` is the way of one claim; `waiting` the rules by which a queued one may believe that
//!   it holds;
//! * `nodes` finds the server (by `servers`, or by the `slots` of a cluster) and the connection;
//!   `batch` lets requests travel together; `link` keeps a connection, and says what is unknown
//!   after it broke;
//! * `redis/*.lua` decide, on the server and on its clock;
//! * `sure` waits for replicas; `look` shows what is there, `track` what changes, `vitals` how the
//!   server is.
//!
//! # The hand-off
//! A refused claim queues. The release script grants the lock to the first live waiter and writes
//! to the inbox of its process: one waiter woken, already holding. A waiter's place lives for `q` =
//! min(5 s, ttl/2) and is refreshed every q/3, for all waiters of a process at once; a handed-over
//! lock has a first lease of `f` = 2q, confirmed by the first renewal.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use futures_core::stream::BoxStream;
use tokio::sync::mpsc;

use self::claims::check_token;
use self::keys::Keys;
use self::link::Pushed;
use self::nodes::Nodes;
use self::scripts::Scripts;
use self::servers::Servers;
use self::track::WatchList;
pub use self::vitals::Quorum;
use self::waiting::{Waiter, Waiters};
use super::common::watch::told_once;
use super::{
    Amend, Break, Capabilities, Claim, ClaimId, Engine, Event, Grant, Health, Holder, LockState,
    Replicas, Scope, Swap, Version, Wait,
};
use crate::clock::{Clock, Moment};
use crate::error::{Error, LossReason, Result};
use crate::hash::FastMap;
use crate::name::{Name, Prefix};
use crate::sync;
use crate::token::Token;

mod answers;
mod batch;
mod claims;
mod keys;
mod link;
mod look;
mod nodes;
mod scripts;
mod servers;
mod slots;
mod sure;
mod track;
mod vitals;
mod waiting;

const ENGINE: &str = "redis";
/// How long a request waits for its answer, and a connection for itself.
const PATIENCE: Duration = Duration::from_secs(2);
const LEAST_PATIENCE: Duration = Duration::from_millis(50);
/// How long a withdrawn claim is remembered on the server.
const TOMBSTONE_LIFE: Duration = Duration::from_secs(60);
/// What the first lease may be bounded by.
const FIRST_LEASES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(60));
/// After which time of hand-offs a lock may be left free for others.
const COURTESIES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(60));
/// At most this many claims travel in one script.
const BATCH: usize = 100;

/// How a [`Redis`] is connected.
#[derive(Clone)]
pub struct RedisOptions {
    /// `redis://[user:password@]host[:port][/db]` for one server,
    /// `redis+sentinel://[user:password@]host[:port],…/service[/db]` for the master that sentinels
    /// name, `redis+cluster://[user:password@]host[:port],…` for a cluster; `rediss` for TLS.
    pub url: String,
    /// What every key begins with.
    pub prefix: String,
    /// How long after the clock last lifted it a name's fence is forgotten; the clock then keeps
    /// tokens growing.
    pub fence_idle: Duration,
    /// The longest first lease of a lock that is handed to a waiter, and so the longest time that
    /// a waiter who died unseen can cost the others: 10 s unless told, from 0.5 s to 60 s. Half of
    /// it is how long a waiter's place lives without a sign of life; one comes after each sixth.
    pub first_lease: Duration,
    /// For locks that are shared with other libraries, which poll: after this time of hand-offs
    /// without a gap one release leaves the lock free for 150 ms. From 0.2 s to 60 s; `None`:
    /// never.
    pub courtesy: Option<Duration>,
    /// How many replicas must have a grant before it is believed, for locks whose terms do not
    /// say.
    pub replicas: Replicas,
    /// The certificates of the authorities to trust, in PEM; the system's if not given.
    pub ca: Option<PathBuf>,
    /// This client's own certificate and its key, in PEM.
    pub client_certificate: Option<(PathBuf, PathBuf)>,
    /// `user:password` (or `:password`) for the sentinels; those in the URL are for the servers.
    pub sentinel_login: Option<String>,
    /// For a node of a quorum, which may be down when it is connected: what it shares with the
    /// others.
    pub quorum: Option<Arc<Quorum>>,
}

impl std::fmt::Debug for RedisOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The URL may carry a password.
        f.debug_struct("RedisOptions").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

impl Default for RedisOptions {
    fn default() -> Self {
        Self {
            url: "redis://127.0.0.1:6379".to_owned(),
            prefix: "lockset:".to_owned(),
            fence_idle: Duration::from_secs(7 * 86_400),
            first_lease: Duration::from_secs(10),
            courtesy: None,
            replicas: Replicas::None,
            ca: None,
            client_certificate: None,
            sentinel_login: None,
            quorum: None,
        }
    }
}

/// One client of a Redis server, of the master that sentinels name, or of a cluster.
pub struct Redis {
    core: Arc<Core>,
    pulse: tokio::task::AbortHandle,
}

#[derive(Debug)]
struct Core {
    nodes: Nodes,
    scripts: Arc<Scripts>,
    prefix: String,
    identity: String,
    replicas: Replicas,
    clock: Clock,
    waiters: Arc<Waiters>,
    watches: Arc<WatchList>,
    pulse: Pulse,
    /// Claims of which a creating request was not answered: they end with a mark.
    dirty: Mutex<FastMap<ClaimId, ()>>,
    events: Mutex<Option<mpsc::UnboundedReceiver<Event>>>,
}

/// When the task that shows signs of life looks again, and how it is woken before.
#[derive(Debug)]
struct Pulse {
    next: Mutex<Moment>,
    /// Waiters behind a foreign lock that is not tracked yet.
    behind_foreign: Mutex<Vec<ClaimId>>,
    wake: tokio::sync::Notify,
}

impl std::fmt::Debug for Redis {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Redis({})", self.identity())
    }
}

impl Pulse {
    fn new() -> Self {
        let next = Mutex::new(Moment::NEVER);
        Self { next, behind_foreign: Mutex::default(), wake: tokio::sync::Notify::new() }
    }

    /// Makes sure that the next sign of life of this waiter is not forgotten.
    fn by(&self, waiter: &Waiter) {
        let beat_at = waiter.beat_at().unwrap_or(Moment::NEVER);
        let mut next = sync::lock(&self.next);
        if beat_at < *next {
            *next = beat_at;
            self.wake.notify_one();
        }
    }

    /// The foreign lock before this waiter is to be tracked.
    fn await_foreign(&self, id: ClaimId) {
        sync::lock(&self.behind_foreign).push(id);
        self.wake.notify_one();
    }

    fn behind_foreign(&self) -> Vec<ClaimId> {
        std::mem::take(&mut *sync::lock(&self.behind_foreign))
    }
}

impl Redis {
    /// Connects. Must be called inside a tokio runtime, on which the connection then lives.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a URL that is none;
    /// [`Error::Unreachable`] if the server does not answer or refuses
    /// the user.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn connect(options: RedisOptions) -> Result<Self> {
        let servers = Servers::parse(&options)?;
        if options.prefix.len() > 200 || options.prefix.contains(['|', '\n', '\r', '\0']) {
            let why = "it has at most 200 bytes, and no `|` or line ends";
            return Err(Error::invalid("prefix", &options.prefix, why));
        }
        if !(FIRST_LEASES.0..=FIRST_LEASES.1).contains(&options.first_lease) {
            let given = format!("{:?}", options.first_lease);
            return Err(Error::invalid("first_lease", &given, "it is from 500ms to 60s"));
        }
        if options.courtesy.is_some_and(|after| !(COURTESIES.0..=COURTESIES.1).contains(&after)) {
            let given = format!("{:?}", options.courtesy.unwrap_or_default());
            return Err(Error::invalid("courtesy", &given, "it is from 200ms to 60s"));
        }
        let identity = format!("{}?prefix={}", servers.identity(), options.prefix);
        let inbox = format!("{}inbox:{:016x}", options.prefix, rand::random::<u64>());
        let waiters = Arc::new(Waiters::new(options.first_lease));
        let watches = Arc::<WatchList>::default();
        let (tell, events) = mpsc::unbounded_channel();
        let prefix = options.prefix.clone();
        let postman = postman(waiters.clone(), watches.clone(), prefix, tell);
        let scripts = Arc::new(Scripts::new(options.fence_idle, options.courtesy));
        let core = Arc::new(Core {
            nodes: Nodes::open(servers, inbox, postman, scripts.clone()).await?,
            scripts,
            prefix: options.prefix,
            identity,
            replicas: options.replicas,
            clock: Clock::boot(),
            waiters,
            watches,
            pulse: Pulse::new(),
            dirty: Mutex::default(),
            events: Mutex::new(Some(events)),
        });
        let pulse = tokio::spawn(show_life(core.clone())).abort_handle();
        Ok(Self { core, pulse })
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.pulse.abort();
        self.core.watches.close();
        self.core.nodes.close();
    }
}

/// Hands what the server pushes to whom it concerns.
fn postman(
    waiters: Arc<Waiters>,
    watches: Arc<WatchList>,
    prefix: String,
    events: mpsc::UnboundedSender<Event>,
) -> link::Postman {
    let on_message = on_message(waiters.clone(), events);
    Arc::new(move |pushed| match pushed {
        Pushed::Message(letter) => on_message(letter),
        Pushed::Changed(key) => {
            let Ok(key) = str::from_utf8(key) else { return };
            waiters.changed(key);
            if let Some(name) = Keys::name_of(&prefix, key) {
                watches.changed(&name);
            }
        }
        Pushed::Flushed => {
            waiters.all_changed();
            watches.all_changed();
        }
    })
}

/// Messages: `g` id token, `b` id, `r` id, `f` id ms.
fn on_message(
    waiters: Arc<Waiters>,
    events: mpsc::UnboundedSender<Event>,
) -> impl Fn(&[u8]) + Send + Sync {
    let clock = Clock::boot();
    move |letter| {
        let Ok(letter) = std::str::from_utf8(letter) else { return };
        let (Some(kind), Some(id), Some(rest)) =
            (letter.get(..1), letter.get(1..33), letter.get(33..))
        else {
            return;
        };
        let Ok(id) = id.parse::<ClaimId>() else { return };
        match (kind, rest.parse()) {
            ("g", Ok(token)) => {
                if let Some(waiter) = waiters.find(id) {
                    waiter.offered(token);
                }
            }
            ("f", Ok(left)) => {
                if let Some(waiter) = waiters.find(id) {
                    waiter.look_in(clock.now(), Duration::from_millis(left));
                }
            }
            ("b", _) => {
                let _ = events.send(Event::Lost(id, LossReason::Broken));
            }
            ("r", _) => {
                let _ = events.send(Event::Lost(id, LossReason::Revoked));
            }
            _ => {}
        }
    }
}

/// Shows the server that the waiters of this client live: all that are due, in as few requests as
/// fit, and all at once after a new connection.
async fn show_life(core: Arc<Core>) {
    let mut made = core.nodes.made();
    let mut all = false;
    loop {
        let now = core.clock.now();
        for id in core.pulse.behind_foreign() {
            if let Some(waiter) = core.waiters.find(id) {
                tokio::spawn(core.clone().await_foreign(waiter));
            }
        }
        let due = core.waiters.due(now, all);
        due.iter().for_each(|waiter| waiter.beating(now));
        for part in core.together(&due, BATCH, |waiter| &waiter.claim.name) {
            let part: Vec<Arc<Waiter>> = part.into_iter().map(|(_, waiter)| waiter).collect();
            let core = core.clone();
            // Each by itself: a node that is silent must not cost waiters on others their places.
            tokio::spawn(async move { core.beat(&part).await });
        }
        let next = {
            // Locked before it is known, or a waiter who comes now would compare with the last one.
            let mut next = sync::lock(&core.pulse.next);
            *next = core.waiters.next_beat();
            *next
        };
        all = tokio::select! {
            () = core.pulse.wake.notified() => false,
            () = core.clock.sleep_until(next) => false,
            changed = made.changed() => {
                if changed.is_err() {
                    return;
                }
                core.waiters.forget_changes();
                core.watches.all_changed();
                true
            }
        };
    }
}

impl Core {
    fn keys(&self, name: &Name) -> Keys {
        Keys::new(&self.prefix, name)
    }

    fn dirty(&self) -> MutexGuard<'_, FastMap<ClaimId, ()>> {
        sync::lock(&self.dirty)
    }

    fn check_name(&self, name: &Name) -> Result<()> {
        let begins_alike = self.prefix.is_empty() || self.prefix.starts_with('{');
        if !begins_alike || !self.keys(name).looks_like_another() {
            return Ok(());
        }
        let why = "with this prefix it would be taken for a key beside another lock";
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
            min_ttl: Duration::from_millis(200),
            max_ttl: Duration::from_secs(7 * 86_400),
        }
    }

    fn identity(&self) -> String {
        self.core.identity.clone()
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        self.core.acquire(claim, wait).await
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        self.core.renew(batch).await
    }

    async fn raise(&self, claim: &Claim, grant: &Grant, to: Token) -> Result<Grant> {
        check_token(to)?;
        self.core.amend(claim, grant, "raise", &to.to_string()).await?;
        Ok(Grant { token: to, ..grant.clone() })
    }

    async fn amend(&self, claim: &Claim, grant: &Grant, to: Amend) -> Result<Grant> {
        match to {
            Amend::Downgrade => self.core.amend(claim, grant, "downgrade", "").await?,
            Amend::Note(note) => {
                let note = keys::written_note(&note, &self.core.inbox_of(claim).await?);
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
        self.core.leave(claim).await
    }

    fn watch(&self, scope: &Scope) -> BoxStream<'static, Result<LockState>> {
        self.core.watch(scope)
    }

    async fn inspect(&self, name: &Name) -> Result<LockState> {
        self.core.look(name).await
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

    async fn health(&self) -> Result<Health> {
        self.core.health().await
    }

    async fn close(&self) {
        self.pulse.abort();
        self.core.watches.close();
        self.core.nodes.close();
    }
}
