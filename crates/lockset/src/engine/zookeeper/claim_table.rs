//! The claims of this client that have a node, or may have one.

use std::collections::HashMap;
use std::sync::Arc;

use super::client::Session;
use super::release::NodeDeletion;
use super::{MAIN_SESSION, SessionTag};
use crate::clock::Moment;
use crate::engine::ClaimId;
use crate::engine::common::tombstones::Tombstones;
use crate::hash::FastMap;
use crate::token::Token;

#[derive(Debug, Default)]
pub(super) struct ClaimTable {
    pub(super) entries: FastMap<ClaimId, ClaimEntry>,
    /// Claims that are over and whose nodes may still exist.
    deletions: FastMap<ClaimId, NodeDeletion>,
    /// The watched nodes of held locks.
    pub(super) watched: HashMap<String, ClaimId>,
    pub(super) withdrawn: Tombstones,
}

impl ClaimTable {
    pub(super) fn remove(&mut self, id: ClaimId) -> Option<ClaimEntry> {
        let entry = self.entries.remove(&id)?;
        if let Some(node) = &entry.node {
            self.watched.remove(&node.path);
        }
        if let Some(path) = &entry.moving_to {
            self.watched.remove(path);
        }
        Some(entry)
    }

    /// The claim is over. Returns how to delete its node, until `finish_deletion` is called.
    /// `parent` is where its node is, or may be.
    pub(super) fn end(&mut self, id: ClaimId, parent: &str) -> Option<NodeDeletion> {
        if let Some(entry) = self.remove(id) {
            let (path, parent) = (entry.known_path(), parent.to_owned());
            let ClaimEntry { session, tag, epoch, .. } = entry;
            self.deletions.insert(id, NodeDeletion { session, tag, epoch, parent, path });
        }
        self.deletions.get(&id).cloned()
    }

    /// The claim may be about to get this node without an entry in this table.
    pub(super) fn expect_deletion(&mut self, id: ClaimId, deletion: NodeDeletion) {
        self.deletions.insert(id, deletion);
    }

    /// Ends the claims whose leases are over, with how to delete their nodes. A lock's own session
    /// ends by itself, unless the owner of its ticket renews it in another process.
    pub(super) fn end_unrenewed(&mut self, now: Moment) -> Vec<(ClaimId, NodeDeletion)> {
        let is_over = |entry: &ClaimEntry| entry.lease.is_some_and(|lease| lease <= now);
        let over = self.entries.iter().filter(|(_, entry)| is_over(entry));
        let over: Vec<_> = over
            .filter_map(|(id, entry)| {
                Some((*id, entry.tag, entry.node.as_ref()?.parent().to_owned()))
            })
            .collect();
        let ended = over.into_iter().filter_map(|(id, tag, parent)| match tag {
            MAIN_SESSION => Some((id, self.end(id, &parent)?)),
            _ => self.remove(id).and(None),
        });
        ended.collect()
    }

    /// The node of a claim that is over does not exist any more.
    pub(super) fn finish_deletion(&mut self, id: ClaimId) {
        self.deletions.remove(&id);
    }

    /// The claim's node is at `path` now, where it is not watched yet. Returns whether the claim
    /// has a node.
    pub(super) fn set_node_path(&mut self, id: ClaimId, path: &str) -> bool {
        let Some(entry) = self.entries.get_mut(&id) else { return false };
        let Some(node) = &mut entry.node else { return false };
        let old = std::mem::replace(&mut node.path, path.to_owned());
        entry.moving_to = None;
        entry.watched_on = 0;
        if old != path {
            self.watched.remove(&old);
        }
        true
    }
}

/// A claim that has a node, or may have one.
#[derive(Debug)]
pub(super) struct ClaimEntry {
    pub(super) session: Arc<Session>,
    pub(super) tag: SessionTag,
    pub(super) epoch: u64,
    /// `None` if a create is under way, or its reply was lost.
    pub(super) node: Option<ClaimNode>,
    /// Until when the lock is held, if it is.
    pub(super) lease: Option<Moment>,
    /// The connection on which the node of a held lock is watched.
    pub(super) watched_on: u64,
    /// Counts the changes of the node's record.
    pub(super) changes: u64,
    /// A downgrade moves the node to this path, and its outcome is not known yet.
    pub(super) moving_to: Option<String>,
}

impl ClaimEntry {
    /// A claim whose node is about to be created.
    pub(super) fn new(session: &Arc<Session>, tag: SessionTag, epoch: u64) -> Self {
        Self {
            session: session.clone(),
            tag,
            epoch,
            node: None,
            lease: None,
            watched_on: 0,
            changes: 0,
            moving_to: None,
        }
    }

    /// Where the node is; `None` if it has to be searched for.
    pub(super) fn known_path(&self) -> Option<String> {
        let node = self.node.as_ref().filter(|_| self.moving_to.is_none());
        node.map(|node| node.path.clone())
    }

    /// Where the node may be other than at `path`.
    pub(super) fn other_path(&self, path: &str) -> Option<String> {
        let node = self.node.as_ref().map(|node| &node.path);
        [self.moving_to.as_ref(), node].into_iter().flatten().find(|other| *other != path).cloned()
    }
}

/// A claim's node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ClaimNode {
    pub(super) path: String,
    pub(super) token: Token,
}

impl ClaimNode {
    pub(super) fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or_default()
    }

    pub(super) fn parent(&self) -> &str {
        self.path.rsplit_once('/').map_or("", |(parent, _)| parent)
    }
}
