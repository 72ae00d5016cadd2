//! The front door: an engine, a namespace and defaults make primitives.

use std::sync::Arc;

use futures_core::stream::BoxStream;
use futures_util::StreamExt;

use crate::acquire::LockRequest;
use crate::attach;
use crate::barrier::Barrier;
use crate::client::{Client, Settings};
use crate::election::Election;
use crate::engine::{Break, Capabilities, Engine, Holder, LockState, Mode, Scope, watch};
use crate::error::{Error, Result};
use crate::guard::Guard;
use crate::hold::ClientGate;
use crate::keeper::Keeper;
use crate::latch::Latch;
use crate::mutex::Mutex;
use crate::name::{Name, Prefix};
use crate::rwlock::RwLock;
use crate::semaphore::Semaphore;
use crate::ticket::{Lease, Ticket};

/// A connection to where locks live. Cheap to clone; all clones share one keeper.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockset::Result<()> {
/// let locks = lockset::Lockset::connect("memory:").await?;
/// let guard = locks.mutex("orders/42")?.lock().await?;
/// println!("token {}", guard.token());
/// guard.release().await?;
/// locks.close().await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Lockset {
    client: Arc<Client>,
    gate: Arc<ClientGate>,
    namespace: Option<Name>,
}

impl Lockset {
    /// Locks on an engine made elsewhere: for tests on virtual time, and for engines of your own.
    ///
    /// # Errors
    /// [`Error::Unreachable`] if the keeper's thread cannot be started.
    pub fn with_engine(engine: Arc<dyn Engine>) -> Result<Self> {
        let keeper = Keeper::new(engine.clock())?;
        Ok(Self::from_client(Client::new(engine, keeper, Settings::default())))
    }

    pub(crate) fn from_client(client: Arc<Client>) -> Self {
        Self { client, gate: Arc::default(), namespace: None }
    }

    /// The same connection, with every name below `outer`: `orders` in the namespace `shop` is the
    /// lock `shop/orders`.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> lockset::Result<()> {
    /// # let locks = lockset::Lockset::connect("memory:").await?;
    /// let shop = locks.namespace("shop")?;
    /// let guard = shop.mutex("orders")?.lock().await?;
    /// assert_eq!(guard.name().as_str(), "shop/orders");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if `outer` is not a name.
    pub fn namespace(&self, outer: impl TryInto<Name, Error: Into<Error>>) -> Result<Self> {
        Ok(Self { namespace: Some(self.name(outer)?), ..self.clone() })
    }

    /// The engine's name, such as `local`.
    pub fn engine(&self) -> &'static str {
        self.client.capabilities.engine
    }

    /// Where the locks of this client live: a URL without secrets where one can be given, the same
    /// for all clients of one home. Tickets carry it.
    pub fn home(&self) -> &str {
        &self.client.home
    }

    /// What the engine can do.
    pub fn capabilities(&self) -> Capabilities {
        self.client.capabilities
    }

    /// One holder at a time.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `name` is not a [`Name`].
    pub fn mutex(&self, name: impl TryInto<Name, Error: Into<Error>>) -> Result<Mutex> {
        self.request(name, Mode::Exclusive, true).map(Mutex::new)
    }

    /// Many readers or one writer.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `name` is not a [`Name`].
    pub fn rwlock(&self, name: impl TryInto<Name, Error: Into<Error>>) -> Result<RwLock> {
        self.request(name, Mode::Exclusive, false).map(RwLock::new)
    }

    /// At most `limit` permits at a time. All who use the name must agree on the limit.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `name` is not a [`Name`] or `limit` is zero.
    pub fn semaphore(
        &self,
        name: impl TryInto<Name, Error: Into<Error>>,
        limit: u32,
    ) -> Result<Semaphore> {
        if limit == 0 {
            return Err(Error::invalid("limit", "0", "a semaphore has at least one permit"));
        }
        self.request(name, Mode::Permits { take: 1, limit }, false).map(Semaphore::new)
    }

    /// One leader at a time, known to all.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `name` is not a [`Name`].
    pub fn election(&self, name: impl TryInto<Name, Error: Into<Error>>) -> Result<Election> {
        self.request(name, Mode::Exclusive, true).map(Election::new)
    }

    /// A door that opens when it was counted down `count` times, and stays open.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `name` is not a [`Name`] or `count` is zero or above
    /// [`Latch::MAX_COUNT`]; [`Error::Unsupported`] if the engine has no cells.
    pub fn latch(&self, name: impl TryInto<Name, Error: Into<Error>>, count: u32) -> Result<Latch> {
        Latch::new(self.client.clone(), self.name(name)?, count)
    }

    /// A place where `parties` wait for each other, again and again.
    ///
    /// # Errors
    /// As for [`latch`](Lockset::latch).
    pub fn barrier(
        &self,
        name: impl TryInto<Name, Error: Into<Error>>,
        parties: u32,
    ) -> Result<Barrier> {
        Barrier::new(self.client.clone(), self.name(name)?, parties)
    }

    /// Takes over a lock that another process let go of with [`Guard::detach`]. The lock is looked
    /// after from now on, and released when the guard is dropped.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> lockset::Result<()> {
    /// # let locks = lockset::Lockset::connect("memory:").await?;
    /// use lockset::{LockOptions, Ticket};
    /// let options = LockOptions::default().detachable();
    /// let ticket = locks.mutex("release")?.with(options).lock().await?.detach().await?;
    ///
    /// let written = ticket.to_string(); // a file, an environment variable, a queue …
    /// let guard = locks.attach(&written.parse::<Ticket>()?).await?;
    /// guard.release().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if the ticket is for another engine or another home.
    /// [`Error::Lost`] if the lock is no longer held, or the ticket was attached before:
    /// [`LossReason::TicketUsed`](crate::LossReason::TicketUsed). [`Error::Unreachable`] without an
    /// answer; if the lock was taken over nevertheless, it is released. A lock that was asked back
    /// is still held, [`State::Uncertain`](crate::State::Uncertain), until its lease ends.
    ///
    /// # Cancel safety
    /// If cancelled, the lock stays as it was, or is released.
    pub async fn attach(&self, ticket: &Ticket) -> Result<Guard> {
        attach::attach(&self.client, ticket).await
    }

    /// Renews the lease of a lock that was let go of with [`Guard::detach`]. The lock is not taken
    /// over: the ticket can still be attached.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> lockset::Result<()> {
    /// # let locks = lockset::Lockset::connect("memory:").await?;
    /// # use lockset::LockOptions;
    /// let options = LockOptions::default().detachable();
    /// let ticket = locks.mutex("release")?.with(options).lock().await?.detach().await?;
    /// let lease = locks.renew(&ticket).await?;
    /// assert!(lease.valid_for.as_secs() > 20);
    /// let guard = locks.attach(&ticket).await?;
    /// # guard.release().await }
    /// ```
    ///
    /// # Errors
    /// As for [`attach`](Lockset::attach); [`Error::Lost`] with the reason
    /// [`Revoked`](crate::LossReason::Revoked) if the lock was asked back: its running lease is the
    /// last.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn renew(&self, ticket: &Ticket) -> Result<Lease> {
        attach::renew(&self.client, ticket).await
    }

    /// What is known of one name now.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> lockset::Result<()> {
    /// # let locks = lockset::Lockset::connect("memory:").await?;
    /// let _guard = locks.mutex("orders/42")?.lock().await?;
    /// let state = locks.inspect("orders/42").await?;
    /// assert_eq!((state.holders.len(), state.waiters.len()), (1, 0));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if `name` is not a [`Name`]; [`Error::Unreachable`].
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn inspect(&self, name: impl TryInto<Name, Error: Into<Error>>) -> Result<LockState> {
        let name = self.name(name)?;
        self.client.check_usable()?;
        Ok(self.client.settings.shown_state(self.client.engine.inspect(&name).await?))
    }

    /// All names with this prefix that are held or waited for.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> lockset::Result<()> {
    /// # let locks = lockset::Lockset::connect("memory:").await?;
    /// let _guard = locks.mutex("orders/42")?.lock().await?;
    /// assert_eq!(locks.list("orders/").await?.len(), 1);
    /// assert_eq!(locks.list("jobs/").await?.len(), 0);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if `prefix` is not a prefix of names; [`Error::Unreachable`].
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn list(&self, prefix: &str) -> Result<Vec<LockState>> {
        let prefix = self.prefix(prefix)?;
        self.client.check_usable()?;
        let states = self.client.engine.list(&prefix).await?;
        Ok(states.into_iter().map(|state| self.client.settings.shown_state(state)).collect())
    }

    /// The state of every name with this prefix, then of each again whenever it may have changed.
    /// Full names are reported, also from within a namespace.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> lockset::Result<()> {
    /// # let locks = lockset::Lockset::connect("memory:").await?;
    /// use futures_util::StreamExt;
    /// let mut changes = locks.watch("orders/")?;
    /// let _guard = locks.mutex("orders/42")?.lock().await?;
    /// let state = changes.next().await.unwrap()?;
    /// assert_eq!(state.name.as_str(), "orders/42");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if `prefix` is not a prefix of names. Later errors come in the stream.
    pub fn watch(&self, prefix: &str) -> Result<BoxStream<'static, Result<LockState>>> {
        self.client.check_usable()?;
        Ok(self.client.watch(Scope::Prefix(self.prefix(prefix)?)))
    }

    /// The state of one name, now and whenever it may have changed.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `name` is not a [`Name`]. Later errors come in the stream.
    pub fn watch_name(
        &self,
        name: impl TryInto<Name, Error: Into<Error>>,
    ) -> Result<BoxStream<'static, Result<LockState>>> {
        self.client.check_usable()?;
        Ok(self.client.watch(Scope::Name(self.name(name)?)))
    }

    /// Takes a lock away from its holders, and returns them. With [`Break::Now`] two holders may
    /// act at the same time until the old one notices; only tokens help then. Tokens keep growing.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> lockset::Result<()> {
    /// # let locks = lockset::Lockset::connect("memory:").await?;
    /// use lockset::{Break, LossReason};
    /// let stuck = locks.mutex("nightly")?.lock().await?;
    /// locks.force_release("nightly", Break::Now).await?;
    /// assert_eq!(stuck.lost().await, LossReason::Broken);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if `name` is not a [`Name`]; [`Error::Unreachable`].
    ///
    /// # Cancel safety
    /// May be cancelled and repeated.
    pub async fn force_release(
        &self,
        name: impl TryInto<Name, Error: Into<Error>>,
        how: Break,
    ) -> Result<Vec<Holder>> {
        let name = self.name(name)?;
        self.client.check_usable()?;
        let broken = self.client.engine.force_release(&name, how).await?;
        Ok(broken.into_iter().map(|holder| self.client.settings.shown_holder(holder)).collect())
    }

    /// Releases everything this client holds, finishes what runs in the background, and ends the
    /// connection for all clones. Guards that still live are then [`State::Lost`], and requests
    /// that still wait return [`Error::Closed`].
    ///
    /// Without it, what is still held when the process ends is freed by the end of its lease, or
    /// at once where the engine can see the process die.
    ///
    /// # Errors
    /// The first [`Error::Unreachable`] of a release, after all were tried; or one that says that
    /// a party of a [`Barrier`](crate::Barrier) did not leave in time, and may stay counted.
    ///
    /// # Cancel safety
    /// If cancelled, the releases go on in the background.
    ///
    /// [`State::Lost`]: crate::State::Lost
    pub async fn close(&self) -> Result<()> {
        self.client.close(|| self.gate.close()).await
    }

    #[cfg(feature = "blocking")]
    pub(crate) fn client(&self) -> &Arc<Client> {
        &self.client
    }

    fn request(
        &self,
        name: impl TryInto<Name, Error: Into<Error>>,
        mode: Mode,
        gated: bool,
    ) -> Result<LockRequest> {
        let (client, gate) = (self.client.clone(), self.gate.clone());
        Ok(LockRequest::new(client, gate, self.name(name)?, mode, gated))
    }

    fn name(&self, name: impl TryInto<Name, Error: Into<Error>>) -> Result<Name> {
        let name = name.try_into().map_err(Into::into)?;
        match &self.namespace {
            None => Ok(name),
            Some(outer) => name.below(outer),
        }
    }

    fn prefix(&self, text: &str) -> Result<Prefix> {
        let prefix: Prefix = text.parse()?;
        Ok(match &self.namespace {
            None => prefix,
            Some(outer) => prefix.below(outer),
        })
    }
}

impl Client {
    /// The states of all names in scope, then of each that changed.
    pub(crate) fn watch(&self, scope: Scope) -> BoxStream<'static, Result<LockState>> {
        let settings = self.settings;
        let states = watch(&self.engine, self.clock.clone(), scope);
        let states = states.map(move |state| state.map(|state| settings.shown_state(state)));
        states.take_until(Box::pin(self.until_closed())).boxed()
    }
}
