//! The history of a run, and its check: tokens under any timing; exclusion as far as the clocks and
//! memories of the nodes permit it.

use std::collections::HashMap;
use std::fmt;

use lockset::clock::Moment;
use lockset::{Name, Token};

/// An acquisition and its outcome.
#[derive(Clone, Debug)]
pub(super) struct Acquisition {
    /// The client, for the message.
    pub(super) who: usize,
    /// The lock.
    pub(super) name: String,
    /// Its token.
    pub(super) token: Token,
    /// When it began to acquire.
    pub(super) asked: Moment,
    /// When it received the guard.
    pub(super) enter: Moment,
    /// When it released or saw the loss, or the last deadline that it read, whichever came first.
    pub(super) until: Moment,
    /// When its successful renewals began.
    pub(super) confirmed: Vec<Moment>,
}

impl fmt::Display for Acquisition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { who, name, token, .. } = self;
        let [asked, enter, until] =
            [self.asked, self.enter, self.until].map(|at| at.as_nanos() / 1_000_000);
        write!(f, "client {who} on {name} by {token} (ms: asked {asked}, {enter} to {until})")
    }
}

/// What was observed in one run.
#[derive(Debug, Default)]
pub(super) struct RunHistory {
    pub(super) acquired: Vec<Acquisition>,
    /// When leases of a node ended early, and whether it also lost its fences.
    pub(super) faults: Vec<(Moment, bool)>,
    /// By name, the last acquisition that wrote to a register that rejects lower tokens.
    registers: HashMap<String, usize>,
    /// Writes that were rejected.
    pub(super) stale: usize,
    violation: Option<String>,
}

impl RunHistory {
    /// Records an acquisition and returns its index.
    pub(super) fn acquire(&mut self, acquired: Acquisition) -> usize {
        self.acquired.push(acquired);
        self.acquired.len() - 1
    }

    /// Records a successful renewal that began at `began`, if its hold is known.
    pub(super) fn record_renewal(&mut self, name: &Name, token: Token, began: Moment) {
        let is_it = |one: &&mut Acquisition| one.name == name.as_str() && one.token == token;
        if let Some(one) = self.acquired.iter_mut().rev().find(is_it) {
            one.confirmed.push(began);
        }
    }

    /// The client released, or knows of the loss.
    pub(super) fn ends(&mut self, index: usize, at: Moment) {
        let one = &mut self.acquired[index];
        one.until = one.until.min(at);
    }

    /// Writes to the register of this acquisition's name with its token.
    pub(super) fn write(&mut self, index: usize) {
        let one = &self.acquired[index];
        if let Some(last) = self.registers.get(&one.name).map(|last| &self.acquired[*last]) {
            if one.token < last.token {
                self.stale += 1;
                return;
            }
            if one.enter <= last.asked {
                let what = format!("the register goes back from {last} to {one}");
                self.violation.get_or_insert(what);
            }
        }
        self.registers.insert(one.name.clone(), index);
    }

    /// Checks that everything can have happened on a quorum that keeps its promises.
    ///
    /// # Errors
    /// What cannot have happened.
    pub(super) fn check(&self) -> Result<(), String> {
        let mut all: Vec<&Acquisition> = self.acquired.iter().collect();
        all.sort_by_key(|one| one.enter);
        for (index, first) in all.iter().enumerate() {
            for second in all[index + 1..].iter().filter(|other| other.name == first.name) {
                self.check_tokens(first, second)?;
                self.check_exclusion(first, second)?;
                self.check_renewals(first, second)?;
                self.check_renewals(second, first)?;
            }
        }
        self.violation.clone().map_or(Ok(()), Err)
    }

    /// Independent of clocks: tokens are unique, and ordered if acquisitions do not overlap. After
    /// a node lost its memory, proposals of the wall clock keep the order, but two acquisitions
    /// that overlap may get the same token.
    fn check_tokens(&self, first: &Acquisition, second: &Acquisition) -> Result<(), String> {
        let overlap = second.asked < first.enter;
        let excused = overlap && self.forgot_before(second.enter);
        if first.token == second.token && !excused {
            return Err(format!("one token twice: {first} and {second}"));
        }
        if first.token > second.token && !overlap {
            return Err(format!("tokens fall: {first} and then {second}"));
        }
        Ok(())
    }

    /// Unless leases ended early between them, two clients do not believe to hold at the same time.
    fn check_exclusion(&self, first: &Acquisition, second: &Acquisition) -> Result<(), String> {
        let (from, to) = (first.asked.min(second.asked), second.enter);
        let excused = self.faults.iter().any(|(at, _)| *at >= from && *at <= to);
        let is_empty = |one: &Acquisition| one.until <= one.enter;
        if !excused && !is_empty(first) && !is_empty(second) && second.enter < first.until {
            return Err(format!("two holders at once: {first} and {second}"));
        }
        Ok(())
    }

    /// Independent of clocks: a successful renewal began before any newer token was returned.
    fn check_renewals(&self, one: &Acquisition, other: &Acquisition) -> Result<(), String> {
        let newer = other.token > one.token;
        let mut began = one.confirmed.iter();
        let late = began.find(|at| newer && other.enter < **at && !self.forgot_before(**at));
        match late {
            Some(at) => Err(format!("extended at {at:?} though old: {one}, and {other}")),
            None => Ok(()),
        }
    }

    fn forgot_before(&self, moment: Moment) -> bool {
        self.faults.iter().any(|(at, forgot)| *forgot && *at <= moment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment::from_nanos(seconds * 1_000_000_000)
    }

    fn acquired(token: u64, asked: u64, enter: u64, until: u64) -> Acquisition {
        let (name, token) = ("n".to_owned(), Token::new(token));
        let (asked, enter, until) = (at(asked), at(enter), at(until));
        Acquisition { who: 0, name, token, asked, enter, until, confirmed: Vec::new() }
    }

    fn check_all(acquired: &[Acquisition], faults: &[(Moment, bool)]) -> Result<(), String> {
        let (acquired, faults) = (acquired.to_vec(), faults.to_vec());
        RunHistory { acquired, faults, ..RunHistory::default() }.check()
    }

    #[test]
    fn a_lower_token_requires_an_earlier_start() {
        check_all(&[acquired(5, 0, 1, 2), acquired(4, 0, 3, 4)], &[]).unwrap();
        assert!(check_all(&[acquired(5, 0, 1, 2), acquired(4, 2, 3, 4)], &[]).is_err());
        assert!(
            check_all(&[acquired(5, 0, 1, 2), acquired(4, 2, 3, 4)], &[(at(2), true)]).is_err()
        );
    }

    #[test]
    fn a_repeated_token_requires_overlap_and_a_node_that_lost_its_memory() {
        let both = [acquired(5, 0, 2, 3), acquired(5, 1, 4, 5)];
        assert!(check_all(&both, &[(at(1), false)]).is_err());
        check_all(&both, &[(at(1), true)]).unwrap();
        let apart = [acquired(5, 0, 2, 3), acquired(5, 3, 4, 5)];
        assert!(check_all(&apart, &[(at(1), true)]).is_err());
    }

    #[test]
    fn two_holders_at_once_require_a_lease_that_ended_early() {
        let both = [acquired(4, 0, 1, 6), acquired(5, 2, 4, 9)];
        assert!(check_all(&both, &[]).is_err());
        assert!(check_all(&both, &[(at(5), false)]).is_err(), "a later fault excuses nothing");
        check_all(&both, &[(at(3), false)]).unwrap();
    }

    #[test]
    fn a_renewal_must_begin_before_a_newer_token() {
        let mut old = acquired(4, 0, 1, 2);
        old.confirmed.push(at(3));
        check_all(&[old.clone(), acquired(5, 2, 4, 5)], &[]).unwrap();
        old.confirmed.push(at(5));
        assert!(check_all(&[old, acquired(5, 2, 4, 5)], &[(at(3), false)]).is_err());
    }

    #[test]
    fn a_register_rejects_lower_tokens_and_never_goes_back() {
        let mut history = RunHistory::default();
        let old = history.acquire(acquired(4, 0, 1, 2));
        let new = history.acquire(acquired(5, 2, 3, 4));
        [old, new, old].into_iter().for_each(|index| history.write(index));
        assert_eq!(history.stale, 1);
        history.check().unwrap();
        history.acquired[old].token = Token::new(6);
        history.write(old);
        assert!(history.check().is_err());
    }
}
