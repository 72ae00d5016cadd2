//! What keeps strangers out of a Redis server, and secrets in: TLS, passwords, names.
#![allow(clippy::unwrap_used, reason = "tests")]

mod secrets;

use std::time::Duration;

use lockset::engine::redis::{Redis, RedisOptions};
use lockset::{Break, Builder, Error, Lockset};
use lockset_testkit::stage::RedisServer;
use lockset_testkit::steps::{
    assert_error, await_served, error_chain, is_free, lock, spawn_waiter, until, within,
};
use rcgen::date_time_ymd;
use secrets::{Authority, MARK, assert_files_are_named, assert_hidden, assert_hidden_in, traced};

const TTL: Duration = Duration::from_secs(3);
const SOON: Duration = Duration::from_secs(1);
/// A rejection is a reply: it takes no longer than a connection.
const ANSWERED: Duration = Duration::from_secs(8);

/// A server with a certificate of this authority that asks clients for theirs, or not.
fn server(authority: &Authority, signed: (String, String), clients: &str) -> RedisServer {
    RedisServer::start_tls(&[
        "--tls-cert-file",
        &signed.0,
        "--tls-key-file",
        &signed.1,
        "--tls-ca-cert-file",
        &authority.ca(),
        "--tls-auth-clients",
        clients,
    ])
}

fn tls_url(server: &RedisServer, options: &str) -> String {
    format!("rediss://127.0.0.1:{}{options}", server.port())
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
    let server = server(&ours, ours.sign("127.0.0.1", |_| {}), "no");
    let untrusted = refused(&tls_url(&server, "")).await;
    assert_error(&untrusted, &["UnknownIssuer", "unknown issuer"], false);
    let other_authority = refused(&tls_url(&server, &format!("?ca={}", other.ca()))).await;
    assert_error(&other_authority, &["UnknownIssuer", "BadSignature", "unknown issuer"], false);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_of_the_named_authority_is_used_also_after_a_reconnect() {
    let authority = Authority::new();
    let signed = authority.sign("127.0.0.1", |_| {});
    let server = server(&authority, signed, "no");
    let url = tls_url(&server, &format!("?ca={}&prefix=tls:", authority.ca()));
    let (ours, theirs) = (client(&url).await, client(&url).await);
    let guard = lock(&ours, "sealed").await;
    let waiting = spawn_waiter(&theirs, "sealed").await;
    guard.release().await.unwrap();
    let guard = await_served(SOON, waiting).await;
    server.restart();
    within(TTL, "the loss is told", guard.lost()).await;
    lock(&theirs, "sealed").await.release().await.unwrap();
    ours.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_for_another_host_is_refused() {
    let authority = Authority::new();
    let server = server(&authority, authority.sign("other.example", |_| {}), "no");
    let error = refused(&tls_url(&server, &format!("?ca={}", authority.ca()))).await;
    assert_error(&error, &["NotValidForName", "not valid for name"], false);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_certificate_is_refused() {
    let authority = Authority::new();
    let expired = authority.sign("127.0.0.1", |params| {
        params.not_before = date_time_ymd(2001, 1, 1);
        params.not_after = date_time_ymd(2002, 1, 1);
    });
    let server = server(&authority, expired, "no");
    let error = refused(&tls_url(&server, &format!("?ca={}", authority.ca()))).await;
    assert_error(&error, &["Expired", "expired"], false);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_certificate_is_sent_if_the_server_requires_one() {
    let (authority, other) = (Authority::new(), Authority::new());
    let server = server(&authority, authority.sign("127.0.0.1", |_| {}), "yes");
    let with = |(cert, key): &(String, String)| {
        tls_url(&server, &format!("?ca={}&cert={cert}&key={key}", authority.ca()))
    };
    let (ours, strange) = (authority.sign("client", |_| {}), other.sign("client", |_| {}));
    let untrusted = refused(&tls_url(&server, &format!("?ca={}", authority.ca()))).await;
    assert_error(&untrusted, &["ertificate"], false);
    let stranger = refused(&with(&strange)).await;
    assert_error(&stranger, &["ertificate", "UnknownCA", "DecryptError"], false);
    assert!(is_free(&client(&with(&ours)).await, "known").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_or_invalid_certificate_files_are_named() {
    let authority = Authority::new();
    let signed = authority.sign("127.0.0.1", |_| {});
    let server = server(&authority, signed.clone(), "no");
    let url = |options: &str| tls_url(&server, options);
    assert_files_are_named(ANSWERED, &authority, &signed, url).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_against_plain_fails_without_hanging() {
    let authority = Authority::new();
    let sealed = server(&authority, authority.sign("127.0.0.1", |_| {}), "no");
    let plain = RedisServer::start();
    refused(&format!("redis://127.0.0.1:{}", sealed.port())).await;
    refused(&tls_url(&plain, "")).await;
    let unsealed = refused(&format!("{}?ca={}", plain.url(), authority.ca())).await;
    assert!(
        matches!(unsealed, Error::Invalid { .. }),
        "it is not sealed: {}",
        error_chain(&unsealed)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_is_used_and_never_shown() {
    let log = traced();
    let secret = format!("{MARK}@/?#%");
    let server = RedisServer::start();
    let rules = [&format!(">{secret}"), "~*", "&*", "+@all"];
    assert_eq!(server.ask(&[&["ACL", "SETUSER", "worker", "on"], &rules[..]].concat()), "OK");
    server.ask(&["CONFIG", "SET", "requirepass", MARK]);
    let address = format!("127.0.0.1:{}", server.port());
    let escaped = format!("{MARK}%40%2F%3F%23%25");
    let url = format!("redis://worker:{escaped}@{address}");

    let ours = client(&url).await;
    let guard = lock(&ours, "seen").await;
    let options = RedisOptions { url: url.parse().unwrap(), ..RedisOptions::default() };
    let engine = Redis::connect(options.clone()).await.unwrap();
    let builder = Lockset::builder(&url);
    assert_hidden(&format!("{ours:?} {guard:?} {builder:?} {options:?} {engine:?}"));
    assert_hidden(&format!("{:?}", ours.inspect("seen").await.unwrap()));

    for user in [format!("worker:{MARK}"), format!("nobody:{escaped}"), format!(":{MARK}-wrong")] {
        let error = refused(&format!("redis://{user}@{address}")).await;
        assert_error(&error, &["check user, password and ACL rules"], false);
        assert_hidden_in(&error);
    }

    // Nor when it is changed under a client that lives.
    server.ask(&["-a", MARK, "ACL", "SETUSER", "worker", "resetpass", ">another"]);
    server.ask(&["-a", MARK, "CLIENT", "KILL", "USER", "worker"]);
    let error = ours.mutex("other").unwrap().lock_within(SOON).await.unwrap_err();
    assert_hidden_in(&error);
    guard.lost().await;
    assert_hidden(&format!("{guard:?}"));
    let traced = log.text();
    assert!(traced.contains("lockset"), "something was traced: {traced}");
    assert_hidden(&traced);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_address_login_and_tls_of_a_client_are_used() {
    let server = RedisServer::start_with(&["--requirepass", MARK]);
    let address = format!("127.0.0.1:{}", server.port());
    let client = redis::Client::open(format!("redis://:{MARK}@{address}/2")).unwrap();
    let builder = Builder::redis_client(&client).option("prefix", "shop:").option("ttl", "5s");
    assert_hidden(&format!("{builder:?}"));
    let ours = builder.connect().await.unwrap();
    assert_eq!(ours.home(), format!("redis://{address}/2?prefix=shop:"));
    assert_eq!(lock(&ours, "lent").await.ttl(), Duration::from_secs(5));

    let authority = Authority::new();
    let signed = authority.sign("127.0.0.1", |_| {});
    let sealed = self::server(&authority, signed.clone(), "yes");
    let read = |path: &str| std::fs::read(path).unwrap();
    let tls = redis::TlsCertificates {
        client_tls: Some(redis::ClientTlsConfig {
            client_cert: read(&signed.0),
            client_key: read(&signed.1),
        }),
        root_cert: Some(read(&authority.ca())),
    };
    let url = format!("rediss://127.0.0.1:{}", sealed.port());
    let client = redis::Client::build_with_tls(url, tls).unwrap();
    let ours = Builder::redis_client(&client).connect().await.unwrap();
    lock(&ours, "sealed").await.release().await.unwrap();
}

/// Also of commands that are sent together with others.
#[tokio::test(flavor = "multi_thread")]
async fn a_missing_right_is_reported() {
    let server = RedisServer::start();
    let url = format!("redis://worker:{MARK}@127.0.0.1:{}", server.port());
    for missing in ["-subscribe", "-role", "-time", "-evalsha", "-set"] {
        let rules = ["reset", "on", &format!(">{MARK}"), "~*", "&*", "+@all", missing];
        assert_eq!(server.ask(&[&["ACL", "SETUSER", "worker"], &rules[..]].concat()), "OK");
        let error = match within(ANSWERED, "an answer", Lockset::connect(&url)).await {
            Err(error) => error,
            Ok(locks) => locks.mutex("refused").unwrap().try_lock().await.unwrap_err(),
        };
        assert_error(&error, &["check user, password and ACL rules"], false);
        assert_hidden_in(&error);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_url_is_not_repeated_in_the_error() {
    let log = traced();
    let secrets = [format!("user:{MARK}@"), format!(":{MARK}@"), format!("{MARK}@")];
    let schemes =
        ["redis://", "rediss://", "redis+sentinel://", "redis+cluster://", "redsi://", "//", ""];
    let wrong = ["", "host:port", "127.0.0.1:99999", "[::1", "127.0.0.1:1/x/y/z", "h?wrong=option"];
    for secret in &secrets {
        for scheme in schemes {
            for rest in wrong {
                let url = format!("{scheme}{secret}{rest}");
                assert_hidden_in(&refused(&url).await);
                assert_hidden(&format!("{:?}", Lockset::builder(&url)));
            }
        }
    }
    let options = refused(&format!("redis://127.0.0.1:1?{MARK}={MARK}")).await;
    assert!(matches!(options, Error::Invalid { .. }), "{options}");
    assert_hidden(&log.text());
}

/// Names that look like something else: patterns, keys beside a lock, hash tags, channels.
const ODD_NAMES: [&str; 30] = [
    "x",
    "x:fence",
    "x:queue",
    "x:waiters",
    "x:holders",
    "x:held",
    "x:cell",
    "x:tombstone:00000000000000000000000000000000",
    "{x}",
    "{x}/y",
    "{x}/y:z",
    "{a:x}",
    "inbox",
    "inbox:0123456789abcdef",
    "b:x",
    "a:x",
    "*",
    "**",
    "x*",
    "?",
    "[x]",
    "[^y]",
    "\\x",
    "\\*",
    "{",
    "}",
    "{}",
    "}{",
    "a'b\"c",
    "grün |;,=",
];

async fn client_of(server: &RedisServer, prefix: &str) -> Lockset {
    client(&format!("{}?prefix={prefix}", server.url())).await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_name_escapes_its_prefix_or_collides_with_another() {
    let server = RedisServer::start();
    let (ours, theirs) = (client_of(&server, "a:").await, client_of(&server, "b:").await);
    let queueing = client_of(&server, "a:").await;
    let mut guards = Vec::new();
    let mut waiting = Vec::new();
    for name in ODD_NAMES {
        let taken = ours.mutex(name).unwrap().try_lock().await.unwrap();
        guards.push(taken.unwrap_or_else(|| panic!("{name} is another's")));
        waiting.push(spawn_waiter(&queueing, name).await);
    }
    let keys = server.ask(&["KEYS", "*"]);
    for key in keys.lines() {
        let beside = ["{a:", "{}a:"].iter().any(|begin| key.starts_with(begin))
            || (key.starts_with('{') && key.contains("}:a:"));
        assert!(key.starts_with("a:") || beside, "{key} left its prefix");
    }
    for channel in server.ask(&["PUBSUB", "CHANNELS"]).lines() {
        assert!(["a:inbox:", "b:inbox:"].iter().any(|own| channel.starts_with(own)), "{channel}");
    }
    assert_eq!(names(&theirs, "").await, Vec::<String>::new());
    let mut listed = names(&ours, "").await;
    let mut expected = ODD_NAMES.map(str::to_owned).to_vec();
    listed.sort();
    expected.sort();
    assert_eq!(listed, expected);
    for prefix in ["*", "[", "?", "\\", "{", "x"] {
        let expected = ODD_NAMES.iter().filter(|name| name.starts_with(prefix)).count();
        assert_eq!(names(&ours, prefix).await.len(), expected, "{prefix}");
    }
    for (guard, waiting) in guards.into_iter().zip(waiting) {
        let name = guard.name().clone();
        guard.release().await.unwrap();
        let next = await_served(SOON, waiting).await;
        assert_eq!(next.name(), &name);
        next.release().await.unwrap();
    }
    assert_eq!(names(&ours, "").await, Vec::<String>::new());
}

/// Latches are found wherever their names put them.
#[tokio::test(flavor = "multi_thread")]
async fn latches_with_odd_names_are_listed() {
    let server = RedisServer::start();
    let ours = client_of(&server, "a:").await;
    let odd = ["{", "}", "{}", "{l}", "l", "l}", "}{"];
    for name in odd {
        ours.latch(name, 2).unwrap().count_down().await.unwrap();
    }
    let mut listed = names(&ours, "").await;
    listed.sort();
    let mut expected = odd.map(str::to_owned).to_vec();
    expected.sort();
    assert_eq!(listed, expected);
}

async fn names(locks: &Lockset, prefix: &str) -> Vec<String> {
    let listed = locks.list(prefix).await.unwrap();
    listed.into_iter().map(|state| state.name.as_str().to_owned()).collect()
}

/// A name with a hash tag keeps it, so the keys beside its lock begin like a name. Two such names
/// are two locks, or the second is refused as a name.
#[tokio::test(flavor = "multi_thread")]
async fn a_name_with_a_hash_tag_does_not_collide_with_keys_of_another() {
    let server = RedisServer::start();
    let (ours, theirs) = (client_of(&server, "a:").await, client_of(&server, "a:").await);
    let ends = ["fence", "queue", "waiters", "holders", "held", "cell"];
    for (number, end) in ends.iter().enumerate() {
        let plain = format!("{{tag}}/{number}");
        let beside = format!("{plain}:{end}");
        let guard = lock(&ours, &plain).await;
        let waiting = spawn_waiter(&theirs, &plain).await;
        match ours.mutex(&beside) {
            Err(error) => assert!(matches!(error, Error::Invalid { .. }), "{error}"),
            Ok(mutex) => match mutex.try_lock().await {
                Err(error) => assert!(matches!(error, Error::Invalid { .. }), "{beside}: {error}"),
                Ok(taken) => {
                    taken.unwrap_or_else(|| panic!("{beside} is free")).release().await.unwrap();
                }
            },
        }
        guard.confirm().await.unwrap();
        guard.release().await.unwrap();
        await_served(SOON, waiting).await.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn force_release_does_not_interpret_patterns() {
    let server = RedisServer::start();
    let ours = client_of(&server, "a:").await;
    let (pattern, other) = (lock(&ours, "*").await, lock(&ours, "spared").await);
    assert_eq!(ours.force_release("*", Break::Now).await.unwrap().len(), 1);
    within(SOON, "it is told", pattern.lost()).await;
    other.confirm().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn names_with_line_breaks_are_refused() {
    let server = RedisServer::start();
    let ours = client_of(&server, "a:").await;
    for name in ["a\r\nFLUSHALL", "a\nb", "a\0b", "a\tb", "", " a", "../a", "a/../b", "a//b"] {
        assert!(matches!(ours.mutex(name), Err(Error::Invalid { .. })), "{name:?}");
    }
    until("nothing was sent", || server.ask(&["DBSIZE"]) == "0");
}
