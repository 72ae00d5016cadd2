//! What is kept of a run: the numbers of the tables.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::history::{History, Nanos, Outcome, Promise, Register, What};
use crate::holds::{Facts, FaultSpan};
use crate::oracle::{Verdict, judge};

/// One run in numbers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Summary {
    /// The command that repeats it.
    pub command: String,
    /// The engine or peer.
    pub engine: String,
    /// The version of a peer and of its server; empty for our own engines.
    pub version: String,
    /// The seed.
    pub seed: u64,
    /// How long it took, in seconds.
    pub seconds: u64,
    /// Acquisitions that were granted.
    pub grants: usize,
    /// Acquisitions that failed.
    pub failures: usize,
    /// Holds that were lost.
    pub losses: usize,
    /// Overlapping beliefs, excepted or not.
    pub overlaps: usize,
    /// The longest time without any grant, in milliseconds.
    pub longest_stall_ms: u64,
    /// The latest report of a loss after its deadline, in milliseconds.
    pub latest_loss_ms: u64,
    /// The broken promises.
    pub violations: Vec<String>,
    /// The exceptions that GUARANTEES.md names, and how often they occurred.
    pub exceptions: BTreeMap<String, usize>,
    /// The writes, by register.
    pub data: BTreeMap<Register, Writes>,
    /// What happened in and after each kind of fault.
    pub faults: BTreeMap<String, FaultSummary>,
}

/// The writes of a register.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Writes {
    /// Begun.
    pub attempted: usize,
    /// Acknowledged.
    pub acknowledged: usize,
    /// Refused.
    pub rejected: usize,
    /// Acknowledged and lost.
    pub lost: usize,
}

/// What happened from the begin of a fault to the begin of the next.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct FaultSummary {
    /// How often it was made.
    pub strikes: usize,
    /// Broken promises.
    pub violations: usize,
    /// Exceptions, by name.
    pub exceptions: BTreeMap<String, usize>,
    /// Overlapping beliefs, excepted or not.
    pub overlaps: usize,
    /// Writes of the plain register.
    pub plain: Writes,
    /// Writes of the fenced register.
    pub fenced: Writes,
    /// The longest time without any grant, in milliseconds.
    pub longest_stall_ms: u64,
}

impl Summary {
    /// The numbers of a run.
    pub fn of(history: &History, verdict: &Verdict, command: String, version: String) -> Self {
        let setup = history.setup();
        let facts = Facts::of(history);
        let (begin, end) = history.span();
        let names = verdict.exceptions().into_iter();
        let writes = |register| {
            let counts = verdict.data.get(&register).copied().unwrap_or_default();
            let (attempted, acknowledged) = (counts.attempted, counts.acknowledged);
            Writes { attempted, acknowledged, rejected: counts.rejected, lost: counts.lost }
        };
        let overlaps = verdict
            .findings
            .iter()
            .filter(|finding| finding.promise == crate::history::Promise::Exclusion);
        Self {
            command,
            engine: setup.engine.clone(),
            version,
            seed: setup.seed,
            seconds: (end - begin) / 1_000_000_000,
            grants: verdict.grants,
            failures: verdict.failures,
            losses: verdict.losses,
            overlaps: overlaps.count(),
            longest_stall_ms: verdict.longest_stall / 1_000_000,
            latest_loss_ms: verdict.latest_loss / 1_000_000,
            violations: verdict.violations().map(|finding| finding.text.clone()).collect(),
            exceptions: names.map(|(exception, count)| (exception.to_string(), count)).collect(),
            data: verdict.data.keys().map(|register| (*register, writes(*register))).collect(),
            faults: by_fault(history, &facts, verdict),
        }
    }

    /// Whether the oracle found nothing.
    pub fn is_clean(&self) -> bool {
        self.violations.is_empty()
    }

    /// The summaries of all runs below this folder, from their histories, which are judged again:
    /// what an older oracle excused does not count.
    ///
    /// # Errors
    /// If one cannot be read.
    pub fn read_all(folder: &Path) -> std::io::Result<Vec<Self>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(folder)? {
            let folder = entry?.path();
            let file = folder.join("summary.json");
            if file.is_file() {
                let old: Self = serde_json::from_str(&std::fs::read_to_string(file)?)?;
                let history = History::read(&folder)?;
                found.push(Self::of(&history, &judge(&history), old.command, old.version));
            }
        }
        found.sort_by(|one, other| (&one.engine, one.seed).cmp(&(&other.engine, other.seed)));
        Ok(found)
    }
}

fn by_fault(history: &History, facts: &Facts, verdict: &Verdict) -> BTreeMap<String, FaultSummary> {
    let end = history.span().1;
    let kept = kept(history);
    let mut summaries: BTreeMap<String, FaultSummary> = BTreeMap::new();
    for (index, fault) in facts.faults.iter().enumerate() {
        let next = facts.faults.get(index + 1).map_or(end, |next| next.begin);
        let summary = summaries.entry(fault.fault.clone()).or_default();
        summary.strikes += 1;
        let stall = longest_stall(facts, fault, next) / 1_000_000;
        summary.longest_stall_ms = summary.longest_stall_ms.max(stall);
        let within = |at: Nanos| (fault.begin..next).contains(&at);
        for finding in verdict.findings.iter().filter(|finding| within(finding.at)) {
            match finding.exception {
                None => summary.violations += 1,
                Some(name) => *summary.exceptions.entry(name.to_string()).or_default() += 1,
            }
            summary.overlaps += usize::from(finding.promise == Promise::Exclusion);
        }
        for event in history.events.iter().filter(|event| within(event.at)) {
            let What::Wrote { register, value, outcome, .. } = &event.what else { continue };
            let writes = match register {
                Register::Plain => &mut summary.plain,
                Register::Fenced => &mut summary.fenced,
                Register::Checked => continue,
            };
            let is_acknowledged = *outcome == Outcome::Acknowledged;
            writes.attempted += 1;
            writes.acknowledged += usize::from(is_acknowledged);
            writes.rejected += usize::from(*outcome == Outcome::Rejected);
            writes.lost += usize::from(is_acknowledged && !kept.contains(value.as_str()));
        }
    }
    summaries
}

/// The values that are in a register at the end.
fn kept(history: &History) -> HashSet<&str> {
    let finals = history.events.iter().filter_map(|event| match &event.what {
        What::Final { values, .. } => Some(values),
        _ => None,
    });
    finals.flatten().map(String::as_str).collect()
}

fn longest_stall(facts: &Facts, fault: &FaultSpan, next: Nanos) -> Nanos {
    let grants = facts.holds.iter().map(|hold| hold.entered);
    let grants = grants.filter(|at| (fault.begin..next).contains(at));
    let times: Vec<Nanos> = [fault.begin].into_iter().chain(grants).chain([next]).collect();
    times.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0)
}
