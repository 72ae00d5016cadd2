//! The hints of the embedded engine: messages of other processes, and a recheck of the file.

use std::sync::Arc;

use tokio::time::Instant;

use super::BUSY_TIMEOUT;
use super::store::Store;
use crate::engine::common::hints::{HintReceiver, RECHECK};
use crate::engine::{Hint, Scope};
use crate::error::Result;

/// A watch that is entered in the file, until it is dropped.
pub(super) struct FileWatch {
    store: Arc<Store>,
    /// In the file.
    id: i64,
    /// What the messages report.
    hints: HintReceiver,
    next_recheck: Instant,
    /// The stamp of the file when all names were last read.
    stamp: Option<(u64, i64)>,
}

impl FileWatch {
    pub(super) async fn begin(store: Arc<Store>, scope: Scope) -> Result<Self> {
        store.check_not_forked()?;
        let hints = store.inbox.dispatcher.hints(&scope);
        let id = store.begin_watch();
        // From here on, dropping it ends the watch, also while its row is still being written.
        let watch = Self { store, id, hints, next_recheck: Instant::now(), stamp: None };
        watch.store.write(BUSY_TIMEOUT, move |txn| txn.add_watcher(id, &scope)).await?;
        Ok(watch)
    }

    /// A message may be lost, for example while its reader is stopped and its inbox is full. So all
    /// names are read again if anything was written since they were last read.
    pub(super) async fn next(&mut self) -> Result<Option<Hint>> {
        loop {
            if Instant::now() < self.next_recheck {
                tokio::select! {
                    biased;
                    hint = self.hints.next() => return hint.transpose(),
                    () = tokio::time::sleep_until(self.next_recheck) => {}
                }
            }
            self.next_recheck = Instant::now() + RECHECK;
            match self.store.read(BUSY_TIMEOUT, |txn| txn.stamp()).await {
                Ok(stamp) if self.stamp != Some(stamp) => {
                    self.stamp = Some(stamp);
                    return Ok(Some(Hint::Missed));
                }
                Err(error) if !error.is_retryable() => return Err(error),
                _ => {}
            }
        }
    }
}

impl Drop for FileWatch {
    fn drop(&mut self) {
        if !self.store.is_forked() {
            self.store.end_watch(self.id);
        }
    }
}
