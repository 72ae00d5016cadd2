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
use crate::engine::{Claim, ClaimId, Engine, Event, Grant};
use crate::error::{Error, Result};
use crate::fork;
use crate::guard::{Ask, Hold, Step};
use crate::hash::FastMap;
use crate::report::{self, report};
use crate::sync;
use crate::telemetry::Renewal;

/// How long an idle loop looks as if it had something to do soon; shorter than any first look that
/// matters.
const LINGER: Duration = Duration::from_secs(1);
/// A client that is dropped without `close` gives its background work this long to finish.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// The client's side of the keeper.
#[derive(Debug)]
pub(crate) struct Keeper {
    shared: Arc<Shared>,
    runtime: Handle,
    started: AtomicBool,
    forks: u32,
}

/// What the client and the keeper's loop share.
#[derive(Debug)]
struct Shared {
    clock: Clock,
    schedule: Mutex<Schedule>,
    wake: Notify,
    /// Nothing is held and nothing runs.
    idle: Notify,
    /// The keeper's thread may end.
    stop: Notify,
}

#[derive(Default)]
struct Schedule {
    holds: FastMap<ClaimId, (Moment, Arc<Hold>)>,
    due: BTreeSet<(Moment, ClaimId)>,
    /// Holds that came since the loop last looked. Most are gone again by then, and are never
    /// sorted in.
    unsorted: Vec<(Moment, ClaimId)>,
    jobs: Vec<BoxFuture<'static, ()>>,
    /// Jobs that were taken and are not finished.
    running: usize,
    /// When the loop will look again by itself.
    looks_at: Option<Moment>,
    closing: bool,
}

impl std::fmt::Debug for Schedule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Schedule").field("holds", &self.holds.len()).finish_non_exhaustive()
    }
}

impl Keeper {
    /// A keeper without an engine yet: its runtime is where the engine is to be connected, so that
    /// the engine's own tasks live as long as the keeper and are not in the user's way.
    pub(crate) fn new(clock: Clock) -> Result<Self> {
        let shared = Arc::new(Shared {
            clock,
            schedule: Mutex::default(),
            wake: Notify::new(),
            idle: Notify::new(),
            stop: Notify::new(),
        });
        let runtime = match shared.clock.is_virtual() {
            true => Handle::current(),
            false => own_thread(shared.clone())?,
        };
        fork::notice();
        Ok(Self { shared, runtime, started: AtomicBool::new(false), forks: fork::generation() })
    }

    /// Begins to keep the locks of `engine`.
    pub(crate) fn start(&self, engine: Arc<dyn Engine>) {
        self.started.store(true, Ordering::Release);
        self.runtime.spawn(keep(self.shared.clone(), engine));
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    pub(crate) fn clock(&self) -> &Clock {
        &self.shared.clock
    }

    /// Takes a hold into care. It is looked after from `first_look` on.
    pub(crate) fn add(&self, hold: Arc<Hold>, first_look: Moment) {
        let mut schedule = self.shared.schedule();
        schedule.admit(first_look, hold);
        self.shared.wake_for(&mut schedule, first_look);
    }

    /// A hold ended; it needs no more care.
    pub(crate) fn remove(&self, hold: &Hold) {
        // Dropped after the book is closed: the last hold of a client takes the keeper along.
        let _removed = self.shared.schedule().unschedule(hold);
    }

    /// Does something in the background. Never blocks, needs no runtime.
    pub(crate) fn run(&self, job: impl Future<Output = ()> + Send + 'static) {
        self.shared.schedule().jobs.push(job.boxed());
        self.shared.wake.notify_one();
    }

    /// All holds in care.
    pub(crate) fn holds(&self) -> Vec<Arc<Hold>> {
        self.shared.schedule().holds.values().map(|(_, hold)| hold.clone()).collect()
    }

    /// Waits until everything in the background is done.
    pub(crate) async fn finish(&self) {
        loop {
            let idle = self.shared.idle.notified();
            if self.shared.schedule().is_idle() {
                return;
            }
            self.shared.wake.notify_one();
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
        self.shared.schedule().closing = true;
        self.shared.wake.notify_one();
        if !self.started.load(Ordering::Acquire) {
            // No loop is there to end the thread.
            self.shared.stop.notify_one();
        }
    }
}

impl Shared {
    fn schedule(&self) -> MutexGuard<'_, Schedule> {
        sync::lock(&self.schedule)
    }

    /// Wakes the loop if it would otherwise look only after `at`.
    fn wake_for(&self, schedule: &mut Schedule, at: Moment) {
        if schedule.looks_at.is_some_and(|looks_at| looks_at > at) {
            schedule.looks_at = None;
            self.wake.notify_one();
        }
    }
}

impl Schedule {
    /// When this very hold is looked at again, if it is in care. A claim is not enough to tell: the
    /// answer to an old request must not act on another hold of the same claim.
    fn kept(&mut self, hold: &Hold) -> Option<&mut Moment> {
        let (at, kept) = self.holds.get_mut(&hold.id)?;
        std::ptr::eq(&**kept, hold).then_some(at)
    }

    /// A new hold, to be looked at for the first time at `at`.
    fn admit(&mut self, at: Moment, hold: Arc<Hold>) {
        if self.unsorted.len() > 64 + 2 * self.holds.len() {
            let holds = &self.holds;
            self.unsorted.retain(|(at, id)| holds.get(id).is_some_and(|(now, _)| now == at));
        }
        self.unsorted.push((at, hold.id));
        self.holds.insert(hold.id, (at, hold));
    }

    fn sort_in(&mut self) {
        for (at, id) in self.unsorted.drain(..) {
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
fn own_thread(shared: Arc<Shared>) -> Result<Handle> {
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
            report::keeping(|| runtime.block_on(shared.stop.notified()));
            runtime.shutdown_background();
        })
        .map_err(cannot)?;
    Ok(handle)
}

/// The loop.
async fn keep(shared: Arc<Shared>, engine: Arc<dyn Engine>) {
    let mut events = engine.events().fuse();
    let mut running = FuturesUnordered::new();
    let mut drain_until = Moment::NEVER;
    let mut lingers = false;
    loop {
        let now = shared.clock.now();
        let (due, looks_at) = {
            let mut schedule = shared.schedule();
            schedule.sort_in();
            let due = schedule.due(now);
            let jobs = std::mem::take(&mut schedule.jobs);
            schedule.running += jobs.len();
            running.extend(jobs.into_iter().map(survive));
            if schedule.closing && drain_until == Moment::NEVER {
                drain_until = now + DRAIN_TIMEOUT;
            }
            if schedule.closing && (running.is_empty() || now >= drain_until) {
                break;
            }
            if schedule.is_idle() {
                shared.idle.notify_waiters();
            }
            let next = schedule.due.first().map_or(Moment::NEVER, |(at, _)| *at).min(drain_until);
            // Woken for a hold that is gone already: others like it need not wake the loop again.
            lingers = !lingers && next == Moment::NEVER && !shared.clock.is_virtual();
            let next = if lingers { now + LINGER } else { next };
            schedule.looks_at = Some(next);
            (due, next)
        };
        if !due.is_empty() {
            look_after(&shared, &engine, due);
            continue;
        }
        tokio::select! {
            () = shared.wake.notified() => {}
            () = shared.clock.sleep_until(looks_at) => {}
            Some(()) = running.next() => shared.schedule().running -= 1,
            Some(event) = events.next() => on_event(&shared, event),
        }
    }
    shared.stop.notify_one();
}

/// A panic in one job (in a user's recorder or subscriber, say) must not end all renewals.
async fn survive(job: BoxFuture<'static, ()>) {
    if AssertUnwindSafe(job).catch_unwind().await.is_err() {
        report!(error, "a background task panicked");
    }
}

/// Each hold either ends, or is renewed now, together with the others of the same ttl, or is looked
/// up.
fn look_after(shared: &Arc<Shared>, engine: &Arc<dyn Engine>, due: Vec<Arc<Hold>>) {
    let mut renewals: BTreeMap<Duration, Vec<Question>> = BTreeMap::new();
    // Judged before the book is opened: a hold that is found to be over takes itself out of it.
    // And `due` outlives the open book: the last hold of a client takes the keeper down with it.
    let steps: Vec<Step> = due.iter().map(|hold| hold.step()).collect();
    let mut schedule = shared.schedule();
    for (step, hold) in steps.into_iter().zip(&due) {
        match step {
            Step::Over => drop(schedule.unschedule(hold)),
            Step::Ask { how, claim, grant, valid_until } => {
                // While the question is under way the deadline is still watched.
                schedule.reschedule(hold, |_| valid_until);
                let asked = Question { hold: hold.clone(), claim, grant };
                match how {
                    Ask::Renew => renewals.entry(asked.claim.ttl).or_default().push(asked),
                    Ask::LookUp => schedule.jobs.push(look_up(shared.clone(), asked).boxed()),
                }
            }
        }
    }
    for (ttl, batch) in renewals {
        let (shared, engine) = (shared.clone(), engine.clone());
        schedule.jobs.push(async move { renew(&shared, &*engine, ttl, batch).await }.boxed());
    }
}

struct Question {
    hold: Arc<Hold>,
    claim: Arc<Claim>,
    grant: Grant,
}

async fn renew(shared: &Shared, engine: &dyn Engine, ttl: Duration, batch: Vec<Question>) {
    let sent = shared.clock.now();
    let entries: Vec<(&Claim, &Grant)> =
        batch.iter().map(|entry| (&*entry.claim, &entry.grant)).collect();
    let answers = tokio::time::timeout(ttl / 6, engine.renew(&entries)).await;
    let mut answers = answers.unwrap_or_default().into_iter();
    let mut outcomes: BTreeMap<Renewal, u64> = BTreeMap::new();
    let telemetry = batch.first().map(|entry| entry.hold.client.clone());
    for Question { hold, .. } in batch {
        let answer = answers.next().map(|answer| answer.map(Some));
        let outcome = match &answer {
            Some(Ok(_)) => Renewal::Renewed,
            Some(Err(Error::Lost { .. })) => Renewal::Lost,
            _ => Renewal::Failed,
        };
        *outcomes.entry(outcome).or_default() += 1;
        on_answer(shared, hold, sent, ttl, answer);
    }
    if let Some(client) = telemetry {
        outcomes.into_iter().for_each(|(how, count)| client.telemetry.renewals(how, count));
    }
}

/// A lease that is not renewed is looked up instead, so that its holder learns of a loss as soon.
async fn look_up(shared: Arc<Shared>, asked: Question) {
    let Question { hold, claim, grant } = asked;
    let sent = shared.clock.now();
    let lease = hold.client.lease_of(&claim, &grant);
    let answer = tokio::time::timeout(claim.ttl / 6, lease).await.ok();
    let answer = answer.map(|lease| lease.map(|_| None));
    on_answer(&shared, hold, sent, claim.ttl, answer);
}

/// What a question sent at `sent` says about the hold; `None` if it was not answered in time.
fn on_answer(
    shared: &Shared,
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
            shared.clock.now()
        }
        unclear => {
            hold.doubted(unclear.and_then(Result::err));
            shared.clock.now() + ttl / 12
        }
    };
    shared.schedule().reschedule(&hold, |at| next_look.min(at));
}

fn on_event(shared: &Shared, event: Event) {
    let (id, reason) = match event {
        Event::Lost(id, reason) => (id, Some(reason)),
        Event::Doubt(id) => (id, None),
    };
    let hold = shared.schedule().holds.get(&id).map(|(_, hold)| hold.clone());
    match (hold, reason) {
        (Some(hold), Some(reason)) => hold.refused(reason),
        (Some(hold), None) => hold.doubted(None),
        (None, _) => {}
    }
}
