//! Engines with one thing wrong.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures_core::stream::BoxStream;
use futures_util::StreamExt;
use lockset::engine::{
    Amend, Capabilities, Claim, ClaimId, Engine, Event, Grant, Scope, Swap, Version, Wait, drift,
    trusted_until,
};
use lockset::{
    Break, Error, Holder, LockState, LossReason, Mode, Name, Note, Prefix, Result, Token,
};
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use crate::layer::Layer;

/// Forgets which lock a claim is for.
#[derive(Debug)]
pub(crate) struct Renamed {
    pub(crate) inner: Arc<dyn Engine>,
    pub(crate) rename: fn(&Claim) -> String,
}

/// Each claim is alone on a name of its own.
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

impl Renamed {
    fn at_home(&self, claim: &Claim) -> Claim {
        Claim { name: (self.rename)(claim).parse().unwrap(), ..claim.clone() }
    }
}

#[async_trait]
impl Layer for Renamed {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.inner
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        self.inner.acquire(&self.at_home(claim), wait).await
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        one_by_one(batch, |claim, grant| async {
            self.inner.renew(&[(&self.at_home(claim), grant)]).await.remove(0)
        })
        .await
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let next = next.map(|next| self.at_home(next));
        self.inner.release(&self.at_home(claim), grant, next.as_ref()).await
    }

    async fn withdraw(&self, claim: &Claim) -> Result<()> {
        self.inner.withdraw(&self.at_home(claim)).await
    }
}

async fn one_by_one<'a, F>(
    batch: &[(&'a Claim, &'a Grant)],
    renew: impl Fn(&'a Claim, &'a Grant) -> F,
) -> Vec<Result<Grant>>
where
    F: Future<Output = Result<Grant>>,
{
    let mut answers = Vec::new();
    for (claim, grant) in batch {
        answers.push(renew(claim, grant).await);
    }
    answers
}

/// A lease at home is not as long as the client is told.
#[derive(Debug)]
pub(crate) struct Leases {
    pub(crate) inner: Arc<dyn Engine>,
    pub(crate) at_home: fn(Duration) -> Duration,
}

impl Leases {
    fn at_home(&self, claim: &Claim) -> Claim {
        Claim { ttl: (self.at_home)(claim.ttl), ..claim.clone() }
    }

    fn told(&self, claim: &Claim, grant: Grant) -> Grant {
        let at_home = (self.at_home)(claim.ttl);
        let begin = grant.valid_until.saturating_sub(at_home.saturating_sub(drift(at_home)));
        Grant { valid_until: trusted_until(begin, claim.ttl), ..grant }
    }
}

#[async_trait]
impl Layer for Leases {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.inner
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        let granted = self.inner.acquire(&self.at_home(claim), wait).await?;
        Ok(granted.map(|grant| self.told(claim, grant)))
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        one_by_one(batch, |claim, grant| async {
            let renewed = self.inner.renew(&[(&self.at_home(claim), grant)]).await.remove(0)?;
            Ok(self.told(claim, renewed))
        })
        .await
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let next_at_home = next.map(|next| self.at_home(next));
        let granted = self.inner.release(claim, grant, next_at_home.as_ref()).await?;
        Ok(granted.zip(next).map(|(grant, next)| self.told(next, grant)))
    }
}

/// Answers that it released, and did not.
#[derive(Debug)]
pub(crate) struct DeafToRelease(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for DeafToRelease {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn release(&self, _: &Claim, _: &Grant, _: Option<&Claim>) -> Result<Option<Grant>> {
        Ok(None)
    }
}

/// Releases, and leaves whoever is next to ask for itself.
#[derive(Debug)]
pub(crate) struct LeavesTheNext(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for LeavesTheNext {
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

/// Claims that hold by another claim's grant.
#[derive(Debug, Default)]
pub(crate) struct Swaps(Mutex<Swapped>);

#[derive(Debug, Default)]
struct Swapped {
    waiting: Vec<(ClaimId, oneshot::Sender<(Claim, Grant)>)>,
    by: HashMap<ClaimId, Claim>,
}

impl Swaps {
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
    ) -> Vec<Result<Grant>> {
        one_by_one(batch, |claim, grant| async {
            inner.renew(&[(&self.by(claim), grant)]).await.remove(0)
        })
        .await
    }
}

/// Whoever came last is served first.
#[derive(Debug)]
pub(crate) struct LastComeFirst(pub(crate) Arc<dyn Engine>, pub(crate) Arc<Swaps>);

#[async_trait]
impl Layer for LastComeFirst {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        if wait == Wait::No {
            return self.0.acquire(claim, wait).await;
        }
        let (tell, mut served) = oneshot::channel();
        self.1.0.lock().unwrap().waiting.push((claim.id, tell));
        tokio::select! {
            granted = self.0.acquire(claim, wait) => {
                let Some(grant) = granted? else { return Ok(None) };
                let last = self.1.0.lock().unwrap().waiting.pop();
                // Everybody who waits has an entry, and nobody is cancelled in these laws.
                let (_, last) = last.unwrap();
                last.send((claim.clone(), grant)).unwrap();
            }
            by = &mut served => {
                let (by, grant) = by.unwrap();
                self.1.swap(claim, by);
                return Ok(Some(grant));
            }
        }
        let (by, grant) = served.await.unwrap();
        self.1.swap(claim, by);
        Ok(Some(grant))
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
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

/// A release that carries the next of its process hands over to it, whoever else waits.
#[derive(Debug)]
pub(crate) struct FamilyFirst(pub(crate) Arc<dyn Engine>, pub(crate) Arc<Swaps>);

#[async_trait]
impl Layer for FamilyFirst {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
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
        self.0.raise(&by, grant, token).await.map(Some)
    }
}

/// A release admits the first waiter and, by mistake, the second.
#[derive(Debug)]
pub(crate) struct TwoAtOnce(pub(crate) Arc<dyn Engine>, pub(crate) Arc<Swaps>);

#[async_trait]
impl Layer for TwoAtOnce {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        let (tell, served) = oneshot::channel();
        self.1.0.lock().unwrap().waiting.push((claim.id, tell));
        tokio::select! {
            biased;
            granted = self.0.acquire(claim, wait) => {
                self.1.0.lock().unwrap().waiting.retain(|(id, _)| *id != claim.id);
                granted
            }
            Ok((_, grant)) = served => Ok(Some(grant)),
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

/// Answers that it renewed, and did not.
#[derive(Debug)]
pub(crate) struct RenewsNothing(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for RenewsNothing {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        let later = |(claim, grant): &(&Claim, &Grant)| {
            Ok(Grant { valid_until: grant.valid_until + claim.ttl / 2, ..(*grant).clone() })
        };
        batch.iter().map(later).collect()
    }
}

/// Leaves withdrawn claims where they are.
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

/// A release frees the name, whoever has it.
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

/// Looks only at the id of what it renews.
#[derive(Debug)]
pub(crate) struct RenewsById(pub(crate) Arc<dyn Engine>, pub(crate) Arc<Tokens>);

#[async_trait]
impl Layer for RenewsById {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        let granted = self.0.acquire(claim, wait).await?;
        if let Some(grant) = &granted {
            self.1.lock().unwrap().insert(claim.id, grant.token);
        }
        Ok(granted)
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        one_by_one(batch, |claim, grant| async {
            let known = self.1.lock().unwrap().get(&claim.id).copied();
            let grant = Grant { token: known.unwrap_or(grant.token), ..grant.clone() };
            self.0.renew(&[(claim, &grant)]).await.remove(0)
        })
        .await
    }
}

/// A repeated request is a new grant.
#[derive(Debug)]
pub(crate) struct TakesAgain(pub(crate) Arc<dyn Engine>, pub(crate) Arc<Tokens>);

#[async_trait]
impl Layer for TakesAgain {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        let Some(grant) = self.0.acquire(claim, wait).await? else { return Ok(None) };
        let first = self.1.lock().unwrap().insert(claim.id, grant.token).is_none();
        if first {
            return Ok(Some(grant));
        }
        let token = Token::new(grant.token.get() + 1);
        self.0.raise(claim, &grant, token).await.map(Some)
    }
}

/// Does not remember what was withdrawn.
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

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
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

/// Gives everybody the same token.
#[derive(Debug)]
pub(crate) struct OneToken(pub(crate) Arc<dyn Engine>, pub(crate) Arc<Tokens>);

impl OneToken {
    fn told(&self, claim: &Claim, grant: Grant) -> Grant {
        self.1.lock().unwrap().insert(claim.id, grant.token);
        Grant { token: Token::new(7), ..grant }
    }

    fn at_home(&self, claim: &Claim, grant: &Grant) -> Grant {
        let token = self.1.lock().unwrap().get(&claim.id).copied();
        Grant { token: token.unwrap_or(grant.token), ..grant.clone() }
    }
}

#[async_trait]
impl Layer for OneToken {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        let granted = self.0.acquire(claim, wait).await?;
        Ok(granted.map(|grant| self.told(claim, grant)))
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        one_by_one(batch, |claim, grant| async {
            let grant = self.at_home(claim, grant);
            let renewed = self.0.renew(&[(claim, &grant)]).await.remove(0)?;
            Ok(self.told(claim, renewed))
        })
        .await
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let granted = self.0.release(claim, &self.at_home(claim, grant), next).await?;
        Ok(granted.zip(next).map(|(grant, next)| self.told(next, grant)))
    }
}

/// Says that it is durable, and begins its tokens anew.
#[derive(Debug)]
pub(crate) struct CountsFromOne(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for CountsFromOne {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    fn capabilities(&self) -> Capabilities {
        let mut can = self.0.capabilities();
        can.durable = true;
        can
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        let claim = Claim { floor: Some(Token::new(1)), ..claim.clone() };
        self.0.acquire(&claim, wait).await
    }
}

/// Looks at its clock although it was given a floor.
#[derive(Debug)]
pub(crate) struct IgnoresFloors(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for IgnoresFloors {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        self.0.acquire(&Claim { floor: None, ..claim.clone() }, wait).await
    }
}

/// Answers that it raised the fence, and did not.
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

/// Lets a fence be lowered.
#[derive(Debug)]
pub(crate) struct Lowers(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for Lowers {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn raise(&self, claim: &Claim, grant: &Grant, to: Token) -> Result<Grant> {
        match to < grant.token {
            true => Ok(Grant { token: to, ..grant.clone() }),
            false => self.0.raise(claim, grant, to).await,
        }
    }
}

/// Promises twice the lease it gives.
#[derive(Debug)]
pub(crate) struct PromisesTooMuch(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for PromisesTooMuch {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        let granted = self.0.acquire(claim, wait).await?;
        Ok(granted.map(|grant| doubled(claim, grant)))
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        one_by_one(batch, |claim, grant| async {
            let renewed = self.0.renew(&[(claim, grant)]).await.remove(0)?;
            Ok(doubled(claim, renewed))
        })
        .await
    }
}

/// Tells of a grant only after its lease has ended, as if it had just begun.
#[derive(Debug)]
pub(crate) struct TellsLate(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for TellsLate {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        let granted = self.0.acquire(claim, wait).await?;
        tokio::time::sleep(claim.ttl).await;
        Ok(granted.map(|grant| doubled(claim, grant)))
    }
}

/// Forgets the locks of a client from which it has not heard for a while, long before their leases
/// end: as a server does that ends a session with its connection.
#[derive(Debug)]
pub(crate) struct ForgetsTheSilent {
    inner: Arc<dyn Engine>,
    heard: Mutex<Instant>,
}

impl ForgetsTheSilent {
    pub(crate) fn new(inner: Arc<dyn Engine>) -> Self {
        Self { inner, heard: Mutex::new(Instant::now()) }
    }

    /// Whether it was silent for longer than the time between two renewals.
    fn was_silent(&self, ttl: Duration) -> bool {
        let before = std::mem::replace(&mut *self.heard.lock().unwrap(), Instant::now());
        before.elapsed() > ttl * 2 / 5
    }
}

#[async_trait]
impl Layer for ForgetsTheSilent {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.inner
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        self.was_silent(claim.ttl);
        self.inner.acquire(claim, wait).await
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        one_by_one(batch, |claim, grant| async {
            match self.was_silent(claim.ttl) {
                true => {
                    Err(Error::Lost { name: claim.name.clone(), reason: LossReason::Forgotten })
                }
                false => self.inner.renew(&[(claim, grant)]).await.remove(0),
            }
        })
        .await
    }
}

/// Promises far more than it gives, and only for fixed leases, which nobody renews.
#[derive(Debug)]
pub(crate) struct RenewsTooMuch(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for RenewsTooMuch {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        let granted = self.0.acquire(claim, wait).await?;
        Ok(granted.map(|grant| match claim.fixed {
            true => doubled(claim, doubled(claim, grant)),
            false => grant,
        }))
    }
}

fn doubled(claim: &Claim, grant: Grant) -> Grant {
    Grant { valid_until: grant.valid_until + claim.ttl, ..grant }
}

/// Never tells anything unasked.
#[derive(Debug)]
pub(crate) struct TellsNothing(pub(crate) Arc<dyn Engine>);

impl Layer for TellsNothing {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    fn events(&self) -> BoxStream<'static, Event> {
        futures_util::stream::pending().boxed()
    }
}

/// Does not wait for the lease to end.
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

/// Answers who the holders are, and leaves them alone.
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

    fn watch(&self, scope: &Scope) -> BoxStream<'static, Result<LockState>> {
        // Others see what it should have done, so that the law looks at the holder.
        let revoke = |mut state: LockState| {
            state.holders.iter_mut().for_each(|holder| holder.revoked = true);
            state
        };
        self.0.watch(scope).map(move |state| state.map(revoke)).boxed()
    }
}

/// Forgets to take a waiter out whose time is over.
#[derive(Debug)]
pub(crate) struct StaysInLine(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for StaysInLine {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        let Wait::Until(_) = wait else { return self.0.acquire(claim, wait).await };
        let patience = tokio::time::sleep(claim.ttl / 32);
        tokio::select! {
            granted = self.0.acquire(claim, Wait::Forever) => granted,
            () = patience => Ok(None),
        }
    }
}

/// Its clients do not agree on what their home is called, so they sort it differently.
#[derive(Debug)]
pub(crate) struct NamesItsHomeAnew(pub(crate) Arc<dyn Engine>, pub(crate) &'static str);

impl NamesItsHomeAnew {
    /// The first home is "m", and the clients of the second call it "a" and "z" in turn.
    pub(crate) fn new(inner: Arc<dyn Engine>, made: Arc<AtomicUsize>) -> Self {
        let name = match made.fetch_add(1, Ordering::Relaxed) {
            0 => "m",
            odd if odd % 2 == 1 => "a",
            _ => "z",
        };
        Self(inner, name)
    }
}

impl Layer for NamesItsHomeAnew {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    fn identity(&self) -> String {
        self.1.to_owned()
    }
}

/// Has one lock for readers and writers.
#[derive(Debug)]
pub(crate) struct ReadersAreWriters(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for ReadersAreWriters {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        self.0.acquire(&Claim { mode: Mode::Exclusive, ..claim.clone() }, wait).await
    }
}

/// Lets everybody in together.
#[derive(Debug)]
pub(crate) struct WritersAreReaders(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for WritersAreReaders {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        self.0.acquire(&Claim { mode: Mode::Shared, ..claim.clone() }, wait).await
    }
}

/// Readers who do not want to wait pass those who do.
#[derive(Debug)]
pub(crate) struct ReadersPass(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for ReadersPass {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        pass_the_queue(&*self.0, claim, wait, claim.mode == Mode::Shared).await
    }
}

/// Who wants only one permit passes those who want more.
#[derive(Debug)]
pub(crate) struct SmallOnesPass(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for SmallOnesPass {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        let small = matches!(claim.mode, Mode::Permits { take: 1, .. });
        pass_the_queue(&*self.0, claim, wait, small).await
    }
}

async fn pass_the_queue(
    inner: &dyn Engine,
    claim: &Claim,
    wait: Wait,
    may_pass: bool,
) -> Result<Option<Grant>> {
    let granted = inner.acquire(claim, wait).await?;
    if granted.is_some() || !may_pass {
        return Ok(granted);
    }
    let aside = Claim { name: own_name(claim).parse()?, ..claim.clone() };
    inner.acquire(&aside, wait).await
}

/// Says that it changed a lock, and did not.
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

/// Counts who has permits, not how many.
#[derive(Debug)]
pub(crate) struct CountsClaims(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for CountsClaims {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        let mut claim = claim.clone();
        if let Mode::Permits { take, .. } = &mut claim.mode {
            *take = 1;
        }
        self.0.acquire(&claim, wait).await
    }
}

/// Of all who have permits, a waiter is woken by one alone.
#[derive(Debug)]
pub(crate) struct HeedsOne {
    inner: Arc<dyn Engine>,
    held: Arc<watch::Sender<Vec<ClaimId>>>,
    which: fn(&[ClaimId]) -> Option<&ClaimId>,
}

impl HeedsOne {
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
impl Layer for HeedsOne {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.inner
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        let heeded = (self.which)(&self.held.borrow()).copied();
        let granted = match self.inner.acquire(claim, Wait::No).await? {
            Some(grant) => Some(grant),
            None if wait == Wait::No => None,
            None => {
                let granted = self.inner.acquire(claim, wait).await?;
                let mut held = self.held.subscribe();
                let left = |held: &Vec<ClaimId>| heeded.is_none_or(|one| !held.contains(&one));
                // The sender is there as long as this engine.
                held.wait_for(left).await.unwrap();
                granted
            }
        };
        if granted.is_some() {
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

/// Says that it has no readers, and lets them wait for ever.
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

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        match claim.mode {
            Mode::Shared => std::future::pending().await,
            _ => self.0.acquire(claim, wait).await,
        }
    }
}

/// Renews only what the same client acquired.
#[derive(Debug)]
pub(crate) struct RenewsItsOwnOnly(pub(crate) Arc<dyn Engine>, pub(crate) Mutex<HashSet<ClaimId>>);

impl RenewsItsOwnOnly {
    pub(crate) fn new(inner: Arc<dyn Engine>) -> Self {
        Self(inner, Mutex::default())
    }
}

#[async_trait]
impl Layer for RenewsItsOwnOnly {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        self.1.lock().unwrap().insert(claim.id);
        self.0.acquire(claim, wait).await
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        one_by_one(batch, |claim, grant| async {
            let ours = self.1.lock().unwrap().contains(&claim.id);
            match ours {
                true => self.0.renew(&[(claim, grant)]).await.remove(0),
                false => {
                    let reason = LossReason::Forgotten;
                    Err(Error::Lost { name: claim.name.clone(), reason })
                }
            }
        })
        .await
    }
}

/// Passes a lock on to everybody who asks.
#[derive(Debug)]
pub(crate) struct PassesOnToAll(pub(crate) Arc<dyn Engine>, pub(crate) Arc<Swaps>);

#[async_trait]
impl Layer for PassesOnToAll {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        self.1.renew(&self.0, batch).await
    }

    async fn adopt(&self, claim: &Claim, grant: &Grant, successor: &Claim) -> Result<Grant> {
        self.1.swap(successor, self.1.by(claim));
        Ok(grant.clone())
    }
}

/// Tells of losses only for claims that were first asked for here.
#[derive(Debug)]
pub(crate) struct TellsOfItsOwnOnly(Arc<dyn Engine>, Arc<Mutex<HashSet<ClaimId>>>);

impl TellsOfItsOwnOnly {
    pub(crate) fn new(inner: Arc<dyn Engine>) -> Self {
        Self(inner, Arc::default())
    }
}

#[async_trait]
impl Layer for TellsOfItsOwnOnly {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        self.1.lock().unwrap().insert(claim.id);
        self.0.acquire(claim, wait).await
    }

    fn events(&self) -> BoxStream<'static, Event> {
        let own = self.1.clone();
        let is_own = move |signal: &Event| {
            let (Event::Lost(id, _) | Event::Doubt(id)) = signal;
            std::future::ready(own.lock().unwrap().contains(id))
        };
        self.0.events().filter(is_own).boxed()
    }
}

/// All homes have the same name.
#[derive(Debug)]
pub(crate) struct OneHome(pub(crate) Arc<dyn Engine>);

impl Layer for OneHome {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    fn identity(&self) -> String {
        "home".to_owned()
    }
}

/// Does not write down what holders say about themselves.
#[derive(Debug)]
pub(crate) struct LosesNotes(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for LosesNotes {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        self.0.acquire(&Claim { note: Note::default(), ..claim.clone() }, wait).await
    }
}

/// Writes a cell whatever it holds.
#[derive(Debug)]
pub(crate) struct LastWriteWins(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for LastWriteWins {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn cell(&self, name: &Name, expect: Version, value: Option<Vec<u8>>) -> Result<Swap> {
        // Time for others to read what is about to be overwritten.
        tokio::task::yield_now().await;
        match self.0.cell(name, expect, value.clone()).await? {
            Swap::Found(cell) => self.0.cell(name, cell.version, value).await,
            done => Ok(done),
        }
    }
}

/// Tells how things are, and never again.
#[derive(Debug)]
pub(crate) struct WatchesOnce(pub(crate) Arc<dyn Engine>);

impl Layer for WatchesOnce {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    fn watch(&self, scope: &Scope) -> BoxStream<'static, Result<LockState>> {
        let first = match scope {
            Scope::Name(_) => 1,
            Scope::Prefix(_) => 0,
        };
        self.0.watch(scope).take(first).chain(futures_util::stream::pending()).boxed()
    }
}

/// Loses the first answer to a change, and does not show who made it.
#[derive(Debug)]
pub(crate) struct CountsAgain(Arc<dyn Engine>, AtomicUsize);

impl CountsAgain {
    pub(crate) fn new(inner: Arc<dyn Engine>) -> Self {
        Self(inner, AtomicUsize::new(0))
    }
}

#[async_trait]
impl Layer for CountsAgain {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    fn watch(&self, scope: &Scope) -> BoxStream<'static, Result<LockState>> {
        let anonymous = |mut state: LockState| {
            if let Some(cell) = &mut state.cell
                && let Ok(mut content) = serde_json::from_slice::<serde_json::Value>(&cell.value)
                && let Some(by) = content.get_mut("by").and_then(|by| by.as_array_mut())
            {
                by.iter_mut().for_each(|id| *id = ClaimId::random().to_string().into());
                cell.value = content.to_string().into_bytes();
            }
            state
        };
        self.0.watch(scope).map(move |state| state.map(anonymous)).boxed()
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

/// Takes a home that does not answer for one that says no.
#[derive(Debug)]
pub(crate) struct SaysItIsBusy(pub(crate) Arc<dyn Engine>);

#[async_trait]
impl Layer for SaysItIsBusy {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        let Wait::Until(_) = wait else { return self.0.acquire(claim, wait).await };
        tokio::select! {
            granted = self.0.acquire(claim, wait) => granted,
            // As long as its law gives it.
            () = tokio::time::sleep(claim.ttl / 4) => Ok(None),
        }
    }
}

/// Does not list who waits.
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

/// Lists everything, whatever was asked for.
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
