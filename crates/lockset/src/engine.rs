//! The contract between the primitives and the engines.
//!
//! A hold is *data* — a [`Claim`] and, once granted, a [`Grant`] — and the verbs belong to the
//! [`Engine`]. Everything above (gates, guards, keepers, primitives) is written once, against this
//! trait. An engine is chosen by configuration, so the trait is object safe.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use async_trait::async_trait;
use futures_core::stream::BoxStream;
use serde::{Deserialize, Serialize};

use crate::clock::Moment;
use crate::error::{Error, LossReason, Result};
use crate::name::{Name, Note, Prefix};
use crate::token::Token;

pub(crate) mod common;
#[cfg(feature = "etcd")]
pub mod etcd;
#[cfg(feature = "local")]
pub mod local;
pub mod memory;
#[cfg(feature = "redis")]
pub mod redis;
pub mod redlock;
#[cfg(feature = "zookeeper")]
pub mod zookeeper;

/// Where locks live.
///
/// # The rules every engine keeps
/// * **Identity.** A claim is known by its [`ClaimId`]; a repeated request with the same id changes
///   nothing and gets the same answer. Renewing and releasing check id *and* token, atomically
///   where the lock lives.
/// * **Time.** A grant's `valid_until` counts from a moment *before* the request was sent, less
///   [`drift`]; nobody else is granted the lock by expiry before it.
/// * **Order.** Waiters are admitted in the order in which they queued, one predicate for all
///   modes: see [`Mode`].
/// * **No approximation.** What an engine cannot do is [`Error::Unsupported`].
/// * **Cancel safety.** A dropped `acquire` may leave its claim behind; its caller then withdraws
///   it. All other futures may be dropped and repeated at will.
#[async_trait]
pub trait Engine: fmt::Debug + Send + Sync {
    /// What this engine can do, and how strong its promises are.
    fn capabilities(&self) -> Capabilities;

    /// Which home this is, without secrets: two clients of the same home give the same text where
    /// that can be known. Orders multi-locks and ties tickets to their home. It is a URL of the
    /// home where one can be given.
    fn identity(&self) -> String;

    /// Takes the lock for `claim`, waiting as told. `None`: not admitted in time, and nothing is
    /// left behind. After an error something may be left behind; the caller withdraws the claim.
    ///
    /// # Errors
    /// [`Error::Conflict`] if the name is in use in an incompatible way, [`Error::Unsupported`]
    /// for a mode the engine does not have, [`Error::NotHeld`] if the claim was withdrawn before,
    /// [`Error::Unreachable`] otherwise.
    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>>;

    /// Renews each lease to its full ttl, in as few round trips as the engine can. Answers in the
    /// order of the batch; [`Error::Lost`] for an entry that does not hold its lock. The reason
    /// [`LossReason::Revoked`] says that the running lease still stands but is the last.
    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>>;

    /// Lifts the fence of a lock held exclusively to `to`, which becomes its token.
    ///
    /// # Errors
    /// [`Error::Lost`] if the claim does not hold the lock exclusively or the fence is already
    /// above `to`.
    async fn raise(&self, claim: &Claim, grant: &Grant, to: Token) -> Result<Grant>;

    /// Changes a held lock in place.
    ///
    /// # Errors
    /// [`Error::Lost`] if the claim does not hold the lock.
    async fn amend(&self, claim: &Claim, grant: &Grant, to: Amend) -> Result<Grant>;

    /// Passes a held lock on to `successor`, a fresh claim on the same name: with the same token
    /// and on the same lease, which goes on as it did. Whoever does so first wins: `claim` then
    /// holds no more and counts as withdrawn. Repeated with the same successor it changes nothing.
    /// What the grant says about its validity is not renewed by it.
    ///
    /// # Errors
    /// [`Error::Lost`] if the claim does not hold the lock: its lease has ended, it was released,
    /// or it was passed on before. [`Error::NotHeld`] if the successor was withdrawn before.
    async fn adopt(&self, claim: &Claim, grant: &Grant, successor: &Claim) -> Result<Grant>;

    /// Gives the lock back and admits whoever is next. `next`, a claim of the same name and client,
    /// is granted at once if nobody else waits (its grant is the answer), and queued otherwise. The
    /// release stands whatever becomes of `next`, which finds out by its own request.
    ///
    /// # Errors
    /// [`Error::NotHeld`] if the claim does not hold the lock. `next` then has to ask for itself,
    /// or to be withdrawn, as after any other error.
    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>>;

    /// Removes whatever bears this claim's id, held or waiting, and hands on like a release. A
    /// withdrawn claim stays withdrawn: a request for it that arrives late is refused.
    ///
    /// # Errors
    /// Only [`Error::Unreachable`]; withdrawing what is not there is no error.
    async fn withdraw(&self, claim: &Claim) -> Result<()>;

    /// The states of all names in `scope`, then of each name again whenever it may have changed.
    /// [`Scope::Name`] always yields that name's state first, as [`inspect`](Engine::inspect) does.
    fn watch(&self, scope: &Scope) -> BoxStream<'static, Result<LockState>>;

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
    /// [`Error::Unreachable`]; the outcome is then unknown and found out by reading again.
    async fn cell(&self, name: &Name, expect: Version, value: Option<Vec<u8>>) -> Result<Swap>;

    /// Takes the lock away from all who hold it, and tells them; answers who they were.
    ///
    /// # Errors
    /// [`Error::Unreachable`].
    async fn force_release(&self, name: &Name, how: Break) -> Result<Vec<Holder>>;

    /// What the engine has to tell about claims of this client without being asked. Called once,
    /// by the client's keeper.
    fn events(&self) -> BoxStream<'static, Event>;

    /// How the home itself is: for a quorum of homes, which must know what each of them is worth.
    ///
    /// # Errors
    /// [`Error::Unreachable`].
    async fn health(&self) -> Result<Health> {
        Ok(Health::default())
    }

    /// Ends the engine's own tasks and connections. Called once, after the last release.
    async fn close(&self) {}
}

/// How a home is.
#[derive(Clone, Debug, Default)]
pub struct Health {
    /// Tells this run of this server from all others, where that can be known.
    pub run: Option<String>,
    /// Settings by which it may break a promise, in words.
    pub warnings: Vec<String>,
    /// It was started lately and may have forgotten locks, so it is not counted for so long.
    pub counted_in: Option<Duration>,
}

/// Why two homes cannot both be counted.
fn same_server(one: &str, other: &str) -> String {
    format!("{one} and {other} are the same server, which would count twice; name each node once")
}

/// A server as a URL names it.
#[cfg(any(feature = "redis", feature = "zookeeper"))]
fn url_host(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// The part of a lease that is given up because clocks do not run equally fast: 1 % + 2 ms.
pub fn drift(ttl: Duration) -> Duration {
    ttl / 100 + Duration::from_millis(2)
}

/// When a client must stop to trust a lease of `ttl` that it requested at `sent`.
pub fn trusted_until(sent: Moment, ttl: Duration) -> Moment {
    (sent + ttl).saturating_sub(drift(ttl))
}

/// 120 random bits and a zero byte, new for every acquisition and chosen before the first byte is
/// sent. In the last byte an engine that makes several attempts at one lock counts them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClaimId(u128);

impl ClaimId {
    /// A fresh id.
    pub fn random() -> Self {
        Self(rand::random::<u128>() << 8)
    }

    /// The id with these bits.
    pub const fn from_bits(bits: u128) -> Self {
        Self(bits)
    }

    /// The id's bits.
    pub const fn to_bits(self) -> u128 {
        self.0
    }
}

impl fmt::Display for ClaimId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for ClaimId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for ClaimId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match u128::from_str_radix(text, 16) {
            Ok(bits) if text.len() == 32 => Ok(Self(bits)),
            _ => Err(Error::invalid("claim id", text, "32 hexadecimal digits are needed")),
        }
    }
}

impl Serialize for ClaimId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ClaimId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// One wish for one lock.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Claim {
    /// Who wishes.
    pub id: ClaimId,
    /// For what.
    pub name: Name,
    /// In which way.
    pub mode: Mode,
    /// How long a lease lasts without renewal.
    pub ttl: Duration,
    /// The lease is never renewed.
    pub fixed: bool,
    /// `None`: the engine keeps tokens growing with its own clock. `Some(p)`: the caller answers
    /// for the clock, and the token is exactly the greater of the fence plus one and `p`.
    pub floor: Option<Token>,
    /// What others see.
    pub note: Note,
    /// The lock may outlive its process: only the lease ends it.
    pub detachable: bool,
    /// How many replicas must have the grant before it is believed; `None`: as the engine is set.
    pub replicas: Option<Replicas>,
}

#[cfg(test)]
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

/// How many replicas of a server must have a grant before it is believed, where replication does
/// not wait by itself.
///
/// It makes the loss of a lock by a failover less likely, not impossible: a replica that has the
/// grant need not be the one that is promoted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Replicas {
    /// None: the server's own word is enough.
    #[default]
    None,
    /// So many, the server itself not counted.
    AtLeast(u32),
    /// Together with the server more than half of all.
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

/// How a claim shares its lock with others.
///
/// One predicate decides all modes: with everybody *before* it in the queue, holding or waiting,
/// counted as holding, an exclusive claim must be alone, a shared claim must meet no exclusive one,
/// and the permits must add up to no more than the limit. Hence strict order, and no starvation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Alone.
    Exclusive,
    /// Together with other shared claims.
    Shared,
    /// Some of a number of permits.
    Permits {
        /// How many this claim takes.
        take: u32,
        /// How many there are.
        limit: u32,
    },
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mode::Exclusive => f.write_str("exclusive"),
            Mode::Shared => f.write_str("shared"),
            Mode::Permits { take, limit } => write!(f, "{take} of {limit} permits"),
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

/// A lock held: what the engine answered to a claim.
#[derive(Clone, PartialEq, Eq)]
pub struct Grant {
    /// The fencing token.
    pub token: Token,
    /// Until when, on the client's clock, the lock may be trusted without another answer.
    pub valid_until: Moment,
    /// The engine's own; travels in a ticket.
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
    /// Refuse renewals and tell the holder; the lock is free when the running lease ends.
    WhenLeaseEnds,
    /// Free it at once. Two parties may then act at the same time; only tokens help.
    Now,
}

/// What a watch looks at.
#[derive(Clone, Debug)]
pub enum Scope {
    /// One name.
    Name(Name),
    /// All names with a prefix.
    Prefix(Prefix),
}

impl Scope {
    /// Whether this watch looks at `name`.
    pub fn covers(&self, name: &Name) -> bool {
        match self {
            Scope::Name(one) => one == name,
            Scope::Prefix(prefix) => prefix.covers(name),
        }
    }
}

/// What an engine tells a client without being asked.
#[derive(Clone, Debug)]
pub enum Event {
    /// This claim no longer holds its lock; with [`LossReason::Revoked`], its lease is the last.
    Lost(ClaimId, LossReason),
    /// Whether this claim still holds is not known at the moment (a connection is down).
    Doubt(ClaimId),
}

/// All that is known of one name at one moment.
#[derive(Clone, Debug, Serialize)]
pub struct LockState {
    /// The name.
    pub name: Name,
    /// Who holds it.
    pub holders: Vec<Holder>,
    /// Who waits, first come first.
    pub waiters: Vec<Waiter>,
    /// The greatest token given so far, where the engine remembers it.
    pub fence: Option<Token>,
    /// Its cell, if it has one.
    #[serde(skip)]
    pub cell: Option<Cell>,
}

impl LockState {
    /// The state of a name that nobody uses.
    pub fn free(name: Name) -> Self {
        Self { name, holders: Vec::new(), waiters: Vec::new(), fence: None, cell: None }
    }

    /// Whether somebody holds it or waits for it, or it has a cell: what a listing shows.
    pub fn is_used(&self) -> bool {
        !self.holders.is_empty() || !self.waiters.is_empty() || self.cell.is_some()
    }
}

/// Somebody who holds a lock.
#[derive(Clone, Debug, Serialize)]
pub struct Holder {
    /// The claim; `None` for a lock taken by something that is not lockset.
    pub claim: Option<ClaimId>,
    /// Its token, where it has one.
    pub token: Option<Token>,
    /// How it holds.
    pub mode: Mode,
    /// What it says about itself.
    pub note: Note,
    /// How long its lease still runs.
    #[serde(rename = "left_ms", serialize_with = "as_millis")]
    pub left: Duration,
    /// An operator asked for the lock back; the lease will not be renewed.
    pub revoked: bool,
}

/// Somebody who waits for a lock.
#[derive(Clone, Debug, Serialize)]
pub struct Waiter {
    /// The claim.
    pub claim: ClaimId,
    /// How it wants to hold.
    pub mode: Mode,
    /// What it says about itself.
    pub note: Note,
}

fn as_millis<S: serde::Serializer>(span: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(u64::try_from(span.as_millis()).unwrap_or(u64::MAX))
}

/// A small piece of state beside a name, changed by compare-and-set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cell {
    /// Changes with every write and never returns.
    pub version: Version,
    /// What was written.
    pub value: Vec<u8>,
}

/// The version of a [`Cell`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u64);

impl Version {
    /// The version of a cell that does not exist.
    pub const ABSENT: Version = Version(0);
}

/// The answer to a compare-and-set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Swap {
    /// It was done; this is the new version.
    Done(Version),
    /// It was not done, because this is what the cell holds.
    Found(Cell),
}

/// What an engine can do. Whatever is `false` here is [`Error::Unsupported`] when asked for.
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
    /// A holder whose process dies is succeeded at once, not when its lease ends.
    pub sees_death: bool,
    /// The guard is told of a break at once, not at its next renewal.
    pub pushes: bool,
    /// State outlives the last client, and tokens go on growing after a restart.
    pub durable: bool,
    /// Replicas can be waited for: see [`Replicas`].
    pub replicas: bool,
    /// The lease of an ordinary lock is that of the client's session, which lasts so long, as the
    /// server granted it: the ttl of all locks that are neither fixed nor detachable. `None` where
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
