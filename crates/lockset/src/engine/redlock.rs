//! Fenced Redlock: a quorum of independent homes whose tokens are safe under any timing.
//!
//! `N` nodes that know nothing of each other, each with its own fence; `q = N/2 + 1` of them are a
//! quorum. An attempt asks all nodes at once for the lock with one proposed token. The value that a
//! quorum granted is the token; if they granted different ones, all are lifted to the greatest. At
//! one node a value belongs to one attempt, ever, and two quorums share a node: so tokens are
//! unique, and later acquisitions get greater ones, whatever the clocks say and however late or
//! often a message arrives. That nobody else *holds* at the same time does depend on clocks, as in
//! every lock with leases. `GUARANTEES.md` says it in full, `docs/redlock.md` shows the proof.
//!
//! This file knows nothing of Redis: a node is an [`Engine`] that keeps a fence. The parts, in the
//! order in which a claim meets them:
//!
//! * `claims` is the way of one claim through its attempts; `attempt` what the answers come to;
//! * `nodes` says which nodes are worth asking;
//! * `keeping` renews, sows again, gives back; `sight` shows what a quorum says.
//!
//! # Waiting
//! Contenders who ask everywhere at once split the votes, and nobody wins. So whoever finds a lock
//! taken queues at the *door*, the first node that answers, and takes the other nodes only when the
//! door has let it in. A newcomer who finds the door taken gives back what it got elsewhere.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use futures_core::stream::BoxStream;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{mpsc, watch};

use self::attempt::{Attempt, whole};
use self::nodes::Nodes;
use super::common::tombstones::Tombstones;
use super::common::watch::told_once;
use super::{
    Amend, Break, Capabilities, Claim, ClaimId, Engine, Event, Grant, Holder, LockState, Mode,
    Scope, Swap, Version, Wait,
};
use crate::clock::{Clock, Moment, wall_micros};
use crate::error::{Error, Result};
use crate::hash::FastMap;
use crate::name::{Name, Prefix};
use crate::report::report;
use crate::sync;
use crate::token::Token;

mod attempt;
mod claims;
mod keeping;
mod nodes;
mod sight;

const ENGINE: &str = "redlock";
/// The time a node gets for an answer, if it is not set: a small part of the ttl, between these.
const NODE_TIMEOUT: (Duration, Duration) = (Duration::from_millis(200), Duration::from_millis(500));
/// The longest time until a quorum must have answered.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a name counts as wanted by several after somebody found it taken.
const CROWDED: Duration = Duration::from_secs(1);
/// At most so many names are remembered as such.
const MOST_CROWDED: usize = 4096;
/// More nodes than this make a lock slower, not safer.
const MOST_NODES: usize = 33;

/// How a [`Redlock`] goes about its nodes.
#[derive(Clone, Debug)]
pub struct RedlockOptions {
    /// How long a node may take to answer, when a quorum has, before it is left out; `None`: a
    /// twentieth of the ttl, but at least 200 ms and at most 500 ms.
    pub node_timeout: Option<Duration>,
    /// The longest ttl of any lock of this quorum. A node that may have forgotten what it granted
    /// is not counted for so long.
    pub max_ttl: Duration,
}

impl Default for RedlockOptions {
    fn default() -> Self {
        Self { node_timeout: None, max_ttl: Duration::from_secs(60) }
    }
}

/// One client of a quorum of nodes.
pub struct Redlock {
    core: Arc<Core>,
    listeners: Vec<tokio::task::AbortHandle>,
}

#[derive(Debug)]
struct Core {
    nodes: Arc<Nodes>,
    options: RedlockOptions,
    clock: Clock,
    /// The last attempt of every claim of this client that is under way or held.
    attempts: Mutex<FastMap<ClaimId, Arc<Attempt>>>,
    withdrawn: Mutex<Tombstones>,
    /// Attempts that were over while a node was still asked, and when to look at them again.
    late: Mutex<Vec<(Moment, Arc<Attempt>)>>,
    /// The names that somebody found taken, and when.
    crowds: Mutex<FastMap<Name, Moment>>,
    /// The greatest token that this client has seen or proposed.
    greatest: AtomicU64,
    /// How many tasks give something back at this moment.
    owing: watch::Sender<usize>,
    tell: mpsc::UnboundedSender<Event>,
    events: Mutex<Option<mpsc::UnboundedReceiver<Event>>>,
}

impl std::fmt::Debug for Redlock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Redlock({})", self.identity())
    }
}

impl Redlock {
    /// A quorum of these nodes. Every client must name the same nodes, in the same order. Must be
    /// called inside a tokio runtime, on which everything lives that goes on in the background.
    ///
    /// # Errors
    /// [`Error::Invalid`] for fewer than three nodes or a node that is named twice.
    pub fn over(
        nodes: Vec<Arc<dyn Engine>>,
        options: RedlockOptions,
        clock: Clock,
    ) -> Result<Self> {
        check_nodes(&nodes)?;
        let (tell, events) = mpsc::unbounded_channel();
        let core = Arc::new(Core {
            nodes: Arc::new(Nodes::new(nodes, options.node_timeout, clock.clone())),
            options,
            clock,
            attempts: Mutex::default(),
            late: Mutex::default(),
            withdrawn: Mutex::default(),
            crowds: Mutex::default(),
            greatest: AtomicU64::new(0),
            owing: watch::Sender::new(0),
            tell,
            events: Mutex::new(Some(events)),
        });
        let listeners = (0..core.nodes.all.len()).map(|node| {
            let core = core.clone();
            let mut events = core.nodes.all[node].engine.events();
            let listen = async move {
                while let Some(signal) = events.next().await {
                    core.hear(node, signal);
                }
            };
            tokio::spawn(listen).abort_handle()
        });
        let listeners = listeners.collect();
        Ok(Self { core, listeners })
    }

    /// Looks at all nodes: a quorum must answer, and no server may be there twice. What is wrong
    /// with the settings of a node is said as a warning.
    ///
    /// # Errors
    /// [`Error::Unreachable`].
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn check(&self) -> Result<()> {
        let nodes = &self.core.nodes;
        let (mut well, mut trouble) = (0, None);
        let mut silent: Vec<usize> = (0..nodes.all.len()).collect();
        let mut looks: FuturesUnordered<_> = (0..nodes.all.len())
            .map(|node| async move { (node, nodes.look_at(node).await) })
            .collect();
        let mut limit = Moment::NEVER;
        // When there is a quorum, the others get the time of a node and no more: one that is frozen
        // must not make every new client slow.
        while let Some(Some((node, look))) = self.core.clock.timeout_at(limit, looks.next()).await {
            match look {
                Ok(vitals) => {
                    well += 1;
                    silent.retain(|other| *other != node);
                    let identity = nodes.all[node].engine.identity();
                    for worry in vitals.warnings {
                        report!(
                            warn,
                            node = identity,
                            warning = worry,
                            "a node may break a promise"
                        );
                    }
                }
                Err(error) if !error.is_retryable() => return Err(error),
                Err(error) => drop(trouble.get_or_insert(error)),
            }
            if well == nodes.quorum {
                limit = self.core.clock.now() + NODE_TIMEOUT.0;
            }
        }
        drop(looks);
        silent.into_iter().for_each(|node| nodes.leave_out(node));
        match well < nodes.quorum {
            true => Err(nodes.too_few(well, trouble)),
            false => Ok(()),
        }
    }
}

impl Drop for Redlock {
    fn drop(&mut self) {
        self.listeners.iter().for_each(tokio::task::AbortHandle::abort);
    }
}

fn check_nodes(nodes: &[Arc<dyn Engine>]) -> Result<()> {
    let bad = |why: &str| Err(Error::invalid("number of nodes", &nodes.len().to_string(), why));
    if nodes.len() < 3 {
        return bad("a quorum needs at least three nodes; with one, use its own URL");
    }
    if nodes.len() > MOST_NODES {
        return bad("more than 33 make a lock slower, not safer");
    }
    let identities: Vec<String> = nodes.iter().map(|node| node.identity()).collect();
    for (place, identity) in identities.iter().enumerate() {
        if identities[..place].contains(identity) {
            return Err(Error::invalid("list of nodes", identity, "it is named twice"));
        }
    }
    if nodes.len().is_multiple_of(2) {
        let fewer = nodes.len() - 1;
        report!(warn, nodes = nodes.len(), as_good_as = fewer, "an even number of nodes");
    }
    Ok(())
}

/// The URL of a quorum whose nodes have these URLs, if there is one: they differ in nothing but
/// their hosts.
fn url_of(nodes: &[String], max_ttl: Duration) -> Option<String> {
    let (scheme, first) = nodes.first()?.split_once("://")?;
    let (_, tail) = first.split_at_checked(first.find('/')?)?;
    let host = |node: &'_ String| {
        let host = node.strip_prefix(scheme)?.strip_prefix("://")?.strip_suffix(tail)?;
        Some(host.to_owned())
    };
    let hosts = nodes.iter().map(host).collect::<Option<Vec<String>>>()?.join(",");
    let scheme = match scheme {
        "redis" => "redlock",
        "rediss" => "redlocks",
        _ => return None,
    };
    // All clients of a quorum must agree on it.
    let max_ttl = match max_ttl == RedlockOptions::default().max_ttl {
        true => String::new(),
        false => format!("&max_ttl={}ms", max_ttl.as_millis()),
    };
    Some(format!("{scheme}://{hosts}{tail}{max_ttl}"))
}

impl Core {
    fn check(&self, claim: &Claim) -> Result<()> {
        let unsupported = |what: &str| {
            Err(Error::Unsupported { engine: ENGINE, what: format!("{what} over a quorum") })
        };
        match claim.mode {
            Mode::Exclusive => {}
            Mode::Shared => return unsupported("readers that share a lock"),
            Mode::Permits { .. } => return unsupported("semaphores"),
        }
        if claim.floor.is_some() {
            return unsupported("a floor for tokens");
        }
        if claim.ttl > self.options.max_ttl {
            let why = format!("max_ttl of this quorum is {:?}", self.options.max_ttl);
            return Err(Error::invalid("ttl", &format!("{:?}", claim.ttl), why));
        }
        if whole(claim.id) != claim.id {
            let why = "its last byte counts the attempts of a quorum and must be zero";
            return Err(Error::invalid("claim id", &claim.id.to_string(), why));
        }
        Ok(())
    }

    fn node_timeout(&self, ttl: Duration) -> Duration {
        let usual = (ttl / 20).clamp(NODE_TIMEOUT.0, NODE_TIMEOUT.1);
        self.options.node_timeout.unwrap_or(usual)
    }

    /// How long it may take until a quorum has answered. While too few have, nothing is won by
    /// giving up on the others.
    fn patience(&self, ttl: Duration) -> Duration {
        (ttl / 4).clamp(self.node_timeout(ttl), PATIENCE.max(self.node_timeout(ttl)))
    }

    /// A token above all that this client has seen, and not below the clock.
    fn propose(&self) -> Token {
        let clock = wall_micros();
        let next = |greatest: u64| Some(Token::next(greatest, clock).get());
        let before = self.greatest.fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
        Token::next(before.unwrap_or_default(), clock)
    }

    fn saw(&self, token: Token) {
        self.greatest.fetch_max(token.get(), Ordering::AcqRel);
    }

    fn attempts(&self) -> MutexGuard<'_, FastMap<ClaimId, Arc<Attempt>>> {
        sync::lock(&self.attempts)
    }

    fn attempt_of(&self, claim: ClaimId) -> Option<Arc<Attempt>> {
        self.attempts().get(&claim).cloned()
    }

    /// Nobody asks for this attempt any more.
    fn forget(&self, attempt: &Arc<Attempt>) {
        let mut attempts = self.attempts();
        let claim = whole(attempt.claim.id);
        if attempts.get(&claim).is_some_and(|known| Arc::ptr_eq(known, attempt)) {
            attempts.remove(&claim);
        }
    }

    fn is_withdrawn(&self, claim: ClaimId) -> bool {
        sync::lock(&self.withdrawn).contains(claim)
    }

    fn remember_withdrawn(&self, claim: ClaimId) {
        sync::lock(&self.withdrawn).insert(claim, self.clock.now());
    }

    /// Somebody found this name taken.
    fn crowded(&self, claim: &Claim) {
        let now = self.clock.now();
        let mut crowds = sync::lock(&self.crowds);
        if crowds.len() >= MOST_CROWDED {
            crowds.retain(|_, since| now < *since + CROWDED);
        }
        if crowds.len() < MOST_CROWDED {
            crowds.insert(claim.name.clone(), now);
        }
    }

    fn is_crowded(&self, claim: &Claim) -> bool {
        let since = sync::lock(&self.crowds).get(&claim.name).copied();
        since.is_some_and(|since| self.clock.now() < since + CROWDED)
    }
}

#[async_trait]
impl Engine for Redlock {
    fn capabilities(&self) -> Capabilities {
        let each: Vec<_> =
            self.core.nodes.all.iter().map(|node| node.engine.capabilities()).collect();
        Capabilities {
            engine: ENGINE,
            shared: false,
            permits: false,
            cells: false,
            sees_death: false,
            pushes: each.iter().all(|can| can.pushes),
            durable: each.iter().all(|can| can.durable),
            replicas: false,
            session: None,
            shared_lease: false,
            min_ttl: each.iter().map(|can| can.min_ttl).max().unwrap_or_default(),
            max_ttl: self.core.options.max_ttl,
        }
    }

    fn identity(&self) -> String {
        let each: Vec<_> = self.core.nodes.all.iter().map(|node| node.engine.identity()).collect();
        let url = url_of(&each, self.core.options.max_ttl);
        url.unwrap_or_else(|| format!("redlock:{}", each.join(",")))
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        self.core.acquire(claim, wait).await
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        self.core.renew(batch).await
    }

    async fn raise(&self, _: &Claim, _: &Grant, _: Token) -> Result<Grant> {
        let what = "lifting a token over a quorum".to_owned();
        Err(Error::Unsupported { engine: ENGINE, what })
    }

    async fn amend(&self, claim: &Claim, grant: &Grant, to: Amend) -> Result<Grant> {
        if let Amend::Downgrade = to {
            let what = "readers that share a lock over a quorum".to_owned();
            return Err(Error::Unsupported { engine: ENGINE, what });
        }
        self.core.amend(claim, grant, &to).await
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
        // Whoever is next has a place at the door from then on, and asks for the rest itself.
        self.core.release(claim, grant, next).await.map(|()| None)
    }

    async fn withdraw(&self, claim: &Claim) -> Result<()> {
        self.core.withdraw(claim).await
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

    async fn cell(&self, _: &Name, _: Version, _: Option<Vec<u8>>) -> Result<Swap> {
        let what = "cells (latches and barriers) over a quorum".to_owned();
        Err(Error::Unsupported { engine: ENGINE, what })
    }

    async fn force_release(&self, name: &Name, how: Break) -> Result<Vec<Holder>> {
        self.core.force_release(name, how).await
    }

    fn events(&self) -> BoxStream<'static, Event> {
        told_once(sync::lock(&self.core.events).take())
    }

    async fn close(&self) {
        self.listeners.iter().for_each(tokio::task::AbortHandle::abort);
        // What a slow node still has is given back first, if it does not take too long.
        let mut owing = self.core.owing.subscribe();
        let limit = self.core.clock.now() + PATIENCE;
        let _ = self.core.clock.timeout_at(limit, owing.wait_for(|owing| *owing == 0)).await;
        let each = self.core.nodes.all.iter().map(|node| node.engine.close());
        futures_util::future::join_all(each).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_url_of_a_quorum_is_made_of_those_of_its_nodes() {
        let url = |nodes: &[&str], max_ttl| {
            let nodes: Vec<String> = nodes.iter().map(|&node| node.to_owned()).collect();
            url_of(&nodes, Duration::from_secs(max_ttl))
        };
        let nodes = ["redis://a:1/2?prefix=p:", "redis://[::1]:2/2?prefix=p:"];
        let quorum = "redlock://a:1,[::1]:2/2?prefix=p:".to_owned();
        assert_eq!(url(&nodes, 60), Some(quorum.clone()));
        assert_eq!(url(&nodes, 5), Some(quorum + "&max_ttl=5000ms"));
        assert_eq!(url(&["redis://a:1/2?prefix=p:", "redis://b:1/3?prefix=p:"], 60), None);
        assert_eq!(url(&["redis://a:1/2?prefix=p:", "rediss://b:1/2?prefix=p:"], 60), None);
        assert_eq!(url(&["memory:a", "memory:b"], 60), None);
    }
}
