//! Showing and listing locks.

use std::collections::BTreeSet;

use futures_util::future::join_all;

use super::acquire::ZkAttemptError;
use super::admission::count_holders;
use super::cells::cell_of;
use super::client::{NodeStat, ZkErrorCode, ZkRequestError};
use super::layout::QueueNode;
use super::record::NodeRecord;
use super::{CONNECT_TIMEOUT, ZooKeeperCore};
use crate::engine::{Cell, ClaimId, Holder, LockState, Waiter};
use crate::error::Result;
use crate::name::{Name, Note, Prefix};

/// A holder or waiter, as its node shows it.
pub(super) struct ObservedNode {
    pub(super) node: QueueNode,
    /// `None` if it is not lockset's, or not readable for this user.
    pub(super) record: Option<NodeRecord>,
    stat: NodeStat,
}

pub(super) fn queue_nodes(queue: &[ObservedNode]) -> Vec<QueueNode> {
    queue.iter().map(|observed| observed.node.clone()).collect()
}

impl ZooKeeperCore {
    pub(super) async fn inspect(&self, name: &Name) -> Result<LockState> {
        let give_up = self.clock.now() + CONNECT_TIMEOUT;
        loop {
            match self.try_inspect(name).await {
                // Reading again is harmless.
                Err(ZkAttemptError::Request(ZkRequestError::NotSent | ZkRequestError::Unknown))
                    if self.clock.now() < give_up =>
                {
                    self.wait_connected().await?;
                }
                Err(error) => return Err(error.into()),
                Ok(state) => return Ok(state),
            }
        }
    }

    async fn try_inspect(&self, name: &Name) -> Result<LockState, ZkAttemptError> {
        let (queue, cell) = self.read_queue(name).await?;
        let (holders, waiters) = queue.split_at(count_holders(&queue_nodes(&queue)));
        Ok(LockState {
            name: name.clone(),
            holders: holders.iter().map(|observed| self.holder(observed)).collect(),
            waiters: waiters.iter().map(|observed| self.waiter(observed)).collect(),
            fence: None,
            cell,
        })
    }

    /// Holders and waiters in their order, and the cell: as new as what the leader knows now.
    pub(super) async fn read_queue(
        &self,
        name: &Name,
    ) -> Result<(Vec<ObservedNode>, Option<Cell>), ZkAttemptError> {
        let (parent, cell) = (self.paths.lock_parent(name)?, self.paths.cell_node(name));
        self.wait_connected().await?;
        let session = &self.main;
        let (sync, list, cell) =
            (session.sync(&parent), session.children(&parent, false), session.data(&cell, false));
        sync.done().await?;
        let children = list.children_if_any().await?;
        let cell = match cell.data().await {
            Ok((data, stat)) => Some(cell_of(name, &data, stat)?),
            Err(error) if error.is(ZkErrorCode::NO_NODE) => None,
            Err(error) => return Err(error.into()),
        };
        let nodes = self.layout.queue(&children);
        let reads: Vec<_> = nodes
            .iter()
            .map(|node| session.data(&format!("{parent}/{}", node.name), false))
            .collect();
        let mut queue = Vec::with_capacity(nodes.len());
        for (node, read) in nodes.into_iter().zip(reads) {
            match read.data().await {
                Ok((data, stat)) => {
                    let record = NodeRecord::decode(&data);
                    queue.push(ObservedNode { node, record, stat });
                }
                // It was deleted meanwhile.
                Err(error) if error.is(ZkErrorCode::NO_NODE) => {}
                // It exists, but this user may not read it.
                Err(error) if error.is(ZkErrorCode::NO_AUTH) => {
                    queue.push(ObservedNode { node, record: None, stat: NodeStat::default() });
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok((queue, cell))
    }

    pub(super) fn holder(&self, observed: &ObservedNode) -> Holder {
        let ObservedNode { node, record, stat } = observed;
        let record = record.as_ref();
        let first = self.layout.claim_id(&node.name);
        let claim = first.and_then(|first| record.map(|record| record.claim(first)));
        // Only the leader knows when a session ends. Of our own locks we know the lease.
        let lease = claim.and_then(|id| self.claims().entries.get(&id)?.lease);
        let left = match lease {
            Some(lease) => lease.saturating_duration_since(self.clock.now()),
            None => record.map_or(self.timeout, NodeRecord::ttl),
        };
        Holder {
            claim,
            token: record.map(|record| record.token(stat.czxid)),
            mode: node.mode.into(),
            note: record.map_or_else(Note::default, |record| record.note().clone()),
            left,
            revoked: record.is_some_and(|record| record.revoked),
        }
    }

    fn waiter(&self, observed: &ObservedNode) -> Waiter {
        let ObservedNode { node, record, .. } = observed;
        Waiter {
            claim: self.layout.claim_id(&node.name).unwrap_or(ClaimId::from_bits(0)),
            mode: node.mode.into(),
            note: record.as_ref().map_or_else(Note::default, |record| record.note().clone()),
        }
    }

    pub(super) async fn list(&self, prefix: &Prefix) -> Result<Vec<LockState>> {
        let names = self.list_names(prefix).await?;
        let inspected = join_all(names.iter().map(|name| self.try_inspect(name))).await;
        let mut states = Vec::new();
        for state in inspected {
            match state {
                Ok(state) => states.push(state),
                // A listing shows what this user may read.
                Err(ZkAttemptError::Request(error)) if error.is(ZkErrorCode::NO_AUTH) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(states.into_iter().filter(LockState::is_used).collect())
    }

    /// The names with this prefix that have a node or a cell, sorted.
    pub(super) async fn list_names(&self, prefix: &Prefix) -> Result<Vec<Name>> {
        self.wait_connected().await?;
        let (chroot, cells) = (&self.paths.chroot, self.paths.cells_root());
        let sync = self.main.sync(chroot);
        let (locks, cells) = (self.main.children(chroot, false), self.main.children(&cells, false));
        sync.done().await?;
        let locks = locks.children().await?;
        let cells = cells.children_if_any().await?;
        let mut names: BTreeSet<Name> =
            cells.iter().filter_map(|cell| self.paths.name_of_cell(cell)).collect();
        let locks = locks.into_iter().filter(|child| !self.paths.is_cells_root(child));
        if self.paths.raw_names {
            self.find_raw_names(locks.collect(), &mut names).await?;
        } else {
            names.extend(locks.filter_map(|lock| self.paths.name_of_lock(&lock)));
        }
        Ok(names.into_iter().filter(|name| prefix.covers(name)).collect())
    }

    /// Searches these nodes below the chroot, and all below them. Raw names are paths: every node
    /// that has claims as children is a lock.
    async fn find_raw_names(
        &self,
        mut level: Vec<String>,
        names: &mut BTreeSet<Name>,
    ) -> Result<()> {
        while !level.is_empty() {
            let lists: Vec<_> = level
                .iter()
                .map(|node| self.main.children(&format!("{}/{node}", self.paths.chroot), false))
                .collect();
            let mut next_level = Vec::new();
            for (node, list) in level.into_iter().zip(lists) {
                let children = match list.children().await {
                    Err(ZkRequestError::Refused(_)) => continue,
                    children => children?,
                };
                let (claims, others): (Vec<String>, Vec<String>) =
                    children.into_iter().partition(|child| self.layout.is_claim(child));
                if !claims.is_empty() {
                    names.extend(self.paths.name_of_lock(&node));
                }
                next_level.extend(others.into_iter().map(|child| format!("{node}/{child}")));
            }
            level = next_level;
        }
        Ok(())
    }
}
