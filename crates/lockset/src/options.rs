//! On which terms a lock is held.

use std::time::Duration;

use crate::engine::{Capabilities, Replicas};
use crate::error::{Error, Result};
use crate::name::Note;

/// On which terms a lock is held: how long a lease lasts, whether it is renewed, what others see.
///
/// The default is a lease of the client's ttl (30 seconds unless set otherwise), renewed for as
/// long as the guard lives.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockset::Result<()> {
/// use std::time::Duration;
/// use lockset::{Lockset, LockOptions};
///
/// let locks = Lockset::connect("memory:").await?;
/// let options = LockOptions::default().ttl(Duration::from_secs(10)).note("nightly backup");
/// let guard = locks.mutex("backup")?.with(options).lock().await?;
/// # guard.release().await }
/// ```
#[derive(Clone, Debug, Default)]
pub struct LockOptions {
    ttl: Option<Duration>,
    fixed: bool,
    max_hold: Option<Duration>,
    note: String,
    detachable: bool,
    replicas: Option<Replicas>,
}

impl LockOptions {
    /// How long the lock outlives a holder that vanished. It is renewed every third of it.
    ///
    /// Where all locks of a client share one session (see
    /// [`Capabilities::session`](crate::engine::Capabilities::session)), the ttl of those that are
    /// neither fixed nor detachable is the session's, whatever is asked for here: ask for it when
    /// [connecting](crate::Builder::ttl).
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// The lease is not renewed: the lock ends one ttl after it was granted.
    pub fn no_renewal(mut self) -> Self {
        self.fixed = true;
        self
    }

    /// The longest time the lock is held, however often its lease could be renewed: a holder that
    /// is stuck finally loses the lock. Must be at least one ttl.
    pub fn max_hold(mut self, longest: Duration) -> Self {
        self.max_hold = Some(longest);
        self
    }

    /// What others see of this holder or waiter, beside its process; at most
    /// [`Note::MAX_LEN`] bytes.
    pub fn note(mut self, text: impl Into<String>) -> Self {
        self.note = text.into();
        self
    }

    /// The lock may be handed to another process with [`Guard::detach`](crate::Guard::detach), so
    /// only its lease ends it, not the death of its process.
    pub fn detachable(mut self) -> Self {
        self.detachable = true;
        self
    }

    /// How many replicas must have the grant before the lock is handed out; otherwise it is given
    /// back and the request fails. Only on engines whose servers replicate without waiting.
    pub fn replicas(mut self, replicas: Replicas) -> Self {
        self.replicas = Some(replicas);
        self
    }

    /// The complete options, checked against what the engine can do.
    pub(crate) fn resolve(
        &self,
        can: &Capabilities,
        default_ttl: Duration,
    ) -> Result<ResolvedOptions> {
        let requested = self.ttl.unwrap_or(default_ttl);
        let shares_session = !self.fixed && !self.detachable;
        let ttl = can.session.filter(|_| shares_session).unwrap_or(requested);
        let bad = |what, span: Duration, why: String| {
            Err(Error::invalid(what, &format!("{span:?}"), why))
        };
        if ttl < can.min_ttl {
            return bad(
                "ttl",
                ttl,
                format!("the {} engine keeps at least {:?}", can.engine, can.min_ttl),
            );
        }
        if ttl > can.max_ttl {
            return bad(
                "ttl",
                ttl,
                format!("the {} engine keeps at most {:?}", can.engine, can.max_ttl),
            );
        }
        if let Some(longest) = self.max_hold.filter(|longest| *longest < ttl) {
            return bad("longest hold", longest, format!("it is shorter than the ttl of {ttl:?}"));
        }
        if !can.replicas && self.replicas.is_some_and(|replicas| replicas != Replicas::None) {
            let what = "waiting for replicas".to_owned();
            return Err(Error::Unsupported { engine: can.engine, what });
        }
        Ok(ResolvedOptions {
            ttl,
            fixed: self.fixed,
            max_hold: self.max_hold,
            note: Note::new(&self.note)?,
            detachable: self.detachable,
            replicas: self.replicas,
        })
    }
}

/// [`LockOptions`] that the engine can keep.
#[derive(Clone, Debug)]
pub(crate) struct ResolvedOptions {
    pub(crate) ttl: Duration,
    pub(crate) fixed: bool,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) note: Note,
    pub(crate) detachable: bool,
    pub(crate) replicas: Option<Replicas>,
}
