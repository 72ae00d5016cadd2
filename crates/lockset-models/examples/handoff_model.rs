//! The searches of the hand-off model that are too large for every day.
//!
//! `cargo run --release -p lockset-models --example handoff_model -- deep [millions]` explores
//! each until all states are seen, or as many millions: 40 unless told. A million takes up to
//! 150 MB.

use std::process::ExitCode;

use lockset_models::explorer::run_deep_searches;
use lockset_models::handoff_model::Scenario;

fn main() -> ExitCode {
    run_deep_searches("handoff_model", 40, searches())
}

/// From the small to the large.
fn searches() -> Vec<(&'static str, Scenario)> {
    let (two, three) = (|| Scenario::clients(2), || Scenario::clients(3));
    let gate = || Scenario::gate(3);
    let twice = Scenario { heartbeats_in_flight: 2, ..two().cuts(1).messages(4) };
    let far = |scenario: Scenario, bound| scenario.leases(6, 12, 14).timers(1, 2, bound);
    vec![
        ("two claims, 4 letters, 1 cut, 1 crash", two().messages(4).cuts(1).crashes(1)),
        ("two claims, two heartbeats at once, 4 letters, 1 cut", twice),
        ("two claims, q=2 f=4 ttl=5, 4 letters, 1 cut", two().leases(2, 4, 5).messages(4).cuts(1)),
        ("two claims, 2 cuts, 1 crash", two().cuts(2).crashes(1)),
        ("a lost push, three claims, way 1: 9 ticks", far(three().lost_pushes(1), 9)),
        ("two claims, 2 courtesies, 1 cut, 1 crash", two().courtesies(2, 1).cuts(1).crashes(1)),
        ("three claims, 2 letters, 1 courtesy, 1 crash", {
            three().messages(2).courtesies(1, 1).crashes(1)
        }),
        ("three claims, pauses", three().without_cancels()),
        ("three claims, pauses and cancels", three()),
        ("three claims, 1 crash", three().crashes(1)),
        ("gate and another, 1 cut", gate().cuts(1)),
        ("three claims, 2 letters, 1 cut", three().messages(2).cuts(1)),
        ("gate and another, 2 cuts", gate().cuts(2)),
        ("three claims, 1 cut", three().cuts(1)),
    ]
}
