//! Users, passwords and TLS where servers name each other: Sentinel, Cluster and quorums of Redis.
#![allow(clippy::unwrap_used, reason = "tests")]

#[allow(dead_code, reason = "other tests use the rest")]
mod secrets;

use std::time::Duration;

use lockset::{Error, Lockset};
use lockset_testkit::stage::{
    Access, DURABLE, RedisCluster, RedisSentinel, RedisServer, RedlockNodes, Tls,
};
use lockset_testkit::steps::{
    self, assert_error, await_confirmed, await_served, error_chain, lock, spawn_waiter, until,
    within,
};
use secrets::{Authority, MARK, assert_hidden_in};

/// Longer than a failover takes.
const TTL: Duration = Duration::from_secs(10);
const SOON: Duration = Duration::from_secs(2);
/// A rejection is a reply: it takes no longer than a connection.
const ANSWERED: Duration = Duration::from_secs(8);
/// What the documented rules are for.
const USER: &str = "lockset";

/// Every login needs the password of an administrator, which clients do not have.
fn guarded() -> Access {
    Access { password: Some(format!("{MARK}-administrator")), tls: None }
}

/// Connections are accepted by TLS only; the certificate is for this host.
fn sealed(authority: &Authority, host: &str) -> Access {
    let (cert, key) = authority.sign(host, |_| {});
    Access { password: None, tls: Some(Tls { ca: authority.ca(), cert, key }) }
}

/// With all that means something in a URL.
const ODD: &str = ",@/?#%&=";
const ODD_ESCAPED: &str = "%2C%40%2F%3F%23%25%26%3D";

/// The user of the documented rules, as a URL has it.
fn login() -> String {
    format!("{USER}:{MARK}{ODD_ESCAPED}")
}

/// The user of the documented rules, with more of them.
fn add_user(server: &RedisServer, more: &[&str]) {
    server.add_documented_user(&format!("{MARK}{ODD}"), more);
}

/// The URL with this user and password, and more options.
fn as_user(url: &str, login: &str, options: &str) -> String {
    format!("{}{options}", url.replacen("://", &format!("://{login}@"), 1))
}

/// The error of a connection that is refused, in good time and without a secret.
async fn refused(url: &str) -> Error {
    let error = within(ANSWERED, "a refusal", Lockset::connect(url)).await.unwrap_err();
    assert_hidden_in(&error);
    error
}

/// Takes a lock, hands it over and gives it back, on several names: in a cluster they lie on
/// several nodes, which are named by a node and not by us.
async fn lock_and_hand_over(url: &str) {
    let connect = || within(ANSWERED, "a connection", steps::client(url, TTL));
    let (ours, theirs) = (connect().await, connect().await);
    for name in ["a", "b", "c", "d", "e", "f"] {
        let guard = lock(&ours, name).await;
        let waiting = spawn_waiter(&theirs, name).await;
        let token = guard.token();
        guard.release().await.unwrap();
        let next = await_served(SOON, waiting).await;
        assert!(next.token() > token);
        next.release().await.unwrap();
        assert!(steps::is_free(&ours, name).await);
    }
    ours.close().await.unwrap();
    theirs.close().await.unwrap();
}

const WRONG_USER: &str = "check user, password and ACL rules";

struct GuardedSentinel {
    servers: RedisSentinel,
    sentinel_login: String,
}

impl GuardedSentinel {
    fn start() -> Self {
        let to_sentinels = Access { password: Some(format!("{MARK}-sentinels")), tls: None };
        let servers = RedisSentinel::start_with_access(&guarded(), &to_sentinels, &[]);
        servers.servers().iter().for_each(|server| add_user(server, &[]));
        let sentinel_login = format!("watcher:{MARK}{ODD_ESCAPED}");
        for sentinel in servers.sentinels() {
            let rules = ["on", &format!(">{MARK}{ODD}"), "-@all", "+sentinel|master"];
            let more = ["+sentinel|get-master-addr-by-name", "+client|setinfo", "+hello"];
            let rules = [&["ACL", "SETUSER", "watcher"], &rules[..], &more].concat();
            // Redis 6 and 7.0 know no `CLIENT SETINFO`.
            let known: Vec<&str> =
                rules.iter().copied().filter(|rule| *rule != "+client|setinfo").collect();
            let set = sentinel.ask(&rules) == "OK" || sentinel.ask(&known) == "OK";
            assert!(set, "the sentinel takes the rules");
        }
        Self { servers, sentinel_login }
    }

    fn url(&self) -> String {
        let options = format!("?sentinel_login={}", self.sentinel_login);
        as_user(&self.servers.url(), &login(), &options)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sentinels_and_their_servers_have_separate_logins() {
    let at = GuardedSentinel::start();
    lock_and_hand_over(&at.url()).await;
    // A password alone is that of the user `default`, there as here.
    let administrator = format!(":{}", guarded().password.unwrap());
    let options = format!("?sentinel_login=:{MARK}-sentinels");
    lock_and_hand_over(&as_user(&at.servers.url(), &administrator, &options)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_login_at_a_sentinel_or_its_server_is_reported() {
    let at = GuardedSentinel::start();
    let (url, right) = (at.servers.url(), login());
    let right_sentinel = format!("?sentinel_login={}", at.sentinel_login);
    let wrong_sentinel = format!("?sentinel_login=watcher:{MARK}-wrong");
    // None, a wrong one, and that of the servers.
    for options in ["", &wrong_sentinel, &format!("?sentinel_login={right}")] {
        let error = refused(&as_user(&url, &right, options)).await;
        assert_error(&error, &[WRONG_USER], false);
        assert_error(&error, &["no sentinel knows"], false);
    }
    for wrong in [format!("{USER}:{MARK}-wrong"), login().replace(USER, "nobody")] {
        let error = refused(&as_user(&url, &wrong, &right_sentinel)).await;
        assert_error(&error, &[WRONG_USER], false);
        assert!(!error_chain(&error).contains("sentinel"), "it is the server that refuses");
    }
    let without_user = refused(&format!("{url}{right_sentinel}")).await;
    assert_error(&without_user, &[WRONG_USER], false);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failover_among_servers_with_logins_is_followed() {
    let at = GuardedSentinel::start();
    let (ours, theirs) = (steps::client(&at.url(), TTL).await, steps::client(&at.url(), TTL).await);
    let guard = lock(&ours, "kept").await;
    let waiting = spawn_waiter(&theirs, "kept").await;
    let old = at.servers.kill_master();
    await_confirmed(ANSWERED, &guard).await;
    let new = at.servers.master();
    assert_ne!(new, old);
    let token = guard.token();
    let holder = at.servers.servers()[new].ask(&["GET", "lockset:kept"]);
    assert!(holder.starts_with(&guard.claim_id().to_string()), "the new master knows: {holder}");
    guard.release().await.unwrap();
    // It hears of it with its next sign of life at the latest.
    let next = await_served(SOON * 2, waiting).await;
    assert!(next.token() > token);
    next.release().await.unwrap();
    lock_and_hand_over(&at.url()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_password_is_used_at_every_cluster_node() {
    let cluster = RedisCluster::start_with_access(&guarded(), 0, &[]);
    cluster.nodes().iter().for_each(|node| add_user(node, &[]));
    lock_and_hand_over(&as_user(&cluster.url(), &login(), "")).await;
    let administrator = format!(":{}", guarded().password.unwrap());
    lock_and_hand_over(&as_user(&cluster.url(), &administrator, "")).await;
    for wrong in [format!("{USER}:{MARK}-wrong"), format!(":{MARK}")] {
        let error = refused(&as_user(&cluster.url(), &wrong, "")).await;
        assert_error(&error, &[WRONG_USER], false);
    }
    assert_error(&refused(&cluster.url()).await, &[WRONG_USER], false);
}

/// One node of a cluster has forgotten the user: its names are refused, the others' are not.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_rejects_the_user_affects_only_its_own_names() {
    let cluster = RedisCluster::start_with_access(&guarded(), 0, &[]);
    cluster.nodes()[..2].iter().for_each(|node| add_user(node, &[]));
    let hosts: Vec<String> =
        cluster.nodes()[..2].iter().map(|node| format!("127.0.0.1:{}", node.port())).collect();
    let locks =
        steps::client(&format!("redis+cluster://{}@{}", login(), hosts.join(",")), TTL).await;
    let (known, unknown) = (cluster.name_at(1), cluster.name_at(2));
    lock(&locks, &known).await.release().await.unwrap();
    let mutex = locks.mutex(&unknown).unwrap();
    let error = within(ANSWERED, "a refusal", mutex.try_lock()).await.unwrap_err();
    assert_error(&error, &[WRONG_USER], false);
    assert_hidden_in(&error);
    lock(&locks, &known).await.release().await.unwrap();
}

/// The nodes of a quorum, and all of them as `login@host,…`.
fn quorum(access: &Access) -> RedlockNodes {
    let nodes = (0..3).map(|_| RedisServer::start_with_access(access, DURABLE)).collect();
    RedlockNodes { nodes }
}

fn quorum_url(servers: &RedlockNodes, logins: [&str; 3]) -> String {
    let hosts = servers.nodes.iter().zip(logins);
    let hosts: Vec<String> =
        hosts.map(|(node, login)| format!("{login}127.0.0.1:{}", node.port())).collect();
    format!("redlock://{}", hosts.join(","))
}

#[tokio::test(flavor = "multi_thread")]
async fn each_quorum_node_is_used_with_its_own_password() {
    let servers = quorum(&guarded());
    let right = format!("{}@", login());
    servers.nodes.iter().for_each(|node| add_user(node, &["-info"]));
    let error = refused(&quorum_url(&servers, [&right, &right, &right])).await;
    assert_error(&error, &[WRONG_USER], false);
    // With this they are used at once after their start, as `docs/redlock.md` says.
    servers.nodes.iter().for_each(|node| add_user(node, &["+config|get"]));
    lock_and_hand_over(&quorum_url(&servers, [&right, &right, &right])).await;
    let wrong = format!("{USER}:{MARK}-wrong@");
    for logins in [[&wrong, &right, &right], [&right, &right, &wrong]] {
        let error = refused(&quorum_url(&servers, logins.map(String::as_str))).await;
        assert_error(&error, &[WRONG_USER], false);
    }
    // Each host has a login of its own: it is not sent to servers for which it was not given.
    let error = refused(&quorum_url(&servers, [&right, "", ""])).await;
    assert_error(&error, &[WRONG_USER], false);
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_named_by_tls_sentinels_are_verified() {
    let (authority, other) = (Authority::new(), Authority::new());
    let access = sealed(&authority, "127.0.0.1");
    let servers = RedisSentinel::start_with_access(&access, &access, &[]);
    let url = format!("{}?ca={}", servers.url(), authority.ca());
    assert!(url.starts_with("rediss+sentinel://"), "{url}");
    lock_and_hand_over(&url).await;
    let strange = refused(&format!("{}?ca={}", servers.url(), other.ca())).await;
    assert_error(&strange, &["UnknownIssuer", "BadSignature", "unknown issuer"], false);
    let ours = steps::client(&url, TTL).await;
    let guard = lock(&ours, "kept").await;
    servers.kill_master();
    await_confirmed(ANSWERED, &guard).await;
    guard.release().await.unwrap();
}

/// The sentinels are who they say, and the server that they name is not.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_named_by_sentinels_is_not_trusted_without_verification() {
    let authority = Authority::new();
    let (to_servers, to_sentinels) =
        (sealed(&authority, "localhost"), sealed(&authority, "127.0.0.1"));
    let servers = RedisSentinel::start_with_access(&to_servers, &to_sentinels, &[]);
    let error = refused(&format!("{}?ca={}", servers.url(), authority.ca())).await;
    assert_error(&error, &["NotValidForName", "not valid for name"], false);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_nodes_of_a_tls_cluster_are_verified() {
    let (authority, other) = (Authority::new(), Authority::new());
    let cluster = RedisCluster::start_with_access(&sealed(&authority, "127.0.0.1"), 0, &[]);
    let url = cluster.url();
    assert!(url.starts_with("rediss+cluster://"), "{url}");
    lock_and_hand_over(&format!("{url}?ca={}", authority.ca())).await;
    let strange = refused(&format!("{url}?ca={}", other.ca())).await;
    assert_error(&strange, &["UnknownIssuer", "BadSignature", "unknown issuer"], false);
    // The nodes name themselves by address, whatever we called the one that was asked.
    let by_name = url.replace("127.0.0.1", "localhost");
    let error = refused(&format!("{by_name}?ca={}", authority.ca())).await;
    assert_error(&error, &["NotValidForName", "not valid for name"], false);
}

/// Certificates that are for names, not for addresses, as most are. Nodes name themselves by
/// address unless they are told otherwise, and those of Redis 6 cannot be told.
#[tokio::test(flavor = "multi_thread")]
async fn a_tls_cluster_is_verified_by_the_announced_hostnames() {
    let authority = Authority::new();
    let cluster = RedisCluster::start_with_access(&sealed(&authority, "localhost"), 0, &[]);
    let url = cluster.url().replace("127.0.0.1", "localhost");
    let url = format!("{url}?ca={}", authority.ca());
    // It is asked by name where the locks are, and tells addresses.
    let strange = steps::client(&url, TTL).await;
    let error = strange.mutex("named").unwrap().try_lock().await.unwrap_err();
    assert_error(&error, &["check host name and `ca`"], false);
    let mut answers = Vec::new();
    for node in cluster.nodes() {
        answers.push(node.ask(&["CONFIG", "SET", "cluster-announce-hostname", "localhost"]));
        let preferred = ["CONFIG", "SET", "cluster-preferred-endpoint-type", "hostname"];
        answers.push(node.ask(&preferred));
    }
    let version = cluster.nodes()[0].info(&["INFO", "server"], "redis_version").unwrap();
    if version.starts_with("6.") {
        let unknown = |answer: &String| answer.starts_with("ERR Unsupported CONFIG parameter");
        assert!(answers.iter().all(unknown), "Redis {version} gives nodes no names: {answers:?}");
        return;
    }
    assert!(answers.iter().all(|answer| answer == "OK"), "{answers:?}");
    for node in cluster.nodes() {
        until("all names are known", || {
            node.ask(&["CLUSTER", "NODES"]).matches(",localhost").count() == cluster.nodes().len()
        });
    }
    lock_and_hand_over(&url).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_nodes_of_a_tls_quorum_are_verified() {
    let (authority, other) = (Authority::new(), Authority::new());
    let servers = quorum(&sealed(&authority, "127.0.0.1"));
    let url = servers.url().replace("redlock:", "redlocks:");
    lock_and_hand_over(&format!("{url}?ca={}", authority.ca())).await;
    let strange = refused(&format!("{url}?ca={}", other.ca())).await;
    assert_error(&strange, &["UnknownIssuer", "BadSignature", "unknown issuer"], false);
    let by_name = url.replace("127.0.0.1", "localhost");
    let error = refused(&format!("{by_name}?ca={}", authority.ca())).await;
    assert_error(&error, &["NotValidForName", "not valid for name"], false);
}
