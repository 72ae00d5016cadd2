//! `ls`, `show`, `watch`, `break`, and the pages that come with the tool.

use std::process::Stdio;

use crate::common::{Home, code, stderr, stdout};

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
    let verbs =
        ["run", "elect", "acquire", "renew", "release", "ls", "show", "watch", "break", "fence"];
    for verb in verbs.into_iter().chain(["man", "completions", "--help"]) {
        for flag in ["--help", "-h"] {
            let help = stdout(&home.lockset(&[verb, flag]).output().unwrap());
            assert!(help.contains("Usage: lockset"), "{verb}: {help}");
            let examples = help.split_once("Example").map_or("", |(_, rest)| rest);
            assert!(examples.contains(":\n  lockset "), "{verb}: {help}");
        }
    }
    for verb in ["check", "write", "show"] {
        let help = stdout(&home.lockset(&["fence", verb, "--help"]).output().unwrap());
        assert!(help.contains(":\n  lockset fence ") || help.contains(" lockset fence "), "{help}");
        assert!(help.contains("sqlite:PATH") && help.contains("postgres://"), "{help}");
        assert_eq!(help.contains("77   stale"), verb != "show", "{help}");
    }
    let help = stdout(&home.lockset(&["run", "--help"]).output().unwrap());
    for said in ["Not covered", "uninterruptibly", "LOCKSET_TOKEN", "124  not granted"] {
        assert!(help.contains(said), "{said}");
    }
}

#[test]
fn help_tells_every_form_of_url() {
    let home = Home::new();
    let refusal = stderr(&home.lockset(&["-u", "nonsense", "ls"]).output().unwrap());
    let (_, known) = refusal.split_once("begins with one of ").unwrap();
    let is_scheme = |c: char| c.is_ascii_lowercase() || c == '+';
    let schemes: Vec<&str> = known
        .split_whitespace()
        .filter_map(|word| word.split_once(':').map(|(scheme, _)| scheme))
        .filter(|scheme| scheme.chars().all(is_scheme))
        .collect();
    assert!(schemes.len() > 8, "{known}");
    for verb in [&["--help"][..], &["run", "--help"], &["renew", "--help"]] {
        let help = stdout(&home.lockset(verb).output().unwrap());
        for scheme in &schemes {
            assert!(help.contains(&format!("{scheme}:")), "{scheme}: {help}");
        }
    }
}

#[test]
fn completions_and_manual_pages_are_there() {
    let home = Home::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = stdout(&home.lockset(&["completions", shell]).output().unwrap());
        assert!(script.contains("acquire") && script.contains("fence"), "{shell}");
        assert!(!script.contains("__guardian"), "{shell}");
    }
    let page = stdout(&home.lockset(&["man"]).output().unwrap());
    assert!(page.contains(".TH lockset 1"), "{page}");
    let output = home.lockset(&["man", "--dir", "."]).output().unwrap();
    assert_eq!(code(&output), 0, "{output:?}");
    assert!(home.text("lockset.1").contains(".TH lockset 1"));
    assert!(home.text("lockset-run.1").contains("Not covered"));
    assert!(home.text("lockset-fence-check.1").contains("77   stale"));
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
