//! The keeper: one per client, it renews every lease of that client, notices when one can no
//! longer be trusted, and does what must be done in the background.
//!
//! It has a thread and a small runtime of its own: user code that blocks a worker thread must not
//! cost a lock, and dropping a guard must work where there is no runtime. Only on tokio's virtual
//! clock it is a task of the runtime that it was made in.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures_core::future::BoxFuture;
use futures_util::FutureExt;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::runtime::Handle;
use tokio::sync::Notify;

use crate::clock::{Clock, Moment};
use crate::engine::{Claim, ClaimId, Engine, Grant, Signal};
use crate::error::{Error, Result};
use crate::fork;
use crate::guard::{Ask, Hold, Step};
use crate::hash::FastMap;
use crate::mutual::unpoisoned;
use crate::report::{self, report};
use crate::telemetry::Renewal;

/// How long an idle loop looks as if it had something to do soon; shorter than any first look that
/// matters.
const LINGER: Duration = Duration::from_secs(1);
/// A client that is dropped without `close` gives its background work this long to finish.
const LAST_ORDERS: Duration = Duration::from_secs(2);

/// The client's side of the keeper.
#[derive(Debug)]
pub(crate) struct Keeper {
    desk: Arc<Desk>,
    runtime: Handle,
    started: AtomicBool,
    forks: u32,
}

/// What the client and the keeper's loop share.
#[derive(Debug)]
struct Desk {
    clock: Clock,
    book: Mutex<Book>,
    wake: Notify,
    /// Nothing is held and nothing runs.
    idle: Notify,
    /// The keeper's thread may end.
    stop: Notify,
}

#[derive(Default)]
struct Book {
    holds: FastMap<ClaimId, (Moment, Arc<Hold>)>,
    due: BTreeSet<(Moment, ClaimId)>,
    /// Holds that came since the loop last looked. Most are gone again by then, and are never
    /// sorted in.
    fresh: Vec<(Moment, ClaimId)>,
    jobs: Vec<BoxFuture<'static, ()>>,
    /// Jobs that were taken and are not finished.
    running: usize,
    /// When the loop will look again by itself.
    looks_at: Option<Moment>,
    closing: bool,
}

impl std::fmt::Debug for Book {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Book").field("holds", &self.holds.len()).finish_non_exhaustive()
    }
}

impl Keeper {
    /// A keeper without an engine yet: its runtime is where the engine is to be connected, so that
    /// the engine's own tasks live as long as the keeper and are not in the user's way.
    pub(crate) fn new(clock: Clock) -> Result<Self> {
        let desk = Arc::new(Desk {
            clock,
            book: Mutex::default(),
            wake: Notify::new(),
            idle: Notify::new(),
            stop: Notify::new(),
        });
        let runtime = match desk.clock.is_virtual() {
            true => Handle::current(),
            false => own_thread(desk.clone())?,
        };
        fork::notice();
        Ok(Self { desk, runtime, started: AtomicBool::new(false), forks: fork::generation() })
    }

    /// Begins to keep the locks of `engine`.
    pub(crate) fn start(&self, engine: Arc<dyn Engine>) {
        self.started.store(true, Ordering::Release);
        self.runtime.spawn(keep(self.desk.clone(), engine));
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    pub(crate) fn clock(&self) -> &Clock {
        &self.desk.clock
    }

    /// Takes a hold into care. It is looked after from `first_look` on.
    pub(crate) fn add(&self, hold: Arc<Hold>, first_look: Moment) {
        let mut book = self.desk.book();
        book.admit(first_look, hold);
        self.desk.wake_for(&mut book, first_look);
    }

    /// A hold ended; it needs no more care.
    pub(crate) fn remove(&self, hold: &Hold) {
        // Dropped after the book is closed: the last hold of a client takes the keeper along.
        let _removed = self.desk.book().unschedule(hold);
    }

    /// Does something in the background. Never blocks, needs no runtime.
    pub(crate) fn run(&self, job: impl Future<Output = ()> + Send + 'static) {
        self.desk.book().jobs.push(job.boxed());
        self.desk.wake.notify_one();
    }

    /// All holds in care.
    pub(crate) fn holds(&self) -> Vec<Arc<Hold>> {
        self.desk.book().holds.values().map(|(_, hold)| hold.clone()).collect()
    }

    /// Waits until everything in the background is done.
    pub(crate) async fn finish(&self) {
        loop {
            let idle = self.desk.idle.notified();
            if self.desk.book().is_idle() {
                return;
            }
            self.desk.wake.notify_one();
            idle.await;
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        if self.forks != fork::generation() {
            // Neither the thread nor anything it left locked is here.
            return;
        }
        self.desk.book().closing = true;
        self.desk.wake.notify_one();
        if !self.started.load(Ordering::Acquire) {
            // No loop is there to end the thread.
            self.desk.stop.notify_one();
        }
    }
}

impl Desk {
    fn book(&self) -> MutexGuard<'_, Book> {
        unpoisoned(&self.book)
    }

    /// Wakes the loop if it would otherwise look only after `at`.
    fn wake_for(&self, book: &mut Book, at: Moment) {
        if book.looks_at.is_some_and(|looks_at| looks_at > at) {
            book.looks_at = None;
            self.wake.notify_one();
        }
    }
}

impl Book {
    /// When this very hold is looked at again, if it is in care. A claim is not enough to tell: the
    /// answer to an old request must not act on another hold of the same claim.
    fn kept(&mut self, hold: &Hold) -> Option<&mut Moment> {
        let (at, kept) = self.holds.get_mut(&hold.id)?;
        std::ptr::eq(&**kept, hold).then_some(at)
    }

    /// A new hold, to be looked at for the first time at `at`.
    fn admit(&mut self, at: Moment, hold: Arc<Hold>) {
        if self.fresh.len() > 64 + 2 * self.holds.len() {
            let holds = &self.holds;
            self.fresh.retain(|(at, id)| holds.get(id).is_some_and(|(now, _)| now == at));
        }
        self.fresh.push((at, hold.id));
        self.holds.insert(hold.id, (at, hold));
    }

    fn sort_in_the_fresh(&mut self) {
        for (at, id) in self.fresh.drain(..) {
            if self.holds.get(&id).is_some_and(|(now, _)| *now == at) {
                self.due.insert((at, id));
            }
        }
    }

    /// Takes a hold out, if it is in care.
    fn unschedule(&mut self, hold: &Hold) -> Option<Arc<Hold>> {
        let at = *self.kept(hold)?;
        self.due.remove(&(at, hold.id));
        self.holds.remove(&hold.id).map(|(_, hold)| hold)
    }

    /// Changes when a hold is looked at again, unless it has ended meanwhile.
    fn reschedule(&mut self, hold: &Hold, next: impl FnOnce(Moment) -> Moment) {
        let Some(at) = self.kept(hold) else { return };
        let before = *at;
        *at = next(before);
        let at = *at;
        self.due.remove(&(before, hold.id));
        self.due.insert((at, hold.id));
    }

    /// The holds to look after now: those that are due, and those that will be soon enough to go
    /// along in the same round trip. They stay in the book, so that closing finds them.
    fn due(&self, now: Moment) -> Vec<Arc<Hold>> {
        let Some((first, _)) = self.due.first().filter(|(at, _)| *at <= now) else {
            return Vec::new();
        };
        let horizon = (*first).max(now) + Duration::from_secs(5);
        let soon = self.due.range(..(horizon, ClaimId::from_bits(0)));
        soon.filter_map(|(at, id)| self.holds.get(id).map(|(_, hold)| (at, hold)))
            .filter(|(at, hold)| **at <= now + hold.slack())
            .map(|(_, hold)| hold.clone())
            .collect()
    }

    fn is_idle(&self) -> bool {
        self.jobs.is_empty() && self.running == 0
    }
}

/// The thread ends when the loop has ended.
fn own_thread(desk: Arc<Desk>) -> Result<Handle> {
    let cannot = |error: std::io::Error| Error::Unreachable {
        engine: "keeper",
        what: format!("its thread could not be started: {error}"),
        retryable: true,
        source: Some(error.into()),
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .on_thread_start(report::keep_here)
        .build()
        .map_err(cannot)?;
    let handle = runtime.handle().clone();
    std::thread::Builder::new()
        .name("lockset-keeper".into())
        .spawn(move || {
            report::keeping(|| runtime.block_on(desk.stop.notified()));
            runtime.shutdown_background();
        })
        .map_err(cannot)?;
    Ok(handle)
}

/// The loop.
async fn keep(desk: Arc<Desk>, engine: Arc<dyn Engine>) {
    let mut signals = engine.signals().fuse();
    let mut running = FuturesUnordered::new();
    let mut last_orders = Moment::NEVER;
    let mut lingers = false;
    loop {
        let now = desk.clock.now();
        let (due, looks_at) = {
            let mut book = desk.book();
            book.sort_in_the_fresh();
            let due = book.due(now);
            let jobs = std::mem::take(&mut book.jobs);
            book.running += jobs.len();
            running.extend(jobs.into_iter().map(survive));
            if book.closing && last_orders == Moment::NEVER {
                last_orders = now + LAST_ORDERS;
            }
            if book.closing && (running.is_empty() || now >= last_orders) {
                break;
            }
            if book.is_idle() {
                desk.idle.notify_waiters();
            }
            let next = book.due.first().map_or(Moment::NEVER, |(at, _)| *at).min(last_orders);
            // Woken for a hold that is gone already: others like it need not wake the loop again.
            lingers = !lingers && next == Moment::NEVER && !desk.clock.is_virtual();
            let next = if lingers { now + LINGER } else { next };
            book.looks_at = Some(next);
            (due, next)
        };
        if !due.is_empty() {
            look_after(&desk, &engine, due);
            continue;
        }
        tokio::select! {
            () = desk.wake.notified() => {}
            () = desk.clock.sleep_until(looks_at) => {}
            Some(()) = running.next() => desk.book().running -= 1,
            Some(signal) = signals.next() => heed(&desk, signal),
        }
    }
    desk.stop.notify_one();
}

/// A panic in one job (in a user's recorder or subscriber, say) must not end all renewals.
async fn survive(job: BoxFuture<'static, ()>) {
    if AssertUnwindSafe(job).catch_unwind().await.is_err() {
        report!(error, "a background task panicked");
    }
}

/// Each hold either ends, or is renewed now, together with the others of the same ttl, or is looked
/// up.
fn look_after(desk: &Arc<Desk>, engine: &Arc<dyn Engine>, due: Vec<Arc<Hold>>) {
    let mut renewals: BTreeMap<Duration, Vec<Asked>> = BTreeMap::new();
    // Judged before the book is opened: a hold that is found to be over takes itself out of it.
    // And `due` outlives the open book: the last hold of a client takes the keeper down with it.
    let steps: Vec<Step> = due.iter().map(|hold| hold.step()).collect();
    let mut book = desk.book();
    for (step, hold) in steps.into_iter().zip(&due) {
        match step {
            Step::Over => drop(book.unschedule(hold)),
            Step::Ask { how, claim, grant, valid_until } => {
                // While the question is under way the deadline is still watched.
                book.reschedule(hold, |_| valid_until);
                let asked = Asked { hold: hold.clone(), claim, grant };
                match how {
                    Ask::Renew => renewals.entry(asked.claim.ttl).or_default().push(asked),
                    Ask::LookUp => book.jobs.push(look_up(desk.clone(), asked).boxed()),
                }
            }
        }
    }
    for (ttl, batch) in renewals {
        let (desk, engine) = (desk.clone(), engine.clone());
        book.jobs.push(async move { renew(&desk, &*engine, ttl, batch).await }.boxed());
    }
}

struct Asked {
    hold: Arc<Hold>,
    claim: Arc<Claim>,
    grant: Grant,
}

async fn renew(desk: &Desk, engine: &dyn Engine, ttl: Duration, batch: Vec<Asked>) {
    let sent = desk.clock.now();
    let entries: Vec<(&Claim, &Grant)> =
        batch.iter().map(|entry| (&*entry.claim, &entry.grant)).collect();
    let answers = tokio::time::timeout(ttl / 6, engine.renew(&entries)).await;
    let mut answers = answers.unwrap_or_default().into_iter();
    let mut outcomes: BTreeMap<Renewal, u64> = BTreeMap::new();
    let telemetry = batch.first().map(|entry| entry.hold.client.clone());
    for Asked { hold, .. } in batch {
        let answer = answers.next().map(|answer| answer.map(Some));
        let outcome = match &answer {
            Some(Ok(_)) => Renewal::Renewed,
            Some(Err(Error::Lost { .. })) => Renewal::Lost,
            _ => Renewal::Failed,
        };
        *outcomes.entry(outcome).or_default() += 1;
        heed_answer(desk, hold, sent, ttl, answer);
    }
    if let Some(client) = telemetry {
        outcomes.into_iter().for_each(|(how, count)| client.telemetry.renewals(how, count));
    }
}

/// A lease that is not renewed is looked up instead, so that its holder learns of a loss as soon.
async fn look_up(desk: Arc<Desk>, asked: Asked) {
    let Asked { hold, claim, grant } = asked;
    let sent = desk.clock.now();
    let lease = hold.client.lease_of(&claim, &grant);
    let answer = tokio::time::timeout(claim.ttl / 6, lease).await.ok();
    let answer = answer.map(|lease| lease.map(|_| None));
    heed_answer(&desk, hold, sent, claim.ttl, answer);
}

/// What a question sent at `sent` says about the hold; `None` if it was not answered in time.
fn heed_answer(
    desk: &Desk,
    hold: Arc<Hold>,
    sent: Moment,
    ttl: Duration,
    answer: Option<Result<Option<Grant>>>,
) {
    let next_look = match answer {
        Some(Ok(renewed)) => {
            hold.confirmed(renewed);
            hold.next_look(sent)
        }
        Some(Err(Error::Lost { reason, .. })) => {
            hold.refused(reason);
            desk.clock.now()
        }
        unclear => {
            hold.doubted(unclear.and_then(Result::err));
            desk.clock.now() + ttl / 12
        }
    };
    desk.book().reschedule(&hold, |at| next_look.min(at));
}

fn heed(desk: &Desk, signal: Signal) {
    let (id, reason) = match signal {
        Signal::Lost(id, reason) => (id, Some(reason)),
        Signal::Doubt(id) => (id, None),
    };
    let hold = desk.book().holds.get(&id).map(|(_, hold)| hold.clone());
    match (hold, reason) {
        (Some(hold), Some(reason)) => hold.refused(reason),
        (Some(hold), None) => hold.doubted(None),
        (None, _) => {}
    }
}
