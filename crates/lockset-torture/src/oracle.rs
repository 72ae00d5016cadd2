//! Judges a history: which promises were broken, and which of these breaks GUARANTEES.md names.
//!
//! [`judge`] needs nothing but the history. Each rule has a module:
//!
//! | module | rule |
//! |---|---|
//! | `exclusion` | beliefs in one exclusive section never overlap; at most `limit` permits |
//! | `tokens` | tokens are unique, and grow in real time |
//! | `order` | waiters of one process in order, processes in turn |
//! | `loss` | the end of a lease is reported before it ends |
//! | `progress` | locks are granted again when the faults are over |
//! | `data` | a fenced register loses no acknowledged write |
//! | `exceptions` | what GUARANTEES.md says can happen: counted, not a violation |

use std::collections::BTreeMap;

use crate::history::{History, Nanos, Promise, Register};
use crate::holds::Facts;

mod data;
mod exceptions;
mod exclusion;
mod loss;
mod order;
mod progress;
mod tokens;

#[cfg(test)]
mod tests;

pub use data::DataCounts;
pub use exceptions::{Exception, LEADER};

/// A promise that was broken.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// Which.
    pub promise: Promise,
    /// The lock.
    pub name: String,
    /// Since when.
    pub at: Nanos,
    /// The processes that are concerned.
    pub processes: Vec<String>,
    /// What happened.
    pub text: String,
    /// The line of GUARANTEES.md that says that it can happen.
    pub exception: Option<Exception>,
}

/// The judgement of a history.
#[derive(Clone, Debug, Default)]
pub struct Verdict {
    /// Every broken promise, also those that are excepted.
    pub findings: Vec<Finding>,
    /// What happened to the data, by register.
    pub data: BTreeMap<Register, DataCounts>,
    /// How many acquisitions were granted.
    pub grants: usize,
    /// How many acquisitions failed.
    pub failures: usize,
    /// How many holds were lost.
    pub losses: usize,
    /// The longest time in which no lock was granted at all.
    pub longest_stall: Nanos,
    /// The longest time that a loss was reported after the deadline, stalls of the process left
    /// out.
    pub latest_loss: Nanos,
}

impl Verdict {
    /// The findings that are no exceptions.
    pub fn violations(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|finding| finding.exception.is_none())
    }

    /// How often each exception occurred.
    pub fn exceptions(&self) -> BTreeMap<Exception, usize> {
        let mut counts = BTreeMap::new();
        for exception in self.findings.iter().filter_map(|finding| finding.exception) {
            *counts.entry(exception).or_insert(0) += 1;
        }
        counts
    }

    /// How many violations of this promise there are.
    pub fn count(&self, promise: Promise) -> usize {
        self.violations().filter(|finding| finding.promise == promise).count()
    }
}

/// Judges a history.
pub fn judge(history: &History) -> Verdict {
    let facts = Facts::of(history);
    let setup = history.setup();
    let mut findings = Vec::new();
    findings.extend(exclusion::check(&facts));
    findings.extend(tokens::check(&facts));
    findings.extend(order::check(setup, &facts));
    let (late, latest_loss) = loss::check(history, &facts);
    findings.extend(late);
    findings.extend(progress::check(history, &facts));
    let (lost, data) = data::check(history);
    findings.extend(lost);
    findings.retain(|finding| setup.promises(finding.promise));
    for finding in &mut findings {
        finding.exception = exceptions::exception(setup, &facts, finding);
    }
    findings.sort_by_key(|finding| finding.at);
    Verdict {
        findings,
        data,
        grants: facts.holds.len(),
        failures: progress::failures(history),
        losses: facts.holds.iter().filter(|hold| hold.lost.is_some()).count(),
        longest_stall: progress::longest_stall(history, &facts),
        latest_loss,
    }
}

/// A time as seconds and milliseconds, for messages.
fn seconds(span: Nanos) -> String {
    format!("{:.3} s", span as f64 / 1e9)
}
