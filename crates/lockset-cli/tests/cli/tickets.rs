//! Locks that outlive the command that took them.

use std::os::unix::fs::PermissionsExt;

use crate::common::{Home, Running, code, stderr, stdout, until};

#[test]
fn a_ticket_keeps_renews_and_releases_a_lock() {
    let home = Home::new();
    let args = ["acquire", "x", "--ttl", "30s", "--ticket", "t", "--note", "mine"];
    let output = home.lockset(&args).output().unwrap();
    assert_eq!(code(&output), 0, "{output:?}");
    let mode = std::fs::metadata(home.path("t")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(home.holders("x"), 1, "its process is gone, the lock is not");
    assert_eq!(code(&home.lockset(&["run", "-n", "x", "--", "true"]).output().unwrap()), 75);

    std::thread::sleep(std::time::Duration::from_millis(500));
    let before = home.state("x")["holders"][0]["left_ms"].as_u64().unwrap();
    let output = home.lockset(&["renew", "--ticket", "t"]).output().unwrap();
    assert_eq!(code(&output), 0, "{output:?}");
    assert!(stdout(&output).contains("x is held for another 29s"), "{output:?}");
    assert!(home.state("x")["holders"][0]["left_ms"].as_u64().unwrap() > before);

    let output = home.lockset(&["release", "--ticket", "t"]).output().unwrap();
    assert_eq!((code(&output), stdout(&output)), (0, "x is released\n".into()), "{output:?}");
    assert_eq!(home.holders("x"), 0);
    assert!(!home.path("t").exists());
}

#[test]
fn a_ticket_file_that_exists_is_never_overwritten() {
    let home = Home::new();
    std::fs::write(home.path("t"), "precious").unwrap();
    let output = home.lockset(&["acquire", "x", "--ttl", "9s", "--ticket", "t"]).output().unwrap();
    assert_eq!(code(&output), 125);
    assert!(stderr(&output).contains("exists"), "{}", stderr(&output));
    assert_eq!(home.text("t"), "precious");
    assert_eq!(home.holders("x"), 0);
}

#[test]
fn no_ticket_is_left_when_the_lock_was_busy() {
    let home = Home::new();
    let _holder = home.hold("x");
    let args = ["acquire", "-n", "x", "--ttl", "9s", "--ticket", "t"];
    assert_eq!(code(&home.lockset(&args).output().unwrap()), 75);
    assert!(!home.path("t").exists());
}

#[test]
fn a_ticket_can_travel_through_pipes() {
    let home = Home::new();
    let script = "t=$(lockset acquire x --ttl 9s --ticket -) && \
        echo \"$t\" | lockset renew --ticket - --json && \
        echo \"$t\" | lockset release --ticket -";
    let output = home.shell(script).output().unwrap();
    let said = stdout(&output);
    assert_eq!(code(&output), 0, "{output:?}");
    let renewed: serde_json::Value = serde_json::from_str(said.lines().next().unwrap()).unwrap();
    assert!(renewed["token"].is_string() && renewed["left_ms"].as_u64().unwrap() > 5000);
    assert_eq!(home.holders("x"), 0);
}

#[test]
fn a_lock_lives_no_longer_than_its_lease() {
    let home = Home::new();
    let args = ["acquire", "x", "--ttl", "500ms", "--ticket", "t"];
    assert_eq!(code(&home.lockset(&args).output().unwrap()), 0);
    // Granted when the lease ends, and not before somebody asked.
    assert_eq!(code(&home.lockset(&["run", "-w", "20s", "x", "--", "true"]).output().unwrap()), 0);
    let output = home.lockset(&["renew", "--ticket", "t"]).output().unwrap();
    assert_eq!(code(&output), 76, "{output:?}");
    let output = home.lockset(&["release", "--ticket", "t"]).output().unwrap();
    assert_eq!(code(&output), 76, "{output:?}");
    assert!(!home.path("t").exists(), "it is of no use any more");
}

#[test]
fn tickets_that_are_none_are_refused() {
    let home = Home::new();
    let args = ["acquire", "x", "--ttl", "30s", "--ticket", "t"];
    assert_eq!(code(&home.lockset(&args).output().unwrap()), 0);
    let good = home.text("t");
    for bad in ["", "nonsense", "{}", "[]", &good[..good.len() / 2]] {
        std::fs::write(home.path("bad"), bad).unwrap();
        for verb in ["renew", "release"] {
            let output = home.lockset(&[verb, "--ticket", "bad"]).output().unwrap();
            assert_eq!(code(&output), 125, "{bad:?}: {output:?}");
            assert!(stderr(&output).contains("ticket"), "{bad:?}: {}", stderr(&output));
        }
        assert!(home.path("bad").exists());
    }
    let elsewhere = Home::new();
    std::fs::write(elsewhere.path("t"), &good).unwrap();
    let output = elsewhere.lockset(&["renew", "--ticket", "t"]).output().unwrap();
    assert_eq!(code(&output), 125, "a ticket of another home: {output:?}");
    assert_eq!(code(&home.lockset(&["renew", "--ticket", "none"]).output().unwrap()), 125);
}

#[test]
fn a_signal_while_waiting_leaves_neither_ticket_nor_claim() {
    let home = Home::new();
    let _holder = home.hold("x");
    let args = ["acquire", "x", "--ttl", "9s", "--ticket", "t"];
    let waiter = Running::spawn(&mut home.lockset(&args));
    until("it waits", || home.waiters("x") == 1);
    waiter.signal(rustix::process::Signal::TERM);
    assert_eq!(code(&waiter.wait()), 128 + 15);
    assert_eq!(home.waiters("x"), 0);
    assert!(!home.path("t").exists());
}
