//! Faulty engines for the laws of `laws/withdrawal.rs`.

use std::sync::Arc;

use async_trait::async_trait;
use lockset::Result;
use lockset::engine::{Admission, Claim, Engine, Wait};

use crate::layer::Layer;

/// Ignores withdrawals.
#[derive(Debug)]
pub(crate) struct IgnoresWithdrawals(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for IgnoresWithdrawals {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn withdraw(&self, _: &Claim) -> Result<()> {
        Ok(())
    }
}

/// Keeps the queue entry of a waiter that timed out.
#[derive(Debug)]
pub(crate) struct KeepsTimedOutWaiters(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for KeepsTimedOutWaiters {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let Wait::Until(_) = wait else { return self.0.acquire(claim, wait).await };
        let patience = tokio::time::sleep(claim.ttl / 32);
        tokio::select! {
            granted = self.0.acquire(claim, Wait::Forever) => granted,
            () = patience => Ok(Admission::NotInTime),
        }
    }
}

/// Reports an unresponsive backend as a busy lock.
#[derive(Debug)]
pub(crate) struct ReportsSilenceAsBusy(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for ReportsSilenceAsBusy {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let Wait::Until(_) = wait else { return self.0.acquire(claim, wait).await };
        tokio::select! {
            granted = self.0.acquire(claim, wait) => granted,
            // The timeout that its law gives.
            () = tokio::time::sleep(claim.ttl / 4) => Ok(Admission::NotInTime),
        }
    }
}
