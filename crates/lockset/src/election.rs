//! One leader at a time, known to all.

use std::time::Duration;

use futures_core::stream::BoxStream;
use futures_util::StreamExt;

use crate::acquire::{LockRequest, acquire, acquire_patiently, acquire_within};
use crate::engine::{LockState, Scope, Wait};
use crate::error::Result;
use crate::guard::Guard;
use crate::name::Name;
use crate::options::LockOptions;
use crate::token::Token;

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
/// assert_eq!((leader.note.as_str(), leader.token), ("10.0.0.7:80", Some(term.token())));
/// term.release().await?;
/// assert!(election.leader().await?.is_none());
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Election(LockRequest);

/// Who leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leader {
    /// The leader's word.
    pub note: String,
    /// Its process, as `pid@host`, where the engine carries it.
    pub by: String,
    /// The token of its term, where it has one.
    pub token: Option<Token>,
}

impl Election {
    pub(crate) fn new(request: LockRequest) -> Self {
        Self(request)
    }

    /// The same election with these options; the note is the leader's. Campaigning fails if the engine cannot keep them.
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

    /// Leads if nobody does.
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
    pub async fn campaign_within(&self, patience: Duration) -> Result<Guard> {
        acquire_within(&self.0, patience).await
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
        Ok(leader_in(&state, self.0.client.settings.token_base))
    }

    /// Who leads, now and after every change, `None` while nobody does. LockOptions that were over
    /// before they could be seen are left out.
    pub fn observe(&self) -> BoxStream<'static, Result<Option<Leader>>> {
        if let Err(error) = self.0.client.check_usable() {
            return futures_util::stream::once(std::future::ready(Err(error))).boxed();
        }
        let base = self.0.client.settings.token_base;
        let states = self.0.client.engine.watch(&Scope::Name(self.0.name.clone()));
        let mut last = None;
        let changes = states.filter_map(move |state| {
            let leader = state.map(|state| leader_in(&state, base));
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

fn leader_in(state: &LockState, token_base: u64) -> Option<Leader> {
    let holder = state.holders.first()?;
    Some(Leader {
        note: holder.note.text.as_ref().to_owned(),
        by: holder.note.by.as_ref().to_owned(),
        token: holder.token.map(|token| token.lifted(token_base)),
    })
}
