//! Faulty engines for the laws of `laws/inspection.rs`.

use std::sync::Arc;

use async_trait::async_trait;
use lockset::engine::Engine;
use lockset::{LockState, Prefix, Result};

use crate::layer::Layer;

/// Does not list waiters.
#[derive(Debug)]
pub(crate) struct ListsNoWaiters(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for ListsNoWaiters {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn list(&self, prefix: &Prefix) -> Result<Vec<LockState>> {
        let mut states = self.0.list(prefix).await?;
        states.iter_mut().for_each(|state| state.waiters.clear());
        Ok(states)
    }
}

/// Ignores the prefix of a list.
#[derive(Debug)]
pub(crate) struct ListsAll(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for ListsAll {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn list(&self, _: &Prefix) -> Result<Vec<LockState>> {
        self.0.list(&Prefix::default()).await
    }
}
