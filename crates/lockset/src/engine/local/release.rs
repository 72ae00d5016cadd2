//! The end of a claim inside one transaction: released, withdrawn or broken.

use rusqlite::params;

use super::acquire::ClaimStatus;
use super::inbox::Message;
use super::queue::not_held;
use super::record::{int, seq_of};
use super::store::{AfterCommit, SqlResult, Transaction};
use crate::engine::{Break, Claim, Grant, Holder};
use crate::error::{LossReason, Result};
use crate::name::Name;

impl Transaction<'_> {
    pub(super) fn release(
        &mut self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> SqlResult<Result<Option<Grant>>> {
        let released = self
            .db
            .prepare_cached(
                "DELETE FROM lock WHERE name = ?1 AND seq = ?2 AND id = ?3 AND token = ?4
                 AND expires > ?5 AND expires - ttl <= ?5",
            )?
            .execute(params![
                claim.name.as_str(),
                seq_of(grant),
                claim.id.to_bits().to_be_bytes(),
                int(grant.token.get()),
                int(self.now),
            ])?;
        if released == 0 {
            // Every row with this id is removed, although the reply is "not held".
            self.remove(claim)?;
            return Ok(Err(not_held(claim)));
        }
        self.changed = true;
        // The release stands even if `next` fails, which its own request reports.
        match next.map(|next| self.enter(next, true)).transpose()? {
            Some(Ok(ClaimStatus::Granted(grant))) => Ok(Ok(Some(grant))),
            Some(Ok(ClaimStatus::Waiting { .. } | ClaimStatus::Busy)) => Ok(Ok(None)),
            Some(Err(_)) | None => {
                self.settle(&claim.name)?;
                self.tell_watchers(&claim.name)?;
                Ok(Ok(None))
            }
        }
    }

    /// Removes the rows with the claim's id, and admits the next waiters.
    pub(super) fn remove(&mut self, claim: &Claim) -> SqlResult<()> {
        if let Some((seq, held)) = self.find(claim)? {
            self.delete(&claim.name, seq)?;
            self.settle(&claim.name)?;
            if !held {
                self.wake_waiter_after(&claim.name, seq)?;
            }
        }
        self.tell_watchers(&claim.name)
    }

    pub(super) fn force_release(&mut self, name: &Name, how: Break) -> SqlResult<Vec<Holder>> {
        let queue = self.settle(name)?;
        let reason = match how {
            Break::WhenLeaseEnds => LossReason::Revoked,
            Break::Now => LossReason::Broken,
        };
        self.db
            .prepare_cached("UPDATE lock SET revoked = 1 WHERE name = ?1 AND expires IS NOT NULL")?
            .execute([name.as_str()])?;
        let broken = self.state(name)?.holders;
        for held in queue.holders {
            self.after_commit.push((held.inbox, AfterCommit::Send(Message::Lost(held.id, reason))));
            if how == Break::Now {
                self.delete(name, held.seq)?;
            }
        }
        self.changed = true;
        self.settle(name)?;
        self.tell_watchers(name)?;
        Ok(broken)
    }
}
