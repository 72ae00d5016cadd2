//! Requests to the servers: to one server at a time, and to the next one if it does not reply.
//!
//! Nothing in gRPC times out by itself, so every request has a timeout. A request without a reply
//! may have been executed: `EtcdRequestError::outcome_unknown`. Its sender finds out by the claim's
//! id.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use tokio::runtime::{self, Handle};
use tokio::sync::watch;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;
use tonic::{Code, Request, Status, Streaming};

use super::connect::EtcdEndpoints;
use super::request_error::{EtcdErrorKind, EtcdRequestError, EtcdResult};
use super::rpc::auth_client::AuthClient;
use super::rpc::kv_client::KvClient;
use super::rpc::lease_client::LeaseClient;
use super::rpc::watch_client::WatchClient;
use super::rpc::{
    AuthenticateRequest, LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveRequest,
    LeaseKeepAliveResponse, LeaseRevokeRequest, LeaseTimeToLiveRequest, LeaseTimeToLiveResponse,
    TxnRequest, TxnResponse, WatchRequest, WatchResponse,
};
use crate::clock::{Clock, Moment};
use crate::engine::common::backoff::RETRY;
use crate::sync;

/// How long one attempt of a request waits for its reply.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// How long all attempts of a request take together, at several servers if there are any. Must
/// cover the election of a new leader, which takes a second or two, and a timeout before it.
pub(super) const RETRY_TIMEOUT: Duration = Duration::from_secs(6);
/// Enough for a list of some hundred thousand claims.
const MAX_REPLY_BYTES: usize = 64 << 20;

/// If a timeout fires this late, the caller's runtime was stalled; the reply is polled once more.
const STALL_TOLERANCE: Duration = Duration::from_millis(50);
/// After this many requests, a runtime gets connections of its own.
const REQUESTS_BEFORE_OWN_CHANNELS: u32 = 32;
/// Maximum runtimes that are tracked. Beyond it all of them start again without connections.
const MAX_RUNTIMES: usize = 16;

type LoginToken = MetadataValue<Ascii>;

/// The channels to the servers, and which of the servers is in use.
#[derive(Debug)]
pub(super) struct EtcdConnection {
    endpoints: EtcdEndpoints,
    /// One for each server, on the client's own runtime.
    channels: Vec<Channel>,
    client_runtime: runtime::Id,
    per_runtime: Mutex<HashMap<runtime::Id, PerRuntimeChannels>>,
    /// Counts the switches to the next server; modulo the number of servers it is the one in use.
    rotation: watch::Sender<usize>,
    login_token: Mutex<Option<LoginToken>>,
    login_in_progress: tokio::sync::Mutex<()>,
    clock: Clock,
}

/// The channels of a runtime other than the client's own.
#[derive(Debug)]
enum PerRuntimeChannels {
    /// None yet: the number of requests so far.
    Counting(u32),
    Connected {
        channels: Vec<Channel>,
        has_replied: bool,
    },
    /// Connections do not work on this runtime.
    Unusable,
}

impl EtcdConnection {
    /// Must be called inside the runtime on which the connections are to live.
    pub(super) fn new(endpoints: EtcdEndpoints, clock: Clock) -> Self {
        let channels = endpoints.channels();
        Self {
            endpoints,
            channels,
            client_runtime: Handle::current().id(),
            per_runtime: Mutex::default(),
            rotation: watch::Sender::new(0),
            login_token: Mutex::default(),
            login_in_progress: tokio::sync::Mutex::default(),
            clock,
        }
    }

    /// One transaction, repeated until it is answered. Only for transactions that may be executed
    /// twice. The outcome of a failure is unknown if that of any attempt is.
    pub(super) async fn txn_with_retry(
        &self,
        txn: TxnRequest,
        timeout: Duration,
    ) -> EtcdResult<TxnResponse> {
        let deadline = self.clock.now() + timeout;
        let attempt = || self.txn_once(txn.clone(), REQUEST_TIMEOUT);
        self.retry(deadline, attempt).await.map(|(reply, _)| reply)
    }

    /// One transaction that must not be executed twice: repeated only if it was not sent.
    pub(super) async fn txn_retry_if_not_sent(&self, txn: TxnRequest) -> EtcdResult<TxnResponse> {
        let (deadline, mut backoff) = (self.clock.now() + RETRY_TIMEOUT, RETRY);
        loop {
            let result = self.txn_once(txn.clone(), REQUEST_TIMEOUT).await;
            let was_not_sent = result.as_ref().is_err_and(EtcdRequestError::was_not_sent);
            if !was_not_sent || !backoff.pause_before(&self.clock, deadline).await {
                return result;
            }
        }
    }

    /// One transaction, sent once.
    pub(super) async fn txn_once(
        &self,
        txn: TxnRequest,
        timeout: Duration,
    ) -> EtcdResult<TxnResponse> {
        self.call(timeout, |channel, token| {
            let request = with_token(Request::new(txn.clone()), token);
            async move {
                let mut client = KvClient::new(channel).max_decoding_message_size(MAX_REPLY_BYTES);
                client.txn(request).await.map(tonic::Response::into_inner)
            }
        })
        .await
    }

    pub(super) async fn grant_lease(&self, ttl: i64) -> EtcdResult<LeaseGrantResponse> {
        // Repeating is harmless: a lease that is not kept alive ends by itself.
        let attempt = || {
            self.call(REQUEST_TIMEOUT, move |channel, token| async move {
                let grant = LeaseGrantRequest { ttl, id: 0 };
                let request = with_token(Request::new(grant), token);
                LeaseClient::new(channel).lease_grant(request).await.map(|it| it.into_inner())
            })
        };
        self.retry(self.clock.now() + RETRY_TIMEOUT, attempt).await.map(|(reply, _)| reply)
    }

    /// Resets a lease to its full ttl. A ttl of zero in the reply says that the lease is gone.
    pub(super) async fn keep_alive(
        &self,
        id: i64,
        timeout: Duration,
    ) -> EtcdResult<LeaseKeepAliveResponse> {
        self.call(timeout, move |channel, token| async move {
            let requests = futures_util::stream::iter([LeaseKeepAliveRequest { id }]);
            let request = with_token(require_leader(Request::new(requests)), token);
            let mut replies =
                LeaseClient::new(channel).lease_keep_alive(request).await?.into_inner();
            let reply = replies.message().await?;
            reply.ok_or_else(|| Status::unavailable("the server closed the stream"))
        })
        .await
    }

    pub(super) async fn revoke_lease(&self, id: i64) -> EtcdResult<()> {
        self.call(REQUEST_TIMEOUT, move |channel, token| async move {
            let request = with_token(Request::new(LeaseRevokeRequest { id }), token);
            LeaseClient::new(channel).lease_revoke(request).await.map(drop)
        })
        .await
    }

    pub(super) async fn lease_time_to_live(&self, id: i64) -> EtcdResult<LeaseTimeToLiveResponse> {
        let attempt = || {
            self.call(REQUEST_TIMEOUT, move |channel, token| async move {
                let query = LeaseTimeToLiveRequest { id, keys: false };
                let request = with_token(Request::new(query), token);
                let mut client = LeaseClient::new(channel);
                client.lease_time_to_live(request).await.map(|it| it.into_inner())
            })
        };
        self.retry(self.clock.now() + REQUEST_TIMEOUT, attempt).await.map(|(reply, _)| reply)
    }

    /// Opens a stream of watches. `requests` must already contain the first request: the server
    /// does not reply before it has arrived.
    pub(super) async fn watch<S>(&self, requests: S) -> EtcdResult<Streaming<WatchResponse>>
    where
        S: futures_core::Stream<Item = WatchRequest> + Send + 'static,
    {
        let requests = Mutex::new(Some(requests));
        self.call(REQUEST_TIMEOUT, |channel, token| {
            let taken = sync::lock(&requests).take();
            async move {
                let requests = taken.ok_or_else(|| Status::unavailable("asked twice"))?;
                let request = with_token(require_leader(Request::new(requests)), token);
                let mut client =
                    WatchClient::new(channel).max_decoding_message_size(MAX_REPLY_BYTES);
                client.watch(request).await.map(tonic::Response::into_inner)
            }
        })
        .await
    }

    /// Changes whenever another server is in use.
    pub(super) fn server_switches(&self) -> watch::Receiver<usize> {
        self.rotation.subscribe()
    }

    /// Classifies the error that ended a stream, and reacts to it.
    pub(super) fn on_stream_error(&self, status: &Status) -> EtcdRequestError {
        let rotation = *self.rotation.borrow();
        let error = EtcdRequestError::from_status(self.host(rotation), status);
        self.switch_server_after(rotation, &error);
        if error.kind == EtcdErrorKind::LoginExpired {
            *sync::lock(&self.login_token) = None;
        }
        error
    }

    /// The same for a watch that was rejected inside its stream, with a reason but no status.
    pub(super) fn on_watch_rejected(&self, reason: &str) -> EtcdRequestError {
        let is_expired =
            ["invalid auth token", "auth store is old"].iter().any(|it| reason.contains(it));
        let code = if is_expired { Code::Unauthenticated } else { Code::PermissionDenied };
        self.on_stream_error(&Status::new(code, reason))
    }

    /// Repeats an idempotent request until it is answered, rejected, or the deadline is near. Also
    /// returns whether an earlier attempt may have been executed. The outcome of a failure is
    /// unknown if that of any attempt is.
    pub(super) async fn retry<T, F>(
        &self,
        deadline: Moment,
        attempt: impl Fn() -> F,
    ) -> EtcdResult<(T, bool)>
    where
        F: Future<Output = EtcdResult<T>>,
    {
        let (mut backoff, mut outcome_unknown) = (RETRY, false);
        loop {
            let mut error = match attempt().await {
                Ok(reply) => return Ok((reply, outcome_unknown)),
                Err(error) => error,
            };
            outcome_unknown |= error.outcome_unknown;
            error.outcome_unknown = outcome_unknown;
            let is_final = error.kind != EtcdErrorKind::Unavailable;
            if is_final || !backoff.pause_before(&self.clock, deadline).await {
                return Err(error);
            }
        }
    }

    /// Calls the server in use, with the token of the login if there is one. If the token has
    /// expired, logs in again and repeats the call.
    async fn call<T, F>(
        &self,
        timeout: Duration,
        send: impl Fn(Channel, Option<LoginToken>) -> F,
    ) -> EtcdResult<T>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let deadline = self.clock.now() + timeout;
        let before = sync::lock(&self.login_token).clone();
        let mut result = self.call_once(deadline, &send).await;
        if result.as_ref().is_err_and(|error| error.kind == EtcdErrorKind::LoginExpired) {
            // Kept if another call has logged in again in the meantime.
            sync::lock(&self.login_token)
                .take_if(|token| before.as_ref().is_none_or(|it| it == token));
            result = self.call_once(deadline, &send).await;
        }
        result
    }

    async fn call_once<T, F>(
        &self,
        deadline: Moment,
        send: impl Fn(Channel, Option<LoginToken>) -> F,
    ) -> EtcdResult<T>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let rotation = *self.rotation.borrow();
        let Some((channel, is_callers_own)) = self.route(rotation) else {
            return Err(EtcdRequestError::rejected("the URL names no server".to_owned(), false));
        };
        let left = deadline.saturating_duration_since(self.clock.now());
        let error_from = |status| EtcdRequestError::from_status(self.host(rotation), &status);
        let sending = async {
            // If the login fails, the request itself was not sent.
            let token = self.token(&channel).await.map_err(|status| {
                let mut error = error_from(status);
                error.outcome_unknown = false;
                error
            })?;
            send(channel, token).await.map_err(error_from)
        };
        let mut sending = std::pin::pin!(sending);
        let mut result = tokio::time::timeout(left, sending.as_mut()).await.ok();
        if result.is_none() && self.clock.now() > deadline + STALL_TOLERANCE {
            result = tokio::time::timeout(STALL_TOLERANCE, sending).await.ok();
        }
        let result = result.unwrap_or_else(|| {
            let what = format!("no reply from {} within {left:.1?}", self.host(rotation));
            Err(EtcdRequestError::unavailable(what))
        });
        if is_callers_own {
            let is_unavailable =
                result.as_ref().is_err_and(|error| error.kind == EtcdErrorKind::Unavailable);
            self.judge_own_channels(is_unavailable);
        }
        if let Err(error) = &result {
            self.switch_server_after(rotation, error);
        }
        result
    }

    /// The channel to the server in use. A runtime that sends many requests has its own, so that
    /// no other thread has to be woken on the way. Also returns whether it is the caller's own.
    fn route(&self, rotation: usize) -> Option<(Channel, bool)> {
        let server = rotation % self.channels.len().max(1);
        let clients_own = || self.channels.get(server).map(|channel| (channel.clone(), false));
        let current = Handle::try_current().map_or(self.client_runtime, |handle| handle.id());
        if current == self.client_runtime {
            return clients_own();
        }
        let mut per_runtime = sync::lock(&self.per_runtime);
        if per_runtime.len() >= MAX_RUNTIMES && !per_runtime.contains_key(&current) {
            per_runtime.clear();
        }
        let own = per_runtime.entry(current).or_insert(PerRuntimeChannels::Counting(0));
        if let PerRuntimeChannels::Counting(requests) = own {
            if *requests < REQUESTS_BEFORE_OWN_CHANNELS {
                *requests += 1;
            } else {
                let channels = self.endpoints.channels();
                *own = PerRuntimeChannels::Connected { channels, has_replied: false };
            }
        }
        match own {
            PerRuntimeChannels::Counting(_) | PerRuntimeChannels::Unusable => clients_own(),
            PerRuntimeChannels::Connected { channels, .. } => {
                channels.get(server).map(|channel| (channel.clone(), true))
            }
        }
    }

    /// After a request without a reply, the caller's runtime uses the client's channels again: for
    /// good if its own ones have never replied, because a runtime may be unable to connect.
    fn judge_own_channels(&self, is_unavailable: bool) {
        let Ok(current) = Handle::try_current() else { return };
        if let Some(own) = sync::lock(&self.per_runtime).get_mut(&current.id())
            && let PerRuntimeChannels::Connected { has_replied, .. } = own
        {
            match (is_unavailable, *has_replied) {
                (false, _) => *has_replied = true,
                (true, true) => *own = PerRuntimeChannels::Counting(0),
                (true, false) => *own = PerRuntimeChannels::Unusable,
            }
        }
    }

    /// If this server did not reply, the next one is in use from now on.
    fn switch_server_after(&self, rotation: usize, error: &EtcdRequestError) {
        if error.kind == EtcdErrorKind::Unavailable && self.channels.len() > 1 {
            self.rotation.send_if_modified(|current| {
                let is_unchanged = *current == rotation;
                *current = current.wrapping_add(usize::from(is_unchanged));
                is_unchanged
            });
        }
    }

    fn host(&self, rotation: usize) -> &str {
        self.endpoints.host(rotation % self.channels.len())
    }

    /// The token of the login, fetched if there is none. `None` if the URL has no user.
    async fn token(&self, channel: &Channel) -> Result<Option<LoginToken>, Status> {
        let Some(credentials) = &self.endpoints.credentials else { return Ok(None) };
        if let Some(token) = sync::lock(&self.login_token).clone() {
            return Ok(Some(token));
        }
        // One login serves all requests: it costs the server a slow hash.
        let _logging_in = self.login_in_progress.lock().await;
        if let Some(token) = sync::lock(&self.login_token).clone() {
            return Ok(Some(token));
        }
        let login = AuthenticateRequest {
            name: credentials.user.clone(),
            password: credentials.password.clone(),
        };
        let token = match AuthClient::new(channel.clone()).authenticate(login).await {
            Ok(reply) => reply.into_inner().token,
            // The server may have users and yet not require a login.
            Err(status) if status.message().contains("authentication is not enabled") => {
                return Ok(None);
            }
            Err(status) => return Err(status),
        };
        let mut token: LoginToken =
            token.parse().map_err(|_| Status::internal("the token is not text"))?;
        // Until it expires it is as good as the password, so it must not be printed.
        token.set_sensitive(true);
        *sync::lock(&self.login_token) = Some(token.clone());
        Ok(Some(token))
    }
}

fn with_token<T>(mut request: Request<T>, token: Option<LoginToken>) -> Request<T> {
    if let Some(token) = token {
        request.metadata_mut().insert("authorization", token);
    }
    request
}

/// Makes a server that has lost its leader end the stream instead of leaving it without replies.
fn require_leader<T>(mut request: Request<T>) -> Request<T> {
    request.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
    request
}
