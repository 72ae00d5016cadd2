//! Beliefs in one exclusive section never overlap.

use lockset::Mode;

use super::{Finding, seconds};
use crate::history::Promise;
use crate::holds::{Facts, Hold};

/// Every pair of beliefs that excludes each other and overlaps, and every moment with too many
/// permits.
pub(super) fn check(facts: &Facts) -> Vec<Finding> {
    let mut findings = Vec::new();
    for holds in facts.by_name().values() {
        let beliefs: Vec<&Hold> = holds.iter().copied().filter(|hold| hold.is_belief()).collect();
        // Those that may still be believed when the next one is entered.
        let mut open: Vec<&Hold> = Vec::new();
        for second in beliefs {
            open.retain(|first| first.believed_until > second.entered);
            let conflicts = open.iter().filter(|first| conflict(first.mode, second.mode));
            findings.extend(conflicts.map(|first| overlap(first, second)));
            open.push(second);
            findings.extend(too_many_permits(&open, second));
        }
    }
    findings
}

fn conflict(one: Mode, other: Mode) -> bool {
    match (one, other) {
        (Mode::Shared, Mode::Shared) | (Mode::Permits { .. }, Mode::Permits { .. }) => false,
        _ => true,
    }
}

fn overlap(first: &Hold, second: &Hold) -> Finding {
    let end = first.believed_until.min(second.believed_until);
    Finding {
        promise: Promise::Exclusion,
        name: second.name.clone(),
        at: second.entered,
        processes: vec![first.process.clone(), second.process.clone()],
        text: format!(
            "{} entered while {} believed to hold, for {}",
            second.label(),
            first.label(),
            seconds(end - second.entered),
        ),
        exception: None,
    }
}

fn too_many_permits(open: &[&Hold], latest: &Hold) -> Option<Finding> {
    let Mode::Permits { limit, .. } = latest.mode else { return None };
    let taken: u32 = open.iter().map(|hold| permits(hold.mode)).sum();
    (taken > limit).then(|| Finding {
        promise: Promise::Exclusion,
        name: latest.name.clone(),
        at: latest.entered,
        processes: open.iter().map(|hold| hold.process.clone()).collect(),
        text: format!("{} entered: {taken} permits of {limit} are held", latest.label()),
        exception: None,
    })
}

fn permits(mode: Mode) -> u32 {
    match mode {
        Mode::Permits { take, .. } => take,
        Mode::Exclusive | Mode::Shared => 0,
    }
}
