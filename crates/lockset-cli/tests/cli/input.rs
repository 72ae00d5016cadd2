//! Bad input: refused with the reason, never with a panic.

use crate::common::{Home, code, stderr};

#[test]
fn bad_input_is_refused_with_the_reason() {
    let home = Home::new();
    let long = "x".repeat(256);
    let note = "n".repeat(2000);
    let table: &[(&[&str], &str)] = &[
        (&["run", "", "--", "true"], "empty"),
        (&["run", &long, "--", "true"], "256 bytes"),
        (&["run", "a\nb", "--", "true"], "control character"),
        (&["run", "a/../b", "--", "true"], "`..`"),
        (&["run", "a/", "--", "true"], "ends with a slash"),
        (&["run", "/a", "--", "true"], "empty segment"),
        (&["run", "x"], "required"),
        (&["run", "x", "--"], "required"),
        (&["run", "x", "true"], "unexpected argument"),
        (&["run", "-w", "0s", "x", "--", "true"], "longer than zero"),
        (&["run", "-w", "-5s", "x", "--", "true"], "negative"),
        (&["run", "-w", "10", "x", "--", "true"], "unit is missing"),
        (&["run", "-w", "soon", "x", "--", "true"], "1h30m"),
        (&["run", "-w", "99999y", "x", "--", "true"], "longer than a year"),
        (&["run", "-n", "-w", "1s", "x", "--", "true"], "cannot be used with"),
        (&["run", "--ttl", "0ms", "x", "--", "true"], "longer than zero"),
        (&["run", "--ttl", "1ms", "x", "--", "true"], "at least"),
        (&["run", "--ttl", "300d", "x", "--", "true"], "at most"),
        (&["run", "--max-hold", "1s", "--ttl", "2s", "x", "--", "true"], "shorter than the ttl"),
        (&["run", "--permits", "2", "x", "--", "true"], "--limit"),
        (&["run", "--permits", "0", "--limit", "1", "x", "--", "true"], "0 is not in"),
        (&["run", "--permits", "3", "--limit", "2", "x", "--", "true"], "3"),
        (&["run", "--shared", "--limit", "2", "x", "--", "true"], "cannot be used with"),
        (&["run", "--note", &note, "x", "--", "true"], "2000 bytes"),
        (&["run", "--conflict-exit-code", "256", "x", "--", "true"], "256"),
        (&["run", "--shred", "x", "--", "true"], "similar argument"),
        (&["rum", "x"], "similar subcommand"),
        (&["-u", "consul://x", "ls"], "local:"),
        (&["-u", "nonsense", "ls"], "local:"),
        (&["-u", "local:/no/such/folder/x.db", "ls"], "/no/such/folder"),
        (&["-u", "local:?colour=red", "ls"], "colour"),
        (&["acquire", "x", "--ticket", "t"], "--ttl"),
        (&["acquire", "x", "--ttl", "9s", "--ticket", "/no/such/t"], "/no/such/t"),
        (&["show", "a/"], "ends with a slash"),
        (&["ls", &long], "256 bytes"),
        (&["break", ".."], "`..`"),
        (&["ls", "--password-file", "/no/such"], "/no/such"),
        (&["completions", "tcsh"], "bash"),
        (&["__guardian"], "not to be called"),
    ];
    for (args, reason) in table {
        let output = home.lockset(args).output().unwrap();
        let said = stderr(&output);
        assert_eq!(code(&output), 125, "{args:?}: {said}");
        assert!(said.starts_with("lockset: "), "{args:?}: {said}");
        assert!(said.contains(reason), "{args:?}: {said}");
        assert!(!said.contains("panicked") && !said.contains("RUST_BACKTRACE"), "{said}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn a_name_has_one_use() {
    let home = Home::new();
    let _holder = home.hold("x");
    let output = home.lockset(&["run", "-n", "--limit", "2", "x", "--", "true"]).output().unwrap();
    assert_eq!(code(&output), 125, "{output:?}");
    assert!(stderr(&output).contains("hint:"), "{}", stderr(&output));
}
