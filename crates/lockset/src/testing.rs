//! The way to test a service that uses locks: a lock server inside the test, on virtual time, with
//! faults to inject.
//!
//! A [`TestServer`] is the memory engine on tokio's clock. In a test with a paused clock
//! (`#[tokio::test(start_paused = true)]`, feature `test-util` of tokio) leases, renewals and
//! timeouts behave as on a real server, but a minute takes microseconds. The service under test
//! takes a [`Lockset`] and cannot tell the difference.
//!
//! | fault | how | what the service sees |
//! |---|---|---|
//! | the server cannot be reached | [`Connection::cut`] | [`Error::Unreachable`] at once; guards become uncertain, and are lost when their lease ends |
//! | the server does not reply | [`Connection::freeze`] | calls that wait; otherwise as above |
//! | a lease lapses | [`TestServer::lapse`] | [`LossReason::Expired`] at once |
//! | an operator breaks a lock | [`Lockset::force_release`] of another client | [`LossReason::Broken`] or `Revoked` |
//! | another process holds the lock | lock it by another [`client`](TestServer::client) | a wait, `None`, [`Error::Timeout`] |
//!
//! ```
//! use std::time::Duration;
//! use lockset::testing::TestServer;
//! use lockset::{LossReason, RunError, State};
//!
//! # let runtime = tokio::runtime::Builder::new_current_thread()
//! #     .enable_all().start_paused(true).build()?;
//! # runtime.block_on(async {
//! // #[tokio::test(start_paused = true)]
//! let server = TestServer::new();
//! let (locks, connection) = server.faulty_client()?;
//! let guard = locks.mutex("nightly")?.lock().await?;
//!
//! connection.cut();
//! tokio::time::sleep(Duration::from_secs(15)).await; // a renewal fails
//! assert_eq!(guard.state(), State::Uncertain);
//! assert_eq!(guard.lost().await, LossReason::Expired); // at the end of the lease
//! assert!(server.client()?.mutex("nightly")?.lock().await.is_ok());
//! # Ok::<(), lockset::Error>(()) })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use futures_core::stream::BoxStream;
use futures_util::StreamExt;
use tokio::sync::watch;

use crate::clock::Clock;
use crate::engine::memory::Memory;
use crate::engine::{
    Admission, Amend, Break, Capabilities, Claim, ClaimId, Engine, Event, Grant, Hint, Holder,
    LockState, Renewal, Scope, Swap, Version, Wait,
};
use crate::error::{Error, LossReason, Result};
use crate::locks::Lockset;
use crate::name::{Name, Prefix};
use crate::sync;

/// A lock server inside a test; see the [module](self).
#[derive(Debug)]
pub struct TestServer {
    memory: Memory,
    lapsed: Lapsed,
}

/// Claims whose lease was ended by [`TestServer::lapse`].
type Lapsed = Arc<Mutex<HashSet<ClaimId>>>;

impl TestServer {
    /// An empty server on the clock of the current tokio runtime. Its clients must be used inside
    /// that runtime.
    #[expect(clippy::new_without_default, reason = "it needs a runtime around it")]
    pub fn new() -> Self {
        Self { memory: Memory::new(Clock::tokio()), lapsed: Lapsed::default() }
    }

    /// A client, as another process would have one.
    ///
    /// # Errors
    /// [`Error::Unreachable`] outside a tokio runtime.
    pub fn client(&self) -> Result<Lockset> {
        self.faulty_client().map(|(locks, _)| locks)
    }

    /// A client, and its connection to the server, which can be disturbed.
    ///
    /// # Errors
    /// [`Error::Unreachable`] outside a tokio runtime.
    pub fn faulty_client(&self) -> Result<(Lockset, Connection)> {
        let connection = Connection(Arc::new(watch::Sender::new(Link::Up)));
        let engine = FaultyEngine {
            inner: self.memory.another_client(),
            connection: connection.clone(),
            lapsed: self.lapsed.clone(),
        };
        Ok((Lockset::with_engine(Arc::new(engine))?, connection))
    }

    /// Ends the leases of all holders of `name`, as if they had not been renewed in time. The next
    /// waiter is granted the lock; the holders learn it at once, or when their connection is back.
    /// `name` is the full name, with its namespace. Returns the number of holders.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `name` is not a [`Name`].
    ///
    /// # Cancel safety
    /// May be cancelled and repeated.
    pub async fn lapse(&self, name: impl TryInto<Name, Error: Into<Error>>) -> Result<usize> {
        let name = name.try_into().map_err(Into::into)?;
        let holders = self.memory.inspect(&name).await?.holders;
        sync::lock(&self.lapsed).extend(holders.iter().filter_map(|holder| holder.claim));
        Ok(self.memory.force_release(&name, Break::Now).await?.len())
    }
}

/// The connection of one client to a [`TestServer`]. Clones are the same connection.
#[derive(Clone, Debug)]
pub struct Connection(Arc<watch::Sender<Link>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    Up,
    Frozen,
    Cut,
}

impl Connection {
    /// Requests fail at once, with a retryable [`Error::Unreachable`]. Those under way fail, too;
    /// whether the server executed them is unknown, as with a real connection.
    pub fn cut(&self) {
        self.0.send_replace(Link::Cut);
    }

    /// Requests get no reply until the connection is [restored](Connection::restore) or
    /// [cut](Connection::cut). Those that the server has executed already get it then.
    pub fn freeze(&self) {
        self.0.send_replace(Link::Frozen);
    }

    /// The connection works again.
    pub fn restore(&self) {
        self.0.send_replace(Link::Up);
    }

    /// Waits while the connection is frozen.
    async fn reachable(&self) -> Result<()> {
        // `self` owns the sender, so waiting cannot fail.
        let _ = self.0.subscribe().wait_for(|link| *link != Link::Frozen).await;
        if *self.0.borrow() == Link::Cut { Err(self.unreachable()) } else { Ok(()) }
    }

    /// Waits until the connection is cut.
    async fn broken(&self) -> Error {
        let _ = self.0.subscribe().wait_for(|link| *link == Link::Cut).await;
        self.unreachable()
    }

    /// Waits until the connection works.
    async fn up(&self) {
        let _ = self.0.subscribe().wait_for(|link| *link == Link::Up).await;
    }

    fn unreachable(&self) -> Error {
        let what = "the test cut the connection".to_owned();
        Error::Unreachable { engine: "memory", what, retryable: true, source: None }
    }

    /// Sends a request.
    async fn send<T>(&self, request: impl Future<Output = Result<T>>) -> Result<T> {
        self.reachable().await?;
        let reply = tokio::select! {
            biased;
            error = self.broken() => return Err(error),
            reply = request => reply,
        };
        self.reachable().await?;
        reply
    }
}

/// The memory engine behind a [`Connection`].
#[derive(Debug)]
struct FaultyEngine {
    inner: Memory,
    connection: Connection,
    lapsed: Lapsed,
}

impl FaultyEngine {
    /// The reason as the holder shall see it.
    fn reason(lapsed: &Lapsed, claim: ClaimId, reason: LossReason) -> LossReason {
        if sync::lock(lapsed).contains(&claim) { LossReason::Expired } else { reason }
    }
}

#[async_trait]
impl Engine for FaultyEngine {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn identity(&self) -> String {
        self.inner.identity()
    }

    fn clock(&self) -> Clock {
        self.inner.clock()
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        self.connection.send(self.inner.acquire(claim, wait)).await
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        let renewed = self.connection.send(async { Ok(self.inner.renew(batch).await) }).await;
        let Ok(renewed) = renewed else {
            return batch.iter().map(|_| Err(self.connection.unreachable())).collect();
        };
        let claims = batch.iter().map(|(claim, _)| claim.id);
        let explained = renewed.into_iter().zip(claims).map(|(renewed, claim)| match renewed {
            Ok(Renewal::Lost(reason)) => {
                Ok(Renewal::Lost(Self::reason(&self.lapsed, claim, reason)))
            }
            other => other,
        });
        explained.collect()
    }

    async fn amend(&self, claim: &Claim, grant: &Grant, to: Amend) -> Result<Grant> {
        self.connection.send(self.inner.amend(claim, grant, to)).await
    }

    async fn adopt(&self, claim: &Claim, grant: &Grant, successor: &Claim) -> Result<Grant> {
        self.connection.send(self.inner.adopt(claim, grant, successor)).await
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        self.connection.send(self.inner.release(claim, grant, next)).await
    }

    async fn withdraw(&self, claim: &Claim) -> Result<()> {
        self.connection.send(self.inner.withdraw(claim)).await
    }

    fn hints(&self, scope: &Scope) -> BoxStream<'static, Result<Hint>> {
        let connection = self.connection.clone();
        let hints = self.inner.hints(scope).then(move |hint| {
            let connection = connection.clone();
            async move {
                connection.up().await;
                hint
            }
        });
        hints.boxed()
    }

    async fn inspect(&self, name: &Name) -> Result<LockState> {
        self.connection.send(self.inner.inspect(name)).await
    }

    async fn list(&self, prefix: &Prefix) -> Result<Vec<LockState>> {
        self.connection.send(self.inner.list(prefix)).await
    }

    async fn cell(&self, name: &Name, expect: Version, value: Option<Vec<u8>>) -> Result<Swap> {
        self.connection.send(self.inner.cell(name, expect, value)).await
    }

    async fn force_release(&self, name: &Name, how: Break) -> Result<Vec<Holder>> {
        self.connection.send(self.inner.force_release(name, how)).await
    }

    fn events(&self) -> BoxStream<'static, Event> {
        let (connection, lapsed) = (self.connection.clone(), self.lapsed.clone());
        let events = self.inner.events().then(move |event| {
            let (connection, lapsed) = (connection.clone(), lapsed.clone());
            async move {
                connection.up().await;
                match event {
                    Event::Lost(claim, reason) => {
                        Event::Lost(claim, Self::reason(&lapsed, claim, reason))
                    }
                    other => other,
                }
            }
        });
        events.boxed()
    }
}
