//! What the tests of all models ask of a search.

use std::fmt::Debug;

use lockset_models::explorer::{Model, explore};

/// More than any of these searches needs.
pub(crate) const MAX_STATES: usize = 8_000_000;

/// Every state is reached, and no promise is broken in any.
#[track_caller]
pub(crate) fn assert_sound<M: Model>(what: &str, scenario: &M) {
    let explored = explore(scenario, MAX_STATES);
    println!("{what}: {explored}");
    assert!(explored.found.is_none(), "{what}: {explored}");
    assert!(explored.exhausted, "{what} is too large: {explored}");
}

/// The shortest way to a broken promise is this long, and breaks this one.
#[track_caller]
pub(crate) fn assert_broken<M: Model>(scenario: &M, violation: M::Violation, steps: usize)
where
    M::Violation: PartialEq + Debug,
{
    let explored = explore(scenario, MAX_STATES);
    println!("{explored}");
    let found = explored.found.as_ref().map(|(violation, path)| (*violation, path.len()));
    let expected = Some((violation, steps));
    assert_eq!(found, expected, "the shortest counterexample, and its steps: {explored}");
}
