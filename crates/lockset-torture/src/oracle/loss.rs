//! The end of a lease is reported before the deadline, and no guard says `Held` after it.

use std::time::Duration;

use super::{Finding, seconds};
use crate::history::{History, Nanos, Promise, What, nanos};
use crate::holds::{Facts, Hold};

/// A task runs somewhat after the moment for which it is woken. Longer delays are recorded as
/// stalls of the process and subtracted.
const WAKING: Nanos = nanos(Duration::from_millis(150));

/// The findings, and the longest delay.
pub(super) fn check(history: &History, facts: &Facts) -> (Vec<Finding>, Nanos) {
    let mut latest = 0;
    let mut findings = held_after_its_deadline(history);
    for hold in &facts.holds {
        let (Some((lost, reason)), Some(deadline)) = (&hold.lost, hold.valid_until) else {
            continue;
        };
        let stalled = facts.stalled(&hold.process, deadline, *lost);
        let delay = lost.saturating_sub(deadline).saturating_sub(stalled);
        latest = latest.max(delay);
        if delay > WAKING {
            let delay = seconds(delay);
            let text = format!("{} was lost ({reason}), and told {delay} late", hold.label());
            findings.push(finding(hold, *lost, text));
        }
    }
    (findings, latest)
}

fn held_after_its_deadline(history: &History) -> Vec<Finding> {
    let wrong = history.events.iter().filter_map(|event| match &event.what {
        What::Valid { op, valid_until, state } if state == "held" && *valid_until <= event.at => {
            Some(Finding {
                promise: Promise::Loss,
                name: String::new(),
                at: event.at,
                processes: vec![event.by.clone()],
                text: format!("{}#{op} reports `held` after its deadline", event.by),
                exception: None,
            })
        }
        _ => None,
    });
    wrong.collect()
}

fn finding(hold: &Hold, at: Nanos, text: String) -> Finding {
    Finding {
        promise: Promise::Loss,
        name: hold.name.clone(),
        at,
        processes: vec![hold.process.clone()],
        text,
        exception: None,
    }
}
