//! Faulty engines for the laws of `laws/identity.rs`.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use lockset::engine::{Admission, Claim, ClaimId, Engine, Grant, Renewal, Wait};
use lockset::{Break, Result, Token};

use super::{BorrowedGrants, Tokens, renew_each};
use crate::layer::{Layer, fenced_node};

/// A release frees the name, whichever claim holds it.
#[derive(Debug)]
pub(crate) struct ReleasesByName(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for ReleasesByName {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let released = self.0.release(claim, grant, next).await;
        if released.is_err() {
            self.0.force_release(&claim.name, Break::Now).await?;
        }
        released
    }
}

/// Checks the id of a renewal, but not its token.
#[derive(Debug)]
pub(crate) struct RenewsById(pub(crate) Arc<dyn Engine>, pub(crate) Arc<Tokens>);

#[async_trait]
impl Layer for RenewsById {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let granted = self.0.acquire(claim, wait).await?;
        if let Admission::Granted(grant) = &granted {
            self.1.lock().unwrap().insert(claim.id, grant.token);
        }
        Ok(granted)
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        renew_each(batch, |claim, grant| async {
            let known = self.1.lock().unwrap().get(&claim.id).copied();
            let grant = Grant { token: known.unwrap_or(grant.token), ..grant.clone() };
            self.0.renew(&[(claim, &grant)]).await.remove(0)
        })
        .await
    }
}

/// Treats a repeated request as a new grant.
#[derive(Debug)]
pub(crate) struct GrantsAgain(pub(crate) Arc<dyn Engine>, pub(crate) Arc<Tokens>);

#[async_trait]
impl Layer for GrantsAgain {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let grant = match self.0.acquire(claim, wait).await? {
            Admission::Granted(grant) => grant,
            other => return Ok(other),
        };
        let first = self.1.lock().unwrap().insert(claim.id, grant.token).is_none();
        if first {
            return Ok(Admission::Granted(grant));
        }
        let token = Token::new(grant.token.get() + 1);
        fenced_node(&self.0)?.raise(claim, &grant, token).await.map(Admission::Granted)
    }
}

/// Forgets withdrawals, so that a withdrawn claim can be granted.
#[derive(Debug)]
pub(crate) struct ForgetsWithdrawals(
    pub(crate) Arc<dyn Engine>,
    pub(crate) Arc<Mutex<HashSet<ClaimId>>>,
);

#[async_trait]
impl Layer for ForgetsWithdrawals {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let mut claim = claim.clone();
        if self.1.lock().unwrap().contains(&claim.id) {
            claim.id = ClaimId::random();
        }
        self.0.acquire(&claim, wait).await
    }

    async fn withdraw(&self, claim: &Claim) -> Result<()> {
        self.1.lock().unwrap().insert(claim.id);
        self.0.withdraw(claim).await
    }
}

/// Lets several claims adopt one lock.
#[derive(Debug)]
pub(crate) struct AdoptsRepeatedly(pub(crate) Arc<dyn Engine>, pub(crate) Arc<BorrowedGrants>);

#[async_trait]
impl Layer for AdoptsRepeatedly {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        self.1.renew(&self.0, batch).await
    }

    async fn adopt(&self, claim: &Claim, grant: &Grant, successor: &Claim) -> Result<Grant> {
        self.1.swap(successor, self.1.by(claim));
        Ok(grant.clone())
    }
}
