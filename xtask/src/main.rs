//! The project's chores; `cargo xtask` without a word lists them.
//!
//! `test` is the one command that checks everything on a machine that has Rust, a C compiler and
//! nothing else. It stops at the first step that fails and ends with one line of totals.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a tool that talks to a person")]

mod bench;
mod cargo;
mod licences;
mod proto;
mod setup;
mod size;
mod versions;

use std::process::{Command, ExitCode};
use std::time::Instant;

use cargo::{Counts, cargo};

type Outcome<T = ()> = Result<T, String>;

const USAGE: &str = "usage: cargo xtask <chore>

  setup     install what the tests need beyond Rust and a C compiler
  test      setup, then formatting, lints, docs, licences, all tests, all examples, and the
            instructions of a lock and release
  bench     the benchmarks, as bench/REPORT.md: [--quick] [--engine NAME]… [--peer NAME]…
  torture   faults on real servers, judged by an oracle; `cargo xtask torture --help` says more
  wrong-ways [NAME]
            the classic mistakes of hand-made locks: steps and verdicts
  proto     write the code of etcd's messages again, after its proto file has changed
  size      the lines of code of the library by module
  versions  build with the lowest versions of the dependencies, and test the Redis engine with
            the lowest and the newest `redis` (it builds everything again)";

fn main() -> ExitCode {
    let chore = std::env::args().nth(1);
    let outcome = match chore.as_deref() {
        Some("setup") => setup::setup(),
        Some("test") => test(),
        Some("bench") => bench::bench(&std::env::args().skip(2).collect::<Vec<_>>()),
        Some("torture") => run_program("lockset-torture"),
        Some("wrong-ways") => run_program("lockset-wrong-ways"),
        Some("proto") => proto::write(),
        Some("size") => size::print(),
        Some("versions") => versions::check(),
        _ => Err(USAGE.to_owned()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

/// Everything CI asks for, in the order in which it fails fastest.
fn test() -> Outcome {
    let mut counts = Counts::default();
    step("setup", setup::setup)?;
    step("formatting", || cargo(&["fmt", "--all", "--check"]))?;
    // Counted with all tests, below.
    step("style", || cargo(&["test", "-q", "--workspace", "--test", "tidy"]))?;
    step("lints", || {
        cargo(&["clippy", "--workspace", "--all-targets", "--all-features", "--", "-D", "warnings"])
    })?;
    step("every feature by itself", || features_by_themselves(&mut counts))?;
    step("docs", || {
        cargo::with_env(
            &["doc", "--workspace", "--no-deps", "--all-features"],
            &[("RUSTDOCFLAGS", "-D warnings")],
        )
    })?;
    step("licences", licences::check)?;
    let tests = step("tests", || cargo::count_tests(&["test", "--workspace"], &mut counts));
    let examples = step("examples", || examples(&mut counts));
    let instructions = step("instructions of a lock and release", || {
        cargo(&["run", "-q", "--release", "-p", "lockset-instructions"])
    });
    println!("\nlockset: {} passed, {} failed", counts.passed, counts.failed);
    tests.and(examples).and(instructions)
}

/// A feature adds, it never changes: each must build without the others, each engine also with each
/// other engine, and what is left out says how to get it.
fn features_by_themselves(counts: &mut Counts) -> Outcome {
    let check = |features: &str| {
        cargo(&["check", "-q", "-p", "lockset", "--no-default-features", "--features", features])
    };
    let engines = ["local", "redis", "etcd", "postgres", "zookeeper"];
    for (index, one) in engines.iter().enumerate() {
        check(one)?;
        for other in &engines[index + 1..] {
            check(&format!("{one},{other}"))?;
        }
    }
    let fences =
        ["fence-sqlite", "fence-postgres", "fence-redis", "fence-object-store", "fence-http"];
    for other in ["redis-tls", "blocking", "metrics"].iter().chain(&fences) {
        check(other)?;
    }
    let tests = ["test", "-p", "lockset", "--no-default-features", "--lib"];
    cargo::count_tests(&tests, counts)?;
    // Without TLS.
    cargo::count_tests(&[&tests[..], &["--features", "redis", "redis::connect"]].concat(), counts)
}

/// Each example ends by itself and fails by its exit code. They were built with the tests; building
/// each package by itself would compile the library again for its own set of features.
fn examples(counts: &mut Counts) -> Outcome {
    cargo(&["build", "-q", "--workspace", "--examples"])?;
    let this = std::env::current_exe().map_err(|error| error.to_string())?;
    let folder = this.with_file_name("examples");
    for package in ["lockset", "lockset-testkit"] {
        for name in examples_of(package)? {
            println!("-- {name}");
            let status = Command::new(folder.join(&name)).status();
            if !status.map_err(|error| format!("{name}: {error}"))?.success() {
                counts.failed += 1;
                return Err(format!("the example `{name}` failed"));
            }
            counts.passed += 1;
        }
    }
    Ok(())
}

fn examples_of(package: &str) -> Outcome<Vec<String>> {
    let folder = format!("crates/{package}/examples");
    let entries = std::fs::read_dir(&folder).map_err(|error| format!("{folder}: {error}"))?;
    let name = |entry: std::io::Result<std::fs::DirEntry>| {
        entry.ok()?.file_name().to_str()?.strip_suffix(".rs").map(String::from)
    };
    let mut names: Vec<String> = entries.filter_map(name).collect();
    names.sort();
    Ok(names)
}

/// Runs a program of this workspace. Everything after the first word is for the program itself.
fn run_program(package: &str) -> Outcome {
    let words: Vec<String> = std::env::args().skip(2).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    cargo(&[&["run", "-q", "-p", package, "--"], &words[..]].concat())
}

fn step<T>(title: &str, work: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    println!("\n== {title}");
    let start = Instant::now();
    let outcome = work();
    let verdict = if outcome.is_ok() { "done" } else { "FAILED" };
    println!("== {title}: {verdict} in {:.0?}", start.elapsed());
    outcome
}
