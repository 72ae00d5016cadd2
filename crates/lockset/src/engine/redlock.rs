//! Fenced Redlock: a quorum of independent servers whose tokens are safe under any timing.
//!
//! `N` nodes that know nothing of each other, each with its own fence; `q = N/2 + 1` of them are a
//! quorum. An attempt asks all nodes at once for the lock with one proposed token. The value that a
//! quorum granted is the token; if they granted different values, all are lifted to the greatest.
//! At one node a value belongs to one attempt, ever, and two quorums share a node. So tokens are
//! unique, and later acquisitions get greater ones, whatever the clocks say and however late or
//! often a message arrives. That no other client *holds* at the same time does depend on clocks, as
//! in every lock with leases. `GUARANTEES.md` has the full promise, `docs/redlock.md` the proof.
//!
//! This engine knows nothing of Redis: a node is an [`Engine`] that keeps a fence. The parts, in
//! the order in which a claim meets them:
//!
//! * `acquire` makes attempts, `round` sends the requests of one attempt, and `attempt` is what
//!   their replies amount to;
//! * `nodes` decides which nodes are usable;
//! * `renew`, `amend`, `adopt` and `events` are about a held lock, `release` ends it or withdraws
//!   it, and `inspect` merges what the nodes show.
//!
//! Every request is a task of the engine's own runtime, and the caller waits for its reply. A
//! caller that is not polled delays itself only: replies are read in time, no node is taken for
//! silent because of it, and what an attempt got is cleaned up.
//!
//! # Waiting
//! Contenders that ask everywhere at once split the votes, and none wins. So a claim that finds the
//! lock taken queues at the *entry node*, the first usable one, and asks the other nodes once it is
//! granted there. A new claim that is refused by the entry node releases what it got elsewhere.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use futures_core::stream::BoxStream;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{mpsc, oneshot, watch};

use self::attempt::{Attempt, AttemptPhase, claim_of};
use self::nodes::QuorumNodes;
use super::common::hints::told_once;
use super::common::tombstones::Tombstones;
use super::{
    Admission, Amend, Break, Capabilities, Claim, ClaimId, Engine, Event, FencedNode, Grant, Hint,
    Holder, LockState, Mode, Renewal, Scope, Swap, Version, Wait,
};
use crate::clock::{Clock, Moment, wall_micros};
use crate::error::{Error, LossReason, Result};
use crate::hash::FastMap;
use crate::name::{Name, Prefix};
use crate::report::report;
use crate::sync;
use crate::token::Token;

mod acquire;
mod adopt;
mod amend;
mod attempt;
mod events;
mod inspect;
mod nodes;
mod release;
mod renew;
mod round;

const ENGINE: &str = "redlock";
/// The bounds of the default timeout of a node, which is a twentieth of the ttl.
const NODE_TIMEOUT: (Duration, Duration) = (Duration::from_millis(200), Duration::from_millis(500));
/// The maximum time until a quorum must have replied.
const MAX_QUORUM_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a name counts as contended after a claim found it taken.
const CONTENDED_FOR: Duration = Duration::from_secs(1);
/// Maximum names that are remembered as contended.
const MAX_CONTENDED: usize = 4096;
/// Maximum nodes: more make a lock slower, not safer.
const MAX_NODES: usize = 33;

/// Timing of a [`Redlock`].
#[derive(Clone, Debug)]
pub struct RedlockOptions {
    /// How long a node may take to reply when a quorum has replied, before it is excluded. `None`:
    /// a twentieth of the ttl, but at least 200 ms and at most 500 ms.
    pub node_timeout: Option<Duration>,
    /// The maximum ttl of any lock of this quorum. A node that may have forgotten what it granted
    /// is not counted for this time.
    pub max_ttl: Duration,
}

impl Default for RedlockOptions {
    fn default() -> Self {
        Self { node_timeout: None, max_ttl: Duration::from_secs(60) }
    }
}

/// One client of a quorum of nodes.
pub struct Redlock {
    core: Arc<RedlockCore>,
    listeners: Vec<tokio::task::AbortHandle>,
}

#[derive(Debug)]
struct RedlockCore {
    nodes: Arc<QuorumNodes>,
    options: RedlockOptions,
    clock: Clock,
    /// The last attempt of every claim of this client that is being acquired or is held.
    attempts: Mutex<FastMap<ClaimId, Arc<Attempt>>>,
    withdrawn: Mutex<Tombstones>,
    /// The names that a claim found taken, and when.
    contended: Mutex<FastMap<Name, Moment>>,
    /// The greatest token that this client has seen or proposed.
    greatest_token: AtomicU64,
    /// The number of tasks that clean up.
    cleanups: watch::Sender<usize>,
    events_sender: mpsc::UnboundedSender<Event>,
    events: Mutex<Option<mpsc::UnboundedReceiver<Event>>>,
}

impl std::fmt::Debug for Redlock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Redlock({})", self.identity())
    }
}

impl Redlock {
    /// A quorum of these nodes. Every client must name the same nodes, in the same order. Must be
    /// called inside a tokio runtime: all requests run there as tasks, so it must outlive them.
    ///
    /// # Errors
    /// [`Error::Invalid`] for fewer than three nodes, more than 33, or a node that is named twice.
    pub fn over(
        nodes: Vec<Arc<dyn FencedNode>>,
        options: RedlockOptions,
        clock: Clock,
    ) -> Result<Self> {
        check_nodes(&nodes)?;
        let (events_sender, events) = mpsc::unbounded_channel();
        let core = Arc::new(RedlockCore {
            nodes: Arc::new(QuorumNodes::new(nodes, options.node_timeout, clock.clone())),
            options,
            clock,
            attempts: Mutex::default(),
            withdrawn: Mutex::default(),
            contended: Mutex::default(),
            greatest_token: AtomicU64::new(0),
            cleanups: watch::Sender::new(0),
            events_sender,
            events: Mutex::new(Some(events)),
        });
        let listeners = (0..core.nodes.all.len()).map(|node| {
            let core = core.clone();
            let mut events = core.nodes.all[node].engine.events();
            let listen = async move {
                while let Some(signal) = events.next().await {
                    core.on_event(node, signal);
                }
            };
            tokio::spawn(listen).abort_handle()
        });
        let listeners = listeners.collect();
        Ok(Self { core, listeners })
    }

    /// Checks the health of all nodes: a quorum must reply, and no server may be there twice.
    /// Settings of a node that endanger a promise are logged as warnings.
    ///
    /// # Errors
    /// [`Error::Unreachable`].
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn check(&self) -> Result<()> {
        let nodes = &self.core.nodes;
        let (mut healthy, mut first_error) = (0, None);
        let mut silent: Vec<usize> = (0..nodes.all.len()).collect();
        let mut checks: FuturesUnordered<_> = (0..nodes.all.len())
            .map(|node| async move { (node, nodes.check_health(node).await) })
            .collect();
        let mut limit = Moment::NEVER;
        // Once a quorum has replied, the others get the timeout of a node and no more: a frozen
        // node must not make every new client slow.
        while let Some(Some((node, checked))) =
            self.core.clock.timeout_at(limit, checks.next()).await
        {
            match checked {
                Ok(health) => {
                    healthy += 1;
                    silent.retain(|other| *other != node);
                    let identity = nodes.all[node].engine.identity();
                    for warning in health.warnings {
                        report!(
                            warn,
                            node = identity,
                            warning = warning,
                            "a node may break a promise"
                        );
                    }
                }
                Err(error) if !error.is_retryable() => return Err(error),
                Err(error) => drop(first_error.get_or_insert(error)),
            }
            if healthy == nodes.quorum {
                limit = self.core.clock.now() + NODE_TIMEOUT.0;
            }
        }
        drop(checks);
        silent.into_iter().for_each(|node| nodes.exclude(node));
        match healthy < nodes.quorum {
            true => Err(nodes.too_few_replies(healthy, first_error)),
            false => Ok(()),
        }
    }
}

impl Redlock {
    /// Runs a request as a task of the engine's runtime. It goes on if this future is dropped.
    async fn run<T: Send + 'static>(
        &self,
        request: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        // It fails only if the runtime ends.
        self.core.nodes.spawn(request).await.unwrap_or(Err(Error::Closed))
    }
}

impl Drop for Redlock {
    fn drop(&mut self) {
        self.listeners.iter().for_each(tokio::task::AbortHandle::abort);
    }
}

fn check_nodes(nodes: &[Arc<dyn FencedNode>]) -> Result<()> {
    let bad = |why: &str| Err(Error::invalid("number of nodes", &nodes.len().to_string(), why));
    if nodes.len() < 3 {
        return bad("a quorum needs at least three nodes; with one, use its own URL");
    }
    if nodes.len() > MAX_NODES {
        return bad("more than 33 make a lock slower, not safer");
    }
    let identities: Vec<String> = nodes.iter().map(|node| node.identity()).collect();
    for (index, identity) in identities.iter().enumerate() {
        if identities[..index].contains(identity) {
            return Err(Error::invalid("list of nodes", identity, "it is named twice"));
        }
    }
    if nodes.len().is_multiple_of(2) {
        let fewer = nodes.len() - 1;
        report!(warn, nodes = nodes.len(), as_good_as = fewer, "an even number of nodes");
    }
    Ok(())
}

/// The URL of a quorum whose nodes have these URLs, if these differ only in their hosts.
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
    // All clients of a quorum must have the same.
    let max_ttl = match max_ttl == RedlockOptions::default().max_ttl {
        true => String::new(),
        false => format!("&max_ttl={}ms", max_ttl.as_millis()),
    };
    Some(format!("{scheme}://{hosts}{tail}{max_ttl}"))
}

impl RedlockCore {
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
        if claim_of(claim.id) != claim.id {
            let why = "its last byte counts the attempts of a quorum and must be zero";
            return Err(Error::invalid("claim id", &claim.id.to_string(), why));
        }
        Ok(())
    }

    fn node_timeout(&self, ttl: Duration) -> Duration {
        let usual = (ttl / 20).clamp(NODE_TIMEOUT.0, NODE_TIMEOUT.1);
        self.options.node_timeout.unwrap_or(usual)
    }

    /// How long it may take until a quorum has replied. While too few have, giving up on the others
    /// gains nothing.
    fn quorum_timeout(&self, ttl: Duration) -> Duration {
        (ttl / 4).clamp(self.node_timeout(ttl), MAX_QUORUM_TIMEOUT.max(self.node_timeout(ttl)))
    }

    /// A token above all that this client has seen or proposed, and not below the wall clock.
    fn propose_token(&self) -> Token {
        let clock = wall_micros();
        let next = |greatest: u64| Some(Token::next(greatest, clock).get());
        let before = self.greatest_token.fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
        Token::next(before.unwrap_or_default(), clock)
    }

    fn observe_token(&self, token: Token) {
        self.greatest_token.fetch_max(token.get(), Ordering::AcqRel);
    }

    fn attempts(&self) -> MutexGuard<'_, FastMap<ClaimId, Arc<Attempt>>> {
        sync::lock(&self.attempts)
    }

    fn attempt_of(&self, claim: ClaimId) -> Option<Arc<Attempt>> {
        self.attempts().get(&claim).cloned()
    }

    /// The attempt by which a claim holds, as this client knows it, or as the grant's key says.
    fn held_attempt(&self, claim: &Claim, grant: &Grant) -> Option<(Arc<Attempt>, Token)> {
        let attempt = match self.attempt_of(claim.id) {
            Some(attempt) => attempt,
            None => {
                let attempt = Attempt::from_key(claim, grant, self.nodes.all.len())?;
                let attempt = Arc::new(attempt);
                self.attempts().insert(claim.id, attempt.clone());
                attempt
            }
        };
        let phase = attempt.state().phase();
        (phase == AttemptPhase::Held(grant.token)).then_some((attempt, grant.token))
    }

    /// Removes an attempt that has ended.
    fn forget(&self, attempt: &Arc<Attempt>) {
        let mut attempts = self.attempts();
        let claim = claim_of(attempt.claim.id);
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

    /// A claim found its name taken.
    fn note_contention(&self, claim: &Claim) {
        let now = self.clock.now();
        let mut contended = sync::lock(&self.contended);
        if contended.len() >= MAX_CONTENDED {
            contended.retain(|_, since| now < *since + CONTENDED_FOR);
        }
        if contended.len() < MAX_CONTENDED {
            contended.insert(claim.name.clone(), now);
        }
    }

    fn is_contended(&self, claim: &Claim) -> bool {
        let since = sync::lock(&self.contended).get(&claim.name).copied();
        since.is_some_and(|since| self.clock.now() < since + CONTENDED_FOR)
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

    fn clock(&self) -> Clock {
        self.core.clock.clone()
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        self.core.check(claim)?;
        let (reply, acquired) = oneshot::channel();
        self.core.nodes.spawn(self.core.clone().acquire(claim.clone(), wait, reply));
        Admission::from_inner(acquired.await.unwrap_or(Err(Error::Closed)))
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        let held = batch.iter().map(|(claim, grant)| self.core.held_attempt(claim, grant));
        let held: Vec<Option<(Arc<Attempt>, Token)>> = held.collect();
        let (reply, renewed) = oneshot::channel();
        let known = held.iter().flatten().cloned().collect();
        self.core.nodes.spawn(self.core.clone().renew(known, reply));
        let mut renewed = renewed.await.unwrap_or_default().into_iter();
        let outcomes = held.iter().map(|held| match held {
            Some(_) => Renewal::from_inner(renewed.next().unwrap_or(Err(Error::Closed))),
            None => Ok(Renewal::Lost(LossReason::Forgotten)),
        });
        outcomes.collect()
    }

    async fn amend(&self, claim: &Claim, grant: &Grant, to: Amend) -> Result<Grant> {
        if let Amend::Downgrade = to {
            let what = "readers that share a lock over a quorum".to_owned();
            return Err(Error::Unsupported { engine: ENGINE, what });
        }
        let (core, claim, grant) = (self.core.clone(), claim.clone(), grant.clone());
        self.run(async move { core.amend(&claim, &grant, &to).await }).await
    }

    async fn adopt(&self, claim: &Claim, grant: &Grant, successor: &Claim) -> Result<Grant> {
        let (core, claim, grant) = (self.core.clone(), claim.clone(), grant.clone());
        let successor = successor.clone();
        self.run(async move { core.adopt(&claim, &grant, &successor).await }).await
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let not_held = || Error::NotHeld { name: claim.name.clone() };
        let (attempt, _) = self.core.held_attempt(claim, grant).ok_or_else(not_held)?;
        let (reply, released) = oneshot::channel();
        self.core.nodes.spawn(self.core.clone().release(attempt, next.cloned(), reply));
        // The next claim is queued at the entry node from then on, and asks the others itself.
        released.await.unwrap_or(Err(Error::Closed)).map(|()| None)
    }

    async fn withdraw(&self, claim: &Claim) -> Result<()> {
        let (core, claim) = (self.core.clone(), claim.clone());
        self.run(async move { core.withdraw(&claim).await }).await
    }

    fn hints(&self, scope: &Scope) -> BoxStream<'static, Result<Hint>> {
        self.core.hints(scope)
    }

    async fn inspect(&self, name: &Name) -> Result<LockState> {
        let (core, name) = (self.core.clone(), name.clone());
        self.run(async move { core.inspect(&name).await }).await
    }

    async fn list(&self, prefix: &Prefix) -> Result<Vec<LockState>> {
        let (core, prefix) = (self.core.clone(), prefix.clone());
        self.run(async move { core.list(&prefix).await }).await
    }

    async fn cell(&self, _: &Name, _: Version, _: Option<Vec<u8>>) -> Result<Swap> {
        let what = "cells (latches and barriers) over a quorum".to_owned();
        Err(Error::Unsupported { engine: ENGINE, what })
    }

    async fn force_release(&self, name: &Name, how: Break) -> Result<Vec<Holder>> {
        let (core, name) = (self.core.clone(), name.clone());
        self.run(async move { core.force_release(&name, how).await }).await
    }

    fn events(&self) -> BoxStream<'static, Event> {
        told_once(sync::lock(&self.core.events).take())
    }

    async fn close(&self) {
        self.listeners.iter().for_each(tokio::task::AbortHandle::abort);
        // Cleanup at slow nodes is finished first, if it does not take too long.
        let mut cleanups = self.core.cleanups.subscribe();
        let limit = self.core.clock.now() + MAX_QUORUM_TIMEOUT;
        let _ = self.core.clock.timeout_at(limit, cleanups.wait_for(|running| *running == 0)).await;
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
