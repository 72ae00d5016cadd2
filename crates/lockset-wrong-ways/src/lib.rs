//! The classic mistakes of hand-made locks: each as a small client that is played step by step, in
//! the shortest schedule that breaks it, and judged by the oracle of `lockset-torture`. Lockset
//! plays the same schedule, and the oracle finds nothing.
//!
//! `cargo xtask wrong-ways` shows them, `docs/wrong-ways.md` tells their story. The servers are
//! real. The order of the steps is the schedule's, so nothing depends on luck: where a lease has to
//! end, a hand-made lock's key is made to expire by `PEXPIRE lock 0`.
//!
//! | module | contents |
//! |---|---|
//! | [`play`] | a schedule that is played: its timeline, and its history for the oracle |
//! | [`redis_locks`] | mistakes with one Redis server |
//! | [`several_servers`] | mistakes with replicas, quorums and sessions |
//! | [`lockset_client`] | a process with a Lockset client, driven step by step |
//! | [`right_ways`] | the same schedules on Lockset |
// This crate is test code: a broken expectation must end the run with a message.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub mod lockset_client;
pub mod play;
pub mod redis_locks;
pub mod right_ways;
pub mod several_servers;

use lockset_torture::history::Promise;

use crate::play::Play;

/// A mistake.
#[derive(Clone, Copy, Debug)]
pub struct Mistake {
    /// Its name on the command line.
    pub name: &'static str,
    /// The mistake in a sentence.
    pub title: &'static str,
    /// The promise that it breaks.
    pub breaks: Promise,
    /// Plays the hand-made lock.
    pub wrong: fn(&mut Play),
    /// Plays the same schedule on Lockset.
    pub right: fn(&mut Play),
}

/// Every mistake, from the naive lock to the fenced one.
pub const MISTAKES: &[Mistake] = &[
    Mistake {
        name: "check-then-set",
        title: "the check and the write are two steps",
        breaks: Promise::Exclusion,
        wrong: redis_locks::check_then_set,
        right: right_ways::contend,
    },
    Mistake {
        name: "always-true",
        title: "the lock function returns true on every path",
        breaks: Promise::Exclusion,
        wrong: redis_locks::always_true,
        right: right_ways::contend,
    },
    Mistake {
        name: "timeout-is-success",
        title: "the poll loop ends with its timeout, and success is returned",
        breaks: Promise::Exclusion,
        wrong: redis_locks::timeout_is_success,
        right: right_ways::wait_in_vain,
    },
    Mistake {
        name: "no-expiry",
        title: "the lock of a dead client is never freed",
        breaks: Promise::Progress,
        wrong: redis_locks::no_expiry,
        right: right_ways::crash,
    },
    Mistake {
        name: "expire-later",
        title: "the expiry is set by a second command, which a crash prevents",
        breaks: Promise::Progress,
        wrong: redis_locks::expire_later,
        right: right_ways::crash,
    },
    Mistake {
        name: "clock-in-value",
        title: "the expiry is a time in the value, and clients compare it with their own clocks",
        breaks: Promise::Exclusion,
        wrong: redis_locks::clock_in_value,
        right: right_ways::skewed_clock,
    },
    Mistake {
        name: "delete-any",
        title: "the release deletes the key, also that of another client",
        breaks: Promise::Exclusion,
        wrong: redis_locks::delete_any,
        right: right_ways::late_release,
    },
    Mistake {
        name: "get-then-delete",
        title: "the release checks the owner and deletes in two steps",
        breaks: Promise::Exclusion,
        wrong: redis_locks::look_then_delete,
        right: right_ways::late_release,
    },
    Mistake {
        name: "silent-unlock",
        title: "the release hides that the lock was lost",
        breaks: Promise::Loss,
        wrong: redis_locks::silent_unlock,
        right: right_ways::late_release,
    },
    Mistake {
        name: "no-renewal",
        title: "the work takes longer than the lease",
        breaks: Promise::Exclusion,
        wrong: redis_locks::no_renewal,
        right: right_ways::long_work,
    },
    Mistake {
        name: "deaf-watchdog",
        title: "the watchdog ignores that its renewal failed",
        breaks: Promise::Exclusion,
        wrong: redis_locks::deaf_watchdog,
        right: right_ways::stall,
    },
    Mistake {
        name: "orphaned-watchdog",
        title: "the watchdog outlives the work",
        breaks: Promise::Progress,
        wrong: redis_locks::orphaned_watchdog,
        right: right_ways::failing_work,
    },
    Mistake {
        name: "late-watchdog",
        title: "the watchdog fires when the lease ends",
        breaks: Promise::Exclusion,
        wrong: redis_locks::late_watchdog,
        right: right_ways::long_work,
    },
    Mistake {
        name: "promoted-replica",
        title: "a replica is promoted that does not have the key",
        breaks: Promise::Exclusion,
        wrong: several_servers::promoted_replica,
        right: right_ways::failover,
    },
    Mistake {
        name: "wall-clock-quorum",
        title: "the validity of a quorum is computed with the wall clock",
        breaks: Promise::Exclusion,
        wrong: several_servers::wall_clock_quorum,
        right: right_ways::quorum_with_skewed_clock,
    },
    Mistake {
        name: "old-session",
        title: "a node of an old ZooKeeper session is believed",
        breaks: Promise::Exclusion,
        wrong: several_servers::old_session,
        right: right_ways::session,
    },
    Mistake {
        name: "no-fence",
        title: "the data accepts a write of a client that was paused",
        breaks: Promise::Fence,
        wrong: redis_locks::no_fence,
        right: right_ways::fence,
    },
];

impl Mistake {
    /// The mistake with this name.
    pub fn named(name: &str) -> Option<&'static Mistake> {
        MISTAKES.iter().find(|mistake| mistake.name == name)
    }

    /// Plays the hand-made lock.
    pub fn play_wrong(&self) -> Play {
        let mut play = Play::new("hand-made", &[self.breaks]);
        (self.wrong)(&mut play);
        play
    }

    /// Plays Lockset, which has to keep all promises that a schedule can break.
    pub fn play_right(&self) -> Play {
        let promises =
            [Promise::Exclusion, Promise::Tokens, Promise::Fence, Promise::Loss, Promise::Progress];
        let mut play = Play::new("lockset", &promises);
        (self.right)(&mut play);
        play
    }
}
