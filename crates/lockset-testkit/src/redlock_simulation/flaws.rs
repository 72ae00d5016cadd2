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
    /// RAISE looks at the holder only.
    RaisesByHolder,
    /// EXTEND looks at the holder only.
    ExtendsByHolder,
    /// EXTEND takes the lock again where it is missing.
    ExtendRecreates,
    /// One node says yes to everybody, so that half of the others are enough.
    QuorumOfHalf,
    /// A hold is believed for as long as any node keeps it, and not as long as a quorum does.
    BelievesTheLast,
}

impl Flaw {
    /// What one client meets at all nodes.
    pub(super) fn for_a_client(self, clock: Clock) -> Dresses {
        Dresses { flaw: self, clock, ends: Arc::default() }
    }
}

/// The latest end of any lease of each attempt, at any node.
type Ends = Arc<Mutex<HashMap<ClaimId, Moment>>>;

/// What one client meets at its nodes.
#[derive(Clone, Debug)]
pub(super) struct Dresses {
    flaw: Flaw,
    clock: Clock,
    ends: Ends,
}

impl Dresses {
    /// What it meets at one node.
    pub(super) fn at(&self, is_last: bool) -> Dress {
        Dress { dresses: self.clone(), is_last }
    }

    /// What it makes of them all.
    pub(super) fn over(&self, quorum: Arc<dyn Engine>) -> Arc<dyn Engine> {
        let Self { flaw, clock, ends } = self.clone();
        match flaw {
            Flaw::BelievesTheLast => Arc::new(Layered(Believing { quorum, clock, ends })),
            _ => quorum,
        }
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
    ends: Ends,
}

impl Flawed {
    fn yes(&self, claim: &Claim, token: Token) -> Grant {
        let valid_until = self.clock.now() + (claim.ttl - drift(claim.ttl));
        Grant { token, valid_until, key: Vec::new() }
    }

    fn note_end(&self, claim: &Claim, grant: Grant) -> Grant {
        let mut ends = self.ends.lock().unwrap();
        let latest = ends.entry(claim.id).or_insert(grant.valid_until);
        *latest = grant.valid_until.max(*latest);
        grant
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
                let claim = Claim { floor: Some(grant.token), ..claim.clone() };
                self.node.acquire(&claim, Wait::No).await?.ok_or_else(|| lost(&claim))
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
                Ok(granted.map(|grant| self.note_end(claim, grant)))
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
                    renewed.map(|renewed| self.note_end(claim, renewed))
                }
            });
        }
        answers
    }

    async fn raise(&self, claim: &Claim, grant: &Grant, to: Token) -> Result<Grant> {
        let raised = self.node.raise(claim, grant, to).await;
        let says_yes = match self.flaw {
            Flaw::QuorumOfHalf | Flaw::RaisesBlindly => true,
            Flaw::RaisesByHolder => self.own_token(claim).await.is_some(),
            _ => false,
        };
        if says_yes { Ok(Grant { token: to, ..grant.clone() }) } else { raised }
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

/// A client that counts the nodes when it asks for a lock, and not when it asks how long it has it.
#[derive(Debug)]
struct Believing {
    quorum: Arc<dyn Engine>,
    clock: Clock,
    ends: Ends,
}

impl Believing {
    fn latest(&self, claim: &Claim) -> Option<Moment> {
        // Attempts of a claim differ in the last byte.
        let is_of_it = |id: &ClaimId| id.to_bits() & !0xff == claim.id.to_bits();
        let ends = self.ends.lock().unwrap();
        ends.iter().filter(|(id, _)| is_of_it(id)).map(|(_, end)| *end).max()
    }
}

#[async_trait]
impl Layer for Believing {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.quorum
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        let answers = self.quorum.renew(batch).await;
        let each = answers.into_iter().zip(batch).map(|(answer, (claim, grant))| {
            let latest = self.latest(claim).filter(|end| *end > self.clock.now());
            match (answer, latest) {
                (Err(error), Some(valid_until)) if error.is_retryable() => {
                    Ok(Grant { valid_until, ..(*grant).clone() })
                }
                (answer, _) => answer,
            }
        });
        each.collect()
    }
}
