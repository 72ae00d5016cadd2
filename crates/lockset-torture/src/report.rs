//! The tables: of one run on the terminal, of all runs in `docs/torture.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use crate::backend::EngineKind;
use crate::history::Register;
use crate::schedule::Fault;
use crate::summary::{FaultSummary, Summary};

/// What was found by this test and what became of it; written by hand.
const FOUND: &str = include_str!("../found.md");

/// One run as text.
pub fn terminal(summary: &Summary) -> String {
    let mut text = String::new();
    let s = summary;
    writeln!(
        text,
        "{}: {} grants, {} failed, {} lost; longest stall {:.1} s; latest loss {} ms late",
        s.engine,
        s.grants,
        s.failures,
        s.losses,
        s.longest_stall_ms as f64 / 1e3,
        s.latest_loss_ms,
    )
    .unwrap();
    for (register, writes) in &s.data {
        writeln!(
            text,
            "  writes, {:8} {:6} attempted {:6} acknowledged {:5} rejected {:4} lost",
            format!("{register:?}").to_lowercase(),
            writes.attempted,
            writes.acknowledged,
            writes.rejected,
            writes.lost,
        )
        .unwrap();
    }
    for (fault, summary) in &s.faults {
        let stall = summary.longest_stall_ms as f64 / 1e3;
        writeln!(
            text,
            "  {fault:14} {:3} times  longest stall {stall:4.1} s  {}",
            summary.strikes,
            outcome(summary),
        )
        .unwrap();
    }
    for violation in s.violations.iter().take(20) {
        writeln!(text, "  VIOLATION: {violation}").unwrap();
    }
    text
}

fn outcome(summary: &FaultSummary) -> String {
    let mut parts: Vec<String> =
        summary.exceptions.iter().map(|(name, count)| format!("{count} × {name}")).collect();
    if summary.violations > 0 {
        parts.insert(0, format!("{} violations", summary.violations));
    }
    if parts.is_empty() { "clean".to_owned() } else { parts.join(", ") }
}

/// The page of all runs.
pub fn page(summaries: &[Summary]) -> String {
    let is_ours = |summary: &&Summary| summary.version.is_empty();
    let ours: Vec<&Summary> = summaries.iter().filter(is_ours).collect();
    let peers: Vec<&Summary> = summaries.iter().filter(|one| !is_ours(one)).collect();
    let mut text = String::from(HEAD);
    text.push_str(&runs(&ours));
    text.push_str(&faults(&ours));
    text.push_str(&data(&ours));
    if !peers.is_empty() {
        text.push_str(&peer_table(&peers));
    }
    text.push('\n');
    text.push_str(FOUND);
    text
}

const HEAD: &str = include_str!("../page_head.md");

fn runs(ours: &[&Summary]) -> String {
    let mut text = String::from(
        "\n## What was run\n\n| engine | runs | seeds | minutes | grants | lost | violations | exceptions | latest loss report |\n|---|--:|---|--:|--:|--:|--:|---|--:|\n",
    );
    for (engine, runs) in by_engine(ours) {
        let seeds: Vec<String> = runs.iter().map(|run| run.seed.to_string()).collect();
        let sum = |number: fn(&Summary) -> usize| runs.iter().map(|run| number(run)).sum::<usize>();
        let minutes = sum(|run| run.seconds as usize) as f64 / 60.0;
        let mut exceptions: BTreeMap<&str, usize> = BTreeMap::new();
        for (name, count) in runs.iter().flat_map(|run| &run.exceptions) {
            *exceptions.entry(name).or_default() += count;
        }
        let exceptions: Vec<String> =
            exceptions.iter().map(|(name, count)| format!("{count} × {name}")).collect();
        let latest = runs.iter().map(|run| run.latest_loss_ms).max().unwrap_or(0);
        writeln!(
            text,
            "| {engine} | {} | {} | {minutes:.1} | {} | {} | {} | {} | {latest} ms |",
            runs.len(),
            seeds.join(", "),
            sum(|run| run.grants),
            sum(|run| run.losses),
            sum(|run| run.violations.len()),
            dash(&exceptions.join(", ")),
        )
        .unwrap();
    }
    text
}

fn faults(ours: &[&Summary]) -> String {
    let used: BTreeSet<&str> =
        ours.iter().flat_map(|run| run.faults.keys().map(String::as_str)).collect();
    let engines = by_engine(ours);
    let heads: Vec<&str> = engines.keys().copied().collect();
    let mut text = format!(
        "\n## Engine × fault\n\nHow often each fault was made, and what was found from its begin to the begin of the next one.\n`–`: the engine cannot have this fault.\n\n| fault | {} |\n|---|{}\n",
        heads.join(" | "),
        "---|".repeat(heads.len()),
    );
    for fault in Fault::all().map(|fault| fault.to_string()).filter(|f| used.contains(f.as_str())) {
        let cells: Vec<String> = engines.values().map(|runs| cell(runs, &fault)).collect();
        writeln!(text, "| {fault} | {} |", cells.join(" | ")).unwrap();
    }
    text
}

fn cell(runs: &[&Summary], fault: &str) -> String {
    let mut all = FaultSummary::default();
    for one in runs.iter().filter_map(|run| run.faults.get(fault)) {
        all.strikes += one.strikes;
        all.violations += one.violations;
        for (name, count) in &one.exceptions {
            *all.exceptions.entry(name.clone()).or_default() += count;
        }
    }
    match all.strikes {
        0 => "–".to_owned(),
        strikes => format!("{strikes}: {}", outcome(&all)),
    }
}

fn data(ours: &[&Summary]) -> String {
    let mut text = String::from(
        "\n## The data\n\nThree registers, each a set and a counter that are read, changed and written back under the lock. `plain` is\nwritten without any check, as most programs do; `checked` only if the guard says just before that the lock is held;\n`fenced` is read and written with the token. Acknowledged writes that are missing at the end are lost.\n\n| engine | plain: acknowledged | lost | checked: acknowledged | lost | fenced: acknowledged | rejected | lost |\n|---|--:|--:|--:|--:|--:|--:|--:|\n",
    );
    for (engine, runs) in by_engine(ours) {
        let sum = |register: Register| {
            let mut sum = crate::summary::Writes::default();
            for writes in runs.iter().filter_map(|run| run.data.get(&register)) {
                sum.acknowledged += writes.acknowledged;
                sum.rejected += writes.rejected;
                sum.lost += writes.lost;
            }
            sum
        };
        let (plain, checked, fenced) =
            (sum(Register::Plain), sum(Register::Checked), sum(Register::Fenced));
        writeln!(
            text,
            "| {engine} | {} | {} | {} | {} | {} | {} | {} |",
            plain.acknowledged,
            plain.lost,
            checked.acknowledged,
            checked.lost,
            fenced.acknowledged,
            fenced.rejected,
            fenced.lost,
        )
        .unwrap();
    }
    text
}

fn peer_table(peers: &[&Summary]) -> String {
    let mut text = String::from(PEERS);
    for run in peers {
        writeln!(text, "| **{}** ({}), seed {} | | | | | | |", run.engine, run.version, run.seed)
            .unwrap();
        for (fault, summary) in &run.faults {
            // A lock without tokens cannot be fenced.
            let fenced = match summary.fenced.attempted {
                0 => "–".to_owned(),
                _ => summary.fenced.lost.to_string(),
            };
            writeln!(
                text,
                "| {} × {fault} | {} | {} | {} | {fenced} | {} | {:.1} s |",
                summary.strikes,
                summary.plain.attempted,
                summary.plain.acknowledged,
                summary.plain.lost,
                summary.overlaps,
                summary.longest_stall_ms as f64 / 1e3,
            )
            .unwrap();
        }
    }
    text
}

const PEERS: &str = include_str!("../page_peers.md");

/// In the order of the command line.
fn by_engine<'a>(runs: &[&'a Summary]) -> BTreeMap<&'a str, Vec<&'a Summary>> {
    let mut engines: BTreeMap<&str, Vec<&Summary>> = BTreeMap::new();
    for run in runs {
        engines.entry(&run.engine).or_default().push(run);
    }
    engines.retain(|name, _| name.parse::<EngineKind>().is_ok());
    engines
}

fn dash(text: &str) -> &str {
    if text.is_empty() { "–" } else { text }
}
