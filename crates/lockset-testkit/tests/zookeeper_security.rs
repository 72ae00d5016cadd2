//! What keeps strangers out of a ZooKeeper server: TLS and certificates.
#![allow(clippy::unwrap_used, reason = "tests")]

#[allow(dead_code, reason = "other tests look for secrets, too")]
mod secrets;

use std::time::Duration;

use lockset::{Error, Lockset};
use lockset_testkit::stage::ZooKeeperServers;
use lockset_testkit::steps::{
    assert_error, await_confirmed, await_served, error_chain, is_free, lock, spawn_waiter, within,
};
use rcgen::date_time_ymd;
use secrets::{Authority, assert_files_are_named};

/// Longer than a Java machine takes to start again while others keep the processors busy.
const TTL: Duration = Duration::from_secs(30);
/// A rejection is a reply: it takes no longer than a connection.
const ANSWERED: Duration = Duration::from_secs(10);

/// A server with a certificate of this authority that asks clients for theirs, or not.
fn server(authority: &Authority, signed: &(String, String), clients: bool) -> ZooKeeperServers {
    let (certificate, key) = signed;
    // ZooKeeper reads both from one file, and tells by its name what is in it.
    let store = authority.file("server-store.pem");
    let parts = [certificate, key].map(|file| std::fs::read_to_string(file).unwrap());
    std::fs::write(&store, parts.concat()).unwrap();
    ZooKeeperServers::start_tls(&[
        format!("ssl.keyStore.location={}", store.display()),
        format!("ssl.trustStore.location={}", authority.ca()),
        format!("ssl.clientAuth={}", if clients { "need" } else { "none" }),
    ])
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
    let untrusted = refused(&server.tls_url("p")).await;
    assert_error(&untrusted, &["UnknownIssuer"], false);
    let url = format!("{}?ca={}", server.tls_url("p"), other.ca());
    let other_authority = refused(&url).await;
    assert_error(&other_authority, &["UnknownIssuer", "BadSignature"], false);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_of_the_named_authority_is_used_also_after_a_reconnect() {
    let authority = Authority::new();
    let server = server(&authority, &authority.sign("127.0.0.1", |_| {}), false);
    let url = format!("{}?ca={}", server.tls_url("tls"), authority.ca());
    let (ours, theirs) = (client(&url).await, client(&url).await);
    let guard = lock(&ours, "sealed").await;
    let waiting = spawn_waiter(&theirs, "sealed").await;
    guard.release().await.unwrap();
    let guard = await_served(ANSWERED, waiting).await;
    // Who speaks plainly sees the same lock.
    let plain = client(&server.url("tls")).await;
    assert!(!is_free(&plain, "sealed").await);
    let waiting = spawn_waiter(&ours, "sealed").await;
    server.restart_leader();
    await_confirmed(TTL, &guard).await;
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
        let url = format!("{}?ca={}", server.tls_url("p"), authority.ca());
        assert_error(&refused(&url).await, &words, false);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_certificate_is_sent_if_the_server_requires_one() {
    let (authority, other) = (Authority::new(), Authority::new());
    let server = server(&authority, &authority.sign("127.0.0.1", |_| {}), true);
    let with = |(cert, key): &(String, String)| {
        format!("{}?ca={}&cert={cert}&key={key}", server.tls_url("p"), authority.ca())
    };
    let (ours, strange) = (authority.sign("client", |_| {}), other.sign("client", |_| {}));
    let untrusted = format!("{}?ca={}", server.tls_url("p"), authority.ca());
    assert_error(&refused(&untrusted).await, &["ertificate"], false);
    assert_error(&refused(&with(&strange)).await, &["ertificate"], false);
    assert!(is_free(&client(&with(&ours)).await, "known").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_or_invalid_certificate_files_are_named() {
    let authority = Authority::new();
    let signed = authority.sign("127.0.0.1", |_| {});
    let url = |options: &str| format!("zks://127.0.0.1:1/p{options}");
    assert_files_are_named(ANSWERED, &authority, &signed, url).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_against_plain_fails_without_hanging() {
    let authority = Authority::new();
    let server = server(&authority, &authority.sign("127.0.0.1", |_| {}), false);
    let unsealed = server.tls_url("p").replace("zks://", "zk://");
    let error = refused(&unsealed).await;
    assert!(!error_chain(&error).is_empty());
    // Both kinds of plain port: Netty's, and the usual one of Java.
    let usual = ZooKeeperServers::start(1);
    for hosts in [server.hosts(), usual.hosts()] {
        let error = refused(&format!("zks://{hosts}/p?ca={}", authority.ca())).await;
        assert_error(&error, &["TLS"], true);
    }
    let unsealed = refused(&format!("{}?ca={}", usual.url("p"), authority.ca())).await;
    assert!(
        matches!(unsealed, Error::Invalid { .. }),
        "it is not sealed: {}",
        error_chain(&unsealed)
    );
}
