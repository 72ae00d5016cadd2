//! Faulty engines for the laws of `laws/primitives.rs`.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use futures_core::stream::BoxStream;
use futures_util::StreamExt;
use lockset::engine::{
    Admission, Claim, ClaimId, Engine, Grant, Hint, Renewal, Scope, Swap, Version, Wait,
};
use lockset::{Error, LockState, LossReason, Name, Note, Result};

use super::renew_each;
use crate::layer::Layer;

/// Renews only claims that the same client acquired.
#[derive(Debug)]
pub(crate) struct RenewsOwnClaimsOnly(
    pub(crate) Arc<dyn Engine>,
    pub(crate) Mutex<HashSet<ClaimId>>,
);

impl RenewsOwnClaimsOnly {
    pub(crate) fn new(inner: Arc<dyn Engine>) -> Self {
        Self(inner, Mutex::default())
    }
}

#[async_trait]
impl Layer for RenewsOwnClaimsOnly {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        self.1.lock().unwrap().insert(claim.id);
        self.0.acquire(claim, wait).await
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        renew_each(batch, |claim, grant| async {
            let ours = self.1.lock().unwrap().contains(&claim.id);
            match ours {
                true => self.0.renew(&[(claim, grant)]).await.remove(0),
                false => Ok(Renewal::Lost(LossReason::Forgotten)),
            }
        })
        .await
    }
}

/// All backends have the same identity.
#[derive(Debug)]
pub(crate) struct SameIdentityForAll(pub(crate) Arc<dyn Engine>);

impl Layer for SameIdentityForAll {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    fn identity(&self) -> String {
        "home".to_owned()
    }
}

/// Does not store notes.
#[derive(Debug)]
pub(crate) struct LosesNotes(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for LosesNotes {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        self.0.acquire(&Claim { note: Note::default(), ..claim.clone() }, wait).await
    }
}

/// Writes a cell whatever version it has.
#[derive(Debug)]
pub(crate) struct LastWriteWins(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for LastWriteWins {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn cell(&self, name: &Name, expect: Version, value: Option<Vec<u8>>) -> Result<Swap> {
        // Lets others read what is about to be overwritten.
        tokio::task::yield_now().await;
        match self.0.cell(name, expect, value.clone()).await? {
            Swap::Found(cell) => self.0.cell(name, cell.version, value).await,
            done => Ok(done),
        }
    }
}

/// A watch reports the first state and no changes.
#[derive(Debug)]
pub(crate) struct WatchesOnce(pub(crate) Arc<dyn Engine>);

impl Layer for WatchesOnce {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    fn hints(&self, _: &Scope) -> BoxStream<'static, Result<Hint>> {
        futures_util::stream::pending().boxed()
    }
}

/// Loses the first reply to a change of a cell, and hides which request made it.
#[derive(Debug)]
pub(crate) struct LosesFirstCellReply(Arc<dyn Engine>, AtomicUsize);

impl LosesFirstCellReply {
    pub(crate) fn new(inner: Arc<dyn Engine>) -> Self {
        Self(inner, AtomicUsize::new(0))
    }
}

#[async_trait]
impl Layer for LosesFirstCellReply {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn inspect(&self, name: &Name) -> Result<LockState> {
        let mut state = self.0.inspect(name).await?;
        if let Some(cell) = &mut state.cell
            && let Ok(mut content) = serde_json::from_slice::<serde_json::Value>(&cell.value)
            && let Some(by) = content.get_mut("by").and_then(|by| by.as_array_mut())
        {
            by.iter_mut().for_each(|id| *id = ClaimId::random().to_string().into());
            cell.value = content.to_string().into_bytes();
        }
        Ok(state)
    }

    async fn cell(&self, name: &Name, expect: Version, value: Option<Vec<u8>>) -> Result<Swap> {
        let swap = self.0.cell(name, expect, value).await?;
        // The first change is the arrival at the barrier.
        match self.1.fetch_add(1, Ordering::Relaxed) {
            1 => Err(Error::Unreachable {
                engine: "mutant",
                what: "the answer was lost".to_owned(),
                retryable: true,
                source: None,
            }),
            _ => Ok(swap),
        }
    }
}
