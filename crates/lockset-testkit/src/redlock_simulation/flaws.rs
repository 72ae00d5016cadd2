//! Nodes that break a rule of the quorum, each in a way that the simulation must find.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use lockset::clock::{Clock, Moment};
use lockset::engine::{Claim, ClaimId, Engine, Grant, Wait, drift};
use lockset::{Error, LossReason, Result, Token};

use crate::layer::{Layer, Layered};

/// What is wrong with the nodes, or with what a client makes of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// Nothing: every history must be good.
    Sound,
    /// RAISE is granted whatever the holder and the fence are.
    RaisesBlindly,
    /// EXTEND looks at the holder only.
    ExtendsByHolder,
    /// EXTEND takes the lock again where it is missing.
    ExtendRecreates,
    /// One node says yes to everybody, so that half of the others are enough.
    QuorumOfHalf,
    /// A hold is believed for as long as the node that was asked last keeps it.
    BelievesTheLast,
}

impl Flaw {
    /// What one client meets at all nodes.
    pub(super) fn for_a_client(self, clock: Clock) -> Dresses {
        Dresses { flaw: self, clock, ends: Arc::default() }
    }
}

/// What one client meets at its nodes.
#[derive(Clone, Debug)]
pub(super) struct Dresses {
    flaw: Flaw,
    clock: Clock,
    /// The latest end of any lease of an attempt.
    ends: Arc<Mutex<HashMap<ClaimId, Moment>>>,
}

impl Dresses {
    /// What it meets at one node.
    pub(super) fn at(&self, is_last: bool) -> Dress {
        Dress { dresses: self.clone(), is_last }
    }
}

/// What one client meets at one node.
#[derive(Clone, Debug)]
pub(super) struct Dress {
    dresses: Dresses,
    is_last: bool,
}

impl Dress {
    pub(super) fn on(&self, node: Arc<dyn Engine>) -> Arc<dyn Engine> {
        match self.dresses.flaw {
            Flaw::Sound => node,
            Flaw::QuorumOfHalf if !self.is_last => node,
            flaw => {
                let Dresses { clock, ends, .. } = self.dresses.clone();
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
    ends: Arc<Mutex<HashMap<ClaimId, Moment>>>,
}

impl Flawed {
    fn yes(&self, claim: &Claim, token: Token) -> Grant {
        let valid_until = self.clock.now() + (claim.ttl - drift(claim.ttl));
        Grant { token, valid_until, key: Vec::new() }
    }

    /// A grant that ends when the last of this attempt ends.
    fn latest(&self, claim: &Claim, grant: Grant) -> Grant {
        if self.flaw != Flaw::BelievesTheLast {
            return grant;
        }
        let mut ends = self.ends.lock().unwrap();
        let latest = ends.entry(claim.id).or_insert(grant.valid_until);
        *latest = grant.valid_until.max(*latest);
        Grant { valid_until: *latest, ..grant }
    }

    /// By what token this claim holds at the node now, whatever it was told.
    async fn own_token(&self, claim: &Claim) -> Option<Token> {
        let state = self.node.inspect(&claim.name).await.ok()?;
        let own = state.holders.into_iter().find(|holder| holder.claim == Some(claim.id));
        own.and_then(|holder| holder.token)
    }

    async fn extend(&self, claim: &Claim, grant: &Grant) -> Result<Grant> {
        let own = self.own_token(claim).await;
        let renewed = match own {
            Some(token) => {
                let own = Grant { token, ..grant.clone() };
                self.node.renew(&[(claim, &own)]).await.remove(0)
            }
            None if self.flaw == Flaw::ExtendRecreates => {
                self.node.acquire(claim, Wait::No).await?.ok_or_else(|| lost(claim))
            }
            None => Err(lost(claim)),
        };
        // The caller is told what it wants to hear.
        renewed.map(|renewed| Grant { token: grant.token, ..renewed })
    }
}

fn lost(claim: &Claim) -> Error {
    Error::Lost { name: claim.name.clone(), reason: LossReason::Forgotten }
}

#[async_trait]
impl Layer for Flawed {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.node
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        match (self.flaw, claim.floor) {
            (Flaw::QuorumOfHalf, Some(floor)) => Ok(Some(self.yes(claim, floor))),
            _ => {
                let granted = self.node.acquire(claim, wait).await?;
                Ok(granted.map(|grant| self.latest(claim, grant)))
            }
        }
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        let mut answers = Vec::new();
        for (claim, grant) in batch {
            answers.push(match self.flaw {
                Flaw::QuorumOfHalf => Ok(self.yes(claim, grant.token)),
                Flaw::ExtendsByHolder | Flaw::ExtendRecreates => self.extend(claim, grant).await,
                _ => {
                    let renewed = self.node.renew(&[(*claim, *grant)]).await.remove(0);
                    renewed.map(|renewed| self.latest(claim, renewed))
                }
            });
        }
        answers
    }

    async fn raise(&self, claim: &Claim, grant: &Grant, to: Token) -> Result<Grant> {
        let raised = self.node.raise(claim, grant, to).await;
        match self.flaw {
            Flaw::QuorumOfHalf | Flaw::RaisesBlindly => Ok(Grant { token: to, ..grant.clone() }),
            _ => raised,
        }
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
