//! Faulty engines for the laws of `laws/tokens.rs`.

use std::sync::Arc;

use async_trait::async_trait;
use lockset::engine::{Admission, Capabilities, Claim, Engine, Grant, Renewal, Wait};
use lockset::{Result, Token};

use super::{Tokens, renew_each};
use crate::layer::{Layer, fenced_node};

/// Gives every claim the same token.
#[derive(Debug)]
pub(crate) struct SameTokenForAll(pub(crate) Arc<dyn Engine>, pub(crate) Arc<Tokens>);

impl SameTokenForAll {
    fn reported(&self, claim: &Claim, grant: Grant) -> Grant {
        self.1.lock().unwrap().insert(claim.id, grant.token);
        Grant { token: Token::new(7), ..grant }
    }

    fn inner_grant(&self, claim: &Claim, grant: &Grant) -> Grant {
        let token = self.1.lock().unwrap().get(&claim.id).copied();
        Grant { token: token.unwrap_or(grant.token), ..grant.clone() }
    }
}

#[async_trait]
impl Layer for SameTokenForAll {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let granted = self.0.acquire(claim, wait).await?;
        Ok(granted.map(|grant| self.reported(claim, grant)))
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        renew_each(batch, |claim, grant| async {
            let grant = self.inner_grant(claim, grant);
            let renewed = self.0.renew(&[(claim, &grant)]).await.remove(0)?;
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
        let granted = self.0.release(claim, &self.inner_grant(claim, grant), next).await?;
        Ok(granted.zip(next).map(|(grant, next)| self.reported(next, grant)))
    }
}

/// Claims to be durable, but restarts its tokens.
#[derive(Debug)]
pub(crate) struct RestartsTokens(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for RestartsTokens {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    fn capabilities(&self) -> Capabilities {
        let mut can = self.0.capabilities();
        can.durable = true;
        can
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let claim = Claim { floor: Some(Token::new(1)), ..claim.clone() };
        self.0.acquire(&claim, wait).await
    }
}

/// Ignores the floor of a claim.
#[derive(Debug)]
pub(crate) struct IgnoresFloors(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for IgnoresFloors {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        self.0.acquire(&Claim { floor: None, ..claim.clone() }, wait).await
    }
}

/// Reports a raised fence, but does not raise it.
#[derive(Debug)]
pub(crate) struct RaisesNothing(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for RaisesNothing {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn raise(&self, _: &Claim, grant: &Grant, to: Token) -> Result<Grant> {
        Ok(Grant { token: to, ..grant.clone() })
    }
}

/// Allows a fence to be lowered.
#[derive(Debug)]
pub(crate) struct LowersFence(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for LowersFence {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn raise(&self, claim: &Claim, grant: &Grant, to: Token) -> Result<Grant> {
        match to < grant.token {
            true => Ok(Grant { token: to, ..grant.clone() }),
            false => fenced_node(&self.0)?.raise(claim, grant, to).await,
        }
    }
}
