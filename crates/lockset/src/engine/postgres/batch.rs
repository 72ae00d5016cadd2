//! Requests to release and to acquire locks, alone or together: see
//! `crate::engine::common::batch`.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::connection::{Argument, PostgresConnection};
use super::error::{PostgresRequestError, unexpected_reply, unreachable_error};
use super::record::{
    PostgresClaimReply, column, encode_mode, encode_token, millis, parse_claim_reply,
};
use super::statements::Call;
use super::{MAX_BATCH, REQUEST_TIMEOUT};
use crate::engine::ClaimId;
use crate::engine::common::batch::{Batcher, Entered, Transport};
use crate::engine::common::waiters::HandoffWaiter;
use crate::name::Name;
use crate::token::Token;

/// The end of a claim, a request for another one of the same name, or both. With both, the second
/// only happens if the first was released.
#[derive(Debug)]
pub(super) struct PostgresRequest {
    pub(super) name: Name,
    pub(super) end: Option<EndPart>,
    pub(super) claim: Option<ClaimPart>,
}

/// A claim to release, or without a token to withdraw.
#[derive(Debug)]
pub(super) struct EndPart {
    pub(super) id: ClaimId,
    pub(super) token: Option<Token>,
    /// It leaves a tombstone.
    pub(super) buried: bool,
}

#[derive(Debug)]
pub(super) struct ClaimPart {
    pub(super) waiter: Arc<HandoffWaiter>,
    pub(super) waits: bool,
}

/// Whether the claim was released, and the reply to the next one.
#[derive(Clone, Debug)]
pub(super) struct ExchangeReply {
    pub(super) released: bool,
    pub(super) claim: Option<PostgresClaimReply>,
}

/// One request as columns, in the order of `exchange`.
struct Columns {
    name: String,
    ended: Option<String>,
    ended_token: Option<i64>,
    buried: bool,
    id: Option<String>,
    mode: (i8, i32, i32),
    leases: [i64; 3],
    floor: Option<i64>,
    waits: bool,
    signed: String,
    note: String,
}

impl PostgresRequest {
    fn columns(&self) -> Columns {
        let end = self.end.as_ref();
        let part = self.claim.as_ref();
        let claim = part.map(|part| &part.waiter.claim);
        let leases = part.map_or([0; 3], |part| {
            let leases = part.waiter.leases;
            [leases.entry, leases.first, part.waiter.claim.ttl].map(millis)
        });
        Columns {
            name: self.name.as_str().to_owned(),
            ended: end.map(|end| end.id.to_string()),
            ended_token: end.and_then(|end| end.token).map(encode_token),
            buried: end.is_some_and(|end| end.buried),
            id: claim.map(|claim| claim.id.to_string()),
            mode: claim.map_or((b'x' as i8, 0, 0), |claim| encode_mode(claim.mode)),
            leases,
            floor: claim.and_then(|claim| claim.floor).map(encode_token),
            waits: part.is_some_and(|part| part.waits),
            signed: claim.map(|claim| claim.note.by.to_string()).unwrap_or_default(),
            note: claim.map(|claim| claim.note.text.to_string()).unwrap_or_default(),
        }
    }
}

impl PostgresConnection {
    /// Sends a request, alone or in a batch.
    pub(super) async fn exchange(
        self: &Arc<Self>,
        request: &Arc<PostgresRequest>,
        timeout: Duration,
    ) -> Result<ExchangeReply, PostgresRequestError> {
        let behind = match Batcher::enter(self, request) {
            Entered::Alone(turn) => {
                let reply = self.exchange_one(request, timeout).await;
                if let Err(failed) = &reply {
                    turn.on_failure(failed);
                }
                return reply;
            }
            Entered::Behind(behind) => behind,
        };
        let reply = match timeout < REQUEST_TIMEOUT {
            true => Box::pin(tokio::time::timeout(timeout, behind.answer())).await.ok().flatten(),
            // The batch has this timeout itself.
            false => behind.answer().await,
        };
        match reply {
            Some(Ok(Some(reply))) => Ok(reply),
            // Another request of the batch may be the cause of its failure.
            Some(Ok(None)) => self.exchange_one(request, timeout).await,
            Some(Err(failed)) => Err(failed),
            // It may have been sent.
            None => {
                let what = format!("no answer within {timeout:.1?}");
                Err(PostgresRequestError::Unknown(unreachable_error(what, true, None)))
            }
        }
    }

    async fn exchange_one(
        &self,
        request: &PostgresRequest,
        timeout: Duration,
    ) -> Result<ExchangeReply, PostgresRequestError> {
        let it = request.columns();
        let inbox = self.shared.inbox();
        let arguments: &[Argument<'_>] = &[
            (&inbox, Type::TEXT),
            (&it.name, Type::TEXT),
            (&it.ended, Type::TEXT),
            (&it.ended_token, Type::INT8),
            (&it.buried, Type::BOOL),
            (&it.id, Type::TEXT),
            (&it.mode.0, Type::CHAR),
            (&it.mode.1, Type::INT4),
            (&it.mode.2, Type::INT4),
            (&it.leases[0], Type::INT8),
            (&it.leases[1], Type::INT8),
            (&it.leases[2], Type::INT8),
            (&it.floor, Type::INT8),
            (&it.waits, Type::BOOL),
            (&it.signed, Type::TEXT),
            (&it.note, Type::TEXT),
        ];
        let rows = self.call(Call::Exchange, arguments, timeout).await?;
        let row = rows.first().ok_or_else(|| unexpected("no row"))?;
        parse_exchange(row)
    }

    async fn exchange_all(&self, all: &[Columns]) -> Result<Vec<Row>, PostgresRequestError> {
        fn each<'a, T>(all: &'a [Columns], part: impl Fn(&'a Columns) -> T) -> Vec<T> {
            all.iter().map(part).collect()
        }
        let inbox = self.shared.inbox();
        self.call(
            Call::ExchangeAll,
            &[
                (&inbox, Type::TEXT),
                (&each(all, |it| it.name.as_str()), Type::TEXT_ARRAY),
                (&each(all, |it| it.ended.as_deref()), Type::TEXT_ARRAY),
                (&each(all, |it| it.ended_token), Type::INT8_ARRAY),
                (&each(all, |it| it.buried), Type::BOOL_ARRAY),
                (&each(all, |it| it.id.as_deref()), Type::TEXT_ARRAY),
                (&each(all, |it| it.mode.0), Type::CHAR_ARRAY),
                (&each(all, |it| it.mode.1), Type::INT4_ARRAY),
                (&each(all, |it| it.mode.2), Type::INT4_ARRAY),
                (&each(all, |it| it.leases[0]), Type::INT8_ARRAY),
                (&each(all, |it| it.leases[1]), Type::INT8_ARRAY),
                (&each(all, |it| it.leases[2]), Type::INT8_ARRAY),
                (&each(all, |it| it.floor), Type::INT8_ARRAY),
                (&each(all, |it| it.waits), Type::BOOL_ARRAY),
                (&each(all, |it| it.signed.as_str()), Type::TEXT_ARRAY),
                (&each(all, |it| it.note.as_str()), Type::TEXT_ARRAY),
            ],
            REQUEST_TIMEOUT,
        )
        .await
    }
}

/// `None`: the batch failed, and the request is to be sent alone.
type BatchedReply = Option<ExchangeReply>;

impl Transport for PostgresConnection {
    type Request = Arc<PostgresRequest>;
    type Answer = BatchedReply;
    type Failed = PostgresRequestError;

    fn batch(&self) -> &Batcher<Self> {
        &self.batcher
    }

    fn runtime(&self) -> &Handle {
        &self.shared.runtime
    }

    fn goes_with(&self, leaving: &[Arc<PostgresRequest>], _: &Arc<PostgresRequest>) -> bool {
        leaving.len() < MAX_BATCH
    }

    async fn send(
        &self,
        requests: Vec<Arc<PostgresRequest>>,
    ) -> Result<Vec<BatchedReply>, PostgresRequestError> {
        // Rows are locked in the order of names, so that two batches do not deadlock.
        let mut order: Vec<usize> = (0..requests.len()).collect();
        order.sort_by(|a, b| requests[*a].name.as_str().cmp(requests[*b].name.as_str()));
        let columns: Vec<Columns> = order.iter().map(|index| requests[*index].columns()).collect();
        let rows = match self.exchange_all(&columns).await {
            Ok(rows) if rows.len() == columns.len() => rows,
            Ok(_) => return Err(unexpected("another number of rows")),
            Err(PostgresRequestError::Refused(_)) => return Ok(vec![None; requests.len()]),
            Err(error) => return Err(error),
        };
        let mut replies = vec![None; requests.len()];
        for (index, row) in order.into_iter().zip(&rows) {
            replies[index] = Some(parse_exchange(row)?);
        }
        Ok(replies)
    }

    fn silence(failed: &PostgresRequestError) -> Option<PostgresRequestError> {
        matches!(failed, PostgresRequestError::Unknown(_)).then(|| failed.clone())
    }
}

fn parse_exchange(row: &Row) -> Result<ExchangeReply, PostgresRequestError> {
    let refused = PostgresRequestError::Unknown;
    let released = column::<Option<bool>>(row, 0).map_err(refused)?.unwrap_or(false);
    Ok(ExchangeReply { released, claim: parse_claim_reply(row, 1).map_err(refused)? })
}

fn unexpected(what: &str) -> PostgresRequestError {
    PostgresRequestError::Unknown(unexpected_reply(what))
}
