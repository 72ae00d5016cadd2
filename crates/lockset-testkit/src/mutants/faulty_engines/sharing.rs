//! Faulty engines for the laws of `laws/sharing.rs`.

use std::sync::Arc;

use async_trait::async_trait;
use lockset::engine::{Admission, Amend, Capabilities, Claim, ClaimId, Engine, Grant, Wait};
use lockset::{Mode, Result};
use tokio::sync::watch;

use super::exclusion::own_name;
use crate::layer::Layer;

/// Treats readers as writers.
#[derive(Debug)]
pub(crate) struct TreatsReadersAsWriters(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for TreatsReadersAsWriters {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        self.0.acquire(&Claim { mode: Mode::Exclusive, ..claim.clone() }, wait).await
    }
}

/// Treats writers as readers.
#[derive(Debug)]
pub(crate) struct TreatsWritersAsReaders(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for TreatsWritersAsReaders {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        self.0.acquire(&Claim { mode: Mode::Shared, ..claim.clone() }, wait).await
    }
}

/// Readers that do not wait pass those that do.
#[derive(Debug)]
pub(crate) struct ReadersJumpQueue(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for ReadersJumpQueue {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        jump_queue(&*self.0, claim, wait, claim.mode == Mode::Shared).await
    }
}

/// Requests for one permit pass those for more.
#[derive(Debug)]
pub(crate) struct SmallRequestsJumpQueue(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for SmallRequestsJumpQueue {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let small = matches!(claim.mode, Mode::Permits { take: 1, .. });
        jump_queue(&*self.0, claim, wait, small).await
    }
}

async fn jump_queue(
    inner: &dyn Engine,
    claim: &Claim,
    wait: Wait,
    may_pass: bool,
) -> Result<Admission> {
    let granted = inner.acquire(claim, wait).await?;
    if granted != Admission::NotInTime || !may_pass {
        return Ok(granted);
    }
    let aside = Claim { name: own_name(claim).parse()?, ..claim.clone() };
    inner.acquire(&aside, wait).await
}

/// Reports an amendment that did not happen.
#[derive(Debug)]
pub(crate) struct AmendsNothing(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for AmendsNothing {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn amend(&self, _: &Claim, grant: &Grant, _: Amend) -> Result<Grant> {
        Ok(grant.clone())
    }
}

/// Counts the claims that hold permits, not the permits.
#[derive(Debug)]
pub(crate) struct CountsClaims(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for CountsClaims {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let mut claim = claim.clone();
        if let Mode::Permits { take, .. } = &mut claim.mode {
            *take = 1;
        }
        self.0.acquire(&claim, wait).await
    }
}

/// A waiter for permits is woken by the release of one particular holder only.
#[derive(Debug)]
pub(crate) struct WakesForOneHolderOnly {
    inner: Arc<dyn Engine>,
    held: Arc<watch::Sender<Vec<ClaimId>>>,
    which: fn(&[ClaimId]) -> Option<&ClaimId>,
}

impl WakesForOneHolderOnly {
    pub(crate) fn the_first(
        inner: Arc<dyn Engine>,
        held: Arc<watch::Sender<Vec<ClaimId>>>,
    ) -> Self {
        Self { inner, held, which: <[_]>::first }
    }

    pub(crate) fn the_last(inner: Arc<dyn Engine>, held: Arc<watch::Sender<Vec<ClaimId>>>) -> Self {
        Self { inner, held, which: <[_]>::last }
    }
}

#[async_trait]
impl Layer for WakesForOneHolderOnly {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.inner
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let awaited = (self.which)(&self.held.borrow()).copied();
        let granted = match self.inner.acquire(claim, Wait::No).await? {
            Admission::NotInTime if wait != Wait::No => {
                let granted = self.inner.acquire(claim, wait).await?;
                let mut held = self.held.subscribe();
                let left = |held: &Vec<ClaimId>| awaited.is_none_or(|one| !held.contains(&one));
                // The sender lives as long as this engine.
                held.wait_for(left).await.unwrap();
                granted
            }
            granted => granted,
        };
        if let Admission::Granted(_) = granted {
            self.held.send_modify(|held| held.push(claim.id));
        }
        Ok(granted)
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        self.held.send_modify(|held| held.retain(|id| *id != claim.id));
        self.inner.release(claim, grant, next).await
    }
}

/// Claims not to support readers, and lets them wait for ever.
#[derive(Debug)]
pub(crate) struct HangsOnReaders(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for HangsOnReaders {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    fn capabilities(&self) -> Capabilities {
        let mut can = self.0.capabilities();
        can.shared = false;
        can
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        match claim.mode {
            Mode::Shared => std::future::pending().await,
            _ => self.0.acquire(claim, wait).await,
        }
    }
}
