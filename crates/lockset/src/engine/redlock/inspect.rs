//! Inspecting: a lock is held by the claim that a quorum of nodes shows as its holder.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_core::stream::BoxStream;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::RedlockCore;
use super::attempt::{Attempt, AttemptPhase, claim_of};
use crate::engine::common::hints::hint_channel;
use crate::engine::{ClaimId, Engine, Hint, Holder, LockState, Scope, Waiter};
use crate::error::Result;
use crate::name::{Name, Prefix};
use crate::token::Token;

/// The pause after a node could not be watched.
const WATCH_AGAIN: Duration = Duration::from_millis(200);

/// The holders of a name at one node.
pub(super) type StuckHolders = Vec<(Option<ClaimId>, Option<Token>)>;

impl RedlockCore {
    /// Sends a request to all usable nodes; a quorum must reply.
    pub(super) async fn at_usable_nodes<T, F>(
        self: &Arc<Self>,
        request: impl Fn(Arc<dyn Engine>) -> F,
    ) -> Result<Vec<T>>
    where
        F: Future<Output = Result<T>>,
    {
        self.at_nodes(self.nodes.usable(), self.nodes.quorum, request).await
    }

    /// Sends a request to these nodes; `needed` of them must reply.
    pub(super) async fn at_nodes<T, F>(
        self: &Arc<Self>,
        nodes: Vec<usize>,
        needed: usize,
        request: impl Fn(Arc<dyn Engine>) -> F,
    ) -> Result<Vec<T>>
    where
        F: Future<Output = Result<T>>,
    {
        let mut silent: BTreeSet<usize> = nodes.into_iter().collect();
        let mut pending: FuturesUnordered<_> = silent
            .iter()
            .map(|&node| {
                let reply = request(self.nodes.all[node].engine.clone());
                async move { (node, reply.await) }
            })
            .collect();
        let started = self.clock.now();
        let (mut replies, mut last_error) = (Vec::new(), None);
        loop {
            let enough = replies.len() >= needed;
            let ttl = self.options.max_ttl;
            let limit =
                started + if enough { self.node_timeout(ttl) } else { self.quorum_timeout(ttl) };
            let next = self.clock.timeout_at(limit, pending.next()).await;
            let Some((node, reply)) = next.flatten() else { break };
            silent.remove(&node);
            match reply {
                Ok(reply) => replies.push(reply),
                Err(error) => last_error = Some(error),
            }
        }
        silent.into_iter().for_each(|node| self.nodes.exclude(node));
        match replies.len() >= needed {
            true => Ok(replies),
            false => Err(self.nodes.too_few_replies(replies.len(), last_error)),
        }
    }

    pub(super) async fn inspect(self: &Arc<Self>, name: &Name) -> Result<LockState> {
        let states = self.at_usable_nodes(|engine| {
            let name = name.clone();
            async move { engine.inspect(&name).await }
        });
        let states = states.await?;
        let unheard = self.nodes.all.len() - states.len();
        let own = self.own_holder(name, &states, unheard);
        let mut state = self.merge(name.clone(), states);
        state.holders.extend(own);
        Ok(state)
    }

    /// Merges the nodes' states of a name. Nodes where the lock was reacquired may show one more
    /// than the token; for its own locks this client knows the token.
    fn merge(&self, name: Name, states: Vec<LockState>) -> LockState {
        let mut state = merge(name, states, self.nodes.quorum);
        for holder in &mut state.holders {
            let attempt = holder.claim.and_then(|claim| self.attempt_of(claim));
            if let Some(AttemptPhase::Held(token)) = attempt.map(|attempt| attempt.state().phase())
            {
                holder.token = Some(token);
            }
        }
        state
    }

    /// A lock of this client that fewer than a quorum of the replies show, while the silent nodes
    /// may have it: that proves no loss.
    fn own_holder(&self, name: &Name, states: &[LockState], unheard: usize) -> Option<Holder> {
        let is_of = |attempt: &&Arc<Attempt>| attempt.claim.name == *name;
        let attempts: Vec<_> = self.attempts().values().filter(is_of).cloned().collect();
        let quorum = self.nodes.quorum;
        attempts.into_iter().find_map(|attempt| {
            let state = attempt.state();
            let AttemptPhase::Held(token) = state.phase() else { return None };
            let is_it = |holder: &&Holder| holder.claim == Some(attempt.claim.id);
            let seen = states.iter().flat_map(|state| &state.holders).filter(is_it).count();
            let left = state.valid_until(token, quorum).saturating_duration_since(self.clock.now());
            let unclear = seen < quorum && seen + unheard >= quorum && !left.is_zero();
            unclear.then(|| Holder {
                claim: Some(claim_of(attempt.claim.id)),
                token: Some(token),
                mode: attempt.claim.mode,
                note: attempt.claim.note.clone(),
                left,
                revoked: false,
            })
        })
    }

    pub(super) async fn list(self: &Arc<Self>, prefix: &Prefix) -> Result<Vec<LockState>> {
        let lists = self.at_usable_nodes(|engine| {
            let prefix = prefix.clone();
            async move { engine.list(&prefix).await }
        });
        let mut by_name = BTreeMap::<Name, Vec<LockState>>::new();
        for state in lists.await?.into_iter().flatten() {
            by_name.entry(state.name.clone()).or_default().push(state);
        }
        let merged = by_name
            .into_iter()
            .map(|(name, states)| self.merge(name, states))
            .filter(LockState::is_used);
        Ok(merged.collect())
    }

    /// The holders that a node shows for a name, if a quorum without it shows neither holders nor
    /// waiters. Unless the lock is just being handed over, they do not hold a lock of the quorum.
    pub(super) async fn stuck_holders(
        self: &Arc<Self>,
        name: &Name,
        node: usize,
    ) -> Option<StuckHolders> {
        if !self.is_free_without(name, node).await {
            return None;
        }
        let limit = self.clock.now() + self.node_timeout(self.options.max_ttl);
        let looking = self.nodes.all[node].engine.inspect(name);
        let state = self.clock.timeout_at(limit, looking).await?.ok()?;
        Some(state.holders.iter().map(|holder| (holder.claim, holder.token)).collect())
    }

    /// Whether a quorum without this node shows neither holders nor waiters of a name.
    async fn is_free_without(self: &Arc<Self>, name: &Name, excluded: usize) -> bool {
        let mut others = self.nodes.usable();
        others.retain(|node| *node != excluded);
        let states = self.at_nodes(others, self.nodes.quorum, |engine| {
            let name = name.clone();
            async move { engine.inspect(&name).await }
        });
        let is_free = |state: &LockState| state.holders.is_empty() && state.waiters.is_empty();
        states.await.is_ok_and(|states| {
            states.iter().filter(|state| is_free(state)).count() >= self.nodes.quorum
        })
    }

    /// What any node hints at.
    pub(super) fn hints(self: &Arc<Self>, scope: &Scope) -> BoxStream<'static, Result<Hint>> {
        let (sender, hints) = hint_channel(scope);
        for node in &self.nodes.all {
            let (mut of_node, sender) = (node.engine.hints(scope), sender.clone());
            let clock = self.clock.clone();
            self.nodes.spawn(async move {
                loop {
                    let hint = tokio::select! {
                        hint = of_node.next() => hint,
                        () = sender.closed() => return,
                    };
                    match hint {
                        Some(Ok(Hint::Changed(name))) => sender.changed(&name),
                        Some(Ok(Hint::Missed)) => sender.missed(),
                        // It is down; the others see what it would.
                        Some(Err(error)) if error.is_retryable() => {
                            clock.sleep_until(clock.now() + WATCH_AGAIN).await;
                        }
                        _ => return,
                    }
                }
            });
        }
        hints.into_stream()
    }
}

/// Merges the nodes' states of a name.
fn merge(name: Name, states: Vec<LockState>, quorum: usize) -> LockState {
    let mut holders = BTreeMap::<Option<ClaimId>, Vec<Holder>>::new();
    let mut waiters = Vec::<Waiter>::new();
    let fence = states.iter().filter_map(|state| state.fence).max();
    for state in states {
        for holder in state.holders {
            holders.entry(holder.claim.map(claim_of)).or_default().push(holder);
        }
        for waiter in state.waiters {
            let claim = claim_of(waiter.claim);
            if waiters.iter().all(|known| known.claim != claim) {
                waiters.push(Waiter { claim, ..waiter });
            }
        }
    }
    let holders: Vec<Holder> = holders
        .into_iter()
        .filter(|(_, at)| at.len() >= quorum)
        .filter_map(|(claim, at)| merge_holder(claim, at, quorum))
        .collect();
    waiters.retain(|waiter| holders.iter().all(|holder| holder.claim != Some(waiter.claim)));
    LockState { name, holders, waiters, fence, cell: None }
}

/// One holder, as a quorum of nodes shows it: with the token that most of them show, and the time
/// for which a quorum keeps it.
fn merge_holder(claim: Option<ClaimId>, mut at: Vec<Holder>, quorum: usize) -> Option<Holder> {
    at.sort_unstable_by_key(|holder| Reverse(holder.left));
    let left = at.get(quorum - 1)?.left;
    let revoked = at.iter().any(|holder| holder.revoked);
    let count = |holder: &Holder| at.iter().filter(|other| other.token == holder.token).count();
    // Of two that are equally frequent the lower: the greater one may be that of a single node.
    let usual = at.iter().max_by_key(|holder| (count(holder), Reverse(holder.token)))?.clone();
    Some(Holder { claim, left, revoked, ..usual })
}
