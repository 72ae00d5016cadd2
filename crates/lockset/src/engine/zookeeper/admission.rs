//! Whether a claim is admitted, and whom it has to wait for if not: pure decisions about a list.

use super::layout::Place;
use crate::engine::Mode;
use crate::engine::common::admission::{Tally, clash};

/// What a list of all who hold or wait says about one of them.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Admitted,
    /// It is not in the list.
    Gone,
    /// The name is in use in another way, for this reason.
    Clash(String),
    Wait(WaitFor),
}

/// Whose leaving may let a waiter in. Nobody else's does, so nobody else is watched.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum WaitFor {
    /// This one's.
    One(String),
    /// Any of these: they hold permits, and there is nobody between them and the waiter.
    AnyOf(Vec<String>),
    /// This one waits for permits, too, and says when it has got them.
    Behind(String),
}

/// How many of the queue, from the front, hold the lock together.
pub(super) fn holders(queue: &[Place]) -> usize {
    let mut tally = Tally::default();
    let admitted = queue.iter().take_while(|place| {
        let admitted = tally.admits(place.mode.into());
        tally.add(place.mode.into());
        admitted
    });
    admitted.count()
}

/// Decides about the claim whose node is `own`.
pub(super) fn judge(queue: &[Place], own: &str) -> Verdict {
    let Some(position) = queue.iter().position(|place| place.node == own) else {
        return Verdict::Gone;
    };
    let (before, mode) = (&queue[..position], Mode::from(queue[position].mode));
    if let Some(why) = before.iter().find_map(|place| clash(place.mode.into(), mode)) {
        return Verdict::Clash(why);
    }
    let mut tally = Tally::default();
    before.iter().for_each(|place| tally.add(place.mode.into()));
    if tally.admits(mode) {
        return Verdict::Admitted;
    }
    let node = |place: &Place| place.node.clone();
    let wait_for = match mode {
        Mode::Exclusive => before.last().map(|last| WaitFor::One(node(last))),
        Mode::Shared => {
            let mut writers = before.iter().rev();
            let last = writers.find(|place| Mode::from(place.mode) == Mode::Exclusive);
            last.map(|last| WaitFor::One(node(last)))
        }
        Mode::Permits { .. } => before.last().map(|last| match holders(before) == before.len() {
            true => WaitFor::AnyOf(before.iter().map(node).collect()),
            false => WaitFor::Behind(node(last)),
        }),
    };
    // Whoever has nobody to wait for was admitted above, or asks for more than there is.
    wait_for
        .map_or_else(|| Verdict::Clash("nobody could ever be admitted".to_owned()), Verdict::Wait)
}

#[cfg(test)]
mod tests {
    use super::super::layout::Layout;
    use super::*;

    fn queue(nodes: &[&str]) -> Vec<Place> {
        let children: Vec<String> = nodes.iter().map(|node| (*node).to_owned()).collect();
        Layout::Curator.queue(&children)
    }

    fn one(node: &str) -> Verdict {
        Verdict::Wait(WaitFor::One(node.to_owned()))
    }

    #[test]
    fn a_writer_watches_who_is_before_it_and_a_reader_the_last_writer() {
        let queue = queue(&[
            "r-__READ__0000000001",
            "r-__READ__0000000002",
            "w-lock-0000000003",
            "r-__READ__0000000004",
            "w-lock-0000000005",
        ]);
        assert_eq!(judge(&queue, "r-__READ__0000000001"), Verdict::Admitted);
        assert_eq!(judge(&queue, "r-__READ__0000000002"), Verdict::Admitted);
        assert_eq!(judge(&queue, "w-lock-0000000003"), one("r-__READ__0000000002"));
        assert_eq!(judge(&queue, "r-__READ__0000000004"), one("w-lock-0000000003"));
        assert_eq!(judge(&queue, "w-lock-0000000005"), one("r-__READ__0000000004"));
        assert_eq!(judge(&queue, "w-lock-0000000006"), Verdict::Gone);
        assert_eq!(holders(&queue), 2);
    }

    #[test]
    fn the_first_who_waits_for_permits_watches_all_holders_and_others_who_is_before_them() {
        let queue = queue(&[
            "a-1.3__PERM__0000000001",
            "b-1.3__PERM__0000000002",
            "c-3.3__PERM__0000000003",
            "d-1.3__PERM__0000000004",
        ]);
        assert_eq!(judge(&queue, "b-1.3__PERM__0000000002"), Verdict::Admitted);
        let holders =
            vec!["a-1.3__PERM__0000000001".to_owned(), "b-1.3__PERM__0000000002".to_owned()];
        assert_eq!(
            judge(&queue, "c-3.3__PERM__0000000003"),
            Verdict::Wait(WaitFor::AnyOf(holders))
        );
        let behind = Verdict::Wait(WaitFor::Behind("c-3.3__PERM__0000000003".to_owned()));
        assert_eq!(judge(&queue, "d-1.3__PERM__0000000004"), behind);
    }

    #[test]
    fn a_name_has_one_use_at_a_time() {
        let mixed =
            queue(&["a-1.3__PERM__0000000001", "w-lock-0000000002", "x-1.4__PERM__0000000003"]);
        assert!(matches!(judge(&mixed, "w-lock-0000000002"), Verdict::Clash(_)));
        assert!(matches!(judge(&mixed, "x-1.4__PERM__0000000003"), Verdict::Clash(_)));
        assert_eq!(judge(&mixed, "a-1.3__PERM__0000000001"), Verdict::Admitted);
    }
}
