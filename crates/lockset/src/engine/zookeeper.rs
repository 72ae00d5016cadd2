//! Locks on ZooKeeper: ephemeral sequential nodes, in the layout of Curator or kazoo.
//!
//! A claim is a node below its name's node, numbered by the server. The lowest holds, and each of
//! the others watches the one before it. The nodes of a client belong to its session, so the
//! session is the lease of all its locks. The parts, in the order in which a claim meets them:
//!
//! * `connect` parses the URL; `client` is a ZooKeeper client that knows nothing of locks;
//! * `acquire` gets a claim its node; `paths` and `layout` name it and define the order; `record`
//!   is what is stored there; `claim_table` keeps track of the claims of this client;
//! * `admission` decides from the queue which claims are admitted, and what the others wait for;
//!   `wait` does the waiting;
//! * `renew`, `adopt` and `amend` concern a lock that is held; `events` handles the events of
//!   sessions, losses among them;
//! * `release` deletes the node;
//! * `inspect` and `watch` show what is stored; `cells` stores what outlives its writer.
//!
//! # A create whose reply is lost
//! A claim's id is part of its node's name. After a lost connection the session is taken over by a
//! new connection, a `sync` is sent and the parent's children are listed. That settles it. If the
//! same server had read the old request, it is before the `sync` in that server's queue. If it had
//! not read it, the request is gone with the old connection. And the leader refuses requests that
//! come through another server once the session has moved. So the node is in the list, or it will
//! never exist.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use futures_core::stream::BoxStream;
use tokio::sync::mpsc;

use self::claim_table::ClaimTable;
use self::client::{
    Acl, ConnectRequest, CreateMode, ENGINE, ServerList, Session, SessionEvent, ZkErrorCode,
    ZkRequestError, event_sink, unreachable_error,
};
use self::paths::NodePaths;
use self::watch::NameWatchers;
use super::common::hints::told_once;
use super::{
    Admission, Amend, Break, Capabilities, Claim, Engine, Event, Grant, Hint, Holder, LockState,
    Renewal, Scope, Swap, Version, Wait,
};
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::name::{Name, Prefix};
use crate::sync;
use crate::tls::TlsOptions;
use crate::url::Url;

pub use self::layout::Layout;
pub use self::record::ZooKeeperOwnership;

mod acquire;
mod admission;
mod adopt;
mod amend;
mod cells;
mod claim_table;
mod client;
mod connect;
mod events;
mod inspect;
mod layout;
#[cfg(any(test, fuzzing))]
pub(crate) mod malformed;
mod paths;
mod record;
mod release;
mod renew;
mod wait;
mod watch;

/// How long a caller without a node in the queue waits for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How a [`ZooKeeper`] is connected.
#[derive(Clone)]
pub struct ZooKeeperOptions {
    /// `zk://[user:password@]host[:port],…[/chroot]`; `zks` for TLS. The user is one of ZooKeeper's
    /// `digest` scheme; only this user can access the nodes that it creates.
    pub url: Url,
    /// The recipe whose nodes this client's locks share.
    pub layout: Layout,
    /// Names are used as paths without escaping, for locks that other programs take, too. Then `a`
    /// and `a/b` must not both be locks.
    pub raw_names: bool,
    /// The session timeout to request.
    pub session: Duration,
    /// The certificates to use.
    pub tls: TlsOptions,
}

impl std::fmt::Debug for ZooKeeperOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The URL may contain a password.
        f.debug_struct("ZooKeeperOptions").field("layout", &self.layout).finish_non_exhaustive()
    }
}

impl Default for ZooKeeperOptions {
    fn default() -> Self {
        Self {
            url: Url::new("zk", "//127.0.0.1:2181"),
            layout: Layout::Curator,
            raw_names: false,
            session: Duration::from_secs(30),
            tls: TlsOptions::default(),
        }
    }
}

/// One client of a ZooKeeper server or ensemble.
pub struct ZooKeeper {
    core: Arc<ZooKeeperCore>,
    tasks: Vec<tokio::task::AbortHandle>,
}

/// Identifies a session among those of this client.
type SessionTag = u64;
/// The session of all locks that are neither fixed nor detachable.
const MAIN_SESSION: SessionTag = 0;

#[derive(Debug)]
struct ZooKeeperCore {
    servers: Arc<ServerList>,
    layout: Layout,
    paths: NodePaths,
    acl: Acl,
    clock: Clock,
    runtime: tokio::runtime::Handle,
    main: Arc<Session>,
    next_tag: AtomicU64,
    /// The timeout that was negotiated when this client connected.
    timeout: Duration,
    claims: Mutex<ClaimTable>,
    watchers: NameWatchers,
    session_events: mpsc::UnboundedSender<(SessionTag, SessionEvent)>,
    events: mpsc::UnboundedSender<Event>,
    /// Taken by the first call of [`Engine::events`].
    event_receiver: Mutex<Option<mpsc::UnboundedReceiver<Event>>>,
}

impl std::fmt::Debug for ZooKeeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ZooKeeper({})", self.identity())
    }
}

impl ZooKeeper {
    /// Connects. Must be called inside a tokio runtime, on which the connection then lives.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the URL is invalid; [`Error::Unreachable`] if no server replies or the
    /// chroot cannot be created.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn connect(options: ZooKeeperOptions) -> Result<Self> {
        let servers = Arc::new(ServerList::new(&options)?);
        let clock = Clock::boot();
        let (session_events, session_event_receiver) = mpsc::unbounded_channel();
        let (events, event_receiver) = mpsc::unbounded_channel();
        let request = new_session_request(options.session)?;
        let sink = event_sink(MAIN_SESSION, session_events.clone());
        let main = Arc::new(Session::start(servers.clone(), clock.clone(), request, true, sink));
        main.wait_connected(clock.now() + CONNECT_TIMEOUT).await?;
        let chroot = servers.chroot.clone();
        let core = Arc::new(ZooKeeperCore {
            layout: options.layout,
            paths: NodePaths { chroot, raw_names: options.raw_names },
            acl: if servers.login.is_some() { Acl::CreatorAll } else { Acl::Open },
            servers,
            clock,
            runtime: tokio::runtime::Handle::current(),
            timeout: main.timeout(),
            main,
            next_tag: AtomicU64::new(MAIN_SESSION + 1),
            claims: Mutex::default(),
            watchers: NameWatchers::default(),
            session_events,
            events,
            event_receiver: Mutex::new(Some(event_receiver)),
        });
        core.create_chroot().await?;
        let dispatcher = events::dispatch_events(core.clone(), session_event_receiver);
        let tasks = vec![
            tokio::spawn(dispatcher).abort_handle(),
            tokio::spawn(events::end_unrenewed_leases(core.clone())).abort_handle(),
        ];
        Ok(Self { core, tasks })
    }
}

impl Drop for ZooKeeper {
    fn drop(&mut self) {
        self.tasks.iter().for_each(tokio::task::AbortHandle::abort);
    }
}

/// The request for a new session.
fn new_session_request(timeout: Duration) -> Result<ConnectRequest> {
    let timeout_ms = i32::try_from(timeout.as_millis()).ok().filter(|ms| *ms > 0);
    let timeout_ms = timeout_ms.ok_or_else(|| {
        let why = "a session lasts from a millisecond to 24 days";
        Error::invalid("ttl", &format!("{timeout:?}"), why)
    })?;
    Ok(ConnectRequest::new_session(timeout_ms))
}

impl ZooKeeperCore {
    fn claims(&self) -> MutexGuard<'_, ClaimTable> {
        sync::lock(&self.claims)
    }

    fn new_tag(&self) -> SessionTag {
        self.next_tag.fetch_add(1, Ordering::Relaxed)
    }

    /// Waits for a connection of the main session.
    async fn wait_connected(&self) -> Result<()> {
        self.main.wait_connected(self.clock.now() + CONNECT_TIMEOUT).await.map(|_| ())
    }

    /// Creates the chroot if it is missing. Repeated if the reply is lost, which is harmless.
    async fn create_chroot(&self) -> Result<()> {
        let deadline = self.clock.now() + CONNECT_TIMEOUT;
        loop {
            let chroot = &self.paths.chroot;
            match self.create_missing(&self.main, "", chroot, CreateMode::Persistent).await {
                Err(error) if error.is_retryable() && self.clock.now() < deadline => {
                    self.main.wait_connected(deadline).await?;
                }
                created => return created,
            }
        }
    }

    /// Creates the nodes of `path` that are below `top` and missing.
    async fn create_missing(
        &self,
        session: &Session,
        top: &str,
        path: &str,
        mode: CreateMode,
    ) -> Result<()> {
        let below = path.strip_prefix(top).unwrap_or(path);
        let ends = below.match_indices('/').map(|(at, _)| at).filter(|at| *at > 0);
        let ends = ends.chain([below.len()]);
        // All are sent at once: the server creates them in order.
        let creates: Vec<_> = ends
            .map(|end| format!("{top}{}", &below[..end]))
            .map(|node| session.create(&node, b"", self.acl, mode))
            .collect();
        let mut outcome = Ok(());
        for create in creates {
            outcome = match create.done().await {
                Err(error) if !error.is(ZkErrorCode::NODE_EXISTS) => Err(error),
                _ => Ok(()),
            };
        }
        // Nodes that this user may not access do not matter if the last one exists.
        if outcome.as_ref().is_err_and(|error: &ZkRequestError| error.is(ZkErrorCode::NO_AUTH)) {
            outcome = match session.data(path, false).data().await {
                Err(error) if error.is(ZkErrorCode::NO_NODE) => outcome,
                Ok(_) | Err(ZkRequestError::Refused(_)) => Ok(()),
                Err(error) => Err(error),
            };
        }
        outcome.map_err(|error| match error {
            ZkRequestError::Refused(code) => {
                unreachable_error(format!("`{path}` cannot be made: {code}"), false)
            }
            error => error.into(),
        })
    }
}

#[async_trait]
impl Engine for ZooKeeper {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            engine: ENGINE,
            shared: true,
            permits: true,
            cells: true,
            sees_death: false,
            pushes: false,
            durable: true,
            replicas: false,
            session: Some(self.core.timeout),
            shared_lease: true,
            min_ttl: Duration::from_millis(1),
            max_ttl: Duration::from_secs(7 * 86_400),
        }
    }

    fn identity(&self) -> String {
        // With raw names, the same name is another node.
        let names = if self.core.paths.raw_names { "?names=raw" } else { "" };
        format!("{}{names}", self.core.servers.identity())
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
            Amend::Downgrade => self.core.downgrade(claim, grant).await,
            Amend::Note(note) => self.core.set_note(claim, grant, note).await,
        }
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
        watch::hints(self.core.clone(), scope.clone())
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
        told_once(sync::lock(&self.core.event_receiver).take())
    }

    async fn close(&self) {
        self.tasks.iter().for_each(tokio::task::AbortHandle::abort);
        // The sessions of detached locks are left, not ended: they belong to their tickets.
        self.core.claims().entries.clear();
        self.core.watchers.close();
        self.core.main.close().await;
    }
}

/// A token is the number of a transaction, so the caller cannot choose it.
fn chosen_tokens_unsupported() -> Error {
    let what = "tokens chosen by the caller: a token is the number of a transaction".to_owned();
    Error::Unsupported { engine: ENGINE, what }
}
