//! Connections: each lane has one at a time, replaced when it breaks.
//!
//! A request that was sent and got no reply may have been executed, or may be executed later.
//! Nothing is retried here: the caller decides, and the claim id makes a retry safe.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{OnceCell, watch};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Row, Statement};

use super::connect::{OpenClient, PostgresConnector};
use super::error::{PostgresRequestError, classify, unreachable_error};
use super::schema;
use super::statements::{Call, Calls};
use crate::engine::common::backoff::{Backoff, RETRY};
use crate::engine::common::batch::Batcher;
use crate::error::Error;
use crate::sync;

/// A connection whose probe gets no reply within this time is closed, even if nothing broke.
pub(super) const PROBE_TIMEOUT: Duration = Duration::from_secs(3);

/// What all connections of a client share.
#[derive(Debug)]
pub(super) struct PostgresShared {
    pub(super) connector: PostgresConnector,
    pub(super) schema: String,
    pub(super) calls: Calls,
    /// Whether a connection has a session of the server for itself: it may be set up, and prepare
    /// statements. Behind a pooler in transaction mode it has not.
    pub(super) has_session: bool,
    pub(super) runtime: Handle,
    /// The channel on which this client receives messages.
    pub(super) inbox: String,
    /// Whether it receives them at the moment.
    pub(super) is_listening: AtomicBool,
}

impl PostgresShared {
    /// Where messages for this client are to be sent now; empty if nothing would receive them.
    pub(super) fn inbox(&self) -> &str {
        if self.is_listening.load(Ordering::Acquire) { &self.inbox } else { "" }
    }
}

/// An open connection.
pub(super) struct PostgresConnection {
    open: OpenClient,
    pub(super) shared: Arc<PostgresShared>,
    pub(super) batcher: Batcher<Self>,
    prepared: [OnceCell<Statement>; Call::COUNT],
    is_closed: AtomicBool,
    is_probing: AtomicBool,
    /// For its own tasks.
    this: Weak<Self>,
}

impl std::fmt::Debug for PostgresConnection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PostgresConnection").field("closed", &self.is_closed).finish()
    }
}

/// An argument of a call, with its type.
pub(super) type Argument<'a> = (&'a (dyn ToSql + Sync), Type);

impl PostgresConnection {
    /// Opens a connection and makes sure that the schema is there.
    async fn open(shared: Arc<PostgresShared>) -> Result<Arc<Self>, PostgresRequestError> {
        let open = shared.connector.open(None).await?;
        Self::from_open(shared, open).await
    }

    pub(super) async fn from_open(
        shared: Arc<PostgresShared>,
        open: OpenClient,
    ) -> Result<Arc<Self>, PostgresRequestError> {
        let set_up = async {
            if shared.has_session {
                open.set_up_session().await?;
            }
            schema::set_up(&open, &shared.schema).await
        };
        match tokio::time::timeout(PROBE_TIMEOUT * 4, set_up).await {
            Ok(outcome) => outcome?,
            Err(_) => {
                let error = unreachable_error("its set-up takes too long".to_owned(), true, None);
                return Err(PostgresRequestError::Refused(error));
            }
        }
        Ok(Arc::new_cyclic(|this| Self {
            open,
            shared,
            batcher: Batcher::default(),
            prepared: std::array::from_fn(|_| OnceCell::new()),
            is_closed: AtomicBool::new(false),
            is_probing: AtomicBool::new(false),
            this: this.clone(),
        }))
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire) || self.open.client.is_closed()
    }

    /// Ends the connection. Its requests in flight fail.
    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        self.open.task.abort();
    }

    /// Calls a function of the schema, and waits for the reply.
    pub(super) async fn call(
        &self,
        call: Call,
        arguments: &[Argument<'_>],
        timeout: Duration,
    ) -> Result<Vec<Row>, PostgresRequestError> {
        let reply = tokio::time::timeout(timeout, self.send(call, arguments)).await;
        match reply {
            Ok(Ok(rows)) => Ok(rows),
            Ok(Err(error)) => {
                let error = classify(error);
                let ends = matches!(
                    error,
                    PostgresRequestError::WrongServer(_) | PostgresRequestError::Unknown(_)
                );
                if ends {
                    self.close();
                }
                Err(error)
            }
            Err(_) => {
                self.probe();
                let what = format!("no answer within {timeout:.1?}");
                Err(PostgresRequestError::Unknown(unreachable_error(what, true, None)))
            }
        }
    }

    async fn send(
        &self,
        call: Call,
        arguments: &[Argument<'_>],
    ) -> Result<Vec<Row>, tokio_postgres::Error> {
        let (client, text) = (&self.open.client, self.shared.calls.text(call));
        if !self.shared.has_session {
            return client.query_typed(text, arguments).await;
        }
        let types: Vec<Type> = arguments.iter().map(|(_, kind)| kind.clone()).collect();
        let statement = self.prepared[call as usize]
            .get_or_try_init(|| client.prepare_typed(text, &types))
            .await?;
        let values: Vec<_> = arguments.iter().map(|(value, _)| *value).collect();
        client.query(statement, &values).await
    }

    /// Finds out whether the server still responds, and closes the connection if not. Replies come
    /// in order, so this one comes after those of all requests in flight.
    fn probe(&self) {
        if self.is_probing.swap(true, Ordering::AcqRel) {
            return;
        }
        let Some(connection) = self.this.upgrade() else { return };
        self.shared.runtime.spawn(async move {
            let check = connection.open.client.check_connection();
            if !matches!(tokio::time::timeout(PROBE_TIMEOUT, check).await, Ok(Ok(()))) {
                connection.close();
            }
            connection.is_probing.store(false, Ordering::Release);
        });
    }
}

/// A connection for one kind of request, opened when it is first needed.
#[derive(Debug)]
pub(super) struct PostgresLane {
    shared: Arc<PostgresShared>,
    state: Arc<LaneState>,
}

#[derive(Debug)]
struct LaneState {
    current: Mutex<Option<Arc<PostgresConnection>>>,
    is_connecting: AtomicBool,
    /// The pauses between attempts.
    backoff: Mutex<Backoff>,
    /// The number of the last attempt, and how it ended.
    attempts: watch::Sender<(u64, Option<Error>)>,
    is_closed: AtomicBool,
}

impl PostgresLane {
    pub(super) fn new(shared: Arc<PostgresShared>, first: Option<Arc<PostgresConnection>>) -> Self {
        let state = LaneState {
            current: Mutex::new(first),
            is_connecting: AtomicBool::new(false),
            backoff: Mutex::new(RETRY),
            attempts: watch::Sender::new((0, None)),
            is_closed: AtomicBool::new(false),
        };
        Self { shared, state: Arc::new(state) }
    }

    /// The open connection, or the next one if that comes in time.
    pub(super) async fn connected(
        &self,
        timeout: Duration,
    ) -> Result<Arc<PostgresConnection>, PostgresRequestError> {
        match self.state.open_connection() {
            Some(connection) => Ok(connection),
            None => Box::pin(self.connect(timeout)).await,
        }
    }

    async fn connect(
        &self,
        timeout: Duration,
    ) -> Result<Arc<PostgresConnection>, PostgresRequestError> {
        let mut attempts = self.state.attempts.subscribe();
        let before = attempts.borrow_and_update().0;
        self.start_connecting();
        let ended =
            tokio::time::timeout(timeout, attempts.wait_for(|(number, _)| *number > before));
        let failed = match ended.await {
            Ok(Ok(attempt)) => attempt.1.clone(),
            _ => None,
        };
        match (self.state.open_connection(), failed) {
            (Some(connection), _) => Ok(connection),
            (None, Some(error)) => Err(PostgresRequestError::Refused(error)),
            (None, None) => {
                let what = format!("no connection within {timeout:.1?}");
                let error = unreachable_error(what, true, None);
                Err(PostgresRequestError::Refused(error))
            }
        }
    }

    /// Makes one attempt, on the runtime of the connections, unless one is under way.
    fn start_connecting(&self) {
        if self.state.is_connecting.swap(true, Ordering::AcqRel) {
            return;
        }
        let (shared, state) = (self.shared.clone(), self.state.clone());
        self.shared.runtime.spawn(async move {
            let opened = match state.is_closed.load(Ordering::Acquire) {
                true => Err(PostgresRequestError::Refused(Error::Closed)),
                false => PostgresConnection::open(shared).await,
            };
            let failed = match opened {
                Ok(connection) => {
                    sync::lock(&state.backoff).reset();
                    *sync::lock(&state.current) = Some(connection);
                    None
                }
                Err(error) => {
                    let pause = sync::lock(&state.backoff).next_pause();
                    tokio::time::sleep(pause).await;
                    Some(error.into_error())
                }
            };
            state.is_connecting.store(false, Ordering::Release);
            state
                .attempts
                .send_modify(|(number, outcome)| (*number, *outcome) = (*number + 1, failed));
        });
    }

    pub(super) async fn call(
        &self,
        call: Call,
        arguments: &[Argument<'_>],
        timeout: Duration,
    ) -> Result<Vec<Row>, PostgresRequestError> {
        self.connected(timeout).await?.call(call, arguments, timeout).await
    }

    pub(super) fn close(&self) {
        self.state.is_closed.store(true, Ordering::Release);
        if let Some(connection) = sync::lock(&self.state.current).take() {
            connection.close();
        }
    }
}

impl LaneState {
    fn open_connection(&self) -> Option<Arc<PostgresConnection>> {
        sync::lock(&self.current).as_ref().filter(|current| !current.is_closed()).cloned()
    }
}
