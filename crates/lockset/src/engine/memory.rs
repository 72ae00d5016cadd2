//! The reference semantics: locks inside one process, in plain Rust.
//!
//! It needs no server and runs on any [`Clock`], including virtual ones. The conformance laws were
//! first written against it. Use it for tests of your own code, and for work that must be exclusive
//! inside one process only.
//!
//! Leases are real here too: a claim that its keeper does not renew lapses, and the next waiter is
//! granted the lock.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use futures_core::stream::BoxStream;
use tokio::sync::{Notify, mpsc};

use super::common::admission::{Tally, check_permits, clash};
use super::common::hints::{HintSenders, told_once};
use super::common::tombstones::Tombstones;
use super::{
    Admission, Amend, Break, Capabilities, Cell, Claim, ClaimId, Engine, Event, FencedNode, Grant,
    Hint, Holder, LockState, Mode, Renewal, Scope, Swap, Version, Wait, Waiter, drift,
};
use crate::clock::{Clock, Moment, wall_micros};
use crate::error::{Error, LossReason, Result};
use crate::hash::FastMap;
use crate::name::{Name, Note, Prefix};
use crate::sync;
use crate::token::Token;

/// Free names are removed when there are more than this, and twice as many as after the last sweep.
const SWEEP_AT: usize = 1024;

/// One client of a home that lives in this process.
pub struct Memory {
    home: Arc<Mutex<MemoryHome>>,
    clock: Clock,
    client: u64,
    label: Arc<str>,
    events: Mutex<Option<mpsc::UnboundedReceiver<Event>>>,
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Memory({})", self.identity())
    }
}

impl Memory {
    /// A client of a new, empty home.
    pub fn new(clock: Clock) -> Self {
        let label = format!("memory:{:08x}", rand::random::<u32>());
        Self::client_of(Arc::default(), clock, label.into())
    }

    /// Another client of the same home, as another process would be of a server.
    pub fn another_client(&self) -> Self {
        Self::client_of(self.home.clone(), self.clock.clone(), self.label.clone())
    }

    /// A client of this process's home with this label. All clients of one label share the home.
    pub(crate) fn shared(label: &str) -> Self {
        static HOMES: Mutex<BTreeMap<String, Arc<Mutex<MemoryHome>>>> = Mutex::new(BTreeMap::new());
        let home = sync::lock(&HOMES).entry(label.to_owned()).or_default().clone();
        Self::client_of(home, Clock::boot(), format!("memory:{label}").into())
    }

    fn client_of(home: Arc<Mutex<MemoryHome>>, clock: Clock, label: Arc<str>) -> Self {
        let (sender, events) = mpsc::unbounded_channel();
        let client = sync::lock(&home).join(sender);
        Self { home, clock, client, label, events: Mutex::new(Some(events)) }
    }

    fn home(&self) -> MutexGuard<'_, MemoryHome> {
        sync::lock(&self.home)
    }

    async fn wait(
        &self,
        claim: &Claim,
        deadline: Moment,
        wake: Arc<Notify>,
        mut check_at: Moment,
    ) -> Admission {
        loop {
            tokio::select! {
                () = wake.notified() => {}
                () = self.clock.sleep_until(check_at.min(deadline)) => {}
            }
            let now = self.clock.now();
            let mut home = self.home();
            match home.check(claim, now) {
                QueueStatus::Granted(grant) => return Admission::Granted(grant),
                QueueStatus::Forgotten => return Admission::Forgotten,
                QueueStatus::Queued { .. } | QueueStatus::Busy if now >= deadline => {
                    home.remove(&claim.name, claim.id, now);
                    return Admission::NotInTime;
                }
                QueueStatus::Queued { check_at: next, .. } => check_at = next,
                QueueStatus::Busy => return Admission::NotInTime,
            }
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.home().clients.remove(&self.client);
    }
}

/// The wall clock, which keeps tokens growing after state was lost. Here state is lost only with
/// the process, so the clock is read once per process.
fn clock_floor() -> u64 {
    static START: OnceLock<u64> = OnceLock::new();
    *START.get_or_init(wall_micros)
}

#[async_trait]
impl Engine for Memory {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            engine: "memory",
            shared: true,
            permits: true,
            cells: true,
            sees_death: false,
            pushes: true,
            durable: false,
            replicas: false,
            session: None,
            shared_lease: false,
            min_ttl: Duration::from_millis(100),
            max_ttl: Duration::from_secs(7 * 86_400),
        }
    }

    fn identity(&self) -> String {
        self.label.as_ref().to_owned()
    }

    fn clock(&self) -> Clock {
        self.clock.clone()
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        let now = self.clock.now();
        let status = self.home().enter(claim, self.client, wait != Wait::No, now)?;
        Ok(match status {
            QueueStatus::Granted(grant) => Admission::Granted(grant),
            QueueStatus::Busy => Admission::NotInTime,
            QueueStatus::Forgotten => Admission::Forgotten,
            // Boxed, because few claims wait and all futures would have to reserve the space.
            QueueStatus::Queued { wake, check_at } => {
                Box::pin(self.wait(claim, wait.deadline(), wake, check_at)).await
            }
        })
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        let now = self.clock.now();
        let mut home = self.home();
        batch.iter().map(|(claim, grant)| Ok(home.renew(claim, grant, self.client, now))).collect()
    }

    async fn amend(&self, claim: &Claim, grant: &Grant, to: Amend) -> Result<Grant> {
        let now = self.clock.now();
        let mut home = self.home();
        let lock = home.held(claim, grant, now)?;
        if let Some(held) = lock.holders.get_mut(&claim.id) {
            match to {
                Amend::Note(note) => held.note = note,
                Amend::Downgrade => {
                    lock.tally.remove(held.mode);
                    held.mode = Mode::Shared;
                    lock.tally.add(held.mode);
                    lock.admit(now);
                }
            }
        }
        home.notify_watchers(&claim.name);
        Ok(grant.clone())
    }

    async fn adopt(&self, claim: &Claim, grant: &Grant, successor: &Claim) -> Result<Grant> {
        self.home().adopt(claim, grant, successor, self.client, self.clock.now())
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let now = self.clock.now();
        let mut home = self.home();
        let token = home.remove(&claim.name, claim.id, now);
        if token != Some(grant.token) {
            // Every claim with this id is gone, although the reply is "not held".
            return Err(Error::NotHeld { name: claim.name.clone() });
        }
        // The release stands even if `next` fails, which its own request reports.
        match next.map(|next| home.enter(next, self.client, true, now)) {
            Some(Ok(QueueStatus::Granted(grant))) => Ok(Some(grant)),
            _ => Ok(None),
        }
    }

    async fn withdraw(&self, claim: &Claim) -> Result<()> {
        let now = self.clock.now();
        let mut home = self.home();
        home.withdrawn.insert(claim.id, now);
        home.remove(&claim.name, claim.id, now);
        Ok(())
    }

    fn hints(&self, scope: &Scope) -> BoxStream<'static, Result<Hint>> {
        let (sender, hints) = self.home().watchers.add(scope);
        sender.missed();
        hints.into_stream()
    }

    async fn inspect(&self, name: &Name) -> Result<LockState> {
        Ok(self.home().state(name, self.clock.now()))
    }

    async fn list(&self, prefix: &Prefix) -> Result<Vec<LockState>> {
        let now = self.clock.now();
        let home = self.home();
        let states = home.names(prefix).into_iter().map(|name| home.state(&name, now));
        Ok(states.filter(LockState::is_used).collect())
    }

    async fn cell(&self, name: &Name, expect: Version, value: Option<Vec<u8>>) -> Result<Swap> {
        let mut home = self.home();
        home.versions += 1;
        let version = Version(home.versions);
        let lock = home.lock_of(name);
        let found = lock.cell.clone().unwrap_or_default();
        if found.version != expect {
            return Ok(Swap::Found(found));
        }
        let version = if value.is_some() { version } else { Version::ABSENT };
        lock.cell = value.map(|value| Cell { version, value });
        home.notify_watchers(name);
        Ok(Swap::Done(version))
    }

    async fn force_release(&self, name: &Name, how: Break) -> Result<Vec<Holder>> {
        Ok(self.home().force_release(name, how, self.clock.now()))
    }

    fn events(&self) -> BoxStream<'static, Event> {
        told_once(sync::lock(&self.events).take())
    }

    fn as_fenced_node(&self) -> Option<&dyn FencedNode> {
        Some(self)
    }
}

#[async_trait]
impl FencedNode for Memory {
    async fn raise(&self, claim: &Claim, grant: &Grant, to: Token) -> Result<Grant> {
        let now = self.clock.now();
        let mut home = self.home();
        let lock = home.held(claim, grant, now)?;
        if claim.mode != Mode::Exclusive || lock.fence > to.get() {
            return Err(Error::lost(&claim.name, LossReason::Forgotten));
        }
        lock.fence = to.get();
        if let Some(held) = lock.holders.get_mut(&claim.id) {
            held.token = to;
        }
        Ok(Grant { token: to, ..grant.clone() })
    }
}

/// All locks of one home.
#[derive(Debug, Default)]
struct MemoryHome {
    locks: FastMap<Name, MemoryLock>,
    /// The greatest fence among the names that were removed; new names start with it.
    base: u64,
    swept_to: usize,
    withdrawn: Tombstones,
    versions: u64,
    clients: HashMap<u64, mpsc::UnboundedSender<Event>>,
    joined: u64,
    watchers: HintSenders,
}

/// One name. The holders always came before the waiters, because admission is in strict order.
#[derive(Debug, Default)]
struct MemoryLock {
    fence: u64,
    tally: Tally,
    holders: FastMap<ClaimId, MemoryHolder>,
    waiters: BTreeMap<u64, MemoryWaiter>,
    positions: FastMap<ClaimId, u64>,
    next_position: u64,
    cell: Option<Cell>,
}

#[derive(Debug)]
struct MemoryHolder {
    client: u64,
    mode: Mode,
    token: Token,
    ttl: Duration,
    lapses: Moment,
    note: Note,
    revoked: bool,
}

#[derive(Debug)]
struct MemoryWaiter {
    client: u64,
    claim: Claim,
    wake: Arc<Notify>,
}

enum QueueStatus {
    Granted(Grant),
    Queued { wake: Arc<Notify>, check_at: Moment },
    Busy,
    Forgotten,
}

impl MemoryHome {
    fn join(&mut self, sender: mpsc::UnboundedSender<Event>) -> u64 {
        self.joined += 1;
        self.clients.insert(self.joined, sender);
        self.joined
    }

    fn lock_of(&mut self, name: &Name) -> &mut MemoryLock {
        if self.locks.len() >= SWEEP_AT.max(2 * self.swept_to) {
            self.sweep();
        }
        let fence = self.base;
        self.locks
            .entry(name.clone())
            .or_insert_with(|| MemoryLock { fence, ..MemoryLock::default() })
    }

    /// Removes free names. `base` keeps the greatest of their fences.
    fn sweep(&mut self) {
        let base = &mut self.base;
        self.locks.retain(|_, lock| {
            let used = !lock.holders.is_empty() || !lock.waiters.is_empty() || lock.cell.is_some();
            if !used {
                *base = (*base).max(lock.fence);
            }
            used
        });
        self.swept_to = self.locks.len();
    }

    /// A claim's first request, or a repetition of it.
    fn enter(
        &mut self,
        claim: &Claim,
        client: u64,
        queue: bool,
        now: Moment,
    ) -> Result<QueueStatus> {
        check_permits(claim)?;
        if self.withdrawn.contains(claim.id) {
            return Ok(QueueStatus::Forgotten);
        }
        let lock = self.lock_of(&claim.name);
        let ended = lock.expire(now);
        if lock.holders.contains_key(&claim.id) || lock.positions.contains_key(&claim.id) {
            return Ok(self.check(claim, now));
        }
        let clash = lock.mode_in_use().and_then(|used| clash(used, claim.mode));
        let status = if let Some(why) = clash {
            Err(Error::Conflict { name: claim.name.clone(), why })
        } else if lock.waiters.is_empty() && lock.tally.admits(claim.mode) {
            Ok(QueueStatus::Granted(lock.grant(claim, client, now)))
        } else if queue {
            Ok(lock.enqueue(claim, client, now))
        } else {
            Ok(QueueStatus::Busy)
        };
        if ended || !matches!(status, Ok(QueueStatus::Busy) | Err(_)) {
            self.notify_watchers(&claim.name);
        }
        status
    }

    /// The status of a claim that entered before.
    fn check(&mut self, claim: &Claim, now: Moment) -> QueueStatus {
        self.expire(&claim.name, now);
        let Some(lock) = self.locks.get_mut(&claim.name) else { return QueueStatus::Forgotten };
        if let Some(held) = lock.holders.get(&claim.id) {
            return QueueStatus::Granted(held.as_grant());
        }
        let position = lock.positions.get(&claim.id).copied();
        let queued = position.and_then(|position| lock.queued(position, now));
        queued.unwrap_or(QueueStatus::Forgotten)
    }

    /// Ends the leases of `name` that are over, admits the next waiters, and notifies watchers.
    fn expire(&mut self, name: &Name, now: Moment) {
        if self.locks.get_mut(name).is_some_and(|lock| lock.expire(now)) {
            self.notify_watchers(name);
        }
    }

    /// The lock that `claim` holds by `grant`.
    fn held(&mut self, claim: &Claim, grant: &Grant, now: Moment) -> Result<&mut MemoryLock> {
        let forgotten = || Error::lost(&claim.name, LossReason::Forgotten);
        self.expire(&claim.name, now);
        let lock = self.locks.get_mut(&claim.name).ok_or_else(forgotten)?;
        match lock.holders.get(&claim.id) {
            Some(held) if held.token == grant.token => Ok(lock),
            _ => Err(forgotten()),
        }
    }

    fn adopt(
        &mut self,
        claim: &Claim,
        grant: &Grant,
        successor: &Claim,
        client: u64,
        now: Moment,
    ) -> Result<Grant> {
        if self.withdrawn.contains(successor.id) {
            return Err(Error::NotHeld { name: claim.name.clone() });
        }
        if let Ok(lock) = self.held(successor, grant, now) {
            // A repetition.
            return Ok(lock
                .holders
                .get(&successor.id)
                .map_or(grant.clone(), MemoryHolder::as_grant));
        }
        let lock = self.held(claim, grant, now)?;
        let Some(held) = lock.holders.remove(&claim.id) else { return Ok(grant.clone()) };
        let held = MemoryHolder { client, note: successor.note.clone(), ..held };
        let grant = held.as_grant();
        lock.holders.insert(successor.id, held);
        self.withdrawn.insert(claim.id, now);
        self.notify_watchers(&claim.name);
        Ok(grant)
    }

    fn renew(&mut self, claim: &Claim, grant: &Grant, client: u64, now: Moment) -> Renewal {
        let held = self.held(claim, grant, now).ok();
        let Some(held) = held.and_then(|lock| lock.holders.get_mut(&claim.id)) else {
            return Renewal::Lost(LossReason::Forgotten);
        };
        if held.revoked {
            return Renewal::LastLease;
        }
        // The client that renews is notified of losses: a ticket may come from another client.
        held.client = client;
        held.ttl = claim.ttl;
        held.lapses = now + claim.ttl;
        Renewal::Renewed(held.as_grant())
    }

    /// Removes a claim, held or waiting, and admits the next waiters. Returns the token it held by.
    fn remove(&mut self, name: &Name, id: ClaimId, now: Moment) -> Option<Token> {
        let lock = self.locks.get_mut(name)?;
        let ended = lock.expire(now);
        let token = lock.holders.remove(&id).map(|held| {
            lock.tally.remove(held.mode);
            held.token
        });
        let left = token.is_none() && lock.remove_waiter(id);
        if token.is_some() || left {
            lock.admit(now);
        }
        if ended || token.is_some() || left {
            self.notify_watchers(name);
        }
        token
    }

    fn force_release(&mut self, name: &Name, how: Break, now: Moment) -> Vec<Holder> {
        self.expire(name, now);
        let Some(lock) = self.locks.get_mut(name) else { return Vec::new() };
        let mut broken = Vec::new();
        for (id, held) in &mut lock.holders {
            held.revoked = true;
            broken.push(held.describe(*id, now));
            let event = match how {
                Break::WhenLeaseEnds => Event::LastLease(*id),
                Break::Now => Event::Lost(*id, LossReason::Broken),
            };
            if let Some(client) = self.clients.get(&held.client) {
                // The client may be gone.
                let _ = client.send(event);
            }
        }
        if how == Break::Now {
            lock.holders.clear();
            lock.tally = Tally::default();
            lock.admit(now);
        }
        self.notify_watchers(name);
        broken
    }

    fn names(&self, prefix: &Prefix) -> Vec<Name> {
        let mut names: Vec<Name> =
            self.locks.keys().filter(|name| prefix.covers(name)).cloned().collect();
        names.sort();
        names
    }

    fn state(&self, name: &Name, now: Moment) -> LockState {
        let Some(lock) = self.locks.get(name) else { return LockState::free(name.clone()) };
        let mut holders: Vec<Holder> = lock
            .holders
            .iter()
            .filter(|(_, held)| held.lapses > now)
            .map(|(id, held)| held.describe(*id, now))
            .collect();
        holders.sort_by_key(|holder| holder.token);
        let waiters = lock.waiters.values().map(|waiting| Waiter {
            claim: waiting.claim.id,
            mode: waiting.claim.mode,
            note: waiting.claim.note.clone(),
        });
        LockState {
            name: name.clone(),
            holders,
            waiters: waiters.collect(),
            fence: (lock.fence > 0).then_some(Token::new(lock.fence)),
            cell: lock.cell.clone(),
        }
    }

    fn notify_watchers(&mut self, name: &Name) {
        if !self.watchers.is_empty() {
            self.watchers.changed(name);
        }
    }
}

impl MemoryLock {
    fn mode_in_use(&self) -> Option<Mode> {
        let held = self.holders.values().next().map(|held| held.mode);
        held.or_else(|| self.waiters.values().next().map(|waiting| waiting.claim.mode))
    }

    /// Removes the holders whose lease is over and admits the next waiters. Whether there were any.
    fn expire(&mut self, now: Moment) -> bool {
        let before = self.holders.len();
        let tally = &mut self.tally;
        self.holders.retain(|_, held| {
            let alive = held.lapses > now;
            if !alive {
                tally.remove(held.mode);
            }
            alive
        });
        let ended = self.holders.len() < before;
        if ended {
            self.admit(now);
        }
        ended
    }

    /// Removes a waiter. Whether it was there.
    fn remove_waiter(&mut self, id: ClaimId) -> bool {
        let Some(position) = self.positions.remove(&id) else { return false };
        self.waiters.remove(&position);
        // The waiter behind it may be the first now, and checks at other times.
        if let Some((_, next)) = self.waiters.range(position..).next() {
            next.wake.notify_one();
        }
        true
    }

    fn admit(&mut self, now: Moment) {
        while let Some(first) = self.waiters.first_entry() {
            if !self.tally.admits(first.get().claim.mode) {
                return;
            }
            let waiting = first.remove();
            self.positions.remove(&waiting.claim.id);
            self.grant(&waiting.claim, waiting.client, now);
            waiting.wake.notify_one();
        }
    }

    fn grant(&mut self, claim: &Claim, client: u64, now: Moment) -> Grant {
        let token = Token::next(self.fence, claim.floor.map_or_else(clock_floor, Token::get));
        self.fence = token.get();
        self.tally.add(claim.mode);
        let held = MemoryHolder {
            client,
            mode: claim.mode,
            token,
            ttl: claim.ttl,
            lapses: now + claim.ttl,
            note: claim.note.clone(),
            revoked: false,
        };
        let grant = held.as_grant();
        self.holders.insert(claim.id, held);
        grant
    }

    fn enqueue(&mut self, claim: &Claim, client: u64, now: Moment) -> QueueStatus {
        let (position, wake) = (self.next_position, Arc::new(Notify::new()));
        self.next_position += 1;
        self.positions.insert(claim.id, position);
        self.waiters
            .insert(position, MemoryWaiter { client, claim: claim.clone(), wake: wake.clone() });
        self.queued(position, now).unwrap_or(QueueStatus::Busy)
    }

    /// When a waiter checks again by itself: the first one when a lease ends, the others now and
    /// then, because the waiter before them may be granted a lease and never renew it.
    fn queued(&self, position: u64, now: Moment) -> Option<QueueStatus> {
        let waiting = self.waiters.get(&position)?;
        let first = self.waiters.first_key_value().is_some_and(|(first, _)| *first == position);
        let check_at = if first {
            self.holders.values().map(|held| held.lapses).min().unwrap_or(now)
        } else {
            let held = self.holders.values().map(|held| held.ttl);
            let before = self.waiters.range(..position).next_back();
            let before = before.map_or(waiting.claim.ttl, |(_, before)| before.claim.ttl);
            now + held.chain([before]).min().unwrap_or_default()
        };
        Some(QueueStatus::Queued { wake: waiting.wake.clone(), check_at })
    }
}

impl MemoryHolder {
    /// Valid until shortly before it lapses: the home and its clients share one clock.
    fn as_grant(&self) -> Grant {
        let valid_until = self.lapses.saturating_sub(drift(self.ttl));
        Grant { token: self.token, valid_until, key: Vec::new() }
    }

    fn describe(&self, id: ClaimId, now: Moment) -> Holder {
        Holder {
            claim: Some(id),
            token: Some(self.token),
            mode: self.mode,
            note: self.note.clone(),
            left: self.lapses.saturating_duration_since(now),
            revoked: self.revoked,
        }
    }
}
