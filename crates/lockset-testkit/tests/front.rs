//! What the front promises whatever the engine: guards that know, closings that finish, nothing
//! that leaks. Each of these was once broken.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_core::stream::BoxStream;
use futures_util::StreamExt;
use lockset::clock::Clock;
use lockset::engine::memory::Memory;
use lockset::engine::{Claim, Engine, Event, Grant, Hint, Renewal, Scope, Swap, Version};
use lockset::fence::FencingToken;
use lockset::{
    Break, Error, Guard, LockOptions, LockState, Lockset, LossReason, Name, State, Ticket, Token,
};
use lockset_testkit::layer::{Layer, Layered};

const TTL: Duration = Duration::from_secs(30);

fn memory() -> (Arc<Memory>, Lockset) {
    let engine = Arc::new(Memory::new(Clock::tokio()));
    let locks = Lockset::with_engine(engine.clone()).unwrap();
    (engine, locks)
}

fn another(engine: &Memory) -> Lockset {
    Lockset::with_engine(Arc::new(engine.another_client())).unwrap()
}

fn unreachable() -> Error {
    let what = "the test says so".to_owned();
    Error::Unreachable { engine: "test", what, retryable: true, source: None }
}

/// Neither releases nor withdrawals are answered; everything else is.
#[derive(Debug)]
struct NoWayBack(Arc<dyn Engine>);

#[async_trait]
impl Layer for NoWayBack {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn release(
        &self,
        _: &Claim,
        _: &Grant,
        _: Option<&Claim>,
    ) -> lockset::Result<Option<Grant>> {
        Err(unreachable())
    }

    async fn withdraw(&self, _: &Claim) -> lockset::Result<()> {
        Err(unreachable())
    }
}

/// Nothing is told without being asked.
#[derive(Debug)]
struct Silent(Arc<dyn Engine>);

impl Layer for Silent {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    fn events(&self) -> BoxStream<'static, Event> {
        Box::pin(futures_util::stream::pending())
    }
}

/// A release takes a while.
#[derive(Debug)]
struct SlowRelease(Arc<dyn Engine>);

#[async_trait]
impl Layer for SlowRelease {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> lockset::Result<Option<Grant>> {
        tokio::time::sleep(Duration::from_secs(3)).await;
        self.0.release(claim, grant, next).await
    }
}

/// Renewals take a while.
#[derive(Debug)]
struct SlowRenewal(Arc<dyn Engine>);

#[async_trait]
impl Layer for SlowRenewal {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<lockset::Result<Renewal>> {
        tokio::time::sleep(Duration::from_millis(100)).await;
        self.0.renew(batch).await
    }
}

/// If both had a guard, the one that is not kept would release the lock when it ends.
#[tokio::test(start_paused = true)]
async fn a_ticket_attached_twice_concurrently_is_attached_once() {
    let slow = Layered(SlowRenewal(Arc::new(Memory::new(Clock::tokio()))));
    let locks = Lockset::with_engine(Arc::new(slow)).unwrap();
    let options = LockOptions::default().ttl(TTL).detachable();
    let mutex = locks.mutex("m").unwrap().with(options);
    let ticket = mutex.lock().await.unwrap().detach().await.unwrap();
    let (first, second) = tokio::join!(locks.attach(&ticket), locks.attach(&ticket));
    assert!(matches!(second, Err(Error::Lost { .. })), "{second:?}");
    let first = first.unwrap();
    tokio::time::sleep(TTL * 3).await;
    assert_eq!(first.state(), State::Held);
}

/// The first renewal is answered late, all others at once.
#[derive(Debug)]
struct SlowFirstRenewal(Arc<dyn Engine>, AtomicBool);

#[async_trait]
impl Layer for SlowFirstRenewal {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<lockset::Result<Renewal>> {
        let answers = self.0.renew(batch).await;
        if !self.1.swap(true, Ordering::Relaxed) {
            tokio::time::sleep(TTL / 8).await;
        }
        answers
    }
}

/// The answer to a renewal that was under way when the lock was detached must not act on the hold
/// of the client that attached it again: that one would never be renewed.
#[tokio::test(start_paused = true)]
async fn a_late_renewal_reply_does_not_affect_a_reattached_lock() {
    let slow = SlowFirstRenewal(Arc::new(Memory::new(Clock::tokio())), AtomicBool::new(false));
    let locks = Lockset::with_engine(Arc::new(Layered(slow))).unwrap();
    let options = LockOptions::default().ttl(TTL).detachable();
    let guard = locks.mutex("m").unwrap().with(options).lock().await.unwrap();
    tokio::time::sleep(TTL / 3 + TTL / 100).await;
    let ticket = guard.detach().await.unwrap();
    let guard = locks.attach(&ticket).await.unwrap();
    tokio::time::sleep(TTL * 3).await;
    assert_eq!(guard.state(), State::Held, "it was not renewed");
    locks.close().await.unwrap();
    assert_eq!(guard.state(), State::Lost(LossReason::ClientClosed));
}

#[tokio::test(start_paused = true)]
async fn a_ticket_with_an_absurd_ttl_is_refused_and_harmless() {
    let (_, locks) = memory();
    let other = locks.mutex("other").unwrap().lock().await.unwrap();
    let options = LockOptions::default().ttl(TTL).detachable();
    let mutex = locks.mutex("m").unwrap().with(options);
    let ticket = mutex.lock().await.unwrap().detach().await.unwrap().to_string();
    let absurd = ticket.replace("\"secs\":30", "\"secs\":18446744073709551615");
    assert_ne!(ticket, absurd);
    let absurd: Ticket = absurd.parse().unwrap();
    assert!(matches!(locks.attach(&absurd).await, Err(Error::Invalid { .. })));
    tokio::time::sleep(TTL * 3).await;
    assert_eq!(other.state(), State::Held);
    locks.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_fixed_lease_notices_a_forced_release_without_events() {
    let memory = Arc::new(Memory::new(Clock::tokio()));
    let silent = Layered(Silent(memory.clone()));
    let locks = Lockset::with_engine(Arc::new(silent)).unwrap();
    let fixed = LockOptions::default().ttl(TTL).no_renewal();
    let guard = locks.mutex("m").unwrap().with(fixed).lock().await.unwrap();
    locks.force_release("m", Break::Now).await.unwrap();
    let told = tokio::time::timeout(TTL / 3 + Duration::from_secs(1), guard.lost()).await;
    assert_eq!(told, Ok(LossReason::Forgotten));
}

/// Fails to look a name up while it is told to.
#[derive(Debug)]
struct Blind(Arc<dyn Engine>, Arc<AtomicBool>);

#[async_trait]
impl Layer for Blind {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.0
    }

    async fn inspect(&self, name: &Name) -> lockset::Result<LockState> {
        match self.1.load(Ordering::Relaxed) {
            true => Err(unreachable()),
            false => self.0.inspect(name).await,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_uncertain_fixed_lease_can_be_confirmed_again() {
    let blind = Arc::new(AtomicBool::new(true));
    let engine = Layered(Blind(Arc::new(Memory::new(Clock::tokio())), blind.clone()));
    let locks = Lockset::with_engine(Arc::new(engine)).unwrap();
    let fixed = LockOptions::default().ttl(TTL).no_renewal();
    let guard = locks.mutex("m").unwrap().with(fixed).lock().await.unwrap();
    assert!(guard.confirm().await.is_err());
    assert_eq!(guard.state(), State::Uncertain);
    blind.store(false, Ordering::Relaxed);
    guard.confirm().await.unwrap();
    assert_eq!(guard.state(), State::Held);
    // One question that is not answered does not make it unreachable.
    blind.store(true, Ordering::Relaxed);
    let (confirmed, ()) = tokio::join!(guard.confirm(), async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        blind.store(false, Ordering::Relaxed);
    });
    confirmed.unwrap();
    assert_eq!(guard.lost().await, LossReason::MaxHold);
}

#[tokio::test]
async fn run_reports_a_loss_although_the_work_finished() {
    let locks = Lockset::connect("memory:").await.unwrap();
    let short = LockOptions::default().ttl(Duration::from_millis(100)).no_renewal();
    let guard = locks.mutex("m").unwrap().with(short.clone()).lock().await.unwrap();
    let blocking = async { std::thread::sleep(Duration::from_millis(300)) };
    assert!(matches!(guard.run(blocking).await, Err(Error::Lost { .. })));

    let several = lockset::all([locks.mutex("n").unwrap().with(short)]).unwrap();
    let guards = several.lock().await.unwrap();
    let blocking = async { std::thread::sleep(Duration::from_millis(300)) };
    assert!(matches!(guards.run(blocking).await, Err(Error::Lost { .. })));
}

#[tokio::test(start_paused = true)]
async fn several_locks_are_never_returned_with_a_lost_one() {
    let (engine, locks) = memory();
    let fixed = LockOptions::default().ttl(Duration::from_secs(10)).no_renewal();
    let a = locks.mutex("a").unwrap().with(fixed);
    let busy = another(&engine).mutex("b").unwrap().lock().await.unwrap();
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_secs(15)).await;
        busy.release().await.unwrap();
    });
    let both = lockset::all([a, locks.mutex("b").unwrap()]).unwrap().lock().await.unwrap();
    assert_eq!(both.state(), State::Held);
}

#[test]
fn a_connection_that_fails_leaves_no_thread_behind() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let connect = || runtime.block_on(Lockset::connect("nonsense")).unwrap_err();
    connect();
    let before = threads();
    for _ in 0..50 {
        connect();
    }
    let began = std::time::Instant::now();
    while threads() > before + 2 {
        assert!(began.elapsed() < Duration::from_secs(10), "{} threads", threads());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[tokio::test(start_paused = true)]
async fn close_waits_for_a_release_in_progress() {
    let memory = Arc::new(Memory::new(Clock::tokio()));
    let stranger = another(&memory);
    let slow = Layered(SlowRelease(memory));
    let locks = Lockset::with_engine(Arc::new(slow)).unwrap();
    let guard = locks.mutex("m").unwrap().lock().await.unwrap();
    let release = tokio::spawn(guard.release());
    tokio::task::yield_now().await;
    locks.close().await.unwrap();
    assert!(stranger.mutex("m").unwrap().try_lock().await.unwrap().is_some());
    release.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_second_close_waits_for_the_first() {
    let memory = Arc::new(Memory::new(Clock::tokio()));
    let stranger = another(&memory);
    let slow = Layered(SlowRelease(memory));
    let locks = Lockset::with_engine(Arc::new(slow)).unwrap();
    let guard = locks.mutex("m").unwrap().lock().await.unwrap();
    let cut_short = tokio::time::timeout(Duration::from_millis(1), locks.close()).await;
    assert!(cut_short.is_err());
    locks.close().await.unwrap();
    assert!(stranger.mutex("m").unwrap().try_lock().await.unwrap().is_some());
    assert_eq!(guard.state(), State::Lost(LossReason::ClientClosed));
}

#[tokio::test(start_paused = true)]
async fn close_ends_although_the_engine_does_not_respond() {
    let memory = Arc::new(Memory::new(Clock::tokio()));
    let deaf = Layered(NoWayBack(memory));
    let locks = Lockset::with_engine(Arc::new(deaf)).unwrap();
    let hour = LockOptions::default().ttl(Duration::from_secs(3600));
    let _guard = locks.mutex("m").unwrap().with(hour).lock().await.unwrap();
    let began = tokio::time::Instant::now();
    assert!(matches!(locks.close().await, Err(Error::Unreachable { .. })));
    assert!(began.elapsed() < Duration::from_secs(11), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn close_ends_waits_at_latches_and_barriers() {
    let (engine, locks) = memory();
    let (latch, barrier) = (locks.latch("l", 1).unwrap(), locks.barrier("b", 2).unwrap());
    let waits = tokio::spawn(async move { latch.wait().await });
    let party = tokio::spawn(async move { barrier.wait().await });
    tokio::time::sleep(Duration::from_secs(1)).await;
    let other = another(&engine).barrier("b", 2).unwrap();
    assert_eq!(other.waiting().await.unwrap(), 1);
    locks.close().await.unwrap();
    assert!(matches!(waits.await.unwrap(), Err(Error::Closed)));
    assert!(matches!(party.await.unwrap(), Err(Error::Closed)));
    assert_eq!(other.waiting().await.unwrap(), 0, "its party left");
}

/// A waiter at a barrier leaves it first; but its future may never be polled again.
#[tokio::test(start_paused = true)]
async fn close_releases_although_a_barrier_future_is_never_polled() {
    let (engine, locks) = memory();
    let barrier = locks.barrier("b", 2).unwrap();
    let mut resting = Box::pin(barrier.wait());
    assert!(futures_util::poll!(resting.as_mut()).is_pending());
    let _guard = locks.mutex("m").unwrap().lock().await.unwrap();
    let began = tokio::time::Instant::now();
    let told = locks.close().await.unwrap_err().to_string();
    assert!(told.contains("barrier"), "its party stays counted: {told}");
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    let stranger = another(&engine);
    assert!(stranger.mutex("m").unwrap().try_lock().await.unwrap().is_some());
}

#[test]
fn items_of_a_blocking_watch_outlive_its_client() {
    let mut items = {
        let locks = lockset::blocking::Lockset::connect("memory:").unwrap();
        locks.watch_name("m").unwrap()
    };
    assert!(items.next().unwrap().is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_slept_through_its_grant_is_granted_again() {
    let (engine, locks) = memory();
    let first = another(&engine).mutex("m").unwrap().lock().await.unwrap();
    let mutex = locks.mutex("m").unwrap();
    let mut waiting = Box::pin(mutex.lock());
    assert!(futures_util::poll!(&mut waiting).is_pending());
    first.release().await.unwrap();
    // Granted, but not polled for longer than the lease lasts.
    tokio::time::sleep(TTL * 2).await;
    assert_eq!(waiting.await.unwrap().state(), State::Held);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_becomes_first_is_served_in_time() {
    let (engine, locks) = memory();
    let options = LockOptions::default().ttl(TTL).detachable();
    let held = locks.mutex("m").unwrap().with(options).lock().await.unwrap();
    drop(held.detach().await.unwrap());
    let began = tokio::time::Instant::now();
    let (one, two) = (another(&engine).mutex("m").unwrap(), another(&engine).mutex("m").unwrap());
    let cancelled = tokio::spawn(async move { one.lock().await });
    tokio::time::sleep(Duration::from_secs(29)).await;
    let served = tokio::spawn(async move { two.lock().await });
    tokio::time::sleep(Duration::from_millis(500)).await;
    cancelled.abort();
    let guard = served.await.unwrap().unwrap();
    assert!(began.elapsed() < TTL + Duration::from_secs(1), "{:?}", began.elapsed());
    drop(guard);
}

#[tokio::test(start_paused = true)]
async fn inspecting_a_lock_leaks_nothing() {
    let (_, locks) = memory();
    let _guard = locks.mutex("m").unwrap().lock().await.unwrap();
    let resident = || {
        let status = std::fs::read_to_string("/proc/self/statm").unwrap();
        status.split(' ').nth(1).unwrap().parse::<u64>().unwrap()
    };
    for _ in 0..1_000 {
        locks.inspect("m").await.unwrap();
    }
    let before = resident();
    for _ in 0..50_000 {
        locks.inspect("m").await.unwrap();
        drop(locks.watch_name("m").unwrap());
    }
    assert!(resident() < before + 2_000, "pages: {before} before, {} after", resident());
}

/// Changes of cells are made, but while `lost` is set no reply says so; and a watch ends with an
/// error after what it tells first.
#[derive(Debug)]
struct LosesAnswers {
    inner: Arc<dyn Engine>,
    lost: Arc<AtomicBool>,
}

#[async_trait]
impl Layer for LosesAnswers {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.inner
    }

    fn hints(&self, _: &Scope) -> BoxStream<'static, lockset::Result<Hint>> {
        futures_util::stream::once(async { Err(unreachable()) }).boxed()
    }

    async fn cell(
        &self,
        name: &Name,
        expect: Version,
        value: Option<Vec<u8>>,
    ) -> lockset::Result<Swap> {
        let swap = self.inner.cell(name, expect, value).await?;
        match self.lost.load(Ordering::Relaxed) {
            true => Err(unreachable()),
            false => Ok(swap),
        }
    }
}

fn losing_answers() -> (Lockset, Arc<AtomicBool>) {
    let lost = Arc::new(AtomicBool::new(true));
    let inner = Arc::new(Memory::new(Clock::tokio()));
    let engine = Layered(LosesAnswers { inner, lost: lost.clone() });
    (Lockset::with_engine(Arc::new(engine)).unwrap(), lost)
}

#[tokio::test(start_paused = true)]
async fn a_count_down_with_a_lost_reply_counts_once() {
    let (locks, lost) = losing_answers();
    let latch = locks.latch("start", 9).unwrap();
    // Recognised when it is repeated.
    assert_eq!(latch.count_down().await.unwrap(), 8);
    assert_eq!(latch.count_down().await.unwrap(), 7);
    lost.store(false, Ordering::Relaxed);
    assert_eq!(latch.remaining().await.unwrap(), 7);
    latch.clear().await.unwrap();
    assert_eq!(latch.remaining().await.unwrap(), 9);
}

/// Reads nothing while `down` is set.
#[derive(Debug)]
struct Down {
    inner: Arc<dyn Engine>,
    down: Arc<AtomicBool>,
}

#[async_trait]
impl Layer for Down {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.inner
    }

    async fn inspect(&self, name: &Name) -> lockset::Result<LockState> {
        match self.down.load(Ordering::Relaxed) {
            true => Err(unreachable()),
            false => self.inner.inspect(name).await,
        }
    }

    async fn cell(
        &self,
        name: &Name,
        expect: Version,
        value: Option<Vec<u8>>,
    ) -> lockset::Result<Swap> {
        // The last thing that is done before it is down, without a reply.
        self.inner.cell(name, expect, value).await?;
        self.down.store(true, Ordering::Relaxed);
        Err(unreachable())
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_or_cancelled_count_down_is_completed_by_the_next_call() {
    let down = Arc::new(AtomicBool::new(false));
    let memory = Arc::new(Memory::new(Clock::tokio()));
    let engine = Layered(Down { inner: memory.clone(), down: down.clone() });
    let locks = Lockset::with_engine(Arc::new(engine)).unwrap();
    let latch = locks.latch("start", 3).unwrap();
    let failed = latch.count_down().await.unwrap_err();
    assert!(failed.is_retryable(), "{failed}");
    assert!(tokio::time::timeout(TTL / 100, latch.count_down()).await.is_err(), "it is down");
    down.store(false, Ordering::Relaxed);
    // A clone is the same latch.
    assert_eq!(latch.clone().count_down().await.unwrap(), 2, "counted twice");
    assert_eq!(another(&memory).latch("start", 3).unwrap().remaining().await.unwrap(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_wait_continues_when_its_watch_ends() {
    let (locks, lost) = losing_answers();
    lost.store(false, Ordering::Relaxed);
    let (latch, barrier) = (locks.latch("start", 1).unwrap(), locks.barrier("phase", 2).unwrap());
    let party = locks.barrier("phase", 2).unwrap();
    let waiting = tokio::spawn({
        let latch = latch.clone();
        async move { latch.wait().await }
    });
    let arrived = tokio::spawn(async move { party.wait().await });
    tokio::time::sleep(TTL).await;
    latch.count_down().await.unwrap();
    waiting.await.unwrap().unwrap();
    assert!(barrier.wait().await.unwrap(), "the other one stayed");
    assert!(!arrived.await.unwrap().unwrap());
}

#[tokio::test(start_paused = true)]
async fn options_that_the_engine_cannot_keep_are_reported_when_locking() {
    let (_, locks) = memory();
    let endless = LockOptions::default().ttl(Duration::MAX);
    let mutex = locks.mutex("m").unwrap().with(endless.clone());
    assert_eq!(mutex.name().as_str(), "m");
    assert!(matches!(mutex.lock().await, Err(Error::Invalid { what: "ttl", .. })));
    assert!(matches!(mutex.try_lock().await, Err(Error::Invalid { what: "ttl", .. })));
    let readers = locks.rwlock("r").unwrap().with(endless);
    assert!(matches!(readers.read().await, Err(Error::Invalid { .. })));
    let usable = mutex.with(LockOptions::default());
    usable.lock().await.unwrap().release().await.unwrap();
}

/// The token of the timeout's holder.
fn holder_token<T>(outcome: Result<T, Error>) -> Option<Token> {
    match outcome {
        Err(Error::Timeout { holder: Some(holder), .. }) => holder.token,
        _ => None,
    }
}

/// Users must not meet two tokens of one grant: a resource would reject the lower one.
#[tokio::test]
async fn every_public_place_shows_tokens_with_the_token_base() {
    const BASE: u64 = 1_000_000_000_000_000;
    const PATIENCE: Duration = Duration::from_millis(20);
    let raw = Lockset::connect("memory:token-base").await.unwrap();
    let locks = Lockset::connect(&format!("memory:token-base?token_base={BASE}")).await.unwrap();
    let mutex = locks.mutex("m").unwrap().with(LockOptions::default().ttl(TTL).detachable());
    let guard = mutex.lock().await.unwrap();

    let stored = raw.inspect("m").await.unwrap().holders[0].token.unwrap();
    let token = Token::new(stored.get() + BASE);
    assert_eq!(guard.grant().token, stored, "conditions in the engine need the engine's token");
    assert_eq!(guard.token(), token);
    assert_eq!(guard.reenter().unwrap().token(), token);
    assert_eq!(FencingToken::from(&guard).token(), token);
    assert!(format!("{guard:?}").contains(&token.to_string()), "{guard:?}");
    let shows = |state: &LockState| {
        assert_eq!((state.holders[0].token, state.fence), (Some(token), Some(token)));
    };
    shows(&locks.inspect("m").await.unwrap());
    shows(&locks.list("").await.unwrap()[0]);
    shows(&locks.watch("").unwrap().next().await.unwrap().unwrap());
    shows(&locks.watch_name("m").unwrap().next().await.unwrap().unwrap());
    assert_eq!(holder_token(mutex.lock_within(PATIENCE).await), Some(token));
    let several = lockset::all([mutex.clone()]).unwrap();
    assert_eq!(holder_token(several.lock_within(PATIENCE).await), Some(token));

    let ticket = guard.detach().await.unwrap();
    assert_eq!(locks.renew(&ticket).await.unwrap().token, token);
    let attached = locks.attach(&ticket).await.unwrap();
    assert_eq!((attached.token(), attached.grant().token), (token, stored));
    let broken = locks.force_release("m", Break::Now).await.unwrap();
    assert_eq!(broken[0].token, Some(token));
    let guards = several.lock().await.unwrap();
    assert!(guards.token("m").unwrap() > token);
    guards.release().await.unwrap();
    let ran = mutex.run(async |held: &Guard| Ok::<_, Error>(held.token())).await;
    assert!(ran.unwrap() > token);

    let election = locks.election("leader").unwrap();
    let term = election.campaign().await.unwrap();
    assert_eq!(election.leader().await.unwrap().unwrap().token, Some(term.token()));
    let observed = election.observe().next().await.unwrap().unwrap().unwrap();
    assert_eq!(observed.token, Some(term.token()));
    assert_eq!(term.token().get(), term.grant().token.get() + BASE);
}
