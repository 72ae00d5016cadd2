//! A short round of faults on each engine, judged by the oracle. `cargo xtask torture` runs longer
//! ones. A violation is reproduced by the command in its message; the same seed makes the same
//! faults, but what it meets depends on the moment.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;
use std::time::Duration;

use lockset_torture::backend::EngineKind;
use lockset_torture::report;
use lockset_torture::run::{RunOptions, run};
use lockset_torture::schedule::Fault;
use lockset_torture::summary::Summary;

const SECONDS: u64 = 20;

/// The seed is of the engine, so that the rounds differ; each was looked up for a mix of faults.
fn torture(engine: EngineKind, seed: u64, faults: &[Fault]) {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("torture-{engine}-{seed}"));
    let mut options = RunOptions::new(engine, env!("CARGO_BIN_EXE_lockset-torture"), &folder);
    options.seconds = SECONDS;
    options.ttl = Duration::from_secs(2);
    options.clients = 4;
    options.seed = seed;
    if !faults.is_empty() {
        options.faults = faults.to_vec();
    }
    let outcome = run(&options).unwrap();
    let summary = Summary::of(&outcome.history, &outcome.verdict, String::new(), String::new());
    let shown = format!("seed {seed}, {}\n{}", folder.display(), report::terminal(&summary));
    assert!(summary.is_clean(), "{shown}");
    assert!(summary.faults.len() >= 2, "too few faults: {shown}");
    // A busy machine is slow, but a round in which little happens proves nothing.
    assert!(summary.grants >= 30, "too few grants: {shown}");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn local_keeps_its_promises() {
    torture(EngineKind::Local, 1, &[]);
}

#[test]
fn redis_keeps_its_promises() {
    torture(EngineKind::Redis, 2, &[]);
}

/// Without the faults that GUARANTEES.md excepts nothing may be excepted.
#[test]
fn redis_needs_no_exception_for_faults_of_clients_and_connections() {
    let faults = [Fault::ClientStop, Fault::ClientSilent, Fault::Late, Fault::Duplicate];
    torture(EngineKind::Redis, 3, &faults);
}

#[test]
fn sentinel_keeps_its_promises() {
    torture(EngineKind::Sentinel, 4, &[]);
}

#[test]
fn cluster_keeps_its_promises() {
    torture(EngineKind::Cluster, 5, &[]);
}

#[test]
fn redlock_keeps_its_promises() {
    torture(EngineKind::Redlock, 6, &[]);
}

#[test]
fn zookeeper_keeps_its_promises() {
    torture(EngineKind::ZooKeeper, 7, &[]);
}

#[test]
fn etcd_keeps_its_promises() {
    torture(EngineKind::Etcd, 8, &[]);
}
