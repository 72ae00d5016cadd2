//! What the tests of all models ask of a search.

use std::fmt::Debug;

use lockset_models::explorer::{Model, explore};

/// More than any of these searches needs.
pub(crate) const MOST: usize = 8_000_000;

/// Every state is reached, and no promise is broken in any.
#[track_caller]
pub(crate) fn is_sound<M: Model>(what: &str, scenario: &M) {
    let explored = explore(scenario, MOST);
    println!("{what}: {explored}");
    assert!(explored.found.is_none(), "{what}: {explored}");
    assert!(explored.exhausted, "{what} is too large: {explored}");
}

/// The shortest way to a broken promise is this long, and breaks this one.
#[track_caller]
pub(crate) fn is_broken<M: Model>(scenario: &M, breach: M::Breach, steps: usize)
where
    M::Breach: PartialEq + Debug,
{
    let explored = explore(scenario, MOST);
    println!("{explored}");
    let found = explored.found.as_ref().map(|(breach, way)| (*breach, way.len()));
    let expected = Some((breach, steps));
    assert_eq!(found, expected, "the shortest counterexample, and its steps: {explored}");
}
