//! probe
#![allow(clippy::print_stdout, reason = "a tool that talks to a person")]
use lockset_testkit::handoff_model::*;
use std::time::Instant;
fn run(name: &str, scenario: Scenario) {
    let began = Instant::now();
    let explored = explore(&scenario, 6_000_000);
    let text = explored.to_string(); println!("{name}: {:.1?} idle {} {}", began.elapsed(), explored.idle, text.lines().next().unwrap());
}
fn main() {
    let t = |n, c: Scenario, way, beat, bound| run(n, c.timers(way, beat, bound));
    use Rule::*;
    let two = || Scenario::clients(2);
    let three = || Scenario::clients(3);

    t("live none D0", three().leases(3, 6, 8), 0, 1, 50);
    t("live none D1 2", two().leases(3, 6, 8), 1, 1, 50);
    t("live none D1 3", three().leases(3, 6, 8), 1, 1, 50);
    t("live crash2 D0", two().leases(3, 6, 8).crashes(1), 0, 1, 50);
    t("live crash3 D0", three().leases(3, 6, 8).crashes(1), 0, 1, 50);
    t("live crash3 D0 2", three().leases(3, 6, 8).crashes(2), 0, 1, 50);
    t("live crash3 D0 26", three().leases(12, 24, 26).crashes(1), 0, 4, 50);
    t("live crash2 D1", two().leases(6, 12, 14).crashes(1), 1, 2, 50);
    t("live crash3 D1", three().leases(3, 6, 7).crashes(1), 1, 1, 50);
    t("live push D0", three().leases(12, 24, 26).lost_pushes(1), 0, 4, 50);
    t("live push D1", three().leases(6, 12, 14).lost_pushes(1), 1, 2, 50);
    t("live push D1 2", two().leases(6, 12, 14).lost_pushes(1), 1, 2, 50);
    t("live cut D0", three().leases(3, 6, 8).cuts(1), 0, 1, 50);
    t("live cut D1 2", two().leases(3, 6, 8).cuts(1), 1, 1, 50);
    t("4", two().leases(3, 6, 8).crashes(1).without(&[HandOnWhenFree]), 0, 1, 8);
    run("3 l2", three().letters(2));
    run("3 l2 crash patient", three().patient().letters(2).crashes(1));
    run("3 l2 cut prompt patient", three().patient().letters(2).prompt().cuts(1));
    run("3 patient", three().patient());
    run("gate3 cut l2", Scenario::gate(3).letters(2).cuts(1));
}
