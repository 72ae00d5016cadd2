//! Waiting for an engine that cannot be reached, or is not ready, for a while.
//!
//! Only what may pass by itself is waited for; a wrong password, say, is an error at once.

use std::collections::BTreeSet;
use std::time::Duration;

use lockset::{Builder, Error, Lockset};

use crate::args::Patience;
use crate::home::Home;
use crate::output::{Failure, complain};
use crate::sys;

/// The first and the longest pause between two attempts.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// An attempt to connect may take this long, however short the wait is: servers are far away.
const SHORTEST_ATTEMPT: Duration = Duration::from_secs(1);

/// How long one acquisition waits for its engine and its lock together, and what was said about it.
pub(crate) struct EngineWait {
    home: Home,
    no_wait: bool,
    longest: Option<Duration>,
    until: Option<Duration>,
    pause: Duration,
    has_failed: bool,
    said: BTreeSet<String>,
}

impl EngineWait {
    /// The time counts from now on.
    pub(crate) fn new(home: &Home, patience: &Patience) -> Self {
        Self {
            home: home.clone(),
            no_wait: patience.no_wait,
            longest: patience.wait,
            until: patience.wait.map(|longest| sys::now() + longest),
            pause: PAUSES.0,
            has_failed: false,
            said: BTreeSet::new(),
        }
    }

    pub(crate) fn home(&self) -> &Home {
        &self.home
    }

    /// How long the lock itself may be waited for. The time that it takes to connect to an engine
    /// that answers does not count.
    pub(crate) fn left(&self) -> Option<Duration> {
        match self.has_failed {
            true => self.until.map(|until| until.saturating_sub(sys::now())),
            false => self.longest,
        }
    }

    /// Connects, however often it takes. Cancel safe.
    pub(crate) async fn connect(
        &mut self,
        builder: impl Fn(&Home) -> Builder,
    ) -> Result<Lockset, Failure> {
        loop {
            let left = self.until.map(|until| until.saturating_sub(sys::now()));
            let left = left.map_or(Duration::MAX, |left| left.max(SHORTEST_ATTEMPT));
            let attempt = builder(&self.home).connect();
            match tokio::time::timeout(left, attempt).await {
                Ok(Ok(locks)) => return Ok(locks),
                Ok(Err(error)) => self.pause_after(error).await?,
                Err(_) => {
                    let what = format!("the engine did not answer within {left:.1?}");
                    self.pause(Failure::own(what)).await?;
                }
            }
        }
    }

    /// Returns when it is time for another attempt.
    ///
    /// # Errors
    /// The failure to end with, if the error does not pass by itself or the time is over.
    pub(crate) async fn pause_after(&mut self, error: Error) -> Result<(), Failure> {
        let may_pass = matches!(error, Error::Unreachable { retryable: true, .. });
        match may_pass && !self.no_wait {
            true => self.pause(error.into()).await,
            false => Err(error.into()),
        }
    }

    /// Says what is waited for, once: failures that differ in numbers only (a time, another server
    /// of the same list) are the same.
    async fn pause(&mut self, failure: Failure) -> Result<(), Failure> {
        self.has_failed = true;
        let left = self.left();
        if left.is_some_and(|left| left.is_zero()) {
            return Err(failure);
        }
        let without_numbers = failure.message().replace(|c: char| c.is_ascii_digit(), "");
        if self.said.insert(without_numbers) {
            let how_long = match self.longest {
                Some(longest) => format!("for up to {}", humantime::format_duration(longest)),
                None => "until it answers".to_owned(),
            };
            let why = self.home.redact(failure.message());
            complain(format_args!("{why}; waiting {how_long}"));
        }
        tokio::time::sleep(left.map_or(self.pause, |left| left.min(self.pause))).await;
        self.pause = (self.pause * 2).min(PAUSES.1);
        Ok(())
    }
}
