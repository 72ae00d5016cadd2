//! What a session's handle and its connection share: requests that are not yet sent or answered,
//! watches, and the session itself.
//!
//! Requests are written to the output buffer at once, in order, and are sent together. Nothing is
//! buffered while there is no connection, and nothing is ever sent twice. A request without a
//! reply fails with [`ZkRequestError::Unknown`].

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use tokio::sync::{Notify, oneshot, watch};

use super::request::{PendingReply, ZkReply, ZkRequestError, ZkResult, unreachable_error};
use super::servers::ServerList;
use super::session::{EventSink, SessionEvent, SessionStatus};
use super::session_lease::SessionLease;
use super::wire::{
    self, ConnectRequest, ConnectResponse, JuteReader, JuteWriter, MalformedReply, NodeEvent,
    OpCode, ReplyHeader, ZkErrorCode,
};
use crate::clock::{Clock, Moment};
use crate::error::Error;
use crate::sync;

/// Bounds of the time in which a server must reply, whatever the session's timeout.
const MIN_REPLY_TIMEOUT: Duration = Duration::from_millis(100);
const MAX_REPLY_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) struct SessionShared {
    pub(super) clock: Clock,
    pub(super) servers: Arc<ServerList>,
    /// Whether a new session is requested when this one has expired.
    pub(super) recreates_expired: bool,
    state: Mutex<SessionState>,
    pub(super) status: watch::Sender<SessionStatus>,
    /// Wakes the connection's task: there is output, or the connection is to change.
    pub(super) wake: Notify,
    events: EventSink,
}

pub(super) struct SessionState {
    /// Sent with the next handshake.
    pub(super) connect_request: ConnectRequest,
    pub(super) timeout: Duration,
    pub(super) lease: Option<SessionLease>,
    xid: i32,
    output: JuteWriter,
    pending: VecDeque<PendingRequest>,
    pub(super) watches: HashMap<String, Vec<Weak<Notify>>>,
    /// No heartbeats, and no connection unless a caller waits for one.
    pub(super) on_demand: bool,
    /// How many callers wait for a connection.
    demands: usize,
    /// The connection is to be replaced by a new one.
    pub(super) reconnect: bool,
    /// Why there is no connection.
    pub(super) disconnect_reason: String,
    /// For that reason there will never be one.
    rejected: bool,
}

struct PendingRequest {
    xid: i32,
    sent_at: Moment,
    answered_by_leader: bool,
    reply: oneshot::Sender<ZkResult<ZkReply>>,
}

/// A caller's need of a connection, until this is dropped.
pub(super) struct ConnectionDemand<'a>(&'a SessionShared);

impl Drop for ConnectionDemand<'_> {
    fn drop(&mut self) {
        self.0.state().demands -= 1;
    }
}

impl SessionShared {
    pub(super) fn new(
        servers: Arc<ServerList>,
        clock: Clock,
        connect_request: ConnectRequest,
        recreates_expired: bool,
        events: EventSink,
    ) -> Self {
        let state = SessionState {
            timeout: millis(connect_request.timeout_ms),
            connect_request,
            lease: None,
            xid: 0,
            output: JuteWriter::default(),
            pending: VecDeque::new(),
            watches: HashMap::new(),
            on_demand: false,
            demands: 0,
            reconnect: false,
            disconnect_reason: "no connection was made yet".to_owned(),
            rejected: false,
        };
        Self {
            clock,
            servers,
            recreates_expired,
            state: Mutex::new(state),
            status: watch::Sender::new(SessionStatus::default()),
            wake: Notify::new(),
            events,
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, SessionState> {
        sync::lock(&self.state)
    }

    fn emit(&self, event: SessionEvent) {
        (self.events)(event);
    }

    /// Lets the connection's task try all servers, until the demand is dropped.
    pub(super) fn demand_connection(&self) -> ConnectionDemand<'_> {
        self.state().demands += 1;
        self.wake.notify_one();
        ConnectionDemand(self)
    }

    /// Writes a request to the output buffer, unless there is no connection.
    pub(super) fn send(&self, op: OpCode, body: impl FnOnce(&mut JuteWriter)) -> PendingReply {
        let (reply, pending_reply) = oneshot::channel();
        let sent_at = self.clock.now();
        let mut state = self.state();
        {
            let status = self.status.borrow();
            if !status.connected {
                return PendingReply(Err(match status.ended {
                    true => ZkRequestError::SessionEnded,
                    false => ZkRequestError::NotSent,
                }));
            }
        }
        state.xid = state.xid.checked_add(1).unwrap_or(1);
        let xid = state.xid;
        state.output.frame(|w| {
            w.int(xid).int(op as i32);
            body(w);
        });
        let answered_by_leader = op.is_answered_by_leader();
        state.pending.push_back(PendingRequest { xid, sent_at, answered_by_leader, reply });
        drop(state);
        self.wake.notify_one();
        PendingReply(Ok(pending_reply))
    }

    /// A heartbeat that the leader answers.
    pub(super) fn send_heartbeat(&self) {
        let chroot = &self.servers.chroot;
        drop(self.send(OpCode::Sync, |w| {
            w.string(chroot);
        }));
    }

    /// Takes the output that is to be written now.
    pub(super) fn take_output(&self) -> Vec<u8> {
        std::mem::take(&mut self.state().output.0)
    }

    /// Whether a new connection was requested since the last call.
    pub(super) fn take_reconnect_request(&self) -> bool {
        std::mem::take(&mut self.state().reconnect)
    }

    /// Whether the session connects on demand only, and no caller waits for a connection.
    pub(super) fn is_idle(&self) -> bool {
        let state = self.state();
        state.on_demand && state.demands == 0
    }

    pub(super) fn is_on_demand(&self) -> bool {
        self.state().on_demand
    }

    /// When the oldest request without a reply was sent.
    pub(super) fn oldest_request_sent_at(&self) -> Option<Moment> {
        self.state().pending.front().map(|pending| pending.sent_at)
    }

    /// How long a server may take to reply.
    pub(super) fn reply_timeout(&self) -> Duration {
        // T/6. Together with the interval of heartbeats (T/12, see `HEARTBEATS_PER_TIMEOUT`) and
        // the time to connect to another server, this must be less than what is left of a lease
        // when it is renewed (4/9 T of 2/3 T, see `Session::lease_end`): then one server that falls
        // silent costs no lock.
        (self.state().timeout / 6).clamp(MIN_REPLY_TIMEOUT, MAX_REPLY_TIMEOUT)
    }

    pub(super) fn timeout(&self) -> Duration {
        self.state().timeout
    }

    pub(super) fn connect_request(&self) -> ConnectRequest {
        self.state().connect_request.clone()
    }

    /// Whether no server has accepted this session yet.
    pub(super) fn was_never_accepted(&self) -> bool {
        self.state().connect_request.session_id == 0 && self.status.borrow().epoch == 0
    }

    /// Why there will be no connection.
    pub(super) fn ended_error(&self) -> Error {
        let state = self.state();
        match state.rejected {
            true => {
                let what = format!("no server accepts us ({})", state.disconnect_reason);
                unreachable_error(what, false)
            }
            false => ZkRequestError::SessionEnded.into(),
        }
    }

    /// A server accepted the session, by a handshake that was sent at `sent_at`.
    pub(super) fn on_connected(&self, response: ConnectResponse, sent_at: Moment) {
        let ConnectResponse { timeout_ms, session_id, password } = response;
        let mut state = self.state();
        let timeout = millis(timeout_ms);
        let is_new = session_id != state.connect_request.session_id;
        let before = state.timeout;
        // Servers may grant different timeouts, and the last one counts.
        let is_shorter = !is_new && state.lease.is_some() && timeout < before;
        match &mut state.lease {
            Some(lease) if !is_new && timeout == before => lease.on_handshake(sent_at),
            lease => *lease = Some(SessionLease::new(timeout, sent_at)),
        }
        let begins_epoch = is_new || self.status.borrow().epoch == 0;
        state.timeout = timeout;
        let last_zxid_seen = state.connect_request.last_zxid_seen;
        state.connect_request = ConnectRequest { last_zxid_seen, timeout_ms, session_id, password };
        // What was written for an earlier connection must not be sent.
        state.output.0.clear();
        self.status.send_modify(|status| {
            // It may have been closed at this very moment.
            status.connected = !status.ended;
            status.connection += 1;
            status.epoch += u64::from(begins_epoch);
        });
        drop(state);
        if is_shorter {
            self.emit(SessionEvent::TimeoutShortened);
        }
        self.emit(SessionEvent::Connected);
    }

    /// The connection ended: the outcome of pending requests is unknown, and watches are gone.
    pub(super) fn on_disconnected(&self, reason: String) {
        let was_connected = {
            let mut state = self.state();
            state.disconnect_reason = reason;
            state.output.0.clear();
            let was_connected = self.status.borrow().connected;
            self.status.send_if_modified(|status| std::mem::take(&mut status.connected));
            for pending in state.pending.drain(..) {
                let _ = pending.reply.send(Err(ZkRequestError::Unknown));
            }
            for waiting in state.watches.drain().flat_map(|(_, waiting)| waiting) {
                if let Some(waiting) = waiting.upgrade() {
                    waiting.notify_one();
                }
            }
            was_connected
        };
        if was_connected {
            self.emit(SessionEvent::Disconnected);
        }
    }

    /// The session has expired. The next handshake requests a new one, if there is to be one.
    pub(super) fn on_expired(&self) {
        {
            let mut state = self.state();
            state.connect_request.session_id = 0;
            state.connect_request.password = vec![0; 16];
            state.lease = None;
            if !self.recreates_expired {
                state.disconnect_reason = "the session has expired".to_owned();
            }
        }
        if !self.recreates_expired {
            self.status.send_modify(|status| status.ended = true);
        }
        let epoch = self.status.borrow().epoch;
        self.emit(SessionEvent::Expired(epoch));
    }

    /// No server will ever accept this client.
    pub(super) fn on_rejected(&self, reason: &str) {
        self.on_disconnected(reason.to_owned());
        self.state().rejected = true;
        self.status.send_modify(|status| status.ended = true);
    }

    /// Handles a received frame: a reply or a watch event.
    pub(super) fn dispatch_frame(&self, frame: &[u8]) -> Result<(), MalformedReply> {
        let mut reader = JuteReader(frame);
        let header = ReplyHeader::read(&mut reader)?;
        match header.xid {
            wire::WATCH_XID => {
                if let Some(event) = NodeEvent::read(&mut reader)? {
                    self.on_watch_event(event);
                }
            }
            wire::AUTH_XID => {
                if header.error == ZkErrorCode::AUTH_FAILED {
                    self.on_rejected("it does not accept the user and password");
                    return Err(MalformedReply);
                }
            }
            _ => self.on_reply(header, reader.0)?,
        }
        Ok(())
    }

    fn on_reply(&self, header: ReplyHeader, body: &[u8]) -> Result<(), MalformedReply> {
        let mut state = self.state();
        // Replies come in the order of the requests.
        let pending = state.pending.pop_front().filter(|pending| pending.xid == header.xid);
        let pending = pending.ok_or(MalformedReply)?;
        let seen = &mut state.connect_request.last_zxid_seen;
        *seen = (*seen).max(header.zxid);
        // A refusal may come from the server that we are connected to, without the leader.
        if pending.answered_by_leader
            && header.error == ZkErrorCode::OK
            && let Some(lease) = &mut state.lease
        {
            lease.on_leader_reply(pending.sent_at);
        }
        drop(state);
        let reply = match header.error {
            ZkErrorCode::OK => Ok(ZkReply { zxid: header.zxid, body: body.to_vec() }),
            code => Err(ZkRequestError::Refused(code)),
        };
        // The caller may have gone.
        let _ = pending.reply.send(reply);
        Ok(())
    }

    fn on_watch_event(&self, event: NodeEvent) {
        let waiting = self.state().watches.remove(&event.path).unwrap_or_default();
        for waiting in waiting.iter().filter_map(Weak::upgrade) {
            waiting.notify_one();
        }
        self.emit(SessionEvent::NodeChanged(event));
    }
}

fn millis(timeout_ms: i32) -> Duration {
    Duration::from_millis(u64::try_from(timeout_ms).unwrap_or(0))
}
