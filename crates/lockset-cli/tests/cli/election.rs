//! `lockset elect`.

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
fn leadership_passes_on_when_the_leader_dies() {
    let home = Home::new();
    let lead = |who: &str| {
        let script = format!("echo {who} >>log; exec sleep 1000");
        let args = ["elect", "--json", "--note", who, "boss", "--", "sh", "-c", &script];
        Running::spawn(&mut home.lockset(&args))
    };
    let first = lead("first");
    until("the first leads", || home.text("log") == "first\n");
    assert_eq!(home.state("boss")["holders"][0]["note"]["text"], "first");
    let second = lead("second");
    until("the second campaigns", || home.waiters("boss") == 1);
    first.signal(Signal::KILL);
    until("the second leads", || home.text("log") == "first\nsecond\n");
    second.signal(Signal::TERM);
    let output = second.wait();
    assert_eq!(code(&output), 128 + 15);
    let line = stderr(&output).lines().next().unwrap().to_owned();
    let event: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert!(event["leads"] == true && event["token"].is_string(), "{event}");
}

#[test]
fn a_leader_that_lost_its_office_campaigns_again() {
    let home = Home::new();
    let script = "echo $LOCKSET_TOKEN >>log; exec sleep 1000";
    let running = Running::spawn(&mut home.lockset(&["elect", "boss", "--", "sh", "-c", script]));
    until("it leads", || home.text("log").lines().count() == 1);
    assert_eq!(code(&home.lockset(&["break", "--now", "boss"]).output().unwrap()), 0);
    until("it leads again", || home.text("log").lines().count() == 2);
    let log = home.text("log");
    let tokens: Vec<u64> = log.lines().map(|line| line.parse().unwrap()).collect();
    assert!(tokens[0] < tokens[1], "{tokens:?}");
    running.signal(Signal::TERM);
    assert_eq!(code(&running.wait()), 128 + 15);
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
