//! A connection: kept alive, and honest about what is unknown after it broke.
//!
//! A request that was sent and not answered may have been executed, or may be executed later.
//! Nothing is repeated here; whoever asked decides, by the id of its claim.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Cmd, PushInfo, PushKind, RedisError, Value};
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};

use super::ENGINE;
use super::scripts::{Script, Scripts};
use super::servers::{Address, Servers, Shape};
use super::slots::Map;
use super::vitals::About;
use crate::engine::common::batch::Batcher;
use crate::error::Error;

/// A new connection must stand within this time.
const CONNECT: Duration = Duration::from_secs(2);
/// The pauses between attempts to connect.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));
/// A connection that does not answer for so long is given up, although nothing broke.
const SILENT: Duration = Duration::from_secs(3);
/// How often an idle connection is asked whether it still answers.
const CHECK_EVERY: Duration = Duration::from_secs(5);

/// How a sharded channel's name ends, so that the scripts know it; see `common.lua`.
const SHARDED: char = '~';
/// Likewise that of a plain one in a cluster, which reaches the subscribers of all nodes.
const ANYWHERE: char = '^';

/// Takes what the server pushes.
pub(super) type Postman = Arc<dyn Fn(Pushed<'_>) + Send + Sync>;

/// What a server pushes.
pub(super) enum Pushed<'a> {
    /// A message to the inbox.
    Message(&'a [u8]),
    /// A key that is tracked has changed.
    Changed(&'a [u8]),
    /// All keys are gone.
    Flushed,
}

/// One connection at a time, made again whenever it breaks.
#[derive(Debug)]
pub(super) struct Link {
    state: watch::Receiver<State>,
    task: tokio::task::AbortHandle,
}

/// Where a request can go now.
#[derive(Clone, Debug)]
pub(super) enum State {
    Up(Arc<Up>),
    /// Not connected, and why.
    Down(Arc<Error>),
}

/// A connection that stands.
#[derive(Debug)]
pub(super) struct Up {
    pub(super) connection: MultiplexedConnection,
    pub(super) at: Address,
    /// The server's time when it was made, in µs: no token is below it.
    pub(super) floor: u64,
    /// The channel on which this client is told of grants.
    pub(super) inbox: String,
    /// It is told of grants itself, and looked after.
    listens: bool,
    tracking: Tracking,
    /// Whether requests travel together: in a cluster keys of different slots cannot.
    pub(super) in_crowds: bool,
    pub(super) batch: Batcher<Self>,
    pub(super) scripts: Arc<Scripts>,
    /// Where it lives.
    pub(super) runtime: Handle,
    health: Arc<Health>,
}

/// Whether the server tracks what is read over a connection.
#[derive(Debug, Default)]
struct Tracking {
    is_on: AtomicBool,
    is_refused: AtomicBool,
}

/// Whether a connection may still be used.
#[derive(Debug, Default)]
struct Health {
    /// It is not to be used any more.
    over: AtomicBool,
    /// Its answers belong to other requests: see `listener`.
    shifted: AtomicBool,
    /// Rings when it is over, or in doubt.
    rings: Notify,
}

impl Health {
    fn end(&self) {
        self.over.store(true, Ordering::Release);
        self.rings.notify_one();
    }
}

/// A request without a usable answer.
#[derive(Debug)]
pub(super) enum Unanswered {
    /// It was not executed.
    Refused(Error),
    /// It was not executed: another node of the cluster serves this key, or will soon.
    Elsewhere(Error),
    /// It may have been executed, or may still be.
    Unknown(Error),
}

impl Unanswered {
    pub(super) fn into_error(self) -> Error {
        match self {
            Self::Refused(error) | Self::Elsewhere(error) | Self::Unknown(error) => error,
        }
    }

    /// The same outcome, with the server where it happened.
    fn at(self, server: &Address) -> Self {
        match self {
            Self::Refused(error) => Self::Refused(at(server, error)),
            Self::Elsewhere(error) => Self::Elsewhere(at(server, error)),
            Self::Unknown(error) => Self::Unknown(at(server, error)),
        }
    }

    /// The same outcome once more, for another request that shared the fate of this one.
    pub(super) fn again(&self) -> Self {
        match self {
            Self::Refused(error) => Self::Refused(again(error)),
            Self::Elsewhere(error) => Self::Elsewhere(again(error)),
            Self::Unknown(error) => Self::Unknown(again(error)),
        }
    }
}

pub(super) type Answer = Result<Value, Unanswered>;

impl Up {
    /// Waits for the answer to something that was sent over this connection.
    pub(super) async fn answer(
        &self,
        patience: Duration,
        request: impl Future<Output = Result<Value, RedisError>>,
    ) -> Answer {
        let answer = match tokio::time::timeout(patience, request).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => {
                // A master that became a replica: the next connection finds the new one. One that
                // failed fails again: nobody is to be sent over it before its end is noticed.
                let failed = error.is_io_error() || error.is_connection_dropped();
                if failed || error.code() == Some("READONLY") {
                    self.health.end();
                }
                Err(judge(error).at(&self.at))
            }
            Err(_) => {
                // One beside the client's own is not looked after by anybody.
                match self.listens {
                    true => self.health.rings.notify_one(),
                    false => self.health.end(),
                }
                let what = format!("no answer within {patience:.1?}");
                Err(Unanswered::Unknown(failed(what, true, None)).at(&self.at))
            }
        };
        if self.health.shifted.load(Ordering::Acquire) {
            let what = "the connection broke before the answer could be trusted".to_owned();
            return Err(Unanswered::Unknown(failed(what, true, None)).at(&self.at));
        }
        answer
    }

    /// Sends a command that reads. Returns also whether the server will push, once, when a key that
    /// was read changes. `script` is what the command runs.
    pub(super) async fn ask_tracked(
        &self,
        patience: Duration,
        script: Option<&Script>,
        command: &Cmd,
    ) -> Result<(Value, bool), Unanswered> {
        let mut is_tracked = false;
        let request = async {
            let (mut answer, told) = self.send_tracked(command).await?;
            is_tracked = told;
            if let (Err(error), Some(script)) = (&answer, script)
                && error.code() == Some("NOSCRIPT")
            {
                script.load().query_async::<Value>(&mut self.connection.clone()).await?;
                (answer, is_tracked) = self.send_tracked(command).await?;
            }
            answer
        };
        let answer = self.answer(patience, request).await?;
        Ok((answer, is_tracked))
    }

    /// `CLIENT CACHING YES` applies to the next command of the connection. A pipeline is one
    /// message to the connection's task, so no other request comes in between.
    async fn send_tracked(
        &self,
        command: &Cmd,
    ) -> Result<(Result<Value, RedisError>, bool), RedisError> {
        let Tracking { is_on, is_refused } = &self.tracking;
        let mut all = redis::pipe();
        let asks = !is_refused.load(Ordering::Relaxed);
        if asks && !is_on.load(Ordering::Relaxed) {
            all.cmd("CLIENT").arg("TRACKING").arg("ON").arg("OPTIN");
        }
        if asks {
            all.cmd("CLIENT").arg("CACHING").arg("YES");
        }
        all.add_command(command.clone()).ignore_errors();
        let mut connection = self.connection.clone();
        let mut told: Vec<Result<Value, RedisError>> = all.query_async(&mut connection).await?;
        let answer = told.pop().unwrap_or(Ok(Value::Nil));
        let refusal = told.into_iter().find_map(Result::err);
        is_on.store(asks && refusal.is_none(), Ordering::Relaxed);
        let is_tracked = asks && refusal.is_none();
        if refusal.is_some_and(|error| !judge(error).into_error().is_retryable()) {
            is_refused.store(true, Ordering::Relaxed);
        }
        Ok((answer, is_tracked))
    }

    /// Makes the server push every change of a key with one of these prefixes; of every key if
    /// there are none.
    async fn track_all(&self, begins: &[String]) -> Result<(), Unanswered> {
        let mut track = redis::cmd("CLIENT");
        track.arg("TRACKING").arg("ON").arg("BCAST");
        for begin in begins {
            track.arg("PREFIX").arg(begin);
        }
        let mut connection = self.connection.clone();
        self.answer(CONNECT, track.query_async(&mut connection)).await.map(drop)
    }

    /// Returns when the connection broke, or does not answer any more.
    pub(super) async fn until_over(&self) {
        while !self.is_over() {
            tokio::select! {
                () = self.health.rings.notified() => {}
                () = tokio::time::sleep(CHECK_EVERY) => {}
            }
            if !self.is_over() && !self.answers_as_master().await {
                self.health.end();
            }
        }
    }

    /// One that became a replica closes no connection, and may have lost grants when it is a master
    /// again; then tokens must begin above the time of a new connection. One that was a replica
    /// only between two looks is not noticed.
    async fn answers_as_master(&self) -> bool {
        let mut connection = self.connection.clone();
        let role = redis::cmd("ROLE");
        let answered = tokio::time::timeout(SILENT, role.query_async::<Value>(&mut connection));
        matches!(answered.await, Ok(Ok(role)) if replicas_of_master(&role).is_ok())
    }

    pub(super) fn is_over(&self) -> bool {
        self.health.over.load(Ordering::Acquire)
    }
}

impl Link {
    /// Connects, and goes on connecting. Fails if the first attempt fails.
    pub(super) async fn open(maker: Maker) -> Result<Self, Error> {
        let up = maker.connect().await?;
        Ok(Self::keep(maker, State::Up(Arc::new(up))))
    }

    /// Begins to connect, and goes on.
    pub(super) fn begin(maker: Maker) -> Self {
        let not_yet = failed("not connected yet".to_owned(), true, None);
        Self::keep(maker, State::Down(Arc::new(not_yet)))
    }

    fn keep(maker: Maker, state: State) -> Self {
        let (tell, state) = watch::channel(state);
        let task = tokio::spawn(maker.keep(tell)).abort_handle();
        Self { state, task }
    }

    /// The connection, if it stands now.
    pub(super) fn now(&self) -> Option<Arc<Up>> {
        match &*self.state.borrow() {
            State::Up(up) if !up.is_over() => Some(up.clone()),
            _ => None,
        }
    }

    /// The connection, as soon as there is one.
    pub(super) async fn up(&self, patience: Duration) -> Result<Arc<Up>, Unanswered> {
        if let Some(up) = self.now() {
            return Ok(up);
        }
        let mut state = self.state.clone();
        // A refusal that waiting does not cure is not waited for either.
        let is_settled = |state: &State| match state {
            State::Up(up) => !up.is_over(),
            State::Down(error) => !error.is_retryable(),
        };
        let waited = tokio::time::timeout(patience, async {
            state.wait_for(is_settled).await.map(|state| state.clone())
        });
        match waited.await {
            Ok(Ok(State::Up(up))) => Ok(up),
            Ok(Err(_)) => Err(Unanswered::Refused(Error::Closed)),
            _ => Err(Unanswered::Refused(match &*self.state.borrow() {
                State::Down(error) => again(error),
                State::Up(_) => failed("the connection broke".to_owned(), true, None),
            })),
        }
    }

    /// Returns when this is not the connection any more.
    pub(super) async fn until_replaced(&self, up: &Arc<Up>) {
        let is_other = |state: &State| !matches!(state, State::Up(now) if Arc::ptr_eq(now, up));
        let _ = self.state.clone().wait_for(is_other).await;
    }

    pub(super) fn close(&self) {
        self.task.abort();
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.close();
    }
}

/// Makes connections to one server, or to whichever is the master.
#[derive(Clone)]
pub(super) struct Maker {
    pub(super) servers: Arc<Servers>,
    /// The node of a cluster.
    pub(super) node: Option<Address>,
    pub(super) inbox: Inbox,
    pub(super) postman: Postman,
    pub(super) scripts: Arc<Scripts>,
    /// The greatest number of replicas that was seen.
    pub(super) replicas: Arc<AtomicU32>,
    /// Counts the connections that were made.
    pub(super) made: watch::Sender<u64>,
}

impl std::fmt::Debug for Maker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Maker").field("servers", &self.servers).finish_non_exhaustive()
    }
}

/// The channel on which the server tells what concerns this client.
#[derive(Clone, Debug)]
pub(super) struct Inbox {
    /// Begins as all keys do.
    pub(super) stem: String,
    /// In a cluster a script may only publish where it runs: a channel in a slot of that node.
    pub(super) map: Option<Arc<Map>>,
}

impl Inbox {
    fn at(&self, node: &Address) -> String {
        let Some(map) = &self.map else { return self.stem.clone() };
        let names = (0_u32..1 << 18).map(|n| format!("{}:{n:x}{SHARDED}", self.stem));
        map.first_at(node, names).unwrap_or_else(|| format!("{}{ANYWHERE}", self.stem))
    }
}

impl Maker {
    async fn connect(&self) -> Result<Up, Error> {
        let (at, expected) = match (&self.node, &self.servers.shape) {
            (Some(node), _) => (node.clone(), 0),
            (None, Shape::Sentinel(service)) => {
                let master = self.servers.master(service).await?;
                (master.at, master.replicas)
            }
            (None, _) => (self.servers.hosts.first().cloned().unwrap_or_default(), 0),
        };
        self.replicas.fetch_max(expected, Ordering::Relaxed);
        let inbox = self.inbox.at(&at);
        self.connect_to(at, inbox, true).await
    }

    /// Another connection beside `up`, on the runtime of the caller; it has no inbox of its own.
    pub(super) async fn beside(&self, up: &Up) -> Result<Up, Error> {
        self.connect_to(up.at.clone(), up.inbox.clone(), false).await
    }

    /// Another one, to which the server pushes every change of a key with one of these prefixes.
    pub(super) async fn tracking_beside(
        &self,
        up: &Up,
        postman: Postman,
        begins: &[String],
    ) -> Result<Up, Unanswered> {
        let maker = Self { postman, ..self.clone() };
        // Whatever is wrong with a connection may be right the next time.
        let up = maker.beside(up).await.map_err(Unanswered::Unknown)?;
        up.track_all(begins).await.map(|()| up)
    }

    async fn connect_to(&self, to: Address, inbox: String, listens: bool) -> Result<Up, Error> {
        let connecting = async {
            let (up, about) = self.try_connect(to.clone(), inbox, listens).await.map_err(judge)?;
            if let (Some(quorum), Some(about)) = (&self.servers.quorum, about) {
                quorum.admit(&to, &about, listens).map_err(Unanswered::Refused)?;
            }
            Ok::<_, Unanswered>(up)
        };
        match tokio::time::timeout(CONNECT, connecting).await {
            Ok(Ok(up)) => Ok(up),
            Ok(Err(why)) => Err(why.at(&to).into_error()),
            Err(_) => {
                let what = format!("no connection within {CONNECT:?}");
                Err(at(&to, failed(what, true, None)))
            }
        }
    }

    /// A connection, and what a node of a quorum says of itself.
    async fn try_connect(
        &self,
        at: Address,
        mut inbox: String,
        listens: bool,
    ) -> Result<(Up, Option<About>), RedisError> {
        let health = Arc::new(Health::default());
        let config = AsyncConnectionConfig::new()
            .set_response_timeout(None)
            .set_connection_timeout(Some(CONNECT))
            .set_push_sender(self.listener(health.clone()));
        let client = self.servers.client(&at)?;
        let mut connection = client.get_multiplexed_async_connection_with_config(&config).await?;
        if listens {
            inbox = subscribe(&mut connection, inbox).await?;
        }
        let (role, time): (Value, (u64, u64)) =
            redis::pipe().cmd("ROLE").cmd("TIME").query_async(&mut connection).await?;
        self.replicas.fetch_max(replicas_of_master(&role)?, Ordering::Relaxed);
        let about = match &self.servers.quorum {
            Some(_) => Some(About::read(&mut connection).await?),
            None => None,
        };
        let floor = time.0 * 1_000_000 + time.1;
        let up = Up {
            connection,
            at,
            floor,
            inbox,
            listens,
            tracking: Tracking::default(),
            in_crowds: self.servers.shape != Shape::Cluster,
            batch: Batcher::default(),
            scripts: self.scripts.clone(),
            runtime: Handle::current(),
            health,
        };
        Ok((up, about))
    }

    /// Reads what the server pushes.
    fn listener(
        &self,
        health: Arc<Health>,
    ) -> impl Fn(PushInfo) -> Result<(), std::convert::Infallible> + Send + Sync + 'static {
        let postman = self.postman.clone();
        move |push: PushInfo| {
            match (&push.kind, push.data.get(1)) {
                (PushKind::Message | PushKind::SMessage, Some(Value::BulkString(text))) => {
                    postman(Pushed::Message(text));
                }
                (PushKind::Invalidate, _) => match push.data.first() {
                    Some(Value::Array(keys)) => keys.iter().for_each(|key| {
                        if let Value::BulkString(key) = key {
                            postman(Pushed::Changed(key));
                        }
                    }),
                    _ => postman(Pushed::Flushed),
                },
                // A slot that moved away takes its channel along. The client library takes such a
                // push for the answer to the oldest request: from here on answers are shifted.
                (PushKind::SUnsubscribe, _) => {
                    health.shifted.store(true, Ordering::Release);
                    health.end();
                }
                (PushKind::Disconnection, _) => health.end(),
                _ => {}
            }
            Ok(())
        }
    }

    async fn keep(self, tell: watch::Sender<State>) {
        loop {
            self.until_broken(&tell).await;
            let mut pause = PAUSES.0;
            let up = loop {
                let error = match self.connect().await {
                    Ok(up) => break up,
                    Err(error) => Arc::new(error),
                };
                tell.send_replace(State::Down(error.clone()));
                tokio::time::sleep(pause).await;
                // A node of a cluster that has another master now is not wanted any more.
                let is_replica = self.node.is_some() && error.to_string().contains("READONLY");
                pause = (pause * 2).min(if is_replica { CHECK_EVERY } else { PAUSES.1 });
            };
            tell.send_replace(State::Up(Arc::new(up)));
            self.made.send_modify(|made| *made += 1);
        }
    }

    /// Returns when the connection broke, or does not answer any more.
    async fn until_broken(&self, tell: &watch::Sender<State>) {
        let State::Up(up) = tell.borrow().clone() else { return };
        while !up.is_over() {
            tokio::select! {
                () = up.health.rings.notified() => {}
                () = tokio::time::sleep(CHECK_EVERY) => {}
            }
            if up.is_over() || self.is_deposed(&up).await || !up.answers_as_master().await {
                break;
            }
        }
        up.health.end();
        let down = at(&up.at, failed("the connection broke".to_owned(), true, None));
        tell.send_replace(State::Down(Arc::new(down)));
    }

    /// Whether the sentinels name another master by now.
    async fn is_deposed(&self, up: &Up) -> bool {
        let Shape::Sentinel(service) = &self.servers.shape else { return false };
        self.servers.master(service).await.is_ok_and(|master| master.at != up.at)
    }
}

/// Subscribes to the inbox, and says under which name.
async fn subscribe(
    connection: &mut MultiplexedConnection,
    inbox: String,
) -> Result<String, RedisError> {
    if !inbox.ends_with(SHARDED) {
        redis::cmd("SUBSCRIBE").arg(&inbox).query_async::<Value>(connection).await?;
        return Ok(inbox);
    }
    match redis::cmd("SSUBSCRIBE").arg(&inbox).query_async::<Value>(connection).await {
        // Redis 6 has no sharded channels; its others reach all nodes.
        Err(error) if error.to_string().contains("unknown command") => {
            let plain = format!("{}{ANYWHERE}", inbox.trim_end_matches(SHARDED));
            redis::cmd("SUBSCRIBE").arg(&plain).query_async::<Value>(connection).await?;
            Ok(plain)
        }
        answer => answer.map(|_| inbox),
    }
}

/// How many replicas are connected, if this is a master.
fn replicas_of_master(role: &Value) -> Result<u32, RedisError> {
    let Value::Array(parts) = role else { return Ok(0) };
    if parts.first() != Some(&Value::BulkString(b"master".to_vec())) {
        let kind = redis::ErrorKind::Extension;
        return Err((kind, "the server is not a master", "READONLY".to_owned()).into());
    }
    match parts.get(2) {
        Some(Value::Array(replicas)) => Ok(u32::try_from(replicas.len()).unwrap_or(u32::MAX)),
        _ => Ok(0),
    }
}

/// What the server's error codes mean to whoever uses a lock, and whether waiting may help.
fn meaning(code: &str) -> Option<(&'static str, bool)> {
    Some(match code {
        "NOAUTH" | "WRONGPASS" | "NOPERM" => {
            ("the server refuses this user; check user, password and ACL rules", false)
        }
        "LOADING" => ("the server is loading its data; it will answer soon", true),
        "READONLY" => ("the server is a replica; name the master or use Sentinel", true),
        "OOM" => ("the server is out of memory; raise maxmemory or free some", true),
        "MISCONF" => ("the server cannot save its data and refuses writes", true),
        "WRONGTYPE" => ("the key holds something that is not a lock", false),
        "MOVED" | "CROSSSLOT" => ("the server is part of a cluster; use redis+cluster://", false),
        "ASK" | "TRYAGAIN" => ("the slot of this lock is being moved to another node", true),
        "CLUSTERDOWN" => ("no node of the cluster serves this lock at the moment", true),
        "NOREPLICAS" | "MASTERDOWN" | "BUSY" => {
            ("the server cannot take requests at the moment", true)
        }
        // The scripts were flushed between loading and running one: it was not run.
        "NOSCRIPT" => ("the server forgot a script twice in a row", true),
        _ => return None,
    })
}

/// The code of an error that a script met. Before Redis 7 it stands in the middle of the text.
fn code_within(text: &str) -> Option<&str> {
    // A command within a script that the user may not run has no code of its own.
    let forbidden = ["The user executing the script can't", "ACL failure in script"];
    if forbidden.iter().any(|why| text.contains(why)) {
        return Some("NOPERM");
    }
    text.split(|c: char| !c.is_ascii_uppercase()).find(|word| meaning(word).is_some())
}

/// The error that one claim of several met.
pub(super) fn told(text: &str) -> Error {
    match code_within(text).and_then(|code| meaning(code).map(|known| (code, known))) {
        Some((code, (what, retryable))) => failed(format!("{what} ({code})"), retryable, None),
        None => failed(format!("the server answered: {text}"), false, None),
    }
}

/// Whether a request that ended in this error was executed, and what to tell the caller.
pub(super) fn judge(error: RedisError) -> Unanswered {
    let error = first_of_several(error);
    let detail = error.detail().unwrap_or_default().to_owned();
    let code = match error.code() {
        None if error.kind() == redis::ErrorKind::AuthenticationFailed => "WRONGPASS",
        None if error.kind() == redis::ErrorKind::Extension => detail.as_str(),
        None => "",
        Some("ERR") => code_within(&detail).unwrap_or("ERR"),
        Some(code) => code,
    };
    let told = |what: &str, retryable| failed(format!("{what} ({code})"), retryable, Some(&error));
    match meaning(code) {
        Some((what, retryable)) => match code {
            "MOVED" | "ASK" | "TRYAGAIN" | "CLUSTERDOWN" => {
                Unanswered::Elsewhere(told(what, retryable))
            }
            _ => Unanswered::Refused(told(what, retryable)),
        },
        None if error.to_string().contains("invalid peer certificate") => {
            let what = "the server's certificate is not trusted; check host name and `ca`";
            Unanswered::Refused(failed(what.to_owned(), false, Some(&error)))
        }
        // TLS says why it ended: a missing or wrong certificate of ours, mostly.
        None if error.to_string().contains("received fatal alert") => {
            let what = format!("the server refuses the TLS connection: {error}");
            Unanswered::Refused(failed(what, false, None))
        }
        None if error.is_io_error() || error.is_connection_dropped() => {
            let what = format!("the connection failed: {error}");
            Unanswered::Unknown(failed(what, true, None))
        }
        None if error.kind() == redis::ErrorKind::Extension && error.code().is_none() => {
            Unanswered::Refused(failed(detail, false, None))
        }
        None if !code.is_empty() => {
            Unanswered::Refused(told(&format!("the server answered: {detail}"), false))
        }
        None => Unanswered::Unknown(failed(format!("{error}"), true, None)),
    }
}

/// Requests that travel together fail together, and the code of each is within.
fn first_of_several(error: RedisError) -> RedisError {
    let each = error.clone().into_server_errors();
    each.and_then(|each| each.first().map(|(_, first)| first.clone().into())).unwrap_or(error)
}

/// The engine's error. Redis errors never carry a password.
pub(super) fn failed(what: String, retryable: bool, source: Option<&RedisError>) -> Error {
    let source = source.map(|error| error.to_string().into());
    Error::Unreachable { engine: ENGINE, what, retryable, source }
}

/// The error of a server, with its address.
pub(super) fn at((host, port): &Address, error: Error) -> Error {
    match error {
        Error::Unreachable { engine, what, retryable, source } => {
            Error::Unreachable { engine, what: format!("{host}:{port}: {what}"), retryable, source }
        }
        other => other,
    }
}

/// The same error again.
pub(super) fn again(error: &Error) -> Error {
    match error {
        Error::Unreachable { what, retryable, .. } => failed(what.clone(), *retryable, None),
        _ => Error::Closed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_within_a_script_is_understood_of_old_servers_too() {
        let old =
            "Error running script (call to f_0): @user_script:4: @user_script: 4: -OOM command";
        assert!(told(old).is_retryable());
        let new = "WRONGTYPE Operation against a key holding the wrong kind of value";
        assert!(told(new).to_string().contains("not a lock (WRONGTYPE)"));
        assert!(told("ERR something else").to_string().contains("something else"));
        for forbidden in [
            "ERR The user executing the script can't run this command or subcommand script: f1",
            "ERR ACL failure in script: User worker has no permissions to run the 'set' command",
        ] {
            assert!(told(forbidden).to_string().contains("ACL rules (NOPERM)"));
        }
    }
}
