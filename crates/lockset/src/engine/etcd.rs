//! Locks on etcd: keys in the order of their create revisions, leases, and watches.
//!
//! A claim is a key below its name, bound to a lease. The claim with the lower create revision came
//! first. A claim holds when no claim before it excludes it; otherwise it watches one key before
//! it. That is the recipe of `etcdctl lock` and of etcd's own Go client, so all of them exclude
//! each other. The token is the create revision of the claim's key.
//!
//! The parts, in the order in which a claim meets them:
//!
//! * `acquire` creates a claim's key and waits until it holds; `ledger` is what this client knows
//!   of all its claims; `renew` keeps the held ones alive, `amend` changes them, `release` ends
//!   them;
//! * `leases` are the leases; `batch` sends transactions together; `watch` is the stream of
//!   watches;
//! * `connection` sends requests to a server that `connect` has read from the URL, and repeats
//!   them; `request_error` says whether a failed one may have been executed;
//! * `keys` and `record` are what is stored, `txn` builds transactions, `rpc` has etcd's messages;
//! * `inspect` reads the state of locks, `cells` is for latches and barriers.
//!
//! # One lease for many claims
//! All claims of a client with the same ttl share a lease, which lives as long as the client. So
//! the key of a claim that is released, withdrawn or no longer renewed must be deleted, however
//! often that fails: the client withdraws a claim until that succeeds, and maintenance removes the
//! keys of claims that lapsed. The lease ends the claims only if the client dies.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use futures_core::stream::BoxStream;
use futures_util::future::join_all;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use self::batch::TxnBatcher;
use self::connect::EtcdEndpoints;
use self::connection::{EtcdConnection, REQUEST_TIMEOUT, RETRY_TIMEOUT};
use self::keys::EtcdLayout;
use self::leases::{EtcdLease, EtcdLeases};
use self::ledger::{ClaimLedger, LedgerEntry};
use self::request_error::EtcdErrorKind;
use self::watch::EtcdWatcher;
use super::common::hints::told_once;
use super::{
    Admission, Amend, Break, Capabilities, Claim, ClaimId, Engine, Event, Grant, Hint, Holder,
    LockState, Renewal, Scope, Swap, Version, Wait,
};
use crate::clock::{Clock, Moment};
use crate::error::{Error, LossReason, Result};
use crate::name::{Name, Prefix};
use crate::report::report;
use crate::sync;
use crate::tls::TlsOptions;
use crate::url::Url;

mod acquire;
mod amend;
mod batch;
mod cells;
mod connect;
mod connection;
mod inspect;
mod keys;
mod leases;
mod ledger;
#[cfg(any(test, fuzzing))]
pub(crate) mod malformed;
mod record;
mod release;
mod renew;
mod request_error;
#[allow(
    missing_docs,
    missing_debug_implementations,
    unreachable_pub,
    dead_code,
    clippy::all,
    reason = "generated"
)]
#[rustfmt::skip]
mod rpc;
mod txn;
mod watch;

const ENGINE: &str = "etcd";
/// How often an operation starts again after a change of the leader, a lease or the claim's key.
const MAX_ATTEMPTS: usize = 4;
/// How long closing waits until the leases are revoked.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// The options of an [`Etcd`].
#[derive(Clone)]
pub struct EtcdOptions {
    /// `etcd://[user:password@]host[:port],…[/prefix]`; `etcds` for TLS. Without a prefix, or with
    /// an empty one, all keys begin with `lockset/`; it may itself begin with a slash.
    pub url: Url,
    /// Slashes in names are not escaped, for other programs that expect it. A lock then also waits
    /// for every lock on a name inside its own: `a` for `a/b`.
    pub raw_names: bool,
    /// The certificates to use.
    pub tls: TlsOptions,
}

impl std::fmt::Debug for EtcdOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The URL may contain a password.
        f.debug_struct("EtcdOptions").field("raw_names", &self.raw_names).finish_non_exhaustive()
    }
}

impl Default for EtcdOptions {
    fn default() -> Self {
        Self {
            url: Url::new("etcd", "//127.0.0.1:2379"),
            raw_names: false,
            tls: TlsOptions::default(),
        }
    }
}

/// The condition under which a lock is still held, for an etcd transaction of your own. If the
/// transaction compares the create revision of `key` with `create_revision`, it is executed only
/// while the lock is held. No clock is needed, and no resource that checks tokens.
///
/// ```no_run
/// # async fn example() -> lockset::Result<()> {
/// use lockset::Lockset;
/// use lockset::engine::etcd::EtcdOwnership;
///
/// let locks = Lockset::connect("etcd://127.0.0.1").await?;
/// let guard = locks.mutex("orders/42")?.lock().await?;
/// let EtcdOwnership { key, create_revision } = EtcdOwnership::of(&guard.grant());
/// # let _ = (key, create_revision); Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdOwnership {
    /// The key of the claim.
    pub key: Vec<u8>,
    /// The create revision of the key while the lock is held.
    pub create_revision: i64,
}

impl EtcdOwnership {
    /// The condition for a lock that this engine granted.
    pub fn of(grant: &Grant) -> Self {
        let create_revision = i64::try_from(grant.token.get()).unwrap_or(i64::MAX);
        Self { key: grant.key.clone(), create_revision }
    }
}

/// One client of an etcd cluster.
pub struct Etcd {
    core: Arc<EtcdCore>,
    tasks: [tokio::task::AbortHandle; 2],
}

#[derive(Debug)]
struct EtcdCore {
    connection: Arc<EtcdConnection>,
    layout: EtcdLayout,
    identity: String,
    leases: EtcdLeases,
    batcher: Arc<TxnBatcher>,
    watcher: EtcdWatcher,
    ledger: Mutex<ClaimLedger>,
    clock: Clock,
    runtime: Handle,
    maintenance: MaintenanceTimer,
    events_tx: mpsc::UnboundedSender<Event>,
    events_rx: Mutex<Option<mpsc::UnboundedReceiver<Event>>>,
}

/// When the maintenance task runs next, and how it is woken before.
#[derive(Debug)]
struct MaintenanceTimer {
    next_at: Mutex<Moment>,
    wake: tokio::sync::Notify,
}

impl MaintenanceTimer {
    /// The earlier of `next_at` and what was requested since the last run.
    fn next_run(&self, next_at: Moment) -> Moment {
        let mut requested = sync::lock(&self.next_at);
        *requested = requested.min(next_at);
        *requested
    }
}

impl std::fmt::Debug for Etcd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Etcd({})", self.identity())
    }
}

impl Etcd {
    /// Connects. Must be called inside a tokio runtime, on which the connections then live. While
    /// that runtime is blocked, nothing is renewed, and requests from other runtimes may wait.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the URL is invalid;
    /// [`Error::Unreachable`] if no server replies or the login is
    /// rejected.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn connect(options: EtcdOptions) -> Result<Self> {
        let endpoints = EtcdEndpoints::new(&options)?;
        let (layout, identity) = (endpoints.layout.clone(), endpoints.identity());
        let clock = Clock::boot();
        let connection = Arc::new(EtcdConnection::new(endpoints, clock.clone()));
        let read = txn::unconditional(vec![txn::get(&layout.absent_key())]);
        connection.txn_with_retry(read, RETRY_TIMEOUT).await?;
        let runtime = Handle::current();
        let (watcher, watches) = EtcdWatcher::start(&connection);
        let (events_tx, events_rx) = mpsc::unbounded_channel();
        let core = Arc::new(EtcdCore {
            leases: EtcdLeases::new(connection.clone(), clock.clone()),
            batcher: TxnBatcher::new(connection.clone(), runtime.clone(), layout.clone()),
            connection,
            layout,
            identity,
            watcher,
            ledger: Mutex::default(),
            clock,
            runtime,
            maintenance: MaintenanceTimer {
                next_at: Mutex::new(Moment::NEVER),
                wake: tokio::sync::Notify::new(),
            },
            events_tx,
            events_rx: Mutex::new(Some(events_rx)),
        });
        let maintenance = tokio::spawn(run_maintenance(core.clone())).abort_handle();
        Ok(Self { core, tasks: [watches, maintenance] })
    }

    fn abort_tasks(&self) {
        self.tasks.iter().for_each(tokio::task::AbortHandle::abort);
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.abort_tasks();
    }
}

/// Keeps the leases in use alive, revokes the others, and removes the keys of claims that lapsed.
async fn run_maintenance(core: Arc<EtcdCore>) {
    loop {
        // A run requested from here on may or may not be covered by this one, so it counts.
        *sync::lock(&core.maintenance.next_at) = Moment::NEVER;
        let now = core.clock.now();
        let due = core.ledger().take_due_removals(now);
        for (id, entry) in due.removals {
            let core = core.clone();
            tokio::spawn(async move {
                if let Err(error) = core.remove_key(id, &entry).await {
                    let (name, error) = (&entry.name, Error::from(error));
                    report!(debug, name = name, error = error, "a key could not be removed yet");
                }
            });
        }
        let mut next_at = due.next_at.unwrap_or(Moment::NEVER);
        for lease in core.leases_in_use(now) {
            if lease.keep_alive_at() <= now {
                lease.mark_keep_alive_sent(now);
                tokio::spawn(keep_alive(core.clone(), lease.clone()));
            }
            next_at = next_at.min(lease.keep_alive_at());
        }
        let next_at = core.maintenance.next_run(next_at);
        tokio::select! {
            () = core.maintenance.wake.notified() => {}
            () = core.clock.sleep_until(next_at) => {}
        }
    }
}

async fn keep_alive(core: Arc<EtcdCore>, lease: Arc<EtcdLease>) {
    let timeout = REQUEST_TIMEOUT.min(lease.ttl / 6);
    if let Err(error) = core.keep_alive_and_read(&lease, Vec::new(), timeout).await {
        if error.kind != EtcdErrorKind::LeaseNotFound {
            let holders = core.ledger().holders_on(&lease);
            // Fails only if the client is gone.
            holders.into_iter().for_each(|id| drop(core.events_tx.send(Event::Doubt(id))));
        }
        report!(debug, error = Error::from(error), "a keep-alive was not confirmed");
    }
    core.run_maintenance_by(lease.keep_alive_at());
}

impl EtcdCore {
    fn ledger(&self) -> MutexGuard<'_, ClaimLedger> {
        sync::lock(&self.ledger)
    }

    fn forget(&self, id: ClaimId) -> Option<LedgerEntry> {
        self.ledger().remove(id)
    }

    /// The leases to keep alive. A lease that was long unused, or is retired and unused, is
    /// revoked.
    fn leases_in_use(&self, now: Moment) -> Vec<Arc<EtcdLease>> {
        let mut leases = self.leases.all_shared();
        leases.retain(|lease| {
            // Locked until the lease is marked as gone; otherwise a claim could start to use it.
            let ledger = self.ledger();
            if ledger.uses_lease(lease) {
                lease.mark_used(now);
                return true;
            }
            let is_needed = !lease.is_idle(now) && !self.leases.is_retired(lease);
            if !is_needed {
                lease.mark_gone();
                self.leases.forget(lease);
                self.revoke_in_background(lease.id);
            }
            is_needed
        });
        leases.extend(self.ledger().own_leases_of_waiters());
        leases.retain(|lease| !lease.is_gone());
        leases
    }

    /// Makes the maintenance task run by then.
    fn run_maintenance_by(&self, at: Moment) {
        let mut next_at = sync::lock(&self.maintenance.next_at);
        if at < *next_at {
            *next_at = at;
            self.maintenance.wake.notify_one();
        }
    }

    fn run_maintenance_now(&self) {
        self.run_maintenance_by(self.clock.now());
    }

    /// The server does not know this lease any more, so all its claims are lost.
    fn lose_lease(&self, lease: &Arc<EtcdLease>) {
        self.leases.forget(lease);
        let lost = self.ledger().remove_claims_on(lease);
        if lease.mark_gone() {
            report!(warn, holders = lost.len(), "a lease ended, and all its locks with it");
        }
        for id in lost {
            // Fails only if the client is gone.
            let _ = self.events_tx.send(Event::Lost(id, LossReason::SessionEnded));
        }
    }

    fn revoke_in_background(&self, lease: i64) {
        let connection = self.connection.clone();
        // If it fails, the lease ends by itself.
        self.runtime.spawn(async move { drop(connection.revoke_lease(lease).await) });
    }
}

fn unsupported(what: &str) -> Error {
    Error::Unsupported { engine: ENGINE, what: what.to_owned() }
}

#[async_trait]
impl Engine for Etcd {
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
            session: None,
            shared_lease: true,
            min_ttl: Duration::from_secs(2),
            max_ttl: Duration::from_secs(7 * 86_400),
        }
    }

    fn identity(&self) -> String {
        self.core.identity.clone()
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        self.core.acquire(claim, wait).await
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        self.core.renew(batch).await
    }

    async fn amend(&self, claim: &Claim, grant: &Grant, to: Amend) -> Result<Grant> {
        self.core.amend(claim, grant, to).await
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
        told_once(sync::lock(&self.core.events_rx).take())
    }

    async fn close(&self) {
        self.abort_tasks();
        let leases = self.core.leases.all_shared();
        let connection = &self.core.connection;
        let revoked = join_all(leases.iter().map(|lease| connection.revoke_lease(lease.id)));
        // A lease that is not revoked in time ends by itself.
        drop(tokio::time::timeout(CLOSE_TIMEOUT, revoked).await);
    }
}
