//! Signals: forwarded while the command runs, obeyed while lockset waits.

use rustix::process::Signal;

use crate::common::{Home, Running, code, is_alive, is_stopped, until};

#[test]
fn every_signal_of_the_list_reaches_the_command() {
    let home = Home::new();
    let names = ["INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "WINCH", "CONT"];
    let traps: String =
        names.iter().map(|name| format!("trap 'echo {name} >>log' {name}; ")).collect();
    let script = format!("{traps} echo ready >>log; while :; do sleep 0.01; done");
    let running = Running::spawn(&mut home.lockset(&["run", "x", "--", "sh", "-c", &script]));
    until("the traps are set", || home.text("log").contains("ready"));
    let signals = [
        Signal::INT,
        Signal::TERM,
        Signal::HUP,
        Signal::QUIT,
        Signal::USR1,
        Signal::USR2,
        Signal::WINCH,
        Signal::CONT,
    ];
    for (name, signal) in names.iter().zip(signals) {
        running.signal(signal);
        until(&format!("{name} arrived"), || home.text("log").lines().any(|line| line == *name));
    }
}

#[test]
fn tstp_stops_the_command_and_cont_continues_it() {
    let home = Home::new();
    let script = "echo $$ >pid; exec sleep 1000";
    let running = Running::spawn(&mut home.lockset(&["run", "x", "--", "sh", "-c", script]));
    let command = home.pid("pid");
    running.signal(Signal::TSTP);
    until("it is stopped", || is_stopped(command));
    running.signal(Signal::CONT);
    until("it goes on", || !is_stopped(command));
    running.signal(Signal::TERM);
    assert_eq!(code(&running.wait()), 128 + 15);
}

#[test]
fn the_whole_group_gets_the_signal() {
    let home = Home::new();
    // The child tells its own number: between fork and exec it would lose the signal to the trap.
    let script = "trap 'exit 4' TERM; sh -c 'echo $$ >child; exec sleep 1000' & wait";
    let running = Running::spawn(&mut home.lockset(&[
        "run",
        "--leave-children",
        "x",
        "--",
        "sh",
        "-c",
        script,
    ]));
    let child = home.pid("child");
    running.signal(Signal::TERM);
    assert_eq!(code(&running.wait()), 4);
    until("the child ended, too", || !is_alive(child));
}

#[test]
fn a_signal_ends_the_wait_and_leaves_nothing_behind() {
    let home = Home::new();
    let _holder = home.hold("x");
    for (signal, number) in
        [(Signal::INT, 2), (Signal::TERM, 15), (Signal::HUP, 1), (Signal::QUIT, 3)]
    {
        let waiter = Running::spawn(&mut home.lockset(&["run", "x", "--", "true"]));
        until("it waits", || home.waiters("x") == 1);
        let guardian = waiter.guardian();
        waiter.signal(signal);
        assert_eq!(code(&waiter.wait()), 128 + number);
        assert_eq!(home.waiters("x"), 0, "its place in the queue is gone when it is");
        until("its guardian is gone", || !is_alive(guardian));
    }
}

#[test]
fn other_signals_do_not_end_the_wait() {
    let home = Home::new();
    let holder = home.hold("x");
    let waiter = Running::spawn(&mut home.lockset(&["run", "x", "--", "true"]));
    until("it waits", || home.waiters("x") == 1);
    for signal in [Signal::USR1, Signal::USR2, Signal::WINCH, Signal::CONT] {
        waiter.signal(signal);
    }
    holder.signal(Signal::TERM);
    assert_eq!(code(&waiter.wait()), 0);
}

#[test]
fn the_guardian_survives_all_but_sigkill() {
    let home = Home::new();
    let running = Running::spawn(&mut home.lockset(&[
        "run",
        "x",
        "--",
        "sh",
        "-c",
        "trap 'exit 3' USR1; echo $$ >pid; while :; do sleep 0.01; done",
    ]));
    let command = home.pid("pid");
    let guardian = running.guardian();
    for signal in [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT, Signal::USR1, Signal::TSTP]
    {
        rustix::process::kill_process(guardian, signal).unwrap();
    }
    running.signal(Signal::USR1);
    assert_eq!(code(&running.wait()), 3);
    assert!(!is_alive(command));
}

#[test]
fn a_command_stopped_where_there_is_no_terminal_stays_stopped_until_it_is_continued() {
    let home = Home::new();
    let script = "echo $$ >pid; kill -STOP $$; exit 8";
    let running = Running::spawn(&mut home.lockset(&["run", "x", "--", "sh", "-c", script]));
    let pid = home.pid("pid");
    until("it is stopped", || is_stopped(pid));
    rustix::process::kill_process(pid, Signal::CONT).unwrap();
    assert_eq!(code(&running.wait()), 8);
}

#[test]
fn a_stopped_guardian_does_not_let_the_command_outlive_its_lock() {
    let home = Home::new();
    let script = "echo $$ >pid; exec sleep 1000";
    let running = Running::spawn(&mut home.lockset(&["run", "x", "--", "sh", "-c", script]));
    let command = home.pid("pid");
    lockset_testkit::signals::send(running.guardian(), Signal::STOP);
    assert_eq!(code(&home.lockset(&["break", "x", "--now"]).output().unwrap()), 0);
    assert_eq!(code(&running.wait()), 76);
    assert!(!is_alive(command));
}
