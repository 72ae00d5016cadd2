//! The nodes of claims: how they are named, and in which order they queue.
//!
//! The order is exactly that of the layout's other clients. It compares text, not numbers: a client
//! that sorts differently from the others on the same nodes makes two holders.

use std::str::FromStr;

use crate::engine::{ClaimId, Mode};
use crate::error::{Error, Result};

const PERMITS: &str = "__PERM__";

/// The recipe whose nodes this client's locks share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Layout {
    /// Apache Curator's `InterProcessMutex`: an exclusive lock is a node `_c_<uuid>-lock-<number>`.
    #[default]
    Curator,
    /// Apache Curator's `InterProcessReadWriteLock`: the same, but an exclusive lock is a node
    /// `_c_<uuid>-__WRIT__<number>`.
    CuratorRw,
    /// kazoo's `Lock`, `WriteLock` and `ReadLock`.
    Kazoo,
}

impl FromStr for Layout {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "curator" => Ok(Self::Curator),
            "curator-rw" => Ok(Self::CuratorRw),
            "kazoo" => Ok(Self::Kazoo),
            _ => Err(Error::invalid("layout", text, "it must be curator, curator-rw or kazoo")),
        }
    }
}

impl Layout {
    /// The name of a claim's node, without the sequence number that the server appends.
    pub(super) fn node_prefix(self, id: ClaimId, mode: Mode) -> String {
        let marker = match (self, mode) {
            (_, Mode::Permits { take, limit }) => format!("{take}.{limit}{PERMITS}"),
            (Layout::Curator, Mode::Exclusive) => "lock-".to_owned(),
            (Layout::CuratorRw, Mode::Exclusive) => "__WRIT__".to_owned(),
            (Layout::Curator | Layout::CuratorRw, Mode::Shared) => "__READ__".to_owned(),
            (Layout::Kazoo, Mode::Exclusive) => "__lock__".to_owned(),
            (Layout::Kazoo, Mode::Shared) => "__rlock__".to_owned(),
        };
        match (self, mode) {
            (Layout::Kazoo, Mode::Permits { .. }) => format!("{id}-{marker}"),
            (Layout::Kazoo, _) => format!("{id}{marker}"),
            _ => format!("{}{marker}", protection_prefix(id)),
        }
    }

    /// Whether a node with this name was created for this claim.
    pub(super) fn is_node_of(self, node: &str, id: ClaimId) -> bool {
        match self {
            Layout::Kazoo => node.starts_with(&id.to_string()),
            _ => node.starts_with(&protection_prefix(id)),
        }
    }

    /// Whether the parents of claims are containers, which the server removes when they are empty.
    pub(super) fn uses_containers(self) -> bool {
        self != Layout::Kazoo
    }

    /// Holders and waiters among the children of a lock's parent, in their order.
    pub(super) fn queue(self, children: &[String]) -> Vec<QueueNode> {
        let mut queue: Vec<QueueNode> =
            children.iter().filter_map(|child| self.queue_node(child)).collect();
        queue.sort();
        queue
    }

    /// A child of a lock's parent; `None` if it cannot be a claim.
    pub(super) fn queue_node(self, node: &str) -> Option<QueueNode> {
        let (sort_key, mode) = self.sort_key(node)?;
        Some(QueueNode { sort_key: sort_key.to_owned(), name: node.to_owned(), mode })
    }

    /// Whether a node may be a claim of any client, and not the parent of other locks.
    pub(super) fn is_claim(self, node: &str) -> bool {
        self.sort_key(node).is_some()
    }

    /// What a claim is sorted by, and its mode. A node without a sequence number is not a claim,
    /// such as the children `locks` and `leases` of Curator's semaphores.
    fn sort_key(self, node: &str) -> Option<(&str, NodeMode)> {
        match self {
            Layout::Kazoo => kazoo_sort_key(node),
            Layout::Curator | Layout::CuratorRw => {
                Some(curator_sort_key(node)).filter(|(key, _)| sequence_number(key).is_some())
            }
        }
    }

    /// The claim that a node is named after.
    pub(super) fn claim_id(self, node: &str) -> Option<ClaimId> {
        let hex = match self {
            Layout::Kazoo => node.get(..32)?.to_owned(),
            _ => node.strip_prefix("_c_")?.get(..36)?.replace('-', ""),
        };
        hex.parse().ok()
    }
}

/// A node in the queue of a name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct QueueNode {
    /// First, because the order is derived.
    sort_key: String,
    pub(super) name: String,
    pub(super) mode: NodeMode,
}

impl QueueNode {
    /// The sequence number, as the server wrote it.
    pub(super) fn sequence_text(&self) -> &str {
        &self.sort_key
    }
}

/// The mode of a claim, as far as the name of its node tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum NodeMode {
    Exclusive,
    Shared,
    Permits { take: u32, limit: u32 },
}

impl From<NodeMode> for Mode {
    fn from(mode: NodeMode) -> Mode {
        match mode {
            NodeMode::Exclusive => Mode::Exclusive,
            NodeMode::Shared => Mode::Shared,
            NodeMode::Permits { take, limit } => Mode::Permits { take, limit },
        }
    }
}

/// The sequence number that the server gave a node.
pub(super) fn sequence_number(node: &str) -> Option<i32> {
    let digits = node.len().checked_sub(10)?;
    let start = match node.as_bytes().get(digits.wrapping_sub(1)) {
        // `…lock--2147483648`: the first dash ends the marker, the second is the sign.
        Some(b'-') if node[..digits].ends_with("--") || node[..digits].ends_with("__-") => {
            digits - 1
        }
        Some(b'-') if digits == 1 => 0,
        _ => digits,
    };
    node.get(start..)?.parse().ok()
}

/// Curator sorts by what follows the last marker, or by the whole name if there is none.
fn curator_sort_key(node: &str) -> (&str, NodeMode) {
    if let Some((_, key)) = node.rsplit_once("lock-") {
        return (key, NodeMode::Exclusive);
    }
    if let Some((_, key)) = node.rsplit_once("__READ__") {
        return (key, NodeMode::Shared);
    }
    if let Some((_, key)) = node.rsplit_once("__WRIT__") {
        return (key, NodeMode::Exclusive);
    }
    match node.rsplit_once(PERMITS) {
        Some((head, key)) => (key, permits_mode(head).unwrap_or(NodeMode::Exclusive)),
        None => (node, NodeMode::Exclusive),
    }
}

/// kazoo counts only nodes that end with a marker and a sequence number.
fn kazoo_sort_key(node: &str) -> Option<(&str, NodeMode)> {
    let (head, key) = node.rsplit_once("__")?;
    let digits = key.strip_prefix('-').unwrap_or(key);
    if digits.len() != 10 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    match head.rsplit_once("__")? {
        (_, "lock") => Some((key, NodeMode::Exclusive)),
        (_, "rlock") => Some((key, NodeMode::Shared)),
        (head, "PERM") => Some((key, permits_mode(head)?)),
        _ => None,
    }
}

/// Parses `…-<take>.<limit>`.
fn permits_mode(head: &str) -> Option<NodeMode> {
    let (take, limit) = head.rsplit_once('-')?.1.split_once('.')?;
    Some(NodeMode::Permits { take: take.parse().ok()?, limit: limit.parse().ok()? })
}

/// `_c_<uuid>-`, by which Curator ("protection") finds a node whose create lost its reply.
fn protection_prefix(id: ClaimId) -> String {
    let hex = id.to_string();
    let (a, rest) = hex.split_at(8);
    let (b, rest) = rest.split_at(4);
    let (c, rest) = rest.split_at(4);
    let (d, e) = rest.split_at(4);
    format!("_c_{a}-{b}-{c}-{d}-{e}-")
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef";

    fn id() -> ClaimId {
        ID.parse().unwrap()
    }

    fn order(layout: Layout, children: &[&str]) -> Vec<String> {
        let children: Vec<String> = children.iter().map(|child| (*child).to_owned()).collect();
        layout.queue(&children).into_iter().map(|node| node.name).collect()
    }

    #[test]
    fn nodes_are_named_as_in_curator_and_kazoo() {
        let uuid = "_c_01234567-89ab-cdef-0123-456789abcdef-";
        let permits = Mode::Permits { take: 2, limit: 5 };
        for (layout, mode, expected) in [
            (Layout::Curator, Mode::Exclusive, format!("{uuid}lock-")),
            (Layout::Curator, Mode::Shared, format!("{uuid}__READ__")),
            (Layout::Curator, permits, format!("{uuid}2.5__PERM__")),
            (Layout::CuratorRw, Mode::Exclusive, format!("{uuid}__WRIT__")),
            (Layout::CuratorRw, Mode::Shared, format!("{uuid}__READ__")),
            (Layout::Kazoo, Mode::Exclusive, format!("{ID}__lock__")),
            (Layout::Kazoo, Mode::Shared, format!("{ID}__rlock__")),
            (Layout::Kazoo, permits, format!("{ID}-2.5__PERM__")),
        ] {
            let prefix = layout.node_prefix(id(), mode);
            assert_eq!(prefix, expected);
            for number in ["0000000007", "2147483647", "-2147483648"] {
                let node = format!("{prefix}{number}");
                assert!(layout.is_node_of(&node, id()) && layout.is_claim(&node), "{node}");
                assert_eq!(layout.claim_id(&node), Some(id()));
                assert_eq!(sequence_number(&node), number.parse().ok(), "{node}");
                let queued = layout.queue_node(&node).unwrap();
                assert_eq!((Mode::from(queued.mode), &*queued.sort_key), (mode, number), "{node}");
            }
        }
        assert!(Layout::Curator.uses_containers() && Layout::CuratorRw.uses_containers());
        assert!(!Layout::Kazoo.uses_containers());
    }

    #[test]
    fn the_order_is_exactly_curators() {
        // Sorted by the text after the last `lock-`: negative numbers come first, the smaller of
        // two negative ones last. A node without a marker sorts by its whole name. A node without a
        // number is not a claim.
        let (a, b) = ("_c_ffffffff-ffff-ffff-ffff-ffffffffffff", "_c_00000000-lock-clock");
        let children = [
            format!("{a}-lock-0000000010"),
            format!("{b}-lock-0000000009"),
            format!("{a}-lock--2147483648"),
            format!("{b}-lock--2147483647"),
            format!("{a}-lock-2147483647"),
            "lock-0000000003".to_owned(),
            "somebody-0000000001".to_owned(),
            "somebody".to_owned(),
            "locks".to_owned(),
            "leases".to_owned(),
            "!".to_owned(),
            "_c_00000000-lock-".to_owned(),
        ];
        let children: Vec<&str> = children.iter().map(String::as_str).collect();
        let expected = [3, 2, 5, 1, 0, 4, 6].map(|index| children[index].to_owned());
        assert_eq!(order(Layout::Curator, &children), expected);
    }

    #[test]
    fn readers_and_writers_of_curator_share_one_queue() {
        let children =
            ["_c_b-__READ__0000000002", "_c_c-__WRIT__0000000001", "_c_a-__READ__0000000001"];
        // A downgraded writer keeps its number.
        let expected = [children[2], children[1], children[0]];
        assert_eq!(order(Layout::CuratorRw, &children), expected);
    }

    #[test]
    fn the_kazoo_layout_counts_what_kazoo_counts() {
        let children = [
            "b0__lock__0000000002",
            "a0__rlock__0000000001",
            "a0__lock__-2147483648",
            "x__lock__1",
            "_c_b-lock-0000000000",
            "junk",
        ];
        let expected = [children[2], children[1], children[0]];
        assert_eq!(order(Layout::Kazoo, &children), expected);
    }
}
