//! The embedded engine: locks between all processes of one machine, in one SQLite file.
//!
//! It needs no server. Every request is one transaction on the file; a release grants the lock to
//! the next waiter in that same transaction and then writes the waiter's process a letter, so that
//! nobody polls. The parts:
//!
//! * `place` finds the file and refuses network file systems;
//! * `store` opens it and runs transactions; `schema.sql` is the stored format;
//! * `claims` is what the verbs do inside a transaction, in `steps`, on `rows`;
//! * `inbox` carries the letters;
//! * `process` knows whether a holder's process still lives.
//!
//! # What it promises
//! Leases run on the machine's boot clock, which all its processes share and nobody sets. A lease
//! never ends later than one ttl from now, so one that seems to is of an earlier boot and over;
//! what else an earlier boot left lapses within one ttl. No file or name of a boot is asked,
//! because containers may see another one. A holder whose process dies is succeeded at once
//! (Linux), if its death can be seen from here; in another pid namespace its lease decides, and a
//! waiter there counts as gone when it has not shown up for a minute. Tokens are never below the
//! wall clock in microseconds, so they go on growing even if a power cut takes the last
//! transactions.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures_core::stream::BoxStream;
use futures_util::{FutureExt, StreamExt, TryFutureExt};

use self::claims::Standing;
use self::store::{Store, Transaction};
use super::common::watch::{Recheck, hints_of, told_once, watch_states_with};
use super::{
    Amend, Break, Capabilities, Claim, Engine, Event, Grant, Holder, LockState, Scope, Swap,
    Version, Wait,
};
use crate::clock::Clock;
use crate::error::{Error, LossReason, Result};
use crate::name::{Name, Prefix};
use crate::report::report;
use crate::sync;
use crate::token::Token;

mod claims;
mod inbox;
mod place;
mod process;
mod rows;
mod steps;
mod store;
#[cfg(test)]
mod tests;

const ENGINE: &str = "local";
/// How long a request tries when other processes keep the file busy.
const PATIENCE: Duration = Duration::from_secs(5);
/// A waiter looks at least so often, in case a letter got lost.
const SAFETY_NET: Duration = Duration::from_secs(1);
/// At most this many leases are renewed in one transaction, so that others come in between.
const RENEWALS: usize = 500;

/// How a [`Local`] is opened.
#[derive(Clone, Debug)]
pub struct LocalOptions {
    /// The file; `None` for the user's own, in the state folder of the home folder.
    pub path: Option<PathBuf>,
    /// The permissions of a new file. The files beside it follow.
    pub mode: u32,
    /// The process to record as the holder in place of this one. It must be running, and what is
    /// held ends with it.
    pub holder_process: Option<u32>,
}

impl Default for LocalOptions {
    fn default() -> Self {
        Self { path: None, mode: 0o600, holder_process: None }
    }
}

/// One client of one file.
///
/// # Drop
/// Closes the file and removes the inbox. Locks still held stay so until their leases end or the
/// process does. In a forked child nothing is touched.
pub struct Local {
    store: Arc<Store>,
    clock: Clock,
}

impl std::fmt::Debug for Local {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Local({})", self.identity())
    }
}

impl Local {
    /// Opens the file, and creates it if need be. Must be called inside a tokio runtime, which then
    /// reads the letters from other processes.
    ///
    /// # Errors
    /// [`Error::Unreachable`], which says what is wrong with the file and what to do.
    pub fn open(options: LocalOptions) -> Result<Self> {
        let store = Arc::new(Store::open(&options)?);
        Ok(Self { store, clock: Clock::boot() })
    }

    /// The error of a request about a held lock. In a forked child, it is that the lock is the
    /// parent's; if the file is gone, that the lock went with it, because who comes now finds
    /// another file.
    fn held_error(&self, name: &Name, error: Error) -> Error {
        if self.store.is_forked() {
            Error::lost(name, LossReason::Forked)
        } else if self.store.place.is_gone() {
            report!(warn, name = name, error = error, "a lock was lost");
            Error::lost(name, LossReason::Forgotten)
        } else {
            error
        }
    }

    /// How long a request that ends at `deadline` may try.
    fn patience(&self, wait: Wait) -> Duration {
        match wait {
            Wait::No | Wait::Forever => PATIENCE,
            Wait::Until(deadline) => {
                deadline.saturating_duration_since(self.clock.now()).min(PATIENCE)
            }
        }
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.store.close();
    }
}

#[async_trait]
impl Engine for Local {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            engine: ENGINE,
            shared: true,
            permits: true,
            cells: true,
            sees_death: cfg!(target_os = "linux"),
            pushes: true,
            durable: true,
            replicas: false,
            session: None,
            shared_lease: false,
            min_ttl: Duration::from_millis(100),
            max_ttl: Duration::from_secs(7 * 86_400),
        }
    }

    fn identity(&self) -> String {
        format!("local:{}", self.store.place.path().display())
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        self.store.unless_forked()?;
        self.store.processes.unless_stand_in_died()?;
        let bell = self.store.inbox.desk.bell(claim.id);
        let (wanted, may_queue) = (claim.clone(), wait != Wait::No);
        let enter = self.store.write(self.patience(wait), move |txn| txn.enter(&wanted, may_queue));
        let mut standing = enter.await??;
        loop {
            let (seq, watch, look_again) = match standing {
                Standing::Granted(grant) => return Ok(Some(grant)),
                Standing::Busy => return Ok(None),
                Standing::Waiting { seq, watch, look_again } => (seq, watch, look_again),
            };
            let wanted = claim.clone();
            let now = self.clock.now();
            if now >= wait.deadline() {
                return self.store.write(PATIENCE, move |txn| txn.leave(&wanted, seq)).await;
            }
            let until = look_again.min(now + SAFETY_NET).min(wait.deadline());
            tokio::select! {
                () = bell.rung() => {}
                () = self.store.processes.any_death(&watch) => {}
                () = self.clock.sleep_until(until) => {}
            }
            // Reading stands in no writer's way, not even in that of the releaser, who is likely to
            // be queueing again just now.
            let peek = self.store.read(PATIENCE, move |txn| txn.peek(&wanted, seq)).await?;
            standing = match peek {
                Some(standing) => standing,
                None => {
                    let wanted = claim.clone();
                    self.store.write(PATIENCE, move |txn| txn.look(&wanted, seq)).await??
                }
            };
        }
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        let mut answers = Vec::with_capacity(batch.len());
        for part in batch.chunks(RENEWALS) {
            let owned: Vec<(Claim, Grant)> =
                part.iter().map(|(claim, grant)| ((*claim).clone(), (*grant).clone())).collect();
            let renewed = self.store.write(PATIENCE, move |txn| {
                owned.iter().map(|(claim, grant)| txn.renew(claim, grant)).collect()
            });
            match renewed.await {
                Ok(part) => answers.extend::<Vec<_>>(part),
                Err(error) => answers.extend(
                    part.iter().map(|(claim, _)| Err(self.held_error(&claim.name, again(&error)))),
                ),
            }
        }
        answers
    }

    async fn raise(&self, claim: &Claim, grant: &Grant, to: Token) -> Result<Grant> {
        let (claim, grant, name) = (claim.clone(), grant.clone(), claim.name.clone());
        let raised = self.store.write(PATIENCE, move |txn| txn.raise(&claim, &grant, to));
        raised.await.map_err(|error| self.held_error(&name, error))?
    }

    async fn amend(&self, claim: &Claim, grant: &Grant, to: Amend) -> Result<Grant> {
        let (claim, grant, name) = (claim.clone(), grant.clone(), claim.name.clone());
        let amended = self.store.write(PATIENCE, move |txn| txn.amend(&claim, &grant, &to));
        amended.await.map_err(|error| self.held_error(&name, error))?
    }

    async fn adopt(&self, claim: &Claim, grant: &Grant, successor: &Claim) -> Result<Grant> {
        // Before the request: one for this claim may still be under way on another thread.
        self.store.mark_withdrawn(claim.id);
        let (claim, grant, successor) = (claim.clone(), grant.clone(), successor.clone());
        let name = claim.name.clone();
        let adopt = move |txn: &mut Transaction<'_>| txn.adopt(&claim, &grant, &successor);
        let adopted = self.store.write(PATIENCE, adopt).await;
        adopted.map_err(|error| self.held_error(&name, error))?
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let (claim, grant, name) = (claim.clone(), grant.clone(), claim.name.clone());
        let next = next.cloned();
        let release = move |txn: &mut Transaction<'_>| txn.release(&claim, &grant, next.as_ref());
        let released = self.store.write(PATIENCE, release).await;
        released.map_err(|error| match self.held_error(&name, error) {
            Error::Lost { name, reason: LossReason::Forgotten } => Error::NotHeld { name },
            error => error,
        })?
    }

    async fn withdraw(&self, claim: &Claim) -> Result<()> {
        // Before anything that can fail: a request may still be under way on another thread.
        self.store.mark_withdrawn(claim.id);
        let claim = claim.clone();
        self.store.write(PATIENCE, move |txn| txn.remove(&claim)).await
    }

    fn watch(&self, scope: &Scope) -> BoxStream<'static, Result<LockState>> {
        let (store, scope) = (self.store.clone(), scope.clone());
        async move {
            let (watching, changes) = Watching::begin(store.clone(), &scope).await?;
            let first = match scope.clone() {
                Scope::Name(name) => vec![name],
                Scope::Prefix(prefix) => {
                    let states = store.read(PATIENCE, move |t| t.states_below(prefix.as_str()));
                    states.await?.into_iter().map(|state| state.name).collect()
                }
            };
            let read = move |name: &Name| {
                let (store, name) = (watching.store.clone(), name.clone());
                async move { store.read(PATIENCE, move |txn| txn.state(&name)).await }
            };
            let recheck = Some(recheck(store, scope));
            Ok(watch_states_with(Clock::boot(), first, hints_of(changes), read, recheck))
        }
        .try_flatten_stream()
        .boxed()
    }

    async fn inspect(&self, name: &Name) -> Result<LockState> {
        let name = name.clone();
        self.store.read(PATIENCE, move |txn| txn.state(&name)).await
    }

    async fn list(&self, prefix: &Prefix) -> Result<Vec<LockState>> {
        let prefix = prefix.clone();
        let states = self.store.read(PATIENCE, move |txn| txn.states_below(prefix.as_str()));
        let mut states = states.await?;
        states.retain(LockState::is_used);
        Ok(states)
    }

    async fn cell(&self, name: &Name, expect: Version, value: Option<Vec<u8>>) -> Result<Swap> {
        let name = name.clone();
        self.store.write(PATIENCE, move |txn| txn.cell(&name, expect, value.as_deref())).await
    }

    async fn force_release(&self, name: &Name, how: Break) -> Result<Vec<Holder>> {
        let name = name.clone();
        self.store.write(PATIENCE, move |txn| txn.force_release(&name, how)).await
    }

    fn events(&self) -> BoxStream<'static, Event> {
        told_once(self.store.inbox.desk.events())
    }

    async fn close(&self) {
        self.store.end_watches(PATIENCE).await;
        self.store.close();
    }
}

/// A watch that is entered in the file, until it is dropped.
struct Watching {
    store: Arc<Store>,
    /// In the file.
    id: i64,
    /// At the desk.
    number: u64,
}

impl Watching {
    async fn begin(store: Arc<Store>, scope: &Scope) -> Result<(Self, Changes)> {
        store.unless_forked()?;
        let (number, changes) = store.inbox.desk.changes(scope);
        let id = store.begin_watch();
        // From here on, dropping it ends the watch, also while its row is still being written.
        let watching = Self { store, id, number };
        let scope = scope.clone();
        watching.store.write(PATIENCE, move |txn| txn.add_watcher(id, &scope)).await?;
        Ok((watching, changes))
    }
}

/// Looks at the whole scope if anything at all was written since it looked last: a letter may be
/// lost, above all while its reader is stopped and its inbox full.
fn recheck(store: Arc<Store>, scope: Scope) -> Recheck {
    let last = Arc::new(Mutex::new(None));
    Recheck::often(Box::new(move || {
        let (store, scope, last) = (store.clone(), scope.clone(), last.clone());
        async move {
            let known = *sync::lock(&last);
            let found = store.read(PATIENCE, move |txn| {
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

type Changes = tokio::sync::mpsc::UnboundedReceiver<Name>;

impl Drop for Watching {
    fn drop(&mut self) {
        if !self.store.is_forked() {
            self.store.inbox.desk.end_changes(self.number);
            self.store.end_watch(self.id);
        }
    }
}

/// The same error for another entry of the batch.
fn again(error: &Error) -> Error {
    match error {
        Error::Unreachable { what, retryable, .. } => failed_or(what.clone(), *retryable),
        _ => Error::Closed,
    }
}

fn failed(what: impl Into<String>) -> Error {
    failed_or(what.into(), false)
}

fn failed_or(what: String, retryable: bool) -> Error {
    Error::Unreachable { engine: ENGINE, what, retryable, source: None }
}

fn failed_by(
    what: impl Into<String>,
    retryable: bool,
    source: impl std::error::Error + Send + Sync + 'static,
) -> Error {
    let source = Some(Box::new(source).into());
    Error::Unreachable { engine: ENGINE, what: what.into(), retryable, source }
}
