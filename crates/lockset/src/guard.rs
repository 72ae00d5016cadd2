//! The guard: what a holder has of its lock, and what it can know about it.

use std::fmt;
use std::future::Future;
use std::time::Duration;

use crate::engine::{Amend, ClaimId, Grant, Mode};
use crate::error::{Error, LossReason, Result};
use crate::hold::{HoldHandle, State};
use crate::name::{Name, Note};
use crate::ticket::Ticket;
use crate::token::Token;

/// A held lock. It is renewed in the background while the guard lives.
///
/// # What it guarantees, and what it does not
/// A guard never returns [`State::Held`] after the moment up to which the engine promised the lock.
/// It judges by a clock that also counts the time the machine sleeps, so the state is right
/// immediately after a pause. [`lost`](Guard::lost) resolves by that moment without help from the
/// network, hence before another client can be granted the lock by expiry. If the server forgets
/// the lock (failover, flush) or an operator breaks it, the guard learns it by the next push or
/// renewal, at most a third of the ttl later.
///
/// What no lock can promise: your process may be paused between the check and the action. Send the
/// [`token`](Guard::token) with every write, and let the resource reject older ones.
///
/// # Drop
/// Dropping the last guard of a hold releases the lock in the background. The drop never blocks,
/// never spawns a task, and works outside a runtime. It does not report whether the release
/// worked. If the process ends first, the lock is freed when its lease ends, or immediately where
/// the engine can see processes die. Use [`release`](Guard::release) or
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
pub struct Guard(HoldHandle);

impl Guard {
    pub(crate) fn new(hold: HoldHandle) -> Self {
        Self(hold)
    }

    /// The fencing token of this hold. It is greater than that of every earlier grant of this name.
    pub fn token(&self) -> Token {
        self.0.token
    }

    /// The name of the lock.
    pub fn name(&self) -> &Name {
        &self.0.name
    }

    /// The id of the claim that holds the lock. A client that knows it and the token can release
    /// the lock: treat it like a password where that matters.
    pub fn claim_id(&self) -> ClaimId {
        self.0.id
    }

    /// What the engine granted: the engine's own key, and the token without the URL's
    /// `token_base`. Use it for conditions in your own transactions, where the engine has them.
    pub fn grant(&self) -> Grant {
        self.0.grant()
    }

    /// How the lock is held.
    pub fn mode(&self) -> Mode {
        self.0.mode()
    }

    /// How long a lease lasts without renewal.
    pub fn ttl(&self) -> Duration {
        self.0.ttl
    }

    /// Whether the lock can be trusted now.
    pub fn state(&self) -> State {
        self.0.state()
    }

    /// How long the lock can be trusted from now on if no renewal succeeds. Zero if it is lost.
    /// Each renewal extends it.
    pub fn valid_for(&self) -> Duration {
        self.0.valid_for()
    }

    /// Resolves when the lock can no longer be trusted, at the latest when its lease ends, whatever
    /// the network does. Pending while the lock is held.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> lockset::Result<()> {
    /// # let locks = lockset::Lockset::connect("memory:").await?;
    /// use std::time::Duration;
    /// use lockset::{LossReason, LockOptions};
    /// let short = LockOptions::default().ttl(Duration::from_millis(100)).no_renewal();
    /// let guard = locks.mutex("m")?.with(short).lock().await?;
    /// assert_eq!(guard.lost().await, LossReason::MaxHold);
    /// # Ok(()) }
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: it only observes.
    pub async fn lost(&self) -> LossReason {
        self.0.lost().await
    }

    /// Runs `work` while the lock can be trusted, and drops it otherwise.
    ///
    /// Dropping a future stops it only where it awaits. Tasks that it spawned go on.
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

    /// Asks the engine whether the lock is still held, in one round trip, or more if a request gets
    /// no reply. This also renews the lease, unless it is not to be renewed.
    ///
    /// # Errors
    /// [`Error::Lost`] if it is not held; [`Error::Unreachable`] if the engine did not reply for
    /// half a ttl, or three seconds. The guard is then [`State::Uncertain`] or soon will be.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn confirm(&self) -> Result<()> {
        self.0.confirm().await
    }

    /// Turns a write lock into a read lock without releasing it. Waiting readers are admitted. The
    /// token stays the same.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the lock is not held exclusively, [`Error::Unsupported`] if the engine
    /// has no readers, [`Error::Lost`] if the lock is lost, [`Error::Unreachable`] if the engine
    /// did not reply; whether it is downgraded is then unknown, and the call may be repeated.
    ///
    /// # Cancel safety
    /// May be cancelled and repeated.
    pub async fn downgrade(&self) -> Result<()> {
        let can = self.0.client.capabilities;
        if !can.shared {
            let what = "downgrading to a shared lock".to_owned();
            return Err(Error::Unsupported { engine: can.engine, what });
        }
        match self.mode() {
            Mode::Shared => Ok(()),
            Mode::Exclusive => {
                self.0.amend(Amend::Downgrade, |claim| claim.mode = Mode::Shared).await
            }
            permits => {
                let why = "only a lock held exclusively can be downgraded";
                Err(Error::invalid("downgrade", &permits.to_string(), why))
            }
        }
    }

    /// Changes what others see of this holder: the leader's note in an election.
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
    /// [`Error::Unreachable`] if the engine did not reply.
    ///
    /// # Cancel safety
    /// May be cancelled and repeated.
    pub async fn set_note(&self, text: &str) -> Result<()> {
        let note = Note::new(text)?;
        self.0.amend(Amend::Note(note.clone()), |claim| claim.note = note).await
    }

    /// A second guard of the same hold. The lock is released when both are gone. Use it to call a
    /// function that needs the lock from one that has it.
    ///
    /// There is no reentrancy by thread or task, because async code has no such identity.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> lockset::Result<()> {
    /// # let locks = lockset::Lockset::connect("memory:").await?;
    /// let outer = locks.mutex("m")?.lock().await?;
    /// let inner = outer.reenter()?;
    /// outer.release().await?; // not the last guard: the lock stays held
    /// assert!(locks.mutex("m")?.try_lock().await?.is_none());
    /// inner.release().await?;
    /// assert!(locks.mutex("m")?.try_lock().await?.is_some());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Lost`] if the lock is lost.
    pub fn reenter(&self) -> Result<Guard> {
        self.0.share().map(Guard)
    }

    /// Releases the lock. The next waiter has it when this returns. If other guards of the same
    /// hold exist (see [`reenter`](Guard::reenter)), only this guard ends.
    ///
    /// # Errors
    /// [`Error::Lost`] or [`Error::NotHeld`] if the lock was lost before: two clients may have
    /// worked at the same time. [`Error::Unreachable`] if the engine did not reply; the release is
    /// then repeated in the background.
    ///
    /// # Cancel safety
    /// If cancelled, the release goes on in the background.
    pub async fn release(self) -> Result<()> {
        self.0.release().await
    }

    /// Ends the guard without releasing the lock, and returns a ticket by which another process can
    /// take it over with [`Lockset::attach`](crate::Lockset::attach). From then on only the lease
    /// keeps the lock. [`max_hold`](crate::LockOptions::max_hold) does not travel with the ticket.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the lock was taken without
    /// [`detachable`](crate::LockOptions::detachable), or has other guards; [`Error::Lost`] and
    /// [`Error::Unreachable`] as for [`confirm`](Guard::confirm). In each case the lock is
    /// released.
    ///
    /// # Cancel safety
    /// If cancelled, the lock is released.
    pub async fn detach(self) -> Result<Ticket> {
        let client = self.0.client.clone();
        let ended = self.0.detach().await?;
        Ok(Ticket::new(client.capabilities.engine, &client.home, &ended.claim, &ended.grant))
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
