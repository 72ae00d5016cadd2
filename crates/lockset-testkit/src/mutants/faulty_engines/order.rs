//! Faulty engines for the laws of `laws/order.rs`.

use std::sync::Arc;

use async_trait::async_trait;
use lockset::engine::{Admission, Claim, Engine, Grant, Renewal, Wait};
use lockset::{Result, Token};
use tokio::sync::oneshot;

use super::BorrowedGrants;
use crate::layer::{Layer, fenced_node};

/// Reports a release that did not happen.
#[derive(Debug)]
pub(crate) struct IgnoresRelease(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for IgnoresRelease {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn release(&self, _: &Claim, _: &Grant, _: Option<&Claim>) -> Result<Option<Grant>> {
        Ok(None)
    }
}

/// Releases, but does not enqueue the next claim.
#[derive(Debug)]
pub(crate) struct IgnoresNextOnRelease(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for IgnoresNextOnRelease {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        _: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        self.0.release(claim, grant, None).await
    }
}

/// Serves the last waiter first.
#[derive(Debug)]
pub(crate) struct ServesLastFirst(pub(crate) Arc<dyn Engine>, pub(crate) Arc<BorrowedGrants>);

#[async_trait]
impl Layer for ServesLastFirst {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        if wait == Wait::No {
            return self.0.acquire(claim, wait).await;
        }
        let (sender, mut served) = oneshot::channel();
        self.1.0.lock().unwrap().waiting.push((claim.id, sender));
        tokio::select! {
            granted = self.0.acquire(claim, wait) => {
                let grant = match granted? {
                    Admission::Granted(grant) => grant,
                    other => return Ok(other),
                };
                let last = self.1.0.lock().unwrap().waiting.pop();
                // Every waiter has an entry, and these laws cancel none.
                let (_, last) = last.unwrap();
                last.send((claim.clone(), grant)).unwrap();
            }
            by = &mut served => {
                let (by, grant) = by.unwrap();
                self.1.swap(claim, by);
                return Ok(Admission::Granted(grant));
            }
        }
        let (by, grant) = served.await.unwrap();
        self.1.swap(claim, by);
        Ok(Admission::Granted(grant))
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        self.1.renew(&self.0, batch).await
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        self.0.release(&self.1.by(claim), grant, next).await
    }
}

/// A release with a next claim hands over to it, although others wait.
#[derive(Debug)]
pub(crate) struct PrefersOwnProcess(pub(crate) Arc<dyn Engine>, pub(crate) Arc<BorrowedGrants>);

#[async_trait]
impl Layer for PrefersOwnProcess {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        self.1.renew(&self.0, batch).await
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let by = self.1.by(claim);
        let Some(next) = next else { return self.0.release(&by, grant, None).await };
        let token = Token::new(grant.token.get() + 1);
        self.1.swap(next, by.clone());
        fenced_node(&self.0)?.raise(&by, grant, token).await.map(Some)
    }
}

/// A release admits the first waiter and also the second.
#[derive(Debug)]
pub(crate) struct AdmitsTwo(pub(crate) Arc<dyn Engine>, pub(crate) Arc<BorrowedGrants>);

#[async_trait]
impl Layer for AdmitsTwo {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let (sender, served) = oneshot::channel();
        self.1.0.lock().unwrap().waiting.push((claim.id, sender));
        tokio::select! {
            biased;
            granted = self.0.acquire(claim, wait) => {
                self.1.0.lock().unwrap().waiting.retain(|(id, _)| *id != claim.id);
                granted
            }
            Ok((_, grant)) = served => Ok(Admission::Granted(grant)),
        }
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let released = self.0.release(claim, grant, next).await;
        let mut swaps = self.1.0.lock().unwrap();
        if swaps.waiting.len() > 1 {
            let (_, second) = swaps.waiting.remove(1);
            let forged = Grant { token: Token::new(grant.token.get() + 9), ..grant.clone() };
            // It may have been served meanwhile.
            let _ = second.send((claim.clone(), forged));
        }
        released
    }
}
