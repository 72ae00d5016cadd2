//! A client in a process of its own: `actor URL [--by-hearsay | --ttl-ms N]`, orders on stdin,
//! answers on stdout.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::time::Duration;

use lockset::Lockset;
use lockset_testkit::process::{Judging, obey};
use tokio::sync::mpsc::unbounded_channel;

fn main() {
    let url = std::env::args().nth(1).unwrap_or_else(|| "local:".to_owned());
    let option = std::env::args().nth(2).unwrap_or_default();
    let judging = match option.as_str() {
        "--by-hearsay" => Judging::ByHearsay,
        _ => Judging::ByTheGuard,
    };
    let mut builder = Lockset::builder(&url);
    if option == "--ttl-ms" {
        let ttl = std::env::args().nth(3).unwrap().parse().unwrap();
        builder = builder.ttl(Duration::from_millis(ttl));
    }
    let (tell, orders) = unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines() {
            tell.send(serde_json::from_str(&line.unwrap()).unwrap()).unwrap();
        }
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let locks = builder.connect().await.unwrap();
        let tell = |answer| println!("{}", serde_json::to_string(&answer).unwrap());
        obey(locks, orders, tell, judging).await;
    });
}
