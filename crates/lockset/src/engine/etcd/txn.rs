//! Building transactions, and reading their replies.

use super::keys::KeyRange;
use super::rpc::{
    Compare, DeleteRangeRequest, KeyValue, PutRequest, RangeRequest, RequestOp, ResponseOp,
    TxnRequest, TxnResponse, compare, range_request, request_op, response_op,
};

/// Compares: the key was created at this revision; zero: it does not exist.
pub(super) fn create_revision_is(key: &[u8], revision: i64) -> Compare {
    Compare {
        result: compare::CompareResult::Equal.into(),
        target: compare::CompareTarget::Create.into(),
        key: key.to_vec(),
        target_union: Some(compare::TargetUnion::CreateRevision(revision)),
        range_end: Vec::new(),
    }
}

/// Compares: the key was last written at this revision; zero: it does not exist.
pub(super) fn mod_revision_is(key: &[u8], revision: i64) -> Compare {
    Compare {
        target: compare::CompareTarget::Mod.into(),
        target_union: Some(compare::TargetUnion::ModRevision(revision)),
        ..create_revision_is(key, 0)
    }
}

/// Compares: none of these keys exists.
pub(super) fn range_is_empty(keys: &KeyRange) -> Compare {
    Compare { range_end: keys.end.clone(), ..create_revision_is(&keys.first, 0) }
}

/// Compares: none of these keys was written after this revision. Some may have been deleted.
pub(super) fn range_unchanged_since(keys: &KeyRange, since: i64) -> Compare {
    Compare {
        result: compare::CompareResult::Less.into(),
        range_end: keys.end.clone(),
        ..mod_revision_is(&keys.first, since.saturating_add(1))
    }
}

pub(super) fn put(key: &[u8], value: Vec<u8>, lease: i64) -> RequestOp {
    let put = PutRequest { key: key.to_vec(), value, lease, ..PutRequest::default() };
    op(request_op::Request::RequestPut(put))
}

/// Writes another value into a key that exists and keeps its lease.
pub(super) fn put_keeping_lease(key: &[u8], value: Vec<u8>) -> RequestOp {
    let put = PutRequest { key: key.to_vec(), value, ignore_lease: true, ..PutRequest::default() };
    op(request_op::Request::RequestPut(put))
}

pub(super) fn delete(key: &[u8]) -> RequestOp {
    let delete = DeleteRangeRequest { key: key.to_vec(), ..DeleteRangeRequest::default() };
    op(request_op::Request::RequestDeleteRange(delete))
}

pub(super) fn get(key: &[u8]) -> RequestOp {
    range(&KeyRange::single(key.to_vec()))
}

pub(super) fn range(keys: &KeyRange) -> RequestOp {
    op(request_op::Request::RequestRange(range_request_for(keys)))
}

/// Reads the `limit` newest of these keys (all if zero) created before revision `before` (any if
/// zero), newest first.
pub(super) fn newest(keys: &KeyRange, limit: i64, before: i64) -> RequestOp {
    op(request_op::Request::RequestRange(RangeRequest {
        limit,
        max_create_revision: (before - 1).max(0),
        sort_order: range_request::SortOrder::Descend.into(),
        sort_target: range_request::SortTarget::Create.into(),
        ..range_request_for(keys)
    }))
}

pub(super) fn nested(txn: TxnRequest) -> RequestOp {
    op(request_op::Request::RequestTxn(txn))
}

/// A transaction without a condition.
pub(super) fn unconditional(success: Vec<RequestOp>) -> TxnRequest {
    TxnRequest { success, ..TxnRequest::default() }
}

/// The same reads from the server's own state, which may be older than what others have seen.
pub(super) fn serializable(mut read: TxnRequest) -> TxnRequest {
    for op in &mut read.success {
        if let Some(request_op::Request::RequestRange(range)) = &mut op.request {
            range.serializable = true;
        }
    }
    read
}

fn range_request_for(keys: &KeyRange) -> RangeRequest {
    RangeRequest { key: keys.first.clone(), range_end: keys.end.clone(), ..RangeRequest::default() }
}

fn op(request: request_op::Request) -> RequestOp {
    RequestOp { request: Some(request) }
}

/// The keys that the operation with this index read.
pub(super) fn kvs(reply: &TxnResponse, index: usize) -> &[KeyValue] {
    match reply.responses.get(index) {
        Some(ResponseOp { response: Some(response_op::Response::ResponseRange(range)) }) => {
            &range.kvs
        }
        _ => &[],
    }
}

/// The replies to nested transactions.
pub(super) fn nested_replies(reply: TxnResponse) -> Vec<TxnResponse> {
    let header = reply.header;
    let part = |op: ResponseOp| match op.response {
        Some(response_op::Response::ResponseTxn(part)) => TxnResponse { header, ..part },
        _ => TxnResponse::default(),
    };
    reply.responses.into_iter().map(part).collect()
}

/// The store's revision at the reply: that of the change if there was one.
pub(super) fn revision_of(reply: &TxnResponse) -> i64 {
    reply.header.as_ref().map_or(0, |header| header.revision)
}

/// The raft term of the reply.
pub(super) fn term_of(reply: &TxnResponse) -> u64 {
    reply.header.as_ref().map_or(0, |header| header.raft_term)
}
