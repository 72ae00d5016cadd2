//! Until when a session is certain to be alive: the one rule that all leases of this engine follow.
//!
//! The leader alone expires a session: one timeout `T` after it last heard of it. A handshake that
//! creates a session, or moves one to another server, reaches the leader itself. So the session
//! lives at least until `T` after the handshake was sent.
//!
//! Any other request is seen by the server that it was sent to, which reports it to the leader with
//! its next heartbeat, at most half a tick later. So the reply to a `sync` proves that this server
//! is connected to the leader, and that the leader knows of *earlier* requests, not of this one: of
//! all that were sent at least `T`/4 before it. (A session lasts at least two ticks, unless an
//! operator sets `minSessionTimeout` lower; nothing is certain about such a session.) If the server
//! loses the leader right after the reply, only those earlier requests count. Hence a lease ends at
//! the earlier of `T` after the last such request and two thirds of `T` after the `sync` was sent.

use std::collections::VecDeque;
use std::time::Duration;

use crate::clock::Moment;
use crate::engine::{drift, trusted_until};

/// Computes until when the leader cannot have expired one session.
#[derive(Debug)]
pub(super) struct SessionLease {
    timeout: Duration,
    /// When requests that the leader answered were sent, oldest first.
    answered: VecDeque<Moment>,
    valid_until: Moment,
}

impl SessionLease {
    /// The leader created the session, or took it over, by a handshake that was sent at `sent_at`.
    pub(super) fn new(timeout: Duration, sent_at: Moment) -> Self {
        let valid_until = Moment::from_nanos(0);
        let mut lease = Self { timeout, answered: VecDeque::new(), valid_until };
        lease.on_handshake(sent_at);
        lease
    }

    /// The leader took the session over by a handshake that was sent at `sent_at`.
    pub(super) fn on_handshake(&mut self, sent_at: Moment) {
        self.answered.push_back(sent_at);
        self.valid_until = self.valid_until.max(trusted_until(sent_at, self.timeout));
    }

    /// The leader answered a request that was sent at `sent_at`.
    pub(super) fn on_leader_reply(&mut self, sent_at: Moment) {
        let reported = sent_at.saturating_sub(self.timeout / 4);
        while self.answered.len() > 1 && self.answered[1] <= reported {
            self.answered.pop_front();
        }
        if let Some(last_reported) = self.answered.front().filter(|first| **first <= reported) {
            let end = (*last_reported + self.timeout).min(sent_at + self.timeout * 2 / 3);
            self.valid_until = self.valid_until.max(end.saturating_sub(drift(self.timeout)));
        }
        // Many requests may be answered within a moment; remembering a few of them is enough.
        let is_due = |last: &Moment| sent_at.saturating_duration_since(*last) > self.timeout / 32;
        if self.answered.back().is_none_or(is_due) {
            self.answered.push_back(sent_at);
        }
    }

    pub(super) fn valid_until(&self) -> Moment {
        self.valid_until
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
        let mut lease = SessionLease::new(T, at(0));
        assert_eq!(lease.valid_until(), end(12));
        lease.on_leader_reply(at(1));
        assert_eq!(lease.valid_until(), end(12), "a reply shortens nothing");
    }

    #[test]
    fn a_reply_is_good_for_two_thirds_if_an_earlier_request_was_reported_to_the_leader() {
        let mut lease = SessionLease::new(T, at(0));
        lease.on_leader_reply(at(4));
        lease.on_leader_reply(at(8));
        assert_eq!(lease.valid_until(), end(8 + 8));
        lease.on_leader_reply(at(12));
        assert_eq!(lease.valid_until(), end(12 + 8));
    }

    #[test]
    fn after_a_long_silence_the_last_reply_before_it_counts() {
        let mut lease = SessionLease::new(T, at(0));
        lease.on_leader_reply(at(4));
        lease.on_leader_reply(at(10));
        assert_eq!(lease.valid_until(), end(4 + 12), "not 10 + 8: the leader may know of 4 only");
        lease.on_leader_reply(at(11));
        assert_eq!(lease.valid_until(), end(4 + 12), "10 may not have been reported yet");
        lease.on_leader_reply(at(13));
        assert_eq!(lease.valid_until(), end(13 + 8));
    }

    #[test]
    fn many_replies_take_little_memory() {
        let mut lease = SessionLease::new(T, at(0));
        for milli in 0..100_000 {
            lease.on_leader_reply(at(0) + Duration::from_millis(milli));
        }
        assert!(lease.answered.len() < 40);
        assert!(lease.valid_until() > end(99 + 7));
    }
}
