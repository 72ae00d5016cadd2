//! What `lockset run x -- true` costs beside `flock file true`, in interleaved runs.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs, reason = "a benchmark")]

use std::process::Command;
use std::time::Instant;

const RUNS: usize = 200;

fn main() {
    println!("-- lockset run");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("flock");
    let url = format!("local:{}", folder.path().join("lockset.db").display());
    let mut flock = Command::new("flock");
    flock.arg(&file).arg("true");
    let mut lockset = Command::new(env!("CARGO_BIN_EXE_lockset"));
    lockset.args(["run", "-u", &url, "x", "--", "true"]);
    let (mut a, mut b) = (Vec::new(), Vec::new());
    for _ in 0..RUNS {
        a.push(seconds(&mut flock));
        b.push(seconds(&mut lockset));
    }
    let (flock, lockset) = (median(a), median(b));
    println!("    flock file true {:>54.2} ms", flock * 1e3);
    println!("    lockset run x -- true {:>48.2} ms", lockset * 1e3);
    let ratio = lockset / flock;
    let verdict = if ratio <= 5.0 { "reached" } else { "NOT REACHED" };
    println!("{:<66} {ratio:>9.2}   {:<12} {verdict}", "lockset run / flock", "<= 5");
}

fn seconds(command: &mut Command) -> f64 {
    let start = Instant::now();
    assert!(command.status().unwrap().success());
    start.elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
