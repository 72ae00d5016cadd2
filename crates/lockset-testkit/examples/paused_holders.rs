//! A holder that is paused beyond its lease and then writes, on each engine and store: with the
//! fence of the store it is rejected, without one it replaces the newer value.
//!
//!     cargo run -p lockset-testkit --example paused_holders                 local with SQLite
//!     cargo run -p lockset-testkit --example paused_holders -- redis file   one engine and store
//!     cargo run -p lockset-testkit --example paused_holders -- all          all pairs, as a table
//!
//! `cargo run --example paused_holder` is the same accident in one file to read.
#![allow(clippy::print_stdout, reason = "an example talks to its reader")]

use lockset_testkit::paused_holder::{ENGINES, STORES, Stores, play_all, stage_of};
use lockset_testkit::process::serve_arguments;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    // The clients are processes of this program, which are given the URL of their engine.
    if args.first().is_some_and(|arg| arg.contains(':')) {
        serve_arguments();
        return Ok(());
    }
    let (engines, stores) = match &args[..] {
        [] => (&["local"][..], &["sqlite"][..]),
        ["all"] => (ENGINES, STORES),
        [engine, store] if ENGINES.contains(engine) && STORES.contains(store) => {
            (&[*engine][..], &[*store][..])
        }
        _ => {
            let (engines, stores) = (ENGINES.join(" | "), STORES.join(" | "));
            return Err(format!("usage: paused_holders [all | ({engines}) ({stores})]").into());
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(play(engines, stores))
}

async fn play(engines: &[&str], stores: &[&str]) -> Result<(), Box<dyn std::error::Error>> {
    let exe = std::env::current_exe()?.display().to_string();
    let actor: &'static str = Box::leak(exe.into_boxed_str());
    let is_table = engines.len() * stores.len() > 1;
    if is_table {
        println!("{:12}{:12}{:36}without a fence", "engine", "store", "with the fence");
    }
    for engine in engines {
        let stage = stage_of(engine, actor);
        let played = play_all(&*stage, &Stores::start(stores), stores).await;
        for (store, pair) in stores.iter().zip(played.chunks(2)) {
            match pair {
                [(_, fenced), (_, unfenced)] if is_table => {
                    let (fenced, unfenced) = (verdict(fenced), verdict(unfenced));
                    println!("{engine:12}{store:12}{fenced:36}{unfenced}");
                }
                _ => pair.iter().for_each(|(title, timeline)| tell(engine, title, timeline)),
            }
        }
    }
    Ok(())
}

/// What became of the late write.
fn verdict(timeline: &[String]) -> String {
    let of_a = timeline.iter().rev().find_map(|line| line.split_once("A  writes: "));
    match of_a {
        Some((_, "done")) => "the update of B is lost".to_owned(),
        Some((_, verdict)) => verdict.to_owned(),
        None => "A did not write".to_owned(),
    }
}

fn tell(engine: &str, title: &str, timeline: &[String]) {
    println!("\n{engine}, {title}");
    timeline.iter().for_each(|line| println!("  {line}"));
}
