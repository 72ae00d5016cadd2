//! Rounds, slices, medians, and the one clock of all processes.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// How thorough a run is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// Three short rounds of everything: for developing, not for judging.
    pub(crate) quick: bool,
}

impl Pace {
    pub(crate) fn rounds(self, full: usize) -> usize {
        if self.quick { 3 } else { full }
    }

    pub(crate) fn span(self, full: Duration) -> Duration {
        if self.quick { full / 3 } else { full }
    }
}

/// What a person asked for: how thoroughly, and which rows.
#[derive(Debug)]
pub(crate) struct Order<'a> {
    pub(crate) pace: Pace,
    rows: Vec<&'a str>,
}

impl<'a> Order<'a> {
    pub(crate) fn read(args: &[&'a str]) -> Self {
        let pace = Pace { quick: args.contains(&"--quick") };
        Self { pace, rows: args.iter().copied().filter(|arg| *arg != "--quick").collect() }
    }

    /// Whether the rows of this name are wanted.
    pub(crate) fn wants(&self, name: &str) -> bool {
        self.rows.is_empty() || self.rows.iter().any(|part| name.contains(part))
    }
}

/// The middle value.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    percentile(values, 0.5)
}

/// The value below which `part` of all lie.
pub(crate) fn percentile(values: impl IntoIterator<Item = f64>, part: f64) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * part).round() as usize]
}

/// The median of what `ours` is to `theirs`, round by round.
pub(crate) fn median_ratio(ours: &[f64], theirs: &[f64]) -> f64 {
    assert_eq!(ours.len(), theirs.len(), "what is compared was measured in the same rounds");
    median(ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs))
}

/// Nanoseconds of `CLOCK_MONOTONIC`, which all processes share, Python's `monotonic_ns` too.
pub(crate) fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The numbers from 0, beginning with another one in every round.
pub(crate) fn rotated(count: usize, round: usize) -> impl Iterator<Item = usize> {
    (0..count).map(move |place| (place + round) % count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_taken_within_a_round() {
        // The machine got ten times slower in the second round; the ratio did not.
        assert_eq!(median_ratio(&[2.0, 20.0, 2.0], &[1.0, 10.0, 1.0]), 2.0);
    }

    #[test]
    fn percentiles_are_values_that_occurred() {
        let values = || (0..=100).rev().map(f64::from);
        assert_eq!((median(values()), percentile(values(), 0.99)), (50.0, 99.0));
        assert_eq!(percentile([7.0], 0.99), 7.0);
    }

    #[test]
    fn every_round_begins_with_another_contender() {
        assert_eq!(rotated(3, 1).collect::<Vec<_>>(), [1, 2, 0]);
    }
}
