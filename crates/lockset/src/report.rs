//! Events and metrics that come from the keeper's thread.
//!
//! Subscribers and recorders are the user's code. One that blocks, because its pipe is full, say,
//! must not stop the renewals. So the keeper's thread runs neither: what it has to report is
//! queued, and emitted by a thread that does nothing else. If that one falls behind by more than
//! [`LONGEST_QUEUE`] reports, further ones are dropped, and the number of those is reported.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tracing::level_filters::LevelFilter;

use crate::fork;
use crate::sync;

/// At most this many reports wait to be emitted.
const LONGEST_QUEUE: usize = 1 << 16;

type Report = Box<dyn FnOnce() + Send>;

thread_local! {
    /// Whether this thread keeps locks.
    static KEEPS: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work` as that of a keeper's thread: no subscriber of the user's is called in it.
pub(crate) fn keeping<T>(work: impl FnOnce() -> T) -> T {
    keep_here();
    tracing::dispatcher::with_default(&tracing::Dispatch::none(), work)
}

/// From now on this thread keeps locks, or helps to.
pub(crate) fn keep_here() {
    KEEPS.set(true);
}

pub(crate) fn is_keeping() -> bool {
    KEEPS.get()
}

/// Whether a subscriber may want events of this level.
pub(crate) fn is_enabled(level: tracing::Level) -> bool {
    level <= LevelFilter::current()
}

/// Emits a report: at once, or in its turn if this thread keeps locks.
pub(crate) fn emit(report: impl FnOnce() + Send + 'static) {
    match is_keeping() {
        false => report(),
        true => queue(|queue| queue.push(Box::new(report))),
    }
}

/// Waits until what was queued before is emitted; for a short time, because a subscriber may block.
pub(crate) async fn flush(limit: Duration) {
    let (tell, flushed) = tokio::sync::oneshot::channel::<()>();
    queue(|queue| queue.push(Box::new(move || drop(tell))));
    let _ = tokio::time::timeout(limit, flushed).await;
}

/// An event that may come from a keeper's thread. Its fields are written down at once.
macro_rules! report {
    ($level:ident, $($key:ident = $value:expr,)* $text:literal) => {
        if $crate::report::is_enabled($crate::report::level::$level) {
            $(let $key = $value.to_string();)*
            $crate::report::emit(move || tracing::$level!($($key = %$key,)* $text));
        }
    };
}
pub(crate) use report;

/// Levels by the names of their macros.
#[expect(non_upper_case_globals, reason = "the names of the macros")]
pub(crate) mod level {
    use tracing::Level;

    pub(crate) const error: Level = Level::ERROR;
    pub(crate) const warn: Level = Level::WARN;
    pub(crate) const info: Level = Level::INFO;
    pub(crate) const debug: Level = Level::DEBUG;
    pub(crate) const trace: Level = Level::TRACE;
}

/// The reports that wait, and who emits them.
#[derive(Clone)]
struct Queue {
    reports: SyncSender<Report>,
    dropped: Arc<AtomicUsize>,
}

impl Queue {
    fn start() -> Option<Self> {
        let (reports, waiting) = sync_channel(LONGEST_QUEUE);
        let dropped = Arc::<AtomicUsize>::default();
        let counted = dropped.clone();
        std::thread::Builder::new()
            .name("lockset-reports".into())
            .spawn(move || emit_all(&waiting, &counted))
            .ok()?;
        Some(Self { reports, dropped })
    }

    fn push(&self, report: Report) {
        if let Err(TrySendError::Full(_)) = self.reports.try_send(report) {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The queue of this process. Without a thread to emit them, reports are lost.
fn queue(put: impl FnOnce(&Queue)) {
    static QUEUE: Mutex<Option<(u32, Option<Queue>)>> = Mutex::new(None);
    fork::notice();
    let process = fork::generation();
    let queue = {
        let mut queue = sync::lock(&QUEUE);
        // The thread of a parent is not here.
        if queue.as_ref().is_none_or(|(of, _)| *of != process) {
            *queue = Some((process, Queue::start()));
        }
        queue.as_ref().and_then(|(_, queue)| queue.clone())
    };
    if let Some(queue) = queue {
        put(&queue);
    }
}

fn emit_all(reports: &Receiver<Report>, dropped: &AtomicUsize) {
    while let Ok(report) = reports.recv() {
        // A panic of the user's subscriber ends one report.
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(report));
        let dropped = dropped.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            tracing::warn!(dropped, "reports were dropped: the subscriber is too slow");
        }
    }
}
