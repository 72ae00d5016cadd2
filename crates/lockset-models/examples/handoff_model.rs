//! The searches of the hand-off model that are too large for every day.
//!
//! `cargo run --release -p lockset-models --example handoff_model -- deep [millions]` explores
//! each until all states are seen, or as many millions: 40 unless told. A million takes up to
//! 150 MB.
#![allow(clippy::print_stdout, reason = "a tool that talks to a person")]

use std::process::ExitCode;
use std::time::Instant;

use lockset_models::explorer::explore;
use lockset_models::handoff_model::Scenario;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let millions = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["deep"] => Some(40),
        ["deep", millions] => millions.parse().ok(),
        _ => None,
    };
    let Some(millions) = millions.map(|millions: usize| millions * 1_000_000) else {
        println!("usage: handoff_model deep [millions of states]");
        return ExitCode::FAILURE;
    };
    let mut broken = false;
    for (what, scenario) in searches() {
        let began = Instant::now();
        let explored = explore(&scenario, millions);
        println!("{what}: {explored} in {:.0?}", began.elapsed());
        broken |= explored.found.is_some();
    }
    ExitCode::from(u8::from(broken))
}

/// From the small to the large.
fn searches() -> Vec<(&'static str, Scenario)> {
    let (two, three) = (|| Scenario::clients(2), || Scenario::clients(3));
    let gate = || Scenario::gate(3);
    let twice = Scenario { beats: 2, ..two().cuts(1).letters(4) };
    let far = |scenario: Scenario, bound| scenario.leases(6, 12, 14).timers(1, 2, bound);
    vec![
        ("two claims, 4 letters, 1 cut, 1 crash", two().letters(4).cuts(1).crashes(1)),
        ("two claims, two heartbeats at once, 4 letters, 1 cut", twice),
        ("two claims, q=2 f=4 ttl=5, 4 letters, 1 cut", two().leases(2, 4, 5).letters(4).cuts(1)),
        ("two claims, 2 cuts, 1 crash", two().cuts(2).crashes(1)),
        ("a lost push, three claims, way 1: 9 ticks", far(three().lost_pushes(1), 9)),
        ("three claims, pauses", three().patient()),
        ("three claims, pauses and cancels", three()),
        ("three claims, 1 crash", three().crashes(1)),
        ("gate and another, 1 cut", gate().cuts(1)),
        ("three claims, 2 letters, 1 cut", three().letters(2).cuts(1)),
        ("gate and another, 2 cuts", gate().cuts(2)),
        ("three claims, 1 cut", three().cuts(1)),
    ]
}
