//! Growing pauses between attempts.

use std::time::Duration;

use crate::clock::{Clock, Moment};

/// Between attempts of a request or a connection. A server that restarts or elects a leader is back
/// after a second or two; a longer pause would only prolong the outage.
#[cfg(any(feature = "redis", feature = "etcd", feature = "postgres", feature = "zookeeper"))]
pub(crate) const RETRY: Backoff =
    Backoff::new(Duration::from_millis(20), Duration::from_millis(500));

/// Pauses that double, from the first to the longest.
#[derive(Debug)]
#[allow(dead_code, reason = "the engines that are compiled in decide what is used")]
pub(crate) struct Backoff {
    first: Duration,
    next: Duration,
    longest: Duration,
}

#[allow(dead_code, reason = "the engines that are compiled in decide what is used")]
impl Backoff {
    pub(crate) const fn new(first: Duration, longest: Duration) -> Self {
        Self { first, next: first, longest }
    }

    /// The pause before the next attempt. The one after it is twice as long.
    pub(crate) fn next_pause(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(self.longest);
        pause
    }

    /// Sleeps until the next attempt.
    pub(crate) async fn pause(&mut self) {
        tokio::time::sleep(self.next_pause()).await;
    }

    /// Sleeps until the next attempt. Returns false, at once, if that is not before the deadline.
    pub(crate) async fn pause_before(&mut self, clock: &Clock, deadline: Moment) -> bool {
        let pause = self.next_pause();
        if clock.now() + pause >= deadline {
            return false;
        }
        tokio::time::sleep(pause).await;
        true
    }

    /// After an attempt that succeeded, the pauses start again with the first.
    pub(crate) fn reset(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_start_again() {
        let millis = Duration::from_millis;
        let mut backoff = Backoff::new(millis(20), millis(70));
        let pauses = [(); 4].map(|()| backoff.next_pause());
        assert_eq!(pauses, [20, 40, 70, 70].map(millis));
        backoff.reset();
        assert_eq!(backoff.next_pause(), millis(20));
    }

    #[tokio::test(start_paused = true)]
    async fn no_pause_reaches_the_deadline() {
        let clock = Clock::tokio();
        let deadline = clock.now() + Duration::from_millis(50);
        let mut backoff = Backoff::new(Duration::from_millis(20), Duration::from_millis(500));
        assert!(backoff.pause_before(&clock, deadline).await);
        assert!(!backoff.pause_before(&clock, deadline).await, "20 + 40 ms are more than 50 ms");
        assert_eq!(clock.now() + Duration::from_millis(30), deadline);
    }
}
