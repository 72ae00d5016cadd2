//! The searches of the Redlock model that are too large for every day.
//!
//! `cargo run --release -p lockset-models --example redlock_model -- deep [millions]` explores
//! each until all states are seen, or as many millions: 30 unless told. A million takes up to
//! 300 MB.

use std::process::ExitCode;

use lockset_models::explorer::run_deep_searches;
use lockset_models::redlock_model::{Proposals, Scenario};

fn main() -> ExitCode {
    run_deep_searches("redlock_model", 30, searches())
}

/// From the small to the large.
fn searches() -> Vec<(&'static str, Scenario)> {
    let (two, three) = (|| Scenario::new(3, 2), || Scenario::new(3, 3));
    let any = |values: &[u8]| Proposals::Any(values.to_vec());
    vec![
        ("two attempts, 4 duplicates", two().duplicates(4)),
        ("five nodes, 1 duplicate", Scenario::new(5, 2).duplicates(1)),
        ("two attempts, any proposals, 2 duplicates", two().proposals(any(&[0, 3])).duplicates(2)),
        ("two attempts, extensions, 3 duplicates", two().extensions().duplicates(3)),
        ("two attempts, 3 seeds, 2 duplicates", two().seeds(3).duplicates(2)),
        ("five nodes, 2 seeds", Scenario::new(5, 2).seeds(2)),
        ("two attempts, 6 seeds", two().seeds(6)),
        ("three attempts, 1 seed", three().seeds(1)),
        ("three attempts, 1 duplicate", three().duplicates(1)),
        ("five nodes, 1 seed, 1 duplicate", Scenario::new(5, 2).seeds(1).duplicates(1)),
        ("three attempts, 2 seeds", three().seeds(2)),
        ("three attempts, 1 seed, 1 duplicate", three().seeds(1).duplicates(1)),
        ("five nodes, three attempts", Scenario::new(5, 3)),
    ]
}
