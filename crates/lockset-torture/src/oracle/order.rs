//! Waiters of one process come in order, and processes in turn.

use std::collections::HashMap;
use std::time::Duration;

use lockset::Mode;

use super::Finding;
use crate::history::{Nanos, Promise, Setup, nanos};
use crate::holds::{Facts, Hold};

/// Two tasks of a process that ask within this time are not ordered by the history.
const SAME_INSTANT: Nanos = nanos(Duration::from_millis(5));
/// How long a claim may be on its way to the queue.
const ON_ITS_WAY: Nanos = nanos(Duration::from_millis(300));

/// Checks the locks that are only held exclusively: the others have no process-wide queue.
pub(super) fn check(setup: &Setup, facts: &Facts) -> Vec<Finding> {
    let mut findings = Vec::new();
    for holds in facts.by_name().values() {
        if holds.iter().all(|hold| hold.mode == Mode::Exclusive) {
            findings.extend(overtaken_inside(holds));
            findings.extend(overtaken_twice(setup, facts, holds));
        }
    }
    findings
}

/// Within a process the order holds whatever happens to the servers.
fn overtaken_inside(holds: &[&Hold]) -> Vec<Finding> {
    let mut latest: HashMap<&str, &Hold> = HashMap::new();
    let mut findings = Vec::new();
    for hold in holds {
        let other = *latest.entry(&hold.process).or_insert(hold);
        if hold.asked + SAME_INSTANT < other.asked {
            let text = format!("{} asked before {} and entered later", hold.label(), other.label());
            findings.push(finding(hold, other, text));
        }
        if hold.asked > other.asked {
            latest.insert(&hold.process, hold);
        }
    }
    findings
}

/// While a process waits, each other process may be served once. A fault may cost a waiter its
/// position, so only waits in calm times count.
fn overtaken_twice(setup: &Setup, facts: &Facts, holds: &[&Hold]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut last_exit: HashMap<&str, Nanos> = HashMap::new();
    for (index, hold) in holds.iter().enumerate() {
        // A process queues its next waiter when its last hold is over.
        let earlier = last_exit.get(hold.process.as_str()).copied().unwrap_or(0);
        let queued = hold.asked.max(earlier) + ON_ITS_WAY;
        last_exit.insert(&hold.process, hold.exited.unwrap_or(hold.believed_until));
        let calm_since = queued.saturating_sub(2 * setup.ttl());
        if facts.faults_in(calm_since, hold.entered).next().is_some() {
            continue;
        }
        let mut served: HashMap<&str, usize> = HashMap::new();
        let between = holds[..index].iter().rev().take_while(|other| other.entered > queued);
        for other in between.filter(|other| other.process != hold.process) {
            let times = served.entry(&other.process).or_default();
            *times += 1;
            let ran = facts.stalled(&hold.process, hold.asked, hold.entered) == 0;
            if *times == 2 && ran {
                let text = format!("{} was overtaken twice by {}", hold.label(), other.process);
                findings.push(finding(hold, other, text));
            }
        }
    }
    findings
}

fn finding(hold: &Hold, other: &Hold, text: String) -> Finding {
    Finding {
        promise: Promise::Order,
        name: hold.name.clone(),
        at: hold.entered,
        processes: vec![hold.process.clone(), other.process.clone()],
        text,
        exception: None,
    }
}
