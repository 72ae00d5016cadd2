//! A held lock: its lease, whether it can be trusted, and how it is released.
//!
//! A [`Hold`] is shared by its [`HoldHandle`]s, which are the user's guards, and by the keeper,
//! which renews it. [`Hold::start`] is the only way from a grant to a held lock.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures_core::future::BoxFuture;
use futures_util::FutureExt;
use tokio::sync::Notify;

use crate::client::{CLEANUP_TIMEOUT, Client};
use crate::clock::Moment;
use crate::engine::{Amend, Claim, ClaimId, Grant, Mode};
use crate::error::{Error, LossReason, Result};
use crate::gate::{Gate, Pass, QueuedClaim, Turn};
use crate::keeper::{KeptLease, LeaseCheck, LeaseReply, NextStep};
use crate::name::Name;
use crate::options::ResolvedOptions;
use crate::report::report;
use crate::sync;
use crate::token::Token;

/// The gate of a client hands held locks on.
pub(crate) type ClientGate = Gate<HoldHandle>;
/// The right of a claim to talk to the engine.
pub(crate) type GatePass = Pass<HoldHandle>;

/// Whether a lock can be trusted, judged at the moment of the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The lock is held.
    Held,
    /// The lock is held as far as the lease goes, but its last renewal was not confirmed, or was
    /// refused because an operator wants the lock back. Bring the work to a safe end.
    Uncertain,
    /// Another client may hold the lock.
    Lost(LossReason),
}

/// One reference to a hold. Dropping the last one releases the lock in the background.
pub(crate) struct HoldHandle {
    hold: Arc<Hold>,
    /// This handle no longer counts: it was released or detached.
    spent: bool,
}

impl HoldHandle {
    /// Another handle of the same hold.
    ///
    /// # Errors
    /// [`Error::Lost`] if the lock is lost.
    pub(crate) fn share(&self) -> Result<Self> {
        self.hold.current()?;
        self.hold.handles.fetch_add(1, Ordering::Relaxed);
        Ok(Self { hold: self.hold.clone(), spent: false })
    }

    /// Releases the lock, if this is the last handle.
    pub(crate) async fn release(mut self) -> Result<()> {
        self.spent = true;
        match self.hold.drop_handle() {
            true => release(self.hold.clone()).await,
            false => Ok(()),
        }
    }

    /// Ends the hold without releasing the lock. After an error the lock is released.
    pub(crate) async fn detach(mut self) -> Result<EndedHold> {
        let name = self.hold.name.clone();
        self.hold.current()?;
        let refuse = |why| Err(Error::invalid("guard", name.as_str(), why));
        if !self.hold.inner().claim.detachable {
            return refuse("it was not taken with the option `LockOptions::detachable`");
        }
        if self.hold.handles.load(Ordering::Acquire) > 1 {
            return refuse("it was reentered, and the other guards would lose it");
        }
        self.hold.confirm().await?;
        self.spent = true;
        self.hold.end()?.ok_or(Error::NotHeld { name })
    }
}

impl std::ops::Deref for HoldHandle {
    type Target = Hold;

    fn deref(&self) -> &Hold {
        &self.hold
    }
}

impl Drop for HoldHandle {
    fn drop(&mut self) {
        if self.spent || self.hold.client.is_forked() {
            return;
        }
        if self.hold.drop_handle() {
            let hold = self.hold.clone();
            self.hold.client.keeper.run(async move {
                if let Err(error) = hold.clone().release().await {
                    report!(debug, name = hold.name, error = error, "background release failed");
                }
            });
        }
    }
}

impl fmt::Debug for HoldHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("name", &self.hold.name)
            .field("token", &self.hold.token)
            .field("state", &self.hold.state())
            .finish_non_exhaustive()
    }
}

/// One held lock.
#[derive(Debug)]
pub(crate) struct Hold {
    pub(crate) id: ClaimId,
    pub(crate) client: Arc<Client>,
    pub(crate) name: Name,
    pub(crate) token: Token,
    pub(crate) ttl: Duration,
    since: Moment,
    handles: AtomicUsize,
    ended: Notify,
    inner: Mutex<HoldInner>,
}

#[derive(Debug)]
struct HoldInner {
    claim: Arc<Claim>,
    grant: Grant,
    /// The lock is not held beyond this moment, however often it is renewed.
    ceiling: Moment,
    phase: Phase,
    /// Kept while the lock is held, so that other claims of this process wait at the gate.
    pass: Option<GatePass>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Held,
    /// The last renewal was not confirmed.
    Doubt,
    /// No renewal will be confirmed any more, for this reason.
    Ending(LossReason),
    Over(LossReason),
}

/// What remains of a hold that ended: what is needed to release the lock.
pub(crate) struct EndedHold {
    pub(crate) claim: Arc<Claim>,
    pub(crate) grant: Grant,
    pass: Option<GatePass>,
}

impl HoldInner {
    fn valid_until(&self) -> Moment {
        self.grant.valid_until.min(self.ceiling)
    }

    /// Why the lock is lost if its deadline passes now.
    fn reason_at_deadline(&self) -> LossReason {
        match self.phase {
            Phase::Ending(reason) => reason,
            _ if self.claim.fixed || self.ceiling <= self.grant.valid_until => LossReason::MaxHold,
            _ => LossReason::Expired,
        }
    }

    /// A lock that was handed over on a short first lease is renewed sooner.
    fn first_check(&self, now: Moment) -> Moment {
        now + self.valid_until().saturating_duration_since(now).min(self.claim.ttl) / 3
    }

    fn next_check(&self) -> LeaseCheck {
        let long_enough = self.ceiling <= self.grant.valid_until;
        match self.phase {
            Phase::Held | Phase::Doubt if !self.claim.fixed && !long_enough => LeaseCheck::Renew,
            _ => LeaseCheck::LookUp,
        }
    }
}

impl Hold {
    /// Starts to hold a granted lock. Returns `None` if its lease is over: the process was paused,
    /// or the reply was slow, and another client may hold the lock by now. The pass is taken only
    /// if the hold starts.
    pub(crate) fn start(
        client: Arc<Client>,
        claim: Arc<Claim>,
        grant: Grant,
        options: &ResolvedOptions,
        pass: &mut Option<GatePass>,
    ) -> Option<HoldHandle> {
        let now = client.clock.now();
        if grant.valid_until <= now {
            return None;
        }
        let pass = pass.take();
        let ceiling = options.max_hold.map_or(Moment::NEVER, |longest| now + longest);
        report!(debug, name = claim.name, token = client.settings.shown(grant.token), "granted");
        client.telemetry.held(&claim.name);
        let hold = Arc::new(Hold {
            id: claim.id,
            name: claim.name.clone(),
            token: client.settings.shown(grant.token),
            ttl: claim.ttl,
            since: now,
            handles: AtomicUsize::new(1),
            ended: Notify::new(),
            inner: Mutex::new(HoldInner { claim, grant, ceiling, phase: Phase::Held, pass }),
            client,
        });
        let first_check = hold.inner().first_check(now);
        hold.client.keeper.add(hold.clone(), first_check);
        Some(HoldHandle { hold, spent: false })
    }

    /// The engine's own view of the lock.
    pub(crate) fn grant(&self) -> Grant {
        self.inner().grant.clone()
    }

    pub(crate) fn mode(&self) -> Mode {
        self.inner().claim.mode
    }

    /// How long the lock can be trusted from now on if no renewal succeeds.
    pub(crate) fn valid_for(&self) -> Duration {
        match self.state() {
            State::Lost(_) => Duration::ZERO,
            _ => self.inner().valid_until().saturating_duration_since(self.client.clock.now()),
        }
    }

    /// Resolves when the lock can no longer be trusted.
    pub(crate) async fn lost(&self) -> LossReason {
        loop {
            let ended = self.ended.notified();
            let valid_until = match self.state() {
                State::Lost(reason) => return reason,
                _ => self.inner().valid_until(),
            };
            tokio::select! {
                () = ended => {}
                () = self.client.clock.sleep_until(valid_until) => {}
            }
        }
    }

    fn inner(&self) -> MutexGuard<'_, HoldInner> {
        sync::lock(&self.inner)
    }

    /// Whether the lock can be trusted now. A deadline that has passed makes the loss final.
    pub(crate) fn state(&self) -> State {
        self.state_at(self.client.clock.now())
    }

    fn state_at(&self, now: Moment) -> State {
        if self.client.is_forked() {
            return State::Lost(LossReason::Forked);
        }
        let reason = {
            let inner = self.inner();
            match inner.phase {
                Phase::Over(reason) => return State::Lost(reason),
                _ if now >= inner.valid_until() => inner.reason_at_deadline(),
                Phase::Held => return State::Held,
                Phase::Doubt | Phase::Ending(_) => return State::Uncertain,
            }
        };
        self.lose(reason, now);
        State::Lost(reason)
    }

    /// Ends the hold against the holder's will. What may be left at the engine is withdrawn.
    fn lose(&self, reason: LossReason, now: Moment) {
        let Some(ended) = self.finish(reason, now) else { return };
        report!(warn, name = self.name, token = self.token, reason = reason, "the lock was lost");
        self.client.withdraw_in_background(ended.claim);
    }

    /// Ends the hold by the holder's will. Returns `None` if closing the client released it before.
    ///
    /// # Errors
    /// [`Error::Lost`] if the lock is lost.
    fn end(&self) -> Result<Option<EndedHold>> {
        let now = self.client.clock.now();
        match self.state_at(now) {
            State::Lost(LossReason::ClientClosed) => Ok(None),
            State::Lost(reason) => Err(Error::lost(&self.name, reason)),
            _ => Ok(self.finish(LossReason::ClientClosed, now)),
        }
    }

    fn finish(&self, reason: LossReason, now: Moment) -> Option<EndedHold> {
        let ended = {
            let mut inner = self.inner();
            if let Phase::Over(_) = inner.phase {
                return None;
            }
            inner.phase = Phase::Over(reason);
            EndedHold {
                claim: inner.claim.clone(),
                grant: inner.grant.clone(),
                pass: inner.pass.take(),
            }
        };
        self.client.keeper.remove(self);
        let held = now.saturating_duration_since(self.since);
        let lost = (reason != LossReason::ClientClosed).then_some(reason);
        self.client.telemetry.ended(&self.name, held, lost);
        self.ended.notify_waiters();
        Some(ended)
    }

    /// Returns whether this was the last handle.
    fn drop_handle(&self) -> bool {
        self.handles.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// The claim and grant, if the lock can still be trusted.
    fn current(&self) -> Result<(Arc<Claim>, Grant)> {
        match self.state() {
            State::Lost(reason) => Err(Error::lost(&self.name, reason)),
            _ => {
                let inner = self.inner();
                Ok((inner.claim.clone(), inner.grant.clone()))
            }
        }
    }

    /// Asks the engine whether the lock is held, and renews its lease where that is allowed.
    pub(crate) async fn confirm(&self) -> Result<()> {
        // The keeper does not wait long for a reply; the user who asks may.
        match self.client.retry_held(self.ttl, || self.check_lease()).await {
            Ok(LeaseReply::Confirmed(renewed)) => self.on_confirmed(renewed),
            Ok(LeaseReply::LastLease) => self.on_last_lease(),
            Ok(LeaseReply::Lost(reason)) => self.on_lost(reason),
            Err(error @ Error::Lost { .. }) => return Err(error),
            Err(error) => {
                self.on_unconfirmed(None);
                return Err(error);
            }
        }
        self.current().map(|_| ())
    }

    async fn check_lease(&self) -> Result<LeaseReply> {
        let (claim, grant) = self.current()?;
        let check = self.inner().next_check();
        match check {
            LeaseCheck::LookUp => self.look_up(&claim, &grant).await,
            LeaseCheck::Renew => match self.client.engine.renew(&[(&claim, &grant)]).await.pop() {
                Some(reply) => reply.map(LeaseReply::from),
                None => Err(self.client.no_reply("the engine did not reply to a renewal")),
            },
        }
    }

    /// Changes the held lock at the engine, and then the claim.
    pub(crate) async fn amend(&self, to: Amend, change: impl FnOnce(&mut Claim)) -> Result<()> {
        let (claim, grant) = self.current()?;
        match self.client.engine.amend(&claim, &grant, to).await {
            Ok(amended) => {
                let mut inner = self.inner();
                change(Arc::make_mut(&mut inner.claim));
                // Only the key, and only if it changed: a renewal may have brought the rest up to
                // date.
                if amended.key != grant.key {
                    inner.grant.key = amended.key;
                }
                Ok(())
            }
            Err(Error::Lost { reason, .. }) => {
                self.on_lost(reason);
                Err(Error::lost(&self.name, reason))
            }
            Err(error) => Err(error),
        }
    }
}

impl KeptLease for Hold {
    fn id(&self) -> ClaimId {
        self.id
    }

    fn next_step(&self) -> NextStep {
        match self.state() {
            State::Lost(_) => NextStep::Forget,
            State::Held | State::Uncertain => {
                let inner = self.inner();
                NextStep::Check {
                    check: inner.next_check(),
                    claim: inner.claim.clone(),
                    grant: inner.grant.clone(),
                    valid_until: inner.valid_until(),
                }
            }
        }
    }

    fn next_check_at(&self, sent: Moment) -> Moment {
        let trusted = self.inner().grant.valid_until.saturating_duration_since(sent);
        // A lease that is never renewed runs down; it is only checked for its loss.
        let trusted = if self.inner().claim.fixed { self.ttl } else { trusted };
        sent + trusted.clamp(self.ttl / 4, self.ttl) / 3
    }

    fn slack(&self) -> Duration {
        self.ttl / 30
    }

    fn look_up<'a>(
        &'a self,
        claim: &'a Claim,
        grant: &'a Grant,
    ) -> BoxFuture<'a, Result<LeaseReply>> {
        async move {
            match self.client.lease_of(claim, grant).await {
                Ok(_) => Ok(LeaseReply::Confirmed(None)),
                Err(Error::Lost { reason, .. }) => Ok(LeaseReply::Lost(reason)),
                Err(error) => Err(error),
            }
        }
        .boxed()
    }

    fn on_confirmed(&self, renewed: Option<Grant>) {
        let mut inner = self.inner();
        if inner.phase == Phase::Doubt {
            inner.phase = Phase::Held;
        }
        // A slow reply to an older request must not shorten what a newer one gave.
        match renewed {
            Some(grant) if grant.valid_until > inner.grant.valid_until => inner.grant = grant,
            _ => {}
        }
        report!(trace, name = self.name, token = self.token, "confirmed");
    }

    fn on_unconfirmed(&self, error: Option<Error>) {
        let error = error.map_or_else(|| "no reply in time".to_owned(), |error| error.to_string());
        report!(warn, name = self.name, error = error, "a renewal was not confirmed");
        let mut inner = self.inner();
        if inner.phase == Phase::Held {
            inner.phase = Phase::Doubt;
        }
    }

    fn on_lost(&self, reason: LossReason) {
        self.lose(reason, self.client.clock.now());
    }

    fn on_last_lease(&self) {
        let mut inner = self.inner();
        if !matches!(inner.phase, Phase::Over(_)) {
            inner.phase = Phase::Ending(LossReason::Revoked);
            report!(
                warn,
                name = self.name,
                "an operator wants the lock back; this lease is the last"
            );
        }
    }

    fn release(self: Arc<Self>) -> BoxFuture<'static, Result<()>> {
        async move {
            let what = format!("`{}` was not released within {CLEANUP_TIMEOUT:?}", self.name);
            let late = self.client.no_reply(&what);
            tokio::time::timeout(CLEANUP_TIMEOUT, release(self)).await.unwrap_or(Err(late))
        }
        .boxed()
    }
}

/// Releases a lock, taking the next claim of this process along.
///
/// If this future is dropped before the reply, the release goes on in the background.
async fn release(hold: Arc<Hold>) -> Result<()> {
    let Some(EndedHold { claim, grant, pass }) = hold.end()? else { return Ok(()) };
    let mut in_flight = Some(hold.client.start_cleanup());
    let next = pass.as_ref().and_then(Pass::next);
    let pending = PendingRelease { client: hold.client.clone(), claim, next, pass, replied: false };
    let next = pending.next.as_ref().map(|next| &*next.claim);
    let releasing = hold.client.engine.release(&pending.claim, &grant, next);
    let begin_wait = || {
        let tracked = hold.client.track(&pending.claim);
        in_flight = None;
        tracked
    };
    let (released, tracked) = sync::on_first_wait(releasing, begin_wait).await;
    drop(tracked);
    drop(in_flight);
    match released {
        Ok(next_grant) => {
            let token = hold.client.settings.shown(grant.token);
            report!(debug, name = pending.claim.name, token = token, "released");
            pending.hand_over(next_grant);
            Ok(())
        }
        // This is a reply too: nothing of this hold is left to clean up.
        Err(error @ Error::NotHeld { .. }) => {
            pending.hand_over(None);
            // Closing the client may have been faster.
            if hold.client.is_closed() { Ok(()) } else { Err(error) }
        }
        Err(error) => Err(error),
    }
}

/// A release without a reply yet. If it is dropped, the claim is withdrawn in the background.
struct PendingRelease {
    client: Arc<Client>,
    claim: Arc<Claim>,
    next: Option<QueuedClaim<HoldHandle>>,
    pass: Option<GatePass>,
    replied: bool,
}

impl PendingRelease {
    /// Gives the next claim, if there is one, what the release obtained for it.
    fn hand_over(mut self, grant: Option<Grant>) {
        self.replied = true;
        let Some(next) = self.next.take() else { return };
        let claim = next.claim.clone();
        let held = grant.and_then(|grant| {
            let client = self.client.clone();
            Hold::start(client, claim.clone(), grant, &next.options, &mut self.pass)
        });
        let turn = match (held, self.pass.take()) {
            (Some(held), _) => Turn::Granted(held),
            // Not granted, or too late: the next claim sends its own request with the same id.
            (None, Some(pass)) => Turn::Request(pass),
            (None, None) => return,
        };
        if let Err(Turn::Request(_)) = next.give(turn) {
            // Its owner left while the claim was on its way to the engine, which may have queued
            // it. (A `HoldHandle` that was not received releases itself.)
            self.client.withdraw_in_background(claim);
        }
    }
}

impl Drop for PendingRelease {
    fn drop(&mut self) {
        if self.replied {
            return;
        }
        self.client.withdraw_in_background(self.claim.clone());
        if let (Some(next), Some(pass)) = (self.next.take(), &self.pass) {
            if next.is_gone() {
                // Its owner left before it could see that the engine may know the claim.
                self.client.withdraw_in_background(next.claim.clone());
            }
            pass.put_back(next);
        }
    }
}
