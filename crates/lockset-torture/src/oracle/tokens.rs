//! Tokens are unique, and grow in real time.

use std::collections::HashMap;

use lockset::Mode;

use super::Finding;
use crate::history::Promise;
use crate::holds::{Facts, Hold};

/// Three rules for each lock: no token comes twice; a token that was asked for after another was
/// received is greater; of two exclusive beliefs the later has the greater token.
pub(super) fn check(facts: &Facts) -> Vec<Finding> {
    let mut findings = Vec::new();
    for holds in facts.by_name().values() {
        let tokens: Vec<(&Hold, u64)> =
            holds.iter().filter_map(|hold| hold.token.map(|token| (*hold, token))).collect();
        findings.extend(repeated(&tokens));
        findings.extend(falls_in_real_time(&tokens));
        if holds.iter().all(|hold| hold.mode == Mode::Exclusive) {
            findings.extend(falls_between_beliefs(&tokens));
        }
    }
    findings
}

fn repeated(tokens: &[(&Hold, u64)]) -> Vec<Finding> {
    let mut seen: HashMap<u64, &Hold> = HashMap::new();
    let twice = tokens.iter().filter_map(|(hold, token)| {
        let first = seen.insert(*token, hold)?;
        Some(finding(first, hold, "the token was given out before"))
    });
    twice.collect()
}

fn falls_in_real_time(tokens: &[(&Hold, u64)]) -> Vec<Finding> {
    // In the order of asking, next to the greatest token that was received by then.
    let mut by_asking: Vec<&(&Hold, u64)> = tokens.iter().collect();
    by_asking.sort_by_key(|(hold, _)| hold.asked);
    let mut received = tokens.iter().peekable();
    let mut greatest: Option<&(&Hold, u64)> = None;
    let mut findings = Vec::new();
    for (hold, token) in by_asking {
        while let Some(earlier) = received.next_if(|(earlier, _)| earlier.entered < hold.asked) {
            if greatest.is_none_or(|(_, most)| *most < earlier.1) {
                greatest = Some(earlier);
            }
        }
        if let Some((earlier, _)) = greatest.filter(|(_, most)| most > token) {
            findings.push(finding(earlier, hold, "it asked later and has a lower token"));
        }
    }
    findings
}

fn falls_between_beliefs(tokens: &[(&Hold, u64)]) -> Vec<Finding> {
    let beliefs: Vec<_> = tokens.iter().filter(|(hold, _)| hold.is_belief()).collect();
    let falls = beliefs.windows(2).filter(|pair| {
        // The first rule has reported those that were asked for later.
        pair[0].1 > pair[1].1 && pair[1].0.asked <= pair[0].0.entered
    });
    falls.map(|pair| finding(pair[0].0, pair[1].0, "it entered later with a lower token")).collect()
}

fn finding(first: &Hold, second: &Hold, what: &str) -> Finding {
    Finding {
        promise: Promise::Tokens,
        name: second.name.clone(),
        at: second.entered,
        processes: vec![first.process.clone(), second.process.clone()],
        text: format!("{} after {}: {what}", second.label(), first.label()),
        exception: None,
    }
}
