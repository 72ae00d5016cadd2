//! The events of sessions, and the losses that follow from them. Leases that are not renewed any
//! more end here, too.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::mpsc;

use super::claim_table::ClaimEntry;
use super::client::{NodeEvent, SessionEvent, WatchEventKind};
use super::record::NodeRecord;
use super::release::NodeDeletion;
use super::{MAIN_SESSION, SessionTag, ZooKeeperCore};
use crate::engine::{ClaimId, Event};
use crate::error::LossReason;

/// How often to look for leases that are not renewed any more, per session timeout.
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

/// Ends leases that are not renewed any more: the main session would keep their nodes for ever.
pub(super) async fn end_unrenewed_leases(core: Arc<ZooKeeperCore>) {
    // Those whose nodes could not be deleted yet.
    let mut ended: Vec<(ClaimId, NodeDeletion)> = Vec::new();
    loop {
        let pause = (core.timeout / LEASE_CHECKS_PER_TIMEOUT).max(Duration::from_millis(10));
        core.clock.sleep_until(core.clock.now() + pause).await;
        let now = core.clock.now();
        ended.extend(core.claims().end_unrenewed(now));
        let deletions = ended.iter().map(|(id, deletion)| core.delete_node(*id, deletion));
        let mut outcomes = join_all(deletions).await.into_iter();
        ended.retain(|_| outcomes.next().is_some_and(|outcome| outcome.is_err()));
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
            let outlasts = |entry: &ClaimEntry| entry.lease > Some(entry.session.valid_until());
            let entry = claims.entries.get(&id).filter(|entry| outlasts(entry));
            let parent = entry.and_then(|entry| Some(entry.node.as_ref()?.parent().to_owned()));
            if let Some(parent) = parent {
                // The keeper then withdraws the claim, which deletes its node.
                claims.end(id, &parent);
                self.signal(Event::Lost(id, LossReason::SessionEnded));
            }
        }
    }

    /// The node of a held lock was deleted, or its record changed.
    fn on_node_changed(self: &Arc<Self>, event: &NodeEvent) {
        let NodeEvent { kind, path } = event;
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
        let Some(entry) = claims.entries.get_mut(&id) else { return };
        // The next renewal reads the record: the lock may have been revoked, or passed on to
        // another claim by a client that is connected to another server.
        entry.watched_on = 0;
        entry.changes += 1;
        let (session, path, core) = (entry.session.clone(), path.clone(), self.clone());
        self.runtime.spawn(async move {
            if let Ok((data, _)) = session.data(&path, true).data().await
                && NodeRecord::decode(&data).is_some_and(|record| record.revoked)
            {
                core.signal(Event::LastLease(id));
            }
        });
    }
}
