//! Locks on ZooKeeper: ephemeral sequential nodes, in the layout of Curator or kazoo.
//!
//! A claim is a node below its name's node, numbered by the server; the lowest holds, and each of
//! the others watches the one before it. The nodes of a client belong to its session, so the
//! session is the lease of all its locks. The parts, in the order in which a claim meets them:
//!
//! * `acquire` is the way of one claim; `admission` decides from a list who is admitted and whom the
//!   others wait for; `layout` knows names, paths and the order; `record` what is written down;
//! * `renew` is what happens while a lock is held: renewals, changes, losses; `release` is its
//!   end;
//! * `session` sends requests and says what is unknown; `connection` keeps its connection to one of the
//!   `connect`; `session_lease` says until when a session's nodes are there; `wire` is ZooKeeper's format;
//! * `inspect` shows what is there, and `cells` keeps what outlives its writer.
//!
//! # A create whose answer is lost
//! A claim's id is part of its node's name. After a lost connection the session is taken over by a
//! new connection, a `sync` is sent and the parent listed. That is enough to know: an old request
//! that the same server had read stands before the `sync` in that server's queue, whatever it had
//! not read is gone with the old connection, and the leader refuses requests by way of another
//! server once the session has moved. So the node is in the list, or it will never be there.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use futures_core::stream::BoxStream;
use tokio::sync::mpsc;

use self::acquire::Entry;
use self::client::session::{Fault, Happening, Session, failed, teller};
use self::client::wire::{Acl, Hello, Kind, Refusal};
use self::connect::Servers;
use self::inspect::Observers;
use self::layout::Paths;
use super::common::tombstones::Tombstones;
use super::common::watch::told_once;
use super::{
    Amend, Break, Capabilities, Claim, ClaimId, Engine, Event, Grant, Holder, LockState, Scope,
    Swap, Version, Wait,
};
use crate::clock::{Clock, Moment};
use crate::error::{Error, Result};
use crate::hash::FastMap;
use crate::name::{Name, Prefix};
use crate::sync;
use crate::token::Token;

pub use self::layout::Layout;
pub use self::record::Ownership;

mod acquire;
mod admission;
mod cells;
mod client;
mod connect;
mod inspect;
mod layout;
mod record;
mod release;
mod renew;

const ENGINE: &str = "zookeeper";
/// How long somebody who has no place in the queue yet waits for a connection.
const PATIENCE: Duration = Duration::from_secs(5);

/// How a [`ZooKeeper`] is connected.
#[derive(Clone)]
pub struct ZooKeeperOptions {
    /// `zk://[user:password@]host[:port],…[/chroot]`; `zks` for TLS. The user is one of ZooKeeper's
    /// `digest` scheme; nodes that it makes are for itself alone.
    pub url: String,
    /// Whose nodes ours stand among.
    pub layout: Layout,
    /// Names are paths as they stand, for locks that others take, too: then `a` and `a/b` must not
    /// both be locks.
    pub raw_names: bool,
    /// The session timeout to ask for.
    pub session: Duration,
    /// The certificates of the authorities to trust, in PEM; the system's if not given.
    pub ca: Option<PathBuf>,
    /// This client's own certificate and its key, in PEM.
    pub client_certificate: Option<(PathBuf, PathBuf)>,
}

impl std::fmt::Debug for ZooKeeperOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The URL may carry a password.
        f.debug_struct("ZooKeeperOptions").field("layout", &self.layout).finish_non_exhaustive()
    }
}

impl Default for ZooKeeperOptions {
    fn default() -> Self {
        Self {
            url: "zk://127.0.0.1:2181".to_owned(),
            layout: Layout::Curator,
            raw_names: false,
            session: Duration::from_secs(30),
            ca: None,
            client_certificate: None,
        }
    }
}

/// One client of a ZooKeeper server or ensemble.
pub struct ZooKeeper {
    core: Arc<Core>,
    tasks: Vec<tokio::task::AbortHandle>,
}

/// Which session a node belongs to; the client's own is the first.
type Tag = u64;
const MAIN: Tag = 0;

#[derive(Debug)]
struct Core {
    servers: Arc<Servers>,
    layout: Layout,
    paths: Paths,
    acl: Acl,
    clock: Clock,
    runtime: tokio::runtime::Handle,
    main: Arc<Session>,
    tags: AtomicU64,
    /// As it was negotiated when this client connected.
    timeout: Duration,
    book: Mutex<Book>,
    observers: Observers,
    happenings: mpsc::UnboundedSender<(Tag, Happening)>,
    tell: mpsc::UnboundedSender<Event>,
    events: Mutex<Option<mpsc::UnboundedReceiver<Event>>>,
}

/// The claims of this client that have a node, or may have one.
#[derive(Debug, Default)]
struct Book {
    entries: FastMap<ClaimId, Entry>,
    /// The nodes of held locks that are watched.
    watched: HashMap<String, ClaimId>,
    withdrawn: Tombstones,
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
    /// [`Error::Invalid`] for a URL that is none; [`Error::Unreachable`] if no server answers or
    /// the chroot cannot be made.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn connect(options: ZooKeeperOptions) -> Result<Self> {
        let servers = Arc::new(Servers::parse(&options)?);
        let clock = Clock::boot();
        let (happenings, happening) = mpsc::unbounded_channel();
        let (tell, events) = mpsc::unbounded_channel();
        let hello = new_session(options.session)?;
        let told = teller(MAIN, happenings.clone());
        let main = Arc::new(Session::start(servers.clone(), clock.clone(), hello, true, told));
        main.ready(clock.now() + PATIENCE).await?;
        let chroot = servers.chroot.clone();
        let core = Arc::new(Core {
            layout: options.layout,
            paths: Paths { chroot, raw: options.raw_names },
            acl: if servers.login().is_some() { Acl::Creator } else { Acl::Anybody },
            servers,
            clock,
            runtime: tokio::runtime::Handle::current(),
            timeout: main.timeout(),
            main,
            tags: AtomicU64::new(MAIN + 1),
            book: Mutex::default(),
            observers: Observers::default(),
            happenings,
            tell,
            events: Mutex::new(Some(events)),
        });
        core.make_chroot().await?;
        let tasks = vec![
            tokio::spawn(renew::heed_all(core.clone(), happening)).abort_handle(),
            tokio::spawn(renew::end_leases(core.clone())).abort_handle(),
        ];
        Ok(Self { core, tasks })
    }
}

impl Drop for ZooKeeper {
    fn drop(&mut self) {
        self.tasks.iter().for_each(tokio::task::AbortHandle::abort);
    }
}

/// The greeting that asks for a new session.
fn new_session(timeout: Duration) -> Result<Hello> {
    let timeout_ms = i32::try_from(timeout.as_millis()).ok().filter(|ms| *ms > 0);
    let timeout_ms = timeout_ms.ok_or_else(|| {
        let why = "a session lasts from a millisecond to 24 days";
        Error::invalid("ttl", &format!("{timeout:?}"), why)
    })?;
    Ok(Hello { seen: 0, timeout_ms, session: 0, password: vec![0; 16] })
}

impl Core {
    fn book(&self) -> MutexGuard<'_, Book> {
        sync::lock(&self.book)
    }

    fn new_tag(&self) -> Tag {
        self.tags.fetch_add(1, Ordering::Relaxed)
    }

    /// Waits for a connection of the client's own session.
    async fn ready(&self) -> Result<()> {
        self.main.ready(self.clock.now() + PATIENCE).await.map(|_| ())
    }

    /// Makes the chroot if it is missing; again if the answer was lost, which does no harm.
    async fn make_chroot(&self) -> Result<()> {
        let deadline = self.clock.now() + PATIENCE;
        loop {
            let chroot = &self.paths.chroot;
            match self.make_nodes(&self.main, "", chroot, Kind::Persistent).await {
                Err(error) if error.is_retryable() && self.clock.now() < deadline => {
                    self.main.ready(deadline).await?;
                }
                made => return made,
            }
        }
    }

    /// Makes the nodes of `path` that lie below `top` and are missing.
    async fn make_nodes(&self, session: &Session, top: &str, path: &str, kind: Kind) -> Result<()> {
        let below = path.strip_prefix(top).unwrap_or(path);
        let ends = below.match_indices('/').map(|(at, _)| at).filter(|at| *at > 0);
        let ends = ends.chain([below.len()]);
        // All at once: each is there when the next is tried.
        let made: Vec<_> = ends
            .map(|end| format!("{top}{}", &below[..end]))
            .map(|node| session.create(&node, b"", self.acl, kind))
            .collect();
        let mut outcome = Ok(());
        for made in made {
            outcome = match made.done().await {
                Err(fault) if !fault.is(Refusal::NODE_EXISTS) => Err(fault),
                _ => Ok(()),
            };
        }
        // Nodes that this user may not touch are no harm if the last one is there.
        if outcome.as_ref().is_err_and(|fault: &Fault| fault.is(Refusal::NO_AUTH)) {
            outcome = match session.data(path, false).data().await {
                Err(fault) if fault.is(Refusal::NO_NODE) => outcome,
                Ok(_) | Err(Fault::Refused(_)) => Ok(()),
                Err(fault) => Err(fault),
            };
        }
        outcome.map_err(|fault| match fault {
            Fault::Refused(why) => failed(format!("`{path}` cannot be made: {why}"), false),
            fault => fault.into(),
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
            min_ttl: Duration::from_millis(1),
            max_ttl: Duration::from_secs(7 * 86_400),
        }
    }

    fn identity(&self) -> String {
        // Raw names are other nodes.
        let names = if self.core.paths.raw { "?names=raw" } else { "" };
        format!("{}{names}", self.core.servers.identity())
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        self.core.acquire(claim, wait).await
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        self.core.renew(batch).await
    }

    async fn raise(&self, _: &Claim, _: &Grant, _: Token) -> Result<Grant> {
        Err(no_fence())
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

    fn watch(&self, scope: &Scope) -> BoxStream<'static, Result<LockState>> {
        inspect::watch(self.core.clone(), scope.clone())
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

    async fn close(&self) {
        self.tasks.iter().for_each(tokio::task::AbortHandle::abort);
        // The sessions of detached locks are only left, not ended: they belong to their tickets.
        self.core.book().entries.clear();
        self.core.observers.close();
        self.core.main.close().await;
    }
}

fn no_fence() -> Error {
    let what = "tokens that the caller chooses: they are numbers of transactions".to_owned();
    Error::Unsupported { engine: ENGINE, what }
}

/// The earlier of two moments, of which the second may be "as long as it takes".
fn at_most(span: Duration, now: Moment, deadline: Moment) -> Moment {
    (now + span).min(deadline)
}
