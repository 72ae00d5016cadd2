//! What the verbs do to the rows of a name, inside one transaction.
//!
//! Every verb first *settles* the name: lapsed holders go, and waiters are admitted in order until
//! one is refused. That and the other steps they share are in `steps`.

use std::collections::HashMap;
use std::time::Duration;

use rusqlite::types::Type;
use rusqlite::{OptionalExtension, Row, params};

use super::inbox::Letter;
use super::rows::{ClaimRow, id_at, int, mode_at, optional, seq_of, unreadable, unsigned};
use super::steps::{Place, Queue, is_held_by, not_held};
use super::store::{Post, Sql, Transaction};
use crate::clock::{Moment, nanos, wall_micros};
use crate::engine::common::admission::{Tally, clash};
use crate::engine::{
    Amend, Break, Cell, Claim, Grant, Holder, LockState, Mode, Scope, Swap, Version, Waiter,
};
use crate::error::{Error, LossReason, Result};
use crate::name::{Name, Note};
use crate::token::Token;

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

    /// The row keeps its place, its token and its lease; everything that says whose it is changes.
    pub(super) fn adopt(
        &mut self,
        claim: &Claim,
        grant: &Grant,
        successor: &Claim,
    ) -> Sql<Result<Grant>> {
        if self.withdrawn.contains(successor.id) {
            return Ok(Err(not_held(successor)));
        }
        if self.held(successor, grant)?.is_some() {
            // A repetition.
            return Ok(Ok(grant.clone()));
        }
        if self.held(claim, grant)?.is_none() {
            return Ok(Err(Error::lost(&claim.name, LossReason::Forgotten)));
        }
        self.db
            .prepare_cached(
                "UPDATE lock SET id = ?3, detached = ?4, process = ?5, inbox = ?6, by = ?7,
                 note = ?8 WHERE name = ?1 AND seq = ?2",
            )?
            .execute(params![
                claim.name.as_str(),
                seq_of(grant),
                successor.id.to_bits().to_be_bytes(),
                successor.detachable,
                self.store.processes.recorded(),
                self.store.inbox.name(),
                &*successor.note.by,
                &*successor.note.text,
            ])?;
        self.changed = true;
        self.settle(&claim.name)?;
        self.tell_watchers(&claim.name)?;
        Ok(Ok(grant.clone()))
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
