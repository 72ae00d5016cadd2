//! Transactions that are sent together: see `crate::engine::common::batch`.
//!
//! A batch costs the servers one round of consensus. Two transactions of the same queue are never
//! in one batch, whether of one name or, with raw names, of a name inside another: the keys they
//! create would have the same revision, and so no order.

use std::sync::Arc;

use tokio::runtime::Handle;

use super::connection::{EtcdConnection, REQUEST_TIMEOUT};
use super::keys::EtcdLayout;
use super::request_error::{EtcdErrorKind, EtcdRequestError, EtcdResult};
use super::rpc::{TxnRequest, TxnResponse};
use super::txn::{nested, nested_replies, unconditional};
use crate::engine::common::batch::{Batcher, Entered, Transport};
use crate::name::Name;

/// Maximum transactions per batch; a server takes 128 operations, those of the nested transactions
/// included.
const MAX_TXNS: usize = 96;

/// Sends the transactions that create and release claims.
#[derive(Debug)]
pub(super) struct TxnBatcher {
    connection: Arc<EtcdConnection>,
    runtime: Handle,
    layout: EtcdLayout,
    batch: Batcher<Self>,
}

impl TxnBatcher {
    pub(super) fn new(
        connection: Arc<EtcdConnection>,
        runtime: Handle,
        layout: EtcdLayout,
    ) -> Arc<Self> {
        Arc::new(Self { connection, runtime, layout, batch: Batcher::default() })
    }

    /// Sends a transaction about a name once, alone or in a batch.
    pub(super) async fn send_txn(
        self: &Arc<Self>,
        name: &Name,
        txn: TxnRequest,
    ) -> EtcdResult<TxnResponse> {
        let request = (name.clone(), txn);
        let behind = match Batcher::enter(self, &request) {
            Entered::Alone(turn) => {
                let result = self.connection.txn_once(request.1, REQUEST_TIMEOUT).await;
                return result.inspect_err(|error| turn.on_failure(error));
            }
            Entered::Behind(behind) => behind,
        };
        match behind.answer().await {
            // Perhaps because of another transaction: alone it gets the reason of its own.
            Some(Err(error))
                if !error.outcome_unknown && error.kind != EtcdErrorKind::Unavailable =>
            {
                self.connection.txn_once(request.1, REQUEST_TIMEOUT).await
            }
            Some(result) => result,
            None => Err(EtcdRequestError::client_closed()),
        }
    }
}

impl Transport for TxnBatcher {
    type Request = (Name, TxnRequest);
    type Answer = TxnResponse;
    type Failed = EtcdRequestError;

    fn batch(&self) -> &Batcher<Self> {
        &self.batch
    }

    fn runtime(&self) -> &Handle {
        &self.runtime
    }

    fn goes_with(&self, batch: &[Self::Request], (name, _): &Self::Request) -> bool {
        can_join(&self.layout, batch, name)
    }

    async fn send(&self, requests: Vec<Self::Request>) -> EtcdResult<Vec<TxnResponse>> {
        let mut txns: Vec<TxnRequest> = requests.into_iter().map(|(_, txn)| txn).collect();
        if txns.len() == 1
            && let Some(txn) = txns.pop()
        {
            return self.connection.txn_once(txn, REQUEST_TIMEOUT).await.map(|reply| vec![reply]);
        }
        let batch = unconditional(txns.into_iter().map(nested).collect());
        self.connection.txn_once(batch, REQUEST_TIMEOUT).await.map(nested_replies)
    }

    fn silence(error: &EtcdRequestError) -> Option<EtcdRequestError> {
        (error.kind == EtcdErrorKind::Unavailable).then(|| error.as_not_sent())
    }
}

fn can_join(layout: &EtcdLayout, batch: &[(Name, TxnRequest)], name: &Name) -> bool {
    batch.len() < MAX_TXNS && !batch.iter().any(|(other, _)| layout.share_queue(other, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Which of these form the first batch, and which do not.
    fn partition<'n>(has_raw_names: bool, names: &[&'n str]) -> (Vec<&'n str>, Vec<&'n str>) {
        let layout = EtcdLayout::new("p", has_raw_names);
        let mut batch = Vec::new();
        names.iter().partition(|name| {
            let name: Name = name.parse().unwrap();
            let joins = can_join(&layout, &batch, &name);
            if joins {
                batch.push((name, TxnRequest::default()));
            }
            joins
        })
    }

    #[test]
    fn two_of_one_name_are_never_in_one_batch() {
        let names = ["a", "b", "a", "c", "a/b", "a"];
        assert_eq!(partition(false, &names), (vec!["a", "b", "c", "a/b"], vec!["a", "a"]));
    }

    #[test]
    fn raw_names_inside_each_other_are_never_in_one_batch() {
        let names = ["a/b", "x", "a", "a/c", "ab", "a/b/c", "a/b"];
        let expected = (vec!["a/b", "x", "a/c", "ab"], vec!["a", "a/b/c", "a/b"]);
        assert_eq!(partition(true, &names), expected);
    }
}
