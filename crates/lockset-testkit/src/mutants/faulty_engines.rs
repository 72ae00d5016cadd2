//! The engines of the mutants: each is a [`Layer`](crate::layer::Layer) with one fault.
//!
//! An engine is in the file of the first group of laws that fails on it. What several files use is
//! here.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use lockset::engine::{Claim, ClaimId, Engine, Grant, Renewal};
use lockset::{Result, Token};
use tokio::sync::oneshot;

mod exclusion;
mod identity;
mod inspection;
mod lease;
mod loss;
mod order;
mod primitives;
mod several;
mod sharing;
mod tokens;
mod withdrawal;

pub(crate) use exclusion::*;
pub(crate) use identity::*;
pub(crate) use inspection::*;
pub(crate) use lease::*;
pub(crate) use loss::*;
pub(crate) use order::*;
pub(crate) use primitives::*;
pub(crate) use several::*;
pub(crate) use sharing::*;
pub(crate) use tokens::*;
pub(crate) use withdrawal::*;

async fn renew_each<'a, F>(
    batch: &[(&'a Claim, &'a Grant)],
    renew: impl Fn(&'a Claim, &'a Grant) -> F,
) -> Vec<Result<Renewal>>
where
    F: Future<Output = Result<Renewal>>,
{
    let mut replies = Vec::new();
    for (claim, grant) in batch {
        replies.push(renew(claim, grant).await);
    }
    replies
}

/// Claims that hold by the grant of another claim.
#[derive(Debug, Default)]
pub(crate) struct BorrowedGrants(Mutex<BorrowedGrantsState>);

#[derive(Debug, Default)]
struct BorrowedGrantsState {
    waiting: Vec<(ClaimId, oneshot::Sender<(Claim, Grant)>)>,
    by: HashMap<ClaimId, Claim>,
}

impl BorrowedGrants {
    fn by(&self, claim: &Claim) -> Claim {
        self.0.lock().unwrap().by.get(&claim.id).unwrap_or(claim).clone()
    }

    fn swap(&self, claim: &Claim, by: Claim) {
        self.0.lock().unwrap().by.insert(claim.id, by);
    }

    async fn renew(
        &self,
        inner: &Arc<dyn Engine>,
        batch: &[(&Claim, &Grant)],
    ) -> Vec<Result<Renewal>> {
        renew_each(batch, |claim, grant| async {
            inner.renew(&[(&self.by(claim), grant)]).await.remove(0)
        })
        .await
    }
}

pub(crate) type Tokens = Mutex<HashMap<ClaimId, Token>>;

fn with_extra_ttl(claim: &Claim, grant: Grant) -> Grant {
    Grant { valid_until: grant.valid_until + claim.ttl, ..grant }
}
