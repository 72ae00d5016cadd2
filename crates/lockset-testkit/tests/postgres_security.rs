//! Passwords and TLS of the PostgreSQL engine, on real servers.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

#[allow(dead_code, reason = "the tests of other engines need more of it")]
mod secrets;

use lockset::Lockset;
use lockset_testkit::stage::PostgresServer;
use lockset_testkit::steps::until;

use self::secrets::{Authority, MARK};

async fn refusal(url: &str) -> String {
    match Lockset::connect(url).await {
        Ok(_) => panic!("it is accepted"),
        Err(error) => error.to_string(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_is_checked_as_sslmode_says() {
    let authority = Authority::new();
    let (here, key) = authority.sign("127.0.0.1", |_| {});
    let (elsewhere, other_key) = authority.sign("db.example", |_| {});
    let right = PostgresServer::start_with_tls(&here, &key);
    let wrong = PostgresServer::start_with_tls(&elsewhere, &other_key);
    let ca = authority.ca();
    for (server, options) in [
        (&right, format!("sslmode=verify-full&ca={ca}")),
        (&wrong, format!("sslmode=verify-ca&ca={ca}")),
        (&wrong, format!("sslmode=require&ca={ca}")),
        (&wrong, "sslmode=require".to_owned()),
        (&wrong, "sslmode=prefer".to_owned()),
    ] {
        let locks = Lockset::connect(&format!("{}?{options}", server.url())).await;
        let locks = locks.unwrap_or_else(|error| panic!("{options}: {error}"));
        locks.mutex("it").unwrap().lock().await.unwrap().release().await.unwrap();
        let encrypted = "SELECT bool_and(ssl) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid)
                         WHERE application_name = 'lockset'";
        assert_eq!(server.ask(encrypted), "t", "{options}");
        locks.close().await.unwrap();
        let left = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'lockset'";
        until("its connections are closed", || server.ask(left) == "0");
    }
    // For another host, of an authority that is not trusted.
    for (server, options) in [
        (&wrong, format!("sslmode=verify-full&ca={ca}")),
        (&right, "sslmode=verify-full".to_owned()),
        (&right, "sslmode=verify-ca".to_owned()),
    ] {
        let refused = refusal(&format!("{}?{options}", server.url())).await;
        assert!(refused.contains("not trusted"), "{options}: {refused}");
    }
    let plain = PostgresServer::start_with(&["fsync=off"]);
    let refused = refusal(&format!("{}?sslmode=require", plain.url())).await;
    assert!(refused.contains("does not offer TLS"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_is_used_and_never_shown() {
    let server = PostgresServer::start_with(&["fsync=off"]);
    server.ask(&format!("CREATE ROLE worker LOGIN SUPERUSER PASSWORD '{MARK}-right'"));
    server.set_access(
        "host all postgres 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n",
    );
    let url = |password: &str| server.url_of(&format!("worker:{MARK}-{password}"));
    let locks = Lockset::connect(&url("right")).await.unwrap();
    locks.mutex("it").unwrap().lock().await.unwrap().release().await.unwrap();
    for shown in [locks.home().to_owned(), format!("{locks:?}")] {
        assert!(!shown.contains(MARK), "{shown}");
    }
    let refused = refusal(&url("wrong")).await;
    assert!(refused.contains("refuses this user") && !refused.contains(MARK), "{refused}");
    let refused = refusal(&server.url_of("worker")).await;
    assert!(refused.contains("password"), "{refused}");
}
