//! One session: what was asked and not yet answered, what is watched, and how long it can be
//! trusted. `connection` keeps its connection.
//!
//! Requests are written down at once, in order, and travel together; nothing is queued while there
//! is no connection, and nothing is ever sent twice. An answer that did not come is
//! [`Fault::Unknown`]: what was asked may have been done, or may yet be.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot, watch};

use super::super::ENGINE;
use super::super::connect::Servers;
use super::connection;
use super::session_lease::Trust;
use super::wire::{
    self, Acl, Change, Garbled, Hello, Kind, Op, Part, Reader, Refusal, Stat, Writer,
};
use crate::clock::{Clock, Moment};
use crate::error::{Error, Result};
use crate::sync;

/// The longest a server may take to answer, whatever the session's timeout.
const LONGEST_PATIENCE: Duration = Duration::from_secs(5);
const LEAST_PATIENCE: Duration = Duration::from_millis(100);

/// Why a request has no answer that says what was asked for.
#[derive(Clone, Debug)]
pub(in crate::engine::zookeeper) enum Fault {
    /// The server said no; nothing was done.
    Refused(Refusal),
    /// It was never sent.
    NotSent,
    /// It was sent, and the connection ended before the answer.
    Unknown,
    /// The session has ended for good.
    Ended,
}

impl Fault {
    pub(in crate::engine::zookeeper) fn is(&self, refusal: Refusal) -> bool {
        matches!(self, Fault::Refused(why) if *why == refusal)
    }

    /// The next connection knows more, perhaps with another session.
    pub(in crate::engine::zookeeper) fn is_passing(&self) -> bool {
        match self {
            Fault::Refused(why) => is_passing(*why),
            Fault::NotSent | Fault::Unknown => true,
            Fault::Ended => false,
        }
    }
}

impl From<Garbled> for Fault {
    fn from(_: Garbled) -> Fault {
        Fault::Unknown
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Error {
        match fault {
            Fault::Refused(why) => failed(format!("the server refused: {why}"), is_passing(why)),
            Fault::NotSent => failed("there is no connection at the moment".to_owned(), true),
            Fault::Unknown => failed("the connection ended before the answer".to_owned(), true),
            Fault::Ended => failed("the session has ended".to_owned(), true),
        }
    }
}

/// The pause before whatever met a passing fault is tried again: the server ends the connection.
pub(in crate::engine::zookeeper) const PASSES: Duration = Duration::from_millis(5);

fn is_passing(why: Refusal) -> bool {
    why == Refusal::SESSION_EXPIRED || why == Refusal::SESSION_MOVED
}

pub(in crate::engine::zookeeper) fn failed(what: String, retryable: bool) -> Error {
    Error::Unreachable { engine: ENGINE, what, retryable, source: None }
}

pub(in crate::engine::zookeeper) type Answered<T> = std::result::Result<T, Fault>;

/// What a session tells without being asked.
#[derive(Debug)]
pub(in crate::engine::zookeeper) enum Happening {
    Changed(Change, String),
    Connected,
    Cut,
    /// All that happened before was heeded.
    Heeded(oneshot::Sender<()>),
    /// The server that the session moved to keeps it for a shorter time than the last one did.
    Shortened,
    /// The session of this epoch is over, and all its nodes with it.
    Expired(u64),
}

/// Whether there is a connection, and in which session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::engine::zookeeper) struct Status {
    pub(in crate::engine::zookeeper) connected: bool,
    /// Which connection; never the same twice.
    pub(in crate::engine::zookeeper) connection: u64,
    /// Which session of this client; never the same twice.
    pub(in crate::engine::zookeeper) epoch: u64,
    /// There will be no other.
    pub(in crate::engine::zookeeper) ended: bool,
}

/// A session and its connection, until this is dropped.
pub(in crate::engine::zookeeper) struct Session {
    pub(in crate::engine::zookeeper) shared: Arc<Shared>,
    task: tokio::task::AbortHandle,
}

/// What a session's users and its connection share.
pub(in crate::engine::zookeeper) struct Shared {
    pub(in crate::engine::zookeeper) clock: Clock,
    pub(in crate::engine::zookeeper) servers: Arc<Servers>,
    /// A new session is made when this one has expired.
    pub(in crate::engine::zookeeper) begins_again: bool,
    state: Mutex<State>,
    pub(in crate::engine::zookeeper) status: watch::Sender<Status>,
    /// Something is to be written, or to be done about the connection.
    pub(in crate::engine::zookeeper) wake: Notify,
    tell: Box<dyn Fn(Happening) + Send + Sync>,
}

struct State {
    hello: Hello,
    timeout: Duration,
    trust: Option<Trust>,
    xid: i32,
    out: Writer,
    pending: VecDeque<Pending>,
    watches: HashMap<String, Vec<Weak<Notify>>>,
    /// No sign of life is given unasked, and no connection made: only a renewal keeps it.
    rests: bool,
    /// How many wait for a connection.
    wishes: usize,
    reconnect: bool,
    /// Why there is no connection.
    why: String,
    /// There will be none, because of this reason.
    refused: bool,
}

struct Pending {
    xid: i32,
    sent: Moment,
    by_leader: bool,
    answer: Option<oneshot::Sender<Answered<Reply>>>,
}

/// An answer's body, and the transaction that the server was at.
#[derive(Debug)]
pub(in crate::engine::zookeeper) struct Reply {
    pub(in crate::engine::zookeeper) zxid: i64,
    pub(in crate::engine::zookeeper) body: Vec<u8>,
}

/// An answer that is on its way.
#[derive(Debug)]
pub(in crate::engine::zookeeper) struct Answer(
    std::result::Result<oneshot::Receiver<Answered<Reply>>, Fault>,
);

impl Answer {
    pub(in crate::engine::zookeeper) async fn reply(self) -> Answered<Reply> {
        match self.0 {
            Ok(answer) => answer.await.unwrap_or(Err(Fault::Unknown)),
            Err(fault) => Err(fault),
        }
    }

    pub(in crate::engine::zookeeper) async fn done(self) -> Answered<()> {
        self.reply().await.map(|_| ())
    }

    /// Of a create: the node's path and facts.
    pub(in crate::engine::zookeeper) async fn created(self) -> Answered<(String, Stat)> {
        let reply = self.reply().await?;
        let mut reader = Reader(&reply.body);
        Ok((reader.text()?.to_owned(), reader.stat()?))
    }

    pub(in crate::engine::zookeeper) async fn data(self) -> Answered<(Vec<u8>, Stat)> {
        let reply = self.reply().await?;
        let mut reader = Reader(&reply.body);
        Ok((reader.buffer()?.to_vec(), reader.stat()?))
    }

    pub(in crate::engine::zookeeper) async fn children(self) -> Answered<Vec<String>> {
        Ok(Reader(&self.reply().await?.body).texts()?)
    }

    /// Of a transaction: the number it got.
    pub(in crate::engine::zookeeper) async fn transaction(self) -> Answered<i64> {
        let reply = self.reply().await?;
        match wire::multi_refusal(&reply.body)? {
            None => Ok(reply.zxid),
            Some((_, why)) => Err(Fault::Refused(why)),
        }
    }
}

/// Somebody's wish for a connection.
struct Wish<'a>(&'a Shared);

impl Drop for Wish<'_> {
    fn drop(&mut self) {
        self.0.state().wishes -= 1;
    }
}

/// A change that somebody waits for, until this is dropped.
pub(in crate::engine::zookeeper) struct Watching {
    shared: Arc<Shared>,
    path: String,
    change: Arc<Notify>,
}

impl Watching {
    /// The node changed, or the connection ended and with it the watch.
    pub(in crate::engine::zookeeper) async fn changed(&self) {
        self.change.notified().await;
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        if let Some(waiting) = state.watches.get_mut(&self.path) {
            waiting.retain(|other| !std::ptr::eq(other.as_ptr(), &*self.change));
            if waiting.is_empty() {
                state.watches.remove(&self.path);
            }
        }
    }
}

impl Session {
    /// A session that is asked for at once, on the present runtime. Nothing is known of it before
    /// [`ready`](Session::ready).
    pub(in crate::engine::zookeeper) fn start(
        servers: Arc<Servers>,
        clock: Clock,
        hello: Hello,
        begins_again: bool,
        tell: Box<dyn Fn(Happening) + Send + Sync>,
    ) -> Self {
        let timeout = Duration::from_millis(u64::try_from(hello.timeout_ms).unwrap_or(0));
        let state = State {
            hello,
            timeout,
            trust: None,
            xid: 0,
            out: Writer::default(),
            pending: VecDeque::new(),
            watches: HashMap::new(),
            rests: false,
            wishes: 0,
            reconnect: false,
            why: "it was not reached yet".to_owned(),
            refused: false,
        };
        let shared = Arc::new(Shared {
            clock,
            servers,
            begins_again,
            state: Mutex::new(state),
            status: watch::Sender::new(Status::default()),
            wake: Notify::new(),
            tell,
        });
        let task = tokio::spawn(connection::keep(shared.clone())).abort_handle();
        Self { shared, task }
    }

    pub(in crate::engine::zookeeper) fn status(&self) -> Status {
        *self.shared.status.borrow()
    }

    pub(in crate::engine::zookeeper) fn news(&self) -> watch::Receiver<Status> {
        self.shared.status.subscribe()
    }

    /// Waits for a connection.
    pub(in crate::engine::zookeeper) async fn ready(&self, deadline: Moment) -> Result<Status> {
        let status = self.status();
        if status.connected {
            return Ok(status);
        }
        let _wish = self.shared.wish();
        let mut news = self.news();
        let ready = news.wait_for(|status| status.connected || status.ended);
        tokio::select! {
            status = ready => match status {
                Ok(status) if status.connected => Ok(*status),
                _ => Err(self.shared.ending()),
            },
            () = self.shared.clock.sleep_until(deadline) => {
                let why = self.shared.state().why.clone();
                Err(failed(format!("no server answers ({why})"), true))
            }
        }
    }

    /// The timeout that was negotiated.
    pub(in crate::engine::zookeeper) fn timeout(&self) -> Duration {
        self.shared.state().timeout
    }

    /// Its id and password, by which another process can take it over.
    pub(in crate::engine::zookeeper) fn credentials(&self) -> (i64, Vec<u8>) {
        let state = self.shared.state();
        (state.hello.session, state.hello.password.clone())
    }

    pub(in crate::engine::zookeeper) fn id(&self) -> i64 {
        self.shared.state().hello.session
    }

    /// Until when nodes of this session are there, whatever happens.
    pub(in crate::engine::zookeeper) fn trusted_until(&self) -> Moment {
        self.shared.state().trust.as_ref().map_or(Moment::from_nanos(0), Trust::until)
    }

    /// How long a lock that is renewed may be believed in now: two thirds of the timeout at most,
    /// also right after a handshake that is good for more, so that a lease is always as long.
    pub(in crate::engine::zookeeper) fn lease_from(&self, now: Moment) -> Moment {
        self.trusted_until().min(now + self.timeout() * 2 / 3)
    }

    /// From now on only those who ask keep the session alive.
    pub(in crate::engine::zookeeper) fn rest(&self) {
        self.shared.state().rests = true;
    }

    /// Greets the leader anew, which makes the session last a whole timeout again.
    pub(in crate::engine::zookeeper) async fn greet_again(&self, deadline: Moment) -> Result<()> {
        let before = self.status().connection;
        self.shared.state().reconnect = true;
        let _wish = self.shared.wish();
        let mut news = self.news();
        let anew = news.wait_for(|now| now.ended || (now.connected && now.connection != before));
        tokio::select! {
            status = anew => match status {
                Ok(status) if status.connected => Ok(()),
                _ => Err(Fault::Ended.into()),
            },
            () = self.shared.clock.sleep_until(deadline) => Err(Fault::NotSent.into()),
        }
    }

    /// Registers for the next change of `path`; a request that sets the watch must follow.
    pub(in crate::engine::zookeeper) fn watch(&self, path: &str) -> Watching {
        let change = Arc::new(Notify::new());
        let mut state = self.shared.state();
        state.watches.entry(path.to_owned()).or_default().push(Arc::downgrade(&change));
        Watching { shared: self.shared.clone(), path: path.to_owned(), change }
    }

    /// Ends the session and its nodes.
    pub(in crate::engine::zookeeper) async fn close(&self) {
        let closing = self.shared.send(Op::CloseSession, |_| {});
        let _ = tokio::time::timeout(Duration::from_secs(1), closing.reply()).await;
        self.task.abort();
        self.shared.status.send_modify(|status| {
            status.connected = false;
            status.ended = true;
        });
        // Whoever still waits for an answer is told that none will come.
        self.shared.cut("it was closed".to_owned());
    }

    pub(in crate::engine::zookeeper) fn create(
        &self,
        path: &str,
        data: &[u8],
        acl: Acl,
        kind: Kind,
    ) -> Answer {
        let op = if kind == Kind::Container { Op::CreateContainer } else { Op::Create };
        self.shared.send(op, |w| wire::create(w, path, data, acl, kind))
    }

    pub(in crate::engine::zookeeper) fn delete(&self, path: &str) -> Answer {
        self.shared.send(Op::Delete, |w| {
            w.text(path).int(-1);
        })
    }

    pub(in crate::engine::zookeeper) fn data(&self, path: &str, watch: bool) -> Answer {
        self.shared.send(Op::GetData, |w| {
            w.text(path).boolean(watch);
        })
    }

    pub(in crate::engine::zookeeper) fn set_data(
        &self,
        path: &str,
        data: &[u8],
        version: i32,
    ) -> Answer {
        self.shared.send(Op::SetData, |w| {
            w.text(path).buffer(data).int(version);
        })
    }

    pub(in crate::engine::zookeeper) fn children(&self, path: &str, watch: bool) -> Answer {
        self.shared.send(Op::GetChildren, |w| {
            w.text(path).boolean(watch);
        })
    }

    /// What is read afterwards is at least as new as what the leader knows now.
    pub(in crate::engine::zookeeper) fn sync(&self, path: &str) -> Answer {
        self.shared.send(Op::Sync, |w| {
            w.text(path);
        })
    }

    pub(in crate::engine::zookeeper) fn multi(&self, parts: &[Part]) -> Answer {
        self.shared.send(Op::Multi, |w| wire::multi(w, parts))
    }

    /// Watches a node and all below it, again and again.
    pub(in crate::engine::zookeeper) fn add_watch(&self, path: &str) -> Answer {
        const RECURSIVE: i32 = 1;
        self.shared.send(Op::AddWatch, |w| {
            w.text(path).int(RECURSIVE);
        })
    }

    pub(in crate::engine::zookeeper) fn remove_watch(&self, path: &str) -> Answer {
        const ANY: i32 = 3;
        self.shared.send(Op::RemoveWatches, |w| {
            w.text(path).int(ANY);
        })
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The rest is the key to all its locks.
        f.debug_struct("Session").field("status", &self.status()).finish_non_exhaustive()
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        sync::lock(&self.state)
    }

    pub(in crate::engine::zookeeper) fn tell(&self, happening: Happening) {
        (self.tell)(happening);
    }

    /// Somebody needs a connection, until the wish is dropped: all servers are tried meanwhile, and
    /// none for somebody who has gone.
    fn wish(&self) -> Wish<'_> {
        self.state().wishes += 1;
        self.wake.notify_one();
        Wish(self)
    }

    pub(in crate::engine::zookeeper) fn send(
        &self,
        op: Op,
        body: impl FnOnce(&mut Writer),
    ) -> Answer {
        let (tell, answer) = oneshot::channel();
        let sent = self.clock.now();
        let mut state = self.state();
        {
            let status = self.status.borrow();
            if !status.connected {
                return Answer(Err(if status.ended { Fault::Ended } else { Fault::NotSent }));
            }
        }
        state.xid = state.xid.checked_add(1).unwrap_or(1);
        let xid = state.xid;
        state.out.frame(|w| {
            w.int(xid).int(op as i32);
            body(w);
        });
        let by_leader = op.is_answered_by_leader();
        state.pending.push_back(Pending { xid, sent, by_leader, answer: Some(tell) });
        drop(state);
        self.wake.notify_one();
        Answer(Ok(answer))
    }

    /// What is to be written now.
    pub(in crate::engine::zookeeper) fn outgoing(&self) -> Vec<u8> {
        std::mem::take(&mut self.state().out.0)
    }

    /// Whether the connection is no longer wanted as it is.
    pub(in crate::engine::zookeeper) fn is_to_reconnect(&self) -> bool {
        std::mem::take(&mut self.state().reconnect)
    }

    /// Whether the session rests, and nobody wants it at the moment.
    pub(in crate::engine::zookeeper) fn is_unwanted(&self) -> bool {
        let state = self.state();
        state.rests && state.wishes == 0
    }

    pub(in crate::engine::zookeeper) fn rests(&self) -> bool {
        self.state().rests
    }

    /// When the oldest request without an answer was sent.
    pub(in crate::engine::zookeeper) fn waits_since(&self) -> Option<Moment> {
        self.state().pending.front().map(|pending| pending.sent)
    }

    /// How long a server may take to answer.
    pub(in crate::engine::zookeeper) fn patience(&self) -> Duration {
        // Together with a sign of life that is due and the way to another server, this is less than
        // what is left of a lease when it is renewed: one server that falls silent costs no lock.
        (self.state().timeout / 6).clamp(LEAST_PATIENCE, LONGEST_PATIENCE)
    }

    pub(in crate::engine::zookeeper) fn timeout(&self) -> Duration {
        self.state().timeout
    }

    pub(in crate::engine::zookeeper) fn hello(&self) -> Hello {
        self.state().hello.clone()
    }

    /// A sign of life, answered by the leader.
    pub(in crate::engine::zookeeper) fn beat(&self) {
        let chroot = &self.servers.chroot;
        drop(self.send(Op::Sync, |w| {
            w.text(chroot);
        }));
    }

    /// The session stands, by a handshake that was sent at `sent`.
    pub(in crate::engine::zookeeper) fn welcomed(&self, welcome: Hello, sent: Moment) {
        let mut state = self.state();
        let timeout = Duration::from_millis(u64::try_from(welcome.timeout_ms).unwrap_or(0));
        let is_new = welcome.session != state.hello.session;
        let before = state.timeout;
        // Servers may differ in what they grant, and the last one counts.
        let is_shorter = !is_new && state.trust.is_some() && timeout < before;
        match &mut state.trust {
            Some(trust) if !is_new && timeout == before => trust.greeted(sent),
            trust => *trust = Some(Trust::new(timeout, sent)),
        }
        let begins = is_new || self.status.borrow().epoch == 0;
        state.timeout = timeout;
        state.hello = Hello { seen: state.hello.seen, ..welcome };
        // What was written for a connection that is gone must not be sent.
        state.out.0.clear();
        self.status.send_modify(|status| {
            // It may have been closed at this very moment.
            status.connected = !status.ended;
            status.connection += 1;
            status.epoch += u64::from(begins);
        });
        drop(state);
        if is_shorter {
            self.tell(Happening::Shortened);
        }
        self.tell(Happening::Connected);
    }

    /// The connection ended: what was asked is unknown, and what was watched must be looked at.
    pub(in crate::engine::zookeeper) fn cut(&self, why: String) {
        let was_connected = {
            let mut state = self.state();
            state.why = why;
            state.out.0.clear();
            let was_connected = self.status.borrow().connected;
            self.status.send_if_modified(|status| std::mem::take(&mut status.connected));
            for pending in state.pending.drain(..) {
                if let Some(answer) = pending.answer {
                    let _ = answer.send(Err(Fault::Unknown));
                }
            }
            for waiting in state.watches.drain().flat_map(|(_, waiting)| waiting) {
                if let Some(waiting) = waiting.upgrade() {
                    waiting.notify_one();
                }
            }
            was_connected
        };
        if was_connected {
            self.tell(Happening::Cut);
        }
    }

    /// The session is over. The next handshake asks for a new one, if there is to be one.
    pub(in crate::engine::zookeeper) fn expired(&self) {
        {
            let mut state = self.state();
            state.hello.session = 0;
            state.hello.password = vec![0; 16];
            state.trust = None;
            if !self.begins_again {
                state.why = "the session has expired".to_owned();
            }
        }
        if !self.begins_again {
            self.status.send_modify(|status| status.ended = true);
        }
        let epoch = self.status.borrow().epoch;
        self.tell(Happening::Expired(epoch));
    }

    /// Whether no server has made this session yet.
    pub(in crate::engine::zookeeper) fn was_never_accepted(&self) -> bool {
        self.state().hello.session == 0 && self.status.borrow().epoch == 0
    }

    /// Why there will be no connection.
    fn ending(&self) -> Error {
        let state = self.state();
        match state.refused {
            true => failed(format!("no server accepts us ({})", state.why), false),
            false => Fault::Ended.into(),
        }
    }

    /// The server will never accept us.
    pub(in crate::engine::zookeeper) fn give_up(&self, why: &str) {
        self.cut(why.to_owned());
        self.state().refused = true;
        self.status.send_modify(|status| status.ended = true);
    }

    /// Hands a frame to whom it concerns.
    pub(in crate::engine::zookeeper) fn heed(
        &self,
        frame: &[u8],
    ) -> std::result::Result<(), Garbled> {
        let mut reader = Reader(frame);
        let head = wire::head(&mut reader)?;
        match head.xid {
            wire::WATCH_XID => {
                if let Some((change, path)) = wire::event(&mut reader)? {
                    self.changed(change, path);
                }
            }
            wire::AUTH_XID => {
                if Refusal(head.error) == Refusal::AUTH_FAILED {
                    self.give_up("it does not accept the user and password");
                    return Err(Garbled);
                }
            }
            xid => self.answered(xid, head, reader.0)?,
        }
        Ok(())
    }

    fn answered(
        &self,
        xid: i32,
        head: wire::Head,
        body: &[u8],
    ) -> std::result::Result<(), Garbled> {
        let mut state = self.state();
        // Answers come in the order of the requests.
        let pending = state.pending.pop_front().filter(|pending| pending.xid == xid);
        let pending = pending.ok_or(Garbled)?;
        state.hello.seen = state.hello.seen.max(head.zxid);
        let refusal = Refusal(head.error);
        // A refusal may be the word of the server that we are connected to.
        if pending.by_leader
            && head.error == 0
            && let Some(trust) = &mut state.trust
        {
            trust.answered(pending.sent);
        }
        drop(state);
        let reply = match head.error {
            0 => Ok(Reply { zxid: head.zxid, body: body.to_vec() }),
            _ => Err(Fault::Refused(refusal)),
        };
        if let Some(answer) = pending.answer {
            // Whoever asked may have gone.
            let _ = answer.send(reply);
        }
        Ok(())
    }

    fn changed(&self, change: Change, path: &str) {
        let waiting = self.state().watches.remove(path).unwrap_or_default();
        for waiting in waiting.iter().filter_map(Weak::upgrade) {
            waiting.notify_one();
        }
        self.tell(Happening::Changed(change, path.to_owned()));
    }
}

/// Tells a channel what happens to a session, with a word on which.
pub(in crate::engine::zookeeper) fn teller<T: Copy + Send + Sync + 'static>(
    which: T,
    channel: mpsc::UnboundedSender<(T, Happening)>,
) -> Box<dyn Fn(Happening) + Send + Sync> {
    Box::new(move |happening| {
        // Nobody listens any more when the engine is closed.
        let _ = channel.send((which, happening));
    })
}
