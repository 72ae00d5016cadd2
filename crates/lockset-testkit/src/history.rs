//! A history of what clients believed, and the check that all of them can have been right.

use lockset::clock::Moment;
use lockset::{ClaimId, Token};

/// What was observed in one run, on one clock.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// Which client believed to hold which lock, and when.
    pub intervals: Vec<HoldInterval>,
    /// When an operator force-released a name immediately.
    pub breaks: Vec<(String, Moment)>,
    /// When guards reported `Held`.
    pub held_reports: Vec<HeldReport>,
    /// Until when engines promised a lock.
    pub promises: Vec<LeasePromise>,
}

/// A client believes to hold a lock from `enter` to `until`.
#[derive(Clone, Debug)]
pub struct HoldInterval {
    /// The client, for the message.
    pub client: String,
    /// The lock.
    pub name: String,
    /// Its token.
    pub token: Token,
    /// When it began to acquire. Its grant cannot be older.
    pub asked: Moment,
    /// When it received the guard.
    pub enter: Moment,
    /// When it released or saw the loss, or the last deadline that it read, whichever came first.
    pub until: Moment,
}

impl HoldInterval {
    /// The guard was lost before its state was read, so the client never acted on it.
    fn is_empty(&self) -> bool {
        self.until <= self.enter
    }
}

/// A guard reported `Held` at this moment.
#[derive(Clone, Debug)]
pub struct HeldReport {
    /// The claim of the guard.
    pub claim: ClaimId,
    /// When its state was read.
    pub at: Moment,
}

/// An engine reported that a claim holds until a deadline.
#[derive(Clone, Debug)]
pub struct LeasePromise {
    /// The claim.
    pub claim: ClaimId,
    /// When the reply arrived.
    pub at: Moment,
    /// The deadline.
    pub valid_until: Moment,
}

impl History {
    /// Checks that everything in this history can have happened on a lock that keeps its promises.
    ///
    /// # Errors
    /// What cannot have happened.
    pub fn check(&self) -> Result<(), String> {
        let mut intervals: Vec<&HoldInterval> = self.intervals.iter().collect();
        intervals.sort_by_key(|interval| interval.enter);
        for (index, first) in intervals.iter().enumerate() {
            for second in intervals[index + 1..].iter().filter(|other| other.name == first.name) {
                self.check_pair(first, second)?;
            }
        }
        self.held_reports.iter().try_for_each(|report| self.check_held_report(report))
    }

    fn check_pair(&self, first: &HoldInterval, second: &HoldInterval) -> Result<(), String> {
        if first.token == second.token {
            return Err(format!("one token twice: {first:?} and {second:?}"));
        }
        if first.is_empty() || second.is_empty() || self.was_broken_between(first, second) {
            return Ok(());
        }
        if first.token > second.token {
            return Err(format!("tokens fall: {first:?} and then {second:?}"));
        }
        if second.enter < first.until {
            return Err(format!("two holders at once: {first:?} and {second:?}"));
        }
        Ok(())
    }

    /// Whether an operator force-released the lock between the two grants. Then nothing is promised
    /// about them except that their tokens differ.
    fn was_broken_between(&self, one: &HoldInterval, other: &HoldInterval) -> bool {
        let (earlier, later) = if one.token < other.token { (one, other) } else { (other, one) };
        let mut breaks = self.breaks.iter();
        breaks.any(|(name, at)| *name == one.name && *at >= earlier.asked && *at <= later.enter)
    }

    fn check_held_report(&self, report: &HeldReport) -> Result<(), String> {
        let promised = self.promises.iter().filter(|promise| {
            promise.claim == report.claim
                && promise.at <= report.at
                && promise.valid_until > report.at
        });
        match promised.count() {
            0 => Err(format!("held without a promise: {report:?}")),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment::from_nanos(seconds * 1_000_000_000)
    }

    fn interval(token: u64, asked: u64, enter: u64, until: u64) -> HoldInterval {
        let (client, name, token) =
            (format!("client of {token}"), "n".to_owned(), Token::new(token));
        HoldInterval { client, name, token, asked: at(asked), enter: at(enter), until: at(until) }
    }

    fn check_all(intervals: &[HoldInterval], breaks: &[u64]) -> Result<(), String> {
        let breaks = breaks.iter().map(|second| ("n".to_owned(), at(*second))).collect();
        History { intervals: intervals.to_vec(), breaks, ..History::default() }.check()
    }

    #[test]
    fn consecutive_holds_are_accepted() {
        check_all(&[interval(1, 0, 1, 5), interval(2, 0, 5, 9)], &[]).unwrap();
        check_all(&[interval(2, 0, 5, 9), interval(1, 0, 1, 5)], &[]).unwrap();
    }

    #[test]
    fn overlapping_holds_are_rejected() {
        let refused = check_all(&[interval(1, 0, 1, 6), interval(2, 0, 5, 9)], &[]).unwrap_err();
        assert!(refused.starts_with("two holders at once"), "{refused}");
        let within = check_all(&[interval(1, 0, 1, 9), interval(2, 0, 5, 6)], &[]);
        assert!(within.is_err(), "one inside the other");
    }

    #[test]
    fn other_names_do_not_matter() {
        let other_backend = HoldInterval { name: "m".to_owned(), ..interval(1, 0, 2, 9) };
        check_all(&[interval(1, 0, 1, 9), other_backend], &[]).unwrap();
    }

    #[test]
    fn falling_or_repeated_tokens_are_rejected() {
        let falling = check_all(&[interval(2, 0, 1, 2), interval(1, 0, 5, 9)], &[]).unwrap_err();
        assert!(falling.starts_with("tokens fall"), "{falling}");
        let twice = check_all(&[interval(1, 0, 1, 2), interval(1, 0, 5, 9)], &[4]).unwrap_err();
        assert!(twice.starts_with("one token twice"), "{twice}");
    }

    #[test]
    fn a_hold_lost_before_its_first_use_is_ignored() {
        check_all(&[interval(1, 0, 1, 6), interval(2, 0, 5, 5)], &[]).unwrap();
        check_all(&[interval(2, 0, 1, 6), interval(1, 0, 5, 5)], &[]).unwrap();
        assert!(check_all(&[interval(1, 0, 1, 6), interval(1, 0, 5, 5)], &[]).is_err());
    }

    #[test]
    fn a_forced_release_excuses_only_its_own_overlap() {
        let both = [interval(1, 0, 1, 6), interval(2, 0, 5, 9)];
        check_all(&both, &[3]).unwrap();
        assert!(check_all(&both, &[7]).is_err(), "a later break excuses nothing");
        let late = [interval(1, 4, 5, 9), interval(2, 4, 6, 9)];
        assert!(check_all(&late, &[3]).is_err(), "an earlier break excuses nothing");
    }

    #[test]
    fn a_held_report_needs_a_received_and_valid_promise() {
        let claim = ClaimId::random();
        let said = |promised: u64, until: u64, asked: u64| {
            let promises = vec![LeasePromise { claim, at: at(promised), valid_until: at(until) }];
            let held_reports = vec![HeldReport { claim, at: at(asked) }];
            History { promises, held_reports, ..History::default() }.check()
        };
        said(1, 5, 4).unwrap();
        assert!(said(1, 5, 5).is_err(), "after the deadline");
        assert!(said(3, 9, 2).is_err(), "before the answer");
    }
}
