//! The contract between the primitives and the engines.
//!
//! A hold is *data*: a [`Claim`] and, once granted, a [`Grant`]. The verbs belong to the
//! [`Engine`]. Everything above (gates, guards, keepers, primitives) is written once, against this
//! trait. The engine is chosen by configuration, so the trait is object safe.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use async_trait::async_trait;
use futures_core::stream::BoxStream;
use serde::{Deserialize, Serialize};

use crate::clock::{Clock, Moment};
use crate::error::{Error, LossReason, Result};
use crate::name::{Name, Note, Prefix};
use crate::token::Token;

pub(crate) mod common;
pub use crate::state::{Cell, ClaimId, Holder, LockState, Mode, Version, Waiter};
pub(crate) use common::watch::watch;

#[cfg(feature = "etcd")]
pub mod etcd;
#[cfg(feature = "local")]
pub mod local;
pub mod memory;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "redis")]
pub mod redis;
pub mod redlock;
#[cfg(feature = "zookeeper")]
pub mod zookeeper;

/// The place where locks are stored and decided.
///
/// # The rules every engine keeps
/// * **Identity.** A claim is identified by its [`ClaimId`]. A repeated request with the same id
///   changes nothing and gets the same reply. Renewing and releasing check id *and* token,
///   atomically where the lock is stored.
/// * **Time.** A grant's `valid_until` counts from a moment *before* the request was sent, less
///   [`drift`]. No other claim is granted the lock by expiry before it.
/// * **Order.** Waiters are admitted in the order in which they queued, one predicate for all
///   modes: see [`Mode`].
/// * **No approximation.** What an engine cannot do is [`Error::Unsupported`].
/// * **Cancel safety.** A dropped `acquire` may leave its claim behind; its caller then withdraws
///   it. All other futures may be dropped and repeated at will.
#[async_trait]
pub trait Engine: fmt::Debug + Send + Sync {
    /// What this engine can do, and how strong its promises are.
    fn capabilities(&self) -> Capabilities;

    /// Identifies the home, without secrets: two clients of the same home return the same text if
    /// that can be known. It orders multi-locks and binds tickets to their home. It is a URL of the
    /// home if there is one.
    fn identity(&self) -> String;

    /// The clock of the engine's [`Grant`]s. A client judges leases by this clock, so it cannot
    /// compare moments of two clocks.
    fn clock(&self) -> Clock {
        Clock::boot()
    }

    /// Requests the lock for `claim`, and waits as `wait` says. After an error, and after
    /// [`Admission::Forgotten`], the claim may be left behind; the caller withdraws it.
    ///
    /// # Errors
    /// [`Error::Conflict`] if the name is in use in an incompatible way, [`Error::Unsupported`]
    /// for a mode the engine does not have, [`Error::Unreachable`] otherwise.
    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission>;

    /// Renews each lease to its full ttl, in as few round trips as the engine can. Returns one
    /// result per entry, in the order of the batch. An error says nothing about the lock.
    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>>;

    /// Changes a held lock in place.
    ///
    /// # Errors
    /// [`Error::Lost`] if the claim does not hold the lock.
    async fn amend(&self, claim: &Claim, grant: &Grant, to: Amend) -> Result<Grant>;

    /// Passes a held lock on to `successor`, a fresh claim on the same name, with the same token
    /// and the same lease, which keeps running. The first caller wins: `claim` then does not hold
    /// any more and counts as withdrawn. A repetition with the same successor changes nothing. The
    /// validity of the grant is not renewed.
    ///
    /// # Errors
    /// [`Error::Lost`] if the claim does not hold the lock: its lease has ended, it was released,
    /// or it was passed on before. [`Error::NotHeld`] if the successor was withdrawn before.
    async fn adopt(&self, claim: &Claim, grant: &Grant, successor: &Claim) -> Result<Grant>;

    /// Releases the lock and admits the next waiters. `next`, a claim of the same name and client,
    /// is granted at once if no other claim waits (its grant is returned), and queued otherwise.
    /// The release stands even if `next` fails, which its own request reports.
    ///
    /// # Errors
    /// [`Error::NotHeld`] if the claim does not hold the lock. `next` then needs a request of its
    /// own, or must be withdrawn, as after any other error.
    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>>;

    /// Removes the claim with this id, held or waiting, and admits the next waiters like a release.
    /// A withdrawn claim stays withdrawn: a late request for it is rejected.
    ///
    /// # Errors
    /// Only [`Error::Unreachable`]. Withdrawing an unknown claim is not an error.
    async fn withdraw(&self, claim: &Claim) -> Result<()>;

    /// Which names in `scope` may have changed: [`Lockset::watch`](crate::Lockset::watch) reads
    /// them. A hint need not be exact; it costs one read. [`Hint::Missed`] comes first, once
    /// changes are reported from then on, and again whenever hints may have been lost. An error is
    /// reported by the watch. The stream ends when the engine is closed.
    ///
    /// By default all names are read every second.
    fn hints(&self, scope: &Scope) -> BoxStream<'static, Result<Hint>> {
        let _ = scope;
        common::hints::polling_hints()
    }

    /// The state of one name now.
    ///
    /// # Errors
    /// [`Error::Unreachable`].
    async fn inspect(&self, name: &Name) -> Result<LockState>;

    /// The names with this prefix that are held, waited for, or have a cell; in order.
    ///
    /// # Errors
    /// [`Error::Unreachable`].
    async fn list(&self, prefix: &Prefix) -> Result<Vec<LockState>>;

    /// Compare-and-set on the name's cell: state that outlives its writer (latches, barriers).
    /// `None` removes it. The version of an absent cell is [`Version::ABSENT`].
    ///
    /// # Errors
    /// [`Error::Unreachable`]. The outcome is then unknown; a read tells it.
    async fn cell(&self, name: &Name, expect: Version, value: Option<Vec<u8>>) -> Result<Swap>;

    /// Takes the lock away from all holders and notifies them. Returns the former holders.
    ///
    /// # Errors
    /// [`Error::Unreachable`].
    async fn force_release(&self, name: &Name, how: Break) -> Result<Vec<Holder>>;

    /// Events about claims of this client. Called once, by the client's keeper.
    fn events(&self) -> BoxStream<'static, Event>;

    /// This engine as a node of a quorum, if it can be one.
    fn as_fenced_node(&self) -> Option<&dyn FencedNode> {
        None
    }

    /// Ends the engine's own tasks and connections. Called once, after the last release.
    async fn close(&self) {}
}

/// An engine that can be a node of a quorum: its tokens can be chosen by the caller. It accepts
/// claims with a [`floor`](Claim::floor); other engines reject them.
#[async_trait]
pub trait FencedNode: Engine {
    /// Raises the fence of an exclusively held lock to `to`, which becomes its token.
    ///
    /// # Errors
    /// [`Error::Lost`] if the claim does not hold the lock exclusively or the fence is already
    /// above `to`.
    async fn raise(&self, claim: &Claim, grant: &Grant, to: Token) -> Result<Grant>;

    /// The health of the home itself: how far the quorum can rely on this node.
    ///
    /// # Errors
    /// [`Error::Unreachable`].
    async fn health(&self) -> Result<Health> {
        Ok(Health::default())
    }
}

/// The health of a home.
#[derive(Clone, Debug, Default)]
pub struct Health {
    /// Identifies this run of this server, if that can be known.
    pub run: Option<String>,
    /// Settings by which it may break a promise, as texts.
    pub warnings: Vec<String>,
    /// It was started lately and may have forgotten locks, so it is not counted for this long.
    pub counted_in: Option<Duration>,
}

/// Why two homes cannot both be counted.
fn same_server(one: &str, other: &str) -> String {
    format!("{one} and {other} are the same server, which would count twice; name each node once")
}

/// The part of a lease that is given up because clocks do not run equally fast: 1 % + 2 ms.
pub fn drift(ttl: Duration) -> Duration {
    ttl / 100 + Duration::from_millis(2)
}

/// Until when a client may trust a lease of `ttl` that it requested at `sent`.
pub fn trusted_until(sent: Moment, ttl: Duration) -> Moment {
    (sent + ttl).saturating_sub(drift(ttl))
}

/// One request for one lock.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Claim {
    /// Identifies this acquisition.
    pub id: ClaimId,
    /// The lock.
    pub name: Name,
    /// Exclusive, shared or permits.
    pub mode: Mode,
    /// The length of a lease.
    pub ttl: Duration,
    /// The lease is never renewed.
    pub fixed: bool,
    /// `None`: the engine keeps tokens growing by its own clock. `Some(p)`: the caller chooses
    /// them, and the token is exactly the greater of the fence plus one and `p`.
    pub floor: Option<Token>,
    /// Shown to others beside the holder or waiter.
    pub note: Note,
    /// The lock may outlive its process: only the lease ends it.
    pub detachable: bool,
    /// How many replicas must have the grant before it counts; `None`: as the engine is configured.
    pub replicas: Option<Replicas>,
}

#[cfg(any(test, fuzzing))]
#[allow(clippy::unwrap_used, reason = "for tests")]
impl Claim {
    /// A fresh exclusive claim, as the front would make it.
    pub(crate) fn plain(name: &str, ttl: Duration) -> Self {
        Self {
            id: ClaimId::random(),
            name: name.parse().unwrap(),
            mode: Mode::Exclusive,
            ttl,
            fixed: false,
            floor: None,
            note: Note::default(),
            detachable: false,
            replicas: None,
        }
    }
}

/// How many replicas of a server must have a grant before it counts, on servers that replicate
/// asynchronously.
///
/// It makes the loss of a lock by a failover less likely, not impossible: a replica that has the
/// grant need not be the one that is promoted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Replicas {
    /// None: the server alone is enough.
    #[default]
    None,
    /// At least this many, the server itself not counted.
    AtLeast(u32),
    /// More than half of all, including the server.
    Majority,
}

impl FromStr for Replicas {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "none" => Ok(Self::None),
            "majority" => Ok(Self::Majority),
            _ => text.parse().map(Self::AtLeast).map_err(|_| {
                Error::invalid("number of replicas", text, "none, a number, or majority")
            }),
        }
    }
}

/// How long an acquisition may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// One attempt.
    No,
    /// Until this moment.
    Until(Moment),
    /// As long as it takes.
    Forever,
}

impl Wait {
    /// The moment after which waiting is over.
    pub fn deadline(self) -> Moment {
        match self {
            Wait::No => Moment::from_nanos(0),
            Wait::Until(deadline) => deadline,
            Wait::Forever => Moment::NEVER,
        }
    }
}

/// A held lock: the engine's reply to a claim.
#[derive(Clone, PartialEq, Eq)]
pub struct Grant {
    /// The fencing token.
    pub token: Token,
    /// Until when, on the client's clock, the lock may be trusted without another reply.
    pub valid_until: Moment,
    /// The engine's own data; part of a ticket.
    pub key: Vec<u8>,
}

impl fmt::Debug for Grant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key may be a secret.
        f.debug_struct("Grant")
            .field("token", &self.token)
            .field("valid_until", &self.valid_until)
            .finish_non_exhaustive()
    }
}

/// The engine's decision about a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a granted lock is held until it is released"]
pub enum Admission {
    /// The claim holds the lock.
    Granted(Grant),
    /// The claim was not admitted in time, and nothing of it is left behind.
    NotInTime,
    /// The engine does not accept this claim any more: it was withdrawn, or the engine lost it
    /// while it waited. A fresh claim may be admitted.
    Forgotten,
}

impl Admission {
    /// The grant, if there is one.
    pub fn granted(self) -> Option<Grant> {
        match self {
            Admission::Granted(grant) => Some(grant),
            Admission::NotInTime | Admission::Forgotten => None,
        }
    }

    /// The same decision with another grant.
    pub fn map(self, change: impl FnOnce(Grant) -> Grant) -> Self {
        match self {
            Admission::Granted(grant) => Admission::Granted(change(grant)),
            other => other,
        }
    }
}

impl Admission {
    /// The decision of an engine whose inner functions report [`Error::NotHeld`] for a claim that
    /// is not accepted any more.
    pub(crate) fn from_inner(decided: Result<Option<Grant>>) -> Result<Self> {
        match decided {
            Err(Error::NotHeld { .. }) => Ok(Admission::Forgotten),
            decided => decided.map(Admission::from),
        }
    }

    /// The reverse of [`from_inner`](Admission::from_inner).
    pub(crate) fn into_inner(self, name: &Name) -> Result<Option<Grant>> {
        match self {
            Admission::Forgotten => Err(Error::NotHeld { name: name.clone() }),
            decided => Ok(decided.granted()),
        }
    }
}

impl From<Option<Grant>> for Admission {
    fn from(granted: Option<Grant>) -> Self {
        granted.map_or(Admission::NotInTime, Admission::Granted)
    }
}

/// The engine's reply to one renewal.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "the renewal may have been refused"]
pub enum Renewal {
    /// The lease runs for its full ttl again.
    Renewed(Grant),
    /// An operator wants the lock back. The running lease stands, and is the last.
    LastLease,
    /// The claim does not hold the lock.
    Lost(LossReason),
}

impl Renewal {
    /// The renewed grant, if there is one.
    pub fn renewed(self) -> Option<Grant> {
        match self {
            Renewal::Renewed(grant) => Some(grant),
            Renewal::LastLease | Renewal::Lost(_) => None,
        }
    }

    /// The same reply with another grant.
    pub fn map(self, change: impl FnOnce(Grant) -> Grant) -> Self {
        match self {
            Renewal::Renewed(grant) => Renewal::Renewed(change(grant)),
            other => other,
        }
    }
}

impl Renewal {
    /// The reply of an engine whose inner functions report a refused renewal as [`Error::Lost`].
    pub(crate) fn from_inner(reply: Result<Grant>) -> Result<Self> {
        match reply {
            Err(Error::Lost { reason: LossReason::Revoked, .. }) => Ok(Renewal::LastLease),
            Err(Error::Lost { reason, .. }) => Ok(Renewal::Lost(reason)),
            reply => reply.map(Renewal::Renewed),
        }
    }

    /// The reverse of [`from_inner`](Renewal::from_inner).
    pub(crate) fn into_inner(self, name: &Name) -> Result<Grant> {
        match self {
            Renewal::Renewed(grant) => Ok(grant),
            Renewal::LastLease => Err(Error::lost(name, LossReason::Revoked)),
            Renewal::Lost(reason) => Err(Error::lost(name, reason)),
        }
    }
}

/// A change to a held lock.
#[derive(Clone, Debug)]
pub enum Amend {
    /// From exclusive to shared; the token stays.
    Downgrade,
    /// Another note.
    Note(Note),
}

/// How an operator takes a lock away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Break {
    /// Reject renewals and notify the holder. The lock is free when the running lease ends.
    WhenLeaseEnds,
    /// Free it at once. Two holders may then act at the same time; only tokens protect against
    /// that.
    Now,
}

/// The scope of a watch.
#[derive(Clone, Debug)]
pub enum Scope {
    /// One name.
    Name(Name),
    /// All names with a prefix.
    Prefix(Prefix),
}

impl Scope {
    /// Whether `name` is in this scope.
    pub fn covers(&self, name: &Name) -> bool {
        match self {
            Scope::Name(one) => one == name,
            Scope::Prefix(prefix) => prefix.covers(name),
        }
    }
}

/// What an engine reports to a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hint {
    /// This name may have changed.
    Changed(Name),
    /// Changes may have gone unreported: the watch reads its whole scope.
    Missed,
}

/// What an engine reports to a client by itself.
#[derive(Clone, Debug)]
pub enum Event {
    /// This claim no longer holds its lock.
    Lost(ClaimId, LossReason),
    /// An operator wants the lock of this claim back. Its running lease stands, and is the last.
    LastLease(ClaimId),
    /// Whether this claim still holds is not known at the moment (a connection is down).
    Doubt(ClaimId),
}

impl Event {
    /// The event for an engine that reports both kinds by a reason.
    pub(crate) fn from_reason(id: ClaimId, reason: LossReason) -> Self {
        match reason {
            LossReason::Revoked => Event::LastLease(id),
            reason => Event::Lost(id, reason),
        }
    }
}

/// The result of a compare-and-set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Swap {
    /// Done; this is the new version.
    Done(Version),
    /// Not done, because this is the content of the cell.
    Found(Cell),
}

/// What an engine can do. A request for what is `false` here is [`Error::Unsupported`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The engine's name, such as `redis`.
    pub engine: &'static str,
    /// Readers and writers, and downgrading.
    pub shared: bool,
    /// Semaphores.
    pub permits: bool,
    /// Cells, hence latches and barriers.
    pub cells: bool,
    /// When the process of a holder dies, the lock passes on at once, not when its lease ends.
    pub sees_death: bool,
    /// The guard is notified of a break at once, not at its next renewal.
    pub pushes: bool,
    /// State outlives the last client, and tokens keep growing after a restart.
    pub durable: bool,
    /// Replicas can be waited for: see [`Replicas`].
    pub replicas: bool,
    /// The session timeout that the server granted, if the lease of an ordinary lock is the
    /// client's session: the ttl of all locks that are neither fixed nor detachable. `None` if
    /// every lock has a lease of its own.
    pub session: Option<Duration>,
    /// The locks of a client that are neither fixed nor detachable share leases, which last as long
    /// as the client. So a claim that is over does not end by itself: it must be withdrawn.
    pub shared_lease: bool,
    /// The shortest ttl this engine can keep.
    pub min_ttl: Duration,
    /// The longest ttl this engine can keep.
    pub max_ttl: Duration,
}

impl Capabilities {
    /// An engine called `engine` that only has exclusive locks, and promises nothing that it need
    /// not: all flags are `false`, a lease lasts from 100 milliseconds to a day. An engine outside
    /// this crate starts from it and sets the fields that differ.
    pub const fn new(engine: &'static str) -> Self {
        Self {
            engine,
            shared: false,
            permits: false,
            cells: false,
            sees_death: false,
            pushes: false,
            durable: false,
            replicas: false,
            session: None,
            shared_lease: false,
            min_ttl: Duration::from_millis(100),
            max_ttl: Duration::from_secs(86_400),
        }
    }
}
