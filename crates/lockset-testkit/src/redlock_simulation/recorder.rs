//! Records every successful renewal of a quorum, by the client or by its keeper.

use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use lockset::Result;
use lockset::clock::Clock;
use lockset::engine::{Claim, Engine, Grant, Renewal};

use super::history::RunHistory;
use crate::layer::Layer;

/// Delegates everything to a quorum, and records the renewals.
#[derive(Debug)]
pub(super) struct RenewalRecorder {
    pub(super) quorum: Arc<dyn Engine>,
    pub(super) history: Arc<Mutex<RunHistory>>,
    pub(super) clock: Clock,
}

#[async_trait]
impl Layer for RenewalRecorder {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.quorum
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        let began = self.clock.now();
        let replies = self.quorum.renew(batch).await;
        let mut history = self.history.lock().unwrap();
        for (reply, (claim, _)) in replies.iter().zip(batch) {
            if let Ok(Renewal::Renewed(grant)) = reply {
                history.record_renewal(&claim.name, grant.token, began);
            }
        }
        replies
    }
}
