//! Locks on a Redis server: plain keys, scripts, and a queue that hands over.
//!
//! An exclusive lock is a plain string key, so it excludes, and is excluded by, every lock that is
//! taken with `SET key value NX PX`. Everything else about a name lies beside it in the same hash
//! slot; `redis/common.lua` lists the keys. The parts:
//!
//! * `link` keeps the connection, and says what is unknown after it broke;
//! * `redis/*.lua` decide, on the server and on its clock;
//! * `waiting` follows the rules by which a queued claim may believe that it holds.
//!
//! # The hand-off
//! A refused claim queues. The release script grants the lock to the first live waiter and writes
//! to the inbox of its process: one waiter woken, already holding. A waiter's place lives for `q` =
//! min(5 s, ttl/2) and is refreshed every q/3, for all waiters of a process at once; a handed-over
//! lock has a first lease of `f` = 2q, confirmed by the first renewal.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use futures_core::stream::BoxStream;
use futures_util::StreamExt;
use redis::Value;
use tokio::sync::mpsc;

use self::answers::{Standing, list, look_state, standing, word};
use self::keys::Keys;
use self::link::{Link, Unanswered};
use self::waiting::{News, Waiter, Waiters};
use super::watch::receiver_stream;
use super::{
    Amend, Break, Capabilities, Claim, ClaimId, Engine, Grant, Holder, LockState, Mode, Scope,
    Signal, Swap, Version, Wait, drift,
};
use crate::clock::{Clock, Moment};
use crate::error::{Error, LossReason, Result};
use crate::hash::FastMap;
use crate::mutual::unpoisoned;
use crate::name::{Name, Prefix};
use crate::token::Token;

mod answers;
mod keys;
mod link;
mod waiting;

const ENGINE: &str = "redis";
/// How long a request waits for its answer, and a connection for itself.
const PATIENCE: Duration = Duration::from_secs(2);
const LEAST_PATIENCE: Duration = Duration::from_millis(50);
/// How long a withdrawn claim is remembered on the server.
const MARK_LIFE: Duration = Duration::from_secs(60);
/// At most this many claims travel in one script.
const BATCH: usize = 100;
/// How often a watch looks; changes of locks are not published.
const WATCH_EVERY: Duration = Duration::from_millis(100);

/// How a [`Redis`] is connected.
#[derive(Clone)]
pub struct RedisOptions {
    /// `redis://[user:password@]host[:port][/db]`, or `rediss://…` for TLS.
    pub url: String,
    /// What every key begins with.
    pub prefix: String,
    /// How long after the clock last lifted it a name's fence is forgotten; the clock then keeps
    /// tokens growing.
    pub fence_idle: Duration,
}

impl std::fmt::Debug for RedisOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The URL may carry a password.
        f.debug_struct("RedisOptions").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

impl Default for RedisOptions {
    fn default() -> Self {
        Self {
            url: "redis://127.0.0.1:6379".to_owned(),
            prefix: "lockset:".to_owned(),
            fence_idle: Duration::from_secs(7 * 86_400),
        }
    }
}

/// One client of one Redis server.
#[derive(Debug)]
pub struct Redis {
    core: Arc<Core>,
    pulse: tokio::task::AbortHandle,
}

#[derive(Debug)]
struct Core {
    link: Link,
    scripts: Scripts,
    prefix: String,
    address: String,
    inbox: String,
    clock: Clock,
    waiters: Arc<Waiters>,
    /// Wakes the task that shows signs of life.
    wake: tokio::sync::Notify,
    /// Claims of which a creating request was not answered: they end with a mark.
    dirty: Mutex<FastMap<ClaimId, ()>>,
    signals: Mutex<Option<mpsc::UnboundedReceiver<Signal>>>,
}

#[derive(Debug)]
struct Scripts {
    acquire: redis::Script,
    heartbeat: redis::Script,
    renew: redis::Script,
    finish: redis::Script,
    amend: redis::Script,
    look: redis::Script,
    cell: redis::Script,
    force: redis::Script,
}

impl Scripts {
    fn new(fence_idle: Duration) -> Self {
        let common = include_str!("redis/common.lua")
            .replace("FENCE_IDLE_MS", &fence_idle.as_millis().to_string());
        let script = |body: &str| redis::Script::new(&format!("{common}\n{body}"));
        Self {
            acquire: script(include_str!("redis/acquire.lua")),
            heartbeat: script(include_str!("redis/heartbeat.lua")),
            renew: script(include_str!("redis/renew.lua")),
            finish: script(include_str!("redis/finish.lua")),
            amend: script(include_str!("redis/amend.lua")),
            look: script(include_str!("redis/look.lua")),
            cell: redis::Script::new(include_str!("redis/cell.lua")),
            force: script(include_str!("redis/break.lua")),
        }
    }
}

impl Redis {
    /// Connects. Must be called inside a tokio runtime, on which the connection then lives.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a URL that is none; [`Error::Unreachable`] if the server does not
    /// answer or refuses the user.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn connect(options: RedisOptions) -> Result<Self> {
        let info = connection_info(&options.url)?;
        let address = info.addr().to_string();
        let client = redis::Client::open(info)
            .map_err(|error| link::failed(format!("{error}"), false, Some(&error)))?;
        let inbox = format!("{}inbox:{:016x}", options.prefix, rand::random::<u64>());
        let waiters = Arc::<Waiters>::default();
        let (tell, signals) = mpsc::unbounded_channel();
        let postman = postman(waiters.clone(), tell);
        let link = Link::open(client, inbox.clone(), postman).await?;
        let core = Arc::new(Core {
            link,
            scripts: Scripts::new(options.fence_idle),
            prefix: options.prefix,
            address,
            inbox,
            clock: Clock::boot(),
            waiters,
            wake: tokio::sync::Notify::new(),
            dirty: Mutex::default(),
            signals: Mutex::new(Some(signals)),
        });
        let pulse = tokio::spawn(show_life(core.clone())).abort_handle();
        Ok(Self { core, pulse })
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.pulse.abort();
        self.core.link.close();
    }
}

fn connection_info(url: &str) -> Result<redis::ConnectionInfo> {
    use redis::IntoConnectionInfo;
    let info = url.into_connection_info().map_err(|_| {
        Error::invalid("URL", "(not shown)", "redis://[user:password@]host[:port][/db]")
    })?;
    let settings = info.redis_settings().clone().set_protocol(redis::ProtocolVersion::RESP3);
    // A connection that was given up must not deliver anything later than a mark is remembered.
    let tcp = redis::io::tcp::TcpSettings::default();
    let tcp = tcp.set_nodelay(true).set_linger_time(Duration::ZERO);
    #[cfg(target_os = "linux")]
    let tcp = tcp.set_user_timeout(MARK_LIFE / 3);
    Ok(info.set_redis_settings(settings).set_tcp_settings(tcp))
}

/// Hands what the server pushes to whom it concerns: `g` id token, `b` id, `r` id.
fn postman(waiters: Arc<Waiters>, signals: mpsc::UnboundedSender<Signal>) -> link::Postman {
    Arc::new(move |letter| {
        let Ok(letter) = std::str::from_utf8(letter) else { return };
        let (Some(kind), Some(id), Some(rest)) =
            (letter.get(..1), letter.get(1..33), letter.get(33..))
        else {
            return;
        };
        let Ok(id) = id.parse::<ClaimId>() else { return };
        match (kind, rest.parse()) {
            ("g", Ok(token)) => {
                if let Some(waiter) = waiters.find(id) {
                    waiter.offered(token);
                }
            }
            ("b", _) => {
                let _ = signals.send(Signal::Lost(id, LossReason::Broken));
            }
            ("r", _) => {
                let _ = signals.send(Signal::Lost(id, LossReason::Revoked));
            }
            _ => {}
        }
    })
}

/// Shows the server that the waiters of this client live: all that are due, in as few requests as
/// fit, and all at once after a new connection.
async fn show_life(core: Arc<Core>) {
    let mut links = core.link.changes();
    let mut all = false;
    loop {
        for batch in core.waiters.due(core.clock.now(), all).chunks(BATCH) {
            core.beat(batch).await;
        }
        // Asked after that: one that was not answered is due again too.
        let next = core.waiters.next_beat();
        all = tokio::select! {
            () = core.wake.notified() => false,
            () = core.clock.sleep_until(next) => false,
            changed = links.changed() => {
                if changed.is_err() {
                    return;
                }
                matches!(&*links.borrow_and_update(), link::State::Up(_))
            }
        };
    }
}

impl Core {
    fn keys(&self, name: &Name) -> Keys {
        Keys::new(&self.prefix, name)
    }

    fn dirty(&self) -> MutexGuard<'_, FastMap<ClaimId, ()>> {
        unpoisoned(&self.dirty)
    }

    /// Runs a script once.
    async fn run(
        &self,
        script: &redis::Script,
        keys: &[String],
        args: &[String],
        patience: Duration,
    ) -> std::result::Result<Value, Unanswered> {
        let mut up = self.link.up(patience).await?;
        let mut invocation = script.prepare_invoke();
        keys.iter().for_each(|key| {
            invocation.key(key);
        });
        args.iter().for_each(|arg| {
            invocation.arg(arg);
        });
        self.link.answer(patience, invocation.invoke_async(&mut up.connection)).await
    }

    /// The claim as it travels over the connection that stands now.
    async fn written(&self, claim: &Claim) -> Result<String> {
        claim.floor.map_or(Ok(()), check_token)?;
        let up = self.link.up(PATIENCE).await.map_err(Unanswered::into_error)?;
        Ok(keys::written(claim, up.floor, &self.inbox))
    }

    /// One request for a claim: queues it, or finds out how it stands.
    async fn ask(&self, waiter: &Waiter, wait: Wait) -> Result<Asked> {
        let claim = &waiter.claim;
        let body = self.written(claim).await?;
        let keys = self.keys(&claim.name).of(claim.id);
        let args = [claim.id.to_string(), body, u8::from(wait != Wait::No).to_string()];
        let sent = self.clock.now();
        waiter.sending(sent);
        // Nobody waits longer for an answer than for the lock.
        let patience = match wait {
            Wait::Until(deadline) => deadline.since(sent).clamp(LEAST_PATIENCE, PATIENCE),
            Wait::No | Wait::Forever => PATIENCE,
        };
        let answer = self.run(&self.scripts.acquire, &keys, &args, patience).await;
        let answer = self.noting_doubt(claim.id, answer)?;
        self.take_answer(waiter, sent, &answer)
    }

    /// Remembers that a creating request of this claim was not answered.
    fn noting_doubt(
        &self,
        id: ClaimId,
        answer: std::result::Result<Value, Unanswered>,
    ) -> Result<Value> {
        if let Err(Unanswered::Unknown(_)) = answer {
            self.dirty().insert(id, ());
        }
        answer.map_err(Unanswered::into_error)
    }

    /// Notes what a request sent at `sent` was answered.
    fn take_answer(&self, waiter: &Waiter, sent: Moment, answer: &Value) -> Result<Asked> {
        let claim = &waiter.claim;
        match standing(answer)? {
            Standing::GrantedNow(token) => {
                let valid_until = (sent + claim.ttl).before(drift(claim.ttl));
                return Ok(Asked::Granted(keys::grant(Token::new(token), valid_until)));
            }
            Standing::Granted(token, left) => waiter.granted(sent, token, left),
            Standing::Queued { stamp, place, left } => {
                waiter.queued(sent, self.clock.now(), stamp, place, left);
                self.wake.notify_one();
            }
            Standing::Gone => waiter.gone(),
            Standing::Busy => return Ok(Asked::Busy),
            Standing::Clash(why) => {
                return Err(Error::Conflict { name: claim.name.clone(), why: clash(&why, claim) });
            }
        }
        Ok(Asked::News)
    }

    /// One sign of life for each of these waiters.
    async fn beat(&self, waiters: &[Arc<Waiter>]) {
        let sent = self.clock.now();
        let (mut keys, mut args) = (Vec::new(), vec![self.inbox.clone()]);
        for waiter in waiters {
            waiter.beating(sent);
            keys.extend(self.keys(&waiter.claim.name).of(waiter.claim.id));
            args.push(waiter.claim.id.to_string());
        }
        let answer = self.run(&self.scripts.heartbeat, &keys, &args, PATIENCE).await;
        let Ok(Value::Array(answers)) = answer else { return };
        for (waiter, answer) in waiters.iter().zip(&answers) {
            if let Err(error) = self.take_answer(waiter, sent, answer) {
                tracing::debug!(%error, "a sign of life was answered strangely");
            }
        }
    }

    /// Release and withdrawal: removes whatever bears the id, and hands on.
    async fn finish(
        &self,
        claim: &Claim,
        token: Option<Token>,
        mark: bool,
        next: Option<(&Waiter, String)>,
    ) -> std::result::Result<Value, Unanswered> {
        let mut keys = self.keys(&claim.name).of(claim.id).to_vec();
        let life = if mark { MARK_LIFE.as_millis().to_string() } else { "0".to_owned() };
        let token = token.map(|token| token.to_string()).unwrap_or_default();
        let mut args = vec![claim.id.to_string(), token, life];
        if let Some((waiter, body)) = next {
            let [.., its_mark] = self.keys(&claim.name).of(waiter.claim.id);
            keys.push(its_mark);
            args.extend([waiter.claim.id.to_string(), body]);
        }
        self.run(&self.scripts.finish, &keys, &args, PATIENCE).await
    }

    /// A handed-over fixed lease is made as long as was asked for, counted from the grant.
    async fn complete(&self, claim: &Claim, grant: Grant) -> Result<Option<Grant>> {
        let first = keys::first_lease(claim.ttl);
        if !claim.fixed || claim.ttl <= first {
            return Ok(Some(grant));
        }
        let more = claim.ttl.saturating_sub(first);
        let answers = self.extend(&[(claim, &grant)], more, true).await?;
        match word(list(first_of(&answers)?)?, 0)?.as_str() {
            "renewed" => Ok(Some(Grant { valid_until: grant.valid_until + more, ..grant })),
            _ => Ok(None),
        }
    }

    async fn extend(
        &self,
        batch: &[(&Claim, &Grant)],
        ttl: Duration,
        add: bool,
    ) -> Result<Vec<Value>> {
        let (mut keys, mut args) = (Vec::new(), Vec::new());
        for (claim, grant) in batch {
            keys.extend(self.keys(&claim.name).of(claim.id));
            let ttl = if add { ttl } else { claim.ttl };
            args.extend([
                claim.id.to_string(),
                grant.token.to_string(),
                ttl.as_millis().to_string(),
                u8::from(add).to_string(),
            ]);
        }
        let answer = self.run(&self.scripts.renew, &keys, &args, PATIENCE).await;
        match answer.map_err(Unanswered::into_error)? {
            Value::Array(answers) if answers.len() == batch.len() => Ok(answers),
            other => Err(answers::unexpected(&format!("{other:?}"))),
        }
    }

    async fn look(&self, name: &Name) -> Result<LockState> {
        let keys = self.keys(name);
        let mut all = keys.of(ClaimId::from_bits(0)).to_vec();
        all.push(keys.cell());
        let answer = self.run(&self.scripts.look, &all, &[], PATIENCE).await;
        look_state(name, &answer.map_err(Unanswered::into_error)?)
    }

    /// The names with this prefix, found by SCAN: of locks, and of cells. Keys of other types are
    /// somebody else's.
    async fn names(&self, prefix: &Prefix) -> Result<Vec<Name>> {
        let begin = format!("{}{}", escaped(&self.prefix), escaped(prefix.as_str()));
        let mut found = std::collections::BTreeSet::new();
        for key in self.scan(&format!("{begin}*"), "string").await? {
            found.extend(Keys::name_of_lock(&self.prefix, &key));
        }
        for pattern in [format!("{{{begin}*}}:cell"), format!("{begin}*:cell")] {
            for key in self.scan(&pattern, "hash").await? {
                found.extend(Keys::name_of_cell(&self.prefix, &key));
            }
        }
        Ok(found.into_iter().collect())
    }

    async fn scan(&self, pattern: &str, kind: &str) -> Result<Vec<String>> {
        let (mut cursor, mut found) = (0_u64, Vec::new());
        loop {
            let mut up = self.link.up(PATIENCE).await.map_err(Unanswered::into_error)?;
            let mut scan = redis::cmd("SCAN");
            scan.arg(cursor).arg("MATCH").arg(pattern).arg("COUNT").arg(500);
            scan.arg("TYPE").arg(kind);
            let answer = self.link.answer(PATIENCE, scan.query_async(&mut up.connection)).await;
            let answer = answer.map_err(Unanswered::into_error)?;
            let parts = list(&answer)?;
            cursor = answers::number(parts, 0)?;
            let keys = list(parts.get(1).unwrap_or(&Value::Array(Vec::new())))?.to_vec();
            for index in 0..keys.len() {
                found.push(word(&keys, index)?);
            }
            if cursor == 0 {
                return Ok(found);
            }
        }
    }
}

/// What came of a request.
enum Asked {
    /// The full ttl, at once.
    Granted(Grant),
    Busy,
    /// The waiter knows.
    News,
}

fn clash(used: &str, claim: &Claim) -> String {
    let used = match used.split_once(':') {
        Some((_, limit)) => format!("a semaphore of {limit} permits"),
        None => "a lock".to_owned(),
    };
    match claim.mode {
        Mode::Permits { limit, .. } => {
            format!("it is in use as {used}, not as a semaphore of {limit} permits")
        }
        Mode::Exclusive | Mode::Shared => format!("it is in use as {used}, not as a lock"),
    }
}

/// The scripts count in doubles, which are exact up to 2^53.
fn check_token(token: Token) -> Result<()> {
    if token < Token::new(1 << 53) {
        return Ok(());
    }
    Err(Error::invalid("token", &token.to_string(), "on Redis tokens are below 2^53"))
}

fn first_of(values: &[Value]) -> Result<&Value> {
    values.first().ok_or_else(|| answers::unexpected("no answer"))
}

/// A text that a pattern of SCAN takes literally.
fn escaped(text: &str) -> String {
    let special = |c: char| matches!(c, '*' | '?' | '[' | ']' | '\\');
    text.chars().flat_map(|c| special(c).then_some('\\').into_iter().chain([c])).collect()
}

#[async_trait]
impl Engine for Redis {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            engine: ENGINE,
            shared: true,
            permits: true,
            cells: true,
            sees_death: false,
            pushes: true,
            durable: true,
            min_ttl: Duration::from_millis(200),
            max_ttl: Duration::from_secs(7 * 86_400),
        }
    }

    fn identity(&self) -> String {
        format!("redis://{}?prefix={}", self.core.address, self.core.prefix)
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        let core = &self.core;
        let waiter = core.waiters.enter(claim);
        let outcome = core.wait_for(&waiter, wait).await;
        if outcome.is_ok() {
            core.waiters.remove(claim.id);
        }
        outcome
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        let sent = self.core.clock.now();
        let parts = batch.chunks(BATCH).map(|part| async move {
            match self.core.extend(part, Duration::ZERO, false).await {
                Ok(answers) => part
                    .iter()
                    .zip(answers)
                    .map(|((claim, grant), answer)| renewed(claim, grant, sent, &answer))
                    .collect::<Vec<_>>(),
                Err(error) => part.iter().map(|_| Err(link::again(&error))).collect(),
            }
        });
        futures_util::future::join_all(parts).await.into_iter().flatten().collect()
    }

    async fn raise(&self, claim: &Claim, grant: &Grant, to: Token) -> Result<Grant> {
        check_token(to)?;
        self.core.amend(claim, grant, "raise", &to.to_string()).await?;
        Ok(Grant { token: to, ..grant.clone() })
    }

    async fn amend(&self, claim: &Claim, grant: &Grant, to: Amend) -> Result<Grant> {
        match to {
            Amend::Downgrade => self.core.amend(claim, grant, "downgrade", "").await?,
            Amend::Note(note) => {
                let note = keys::written_note(&note, &self.core.inbox);
                self.core.amend(claim, grant, "note", &note).await?;
            }
        }
        Ok(grant.clone())
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let core = &self.core;
        let sent = core.clock.now();
        let next = match next {
            None => None,
            Some(next) => {
                let (waiter, body) = (core.waiters.enter(next), core.written(next).await?);
                waiter.sending(sent);
                Some((waiter, body))
            }
        };
        let dirty = core.dirty().contains_key(&claim.id);
        let carried = next.as_ref().map(|(waiter, body)| (&**waiter, body.clone()));
        // In doubt from the first byte on: this future may be dropped before the answer.
        let next_id = next.as_ref().map(|(waiter, _)| waiter.claim.id);
        let first_doubt = next_id.filter(|id| core.dirty().insert(*id, ()).is_none());
        let answer = core.finish(claim, Some(grant.token), dirty, carried).await;
        if !matches!(answer, Err(Unanswered::Unknown(_))) {
            first_doubt.and_then(|id| core.dirty().remove(&id));
        }
        let answer = answer.map_err(Unanswered::into_error)?;
        core.dirty().remove(&claim.id);
        let parts = list(&answer)?;
        if word(parts, 0)? != "released" {
            return Err(Error::NotHeld { name: claim.name.clone() });
        }
        let (Some((waiter, _)), Some(its)) = (next, parts.get(1)) else { return Ok(None) };
        match core.take_answer(&waiter, sent, its) {
            Ok(Asked::Granted(grant)) => {
                core.waiters.remove(waiter.claim.id);
                Ok(Some(grant))
            }
            // It finds out by its own request.
            _ => Ok(None),
        }
    }

    async fn withdraw(&self, claim: &Claim) -> Result<()> {
        self.core.leave(claim).await
    }

    fn watch(&self, scope: &Scope) -> BoxStream<'static, Result<LockState>> {
        let watch = Watch {
            core: self.core.clone(),
            scope: scope.clone(),
            known: std::collections::BTreeMap::new(),
            due: std::collections::VecDeque::new(),
            first: true,
        };
        futures_util::stream::unfold(watch, |mut watch| async {
            let state = watch.next().await;
            Some((state, watch))
        })
        .boxed()
    }

    async fn inspect(&self, name: &Name) -> Result<LockState> {
        self.core.look(name).await
    }

    async fn list(&self, prefix: &Prefix) -> Result<Vec<LockState>> {
        let mut states = Vec::new();
        for name in self.core.names(prefix).await? {
            let state = self.core.look(&name).await?;
            if state.is_used() {
                states.push(state);
            }
        }
        Ok(states)
    }

    async fn cell(&self, name: &Name, expect: Version, value: Option<Vec<u8>>) -> Result<Swap> {
        let core = &self.core;
        let mut up = core.link.up(PATIENCE).await.map_err(Unanswered::into_error)?;
        let mut invocation = core.scripts.cell.prepare_invoke();
        invocation.key(core.keys(name).cell()).arg(expect.0).arg(u8::from(value.is_some()));
        invocation.arg(value.unwrap_or_default());
        let answer = core.link.answer(PATIENCE, invocation.invoke_async(&mut up.connection)).await;
        let answer = answer.map_err(Unanswered::into_error)?;
        let parts = list(&answer)?;
        let version = Version(answers::number(parts, 1)?);
        match word(parts, 0)?.as_str() {
            "done" => Ok(Swap::Done(version)),
            _ => {
                let value = answers::bytes(parts, 2)?.to_vec();
                Ok(Swap::Found(crate::engine::Cell { version, value }))
            }
        }
    }

    async fn force_release(&self, name: &Name, how: Break) -> Result<Vec<Holder>> {
        let core = &self.core;
        let keys = core.keys(name).of(ClaimId::from_bits(0));
        let args = [u8::from(how == Break::Now).to_string()];
        let answer = core.run(&core.scripts.force, &keys, &args, PATIENCE).await;
        let broken = answers::broken(&answer.map_err(Unanswered::into_error)?)?;
        let kind = if how == Break::Now { 'b' } else { 'r' };
        let mut up = core.link.up(PATIENCE).await.map_err(Unanswered::into_error)?;
        for (holder, inbox) in &broken {
            if let (Some(id), false) = (holder.claim, inbox.is_empty()) {
                let mut publish = redis::cmd("PUBLISH");
                publish.arg(inbox).arg(format!("{kind}{id}"));
                // If nobody hears it, the next renewal tells.
                let sent =
                    core.link.answer(PATIENCE, publish.query_async(&mut up.connection)).await;
                tracing::debug!(told = sent.is_ok(), "a holder whose lock was broken");
            }
        }
        Ok(broken.into_iter().map(|(holder, _)| holder).collect())
    }

    fn signals(&self) -> BoxStream<'static, Signal> {
        let mut signals = unpoisoned(&self.core.signals);
        match signals.take() {
            Some(signals) => receiver_stream(signals).boxed(),
            None => futures_util::stream::empty().boxed(),
        }
    }

    async fn close(&self) {
        self.pulse.abort();
        self.core.link.close();
    }
}

fn renewed(claim: &Claim, grant: &Grant, sent: Moment, answer: &Value) -> Result<Grant> {
    match word(list(answer)?, 0)?.as_str() {
        "renewed" => {
            let valid_until = (sent + claim.ttl).before(drift(claim.ttl));
            Ok(Grant { valid_until: valid_until.max(grant.valid_until), ..grant.clone() })
        }
        "revoked" => Err(Error::lost(&claim.name, LossReason::Revoked)),
        "failed" => {
            let why = word(list(answer)?, 1)?;
            // Of the wrong type: somebody wrote something else in its place.
            match why.contains("WRONGTYPE") {
                true => Err(Error::lost(&claim.name, LossReason::Forgotten)),
                false => Err(link::told(&why)),
            }
        }
        _ => Err(Error::lost(&claim.name, LossReason::Forgotten)),
    }
}

impl Core {
    /// The whole way of one claim, until it is granted or its time is over.
    async fn wait_for(&self, waiter: &Waiter, wait: Wait) -> Result<Option<Grant>> {
        let claim = &waiter.claim;
        loop {
            let now = self.clock.now();
            let look_at = match waiter.news(now) {
                News::Granted(grant) => match self.believe(claim, grant).await? {
                    Some(grant) => return Ok(Some(grant)),
                    None => return Err(Error::NotHeld { name: claim.name.clone() }),
                },
                News::Gone => return Err(Error::NotHeld { name: claim.name.clone() }),
                News::Ask => match self.ask(waiter, wait).await {
                    Ok(Asked::Granted(grant)) => return Ok(Some(grant)),
                    Ok(Asked::Busy) => return Ok(None),
                    Ok(Asked::News) => continue,
                    Err(error) if error.is_retryable() && self.clock.now() < wait.deadline() => {
                        // Asked again by the same id, which changes nothing if it was executed.
                        tokio::time::sleep(Duration::from_millis(20)).await;
                        continue;
                    }
                    Err(error) => return Err(error),
                },
                News::Waits(look_at) => look_at,
            };
            if now >= wait.deadline() {
                self.leave(claim).await?;
                return Ok(None);
            }
            tokio::select! {
                () = waiter.news.notified() => {}
                () = self.clock.sleep_until(look_at.min(wait.deadline())) => {
                    if self.clock.now() >= look_at {
                        // The lease before us may have ended: a sign of life finds out.
                        self.beat_one(waiter).await;
                    }
                }
            }
        }
    }

    /// Nothing is asked for this claim any more; then it is withdrawn.
    async fn leave(&self, claim: &Claim) -> Result<()> {
        if let Some(waiter) = self.waiters.remove(claim.id) {
            waiter.gone();
        }
        self.finish(claim, None, true, None).await.map_err(Unanswered::into_error)?;
        self.dirty().remove(&claim.id);
        Ok(())
    }

    async fn beat_one(&self, waiter: &Waiter) {
        if let Some(waiter) = self.waiters.find(waiter.claim.id) {
            self.beat(&[waiter]).await;
        }
    }

    /// A grant that was read only after its time is believed if it can be renewed, not otherwise.
    async fn believe(&self, claim: &Claim, grant: Grant) -> Result<Option<Grant>> {
        if grant.valid_until > self.clock.now() {
            return self.complete(claim, grant).await;
        }
        let sent = self.clock.now();
        let answers = self.extend(&[(claim, &grant)], Duration::ZERO, false).await?;
        match renewed(claim, &grant, sent, first_of(&answers)?) {
            Ok(grant) => Ok(Some(grant)),
            Err(Error::Lost { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn amend(&self, claim: &Claim, grant: &Grant, what: &str, to: &str) -> Result<()> {
        let keys = self.keys(&claim.name).of(claim.id);
        let args = [claim.id.to_string(), grant.token.to_string(), what.to_owned(), to.to_owned()];
        let answer = self.run(&self.scripts.amend, &keys, &args, PATIENCE).await;
        match word(list(&answer.map_err(Unanswered::into_error)?)?, 0)?.as_str() {
            "done" => Ok(()),
            _ => Err(Error::lost(&claim.name, LossReason::Forgotten)),
        }
    }
}

/// A watch: looks again and again, and tells what is different.
struct Watch {
    core: Arc<Core>,
    scope: Scope,
    known: std::collections::BTreeMap<Name, String>,
    due: std::collections::VecDeque<Result<LockState>>,
    first: bool,
}

impl Watch {
    async fn next(&mut self) -> Result<LockState> {
        loop {
            if let Some(state) = self.due.pop_front() {
                return state;
            }
            if !std::mem::take(&mut self.first) {
                tokio::time::sleep(WATCH_EVERY).await;
            }
            self.look().await;
        }
    }

    async fn look(&mut self) {
        let names = match &self.scope {
            Scope::Name(name) => Ok(vec![name.clone()]),
            Scope::Prefix(prefix) => self.core.names(prefix).await,
        };
        let names = match names {
            Ok(names) => names,
            Err(error) => return self.due.push_back(Err(error)),
        };
        let gone: Vec<Name> =
            self.known.keys().filter(|name| !names.contains(name)).cloned().collect();
        for name in names.into_iter().chain(gone) {
            match self.core.look(&name).await {
                Err(error) => self.due.push_back(Err(error)),
                Ok(state) => {
                    let face = face(&state);
                    if self.known.insert(name, face.clone()) != Some(face) {
                        self.due.push_back(Ok(state));
                    }
                }
            }
        }
    }
}

/// What of a state makes a difference: all but the time that is left.
fn face(state: &LockState) -> String {
    let holders: Vec<_> = state
        .holders
        .iter()
        .map(|holder| (holder.claim, holder.token, holder.mode, &holder.note, holder.revoked))
        .collect();
    let waiters: Vec<_> = state.waiters.iter().map(|waiter| (waiter.claim, &waiter.note)).collect();
    format!("{holders:?} {waiters:?} {:?}", state.cell)
}
