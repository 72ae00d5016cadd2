//! Transactions that travel together: see `crate::engine::common::batch`.
//!
//! A crowd costs the servers one round of agreement. Never two that meet, because they are of one
//! name or, with raw names, one name lies within the other: what they create would have the same
//! revision, and nobody could tell who was first.

use std::sync::Arc;

use tokio::runtime::Handle;

use super::keys::Layout;
use super::link::{Failed, Link, PATIENCE, What};
use super::rpc::{TxnRequest, TxnResponse};
use super::txn::{always, nested, parts};
use crate::engine::common::batch::{Batcher, Entered, Transport};
use crate::name::Name;

/// At most so many travel together; a server takes 128 operations, those of the parts included.
const MOST: usize = 96;

/// What carries the transactions that give and take.
#[derive(Debug)]
pub(super) struct TxnBatcher {
    link: Arc<Link>,
    runtime: Handle,
    layout: Layout,
    batch: Batcher<Self>,
}

impl TxnBatcher {
    pub(super) fn new(link: Arc<Link>, runtime: Handle, layout: Layout) -> Arc<Self> {
        Arc::new(Self { link, runtime, layout, batch: Batcher::default() })
    }

    /// Sends a transaction about a name once, alone or with others.
    pub(super) async fn act(
        self: &Arc<Self>,
        name: &Name,
        txn: TxnRequest,
    ) -> Result<TxnResponse, Failed> {
        let passenger = (name.clone(), txn);
        let behind = match Batcher::enter(self, &passenger) {
            Entered::Alone(turn) => {
                let acted = self.link.txn_once(passenger.1, PATIENCE).await;
                return acted.inspect_err(|failed| turn.heed(failed));
            }
            Entered::Behind(behind) => behind,
        };
        match behind.answer().await {
            // Perhaps because of another one: alone it is told its own reason.
            Some(Err(failed)) if !failed.unknown && failed.what != What::Silent => {
                self.link.txn_once(passenger.1, PATIENCE).await
            }
            Some(acted) => acted,
            None => {
                let error = super::link::failed("this client was closed".to_owned(), false);
                Err(Failed::unknown(error))
            }
        }
    }
}

impl Transport for TxnBatcher {
    type Request = (Name, TxnRequest);
    type Answer = TxnResponse;
    type Failed = Failed;

    fn batch(&self) -> &Batcher<Self> {
        &self.batch
    }

    fn runtime(&self) -> &Handle {
        &self.runtime
    }

    fn goes_with(&self, leaving: &[Self::Request], (name, _): &Self::Request) -> bool {
        can_join(&self.layout, leaving, name)
    }

    async fn send(&self, requests: Vec<Self::Request>) -> Result<Vec<TxnResponse>, Failed> {
        let mut txns: Vec<TxnRequest> = requests.into_iter().map(|(_, txn)| txn).collect();
        if txns.len() == 1
            && let Some(txn) = txns.pop()
        {
            return self.link.txn_once(txn, PATIENCE).await.map(|answer| vec![answer]);
        }
        let together = always(txns.into_iter().map(nested).collect());
        self.link.txn_once(together, PATIENCE).await.map(parts)
    }

    fn again(failed: &Failed) -> Failed {
        failed.again()
    }

    fn silence(failed: &Failed) -> Option<Failed> {
        (failed.what == What::Silent).then(|| failed.unsent_too())
    }
}

fn can_join(layout: &Layout, leaving: &[(Name, TxnRequest)], name: &Name) -> bool {
    leaving.len() < MOST && !leaving.iter().any(|(other, _)| layout.meet(other, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who of these leave together, and who stay.
    fn parted<'n>(raw: bool, names: &[&'n str]) -> (Vec<&'n str>, Vec<&'n str>) {
        let layout = Layout::new("p", raw);
        let mut leaving = Vec::new();
        names.iter().partition(|name| {
            let name: Name = name.parse().unwrap();
            let joins = can_join(&layout, &leaving, &name);
            if joins {
                leaving.push((name, TxnRequest::default()));
            }
            joins
        })
    }

    #[test]
    fn two_of_one_name_never_travel_together() {
        let names = ["a", "b", "a", "c", "a/b", "a"];
        assert_eq!(parted(false, &names), (vec!["a", "b", "c", "a/b"], vec!["a", "a"]));
    }

    #[test]
    fn raw_names_within_each_other_never_travel_together() {
        let names = ["a/b", "x", "a", "a/c", "ab", "a/b/c", "a/b"];
        let expected = (vec!["a/b", "x", "a/c", "ab"], vec!["a", "a/b/c", "a/b"]);
        assert_eq!(parted(true, &names), expected);
    }
}
