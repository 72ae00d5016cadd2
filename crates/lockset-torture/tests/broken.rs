//! The oracle catches engines that are broken on purpose, on real servers.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;
use std::time::Duration;

use lockset_torture::backend::EngineKind;
use lockset_torture::broken::Broken;
use lockset_torture::history::Promise;
use lockset_torture::oracle::Verdict;
use lockset_torture::run::{RunOptions, run};
use lockset_torture::schedule::Fault;

fn torture(engine: EngineKind, broken: Broken, faults: &[Fault], seconds: u64) -> Verdict {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("broken-{broken}"));
    let mut options = RunOptions::new(engine, env!("CARGO_BIN_EXE_lockset-torture"), &folder);
    options.seconds = seconds;
    options.ttl = Duration::from_secs(2);
    // Few, so that the one that is stopped holds something.
    options.clients = 2;
    options.faults = faults.to_vec();
    options.broken = Some(broken);
    let verdict = run(&options).unwrap().verdict;
    assert!(verdict.grants > 10, "{} grants", verdict.grants);
    verdict
}

#[test]
fn random_tokens_are_caught() {
    let verdict = torture(EngineKind::Redis, Broken::RandomToken, &[], 10);
    assert!(verdict.count(Promise::Tokens) > 0, "{:?}", verdict.findings);
    assert_eq!(verdict.count(Promise::Exclusion), 0, "{:?}", verdict.findings);
}

#[test]
fn a_missing_deadline_is_caught() {
    let faults = [Fault::ClientStop];
    let verdict = torture(EngineKind::Redis, Broken::NoDeadline, &faults, 24);
    assert!(verdict.count(Promise::Exclusion) > 0, "{:?}", verdict.findings);
}

#[test]
fn a_quorum_that_is_a_minority_is_caught() {
    let verdict = torture(EngineKind::Redlock, Broken::MinorityQuorum, &[], 10);
    assert!(verdict.count(Promise::Exclusion) > 0, "{:?}", verdict.findings);
}
