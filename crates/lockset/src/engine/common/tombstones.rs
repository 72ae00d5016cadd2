//! The claims that were withdrawn lately: a late request for one of them is rejected.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use crate::clock::Moment;
use crate::engine::ClaimId;

/// How long a withdrawn claim is remembered. A request of it must not arrive later: requests time
/// out after seconds, and Redis connections drop unacknowledged data after a third of this.
pub(crate) const TOMBSTONE_LIFE: Duration = Duration::from_secs(60);

/// The claims withdrawn lately, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Tombstones {
    ids: HashSet<ClaimId>,
    ends: VecDeque<(Moment, ClaimId)>,
}

impl Tombstones {
    pub(crate) fn insert(&mut self, id: ClaimId, now: Moment) {
        while let Some((_, old)) = self.ends.front().copied().filter(|(end, _)| *end <= now) {
            self.ids.remove(&old);
            self.ends.pop_front();
        }
        if self.ids.insert(id) {
            self.ends.push_back((now + TOMBSTONE_LIFE, id));
        }
    }

    pub(crate) fn contains(&self, id: ClaimId) -> bool {
        !self.ids.is_empty() && self.ids.contains(&id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_withdrawal_is_remembered_for_a_while() {
        let mut withdrawn = Tombstones::default();
        let (first, second) = (ClaimId::random(), ClaimId::random());
        let now = Moment::from_nanos(0);
        withdrawn.insert(first, now);
        withdrawn.insert(second, now + TOMBSTONE_LIFE / 2);
        assert!(withdrawn.contains(first) && withdrawn.contains(second));
        withdrawn.insert(second, now + TOMBSTONE_LIFE);
        assert!(!withdrawn.contains(first) && withdrawn.contains(second));
    }
}
