//! The connection that listens: messages to this client's inbox.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::mpsc;

use super::PostgresCore;
use super::connect::{OnNotification, OpenClient, PostgresConnector};
use super::connection::PROBE_TIMEOUT;
use super::error::{PostgresRequestError, classify, unreachable_error};
use super::record::parse_id;
use super::watch::PostgresWatches;
use crate::engine::Event;
use crate::engine::common::backoff::RETRY;
use crate::engine::common::waiters::HandoffWaiters;
use crate::error::LossReason;
use crate::report::report;

/// The time between two probes of the listening connection: nothing else is sent over it.
const PROBE_INTERVAL: Duration = Duration::from_secs(5);

/// The handler for messages: a kind, then a claim id and for a grant the token, or a name. `g`
/// (granted), `b` (broken), `r` (revoked), `w` (a watched name has changed).
pub(super) fn on_message(
    waiters: Arc<HandoffWaiters>,
    watches: Arc<PostgresWatches>,
    events: mpsc::UnboundedSender<Event>,
) -> OnNotification {
    Arc::new(move |message| {
        let Some((kind, rest)) = message.split_at_checked(1) else { return };
        if kind == "w" {
            if let Ok(name) = rest.parse() {
                watches.on_changed(&name);
            }
            return;
        }
        let (id, token) = rest.split_at_checked(32).unwrap_or((rest, ""));
        let Ok(id) = parse_id(id) else { return };
        match (kind, token.parse()) {
            ("g", Ok(token)) => {
                if let Some(waiter) = waiters.find(id) {
                    waiter.on_grant_pushed(token);
                }
            }
            ("b", _) => {
                let _ = events.send(Event::Lost(id, LossReason::Broken));
            }
            ("r", _) => {
                let _ = events.send(Event::LastLease(id));
            }
            _ => {}
        }
    })
}

/// Opens the connection and starts to listen.
pub(super) async fn listen(
    connector: &PostgresConnector,
    inbox: &str,
    on_message: &OnNotification,
) -> Result<OpenClient, PostgresRequestError> {
    let connecting = async {
        let open = connector.open(Some(on_message.clone())).await?;
        open.set_up_session().await?;
        let listening = open.client.batch_execute(&format!("LISTEN {inbox}")).await;
        listening.map_err(classify)?;
        Ok(open)
    };
    match tokio::time::timeout(PROBE_TIMEOUT * 4, connecting).await {
        Ok(outcome) => outcome,
        Err(_) => {
            let error = unreachable_error("it does not respond".to_owned(), true, None);
            Err(PostgresRequestError::Refused(error))
        }
    }
}

/// Keeps listening, from the first connection on. While it does not, waiters ask.
pub(super) async fn keep_listening(
    core: Arc<PostgresCore>,
    connector: PostgresConnector,
    first: Option<OpenClient>,
    on_message: OnNotification,
) {
    let (mut open, mut backoff) = (first, RETRY);
    loop {
        let listening = match open.take() {
            Some(open) => Ok(open),
            None => listen(&connector, &core.shared.inbox, &on_message).await,
        };
        match listening {
            Ok(open) => {
                backoff.reset();
                core.shared.is_listening.store(true, Ordering::Release);
                // For what was sent before.
                core.heartbeats.send_all();
                core.watches.on_all_changed();
                until_closed(&open).await;
                core.shared.is_listening.store(false, Ordering::Release);
                core.heartbeats.send_all();
                core.watches.on_all_changed();
            }
            Err(error) => {
                let error = error.into_error();
                report!(debug, error = error, "listening failed; waiters ask meanwhile");
            }
        }
        backoff.pause().await;
    }
}

async fn until_closed(open: &OpenClient) {
    let mut ended = open.ended.clone();
    loop {
        tokio::select! {
            // Fails when the connection has ended.
            _ = ended.changed() => return,
            () = tokio::time::sleep(PROBE_INTERVAL) => {}
        }
        let probe = open.client.check_connection();
        if !matches!(tokio::time::timeout(PROBE_TIMEOUT, probe).await, Ok(Ok(()))) {
            return;
        }
    }
}
