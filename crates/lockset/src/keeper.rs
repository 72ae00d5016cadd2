//! The keeper renews every lease of one client, notices when a lock can no longer be trusted, and
//! runs background work.
//!
//! It has its own thread and a small runtime: user code that blocks a worker thread must not cost a
//! lock, and dropping a guard must work without a runtime. On tokio's virtual clock it is a task of
//! the runtime it was made in.
//!
//! A lease is renewed after a third of its ttl. `docs/timing.md` lists what depends on that.

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
use crate::engine::{Claim, ClaimId, Engine, Event, Grant, Renewal};
use crate::error::{Error, LossReason, Result};
use crate::fork;
use crate::hash::FastMap;
use crate::report::{self, report};
use crate::sync;
use crate::telemetry::{RenewalOutcome, Telemetry};

/// An idle loop pretends to have its next check this soon, so that short holds do not wake it.
/// Shorter than any first check that matters.
const LINGER: Duration = Duration::from_secs(1);
/// How long background work may go on after a client was dropped without `close`.
const DROP_TIMEOUT: Duration = Duration::from_secs(2);
/// Leases that are due this soon are candidates for the same round trip.
const BATCH_HORIZON: Duration = Duration::from_secs(5);

/// A lease as the keeper sees it.
pub(crate) trait KeptLease: std::fmt::Debug + Send + Sync {
    fn id(&self) -> ClaimId;

    /// What the keeper has to do now.
    fn next_step(&self) -> NextStep;

    /// When to check again after a check that was sent at `sent` was confirmed: after a third of
    /// the ttl, or of the remaining trust if that is less.
    fn next_check_at(&self, sent: Moment) -> Moment;

    /// How much earlier than due the lease may be renewed to save a round trip.
    fn slack(&self) -> Duration;

    /// Asks the engine for the lease without renewing it.
    fn look_up<'a>(
        &'a self,
        claim: &'a Claim,
        grant: &'a Grant,
    ) -> BoxFuture<'a, Result<LeaseReply>>;

    /// The engine confirmed the lock; with a grant, it renewed the lease.
    fn on_confirmed(&self, renewed: Option<Grant>);

    /// The engine did not reply, or replied with an error that says nothing about the lock.
    fn on_unconfirmed(&self, error: Option<Error>);

    /// The engine says that the lock is lost.
    fn on_lost(&self, reason: LossReason);

    /// The engine says that the running lease is the last.
    fn on_last_lease(&self);

    /// Releases the lock; for closing.
    fn release(self: Arc<Self>) -> BoxFuture<'static, Result<()>>;
}

/// What the keeper has to do about a lease.
pub(crate) enum NextStep {
    /// It ended.
    Forget,
    Check {
        check: LeaseCheck,
        claim: Arc<Claim>,
        grant: Grant,
        valid_until: Moment,
    },
}

/// How the engine is asked about a lease.
pub(crate) enum LeaseCheck {
    Renew,
    /// The lease is long enough, or must not be renewed.
    LookUp,
}

/// What the engine says about a lease.
pub(crate) enum LeaseReply {
    /// It stands; with a grant, it was renewed.
    Confirmed(Option<Grant>),
    /// It stands, and is not renewed any more.
    LastLease,
    /// It ended.
    Lost(LossReason),
}

impl From<Renewal> for LeaseReply {
    fn from(reply: Renewal) -> Self {
        match reply {
            Renewal::Renewed(grant) => LeaseReply::Confirmed(Some(grant)),
            Renewal::LastLease => LeaseReply::LastLease,
            Renewal::Lost(reason) => LeaseReply::Lost(reason),
        }
    }
}

/// The client's side of the keeper.
#[derive(Debug)]
pub(crate) struct Keeper {
    shared: Arc<KeeperShared>,
    runtime: Handle,
    started: AtomicBool,
    forks: u32,
}

/// What the client and the keeper's loop share.
#[derive(Debug)]
struct KeeperShared {
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
    leases: FastMap<ClaimId, (Moment, Arc<dyn KeptLease>)>,
    due: BTreeSet<(Moment, ClaimId)>,
    /// Leases added since the loop last ran. Most have ended by then and are never sorted in.
    unsorted: Vec<(Moment, ClaimId)>,
    jobs: Vec<BoxFuture<'static, ()>>,
    /// Jobs that were started and are not finished.
    running: usize,
    /// When the loop will run again by itself.
    runs_at: Option<Moment>,
    closing: bool,
}

impl std::fmt::Debug for Schedule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Schedule").field("leases", &self.leases.len()).finish_non_exhaustive()
    }
}

impl Keeper {
    /// A keeper without an engine. The engine connects on its runtime, so that the engine's tasks
    /// live as long as the keeper and do not depend on the user's runtime.
    pub(crate) fn new(clock: Clock) -> Result<Self> {
        let shared = Arc::new(KeeperShared {
            clock,
            schedule: Mutex::default(),
            wake: Notify::new(),
            idle: Notify::new(),
            stop: Notify::new(),
        });
        let runtime = match shared.clock.is_virtual() {
            true => Handle::try_current().map_err(|error| Error::Unreachable {
                engine: "keeper",
                what: "its clock is that of a tokio runtime, and there is none".into(),
                retryable: false,
                source: Some(Arc::new(error)),
            })?,
            false => own_thread(shared.clone())?,
        };
        fork::notice();
        Ok(Self { shared, runtime, started: AtomicBool::new(false), forks: fork::generation() })
    }

    /// Starts to keep the locks of `engine`.
    pub(crate) fn start(&self, engine: Arc<dyn Engine>, telemetry: Arc<Telemetry>) {
        self.started.store(true, Ordering::Release);
        self.runtime.spawn(keep(self.shared.clone(), engine, telemetry));
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    pub(crate) fn clock(&self) -> &Clock {
        &self.shared.clock
    }

    /// Adds a lease, to be checked for the first time at `first_check`.
    pub(crate) fn add(&self, lease: Arc<dyn KeptLease>, first_check: Moment) {
        let mut schedule = self.shared.schedule();
        schedule.add(first_check, lease);
        self.shared.wake_for(&mut schedule, first_check);
    }

    /// Removes a lease that ended.
    pub(crate) fn remove(&self, lease: &dyn KeptLease) {
        // Dropped after the lock of the schedule: the last lease of a client drops the keeper.
        let _removed = self.shared.schedule().remove(lease);
    }

    /// Runs a job in the background. Never blocks, needs no runtime.
    pub(crate) fn run(&self, job: impl Future<Output = ()> + Send + 'static) {
        self.shared.schedule().jobs.push(job.boxed());
        self.shared.wake.notify_one();
    }

    pub(crate) fn leases(&self) -> Vec<Arc<dyn KeptLease>> {
        self.shared.schedule().leases.values().map(|(_, lease)| lease.clone()).collect()
    }

    /// Waits until all background work is done.
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
            // The thread does not exist in a forked child, and its mutexes may be locked.
            return;
        }
        self.shared.schedule().closing = true;
        self.shared.wake.notify_one();
        if !self.started.load(Ordering::Acquire) {
            // Without a loop nothing else ends the thread.
            self.shared.stop.notify_one();
        }
    }
}

impl KeeperShared {
    fn schedule(&self) -> MutexGuard<'_, Schedule> {
        sync::lock(&self.schedule)
    }

    /// Wakes the loop if it would otherwise run only after `at`.
    fn wake_for(&self, schedule: &mut Schedule, at: Moment) {
        if schedule.runs_at.is_some_and(|runs_at| runs_at > at) {
            schedule.runs_at = None;
            self.wake.notify_one();
        }
    }
}

impl Schedule {
    /// When this lease is checked again, if it is kept. Leases are compared by address: a reply to
    /// an old request must not act on another lease of the same claim.
    fn kept(&mut self, lease: &dyn KeptLease) -> Option<&mut Moment> {
        let (at, kept) = self.leases.get_mut(&lease.id())?;
        std::ptr::addr_eq(Arc::as_ptr(kept), lease).then_some(at)
    }

    fn add(&mut self, at: Moment, lease: Arc<dyn KeptLease>) {
        if self.unsorted.len() > 64 + 2 * self.leases.len() {
            let leases = &self.leases;
            self.unsorted.retain(|(at, id)| leases.get(id).is_some_and(|(now, _)| now == at));
        }
        let id = lease.id();
        self.unsorted.push((at, id));
        self.leases.insert(id, (at, lease));
    }

    fn sort_in(&mut self) {
        for (at, id) in self.unsorted.drain(..) {
            if self.leases.get(&id).is_some_and(|(now, _)| *now == at) {
                self.due.insert((at, id));
            }
        }
    }

    fn remove(&mut self, lease: &dyn KeptLease) -> Option<Arc<dyn KeptLease>> {
        let at = *self.kept(lease)?;
        self.due.remove(&(at, lease.id()));
        self.leases.remove(&lease.id()).map(|(_, lease)| lease)
    }

    /// Changes when a lease is checked again, unless it has ended meanwhile.
    fn reschedule(&mut self, lease: &dyn KeptLease, next: impl FnOnce(Moment) -> Moment) {
        let Some(at) = self.kept(lease) else { return };
        let before = *at;
        *at = next(before);
        let at = *at;
        self.due.remove(&(before, lease.id()));
        self.due.insert((at, lease.id()));
    }

    /// The leases to check now: those that are due, and those that will be due soon enough to share
    /// the round trip. They stay in the schedule, so that closing finds them.
    fn due(&self, now: Moment) -> Vec<Arc<dyn KeptLease>> {
        let Some((first, _)) = self.due.first().filter(|(at, _)| *at <= now) else {
            return Vec::new();
        };
        let horizon = (*first).max(now) + BATCH_HORIZON;
        let soon = self.due.range(..(horizon, ClaimId::from_bits(0)));
        soon.filter_map(|(at, id)| self.leases.get(id).map(|(_, lease)| (at, lease)))
            .filter(|(at, lease)| **at <= now + lease.slack())
            .map(|(_, lease)| lease.clone())
            .collect()
    }

    fn is_idle(&self) -> bool {
        self.jobs.is_empty() && self.running == 0
    }
}

/// The thread ends when the loop has ended.
fn own_thread(shared: Arc<KeeperShared>) -> Result<Handle> {
    let cannot = |error: std::io::Error| Error::Unreachable {
        engine: "keeper",
        what: format!("its thread could not be started: {error}"),
        retryable: true,
        source: Some(Arc::new(error)),
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

/// The loop of the keeper.
async fn keep(shared: Arc<KeeperShared>, engine: Arc<dyn Engine>, telemetry: Arc<Telemetry>) {
    let mut events = engine.events().fuse();
    let mut running = FuturesUnordered::new();
    let mut end_by = Moment::NEVER;
    let mut lingers = false;
    loop {
        let now = shared.clock.now();
        let (due, runs_at) = {
            let mut schedule = shared.schedule();
            schedule.sort_in();
            let due = schedule.due(now);
            let jobs = std::mem::take(&mut schedule.jobs);
            schedule.running += jobs.len();
            running.extend(jobs.into_iter().map(catch_panic));
            if schedule.closing && end_by == Moment::NEVER {
                end_by = now + DROP_TIMEOUT;
            }
            if schedule.closing && (running.is_empty() || now >= end_by) {
                break;
            }
            if schedule.is_idle() {
                shared.idle.notify_waiters();
            }
            let next = schedule.due.first().map_or(Moment::NEVER, |(at, _)| *at).min(end_by);
            // Woken for a lease that has ended: the next short hold need not wake the loop again.
            lingers = !lingers && next == Moment::NEVER && !shared.clock.is_virtual();
            let next = if lingers { now + LINGER } else { next };
            schedule.runs_at = Some(next);
            (due, next)
        };
        if !due.is_empty() {
            check_leases(&shared, &engine, &telemetry, due);
            continue;
        }
        tokio::select! {
            () = shared.wake.notified() => {}
            () = shared.clock.sleep_until(runs_at) => {}
            Some(()) = running.next() => shared.schedule().running -= 1,
            Some(event) = events.next() => on_event(&shared, event),
        }
    }
    shared.stop.notify_one();
}

/// A panic in one job (for example in the user's recorder or subscriber) must not end all renewals.
async fn catch_panic(job: BoxFuture<'static, ()>) {
    if AssertUnwindSafe(job).catch_unwind().await.is_err() {
        report!(error, "a background task panicked");
    }
}

/// Starts a renewal or a look-up for each lease, and forgets those that ended. Leases of the same
/// ttl are renewed together.
fn check_leases(
    shared: &Arc<KeeperShared>,
    engine: &Arc<dyn Engine>,
    telemetry: &Arc<Telemetry>,
    due: Vec<Arc<dyn KeptLease>>,
) {
    let mut renewals: BTreeMap<Duration, Vec<PendingCheck>> = BTreeMap::new();
    // Called before the schedule is locked: a lease that is over removes itself from it. And `due`
    // is dropped after the schedule is unlocked: the last lease of a client drops the keeper.
    let steps: Vec<NextStep> = due.iter().map(|lease| lease.next_step()).collect();
    let mut schedule = shared.schedule();
    for (step, lease) in steps.into_iter().zip(&due) {
        match step {
            NextStep::Forget => drop(schedule.remove(&**lease)),
            NextStep::Check { check, claim, grant, valid_until } => {
                // The deadline is still watched while the request is in flight.
                schedule.reschedule(&**lease, |_| valid_until);
                let pending = PendingCheck { lease: lease.clone(), claim, grant };
                match check {
                    LeaseCheck::Renew => {
                        renewals.entry(pending.claim.ttl).or_default().push(pending);
                    }
                    LeaseCheck::LookUp => {
                        schedule.jobs.push(look_up(shared.clone(), pending).boxed());
                    }
                }
            }
        }
    }
    for (ttl, batch) in renewals {
        let (shared, engine, telemetry) = (shared.clone(), engine.clone(), telemetry.clone());
        let renewal = async move { renew(&shared, &*engine, &telemetry, ttl, batch).await };
        schedule.jobs.push(renewal.boxed());
    }
}

/// A lease whose check is in flight.
struct PendingCheck {
    lease: Arc<dyn KeptLease>,
    claim: Arc<Claim>,
    grant: Grant,
}

async fn renew(
    shared: &KeeperShared,
    engine: &dyn Engine,
    telemetry: &Telemetry,
    ttl: Duration,
    batch: Vec<PendingCheck>,
) {
    let sent = shared.clock.now();
    let entries: Vec<(&Claim, &Grant)> =
        batch.iter().map(|entry| (&*entry.claim, &entry.grant)).collect();
    let replies = tokio::time::timeout(ttl / 6, engine.renew(&entries)).await;
    let mut replies = replies.unwrap_or_default().into_iter();
    let mut outcomes: BTreeMap<RenewalOutcome, u64> = BTreeMap::new();
    for PendingCheck { lease, .. } in batch {
        let reply = replies.next().map(|reply| reply.map(LeaseReply::from));
        let outcome = match &reply {
            Some(Ok(LeaseReply::Confirmed(_))) => RenewalOutcome::Renewed,
            Some(Ok(LeaseReply::LastLease | LeaseReply::Lost(_))) => RenewalOutcome::Lost,
            Some(Err(_)) | None => RenewalOutcome::Failed,
        };
        *outcomes.entry(outcome).or_default() += 1;
        on_reply(shared, &*lease, sent, ttl, reply);
    }
    outcomes.into_iter().for_each(|(outcome, count)| telemetry.renewals(outcome, count));
}

/// A lease that is not renewed is looked up instead, so that its holder learns of a loss as soon.
async fn look_up(shared: Arc<KeeperShared>, pending: PendingCheck) {
    let PendingCheck { lease, claim, grant } = pending;
    let sent = shared.clock.now();
    let reply = tokio::time::timeout(claim.ttl / 6, lease.look_up(&claim, &grant)).await.ok();
    on_reply(&shared, &*lease, sent, claim.ttl, reply);
}

/// Applies the reply to a check that was sent at `sent`; `None` if there was none in time.
fn on_reply(
    shared: &KeeperShared,
    lease: &dyn KeptLease,
    sent: Moment,
    ttl: Duration,
    reply: Option<Result<LeaseReply>>,
) {
    let next_check = match reply {
        Some(Ok(LeaseReply::Confirmed(renewed))) => {
            lease.on_confirmed(renewed);
            lease.next_check_at(sent)
        }
        Some(Ok(LeaseReply::LastLease)) => {
            lease.on_last_lease();
            shared.clock.now()
        }
        Some(Ok(LeaseReply::Lost(reason))) => {
            lease.on_lost(reason);
            shared.clock.now()
        }
        unclear => {
            lease.on_unconfirmed(unclear.and_then(Result::err));
            shared.clock.now() + ttl / 12
        }
    };
    shared.schedule().reschedule(lease, |at| next_check.min(at));
}

fn on_event(shared: &KeeperShared, event: Event) {
    let (Event::Lost(id, _) | Event::LastLease(id) | Event::Doubt(id)) = event;
    let lease = shared.schedule().leases.get(&id).map(|(_, lease)| lease.clone());
    let Some(lease) = lease else { return };
    match event {
        Event::Lost(_, reason) => lease.on_lost(reason),
        Event::LastLease(_) => lease.on_last_lease(),
        Event::Doubt(_) => lease.on_unconfirmed(None),
    }
}
