//! Each exit code that is promised.

use crate::common::{Home, code, stderr};

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
