//! The way to the servers: one of them at a time, the next when it does not answer.
//!
//! Nothing in gRPC times out by itself, so every request has its patience. A request without an
//! answer may have been executed: that is [`Failed::unknown`], and whoever sent it finds out by
//! the claim's id.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use tokio::runtime::{self, Handle};
use tokio::sync::watch;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;
use tonic::{Code, Request, Status, Streaming};

use super::ENGINE;
use super::rpc::auth_client::AuthClient;
use super::rpc::kv_client::KvClient;
use super::rpc::lease_client::LeaseClient;
use super::rpc::watch_client::WatchClient;
use super::rpc::{
    AuthenticateRequest, LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveRequest,
    LeaseKeepAliveResponse, LeaseRevokeRequest, LeaseTimeToLiveRequest, LeaseTimeToLiveResponse,
    TxnRequest, TxnResponse, WatchRequest, WatchResponse,
};
use super::servers::Servers;
use crate::clock::{Clock, Moment};
use crate::error::{Error, Result};
use crate::sync;

/// How long a request waits for its answer, and a connection for itself.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);
pub(super) const CONNECT: Duration = Duration::from_secs(2);
/// How long a request is tried again, at other servers if there are any: an election of a new
/// leader takes a second or two.
pub(super) const PERSISTENCE: Duration = Duration::from_secs(6);
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(320));
/// The longest answer that is read: a list of some hundred thousand claims.
const LONGEST_ANSWER: usize = 64 << 20;

/// A runtime that looks for an answer so much too late has rested; then it looks once more.
const RESTED: Duration = Duration::from_millis(50);
/// A runtime that asks so often gets connections of its own.
const WORTH_A_CONNECTION: u32 = 32;
/// More runtimes than these have hardly connections at once; then all are made anew.
const MOST_BESIDE: usize = 16;

/// The servers, and which of them is spoken to.
#[derive(Debug)]
pub(super) struct Link {
    servers: Servers,
    /// One for each server, on the client's own runtime.
    channels: Vec<Channel>,
    home: runtime::Id,
    beside: Mutex<HashMap<runtime::Id, Beside>>,
    /// Grows when another server is to be asked; modulo their number it says which.
    turn: watch::Sender<usize>,
    token: Mutex<Option<MetadataValue<Ascii>>>,
    login: tokio::sync::Mutex<()>,
    clock: Clock,
}

/// What a caller's own runtime has.
#[derive(Debug)]
enum Beside {
    /// So many requests were made from there.
    NotYet(u32),
    /// Whether they have answered.
    Open(Vec<Channel>, bool),
    /// No connection can be made there.
    Never,
}

/// Why there is no answer to go by.
#[derive(Debug)]
pub(super) struct Failed {
    pub(super) what: What,
    /// Whether the request may have been executed, or may still be.
    pub(super) unknown: bool,
    error: Error,
}

/// What kind of failure it is, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// The lease is not known (any more).
    LeaseGone,
    /// The token of the login has expired.
    TokenOld,
    /// Another server, or the same one later, may answer.
    Silent,
    /// It would be the same everywhere.
    Refused,
}

impl Failed {
    pub(super) fn unknown(error: Error) -> Self {
        Self { what: What::Refused, unknown: true, error }
    }

    pub(super) fn silent(what: String) -> Self {
        Self { what: What::Silent, unknown: true, error: failed(what, true) }
    }

    /// Silent, but the request did not even leave.
    pub(super) fn unsent(what: String) -> Self {
        Self { unknown: false, ..Self::silent(what) }
    }

    pub(super) fn lease_gone() -> Self {
        Self { what: What::LeaseGone, ..refused(failed("the lease is gone".to_owned(), true)) }
    }

    pub(super) fn into_error(self) -> Error {
        self.error
    }

    /// Whether the request never left, and may be sent to another server.
    pub(super) fn is_unsent(&self) -> bool {
        self.what == What::Silent && !self.unknown
    }

    /// The same, for one whose request did not even leave.
    pub(super) fn unsent_too(&self) -> Self {
        Self { unknown: false, ..self.again() }
    }

    /// The same, to be told to several.
    pub(super) fn again(&self) -> Self {
        Self { what: self.what, unknown: self.unknown, error: again(&self.error) }
    }
}

/// The same error once more; what caused it stays with the first.
pub(super) fn again(error: &Error) -> Error {
    match error {
        Error::Unreachable { what, retryable, .. } => failed(what.clone(), *retryable),
        other => failed(other.to_string(), false),
    }
}

pub(super) fn failed(what: String, retryable: bool) -> Error {
    Error::Unreachable { engine: ENGINE, what, retryable, source: None }
}

type Answer<T> = std::result::Result<T, Failed>;

impl Link {
    /// Must be called inside the runtime on which the connections are to live.
    pub(super) fn new(servers: Servers, clock: Clock) -> Self {
        let channels = servers.channels();
        Self {
            servers,
            channels,
            home: Handle::current().id(),
            beside: Mutex::default(),
            turn: watch::Sender::new(0),
            token: Mutex::default(),
            login: tokio::sync::Mutex::default(),
            clock,
        }
    }

    /// Logs in, if the URL says as whom, and looks whether there is an answer.
    pub(super) async fn open(&self, question: TxnRequest) -> Result<()> {
        self.txn(question, PERSISTENCE).await.map(drop).map_err(Failed::into_error)
    }

    /// One transaction, sent again until it is answered. Only for those that change nothing when
    /// they are repeated. The failure is unknown if any of the attempts was.
    pub(super) async fn txn(&self, txn: TxnRequest, patience: Duration) -> Answer<TxnResponse> {
        self.insist(patience, || self.txn_once(txn.clone(), PATIENCE)).await
    }

    /// One transaction that must not be repeated: sent again only if it never left.
    pub(super) async fn txn_if_unsent(&self, txn: TxnRequest) -> Answer<TxnResponse> {
        let give_up = self.clock.now() + PERSISTENCE;
        loop {
            match self.txn_once(txn.clone(), PATIENCE).await {
                Err(failed) if failed.is_unsent() && self.clock.now() < give_up => {
                    tokio::time::sleep(PAUSES.0).await;
                }
                answer => return answer,
            }
        }
    }

    /// One transaction, sent once.
    pub(super) async fn txn_once(
        &self,
        txn: TxnRequest,
        patience: Duration,
    ) -> Answer<TxnResponse> {
        self.ask(patience, |channel, token| {
            let request = authorised(Request::new(txn.clone()), token);
            async move {
                let mut client = KvClient::new(channel).max_decoding_message_size(LONGEST_ANSWER);
                client.txn(request).await.map(tonic::Response::into_inner)
            }
        })
        .await
    }

    pub(super) async fn grant_lease(&self, ttl: i64) -> Answer<LeaseGrantResponse> {
        // A lease that nobody knows of ends by itself, so asking twice is harmless.
        self.insist(PERSISTENCE, || {
            self.ask(PATIENCE, move |channel, token| async move {
                let grant = LeaseGrantRequest { ttl, id: 0 };
                let request = authorised(Request::new(grant), token);
                LeaseClient::new(channel).lease_grant(request).await.map(|it| it.into_inner())
            })
        })
        .await
    }

    /// Makes a lease last its full time again; a ttl of zero says that it is gone.
    pub(super) async fn keep_alive(
        &self,
        id: i64,
        patience: Duration,
    ) -> Answer<LeaseKeepAliveResponse> {
        self.ask(patience, move |channel, token| async move {
            let beat = futures_util::stream::iter([LeaseKeepAliveRequest { id }]);
            let request = authorised(with_leader(Request::new(beat)), token);
            let mut answers =
                LeaseClient::new(channel).lease_keep_alive(request).await?.into_inner();
            let answer = answers.message().await?;
            answer.ok_or_else(|| Status::unavailable("the server closed the stream"))
        })
        .await
    }

    pub(super) async fn revoke_lease(&self, id: i64) -> Answer<()> {
        self.ask(PATIENCE, move |channel, token| async move {
            let request = authorised(Request::new(LeaseRevokeRequest { id }), token);
            LeaseClient::new(channel).lease_revoke(request).await.map(drop)
        })
        .await
    }

    pub(super) async fn lease_left(&self, id: i64) -> Answer<LeaseTimeToLiveResponse> {
        self.insist(PATIENCE, || {
            self.ask(PATIENCE, move |channel, token| async move {
                let question = LeaseTimeToLiveRequest { id, keys: false };
                let request = authorised(Request::new(question), token);
                let mut client = LeaseClient::new(channel);
                client.lease_time_to_live(request).await.map(|it| it.into_inner())
            })
        })
        .await
    }

    /// A stream of watches. The first request must be in `requests` already: before it the server
    /// does not answer at all.
    pub(super) async fn watch<S>(&self, requests: S) -> Answer<Streaming<WatchResponse>>
    where
        S: futures_core::Stream<Item = WatchRequest> + Send + 'static,
    {
        let requests = Mutex::new(Some(requests));
        self.ask(PATIENCE, |channel, token| {
            let taken = sync::lock(&requests).take();
            async move {
                let requests = taken.ok_or_else(|| Status::unavailable("asked twice"))?;
                let request = authorised(with_leader(Request::new(requests)), token);
                let mut client =
                    WatchClient::new(channel).max_decoding_message_size(LONGEST_ANSWER);
                client.watch(request).await.map(tonic::Response::into_inner)
            }
        })
        .await
    }

    /// Tells when another server is spoken to than before.
    pub(super) fn turns(&self) -> watch::Receiver<usize> {
        self.turn.subscribe()
    }

    /// What a stream that ended says.
    pub(super) fn judge_stream(&self, status: &Status) -> Failed {
        let turn = *self.turn.borrow();
        let failed = self.judged(turn, status);
        self.heed(turn, &failed);
        if failed.what == What::TokenOld {
            *sync::lock(&self.token) = None;
        }
        failed
    }

    /// What a watch that was refused inside its stream says: there is a reason, but no status.
    pub(super) fn judge_refusal(&self, reason: &str) -> Failed {
        let is_old =
            ["invalid auth token", "auth store is old"].iter().any(|it| reason.contains(it));
        let code = if is_old { Code::Unauthenticated } else { Code::PermissionDenied };
        self.judge_stream(&Status::new(code, reason))
    }

    /// Repeats what may be repeated until it is answered, refused, or too late.
    async fn insist<T, F>(&self, patience: Duration, ask: impl Fn() -> F) -> Answer<T>
    where
        F: Future<Output = Answer<T>>,
    {
        let give_up = self.clock.now() + patience;
        let (mut pause, mut unknown) = (PAUSES.0, false);
        loop {
            let failed = match ask().await {
                Ok(answer) => return Ok(answer),
                Err(failed) => failed,
            };
            unknown |= failed.unknown;
            let late = self.clock.now() + pause >= give_up;
            if late || failed.what != What::Silent {
                return Err(Failed { unknown, ..failed });
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    /// Asks the server whose turn it is; logs in first where that is needed.
    async fn ask<T, F>(
        &self,
        patience: Duration,
        call: impl Fn(Channel, Option<MetadataValue<Ascii>>) -> F,
    ) -> Answer<T>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let give_up = self.clock.now() + patience;
        let before = sync::lock(&self.token).clone();
        let mut answer = self.ask_once(give_up, &call).await;
        if answer.as_ref().is_err_and(|failed| failed.what == What::TokenOld) {
            // Not if somebody else has logged in again meanwhile.
            sync::lock(&self.token).take_if(|token| before.as_ref().is_none_or(|it| it == token));
            answer = self.ask_once(give_up, &call).await;
        }
        answer
    }

    async fn ask_once<T, F>(
        &self,
        give_up: Moment,
        call: impl Fn(Channel, Option<MetadataValue<Ascii>>) -> F,
    ) -> Answer<T>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let turn = *self.turn.borrow();
        let Some((channel, is_callers)) = self.nearest(turn) else {
            return Err(refused(failed("no server is named".to_owned(), false)));
        };
        let left = give_up.saturating_duration_since(self.clock.now());
        let asked = async {
            let token = match self.token(&channel).await {
                Ok(token) => token,
                // The request itself was not sent.
                Err(status) => return Err(Failed { unknown: false, ..self.judged(turn, &status) }),
            };
            call(channel, token).await.map_err(|status| self.judged(turn, &status))
        };
        let mut asked = std::pin::pin!(asked);
        let mut answer = tokio::time::timeout(left, asked.as_mut()).await.ok();
        if answer.is_none() && self.clock.now() > give_up + RESTED {
            // It was not looked for the answer in time, because the caller's runtime rested.
            answer = tokio::time::timeout(RESTED, asked).await.ok();
        }
        let answer = answer.unwrap_or_else(|| {
            let what = format!("no answer from {} within {left:.1?}", self.host(turn));
            Err(Failed { what: What::Silent, unknown: true, error: failed(what, true) })
        });
        if is_callers {
            self.judge_callers(answer.as_ref().is_err_and(|failed| failed.what == What::Silent));
        }
        if let Err(failed) = &answer {
            self.heed(turn, failed);
        }
        answer
    }

    /// The channel to the server whose turn it is: one on the caller's own runtime if that asks
    /// often, for then no other thread has to be woken on the way. Whether it is the caller's.
    fn nearest(&self, turn: usize) -> Option<(Channel, bool)> {
        let server = turn % self.channels.len().max(1);
        let of_the_client = || self.channels.get(server).map(|channel| (channel.clone(), false));
        let here = Handle::try_current().map_or(self.home, |here| here.id());
        if here == self.home {
            return of_the_client();
        }
        let mut beside = sync::lock(&self.beside);
        if beside.len() >= MOST_BESIDE && !beside.contains_key(&here) {
            beside.clear();
        }
        let place = beside.entry(here).or_insert(Beside::NotYet(0));
        match place {
            Beside::NotYet(count) if *count < WORTH_A_CONNECTION => *count += 1,
            Beside::NotYet(_) => *place = Beside::Open(self.servers.channels(), false),
            Beside::Open(..) | Beside::Never => {}
        }
        match place {
            Beside::NotYet(_) | Beside::Never => of_the_client(),
            Beside::Open(channels, _) => channels.get(server).map(|own| (own.clone(), true)),
        }
    }

    /// What an answer says of the caller's own connection: after a silence the client's is used
    /// again, for good if the other has never answered, because a runtime may be without any means
    /// to connect.
    fn judge_callers(&self, is_silent: bool) {
        let Ok(here) = Handle::try_current() else { return };
        if let Some(place) = sync::lock(&self.beside).get_mut(&here.id()) {
            match place {
                Beside::Open(_, true) if is_silent => *place = Beside::NotYet(0),
                Beside::Open(_, false) if is_silent => *place = Beside::Never,
                Beside::Open(_, has_answered) => *has_answered = true,
                Beside::NotYet(_) | Beside::Never => {}
            }
        }
    }

    /// After a silence it is the next server's turn.
    fn heed(&self, turn: usize, failed: &Failed) {
        if failed.what == What::Silent && self.channels.len() > 1 {
            self.turn.send_if_modified(|now| {
                let ours = *now == turn;
                *now = now.wrapping_add(usize::from(ours));
                ours
            });
        }
    }

    fn host(&self, turn: usize) -> &str {
        self.servers.host(turn % self.channels.len())
    }

    /// The token that shows who we are, fetched if there is none.
    async fn token(&self, channel: &Channel) -> Result<Option<MetadataValue<Ascii>>, Status> {
        let Some(login) = &self.servers.login else { return Ok(None) };
        if let Some(token) = sync::lock(&self.token).clone() {
            return Ok(Some(token));
        }
        // One login serves all who need it: it costs the server a slow hash.
        let _alone = self.login.lock().await;
        if let Some(token) = sync::lock(&self.token).clone() {
            return Ok(Some(token));
        }
        let question =
            AuthenticateRequest { name: login.user.clone(), password: login.password.clone() };
        let token = match AuthClient::new(channel.clone()).authenticate(question).await {
            Ok(answer) => answer.into_inner().token,
            // Users are there, but nobody asks for them yet.
            Err(status) if status.message().contains("authentication is not enabled") => {
                return Ok(None);
            }
            Err(status) => return Err(status),
        };
        let mut token: MetadataValue<Ascii> =
            token.parse().map_err(|_| Status::internal("the token is not text"))?;
        // It is as good as the password until it expires: not to be shown.
        token.set_sensitive(true);
        *sync::lock(&self.token) = Some(token.clone());
        Ok(Some(token))
    }

    fn judged(&self, turn: usize, status: &Status) -> Failed {
        let host = self.host(turn);
        let said = status.message();
        let silent = |what: String, unknown| Failed {
            what: What::Silent,
            unknown,
            error: failed(what, true),
        };
        if said.contains("requested lease not found") {
            return Failed::lease_gone();
        }
        if status.code() == Code::Unauthenticated || said.contains("auth store is old") {
            let error = failed(format!("{host} no longer knows this login ({said})"), true);
            return Failed { what: What::TokenOld, ..refused(error) };
        }
        if let Some(hint) = hint(status) {
            return refused(failed(format!("{host} says: {said}; {hint}"), false));
        }
        if is_unconnected(status) {
            let what = format!("{host} cannot be reached: {}", innermost(status));
            // Another try would end the same way.
            return match what.contains("certificate") {
                true => refused(failed(what, false)),
                false => silent(what, false),
            };
        }
        match status.code() {
            Code::InvalidArgument
            | Code::FailedPrecondition
            | Code::OutOfRange
            | Code::Unimplemented
            | Code::NotFound => refused(failed(format!("{host} says: {said}"), false)),
            // Else it may be the connection that was ended, with requests under way.
            Code::ResourceExhausted if said.contains("too many requests") => {
                silent(format!("{host} says: {said}"), false)
            }
            _ => silent(format!("{host} failed: {said}"), true),
        }
    }
}

fn refused(error: Error) -> Failed {
    Failed { what: What::Refused, unknown: false, error }
}

/// What a person does about a refusal, where that is known.
fn hint(status: &Status) -> Option<&'static str> {
    let said = status.message();
    if said.contains("database space exceeded") {
        return Some("compact and defragment it, then `etcdctl alarm disarm`");
    }
    if said.contains("user name is empty") {
        return Some("it wants to know the user: etcd://user:password@host");
    }
    if said.contains("authentication failed") {
        return Some("check user and password");
    }
    match status.code() {
        Code::PermissionDenied => Some("the user needs to read and write below the prefix"),
        _ => None,
    }
}

fn is_unconnected(status: &Status) -> bool {
    sources(status).any(|error| error.is::<tonic::ConnectError>())
}

/// The last cause: what the system said.
fn innermost(status: &Status) -> String {
    sources(status).last().map_or_else(|| status.message().to_owned(), ToString::to_string)
}

fn sources(status: &Status) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
    std::iter::successors(std::error::Error::source(status), |error| error.source())
}

fn authorised<T>(mut request: Request<T>, token: Option<MetadataValue<Ascii>>) -> Request<T> {
    if let Some(token) = token {
        request.metadata_mut().insert("authorization", token);
    }
    request
}

/// A server that lost its leader then ends the stream instead of being silent.
fn with_leader<T>(mut request: Request<T>) -> Request<T> {
    request.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
    request
}
