//! `fence`: tokens that are admitted, stale, or cannot be judged.

use std::fs;
use std::io::Write;
use std::process::{Output, Stdio};

use lockset_testkit::stage::{PostgresServer, RedisServer};
use rusqlite::Connection;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::common::{Home, code, stderr, stdout};

const SQLITE: &str = "sqlite:stock.db";

fn fence(home: &Home, args: &[&str]) -> Output {
    let mut command = home.lockset(&[&["fence"], args].concat());
    command.env_remove("LOCKSET_NAME").env_remove("LOCKSET_TOKEN").output().unwrap()
}

fn check(home: &Home, store: &str, name: &str, token: &str) -> Output {
    fence(home, &["check", "--store", store, name, token])
}

fn write(home: &Home, args: &[&str], content: &[u8]) -> Output {
    let args = [&["fence", "write", "--store", "file:reports"], args].concat();
    let mut command = home.lockset(&args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // A command that rejects its arguments does not read.
    let _ = child.stdin.take().unwrap().write_all(content);
    child.wait_with_output().unwrap()
}

fn marks(home: &Home, store: &str) -> Value {
    let output = fence(home, &["show", "--store", store, "--json"]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The promise of the exit codes on this store.
fn assert_tokens_are_judged(home: &Home, store: &str) {
    for (token, expected) in [("7", 0), ("7", 0), ("9", 0), ("8", 77), ("7", 77), ("9", 0)] {
        let output = check(home, store, "orders/42", token);
        assert_eq!(code(&output), expected, "{store} {token}: {}", stderr(&output));
        assert!(output.stdout.is_empty(), "{store}: {}", stdout(&output));
        let said = stderr(&output);
        let is_told = said.contains("is stale, 9 was seen") && said.contains("hint: ");
        assert_eq!(is_told, expected == 77, "{store}: {said}");
    }
    // Another lock and another resource have marks of their own.
    assert_eq!(code(&check(home, store, "orders/43", "1")), 0);
    let args = ["check", "--resource", "stock", "--store", store, "orders/42", "1"];
    assert_eq!(code(&fence(home, &args)), 0);
    let expected = json!([
        { "resource": "orders/42", "lock": "orders/42", "token": "9" },
        { "resource": "orders/43", "lock": "orders/43", "token": "1" },
        { "resource": "stock", "lock": "orders/42", "token": "1" },
    ]);
    assert_eq!(marks(home, store), expected, "{store}");
}

#[test]
fn tokens_are_judged_in_a_sqlite_file() {
    assert_tokens_are_judged(&Home::new(), SQLITE);
}

#[test]
fn tokens_are_judged_in_a_folder() {
    assert_tokens_are_judged(&Home::new(), "file:marks");
}

#[test]
fn tokens_are_judged_by_a_redis_server() {
    let server = RedisServer::start();
    assert_tokens_are_judged(&Home::new(), &server.url());
}

#[test]
fn tokens_are_judged_by_a_postgres_server() {
    let server = PostgresServer::start();
    assert_tokens_are_judged(&Home::new(), &server.url());
}

#[test]
fn marks_are_shown_as_a_table() {
    let home = Home::new();
    assert_eq!(code(&check(&home, SQLITE, "orders/42", "7")), 0);
    let output = fence(&home, &["show", "--store", SQLITE]);
    let table = "RESOURCE   LOCK       TOKEN\norders/42  orders/42  7\n";
    assert_eq!((code(&output), stdout(&output)), (0, table.into()));
    fs::create_dir(home.path("empty")).unwrap();
    let output = fence(&home, &["show", "--store", "file:empty"]);
    assert_eq!((code(&output), stdout(&output)), (0, "no token was admitted yet\n".into()));
}

#[test]
fn showing_makes_no_store() {
    let home = Home::new();
    for (store, path) in [("sqlite:no.db", "no.db"), ("file:no", "no")] {
        let output = fence(&home, &["show", "--store", store]);
        assert_eq!(code(&output), 125, "{output:?}");
        assert!(stderr(&output).contains(path), "{}", stderr(&output));
        assert!(!home.path(path).exists(), "{path} was made");
    }
}

#[test]
fn bad_input_is_rejected_with_the_reason() {
    let home = Home::new();
    let table: &[(&[&str], &str)] = &[
        (&["check", "--store", SQLITE, "x", "0"], "from 1 to 9223372036854775807"),
        (&["check", "--store", SQLITE, "x", "9223372036854775808"], "from 1 to"),
        (&["check", "--store", SQLITE, "x", "99999999999999999999"], "from 1 to"),
        (&["check", "--store", SQLITE, "x", "-1"], "`-1` is not a fencing token"),
        (&["check", "--store", SQLITE, "x", "+1"], "`+1`"),
        (&["check", "--store", SQLITE, "x", "1x"], "`1x`"),
        (&["check", "--store", SQLITE, "x", ""], "``"),
        (&["check", "--store", SQLITE, "a/../b", "1"], "`..`"),
        (&["check", "--store", SQLITE, "", "1"], "empty"),
        (&["check", "--store", SQLITE, "--resource", "a/", "x", "1"], "slash"),
        (&["check", "--store", SQLITE, "x"], "<TOKEN>"),
        (&["check", "--store", SQLITE], "LOCKSET_NAME is not set"),
        (&["check", "x", "1"], "--store"),
        (&["check", "--store", "mysql://host", "x", "1"], "sqlite:PATH"),
        (&["check", "--store", "stock.db", "x", "1"], "sqlite:PATH"),
        (&["check", "--store", "sqlite:", "x", "1"], "names no path"),
        (&["check", "--store", "redis:host", "x", "1"], "`//`"),
        (&["check", "--store", "sqlite:no/such/folder/x.db", "x", "1"], "no/such/folder"),
        (&["check", "--store", "file:no/such/folder", "x", "1"], "no/such/folder"),
        (&["write", "--store", SQLITE, "x", "1"], "file:FOLDER"),
        (&["write", "--store", "file:f", "--file", "../x", "x", "1"], "`..`"),
        (&["write", "--store", "file:f", "--file", "/x", "x", "1"], "empty segment"),
        (&["show"], "--store"),
    ];
    for (args, reason) in table {
        let output = fence(&home, args);
        let said = stderr(&output);
        assert_eq!(code(&output), 125, "{args:?}: {said}");
        assert!(said.starts_with("lockset: ") && said.contains(reason), "{args:?}: {said}");
        assert!(!said.contains("panicked"), "{said}");
        assert!(output.stdout.is_empty());
    }
    assert!(!home.path("stock.db").exists(), "a store was made for bad input");
}

#[test]
fn a_store_that_is_down_cannot_tell() {
    let home = Home::new();
    let redis = RedisServer::start();
    let postgres = PostgresServer::start();
    let urls = [redis.url(), postgres.url()];
    redis.signal(Signal::STOP);
    postgres.stop();
    for url in &urls {
        for args in [&["check", "--store", url, "x", "1"][..], &["show", "--store", url]] {
            let output = fence(&home, args);
            assert_eq!(code(&output), 125, "{output:?}");
            assert!(stderr(&output).starts_with("lockset: "), "{}", stderr(&output));
        }
    }
    redis.signal(Signal::CONT);
    fs::write(home.path("stock.db"), "this is no database, but it is long enough").unwrap();
    fs::write(home.path("plain"), "").unwrap();
    for store in [SQLITE, "file:plain"] {
        let output = check(&home, store, "x", "1");
        assert_eq!(code(&output), 125, "{store}: {output:?}");
        assert!(stderr(&output).contains("treat the write as rejected"), "{}", stderr(&output));
    }
}

#[test]
fn a_store_of_a_newer_version_cannot_tell() {
    let home = Home::new();
    assert_eq!(code(&check(&home, SQLITE, "x", "7")), 0);
    let db = Connection::open(home.path("stock.db")).unwrap();
    assert_eq!(
        db.execute("UPDATE lockset_fence_version SET version = version + 1", []).unwrap(),
        1
    );
    for token in ["6", "7", "8"] {
        let output = check(&home, SQLITE, "x", token);
        assert_eq!(code(&output), 125, "{token}: {output:?}");
        assert!(stderr(&output).contains("version"), "{}", stderr(&output));
    }
}

#[test]
fn a_stale_write_leaves_the_file_unchanged() {
    let home = Home::new();
    let args = ["--file", "daily.csv", "orders"];
    assert_eq!(code(&write(&home, &[&args[..], &["8"]].concat(), b"new\n")), 0);
    let output = write(&home, &[&args[..], &["7"]].concat(), b"late\n");
    assert_eq!(code(&output), 77, "{output:?}");
    assert!(stderr(&output).contains("token 7 of the lock `orders` is stale, 8 was seen"));
    assert_eq!(home.text("reports/daily.csv"), "new\n");
    assert_eq!(code(&write(&home, &[&args[..], &["9"]].concat(), b"newer\n")), 0);
    assert_eq!(home.text("reports/daily.csv"), "newer\n");
    let expected = json!([{ "resource": "daily.csv", "lock": "orders", "token": "9" }]);
    assert_eq!(marks(&home, "file:reports"), expected);
    // Without --file it is named like the lock.
    assert_eq!(code(&write(&home, &["orders", "1"], b"")), 0);
    assert_eq!(fs::read(home.path("reports/orders")).unwrap(), b"");
}

#[test]
fn a_write_that_is_too_long_changes_nothing() {
    let home = Home::new();
    let longest = vec![b'x'; 64 << 20];
    assert_eq!(code(&write(&home, &["orders", "1"], &longest)), 0);
    let output = write(&home, &["orders", "2"], &[&longest[..], b"y"].concat());
    assert_eq!(code(&output), 125, "{}", stderr(&output));
    assert!(stderr(&output).contains("67108864 bytes"), "{}", stderr(&output));
    assert_eq!(fs::metadata(home.path("reports/orders")).unwrap().len(), 64 << 20);
    assert_eq!(marks(&home, "file:reports")[0]["token"], "1");
}

/// The script is the one of the documentation.
#[test]
fn a_command_checks_the_token_of_its_lock() {
    let home = Home::new();
    let script = "lockset fence check --store sqlite:stock.db && \
        echo shipped | lockset fence write --store file:reports --file daily.txt";
    for _ in 0..2 {
        let output = home.lockset(&["run", "orders", "--", "sh", "-c", script]).output().unwrap();
        assert_eq!(code(&output), 0, "{}", stderr(&output));
    }
    assert_eq!(home.text("reports/daily.txt"), "shipped\n");
    let mark = marks(&home, SQLITE)[0].clone();
    assert_eq!((&mark["lock"], &mark["resource"]), (&json!("orders"), &json!("orders")));
    // The same command with the token of an earlier holder.
    let token = mark["token"].as_str().unwrap().parse::<u64>().unwrap();
    let late = format!("LOCKSET_TOKEN={}; {script}", token - 1);
    let output = home.lockset(&["run", "orders", "--", "sh", "-c", &late]).output().unwrap();
    assert_eq!(code(&output), 77, "{}", stderr(&output));
    assert_eq!(marks(&home, SQLITE)[0]["token"], token.to_string());
}

#[test]
fn a_variable_that_is_no_token_is_rejected() {
    let home = Home::new();
    for (name, token, reason) in [
        ("orders", "soon", "`soon`"),
        ("orders", "0", "from 1 to"),
        ("a/../b", "1", "`..`"),
        ("", "1", "LOCKSET_NAME is not set"),
        ("orders", "", "LOCKSET_TOKEN is not set"),
    ] {
        let mut command = home.lockset(&["fence", "check", "--store", SQLITE]);
        command.env("LOCKSET_NAME", name).env("LOCKSET_TOKEN", token);
        let output = command.output().unwrap();
        assert_eq!(code(&output), 125, "{output:?}");
        assert!(stderr(&output).contains(reason), "{}", stderr(&output));
    }
}

#[test]
fn a_password_is_used_and_not_printed() {
    let redis = RedisServer::start_with(&["--requirepass", "s3cret"]);
    let home = Home::new();
    fs::write(home.path("right"), "s3cret\n").unwrap();
    fs::write(home.path("wrong"), "0penSesame\n").unwrap();
    let bare = redis.url();
    let with = |password: &str| bare.replace("redis://", &format!("redis://:{password}@"));
    assert_eq!(code(&check(&home, &with("s3cret"), "x", "1")), 0);
    for (file, expected) in [("right", 0), ("wrong", 125)] {
        let args = ["check", "--store", &bare, "--password-file", file, "x", "1"];
        let output = fence(&home, &args);
        assert_eq!(code(&output), expected, "{}", stderr(&output));
        let mut command = home.lockset(&["fence", "check", "--store", &bare, "x", "1"]);
        let password = home.text(file);
        let by_variable = command.env("LOCKSET_PASSWORD", password.trim()).output().unwrap();
        assert_eq!(code(&by_variable), expected, "{}", stderr(&by_variable));
        for said in [stderr(&output), stderr(&by_variable)] {
            assert!(!said.contains("s3cret") && !said.contains("0penSesame"), "{said}");
        }
    }
    // Wrong in every way that an error could repeat.
    for store in [
        with("0penSesame"),
        with("0pen/Sesame"),
        with("0pen?Sesame"),
        "mysql://me:0penSesame@host".to_owned(),
        "postgres://me:0penSesame@127.0.0.1:1/db".to_owned(),
        "postgres://127.0.0.1:1/db?password=0penSesame".to_owned(),
        "redis:0penSesame@host".to_owned(),
        ":0penSesame@host".to_owned(),
    ] {
        for verbose in [&[][..], &["-vv"]] {
            let args = [&["check", "--store", &store], verbose, &["x", "1"]].concat();
            let output = fence(&home, &args);
            assert_eq!(code(&output), 125, "{store}: {output:?}");
            let said = stderr(&output);
            assert!(!said.contains("Sesame") && !said.contains("0pen"), "{store}: {said}");
        }
    }
}
