//! The client's side: every request gets the token of a guard.

use std::task::{Context, Poll};

use http::Request;
use http::header::{HeaderName, HeaderValue};
use tower_layer::Layer;
use tower_service::Service;

use super::TOKEN_HEADER;
use crate::fence::FencingToken;

/// Sends a token with every request of a `tower` HTTP client.
///
/// It sends the token although the lock may be lost: whether it is stale is the server's decision.
/// A request that has a token already then has two, and the server rejects it.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let locks = lockset::Lockset::connect("memory:").await?;
/// # let http_client = ();
/// use lockset::fence::FenceClientLayer;
/// use tower_layer::Layer;
///
/// let guard = locks.mutex("orders/42")?.lock().await?;
/// let client = FenceClientLayer::new(&guard).layer(http_client);
/// # let _ = client;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct FenceClientLayer {
    value: HeaderValue,
}

impl FenceClientLayer {
    /// Sends this token: `&guard`, or a [`FencingToken`].
    pub fn new(token: impl Into<FencingToken>) -> Self {
        let text = token.into().to_string();
        // The text of a token is visible ASCII. Were it not, the server would reject the empty one.
        let value = HeaderValue::try_from(text).unwrap_or(HeaderValue::from_static(""));
        Self { value }
    }
}

impl<S> Layer<S> for FenceClientLayer {
    type Service = FenceClientService<S>;

    fn layer(&self, inner: S) -> FenceClientService<S> {
        FenceClientService { value: self.value.clone(), inner }
    }
}

/// A client behind a [`FenceClientLayer`].
#[derive(Clone, Debug)]
pub struct FenceClientService<S> {
    value: HeaderValue,
    inner: S,
}

impl<S, B> Service<Request<B>> for FenceClientService<S>
where
    S: Service<Request<B>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<B>) -> S::Future {
        let name = HeaderName::from_static(TOKEN_HEADER);
        request.headers_mut().append(name, self.value.clone());
        self.inner.call(request)
    }
}
