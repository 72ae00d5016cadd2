//! What the verbs do to the rows of a name, inside one transaction.
//!
//! Every verb first *settles* the name: lapsed holders go, and waiters are admitted in order until
//! one is refused. That reads the holders and the first waiters only, however many wait.

use std::collections::HashMap;
use std::time::Duration;

use rusqlite::types::Type;
use rusqlite::{OptionalExtension, Row, params};

use super::SAFETY_NET;
use super::inbox::Letter;
use super::store::{Post, Sql, Transaction};
use crate::clock::{Moment, wall_micros};
use crate::engine::queue::{Tally, clash};
use crate::engine::{
    Amend, Break, Cell, Claim, ClaimId, Grant, Holder, LockState, Mode, Scope, Swap, Version,
    Waiter, drift,
};
use crate::error::{Error, LossReason, Result};
use crate::name::{Name, Note};
use crate::token::Token;

/// A name whose last token is so old, and that nobody uses, is forgotten: the wall clock, which
/// every new token is not below, has long passed it.
const IDLE_MICROS: u64 = 7 * 86_400 * 1_000_000;
/// Smaller tokens come from a caller who answers for the clock; such a fence is kept for ever.
const CLOCK_TOKENS_FROM: u64 = 1_000_000_000_000_000;
/// One in so many new names looks at so many old ones; on average two for each.
const SWEEP_ONE_IN: u32 = 64;
const SWEEP_NAMES: i64 = 128;

/// Whoever waits for so long without having shown up has gone, if it is not seen to live.
const UNSEEN: Duration = Duration::from_secs(60);
/// A client that waits shows up so often at least.
const SHOW_UP: Duration = Duration::from_secs(20);
/// The sweep also takes waiters that have not shown up for so long.
const UNSEEN_FOR_LONG: Duration = Duration::from_secs(86_400);

/// The columns that [`ClaimRow::read`] reads, of the rows chosen by the rest of the statement.
macro_rules! select_claims {
    ($which:literal) => {
        concat!(
            "SELECT seq, token, id, mode, ttl, floor, expires, detached, process, inbox, seen, ",
            "EXISTS (SELECT 1 FROM watcher) FROM lock ",
            $which
        )
    };
}

/// The columns that `add_to_state` reads, likewise.
macro_rules! select_states {
    ($which:literal) => {
        concat!(
            "SELECT name, seq, token, id, mode, expires, revoked, by, note, process, detached, ",
            "version, value, ttl, seen FROM lock ",
            $which
        )
    };
}

/// How a claim stands after a request.
pub(super) enum Standing {
    Granted(Grant),
    Waiting {
        seq: i64,
        /// Whose deaths are worth another look.
        watch: Vec<String>,
        /// When to look again unasked.
        look_again: Moment,
    },
    Busy,
}

impl Transaction<'_> {
    /// A claim's first request, or a repetition of it.
    pub(super) fn enter(&mut self, claim: &Claim, may_queue: bool) -> Sql<Result<Standing>> {
        if self.withdrawn.contains(claim.id) {
            return Ok(Err(not_held(claim)));
        }
        if !Tally::default().admits(claim.mode) {
            // It would wait for ever, and all who come after it too.
            let why = "nobody could ever be given so many";
            return Ok(Err(Error::invalid("number of permits", &claim.mode.to_string(), why)));
        }
        loop {
            let queue = self.settle(&claim.name)?;
            if let Some(held) = queue.holders.iter().find(|held| held.id == claim.id) {
                return Ok(Ok(Standing::Granted(self.grant_of(held))));
            }
            if queue.refused.is_some()
                && let Some((seq, _)) = self.find(claim)?
            {
                return self.look(claim, seq);
            }
            let conflict = queue.mode_in_use().and_then(|used| clash(used, claim.mode));
            if conflict.is_none() && queue.refused.is_none() && queue.tally.admits(claim.mode) {
                return self.insert_holder(claim, &queue).map(Standing::Granted).map(Ok);
            }
            // Whoever is in the way may be dead.
            if self.bury_the_dead(&claim.name, &queue)? {
                continue;
            }
            return match conflict {
                Some(why) => Ok(Err(Error::Conflict { name: claim.name.clone(), why })),
                None if may_queue => {
                    let seq = self.insert_waiter(claim)?;
                    self.look(claim, seq)
                }
                None => self.tell_watchers(&claim.name).map(|()| Ok(Standing::Busy)),
            };
        }
    }

    /// How a claim that waits at `seq` is doing.
    pub(super) fn look(&mut self, claim: &Claim, seq: i64) -> Sql<Result<Standing>> {
        loop {
            let queue = self.settle(&claim.name)?;
            if let Some(held) = queue.holders.iter().find(|held| held.id == claim.id) {
                let grant = self.grant_of(held);
                self.tell_watchers(&claim.name)?;
                return Ok(Ok(Standing::Granted(grant)));
            }
            let Some(Place { before, seen }) = self.place_of(claim, seq, &queue)? else {
                return Ok(Err(not_held(claim)));
            };
            self.show_up(&claim.name, seen)?;
            let buried = match &before {
                None => self.bury_the_dead(&claim.name, &queue)?,
                Some(before) => self.bury_if_dead(&claim.name, before)?,
            };
            if !buried {
                self.tell_watchers(&claim.name)?;
                return Ok(Ok(self.waiting(seq, queue, before)));
            }
        }
    }

    /// The same without changing anything; `None` if there is something to change.
    pub(super) fn peek(&self, claim: &Claim, seq: i64) -> Sql<Option<Standing>> {
        // Mostly it was granted.
        if let Some(held) = self.holding(claim, seq)? {
            return Ok(Some(Standing::Granted(self.grant_of(&held))));
        }
        let (queue, lapsed) = self.front(&claim.name)?;
        let unsettled = !lapsed.is_empty() || queue.has_newly_admitted();
        let Some(Place { before, seen }) = self.place_of(claim, seq, &queue)? else {
            return Ok(None);
        };
        let in_the_way = match &before {
            None => queue.holders.iter().any(|held| self.is_gone(held)),
            Some(before) => self.is_gone(before),
        };
        if unsettled || in_the_way || self.must_show_up(seen) {
            return Ok(None);
        }
        Ok(Some(self.waiting(seq, queue, before)))
    }

    /// The first waiter looks again when a lease ends. The others leave that to it; they look now
    /// and then, because it may be stopped.
    fn waiting(&self, seq: i64, queue: Queue, before: Option<ClaimRow>) -> Standing {
        let (watch, look_again) = match before {
            Some(before) => (vec![before.process], u64::MAX),
            None => {
                let ends = queue.holders.iter().filter_map(|held| held.expires).min();
                let watch = queue.holders.into_iter().filter(|held| !held.detached);
                (watch.map(|held| held.process).collect(), ends.unwrap_or(self.now))
            }
        };
        Standing::Waiting { seq, watch, look_again: self.store.moment(look_again) }
    }

    /// Leaves the queue, unless the claim was granted in the meantime.
    pub(super) fn leave(&mut self, claim: &Claim, seq: i64) -> Sql<Option<Grant>> {
        match self.look(claim, seq)? {
            Ok(Standing::Granted(grant)) => Ok(Some(grant)),
            _ => self.remove(claim).map(|()| None),
        }
    }

    pub(super) fn renew(&mut self, claim: &Claim, grant: &Grant) -> Sql<Result<Grant>> {
        let expires = self.now.saturating_add(nanos(claim.ttl));
        let seq = seq_of(grant);
        let renewed = self
            .db
            .prepare_cached(
                "UPDATE lock SET expires = ?1, ttl = ?2, inbox = ?3 WHERE name = ?4 AND seq = ?5
                 AND id = ?6 AND token = ?7 AND expires > ?8 AND expires - ttl <= ?8
                 AND revoked = 0",
            )?
            .execute(params![
                int(expires),
                int(nanos(claim.ttl)),
                self.store.inbox.name(),
                claim.name.as_str(),
                seq,
                claim.id.to_bits().to_be_bytes(),
                int(grant.token.get()),
                int(self.now),
            ])?;
        if renewed == 1 {
            return Ok(Ok(self.grant(seq, grant.token, expires, claim.ttl)));
        }
        let reason = match self.held(claim, grant)? {
            Some(_) => LossReason::Revoked,
            None => LossReason::Forgotten,
        };
        Ok(Err(Error::lost(&claim.name, reason)))
    }

    pub(super) fn raise(&mut self, claim: &Claim, grant: &Grant, to: Token) -> Sql<Result<Grant>> {
        let queue = self.settle(&claim.name)?;
        let fence = queue.fence.unwrap_or(0);
        let held = queue.holders.iter().find(|held| is_held_by(held, claim, grant));
        let may_be_raised = claim.mode == Mode::Exclusive && fence <= to.get();
        let Some(held) = held.filter(|_| may_be_raised) else {
            return Ok(Err(Error::lost(&claim.name, LossReason::Forgotten)));
        };
        self.db
            .prepare_cached("UPDATE lock SET token = ?1 WHERE name = ?2 AND seq IN (0, ?3)")?
            .execute(params![int(to.get()), claim.name.as_str(), held.seq])?;
        Ok(Ok(Grant { token: to, ..grant.clone() }))
    }

    pub(super) fn amend(&mut self, claim: &Claim, grant: &Grant, to: &Amend) -> Sql<Result<Grant>> {
        let Some(held) = self.held(claim, grant)? else {
            return Ok(Err(Error::lost(&claim.name, LossReason::Forgotten)));
        };
        match to {
            Amend::Note(note) => self
                .db
                .prepare_cached("UPDATE lock SET by = ?3, note = ?4 WHERE name = ?1 AND seq = ?2")?
                .execute(params![claim.name.as_str(), held.seq, &*note.by, &*note.text])?,
            Amend::Downgrade => self
                .db
                .prepare_cached("UPDATE lock SET mode = 'shared' WHERE name = ?1 AND seq = ?2")?
                .execute(params![claim.name.as_str(), held.seq])?,
        };
        self.changed = true;
        self.settle(&claim.name)?;
        self.tell_watchers(&claim.name)?;
        Ok(Ok(grant.clone()))
    }

    pub(super) fn release(
        &mut self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Sql<Result<Option<Grant>>> {
        let released = self
            .db
            .prepare_cached(
                "DELETE FROM lock WHERE name = ?1 AND seq = ?2 AND id = ?3 AND token = ?4
                 AND expires > ?5 AND expires - ttl <= ?5",
            )?
            .execute(params![
                claim.name.as_str(),
                seq_of(grant),
                claim.id.to_bits().to_be_bytes(),
                int(grant.token.get()),
                int(self.now),
            ])?;
        if released == 0 {
            // Whatever bears the id goes; "not held" is only the answer.
            self.remove(claim)?;
            return Ok(Err(not_held(claim)));
        }
        self.changed = true;
        // The release stands whatever becomes of `next`, which finds out by its own request.
        match next.map(|next| self.enter(next, true)).transpose()? {
            Some(Ok(Standing::Granted(grant))) => Ok(Ok(Some(grant))),
            Some(Ok(Standing::Waiting { .. } | Standing::Busy)) => Ok(Ok(None)),
            Some(Err(_)) | None => {
                self.settle(&claim.name)?;
                self.tell_watchers(&claim.name)?;
                Ok(Ok(None))
            }
        }
    }

    /// Removes whatever bears the claim's id, and admits who is next.
    pub(super) fn remove(&mut self, claim: &Claim) -> Sql<()> {
        if let Some((seq, held)) = self.find(claim)? {
            self.delete(&claim.name, seq)?;
            self.settle(&claim.name)?;
            if !held {
                self.wake_waiter_after(&claim.name, seq)?;
            }
        }
        self.tell_watchers(&claim.name)
    }

    pub(super) fn force_release(&mut self, name: &Name, how: Break) -> Sql<Vec<Holder>> {
        let queue = self.settle(name)?;
        let reason = match how {
            Break::WhenLeaseEnds => LossReason::Revoked,
            Break::Now => LossReason::Broken,
        };
        self.db
            .prepare_cached("UPDATE lock SET revoked = 1 WHERE name = ?1 AND expires IS NOT NULL")?
            .execute([name.as_str()])?;
        let broken = self.state(name)?.holders;
        for held in queue.holders {
            self.post.push((held.inbox, Post::Letter(Letter::Lost(held.id, reason))));
            if how == Break::Now {
                self.delete(name, held.seq)?;
            }
        }
        self.changed = true;
        self.settle(name)?;
        self.tell_watchers(name)?;
        Ok(broken)
    }

    pub(super) fn cell(&mut self, name: &Name, expect: Version, value: Option<&[u8]>) -> Sql<Swap> {
        let own: Option<(u64, Option<Vec<u8>>)> = self
            .db
            .prepare_cached("SELECT version, value FROM lock WHERE name = ?1 AND seq = 0")?
            .query_row([name.as_str()], |row| Ok((unsigned(row, 0)?, row.get(1)?)))
            .optional()?;
        let (last, found) = own.unwrap_or_default();
        let found = found.map(|value| Cell { version: Version(last), value }).unwrap_or_default();
        if found.version != expect {
            return Ok(Swap::Found(found));
        }
        let version =
            if value.is_some() { last.saturating_add(1).max(wall_micros()) } else { last };
        self.db
            .prepare_cached(
                "INSERT INTO lock (name, seq, version, value) VALUES (?1, 0, ?2, ?3)
                 ON CONFLICT DO UPDATE SET version = excluded.version, value = excluded.value",
            )?
            .execute(params![name.as_str(), int(version), value])?;
        self.changed = true;
        self.tell_watchers(name)?;
        Ok(Swap::Done(if value.is_some() { Version(version) } else { Version::ABSENT }))
    }

    pub(super) fn add_watcher(&mut self, id: i64, scope: &Scope) -> Sql<()> {
        if !self.watches.is_wanted(id) {
            return Ok(());
        }
        let (exact, text) = match scope {
            Scope::Name(name) => (true, name.as_str()),
            Scope::Prefix(prefix) => (false, prefix.as_str()),
        };
        self.db
            .prepare_cached(
                "INSERT INTO watcher (id, inbox, exact, scope) VALUES (?1, ?2, ?3, ?4)",
            )?
            .execute(params![id, self.store.inbox.name(), exact, text])
            .map(|_| ())
    }

    pub(super) fn remove_watcher(&self, id: i64) -> Sql<()> {
        let sql = "DELETE FROM watcher WHERE id = ?1 AND inbox = ?2";
        self.db.prepare_cached(sql)?.execute(params![id, self.store.inbox.name()]).map(|_| ())
    }

    pub(super) fn forget_watchers(&self, inbox: &str) -> Sql<()> {
        let sql = "DELETE FROM watcher WHERE inbox = ?1";
        self.db.prepare_cached(sql)?.execute([inbox]).map(|_| ())
    }

    pub(super) fn state(&self, name: &Name) -> Sql<LockState> {
        let sql = select_states!("WHERE name = ?1 ORDER BY seq");
        let states = self.states(sql, name.as_str(), |found| found == name.as_str())?;
        Ok(states.into_iter().next().unwrap_or_else(|| LockState::free(name.clone())))
    }

    /// The states of all names that begin with `prefix`, in order.
    pub(super) fn states_below(&self, prefix: &str) -> Sql<Vec<LockState>> {
        let sql = select_states!("WHERE name >= ?1 ORDER BY name, seq");
        self.states(sql, prefix, |found| found.starts_with(prefix))
    }

    fn states(&self, sql: &str, from: &str, wanted: impl Fn(&str) -> bool) -> Sql<Vec<LockState>> {
        let mut statement = self.db.prepare_cached(sql)?;
        let mut rows = statement.query([from])?;
        let (mut states, mut dead) = (Vec::<LockState>::new(), HashMap::new());
        while let Some(row) = rows.next()? {
            let name = row.get_ref(0)?.as_str()?;
            if !wanted(name) {
                break;
            }
            if states.last().is_none_or(|last| last.name.as_str() != name) {
                let name = name.parse().map_err(|error| unreadable(0, Type::Text, error))?;
                states.push(LockState::free(name));
            }
            if let Some(state) = states.last_mut() {
                self.add_to_state(state, row, &mut dead)?;
            }
        }
        for state in &mut states {
            state.holders.sort_by_key(|holder| holder.token);
        }
        Ok(states)
    }

    /// Adds what one row says. Claims that lapsed or whose processes died are in nobody's way, so
    /// they are not shown, although they are only removed when somebody comes.
    fn add_to_state(
        &self,
        state: &mut LockState,
        row: &Row<'_>,
        dead: &mut HashMap<String, bool>,
    ) -> Sql<()> {
        let token = unsigned(row, 2)?;
        let mut is_dead = |process: String| {
            *dead.entry(process).or_insert_with_key(|text| self.store.processes.is_dead(text))
        };
        if row.get::<_, i64>(1)? == 0 {
            state.fence = (token > 0).then_some(Token::new(token));
            let value: Option<Vec<u8>> = row.get(12)?;
            let version = Version(unsigned(row, 11)?);
            state.cell = value.map(|value| Cell { version, value });
            return Ok(());
        }
        let (claim, mode) = (id_at(row, 3)?, mode_at(row, 4)?);
        let note = Note { by: row.get(7)?, text: row.get(8)? };
        let process: String = row.get(9)?;
        let (expires, detached) = (optional(row, 5)?, row.get::<_, bool>(10)?);
        let Some(expires) = expires else {
            if !self.is_unseen(optional(row, 14)?, &process) && !is_dead(process) {
                state.waiters.push(Waiter { claim, mode, note });
            }
            return Ok(());
        };
        if self.lasts(expires, unsigned(row, 13)?) && (detached || !is_dead(process)) {
            state.holders.push(Holder {
                claim: Some(claim),
                token: Some(Token::new(token)),
                mode,
                note,
                left: Duration::from_nanos(expires - self.now),
                revoked: row.get(6)?,
            });
        }
        Ok(())
    }
}

/// A name after it was settled.
struct Queue {
    /// `None`: the name has no row of its own yet.
    fence: Option<u64>,
    /// There may be watchers.
    watched: bool,
    tally: Tally,
    holders: Vec<ClaimRow>,
    /// The first waiter, which is not admitted.
    refused: Option<ClaimRow>,
}

impl Queue {
    fn mode_in_use(&self) -> Option<Mode> {
        self.holders.first().or(self.refused.as_ref()).map(|claim| claim.mode)
    }

    /// Whether some of the holders waited until now.
    fn has_newly_admitted(&self) -> bool {
        self.holders.last().is_some_and(|last| last.expires.is_none())
    }

    fn last_seq(&self) -> i64 {
        self.refused.as_ref().or(self.holders.last()).map_or(0, |claim| claim.seq)
    }
}

/// Where somebody waits.
struct Place {
    /// The waiter before; `None`: there are only holders before.
    before: Option<ClaimRow>,
    /// When it showed up last.
    seen: Option<u64>,
}

/// One claim, as far as it matters to others.
struct ClaimRow {
    seq: i64,
    token: u64,
    id: ClaimId,
    mode: Mode,
    ttl: u64,
    floor: Option<u64>,
    expires: Option<u64>,
    detached: bool,
    process: String,
    inbox: String,
    seen: Option<u64>,
}

impl ClaimRow {
    fn read(row: &Row<'_>) -> Sql<Self> {
        Ok(Self {
            seq: row.get(0)?,
            token: unsigned(row, 1)?,
            id: id_at(row, 2)?,
            mode: mode_at(row, 3)?,
            ttl: unsigned(row, 4)?,
            floor: optional(row, 5)?,
            expires: optional(row, 6)?,
            detached: row.get(7)?,
            process: row.get(8)?,
            inbox: row.get(9)?,
            seen: optional(row, 10)?,
        })
    }
}

/// The steps the verbs share.
impl Transaction<'_> {
    /// Drops the holders whose lease is over and the first waiters that have gone, and admits, in
    /// order, who fits behind the rest.
    fn settle(&mut self, name: &Name) -> Sql<Queue> {
        let (mut queue, lapsed) = self.front(name)?;
        for claim in lapsed {
            self.delete(name, claim.seq)?;
            if claim.expires.is_none() {
                self.wake_waiter_after(name, claim.seq)?;
            }
        }
        if queue.has_newly_admitted() {
            self.admit(name, &mut queue)?;
        }
        self.watched = queue.watched;
        Ok(queue)
    }

    /// How a name is once it is settled, and whom that takes away.
    fn front(&self, name: &Name) -> Sql<(Queue, Vec<ClaimRow>)> {
        let (mut fence, mut watched, mut tally) = (None, true, Tally::default());
        let (mut holders, mut refused, mut lapsed) = (Vec::<ClaimRow>::new(), None, Vec::new());
        let mut statement =
            self.db.prepare_cached(select_claims!("WHERE name = ?1 ORDER BY seq"))?;
        let mut rows = statement.query([name.as_str()])?;
        while let Some(row) = rows.next()? {
            if row.get::<_, i64>(0)? == 0 {
                fence = Some(unsigned(row, 1)?);
                watched = row.get(11)?;
                continue;
            }
            let claim = ClaimRow::read(row)?;
            match claim.expires {
                Some(expires) if !self.lasts(expires, claim.ttl) => {
                    lapsed.push(claim);
                    continue;
                }
                None if self.is_unseen(claim.seen, &claim.process) => {
                    lapsed.push(claim);
                    continue;
                }
                None if !tally.admits(claim.mode) => {
                    refused = Some(claim);
                    break;
                }
                _ => {}
            }
            tally.add(claim.mode);
            holders.push(claim);
        }
        Ok((Queue { fence, watched, tally, holders, refused }, lapsed))
    }

    /// Whether a lease still runs. One that ends later than a whole ttl from now was written before
    /// the machine booted, when its clock had come further.
    fn lasts(&self, expires: u64, ttl: u64) -> bool {
        self.now < expires && expires <= self.now.saturating_add(ttl)
    }

    /// Whether one that waits has gone, as far as that can be known without seeing its process.
    fn is_unseen(&self, seen: Option<u64>, process: &str) -> bool {
        match seen.unwrap_or(0) {
            // That was before the machine booted.
            seen if seen > self.now => true,
            seen => self.now - seen > nanos(UNSEEN) && !self.store.processes.is_alive(process),
        }
    }

    fn must_show_up(&self, seen: Option<u64>) -> bool {
        self.now.saturating_sub(seen.unwrap_or(0)) >= nanos(SHOW_UP)
    }

    /// A client shows up with all its waiters for the name at a time, because it lives or dies with
    /// them; so they write once in a while, however many they are.
    fn show_up(&mut self, name: &Name, seen: Option<u64>) -> Sql<()> {
        if !self.must_show_up(seen) {
            return Ok(());
        }
        self.db
            .prepare_cached(
                "UPDATE lock SET seen = ?1 WHERE name = ?2 AND seq > 0 AND expires IS NULL
                 AND inbox = ?3",
            )?
            .execute(params![int(self.now), name.as_str(), self.store.inbox.name()])
            .map(|_| ())
    }

    /// Grants the lock to those among `holders` that were waiting until now, and tells them.
    fn admit(&mut self, name: &Name, queue: &mut Queue) -> Sql<()> {
        let mut fence = queue.fence.unwrap_or(0);
        for held in queue.holders.iter_mut().filter(|held| held.expires.is_none()) {
            let expires = self.now.saturating_add(held.ttl);
            fence = next_token(fence, held.floor).get();
            (held.token, held.expires) = (fence, Some(expires));
            self.db
                .prepare_cached(
                    "UPDATE lock SET token = ?1, expires = ?2 WHERE name = ?3 AND seq = ?4",
                )?
                .execute(params![int(fence), int(expires), name.as_str(), held.seq])?;
            self.post.push((held.inbox.clone(), Post::Letter(Letter::Look(held.id))));
        }
        // The next in line saw only the one before it; now all holders are its business. Of one
        // alone it learns soon enough by itself, unless that one's lease is too short for it.
        let short = queue.holders.iter().any(|held| held.ttl < nanos(SAFETY_NET));
        if let Some(first) = queue.refused.as_ref().filter(|_| short || queue.holders.len() > 1) {
            self.post.push((first.inbox.clone(), Post::Letter(Letter::Look(first.id))));
        }
        self.changed = true;
        self.set_fence(name, queue.fence, fence)?;
        queue.fence = Some(fence);
        Ok(())
    }

    fn set_fence(&mut self, name: &Name, before: Option<u64>, fence: u64) -> Sql<()> {
        let sql = match before {
            Some(_) => "UPDATE lock SET token = ?2 WHERE name = ?1 AND seq = 0",
            None => "INSERT INTO lock (name, seq, token) VALUES (?1, 0, ?2)",
        };
        self.db.prepare_cached(sql)?.execute(params![name.as_str(), int(fence)])?;
        if before.is_none() && rand::random_ratio(1, SWEEP_ONE_IN) {
            self.sweep_idle_names(wall_micros().saturating_sub(IDLE_MICROS))?;
        }
        Ok(())
    }

    /// Goes on where the last sweep, of whichever process, ended.
    fn sweep_idle_names(&mut self, older_than: u64) -> Sql<()> {
        let from: String = self.db.query_row("SELECT swept FROM home", [], |row| row.get(0))?;
        let last: Option<String> = self.db.query_row(
            "SELECT max(name) FROM (SELECT name FROM lock WHERE name > ?1 ORDER BY name LIMIT ?2)",
            params![from, SWEEP_NAMES],
            |row| row.get(0),
        )?;
        if let Some(last) = &last {
            // Claims are removed by who comes next; but nobody comes to a name that is not used any
            // more.
            self.db.execute(
                "DELETE FROM lock WHERE seq > 0 AND name > ?1 AND name <= ?2 AND CASE
                 WHEN expires IS NULL THEN seen > ?3 OR seen < ?4
                 ELSE expires <= ?3 OR expires - ttl > ?3 END",
                params![
                    from,
                    last,
                    int(self.now),
                    int(self.now.saturating_sub(nanos(UNSEEN_FOR_LONG)))
                ],
            )?;
            self.db.execute(
                "DELETE FROM lock WHERE seq = 0 AND name > ?1 AND name <= ?2 AND value IS NULL
                 AND token > ?3 AND token < ?4 AND version < ?4 AND NOT EXISTS
                 (SELECT 1 FROM lock AS claim WHERE claim.name = lock.name AND claim.seq > 0)",
                params![from, last, int(CLOCK_TOKENS_FROM), int(older_than)],
            )?;
        }
        self.db.execute("UPDATE home SET swept = ?1", [last.unwrap_or_default()]).map(|_| ())
    }

    fn insert_holder(&mut self, claim: &Claim, queue: &Queue) -> Sql<Grant> {
        let seq = queue.last_seq() + 1;
        let token = next_token(queue.fence.unwrap_or(0), claim.floor.map(Token::get));
        let expires = self.now.saturating_add(nanos(claim.ttl));
        self.set_fence(&claim.name, queue.fence, token.get())?;
        self.insert(claim, seq, token.get(), Some(expires))?;
        self.tell_watchers(&claim.name)?;
        Ok(self.grant(seq, token, expires, claim.ttl))
    }

    fn insert_waiter(&mut self, claim: &Claim) -> Sql<i64> {
        let seq = self
            .db
            .prepare_cached("SELECT max(seq) FROM lock WHERE name = ?1")?
            .query_row([claim.name.as_str()], |row| row.get::<_, Option<i64>>(0))?
            .unwrap_or(0)
            + 1;
        self.insert(claim, seq, 0, None).map(|()| seq)
    }

    fn insert(&mut self, claim: &Claim, seq: i64, token: u64, expires: Option<u64>) -> Sql<()> {
        self.changed = true;
        self.db
            .prepare_cached(
                "INSERT INTO lock (name, seq, token, id, mode, ttl, floor, expires, revoked,
                 detached, process, inbox, by, note, seen)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, 0, ?9, ?10, ?11, ?12, ?13, ?14)",
            )?
            .execute(params![
                claim.name.as_str(),
                seq,
                int(token),
                claim.id.to_bits().to_be_bytes(),
                written(claim.mode),
                int(nanos(claim.ttl)),
                claim.floor.map(|floor| int(floor.get())),
                expires.map(int),
                claim.detachable,
                self.store.processes.recorded(),
                self.store.inbox.name(),
                &*claim.note.by,
                &*claim.note.text,
                expires.is_none().then_some(int(self.now)),
            ])
            .map(|_| ())
    }

    fn delete(&mut self, name: &Name, seq: i64) -> Sql<()> {
        self.changed = true;
        self.db
            .prepare_cached("DELETE FROM lock WHERE name = ?1 AND seq = ?2")?
            .execute(params![name.as_str(), seq])
            .map(|_| ())
    }

    /// Where the claim is, and whether it holds. Reads all claims of the name; only who queues, or
    /// leaves without having held, comes here.
    fn find(&self, claim: &Claim) -> Sql<Option<(i64, bool)>> {
        self.db
            .prepare_cached(
                "SELECT seq, expires IS NOT NULL FROM lock WHERE name = ?1 AND seq > 0 AND id = ?2",
            )?
            .query_row(params![claim.name.as_str(), claim.id.to_bits().to_be_bytes()], |row| {
                Ok((row.get(0)?, row.get(1)?))
            })
            .optional()
    }

    /// The claim's row, if it holds the lock by `grant`.
    fn held(&self, claim: &Claim, grant: &Grant) -> Sql<Option<ClaimRow>> {
        let row = self.holding(claim, seq_of(grant))?;
        Ok(row.filter(|row| is_held_by(row, claim, grant)))
    }

    /// The claim's row at `seq`, if it is there and holds the lock.
    fn holding(&self, claim: &Claim, seq: i64) -> Sql<Option<ClaimRow>> {
        let row = self
            .db
            .prepare_cached(select_claims!("WHERE name = ?1 AND seq = ?2 AND seq > 0"))?
            .query_row(params![claim.name.as_str(), seq], ClaimRow::read)
            .optional()?;
        let lasts = |row: &ClaimRow| row.expires.is_some_and(|ends| self.lasts(ends, row.ttl));
        Ok(row.filter(|row| row.id == claim.id && lasts(row)))
    }

    /// Where the claim waits, if it still does.
    fn place_of(&self, claim: &Claim, seq: i64, queue: &Queue) -> Sql<Option<Place>> {
        if let Some(first) = queue.refused.as_ref().filter(|first| first.id == claim.id) {
            return Ok(Some(Place { before: None, seen: first.seen }));
        }
        let mut statement = self.db.prepare_cached(select_claims!(
            "WHERE name = ?1 AND seq > 0 AND seq <= ?2 ORDER BY seq DESC LIMIT 2"
        ))?;
        let mut rows = statement.query(params![claim.name.as_str(), seq])?;
        match rows.next()? {
            Some(row) if id_at(row, 2)? == claim.id => {
                let seen = optional(row, 10)?;
                let before = rows.next()?.map(ClaimRow::read).transpose()?;
                Ok(before.map(|before| Place { before: Some(before), seen }))
            }
            _ => Ok(None),
        }
    }

    /// Removes those whose processes died: the holders, and the first waiter.
    fn bury_the_dead(&mut self, name: &Name, queue: &Queue) -> Sql<bool> {
        let mut any = false;
        for claim in queue.holders.iter().chain(&queue.refused) {
            any |= self.bury_if_dead(name, claim)?;
        }
        Ok(any)
    }

    fn is_gone(&self, claim: &ClaimRow) -> bool {
        let dead = || self.store.processes.is_dead(&claim.process);
        match claim.expires {
            // A detached hold outlives its process; a wait does not.
            Some(_) => !claim.detached && dead(),
            None => dead() || self.is_unseen(claim.seen, &claim.process),
        }
    }

    fn bury_if_dead(&mut self, name: &Name, claim: &ClaimRow) -> Sql<bool> {
        if !self.is_gone(claim) {
            return Ok(false);
        }
        self.delete(name, claim.seq)?;
        // Its client may live: another process can stand in for it.
        let letter = match claim.expires {
            Some(_) => Letter::Lost(claim.id, LossReason::Forgotten),
            None => Letter::Look(claim.id),
        };
        self.post.push((claim.inbox.clone(), Post::Letter(letter)));
        self.post.push((claim.inbox.clone(), Post::Bury));
        if claim.expires.is_none() {
            self.wake_waiter_after(name, claim.seq)?;
        }
        Ok(true)
    }

    /// Who waited behind one that is gone has another one to watch.
    fn wake_waiter_after(&mut self, name: &Name, seq: i64) -> Sql<()> {
        let next = self
            .db
            .prepare_cached(
                "SELECT id, inbox FROM lock WHERE name = ?1 AND seq > ?2 AND expires IS NULL
                 ORDER BY seq LIMIT 1",
            )?
            .query_row(params![name.as_str(), seq], |row| Ok((id_at(row, 0)?, row.get(1)?)))
            .optional()?;
        if let Some((id, inbox)) = next {
            self.post.push((inbox, Post::Letter(Letter::Look(id))));
        }
        Ok(())
    }

    /// Writes to all who watch the name, if something changed.
    fn tell_watchers(&mut self, name: &Name) -> Sql<()> {
        if !std::mem::take(&mut self.changed) || !self.watched {
            return Ok(());
        }
        let mut statement = self.db.prepare_cached("SELECT inbox, exact, scope FROM watcher")?;
        let mut rows = statement.query([])?;
        let mut told = Vec::new();
        while let Some(row) = rows.next()? {
            let (exact, scope) = (row.get(1)?, row.get_ref(2)?.as_str()?);
            let covers =
                if exact { name.as_str() == scope } else { name.as_str().starts_with(scope) };
            let inbox: String = row.get(0)?;
            if covers && !told.contains(&inbox) {
                told.push(inbox);
            }
        }
        let letters = told.into_iter().map(|i| (i, Post::Letter(Letter::Changed(name.clone()))));
        self.post.extend(letters);
        Ok(())
    }

    fn grant_of(&self, held: &ClaimRow) -> Grant {
        let (token, ttl) = (Token::new(held.token), Duration::from_nanos(held.ttl));
        self.grant(held.seq, token, held.expires.unwrap_or(self.now), ttl)
    }

    /// Valid until shortly before it lapses: all processes of the machine share one clock.
    fn grant(&self, seq: i64, token: Token, expires: u64, ttl: Duration) -> Grant {
        let valid_until = self.store.moment(expires).before(drift(ttl));
        Grant { token, valid_until, key: seq.to_be_bytes().into() }
    }
}

fn next_token(fence: u64, floor: Option<u64>) -> Token {
    Token::next(fence, floor.unwrap_or_else(wall_micros))
}

fn is_held_by(row: &ClaimRow, claim: &Claim, grant: &Grant) -> bool {
    row.id == claim.id && row.token == grant.token.get()
}

fn not_held(claim: &Claim) -> Error {
    Error::NotHeld { name: claim.name.clone() }
}

/// A key that is not ours leads to no claim.
fn seq_of(grant: &Grant) -> i64 {
    grant.key.as_slice().try_into().map_or(-1, i64::from_be_bytes)
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

/// SQLite's integers are signed.
fn int(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn unsigned(row: &Row<'_>, column: usize) -> Sql<u64> {
    row.get::<_, i64>(column).map(|value| u64::try_from(value).unwrap_or(0))
}

fn optional(row: &Row<'_>, column: usize) -> Sql<Option<u64>> {
    Ok(row.get::<_, Option<i64>>(column)?.map(|value| u64::try_from(value).unwrap_or(0)))
}

fn id_at(row: &Row<'_>, column: usize) -> Sql<ClaimId> {
    row.get(column).map(|bytes| ClaimId::from_bits(u128::from_be_bytes(bytes)))
}

fn written(mode: Mode) -> std::borrow::Cow<'static, str> {
    match mode {
        Mode::Exclusive => "exclusive".into(),
        Mode::Shared => "shared".into(),
        Mode::Permits { take, limit } => format!("{take}/{limit}").into(),
    }
}

fn mode_at(row: &Row<'_>, column: usize) -> Sql<Mode> {
    let permits = |text: &str| {
        let (take, limit) = text.split_once('/')?;
        Some(Mode::Permits { take: take.parse().ok()?, limit: limit.parse().ok()? })
    };
    match row.get_ref(column)?.as_str()? {
        "exclusive" => Ok(Mode::Exclusive),
        "shared" => Ok(Mode::Shared),
        other => permits(other).ok_or_else(|| {
            let error = Error::invalid("mode", other, "it is none of this version");
            unreadable(column, Type::Text, error)
        }),
    }
}

fn unreadable(column: usize, kind: Type, error: Error) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(column, kind, Box::new(error))
}
