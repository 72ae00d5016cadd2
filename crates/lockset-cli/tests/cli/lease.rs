//! The end of a lease: the command never outlives it.

use std::time::{Duration, Instant};

use rusqlite::Connection;
use rustix::process::Signal;

use crate::common::{Home, Running, code, is_alive, stderr, until};

const STUBBORN: &str = "trap 'echo TERM >>log' TERM; echo $$ >pid; while :; do sleep 0.01; done";
const POLITE: &str =
    "trap 'echo TERM >>log; exit 0' TERM; echo $$ >pid; while :; do sleep 0.01; done";

/// Makes every renewal impossible for as long as it lives, as an engine that hangs would.
fn block_engine(home: &Home) -> Connection {
    let connection = Connection::open(home.path("locks.db")).unwrap();
    connection.busy_timeout(Duration::from_secs(10)).unwrap();
    connection.execute_batch("BEGIN IMMEDIATE").unwrap();
    connection
}

#[test]
fn a_command_whose_lease_cannot_be_renewed_gets_term_and_then_kill_before_it_ends() {
    let home = Home::new();
    let ttl = Duration::from_secs(3);
    let args = ["run", "--ttl", "3s", "x", "--", "sh", "-c", STUBBORN];
    let asked = Instant::now();
    let running = Running::spawn(&mut home.lockset(&args));
    let command = home.pid("pid");
    let blocked = block_engine(&home);
    // From here on no renewal can succeed; those before cannot have come from later than this.
    let last_renewal = Instant::now();
    until("it is asked to end", || home.text("log") == "TERM\n");
    let termed = Instant::now();
    assert!(asked.elapsed() > ttl / 2, "not before it is necessary");
    assert!(is_alive(command));
    until("it is killed", || !is_alive(command));
    assert!(last_renewal.elapsed() < ttl, "before anybody else can be granted the lock");
    assert!(termed.elapsed() > Duration::from_millis(400), "{:?} of grace", termed.elapsed());
    drop(blocked);
    let output = running.wait();
    assert_eq!(code(&output), 76, "{output:?}");
    assert!(
        stderr(&output).contains("`x` was lost: its lease could not be"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_command_that_obeys_term_loses_the_lock_all_the_same() {
    let home = Home::new();
    let args = ["run", "--ttl", "2s", "--lost-exit-code", "42", "x", "--", "sh", "-c", POLITE];
    let running = Running::spawn(&mut home.lockset(&args));
    let command = home.pid("pid");
    let blocked = block_engine(&home);
    until("it ends by itself", || !is_alive(command));
    assert_eq!(home.text("log"), "TERM\n");
    drop(blocked);
    assert_eq!(code(&running.wait()), 42);
}

#[test]
fn a_lease_is_renewed_for_as_long_as_the_command_runs() {
    let home = Home::new();
    let args = ["run", "--ttl", "1s", "x", "--", "sh", "-c", "sleep 3; exit 7"];
    let output = home.lockset(&args).output().unwrap();
    assert_eq!((code(&output), stderr(&output)), (7, String::new()));
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
fn a_broken_lock_ends_its_command_when_the_lease_ends() {
    let home = Home::new();
    let args = ["run", "--ttl", "3s", "x", "--", "sh", "-c", STUBBORN];
    let running = Running::spawn(&mut home.lockset(&args));
    let command = home.pid("pid");
    let next = Running::spawn(&mut home.shell(
        "lockset run x -- sh -c 'kill -0 $(cat pid) 2>/dev/null && echo lives; echo granted'",
    ));
    until("the next one waits", || home.waiters("x") == 1);
    let output = home.lockset(&["break", "x"]).output().unwrap();
    assert_eq!(code(&output), 0);
    assert!(crate::common::stdout(&output).contains("when its lease ends"), "{output:?}");
    assert_eq!(home.state("x")["holders"][0]["revoked"], true);
    assert!(is_alive(command));
    let output = running.wait();
    assert_eq!(code(&output), 76, "{output:?}");
    assert!(stderr(&output).contains("operator asked for it back"), "{}", stderr(&output));
    assert_eq!(home.text("log"), "TERM\n");
    assert_eq!(crate::common::stdout(&next.wait()), "granted\n");
}

#[test]
fn a_lock_broken_at_once_kills_its_command_at_once() {
    let home = Home::new();
    let args = ["run", "--ttl", "60s", "x", "--", "sh", "-c", STUBBORN];
    let running = Running::spawn(&mut home.lockset(&args));
    let command = home.pid("pid");
    let output = home.lockset(&["break", "x", "--now"]).output().unwrap();
    assert!(crate::common::stdout(&output).contains("fencing tokens"), "{output:?}");
    let broken = Instant::now();
    let output = running.wait();
    assert!(broken.elapsed() < Duration::from_secs(10), "{:?}", broken.elapsed());
    assert!(!is_alive(command));
    assert_eq!(code(&output), 76);
    assert!(stderr(&output).contains("operator"), "{}", stderr(&output));
    assert_eq!(home.text("log"), "", "no time for TERM");
}

#[test]
fn the_longest_hold_ends_the_command() {
    let home = Home::new();
    let args = ["run", "--max-hold", "2s", "--ttl", "1s", "x", "--", "sh", "-c", POLITE];
    let began = Instant::now();
    let running = Running::spawn(&mut home.lockset(&args));
    let output = running.wait();
    assert_eq!(code(&output), 76, "{output:?}");
    assert!(began.elapsed() > Duration::from_secs(1));
    assert!(stderr(&output).contains("longest time"), "{}", stderr(&output));
    assert_eq!(home.text("log"), "TERM\n");
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
    let blocked = block_engine(&home);
    std::fs::write(home.path("go"), "").unwrap();
    let output = running.wait();
    assert_eq!(code(&output), 5, "{output:?}");
    assert!(stderr(&output).contains("could not be released"), "{}", stderr(&output));
    drop(blocked);
    // Its guardian is gone, and on this engine that is as good as a release.
    assert_eq!(code(&home.lockset(&["run", "-w", "5s", "x", "--", "true"]).output().unwrap()), 0);
}
