//! Bugs planted in the nodes, each of which the simulation must find.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use lockset::clock::{Clock, Moment};
use lockset::engine::{Admission, Claim, ClaimId, Engine, Grant, Renewal, Wait, drift};
use lockset::{LossReason, Result, Token};

use crate::layer::{Layer, Layered, fenced_node};

/// A bug of the nodes, or of how a client evaluates their replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// No bug: every history must be consistent.
    None,
    /// RAISE checks neither the holder nor the fence.
    RaisesBlindly,
    /// RAISE checks the holder only.
    RaisesByHolder,
    /// EXTEND checks the holder only.
    ExtendsByHolder,
    /// EXTEND acquires the lock again where it is missing.
    ExtendRecreates,
    /// One node grants every request, so that half of the others are enough.
    QuorumOfHalf,
    /// A hold is trusted until the lease at the last node ends, instead of at a quorum.
    TrustsLatestLease,
}

impl Flaw {
    /// The flaw as one client meets it at all nodes.
    pub(super) fn for_a_client(self, clock: Clock) -> ClientFlaws {
        ClientFlaws { flaw: self, clock, ends: Arc::default() }
    }
}

/// The latest end of a lease of each attempt, over all nodes.
type Ends = Arc<Mutex<HashMap<ClaimId, Moment>>>;

/// The flaw as one client meets it at its nodes.
#[derive(Clone, Debug)]
pub(super) struct ClientFlaws {
    flaw: Flaw,
    clock: Clock,
    ends: Ends,
}

impl ClientFlaws {
    /// The flaw at one node.
    pub(super) fn at(&self, is_last: bool) -> NodeFlaw {
        NodeFlaw { client_flaws: self.clone(), is_last }
    }

    /// The flaw in how the client evaluates all nodes.
    pub(super) fn over(&self, quorum: Arc<dyn Engine>) -> Arc<dyn Engine> {
        let Self { flaw, clock, ends } = self.clone();
        match flaw {
            Flaw::TrustsLatestLease => Arc::new(Layered(TrustsLatest { quorum, clock, ends })),
            _ => quorum,
        }
    }
}

/// The flaw as one client meets it at one node.
#[derive(Clone, Debug)]
pub(super) struct NodeFlaw {
    client_flaws: ClientFlaws,
    is_last: bool,
}

impl NodeFlaw {
    pub(super) fn on(&self, node: Arc<dyn Engine>) -> Arc<dyn Engine> {
        match self.client_flaws.flaw {
            Flaw::None => node,
            Flaw::QuorumOfHalf if !self.is_last => node,
            flaw => {
                let ClientFlaws { clock, ends, .. } = self.client_flaws.clone();
                Arc::new(Layered(Flawed { node, flaw, clock, ends }))
            }
        }
    }
}

#[derive(Debug)]
struct Flawed {
    node: Arc<dyn Engine>,
    flaw: Flaw,
    clock: Clock,
    ends: Ends,
}

impl Flawed {
    fn forged_grant(&self, claim: &Claim, token: Token) -> Grant {
        let valid_until = self.clock.now() + (claim.ttl - drift(claim.ttl));
        Grant { token, valid_until, key: Vec::new() }
    }

    fn note_end(&self, claim: &Claim, grant: Grant) -> Grant {
        let mut ends = self.ends.lock().unwrap();
        let max_lateness = ends.entry(claim.id).or_insert(grant.valid_until);
        *max_lateness = grant.valid_until.max(*max_lateness);
        grant
    }

    /// The token by which this claim holds at the node now, whatever it was told.
    async fn own_token(&self, claim: &Claim) -> Option<Token> {
        let state = self.node.inspect(&claim.name).await.ok()?;
        let own = state.holders.into_iter().find(|holder| holder.claim == Some(claim.id));
        own.and_then(|holder| holder.token)
    }

    async fn extend(&self, claim: &Claim, grant: &Grant) -> Result<Renewal> {
        let own = self.own_token(claim).await;
        let renewed = match own {
            Some(token) => {
                let own = Grant { token, ..grant.clone() };
                self.node.renew(&[(claim, &own)]).await.remove(0)?
            }
            None if self.flaw == Flaw::ExtendRecreates => {
                let claim = Claim { floor: Some(grant.token), ..claim.clone() };
                self.node.acquire(&claim, Wait::No).await?.granted().map_or(LOST, Renewal::Renewed)
            }
            None => LOST,
        };
        // The caller gets the token that it expects.
        Ok(renewed.map(|renewed| Grant { token: grant.token, ..renewed }))
    }
}

const LOST: Renewal = Renewal::Lost(LossReason::Forgotten);

#[async_trait]
impl Layer for Flawed {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.node
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        match (self.flaw, claim.floor) {
            (Flaw::QuorumOfHalf, Some(floor)) => {
                Ok(Admission::Granted(self.forged_grant(claim, floor)))
            }
            _ => {
                let granted = self.node.acquire(claim, wait).await?;
                Ok(granted.map(|grant| self.note_end(claim, grant)))
            }
        }
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        let mut replies = Vec::new();
        for (claim, grant) in batch {
            replies.push(match self.flaw {
                Flaw::QuorumOfHalf => Ok(Renewal::Renewed(self.forged_grant(claim, grant.token))),
                Flaw::ExtendsByHolder | Flaw::ExtendRecreates => self.extend(claim, grant).await,
                _ => {
                    let renewed = self.node.renew(&[(*claim, *grant)]).await.remove(0);
                    renewed.map(|reply| reply.map(|grant| self.note_end(claim, grant)))
                }
            });
        }
        replies
    }

    async fn raise(&self, claim: &Claim, grant: &Grant, to: Token) -> Result<Grant> {
        let raised = fenced_node(&self.node)?.raise(claim, grant, to).await;
        let grants = match self.flaw {
            Flaw::QuorumOfHalf | Flaw::RaisesBlindly => true,
            Flaw::RaisesByHolder => self.own_token(claim).await.is_some(),
            _ => false,
        };
        if grants { Ok(Grant { token: to, ..grant.clone() }) } else { raised }
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        match self.flaw {
            Flaw::QuorumOfHalf => Ok(None),
            _ => self.node.release(claim, grant, next).await,
        }
    }
}

/// A client that requires a quorum to acquire a lock, but not to compute how long it holds it.
#[derive(Debug)]
struct TrustsLatest {
    quorum: Arc<dyn Engine>,
    clock: Clock,
    ends: Ends,
}

impl TrustsLatest {
    fn max_lateness(&self, claim: &Claim) -> Option<Moment> {
        // Attempts of a claim differ in the last byte.
        let is_attempt = |id: &ClaimId| id.to_bits() & !0xff == claim.id.to_bits();
        let ends = self.ends.lock().unwrap();
        ends.iter().filter(|(id, _)| is_attempt(id)).map(|(_, end)| *end).max()
    }
}

#[async_trait]
impl Layer for TrustsLatest {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.quorum
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        let replies = self.quorum.renew(batch).await;
        let each = replies.into_iter().zip(batch).map(|(reply, (claim, grant))| {
            let max_lateness = self.max_lateness(claim).filter(|end| *end > self.clock.now());
            match (reply, max_lateness) {
                (Err(error), Some(valid_until)) if error.is_retryable() => {
                    Ok(Renewal::Renewed(Grant { valid_until, ..(*grant).clone() }))
                }
                (reply, _) => reply,
            }
        });
        each.collect()
    }
}
