//! The connection: kept alive, and honest about what is unknown after it broke.
//!
//! A request that was sent and not answered may have been executed, or may be executed later.
//! Nothing is repeated here; whoever asked decides, by the id of its claim.

use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, PushInfo, PushKind, RedisError, Value};
use tokio::sync::{Notify, watch};

use super::ENGINE;
use crate::error::Error;

/// A new connection must stand within this time.
const CONNECT: Duration = Duration::from_secs(2);
/// The pauses between attempts to connect.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));
/// A connection that does not answer for so long is given up, although nothing broke.
const SILENT: Duration = Duration::from_secs(3);
/// How often an idle connection is asked whether it still answers.
const PING_EVERY: Duration = Duration::from_secs(5);

/// Takes what the server pushes: the channel and the message.
pub(super) type Postman = Arc<dyn Fn(&[u8]) + Send + Sync>;

/// One connection at a time, made again whenever it breaks.
#[derive(Debug)]
pub(super) struct Link {
    state: watch::Receiver<State>,
    suspect: Arc<Notify>,
    task: tokio::task::AbortHandle,
}

/// Where a request can go now.
#[derive(Clone, Debug)]
pub(super) enum State {
    Up(Up),
    /// Not connected, and why.
    Down(Arc<Error>),
}

/// A connection that stands.
#[derive(Clone, Debug)]
pub(super) struct Up {
    pub(super) connection: MultiplexedConnection,
    /// The server's time when it was made, in µs: no token is below it.
    pub(super) floor: u64,
    /// Rings when it broke.
    broken: Arc<Notify>,
}

/// A request without a usable answer.
#[derive(Debug)]
pub(super) enum Unanswered {
    /// It was not executed.
    Refused(Error),
    /// It may have been executed, or may still be.
    Unknown(Error),
}

impl Unanswered {
    pub(super) fn into_error(self) -> Error {
        match self {
            Unanswered::Refused(error) | Unanswered::Unknown(error) => error,
        }
    }
}

impl Link {
    /// Connects, and goes on connecting. Fails if the first attempt fails.
    pub(super) async fn open(
        client: Client,
        inbox: String,
        postman: Postman,
    ) -> Result<Self, Error> {
        let maker = Maker { client, inbox, postman };
        let up = maker.connect().await?;
        let (tell, state) = watch::channel(State::Up(up));
        let suspect = Arc::new(Notify::new());
        let task = tokio::spawn(maker.keep(tell, suspect.clone())).abort_handle();
        Ok(Self { state, suspect, task })
    }

    /// The connection, as soon as there is one.
    pub(super) async fn up(&self, patience: Duration) -> Result<Up, Unanswered> {
        let mut state = self.state.clone();
        let waited = tokio::time::timeout(patience, async {
            state.wait_for(|state| matches!(state, State::Up(_))).await.map(|state| state.clone())
        });
        match waited.await {
            Ok(Ok(State::Up(up))) => Ok(up),
            _ => match &*self.state.borrow() {
                State::Down(error) => Err(Unanswered::Refused(again(error))),
                State::Up(_) => Err(Unanswered::Refused(Error::Closed)),
            },
        }
    }

    /// Tells whenever another connection stands.
    pub(super) fn changes(&self) -> watch::Receiver<State> {
        self.state.clone()
    }

    /// Waits for the answer to something that was sent over `up`.
    pub(super) async fn answer(
        &self,
        patience: Duration,
        request: impl Future<Output = Result<Value, RedisError>>,
    ) -> Result<Value, Unanswered> {
        match tokio::time::timeout(patience, request).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => Err(judge(error)),
            Err(_) => {
                self.suspect.notify_one();
                let what = format!("no answer within {patience:.1?}");
                Err(Unanswered::Unknown(failed(what, true, None)))
            }
        }
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

struct Maker {
    client: Client,
    inbox: String,
    postman: Postman,
}

impl Maker {
    async fn connect(&self) -> Result<Up, Error> {
        match tokio::time::timeout(CONNECT, self.try_connect()).await {
            Ok(Ok(up)) => Ok(up),
            Ok(Err(error)) => Err(judge(error).into_error()),
            Err(_) => Err(failed(format!("no connection within {CONNECT:?}"), true, None)),
        }
    }

    async fn try_connect(&self) -> Result<Up, RedisError> {
        let broken = Arc::new(Notify::new());
        let (postman, rings) = (self.postman.clone(), broken.clone());
        let config = AsyncConnectionConfig::new()
            .set_response_timeout(None)
            .set_connection_timeout(Some(CONNECT))
            .set_push_sender(move |push: PushInfo| -> Result<(), std::convert::Infallible> {
                match (&push.kind, push.data.get(1)) {
                    (PushKind::Disconnection, _) => rings.notify_one(),
                    (PushKind::Message, Some(Value::BulkString(text))) => postman(text),
                    _ => {}
                }
                Ok(())
            });
        let mut connection =
            self.client.get_multiplexed_async_connection_with_config(&config).await?;
        connection.subscribe(&self.inbox).await?;
        let role: Value = redis::cmd("ROLE").query_async(&mut connection).await?;
        if !matches!(&role, Value::Array(parts) if parts.first() == Some(&text("master"))) {
            let kind = redis::ErrorKind::Extension;
            return Err((kind, "the server is not a master", "READONLY".to_owned()).into());
        }
        let time: (u64, u64) = redis::cmd("TIME").query_async(&mut connection).await?;
        Ok(Up { connection, floor: time.0 * 1_000_000 + time.1, broken })
    }

    async fn keep(self, tell: watch::Sender<State>, suspect: Arc<Notify>) {
        loop {
            self.until_broken(&tell, &suspect).await;
            let down = failed("the connection broke".to_owned(), true, None);
            tell.send_replace(State::Down(Arc::new(down)));
            let mut pause = PAUSES.0;
            let up = loop {
                match self.connect().await {
                    Ok(up) => break up,
                    Err(error) => tell.send_replace(State::Down(Arc::new(error))),
                };
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(PAUSES.1);
            };
            tell.send_replace(State::Up(up));
        }
    }

    /// Returns when the connection broke, or does not answer any more.
    async fn until_broken(&self, tell: &watch::Sender<State>, suspect: &Notify) {
        let State::Up(up) = tell.borrow().clone() else { return };
        loop {
            tokio::select! {
                () = up.broken.notified() => return,
                () = suspect.notified() => {}
                () = tokio::time::sleep(PING_EVERY) => {}
            }
            let mut connection = up.connection.clone();
            let ping = redis::cmd("PING");
            let answered = tokio::time::timeout(SILENT, ping.query_async::<Value>(&mut connection));
            if !matches!(answered.await, Ok(Ok(_))) {
                return;
            }
        }
    }
}

fn text(word: &str) -> Value {
    Value::BulkString(word.as_bytes().to_vec())
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
        "MOVED" | "ASK" | "CROSSSLOT" | "CLUSTERDOWN" => {
            ("the server is part of a cluster; use redis+cluster://", false)
        }
        "NOREPLICAS" | "MASTERDOWN" | "TRYAGAIN" | "BUSY" => {
            ("the server cannot take requests at the moment", true)
        }
        // The scripts were flushed between loading and running one: it was not run.
        "NOSCRIPT" => ("the server forgot a script twice in a row", true),
        _ => return None,
    })
}

/// The code of an error that a script met. Before Redis 7 it stands in the middle of the text.
fn code_within(text: &str) -> Option<&str> {
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
fn judge(error: RedisError) -> Unanswered {
    let detail = error.detail().unwrap_or_default().to_owned();
    let code = match error.code() {
        None if error.kind() == redis::ErrorKind::AuthenticationFailed => "WRONGPASS",
        None if error.kind() == redis::ErrorKind::Extension => detail.as_str(),
        None => "",
        Some("ERR") => code_within(&detail).unwrap_or("ERR"),
        Some(code) => code,
    };
    let refused = |what: &str, retryable| {
        Unanswered::Refused(failed(format!("{what} ({code})"), retryable, Some(&error)))
    };
    match meaning(code) {
        Some((what, retryable)) => refused(what, retryable),
        None if error.is_io_error() || error.is_connection_dropped() => {
            let what = format!("the connection failed: {error}");
            Unanswered::Unknown(failed(what, true, None))
        }
        None if !code.is_empty() => refused(&format!("the server answered: {detail}"), false),
        None => Unanswered::Unknown(failed(format!("{error}"), true, None)),
    }
}

/// The engine's error. Redis errors never carry a password.
pub(super) fn failed(what: String, retryable: bool, source: Option<&RedisError>) -> Error {
    let source = source.map(|error| error.to_string().into());
    Error::Unreachable { engine: ENGINE, what, retryable, source }
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
    }
}
