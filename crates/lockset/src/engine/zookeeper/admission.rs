//! Whether a claim is admitted, and what it has to wait for if not: pure decisions about a queue.

use super::layout::QueueNode;
use crate::engine::Mode;
use crate::engine::common::admission::{Tally, clash};

/// What a queue says about one of its nodes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum AdmissionDecision {
    Admitted,
    /// It is not in the queue.
    NotQueued,
    /// The name is used in another mode, for this reason.
    Conflict(String),
    /// It is not admitted before one of these nodes has gone. No other node is watched.
    Wait(Vec<String>),
}

/// How many nodes at the front of the queue hold the lock together.
pub(super) fn count_holders(queue: &[QueueNode]) -> usize {
    let mut tally = Tally::default();
    let admitted = queue.iter().take_while(|node| {
        let admitted = tally.admits(node.mode.into());
        tally.add(node.mode.into());
        admitted
    });
    admitted.count()
}

/// Decides about the claim whose node is named `own`.
pub(super) fn decide(queue: &[QueueNode], own: &str) -> AdmissionDecision {
    let Some(position) = queue.iter().position(|node| node.name == own) else {
        return AdmissionDecision::NotQueued;
    };
    let (before, mode) = (&queue[..position], Mode::from(queue[position].mode));
    if let Some(why) = before.iter().find_map(|node| clash(node.mode.into(), mode)) {
        return AdmissionDecision::Conflict(why);
    }
    let mut tally = Tally::default();
    before.iter().for_each(|node| tally.add(node.mode.into()));
    if tally.admits(mode) {
        return AdmissionDecision::Admitted;
    }
    let name = |node: &QueueNode| node.name.clone();
    let watched = match mode {
        Mode::Exclusive => before.last().map(|last| vec![name(last)]),
        Mode::Shared => {
            let mut from_last = before.iter().rev();
            let last_writer = from_last.find(|node| Mode::from(node.mode) == Mode::Exclusive);
            last_writer.map(|last| vec![name(last)])
        }
        // As few of the last nodes as leave too few permits. While all of them exist, it does not
        // matter what becomes of the others.
        Mode::Permits { .. } => {
            let mut tally = Tally::default();
            let leaves_too_few = |node: &QueueNode| {
                tally.add(node.mode.into());
                !tally.admits(mode)
            };
            let first = before.iter().rposition(leaves_too_few);
            first.map(|first| before[first..].iter().map(name).collect())
        }
    };
    // A claim with nothing to wait for was admitted above, or asks for more than there is.
    let never = || AdmissionDecision::Conflict("it could never be admitted".to_owned());
    watched.map_or_else(never, AdmissionDecision::Wait)
}

#[cfg(test)]
mod tests {
    use super::super::layout::Layout;
    use super::*;

    fn queue(nodes: &[&str]) -> Vec<QueueNode> {
        let children: Vec<String> = nodes.iter().map(|node| (*node).to_owned()).collect();
        Layout::Curator.queue(&children)
    }

    fn wait_for_node(node: &str) -> AdmissionDecision {
        AdmissionDecision::Wait(vec![node.to_owned()])
    }

    #[test]
    fn a_writer_watches_the_node_before_it_and_a_reader_the_last_writer() {
        let queue = queue(&[
            "r-__READ__0000000001",
            "r-__READ__0000000002",
            "w-lock-0000000003",
            "r-__READ__0000000004",
            "w-lock-0000000005",
        ]);
        assert_eq!(decide(&queue, "r-__READ__0000000001"), AdmissionDecision::Admitted);
        assert_eq!(decide(&queue, "r-__READ__0000000002"), AdmissionDecision::Admitted);
        assert_eq!(decide(&queue, "w-lock-0000000003"), wait_for_node("r-__READ__0000000002"));
        assert_eq!(decide(&queue, "r-__READ__0000000004"), wait_for_node("w-lock-0000000003"));
        assert_eq!(decide(&queue, "w-lock-0000000005"), wait_for_node("r-__READ__0000000004"));
        assert_eq!(decide(&queue, "w-lock-0000000006"), AdmissionDecision::NotQueued);
        assert_eq!(count_holders(&queue), 2);
    }

    #[test]
    fn a_waiter_for_permits_watches_the_last_nodes_that_leave_it_too_few() {
        let nodes = [
            "a-1.3__PERM__0000000001",
            "b-1.3__PERM__0000000002",
            "c-2.3__PERM__0000000003",
            "d-1.3__PERM__0000000004",
            "e-3.3__PERM__0000000005",
        ];
        let queue = queue(&nodes);
        let wait = |watched: &[&str]| {
            AdmissionDecision::Wait(watched.iter().map(|node| (*node).to_owned()).collect())
        };
        assert_eq!(decide(&queue, nodes[1]), AdmissionDecision::Admitted);
        assert_eq!(decide(&queue, nodes[2]), wait(&nodes[..2]), "one permit is free, it needs two");
        assert_eq!(decide(&queue, nodes[3]), wait(&nodes[1..3]), "b and c leave none");
        assert_eq!(decide(&queue, nodes[4]), wait(&nodes[3..4]), "it needs all of them");
    }

    #[test]
    fn a_name_has_one_use_at_a_time() {
        let mixed =
            queue(&["a-1.3__PERM__0000000001", "w-lock-0000000002", "x-1.4__PERM__0000000003"]);
        assert!(matches!(decide(&mixed, "w-lock-0000000002"), AdmissionDecision::Conflict(_)));
        assert!(matches!(
            decide(&mixed, "x-1.4__PERM__0000000003"),
            AdmissionDecision::Conflict(_)
        ));
        assert_eq!(decide(&mixed, "a-1.3__PERM__0000000001"), AdmissionDecision::Admitted);
    }
}
