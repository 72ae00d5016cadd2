//! The judge of a history: what clients believed, when, and whether they could all be right.

use lockset::clock::Moment;
use lockset::{ClaimId, Token};

/// What was seen in one run, on one clock.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// Who believed to hold what.
    pub beliefs: Vec<Belief>,
    /// When a name was freed at once by an operator.
    pub breaks: Vec<(String, Moment)>,
    /// What guards said.
    pub words: Vec<Word>,
    /// What clients were promised.
    pub promises: Vec<Promise>,
}

/// A client believes to hold a lock from `enter` to `until`.
#[derive(Clone, Debug)]
pub struct Belief {
    /// Who, for the message.
    pub who: String,
    /// Which lock.
    pub name: String,
    /// Its token.
    pub token: Token,
    /// When it began to ask. Its grant cannot be older.
    pub asked: Moment,
    /// When it had the guard in hand.
    pub enter: Moment,
    /// When it let go or saw the loss, or the last deadline it read, whichever came first.
    pub until: Moment,
}

impl Belief {
    /// A guard that was lost before it could be looked at: nobody acted on it.
    fn is_empty(&self) -> bool {
        self.until <= self.enter
    }
}

/// A guard said `Held` at this moment.
#[derive(Clone, Debug)]
pub struct Word {
    /// The guard's claim.
    pub claim: ClaimId,
    /// When it was asked.
    pub at: Moment,
}

/// An engine's answer said that a claim holds until then.
#[derive(Clone, Debug)]
pub struct Promise {
    /// The claim.
    pub claim: ClaimId,
    /// When the answer arrived.
    pub at: Moment,
    /// Until when it may be trusted.
    pub valid_until: Moment,
}

impl History {
    /// Whether everything in this history may have happened on a lock that keeps its promises.
    ///
    /// # Errors
    /// What cannot have.
    pub fn judge(&self) -> Result<(), String> {
        let mut beliefs: Vec<&Belief> = self.beliefs.iter().collect();
        beliefs.sort_by_key(|belief| belief.enter);
        for (index, first) in beliefs.iter().enumerate() {
            for second in beliefs[index + 1..].iter().filter(|other| other.name == first.name) {
                self.judge_pair(first, second)?;
            }
        }
        self.words.iter().try_for_each(|word| self.judge_word(word))
    }

    fn judge_pair(&self, first: &Belief, second: &Belief) -> Result<(), String> {
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
            return Err(format!("two believe at once: {first:?} and {second:?}"));
        }
        Ok(())
    }

    /// Whether an operator freed the lock at once after the earlier of two grants and before the
    /// later: then nothing is promised about the two but that their tokens differ.
    fn was_broken_between(&self, one: &Belief, other: &Belief) -> bool {
        let (earlier, later) = if one.token < other.token { (one, other) } else { (other, one) };
        let mut breaks = self.breaks.iter();
        breaks.any(|(name, at)| *name == one.name && *at >= earlier.asked && *at <= later.enter)
    }

    fn judge_word(&self, word: &Word) -> Result<(), String> {
        let promised = self.promises.iter().filter(|promise| {
            promise.claim == word.claim && promise.at <= word.at && promise.valid_until > word.at
        });
        match promised.count() {
            0 => Err(format!("held without a promise: {word:?}")),
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

    fn belief(token: u64, asked: u64, enter: u64, until: u64) -> Belief {
        let (who, name, token) = (format!("client of {token}"), "n".to_owned(), Token::new(token));
        Belief { who, name, token, asked: at(asked), enter: at(enter), until: at(until) }
    }

    fn verdict(beliefs: &[Belief], breaks: &[u64]) -> Result<(), String> {
        let breaks = breaks.iter().map(|second| ("n".to_owned(), at(*second))).collect();
        History { beliefs: beliefs.to_vec(), breaks, ..History::default() }.judge()
    }

    #[test]
    fn one_after_the_other_is_fine() {
        verdict(&[belief(1, 0, 1, 5), belief(2, 0, 5, 9)], &[]).unwrap();
        verdict(&[belief(2, 0, 5, 9), belief(1, 0, 1, 5)], &[]).unwrap();
    }

    #[test]
    fn two_at_once_are_refused() {
        let refused = verdict(&[belief(1, 0, 1, 6), belief(2, 0, 5, 9)], &[]).unwrap_err();
        assert!(refused.starts_with("two believe at once"), "{refused}");
        let within = verdict(&[belief(1, 0, 1, 9), belief(2, 0, 5, 6)], &[]);
        assert!(within.is_err(), "one inside the other");
    }

    #[test]
    fn other_names_do_not_matter() {
        let elsewhere = Belief { name: "m".to_owned(), ..belief(1, 0, 2, 9) };
        verdict(&[belief(1, 0, 1, 9), elsewhere], &[]).unwrap();
    }

    #[test]
    fn tokens_that_fall_or_return_are_refused() {
        let falling = verdict(&[belief(2, 0, 1, 2), belief(1, 0, 5, 9)], &[]).unwrap_err();
        assert!(falling.starts_with("tokens fall"), "{falling}");
        let twice = verdict(&[belief(1, 0, 1, 2), belief(1, 0, 5, 9)], &[4]).unwrap_err();
        assert!(twice.starts_with("one token twice"), "{twice}");
    }

    #[test]
    fn a_lock_that_was_lost_at_first_sight_was_no_belief() {
        verdict(&[belief(1, 0, 1, 6), belief(2, 0, 5, 5)], &[]).unwrap();
        verdict(&[belief(2, 0, 1, 6), belief(1, 0, 5, 5)], &[]).unwrap();
        assert!(verdict(&[belief(1, 0, 1, 6), belief(1, 0, 5, 5)], &[]).is_err());
    }

    #[test]
    fn a_break_excuses_only_what_it_broke() {
        let both = [belief(1, 0, 1, 6), belief(2, 0, 5, 9)];
        verdict(&both, &[3]).unwrap();
        assert!(verdict(&both, &[7]).is_err(), "a later break excuses nothing");
        let late = [belief(1, 4, 5, 9), belief(2, 4, 6, 9)];
        assert!(verdict(&late, &[3]).is_err(), "an earlier break excuses nothing");
    }

    #[test]
    fn held_needs_a_promise_that_was_heard_and_still_stands() {
        let claim = ClaimId::random();
        let said = |promised: u64, until: u64, asked: u64| {
            let promises = vec![Promise { claim, at: at(promised), valid_until: at(until) }];
            let words = vec![Word { claim, at: at(asked) }];
            History { promises, words, ..History::default() }.judge()
        };
        said(1, 5, 4).unwrap();
        assert!(said(1, 5, 5).is_err(), "after the deadline");
        assert!(said(3, 9, 2).is_err(), "before the answer");
    }
}
