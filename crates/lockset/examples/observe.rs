//! What operators see: an exporter is installed before connecting, then the counters tell.
//! `DebuggingRecorder` stands in for the exporter of your choice.
//!
//!     cargo run -p lockset --example observe
#![allow(clippy::expect_used, reason = "an example")]

use std::time::Duration;

use lockset::{LockOptions, Lockset, Result};
use metrics_util::debugging::DebuggingRecorder;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let recorder = DebuggingRecorder::new();
    let snapshots = recorder.snapshotter();
    recorder.install().expect("no other recorder is installed");
    tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG).init();

    let locks = Lockset::connect("memory:").await?;
    let short = LockOptions::default().ttl(Duration::from_millis(300)).note("observed");
    let guard = locks.mutex("jobs/42")?.with(short).lock().await?;
    tokio::time::sleep(Duration::from_millis(400)).await; // long enough for renewals
    guard.release().await?;
    locks.close().await?;

    let mut lines: Vec<String> = snapshots
        .snapshot()
        .into_vec()
        .into_iter()
        .map(|(key, _, _, value)| format!("{} = {value:?}", key.key()))
        .collect();
    lines.sort();
    say(&lines.join("\n"));
    assert!(lines.iter().any(|line| line.contains("renewed") && !line.contains("Counter(0)")));
    Ok(())
}

#[allow(clippy::print_stdout, reason = "an example talks to its reader")]
fn say(line: &str) {
    println!("{line}");
}
