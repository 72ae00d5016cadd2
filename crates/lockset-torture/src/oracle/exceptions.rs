//! The ways in which GUARANTEES.md says that a promise can be broken.

use std::fmt;

use super::Finding;
use crate::history::{Nanos, Promise, Setup};
use crate::holds::{Facts, FaultSpan};

/// How the target of a fault ends if it led its cluster when it was struck.
pub const LEADER: &str = ", the leader";

/// A named exception.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Exception {
    /// redis, "Clock": the server's clock jumped forward, and leases ended early.
    ClockJump,
    /// redis, "Lost state": the server forgot its locks.
    LostState,
    /// redis, "Failover": a replica was promoted that lacks the last writes, or the old master
    /// granted a lock before it knew that it was replaced.
    Failover,
    /// Tokens fall if state was lost and the next clock is behind the last token.
    LostStateAndClock,
    /// etcd#15247: a leader that was stopped longer than a lease revokes renewed leases.
    Etcd15247,
}

impl fmt::Display for Exception {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Exception::ClockJump => "clock jump",
            Exception::LostState => "lost state",
            Exception::Failover => "failover",
            Exception::LostStateAndClock => "lost state and a clock behind",
            Exception::Etcd15247 => "etcd#15247",
        })
    }
}

/// The exception that covers this finding. A fenced register has none.
pub(super) fn exception(setup: &Setup, facts: &Facts, finding: &Finding) -> Option<Exception> {
    match finding.promise {
        Promise::Exclusion => exclusion(setup, facts, finding),
        Promise::Tokens => {
            tokens(setup, facts, finding).or_else(|| old_master(setup, facts, finding))
        }
        Promise::UniqueTokens => tokens(setup, facts, finding),
        Promise::Order | Promise::Loss | Promise::Progress | Promise::Fence => None,
    }
}

/// A fault excuses an overlap if it came after the first holder was granted the lock and before
/// the second one: a fault of long ago excuses nothing.
fn exclusion(setup: &Setup, facts: &Facts, finding: &Finding) -> Option<Exception> {
    between(facts, finding).find_map(|fault| broken_by(setup, fault))
}

/// The faults since the first of two holders began to acquire the lock.
fn between<'a>(facts: &'a Facts, finding: &Finding) -> impl Iterator<Item = &'a FaultSpan> {
    let first = finding.processes.first();
    let held = facts.holds.iter().rev().find(|hold| {
        Some(&hold.process) == first && hold.name == finding.name && hold.entered < finding.at
    });
    facts.faults_in(held.map_or(finding.at, |hold| hold.asked), finding.at)
}

/// A master that was replaced and does not know it yet grants locks with the tokens that follow its
/// own, which are lower than those of the new one.
fn old_master(setup: &Setup, facts: &Facts, finding: &Finding) -> Option<Exception> {
    let mut failovers = between(facts, finding).filter(|fault| {
        let replaced = ["leader-stop", "cut-off"].contains(&fault.fault.as_str());
        replaced && ["sentinel", "cluster"].contains(&setup.engine.as_str())
    });
    failovers.next().map(|_| Exception::Failover)
}

fn broken_by(setup: &Setup, fault: &FaultSpan) -> Option<Exception> {
    match (setup.engine.as_str(), fault.fault.as_str()) {
        ("redis" | "redlock", "clock-forward" | "clock-back") => Some(Exception::ClockJump),
        ("redis", "server-wipe") => Some(Exception::LostState),
        // Any of these may promote a replica.
        ("sentinel" | "cluster", "server-stop" | "server-kill" | "leader-kill" | "leader-stop")
        | ("sentinel", "cut-off") => Some(Exception::Failover),
        ("etcd", "server-stop" | "leader-stop")
            if fault.target.ends_with(LEADER) && lasted(fault) > setup.ttl() =>
        {
            Some(Exception::Etcd15247)
        }
        _ => None,
    }
}

fn lasted(fault: &FaultSpan) -> Nanos {
    fault.end.saturating_sub(fault.begin)
}

/// State must have been lost, and a clock must have been ahead before.
fn tokens(setup: &Setup, facts: &Facts, finding: &Finding) -> Option<Exception> {
    if !["redis", "sentinel", "cluster", "redlock"].contains(&setup.engine.as_str()) {
        return None;
    }
    let earlier = || facts.faults.iter().filter(|fault| fault.begin <= finding.at);
    let lost = earlier().any(|fault| fault.fault == "server-wipe");
    let jumped = earlier().any(|fault| fault.fault.starts_with("clock-"));
    (lost && jumped).then_some(Exception::LostStateAndClock)
}
