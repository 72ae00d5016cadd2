//! Watches: a row in the file for each, a message to its inbox for each change, and a recheck.

use std::sync::Arc;

use rusqlite::params;
use tokio::time::Instant;

use super::BUSY_TIMEOUT;
use super::inbox::Message;
use super::store::{AfterCommit, SqlResult, Store, Transaction};
use crate::engine::common::hints::{HintReceiver, RECHECK};
use crate::engine::{Hint, Scope};
use crate::error::Result;
use crate::name::Name;

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

impl Transaction<'_> {
    pub(super) fn add_watcher(&mut self, id: i64, scope: &Scope) -> SqlResult<()> {
        if !self.watches.is_open(id) {
            return Ok(());
        }
        let (exact, text) = match scope {
            Scope::Name(name) => (true, name.as_str()),
            Scope::Prefix(prefix) => (false, prefix.as_str()),
        };
        self.db
            .prepare_cached(
                "INSERT INTO watcher (id, inbox, exact, scope) VALUES (?1, ?2, ?3, ?4)",
            )?
            .execute(params![id, self.store.inbox.name(), exact, text])
            .map(|_| ())
    }

    pub(super) fn remove_watcher(&self, id: i64) -> SqlResult<()> {
        let sql = "DELETE FROM watcher WHERE id = ?1 AND inbox = ?2";
        self.db.prepare_cached(sql)?.execute(params![id, self.store.inbox.name()]).map(|_| ())
    }

    pub(super) fn forget_watchers(&self, inbox: &str) -> SqlResult<()> {
        let sql = "DELETE FROM watcher WHERE inbox = ?1";
        self.db.prepare_cached(sql)?.execute([inbox]).map(|_| ())
    }

    /// Sends a message to all watchers of the name, if something changed.
    pub(super) fn tell_watchers(&mut self, name: &Name) -> SqlResult<()> {
        if !std::mem::take(&mut self.changed) || !self.watched {
            return Ok(());
        }
        let mut statement = self.db.prepare_cached("SELECT inbox, exact, scope FROM watcher")?;
        let mut rows = statement.query([])?;
        let mut told = Vec::new();
        while let Some(row) = rows.next()? {
            let (exact, scope) = (row.get(1)?, row.get_ref(2)?.as_str()?);
            let covers =
                if exact { name.as_str() == scope } else { name.as_str().starts_with(scope) };
            let inbox: String = row.get(0)?;
            if covers && !told.contains(&inbox) {
                told.push(inbox);
            }
        }
        let messages =
            told.into_iter().map(|i| (i, AfterCommit::Send(Message::Changed(name.clone()))));
        self.after_commit.extend(messages);
        Ok(())
    }
}
