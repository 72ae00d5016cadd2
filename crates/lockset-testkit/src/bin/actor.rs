//! A client in a process of its own: `actor URL [--report-stale-state | --ttl-ms N]`. It reads
//! commands from stdin and writes replies to stdout.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::time::Duration;

use lockset::Lockset;
use lockset_testkit::process::{StateSource, run_actor};
use tokio::sync::mpsc::unbounded_channel;

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
    let (tell, commands) = unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines() {
            tell.send(serde_json::from_str(&line.unwrap()).unwrap()).unwrap();
        }
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let locks = builder.connect().await.unwrap();
        let tell = |reply| println!("{}", serde_json::to_string(&reply).unwrap());
        run_actor(locks, commands, tell, state_source).await;
    });
}
