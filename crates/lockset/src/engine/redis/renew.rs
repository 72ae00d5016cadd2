//! Renewing leases, in batches; and changing what is stored for a held lock.

use std::time::Duration;

use redis::Value;

use super::connection::RedisConnection;
use super::error::{self, RedisRequestError};
use super::record;
use super::reply::{array, text_at, unexpected_reply};
use super::{MIN_REQUEST_TIMEOUT, REQUEST_TIMEOUT, RedisCore, TOMBSTONE_LIFE};
use crate::clock::Moment;
use crate::engine::{Claim, Grant, trusted_until};
use crate::error::{Error, LossReason, Result};

/// Maximum leases per renew script: each needs one or two commands.
const MAX_RENEWALS: usize = 200;

impl RedisCore {
    pub(super) async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        let sent = self.clock.now();
        let parts = self.group_by_slot(batch, MAX_RENEWALS, |(claim, _)| &claim.name);
        let parts = parts.into_iter().map(|part: Vec<(usize, (&Claim, &Grant))>| async move {
            let leases: Vec<_> = part.iter().map(|(_, lease)| *lease).collect();
            let renewals = self.renew_batch(&leases, sent).await;
            part.into_iter().map(|(index, _)| index).zip(renewals).collect::<Vec<_>>()
        });
        let mut renewals: Vec<(usize, Result<Grant>)> =
            futures_util::future::join_all(parts).await.into_iter().flatten().collect();
        renewals.sort_unstable_by_key(|(index, _)| *index);
        renewals.into_iter().map(|(_, renewal)| renewal).collect()
    }

    /// Renews leases in one request. In a cluster all must be of one slot.
    async fn renew_batch(&self, leases: &[(&Claim, &Grant)], sent: Moment) -> Vec<Result<Grant>> {
        let each = leases.iter();
        match self.extend(leases, None).await {
            Ok(replies) => each
                .zip(&replies)
                .map(|((claim, grant), reply)| parse_renewal(claim, grant, sent, reply))
                .collect(),
            // One of them may be the cause, such as a name that the user may not touch.
            Err(error) if leases.len() > 1 && !error.is_retryable() => {
                let alone = each.map(|(claim, grant)| async move {
                    let replies = self.extend(&[(claim, grant)], None).await?;
                    parse_renewal(claim, grant, sent, first_reply(&replies)?)
                });
                futures_util::future::join_all(alone).await
            }
            Err(error) => each.map(|_| Err(error.clone())).collect(),
        }
    }

    /// Renews leases, or extends them by `extension`. In a cluster all must be of one slot.
    pub(super) async fn extend(
        &self,
        batch: &[(&Claim, &Grant)],
        extension: Option<Duration>,
    ) -> Result<Vec<Value>> {
        let Some((first, _)) = batch.first() else { return Ok(Vec::new()) };
        let (names, args) = self.renew_arguments(batch, extension);
        let of = self.keys(&first.name);
        let script = &self.scripts.renew;
        // The keeper does not wait much longer, and a silent node must not delay other leases.
        let timeout = REQUEST_TIMEOUT.min(first.ttl / 8).max(MIN_REQUEST_TIMEOUT);
        let command = |connection: &RedisConnection| {
            let mut command = script.call(names.len());
            // A break is announced to the client that renews: the lock may have come by a ticket
            // from another client, or the slot of the inbox may have moved.
            command.arg(&names).arg(&connection.inbox).arg(&args);
            command
        };
        let reply = self.run_command(timeout, script, &of, command).await;
        match reply.map_err(RedisRequestError::into_error)? {
            Value::Array(replies) if replies.len() == batch.len() => Ok(replies),
            other => Err(unexpected_reply(&format!("{other:?}"))),
        }
    }

    /// The keys of `renew.lua`, and its arguments after the inbox.
    pub(super) fn renew_arguments(
        &self,
        batch: &[(&Claim, &Grant)],
        extension: Option<Duration>,
    ) -> (Vec<String>, Vec<String>) {
        let names = self.declared_keys(batch.iter().map(|(claim, _)| *claim));
        let mut args = Vec::new();
        for (claim, grant) in batch {
            args.extend([
                claim.id.to_string(),
                grant.token.to_string(),
                extension.unwrap_or(claim.ttl).as_millis().to_string(),
                u8::from(extension.is_some()).to_string(),
            ]);
        }
        (names, args)
    }

    /// Makes a held lock the successor's: same token, same lease.
    pub(super) async fn adopt(
        &self,
        claim: &Claim,
        grant: &Grant,
        successor: &Claim,
    ) -> Result<Grant> {
        let keys = self.keys(&claim.name);
        let mut names = self.declared_keys([claim].into_iter());
        if self.router.is_cluster() {
            names.extend(keys.others(successor.id).last().cloned());
        }
        let script = &self.scripts.adopt;
        let command = |connection: &RedisConnection| {
            let mut command = script.call(names.len());
            command.arg(&names).arg(claim.id.to_string()).arg(grant.token.get());
            command.arg(successor.id.to_string());
            command.arg(record::encode_note(&successor.note, &connection.inbox));
            command.arg(TOMBSTONE_LIFE.as_millis() as u64);
            command
        };
        let reply = self.run_command(REQUEST_TIMEOUT, script, &keys, command).await;
        let reply = reply.map_err(RedisRequestError::into_error)?;
        match text_at(array(&reply)?, 0)?.as_str() {
            "done" => Ok(Grant { key: Vec::new(), ..grant.clone() }),
            "gone" => Err(Error::NotHeld { name: claim.name.clone() }),
            _ => Err(Error::lost(&claim.name, LossReason::Forgotten)),
        }
    }

    /// Changes a held lock; see `amend.lua` for `what`.
    pub(super) async fn amend(
        &self,
        claim: &Claim,
        grant: &Grant,
        what: &str,
        to: &str,
    ) -> Result<()> {
        let keys = self.keys(&claim.name);
        let names = self.declared_keys([claim].into_iter());
        let args = [claim.id.to_string(), grant.token.to_string(), what.to_owned(), to.to_owned()];
        let reply = self.run_handover_script(&self.scripts.amend, &keys, &names, &args).await;
        match text_at(array(&reply.map_err(RedisRequestError::into_error)?)?, 0)?.as_str() {
            "done" => Ok(()),
            _ => Err(Error::lost(&claim.name, LossReason::Forgotten)),
        }
    }

    /// The inbox at the node that serves the claim's name.
    pub(super) async fn inbox_of(&self, claim: &Claim) -> Result<String> {
        let keys = self.keys(&claim.name);
        let inbox = async {
            let (node, left) = self.route(&keys, REQUEST_TIMEOUT)?.next_node().await?;
            node.connection.connected(left).await.map(|connection| connection.inbox.clone())
        };
        inbox.await.map_err(RedisRequestError::into_error)
    }
}

/// Parses the reply of `renew.lua` for one lease; the request was sent at `sent`.
pub(super) fn parse_renewal(
    claim: &Claim,
    grant: &Grant,
    sent: Moment,
    reply: &Value,
) -> Result<Grant> {
    match text_at(array(reply)?, 0)?.as_str() {
        "renewed" => {
            let valid_until = trusted_until(sent, claim.ttl);
            Ok(Grant { valid_until: valid_until.max(grant.valid_until), ..grant.clone() })
        }
        "revoked" => Err(Error::lost(&claim.name, LossReason::Revoked)),
        "failed" => {
            let why = text_at(array(reply)?, 1)?;
            // The wrong type: another program has overwritten the key.
            match why.contains("WRONGTYPE") {
                true => Err(Error::lost(&claim.name, LossReason::Forgotten)),
                false => Err(error::error_from_text(&why)),
            }
        }
        _ => Err(Error::lost(&claim.name, LossReason::Forgotten)),
    }
}

pub(super) fn first_reply(replies: &[Value]) -> Result<&Value> {
    replies.first().ok_or_else(|| unexpected_reply("no answer"))
}
