//! The times of a run in one place: what happens when between two renewals of a lease.
//!
//! All times count from the moment at which the last confirmed renewal was sent. `trust` is how
//! long that renewal is valid: the ttl; if the lease is a session (ZooKeeper), two thirds of the
//! session timeout. The engine subtracts its drift from the trust (1 % of the ttl + 2 ms).
//!
//! | when                            | who        | what                                         |
//! |---------------------------------|------------|----------------------------------------------|
//! | trust/3                         | keeper     | sends the next renewal (`hold.rs`)           |
//! | trust/3 + ttl/6                 | keeper     | stops waiting for its reply (`keeper.rs`)    |
//! | trust/3 + ttl/6 + ttl/12        | keeper     | sends it again (`keeper::on_reply`)          |
//! | trust/2, then every ttl/100     | supervisor | reads the lease and sends it to the guardian |
//! | trust - grace; grace <= trust/3 | guardian   | TERM to the command                          |
//! | trust - kill margin             | guardian   | KILL to the command and all its descendants  |
//! | trust                           | guard      | lost                                         |
//!
//! `--max-hold` sets another end, which no renewal moves. Its margins are small, because the
//! command may use all of that time: TERM is sent at most a tenth of it before its end, KILL at
//! most a twentieth.
//!
//! A first lease that is too short for this order is renewed before the command starts. On
//! ZooKeeper a renewal that soon follows another is valid for only five ninths of the session
//! timeout; its reply may be late by a ninth then, not by a sixth.
//!
//! The tests below check this order for every ttl that an engine accepts: a renewal whose reply
//! comes at the last moment still reaches the guardian before it sends TERM, and TERM comes before
//! KILL before the end of the lease.

use std::time::Duration;

/// KILL is sent this long before the end of a lease, if a twentieth of the ttl is less: the kernel
/// needs time to end a process, however short its lease is.
const KILL_MARGIN: Duration = Duration::from_millis(250);

/// The shortest time between two readings of a lease.
const MIN_READ_INTERVAL: Duration = Duration::from_millis(2);

/// How long before the end of a lease, or of the longest hold, the guardian acts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Margins {
    pub(crate) term: Duration,
    pub(crate) kill: Duration,
}

/// A lease as it was granted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lease {
    pub(crate) ttl: Duration,
    /// It is the lease of a session with the server.
    pub(crate) by_session: bool,
}

impl Lease {
    /// How long a renewal is valid.
    fn trust(self) -> Duration {
        if self.by_session { self.ttl * 2 / 3 } else { self.ttl }
    }

    /// The longest time before the end of the lease at which TERM may be sent, and which part of
    /// the ttl that is. With more, the command would be ended while a renewal is in flight.
    pub(crate) fn longest_grace(self) -> (Duration, &'static str) {
        let part = if self.by_session { "two ninths" } else { "a third" };
        (self.trust() / 3, part)
    }

    /// When TERM and KILL are due. However short the grace is, TERM comes before KILL.
    pub(crate) fn margins(self, grace: Duration) -> Margins {
        let gap = grace.min(self.ttl / 20);
        // A fixed margin would take up all of a short lease.
        let kill = (self.ttl / 20).max(KILL_MARGIN).min(self.ttl / 8);
        Margins { term: grace.max(kill + gap), kill }
    }

    /// The same where `--max-hold`, which is a ttl at least, ends the hold before its lease does.
    pub(crate) fn max_hold_margins(self, longest: Duration, grace: Duration) -> Margins {
        let Margins { kill, .. } = self.margins(grace);
        let (grace, kill) = (grace.min(longest / 10), kill.min(longest / 20));
        let gap = grace.min(self.ttl / 20);
        Margins { term: grace.max(kill + gap), kill }
    }

    /// Whether a first lease of which this much is left must be renewed before the command starts:
    /// the keeper renews it when a third of that is over, and a late reply would come after TERM.
    /// Some engines grant a lock to a waiter on a short first lease.
    pub(crate) fn is_short(self, left: Duration) -> bool {
        let (grace, _) = self.longest_grace();
        let answer = self.ttl / 6;
        left - left / 3 < grace + answer + self.look_interval() * 2
    }

    /// When the supervisor reads the lease again, if this much of it is left. At half the trust the
    /// next renewal has usually been confirmed; if not, the lease is read often.
    pub(crate) fn look_again_in(self, left: Duration) -> Duration {
        left.saturating_sub(self.trust() / 2).max(self.look_interval())
    }

    fn look_interval(self) -> Duration {
        (self.ttl / 100).max(MIN_READ_INTERVAL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How late a timer or a message between two processes may be on a machine with time to spare.
    const LATENCY: Duration = Duration::from_millis(1);

    fn millis(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    /// An engine as the keeper sees it.
    struct Engine {
        name: &'static str,
        shortest_ttl: Duration,
        by_session: bool,
        /// How long a renewal is valid, as parts of the ttl, before the drift is subtracted.
        trust: (u32, u32),
        /// How late the reply may be, as parts of the ttl, without a TERM.
        patience: (u32, u32),
    }

    const ENGINES: [Engine; 7] = [
        engine("memory", 100, (1, 1)),
        engine("local", 100, (1, 1)),
        engine("redis", 200, (1, 1)),
        engine("etcd", 2000, (1, 1)),
        engine("postgres", 200, (1, 1)),
        Engine { by_session: true, ..engine("zookeeper", 100, (2, 3)) },
        // A `sync` counts for less if the one before it was sent less than a quarter of the timeout
        // earlier (see the engine's `client/session_lease.rs`): a reply may be late by a ninth
        // then.
        Engine { by_session: true, patience: (1, 9), ..engine("zookeeper", 200, (5, 9)) },
    ];

    const fn engine(name: &'static str, shortest: u64, trust: (u32, u32)) -> Engine {
        let shortest_ttl = Duration::from_millis(shortest);
        Engine { name, shortest_ttl, by_session: false, trust, patience: (1, 6) }
    }

    impl Engine {
        fn lease(&self, ttl: Duration) -> Lease {
            Lease { ttl, by_session: self.by_session }
        }

        /// When a lease ends whose renewal was sent at zero.
        fn end(&self, ttl: Duration) -> Duration {
            ttl * self.trust.0 / self.trust.1 - lockset::engine::drift(ttl)
        }

        /// From the shortest one to a week, each some three percent longer than the one before.
        fn ttls(&self) -> impl Iterator<Item = Duration> {
            let longer = |ttl: &Duration| Some(*ttl + *ttl / 32);
            let week = Duration::from_secs(7 * 24 * 60 * 60);
            std::iter::successors(Some(self.shortest_ttl), longer)
                .take_while(move |ttl| *ttl < week)
        }
    }

    /// When the supervisor reads a renewal that is confirmed at `answered`, if it read the lease,
    /// which ends at `end`, at zero.
    fn read_at(lease: Lease, end: Duration, answered: Duration) -> Duration {
        let mut now = Duration::ZERO;
        while now < answered {
            now += lease.look_again_in(end.saturating_sub(now)) + LATENCY;
        }
        now
    }

    #[test]
    fn a_renewal_that_is_answered_in_time_reaches_the_guardian_before_it_sends_term() {
        for engine in &ENGINES {
            for ttl in engine.ttls() {
                let (lease, end) = (engine.lease(ttl), engine.end(ttl));
                let sent = end / 3;
                let (longest, _) = lease.longest_grace();
                let term_at = end - lease.margins(longest).term;
                for late in 0..=20 {
                    let latest = ttl * engine.patience.0 / engine.patience.1;
                    let told = read_at(lease, end, sent + latest * late / 20) + LATENCY;
                    let name = engine.name;
                    assert!(
                        told < term_at,
                        "{name} {ttl:?}: told at {told:?}, TERM at {term_at:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_first_lease_that_is_not_short_can_be_renewed_before_term_is_sent() {
        for engine in &ENGINES {
            for ttl in engine.ttls() {
                let (lease, whole) = (engine.lease(ttl), engine.end(ttl));
                let (longest, _) = lease.longest_grace();
                let lefts = (1..=100).map(|part| whole * part / 100);
                for left in lefts.filter(|left| !lease.is_short(*left)) {
                    let answered = left / 3 + ttl * engine.patience.0 / engine.patience.1;
                    let told = read_at(lease, left, answered) + LATENCY;
                    let term_at = left.saturating_sub(lease.margins(longest).term);
                    let what = format!("{} {ttl:?}, {left:?} left", engine.name);
                    assert!(told < term_at, "{what}: told at {told:?}, TERM at {term_at:?}");
                }
                // A usual first lease costs no request more.
                let is_usual = ttl >= millis(200) && engine.patience == (1, 6);
                assert!(!is_usual || !lease.is_short(whole - LATENCY), "{} {ttl:?}", engine.name);
            }
        }
    }

    #[test]
    fn term_comes_before_kill_before_the_end_of_the_lease() {
        for engine in &ENGINES {
            for ttl in engine.ttls() {
                let lease = engine.lease(ttl);
                let (longest, _) = lease.longest_grace();
                for grace in [millis(1).min(longest), ttl / 100, ttl / 20, ttl / 7, longest] {
                    let Margins { term, kill } = lease.margins(grace);
                    let what = format!("{} {ttl:?}, grace {grace:?}", engine.name);
                    assert!(Duration::ZERO < kill && kill < term, "{what}: {term:?} {kill:?}");
                    assert!(term >= grace && term <= longest, "{what}: {term:?}");
                }
            }
        }
    }

    #[test]
    fn term_and_kill_come_shortly_before_the_longest_hold_is_over() {
        for engine in &ENGINES {
            for ttl in engine.ttls() {
                let lease = engine.lease(ttl);
                let (longest_grace, _) = lease.longest_grace();
                for longest in [ttl, ttl + ttl / 3, ttl * 5, ttl * 1000] {
                    for grace in [millis(1), ttl / 20, longest_grace] {
                        let Margins { term, kill } = lease.max_hold_margins(longest, grace);
                        let what = format!("{longest:?} of {ttl:?}, grace {grace:?}");
                        assert!(Duration::ZERO < kill && kill < term, "{what}: {term:?} {kill:?}");
                        assert!(term <= longest / 10 && kill <= longest / 20, "{what}: {term:?}");
                        assert!(term <= longest_grace, "{what}: {term:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_margin_of_kill_shrinks_with_a_short_ttl() {
        let kill = |ttl| Lease { ttl: millis(ttl), by_session: false }.margins(millis(1)).kill;
        assert_eq!(kill(60_000), millis(3000), "a twentieth");
        assert_eq!(kill(3000), millis(250), "but a quarter of a second if there is room for it");
        assert_eq!(kill(400), millis(50), "and an eighth if there is not");
        assert_eq!(kill(100), Duration::from_micros(12_500));
    }
}
