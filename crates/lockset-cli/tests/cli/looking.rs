//! `ls`, `show`, `watch`, `break`, and the pages that come with the tool.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use serde_json::Value;

use crate::common::{Home, PATIENCE, Running, code, stderr, stdout, until};

#[test]
fn a_free_lock_is_said_to_be_free() {
    let home = Home::new();
    let output = home.lockset(&["show", "x"]).output().unwrap();
    assert_eq!((code(&output), stdout(&output)), (0, "x is free\n".into()));
    let output = home.lockset(&["ls"]).output().unwrap();
    assert_eq!((code(&output), stdout(&output)), (0, "no lock is held or waited for\n".into()));
    let output = home.lockset(&["ls", "--json"]).output().unwrap();
    assert_eq!(stdout(&output), "[]\n");
    let output = home.lockset(&["break", "x"]).output().unwrap();
    assert_eq!(code(&output), 0);
    assert!(stdout(&output).contains("nothing was done"));
}

#[test]
fn a_held_lock_is_shown_with_its_holder_and_waiters() {
    let home = Home::new();
    let holder = home.hold_with(&["--note", "nightly", "jobs/a"]);
    let _other = home.hold_with(&["--limit", "4", "else"]);
    let _waiter = Running::spawn(&mut home.lockset(&["run", "jobs/a", "--", "true"]));
    until("it waits", || home.waiters("jobs/a") == 1);

    let state = home.state("jobs/a");
    let token = state["holders"][0]["token"].as_str().expect("a token is a string in JSON");
    assert!(token.parse::<u64>().unwrap() > 0);
    assert_eq!(state["holders"][0]["note"]["text"], "nightly");
    let by = state["holders"][0]["note"]["by"].as_str().unwrap();
    assert!(by.starts_with(&format!("{}@", holder.pid().as_raw_pid())), "{by}");

    let shown = stdout(&home.lockset(&["show", "jobs/a"]).output().unwrap());
    assert!(shown.contains("jobs/a is held\n") && shown.contains("(nightly)"), "{shown}");
    assert!(shown.contains(token) && shown.contains("waiting, place 1"), "{shown}");
    assert!(!shown.contains('\x1b'), "no colour on a pipe");

    let listed = stdout(&home.lockset(&["ls"]).output().unwrap());
    assert_eq!(listed.lines().count(), 3, "{listed}");
    assert!(listed.contains("1 of 4 permits"), "{listed}");
    let listed = stdout(&home.lockset(&["ls", "jobs/", "--json"]).output().unwrap());
    let listed: Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed.as_array().unwrap().len(), 1);
    assert_eq!(listed[0]["holders"][0]["token"], token);
}

#[test]
fn a_watch_tells_every_change_on_a_line() {
    let home = Home::new();
    let mut watch = Running::spawn(&mut home.lockset(&["watch", "jobs/", "--json"]));
    let (sender, lines) = std::sync::mpsc::channel();
    let out = BufReader::new(watch.take_stdout());
    std::thread::spawn(move || out.lines().try_for_each(|line| sender.send(line.unwrap())));
    let holder = home.hold("jobs/a");
    let next = |wanted: &str, test: &dyn Fn(&Value) -> bool| loop {
        let line = lines.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("never told: {wanted}"));
        let state: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(state["name"], "jobs/a");
        if test(&state) {
            return;
        }
    };
    next("held", &|state| state["holders"][0]["token"].is_string());
    holder.signal(rustix::process::Signal::TERM);
    next("free", &|state| state["holders"].as_array().unwrap().is_empty());
    watch.signal(rustix::process::Signal::INT);
    watch.wait();
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let home = Home::new();
    for args in [&["ls"][..], &["man"], &["completions", "bash"], &["--help"]] {
        let mut command = home.lockset(args);
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = command.stdout(Stdio::from(writer)).stderr(Stdio::piped()).output().unwrap();
        assert_eq!((code(&output), stderr(&output)), (0, String::new()), "{args:?}");
    }
}

#[test]
fn every_verb_has_help_with_examples() {
    let home = Home::new();
    let verbs = ["run", "elect", "acquire", "renew", "release", "ls", "show", "watch", "break"];
    for verb in verbs.into_iter().chain(["man", "completions", "--help"]) {
        for flag in ["--help", "-h"] {
            let help = stdout(&home.lockset(&[verb, flag]).output().unwrap());
            assert!(help.contains("Usage: lockset"), "{verb}: {help}");
            let examples = help.split_once("Example").map_or("", |(_, rest)| rest);
            assert!(examples.contains(":\n  lockset "), "{verb}: {help}");
        }
    }
    let help = stdout(&home.lockset(&["run", "--help"]).output().unwrap());
    for said in ["Not covered", "uninterruptibly", "LOCKSET_TOKEN", "124  not granted"] {
        assert!(help.contains(said), "{said}");
    }
}

#[test]
fn completions_and_manual_pages_are_there() {
    let home = Home::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = stdout(&home.lockset(&["completions", shell]).output().unwrap());
        assert!(script.contains("acquire"), "{shell}");
        assert!(!script.contains("__guardian"), "{shell}");
    }
    let page = stdout(&home.lockset(&["man"]).output().unwrap());
    assert!(page.contains(".TH lockset 1"), "{page}");
    let output = home.lockset(&["man", "--dir", "."]).output().unwrap();
    assert_eq!(code(&output), 0, "{output:?}");
    assert!(home.text("lockset.1").contains(".TH lockset 1"));
    assert!(home.text("lockset-run.1").contains("Not covered"));
    assert_eq!(code(&home.lockset(&["man", "--dir", "no/such"]).output().unwrap()), 125);
}

#[test]
fn a_wait_is_told_on_a_pipe_only_if_asked() {
    let home = Home::new();
    let _holder = home.hold_with(&["--note", "busy bee", "x"]);
    let silent = home.lockset(&["run", "-w", "500ms", "x", "--", "true"]).output().unwrap();
    assert!(!stderr(&silent).contains("waiting for"), "{}", stderr(&silent));
    let told = home.lockset(&["run", "-v", "-w", "500ms", "x", "--", "true"]).output().unwrap();
    let told = stderr(&told);
    assert_eq!(told.matches("waiting for x: held by").count(), 1, "{told}");
    assert!(told.contains("(busy bee)") && told.contains("place 1 of 1"), "{told}");
}
