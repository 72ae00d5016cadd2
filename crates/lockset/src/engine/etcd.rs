//! Locks on etcd: keys in the order of their revisions, leases, watches.
//!
//! A claim is a key below its name, bound to a lease. Who came first has the lower create revision;
//! a claim holds when nobody before it is in its way, and otherwise watches one key before it. That
//! is the recipe of `etcdctl lock` and of etcd's own Go client, so each excludes the others. The
//! token is the create revision of the claim's key.
//!
//! The parts, in the order in which a claim meets them:
//!
//! * `claims` is the way of one claim, `places` what this client knows of all of its own,
//!   `renewal` keeps those that hold, `leaving` lets them go;
//! * `leases` keeps the leases, `batch` lets transactions travel together, `news` watches;
//! * `link` finds a server (by `servers`), and says what is unknown after it was silent;
//! * `keys` is what is written, `txn` how it is said, `rpc` etcd's own messages;
//! * `look` shows what is there.
//!
//! # One lease for many claims
//! All claims of a client with the same ttl share a lease, which lives as long as the client. So a
//! claim that is released, withdrawn or no longer renewed must be deleted, and the client goes on
//! trying until it is. Only if the client dies does the lease end them all.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use futures_core::stream::BoxStream;
use futures_util::future::join_all;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use self::batch::TxnBatcher;
use self::claims::unsupported;
use self::keys::Layout;
use self::leases::{Lease, Leases};
use self::link::{Link, PATIENCE, What};
use self::news::Stand;
use self::places::{Place, Places};
use self::servers::Servers;
use super::common::watch::told_once;
use super::{
    Amend, Break, Capabilities, Claim, ClaimId, Engine, Event, Grant, Holder, LockState, Scope,
    Swap, Version, Wait,
};
use crate::clock::{Clock, Moment};
use crate::error::{LossReason, Result};
use crate::name::{Name, Prefix};
use crate::report::report;
use crate::sync;
use crate::token::Token;

mod batch;
mod claims;
mod keys;
mod leases;
mod leaving;
mod link;
mod look;
mod news;
mod places;
mod renewal;
#[allow(
    missing_docs,
    missing_debug_implementations,
    unreachable_pub,
    dead_code,
    clippy::all,
    reason = "made by a generator"
)]
#[rustfmt::skip]
mod rpc;
mod servers;
mod txn;

const ENGINE: &str = "etcd";
/// How long closing takes at most to give the leases back.
const CLOSE_WITHIN: Duration = Duration::from_secs(2);

/// How an [`Etcd`] is connected.
#[derive(Clone)]
pub struct EtcdOptions {
    /// `etcd://[user:password@]host[:port],…[/prefix]`; `etcds` for TLS. Without a prefix, or with
    /// an empty one, all keys begin with `lockset/`; it may itself begin with a slash.
    pub url: String,
    /// Slashes in names are written as they are, for programs that expect it. A lock then also
    /// waits for every lock whose name it begins: `a` for `a/b`.
    pub raw_names: bool,
    /// The certificates of the authorities to trust, in PEM; the system's if not given.
    pub ca: Option<PathBuf>,
    /// This client's own certificate and its key, in PEM.
    pub client_certificate: Option<(PathBuf, PathBuf)>,
}

impl std::fmt::Debug for EtcdOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The URL may carry a password.
        f.debug_struct("EtcdOptions").field("raw_names", &self.raw_names).finish_non_exhaustive()
    }
}

impl Default for EtcdOptions {
    fn default() -> Self {
        Self {
            url: "etcd://127.0.0.1:2379".to_owned(),
            raw_names: false,
            ca: None,
            client_certificate: None,
        }
    }
}

/// The condition under which a lock is still held, for an etcd transaction of your own: compare the
/// create revision of `key` with `create_revision`, and whatever the transaction then does, it does
/// only while the lock is held. No clock and no resource that knows tokens is needed.
///
/// ```no_run
/// # async fn example() -> lockset::Result<()> {
/// use lockset::Lockset;
/// use lockset::engine::etcd::Ownership;
///
/// let locks = Lockset::connect("etcd://127.0.0.1").await?;
/// let guard = locks.mutex("orders/42")?.lock().await?;
/// let Ownership { key, create_revision } = Ownership::of(&guard.grant());
/// # let _ = (key, create_revision); Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ownership {
    /// The key of the claim.
    pub key: Vec<u8>,
    /// The revision at which it was created, if the lock is still held.
    pub create_revision: i64,
}

impl Ownership {
    /// The condition of a lock that this engine granted.
    pub fn of(grant: &Grant) -> Self {
        let create_revision = i64::try_from(grant.token.get()).unwrap_or(i64::MAX);
        Self { key: grant.key.clone(), create_revision }
    }
}

/// One client of an etcd cluster.
pub struct Etcd {
    core: Arc<Core>,
    tasks: [tokio::task::AbortHandle; 2],
}

#[derive(Debug)]
struct Core {
    link: Arc<Link>,
    layout: Layout,
    identity: String,
    leases: Leases,
    coach: Arc<TxnBatcher>,
    stand: Stand,
    places: Mutex<Places>,
    clock: Clock,
    runtime: Handle,
    pulse: Pulse,
    tell: mpsc::UnboundedSender<Event>,
    events: Mutex<Option<mpsc::UnboundedReceiver<Event>>>,
}

/// When the task that keeps leases looks again, and how it is woken before.
#[derive(Debug)]
struct Pulse {
    next: Mutex<Moment>,
    wake: tokio::sync::Notify,
}

impl Pulse {
    /// The end of the rest: this, or what was asked for meanwhile.
    fn rest_until(&self, next: Moment) -> Moment {
        let mut asked = sync::lock(&self.next);
        *asked = asked.min(next);
        *asked
    }
}

impl std::fmt::Debug for Etcd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Etcd({})", self.identity())
    }
}

impl Etcd {
    /// Connects. Must be called inside a tokio runtime, on which the connections then live: while
    /// that one is blocked, nothing is renewed and requests of others may wait for it.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for a URL that is none;
    /// [`Error::Unreachable`](crate::Error::Unreachable) if no server answers or
    /// the user is refused.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn connect(options: EtcdOptions) -> Result<Self> {
        let servers = Servers::parse(&options)?;
        let (layout, identity, clock) = (servers.layout.clone(), servers.identity(), Clock::boot());
        let link = Arc::new(Link::new(servers, clock.clone()));
        link.open(txn::always(vec![txn::read(&layout.nothing())])).await?;
        let runtime = Handle::current();
        let (stand, news) = Stand::open(&link);
        let (tell, events) = mpsc::unbounded_channel();
        let core = Arc::new(Core {
            leases: Leases::new(link.clone(), clock.clone()),
            coach: TxnBatcher::new(link.clone(), runtime.clone(), layout.clone()),
            link,
            layout,
            identity,
            stand,
            places: Mutex::default(),
            clock,
            runtime,
            pulse: Pulse { next: Mutex::new(Moment::NEVER), wake: tokio::sync::Notify::new() },
            tell,
            events: Mutex::new(Some(events)),
        });
        let pulse = tokio::spawn(pulse(core.clone())).abort_handle();
        Ok(Self { core, tasks: [news, pulse] })
    }

    fn end_tasks(&self) {
        self.tasks.iter().for_each(tokio::task::AbortHandle::abort);
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.end_tasks();
    }
}

/// Keeps the leases alive that are used, gives back those that are not, and sees to it that claims
/// which nobody asks for any more go.
async fn pulse(core: Arc<Core>) {
    loop {
        // Whatever is asked for from here on may be seen below or not.
        *sync::lock(&core.pulse.next) = Moment::NEVER;
        let now = core.clock.now();
        let due = core.places().due(now);
        for (id, place) in due.leaving {
            let core = core.clone();
            tokio::spawn(async move {
                if let Err(failed) = core.clear(id, &place).await {
                    let (name, error) = (&place.name, failed.into_error());
                    report!(debug, name = name, error = error, "a claim could not be removed yet");
                }
            });
        }
        let mut next = due.next.unwrap_or(Moment::NEVER);
        for lease in core.leases_in_use(now) {
            if lease.beat_at() <= now {
                lease.beating(now);
                tokio::spawn(keep_alive(core.clone(), lease.clone()));
            }
            next = next.min(lease.beat_at());
        }
        let next = core.pulse.rest_until(next);
        tokio::select! {
            () = core.pulse.wake.notified() => {}
            () = core.clock.sleep_until(next) => {}
        }
    }
}

async fn keep_alive(core: Arc<Core>, lease: Arc<Lease>) {
    let patience = PATIENCE.min(lease.ttl / 6);
    if let Err(failed) = core.beat(&lease, Vec::new(), patience).await {
        if failed.what != What::LeaseGone {
            let holders = core.places().holders(&lease);
            // If the client is gone, nobody needs telling.
            holders.into_iter().for_each(|id| drop(core.tell.send(Event::Doubt(id))));
        }
        report!(debug, error = failed.into_error(), "a keep-alive was not confirmed");
    }
    core.pulse_by(lease.beat_at());
}

impl Core {
    fn places(&self) -> MutexGuard<'_, Places> {
        sync::lock(&self.places)
    }

    fn forget(&self, id: ClaimId) -> Option<Place> {
        self.places().forget(id)
    }

    /// The leases to keep alive. One that was long unused, or is retired, is given back.
    fn leases_in_use(&self, now: Moment) -> Vec<Arc<Lease>> {
        let mut leases = self.leases.all_shared();
        leases.retain(|lease| {
            // Locked until it is known to be gone, or a claim could come in between.
            let places = self.places();
            if places.uses(lease) {
                lease.used(now);
                return true;
            }
            let is_needed = !lease.is_idle(now) && !self.leases.is_retired(lease);
            if !is_needed {
                lease.end();
                self.leases.forget(lease);
                self.revoke_in_background(lease.id);
            }
            is_needed
        });
        leases.extend(self.places().waiting_leases());
        leases.retain(|lease| !lease.is_gone());
        leases
    }

    /// Makes sure that the pulse looks by then.
    fn pulse_by(&self, at: Moment) {
        let mut next = sync::lock(&self.pulse.next);
        if at < *next {
            *next = at;
            self.pulse.wake.notify_one();
        }
    }

    fn pulse_soon(&self) {
        self.pulse_by(self.clock.now());
    }

    /// The server does not know this lease any more, so all its claims are lost.
    fn lose_lease(&self, lease: &Arc<Lease>) {
        self.leases.forget(lease);
        let lost = self.places().lose(lease);
        if lease.end() {
            report!(warn, holders = lost.len(), "a lease ended, and all its locks with it");
        }
        for id in lost {
            // If the client is gone, nobody needs telling.
            let _ = self.tell.send(Event::Lost(id, LossReason::SessionEnded));
        }
    }

    fn revoke_in_background(&self, lease: i64) {
        let link = self.link.clone();
        // If it fails, the lease ends by itself.
        self.runtime.spawn(async move { drop(link.revoke_lease(lease).await) });
    }
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
            min_ttl: Duration::from_secs(2),
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

    async fn raise(&self, _: &Claim, _: &Grant, _: Token) -> Result<Grant> {
        Err(unsupported("raising a token: its tokens are revisions of the store"))
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

    fn watch(&self, scope: &Scope) -> BoxStream<'static, Result<LockState>> {
        self.core.watch(scope)
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
        self.end_tasks();
        let leases = self.core.leases.all_shared();
        let revoked = join_all(leases.iter().map(|lease| self.core.link.revoke_lease(lease.id)));
        // What is not given back in time ends by itself.
        drop(tokio::time::timeout(CLOSE_WITHIN, revoked).await);
    }
}
