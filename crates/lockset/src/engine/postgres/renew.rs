//! Renewing leases, in batches; and changing what is stored for a held lock.

use std::time::Duration;

use tokio_postgres::types::Type;

use super::connection::Argument;
use super::error::{PostgresRequestError, unexpected_reply};
use super::record::{column, encode_token, millis};
use super::statements::Call;
use super::{MIN_REQUEST_TIMEOUT, PostgresCore, REQUEST_TIMEOUT};
use crate::engine::{Claim, Grant, trusted_until};
use crate::error::{Error, LossReason, Result};
use crate::name::Note;
use crate::token::Token;

/// Maximum leases per statement: others wait for their rows meanwhile.
const MAX_RENEWALS: usize = 1000;
/// What `renew` returns for a claim that was revoked.
const REVOKED: i64 = -1;

impl PostgresCore {
    pub(super) async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        // In the order of names, so that two batches do not deadlock.
        let mut order: Vec<usize> = (0..batch.len()).collect();
        order.sort_by(|a, b| batch[*a].0.name.as_str().cmp(batch[*b].0.name.as_str()));
        let mut renewals: Vec<(usize, Result<Grant>)> = Vec::with_capacity(batch.len());
        // One after the other: they share a connection.
        for part in order.chunks(MAX_RENEWALS) {
            let leases: Vec<_> = part.iter().map(|index| batch[*index]).collect();
            renewals.extend(part.iter().copied().zip(self.renew_part(&leases).await));
        }
        renewals.sort_unstable_by_key(|(index, _)| *index);
        renewals.into_iter().map(|(_, renewal)| renewal).collect()
    }

    async fn renew_part(&self, leases: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        let sent = self.clock.now();
        let left = match self.extend(leases, None).await {
            Ok(left) => left,
            Err(error) => return leases.iter().map(|_| Err(error.clone())).collect(),
        };
        let each = leases.iter().zip(left);
        each.map(|((claim, grant), left)| match left {
            REVOKED => Err(Error::lost(&claim.name, LossReason::Revoked)),
            lost if lost < 0 => Err(Error::lost(&claim.name, LossReason::Forgotten)),
            _ => {
                let valid_until = trusted_until(sent, claim.ttl).max(grant.valid_until);
                Ok(Grant { valid_until, ..(*grant).clone() })
            }
        })
        .collect()
    }

    /// Renews leases, or extends them by `extension`. Returns what `renew` in `operations.sql`
    /// does.
    pub(super) async fn extend(
        &self,
        batch: &[(&Claim, &Grant)],
        extension: Option<Duration>,
    ) -> Result<Vec<i64>> {
        let shortest = batch.iter().map(|(claim, _)| claim.ttl).min().unwrap_or_default();
        let names: Vec<&str> = batch.iter().map(|(claim, _)| claim.name.as_str()).collect();
        let ids: Vec<String> = batch.iter().map(|(claim, _)| claim.id.to_string()).collect();
        let tokens: Vec<i64> = batch.iter().map(|(_, grant)| encode_token(grant.token)).collect();
        let spans: Vec<i64> =
            batch.iter().map(|(claim, _)| millis(extension.unwrap_or(claim.ttl))).collect();
        let adds = extension.is_some();
        // The keeper does not wait much longer.
        let timeout = REQUEST_TIMEOUT.min(shortest / 6).max(MIN_REQUEST_TIMEOUT);
        // A break is announced to the client that renews: the lock may have come by a ticket.
        let inbox = self.shared.inbox();
        let arguments: &[Argument<'_>] = &[
            (&inbox, Type::TEXT),
            (&names, Type::TEXT_ARRAY),
            (&ids, Type::TEXT_ARRAY),
            (&tokens, Type::INT8_ARRAY),
            (&spans, Type::INT8_ARRAY),
            (&adds, Type::BOOL),
        ];
        let rows = self.upkeep.call(Call::Renew, arguments, timeout).await;
        let rows = rows.map_err(PostgresRequestError::into_error)?;
        if rows.len() != batch.len() {
            return Err(unexpected_reply("another number of rows"));
        }
        rows.iter().map(|row| column(row, 0)).collect()
    }

    /// `what` is as in `amend` in `operations.sql`.
    pub(super) async fn amend(
        &self,
        claim: &Claim,
        grant: &Grant,
        what: u8,
        note: Option<&Note>,
        raised: Option<Token>,
    ) -> Result<()> {
        let (name, id, token) =
            (claim.name.as_str(), claim.id.to_string(), encode_token(grant.token));
        let what = what as i8;
        let (by, text) = note.map_or(("", ""), |note| (&*note.by, &*note.text));
        let raised = raised.map(encode_token);
        let arguments: &[Argument<'_>] = &[
            (&name, Type::TEXT),
            (&id, Type::TEXT),
            (&token, Type::INT8),
            (&what, Type::CHAR),
            (&by, Type::TEXT),
            (&text, Type::TEXT),
            (&raised, Type::INT8),
        ];
        let rows = self.main.call(Call::Amend, arguments, REQUEST_TIMEOUT).await;
        let rows = rows.map_err(PostgresRequestError::into_error)?;
        match rows.first().map(|row| column::<bool>(row, 0)).transpose()? {
            Some(true) => Ok(()),
            _ => Err(Error::lost(&claim.name, LossReason::Forgotten)),
        }
    }

    /// Makes a held lock the successor's: same token, same lease.
    pub(super) async fn adopt(
        &self,
        claim: &Claim,
        grant: &Grant,
        successor: &Claim,
    ) -> Result<Grant> {
        let (name, id, token) =
            (claim.name.as_str(), claim.id.to_string(), encode_token(grant.token));
        let (to, inbox) = (successor.id.to_string(), self.shared.inbox());
        let (by, text) = (&*successor.note.by, &*successor.note.text);
        let arguments: &[Argument<'_>] = &[
            (&name, Type::TEXT),
            (&id, Type::TEXT),
            (&token, Type::INT8),
            (&to, Type::TEXT),
            (&inbox, Type::TEXT),
            (&by, Type::TEXT),
            (&text, Type::TEXT),
        ];
        let rows = match self.main.call(Call::Adopt, arguments, REQUEST_TIMEOUT).await {
            Ok(rows) => rows,
            Err(error) => {
                if let PostgresRequestError::Unknown(_) = error {
                    self.dirty().insert(successor.id, ());
                }
                return Err(error.into_error());
            }
        };
        match rows.first().map(|row| column::<i8>(row, 0)).transpose()?.map(|kind| kind as u8) {
            Some(b'd') => Ok(grant.clone()),
            Some(b'x') => Err(Error::NotHeld { name: claim.name.clone() }),
            _ => Err(Error::lost(&claim.name, LossReason::Forgotten)),
        }
    }
}
