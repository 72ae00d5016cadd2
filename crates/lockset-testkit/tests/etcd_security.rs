//! What keeps strangers out of an etcd server, and secrets in: TLS, users, roles, names.
#![allow(clippy::unwrap_used, reason = "tests")]

mod secrets;

use std::time::Duration;

use futures_util::StreamExt;
use lockset::engine::etcd::{Etcd, EtcdOptions};
use lockset::{Break, Error, Lockset, State};
use lockset_testkit::stage::EtcdServers;
use lockset_testkit::steps::{
    assert_error, await_served, error_chain, exercise_and_break, is_free, lock, spawn_waiter,
    until, within,
};
use rcgen::date_time_ymd;
use secrets::{Authority, MARK, assert_files_are_named, assert_hidden, assert_hidden_in, traced};

const TTL: Duration = Duration::from_secs(3);
const SOON: Duration = Duration::from_secs(1);
/// A rejection is a reply: it takes no longer than a connection.
const ANSWERED: Duration = Duration::from_secs(10);

/// A server with a certificate of this authority that asks clients for theirs, or not.
fn server(authority: &Authority, signed: &(String, String), clients: bool) -> EtcdServers {
    let (certificate, key) = signed;
    let ca = authority.ca();
    let own = ["--cert-file", certificate, "--key-file", key];
    let asks = ["--client-cert-auth", "--trusted-ca-file", &ca];
    let options = [&own[..], if clients { &asks } else { &[] }].concat();
    // A server must not be asked by its right name to be asked at all.
    let credentials =
        ["--insecure-skip-tls-verify", "--cacert", &ca, "--cert", certificate, "--key", key];
    EtcdServers::start_tls(&options, &credentials)
}

/// The error of a connection that is refused, in good time.
async fn refused(url: &str) -> Error {
    within(ANSWERED, "a refusal", Lockset::connect(url)).await.unwrap_err()
}

async fn client(url: &str) -> Lockset {
    let connected = within(ANSWERED, "a connection", Lockset::builder(url).ttl(TTL).connect());
    connected.await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_of_an_unknown_authority_is_refused() {
    let (ours, other) = (Authority::new(), Authority::new());
    let server = server(&ours, &ours.sign("127.0.0.1", |_| {}), false);
    let untrusted = refused(&server.url("p")).await;
    assert_error(&untrusted, &["UnknownIssuer", "unknown issuer"], false);
    let other_authority = refused(&format!("{}?ca={}", server.url("p"), other.ca())).await;
    assert_error(&other_authority, &["UnknownIssuer", "BadSignature", "unknown issuer"], false);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_of_the_named_authority_is_used_also_after_a_reconnect() {
    let authority = Authority::new();
    let server = server(&authority, &authority.sign("127.0.0.1", |_| {}), false);
    let url = format!("{}?ca={}", server.url("tls"), authority.ca());
    let (ours, theirs) = (client(&url).await, client(&url).await);
    let guard = lock(&ours, "sealed").await;
    let waiting = spawn_waiter(&theirs, "sealed").await;
    server.restart_leader();
    within(ANSWERED, "it is found again", async {
        while guard.confirm().await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
    guard.release().await.unwrap();
    await_served(ANSWERED, waiting).await.release().await.unwrap();
    ours.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_for_another_host_or_another_time_is_refused() {
    let authority = Authority::new();
    let other = authority.sign("other.example", |_| {});
    let expired = authority.sign("127.0.0.1", |params| {
        params.not_before = date_time_ymd(2001, 1, 1);
        params.not_after = date_time_ymd(2002, 1, 1);
    });
    for (signed, words) in
        [(other, ["NotValidForName", "not valid for name"]), (expired, ["Expired", "expired"])]
    {
        let server = server(&authority, &signed, false);
        let error = refused(&format!("{}?ca={}", server.url("p"), authority.ca())).await;
        assert_error(&error, &words, false);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_certificate_is_sent_if_the_server_requires_one() {
    let (authority, other) = (Authority::new(), Authority::new());
    let server = server(&authority, &authority.sign("127.0.0.1", |_| {}), true);
    let with = |(cert, key): &(String, String)| {
        format!("{}?ca={}&cert={cert}&key={key}", server.url("p"), authority.ca())
    };
    let (ours, strange) = (authority.sign("client", |_| {}), other.sign("client", |_| {}));
    let untrusted = refused(&format!("{}?ca={}", server.url("p"), authority.ca())).await;
    assert!(!error_chain(&untrusted).is_empty());
    let stranger = refused(&with(&strange)).await;
    assert!(!error_chain(&stranger).is_empty());
    assert!(is_free(&client(&with(&ours)).await, "known").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_or_invalid_certificate_files_are_named() {
    let authority = Authority::new();
    let signed = authority.sign("127.0.0.1", |_| {});
    let url = |options: &str| format!("etcds://127.0.0.1:1/p{options}");
    assert_files_are_named(ANSWERED, &authority, &signed, url).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_against_plain_fails_without_hanging() {
    let authority = Authority::new();
    let sealed = server(&authority, &authority.sign("127.0.0.1", |_| {}), false);
    let plain = EtcdServers::start(1);
    refused(&format!("etcd://{}/p", sealed.hosts())).await;
    refused(&format!("etcds://{}/p?ca={}", plain.hosts(), authority.ca())).await;
    let unsealed = refused(&format!("{}?ca={}", plain.url("p"), authority.ca())).await;
    assert!(
        matches!(unsealed, Error::Invalid { .. }),
        "it is not sealed: {}",
        error_chain(&unsealed)
    );
}

/// A server on which `worker` may use the locks below `p/`, and no user anything else.
fn with_users(options: &[&str], secret: &str) -> EtcdServers {
    // Else every login costs a tenth of a second, and a busy machine is busy with nothing else.
    let options = [options, &["--bcrypt-cost", "4"]].concat();
    let server = EtcdServers::start_with(1, &options);
    server.ask(&["user", "add", "root:root"]);
    server.ask(&["user", "grant-role", "root", "root"]);
    server.ask(&["user", "add", &format!("worker:{secret}")]);
    server.ask(&["role", "add", "locks"]);
    server.ask(&["role", "grant-permission", "--prefix=true", "locks", "readwrite", "p/"]);
    server.ask(&["user", "grant-role", "worker", "locks"]);
    server.ask(&["auth", "enable"]);
    server.log_in(&["--user", "root:root"]);
    server
}

fn url_of(server: &EtcdServers, login: &str, prefix: &str) -> String {
    format!("etcd://{login}@{}/{prefix}", server.hosts())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_with_rights_below_the_prefix_can_do_everything_there() {
    let server = with_users(&[], "pw");
    let url = url_of(&server, "worker:pw", "p");
    let (ours, theirs) = (client(&url).await, client(&url).await);
    let guard = exercise_and_break(SOON, &ours, &theirs, "mutex").await;
    within(TTL, "it is told", guard.lost()).await;

    let writer = ours.rwlock("rw").unwrap().write().await.unwrap();
    writer.downgrade().await.unwrap();
    let reader = theirs.rwlock("rw").unwrap().try_read().await.unwrap().expect("readers share");
    assert!(tokio::time::timeout(TTL * 2, reader.lost()).await.is_err(), "it was renewed");
    assert_eq!((writer.state(), reader.state()), (State::Held, State::Held));
    ours.force_release("rw", Break::WhenLeaseEnds).await.unwrap();
    ours.semaphore("permits", 2).unwrap().acquire_many(2).await.unwrap().release().await.unwrap();
    ours.latch("latch", 1).unwrap().count_down().await.unwrap();
    theirs.latch("latch", 1).unwrap().wait().await.unwrap();
    ours.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_user_or_missing_right_says_what_to_check() {
    let server = with_users(&[], "pw");
    let untrusted = refused(&server.url("p")).await;
    assert_error(&untrusted, &["user:password@"], false);
    for login in ["worker:wrong", "stranger:pw"] {
        let error = refused(&url_of(&server, login, "p")).await;
        assert_error(&error, &["check user and password"], false);
    }
    let error = match Lockset::connect(&url_of(&server, "worker:pw", "other")).await {
        Err(error) => error,
        Ok(others) => others.mutex("refused").unwrap().try_lock().await.unwrap_err(),
    };
    assert_error(&error, &["permission denied"], false);
    assert_error(&error, &["below the prefix"], false);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_or_forgotten_login_is_repeated() {
    let server = with_users(&["--auth-token-ttl", "2"], "pw");
    let ours = client(&url_of(&server, "worker:pw", "p")).await;
    assert!(is_free(&ours, "before").await);
    // Nothing is asked meanwhile, or it would last longer.
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert!(is_free(&ours, "after").await);
    let guard = lock(&ours, "kept").await;
    let waiting = spawn_waiter(&client(&url_of(&server, "worker:pw", "p")).await, "kept").await;
    // A server does not remember to whom it gave which token.
    server.restart_leader();
    assert!(tokio::time::timeout(TTL * 2, guard.lost()).await.is_err(), "it was renewed");
    guard.confirm().await.unwrap();
    guard.release().await.unwrap();
    await_served(ANSWERED, waiting).await.release().await.unwrap();
}

/// A stream keeps the login with which it began, and a server refuses new watches on it.
#[tokio::test(flavor = "multi_thread")]
async fn a_login_that_expires_during_a_watch_loses_no_waiter() {
    let server = with_users(&["--auth-token-ttl", "2"], "pw");
    let url = url_of(&server, "worker:pw", "p");
    // With leases that are kept alive so seldom that the login expires in between.
    let patient = || async { Lockset::builder(&url).ttl(TTL * 20).connect().await.unwrap() };
    let (ours, theirs) = (patient().await, patient().await);
    for _ in 0..2 {
        let guard = lock(&ours, "watched").await;
        let waiting = spawn_waiter(&theirs, "watched").await;
        guard.release().await.unwrap();
        await_served(ANSWERED, waiting).await.release().await.unwrap();
        // Nothing is asked meanwhile, or the login would last longer.
        tokio::time::sleep(Duration::from_secs(6)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn revoked_rights_lose_the_lock_and_are_reported() {
    let server = with_users(&[], "pw");
    let ours = client(&url_of(&server, "worker:pw", "p")).await;
    let guard = lock(&ours, "revoked").await;
    server.ask(&["user", "revoke-role", "worker", "locks"]);
    within(TTL + SOON, "it cannot be trusted", guard.lost()).await;
    let error = ours.mutex("other").unwrap().try_lock().await.unwrap_err();
    assert_error(&error, &["permission denied"], false);
}

/// All watches of a client share a stream.
#[tokio::test(flavor = "multi_thread")]
async fn a_refused_watch_says_why_and_loses_no_waiter() {
    let server = with_users(&[], "pw");
    server.ask(&["role", "revoke-permission", "--prefix=true", "locks", "p/"]);
    server.ask(&["role", "grant-permission", "--prefix=true", "locks", "readwrite", "p/jobs%2F"]);
    server.ask(&["role", "grant-permission", "--prefix=true", "locks", "readwrite", "p//"]);
    let url = url_of(&server, "worker:pw", "p");
    let (ours, theirs) = (client(&url).await, client(&url).await);
    let guard = lock(&ours, "jobs/1").await;
    let mutex = theirs.mutex("jobs/1").unwrap();
    let waiting = tokio::spawn(async move { mutex.lock().await });
    until("a client waits", || server.keys("p/jobs%2F1/").len() == 2);
    let mut refused = theirs.watch("").unwrap();
    let why = within(ANSWERED, "a refusal", refused.next()).await.unwrap().unwrap_err();
    assert_error(&why, &["permission denied"], false);
    assert!(!waiting.is_finished());
    guard.release().await.unwrap();
    await_served(ANSWERED, waiting).await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_is_used_and_never_shown() {
    let log = traced();
    let server = with_users(&[], &format!("{MARK}@/?#%"));
    let escaped = format!("{MARK}%40%2F%3F%23%25");
    let url = url_of(&server, &format!("worker:{escaped}"), "p");
    let ours = client(&url).await;
    let guard = lock(&ours, "seen").await;
    let options = EtcdOptions { url: url.parse().unwrap(), ..EtcdOptions::default() };
    let engine = Etcd::connect(options.clone()).await.unwrap();
    let builder = Lockset::builder(&url);
    // Nothing of a login is shown: neither the password nor the token, which is as good.
    assert_eq!(format!("{engine:?}"), format!("Etcd(etcd://{}/p)", server.hosts()));
    assert_hidden(&format!("{ours:?} {guard:?} {builder:?} {options:?} {engine:?}"));
    assert_hidden(&format!("{:?}", ours.inspect("seen").await.unwrap()));
    for login in [format!("worker:{MARK}"), format!("nobody:{escaped}")] {
        let error = refused(&url_of(&server, &login, "p")).await;
        assert_error(&error, &["check user and password"], false);
        assert_hidden_in(&error);
    }
    // Nor when it is changed under a client that lives.
    let change = ["--interactive=false", "passwd", "worker"];
    let mut etcdctl = server.etcdctl(&server.hosts());
    etcdctl.arg("user").args(change).stdin(std::process::Stdio::piped());
    let mut child = etcdctl.stdout(std::process::Stdio::null()).spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"another\n").unwrap();
    assert!(child.wait().unwrap().success());
    server.restart_leader();
    let error = ours.mutex("other").unwrap().lock_within(SOON).await.unwrap_err();
    assert_hidden_in(&error);
    guard.lost().await;
    assert_hidden(&format!("{guard:?}"));
    let traced = log.text();
    assert!(traced.contains("lockset"), "something was traced: {traced}");
    assert_hidden(&traced);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_url_is_not_repeated_in_the_error() {
    let log = traced();
    let secrets = [format!("user:{MARK}@"), format!(":{MARK}@"), format!("{MARK}@")];
    let wrong = ["", "host:port", "127.0.0.1:99999", "[::1", "127.0.0.1:1/x//y/", "h?wrong=option"];
    for secret in &secrets {
        for scheme in ["etcd://", "etcds://", "etdc://"] {
            for rest in wrong {
                let url = format!("{scheme}{secret}{rest}");
                assert_hidden_in(&refused(&url).await);
                assert_hidden(&format!("{:?}", Lockset::builder(&url)));
            }
        }
    }
    assert_hidden(&log.text());
}
