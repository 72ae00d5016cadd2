//! Sees every extension that a quorum grants, whoever asked for it.

use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use lockset::Result;
use lockset::clock::Clock;
use lockset::engine::{Claim, Engine, Grant};

use super::judge::Record;
use crate::layer::Layer;

/// Passes everything on to a quorum, and notes the extensions.
#[derive(Debug)]
pub(super) struct Witness {
    pub(super) quorum: Arc<dyn Engine>,
    pub(super) record: Arc<Mutex<Record>>,
    pub(super) clock: Clock,
}

#[async_trait]
impl Layer for Witness {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.quorum
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        let began = self.clock.now();
        let answers = self.quorum.renew(batch).await;
        let mut record = self.record.lock().unwrap();
        for (answer, (claim, _)) in answers.iter().zip(batch) {
            if let Ok(grant) = answer {
                record.extended(&claim.name, grant.token, began);
            }
        }
        answers
    }
}
