//! What all locks of one connection share.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::{Notify, watch};

use crate::acquire::{release_soon, withdraw_until_done};
use crate::clock::Clock;
use crate::engine::{Capabilities, Claim, ClaimId, Engine, Grant, Holder, drift};
use crate::error::{Error, LossReason, Result};
use crate::fork;
use crate::gate::Gate;
use crate::hash::FastMap;
use crate::keeper::Keeper;
use crate::report;
use crate::sync;
use crate::telemetry::Telemetry;
use crate::token::Token;

/// How long a closing takes at most. An engine that does not answer by then frees what is left when
/// its leases end.
const CLOSE_WITHIN: Duration = Duration::from_secs(10);

/// How long closing waits for those who are about to end by themselves. Their futures may rest.
const LEAVE_WITHIN: Duration = Duration::from_secs(1);

/// How long closing waits for a subscriber or recorder that is slow.
const FLUSH_WITHIN: Duration = Duration::from_millis(200);

/// The pause before an engine that did not answer is asked once more, and how long it is asked.
const ASK_AGAIN: Duration = Duration::from_millis(10);
const ASK_FOR: Duration = Duration::from_secs(3);

/// One connection to one home: its engine, its keeper, and the gate its own tasks queue at.
pub(crate) struct Client {
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) capabilities: Capabilities,
    pub(crate) identity: String,
    /// The identity, and what the tokens that users see depend on.
    pub(crate) home: String,
    pub(crate) clock: Clock,
    pub(crate) keeper: Keeper,
    pub(crate) gate: Arc<Gate>,
    pub(crate) telemetry: Telemetry,
    pub(crate) settings: Settings,
    forks: u32,
    closed: AtomicBool,
    closing: Notify,
    /// What the closing came to, once it is done: what could not be done, if anything.
    done: watch::Sender<Option<Option<String>>>,
    visitors: AtomicUsize,
    left: Notify,
    /// The claims that the engine may know and no guard holds yet.
    under_way: Mutex<FastMap<ClaimId, Arc<Claim>>>,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Every lock of a client shows it, so it is short.
        write!(f, "Client({})", self.identity)
    }
}

/// What a URL and a builder can set for all locks of a client.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// The ttl of locks that do not ask for another.
    pub(crate) ttl: Duration,
    /// Added to every token the engine gives, for moves between engines.
    pub(crate) token_base: u64,
    /// Metrics carry the lock's name as a label.
    pub(crate) label_names: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self { ttl: Duration::from_secs(30), token_base: 0, label_names: false }
    }
}

impl Client {
    pub(crate) fn new(engine: Arc<dyn Engine>, keeper: Keeper, settings: Settings) -> Arc<Self> {
        fork::notice();
        let capabilities = engine.capabilities();
        let identity = engine.identity();
        Arc::new(Self {
            home: home(&identity, settings.token_base),
            identity,
            clock: keeper.clock().clone(),
            gate: Arc::default(),
            telemetry: Telemetry::new(capabilities.engine, settings.label_names),
            forks: fork::generation(),
            closed: AtomicBool::new(false),
            closing: Notify::new(),
            done: watch::Sender::new(None),
            visitors: AtomicUsize::new(0),
            left: Notify::new(),
            under_way: Mutex::default(),
            engine,
            capabilities,
            keeper,
            settings,
        })
    }

    /// Whether this process is a fork of the one that made this client. Whatever belongs to the
    /// parent must then be left alone.
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

    /// The token as users see it.
    pub(crate) fn shown(&self, token: Token) -> Token {
        token.lifted(self.settings.token_base)
    }

    pub(crate) fn shown_holder(&self, holder: Holder) -> Holder {
        Holder { token: holder.token.map(|token| self.shown(token)), ..holder }
    }

    /// The lease that `claim` holds by `grant`, looked up without renewing it.
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

    /// Removes, in the background, what an acquisition may have left behind.
    pub(crate) fn withdraw_in_background(self: &Arc<Self>, claim: Arc<Claim>) {
        if !self.is_forked() {
            let client = self.clone();
            self.keeper.run(async move { withdraw_until_done(&client, &claim).await });
        }
    }

    /// Something begins that closing must let end first: a request that the engine may answer at
    /// once, or somebody who cleans up when he leaves.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub(crate) fn visit(&self) -> Result<Visit<'_>> {
        let visit = self.visit_anyway();
        // Closing sets the flag before it counts the visitors, so one of us sees the other.
        match self.is_closed() {
            true => Err(Error::Closed),
            false => Ok(visit),
        }
    }

    /// As [`visit`](Client::visit), for what gives back and is welcome to the last.
    pub(crate) fn visit_anyway(&self) -> Visit<'_> {
        self.visitors.fetch_add(1, Ordering::SeqCst);
        Visit { client: self }
    }

    /// The engine does not answer at once about `claim`. Until this is dropped, closing withdraws
    /// the claim itself: the task that waits may not run again before the engine is closed.
    pub(crate) fn awaits(&self, claim: &Arc<Claim>) -> UnderWay<'_> {
        self.under_way().insert(claim.id, claim.clone());
        UnderWay { client: self, id: claim.id }
    }

    /// Asks once more what the engine did not answer, for three seconds or half a ttl. Only for
    /// requests that change nothing when they are repeated.
    pub(crate) async fn asked_again<T, F>(&self, ttl: Duration, ask: impl Fn() -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let give_up = self.clock.now() + ASK_FOR.min(ttl / 2);
        loop {
            let again = match ask().await {
                Err(error) if error.is_retryable() => (self.clock.now() + ASK_AGAIN, error),
                answer => return answer,
            };
            if again.0 >= give_up {
                return Err(again.1);
            }
            self.clock.sleep_until(again.0).await;
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

    fn withdraw_what_is_under_way(self: &Arc<Self>) {
        let under_way: Vec<_> = self.under_way().values().cloned().collect();
        under_way.into_iter().for_each(|claim| self.withdraw_in_background(claim));
    }

    fn under_way(&self) -> MutexGuard<'_, FastMap<ClaimId, Arc<Claim>>> {
        sync::lock(&self.under_way)
    }

    /// Releases everything this client holds, withdraws what it waits for, finishes what runs in
    /// the background, and closes the engine. It goes on if nobody waits for it, and whoever calls
    /// it again waits for the same closing.
    pub(crate) async fn close(self: &Arc<Self>) -> Result<()> {
        if self.is_forked() {
            return Ok(());
        }
        let mut done = self.done.subscribe();
        if !self.closed.swap(true, Ordering::SeqCst) {
            self.keeper.runtime().spawn(close_all(self.clone()));
        }
        // The sender lives in this very client, so this ends only when the closing is done.
        let outcome = done.wait_for(Option::is_some).await;
        match outcome.ok().and_then(|outcome| outcome.clone()).flatten() {
            None => Ok(()),
            Some(what) => {
                let engine = self.capabilities.engine;
                Err(Error::Unreachable { engine, what, retryable: false, source: None })
            }
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
    client.gate.close();
    client.closing.notify_waiters();
    let failed = match tokio::time::timeout(CLOSE_WITHIN, give_everything_back(&client)).await {
        Ok(failed) => failed,
        Err(_) => Some(format!("not everything was released within {CLOSE_WITHIN:?}")),
    };
    client.engine.close().await;
    if !client.clock.is_virtual() {
        report::flush(FLUSH_WITHIN).await;
    }
    client.done.send_replace(Some(
        failed.map(|what| format!("{what}; what is still held ends with its lease")),
    ));
}

/// What could not be given back, if anything.
async fn give_everything_back(client: &Arc<Client>) -> Option<String> {
    let all_left = async {
        while client.visitors.load(Ordering::SeqCst) > 0 {
            client.left.notified().await;
        }
    };
    let rests = tokio::time::timeout(LEAVE_WITHIN, all_left).await.is_err();
    client.withdraw_what_is_under_way();
    let releases = client.keeper.holds().into_iter().map(release_soon);
    let outcomes = futures_util::future::join_all(releases).await;
    // Releases of the user's own may have come to wait for the engine meanwhile.
    client.withdraw_what_is_under_way();
    client.keeper.finish().await;
    // A lock that was lost before needs no release.
    let failed = outcomes.into_iter().find_map(|outcome| match outcome {
        Ok(()) | Err(Error::Lost { .. } | Error::NotHeld { .. }) => None,
        Err(error) => Some(error.to_string()),
    });
    let rests =
        rests.then_some("a party of a barrier, or a ticket's new holder, did not leave in time");
    failed.or(rests.map(str::to_owned))
}

/// Something that closing must let end first, until this is dropped.
pub(crate) struct Visit<'a> {
    client: &'a Client,
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        let last = self.client.visitors.fetch_sub(1, Ordering::SeqCst) == 1;
        if last && self.client.is_closed() {
            self.client.left.notify_one();
        }
    }
}

/// A claim is under way to the engine, until this is dropped.
pub(crate) struct UnderWay<'a> {
    client: &'a Client,
    id: ClaimId,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.client.under_way().remove(&self.id);
    }
}
