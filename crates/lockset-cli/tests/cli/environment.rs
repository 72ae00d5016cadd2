//! What the command finds: variables, descriptors, dispositions, and where lockset can run.

use std::process::{Command, Stdio};

use lockset_testkit::stage::RedisServer;

use crate::common::{BINARY, Home, Running, code, is_alive, stderr, stdout, until};

#[test]
fn the_command_finds_the_url_and_its_guardian_does_not() {
    let home = Home::new();
    let script = "env | grep -E 'LOCKSET_|UNRELATED'";
    let mut command = home.lockset(&["run", "x", "--", "sh", "-c", script]);
    command.env("LOCKSET_PASSWORD", "").env("UNRELATED", "stays");
    let output = command.output().unwrap();
    let said = stdout(&output);
    assert!(said.contains("UNRELATED=stays"), "{said}");
    assert!(said.contains(&format!("LOCKSET_URL={}\n", home.url())), "{said}");
    assert!(!said.contains("LOCKSET_PASSWORD"), "{said}");
    let guardian_env = "tr '\\0' '\\n' </proc/$PPID/environ";
    let output = home.lockset(&["run", "x", "--", "sh", "-c", guardian_env]).output().unwrap();
    assert!(stdout(&output).contains("PATH="), "{output:?}");
    assert!(!stdout(&output).contains("LOCKSET_URL"), "{output:?}");
}

/// Neither a file that is named relative to the working folder nor the user's own becomes another
/// file in a command that moves.
#[test]
fn the_command_finds_the_file_that_was_used() {
    let home = Home::new();
    std::fs::create_dir(home.path("sub")).unwrap();
    let script = "cd sub; XDG_STATE_HOME=$PWD lockset show x; \
        XDG_STATE_HOME=$PWD lockset run -n x -- true; echo code $?; echo $LOCKSET_URL";
    for (options, file) in [
        (&["-u", "local:rel.db?mode=660"][..], "rel.db?mode=660"),
        (&[], "lockset/lockset.db"),
        (&["-u", ""], "lockset/lockset.db"),
    ] {
        let args = [options, &["run", "x", "--", "sh", "-c", script]].concat();
        let mut command = home.lockset(&args);
        command.env_remove("LOCKSET_URL").env("XDG_STATE_HOME", home.path("."));
        let output = command.output().unwrap();
        let said = stdout(&output);
        assert!(said.starts_with("x is held\n") && said.contains("code 75"), "{output:?}");
        let folder = home.path(".").canonicalize().unwrap();
        let url = format!("local:{}\n", folder.join(file).display());
        assert!(said.ends_with(&url), "{said}");
    }
}

#[test]
fn the_command_does_not_find_the_password_and_needs_it() {
    let server = RedisServer::start_with(&["--requirepass", "s3cret"]);
    let bare = server.url().replace("redis://", "");
    let home = Home::new();
    std::fs::write(home.path("pw"), "s3cret\n").unwrap();
    let script =
        "env | grep LOCKSET_; lockset show x; echo show $?; lockset run -n x -- true; echo run $?";
    let by_url = |user: &str| format!("redis://{user}:s3cret@{bare}");
    for (url, password_file, passed_on) in [
        (by_url(""), "", format!("redis://{bare}")),
        (by_url("default"), "", format!("redis://default@{bare}")),
        (format!("redis://default@{bare}"), "pw", format!("redis://default@{bare}")),
    ] {
        let mut command = home.lockset(&["-u", &url, "run", "x", "--", "sh", "-c", script]);
        if !password_file.is_empty() {
            command.env("LOCKSET_PASSWORD_FILE", password_file);
        }
        let output = command.output().unwrap();
        let said = stdout(&output);
        assert!(said.contains(&format!("LOCKSET_URL={passed_on}\n")), "{output:?}");
        assert!(said.contains("show 125\n") && said.contains("run 125\n"), "{output:?}");
        assert!(stderr(&output).contains("NOAUTH"), "{output:?}");
        assert!(!said.contains("s3cret") && !stderr(&output).contains("s3cret"), "{output:?}");
        assert!(!said.contains("LOCKSET_PASSWORD"), "{output:?}");
    }
}

#[test]
fn a_password_for_an_engine_without_one_is_refused_and_never_shown() {
    let home = Home::new();
    std::fs::write(home.path("pw"), "s3cret\n").unwrap();
    let by_file = home.lockset(&["ls", "--password-file", "pw"]).output().unwrap();
    let by_variable = home.lockset(&["ls"]).env("LOCKSET_PASSWORD", "s3cret").output().unwrap();
    for output in [by_file, by_variable] {
        assert_eq!(code(&output), 125);
        assert!(stderr(&output).contains("takes no password"), "{}", stderr(&output));
        assert!(!stderr(&output).contains("s3cret"));
    }
    let output = home.lockset(&["-u", "nosuch://me:s3cret@host/0", "ls"]).output().unwrap();
    assert_eq!(code(&output), 125);
    assert!(!stderr(&output).contains("s3cret"), "{}", stderr(&output));
    let output = home.lockset(&["run", "--help"]).env("LOCKSET_URL", "x://a:s3cret@b").output();
    assert!(!stdout(&output.unwrap()).contains("s3cret"));
}

#[test]
fn standard_input_reaches_the_command() {
    let home = Home::new();
    let output = home.shell("echo hello | lockset run x -- cat").output().unwrap();
    assert_eq!(stdout(&output), "hello\n");
}

#[test]
fn no_other_descriptor_reaches_the_command() {
    let home = Home::new();
    let script = "exec 7>seven 9>nine; exec lockset run x -- sh -c 'echo /proc/$$/fd/*'";
    let output = home.shell(script).output().unwrap();
    let said = stdout(&output);
    let names: Vec<&str> =
        said.split_whitespace().map(|path| path.rsplit('/').next().unwrap()).collect();
    // The shell's own `echo *` has the folder open while it looks.
    assert_eq!(names.iter().filter(|name| **name != "3").collect::<Vec<_>>(), [&"0", &"1", &"2"]);
}

#[test]
fn dispositions_are_those_lockset_was_started_with() {
    let home = Home::new();
    let show = "grep -E '^Sig(Blk|Ign)' /proc/self/status";
    for (ignore, bits) in [("", 0), ("HUP", 1), ("PIPE", 1 << 12), ("HUP,CHLD", 1 | 1 << 16)] {
        let seen = |script: &str| {
            let ignore = if ignore.is_empty() { "" } else { &format!("--ignore-signal={ignore}") };
            stdout(&home.shell(&format!("exec env {ignore} {script}")).output().unwrap())
        };
        let without = seen(show);
        let ignored = without.split_whitespace().last().unwrap();
        let ignored = u64::from_str_radix(ignored, 16).unwrap();
        assert_eq!(ignored & (1 | 1 << 12 | 1 << 16), bits, "they are ignored: {without}");
        assert_eq!(seen(&format!("lockset run x -- {show}")), without, "{ignore}");
    }
}

#[test]
fn a_hangup_does_not_end_what_nohup_started() {
    let home = Home::new();
    let script = "exec nohup lockset run x -- sh -c 'echo $$ >pid; exec sleep 1000'";
    let running = Running::spawn(&mut home.shell(script));
    let command = home.pid("pid");
    running.signal(rustix::process::Signal::HUP);
    running.signal(rustix::process::Signal::USR1);
    // USR1 came after HUP and ended it: had HUP counted, the code would be another.
    assert_eq!(code(&running.wait()), 128 + 10);
    assert!(!is_alive(command));
}

#[test]
fn an_empty_environment_is_enough() {
    let home = Home::new();
    let mut command = Command::new(BINARY);
    command.args(["-u", &home.url(), "run", "x", "--", "/bin/sh", "-c", "echo ran"]);
    command.env_clear().current_dir("/").stdin(Stdio::null());
    let output = command.output().unwrap();
    assert_eq!((code(&output), stdout(&output), stderr(&output)), (0, "ran\n".into(), "".into()));
}

#[test]
fn it_works_as_process_one() {
    let home = Home::new();
    // The orphan that ends must be buried, by the guardian or by process 1.
    let script = "cat /proc/1/comm; (sh -c 'sleep 0.01' &); sleep 0.1; \
        cat /proc/[0-9]*/stat | grep -c ') Z '; exit 5";
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--mount-proc", BINARY, "run", "x", "--", "sh", "-c", script]);
    let output = home.detached(command).output().unwrap();
    assert_eq!((code(&output), stdout(&output)), (5, "lockset\n0\n".into()), "{output:?}");
}

#[test]
fn process_one_passes_signals_on() {
    let home = Home::new();
    let script = "trap 'echo got it; exit 6' TERM; echo ready >ready; while :; do sleep 0.01; done";
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--mount-proc", BINARY, "run", "x", "--", "sh", "-c", script]);
    let running = Running::spawn(&mut home.detached(command));
    until("the command runs", || home.text("ready") == "ready\n");
    let parent = running.pid().as_raw_pid();
    let one = crate::common::processes().into_iter().find(|process| process.parent == parent);
    let one = rustix::process::Pid::from_raw(one.unwrap().pid).unwrap();
    rustix::process::kill_process(one, rustix::process::Signal::TERM).unwrap();
    let output = running.wait();
    assert_eq!((code(&output), stdout(&output)), (6, "got it\n".into()));
}

#[test]
fn the_command_leads_a_group_of_its_own() {
    let home = Home::new();
    let script = "cut -d' ' -f1,5 /proc/self/stat; cut -d' ' -f5 /proc/$$/stat; echo $$";
    let output = home.lockset(&["run", "x", "--", "sh", "-c", script]).output().unwrap();
    let said = stdout(&output);
    let numbers: Vec<&str> = said.split_whitespace().collect();
    assert_eq!(numbers[1..], [numbers[3]; 3], "{said}");
}
