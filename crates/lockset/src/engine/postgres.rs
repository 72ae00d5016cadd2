//! Locks in PostgreSQL: leases in rows of a schema of their own, decided by functions there.
//!
//! Claims are rows, not sessions: no connection has to stay open for a lock to be held, and none
//! that is lost or pooled takes a lock with it. `postgres/*.sql` decide, on the server and by its
//! clock; each operation first locks the row of its name. The parts, in the order in which a claim
//! meets them:
//!
//! * `acquire` requests a lock and waits for it; `common::waiters` has the rules by which a queued
//!   claim may assume that it holds the lock; `heartbeat` keeps its queue entry alive;
//! * `renew` renews leases, and changes what is stored for a held lock; `release` releases and
//!   withdraws;
//! * `inspect` shows what is stored, and has the cells of latches and barriers; `watch` tells what
//!   changes;
//! * `batch` sends requests together that were made while another was in flight; `statements` are
//!   the calls of the schema's functions, `record` what they take and return;
//! * `connect` reads the URL and opens connections, with `tls`; `connection` replaces broken ones;
//!   `listen` receives messages; `error` says whether a failed request may have been executed;
//! * `schema` creates the schema: `schema.sql` has the tables, `queue.sql` the rules of the queue,
//!   `operations.sql` what clients call, `held.sql` what users' own transactions call.
//!
//! # The hand-off
//! It follows the rules of `docs/redis-handoff.md`. A release grants the lock to the first live
//! waiter and notifies its client, in one transaction. PostgreSQL does not tell whether a
//! notification has a receiver, so none is skipped: one whose message is lost finds out by its next
//! heartbeat.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use futures_core::stream::BoxStream;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use self::connect::{OpenClient, PostgresConnector};
use self::connection::{PostgresConnection, PostgresLane, PostgresShared};
use self::error::PostgresRequestError;
use self::heartbeat::{PostgresHeartbeats, run_heartbeats};
use self::listen::{keep_listening, listen, on_message};
pub use self::schema::schema_script;
use self::statements::Calls;
pub use self::tls::PostgresTls;
use self::watch::{PostgresWatches, run_sweeps, run_watches};
use super::common::hints::told_once;
use super::common::waiters::{FIRST_LEASE_RANGE, HandoffWaiters};
use super::{
    Admission, Amend, Break, Capabilities, Claim, ClaimId, Engine, Event, FencedNode, Grant, Hint,
    Holder, LockState, Renewal, Scope, Swap, Version, Wait,
};
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::hash::FastMap;
use crate::name::{Name, Prefix};
use crate::report::report;
use crate::sync;
use crate::tls::TlsOptions;
use crate::token::Token;
use crate::url::Url;

mod acquire;
mod batch;
mod connect;
mod connection;
mod error;
mod heartbeat;
mod inspect;
mod listen;
mod record;
mod release;
mod renew;
mod schema;
mod statements;
mod tls;
mod watch;

const ENGINE: &str = "postgres";
/// The time in which a request must have its reply, including the wait for a connection.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);
/// The shortest timeout of a request, however little time the caller has left.
const MIN_REQUEST_TIMEOUT: Duration = Duration::from_millis(50);
/// The time in which all names must have been listed.
const LIST_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum claims per statement.
const MAX_BATCH: usize = 100;

/// How a [`Postgres`] is connected.
#[derive(Clone)]
pub struct PostgresOptions {
    /// `postgres://[user[:password]@]host[:port],…[/database]`. Of several servers the one that
    /// accepts writes is used.
    pub url: Url,
    /// Servers, login and database, instead of those of the URL.
    pub config: Option<tokio_postgres::Config>,
    /// Where to listen for messages, if not at the URL: behind a pooler, the server itself.
    pub listen: Option<Url>,
    /// The schema of the locks.
    pub schema: String,
    /// How connections are protected; `None`: verified, except on the machine itself.
    pub sslmode: Option<PostgresTls>,
    /// The longest first lease of a lock that is handed to a waiter, and so the longest time that a
    /// waiter that died unnoticed can cost the others: 10 s by default, from 0.5 s to 60 s. A
    /// waiter's queue entry lives for half of it without a heartbeat; heartbeats are sent after
    /// each sixth of it.
    pub first_lease: Duration,
    /// The certificates to use.
    pub tls: TlsOptions,
}

impl std::fmt::Debug for PostgresOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The URL may contain a password.
        f.debug_struct("PostgresOptions").field("schema", &self.schema).finish_non_exhaustive()
    }
}

impl Default for PostgresOptions {
    fn default() -> Self {
        Self {
            url: Url::new("postgres", "//127.0.0.1:5432"),
            config: None,
            listen: None,
            schema: "lockset".to_owned(),
            sslmode: None,
            first_lease: Duration::from_secs(10),
            tls: TlsOptions::default(),
        }
    }
}

/// One client of a PostgreSQL database.
pub struct Postgres {
    core: Arc<PostgresCore>,
    tasks: Vec<AbortHandle>,
}

#[derive(Debug)]
struct PostgresCore {
    shared: Arc<PostgresShared>,
    /// Acquires and releases.
    main: PostgresLane,
    /// Renewals and heartbeats, which must not wait behind the others.
    upkeep: PostgresLane,
    /// Inspections, listings and cells.
    reads: PostgresLane,
    identity: String,
    clock: Clock,
    waiters: Arc<HandoffWaiters>,
    watches: Arc<PostgresWatches>,
    heartbeats: PostgresHeartbeats,
    /// Claims with a creating request that got no reply: they end with a tombstone.
    dirty: Mutex<FastMap<ClaimId, ()>>,
    events: Mutex<Option<mpsc::UnboundedReceiver<Event>>>,
}

impl std::fmt::Debug for Postgres {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Postgres({})", self.identity())
    }
}

impl Postgres {
    /// Connects, and creates the schema if it is missing. Must be called inside a tokio runtime, on
    /// which the connections then live.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the URL or an option is invalid; [`Error::Unsupported`] if the schema
    /// is newer than this program, or a pooler forbids transactions; [`Error::Unreachable`] if the
    /// server does not reply, refuses the user, or the schema cannot be created.
    ///
    /// # Cancel safety
    /// If dropped, the schema may have been created.
    pub async fn connect(options: PostgresOptions) -> Result<Self> {
        options.check()?;
        if !(FIRST_LEASE_RANGE.0..=FIRST_LEASE_RANGE.1).contains(&options.first_lease) {
            let given = format!("{:?}", options.first_lease);
            return Err(Error::invalid("first_lease", &given, "it is from 500ms to 60s"));
        }
        let connector = PostgresConnector::new(&options)?;
        let listener = PostgresConnector::for_listening(&options)?;
        let identity = connector.identity(&options.schema);
        let opened = open(&connector).await.map_err(PostgresRequestError::into_error)?;
        let (main, has_session) = opened;
        let listener = match (listener, has_session) {
            (None, true) => Some(connector.clone()),
            (None, false) => {
                report!(
                    warn,
                    home = identity,
                    "a pooler in transaction mode does not pass on notifications, so waiters ask \
                     four times a second; name the server itself by `listen=postgres://…`"
                );
                None
            }
            (listener, _) => listener,
        };
        let shared = Arc::new(PostgresShared {
            connector,
            calls: Calls::new(&options.schema),
            schema: options.schema,
            has_session,
            runtime: Handle::current(),
            inbox: format!("lockset_{:016x}", rand::random::<u64>()),
            is_listening: AtomicBool::new(false),
        });
        let main = PostgresConnection::from_open(shared.clone(), main).await;
        let main = main.map_err(PostgresRequestError::into_error)?;
        Self::start(shared, main, listener, options.first_lease, identity).await
    }

    async fn start(
        shared: Arc<PostgresShared>,
        main: Arc<PostgresConnection>,
        listener: Option<PostgresConnector>,
        first_lease: Duration,
        identity: String,
    ) -> Result<Self> {
        let waiters = Arc::new(HandoffWaiters::new(first_lease));
        let watches = Arc::<PostgresWatches>::default();
        let (sender, events) = mpsc::unbounded_channel();
        let on_message = on_message(waiters.clone(), watches.clone(), sender);
        let listening = match &listener {
            Some(connector) => {
                let listening = listen(connector, &shared.inbox, &on_message).await;
                Some(listening.map_err(PostgresRequestError::into_error)?)
            }
            None => None,
        };
        shared.is_listening.store(listening.is_some(), std::sync::atomic::Ordering::Release);
        let core = Arc::new(PostgresCore {
            main: PostgresLane::new(shared.clone(), Some(main)),
            upkeep: PostgresLane::new(shared.clone(), None),
            reads: PostgresLane::new(shared.clone(), None),
            shared,
            identity,
            clock: Clock::boot(),
            waiters,
            watches,
            heartbeats: PostgresHeartbeats::new(),
            dirty: Mutex::default(),
            events: Mutex::new(Some(events)),
        });
        let mut tasks = vec![
            tokio::spawn(run_heartbeats(core.clone())).abort_handle(),
            tokio::spawn(run_sweeps(core.clone())).abort_handle(),
        ];
        if let Some(connector) = listener {
            tasks.push(tokio::spawn(run_watches(core.clone())).abort_handle());
            let listening = keep_listening(core.clone(), connector, listening, on_message);
            tasks.push(tokio::spawn(listening).abort_handle());
        }
        Ok(Self { core, tasks })
    }

    /// Ends all tasks and connections.
    fn shut_down(&self) {
        self.tasks.iter().for_each(AbortHandle::abort);
        self.core.watches.close();
        for lane in [&self.core.main, &self.core.upkeep, &self.core.reads] {
            lane.close();
        }
    }
}

/// The first connection, and whether it has a session of the server for itself. A pooler in
/// transaction mode gives the same session to two connections, one after the other, or two to one.
async fn open(connector: &PostgresConnector) -> Result<(OpenClient, bool), PostgresRequestError> {
    let (main, other) = (connector.open(None).await?, connector.open(None).await?);
    let backends = [main.backend().await?, other.backend().await?, main.backend().await?];
    let has_session = backends[0] == backends[2] && backends[0] != backends[1];
    if !has_session {
        schema::check_transactions(&main).await?;
    }
    Ok((main, has_session))
}

impl Drop for Postgres {
    fn drop(&mut self) {
        self.shut_down();
    }
}

impl PostgresCore {
    fn dirty(&self) -> MutexGuard<'_, FastMap<ClaimId, ()>> {
        sync::lock(&self.dirty)
    }
}

#[async_trait]
impl Engine for Postgres {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            engine: ENGINE,
            shared: true,
            permits: true,
            cells: true,
            sees_death: false,
            pushes: true,
            durable: true,
            replicas: false,
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
            Amend::Downgrade => self.core.amend(claim, grant, b'd', None, None).await?,
            Amend::Note(note) => self.core.amend(claim, grant, b'n', Some(&note), None).await?,
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
impl FencedNode for Postgres {
    async fn raise(&self, claim: &Claim, grant: &Grant, to: Token) -> Result<Grant> {
        self.core.amend(claim, grant, b'r', None, Some(to)).await?;
        Ok(Grant { token: to, ..grant.clone() })
    }
}
