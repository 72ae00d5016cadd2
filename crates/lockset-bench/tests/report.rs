//! The report, from end to end: roughly, on two engines, without peers.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::path::Path;
use std::process::Command;

fn report(out: &Path, args: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lockset-bench"));
    let fixed = ["report", "--quick", "--peer", "none", "--out"];
    let output = command.args(fixed).arg(out).args(args).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{errors}");
    errors
}

#[test]
fn a_quick_run_writes_tables_ratios_and_plots() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path();
    let engines = ["--engine", "memory", "--engine", "redis"];
    let progress = report(out, &[&engines[..], &["uncontended", "drain"]].concat());
    assert!(progress.contains("redis: uncontended 64"), "{progress}");
    let page = std::fs::read_to_string(out.join("REPORT.md")).unwrap();
    for part in ["## memory", "## redis", "Where a peer wins", "Growth", "local: not measured"] {
        assert!(page.contains(part), "no {part} in {page}");
    }
    // Lockset has a value for every size, the floor a ratio as well.
    let row = |start: &str| page.lines().filter(|line| line.starts_with(start)).count();
    assert!(row("| Lockset | ") >= 8 && row("| floor: bare socket | ") >= 4, "{page}");
    assert!(!page.contains("left drain"), "{page}");
    for plot in ["memory-throughput", "redis-throughput", "redis-hand-off", "redis-requests"] {
        let svg = std::fs::read_to_string(out.join(format!("plots/{plot}.svg"))).unwrap();
        assert!(svg.starts_with("<svg") && svg.contains(">Lockset</text>"), "{plot}: {svg}");
        assert!(page.contains(&format!("plots/{plot}.svg")));
    }
    // A second run with another engine leaves the results of the first in the page.
    report(out, &["--engine", "local", "fairness"]);
    let page = std::fs::read_to_string(out.join("REPORT.md")).unwrap();
    assert!(page.contains("## redis") && page.contains("## local"), "{page}");
    assert!(page.contains("Jain"), "{page}");
}

#[test]
fn an_unknown_engine_is_refused() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lockset-bench"));
    let output = command.args(["report", "--engine", "mysql"]).output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("no engine mysql"));
}
