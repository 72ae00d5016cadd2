//! What the benchmarks share: interleaved rounds, medians, and one line per finding.
#![allow(dead_code, clippy::print_stdout, clippy::unwrap_used, reason = "benchmarks talk and fail")]

use std::time::{Duration, Instant};

/// How many rounds of each kind are run, one after the other.
pub(crate) const ROUNDS: usize = 9;

/// The middle value.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The value below which `part` of all lie.
pub(crate) fn percentile(values: &mut [f64], part: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * part) as usize]
}

/// Seconds per call of `work` over `calls` calls.
pub(crate) fn per_call(calls: u32, mut work: impl FnMut()) -> f64 {
    let start = Instant::now();
    for _ in 0..calls {
        work();
    }
    start.elapsed().as_secs_f64() / f64::from(calls)
}

/// Says what was found, what it was compared with, and whether the target was reached.
pub(crate) fn report(what: &str, ratio: f64, target: &str, reached: bool) {
    let verdict = if reached { "reached" } else { "NOT REACHED" };
    println!("{what:<66} {ratio:>9.2}   {target:<12} {verdict}");
}

/// A measured time, for orientation only: it belongs to this machine.
pub(crate) fn note(what: &str, seconds: f64) {
    println!("    {what:<62} {:>9.1} µs", seconds * 1e6);
}

/// The processor time this process has used.
pub(crate) fn cpu_time() -> Duration {
    let clock = rustix::time::ClockId::ProcessCPUTime;
    let used = rustix::time::clock_gettime(clock);
    Duration::new(used.tv_sec as u64, used.tv_nsec as u32)
}
