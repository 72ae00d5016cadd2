//! The engines of the mutants: each is a [`Layer`] with one fault.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures_core::stream::BoxStream;
use futures_util::StreamExt;
use lockset::engine::{
    Admission, Amend, Capabilities, Claim, ClaimId, Engine, Event, Grant, Hint, Renewal, Scope,
    Swap, Version, Wait, drift, trusted_until,
};
use lockset::{
    Break, Error, Holder, LockState, LossReason, Mode, Name, Note, Prefix, Result, Token,
};
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use crate::layer::{Layer, fenced_node};

/// Locks another name than the claim says.
#[derive(Debug)]
pub(crate) struct RenamesClaims {
    pub(crate) inner: Arc<dyn Engine>,
    pub(crate) rename: fn(&Claim) -> String,
}

/// A name of its own for each claim.
pub(crate) fn own_name(claim: &Claim) -> String {
    format!("{}/{}", claim.name, claim.id)
}

pub(crate) fn one_name(_: &Claim) -> String {
    "same".to_owned()
}

pub(crate) fn name_by_mode(claim: &Claim) -> String {
    match claim.mode {
        Mode::Permits { limit, .. } => format!("{}/{limit}", claim.name),
        _ => claim.name.to_string(),
    }
}

impl RenamesClaims {
    fn inner_claim(&self, claim: &Claim) -> Claim {
        Claim { name: (self.rename)(claim).parse().unwrap(), ..claim.clone() }
    }
}

#[async_trait]
impl Layer for RenamesClaims {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.inner
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        self.inner.acquire(&self.inner_claim(claim), wait).await
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        renew_each(batch, |claim, grant| async {
            self.inner.renew(&[(&self.inner_claim(claim), grant)]).await.remove(0)
        })
        .await
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let next = next.map(|next| self.inner_claim(next));
        self.inner.release(&self.inner_claim(claim), grant, next.as_ref()).await
    }

    async fn withdraw(&self, claim: &Claim) -> Result<()> {
        self.inner.withdraw(&self.inner_claim(claim)).await
    }
}

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

/// The lease at the backend has another length than the client is told.
#[derive(Debug)]
pub(crate) struct AlteredLeases {
    pub(crate) inner: Arc<dyn Engine>,
    pub(crate) actual_ttl: fn(Duration) -> Duration,
}

impl AlteredLeases {
    fn inner_claim(&self, claim: &Claim) -> Claim {
        Claim { ttl: (self.actual_ttl)(claim.ttl), ..claim.clone() }
    }

    fn reported(&self, claim: &Claim, grant: Grant) -> Grant {
        let actual_ttl = (self.actual_ttl)(claim.ttl);
        let begin = grant.valid_until.saturating_sub(actual_ttl.saturating_sub(drift(actual_ttl)));
        Grant { valid_until: trusted_until(begin, claim.ttl), ..grant }
    }
}

#[async_trait]
impl Layer for AlteredLeases {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.inner
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let granted = self.inner.acquire(&self.inner_claim(claim), wait).await?;
        Ok(granted.map(|grant| self.reported(claim, grant)))
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        renew_each(batch, |claim, grant| async {
            let renewed = self.inner.renew(&[(&self.inner_claim(claim), grant)]).await.remove(0)?;
            Ok(renewed.map(|renewed| self.reported(claim, renewed)))
        })
        .await
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let inner_next = next.map(|next| self.inner_claim(next));
        let granted = self.inner.release(claim, grant, inner_next.as_ref()).await?;
        Ok(granted.zip(next).map(|(grant, next)| self.reported(next, grant)))
    }
}

/// Reports a release that did not happen.
#[derive(Debug)]
pub(crate) struct IgnoresRelease(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for IgnoresRelease {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn release(&self, _: &Claim, _: &Grant, _: Option<&Claim>) -> Result<Option<Grant>> {
        Ok(None)
    }
}

/// Releases, but does not enqueue the next claim.
#[derive(Debug)]
pub(crate) struct IgnoresNextOnRelease(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for IgnoresNextOnRelease {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        _: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        self.0.release(claim, grant, None).await
    }
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

/// Serves the last waiter first.
#[derive(Debug)]
pub(crate) struct ServesLastFirst(pub(crate) Arc<dyn Engine>, pub(crate) Arc<BorrowedGrants>);

#[async_trait]
impl Layer for ServesLastFirst {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        if wait == Wait::No {
            return self.0.acquire(claim, wait).await;
        }
        let (sender, mut served) = oneshot::channel();
        self.1.0.lock().unwrap().waiting.push((claim.id, sender));
        tokio::select! {
            granted = self.0.acquire(claim, wait) => {
                let grant = match granted? {
                    Admission::Granted(grant) => grant,
                    other => return Ok(other),
                };
                let last = self.1.0.lock().unwrap().waiting.pop();
                // Every waiter has an entry, and these laws cancel none.
                let (_, last) = last.unwrap();
                last.send((claim.clone(), grant)).unwrap();
            }
            by = &mut served => {
                let (by, grant) = by.unwrap();
                self.1.swap(claim, by);
                return Ok(Admission::Granted(grant));
            }
        }
        let (by, grant) = served.await.unwrap();
        self.1.swap(claim, by);
        Ok(Admission::Granted(grant))
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        self.1.renew(&self.0, batch).await
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        self.0.release(&self.1.by(claim), grant, next).await
    }
}

/// A release with a next claim hands over to it, although others wait.
#[derive(Debug)]
pub(crate) struct PrefersOwnProcess(pub(crate) Arc<dyn Engine>, pub(crate) Arc<BorrowedGrants>);

#[async_trait]
impl Layer for PrefersOwnProcess {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        self.1.renew(&self.0, batch).await
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let by = self.1.by(claim);
        let Some(next) = next else { return self.0.release(&by, grant, None).await };
        let token = Token::new(grant.token.get() + 1);
        self.1.swap(next, by.clone());
        fenced_node(&self.0)?.raise(&by, grant, token).await.map(Some)
    }
}

/// A release admits the first waiter and also the second.
#[derive(Debug)]
pub(crate) struct AdmitsTwo(pub(crate) Arc<dyn Engine>, pub(crate) Arc<BorrowedGrants>);

#[async_trait]
impl Layer for AdmitsTwo {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let (sender, served) = oneshot::channel();
        self.1.0.lock().unwrap().waiting.push((claim.id, sender));
        tokio::select! {
            biased;
            granted = self.0.acquire(claim, wait) => {
                self.1.0.lock().unwrap().waiting.retain(|(id, _)| *id != claim.id);
                granted
            }
            Ok((_, grant)) = served => Ok(Admission::Granted(grant)),
        }
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let released = self.0.release(claim, grant, next).await;
        let mut swaps = self.1.0.lock().unwrap();
        if swaps.waiting.len() > 1 {
            let (_, second) = swaps.waiting.remove(1);
            let forged = Grant { token: Token::new(grant.token.get() + 9), ..grant.clone() };
            // It may have been served meanwhile.
            let _ = second.send((claim.clone(), forged));
        }
        released
    }
}

/// Reports a renewal that did not happen.
#[derive(Debug)]
pub(crate) struct RenewsNothing(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for RenewsNothing {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        let later = |(claim, grant): &(&Claim, &Grant)| {
            let valid_until = grant.valid_until + claim.ttl / 2;
            Ok(Renewal::Renewed(Grant { valid_until, ..(*grant).clone() }))
        };
        batch.iter().map(later).collect()
    }
}

/// Ignores withdrawals.
#[derive(Debug)]
pub(crate) struct IgnoresWithdrawals(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for IgnoresWithdrawals {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn withdraw(&self, _: &Claim) -> Result<()> {
        Ok(())
    }
}

/// A release frees the name, whichever claim holds it.
#[derive(Debug)]
pub(crate) struct ReleasesByName(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for ReleasesByName {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let released = self.0.release(claim, grant, next).await;
        if released.is_err() {
            self.0.force_release(&claim.name, Break::Now).await?;
        }
        released
    }
}

pub(crate) type Tokens = Mutex<HashMap<ClaimId, Token>>;

/// Checks the id of a renewal, but not its token.
#[derive(Debug)]
pub(crate) struct RenewsById(pub(crate) Arc<dyn Engine>, pub(crate) Arc<Tokens>);

#[async_trait]
impl Layer for RenewsById {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let granted = self.0.acquire(claim, wait).await?;
        if let Admission::Granted(grant) = &granted {
            self.1.lock().unwrap().insert(claim.id, grant.token);
        }
        Ok(granted)
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        renew_each(batch, |claim, grant| async {
            let known = self.1.lock().unwrap().get(&claim.id).copied();
            let grant = Grant { token: known.unwrap_or(grant.token), ..grant.clone() };
            self.0.renew(&[(claim, &grant)]).await.remove(0)
        })
        .await
    }
}

/// Treats a repeated request as a new grant.
#[derive(Debug)]
pub(crate) struct GrantsAgain(pub(crate) Arc<dyn Engine>, pub(crate) Arc<Tokens>);

#[async_trait]
impl Layer for GrantsAgain {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let grant = match self.0.acquire(claim, wait).await? {
            Admission::Granted(grant) => grant,
            other => return Ok(other),
        };
        let first = self.1.lock().unwrap().insert(claim.id, grant.token).is_none();
        if first {
            return Ok(Admission::Granted(grant));
        }
        let token = Token::new(grant.token.get() + 1);
        fenced_node(&self.0)?.raise(claim, &grant, token).await.map(Admission::Granted)
    }
}

/// Forgets withdrawals, so that a withdrawn claim can be granted.
#[derive(Debug)]
pub(crate) struct ForgetsWithdrawals(
    pub(crate) Arc<dyn Engine>,
    pub(crate) Arc<Mutex<HashSet<ClaimId>>>,
);

#[async_trait]
impl Layer for ForgetsWithdrawals {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let mut claim = claim.clone();
        if self.1.lock().unwrap().contains(&claim.id) {
            claim.id = ClaimId::random();
        }
        self.0.acquire(&claim, wait).await
    }

    async fn withdraw(&self, claim: &Claim) -> Result<()> {
        self.1.lock().unwrap().insert(claim.id);
        self.0.withdraw(claim).await
    }
}

/// Gives every claim the same token.
#[derive(Debug)]
pub(crate) struct SameTokenForAll(pub(crate) Arc<dyn Engine>, pub(crate) Arc<Tokens>);

impl SameTokenForAll {
    fn reported(&self, claim: &Claim, grant: Grant) -> Grant {
        self.1.lock().unwrap().insert(claim.id, grant.token);
        Grant { token: Token::new(7), ..grant }
    }

    fn inner_grant(&self, claim: &Claim, grant: &Grant) -> Grant {
        let token = self.1.lock().unwrap().get(&claim.id).copied();
        Grant { token: token.unwrap_or(grant.token), ..grant.clone() }
    }
}

#[async_trait]
impl Layer for SameTokenForAll {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let granted = self.0.acquire(claim, wait).await?;
        Ok(granted.map(|grant| self.reported(claim, grant)))
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        renew_each(batch, |claim, grant| async {
            let grant = self.inner_grant(claim, grant);
            let renewed = self.0.renew(&[(claim, &grant)]).await.remove(0)?;
            Ok(renewed.map(|renewed| self.reported(claim, renewed)))
        })
        .await
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let granted = self.0.release(claim, &self.inner_grant(claim, grant), next).await?;
        Ok(granted.zip(next).map(|(grant, next)| self.reported(next, grant)))
    }
}

/// Claims to be durable, but restarts its tokens.
#[derive(Debug)]
pub(crate) struct RestartsTokens(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for RestartsTokens {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    fn capabilities(&self) -> Capabilities {
        let mut can = self.0.capabilities();
        can.durable = true;
        can
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let claim = Claim { floor: Some(Token::new(1)), ..claim.clone() };
        self.0.acquire(&claim, wait).await
    }
}

/// Ignores the floor of a claim.
#[derive(Debug)]
pub(crate) struct IgnoresFloors(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for IgnoresFloors {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        self.0.acquire(&Claim { floor: None, ..claim.clone() }, wait).await
    }
}

/// Reports a raised fence, but does not raise it.
#[derive(Debug)]
pub(crate) struct RaisesNothing(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for RaisesNothing {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn raise(&self, _: &Claim, grant: &Grant, to: Token) -> Result<Grant> {
        Ok(Grant { token: to, ..grant.clone() })
    }
}

/// Allows a fence to be lowered.
#[derive(Debug)]
pub(crate) struct LowersFence(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for LowersFence {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn raise(&self, claim: &Claim, grant: &Grant, to: Token) -> Result<Grant> {
        match to < grant.token {
            true => Ok(Grant { token: to, ..grant.clone() }),
            false => fenced_node(&self.0)?.raise(claim, grant, to).await,
        }
    }
}

/// Promises twice the lease that it grants.
#[derive(Debug)]
pub(crate) struct OverpromisesLeases(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for OverpromisesLeases {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let granted = self.0.acquire(claim, wait).await?;
        Ok(granted.map(|grant| with_extra_ttl(claim, grant)))
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        renew_each(batch, |claim, grant| async {
            let renewed = self.0.renew(&[(claim, grant)]).await.remove(0)?;
            Ok(renewed.map(|renewed| with_extra_ttl(claim, renewed)))
        })
        .await
    }
}

/// Reports a grant only after its lease has ended, as if the lease had just begun.
#[derive(Debug)]
pub(crate) struct ReportsGrantLate(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for ReportsGrantLate {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let granted = self.0.acquire(claim, wait).await?;
        tokio::time::sleep(claim.ttl).await;
        Ok(granted.map(|grant| with_extra_ttl(claim, grant)))
    }
}

/// Forgets the locks of a client that was silent for a while, long before their leases end, like a
/// server that ends a session together with its connection.
#[derive(Debug)]
pub(crate) struct ForgetsSilentClients {
    inner: Arc<dyn Engine>,
    heard: Mutex<Instant>,
}

impl ForgetsSilentClients {
    pub(crate) fn new(inner: Arc<dyn Engine>) -> Self {
        Self { inner, heard: Mutex::new(Instant::now()) }
    }

    /// Whether the client was silent for longer than the interval between two renewals.
    fn was_silent(&self, ttl: Duration) -> bool {
        let before = std::mem::replace(&mut *self.heard.lock().unwrap(), Instant::now());
        before.elapsed() > ttl * 2 / 5
    }
}

#[async_trait]
impl Layer for ForgetsSilentClients {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.inner
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        self.was_silent(claim.ttl);
        self.inner.acquire(claim, wait).await
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        renew_each(batch, |claim, grant| async {
            match self.was_silent(claim.ttl) {
                true => Ok(Renewal::Lost(LossReason::Forgotten)),
                false => self.inner.renew(&[(claim, grant)]).await.remove(0),
            }
        })
        .await
    }
}

/// Promises much more than it grants, but only for fixed leases, which are not renewed.
#[derive(Debug)]
pub(crate) struct OverpromisesFixedLeases(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for OverpromisesFixedLeases {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let granted = self.0.acquire(claim, wait).await?;
        Ok(granted.map(|grant| match claim.fixed {
            true => with_extra_ttl(claim, with_extra_ttl(claim, grant)),
            false => grant,
        }))
    }
}

fn with_extra_ttl(claim: &Claim, grant: Grant) -> Grant {
    Grant { valid_until: grant.valid_until + claim.ttl, ..grant }
}

/// Emits no events.
#[derive(Debug)]
pub(crate) struct EmitsNoEvents(pub(crate) Arc<dyn Engine>);

impl Layer for EmitsNoEvents {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    fn events(&self) -> BoxStream<'static, Event> {
        futures_util::stream::pending().boxed()
    }
}

/// Force-releases immediately instead of at the end of the lease.
#[derive(Debug)]
pub(crate) struct BreaksAtOnce(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for BreaksAtOnce {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn force_release(&self, name: &Name, _: Break) -> Result<Vec<Holder>> {
        self.0.force_release(name, Break::Now).await
    }
}

/// Lists the holders, but does not force-release.
#[derive(Debug)]
pub(crate) struct BreaksNothing(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for BreaksNothing {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn force_release(&self, name: &Name, _: Break) -> Result<Vec<Holder>> {
        let states = self.0.list(&name.as_str().parse()?).await?;
        Ok(states.into_iter().flat_map(|state| state.holders).collect())
    }

    async fn inspect(&self, name: &Name) -> Result<LockState> {
        // Other clients see the expected effect, so that the law gets to check the holder.
        let mut state = self.0.inspect(name).await?;
        state.holders.iter_mut().for_each(|holder| holder.revoked = true);
        Ok(state)
    }
}

/// Keeps the queue entry of a waiter that timed out.
#[derive(Debug)]
pub(crate) struct KeepsTimedOutWaiters(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for KeepsTimedOutWaiters {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let Wait::Until(_) = wait else { return self.0.acquire(claim, wait).await };
        let patience = tokio::time::sleep(claim.ttl / 32);
        tokio::select! {
            granted = self.0.acquire(claim, Wait::Forever) => granted,
            () = patience => Ok(Admission::NotInTime),
        }
    }
}

/// Its clients do not agree on the identity of their backend, so they order it differently.
#[derive(Debug)]
pub(crate) struct InconsistentIdentity(pub(crate) Arc<dyn Engine>, pub(crate) &'static str);

impl InconsistentIdentity {
    /// The first backend is "m"; the clients of the second call it "a" and "z" in turn.
    pub(crate) fn new(inner: Arc<dyn Engine>, made: Arc<AtomicUsize>) -> Self {
        let name = match made.fetch_add(1, Ordering::Relaxed) {
            0 => "m",
            odd if odd % 2 == 1 => "a",
            _ => "z",
        };
        Self(inner, name)
    }
}

impl Layer for InconsistentIdentity {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    fn identity(&self) -> String {
        self.1.to_owned()
    }
}

/// Treats readers as writers.
#[derive(Debug)]
pub(crate) struct TreatsReadersAsWriters(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for TreatsReadersAsWriters {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        self.0.acquire(&Claim { mode: Mode::Exclusive, ..claim.clone() }, wait).await
    }
}

/// Treats writers as readers.
#[derive(Debug)]
pub(crate) struct TreatsWritersAsReaders(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for TreatsWritersAsReaders {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        self.0.acquire(&Claim { mode: Mode::Shared, ..claim.clone() }, wait).await
    }
}

/// Readers that do not wait pass those that do.
#[derive(Debug)]
pub(crate) struct ReadersJumpQueue(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for ReadersJumpQueue {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        jump_queue(&*self.0, claim, wait, claim.mode == Mode::Shared).await
    }
}

/// Requests for one permit pass those for more.
#[derive(Debug)]
pub(crate) struct SmallRequestsJumpQueue(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for SmallRequestsJumpQueue {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let small = matches!(claim.mode, Mode::Permits { take: 1, .. });
        jump_queue(&*self.0, claim, wait, small).await
    }
}

async fn jump_queue(
    inner: &dyn Engine,
    claim: &Claim,
    wait: Wait,
    may_pass: bool,
) -> Result<Admission> {
    let granted = inner.acquire(claim, wait).await?;
    if granted != Admission::NotInTime || !may_pass {
        return Ok(granted);
    }
    let aside = Claim { name: own_name(claim).parse()?, ..claim.clone() };
    inner.acquire(&aside, wait).await
}

/// Reports an amendment that did not happen.
#[derive(Debug)]
pub(crate) struct AmendsNothing(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for AmendsNothing {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn amend(&self, _: &Claim, grant: &Grant, _: Amend) -> Result<Grant> {
        Ok(grant.clone())
    }
}

/// Counts the claims that hold permits, not the permits.
#[derive(Debug)]
pub(crate) struct CountsClaims(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for CountsClaims {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let mut claim = claim.clone();
        if let Mode::Permits { take, .. } = &mut claim.mode {
            *take = 1;
        }
        self.0.acquire(&claim, wait).await
    }
}

/// A waiter for permits is woken by the release of one particular holder only.
#[derive(Debug)]
pub(crate) struct WakesForOneHolderOnly {
    inner: Arc<dyn Engine>,
    held: Arc<watch::Sender<Vec<ClaimId>>>,
    which: fn(&[ClaimId]) -> Option<&ClaimId>,
}

impl WakesForOneHolderOnly {
    pub(crate) fn the_first(
        inner: Arc<dyn Engine>,
        held: Arc<watch::Sender<Vec<ClaimId>>>,
    ) -> Self {
        Self { inner, held, which: <[_]>::first }
    }

    pub(crate) fn the_last(inner: Arc<dyn Engine>, held: Arc<watch::Sender<Vec<ClaimId>>>) -> Self {
        Self { inner, held, which: <[_]>::last }
    }
}

#[async_trait]
impl Layer for WakesForOneHolderOnly {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.inner
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let awaited = (self.which)(&self.held.borrow()).copied();
        let granted = match self.inner.acquire(claim, Wait::No).await? {
            Admission::NotInTime if wait != Wait::No => {
                let granted = self.inner.acquire(claim, wait).await?;
                let mut held = self.held.subscribe();
                let left = |held: &Vec<ClaimId>| awaited.is_none_or(|one| !held.contains(&one));
                // The sender lives as long as this engine.
                held.wait_for(left).await.unwrap();
                granted
            }
            granted => granted,
        };
        if let Admission::Granted(_) = granted {
            self.held.send_modify(|held| held.push(claim.id));
        }
        Ok(granted)
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        self.held.send_modify(|held| held.retain(|id| *id != claim.id));
        self.inner.release(claim, grant, next).await
    }
}

/// Claims not to support readers, and lets them wait for ever.
#[derive(Debug)]
pub(crate) struct HangsOnReaders(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for HangsOnReaders {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    fn capabilities(&self) -> Capabilities {
        let mut can = self.0.capabilities();
        can.shared = false;
        can
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        match claim.mode {
            Mode::Shared => std::future::pending().await,
            _ => self.0.acquire(claim, wait).await,
        }
    }
}

/// Renews only claims that the same client acquired.
#[derive(Debug)]
pub(crate) struct RenewsOwnClaimsOnly(
    pub(crate) Arc<dyn Engine>,
    pub(crate) Mutex<HashSet<ClaimId>>,
);

impl RenewsOwnClaimsOnly {
    pub(crate) fn new(inner: Arc<dyn Engine>) -> Self {
        Self(inner, Mutex::default())
    }
}

#[async_trait]
impl Layer for RenewsOwnClaimsOnly {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        self.1.lock().unwrap().insert(claim.id);
        self.0.acquire(claim, wait).await
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        renew_each(batch, |claim, grant| async {
            let ours = self.1.lock().unwrap().contains(&claim.id);
            match ours {
                true => self.0.renew(&[(claim, grant)]).await.remove(0),
                false => Ok(Renewal::Lost(LossReason::Forgotten)),
            }
        })
        .await
    }
}

/// Lets several claims adopt one lock.
#[derive(Debug)]
pub(crate) struct AdoptsRepeatedly(pub(crate) Arc<dyn Engine>, pub(crate) Arc<BorrowedGrants>);

#[async_trait]
impl Layer for AdoptsRepeatedly {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        self.1.renew(&self.0, batch).await
    }

    async fn adopt(&self, claim: &Claim, grant: &Grant, successor: &Claim) -> Result<Grant> {
        self.1.swap(successor, self.1.by(claim));
        Ok(grant.clone())
    }
}

/// Reports losses only of claims that this client acquired itself.
#[derive(Debug)]
pub(crate) struct ReportsOwnClaimsOnly(Arc<dyn Engine>, Arc<Mutex<HashSet<ClaimId>>>);

impl ReportsOwnClaimsOnly {
    pub(crate) fn new(inner: Arc<dyn Engine>) -> Self {
        Self(inner, Arc::default())
    }
}

#[async_trait]
impl Layer for ReportsOwnClaimsOnly {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        self.1.lock().unwrap().insert(claim.id);
        self.0.acquire(claim, wait).await
    }

    fn events(&self) -> BoxStream<'static, Event> {
        let own = self.1.clone();
        let is_own = move |signal: &Event| {
            let (Event::Lost(id, _) | Event::LastLease(id) | Event::Doubt(id)) = signal;
            std::future::ready(own.lock().unwrap().contains(id))
        };
        self.0.events().filter(is_own).boxed()
    }
}

/// All backends have the same identity.
#[derive(Debug)]
pub(crate) struct SameIdentityForAll(pub(crate) Arc<dyn Engine>);

impl Layer for SameIdentityForAll {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    fn identity(&self) -> String {
        "home".to_owned()
    }
}

/// Does not store notes.
#[derive(Debug)]
pub(crate) struct LosesNotes(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for LosesNotes {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        self.0.acquire(&Claim { note: Note::default(), ..claim.clone() }, wait).await
    }
}

/// Writes a cell whatever version it has.
#[derive(Debug)]
pub(crate) struct LastWriteWins(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for LastWriteWins {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn cell(&self, name: &Name, expect: Version, value: Option<Vec<u8>>) -> Result<Swap> {
        // Lets others read what is about to be overwritten.
        tokio::task::yield_now().await;
        match self.0.cell(name, expect, value.clone()).await? {
            Swap::Found(cell) => self.0.cell(name, cell.version, value).await,
            done => Ok(done),
        }
    }
}

/// A watch reports the first state and no changes.
#[derive(Debug)]
pub(crate) struct WatchesOnce(pub(crate) Arc<dyn Engine>);

impl Layer for WatchesOnce {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    fn hints(&self, _: &Scope) -> BoxStream<'static, Result<Hint>> {
        futures_util::stream::pending().boxed()
    }
}

/// Loses the first reply to a change of a cell, and hides which request made it.
#[derive(Debug)]
pub(crate) struct LosesFirstCellReply(Arc<dyn Engine>, AtomicUsize);

impl LosesFirstCellReply {
    pub(crate) fn new(inner: Arc<dyn Engine>) -> Self {
        Self(inner, AtomicUsize::new(0))
    }
}

#[async_trait]
impl Layer for LosesFirstCellReply {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn inspect(&self, name: &Name) -> Result<LockState> {
        let mut state = self.0.inspect(name).await?;
        if let Some(cell) = &mut state.cell
            && let Ok(mut content) = serde_json::from_slice::<serde_json::Value>(&cell.value)
            && let Some(by) = content.get_mut("by").and_then(|by| by.as_array_mut())
        {
            by.iter_mut().for_each(|id| *id = ClaimId::random().to_string().into());
            cell.value = content.to_string().into_bytes();
        }
        Ok(state)
    }

    async fn cell(&self, name: &Name, expect: Version, value: Option<Vec<u8>>) -> Result<Swap> {
        let swap = self.0.cell(name, expect, value).await?;
        // The first change is the arrival at the barrier.
        match self.1.fetch_add(1, Ordering::Relaxed) {
            1 => Err(Error::Unreachable {
                engine: "mutant",
                what: "the answer was lost".to_owned(),
                retryable: true,
                source: None,
            }),
            _ => Ok(swap),
        }
    }
}

/// Reports an unresponsive backend as a busy lock.
#[derive(Debug)]
pub(crate) struct ReportsSilenceAsBusy(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for ReportsSilenceAsBusy {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let Wait::Until(_) = wait else { return self.0.acquire(claim, wait).await };
        tokio::select! {
            granted = self.0.acquire(claim, wait) => granted,
            // The timeout that its law gives.
            () = tokio::time::sleep(claim.ttl / 4) => Ok(Admission::NotInTime),
        }
    }
}

/// Does not list waiters.
#[derive(Debug)]
pub(crate) struct ListsNoWaiters(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for ListsNoWaiters {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn list(&self, prefix: &Prefix) -> Result<Vec<LockState>> {
        let mut states = self.0.list(prefix).await?;
        states.iter_mut().for_each(|state| state.waiters.clear());
        Ok(states)
    }
}

/// Ignores the prefix of a list.
#[derive(Debug)]
pub(crate) struct ListsAll(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for ListsAll {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn list(&self, _: &Prefix) -> Result<Vec<LockState>> {
        self.0.list(&Prefix::default()).await
    }
}
