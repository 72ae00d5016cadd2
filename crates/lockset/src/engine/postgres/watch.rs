//! Hints for watches: the server tells this client which of the names it watches have changed. A
//! watch is registered in the schema for a minute at a time.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_core::stream::BoxStream;
use tokio::sync::Notify;
use tokio_postgres::types::Type;

use super::connection::Argument;
use super::error::PostgresRequestError;
use super::statements::Call;
use super::{LIST_TIMEOUT, PostgresCore, REQUEST_TIMEOUT};
use crate::engine::common::hints::{HintSenders, RECHECK};
use crate::engine::{Hint, Scope};
use crate::error::Result;
use crate::name::Name;
use crate::report::report;
use crate::sync;

/// The time between two rechecks of a watch while the server tells of changes.
const RECHECK_LISTENING: Duration = Duration::from_secs(15);
/// The time between two registrations of the same watches.
const REGISTER_INTERVAL: Duration = Duration::from_secs(20);
/// When watches are rechecked after a registration. A transaction that did not see it has committed
/// by the last of these times; most have by the first.
const SETTLING: [Duration; 3] =
    [Duration::from_millis(20), Duration::from_millis(100), Duration::from_millis(500)];
/// The pause after a registration that failed.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// The time between two attempts to remove what is not used any more.
const SWEEP_INTERVAL: Duration = Duration::from_secs(600);

/// The watches of this client.
#[derive(Debug, Default)]
pub(super) struct PostgresWatches {
    senders: Mutex<HintSenders>,
    /// Notified when a watch is added.
    added: Notify,
}

impl PostgresWatches {
    /// This name has changed.
    pub(super) fn on_changed(&self, name: &Name) {
        sync::lock(&self.senders).changed(name);
    }

    /// Any name may have changed.
    pub(super) fn on_all_changed(&self) {
        sync::lock(&self.senders).missed();
    }

    /// Ends all watches.
    pub(super) fn close(&self) {
        sync::lock(&self.senders).close();
    }
}

impl PostgresCore {
    pub(super) fn hints(self: &Arc<Self>, scope: &Scope) -> BoxStream<'static, Result<Hint>> {
        let (sender, hints) = sync::lock(&self.watches.senders).add(scope);
        self.watches.added.notify_one();
        let shared = self.shared.clone();
        if !shared.is_listening.load(Ordering::Acquire) {
            // It may never be registered.
            sender.missed();
        }
        hints.with_recheck(move || match shared.is_listening.load(Ordering::Acquire) {
            true => RECHECK_LISTENING,
            false => RECHECK,
        })
    }

    async fn register_watches(&self, scopes: &[Scope]) -> Result<(), PostgresRequestError> {
        let inbox = &self.shared.inbox;
        let texts: Vec<&str> = scopes
            .iter()
            .map(|scope| match scope {
                Scope::Name(name) => name.as_str(),
                Scope::Prefix(prefix) => prefix.as_str(),
            })
            .collect();
        let exact: Vec<bool> = scopes.iter().map(|scope| matches!(scope, Scope::Name(_))).collect();
        let arguments: &[Argument<'_>] =
            &[(inbox, Type::TEXT), (&texts, Type::TEXT_ARRAY), (&exact, Type::BOOL_ARRAY)];
        self.reads.call(Call::Watch, arguments, REQUEST_TIMEOUT).await.map(drop)
    }
}

/// Registers the watches, again and again while there are any.
pub(super) async fn run_watches(core: Arc<PostgresCore>) {
    let (mut was_registered, mut is_new) = (false, true);
    loop {
        let scopes = {
            let mut scopes = sync::lock(&core.watches.senders).scopes();
            // A row of the schema serves all watches of the same scope.
            let key = |scope: &Scope| match scope {
                Scope::Name(name) => (true, name.as_str().to_owned()),
                Scope::Prefix(prefix) => (false, prefix.as_str().to_owned()),
            };
            scopes.sort_by_key(key);
            scopes.dedup_by_key(|scope| key(scope));
            scopes
        };
        if scopes.is_empty() && !was_registered {
            core.watches.added.notified().await;
            is_new = true;
            continue;
        }
        match core.register_watches(&scopes).await {
            Ok(()) => was_registered = !scopes.is_empty(),
            Err(error) => {
                let error = error.into_error();
                report!(debug, error = error, "watches could not be registered");
                tokio::time::sleep(RETRY_PAUSE).await;
                is_new = true;
                continue;
            }
        }
        let settling = if is_new { &SETTLING[..] } else { &[] };
        is_new = false;
        for pause in settling.iter().chain([&REGISTER_INTERVAL]) {
            core.watches.on_all_changed();
            tokio::select! {
                // Registered at once, however long the others still settle.
                () = core.watches.added.notified() => {
                    is_new = true;
                    break;
                }
                () = tokio::time::sleep(*pause) => {}
            }
        }
    }
}

/// Removes what is not used any more. The server does it once an hour, for whichever client asks.
pub(super) async fn run_sweeps(core: Arc<PostgresCore>) {
    loop {
        let part = Duration::from_millis(rand::random_range(0..60_000));
        tokio::time::sleep(SWEEP_INTERVAL + part).await;
        if let Err(error) = core.reads.call(Call::Sweep, &[], LIST_TIMEOUT).await {
            let error = error.into_error();
            report!(debug, error = error, "what is not used any more could not be removed");
        }
    }
}
