//! What all locks of one connection share: engine, keeper, and how the connection is closed.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use tokio::sync::{Notify, watch};

use crate::clock::Clock;
use crate::engine::common::backoff::Backoff;
use crate::engine::{Capabilities, Claim, ClaimId, Engine, Grant, Holder, LockState, drift};
use crate::error::{Error, LossReason, Result};
use crate::fork;
use crate::hash::FastMap;
use crate::keeper::Keeper;
use crate::report::{self, report};
use crate::sync;
use crate::telemetry::Telemetry;
use crate::token::Token;

/// Timeout of a request that cleans up in the background.
pub(crate) const CLEANUP_TIMEOUT: Duration = Duration::from_secs(5);
/// Pauses between attempts to clean up: long ones, because no caller waits for it.
pub(crate) const CLEANUP_BACKOFF: Backoff =
    Backoff::new(Duration::from_millis(20), Duration::from_secs(2));
/// Timeout of closing. What is not released by then is freed when its lease ends.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long closing waits for operations that end by themselves. Their futures may not be polled.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
/// How long closing waits for a slow subscriber or recorder.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(200);
/// Pauses before a request without a reply is repeated while its caller waits.
pub(crate) const REQUEST_BACKOFF: Backoff =
    Backoff::new(Duration::from_millis(10), Duration::from_millis(500));
/// How long a request about a held lock is repeated.
const RETRY_FOR: Duration = Duration::from_secs(3);

/// One connection to one engine, and the keeper of its locks.
pub(crate) struct Client {
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) capabilities: Capabilities,
    pub(crate) identity: String,
    /// The identity, and what else decides the tokens that users see.
    pub(crate) home: String,
    pub(crate) clock: Clock,
    pub(crate) keeper: Keeper,
    pub(crate) telemetry: Arc<Telemetry>,
    pub(crate) settings: Settings,
    forks: u32,
    closed: AtomicBool,
    closing: Notify,
    /// `Some` when closing is done; the inner value says what failed.
    close_outcome: watch::Sender<Option<Option<String>>>,
    /// Operations that closing waits for.
    in_flight: AtomicUsize,
    drained: Notify,
    /// Claims that the engine may know and that no hold owns yet.
    tracked: Mutex<FastMap<ClaimId, Arc<Claim>>>,
    /// Claims on a shared lease whose withdrawal has failed for long. One job withdraws them.
    overdue: Mutex<FastMap<ClaimId, Arc<Claim>>>,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Every lock shows its client, so this is short.
        write!(f, "Client({})", self.identity)
    }
}

/// Settings of the URL and the builder for all locks of a client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    /// The default ttl.
    pub(crate) ttl: Duration,
    /// Added to every token of the engine, for moves between engines.
    pub(crate) token_base: u64,
    /// Metrics have the lock's name as a label.
    pub(crate) label_names: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self { ttl: Duration::from_secs(30), token_base: 0, label_names: false }
    }
}

impl Settings {
    /// The token as users see it. What goes back to the engine keeps the engine's token.
    pub(crate) fn shown(&self, token: Token) -> Token {
        Token::new(token.get().saturating_add(self.token_base))
    }

    /// The holder with its token as users see it.
    pub(crate) fn shown_holder(&self, holder: Holder) -> Holder {
        Holder { token: holder.token.map(|token| self.shown(token)), ..holder }
    }

    /// The state with its tokens as users see them.
    pub(crate) fn shown_state(&self, state: LockState) -> LockState {
        let holders = state.holders.into_iter().map(|holder| self.shown_holder(holder)).collect();
        LockState { fence: state.fence.map(|token| self.shown(token)), holders, ..state }
    }
}

impl Client {
    /// Starts the keeper for `engine`.
    pub(crate) fn new(engine: Arc<dyn Engine>, keeper: Keeper, settings: Settings) -> Arc<Self> {
        fork::notice();
        let capabilities = engine.capabilities();
        let identity = engine.identity();
        let telemetry = Arc::new(Telemetry::new(capabilities.engine, settings.label_names));
        keeper.start(engine.clone(), telemetry.clone());
        Arc::new(Self {
            home: home(&identity, settings.token_base),
            identity,
            clock: keeper.clock().clone(),
            telemetry,
            forks: fork::generation(),
            closed: AtomicBool::new(false),
            closing: Notify::new(),
            close_outcome: watch::Sender::new(None),
            in_flight: AtomicUsize::new(0),
            drained: Notify::new(),
            tracked: Mutex::default(),
            overdue: Mutex::default(),
            engine,
            capabilities,
            keeper,
            settings,
        })
    }

    /// Whether this process is a fork of the one that made this client. The locks then belong to
    /// the parent and must not be touched.
    pub(crate) fn is_forked(&self) -> bool {
        fork::generation() != self.forks
    }

    pub(crate) fn check_usable(&self) -> Result<()> {
        if self.is_forked() {
            return Err(Error::Unreachable {
                engine: self.capabilities.engine,
                what: "it was connected before a fork; connect again in the child".into(),
                retryable: false,
                source: None,
            });
        }
        match self.is_closed() {
            true => Err(Error::Closed),
            false => Ok(()),
        }
    }

    /// Looks up the lease that `claim` holds by `grant`, without renewing it.
    pub(crate) async fn lease_of(&self, claim: &Claim, grant: &Grant) -> Result<Grant> {
        let sent = self.clock.now();
        let state = self.engine.inspect(&claim.name).await?;
        let ours = state
            .holders
            .iter()
            .find(|holder| holder.claim == Some(claim.id) && holder.token == Some(grant.token))
            .ok_or_else(|| Error::lost(&claim.name, LossReason::Forgotten))?;
        let valid_until = (sent + ours.left).saturating_sub(drift(claim.ttl));
        Ok(Grant { valid_until, ..grant.clone() })
    }

    /// Withdraws a claim that an acquisition may have left behind.
    pub(crate) fn withdraw_in_background(self: &Arc<Self>, claim: Arc<Claim>) {
        if !self.is_forked() {
            let client = self.clone();
            self.keeper.run(client.withdraw_until_done(claim));
        }
    }

    /// Repeats the withdrawal until the engine replied. Gives up when the claim's lease is long
    /// over, or the engine refuses. A shared lease lasts as long as the client: there the claim is
    /// then one of the overdue ones, which are withdrawn together.
    async fn withdraw_until_done(self: Arc<Self>, claim: Arc<Claim>) {
        let shares_lease = self.capabilities.shared_lease && !claim.fixed && !claim.detachable;
        let long_over = self.clock.now() + claim.ttl + CLEANUP_TIMEOUT;
        let mut backoff = CLEANUP_BACKOFF;
        while let Err(error) = self.try_withdraw(&claim).await {
            let name = &claim.name;
            if self.clock.now() <= long_over && error.is_retryable() && !self.is_over() {
                backoff.pause().await;
            } else if shares_lease && !self.is_over() {
                report!(warn, name = name, error = error, "not withdrawn yet; it is tried again");
                return self.add_overdue(claim);
            } else {
                report!(warn, name = name, error = error, "not withdrawn; it ends with its lease");
                return;
            }
        }
    }

    fn add_overdue(self: &Arc<Self>, claim: Arc<Claim>) {
        let mut overdue = sync::lock(&self.overdue);
        overdue.insert(claim.id, claim);
        if overdue.len() == 1 {
            self.keeper.run(withdraw_overdue(Arc::downgrade(self)));
        }
    }

    /// Closing is done.
    fn is_over(&self) -> bool {
        self.close_outcome.borrow().is_some()
    }

    async fn try_withdraw(&self, claim: &Claim) -> Result<()> {
        let withdrawal = self.engine.withdraw(claim);
        let silent = |_| Err(self.no_reply(&format!("no reply within {CLEANUP_TIMEOUT:?}")));
        tokio::time::timeout(CLEANUP_TIMEOUT, withdrawal).await.unwrap_or_else(silent)
    }

    /// The error for a request without a reply.
    pub(crate) fn no_reply(&self, what: &str) -> Error {
        let (engine, what) = (self.capabilities.engine, what.to_owned());
        Error::Unreachable { engine, what, retryable: true, source: None }
    }

    /// Resolves when this client is closed or dropped. It does not keep the client alive.
    pub(crate) fn until_closed(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut outcome = self.close_outcome.subscribe();
        async move {
            // Fails if the client was dropped.
            let _ = outcome.wait_for(Option::is_some).await;
        }
    }

    /// Starts an operation that closing must wait for: a request that the engine may answer
    /// immediately, or one with cleanup to do on drop.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub(crate) fn start(&self) -> Result<InFlight<'_>> {
        let in_flight = self.start_cleanup();
        // Closing sets the flag before it reads the counter, so one side sees the other.
        match self.is_closed() {
            true => Err(Error::Closed),
            false => Ok(in_flight),
        }
    }

    /// As [`start`](Client::start), for operations that are also allowed while the client closes.
    pub(crate) fn start_cleanup(&self) -> InFlight<'_> {
        self.in_flight.fetch_add(1, Ordering::SeqCst);
        InFlight { client: self }
    }

    /// The engine does not answer a request about `claim` immediately. Until the result is dropped,
    /// closing withdraws the claim: the task that waits may not be polled before the engine is
    /// closed.
    pub(crate) fn track(&self, claim: &Arc<Claim>) -> TrackedClaim<'_> {
        self.tracked().insert(claim.id, claim.clone());
        TrackedClaim { client: self, id: claim.id }
    }

    /// Repeats a request about a held lock for three seconds or half a ttl.
    pub(crate) async fn retry_held<T, F>(&self, ttl: Duration, request: impl Fn() -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        self.retry(RETRY_FOR.min(ttl / 2), request).await
    }

    /// Repeats a request without a reply for this long. Only for requests that change nothing when
    /// they are repeated.
    pub(crate) async fn retry<T, F>(&self, limit: Duration, request: impl Fn() -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let (give_up, mut backoff) = (self.clock.now() + limit, REQUEST_BACKOFF);
        loop {
            let reply = request().await;
            let is_unclear = reply.as_ref().is_err_and(Error::is_retryable);
            if !is_unclear || !backoff.pause_before(&self.clock, give_up).await {
                return reply;
            }
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Pending until this client closes.
    pub(crate) async fn closed(&self) {
        let closing = self.closing.notified();
        if !self.is_closed() {
            closing.await;
        }
    }

    fn withdraw_tracked(self: &Arc<Self>) {
        let claims: Vec<_> = self.tracked().values().cloned().collect();
        claims.into_iter().for_each(|claim| self.withdraw_in_background(claim));
    }

    fn tracked(&self) -> MutexGuard<'_, FastMap<ClaimId, Arc<Claim>>> {
        sync::lock(&self.tracked)
    }

    /// Releases everything this client holds, withdraws what it waits for, finishes the background
    /// work, and closes the engine. This goes on if the future is dropped. Further calls wait for
    /// the same result. `close_gate` runs first, once.
    pub(crate) async fn close(self: &Arc<Self>, close_gate: impl FnOnce()) -> Result<()> {
        if self.is_forked() {
            return Ok(());
        }
        let mut outcome = self.close_outcome.subscribe();
        if !self.closed.swap(true, Ordering::SeqCst) {
            close_gate();
            self.keeper.runtime().spawn(close_all(self.clone()));
        }
        // The sender is part of this client, so this ends only when closing is done.
        let outcome = outcome.wait_for(Option::is_some).await;
        match outcome.ok().and_then(|outcome| outcome.clone()).flatten() {
            None => Ok(()),
            Some(what) => {
                let engine = self.capabilities.engine;
                Err(Error::Unreachable { engine, what, retryable: false, source: None })
            }
        }
    }
}

/// Withdraws overdue claims one after another, until all are withdrawn. The job does not keep a
/// client alive that its user has dropped: then its leases end.
async fn withdraw_overdue(client: Weak<Client>) {
    let mut backoff = CLEANUP_BACKOFF;
    loop {
        backoff.pause().await;
        let Some(client) = client.upgrade() else { return };
        let is_last_round = client.is_closed();
        let claims: Vec<_> = sync::lock(&client.overdue).values().cloned().collect();
        for claim in claims {
            match client.try_withdraw(&claim).await {
                Ok(()) => {
                    sync::lock(&client.overdue).remove(&claim.id);
                    backoff.reset();
                }
                // The engine does not reply to the others either.
                Err(error) if error.is_retryable() => break,
                Err(_) => {}
            }
        }
        let mut overdue = sync::lock(&client.overdue);
        if overdue.is_empty() || is_last_round {
            overdue.clear();
            return;
        }
    }
}

fn home(identity: &str, token_base: u64) -> String {
    match token_base {
        0 => identity.to_owned(),
        base => {
            let separator = if identity.contains('?') { '&' } else { '?' };
            format!("{identity}{separator}token_base={base}")
        }
    }
}

async fn close_all(client: Arc<Client>) {
    client.closing.notify_waiters();
    let failed = match tokio::time::timeout(CLOSE_TIMEOUT, release_all(&client)).await {
        Ok(failed) => failed,
        Err(_) => Some(format!("not everything was released within {CLOSE_TIMEOUT:?}")),
    };
    client.engine.close().await;
    if !client.clock.is_virtual() {
        report::flush(FLUSH_TIMEOUT).await;
    }
    client.close_outcome.send_replace(Some(
        failed.map(|what| format!("{what}; what is still held ends with its lease")),
    ));
}

/// Returns what could not be released, if anything.
async fn release_all(client: &Arc<Client>) -> Option<String> {
    let all_ended = async {
        while client.in_flight.load(Ordering::SeqCst) > 0 {
            client.drained.notified().await;
        }
    };
    let stalled = tokio::time::timeout(DRAIN_TIMEOUT, all_ended).await.is_err();
    client.withdraw_tracked();
    let releases = client.keeper.leases().into_iter().map(|lease| lease.release());
    let outcomes = futures_util::future::join_all(releases).await;
    // Releases by the user may have started to wait for the engine meanwhile.
    client.withdraw_tracked();
    client.keeper.finish().await;
    // A lock that was lost before needs no release.
    let failed = outcomes.into_iter().find_map(|outcome| match outcome {
        Ok(()) | Err(Error::Lost { .. } | Error::NotHeld { .. }) => None,
        Err(error) => Some(error.to_string()),
    });
    let stalled = stalled.then(|| "a barrier or an attach did not end in time".to_owned());
    failed.or(stalled)
}

/// An operation that closing waits for.
pub(crate) struct InFlight<'a> {
    client: &'a Client,
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        let last = self.client.in_flight.fetch_sub(1, Ordering::SeqCst) == 1;
        if last && self.client.is_closed() {
            self.client.drained.notify_one();
        }
    }
}

/// A claim that closing withdraws.
pub(crate) struct TrackedClaim<'a> {
    client: &'a Client,
    id: ClaimId,
}

impl Drop for TrackedClaim<'_> {
    fn drop(&mut self) {
        self.client.tracked().remove(&self.id);
    }
}

/// A claim that the engine may know and that no hold owns yet. Dropped, it is withdrawn. A claim
/// that only waited at the gate is withdrawn only if a release took it along to the engine.
pub(crate) struct WithdrawOnDrop<'a> {
    client: &'a Arc<Client>,
    claim: Option<Arc<Claim>>,
    offered: Option<Arc<AtomicBool>>,
}

impl<'a> WithdrawOnDrop<'a> {
    pub(crate) fn new(client: &'a Arc<Client>, claim: &Arc<Claim>) -> Self {
        Self { client, claim: Some(claim.clone()), offered: None }
    }

    /// For a claim at the gate: `offered` tells whether the engine may know it.
    pub(crate) fn at_gate(
        client: &'a Arc<Client>,
        claim: &Arc<Claim>,
        offered: Arc<AtomicBool>,
    ) -> Self {
        Self { client, claim: Some(claim.clone()), offered: Some(offered) }
    }

    pub(crate) fn disarm(mut self) {
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
