//! `cargo xtask wrong-ways [NAME]`: plays the classic mistakes, and Lockset beside them.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a tool that talks to a person")]

use std::process::ExitCode;

use lockset_wrong_ways::lockset_client::{CLIENT, serve};
use lockset_wrong_ways::{MISTAKES, Mistake};

const NOTHING: &str = "nothing found";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [CLIENT, url] => {
            serve(url);
            ExitCode::SUCCESS
        }
        [] => list(),
        [name] => match Mistake::named(name) {
            Some(mistake) => show(mistake),
            None => {
                let names: Vec<&str> = MISTAKES.iter().map(|mistake| mistake.name).collect();
                eprintln!("there is no {name}; there are:\n  {}", names.join("\n  "));
                ExitCode::FAILURE
            }
        },
        _ => {
            eprintln!("usage: cargo xtask wrong-ways [NAME]");
            ExitCode::FAILURE
        }
    }
}

/// One mistake, as a timeline.
fn show(mistake: &Mistake) -> ExitCode {
    println!("{}: {}\n", mistake.name, mistake.title);
    let wrong = mistake.play_wrong();
    let verdict = wrong.verdict();
    println!("{}verdict: {verdict}\n", wrong.timeline());
    println!("The same schedule with Lockset:\n");
    let right = mistake.play_right();
    let right_verdict = right.verdict();
    println!("{}verdict: {right_verdict}", right.timeline());
    outcome(verdict != NOTHING && right_verdict == NOTHING)
}

/// All mistakes and all verdicts.
fn list() -> ExitCode {
    let mut as_expected = true;
    for mistake in MISTAKES {
        let (wrong, right) = (mistake.play_wrong().verdict(), mistake.play_right().verdict());
        as_expected &= wrong != NOTHING && right == NOTHING;
        println!("{}: {}\n  verdict: {wrong}", mistake.name, mistake.title);
        println!("  with Lockset: {right}\n");
    }
    println!("`cargo xtask wrong-ways NAME` shows the steps.");
    outcome(as_expected)
}

fn outcome(as_expected: bool) -> ExitCode {
    match as_expected {
        true => ExitCode::SUCCESS,
        false => {
            eprintln!("not as expected: a mistake was not found, or Lockset broke a promise");
            ExitCode::FAILURE
        }
    }
}
