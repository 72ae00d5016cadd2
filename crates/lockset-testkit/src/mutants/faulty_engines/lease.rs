//! Faulty engines for the laws of `laws/lease.rs`.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use lockset::Result;
use lockset::engine::{Admission, Claim, Engine, Grant, Renewal, Wait, drift, trusted_until};

use super::{renew_each, with_extra_ttl};
use crate::layer::Layer;

/// The lease at the backend has another length than the client is told.
#[derive(Debug)]
pub(crate) struct AlteredLeases {
    pub(crate) inner: Arc<dyn Engine>,
    pub(crate) actual_ttl: fn(Duration) -> Duration,
}

impl AlteredLeases {
    fn inner_claim(&self, claim: &Claim) -> Claim {
        Claim { ttl: (self.actual_ttl)(claim.ttl), ..claim.clone() }
    }

    fn reported(&self, claim: &Claim, grant: Grant) -> Grant {
        let actual_ttl = (self.actual_ttl)(claim.ttl);
        let begin = grant.valid_until.saturating_sub(actual_ttl.saturating_sub(drift(actual_ttl)));
        Grant { valid_until: trusted_until(begin, claim.ttl), ..grant }
    }
}

#[async_trait]
impl Layer for AlteredLeases {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.inner
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let granted = self.inner.acquire(&self.inner_claim(claim), wait).await?;
        Ok(granted.map(|grant| self.reported(claim, grant)))
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        renew_each(batch, |claim, grant| async {
            let renewed = self.inner.renew(&[(&self.inner_claim(claim), grant)]).await.remove(0)?;
            Ok(renewed.map(|renewed| self.reported(claim, renewed)))
        })
        .await
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let inner_next = next.map(|next| self.inner_claim(next));
        let granted = self.inner.release(claim, grant, inner_next.as_ref()).await?;
        Ok(granted.zip(next).map(|(grant, next)| self.reported(next, grant)))
    }
}

/// Reports a renewal that did not happen.
#[derive(Debug)]
pub(crate) struct RenewsNothing(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for RenewsNothing {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        let later = |(claim, grant): &(&Claim, &Grant)| {
            let valid_until = grant.valid_until + claim.ttl / 2;
            Ok(Renewal::Renewed(Grant { valid_until, ..(*grant).clone() }))
        };
        batch.iter().map(later).collect()
    }
}

/// Reports a grant only after its lease has ended, as if the lease had just begun.
#[derive(Debug)]
pub(crate) struct ReportsGrantLate(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for ReportsGrantLate {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let granted = self.0.acquire(claim, wait).await?;
        tokio::time::sleep(claim.ttl).await;
        Ok(granted.map(|grant| with_extra_ttl(claim, grant)))
    }
}
