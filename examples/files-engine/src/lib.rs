//! An engine of your own, by example: [`Files`] keeps locks in a directory of files.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> lockset::Result<()> {
//! # let folder = tempfile::tempdir().unwrap();
//! # let folder = folder.path();
//! use std::sync::Arc;
//!
//! use lockset::Lockset;
//! use lockset_example_files::Files;
//!
//! let locks = Lockset::with_engine(Arc::new(Files::open(folder)?))?;
//! let guard = locks.mutex("orders/42")?.lock().await?;
//! guard.release().await?;
//! locks.close().await?;
//! # Ok(()) }
//! ```
//!
//! The crate uses only the public API of `lockset`. The way of a claim through its files:
//!
//! | file | contents |
//! |---|---|
//! | `lib.rs` | the [`Engine`] trait, method by method: each is one transaction on one record |
//! | `folder.rs` | the transaction: an OS file lock, one JSON file per name, atomic replacement |
//! | `record.rs` | the rules of one lock: queue, lease, token, tombstones; no I/O |
//! | `tests/laws.rs` | the laws of `lockset-testkit` on this engine |
//!
//! # What it does not do
//! * It has exclusive locks only. A claim for anything else is refused as unsupported.
//! * It works on one machine: leases are judged by the boot clock, which all processes of a machine
//!   share (unless they live in different time namespaces). Network file systems are out.
//! * Waiters poll every 10 ms, and so do watches. A real engine pushes: the backend tells the next
//!   waiter that it was admitted, and the holder that an operator took the lock away.
//! * A process that is stopped (not killed) in the middle of a transaction stops all others until
//!   it is resumed.
//! * The file of a name stays for ever, because it remembers the last token.
//! * Files are not flushed to the disk. After a power cut no process holds anything, and tokens go
//!   on from the wall clock.

use std::path::Path;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use lockset::clock::{Clock, Moment};
use lockset::engine::{
    Admission, Amend, Break, Capabilities, Claim, Engine, Event, Grant, Hint, Holder, LockState,
    Renewal, Scope, Swap, Version, Wait,
};
use lockset::{Error, LossReason, Mode, Name, Prefix, Result};

use crate::folder::Folder;
use crate::record::Record;

mod folder;
mod record;

/// The engine's name in errors and tickets.
const ENGINE: &str = "files";
/// How often a waiter or a watch reads again.
const POLL: Duration = Duration::from_millis(10);

/// A client of the locks in one directory. Any number of processes may use the same directory.
#[derive(Clone, Debug)]
pub struct Files {
    folder: Folder,
}

impl Files {
    /// The locks in `folder`, which is created if it does not exist.
    ///
    /// # Errors
    /// [`Error::Unreachable`] if the folder can be neither found nor created.
    pub fn open(folder: &Path) -> Result<Self> {
        Ok(Self { folder: Folder::open(folder)? })
    }

    /// One transaction on the record of `name`. Nothing is awaited while the OS file lock is held,
    /// so a dropped future has either changed nothing or completed its change.
    async fn change<T>(
        &self,
        name: &Name,
        change: impl FnOnce(&mut Record, Moment) -> T,
    ) -> Result<T> {
        self.folder.lock().await?.change(name, change)
    }
}

/// Refuses what this engine does not have. Nothing is approximated.
fn check_supported(claim: &Claim) -> Result<()> {
    match (claim.mode, claim.floor) {
        (Mode::Exclusive, None) => Ok(()),
        (Mode::Exclusive, Some(_)) => Err(unsupported("a floor for tokens")),
        (mode, _) => Err(unsupported(&format!("the mode {mode}"))),
    }
}

fn unsupported(what: &str) -> Error {
    Error::Unsupported { engine: ENGINE, what: what.to_owned() }
}

fn lost(claim: &Claim) -> Error {
    Error::Lost { name: claim.name.clone(), reason: LossReason::Forgotten }
}

fn not_held(claim: &Claim) -> Error {
    Error::NotHeld { name: claim.name.clone() }
}

#[async_trait]
impl Engine for Files {
    /// Exclusive locks, no pushes, no notice of dead processes: only `durable` differs from the
    /// default.
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::new(ENGINE);
        capabilities.durable = true;
        capabilities
    }

    fn identity(&self) -> String {
        format!("files:{}", self.folder.path().display())
    }

    fn clock(&self) -> Clock {
        Clock::boot()
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        check_supported(claim)?;
        let (clock, deadline) = (self.clock(), wait.deadline());
        let enter = |record: &mut Record, now| record.enter(claim, wait != Wait::No, now);
        let mut admission = self.change(&claim.name, enter).await?;
        loop {
            if let Some(decided) = admission {
                return Ok(decided);
            }
            clock.sleep_until(deadline.min(clock.now() + POLL)).await;
            let look = |record: &mut Record, now| record.look(claim.id, now >= deadline);
            admission = self.change(&claim.name, look).await?;
        }
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        let mut replies = Vec::with_capacity(batch.len());
        for (claim, grant) in batch {
            let renew = |record: &mut Record, now| record.renew(claim, grant.token, now);
            replies.push(self.change(&claim.name, renew).await);
        }
        replies
    }

    async fn amend(&self, claim: &Claim, grant: &Grant, to: Amend) -> Result<Grant> {
        let Amend::Note(note) = to else { return Err(unsupported("downgrading")) };
        let amend = |record: &mut Record, _| {
            let held = record.held_by(claim.id, grant.token).ok_or_else(|| lost(claim))?;
            held.note = note;
            Ok(held.grant())
        };
        self.change(&claim.name, amend).await?
    }

    async fn adopt(&self, claim: &Claim, grant: &Grant, successor: &Claim) -> Result<Grant> {
        let adopt = |record: &mut Record, now| {
            if record.is_withdrawn(successor.id) {
                return Err(not_held(claim));
            }
            record.adopt(claim.id, grant.token, successor, now).ok_or_else(|| lost(claim))
        };
        self.change(&claim.name, adopt).await?
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let release = |record: &mut Record, now| {
            if record.held_by(claim.id, grant.token).is_none() {
                return Err(not_held(claim));
            }
            record.remove(claim.id, now);
            // In the same transaction: no claim can come between the two.
            Ok(next.and_then(|next| record.enter(next, true, now)?.granted()))
        };
        self.change(&claim.name, release).await?
    }

    async fn withdraw(&self, claim: &Claim) -> Result<()> {
        self.change(&claim.name, |record, now| record.withdraw(claim.id, now)).await
    }

    /// A watch reads its whole scope again after each hint, and reports what differs.
    fn hints(&self, _: &Scope) -> BoxStream<'static, Result<Hint>> {
        let next = |pause| async move {
            Clock::boot().sleep_until(Clock::boot().now() + pause).await;
            Some((Ok(Hint::Missed), POLL))
        };
        stream::unfold(Duration::ZERO, next).boxed()
    }

    async fn inspect(&self, name: &Name) -> Result<LockState> {
        self.change(name, |record, now| record.state(now)).await
    }

    async fn list(&self, prefix: &Prefix) -> Result<Vec<LockState>> {
        let locked = self.folder.lock().await?;
        let records = locked.records(prefix)?;
        let states = records.iter().map(|record| record.state(self.clock().now()));
        Ok(states.filter(LockState::is_used).collect())
    }

    async fn cell(&self, _: &Name, _: Version, _: Option<Vec<u8>>) -> Result<Swap> {
        Err(unsupported("cells"))
    }

    async fn force_release(&self, name: &Name, how: Break) -> Result<Vec<Holder>> {
        self.change(name, |record, now| record.force_release(how, now)).await
    }

    /// No events: a holder learns at its next renewal that its lock was taken away.
    fn events(&self) -> BoxStream<'static, Event> {
        stream::pending().boxed()
    }
}
