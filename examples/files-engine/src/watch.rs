//! Watching by polling: the records of a scope are read again and again, and compared.

use std::collections::{BTreeMap, VecDeque};

use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use lockset::clock::{Clock, Moment};
use lockset::engine::{LockState, Scope};
use lockset::{Name, Result};

use crate::POLL;
use crate::folder::Folder;
use crate::record::Record;

/// The states of all names in `scope`, then of each name whose record has changed.
pub(crate) fn watch(folder: Folder, scope: Scope) -> BoxStream<'static, Result<LockState>> {
    let (reported, due) = (BTreeMap::new(), VecDeque::new());
    let watch = Watch { folder, scope, reported, due, read_at: Moment::from_nanos(0) };
    stream::unfold(watch, |mut watch| async { Some((watch.next().await, watch)) }).boxed()
}

struct Watch {
    folder: Folder,
    scope: Scope,
    reported: BTreeMap<Name, Record>,
    due: VecDeque<LockState>,
    read_at: Moment,
}

impl Watch {
    async fn next(&mut self) -> Result<LockState> {
        let clock = Clock::boot();
        loop {
            if let Some(state) = self.due.pop_front() {
                return Ok(state);
            }
            clock.sleep_until(self.read_at + POLL).await;
            self.read_at = clock.now();
            for record in self.records().await? {
                if self.reported.get(&record.name) != Some(&record) {
                    self.due.push_back(record.state(clock.now()));
                    self.reported.insert(record.name.clone(), record);
                }
            }
        }
    }

    async fn records(&self) -> Result<Vec<Record>> {
        let locked = self.folder.lock().await?;
        match &self.scope {
            Scope::Name(name) => Ok(vec![locked.change(name, |record, _| record.clone())?]),
            Scope::Prefix(prefix) => locked.records(prefix),
        }
    }
}
