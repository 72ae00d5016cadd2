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

/// How far the middle half of all values spreads, as a part of the median.
pub(crate) fn spread(values: &[f64]) -> f64 {
    let at = |part| percentile(values.iter().copied(), part);
    let middle = at(0.5);
    if middle == 0.0 { 0.0 } else { (at(0.75) - at(0.25)) / middle }
}

/// Jain's index: 1 if all have the same, 1/n if one has everything.
pub(crate) fn jain(shares: &[f64]) -> f64 {
    let (sum, squares) = shares.iter().fold((0.0, 0.0), |(s, q), n| (s + n, q + n * n));
    if squares == 0.0 { 1.0 } else { sum * sum / (shares.len() as f64 * squares) }
}

/// The exponent `k` of the `size^k` that fits these (size, cost) points best: 0 is flat, 1 linear.
pub(crate) fn slope(points: &[(f64, f64)]) -> f64 {
    let logs: Vec<(f64, f64)> = points.iter().map(|(x, y)| (x.ln(), y.ln())).collect();
    let count = logs.len() as f64;
    let (x, y) = logs.iter().fold((0.0, 0.0), |(a, b), (x, y)| (a + x / count, b + y / count));
    let over: f64 = logs.iter().map(|(a, b)| (a - x) * (b - y)).sum();
    let under: f64 = logs.iter().map(|(a, _)| (a - x) * (a - x)).sum();
    over / under
}

/// Seconds that some cores were busy, and that were stolen from them, up to now.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Busy {
    pub(crate) used: f64,
    pub(crate) stolen: f64,
}

/// Ticks of `/proc` in a second, on every Linux.
const TICKS: f64 = 100.0;

impl Busy {
    pub(crate) fn now(cores: &[usize]) -> Self {
        Self::read(&std::fs::read_to_string("/proc/stat").unwrap(), cores)
    }

    /// `cpu1 user nice system idle iowait irq softirq steal …`
    pub(crate) fn read(stat: &str, cores: &[usize]) -> Self {
        let mut all = Self::default();
        for line in stat.lines() {
            let mut words = line.split_whitespace();
            let name = words.next().and_then(|name| name.strip_prefix("cpu"));
            let Some(Ok(core)) = name.map(str::parse::<usize>) else { continue };
            if cores.contains(&core) {
                let ticks: Vec<f64> = words.filter_map(|word| word.parse().ok()).collect();
                all.used += [0, 1, 2, 5, 6].iter().map(|at| ticks[*at] / TICKS).sum::<f64>();
                all.stolen += ticks[7] / TICKS;
            }
        }
        all
    }

    /// The part of these cores' time that others had, when our own processes used `own` seconds.
    pub(crate) fn others(self, since: Self, own: f64, span: f64, cores: usize) -> f64 {
        let foreign = (self.used - since.used - own).max(0.0);
        (foreign + self.stolen - since.stolen) / (span * cores as f64)
    }
}

/// A slice in which others had more than this part of the cores is measured again, or marked.
pub(crate) const DISTURBED: f64 = 0.1;

/// Seconds of processor time that these processes have used. The sum over their threads is exact,
/// but only `stat`, which counts ticks, knows threads that have ended: the larger one is nearer.
pub(crate) fn cpu_of(pids: &[u32]) -> f64 {
    let of = |pid: &u32| cpu_in(&read_proc(*pid, "stat")).max(cpu_of_threads(*pid));
    pids.iter().map(of).sum()
}

fn cpu_of_threads(pid: u32) -> f64 {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let nanos = threads.filter_map(|thread| {
        let text = std::fs::read_to_string(thread.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<f64>().ok()
    });
    nanos.sum::<f64>() / 1e9
}

/// Fields 14 and 15 of `/proc/PID/stat`; the name before them may contain anything.
fn cpu_in(stat: &str) -> f64 {
    let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks =
        rest.split_whitespace().skip(11).take(2).filter_map(|word| word.parse::<f64>().ok());
    ticks.sum::<f64>() / TICKS
}

/// Bytes of memory that these processes have resident.
pub(crate) fn memory_of(pids: &[u32]) -> f64 {
    let kilobytes = |pid: &u32| -> Option<f64> {
        let status = read_proc(*pid, "status");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
        line.split_whitespace().next()?.parse().ok()
    };
    pids.iter().filter_map(kilobytes).sum::<f64>() * 1024.0
}

/// Empty for a process that has ended.
fn read_proc(pid: u32, file: &str) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default()
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

    #[test]
    fn the_spread_is_that_of_the_middle_half() {
        assert_eq!(spread(&[90.0, 100.0, 1000.0, 95.0, 105.0]), 0.1);
        assert_eq!(spread(&[3.0]), 0.0);
    }

    #[test]
    fn jain_is_one_for_equals_and_one_of_n_for_a_monopoly() {
        assert_eq!(jain(&[5.0; 4]), 1.0);
        assert_eq!(jain(&[8.0, 0.0, 0.0, 0.0]), 0.25);
    }

    #[test]
    fn the_slope_is_the_exponent() {
        let points = |k: f64| [1.0, 10.0, 100.0].map(|n: f64| (n, 7.0 * n.powf(k)));
        for k in [0.0, 1.0, 2.0] {
            assert!((slope(&points(k)) - k).abs() < 1e-9);
        }
    }

    #[test]
    fn load_of_others_and_stolen_time_disturb_a_slice() {
        let stat = |user: u32, steal: u32| {
            format!(
                "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 {user} 0 0 500 0 0 0 {steal} 0 0\ncpu1 7 0 0 0\n"
            )
        };
        let before = Busy::read(&stat(100, 0), &[0]);
        let others =
            |user, steal, own| Busy::read(&stat(user, steal), &[0]).others(before, own, 1.0, 1);
        // A second in which the core was busy for us alone.
        assert!(others(200, 0, 1.0) < DISTURBED);
        // The same with a third of it for others, and with a third stolen.
        assert!(others(200, 0, 0.67) > DISTURBED);
        assert!(others(167, 33, 0.67) > DISTURBED);
        // The kernel counts in ticks: a little more than all is not less than nothing.
        assert_eq!(others(200, 0, 1.02), 0.0);
    }

    #[test]
    fn the_time_of_a_process_is_read_behind_its_name() {
        let stat = "42 (a ) name) S 1 42 42 0 -1 4194560 1 2 3 4 150 50 7 8 20 0";
        assert_eq!(cpu_in(stat), 2.0);
        let (this, start) = (std::process::id(), cpu_of(&[std::process::id()]));
        while cpu_of_threads(this) == 0.0 {}
        // Finer than a tick, and never less than before.
        assert!((start..1e6).contains(&cpu_of(&[this])) && memory_of(&[this]) > 1e5);
    }
}
