//! What the nodes report without a request, and what follows for the lock.

use std::sync::Arc;

use super::RedlockCore;
use super::attempt::claim_of;
use crate::engine::Event;
use crate::error::LossReason;

impl RedlockCore {
    /// Handles an event of a node, and reports what follows for the lock as a whole.
    pub(super) fn on_event(self: &Arc<Self>, node: usize, event: Event) {
        let (id, why) = match event {
            Event::Lost(id, why) => (id, Some(why)),
            Event::LastLease(id) => (id, Some(LossReason::Revoked)),
            Event::Doubt(id) => (id, None),
        };
        let attempt = self.attempt_of(claim_of(id)).filter(|attempt| attempt.claim.id == id);
        let Some(attempt) = attempt else { return };
        let quorum = self.nodes.quorum;
        let event = match why {
            Some(why) => {
                let lost = attempt.state().on_lost(node, why, quorum);
                lost.map(|why| Event::from_reason(claim_of(id), why))
            }
            None => attempt.state().on_doubt(node, quorum).then(|| Event::Doubt(claim_of(id))),
        };
        if let Some(event) = event {
            // It fails only after the keeper has ended.
            let _ = self.events_sender.send(event);
        }
    }
}
