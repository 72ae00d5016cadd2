//! Watches: one stream for all watches of a client, opened again after it ends.
//!
//! A watch begins with the first change after it is created, never at an older revision: servers
//! look for those only ten times a second. So a subscriber first waits for
//! [`KeyEvent::Established`] and reads *then*. After a reconnect every watch is established
//! again, and every subscriber reads again.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};

use futures_util::StreamExt;
use tokio::sync::mpsc;

use super::connection::EtcdConnection;
use super::keys::KeyRange;
use super::request_error::{EtcdErrorKind, EtcdRequestError, unreachable_error};
use super::rpc::event::EventType;
use super::rpc::{
    KeyValue, WatchCancelRequest, WatchCreateRequest, WatchRequest, WatchResponse, watch_request,
};
use crate::engine::common::backoff::RETRY;
use crate::engine::common::hints::receiver_stream;
use crate::error::{Error, Result};

/// What a subscriber receives.
#[derive(Debug)]
pub(super) enum KeyEvent {
    /// Changes are reported from here on; the state before must be read.
    Established,
    /// This key was written or deleted.
    Changed { key: Vec<u8>, is_deleted: bool },
    /// The server rejected the watch; no more events follow.
    Rejected(Error),
}

/// Creates subscriptions. A task serves them.
#[derive(Clone, Debug)]
pub(super) struct EtcdWatcher {
    commands: mpsc::UnboundedSender<WatchCommand>,
}

/// The events of some keys, until it is dropped.
#[derive(Debug)]
pub(super) struct WatchSubscription {
    events: mpsc::UnboundedReceiver<KeyEvent>,
    keys: KeyRange,
    commands: mpsc::UnboundedSender<WatchCommand>,
}

#[derive(Debug)]
enum WatchCommand {
    Subscribe(KeyRange, mpsc::UnboundedSender<KeyEvent>),
    /// A subscription of these keys was dropped.
    Unsubscribe(KeyRange),
}

impl EtcdWatcher {
    /// Starts the task. Must be called inside the runtime of the connection. The task ends with the
    /// connection.
    pub(super) fn start(connection: &Arc<EtcdConnection>) -> (Self, tokio::task::AbortHandle) {
        let (commands, received) = mpsc::unbounded_channel();
        let task = tokio::spawn(run_watches(Arc::downgrade(connection), received)).abort_handle();
        (Self { commands }, task)
    }

    pub(super) fn subscribe(&self, keys: KeyRange) -> WatchSubscription {
        let (subscriber, events) = mpsc::unbounded_channel();
        // If the client is closed, the events end.
        let _ = self.commands.send(WatchCommand::Subscribe(keys.clone(), subscriber));
        WatchSubscription { events, keys, commands: self.commands.clone() }
    }
}

impl WatchSubscription {
    /// The next event; `None` if the client was closed.
    pub(super) async fn next(&mut self) -> Option<KeyEvent> {
        self.events.recv().await
    }

    pub(super) fn keys(&self) -> &KeyRange {
        &self.keys
    }

    /// Waits until the keys should be read again: the watch was established, the single key
    /// changed, or one of several keys was deleted. Returns whether a key was deleted.
    pub(super) async fn wait_for_change(&mut self) -> Result<bool> {
        loop {
            let mut event = self.events.recv().await.ok_or(Error::Closed)?;
            let (mut should_read, mut any_deleted) = (false, false);
            // One read serves all events that have arrived by now.
            loop {
                match event {
                    KeyEvent::Established => should_read = true,
                    KeyEvent::Changed { is_deleted, .. } => {
                        any_deleted |= is_deleted;
                        should_read |= is_deleted || self.keys.is_single();
                    }
                    KeyEvent::Rejected(error) => return Err(error),
                }
                match self.events.try_recv() {
                    Ok(next) => event = next,
                    Err(_) => break,
                }
            }
            if should_read {
                return Ok(any_deleted);
            }
        }
    }
}

impl Drop for WatchSubscription {
    fn drop(&mut self) {
        self.events.close();
        // Without the task there is nothing to cancel.
        let _ = self.commands.send(WatchCommand::Unsubscribe(self.keys.clone()));
    }
}

async fn run_watches(
    connection: Weak<EtcdConnection>,
    mut commands: mpsc::UnboundedReceiver<WatchCommand>,
) {
    let mut watches = ServerWatches::default();
    let mut backoff = RETRY;
    loop {
        while watches.by_keys.is_empty() {
            match commands.recv().await {
                // The request is not needed: opening the stream creates all watches.
                Some(command) => drop(watches.on_command(command)),
                None => return,
            }
        }
        let Some(strong) = connection.upgrade() else { return };
        match run_stream(&strong, &mut watches, &mut commands).await {
            StreamEnd::ClientClosed => return,
            StreamEnd::Disconnected { had_replies: true } => backoff.reset(),
            StreamEnd::Disconnected { had_replies: false } => {}
            StreamEnd::Rejected(error) => watches.reject_all(&error),
        }
        drop(strong);
        backoff.pause().await;
    }
}

/// How a stream of watches ended.
enum StreamEnd {
    ClientClosed,
    Disconnected { had_replies: bool },
    Rejected(EtcdRequestError),
}

impl StreamEnd {
    fn after(error: EtcdRequestError, had_replies: bool) -> Self {
        match error.kind {
            EtcdErrorKind::Rejected => Self::Rejected(error),
            _ => Self::Disconnected { had_replies },
        }
    }
}

/// Opens the stream with all current watches, and dispatches its replies until it ends.
async fn run_stream(
    connection: &EtcdConnection,
    watches: &mut ServerWatches,
    commands: &mut mpsc::UnboundedReceiver<WatchCommand>,
) -> StreamEnd {
    let mut server_switches = connection.server_switches();
    let (send, requests) = mpsc::unbounded_channel();
    watches.recreate_all().into_iter().for_each(|request| drop(send.send(request)));
    let mut replies = match connection.watch(receiver_stream(requests)).await {
        Ok(replies) => replies,
        Err(error) => return StreamEnd::after(error, false),
    };
    let mut had_replies = false;
    loop {
        let request = tokio::select! {
            command = commands.recv() => match command {
                Some(command) => watches.on_command(command),
                None => return StreamEnd::ClientClosed,
            },
            reply = replies.next() => match reply {
                Some(Ok(reply)) if reply.canceled && reply.created => {
                    let error = connection.on_watch_rejected(&reply.cancel_reason);
                    // Otherwise the login of the stream may have expired.
                    if let EtcdErrorKind::Rejected = error.kind {
                        watches.reject_one(reply.watch_id, &error);
                        had_replies = true;
                    }
                    // Some servers read nothing more from a stream after rejecting a watch on it.
                    return StreamEnd::Disconnected { had_replies };
                }
                Some(Ok(reply)) => {
                    had_replies = true;
                    watches.dispatch(reply)
                }
                Some(Err(status)) => {
                    return StreamEnd::after(connection.on_stream_error(&status), had_replies);
                }
                None => return StreamEnd::Disconnected { had_replies },
            },
            // Another request found that this server does not reply.
            _ = server_switches.changed() => return StreamEnd::Disconnected { had_replies },
        };
        if let Some(request) = request {
            // If the stream has ended, the replies end too.
            let _ = send.send(request);
        }
    }
}

/// One watch at the server, and all its subscribers.
#[derive(Debug)]
struct ServerWatch {
    id: i64,
    is_established: bool,
    subscribers: Vec<mpsc::UnboundedSender<KeyEvent>>,
}

impl ServerWatch {
    fn reject(self, error: &EtcdRequestError) {
        for subscriber in self.subscribers {
            let _ = subscriber.send(KeyEvent::Rejected(error.clone().into()));
        }
    }
}

/// All watches of a client.
#[derive(Debug, Default)]
struct ServerWatches {
    by_keys: HashMap<KeyRange, ServerWatch>,
    by_id: HashMap<i64, KeyRange>,
    last_id: i64,
    /// The watches that were requested and not answered yet, in order, including those without
    /// subscribers by now.
    unanswered: VecDeque<i64>,
}

impl ServerWatches {
    /// Returns the request to send for this command, if any.
    fn on_command(&mut self, command: WatchCommand) -> Option<WatchRequest> {
        match command {
            WatchCommand::Subscribe(keys, subscriber) => match self.by_keys.get_mut(&keys) {
                Some(watch) => {
                    if watch.is_established {
                        let _ = subscriber.send(KeyEvent::Established);
                    }
                    watch.subscribers.push(subscriber);
                    None
                }
                None => {
                    let id = self.next_id();
                    let subscribers = vec![subscriber];
                    let watch = ServerWatch { id, is_established: false, subscribers };
                    self.by_id.insert(id, keys.clone());
                    self.by_keys.insert(keys.clone(), watch);
                    Some(create_request(&keys, id))
                }
            },
            WatchCommand::Unsubscribe(keys) => {
                let watch = self.by_keys.get_mut(&keys)?;
                watch.subscribers.retain(|subscriber| !subscriber.is_closed());
                let id = watch.id;
                if !watch.subscribers.is_empty() {
                    return None;
                }
                self.by_keys.remove(&keys);
                self.by_id.remove(&id);
                let cancel = WatchCancelRequest { watch_id: id };
                let request = watch_request::RequestUnion::CancelRequest(cancel);
                Some(WatchRequest { request_union: Some(request) })
            }
        }
    }

    /// The id of a watch that is requested now.
    fn next_id(&mut self) -> i64 {
        self.last_id += 1;
        self.unanswered.push_back(self.last_id);
        self.last_id
    }

    /// The requests for a new stream, with new ids, so that no reply to an old one is confused with
    /// them.
    fn recreate_all(&mut self) -> Vec<WatchRequest> {
        self.by_id.clear();
        self.unanswered.clear();
        let mut requests = Vec::with_capacity(self.by_keys.len());
        for (keys, watch) in &mut self.by_keys {
            self.last_id += 1;
            self.unanswered.push_back(self.last_id);
            watch.id = self.last_id;
            watch.is_established = false;
            self.by_id.insert(watch.id, keys.clone());
            requests.push(create_request(keys, watch.id));
        }
        requests
    }

    /// Passes a reply on to the subscribers. Returns the request to send for it, if any.
    fn dispatch(&mut self, reply: WatchResponse) -> Option<WatchRequest> {
        if reply.created {
            self.unanswered.retain(|id| *id != reply.watch_id);
        }
        let keys = self.by_id.get(&reply.watch_id)?.clone();
        if reply.canceled {
            return self.on_canceled(reply, keys);
        }
        let watch = self.by_keys.get_mut(&keys)?;
        if reply.created {
            watch.is_established = true;
            for subscriber in &watch.subscribers {
                let _ = subscriber.send(KeyEvent::Established);
            }
        }
        for event in reply.events {
            let is_deleted = event.r#type() == EventType::Delete;
            let Some(KeyValue { key, .. }) = event.kv else { continue };
            for subscriber in &watch.subscribers {
                let _ = subscriber.send(KeyEvent::Changed { key: key.clone(), is_deleted });
            }
        }
        None
    }

    /// A watch ends because it was rejected, or because the store was compacted. In the latter case
    /// it is created again, from now on.
    fn on_canceled(&mut self, reply: WatchResponse, keys: KeyRange) -> Option<WatchRequest> {
        self.by_id.remove(&reply.watch_id);
        if reply.compact_revision == 0 && !reply.cancel_reason.is_empty() {
            let watch = self.by_keys.remove(&keys)?;
            let what = format!("a watch was rejected: {}", reply.cancel_reason);
            for subscriber in watch.subscribers {
                let error = unreachable_error(what.clone(), false);
                let _ = subscriber.send(KeyEvent::Rejected(error));
            }
            return None;
        }
        let id = self.next_id();
        let watch = self.by_keys.get_mut(&keys)?;
        (watch.id, watch.is_established) = (id, false);
        self.by_id.insert(id, keys.clone());
        Some(create_request(&keys, id))
    }

    /// Some servers do not say which watch they reject. But they answer in order, so it is then the
    /// oldest unanswered one.
    fn reject_one(&mut self, watch_id: i64, error: &EtcdRequestError) {
        let position = self.unanswered.iter().position(|id| *id == watch_id).unwrap_or(0);
        let Some(id) = self.unanswered.remove(position) else { return };
        let watch = self.by_id.remove(&id).and_then(|keys| self.by_keys.remove(&keys));
        watch.into_iter().for_each(|watch| watch.reject(error));
    }

    fn reject_all(&mut self, error: &EtcdRequestError) {
        self.by_id.clear();
        self.by_keys.drain().for_each(|(_, watch)| watch.reject(error));
    }
}

fn create_request(keys: &KeyRange, watch_id: i64) -> WatchRequest {
    let create = WatchCreateRequest {
        key: keys.first.clone(),
        range_end: keys.end.clone(),
        watch_id,
        ..WatchCreateRequest::default()
    };
    WatchRequest { request_union: Some(watch_request::RequestUnion::CreateRequest(create)) }
}
