//! Lockset against bare sockets and other people's locks: one table of ratios for each engine.
//!
//! `cargo run --release -p lockset-bench -- redis [--quick] [rows…]`, `redlock`, `zookeeper`,
//! `etcd` or `fence`, rows by a part of their name. A crate of its own, so that the peers'
//! dependencies never touch the library.
//!
//! Everything with Redis runs on one core: waking a thread on another core can cost several times
//! what a whole hand-off does, and an unpinned run flips between the two. Every ratio is the median
//! of ratios taken within one round, in which all that is compared had its turn, in rotating order.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a benchmark talks to a person and fails loudly"
)]

mod bare;
mod child;
mod contenders;
mod contest;
mod cycles;
mod driver;
mod drivers;
mod etcd;
mod fence;
mod floors;
mod handoff;
mod idle;
mod measure;
mod peers;
mod processes;
mod redlock;
mod renewing;
mod report;
mod server;
mod shortcuts;
mod svg;
mod table;
mod turns;
mod zookeeper;

use std::process::ExitCode;

use measure::{Order, Pace};
use server::Server;
use table::Table;

/// A part of the table that can be measured by itself.
struct Section {
    name: &'static str,
    measure: fn(&Server, Pace, &mut Table),
}

const SECTIONS: &[Section] = &[
    Section { name: "one task", measure: cycles::one_task },
    Section { name: "64 tasks", measure: cycles::many_tasks },
    Section { name: "hand-off in a process", measure: handoff::in_a_process },
    Section { name: "hand-off over 4 processes", measure: processes::hand_off },
    Section { name: "10,000 waiters", measure: contenders::hand_off_and_cancel },
    Section { name: "commands per grant while 128 wait", measure: processes::commands_per_grant },
    Section { name: "idle waiters", measure: idle::waiters },
    Section { name: "renewing 10,000 held locks", measure: renewing::held_locks },
    Section { name: "special paths", measure: shortcuts::with_and_without },
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["redis", rest @ ..] => redis(rest),
        ["redlock", rest @ ..] => redlock::run(rest),
        ["zookeeper", rest @ ..] => zookeeper::run(rest),
        ["etcd", rest @ ..] => etcd::run(rest),
        ["fence", rest @ ..] => fence::run(rest),
        ["report", rest @ ..] => report::run(rest),
        ["page", rest @ ..] => report::write_page(rest),
        // This program is also the other processes of its own measurements.
        ["driver", rest @ ..] => {
            drivers::run(rest);
            ExitCode::SUCCESS
        }
        _ => {
            eprintln!("{}", usage());
            ExitCode::FAILURE
        }
    }
}

fn usage() -> String {
    let names: Vec<&str> = SECTIONS.iter().map(|section| section.name).collect();
    let redis = format!("redis [--quick] [rows…]\n\nrows: {}", names.join(", "));
    let others = [report::USAGE, redlock::USAGE, zookeeper::USAGE, etcd::USAGE, fence::USAGE];
    let others = others.map(|one| format!("       lockset-bench {one}"));
    format!("usage: lockset-bench {redis}\n\n{}", others.join("\n\n"))
}

fn redis(args: &[&str]) -> ExitCode {
    let order = Order::read(args);
    let sections: Vec<&Section> = SECTIONS.iter().filter(|one| order.wants(one.name)).collect();
    if sections.is_empty() {
        eprintln!("{}", usage());
        return ExitCode::FAILURE;
    }
    // Before any thread or process is started: all of them inherit it.
    let core = server::pin_to_one_core();
    let mut table = Table::default();
    for section in sections {
        eprintln!("measuring: {}", section.name);
        // A server of its own, so that no section sees what another left behind.
        (section.measure)(&Server::start(), order.pace, &mut table);
    }
    println!("-- redis (everything on core {core})");
    println!("{table}");
    ExitCode::SUCCESS
}
