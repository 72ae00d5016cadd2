//! Counts the instructions of a lock and release, and fails if there are too many.
//!
//! `cargo run --release -p lockset-instructions` runs each kind of work below `valgrind`, with few
//! and with more cycles. The difference is what the cycles cost, without start and end. Counts
//! depend neither on the speed of the machine nor on its load, so a bound can be tight. They do
//! depend on the compiler and on the dependencies: after an update of these, record the bounds
//! again.
//!
//! `-- server` counts the instructions of the server instead, for orientation.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a tool that talks to a person and fails loudly"
)]

mod count;
mod work;

use std::process::ExitCode;

use work::Work;

/// How much more than the recorded number is accepted.
const TOLERANCE: f64 = 1.05;
/// A busy machine can only add instructions, by timers and by connections that are opened again. So
/// the least of up to this many counts is taken, if the first is too high.
const COUNTS: usize = 3;

/// Instructions of the client per lock and release, with rustc 1.95.
const RECORDED: &[(Work, f64)] = &[
    (Work { engine: "memory", tasks: 1 }, 4_440.0),
    (Work { engine: "redis", tasks: 1 }, 36_700.0),
    (Work { engine: "redis", tasks: 64 }, 18_200.0),
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match words.as_slice() {
        [] => check(),
        ["server"] => {
            for (work, _) in RECORDED.iter().filter(|(work, _)| work.engine == "redis") {
                let cycle = count::server_cycle(*work);
                println!("{work}: {cycle:.0} instructions of the server");
            }
            ExitCode::SUCCESS
        }
        // This program is also what it counts.
        ["work", url, tasks, cycles] => {
            work::run(url, tasks.parse().unwrap(), cycles.parse().unwrap());
            ExitCode::SUCCESS
        }
        _ => {
            eprintln!("usage: lockset-instructions [server]");
            ExitCode::FAILURE
        }
    }
}

fn check() -> ExitCode {
    let mut exit = ExitCode::SUCCESS;
    for (work, recorded) in RECORDED {
        let mut ratio = f64::INFINITY;
        for _ in 0..COUNTS {
            ratio = ratio.min(count::client_cycle(*work) / recorded);
            if ratio <= TOLERANCE {
                break;
            }
        }
        let (cycle, is_fine) = (ratio * recorded, ratio <= TOLERANCE);
        let verdict = if is_fine { "fine" } else { "TOO MANY" };
        println!("{work}: {cycle:.0} instructions, {ratio:.3} of the recorded: {verdict}");
        if !is_fine {
            exit = ExitCode::FAILURE;
        }
    }
    exit
}
