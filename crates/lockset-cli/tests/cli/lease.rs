//! The end of a lease: the command never outlives it.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::common::{Home, Running, STUBBORN, code, is_alive, stderr, until};

const POLITE: &str =
    "trap 'echo TERM >>log; exit 0' TERM; echo $$ >pid; while :; do sleep 0.01; done";

#[test]
fn a_command_that_obeys_term_loses_the_lock_all_the_same() {
    assert_eq!(code_after_term(&["--ttl", "2s", "--lost-exit-code", "42"]), 42);
}

#[test]
fn a_short_grace_is_a_grace() {
    assert_eq!(code_after_term(&["--ttl", "8s", "--grace", "400ms"]), 76);
}

/// A machine that stalls for 200 ms costs so short a lease, rightly. So one of three runs must keep
/// it: with margins that do not shrink with the ttl, none would. `timing.rs` checks every ttl.
#[test]
fn a_lease_of_half_a_second_is_kept() {
    let home = Home::new();
    let args = ["run", "--ttl", "500ms", "x", "--", "sh", "-c", "sleep 2; exit 7"];
    let run = || {
        let output = home.lockset(&args).output().unwrap();
        (code(&output), stderr(&output))
    };
    let outcomes: Vec<_> = std::iter::repeat_with(run).take(3).collect();
    assert!(outcomes.contains(&(7, String::new())), "{outcomes:?}");
}

/// What is left of a command that ends by TERM when its lease cannot be renewed.
fn code_after_term(options: &[&str]) -> i32 {
    let home = Home::new();
    let args = [&["run"], options, &["x", "--", "sh", "-c", POLITE]].concat();
    let running = Running::spawn(&mut home.lockset(&args));
    let command = home.pid("pid");
    let blocked = home.block();
    until("it ends by itself", || !is_alive(command));
    assert_eq!(home.text("log"), "TERM\n");
    drop(blocked);
    code(&running.wait())
}

#[test]
fn a_frozen_lockset_cannot_let_the_command_run_on() {
    let home = Home::new();
    let args = ["run", "--ttl", "2s", "x", "--", "sh", "-c", STUBBORN];
    let running = Running::spawn(&mut home.lockset(&args));
    let command = home.pid("pid");
    running.signal(Signal::STOP);
    let frozen = Instant::now();
    until("the guardian ends the command", || !is_alive(command));
    assert!(frozen.elapsed() < Duration::from_secs(2));
    running.signal(Signal::CONT);
    let output = running.wait();
    assert_eq!(code(&output), 76, "{output:?}");
}

#[test]
fn the_longest_hold_ends_the_command() {
    let home = Home::new();
    let args = ["run", "--max-hold", "2s", "--ttl", "1s", "x", "--", "sh", "-c", POLITE];
    let began = Instant::now();
    let running = Running::spawn(&mut home.lockset(&args));
    let output = running.wait();
    assert_eq!(code(&output), 76, "{output:?}");
    assert!(began.elapsed() > Duration::from_millis(1800), "a tenth before its end at most");
    assert!(stderr(&output).contains("longest time"), "{}", stderr(&output));
    assert_eq!(home.text("log"), "TERM\n");
}

#[test]
fn a_command_that_ignores_term_is_killed_before_the_longest_hold_is_over() {
    let home = Home::new();
    let args = ["run", "--max-hold", "2s", "x", "--", "sh", "-c", STUBBORN];
    let running = Running::spawn(&mut home.lockset(&args));
    let command = home.pid("pid");
    let held = Instant::now();
    until("it is killed", || !is_alive(command));
    assert!(held.elapsed() < Duration::from_secs(2), "{:?}", held.elapsed());
    assert_eq!(home.text("log"), "TERM\n");
    assert_eq!(code(&running.wait()), 76);
}

#[test]
fn a_command_that_ends_before_the_longest_hold_is_left_alone() {
    let home = Home::new();
    let args = ["run", "--max-hold", "6s", "x", "--", "sh", "-c", "sleep 5; exit 7"];
    let output = home.lockset(&args).output().unwrap();
    assert_eq!((code(&output), stderr(&output)), (7, String::new()));
}

#[test]
fn a_grace_beyond_a_third_of_the_ttl_is_refused() {
    let home = Home::new();
    let args = ["run", "--ttl", "3s", "--grace", "1100ms", "x", "--", "true"];
    let output = home.lockset(&args).output().unwrap();
    assert_eq!(code(&output), 125);
    assert!(stderr(&output).contains("third of the ttl"), "{}", stderr(&output));
}

#[test]
fn a_release_that_fails_is_told_and_the_commands_code_is_kept() {
    let home = Home::new();
    let script = "echo yes >ready; until [ -e go ]; do sleep 0.01; done; exit 5";
    let running = Running::spawn(&mut home.lockset(&["run", "x", "--", "sh", "-c", script]));
    until("it runs", || home.text("ready") == "yes\n");
    let blocked = home.block();
    std::fs::write(home.path("go"), "").unwrap();
    let output = running.wait();
    assert_eq!(code(&output), 5, "{output:?}");
    assert!(stderr(&output).contains("could not be released"), "{}", stderr(&output));
    drop(blocked);
    // Its guardian is gone, and on this engine that is as good as a release.
    assert_eq!(code(&home.lockset(&["run", "-w", "5s", "x", "--", "true"]).output().unwrap()), 0);
}
