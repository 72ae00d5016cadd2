//! The one door from the primitives to the engine: gate, deadline, span, and the duty to leave
//! nothing behind.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use futures_util::poll;
use tracing::Instrument;

use crate::client::Client;
use crate::clock::Moment;
use crate::engine::{Claim, ClaimId, Grant, Holder, Mode, Wait};
use crate::error::{Error, Result};
use crate::gate::{Entered, InLine, Pass, Turn};
use crate::guard::{Ended, Guard, Hold};
use crate::name::Name;
use crate::options::ResolvedOptions;
use crate::report::report;
use crate::telemetry::Outcome;

/// How long a single request of the background cleaning may take, and the pauses between tries.
const CLEANING_TIMEOUT: Duration = Duration::from_secs(5);
const CLEANING_PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(2));
/// The pause before a claim that the engine lost track of is replaced by a fresh one.
const ASK_AGAIN: Duration = Duration::from_millis(5);
/// How much longer than it was given an acquisition waits for an engine that is silent.
const SILENT_AFTER: Duration = Duration::from_millis(500);
/// How long a timeout error may take to find out who holds the lock.
const ASK_FOR_HOLDER: Duration = Duration::from_millis(500);

/// A lock as a primitive asks for it: what, in which way, on which terms. Makes a fresh claim for
/// every acquisition.
#[derive(Clone)]
pub(crate) struct LockRequest {
    pub(crate) client: Arc<Client>,
    pub(crate) name: Name,
    pub(crate) mode: Mode,
    pub(crate) options: ResolvedOptions,
    /// Stand in the in-process line first. Only for primitives that are exclusive throughout:
    /// readers and writers of one name must meet in the engine's queue to keep their order.
    pub(crate) gated: bool,
}

impl fmt::Debug for LockRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // All locks show this, several of them at once.
        write!(f, "{:?} {} on {:?}", self.name, self.mode, self.client)
    }
}

/// `None`: not granted in the time given.
pub(crate) async fn acquire(request: &LockRequest, wait: Wait) -> Result<Option<Guard>> {
    let client = &request.client;
    client.check_usable()?;
    check_mode(request)?;
    let claim = request.claim();
    let span = tracing::info_span!(
        "lockset.acquire",
        name = %claim.name,
        engine = client.capabilities.engine,
        mode = %claim.mode,
        note = %claim.note.text,
    );
    let mut admitting = std::pin::pin!(admitted(request, claim, wait).instrument(span));
    let mut granted = match poll!(admitting.as_mut()) {
        Poll::Ready(granted) => {
            client.telemetry.answered_at_once(&request.name, outcome(&granted));
            granted
        }
        Poll::Pending => {
            let waiting = client.telemetry.waiting(&client.clock, &request.name);
            let granted = admitting.await;
            waiting.ended(outcome(&granted));
            granted
        }
    };
    // Whatever came of it while the client was closed, nobody is to have it.
    if let Err(closed) = client.check_usable() {
        granted = Err(closed);
    }
    granted
}

fn outcome(granted: &Result<Option<Guard>>) -> Outcome {
    match granted {
        Ok(Some(_)) => Outcome::Granted,
        Ok(None) => Outcome::NotGranted,
        Err(_) => Outcome::Error,
    }
}

/// Like [`acquire`], but not granted in time is an error that says who holds the lock.
pub(crate) async fn acquire_within(request: &LockRequest, patience: Duration) -> Result<Guard> {
    let deadline = request.client.clock.now() + patience;
    match acquire(request, Wait::Until(deadline)).await? {
        Some(guard) => Ok(guard),
        None => Err(timed_out(request, patience).await),
    }
}

/// Not granted in time, and who holds the lock instead, if that can still be found out.
pub(crate) async fn timed_out(request: &LockRequest, waited: Duration) -> Error {
    let holder = holder_of(&request.client, &request.name).await.map(Box::new);
    Error::Timeout { name: request.name.clone(), waited, holder }
}

/// Waits as long as it takes.
pub(crate) async fn acquire_patiently(request: &LockRequest) -> Result<Guard> {
    loop {
        if let Some(guard) = acquire(request, Wait::Forever).await? {
            return Ok(guard);
        }
    }
}

/// Gives a lock back, taking the next claim of this process along.
///
/// If this future is dropped on the way, the rest happens in the background.
pub(crate) async fn release(hold: Arc<Hold>) -> Result<()> {
    let Some(Ended { claim, grant, pass }) = hold.end()? else { return Ok(()) };
    let mut visit = Some(hold.client.visit_anyway());
    let next = pass.as_ref().and_then(Pass::next);
    let releasing_claim =
        ReleaseOnDrop { client: hold.client.clone(), claim, next, pass, answered: false };
    let next = releasing_claim.next.as_ref().map(|next| &*next.claim);
    let released = {
        let mut releasing = hold.client.engine.release(&releasing_claim.claim, &grant, next);
        match poll!(&mut releasing) {
            Poll::Ready(released) => released,
            Poll::Pending => {
                let _under_way = hold.client.awaits(&releasing_claim.claim);
                visit = None;
                releasing.await
            }
        }
    };
    drop(visit);
    match released {
        Ok(next_grant) => {
            let token = hold.client.shown(grant.token);
            report!(debug, name = releasing_claim.claim.name, token = token, "released");
            releasing_claim.hand_over(next_grant);
            Ok(())
        }
        // That is an answer too: there is nothing of ours left to clean up.
        Err(error @ Error::NotHeld { .. }) => {
            releasing_claim.hand_over(None);
            // Closing the client may have been faster.
            if hold.client.is_closed() { Ok(()) } else { Err(error) }
        }
        Err(error) => Err(error),
    }
}

/// Gives a lock back without waiting long for the answer; the rest happens in the background.
pub(crate) async fn release_soon(hold: Arc<Hold>) -> Result<()> {
    let engine = hold.client.capabilities.engine;
    let what = format!("`{}` was not released within {CLEANING_TIMEOUT:?}", hold.name);
    let late = Error::Unreachable { engine, what, retryable: true, source: None };
    tokio::time::timeout(CLEANING_TIMEOUT, release(hold)).await.unwrap_or(Err(late))
}

/// Withdraws a claim, again and again until the engine has answered or its lease is long over.
pub(crate) async fn withdraw_until_done(client: &Client, claim: &Claim) {
    let give_up = client.clock.now() + claim.ttl + CLEANING_TIMEOUT;
    let mut pause = CLEANING_PAUSES.0;
    loop {
        let withdrawal = client.engine.withdraw(claim);
        match tokio::time::timeout(CLEANING_TIMEOUT, withdrawal).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) if !error.is_retryable() || client.clock.now() > give_up => {
                report!(warn, name = claim.name, error = error, "left behind until its lease ends");
                return;
            }
            _ if client.clock.now() > give_up => return,
            _ => tokio::time::sleep(pause).await,
        }
        pause = (pause * 2).min(CLEANING_PAUSES.1);
    }
}

impl LockRequest {
    fn claim(&self) -> Arc<Claim> {
        Arc::new(Claim {
            id: ClaimId::random(),
            name: self.name.clone(),
            mode: self.mode,
            ttl: self.options.ttl,
            fixed: self.options.fixed,
            floor: None,
            note: self.options.note.clone(),
            detachable: self.options.detachable,
            replicas: self.options.replicas,
        })
    }
}

fn check_mode(request: &LockRequest) -> Result<()> {
    let can = request.client.capabilities;
    let unsupported =
        |what: &str| Err(Error::Unsupported { engine: can.engine, what: what.to_owned() });
    match request.mode {
        Mode::Shared if !can.shared => unsupported("readers that share a lock"),
        Mode::Permits { .. } if !can.permits => unsupported("semaphores"),
        _ => Ok(()),
    }
}

/// Passes the gate if there is one, then asks the engine, with a fresh claim each time the engine
/// has lost track of the one before.
async fn admitted(
    request: &LockRequest,
    mut claim: Arc<Claim>,
    wait: Wait,
) -> Result<Option<Guard>> {
    let mut pass = None;
    while request.gated && pass.is_none() {
        match at_the_gate(request, &claim, wait).await {
            None => return Ok(None),
            // This task was not polled for longer than the lease lasted.
            Some(Turn::Granted(guard)) if guard.is_lost() => claim = request.claim(),
            Some(Turn::Granted(guard)) => return Ok(Some(guard)),
            Some(Turn::Ask(ours)) => pass = Some(ours),
        }
    }
    loop {
        match ask(request, claim, wait, &mut pass).await? {
            Admission::Granted(guard) => return Ok(Some(guard)),
            Admission::NotInTime => return Ok(None),
            Admission::Forgotten(error) if request.client.clock.now() >= wait.deadline() => {
                return Err(error);
            }
            Admission::Forgotten(_) => tokio::time::sleep(ASK_AGAIN).await,
        }
        claim = request.claim();
    }
}

/// Waits for the turn; `None` if it does not come in time.
async fn at_the_gate(request: &LockRequest, claim: &Arc<Claim>, wait: Wait) -> Option<Turn> {
    let client = &request.client;
    match client.gate.enter(claim, &request.options, wait != Wait::No)? {
        Entered::Pass(pass) => Some(Turn::Ask(pass)),
        Entered::InLine(place) => {
            let offered = Some(place.offered.clone());
            let undo = WithdrawOnDrop { client, claim: Some(claim.clone()), offered };
            let turn = place.turn(&client.clock, wait.deadline()).await?;
            undo.defuse();
            Some(turn)
        }
    }
}

enum Admission {
    Granted(Guard),
    NotInTime,
    /// The engine does not know the claim any more, or told of the grant too late: it is withdrawn,
    /// and never used again.
    Forgotten(Error),
}

/// Asks the engine, and withdraws the claim unless the outcome is clear. The pass goes with a
/// grant.
async fn ask(
    request: &LockRequest,
    claim: Arc<Claim>,
    wait: Wait,
    pass: &mut Option<Pass>,
) -> Result<Admission> {
    let client = &request.client;
    // First, because a release may have taken the claim along already.
    let undo = WithdrawOnDrop::new(client, &claim);
    let mut visit = Some(client.visit()?);
    let granted = {
        let mut granting = client.engine.acquire(&claim, wait);
        // Mostly the engine answers at once, and then nobody needs to know that it was asked.
        match poll!(&mut granting) {
            Poll::Ready(granted) => granted,
            Poll::Pending => {
                let _under_way = client.awaits(&claim);
                visit = None;
                let began = client.clock.now();
                let silent = match wait {
                    Wait::Until(deadline) => deadline.max(began) + SILENT_AFTER,
                    Wait::No | Wait::Forever => Moment::NEVER,
                };
                tokio::select! {
                    biased;
                    granted = granting => granted,
                    () = client.closed() => return Err(Error::Closed),
                    () = client.clock.sleep_until(silent) => {
                        let waited = client.clock.now().saturating_duration_since(began);
                        let what = format!("no answer about `{}` within {waited:.1?}", request.name);
                        let engine = client.capabilities.engine;
                        Err(Error::Unreachable { engine, what, retryable: true, source: None })
                    }
                }
            }
        }
    };
    let _until_it_is_kept = visit;
    match granted {
        Ok(Some(grant)) => {
            let guard = Guard::new(client.clone(), claim, grant, &request.options, pass);
            let Some(guard) = guard else {
                let what = "the grant was read only after its lease had run out".to_owned();
                let engine = client.capabilities.engine;
                let late = Error::Unreachable { engine, what, retryable: true, source: None };
                return Ok(Admission::Forgotten(late));
            };
            undo.defuse();
            Ok(Admission::Granted(guard))
        }
        Ok(None) => {
            undo.defuse();
            Ok(Admission::NotInTime)
        }
        Err(error @ Error::NotHeld { .. }) => Ok(Admission::Forgotten(error)),
        Err(error) => Err(error),
    }
}

async fn holder_of(client: &Client, name: &Name) -> Option<Holder> {
    let state =
        tokio::time::timeout(ASK_FOR_HOLDER, client.engine.inspect(name)).await.ok()?.ok()?;
    state.holders.into_iter().next().map(|holder| client.shown_holder(holder))
}

/// A claim that the engine may know and nobody owns yet. Dropped, it is withdrawn; if it has only
/// stood in line so far, then only if a release took it along to the engine.
pub(crate) struct WithdrawOnDrop<'a> {
    client: &'a Arc<Client>,
    claim: Option<Arc<Claim>>,
    offered: Option<Arc<AtomicBool>>,
}

impl<'a> WithdrawOnDrop<'a> {
    pub(crate) fn new(client: &'a Arc<Client>, claim: &Arc<Claim>) -> Self {
        Self { client, claim: Some(claim.clone()), offered: None }
    }

    pub(crate) fn defuse(mut self) {
        self.claim = None;
    }
}

impl Drop for WithdrawOnDrop<'_> {
    fn drop(&mut self) {
        let known = self.offered.as_ref().is_none_or(|offered| offered.load(Ordering::Acquire));
        if let Some(claim) = self.claim.take().filter(|_| known) {
            self.client.withdraw_in_background(claim);
        }
    }
}

/// A release under way. Dropped before the engine has answered, it ends in the background.
struct ReleaseOnDrop {
    client: Arc<Client>,
    claim: Arc<Claim>,
    next: Option<InLine>,
    pass: Option<Pass>,
    answered: bool,
}

impl ReleaseOnDrop {
    /// The engine has answered: the next in line, if any, learns what it got.
    fn hand_over(mut self, grant: Option<Grant>) {
        self.answered = true;
        let Some(next) = self.next.take() else { return };
        let claim = next.claim.clone();
        let guard = grant.and_then(|grant| {
            let client = self.client.clone();
            Guard::new(client, claim.clone(), grant, &next.options, &mut self.pass)
        });
        let turn = match (guard, self.pass.take()) {
            (Some(guard), _) => Turn::Granted(guard),
            // Not granted, or told too late: it asks by the same claim, which is the first again.
            (None, Some(pass)) => Turn::Ask(pass),
            (None, None) => return,
        };
        if let Err(Turn::Ask(_)) = next.tell(turn) {
            // It left the line while we took it along, and may stand in the engine's queue now.
            // (A guard that nobody took releases itself.)
            self.client.withdraw_in_background(claim);
        }
    }
}

impl Drop for ReleaseOnDrop {
    fn drop(&mut self) {
        if self.answered {
            return;
        }
        self.client.withdraw_in_background(self.claim.clone());
        if let (Some(next), Some(pass)) = (self.next.take(), &self.pass) {
            if next.is_gone() {
                // It left before it could know that the engine may know it.
                self.client.withdraw_in_background(next.claim.clone());
            }
            pass.put_back(next);
        }
    }
}
