//! The guard: what a holder has of its lock, and what it can know about it.

use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::Notify;

use crate::acquire;
use crate::client::Client;
use crate::clock::Moment;
use crate::engine::{Amend, Claim, ClaimId, Grant, Mode};
use crate::error::{Error, LossReason, Result};
use crate::gate::Pass;
use crate::name::{Name, Note};
use crate::options::ResolvedOptions;
use crate::report::report;
use crate::sync;
use crate::ticket::Ticket;
use crate::token::Token;

/// Whether a lock can be trusted, judged at the moment of asking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The lock is held.
    Held,
    /// The lock is held as far as the lease goes, but its last renewal was not confirmed, or was
    /// refused because an operator wants the lock back. Bring the work to a safe end.
    Uncertain,
    /// Somebody else may hold the lock.
    Lost(LossReason),
}

/// A lock that is held. It is renewed in the background while the guard lives.
///
/// # What it guarantees, and what it does not
/// A guard never says [`State::Held`] after the moment up to which the engine promised the lock,
/// judged by a clock that also counts the time the machine sleeps; so it says the truth right
/// after a pause too. [`lost`](Guard::lost) resolves by that moment with no help from the network,
/// hence before anybody can be granted the lock by expiry. If the lock's home forgets the lock
/// (failover, flush) or an operator breaks it, the guard learns at the next push or renewal, at
/// most a third of the ttl later.
///
/// What no lock can promise: between asking and acting your process may be paused. Send the
/// [`token`](Guard::token) along with every write, and let the resource refuse old ones.
///
/// # Drop
/// Dropping the last guard of a hold releases the lock in the background. It never blocks, it
/// never spawns a task, and it works outside a runtime. You do not learn whether it worked, and if
/// the process ends first, only the end of its lease (or, where the engine can see it, of the
/// process) frees the lock. Use [`release`](Guard::release) or
/// [`Lockset::close`](crate::Lockset::close) to be sure.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockset::Result<()> {
/// use lockset::{Lockset, State};
///
/// let locks = Lockset::connect("memory:").await?;
/// let guard = locks.mutex("orders/42")?.lock().await?;
/// assert_eq!(guard.state(), State::Held);
/// let shipped = guard.run(async { "shipped" }).await?;
/// guard.release().await?;
/// # assert_eq!(shipped, "shipped"); Ok(()) }
/// ```
#[must_use = "a guard that is dropped releases its lock"]
pub struct Guard {
    hold: Arc<Hold>,
    /// This guard no longer counts: it was released or detached.
    spent: bool,
}

impl Guard {
    /// The only way from a grant to a guard. `None` if the lease is over already: the process was
    /// paused, or the answer was slow, and another client may hold the lock by now.
    pub(crate) fn new(
        client: Arc<Client>,
        claim: Arc<Claim>,
        grant: Grant,
        options: &ResolvedOptions,
        pass: &mut Option<Pass>,
    ) -> Option<Self> {
        let now = client.clock.now();
        if grant.valid_until <= now {
            return None;
        }
        let pass = pass.take();
        let ceiling = options.max_hold.map_or(Moment::NEVER, |longest| now + longest);
        report!(debug, name = claim.name, token = client.shown(grant.token), "granted");
        client.telemetry.held(&claim.name);
        let hold = Arc::new(Hold {
            id: claim.id,
            name: claim.name.clone(),
            token: client.shown(grant.token),
            ttl: claim.ttl,
            since: now,
            guards: AtomicUsize::new(1),
            ended: Notify::new(),
            inner: Mutex::new(Inner { claim, grant, ceiling, phase: Phase::Held, pass }),
            client,
        });
        let first_look = hold.inner().first_look(now);
        hold.client.keeper.add(hold.clone(), first_look);
        Some(Self { hold, spent: false })
    }

    pub(crate) fn is_lost(&self) -> bool {
        matches!(self.state(), State::Lost(_))
    }

    /// An operator wants the lock back, so its lease is the last.
    pub(crate) fn asked_back(&self) {
        self.hold.refused(LossReason::Revoked);
    }

    /// The fencing token of this hold: greater than that of every earlier grant of this name.
    pub fn token(&self) -> Token {
        self.hold.token
    }

    /// The name of the lock.
    pub fn name(&self) -> &Name {
        &self.hold.name
    }

    /// The id of the claim by which the lock is held. Whoever knows it and the token can release
    /// the lock: treat it like a password where that matters.
    pub fn claim_id(&self) -> ClaimId {
        self.hold.id
    }

    /// What the engine granted, as the lock's home knows it: its own key, and the token without
    /// the URL's `token_base`. For conditions in transactions of your own, where the engine has
    /// them.
    pub fn grant(&self) -> Grant {
        self.hold.inner().grant.clone()
    }

    /// How the lock is held.
    pub fn mode(&self) -> Mode {
        self.hold.inner().claim.mode
    }

    /// How long a lease lasts without renewal.
    pub fn ttl(&self) -> Duration {
        self.hold.ttl
    }

    /// Whether the lock can be trusted now.
    pub fn state(&self) -> State {
        self.hold.judge()
    }

    /// For how long the lock can be trusted from now on if no renewal succeeds; zero if it is
    /// lost. Renewals push this out again and again.
    pub fn valid_for(&self) -> Duration {
        match self.hold.judge() {
            State::Lost(_) => Duration::ZERO,
            _ => self
                .hold
                .inner()
                .valid_until()
                .saturating_duration_since(self.hold.client.clock.now()),
        }
    }

    /// Resolves when the lock can no longer be trusted, at the latest when its lease ends, whatever
    /// the network does. Pending for as long as the lock is held.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> lockset::Result<()> {
    /// # let locks = lockset::Lockset::connect("memory:").await?;
    /// use std::time::Duration;
    /// use lockset::{LossReason, LockOptions};
    /// let short = LockOptions::default().ttl(Duration::from_millis(100)).no_renewal();
    /// let guard = locks.mutex("m")?.with(short)?.lock().await?;
    /// assert_eq!(guard.lost().await, LossReason::MaxHold);
    /// # Ok(()) }
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: it only observes.
    pub async fn lost(&self) -> LossReason {
        loop {
            let ended = self.hold.ended.notified();
            let valid_until = match self.hold.judge() {
                State::Lost(reason) => return reason,
                _ => self.hold.inner().valid_until(),
            };
            tokio::select! {
                () = ended => {}
                () = self.hold.client.clock.sleep_until(valid_until) => {}
            }
        }
    }

    /// Runs `work` for as long as the lock can be trusted, and drops it otherwise.
    ///
    /// Dropping a future stops it only where it awaits; what it has spawned goes on.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> lockset::Result<()> {
    /// # let locks = lockset::Lockset::connect("memory:").await?;
    /// let guard = locks.mutex("m")?.lock().await?;
    /// let answer = guard.run(async { 6 * 7 }).await?;
    /// assert_eq!(answer, 42);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Lost`] if the lock was lost before `work` was done.
    ///
    /// # Cancel safety
    /// As cancel safe as `work`.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        tokio::select! {
            biased;
            reason = self.lost() => Err(Error::lost(self.name(), reason)),
            output = work => match self.state() {
                State::Lost(reason) => Err(Error::lost(self.name(), reason)),
                State::Held | State::Uncertain => Ok(output),
            },
        }
    }

    /// Asks the engine whether the lock is still held: in one round trip, or in another if that was
    /// not answered. A renewed lease is renewed by it.
    ///
    /// # Errors
    /// [`Error::Lost`] if it is not; [`Error::Unreachable`] if the engine did not answer for half
    /// a ttl, or three seconds, in which case the guard is [`State::Uncertain`] or soon will be.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn confirm(&self) -> Result<()> {
        self.hold.confirm().await
    }

    /// Turns a write lock into a read lock without letting go of it; waiting readers come in. The
    /// token stays.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the lock is not held exclusively, [`Error::Unsupported`] if the engine
    /// has no readers, [`Error::Lost`] if the lock is lost, [`Error::Unreachable`] if the engine
    /// did not answer; whether it is downgraded is then unknown, and it may be tried again.
    ///
    /// # Cancel safety
    /// May be cancelled and repeated.
    pub async fn downgrade(&self) -> Result<()> {
        let client = &self.hold.client;
        if !client.capabilities.shared {
            let what = "downgrading to a shared lock".to_owned();
            return Err(Error::Unsupported { engine: client.capabilities.engine, what });
        }
        match self.mode() {
            Mode::Shared => Ok(()),
            Mode::Exclusive => {
                self.hold.amend(Amend::Downgrade, |claim| claim.mode = Mode::Shared).await
            }
            permits => {
                let why = "only a lock held exclusively can be downgraded";
                Err(Error::invalid("downgrade", &permits.to_string(), why))
            }
        }
    }

    /// Changes what others see of this holder: the leader's word in an election.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> lockset::Result<()> {
    /// # let locks = lockset::Lockset::connect("memory:").await?;
    /// let guard = locks.mutex("m")?.lock().await?;
    /// guard.set_note("half done").await?;
    /// assert_eq!(&*locks.inspect("m").await?.holders[0].note.text, "half done");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if the text does not fit a note, [`Error::Lost`] if the lock is lost,
    /// [`Error::Unreachable`] if the engine did not answer.
    ///
    /// # Cancel safety
    /// May be cancelled and repeated.
    pub async fn set_note(&self, text: &str) -> Result<()> {
        let note = Note::new(text)?;
        self.hold.amend(Amend::Note(note.clone()), |claim| claim.note = note).await
    }

    /// A second guard on the same hold; the lock is released when both are gone. This is how a
    /// function that needs the lock is called by one that has it.
    ///
    /// There is no reentrancy by thread or task: async code has no such identity.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> lockset::Result<()> {
    /// # let locks = lockset::Lockset::connect("memory:").await?;
    /// let outer = locks.mutex("m")?.lock().await?;
    /// let inner = outer.reenter()?;
    /// outer.release().await?; // not the last: the lock stays
    /// assert!(locks.mutex("m")?.try_lock().await?.is_none());
    /// inner.release().await?;
    /// assert!(locks.mutex("m")?.try_lock().await?.is_some());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Lost`] if the lock is lost.
    pub fn reenter(&self) -> Result<Guard> {
        match self.hold.judge() {
            State::Lost(reason) => Err(Error::lost(self.name(), reason)),
            _ => {
                self.hold.guards.fetch_add(1, Ordering::Relaxed);
                Ok(Guard { hold: self.hold.clone(), spent: false })
            }
        }
    }

    /// Gives the lock back; whoever is next has it when this returns. With other guards on the
    /// same hold (see [`reenter`](Guard::reenter)) only this guard ends.
    ///
    /// # Errors
    /// [`Error::Lost`] or [`Error::NotHeld`] if the lock was lost before: what was done under it
    /// may have been done by two. [`Error::Unreachable`] if the engine did not answer; the release
    /// is then repeated in the background.
    ///
    /// # Cancel safety
    /// If cancelled, the release goes on in the background.
    pub async fn release(mut self) -> Result<()> {
        self.spent = true;
        match self.hold.drop_guard() {
            Dropped::Last => acquire::release(self.hold.clone()).await,
            Dropped::OthersRemain => Ok(()),
        }
    }

    /// Lets go of the lock without releasing it: a ticket by which another process can take it
    /// over with [`Lockset::attach`](crate::Lockset::attach). From here on only its lease keeps it;
    /// a [longest hold](crate::LockOptions::max_hold) does not travel along.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the lock was not taken on
    /// [detachable](crate::LockOptions::detachable) terms or has other guards; [`Error::Lost`] and
    /// [`Error::Unreachable`] as for [`confirm`](Guard::confirm). In each case the lock is
    /// released.
    ///
    /// # Cancel safety
    /// If cancelled, the lock is released.
    pub async fn detach(mut self) -> Result<Ticket> {
        let name = self.hold.name.clone();
        self.hold.current()?;
        let refuse = |why| Err(Error::invalid("guard", name.as_str(), why));
        if !self.hold.inner().claim.detachable {
            return refuse("it was not taken on detachable options (`LockOptions::detachable`)");
        }
        if self.hold.guards.load(Ordering::Acquire) > 1 {
            return refuse("it was reentered, and the other guards would lose it");
        }
        self.confirm().await?;
        self.spent = true;
        match self.hold.end()? {
            Some(ended) => Ok(Ticket::new(&self.hold.client, &ended.claim, &ended.grant)),
            None => Err(Error::NotHeld { name }),
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.spent || self.hold.client.is_forked() {
            return;
        }
        if let Dropped::Last = self.hold.drop_guard() {
            let hold = self.hold.clone();
            self.hold.client.keeper.run(async move {
                if let Err(error) = acquire::release_soon(hold.clone()).await {
                    report!(debug, name = hold.name, error = error, "a background release failed");
                }
            });
        }
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("name", self.name())
            .field("token", &self.token())
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}

enum Dropped {
    Last,
    OthersRemain,
}

/// One lock held, shared by its guards and the keeper.
#[derive(Debug)]
pub(crate) struct Hold {
    pub(crate) id: ClaimId,
    pub(crate) client: Arc<Client>,
    pub(crate) name: Name,
    token: Token,
    ttl: Duration,
    since: Moment,
    guards: AtomicUsize,
    ended: Notify,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    claim: Arc<Claim>,
    grant: Grant,
    /// The lock is not held beyond this, however often it is renewed.
    ceiling: Moment,
    phase: Phase,
    /// Kept while the lock is held, so that the next of this process waits for us.
    pass: Option<Pass>,
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

/// What is needed to give back a lock that is no longer held.
pub(crate) struct Ended {
    pub(crate) claim: Arc<Claim>,
    pub(crate) grant: Grant,
    pub(crate) pass: Option<Pass>,
}

/// What the keeper has to do about a hold now.
pub(crate) enum Step {
    Over,
    Ask { how: Ask, claim: Arc<Claim>, grant: Grant, valid_until: Moment },
}

/// How the engine is asked about a hold.
pub(crate) enum Ask {
    Renew,
    /// The lease is long enough, or must not be made longer.
    LookUp,
}

impl Inner {
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

    /// Handed over on a short first lease, the first renewal comes sooner.
    fn first_look(&self, now: Moment) -> Moment {
        now + self.valid_until().saturating_duration_since(now).min(self.claim.ttl) / 3
    }

    fn how_to_ask(&self) -> Ask {
        let long_enough = self.ceiling <= self.grant.valid_until;
        match self.phase {
            Phase::Held | Phase::Doubt if !self.claim.fixed && !long_enough => Ask::Renew,
            _ => Ask::LookUp,
        }
    }
}

impl Hold {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        sync::lock(&self.inner)
    }

    /// The state at this moment. A deadline that has passed makes the loss final.
    fn judge(&self) -> State {
        self.judge_at(self.client.clock.now())
    }

    fn judge_at(&self, now: Moment) -> State {
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

    /// When to ask again after what was asked at `sent` was confirmed: after a third of the ttl, or
    /// of what the lease can be trusted for if that is less.
    pub(crate) fn next_look(&self, sent: Moment) -> Moment {
        let trusted = self.inner().grant.valid_until.saturating_duration_since(sent);
        // Leases that are never renewed run down; only their loss is looked for.
        let trusted = if self.inner().claim.fixed { self.ttl } else { trusted };
        sent + trusted.clamp(self.ttl / 4, self.ttl) / 3
    }

    /// How much earlier than due this hold may be renewed to save a round trip.
    pub(crate) fn slack(&self) -> Duration {
        self.ttl / 30
    }

    pub(crate) fn step(&self) -> Step {
        match self.judge() {
            State::Lost(_) => Step::Over,
            State::Held | State::Uncertain => {
                let inner = self.inner();
                Step::Ask {
                    how: inner.how_to_ask(),
                    claim: inner.claim.clone(),
                    grant: inner.grant.clone(),
                    valid_until: inner.valid_until(),
                }
            }
        }
    }

    /// The engine said that the lock is held; with a grant, that it was renewed.
    pub(crate) fn confirmed(&self, renewed: Option<Grant>) {
        let mut inner = self.inner();
        if inner.phase == Phase::Doubt {
            inner.phase = Phase::Held;
        }
        // A slow answer to an older request must not shorten what a newer one gave.
        match renewed {
            Some(grant) if grant.valid_until > inner.grant.valid_until => inner.grant = grant,
            _ => {}
        }
        report!(trace, name = self.name, token = self.token, "confirmed");
    }

    /// The engine did not answer, or only that something went wrong.
    pub(crate) fn doubted(&self, why: Option<Error>) {
        let error = why.map_or_else(|| "no answer in time".to_owned(), |why| why.to_string());
        report!(warn, name = self.name, error = error, "a renewal was not confirmed");
        let mut inner = self.inner();
        if inner.phase == Phase::Held {
            inner.phase = Phase::Doubt;
        }
    }

    /// The engine refused to renew, or told of a loss.
    pub(crate) fn refused(&self, reason: LossReason) {
        if reason != LossReason::Revoked {
            return self.lose(reason, self.client.clock.now());
        }
        let mut inner = self.inner();
        if !matches!(inner.phase, Phase::Over(_)) {
            inner.phase = Phase::Ending(reason);
            report!(
                warn,
                name = self.name,
                "an operator wants the lock back; this lease is the last"
            );
        }
    }

    /// Ends the hold against the holder's will. What may be left at the engine is withdrawn.
    fn lose(&self, reason: LossReason, now: Moment) {
        let Some(ended) = self.finish(reason, now) else { return };
        report!(warn, name = self.name, token = self.token, reason = reason, "the lock was lost");
        self.client.withdraw_in_background(ended.claim);
    }

    /// Ends the hold by the holder's will: answers what is needed to release it, `None` if it was
    /// released before.
    ///
    /// # Errors
    /// [`Error::Lost`] if it is lost.
    pub(crate) fn end(&self) -> Result<Option<Ended>> {
        let now = self.client.clock.now();
        match self.judge_at(now) {
            State::Lost(LossReason::ClientClosed) => Ok(None),
            State::Lost(reason) => Err(Error::lost(&self.name, reason)),
            _ => Ok(self.finish(LossReason::ClientClosed, now)),
        }
    }

    fn finish(&self, reason: LossReason, now: Moment) -> Option<Ended> {
        let ended = {
            let mut inner = self.inner();
            if let Phase::Over(_) = inner.phase {
                return None;
            }
            inner.phase = Phase::Over(reason);
            Ended {
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

    fn drop_guard(&self) -> Dropped {
        match self.guards.fetch_sub(1, Ordering::AcqRel) {
            1 => Dropped::Last,
            _ => Dropped::OthersRemain,
        }
    }

    /// The claim and grant, if the lock can still be trusted.
    fn current(&self) -> Result<(Arc<Claim>, Grant)> {
        match self.judge() {
            State::Lost(reason) => Err(Error::lost(&self.name, reason)),
            _ => {
                let inner = self.inner();
                Ok((inner.claim.clone(), inner.grant.clone()))
            }
        }
    }

    async fn confirm(&self) -> Result<()> {
        // What keeps locks does not wait long for an answer; whoever asks may.
        match self.client.asked_again(self.ttl, || self.ask()).await {
            Ok(renewed) => self.confirmed(renewed),
            Err(Error::Lost { reason, .. }) => self.refused(reason),
            Err(error) => {
                self.doubted(None);
                return Err(error);
            }
        }
        self.current().map(|_| ())
    }

    /// Whether it is held; its grant, if it was renewed by that.
    async fn ask(&self) -> Result<Option<Grant>> {
        let (claim, grant) = self.current()?;
        let how = self.inner().how_to_ask();
        match how {
            Ask::LookUp => self.client.lease_of(&claim, &grant).await.map(|_| None),
            Ask::Renew => match self.client.engine.renew(&[(&claim, &grant)]).await.pop() {
                Some(renewed) => renewed.map(Some),
                None => Err(Error::NotHeld { name: self.name.clone() }),
            },
        }
    }

    async fn amend(&self, to: Amend, change: impl FnOnce(&mut Claim)) -> Result<()> {
        let (claim, grant) = self.current()?;
        match self.client.engine.amend(&claim, &grant, to).await {
            Ok(amended) => {
                let mut inner = self.inner();
                change(Arc::make_mut(&mut inner.claim));
                // Only the key, and only if the lock moved: the rest a renewal may know better.
                if amended.key != grant.key {
                    inner.grant.key = amended.key;
                }
                Ok(())
            }
            Err(Error::Lost { reason, .. }) => {
                self.refused(reason);
                Err(Error::lost(&self.name, reason))
            }
            Err(error) => Err(error),
        }
    }
}
