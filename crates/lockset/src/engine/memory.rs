//! The reference semantics: locks inside one process, in plain Rust.
//!
//! It needs no server, it runs on any [`Clock`], virtual ones included, and it is what the
//! conformance laws were first written against. Use it for tests of your own code, and for work
//! that must be exclusive inside one process only.
//!
//! Leases are real here too: a claim whose keeper does not renew it is succeeded when it lapses.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use futures_core::stream::BoxStream;
use tokio::sync::{Notify, mpsc};

use super::common::admission::{Tally, check_permits, clash};
use super::common::tombstones::Tombstones;
use super::common::watch::{told_once, watch_states};
use super::{
    Amend, Break, Capabilities, Cell, Claim, ClaimId, Engine, Event, Grant, Holder, LockState,
    Mode, Scope, Swap, Version, Wait, Waiter, drift,
};
use crate::clock::{Clock, Moment, wall_micros};
use crate::error::{Error, LossReason, Result};
use crate::hash::FastMap;
use crate::name::{Name, Note, Prefix};
use crate::sync;
use crate::token::Token;

/// Free names are swept out when there are more than this, and twice as many as at the last sweep.
const SWEEP_AT: usize = 1024;

/// One client of a home that lives in this process.
pub struct Memory {
    home: Arc<Mutex<Home>>,
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

    /// The home of this process that goes by `label`; all who ask for the same label share it.
    pub(crate) fn shared(label: &str) -> Self {
        static HOMES: Mutex<BTreeMap<String, Arc<Mutex<Home>>>> = Mutex::new(BTreeMap::new());
        let home = sync::lock(&HOMES).entry(label.to_owned()).or_default().clone();
        Self::client_of(home, Clock::boot(), format!("memory:{label}").into())
    }

    fn client_of(home: Arc<Mutex<Home>>, clock: Clock, label: Arc<str>) -> Self {
        let (tell, events) = mpsc::unbounded_channel();
        let client = sync::lock(&home).join(tell);
        Self { home, clock, client, label, events: Mutex::new(Some(events)) }
    }

    fn home(&self) -> MutexGuard<'_, Home> {
        sync::lock(&self.home)
    }

    async fn wait(
        &self,
        claim: &Claim,
        deadline: Moment,
        wake: Arc<Notify>,
        mut look_again: Moment,
    ) -> Result<Option<Grant>> {
        loop {
            tokio::select! {
                () = wake.notified() => {}
                () = self.clock.sleep_until(look_again.min(deadline)) => {}
            }
            let now = self.clock.now();
            let mut home = self.home();
            match home.look(claim, now)? {
                Entered::Granted(grant) => return Ok(Some(grant)),
                Entered::Queued { .. } | Entered::Busy if now >= deadline => {
                    home.remove(&claim.name, claim.id, now);
                    return Ok(None);
                }
                Entered::Queued { look_again: next, .. } => look_again = next,
                Entered::Busy => return Ok(None),
            }
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.home().clients.remove(&self.client);
    }
}

/// The clock that keeps tokens growing over lost state. State is lost only with the process here,
/// so it is enough to read it once per process.
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

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        let now = self.clock.now();
        let entered = self.home().enter(claim, self.client, wait != Wait::No, now)?;
        match entered {
            Entered::Granted(grant) => Ok(Some(grant)),
            Entered::Busy => Ok(None),
            // Boxed, because only few come here and all would have to make room for it.
            Entered::Queued { wake, look_again } => {
                Box::pin(self.wait(claim, wait.deadline(), wake, look_again)).await
            }
        }
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        let now = self.clock.now();
        let mut home = self.home();
        batch.iter().map(|(claim, grant)| home.renew(claim, grant, self.client, now)).collect()
    }

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
        home.touched(&claim.name);
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
            // Whatever bore the id is gone; "not held" is only the answer.
            return Err(Error::NotHeld { name: claim.name.clone() });
        }
        // The release stands whatever becomes of `next`, which finds out by its own request.
        match next.map(|next| home.enter(next, self.client, true, now)) {
            Some(Ok(Entered::Granted(grant))) => Ok(Some(grant)),
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

    fn watch(&self, scope: &Scope) -> BoxStream<'static, Result<LockState>> {
        let (tell, changes) = mpsc::unbounded_channel();
        let mut home = self.home();
        home.watchers.retain(|(_, tell)| !tell.is_closed());
        home.watchers.push((scope.clone(), tell));
        let first = match scope {
            Scope::Name(name) => vec![name.clone()],
            Scope::Prefix(prefix) => home.names(prefix),
        };
        let (home, clock) = (self.home.clone(), self.clock.clone());
        watch_states(self.clock.clone(), first, changes, move |name| {
            let state = sync::lock(&home).state(name, clock.now());
            std::future::ready(Ok(state))
        })
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
        home.touched(name);
        Ok(Swap::Done(version))
    }

    async fn force_release(&self, name: &Name, how: Break) -> Result<Vec<Holder>> {
        Ok(self.home().force_release(name, how, self.clock.now()))
    }

    fn events(&self) -> BoxStream<'static, Event> {
        told_once(sync::lock(&self.events).take())
    }
}

/// All locks of one home.
#[derive(Debug, Default)]
struct Home {
    locks: FastMap<Name, Lock>,
    /// The greatest fence among the names that were swept out; new ones begin with it.
    base: u64,
    swept_to: usize,
    withdrawn: Tombstones,
    versions: u64,
    clients: HashMap<u64, mpsc::UnboundedSender<Event>>,
    joined: u64,
    watchers: Vec<(Scope, mpsc::UnboundedSender<Name>)>,
}

/// One name. The holders always came before the waiters, because admission is in strict order.
#[derive(Debug, Default)]
struct Lock {
    fence: u64,
    tally: Tally,
    holders: FastMap<ClaimId, Held>,
    waiters: BTreeMap<u64, Waiting>,
    places: FastMap<ClaimId, u64>,
    next_place: u64,
    cell: Option<Cell>,
}

#[derive(Debug)]
struct Held {
    client: u64,
    mode: Mode,
    token: Token,
    ttl: Duration,
    lapses: Moment,
    note: Note,
    revoked: bool,
}

#[derive(Debug)]
struct Waiting {
    client: u64,
    claim: Claim,
    wake: Arc<Notify>,
}

enum Entered {
    Granted(Grant),
    Queued { wake: Arc<Notify>, look_again: Moment },
    Busy,
}

impl Home {
    fn join(&mut self, tell: mpsc::UnboundedSender<Event>) -> u64 {
        self.joined += 1;
        self.clients.insert(self.joined, tell);
        self.joined
    }

    fn lock_of(&mut self, name: &Name) -> &mut Lock {
        if self.locks.len() >= SWEEP_AT.max(2 * self.swept_to) {
            self.sweep();
        }
        let fence = self.base;
        self.locks.entry(name.clone()).or_insert_with(|| Lock { fence, ..Lock::default() })
    }

    /// Forgets free names when they have become many. What they had given out lives on in `base`.
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
    fn enter(&mut self, claim: &Claim, client: u64, queue: bool, now: Moment) -> Result<Entered> {
        check_permits(claim)?;
        if self.withdrawn.contains(claim.id) {
            return Err(Error::NotHeld { name: claim.name.clone() });
        }
        let lock = self.lock_of(&claim.name);
        let ended = lock.expire(now);
        if lock.holders.contains_key(&claim.id) || lock.places.contains_key(&claim.id) {
            return self.look(claim, now);
        }
        let clash = lock.mode_in_use().and_then(|used| clash(used, claim.mode));
        let entered = if let Some(why) = clash {
            Err(Error::Conflict { name: claim.name.clone(), why })
        } else if lock.waiters.is_empty() && lock.tally.admits(claim.mode) {
            Ok(Entered::Granted(lock.grant(claim, client, now)))
        } else if queue {
            Ok(lock.enqueue(claim, client, now))
        } else {
            Ok(Entered::Busy)
        };
        if ended || !matches!(entered, Ok(Entered::Busy) | Err(_)) {
            self.touched(&claim.name);
        }
        entered
    }

    /// How a claim that entered before is doing.
    fn look(&mut self, claim: &Claim, now: Moment) -> Result<Entered> {
        let gone = || Error::NotHeld { name: claim.name.clone() };
        self.expire(&claim.name, now);
        let lock = self.locks.get_mut(&claim.name).ok_or_else(gone)?;
        if let Some(held) = lock.holders.get(&claim.id) {
            return Ok(Entered::Granted(held.as_grant()));
        }
        let place = *lock.places.get(&claim.id).ok_or_else(gone)?;
        lock.queued(place, now).ok_or_else(gone)
    }

    /// Ends the leases of `name` that are over, admits who is next, and says so.
    fn expire(&mut self, name: &Name, now: Moment) {
        if self.locks.get_mut(name).is_some_and(|lock| lock.expire(now)) {
            self.touched(name);
        }
    }

    /// The lock that `claim` holds by `grant`.
    fn held(&mut self, claim: &Claim, grant: &Grant, now: Moment) -> Result<&mut Lock> {
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
            return Ok(lock.holders.get(&successor.id).map_or(grant.clone(), Held::as_grant));
        }
        let lock = self.held(claim, grant, now)?;
        let Some(held) = lock.holders.remove(&claim.id) else { return Ok(grant.clone()) };
        let held = Held { client, note: successor.note.clone(), ..held };
        let grant = held.as_grant();
        lock.holders.insert(successor.id, held);
        self.withdrawn.insert(claim.id, now);
        self.touched(&claim.name);
        Ok(grant)
    }

    fn renew(&mut self, claim: &Claim, grant: &Grant, client: u64, now: Moment) -> Result<Grant> {
        let lock = self.held(claim, grant, now)?;
        let Some(held) = lock.holders.get_mut(&claim.id) else { return Ok(grant.clone()) };
        if held.revoked {
            return Err(Error::lost(&claim.name, LossReason::Revoked));
        }
        // Whoever renews is told of losses: a ticket may have come from another client.
        held.client = client;
        held.ttl = claim.ttl;
        held.lapses = now + claim.ttl;
        Ok(held.as_grant())
    }

    /// Takes a claim out, wherever it is, and admits who is next. Answers the token it held by.
    fn remove(&mut self, name: &Name, id: ClaimId, now: Moment) -> Option<Token> {
        let lock = self.locks.get_mut(name)?;
        let ended = lock.expire(now);
        let token = lock.holders.remove(&id).map(|held| {
            lock.tally.remove(held.mode);
            held.token
        });
        let left = token.is_none() && lock.leave(id);
        if token.is_some() || left {
            lock.admit(now);
        }
        if ended || token.is_some() || left {
            self.touched(name);
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
            let reason = match how {
                Break::WhenLeaseEnds => LossReason::Revoked,
                Break::Now => LossReason::Broken,
            };
            if let Some(client) = self.clients.get(&held.client) {
                // A client that is gone needs no telling.
                let _ = client.send(Event::Lost(*id, reason));
            }
        }
        if how == Break::Now {
            lock.holders.clear();
            lock.tally = Tally::default();
            lock.admit(now);
        }
        self.touched(name);
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

    fn touched(&mut self, name: &Name) {
        if !self.watchers.is_empty() {
            self.watchers.retain(|(scope, tell)| match scope.covers(name) {
                true => tell.send(name.clone()).is_ok(),
                false => !tell.is_closed(),
            });
        }
    }
}

impl Lock {
    fn mode_in_use(&self) -> Option<Mode> {
        let held = self.holders.values().next().map(|held| held.mode);
        held.or_else(|| self.waiters.values().next().map(|waiting| waiting.claim.mode))
    }

    /// Drops the holders whose lease is over, and admits who is next; whether there were any.
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

    /// Takes a waiter out; whether it was there.
    fn leave(&mut self, id: ClaimId) -> bool {
        let Some(place) = self.places.remove(&id) else { return false };
        self.waiters.remove(&place);
        // Who was behind it may be the first now, and looks at other times.
        if let Some((_, next)) = self.waiters.range(place..).next() {
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
            self.places.remove(&waiting.claim.id);
            self.grant(&waiting.claim, waiting.client, now);
            waiting.wake.notify_one();
        }
    }

    fn grant(&mut self, claim: &Claim, client: u64, now: Moment) -> Grant {
        let token = Token::next(self.fence, claim.floor.map_or_else(clock_floor, Token::get));
        self.fence = token.get();
        self.tally.add(claim.mode);
        let held = Held {
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

    fn enqueue(&mut self, claim: &Claim, client: u64, now: Moment) -> Entered {
        let (place, wake) = (self.next_place, Arc::new(Notify::new()));
        self.next_place += 1;
        self.places.insert(claim.id, place);
        self.waiters.insert(place, Waiting { client, claim: claim.clone(), wake: wake.clone() });
        self.queued(place, now).unwrap_or(Entered::Busy)
    }

    /// When a waiter looks again unasked: the first one when a lease ends, the others now and
    /// then, because the one before them may be granted a lease and vanish without a word.
    fn queued(&self, place: u64, now: Moment) -> Option<Entered> {
        let waiting = self.waiters.get(&place)?;
        let first = self.waiters.first_key_value().is_some_and(|(first, _)| *first == place);
        let look_again = if first {
            self.holders.values().map(|held| held.lapses).min().unwrap_or(now)
        } else {
            let held = self.holders.values().map(|held| held.ttl);
            let before = self.waiters.range(..place).next_back();
            let before = before.map_or(waiting.claim.ttl, |(_, before)| before.claim.ttl);
            now + held.chain([before]).min().unwrap_or_default()
        };
        Some(Entered::Queued { wake: waiting.wake.clone(), look_again })
    }
}

impl Held {
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
