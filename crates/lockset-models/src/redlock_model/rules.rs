//! The rules of fenced Redlock that can be left out, to show that each of them is needed.

/// A rule of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// A token that not all of a majority answered is written back before it is believed.
    WritesBack,
    /// RAISE is rejected where another claim holds, or none.
    RaiseChecksHolder,
    /// RAISE is refused where the fence is above the token.
    RaiseChecksFence,
    /// Every attempt has an id of its own.
    FreshIds,
    /// EXTEND is refused where the fence is not what this holder was answered there.
    ExtendChecksFence,
    /// EXTEND is rejected where no claim holds.
    ExtendCreatesNothing,
    /// An extension counts only answers to its own requests.
    ExtendCountsItsOwn,
    /// Where a holder was answered more than its token, EXTEND keeps the node but does not count.
    HigherDoesNotCount,
    /// A node that is seeded again counts only if it answers the token itself.
    SeedCountsExactly,
}

/// All rules, or all but some.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    missing: u32,
}

impl Rules {
    /// All of them.
    pub const ALL: Rules = Rules { missing: 0 };

    /// All but these.
    pub fn without(rules: &[Rule]) -> Self {
        Self { missing: rules.iter().fold(0, |missing, rule| missing | 1 << *rule as u32) }
    }

    /// Whether this rule is kept.
    pub fn keep(self, rule: Rule) -> bool {
        self.missing & (1 << rule as u32) == 0
    }
}
