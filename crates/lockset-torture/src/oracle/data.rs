//! A fenced register loses no acknowledged write.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::Finding;
use crate::history::{History, Nanos, Outcome, Promise, Register, What};

/// What happened to the writes of a register.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DataCounts {
    /// Writes that were begun.
    pub attempted: usize,
    /// Writes that were acknowledged.
    pub acknowledged: usize,
    /// Writes that the guard or the fence refused.
    pub rejected: usize,
    /// Acknowledged writes that are not in the set at the end.
    pub lost: usize,
}

/// The findings about fenced registers, and the counts of all.
pub(super) fn check(history: &History) -> (Vec<Finding>, BTreeMap<Register, DataCounts>) {
    let mut counts: BTreeMap<Register, DataCounts> = BTreeMap::new();
    let mut acknowledged: HashMap<&str, (Register, &str, Nanos)> = HashMap::new();
    let mut rejected: HashMap<&str, (Register, &str, Nanos)> = HashMap::new();
    for event in &history.events {
        match &event.what {
            What::Write { register, .. } => counts.entry(*register).or_default().attempted += 1,
            What::Wrote { register, value, outcome, .. } => {
                let count = counts.entry(*register).or_default();
                let entry = (*register, event.by.as_str(), event.at);
                match outcome {
                    Outcome::Acknowledged => {
                        count.acknowledged += 1;
                        acknowledged.insert(value, entry);
                    }
                    Outcome::Rejected => {
                        count.rejected += 1;
                        rejected.insert(value, entry);
                    }
                    Outcome::Unknown => {}
                }
            }
            _ => {}
        }
    }
    let finals = finals(history);
    let kept: HashSet<&str> =
        finals.iter().flat_map(|end| end.values.iter().map(String::as_str)).collect();
    let mut findings = Vec::new();
    for (value, (register, by, at)) in &acknowledged {
        if !finals.is_empty() && !kept.contains(value) {
            counts.entry(*register).or_default().lost += 1;
            if *register == Register::Fenced {
                findings.push(finding(by, *at, format!("the acknowledged write {value} is lost")));
            }
        }
    }
    for (value, (register, by, at)) in &rejected {
        if *register == Register::Fenced && kept.contains(value) {
            findings.push(finding(by, *at, format!("the rejected write {value} was made")));
        }
    }
    for end in finals.iter().filter(|end| end.register == Register::Fenced) {
        if end.counter != end.values.len() as u64 {
            let (counter, values) = (end.counter, end.values.len());
            let text = format!("{}: the counter is {counter} after {values} writes", end.name);
            findings.push(finding("register", end.at, text));
        }
    }
    (findings, counts)
}

/// What a register contains at the end.
struct End<'a> {
    name: &'a str,
    register: Register,
    values: &'a [String],
    counter: u64,
    at: Nanos,
}

fn finals(history: &History) -> Vec<End<'_>> {
    let finals = history.events.iter().filter_map(|event| match &event.what {
        What::Final { name, register, values, counter } => {
            Some(End { name, register: *register, values, counter: *counter, at: event.at })
        }
        _ => None,
    });
    finals.collect()
}

fn finding(by: &str, at: Nanos, text: String) -> Finding {
    Finding {
        promise: Promise::Fence,
        name: String::new(),
        at,
        processes: vec![by.to_owned()],
        text,
        exception: None,
    }
}
