//! The events of sessions, and the losses that follow from them. Leases that nobody renews end
//! here, too.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;

use super::claim_table::TrackedClaim;
use super::client::{SessionEvent, WatchEvent, WatchEventKind};
use super::record::ClaimRecord;
use super::{MAIN_SESSION, SessionTag, ZooKeeperCore};
use crate::engine::{ClaimId, Event};
use crate::error::LossReason;

/// How often leases that nobody renews are looked for, per session timeout.
const LEASE_CHECKS_PER_TIMEOUT: u32 = 12;

/// Handles the events of all sessions.
pub(super) async fn dispatch_events(
    core: Arc<ZooKeeperCore>,
    mut events: mpsc::UnboundedReceiver<(SessionTag, SessionEvent)>,
) {
    while let Some((tag, event)) = events.recv().await {
        match event {
            SessionEvent::NodeChanged(event) => {
                core.on_node_changed(&event);
                core.watchers.on_node_changed(&core, &event.path);
            }
            SessionEvent::Disconnected => {
                let doubted = core.held_claims(tag);
                doubted.into_iter().for_each(|id| core.signal(Event::Doubt(id)));
            }
            SessionEvent::TimeoutShortened => core.on_timeout_shortened(tag),
            SessionEvent::Expired(epoch) => core.on_session_expired(tag, epoch),
            SessionEvent::Connected if tag == MAIN_SESSION => core.watchers.on_connected(&core),
            SessionEvent::Connected => {}
            // The caller may have gone.
            SessionEvent::Flush(tell_flushed) => drop(tell_flushed.send(())),
        }
    }
}

/// Ends leases that nobody renews: the main session would keep their nodes for ever.
pub(super) async fn end_unrenewed_leases(core: Arc<ZooKeeperCore>) {
    loop {
        let pause = (core.timeout / LEASE_CHECKS_PER_TIMEOUT).max(Duration::from_millis(10));
        core.clock.sleep_until(core.clock.now() + pause).await;
        let now = core.clock.now();
        let ended: Vec<(ClaimId, TrackedClaim)> = {
            let mut claims = core.claims();
            let has_ended = |entry: &TrackedClaim| entry.lease.is_some_and(|lease| lease <= now);
            let ended: Vec<ClaimId> = claims
                .entries
                .iter()
                .filter(|(_, entry)| has_ended(entry))
                .map(|(id, _)| *id)
                .collect();
            ended.into_iter().filter_map(|id| Some((id, claims.remove(id)?))).collect()
        };
        for (id, entry) in ended {
            // A lock's own session ends by itself, unless the owner of its ticket renews it in
            // another process.
            if entry.tag == MAIN_SESSION {
                core.delete_ended(id, entry);
            }
        }
    }
}

impl ZooKeeperCore {
    /// Sends an event to the keeper, which may have ended.
    fn signal(&self, event: Event) {
        let _ = self.events.send(event);
    }

    fn held_claims(&self, tag: SessionTag) -> Vec<ClaimId> {
        let claims = self.claims();
        let held = claims.entries.iter().filter(|(_, entry)| entry.tag == tag);
        held.filter(|(_, entry)| entry.lease.is_some()).map(|(id, _)| *id).collect()
    }

    /// The session is over, and with it all its claims.
    fn on_session_expired(&self, tag: SessionTag, epoch: u64) {
        let mut claims = self.claims();
        let ended: Vec<ClaimId> = claims
            .entries
            .iter()
            .filter(|(_, entry)| entry.tag == tag && entry.epoch <= epoch)
            .map(|(id, _)| *id)
            .collect();
        for id in ended {
            if claims.remove(id).is_some_and(|entry| entry.lease.is_some()) {
                self.signal(Event::Lost(id, LossReason::SessionEnded));
            }
        }
    }

    /// Ends leases that last longer than the server now keeps the session: what was promised cannot
    /// be kept.
    fn on_timeout_shortened(&self, tag: SessionTag) {
        let held = self.held_claims(tag);
        let mut claims = self.claims();
        for id in held {
            let outlasts = |entry: &TrackedClaim| entry.lease > Some(entry.session.valid_until());
            if claims.entries.get(&id).is_some_and(outlasts)
                && let Some(entry) = claims.remove(id)
            {
                self.signal(Event::Lost(id, LossReason::SessionEnded));
                self.delete_ended(id, entry);
            }
        }
    }

    /// The node of a held lock was deleted, or its record changed.
    fn on_node_changed(self: &Arc<Self>, event: &WatchEvent) {
        let WatchEvent { kind, path } = event;
        let mut claims = self.claims();
        let Some(id) = claims.watched.get(path).copied() else { return };
        let is_held = claims.entries.get(&id).is_some_and(|entry| entry.lease.is_some());
        if *kind == WatchEventKind::Deleted {
            // A downgrade deletes it as well; the next renewal finds the node.
            claims.watched.remove(path);
            if let Some(entry) = claims.entries.get_mut(&id)
                && entry.other_path(path).is_some()
            {
                entry.watched_on = 0;
                return;
            }
            claims.remove(id);
            if is_held {
                self.signal(Event::Lost(id, LossReason::Broken));
            }
            return;
        }
        let Some(entry) = claims.entries.get(&id) else { return };
        let (session, path, core) = (entry.session.clone(), path.clone(), self.clone());
        self.runtime.spawn(async move {
            match session.data(&path, true).data().await {
                Ok((data, _)) => {
                    if ClaimRecord::decode(&data).is_some_and(|record| record.revoked) {
                        core.signal(Event::LastLease(id));
                    }
                }
                // The next renewal reads it.
                Err(_) => {
                    if let Some(entry) = core.claims().entries.get_mut(&id) {
                        entry.watched_on = 0;
                    }
                }
            }
        });
    }
}
