//! Each exit code that is promised.

use std::time::{Duration, Instant};

use crate::common::{Home, Running, code, stderr, stdout};

#[test]
fn the_commands_own_code_is_passed_on() {
    let home = Home::new();
    for expected in [0, 1, 3, 75, 255] {
        let script = format!("exit {expected}");
        let output = home.lockset(&["run", "x", "--", "sh", "-c", &script]).output().unwrap();
        assert_eq!(code(&output), expected);
        assert_eq!(stderr(&output), "");
    }
}

#[test]
fn a_signal_that_ended_the_command_is_128_plus_its_number() {
    let home = Home::new();
    for signal in [1, 9, 15] {
        let script = format!("kill -{signal} $$");
        let output = home.lockset(&["run", "x", "--", "sh", "-c", &script]).output().unwrap();
        assert_eq!(code(&output), 128 + signal);
    }
}

#[test]
fn a_command_that_is_not_there_is_127() {
    let home = Home::new();
    for program in ["no-such-command", "/no/such/file"] {
        let output = home.lockset(&["run", "x", "--", program]).output().unwrap();
        assert_eq!(code(&output), 127);
        assert!(stderr(&output).starts_with("lockset: the command `"), "{}", stderr(&output));
    }
    assert_eq!(home.holders("x"), 0);
}

#[test]
fn a_command_that_cannot_be_executed_is_126() {
    let home = Home::new();
    std::fs::write(home.path("plain"), "no program").unwrap();
    for program in ["./plain", "/"] {
        let output = home.lockset(&["run", "x", "--", program]).output().unwrap();
        assert_eq!(code(&output), 126, "{program}");
        assert!(stderr(&output).contains("cannot be executed"), "{}", stderr(&output));
    }
    assert_eq!(home.holders("x"), 0);
}

#[test]
fn a_busy_lock_is_75_without_waiting() {
    let home = Home::new();
    let holder = home.hold_with(&["--note", "at work", "x"]);
    let output = home.lockset(&["run", "-n", "x", "--", "true"]).output().unwrap();
    assert_eq!(code(&output), 75);
    let said = stderr(&output);
    assert!(said.contains(&format!("held by {}@", holder.pid().as_raw_pid())), "{said}");
    assert!(said.contains("(at work)"), "{said}");
    assert!(said.contains("hint:"), "{said}");

    let args = ["run", "-n", "--conflict-exit-code", "9", "x", "--", "true"];
    assert_eq!(code(&home.lockset(&args).output().unwrap()), 9);
}

#[test]
fn a_free_lock_is_taken_without_waiting() {
    let home = Home::new();
    assert_eq!(code(&home.lockset(&["run", "-n", "x", "--", "true"]).output().unwrap()), 0);
}

#[test]
fn waiting_too_long_is_124() {
    let home = Home::new();
    let _holder = home.hold("x");
    let began = Instant::now();
    let output = home.lockset(&["run", "-w", "300ms", "x", "--", "true"]).output().unwrap();
    assert_eq!(code(&output), 124);
    assert!(began.elapsed() >= Duration::from_millis(300));
    assert!(stderr(&output).contains("it is held by"), "{}", stderr(&output));
    assert_eq!(home.waiters("x"), 0);

    let args = ["run", "-w", "10ms", "--conflict-exit-code", "9", "x", "--", "true"];
    assert_eq!(code(&home.lockset(&args).output().unwrap()), 9);
}

#[test]
fn a_wait_ends_when_the_holder_ends() {
    let home = Home::new();
    let holder = home.hold("x");
    let waiter =
        Running::spawn(&mut home.lockset(&["run", "-w", "20s", "x", "--", "echo", "mine"]));
    crate::common::until("it waits", || home.waiters("x") == 1);
    holder.signal(rustix::process::Signal::TERM);
    assert_eq!(code(&holder.wait()), 128 + 15);
    let output = waiter.wait();
    assert_eq!((code(&output), stdout(&output)), (0, "mine\n".to_owned()));
}

#[test]
fn readers_share_and_permits_are_counted() {
    let home = Home::new();
    let run = |args: &[&str]| {
        let args = [&["run", "-n"], args, &["--", "true"]].concat();
        code(&home.lockset(&args).output().unwrap())
    };
    let _reader = home.hold_with(&["--shared", "r"]);
    assert_eq!(run(&["--shared", "r"]), 0);
    assert_eq!(run(&["r"]), 75);
    let _two = home.hold_with(&["--permits", "2", "--limit", "3", "s"]);
    assert_eq!(run(&["--limit", "3", "s"]), 0);
    assert_eq!(run(&["--permits", "2", "--limit", "3", "s"]), 75);
    // A name has one use: another limit, or a mutex, is a mistake and not a wait.
    assert_eq!(run(&["--limit", "4", "s"]), 125);
}
