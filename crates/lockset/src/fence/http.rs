//! The check in front of an HTTP service, as a `tower` layer.

mod client;
mod order;
mod problem;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::request::Parts;
use http::{Request, Response};
use tower_layer::Layer;
use tower_service::Service;

pub use self::client::{FenceClientLayer, FenceClientService};
use self::order::{InOrder, TokenOrder};
use self::problem::Refusal;
use super::{FenceStore, FencingToken};
use crate::error::{Error, Result};
use crate::name::Name;

/// The header of a request that contains its [`FencingToken`] as text: `Lockset-Token: name=token`.
///
/// [`FenceClientLayer`] sets it. A client that is not a `tower` service sets it like any other
/// header: `request.header(TOKEN_HEADER, FencingToken::from(&guard).to_string())`.
pub const TOKEN_HEADER: &str = "lockset-token";

/// The longest value of the header that is read. The longest token has 785 bytes.
const MAX_HEADER: usize = 1024;

/// Rejects requests with a stale token before they reach an HTTP service.
///
/// A request that writes has the header `Lockset-Token: name=token` ([`TOKEN_HEADER`]). Requests
/// with the methods GET, HEAD, OPTIONS and TRACE pass without a check, unless
/// [`check_all_methods`](FenceLayer::check_all_methods) says otherwise. The handler finds the
/// [`FencingToken`] in the extensions of an admitted request.
///
/// | status | `type` in the body: `urn:lockset:` and | why |
/// |---|---|---|
/// | 400 | `malformed-token` | the header is not one valid token, or there are two |
/// | 400 | `no-lock` | the closure of [`lock_by`](FenceLayer::lock_by) found no lock |
/// | 403 | `wrong-lock` | the token is one of another lock |
/// | 409 | `stale-token` | a greater token was seen |
/// | 428 | `token-required` | there is no header |
/// | 503 | `store-failed` | the store of the marks failed: nothing was done |
/// | 503 | `too-many-waiting` | too many requests wait for lower tokens |
///
/// After a 409 the client gives up the work and takes the lock again. A wrong lock is a mistake in
/// the client, which taking the lock again does not repair, so it has a status of its own. A
/// request that was one too many has not reached the handler; it may have raised the mark.
///
/// The body is `application/problem+json` (RFC 9457) with `type`, `title`, `status`, `detail` and
/// `resource`; for a stale token also `lock`, `token` and `seen`, for a wrong lock `expected` and
/// `given`. Tokens are strings.
///
/// # Order
/// The store alone decides before the handler begins, not while it writes. So the layer also keeps
/// the requests of one lock in order: a request reaches the handler when all requests with a lower
/// token have left it. Requests with equal tokens run at the same time. A request whose future is
/// dropped while it waits, because the client hung up or a timeout passed, leaves no trace.
/// Clones of one layer share this order; use clones of one layer for all routes of a resource.
///
/// # What it does not cover
/// * **Several server processes.** Each has an order of its own, so a handler that is paused in one
///   process can write after another process has admitted a greater token. Then only the data store
///   can check: pass the token from the extensions on to it, to a fence inside the transaction.
/// * **Work that outlives the handler's future**: tasks that it spawns, a response body that writes
///   while it is streamed, and a request to a database that was on its way when the future was
///   dropped, because the client hung up. A fence at the data covers these, too.
/// * **A handler that never ends** keeps greater tokens waiting. Put a timeout around the handler,
///   inside this layer, and one outside for those that wait.
/// * **Clients that lie.** The header is no authentication. A client that sends 2^63 − 1 shuts out
///   all others; authenticate outside this layer.
///
/// ```
/// use std::sync::Arc;
/// use lockset::fence::{FenceLayer, MemoryFence};
/// use lockset::Name;
///
/// let orders = FenceLayer::new(Arc::new(MemoryFence::new()), "orders")?
///     // `PUT /orders/42` is protected by the lock `orders/42`.
///     .lock_by(|request| {
///         let id = request.uri.path().strip_prefix("/orders/")?;
///         Name::try_from(["orders", id]).ok()
///     });
/// # let _ = orders;
/// # Ok::<(), lockset::Error>(())
/// ```
///
/// With axum: `Router::new().route("/orders/{id}", put(update)).route_layer(orders)`.
#[derive(Clone)]
pub struct FenceLayer {
    fence: Arc<HttpFence>,
}

impl FenceLayer {
    /// The check of writes to `resource`, with marks in `store`. The lock of the same name protects
    /// it, unless [`lock`](FenceLayer::lock) or [`lock_by`](FenceLayer::lock_by) names another.
    ///
    /// Use a store that survives a restart as the resource does.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the name is not valid.
    pub fn new(
        store: Arc<dyn FenceStore>,
        resource: impl TryInto<Name, Error: Into<Error>>,
    ) -> Result<Self> {
        let resource = resource.try_into().map_err(Into::into)?;
        let fence = HttpFence {
            store,
            lock: LockOf::Fixed(resource.clone()),
            resource,
            all_methods: false,
            optional: false,
            order: Arc::new(TokenOrder::new(Self::DEFAULT_MAX_WAITING)),
        };
        Ok(Self { fence: Arc::new(fence) })
    }

    /// How many requests may wait for others with lower tokens, unless
    /// [`max_waiting`](FenceLayer::max_waiting) says otherwise.
    pub const DEFAULT_MAX_WAITING: usize = 1024;

    /// The lock that protects all requests.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the name is not valid.
    pub fn lock(self, lock: impl TryInto<Name, Error: Into<Error>>) -> Result<Self> {
        let lock = lock.try_into().map_err(Into::into)?;
        Ok(self.with(|fence| fence.lock = LockOf::Fixed(lock)))
    }

    /// The lock that protects a request, usually derived from its path.
    ///
    /// If the closure returns `None`, a request that must be checked is rejected with 400. The path
    /// is as the client sent it, with its escapes: two ways to write a path that name the same
    /// record must lead to the same lock or to none.
    pub fn lock_by(self, lock: impl Fn(&Parts) -> Option<Name> + Send + Sync + 'static) -> Self {
        self.with(|fence| fence.lock = LockOf::Request(Arc::new(lock)))
    }

    /// Checks requests of every method, also those that only read.
    pub fn check_all_methods(self) -> Self {
        self.with(|fence| fence.all_methods = true)
    }

    /// Lets requests without the header pass. Their writes are not protected, and neither are
    /// others from them: use it while the clients are being changed.
    pub fn optional(self) -> Self {
        self.with(|fence| fence.optional = true)
    }

    /// How many requests may wait for others with lower tokens, over all locks. One more is
    /// rejected with 503.
    pub fn max_waiting(self, requests: usize) -> Self {
        self.with(|fence| fence.order = Arc::new(TokenOrder::new(requests)))
    }

    fn with(mut self, change: impl FnOnce(&mut HttpFence)) -> Self {
        change(Arc::make_mut(&mut self.fence));
        self
    }
}

impl fmt::Debug for FenceLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FenceLayer").field("resource", &self.fence.resource).finish_non_exhaustive()
    }
}

impl<S> Layer<S> for FenceLayer {
    type Service = FenceService<S>;

    fn layer(&self, inner: S) -> FenceService<S> {
        FenceService { fence: self.fence.clone(), inner }
    }
}

/// A service behind a [`FenceLayer`].
#[derive(Clone)]
pub struct FenceService<S> {
    fence: Arc<HttpFence>,
    inner: S,
}

impl<S> fmt::Debug for FenceService<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FenceService")
            .field("resource", &self.fence.resource)
            .finish_non_exhaustive()
    }
}

impl<S, In, Out> Service<Request<In>> for FenceService<S>
where
    S: Service<Request<In>, Response = Response<Out>, Future: Send> + Clone + Send + 'static,
    In: Send + 'static,
    Out: From<String>,
{
    type Response = Response<Out>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Out>, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<In>) -> Self::Future {
        let fence = self.fence.clone();
        // The clone is not ready; the service that was polled is.
        let next = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, next);
        Box::pin(async move {
            let (mut parts, body) = request.into_parts();
            let turn = match fence.admit(&parts).await {
                Ok(turn) => turn,
                Err(refusal) => return Ok(refusal.response(&fence.resource)),
            };
            if let Some((token, _)) = &turn {
                parts.extensions.insert(token.clone());
            }
            let response = inner.call(Request::from_parts(parts, body)).await;
            drop(turn);
            response
        })
    }
}

/// What the clones of a layer and their services share.
#[derive(Clone)]
struct HttpFence {
    store: Arc<dyn FenceStore>,
    resource: Name,
    lock: LockOf,
    all_methods: bool,
    optional: bool,
    order: Arc<TokenOrder>,
}

/// Which lock protects a request.
#[derive(Clone)]
enum LockOf {
    Fixed(Name),
    Request(Arc<LockOfRequest>),
}

type LockOfRequest = dyn Fn(&Parts) -> Option<Name> + Send + Sync;

impl HttpFence {
    /// Admits a request, and waits until all with lower tokens have left. `None` is a request that
    /// is not checked.
    async fn admit(&self, parts: &Parts) -> Result<Option<(FencingToken, InOrder)>, Refusal> {
        if parts.method.is_safe() && !self.all_methods {
            return Ok(None);
        }
        let token = match token_of(parts)? {
            Some(token) => token,
            None if self.optional => return Ok(None),
            None => return Err(Refusal::NoToken),
        };
        let lock = match &self.lock {
            LockOf::Fixed(lock) => lock.clone(),
            LockOf::Request(lock) => lock(parts).ok_or(Refusal::NoLock)?,
        };
        token.check_lock(&self.resource, &lock)?;
        // Entered before the store decides: a greater token that is admitted meanwhile finds this
        // one here and waits for it.
        let mut turn = self.order.enter(&lock, token.token()).map_err(|seen| {
            Refusal::Fence(super::FenceError::stale(&self.resource, &token, seen))
        })?;
        self.store.admit(&self.resource, &lock, &token).await?;
        turn.wait().await.map_err(|order::Full| Refusal::TooManyWaiting)?;
        Ok(Some((token, turn)))
    }
}

/// The token in the header, if there is one.
fn token_of(parts: &Parts) -> Result<Option<FencingToken>, Refusal> {
    let mut values = parts.headers.get_all(TOKEN_HEADER).iter();
    let Some(value) = values.next() else { return Ok(None) };
    let malformed = |why: String| Err(Refusal::Malformed(why));
    // The text of a token has no comma.
    if values.next().is_some() || value.as_bytes().contains(&b',') {
        return malformed("a request has one token; write to each resource by a request".into());
    }
    if value.len() > MAX_HEADER {
        return malformed(format!("it has {} bytes, at most {MAX_HEADER} fit", value.len()));
    }
    let Ok(text) = value.to_str() else {
        return malformed(
            "it contains bytes other than ASCII; write them as `%` and two digits".into(),
        );
    };
    match text.parse() {
        Ok(token) => Ok(Some(token)),
        Err(error) => malformed(error.to_string()),
    }
}
