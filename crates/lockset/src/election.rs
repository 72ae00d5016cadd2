//! One leader at a time, known to all.

use std::time::Duration;

use futures_core::stream::BoxStream;
use futures_util::StreamExt;

use crate::acquire::{LockRequest, acquire, acquire_patiently, acquire_within};
use crate::engine::common::backoff::Backoff;
use crate::engine::{LockState, Scope, Wait};
use crate::error::Result;
use crate::guard::Guard;
use crate::name::{Name, Note};
use crate::options::LockOptions;
use crate::report::report;
use crate::run::{RunError, run_held};
use crate::token::Token;

/// The first and the longest pause after a campaign that failed.
const PAUSES: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5));

/// One leader at a time, known to all. Made by [`Lockset::election`](crate::Lockset::election).
///
/// Leading is holding a lock: the leader has a [`Guard`], its term has a token, and whatever the
/// guard says about trust holds for leadership. The leader's note is shown to those who observe;
/// [`Guard::set_note`] changes it, [`Guard::release`] resigns.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockset::Result<()> {
/// use lockset::LockOptions;
/// let locks = lockset::Lockset::connect("memory:").await?;
/// let election = locks.election("scheduler")?.with(LockOptions::default().note("10.0.0.7:80"));
///
/// let term = election.campaign().await?;
/// let leader = election.leader().await?.expect("we lead");
/// assert_eq!((&*leader.note.text, leader.token), ("10.0.0.7:80", Some(term.token())));
/// term.release().await?;
/// assert!(election.leader().await?.is_none());
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Election(LockRequest);

/// Who leads.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Leader {
    /// What the leader says about itself, and its process.
    pub note: Note,
    /// The token of its term, where it has one.
    pub token: Option<Token>,
}

impl Election {
    pub(crate) fn new(request: LockRequest) -> Self {
        Self(request)
    }

    /// The same election with these options; the note is the leader's. Campaigning fails if the
    /// engine cannot keep them.
    pub fn with(mut self, options: LockOptions) -> Self {
        self.0.set_options(options);
        self
    }

    /// The name of the election.
    pub fn name(&self) -> &Name {
        &self.0.name
    }

    /// Waits until elected, as long as it takes.
    ///
    /// # Errors
    /// As [`Mutex::lock`](crate::Mutex::lock).
    ///
    /// # Cancel safety
    /// Cancel safe: dropped, it no longer campaigns.
    pub async fn campaign(&self) -> Result<Guard> {
        acquire_patiently(&self.0).await
    }

    /// Leads if there is no leader.
    ///
    /// # Errors
    /// As [`campaign`](Election::campaign).
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn try_campaign(&self) -> Result<Option<Guard>> {
        acquire(&self.0, Wait::No).await
    }

    /// Campaigns at most this long.
    ///
    /// # Errors
    /// [`Error::Timeout`](crate::Error::Timeout); otherwise as [`campaign`](Election::campaign).
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn campaign_within(&self, limit: Duration) -> Result<Guard> {
        acquire_within(&self.0, limit).await
    }

    /// Leads again and again, until the work is done.
    ///
    /// Each round campaigns, and runs `work` while the term can be trusted. How it goes on:
    ///
    /// * The work returns, with `Ok` or `Err`: this candidate resigns, and `lead` returns that.
    /// * The term is lost: the work is dropped where it awaits, and a new round begins. With
    ///   [`max_hold`](LockOptions::max_hold) that is the end of each term, and other candidates
    ///   come first.
    /// * A campaign fails with an error that [is retryable](crate::Error::is_retryable): a new
    ///   round begins after a pause of 0.1 s, twice as long each time, up to 5 s.
    /// * A campaign fails with another error, such as [`Error::Closed`](crate::Error::Closed):
    ///   `lead` returns it.
    ///
    /// The work is called once per term, so it begins by reading what the last leader left. It gets
    /// the guard of the term, for its token and to set the note. Each term runs a clone of the
    /// work, so the work captures references or clones.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> lockset::Result<()> {
    /// # let locks = lockset::Lockset::connect("memory:").await?;
    /// use std::cell::Cell;
    /// use lockset::Break;
    /// let election = locks.election("scheduler")?;
    /// let terms = Cell::new(0); // an atomic where the future must be `Send`
    /// let result = election.lead(async |term| {
    ///     terms.set(terms.get() + 1);
    ///     if terms.get() == 1 {
    ///         locks.force_release("scheduler", Break::Now).await?; // an operator ends the term
    ///         term.lost().await;
    ///     }
    ///     Ok::<_, lockset::Error>("done")
    /// });
    /// assert_eq!(result.await?, "done");
    /// assert_eq!(terms.get(), 2);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`RunError::NotGranted`] if a campaign fails for good. [`RunError::Failed`] if the work
    /// fails. [`RunError::DoneButLost`] if the work is done, but the term was lost before its end.
    ///
    /// # Cancel safety
    /// If cancelled, the work is dropped, and this candidate resigns in the background.
    pub async fn lead<T, E, F>(&self, work: F) -> Result<T, RunError<E>>
    where
        F: AsyncFnOnce(&Guard) -> Result<T, E> + Clone,
    {
        let mut pauses = PAUSES;
        loop {
            match acquire_patiently(&self.0).await {
                Ok(term) => {
                    pauses.reset();
                    match run_held(term, work.clone()).await {
                        Err(RunError::Interrupted(_)) => {}
                        ended => return ended,
                    }
                }
                Err(error) if error.is_retryable() => {
                    report!(warn, name = self.0.name, error = error, "a campaign failed");
                    self.0.client.clock.sleep(pauses.next_pause()).await;
                }
                Err(error) => return Err(RunError::NotGranted(error)),
            }
        }
    }

    /// Who leads now. A moment later it may be another.
    ///
    /// # Errors
    /// [`Error::Unreachable`](crate::Error::Unreachable).
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn leader(&self) -> Result<Option<Leader>> {
        self.0.client.check_usable()?;
        let state = self.0.client.engine.inspect(&self.0.name).await?;
        Ok(leader_in(&self.0.client.settings.shown_state(state)))
    }

    /// The leader, now and after every change, `None` while there is none. Terms that were over
    /// before they could be seen are left out.
    pub fn observe(&self) -> BoxStream<'static, Result<Option<Leader>>> {
        if let Err(error) = self.0.client.check_usable() {
            return futures_util::stream::once(std::future::ready(Err(error))).boxed();
        }
        let states = self.0.client.watch(Scope::Name(self.0.name.clone()));
        let mut last = None;
        let changes = states.filter_map(move |state| {
            let leader = state.map(|state| leader_in(&state));
            let news = match &leader {
                Ok(leader) if last.as_ref() == Some(leader) => None,
                _ => {
                    last = leader.as_ref().ok().cloned();
                    Some(leader)
                }
            };
            std::future::ready(news)
        });
        changes.boxed()
    }
}

fn leader_in(state: &LockState) -> Option<Leader> {
    let holder = state.holders.first()?;
    Some(Leader { note: holder.note.clone(), token: holder.token })
}
