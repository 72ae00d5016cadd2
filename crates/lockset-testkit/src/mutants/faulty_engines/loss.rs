//! Faulty engines for the laws of `laws/loss.rs`.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures_core::stream::BoxStream;
use futures_util::StreamExt;
use lockset::engine::{Admission, Claim, ClaimId, Engine, Event, Grant, Renewal, Wait};
use lockset::{Break, Holder, LockState, LossReason, Name, Result};
use tokio::time::Instant;

use super::{renew_each, with_extra_ttl};
use crate::layer::Layer;

/// Promises twice the lease that it grants.
#[derive(Debug)]
pub(crate) struct OverpromisesLeases(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for OverpromisesLeases {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let granted = self.0.acquire(claim, wait).await?;
        Ok(granted.map(|grant| with_extra_ttl(claim, grant)))
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        renew_each(batch, |claim, grant| async {
            let renewed = self.0.renew(&[(claim, grant)]).await.remove(0)?;
            Ok(renewed.map(|renewed| with_extra_ttl(claim, renewed)))
        })
        .await
    }
}

/// Forgets the locks of a client that was silent for a while, long before their leases end, like a
/// server that ends a session together with its connection.
#[derive(Debug)]
pub(crate) struct ForgetsSilentClients {
    inner: Arc<dyn Engine>,
    heard: Mutex<Instant>,
}

impl ForgetsSilentClients {
    pub(crate) fn new(inner: Arc<dyn Engine>) -> Self {
        Self { inner, heard: Mutex::new(Instant::now()) }
    }

    /// Whether the client was silent for longer than the interval between two renewals.
    fn was_silent(&self, ttl: Duration) -> bool {
        let before = std::mem::replace(&mut *self.heard.lock().unwrap(), Instant::now());
        before.elapsed() > ttl * 2 / 5
    }
}

#[async_trait]
impl Layer for ForgetsSilentClients {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.inner
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        self.was_silent(claim.ttl);
        self.inner.acquire(claim, wait).await
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        renew_each(batch, |claim, grant| async {
            match self.was_silent(claim.ttl) {
                true => Ok(Renewal::Lost(LossReason::Forgotten)),
                false => self.inner.renew(&[(claim, grant)]).await.remove(0),
            }
        })
        .await
    }
}

/// Promises much more than it grants, but only for fixed leases, which are not renewed.
#[derive(Debug)]
pub(crate) struct OverpromisesFixedLeases(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for OverpromisesFixedLeases {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let granted = self.0.acquire(claim, wait).await?;
        Ok(granted.map(|grant| match claim.fixed {
            true => with_extra_ttl(claim, with_extra_ttl(claim, grant)),
            false => grant,
        }))
    }
}

/// Emits no events.
#[derive(Debug)]
pub(crate) struct EmitsNoEvents(pub(crate) Arc<dyn Engine>);

impl Layer for EmitsNoEvents {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    fn events(&self) -> BoxStream<'static, Event> {
        futures_util::stream::pending().boxed()
    }
}

/// Force-releases immediately instead of at the end of the lease.
#[derive(Debug)]
pub(crate) struct BreaksAtOnce(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for BreaksAtOnce {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn force_release(&self, name: &Name, _: Break) -> Result<Vec<Holder>> {
        self.0.force_release(name, Break::Now).await
    }
}

/// Lists the holders, but does not force-release.
#[derive(Debug)]
pub(crate) struct BreaksNothing(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for BreaksNothing {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn force_release(&self, name: &Name, _: Break) -> Result<Vec<Holder>> {
        let states = self.0.list(&name.as_str().parse()?).await?;
        Ok(states.into_iter().flat_map(|state| state.holders).collect())
    }

    async fn inspect(&self, name: &Name) -> Result<LockState> {
        // Other clients see the expected effect, so that the law gets to check the holder.
        let mut state = self.0.inspect(name).await?;
        state.holders.iter_mut().for_each(|holder| holder.revoked = true);
        Ok(state)
    }
}

/// Reports losses only of claims that this client acquired itself.
#[derive(Debug)]
pub(crate) struct ReportsOwnClaimsOnly(Arc<dyn Engine>, Arc<Mutex<HashSet<ClaimId>>>);

impl ReportsOwnClaimsOnly {
    pub(crate) fn new(inner: Arc<dyn Engine>) -> Self {
        Self(inner, Arc::default())
    }
}

#[async_trait]
impl Layer for ReportsOwnClaimsOnly {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        self.1.lock().unwrap().insert(claim.id);
        self.0.acquire(claim, wait).await
    }

    fn events(&self) -> BoxStream<'static, Event> {
        let own = self.1.clone();
        let is_own = move |signal: &Event| {
            let (Event::Lost(id, _) | Event::LastLease(id) | Event::Doubt(id)) = signal;
            std::future::ready(own.lock().unwrap().contains(id))
        };
        self.0.events().filter(is_own).boxed()
    }
}
