//! The judge of what clients of a quorum had: tokens under any timing, exclusion as far as clocks
//! and memories of the nodes allow it.

use std::collections::HashMap;
use std::fmt;

use lockset::clock::Moment;
use lockset::{Name, Token};

/// An acquisition, and what came of it.
#[derive(Clone, Debug)]
pub(super) struct Acquired {
    /// The client, for the message.
    pub(super) who: usize,
    /// Which lock.
    pub(super) name: String,
    /// Its token.
    pub(super) token: Token,
    /// When it began to ask.
    pub(super) asked: Moment,
    /// When it had the guard in hand.
    pub(super) enter: Moment,
    /// When it let go or saw the loss, or the last deadline it read, whichever came first.
    pub(super) until: Moment,
    /// When extensions began that succeeded.
    pub(super) confirmed: Vec<Moment>,
}

impl fmt::Display for Acquired {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { who, name, token, .. } = self;
        let [asked, enter, until] =
            [self.asked, self.enter, self.until].map(|at| at.as_nanos() / 1_000_000);
        write!(f, "client {who} on {name} by {token} (ms: asked {asked}, {enter} to {until})")
    }
}

/// What was seen in one run.
#[derive(Debug, Default)]
pub(super) struct Record {
    pub(super) acquired: Vec<Acquired>,
    /// When leases of a node ended early, and whether it also forgot its fences.
    pub(super) faults: Vec<(Moment, bool)>,
    /// By name, the acquisition that wrote last to a register that refuses lower tokens.
    registers: HashMap<String, usize>,
    /// Writes that were refused.
    pub(super) stale: usize,
    wrong: Option<String>,
}

impl Record {
    /// Notes an acquisition, and answers its place.
    pub(super) fn acquire(&mut self, acquired: Acquired) -> usize {
        self.acquired.push(acquired);
        self.acquired.len() - 1
    }

    /// An extension of a hold that is in somebody's hands succeeded, and began then.
    pub(super) fn extended(&mut self, name: &Name, token: Token, began: Moment) {
        let is_it = |one: &&mut Acquired| one.name == name.as_str() && one.token == token;
        if let Some(one) = self.acquired.iter_mut().rev().find(is_it) {
            one.confirmed.push(began);
        }
    }

    /// It lets go, or knows that it was lost.
    pub(super) fn ends(&mut self, place: usize, at: Moment) {
        let one = &mut self.acquired[place];
        one.until = one.until.min(at);
    }

    /// Writes to the register of this acquisition's name, by its token.
    pub(super) fn write(&mut self, place: usize) {
        let one = &self.acquired[place];
        if let Some(last) = self.registers.get(&one.name).map(|last| &self.acquired[*last]) {
            if one.token < last.token {
                self.stale += 1;
                return;
            }
            if one.enter <= last.asked {
                let what = format!("the register goes back from {last} to {one}");
                self.wrong.get_or_insert(what);
            }
        }
        self.registers.insert(one.name.clone(), place);
    }

    /// Whether everything may have happened on a quorum that keeps its promises.
    ///
    /// # Errors
    /// What cannot have.
    pub(super) fn judge(&self) -> Result<(), String> {
        let mut all: Vec<&Acquired> = self.acquired.iter().collect();
        all.sort_by_key(|one| one.enter);
        for (index, first) in all.iter().enumerate() {
            for second in all[index + 1..].iter().filter(|other| other.name == first.name) {
                self.judge_tokens(first, second)?;
                self.judge_beliefs(first, second)?;
                self.judge_extensions(first, second)?;
                self.judge_extensions(second, first)?;
            }
        }
        self.wrong.clone().map_or(Ok(()), Err)
    }

    /// Without any clock: tokens are unique, and ordered where acquisitions do not overlap. Where a
    /// node forgot, proposals of the wall clock keep the order, but two that overlap may meet.
    fn judge_tokens(&self, first: &Acquired, second: &Acquired) -> Result<(), String> {
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

    /// Unless leases ended early between them, nobody believes to hold while another does.
    fn judge_beliefs(&self, first: &Acquired, second: &Acquired) -> Result<(), String> {
        let (from, to) = (first.asked.min(second.asked), second.enter);
        let excused = self.faults.iter().any(|(at, _)| *at >= from && *at <= to);
        let is_empty = |one: &Acquired| one.until <= one.enter;
        if !excused && !is_empty(first) && !is_empty(second) && second.enter < first.until {
            return Err(format!("two believe at once: {first} and {second}"));
        }
        Ok(())
    }

    /// Without any clock: an extension that succeeds began before any newer token was in hand.
    fn judge_extensions(&self, one: &Acquired, other: &Acquired) -> Result<(), String> {
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

    fn acquired(token: u64, asked: u64, enter: u64, until: u64) -> Acquired {
        let (name, token) = ("n".to_owned(), Token::new(token));
        let (asked, enter, until) = (at(asked), at(enter), at(until));
        Acquired { who: 0, name, token, asked, enter, until, confirmed: Vec::new() }
    }

    fn verdict(acquired: &[Acquired], faults: &[(Moment, bool)]) -> Result<(), String> {
        let (acquired, faults) = (acquired.to_vec(), faults.to_vec());
        Record { acquired, faults, ..Record::default() }.judge()
    }

    #[test]
    fn a_lower_token_is_right_only_for_one_that_began_before() {
        verdict(&[acquired(5, 0, 1, 2), acquired(4, 0, 3, 4)], &[]).unwrap();
        assert!(verdict(&[acquired(5, 0, 1, 2), acquired(4, 2, 3, 4)], &[]).is_err());
        assert!(verdict(&[acquired(5, 0, 1, 2), acquired(4, 2, 3, 4)], &[(at(2), true)]).is_err());
    }

    #[test]
    fn one_token_twice_is_right_only_for_those_that_met_at_a_node_that_forgot() {
        let both = [acquired(5, 0, 2, 3), acquired(5, 1, 4, 5)];
        assert!(verdict(&both, &[(at(1), false)]).is_err());
        verdict(&both, &[(at(1), true)]).unwrap();
        let apart = [acquired(5, 0, 2, 3), acquired(5, 3, 4, 5)];
        assert!(verdict(&apart, &[(at(1), true)]).is_err());
    }

    #[test]
    fn two_may_believe_at_once_only_if_a_lease_ended_early() {
        let both = [acquired(4, 0, 1, 6), acquired(5, 2, 4, 9)];
        assert!(verdict(&both, &[]).is_err());
        assert!(verdict(&both, &[(at(5), false)]).is_err(), "a later fault excuses nothing");
        verdict(&both, &[(at(3), false)]).unwrap();
    }

    #[test]
    fn an_extension_must_begin_before_a_newer_token() {
        let mut old = acquired(4, 0, 1, 2);
        old.confirmed.push(at(3));
        verdict(&[old.clone(), acquired(5, 2, 4, 5)], &[]).unwrap();
        old.confirmed.push(at(5));
        assert!(verdict(&[old, acquired(5, 2, 4, 5)], &[(at(3), false)]).is_err());
    }

    #[test]
    fn a_register_refuses_lower_tokens_and_must_not_go_back() {
        let mut record = Record::default();
        let old = record.acquire(acquired(4, 0, 1, 2));
        let new = record.acquire(acquired(5, 2, 3, 4));
        [old, new, old].into_iter().for_each(|place| record.write(place));
        assert_eq!(record.stale, 1);
        record.judge().unwrap();
        record.acquired[old].token = Token::new(6);
        record.write(old);
        assert!(record.judge().is_err());
    }
}
