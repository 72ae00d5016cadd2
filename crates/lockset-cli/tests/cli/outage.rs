//! An engine that cannot be reached for a while: waited for unless told otherwise.

use std::time::{Duration, Instant};

use lockset_testkit::stage::RedisServer;
use rustix::process::Signal;

use crate::common::{Home, Running, code, stderr, stdout, until};

/// The verbs that wait, each with what it writes on stdout once it has the lock.
const WAITING: [&str; 4] = [
    "run x -- echo granted",
    "run -w 30s x -- echo granted",
    "elect --once x -- echo granted",
    "acquire x --ttl 9s --ticket -",
];

/// A server, and a folder in which `lockset` looks for it.
fn server() -> (RedisServer, Home) {
    (RedisServer::start(), Home::new())
}

fn start(home: &Home, server: &RedisServer, args: &str) -> Running {
    let mut command = home.shell(&format!("exec lockset {args} 2>said"));
    Running::spawn(command.env("LOCKSET_URL", server.url()))
}

#[test]
fn an_engine_that_is_not_there_yet_is_waited_for() {
    for args in WAITING {
        let (server, home) = server();
        server.kill();
        let waiter = start(&home, &server, args);
        until("it tells that it waits", || home.text("said").contains("waiting"));
        // It has tried several times by then, and has nothing new to tell.
        std::thread::sleep(Duration::from_millis(1500));
        server.restart();
        let output = waiter.wait();
        assert_eq!(code(&output), 0, "{args}: {}", home.text("said"));
        assert!(!stdout(&output).is_empty(), "{args}");
        let said = home.text("said");
        assert_eq!(said.matches("waiting").count(), 1, "{args}: {said}");
        assert!(said.contains("redis engine failed"), "{args}: {said}");
    }
}

#[test]
fn an_engine_that_goes_away_while_a_client_waits_for_a_lock_is_waited_for() {
    let (server, home) = server();
    let lockset = |args: &[&str]| {
        let mut command = home.lockset(args);
        command.env("LOCKSET_URL", server.url());
        command
    };
    let shown = || stdout(&lockset(&["show", "x"]).output().unwrap());
    let hold = ["run", "--ttl", "2s", "x", "--", "sleep", "1000"];
    let _holder = Running::spawn(&mut lockset(&hold));
    until("it is held", || shown().contains("is held"));
    let waiter = start(&home, &server, "run x -- echo granted");
    until("it waits", || shown().contains("waiting, place 1"));
    server.kill();
    std::thread::sleep(Duration::from_secs(3));
    server.restart();
    let output = waiter.wait();
    assert_eq!((code(&output), stdout(&output)), (0, "granted\n".into()), "{}", home.text("said"));
}

/// A request gives up after five seconds; the one who asks does not.
#[test]
fn a_file_that_is_busy_for_long_is_waited_for() {
    let home = Home::new();
    assert_eq!(code(&home.lockset(&["run", "x", "--", "true"]).output().unwrap()), 0);
    let blocked = home.block();
    let waiter = Running::spawn(&mut home.shell("exec lockset run x -- echo granted 2>said"));
    until("it tells that it waits", || home.text("said").contains("waiting"));
    drop(blocked);
    let output = waiter.wait();
    assert_eq!((code(&output), stdout(&output)), (0, "granted\n".into()), "{}", home.text("said"));
}

#[test]
fn an_engine_that_does_not_come_in_time_is_an_error() {
    let (server, home) = server();
    server.kill();
    for args in ["run -w 1s x -- true", "acquire -w 1s x --ttl 9s --ticket t"] {
        let began = Instant::now();
        let output = start(&home, &server, args).wait();
        let said = home.text("said");
        assert_eq!(code(&output), 125, "{args}: {said}");
        assert!(began.elapsed() >= Duration::from_secs(1), "{args}: {:?}", began.elapsed());
        assert!(began.elapsed() < Duration::from_secs(4), "{args}: {:?}", began.elapsed());
        assert!(said.contains("waiting for up to 1s"), "{args}: {said}");
        assert!(said.lines().last().unwrap().contains("try again"), "{args}: {said}");
    }
    assert!(!home.path("t").exists());
}

#[test]
fn an_engine_that_is_not_there_is_not_waited_for_without_patience() {
    let (server, home) = server();
    server.kill();
    for args in ["run -n x -- true", "elect -n x -- true", "acquire -n x --ttl 9s --ticket t"] {
        let output = start(&home, &server, args).wait();
        let said = home.text("said");
        assert_eq!(code(&output), 125, "{args}: {said}");
        assert!(!said.contains("waiting"), "{args}: {said}");
    }
}

#[test]
fn what_does_not_pass_by_itself_is_not_waited_for() {
    let home = Home::new();
    let server = RedisServer::start_with(&["--requirepass", "s3cret"]);
    for url in [server.url(), server.url().replace("//", "//:wrong@")] {
        for verb in [&["run", "x", "--", "true"][..], &["elect", "-w", "30s", "x", "--", "true"]] {
            let output = home.lockset(verb).env("LOCKSET_URL", &url).output().unwrap();
            assert_eq!(code(&output), 125, "{output:?}");
            assert!(stderr(&output).contains("refuses this user"), "{output:?}");
            assert!(!stderr(&output).contains("waiting"), "{output:?}");
        }
    }
}

#[test]
fn a_signal_ends_the_wait_for_an_engine() {
    let (server, home) = server();
    server.kill();
    let waits = ["run x -- true", "elect x -- true", "acquire x --ttl 9s --ticket t"];
    for args in waits {
        let _ = std::fs::remove_file(home.path("said"));
        let waiter = start(&home, &server, args);
        until("it waits", || home.text("said").contains("waiting"));
        let asked = Instant::now();
        waiter.signal(Signal::TERM);
        assert_eq!(code(&waiter.wait()), 128 + 15, "{args}");
        assert!(asked.elapsed() < Duration::from_secs(1), "{args}: {:?}", asked.elapsed());
    }
    assert!(!home.path("t").exists());
}
