//! What `lockset` promises on every engine, tried on each of them.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

use crate::common::{
    Home, PATIENCE, Running, STUBBORN, TREE, code, is_alive, stderr, stdout, until,
};

/// One test for each promise and engine.
macro_rules! everywhere {
    ($($promise:ident,)*) => {
        mod local {
            use crate::common::Home;
            $(
                #[test]
                fn $promise() {
                    super::$promise(&Home::new());
                }
            )*
        }

        mod redis {
            use lockset_testkit::stage::RedisServer;

            use crate::common::Home;
            $(
                #[test]
                fn $promise() {
                    super::$promise(&Home::on(RedisServer::start()));
                }
            )*
        }

        mod etcd {
            use lockset_testkit::stage::EtcdServers;

            use crate::common::Home;
            $(
                #[test]
                fn $promise() {
                    super::$promise(&Home::on(EtcdServers::start(1)));
                }
            )*
        }

        mod postgres {
            $(
                #[test]
                fn $promise() {
                    super::$promise(&crate::postgres::home());
                }
            )*
        }

        mod zookeeper {
            $(
                #[test]
                fn $promise() {
                    super::$promise(&crate::zookeeper::home());
                }
            )*
        }
    };
}

everywhere! {
    the_commands_own_code_is_passed_on,
    a_busy_lock_is_75_without_waiting,
    a_free_lock_is_taken_without_waiting,
    waiting_too_long_is_124,
    a_wait_ends_when_the_holder_ends,
    readers_share_and_permits_are_counted,
    the_command_is_told_about_its_lock,
    a_lockset_within_the_command_uses_the_same_engine,
    a_ticket_keeps_renews_and_releases_a_lock,
    a_ticket_names_the_home_of_its_lock,
    a_revoked_lock_can_be_released,
    a_lock_lives_no_longer_than_its_lease,
    a_signal_while_waiting_leaves_neither_ticket_nor_claim,
    a_free_lock_is_shown_as_free,
    a_held_lock_is_shown_with_its_holder_and_waiters,
    a_watch_prints_every_change_on_a_line,
    leadership_passes_on_when_the_leader_dies,
    a_leader_that_lost_its_leadership_campaigns_again,
    a_command_whose_lease_cannot_be_renewed_gets_term_and_then_kill_before_it_ends,
    an_engine_that_does_not_reply_is_not_waited_for_when_the_lock_is_lost,
    a_lease_is_renewed_for_as_long_as_the_command_runs,
    a_broken_lock_ends_its_command_when_the_lease_ends,
    a_lock_broken_at_once_kills_its_command_at_once,
    killing_lockset_kills_the_whole_tree_before_another_client_is_granted,
}

fn the_commands_own_code_is_passed_on(home: &Home) {
    for expected in [0, 1, 3, 75, 255] {
        let script = format!("exit {expected}");
        let output = home.lockset(&["run", "x", "--", "sh", "-c", &script]).output().unwrap();
        assert_eq!(code(&output), expected);
        assert_eq!(stderr(&output), "");
    }
}

fn a_busy_lock_is_75_without_waiting(home: &Home) {
    let holder = home.hold_with(&["--note", "at work", "x"]);
    let output = home.lockset(&["run", "-n", "x", "--", "true"]).output().unwrap();
    assert_eq!(code(&output), 75);
    let said = stderr(&output);
    assert!(said.contains(&format!("held by {}@", holder.pid().as_raw_pid())), "{said}");
    assert!(said.contains("(at work)"), "{said}");
    assert!(said.contains("hint:"), "{said}");

    let args = ["run", "-n", "--conflict-exit-code", "9", "x", "--", "true"];
    assert_eq!(code(&home.lockset(&args).output().unwrap()), 9);
}

fn a_free_lock_is_taken_without_waiting(home: &Home) {
    assert_eq!(code(&home.lockset(&["run", "-n", "x", "--", "true"]).output().unwrap()), 0);
}

fn waiting_too_long_is_124(home: &Home) {
    let _holder = home.hold("x");
    let began = Instant::now();
    let output = home.lockset(&["run", "-w", "300ms", "x", "--", "true"]).output().unwrap();
    assert_eq!(code(&output), 124);
    assert!(began.elapsed() >= Duration::from_millis(300));
    assert!(stderr(&output).contains("it is held by"), "{}", stderr(&output));
    assert_eq!(home.waiters("x"), 0);

    let args = ["run", "-w", "10ms", "--conflict-exit-code", "9", "x", "--", "true"];
    assert_eq!(code(&home.lockset(&args).output().unwrap()), 9);
}

fn a_wait_ends_when_the_holder_ends(home: &Home) {
    let holder = home.hold("x");
    let waiter =
        Running::spawn(&mut home.lockset(&["run", "-w", "20s", "x", "--", "echo", "mine"]));
    until("it waits", || home.waiters("x") == 1);
    holder.signal(Signal::TERM);
    assert_eq!(code(&holder.wait()), 128 + 15);
    let output = waiter.wait();
    assert_eq!((code(&output), stdout(&output)), (0, "mine\n".to_owned()));
}

fn readers_share_and_permits_are_counted(home: &Home) {
    let run = |args: &[&str]| {
        let args = [&["run", "-n"], args, &["--", "true"]].concat();
        code(&home.lockset(&args).output().unwrap())
    };
    let _reader = home.hold_with(&["--shared", "r"]);
    assert_eq!(run(&["--shared", "r"]), 0);
    assert_eq!(run(&["r"]), 75);
    let _two = home.hold_with(&["--permits", "2", "--limit", "3", "s"]);
    assert_eq!(run(&["--limit", "3", "s"]), 0);
    assert_eq!(run(&["--permits", "2", "--limit", "3", "s"]), 75);
    // A name has one use: another limit, or a mutex, is a mistake and not a wait.
    assert_eq!(run(&["--limit", "4", "s"]), 125);
}

fn the_command_is_told_about_its_lock(home: &Home) {
    let script = "echo $LOCKSET_NAME $LOCKSET_TOKEN $LOCKSET_OWNER $LOCKSET_ENGINE $LOCKSET_TTL_MS";
    let mut command = home.lockset(&["run", "--ttl", "20s", "jobs/a", "--", "sh", "-c", script]);
    for stale in ["NAME", "TOKEN", "OWNER", "ENGINE", "TTL_MS"] {
        command.env(format!("LOCKSET_{stale}"), "stale");
    }
    let output = command.output().unwrap();
    let said = stdout(&output);
    let words: Vec<&str> = said.split_whitespace().collect();
    let [name, token, owner, engine, ttl] = words[..] else { panic!("{output:?}") };
    assert_eq!((name, engine, ttl), ("jobs/a", home.engine(), "20000"));
    assert!(token.parse::<u64>().unwrap() > 0);
    assert_eq!(owner.len(), 32);
    // Not every engine remembers the fence of a free lock.
    let fence = &home.state("jobs/a")["fence"];
    assert!(fence == token || home.engine() != "local", "a token is a string in JSON: {fence}");
}

fn a_lockset_within_the_command_uses_the_same_engine(home: &Home) {
    let script = "lockset show $LOCKSET_NAME; lockset run -n $LOCKSET_NAME -- true; echo code $?";
    let by_variable = home.lockset(&["run", "x", "--", "sh", "-c", script]);
    let url = home.url();
    let mut by_option = home.lockset(&["-u", &url, "run", "x", "--", "sh", "-c", script]);
    by_option.env_remove("LOCKSET_URL");
    for mut command in [by_variable, by_option] {
        let output = command.output().unwrap();
        let said = stdout(&output);
        assert!(said.starts_with("x is held\n") && said.ends_with("code 75\n"), "{output:?}");
    }
}

fn a_ticket_keeps_renews_and_releases_a_lock(home: &Home) {
    let args = ["acquire", "x", "--ttl", "30s", "--ticket", "t", "--note", "mine"];
    let output = home.lockset(&args).output().unwrap();
    assert_eq!(code(&output), 0, "{output:?}");
    let mode = std::fs::metadata(home.path("t")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(home.holders("x"), 1, "its process is gone, the lock is not");
    assert_eq!(code(&home.lockset(&["run", "-n", "x", "--", "true"]).output().unwrap()), 75);

    // Some engines count what is left in whole seconds.
    std::thread::sleep(Duration::from_millis(1200));
    let before = home.state("x")["holders"][0]["left_ms"].as_u64().unwrap();
    let output = home.lockset(&["renew", "--ticket", "t"]).output().unwrap();
    assert_eq!(code(&output), 0, "{output:?}");
    let left = home.trust(Duration::from_secs(30)).as_secs() - 1;
    let said = format!("x is held for another {left}s");
    assert!(stdout(&output).contains(&said), "{output:?}");
    let after = home.state("x")["holders"][0]["left_ms"].as_u64().unwrap();
    // ZooKeeper does not show how long a session still lasts.
    assert!(after > before || home.engine() == "zookeeper", "{after} after {before}");

    let output = home.lockset(&["release", "--ticket", "t"]).output().unwrap();
    assert_eq!((code(&output), stdout(&output)), (0, "x is released\n".into()), "{output:?}");
    assert_eq!(home.holders("x"), 0);
    assert!(!home.path("t").exists());
}

fn a_ticket_names_the_home_of_its_lock(home: &Home) {
    let args = ["acquire", "jobs/a%b", "--ttl", "30s", "--ticket", "t"];
    assert_eq!(code(&home.lockset(&args).output().unwrap()), 0);
    for verb in ["renew", "release"] {
        let mut command = home.lockset(&[verb, "--ticket", "t"]);
        let output = command.env_remove("LOCKSET_URL").output().unwrap();
        assert_eq!((code(&output), stderr(&output)), (0, String::new()), "{verb}");
    }
    assert_eq!(home.holders("jobs/a%b"), 0);
}

fn a_revoked_lock_can_be_released(home: &Home) {
    let acquire = ["acquire", "x", "--ttl", "30s", "--ticket", "t"];
    assert_eq!(code(&home.lockset(&acquire).output().unwrap()), 0);
    assert_eq!(code(&home.lockset(&["break", "x"]).output().unwrap()), 0);
    let renewed = home.lockset(&["renew", "--ticket", "t"]).output().unwrap();
    assert_eq!((code(&renewed), home.holders("x")), (76, 1), "{renewed:?}");
    assert!(stderr(&renewed).contains("was revoked"), "{}", stderr(&renewed));
    let released = home.lockset(&["release", "--ticket", "t"]).output().unwrap();
    assert_eq!((code(&released), home.holders("x")), (0, 0), "{released:?}");
    assert!(!home.path("t").exists());
}

fn a_lock_lives_no_longer_than_its_lease(home: &Home) {
    let args = ["acquire", "x", "--ttl", home.short_ttl(), "--ticket", "t"];
    assert_eq!(code(&home.lockset(&args).output().unwrap()), 0);
    // Granted when the lease ends, and not before it is requested.
    assert_eq!(code(&home.lockset(&["run", "-w", "20s", "x", "--", "true"]).output().unwrap()), 0);
    let output = home.lockset(&["renew", "--ticket", "t"]).output().unwrap();
    assert_eq!(code(&output), 76, "{output:?}");
    let output = home.lockset(&["release", "--ticket", "t"]).output().unwrap();
    assert_eq!(code(&output), 76, "{output:?}");
    assert!(!home.path("t").exists(), "it is of no use any more");
}

fn a_signal_while_waiting_leaves_neither_ticket_nor_claim(home: &Home) {
    let _holder = home.hold("x");
    let args = ["acquire", "x", "--ttl", "9s", "--ticket", "t"];
    let waiter = Running::spawn(&mut home.lockset(&args));
    until("it waits", || home.waiters("x") == 1);
    waiter.signal(Signal::TERM);
    assert_eq!(code(&waiter.wait()), 128 + 15);
    assert_eq!(home.waiters("x"), 0);
    assert!(!home.path("t").exists());
}

fn a_free_lock_is_shown_as_free(home: &Home) {
    let output = home.lockset(&["show", "x"]).output().unwrap();
    assert_eq!((code(&output), stdout(&output)), (1, "x is free\n".into()));
    let output = home.lockset(&["show", "x", "--json"]).output().unwrap();
    assert_eq!(code(&output), 1);
    let state: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(state["holders"].as_array().unwrap().len(), 0);
    let output = home.lockset(&["ls"]).output().unwrap();
    assert_eq!((code(&output), stdout(&output)), (0, "no lock is held or waited for\n".into()));
    let output = home.lockset(&["ls", "--json"]).output().unwrap();
    assert_eq!(stdout(&output), "[]\n");
    for now in [&[][..], &["--now"]] {
        let output = home.lockset(&[&["break", "x"], now].concat()).output().unwrap();
        assert_eq!((code(&output), stdout(&output)), (1, String::new()), "{now:?}");
        assert!(stderr(&output).contains("not held"), "{output:?}");
        let output = home.lockset(&[&["break", "x", "--json"], now].concat()).output().unwrap();
        let broken: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((code(&output), broken["holders"].as_array().unwrap().len()), (1, 0));
    }
}

fn a_held_lock_is_shown_with_its_holder_and_waiters(home: &Home) {
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

    let output = home.lockset(&["show", "jobs/a"]).output().unwrap();
    let shown = stdout(&output);
    assert_eq!(code(&output), 0, "{output:?}");
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

fn a_watch_prints_every_change_on_a_line(home: &Home) {
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
    holder.signal(Signal::TERM);
    next("free", &|state| state["holders"].as_array().unwrap().is_empty());
    watch.signal(Signal::INT);
    watch.wait();
}

fn leadership_passes_on_when_the_leader_dies(home: &Home) {
    let lead = |who: &str| {
        let script = format!("echo {who} >>log; exec sleep 1000");
        let args =
            ["elect", "--json", "--ttl", "3s", "--note", who, "boss", "--", "sh", "-c", &script];
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

fn a_leader_that_lost_its_leadership_campaigns_again(home: &Home) {
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

fn a_command_whose_lease_cannot_be_renewed_gets_term_and_then_kill_before_it_ends(home: &Home) {
    // Long enough that a busy machine, on which TERM is seen late, leaves the grace recognisable.
    let ttl = Duration::from_secs(6);
    let args = ["run", "--ttl", "6s", "x", "--", "sh", "-c", STUBBORN];
    let asked = Instant::now();
    let running = Running::spawn(&mut home.lockset(&args));
    let command = home.pid("pid");
    let blocked = home.block();
    // From here on no renewal can succeed; those before cannot have come from later than this.
    let last_renewal = Instant::now();
    until("it is asked to end", || home.text("log") == "TERM\n");
    let termed = Instant::now();
    // Asked to end a third of the ttl before the end, and not earlier.
    let early = home.trust(ttl) - ttl / 3 - Duration::from_millis(200);
    assert!(asked.elapsed() > early, "not before it is necessary");
    assert!(is_alive(command));
    until("it is killed", || !is_alive(command));
    assert!(last_renewal.elapsed() < ttl, "before another client can be granted the lock");
    assert!(termed.elapsed() > Duration::from_millis(800), "{:?} of grace", termed.elapsed());
    drop(blocked);
    let output = running.wait();
    assert_eq!(code(&output), 76, "{output:?}");
    assert!(
        stderr(&output).contains("`x` was lost: its lease was not renewed in time"),
        "{}",
        stderr(&output)
    );
}

fn an_engine_that_does_not_reply_is_not_waited_for_when_the_lock_is_lost(home: &Home) {
    let polite = "echo $$ >pid; exec sleep 1000";
    let stubborn = "trap '' TERM; echo $$ >pid; exec sleep 1000";
    for (name, script) in [("polite", polite), ("stubborn", stubborn)] {
        let args = ["run", "--ttl", "2s", name, "--", "sh", "-c", script];
        let running = Running::spawn(&mut home.lockset(&args));
        let command = home.pid("pid");
        let blocked = home.block();
        until("the command is ended", || !is_alive(command));
        let ended = Instant::now();
        let output = running.wait();
        assert!(ended.elapsed() < Duration::from_secs(1), "{name}: {:?}", ended.elapsed());
        assert_eq!(code(&output), 76, "{output:?}");
        let said = stderr(&output);
        // On a busy machine the lease may have ended on the way: then nothing is left to it.
        let explained = ["so the lock ends with its lease", "has ended"];
        let is_explained = explained.iter().any(|part| said.contains(part));
        assert!(is_explained && said.lines().count() == 1, "{name}: {said}");
        drop(blocked);
        std::fs::remove_file(home.path("pid")).unwrap();
    }
}

fn a_lease_is_renewed_for_as_long_as_the_command_runs(home: &Home) {
    let args = ["run", "--ttl", "2s", "x", "--", "sh", "-c", "sleep 5; exit 7"];
    let output = home.lockset(&args).output().unwrap();
    assert_eq!((code(&output), stderr(&output)), (7, String::new()));
}

fn a_broken_lock_ends_its_command_when_the_lease_ends(home: &Home) {
    let args = ["run", "--ttl", "3s", "x", "--", "sh", "-c", STUBBORN];
    let running = Running::spawn(&mut home.lockset(&args));
    let command = home.pid("pid");
    let next = Running::spawn(&mut home.shell(
        "lockset run x -- sh -c 'kill -0 $(cat pid) 2>/dev/null && echo lives; echo granted'",
    ));
    until("the next one waits", || home.waiters("x") == 1);
    let output = home.lockset(&["break", "x"]).output().unwrap();
    assert_eq!(code(&output), 0);
    assert!(stdout(&output).contains("when its lease ends"), "{output:?}");
    assert_eq!(home.state("x")["holders"][0]["revoked"], true);
    assert!(is_alive(command));
    let output = running.wait();
    assert_eq!(code(&output), 76, "{output:?}");
    let said = stderr(&output);
    assert!(said.contains("operator revoked it"), "{said}");
    assert!(!said.contains("ran out"), "it ended before its lease: {said}");
    assert_eq!(home.text("log"), "TERM\n");
    assert_eq!(stdout(&next.wait()), "granted\n");
}

fn a_lock_broken_at_once_kills_its_command_at_once(home: &Home) {
    let args = ["run", "--ttl", "24s", "x", "--", "sh", "-c", STUBBORN];
    let running = Running::spawn(&mut home.lockset(&args));
    let command = home.pid("pid");
    let output = home.lockset(&["break", "x", "--now"]).output().unwrap();
    assert!(stdout(&output).contains("fencing tokens"), "{output:?}");
    let broken = Instant::now();
    let output = running.wait();
    assert!(broken.elapsed() < Duration::from_secs(10), "{:?}", broken.elapsed());
    assert!(!is_alive(command));
    assert_eq!(code(&output), 76);
    // If a lock is simply gone, it is not known who took it.
    let words = if home.engine() == "local" { "operator" } else { "was lost" };
    assert!(stderr(&output).contains(words), "{}", stderr(&output));
    assert_eq!(home.text("log"), "", "no time for TERM");
}

fn killing_lockset_kills_the_whole_tree_before_another_client_is_granted(home: &Home) {
    let running =
        Running::spawn(&mut home.lockset(&["run", "--ttl", "3s", "x", "--", "sh", "-c", TREE]));
    let (command, runaway) = (home.pid("command"), home.pid("runaway"));
    until("the tree stands", || home.text("ready") == "ready\n");
    let guardian = running.guardian();
    let check = "for p in $(cat command runaway); do \
        kill -0 $p 2>/dev/null && echo $p lives; done; echo granted";
    let next = Running::spawn(&mut home.lockset(&["run", "x", "--", "sh", "-c", check]));
    until("the next one waits", || home.waiters("x") == 1);
    assert!(is_alive(command) && is_alive(runaway));

    running.signal(Signal::KILL);
    let output = next.wait();
    assert_eq!((code(&output), stdout(&output)), (0, "granted\n".to_owned()));
    assert!(!is_alive(command) && !is_alive(runaway) && !is_alive(guardian));
}
