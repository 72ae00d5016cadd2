//! A client in a process of its own: `actor URL`, orders on stdin, answers on stdout.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use lockset::Lockset;
use lockset_testkit::process::{Judging, obey};
use tokio::sync::mpsc::unbounded_channel;

fn main() {
    let url = std::env::args().nth(1).unwrap_or_else(|| "local:".to_owned());
    let judging = match std::env::args().nth(2).as_deref() {
        Some("--by-hearsay") => Judging::ByHearsay,
        _ => Judging::ByTheGuard,
    };
    let (tell, orders) = unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines() {
            tell.send(serde_json::from_str(&line.unwrap()).unwrap()).unwrap();
        }
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let locks = Lockset::connect(&url).await.unwrap();
        let tell = |answer| println!("{}", serde_json::to_string(&answer).unwrap());
        obey(locks, orders, tell, judging).await;
    });
}
