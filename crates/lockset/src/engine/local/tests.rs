//! The engine between clients of one process, and against the reference engine.

use std::time::Instant;

use futures_util::FutureExt;

use super::*;
use crate::clock::Moment;
use crate::engine::memory::Memory;
use crate::engine::{Cell, Mode};

/// Well below the recheck: a waiter that is this fast got a message.
const AT_ONCE: Duration = Duration::from_millis(500);
const PERMITS: Mode = Mode::Permits { take: 2, limit: 3 };

/// Two clients of one new file.
fn clients() -> (tempfile::TempDir, Arc<Local>, Arc<Local>) {
    let folder = tempfile::tempdir().unwrap();
    let path = Some(folder.path().join("locks.db"));
    let options = LocalOptions { path, ..LocalOptions::default() };
    let open = || Arc::new(Local::open(options.clone()).unwrap());
    (folder, open(), open())
}

fn claim(name: &str, mode: Mode) -> Claim {
    Claim { mode, ..Claim::plain(name, Duration::from_secs(60)) }
}

fn exclusive() -> Claim {
    claim("a", Mode::Exclusive)
}

async fn hold(engine: &Local, claim: &Claim) -> Grant {
    engine.acquire(claim, Wait::No).await.unwrap().granted().expect("it is admitted")
}

/// Queues without waiting any longer.
macro_rules! queued {
    ($acquire:ident = $future:expr) => {
        let $acquire = $future;
        tokio::pin!($acquire);
        assert!(futures_util::poll!(&mut $acquire).is_pending());
    };
}

async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(AT_ONCE, future).await.expect("it comes without polling")
}

async fn state(engine: &Local, name: &str) -> LockState {
    engine.inspect(&name.parse().unwrap()).await.unwrap()
}

fn watch(engine: &Arc<Local>, scope: Scope) -> BoxStream<'static, Result<LockState>> {
    let engine: Arc<dyn Engine> = engine.clone();
    crate::engine::watch(&engine, Clock::boot(), scope)
}

#[tokio::test]
async fn a_release_hands_over_in_order_and_without_polling() {
    let (_folder, one, two) = clients();
    let (first, second, third) = (exclusive(), exclusive(), exclusive());
    let grant = hold(&one, &first).await;
    queued!(waits = two.acquire(&second, Wait::Forever));
    queued!(waits_too = one.acquire(&third, Wait::Forever));
    one.release(&first, &grant, None).await.unwrap();
    let next = soon(waits).await.unwrap().granted().unwrap();
    assert!(next.token > grant.token);
    assert!(futures_util::poll!(&mut waits_too).is_pending());
    two.release(&second, &next, None).await.unwrap();
    assert!(soon(waits_too).await.unwrap().granted().unwrap().token > next.token);
}

#[tokio::test]
async fn a_lapsed_lease_is_succeeded_when_it_ends_and_not_before() {
    let (_folder, one, two) = clients();
    let short = Claim { ttl: Duration::from_millis(200), ..exclusive() };
    let before = Clock::boot().now();
    let grant = hold(&one, &short).await;
    assert!(grant.valid_until < before + short.ttl + Duration::from_millis(50));
    let next = exclusive();
    assert!(two.acquire(&next, Wait::Forever).await.unwrap().granted().is_some());
    assert!(Clock::boot().now() >= before + short.ttl);
    assert!(Clock::boot().now() > grant.valid_until);
    let renewed = one.renew(&[(&short, &grant)]).await.remove(0).unwrap();
    assert_eq!(renewed, Renewal::Lost(LossReason::Forgotten));
    let late = one.release(&short, &grant, None).await;
    assert!(matches!(late, Err(Error::NotHeld { .. })));
    assert_eq!(state(&one, "a").await.holders[0].claim, Some(next.id));
}

#[tokio::test]
async fn a_waiter_that_gives_up_leaves_nothing_and_lets_the_next_pass() {
    let (_folder, one, two) = clients();
    let (reader, writer, last) = (claim("a", Mode::Shared), exclusive(), claim("a", Mode::Shared));
    hold(&one, &reader).await;
    let deadline = Clock::boot().now() + Duration::from_millis(100);
    queued!(gives_up = two.acquire(&writer, Wait::Until(deadline)));
    queued!(waits = one.acquire(&last, Wait::Forever));
    let (gave_up, passed) = tokio::join!(soon(gives_up), soon(waits));
    assert!(gave_up.unwrap().granted().is_none());
    assert!(passed.unwrap().granted().is_some());
    assert!(state(&one, "a").await.waiters.is_empty());
}

#[tokio::test]
async fn a_withdrawn_claim_stays_withdrawn() {
    let (_folder, one, two) = clients();
    let (held, waiting, next) = (exclusive(), exclusive(), exclusive());
    hold(&one, &held).await;
    {
        queued!(_cancelled = one.acquire(&waiting, Wait::Forever));
    }
    queued!(waits = two.acquire(&next, Wait::Forever));
    one.withdraw(&waiting).await.unwrap();
    one.withdraw(&waiting).await.unwrap();
    let again = one.acquire(&waiting, Wait::Forever).await.unwrap();
    assert_eq!(again, Admission::Forgotten);
    one.withdraw(&held).await.unwrap();
    assert!(soon(waits).await.unwrap().granted().is_some());
}

#[tokio::test]
async fn a_late_transaction_does_not_bring_a_withdrawn_claim_back() {
    let (folder, one, two) = clients();
    let busy = rusqlite::Connection::open(folder.path().join("locks.db")).unwrap();
    busy.execute_batch("BEGIN IMMEDIATE").unwrap();
    let claim = exclusive();
    {
        // The file is busy, so this goes on on another thread after it is dropped.
        queued!(_cancelled = one.acquire(&claim, Wait::Forever));
    }
    queued!(withdraws = one.withdraw(&claim));
    busy.execute_batch("COMMIT").unwrap();
    withdraws.await.unwrap();
    // Both transactions are over, in either order, once this is the only reference to the store.
    while Arc::strong_count(&one.store) > 1 {
        tokio::task::yield_now().await;
    }
    hold(&two, &exclusive()).await;
}

#[tokio::test]
async fn more_permits_than_there_are_is_refused() {
    let (_folder, one, two) = clients();
    let greedy = claim("a", Mode::Permits { take: 4, limit: 3 });
    let refused = soon(one.acquire(&greedy, Wait::Forever)).await;
    assert!(matches!(refused, Err(Error::Invalid { .. })), "{refused:?}");
    let held = claim("a", PERMITS);
    let grant = hold(&one, &held).await;
    assert!(one.release(&held, &grant, Some(&greedy)).await.unwrap().is_none());
    hold(&two, &held).await;
}

#[tokio::test]
async fn a_busy_file_is_waited_for_and_then_reported() {
    let (folder, one, _two) = clients();
    let busy = rusqlite::Connection::open(folder.path().join("locks.db")).unwrap();
    busy.execute_batch("BEGIN IMMEDIATE").unwrap();
    let claim = exclusive();
    let deadline = Clock::boot().now() + Duration::from_millis(100);
    let error = one.acquire(&claim, Wait::Until(deadline)).await.unwrap_err();
    assert!(error.is_retryable() && error.to_string().contains("busy"), "{error}");
    queued!(waits = one.acquire(&claim, Wait::No));
    busy.execute_batch("COMMIT").unwrap();
    assert!(soon(waits).await.unwrap().granted().is_some());
}

#[tokio::test]
async fn the_holder_of_a_broken_lock_is_notified_at_once() {
    let (_folder, one, two) = clients();
    let held = exclusive();
    let grant = hold(&one, &held).await;
    let mut events = one.events();
    let broken = two.force_release(&held.name, Break::WhenLeaseEnds).await.unwrap();
    assert!(broken[0].revoked && broken[0].claim == Some(held.id));
    let told = soon(events.next()).await.unwrap();
    assert!(matches!(told, Event::LastLease(id) if id == held.id));
    let renewed = one.renew(&[(&held, &grant)]).await.remove(0).unwrap();
    assert_eq!(renewed, Renewal::LastLease);
    assert!(two.acquire(&exclusive(), Wait::No).await.unwrap().granted().is_none());
    two.force_release(&held.name, Break::Now).await.unwrap();
    let told = soon(events.next()).await.unwrap();
    assert!(matches!(told, Event::Lost(id, LossReason::Broken) if id == held.id));
    hold(&two, &exclusive()).await;
}

#[tokio::test]
async fn a_watch_sees_the_changes_of_others_until_it_is_dropped() {
    let (folder, one, two) = clients();
    let mut states = watch(&one, Scope::Prefix("jobs/".parse().unwrap()));
    assert!(states.next().now_or_never().is_none(), "there is nothing yet");
    hold(&two, &claim("other", Mode::Exclusive)).await;
    let held = claim("jobs/1", Mode::Exclusive);
    let grant = hold(&two, &held).await;
    let seen = soon(states.next()).await.unwrap().unwrap();
    assert_eq!((seen.name.as_str(), seen.holders.len()), ("jobs/1", 1));
    two.release(&held, &grant, None).await.unwrap();
    assert!(soon(states.next()).await.unwrap().unwrap().holders.is_empty());
    let file = rusqlite::Connection::open(folder.path().join("locks.db")).unwrap();
    let watchers = || file.query_row("SELECT count(*) FROM watcher", [], |row| row.get(0));
    assert_eq!(watchers(), Ok(1));
    drop(states);
    assert_eq!(watchers(), Ok(0));
    // A watch that ended without removing its row is forgotten when a message to it is refused.
    file.execute("INSERT INTO watcher (inbox, exact, scope) VALUES ('0a', 0, '')", []).unwrap();
    hold(&two, &held).await;
    assert_eq!(watchers(), Ok(0));
}

#[tokio::test]
async fn a_watch_finds_changes_without_messages() {
    let (folder, one, two) = clients();
    let name: Name = "jobs/1".parse().unwrap();
    let other = claim("jobs/2", Mode::Exclusive);
    hold(&two, &other).await;
    let soon = async |states: &mut BoxStream<'static, Result<LockState>>| {
        let next = tokio::time::timeout(2 * RECHECK, states.next()).await;
        next.expect("it looks by itself").unwrap().unwrap()
    };
    let mut all = watch(&one, Scope::Prefix("jobs/".parse().unwrap()));
    let mut exact = watch(&one, Scope::Name(name.clone()));
    assert_eq!(soon(&mut all).await.name, other.name);
    assert!(soon(&mut exact).await.cell.is_none());
    // Without these rows no messages are sent.
    let file = rusqlite::Connection::open(folder.path().join("locks.db")).unwrap();
    let lose_messages = || file.execute("DELETE FROM watcher", []).unwrap();
    assert_eq!(lose_messages(), 2);
    two.cell(&name, Version::ABSENT, Some(vec![1])).await.unwrap();
    for states in [&mut all, &mut exact] {
        let seen = soon(states).await;
        assert!(seen.name == name && seen.cell.is_some());
    }
    two.force_release(&other.name, Break::Now).await.unwrap();
    let seen = soon(&mut all).await;
    assert!(seen.name == other.name && seen.holders.is_empty());
    // Nothing changes any more, so nothing is reported.
    let quiet = futures_util::future::select(all.next(), exact.next());
    assert!(tokio::time::timeout(3 * RECHECK, quiet).await.is_err());
}

#[tokio::test]
async fn no_watch_leaves_anything_behind() {
    let (folder, one, two) = clients();
    let file = rusqlite::Connection::open(folder.path().join("locks.db")).unwrap();
    let watchers = || file.query_row("SELECT count(*) FROM watcher", [], |row| row.get(0));
    let watch_a = || watch(&one, Scope::Name("a".parse().unwrap()));
    let mut dropped = watch_a();
    dropped.next().await.unwrap().unwrap();
    file.execute_batch("BEGIN IMMEDIATE").unwrap();
    {
        // Its row is entered by another thread, once the file is free.
        let mut cancelled = watch_a();
        cancelled.next().await.unwrap().unwrap();
        assert!(cancelled.next().now_or_never().is_none());
    }
    drop(dropped);
    assert_eq!(watchers(), Ok(1), "the file is busy");
    file.execute_batch("COMMIT").unwrap();
    while Arc::strong_count(&one.store) > 1 {
        tokio::task::yield_now().await;
    }
    // The next transaction takes along what could not be removed.
    hold(&one, &exclusive()).await;
    assert_eq!(watchers(), Ok(0));
    let mut open = watch_a();
    open.next().await.unwrap().unwrap();
    file.execute_batch("BEGIN IMMEDIATE").unwrap();
    let close = one.close();
    tokio::pin!(close);
    assert!(futures_util::poll!(&mut close).is_pending(), "the file is busy");
    file.execute_batch("COMMIT").unwrap();
    close.await;
    assert_eq!(watchers(), Ok(0));
    assert!(open.next().await.is_none());
    let mut last = watch(&two, Scope::Prefix(Prefix::default()));
    last.next().await.unwrap().unwrap();
    drop(two);
    assert_eq!(watchers(), Ok(0));
}

#[tokio::test]
async fn versions_of_a_cell_never_return() {
    let (_folder, one, two) = clients();
    let name: Name = "latch".parse().unwrap();
    let Swap::Done(first) = one.cell(&name, Version::ABSENT, Some(vec![1])).await.unwrap() else {
        panic!("it was absent")
    };
    let found = two.cell(&name, Version::ABSENT, Some(vec![2])).await.unwrap();
    assert_eq!(found, Swap::Found(Cell { version: first, value: vec![1] }));
    let removed = two.cell(&name, first, None).await.unwrap();
    assert_eq!(removed, Swap::Done(Version::ABSENT));
    let again = one.cell(&name, Version::ABSENT, Some(vec![1])).await.unwrap();
    assert!(matches!(again, Swap::Done(version) if version > first));
}

#[tokio::test]
async fn idle_names_are_forgotten_and_used_ones_are_not() {
    let (folder, one, _two) = clients();
    let held = claim("held", Mode::Exclusive);
    hold(&one, &held).await;
    // This one gets no further request.
    let left = Claim { ttl: Duration::from_millis(1), ..claim("left", Mode::Exclusive) };
    hold(&one, &left).await;
    one.cell(&"cell".parse().unwrap(), Version::ABSENT, Some(vec![1])).await.unwrap();
    for name in ["idle", "own clock"] {
        let floor = (name == "own clock").then_some(Token::new(5));
        let claim = Claim { floor, ..claim(name, Mode::Exclusive) };
        let grant = hold(&one, &claim).await;
        one.release(&claim, &grant, None).await.unwrap();
    }
    let file = rusqlite::Connection::open(folder.path().join("locks.db")).unwrap();
    let old = 8 * 86_400 * 1_000_000i64;
    file.execute("UPDATE lock SET token = token - ?1 WHERE token > ?1", [old]).unwrap();
    file.execute("UPDATE lock SET version = version - ?1 WHERE version > 0", [old]).unwrap();
    // Far more new names than sweep once each: one in 64 does.
    for number in 0..2000 {
        let claim = claim(&format!("new/{number}"), Mode::Exclusive);
        let grant = hold(&one, &claim).await;
        one.release(&claim, &grant, None).await.unwrap();
    }
    let names = "SELECT group_concat(name ORDER BY name) FROM lock
                 WHERE seq = 0 AND name NOT LIKE 'new/%'";
    let names: String = file.query_row(names, [], |row| row.get(0)).unwrap();
    assert_eq!(names, "cell,held,own clock");
}

/// What both engines must agree on after each step.
fn facts(states: Vec<LockState>) -> Vec<String> {
    let state = |state: LockState| {
        let held = state.holders.iter().map(|h| (h.claim, h.token, h.mode, h.revoked));
        let waiting = state.waiters.iter().map(|w| (w.claim, w.mode));
        let (mut held, waiting) = (held.collect::<Vec<_>>(), waiting.collect::<Vec<_>>());
        held.sort_by_key(|(claim, token, ..)| (*token, *claim));
        format!("{} {held:?} {waiting:?} {:?}", state.name, state.fence)
    };
    states.into_iter().map(state).collect()
}

/// One step of a history, for either engine.
#[derive(Clone, Debug)]
enum Verb {
    Try,
    Queue,
    Release(Option<Claim>),
    Withdraw,
    Renew,
    Raise(u64),
    Downgrade,
    Break(Break),
}

async fn apply(
    engine: &dyn Engine,
    verb: &Verb,
    claim: &Claim,
    grant: Option<&Grant>,
) -> Result<Option<Grant>> {
    let none = Grant { token: Token::new(1), valid_until: Clock::boot().now(), key: vec![] };
    let grant = grant.unwrap_or(&none);
    match verb {
        Verb::Try => engine.acquire(claim, Wait::No).await?.into_inner(&claim.name),
        Verb::Queue => match engine.acquire(claim, Wait::Forever).now_or_never() {
            Some(admission) => admission?.into_inner(&claim.name),
            None => Ok(None),
        },
        Verb::Release(next) => engine.release(claim, grant, next.as_ref()).await,
        Verb::Withdraw => engine.withdraw(claim).await.map(|()| None),
        Verb::Renew => {
            let renewed = engine.renew(&[(claim, grant)]).await.remove(0)?;
            renewed.into_inner(&claim.name).map(Some)
        }
        Verb::Raise(by) => {
            let to = Token::new(grant.token.get() + by);
            engine.as_fenced_node().unwrap().raise(claim, grant, to).await.map(Some)
        }
        Verb::Downgrade => engine.amend(claim, grant, Amend::Downgrade).await.map(Some),
        Verb::Break(how) => engine.force_release(&claim.name, *how).await.map(|_| None),
    }
}

/// A claim of a history, and by which grants the two engines say it holds.
type Player = (Claim, Option<Grant>, Option<Grant>);

/// Every result is that of the reference engine, over long random histories.
#[tokio::test]
async fn it_behaves_like_the_reference_engine() {
    use rand::{RngExt, SeedableRng};
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let mut dice = rand::rngs::StdRng::seed_from_u64(seed);
    let (_folder, local, _two) = clients();
    let memory = Memory::new(Clock::boot());
    let modes = [Mode::Exclusive, Mode::Shared, PERMITS, Mode::Permits { take: 1, limit: 3 }];
    let mut players: Vec<Player> = Vec::new();
    let (mut granted, mut failed) = (0, 0);
    for step in 0..3000 {
        let name = ["a", "b"][dice.random_range(0..2)];
        let mode = modes[dice.random_range(0..if name == "a" { 2 } else { 4 })];
        // Tokens that do not depend on the clock.
        let floor = Some(Token::new(dice.random_range(0..50)));
        let fresh = Claim { floor, ..claim(name, mode) };
        let chosen = dice.random_range(0..=players.len());
        if chosen == players.len() {
            players.push((fresh.clone(), None, None));
        }
        let (claim, ours, theirs) = players[chosen].clone();
        let next = Claim { name: claim.name.clone(), ..fresh };
        let verb = match dice.random_range(0..16) {
            0..3 => Verb::Try,
            3..6 => Verb::Queue,
            6..8 => Verb::Release(None),
            8..10 => Verb::Release(Some(next.clone())),
            10 => Verb::Withdraw,
            11 | 12 => Verb::Renew,
            13 => Verb::Raise(dice.random_range(0..5)),
            14 if !matches!(claim.mode, Mode::Permits { .. }) => Verb::Downgrade,
            _ if dice.random_ratio(1, 2) => Verb::Break(Break::WhenLeaseEnds),
            _ => Verb::Break(Break::Now),
        };
        let ours = apply(&*local, &verb, &claim, ours.as_ref()).await;
        let theirs = apply(&memory, &verb, &claim, theirs.as_ref()).await;
        let plain = |outcome: &Result<Option<Grant>>| match outcome {
            Ok(grant) => Ok(grant.as_ref().map(|grant| grant.token)),
            Err(error) => Err(error.to_string()),
        };
        assert_eq!(plain(&ours), plain(&theirs), "step {step}: {verb:?} {claim:?}");
        let all = Prefix::default();
        let states = (local.list(&all).await.unwrap(), memory.list(&all).await.unwrap());
        assert_eq!(facts(states.0), facts(states.1), "step {step}: {verb:?} {claim:?}");
        failed += usize::from(ours.is_err());
        if let (Ok(Some(ours)), Ok(Some(theirs))) = (ours, theirs) {
            granted += 1;
            match verb {
                Verb::Release(_) => players.push((next, Some(ours), Some(theirs))),
                _ => players[chosen] = (claim, Some(ours), Some(theirs)),
            }
        } else if let Verb::Release(Some(_)) = verb {
            players.push((next, None, None));
        }
        if players.len() > 8 {
            let (gone, ..) = players.remove(0);
            local.withdraw(&gone).await.unwrap();
            memory.withdraw(&gone).await.unwrap();
        }
    }
    assert!(granted > 200 && failed > 200, "a history of too few events: {granted}, {failed}");
}

#[tokio::test]
async fn a_waiter_only_reads() {
    let (folder, one, two) = clients();
    let short = Claim { ttl: Duration::from_secs(2), ..exclusive() };
    let mut grant = hold(&one, &short).await;
    let (first, second) = (exclusive(), exclusive());
    queued!(waits = one.acquire(&first, Wait::Forever));
    queued!(waits_too = two.acquire(&second, Wait::Forever));
    let status = async |claim: &Claim, seq| {
        let claim = claim.clone();
        let peek = one.store.read(BUSY_TIMEOUT, move |txn| txn.peek(&claim, seq)).await.unwrap();
        match peek {
            Some(ClaimStatus::Waiting { check_at, .. }) => check_at,
            _ => panic!("it waits, and there is nothing to change"),
        }
    };
    let soon = Clock::boot().now() + short.ttl;
    assert!(status(&first, 2).await <= soon);
    assert_eq!(status(&second, 3).await, Moment::NEVER, "the first one looks for it");
    let file = rusqlite::Connection::open(folder.path().join("locks.db")).unwrap();
    for _ in 0..3 {
        grant = one.renew(&[(&short, &grant)]).await.remove(0).unwrap().renewed().unwrap();
        file.execute_batch("BEGIN IMMEDIATE").unwrap();
        // Past the lease that they saw, and past a recheck.
        let both = futures_util::future::select(&mut waits, &mut waits_too);
        assert!(tokio::time::timeout(Duration::from_millis(1500), both).await.is_err());
        for store in [&one.store, &two.store] {
            assert_eq!(Arc::strong_count(store), 1, "a waiter wants to write");
        }
        file.execute_batch("COMMIT").unwrap();
    }
}

#[tokio::test]
async fn a_short_lease_in_between_is_noticed_when_it_ends() {
    let (_folder, one, two) = clients();
    let (held, next) = (exclusive(), exclusive());
    let grant = hold(&one, &held).await;
    let short = Claim { ttl: Duration::from_millis(100), ..exclusive() };
    // Requested and then never polled.
    queued!(_waits = one.acquire(&short, Wait::Forever));
    queued!(waits = two.acquire(&next, Wait::Forever));
    one.release(&held, &grant, None).await.unwrap();
    assert!(soon(waits).await.unwrap().granted().is_some());
}

#[tokio::test]
async fn a_hand_over_wakes_one_however_many_wait() {
    let (_folder, one, two) = clients();
    let held = exclusive();
    let mut grant = hold(&one, &held).await;
    let (mut last, claims) = (held, (0..50).map(|_| exclusive()).collect::<Vec<_>>());
    let mut waiting = Vec::new();
    for claim in &claims {
        let mut acquire = two.acquire(claim, Wait::Forever);
        assert!(futures_util::poll!(&mut acquire).is_pending());
        waiting.push(acquire);
    }
    let started = Instant::now();
    for (claim, acquire) in claims.iter().zip(waiting) {
        one.release(&last, &grant, None).await.unwrap();
        grant = soon(acquire).await.unwrap().granted().unwrap();
        last = claim.clone();
    }
    assert!(started.elapsed() < AT_ONCE, "{:?}", started.elapsed());
}
