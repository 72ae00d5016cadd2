//! Watches: a row in the file for each, a message to its inbox for each change, and a recheck.

use std::sync::{Arc, Mutex};

use futures_util::FutureExt;
use rusqlite::params;

use super::BUSY_TIMEOUT;
use super::inbox::Message;
use super::store::{AfterCommit, SqlResult, Store, Transaction};
use crate::engine::Scope;
use crate::engine::common::watch::Recheck;
use crate::error::Result;
use crate::name::Name;
use crate::sync;

/// A watch with a row in the file, until it is dropped.
pub(super) struct FileWatch {
    pub(super) store: Arc<Store>,
    /// The id of its row in the file.
    id: i64,
    /// Its number at the dispatcher.
    number: u64,
}

impl FileWatch {
    pub(super) async fn begin(store: Arc<Store>, scope: &Scope) -> Result<(Self, Changes)> {
        store.check_not_forked()?;
        let (number, changes) = store.inbox.dispatcher.changes(scope);
        let id = store.begin_watch();
        // From here on, dropping it ends the watch, even while its row is still being written.
        let watch = Self { store, id, number };
        let scope = scope.clone();
        watch.store.write(BUSY_TIMEOUT, move |txn| txn.add_watcher(id, &scope)).await?;
        Ok((watch, changes))
    }
}

/// Reads the whole scope if anything was written since the last recheck: a message may be lost,
/// above all while its receiver is stopped and the inbox is full.
pub(super) fn recheck(store: Arc<Store>, scope: Scope) -> Recheck {
    let last = Arc::new(Mutex::new(None));
    Recheck::often(Box::new(move || {
        let (store, scope, last) = (store.clone(), scope.clone(), last.clone());
        async move {
            let known = *sync::lock(&last);
            let found = store.read(BUSY_TIMEOUT, move |txn| {
                let stamp = Some(txn.stamp()?);
                if stamp == known {
                    return Ok(None);
                }
                let states = match &scope {
                    Scope::Name(name) => vec![txn.state(name)?],
                    Scope::Prefix(prefix) => txn.states_below(prefix.as_str())?,
                };
                Ok(Some((stamp, states)))
            });
            Ok(found.await?.map(|(stamp, states)| {
                *sync::lock(&last) = stamp;
                states
            }))
        }
        .boxed()
    }))
}

pub(super) type Changes = tokio::sync::mpsc::UnboundedReceiver<Name>;

impl Drop for FileWatch {
    fn drop(&mut self) {
        if !self.store.is_forked() {
            self.store.inbox.dispatcher.end_changes(self.number);
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
