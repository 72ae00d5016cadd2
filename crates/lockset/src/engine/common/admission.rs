//! Which claims are admitted, for the engines that decide it in Rust.

use crate::engine::{Claim, Mode};
use crate::error::{Error, Result};

/// The sum of the claims before another claim in the queue, holders and waiters alike.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    exclusive: u64,
    shared: u64,
    permits: u64,
}

impl Tally {
    /// The one predicate for all modes: whether a claim is admitted behind the counted ones.
    pub(crate) fn admits(&self, mode: Mode) -> bool {
        match mode {
            Mode::Exclusive => *self == Tally::default(),
            Mode::Shared => self.exclusive == 0,
            Mode::Permits { take, limit } => self.permits + u64::from(take) <= u64::from(limit),
        }
    }

    /// Counts a claim.
    pub(crate) fn add(&mut self, mode: Mode) {
        let (count, n) = self.count(mode);
        *count += n;
    }

    /// Removes a counted claim.
    pub(crate) fn remove(&mut self, mode: Mode) {
        let (count, n) = self.count(mode);
        *count -= n;
    }

    fn count(&mut self, mode: Mode) -> (&mut u64, u64) {
        match mode {
            Mode::Exclusive => (&mut self.exclusive, 1),
            Mode::Shared => (&mut self.shared, 1),
            Mode::Permits { take, .. } => (&mut self.permits, u64::from(take)),
        }
    }
}

/// Rejects a claim for no permits, or for more than there are: it would wait for ever, and so would
/// every claim behind it.
pub(crate) fn check_permits(claim: &Claim) -> Result<()> {
    match claim.mode {
        Mode::Permits { take, limit } if take == 0 || take > limit => {
            let why = format!("there are {limit} permits to ask for");
            Err(Error::invalid("number of permits", &take.to_string(), why))
        }
        _ => Ok(()),
    }
}

/// Why a name in use in mode `used` cannot also be used in mode `wanted`; `None` if it can. A mutex
/// and a reader-writer lock are compatible, a semaphore only with one of the same limit.
pub(crate) fn clash(used: Mode, wanted: Mode) -> Option<String> {
    use Mode::{Exclusive, Permits, Shared};
    match (used, wanted) {
        (Exclusive | Shared, Exclusive | Shared) => None,
        (Permits { limit: a, .. }, Permits { limit: b, .. }) if a == b => None,
        (Permits { limit: a, .. }, Permits { limit: b, .. }) => {
            Some(format!("it is in use as a semaphore of {a} permits, not of {b}"))
        }
        (Permits { limit, .. }, _) => {
            Some(format!("it is in use as a semaphore of {limit} permits, not as a lock"))
        }
        (_, Permits { limit, .. }) => {
            Some(format!("it is in use as a lock, not as a semaphore of {limit} permits"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Mode::{Exclusive, Shared};

    fn permits(take: u32) -> Mode {
        Mode::Permits { take, limit: 3 }
    }

    /// How many of `queue`, from the front, are admitted together.
    fn admitted(queue: &[Mode]) -> usize {
        let mut tally = Tally::default();
        queue
            .iter()
            .take_while(|mode| {
                let admitted = tally.admits(**mode);
                tally.add(**mode);
                admitted
            })
            .count()
    }

    #[test]
    fn one_predicate_decides_all_modes() {
        assert_eq!(admitted(&[Exclusive, Exclusive]), 1);
        assert_eq!(admitted(&[Exclusive, Shared]), 1);
        assert_eq!(admitted(&[Shared, Shared, Shared]), 3);
        assert_eq!(admitted(&[Shared, Exclusive, Shared]), 1);
        assert_eq!(admitted(&[permits(2), permits(1), permits(1)]), 2);
        // The second does not fit, so the third waits although it would fit.
        assert_eq!(admitted(&[permits(2), permits(2), permits(1)]), 1);
    }

    #[test]
    fn removing_undoes_adding() {
        let mut tally = Tally::default();
        for mode in [Exclusive, Shared, permits(2)] {
            tally.add(mode);
            tally.remove(mode);
            assert_eq!(tally, Tally::default());
        }
    }

    #[test]
    fn a_name_has_one_use_at_a_time() {
        assert!(clash(Exclusive, Shared).is_none());
        assert!(clash(Exclusive, permits(1)).is_some());
        assert!(clash(permits(1), Shared).is_some());
        assert!(clash(permits(1), permits(3)).is_none());
        assert!(clash(permits(1), Mode::Permits { take: 1, limit: 4 }).is_some());
    }
}
