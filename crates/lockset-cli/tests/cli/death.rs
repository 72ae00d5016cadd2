//! Who dies with whom, and who waits for it.

use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};

use crate::common::{Home, Running, TREE, code, is_alive, is_stopped, stderr, stdout, until};

#[test]
fn killing_locksets_group_does_not_save_the_tree() {
    let home = Home::new();
    let script = format!("exec lockset run x -- sh -c {}", quoted(TREE));
    let running = Running::spawn(&mut home.shell(&script));
    let (command, runaway) = (home.pid("command"), home.pid("runaway"));
    rustix::process::kill_process_group(running.pid(), Signal::KILL).unwrap();
    until("the tree is gone", || !is_alive(command) && !is_alive(runaway));
}

#[test]
fn killing_the_guardian_kills_the_whole_tree() {
    let home = Home::new();
    let running = Running::spawn(&mut home.lockset(&["run", "x", "--", "sh", "-c", TREE]));
    let (command, runaway) = (home.pid("command"), home.pid("runaway"));
    until("the tree stands", || home.text("ready") == "ready\n");
    kill_process(running.guardian(), Signal::KILL).unwrap();
    let output = running.wait();
    assert!(!is_alive(command) && !is_alive(runaway), "they are dead before lockset ends");
    assert!([76, 125].contains(&code(&output)), "{output:?}");
    assert!(stderr(&output).contains("guardian") || code(&output) == 76, "{}", stderr(&output));
    assert_eq!(home.holders("x"), 0);
}

#[test]
fn the_command_dies_with_the_guardian_even_if_lockset_cannot_help() {
    let home = Home::new();
    let script = "echo $$ >command; exec sleep 1000";
    let running = Running::spawn(&mut home.lockset(&["run", "x", "--", "sh", "-c", script]));
    let command = home.pid("command");
    let guardian = running.guardian();
    running.signal(Signal::STOP);
    kill_process(guardian, Signal::KILL).unwrap();
    until("the command is dead", || !is_alive(command));
}

/// Each stop of the command is reported to lockset, which is stopped and does not read.
#[test]
fn a_guardian_whose_reports_are_not_read_still_ends_the_command_in_time() {
    let home = Home::new();
    let ttl = Duration::from_secs(6);
    let script = "trap '' TERM; echo $$ >command; exec sleep 1000";
    let args = ["run", "--ttl", "6s", "x", "--", "sh", "-c", script];
    let running = Running::spawn(&mut home.lockset(&args));
    let command = home.pid("command");
    running.signal(Signal::STOP);
    let stopped = Instant::now();
    // More often than a socket holds reports, and done before the last lease can be over.
    let mut stops = 0;
    while stops < 400 && stopped.elapsed() < ttl / 2 {
        kill_process(command, Signal::STOP).unwrap();
        until("it is stopped", || is_stopped(command));
        kill_process(command, Signal::CONT).unwrap();
        until("it goes on", || !is_stopped(command));
        stops += 1;
    }
    assert!(stops > 300, "{stops} stops");
    until("the guardian ends the command", || !is_alive(command));
    assert!(stopped.elapsed() < ttl, "before its lease is over: {:?}", stopped.elapsed());
    running.signal(Signal::CONT);
    let output = running.wait();
    assert_eq!(code(&output), 76, "{output:?}");
}

/// Each signal is an order to the guardian, which is stopped and does not read.
#[test]
fn a_lockset_whose_orders_are_not_read_still_ends_the_command_with_its_lock() {
    let home = Home::new();
    let script = "trap '' USR1; echo $$ >command; exec sleep 1000";
    let running = Running::spawn(&mut home.lockset(&["run", "x", "--", "sh", "-c", script]));
    let command = home.pid("command");
    lockset_testkit::signals::send(running.guardian(), Signal::STOP);
    for _ in 0..1000 {
        running.signal(Signal::USR1);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(code(&home.lockset(&["break", "x", "--now"]).output().unwrap()), 0);
    assert_eq!(code(&running.wait()), 76);
    assert!(!is_alive(command));
}

#[test]
fn killing_the_guardian_of_a_waiter_ends_it() {
    let home = Home::new();
    let _holder = home.hold("x");
    let waiter = Running::spawn(&mut home.lockset(&["run", "x", "--", "true"]));
    until("it waits", || home.waiters("x") == 1);
    kill_process(waiter.guardian(), Signal::KILL).unwrap();
    let output = waiter.wait();
    assert_eq!(code(&output), 125, "{output:?}");
    assert!(stderr(&output).contains("guardian"), "{}", stderr(&output));
    assert_eq!(home.waiters("x"), 0);
}

#[test]
fn a_killed_waiter_leaves_no_guardian_and_no_place_in_the_queue() {
    let home = Home::new();
    let holder = home.hold("x");
    let waiter = Running::spawn(&mut home.lockset(&["run", "x", "--", "true"]));
    until("it waits", || home.waiters("x") == 1);
    let guardian = waiter.guardian();
    waiter.signal(Signal::KILL);
    until("its guardian is gone", || !is_alive(guardian));
    let last = Running::spawn(&mut home.lockset(&["run", "x", "--", "echo", "mine"]));
    until("another one waits", || home.state("x")["waiters"].to_string().contains("@"));
    holder.signal(Signal::TERM);
    assert_eq!(stdout(&last.wait()), "mine\n");
}

#[test]
fn processes_that_outlive_the_command_get_term_and_then_kill_before_the_release() {
    let home = Home::new();
    // The stubborn one ignores TERM, the polite one notes it.
    let script = "sh -c 'trap \"\" TERM; echo $$ >stubborn; exec sleep 1000' & \
        sh -c 'trap \"echo asked >polite; exit\" TERM; echo ok >set; \
        while :; do sleep 0.01; done' & \
        until [ -s stubborn ] && [ -s set ]; do sleep 0.01; done; exit 5";
    let args = ["run", "--ttl", "3s", "--grace", "500ms", "x", "--", "sh", "-c", script];
    let running = Running::spawn(&mut home.lockset(&args));
    let stubborn = home.pid("stubborn");
    until("the polite one was asked", || home.text("polite") == "asked\n");
    if is_alive(stubborn) {
        assert_eq!(home.holders("x"), 1, "held for as long as one of them lives");
    }
    let output = running.wait();
    assert!(!is_alive(stubborn));
    assert_eq!(code(&output), 5);
    assert!(!stderr(&output).contains("lockset:"), "{}", stderr(&output));
    assert_eq!(home.holders("x"), 0);
}

#[test]
fn children_are_left_alone_if_asked() {
    let home = Home::new();
    let script = "sleep 1000 >/dev/null 2>&1 & echo $! >daemon; exit 2";
    let args = ["run", "--leave-children", "x", "--", "sh", "-c", script];
    let output = home.lockset(&args).output().unwrap();
    assert_eq!(code(&output), 2);
    let daemon = home.pid("daemon");
    assert!(is_alive(daemon));
    assert_eq!(home.holders("x"), 0);
    kill_process(daemon, Signal::KILL).unwrap();
}

#[test]
fn children_that_lockset_had_before_are_not_its_own() {
    let home = Home::new();
    // `exec` makes the sleep a child of lockset, though not of the command.
    let script = "sleep 1000 >/dev/null 2>&1 & echo $! >older; \
        exec lockset run x -- sh -c 'echo $$ >command; exec sleep 1000'";
    let running = Running::spawn(&mut home.shell(script));
    let (older, command) = (home.pid("older"), home.pid("command"));
    kill_process(running.guardian(), Signal::KILL).unwrap();
    running.wait();
    assert!(is_alive(older));
    assert!(!is_alive(command));
    kill_process(older, Signal::KILL).unwrap();
}

fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}
