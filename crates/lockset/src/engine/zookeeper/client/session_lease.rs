//! Until when a session can be trusted: the one rule that all leases of this engine follow.
//!
//! The leader alone decides when a session has expired: one timeout `T` after it last heard of it.
//! A new session, and one that moves to another server, is made known to the leader by the
//! handshake itself: such a session lives until `T` after the handshake was sent, at least.
//!
//! A request is heard by the server that it was sent to, which tells the leader with its next
//! heartbeat, half a tick later at most. So the answer to a `sync` proves that the link to the
//! leader is alive and that the leader has heard of *earlier* requests, not of this one: of all
//! those that were sent `T`/4 before it or earlier, since a session lasts two ticks at least,
//! unless an operator sets `minSessionTimeout` to less, and with such a session nothing is sure.
//! If the server loses its leader right after the answer, these alone count. Hence a lease ends at
//! the earlier of `T` after the last such request, and two thirds of `T` after the `sync` was
//! sent.

use std::collections::VecDeque;
use std::time::Duration;

use crate::clock::Moment;
use crate::engine::{drift, trusted_until};

/// What is known about the leader's patience with one session.
#[derive(Debug)]
pub(in crate::engine::zookeeper) struct Trust {
    timeout: Duration,
    /// When requests that were answered by the leader were sent, oldest first.
    heard: VecDeque<Moment>,
    until: Moment,
}

impl Trust {
    /// A session that the leader made, or took over, by a handshake sent then.
    pub(in crate::engine::zookeeper) fn new(timeout: Duration, handshake: Moment) -> Self {
        let mut trust = Self { timeout, heard: VecDeque::new(), until: Moment::from_nanos(0) };
        trust.greeted(handshake);
        trust
    }

    /// The leader took the session over by a handshake sent at `sent`.
    pub(in crate::engine::zookeeper) fn greeted(&mut self, sent: Moment) {
        self.heard.push_back(sent);
        self.until = self.until.max(trusted_until(sent, self.timeout));
    }

    /// The leader answered a request sent at `sent`.
    pub(in crate::engine::zookeeper) fn answered(&mut self, sent: Moment) {
        let reported = sent.saturating_sub(self.timeout / 4);
        while self.heard.len() > 1 && self.heard[1] <= reported {
            self.heard.pop_front();
        }
        if let Some(first) = self.heard.front().filter(|first| **first <= reported) {
            let end = (*first + self.timeout).min(sent + self.timeout * 2 / 3);
            self.until = self.until.max(end.saturating_sub(drift(self.timeout)));
        }
        // Many are answered in a moment; a few of them are enough.
        if self
            .heard
            .back()
            .is_none_or(|last| sent.saturating_duration_since(*last) > self.timeout / 32)
        {
            self.heard.push_back(sent);
        }
    }

    pub(in crate::engine::zookeeper) fn until(&self) -> Moment {
        self.until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: Duration = Duration::from_secs(12);

    fn at(seconds: u64) -> Moment {
        Moment::from_nanos(1_000_000_000_000) + Duration::from_secs(seconds)
    }

    fn end(seconds: u64) -> Moment {
        at(seconds).saturating_sub(drift(T))
    }

    #[test]
    fn a_handshake_is_good_for_the_whole_timeout() {
        let mut trust = Trust::new(T, at(0));
        assert_eq!(trust.until(), end(12));
        trust.answered(at(1));
        assert_eq!(trust.until(), end(12), "an answer takes nothing back");
    }

    #[test]
    fn an_answer_is_good_for_two_thirds_if_the_leader_had_heard_of_the_session_before() {
        let mut trust = Trust::new(T, at(0));
        trust.answered(at(4));
        trust.answered(at(8));
        assert_eq!(trust.until(), end(8 + 8));
        trust.answered(at(12));
        assert_eq!(trust.until(), end(12 + 8));
    }

    #[test]
    fn after_a_long_silence_the_last_answer_before_it_counts() {
        let mut trust = Trust::new(T, at(0));
        trust.answered(at(4));
        trust.answered(at(10));
        assert_eq!(trust.until(), end(4 + 12), "not 10 + 8: the leader may know of 4 only");
        trust.answered(at(11));
        assert_eq!(trust.until(), end(4 + 12), "10 may not have been reported yet");
        trust.answered(at(13));
        assert_eq!(trust.until(), end(13 + 8));
    }

    #[test]
    fn a_crowd_of_answers_is_remembered_in_few_words() {
        let mut trust = Trust::new(T, at(0));
        for milli in 0..100_000 {
            trust.answered(at(0) + Duration::from_millis(milli));
        }
        assert!(trust.heard.len() < 40);
        assert!(trust.until() > end(99 + 7));
    }
}
