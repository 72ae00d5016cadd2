//! A subscriber or a recorder that blocks costs no lock: the keeper's thread calls neither.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use lockset::clock::Clock;
use lockset::engine::memory::Memory;
use lockset::engine::{Claim, Engine, Grant, Renewal};
use lockset::{Error, LockOptions, Lockset, State};
use lockset_testkit::layer::{Layer, Layered};
use metrics::{Counter, CounterFn, Gauge, Histogram, Key, KeyName, Metadata, SharedString, Unit};

const TTL: Duration = Duration::from_millis(400);

/// A pipe without a reader: a writer waits until it is opened.
#[derive(Debug, Default)]
struct Full {
    open: Mutex<bool>,
    opened: Condvar,
    waiting: AtomicUsize,
}

impl Full {
    fn wait(&self) {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let open = self.open.lock().unwrap();
        drop(self.opened.wait_while(open, |open| !*open).unwrap());
    }

    fn open(&self) {
        *self.open.lock().unwrap() = true;
        self.opened.notify_all();
    }
}

static PIPE: Full =
    Full { open: Mutex::new(false), opened: Condvar::new(), waiting: AtomicUsize::new(0) };

struct ToThePipe;

impl std::io::Write for ToThePipe {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        PIPE.wait();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl CounterFn for ToThePipe {
    fn increment(&self, _: u64) {
        PIPE.wait();
    }

    fn absolute(&self, _: u64) {}
}

/// Counts into the pipe.
struct Blocked;

impl metrics::Recorder for Blocked {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(Arc::new(ToThePipe))
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

/// Every other renewal fails, which is worth a warning.
#[derive(Debug)]
struct Stumbling(Arc<dyn Engine>, AtomicUsize);

#[async_trait]
impl Layer for Stumbling {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<lockset::Result<Renewal>> {
        match self.1.fetch_add(1, Ordering::Relaxed) % 2 {
            0 => self.0.renew(batch).await,
            _ => batch.iter().map(|_| Err(stumbled())).collect(),
        }
    }
}

fn stumbled() -> Error {
    let what = "it stumbled".to_owned();
    Error::Unreachable { engine: "test", what, retryable: true, source: None }
}

/// One test, because the recorder and the subscriber are those of the process.
#[tokio::test(flavor = "multi_thread")]
async fn locks_are_kept_while_subscriber_and_recorder_block() {
    metrics::set_global_recorder(Blocked).ok().unwrap();
    tracing_subscriber::fmt().with_max_level(tracing::Level::WARN).with_writer(|| ToThePipe).init();
    let engine = Stumbling(Arc::new(Memory::new(Clock::boot())), AtomicUsize::new(0));
    let locks = Lockset::with_engine(Arc::new(Layered(engine))).unwrap();
    let options = LockOptions::default().ttl(TTL);
    let guard = locks.mutex("kept").unwrap().with(options).lock().await.unwrap();
    let began = Instant::now();
    while began.elapsed() < TTL * 8 {
        assert!(!matches!(guard.state(), State::Lost(_)), "lost after {:?}", began.elapsed());
        tokio::time::sleep(TTL / 20).await;
    }
    assert!(PIPE.waiting.load(Ordering::SeqCst) > 0, "nothing was reported");
    // What is queued does not keep closing waiting either.
    let closing = Instant::now();
    guard.release().await.unwrap();
    locks.close().await.unwrap();
    assert!(closing.elapsed() < Duration::from_secs(2), "{:?}", closing.elapsed());
    PIPE.open();
}
