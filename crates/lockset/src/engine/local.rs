//! The embedded engine: locks between all processes of one machine, in one SQLite file.
//!
//! It needs no server. Every request is one transaction on the file. A release grants the lock to
//! the next waiter in the same transaction and then sends a message to the waiter's process, so
//! that no waiter polls. The parts, in the order in which a claim meets them:
//!
//! * `file` finds the file and rejects network file systems;
//! * `store` opens it and runs transactions; `schema.sql` is the stored format;
//! * `acquire` enters a claim and checks how it stands; `renew` renews and changes a held lock;
//!   `release` ends claims; each is what a verb does inside a transaction;
//! * `queue` has the steps that these share, `record` the rows;
//! * `inspect` reads the state of locks, `watch` reports changes, `cells` serve latches and
//!   barriers;
//! * `inbox` sends and receives messages between processes;
//! * `process` finds out whether the process of a holder is alive.
//!
//! # What it promises
//! Leases run on the machine's boot clock, which all its processes share and which cannot be set. A
//! lease never ends later than one ttl from now. A lease that seems to was written before the last
//! boot, and is over; whatever else an earlier boot left lapses within one ttl. No file and no boot
//! id is consulted for that, because containers may see different ones. When the process of a
//! holder dies, the next waiter is granted the lock at once (Linux), if the death is visible from
//! here. In another pid namespace the lease decides, and a waiter there counts as gone after a
//! minute without a heartbeat. Tokens are never below the wall clock in microseconds, so they keep
//! growing even if a power cut destroys the last transactions.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_core::stream::BoxStream;
use futures_util::{StreamExt, TryFutureExt};

use self::acquire::ClaimStatus;
use self::store::{Store, Transaction};
use self::watch::FileWatch;
use super::common::hints::{RECHECK, told_once};
use super::{
    Admission, Amend, Break, Capabilities, Claim, Engine, Event, FencedNode, Grant, Hint, Holder,
    LockState, Renewal, Scope, Swap, Version, Wait,
};
use crate::clock::Clock;
use crate::error::{Error, LossReason, Result};
use crate::name::{Name, Prefix};
use crate::report::report;
use crate::token::Token;

mod acquire;
mod cells;
mod file;
mod inbox;
mod inspect;
mod process;
mod queue;
mod record;
mod release;
mod renew;
mod store;
#[cfg(test)]
mod tests;
mod watch;

const ENGINE: &str = "local";
/// How long a request is retried while other processes keep the file busy.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum leases per renewal transaction, so that requests of others fit in between.
const MAX_RENEWALS: usize = 500;

/// Options of [`Local::open`].
#[derive(Clone, Debug)]
pub struct LocalOptions {
    /// The file; `None` for the user's own, in the state folder of the home folder.
    pub path: Option<PathBuf>,
    /// The permissions of a new file. The files beside it follow.
    pub mode: u32,
    /// The process to record as the holder instead of this one. It must be running. The locks end
    /// when it ends.
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
/// Closes the file and removes the inbox. Locks that are still held stay held until their leases
/// or the process end. In a forked child nothing is touched.
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
    /// Opens the file, and creates it if it does not exist. Must be called inside a tokio runtime,
    /// which then receives the messages of other processes.
    ///
    /// # Errors
    /// [`Error::Unreachable`], which says what is wrong with the file and what to do about it.
    pub fn open(options: LocalOptions) -> Result<Self> {
        let store = Arc::new(Store::open(&options)?);
        Ok(Self { store, clock: Clock::boot() })
    }

    /// The error of a request about a held lock. In a forked child the lock belongs to the parent.
    /// If the file is gone, the lock is gone with it: other clients now open another file.
    fn held_error(&self, name: &Name, error: Error) -> Error {
        if self.store.is_forked() {
            Error::lost(name, LossReason::Forked)
        } else if self.store.file.is_gone() {
            report!(warn, name = name, error = error, "a lock was lost");
            Error::lost(name, LossReason::Forgotten)
        } else {
            error
        }
    }

    /// How long a request with this deadline may be retried.
    fn busy_timeout(&self, wait: Wait) -> Duration {
        match wait {
            Wait::No | Wait::Forever => BUSY_TIMEOUT,
            Wait::Until(deadline) => {
                deadline.saturating_duration_since(self.clock.now()).min(BUSY_TIMEOUT)
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
        format!("local:{}", self.store.file.path().display())
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        self.store.check_not_forked()?;
        self.store.processes.check_holder_process()?;
        let wake = self.store.inbox.dispatcher.wake_handle(claim.id);
        let (wanted, may_queue) = (claim.clone(), wait != Wait::No);
        let enter =
            self.store.write(self.busy_timeout(wait), move |txn| txn.enter(&wanted, may_queue));
        let mut status = enter.await?;
        loop {
            let (seq, watch, check_at) = match status {
                Ok(ClaimStatus::Granted(grant)) => return Ok(Admission::Granted(grant)),
                Ok(ClaimStatus::Busy) => return Ok(Admission::NotInTime),
                Err(error) => return Admission::from_inner(Err(error)),
                Ok(ClaimStatus::Waiting { seq, watch, check_at }) => (seq, watch, check_at),
            };
            let wanted = claim.clone();
            let now = self.clock.now();
            if now >= wait.deadline() {
                let gave_up = move |txn: &mut Transaction<'_>| txn.give_up(&wanted, seq);
                return Ok(self.store.write(BUSY_TIMEOUT, gave_up).await?.into());
            }
            let until = check_at.min(now + RECHECK).min(wait.deadline());
            tokio::select! {
                () = wake.woken() => {}
                () = self.store.processes.any_death(&watch) => {}
                () = self.clock.sleep_until(until) => {}
            }
            // A read blocks no writer, not even the releaser, which is probably queueing again.
            let peek = self.store.read(BUSY_TIMEOUT, move |txn| txn.peek(&wanted, seq)).await?;
            status = match peek {
                Some(status) => Ok(status),
                None => {
                    let wanted = claim.clone();
                    self.store.write(BUSY_TIMEOUT, move |txn| txn.check(&wanted, seq)).await?
                }
            };
        }
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        let mut renewals = Vec::with_capacity(batch.len());
        for part in batch.chunks(MAX_RENEWALS) {
            let owned: Vec<(Claim, Grant)> =
                part.iter().map(|(claim, grant)| ((*claim).clone(), (*grant).clone())).collect();
            let renewed = self.store.write(BUSY_TIMEOUT, move |txn| {
                owned.iter().map(|(claim, grant)| txn.renew(claim, grant)).collect()
            });
            match renewed.await {
                Ok(part) => {
                    let part: Vec<Result<Grant>> = part;
                    renewals.extend(part.into_iter().map(Renewal::from_inner));
                }
                Err(error) => renewals.extend(part.iter().map(|(claim, _)| {
                    Renewal::from_inner(Err(self.held_error(&claim.name, error.clone())))
                })),
            }
        }
        renewals
    }

    async fn amend(&self, claim: &Claim, grant: &Grant, to: Amend) -> Result<Grant> {
        let (claim, grant, name) = (claim.clone(), grant.clone(), claim.name.clone());
        let amended = self.store.write(BUSY_TIMEOUT, move |txn| txn.amend(&claim, &grant, &to));
        amended.await.map_err(|error| self.held_error(&name, error))?
    }

    async fn adopt(&self, claim: &Claim, grant: &Grant, successor: &Claim) -> Result<Grant> {
        // Before the request: one for this claim may still be in flight on another thread.
        self.store.mark_withdrawn(claim.id);
        let (claim, grant, successor) = (claim.clone(), grant.clone(), successor.clone());
        let name = claim.name.clone();
        let adopt = move |txn: &mut Transaction<'_>| txn.adopt(&claim, &grant, &successor);
        let adopted = self.store.write(BUSY_TIMEOUT, adopt).await;
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
        let released = self.store.write(BUSY_TIMEOUT, release).await;
        released.map_err(|error| match self.held_error(&name, error) {
            Error::Lost { name, reason: LossReason::Forgotten } => Error::NotHeld { name },
            error => error,
        })?
    }

    async fn withdraw(&self, claim: &Claim) -> Result<()> {
        // Before anything that can fail: a request may still be in flight on another thread.
        self.store.mark_withdrawn(claim.id);
        let claim = claim.clone();
        self.store.write(BUSY_TIMEOUT, move |txn| txn.remove(&claim)).await
    }

    fn hints(&self, scope: &Scope) -> BoxStream<'static, Result<Hint>> {
        let watch = FileWatch::begin(self.store.clone(), scope.clone());
        let next = |mut watch: FileWatch| async {
            let hint = watch.next().await?;
            Ok(hint.map(|hint| (hint, watch)))
        };
        watch
            .map_ok(move |started| futures_util::stream::try_unfold(started, next))
            .try_flatten_stream()
            .boxed()
    }

    async fn inspect(&self, name: &Name) -> Result<LockState> {
        let name = name.clone();
        self.store.read(BUSY_TIMEOUT, move |txn| txn.state(&name)).await
    }

    async fn list(&self, prefix: &Prefix) -> Result<Vec<LockState>> {
        let prefix = prefix.clone();
        let states = self.store.read(BUSY_TIMEOUT, move |txn| txn.states_below(prefix.as_str()));
        let mut states = states.await?;
        states.retain(LockState::is_used);
        Ok(states)
    }

    async fn cell(&self, name: &Name, expect: Version, value: Option<Vec<u8>>) -> Result<Swap> {
        let name = name.clone();
        self.store.write(BUSY_TIMEOUT, move |txn| txn.cell(&name, expect, value.as_deref())).await
    }

    async fn force_release(&self, name: &Name, how: Break) -> Result<Vec<Holder>> {
        let name = name.clone();
        self.store.write(BUSY_TIMEOUT, move |txn| txn.force_release(&name, how)).await
    }

    fn events(&self) -> BoxStream<'static, Event> {
        told_once(self.store.inbox.dispatcher.events())
    }

    async fn close(&self) {
        self.store.end_watches(BUSY_TIMEOUT).await;
        self.store.close();
    }

    fn as_fenced_node(&self) -> Option<&dyn FencedNode> {
        Some(self)
    }
}

#[async_trait]
impl FencedNode for Local {
    async fn raise(&self, claim: &Claim, grant: &Grant, to: Token) -> Result<Grant> {
        let (claim, grant, name) = (claim.clone(), grant.clone(), claim.name.clone());
        let raised = self.store.write(BUSY_TIMEOUT, move |txn| txn.raise(&claim, &grant, to));
        raised.await.map_err(|error| self.held_error(&name, error))?
    }
}

fn error_of(what: impl Into<String>) -> Error {
    Error::Unreachable { engine: ENGINE, what: what.into(), retryable: false, source: None }
}

fn error_from(
    what: impl Into<String>,
    retryable: bool,
    source: impl std::error::Error + Send + Sync + 'static,
) -> Error {
    let what = what.into();
    Error::Unreachable { engine: ENGINE, what, retryable, source: Some(Arc::new(source)) }
}
