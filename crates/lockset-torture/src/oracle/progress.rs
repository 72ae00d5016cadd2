//! Locks are granted again when the faults are over.

use super::{Finding, seconds};
use crate::history::{History, Nanos, Promise, What};
use crate::holds::Facts;

/// Each lock is granted within two leases after the last fault, and what the engine needs to
/// recover. A history that ends before that says nothing.
pub(super) fn check(history: &History, facts: &Facts) -> Vec<Finding> {
    let setup = history.setup();
    let Some(quiet) = history.quiet() else { return Vec::new() };
    let limit = quiet + 2 * setup.ttl() + setup.recovery_ms * 1_000_000;
    if history.span().1 < limit {
        return Vec::new();
    }
    let granted = |name: &str| {
        let mut holds = facts.holds.iter();
        holds.any(|hold| hold.name == *name && (quiet..=limit).contains(&hold.entered))
    };
    let idle = setup.names.iter().filter(|name| !granted(name));
    let finding = |name: &String| Finding {
        promise: Promise::Progress,
        name: name.clone(),
        at: limit,
        processes: Vec::new(),
        text: format!("{name} was not granted within {} after the faults", seconds(limit - quiet)),
        exception: None,
    };
    idle.map(finding).collect()
}

/// How many acquisitions failed.
pub(super) fn failures(history: &History) -> usize {
    history.events.iter().filter(|event| matches!(event.what, What::Failed { .. })).count()
}

/// The longest time without a grant, from the first acquisition to the last event of a client.
pub(super) fn longest_stall(history: &History, facts: &Facts) -> Nanos {
    let is_ask = |what: &What| matches!(what, What::Ask { .. });
    let mut asks = history.events.iter().filter(|event| is_ask(&event.what));
    let Some(first) = asks.next() else { return 0 };
    let last = asks.next_back().unwrap_or(first);
    let times = facts.holds.iter().map(|hold| hold.entered);
    let times: Vec<Nanos> = [first.at].into_iter().chain(times).chain([last.at]).collect();
    times.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).max().unwrap_or(0)
}
