//! Acquiring inside one transaction: a claim enters the queue, and checks how it stands.
//!
//! Every verb first *settles* the name (`queue`): lapsed holders go, and waiters are admitted in
//! order until one does not fit.

use super::queue::{LockQueue, Position, not_held};
use super::record::ClaimRow;
use super::store::{SqlResult, Transaction};
use crate::clock::Moment;
use crate::engine::common::admission::{check_permits, clash};
use crate::engine::{Claim, Grant};
use crate::error::{Error, Result};

/// The status of a claim after a request.
pub(super) enum ClaimStatus {
    Granted(Grant),
    Waiting {
        seq: i64,
        /// The processes whose deaths are a reason to check again.
        watch: Vec<String>,
        /// When to check again even if nothing is reported.
        check_at: Moment,
    },
    Busy,
}

impl Transaction<'_> {
    /// A claim's first request, or a repetition of it.
    pub(super) fn enter(
        &mut self,
        claim: &Claim,
        may_queue: bool,
    ) -> SqlResult<Result<ClaimStatus>> {
        if self.withdrawn.contains(claim.id) {
            return Ok(Err(not_held(claim)));
        }
        if let Err(error) = check_permits(claim) {
            return Ok(Err(error));
        }
        loop {
            let queue = self.settle(&claim.name)?;
            if let Some(held) = queue.holders.iter().find(|held| held.id == claim.id) {
                return Ok(Ok(ClaimStatus::Granted(self.grant_of(held))));
            }
            if queue.first_waiter.is_some()
                && let Some((seq, _)) = self.find(claim)?
            {
                return self.check(claim, seq);
            }
            let conflict = queue.mode_in_use().and_then(|used| clash(used, claim.mode));
            if conflict.is_none() && queue.first_waiter.is_none() && queue.tally.admits(claim.mode)
            {
                return self.insert_holder(claim, &queue).map(ClaimStatus::Granted).map(Ok);
            }
            // The processes of the claims before it may be dead.
            if self.remove_dead(&claim.name, &queue)? {
                continue;
            }
            return match conflict {
                Some(why) => Ok(Err(Error::Conflict { name: claim.name.clone(), why })),
                None if may_queue => {
                    let seq = self.insert_waiter(claim)?;
                    self.check(claim, seq)
                }
                None => self.tell_watchers(&claim.name).map(|()| Ok(ClaimStatus::Busy)),
            };
        }
    }

    /// The status of a claim that waits at `seq`.
    pub(super) fn check(&mut self, claim: &Claim, seq: i64) -> SqlResult<Result<ClaimStatus>> {
        loop {
            let queue = self.settle(&claim.name)?;
            if let Some(held) = queue.holders.iter().find(|held| held.id == claim.id) {
                let grant = self.grant_of(held);
                self.tell_watchers(&claim.name)?;
                return Ok(Ok(ClaimStatus::Granted(grant)));
            }
            let Some(Position { before, seen }) = self.position_of(claim, seq, &queue)? else {
                return Ok(Err(not_held(claim)));
            };
            self.heartbeat(&claim.name, seen)?;
            let removed = match &before {
                None => self.remove_dead(&claim.name, &queue)?,
                Some(before) => self.remove_if_dead(&claim.name, before)?,
            };
            if !removed {
                self.tell_watchers(&claim.name)?;
                return Ok(Ok(self.waiting(seq, queue, before)));
            }
        }
    }

    /// The same without changing anything. `None` if something has to be changed.
    pub(super) fn peek(&self, claim: &Claim, seq: i64) -> SqlResult<Option<ClaimStatus>> {
        // In most cases it was granted.
        if let Some(held) = self.holding(claim, seq)? {
            return Ok(Some(ClaimStatus::Granted(self.grant_of(&held))));
        }
        let (queue, lapsed) = self.read_queue(&claim.name)?;
        let unsettled = !lapsed.is_empty() || queue.has_newly_admitted();
        let Some(Position { before, seen }) = self.position_of(claim, seq, &queue)? else {
            return Ok(None);
        };
        let any_gone = match &before {
            None => queue.holders.iter().any(|held| self.is_gone(held)),
            Some(before) => self.is_gone(before),
        };
        if unsettled || any_gone || self.heartbeat_is_due(seen) {
            return Ok(None);
        }
        Ok(Some(self.waiting(seq, queue, before)))
    }

    /// The first waiter checks again when a lease ends. The others rely on it, and check now and
    /// then because its process may be stopped.
    fn waiting(&self, seq: i64, queue: LockQueue, before: Option<ClaimRow>) -> ClaimStatus {
        let (watch, check_at) = match before {
            Some(before) => (vec![before.process], u64::MAX),
            None => {
                let ends = queue.holders.iter().filter_map(|held| held.expires).min();
                let watch = queue.holders.into_iter().filter(|held| !held.detached);
                (watch.map(|held| held.process).collect(), ends.unwrap_or(self.now))
            }
        };
        ClaimStatus::Waiting { seq, watch, check_at: self.store.moment(check_at) }
    }

    /// Leaves the queue, unless the claim was granted in the meantime.
    pub(super) fn give_up(&mut self, claim: &Claim, seq: i64) -> SqlResult<Option<Grant>> {
        match self.check(claim, seq)? {
            Ok(ClaimStatus::Granted(grant)) => Ok(Some(grant)),
            _ => self.remove(claim).map(|()| None),
        }
    }
}
