//! The steps that the verbs share: settling a name, admitting waiters, removing dead claims, waking
//! the next waiter.
//!
//! Settling reads the holders and the first waiters only, however many wait.

use std::time::Duration;

use rusqlite::{OptionalExtension, params};

use super::RECHECK;
use super::inbox::Message;
use super::record::{ClaimRow, id_at, int, optional, select_claims, seq_of, unsigned, written};
use super::store::{AfterCommit, SqlResult, Transaction};
use crate::clock::{nanos, wall_micros};
use crate::engine::common::admission::Tally;
use crate::engine::{Claim, Grant, Mode, drift};
use crate::error::{Error, LossReason};
use crate::name::Name;
use crate::token::Token;

/// An unused name whose last token is this old is forgotten: no new token is below the wall clock,
/// which has long passed that token.
const IDLE_MICROS: u64 = 7 * 86_400 * 1_000_000;
/// Smaller tokens come from a caller that chooses them itself; such a fence is kept for ever.
const CLOCK_TOKENS_FROM: u64 = 1_000_000_000_000_000;
/// One in `SWEEP_ONE_IN` new names triggers a sweep of `SWEEP_NAMES` old ones: on average two old
/// names for each new one.
const SWEEP_ONE_IN: u32 = 64;
const SWEEP_NAMES: i64 = 128;

/// A waiter without a heartbeat for this long is gone, unless its process is known to be alive.
const WAITER_TIMEOUT: Duration = Duration::from_secs(60);
/// A waiting client sends a heartbeat at least this often.
const HEARTBEAT: Duration = Duration::from_secs(20);
/// The sweep also removes waiters without a heartbeat for this long.
const SWEEP_WAITERS_AFTER: Duration = Duration::from_secs(86_400);

/// A name after it was settled.
pub(super) struct LockQueue {
    /// `None`: the name has no row of its own yet.
    pub(super) fence: Option<u64>,
    /// There may be watchers.
    pub(super) watched: bool,
    pub(super) tally: Tally,
    pub(super) holders: Vec<ClaimRow>,
    /// The first waiter that is not admitted.
    pub(super) first_waiter: Option<ClaimRow>,
}

impl LockQueue {
    pub(super) fn mode_in_use(&self) -> Option<Mode> {
        self.holders.first().or(self.first_waiter.as_ref()).map(|claim| claim.mode)
    }

    /// Whether some of the holders are only admitted now.
    pub(super) fn has_newly_admitted(&self) -> bool {
        self.holders.last().is_some_and(|last| last.expires.is_none())
    }

    pub(super) fn last_seq(&self) -> i64 {
        self.first_waiter.as_ref().or(self.holders.last()).map_or(0, |claim| claim.seq)
    }
}

/// Where a claim waits.
pub(super) struct Position {
    /// The waiter before it. `None` if there are only holders before it.
    pub(super) before: Option<ClaimRow>,
    /// Its last heartbeat.
    pub(super) seen: Option<u64>,
}

/// The steps the verbs share.
impl Transaction<'_> {
    /// Removes the holders whose lease is over and the first waiters that are gone, and admits
    /// waiters, in order, while they fit behind the rest.
    pub(super) fn settle(&mut self, name: &Name) -> SqlResult<LockQueue> {
        let (mut queue, lapsed) = self.read_queue(name)?;
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

    /// The queue of a name as it is once settled, and the claims that settling removes.
    pub(super) fn read_queue(&self, name: &Name) -> SqlResult<(LockQueue, Vec<ClaimRow>)> {
        let (mut fence, mut watched, mut tally) = (None, true, Tally::default());
        let (mut holders, mut first_waiter, mut lapsed) =
            (Vec::<ClaimRow>::new(), None, Vec::new());
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
                Some(expires) if !self.lease_runs(expires, claim.ttl) => {
                    lapsed.push(claim);
                    continue;
                }
                None if self.has_timed_out(claim.seen, &claim.process) => {
                    lapsed.push(claim);
                    continue;
                }
                None if !tally.admits(claim.mode) => {
                    first_waiter = Some(claim);
                    break;
                }
                _ => {}
            }
            tally.add(claim.mode);
            holders.push(claim);
        }
        Ok((LockQueue { fence, watched, tally, holders, first_waiter }, lapsed))
    }

    /// Whether a lease still runs. A lease that ends more than one ttl from now was written before
    /// the machine booted, when its clock showed more.
    pub(super) fn lease_runs(&self, expires: u64, ttl: u64) -> bool {
        self.now < expires && expires <= self.now.saturating_add(ttl)
    }

    /// Whether a waiter is gone, as far as its heartbeats show.
    pub(super) fn has_timed_out(&self, seen: Option<u64>, process: &str) -> bool {
        match seen.unwrap_or(0) {
            // It was written before the machine booted.
            seen if seen > self.now => true,
            seen => {
                self.now - seen > nanos(WAITER_TIMEOUT) && !self.store.processes.is_alive(process)
            }
        }
    }

    pub(super) fn heartbeat_is_due(&self, seen: Option<u64>) -> bool {
        self.now.saturating_sub(seen.unwrap_or(0)) >= nanos(HEARTBEAT)
    }

    /// One heartbeat covers all waiters of a client for the name, because they live and die
    /// together. So their number does not change how often they write.
    pub(super) fn heartbeat(&mut self, name: &Name, seen: Option<u64>) -> SqlResult<()> {
        if !self.heartbeat_is_due(seen) {
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

    /// Grants the lock to those among `holders` that were waiting until now, and notifies them.
    pub(super) fn admit(&mut self, name: &Name, queue: &mut LockQueue) -> SqlResult<()> {
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
            self.after_commit.push((held.inbox.clone(), AfterCommit::Send(Message::Look(held.id))));
        }
        // The new first waiter watched only the waiter before it, and has to watch all holders now.
        // A single holder it finds by its own recheck, unless the lease is too short for that.
        let short = queue.holders.iter().any(|held| held.ttl < nanos(RECHECK));
        if let Some(first) =
            queue.first_waiter.as_ref().filter(|_| short || queue.holders.len() > 1)
        {
            self.after_commit
                .push((first.inbox.clone(), AfterCommit::Send(Message::Look(first.id))));
        }
        self.changed = true;
        self.set_fence(name, queue.fence, fence)?;
        queue.fence = Some(fence);
        Ok(())
    }

    pub(super) fn set_fence(
        &mut self,
        name: &Name,
        before: Option<u64>,
        fence: u64,
    ) -> SqlResult<()> {
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

    /// Continues where the last sweep of any process ended.
    pub(super) fn sweep_idle_names(&mut self, older_than: u64) -> SqlResult<()> {
        let from: String = self.db.query_row("SELECT swept FROM home", [], |row| row.get(0))?;
        let last: Option<String> = self.db.query_row(
            "SELECT max(name) FROM (SELECT name FROM lock WHERE name > ?1 ORDER BY name LIMIT ?2)",
            params![from, SWEEP_NAMES],
            |row| row.get(0),
        )?;
        if let Some(last) = &last {
            // Lapsed claims are removed by the next request for the name, but an unused name gets
            // no request.
            self.db.execute(
                "DELETE FROM lock WHERE seq > 0 AND name > ?1 AND name <= ?2 AND CASE
                 WHEN expires IS NULL THEN seen > ?3 OR seen < ?4
                 ELSE expires <= ?3 OR expires - ttl > ?3 END",
                params![
                    from,
                    last,
                    int(self.now),
                    int(self.now.saturating_sub(nanos(SWEEP_WAITERS_AFTER)))
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

    pub(super) fn insert_holder(&mut self, claim: &Claim, queue: &LockQueue) -> SqlResult<Grant> {
        let seq = queue.last_seq() + 1;
        let token = next_token(queue.fence.unwrap_or(0), claim.floor.map(Token::get));
        let expires = self.now.saturating_add(nanos(claim.ttl));
        self.set_fence(&claim.name, queue.fence, token.get())?;
        self.insert(claim, seq, token.get(), Some(expires))?;
        self.tell_watchers(&claim.name)?;
        Ok(self.grant(seq, token, expires, claim.ttl))
    }

    pub(super) fn insert_waiter(&mut self, claim: &Claim) -> SqlResult<i64> {
        let seq = self
            .db
            .prepare_cached("SELECT max(seq) FROM lock WHERE name = ?1")?
            .query_row([claim.name.as_str()], |row| row.get::<_, Option<i64>>(0))?
            .unwrap_or(0)
            + 1;
        self.insert(claim, seq, 0, None).map(|()| seq)
    }

    pub(super) fn insert(
        &mut self,
        claim: &Claim,
        seq: i64,
        token: u64,
        expires: Option<u64>,
    ) -> SqlResult<()> {
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

    pub(super) fn delete(&mut self, name: &Name, seq: i64) -> SqlResult<()> {
        self.changed = true;
        self.db
            .prepare_cached("DELETE FROM lock WHERE name = ?1 AND seq = ?2")?
            .execute(params![name.as_str(), seq])
            .map(|_| ())
    }

    /// The position of the claim, and whether it holds. Reads all claims of the name, so it is used
    /// only by claims that queue, or leave without having held.
    pub(super) fn find(&self, claim: &Claim) -> SqlResult<Option<(i64, bool)>> {
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
    pub(super) fn held(&self, claim: &Claim, grant: &Grant) -> SqlResult<Option<ClaimRow>> {
        let row = self.holding(claim, seq_of(grant))?;
        Ok(row.filter(|row| is_held_by(row, claim, grant)))
    }

    /// The claim's row at `seq`, if it is there and holds the lock.
    pub(super) fn holding(&self, claim: &Claim, seq: i64) -> SqlResult<Option<ClaimRow>> {
        let row = self
            .db
            .prepare_cached(select_claims!("WHERE name = ?1 AND seq = ?2 AND seq > 0"))?
            .query_row(params![claim.name.as_str(), seq], ClaimRow::read)
            .optional()?;
        let runs = |row: &ClaimRow| row.expires.is_some_and(|ends| self.lease_runs(ends, row.ttl));
        Ok(row.filter(|row| row.id == claim.id && runs(row)))
    }

    /// Where the claim waits, if it still waits.
    pub(super) fn position_of(
        &self,
        claim: &Claim,
        seq: i64,
        queue: &LockQueue,
    ) -> SqlResult<Option<Position>> {
        if let Some(first) = queue.first_waiter.as_ref().filter(|first| first.id == claim.id) {
            return Ok(Some(Position { before: None, seen: first.seen }));
        }
        let mut statement = self.db.prepare_cached(select_claims!(
            "WHERE name = ?1 AND seq > 0 AND seq <= ?2 ORDER BY seq DESC LIMIT 2"
        ))?;
        let mut rows = statement.query(params![claim.name.as_str(), seq])?;
        match rows.next()? {
            Some(row) if id_at(row, 2)? == claim.id => {
                let seen = optional(row, 10)?;
                let before = rows.next()?.map(ClaimRow::read).transpose()?;
                Ok(before.map(|before| Position { before: Some(before), seen }))
            }
            _ => Ok(None),
        }
    }

    /// Removes the holders, and the first waiter, whose processes died. Whether there were any.
    pub(super) fn remove_dead(&mut self, name: &Name, queue: &LockQueue) -> SqlResult<bool> {
        let mut any = false;
        for claim in queue.holders.iter().chain(&queue.first_waiter) {
            any |= self.remove_if_dead(name, claim)?;
        }
        Ok(any)
    }

    pub(super) fn is_gone(&self, claim: &ClaimRow) -> bool {
        let dead = || self.store.processes.is_dead(&claim.process);
        match claim.expires {
            // A detached hold outlives its process; a wait does not.
            Some(_) => !claim.detached && dead(),
            None => dead() || self.has_timed_out(claim.seen, &claim.process),
        }
    }

    pub(super) fn remove_if_dead(&mut self, name: &Name, claim: &ClaimRow) -> SqlResult<bool> {
        if !self.is_gone(claim) {
            return Ok(false);
        }
        self.delete(name, claim.seq)?;
        // Its client may be alive, if another process is recorded as the holder.
        let message = match claim.expires {
            Some(_) => Message::Lost(claim.id, LossReason::Forgotten),
            None => Message::Look(claim.id),
        };
        self.after_commit.push((claim.inbox.clone(), AfterCommit::Send(message)));
        self.after_commit.push((claim.inbox.clone(), AfterCommit::RemoveInbox));
        if claim.expires.is_none() {
            self.wake_waiter_after(name, claim.seq)?;
        }
        Ok(true)
    }

    /// Wakes the waiter behind a claim that is gone: it has another claim to watch now.
    pub(super) fn wake_waiter_after(&mut self, name: &Name, seq: i64) -> SqlResult<()> {
        let next = self
            .db
            .prepare_cached(
                "SELECT id, inbox FROM lock WHERE name = ?1 AND seq > ?2 AND expires IS NULL
                 ORDER BY seq LIMIT 1",
            )?
            .query_row(params![name.as_str(), seq], |row| Ok((id_at(row, 0)?, row.get(1)?)))
            .optional()?;
        if let Some((id, inbox)) = next {
            self.after_commit.push((inbox, AfterCommit::Send(Message::Look(id))));
        }
        Ok(())
    }

    pub(super) fn grant_of(&self, held: &ClaimRow) -> Grant {
        let (token, ttl) = (Token::new(held.token), Duration::from_nanos(held.ttl));
        self.grant(held.seq, token, held.expires.unwrap_or(self.now), ttl)
    }

    /// Valid until shortly before it lapses: all processes of the machine share one clock.
    pub(super) fn grant(&self, seq: i64, token: Token, expires: u64, ttl: Duration) -> Grant {
        let valid_until = self.store.moment(expires).saturating_sub(drift(ttl));
        Grant { token, valid_until, key: seq.to_be_bytes().into() }
    }
}

pub(super) fn next_token(fence: u64, floor: Option<u64>) -> Token {
    Token::next(fence, floor.unwrap_or_else(wall_micros))
}

pub(super) fn is_held_by(row: &ClaimRow, claim: &Claim, grant: &Grant) -> bool {
    row.id == claim.id && row.token == grant.token.get()
}

pub(super) fn not_held(claim: &Claim) -> Error {
    Error::NotHeld { name: claim.name.clone() }
}
