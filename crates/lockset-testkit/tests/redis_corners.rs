//! Corners of the Redis engine where two rules meet, each seen on a real server.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use lockset::clock::Clock;
use lockset::engine::redis::{Redis, RedisOptions};
use lockset::engine::{self, Admission, Amend, Claim, Engine, FencedNode, Renewal, Wait};
use lockset::{Break, Error, LossReason, Mode, Token};
use lockset_testkit::proxy::Proxy;
use lockset_testkit::stage::{ClockSkew, DURABLE, RedisCluster, RedisServer};
use lockset_testkit::steps;
use rustix::process::Signal;

const TTL: Duration = Duration::from_secs(30);

fn claim(name: &str) -> Claim {
    steps::claim(name, TTL)
}

async fn engine(url: &str) -> Redis {
    Redis::connect(RedisOptions { url: url.parse().unwrap(), ..RedisOptions::default() })
        .await
        .unwrap()
}

/// A release that travels in a contenders beside a name with a mark.
#[tokio::test]
async fn a_batched_release_with_a_next_claim_reports_success() {
    let server = RedisServer::start();
    let redis = engine(&server.url()).await;
    let (a, next, other, first) = (claim("a"), claim("a"), claim("c"), claim("f"));
    let held = redis.acquire(&a, Wait::No).await.unwrap().granted().unwrap();
    redis.withdraw(&claim("c")).await.unwrap();
    let (_, released, _) = tokio::join!(
        redis.acquire(&first, Wait::No),
        redis.release(&a, &held, Some(&next)),
        redis.acquire(&other, Wait::No),
    );
    assert!(released.is_ok(), "{released:?}");
}

/// Its request is in flight, and its future is not polled.
#[tokio::test(flavor = "multi_thread")]
async fn an_unpolled_future_does_not_stall_others() {
    let server = RedisServer::start();
    let redis = engine(&server.url()).await;
    redis.acquire(&claim("warm"), Wait::No).await.unwrap().granted().unwrap();
    let (first, other) = (claim("resting"), claim("other"));
    let mut resting = redis.acquire(&first, Wait::No);
    // Else the answer may come while the request is still being sent.
    server.signal(Signal::STOP);
    assert!(futures_util::poll!(resting.as_mut()).is_pending());
    server.signal(Signal::CONT);
    let soon = tokio::time::timeout(Duration::from_secs(1), redis.acquire(&other, Wait::No));
    assert!(soon.await.expect("it waits for one that rests").unwrap().granted().is_some());
    assert!(resting.await.unwrap().granted().is_some());
}

/// The keys beside a lock must be its own, whatever braces its name has.
#[tokio::test(flavor = "multi_thread")]
async fn names_with_unusual_braces_are_independent() {
    for (prefix, one, other) in [
        ("lockset:", "{lockset:foo}", "foo}:lockset:{lockset:foo"),
        ("", "{a}", "a}:{a"),
        ("", "{a}", "}{a}"),
        ("", "a}", "{a}"),
    ] {
        let server = RedisServer::start();
        let url = format!("{}?prefix={prefix}", server.url());
        let redis = engine(&url).await;
        let (first, second, third) = (claim(one), claim(one), claim(other));
        let held = redis.acquire(&first, Wait::No).await.unwrap().granted().unwrap();
        let mut waiting = redis.acquire(&second, Wait::Forever);
        assert!(futures_util::poll!(waiting.as_mut()).is_pending());
        let look = || redis.inspect(&first.name);
        while look().await.unwrap().waiters.is_empty() {}
        assert!(redis.inspect(&third.name).await.unwrap().waiters.is_empty(), "{one} {other}");
        assert!(
            redis.acquire(&third, Wait::No).await.unwrap().granted().is_some(),
            "{one} {other}"
        );
        assert!(futures_util::poll!(waiting.as_mut()).is_pending(), "{one} {other}");
        redis.release(&first, &held, None).await.unwrap();
        assert!(waiting.await.unwrap().granted().unwrap().token > held.token);
    }
}

/// A connection to a server that becomes a replica, and a master again, is not closed.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_was_a_replica_reuses_no_token() {
    let (first, second) = (RedisServer::start(), RedisServer::start());
    let (ours, theirs) = (engine(&first.url()).await, engine(&second.url()).await);
    let take = async |redis: &Redis| {
        let claim = claim("n");
        let grant = redis.acquire(&claim, Wait::No).await.unwrap().granted().unwrap();
        redis.release(&claim, &grant, None).await.unwrap();
        grant.token
    };
    take(&ours).await;
    let port = second.port().to_string();
    first.ask(&["REPLICAOF", "127.0.0.1", &port]);
    take(&theirs).await;
    steps::until("it has what is written", || second.is_replicated_to(1));
    steps::until("no client listens any more", || first.listeners() == 0);
    first.ask(&["REPLICAOF", "NO", "ONE"]);
    let newest = take(&theirs).await;
    steps::until("it is used again", || first.listeners() == 1);
    assert!(take(&ours).await > newest);
}

/// It is notified of its grant, which is neither accepted nor renewed.
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_waiter_with_an_open_connection_delays_by_the_requested_first_lease() {
    let server = RedisServer::start();
    let first_lease = Duration::from_secs(1);
    let options = || RedisOptions {
        url: server.url().parse().unwrap(),
        first_lease,
        ..RedisOptions::default()
    };
    let (ours, dead) = (engine(&server.url()).await, Redis::connect(options()).await.unwrap());
    let (first, second, third) = (claim("n"), claim("n"), claim("n"));
    let held = ours.acquire(&first, Wait::No).await.unwrap().granted().unwrap();
    let mut waiting = dead.acquire(&second, Wait::Forever);
    assert!(futures_util::poll!(waiting.as_mut()).is_pending());
    steps::until("one waits", || server.ask(&["ZCARD", "{lockset:n}:queue"]) == "1");
    let mut behind = ours.acquire(&third, Wait::Forever);
    assert!(futures_util::poll!(behind.as_mut()).is_pending());
    steps::until("two wait", || server.ask(&["ZCARD", "{lockset:n}:queue"]) == "2");
    ours.release(&first, &held, None).await.unwrap();
    let released = Instant::now();
    let served = tokio::time::timeout(TTL / 2, behind).await.expect("the dead one holds on");
    let took = released.elapsed();
    assert!(served.unwrap().granted().unwrap().token > held.token);
    assert!((first_lease / 2..4 * first_lease).contains(&took), "{took:?}");
    for wrong in [Duration::from_millis(499), Duration::from_secs(61)] {
        let refused = Redis::connect(RedisOptions { first_lease: wrong, ..options() }).await;
        assert!(refused.unwrap_err().to_string().contains("from 500ms to 60s"));
    }
    for wrong in [Duration::from_millis(199), Duration::from_secs(61)] {
        let refused = Redis::connect(RedisOptions { courtesy: Some(wrong), ..options() }).await;
        assert!(refused.unwrap_err().to_string().contains("from 200ms to 60s"));
    }
}

/// An attempt whose first request was lost, and that was told "busy".
#[tokio::test(flavor = "multi_thread")]
async fn a_busy_attempt_leaves_nothing_behind() {
    let server = RedisServer::start();
    let proxy = Proxy::before(server.port());
    let (ours, theirs) = (engine(&server.url_through(&proxy)).await, engine(&server.url()).await);
    let warm = claim("warm");
    ours.acquire(&warm, Wait::No).await.unwrap().granted().unwrap();
    let holder = claim("n");
    let held = theirs.acquire(&holder, Wait::No).await.unwrap().granted().unwrap();
    proxy.hold_requests();
    let attempt = claim("n");
    let (tried, ()) = tokio::join!(ours.acquire(&attempt, Wait::No), async {
        proxy.until("a request is held back", |seen| seen.held > 0);
        proxy.cut();
    });
    assert!(tried.unwrap().granted().is_none());
    theirs.release(&holder, &held, None).await.unwrap();
    proxy.deliver_late();
    let (value, left) = (server.ask(&["GET", "lockset:n"]), server.ask(&["PTTL", "lockset:n"]));
    assert_eq!(value, "", "taken without a caller, for {left} ms");
}

async fn fence_lost(natural: bool, keep: bool) -> (bool, Duration, Vec<lockset::Result<Renewal>>) {
    let server = RedisServer::start();
    let idle = if natural { 1 } else { 7 * 86_400 };
    let options = RedisOptions {
        url: server.url().parse().unwrap(),
        fence_idle: Duration::from_secs(idle),
        ..RedisOptions::default()
    };
    let ours = Redis::connect(options).await.unwrap();
    let theirs = engine(&server.url()).await;
    let holder = Claim { fixed: natural, ..claim("n") };
    let held = ours.acquire(&holder, Wait::No).await.unwrap().granted().unwrap();
    if keep {
        tokio::time::sleep(Duration::from_millis(100)).await;
    } else if natural {
        let is_gone = || server.ask(&["EXISTS", "{lockset:n}:fence"]) == "0";
        steps::until("the fence has expired", is_gone);
        assert_eq!(server.ask(&["EXISTS", "lockset:n"]), "1", "the lock is held");
    } else {
        assert_eq!(server.ask(&["DEL", "{lockset:n}:fence"]), "1");
    }
    let waiting = claim("n");
    let clock = Clock::boot();
    let (served, told) = tokio::join!(
        async {
            let grant = theirs.acquire(&waiting, Wait::Until(clock.now() + TTL)).await;
            (grant.unwrap().granted().is_some(), Instant::now())
        },
        async {
            while theirs.inspect(&holder.name).await.unwrap().waiters.is_empty() {}
            let renewed = if natural { Vec::new() } else { ours.renew(&[(&holder, &held)]).await };
            ours.release(&holder, &held, None).await.unwrap();
            (Instant::now(), renewed)
        },
    );
    (served.0, served.1.saturating_duration_since(told.0), told.1)
}

/// The fence is lost (idle for long, evicted) while a fresh lock is held, then a claim queues.
#[tokio::test]
async fn an_expired_fence_does_not_break_the_handoff() {
    let (served, after, _) = fence_lost(true, false).await;
    assert!(served && after < Duration::from_millis(500), "served after {after:?}");
}

#[tokio::test]
async fn an_evicted_fence_does_not_lose_the_lock() {
    let (_, _, renewed) = fence_lost(false, false).await;
    assert!(matches!(renewed[0], Ok(Renewal::Renewed(_))), "{renewed:?}");
}

#[tokio::test]
async fn with_an_intact_fence_the_handoff_is_immediate() {
    let (served, after, renewed) = fence_lost(false, true).await;
    assert!(served && after < Duration::from_millis(500), "served after {after:?}");
    assert!(matches!(renewed[0], Ok(Renewal::Renewed(_))), "{renewed:?}");
}

#[tokio::test]
async fn a_fence_is_kept_for_the_configured_days() {
    let server = RedisServer::start();
    let day = 86_400_000_u64;
    for (options, days) in [("", 7), ("?fence_idle=2", 2), ("?fence_idle=3650", 3650)] {
        let locks = lockset::Lockset::connect(&format!("{}{options}", server.url())).await.unwrap();
        let name = format!("n{days}");
        let left = || -> u64 {
            server.ask(&["PTTL", &format!("{{lockset:{name}}}:fence")]).parse().unwrap()
        };
        for _ in 0..2 {
            let guard = locks.mutex(name.as_str()).unwrap().lock().await.unwrap();
            assert!(left() > (days - 1) * day && left() <= days * day, "{} of {days} days", left());
            guard.release().await.unwrap();
        }
        assert!(left() > (days - 1) * day && left() <= days * day, "{} of {days} days", left());
    }
    for wrong in ["0", "3651", "7d", "-1", ""] {
        let url = format!("{}?fence_idle={wrong}", server.url());
        let refused = lockset::Lockset::connect(&url).await.unwrap_err();
        steps::assert_error(&refused, &["a number of days"], false);
    }
}

/// The clock cannot help, for it says what it said an hour ago: tokens grow by what was written.
#[tokio::test(flavor = "multi_thread")]
async fn tokens_grow_over_a_restart_although_the_clock_goes_back() {
    let skew = ClockSkew::new();
    let server = RedisServer::start_skewed(&skew, DURABLE);
    let time = || server.ask(&["TIME"]).lines().next().unwrap().parse::<u64>().unwrap();
    let ours = steps::client(&server.url(), TTL).await;
    let kept = steps::lock(&ours, "kept").await;
    let released = steps::lock(&ours, "released").await;
    let (before, last) = (time(), released.token());
    released.release().await.unwrap();
    skew.set(-3_600_000);
    server.restart();
    assert!(time() < before - 3_500, "the clock went back: {} after {before}", time());
    let theirs = steps::client(&server.url(), TTL).await;
    for locks in [&theirs, &ours] {
        let guard = steps::lock(locks, "released").await;
        assert!(guard.token() > last, "{} after {last}", guard.token());
        guard.release().await.unwrap();
    }
    assert!(!steps::is_free(&theirs, "kept").await, "it was written down, too");
    let token = kept.token();
    kept.release().await.unwrap();
    assert!(steps::lock(&theirs, "kept").await.token() > token);
    // Where nothing was written, the clock of now is all there is.
    assert!(steps::lock(&theirs, "fresh").await.token() < last);
}

/// The same, as users see it.
#[tokio::test]
async fn releases_of_a_busy_process_report_success() {
    let server = RedisServer::start();
    let builder = || lockset::Lockset::builder(&server.url()).ttl(TTL);
    let (ours, theirs) = (builder().connect().await.unwrap(), builder().connect().await.unwrap());
    let _busy = theirs.mutex("busy").unwrap().lock().await.unwrap();
    let until = Instant::now() + Duration::from_secs(3);
    let mut tasks = Vec::new();
    for task in 0..24 {
        let mutex = ours.mutex(format!("n{}", task % 8).as_str()).unwrap();
        tasks.push(tokio::spawn(async move {
            let (mut good, mut bad) = (0, 0);
            while Instant::now() < until {
                let guard = mutex.lock().await.unwrap();
                match guard.release().await {
                    Ok(()) => good += 1,
                    Err(_) => bad += 1,
                }
            }
            (good, bad)
        }));
    }
    let busy = ours.mutex("busy").unwrap();
    while Instant::now() < until {
        let _ = busy.lock_within(Duration::from_millis(20)).await;
    }
    let (mut good, mut bad) = (0, 0);
    for task in tasks {
        let told = task.await.unwrap();
        (good, bad) = (good + told.0, bad + told.1);
    }
    assert_eq!(bad, 0, "of {good}");
}

/// What one marked name costs the others in a contenders.
#[tokio::test]
async fn one_name_with_a_tombstone_does_not_slow_a_batch() {
    let server = RedisServer::start();
    let redis = engine(&server.url()).await;
    for marked in [false, true] {
        if marked {
            redis.withdraw(&claim(&format!("n{marked}/7"))).await.unwrap();
        }
        let claims: Vec<Claim> = (0..64).map(|n| claim(&format!("n{marked}/{n}"))).collect();
        let before = server.calls("evalsha");
        let all = claims.iter().map(|claim| redis.acquire(claim, Wait::No));
        futures_util::future::join_all(all).await;
        let scripts = server.calls("evalsha") - before;
        assert!(
            (1..=8).contains(&scripts),
            "{scripts} scripts for 64 locks, one name marked: {marked}"
        );
    }
}

/// ExclusiveLock and in a contenders, above what the fence says and below it.
#[tokio::test]
async fn floors_are_exact_in_a_batch() {
    let server = RedisServer::start();
    let redis = engine(&server.url()).await;
    let far = Token::new(1 << 52);
    for round in [1, 2] {
        let claims: Vec<Claim> = (0..8_u64)
            .map(|place| {
                let floor = Some(Token::new(far.get() + place)).filter(|_| place % 4 != 3);
                Claim { floor, ..claim(&format!("n{place}")) }
            })
            .collect();
        let asked = claims.iter().map(|claim| redis.acquire(claim, Wait::No));
        let grants = futures_util::future::join_all(asked).await;
        for (claim, grant) in claims.iter().zip(grants) {
            let grant = grant.unwrap().granted().unwrap();
            match claim.floor {
                Some(floor) if round == 1 => assert_eq!(grant.token, floor),
                Some(floor) => assert_eq!(grant.token.get(), floor.get() + 1),
                None => assert!(grant.token < far, "{}", grant.token),
            }
            redis.release(claim, &grant, None).await.unwrap();
        }
    }
}

/// A claim was withdrawn on this name: others are not slower for it, and it is still refused.
#[tokio::test]
async fn a_tombstone_affects_its_claim_only() {
    let server = RedisServer::start();
    let redis = engine(&server.url()).await;
    let (first, withdrawn, other) = (claim("n"), claim("n"), claim("n"));
    // The first of a name finds no fence.
    let grant = redis.acquire(&first, Wait::No).await.unwrap().granted().unwrap();
    redis.release(&first, &grant, None).await.unwrap();
    redis.withdraw(&withdrawn).await.unwrap();
    let grant = redis.acquire(&other, Wait::No).await.unwrap().granted().unwrap();
    let value = server.ask(&["GET", "lockset:n"]);
    assert!(value.starts_with(&format!("{}::", other.id)), "not the usual way: {value}");
    redis.release(&other, &grant, None).await.unwrap();
    let refused = engine(&server.url()).await.acquire(&withdrawn, Wait::No).await;
    assert!(matches!(refused, Ok(Admission::Forgotten)), "{refused:?}");
    // Together with others it is refused too.
    let (first, free, late) = (claim("a"), claim("b"), engine(&server.url()).await);
    let (_, _, refused) = tokio::join!(
        late.acquire(&first, Wait::No),
        late.acquire(&free, Wait::No),
        late.acquire(&withdrawn, Wait::No),
    );
    assert!(matches!(refused, Ok(Admission::Forgotten)), "{refused:?}");
}

/// A foreign lock whose value is empty.
#[tokio::test]
async fn a_foreign_lock_with_an_empty_value_is_not_deleted() {
    let server = RedisServer::start();
    let redis = engine(&server.url()).await;
    let ours = claim("n");
    let held = redis.acquire(&ours, Wait::No).await.unwrap().granted().unwrap();
    let held = redis.raise(&ours, &held, Token::new(held.token.get() + 5)).await.unwrap();
    server.ask(&["DEL", "lockset:n"]);
    server.ask(&["SET", "lockset:n", "", "NX", "PX", "30000"]);
    let released = redis.release(&ours, &held, None).await;
    let exists = server.ask(&["EXISTS", "lockset:n"]);
    assert!(matches!(released, Err(Error::NotHeld { .. })) && exists.contains('1'));
}

/// Tokens at the end of what a double can count.
#[tokio::test]
async fn tokens_grow_or_are_refused_near_2_to_the_53() {
    let server = RedisServer::start();
    let redis = engine(&server.url()).await;
    let mut last = 0;
    for round in 0..4 {
        let floor = (round == 0).then(|| Token::new((1 << 53) - 1));
        let one = Claim { floor, ..claim("n") };
        let Ok(Admission::Granted(grant)) = redis.acquire(&one, Wait::No).await else { return };
        assert!(grant.token.get() > last, "{} after {last}", grant.token);
        last = grant.token.get();
        redis.release(&one, &grant, None).await.unwrap();
    }
}

/// A revoked lock that is downgraded.
#[tokio::test]
async fn a_downgrade_does_not_undo_a_break() {
    let server = RedisServer::start();
    let redis = engine(&server.url()).await;
    let ours = claim("n");
    let held = redis.acquire(&ours, Wait::No).await.unwrap().granted().unwrap();
    redis.force_release(&ours.name, Break::WhenLeaseEnds).await.unwrap();
    let refused = redis.renew(&[(&ours, &held)]).await.remove(0);
    assert!(matches!(refused, Ok(Renewal::LastLease)), "{refused:?}");
    let held = redis.amend(&ours, &held, Amend::Downgrade).await.unwrap();
    let refused = redis.renew(&[(&ours, &held)]).await.remove(0);
    assert!(matches!(refused, Ok(Renewal::LastLease)), "renewed although it was revoked");
}

/// A raise that is repeated because its answer was lost.
#[tokio::test]
async fn a_raise_may_be_repeated() {
    let server = RedisServer::start();
    let redis = engine(&server.url()).await;
    let ours = claim("n");
    let held = redis.acquire(&ours, Wait::No).await.unwrap().granted().unwrap();
    let to = Token::new(held.token.get() + 5);
    redis.raise(&ours, &held, to).await.unwrap();
    let again = redis.raise(&ours, &held, to).await;
    assert!(again.is_ok(), "{again:?}");
}

/// Names that are another name's companions.
#[tokio::test]
async fn a_name_that_collides_with_an_auxiliary_key_is_refused() {
    let server = RedisServer::start();
    for (prefix, name, beside) in [("", "x", "{x}:fence"), ("{app}:", "x", "{app}:x:fence")] {
        let options = RedisOptions {
            url: server.url().parse().unwrap(),
            prefix: prefix.into(),
            ..RedisOptions::default()
        };
        let redis = Redis::connect(options).await.unwrap();
        let refused = redis.acquire(&claim(beside), Wait::No).await;
        assert!(matches!(refused, Err(Error::Invalid { .. })), "{refused:?}");
        assert!(redis.acquire(&claim(name), Wait::No).await.unwrap().granted().is_some());
    }
}

#[tokio::test]
async fn a_prefix_with_a_vertical_bar_is_refused_or_works() {
    let server = RedisServer::start();
    let options = RedisOptions {
        url: server.url().parse().unwrap(),
        prefix: "a|b:".into(),
        ..RedisOptions::default()
    };
    let Ok(redis) = Redis::connect(options).await else { return };
    let ours = claim("n");
    let held = redis.acquire(&ours, Wait::No).await.unwrap().granted().unwrap();
    let next = claim("n");
    let clock = Clock::boot();
    let wait = Wait::Until(clock.now() + Duration::from_secs(1));
    let (waited, _) = tokio::join!(redis.acquire(&next, wait), async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        redis.release(&ours, &held, None).await
    });
    assert!(matches!(waited, Ok(Admission::Granted(_))), "{waited:?}");
}

/// The drift of a fixed lease that was handed over.
#[tokio::test]
async fn a_handed_over_fixed_lease_subtracts_its_whole_drift() {
    let server = RedisServer::start();
    let redis = engine(&server.url()).await;
    let long = Duration::from_secs(3600);
    let ours = claim("n");
    let held = redis.acquire(&ours, Wait::No).await.unwrap().granted().unwrap();
    let next = Claim { ttl: long, fixed: true, ..claim("n") };
    let clock = Clock::boot();
    let sent = clock.now();
    let (grant, _) = tokio::join!(redis.acquire(&next, Wait::Forever), async {
        while redis.inspect(&ours.name).await.unwrap().waiters.is_empty() {}
        redis.release(&ours, &held, None).await.unwrap()
    });
    let grant = grant.unwrap().granted().unwrap();
    let after_begin = grant.valid_until.saturating_duration_since(sent);
    assert!(after_begin <= long - lockset::engine::drift(long) + Duration::from_secs(5));
}

/// One frozen node of a cluster, waiters at another.
#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_node_does_not_lose_queue_entries_at_others() {
    assert_eq!(fewest_waiters(false).await, 1, "the control");
    assert_eq!(fewest_waiters(true).await, 1);
}

async fn fewest_waiters(freeze: bool) -> usize {
    let cluster = RedisCluster::start_with(0, &["--cluster-node-timeout", "60000"]);
    let redis = Arc::new(engine(&cluster.url()).await);
    // A queue entry lives half as long: longer than a busy machine lets a task wait for the
    // processor.
    let ttl = Duration::from_secs(2);
    let (first, second) = (0, cluster.another_master(0));
    let mut waiting = Vec::new();
    for node in [first, second] {
        let holder = Claim { ttl: Duration::from_secs(60), ..claim(&cluster.name_at(node)) };
        redis.acquire(&holder, Wait::No).await.unwrap().granted().unwrap();
        let next = Claim { ttl, ..claim(&cluster.name_at(node)) };
        let redis = redis.clone();
        waiting.push(tokio::spawn(async move { redis.acquire(&next, Wait::Forever).await }));
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(!waiting[0].is_finished() && !waiting[1].is_finished());
    if freeze {
        cluster.nodes()[second].signal(Signal::STOP);
    }
    // The heartbeat of another waiter finds that the entry is over, and removes it.
    let other = engine(&cluster.nodes()[first].url().replace("redis:", "redis+cluster:")).await;
    let name = cluster.name_at(first).parse().unwrap();
    let mut least = usize::MAX;
    for _ in 0..60 {
        least = least.min(other.inspect(&name).await.unwrap().waiters.len());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    cluster.nodes()[second].signal(Signal::CONT);
    least
}

/// One frozen node of a cluster, locks held at another.
#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_node_does_not_lose_locks_at_others() {
    for freeze in [false, true] {
        let cluster = RedisCluster::start_with(0, &["--cluster-node-timeout", "60000"]);
        let ttl = Duration::from_secs(4);
        let locks = lockset::Lockset::builder(&cluster.url()).ttl(ttl).connect().await.unwrap();
        let (first, second) = (0, cluster.another_master(0));
        let healthy = locks.mutex(cluster.name_at(first).as_str()).unwrap().lock().await.unwrap();
        let _frozen = locks.mutex(cluster.name_at(second).as_str()).unwrap().lock().await.unwrap();
        tokio::time::sleep(ttl).await;
        if freeze {
            cluster.nodes()[second].signal(Signal::STOP);
        }
        let lost = tokio::time::timeout(2 * ttl, healthy.lost()).await;
        cluster.nodes()[second].signal(Signal::CONT);
        assert!(lost.is_err(), "{lost:?}");
    }
}

/// A foreign key in a cluster.
#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_key_does_not_break_listing() {
    let cluster = RedisCluster::start();
    let redis = engine(&cluster.url()).await;
    let slot = cluster.slot_of("lockset:{}x");
    cluster.nodes()[cluster.owner(slot)].ask(&["SET", "lockset:{}x", "1"]);
    let listed = redis.list(&"".parse().unwrap()).await;
    assert!(listed.is_ok(), "{listed:?}");
}

/// A connection beside the main one that goes silent.
#[test]
fn a_silent_connection_of_another_runtime_is_closed() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let server = RedisServer::start();
    let proxy = Proxy::before(server.port());
    let redis = runtime.block_on(engine(&server.url_through(&proxy)));
    let here = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    here.block_on(async {
        for n in 0..80 {
            redis.acquire(&claim(&format!("n{n}")), Wait::No).await.unwrap().granted().unwrap();
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
    });
    assert_eq!(proxy.connections(), 2);
    proxy.hold_requests_of(1);
    let taken = here.block_on(async {
        tokio::time::timeout(Duration::from_secs(12), redis.acquire(&claim("x"), Wait::Forever))
            .await
    });
    runtime.block_on(async {
        redis.acquire(&claim("y"), Wait::No).await.unwrap().granted().unwrap();
    });
    assert!(taken.is_ok(), "no lock within 12 s while the server answers");
}

/// A request of the first holder that was not answered may arrive when the lock has gone on by a
/// ticket, whose new holder knows nothing of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_request_of_an_adopted_claim_acquires_nothing() {
    let server = RedisServer::start();
    let (ours, theirs) = (engine(&server.url()).await, engine(&server.url()).await);
    let [first, successor] =
        [claim("baton"), claim("baton")].map(|claim| Claim { detachable: true, ..claim });
    let grant = ours.acquire(&first, Wait::No).await.unwrap().granted().unwrap();
    let adopted = theirs.adopt(&first, &grant, &successor).await.unwrap();
    theirs.release(&successor, &adopted, None).await.unwrap();
    let late = ours.acquire(&first, Wait::No).await;
    assert!(matches!(late, Ok(Admission::Forgotten)), "it was taken without a caller: {late:?}");
    assert!(
        ours.acquire(&claim("baton"), Wait::No).await.unwrap().granted().is_some(),
        "it is free"
    );
}

/// The inbox of a holder is written with its lock. In a cluster it lies in a slot, which can move
/// as the lock's own can.
#[tokio::test(flavor = "multi_thread")]
async fn a_renewal_registers_the_inbox_of_its_client() {
    let server = RedisServer::start();
    let (ours, theirs) = (engine(&server.url()).await, engine(&server.url()).await);
    let mut signals = theirs.events();
    for claim in [claim("own"), Claim { mode: Mode::Shared, ..claim("shared") }] {
        let grant = ours.acquire(&claim, Wait::No).await.unwrap().granted().unwrap();
        theirs.renew(&[(&claim, &grant)]).await.remove(0).unwrap().renewed().unwrap();
        ours.force_release(&claim.name, Break::Now).await.unwrap();
        let told = tokio::time::timeout(Duration::from_secs(5), signals.next()).await;
        let told = told.unwrap_or_else(|_| panic!("`{}` was not told", claim.name));
        let Some(engine::Event::Lost(id, LossReason::Broken)) = told else {
            panic!("told {told:?}")
        };
        assert_eq!(id, claim.id);
    }
}
