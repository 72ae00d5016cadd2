//! A client in a process of its own: `actor URL [--report-stale-state | --ttl-ms N]`. It reads
//! commands from stdin and writes replies to stdout.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use lockset::Lockset;
use lockset_testkit::process::{StateSource, serve_stdio};

fn main() {
    let url = std::env::args().nth(1).unwrap_or_else(|| "local:".to_owned());
    let option = std::env::args().nth(2).unwrap_or_default();
    let state_source = match option.as_str() {
        "--report-stale-state" => StateSource::Stale,
        _ => StateSource::Guard,
    };
    let mut builder = Lockset::builder(&url);
    if option == "--ttl-ms" {
        let ttl = std::env::args().nth(3).unwrap().parse().unwrap();
        builder = builder.ttl(Duration::from_millis(ttl));
    }
    serve_stdio(state_source, async { builder.connect().await.unwrap() });
}
