//! From a primitive to the engine: gate, deadline, span, and the duty to leave nothing behind.

use std::fmt;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tracing::Instrument;

use crate::client::{Client, WithdrawOnDrop};
use crate::clock::Moment;
use crate::engine::{Admission, Claim, ClaimId, Holder, Mode, Wait};
use crate::error::{Error, Result};
use crate::gate::{GateEntry, Turn};
use crate::guard::Guard;
use crate::hold::{ClientGate, GatePass, Hold, HoldHandle, State};
use crate::name::Name;
use crate::options::{LockOptions, ResolvedOptions};
use crate::sync::on_first_wait;
use crate::telemetry::Outcome;

/// The pause before a claim that the engine forgot is replaced by a fresh one.
const RETRY_PAUSE: Duration = Duration::from_millis(5);
/// How much longer than the given time an acquisition waits for a silent engine.
const SILENCE_TIMEOUT: Duration = Duration::from_millis(500);
/// How long a timeout error may take to find out which client holds the lock.
const HOLDER_TIMEOUT: Duration = Duration::from_millis(500);

/// A lock as a primitive requests it. Each acquisition makes a fresh claim of it.
#[derive(Clone)]
pub(crate) struct LockRequest {
    pub(crate) client: Arc<Client>,
    pub(crate) gate: Arc<ClientGate>,
    pub(crate) name: Name,
    pub(crate) mode: Mode,
    /// `Err` with options that the engine cannot keep: locking reports why.
    options: Result<ResolvedOptions, LockOptions>,
    /// Whether claims pass the gate first. Only for primitives that are always exclusive: readers
    /// and writers of one name must meet in the engine's queue to keep their order.
    pub(crate) gated: bool,
}

impl fmt::Debug for LockRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // All primitives show this, some of them several.
        write!(f, "{:?} {} on {:?}", self.name, self.mode, self.client)
    }
}

impl LockRequest {
    /// A request with the default options.
    pub(crate) fn new(
        client: Arc<Client>,
        gate: Arc<ClientGate>,
        name: Name,
        mode: Mode,
        gated: bool,
    ) -> Self {
        let options = Err(LockOptions::default());
        let mut request = Self { client, gate, name, mode, options, gated };
        request.set_options(LockOptions::default());
        request
    }

    /// The same request in another mode.
    pub(crate) fn in_mode(&self, mode: Mode) -> Self {
        Self { mode, ..self.clone() }
    }

    /// Replaces the options. They are checked now, but only locking reports that they are invalid.
    pub(crate) fn set_options(&mut self, options: LockOptions) {
        self.options = self.resolve(&options).map_err(|_| options);
    }

    /// The options, if the engine can keep them.
    fn options(&self) -> Result<ResolvedOptions> {
        match &self.options {
            Ok(options) => Ok(options.clone()),
            Err(options) => self.resolve(options),
        }
    }

    fn resolve(&self, options: &LockOptions) -> Result<ResolvedOptions> {
        options.resolve(&self.client.capabilities, self.client.settings.ttl)
    }

    fn claim(&self, options: &ResolvedOptions) -> Arc<Claim> {
        Arc::new(Claim {
            id: ClaimId::random(),
            name: self.name.clone(),
            mode: self.mode,
            ttl: options.ttl,
            fixed: options.fixed,
            floor: None,
            note: options.note.clone(),
            detachable: options.detachable,
            replicas: options.replicas,
        })
    }

    fn check_mode(&self) -> Result<()> {
        let can = self.client.capabilities;
        let unsupported =
            |what: &str| Err(Error::Unsupported { engine: can.engine, what: what.to_owned() });
        match self.mode {
            Mode::Shared if !can.shared => unsupported("readers that share a lock"),
            Mode::Permits { .. } if !can.permits => unsupported("semaphores"),
            _ => Ok(()),
        }
    }
}

/// Returns `None` if the lock was not granted in time.
pub(crate) async fn acquire(request: &LockRequest, wait: Wait) -> Result<Option<Guard>> {
    let client = &request.client;
    client.check_usable()?;
    request.check_mode()?;
    let options = request.options()?;
    let claim = request.claim(&options);
    let span = tracing::info_span!(
        "lockset.acquire",
        name = %claim.name,
        engine = client.capabilities.engine,
        mode = %claim.mode,
        note = %claim.note.text,
    );
    let admitting = admit(request, &options, claim, wait).instrument(span);
    let begin_wait = || client.telemetry.waiting(&client.clock, &request.name);
    let (mut admitted, waited) = on_first_wait(admitting, begin_wait).await;
    match waited {
        None => client.telemetry.answered_at_once(&request.name, outcome(&admitted)),
        Some(waited) => waited.ended(outcome(&admitted)),
    }
    // A lock that was granted while the client closed is not handed out.
    if let Err(closed) = client.check_usable() {
        admitted = Err(closed);
    }
    Ok(admitted?.map(Guard::new))
}

/// As [`acquire`], but a timeout is an error that names the holder.
pub(crate) async fn acquire_within(request: &LockRequest, limit: Duration) -> Result<Guard> {
    let deadline = request.client.clock.now() + limit;
    match acquire(request, Wait::Until(deadline)).await? {
        Some(guard) => Ok(guard),
        None => Err(timed_out(request, limit).await),
    }
}

/// Waits as long as it takes.
pub(crate) async fn acquire_patiently(request: &LockRequest) -> Result<Guard> {
    loop {
        if let Some(guard) = acquire(request, Wait::Forever).await? {
            return Ok(guard);
        }
    }
}

/// The error for a lock that was not granted in time. It names the holder if that can be found out.
pub(crate) async fn timed_out(request: &LockRequest, waited: Duration) -> Error {
    let holder = holder_of(&request.client, &request.name).await.map(Box::new);
    Error::Timeout { name: request.name.clone(), waited, holder }
}

async fn holder_of(client: &Client, name: &Name) -> Option<Holder> {
    let state =
        tokio::time::timeout(HOLDER_TIMEOUT, client.engine.inspect(name)).await.ok()?.ok()?;
    state.holders.into_iter().next().map(|holder| client.settings.shown_holder(holder))
}

fn outcome(admitted: &Result<Option<HoldHandle>>) -> Outcome {
    match admitted {
        Ok(Some(_)) => Outcome::Granted,
        Ok(None) => Outcome::NotGranted,
        Err(_) => Outcome::Error,
    }
}

/// Passes the gate if there is one, then sends the request to the engine, with a fresh claim each
/// time the engine forgot the one before.
async fn admit(
    request: &LockRequest,
    options: &ResolvedOptions,
    mut claim: Arc<Claim>,
    wait: Wait,
) -> Result<Option<HoldHandle>> {
    let mut pass = None;
    while request.gated && pass.is_none() {
        match wait_at_gate(request, options, &claim, wait).await {
            None => return Ok(None),
            // This task was not polled for longer than the lease lasted.
            Some(Turn::Granted(hold)) if matches!(hold.state(), State::Lost(_)) => {
                claim = request.claim(options);
            }
            Some(Turn::Granted(hold)) => return Ok(Some(hold)),
            Some(Turn::Request(ours)) => pass = Some(ours),
        }
    }
    loop {
        match send(request, options, claim, wait, &mut pass).await? {
            Admitted::Granted(hold) => return Ok(Some(hold)),
            Admitted::NotInTime => return Ok(None),
            Admitted::Forgotten(error) if request.client.clock.now() >= wait.deadline() => {
                return Err(error);
            }
            Admitted::Forgotten(_) => tokio::time::sleep(RETRY_PAUSE).await,
        }
        claim = request.claim(options);
    }
}

/// Waits for the turn of the claim. Returns `None` if it does not come in time.
async fn wait_at_gate(
    request: &LockRequest,
    options: &ResolvedOptions,
    claim: &Arc<Claim>,
    wait: Wait,
) -> Option<Turn<HoldHandle>> {
    let client = &request.client;
    match request.gate.enter(claim, options, wait != Wait::No)? {
        GateEntry::Pass(pass) => Some(Turn::Request(pass)),
        GateEntry::Queued(pending) => {
            let undo = WithdrawOnDrop::at_gate(client, claim, pending.offered.clone());
            let turn = pending.wait(&client.clock, wait.deadline()).await?;
            undo.disarm();
            Some(turn)
        }
    }
}

/// The engine's decision about one claim.
enum Admitted {
    Granted(HoldHandle),
    NotInTime,
    /// The engine no longer knows the claim, or the grant was read too late. The claim is withdrawn
    /// and never used again.
    Forgotten(Error),
}

/// Why an acquisition does not wait for its engine any longer: the client closed, or the engine is
/// silent.
async fn interruption(request: &LockRequest, wait: Wait) -> Error {
    let client = &request.client;
    let started = client.clock.now();
    let silent_at = match wait {
        Wait::Until(deadline) => deadline.max(started) + SILENCE_TIMEOUT,
        Wait::No | Wait::Forever => Moment::NEVER,
    };
    tokio::select! {
        biased;
        () = client.closed() => Error::Closed,
        () = client.clock.sleep_until(silent_at) => {
            let waited = client.clock.now().saturating_duration_since(started);
            let name = &request.name;
            client.no_reply(&format!("no answer about `{name}` within {waited:.1?}"))
        }
    }
}

/// Sends the claim to the engine, and withdraws it unless the outcome is clear. The pass is taken
/// by a grant.
async fn send(
    request: &LockRequest,
    options: &ResolvedOptions,
    claim: Arc<Claim>,
    wait: Wait,
    pass: &mut Option<GatePass>,
) -> Result<Admitted> {
    let client = &request.client;
    // Armed first, because a release may have taken the claim along already.
    let undo = WithdrawOnDrop::new(client, &claim);
    let mut in_flight = Some(client.start()?);
    let granted = {
        let mut granting = client.engine.acquire(&claim, wait);
        let mut interrupted = pin!(interruption(request, wait));
        let mut tracked = None;
        poll_fn(|context| {
            if let Poll::Ready(granted) = granting.as_mut().poll(context) {
                return Poll::Ready(granted);
            }
            // An engine that answers immediately saves tracking the claim.
            tracked.get_or_insert_with(|| client.track(&claim));
            in_flight = None;
            interrupted.as_mut().poll(context).map(Err)
        })
        .await
    };
    let _until_held = in_flight;
    match granted {
        Ok(Admission::Granted(grant)) => {
            match Hold::start(client.clone(), claim, grant, options, pass) {
                Some(hold) => {
                    undo.disarm();
                    Ok(Admitted::Granted(hold))
                }
                None => {
                    let what = "the grant was read only after its lease had run out";
                    Ok(Admitted::Forgotten(client.no_reply(what)))
                }
            }
        }
        Ok(Admission::NotInTime) => {
            undo.disarm();
            Ok(Admitted::NotInTime)
        }
        Ok(Admission::Forgotten) => {
            Ok(Admitted::Forgotten(Error::NotHeld { name: request.name.clone() }))
        }
        Err(error) => Err(error),
    }
}
