//! Changes to a held lock inside one transaction: renewed, raised, amended, adopted.

use rusqlite::params;

use super::queue::{is_held_by, not_held};
use super::record::{int, seq_of};
use super::store::{SqlResult, Transaction};
use crate::clock::nanos;
use crate::engine::{Amend, Claim, Grant, Mode};
use crate::error::{Error, LossReason, Result};
use crate::token::Token;

impl Transaction<'_> {
    pub(super) fn renew(&mut self, claim: &Claim, grant: &Grant) -> SqlResult<Result<Grant>> {
        let expires = self.now.saturating_add(nanos(claim.ttl));
        let seq = seq_of(grant);
        let renewed = self
            .db
            .prepare_cached(
                "UPDATE lock SET expires = ?1, ttl = ?2, inbox = ?3 WHERE name = ?4 AND seq = ?5
                 AND id = ?6 AND token = ?7 AND expires > ?8 AND expires - ttl <= ?8
                 AND revoked = 0",
            )?
            .execute(params![
                int(expires),
                int(nanos(claim.ttl)),
                self.store.inbox.name(),
                claim.name.as_str(),
                seq,
                claim.id.to_bits().to_be_bytes(),
                int(grant.token.get()),
                int(self.now),
            ])?;
        if renewed == 1 {
            return Ok(Ok(self.grant(seq, grant.token, expires, claim.ttl)));
        }
        let reason = match self.held(claim, grant)? {
            Some(_) => LossReason::Revoked,
            None => LossReason::Forgotten,
        };
        Ok(Err(Error::lost(&claim.name, reason)))
    }

    pub(super) fn raise(
        &mut self,
        claim: &Claim,
        grant: &Grant,
        to: Token,
    ) -> SqlResult<Result<Grant>> {
        let queue = self.settle(&claim.name)?;
        let fence = queue.fence.unwrap_or(0);
        let held = queue.holders.iter().find(|held| is_held_by(held, claim, grant));
        let may_be_raised = claim.mode == Mode::Exclusive && fence <= to.get();
        let Some(held) = held.filter(|_| may_be_raised) else {
            return Ok(Err(Error::lost(&claim.name, LossReason::Forgotten)));
        };
        self.db
            .prepare_cached("UPDATE lock SET token = ?1 WHERE name = ?2 AND seq IN (0, ?3)")?
            .execute(params![int(to.get()), claim.name.as_str(), held.seq])?;
        Ok(Ok(Grant { token: to, ..grant.clone() }))
    }

    pub(super) fn amend(
        &mut self,
        claim: &Claim,
        grant: &Grant,
        to: &Amend,
    ) -> SqlResult<Result<Grant>> {
        let Some(held) = self.held(claim, grant)? else {
            return Ok(Err(Error::lost(&claim.name, LossReason::Forgotten)));
        };
        match to {
            Amend::Note(note) => self
                .db
                .prepare_cached("UPDATE lock SET by = ?3, note = ?4 WHERE name = ?1 AND seq = ?2")?
                .execute(params![claim.name.as_str(), held.seq, &*note.by, &*note.text])?,
            Amend::Downgrade => self
                .db
                .prepare_cached("UPDATE lock SET mode = 'shared' WHERE name = ?1 AND seq = ?2")?
                .execute(params![claim.name.as_str(), held.seq])?,
        };
        self.changed = true;
        self.settle(&claim.name)?;
        self.tell_watchers(&claim.name)?;
        Ok(Ok(grant.clone()))
    }

    /// The row keeps its position, token and lease. Everything that identifies its owner changes.
    pub(super) fn adopt(
        &mut self,
        claim: &Claim,
        grant: &Grant,
        successor: &Claim,
    ) -> SqlResult<Result<Grant>> {
        if self.withdrawn.contains(successor.id) {
            return Ok(Err(not_held(successor)));
        }
        if self.held(successor, grant)?.is_some() {
            // A repetition.
            return Ok(Ok(grant.clone()));
        }
        if self.held(claim, grant)?.is_none() {
            return Ok(Err(Error::lost(&claim.name, LossReason::Forgotten)));
        }
        self.db
            .prepare_cached(
                "UPDATE lock SET id = ?3, detached = ?4, process = ?5, inbox = ?6, by = ?7,
                 note = ?8 WHERE name = ?1 AND seq = ?2",
            )?
            .execute(params![
                claim.name.as_str(),
                seq_of(grant),
                successor.id.to_bits().to_be_bytes(),
                successor.detachable,
                self.store.processes.recorded(),
                self.store.inbox.name(),
                &*successor.note.by,
                &*successor.note.text,
            ])?;
        self.changed = true;
        self.settle(&claim.name)?;
        self.tell_watchers(&claim.name)?;
        Ok(Ok(grant.clone()))
    }
}
