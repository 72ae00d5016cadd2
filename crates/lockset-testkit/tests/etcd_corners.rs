//! Corners of the etcd engine: names, leases, and what many or idle clients cost a real server.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use lockset::engine::etcd::{Etcd, EtcdOptions};
use lockset::engine::{Claim, Engine, Mode, Wait};
use lockset::{LockOptions, Lockset, State};
use lockset_testkit::stage::EtcdServers;
use lockset_testkit::steps::{self, await_served, is_free, lock, spawn_waiter, until, within};

const TTL: Duration = Duration::from_secs(3);
const SOON: Duration = Duration::from_millis(750);
const PATIENCE: Duration = Duration::from_secs(30);

async fn client(server: &EtcdServers) -> Lockset {
    steps::client(&server.url("p"), TTL).await
}

async fn engine(server: &EtcdServers) -> Etcd {
    let options = EtcdOptions { url: server.url("p").parse().unwrap(), ..EtcdOptions::default() };
    Etcd::connect(options).await.unwrap()
}

fn claim(name: &str) -> Claim {
    steps::claim(name, TTL)
}

/// They lie on one lease, which for others is one owner.
#[tokio::test(flavor = "multi_thread")]
async fn two_claims_of_one_process_on_one_name_never_both_succeed() {
    let server = EtcdServers::start(1);
    let engine = engine(&server).await;
    for round in 0..30 {
        let claims = [claim("one"), claim("one"), claim("one")];
        let (a, b, c) = tokio::join!(
            engine.acquire(&claims[0], Wait::No),
            engine.acquire(&claims[1], Wait::No),
            engine.acquire(&claims[2], Wait::No),
        );
        let grants = [a, b, c].map(|admission| admission.unwrap().granted());
        let granted: Vec<_> = (0..3).filter(|who| grants[*who].is_some()).collect();
        assert!(granted.len() <= 1, "round {round}: {granted:?} hold");
        assert_eq!(server_keys(&server), granted.len(), "those who were refused left nothing");
        for who in granted {
            engine.release(&claims[who], grants[who].as_ref().unwrap(), None).await.unwrap();
        }
    }
}

/// A deleted key costs every read of its neighbours until the store is compacted.
#[tokio::test(flavor = "multi_thread")]
async fn a_lock_acquired_repeatedly_leaves_few_keys_behind() {
    let server = EtcdServers::start(1);
    let (ours, theirs) = (client(&server).await, client(&server).await);
    let (mut keys, mut tokens) = (std::collections::BTreeSet::new(), vec![0]);
    for round in 0..40 {
        let guard = lock(&ours, "again").await;
        keys.extend(server.keys("p/again/"));
        tokens.push(guard.token().get());
        assert!(ours.mutex("again").unwrap().try_lock().await.unwrap().is_none());
        let state = theirs.inspect("again").await.unwrap();
        let holders: Vec<_> = state.holders.iter().map(|holder| holder.token).collect();
        assert_eq!(holders, [Some(guard.token())], "round {round}");
        // In line in its process, so that the next is taken along by the release.
        if round % 4 == 0 {
            let mutex = ours.mutex("again").unwrap();
            let next = tokio::spawn(async move { mutex.lock().await });
            tokio::time::sleep(Duration::from_millis(20)).await;
            guard.release().await.unwrap();
            let next = await_served(SOON, next).await;
            keys.extend(server.keys("p/again/"));
            tokens.push(next.token().get());
            next.release().await.unwrap();
        } else {
            guard.release().await.unwrap();
        }
        assert_eq!(server.keys("p/again/"), Vec::<String>::new());
    }
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
    assert!(keys.len() <= 3, "{keys:?}");
}

/// Its transaction is in flight, and its future is not polled.
#[tokio::test(flavor = "multi_thread")]
async fn an_unpolled_future_does_not_stall_others() {
    let server = EtcdServers::start(1);
    let ours = client(&server).await;
    lock(&ours, "warm").await.release().await.unwrap();
    let resting = ours.mutex("resting").unwrap();
    let mut resting = Box::pin(resting.lock());
    // Else the answer may come while the request is still being sent.
    server.freeze();
    assert!(futures_util::poll!(resting.as_mut()).is_pending());
    server.thaw();
    let other = ours.mutex("other").unwrap().lock_within(SOON).await.unwrap();
    other.release().await.unwrap();
    let guard = resting.await.unwrap();
    assert_eq!(guard.state(), State::Held);
}

/// With raw names a lock waits for those within it, so they stand in one line: if they came in one
/// transaction, none would be before the other, nor behind a third who holds already.
#[tokio::test(flavor = "multi_thread")]
async fn nested_raw_names_requested_together_never_have_two_holders() {
    let server = EtcdServers::start(1);
    let raw = |url: String| EtcdOptions {
        url: url.parse().unwrap(),
        raw_names: true,
        ..EtcdOptions::default()
    };
    let ours = Etcd::connect(raw(server.url("p"))).await.unwrap();
    let theirs = Etcd::connect(raw(server.url("p"))).await.unwrap();
    let held = claim("a");
    let grant = ours.acquire(&held, Wait::No).await.unwrap().granted().unwrap();
    for round in 0..8 {
        let within = (0..6).map(|number| format!("a/b{number}"));
        let beside = (0..4).map(|number| format!("z{number}"));
        let claims: Vec<Claim> = beside.chain(within).map(|name| claim(&name)).collect();
        let whole = claim("a");
        let (others, second) = tokio::join!(
            join_all(claims.iter().map(|claim| engine_grants(&theirs, claim))),
            engine_grants(&theirs, &whole),
        );
        assert!(!second, "round {round}: a second one holds `a`");
        assert!(
            others.into_iter().all(|granted| granted),
            "round {round}: no claim is before them"
        );
        let renewed = ours.renew(&[(&held, &grant)]).await.remove(0).unwrap();
        assert!(renewed.renewed().is_some());
        for claim in claims.iter().chain([&whole]) {
            theirs.withdraw(claim).await.unwrap();
        }
    }
    ours.release(&held, &grant, None).await.unwrap();
}

/// Whether the claim is granted soon; it goes on waiting if it is not.
async fn engine_grants(engine: &Etcd, claim: &Claim) -> bool {
    let asked = tokio::time::timeout(SOON, engine.acquire(claim, Wait::Forever)).await;
    asked.is_ok_and(|answer| answer.unwrap().granted().is_some())
}

fn server_keys(server: &EtcdServers) -> usize {
    server.keys("p/one/").len()
}

/// Names that look like something else: keys beside a lock, escapes, ranges, numbers of leases.
const ODD_NAMES: [&str; 22] = [
    "a",
    "a/b",
    "a/b/c",
    "a%2Fb",
    "a%252Fb",
    "a%",
    "a%25",
    "%",
    "%2F",
    "a0",
    "a.",
    "a-",
    "cell",
    "gone",
    "cell/a",
    "gone/00000000000000000000000000000000",
    "0-00000000000000000000000000000000",
    "grün |;,=",
    "\u{10ffff}",
    "日本/東京",
    "a'b\"c",
    "*",
];

#[tokio::test(flavor = "multi_thread")]
async fn no_name_escapes_its_prefix_or_collides_with_another() {
    let server = EtcdServers::start(1);
    let (ours, queueing) = (client(&server).await, client(&server).await);
    let others = [
        steps::client(&server.url("p%2Fa"), TTL).await,
        steps::client(&server.url("p/a"), TTL).await,
        steps::client(&server.url("pp"), TTL).await,
    ];
    let mut guards = Vec::new();
    let mut waiting = Vec::new();
    for name in ODD_NAMES {
        let taken = ours.mutex(name).unwrap().try_lock().await.unwrap();
        guards.push(taken.unwrap_or_else(|| panic!("{name} is another's")));
        waiting.push(spawn_waiter(&queueing, name).await);
    }
    let keys = server.keys("");
    assert_eq!(keys.len(), ODD_NAMES.len() * 2, "{keys:?}");
    assert!(keys.iter().all(|key| key.starts_with("p/")), "{keys:?}");
    for other in &others {
        assert_eq!(names(other, "").await, Vec::<String>::new());
    }
    let (mut listed, mut expected) = (names(&ours, "").await, ODD_NAMES.map(str::to_owned));
    listed.sort();
    expected.sort();
    assert_eq!(listed, expected);
    for prefix in ["a", "a/", "a%", "%", "g", "日本/", "*"] {
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

async fn names(locks: &Lockset, prefix: &str) -> Vec<String> {
    let listed = locks.list(prefix).await.unwrap();
    listed.into_iter().map(|state| state.name.as_str().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn locks_of_a_client_share_one_lease_and_a_detachable_lock_has_its_own() {
    let server = EtcdServers::start(1);
    let ours = client(&server).await;
    let names: Vec<String> = (0..100).map(|number| format!("lock/{number}")).collect();
    let mut guards = Vec::new();
    for name in &names {
        guards.push(lock(&ours, name).await);
    }
    assert_eq!(server.leases().len(), 1, "one ttl, one lease");
    let slow = LockOptions::default().ttl(TTL * 4);
    let slow = ours.mutex("slow").unwrap().with(slow).lock().await.unwrap();
    assert_eq!(server.leases().len(), 2, "another ttl, another lease");
    let theirs = client(&server).await;
    let other = lock(&theirs, "other").await;
    assert_eq!(server.leases().len(), 3, "another client, another lease");
    let travels = ours.mutex("travels").unwrap().with(LockOptions::default().ttl(TTL).detachable());
    let travels = travels.lock().await.unwrap();
    assert_eq!(server.leases().len(), 4, "it may outlive the client");

    let writes = server.revision();
    tokio::time::sleep(TTL * 2).await;
    let all = guards.iter().chain([&slow, &other, &travels]);
    assert!(all.into_iter().all(|guard| guard.state() == State::Held));
    assert_eq!(server.revision(), writes, "renewing writes nothing");

    let ticket = travels.detach().await.unwrap();
    drop(guards);
    ours.close().await.unwrap();
    until("what is closed is gone", || server.keys("p/lock").is_empty());
    let attached = theirs.attach(&ticket).await.unwrap();
    tokio::time::sleep(TTL + SOON).await;
    assert_eq!(attached.state(), State::Held, "another client renews it");
    attached.release().await.unwrap();
    assert_eq!(server.keys("p/travels/"), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_try_lock_revokes_its_own_lease() {
    let server = EtcdServers::start(1);
    let (ours, theirs) = (client(&server).await, engine(&server).await);
    let held = lock(&ours, "held").await;
    let long = TTL * 20;
    let detachable = Claim { detachable: true, ttl: long, ..claim("held") };
    let fixed = Claim { fixed: true, ttl: long, ..claim("held") };
    let permits = Mode::Permits { take: 1, limit: 2 };
    let clashing = Claim { detachable: true, mode: permits, ttl: long, ..claim("held") };
    for claim in [&detachable, &fixed] {
        assert!(theirs.acquire(claim, Wait::No).await.unwrap().granted().is_none());
    }
    assert!(theirs.acquire(&clashing, Wait::No).await.is_err());
    until("only the holder's lease is left", || server.leases().len() == 1);
    held.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_client_leaves_neither_keys_nor_leases() {
    let server = EtcdServers::start(1);
    let (ours, theirs) = (client(&server).await, client(&server).await);
    let held = lock(&theirs, "held").await;
    let guard = lock(&ours, "closed").await;
    let waiting = spawn_waiter(&ours, "held").await;
    ours.close().await.unwrap();
    assert!(within(SOON, "it is told", waiting).await.unwrap().is_err());
    drop(guard);
    until("only theirs is left", || server.keys("").len() == 1);
    until("its lease is given back", || server.leases().len() == 1);
    held.release().await.unwrap();
}

/// One who waits watches the one before it, so a release concerns one waiter and costs one event.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_wakes_one_of_a_thousand_waiters() {
    const WAITERS: usize = 1000;
    const RELEASES: u64 = 100;
    let server = EtcdServers::start(1);
    let (ours, theirs) = (client(&server).await, client(&server).await);
    let held = ours.rwlock("herd").unwrap().write().await.unwrap();
    let (tell, mut told) = tokio::sync::mpsc::channel(1);
    for _ in 0..WAITERS {
        // Writers, because those who want a mutex stand in line inside their process.
        let (lock, tell) = (theirs.rwlock("herd").unwrap(), tell.clone());
        tokio::spawn(async move {
            let guard = lock.write().await.unwrap();
            let _ = tell.send(guard).await;
        });
    }
    until("all stand in line", || server.keys("p/herd/").len() == WAITERS + 1);
    // Until the last of them watches.
    until("all watch", || server.metric("etcd_debugging_mvcc_watcher_total") >= WAITERS as u64);
    let (events, writes) = (server.metric("etcd_debugging_mvcc_events_total"), server.revision());
    held.release().await.unwrap();
    for _ in 1..RELEASES {
        let guard = within(PATIENCE, "the next is served", told.recv()).await.unwrap();
        guard.release().await.unwrap();
    }
    let last = within(PATIENCE, "the next is served", told.recv()).await.unwrap();
    let events = server.metric("etcd_debugging_mvcc_events_total") - events;
    let writes = server.revision() - writes;
    assert!(events >= RELEASES, "they were woken by events: {events}");
    assert!(events <= RELEASES + RELEASES / 10, "{events} events for {RELEASES} releases");
    assert!(writes <= RELEASES + RELEASES / 10, "{writes} writes for {RELEASES} releases");
    drop(last);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_client_sends_almost_no_requests() {
    let server = EtcdServers::start(1);
    let ours = client(&server).await;
    assert!(is_free(&ours, "used").await);
    let bytes = || server.metric("etcd_network_client_grpc_received_bytes_total");
    // A lease that was used a moment ago may be kept a while for the next lock.
    let (before, writes) = (bytes(), server.revision());
    tokio::time::sleep(TTL * 2).await;
    let (idle, written) = (bytes() - before, server.revision() - writes);
    assert_eq!(written, 0);
    // Twice a third of a ttl a beat of some ten bytes, and our own two questions.
    assert!(idle < 500, "{idle} bytes in {:?}", TTL * 2);
}

/// Such a claim leaves as soon as it knows; until then others who use the name well must not be
/// told of its mistake.
#[tokio::test(flavor = "multi_thread")]
async fn a_conflicting_use_of_a_name_by_another_client_is_waited_out() {
    let server = EtcdServers::start(1);
    let (ours, theirs) = (client(&server).await, client(&server).await);
    let permits = ours.semaphore("permits", 3).unwrap();
    let permit = permits.acquire().await.unwrap();
    let of_permit = server.keys("p/permits/").remove(0);
    let value = server.ask(&["get", "--print-value-only", &of_permit]);
    let guard = lock(&ours, "lock").await;
    let mistaken = of_permit.replace("p/permits/", "p/lock/");
    server.ask(&["put", &mistaken, &value]);
    assert!(theirs.mutex("lock").unwrap().try_lock().await.unwrap().is_none());
    let waiting = spawn_waiter(&theirs, "lock").await;
    let of_lock = server.keys("p/lock/").into_iter().find(|key| *key != mistaken).unwrap();
    let mutex = server.ask(&["get", "--print-value-only", &of_lock]);
    assert!(!waiting.is_finished());
    server.ask(&["del", &mistaken]);
    guard.release().await.unwrap();
    await_served(SOON, waiting).await.release().await.unwrap();
    // And the other way round: a mutex where there are permits.
    let mistaken = of_lock.replace("p/lock/", "p/permits/");
    server.ask(&["put", &mistaken, &mutex]);
    assert!(permits.try_acquire().await.unwrap().is_none());
    let second = theirs.semaphore("permits", 3).unwrap();
    let waiting = tokio::spawn(async move { second.acquire().await });
    tokio::time::sleep(SOON / 2).await;
    assert!(!waiting.is_finished());
    server.ask(&["del", &mistaken]);
    await_served(SOON, waiting).await.release().await.unwrap();
    permit.release().await.unwrap();
}

/// The request of an acquisition that was given up may arrive at any time, and the lease on which
/// it would create its key lives as long as other locks of the client. So its tombstone lives as
/// long as that lease; here the late request comes when a tombstone of seconds would be gone.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_request_of_a_cancelled_acquire_leaves_no_lock() {
    let server = EtcdServers::start(1);
    let engine = Arc::new(engine(&server).await);
    let locks = Lockset::with_engine(engine.clone()).unwrap();
    let options = LockOptions::default().ttl(TTL);
    let other = locks.mutex("other").unwrap().with(options).lock().await.unwrap();
    let lease = server.leases().pop().unwrap();

    let late = claim("late");
    server.freeze();
    let asking = engine.acquire(&late, Wait::Forever);
    let replied = tokio::time::timeout(SOON, asking).await;
    assert!(replied.is_err(), "the server is frozen, and replied {replied:?}");
    server.thaw();
    within(PATIENCE, "it is withdrawn", engine.withdraw(&late)).await.unwrap();
    tokio::time::sleep(Duration::from_secs(17)).await;

    assert_eq!(other.state(), State::Held);
    assert!(server.leases().contains(&lease), "the lease lives on: {:?}", server.leases());
    let (key, tombstone) = (format!("p/late/{lease}-{}", late.id), format!("p//gone/{}", late.id));
    let create = format!(
        "create(\"{key}\") = \"0\"\ncreate(\"{tombstone}\") = \"0\"\n\n\
         put {key} x --lease={lease}\n\nget {key}\n\n"
    );
    let answer = answer(server.etcdctl(&server.hosts()).arg("txn"), &create);
    assert!(answer.contains("FAILURE"), "a late request created its key: {answer}");
    assert!(is_free(&locks, "late").await);
    // When its last claim has left, the lease goes, and its tombstones with it.
    other.release().await.unwrap();
    until("the retired lease ends", || !server.leases().contains(&lease));
    until("no tombstone is left", || server.keys("p//gone/").is_empty());
}

/// What a program answers to this input.
fn answer(program: &mut Command, input: &str) -> String {
    let piped = program.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = piped.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}
