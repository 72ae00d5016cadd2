//! Waiting for an engine that cannot be reached, or is not ready, for a while.
//!
//! Only failures that may pass by themselves are waited for. A wrong password is an error at once.

use std::collections::BTreeSet;
use std::time::Duration;

use lockset::{Builder, Error, Lockset};

use crate::args::WaitArgs;
use crate::home::Home;
use crate::output::{Failure, print_message};
use crate::sys;

/// The first and the longest pause between two attempts.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// An attempt to connect may take this long, even if the wait is shorter: servers are far away.
const SHORTEST_ATTEMPT: Duration = Duration::from_secs(1);

/// How long one acquisition waits for its engine and its lock together, and what was printed so
/// far.
pub(crate) struct EngineWait {
    home: Home,
    no_wait: bool,
    longest: Option<Duration>,
    until: Option<Duration>,
    pause: Duration,
    has_failed: bool,
    printed: BTreeSet<String>,
}

impl EngineWait {
    /// The time counts from now on.
    pub(crate) fn new(home: &Home, wait_args: &WaitArgs) -> Self {
        Self {
            home: home.clone(),
            no_wait: wait_args.no_wait,
            longest: wait_args.wait,
            until: wait_args.wait.map(|longest| sys::now() + longest),
            pause: PAUSES.0,
            has_failed: false,
            printed: BTreeSet::new(),
        }
    }

    pub(crate) fn home(&self) -> &Home {
        &self.home
    }

    /// How long the lock itself may be waited for. The time to connect to an engine that replies
    /// does not count.
    pub(crate) fn left(&self) -> Option<Duration> {
        match self.has_failed {
            true => self.until.map(|until| until.saturating_sub(sys::now())),
            false => self.longest,
        }
    }

    /// Connects, in as many attempts as needed. Cancel safe.
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
                    let what = format!("the engine did not reply within {left:.1?}");
                    self.pause(Failure::own(what)).await?;
                }
            }
        }
    }

    /// Returns when it is time for another attempt.
    ///
    /// # Errors
    /// The failure to end with, if the error cannot pass by itself or the time is over.
    pub(crate) async fn pause_after(&mut self, error: Error) -> Result<(), Failure> {
        let may_pass = matches!(error, Error::Unreachable { retryable: true, .. });
        match may_pass && !self.no_wait {
            true => self.pause(error.into()).await,
            false => Err(error.into()),
        }
    }

    /// Prints what is waited for, once: failures that differ only in numbers (a time, another
    /// server of the same list) count as the same.
    async fn pause(&mut self, failure: Failure) -> Result<(), Failure> {
        self.has_failed = true;
        let left = self.left();
        if left.is_some_and(|left| left.is_zero()) {
            return Err(failure);
        }
        let without_numbers = failure.message().replace(|c: char| c.is_ascii_digit(), "");
        if self.printed.insert(without_numbers) {
            let how_long = match self.longest {
                Some(longest) => format!("for up to {}", humantime::format_duration(longest)),
                None => "until it replies".to_owned(),
            };
            let why = self.home.redact(failure.message());
            print_message(format_args!("{why}; waiting {how_long}"));
        }
        tokio::time::sleep(left.map_or(self.pause, |left| left.min(self.pause))).await;
        self.pause = (self.pause * 2).min(PAUSES.1);
        Ok(())
    }
}
