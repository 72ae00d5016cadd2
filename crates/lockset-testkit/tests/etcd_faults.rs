//! What the etcd engine makes of faults: each has a clear outcome, seen on a real server.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::time::{Duration, Instant};

use lockset::{Error, Guard, LockOptions, Lockset, LossReason, State};
use lockset_testkit::proxy::Proxy;
use lockset_testkit::stage::{EtcdServers, Link, LinkState};
use lockset_testkit::steps::{
    self, assert_error, await_lost, await_served, is_free, lock, spawn_waiter, until, within,
};

const TTL: Duration = Duration::from_secs(3);
/// Too short for any lease to run out.
const SOON: Duration = Duration::from_millis(750);
/// A third of the ttl, and the time that an answer takes on a busy machine.
const BY_RENEWAL: Duration = Duration::from_millis(1500);
/// A request that is not answered is tried again at the latest after this.
const RECOVERED: Duration = Duration::from_secs(8);

async fn client(url: &str) -> Lockset {
    steps::client(url, TTL).await
}

/// A server, a client of its own and one behind a proxy.
async fn with_proxy(prefix: &str) -> (EtcdServers, Vec<Proxy>, Lockset, Lockset) {
    let server = EtcdServers::start(1);
    let proxies = server.proxies();
    let ours = client(&server.url_through(&proxies, prefix)).await;
    let theirs = client(&server.url(prefix)).await;
    // So that the connection stands, and its lease.
    assert!(is_free(&ours, "warm").await);
    (server, proxies, ours, theirs)
}

/// The lease on which this lock's only key lies, in hexadecimal digits.
fn lease_of(server: &EtcdServers, prefix: &str) -> String {
    let keys = server.keys(prefix);
    let [key] = &keys[..] else { panic!("not one key: {keys:?}") };
    key.rsplit('/').next().unwrap().split('-').next().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_revoked_by_an_operator_loses_the_lock_and_the_client_continues() {
    let server = EtcdServers::start(1);
    let (ours, theirs) = (client(&server.url("p")).await, client(&server.url("p")).await);
    let (guard, other) = (lock(&ours, "revoked").await, lock(&ours, "too").await);
    let waiting = spawn_waiter(&theirs, "revoked").await;
    let lease = lease_of(&server, "p/too/");
    server.ask(&["lease", "revoke", &lease]);
    let next = await_served(SOON, waiting).await;
    assert!(next.token() > guard.token());
    for guard in [&guard, &other] {
        assert_eq!(await_lost(BY_RENEWAL, guard).await, LossReason::SessionEnded);
    }
    let anew = lock(&ours, "anew").await;
    let again = within(TTL, "a new lease", ours.mutex("too").unwrap().lock()).await.unwrap();
    tokio::time::sleep(TTL + SOON).await;
    assert_eq!(
        (anew.state(), again.state(), next.state()),
        (State::Held, State::Held, State::Held)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_whose_lease_was_revoked_is_queued_again_or_fails() {
    let server = EtcdServers::start(1);
    let (ours, theirs) = (client(&server.url("p")).await, client(&server.url("p")).await);
    let guard = lock(&ours, "held").await;
    let holder = server.keys("p/held/");
    let waiting = spawn_waiter(&theirs, "held").await;
    let both = server.keys("p/held/");
    let theirs_key = both.iter().find(|key| !holder.contains(key)).unwrap();
    let lease = theirs_key.rsplit('/').next().unwrap().split('-').next().unwrap();
    server.ask(&["lease", "revoke", lease]);
    until("it stands in line again, or gave up", || {
        waiting.is_finished() || server.keys("p/held/").len() == 2
    });
    guard.release().await.unwrap();
    // What must not happen: that it believes to hold what it does not, or waits for ever.
    match within(RECOVERED, "an outcome", waiting).await.unwrap() {
        Ok(guard) => {
            guard.confirm().await.unwrap();
            assert_eq!(server.keys("p/held/").len(), 1);
        }
        Err(error) => assert!(error.is_retryable(), "{error}"),
    }
}

/// A waiter watches the one before it, not itself: that its own key is gone, or is another one of
/// the same name, it sees only when its turn seems to have come.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_whose_key_was_deleted_does_not_hold() {
    let server = EtcdServers::start(1);
    let url = server.url("p");
    let (ours, theirs, third) = (client(&url).await, client(&url).await, client(&url).await);
    for (name, put_back) in [("deleted", false), ("replaced", true)] {
        let prefix = format!("p/{name}/");
        let guard = lock(&ours, name).await;
        let holder = server.keys(&prefix);
        let waiting = spawn_waiter(&theirs, name).await;
        let key = server.keys(&prefix).into_iter().find(|key| !holder.contains(key)).unwrap();
        let next = spawn_waiter(&third, name).await;
        let value = server.ask(&["get", "--print-value-only", &key]);
        server.ask(&["del", &key]);
        if put_back {
            server.ask(&["put", &key, &value]);
        }
        guard.release().await.unwrap();
        let next = await_served(SOON, next).await;
        // Whether it is told or stands in line again, it does not hold together with the next.
        if let Ok(told) = tokio::time::timeout(SOON, waiting).await {
            let error = told.unwrap().expect_err("it holds by a key that is gone");
            assert!(matches!(error, Error::NotHeld { .. }), "{error:?}");
        }
        next.confirm().await.unwrap();
        next.release().await.unwrap();
    }
}

/// The keys of this claim, wherever they are.
fn keys_of(server: &EtcdServers, guard: &Guard) -> Vec<String> {
    let id = guard.claim_id().to_string();
    server.keys("p/").into_iter().filter(|key| key.ends_with(&id)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_deleted_by_an_operator_is_a_loss_of_that_lock_only() {
    let server = EtcdServers::start(1);
    let (ours, theirs) = (client(&server.url("p")).await, client(&server.url("p")).await);
    let (guard, spared) = (lock(&ours, "deleted").await, lock(&ours, "spared").await);
    let waiting = spawn_waiter(&theirs, "deleted").await;
    let keys = keys_of(&server, &guard);
    server.ask(&["del", &keys[0]]);
    let next = await_served(SOON, waiting).await;
    let reason = await_lost(BY_RENEWAL, &guard).await;
    assert!(matches!(reason, LossReason::Forgotten | LossReason::Broken), "{reason:?}");
    next.confirm().await.unwrap();
    assert!(tokio::time::timeout(TTL, spared.lost()).await.is_err());
}

/// The same key, but not the one that was granted: another create revision.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_put_back_by_an_operator_is_not_the_lock_that_was_held() {
    let server = EtcdServers::start(1);
    let ours = client(&server.url("p")).await;
    let guard = lock(&ours, "forged").await;
    let key = keys_of(&server, &guard).remove(0);
    let value = server.ask(&["get", "--print-value-only", &key]);
    server.ask(&["del", &key]);
    server.ask(&["put", &key, &value]);
    let reason = await_lost(BY_RENEWAL, &guard).await;
    assert!(matches!(reason, LossReason::Forgotten | LossReason::Broken), "{reason:?}");
    assert!(guard.release().await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_compaction_does_not_lose_a_waiter() {
    let (server, proxies, ours, theirs) = with_proxy("p").await;
    let guard = lock(&theirs, "compacted").await;
    let waiting = spawn_waiter(&ours, "compacted").await;
    proxies.set(LinkState::Closed);
    for number in 0..20 {
        server.ask(&["put", "noise", &number.to_string()]);
    }
    server.ask(&["compact", &server.revision().to_string()]);
    proxies.set(LinkState::Up);
    server.ask(&["put", "noise", "last"]);
    server.ask(&["compact", &server.revision().to_string()]);
    guard.release().await.unwrap();
    await_served(RECOVERED, waiting).await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_during_a_cut_is_seen_by_the_waiter_after_it() {
    let (server, proxies, ours, theirs) = with_proxy("p").await;
    for cut in [LinkState::Closed, LinkState::Silent] {
        let guard = lock(&theirs, "missed").await;
        let waiting = spawn_waiter(&ours, "missed").await;
        proxies.set(cut);
        guard.release().await.unwrap();
        server.ask(&["compact", &server.revision().to_string()]);
        proxies.set(LinkState::Up);
        await_served(RECOVERED, waiting).await.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_short_silence_is_survived() {
    let (_server, proxies, ours, _) = with_proxy("p").await;
    let guard = lock(&ours, "silent").await;
    proxies.set(LinkState::Silent);
    tokio::time::sleep(TTL / 2).await;
    proxies.set(LinkState::Up);
    assert!(tokio::time::timeout(TTL * 2, guard.lost()).await.is_err(), "it was renewed");
    assert_eq!(guard.state(), State::Held);
}

/// One silence is waited for by all at once, not by one after the other.
#[tokio::test(flavor = "multi_thread")]
async fn many_requests_to_a_silent_server_fail_as_soon_as_one() {
    let (_server, proxies, ours, _) = with_proxy("p").await;
    proxies.set(LinkState::Silent);
    let mut asking = Vec::new();
    for number in 0..20 {
        // Writers, because those who want a mutex stand in line inside their process.
        let same = ours.rwlock("same").unwrap();
        asking.push(tokio::spawn(async move { same.write().await.map(drop) }));
        let new_lease = LockOptions::default().ttl(TTL * 4);
        let other = ours.mutex(format!("other/{number}")).unwrap().with(new_lease);
        asking.push(tokio::spawn(async move { other.lock().await.map(drop) }));
    }
    let told = within(RECOVERED * 2, "all are told", futures_util::future::join_all(asking)).await;
    for error in told.into_iter().map(|told| told.unwrap().unwrap_err()) {
        assert!(error.is_retryable(), "{error}");
    }
    proxies.set(LinkState::Up);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_server_keeps_locks_and_queue() {
    let server = EtcdServers::start(1);
    let (ours, theirs) = (client(&server.url("p")).await, client(&server.url("p")).await);
    let guard = lock(&ours, "restarted").await;
    let waiting = spawn_waiter(&theirs, "restarted").await;
    server.restart_leader();
    assert!(tokio::time::timeout(TTL, guard.lost()).await.is_err(), "it was renewed");
    guard.confirm().await.unwrap();
    assert!(!waiting.is_finished());
    guard.release().await.unwrap();
    let next = await_served(RECOVERED, waiting).await;
    next.release().await.unwrap();
    assert_eq!(server.keys("p/restarted/"), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn without_space_locks_can_be_renewed_and_released_but_not_acquired() {
    let server = EtcdServers::start_with(1, &["--quota-backend-bytes", "16000000"]);
    let (ours, theirs) = (client(&server.url("p")).await, client(&server.url("p")).await);
    let guard = lock(&ours, "kept").await;
    let waiting = spawn_waiter(&theirs, "kept").await;
    fill(&server);
    let error = ours.mutex("new").unwrap().try_lock().await.unwrap_err();
    assert_error(&error, &["database space exceeded"], false);
    assert_error(&error, &["alarm disarm"], false);
    assert!(tokio::time::timeout(TTL * 2, guard.lost()).await.is_err(), "it was renewed");
    guard.release().await.unwrap();
    let next = await_served(SOON, waiting).await;
    assert_eq!(server.keys("p/kept/").len(), 1);
    next.release().await.unwrap();
    assert_eq!(server.keys("p/").len(), 0, "what was given back is gone");

    server.ask(&["del", "fill"]);
    server.ask(&["compact", &server.revision().to_string()]);
    server.ask(&["defrag"]);
    server.ask(&["alarm", "disarm"]);
    let again = within(RECOVERED, "there is space", ours.mutex("new").unwrap().lock()).await;
    again.unwrap().release().await.unwrap();
}

/// Writes until there is no space, and the server has rung its bell.
fn fill(server: &EtcdServers) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("value");
    std::fs::write(&file, "x".repeat(1_000_000)).unwrap();
    until("the space is used up", || {
        let mut etcdctl = server.etcdctl(&server.hosts());
        let value = std::fs::File::open(&file).unwrap();
        let output = etcdctl.args(["put", "fill"]).stdin(value).output().unwrap();
        String::from_utf8_lossy(&output.stderr).contains("space exceeded")
    });
    until("the bell rings", || server.ask(&["alarm", "list"]).contains("NOSPACE"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acquisition_with_a_lost_reply_is_granted_once_and_leaves_nothing_behind() {
    let (server, proxies, ours, theirs) = with_proxy("p").await;
    let [proxy] = &proxies[..] else { panic!("one server") };
    proxy.drop_replies();
    let mutex = ours.mutex("unanswered").unwrap();
    let asking = tokio::spawn(async move { mutex.lock().await });
    until("it was carried out", || server.keys("p/unanswered/").len() == 1);
    let first = server.keys("p/unanswered/");
    proxy.cut();
    let guard = await_served(RECOVERED, asking).await;
    assert_eq!(server.keys("p/unanswered/"), first, "the same claim holds");
    assert_eq!(keys_of(&server, &guard), first);
    assert!(!is_free(&theirs, "unanswered").await);
    guard.release().await.unwrap();
    assert!(is_free(&theirs, "unanswered").await);
    assert_eq!(server.keys("p/unanswered/"), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acquisition_cancelled_after_a_lost_reply_leaves_nothing_behind() {
    let (server, proxies, ours, theirs) = with_proxy("p").await;
    let [proxy] = &proxies[..] else { panic!("one server") };
    proxy.drop_replies();
    let mutex = ours.mutex("given up").unwrap();
    let asking = tokio::spawn(async move { mutex.lock().await });
    until("it was carried out", || server.keys("p/given up/").len() == 1);
    asking.abort();
    proxy.cut();
    // Its lease lives on with its client, so nothing but the client can take the key away.
    let keep = lock(&ours, "keep").await;
    until("it is withdrawn", || server.keys("p/given up/").is_empty());
    assert!(is_free(&theirs, "given up").await);
    keep.confirm().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_withdrawn_claim_stays_withdrawn_when_its_request_arrives_late() {
    let (server, proxies, ours, theirs) = with_proxy("p").await;
    let [proxy] = &proxies[..] else { panic!("one server") };
    proxy.hold_requests();
    let began = Instant::now();
    let patience = Duration::from_millis(200);
    let error = ours.mutex("late").unwrap().lock_within(patience).await.unwrap_err();
    assert!(error.is_retryable(), "{error}");
    assert!(matches!(error, Error::Unreachable { .. } | Error::Timeout { .. }), "{error}");
    assert!(began.elapsed() < patience + SOON, "it waited longer than it was told to");
    proxy.cut();
    until("it is withdrawn", || server.keys("p//").iter().any(|key| key.starts_with("p//gone/")));
    proxy.deliver_late();
    assert_eq!(server.keys("p/late/"), Vec::<String>::new());
    assert!(is_free(&theirs, "late").await);
    until("the mark ends by itself", || server.keys("p//gone/").is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_with_a_lost_reply_hands_over_once() {
    let (server, proxies, ours, theirs) = with_proxy("p").await;
    let [proxy] = &proxies[..] else { panic!("one server") };
    let guard = lock(&ours, "handed").await;
    let waiting = spawn_waiter(&theirs, "handed").await;
    proxy.drop_replies();
    let releasing = tokio::spawn(guard.release());
    let next = await_served(SOON, waiting).await;
    proxy.cut();
    // Found out by its id, or told that it is not known: never hung.
    let _ = within(RECOVERED, "it is told", releasing).await.unwrap();
    next.confirm().await.unwrap();
    assert_eq!(keys_of(&server, &next), server.keys("p/handed/"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_that_did_not_reach_the_server_is_retried() {
    let (server, proxies, ours, theirs) = with_proxy("p").await;
    // It keeps the common lease alive, so the key would not end by itself.
    let keep = lock(&ours, "keep").await;
    let guard = lock(&ours, "forgotten").await;
    let waiting = spawn_waiter(&theirs, "forgotten").await;
    proxies.set(LinkState::Closed);
    let releasing = tokio::spawn(guard.release());
    tokio::time::sleep(SOON).await;
    assert_eq!(server.keys("p/forgotten/").len(), 2, "it cannot have got through");
    proxies.set(LinkState::Up);
    let _ = within(RECOVERED, "it is told", releasing).await.unwrap();
    let next = await_served(RECOVERED, waiting).await;
    assert_eq!(server.keys("p/forgotten/"), keys_of(&server, &next));
    keep.confirm().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_guard_is_released_after_a_cut_and_so_is_a_dropped_waiter() {
    let (server, proxies, ours, theirs) = with_proxy("p").await;
    let keep = lock(&ours, "keep").await;
    let guard = lock(&ours, "dropped").await;
    let held = lock(&theirs, "waited").await;
    let waiting = spawn_waiter(&ours, "waited").await;
    proxies.set(LinkState::Closed);
    drop(guard);
    waiting.abort();
    tokio::time::sleep(SOON).await;
    proxies.set(LinkState::Up);
    until("both are gone", || {
        server.keys("p/dropped/").is_empty() && server.keys("p/waited/").len() == 1
    });
    held.confirm().await.unwrap();
    keep.confirm().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_absent_server_is_reported_in_time() {
    let server = EtcdServers::start(1);
    let ours = client(&server.url("p")).await;
    server.kill(0);
    let (mutex, url) = (ours.mutex("down").unwrap(), server.url("p"));
    let error = within(RECOVERED, "an error", mutex.try_lock()).await.unwrap_err();
    assert_error(&error, &["cannot be reached"], true);
    let error = within(RECOVERED, "an error", Lockset::connect(&url)).await.unwrap_err();
    assert_error(&error, &["cannot be reached"], true);
    server.bring_back(0);
    let again = within(RECOVERED, "it is back", mutex.lock()).await;
    again.unwrap().release().await.unwrap();
}
