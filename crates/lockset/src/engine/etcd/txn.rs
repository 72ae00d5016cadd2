//! Small pieces of transactions.

use super::keys::Keys;
use super::rpc::{
    Compare, DeleteRangeRequest, KeyValue, PutRequest, RangeRequest, RequestOp, ResponseOp,
    TxnRequest, TxnResponse, compare, range_request, request_op, response_op,
};

/// That a key was created at this revision; zero: that it does not exist.
pub(super) fn created(key: &[u8], revision: i64) -> Compare {
    Compare {
        result: compare::CompareResult::Equal.into(),
        target: compare::CompareTarget::Create.into(),
        key: key.to_vec(),
        target_union: Some(compare::TargetUnion::CreateRevision(revision)),
        range_end: Vec::new(),
    }
}

/// That a key was last changed at this revision; zero: that it does not exist.
pub(super) fn unchanged(key: &[u8], revision: i64) -> Compare {
    Compare {
        target: compare::CompareTarget::Mod.into(),
        target_union: Some(compare::TargetUnion::ModRevision(revision)),
        ..created(key, 0)
    }
}

/// That there is no such key.
pub(super) fn nobody(keys: &Keys) -> Compare {
    Compare { range_end: keys.end.clone(), ..created(&keys.first, 0) }
}

/// That none of these keys was made or changed after this revision; some may be gone.
pub(super) fn no_news(keys: &Keys, since: i64) -> Compare {
    Compare {
        result: compare::CompareResult::Less.into(),
        range_end: keys.end.clone(),
        ..unchanged(&keys.first, since.saturating_add(1))
    }
}

pub(super) fn put(key: &[u8], value: Vec<u8>, lease: i64) -> RequestOp {
    let put = PutRequest { key: key.to_vec(), value, lease, ..PutRequest::default() };
    op(request_op::Request::RequestPut(put))
}

/// Another value for a key that exists and keeps its lease.
pub(super) fn rewrite(key: &[u8], value: Vec<u8>) -> RequestOp {
    let put = PutRequest { key: key.to_vec(), value, ignore_lease: true, ..PutRequest::default() };
    op(request_op::Request::RequestPut(put))
}

pub(super) fn delete(key: &[u8]) -> RequestOp {
    let delete = DeleteRangeRequest { key: key.to_vec(), ..DeleteRangeRequest::default() };
    op(request_op::Request::RequestDeleteRange(delete))
}

pub(super) fn read(key: &[u8]) -> RequestOp {
    range(&Keys::one(key.to_vec()))
}

pub(super) fn range(keys: &Keys) -> RequestOp {
    op(request_op::Request::RequestRange(reading(keys)))
}

/// The last `limit` of these keys to be created (all if zero) before `revision` (whenever if zero),
/// the newest first.
pub(super) fn newest(keys: &Keys, limit: i64, before: i64) -> RequestOp {
    op(request_op::Request::RequestRange(RangeRequest {
        limit,
        max_create_revision: (before - 1).max(0),
        sort_order: range_request::SortOrder::Descend.into(),
        sort_target: range_request::SortTarget::Create.into(),
        ..reading(keys)
    }))
}

pub(super) fn nested(txn: TxnRequest) -> RequestOp {
    op(request_op::Request::RequestTxn(txn))
}

/// A transaction without a condition.
pub(super) fn always(success: Vec<RequestOp>) -> TxnRequest {
    TxnRequest { success, ..TxnRequest::default() }
}

fn reading(keys: &Keys) -> RangeRequest {
    RangeRequest { key: keys.first.clone(), range_end: keys.end.clone(), ..RangeRequest::default() }
}

fn op(request: request_op::Request) -> RequestOp {
    RequestOp { request: Some(request) }
}

/// The keys that the answer's part with this number read.
pub(super) fn kvs(answer: &TxnResponse, part: usize) -> &[KeyValue] {
    match answer.responses.get(part) {
        Some(ResponseOp { response: Some(response_op::Response::ResponseRange(range)) }) => {
            &range.kvs
        }
        _ => &[],
    }
}

/// The answers to nested transactions.
pub(super) fn parts(answer: TxnResponse) -> Vec<TxnResponse> {
    let header = answer.header;
    let part = |op: ResponseOp| match op.response {
        Some(response_op::Response::ResponseTxn(part)) => TxnResponse { header, ..part },
        _ => TxnResponse::default(),
    };
    answer.responses.into_iter().map(part).collect()
}

/// The store's revision when it answered: that of the change if there was one.
pub(super) fn revision(answer: &TxnResponse) -> i64 {
    answer.header.as_ref().map_or(0, |header| header.revision)
}

/// The term of the leader by which it answered.
pub(super) fn term(answer: &TxnResponse) -> u64 {
    answer.header.as_ref().map_or(0, |header| header.raft_term)
}
