//! `lockset elect`.

use std::time::Duration;

use rustix::process::Signal;

use crate::common::{Home, Running, code, stderr, until};

#[test]
fn once_is_like_run() {
    let home = Home::new();
    let args = ["elect", "--once", "--note", "me", "boss", "--", "sh", "-c", "exit 4"];
    let output = home.lockset(&args).output().unwrap();
    assert_eq!(code(&output), 4);
    assert!(stderr(&output).contains("leads boss, token "), "{}", stderr(&output));
}

#[test]
fn a_leader_whose_command_ends_campaigns_again_until_it_is_told_to_end() {
    let home = Home::new();
    let script = "echo term >>log; exit 1";
    let running = Running::spawn(&mut home.lockset(&["elect", "boss", "--", "sh", "-c", script]));
    until("it leads a second time", || home.text("log").lines().count() >= 2);
    running.signal(Signal::TERM);
    let output = running.wait();
    assert!([128 + 15, 1].contains(&code(&output)), "{output:?}");
}

#[test]
fn a_signal_ends_a_campaign() {
    let home = Home::new();
    let _leader = home.hold("boss");
    let running = Running::spawn(&mut home.lockset(&["elect", "boss", "--", "true"]));
    until("it campaigns", || home.waiters("boss") == 1);
    running.signal(Signal::INT);
    assert_eq!(code(&running.wait()), 128 + 2);
    assert_eq!(home.waiters("boss"), 0);
}

/// The engine does not reply for longer than the leadership lasts, and than a campaign waits.
#[test]
fn an_outage_ends_an_office_and_no_campaign() {
    let home = Home::new();
    let script = "echo $LOCKSET_TOKEN >>log; exec sleep 1000";
    let args = ["elect", "--ttl", "1s", "boss", "--", "sh", "-c", script];
    let running = Running::spawn(&mut home.lockset(&args));
    until("it leads", || home.text("log").lines().count() == 1);
    let blocked = home.block();
    std::thread::sleep(Duration::from_secs(13));
    drop(blocked);
    until("it leads again", || home.text("log").lines().count() == 2);
    running.signal(Signal::TERM);
    let output = running.wait();
    assert_eq!(code(&output), 128 + 15, "{output:?}");
    assert!(stderr(&output).contains("waiting until it replies"), "{}", stderr(&output));
}
