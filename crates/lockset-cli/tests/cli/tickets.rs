//! Locks that outlive the command that took them.

use lockset_testkit::stage::{DURABLE, EtcdServers, RedisServer, RedlockNodes};

use crate::common::{Home, code, stderr, stdout};

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

/// Whatever became of the words about it, the lock is held by its ticket.
#[test]
fn a_ticket_that_is_written_is_kept_although_nothing_can_be_said_about_it() {
    let home = Home::new();
    let acquire = "lockset acquire x --ttl 1h --ticket";
    let output = home.shell(&format!("{acquire} t >/dev/full")).output().unwrap();
    assert_eq!((code(&output), home.holders("x")), (125, 1), "{output:?}");
    assert_eq!(code(&home.lockset(&["release", "--ticket", "t"]).output().unwrap()), 0);
    // A ticket that no reader got is of no use, nor is its lock.
    let no_reader = format!("({acquire} -; echo $? >code) | true; cat code");
    let output = home.shell(&no_reader).output().unwrap();
    // Or the ticket was written before its reader went away.
    let became = (stdout(&output), home.holders("x"));
    assert!([("125\n".into(), 0), ("0\n".into(), 1)].contains(&became), "{became:?}");
}

#[test]
fn a_token_can_be_printed_alone() {
    let home = Home::new();
    let acquire = ["acquire", "x", "--ttl", "30s", "--ticket", "t", "--print", "token"];
    let output = home.lockset(&acquire).output().unwrap();
    assert_eq!(code(&output), 0, "{output:?}");
    let token = &home.state("x")["holders"][0]["token"];
    assert_eq!(stdout(&output), format!("{}\n", token.as_str().unwrap()));
    assert_eq!(code(&home.lockset(&["release", "--ticket", "t"]).output().unwrap()), 0);
    // Two things cannot both be all of stdout.
    for (ticket, more) in [("-", &[][..]), ("u", &["--json"])] {
        let args = ["acquire", "x", "--ttl", "30s", "--ticket", ticket, "--print", "token"];
        let output = home.lockset(&[&args, more].concat()).output().unwrap();
        assert_eq!((code(&output), stdout(&output)), (125, String::new()), "{output:?}");
        assert_eq!(home.holders("x"), 0);
    }
}

/// Takes a lock by this URL, and uses its ticket without any.
fn renew_and_release(url: &str, name: &str) {
    let home = Home::new();
    let acquire = ["-u", url, "acquire", "-w", "20s", "--ttl", "30s", "--ticket", "t"];
    let acquire = [&acquire[..], &["--print", "token", name]].concat();
    let acquired = home.lockset(&acquire).output().unwrap();
    assert_eq!(code(&acquired), 0, "{url}: {acquired:?}");
    let use_ticket = |verb| {
        let mut command = home.lockset(&[verb, "--ticket", "t", "--json"]);
        let output = command.env_remove("LOCKSET_URL").output().unwrap();
        assert_eq!(code(&output), 0, "{url}: {output:?}");
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()
    };
    let renewed = use_ticket("renew");
    assert_eq!(format!("{}\n", renewed["token"].as_str().unwrap()), stdout(&acquired), "{url}");
    use_ticket("release");
    let shown = home.lockset(&["-u", url, "show", name]).output().unwrap();
    assert_eq!(code(&shown), 1, "{url}: {shown:?}");
}

#[test]
fn a_ticket_remembers_what_its_home_depends_on() {
    let redis = RedisServer::start();
    let options = "prefix=shop:&token_base=1000000000000000";
    renew_and_release(&format!("{}/3?{options}", redis.url()), "a/b");
    let quorum = RedlockNodes::start(3, DURABLE);
    renew_and_release(&format!("{}/2?prefix=shop:&max_ttl=40s", quorum.url()), "a/b");
    let etcd = EtcdServers::start(1);
    renew_and_release(&etcd.url("shop"), "a/b%c");
    renew_and_release(&format!("{}?names=raw", etcd.url("/a%3Fb%25%40")), "a/b%c");
    let zookeeper = crate::zookeeper::home();
    renew_and_release(&format!("{}?names=raw", zookeeper.url()), "a/b");
}

#[test]
fn a_ticket_whose_home_needs_a_password_is_refused_and_kept() {
    let server = RedisServer::start_with(&["--requirepass", "s3cret"]);
    let home = Home::new();
    let url = server.url().replace("//", "//:s3cret@");
    let acquire = ["-u", &url, "acquire", "x", "--ttl", "30s", "--ticket", "t"];
    assert_eq!(code(&home.lockset(&acquire).output().unwrap()), 0);
    assert!(!home.text("t").contains("s3cret"));
    let release = |password: &str| {
        let mut command = home.lockset(&["release", "--ticket", "t"]);
        command.env_remove("LOCKSET_URL").env("LOCKSET_PASSWORD", password);
        command.output().unwrap()
    };
    let refused = release("");
    assert_eq!(code(&refused), 125, "{refused:?}");
    let said = stderr(&refused);
    assert!(said.contains("NOAUTH") && said.contains("LOCKSET_URL"), "{said}");
    assert!(said.contains(&server.url()), "{said}");
    assert!(home.path("t").exists());
    assert_eq!(code(&release("s3cret")), 0);
}

#[test]
fn a_ticket_whose_home_is_no_url_needs_one() {
    let home = Home::new();
    let acquire = ["acquire", "x", "--ttl", "30s", "--ticket", "t"];
    assert_eq!(code(&home.lockset(&acquire).output().unwrap()), 0);
    let ticket: serde_json::Value = serde_json::from_str(&home.text("t")).unwrap();
    for elsewhere in ["redis+sentinel:mine/0?prefix=lockset:", "memory:shop"] {
        let mut other = ticket.clone();
        other["home"] = elsewhere.into();
        std::fs::write(home.path("other"), other.to_string()).unwrap();
        let mut command = home.lockset(&["release", "--ticket", "other"]);
        let output = command.env_remove("LOCKSET_URL").output().unwrap();
        let said = stderr(&output);
        assert_eq!(code(&output), 125, "{output:?}");
        assert!(said.contains(elsewhere) && said.contains("LOCKSET_URL"), "{said}");
        assert!(home.path("other").exists());
    }
}
