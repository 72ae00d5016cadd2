//! Spans, events, counters and histograms say what happened.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use lockset::{Break, LockOptions, Lockset};
use metrics_util::debugging::{DebugValue, DebuggingRecorder};

/// Collects what `tracing` writes.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// One test, because the recorder and the subscriber are those of the process.
#[test]
fn waiting_holding_renewing_losing_and_releasing_are_reported() {
    let recorder = DebuggingRecorder::new();
    let snapshots = recorder.snapshotter();
    recorder.install().unwrap();
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::DEBUG)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .init();

    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let locks = Lockset::builder("memory:").label_names(false).connect().await.unwrap();
        let named = Lockset::builder("memory:").label_names(true).connect().await.unwrap();
        named.mutex("labelled").unwrap().lock().await.unwrap().release().await.unwrap();
        let options = LockOptions::default().ttl(Duration::from_millis(200)).note("seen");
        let mutex = locks.mutex("jobs/42").unwrap().with(options);
        let guard = mutex.lock().await.unwrap();
        assert!(mutex.lock_within(Duration::from_millis(300)).await.is_err());
        guard.release().await.unwrap();
        let guard = mutex.lock().await.unwrap();
        locks.force_release("jobs/42", Break::Now).await.unwrap();
        guard.lost().await;
        locks.close().await.unwrap();
    });

    let metrics: Vec<(String, String)> = snapshots
        .snapshot()
        .into_vec()
        .into_iter()
        .map(|(key, _, _, value)| (key.key().to_string(), describe(&value)))
        .collect();
    let has = |parts: &[&str], value: &str| {
        let found = metrics.iter().any(|(key, seen)| {
            parts.iter().all(|part| key.contains(part)) && (value.is_empty() || seen == value)
        });
        assert!(found, "{parts:?} = {value}: not in {metrics:#?}");
    };
    has(&["lockset_wait_seconds", "engine = memory", "outcome = granted"], "2 samples");
    has(&["lockset_wait_seconds", "outcome = not_granted"], "1 samples");
    has(&["lockset_hold_seconds"], "2 samples");
    has(&["lockset_losses_total", "reason = broken"], "1");
    has(&["lockset_renewals_total", "outcome = renewed"], "");
    has(&["lockset_held", "engine = memory"], "0");
    has(&["lockset_waiters", "engine = memory"], "0");
    has(&["lockset_hold_seconds", "name = labelled"], "1 samples");
    let unlabelled = metrics.iter().filter(|(key, _)| key.contains("jobs/42")).count();
    assert_eq!(unlabelled, 0, "a lock's name is a label although it was not enabled");

    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    for words in ["lockset.acquire{name=jobs/42", "note=seen", "granted", "released", "was lost"] {
        assert!(log.contains(words), "{words:?} is not in the log:\n{log}");
    }
}

fn describe(value: &DebugValue) -> String {
    match value {
        DebugValue::Counter(count) => count.to_string(),
        DebugValue::Gauge(gauge) => gauge.to_string(),
        DebugValue::Histogram(samples) => format!("{} samples", samples.len()),
    }
}
