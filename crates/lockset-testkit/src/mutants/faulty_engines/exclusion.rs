//! Faulty engines for the laws of `laws/exclusion.rs`.

use std::sync::Arc;

use async_trait::async_trait;
use lockset::engine::{Admission, Claim, Engine, Grant, Renewal, Wait};
use lockset::{Mode, Result};

use super::renew_each;
use crate::layer::Layer;

/// Locks another name than the claim says.
#[derive(Debug)]
pub(crate) struct RenamesClaims {
    pub(crate) inner: Arc<dyn Engine>,
    pub(crate) rename: fn(&Claim) -> String,
}

/// A name of its own for each claim.
pub(crate) fn own_name(claim: &Claim) -> String {
    format!("{}/{}", claim.name, claim.id)
}

pub(crate) fn one_name(_: &Claim) -> String {
    "same".to_owned()
}

pub(crate) fn name_by_mode(claim: &Claim) -> String {
    match claim.mode {
        Mode::Permits { limit, .. } => format!("{}/{limit}", claim.name),
        _ => claim.name.to_string(),
    }
}

impl RenamesClaims {
    fn inner_claim(&self, claim: &Claim) -> Claim {
        Claim { name: (self.rename)(claim).parse().unwrap(), ..claim.clone() }
    }
}

#[async_trait]
impl Layer for RenamesClaims {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.inner
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        self.inner.acquire(&self.inner_claim(claim), wait).await
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        renew_each(batch, |claim, grant| async {
            self.inner.renew(&[(&self.inner_claim(claim), grant)]).await.remove(0)
        })
        .await
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let next = next.map(|next| self.inner_claim(next));
        self.inner.release(&self.inner_claim(claim), grant, next.as_ref()).await
    }

    async fn withdraw(&self, claim: &Claim) -> Result<()> {
        self.inner.withdraw(&self.inner_claim(claim)).await
    }
}
